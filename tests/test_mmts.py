"""MM-TS: losses, schedules and shifts against loops in float64; the temperatures and margins of the
pairs of a run; the papers' sets on replicas. test_clusters.py has the clusters."""

import math

import common
from contrastive.core.files import read_json, write_json

import pytest
import torch
from safetensors.torch import load_file

import helpers
import mmts
from helpers import (
    few_steps, losses, refused, run_script, steps, unit, write_captions, write_video)

N, D = 7, 5
TINY = (
    "--cpu --workers 0 --clips 64 24 24 --batch-size 32 --num-clusters 12 --image-size 16 "
    "--embed-dim 16 --max-steps 4 --log-every 1 --eval-every 0"
).split()


# ------------------------------------------ losses, schedule and shifts ---------------------------
def per_sample(low, high):
    """(N,) temperatures or margins."""
    return torch.linspace(low, high, N, dtype=torch.float64)


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
    image, text, tau = unit(N, D), unit(N, D, seed=1), per_sample(0.05, 0.25)
    v2t = loop_info_nce(image, text, tau, smoothing)
    t2v = loop_info_nce(text, image, tau, smoothing)
    terms = {}
    loss = mmts.clip_loss(3 * image, text / 2, tau, smoothing, terms=terms)
    assert terms["L_v2t"].item() == pytest.approx(v2t, rel=1e-9)
    assert terms["L_t2v"].item() == pytest.approx(t2v, rel=1e-9)
    assert loss.item() == pytest.approx((v2t + t2v) / 2, rel=1e-9)


def test_max_margin_loss_is_a_loop():
    """Eq. 3: mean over the 2 N (N - 1) pairs that are not positive."""
    image, text, margin = unit(N, D), unit(N, D, seed=1), per_sample(0.05, 0.25)
    means, terms = [], {}
    for anchor, candidates in ((image, text), (text, image)):
        hinges = []
        for i in range(N):
            s = [float(anchor[i] @ c) for c in candidates]
            hinges += [max(0.0, float(margin[i]) - (s[i] - s[j])) for j in range(N) if j != i]
        means.append(sum(hinges) / len(hinges))
    loss = mmts.max_margin_loss(2 * image, text, margin, terms=terms)
    assert loss.item() == pytest.approx(sum(means) / 2, rel=1e-9)
    assert [terms[name].item() for name in ("L_v2t", "L_t2v")] == pytest.approx(means, rel=1e-9)
    assert mmts.max_margin_loss(torch.eye(N), torch.eye(N), 0.9).item() == 0


def test_schedule_at_its_turns():
    turns = [mmts.base_temperature(t, 100, 0.04) for t in (0, 50, 100)]
    assert turns == pytest.approx([0.02, -0.02, 0.02])
    middle = [mmts.base_temperature(t, 100, 0.04) for t in (25, 75)]
    assert middle == pytest.approx([0, 0], abs=1e-12)
    lowest = mmts.sample_temperature(50, torch.tensor([0.05, 0.1]), 100, 0.04)
    assert lowest.tolist() == pytest.approx([0.03, 0.08])


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--loss max-margin --alpha 0.2 --shift-min 0.1 --shift-max 0.3", (0, 0.4)),
        ("--no-shifts --tau 0.07", (0.03, 0.11)),
        ("--no-shifts --tau 0.07 --periods 0.25", (0.07, 0.11)),
        ("--no-schedule", (0.08, 0.12)),
        ("--baseline", (0.1, 0.1)),
    ],
)
def test_range_of_a_run(words, expected):
    assert mmts.range_of_run(mmts.parse_args(words.split())) == pytest.approx(expected)


REFUSED = {
    "--alpha 0.5": "the temperatures of the run, -0.17 .. 0.37, must be above 0",
    "--loss max-margin --alpha 0.5 --shift-min 0.1 --shift-max 0.3": "must be from 0 to below 2",
    # a range of temperatures is none of margins
    "--loss max-margin": "--loss max-margin: add --alpha --shift-min --shift-max, since the",
    "--loss max-margin --no-shifts": "--loss max-margin: add --alpha, since",
    "--recipe epic-kitchens-100 --no-pretrained --loss clip --alpha 0.08":
        "--loss clip: add --shift-min --shift-max, since",
    "--baseline --alpha 0.1": "--alpha: only with --schedule; it would have no effect",
    "--tau 0.07": "--tau: only with --loss clip --no-shifts or --baseline; it would",
    "--baseline --margin 0.1": "--margin: only with --loss max-margin",
    "--baseline --tau-clamp 0.01 0.5": "--tau-clamp: only with --learnable-tau",
    "--baseline --learnable-tau --tau 2": "must start within --tau-clamp 0.01 1.0",
    "--learnable-tau --no-shifts": "a learnt temperature has no schedule and no shifts",
    "--loss max-margin --baseline --margin 2": "the margins of the run, 2 .. 2, must be",
    "--shift-min 0.2 --shift-max 0.1": "--shift-min 0.2: larger than --shift-max 0.1",
    "--clusters none": "--shifts need clusters",
    "--clusters noun --num-clusters 9": "--num-clusters: only with --clusters captions or vision",
}


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_are_refused(words, capsys):
    assert REFUSED[words] in refused(mmts.parse_args, words.split(), capsys)


def test_the_range_is_that_of_a_fork_s_schedule(tmp_path, capsys):
    """From 0.12 at the start down to 0.08 - 1 at the end."""
    fork = helpers.fork(
        mmts, tmp_path, "return shift + base_temperature(step, period, alpha)",
        "return shift - step")
    assert "the temperatures of the run, -0.92 .. 0.12" in refused(fork.parse_args, [], capsys)


def test_the_baseline_is_one_temperature_or_margin():
    args = mmts.parse_args(["--baseline"])
    assert (args.schedule, args.shifts, args.tau) == (False, False, 0.1)
    args = mmts.parse_args(["--baseline", "--dataset", "cc3m"])
    assert (args.schedule, args.shifts, args.tau) == (False, False, 0.01)
    args = mmts.parse_args(["--baseline", "--loss", "max-margin"])
    assert mmts.range_of_run(args) == (0.2, 0.2)
    assert mmts.parse_args(["--baseline", "--schedule"]).schedule  # the command line wins


def test_shift_is_linear_in_the_size():
    sizes = [69_669, 13_708, 2_904]  # Fig. 6
    by_hand = [0.10, (13_708 - 2_904) / (69_669 - 2_904) * 0.05 + 0.05, 0.05]
    assert mmts.cluster_shift(torch.tensor(sizes), 0.05, 0.10).tolist() == pytest.approx(by_hand)


def test_shift_of_clusters_of_one_size_is_the_lowest():
    """The equation has 0 / 0."""
    assert mmts.cluster_shift([4, 4, 4], 0.05, 0.10).tolist() == pytest.approx([0.05] * 3)


# ------------------------------------------ runs --------------------------------------------------
def main(folder, *flags, script=mmts, pictures=False):
    return run_script(script, folder, *flags, base=TINY, pictures=pictures)


def few(folder, *flags):
    return few_steps(mmts, folder, *flags, base=TINY)


def moving_emoji():
    return common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)


@pytest.mark.parametrize(
    "words, name, low, high",
    [
        ("--shift-min 0.05 --shift-max 0.2", "tau", 0.05, 0.2),
        ("--shift-min 0.05 --shift-max 0.2 --loss max-margin", "margin", 0.05, 0.2),
        ("--no-shifts --tau 0.07", "tau", 0.07, 0.07),
    ],
)
def test_the_logged_mean_is_the_arithmetic_of_the_flags(words, name, low, high, tmp_path):
    """All 64 clips in a batch, clusters by verb: each step has all of them."""
    flags = f"--batch-size 64 --clusters verb --alpha 0.06 --periods 1.25 --max-steps 5 {words}"
    rows = few(tmp_path / "a", *flags.split())
    sizes = torch.tensor(read_json(tmp_path / "a" / "clusters.json")["sizes"])
    shift = mmts.cluster_shift(sizes, low, high)
    mean = (shift * sizes).sum().item() / 64
    assert low - 1e-6 <= mean <= high + 1e-6
    for row, swing in zip(rows, [0.03, 0, -0.03, 0, 0.03], strict=True):
        assert row[name] == pytest.approx(mean + swing, abs=1e-6)
        assert row["loss"] == pytest.approx((row["L_v2t"] + row["L_t2v"]) / 2, rel=1e-5)


def test_a_cluster_file_decides(tmp_path):
    train = moving_emoji()
    verbs, names, file = train.column("verb"), train.names("verb"), tmp_path / "verbs.json"
    write_json(file, {train.key(i): names[v] for i, v in enumerate(verbs)})
    by_verb = [row["loss"] for row in few(tmp_path / "verb", "--clusters", "verb")]
    by_file = [row["loss"] for row in few(tmp_path / "file", "--clusters", file)]
    assert by_verb == by_file
    write_json(file, {train.key(i): names[v] for i, v in enumerate(verbs[1:])})
    shifted = few(tmp_path / "shifted", "--clusters", file, "--max-steps", 2)
    assert [row["loss"] for row in shifted] != by_verb[:2]


def test_a_resumed_run_has_its_clusters_without_the_file(tmp_path):
    train, file, folder = moving_emoji(), tmp_path / "clusters.json", tmp_path / "run"
    write_json(file, {train.key(i): i % 3 for i in range(64)})
    main(folder, "--clusters", file, "--max-steps", 2)
    before = (folder / "clusters.json").read_bytes()
    file.unlink()
    mmts.main(mmts.parse_args(["--resume", str(folder), "--max-steps", "3"]))
    assert len(losses(folder)) == 3
    assert (folder / "clusters.json").read_bytes() == before


def test_examples_without_a_cluster_count_as_of_the_smallest(tmp_path, capsys):
    train, file = moving_emoji(), tmp_path / "c.json"
    write_json(file, {train.key(i): i % 3 for i in range(0, 64, 2)})
    flags = ["--clusters", file, "--batch-size", 64, "--no-schedule"]
    for row in few(tmp_path / "r", *flags):
        assert row["not_in_clusters"] == 32  # of the others 11, 11 and 10
        assert row["tau"] == pytest.approx((22 * 0.12 + 42 * 0.08) / 64)
    assert " 32 without a cluster are treated as in the smallest" in capsys.readouterr().out


def test_tau_is_that_of_the_caption_that_was_encoded(tmp_path, monkeypatch):
    """With bad images that others replace, and at last with captions that are in no cluster."""
    csv = write_captions(tmp_path / "set", 60)
    images = sorted(p for p in (tmp_path / "set").iterdir() if p != csv)
    for path in images[3:6]:
        path.write_bytes(b"no image")
    batches, shifts = [], []  # the captions of each step, and what sample_temperature got
    pick, sample_temperature = common.pick, mmts.sample_temperature

    def watched_pick(captions, draws):
        batches.append(pick(captions, draws))
        return batches[-1]

    def watched_temperature(step, shift, period, alpha):
        shifts.append(shift)
        return sample_temperature(step, shift, period, alpha)

    monkeypatch.setattr(common, "pick", watched_pick)
    monkeypatch.setattr(mmts, "sample_temperature", watched_temperature)
    flags = ["--dataset", csv, "--batch-size", 15, "--max-bad-fraction", 0.2]
    log = few(tmp_path / "a", *flags)
    assert (tmp_path / "a" / "bad_samples.txt").exists()
    assert not any(row["not_in_clusters"] for row in log)

    sizes = read_json(tmp_path / "a/clusters.json")["sizes"]
    tensors = load_file(tmp_path / "a/clusters.safetensors")
    cluster = dict(zip(tensors["ids"].tolist(), tensors["labels"].tolist(), strict=True))
    of_batches = [s for s in shifts if torch.is_tensor(s) and s.shape == (15,)]
    assert len(of_batches) == 4
    for captions, shift in zip(batches, of_batches, strict=True):
        K_c = [sizes[cluster[common.key_hash(caption)]] for caption in captions]
        shares = [(size - sizes[-1]) / (sizes[0] - sizes[-1]) for size in K_c]
        assert shift.tolist() == pytest.approx([0.08 + 0.04 * share for share in shares])

    monkeypatch.setattr(common, "pick", lambda *a: [f"{text} new" for text in pick(*a)])
    log = few(tmp_path / "b", *flags, "--max-steps", 2)
    assert [row["not_in_clusters"] for row in log] == [15, 15]


def test_a_fork_s_temperature_is_in_the_loss_and_in_figure_3(tmp_path):
    fork = helpers.fork(
        mmts,
        tmp_path,
        "return shift + base_temperature(step, period, alpha)",
        "return shift + step / 100",
    )
    main(tmp_path / "a", script=fork, pictures=True)
    for k, row in enumerate(steps(tmp_path / "a")):
        assert 0.08 - 1e-6 <= row["tau"] - k / 100 <= 0.12 + 1e-6
    curves = load_file(tmp_path / "a" / "temperatures.safetensors")
    assert curves["steps"].tolist() == [0, 1, 2, 3, 4]
    for cluster, shift in ((0, 0.12), (-1, 0.08)):
        expected = [shift + t / 100 for t in range(5)]
        assert curves["values"][:, cluster].tolist() == pytest.approx(expected, abs=1e-6)
    pictures = {"temperatures.png", "distribution.png", "tsne.png", "clusters.png"}
    assert pictures <= {path.name for path in (tmp_path / "a").iterdir()}


def test_pictures_of_clusters_leave_out_what_cannot_be_read(tmp_path):
    csv = write_captions(tmp_path / "set", 60)
    for path in sorted((tmp_path / "set").glob("*.png"))[::2]:
        path.write_bytes(b"no image")
    flags = ["--dataset", csv, "--batch-size", 15, "--max-bad-fraction", 1]
    few(tmp_path / "a", *flags, "--max-steps", 1)
    examples = read_json(tmp_path / "a" / "clusters.json")["examples"]
    shown = [number for example in examples for number in example.get("pictured", [])]
    tensors = load_file(tmp_path / "a" / "clusters.safetensors")
    assert 0 < len(shown) == len(tensors["jpeg_ends"]) < 9


# ------------------------------------------ the papers' sets --------------------------------------
SMALL_TOWERS = (
    "--image-encoder small --text-encoder small --no-pretrained --image-stats half "
    "--mixed-precision no --frames 2"
).split()


def test_epic_kitchens_with_real_clips(tmp_path, monkeypatch):
    """A replica of its files: captions by relevancy, shifts by the clip's noun, MIR at the end."""
    import test_epic

    for split in ("train", "test"):
        test_epic.write_annotations(tmp_path, split)
    write_video(tmp_path / "videos" / "P01_01.MP4", range(225), fps=5)
    write_video(tmp_path / "videos" / "P02_03.MP4", range(30), fps=5)
    batches, pick = [], common.pick

    def watched_pick(captions, draws):
        batches.append(captions)
        return pick(captions, draws)

    monkeypatch.setattr(common, "pick", watched_pick)
    folders = ["--data-dir", tmp_path, "--video-dir", tmp_path / "videos"]
    flags = "--dataset epic-kitchens-100 --batch-size 6 --max-steps 3 --alpha 0".split()
    summary = main(tmp_path / "run", *flags, *folders, *SMALL_TOWERS)
    assert "mir" in summary["test"]["epic-kitchens-100"]
    assert read_json(tmp_path / "run" / "clusters.json")["sizes"] == [5, 1]
    # five clips of one noun, one of another
    margins = [row["margin"] for row in steps(tmp_path / "run")]
    assert margins == [pytest.approx((5 * 0.3 + 0.17) / 6)] * 3
    assert len(batches) == 3
    captions = {tuple(sorted(texts[0] for texts in batch)) for batch in batches}
    assert len(captions) > 1  # each epoch draws
