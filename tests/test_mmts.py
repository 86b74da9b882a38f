"""MM-TS: losses, schedules and shifts against loops in float64; temperatures and margins of pairs.

test_clusters.py has the clusters, test_epic.py a run on EPIC-KITCHENS-100."""

import common
from contrastive.core.files import read_json, write_json

import pytest
import torch
from safetensors.torch import load_file

import mmts
from helpers import (
    assert_close, few_steps, fork, losses, run_script, unit, write_captions, write_files)

N, D = 7, 5
TINY = (
    "--cpu --workers 0 --clips 64 24 24 --batch-size 32 --num-clusters 12 --image-size 16 "
    "--embed-dim 16 --max-steps 4 --log-every 1 --eval-every 0").split()


# ------------------------------------------ losses, schedule and shifts ---------------------------
IMAGE = unit(N, D)
TEXT = unit(N, D, seed=1)
PER_ANCHOR = torch.linspace(0.05, 0.25, N, dtype=torch.float64)  # temperatures or margins


def loop_info_nce(anchor, candidates, smoothing):
    """Eqs. 10, 11 with the temperature of the anchor."""
    total = 0.0
    for i in range(N):
        logits = candidates @ anchor[i] / PER_ANCHOR[i]
        log_z = logits.exp().sum().log()
        target = (1 - smoothing) * logits[i] + smoothing * logits.mean()
        total += log_z - target
    return total / N


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_clip_loss_is_a_loop_with_the_anchor_s_temperature_both_ways(smoothing):
    L_v2t = loop_info_nce(IMAGE, TEXT, smoothing)
    L_t2v = loop_info_nce(TEXT, IMAGE, smoothing)
    terms = {}
    loss = mmts.clip_loss(3 * IMAGE, TEXT / 2, PER_ANCHOR, smoothing, terms=terms)
    assert_close(terms, {"L_v2t": L_v2t, "L_t2v": L_t2v})
    assert_close(loss, (L_v2t + L_t2v) / 2)


def loop_max_margin(anchor, candidates):
    """Eq. 3: mean over the N (N - 1) pairs that are not positive."""
    total = 0.0
    for i in range(N):
        s = candidates @ anchor[i]
        hinges = (s - s[i] + PER_ANCHOR[i]).clamp(min=0)
        hinges[i] = 0.0
        total += hinges.sum()
    return total / (N * (N - 1))


def test_max_margin_loss_is_a_loop():
    L_v2t, L_t2v = loop_max_margin(IMAGE, TEXT), loop_max_margin(TEXT, IMAGE)
    terms = {}
    loss = mmts.max_margin_loss(2 * IMAGE, TEXT, PER_ANCHOR, terms=terms)
    assert_close(terms, {"L_v2t": L_v2t, "L_t2v": L_t2v})
    assert_close(loss, (L_v2t + L_t2v) / 2)


def test_schedule_at_its_turns():
    turns = [mmts.base_temperature(step, 100, 0.04) for step in (0, 25, 50, 75, 100)]
    assert turns == pytest.approx([0.02, 0, -0.02, 0, 0.02], abs=1e-12)


def test_shift_is_linear_in_the_size():
    sizes = torch.tensor([69_669, 13_708, 2_904])  # Fig. 6
    middle = (13_708 - 2_904) / (69_669 - 2_904) * 0.05 + 0.05
    shifts = mmts.cluster_shift(sizes, 0.05, 0.10)
    assert_close(shifts, torch.tensor([0.10, middle, 0.05]))


def test_shift_of_clusters_of_one_size_is_the_lowest():
    """The equation has 0 / 0."""
    shifts = mmts.cluster_shift([4, 4, 4], 0.05, 0.10)
    assert_close(shifts, torch.full((3,), 0.05))


@pytest.mark.parametrize("words, expected", [
    ("--loss max-margin --alpha 0.2 --shift-min 0.1 --shift-max 0.3", (0, 0.4)),
    ("--no-shifts --tau 0.07", (0.03, 0.11)),
    ("--no-shifts --tau 0.07 --periods 0.25", (0.07, 0.11)),
    ("--no-schedule", (0.08, 0.12)),
    ("--baseline", (0.1, 0.1)),
    ("--baseline --loss max-margin", (0.2, 0.2))])
def test_range_of_a_run(words, expected):
    args = mmts.parse_args(words.split())
    assert mmts.range_of_run(args) == pytest.approx(expected)


# ------------------------------------------ runs --------------------------------------------------
@pytest.mark.parametrize("words, low, high", [
    ("--shift-min 0.05 --shift-max 0.2", 0.05, 0.2), ("--no-shifts --tau 0.07", 0.07, 0.07)])
def test_the_logged_mean_is_the_arithmetic_of_the_flags(words, low, high, tmp_path):
    """All 64 clips in a batch, clusters by verb: each step has all of them."""
    flags = f"--batch-size 64 --clusters verb --alpha 0.06 --periods 1.25 --max-steps 5 {words}"
    log = few_steps(mmts, tmp_path / "run", *flags.split(), base=TINY)
    sizes = torch.tensor(read_json(tmp_path / "run" / "clusters.json")["sizes"])
    shifts = mmts.cluster_shift(sizes, low, high)
    mean = (shifts * sizes).sum().item() / 64
    swings = [0.03, 0, -0.03, 0, 0.03]
    for row, swing in zip(log, swings, strict=True):
        assert row["tau"] == pytest.approx(mean + swing, abs=1e-6)
        terms = row["L_v2t"] + row["L_t2v"]
        assert row["loss"] == pytest.approx(terms / 2, rel=1e-5)


@pytest.fixture(scope="module")
def train():
    """The training split of TINY."""
    return common.load_data("moving-emoji", "train", clips=[64, 24, 24], image_size=16)


def test_a_cluster_file_decides(train, tmp_path):
    verbs = train.column("verb")
    names = train.names("verb")
    clusters = {}
    for i in reversed(range(64)):  # another order than that of the data: keys count
        clusters[train.key(i)] = names[verbs[i]]
    write_json(tmp_path / "verbs.json", clusters)
    few_steps(mmts, tmp_path / "verb", "--clusters", "verb", base=TINY)
    few_steps(mmts, tmp_path / "file", "--clusters", tmp_path / "verbs.json", base=TINY)
    assert losses(tmp_path / "verb") == losses(tmp_path / "file")


def test_a_resumed_run_has_its_clusters_without_the_file(train, tmp_path):
    file, folder = tmp_path / "c.json", tmp_path / "run"
    write_json(file, {train.key(i): i % 3 for i in range(64)})
    run_script(mmts, folder, "--clusters", file, "--max-steps", 2, base=TINY)
    file.unlink()
    mmts.main(mmts.parse_args(["--resume", str(folder), "--max-steps", "3"]))
    assert len(losses(folder)) == 3


def test_examples_without_a_cluster_count_as_of_the_smallest(train, tmp_path):
    file = tmp_path / "c.json"
    write_json(file, {train.key(i): i % 3 for i in range(0, 64, 2)})
    flags = ["--clusters", file, "--batch-size", 64, "--no-schedule"]
    for row in few_steps(mmts, tmp_path / "run", *flags, base=TINY):
        assert row["not_in_clusters"] == 32  # of the others 11, 11 and 10
        assert row["tau"] == pytest.approx((22 * 0.12 + 42 * 0.08) / 64)


def test_tau_is_that_of_the_caption_that_was_encoded(tmp_path, monkeypatch):
    """Of 60 images three cannot be read, and others take their place."""
    data = write_captions(tmp_path / "set", 60)
    write_files(tmp_path / "set", {f"{i:03}.png": "no image" for i in (3, 4, 5)})
    batches, taus = [], []  # captions and temperatures of each step
    pick, clip_loss = common.pick, mmts.clip_loss

    def watched_pick(captions, draws):
        batches.append(pick(captions, draws))
        return batches[-1]

    def watched_loss(image, text, tau, **options):
        taus.append(tau.double())
        return clip_loss(image, text, tau, **options)

    monkeypatch.setattr(common, "pick", watched_pick)
    monkeypatch.setattr(mmts, "clip_loss", watched_loss)
    run, flags = tmp_path / "run", "--batch-size 15 --max-bad-fraction 0.2 --no-schedule".split()
    few_steps(mmts, run, "--dataset", data, *flags, base=TINY)
    assert (run / "bad_samples.txt").exists()
    clusters = load_file(run / "clusters.safetensors")
    sizes = clusters["sizes"]
    cluster_of = dict(zip(clusters["ids"].tolist(), clusters["labels"].tolist()))
    assert len(taus) == 4
    for captions, tau in zip(batches, taus, strict=True):
        keys = [common.key_hash(caption) for caption in captions]
        sizes_of_step = sizes[[cluster_of[key] for key in keys]].double()
        share = (sizes_of_step - sizes[-1]) / (sizes[0] - sizes[-1])
        assert_close(tau, 0.08 + 0.04 * share)


def test_figure_3_has_the_temperatures_of_a_fork(tmp_path):
    temperature = "return shift + base_temperature(step, period, alpha)"
    own = fork(mmts, tmp_path, temperature, "return shift + step / 100")
    run_script(own, tmp_path / "run", base=TINY)
    curves = load_file(tmp_path / "run" / "temperatures.safetensors")
    steps, values = curves["steps"], curves["values"]
    assert steps.tolist() == [0, 1, 2, 3, 4]
    assert_close(values[:, 0], 0.12 + steps / 100)
    assert_close(values[:, -1], 0.08 + steps / 100)
