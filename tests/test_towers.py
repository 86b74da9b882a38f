"""CLIP-ViP's and AVION's towers over whole clips, by loops; their released weights; their runs."""

import math

import common
from contrastive import encoders
from contrastive.encoders.models import model_of_spec
from contrastive.encoders.weights import init_from
from contrastive.core.processes import UserError

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as T
from safetensors.torch import save_file

import mama
import temo
from helpers import evaluated, run_script, steps
from helpers import SPEC


# -------------------------------------------- CLIP-ViP ------------------------------------------
@pytest.fixture
def clip(tiny, tokenizer):
    """The folder of a tiny CLIP, the model, and its tokenizer."""
    return *tiny("clip"), tokenizer


def tower_of(clip, **options):
    torch.manual_seed(1)
    tower = encoders.clip_vip.ClipViP(clip[1].vision_model, **options).eval()
    torch.nn.init.normal_(tower.temporal)
    return tower


def model_of(clip, **changes):
    spec = (
        SPEC
        | dict(image_encoder=f"clip_vip:{clip[0]}", text_encoder=clip[0], image_stats="encoder")
        | changes
    )
    return model_of_spec(spec, clip[2], True)[0].eval()


def published(config):
    """A state dict with the names and shapes of the released files.

    Their model is VidCLIP, whose `clipmodel` is the authors'.
    """
    shapes = {k: v.shape for k, v in T.CLIPModel(config).state_dict().items()}
    width = config.vision_config.hidden_size
    shapes |= {
        "vision_model.embeddings.added_cls": (3, width),
        "vision_model.embeddings.position_ids": (1, 5),
        "vision_model.embeddings.temporal_embedding": (1, 12, width),
        "text_model.embeddings.position_ids": (1, 12),
    }
    return {f"clipmodel.{k}": torch.randn(shape) * 0.1 for k, shape in shapes.items()}


@pytest.mark.parametrize("frames", [1, 3])
def test_attention_against_loops(clip, frames):
    """As transformers' own, with a mask that lets a patch see the proxies and its frame."""
    M, L, T = 4, 5, frames
    attention = clip[1].vision_model.encoder.layers[0].self_attn
    x = torch.randn(2, M + T * L, 24)
    frame_of = torch.tensor([-1] * M + [t for t in range(T) for _ in range(L)])
    visible = (frame_of[:, None] == frame_of) | (frame_of[:, None] < 0) | (frame_of < 0)
    assert visible.sum(1).tolist() == [M + T * L] * M + [M + L] * T * L
    expected = attention(x, attention_mask=torch.where(visible, 0.0, -math.inf)[None, None])[0]
    assert torch.allclose(encoders.clip_vip.attend(attention, x, M, T), expected, atol=1e-5)


def test_one_frame_without_proxies_is_clip_and_the_order_of_frames_counts(clip):
    pixels, clips, tower = torch.randn(3, 3, 32, 32), torch.randn(2, 3, 3, 32, 32), tower_of(clip)
    with torch.no_grad():
        expected = clip[1].vision_model(pixel_values=pixels).pooler_output
        # its temporal embedding is 0
        alone = encoders.clip_vip.ClipViP(clip[1].vision_model, proxies=0).eval()
        for images in (pixels, pixels[:, None]):
            assert torch.allclose(alone(images), expected, atol=1e-5)
        assert not torch.allclose(tower(pixels), expected, atol=1e-3)
        assert not torch.allclose(tower(clips), tower(clips.flip(1)), atol=1e-4)
        (x, M, T), token = tower.embed(clips), clip[1].vision_model.embeddings.class_embedding
        place = clip[1].vision_model.embeddings.position_embedding.weight[0]
    assert (M, T) == (4, 3) and x.shape == (2, 4 + 3 * 4, 24)
    assert torch.allclose(x[0, :4], torch.cat([token[None], tower.added_cls]) + place)


def test_frames_between_those_the_weights_know(clip):
    """Twelve as they are; 24 and 6 by torch's line, whose ends are not moved out."""
    tower = tower_of(clip)
    time = {
        T: tower.embed(torch.zeros(1, T, 3, 32, 32))[0][0, 4:].unflatten(0, (T, 4))[:, 0]
        for T in (6, 12, 24)
    }
    base = time[12] - tower.temporal
    assert torch.allclose(base, base[:1].expand(12, -1), atol=1e-5)
    assert torch.allclose(time[6] - base[0], tower.temporal.unflatten(0, (6, 2)).mean(1), atol=1e-5)
    quarter = 0.75 * tower.temporal[:-1] + 0.25 * tower.temporal[1:]
    assert torch.allclose(time[24][1:-1:2] - base[0], quarter, atol=1e-5)


def test_a_released_file_is_read_to_its_last_tensor(clip, tmp_path, capsys):
    state, model = published(clip[1].config), model_of(clip)
    torch.save(state, tmp_path / "a.pt")
    init_from(model, tmp_path / "a.pt")
    printed = capsys.readouterr().out
    assert f"{len(model.state_dict())} of {len(model.state_dict())} tensors read" in printed
    reference = T.CLIPModel(clip[1].config).eval()  # the same numbers by transformers' names
    plain = {k.removeprefix("clipmodel."): v for k, v in state.items()}
    assert not reference.load_state_dict(plain, strict=False).missing_keys
    tokens = clip[2](["red apple", "green pear"])
    with torch.no_grad():
        text = reference(pixel_values=torch.zeros(2, 3, 32, 32), **tokens).text_embeds
        assert torch.allclose(common.normalize(model(tokens=tokens)[1]), text, atol=1e-5)
    assert torch.equal(
        model.vision.body.temporal, plain["vision_model.embeddings.temporal_embedding"][0]
    )
    assert torch.equal(model.vision.body.added_cls, plain["vision_model.embeddings.added_cls"])


def test_a_released_file_that_does_not_fit(clip, tmp_path):
    state = published(clip[1].config)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(UserError, match="first vision.projection.weight"):
        init_from(model_of(clip, embed_dim=8), tmp_path / "a.pt")
    del state["clipmodel.vision_model.post_layernorm.bias"]
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(
        UserError, match=r"1 of its .* first vision.body.clip.post_layernorm.bias \(24,\)"
    ):
        init_from(model_of(clip), tmp_path / "a.pt")


def test_a_run_with_the_look_ahead_loads_and_evaluates(clip, tmp_path):
    """mama.py from the released weights, and eval.py of the run."""
    weights = str(tmp_path / "a.pt")
    torch.save(published(clip[1].config), weights)
    pair = ["--image-encoder", f"clip_vip:{clip[0]}", "--text-encoder", clip[0]]
    run = (
        "--clips 32 16 16 --batch-size 16 --log-every 1 --pretrained --text-length 12 "
        "--embed-dim 16 --cpu --image-stats encoder --frames 3 --max-steps 2 --meta-size 8 "
        "--meta-batch-size 4"
    )
    summary = run_script(mama, tmp_path / "run", *pair, *run.split(), "--init-from", weights)
    ahead = [row["w"] for row in steps(tmp_path / "run")]
    assert len(ahead) == 2 and 0 < ahead[0] != ahead[1] < 1

    trained = summary["test"]["moving-emoji"]["text_to_image"]
    flags = ["--tasks", "retrieval", "--output-dir", tmp_path / "eval"]
    (of_run,) = evaluated(tmp_path / "run", *flags).values()
    assert of_run["metrics"]["text_to_image"] == trained



# -------------------------------------------- AVION ---------------------------------------------
WIDTH, PATCHES, LAYERS = 16, 4, 2  # of a tiny ViT: AVION's has 768, 196 and 12


@pytest.fixture
def tiny_vit(monkeypatch):
    """timm's CLIP ViT in small, under its own name."""

    def create(name, img_size=0, **options):
        small = (
            dict(embed_dim=WIDTH, depth=LAYERS, num_heads=2, img_size=img_size) if img_size else {}
        )
        return make(name, **options, **small)

    make = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)


VIT = "video_vit_base_patch16_clip_224"


def test_the_video_tower_is_one_transformer_over_all_patches(tiny_vit):
    torch.manual_seed(0)
    encoder = common.VisionEncoder(VIT, 8, False, 32, frames=3).eval()
    body, clip = encoder.body, torch.randn(2, 3, 3, 32, 32)
    for p in body.parameters():
        torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.normal_(body.temporal, std=9)
    features, embedding = encoder(clip)
    assert features.shape == (2, WIDTH) and embedding.shape == (2, 8)
    # the plain way, of the second clip
    tokens = [body.vit.cls_token[0, 0] + body.vit.pos_embed[0, 0]]
    for t in range(3):
        patches = body.vit.patch_embed(clip[1:, t])[0]
        tokens += [
            patches[p] + body.vit.pos_embed[0, 1 + p] + body.temporal[t] for p in range(PATCHES)
        ]
    x = body.vit.norm_pre(torch.stack(tokens)[None])
    for block in body.vit.blocks:
        x = block(x)
    assert torch.allclose(features[1], body.vit.norm(x)[0, 0], atol=1e-5)
    # the order of the frames matters
    assert not torch.allclose(encoder(clip.flip(1))[0], features, atol=1e-3)
    still = common.VisionEncoder(VIT, 8, False, 32, frames=3).eval()  # as it starts, it does not
    assert torch.allclose(still(clip.flip(1))[0], still(clip)[0], atol=1e-5)
    assert {m.eps for m in body.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}
    for pixels in (clip[:, :2], clip[:, 0]):
        with pytest.raises(UserError, match="made for clips of 3 frames"):
            encoder(pixels)


def test_a_run_with_the_video_tower(tiny_vit, tmp_path):
    flags = (
        f"--image-encoder {VIT} --image-size 32 --image-stats encoder --no-pretrained --cpu "
        "--batch-size 8 --chunk-size 4 --max-steps 2 --dataset moving-emoji --clips 16 8 8"
    )
    summary = run_script(temo, tmp_path / "r", *flags.split())
    assert summary["steps"] == 2 and 0 < summary["test"]["moving-emoji"]["mir"]["mAP"] < 100
    model, _, transform = common.load_model(tmp_path / "r")
    assert model.vision.body.temporal.shape == (4, WIDTH)
    assert model.vision.body.temporal.abs().max() > 0
    assert transform.mean == pytest.approx(list(encoders.base.STATS["clip"][0]))


PLAIN = {
    "self_attn": "attn",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
}
FLASH = {"attn.in_proj_": "attn.Wqkv.", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}


def avion_blocks(layers, eps):
    """torch's own transformer, whose layers AVION's are."""
    block = torch.nn.TransformerEncoderLayer(
        WIDTH, 2, 4 * WIDTH, 0, F.gelu, eps, batch_first=True, norm_first=True
    )
    return torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False).eval()


def renamed(name, words):
    for old, new in words.items():
        name = name.replace(old, new)
    return name


def avion_state(flash, layers=LAYERS):
    """A state dict by the names and shapes of AVION's CLIP_VITB16, in small.

    As its fast (flash) or plain code has it; and torch's transformers of the same weights.
    """
    torch.manual_seed(1)
    shapes = {
        "logit_scale": (),
        "visual.class_embedding": (WIDTH,),
        "visual.temporal_embedding": (4, WIDTH),
        "visual.positional_embedding": (PATCHES + 1, WIDTH),
        "visual.image_projection": (WIDTH, 8),
        "visual.conv1.weight": (WIDTH, 3, 16, 16),
        "textual.positional_embedding": (12, WIDTH),
        "textual.text_projection": (WIDTH, 8),
        "textual.token_embedding.weight": (40, WIDTH),
    }
    shapes |= {
        f"{n}.{k}": (WIDTH,)
        for n in ("visual.ln_pre", "visual.ln_post", "textual.ln_final")
        for k in ("weight", "bias")
    }
    state, towers = {k: torch.randn(shape) * 0.2 for k, shape in shapes.items()}, []
    for tower, eps in (("visual", 1e-6), ("textual", 1e-5)):
        towers.append(avion_blocks(layers, eps))
        for name, p in towers[-1].named_parameters():
            torch.nn.init.normal_(p, std=0.2)
            name = renamed(
                name.removeprefix("layers."), PLAIN | (FLASH if flash and tower == "visual" else {})
            )
            state[f"{tower}.transformer.resblocks.{name}"] = p.detach()
    if flash:
        state["visual.conv1.weight"] = state["visual.conv1.weight"].flatten(1)
    return {f"module.{k}": v for k, v in state.items()}, towers


def avion_model(folder, act="gelu"):
    tower = dict(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        hidden_act=act,
    )
    words = dict(
        vocab_size=40, max_position_embeddings=12, bos_token_id=38, eos_token_id=2, pad_token_id=0
    )
    T.CLIPConfig(text_config=tower | words, vision_config=tower, projection_dim=16).save_pretrained(
        folder
    )
    vision = common.VisionEncoder(VIT, 8, False, 32, frames=6)
    return common.TwoTower(vision, common.TextEncoder(str(folder), 8, False, 12)).eval()


@pytest.mark.parametrize("flash", [True, False])
def test_avion_s_weights_by_their_names(flash, tiny_vit, tmp_path):
    """Against torch's transformers of the same weights."""
    state, (visual, textual) = avion_state(flash)
    save_file(state, tmp_path / "avion.safetensors")
    model = avion_model(tmp_path / "clip")
    init_from(model, tmp_path / "avion.safetensors")
    s = {k.removeprefix("module."): v for k, v in state.items()}

    def norm(x, name, eps):
        return F.layer_norm(x, (WIDTH,), s[f"{name}.weight"], s[f"{name}.bias"], eps)

    clip = torch.randn(2, 6, 3, 32, 32)
    # (6, width)
    temporal = F.interpolate(s["visual.temporal_embedding"].T[None], 6, mode="linear")[0].T
    patches = F.conv2d(
        clip.flatten(0, 1), s["visual.conv1.weight"].view(WIDTH, 3, 16, 16), stride=16
    )
    place = s["visual.positional_embedding"]
    x = patches.flatten(2).transpose(1, 2).unflatten(0, (2, 6)) + place[1:] + temporal[:, None]
    token = (s["visual.class_embedding"] + place[0]).expand(2, 1, -1)
    x = visual(norm(torch.cat([token, x.flatten(1, 2)], 1), "visual.ln_pre", 1e-6))
    want = norm(x[:, 0], "visual.ln_post", 1e-6) @ s["visual.image_projection"]
    assert torch.allclose(model.vision(clip)[1], want, atol=1e-4)

    ids = torch.tensor([[38, 5, 7, 39, 0], [38, 9, 39, 0, 0]])  # the highest id ends a text
    x = s["textual.token_embedding.weight"][ids] + s["textual.positional_embedding"][:5]
    x = textual(x, torch.nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)
    want = (
        norm(x, "textual.ln_final", 1e-5)[torch.arange(2), ids.argmax(1)]
        @ s["textual.text_projection"]
    )
    assert torch.allclose(model.text(ids, (ids > 0).long()), want, atol=1e-4)


def test_avion_s_weights_that_do_not_fit(tiny_vit, tmp_path):
    for layers, act, words in (
        (LAYERS, "quick_gelu", "has GELU, .*clip has quick_gelu"),
        (1, "gelu", r"first vision.body.vit.blocks.1\S+ \S+; they are for"),
    ):
        save_file(avion_state(True, layers)[0], tmp_path / "a.safetensors")
        with pytest.raises(UserError, match=words):
            init_from(avion_model(tmp_path / "clip", act), tmp_path / "a.safetensors")


# -------------------------------------------- CLIP's text ---------------------------------------
def test_clip_s_text_transformer_from_scratch(tmp_path):
    """SLIP's text tower, by what the recipe of cc12m asks for, in small.

    CLIP's tokenizer of letters and one merge, and a configuration without weights.
    """
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [
        *letters,
        *(c + "</w>" for c in letters),
        "re",
        "red</w>",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    T.CLIPTokenizer(
        vocab={w: i for i, w in enumerate(words)},
        merges=[("r", "e"), ("re", "d</w>")],
        model_max_length=77,
    ).save_pretrained(tmp_path)
    tower = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    # 2: as in CLIP's own file
    text = tower | dict(vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=2)
    T.CLIPConfig(text_config=text, vision_config=tower, projection_dim=16).save_pretrained(tmp_path)
    recipe = temo.parse_args(["--dataset", "cc12m", "--text-encoder", str(tmp_path)])
    tokenizer = common.build_tokenizer(
        recipe.text_encoder, recipe.text_length, clean=recipe.clean_captions
    )
    ids = tokenizer(["Red, red!", "b"])["input_ids"]
    assert tokenizer.length == 77
    assert ids[0, 1] == 53
    assert (ids[:, 0] == 54).all()  # lower case, 'red' is one token
    names = ("text_encoder", "text_length", "text_pooling", "image_stats", "eval_resize")
    spec = SPEC | {k: getattr(recipe, k) for k in names} | dict(embed_dim=16)
    one, two = (model_of_spec(dict(spec), tokenizer, recipe.pretrained)[0] for _ in range(2))
    assert one.text.body.embeddings.position_embedding.num_embeddings == 77
    tables = [m.text.body.embeddings.token_embedding.weight for m in (one, two)]
    assert not torch.equal(*tables)
    assert tables[0].std().item() == pytest.approx(0.02, rel=0.1)  # random, as CLIP starts
    assert one.text.projection.weight.std().item() == pytest.approx(24**-0.5, rel=0.2)
    one.eval()
    alone, padded = (
        one.text(**tokenizer(texts))[0] for texts in (["red"], ["red", "a red bird on a tree"])
    )
    # read at the end of the text, whatever the padding
    assert torch.allclose(alone, padded, atol=1e-6)
