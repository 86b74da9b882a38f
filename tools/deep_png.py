"""Images of 16 bits a colour, which Pillow would cut: PNGs, and grey ones of other formats; opened by common.decode."""

import io

import common

import av
import numpy as np
import torch
from PIL import Image


def decode_deep_png(data):
    """Bytes of such a PNG -> (4, H, W) uint8, rounded. Raises: ValueError."""
    try:
        with av.open(io.BytesIO(data), format="png_pipe") as container:
            frame = next(container.decode(video=0))
        array = frame.to_ndarray(format="rgba64le")  # (H, W, 4) uint16
    except (av.FFmpegError, StopIteration, ValueError) as error:
        raise ValueError(f"not a readable image ({common.first_line(error)})") from error
    return torch.from_numpy((array.astype(np.float32) / 257).round().astype(np.uint8)).permute(2, 0, 1)


def decode_deep_grey(image):
    """Pillow's image of one grey of 16 bits (TIFF, PGM) -> with 8 bits. Raises: OSError for 32 bits or floats."""
    if image.mode in ("I", "F") and image.format != "PPM":
        raise OSError("pixels of 32 bits, whose range is not known; save it with 8 or 16")
    return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
