"""Encoders by name, clips, pooling, initialisation from files, and the model a run leaves.

Configs are built here: no hub."""

import copy
import json
import shutil

import common
from contrastive import encoders, engine, evaluation
from contrastive.encoders.frozen import Expert
from contrastive.encoders.texts import Tokenizer
from contrastive.encoders.towers import refuse_blind
from contrastive.encoders.weights import init_from
from contrastive.engine.processes import UserError
from contrastive.evaluation.embed import encode_images, encode_texts

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

import launch
import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import steps as logged
from helpers import tiny_model, write_captions

SPEC = dict(image_encoder="small", text_encoder="small", embed_dim=16, image_size=32, text_length=12,
            text_pooling="mean", image_stats="half", eval_resize="crop")
RUN = ["--cpu", "--workers", "0", "--max-steps", "2", "--batch-size", "16"]
CPU, SMALL = torch.device("cpu"), dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def plain(state, start=""):
    return {k: v.contiguous() for k, v in state.items() if k.startswith(start)}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A csv of 120 images and captions."""
    return str(write_captions(tmp_path_factory.mktemp("data"), 120))


# ---------------------------------------------------- towers by name ------------------------------------------------
def test_a_clip_as_image_encoder_is_the_text_encoder_too(tiny, data, tmp_path):
    """With the width of its projections; what a flag names is kept, and any other encoder leaves the recipe's."""
    folder, clip = tiny("clip")
    other = temo.parse_args([]).text_encoder
    for flags, expected in (([], (folder, clip.config.projection_dim)), (["--embed-dim", "8"], (folder, 8)),
                            (["--text-encoder", "small"], (other, 128))):
        run = [*RUN, "--dataset", data, "--image-encoder", folder, "--image-size", "32", *flags]
        temo.main(temo.parse_args([*run, "--output-dir", str(tmp_path), "--run-name", "".join(["r", *flags])]))
        spec = engine.processes.read_json(tmp_path / "".join(["r", *flags]) / "model.json")
        assert (spec["text_encoder"], spec["embed_dim"]) == expected


@pytest.mark.parametrize("name", ["small", "resnet18-cifar", "resnet10t", "vit_tiny_patch16_224", "mixer_s32_224",
                                  "swin_s3_tiny_224", "mobilenetv3_small_050", "hgnetv2_b0"])
def test_image_encoders_and_frames(name):
    encoder = common.VisionEncoder(name, 16, pretrained=False, image_size=32).eval()
    clip = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    with torch.no_grad():
        features, pooled = encoder(clip)
        frames = [common.normalize(encoder(clip[:, t])[1]) for t in range(3)]
    assert features.shape == (2, encoder.width) and pooled.shape == (2, 16)
    assert torch.allclose(pooled, sum(frames) / 3, atol=1e-5)  # meanP: the mean of normalised frame embeddings
    if name == "resnet18-cifar":  # its stem keeps the resolution
        assert encoder.body.forward_features(clip[0]).shape[-2:] == (4, 4)


def test_paper_encoders_exist_by_name():
    encoder = common.VisionEncoder("resnet50.tv_in1k", 256, pretrained=False)
    assert encoder.width == 2048 and encoder.stats[0] == pytest.approx((0.485, 0.456, 0.406))
    encoder = common.VisionEncoder("vit_base_patch16_224.augreg_in1k", 256, pretrained=False, image_size=64)
    assert encoder.width == 768 and tuple(encoder.stats[0]) == (0.5, 0.5, 0.5)


def test_default_towers_have_no_batchnorm_and_no_dropout(tokenizer):
    model, _ = common.build_model(dict(SPEC), tokenizer, False)
    assert not encoders.base.has_batchnorm(model) and not any(isinstance(m, torch.nn.Dropout) for m in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_encoding_leaves_a_model_in_its_mode(tokenizer, training):
    """It encodes without dropout, and training goes on as before."""
    model, transform = common.build_model(dict(SPEC), tokenizer, False)
    seen, data = [], common.load_data("moving-emoji", "val", clips=(8, 8, 8))
    for tower in (model.vision, model.text):
        tower.register_forward_hook(lambda module, *_: seen.append(module.training))
    for encode, *what in ((encode_images, data, transform), (encode_texts, tokenizer, ["a", "b"])):
        model.train(training)
        encode(model, *what, CPU)
        assert all(m.training == training for m in model.modules())
    assert seen == [False, False]


def test_pads_follow_the_text(tokenizer):
    left = copy.deepcopy(tokenizer.tokenizer)
    left.padding_side = "left"
    ids = Tokenizer(left, 12)(["a", "one number 0123456789"])["input_ids"]
    assert (ids[:, 0] == left.cls_token_id).all() and ids[0, -1] == left.pad_token_id


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_transformers_text_encoder(tiny, tokenizer, kind, pooling):
    folder, reference = tiny(kind)
    encoder = common.TextEncoder(folder, 16, pooling=pooling).eval()
    tokens = tokenizer(["red apple", "a blue bird on a tree"])
    states, keep = reference(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
    expected = states[:, 0] if pooling == "cls" else (states * keep).sum(1) / keep.sum(1)
    assert torch.allclose(encoder(**tokens), encoder.projection(expected), atol=1e-5)


def test_padding_changes_no_text_of_the_small_encoder(tokenizer):
    encoder = common.TextEncoder("small", 16, vocabulary=len(tokenizer.tokenizer)).eval()
    alone, padded = (encoder(**tokenizer(texts))[0] for texts in (["red"], ["red", "a blue bird on a tree"]))
    assert torch.allclose(alone, padded, atol=1e-5)


def test_clip_keeps_its_own_space(tiny, tokenizer):
    folder, reference = tiny("clip")
    spec = SPEC | dict(image_encoder=folder, text_encoder=folder, image_stats="encoder")
    model, transform = common.build_model(spec, tokenizer, True)
    clips, tokens = torch.randn(2, 3, 3, 32, 32), tokenizer(["red apple", "a blue bird on a tree"])
    image, text, _ = model.eval()(clips[:, 0], tokens)
    of_frames = [reference(pixel_values=clips[:, t], **tokens) for t in range(3)]
    assert torch.allclose(common.normalize(image), of_frames[0].image_embeds, atol=1e-5)
    assert torch.allclose(common.normalize(text), of_frames[0].text_embeds, atol=1e-5)
    assert torch.allclose(model(clips)[0], sum(x.image_embeds for x in of_frames) / 3, atol=1e-5)
    assert transform.mean == encoders.base.STATS["clip"][0]
    with pytest.raises(UserError, match="at --image-size 24, .* doesn't match model"):
        common.build_model(spec | dict(image_size=24), tokenizer, True)


def test_an_encoder_published_in_half_precision_is_rebuilt_in_full(tmp_path, tokenizer):
    """Else its run could be neither resumed nor loaded."""
    tiny_model("bert", tmp_path, tokenizer).half().save_pretrained(tmp_path)
    assert "float16" in (tmp_path / "config.json").read_text()
    spec = SPEC | dict(text_encoder=str(tmp_path))
    first, again = (common.build_model(spec, tokenizer, pretrained)[0] for pretrained in (True, False))
    assert {x.dtype for x in again.parameters()} == {torch.float32}
    again.load_state_dict(first.state_dict())
    tokens = tokenizer(["red apple"])
    assert torch.equal(first.eval()(tokens=tokens)[1], again.eval()(tokens=tokens)[1])


def test_a_vit_without_a_pooler_is_read_at_its_class_token(tiny, tmp_path):
    """Its pooler would be a random layer; and its pixels have the statistics of its own file."""
    folder = shutil.copytree(tiny("vit")[0], tmp_path / "vit")
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}')
    pixels, features = torch.randn(2, 3, 32, 32), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        encoder = common.VisionEncoder(str(folder), 0, True, 32).eval()
        assert encoder.stats == ((0.5, 0.5, 0.5), (1, 1, 1))
        features.append(encoder(pixels)[0])
    assert torch.equal(*features) and features[0].shape == (2, 24)
    again = common.VisionEncoder(str(folder), 0, False, 32, encoder.config).eval()
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again(pixels)[0], features[1])


def test_a_masked_autoencoder_sees_all_patches_and_i_jepa_is_their_mean(tmp_path):
    small = SMALL | dict(image_size=16, patch_size=4)
    T.ViTMAEModel(T.ViTMAEConfig(**small)).save_pretrained(tmp_path / "mae")
    T.IJepaModel(T.IJepaConfig(**small)).save_pretrained(tmp_path / "ijepa")
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    mae, ijepa = (common.VisionEncoder(str(tmp_path / name), 0, True, 16).eval() for name in ("mae", "ijepa"))
    assert mae.body(pixel_values=x).last_hidden_state.shape[1] == 17  # of 16 patches and the class token
    torch.testing.assert_close(ijepa(x)[1], ijepa.body(pixel_values=x).last_hidden_state.mean(1))


def test_transformers_vision_models_and_their_unused_parameters(tiny, tmp_path, tokenizer):
    convnext = T.ConvNextModel(T.ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1]))
    convnext.save_pretrained(tmp_path / "convnext")
    model, _ = common.build_model(SPEC | dict(image_encoder=tiny("dino")[0], image_size=28), tokenizer, True)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["vision.body.embeddings.mask_token"]  # never in a loss: DDP would wait for it
    image, text, _ = model(torch.randn(2, 3, 28, 28), tokenizer(["a", "b"]))
    (image.sum() + text.sum()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model, _ = common.build_model(SPEC | dict(image_encoder=str(tmp_path / "convnext")), tokenizer, True)
    assert model.vision.width == 16


def test_a_first_token_that_sees_only_itself_is_no_text_embedding(tmp_path):
    T.Qwen3Model(T.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=4, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its first token sees only itself; --text-pooling mean"):
        refuse_blind(common.TextEncoder(str(tmp_path), 0, pooling="cls"))
    refuse_blind(common.TextEncoder(str(tmp_path), 0, pooling="mean"))


def test_clip_s_text_transformer_from_scratch(tmp_path):
    """SLIP's text tower: CLIP's tokenizer of letters and one merge and a configuration, no weights; what the recipe of
    cc12m asks for, in small."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(c + "</w>" for c in letters), "re", "red</w>", "<|startoftext|>", "<|endoftext|>"]
    T.CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[("r", "e"), ("re", "d</w>")],
                    model_max_length=77).save_pretrained(tmp_path)
    tower = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = tower | dict(vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=2)  # 2: as in CLIP's own file
    T.CLIPConfig(text_config=text, vision_config=tower, projection_dim=16).save_pretrained(tmp_path)
    recipe = temo.parse_args(["--dataset", "cc12m", "--text-encoder", str(tmp_path)])
    tokenizer = common.build_tokenizer(recipe.text_encoder, recipe.text_length, clean=recipe.clean_captions)
    ids = tokenizer(["Red, red!", "b"])["input_ids"]
    assert tokenizer.length == 77 and ids[0, 1] == 53 and (ids[:, 0] == 54).all()  # lower case, 'red' is one token
    assert tokenizer(["a" * 300])["input_ids"].shape == (1, 77)
    names = ("text_encoder", "text_length", "text_pooling", "image_stats", "eval_resize")
    spec = SPEC | {k: getattr(recipe, k) for k in names} | dict(embed_dim=16)
    one, two = (common.build_model(dict(spec), tokenizer, recipe.pretrained)[0] for _ in range(2))
    assert one.text.body.embeddings.position_embedding.num_embeddings == 77
    tables = [m.text.body.embeddings.token_embedding.weight for m in (one, two)]
    assert not torch.equal(*tables) and tables[0].std().item() == pytest.approx(0.02, rel=0.1)  # random, as CLIP starts
    assert one.text.projection.weight.std().item() == pytest.approx(24 ** -0.5, rel=0.2)
    one.eval()
    alone, padded = (one.text(**tokenizer(texts))[0] for texts in (["red"], ["red", "a red bird on a tree"]))
    assert torch.allclose(alone, padded, atol=1e-6)  # read at the end of the text, whatever the padding


@pytest.mark.parametrize("kind", ["t5", "distilbert", "bert"])
def test_dropout_of_a_text_encoder_stays_or_goes(tiny, tokenizer, kind):
    text = common.TextEncoder(tiny(kind)[0], 16, pooling="mean")
    model, tokens = common.TwoTower(common.VisionEncoder("small", 16), text), tokenizer(["red apple", "a blue bird"])

    def differ(*modes):
        a, b = (model.train(mode)(tokens=tokens)[1] for mode in modes)
        return not torch.equal(a, b)
    encoders.towers.set_dropout(model, 0.0)
    assert differ(True, True) and not differ(False, False)  # its own
    encoders.towers.set_dropout(model, 0.0, text=False)
    assert not differ(True, False)


def test_float_images_are_refused_and_the_statistics_are_those_of_the_encoder():
    transform = common.EvalTransform(32, (0.5,) * 3, (0.5,) * 3)
    assert transform(torch.zeros(3, 40, 40, dtype=torch.uint8)).shape == (3, 32, 32)
    assert transform(torch.zeros(5, 7)).shape == (5, 7)  # features
    for image in (torch.zeros(3, 40, 40), torch.zeros(4, 3, 40, 40)):
        with pytest.raises(ValueError, match="pixels are uint8"):
            transform(image)
    for script in (temo, ncl, mmts, mama, ts):
        args = script.parse_args(["--dataset", "own.csv", "--image-encoder", "resnet18"])
        assert args.image_stats == "encoder"


def test_group_norm_s_derivative_in_forward_mode_without_channels_last(monkeypatch):
    """As torch before 2.14 needs it, which refuses a channels-last image there: the same numbers as torch's today."""
    norm = encoders.base.GroupNorm(2, 4).double()
    x, v = torch.rand(2, 3, 4, 5, 5, dtype=torch.float64).unbind()  # (3, 4, 5, 5) each
    _, wanted = torch.func.jvp(norm, (x,), (v,))
    seen = []
    monkeypatch.setattr(encoders.base.GroupNorm, "REFUSES", True)
    monkeypatch.setattr(torch.nn.GroupNorm, "forward", lambda self, x, of=torch.nn.GroupNorm.forward: (
        seen.append(x.is_contiguous()), of(self, x))[1])
    last = torch.channels_last
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.to(memory_format=last), v.to(memory_format=last))
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(norm(dual)).tangent, wanted)
    norm(x.to(memory_format=last))
    assert seen == [True, False]


# ---------------------------------------------------- weights from files --------------------------------------------
def test_init_from(tmp_path, tiny, tokenizer, capsys):
    """By the names of a run, of a wrapper, of a file with a head, and by the order of a tower's shapes."""
    one, other = (common.build_model(dict(SPEC), tokenizer, False)[0] for _ in range(2))
    save_file({f"module._orig_mod.{k}": v for k, v in plain(one.state_dict()).items()}, tmp_path / "a.safetensors")
    torch.save({"state_dict": one.state_dict()}, tmp_path / "b.pt")
    for file in ("a.safetensors", "b.pt"):
        fresh = common.build_model(dict(SPEC), tokenizer, False)[0]
        init_from(fresh, tmp_path / file)
        assert equal(one.state_dict(), fresh.state_dict())
    longer = common.build_model(SPEC | dict(text_length=20), tokenizer, False)[0]
    init_from(longer, tmp_path / "b.pt")
    assert "the others keep their usual start, first text.body.position (23, 128)" in capsys.readouterr().out
    body = one.vision.body.state_dict()
    torch.save({str(k): v for k, v in enumerate(body.values())} | {"head": torch.zeros(3)}, tmp_path / "c.pt")
    init_from(other, tmp_path / "c.pt")
    assert equal(other.vision.body.state_dict(), body) and "by order" in capsys.readouterr().out
    published = T.BertModel(T.BertConfig.from_pretrained(tiny("bert")[0]))
    published.save_pretrained(tmp_path / "published")
    text = common.TextEncoder(tiny("bert")[0], 4)
    init_from(common.TwoTower(common.VisionEncoder("small", 4), text), tmp_path / "published")
    assert "as text.body.* by name" in capsys.readouterr().out and equal(text.body.state_dict(), published.state_dict())


def test_files_that_fit_nowhere_or_hold_code_are_refused(tmp_path, tokenizer):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    save_file({"other": torch.zeros(3)}, tmp_path / "c.safetensors")
    model = common.build_model(dict(SPEC), tokenizer, False)[0]
    for file, words in (("evil.pt", "Weights only load failed"), ("c.safetensors", "none of its 1 tensors fits")):
        with pytest.raises(UserError, match=f"--init-from {tmp_path / file}: {words}"):
            init_from(model, tmp_path / file)
    assert not (tmp_path / "owned").exists()


def test_weights_of_another_model_are_no_published_weights(tmp_path, tokenizer):
    """Every name has a prefix that the model does not know: all of it would silently be random."""
    tiny_model("bert", tmp_path, tokenizer)
    file = tmp_path / "model.safetensors"
    save_file({f"inner.{k}": v for k, v in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match="its weights lack .* more: they are another model's"):
        common.TextEncoder(str(tmp_path), 0)


def test_a_file_of_the_text_encoder_leaves_no_image_encoder_at_random(tmp_path, tokenizer):
    """Weights of timm are not downloaded beside a file."""
    spec = SPEC | dict(image_encoder="resnet18", image_stats="imagenet")
    whole = common.build_model(dict(spec), tokenizer, False)[0].state_dict()
    text, vision = (str(tmp_path / f"{part}.safetensors") for part in ("text", "vision"))
    save_file(plain(whole, "text."), text)
    save_file(plain(whole, "vision."), vision)
    model = common.build_model(dict(spec), tokenizer, True, vision)[0]
    assert equal(plain(model.state_dict(), "vision."), plain(whole, "vision."))
    with pytest.raises(UserError, match=f"--init-from {text}: has no image encoder, and resnet18 would be random"):
        common.build_model(dict(spec), tokenizer, True, text)
    common.build_model(dict(spec), tokenizer, False, text)


def test_init_from_a_run_takes_its_words_too(tmp_path, capsys):
    """A small text encoder of another run knows that run's vocabulary, and no other; that of a BERT is none for it."""
    def words(name, captions, start=""):
        common.build_tokenizer("small", 16, lambda: captions, tmp_path / name / "tokenizer", start=start)
        return (tmp_path / name / "tokenizer" / "tokenizer.json").read_text()
    first, other = words("a", ["red apple"] * 9), words("b", ["green pear"] * 9)
    model = common.build_model(dict(SPEC), Tokenizer.load(tmp_path / "a" / "tokenizer", 16), False)[0]
    weights = tmp_path / "a" / "model.safetensors"
    save_file(plain(model.state_dict()), weights)
    for k, start in enumerate((tmp_path / "a", weights)):
        assert words(f"c{k}", ["green pear"] * 9, str(start)) == first != other
        assert f"the vocabulary of {tmp_path / 'a' / 'tokenizer'}" in capsys.readouterr().out
    shutil.copy(weights, tmp_path / "alone.safetensors")
    assert words("d", ["green pear"] * 9, str(tmp_path / "alone.safetensors")) == other
    for path, warned in ((tmp_path / "a", False), (tmp_path / "alone.safetensors", True)):
        init_from(model, path)
        assert ("WARNING: --init-from" in capsys.readouterr().out) == warned
    engine.processes.write_json(tmp_path / "a" / "model.json", {"text_encoder": "some/bert"})
    assert words("e", ["green pear"] * 9, str(tmp_path / "a")) == other


# ---------------------------------------------------- experts -------------------------------------------------------
def test_experts(tmp_path, tiny, data):
    dino, bert = tiny("dino")[0], tiny("bert")[0]
    transform = common.EvalTransform(32, *encoders.base.STATS["half"])
    registers = T.Dinov2WithRegistersConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                                            patch_size=14, num_register_tokens=4)
    T.Dinov2WithRegistersModel(registers).save_pretrained(tmp_path / "registers")
    pixels = torch.randn(3, 3, 28, 28)
    mean, std = (torch.tensor(v)[:, None, None] for v in encoders.base.STATS["imagenet"])
    for name, first_patch in ((dino, 1), (str(tmp_path / "registers"), 5)):
        of_images, patches = (Expert(name, "image", transform, CPU, pooling=p) for p in ("cls", "patches"))
        with torch.no_grad():
            states = of_images.model(pixel_values=(pixels / 2 + 0.5 - mean) / std).last_hidden_state   # (3, n, 24)
        assert states.shape[1] == first_patch + 4
        assert torch.allclose(of_images(pixels), common.normalize(states[:, 0]), atol=1e-5)
        assert torch.allclose(patches(pixels), common.normalize(states[:, first_patch:].mean(1)), atol=1e-5)
    siglip = T.SiglipVisionConfig(**SMALL, image_size=28, patch_size=14)
    T.SiglipVisionModel(siglip).save_pretrained(tmp_path / "siglip")          # 4 patches, no class token
    with pytest.raises(UserError, match="siglip: its 4 tokens are not a class token and a square of patches"):
        Expert(str(tmp_path / "siglip"), "image", transform, CPU)
    clips = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    means = sum(of_images._features(clips[:, t]) for t in range(3)) / 3
    assert torch.allclose(of_images(clips), common.normalize(means), atol=1e-5)
    text = Expert(bert, "text", transform, CPU)(["red apple", "green pear"])
    assert text.shape == (2, 24) and torch.allclose(text.norm(dim=1), torch.ones(2))

    # the runs of Tables 9 and 10: on one process, and on two in row blocks, the same curve; logged terms make the loss
    flags = [*RUN, "--dataset", data, "--image-size", "32", "--output-dir", str(tmp_path), "--log-every", "1",
             "--image-expert", dino, "--text-expert", bert, "--lr", "3e-4", "--run-name"]
    temo.main(temo.parse_args([*flags, "one"]))
    launch.finish("temo", [*flags, "two"], tmp_path / "log", processes=2)
    one, two = (logged(tmp_path / name) for name in ("one", "two"))
    for name in ("loss", "L_MM", "L_E-image", "L_E-text"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=1e-3)
    assert all(r["loss"] == pytest.approx(r["L_MM"] + 0.6 * r["L_E-image"] + 0.4 * r["L_E-text"]) for r in one)


# ---------------------------------------------------- runs ----------------------------------------------------------
@pytest.mark.parametrize("hub", [False, True], ids=["small", "hub"])
def test_load_model_gives_the_run_s_embeddings(tmp_path, data, tokenizer, hub):
    """With small towers, and with a transformers text tower and a CLIP's vision tower, whose folders are then gone."""
    flags = [*RUN, "--dataset", data, "--image-size", "32", "--output-dir", str(tmp_path), "--run-name", "r"]
    if hub:
        tiny_model("clip", tmp_path / "clip", tokenizer), tiny_model("distilbert", tmp_path / "text", tokenizer)
        flags += ["--pretrained", "--image-encoder", str(tmp_path / "clip"), "--text-encoder", str(tmp_path / "text"),
                  "--text-length", "12"]
    summary, folder, test = temo.main(temo.parse_args(flags)), tmp_path / "r", common.load_data(data, "test")
    for part in ("text", "clip") if hub else ():
        shutil.rmtree(tmp_path / part)
    model, words, transform = common.load_model(folder)
    _, image, _, _ = encode_images(model, test, transform, CPU)
    text = encode_texts(model, words, [test.captions(i)[0] for i in range(len(test))], CPU)
    own, *_ = evaluation.retrieval.measure((model, words, transform), test, CPU, ("retrieval", "gap"))
    expected = engine.processes.flatten(summary["test"][data])
    assert image.shape == text.shape and engine.processes.flatten(own) == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(model(transform(test.read(3))[None])[0][0], image[3], atol=1e-4)
    assert not [p for p in folder.rglob("*") if p.suffix in (".bin", ".pkl", ".pth")]
    spec = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(spec | {"image_encoder": "resnet18-cifar", "vision_config": None}))
    with pytest.raises(UserError, match="r: model.safetensors and model.json differ in vision.body"):
        common.load_model(folder)
    (folder / "model.json").unlink()
    with pytest.raises(UserError, match="model.json: .*No such file"):
        common.load_model(folder)


def test_a_run_stopped_before_its_first_checkpoint_begins_from_the_same_weights(data, tmp_path, capsys):
    """The weights of --init-from, not others in silence; after a checkpoint they are not asked for."""
    flags = [*RUN, "--dataset", data, "--image-size", "16", "--output-dir", str(tmp_path), "--eval-every", "0", "--lr",
             "0", "--lr-end", "0"]
    temo.main(temo.parse_args([*flags, "--run-name", "first", "--seed", "1"]))
    temo.main(temo.parse_args([*flags, "--run-name", "run", "--init-from", str(tmp_path / "first")]))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    for _ in range(2):
        temo.main(temo.parse_args(["--resume", str(tmp_path / "run")]))
        assert equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("first", "run")))
    assert capsys.readouterr().out.count("tensors read from") == 2


def test_clip4clip_and_t5(tmp_path, tiny):
    """ncl.py on clips with both towers of a CLIP and a learnt gamma, and with a T5 encoder for the texts; mama.py's
    look-ahead through CLIP's attention."""
    flags = [*RUN, "--clips", "32", "16", "16", "--pretrained", "--text-length", "12", "--embed-dim", "16",
             "--output-dir", str(tmp_path), "--log-every", "1", "--run-name"]
    towers = ["--image-encoder", tiny("clip")[0], "--text-encoder", tiny("clip")[0], "--frames", "3"]
    clip = ncl.main(ncl.parse_args([*flags, "clip", *towers, "--image-stats", "encoder", "--learnable-tau", "--tau",
                                    "0.01"]))
    model, _, _ = common.load_model(tmp_path / "clip")
    assert model.vision.projection.out_features == model.text.projection.out_features == 16
    assert model.vision.stats == encoders.base.STATS["clip"]
    assert logged(tmp_path / "clip")[-1]["tau"] >= 0.01 and clip["test"]["moving-emoji"]["images"] == 16
    t5 = ncl.main(ncl.parse_args([*flags, "t5", "--text-encoder", tiny("t5")[0], "--text-pooling", "mean"]))
    names = common.load_model(tmp_path / "t5")[0].text.body.state_dict()
    assert t5["steps"] == 2 and names and not [n for n in names if "decoder" in n]
    mama.main(mama.parse_args([*flags, "mama", *towers, "--meta-size", "8", "--meta-batch-size", "4"]))
    weights = [row["w"] for row in logged(tmp_path / "mama")]
    assert len(weights) == 2 and 0 < weights[0] != weights[1] < 1
