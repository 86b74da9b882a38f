"""The table of image encoders, from a name to the function that builds it, and these functions."""

import dataclasses
import difflib
import fnmatch
import functools
import typing
from pathlib import Path

from contrastive.core.processes import UserError, opening
from contrastive.data.hub import note_commit
from contrastive.encoders.base import STATS, Backbone, SmallCNN, as_clips, hub_encoder

import torch
import torch.nn as nn


@dataclasses.dataclass(frozen=True)
class EncoderKind:
    """One kind of image encoder, an entry of IMAGE_ENCODERS.

    Attributes:
        build: function (name, options) -> Backbone, of a name without the prefix and of
            BuildOptions.
        prefix: stands before the name under which the library knows the model.
        reads: "images" (the embedding of a clip is the mean of those of its frames), "clips" (all
            frames of a clip together), or "features" (files of precomputed features).
        whole_clips: it returns one feature of a clip, not one of each frame or time step.
        fixed_frames: it is made for clips of one number of frames.
        has_published_weights: there are weights for --pretrained.
        is_transformers: it is a model of transformers, by hub id or folder.
        release: paper whose released weights fit it with --init-from: "AVION", "CLIP-ViP" or
            "VAST".
    """

    build: typing.Callable
    prefix: str = ""
    reads: str = "images"
    whole_clips: bool = False
    fixed_frames: bool = False
    has_published_weights: bool = False
    is_transformers: bool = False
    release: str = ""

    @property
    def reads_files(self):
        """Whether it reads precomputed features in place of pixels."""
        return self.reads == "features"


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """What a function that builds an image encoder may need beside its name.

    Attributes:
        pretrained: read published weights.
        image_size: pixels of a side.
        embed_dim: D, width of the embeddings.
        config: of a transformers model that is rebuilt, as a dict; else None.
        num_features: width of precomputed features.
        num_frames: T, for an encoder that is made for one number of frames.
    """

    pretrained: bool = False
    image_size: int = 224
    embed_dim: int = 0
    config: dict | None = None
    num_features: int = 0
    num_frames: int = 0


# ============================================ without weights =====================================
def small_encoder(name, options):
    """The small residual network."""
    return Backbone(SmallCNN(), 128)


def cifar_resnet(name, options):
    """A ResNet-18 for images of 32 pixels: a 3x3 stem and no max-pooling."""
    import timm

    body = timm.create_model("resnet18", pretrained=False, num_classes=0)
    body.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
    body.maxpool = nn.Identity()
    return Backbone(body, body.num_features, stats=STATS["imagenet"])


def ssb_encoder(name, options):
    """SSB's encoder of precomputed features."""
    from contrastive.encoders.ssb import VideoTower

    body = VideoTower(options.num_features, options.embed_dim)
    return Backbone(body, options.embed_dim, is_embedding=True)


def region_features(name, options):
    """Precomputed features of frames and regions as they are, for VGT."""
    return Backbone(nn.Identity(), options.num_features)


def vast_encoder(name, options):
    """VAST's encoder of frames."""
    from contrastive.encoders.vast import vision_backbone

    return vision_backbone(name, options.pretrained, options.image_size)


# ======================================= torchvision: Video Swin ==================================
def video_swin(name, options):
    """torchvision's Video Swin without its classifier, with weights of Kinetics-400.

    Its body turns clips (B, 3, T, S, S) into (B, width * T / 2).
    """
    from torchvision.models import get_model

    weights = None
    if options.pretrained:
        weights = "KINETICS400_V1"
    with opening(name):
        body = get_model(name, weights=weights)
    width = body.head.in_features
    body.head = nn.Identity()
    body.avgpool = nn.AdaptiveAvgPool3d((None, 1, 1))
    return Backbone(body, width, stats=STATS["imagenet"], frame_features=swin_features)


def swin_features(encoder, pixels):
    """Features (B * T / 2, width) of Video Swin, which sees the whole clip and halves its steps."""
    clips = as_clips(pixels)                                             # (B, T, 3, S, S)
    features = encoder.body(clips.transpose(1, 2))                       # (B, width * T / 2)
    features = features.unflatten(1, (encoder.width, -1))                # (B, width, T / 2)
    return features.transpose(1, 2).flatten(0, 1)


# ============================================= transformers =======================================
def transformers_encoder(name, options):
    """A model of transformers; of a CLIP its vision encoder."""
    backbone = hub_encoder(name, "vision", options.pretrained, options.config)
    return backbone._replace(stats=None, frame_features=transformers_features)


def transformers_features(encoder, pixels):
    """Features (B * T, width) of a transformers model.

    They are its pooled ones, or its class token if its pooler has a layer of its own, which many
    published weights lack (ViT, DeiT).
    """
    frames = pixels.flatten(0, -4)                                       # (B * T, 3, S, S)
    output = encoder.body(pixel_values=frames)
    if hasattr(getattr(encoder.body, "pooler", None), "dense"):
        return output.last_hidden_state[:, 0]
    return output.pooler_output.flatten(1)                               # a ResNet's has 4 axes


def hub_stats(name):
    """Mean and standard deviation of the pixels of a transformers model, as its files say."""
    from transformers import AutoImageProcessor

    with opening(f"--image-stats encoder: {name}"):
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    return tuple(processor.image_mean), tuple(processor.image_std)


def clip_vip_encoder(name, options):
    """CLIP-ViP in place of a CLIP's vision encoder."""
    from contrastive.encoders.clip_vip import ClipViP

    backbone = hub_encoder(name, "vision", options.pretrained, options.config)
    if backbone.model_type != "clip":
        raise UserError(f"--image-encoder clip_vip:{name}: this is a model of the type "
                        f"{backbone.model_type}; give a CLIP")
    return backbone._replace(body=ClipViP(backbone.body), stats=STATS["clip"])


def clip_width(name):
    """Width D of a CLIP's embeddings, by an --image-encoder's name; 0 if it is not a CLIP."""
    kind = encoder_kind(name)
    if not kind.is_transformers:
        return 0
    import transformers

    name = name.removeprefix(kind.prefix)
    with opening(name):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type != "clip":  # half a CLIP has another type: hub_encoder wants both
        return 0
    return config.projection_dim


# ================================================ timm ============================================
def timm_encoder(name, options):
    """A timm model without its classifier."""
    import timm

    create = functools.partial(
        timm.create_model, name, pretrained=options.pretrained, num_classes=0)
    with opening(name):
        # A transformer has to know the size; other models do not take this argument.
        try:
            body = create(img_size=options.image_size)
        except TypeError:
            body = create()
    cfg = body.pretrained_cfg
    if options.pretrained:
        note_commit(cfg.get("hf_hub_id") or "")
    width = getattr(body, "head_hidden_size", 0) or body.num_features
    return Backbone(body, width, stats=(cfg["mean"], cfg["std"]))


def video_vit(name, options):
    """A timm ViT that reads all frames of a clip."""
    backbone = timm_encoder(name, options)
    with opening(f"video_{name}"):  # any other model of timm lacks what VideoViT uses
        return backbone._replace(body=VideoViT(backbone.body, options.num_frames))


class VideoViT(nn.Module):
    """A timm ViT over the patches of all frames at once, after AVION.

    Each patch gets the embedding of its position, as in an image, and of its frame (`temporal`,
    zeros at the start). One class token attends to all T * P patches in every layer and is the
    feature of the clip. Differences from AVION: there is no patch dropout, and positions have
    weight decay like other matrices. A difference from timm: LayerNorms have AVION's epsilon, 1e-6,
    with all weights, also with published ones of CLIP, whose own is 1e-5.

    Args:
        vit: the ViT, whose weights are used in place.
        frames: T, number of frames of every clip.
    """

    def __init__(self, vit, frames):
        super().__init__()
        self.vit = vit
        self.temporal = nn.Parameter(torch.zeros(frames, vit.embed_dim))  # (T, width)
        for module in vit.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-6

    def forward(self, clips):
        """Clips (B, T, 3, S, S) -> the class token, (B, width)."""
        if clips.ndim != 5 or clips.shape[1] != len(self.temporal):
            raise UserError(f"--image-encoder video_...: made for clips of {len(self.temporal)} "
                            f"frames, the pixels have the shape {tuple(clips.shape)}")
        vit = self.vit
        x = vit.patch_embed(clips.flatten(0, 1))                         # (B * T, P, width)
        x = x.unflatten(0, clips.shape[:2])                              # (B, T, P, width)
        class_position = vit.pos_embed[0, :1]                            # (1, width)
        patch_position = vit.pos_embed[0, 1:]                            # (P, width)
        x = x + patch_position + self.temporal[:, None]
        x = x.flatten(1, 2)                                              # (B, T * P, width)
        token = (vit.cls_token + class_position).expand(len(x), -1, -1)  # (B, 1, width)
        x = vit.norm_pre(torch.cat([token, x], 1))                       # (B, 1 + T * P, width)
        return vit.norm(vit.blocks(x)[:, 0])


# =============================================== the table ========================================
VAST = EncoderKind(vast_encoder, reads="clips", whole_clips=True, has_published_weights=True,
                   release="VAST")
TRANSFORMERS = EncoderKind(transformers_encoder, has_published_weights=True, is_transformers=True)

# A name has an entry of its own, or is of the first kind whose pattern it matches.
IMAGE_ENCODERS = {
    "small": EncoderKind(small_encoder),
    "resnet18-cifar": EncoderKind(cifar_resnet),
    "ssb": EncoderKind(ssb_encoder, reads="features"),
    "regions": EncoderKind(region_features, reads="features"),
    "vast": VAST,
    "vast-small": VAST,
    "swin3d_*": EncoderKind(video_swin, reads="clips", has_published_weights=True),
    "clip_vip:*": EncoderKind(clip_vip_encoder, prefix="clip_vip:", reads="clips",
                              whole_clips=True, has_published_weights=True, is_transformers=True,
                              release="CLIP-ViP"),
    "*/*": TRANSFORMERS,
    "video_*": EncoderKind(video_vit, prefix="video_", reads="clips", whole_clips=True,
                           fixed_frames=True, has_published_weights=True, release="AVION"),
    "*": EncoderKind(timm_encoder, has_published_weights=True),
}


def encoder_kind(name, config=None):
    """The kind of an image encoder: by its name, or a model of transformers if a folder has that
    name; nothing is opened.

    Args:
        name: as --image-encoder takes it.
        config: of a transformers model that is rebuilt, whose folder may no longer exist.
    """
    if name in IMAGE_ENCODERS:
        return IMAGE_ENCODERS[name]
    is_transformers = config is not None or Path(name).is_dir()
    for pattern, kind in IMAGE_ENCODERS.items():
        if kind is TRANSFORMERS and is_transformers:
            return kind
        if fnmatch.fnmatchcase(name, pattern):
            return kind
    raise ValueError(f"no kind of encoder for the name {name!r}")


def check_image_encoder(name, flag="--image-encoder"):
    """Refuses a name that no image encoder has. What a hub id or a folder holds is not asked.

    Raises:
        UserError: with the nearest names.
    """
    kind = encoder_kind(name)
    if name in IMAGE_ENCODERS or kind.is_transformers:
        return
    import timm
    from torchvision.models import list_models

    names = [entry for entry in IMAGE_ENCODERS if "*" not in entry]
    names += list_models(include="swin3d_*")
    for architecture in timm.list_models():
        names.append(kind.prefix + architecture)
    architecture = name.partition(".")[0]  # without the tag of its weights
    if architecture not in names:
        nearest = difflib.get_close_matches(architecture, names, 3, cutoff=0)
        raise UserError(f"{flag} {name}: no image encoder has this name; the nearest: "
                        f"{', '.join(nearest)}")
