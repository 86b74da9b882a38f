"""Encoders by name: timm, transformers, and towers over whole clips or over precomputed features of a clip."""

import functools
from pathlib import Path

from contrastive.data.table import note_commit
from contrastive.encoders.base import CLIP_VIP, STATS, VIDEO, Tower, hub_encoder
from contrastive.encoders.clip_vip import ClipViP
from contrastive.engine.processes import UserError, opening, read_json

import torch
import torch.nn as nn


def image_tower(name, pretrained, image_size, config=None, features=(0, 0), frames=0):
    """The Tower of a name:

    'regions' (VGT's features as they are); 'resnet18-cifar' (3x3 stem, no max-pool); any timm name; 'video_' and a timm
    ViT (a VideoViT of `frames` frames, no mean over them); 'swin3d_b' (Video Swin of torchvision, Kinetics-400; also
    _t, _s); a transformers id or folder with a '/' (of a CLIP its vision tower, with its own projection if D agrees; of
    others pooled features or the class token); 'clip_vip:' and a CLIP (CLIP-ViP's tower, no mean over frames).

    Args: image_size: pixels of a side.   config: of a transformers model that is rebuilt.   features: (T, F) of
        'regions'.   frames: T, for a tower over whole clips."""
    if name == "regions":
        return Tower(nn.Identity(), features[1])
    if name.startswith("swin3d_"):
        return video_swin(name, pretrained)
    if name.startswith(CLIP_VIP):
        tower = hub_encoder(name.removeprefix(CLIP_VIP), "vision", pretrained, config)
        if tower.config["model_type"] != "clip":
            raise UserError(f"--image-encoder {name}: it is not a CLIP but {tower.config['model_type']}")
        return tower._replace(body=ClipViP(tower.body), stats=STATS["clip"], whole_clips=True)
    if config or "/" in name or Path(name).is_dir():  # a hub id may also begin with VIDEO
        tower = hub_encoder(name, "vision", pretrained, config)
        stats = STATS["clip" if tower.config["model_type"].startswith("clip") else "imagenet"]
        stats = stats if config else hub_stats(name, stats)  # a spec, from which a model is rebuilt, has its own
        return tower._replace(stats=stats, read=read_hub)
    tower = timm_encoder(name.removeprefix(VIDEO), pretrained, image_size)
    if not name.startswith(VIDEO):
        return tower
    with opening(name):  # of timm's, it takes ViTs
        return tower._replace(body=VideoViT(tower.body, frames), whole_clips=True)


def hub_stats(name, otherwise):
    """Mean and standard deviation of the pixels of a transformers model, by its preprocessor_config.json if there."""
    from transformers.utils import cached_file
    with opening(name):
        file = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)
    known = read_json(file) if file else {}
    return tuple(tuple(known.get(f"image_{word}") or otherwise[k]) for k, word in enumerate(("mean", "std")))


def timm_encoder(name, pretrained, image_size):
    """The Tower of a timm model without its classifier."""
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
    return Tower(body, getattr(body, "head_hidden_size", 0) or body.num_features, stats=stats)


def read_hub(encoder, pixels):
    """Pooled features (B * T, width) of a transformers model; or its class token, if its pooler has a layer of its own,
    which many published weights lack (ViT, DeiT)."""
    frames = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels  # (B * T, 3, S, S)
    found = encoder.body(pixel_values=frames)
    if hasattr(getattr(encoder.body, "pooler", None), "dense"):
        return found.last_hidden_state[:, 0]
    return found.pooler_output.flatten(1)  # a ResNet's is (B * T, width, 1, 1)


def video_swin(name, pretrained):
    """The Tower of torchvision's Video Swin without its classifier, clips (B, 3, T, S, S) -> (B, width * T / 2)."""
    from torchvision.models import get_model
    with opening(name):
        body = get_model(name, weights="KINETICS400_V1" if pretrained else None)
    width = body.head.in_features
    body.head, body.avgpool = nn.Identity(), nn.AdaptiveAvgPool3d((None, 1, 1))
    return Tower(body, width, stats=STATS["imagenet"], read=read_swin)


def read_swin(encoder, pixels):
    """Features of Video Swin, which sees the whole clip and halves its time steps: (B * T / 2, width)."""
    clips = pixels if pixels.ndim == 5 else pixels[:, None]                # (B, T, 3, S, S)
    features = encoder.body(clips.transpose(1, 2)).unflatten(1, (encoder.width, -1))  # (B, width, T / 2)
    return features.transpose(1, 2).flatten(0, 1)


class VideoViT(nn.Module):
    """A timm ViT over the patches of all frames at once, after AVION: clips (B, T, 3, S, S) -> (B, width).

    Each patch gets the embedding of its position, as in an image, and of its frame (`temporal`, zeros at the start).
    One class token attends to all T * P patches in every layer and is the feature. Unlike AVION: no patch dropout, and
    positions have weight decay like other matrices.
    """

    def __init__(self, vit, frames):
        super().__init__()
        self.vit, self.temporal = vit, nn.Parameter(torch.zeros(frames, vit.embed_dim))  # (T, width)
        for norm in (m for m in vit.modules() if isinstance(m, nn.LayerNorm)):
            norm.eps = 1e-6  # AVION's; CLIP has 1e-5

    def set_grad_checkpointing(self):
        """As timm's."""
        self.vit.set_grad_checkpointing()

    def forward(self, clips):
        from timm.models import checkpoint_seq
        if clips.ndim != 5 or clips.shape[1] != len(self.temporal):
            raise UserError(f"--image-encoder {VIDEO}...: made for clips of {len(self.temporal)} frames")
        x = self.vit.patch_embed(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])  # (B, T, P, width)
        first, place = self.vit.pos_embed[0, :1], self.vit.pos_embed[0, 1:]  # (1, width), (P, width)
        x = (x + place + self.temporal[:, None]).flatten(1, 2)  # (B, T * P, width)
        token = (self.vit.cls_token + first).expand(len(x), -1, -1)  # (B, 1, width)
        x = self.vit.norm_pre(torch.cat([token, x], 1))  # (B, 1 + T * P, width)
        x = checkpoint_seq(self.vit.blocks, x) if self.vit.grad_checkpointing else self.vit.blocks(x)
        return self.vit.norm(x[:, 0])


def freeze_unused(model, tokenizer, spec):
    """Tries one example and freezes what gets no gradient (a mask token, a pooler): DDP would wait for it."""
    model.eval()
    shape = spec.get("features") or (3, spec["image_size"], spec["image_size"])
    shape = (spec["frames"], *shape) if spec.get("frames") else shape
    with opening(f"{spec['image_encoder']} at --image-size {spec['image_size']}, {spec['text_encoder'] or 'no texts'}"):
        with torch.enable_grad():
            tokens = tokenizer(["a"]) if tokenizer else None
            out = model(torch.zeros(1, *shape), tokens, *([tokens] if spec.get("questions") else []))  # (1, D) each
            sum(x.sum() for x in out if x is not None).backward()
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and p.grad is not None)
    model.zero_grad(set_to_none=True)
    model.train()


def freeze_as_clip4clip(model):
    """Freezes of two CLIP towers what CLIP4Clip's own setting (--freeze_layer_num 0) does: the embeddings of patches,
    class, tokens and positions, and the norm before the first layer.   Raises: UserError for other towers."""
    first = {name: p for name, p in model.named_parameters() if ".embeddings." in name or ".pre_layrnorm." in name}
    if not (model.text.is_clip and any("pre_layrnorm" in name for name in first)):
        raise UserError("--freeze clip4clip: is for a CLIP as both encoders; use --freeze none")
    for p in first.values():
        p.requires_grad_(False)


def set_dropout(model, features, text=True):
    """Sets the dropout of a TwoTower in training: `features` (0..1) in SSB's tower and text head. text False: none in a
    transformers text encoder, which otherwise keeps its own."""
    for module in model.text.modules() if not text else ():
        for name, value in vars(module).items():  # T5's attention keeps a number, others an nn.Dropout with its p
            if isinstance(value, float) and ("dropout" in name or name == "p" and isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    if model.vision.name == "ssb":
        model.vision.body.blocks.dropout = features
    if getattr(model.text, "head", None):
        model.text.head.blocks.dropout = features
