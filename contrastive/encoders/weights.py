"""--init-from: a file of tensors that others wrote. Nothing in it is executed: pickles are read with weights_only."""

import re
from pathlib import Path

from contrastive.encoders.base import CLIP_VIP, VIDEO
from contrastive.encoders.clip_vip import ClipViP, of_clip_vip
from contrastive.encoders.towers import VideoViT
from contrastive.engine.processes import UserError, opening, say

import torch
import torch.nn.functional as F


def init_from(model, path):
    """Loads matching tensors from a .safetensors, .pt or .bin file or a run folder into the model; says what fitted and
    returns their names.

    Names may be those of the whole model or of one tower's body (a timm or transformers file). If no name fits, tensors
    are matched to the image body's in order, provided that all shapes agree; a classifier at the end is left out.
    The released files of AVION and CLIP-ViP must fill all of their tower.
    """
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    own, weights = model.state_dict(), tensors_of(path)
    released = next((RELEASED[k] for k in RELEASED if k in weights), None)
    fit, how = of_towers(model, weights, *released, path) if released else by_name(own, weights), "by name"
    if not fit:
        fit, how = by_order(own, weights), "as the image encoder, by order: no name fits, but every shape does"
    if not fit:
        raise UserError(f"--init-from {path}: none of its {len(weights)} tensors fits the model; its first names are "
                        f"{list(weights)[:3]}, the model's {list(own)[:3]}")
    model.load_state_dict(fit, strict=False)
    left = [k for k in own if k not in fit]
    say(f"--init-from: {len(fit)} of {len(own)} tensors read from the {len(weights)} of {path}, {how}, first "
        f"{next(iter(fit))}" + f"; the others keep their usual start, first {''.join(left[:1])}" * bool(left))
    if "text.body.token.weight" in fit and not (path.parent / "tokenizer").is_dir():  # of a small text encoder
        say(f"WARNING: --init-from {path}: no tokenizer beside it, so its words may be read by another vocabulary")
    return fit


def tensors_of(path):
    """{name: tensor} of a file, without the prefixes of wrappers."""
    with opening(f"--init-from {path}"):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
            weights = weights.get("state_dict", weights.get("model", weights))
        wrapped = r"^(module\.|_orig_mod\.|clipmodel\.)+"
        return {re.sub(wrapped, "", k): v for k, v in weights.items() if torch.is_tensor(v)}


def by_name(own, weights):
    """{our name: tensor} of the tower that most of the weights' names and shapes fit."""
    found = []
    for prefix in ("", "vision.", "vision.body.", "text.", "text.body."):
        named = {prefix + k: v for k, v in weights.items()}
        found.append({k: v for k, v in named.items() if k in own and own[k].shape == v.shape})
    return max(found, key=len)


def by_order(own, weights):
    """{our name: tensor} of the image body, if all shapes agree, else {}."""
    body = [k for k in own if k.startswith("vision.body.") and not k.endswith("num_batches_tracked")]
    theirs = [v for k, v in weights.items() if not k.endswith("num_batches_tracked")]
    same = len(theirs) >= len(body) and all(own[k].shape == v.shape for k, v in zip(body, theirs))
    return dict(zip(body, theirs)) if same else {}


# ---------------------------------------- released by papers ----------------------------------------------------------
def of_towers(model, weights, tower, renamed, encoder, path):
    """{our name: tensor} of released weights: all of the video tower and, if it is a CLIP's, of the text tower.

    Raises: UserError if one has no place, or a place none."""
    if not isinstance(model.vision.body, tower):
        raise UserError(f"--init-from {path}: load it into --image-encoder {encoder}")
    towers = ("vision.", "text.") if model.text and model.text.is_clip else ("vision.",)
    theirs = {k: v for k, v in renamed(model, weights).items() if k.startswith(towers) and "position_ids" not in k}
    here, there = ({k: tuple(v.shape) for k, v in of.items() if k.startswith(towers)}
                   for of in (model.state_dict(), theirs))
    wrong = {k: shape for k, shape in (here | there).items() if here.get(k) != there.get(k)}
    for k, shape in wrong.items():
        raise UserError(f"--init-from {path}: {len(wrong)} of its tensors fit nowhere, or are lacking, first {k} "
                        f"{shape}; it is for --image-encoder {encoder}")
    return theirs


# AVION's names -> ours, replaced in this order; attn.Wqkv, mlp.fc1 and mlp.fc2 are its names with flash attention
VISION = {"class_embedding": "cls_token", "positional_embedding": "pos_embed", "conv1": "patch_embed.proj",
          "ln_pre": "norm_pre", "ln_post": "norm", "transformer.resblocks": "blocks", "ln_": "norm",
          "in_proj_": "qkv.", "Wqkv": "qkv", "out_proj": "proj", "c_fc": "fc1", "c_proj": "fc2"}
TEXT = {"token_embedding": "embeddings.token_embedding",
        "positional_embedding": "embeddings.position_embedding.weight", "ln_final": "final_layer_norm",
        "transformer.resblocks": "encoder.layers", "ln_": "layer_norm", "attn.": "self_attn.", "c_fc": "fc1",
        "c_proj": "fc2"}


def of_avion(model, weights):
    """{our name: tensor} of AVION's state dict (LaViLa's training).

    AVION's shapes differ: the first layer is a matrix, q, k and v are one tensor, projections are (width, D), and
    `temporal` is interpolated linearly to the frames of the model.
    Raises: UserError if the text encoder is a CLIP without the GELU that AVION trained with.
    """
    own, out = model.state_dict(), {}
    if model.text and model.text.is_clip and model.text.body.config.hidden_act != "gelu":
        raise UserError(f"--init-from: AVION's text tower has GELU, {model.text.name} has not (LAION's CLIPs have it)")

    def put(start, name, table, x):
        for theirs, ours in table.items():
            name = name.replace(theirs, ours)
        name = start + name
        out[name] = x.reshape(own[name].shape) if name in own and x.numel() == own[name].numel() else x

    for name, x in weights.items():
        tower, _, rest = name.partition(".")
        if rest == "temporal_embedding":
            size = len(model.vision.body.temporal), x.shape[1]
            out["vision.body.temporal"] = F.interpolate(x[None, None].float(), size, mode="bilinear")[0, 0]
        elif rest in ("image_projection", "text_projection"):
            out[f"{'vision' if tower == 'visual' else 'text'}.projection.weight"] = x.T
        elif tower == "visual":
            put("vision.body.vit.", rest, VISION, x)
        elif "in_proj_" in rest:
            for k, part in zip("qkv", x.chunk(3)):
                put("text.body.", rest.replace("in_proj_", f"{k}_proj."), TEXT, part)
        elif tower == "textual":
            put("text.body.", rest, TEXT, x)
    return out


# a name in a released file -> its video tower, the function that gives our names, and the encoder that takes it
RELEASED = {
    "vision_model.embeddings.added_cls": (ClipViP, of_clip_vip, f"{CLIP_VIP}openai/clip-vit-base-patch32 (or 16)"),
    "visual.temporal_embedding": (VideoViT, of_avion, f"{VIDEO}vit_base_patch16_clip_224")}
