"""Decodes images: upright, alpha over white. A damaged image is an error and never yields grey pixels."""

import io
import os
import re
import stat
import warnings
import zlib
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

from contrastive.engine.base import first_line

MAX_PIXELS = 178_956_970  # of one image: Pillow's limit against decompression bombs


def read_file(path):
    """Bytes of a regular file. Raises: OSError if there is none; ValueError for a pipe or a device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a regular file")
    return Path(path).read_bytes()


def decode(source, max_pixels=MAX_PIXELS):
    """Path or bytes of an image -> (3, H, W) uint8 RGB, alpha over white. An animation gives its first frame.

    JPEGs go through torchvision, which is fast. Its other decoders may crash the process on a damaged file.
    Raises: ValueError or OSError with the reason."""
    data = source if isinstance(source, (bytes, bytearray)) else read_file(source)
    if not data:
        raise ValueError("empty file")
    header = _open_picture(data, max_pixels)
    if header.format == "PNG":
        _check_png(data)
    if data[:2] == b"\xff\xd8":
        image = _decode_jpeg(data, header)
    elif header.format == "PNG" and data[24] == 16:  # bits per channel
        image = decode_deep_png(data)
    else:
        image = _decode_picture(header)
    if len(image) == 4:  # alpha over white, in integers: a float round() starts threads, which costs 7 ms on busy cores
        rgb, alpha = image[:3].int(), image[3:].int()
        image = ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)
    return image


def _open_picture(data, max_pixels):
    """Pillow's image of some bytes: the header is read, no pixel is decoded. Raises: ValueError."""
    Image.MAX_IMAGE_PIXELS = max_pixels / 2  # Pillow warns above this and refuses twice as many, in inner frames too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data))
    except MemoryError:  # not the image's fault
        raise
    except Image.DecompressionBombError as error:
        size = re.search("[0-9]+ pixels", str(error))
        raise ValueError(f"{size[0] if size else 'many pixels'}, more than the limit of {max_pixels:,} "
                         "(--max-pixels)") from error
    except Exception as error:
        raise ValueError(f"not a readable image ({type(error).__name__})") from error


def _check_png(data):
    """Raises ValueError unless all chunks of a PNG are there with a right checksum, which Pillow does not check."""
    position, kind = 8, b""
    while kind != b"IEND":
        length, kind = int.from_bytes(data[position:position + 4], "big"), data[position + 4:position + 8]
        end = position + 12 + length
        if end > len(data):
            raise ValueError("truncated png")
        if zlib.crc32(data[position + 4:end - 4]) != int.from_bytes(data[end - 4:end], "big"):
            raise ValueError("damaged png: a checksum is wrong")
        position = end


def _decode_jpeg(data, header):
    """(3, H, W) uint8; header: Pillow's image of the same bytes. Raises: ValueError."""
    from torchvision.io import ImageReadMode, decode_jpeg
    # no end marker after the last scan; most files end with it, and searching all bytes takes time
    if not data.endswith(b"\xff\xd9") and data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
        raise ValueError("truncated jpeg")  # the decoder would silently fill the rest with grey
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        return decode_jpeg(buffer, ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:  # an odd colour space
        return _decode_picture(header)


def _decode_picture(image):
    """Pillow's image -> (3 or 4, H, W) uint8, upright. Raises: ValueError."""
    from PIL import ImageOps
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if image.mode[0] in "IF":  # a plain conversion would turn all values above 255 white
                image = decode_deep_grey(image)
            transparent = "A" in image.getbands() or "transparency" in image.info
            image = ImageOps.exif_transpose(image.convert("RGBA" if transparent else "RGB"))
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)
    except MemoryError:  # not the image's fault
        raise
    except Exception as error:
        reason = first_line(error) if isinstance(error, OSError) else type(error).__name__
        raise ValueError(f"not a readable image ({reason})") from error


def decode_deep_png(data):
    """Bytes of a PNG with 16 bits per channel -> (4, H, W) uint8, rounded. Raises: ValueError."""
    try:
        with av.open(io.BytesIO(data), format="png_pipe") as container:
            frame = next(container.decode(video=0))
        array = frame.to_ndarray(format="rgba64le")  # (H, W, 4) uint16
    except (av.FFmpegError, StopIteration, ValueError) as error:
        raise ValueError(f"not a readable image ({first_line(error)})") from error
    return torch.from_numpy((array.astype(np.float32) / 257).round().astype(np.uint8)).permute(2, 0, 1)


def decode_deep_grey(image):
    """Pillow's 16-bit grey image (TIFF, PGM) -> the same with 8 bits. Raises: OSError for 32 bits or floats."""
    if image.mode in ("I", "F") and image.format != "PPM":
        raise OSError("32-bit pixels, whose range is not known; save it with 8 or 16 bits")
    return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
