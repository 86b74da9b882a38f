"""CLIP-ViP's and AVION's towers over whole clips, against loops, and their released weights."""

import math

import common
from contrastive.core.processes import UserError
from contrastive.encoders.clip_vip import ClipViP, attend
from contrastive.encoders.weights import init_from

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch.nn import Transformer, TransformerEncoder, TransformerEncoderLayer

import mama
import temo
from helpers import assert_close, model_of, run_script, steps


# ------------------------------------------- CLIP-ViP ----------------------------------------
@pytest.fixture
def clip(tiny):
    _, model = tiny("clip")
    return model


@pytest.fixture
def video_clip(tiny, tokenizer):
    """Function -> a CLIP-ViP with the weights of a tiny CLIP."""
    folder, _ = tiny("clip")
    encoders = {"image_encoder": f"clip_vip:{folder}", "text_encoder": folder}
    encoders["image_stats"] = "encoder"
    return lambda: model_of(tokenizer, True, **encoders).eval()


def tower_of(clip, **options):
    torch.manual_seed(1)
    tower = ClipViP(clip.vision_model, **options).eval()
    torch.nn.init.normal_(tower.temporal)
    return tower


@pytest.mark.parametrize("frames", [1, 3])
def test_proxies_see_all_and_a_patch_the_proxies_and_its_frame(clip, frames):
    """As transformers' own attention with this mask."""
    proxies = 4
    patches = 5
    attention = clip.vision_model.encoder.layers[0].self_attn
    frame = torch.arange(frames).repeat_interleave(patches)
    frame = torch.cat([torch.full((proxies,), -1), frame])
    visible = (frame[:, None] == frame) | (frame[:, None] < 0) | (frame < 0)
    mask = torch.where(visible, 0.0, -math.inf)
    x = torch.randn(2, len(frame), 24)
    expected, _ = attention(x, attention_mask=mask[None, None])
    assert_close(attend(attention, x, proxies, frames), expected)


def test_one_frame_without_proxies_is_clip(clip):
    pixels = torch.randn(3, 3, 32, 32)
    expected = clip.vision_model(pixel_values=pixels).pooler_output
    tower = ClipViP(clip.vision_model, proxies=0).eval()  # its temporal embedding is 0
    assert_close(tower(pixels), expected)
    assert_close(tower(pixels[:, None]), expected)


def test_the_order_of_frames_counts(clip):
    clips = torch.randn(2, 3, 3, 32, 32)
    tower = tower_of(clip)
    assert not torch.allclose(tower(clips), tower(clips.flip(1)), atol=1e-4)


def test_proxies_are_class_tokens_at_the_first_place(clip):
    tower = tower_of(clip)
    embeddings = clip.vision_model.embeddings
    x, proxies, frames = tower.embed(torch.randn(2, 3, 3, 32, 32))
    assert (proxies, frames) == (4, 3)
    tokens = torch.cat([embeddings.class_embedding[None], tower.added_cls])
    assert_close(x[0, :4], tokens + embeddings.position_embedding.weight[0])


def test_frames_between_those_the_weights_know(clip):
    """Twelve as they are; 24 and 6 by torch's line, whose ends are not moved out."""
    tower = tower_of(clip)
    times = {}
    for frames in (6, 12, 24):
        x, _, _ = tower.embed(torch.zeros(1, frames, 3, 32, 32))
        times[frames] = x[0, 4::4]  # a patch of each frame
    base = times[12] - tower.temporal
    assert_close(base, base[:1].expand(12, -1))
    assert_close(times[6] - base[0], tower.temporal.unflatten(0, (6, 2)).mean(1))
    quarter = 0.75 * tower.temporal[:-1] + 0.25 * tower.temporal[1:]
    assert_close(times[24][1:-1:2] - base[0], quarter)


@pytest.fixture
def released(clip):
    """A state dict with the names and shapes of the released files.

    Their model is VidCLIP, whose `clipmodel` is the authors'.
    """
    width = clip.config.vision_config.hidden_size
    shapes = {name: x.shape for name, x in clip.state_dict().items()}
    shapes["vision_model.embeddings.added_cls"] = (3, width)
    shapes["vision_model.embeddings.position_ids"] = (1, 5)
    shapes["vision_model.embeddings.temporal_embedding"] = (1, 12, width)
    shapes["text_model.embeddings.position_ids"] = (1, 12)
    state = {}
    for name, shape in shapes.items():
        state[f"clipmodel.{name}"] = 0.1 * torch.randn(shape)
    return state


def test_a_released_file_is_read_to_its_last_tensor(
        clip, video_clip, released, tokenizer, tmp_path):
    torch.save(released, tmp_path / "a.pt")
    model = video_clip()
    assert init_from(model, tmp_path / "a.pt").keys() == model.state_dict().keys()
    plain = {name.removeprefix("clipmodel."): x for name, x in released.items()}
    reference = transformers.CLIPModel(clip.config).eval()
    reference.load_state_dict(plain, strict=False)
    tokens = tokenizer(["red apple", "green pear"])
    expected = reference(pixel_values=torch.zeros(2, 3, 32, 32), **tokens).text_embeds
    assert_close(common.normalize(model(tokens=tokens)[1]), expected)
    body = model.vision.body
    prefix = "vision_model.embeddings."
    assert torch.equal(body.temporal, plain[f"{prefix}temporal_embedding"][0])
    assert torch.equal(body.added_cls, plain[f"{prefix}added_cls"])


def test_a_released_file_without_a_tensor_is_refused(video_clip, released, tmp_path):
    del released["clipmodel.vision_model.post_layernorm.bias"]
    torch.save(released, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"first vision.body.clip.post_layernorm.bias \(24,\)"):
        init_from(video_clip(), tmp_path / "a.pt")


def test_mama_s_look_ahead_goes_through_clip_vip(tiny, tmp_path):
    folder, _ = tiny("clip")
    flags = (
        f"--image-encoder clip_vip:{folder} --text-encoder {folder} --embed-dim 16 --frames 3 "
        "--text-length 12 --image-stats encoder --cpu --clips 32 16 16 --batch-size 16 "
        "--log-every 1 --max-steps 2 --meta-size 8 --meta-batch-size 4")
    run_script(mama, tmp_path / "run", *flags.split())
    first, second = [row["w"] for row in steps(tmp_path / "run")]
    assert 0 < first != second < 1


# --------------------------------------------- AVION -----------------------------------------
VIT = "video_vit_base_patch16_clip_224"
# of a tiny ViT: AVION's has 768, 196 and 12
WIDTH = 16
PATCHES = 4
LAYERS = 2


@pytest.fixture
def tiny_vit(monkeypatch):
    """timm's CLIP ViT in small, under its own name."""
    make = timm.create_model

    def create(name, img_size=0, **options):
        if img_size:
            options |= {"embed_dim": WIDTH, "depth": LAYERS, "num_heads": 2, "img_size": img_size}
        return make(name, **options)

    monkeypatch.setattr(timm, "create_model", create)


@pytest.fixture
def video_vit(tiny_vit):
    torch.manual_seed(0)
    encoder = common.VisionEncoder(VIT, 8, False, 32, frames=3).eval()
    for p in encoder.body.parameters():
        torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.normal_(encoder.body.temporal, std=9)
    return encoder


def test_the_video_tower_is_one_transformer_over_all_patches(video_vit):
    vit = video_vit.body.vit
    temporal = video_vit.body.temporal
    clip = torch.randn(1, 3, 3, 32, 32)
    tokens = [vit.cls_token[0] + vit.pos_embed[0, :1]]
    for t in range(3):
        tokens.append(vit.patch_embed(clip[:, t])[0] + vit.pos_embed[0, 1:] + temporal[t])
    x = vit.norm_pre(torch.cat(tokens)[None])
    for block in vit.blocks:
        x = block(x)
    features, embedding = video_vit(clip)
    assert_close(features, vit.norm(x)[:, 0])
    assert embedding.shape == (1, 8)
    assert not torch.allclose(video_vit(clip.flip(1))[0], features, atol=1e-3)


def test_another_number_of_frames_is_refused(video_vit):
    with pytest.raises(UserError, match="made for clips of 3 frames"):
        video_vit(torch.randn(1, 2, 3, 32, 32))


def test_a_run_keeps_the_frames_of_the_video_tower(tiny_vit, tmp_path):
    flags = (
        f"--image-encoder {VIT} --image-size 32 --no-pretrained --cpu --batch-size 8 "
        "--max-steps 2 --dataset moving-emoji --clips 16 8 8")
    run_script(temo, tmp_path / "run", *flags.split())
    model, _, _ = common.load_model(tmp_path / "run")
    assert model.vision.body.temporal.shape == (4, WIDTH)


PLAIN_NAMES = {
    "self_attn": "attn",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
}
FLASH_NAMES = {
    "attn.in_proj_": "attn.Wqkv.",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def blocks_of(layers, eps):
    """torch's own transformer, whose layers AVION's are."""
    layer = TransformerEncoderLayer(
        WIDTH, 2, 4 * WIDTH, 0, F.gelu, eps, batch_first=True, norm_first=True)
    blocks = TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    for p in blocks.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return blocks


def block_names(blocks, tables):
    """{AVION's name: tensor} of the layers of torch's transformer."""
    state = {}
    for name, x in blocks.state_dict().items():
        name = name.removeprefix("layers.")
        for old, new in tables.items():
            name = name.replace(old, new)
        state[f"transformer.resblocks.{name}"] = x
    return state


def avion_state(has_flash, layers=LAYERS):
    """A state dict by the names and shapes of AVION's CLIP_VITB16 in small, as its fast (flash) or
    plain code has it; torch's transformers of the same weights."""
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
    for norm in ("visual.ln_pre", "visual.ln_post", "textual.ln_final"):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (WIDTH,)
    torch.manual_seed(1)
    state = {name: 0.2 * torch.randn(shape) for name, shape in shapes.items()}
    visual = blocks_of(layers, 1e-6)
    textual = blocks_of(layers, 1e-5)
    names = PLAIN_NAMES
    if has_flash:
        names = PLAIN_NAMES | FLASH_NAMES
        state["visual.conv1.weight"] = state["visual.conv1.weight"].flatten(1)
    for name, x in block_names(visual, names).items():
        state[f"visual.{name}"] = x
    for name, x in block_names(textual, PLAIN_NAMES).items():
        state[f"textual.{name}"] = x
    return state, visual, textual


def write_avion(path, state):
    save_file({f"module.{name}": x.contiguous() for name, x in state.items()}, path)
    return path


def avion_model(folder, hidden_act="gelu"):
    """A model of six frames for the weights of avion_state."""
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "hidden_act": hidden_act,
    }
    # of CLIP's own file: the highest id ends a text, whatever eos_token_id is
    words = {"vocab_size": 40, "max_position_embeddings": 12, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=tower | words, vision_config=tower)
    config.save_pretrained(folder)
    vision = common.VisionEncoder(VIT, 8, False, 32, frames=6)
    return common.TwoTower(vision, common.TextEncoder(str(folder), 8, False, 12)).eval()


@pytest.fixture(params=[True, False], ids=["flash", "plain"])
def avion(request, tiny_vit, tmp_path):
    """Weights by AVION's names, torch's two transformers of them, and the model that reads them."""
    state, visual, textual = avion_state(request.param)
    model = avion_model(tmp_path / "clip")
    init_from(model, write_avion(tmp_path / "avion.safetensors", state))
    return state, visual, textual, model


def layer_norm(x, state, name, eps):
    return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)


def test_avion_s_video_encoder_by_its_names(avion):
    """Its four frame embeddings are interpolated to the six of the model."""
    state, visual, _, model = avion
    clips = torch.randn(2, 6, 3, 32, 32)
    temporal = state["visual.temporal_embedding"].T[None]
    temporal = F.interpolate(temporal, 6, mode="linear")[0].T  # (6, width)
    place = state["visual.positional_embedding"]
    kernel = state["visual.conv1.weight"].view(WIDTH, 3, 16, 16)
    tokens = [(state["visual.class_embedding"] + place[0]).expand(2, 1, -1)]
    for t in range(6):
        patches = F.conv2d(clips[:, t], kernel, stride=16).flatten(2).transpose(1, 2)
        tokens.append(patches + place[1:] + temporal[t])
    x = visual(layer_norm(torch.cat(tokens, 1), state, "visual.ln_pre", 1e-6))
    x = layer_norm(x[:, 0], state, "visual.ln_post", 1e-6)
    assert_close(model.vision(clips)[1], x @ state["visual.image_projection"], 1e-4)


def test_avion_s_text_encoder_by_its_names(avion):
    state, _, textual, model = avion
    ids = torch.tensor([[38, 5, 7, 39, 0], [38, 9, 39, 0, 0]])  # the highest id ends a text
    x = state["textual.token_embedding.weight"][ids] + state["textual.positional_embedding"][:5]
    x = textual(x, Transformer.generate_square_subsequent_mask(5), is_causal=True)
    x = layer_norm(x, state, "textual.ln_final", 1e-5)[torch.arange(2), ids.argmax(1)]
    assert_close(model.text(ids, (ids > 0).long()), x @ state["textual.text_projection"], 1e-4)


@pytest.mark.parametrize("layers, hidden_act, words", [
    (LAYERS, "quick_gelu", "has GELU, .*clip has quick_gelu"),
    (1, "gelu", r"first vision.body.vit.blocks.1\S+ \S+; they are for"),
])
def test_avion_s_weights_that_do_not_fit(tiny_vit, tmp_path, layers, hidden_act, words):
    state, _, _ = avion_state(True, layers)
    write_avion(tmp_path / "a.safetensors", state)
    with pytest.raises(UserError, match=words):
        init_from(avion_model(tmp_path / "clip", hidden_act), tmp_path / "a.safetensors")


def test_clip_s_text_transformer_is_random_without_published_weights(tiny, tokenizer, tmp_path):
    """As SLIP's recipe asks for: from a configuration alone, with CLIP's deviations."""
    _, clip = tiny("clip")
    clip.config.save_pretrained(tmp_path)
    model = model_of(tokenizer, text_encoder=str(tmp_path))
    table = model.text.body.embeddings.token_embedding.weight
    assert table.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.text.projection.weight.std().item() == pytest.approx(24**-0.5, rel=0.2)
