"""Towers over whole clips, or over precomputed features of a clip; AVION's released weights (LaViLa's training)."""

from contrastive.encoders.base import STATS, VIDEO, SmallText
from contrastive.engine.processes import UserError, opening

import torch
import torch.nn as nn
import torch.nn.functional as F

# AVION's names -> ours, replaced in this order; attn.Wqkv, mlp.fc1 and mlp.fc2 are its names with flash attention
VISION = {"class_embedding": "cls_token", "positional_embedding": "pos_embed", "conv1": "patch_embed.proj",
          "ln_pre": "norm_pre", "ln_post": "norm", "transformer.resblocks": "blocks", "ln_": "norm",
          "in_proj_": "qkv.", "Wqkv": "qkv", "out_proj": "proj", "c_fc": "fc1", "c_proj": "fc2"}
TEXT = {"token_embedding": "embeddings.token_embedding",
        "positional_embedding": "embeddings.position_embedding.weight", "ln_final": "final_layer_norm",
        "transformer.resblocks": "encoder.layers", "ln_": "layer_norm", "attn.": "self_attn.", "c_fc": "fc1",
        "c_proj": "fc2"}


class FeatureEncoder(SmallText):
    """Precomputed features of a clip -> projection, one transformer layer, mean over time: (B, T, F) -> (B, width)."""

    def __init__(self, features, length, width=256):
        super().__init__(1, length, width)
        self.token = nn.Linear(features, width)

    def forward(self, x):
        return super().forward(x, torch.ones(x.shape[:2], dtype=torch.long, device=x.device))


class VideoViT(nn.Module):
    """A timm ViT over the patches of all frames at once, after AVION: clips (B, T, 3, S, S) -> (B, width).

    Each patch gets the embedding of its position, as in an image, and of its frame (`temporal`, zeros at the start).
    One class token attends to all T * P patches in every layer and is the feature. Unlike AVION: no patch dropout, no
    checkpointing of layers (--chunk-size saves more memory), and positions have weight decay like other matrices.
    """

    def __init__(self, vit, frames):
        super().__init__()
        if getattr(vit, "num_prefix_tokens", 0) != 1 or getattr(vit, "global_pool", "") != "token":
            raise UserError(f"--image-encoder: after {VIDEO} give a timm ViT that reads its class token")
        if not frames:
            raise UserError(f"--image-encoder {VIDEO}...: it is for clips, but this data set has images")
        self.vit, self.temporal = vit, nn.Parameter(torch.zeros(frames, vit.embed_dim))  # (T, width)
        for norm in (m for m in vit.modules() if isinstance(m, nn.LayerNorm)):
            norm.eps = 1e-6  # AVION's; CLIP has 1e-5

    def forward(self, clips):
        if clips.ndim != 5 or clips.shape[1] != len(self.temporal):
            raise UserError(f"--image-encoder {VIDEO}...: made for clips of {len(self.temporal)} frames")
        x = self.vit.patch_embed(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])  # (B, T, P, width)
        first, place = self.vit.pos_embed[0, :1], self.vit.pos_embed[0, 1:]  # (1, width), (P, width)
        x = (x + place + self.temporal[:, None]).flatten(1, 2)  # (B, T * P, width)
        token = (self.vit.cls_token + first).expand(len(x), -1, -1)  # (B, 1, width)
        x = self.vit.blocks(self.vit.norm_pre(torch.cat([token, x], 1)))  # (B, 1 + T * P, width)
        return self.vit.norm(x[:, 0])


def video_swin(name, pretrained):
    """torchvision's Video Swin without its classifier, (B, 3, T, S, S) -> (B, width * times), its width and its pixel
    statistics."""
    from torchvision.models import get_model
    with opening(name):
        body = get_model(name, weights="KINETICS400_V1" if pretrained else None)
    width = body.head.in_features
    body.head, body.avgpool = nn.Identity(), nn.AdaptiveAvgPool3d((None, 1, 1))
    return body, width, STATS["imagenet"]


def released_weights(model, weights):
    """{our name: tensor} of AVION's state dict.

    AVION's shapes differ: the first layer is a matrix, q, k and v are one tensor, projections are (width, D), and
    `temporal` is interpolated linearly to the frames of the model.
    Raises: UserError if the text encoder is a CLIP without the GELU that AVION trained with.
    """
    own, out = model.state_dict(), {}
    if model.text and model.text.is_clip and model.text.body.config.hidden_act != "gelu":
        raise UserError(f"--init-from: AVION's text tower has GELU, {model.text.name} has not (LAION's CLIPs have it)")
    for name, x in weights.items():
        tower, _, rest = name.partition(".")
        if rest == "temporal_embedding":
            size = len(model.vision.body.temporal), x.shape[1]
            out["vision.body.temporal"] = F.interpolate(x[None, None].float(), size, mode="bilinear")[0, 0]
        elif rest in ("image_projection", "text_projection"):
            out[f"{'vision' if tower == 'visual' else 'text'}.projection.weight"] = x.T
        elif tower == "visual":
            ours = "vision.body.vit." + replaced(rest, VISION)
            out[ours] = x.reshape(own[ours].shape) if ours in own and x.numel() == own[ours].numel() else x
        elif "in_proj_" in rest:
            for k, part in zip("qkv", x.chunk(3)):
                out["text.body." + replaced(rest.replace("in_proj_", f"{k}_proj."), TEXT)] = part
        elif tower == "textual":
            out["text.body." + replaced(rest, TEXT)] = x
    return out


def replaced(name, table):
    """A name with each key of a table replaced."""
    for theirs, ours in table.items():
        name = name.replace(theirs, ours)
    return name
