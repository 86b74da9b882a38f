"""The user's own data: the forms that are read, what is refused, columns and rows, splits that are
held out, and data that are evaluated alone; and what ends a run in its first steps."""

import io
import json
import os
import re
import tarfile
from importlib.util import find_spec

import common
from contrastive.core.processes import UserError
from contrastive.data import batches, open_data, open_pairs
from contrastive.data import hash_fraction, held_out_masks
from contrastive.data.folders import split_of_name
from contrastive.data.options import HELD_OUT_FRACTION
from contrastive.data.table import EmptySplit
from contrastive.papers.meta import named_rows

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import mama
import ncl
import temo
import temperature_schedules
from helpers import (
    CLASSES, TEXT, TRUNCATED, all_rows, caption, complains, encode, evaluated, numbers,
    open_splits, picture, run_script, tar_samples, write_captions, write_clips, write_files,
    write_images, write_rows, write_tar, write_video)

PNG = encode(picture(1))
NAMES = {"train": "Train", "val": "VALIDATION", "test": "test2015"}
TINY = ("--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 1 "
        "--eval-every 0".split())
NO_META = ["--weighting", "none"]  # of mama.py


def captions_of(path, **options):
    """The captions of all examples."""
    splits = open_splits(path, **options).values()
    return sorted(data.captions(i) for data in splits for i in range(len(data)))


def keys_of(path, **options):
    """{split: the set of its keys}, with splits that are held out of train in train."""
    splits = {}
    for split, data in open_splits(path, **options).items():
        if "held out of" in data.note:
            split = "train"
        splits.setdefault(split, set()).update(data.keys())
    return splits


def note_of(path, **options):
    return next(iter(open_splits(path, **options).values())).note


def images(*folders, count=3):
    """{path: content} of 0.png, 1.png, ... in each of these folders."""
    return {f"{folder}/{i}.png": PNG for folder in folders for i in range(count)}


def takes(i):
    return [caption(i, k) for k in range(2)]


# ======================================== the five forms ==========================================
# where a layout names its splits
HALVES = {"train": range(0, 8), "validation": range(8, 10), "test": range(10, 12)}
SHOWN = [0, 2, 5, 7]  # of eight frames, four spread


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """{kind: bytes of the twelve samples}."""
    root = tmp_path_factory.mktemp("clips")
    write_clips(root, {i: f"{i}.mp4" for i in range(12)})
    return {
        "png": [encode(picture(i)) for i in range(12)],
        "jpg": [encode(picture(i), "jpeg", quality=95) for i in range(12)],
        "mp4": [(root / f"{i}.mp4").read_bytes() for i in range(12)]}


def table_of_paths(name):
    def write(root, word, some, kind):
        write_files(root, {f"files/{i:03}.{kind}": content for i, content in some.items()})
        rows = [(f"files/{i:03}.{kind}", text, CLASSES[i % 3]) for i in some for text in takes(i)]
        write_rows(root / name, ["video" if kind == "mp4" else "image", "caption", "label"], rows)

    return write


def class_folders(root, word, some, kind):
    for i, content in some.items():  # every class has its own 000, as exported clips often do
        write_files(root / word / CLASSES[i % 3], {f"{i // 3:03}.{kind}": content})


def metadata(name):
    def write(root, word, some, kind):
        write_files(root / word, {f"{i:03}.{kind}": content for i, content in some.items()})
        rows = [(f"{i:03}.{kind}", text) for i in some for text in takes(i)]
        write_rows(root / word / name, ["file_name", "text"], rows)

    return write


def tars(part):
    def write(root, word, some, kind):
        samples = {}
        for i, content in some.items():
            text = {"txt": "\n".join(takes(i)), "cls": str(i % 3)}[part]
            samples[f"{i:06}"] = {kind: content, part: text.encode()}
        write_tar(root / f"{word or 'all'}-000.tar", samples)

    return write


def parquet(root, word, some, kind):
    features = datasets.Features({
        "image": datasets.Image(), "caption": datasets.List(datasets.Value("string")),
        "label": datasets.ClassLabel(names=CLASSES)})
    rows = {
        "image": [{"bytes": content, "path": f"{i:03}.{kind}"} for i, content in some.items()],
        "caption": [takes(i) for i in some],
        "label": [i % 3 for i in some]}
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(root / f"{word or 'train'}-00000-of-00001.parquet")


def class_name(i):
    return [CLASSES[i % 3].replace("_", " ")]


def class_number(i):
    return [f"class {i % 3}"]


# name: (writer, what is opened, kind of files, captions of sample i, has classes, names its splits)
FORMS = {
    "csv": (table_of_paths("a.csv"), "a.csv", "png", takes, True, False),
    "json": (table_of_paths("a.json"), "a.json", "png", takes, True, False),
    "jsonl": (table_of_paths("a.jsonl"), "a.jsonl", "png", takes, True, False),
    "parquet of paths": (table_of_paths("a.parquet"), "a.parquet", "mp4", takes, True, False),
    "class folders": (class_folders, "", "mp4", class_name, True, False),
    "class folders in splits": (class_folders, "", "png", class_name, True, True),
    "metadata": (metadata("metadata.csv"), "", "mp4", takes, False, False),
    "metadata in splits": (metadata("metadata.jsonl"), "", "png", takes, False, True),
    "tar of classes": (tars("cls"), "all-000.tar", "jpg", class_number, True, False),
    "tars": (tars("txt"), "", "mp4", takes, False, False),
    "tars in splits": (tars("txt"), "", "jpg", takes, False, True),
    "parquet": (parquet, "", "jpg", takes, True, False),
    "parquet in splits": (parquet, "", "png", takes, True, True)}


def number_of(pixels):
    """Which sample this is: an image, or a clip of four frames."""
    if pixels.ndim == 4:
        shown = numbers(pixels)
        assert [i - shown[0] for i in shown] == SHOWN
        return shown[0] // 8
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 20, 24)
    pixels = pixels.permute(1, 2, 0).numpy().astype(int)
    off = [np.abs(pixels - picture(i)).max() for i in range(12)]
    assert min(off) <= 8  # jpegs
    return int(np.argmin(off))


def held_out(names):
    """{split: names} as the hash of each name places it, where train alone is given: a twentieth,
    but at least 20 images or a sixth of them."""
    fractions = sorted({hash_fraction(name) for name in names})
    least = min(20, len(fractions) // 6)
    behind = [x for x in fractions if x >= HELD_OUT_FRACTION]
    test = behind[: max(least, sum(x < 2 * HELD_OUT_FRACTION for x in behind))]
    others = [x for x in fractions if x not in test]
    val = others[: max(least, sum(x < HELD_OUT_FRACTION for x in others))]
    out = {"val": [], "test": [], "train": []}
    for name in names:
        split = "train"
        if hash_fraction(name) in val:
            split = "val"
        elif hash_fraction(name) in test:
            split = "test"
        out[split].append(name)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, contents, tmp_path):
    write, name, kind, captions, has_classes, names_splits = FORMS[form]
    for word, part in HALVES.items() if names_splits else [("", range(12))]:
        write(tmp_path, word, {i: contents[kind][i] for i in part}, kind)
    sets = open_splits(tmp_path / name, frames=4)
    samples = {}
    keys = {}
    for split, data in sets.items():
        samples[split] = [number_of(data.read(k)) for k in range(len(data))]
        keys[split] = list(data.keys())
        assert data.split == split
        assert str(tmp_path) not in str(keys)  # a key does not change with the folder
        for k, i in enumerate(samples[split]):
            example = data[k]
            assert example["captions"] == data.captions(k) == captions(i)
            assert example["key"] == data.key(k) == keys[split][k]
            assert example.get("label") == (i % 3 if has_classes else None)
        assert data.label_names == (CLASSES if has_classes and "tar" not in form else None)
    assert sorted(sum(samples.values(), [])) == list(range(12))  # nothing lost, none in two splits
    all_keys = sum(keys.values(), [])
    assert len(set(all_keys)) == 12
    if names_splits:
        for split, part in zip(("train", "val", "test"), HALVES.values()):
            assert sorted(samples[split]) == list(part)
    else:
        expected = {split: some for split, some in held_out(sorted(all_keys)).items() if some}
        assert {split: sorted(some) for split, some in keys.items()} == expected


@pytest.mark.parametrize("form", ["folders", "metadata", "one metadata", "tables", "tars", "cells"])
def test_names_of_splits(form, tmp_path):
    """Of any case, with numbers, and by their other words."""
    head = ["image", "caption"]
    rows = []
    path = tmp_path
    for number, name in enumerate(NAMES.values()):
        rows += [(f"{name}/{i}.png", "x", f" {name} ") for i in range(3)]
        if form in ("folders", "one metadata"):
            write_files(tmp_path, images(f"{name}/cat", f"{name}/dog"))
        elif form == "metadata":
            some = [(f"{i}.png", caption(i)) for i in range(3)]
            write_rows(tmp_path / name / "metadata.csv", ["file_name", "caption"], some)
        elif form == "tables":
            some = [row[:2] for row in rows[-3:]]
            write_rows(tmp_path / "data" / f"{name}-00000-of-00001.parquet", head, some)
        elif form == "tars":
            tar = tar_samples(range(6 * number, 6 * number + 6), "jpg", "txt")
            write_tar(tmp_path / name / "0.tar", tar)
    if form == "one metadata":
        some = [(f"{name}/cat/{i}.png", "x") for name in NAMES.values() for i in range(3)]
        write_rows(tmp_path / "metadata.jsonl", ["file_name", "caption"], some)
    if form == "cells":
        path = write_rows(tmp_path / "a.csv", [*head, "split"], rows)
    keys = keys_of(path)
    if form == "tars":
        first = {split: min(some) for split, some in keys.items()}
        assert first == {"train": "000000", "val": "000006", "test": "000012"}
    else:
        parts = {split: {key.split("/")[0] for key in some} for split, some in keys.items()}
        assert parts == {split: {name} for split, name in NAMES.items()}


def test_a_name_is_a_word_for_a_split_as_a_whole():
    words = {"train": "train", "TRAIN": "train", "val-00000-of-00003": "val", "dev": "val",
             "valid": "val", "train2017": "train", "Test_1": "test"}
    assert {name: split_of_name(name) for name in words} == words
    for name in ("bus", "attest", "protest", "constrain", "2014", ""):
        assert split_of_name(name) is None, name
    for name in ("Training", "trainset", "test images", "holdout", "trainval", "valSet", "eval"):
        with pytest.raises(ValueError, match=f"the name {name} seems to mean a split"):
            split_of_name(name)


def test_words_for_splits_in_other_names(tmp_path):
    files = images("bus", "train", "bullet_train", "training shoes", count=5)
    files |= {f"bus/test-{i}.png": PNG for i in range(5)}
    write_files(tmp_path / "classes", files)
    splits = open_splits(tmp_path / "classes")
    assert sum(map(len, splits.values())) == 25 and "not" not in splits["train"].note
    assert splits["train"].label_names == ["bullet_train", "bus", "train", "training shoes"]
    rows = [(f"COCO_{word}2014_{i}.png", "x") for word in ("train", "test") for i in range(4)]
    write_rows(tmp_path / "m" / "metadata.csv", ["file_name", "caption"], rows)
    assert keys_of(tmp_path / "m") == {"train": {name for name, _ in rows}}


# ======================================== what is refused =========================================
LONG = "x" * 500  # a message never shows so much of a cell
BOTH = "image,caption\n0.png,x\n"
SPLITS = "image,caption,split\n0.png,x,train\n1.png,x,"
CLIPS = "video,start,end,caption\na.mp4,"


def csv_of(*cells, column="caption"):
    """A csv with a column of these cells, quoted."""
    quoted = ['"' + cell.replace('"', '""') + '"' for cell in cells]
    head = "image,caption\n" if column == "caption" else f"image,caption,{column}\n"
    text = "" if column == "caption" else "x,"
    return head + "".join(f"{i}.png,{text}{cell}\n" for i, cell in enumerate(quoted))


def jsonl_of(*captions):
    rows = [{"image": f"{i}.png", "caption": caption} for i, caption in enumerate(captions)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def two_splits(first, second):
    return images(*(f"{split}/{kind}" for split in (first, second) for kind in ("cat", "dog")))


# name: (files, what is opened, words of the message)
REFUSALS = {
    # ---- files ----
    "ending": ({"a.xyz": ""}, "a.xyz", "a.xyz is none of .csv, .tsv, .json, .jsonl, "),
    "nothing": ({"x/a.bin": b""}, "x", "has no file that can be read, but needs a folder for each"),
    "no parquet": ({"a.parquet": ""}, "a.parquet", "a.parquet: "),
    "empty csv": ({"a.csv": ""}, "a.csv", "a.csv is empty, but needs a header such as image,cap"),
    "header alone": ({"a.csv": "image,caption\n"}, "a.csv", "a header, but no rows: write some"),
    "long row": ({"a.csv": f"{BOTH}1.png,a, b\n"}, "a.csv", "line 3 has 3 fields, the header 2"),
    "long rows": ({"a.csv": "image,caption\n0.png,a,\n"}, "a.csv", "line 2 has 3 fields, the h"),
    "short row": ({"a.csv": f"{BOTH}{LONG}\n"}, "a.csv", "a.csv, line 3 has 1 field, the header 2"),
    "metadata of long rows": ({"metadata.csv": "file_name,caption\n0.png,a,\n", "0.png": PNG}, "",
                              "metadata.csv, line 2 has 3 fields, the header 2"),
    "tabs": ({"a.csv": "image\tcaption\n0.png\tx\n"}, "a.csv", "fields are separated by a comma"),
    "semicolons": ({"a.csv": "image;caption\n0.png;x\n"}, "a.csv", "its header is one field, 'im"),
    "column twice": ({"a.csv": "image,text,text\n0.png,x,y\n"}, "a.csv", "two columns are called"),
    "stray mark": ({"a.csv": 'image,caption\n0.png,"one\n1.png,two"\n'}, "a.csv",
                   "a.csv, line 2: a field holds whole rows, 'one\\n1.png,two'; remove the stray"),
    "marks inside": ({"a.csv": 'image,caption\n0.png,"a "stop" sign"\n'}, "a.csv",
                     "a.csv, line 2: ',' expected after '\"'; a quoted field ends with"),
    "no last mark": ({"a.csv": f'{BOTH}1.png,"{LONG}\n2.png,x\n'}, "a.csv", "line 3: unexpected"),
    "UTF-16": ({"a.csv": BOTH.encode("utf16")}, "a.csv", "a.csv is not in UTF-8: save it again"),
    "two paths": ({"a.csv": "image,caption\n0.png,x\n./0.png,y\n"}, "a.csv",
                  "'0.png', './0.png' are one file: call it by one name"),
    # ---- columns ----
    "no image": ({"a.csv": "picture, caption\n0.png,x\n"}, "a.csv",
                 "--image-column: there is no column 'image', ", "are: 'picture', ' caption'"),
    "no caption": ({"a.csv": "image,said\n0.png,x\n"}, "a.csv", "--caption-column: there is no "),
    "two captions": ({"a.csv": "image,text,caption\n0.png,x,y\n"}, "a.csv",
                     "it has the columns caption and text; --caption-column says which it is"),
    "image and video": ({"a.csv": "image,video,caption\n0.png,a.mp4,y\n"}, "a.csv",
                        "it has the columns image and video; --image-column says which"),
    "list as text": ({"a.csv": csv_of("a dog", '["a", "b"]')}, "a.csv", "a.csv: the column caption",
                     "holds the text of a list", "a jsonl or parquet file has lists of captions"),
    "Karpathy's lists": ({"a.json": [{"image": "0.png", "sentences": [{"raw": "a dog"}]}]},
                         "a.json", "--caption-column: there is no column 'caption', 'captions'"),
    "dicts": ({"a.jsonl": jsonl_of({"raw": "a dog"})}, "a.jsonl", "captions are texts or lists"),
    "lists of lists": ({"a.jsonl": jsonl_of([["a", "b"]])}, "a.jsonl", "texts or lists of texts"),
    "a number among texts": ({"a.jsonl": jsonl_of("a", 3)}, "a.jsonl", "the column caption holds"),
    "two labels": ({"a.csv": f"image,caption,label\n0.png,x,{LONG}\n0.png,y,dog\n"}, "a.csv",
                   "0.png has the labels 'xxx", "'dog', but may have one"),
    "label 3.0": ({"a.csv": csv_of("3.0", "", column="label")}, "a.csv", "as pandas writes whole"),
    "start": ({"a.mp4": b"", "a.csv": f"{CLIPS}{LONG},2,x\n"}, "a.csv", "a.csv: 'xxx",
              "in the column start is no number of seconds; an empty cell is the video's own"),
    "videos inside": ({"a.parquet": [{"video": b"x", "caption": "y"}]}, "a.parquet",
                      "the column video holds videos: write them to files"),
    "other columns": ({"train.csv": BOTH, "test.csv": "image,text\n1.png,y\n"}, "",
                      "it has the columns caption and text; --caption-column says"),
    "other kinds": ({"train.jsonl": jsonl_of("a"), "test.jsonl": jsonl_of(["b"])}, "",
                    "the column caption is List(Value('string')) in one file or split and Value"),
    # ---- splits ----
    "word": ({"a.csv": f"{SPLITS}{LONG}\n"}, "a.csv", "in the column split is none of train, val"),
    "subset": ({"a.csv": csv_of("train", " Test ", column="subset")}, "a.csv",
               "the column subset holds 'Test', 'train'; call it split if it divides the rows"),
    "split against files": ({"train.csv": f"{SPLITS}val\n", "test.csv": f"{SPLITS}val\n"}, "",
                            "the column split names other splits than the files"),
    "split without captions": ({"a.csv": "image,caption,split\n0.png,x,train\n1.png,,test\n"},
                               "a.csv", "no row of the split test has a caption and a file"),
    "empty val": ({"val/cat/.keep": "", **two_splits("train", "test")}, "",
                  "val has no file; remove it if a part of train may take its place"),
    "table of no split": ({"train.csv": BOTH, "test.csv": BOTH, "sample_submission.csv": BOTH}, "",
                          "sample_submission.csv names no split: call it train, val or test, give"),
    "trainval beside val": ({"trainval.csv": BOTH, "val.csv": BOTH}, "", "the name trainval seems"),
    "tar of no split": ({"test.tar": tar_samples([0], "jpg", "txt"),
                         "a.tar": tar_samples([1], "jpg", "txt")}, "",
                        "a.tar names no split, as others do"),
    "long name": ({"metadata.csv": f"file_name,text\ntrain/0.png,x\n{LONG}.png,y\n"}, "",
                  "xxx... names no split, as others do: it, or a folder around it, needs the"),
    # ---- folders ----
    "holdout": (two_splits("train", "holdout"), "", "the name holdout seems to mean a split"),
    "extra": (two_splits("train", "extra"), "", "extra/cat/0.png is not in a class folder of "),
    "splits as classes": (images("train", "test"), "", "test, train seem to be splits, but"),
    "splits below classes": (images("cat/train", "cat/test", "dog/train"), "", "not in a class"),
    "one class": (images("train/cat", "test/cat"), "", "cat is its only class folder, so there"),
    "a loose image": ({"0.png": PNG, **images("cat", "dog")}, "", "0.png is not in a class folder"),
    "images and videos": ({"cat/a.mp4": b"", **images("cat", "dog")}, "", "read in different ways"),
    "images beside a tar": ({"0.tar": tar_samples([0], "jpg", "txt"), **images("cat")}, "",
                            "has both ", "move one kind away, or give it alone"),
    "table beside classes": ({"labels.csv": BOTH, **images("cat", "dog")}, "",
                             "labels.csv names no split: call it train"),
    "metadata and a table": ({"metadata.csv": "file_name,text\n0.png,x\n", "a.csv": BOTH}, "",
                             "which are read in different ways"),
    "NAME.txt": ({"00/0.png": PNG, "00/0.txt": "x"}, "", "00/0.txt beside 0.png is not read"),
    "data card": ({"README.md": "---\nconfigs:\n- config_name: a\n---\n", "train.csv": BOTH}, "",
                  "README.md says which files are which split, which is not read: give a folder"),
    # ---- tars ----
    "no text": ({"a.tar": tar_samples(range(6), "jpg", "json")}, "a.tar", "6 samples left out",
                "--caption-column: there is no column 'txt'; there are: 'jpg', 'json'"),
    "list in a tar": ({"a.tar": {"0": {"png": PNG, "txt": b'["a", "b"]'}}}, "a.tar",
                      "'[\"a\", \"b\"]' is the text of a list, but needs a caption a line"),
    "class name": ({"a.tar": {"0": {"png": PNG, "cls": b"cat"}}}, "a.tar", "first 0 of ", "'cat'"),
    "no class": ({"a.tar": {"0": {"png": PNG, "cls": b"-1"}}}, "a.tar", "the class is -1"),
    "broken tar": ({"a.tar": b"x" * 1024}, "a.tar", "a.tar: not a tar that can be read to its end")}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, tmp_path):
    files, path, *words = REFUSALS[name]
    write_files(tmp_path, files)
    complains(tmp_path / path, "train", *words)
    with pytest.raises(UserError) as error:
        common.load_data(str(tmp_path / path), "train")
    assert LONG not in str(error.value)


@pytest.mark.parametrize("name, words", [
    ("/no/such", "/no/such: no such file or folder"),
    ("no/such.csv", "no/such.csv: no such file or folder"),
    ("emojis", "no hub id (org/name), and no known set; the nearest: emoji, "),
    ("nobody-at-all/nothing", "--dataset nobody-at-all/nothing: ")])
def test_names_of_nothing(name, words):
    complains(name, "train", words)


@pytest.mark.parametrize("cell", [
    "('a dog', 'b')", "{'raw': 'a dog'}", "array(['a', 'b'], dtype=object)", "[['a', 'b']]",
    "['a'\n 'b']", "[nan, 'a']", "[]"])
def test_the_text_of_a_container_is_no_caption(cell, tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl_of("a dog", cell))
    complains(tmp_path / "a.jsonl", "train", "the column caption holds the text of a list")


def test_brackets_alone_are_no_list(tmp_path):
    cells = ["[music]", "[applause] 'thanks'", "[2019]", "a 'dog'", '("so he said")', "(a dog)"]
    (tmp_path / "a.jsonl").write_text(jsonl_of(*cells))
    assert captions_of(tmp_path / "a.jsonl") == sorted([cell] for cell in cells)


def test_classes_that_two_files_number_in_other_ways(tmp_path):
    for split, names in {"train": ["bird", "cat"], "test": ["cat", "dog"]}.items():
        features = datasets.Features({
            "image": datasets.Image(), "caption": datasets.Value("string"),
            "label": datasets.ClassLabel(names=names)})
        rows = {"image": [{"bytes": PNG}], "caption": ["x"], "label": ["cat"]}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(str(tmp_path / f"{split}.parquet"))
    complains(tmp_path, "train", "the column label is ClassLabel(names=['cat', 'dog']) in one file")


def test_two_ways_to_one_folder_and_names_that_are_no_text(tmp_path):
    write_files(tmp_path / "a", images("cat", "dog"))
    (tmp_path / "a" / "also").symlink_to(tmp_path / "a" / "cat")
    complains(tmp_path / "a", "train", "are one folder, by a link; remove the link")
    os.makedirs(os.fsencode(tmp_path / "b") + b"/caf\xe9")
    (tmp_path / "b" / os.fsdecode(b"caf\xe9") / "0.png").write_bytes(PNG)
    complains(tmp_path / "b", "train", "its name is not UTF-8; rename it")


# ======================================== files, columns, rows ====================================
def test_links_to_folders_are_followed(tmp_path):
    write_files(tmp_path, images("classes/bus", "classes/car", "disk/plane"))
    (tmp_path / "classes" / "plane").symlink_to(tmp_path / "disk" / "plane")
    keys = keys_of(tmp_path / "classes")["train"]
    assert keys == {f"{name}/{i}.png" for name in ("bus", "car", "plane") for i in range(3)}
    write_clips(tmp_path / "disk" / "videos", {0: "video0.mp4"})
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "more").symlink_to(tmp_path / "disk" / "videos")
    path = write_rows(tmp_path / "a.csv", ["video", "caption"], [("video0", "x")])
    assert keys_of(path, video_dir=str(tmp_path / "videos")) == {"train": {"video0"}}


def test_files_that_are_not_read_are_counted(tmp_path):
    """Images that no row of metadata names, too; hidden files are none of the user's."""
    files = {"cat/x.heic": b"", "dog/unnamed": b"", "cat/._0.png": b"", "__MACOSX/._1.png": b""}
    write_files(tmp_path / "a", files | images("cat", "dog"))
    assert len(keys_of(tmp_path / "a")["train"]) == 6
    assert f"2 files not read, first {tmp_path}/a/cat/x.heic" in note_of(tmp_path / "a")
    text = "file_name,caption\ncat/0.png,x\ndog/unnamed,y\n"
    write_files(tmp_path / "b", files | images("cat") | {"metadata.csv": text})
    assert keys_of(tmp_path / "b") == {"train": {"cat/0.png", "dog/unnamed"}}
    assert f"3 files not read, first {tmp_path}/b/cat/1.png" in note_of(tmp_path / "b")
    with tarfile.open(tmp_path / "mac.tar", "w") as tar:
        for i in range(6):
            for name, content in ((f"{i}.png", PNG), (f"{i}.txt", b"words")):
                for member in (f"._{name}", name):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    assert keys_of(tmp_path / "mac.tar") == {"train": {str(i) for i in range(6)}}
    assert "left out" not in note_of(tmp_path / "mac.tar")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tar"])
def test_a_file_of_the_same_time_and_size_is_read_again(kind, tmp_path):
    """As tar -x or cp -p leave it, and in the same process."""
    path = tmp_path / f"a.{kind}"
    for number in (1, 2):
        if kind == "tar":
            write_tar(path, {f"{number}-{i}": {"png": PNG, "txt": b"x"} for i in range(6)})
        else:
            rows = [(f"{number}.{i}.png", "x") for i in range(6)]
            write_rows(path, ["image", "caption"], rows)
        os.utime(path, (1e9, 1e9))
        assert {key[0] for key in keys_of(path)["train"]} == {str(number)}


@pytest.mark.parametrize("image, text", [
    ("filepath", "title"), ("img", "text"), ("jpg", "txt"), ("file_name", "captions")])
def test_usual_names_of_columns_need_no_flag(image, text, tmp_path):
    rows = [(f"{i}.png", f"words, of {i}", "ab"[i % 2]) for i in range(4)]
    path = write_rows(tmp_path / "a.tsv", [image, text, "class"], rows)
    assert captions_of(path) == [[f"words, of {i}"] for i in range(4)]
    assert open_splits(path)["train"].label_names == ["a", "b"]


def test_column_flags_and_data_dir(tmp_path):
    write_images(tmp_path / "pictures", range(4))
    rows = [(f"{i:03}.png", caption(i), "other words", "0010"[i]) for i in range(4)]
    path = str(write_rows(tmp_path / "a.csv", ["picture", "said", "text", "kind"], rows))
    flags = {"image_column": "picture", "caption_column": "said", "label_column": "kind"}
    data = common.load_data(path, "train", data_dir=str(tmp_path / "pictures"), **flags)
    assert data.captions(2) == [caption(2)] and data.label_names == ["0", "1"]
    assert data.labels.tolist() == [0, 0, 1, 0]
    assert number_of(data.read(3)) == 3
    for flag in flags:
        words = f"--{flag.replace('_', '-')}: there is no column 'none'; there are: 'picture', "
        complains(path, "train", words, **flags | {flag: "none"})


def test_cells_of_a_csv_are_text_and_an_index_column_may_have_no_name(tmp_path):
    """000 is a file name and NA a caption, not a number and nothing; a quoted field may have a line
    break, which is no row."""
    texts = ["NA", "000", "null", "nan", "two\nlines"]
    rows = [(k, f"{k:03}", text) for k, text in enumerate(texts)]
    splits = open_splits(write_rows(tmp_path / "a.csv", ["", "image", "caption"], rows))
    cells = {d.key(i): d.captions(i) for d in splits.values() for i in range(len(d))}
    assert cells == {f"{k:03}": [text] for k, text in enumerate(texts)}


def test_rows_of_one_image_are_one_example_and_those_without_something_are_counted(tmp_path):
    rows = [("0", "a", "cat"), ("", LONG, "cat"), ("2", " ", "dog"), ("3", "d", ""),
            ("4", "e", "dog"), ("4", "f", ""), ("0", "c", "cat"), ("0", "a", "cat")]
    path = write_rows(tmp_path / "a.csv", ["image", "caption", "label"], rows)
    data = common.load_data(str(path), "train")
    assert data.column("captions") == [["a", "c"], ["d"], ["e", "f"]]
    assert data.labels.tolist() == [0, -1, 1]
    assert "2 rows without an image or a caption left out" in data.note and LONG not in data.note
    assert "1 without a class" in data.note
    rows = [("0", ["a", "b"]), ("1", []), ("2", ["c"])]
    path = write_rows(tmp_path / "b.jsonl", ["image", "captions"], rows)
    data = common.load_data(str(path), "train")
    assert data.column("captions") == [["a", "b"], ["c"]]
    assert "1 row without an image or a caption left out, the first: 1; " in data.note


def test_a_column_label_is_enough_without_captions(tmp_path):
    rows = [(f"{i}.png", "ab"[i % 2]) for i in range(12)]
    path = write_rows(tmp_path / "a.csv", ["image", "label"], rows)
    assert common.load_data(str(path), "train", by_class=True).label_names == ["a", "b"]
    complains(path, "train", "--caption-column: there is no column 'caption', 'captions'")


def test_captions_unfolded(tmp_path):
    """Of training; evaluations keep all captions."""
    rows = []
    for i, split in enumerate(("train", "train", "val", "test")):
        rows += [(f"{i}.png", text, split) for text in takes(i)]
    path = str(write_rows(tmp_path / "a.csv", ["image", "caption", "split"], rows))
    unfolded = common.load_data(path, "train", unfold_captions=True)
    expected = [[text] for i in range(2) for text in takes(i)]
    assert [unfolded.captions(k) for k in range(4)] == expected
    assert common.load_data(path, "test", unfold_captions=True).captions(0) == takes(3)


@pytest.mark.parametrize("place", ["disk", "table"])
def test_images_have_no_windows(place, tmp_path):
    """Rows of one image are one example, whatever columns start and end say."""
    rows = [(f"{i // 2}.png", caption(i), float(i), i + 1.0) for i in range(8)]
    if place == "table":
        rows = [({"bytes": encode(picture(i // 2)), "path": None}, *rows[i][1:]) for i in range(8)]
    path = write_rows(tmp_path / "a.parquet", ["image", "caption", "start", "end"], rows)
    assert sorted(captions_of(path)) == [[caption(i), caption(i + 1)] for i in range(0, 8, 2)]


def test_samples_of_a_tar_without_a_class_are_counted(tmp_path):
    """With captions they stay, and the classes are no captions."""
    samples = tar_samples(range(9), "jpg", "cls")
    for key in list(samples)[::4]:
        samples[key]["cls"] = b"-1"
    path = write_tar(tmp_path / "a.tar", samples)
    assert {text for [text] in captions_of(path)} == {"class 0", "class 1", "class 2"}
    assert "3 samples left out, first 000000 of " in note_of(path)
    for number, parts in enumerate(samples.values()):
        parts["txt"] = f"class {number + 5} of steam engines".encode()
    path = write_tar(tmp_path / "b.tar", samples)
    assert len(captions_of(path)) == 9
    assert "the classes serve as captions" not in note_of(path)


# ---------------------------------------- pictures in tables -------------------------------------
ROWS = [(i, k) for i in range(40) for k in range(3)]


def write_pictures(path, paths):
    """A parquet file of 40 pictures with three captions each, a row for each caption."""
    cells = [{"bytes": encode(picture(i)), "path": path} for (i, _), path in zip(ROWS, paths)]
    table = {"image": cells, "caption": [caption(i, k) for i, k in ROWS]}
    table = datasets.Dataset.from_dict(table).cast_column("image", datasets.Image())
    table.to_parquet(str(path))
    return path


def check_pictures(path):
    """Each of 40 pictures is one example with its captions, in one split."""
    pictures = {}
    for split, data in open_splits(path).items():
        for i in range(len(data)):
            pixels = data.read(i).numpy().tobytes()
            assert pixels not in pictures
            pictures[pixels] = (split, data.captions(i))
    captions = sorted(captions for _, captions in pictures.values())
    assert captions == sorted([[caption(i, k) for k in range(3)] for i in range(40)])


@pytest.mark.parametrize("kind", ["no path", "a path each", "one path", "with and without ./"])
def test_rows_of_one_picture_in_a_table_are_one_example(kind, tmp_path):
    paths = {
        "no path": [None] * 120,
        "a path each": [f"{i}.png" for i, _ in ROWS],
        "one path": ["image.png"] * 120,
        "with and without ./": ["./" * k + f"{i}.png" for i, k in ROWS]}[kind]
    check_pictures(write_pictures(tmp_path / "a.parquet", paths))


@pytest.mark.parametrize("kind", ["bytes", "large bytes", "struct", "struct without path"])
def test_pictures_as_other_programs_write_them(kind, tmp_path):
    contents = [encode(picture(i)) for i, _ in ROWS]
    column = {
        "bytes": pa.array(contents, pa.binary()),
        "large bytes": pa.array(contents, pa.large_binary()),
        "struct": pa.array([{"bytes": x, "path": None} for x in contents]),
        "struct without path": pa.array([{"bytes": x} for x in contents])}[kind]
    table = pa.table({"image": column, "caption": [caption(i, k) for i, k in ROWS]})
    pq.write_table(table, tmp_path / "a.parquet")
    check_pictures(tmp_path / "a.parquet")


def test_pictures_of_one_name_or_without_bytes(tmp_path):
    """They are known by their row; one without bytes is counted."""
    rows = [(None, caption(0))]
    for i in range(1, 8):
        rows.append(({"bytes": encode(picture(i)), "path": "a.png"}, caption(i)))
    data = all_rows(write_rows(tmp_path / "train.parquet", ["image", "caption"], rows))
    assert data.column("key") == [str(i) for i in range(1, 8)]
    assert [number_of(data.read(k)) for k in range(7)] == list(range(1, 8))
    assert "1 row without an image or a caption left out, the first: " in data.note


# ---------------------------------------- videos -------------------------------------------------
@pytest.mark.parametrize("file", ["a.csv", "a.jsonl"])
def test_windows_of_one_video_are_examples_of_their_own(file, tmp_path):
    """Also where one side or both are open."""
    write_video(tmp_path / "long.mp4", range(100))
    windows = {(1, 1.5): [10, 14], (3, 3.5): [30, 34], (None, None): [0, 99], (9, None): [90, 99],
               (None, 1): [0, 9]}
    rows = [("long.mp4", *window, f"{window}, {t}") for t in range(2) for window in windows]
    path = write_rows(tmp_path / file, ["video", "start", "end", "caption"], rows)
    examples = {}
    for data in open_splits(path, frames=2).values():
        for i in range(len(data)):
            examples[data.key(i)] = (data.captions(i), numbers(data.read(i)))
    expected = [([f"{window}, {t}" for t in range(2)], shown) for window, shown in windows.items()]
    assert len(examples) == 5 and sorted(examples.values()) == sorted(expected)


def test_video_dir_finds_videos_by_path_name_and_stem(tmp_path):
    """Folders in a name decide: another one's video is missing. A dot is no ending: else clip.2
    would be the video of clip."""
    names = {0: "deep/er/000.mp4", 1: "001.webm", 2: "v_002.avi", 3: "x.003.mp4", 4: "004.gif",
             5: "P05/01.mp4", 6: "P06/01.mp4"}
    write_clips(tmp_path / "all", names)
    # a folder, as EPIC-KITCHENS in pieces has them
    (tmp_path / "all" / "no_video" / "000.mp4").mkdir(parents=True)
    asked = ["er/000", "001.mp4", "002", "x.003", "004", "P05/01", "P06/01.mp4", "elsewhere/001",
             "P07/01", "001.2"]
    rows = [(name, str(k)) for k, name in enumerate(asked)]
    path = write_rows(tmp_path / "notes" / "a.csv", ["video", "caption"], rows)
    clips = {}
    for data in open_splits(path, video_dir=str(tmp_path / "all"), frames=4).values():
        for i in range(len(data)):
            clips[data.captions(i)[0]] = number_of(data.read(i))
    assert clips == {str(k): k for k in range(7)}
    assert "3 videos not there, first elsewhere/001" in data.note
    path = write_rows(tmp_path / "notes" / "b.csv", ["video", "caption"], [("01", "x")])
    complains(path, "train", "01 may be ", "P05/01.mp4 or ", "P06/01.mp4: remove one of them",
              video_dir=str(tmp_path / "all"))


# ======================================== splits ==================================================
def test_a_column_split_says_which_rows_are_whose(tmp_path):
    """Each row keeps its own picture, caption and class."""
    words = ["train", "val", "train", "test", "validation", "train"]
    names = write_images(tmp_path, range(6))
    rows = [(name, f"words {k}", ["dog", "cat"][k % 2], words[k]) for k, name in enumerate(names)]
    path = write_rows(tmp_path / "own.csv", ["image", "caption", "label", "split"], rows)
    for split, wanted in (("train", [0, 2, 5]), ("val", [1, 4]), ("test", [3])):
        data = common.load_data(str(path), split)
        assert data.column("captions") == [[f"words {k}"] for k in wanted]
        assert data.label_names == ["cat", "dog"]
        for i, k in enumerate(wanted):
            assert number_of(data.read(i)) == k and data.labels[i] == (k + 1) % 2
    rows = [("000.png", "x", "test")]
    path = write_rows(tmp_path / "test.csv", ["image", "caption", "split"], rows)
    complains(path, "train", "no train split; it has: test")  # it is evaluated, nothing trained on
    write_rows(tmp_path / "test" / "test-0.csv", ["image", "caption", "split"], rows)
    assert keys_of(tmp_path / "test") == {"test": {"000.png"}}


def test_an_example_of_several_splits_stays_in_the_last_alone(tmp_path):
    """Also behind a link of either kind; windows of one video are examples of their own, but
    noted."""
    write_files(tmp_path, images("x", count=12))
    os.link(tmp_path / "x" / "6.png", tmp_path / "x" / "hard.png")
    (tmp_path / "x" / "link.png").symlink_to(tmp_path / "x" / "5.png")
    rows = [(f"x/{i}.png", "x", "train" if i < 9 else "test") for i in range(12)]
    rows += [("x/3.png", "y", "test"), ("x/link.png", "y", "val"), ("x/0.png", "y", "train"),
             ("x/hard.png", "y", "test")]
    path = write_rows(tmp_path / "a.csv", ["image", "caption", "split"], rows)
    keys = keys_of(path)
    assert keys["train"] == {f"x/{i}.png" for i in (0, 1, 2, 4, 7, 8)}
    assert keys["val"] == {"x/link.png"} and "x/3.png" in keys["test"]
    words = "WARNING: 3 examples of train or val left out, which are in val or test, too, the first"
    assert words in note_of(path)

    (tmp_path / "a.mp4").touch()
    rows = [("a.mp4", 0, 1, "x", "train"), ("a.mp4", 1, 2, "y", "test")]
    path = write_rows(tmp_path / "c.csv", ["video", "start", "end", "caption", "split"], rows)
    assert keys_of(path) == {"train": {"a.mp4 0-1 s"}, "test": {"a.mp4 1-2 s"}}
    assert "WARNING: 1 video with windows in several splits" in note_of(path)

    for name, some in (("train", range(6)), ("test", range(4, 8))):
        rows = [(encode(picture(i)), caption(i)) for i in some]
        write_rows(tmp_path / "tables" / f"{name}.parquet", ["image", "caption"], rows)
    assert {split: len(some) for split, some in keys_of(tmp_path / "tables").items()} == {
        "train": 4, "test": 4}
    assert "2 examples of train or val left out" in note_of(tmp_path / "tables")


def test_held_out_splits_are_a_twentieth_each_and_the_same_every_time(tmp_path):
    """Bands of one hash: val holds what a smaller one held."""
    names = [f"{i:03}.png" for i in range(4000)]
    rows = [(name, f"words of {name}") for name in names]
    path = write_rows(tmp_path / "a.csv", ["image", "caption"], rows)
    sets = open_splits(path)
    keys = {split: data.column("key") for split, data in sets.items()}
    assert keys == held_out(names)
    assert all(160 < len(keys[split]) < 240 for split in ("val", "test"))
    assert "held out for val and test" in sets["train"].note
    assert "held out of 4,000" in sets["val"].note
    # a run may be resumed years later: these must never change
    assert keys["val"][:4] == ["029.png", "078.png", "146.png", "153.png"]
    assert keys["test"][:4] == ["007.png", "027.png", "054.png", "069.png"]
    for fraction in (0.01, 0.3):
        others = open_splits(path, holdout_fraction=fraction)
        other = {split: set(data.keys()) for split, data in others.items()}
        for split in ("val", "test"):
            assert len(other[split]) == pytest.approx(4000 * fraction, rel=0.5)
            assert "fewer than 20 rows" not in others[split].note
        assert len(set.union(*other.values())) == 4000 == sum(map(len, other.values()))
        assert other["val"] < set(keys["val"]) or other["val"] > set(keys["val"])


def test_windows_of_a_video_stay_together(tmp_path):
    """Seconds as they come, 1e-05 too; another window moves none."""
    windows = [(None, 3), (1e-5, 2), (2, 4.5), (7.25, None), (100000.5, 200000), (1e6, 2e6)]
    videos = [f"v{k}.mp4" for k in range(100)]
    write_files(tmp_path, dict.fromkeys(videos, b"not opened"))
    for first in (3, 0):
        rows = []
        for start, end in windows[first:]:
            rows += [(video, start, end, f"{video} {start}") for video in videos]
        path = write_rows(tmp_path / f"{first}.jsonl", ["video", "start", "end", "caption"], rows)
        splits = open_splits(path)
        names = {split: {key.split()[0] for key in data.keys()} for split, data in splits.items()}
        assert {split: sorted(some) for split, some in names.items()} == held_out(sorted(videos))


@pytest.mark.parametrize(
    "num_images, least", [(5, 0), (6, 1), (12, 2), (60, 10), (119, 19), (120, 20), (300, 20)])
def test_small_data_hold_out_twenty_images_or_a_sixth(num_images, least):
    fractions = np.random.default_rng(num_images).random(num_images)
    rows = np.concatenate([fractions, fractions[: num_images // 2]])  # windows of some videos
    masks = held_out_masks(rows, ["val", "test"], HELD_OUT_FRACTION)
    for split, low in (("val", 0.0), ("test", 0.05)):
        in_band = ((fractions >= low) & (fractions < low + 0.05)).sum()
        assert len(np.unique(rows[masks[split]])) == max(least, in_band) or split == "val"
        assert len(np.unique(rows[masks[split]])) >= least
        for fraction in np.unique(rows[masks[split]]):  # windows stay together
            assert masks[split][rows == fraction].all()
    assert not (masks["val"] & masks["test"]).any()


def test_few_rows_that_are_held_out_are_warned_of(tmp_path):
    sets = open_splits(write_captions(tmp_path, 24))
    for split in ("val", "test"):
        warning = "WARNING: fewer than 20 rows, --holdout-fraction holds out more"
        assert len(sets[split]) == 4 and warning in sets[split].note


def test_held_out_files_of_the_hub_depend_neither_on_the_cache_nor_on_the_commit(
        tmp_path, monkeypatch):
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    names = []
    for home, commit in (("a", "1" * 40), ("b/c", "2" * 40)):
        files = []
        for kind in ("cat", "dog"):
            folder = tmp_path / home / "datasets--some--pets" / "snapshots" / commit / "data" / kind
            files += [str(folder / name) for name in write_images(folder, range(30))]
        cache = tmp_path / home / "datasets"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        builder = ImageFolder(dataset_name="pets", hash=commit, data_files={"train": files})
        builder.download_and_prepare()
        config = cache / "pets" / builder.config_id
        config.rename(config.with_name("default"))
        (cache / "pets").rename(cache / "some___pets")
        monkeypatch.chdir(tmp_path / home)
        splits = open_splits("some/pets", image_size=len(names) + 1)  # past the cache of options
        names.append({split: set(data.keys()) for split, data in splits.items()})
    assert names[0] == names[1] and "cat/000.png" in set.union(*names[0].values())
    assert len(names[0]["test"]) == 10


def test_captions_are_exchanged_in_training_alone(tmp_path):
    name = write_captions(tmp_path, 60)
    clean = {split: common.load_data(name, split) for split in ("train", "val", "test")}
    noisy = {split: common.load_data(name, split, caption_noise=0.5) for split in clean}
    for split in ("val", "test"):
        assert noisy[split].column("captions") == clean[split].column("captions")
    before, after = (splits["train"].column("captions") for splits in (clean, noisy))
    is_exchanged = [a != b for a, b in zip(after, before, strict=True)]
    assert noisy["train"].column("noisy").tolist() == is_exchanged
    assert sum(is_exchanged) == round(0.5 * len(before))
    assert sorted(after) == sorted(before)
    assert f"{sum(is_exchanged)} examples with another's captions" in noisy["train"].note
    unfolded = common.load_data(name, "train", caption_noise=0.5, unfold_captions=True)
    assert unfolded.captions(0) == [after[0][0]]
    write_files(tmp_path / "classes", images("cat", "dog", count=30))
    complains(tmp_path / "classes", "train", "has no captions to exchange", caption_noise=0.5)


# ======================================== sets that are evaluated alone ===========================
@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """train.csv of 40 images, test.csv of 30 others, both.csv of all."""
    root = tmp_path_factory.mktemp("own")
    names = write_images(root, range(70))
    for file, some in (("train", names[:40]), ("test", names[40:]), ("both", names)):
        rows = [(name, f"words of {name}") for name in some]
        write_rows(root / f"{file}.csv", ["image", "caption"], rows)
    return root


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """A run on train.csv."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_script(temo, folder, *TINY, "--dataset", root / "train.csv")
    return folder


def parse(root, *files, train="train.csv"):
    files = [str(root / file) for file in files]
    return temo.parse_args(["--dataset", str(root / train), "--eval-datasets", *files])


def test_a_test_file_of_ones_own_is_test_as_a_whole(root):
    _, sets = open_data(parse(root, "test.csv", "train.csv"))
    test = sets[str(root / "test.csv")]
    assert list(test) == ["test"] and len(test["test"]) == 30
    own = sets[str(root / "train.csv")]  # the training set still has its held-out splits
    assert (len(own["val"]), len(own["test"])) == (6, 6)


def test_beside_a_test_file_train_gives_val_and_keeps_the_rest(root):
    train, sets = open_data(parse(root, "test.csv"))
    own = sets[str(root / "train.csv")]
    assert list(sets[str(root / "test.csv")]) == ["test"] and list(own) == ["val"]
    assert (len(train), len(own["val"])) == (34, 6)
    assert not set(train.keys()) & set(own["val"].keys())
    assert train.note == "6 of 40 held out for val, by a hash of the name"
    args = temo.parse_args(["--eval-every", "0", "--eval-datasets", str(root / "test.csv")])
    _, sets = open_data(args)
    assert list(sets) == [str(root / "test.csv")]  # emoji is no file of the user


def test_rows_that_were_trained_on_are_left_out_and_counted(root):
    train, sets = open_data(parse(root, "both.csv"))
    test = sets[str(root / "both.csv")]["test"]
    assert len(train) == 34 and len(test) == 36
    assert not set(train.keys()) & set(test.keys())
    assert "34 rows left out, whose files were trained on" in test.note
    rows = [(name, "words") for name in train.keys()]
    write_rows(root / "again.csv", ["image", "caption"], rows)
    with pytest.raises(EmptySplit, match="all of its 34 rows were trained on"):
        open_data(parse(root, "again.csv"))


def test_files_inside_tables_are_said_not_to_be_compared(tmp_path, capsys):
    for name in ("train", "test"):
        rows = [(encode(picture(i)), caption(i)) for i in range(30)]
        write_rows(tmp_path / f"{name}.parquet", ["image", "caption"], rows)
    words = "WARNING: files inside tables and tars are not compared with those trained on"
    run_script(temo, tmp_path / "run", *TINY, "--dataset", tmp_path / "train.parquet")
    capsys.readouterr()
    for name, count in (("train", 0), ("test", 1)):
        evaluated(tmp_path / "run", "--datasets", tmp_path / f"{name}.parquet")
        assert capsys.readouterr().out.count(words) == count


def test_eval_py_reads_a_test_file_as_a_whole(root, run, tmp_path, capsys):
    files = [str(root / "test.csv"), str(root / "both.csv")]
    results = evaluated(run, "--output-dir", tmp_path, "--datasets", *files)
    assert [results[file]["metrics"]["images"] for file in files] == [30, 42]
    assert "28 rows left out, whose files were trained on" in capsys.readouterr().out


def test_files_of_extra_pairs_are_left_out_of_other_sets_alone(root, tmp_path, capsys):
    """The sets that the run evaluated keep all rows: training has left those out of the pairs."""
    names = sorted(path.name for path in root.glob("*.png"))
    for file, some in (("pairs", names[30:50]), ("evaluated", names[45:60])):
        rows = [(name, f"words of {name}") for name in some]
        write_rows(root / f"{file}.csv", ["image", "caption"], rows)
    flags = ["--extra-pairs", root / "pairs.csv", "--eval-datasets", root / "evaluated.csv"]
    flags = ["--dataset", root / "train.csv", *flags, "--caption-noise", 0.5, *NO_META]
    run_script(mama, tmp_path / "run", *TINY, *flags)
    args = mama.parse_args([*TINY, *map(str, flags)])
    train, _ = open_data(args)
    is_other = []  # of the training set, and of the pairs
    for row, key in enumerate(train.keys()):
        is_other.append(train.captions(row) != [f"words of {key}"])
    assert train.column("noisy").tolist() == is_other
    num_own = len(train.before_extra_pairs)
    assert 0 < sum(is_other[:num_own]) < num_own < len(train)
    assert 0 < sum(is_other[num_own:]) < len(train) - num_own

    trained = set(train.keys()) | set(open_pairs(str(root / "pairs.csv"), args).keys())
    files = [str(root / "test.csv"), str(root / "evaluated.csv")]
    results = evaluated(tmp_path / "run", "--tasks", "retrieval", "--datasets", *files)
    num_trained = len(trained & set(names[40:]))
    assert num_trained >= 5
    num_images = [results[file]["metrics"]["images"] for file in files]
    assert num_images == [30 - num_trained, 15]
    assert f"{num_trained} rows left out, whose files were" in capsys.readouterr().out


def test_neighbours_are_those_of_the_set_without_extra_pairs(root, tmp_path):
    """In training as in eval.py."""
    names = sorted(path.name for path in root.glob("*.png"))
    rows = [(name, f"words of {name}", "ab"[k % 2]) for k, name in enumerate(names)]
    own = write_rows(root / "labelled.csv", ["image", "caption", "label"], rows[:40])
    more = write_rows(root / "unlabelled.csv", ["image", "caption"], [row[:2] for row in rows[40:]])
    flags = [*TINY, "--dataset", own, "--extra-pairs", more, *NO_META]
    trained = run_script(mama, tmp_path / "run", *flags)["test"][str(own)]
    loaded = evaluated(tmp_path / "run", "--tasks", "knn")[str(own)]["metrics"]
    assert trained["knn@1"] == loaded["knn@1"] and trained["knn@10"] == loaded["knn@10"]


def test_eval_py_warns_of_a_training_set_that_has_changed(tmp_path, capsys):
    """A file that was cut holds out other rows, some of which were trained on."""
    path = write_captions(tmp_path, 60)
    header, *lines = path.read_text().splitlines(keepends=True)
    second = [f"{line.partition(',')[0]},another caption {k}\n" for k, line in enumerate(lines)]
    path.write_text(header + "".join(lines + second))
    other = path.with_name("other.csv")
    other.write_text(header + "".join(lines[50:]))
    run_script(ncl, tmp_path / "run", *TINY, "--dataset", path, "--unfold-captions")
    capsys.readouterr()
    evaluated(tmp_path / "run", "--datasets", other)
    assert "has changed" not in capsys.readouterr().out
    path.write_text(header + "".join(lines[:40]))
    evaluated(tmp_path / "run", "--datasets", other)
    assert f"WARNING: {path} has changed since the run; rows that" in capsys.readouterr().out


def test_a_test_file_of_classes_learns_from_the_training_images(root, tmp_path, capsys):
    names = sorted(path.name for path in root.glob("*.png"))
    for file, some in (("train", names[:40]), ("test", names[40:])):
        rows = [(name, f"class {i % 2}") for i, name in enumerate(some)]
        write_rows(root / f"classes_{file}.csv", ["image", "label"], rows)
    flags = "--cpu --workers 0 --image-size 16 --batch-size 8 --max-steps 1 --eval-every 0".split()
    trained_on = str(root / "classes_train.csv")
    run_script(temperature_schedules, tmp_path / "run", *flags, "--dataset", trained_on)
    test = str(root / "classes_test.csv")
    results = evaluated(tmp_path / "run", "--datasets", test)[test]
    assert results["metrics"]["images"] == 30 and "knn@1" in results["metrics"]
    words = f"knn and probe learn from the training images of {trained_on}"
    assert words in capsys.readouterr().out


def test_held_out_names_of_a_meta_set_are_left_out_and_counted(root, tmp_path):
    sets = open_splits(root / "train.csv")
    train, splits = sets["train"], {split: sets[split] for split in ("val", "test")}
    names = [*train.keys()][:5] + [*splits["val"].keys()][:2] + [*splits["test"].keys()][:1]
    file = tmp_path / "clean.txt"
    file.write_text("\n".join(names))
    for others in (splits, {}):  # the training set need not be among those that are evaluated
        rows, description = named_rows(train, file, others)
        assert rows.tolist() == [0, 1, 2, 3, 4]
        assert description == "by name, 3 of val or test left out"
    file.write_text("\n".join([*names, "nobody"]))
    with pytest.raises(UserError, match="1 of its 9 names are not in train, first 'nobody'"):
        named_rows(train, file, splits)


def test_a_method_of_classes_needs_classes(tmp_path):
    names = write_images(tmp_path, range(12))
    path = write_rows(tmp_path / "flat.csv", ["image", "caption"], [(x, "words") for x in names])
    with pytest.raises(UserError, match="--label-column: there is no column 'label', "):
        run_script(temperature_schedules, tmp_path / "r", *TINY, "--dataset", path)


# ======================================== the start of a run ======================================
STOPPED = {
    "--batch-size 64": (
        "--batch-size 64: larger than the number of training examples of .*captions.csv, 16"),
    "--image-encoder resnet_99": "--image-encoder resnet_99: no image encoder has this name; the",
    "--image-encoder no/such": "no/such: ",
    "--paraphrases /no.jsonl": "--paraphrases /no.jsonl: .*/no.jsonl",
    "--text-encoder nobody/none": "nobody/none: .*connect",
    "--image-encoder resnet18-cifar --chunk-size 4": (
        "--chunk-size 4: resnet18-cifar has BatchNorm.* chunk"),
    "--init-from text.pt": "--init-from .*text.pt: ",
    "--init-from other.safetensors": (
        ".*none of its 1 tensors fits the model; its first names are .'other'., the"),
    "--init-from nan.safetensors": (
        r".*captions.csv \(val\): the model's outputs are not finite for \d+ of \d+.*a lower --lr"),
    "--lr 1e30 --lr-end 1e30 --grad-clip 0 --eval-every 0": (
        r"the loss is not finite at step 1 \(loss nan, .*tau 0.1, .*process 0: norms up to .*"
        r"keys \['\d+.png'.*a lower learning rate"),
    "--output-dir text.pt": ".*text.pt.*: .*Not a directory"}
if not find_spec("wandb"):
    STOPPED["--tracker wandb"] = "--tracker wandb: not installed: pip install wandb"
FEW_STEPS = "--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 2".split()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_captions(tmp_path_factory.mktemp("good"), 24)


def stopped(dataset, out, *flags):
    """The one line of the UserError that ends this run."""
    with pytest.raises(UserError) as error:
        run_script(temo, out / "a", *flags, base=[*FEW_STEPS, "--dataset", dataset])
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    return str(error.value)


@pytest.mark.parametrize("words", STOPPED)
def test_what_ends_a_run_before_or_in_its_first_steps(words, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_bytes(TEXT)
    save_file({"other": torch.zeros(2)}, "other.safetensors")
    save_file({"vision.projection.weight": torch.full((16, 128), float("nan"))}, "nan.safetensors")
    assert re.match(STOPPED[words], stopped(good, tmp_path, *words.split()))


def test_own_data_without_a_batch_size_take_what_fits(good, tmp_path, capsys):
    """And say so; a resumed run keeps it."""
    flags = [*"--cpu --workers 0 --max-steps 1 --image-size 16".split(), "--dataset", good]
    summary = run_script(temo, tmp_path / "r", *flags)
    out = capsys.readouterr().out
    assert summary["batch"] == 16 and "--batch-size 256 -> 16, which fits the data" in out
    assert "batch        16 = 1 x 16; " in out
    assert temo.parse_args(["--resume", str(tmp_path / "r")]).batch_size == 16


def test_the_first_image_that_cannot_be_read_is_named_without_addresses(good, tmp_path, capsys):
    """In evaluation, beside how many they are."""
    rows = good.read_text().splitlines()
    csv = tmp_path / "test.csv"
    csv.write_text("\n".join(rows[:7]) + "\n")
    for row in rows[1:7]:
        name = row.partition(",")[0]
        (tmp_path / name).write_bytes((good.parent / name).read_bytes())
    (tmp_path / rows[2].partition(",")[0]).write_bytes(TEXT)
    run_script(temo, tmp_path / "r", base=[*FEW_STEPS, "--dataset", good])
    capsys.readouterr()
    evaluated(tmp_path / "r", "--datasets", csv)
    output = capsys.readouterr()
    name = rows[2].partition(",")[0]
    assert (f"1 of 6 images cannot be read and are left out, the first: {name}: cannot identify "
            "image file\n") in output.out
    assert "left out: " not in output.out  # of tasks that nobody asked for
    assert "Generating" not in output.err  # bars of `datasets`


def test_too_many_bad_samples_stop_the_run(tmp_path):
    """Of 60 pictures two in the first batch cannot be read: counted, listed, and above
    --max-bad-fraction the end."""
    csv = write_captions(tmp_path / "data", 60)
    train = common.load_data(str(csv), "train")
    first = next(batches.epoch_batches(len(train), 8, 42, 0, 1))[1]
    bad = [train.key(int(i)) for i in first[[1, 4]]]
    for key, content in zip(bad, (TEXT, TRUNCATED)):
        (csv.parent / key).write_bytes(content)
    flags = [*FEW_STEPS, "--dataset", csv]
    summary = run_script(temo, tmp_path / "r", "--max-bad-fraction", 0.1, base=flags)
    assert summary["bad_samples"] == 2 and summary["steps"] == 2
    message = stopped(csv, tmp_path)
    assert re.match(r"2 of about 40 samples cannot be read, above --max-bad-fraction 0.01; the "
                    r"first: \S+: ", message)
    assert message.endswith("/bad_samples.txt lists, or train without them by "
                            "--max-bad-fraction 0.05")
    for folder in "ra":
        lines = (tmp_path / folder / "bad_samples.txt").read_text().splitlines()
        assert {line.split("\t")[0] for line in lines} == set(bad)
