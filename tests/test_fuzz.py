"""Damaged files: each is read or refused with a reason; none ends the process, hangs it, or fills its memory.

The work is done in a process of its own, since a decoder that fails would take pytest with it."""

import collections
import json
import os
import resource
import tempfile
import time
import zlib
from pathlib import Path

import common
from contrastive import engine, readers

import numpy as np
import pytest
import torch
from PIL import Image

import launch
from helpers import encode, picture, write_video

LIMIT = 5 * 2**30  # bytes of address space that a process may take beside what it has


def damaged(whole, how, rng):
    """A copy with other bytes here and there (0), cut (1), zeroed in one place (2), or with noise for its end (3)."""
    data = bytearray(whole)
    if how == 0:
        for i in rng.integers(0, len(data), rng.integers(1, 12)):
            data[i] = rng.integers(0, 256)
    elif how == 1:
        data = data[:rng.integers(0, len(data))]
    elif how == 2:
        i, n = rng.integers(0, len(data)), rng.integers(1, 40)
        data[i:i + n] = bytes(len(data[i:i + n]))
    else:
        data = data[:rng.integers(8, len(data))] + rng.integers(0, 256, 200, dtype=np.uint8).tobytes()
    return bytes(data)


def damaged_png(whole, rng):
    """A PNG with other bytes inside one chunk, whose checksums are right."""
    chunks, position = [], 8
    while position < len(whole):
        length = int.from_bytes(whole[position:position + 4], "big")
        chunks.append((whole[position + 4:position + 8], bytearray(whole[position + 8:position + 8 + length])))
        position += 12 + length
    _, content = chunks[rng.integers(0, len(chunks) - 1)]
    for i in rng.integers(0, len(content), rng.integers(1, 6)):
        content[i] = rng.integers(0, 256)
    out = whole[:8]
    for name, content in chunks:
        out += len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")
    return out


def images(rng):
    """(kind, bytes) of damaged images, 2,000 in all."""
    noise = Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8))
    smooth = Image.fromarray(picture(5, 60, 70))
    pictures = [noise, smooth, smooth.quantize(16), smooth.convert("L")]
    for k in range(1600):
        kind = ("png", "jpeg", "gif", "webp", "bmp", "tiff", "jpeg progressive", "tiff deflate")[k % 8]
        options = {"jpeg progressive": {"progressive": True}, "tiff deflate": {"compression": "tiff_deflate"}}
        image = pictures[k // 8 % (2 if kind.startswith(("jpeg", "webp")) else 4)]
        yield kind, damaged(encode(image, kind.split()[0], **options.get(kind, {})), k // 32 % 4, rng)
    for k in range(400):
        yield "png of right checksums", damaged_png(encode(pictures[k % 4]), rng)


def videos(rng):
    """(kind, bytes) of damaged clips, 300 in all."""
    with tempfile.TemporaryDirectory() as folder:
        for codec, name in (("libx264", "a.mp4"), ("mpeg4", "b.mp4"), ("libvpx-vp9", "c.webm")):
            whole = write_video(Path(folder) / name, range(8), codec).read_bytes()
            for k in range(100):
                data = damaged(whole, k % 4, rng)
                if k % 5 == 0:  # the frames alone
                    at = whole.find(b"mdat") + 4
                    data = whole[:at] + damaged(whole[at:], 0, rng) if at > 4 and at < len(whole) // 2 else data
                yield f"{codec} {name}", data


def read_all(what, file):
    """Reads every one; writes how it went, {"counts": [[kind, "read" or "refused", count]], "slowest": seconds}."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + LIMIT, now + LIMIT))
    rng, counts, slowest = np.random.default_rng(int(os.environ.get("FUZZ_SEED", 7))), collections.Counter(), 0.0
    for kind, data in {"images": images, "videos": videos}[what](rng):
        began = time.process_time()
        try:
            if what == "images":
                x = readers.pictures.decode(data)
                assert x.dtype == torch.uint8 and x.ndim == 3 and len(x) == 3 and x.numel()
            else:
                x = common.read_frames(data, 4)
                assert x.dtype == np.uint8 and x.shape[0] == 4 and x.shape[3] == 3 and x.size
            counts[kind, "read"] += 1
        except (ValueError, OSError) as error:
            assert str(error), repr(error)
            counts[kind, "refused"] += 1
        slowest = max(slowest, time.process_time() - began)
    found = {"counts": [[*what, count] for what, count in counts.items()], "slowest": slowest}
    file.write_text(json.dumps(found))


@pytest.mark.parametrize("what, count", [("images", 2000), ("videos", 300)])
def test_damaged_files_are_read_or_refused(what, count, tmp_path):
    process = launch.forked(lambda: read_all(what, tmp_path / "found.json"), tmp_path / "stderr")
    assert launch.ended(process, 900) == 0, (tmp_path / "stderr").read_text()[-2000:]
    found = engine.base.read_json(tmp_path / "found.json")
    counts = {(kind, how): n for kind, how, n in found["counts"]}
    assert sum(counts.values()) == count
    assert found["slowest"] < 10  # seconds of the processor for one file
    kinds = {kind for kind, _ in counts}
    assert all(counts.get((kind, "refused")) for kind in kinds), counts
    assert what == "videos" or all(counts.get((kind, "read")) for kind in kinds - {"png"}), counts  # few bytes differ
    said = (tmp_path / "stderr").read_text()
    assert what == "images" or not said, said[:500]  # libjpeg and libtiff do write to stderr
