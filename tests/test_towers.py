"""CLIP-ViP's and AVION's towers over whole clips, against loops, and their released weights."""

import math

import common
from contrastive.core.processes import UserError
from contrastive.encoders.clip_vip import ClipViP
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
    """A CLIP-ViP with the weights of a tiny CLIP."""
    folder, _ = tiny("clip")
    encoders = {"image_encoder": f"clip_vip:{folder}", "text_encoder": folder}
    return model_of(tokenizer, True, **encoders, image_stats="encoder").eval()


def time_of(temporal, t, frames):
    """The embedding of frame t on the line through those of the weights, which ends at them."""
    place = (t + 0.5) * len(temporal) / frames - 0.5
    place = min(max(place, 0), len(temporal) - 1)
    low = math.floor(place)
    high = math.ceil(place)
    return temporal[low] + (place - low) * (temporal[high] - temporal[low])


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 6, 12, 24])
def test_clip_vip_is_clip_with_proxies_that_see_all_and_patches_that_see_their_frame(
        clip, frames):
    """By transformers' own attention with a mask."""
    torch.manual_seed(1)
    tower = ClipViP(clip.vision_model).eval()
    torch.nn.init.normal_(tower.temporal)
    clips = torch.randn(2, frames, 3, 32, 32)
    vision = clip.vision_model
    embeddings = vision.embeddings
    position = embeddings.position_embedding.weight
    proxies = torch.cat([embeddings.class_embedding[None], tower.added_cls]) + position[0]
    tokens = [proxies.expand(2, -1, -1)]
    frame = [-1] * 4
    for t in range(frames):
        patches = embeddings.patch_embedding(clips[:, t]).flatten(2).transpose(1, 2)
        tokens.append(patches + position[1:] + time_of(tower.temporal, t, frames))
        frame += [t] * 4
    frame = torch.tensor(frame)
    is_seen = (frame[:, None] == frame) | (frame[:, None] < 0) | (frame < 0)
    mask = torch.where(is_seen, 0.0, -math.inf)[None, None]
    x = vision.pre_layrnorm(torch.cat(tokens, 1))
    for layer in vision.encoder.layers:
        attended, _ = layer.self_attn(layer.layer_norm1(x), attention_mask=mask)
        x = x + attended
        x = x + layer.mlp(layer.layer_norm2(x))
    expected = vision.post_layernorm(x[:, 0])
    assert_close(tower(clips), expected)
    if frames == 1:
        assert_close(tower(clips[:, 0]), expected)


@pytest.fixture
def released(clip):
    """The released names and shapes: their model is VidCLIP, whose `clipmodel` is the authors'."""
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
    loaded = init_from(video_clip, tmp_path / "a.pt")
    assert loaded.keys() == video_clip.state_dict().keys()
    plain = {name.removeprefix("clipmodel."): x for name, x in released.items()}
    reference = transformers.CLIPModel(clip.config).eval()
    reference.load_state_dict(plain, strict=False)
    tokens = tokenizer(["red apple", "green pear"])
    expected = reference(pixel_values=torch.zeros(2, 3, 32, 32), **tokens).text_embeds
    assert_close(common.normalize(video_clip(tokens=tokens)[1]), expected)
    body = video_clip.vision.body
    prefix = "vision_model.embeddings."
    assert torch.equal(body.temporal, plain[f"{prefix}temporal_embedding"][0])
    assert torch.equal(body.added_cls, plain[f"{prefix}added_cls"])


def test_a_released_file_without_a_tensor_is_refused(video_clip, released, tmp_path):
    del released["clipmodel.vision_model.post_layernorm.bias"]
    torch.save(released, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"first vision.body.clip.post_layernorm.bias \(24,\)"):
        init_from(video_clip, tmp_path / "a.pt")


def test_mama_s_look_ahead_goes_through_clip_vip(tiny, tmp_path):
    folder, _ = tiny("clip")
    flags = (
        f"--image-encoder clip_vip:{folder} --text-encoder {folder} --embed-dim 16 --frames 3 "
        "--text-length 12 --image-stats encoder --cpu --clips 32 16 16 --batch-size 16 "
        "--log-every 1 --max-steps 2 --meta-size 8 --meta-batch-size 4")
    run_script(mama, tmp_path / "run", *flags.split())
    first, second = [row["w"] for row in steps(tmp_path / "run")]
    assert 0 < first < 1 and 0 < second < 1
    assert first != second


# --------------------------------------------- AVION -----------------------------------------
VIT = "video_vit_base_patch16_clip_224"
# of a tiny ViT: AVION's has 768, 196 and 12
WIDTH = 16
PATCHES = 4
LAYERS = 2
# torch's names -> AVION's
PLAIN_NAMES = {
    "layers": "transformer.resblocks",
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


@pytest.fixture
def tiny_vit(monkeypatch):
    """timm's CLIP ViT in small, under its own name."""
    make = timm.create_model

    def create(name, img_size=0, **options):
        if img_size:
            options |= {"embed_dim": WIDTH, "depth": LAYERS, "num_heads": 2, "img_size": img_size}
        return make(name, **options)

    monkeypatch.setattr(timm, "create_model", create)


def test_another_number_of_frames_is_refused(tiny_vit):
    encoder = common.VisionEncoder(VIT, 8, False, 32, frames=3)
    with pytest.raises(UserError, match="made for clips of 3 frames"):
        encoder(torch.randn(1, 2, 3, 32, 32))


def test_a_run_keeps_the_frames_of_the_video_tower(tiny_vit, tmp_path):
    flags = (
        f"--image-encoder {VIT} --image-size 32 --no-pretrained --cpu --batch-size 8 "
        "--max-steps 2 --dataset moving-emoji --clips 16 8 8")
    run_script(temo, tmp_path / "run", *flags.split())
    model, _, _ = common.load_model(tmp_path / "run")
    assert model.vision.body.temporal.shape == (4, WIDTH)


def blocks_of(layers, eps):
    """torch's own transformer, whose layers AVION's are."""
    layer = TransformerEncoderLayer(
        WIDTH, 2, 4 * WIDTH, 0, F.gelu, eps, batch_first=True, norm_first=True)
    blocks = TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    for p in blocks.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return blocks


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
    blocks = {"visual": blocks_of(layers, 1e-6), "textual": blocks_of(layers, 1e-5)}
    tables = {"visual": PLAIN_NAMES, "textual": PLAIN_NAMES}
    if has_flash:
        tables["visual"] = PLAIN_NAMES | FLASH_NAMES
        state["visual.conv1.weight"] = state["visual.conv1.weight"].flatten(1)
    for encoder, transformer in blocks.items():
        for name, x in transformer.state_dict().items():
            for old, new in tables[encoder].items():
                name = name.replace(old, new)
            state[f"{encoder}.{name}"] = x
    return state, blocks


def avion_model(folder, state, hidden_act="gelu"):
    """A model of six frames that read the weights of avion_state."""
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
    model = common.TwoTower(vision, common.TextEncoder(str(folder), 8, False, 12)).eval()
    file = {f"module.{name}": x.contiguous() for name, x in state.items()}
    save_file(file, folder / "avion.safetensors")
    init_from(model, folder / "avion.safetensors")
    return model


@pytest.fixture(params=[True, False], ids=["flash", "plain"])
def avion(request, tiny_vit, tmp_path):
    """Weights by AVION's names, torch's two transformers of them, and the model that reads them."""
    state, blocks = avion_state(request.param)
    return state, blocks, avion_model(tmp_path, state)


def layer_norm(x, state, name, eps):
    return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)


def test_avion_s_video_encoder_by_its_names(avion):
    """One transformer over all patches; four frame embeddings are interpolated to six."""
    state, blocks, model = avion
    clips = torch.randn(2, 6, 3, 32, 32)
    temporal = state["visual.temporal_embedding"].T[None]
    temporal = F.interpolate(temporal, 6, mode="linear")[0].T  # (6, width)
    place = state["visual.positional_embedding"]
    kernel = state["visual.conv1.weight"].view(WIDTH, 3, 16, 16)
    tokens = [(state["visual.class_embedding"] + place[0]).expand(2, 1, -1)]
    for t in range(6):
        patches = F.conv2d(clips[:, t], kernel, stride=16).flatten(2).transpose(1, 2)
        tokens.append(patches + place[1:] + temporal[t])
    x = layer_norm(torch.cat(tokens, 1), state, "visual.ln_pre", 1e-6)
    x = layer_norm(blocks["visual"](x)[:, 0], state, "visual.ln_post", 1e-6)
    assert_close(model.vision(clips)[1], x @ state["visual.image_projection"], 1e-4)


def test_avion_s_text_encoder_by_its_names(avion):
    state, blocks, model = avion
    ids = torch.tensor([[38, 5, 7, 39, 0], [38, 9, 39, 0, 0]])  # the highest id ends a text
    x = state["textual.token_embedding.weight"][ids] + state["textual.positional_embedding"][:5]
    mask = Transformer.generate_square_subsequent_mask(5)
    x = blocks["textual"](x, mask, is_causal=True)
    x = layer_norm(x, state, "textual.ln_final", 1e-5)[torch.arange(2), ids.argmax(1)]
    assert_close(model.text(ids, (ids > 0).long()), x @ state["textual.text_projection"], 1e-4)


@pytest.mark.parametrize("layers, hidden_act, words", [
    (LAYERS, "quick_gelu", "has GELU, .* has quick_gelu"),
    (1, "gelu", r"first vision.body.vit.blocks.1\S+ \S+; they are for"),
])
def test_avion_s_weights_that_do_not_fit_are_refused(
        tiny_vit, tmp_path, layers, hidden_act, words):
    state, _ = avion_state(True, layers)
    with pytest.raises(UserError, match=words):
        avion_model(tmp_path, state, hidden_act)
