"""Encoders by name, pooling, layers that run again, weights from files, the model a run leaves.

No hub is reached.
"""

import argparse
import copy
import json
import shutil
import unicodedata

import common
from contrastive import core, encoders, evaluation
from contrastive.encoders.experts import Expert
from contrastive.encoders.image_encoders import IMAGE_ENCODERS, check_image_encoder, encoder_kind
from contrastive.encoders.models import check_text_length, describe_weights, model_of_spec
from contrastive.encoders.texts import Tokenizer, train_wordpiece
from contrastive.encoders.weights import init_from
from contrastive.core.processes import UserError
from contrastive.evaluation.embed import encode_images, encode_texts

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from safetensors.torch import load_file, save_file

import temo
import temperature_schedules as ts
from variants import temo_experts
from helpers import CPU, few_steps, run_script, tiny_model, write_captions

SPEC = dict(
    image_encoder="small",
    text_encoder="small",
    embed_dim=16,
    image_size=32,
    text_length=12,
    text_pooling="mean",
    image_stats="half",
    eval_resize="crop",
)
RUN = ["--cpu", "--workers", "0", "--max-steps", "2", "--batch-size", "16"]
SMALL = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
IMAGENET = encoders.base.STATS["imagenet"]


def built(tokenizer, pretrained=False, weights="", **changes):
    """The model of SPEC, some of its values changed."""
    return model_of_spec(SPEC | changes, tokenizer, pretrained, weights)[0]


def part(state, start):
    return {k: v.contiguous() for k, v in state.items() if k.startswith(start)}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A csv of 120 images and captions."""
    return str(write_captions(tmp_path_factory.mktemp("data"), 120))


# -------------------------------------------- towers by name ------------------------------------
def test_a_clip_as_image_encoder_is_the_text_encoder_too(tiny, data, tmp_path):
    """With the width of its projections.

    What a flag names is kept, and any other encoder leaves the recipe's.
    """
    folder, default = tiny("clip")[0], temo.parse_args([]).text_encoder
    base = [*RUN, "--dataset", data, "--no-pretrained", "--image-size", "32", "--text-length", "12"]
    for k, (image, flags, expected) in enumerate(
        (
            (folder, "", (folder, 16)),
            (folder, "--embed-dim 8", (folder, 8)),
            (folder, "--text-encoder small", (default, 128)),
            ("test_vit", "", (default, 128)),
        )
    ):
        few_steps(temo, tmp_path / f"{k}", *base, "--image-encoder", image, *flags.split())
        args = core.files.read_json(tmp_path / f"{k}" / "args.json")
        assert (args["text_encoder"], args["embed_dim"]) == expected


def test_projections_have_a_bias_if_the_spec_says_so():
    """With the same weights; a spec without the key is that of a model without biases."""
    projections = []
    for changes in ({}, {"projection_bias": True}):
        torch.manual_seed(0)
        projections.append(built(None, text_encoder="", **changes).vision.projection)
    without, with_bias = projections
    assert torch.equal(without.weight, with_bias.weight)
    assert without.bias is None and with_bias.bias.shape == (16,)


def test_a_run_keeps_the_biases_of_its_projections(data, tmp_path):
    run_script(temo, tmp_path / "a", *RUN, "--dataset", data, "--projection-bias")
    model, tokenizer, _ = common.load_model(tmp_path / "a")
    assert core.files.read_json(tmp_path / "a" / "model.json")["projection_bias"]
    assert model.text.projection.bias.abs().max() > 0


@pytest.mark.parametrize(
    "name, entry, reads",
    [
        ("small", "small", "images"),
        ("resnet50.tv_in1k", "*", "images"),
        ("resnet18-cifar", "resnet18-cifar", "images"),
        ("openai/clip-vit-base-patch32", "*/*", "images"),
        ("video_lab/model", "*/*", "images"),
        ("video_vit_base_patch16_clip_224.openai", "video_*", "clips"),
        ("clip_vip:openai/clip-vit-base-patch32", "clip_vip:*", "clips"),
        ("swin3d_b", "swin3d_*", "clips"),
        ("ssb", "ssb", "features"),
        ("regions", "regions", "features"),
    ],
)
def test_a_name_says_what_an_encoder_is(name, entry, reads):
    kind = encoder_kind(name)
    assert kind is IMAGE_ENCODERS[entry] and kind.reads == reads
    check_image_encoder(name)


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("resnet51", "resnet50"),
        ("resnet51.a1_in1k", "resnet50"),
        ("smal", "small"),
        ("video_vit_base_patch16_clip_225", "video_vit_base_patch16_clip_224"),
        ("swin3d_c", "swin3d_b"),
    ],
)
def test_a_name_of_no_encoder_is_refused_with_the_nearest(name, nearest, tmp_path):
    flags = [*RUN, "--image-encoder", name, "--output-dir", str(tmp_path)]
    with pytest.raises(UserError, match=f"^--image-encoder {name}: no .* nearest: .*{nearest}"):
        ts.main(ts.parse_args(flags))


def test_an_encoder_of_the_user_is_an_entry_and_a_function(monkeypatch, tokenizer):
    def mean_colour(name, options):
        layers = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 8)
        return common.Backbone(torch.nn.Sequential(*layers), 8)

    monkeypatch.setitem(common.IMAGE_ENCODERS, "mean", common.EncoderKind(mean_colour))
    check_image_encoder("mean")
    model = built(tokenizer, image_encoder="mean")
    image, _, features = model(torch.randn(2, 3, 32, 32))
    assert image.shape == (2, 16) and features.shape == (2, 8)


@pytest.mark.parametrize(
    "config, positions",
    [
        (T.BertConfig, 40),
        (T.RobertaConfig, 39),  # it counts from the place after its padding
    ],
)
def test_more_tokens_than_positions_are_refused(config, positions, tmp_path):
    sizes = SMALL | dict(vocab_size=50, max_position_embeddings=40, pad_token_id=0)
    T.AutoModel.from_config(config(**sizes)).save_pretrained(tmp_path)
    text = common.TextEncoder(str(tmp_path), 0).eval()
    check_text_length(text, positions)
    ids = torch.full((1, positions), 7)
    text(ids, torch.ones_like(ids))
    with pytest.raises(UserError, match=f"^--text-length {positions + 1}: .* {positions} pos"):
        check_text_length(text, positions + 1)


@pytest.mark.parametrize(
    "name, stats",
    [
        ("small", ((0.5,) * 3,) * 2),
        ("resnet18-cifar", IMAGENET),
        ("vit_tiny_patch16_224", ((0.5,) * 3,) * 2),
        ("mobilenetv3_small_050", IMAGENET),
    ],
)
def test_image_encoders_and_frames(name, stats):
    encoder = common.VisionEncoder(name, 16, pretrained=False, image_size=32).eval()
    clip = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    with torch.no_grad():
        features, pooled = encoder(clip)
        frames = [common.normalize(encoder(clip[:, t])[1]) for t in range(3)]
    assert features.shape == (2, encoder.width) and [*map(tuple, encoder.stats)] == [*stats]
    # meanP: the mean of normalised frame embeddings
    assert torch.allclose(pooled, sum(frames) / 3, atol=1e-5)
    if name == "resnet18-cifar":  # its stem keeps the resolution
        assert encoder.body.forward_features(clip[0]).shape[-2:] == (4, 4)


def test_default_towers_have_no_batchnorm_and_no_dropout(tokenizer):
    model = built(tokenizer)
    assert not encoders.base.batchnorms(model)
    assert not any(isinstance(m, torch.nn.Dropout) for m in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_encoding_leaves_a_model_in_its_mode(tokenizer, training):
    model, transform = model_of_spec(dict(SPEC), tokenizer, False)
    modes, data = [], common.load_data("moving-emoji", "val", clips=(8, 8, 8))
    for tower in (model.vision, model.text):
        tower.register_forward_hook(lambda module, *_: modes.append(module.training))
    calls = (encode_images, data, transform), (encode_texts, tokenizer, ["a", "b"])
    for encode, *inputs in calls:
        encode(model.train(training), *inputs, CPU)
        assert all(m.training == training for m in model.modules())
    assert modes == [False, False]


def test_pads_follow_the_text(tokenizer):
    left_padded = copy.deepcopy(tokenizer.tokenizer)
    left_padded.padding_side = "left"
    ids = Tokenizer(left_padded, 12)(["a", "one number 0123456789"])["input_ids"]
    assert (ids[:, 0] == left_padded.cls_token_id).all() and ids[0, -1] == left_padded.pad_token_id


def test_one_text_is_one_row(tokenizer):
    assert tokenizer("red apple")["input_ids"].tolist() == tokenizer(["red apple"])[
        "input_ids"].tolist()


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_transformers_text_encoder(tiny, tokenizer, kind, pooling):
    folder, reference = tiny(kind)
    encoder = common.TextEncoder(folder, 16, pooling=pooling).eval()
    tokens = tokenizer(["red apple", "a blue bird on a tree"])
    states, keep = reference(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
    expected = states[:, 0] if pooling == "cls" else (states * keep).sum(1) / keep.sum(1)
    assert torch.allclose(encoder(**tokens), encoder.projection(expected), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "t5"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_is_attended_to_by_no_attention(tiny, tokenizer, tmp_path, kind, attention):
    shutil.copytree(tiny(kind)[0], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["attn_implementation"] = attention
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    encoder = common.TextEncoder(str(tmp_path / "model"), 0, pooling="mean").eval()
    assert encoder.body.config._attn_implementation == attention
    alone, beside_a_longer = (
        encoder(**tokenizer(texts))[0] for texts in (["red"], ["red", "a blue bird on a tree"])
    )
    assert torch.allclose(alone, beside_a_longer, atol=1e-5)


def test_the_first_token_of_a_decoder_is_no_embedding(tmp_path, tokenizer):
    """It sees none of the others."""
    sizes = dict(n_embd=24, n_layer=1, n_head=2, n_positions=32)
    T.GPT2Model(T.GPT2Config(vocab_size=len(tokenizer.tokenizer), **sizes)).save_pretrained(
        tmp_path
    )
    decoder = {"text_encoder": str(tmp_path)}
    with pytest.raises(UserError, match="--text-pooling cls: .* give --text-pooling mean"):
        built(tokenizer, text_pooling="cls", **decoder)
    model = built(tokenizer, **decoder).eval()
    red, green = model.text(**tokenizer(["a red apple", "a green pear"]))
    assert not torch.allclose(red, green, atol=1e-4)


STATISTICS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
OTHERS = {"image_mean": [0.7] * 3, "image_std": [0.8] * 3}
FILES_OF_STATISTICS = {  # {file: content}; whether the model has the statistics
    "version 5": ({"processor_config.json": {"image_processor": STATISTICS}}, True),
    "version 4": ({"preprocessor_config.json": STATISTICS}, True),
    "both": (
        {
            "processor_config.json": {"image_processor": STATISTICS},
            "preprocessor_config.json": OTHERS,
        },
        True,
    ),
    "older": (
        {"processor_config.json": {"image_seq_len": 4}, "preprocessor_config.json": STATISTICS},
        True,
    ),
    "none": ({}, False),
}


@pytest.mark.parametrize("name", FILES_OF_STATISTICS)
def test_statistics_of_pixels_are_those_of_the_model_s_files(name, tmp_path, tiny):
    files, has_statistics = FILES_OF_STATISTICS[name]
    shutil.copytree(tiny("vit")[0], tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    for file, content in files.items():
        (tmp_path / "vit" / file).write_text(json.dumps(content))
    encoder = common.VisionEncoder(str(tmp_path / "vit"), 0)
    if has_statistics:
        assert encoder.stats == tuple(map(tuple, STATISTICS.values()))
    else:
        with pytest.raises(UserError, match="^--image-stats encoder: .*vit"):
            print(encoder.stats)


@pytest.mark.parametrize(
    "pair", ["schon schön", "कल काल", "มา มี", "か が", "กา ก่า", "resume résumé"]
)
def test_accents_and_vowel_signs_make_other_words(pair):
    small = Tokenizer(train_wordpiece([pair, "SCHÖN"] * 3), 12)
    first, second = (small([word])["input_ids"].tolist() for word in pair.split())
    assert first != second
    decomposed = unicodedata.normalize("NFD", pair.upper())  # as file names of macOS are
    assert small([pair])["input_ids"].tolist() == small([decomposed])["input_ids"].tolist()


def test_padding_changes_no_text_of_the_small_encoder(tokenizer):
    encoder = common.TextEncoder("small", 16, vocabulary=len(tokenizer.tokenizer)).eval()
    alone, padded = (
        encoder(**tokenizer(texts))[0] for texts in (["red"], ["red", "a blue bird on a tree"])
    )
    assert torch.allclose(alone, padded, atol=1e-5)


def test_clip_keeps_its_own_space(tiny, tokenizer):
    folder, reference = tiny("clip")
    spec = SPEC | dict(image_encoder=folder, text_encoder=folder, image_stats="encoder")
    model, transform = model_of_spec(spec, tokenizer, True)
    clips, tokens = torch.randn(2, 3, 3, 32, 32), tokenizer(["red apple", "a blue bird on a tree"])
    image, text, _ = model.eval()(clips[:, 0], tokens)
    of_frames = [reference(pixel_values=clips[:, t], **tokens) for t in range(3)]
    assert torch.allclose(common.normalize(image), of_frames[0].image_embeds, atol=1e-5)
    assert torch.allclose(common.normalize(text), of_frames[0].text_embeds, atol=1e-5)
    assert torch.allclose(model(clips)[0], sum(x.image_embeds for x in of_frames) / 3, atol=1e-5)
    assert transform.mean == encoders.base.STATS["clip"][0]


def test_an_encoder_published_in_half_precision_is_rebuilt_in_full(tmp_path, tokenizer):
    """Else its run could be neither resumed nor loaded."""
    tiny_model("bert", tmp_path, tokenizer).half().save_pretrained(tmp_path)
    assert "float16" in (tmp_path / "config.json").read_text()
    for pretrained in (True, False):
        model = built(tokenizer, pretrained, text_encoder=str(tmp_path))
        assert {x.dtype for x in model.parameters()} == {torch.float32}


# Of transformers' vision models: how to make one, and what of its output are the features.
LAYOUTS = {
    "vit": (
        lambda: T.ViTForImageClassification(T.ViTConfig(**SMALL, image_size=32, patch_size=16)),
        lambda output: output.last_hidden_state[:, 0],
    ),
    "convnext": (
        lambda: T.ConvNextModel(T.ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1])),
        lambda output: output.pooler_output,
    ),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_transformers_vision_models(kind, tmp_path):
    """A ViT without a pooler is read at its class token, since a pooler would be random.

    Pixels have the statistics of the model's own file; a model that is rebuilt has no such file.
    """
    make, features_of = LAYOUTS[kind]
    model = make().eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}'
    )
    encoder = common.VisionEncoder(str(tmp_path), 0, True, 32).eval()
    pixels = torch.randn(2, 3, 32, 32)
    body = getattr(model, "vit", model)
    torch.testing.assert_close(encoder(pixels)[0], features_of(body(pixel_values=pixels)))
    assert encoder.stats == ((0.5, 0.5, 0.5), (1, 1, 1))
    rebuilt = common.VisionEncoder(str(tmp_path), 0, False, 32, encoder.config).eval()
    rebuilt.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(rebuilt(pixels)[0], encoder(pixels)[0])


def test_unused_parameters_are_frozen(tiny, tokenizer):
    """They are never in a loss: DDP would wait for them."""
    model = built(tokenizer, True, image_encoder=tiny("dino")[0], image_size=28)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "vision.body.embeddings.mask_token"
    ]
    image, text, _ = model(torch.randn(2, 3, 28, 28), tokenizer(["a", "b"]))
    (image.sum() + text.sum()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_float_images_are_refused():
    transform = common.EvalTransform(32, (0.5,) * 3, (0.5,) * 3)
    assert transform(torch.zeros(5, 7)).shape == (5, 7)  # features
    for image in (torch.zeros(3, 40, 40), torch.zeros(4, 3, 40, 40)):
        with pytest.raises(ValueError, match="pixels are uint8"):
            transform(image)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_pil_image_is_what_its_file_is(kind, tmp_path):
    """Upright, and transparency over white."""
    pixels = np.tile(np.array([0, 0, 0, 0], np.uint8), (40, 60, 1))
    pixels[:, 30:] = 200, 30, 90, 255
    image = Image.fromarray(pixels)
    if kind == "jpeg":
        image = image.convert("RGB")
    exif = Image.Exif()
    exif[274] = 6  # the camera was turned
    file = tmp_path / f"a.{kind}"
    image.save(file, exif=exif, quality=95)
    transform = common.EvalTransform(32, (0.0,) * 3, (1.0,) * 3)
    of_file = transform(file)
    difference = (transform(Image.open(file)) - of_file).abs().max()
    assert difference < 0.02  # of two decoders of JPEG
    top = of_file[:, :8].mean((1, 2))
    if kind == "png":
        assert top.min() > 0.99  # transparent black, turned upwards
    assert (of_file[0, -8:].mean() - 200 / 255).abs() < 0.05


# -------------------------------------------- weights from files --------------------------------
# File -> the names that it has for a model's tensors, the part of the model that it is.
FILES = {
    "wrapped.safetensors": (
        lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()},
        "",
    ),
    "lightning.pt": (lambda state: {"state_dict": state}, ""),
    "tower.safetensors": (
        lambda state: {k.removeprefix("vision.body."): v for k, v in state.items()},
        "vision.body.",
    ),
    "text.pt": (lambda state: {k.removeprefix("text."): v for k, v in state.items()}, "text."),
    "args.pt": (
        lambda state: {
            "epoch": 3,
            "model_state_dict": state,
            "optimizer": {"state": {0: {"step": torch.zeros(1)}}, "param_groups": []},
            "args": argparse.Namespace(lr=1e-3, data=["a", None]),
        },
        "vision.",
    ),
    "by_order.pt": (
        lambda state: dict(enumerate(state.values())) | {"head": torch.zeros(3)},
        "vision.body.",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_layouts_of_weights(name, tmp_path, tokenizer):
    """By the names of a run, a wrapper, a tower alone, and by the order of a tower's shapes."""
    layout, start = FILES[name]
    theirs, model = (built(tokenizer) for _ in range(2))
    initial, expected = copy.deepcopy(model.state_dict()), part(theirs.state_dict(), start)
    weights = layout(expected)
    if "args" not in weights:
        weights = {str(k): v for k, v in weights.items()}
    (save_file if name.endswith("safetensors") else torch.save)(weights, tmp_path / name)
    assert init_from(model, tmp_path / name).keys() == expected.keys()
    assert equal(model.state_dict(), initial | expected)


def test_a_file_by_the_alphabet_is_not_taken_in_order(tmp_path, tokenizer):
    """safetensors lists names so; the four vectors of a BatchNorm have one shape."""
    state = part(built(tokenizer, image_encoder="test_resnet").state_dict(), "vision.body.")
    renamed = {f"their_{k.replace('vision.body.', '')}": v for k, v in state.items()}
    torch.save(renamed, tmp_path / "in_order.pt")
    model = built(tokenizer, image_encoder="test_resnet")
    init_from(model, tmp_path / "in_order.pt")
    assert equal(part(model.state_dict(), "vision.body."), state)
    in_layers, norms = list(renamed), [k for k in renamed if k.endswith("running_mean")]
    assert norms
    for name in norms:  # bias, running_mean, running_var, weight
        k = in_layers.index(name) - 2
        in_layers[k : k + 4] = sorted(in_layers[k : k + 4])
    torch.save({name: renamed[name] for name in in_layers}, tmp_path / "sorted.pt")
    with pytest.raises(UserError, match="none of its .* tensors fits"):
        init_from(built(tokenizer, image_encoder="test_resnet"), tmp_path / "sorted.pt")


VIT = {"image_encoder": "test_vit", "image_size": 64}
PARTLY = {  # what is said: a model whose tensors are saved, the model that reads them
    "vision.body.pos_embed is .1, 17, 64. there, .1, 5, 64. in the model": (
        VIT,
        VIT | {"image_size": 32},
    ),
    "vision.body.layer1.0.conv1.weight is .64, 64, 1, 1. there, .64, 64, 3, 3. in the model": (
        {"image_encoder": "resnet50"},
        {"image_encoder": "resnet18"},
    ),
    "it lacks vision.body.layer1.2.conv1.weight and .* more tensors": (
        {"image_encoder": "resnet18"},
        {"image_encoder": "resnet34"},
    ),
    "text.body.position is .12, 128. there, .8, 128. in the model": ({}, {"text_length": 8}),
}


@pytest.mark.parametrize("words", PARTLY)
def test_weights_of_another_model_are_not_taken_in_part(words, tmp_path, tokenizer):
    theirs, ours = (built(tokenizer, **changes) for changes in PARTLY[words])
    save_file(part(theirs.state_dict(), ""), tmp_path / "w.safetensors")
    initial = copy.deepcopy(ours.state_dict())
    with pytest.raises(UserError, match=words):
        init_from(ours, tmp_path / "w.safetensors")
    assert equal(ours.state_dict(), initial)


def test_what_a_file_may_lack(tmp_path, tiny, tokenizer, capsys):
    """Counters of BatchNorm, a pooler, the second name of T5's words, projections of a width."""
    bert, t5 = tiny("bert")[0], tiny("t5")[0]
    theirs = built(tokenizer, image_encoder="test_resnet", text_encoder=bert, embed_dim=8)
    state = part(theirs.state_dict(), "")
    lacks = ("num_batches_tracked", ".pooler.")
    weights = {k: v for k, v in state.items() if not any(x in k for x in lacks)}
    assert len(weights) < len(state)
    save_file(weights, tmp_path / "w.safetensors")
    model = built(tokenizer, image_encoder="test_resnet", text_encoder=bert)
    read = init_from(model, tmp_path / "w.safetensors")
    assert read.keys() == {k for k in weights if "projection" not in k}
    assert "the first is vision.body.conv1.1.num_batches_tracked" in capsys.readouterr().out

    model = built(tokenizer, text_encoder=t5)
    init_from(model, f"{t5}/model.safetensors")  # a whole T5, as published
    words = load_file(f"{t5}/model.safetensors")["shared.weight"]
    assert torch.equal(model.text.body.encoder.embed_tokens.weight, words)


@pytest.fixture
def some_weights(tmp_path, tiny, tokenizer, monkeypatch):
    """The current folder, with weights that do not fit or are none."""
    monkeypatch.chdir(tmp_path)
    torch.save({"x": print}, "evil.pt")  # a function, which could be any
    weights = {"a": torch.zeros(3)}
    torch.save({"teacher": weights, "student": weights, "epoch": 3}, "pair.pt")
    torch.save({"epoch": 3, "loss": [0.1]}, "plain.pt")
    save_file({"other": torch.zeros(3)}, "other.safetensors")
    save_file(
        part(built(tokenizer, image_encoder="resnet18").state_dict(), "text."), "text.safetensors"
    )
    layer = {"vision.projection.weight": torch.zeros(16, 512)}
    save_file(layer, "layer.safetensors")
    shutil.copytree(tiny("bert")[0], "inner")
    inner = {f"inner.{k}": v for k, v in load_file("inner/model.safetensors").items()}
    save_file(inner, "inner/model.safetensors", {"format": "pt"})
    (tmp_path / "empty").mkdir()
    shutil.copy("inner/config.json", "empty")
    shutil.copytree(tiny("bert")[0], "deeper")
    config = json.loads((tmp_path / "deeper" / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (tmp_path / "deeper" / "config.json").write_text(json.dumps(config))
    T.SiglipConfig().save_pretrained("towers")
    T.SiglipVisionModel(
        T.SiglipVisionConfig(**SMALL, image_size=28, patch_size=14)
    ).save_pretrained("siglip")


BAD = {  # what is said: what opens them
    "--init-from evil.pt: Unsupported global: GLOBAL .*print; only tensors": lambda t: (
        init_from(built(t), "evil.pt")
    ),
    "--init-from pair.pt: .* Its keys are teacher, student, epoch, of which 2 hold": lambda t: (
        init_from(built(t), "pair.pt")
    ),
    "--init-from plain.pt: .* Its keys are epoch, loss, of which 0 hold": lambda t: (
        init_from(built(t), "plain.pt")
    ),
    "--init-from other.safetensors: none of its 1 tensors fits": lambda t: init_from(
        built(t), "other.safetensors"
    ),
    "--init-from text.safetensors: has no image encoder, and resnet18 would be random": lambda t: (
        built(t, True, "text.safetensors", image_encoder="resnet18")
    ),
    "--init-from layer.safetensors: has no image encoder, and resnet18 would be": lambda t: (
        built(t, True, "layer.safetensors", image_encoder="resnet18")
    ),
    "./inner: its weights lack .* more tensors: they are those of another": lambda t: (
        common.TextEncoder("./inner", 0)
    ),
    "./deeper: its weights lack encoder.layer.1.* and 15 more": lambda t: common.TextEncoder(
        "./deeper", 0
    ),
    "./towers: the config of a siglip names no width of features": lambda t: common.VisionEncoder(
        "./towers", 0
    ),
    "./empty: no tokenizer there": lambda t: common.build_tokenizer(
        "./empty", 12
    ),  # transformers makes one up
    "./siglip: its type is siglip_vision_model, not a DINO, .* a DINOv2 or": lambda t: Expert(
        "./siglip", "image", common.EvalTransform(32, *IMAGENET), CPU
    ),
}


@pytest.mark.parametrize("words", BAD)
@pytest.mark.usefixtures("some_weights")
def test_weights_that_fit_nowhere_or_hold_code_are_refused(words, tokenizer):
    with pytest.raises(UserError, match=words):
        BAD[words](tokenizer)


def test_a_file_stands_for_the_weights_of_timm(tmp_path, tiny, tokenizer):
    """Which are not downloaded beside it; those of a text encoder of transformers are read."""
    vision = part(built(tokenizer, image_encoder="resnet18").state_dict(), "vision.")
    save_file(vision, tmp_path / "vision.safetensors")
    model = built(tokenizer, True, tmp_path / "vision.safetensors", image_encoder="resnet18")
    assert equal(part(model.state_dict(), "vision."), vision)
    assert describe_weights(model, True, "vision.safetensors") == "weights of vision.safetensors"
    model = built(
        tokenizer,
        True,
        tmp_path / "vision.safetensors",
        image_encoder="resnet18",
        text_encoder=tiny("bert")[0],
    )
    words = describe_weights(model, True, "vision.safetensors")
    assert words == "weights of vision.safetensors; published weights of the text encoder"
    assert equal(
        part(model.text.body.state_dict(), "embeddings"),
        part(tiny("bert")[1].state_dict(), "embeddings"),
    )


def test_init_from_a_run_takes_its_words_too(tmp_path):
    """A small text encoder of another run knows that run's vocabulary, and no other."""

    def words(name, captions, start=""):
        common.build_tokenizer(
            "small", 16, lambda: captions, tmp_path / name / "tokenizer", start=str(start)
        )
        return (tmp_path / name / "tokenizer" / "tokenizer.json").read_text()

    first, second = words("a", ["red apple"] * 9), words("b", ["green pear"] * 9)
    model = built(Tokenizer(tmp_path / "a" / "tokenizer", 16))
    run = tmp_path / "a"
    weights = tmp_path / "a" / "model.safetensors"
    alone = tmp_path / "alone.safetensors"
    for file in (weights, alone):
        save_file(part(model.state_dict(), ""), file)
    assert [words(f"c{k}", ["green pear"] * 9, x) for k, x in enumerate((run, weights, alone))] == [
        first,
        first,
        second,
    ]


# -------------------------------------------- experts -------------------------------------------
def test_experts(tmp_path, tiny):
    transform = common.EvalTransform(32, *encoders.base.STATS["half"])
    registers = T.Dinov2WithRegistersConfig(
        **SMALL, image_size=28, patch_size=14, num_register_tokens=4
    )
    T.Dinov2WithRegistersModel(registers).save_pretrained(tmp_path / "registers")
    shutil.copy(f"{tiny('dino')[0]}/preprocessor_config.json", tmp_path / "registers")
    pixels = torch.randn(3, 3, 28, 28)
    mean, std = (torch.tensor(v)[:, None, None] for v in IMAGENET)
    for name, first_patch in ((tiny("dino")[0], 1), (str(tmp_path / "registers"), 5)):
        of_images, patches = (
            Expert(name, "image", transform, CPU, pooling=p) for p in ("cls", "patches")
        )
        with torch.no_grad():
            states = of_images.encoder.body(
                pixel_values=(pixels / 2 + 0.5 - mean) / std
            ).last_hidden_state
        assert states.shape[1] == first_patch + 4
        assert torch.allclose(of_images(pixels), common.normalize(states[:, 0]), atol=1e-5)
        assert torch.allclose(
            patches(pixels), common.normalize(states[:, first_patch:].mean(1)), atol=1e-5
        )
    clips = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    means = sum(of_images.encode(clips[:, t]) for t in range(3)) / 3
    assert torch.allclose(of_images(clips), common.normalize(means), atol=1e-5)


def test_experts_read_whole_images_and_cleaned_captions(tmp_path, tiny, data, monkeypatch):
    """While the towers read the view of I and T, as the experts with --expert-inputs training. The
    terms in the log make the loss."""
    train = common.load_data(data, "train")
    view = common.EvalTransform(32, *encoders.base.STATS["half"], resize="squash")
    whole = torch.stack([view(path) for path in image_paths(train)])
    seen, encode = {}, Expert.__call__

    def watched(expert, inputs, batch=256):
        seen[expert.modality] = inputs
        return encode(expert, inputs, batch)

    monkeypatch.setattr(Expert, "__call__", watched)
    flags = [*RUN, *"--image-size 32 --log-every 1 --clean-captions --crop-min 0.3".split()]
    flags += ["--image-expert", tiny("dino")[0], "--text-expert", tiny("bert")[0]]
    flags += ["--image-expert-weight", "0.1", "--text-expert-weight", "0.1"]
    for inputs, is_clean in (("clean", True), ("training", False)):
        folder = tmp_path / inputs
        log = few_steps(temo_experts, folder, *flags, "--dataset", data, "--expert-inputs", inputs)
        for row in log:
            experts = row["L_E-image"] + row["L_E-text"]
            assert row["loss"] == pytest.approx(row["L_MM"] + 0.1 * experts)
        far = torch.cdist(seen["image"].flatten(1), whole.flatten(1), p=torch.inf).amin(1)  # (B,)
        assert (far.max() < 0.02) == is_clean
        assert all(("," in text) != is_clean for text in seen["text"])


def image_paths(data):
    return [source["path"] for source in data.sources["source"]]


# -------------------------------------------- runs ----------------------------------------------
def test_load_model_gives_the_run_s_embeddings(tmp_path, data, tokenizer):
    """With a transformers text tower and a CLIP's vision tower, whose folders are then gone."""
    (
        tiny_model("clip", tmp_path / "clip", tokenizer),
        tiny_model("distilbert", tmp_path / "text", tokenizer),
    )
    folder, test = tmp_path / "r", common.load_data(data, "test")
    flags = ["--image-encoder", tmp_path / "clip", "--text-encoder", tmp_path / "text"]
    flags += ["--dataset", data, *"--image-size 32 --pretrained --text-length 12".split()]
    summary = run_script(temo, folder, *RUN, *flags)
    for name in ("text", "clip"):
        shutil.rmtree(tmp_path / name)
    model, words, transform = common.load_model(folder)
    metrics, _, pieces = evaluation.measure.measure(
        evaluation.measure.Towers(model, words, transform), test, ("retrieval", "gap"), device=CPU
    )
    expected = core.files.flatten(summary["test"][data])
    assert core.files.flatten(metrics) == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(model(transform(test.read(3))[None])[0][0], pieces.image[3], atol=1e-4)


def test_a_run_stopped_before_its_first_checkpoint_begins_from_the_same_weights(
    data, tmp_path, capsys
):
    """The weights of --init-from, and not others; after a checkpoint they are not read."""
    flags = [*RUN, "--dataset", data, *"--image-size 16 --eval-every 0 --lr 0 --lr-end 0".split()]
    run_script(temo, tmp_path / "first", *flags, "--seed", "1")
    run_script(temo, tmp_path / "run", *flags, "--init-from", tmp_path / "first")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    for _ in range(2):
        temo.main(temo.parse_args(["--resume", str(tmp_path / "run")]))
        assert equal(
            *(load_file(tmp_path / name / "model.safetensors") for name in ("first", "run"))
        )
    assert capsys.readouterr().out.count("tensors read from") == 2
