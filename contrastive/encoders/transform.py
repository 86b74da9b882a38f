"""The view of an image that encoders read in evaluation."""

import functools
from pathlib import Path

from contrastive.data.pixels import decode, pixels_of

import torch

MAX_ASPECT_RATIO = 20  # of a longer image the centre is cut out before it is scaled


@functools.lru_cache
def channel_values(values, device):
    """Three numbers as a (3, 1, 1) tensor, made once: each copy to a GPU would wait for it."""
    return torch.tensor(values, device=device)[:, None, None]


class EvalTransform:
    """The deterministic view of an image: resized, cut and normalised.

    Args:
        size: pixels of a side of the view.
        mean, std: statistics of the pixels, three numbers each.
        resize: "crop" scales the short side and cuts out the centre; "squash" changes the aspect
            ratio, as the CC3M trainer does.
        fraction: part of the short side that "crop" keeps; 1 = all of it, 0.875 = resize to 256 and
            cut out 224.
        bicubic: interpolate as CLIP's own view does; else bilinear, as the views of training.

    Attributes:
        subtitle_tokens: function of subtitles -> {input_ids, attention_mask}, if the model reads
            them (VAST).
    """

    subtitle_tokens = None

    def __init__(self, size, mean, std, resize="crop", fraction=1.0, *, bicubic=False):
        self.size = size
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.resize = resize
        self.short = round(size / fraction)
        self.bicubic = bicubic

    def raw(self, image):
        """(..., 3, H, W) uint8 -> (..., 3, size, size) uint8; features (float) stay as they are."""
        if image.is_floating_point():
            return image
        from torchvision.transforms import v2

        modes = v2.InterpolationMode
        interpolation = modes.BILINEAR
        if self.bicubic:
            interpolation = modes.BICUBIC
        side = [self.short]
        if self.resize == "squash":
            side = [self.size, self.size]
        else:
            # scaled first, an image of 30,000 x 1 pixels would take gigabytes
            longest = MAX_ASPECT_RATIO * min(image.shape[-2:])
            if max(image.shape[-2:]) > longest:
                height, width = image.shape[-2:]
                image = v2.functional.center_crop(
                    image, [min(height, longest), min(width, longest)])
        resized = v2.functional.resize(image, side, interpolation=interpolation, antialias=True)
        return v2.functional.center_crop(resized, [self.size, self.size])

    def normalise(self, x):
        """(..., 3, S, S) float in 0..1 -> normalised."""
        mean = channel_values(self.mean, x.device)
        std = channel_values(self.std, x.device)
        return (x - mean).div_(std)

    def __call__(self, image):
        """(3, H, W) uint8, a PIL image or a path -> (3, size, size) float, normalised.

        PIL images and files are turned upright, and transparency is over white. Precomputed
        features (T, F) are returned as they are.

        Raises:
            ValueError: for a float image, which may be normalised already.
        """
        if isinstance(image, (str, Path)):
            image = decode(image)
        elif not torch.is_tensor(image):
            image = pixels_of(image)
        if not image.is_floating_point():
            return self.normalise(self.raw(image).float() / 255)
        if image.ndim > 2 and image.shape[-3] == 3:
            raise ValueError("pixels are uint8, 0..255; a float image may be normalised already")
        return image
