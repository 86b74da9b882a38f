"""Encoders by name: timm, transformers, and towers over whole clips."""

import functools
from pathlib import Path

from contrastive.data.table import note_commit
from contrastive.encoders.base import CLIP_VIP, FEATURES, STATS, VIDEO, VIDEO_SWIN, Tower, hub_encoder, read_hub
from contrastive.encoders.clip_vip import ClipViP
from contrastive.encoders.video import FeatureEncoder, VideoViT, video_swin
from contrastive.engine.processes import UserError, opening

import torch
import torch.nn as nn


def image_tower(name, pretrained, image_size, config=None, features=(0, 0), frames=0):
    """The Tower of a name:

    'features' (clips as (B, T, F)); 'regions' (VGT's features as they are); 'resnet18-cifar' (3x3 stem, no max-pool);
    any timm name; 'video_' and a timm ViT (a VideoViT of `frames` frames, no mean over them); 'swin3d_b' (Video Swin of
    torchvision, Kinetics-400; also _t, _s); a transformers id or folder with a '/' (of a CLIP its vision tower, with
    its own projection if D agrees; of others pooled features or the class token); 'clip_vip:' and a CLIP (CLIP-ViP's
    tower, no mean over frames).

    Args: image_size: pixels of a side.   config: of a transformers model that is rebuilt.   features: (F, T) of
        'features'.   frames: T, for a tower over whole clips."""
    if name == "features":
        body = FeatureEncoder(features[1], features[0])
        return Tower(body, body.width)
    if name == "regions":
        return Tower(nn.Identity(), features[1])
    if name in VIDEO_SWIN:
        body, width, stats = video_swin(name, pretrained)
        return Tower(body, width, stats=stats, read=read_swin)
    if name.startswith(CLIP_VIP):
        body, width, projection, config = hub_encoder(name.removeprefix(CLIP_VIP), "vision", pretrained, config)
        if config["model_type"] != "clip":
            raise UserError(f"--image-encoder {name}: it is not a CLIP but {config['model_type']}")
        return Tower(ClipViP(body), width, projection, config, STATS["clip"], whole_clips=True)
    if config or "/" in name or Path(name).is_dir():  # a hub id may also begin with VIDEO
        rebuilt = bool(config)                                             # offline; the spec has its statistics
        body, width, projection, config = hub_encoder(name, "vision", pretrained, config)
        stats = STATS["clip" if config["model_type"].startswith("clip") else "imagenet"]
        stats = stats if rebuilt else hub_stats(name, stats)
        return Tower(body, width, projection, config, stats, read=read_hub)
    body, width, stats = timm_encoder(name.removeprefix(VIDEO), pretrained, image_size)
    if not name.startswith(VIDEO):
        return Tower(body, width, stats=stats)
    return Tower(VideoViT(body, frames), width, stats=stats, whole_clips=True)


def hub_stats(name, otherwise):
    """Mean and standard deviation of the pixels of a transformers model, by its preprocessor_config.json."""
    from transformers import ImageProcessingMixin
    try:
        known = ImageProcessingMixin.get_image_processor_dict(name)[0]
    except (OSError, ValueError):
        known = {}
    return tuple(tuple(known.get(f"image_{word}") or otherwise[k]) for k, word in enumerate(("mean", "std")))


def timm_encoder(name, pretrained, image_size):
    """A timm model without its classifier, its width, and its pixel statistics."""
    import timm
    cifar = name == "resnet18-cifar"
    pretrained &= not cifar
    create = functools.partial(timm.create_model, "resnet18" if cifar else name, pretrained=pretrained, num_classes=0)
    with opening(name):
        try:
            body = create(img_size=image_size)  # a transformer has to know
        except TypeError:  # any other takes no such argument
            body = create()
    if pretrained:
        note_commit(body.pretrained_cfg.get("hf_hub_id") or "")
    if cifar:
        body.conv1, body.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    stats = STATS["imagenet"] if cifar else (body.pretrained_cfg["mean"], body.pretrained_cfg["std"])
    return body, getattr(body, "head_hidden_size", 0) or body.num_features, stats


def read_swin(encoder, pixels):
    """Features of Video Swin, which sees the whole clip and halves its time steps: (B * T / 2, width)."""
    clips = pixels if pixels.ndim == 5 else pixels[:, None]                # (B, T, 3, S, S)
    features = encoder.body(clips.transpose(1, 2)).unflatten(1, (encoder.width, -1))  # (B, width, T / 2)
    return features.transpose(1, 2).flatten(0, 1)


def freeze_unused(model, tokenizer, spec):
    """Tries one example and freezes what gets no gradient (a mask token, a pooler): DDP would wait for it."""
    model.eval()
    shape = spec.get("features") or (3, spec["image_size"], spec["image_size"])
    whole = model.vision.whole_clips and spec["image_encoder"].startswith(VIDEO)
    shape = (spec["frames"], *shape) if whole else shape
    with opening(f"{spec['image_encoder']} at --image-size {spec['image_size']}, {spec['text_encoder'] or 'no texts'}"):
        with torch.enable_grad():
            tokens = tokenizer(["a"]) if tokenizer else None
            out = model(torch.zeros(1, *shape), tokens, *([tokens] if spec.get("questions") else []))  # (1, D) each
            sum(x.sum() for x in out if x is not None).backward()
            refuse_blind(model.text)
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and p.grad is not None)
    model.zero_grad(set_to_none=True)
    model.train()


def refuse_blind(text):
    """Raises: UserError if the first token, which is the text's embedding, cannot see the others (a language model)."""
    if text and text.name != "small" and text.pooling == "cls" and not text.is_clip:
        ids = torch.tensor([[1, 2], [1, 3]])
        first = text.words(ids, torch.ones_like(ids))[0][:, 0]                                # (2, width)
        if torch.equal(*first):
            raise UserError(f"{text.name}: its first token sees only itself; --text-pooling mean")


def set_dropout(model, features, text=True):
    """Sets the dropout of a TwoTower in training: `features` (0..1) in a tower over precomputed features and in SSB's
    text head, after the first layer, the attention and the MLP. text False: none in a transformers text encoder, which
    otherwise keeps its own."""
    for module in model.text.modules() if not text else ():
        for name, value in vars(module).items():  # T5's attention keeps a number, others an nn.Dropout with its p
            if isinstance(value, float) and ("dropout" in name or name == "p" and isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    if model.vision.name in FEATURES:
        model.vision.body.blocks.dropout = features
    if getattr(model.text, "head", None):
        model.text.head.blocks.dropout = features
