"""The table of image encoders: what a name says about how an encoder is built and what it reads."""

import dataclasses
import fnmatch
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class EncoderKind:
    """One kind of image encoder.

    Attributes:
        family: who builds it; `image_tower` in encoders/towers.py has one branch for each family.
        prefix: stands before the name under which the library knows the model.
        reads: "images" (the embedding of a clip is the mean of those of its frames), "clips" (all
            frames of a clip together), "features" or "regions" (files of precomputed features).
        whole_clips: it returns one feature of a clip, not one of each frame or time step.
        fixed_frames: it is made for clips of one number of frames.
        has_published_weights: there are weights for --pretrained.
        release: paper whose released weights fit it with --init-from: "AVION", "CLIP-ViP" or
            "VAST".
    """

    family: str
    prefix: str = ""
    reads: str = "images"
    whole_clips: bool = False
    fixed_frames: bool = False
    has_published_weights: bool = True
    release: str = ""

    @property
    def reads_files(self):
        """Whether it reads precomputed features in place of pixels."""
        return self.reads in ("features", "regions")


TRANSFORMERS = EncoderKind("transformers")
VAST = EncoderKind("vast", reads="clips", whole_clips=True, release="VAST")

# A name is of the first kind whose pattern it matches.
ENCODER_KINDS = {
    "small": EncoderKind("small", has_published_weights=False),
    "ssb": EncoderKind("ssb", reads="features", has_published_weights=False),
    "regions": EncoderKind("regions", reads="regions", has_published_weights=False),
    "vast": VAST,
    "vast-small": VAST,
    "swin3d_*": EncoderKind("video_swin", reads="clips"),
    "clip_vip:*": EncoderKind("clip_vip", prefix="clip_vip:", reads="clips", whole_clips=True,
                              release="CLIP-ViP"),
    "*/*": TRANSFORMERS,
    "resnet18-cifar": EncoderKind("cifar_resnet", has_published_weights=False),
    "video_*": EncoderKind("video_vit", prefix="video_", reads="clips", whole_clips=True,
                           fixed_frames=True, release="AVION"),
    "*": EncoderKind("timm"),
}


def encoder_kind(name, config=None):
    """The kind of an image encoder: by its name, or a model of transformers if a folder has that
    name; nothing is opened.

    Args:
        name: as --image-encoder takes it.
        config: of a transformers model that is rebuilt, whose folder may no longer exist.
    """
    is_transformers = config is not None or Path(name).is_dir()
    for pattern, kind in ENCODER_KINDS.items():
        if kind is TRANSFORMERS and is_transformers:
            return kind
        if fnmatch.fnmatchcase(name, pattern):
            return kind
    raise ValueError(f"no kind of encoder for the name {name!r}")
