"""Encoders by name: timm's, transformers' and the towers over whole clips; opened by common."""

import re
from pathlib import Path

import common
from common import STATS, UserError, first_line, hub_reason

import torch
import torch.nn as nn

from tools import clip_vip, video_towers


def image_tower(name, pretrained, image_size, config=None, features=(0, 0), frames=0):
    """common.Tower of a name.

    'features' (clips as (B, T, F)); 'resnet18-cifar' (3x3 stem, no max-pool); any timm name; 'video_' and a timm ViT (a
    VideoViT of `frames` frames, no mean over them); 'swin3d_b' (Video Swin of torchvision, Kinetics-400; also _t, _s);
    a transformers id or folder with a '/' (a CLIP gives its vision tower and keeps its own projection where D agrees;
    others give the class token); 'clip_vip:' and a CLIP (CLIP-ViP's tower, no mean over frames).

    Args: image_size: pixels of a side.   config: of a transformers model that is rebuilt.   features: (F, T) of
        'features'.   frames: T, for a tower over whole clips."""
    if name == "features":
        body = video_towers.FeatureEncoder(features[1], features[0])
        return common.Tower(body, body.width)
    if name in common.VIDEO_SWIN:
        body, width, stats = video_towers.video_swin(name, pretrained)
        return common.Tower(body, width, stats=stats, read=read_swin)
    if name.startswith(common.CLIP_VIP):
        body, width, projection, config = clip_vip.tower(name, pretrained, config)
        return common.Tower(body, width, projection, config, STATS["clip"], whole_clips=True)
    if config or "/" in name or Path(name).is_dir():  # a hub id may begin like VIDEO, too
        body, width, projection, config = hub_encoder(name, "vision", pretrained, config)
        stats = STATS["clip"] if config["model_type"].startswith("clip") else STATS["imagenet"]
        return common.Tower(body, width, projection, config, stats, read=read_hub)
    body, width, stats = timm_encoder(name.removeprefix(common.VIDEO), pretrained, image_size)
    if not name.startswith(common.VIDEO):
        return common.Tower(body, width, stats=stats)
    return common.Tower(video_towers.video_vit(name, body, frames), width, stats=stats, whole_clips=True)


def timm_encoder(name, pretrained, image_size):
    """A timm model without its classifier, its width, and its pixel statistics."""
    import timm
    cifar = name == "resnet18-cifar"
    arch = "resnet18" if cifar else name
    if not timm.is_model(arch):
        near = timm.list_models(f"*{arch.split('.')[0].split('_')[0]}*")[:5]
        raise UserError(f"--image-encoder {name}: not small, features, resnet18-cifar, a timm model"
                        + (f" (near: {near})" if near else "") + " or a transformers id")
    size = {"img_size": image_size} if re.match("(vit|deit|eva|beit)", arch) else {}
    try:
        body = timm.create_model(arch, pretrained=pretrained and not cifar, num_classes=0, **size)
    except Exception as error:
        raise UserError(f"--image-encoder {name}: {hub_reason(error)}") from error
    if cifar:
        body.conv1, body.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    stats = STATS["imagenet"] if cifar else (body.pretrained_cfg["mean"], body.pretrained_cfg["std"])
    return body, body.num_features, stats


def hub_encoder(name, tower, pretrained, config):
    """A transformers model, its width, its CLIP projection (or None) and its config as a dict."""
    import transformers
    try:
        if config is None:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        else:
            config = transformers.AutoConfig.for_model(**config)
        if config.model_type == "clip":
            kind = transformers.CLIPModel
            whole = kind.from_pretrained(name, dtype=torch.float32) if pretrained else kind(config)  # its own class
            body = whole.vision_model if tower == "vision" else whole.text_model
            projection = whole.visual_projection if tower == "vision" else whole.text_projection
            return body, body.config.hidden_size, projection, config.to_dict()
        encoder_alone = tower == "text" and config.model_type == "t5"
        auto = transformers.AutoModelForTextEncoding if encoder_alone else transformers.AutoModel
        if pretrained:
            body = auto.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
        else:
            body = auto.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--{'image' if tower == 'vision' else 'text'}-encoder {name}: {hub_reason(error)}") from error
    known = config.to_dict()
    width = known.get("hidden_size") or (known.get("hidden_sizes") or [0])[-1] or known.get("d_model") or 0
    return body, width or getattr(config, "hidden_size", 0), None, known


def read_swin(encoder, pixels):
    """Video Swin sees the whole clip, and halves the time: features (B * T / 2, width)."""
    clips = pixels if pixels.ndim == 5 else pixels[:, None]  # (B, T, 3, S, S)
    features = encoder.body(clips.transpose(1, 2)).unflatten(1, (encoder.width, -1))  # (B, width, T / 2)
    return features.transpose(1, 2).flatten(0, 1)


def read_hub(encoder, pixels):
    """Pooled features of a transformers model, else its class token: (B * T, width)."""
    frames = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels  # (B * T, 3, S, S)
    found = encoder.body(pixel_values=frames)
    pooled = getattr(found, "pooler_output", None)
    return found.last_hidden_state[:, 0] if pooled is None else pooled


def read_words(encoder, input_ids, attention_mask):
    """Hidden states of the tokens, (B, L, width), and of the text, (B, width): CLIP's own, the first, or the mean."""
    found = encoder.body(input_ids=input_ids, attention_mask=attention_mask)
    words = found.last_hidden_state
    if encoder.config["model_type"].startswith("clip"):
        return words, found.pooler_output
    if encoder.pooling == "mean":
        keep = attention_mask[..., None].to(words.dtype)  # (B, L, 1)
        return words, (words * keep).sum(1) / keep.sum(1)
    return words, words[:, 0]


def freeze_unused(model, tokenizer, spec):
    """Try one example, and freeze what never reaches an embedding (a mask token, a pooler): DDP would wait for it."""
    model.eval()
    shape = spec.get("features") or (3, spec["image_size"], spec["image_size"])
    whole = model.vision.whole_clips and spec["image_encoder"].startswith(common.VIDEO)
    shape = (spec["frames"], *shape) if whole else shape
    try:
        with torch.enable_grad():
            tokens = tokenizer(["a"]) if tokenizer else None
            out = model(torch.zeros(1, *shape), tokens, *([tokens] if spec.get("questions") else []))  # (1, D) each
            sum(x.sum() for x in out if x is not None).backward()
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"--image-encoder {spec['image_encoder']} with --image-size {spec['image_size']} and "
                        f"--text-encoder {spec['text_encoder']}: {first_line(error)}") from error
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and p.grad is not None)
    model.zero_grad(set_to_none=True)
    model.train()


def set_dropout(model, features, text=True):
    """Dropout of a TwoTower in training: `features` (0..1) in a tower over precomputed features, after its projection
    and after attention and MLP; text False: none in a transformers text encoder, which else keeps its own."""
    if model.vision.name == "features":
        model.vision.body.blocks.dropout = features
    for module in model.text.modules() if not text else ():
        for name, value in vars(module).items():  # T5's attention keeps a number, others an nn.Dropout with its p
            if isinstance(value, float) and ("dropout" in name or name == "p" and isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)


def batchnorm_policy(model, args):
    """SyncBatchNorm on several GPUs, a warning on several CPU processes; chunks need --allow-batchnorm-chunks."""
    if args.chunk_size and not args.allow_batchnorm_chunks:
        raise UserError(f"--chunk-size {args.chunk_size}: {args.image_encoder} has BatchNorm, whose statistics would "
                        "come from chunks; --allow-batchnorm-chunks accepts that")
    if common.world() > 1 and torch.cuda.is_available() and not args.cpu:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if common.world() > 1:
        common.say("BatchNorm on several CPU processes: statistics are per process, so the run differs from one "
                   "process")
    return model
