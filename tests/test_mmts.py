"""MM-TS: losses, schedules and shifts against loops in float64; whose temperature and margin a run's pairs have; the
papers' sets on replicas. test_clusters.py has the clusters."""

import json
import math
import re
import shutil

import common
from contrastive import figures
from contrastive.engine.processes import UserError

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import helpers
import mmts
from helpers import few_steps, losses, run_script, steps, unit, write_captions, write_rows, write_video
from tools import figures as several

N, D = 7, 5
TINY = ["--cpu", "--clips", "64", "24", "24", "--batch-size", "32", "--num-clusters", "12"]
TINY += ["--image-size", "16", "--embed-dim", "16", "--max-steps", "4", "--log-every", "1", "--eval-every", "0"]


def values(seed=3):
    """(N,) between 0.05 and 0.25."""
    return 0.05 + 0.2 * torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------- losses, schedule and shifts -----------------------------------
def loop_info_nce(anchor, candidates, tau, smoothing):
    """Eqs. 10, 11 over Python floats: tau of the anchor i."""
    total = 0.0
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ c) / float(tau[i]) for c in candidates]
        log_z = math.log(sum(math.exp(x) for x in logits))
        each = [log_z - x for x in logits]
        total += (1 - smoothing) * each[i] + smoothing * sum(each) / len(each)
    return total / len(anchor)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_clip_loss_is_a_loop_with_the_anchor_s_temperature_both_ways(smoothing):
    image, text, tau = unit(N, D), unit(N, D, seed=1), values()
    ways = {"L_v2t": loop_info_nce(image, text, tau, smoothing), "L_t2v": loop_info_nce(text, image, tau, smoothing)}
    terms = mmts.clip_terms(3 * image, text / 2, tau, smoothing)
    assert {k: v.item() for k, v in terms.items()} == pytest.approx(ways, rel=1e-9)
    assert mmts.clip_loss(image, text, tau, smoothing).item() == pytest.approx(sum(ways.values()) / 2, rel=1e-9)
    same = torch.ones(N, D)  # a random guess
    assert mmts.clip_loss(same, same, values(), smoothing).item() == pytest.approx(math.log(N), rel=1e-6)
    logits = image @ text.T / tau[:, None]  # its transpose has the temperatures of the candidates: another loss
    wrong = F.cross_entropy(logits.T, torch.arange(N), label_smoothing=smoothing)
    assert abs(wrong.item() - ways["L_t2v"]) > 1e-3


def test_max_margin_loss_is_a_loop():
    """Eq. 3: mean over the 2 N (N - 1) pairs that are no positives."""
    image, text, margin = unit(N, D), unit(N, D, seed=1), values()
    terms = []
    for anchor, candidates in ((image, text), (text, image)):
        for i in range(N):
            s = [float(anchor[i] @ c) for c in candidates]
            terms += [max(0.0, float(margin[i]) - (s[i] - s[j])) for j in range(N) if j != i]
    assert mmts.max_margin_loss(2 * image, text, margin).item() == pytest.approx(sum(terms) / len(terms), rel=1e-9)
    same, apart = torch.ones(N, D), torch.eye(N)
    assert mmts.max_margin_loss(same, same, values()).item() == pytest.approx(values().mean().item(), rel=1e-5)
    assert mmts.max_margin_loss(apart, apart, 0.9).item() == 0


def test_schedule_at_its_turns():
    assert [mmts.base_temperature(t, 100, 0.04) for t in (0, 50, 100)] == pytest.approx([0.02, -0.02, 0.02])
    assert [mmts.base_temperature(t, 100, 0.04) for t in (25, 75)] == pytest.approx([0, 0], abs=1e-12)
    shift = torch.tensor([0.05, 0.1])
    assert mmts.sample_temperature(50, shift, 100, 0.04).tolist() == pytest.approx([0.03, 0.08])


def test_shift_is_linear_in_the_size():
    sizes = [69_669, 13_708, 2_904]  # Fig. 6
    expected = [(k - 2_904) / (69_669 - 2_904) * (0.10 - 0.05) + 0.05 for k in sizes]
    assert mmts.cluster_shift(torch.tensor(sizes), 0.05, 0.10).tolist() == pytest.approx(expected)
    assert mmts.cluster_shift(sizes, 0.05, 0.10)[[0, 2]].tolist() == pytest.approx([0.10, 0.05])
    assert mmts.cluster_shift([4, 4, 4], 0.05, 0.10).tolist() == pytest.approx([0.05] * 3)  # 0 / 0 in the equation


def test_a_margin_may_reach_zero_and_a_learnt_tau_needs_no_clusters():
    assert mmts.range_of(mmts.parse_args(["--dataset", "youcook2", "--loss", "max-margin"]), 5, 1)[0] == 0
    assert mmts.parse_args(["--no-schedule", "--no-shifts", "--learnable-tau", "--clusters", "none"]).learnable_tau


# ---------------------------------------------------- runs ----------------------------------------------------------
def main(folder, *flags, pictures=False, script=mmts):
    return run_script(script, folder, *flags, base=TINY, pictures=pictures)


def few(folder, *flags):
    return few_steps(mmts, folder, *flags, base=TINY)


@pytest.mark.parametrize("words, name, low, high", [
    ("--shift-min 0.05 --shift-max 0.2", "tau", 0.05, 0.2),
    ("--shift-min 0.05 --shift-max 0.2 --loss max-margin", "margin", 0.05, 0.2),
    ("--no-shifts --tau 0.07", "tau", 0.07, 0.07)])
def test_the_logged_range_is_the_arithmetic_of_the_flags(words, name, low, high, tmp_path):
    """All 64 clips in a batch, verbs for clusters: every step sees the smallest and the largest class."""
    flags = f"--batch-size 64 --clusters verb --alpha 0.06 --periods 1.25 --max-steps 5 {words}".split()
    for row, swing in zip(few(tmp_path / "a", *flags), [0.03, 0, -0.03, 0, 0.03], strict=True):
        assert (row[f"{name}_min"], row[f"{name}_max"]) == pytest.approx((low + swing, high + swing), abs=1e-6)
        assert row[f"{name}_min"] - 1e-6 <= row[f"{name}_mean"] == row[name] <= row[f"{name}_max"] + 1e-6
        assert row["loss"] == pytest.approx((row["L_v2t"] + row["L_t2v"]) / 2, rel=1e-5)


@pytest.mark.parametrize("words, guess", [
    ("", "3.466"), ("--loss max-margin --no-schedule --no-shifts", "0.200"),
    ("--loss max-margin --no-shifts", "0.300")])
def test_the_banner_s_random_guess(words, guess, tmp_path, capsys):
    few(tmp_path / "a", *words.split())
    assert f"random guess loss {guess}" in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    ("", "tau 0.04 .. 0.16 over the run, period 12 steps (ours)"), ("--no-schedule", "tau 0.08 .. 0.12 (ours)"),
    ("--no-shifts --alpha 0.1", "tau 0.05 .. 0.15 over the run, period 12 steps (by flags)"),
    ("--no-schedule --no-shifts", "tau 0.1 .. 0.1"), ("--no-schedule --no-shifts --learnable-tau", "tau 0.1, learnt")])
def test_the_banner_says_of_the_temperature_what_is_used(words, said):
    lines = mmts.banner_lines(None, 60, 12.0, mmts.parse_args(words.split()))
    assert lines["temperature"] == said


def test_a_learnt_tau_moves_within_its_limits(tmp_path):
    main(tmp_path / "a", *"--no-schedule --no-shifts --learnable-tau --clusters none --tau 0.0101".split())
    taus = [r["tau"] for r in steps(tmp_path / "a")]
    assert len(set(taus)) > 1 and min(taus) >= 0.01 - 1e-6 and not (tmp_path / "a" / "clusters.json").exists()
    tau = load_file(tmp_path / "a" / "own.safetensors")["tau.log_tau"].exp().item()
    assert tau == pytest.approx(taus[-1], rel=1e-6)


def test_a_cluster_file_decides_and_is_kept(tmp_path, capsys):
    """A resumed run has its clusters, whatever has become of the file; other flags of clusters are refused."""
    train = common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)
    verbs, names = train.column("verb"), train.names("verb")
    for name, of in (("verbs", verbs), ("turned", np.roll(verbs, 1))):
        (tmp_path / f"{name}.json").write_text(json.dumps({train.key(i): names[v] for i, v in enumerate(of)}))
    verb, file = (few(tmp_path / f"{k}", "--clusters", source, "--max-steps", 2)
                  for k, source in enumerate(("verb", tmp_path / "verbs.json")))
    main(tmp_path / "turned", "--clusters", tmp_path / "turned.json", "--max-steps", 2)
    turned = losses(tmp_path / "turned")
    assert [r["loss"] for r in verb] == [r["loss"] for r in file] and all(a["loss"] != b for a, b in zip(verb, turned))
    (tmp_path / "turned.json").unlink()
    resume = ["--resume", str(tmp_path / "turned")]
    capsys.readouterr()
    for flag in ("--num-clusters 9", "--clusters verb", "--cluster-encoder some/model"):
        words = helpers.refused(mmts.parse_args, [*resume, *flag.split()], capsys)
        assert f"{flag.split()[0]} cannot change" in words
    before = (tmp_path / "turned" / "clusters.json").read_bytes()
    assert mmts.main(mmts.parse_args([*resume, "--max-steps", "3"]))["steps"] == 3
    assert (tmp_path / "turned" / "clusters.json").read_bytes() == before


def test_examples_without_a_cluster_count_as_of_the_smallest(tmp_path, capsys):
    train = common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)
    for name, known in (("half", {train.key(i): i % 3 for i in range(0, 64, 2)}),
                        ("equal", {train.key(i): i % 2 for i in range(64)})):
        (tmp_path / f"{name}.json").write_text(json.dumps(known))
        log = few(tmp_path / name, "--clusters", tmp_path / f"{name}.json", "--batch-size", 64, "--no-schedule")
        said = capsys.readouterr().out
        lost = {"half": 32, "equal": 0}[name]
        assert all(r["not_in_clusters"] == lost and r["tau_min"] == pytest.approx(0.08) for r in log)
        assert (f"left out     {lost} without a cluster are treated as in the smallest" in said) == bool(lost)
        assert all((r["tau_max"] == r["tau_min"]) == (not lost) for r in log)  # equal clusters: the lowest shift


def test_tau_is_that_of_the_caption_that_was_encoded(tmp_path, monkeypatch):
    """With captions from another file, bad images that others replace, and at last captions that are in no cluster."""
    csv = write_captions(tmp_path / "set", 60)
    images = sorted(p for p in (tmp_path / "set").iterdir() if p != csv)
    for path in images[3:6]:
        path.write_bytes(b"no image")
    extra = write_rows(tmp_path / "extra.csv", ["image", "caption"], [(p.name, f"zebra {p.stem}") for p in images])
    drawn, shifts, pick, value = [], [], common.pick, mmts.sample_temperature
    monkeypatch.setattr(common, "pick", lambda *a: (drawn.append(pick(*a)), pick(*a))[1])
    monkeypatch.setattr(mmts, "sample_temperature", lambda t, s, *a: (shifts.append((t, s)), value(t, s, *a))[1])
    flags = ["--dataset", csv, "--batch-size", 15, "--workers", 0, "--max-bad-fraction", 0.2]
    log = few(tmp_path / "a", *flags, "--extra-captions", extra)
    assert (tmp_path / "a" / "bad_samples.txt").exists() and not any(row["not_in_clusters"] for row in log)
    tensors, meta = (load_file(tmp_path / "a" / "clusters.safetensors"),
                     json.loads((tmp_path / "a" / "clusters.json").read_text()))
    place = {number: c for number, c in zip(tensors["ids"].tolist(), tensors["labels"].tolist(), strict=True)}
    low, high = meta["sizes"][-1], meta["sizes"][0]
    found = [(t, s) for t, s in shifts if torch.is_tensor(s) and s.ndim and len(s) == 15]
    assert [t for t, _ in found] == [0, 1, 2, 3] and any("zebra" in c for texts in drawn for c in texts)
    for texts, (_, shift) in zip(drawn, found, strict=True):
        sizes = [meta["sizes"][place[common.key_hash(c)]] for c in texts]
        assert shift.tolist() == pytest.approx([0.08 + 0.04 * (k - low) / (high - low) for k in sizes])
    monkeypatch.setattr(common, "pick", lambda *a: [f"{text} new" for text in pick(*a)])
    assert [row["not_in_clusters"] for row in few(tmp_path / "b", *flags, "--max-steps", 2)] == [15, 15]


def test_streams_cluster_their_first_captions(tmp_path, capsys):
    for k in range(2):
        samples = helpers.tar_samples(range(20 * k, 20 * k + 20), "png", "txt")
        helpers.write_tar(tmp_path / "set" / f"train-{k}.tar", samples)
    flags = ["--dataset", tmp_path / "set", "--streaming", "--batch-size", 8, "--max-steps", 2, "--workers", 0]
    few(tmp_path / "a", *flags, "--eval-datasets", write_captions(tmp_path / "val", 8))
    assert sum(json.loads((tmp_path / "a" / "clusters.json").read_text())["sizes"]) == 40  # of the shard not held out
    assert "clusters: of 40 captions of the stream's start; " in capsys.readouterr().out
    with pytest.raises(UserError, match="--clusters noun: a stream has only captions"):
        few(tmp_path / "b", *flags, "--clusters", "noun")


def test_figure_3_has_a_fork_s_temperature(tmp_path, monkeypatch):
    """The lines of the clusters swing as the script's own sample_temperature does, which the loss has."""
    own = helpers.fork(mmts, tmp_path, "return shift + base_temperature(step, period, alpha)",
                       "return shift + step / 100")
    drawn = []
    monkeypatch.setattr(figures.mmts, "save_figure", lambda *args: drawn.append(args))
    main(tmp_path / "a", script=own, pictures=True)
    for k, row in enumerate(steps(tmp_path / "a")):
        assert 0.08 - 1e-6 <= row["tau_min"] - k / 100 <= row["tau_max"] - k / 100 <= 0.12 + 1e-6
    largest, *_, smallest = helpers.panel(drawn, "(Fig. 3)").lines
    for line, shift in ((largest, 0.12), (smallest, 0.08)):
        drawn_at = dict(zip(line.get_xdata(), line.get_ydata()))
        assert [drawn_at[t] for t in range(5)] == pytest.approx([shift + t / 100 for t in range(5)], abs=1e-6)


# ---------------------------------------------------- the papers' sets ---------------------------------------------
OWN_TOWERS = [*"--image-encoder small --text-encoder small --no-pretrained --image-stats half".split(),
              *"--mixed-precision no --frames 2 --workers 0".split()]


def test_youcook2_with_real_clips(tmp_path, capsys):
    """The annotation file as it is published and three mp4s, with small towers in the recipe's place."""
    said = ["add the red apple", "cut a green pear", "mix the salt", "fry the blue egg"]
    database = {}
    for number, (video, subset) in enumerate((("aa", "training"), ("bb", "training"), ("cc", "validation"))):
        write_video(tmp_path / "videos" / f"{video}.mp4", [4 * number + k for k in range(12)], fps=4)
        segments = [{"id": k, "segment": [k / 2, k / 2 + 1], "sentence": s} for k, s in enumerate(said)]
        database[video] = {"subset": subset, "duration": 3.0, "annotations": segments}
    (tmp_path / "youcookii_annotations_trainval.json").write_text(json.dumps({"database": database}))
    small = [*OWN_TOWERS, *"--batch-size 8 --num-clusters 3 --cluster-encoder tf-idf --max-steps 2".split()]
    flags = ["--dataset", "youcook2", "--data-dir", tmp_path]
    summary = main(tmp_path / "run", *flags, "--video-dir", tmp_path / "videos", *small)
    words = capsys.readouterr().out
    assert "infonce, schedule and shifts (MM-TS)" in words
    assert "tau 0.03 .. 0.12 over the run" in words and "(paper: VAST" in words
    assert summary["test"]["youcook2"]["images"] == 4 and summary["bad_samples"] == 0

    shutil.rmtree(tmp_path / "videos")                                     # clusters need only the words
    several.main(["clusters", "mmts.py", *map(str, flags), "--output-dir", str(tmp_path), "--run-name", "words", *small,
                  "--cpu"])
    found = {p.name: p.read_bytes() for p in (tmp_path / "words").iterdir()}
    pictures = {f"{name}.png" for name in ("temperatures", "distribution", "tsne", "clusters")}
    assert {*found} == pictures | {"clusters.json", "clusters.safetensors"}
    assert found["clusters.safetensors"] == (tmp_path / "run" / "clusters.safetensors").read_bytes()
    assert re.search("^#1 of 3, 4: .*; .*\n#2 of 3, 2: .*\n#3 of 3, 2: ", capsys.readouterr().out, re.M)


def test_epic_kitchens_with_real_clips(tmp_path, capsys, monkeypatch):
    """A replica of its files: captions by relevancy, the shift by the clip's own noun, MIR at the end."""
    import test_epic
    for split in ("train", "test"):
        test_epic.write_annotations(tmp_path, split)
    write_video(tmp_path / "videos" / "P01_01.MP4", range(225), fps=5)
    write_video(tmp_path / "videos" / "P02_03.MP4", range(30), fps=5)
    said, pick = [], common.pick
    monkeypatch.setattr(common, "pick", lambda captions, u: (said.append(captions), pick(captions, u))[1])
    summary = main(tmp_path / "run", "--dataset", "epic-kitchens-100", "--data-dir", tmp_path, "--video-dir",
                   tmp_path / "videos", *OWN_TOWERS, *"--batch-size 6 --max-steps 3 --alpha 0".split())
    assert "clusters     2, by noun; largest 5, smallest 1" in capsys.readouterr().out
    assert "mir" in summary["test"]["epic-kitchens-100"]
    ranges = [(r["margin_min"], r["margin_max"]) for r in steps(tmp_path / "run")]
    assert ranges == [pytest.approx((0.17, 0.3))] * 3
    assert len(said) == 3 and len({tuple(sorted(c[0] for c in batch)) for batch in said}) > 1  # each epoch draws
