"""AVION's released weights (LaViLa's training of its video ViT) under our names, for init_from (weights.py)."""

import re

from contrastive.encoders.base import VIDEO
from contrastive.encoders.video import VideoViT
from contrastive.engine.processes import UserError, say

import torch.nn.functional as F

# AVION's names -> ours; with flash attention it has attn.Wqkv instead, and mlp.fc1, mlp.fc2 as we do
AVION_VISION = {"class_embedding": "cls_token", "positional_embedding": "pos_embed", "conv1": "patch_embed.proj",
                "ln_pre": "norm_pre", "ln_post": "norm", "transformer.resblocks": "blocks", "ln_1": "norm1",
                "ln_2": "norm2", r"attn\.(in_proj_|Wqkv\.)": "attn.qkv.", "attn.out_proj": "attn.proj",
                "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
AVION_TEXT = {"token_embedding": "embeddings.token_embedding",
              "positional_embedding": "embeddings.position_embedding.weight", "ln_final": "final_layer_norm",
              "transformer.resblocks": "encoder.layers", "ln_1": "layer_norm1", "ln_2": "layer_norm2",
              "attn.out_proj": "self_attn.out_proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}


def avion_weights(model, weights, path):
    """{our name: tensor} of AVION's state dict, for a VideoViT and, if the text encoder is a CLIP's, for that as well.

    AVION's shapes differ: the first layer is a matrix, q, k and v are one tensor, projections are (width, D), and
    `temporal` is interpolated linearly to the frames of the model.
    Raises: UserError if a tower or a shape does not match, or the text encoder lacks the GELU that AVION trained with.
    """
    own, out, body = model.state_dict(), {}, model.vision.body
    if not isinstance(body, VideoViT):
        raise UserError(f"--init-from {path}: AVION's video tower; load it into --image-encoder "
                        f"{VIDEO}vit_base_patch16_clip_224")
    texts = model.text is not None and (model.text.config or {}).get("model_type", "").startswith("clip")
    if texts and model.text.body.config.hidden_act != "gelu":
        raise UserError(f"--init-from {path}: AVION's text tower has GELU, --text-encoder {model.text.name} has "
                        f"{model.text.body.config.hidden_act}; give a CLIP with hidden_act gelu in its config.json "
                        "(LAION's have it)")
    for name, x in weights.items():
        tower, _, rest = name.partition(".")
        if name == "visual.temporal_embedding":
            stretched = F.interpolate(x[None, None].float(), (len(body.temporal), x.shape[1]), mode="bilinear")
            out["vision.body.temporal"] = stretched[0, 0]  # (T, width)
        elif rest in ("image_projection", "text_projection"):
            where = {"visual": "vision", "textual": "text"}[tower]
            out |= {f"{where}.projection.weight": x.T} if where == "vision" or texts else {}
        elif tower == "visual":
            ours = "vision.body.vit." + _renamed(rest, AVION_VISION)
            out[ours] = x.reshape(own[ours].shape) if ours in own and x.numel() == own[ours].numel() else x
        elif tower == "textual" and texts:
            whole = re.fullmatch(r"(transformer\.resblocks\.\d+)\.attn\.in_proj_(weight|bias)", rest)
            parts = {rest: x}
            if whole:
                layer, kind = whole.groups()
                parts = {f"{layer}.self_attn.{k}_proj.{kind}": part for k, part in zip("qkv", x.chunk(3))}
            out |= {"text.body." + _renamed(k, AVION_TEXT): v for k, v in parts.items()}
    wrong = [k for k, v in out.items() if k not in own or own[k].shape != v.shape]
    lacking = [k for k in own if k not in out and k.startswith(("vision.", "text.") if texts else "vision.")]
    if wrong or lacking:
        what = f"{wrong[0]} {tuple(out[wrong[0]].shape)} fits nowhere" if wrong else f"there is none for {lacking[0]}"
        raise UserError(f"--init-from {path}: AVION's names, but {what}; its ViT-B needs --image-size 224, "
                        "--embed-dim 256 and --text-length 77")
    if not texts:
        say(f"--init-from {path}: the text encoder is not a CLIP and keeps its own weights")
    return out


def _renamed(name, table):
    """A name with each pattern of a table replaced."""
    for theirs, ours in table.items():
        name = re.sub(rf"(^|(?<=\.)){theirs}(?=\.|$|weight|bias)", ours, name)
    return name
