"""An image encoder and a text encoder into one space, and the view of an image that evaluation reads."""

import functools
from pathlib import Path

from contrastive.data.table import decode
from contrastive.encoders.base import FEATURES, SmallText, Tower, hub_encoder, read_words, small_cnn
from contrastive.encoders.ssb import TextHead, VideoTower
from contrastive.encoders.towers import image_tower
from contrastive.engine.processes import UserError, say

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@functools.lru_cache
def colours(values, device):
    """Three numbers as (3, 1, 1), kept on the device: each copy would wait for a card."""
    return torch.tensor(values, device=device)[:, None, None]


class EvalTransform:
    """Deterministic view: (3, H, W) uint8, a PIL image, an array or a path -> (3, size, size) float, normalised.

    resize: 'crop' scales the short side and cuts the centre; 'squash' changes the aspect, as the CC3M trainer.
    part: the part of the short side that 'crop' keeps, 1 = all of it; 0.875 = resize to 256, cut 224.
    bicubic: as CLIP's own; else bilinear, as the views of training."""

    def __init__(self, size, mean, std, resize="crop", part=1.0, bicubic=False):
        self.size, self.mean, self.std, self.resize = size, tuple(mean), tuple(std), resize
        self.short, self.bicubic = round(size / part), bicubic

    def raw(self, image):
        """(..., 3, H, W) uint8 -> (..., 3, size, size) uint8; features stay as they are."""
        if image.is_floating_point():
            return image
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2 import functional as V
        how = InterpolationMode.BICUBIC if self.bicubic else InterpolationMode.BILINEAR
        resize = functools.partial(V.resize, interpolation=how, antialias=True)
        if self.resize == "squash":
            return resize(image, [self.size, self.size])
        return V.center_crop(resize(image, [self.short]), [self.size, self.size])

    def normalise(self, x):
        """(..., 3, S, S) float in 0..1 -> normalised."""
        return (x - colours(self.mean, x.device)).div_(colours(self.std, x.device))

    def __call__(self, image):
        if isinstance(image, (str, Path, bytes)):
            image = decode(image)
        elif not torch.is_tensor(image):
            array = np.array(image.convert("RGB") if hasattr(image, "convert") else image)  # (H, W, 3)
            image = torch.from_numpy(array).permute(2, 0, 1)
        if image.is_floating_point() and image.ndim > 2 and image.shape[-3] == 3:  # (T, F) are features
            raise ValueError("pixels are uint8, 0..255; a float image may be normalised already")
        return image if image.is_floating_point() else self.normalise(self.raw(image).float() / 255)


class VisionEncoder(nn.Module):
    """Images (B, 3, S, S) or clips (B, T, 3, S, S), mean over T -> features (B, width) and embeddings (B, D).

    name: 'small', 'ssb' (encoders/ssb.py), or one of encoders/towers.py: timm, transformers, a tower over whole
        clips.
    embed_dim 0: only features.
    """

    def __init__(self, name, embed_dim, pretrained=True, image_size=224, config=None, features=(0, 0), frames=0):
        super().__init__()
        if name == "small":
            tower = Tower(small_cnn().to(memory_format=torch.channels_last), 128)
        elif name == "ssb":
            tower = Tower(VideoTower(features[1], embed_dim), embed_dim, nn.Identity())
        else:
            tower = image_tower(name, pretrained, image_size, config, features, frames)
        self.name, self.body, self.width, self.config = name, tower.body, tower.width, tower.config
        self.stats, self.whole_clips, self.read = tower.stats, tower.whole_clips, tower.read
        projection = tower.projection
        keep = projection is not None and (name == "ssb" or projection.out_features == embed_dim)
        if projection is not None and not keep and pretrained and embed_dim:
            say(f"--embed-dim {embed_dim}: the projections of {name} have width {projection.out_features} and are "
                "replaced by new ones")
        new = nn.Linear(self.width, embed_dim, bias=False) if embed_dim else nn.Identity()
        self.projection = projection if keep else new

    def forward(self, pixels):
        return self.pool(self.frames(pixels), pixels)

    def frames(self, pixels):
        """Features of each frame, (B * T, width); a video tower may return fewer time steps than frames."""
        if (self.name in FEATURES) != (pixels.ndim == 3):
            raise UserError("--image-encoder features and ssb read the features of --feature-dir in ncl.py, and no "
                            "other encoder does")
        if self.whole_clips:
            return self.body(pixels)  # (B, width)
        if self.read:
            return self.read(self, pixels)
        frames = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels  # (B * T, 3, S, S)
        if self.name == "small":
            frames = frames.contiguous(memory_format=torch.channels_last)
        return self.body(frames)

    def pool(self, features, pixels):
        """Features of each frame -> features (B, width) and embeddings (B, D) of the images or clips."""
        embedding = self.projection(features)  # (B * T, D)
        if pixels.ndim == 5 and not self.whole_clips:
            B = len(pixels)
            features = features.unflatten(0, (B, -1)).mean(1)  # (B, width)
            embedding = F.normalize(embedding.float(), dim=-1).unflatten(0, (B, -1)).mean(1)  # (B, D)
        return features, embedding


class TextEncoder(nn.Module):
    """Token ids (B, L) -> embeddings (B, D).

    name: 'small' or a transformers id or folder; pooling: 'cls' or 'mean' (CLIP: its own), or 'ssb', SSB's head.
    embed_dim 0: its own projection, or none if it has none."""

    def __init__(self, name, embed_dim, pretrained=True, length=32, vocabulary=0, pooling="cls", config=None):
        super().__init__()
        self.name, self.pooling, self.config, projection = name, pooling, None, None
        if name == "small":
            self.body = SmallText(vocabulary, length)
            self.width = self.body.width
        else:
            self.body, self.width, projection, self.config = hub_encoder(name, "text", pretrained, config)
        self.is_clip = bool(self.config) and self.config["model_type"].startswith("clip")
        self.head = TextHead(self.width, embed_dim) if pooling == "ssb" else None
        keep = projection is not None and embed_dim in (0, projection.out_features)
        new = nn.Linear(self.width, embed_dim, bias=False) if embed_dim else nn.Identity()
        self.projection = nn.Identity() if self.head else projection if keep else new

    def forward(self, input_ids, attention_mask):
        return self.words(input_ids, attention_mask)[1]

    def words(self, input_ids, attention_mask):
        """Hidden states of the tokens, (B, L, width), and embeddings (B, D)."""
        if self.name == "small":
            words, out = self.body.words(input_ids, attention_mask)
        else:
            words, out = read_words(self, input_ids, attention_mask)
        out = self.head(words, attention_mask) if self.head else out       # (B, D) or (B, width)
        return words, self.projection(out)


class TwoTower(nn.Module):
    """An image encoder and a text encoder into one space. DDP needs one forward for everything that a step encodes.

    forward(pixels, tokens) -> image (B, D), text (B, D), features (B, width); embeddings are not normalised.
    """

    def __init__(self, vision, text):
        super().__init__()
        self.vision, self.text = vision, text

    def forward(self, pixels=None, tokens=None):
        features, image = self.vision(pixels) if pixels is not None else (None, None)
        return image, self.text(**tokens) if tokens is not None else None, features
