"""One split as a table (Data), and decoding of images."""

import dataclasses
import struct
import tracemalloc
import zlib

import common
from contrastive.data import table as data_table
from contrastive.data.table import decode

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import CLASSES, TEXT, TRUNCATED, caption, encode, picture, write_captions


@pytest.fixture(scope="module")
def ten():
    """Ten samples in memory with 1, 2, 3, 1, ... captions, classes, groups of two, shards of three, and a remark."""
    captions = [[caption(i, k) for k in range(i % 3 + 1)] for i in range(10)]
    table = common.make_table(captions, [f"s{i}" for i in range(10)], classes={"label": CLASSES},
                              label=np.arange(10) % 3, group=np.arange(10) // 2, remark=[f"no {i}" for i in range(10)])
    pixels = torch.stack([torch.from_numpy(picture(i)).permute(2, 0, 1) for i in range(10)])
    return common.Data("ten", "train", table, pixels=pixels, shards=np.arange(10) // 3)


def test_columns_of_data(ten):
    assert ten.labels.tolist() == [i % 3 for i in range(10)] and ten.label_names == ten.names("label") == CLASSES
    assert ten.groups.tolist() == [i // 2 for i in range(10)]
    assert ten.column("remark")[7] == "no 7" and ten.column("nothing") is None and ten.names("remark") is None
    assert set(ten[4]) == {"pixels", "captions", "key", "label", "remark"} and ten[4]["label"] == 1
    assert list(ten.first_captions(2)) == [caption(0), caption(1), caption(1, 1)]
    bare = common.Data("plain", "test", common.make_table([["a"], ["b"]], ["x", "y"]))
    assert bare.labels is None and bare.label_names is None and bare.groups.tolist() == [0, 1]


def test_select_takes_rows_in_any_order_and_again(ten):
    rows = [7, 2, 2, 9]
    part = ten.select(rows, "val")
    assert (part.split, ten.split, len(part), len(ten)) == ("val", "train", 4, 10)
    for k, i in enumerate(rows):
        assert (part.key(k), part.captions(k)) == (f"s{i}", ten.captions(i)) and torch.equal(part.read(k), ten.read(i))
    assert part.labels.tolist() == [1, 2, 2, 0] and part.groups.tolist() == [3, 1, 1, 4]
    assert part.shards.tolist() == [2, 0, 0, 3] and part.column("remark") == ["no 7", "no 2", "no 2", "no 9"]
    again = part.select(np.array([3, 0]))
    assert [again.key(k) for k in range(2)] == ["s9", "s7"] and again.rows.tolist() == [9, 7]
    bare = dataclasses.replace(ten, table=ten.table.remove_columns("group"))
    assert bare.select(rows).groups.tolist() == rows  # a row taken twice is a positive of itself
    assert len(ten.select([])) == 0 and ten.select([]).pixels.shape == (0, 3, 20, 24)


def test_unfold_has_a_row_for_each_caption(ten):
    each = ten.unfold()
    pairs = [(i, c) for i in range(10) for c in ten.captions(i)]
    owner = [i for i, _ in pairs]
    assert [(each.key(k), each.captions(k)) for k in range(len(each))] == [(f"s{i}", [c]) for i, c in pairs]
    for name in ("labels", "groups", "shards"):
        assert getattr(each, name).tolist() == getattr(ten, name)[owner].tolist(), name
    assert torch.equal(each.pixels, ten.pixels[owner]) and list(each.first_captions()) == [c for _, c in pairs]
    assert each.select([2, 1]).captions(0) == [pairs[2][1]]
    assert each.folded().column("key") == ten.column("key") and each.folded().captions(2) == ten.captions(2)


def test_small_images_of_one_size_go_into_memory(tmp_path):
    data = common.load_data(str(write_captions(tmp_path / "a", 8)), "train")
    inside = data.in_memory()
    assert data.pixels is None and inside.pixels.shape == (7, 3, 20, 24) and inside.pixels.dtype == torch.uint8
    assert all(torch.equal(inside.read(i), data.read(i)) for i in range(7))
    assert data.in_memory(limit=23).pixels is None  # a larger side than that
    for other in (TEXT, encode(picture(5, 30, 10))):  # unreadable: counted as a bad sample when its turn comes
        (tmp_path / "a" / data.key(5)).write_bytes(other)
        assert data.in_memory().pixels is None


@pytest.mark.parametrize("rows_in_lists", [10**6, 0])  # small tables are kept as lists, larger ones asked row by row
def test_a_caption_reads_no_image(rows_in_lists, monkeypatch):
    monkeypatch.setattr(data_table, "IN_MEMORY", rows_in_lists)
    captions, huge = [[caption(i), caption(i, 1)] for i in range(4)], [{"bytes": bytes(2**24)} for _ in range(4)]
    data = common.Data("x", "train", common.make_table(captions, list("abcd"), huge, {"label": CLASSES}, label=[0] * 4))
    tracemalloc.start()
    for part in (data, data.select([3, 1]), data.unfold()):
        words = [(part.key(i), tuple(part.captions(i))) for i in range(len(part))]
        assert len(set(words)) == len(part) == len(part.labels) and [*part.first_captions()]
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()
    assert [data.captions(i) for i in range(4)] == captions and data.unfold().captions(3) == [captions[1][1]]


# ---------------------------------------------------- decoding -------------------------------------------------------
def palette():
    """Clear red and solid blue in turn."""
    image = Image.new("P", (4, 4))
    image.putpalette([255, 0, 0, 0, 0, 255] + [0] * 762)
    image.putdata([0, 1] * 8)
    return encode(image, transparency=bytes([0, 255]))


def png16(array):
    """Bytes of a 16-bit png: (H, W, channels) of 0..65535; PIL cannot write the coloured ones."""
    h, w, c = array.shape
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    head = struct.pack(">IIBBBBB", w, h, 16, {1: 0, 3: 2, 4: 6}[c], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
WIDE = np.linspace(0, 65535, 64).reshape(8, 8, 1).repeat(4, 2).round().astype(np.uint16)  # of 16 bits
WIDE[..., 3] = 65535
PLAIN, BLACK = Image.new("RGB", (12, 8), (200, 40, 90)), Image.new("RGB", (12, 8))
NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
# name: (bytes, what is decoded, or its one colour, and how far off it may be)
DECODED = {
    "grey": (encode(GREY), np.stack([GREY] * 3), 0),
    "palette": (palette(), np.array([[255, 0] * 2, [255, 0] * 2, [255] * 4])[:, None].repeat(4, 1), 0),
    "alpha": (encode(Image.new("RGBA", (4, 4), (255, 0, 0, 128))), [255, 127, 127], 0),
    "grey and alpha": (encode(Image.new("LA", (4, 4), (0, 128))), [127, 127, 127], 0),
    "cmyk jpeg": (encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "jpeg", quality=95), [255, 0, 0], 3),
    "16 bits": (png16(WIDE[..., :3]), np.stack([WIDE[..., 0] / 257] * 3), 1),
    "16 bits and alpha": (png16(WIDE), np.stack([WIDE[..., 0] / 257] * 3), 1),
    "gif of two frames": (encode(PLAIN, "gif", save_all=True, append_images=[BLACK]), [200, 40, 90], 0),
    "webp": (encode(PLAIN, "webp", lossless=True), [200, 40, 90], 0),
    "tiff": (encode(PLAIN, "tiff"), [200, 40, 90], 0)}


@pytest.mark.parametrize("name", DECODED)
def test_decode(name):
    content, expected, tolerance = DECODED[name]
    expected = np.array(expected).reshape(3, *np.shape(expected)[1:] or (1, 1))
    out = decode(content)
    assert out.dtype == torch.uint8 and np.abs(out.numpy().astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("kind, mode", [("jpeg", "RGB"), ("jpeg", "L"), ("jpeg", "CMYK"), ("png", "RGB")])
def test_decode_turns_pictures_as_exif_says(kind, mode):
    exif, upright = Image.Exif(), np.zeros((32, 16), np.uint8)
    upright[:16] = 255                                           # white above, black below
    exif[0x112] = 6                                              # "turn right to see it upright"
    out = decode(encode(Image.fromarray(np.rot90(upright).copy()).convert(mode), kind, exif=exif))
    assert out.shape == (3, 32, 16) and np.abs(out.numpy().astype(int) - upright).mean() < 4


def test_decode_refuses_what_is_broken_or_has_wide_grey(tmp_path):
    """Of grey with more than 8 bits Pillow would make everything above 255 white."""
    whole = encode(NOISE, "jpeg")
    assert len(encode(picture(7, 64, 64), "jpeg")) > len(TRUNCATED)
    for data in (TRUNCATED, whole[:len(whole) // 2], whole[:-2], whole[:30], encode(NOISE)[:5000], TEXT, b"",
                 tmp_path / "none.png"):
        with pytest.raises((ValueError, OSError)):
            decode(data)
    wide = [Image.fromarray(WIDE[..., 0].astype(kind)) for kind in (np.uint16, np.int32, np.float32)]
    for data in (png16(WIDE[..., :1]), encode(wide[0], "ppm"), *(encode(x, "tiff") for x in wide)):
        with pytest.raises(ValueError, match="more than 8 bits of grey"):
            decode(data)
