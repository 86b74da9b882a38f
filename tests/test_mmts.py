"""MM-TS: losses, schedules and shifts against loops in float64; temperatures and margins of pairs.

test_clusters.py has the clusters, test_epic.py a run on EPIC-KITCHENS-100."""

import math

import common
from contrastive.core.files import read_json, write_json

import pytest
import torch
from safetensors.torch import load_file

import mmts
from helpers import few_steps, fork, losses, refused, run_script, unit, write_captions

N, D = 7, 5
TINY = (
    "--cpu --workers 0 --clips 64 24 24 --batch-size 32 --num-clusters 12 --image-size 16 "
    "--embed-dim 16 --max-steps 4 --log-every 1 --eval-every 0").split()


# ------------------------------------------ losses, schedule and shifts ---------------------------
IMAGE, TEXT = unit(N, D), unit(N, D, seed=1)
PER_ANCHOR = torch.linspace(0.05, 0.25, N, dtype=torch.float64)  # temperatures or margins


def loop_info_nce(anchor, candidates, smoothing):
    """Eqs. 10, 11 over Python floats, with the temperature of the anchor."""
    total = 0.0
    for i in range(N):
        logits = [float(anchor[i] @ c) / float(PER_ANCHOR[i]) for c in candidates]
        log_z = math.log(sum(math.exp(x) for x in logits))
        total += log_z - (1 - smoothing) * logits[i] - smoothing * sum(logits) / N
    return total / N


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_clip_loss_is_a_loop_with_the_anchor_s_temperature_both_ways(smoothing):
    v2t = loop_info_nce(IMAGE, TEXT, smoothing)
    t2v = loop_info_nce(TEXT, IMAGE, smoothing)
    terms = {}
    loss = mmts.clip_loss(3 * IMAGE, TEXT / 2, PER_ANCHOR, smoothing, terms=terms)
    assert [terms["L_v2t"].item(), terms["L_t2v"].item()] == pytest.approx([v2t, t2v], rel=1e-9)
    assert loss.item() == pytest.approx((v2t + t2v) / 2, rel=1e-9)


def loop_max_margin(anchor, candidates):
    """Eq. 3: mean over the N (N - 1) pairs that are not positive."""
    total = 0.0
    for i in range(N):
        s = [float(anchor[i] @ c) for c in candidates]
        for j in range(N):
            if j != i:
                total += max(0.0, float(PER_ANCHOR[i]) - (s[i] - s[j]))
    return total / (N * (N - 1))


def test_max_margin_loss_is_a_loop():
    v2t, t2v = loop_max_margin(IMAGE, TEXT), loop_max_margin(TEXT, IMAGE)
    terms = {}
    loss = mmts.max_margin_loss(2 * IMAGE, TEXT, PER_ANCHOR, terms=terms)
    assert [terms["L_v2t"].item(), terms["L_t2v"].item()] == pytest.approx([v2t, t2v], rel=1e-9)
    assert loss.item() == pytest.approx((v2t + t2v) / 2, rel=1e-9)


def test_schedule_at_its_turns():
    turns = [mmts.base_temperature(t, 100, 0.04) for t in (0, 25, 50, 75, 100)]
    assert turns == pytest.approx([0.02, 0, -0.02, 0, 0.02], abs=1e-12)


def test_a_sample_has_the_schedule_and_its_shift():
    tau = mmts.sample_temperature(50, torch.tensor([0.05, 0.1]), 100, 0.04)
    assert tau.tolist() == pytest.approx([0.03, 0.08])


def test_shift_is_linear_in_the_size():
    sizes = torch.tensor([69_669, 13_708, 2_904])  # Fig. 6
    middle = (13_708 - 2_904) / (69_669 - 2_904) * 0.05 + 0.05
    assert mmts.cluster_shift(sizes, 0.05, 0.10).tolist() == pytest.approx([0.10, middle, 0.05])


def test_shift_of_clusters_of_one_size_is_the_lowest():
    """The equation has 0 / 0."""
    assert mmts.cluster_shift([4, 4, 4], 0.05, 0.10).tolist() == pytest.approx([0.05] * 3)


@pytest.mark.parametrize("words, expected", [
    ("--loss max-margin --alpha 0.2 --shift-min 0.1 --shift-max 0.3", (0, 0.4)),
    ("--no-shifts --tau 0.07", (0.03, 0.11)),
    ("--no-shifts --tau 0.07 --periods 0.25", (0.07, 0.11)),
    ("--no-schedule", (0.08, 0.12)),
    ("--baseline", (0.1, 0.1)),
    ("--baseline --loss max-margin", (0.2, 0.2))])
def test_range_of_a_run(words, expected):
    assert mmts.range_of_run(mmts.parse_args(words.split())) == pytest.approx(expected)


def test_range_is_that_of_a_fork_s_schedule(tmp_path, capsys):
    """From 0.12 at the start down to 0.08 - 1 at the end."""
    temperature = "return shift + base_temperature(step, period, alpha)"
    own = fork(mmts, tmp_path, temperature, "return shift - step")
    assert "the temperatures of the run, -0.92 .. 0.12" in refused(own.parse_args, [], capsys)


# ------------------------------------------ runs --------------------------------------------------
def few(folder, *flags):
    return few_steps(mmts, folder, *flags, base=TINY)


@pytest.mark.parametrize("words, name, low, high", [
    ("--shift-min 0.05 --shift-max 0.2", "tau", 0.05, 0.2),
    ("--shift-min 0.05 --shift-max 0.2 --loss max-margin", "margin", 0.05, 0.2),
    ("--no-shifts --tau 0.07", "tau", 0.07, 0.07)])
def test_the_logged_mean_is_the_arithmetic_of_the_flags(  # noqa: PLR0917
        words, name, low, high, tmp_path):
    """All 64 clips in a batch, clusters by verb: each step has all of them."""
    flags = f"--batch-size 64 --clusters verb --alpha 0.06 --periods 1.25 --max-steps 5 {words}"
    log = few(tmp_path / "a", *flags.split())
    sizes = torch.tensor(read_json(tmp_path / "a" / "clusters.json")["sizes"])
    mean = (mmts.cluster_shift(sizes, low, high) * sizes).sum().item() / 64
    for row, swing in zip(log, [0.03, 0, -0.03, 0, 0.03], strict=True):
        assert row[name] == pytest.approx(mean + swing, abs=1e-6)
        assert row["loss"] == pytest.approx((row["L_v2t"] + row["L_t2v"]) / 2, rel=1e-5)


@pytest.fixture(scope="module")
def train():
    """The training split of TINY."""
    return common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)


def test_a_cluster_file_decides(train, tmp_path):
    verbs, names, file = train.column("verb"), train.names("verb"), tmp_path / "verbs.json"
    # in another order than the data: keys count
    write_json(file, {train.key(i): names[verbs[i]] for i in reversed(range(64))})
    few(tmp_path / "verb", "--clusters", "verb")
    few(tmp_path / "file", "--clusters", file)
    write_json(file, {train.key(i): names[verb] for i, verb in enumerate(verbs[1:])})
    few(tmp_path / "shifted", "--clusters", file)
    assert losses(tmp_path / "verb") == losses(tmp_path / "file") != losses(tmp_path / "shifted")


def test_a_resumed_run_has_its_clusters_without_the_file(train, tmp_path):
    file, folder = tmp_path / "clusters.json", tmp_path / "run"
    write_json(file, {train.key(i): i % 3 for i in range(64)})
    run_script(mmts, folder, "--clusters", file, "--max-steps", 2, base=TINY)
    before = (folder / "clusters.json").read_bytes()
    file.unlink()
    mmts.main(mmts.parse_args(["--resume", str(folder), "--max-steps", "3"]))
    assert len(losses(folder)) == 3
    assert (folder / "clusters.json").read_bytes() == before


def test_examples_without_a_cluster_count_as_of_the_smallest(train, tmp_path):
    file = tmp_path / "c.json"
    write_json(file, {train.key(i): i % 3 for i in range(0, 64, 2)})
    flags = ["--clusters", file, "--batch-size", 64, "--no-schedule"]
    for row in few(tmp_path / "r", *flags):
        assert row["not_in_clusters"] == 32  # of the others 11, 11 and 10
        assert row["tau"] == pytest.approx((22 * 0.12 + 42 * 0.08) / 64)


@pytest.fixture
def with_bad_images(tmp_path):
    """The flags of 60 images, of which three cannot be read and others take their place."""
    csv = write_captions(tmp_path / "set", 60)
    for path in sorted((tmp_path / "set").glob("*.png"))[3:6]:
        path.write_bytes(b"no image")
    return ["--dataset", csv, "--batch-size", 15, "--max-bad-fraction", 0.2]


def test_tau_is_that_of_the_caption_that_was_encoded(with_bad_images, tmp_path, monkeypatch):
    batches, shifts = [], []  # the captions of each step, and what sample_temperature got
    pick, sample_temperature = common.pick, mmts.sample_temperature

    def watched_pick(captions, draws):
        batches.append(pick(captions, draws))
        return batches[-1]

    def watched_temperature(step, shift, period, alpha):
        if torch.is_tensor(shift) and shift.shape == (15,):
            shifts.append(shift)
        return sample_temperature(step, shift, period, alpha)

    monkeypatch.setattr(common, "pick", watched_pick)
    monkeypatch.setattr(mmts, "sample_temperature", watched_temperature)
    few(tmp_path / "a", *with_bad_images)
    assert (tmp_path / "a" / "bad_samples.txt").exists()
    sizes = read_json(tmp_path / "a" / "clusters.json")["sizes"]
    clusters = load_file(tmp_path / "a" / "clusters.safetensors")
    cluster_of = dict(zip(clusters["ids"].tolist(), clusters["labels"].tolist(), strict=True))
    assert len(shifts) == 4
    for captions, shift in zip(batches, shifts, strict=True):
        for caption, found in zip(captions, shift.tolist()):
            size = sizes[cluster_of[common.key_hash(caption)]]
            share = (size - sizes[-1]) / (sizes[0] - sizes[-1])
            assert found == pytest.approx(0.08 + 0.04 * share)


def test_captions_in_no_cluster_are_counted(with_bad_images, tmp_path, monkeypatch):
    pick = common.pick
    monkeypatch.setattr(common, "pick", lambda *a: [f"{text} new" for text in pick(*a)])
    for row in few(tmp_path / "b", *with_bad_images, "--max-steps", 2):
        assert row["not_in_clusters"] == 15


def test_figure_3_has_the_temperatures_of_a_fork(tmp_path):
    temperature = "return shift + base_temperature(step, period, alpha)"
    own = fork(mmts, tmp_path, temperature, "return shift + step / 100")
    run_script(own, tmp_path / "a", base=TINY)
    curves = load_file(tmp_path / "a" / "temperatures.safetensors")
    assert curves["steps"].tolist() == [0, 1, 2, 3, 4]
    for cluster, shift in ((0, 0.12), (-1, 0.08)):
        expected = [shift + step / 100 for step in range(5)]
        assert curves["values"][:, cluster].tolist() == pytest.approx(expected, abs=1e-6)
