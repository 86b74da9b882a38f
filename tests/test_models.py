"""Encoders by name, pooling, weights from files, experts, and the model that a run leaves."""

import copy
import json
import shutil
import unicodedata

import common
from contrastive.core.files import flatten, read_json
from contrastive.core.processes import UserError
from contrastive.encoders import base
from contrastive.encoders.experts import Expert
from contrastive.encoders.models import (
    adjust_flags_to_encoder, check_text_length, describe_weights, model_of_spec)
from contrastive.encoders.texts import Tokenizer, train_wordpiece
from contrastive.encoders.weights import init_from
from contrastive.evaluation import measure
from contrastive.evaluation.embed import encode_images, encode_texts

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import temo
import temperature_schedules as ts
from helpers import (
    CPU, SPEC, assert_close, few_steps, model_of, run_script, tiny_model, write_captions)
from variants import temo_experts

RUN = "--cpu --workers 0 --max-steps 2 --batch-size 16 --image-size 32 --text-length 12".split()
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
HALF = base.STATS["half"]
IMAGENET = base.STATS["imagenet"]
TEXTS = ["red", "a blue bird on a tree"]


def part(state, prefix=""):
    return {name: x.contiguous() for name, x in state.items() if name.startswith(prefix)}


def equal(a, b):
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A csv of 120 images and captions."""
    return str(write_captions(tmp_path_factory.mktemp("data"), 120))


# ------------------------------------------ by name ------------------------------------------
@pytest.mark.parametrize("flags, width", [("", 16), ("--embed-dim 8", 8)])
def test_a_clip_as_image_encoder_is_the_text_encoder_too(tiny, flags, width):
    folder, _ = tiny("clip")
    args = temo.parse_args(["--image-encoder", folder, *flags.split()])
    args = adjust_flags_to_encoder(args)
    assert args.text_encoder == folder
    assert args.embed_dim == width


def test_a_run_keeps_the_biases_of_its_projections(data, tmp_path):
    run_script(temo, tmp_path / "run", *RUN, "--dataset", data, "--projection-bias")
    model, _, _ = common.load_model(tmp_path / "run")
    assert model.text.projection.bias.abs().max() > 0


@pytest.mark.parametrize("name, nearest", [
    ("resnet51", "resnet50"),
    ("video_vit_base_patch16_clip_225", "video_vit_base_patch16_clip_224"),
])
def test_a_name_of_no_encoder_is_refused_with_the_nearest(name, nearest, tmp_path):
    flags = [*RUN[:-2], "--image-encoder", name, "--output-dir", str(tmp_path)]
    with pytest.raises(UserError, match=f"--image-encoder {name}: .*{nearest}"):
        ts.main(ts.parse_args(flags))


def test_default_towers_have_no_batchnorm_and_no_dropout(tokenizer):
    model = model_of(tokenizer)
    assert not base.batchnorms(model)
    for module in model.modules():
        assert not isinstance(module, torch.nn.Dropout)


# ------------------------------------------- images ------------------------------------------
@pytest.mark.parametrize("name, stats", [
    ("small", HALF),
    ("resnet18-cifar", IMAGENET),
    ("vit_tiny_patch16_224", HALF),
])
def test_a_clip_is_the_mean_of_its_normalised_frames(name, stats):
    encoder = common.VisionEncoder(name, 16, pretrained=False, image_size=32).eval()
    clip = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    features, embedding = encoder(clip)
    total = 0
    for t in range(3):
        _, of_frame = encoder(clip[:, t])
        total += common.normalize(of_frame)
    assert_close(embedding, total / 3)
    assert features.shape == (2, encoder.width)
    assert [tuple(values) for values in encoder.stats] == [*stats]


def vit():
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=16)
    return transformers.ViTForImageClassification(config)


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1])
    return transformers.ConvNextModel(config)


@pytest.mark.parametrize("make", [vit, convnext])
def test_features_of_transformers_vision_models(make, tmp_path):
    """Those of a ViT without a pooler are its class token: a pooler would be random."""
    model = make().eval()
    model.save_pretrained(tmp_path)
    encoder = common.VisionEncoder(str(tmp_path), 0).eval()
    pixels = torch.randn(2, 3, 32, 32)
    if make is vit:
        expected = model.vit(pixels).last_hidden_state[:, 0]
    else:
        expected = model(pixels).pooler_output
    features, _ = encoder(pixels)
    assert_close(features, expected)


STATISTICS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


def test_unused_parameters_are_frozen(tiny, tokenizer):
    """They are never in a loss: DDP would wait for them."""
    folder, _ = tiny("dino")
    model = model_of(tokenizer, True, image_encoder=folder, image_size=28)
    image, text, _ = model(torch.randn(2, 3, 28, 28), tokenizer(TEXTS))
    (image.sum() + text.sum()).backward()
    parameters = model.named_parameters()
    without_gradient = [name for name, p in parameters if p.grad is None]
    assert without_gradient == ["vision.body.embeddings.mask_token"]
    assert not model.vision.body.embeddings.mask_token.requires_grad


def test_float_images_are_refused():
    transform = common.EvalTransform(32, *HALF)
    assert transform(torch.zeros(5, 7)).shape == (5, 7)  # features
    for image in (torch.zeros(3, 40, 40), torch.zeros(4, 3, 40, 40)):
        with pytest.raises(ValueError, match="pixels are uint8"):
            transform(image)


# -------------------------------------------- texts ------------------------------------------
@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_transformers_text_encoder_is_transformers_own(tiny, tokenizer, kind, pooling):
    folder, reference = tiny(kind)
    encoder = common.TextEncoder(folder, 16, pooling=pooling).eval()
    tokens = tokenizer(TEXTS)
    states = reference(**tokens).last_hidden_state
    expected = states[:, 0]
    if pooling == "mean":
        mask = tokens["attention_mask"][..., None]
        expected = (states * mask).sum(1) / mask.sum(1)
    assert_close(encoder(**tokens), encoder.projection(expected))


@pytest.mark.parametrize("name", ["small", "bert", "distilbert", "t5"])
def test_padding_changes_no_text(tiny, tokenizer, name):
    if name != "small":
        name, _ = tiny(name)
    words = len(tokenizer.tokenizer)
    encoder = common.TextEncoder(name, 16, vocabulary=words, pooling="mean").eval()
    alone = encoder(**tokenizer(TEXTS[:1]))
    assert_close(encoder(**tokenizer(TEXTS))[:1], alone)


def test_padding_follows_the_text(tokenizer):
    left_padded = copy.deepcopy(tokenizer.tokenizer)
    left_padded.padding_side = "left"
    ids = Tokenizer(left_padded, 12)(TEXTS)["input_ids"]
    assert ids[0, 0] == left_padded.cls_token_id
    assert ids[0, -1] == left_padded.pad_token_id


@pytest.mark.parametrize("config, positions", [
    (transformers.BertConfig, 40),
    (transformers.RobertaConfig, 39),  # it counts from the place after its padding
])
def test_more_tokens_than_positions_are_refused(config, positions, tmp_path):
    sizes = SMALL | {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0}
    transformers.AutoModel.from_config(config(**sizes)).save_pretrained(tmp_path)
    text = common.TextEncoder(str(tmp_path), 0).eval()
    ids = torch.full((1, positions), 7)
    text(ids, torch.ones_like(ids))
    check_text_length(text, positions)
    with pytest.raises(UserError, match=f"--text-length {positions + 1}: .* {positions} pos"):
        check_text_length(text, positions + 1)


def test_the_first_token_of_a_decoder_is_no_embedding(tmp_path, tokenizer):
    """It sees none of the others."""
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(vocab_size=len(tokenizer.tokenizer), **sizes)
    transformers.GPT2Model(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--text-pooling mean"):
        model_of(tokenizer, text_encoder=str(tmp_path), text_pooling="cls")
    model_of(tokenizer, text_encoder=str(tmp_path), text_pooling="mean")


@pytest.mark.parametrize("pair", ["schon schön", "कल काल", "か が"])
def test_accents_and_vowel_signs_make_other_words(pair):
    small = Tokenizer(train_wordpiece([pair, "SCHÖN"] * 3), 12)
    first, second = pair.split()
    decomposed = unicodedata.normalize("NFD", pair.upper())  # as file names of macOS are
    ids = [small(text)["input_ids"].tolist() for text in (first, second, pair, decomposed)]
    assert ids[0] != ids[1]
    assert ids[2] == ids[3]


# ------------------------------------------ both towers --------------------------------------
def test_clip_keeps_its_own_space(tiny, tokenizer):
    folder, reference = tiny("clip")
    spec = SPEC | {"image_encoder": folder, "text_encoder": folder, "image_stats": "encoder"}
    model, transform = model_of_spec(spec, tokenizer, True)
    model.eval()
    clips = torch.randn(2, 3, 3, 32, 32)
    tokens = tokenizer(TEXTS)
    frames = [reference(pixel_values=clips[:, t], **tokens) for t in range(3)]
    image, text, _ = model(clips[:, 0], tokens)
    assert_close(common.normalize(image), frames[0].image_embeds)
    assert_close(common.normalize(text), frames[0].text_embeds)
    assert_close(model(clips)[0], sum(frame.image_embeds for frame in frames) / 3)
    assert transform.mean == base.STATS["clip"][0]


@pytest.mark.parametrize("training", [True, False])
def test_encoding_leaves_a_model_in_its_mode(tokenizer, training):
    model, transform = model_of_spec(dict(SPEC), tokenizer, False)
    modes = []
    for tower in (model.vision, model.text):
        tower.register_forward_hook(lambda module, *_: modes.append(module.training))
    model.train(training)
    data = common.load_data("moving-emoji", "val", clips=(8, 8, 8))
    encode_images(model, data, transform, CPU)
    encode_texts(model, tokenizer, ["a", "b"], CPU)
    assert modes == [False, False]
    assert all(module.training == training for module in model.modules())


@pytest.mark.parametrize("pretrained", [True, False])
def test_an_encoder_published_in_float16_is_built_in_float32(tmp_path, tokenizer, pretrained):
    tiny_model("bert", tmp_path, tokenizer).half().save_pretrained(tmp_path)
    model = model_of(tokenizer, pretrained, text_encoder=str(tmp_path))
    for p in model.parameters():
        assert p.dtype == torch.float32


# ------------------------------------- weights from files ------------------------------------
def wrapped(state):
    return {f"module._orig_mod.{name}": x for name, x in state.items()}


def with_settings(state):
    optimizer = {"state": {0: {"step": torch.zeros(1)}}, "param_groups": []}
    return {"epoch": 3, "model_state_dict": state, "optimizer": optimizer}


def without_prefix(state):
    names = [name.removeprefix("vision.body.").removeprefix("text.") for name in state]
    return dict(zip(names, state.values()))


def by_order(state):
    numbered = {str(k): x for k, x in enumerate(state.values())}
    return numbered | {"head": torch.zeros(3)}


@pytest.mark.parametrize("layout, prefix", [
    (wrapped, ""),
    (with_settings, "vision."),
    (without_prefix, "vision.body."),
    (without_prefix, "text."),
    (by_order, "vision.body."),
])
def test_layouts_of_weights(layout, prefix, tmp_path, tokenizer):
    """By the names of a wrapper, a tower alone, and by the order of a tower's shapes."""
    model = model_of(tokenizer)
    initial = copy.deepcopy(model.state_dict())
    expected = part(model_of(tokenizer).state_dict(), prefix)
    torch.save(layout(expected), tmp_path / "weights.pt")
    assert init_from(model, tmp_path / "weights.pt").keys() == expected.keys()
    assert equal(model.state_dict(), initial | expected)


def test_a_file_by_the_alphabet_is_not_taken_in_order(tmp_path, tokenizer):
    """The four vectors of a BatchNorm have one shape."""
    model = model_of(tokenizer, image_encoder="test_resnet")
    weights = part(model.state_dict(), "vision.body.")
    names = list(weights)
    for name in weights:
        if name.endswith("running_mean"):
            first = names.index(name) - 2  # weight, bias, running_mean, running_var
            names[first:first + 4] = sorted(names[first:first + 4])
    theirs = {f"their_{name}": weights[name] for name in names}
    torch.save(theirs, tmp_path / "sorted.pt")
    with pytest.raises(UserError, match="none of its .* tensors fits"):
        init_from(model, tmp_path / "sorted.pt")


@pytest.mark.parametrize("theirs, ours, words", [
    ({"image_encoder": "resnet18"},
     {"image_encoder": "resnet34"},
     "it lacks vision.body.layer1.2.conv1.weight and .* more tensors"),
    ({}, {"text_length": 8}, "text.body.position is .12, 128. there, .8, 128. in the model"),
])
def test_weights_of_another_model_are_not_taken_in_part(theirs, ours, words, tmp_path, tokenizer):
    save_file(part(model_of(tokenizer, **theirs).state_dict()), tmp_path / "w.safetensors")
    model = model_of(tokenizer, **ours)
    initial = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=words):
        init_from(model, tmp_path / "w.safetensors")
    assert equal(model.state_dict(), initial)


def test_a_file_may_lack_counters_and_poolers_and_have_another_width(tmp_path, tiny, tokenizer):
    encoders = {"image_encoder": "test_resnet", "text_encoder": tiny("bert")[0]}
    weights = part(model_of(tokenizer, **encoders, embed_dim=8).state_dict())
    for name in list(weights):
        if "num_batches_tracked" in name or ".pooler." in name:
            del weights[name]
    save_file(weights, tmp_path / "w.safetensors")
    loaded = init_from(model_of(tokenizer, **encoders), tmp_path / "w.safetensors")
    assert loaded.keys() == {name for name in weights if "projection" not in name}


TENSORS = {"a": torch.zeros(3)}


@pytest.mark.parametrize("content, words", [
    ({"x": print}, "Unsupported global: GLOBAL .*print; only tensors"),
    ({"teacher": TENSORS, "student": TENSORS}, "Its keys are teacher, student, of which 2 hold"),
])
def test_a_file_of_code_or_of_two_models_is_refused(content, words, tmp_path, tokenizer):
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(UserError, match=f"--init-from .*file.pt: .*{words}"):
        init_from(model_of(tokenizer), tmp_path / "file.pt")


def test_a_file_in_place_of_published_weights_has_an_image_encoder(tmp_path, tokenizer):
    save_file({"vision.projection.weight": torch.zeros(16, 512)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="has no image encoder, and resnet18 would be random"):
        model_of(tokenizer, True, tmp_path / "w.safetensors", image_encoder="resnet18")


def test_a_folder_without_all_weights_is_refused(tmp_path, tiny):
    shutil.copytree(tiny("bert")[0], tmp_path / "deeper")
    config = read_json(tmp_path / "deeper" / "config.json") | {"num_hidden_layers": 2}
    (tmp_path / "deeper" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="its weights lack encoder.layer.1.* and 15 more"):
        common.TextEncoder(str(tmp_path / "deeper"), 0)


def test_a_file_stands_for_the_weights_of_timm(tmp_path, tiny, tokenizer):
    """Those of a text encoder of transformers are read beside it."""
    folder, bert = tiny("bert")
    file = tmp_path / "vision.safetensors"
    encoders = {"image_encoder": "resnet18", "text_encoder": folder}
    vision = part(model_of(tokenizer, **encoders).state_dict(), "vision.")
    save_file(vision, file)
    model = model_of(tokenizer, True, file, **encoders)
    assert equal(part(model.state_dict(), "vision."), vision)
    ours = model.text.body.state_dict()
    theirs = bert.state_dict()
    assert equal(part(ours, "embeddings"), part(theirs, "embeddings"))
    assert describe_weights(model, True, "w").endswith("published weights of the text encoder")


@pytest.mark.parametrize("start, word", [
    ("run", "apple"), ("run/model.safetensors", "apple"), ("alone.safetensors", "pear")])
def test_the_weights_of_a_run_bring_its_words(start, word, tmp_path):
    """A small text encoder knows the vocabulary of its run, and no other."""
    def build(folder, captions, start=""):
        common.build_tokenizer("small", 16, lambda: captions * 9, folder, start=str(start))
        return (folder / "tokenizer.json").read_text()

    build(tmp_path / "run" / "tokenizer", ["red apple"])
    tokenizer = Tokenizer(tmp_path / "run" / "tokenizer", 16)
    tensors = part(model_of(tokenizer).state_dict())
    save_file(tensors, tmp_path / "run" / "model.safetensors")
    save_file(tensors, tmp_path / "alone.safetensors")
    assert word in build(tmp_path / "new", ["green pear"], tmp_path / start)


# ------------------------------------------- experts -----------------------------------------
def test_an_image_expert_is_the_class_token_or_the_mean_of_the_patches(tmp_path):
    """Of pixels by its own statistics; four registers are no patches."""
    config = transformers.Dinov2WithRegistersConfig(
        **SMALL, image_size=28, patch_size=14, num_register_tokens=4)
    transformers.Dinov2WithRegistersModel(config).save_pretrained(tmp_path)
    statistics = STATISTICS | {"image_processor_type": "BitImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(statistics))
    pixels = torch.randn(3, 3, 28, 28)
    mean, std = torch.tensor([*STATISTICS.values()])[..., None, None]
    transform = common.EvalTransform(32, *HALF)
    for pooling, tokens in (("cls", slice(0, 1)), ("patches", slice(5, 9))):
        expert = Expert(str(tmp_path), "image", transform, CPU, pooling=pooling)
        body = expert.encoder.body
        states = body(pixel_values=(pixels / 2 + 0.5 - mean) / std).last_hidden_state
        expected = common.normalize(states[:, tokens].mean(1))
        assert_close(expert(pixels), expected.detach())


def test_an_expert_s_clip_is_the_mean_of_its_frames(tiny):
    folder, _ = tiny("dino")
    expert = Expert(folder, "image", common.EvalTransform(32, *HALF), CPU)
    clips = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    frames = [expert.encode(clips[:, t]) for t in range(3)]
    assert_close(expert(clips), common.normalize(sum(frames)))


@pytest.mark.parametrize("inputs", ["clean", "training"])
def test_experts_read_whole_images_and_cleaned_captions(inputs, tmp_path, tiny, data, monkeypatch):
    """With --expert-inputs training the views and texts of the towers."""
    seen = {}
    encode = Expert.__call__

    def watched(expert, inputs, batch=256):
        seen[expert.modality] = inputs
        return encode(expert, inputs, batch)

    monkeypatch.setattr(Expert, "__call__", watched)
    flags = f"--log-every 1 --clean-captions --crop-min 0.3 --expert-inputs {inputs}".split()
    flags += ["--image-expert", tiny("dino")[0], "--text-expert", tiny("bert")[0]]
    flags += ["--image-expert-weight", "0.1", "--text-expert-weight", "0.1", "--dataset", data]
    log = few_steps(temo_experts, tmp_path / "run", *RUN, *flags)
    row = log[0]
    expected = row["L_MM"] + 0.1 * row["L_E-image"] + 0.1 * row["L_E-text"]
    assert row["loss"] == pytest.approx(expected)

    transform = common.EvalTransform(32, *HALF, resize="squash")
    train = common.load_data(data, "train")
    whole = [transform(source["path"]) for source in train.sources["source"]]
    whole = torch.stack(whole).flatten(1)
    distances = torch.cdist(seen["image"].flatten(1), whole, p=torch.inf)
    is_clean = inputs == "clean"
    assert (distances.amin(1).max() < 0.02) == is_clean
    assert all(("," in text) != is_clean for text in seen["text"])


# --------------------------------------------- runs ------------------------------------------
def test_load_model_gives_the_run_s_numbers(tmp_path, data, tokenizer):
    """Also when the folders of its encoders are gone."""
    tiny_model("clip", tmp_path / "clip", tokenizer)
    tiny_model("distilbert", tmp_path / "text", tokenizer)
    flags = ["--image-encoder", tmp_path / "clip", "--text-encoder", tmp_path / "text"]
    summary = run_script(
        temo, tmp_path / "run", *RUN, *flags, "--pretrained", "--dataset", data)
    shutil.rmtree(tmp_path / "clip")
    shutil.rmtree(tmp_path / "text")
    model, words, transform = common.load_model(tmp_path / "run")
    test = common.load_data(data, "test")
    metrics, _, pieces = measure.measure(
        measure.Towers(model, words, transform), test, ("retrieval", "gap"), device=CPU)
    expected = flatten(summary["test"][data])
    assert flatten(metrics) == pytest.approx(expected, rel=1e-4)
    embedding, _, _ = model(transform(test.read(3))[None])
    assert_close(embedding[0], pieces.image[3], 1e-4)
    # the text encoder has dropout, which is off
    _, embedding, _ = model(tokens=words(test.captions(3)))
    assert_close(embedding[0], pieces.text[3], 1e-4)


def test_a_run_stopped_before_its_first_checkpoint_begins_from_the_same_weights(
        data, tmp_path, capsys):
    """Those of --init-from; after a checkpoint they are not read."""
    flags = [*RUN, *"--eval-every 0 --lr 0 --lr-end 0 --dataset".split(), data]
    run_script(temo, tmp_path / "first", *flags, "--seed", "1")
    run_script(temo, tmp_path / "run", *flags, "--init-from", tmp_path / "first")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    first = load_file(tmp_path / "first" / "model.safetensors")
    for _ in range(2):
        temo.main(temo.parse_args(["--resume", str(tmp_path / "run")]))
        assert equal(load_file(tmp_path / "run" / "model.safetensors"), first)
    assert capsys.readouterr().out.count("vision.body, vision.projection, text.body") == 2
