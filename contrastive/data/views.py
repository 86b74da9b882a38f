"""Random numbers by the name of a sample, and random views of images."""

import dataclasses
import hashlib
from typing import NamedTuple

from contrastive.core.processes import to_device

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps


# ---- random numbers ----
def uniforms(seed, epoch, keys, n, stream=0):
    """Random numbers in [0, 1) that depend on (seed, epoch, key, stream) and on nothing else.

    Args:
        epoch: one number, or one for each key.
        keys: B integers: numbers of samples, or `key_hash` of their names.
        n: how many numbers for each key.
        stream: one for each view, so that two views of a sample differ.
    Returns: (B, n) float32.
    """
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        x = np.asarray(keys, dtype=np.int64).astype(np.uint64) * golden         # (B,)
        x = mix_bits(x + np.uint64(seed))
        salt = np.uint64(epoch) * golden + np.uint64(stream) * np.uint64(0xD1B54A32D192ED03)
        x = mix_bits(x ^ mix_bits(salt))
        counter = np.arange(1, n + 1, dtype=np.uint64) * golden                 # (n,)
        x = mix_bits(x[:, None] + counter[None])                                # (B, n)
    # 24 bits are exact in float32.
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def mix_bits(x):
    """The finaliser of the generator splitmix64, of an array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_hash(key):
    """63-bit integer of a sample's name, the same on every machine."""
    digest = hashlib.blake2b(str(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def pick(captions, u):
    """One caption of each example, by its random numbers.

    Args:
        captions: B lists of str.
        u: (B, 1 or more) in 0..1, of which the first is used.
    Returns: B str.
    """
    return [texts[int(row[0] * len(texts))] for texts, row in zip(captions, u)]


# ---- one view ----
class Draw:
    """Columns of the random numbers of a view, (B, Augment.DRAWS)."""

    AREA = 0
    ASPECT = 1
    TOP = 2
    LEFT = 3
    FLIP = 4
    JITTER = 5
    BRIGHTNESS = 6
    CONTRAST = 7
    SATURATION = 8
    HUE = 9
    GREY = 10
    BLUR = 11
    RANDAUGMENT_HIGH = 12  # 48 bits of a seed in two numbers
    RANDAUGMENT_LOW = 13
    BLUR_SIGMA = 14


@dataclasses.dataclass(frozen=True)
class Augment:
    """One random view of an image: a crop and RandAugment of each sample, then flip, colours, grey
    and blur of the batch, on its device.

    Every decision is read from a row of `uniforms`, never from a global generator.

    Args:
        size: side of the view in pixels.
        scale_min: smallest area of the random crop, as a part of the image; 1 = no random crop.
        flip, jitter_p, grey, blur: probabilities.
        brightness, contrast, saturation, hue: strengths, as of torchvision's ColorJitter.
        randaugment: (operations, magnitude out of 30) as randaugment() takes them; (0, 0) = off.
        squash: whether the whole image becomes a square if there is no random crop.
    """

    size: int
    scale_min: float = 1.0
    flip: float = 0.0
    jitter_p: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grey: float = 0.0
    blur: float = 0.0
    randaugment: tuple = (0, 0)
    squash: bool = False
    DRAWS = 16  # random numbers of a view

    def simplified(self):
        """The Augment of the same views in which what has no effect is off."""
        changes = {}
        if not (self.brightness or self.contrast or self.saturation or self.hue):
            changes["jitter_p"] = 0.0
        if self.scale_min < 1:
            changes["squash"] = False
        return dataclasses.replace(self, **changes)

    def boxes(self, height, width, u):
        """Boxes of torchvision's RandomResizedCrop with an aspect of 3/4 to 4/3.

        Without a random crop it is the centre square, or with squash the whole image. A side that
        is longer than the image's is cut to it; torchvision draws again, up to ten times.

        Args:
            u: (B, DRAWS).
        Returns: (B, 4) integers: top, left, height, width.
        """
        if self.scale_min == 1:
            h = height
            w = width
            if not self.squash:
                h = w = min(height, width)
            box = np.array([[(height - h) // 2, (width - w) // 2, h, w]])
            return np.tile(box, (len(u), 1))
        fraction = self.scale_min + (1 - self.scale_min) * u[:, Draw.AREA]
        area = height * width * fraction                                        # (B,)
        aspect = np.exp(np.log(3 / 4) + np.log(16 / 9) * u[:, Draw.ASPECT])     # (B,)
        h = np.clip(np.round(np.sqrt(area / aspect)), 1, height)
        w = np.clip(np.round(np.sqrt(area * aspect)), 1, width)
        top = np.floor(u[:, Draw.TOP] * (height - h + 1))
        left = np.floor(u[:, Draw.LEFT] * (width - w + 1))
        return np.stack([top, left, h, w], 1).astype(np.int64)

    def crop_one(self, image, u):
        """Crops one sample, in a worker of the loader.

        Args:
            image: (..., 3, H, W) uint8 of any size; all frames of a clip are cropped alike.
            u: (DRAWS,).
        Returns: (..., 3, size, size) uint8.
        """
        from torchvision.transforms.v2 import functional as V

        height, width = image.shape[-2:]
        top, left, h, w = self.boxes(height, width, u[None])[0].tolist()
        size = [self.size, self.size]
        image = V.resized_crop(image, top, left, h, w, size, antialias=True)
        if self.randaugment[0]:
            image = randaugment(image, u, *self.randaugment)
        return image

    def photometric(self, x, u):
        """Flip, colour jitter, grey and blur, on the device. The colours change as torchvision's,
        in the fixed order brightness, contrast, saturation, hue.

        Args:
            x: (B, 3, S, S) in 0..1.
            u: (B, DRAWS, 1, 1, 1).
        """
        if self.flip:
            x = torch.where(u[:, Draw.FLIP] < self.flip, x.flip(-1), x)
        has_jitter = self.brightness or self.contrast or self.saturation or self.hue
        if self.jitter_p and has_jitter:
            x = change_where(u[:, Draw.JITTER] < self.jitter_p, self.jitter, x, u)
        if self.grey:
            x = torch.where(u[:, Draw.GREY] < self.grey, luma(x).expand_as(x), x)
        if self.blur:
            x = change_where(u[:, Draw.BLUR] < self.blur, random_blur, x, u)
        return x

    def jitter(self, x, u):
        """Colour jitter of all samples."""
        signed = 2 * u - 1                                                  # (B, DRAWS, 1, 1, 1)
        brightness = 1 + signed[:, Draw.BRIGHTNESS] * self.brightness           # (B, 1, 1, 1)
        contrast = 1 + signed[:, Draw.CONTRAST] * self.contrast
        saturation = 1 + signed[:, Draw.SATURATION] * self.saturation
        x = (x * brightness).clamp_(0, 1)
        mean = luma(x).mean((-2, -1), keepdim=True)                             # (B, 1, 1, 1)
        x = torch.lerp(mean, x, contrast).clamp_(0, 1)
        x = torch.lerp(luma(x), x, saturation).clamp_(0, 1)
        if self.hue:
            x = shift_hue(x, signed[:, Draw.HUE] * self.hue)
        return x


def change_where(is_changed, change, x, u):
    """change(x, u) of some samples, and the others as they are.

    Args:
        is_changed: (B, 1, 1, 1) bool.
        change: a function of (x, u).
    """
    # A GPU changes all samples, since it would have to wait for the number of those to change.
    if x.is_cuda or torch.compiler.is_compiling():
        return torch.where(is_changed, change(x, u), x)
    rows = is_changed.flatten().nonzero().flatten()
    if not len(rows):
        return x
    return x.index_copy(0, rows, change(x[rows], u[rows]))


# ---- colours and blur of a batch ----
# Ours because torchvision's functions take one box and one strength for a whole batch, so that a
# GPU would run their kernels image by image. On a CPU, colours, grey and blur of a batch of 256
# take 0.45 ms an image at 64 px (torchvision v2: 1.1 ms), but 14 ms at 224 px (10 ms); the crop
# below takes 0.19 ms at 64 px (0.07 ms) and is for small images.
def luma(x):
    """Brightness of RGB images by ITU-R 601: (..., 3, H, W) -> (..., 1, H, W)."""
    r, g, b = x.unbind(-3)
    return (0.2989 * r + 0.587 * g + 0.114 * b).unsqueeze(-3)


def shift_hue(x, shift):
    """Rotates the hue of RGB images, by the closed form of HSV -> RGB.

    Args:
        x: (B, 3, S, S) in 0..1.
        shift: (B, 1, 1, 1) turns, -0.5..0.5.
    """
    r, g, b = x.unbind(-3)                                                      # (B, S, S)
    high = torch.maximum(torch.maximum(r, g), b)
    low = torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    c = chroma.clamp(min=1e-8)
    green_or_blue = torch.where(g == high, 2 + (b - r) / c, 4 + (r - g) / c)
    sextant = torch.where(r == high, (g - b) / c, green_or_blue)
    sextant = sextant + 6 * shift.squeeze(-3)

    def channel(n):
        k = sextant + n
        k = k - 6 * torch.floor(k / 6)  # 0..6
        return high - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], -3)


def random_blur(x, u):
    """Gaussian blur with a sigma of 0.1 to 2 pixels, as SimCLR: (B, 3, S, S) by (B, DRAWS, ...)."""
    return gaussian_blur(x, 0.1 + 1.9 * u[:, Draw.BLUR_SIGMA, 0, 0, 0])


def gaussian_blur(x, sigma):
    """Gaussian blur of radius S/20, as SimCLR, with reflected borders.

    Args:
        x: (B, C, S, S).
        sigma: (B,) pixels.
    """
    B, C, S, _ = x.shape
    radius = max(1, S // 20)
    t = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (t / sigma[:, None]) ** 2)                        # (B, 2 radius + 1)
    kernel = kernel / kernel.sum(1, keepdim=True)
    kernel = kernel.repeat_interleave(C, 0)                                     # (BC, 2 radius + 1)
    border = (radius, radius, radius, radius)
    y = F.pad(x.reshape(1, B * C, S, S), border, mode="reflect")
    y = F.conv2d(y, kernel[:, None, :, None], groups=B * C)
    y = F.conv2d(y, kernel[:, None, None, :], groups=B * C)
    return y.reshape(B, C, S, S)


# ---- crops of a batch ----
def crop_batch(augment, images, u):
    """Crops a batch of images of one size, on their device: two small matrix products in place of
    torchvision's resized_crop with antialias, image by image.

    Args:
        images: (B, [T,] 3, H, W) uint8, or float in 0..1.
        u: (B, DRAWS).
    Returns: (B, [T,] 3, size, size) float in 0..1.
    """
    boxes = augment.boxes(*images.shape[-2:], u)
    boxes = to_device(torch.from_numpy(boxes), images.device)                   # (B, 4)
    x = images.reshape(-1, *images.shape[-3:])                                  # (M, C, H, W)
    # All frames of a clip have the same box.
    boxes = boxes.repeat_interleave(len(x) // len(images), 0)                   # (M, 4)
    if x.dtype == torch.uint8:
        x = x.float() / 255
    M, C, H, W = x.shape
    size = augment.size
    rows = resize_weights(boxes[:, 0], boxes[:, 2], size, H)                    # (M, size, H)
    columns = resize_weights(boxes[:, 1], boxes[:, 3], size, W)                 # (M, size, W)
    x = torch.bmm(x.reshape(M, C * H, W), columns.transpose(1, 2))              # (M, CH, size)
    x = rows[:, None] @ x.view(M, C, H, size)                                   # (M, C, size, size)
    x = x.clamp_(0, 1).unflatten(0, images.shape[:-3])                          # (B, [T,] C, ...)
    if augment.randaugment[0]:  # by Pillow: a GPU waits, but no recipe has it for sets in memory
        views = []
        for view, row in zip((x * 255).round().byte().cpu(), u):
            views.append(randaugment(view, row, *augment.randaugment))
        x = torch.stack(views).to(images.device) / 255
    return x


def resize_weights(start, length, size, side):
    """Weight of each pixel of the image in each pixel of the view: a triangle as wide as the
    shrinking, torchvision's bilinear with antialias.

    Args:
        start, length: (B,) of the box, in pixels.
        size, side: pixels of the view and of the image.
    Returns: (B, size, side).
    """
    start = start[:, None, None].float()
    length = length[:, None, None].float()
    scale = length / size
    number = torch.arange(size, device=start.device)[:, None]
    centre = start + (number + 0.5) * scale                                     # (B, size, 1)
    pixel = torch.arange(side, device=start.device) + 0.5                       # (side,)
    is_inside = (pixel > start) & (pixel < start + length)
    distance = (pixel - centre).abs() / scale.clamp(min=1)                      # (B, size, side)
    weight = (1 - distance).clamp(min=0) * is_inside
    return weight / weight.sum(-1, keepdim=True)


# ---- RandAugment ----
# Operations on an RGB picture of Pillow, with a strength: those of torchvision in its order, with
# the strengths of the trainer of CC3M. It has magnitudes of 0..10, and grey beside a moved picture.
# It multiplies light and sharpness by a factor of 0.1 to 1.9, always with the same sign, and its
# shifts end at 10 pixels whatever the size is.
GREY = (128, 128, 128)


def identity(picture, strength):
    """The picture as it is."""
    return picture


def shear_x(picture, strength):
    """Shifts each row to the side by `strength` times its distance from the top."""
    return transform_affine(picture, (1, strength, 0, 0, 1, 0))


def shear_y(picture, strength):
    """Shifts each column up or down by `strength` times its distance from the left."""
    return transform_affine(picture, (1, 0, 0, strength, 1, 0))


def shift_x(picture, pixels):
    """Moves the picture to the right."""
    return transform_affine(picture, (1, 0, -pixels, 0, 1, 0))


def shift_y(picture, pixels):
    """Moves the picture down."""
    return transform_affine(picture, (1, 0, 0, 0, 1, -pixels))


def transform_affine(picture, matrix):
    """At each (x, y) the pixel at (a x + b y + c, d x + e y + f), of the matrix (a, b, c, d, e,
    f)."""
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix,
                             resample=Image.Resampling.BILINEAR, fillcolor=GREY)


def rotate(picture, degrees):
    """Rotates the picture about its centre, anticlockwise."""
    return picture.rotate(degrees, resample=Image.Resampling.BILINEAR, fillcolor=GREY)


def brightness(picture, strength):
    """Multiplies the brightness by 1 + strength."""
    return ImageEnhance.Brightness(picture).enhance(1 + strength)


def sharpness(picture, strength):
    """Multiplies the sharpness by 1 + strength."""
    return ImageEnhance.Sharpness(picture).enhance(1 + strength)


def auto_contrast(picture, strength):
    """Spreads the values of each channel over the whole range."""
    return ImageOps.autocontrast(picture)


def equalize(picture, strength):
    """Makes the values of each channel equally frequent."""
    return ImageOps.equalize(picture)


class Operation(NamedTuple):
    """An operation of RandAugment."""

    change: object  # function(picture, strength) -> picture
    # At magnitude 30; 0 = has none. Of shears and light a factor, of shifts pixels, of rotations
    # degrees.
    max_strength: float
    min_strength: float = 0  # at magnitude 0
    has_random_sign: bool = True

    def strength(self, magnitude):
        """The strength at a magnitude of 0..30, without its random sign."""
        return self.min_strength + (self.max_strength - self.min_strength) * magnitude / 30


OPERATIONS = {
    "Identity": Operation(identity, 0),
    "ShearX": Operation(shear_x, 0.3),
    "ShearY": Operation(shear_y, 0.3),
    "TranslateX": Operation(shift_x, 10),
    "TranslateY": Operation(shift_y, 10),
    "Rotate": Operation(rotate, 30),
    "Brightness": Operation(brightness, 0.9, -0.9, has_random_sign=False),
    "Sharpness": Operation(sharpness, 0.9, -0.9, has_random_sign=False),
    "AutoContrast": Operation(auto_contrast, 0),
    "Equalize": Operation(equalize, 0),
}


def randaugment(image, u, operations, magnitude):
    """Applies random OPERATIONS, each with probability 1/2, which draws choose as those of
    torchvision's v2.RandAugment.

    Args:
        image: (..., 3, H, W) uint8.
        u: (DRAWS,).
        operations: how many are chosen.
        magnitude: out of 30.
    """
    high = int(u[Draw.RANDAUGMENT_HIGH] * 2**24)
    low = int(u[Draw.RANDAUGMENT_LOW] * 2**24)
    generator = torch.Generator().manual_seed(high * 2**24 + low)
    frames = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1)           # (M, H, W, 3)
    pictures = [Image.fromarray(frame) for frame in frames.numpy()]
    choices = list(OPERATIONS.values())
    for _ in range(operations):
        if torch.rand((), generator=generator) >= 0.5:
            continue
        operation = choices[torch.randint(len(choices), (), generator=generator)]
        strength = operation.strength(magnitude)
        has_sign = operation.has_random_sign and operation.max_strength > 0
        if has_sign and torch.rand((), generator=generator) <= 0.5:
            strength = -strength
        pictures = [operation.change(picture, strength) for picture in pictures]
    frames = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)           # (M, 3, H, W)
    return frames.reshape(image.shape).contiguous()


# ------------------------------------------------------- views by flags ---------------------------
def training_view(args, kind="same", jitter_p=1.0):
    """The view of a training image or clip, as the flags of Parser.add_view_flags say.

    Args:
        kind: 'same', that view; 'simclr', that of simclr_view; 'crop', a random crop alone.
        jitter_p: probability of the colour jitter.
    """
    if kind == "simclr":
        return simclr_view(args)
    if kind == "crop":
        return Augment(args.image_size, args.crop_min, squash=args.eval_resize == "squash")
    if kind != "same":
        raise ValueError(f"kind={kind!r}: give 'same', 'simclr' or 'crop'")
    randaugment = getattr(args, "randaugment", (0, 0))                     # a script may lack it
    return Augment(args.image_size, args.crop_min, args.flip, jitter_p,
                   brightness=args.jitter, contrast=args.jitter, saturation=args.jitter,
                   randaugment=tuple(randaugment), squash=args.eval_resize == "squash")


def simclr_view(args):
    """The strong view of SimCLR and SLIP, as the flags of Parser.add_simclr_view_flags say; colour
    jitter and grey have the strengths and probabilities of SLIP's code."""
    return Augment(args.image_size, args.aug_crop_min, args.aug_flip, jitter_p=0.8,
                   brightness=0.4, contrast=0.4, saturation=0.4, hue=args.aug_hue,
                   grey=0.2, blur=args.aug_blur, squash=args.eval_resize == "squash")
