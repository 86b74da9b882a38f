"""Small data sets in the true formats, written by the tests themselves. Sample i is always picture(i) and caption(i)."""

import csv
import io
import json
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["apple", "pear_tree", "zebra"]  # sample i has class i % 3


def picture(i, height=20, width=24):
    """(H, W, 3) uint8, smooth, another colour for every i < 125."""
    y, x = np.mgrid[0:height, 0:width]
    base = np.array([i % 5, i // 5 % 5, i // 25]) * 45 + 10
    return (base + np.stack([y, x, (x + y) // 2], -1)).astype(np.uint8)


def caption(i, k=0):
    return f"picture number {i}, take {k}"


def encode(array, kind="png", **options):
    """Bytes of an image file; kind as PIL names it, array also a PIL image."""
    image, out = array if isinstance(array, Image.Image) else Image.fromarray(array), io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png16(array):
    """Bytes of a 16-bit png: (H, W, channels) of 0..65535; PIL cannot write the coloured ones."""
    h, w, c = array.shape
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    head = struct.pack(">IIBBBBB", w, h, 16, {1: 0, 3: 2, 4: 6}[c], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_images(folder, numbers, kind="png", **size):
    """folder/003.png and so on; returns the file names."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for i in numbers:
        (Path(folder) / f"{i:03}.{kind}").write_bytes(encode(picture(i, **size), {"jpg": "jpeg"}.get(kind, kind)))
    return [f"{i:03}.{kind}" for i in numbers]


def write_rows(path, header, rows):
    """csv, tsv, jsonl, json or parquet by the ending of the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [dict(zip(header, r)) for r in rows]
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf8") as f:
            csv.writer(f, delimiter="," if path.suffix == ".csv" else "\t").writerows([header, *rows])
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf8")
    else:
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_captions(folder, n, name="captions.csv", **size):
    """The plainest data set of all: images and a file of `image, caption`."""
    names = write_images(folder, range(n), **size)
    return write_rows(Path(folder) / name, ["image", "caption"], [(x, caption(i)) for i, x in enumerate(names)])


def write_tar(path, samples):
    """samples: {key: {extension: bytes}}, written in order as webdataset does."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, parts in samples.items():
            for extension, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return Path(path)


def tar_samples(numbers, *extensions):
    """jpg, png, txt (two captions, one a line), cls and json parts of these samples."""
    make = {"jpg": lambda i: encode(picture(i), "jpeg", quality=95), "png": lambda i: encode(picture(i)),
            "txt": lambda i: f"{caption(i)}\n{caption(i, 1)}\n".encode(), "cls": lambda i: str(i % 3).encode(),
            "json": lambda i: json.dumps({"title": caption(i), "width": 24}).encode()}
    return {f"{i:06}": {e: make[e](i) for e in extensions} for i in numbers}


def write_parquet_images(path, numbers):
    """A parquet file as `datasets` writes it: image {bytes, path}, caption, label with class names."""
    import datasets
    features = datasets.Features(image=datasets.Image(), caption=datasets.Value("string"), label=datasets.ClassLabel(names=CLASSES))
    rows = {"image": [{"bytes": encode(picture(i)), "path": f"{i:03}.png"} for i in numbers],
            "caption": [caption(i) for i in numbers], "label": [i % 3 for i in numbers]}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path))
    return Path(path)


TRUNCATED = encode(picture(7, 64, 64), "jpeg")[:700]
TEXT = b"this is no picture\n"
