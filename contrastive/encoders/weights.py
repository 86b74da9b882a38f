"""Weights from files: checks of a run folder's model.json, and --init-from of files of tensors that others wrote.

Nothing in such a file is executed (pickles are read with weights_only) or makes us open or download something else.
"""

import itertools
import math
import re
import warnings
from collections import Counter
from pathlib import Path

from contrastive.encoders.avion import avion_weights
from contrastive.encoders.base import FROM_FILES, VIDEO, VIDEO_SWIN
from contrastive.encoders.clip_vip import load
from contrastive.engine.processes import UserError, first_line, say

import torch


def check_spec(spec):
    """Raises: KeyError, TypeError or ValueError if model.json holds what no run writes, or names an encoder that would
    be downloaded or opened outside of its folder."""
    import timm
    whole = (("image_size", 1, 4096), ("embed_dim", 0, 10**6), ("text_length", 1, 10**6), ("frames", 1, 10**4))
    for name, low, high in whole:
        if not isinstance(spec.get(name, low), int) or not low <= spec.get(name, low) <= high:
            raise ValueError(f"{name} {spec[name]}")
    if spec["eval_resize"] not in ("crop", "squash"):
        raise ValueError(f"eval_resize {spec['eval_resize']}")
    mean, std = spec["stats"]
    if not (len(mean) == len(std) == 3 and all(math.isfinite(x) for x in mean) and all(0 < x < 1e9 for x in std)):
        raise ValueError(f"stats {spec['stats']}")
    asked = spec.get("questions") or {"answers": [], "model": "dual"}
    most = (("layers", 64), ("frames", 10**4), ("regions", 1000))
    small = all(isinstance(asked.get(k, 1), int) and 1 <= asked.get(k, 1) <= high for k, high in most)
    small &= isinstance(asked.get("dropout", 0.0), float) and 0 <= asked.get("dropout", 0.0) < 1
    small &= asked["model"] in ("fusion", "dual", "vgt") and asked.get("similarity", "pooled") in ("pooled", "fused")
    if not small or not all(isinstance(a, str) for a in asked["answers"]):
        raise ValueError("questions that no run asks")
    ours = {"image_encoder": ("small", *FROM_FILES, "resnet18-cifar", *VIDEO_SWIN),
            "text_encoder": ("small", "")}
    for kind, config in (("image_encoder", "vision_config"), ("text_encoder", "text_config")):
        name = spec[kind]
        by_timm = kind == "image_encoder" and timm.is_model(name.removeprefix(VIDEO))
        by_timm = by_timm and not re.search(r"[:/\\]", name)
        forks = kind == "image_encoder" and re.fullmatch(r"\w+", name) and not Path(name).exists()  # in towers.py
        if name not in ours[kind] and not by_timm and not forks and not spec.get(config):
            raise ValueError(f"{kind} {name}, of another place, without its config")
        _refuse_places(spec.get(config) or {})


def _refuse_places(config):
    """Raises: ValueError if a transformers config names code, weights or files that would be fetched or opened."""
    if not isinstance(config, dict):
        raise ValueError(f"a config that is a {type(config).__name__}")
    for key, value in config.items():
        if key in ("_name_or_path", "id2label", "label2id") or value is None:  # names, never opened
            continue
        named = isinstance(value, str) and re.search(r"[:/\\]", value)
        if named or (value and key in ("auto_map", "use_pretrained_backbone", "custom_pipelines")):
            raise ValueError(f"its config leads elsewhere: {key} {value}")
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, dict):
                _refuse_places(inner)


# ======================================================= a file of tensors ===========================================
def init_from(model, path):
    """Loads matching tensors from a .safetensors, .pt or .bin file or a run folder into the model; says what fitted and
    returns their names.

    Names may be those of the whole model or of one tower's body (a timm or transformers file). If no name fits, tensors
    are matched to the image body's in order, provided that all shapes agree; a classifier at the end is left out.
    AVION's files (LaViLa's training of its video ViT) fit a VideoViT and a CLIP text encoder, CLIP-ViP's its tower.
    """
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file
            weights = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a pickle's protocol; only errors matter
                weights = torch.load(path, map_location="cpu", weights_only=True)
            weights = weights if isinstance(weights, dict) else {}
            weights = weights.get("state_dict", weights.get("model", weights))
    except Exception as error:
        reason = "it holds more than tensors; save its state_dict as safetensors" if "eights" in str(error) else error
        raise UserError(f"--init-from {path}: cannot be read ({first_line(reason)})") from error
    own, weights = model.state_dict(), weights if isinstance(weights, dict) else {}
    wrapped = r"^(module\.|_orig_mod\.|clipmodel\.)+"
    weights = {re.sub(wrapped, "", k): v for k, v in weights.items() if torch.is_tensor(v)}
    if any("timeattn" in k for k in weights):
        raise UserError(f"--init-from {path}: a TimeSformer of LaViLa, whose attention is divided between space and "
                        f"time; use AVION's weights, trained as LaViLa, with --image-encoder "
                        f"{VIDEO}vit_base_patch16_clip_224")
    if "vision_model.embeddings.added_cls" in weights:
        load(model, weights, path)
        return own
    if "visual.temporal_embedding" in weights:
        fit = avion_weights(model, weights, path)
        model.load_state_dict(fit, strict=False)
        say(f"--init-from: {len(fit)} of {len(own)} tensors read from {path}, by AVION's names")
        return fit
    fit, how = {}, "by name"
    base_name = Counter(k.partition(".")[0] for k in weights).most_common(1)[0][0] + "." if weights else ""
    inner = {k.removeprefix(base_name): v for k, v in weights.items()}     # without the `bert.` of a file with a head
    for prefix, source in itertools.product(("", "vision.", "vision.body.", "text.", "text.body."), (weights, inner)):
        named = {prefix + k: v for k, v in source.items()}
        found = {k: v for k, v in named.items() if k in own and own[k].shape == v.shape}
        if len(found) > len(fit):
            fit, how = found, f"as {prefix}* by name" if prefix else "by name"
    if not fit:
        body = [k for k in own if k.startswith("vision.body.") and not k.endswith("num_batches_tracked")]
        theirs = [v for k, v in weights.items() if not k.endswith("num_batches_tracked")]
        if len(theirs) >= len(body) > 0 and all(own[k].shape == v.shape for k, v in zip(body, theirs)):
            fit, how = dict(zip(body, theirs)), "as the image encoder, by order: no name fits, but every shape does"
    if not fit:
        raise UserError(f"--init-from {path}: none of its {len(weights)} tensors fits the model; its first names are "
                        f"{list(weights)[:3]}, the model's {list(own)[:3]}")
    model.load_state_dict(fit, strict=False)
    left = [k for k in own if k not in fit]
    say(f"--init-from: {len(fit)} of {len(own)} tensors read from {path}, {how}"
        + (f"; the others keep their usual start, first {left[0]} {tuple(own[left[0]].shape)}" if left else ""))
    small = getattr(model.text, "name", "") == "small"
    if small and any(k.startswith("text.") for k in fit) and not (path.parent / "tokenizer").is_dir():
        say(f"WARNING: --init-from {path}: no tokenizer beside it; unless both were learnt from the same captions, the "
            "small text encoder reads its words by another vocabulary")
    return fit
