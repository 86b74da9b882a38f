"""MM-TS: losses, schedules and shifts against loops in float64; whose temperature and margin a run's pairs have; the
papers' sets on replicas. test_clusters.py has the clusters."""

import math

import common
from contrastive import figures
from contrastive.engine.processes import UserError, read_json, write_json

import pytest
import torch
from safetensors.torch import load_file

import helpers
import mmts
from helpers import few_steps, losses, run_script, steps, unit, write_captions, write_rows, write_video
from tools import figures as several

N, D = 7, 5
TINY = ("--cpu --workers 0 --clips 64 24 24 --batch-size 32 --num-clusters 12 --image-size 16 --embed-dim 16 "
        "--max-steps 4 --log-every 1 --eval-every 0").split()


# ---------------------------------------------------- losses, schedule and shifts -----------------------------------
def loop_info_nce(anchor, candidates, tau, smoothing):
    """Eqs. 10, 11 over Python floats: tau of the anchor i."""
    total = 0.0
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ c) / float(tau[i]) for c in candidates]
        log_z = math.log(sum(math.exp(x) for x in logits))
        total += log_z - (1 - smoothing) * logits[i] - smoothing * sum(logits) / len(logits)
    return total / len(anchor)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_clip_loss_is_a_loop_with_the_anchor_s_temperature_both_ways(smoothing):
    image, text, tau = unit(N, D), unit(N, D, seed=1), torch.linspace(0.05, 0.25, N, dtype=torch.float64)
    ways = {"L_v2t": loop_info_nce(image, text, tau, smoothing), "L_t2v": loop_info_nce(text, image, tau, smoothing)}
    terms = mmts.clip_terms(3 * image, text / 2, tau, smoothing)
    assert {k: v.item() for k, v in terms.items()} == pytest.approx(ways, rel=1e-9)
    assert mmts.clip_loss(image, text, tau, smoothing).item() == pytest.approx(sum(ways.values()) / 2, rel=1e-9)


def test_max_margin_loss_is_a_loop():
    """Eq. 3: mean over the 2 N (N - 1) pairs that are no positives."""
    image, text, margin = unit(N, D), unit(N, D, seed=1), torch.linspace(0.05, 0.25, N, dtype=torch.float64)
    terms = []
    for anchor, candidates in ((image, text), (text, image)):
        for i in range(N):
            s = [float(anchor[i] @ c) for c in candidates]
            terms += [max(0.0, float(margin[i]) - (s[i] - s[j])) for j in range(N) if j != i]
    assert mmts.max_margin_loss(2 * image, text, margin).item() == pytest.approx(sum(terms) / len(terms), rel=1e-9)
    assert mmts.max_margin_loss(torch.eye(N), torch.eye(N), 0.9).item() == 0


def test_schedule_at_its_turns():
    assert [mmts.base_temperature(t, 100, 0.04) for t in (0, 50, 100)] == pytest.approx([0.02, -0.02, 0.02])
    assert [mmts.base_temperature(t, 100, 0.04) for t in (25, 75)] == pytest.approx([0, 0], abs=1e-12)
    assert mmts.sample_temperature(50, torch.tensor([0.05, 0.1]), 100, 0.04).tolist() == pytest.approx([0.03, 0.08])
    assert mmts.range_of(mmts.parse_args(["--dataset", "youcook2", "--loss", "max-margin"]), 5, 1) == (0, 0.4)


def test_shift_is_linear_in_the_size():
    sizes = [69_669, 13_708, 2_904]                                        # Fig. 6
    by_hand = [0.10, (13_708 - 2_904) / (69_669 - 2_904) * 0.05 + 0.05, 0.05]
    assert mmts.cluster_shift(torch.tensor(sizes), 0.05, 0.10).tolist() == pytest.approx(by_hand)
    assert mmts.cluster_shift([4, 4, 4], 0.05, 0.10).tolist() == pytest.approx([0.05] * 3)  # 0 / 0 in the equation


# ---------------------------------------------------- runs ----------------------------------------------------------
def main(folder, *flags, script=mmts, pictures=False):
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


def test_a_cluster_file_decides_and_is_kept(tmp_path):
    """A resumed run has its clusters, whatever has become of the file."""
    train = common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)
    verbs, names, file = train.column("verb"), train.names("verb"), tmp_path / "verbs.json"
    write_json(file, {train.key(i): names[v] for i, v in enumerate(verbs)})
    by_verb, by_file = (few(tmp_path / f"{k}", "--clusters", source) for k, source in enumerate(("verb", file)))
    assert [r["loss"] for r in by_verb] == [r["loss"] for r in by_file]
    write_json(file, {train.key(i): names[v] for i, v in enumerate(verbs[1:])})
    main(tmp_path / "turned", "--clusters", file, "--max-steps", 2)
    assert losses(tmp_path / "turned") != [r["loss"] for r in by_verb][:2]
    before = (tmp_path / "turned" / "clusters.json").read_bytes()
    file.unlink()
    mmts.main(mmts.parse_args(["--resume", str(tmp_path / "turned"), "--max-steps", "3"]))
    assert len(losses(tmp_path / "turned")) == 3 and (tmp_path / "turned" / "clusters.json").read_bytes() == before


def test_examples_without_a_cluster_count_as_of_the_smallest(tmp_path, capsys):
    train = common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)
    write_json(tmp_path / "c.json", {train.key(i): i % 3 for i in range(0, 64, 2)})
    for row in few(tmp_path / "r", "--clusters", tmp_path / "c.json", "--batch-size", 64, "--no-schedule"):
        assert row["not_in_clusters"] == 32                                # of the others 11, 11 and 10
        assert row["tau_mean"] == pytest.approx((22 * 0.12 + 42 * 0.08) / 64)
    assert " 32 without a cluster are treated as in the smallest" in capsys.readouterr().out


def test_tau_is_that_of_the_caption_that_was_encoded(tmp_path, monkeypatch):
    """With captions from another file, bad images that others replace, and at last captions that are in no cluster."""
    csv = write_captions(tmp_path / "set", 60)
    images = sorted(p for p in (tmp_path / "set").iterdir() if p != csv)
    for path in images[3:6]:
        path.write_bytes(b"no image")
    extra = write_rows(tmp_path / "extra.csv", ["image", "caption"], [(p.name, f"zebra {p.stem}") for p in images])
    drawn, shifts, pick, value = [], [], common.pick, mmts.sample_temperature
    monkeypatch.setattr(common, "pick", lambda *a: (drawn.append(pick(*a)), pick(*a))[1])
    monkeypatch.setattr(mmts, "sample_temperature", lambda t, s, *a: (shifts.append(s), value(t, s, *a))[1])
    flags = ["--dataset", csv, "--batch-size", 15, "--max-bad-fraction", 0.2]
    log = few(tmp_path / "a", *flags, "--extra-captions", extra)
    assert (tmp_path / "a" / "bad_samples.txt").exists() and not any(row["not_in_clusters"] for row in log)
    sizes, tensors = read_json(tmp_path / "a/clusters.json")["sizes"], load_file(tmp_path / "a/clusters.safetensors")
    place = dict(zip(tensors["ids"].tolist(), tensors["labels"].tolist(), strict=True))
    used = [s for s in shifts if torch.is_tensor(s) and s.shape == (15,)]
    assert len(used) == 4 and any("zebra" in c for texts in drawn for c in texts)
    for texts, shift in zip(drawn, used, strict=True):
        shares = [(sizes[place[common.key_hash(c)]] - sizes[-1]) / (sizes[0] - sizes[-1]) for c in texts]
        assert shift.tolist() == pytest.approx([0.08 + 0.04 * share for share in shares])
    monkeypatch.setattr(common, "pick", lambda *a: [f"{text} new" for text in pick(*a)])
    assert [row["not_in_clusters"] for row in few(tmp_path / "b", *flags, "--max-steps", 2)] == [15, 15]


def test_streams_cluster_their_first_captions(tmp_path):
    for k in range(2):
        samples = helpers.tar_samples(range(20 * k, 20 * k + 20), "png", "txt")
        helpers.write_tar(tmp_path / "set" / f"train-{k}.tar", samples)
    flags = ["--dataset", tmp_path / "set", "--streaming", "--batch-size", 8, "--max-steps", 2]
    few(tmp_path / "a", *flags, "--eval-datasets", write_captions(tmp_path / "val", 8))
    assert sum(read_json(tmp_path / "a" / "clusters.json")["sizes"]) == 40  # of the shard not held out
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
OWN_TOWERS = ("--image-encoder small --text-encoder small --no-pretrained --image-stats half --mixed-precision no "
              "--frames 2").split()


def test_clusters_of_youcook2_and_their_pictures_from_its_words_alone(tmp_path):
    """tools.figures clusters, on the annotation file as it is published: there are no videos."""
    said = enumerate(("add the red apple", "cut a green pear", "mix the salt", "fry the blue egg"))
    segments = [{"id": k, "segment": [k, k + 1], "sentence": words} for k, words in said]
    database = {video: {"subset": subset, "duration": 5.0, "annotations": segments}
                for video, subset in (("aa", "training"), ("bb", "training"), ("cc", "validation"))}
    write_json(tmp_path / "youcookii_annotations_trainval.json", {"database": database})
    flags = ["--cpu", "--data-dir", tmp_path, "--output-dir", tmp_path, "--run-name", "words", *OWN_TOWERS]
    several.main(["clusters", "mmts.py", "--dataset", "youcook2", "--num-clusters", "4", "--cluster-encoder", "tf-idf",
                  *map(str, flags)])
    pictures = {f"{name}.png" for name in ("temperatures", "distribution", "tsne", "clusters")}
    assert {p.name for p in (tmp_path / "words").iterdir()} == pictures | {"clusters.json", "clusters.safetensors"}
    assert read_json(tmp_path / "words" / "clusters.json")["sizes"] == [2] * 4


def test_epic_kitchens_with_real_clips(tmp_path, monkeypatch):
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
    assert "mir" in summary["test"]["epic-kitchens-100"]
    assert read_json(tmp_path / "run" / "clusters.json")["sizes"] == [5, 1]
    ranges = [(r["margin_min"], r["margin_max"]) for r in steps(tmp_path / "run")]
    assert ranges == [pytest.approx((0.17, 0.3))] * 3
    assert len(said) == 3 and len({tuple(sorted(c[0] for c in batch)) for batch in said}) > 1  # each epoch draws
