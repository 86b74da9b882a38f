"""Data: the container, every layout, the emoji set, the index of tars, batches, bad samples, streams, views, texts."""

import dataclasses
import importlib
import itertools
import json
import re
import tracemalloc
from collections import Counter, defaultdict
from pathlib import Path

import common
from contrastive import data as data_sets
from contrastive.data import batches as data_batches
from contrastive.data import emoji as emoji_set
from contrastive.data import stream as data_stream
from contrastive.data import table as data_table
from contrastive.data.batches import SHARDS_AT_ONCE, epoch_batches, epoch_order
from contrastive.data.table import EmptySplit, decode
from contrastive.data.views import OPERATIONS, crop_batch, gaussian_blur, randaugment, shift_hue
from contrastive.encoders.texts import Paraphrases
from contrastive.engine.processes import UserError

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

import launch
import temo
import temperature_schedules
from helpers import (
    CLASSES,
    TEXT,
    TRUNCATED,
    caption,
    counted,
    encode,
    held_out,
    open_splits,
    picture,
    png16,
    refused,
    tar_samples,
    write_captions,
    write_images,
    write_parquet_images,
    write_rows,
    write_tar,
    write_video,
)
from tools import paraphrase

SPLITS = ("train", "val", "test")
HALVES = {"train": range(0, 8), "val": range(8, 10), "test": range(10, 12)}  # where a layout names its splits
N = 35  # samples where it does not: enough that one of each layout's names falls into val and one into test


# ---------------------------------------------------- the container --------------------------------------------------
def pixels_of(*numbers):
    """(M, 3, 20, 24) uint8 of these samples."""
    return torch.stack([torch.from_numpy(picture(i)).permute(2, 0, 1) for i in numbers])


@pytest.fixture(scope="module")
def ten():
    """Ten samples in memory with 1, 2, 3, 1, ... captions, classes, groups of two, shards of three, and a remark."""
    captions = [[caption(i, k) for k in range(i % 3 + 1)] for i in range(10)]
    table = common.make_table(captions, [f"s{i}" for i in range(10)], classes={"label": CLASSES},
                              label=np.arange(10) % 3, group=np.arange(10) // 2, remark=[f"no {i}" for i in range(10)])
    return common.Data("ten", "train", table, pixels=pixels_of(*range(10)), shards=np.arange(10) // 3)


def test_columns_of_data(ten):
    assert (len(ten), ten.examples, ten.streamed, ten.clip) == (10, 10, False, None)
    assert ten.labels.tolist() == [i % 3 for i in range(10)] and ten.label_names == ten.names("label") == CLASSES
    assert ten.groups.tolist() == [i // 2 for i in range(10)]
    assert ten.column("remark")[7] == "no 7" and ten.column("nothing") is None and ten.names("remark") is None
    assert set(ten[4]) == {"pixels", "captions", "key", "label", "remark"} and ten[4]["label"] == 1
    assert list(ten.first_captions(2)) == [caption(0), caption(1), caption(1, 1)]
    assert list(ten.first_captions()) == [c for i in range(10) for c in ten.captions(i)]
    plain = common.Data("plain", "test", common.make_table([["a"], ["b"]], ["x", "y"]), pixels=pixels_of(0, 1))
    assert plain.labels is None and plain.label_names is None and plain.groups.tolist() == [0, 1]


def test_select_takes_rows_in_any_order_and_again(ten):
    rows = [7, 2, 2, 9]
    part = ten.select(rows, "val")
    assert (part.split, ten.split, len(part), len(ten)) == ("val", "train", 4, 10)
    for k, i in enumerate(rows):
        assert (part.key(k), part.captions(k)) == (f"s{i}", ten.captions(i)) and torch.equal(part.read(k), ten.read(i))
    assert part.labels.tolist() == [1, 2, 2, 0] and part.groups.tolist() == [3, 1, 1, 4]
    assert part.shards.tolist() == [2, 0, 0, 3] and part.column("remark") == ["no 7", "no 2", "no 2", "no 9"]
    again = part.select(np.array([3, 0]))
    assert [again.key(k) for k in range(2)] == ["s9", "s7"] and again.split == "val"
    assert again.pixels.shape[0] == 2 and again.shards.tolist() == [3, 2]
    bare = dataclasses.replace(ten, table=ten.table.remove_columns("group"))
    assert bare.select(rows).groups.tolist() == rows  # a row taken twice is a positive of itself


def test_unfold_has_a_row_for_each_caption(ten):
    each = ten.unfold()
    pairs = [(i, c) for i in range(10) for c in ten.captions(i)]
    assert [(each.key(k), each.captions(k)) for k in range(len(each))] == [(f"s{i}", [c]) for i, c in pairs]
    owner = [i for i, _ in pairs]
    for name in ("labels", "groups", "shards"):
        assert getattr(each, name).tolist() == getattr(ten, name)[owner].tolist(), name
    assert torch.equal(each.pixels, ten.pixels[owner]) and list(each.first_captions()) == [c for _, c in pairs]
    part = each.select([2, 1])
    assert [part.captions(k) for k in range(2)] == [[pairs[2][1]], [pairs[1][1]]]
    assert list(ten.select([2]).unfold().first_captions()) == ten.captions(2)


def test_small_images_of_one_size_go_into_memory(tmp_path):
    data = common.load_data(str(write_captions(tmp_path / "a", 8)), "train")
    inside = data.in_memory()
    assert data.pixels is None and inside.pixels.shape == (7, 3, 20, 24) and inside.pixels.dtype == torch.uint8
    assert all(torch.equal(inside.read(i), data.read(i)) and inside.key(i) == data.key(i) for i in range(7))
    assert inside.in_memory() is inside and data.in_memory(limit=23).pixels is None  # a larger side than that
    (tmp_path / "a" / data.key(5)).write_bytes(TEXT)
    assert data.in_memory().pixels is None  # counted as a bad sample when its turn comes
    (tmp_path / "a" / data.key(5)).write_bytes(encode(picture(5, 30, 10)))
    assert data.in_memory().pixels is None


@pytest.mark.parametrize("rows_in_lists", [10**6, 0])  # small tables are kept as lists, larger ones asked row by row
def test_a_caption_reads_no_image(rows_in_lists, monkeypatch):
    monkeypatch.setattr(data_table, "IN_MEMORY", rows_in_lists)
    captions, keys = [[caption(i), caption(i, 1)] for i in range(4)], list("abcd")
    huge = [{"bytes": bytes(2**24)} for _ in range(4)]  # 16 MiB each
    nowhere = [{"path": f"/no/such/{i}.png"} for i in range(4)]
    for sources in (huge, nowhere):
        table = common.make_table(captions, keys, sources, {"label": CLASSES}, label=[0, 1, 2, 0])
        data = common.Data("x", "train", table)
        tracemalloc.start()
        for part in (data, data.select([3, 1]), data.unfold()):
            words = [(part.key(i), tuple(part.captions(i))) for i in range(len(part))]
            assert len(set(words)) == len(part) and len(part.labels) == len(part)
            list(part.first_captions())
        assert tracemalloc.get_traced_memory()[1] < 2**21
        tracemalloc.stop()
        with pytest.raises((OSError, ValueError)):
            data.read(0)
    assert [data.captions(i) for i in range(4)] == captions and data.unfold().captions(3) == [caption(1, 1)]


# ---------------------------------------------------- own data -------------------------------------------------------
def paths_file(name):
    def write(folder):
        names = write_images(folder / "pictures", range(N))
        rows = [(f"pictures/{x}", caption(i), CLASSES[i % 3]) for i, x in enumerate(names)]
        return write_rows(folder / name, ["image", "caption", "label"], rows), {}
    return write


def class_folders(folder, word="", numbers=range(N)):
    for i in numbers:
        write_images(folder / word / CLASSES[i % 3], [i])
    return folder, {}


def metadata(name):
    def write(folder, word="", numbers=range(N)):
        rows = [(x, caption(i)) for i, x in zip(numbers, write_images(folder / word, numbers))]
        write_rows(folder / word / name, ["file_name", "text"], rows)
        return folder, {}
    return write


def tars(*extensions):
    def write(folder, word="shard", numbers=range(N)):
        half = len(numbers) // 2
        for k, part in enumerate((numbers[:half], numbers[half:])):
            write_tar(folder / f"{word}-00000{k}.tar", tar_samples(part, *extensions))
        return folder, {}
    return write


def one_tar(folder):
    return write_tar(folder / "all.tar", tar_samples(range(N), "jpg", "txt")), {}


def parquet(folder, word="train", numbers=range(N)):
    write_parquet_images(folder / "data" / f"{word}-00000-of-00001.parquet", numbers)
    return folder, {}


def in_splits(write):
    def write_all(folder):
        for word, numbers in zip(("train", "validation", "test"), HALVES.values()):
            write(folder, word, numbers)
        return folder, {}
    return write_all


def one(i):
    return [caption(i)]


def two(i):
    return [caption(i), caption(i, 1)]


def third(i):
    return i % 3


def word(i):
    return [CLASSES[i % 3].replace("_", " ")]


# name: (writer, captions of sample i, label of sample i or None, splits named by the layout)
LAYOUTS = {
    "csv": (paths_file("a.csv"), one, third, False),
    "jsonl": (paths_file("a.jsonl"), one, third, False),
    "json": (paths_file("a.json"), one, third, False),
    "parquet of paths": (paths_file("a.parquet"), one, third, False),
    "class folders": (class_folders, word, third, False),
    "class folders in splits": (in_splits(class_folders), word, third, True),
    "metadata.csv": (metadata("metadata.csv"), one, None, False),
    "metadata.jsonl": (metadata("metadata.jsonl"), one, None, False),
    "metadata in splits": (in_splits(metadata("metadata.jsonl")), one, None, True),
    "tars jpg txt": (tars("jpg", "txt"), two, None, False),
    "tars jpg cls": (tars("jpg", "cls"), lambda i: [f"class {i % 3}"], third, False),
    "one tar": (one_tar, two, None, False),
    "tars in splits": (in_splits(tars("jpg", "txt")), two, None, True),
    "parquet of images": (parquet, one, third, False),
    "parquet in splits": (in_splits(parquet), one, third, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, tmp_path):
    write, captions, label, named = LAYOUTS[layout]
    path, options = write(tmp_path)
    numbers, keys = {}, {}
    for split, data in open_splits(path, **options).items():
        keys[split] = data.column("key")
        numbers[split] = [int(Path(data.key(k)).stem) for k in range(len(data))]
        assert (data.split, len(set(numbers[split]))) == (split, len(data))
        for k, i in enumerate(numbers[split]):
            example = data[k]
            assert example["captions"] == data.captions(k) == captions(i) and example["key"] == data.key(k)
            assert example.get("label") == (label(i) if label else None)
            assert example["pixels"].dtype == torch.uint8 and example["pixels"].shape == (3, 20, 24)
            off = np.abs(example["pixels"].permute(1, 2, 0).numpy().astype(int) - picture(i)).max()
            assert off <= (0 if "tar" not in layout else 8)  # the tars hold jpegs
        if label and layout != "tars jpg cls":
            assert data.label_names == CLASSES
    assert sorted(sum(numbers.values(), [])) == list(range(12 if named else N))  # nothing lost, nothing in two splits
    if named:
        assert {s: sorted(v) for s, v in numbers.items()} == {s: list(v) for s, v in HALVES.items()}
    else:
        expected = held_out(sorted(sum(keys.values(), [])))
        assert {s: sorted(k) for s, k in keys.items()} == {s: k for s, k in expected.items() if k}


@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_more_or_less_of_train_is_val(fraction, tmp_path, capsys):
    """The bands of one hash: test stays, val holds what a smaller one held, and few rows are said."""
    write_rows(tmp_path / "t.csv", ["image", "caption"], [(f"{i}.png", caption(i)) for i in range(1000)])
    usual, other = (open_splits(tmp_path / "t.csv", **more) for more in ({}, {"val_fraction": fraction}))
    before, after = ({split: {*data.keys()} for split, data in of.items()} for of in (usual, other))
    assert after["test"] == before["test"] and len(set.union(*after.values())) == 1000 == sum(map(len, after.values()))
    assert len(after["val"]) == pytest.approx(1000 * fraction, rel=0.5)
    assert after["val"] < before["val"] or after["val"] > before["val"]
    assert ("fewer than 20 rows, --val-fraction holds out more" in other["val"].note) == (fraction < 0.02)
    beside = ["--eval-datasets", "imagenet"]
    for flags, holds in ((["--dataset", "x.csv"], True), (["--eval-datasets", "x.csv"], True), ([], False),
                         (beside, False), ([*beside, "--hold-out-val"], True)):  # emoji has a val
        asked = [*flags, "--val-fraction", "0.1"]
        capsys.readouterr()
        said = "" if holds else refused(temo.parse_args, asked, capsys)
        assert temo.parse_args(asked).val_fraction == 0.1 if holds else "for own data" in said


@pytest.mark.parametrize("script, flags", [
    (temo, ""), (temo, "--dataset x.csv"), (temo, "--eval-datasets x.csv"), (temperature_schedules, ""),
    (temperature_schedules, "--dataset cifar10-lt"), (temperature_schedules, "--dataset imagenet100-lt")])
def test_nothing_is_held_out_for_val_where_there_is_one(script, flags, capsys):
    said = "--hold-out-val: only for named sets without val"
    assert said in refused(script.parse_args, [*flags.split(), "--hold-out-val"], capsys)
    for allowed in (["--dataset", "cifar10"], ["--eval-datasets", "coco", "imagenet"][:3 * (script is temo)]):
        assert not allowed or script.parse_args([*allowed, "--hold-out-val"]).hold_out_val


def test_held_out_splits_are_a_twentieth_each_and_the_same_every_time(tmp_path):
    names = [f"{i:03}.png" for i in range(4000)]
    path = str(write_rows(tmp_path / "a.csv", ["image", "caption"], [(x, f"words of {x}") for x in names]))
    keys = {s: common.load_data(path, s).column("key") for s in SPLITS}
    assert keys == held_out(names) and all(160 < len(keys[s]) < 240 for s in ("val", "test"))
    assert keys["val"] == common.load_data(path, "val", image_column="image").column("key")  # opened anew, not kept
    assert "held out for val and test" in common.load_data(path, "train").note
    # a run may be resumed years later: these must never change
    assert keys["val"][:4] == ["029.png", "078.png", "146.png", "153.png"]
    assert keys["test"][:4] == ["007.png", "027.png", "054.png", "069.png"]


def test_windows_of_a_video_stay_together(tmp_path):
    """Seconds as they come, 1e-05 too; another window moves none."""
    windows = [(None, 3), (1e-5, 2), (2, 4.5), (7.25, None), (100000.5, 200000), (1e6, 2e6)]
    for k in range(100):
        (tmp_path / f"v{k}.mp4").write_bytes(b"not opened")
    found = {}
    for first in (3, 0):
        rows = [(f"v{k}.mp4", start, end, f"{k} {start}") for start, end in windows[first:] for k in range(100)]
        path = write_rows(tmp_path / f"{first}.jsonl", ["video", "start", "end", "caption"], rows)
        now = {s: {key.split()[0] for key in d.column("key")} for s, d in open_splits(path).items()}
        assert set(now) == {"train", "val", "test"} and sum(map(len, now.values())) == 100
        assert now == (found or now)
        found = now
    assert {s: sorted(v) for s, v in found.items()} == held_out(sorted(f"v{k}.mp4" for k in range(100)))


@pytest.mark.parametrize("name", ["own.csv", "own.jsonl"])
def test_a_column_split_says_which_rows_are_whose(name, tmp_path):
    """Each row keeps its own picture, caption and class; a word that names no split is refused."""
    words, names = ["train", "val", "training", "test", "validation", "train"], write_images(tmp_path, range(6))
    columns = {"caption": [f"words {k}" for k in range(6)], "label": ["dog", "cat"] * 3, "split": words}
    write_rows(tmp_path / name, ["image", *columns], [*zip(names, *columns.values())])
    for split, wanted in (("train", [0, 2, 5]), ("val", [1, 4]), ("test", [3])):
        data = common.load_data(str(tmp_path / name), split)
        assert data.column("captions") == [[f"words {k}"] for k in wanted] and data.label_names == ["cat", "dog"]
        for i, k in enumerate(wanted):
            assert (data.read(i).permute(1, 2, 0).numpy() == picture(k)).all() and data.labels[i] == (k + 1) % 2
    write_rows(tmp_path / "odd.csv", ["image", "caption", "split"], [("000.png", "x", "trian")])
    with pytest.raises(UserError, match="'trian' in the column split is none of"):
        common.load_data(str(tmp_path / "odd.csv"), "train")


def test_a_test_split_alone_is_evaluated_and_not_trained_on(tmp_path):
    class_folders(tmp_path, "test", range(12))
    with pytest.raises(UserError, match="no train split; it has: test"):
        common.load_data(str(tmp_path), "train")
    with pytest.raises(EmptySplit, match="no val split; it has: test"):
        common.load_data(str(tmp_path), "val")
    assert len(common.load_data(str(tmp_path), "test")) == 12


def test_rows_of_one_image_become_its_captions(tmp_path):
    names = write_images(tmp_path, range(3))
    rows = [(names[k % 3], f"words {k}") for k in range(6)] + [(names[0], "words 0")]
    data = common.load_data(str(write_rows(tmp_path / "a.csv", ["image", "caption"], rows)), "train")
    assert data.column("captions") == [[f"words {k}", f"words {k + 3}"] for k in range(3)]
    rows = [(names[0], ["a", "b"]), (names[1], []), (names[2], ["c"])]
    data = common.load_data(str(write_rows(tmp_path / "b.jsonl", ["image", "captions"], rows)), "train")
    assert data.column("captions") == [["a", "b"], ["c"]] and "1 rows without an image or a caption" in data.note


def test_column_flags_and_data_dir(tmp_path):
    write_images(tmp_path / "pictures", range(4))
    rows = [(f"{i:03}.png", caption(i), "other words", "0010"[i]) for i in range(4)]
    path = str(write_rows(tmp_path / "a.csv", ["picture", "said", "text", "kind"], rows))
    flags = {"image_column": "picture", "caption_column": "said", "label_column": "kind"}
    data = common.load_data(path, "train", data_dir=str(tmp_path / "pictures"), **flags)
    assert data.captions(2) == [caption(2)] and data.label_names == ["0", "1"] and data.labels.tolist() == [0, 0, 1, 0]
    assert (data.read(3).permute(1, 2, 0).numpy() == picture(3)).all()
    with pytest.raises(UserError, match="--caption-column none: there is no such column; there are: picture, said"):
        common.load_data(path, "train", image_column="picture", caption_column="none")


def test_rows_without_picture_caption_or_class_are_counted(tmp_path):
    names = write_images(tmp_path, range(6))
    rows = [(names[0], "a", "cat"), ("", "b", "cat"), (names[2], " ", "dog"), (names[3], "d", ""),
            (names[4], "e", "dog"), (names[4], "f", "cat")]
    data = common.load_data(str(write_rows(tmp_path / "a.csv", ["image", "caption", "label"], rows)), "train")
    assert data.column("captions") == [["a"], ["d"], ["e", "f"]] and data.labels.tolist() == [0, -1, -1]
    assert "2 rows without an image or a caption left out" in data.note and "2 without a class" in data.note


def test_images_of_one_name_in_a_table_are_known_by_their_row(tmp_path):
    import datasets
    rows = {"image": [{"bytes": encode(picture(i)), "path": "image.png"} for i in range(8)],
            "caption": ["", *(caption(i) for i in range(1, 8))]}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    table.to_parquet(str(tmp_path / "train.parquet"))
    data = common.load_data(str(tmp_path / "train.parquet"), "train")
    assert data.column("key") == [str(i) for i in range(1, 8)] and "1 rows without" in data.note
    assert all((data.read(k).permute(1, 2, 0).numpy() == picture(k + 1)).all() for k in range(7))


# ---------------------------------------------------- decoding -------------------------------------------------------
def test_decode_grey_palette_and_alpha():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert np.array_equal(decode(encode(grey)), np.stack([grey] * 3))
    palette = Image.new("P", (4, 4))
    palette.putpalette([255, 0, 0, 0, 0, 255] + [0] * 762)
    palette.putdata([0, 1] * 8)
    out = decode(encode(palette, transparency=bytes([0, 255])))
    assert out[:, 0, 0].tolist() == [255, 255, 255]  # clear red is white
    assert out[:, 0, 1].tolist() == [0, 0, 255]  # blue stays
    half = decode(encode(Image.new("RGBA", (4, 4), (255, 0, 0, 128))))
    assert half.shape == (3, 4, 4) and half[:, 0, 0].tolist() == [255, 127, 127]
    assert decode(encode(Image.new("LA", (4, 4), (0, 128))))[:, 0, 0].tolist() == [127] * 3


def test_decode_cmyk_jpeg():
    out = decode(encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "jpeg", quality=95))
    assert out.shape == (3, 16, 16) and np.abs(out[:, 8, 8].numpy().astype(int) - [255, 0, 0]).max() <= 3


def test_decode_16_bits():
    """Colours are cut to 8 bits; of grey Pillow would make everything above 255 white, so it is refused."""
    values = np.linspace(0, 65535, 64).reshape(8, 8, 1).repeat(4, 2).round().astype(np.uint16)
    values[..., 3] = 65535
    for channels in (3, 4):
        out = decode(png16(values[..., :channels])).numpy().astype(int)
        assert np.abs(out - np.round(values[..., 0] / 257)).max() <= 1
    grey = Image.fromarray(values[..., 0])
    wide = [Image.fromarray(values[..., 0].astype(kind)) for kind in (np.int32, np.float32)]
    for data in (png16(values[..., :1]), encode(grey, "tiff"), encode(grey, "ppm"), *(encode(x, "tiff") for x in wide)):
        with pytest.raises(ValueError, match="more than 8 bits of grey"):
            decode(data)


@pytest.mark.parametrize("kind", ["gif", "webp", "bmp", "tiff"])
def test_decode_other_formats(kind):
    image = Image.new("RGB", (12, 8), (200, 40, 90))
    two_frames = {"save_all": True, "append_images": [Image.new("RGB", (12, 8), (0, 0, 0))]}
    options = {"gif": two_frames, "webp": {"lossless": True}}.get(kind, {})
    out = decode(encode(image, kind, **options))
    assert out.shape == (3, 8, 12) and out[:, 3, 3].tolist() == [200, 40, 90]  # of a gif the first frame


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_decode_turns_pictures_as_exif_says(mode):
    exif, upright = Image.Exif(), np.zeros((32, 16), np.uint8)
    upright[:16] = 255                                           # white above, black below
    stored = Image.fromarray(np.rot90(upright).copy()).convert(mode)
    exif[0x112] = 6                                              # "turn right to see it upright"
    out = decode(encode(stored, "jpeg", exif=exif, quality=95))
    assert out.shape == (3, 32, 16)
    assert np.abs(out.numpy().astype(int) - upright).mean() < 4


def test_decode_refuses_what_is_broken(tmp_path):
    whole = encode(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8), "jpeg")
    assert len(encode(picture(7, 64, 64), "jpeg")) > len(TRUNCATED)
    for data in (TRUNCATED, whole[:len(whole) // 2], whole[:-2], whole[:30]):
        with pytest.raises((ValueError, OSError)):
            decode(data)
    with pytest.raises((ValueError, OSError)):
        decode(encode(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))[:5000])
    for data in (TEXT, b""):
        with pytest.raises(OSError, match="cannot identify image file"):
            decode(data)
    with pytest.raises(OSError):
        decode(tmp_path / "none.png")


# ---------------------------------------------------- emoji ----------------------------------------------------------
@pytest.fixture(scope="module")
def emoji():
    return {s: common.load_data("emoji", s) for s in SPLITS}


def test_emoji_counts_and_captions(emoji):
    assert {s: tuple(d.pixels.shape) for s, d in emoji.items()} == {
        "train": (3058, 3, 72, 72), "val": (177, 3, 72, 72), "test": (168, 3, 72, 72)}
    captions = {s: d.column("captions") for s, d in emoji.items()}
    assert {s: sum(map(len, of)) for s, of in captions.items()} == {"train": 4729, "val": 269, "test": 258}
    assert {s: len(d.label_names) for s, d in emoji.items()} == {s: 99 for s in SPLITS}
    for s, d in emoji.items():  # variants of skin only train, and say so
        for key, said in zip(d.column("key"), captions[s], strict=True):
            assert said and len(set(said)) == len(said) and all(c == c.lower() and "_" not in c for c in said)
            assert {"skin tone" in c for c in said} == {" " in key} and (s == "train" or " " not in key)
        pairs = set(zip(d.groups.tolist(), [x.numpy().tobytes() for x in d.pixels], strict=True))
        assert len(pairs) == len(set(d.groups.tolist()))  # the drawings of one group are alike
    assert sum(" " not in k for d in emoji.values() for k in d.column("key")) == 1898  # base drawings
    assert len(set(emoji["test"].groups.tolist())) == 166  # identical drawings are positives of each other


def test_no_emoji_twin_crosses_the_splits(emoji):
    gender = set("man men mans woman women womans person people male female boy boys girl girls".split())
    where = defaultdict(set)
    for split, data in emoji.items():
        for i in range(len(data)):
            where[data.pixels[i].numpy().tobytes()].add(split)
            if " " not in data.key(i):  # base drawings; a tone is no word of the name
                for c in data.captions(i):
                    where[" ".join(w for w in re.findall("[a-z0-9]+", c) if w not in gender)].add(split)
    assert {len(s) for s in where.values()} == {1}


def test_emoji_folds_test_every_drawing_once_and_part_no_twins(emoji):
    """Each of the ten folds: twins on one side; over all of them each drawing is test once and val once."""
    cluster = {i["key"]: i["cluster"] for i in emoji_set.drawings()}
    held = {"val": Counter(), "test": Counter()}
    for fold in range(10):
        data = {s: common.load_data("emoji", s, fold=fold) for s in SPLITS}
        base = {s: [k.split()[0] for k in d.column("key")] for s, d in data.items()}
        sides = [{cluster[k] for k in base[s]} for s in SPLITS]
        assert set.union(*sides) == set(cluster.values()) and sum(map(len, sides)) == len(set.union(*sides))
        pixels = [{x.numpy().tobytes() for x in data[s].pixels} for s in SPLITS]
        assert not pixels[0] & pixels[1] and not pixels[0] & pixels[2] and not pixels[1] & pixels[2]
        for s in held:
            assert len(base[s]) > 100
            held[s].update(base[s])
        assert {d.note for d in data.values()} == {f"fold {fold} of 10" if fold else ""}
    assert all(set(held[s]) == set(cluster) and set(held[s].values()) == {1} for s in held) and len(cluster) == 1898


# ---------------------------------------------------- batches --------------------------------------------------------
TRANSFORM = common.EvalTransform(16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
VIEWS = [common.Augment(16, 0.5, 0.5, randaugment=(2, 7)),
         common.Augment(16, 0.2, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)]
CPU = torch.device("cpu")


def batches_of(data, size=6, first=0, last=12, workers=0, limit=1.0, folder=None, positions=None, seed=3):
    return common.Batches(data, VIEWS, TRANSFORM, size, seed, first, last, CPU, workers, limit, folder, positions)


def same(a, b):
    words = (a["keys"], a["captions"], a["epoch"]) == (b["keys"], b["captions"], b["epoch"])
    views = all(torch.equal(x, y) for x, y in zip(a["views"], b["views"]))
    return words and views and np.array_equal(a["draws"], b["draws"])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """39 pictures of two sizes; 36 of them train."""
    folder = tmp_path_factory.mktemp("files")
    write_captions(folder, 39)
    write_images(folder, range(0, 39, 3), height=31, width=17)
    return folder


def test_batches_do_not_depend_on_workers(files):
    data = common.load_data(str(files / "captions.csv"), "train")
    alone, workers = list(batches_of(data)), list(batches_of(data, workers=2))
    assert len(alone) == len(workers) == 12 and all(same(a, b) for a, b in zip(alone, workers))
    first = alone[0]
    assert [tuple(v.shape) for v in first["views"]] == [(6, 3, 16, 16)] * 2 and first["draws"].shape == (6, 32)
    assert not torch.equal(*first["views"])
    assert all(c == [caption(int(k[:3]))] for k, c in zip(first["keys"], first["captions"]))


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_batches_started_at_step_k_go_on_as_if_never_stopped(kind, files, emoji):
    data = common.load_data(str(files / "captions.csv"), "train") if kind == "files" else emoji["val"]
    size, last = (6, 9) if kind == "files" else (50, 6)
    whole = list(batches_of(data, size, last=last))
    for k in (1, 4):
        assert all(same(a, b) for a, b in zip(whole[k:], batches_of(data, size, first=k, last=last), strict=True))
    assert not any(same(a, b) for a, b in zip(whole, batches_of(data, size, last=last, seed=4)))


@pytest.mark.parametrize("view", [common.Augment(16, 0.2), common.Augment(16, 1, 0, 1, 0.8)], ids=["crop", "light"])
@pytest.mark.parametrize("kind", ["files", "memory"])
def test_views_of_another_seed_epoch_or_place_are_others(kind, view, files, emoji):
    data = common.load_data(str(files / "captions.csv"), "train") if kind == "files" else emoji["val"]
    views, size, found = [view] * 2, len(data) // 2, defaultdict(list)
    for seed in (3, 4):
        for batch in common.Batches(data, views, TRANSFORM, size, seed, 0, 4, CPU, max_bad_fraction=1.0):
            for place, pair in zip(batch["index"], zip(*batch["views"], strict=True)):
                found[int(place)] += pair
    whole = [of for of in found.values() if len(of) == 2 * 2 * 2]  # two seeds, epochs and views
    assert len(whole) > 0.9 * len(data)
    for k in range(8):
        for other in range(k):
            assert np.mean([torch.equal(of[k], of[other]) for of in whole]) < 0.1, (k, other)


def test_every_epoch_is_a_permutation(files):
    data = common.load_data(str(files / "captions.csv"), "train")
    epochs = defaultdict(list)
    views = defaultdict(list)
    for batch in batches_of(data):
        epochs[batch["epoch"]] += batch["keys"]
        for key, view in zip(batch["keys"], batch["views"][0]):
            views[key].append(view)
    assert [sorted(v) for v in epochs.values()] == [sorted(data.column("key"))] * 2 and epochs[0] != epochs[1]
    assert not any(torch.equal(*v) for v in views.values())  # fresh views in every epoch


@pytest.fixture(scope="module")
def forty():
    """(M,) the shard of each row: 40 shards of 5 to 24 rows."""
    return np.repeat(np.arange(40), np.random.default_rng(0).integers(5, 25, 40))


@pytest.mark.parametrize("seed, epoch", [(3, 0), (3, 1), (8, 0)])
def test_many_shards_are_read_a_few_at_a_time(seed, epoch, forty):
    n = len(forty)
    order = epoch_order(n, seed, epoch, forty)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, epoch_order(n, seed, epoch, forty))  # of (seed, epoch) alone
    assert np.array_equal(order, epoch_order(n, seed, epoch, 7 * forty + 2))  # and of no shard's number
    for other in ((seed, epoch + 1), (seed + 1, epoch)):
        assert not np.array_equal(order, epoch_order(n, *other, forty))
    read = forty[order]  # (n,) the shard of each row in the order of reading
    begin, end = (np.array([np.flatnonzero(read == s)[k] for s in range(40)]) for k in (0, -1))  # (40,) of each shard
    open_at = ((begin[:, None] <= np.arange(n)) & (np.arange(n) <= end[:, None])).sum(0)  # (n,) shards begun, not done
    assert open_at.max() <= SHARDS_AT_ONCE == 16
    sizes = np.bincount(forty)
    turns = np.argsort(begin)  # shards as they are begun
    windows = [turns[:16], turns[16:32], turns[32:]]
    at = np.cumsum([0, *(sizes[w].sum() for w in windows)])
    for window, start, stop in zip(windows, at, at[1:]):
        assert set(read[start:stop].tolist()) == set(window.tolist())  # a window is these shards, whole
        assert (np.diff(order[start:stop]) == 1).mean() < 0.1 and len(set(read[start:start + 32].tolist())) > 6  # mixed
    assert not np.array_equal(np.sort(windows[0]), np.arange(16))  # the shards come in random order too


@pytest.mark.parametrize("many", [False, True])
def test_epoch_batches(many, forty):
    n, size, shards = (len(forty), 32, forty) if many else (50, 12, None)
    per_epoch = n // size
    last = 2 * per_epoch + 1
    steps = list(epoch_batches(n, size, 7, 0, last, shards))
    assert [e for e, _ in steps] == [0] * per_epoch + [1] * per_epoch + [2]
    for e in (0, 1):
        rows = np.concatenate([b for epoch, b in steps if epoch == e])  # what is left waits for another epoch
        assert np.array_equal(rows, epoch_order(n, 7, e, shards)[:per_epoch * size])
        assert len(set(rows.tolist())) == len(rows)
    later = list(epoch_batches(n, size, 7, 5, last, shards))
    assert all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(steps[5:], later, strict=True))


def test_batches_of_forty_tars_are_read_in_windows(tmp_path):
    for s in range(40):
        write_tar(tmp_path / f"train-{s:02}.tar", tar_samples(range(2 * s, 2 * s + 2), "png", "txt"))
    write_tar(tmp_path / "val.tar", tar_samples(range(80, 82), "png", "txt"))
    write_tar(tmp_path / "test.tar", tar_samples(range(82, 84), "png", "txt"))
    data = common.load_data(str(tmp_path), "train")
    assert data.shards.tolist() == [i // 2 for i in range(80)]
    order = epoch_order(80, 3, 0, data.shards)
    for workers in (0, 2):
        keys = [k for b in batches_of(data, size=8, last=10, workers=workers) for k in b["keys"]]
        assert keys == [data.key(i) for i in order] and len({int(k) // 2 for k in keys[:32]}) == 16


def content(data):
    """All that a Data holds, to be compared."""
    rows = [(data.key(i), data.captions(i), data.read(i)) for i in range(len(data))]
    return rows, data.labels, data.label_names, data.groups, data.shards, data.note, data.split


def one_of_two(process, data, others, meeting, out):
    """A process of its own: its batches of a set with a bad picture, and what others hold, written to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=process, world_size=2)
    batches = batches_of(data, folder=out)
    torch.save([list(counted(batches)), batches.bad, [content(d) for d in others]], f"{out}/{process}.pt")
    dist.destroy_process_group()


def test_two_processes_get_the_batches_of_one(tmp_path, ten):
    """And the Data that are pickled for these processes arrive whole."""
    csv = write_captions(tmp_path, 39)
    data = common.load_data(str(csv), "train")
    bad = data.key(11)
    (tmp_path / bad).write_bytes(TEXT)
    indexed = write_tar(tmp_path / "tars" / "a.tar", tar_samples(range(9), "jpg", "txt", "cls"))
    others = [ten, ten.select([4, 1]).unfold(), common.load_data(str(indexed), "train"),
              common.load_data(str(write_parquet_images(tmp_path / "p" / "train.parquet", range(30)).parent), "val")]
    arguments = data, others, str(tmp_path / "meeting"), str(tmp_path)
    launch.spawn(one_of_two, arguments, 2)
    saved = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)]
    (left, bad_left, there), (right, bad_right, _) = saved
    for (rows, *more), other in zip(there, others, strict=True):
        mine, *mores = content(other)
        assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(rows, mine, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(more, mores, strict=True))
    alone = batches_of(data)
    for a, b, whole in zip(left, right, counted(alone), strict=True):
        assert a["keys"] + b["keys"] == whole["keys"] and a["captions"] + b["captions"] == whole["captions"]
        assert a["epoch"] == whole["epoch"]
        assert all(torch.equal(torch.cat(v), w) for *v, w in zip(a["views"], b["views"], whole["views"]))
        assert np.array_equal(np.concatenate([a["draws"], b["draws"]]), whole["draws"])
    assert [*bad_left] == [*bad_right] == [*alone.bad] == [bad]
    assert (tmp_path / "bad_samples.txt").read_text().count("\n") == 1


# ---------------------------------------------------- bad samples ----------------------------------------------------
@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """(file, keys): 39 pictures; rows 3, 4 (in a row) and 35 (the last) of the training split cannot be read."""
    folder = tmp_path_factory.mktemp("spoilt")
    csv = str(write_captions(folder, 39))
    keys = [common.load_data(csv, "train").key(k) for k in range(36)]
    (folder / keys[3]).write_bytes(TRUNCATED)
    (folder / keys[4]).write_bytes(TEXT)
    (folder / keys[35]).unlink()
    return csv, keys


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced_by_the_next_counted_and_listed(workers, spoilt, tmp_path):
    csv, keys = spoilt
    batches = batches_of(common.load_data(csv, "train"), last=12, workers=workers, folder=tmp_path)
    seen = [k for b in counted(batches) for k in b["keys"]]
    after = {keys[3]: keys[5], keys[4]: keys[5], keys[35]: keys[0]}
    order = [keys[i] for _, batch in epoch_batches(36, 6, 3, 0, 12) for i in batch]
    assert seen == [after.get(k, k) for k in order]  # the same rule with and without workers
    lines = (tmp_path / "bad_samples.txt").read_text(encoding="utf8").splitlines()
    reasons = dict(line.split("\t") for line in lines)
    assert set(batches.bad) == set(after) == set(reasons) and len(lines) == 3  # each once in two epochs
    assert "truncated" in reasons[keys[3]] and "cannot identify" in reasons[keys[4]]
    assert "No such file" in reasons[keys[35]]


# ---------------------------------------------------- tars ------------------------------------------------------------
def test_the_index_of_tars_is_made_anew_when_they_change(tmp_path):
    write_tar(tmp_path / "0.tar", tar_samples(range(30), "jpg", "txt"))
    assert len(data_stream.index("x", "train", [tmp_path / "0.tar"], {})) == 30
    write_tar(tmp_path / "0.tar", tar_samples(range(40), "jpg", "txt"))
    data = data_stream.index("x", "train", [tmp_path / "0.tar"], {})
    assert len(data) == 40 and data.captions(39) == two(39)
    write_tar(tmp_path / "1.tar", tar_samples(range(5), "jpg", "txt"))
    both = data_stream.index("x", "train", [tmp_path / "0.tar", tmp_path / "1.tar"], {})
    assert both.key(3) == "0/000003" and both.key(41) == "1/000001" and both.shards.tolist() == [0] * 40 + [1] * 5


DAMAGES = [lambda c: c[:len(c) // 2], lambda c: b"x" * 512 + c[512:], lambda c: TEXT]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tar_that_cannot_be_read_to_its_end_is_named(damage, tmp_path):
    content = write_tar(tmp_path / "a.tar", tar_samples(range(20), "jpg", "txt")).read_bytes()
    (tmp_path / "a.tar").write_bytes(damage(content))
    with pytest.raises(UserError, match="a.tar: not a tar that can be read to its end"):
        common.load_data(str(tmp_path / "a.tar"), "train")


def test_samples_without_caption_are_counted(tmp_path):
    samples = tar_samples(range(30), "jpg", "txt")
    del samples["000003"]["txt"]
    samples["000005"]["txt"] = b" "
    data = data_stream.index("x", "train", [write_tar(tmp_path / "0.tar", samples)], {})
    assert len(data) == 28 and "2 samples left out, first 000003" in data.note


# ---------------------------------------------------- streams --------------------------------------------------------
@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four training tars of six samples, and one for val and test."""
    folder = tmp_path_factory.mktemp("shards")
    for s in range(4):
        write_tar(folder / f"train-{s}.tar", tar_samples(range(6 * s, 6 * s + 6), "jpg", "txt"))
    write_tar(folder / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    return str(folder)


def stream(folder, buffer=1):
    return dataclasses.replace(common.load_data(folder, "train", streaming=True), buffer=buffer)


def items(data, process=0, processes=1, count=None, first=0, local=6):
    """(key, epoch, views) of one reader: `count` of them, or an epoch of its shards."""
    reader = iter(data_stream.StreamViews(data, VIEWS, 3, (process, processes), first, local))
    some = (next(reader) for _ in range(count or 6 * len(data.urls[process::processes])))
    return [(item["keys"], item["epochs"], item["views"]) for item in some]


def test_two_readers_share_an_epoch_between_them(shards):
    data = stream(shards)
    left, right, views = items(data, 0, 2), items(data, 1, 2), {i[0]: i[2] for i in items(data)}
    assert len(left) == len(right) == 12 and {i[0] for i in left + right} == {f"{i:06}" for i in range(24)}
    # whoever reads a key, its views are the same
    assert all(torch.equal(a, b) for key, _, v in left + right for a, b in zip(v, views[key], strict=True))
    assert common.load_data(shards, "val", streaming=True).key(0) == "000024"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_goes_on_at_its_batch(shards, workers):
    data = stream(shards, buffer=5)
    whole = [b["keys"] for b in batches_of(data, size=4, last=8, workers=workers)]
    again = [b["keys"] for b in batches_of(data, size=4, first=3, last=8, workers=workers)]
    assert whole[3:] == again and len({*sum(whole, [])}) > 12


def test_a_sample_of_a_stream_without_caption_is_one_bad_sample(tmp_path):
    samples = tar_samples(range(12), "jpg", "txt")
    del samples["000005"]["txt"]
    write_tar(tmp_path / "train-0.tar", samples)
    write_tar(tmp_path / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    batches = batches_of(stream(str(tmp_path)), size=4, last=3)
    keys = {k for b in counted(batches) for k in b["keys"]}
    assert keys <= set(samples) - {"000005"} and len(batches.bad) == 1 and "000005" in batches.bad


def test_a_tar_of_a_stream_that_ends_early_gives_its_samples_and_one_bad_one(tmp_path):
    content = write_tar(tmp_path / "train-0.tar", tar_samples(range(20), "jpg", "txt")).read_bytes()
    (tmp_path / "train-0.tar").write_bytes(content[:len(content) // 2])
    found = list(data_stream.read_tar(str(tmp_path / "train-0.tar")))
    assert 5 < len(found) < 15 and isinstance(found[-1][1], Exception) and found[0][0] == "000000"


def test_a_stream_without_one_readable_picture_stops(tmp_path):
    write_tar(tmp_path / "train-0.tar", {f"{i:06}": {"jpg": TEXT, "txt": b"a caption"} for i in range(12)})
    write_tar(tmp_path / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    with pytest.raises(UserError, match="cannot be read"):
        list(batches_of(stream(str(tmp_path)), size=4, last=2))


def test_more_processes_than_shards_is_refused(shards, monkeypatch):
    for place in (data_stream, data_batches):
        monkeypatch.setattr(place, "world", lambda: 5)
    with pytest.raises(UserError, match="4 shards are too few for 5 processes"):
        next(iter(batches_of(stream(shards), size=10)))


# ---------------------------------------------------- image views ----------------------------------------------------
def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def noise(n=4, height=37, width=53, seed=0):
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


def draws(n=4, **at):
    """(n, 16) draws of one half but for the columns given: draws(4, _5=0.0)."""
    u = np.full((n, common.Augment.DRAWS), 0.5, np.float32)
    for name, value in at.items():
        u[:, int(name[1:])] = value
    return u


def finished(augment, x, u):
    return augment.photometric(x, torch.from_numpy(u)[:, :, None, None, None])


@pytest.mark.parametrize("scale_min, size", [(0.08, 16), (0.5, 48), (1.0, 24)])
def test_crop_batch_is_torchvisions_resized_crop(scale_min, size):
    images, u = noise(8), common.uniforms(0, 0, range(8), 16)
    augment = common.Augment(size, scale_min)
    out = crop_batch(augment, images, u)
    for x, y, (top, left, h, w) in zip(images, out, augment.boxes(37, 53, u).tolist(), strict=True):
        assert 0 <= top <= top + h <= 37 and 0 <= left <= left + w <= 53 and h > 0 and w > 0
        close(y, V.resized_crop(x, top, left, h, w, [size, size], antialias=True))


def test_crop_boxes_have_the_area_asked_for():
    boxes = common.Augment(16, 0.08).boxes(200, 200, common.uniforms(0, 0, range(2000), 16))
    area, ratio = boxes[:, 2] * boxes[:, 3] / 200**2, boxes[:, 3] / boxes[:, 2]
    assert 0.07 < area.min() < 0.12 and area.max() > 0.9 and abs(np.median(area) - 0.54) < 0.03
    assert 0.72 < ratio.min() < 0.77 and 1.3 < ratio.max() < 1.39
    down, right = ((boxes[:, k] + 0.5) / (201 - boxes[:, k + 2]) for k in (0, 1))  # parts of the way that is free
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.1


def test_crop_one_and_crop_batch_see_the_same_boxes():
    images = (noise(3) * 255).byte()
    u = common.uniforms(0, 0, range(3), 16)
    augment = common.Augment(24, 0.3)
    one = torch.stack([augment.crop_one(x, row) for x, row in zip(images, u)])
    assert one.dtype == torch.uint8
    close(one.float() / 255, crop_batch(augment, images, u), 1.5 / 255)  # but for rounding to uint8


@pytest.mark.parametrize("column, strength, function", [
    (6, "brightness", V.adjust_brightness), (7, "contrast", V.adjust_contrast), (8, "saturation", V.adjust_saturation)])
@pytest.mark.parametrize("draw", [0.0, 0.3, 0.9])
def test_colour_jitter_is_torchvisions(column, strength, function, draw):
    x = noise(4, 16, 16)
    augment = common.Augment(16, jitter_p=1.0, **{strength: 0.4})
    close(finished(augment, x, draws(_5=0.0, **{f"_{column}": draw})), function(x, 1 + (2 * draw - 1) * 0.4))


@pytest.mark.parametrize("shift", [-0.5, -0.1, 0.0, 0.07, 0.4])
def test_hue_is_torchvisions(shift):
    grey, primaries = torch.full((1, 3, 16, 16), 0.4), torch.eye(3)[:, :, None, None].expand(3, 3, 16, 16)
    x = torch.cat([noise(2, 16, 16), grey, primaries])
    close(shift_hue(x, torch.full((len(x), 1, 1, 1), shift)), V.adjust_hue(x, shift))
    if abs(shift) <= 0.1:
        u = draws(len(x), _5=0.0, _9=shift / 0.2 + 0.5)
        close(finished(common.Augment(16, jitter_p=1.0, hue=0.1), x, u), V.adjust_hue(x, shift))


def test_grey_and_flip_are_torchvisions():
    x = noise(4, 16, 16)
    close(finished(common.Augment(16, grey=1.0), x, draws(_10=0.0)), V.rgb_to_grayscale(x, 3))
    flipped = finished(common.Augment(16, flip=0.5), x, draws(_4=[0.0, 0.9, 0.4, 0.6]))
    close(flipped, torch.stack([x[0].flip(-1), x[1], x[2].flip(-1), x[3]]), 0)


@pytest.mark.parametrize("size", [16, 48, 224])
@pytest.mark.parametrize("sigma", [0.1, 1.3])
def test_blur_is_torchvisions(sigma, size):
    x = noise(2, size, size)
    width = 2 * max(1, size // 20) + 1
    close(gaussian_blur(x, torch.full((2,), sigma)), V.gaussian_blur(x, [width, width], [sigma, sigma]))


@pytest.mark.parametrize("draw", [0.0, 0.9])
def test_the_strength_of_a_blur_has_a_draw_of_its_own(draw):
    """0.1 to 2 pixels, as SimCLR."""
    x = noise(2, 48, 48)
    close(finished(common.Augment(48, blur=0.5), x, draws(2, _11=0.2, _14=draw)),
          gaussian_blur(x, torch.full((2,), 0.1 + 1.9 * draw)))


def test_probabilities_choose_samples_one_by_one():
    x = noise(4, 16, 16)
    augment = common.Augment(16, 1.0, 0.0, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    u = draws(_5=[0.9, 0.7, 0.9, 0.9], _6=0.9, _10=[0.9, 0.9, 0.1, 0.9], _11=[0.9, 0.9, 0.9, 0.1])
    out = finished(augment, x, u)
    assert torch.equal(out[0], x[0]) and not any(torch.equal(out[i], x[i]) for i in (1, 2, 3))
    for i in range(4):  # no sample looks at its neighbours
        close(finished(augment, x[i:i + 1], u[i:i + 1])[0], out[i], 1e-6)


def test_operations_of_randaugment_are_torchvision_s():
    """In its order, within one grey level; a rotation takes the next pixel now and then."""
    clip, theirs = (noise(2, 40, 56) * 255).byte(), v2.RandAugment(num_ops=1)
    clip[0, 0] = 7  # nothing to stretch or to equalise
    assert list(OPERATIONS) == [k for k in theirs._AUGMENTATION_SPACE if k in OPERATIONS]
    for name, (change, most) in OPERATIONS.items():
        strengths, signed = theirs._AUGMENTATION_SPACE[name]
        assert signed == bool(most)
        for magnitude, sign in itertools.product((0, 7, 21, 30), (1, -1)):
            strength = sign * float(strengths(31, 40, 56)[magnitude]) if signed else 0.0
            expected = theirs._apply_image_or_video_transform(clip, name, strength, theirs.interpolation, theirs._fill)
            found = [change(Image.fromarray(p), sign * most * magnitude / 30) for p in clip.flatten(0, 1).numpy()]
            far = (torch.from_numpy(np.stack(found)).view_as(clip).int() - expected.int()).abs() > 1
            assert far.float().mean() <= (1 / 300 if name == "Rotate" else 0), (name, magnitude, sign)


def test_randaugment_chooses_as_torchvision_and_leaves_the_gpu_s_random_numbers_alone(monkeypatch):
    clips, u = (noise(120, 32, 40) * 255).byte().unflatten(0, (60, 2)), common.uniforms(0, 0, range(60), 16)
    theirs, asked = v2.RandAugment(num_ops=1, magnitude=21), []
    theirs._AUGMENTATION_SPACE = {k: theirs._AUGMENTATION_SPACE[k] for k in OPERATIONS}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "manual_seed_all", asked.append)
        found = [randaugment(x, row, 2, 21) for x, row in zip(clips, u)]
    assert not asked and sum(not torch.equal(a, b) for a, b in zip(found, clips)) > 30
    for x, row, y in zip(clips, u, found):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(row[12] * 2**24) * 2**24 + int(row[13] * 2**24))
            for _ in range(2):
                x = theirs(x) if torch.rand(()) < 0.5 else x
        assert ((x.int() - y.int()).abs() > 3).float().mean() < 0.02 and y.shape == x.shape


def test_randaugment_is_a_function_of_the_draws():
    x, u = (noise(3, 32, 32) * 255).byte(), common.uniforms(0, 0, range(3), 16)
    augment = common.Augment(16, 0.5, randaugment=(2, 7))
    state = torch.get_rng_state()
    first = [augment.crop_one(a, row) for a, row in zip(x, u)]
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone
    torch.manual_seed(5)
    assert all(torch.equal(a, augment.crop_one(b, row)) for a, b, row in zip(first, x, u))
    assert not all(torch.equal(a, common.Augment(16, 0.5).crop_one(b, row)) for a, b, row in zip(first, x, u))


def test_evaluation_view(files, tmp_path):
    image = picture(3, 40, 60)
    (tmp_path / "a.png").write_bytes(encode(image))
    crop, squash = (common.EvalTransform(16, (0.5,) * 3, (0.25,) * 3, how) for how in ("crop", "squash"))
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    close(crop(tensor), (V.center_crop(V.resize(tensor, [16, 24], antialias=True), [16, 16]) / 255 - 0.5) / 0.25)
    close(squash(tensor), (V.resize(tensor, [16, 16], antialias=True) / 255 - 0.5) / 0.25)
    file = tmp_path / "a.png"
    for x in (Image.fromarray(image), file, str(file)):
        assert torch.equal(crop(x), crop(tensor))


# ---------------------------------------------------- random numbers -------------------------------------------------
def test_uniforms():
    u = common.uniforms(1, 2, range(5000), 8, stream=1)
    assert u.shape == (5000, 8) and u.dtype == np.float32 and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.std() - 12**-0.5) < 0.01
    assert np.abs(np.corrcoef(u.T) - np.eye(8)).max() < 0.06
    shuffled = np.random.default_rng(0).permutation(5000)
    alone = np.concatenate([common.uniforms(1, 2, [i], 8, 1) for i in range(50)])
    assert np.array_equal(common.uniforms(1, 2, shuffled, 8, 1), u[shuffled])  # not of the order
    assert np.array_equal(alone, u[:50])  # nor of the batch
    assert np.array_equal(common.uniforms(1, 2, range(50), 3, 1), u[:50, :3])
    for seed, epoch, number in ((0, 2, 1), (1, 3, 1), (1, 2, 0)):
        other = common.uniforms(seed, epoch, range(5000), 8, number)
        assert (other == u).mean() < 1e-3 and abs(np.corrcoef(other.ravel(), u.ravel())[0, 1]) < 0.03
    assert len({common.key_hash(f"sample {i}") for i in range(2000)}) == 2000 and 0 <= common.key_hash("a") < 2**63


def test_select_of_nothing():
    data = common.load_data("emoji", "val")
    for rows in ([], (), np.array([], np.int64)):
        empty = data.select(rows)
        assert len(empty) == 0 and empty.pixels.shape == (0, 3, 72, 72) and len(empty.rows) == 0
    assert [data.select([3, 1]).key(i) for i in range(2)] == [data.key(3), data.key(1)]


# ---------------------------------------------------- second texts ---------------------------------------------------
def test_text_pair_takes_the_first_source_there_is(tmp_path):
    path = tmp_path / "p.jsonl"
    known = {"a cat": ["the cat", "one cat"], "a dog": [], "a cow": ["", "some cow"]}
    lines = [json.dumps({"caption": c, "paraphrases": p}) + "\n" for c, p in known.items()]
    path.write_text("".join(lines), encoding="utf8")
    known = Paraphrases(path)
    assert len(known) == 3
    assert known.get(["a cow", "no such", "a cat", "a dog"]) == [["some cow"], [], ["the cat", "one cat"], []]

    captions, u = [["a cat"], ["a dog"], ["a cow", "moo"]], np.full((3, 32), 0.0, np.float32)
    u[:, 1] = 0.9
    templates = ("icon of {}", "{} drawn")
    first, other = common.text_pair(captions, u, known, templates)
    assert first == ["a cat", "a dog", "a cow"]
    assert other == ["one cat", "a dog drawn", "some cow"]  # the file, else templates
    assert common.text_pair(captions, u, None, templates)[1] == ["a cat drawn", "a dog drawn", "moo drawn"]
    u[:, 2:] = 0.99  # nothing is dropped or swapped; the anchor is the last of the caption and its paraphrases
    assert common.text_pair(captions, u)[1] == ["a cat", "a dog", "moo"]  # another caption, else words
    assert common.text_pair(captions, u, known) == (["one cat", "a dog", "some cow"], ["one cat", "a dog", "some cow"])
    assert common.text_pair(captions, u, known, anchor=False)[0] == ["a cat", "a dog", "a cow"]
    assert common.text_pair(captions, u, known, second=False) == (["a cat", "a dog", "a cow"], [])
    u[:, 0] = 0.7
    assert common.text_pair(captions, u)[0][2] == "moo" and common.text_pair(captions, u)[1][2] == "a cow"
    many = np.random.default_rng(0).random((3000, 32), dtype=np.float32)  # T is uniform over three, T~ over two
    first, other = common.text_pair([["a cat"]] * 3000, many, known)
    assert all(first.count(t) == pytest.approx(1000, abs=100) for t in ("a cat", "the cat", "one cat"))
    assert all(other.count(t) == pytest.approx(1500, abs=100) for t in ("the cat", "one cat"))
    assert sum(a == b for a, b in zip(first, other)) == pytest.approx(1000, abs=100)  # drawn independently


def test_paraphrases_file_errors(tmp_path):
    with pytest.raises(UserError, match="Unable to find"):
        Paraphrases(tmp_path / "none.jsonl")
    for name, text in (("a.jsonl", '{"words": "x"}\n'), ("b.jsonl", "not json\n"), ("c.jsonl", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=f"^--paraphrases .*{name}: "):
            Paraphrases(tmp_path / name)


def test_drop_and_swap():
    text = "one two three four five six seven"
    u = common.uniforms(0, 0, range(400), 30)
    out = [common.drop_and_swap(text, row, 0.3, 0.2) for row in u]
    assert out == [common.drop_and_swap(text, row, 0.3, 0.2) for row in u]
    assert all(out) and all(not Counter(o.split()) - Counter(text.split()) for o in out)
    kept = np.mean([len(o.split()) for o in out]) / 7
    assert abs(kept - 0.7) < 0.04 and any(sorted(o.split()) == sorted(text.split()) and o != text for o in out)
    assert all(common.drop_and_swap(t, row, 1.0, 1.0) for row in u[:20] for t in ("word", "two words"))  # never empty
    assert all(common.drop_and_swap(text, row, 0.0, 0.0) == text for row in u[:20])
    swapped = np.mean([common.drop_and_swap(text, row, 0.0, 0.1) != text for row in u])
    assert abs(swapped - 0.7) < 0.07  # 0.1 swaps a word, of seven words


@pytest.fixture(scope="module")
def pegasus(tmp_path_factory):
    """A tiny PEGASUS of random weights with a word tokenizer, saved as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("pegasus")
    words = ["<pad>", "</s>", "<unk>", *"a the cat dog cow sat on mat red blue".split()]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = PegasusConfig(vocab_size=len(words), d_model=16, encoder_layers=1, decoder_layers=1,
                           encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
                           max_position_embeddings=64, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    PegasusForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def test_write_paraphrases(pegasus, tmp_path):
    captions = ["a cat", "a dog sat", "a cat", "the red cow", "on a mat"]
    rows = [(name, text, "train") for name, text in zip(write_images(tmp_path, range(5)), captions)]
    write_rows(tmp_path / "own.csv", ["image", "caption", "split"], rows)
    path = tmp_path / "p.jsonl"
    flags = f"--dataset {tmp_path}/own.csv --model {pegasus} --batch 2 --cpu --out".split()
    paraphrase.main([*flags, str(path)])
    lines = path.read_text(encoding="utf8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    assert [r["caption"] for r in rows] == ["a cat", "a dog sat", "the red cow", "on a mat"]  # the duplicate once
    assert all(len(r["paraphrases"]) == 5 and all(isinstance(p, str) for p in r["paraphrases"]) for r in rows)

    done = json.dumps(rows[0] | {"paraphrases": ["kept"] * 5}) + "\n"
    path.write_text(done + lines[1] + lines[2][:len(lines[2]) // 2], encoding="utf8")  # a kill in the third line
    paraphrase.main([*flags, str(path)])
    assert path.read_text(encoding="utf8").splitlines(keepends=True) == [done, lines[1], lines[2], lines[3]]
    assert len(Paraphrases(path)) == 4 and Paraphrases(path).get(["a cat"]) == [["kept"] * 5]
    path.write_text(path.read_text(encoding="utf8").replace('"by": "', '"by": "other '), encoding="utf8")
    with pytest.raises(UserError, match="^--out [^ ]*: has paraphrases by other .*, not by .*name another file$"):
        paraphrase.main([*flags, str(path)])
    own = (tmp_path / "own.csv").read_text()                               # somebody's data
    with pytest.raises(UserError, match="^--out "):
        paraphrase.main([*flags, str(tmp_path / "own.csv")])
    assert (tmp_path / "own.csv").read_text() == own


def test_paraphrases_of_the_captions_of_videos(pegasus, tmp_path):
    for i in range(4):
        write_video(tmp_path / "videos" / f"{i}.mp4", range(4))
    write_rows(tmp_path / "train.csv", ["video_id", "caption"], [(str(i), "a cat sat") for i in range(4)])
    paraphrase.main([*f"--dataset {tmp_path}/train.csv --video-dir {tmp_path}/videos --out {tmp_path}/p.jsonl".split(),
                     *f"--model {pegasus} --cpu".split()])
    assert len(Paraphrases(tmp_path / "p.jsonl")) == 1


# ---------------------------------------------------- the house ------------------------------------------------------
ROOT = Path(common.__file__).parent
A_SET = '''"""A data set is one file."""
import common
import torch
SETS = {"zz-noise": {"splits": {"train": 24, "val": 4, "test": 4}, "licence": "none", "where": "drawn here"}}
def load(name, split, options):
    n = SETS[name]["splits"][split]
    table = common.make_table([[f"noise number {i}"] for i in range(n)], [f"{split} {i}" for i in range(n)])
    pixels = torch.arange(n * 3 * 16 * 16).view(n, 3, 16, 16).to(torch.uint8)
    return common.Data(name, split, table, pixels=pixels, note="zz was here")
'''


def test_a_new_set_is_one_file_and_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "zz_test_set.py").write_text(A_SET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(data_sets.MODULES, "zz-noise", "zz_test_set")
    summary = temo.main(temo.parse_args([
        "--dataset", "zz-noise", "--image-encoder", "small", "--text-encoder", "small", "--no-pretrained", "--cpu",
        "--max-steps", "2", "--batch-size", "8", "--image-size", "16", "--workers", "0", "--output-dir", str(tmp_path),
        "--run-name", "r"]))
    said = capsys.readouterr().out
    assert "24 training examples" in said and "zz was here" in said
    assert "zz-noise: 4 val, 4 test" in said
    assert summary["test"].keys() == {"zz-noise"}
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text(encoding="utf8").splitlines()]
    assert max(row["step"] for row in rows) == 2


def test_every_set_says_what_it_is():
    folder = ROOT / "contrastive" / "data"
    files = [f"contrastive.data.{file.stem}" for file in folder.glob("*.py") if file.stem != "__init__"]
    rooms = [room for room in map(importlib.import_module, files) if hasattr(room, "SETS")]
    names = [name for room in rooms for name in room.SETS]
    assert len(names) == len(set(names)) and all(callable(room.load) for room in rooms)
    assert data_sets.MODULES == {name: room.__name__ for room in rooms for name in room.SETS}  # the table and the files
    for room in rooms:
        for name, facts in room.SETS.items():
            assert set(facts["splits"]) <= set(SPLITS) and facts["licence"], name
            assert data_sets.find_set(name) is room and data_sets.splits_of(name) == tuple(facts["splits"])
    assert data_sets.find_set("no/such") is None and data_sets.splits_of("no/such") == SPLITS
