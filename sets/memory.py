"""Sets whose pixels lie in memory, one uint8 tensor: cropped in batch, on the device; opened by common.Data."""

from common import uniforms

import numpy as np
import torch


def raw_batches(data, batches, mine):
    """As common.Data.raw_batches. mine: (epoch, this process's share of a global batch) in turn."""
    pixels = data.pixels.to(batches.device)  # (M, [T,] 3, H, W) uint8
    for epoch, index in mine:
        x = pixels[torch.from_numpy(index).to(batches.device)]  # (B, [T,] 3, H, W)
        views = [crop_batch(a, x, uniforms(batches.seed, epoch, index, a.DRAWS, stream=v + 1))
                 for v, a in enumerate(batches.augments)]
        captions = [data.training_captions(i, batches.seed, epoch, i) for i in index]
        yield {"views": views, "captions": captions, "index": index, "rows": index,
               "bad": [], "keys": [data.key(i) for i in index], "epochs": np.full(len(index), epoch), "positions": {}}


def crop_batch(augment, images, u):
    """(B, [T,] 3, H, W) uint8 -> (B, [T,] 3, size, size) float in 0..1; the boxes of Augment.crop_one for draws u."""
    boxes = torch.from_numpy(augment.boxes(*images.shape[-2:], u)).to(images.device)  # (B, 4)
    frames = images.reshape(-1, *images.shape[-3:])  # (B * T, 3, H, W)
    boxes = boxes.repeat_interleave(len(frames) // len(images), 0)  # (B * T, 4): one box for all frames of a clip
    out = resize_boxes(frames, boxes, augment.size).unflatten(0, images.shape[:-3])  # (B, [T,] 3, size, size)
    if augment.randaugment[0]:
        views = [augment.randaugmented((x * 255).round().byte().cpu(), row) for x, row in zip(out, u)]
        out = torch.stack(views).to(images.device) / 255
    return out


def resize_boxes(images, boxes, size):
    """Crop and resize each image by its own box, antialiased bilinear as torchvision: two small matrix products.

    images (B, 3, H, W) uint8 or float; boxes (B, 4) top, left, height, width -> (B, 3, size, size) float, in 0..1.
    """
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    rows = _resize_weights(boxes[:, 0], boxes[:, 2], size, x.shape[-2])  # (B, size, H)
    cols = _resize_weights(boxes[:, 1], boxes[:, 3], size, x.shape[-1])  # (B, size, W)
    B, C, H, W = x.shape
    x = torch.bmm(x.reshape(B, C * H, W), cols.transpose(1, 2))  # (B, C * H, size), one product for each image
    return (rows[:, None] @ x.view(B, C, H, size)).clamp_(0, 1)


def _resize_weights(start, length, size, side):
    """(B, size, side): weight of each input pixel in each output pixel; triangle filter as wide as the shrinking."""
    start, length = start[:, None, None].float(), length[:, None, None].float()
    scale = length / size
    centre = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale  # (B, size, 1)
    pixel = torch.arange(side, device=start.device) + 0.5  # (side,)
    inside = (pixel > start) & (pixel < start + length)
    weight = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0) * inside
    return weight / weight.sum(-1, keepdim=True)
