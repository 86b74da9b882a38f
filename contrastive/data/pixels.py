"""Image files as pixels.

A damaged image is an error, not grey pixels. One damage is not seen: a JPEG that lacks pixels but
has an end marker, for which libjpeg only prints a warning."""

import functools
import io
import os
import re
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

Image.MAX_IMAGE_PIXELS = 89_478_485  # Pillow warns above this number and refuses twice as many
warnings.filterwarnings("ignore", module="PIL")
Image.init()  # registers all formats, by whose names Image.open is told which to read

IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif", "jp2", "ppm",
               "pgm")
VIDEO_TYPES = ("mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts", "m2ts", "wmv", "flv",
               "ogv", "3gp")
# what Pillow may open: of its other formats, EPS starts a program
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM")
OPEN_TARS = 32  # twice as many as are mixed (batches.SHARDS_AT_ONCE): these, and the next ones

JPEG_START = b"\xff\xd8"
JPEG_END = b"\xff\xd9"
# the next marker; inside a scan stand only stuffed zeros and restarts (D0 to D7)
JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")


def media_kind(path):
    """image or video by the ending of a file's name; None of any other file."""
    ending = os.path.splitext(path)[1][1:].lower()
    if ending in VIDEO_TYPES:
        return "video"
    if ending in IMAGE_TYPES:
        return "image"
    return None


def decode(source):
    """Reads an image: upright, transparency over white, the first frame of an animation.

    Args:
        source: path or bytes.
    Returns: (3, H, W) uint8 RGB.
    Raises: whatever a decoder raises for what is no whole image, and ValueError for more than 8
        bits of grey.
    """
    content = source
    if not isinstance(source, (bytes, bytearray)):
        content = Path(source).read_bytes()
    # reads the header; no pixel is decoded yet
    image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
    if content[:2] == JPEG_START:
        check_jpeg_is_whole(content)
        if image.mode != "CMYK":
            return decode_jpeg(content)
    return pixels_of(image)


def pixels_of(image):
    """A PIL image as (3, H, W) uint8 RGB: upright, transparency over white. Raises: ValueError for
    more than 8 bits of grey."""
    if image.mode.startswith(("I", "F")):
        raise ValueError("more than 8 bits of grey, of which Pillow makes white")
    is_transparent = "A" in image.getbands() or "transparency" in image.info
    if not is_transparent:
        pixels = np.array(ImageOps.exif_transpose(image.convert("RGB")))            # (H, W, 3)
    else:
        image = ImageOps.exif_transpose(image.convert("RGBA"))
        pixels = over_white(np.asarray(image))                                      # (H, W, 3)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def check_jpeg_is_whole(content):
    """Raises ValueError if the first image has no end: the decoder would fill the rest with grey.
    What follows this end, such as the video of a motion photo, is not looked at."""
    if content.endswith(JPEG_END):  # most files; walking from marker to marker takes time
        return
    position = len(JPEG_START)
    marker = JPEG_MARKER.search(content, position)
    while marker and marker[0] != JPEG_END:
        size_of_segment = int.from_bytes(content[marker.end():marker.end() + 2], "big")
        marker = JPEG_MARKER.search(content, marker.end() + size_of_segment)
    if marker is None:
        raise ValueError("truncated jpeg")


def decode_jpeg(content):
    """Bytes of a JPEG -> (3, H, W) uint8, upright. torchvision is faster than Pillow; its decoders
    of other formats may crash on a damaged file."""
    from torchvision import io as torchvision_io

    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return torchvision_io.decode_jpeg(
        buffer, torchvision_io.ImageReadMode.RGB, apply_exif_orientation=True)


def over_white(pixels):
    """(..., 4) uint8 with transparency -> (..., 3) uint8 on white, rounded, in integers."""
    rgb = pixels[..., :3].astype(np.int32)
    alpha = pixels[..., 3:].astype(np.int32)
    return ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


@functools.lru_cache(maxsize=OPEN_TARS)
def open_tar(path):
    """A tar that stays open until it leaves the cache, since a network disk takes milliseconds."""
    return open(path, "rb", buffering=0)


def read_part(path, offset, size):
    """`size` bytes of a tar from `offset` on. pread needs no file position, which forked workers
    would share."""
    return os.pread(open_tar(path).fileno(), size, offset)
