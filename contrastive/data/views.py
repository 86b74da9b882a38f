"""Random numbers, image views, and the texts of a batch."""

import dataclasses
import hashlib

from contrastive.engine.processes import to_device

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps


# ================================================== random numbers ==================================================
def _mix(x):
    """splitmix64 finaliser on uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed, epoch, keys, n, stream=0):
    """(len(keys), n) float32 numbers in [0, 1): a function of (seed, epoch, key, stream) and of nothing else.
    epoch: one, or one per key; keys: integers (the sample's index, or `key_hash` of its name); stream: one per view."""
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        x = _mix(np.asarray(keys, dtype=np.int64).astype(np.uint64) * golden + np.uint64(seed))
        x = _mix(x ^ _mix(np.uint64(epoch) * golden + np.uint64(stream) * np.uint64(0xD1B54A32D192ED03)))
        x = _mix(x[:, None] + np.arange(1, n + 1, dtype=np.uint64)[None] * golden)
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # 24 bits: exact in float32


def key_hash(key):
    """63-bit integer of a sample's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little") >> 1


# ====================================================== texts =======================================================
def pick(captions, u):
    """One caption of each example, by its draws: captions: B lists of str; u (B, >= 1) in 0..1 -> B str."""
    return [c[int(r[0] * len(c))] for c, r in zip(captions, u)]


# =================================================== image views ====================================================
@dataclasses.dataclass(eq=False)
class Augment:
    """One random image view: crop and RandAugment per sample, then flip, colour, grey and blur in batch, on the device.

    Every decision is read from a row of `uniforms`, never from a global generator.

    Args: size (pixels); scale_min: smallest area of the random crop, as a part of the image (1 = no crop); flip, grey,
        blur, jitter_p: probabilities; brightness, contrast, saturation, hue: strengths as in torchvision.ColorJitter;
        randaugment: (operations, magnitude out of 30), or (0, 0); squash: with no crop, do not keep the aspect.
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
    DRAWS = 16

    def boxes(self, height, width, u):
        """Random-resized-crop boxes (B, 4) long (top, left, height, width) for draws u (B, DRAWS); aspect 3/4..4/3.
        With scale_min = 1 it is the evaluation view: the centre square, or with squash the whole image. Sides longer
        than the image's are cut to them (torchvision draws again, up to ten times)."""
        if self.scale_min == 1:
            h, w = (height, width) if self.squash else (min(height, width),) * 2
            return np.tile(np.array([[(height - h) // 2, (width - w) // 2, h, w]]), (len(u), 1))
        area = height * width * (self.scale_min + (1 - self.scale_min) * u[:, 0])  # (B,)
        ratio = np.exp(np.log(3 / 4) + np.log(16 / 9) * u[:, 1])
        h = np.clip(np.round(np.sqrt(area / ratio)), 1, height)
        w = np.clip(np.round(np.sqrt(area * ratio)), 1, width)
        top, left = np.floor(u[:, 2] * (height - h + 1)), np.floor(u[:, 3] * (width - w + 1))
        return np.stack([top, left, h, w], 1).astype(np.int64)

    def crop_one(self, image, u):
        """Worker side: (..., 3, H, W) uint8 of any size -> (..., 3, size, size) uint8, all frames alike; u (DRAWS,)."""
        from torchvision.transforms.v2 import functional as V
        top, left, h, w = self.boxes(*image.shape[-2:], u[None])[0].tolist()
        image = V.resized_crop(image, top, left, h, w, [self.size, self.size], antialias=True)
        return randaugment(image, u, *self.randaugment) if self.randaugment[0] else image

    def photometric(self, x, u):
        """Device side: (B, 3, S, S) float in 0..1, draws (B, DRAWS, 1, 1, 1) -> x after flip, jitter, grey and blur.
        The colour operations equal torchvision's, in the fixed order brightness, contrast, saturation, hue."""
        if self.flip:
            x = torch.where(u[:, 4] < self.flip, x.flip(-1), x)
        if self.jitter_p and (self.brightness or self.contrast or self.saturation or self.hue):
            x = _where(u[:, 5] < self.jitter_p, self._jittered, x, u)
        if self.grey:
            x = torch.where(u[:, 10] < self.grey, luma(x).expand_as(x), x)
        if self.blur:
            x = _where(u[:, 11] < self.blur, lambda x, u: gaussian_blur(x, 0.1 + 1.9 * u[:, 14, 0, 0, 0]), x, u)
        return x

    def _jittered(self, x, u):
        f = 2 * u - 1  # (B, DRAWS, 1, 1, 1)
        x = (x * (1 + f[:, 6] * self.brightness)).clamp_(0, 1)
        x = torch.lerp(luma(x).mean((-2, -1), keepdim=True), x, 1 + f[:, 7] * self.contrast).clamp_(0, 1)
        x = torch.lerp(luma(x), x, 1 + f[:, 8] * self.saturation).clamp_(0, 1)
        return shift_hue(x, f[:, 9] * self.hue) if self.hue else x


def _where(on, change, x, u):
    """change(x, u) of the samples where on (B, 1, 1, 1), else x; a CPU changes only these, a card would wait."""
    if x.is_cuda or torch.compiler.is_compiling():
        return torch.where(on, change(x, u), x)
    rows = on.flatten().nonzero().flatten()
    return x.index_copy(0, rows, change(x[rows], u[rows])) if len(rows) else x


LEVELS = np.arange(256.0)
# RandAugment's operations in torchvision's order: a function of one plane (a grey Pillow image) and a strength; the
# strength at magnitude 30 (of shears and light a factor, of shifts a part of the side, of rotations degrees; 0: none).
OPERATIONS = {
    "Identity": (lambda p, m: p, 0),
    "ShearX": (lambda p, m: _moved(p, 1, m, 0, 0, 1, 0), 0.3),
    "ShearY": (lambda p, m: _moved(p, 1, 0, 0, m, 1, 0), 0.3),
    "TranslateX": (lambda p, m: _moved(p, 1, 0, -int(m * p.width), 0, 1, 0), 150 / 331),
    "TranslateY": (lambda p, m: _moved(p, 1, 0, 0, 0, 1, -int(m * p.height)), 150 / 331),
    "Rotate": (lambda p, m: p.rotate(m), 30),
    "Brightness": (lambda p, m: _looked_up(p, LEVELS * (1 + m)), 0.9),
    "Sharpness": (lambda p, m: _sharpened(p, 1 + m), 0.9),
    "AutoContrast": (lambda p, m: _stretched(p, *p.getextrema()), 0),
    "Equalize": (lambda p, m: ImageOps.equalize(p), 0)}


def randaugment(image, u, operations, magnitude):
    """Applies `operations` random OPERATIONS to (..., 3, H, W) uint8, each with probability 1/2, by the sample's draws
    u (DRAWS,); magnitude: out of 30. Choices, signs and strengths are those of torchvision's v2.RandAugment, which is
    several times slower, and the images equal its within one grey level, but for single pixels that move."""
    random = torch.Generator().manual_seed(int(u[12] * 2**24) * 2**24 + int(u[13] * 2**24))
    planes = [Image.fromarray(plane) for plane in image.flatten(0, -3).numpy()]  # ... * 3 of (H, W)
    for _ in range(operations):
        if torch.rand((), generator=random) >= 0.5:
            continue
        change, most = [*OPERATIONS.values()][torch.randint(len(OPERATIONS), (), generator=random)]
        strength = most * magnitude / 30
        if most and torch.rand((), generator=random) <= 0.5:
            strength = -strength
        planes = [change(plane, strength) for plane in planes]
    return torch.from_numpy(np.stack(planes)).view(image.shape)


def _moved(plane, *matrix):
    """At each (x, y) the plane's pixel nearest to (a x + b y + c, d x + e y + f); black outside the plane."""
    return plane.transform(plane.size, Image.Transform.AFFINE, matrix)


def _looked_up(plane, levels):
    """The plane with new grey levels (256,), rounded down."""
    return plane.point(levels.clip(0, 255).astype(int).tolist())


def _stretched(plane, low, high):
    """The plane with its grey levels low..high stretched to 0..255 (Pillow's autocontrast rounds otherwise)."""
    return _looked_up(plane, (LEVELS - low) * 255 / (high - low)) if high > low else plane


def _sharpened(plane, ratio):
    """The plane moved away from (ratio > 1) or towards the mean of 3 x 3 pixels, in which the centre counts 5 times;
    the border stays. Pillow's own takes three times as long."""
    x, out = np.asarray(plane, np.int16), np.array(plane)  # (H, W)
    rows = x[:, :-2] + x[:, 1:-1] + x[:, 2:]  # (H, W - 2)
    x = x[1:-1, 1:-1]  # (H - 2, W - 2)
    mean = (rows[:-2] + rows[1:-1] + rows[2:] + 4 * x + 6) // 13  # rounded: a thirteenth is never half way
    out[1:-1, 1:-1] = (mean + np.float32(ratio) * (x - mean)).clip(0, 255)
    return Image.fromarray(out)


def luma(x):
    """Brightness of RGB images by ITU-R 601, as torchvision, (..., 3, H, W) -> (..., 1, H, W)."""
    r, g, b = x.unbind(-3)
    return (0.2989 * r + 0.587 * g + 0.114 * b).unsqueeze(-3)


def shift_hue(x, shift):
    """Hue rotated by `shift` turns ((B, 1, 1, 1), -0.5..0.5): (B, 3, S, S) in 0..1. Closed form of HSV -> RGB."""
    r, g, b = x.unbind(-3)  # (B, S, S)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    c = chroma.clamp(min=1e-8)
    sextant = torch.where(r == high, (g - b) / c, torch.where(g == high, 2 + (b - r) / c, 4 + (r - g) / c))
    sextant = sextant + 6 * shift.squeeze(-3)
    def channel(n):
        k = sextant + n
        k = k - 6 * torch.floor(k / 6)  # 0..6
        return high - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)
    return torch.stack([channel(5), channel(3), channel(1)], -3)


def gaussian_blur(x, sigma):
    """Gaussian blur, one sigma (B,) in pixels per sample, borders reflected, radius S/20 as SimCLR: (B, 3, S, S)."""
    B, C, S, _ = x.shape
    radius = max(1, S // 20)
    t = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (t / sigma[:, None]) ** 2)  # (B, 2r+1)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(C, 0)
    y = F.pad(x.reshape(1, B * C, S, S), (radius,) * 4, mode="reflect")
    y = F.conv2d(y, kernel[:, None, :, None], groups=B * C)
    return F.conv2d(y, kernel[:, None, None, :], groups=B * C).reshape(B, C, S, S)


def crop_batch(augment, images, u):
    """(B, [T,] 3, H, W) uint8 -> (B, [T,] 3, size, size) float in 0..1; the boxes of Augment.crop_one for draws u,
    resized antialiased bilinear as torchvision: two small matrix products."""
    boxes = to_device(torch.from_numpy(augment.boxes(*images.shape[-2:], u)), images.device)  # (B, 4)
    x = images.reshape(-1, *images.shape[-3:])  # (B * T, 3, H, W)
    boxes = boxes.repeat_interleave(len(x) // len(images), 0)  # (B * T, 4): one box for all frames of a clip
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    M, C, H, W = x.shape
    rows = _resize_weights(boxes[:, 0], boxes[:, 2], augment.size, H)  # (M, size, H)
    cols = _resize_weights(boxes[:, 1], boxes[:, 3], augment.size, W)  # (M, size, W)
    x = torch.bmm(x.reshape(M, C * H, W), cols.transpose(1, 2))  # (M, C * H, size), one product for each image
    out = (rows[:, None] @ x.view(M, C, H, augment.size)).clamp_(0, 1)  # (M, 3, size, size)
    out = out.unflatten(0, images.shape[:-3])  # (B, [T,] 3, size, size)
    if augment.randaugment[0]:  # by Pillow: a card waits; no recipe has it for sets in memory
        pairs = zip((out * 255).round().byte().cpu(), u)
        views = [randaugment(x, row, *augment.randaugment) for x, row in pairs]
        out = torch.stack(views).to(images.device) / 255
    return out


def _resize_weights(start, length, size, side):
    """(B, size, side): weight of each input pixel in each output pixel; triangle filter as wide as the shrinking."""
    start, length = start[:, None, None].float(), length[:, None, None].float()
    scale = length / size
    centre = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale  # (B, size, 1)
    pixel = torch.arange(side, device=start.device) + 0.5  # (side,)
    inside = (pixel > start) & (pixel < start + length)
    weight = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0) * inside
    return weight / weight.sum(-1, keepdim=True)
