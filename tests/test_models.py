"""Encoders by name, pooling, weights from files, experts, and the model that a run leaves."""

import copy
import shutil
import unicodedata

import common
from contrastive.core.files import read_json, write_json
from contrastive.core.processes import UserError
from contrastive.encoders import base
from contrastive.encoders.experts import Expert
from contrastive.encoders.models import (
    adjust_flags_to_encoder, check_text_length, model_of_spec)
from contrastive.encoders.texts import Tokenizer, train_wordpiece
from contrastive.encoders.weights import init_from
from contrastive.evaluation.embed import encode_images, encode_texts
from contrastive.evaluation.saved_pieces import read_pieces

import pytest
import torch
import transformers
from safetensors.torch import save_file

import temo
from helpers import (
    CPU, SPEC, assert_close, equal_files, few_steps, model_of, run_script, tiny_model,
    write_captions)
from variants import temo_experts

RUN = "--cpu --workers 0 --max-steps 2 --batch-size 16 --image-size 32 --text-length 12".split()
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8}
HALF = base.STATS["half"]
TEXTS = ["red", "a blue bird on a tree"]


def part(state, prefix=""):
    """The tensors whose names begin so."""
    names = [name for name in state if name.startswith(prefix)]
    return {name: state[name].contiguous() for name in names}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "weights.safetensors"


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


def test_a_name_of_no_encoder_is_refused_with_the_nearest():
    args = temo.parse_args(["--image-encoder", "video_vit_base_patch16_clip_225"])
    with pytest.raises(UserError, match="clip_225: .*clip_224"):
        adjust_flags_to_encoder(args)


# ------------------------------------------- images ------------------------------------------
@pytest.mark.parametrize("name, stats", [
    ("small", "half"),
    ("resnet18-cifar", "imagenet"),
    ("vit_tiny_patch16_224", "half")])
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
    assert encoder.stats == base.STATS[stats]


@pytest.mark.parametrize("kind", ["vit", "dino"])
def test_features_of_transformers_vision_models_are_their_class_tokens(kind, tiny):
    """A ViT's pooler would be random."""
    folder, model = tiny(kind)
    encoder = common.VisionEncoder(folder, 0).eval()
    pixels = torch.randn(2, 3, 32, 32)
    features, _ = encoder(pixels)
    states = model.base_model(pixels).last_hidden_state
    assert_close(features, states[:, 0])


def test_features_of_a_convnext_are_its_pooler_s(tmp_path):
    """Its width is that of its last stage."""
    sizes = dict(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1])
    model = transformers.ConvNextModel(transformers.ConvNextConfig(**sizes)).eval()
    model.save_pretrained(tmp_path)
    encoder = common.VisionEncoder(str(tmp_path), 0).eval()
    pixels = torch.randn(2, 3, 32, 32)
    features, _ = encoder(pixels)
    assert_close(features, model(pixels).pooler_output)
    assert encoder.width == 16


def test_unused_parameters_are_frozen(tiny, tokenizer):
    """They are never in a loss: DDP would wait for them."""
    folder, _ = tiny("dino")
    model = model_of(tokenizer, True, image_encoder=folder, image_size=28)
    pixels = torch.randn(2, 3, 28, 28)
    image, text, _ = model(pixels, tokenizer(TEXTS))
    (image.sum() + text.sum()).backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == (p.grad is not None), name
    assert not model.vision.body.embeddings.mask_token.requires_grad


def test_float_images_are_refused():
    with pytest.raises(ValueError, match="pixels are uint8"):
        common.EvalTransform(32, *HALF)(torch.zeros(3, 40, 40))


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
        total = (states * mask).sum(1)
        expected = total / mask.sum(1)
    assert_close(encoder(**tokens), encoder.projection(expected))


@pytest.mark.parametrize("name", ["small", "t5"])
def test_padding_changes_no_text(tiny, tokenizer, name):
    if name == "t5":
        name, _ = tiny(name)
    words = len(tokenizer.tokenizer)
    encoder = common.TextEncoder(name, 16, vocabulary=words, pooling="mean").eval()
    short, _ = encoder(**tokenizer(TEXTS))
    alone = encoder(**tokenizer(TEXTS[:1]))
    assert_close(short, alone[0])


def test_padding_follows_the_text(tokenizer):
    left_padded = copy.deepcopy(tokenizer.tokenizer)
    left_padded.padding_side = "left"
    ids = Tokenizer(left_padded, 12)(TEXTS)["input_ids"]
    assert torch.equal(ids, tokenizer(TEXTS)["input_ids"])


@pytest.mark.parametrize("config, positions", [
    (transformers.BertConfig, 40),
    (transformers.RobertaConfig, 39)])  # it counts from the place after its padding
def test_more_tokens_than_positions_are_refused(config, positions, tmp_path):
    config = config(**SMALL, vocab_size=50, max_position_embeddings=40, pad_token_id=0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    text = common.TextEncoder(str(tmp_path), 0).eval()
    ids = torch.full((1, positions), 7)
    text(ids, torch.ones_like(ids))
    check_text_length(text, positions)
    with pytest.raises(UserError, match=f"--text-length .* {positions} positions"):
        check_text_length(text, positions + 1)


def test_the_first_token_of_a_decoder_is_no_embedding(tmp_path, tokenizer):
    """It sees none of the others."""
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer.tokenizer), n_embd=24, n_layer=1, n_head=2)
    transformers.GPT2Model(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--text-pooling mean"):
        model_of(tokenizer, text_encoder=str(tmp_path), text_pooling="cls")


@pytest.mark.parametrize("pair", ["schon schön", "कल काल", "か が"])
def test_accents_and_vowel_signs_make_other_words(pair):
    small = Tokenizer(train_wordpiece([pair, "SCHÖN"] * 3), 12)
    first, second = small(pair.split())["input_ids"].tolist()
    assert first != second
    decomposed = unicodedata.normalize("NFD", pair.upper())  # as file names of macOS are
    assert_close(small(decomposed)["input_ids"], small(pair)["input_ids"])


# ------------------------------------------ both towers --------------------------------------
def test_clip_keeps_its_own_space(tiny, tokenizer):
    folder, reference = tiny("clip")
    spec = SPEC | {
        "image_encoder": folder,
        "text_encoder": folder,
        "image_stats": "encoder"}
    model, transform = model_of_spec(spec, tokenizer, True)
    pixels = torch.randn(2, 3, 32, 32)
    tokens = tokenizer(TEXTS)
    expected = reference(pixel_values=pixels, **tokens)
    model.eval()
    image, text, _ = model(pixels, tokens)
    assert_close(common.normalize(image), expected.image_embeds)
    assert_close(common.normalize(text), expected.text_embeds)
    assert transform.mean == base.STATS["clip"][0]


def test_encoding_leaves_a_model_in_its_mode(tokenizer):
    model = model_of(tokenizer)
    modes = []
    for tower in (model.vision, model.text):
        tower.register_forward_hook(lambda module, *_: modes.append(module.training))
    data = common.load_data("moving-emoji", "val", clips=(8, 8, 8))
    encode_images(model, data, common.EvalTransform(32, *HALF), CPU)
    encode_texts(model, tokenizer, ["a", "b"], CPU)
    assert modes == [False, False]
    assert model.training


@pytest.mark.parametrize("pretrained", [True, False])
def test_an_encoder_published_in_float16_is_built_in_float32(tmp_path, tokenizer, pretrained):
    tiny_model("bert", tmp_path, tokenizer).half().save_pretrained(tmp_path)
    model = model_of(tokenizer, pretrained, text_encoder=str(tmp_path))
    for p in model.parameters():
        assert p.dtype == torch.float32


# ------------------------------------- weights from files ------------------------------------
def wrapped(state):
    state = {f"module._orig_mod.{name}": x for name, x in state.items()}
    return {"epoch": 3, "model_state_dict": state, "optimizer": {"param_groups": []}}


def without_prefix(state):
    names = [name.removeprefix("vision.body.").removeprefix("text.") for name in state]
    return dict(zip(names, state.values()))


def by_order(state):
    numbers = map(str, range(len(state)))
    return dict(zip(numbers, state.values())) | {"head": torch.zeros(3)}


@pytest.mark.parametrize("layout, prefix", [
    (wrapped, "vision."),
    (without_prefix, "vision.body."),
    (without_prefix, "text."),
    (by_order, "vision.body.")])
def test_layouts_of_weights(layout, prefix, tmp_path, tokenizer):
    """By the names of a wrapper, a tower alone, and by the order of a tower's shapes."""
    model = model_of(tokenizer)
    initial = copy.deepcopy(model.state_dict())
    expected = part(model_of(tokenizer).state_dict(), prefix)
    torch.save(layout(expected), tmp_path / "weights.pt")
    loaded = init_from(model, tmp_path / "weights.pt")
    assert loaded.keys() == expected.keys()
    assert_close(dict(model.state_dict()), initial | expected, 0)


@pytest.mark.parametrize("changes, words", [
    ({"image_encoder": "resnet18"}, "it lacks vision.body.layer1.2.conv1.weight and .* more"),
    ({"text_length": 8}, "text.body.position is .8, 128. there, .12, 128. in the model")])
def test_weights_of_another_model_are_not_taken_in_part(changes, words, file, tokenizer):
    theirs = model_of(tokenizer, **{"image_encoder": "resnet34"} | changes)
    save_file(part(theirs.state_dict()), file)
    model = model_of(tokenizer, image_encoder="resnet34")
    initial = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=words):
        init_from(model, file)
    assert_close(model.state_dict(), initial, 0)


def test_weights_that_fit_neither_by_name_nor_in_order_are_refused(tmp_path, tokenizer):
    """The bias and the running mean of a BatchNorm, here exchanged, have one shape."""
    model = model_of(tokenizer, image_encoder="test_resnet")
    weights = part(model.state_dict(), "vision.body.")
    names = [*weights]
    place = names.index("vision.body.bn1.bias")
    names[place], names[place + 1] = names[place + 1], names[place]
    torch.save({f"their_{name}": weights[name] for name in names}, tmp_path / "weights.pt")
    with pytest.raises(UserError, match="none of its .* tensors fits"):
        init_from(model, tmp_path / "weights.pt")


def test_a_file_may_lack_counters_and_poolers_and_have_another_width(file, tiny, tokenizer):
    encoders = {"image_encoder": "test_resnet", "text_encoder": tiny("bert")[0]}
    weights = part(model_of(tokenizer, **encoders, embed_dim=8).state_dict())
    for name in [*weights]:
        if "num_batches_tracked" in name or "pooler" in name:
            del weights[name]
    save_file(weights, file)
    loaded = init_from(model_of(tokenizer, **encoders), file)
    projections = {"vision.projection.weight", "text.projection.weight"}
    assert weights.keys() - loaded.keys() == projections


TENSORS = {"a": torch.zeros(3)}


@pytest.mark.parametrize("content, words", [
    ({"x": print}, "Unsupported global: GLOBAL .*print; only tensors"),
    ({"teacher": TENSORS, "student": TENSORS}, "Its keys are teacher, student, of which 2 hold"),
])
def test_a_file_of_code_or_of_two_models_is_refused(content, words, tmp_path, tokenizer):
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(UserError, match=f"--init-from .*file.pt: .*{words}"):
        init_from(model_of(tokenizer), tmp_path / "file.pt")


def test_a_file_in_place_of_published_weights_has_an_image_encoder(file, tokenizer):
    save_file({"vision.projection.weight": torch.zeros(16, 512)}, file)
    with pytest.raises(UserError, match="has no image encoder, and resnet18 would be random"):
        model_of(tokenizer, True, file, image_encoder="resnet18")


def test_a_folder_without_all_weights_is_refused(tmp_path, tiny):
    shutil.copytree(tiny("bert")[0], tmp_path / "deeper")
    config = read_json(tmp_path / "deeper" / "config.json") | {"num_hidden_layers": 2}
    write_json(tmp_path / "deeper" / "config.json", config)
    with pytest.raises(UserError, match="its weights lack encoder.layer.1.* and 15 more"):
        common.TextEncoder(str(tmp_path / "deeper"), 0)


def test_a_file_stands_for_the_weights_of_timm(file, tiny, tokenizer):
    """Those of a text encoder of transformers are read beside it."""
    folder, bert = tiny("bert")
    encoders = {"image_encoder": "resnet18", "text_encoder": folder}
    vision = part(model_of(tokenizer, **encoders).state_dict(), "vision.")
    save_file(vision, file)
    model = model_of(tokenizer, True, file, **encoders)
    assert_close(part(model.state_dict(), "vision."), vision, 0)
    text = part(bert.state_dict(), "encoder.")
    assert_close(part(model.text.body.state_dict(), "encoder."), text, 0)


@pytest.mark.parametrize("start, word", [
    ("run", "apple"),
    ("run/model.safetensors", "apple"),
    ("alone.safetensors", "pear")])
def test_the_weights_of_a_run_bring_its_words(start, word, tmp_path):
    """A small text encoder knows the vocabulary of its run, and no other."""
    def build(folder, caption, start=""):
        texts = [caption] * 9
        common.build_tokenizer("small", 16, lambda: texts, tmp_path / folder, start=start)
        return (tmp_path / folder / "tokenizer.json").read_text()

    build("run/tokenizer", "red apple")
    tokenizer = Tokenizer(tmp_path / "run" / "tokenizer", 16)
    weights = part(model_of(tokenizer).state_dict())
    for file in ("run/model.safetensors", "alone.safetensors"):
        save_file(weights, tmp_path / file)
    assert word in build("new", "green pear", str(tmp_path / start))


# ------------------------------------------- experts -----------------------------------------
@pytest.mark.parametrize("pooling, tokens", [
    ("cls", slice(0, 1)),
    ("patches", slice(5, 9))])
def test_an_image_expert_is_the_class_token_or_the_mean_of_the_patches(pooling, tokens, tmp_path):
    """Of pixels by its own statistics, in the mean over frames; four registers are no patches."""
    config = transformers.Dinov2WithRegistersConfig(
        **SMALL, image_size=28, patch_size=14, num_register_tokens=4)
    transformers.Dinov2WithRegistersModel(config).save_pretrained(tmp_path)
    write_json(tmp_path / "preprocessor_config.json", {
        "image_processor_type": "BitImageProcessor",
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6]})
    mean = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    std = torch.tensor([0.4, 0.5, 0.6])[:, None, None]
    transform = common.EvalTransform(32, *HALF)
    expert = Expert(str(tmp_path), "image", transform, CPU, pooling=pooling)
    clips = torch.randn(3, 2, 3, 28, 28)
    expected = 0
    for t in range(2):
        frames = clips[:, t] / 2 + 0.5
        output = expert.encoder.body(pixel_values=(frames - mean) / std)
        expected = expected + output.last_hidden_state[:, tokens].mean(1)
    assert_close(expert(clips), common.normalize(expected).detach())


@pytest.mark.parametrize("inputs", ["clean", "training"])
def test_experts_read_whole_images_and_cleaned_captions(inputs, tmp_path, tiny, data, monkeypatch):
    """With --expert-inputs training the views and texts of the towers."""
    seen = {}
    encode = Expert.__call__

    def watched(expert, inputs):
        seen[expert.modality] = inputs
        return encode(expert, inputs)

    monkeypatch.setattr(Expert, "__call__", watched)
    dino, _ = tiny("dino")
    bert, _ = tiny("bert")
    flags = (
        f"--log-every 1 --clean-captions --crop-min 0.3 --expert-inputs {inputs} --dataset {data} "
        f"--image-expert {dino} --image-expert-weight 0.1 "
        f"--text-expert {bert} --text-expert-weight 0.2")
    log = few_steps(temo_experts, tmp_path / "run", *RUN, *flags.split())
    row = log[0]
    expected = row["L_MM"] + 0.1 * row["L_E-image"] + 0.2 * row["L_E-text"]
    assert row["loss"] == pytest.approx(expected)

    transform = common.EvalTransform(32, *HALF, resize="squash")
    train = common.load_data(data, "train")
    whole = [transform(source["path"]) for source in train.sources["source"]]
    whole = torch.stack(whole).flatten(1)
    views = seen["image"].flatten(1)
    distances = torch.cdist(views, whole, p=torch.inf)
    is_clean = inputs == "clean"
    assert (distances.amin(1).max() < 0.02) == is_clean
    assert all(("," in text) != is_clean for text in seen["text"])


# --------------------------------------------- runs ------------------------------------------
def test_load_model_gives_the_run_s_embeddings(tmp_path, data, tokenizer):
    """Also when the folders of its encoders are gone, and with the bias of a projection."""
    clip = tmp_path / "clip"
    text = tmp_path / "text"
    tiny_model("clip", clip, tokenizer)
    tiny_model("distilbert", text, tokenizer)
    flags = (
        f"--image-encoder {clip} --text-encoder {text} --pretrained --projection-bias "
        f"--dataset {data}")
    run_script(temo, tmp_path / "run", *RUN, *flags.split())
    shutil.rmtree(clip)
    shutil.rmtree(text)
    model, words, transform = common.load_model(tmp_path / "run")
    assert model.text.projection.bias.any()
    expected = read_pieces(tmp_path / "run" / "test.safetensors")[data]
    test = common.load_data(data, "test")
    row = [*test.keys()].index(expected.keys[3])
    # the text encoder has dropout, which is off
    pixels = transform(test.read(row))
    tokens = words(test.captions(row))
    image, text, _ = model(pixels[None], tokens)
    assert_close(image[0], expected.image[3], 1e-4)
    assert_close(text[0], expected.text[3], 1e-4)


def test_a_run_stopped_before_its_first_checkpoint_begins_from_the_same_weights(
        data, tmp_path, capsys):
    """Those of --init-from; after a checkpoint they are not read."""
    first = tmp_path / "first"
    folder = tmp_path / "run"
    flags = [*RUN, *f"--eval-every 0 --lr 0 --lr-end 0 --dataset {data}".split()]
    run_script(temo, first, *flags, "--seed", "1")
    run_script(temo, folder, *flags, "--init-from", first)
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").unlink()
    args = temo.parse_args(["--resume", str(folder)])
    for _ in range(2):
        temo.main(args)
        assert equal_files(folder / "model.safetensors", first / "model.safetensors")
    assert capsys.readouterr().out.count("vision.body, vision.projection, text.body") == 2
