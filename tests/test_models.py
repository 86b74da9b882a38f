"""Encoders by name, clips, pooling, initialisation from files, and the model a run leaves.

Configs are built here: no hub."""

import json
import shutil

import common
from contrastive import encoders, engine, evaluation
from contrastive.encoders.frozen import Expert
from contrastive.encoders.tokenizers import Tokenizer
from contrastive.encoders.towers import refuse_blind
from contrastive.encoders.weights import init_from
from contrastive.engine.processes import UserError
from contrastive.evaluation.embed import encode_texts
from contrastive.evaluation.retrieval import evaluate

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DistilBertConfig,
    DistilBertModel,
    ViTConfig,
    ViTForImageClassification,
)

import launch
import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import write_captions

SPEC = dict(image_encoder="small", text_encoder="small", embed_dim=16, image_size=32, text_length=12,
            text_pooling="mean", image_stats="half", eval_resize="crop")
RUN = ["--cpu", "--workers", "0", "--max-steps", "2", "--batch-size", "16"]


def logged(folder):
    """The rows of a run's log that training steps have written."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A csv of 120 images and captions."""
    return str(write_captions(tmp_path_factory.mktemp("data"), 120))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(common.train_wordpiece(["red apple", "green pear", "blue bird on a tree"] * 3), 12)


def tiny_text(folder, tokenizer, kind):
    kinds = {"bert": (BertConfig, BertModel), "distilbert": (DistilBertConfig, DistilBertModel)}
    config_of, model_of = kinds[kind]
    config = config_of(vocab_size=len(tokenizer.tokenizer), hidden_size=24, dim=24, num_hidden_layers=1, n_layers=1,
                       num_attention_heads=2, n_heads=2, intermediate_size=32, hidden_dim=32)
    model = model_of(config)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model.eval()


def tiny_clip(folder, tokenizer, layers=1):
    tower = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2)
    words = dict(vocab_size=len(tokenizer.tokenizer), max_position_embeddings=12, eos_token_id=3, bos_token_id=2,
                 pad_token_id=0)
    patches = dict(image_size=32, patch_size=16)
    model = CLIPModel(CLIPConfig(text_config=tower | words, vision_config=tower | patches, projection_dim=16))
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model.eval()


def tiny_dino(folder):
    from transformers import Dinov2Config, Dinov2Model
    config = Dinov2Config(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(folder)


@pytest.mark.parametrize("name", ["small", "resnet18-cifar", "resnet18", "vit_tiny_patch16_224", "mixer_s32_224",
                                  "swin_s3_tiny_224"])
def test_image_encoders_and_frames(name):
    encoder = common.VisionEncoder(name, 16, pretrained=False, image_size=32).eval()
    clip = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    features, pooled = encoder(clip)
    frames = [torch.nn.functional.normalize(encoder(clip[:, t])[1], dim=-1) for t in range(3)]
    assert features.shape == (2, encoder.width) and pooled.shape == (2, 16)
    assert torch.allclose(pooled, sum(frames) / 3, atol=1e-5)  # meanP: the mean of normalised frame embeddings


def test_cifar_stem_keeps_the_resolution():
    body = common.VisionEncoder("resnet18-cifar", 16, pretrained=False).body
    assert body.forward_features(torch.randn(1, 3, 32, 32)).shape[-2:] == (4, 4)


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
    for encode, *what in ((evaluation.embed.encode_images, data, transform),
                          (evaluation.embed.encode_texts, tokenizer, ["a", "b"])):
        model.train(training)
        encode(model, *what, torch.device("cpu"))
        assert all(m.training == training for m in model.modules())
    assert seen == [False, False]


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_transformers_text_encoder(tmp_path, tokenizer, kind, pooling):
    reference = tiny_text(tmp_path, tokenizer, kind)
    encoder = common.TextEncoder(str(tmp_path), 16, pooling=pooling).eval()
    tokens = tokenizer(["red apple", "a blue bird on a tree"])
    states = reference(**tokens).last_hidden_state
    keep = tokens["attention_mask"][..., None]
    expected = states[:, 0] if pooling == "cls" else (states * keep).sum(1) / keep.sum(1)
    assert torch.allclose(encoder(**tokens), encoder.projection(expected), atol=1e-5)


def test_clip_by_name_keeps_its_own_space(tmp_path, tokenizer):
    reference = tiny_clip(tmp_path, tokenizer)
    spec = SPEC | dict(image_encoder=str(tmp_path), text_encoder=str(tmp_path), image_stats="encoder")
    model, transform = common.build_model(spec, tokenizer, True)
    pixels, tokens = torch.randn(2, 3, 32, 32), tokenizer(["red apple", "green pear"])
    image, text, _ = model.eval()(pixels, tokens)
    out = reference(pixel_values=pixels, **tokens)
    assert torch.allclose(common.normalize(image), out.image_embeds, atol=1e-5)
    assert torch.allclose(common.normalize(text), out.text_embeds, atol=1e-5)
    assert transform.mean == encoders.base.STATS["clip"][0]


def test_a_clip_whose_folder_begins_like_a_video_tower(tmp_path, tokenizer, monkeypatch):
    """It sees frames one by one, as every CLIP, and images."""
    reference = tiny_clip(tmp_path / "video_models" / "clip", tokenizer)
    monkeypatch.chdir(tmp_path)
    spec = SPEC | dict(image_encoder="video_models/clip", text_encoder="", image_stats="encoder")
    model, _ = common.build_model(spec, None, True)
    clips = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    words = tokenizer(["red apple", "green pear"])
    images = [reference(pixel_values=clips[:, t], **words).image_embeds for t in range(3)]
    with torch.no_grad():
        assert torch.allclose(common.normalize(model.eval()(clips[:, 0])[0]), images[0], atol=1e-5)
        assert torch.allclose(model(clips)[0], sum(images) / 3, atol=1e-5)


def test_init_from(tmp_path, tokenizer, capsys):
    one, two = (common.build_model(dict(SPEC), tokenizer, False)[0] for _ in range(2))
    wrapped = {f"module._orig_mod.{k}": v.contiguous() for k, v in one.state_dict().items()}
    save_file(wrapped, tmp_path / "a.safetensors")
    torch.save({"state_dict": one.state_dict()}, tmp_path / "b.pt")
    for file in ("a.safetensors", "b.pt"):
        fresh = common.build_model(dict(SPEC), tokenizer, False)[0]
        encoders.weights.init_from(fresh, tmp_path / file)
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), fresh.state_dict().values()))
    longer = common.build_model(SPEC | dict(text_length=20), tokenizer, False)[0]
    encoders.weights.init_from(longer, tmp_path / "b.pt")
    assert "the others keep their usual start, first text.body.position (23, 128)" in capsys.readouterr().out
    save_file({"other": torch.zeros(3)}, tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="none of its 1 tensors fits"):
        encoders.weights.init_from(two, tmp_path / "c.safetensors")


def test_a_file_of_the_text_encoder_leaves_the_image_encoder_its_published_weights(tmp_path, tokenizer, monkeypatch):
    import timm
    made, create = [], timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **more: (
        create(name, pretrained=False, **more), made.append(pretrained))[0])  # no download
    spec = SPEC | dict(image_encoder="resnet18", image_stats="imagenet")
    whole = common.build_model(dict(spec), tokenizer, False)[0].state_dict()
    for part, published in (("text.", True), ("vision.", False)):
        save_file({k: v.contiguous() for k, v in whole.items() if k.startswith(part)}, tmp_path / f"{part}safetensors")
        made.clear()
        model = common.build_model(dict(spec), tokenizer, True, str(tmp_path / f"{part}safetensors"))[0]
        assert made[-1] is published and (len(made) == 2) is published
        read = {k: v for k, v in model.state_dict().items() if k.startswith(part)}
        assert all(torch.equal(v, whole[k]) for k, v in read.items())


def test_an_encoder_published_in_half_precision_is_rebuilt_in_full(tmp_path, tokenizer):
    """Else its run could be neither resumed nor loaded."""
    tiny_text(tmp_path / "bert", tokenizer, "bert")
    BertModel.from_pretrained(tmp_path / "bert").half().save_pretrained(tmp_path / "bert")
    assert "float16" in (tmp_path / "bert" / "config.json").read_text()
    spec = SPEC | dict(text_encoder=str(tmp_path / "bert"))
    first = common.build_model(spec, tokenizer, True)[0]
    again = common.build_model(spec, tokenizer, False)[0]
    assert {x.dtype for x in again.parameters()} == {torch.float32}
    again.load_state_dict(first.state_dict())
    tokens = tokenizer(["red apple"])
    assert torch.equal(first.eval()(tokens=tokens)[1], again.eval()(tokens=tokens)[1])


def test_a_vit_without_a_pooler_is_read_at_its_class_token(tmp_path):
    """Its pooler would be a random layer; and its pixels have the statistics of its own file."""
    config = ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=32,
                       patch_size=16)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    own = '{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}'
    (tmp_path / "vit" / "preprocessor_config.json").write_text(own)
    pixels, features = torch.randn(2, 3, 32, 32), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        encoder = common.VisionEncoder(str(tmp_path / "vit"), 0, True, 32).eval()
        assert encoder.stats == ((0.5, 0.5, 0.5), (1, 1, 1))
        features.append(encoder(pixels)[0])
    assert torch.equal(*features) and features[0].shape == (2, 24)
    again = common.VisionEncoder(str(tmp_path / "vit"), 0, False, 32, encoder.config).eval()
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again(pixels)[0], features[1])


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "resnet10t", "vit_tiny_patch16_224", "hgnetv2_b0"])
def test_the_width_of_a_timm_encoder_is_that_of_its_features(name):
    encoder = common.VisionEncoder(name, 16, False, 64).eval()
    with torch.no_grad():
        features, z = encoder(torch.randn(2, 3, 64, 64))
    assert features.shape == (2, encoder.width) and z.shape == (2, 16)


def test_the_patches_of_an_expert_are_without_registers(tmp_path):
    config = Dinov2WithRegistersConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                                       patch_size=14, num_register_tokens=4)
    Dinov2WithRegistersModel(config).save_pretrained(tmp_path / "dino")
    transform = common.EvalTransform(28, *encoders.base.STATS["imagenet"])
    expert = Expert(str(tmp_path / "dino"), "image", transform, torch.device("cpu"), pooling="patches")
    pixels = torch.randn(3, 3, 28, 28)
    with torch.no_grad():
        tokens = expert.model(pixel_values=pixels).last_hidden_state       # a class token, 4 registers, 4 patches
    assert tokens.shape == (3, 9, 24)
    assert torch.allclose(expert(pixels), common.normalize(tokens[:, 5:].mean(1)), atol=1e-3)


def test_init_from_a_run_takes_its_words_too(tmp_path, capsys):
    """A small text encoder of another run knows that run's vocabulary, and no other."""
    def words(name, captions, start=""):
        common.build_tokenizer("small", 16, lambda: captions, tmp_path / name / "tokenizer", start=start)
        return (tmp_path / name / "tokenizer" / "tokenizer.json").read_text()
    first, other = words("a", ["red apple"] * 9), words("b", ["green pear"] * 9)
    model = common.build_model(dict(SPEC), Tokenizer.load(tmp_path / "a" / "tokenizer", 16), False)[0]
    weights = tmp_path / "a" / "model.safetensors"
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, weights)
    for k, start in enumerate((tmp_path / "a", weights)):
        assert words(f"c{k}", ["green pear"] * 9, str(start)) == first != other
        assert f"the vocabulary of {tmp_path / 'a' / 'tokenizer'}" in capsys.readouterr().out
    shutil.copy(weights, tmp_path / "alone.safetensors")
    assert words("d", ["green pear"] * 9, str(tmp_path / "alone.safetensors")) == other
    encoders.weights.init_from(model, tmp_path / "a")
    assert "WARNING" not in capsys.readouterr().out
    encoders.weights.init_from(model, tmp_path / "alone.safetensors")
    assert "WARNING: --init-from" in capsys.readouterr().out


def test_words_of_a_run_with_another_text_encoder_stay_there(tmp_path, tokenizer):
    """Its tokenizer is of a BERT, say, whose vocabulary a small text encoder has no use for."""
    tokenizer.save(tmp_path / "a" / "tokenizer")
    engine.processes.write_json(tmp_path / "a" / "model.json", {"text_encoder": "some/bert"})
    common.build_tokenizer("small", 16, lambda: ["quartz"] * 9, tmp_path / "b", start=str(tmp_path / "a"))
    assert "apple" not in (tmp_path / "b" / "tokenizer.json").read_text()


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
        first, found = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "run"))
        assert all(torch.equal(first[k], found[k]) for k in first)
    assert capsys.readouterr().out.count("tensors read from") == 2


def test_init_from_runs_no_pickled_code(tmp_path, tokenizer):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="cannot be read"):
        encoders.weights.init_from(common.build_model(dict(SPEC), tokenizer, False)[0], tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("kind", ["t5", "distilbert", "bert"])
def test_dropout_of_a_text_encoder_stays_or_goes(tmp_path, tokenizer, kind):
    if kind == "t5":
        from transformers import T5Config, T5EncoderModel
        config = T5Config(vocab_size=len(tokenizer.tokenizer), d_model=24, d_kv=12, d_ff=32, num_layers=2, num_heads=2)
        T5EncoderModel(config).save_pretrained(tmp_path)
    else:
        tiny_text(tmp_path, tokenizer, kind)
    model = common.TwoTower(common.VisionEncoder("small", 16), common.TextEncoder(str(tmp_path), 16, pooling="mean"))
    tokens = tokenizer(["red apple", "a blue bird on a tree"])

    def differ(*modes):
        a, b = (model.train(mode)(tokens=tokens)[1] for mode in modes)
        return not torch.equal(a, b)
    encoders.towers.set_dropout(model, 0.0)
    assert differ(True, True) and not differ(False, False)  # its own
    encoders.towers.set_dropout(model, 0.0, text=False)
    assert not differ(True, False)


def test_dropout_of_a_feature_tower():
    model = common.TwoTower(common.VisionEncoder("features", 16, features=(3, 10)), None)
    x = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(0))
    plain = model.train()(x)[0]
    encoders.towers.set_dropout(model, 0.1, text=True)
    assert not torch.equal(model(x)[0], model(x)[0]) and torch.equal(model.eval()(x)[0], plain)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, tokenizer):
    """Two steps with small towers, and two with a tiny transformers text tower and a CLIP vision tower."""
    root = tmp_path_factory.mktemp("runs")
    tiny_text(root / "text", tokenizer, "distilbert")
    tiny_clip(root / "clip", tokenizer)
    flags = [*RUN, "--dataset", data, "--image-size", "32", "--output-dir", str(root)]
    hub = ["--pretrained", "--image-encoder", str(root / "clip"), "--text-encoder", str(root / "text")]
    temo.main(temo.parse_args([*flags, "--run-name", "small"]))
    temo.main(temo.parse_args([*flags, "--run-name", "hub", *hub, "--text-length", "12"]))
    return root


@pytest.mark.parametrize("name", ["small", "hub"])
def test_load_model_gives_the_run_s_embeddings(runs, data, name):
    folder, test = runs / name, common.load_data(data, "test")
    for part in ("text", "clip"):  # a run stands on its own: the encoders' folders may be gone
        if (runs / part).exists():
            (runs / part).rename(runs / f"moved_{part}")
    model, tokenizer, transform = common.load_model(folder)
    _, image, _, _ = evaluation.embed.encode_images(model, test, transform, torch.device("cpu"))
    text = encode_texts(model, tokenizer, [test.captions(i)[0] for i in range(len(test))], torch.device("cpu"))
    summary = json.loads((folder / "summary.json").read_text())
    own = evaluate(model, tokenizer, transform, test, torch.device("cpu"))[0]
    expected = engine.processes.flatten(summary["test"][data])
    assert image.shape == text.shape and engine.processes.flatten(own) == pytest.approx(expected, rel=1e-4)
    one = model(transform(test.read(3))[None])[0]
    assert torch.allclose(one[0], image[3], atol=1e-4)
    assert not [p for p in folder.rglob("*") if p.suffix in (".bin", ".pkl", ".pth")]


def test_a_masked_autoencoder_sees_all_patches_and_i_jepa_is_their_mean(tmp_path):
    import transformers
    small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=16,
                 patch_size=4)
    transformers.ViTMAEModel(transformers.ViTMAEConfig(**small)).save_pretrained(tmp_path / "mae")
    transformers.IJepaModel(transformers.IJepaConfig(**small)).save_pretrained(tmp_path / "ijepa")
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    mae = common.VisionEncoder(str(tmp_path / "mae"), 0, True, 16).eval()
    assert mae.body(pixel_values=x).last_hidden_state.shape[1] == 17  # of 16 patches and the class token
    torch.testing.assert_close(mae(x)[1], mae(x)[1])
    ijepa = common.VisionEncoder(str(tmp_path / "ijepa"), 0, True, 16).eval()
    torch.testing.assert_close(ijepa(x)[1], ijepa.body(pixel_values=x).last_hidden_state.mean(1))


def test_weights_of_another_model_are_no_published_weights(tmp_path):
    """Every name has a prefix that the model does not know: all of it would silently be random."""
    import transformers
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    assert common.TextEncoder(str(tmp_path / "bert"), 0).width == 8
    file = tmp_path / "bert" / "model.safetensors"
    save_file({f"inner.{k}": v for k, v in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match="its weights lack .* more: they are another model's"):
        common.TextEncoder(str(tmp_path / "bert"), 0)


def test_a_first_token_that_sees_only_itself_is_no_text_embedding(tmp_path):
    import transformers
    config = transformers.Qwen3Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                      num_key_value_heads=2, head_dim=4, vocab_size=50)
    transformers.Qwen3Model(config).save_pretrained(tmp_path / "qwen")
    with pytest.raises(UserError, match="its first token sees only itself; --text-pooling mean"):
        refuse_blind(common.TextEncoder(str(tmp_path / "qwen"), 0, pooling="cls"))
    refuse_blind(common.TextEncoder(str(tmp_path / "qwen"), 0, pooling="mean"))


def test_files_with_a_head_in_front_of_their_names_are_read(tmp_path, capsys):
    import transformers
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    published = transformers.BertForMaskedLM(config)
    published.save_pretrained(tmp_path / "published")
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    text = common.TextEncoder(str(tmp_path / "bert"), 4)
    init_from(common.TwoTower(common.VisionEncoder("small", 4), text), tmp_path / "published")
    assert "as text.body.* by name" in capsys.readouterr().out
    words = "embeddings.word_embeddings.weight"
    torch.testing.assert_close(text.body.get_parameter(words), published.bert.get_parameter(words))


def test_float_images_are_refused_and_the_statistics_are_those_of_the_encoder():
    transform = common.EvalTransform(32, (0.5,) * 3, (0.5,) * 3)
    assert transform(torch.zeros(3, 40, 40, dtype=torch.uint8)).shape == (3, 32, 32)
    assert transform(torch.zeros(5, 7)).shape == (5, 7)  # features
    for image in (torch.zeros(3, 40, 40), torch.zeros(4, 3, 40, 40), np.zeros((40, 40, 3), np.float32)):
        with pytest.raises(ValueError, match="pixels are uint8"):
            transform(image)
    for script in (temo, ncl, mmts, mama, ts):
        args = script.parse_args(["--dataset", "own.csv", "--image-encoder", "resnet18"])
        assert args.image_stats == "encoder"


def test_load_model_of_no_run(tmp_path):
    with pytest.raises(UserError, match="no model.json"):
        common.load_model(tmp_path)


def test_experts(tmp_path, tokenizer, data):
    tiny_dino(tmp_path / "dino")
    tiny_text(tmp_path / "roberta", tokenizer, "bert")
    transform = common.EvalTransform(32, *encoders.base.STATS["half"])
    of_images = Expert(str(tmp_path / "dino"), "image", transform, torch.device("cpu"))
    pixels = torch.randn(3, 3, 28, 28)
    image = of_images(pixels)
    patches = Expert(str(tmp_path / "dino"), "image", transform, torch.device("cpu"), pooling="patches")
    mean, std = (torch.tensor(v)[:, None, None] for v in encoders.base.STATS["imagenet"])
    states = of_images.model(pixel_values=(pixels / 2 + 0.5 - mean) / std).last_hidden_state           # (3, 1 + n, 24)
    assert torch.allclose(image, common.normalize(states[:, 0]), atol=1e-5)
    assert torch.allclose(patches(pixels), common.normalize(states[:, 1:].mean(1)), atol=1e-5)
    from transformers import SiglipVisionConfig, SiglipVisionModel
    siglip = SiglipVisionConfig(hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                image_size=28, patch_size=14)
    SiglipVisionModel(siglip).save_pretrained(tmp_path / "siglip")          # 4 patches, no class token
    with pytest.raises(UserError, match="siglip: its 4 tokens are not a class token and a square of patches"):
        Expert(str(tmp_path / "siglip"), "image", transform, torch.device("cpu"))
    clips = torch.randn(2, 3, 3, 32, 32)  # (B, T, 3, S, S)
    means = sum(of_images._features(clips[:, t]) for t in range(3)) / 3
    assert torch.allclose(of_images(clips), common.normalize(means), atol=1e-5)
    text = Expert(str(tmp_path / "roberta"), "text", transform, torch.device("cpu"))(["red apple", "green pear"])
    assert image.shape == (3, 24) and not image.requires_grad
    assert text.shape == (2, 24) and torch.allclose(text.norm(dim=1), torch.ones(2))
    experts = ["--image-expert", str(tmp_path / "dino"), "--text-expert", str(tmp_path / "roberta")]
    flags = [*RUN, "--dataset", data, "--image-size", "32", "--output-dir", str(tmp_path), "--log-every", "1", *experts]

    # the runs of Tables 9 and 10: on one process, and on two, the same curve; logged terms make the loss
    flags += ["--lr", "3e-4", "--run-name"]
    temo.main(temo.parse_args([*flags, "one"]))
    launch.finish("temo", [*flags, "two"], tmp_path / "log", processes=2)
    one, two = (logged(tmp_path / name) for name in ("one", "two"))
    for name in ("loss", "L_MM", "L_E-image", "L_E-text"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=1e-3)
    assert all(r["loss"] == pytest.approx(r["L_MM"] + 0.6 * r["L_E-image"] + 0.4 * r["L_E-text"]) for r in one)


def tiny_bpe(folder):
    """CLIP's tokenizer with a vocabulary of letters and one merge, and a small CLIP's configuration: no weights."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(c + "</w>" for c in letters), "re", "red</w>", "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {w: i for i, w in enumerate(words)}
    CLIPTokenizer(vocab=vocabulary, merges=[("r", "e"), ("re", "d</w>")], model_max_length=77).save_pretrained(folder)
    tower = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = tower | dict(vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=2)  # 2: as in CLIP's own file
    CLIPConfig(text_config=text, vision_config=tower, projection_dim=16).save_pretrained(folder)


def test_clip_s_text_transformer_from_scratch(tmp_path, data):
    """SLIP's text tower: a configuration and a BPE, no weights; what the recipe of cc12m asks for, in small."""
    tiny_bpe(tmp_path / "clip")
    recipe = temo.parse_args(["--dataset", "cc12m", "--text-encoder", str(tmp_path / "clip")])
    tokenizer = common.build_tokenizer(recipe.text_encoder, recipe.text_length, clean=recipe.clean_captions)
    ids = tokenizer(["Red, red!", "b"])["input_ids"]
    assert tokenizer.length == 77 and ids[0, 1] == 53 and (ids[:, 0] == 54).all()  # lower case, 'red' is one token
    assert tokenizer(["a" * 300])["input_ids"].shape == (1, 77)
    names = ("text_encoder", "text_length", "text_pooling", "image_stats", "eval_resize")
    spec = SPEC | {k: getattr(recipe, k) for k in names} | dict(embed_dim=16)
    one, two = (common.build_model(dict(spec), tokenizer, recipe.pretrained)[0] for _ in range(2))
    assert one.text.width == 24 and len(one.text.body.encoder.layers) == 2
    assert one.text.body.embeddings.position_embedding.num_embeddings == 77
    tables = [m.text.body.embeddings.token_embedding.weight for m in (one, two)]
    assert not torch.equal(*tables) and tables[0].std().item() == pytest.approx(0.02, rel=0.1)  # random, as CLIP starts
    assert one.text.projection.weight.std().item() == pytest.approx(24 ** -0.5, rel=0.2)
    one.eval()
    alone, padded = (one.text(**tokenizer(texts))[0] for texts in (["red"], ["red", "a red bird on a tree"]))
    assert torch.allclose(alone, padded, atol=1e-6)  # read at the end of the text, whatever the padding
    flags = [*RUN, "--dataset", data, "--no-pretrained", "--image-size", "24", "--output-dir", str(tmp_path),
             "--run-name", "r", "--text-encoder", str(tmp_path / "clip"), "--text-length", "77", "--embed-dim", "16"]
    assert temo.main(temo.parse_args(flags))["steps"] == 2
    model, tokenizer, _ = common.load_model(tmp_path / "r")
    assert model(tokens=tokenizer(["red"]))[1].shape == (1, 16)


def test_no_hub_for_the_tokenizer_is_one_line():
    with pytest.raises(UserError, match="download it once and give the folder") as refused:
        common.build_tokenizer("openai/clip-vit-base-patch32", 77)
    assert "\n" not in str(refused.value)


def test_transformers_vision_models_and_their_unused_parameters(tmp_path, tokenizer):
    from transformers import ConvNextConfig, ConvNextModel
    tiny_dino(tmp_path / "dino")
    convnext = ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1]))
    convnext.save_pretrained(tmp_path / "convnext")
    model, _ = common.build_model(SPEC | dict(image_encoder=str(tmp_path / "dino"), image_size=28), tokenizer, True)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["vision.body.embeddings.mask_token"]  # never in a loss: DDP would wait for it
    image, text, _ = model(torch.randn(2, 3, 28, 28), tokenizer(["a", "b"]))
    (image.sum() + text.sum()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model, _ = common.build_model(SPEC | dict(image_encoder=str(tmp_path / "convnext")), tokenizer, True)
    assert model.vision.width == 16


def test_an_image_size_the_encoder_cannot_take(tmp_path, tokenizer):
    tiny_clip(tmp_path, tokenizer)
    spec = SPEC | dict(image_encoder=str(tmp_path), text_encoder=str(tmp_path), image_size=24)
    with pytest.raises(UserError, match="--image-size 24 .* doesn't match model"):
        common.build_model(spec, tokenizer, True)


def test_clip4clip_and_t5(tmp_path, tokenizer):
    """ncl.py on clips with both towers of a CLIP and a learnt gamma; and with a T5 encoder for the texts."""
    from transformers import T5Config, T5ForConditionalGeneration
    towers = tmp_path / "clip"
    tiny_clip(towers, tokenizer)
    config = T5Config(vocab_size=len(tokenizer.tokenizer), d_model=24, d_kv=12, d_ff=32, num_layers=1, num_heads=2,
                      decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save(tmp_path / "t5")
    flags = [*RUN, "--clips", "32", "16", "16", "--pretrained", "--text-length", "12", "--embed-dim", "16",
             "--output-dir", str(tmp_path)]
    of_clip = ["--run-name", "run-clip", "--image-encoder", str(towers), "--text-encoder", str(towers),
               "--image-stats", "encoder", "--learnable-tau", "--tau", "0.01", "--frames", "3"]
    clip = ncl.main(ncl.parse_args([*flags, *of_clip]))
    model, _, _ = common.load_model(tmp_path / "run-clip")
    assert model.vision.projection.out_features == model.text.projection.out_features == 16
    assert model.vision.stats == encoders.base.STATS["clip"]
    assert logged(tmp_path / "run-clip")[-1]["tau"] >= 0.01 and clip["test"]["moving-emoji"]["images"] == 16
    of_t5 = ["--run-name", "run-t5", "--text-encoder", str(tmp_path / "t5"), "--text-pooling", "mean"]
    t5 = ncl.main(ncl.parse_args([*flags, *of_t5]))
    names = common.load_model(tmp_path / "run-t5")[0].text.body.state_dict()
    assert t5["steps"] == 2 and names and not [n for n in names if "decoder" in n]
    of_mama = ["--run-name", "run-mama", "--meta-size", "8", "--meta-batch-size", "4", *of_clip[2:6], "--frames", "3",
               "--log-every", "1"]
    mama.main(mama.parse_args([*flags, *of_mama]))  # the look-ahead through CLIP's attention
    weights = [row["w"] for row in logged(tmp_path / "run-mama")]
    assert len(weights) == 2 and 0 < weights[0] != weights[1] < 1


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
