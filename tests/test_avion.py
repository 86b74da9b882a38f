"""The video tower over all patches of a clip, and AVION's weights."""

import common
from contrastive import encoders
from contrastive.engine.processes import UserError

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import CLIPConfig

import temo

WIDTH, PATCHES, LAYERS = 16, 4, 2  # of a tiny ViT: AVION's has 768, 196 and 12


@pytest.fixture
def tiny_vit(monkeypatch):
    """timm's CLIP ViT in small, under its own name."""
    def create(name, img_size=0, **options):
        small = dict(embed_dim=WIDTH, depth=LAYERS, num_heads=2, img_size=img_size) if img_size else {}
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
    tokens = [body.vit.cls_token[0, 0] + body.vit.pos_embed[0, 0]]  # the plain way, of the second clip
    for t in range(3):
        patches = body.vit.patch_embed(clip[1:, t])[0]
        tokens += [patches[p] + body.vit.pos_embed[0, 1 + p] + body.temporal[t] for p in range(PATCHES)]
    x = body.vit.norm_pre(torch.stack(tokens)[None])
    for block in body.vit.blocks:
        x = block(x)
    assert torch.allclose(features[1], body.vit.norm(x)[0, 0], atol=1e-5)
    assert not torch.allclose(encoder(clip.flip(1))[0], features, atol=1e-3)  # the order of the frames matters
    still = common.VisionEncoder(VIT, 8, False, 32, frames=3).eval()  # as it starts, it does not
    assert torch.allclose(still(clip.flip(1))[0], still(clip)[0], atol=1e-5)
    assert {m.eps for m in body.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}
    for wrong in (clip[:, :2], clip[:, 0]):
        with pytest.raises(UserError, match="made for clips of 3 frames"):
            encoder(wrong)
    with pytest.raises(UserError, match="video_resnet18: .*no attribute"):
        common.VisionEncoder("video_resnet18", 8, False, 32, frames=3)


def test_a_run_with_the_video_tower(tiny_vit, tmp_path, monkeypatch):
    monkeypatch.setattr(temo, "draw", lambda run: None)
    flags = ["--image-encoder", VIT, "--image-size", "32", "--image-stats", "encoder", "--no-pretrained", "--cpu",
             "--batch-size", "8", "--chunk-size", "4", "--max-steps", "2", "--output-dir", str(tmp_path)]
    clips = ["--dataset", "moving-emoji", "--clips", "16", "8", "8", "--run-name", "r"]
    summary = temo.main(temo.parse_args([*clips, *flags]))
    assert summary["steps"] == 2 and 0 < summary["test"]["moving-emoji"]["mir"]["mAP"] < 100
    model, _, transform = common.load_model(tmp_path / "r")
    assert model.vision.body.temporal.shape == (4, WIDTH) and model.vision.body.temporal.abs().max() > 0
    assert transform.mean == pytest.approx(list(encoders.base.STATS["clip"][0]))
    with pytest.raises(UserError, match="made for clips of 0 frames"):
        temo.main(temo.parse_args(flags))


def avion_state(flash, frames=4, layers=LAYERS, widths=(WIDTH, WIDTH), patches=PATCHES, words=40, length=12, out=8):
    """A state dict by the names and shapes of AVION's CLIP_VITB16, as its fast (flash) or plain code saves it; widths:
    of the video and the text tower."""
    video_width, text_width = widths
    torch.manual_seed(1)
    shapes = {"logit_scale": (), "visual.class_embedding": (video_width,),
              "visual.temporal_embedding": (frames, video_width),
              "visual.positional_embedding": (patches + 1, video_width), "visual.image_projection": (video_width, out),
              "visual.conv1.weight": (video_width, 3 * 16 * 16) if flash else (video_width, 3, 16, 16),
              "textual.positional_embedding": (length, text_width), "textual.text_projection": (text_width, out),
              "textual.token_embedding.weight": (words, text_width)}
    fast = {"attn.in_proj_weight": "attn.Wqkv.weight", "attn.in_proj_bias": "attn.Wqkv.bias", "mlp.c_fc": "mlp.fc1",
            "mlp.c_proj": "mlp.fc2"}
    towers = (("visual", video_width, ("ln_pre", "ln_post")), ("textual", text_width, ("ln_final",)))
    for tower, width, ends in towers:
        shapes |= {f"{tower}.{n}.{k}": (width,) for n in ends for k in ("weight", "bias")}
        for i in range(layers):
            block = {"attn.in_proj_weight": (3 * width, width), "attn.in_proj_bias": (3 * width,),
                     "attn.out_proj.weight": (width, width), "attn.out_proj.bias": (width,),
                     "mlp.c_fc.weight": (4 * width, width), "mlp.c_fc.bias": (4 * width,),
                     "mlp.c_proj.weight": (width, 4 * width), "mlp.c_proj.bias": (width,)}
            block |= {f"{n}.{k}": (width,) for n in ("ln_1", "ln_2") for k in ("weight", "bias")}
            for name, shape in block.items():
                for plain, quick in fast.items() if flash and tower == "visual" else ():
                    name = name.replace(plain, quick)
                shapes[f"{tower}.transformer.resblocks.{i}.{name}"] = shape
    return {f"module.{k}": torch.randn(shape) * 0.2 for k, shape in shapes.items()}


def avion_model(folder, act="gelu", text=True, frames=6):
    tower = dict(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
                 hidden_act=act)
    words = dict(vocab_size=40, max_position_embeddings=12, bos_token_id=38, eos_token_id=2, pad_token_id=0)
    CLIPConfig(text_config=tower | words, vision_config=tower, projection_dim=16).save_pretrained(folder)
    model = common.TwoTower(common.VisionEncoder(VIT, 8, False, 32, frames=frames),
                            common.TextEncoder(str(folder), 8, False, 12) if text else None)
    return model.eval()


@pytest.mark.parametrize("flash", [True, False])
def test_avion_s_weights_by_their_names(flash, tiny_vit, tmp_path):
    """Against plain transformers that use the tensors under AVION's names."""
    state = avion_state(flash)
    save_file(state, tmp_path / "avion.safetensors")
    model = avion_model(tmp_path / "clip")
    encoders.weights.init_from(model, tmp_path / "avion.safetensors")
    s = {k.removeprefix("module."): v for k, v in state.items()}

    def layers(x, tower, mask, eps):
        for i in range(LAYERS):
            get = lambda *names: next(s[k] for n in names if (k := f"{tower}.transformer.resblocks.{i}.{n}") in s)
            norm = lambda x, n: F.layer_norm(x, (WIDTH,), get(f"{n}.weight"), get(f"{n}.bias"), eps)
            y = norm(x, "ln_1") @ get("attn.Wqkv.weight", "attn.in_proj_weight").T
            y = y + get("attn.Wqkv.bias", "attn.in_proj_bias")
            q, k, v = y.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=mask).transpose(1, 2).flatten(2)
            x = x + y @ get("attn.out_proj.weight").T + get("attn.out_proj.bias")
            y = norm(x, "ln_2") @ get("mlp.fc1.weight", "mlp.c_fc.weight").T + get("mlp.fc1.bias", "mlp.c_fc.bias")
            y = F.gelu(y)
            x = x + y @ get("mlp.fc2.weight", "mlp.c_proj.weight").T + get("mlp.fc2.bias", "mlp.c_proj.bias")
        return x

    norm = lambda x, n, eps: F.layer_norm(x, (WIDTH,), s[f"{n}.weight"], s[f"{n}.bias"], eps)
    clip = torch.randn(2, 6, 3, 32, 32)
    temporal = F.interpolate(s["visual.temporal_embedding"].T[None], 6, mode="linear")[0].T  # (6, width)
    patches = F.conv2d(clip.flatten(0, 1), s["visual.conv1.weight"].view(WIDTH, 3, 16, 16), stride=16)
    place = s["visual.positional_embedding"]
    x = patches.flatten(2).transpose(1, 2).unflatten(0, (2, 6)) + place[1:] + temporal[:, None]
    token = (s["visual.class_embedding"] + place[0]).expand(2, 1, -1)
    x = layers(norm(torch.cat([token, x.flatten(1, 2)], 1), "visual.ln_pre", 1e-6), "visual", False, 1e-6)
    want = norm(x[:, 0], "visual.ln_post", 1e-6) @ s["visual.image_projection"]
    assert torch.allclose(model.vision(clip)[1], want, atol=1e-4)

    ids = torch.tensor([[38, 5, 7, 39, 0], [38, 9, 39, 0, 0]])  # the highest id ends a text
    x = layers(s["textual.token_embedding.weight"][ids] + s["textual.positional_embedding"][:5], "textual", True, 1e-5)
    want = norm(x, "textual.ln_final", 1e-5)[torch.arange(2), ids.argmax(1)] @ s["textual.text_projection"]
    assert torch.allclose(model.text(ids, (ids > 0).long()), want, atol=1e-4)


def test_avion_s_true_shapes():
    """Names and shapes of the published ViT-B/16, without memory: every tensor of the model is given."""
    with torch.device("meta"):
        state = avion_state(True, 4, 12, (768, 512), 196, 49408, 77, 256)
        vision = common.VisionEncoder(VIT, 256, False, 224, frames=4)
        config = CLIPConfig(text_config=dict(hidden_act="gelu"), vision_config={}).to_dict()
        model = common.TwoTower(vision, common.TextEncoder("clip", 256, False, 77, config=config))
    out = encoders.weights.of_avion(model, {k.removeprefix("module."): v for k, v in state.items()})
    own = {k: v.shape for k, v in model.state_dict().items()}
    assert {k: v.shape for k, v in out.items()} == own and len(own) > 300


def test_weights_that_the_video_tower_cannot_take(tiny_vit, tmp_path):
    file, model = tmp_path / "a.safetensors", avion_model(tmp_path / "clip")
    alone = common.TwoTower(common.VisionEncoder("small", 8), None)
    fits = avion_state(True)
    for state, tower, words in (
            (fits, avion_model(tmp_path / "quick", "quick_gelu"), "has GELU, .*quick has not"),
            (fits, alone, "load it into --image-encoder video_vit_base_patch16_clip_224"),
            (avion_state(True, layers=3), model, r"first \S+layers.2\S+ \S+; it is for --image-encoder video_vit"),
            (avion_state(True, layers=1), model, r"first vision.body.vit.blocks.1\S+ \S+; it is for")):
        save_file(state, file)
        with pytest.raises(UserError, match=words):
            encoders.weights.init_from(tower, file)
    save_file(fits, file)
    encoders.weights.init_from(avion_model(tmp_path / "clip", text=False), file)
