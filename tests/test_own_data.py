"""The user's own data: the forms that are read, what is refused, which rows become examples, splits
that are held out, and data that are evaluated alone; and what ends a run in its first steps."""

import json
import os
import re

import common
from contrastive.core.processes import UserError
from contrastive.data import batches, held_out_masks, open_data
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
import temo
import temperature_schedules
from helpers import (
    CLASSES, TEXT, TRUNCATED, all_rows, caption, complains, encode, evaluated, numbers,
    open_splits, picture, run_script, tar_samples, write_captions, write_clips, write_files,
    write_images, write_parquet_images, write_rows, write_tar, write_video)

PNG = encode(picture(1))
HEAD = ["image", "caption"]
TINY = ("--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 1 "
        "--eval-every 0").split()


def keys_of(path, **options):
    """{split: its keys}, with splits that are held out of train in train."""
    keys = {}
    for split, data in open_splits(path, **options).items():
        if "held out of" in data.note:
            split = "train"
        keys.setdefault(split, set()).update(data.keys())
    return keys


def note_of(path):
    return next(iter(open_splits(path).values())).note


def images(*folders, count=3):
    """{path: content} of 0.png, 1.png, ... in each of these folders."""
    files = {}
    for folder in folders:
        for i in range(count):
            files[f"{folder}/{i}.png"] = PNG
    return files


# ======================================== the five forms ==========================================
def write_table(file):
    def write(folder, split, samples):
        names = write_images(folder / "files", samples)
        rows = []
        for i, name in zip(samples, names):
            rows.append((f"files/{name}", caption(i), CLASSES[i % 3]))
        write_rows(folder / file.replace("SPLIT", split), [*HEAD, "label"], rows)

    return write


def write_classes(folder, split, samples):
    for i in samples:
        write_images(folder / split / CLASSES[i % 3], [i])


def write_class_clips(folder, split, samples):
    for i in samples:
        write_clips(folder / split / CLASSES[i % 3], {i: f"{i}.mp4"})


def write_metadata(file):
    def write(folder, split, samples):
        names = write_images(folder / split, samples)
        rows = []
        for i, name in zip(samples, names):
            rows.append((name, caption(i)))
        write_rows(folder / split / file, ["file_name", "text"], rows)

    return write


def write_metadata_above(folder, split, samples):
    names = write_images(folder / split, samples)
    with open(folder / "metadata.jsonl", "a") as file:
        for i, name in zip(samples, names):
            row = {"file_name": f"{split}/{name}", "caption": caption(i)}
            file.write(json.dumps(row) + "\n")


def write_tars(*parts):
    def write(folder, split, samples):
        write_tar(folder / split / "0.tar", tar_samples(samples, *parts))

    return write


def write_parquet(folder, split, samples):
    write_parquet_images(folder / f"{split or 'train'}-00000-of-00001.parquet", samples)


# name: (writer, what is opened)
FORMS = {
    "csv": (write_table("a.csv"), "a.csv"),
    "tsv": (write_table("a.tsv"), "a.tsv"),
    "json": (write_table("a.json"), "a.json"),
    "jsonl": (write_table("a.jsonl"), "a.jsonl"),
    "parquet of paths": (write_table("a.parquet"), "a.parquet"),
    "parquet of images": (write_parquet, ""),
    "class folders": (write_classes, ""),
    "class folders of videos": (write_class_clips, ""),
    "metadata": (write_metadata("metadata.csv"), ""),
    "a tar": (write_tars("png", "txt"), "0.tar"),
    "tar of classes": (write_tars("png", "cls"), "")}
FORMS_OF_SPLITS = {
    "tables": write_table("SPLIT.csv"),
    "parquet of images": write_parquet,
    "class folders": write_classes,
    "metadata": write_metadata("metadata.jsonl"),
    "metadata above": write_metadata_above,
    "tars": write_tars("png", "txt")}
WITHOUT_CLASSES = ("metadata", "metadata above", "a tar", "tars", "pictures in a table")
# {split: its name, samples}: in any case, with numbers, and by another word
SPLITS = {"train": ("Train", range(8)), "val": ("VALIDATION", [8, 9]), "test": ("test2015", [10])}


def number_of(pixels):
    """Which sample this is: an image, or a clip."""
    if pixels.ndim == 4:
        return numbers(pixels)[0] // 8
    for i in range(12):
        if np.array_equal(pixels.permute(1, 2, 0), picture(i)):
            return i
    raise AssertionError("no sample looks like this")


def first_caption(form, i):
    """Of sample i; the class takes its place in forms that have no captions."""
    if form == "tar of classes":
        return f"class {i % 3}"
    if form.startswith("class folders"):
        return CLASSES[i % 3].replace("_", " ")
    return caption(i)


def check_examples(data, form="csv"):
    """Each example has its own caption and class. Returns: the numbers of the samples."""
    samples = []
    for k in range(len(data)):
        i = number_of(data.read(k))
        samples.append(i)
        assert data.captions(k)[0] == first_caption(form, i)
        if form not in WITHOUT_CLASSES:
            assert data.labels[k] == i % 3
    return samples


@pytest.mark.parametrize("form", FORMS)
def test_form_has_every_sample_once(form, tmp_path):
    write, name = FORMS[form]
    write(tmp_path, "", range(12))
    samples = []
    for split, data in open_splits(tmp_path / name, frames=4).items():
        assert data.split == split
        assert str(tmp_path) not in str(data.keys())  # a key does not change with the folder
        samples += check_examples(data, form)
    assert sorted(samples) == list(range(12))


@pytest.mark.parametrize("form", FORMS_OF_SPLITS)
def test_form_has_the_splits_that_it_names(form, tmp_path):
    for name, samples in SPLITS.values():
        FORMS_OF_SPLITS[form](tmp_path, name, samples)
    for split, (_, samples) in SPLITS.items():
        data = common.load_data(str(tmp_path), split)
        assert sorted(check_examples(data, form)) == list(samples)


def test_column_split_says_which_rows_are_whose(tmp_path):
    rows = []
    for name, samples in SPLITS.values():
        for i, file in zip(samples, write_images(tmp_path, samples)):
            rows.append((file, caption(i), CLASSES[i % 3], f" {name} "))
    path = write_rows(tmp_path / "a.csv", [*HEAD, "label", "split"], rows)
    for split, (_, samples) in SPLITS.items():
        data = common.load_data(str(path), split)
        assert check_examples(data) == list(samples)
        assert data.label_names == CLASSES


@pytest.mark.parametrize("name, split", [
    ("TRAIN", "train"), ("val-00000-of-00003", "val"), ("dev", "val"), ("valid", "val"),
    ("bus", None), ("protest", None), ("constrain", None), ("2014", None)])
def test_split_is_the_whole_name(name, split):
    assert split_of_name(name) == split


@pytest.mark.parametrize("name", ["Training", "trainset", "test images", "trainval", "valSet"])
def test_name_with_a_split_among_other_words_is_refused(name):
    with pytest.raises(ValueError, match=f"the name {name} seems to mean a split"):
        split_of_name(name)


def test_classes_and_images_may_have_words_of_splits(tmp_path):
    write_files(tmp_path, images("cat", "training shoes") | {"cat/test_0.png": PNG})
    assert len(keys_of(tmp_path)["train"]) == 7


# ======================================== what is refused =========================================
LONG = "x" * 500  # a message never shows so much of a cell
BOTH = "image,caption\n0.png,x\n"
SPLIT = "image,caption,split\n0.png,x,train\n"
META = "file_name,text\n0.png,x\n"


def jsonl_of(*captions):
    lines = []
    for i, text in enumerate(captions):
        lines.append(json.dumps({"image": f"{i}.png", "caption": text}) + "\n")
    return "".join(lines)


# what: (text of a.csv, or files of which a single one is opened, else their folder; words of the
# message)
REFUSALS = {
    # ---- files ----
    "ending": ({"a.xyz": ""}, "a.xyz is none of .csv, .tsv, "),
    "nothing": (
        {"a.bin": b"", "b.bin": b""},
        "has no file that can be read, but needs a folder"),
    "long row": (
        f"{BOTH}1.png,a, b\n",
        "a.csv, line 3 has 3 fields, the header 2"),
    "short row": (
        f"{BOTH}{LONG}\n",
        "a.csv, line 3 has 1 field, the header 2"),
    "tabs": (
        "image\tcaption\n0.png\tx\n",
        "a.csv: ", "fields are separated by a comma"),
    "stray mark": (
        'image,caption\n0.png,"one\n1.png,two"\n',
        "a.csv, line 2: ", "remove the stray quotation mark"),
    "no last mark": (
        f'{BOTH}1.png,"{LONG}\n2.png,x\n',
        "a.csv, line 3: ", "a quoted field ends with"),
    "UTF-16": (
        {"a.csv": BOTH.encode("utf16")},
        "a.csv is not in UTF-8: save it again"),
    "two paths": (
        f"{BOTH}./0.png,y\n",
        "'0.png', './0.png' are one file: call it by one name"),
    # ---- columns ----
    "no image": (
        "picture,caption\n0.png,x\n",
        "--image-column: there is no column 'image', ", "there are: 'picture', 'caption'"),
    "no caption": (
        "image,said\n0.png,x\n",
        "--caption-column: there is no column 'caption', "),
    "two captions": (
        "image,text,caption\n0.png,x,y\n",
        "it has the columns caption and text; --caption-column says which"),
    "lists of lists": (
        {"a.jsonl": jsonl_of([["a", "b"]])},
        "a.jsonl: ", "captions are texts or lists of texts"),
    "two labels": (
        f"image,caption,label\n0.png,x,{LONG}\n0.png,y,dog\n",
        "0.png has the labels ", "but may have one"),
    "start": (
        f"video,start,caption\na.mp4,{LONG},x\n",
        "in the column start is no number of seconds"),
    "videos inside": (
        {"a.parquet": [{"video": b"x", "caption": "y"}]},
        "the column video holds videos: write them to files"),
    "other kinds": (
        {"train.jsonl": jsonl_of("a"), "test.jsonl": jsonl_of(["b"])},
        "the column caption is ", "in another; write both alike"),
    # ---- splits ----
    "word": (
        f"{SPLIT}1.png,x,{LONG}\n",
        "in the column split is none of train, val"),
    "no train": (
        "image,caption,split\n0.png,x,test\n",
        "no train split; it has: test"),
    "split against files": (
        {"train.csv": SPLIT, "test.csv": SPLIT},
        "the column split names other splits than the files"),
    "empty val": (
        {"val/.keep": "", **images("train/cat", "train/dog")},
        "val has no file; remove it if a part of train may take its"),
    "table of no split": (
        {"train.csv": BOTH, "more.csv": BOTH},
        "more.csv names no split: call it train, val or test"),
    "tar of no split": (
        {"test.tar": {"0": {"txt": b"x"}}, "a.tar": {"1": {"txt": b"x"}}},
        "a.tar names no split, as others do"),
    # ---- folders ----
    "holdout": (
        images("train/cat", "train/dog", "holdout/cat"),
        "the name holdout seems to mean a split"),
    "extra": (
        images("train/cat", "train/dog", "extra/cat"),
        "extra/cat/0.png is not in a class folder"),
    "splits as classes": (
        images("train", "test"),
        "test, train seem to be splits, but have no class folders"),
    "one class": (
        images("train/cat", "test/cat"),
        "cat is its only class folder"),
    "a tar, too": (
        {"0.tar": {}, **images("cat", "dog")},
        "which are read in different ways: move one kind away"),
    "a table, too": (
        {"labels.csv": BOTH, **images("cat", "dog")},
        "labels.csv names no split: call it train"),
    "NAME.txt": (
        {"00/0.png": PNG, "00/0.txt": "x"},
        "00/0.txt beside 0.png is not read: write "),
    "data card": (
        {"README.md": "configs:\n- a\n", "train.csv": BOTH},
        "README.md says which files are which split"),
    # ---- tars ----
    "no text": (
        {"a.tar": tar_samples([0], "jpg", "json")},
        "--caption-column: there is no column 'txt'; there are: 'jpg', 'json'"),
    "class name": (
        {"a.tar": {"0": {"png": PNG, "cls": b"cat"}}},
        "first 0 of ", "a.tar", "'cat'")}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what, tmp_path):
    files, *words = REFUSALS[what]
    if isinstance(files, str):
        files = {"a.csv": files}
    write_files(tmp_path, files)
    path = tmp_path
    if len(files) == 1:
        path /= next(iter(files))
    assert LONG not in complains(path, "train", *words)


@pytest.mark.parametrize("name, words", [
    ("no/such.csv", "no/such.csv: no such file or folder"),
    ("emojis", "no hub id (org/name), and no known set; the nearest: emoji, "),
    ("nobody-at-all/nothing", "--dataset nobody-at-all/nothing: ")])
def test_names_of_nothing(name, words):
    complains(name, "train", words)


@pytest.mark.parametrize("cell", [
    '["a", "b"]', "('a dog', 'b')", "{'raw': 'a dog'}", "array(['a', 'b'])", "[['a']]", "[]"])
def test_text_of_a_container_is_no_caption(cell, tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl_of("a dog", cell))
    complains(tmp_path / "a.jsonl", "train", "the column caption holds the text of a list", "jsonl")


def test_words_in_brackets_are_captions(tmp_path):
    texts = ["[music]", "[applause] 'thanks'", '("so he said")', "(a dog)"]
    (tmp_path / "a.jsonl").write_text(jsonl_of(*texts))
    assert all_rows(tmp_path / "a.jsonl").column("captions") == [[text] for text in texts]


def test_classes_that_two_files_number_in_other_ways(tmp_path):
    for split, names in {"train": ["bird", "cat"], "test": ["cat", "dog"]}.items():
        features = datasets.Features({
            "image": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        table = datasets.Dataset.from_dict({"image": ["x"], "label": ["cat"]}, features=features)
        table.to_parquet(str(tmp_path / f"{split}.parquet"))
    complains(tmp_path, "train", "the column label is ClassLabel(names=['cat', 'dog']) in one file")


# ======================================== files and columns =======================================
def test_links_to_folders_are_followed(tmp_path):
    write_files(tmp_path, images("classes/bus", "classes/car", "disk/plane"))
    (tmp_path / "classes" / "plane").symlink_to(tmp_path / "disk" / "plane")
    keys = keys_of(tmp_path / "classes")["train"]
    assert len(keys) == 9
    assert "plane/0.png" in keys
    (tmp_path / "classes" / "also").symlink_to(tmp_path / "classes" / "bus")
    complains(tmp_path / "classes", "train", "are one folder, by a link; remove the link")


def test_files_that_are_not_read_are_counted(tmp_path):
    """Hidden files are none of the user's."""
    files = {"cat/x.heic": b"", "dog/unnamed": b"", "cat/._0.png": b""}
    write_files(tmp_path, files | images("cat", "dog"))
    assert len(keys_of(tmp_path)["train"]) == 6
    assert f"2 files not read, first {tmp_path}/cat/x.heic" in note_of(tmp_path)


def test_images_that_metadata_do_not_name_are_counted(tmp_path):
    write_files(tmp_path, images("cat") | {"metadata.csv": "file_name,text\ncat/0.png,x\n"})
    assert keys_of(tmp_path) == {"train": {"cat/0.png"}}
    assert f"2 files not read, first {tmp_path}/cat/1.png" in note_of(tmp_path)


@pytest.mark.parametrize("file", ["a.csv", "a.jsonl", "a.tar"])
def test_file_of_the_same_time_and_size_is_read_again(file, tmp_path):
    """As tar -x or cp -p leave it, and in the same process."""
    path = tmp_path / file
    for name in ("1", "2"):
        if path.suffix == ".tar":
            write_tar(path, {name: {"png": PNG, "txt": b"x"}})
        else:
            write_rows(path, HEAD, [(name, "x")])
        os.utime(path, (1e9, 1e9))
        assert keys_of(path)["train"] == {name}


def test_usual_names_of_columns_need_no_flag(tmp_path):
    rows = [("0.png", "words, of 0", "b"), ("1.png", "words, of 1", "a")]
    data = all_rows(write_rows(tmp_path / "a.tsv", ["filepath", "title", "class"], rows))
    assert data.column("captions") == [["words, of 0"], ["words, of 1"]]
    assert data.label_names == ["a", "b"]


COLUMNS = {"image_column": "picture", "caption_column": "said", "label_column": "kind"}


@pytest.fixture
def other_names(tmp_path):
    """A csv with columns of other names, beside one with the usual name, and its data."""
    write_images(tmp_path, range(2))
    rows = [("000.png", "a", "other words", "1"), ("001.png", "b", "other words", "0")]
    return write_rows(tmp_path / "tables" / "a.csv", ["picture", "said", "text", "kind"], rows)


def test_column_flags_and_data_dir(other_names, tmp_path):
    data = all_rows(other_names, data_dir=str(tmp_path), **COLUMNS)
    assert data.column("captions") == [["a"], ["b"]]
    assert data.labels.tolist() == [1, 0]
    assert number_of(data.read(1)) == 1


@pytest.mark.parametrize("flag", COLUMNS)
def test_column_flag_of_no_column_is_refused(flag, other_names):
    words = f"--{flag.replace('_', '-')}: there is no column 'none'; there are: 'picture', "
    complains(other_names, "train", words, **COLUMNS | {flag: "none"})


def test_methods_without_texts_refuse_captions_alone(tmp_path):
    path = write_rows(tmp_path / "a.csv", HEAD, [("0.png", "x")])
    complains(path, "train", "there is no column 'label'", "temo.py, ncl.py", by_class=True)


# ======================================== rows and examples =======================================
def test_cells_of_a_csv_are_text(tmp_path):
    """000 is a file name and NA a caption; a quoted field may have a line break. An index column
    may have no name."""
    rows = [(0, "000", "NA"), (1, "001", "null"), (2, "002", "two\nlines")]
    data = all_rows(write_rows(tmp_path / "a.csv", ["", *HEAD], rows))
    assert data.column("key") == ["000", "001", "002"]
    assert data.column("captions") == [["NA"], ["null"], ["two\nlines"]]


def test_rows_of_one_image_are_one_example(tmp_path):
    rows = [("0", "a", "cat"), ("4", "e", "dog"), ("4", "f", ""), ("0", "c", "cat"),
            ("0", "a", "cat")]
    data = all_rows(write_rows(tmp_path / "a.csv", [*HEAD, "label"], rows))
    assert data.column("captions") == [["a", "c"], ["e", "f"]]
    assert data.labels.tolist() == [0, 1]


def test_rows_without_an_image_a_caption_or_a_class_are_counted(tmp_path):
    rows = [("0", "a", "cat"), ("", LONG, "cat"), ("2", " ", "dog"), ("3", "d", "")]
    data = all_rows(write_rows(tmp_path / "a.csv", [*HEAD, "label"], rows))
    assert data.column("captions") == [["a"], ["d"]]
    assert data.labels.tolist() == [0, -1]
    assert "2 rows without an image or a caption left out" in data.note
    assert LONG not in data.note
    assert "1 without a class" in data.note


def test_captions_unfolded_in_training_alone(tmp_path):
    rows = [("0.png", "a", "train"), ("0.png", "b", "train"), ("1.png", "c", "test"),
            ("1.png", "d", "test")]
    path = str(write_rows(tmp_path / "a.csv", [*HEAD, "split"], rows))
    train = common.load_data(path, "train", unfold_captions=True)
    assert [train.captions(k) for k in range(len(train))] == [["a"], ["b"]]
    assert common.load_data(path, "test", unfold_captions=True).captions(0) == ["c", "d"]


def test_samples_of_a_tar_without_a_class_are_counted(tmp_path):
    samples = tar_samples(range(9), "jpg", "cls")
    samples["000004"]["cls"] = b"-1"
    data = all_rows(write_tar(tmp_path / "a.tar", samples))
    assert len(data) == 8
    assert "1 sample left out, first 000004 of " in data.note


# ---------------------------------------- pictures in tables -------------------------------------
CELLS = {
    "bytes": lambda content, i: content,
    "no path": lambda content, i: {"bytes": content},
    "a path each": lambda content, i: {"bytes": content, "path": f"{i}.png"},
    "one path": lambda content, i: {"bytes": content, "path": "image.png"}}


@pytest.mark.parametrize("kind", CELLS)
def test_rows_of_one_picture_in_a_table_are_one_example(kind, tmp_path):
    cells = []
    captions = []
    for row in range(36):
        i = row % 12
        cells.append(CELLS[kind](encode(picture(i)), i))
        captions.append(caption(i, row // 12))
    pq.write_table(pa.table({"image": cells, "caption": captions}), tmp_path / "a.parquet")
    samples = []
    for data in open_splits(tmp_path / "a.parquet").values():
        samples += check_examples(data, "pictures in a table")
        assert all(len(texts) == 3 for texts in data.column("captions"))
    assert sorted(samples) == list(range(12))


# ---------------------------------------- videos -------------------------------------------------
@pytest.mark.parametrize("file", ["a.csv", "a.jsonl"])
def test_windows_of_one_video_are_examples_of_their_own(file, tmp_path):
    """Also where one side or both are open."""
    write_video(tmp_path / "long.mp4", range(40))
    windows = {(1, 1.5): [10, 14], (None, None): [0, 39], (3, None): [30, 39], (None, 1): [0, 9]}
    rows = []
    for text in ("one", "two"):
        for window in windows:
            rows.append(("long.mp4", *window, f"{text} {window}"))
    path = write_rows(tmp_path / file, ["video", "start", "end", "caption"], rows)
    data = all_rows(path, frames=2)
    for k, (window, shown) in enumerate(windows.items()):
        assert data.captions(k) == [f"one {window}", f"two {window}"]
        assert numbers(data.read(k)) == shown


def test_video_dir_finds_videos_by_path_name_and_stem(tmp_path):
    """Folders in a name decide: another one's video is missing. A dot is no ending: else clip.2
    would be the video of clip."""
    files = ["deep/er/000.mp4", "001.webm", "v_002.avi", "x.003.mp4", "P05/01.mp4", "P06/01.mp4"]
    write_clips(tmp_path / "all", dict(enumerate(files)))
    names = ["er/000", "001.mp4", "002", "x.003", "P05/01", "P06/01.mp4"]
    missing = ["elsewhere/001", "P07/01", "001.2"]
    rows = [(name, "words") for name in names + missing]
    path = write_rows(tmp_path / "notes" / "a.csv", ["video", "caption"], rows)
    data = all_rows(path, video_dir=str(tmp_path / "all"), frames=4)
    assert data.column("key") == names
    assert [number_of(data.read(k)) for k in range(6)] == list(range(6))
    assert "3 videos not there, first elsewhere/001" in data.note
    path = write_rows(tmp_path / "notes" / "b.csv", ["video", "caption"], [("01", "x")])
    complains(path, "train", "01 may be ", "remove one of them", video_dir=str(tmp_path / "all"))


# ======================================== splits ==================================================
def test_example_of_several_splits_stays_in_the_last_alone(tmp_path):
    """Also behind a link of either kind."""
    write_files(tmp_path, images("x", count=5))
    os.link(tmp_path / "x" / "1.png", tmp_path / "x" / "hard.png")
    (tmp_path / "x" / "link.png").symlink_to("2.png")
    rows = [("x/0.png", "x", "train"), ("x/1.png", "x", "train"), ("x/2.png", "x", "train"),
            ("x/3.png", "x", "train"), ("x/hard.png", "y", "test"), ("x/link.png", "y", "val"),
            ("x/3.png", "y", "test")]
    path = write_rows(tmp_path / "a.csv", [*HEAD, "split"], rows)
    assert keys_of(path) == {
        "train": {"x/0.png"}, "val": {"x/link.png"}, "test": {"x/hard.png", "x/3.png"}}
    assert "WARNING: 3 examples of train or val left out, which are in val or" in note_of(path)


def test_picture_in_tables_of_two_splits_stays_in_the_last_alone(tmp_path):
    for name, some in (("train", range(6)), ("test", range(4, 8))):
        rows = [(encode(picture(i)), caption(i)) for i in some]
        write_rows(tmp_path / f"{name}.parquet", HEAD, rows)
    splits = open_splits(tmp_path)
    assert (len(splits["train"]), len(splits["test"])) == (4, 4)
    assert "2 examples of train or val left out" in note_of(tmp_path)


def test_windows_of_one_video_in_several_splits_are_warned_of(tmp_path):
    (tmp_path / "a.mp4").touch()
    rows = [("a.mp4", 0, 1, "x", "train"), ("a.mp4", 1, 2, "y", "test")]
    path = write_rows(tmp_path / "a.csv", ["video", "start", "end", "caption", "split"], rows)
    assert keys_of(path) == {"train": {"a.mp4 0-1 s"}, "test": {"a.mp4 1-2 s"}}
    assert "WARNING: 1 video with windows in several splits" in note_of(path)


def test_held_out_splits_are_bands_of_a_hash(tmp_path):
    """val and test are a twentieth each; a larger part holds what a smaller one held."""
    rows = [(f"{i:03}.png", "words") for i in range(4000)]
    path = write_rows(tmp_path / "a.csv", HEAD, rows)
    keys = {}
    for fraction in (0.01, 0.05, 0.3):
        sets = open_splits(path, holdout_fraction=fraction)
        keys[fraction] = {split: data.column("key") for split, data in sets.items()}
        for split in ("val", "test"):
            assert len(sets[split]) == pytest.approx(4000 * fraction, rel=0.5)
        assert sum(map(len, sets.values())) == 4000
        assert len(set().union(*keys[fraction].values())) == 4000
        assert "held out of 4,000" in sets["val"].note
    # a run may be resumed years later: these must never change
    assert keys[0.05]["val"][:4] == ["029.png", "078.png", "146.png", "153.png"]
    assert keys[0.05]["test"][:4] == ["007.png", "027.png", "054.png", "069.png"]
    assert set(keys[0.01]["val"]) < set(keys[0.05]["val"]) < set(keys[0.3]["val"])


def test_windows_of_a_video_are_held_out_together(tmp_path):
    """Seconds as they come, 1e-05 too; another window moves none."""
    windows = [(None, 3), (1e-5, 2), (7.25, None), (1e6, 2e6)]
    splits_of = []
    for some in (windows, windows[3:]):
        rows = []
        for k in range(100):
            (tmp_path / f"v{k}.mp4").touch()
            rows += [(f"v{k}.mp4", start, end, "words") for start, end in some]
        file = f"{len(some)}.jsonl"
        path = write_rows(tmp_path / file, ["video", "start", "end", "caption"], rows)
        videos = {}
        for split, data in open_splits(path).items():
            videos[split] = {key.split()[0] for key in data.keys()}
        splits_of.append(videos)
    assert sum(map(len, splits_of[0].values())) == 100
    assert splits_of[0] == splits_of[1]


@pytest.mark.parametrize("num_images, least", [(12, 2), (60, 10), (119, 19), (300, 20)])
def test_small_data_hold_out_twenty_images_or_a_sixth(num_images, least):
    fractions = np.random.default_rng(num_images).random(num_images)
    masks = held_out_masks(fractions, ["val", "test"], HELD_OUT_FRACTION)
    assert min(masks["val"].sum(), masks["test"].sum()) >= least
    assert max(masks["val"].sum(), masks["test"].sum()) <= max(least, 0.1 * num_images)
    assert not (masks["val"] & masks["test"]).any()


def test_held_out_files_of_the_hub_depend_neither_on_the_cache_nor_on_the_commit(
        tmp_path, monkeypatch):
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    keys = []
    for home, commit in (("a", "1" * 40), ("b/c", "2" * 40)):
        snapshot = tmp_path / home / "datasets--some--pets" / "snapshots" / commit / "data"
        files = []
        for kind in ("cat", "dog"):
            files += [str(snapshot / kind / x) for x in write_images(snapshot / kind, range(30))]
        cache = tmp_path / home / "datasets"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        builder = ImageFolder(dataset_name="pets", hash=commit, data_files={"train": files})
        builder.download_and_prepare()
        (cache / "pets" / builder.config_id).rename(cache / "pets" / "default")
        (cache / "pets").rename(cache / "some___pets")
        monkeypatch.chdir(tmp_path / home)
        splits = open_splits("some/pets", image_size=len(keys) + 1)  # past the cache of options
        keys.append({split: data.column("key") for split, data in splits.items()})
    assert keys[0] == keys[1]
    assert len(keys[0]["test"]) == 10
    assert all(key.startswith(("cat/", "dog/")) for key in keys[0]["test"])


def test_captions_are_exchanged_in_training_alone(tmp_path):
    name = write_captions(tmp_path, 60)
    clean = open_splits(name)
    noisy = open_splits(name, caption_noise=0.5)
    for split in ("val", "test"):
        assert noisy[split].column("captions") == clean[split].column("captions")
    before, after = clean["train"].column("captions"), noisy["train"].column("captions")
    is_exchanged = [a != b for a, b in zip(after, before)]
    assert noisy["train"].column("noisy").tolist() == is_exchanged
    assert sum(is_exchanged) == round(0.5 * len(before))
    assert sorted(after) == sorted(before)
    assert f"{sum(is_exchanged)} examples with another's captions" in noisy["train"].note


# ======================================== sets that are evaluated alone ===========================
@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """train.csv of 40 images, test.csv of 30 others, both.csv of all; each has a class."""
    root = tmp_path_factory.mktemp("own")
    rows = []
    for i, name in enumerate(write_images(root, range(70))):
        rows.append((name, f"words of {name}", f"class {i % 2}"))
    for file, some in (("train", rows[:40]), ("test", rows[40:]), ("both", rows)):
        write_rows(root / f"{file}.csv", [*HEAD, "label"], some)
    return root


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """A run on train.csv."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_script(temo, folder, *TINY, "--dataset", root / "train.csv")
    return folder


def open_sets(root, *files):
    """The training set of train.csv, and the sets of --eval-datasets by their file names."""
    words = [str(root / file) for file in files]
    args = temo.parse_args(["--dataset", str(root / "train.csv"), "--eval-datasets", *words])
    train, sets = open_data(args)
    return train, {os.path.basename(name): splits for name, splits in sets.items()}


def test_another_file_of_the_user_is_test_as_a_whole(root):
    """Train then gives val, and keeps the rest."""
    train, sets = open_sets(root, "test.csv")
    test, val = sets["test.csv"]["test"], sets["train.csv"]["val"]
    assert list(sets["test.csv"]) == ["test"]
    assert list(sets["train.csv"]) == ["val"]
    assert (len(train), len(val), len(test)) == (34, 6, 30)
    assert not set(train.keys()) & set(val.keys())


def test_rows_that_were_trained_on_are_left_out_and_counted(root):
    train, sets = open_sets(root, "both.csv")
    test = sets["both.csv"]["test"]
    assert len(train) == 34
    assert len(test) == 36
    assert not set(train.keys()) & set(test.keys())
    assert "34 rows left out, whose files were trained on" in test.note
    write_rows(root / "again.csv", HEAD, [(name, "words") for name in train.keys()])
    with pytest.raises(EmptySplit, match="all of its 34 rows were trained on"):
        open_sets(root, "again.csv")


def test_eval_py_leaves_out_rows_that_were_trained_on(root, run, tmp_path, capsys):
    files = [str(root / "test.csv"), str(root / "both.csv")]
    results = evaluated(run, "--output-dir", tmp_path, "--datasets", *files)
    assert [results[file]["metrics"]["images"] for file in files] == [30, 42]
    assert "28 rows left out, whose files were trained on" in capsys.readouterr().out


def test_extra_pairs_are_left_out_of_sets_that_eval_py_adds(root, tmp_path, capsys):
    """The sets that the run evaluated keep all rows: training has left those out of the pairs."""
    names = [f"{i:03}.png" for i in range(70)]
    for file, some in (("pairs", names[30:50]), ("evaluated", names[45:60])):
        rows = [(name, f"words of {name}") for name in some]
        write_rows(root / f"{file}.csv", HEAD, rows)
    flags = [*TINY, "--dataset", root / "train.csv", "--weighting", "none"]
    flags += ["--extra-pairs", root / "pairs.csv", "--eval-datasets", root / "evaluated.csv"]
    run_script(mama, tmp_path / "run", *flags)
    files = [str(root / "test.csv"), str(root / "evaluated.csv")]
    results = evaluated(tmp_path / "run", "--tasks", "retrieval", "--datasets", *files)
    # val and test of the pairs are not trained on
    assert results[files[0]]["metrics"]["images"] == 21
    assert results[files[1]]["metrics"]["images"] == 15
    assert "9 rows left out, whose files were" in capsys.readouterr().out


def test_eval_py_warns_of_a_training_set_that_has_changed(tmp_path, capsys):
    """A file that was cut holds out other rows, some of which were trained on."""
    path = write_captions(tmp_path, 60)
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "other.csv").write_text("".join([lines[0], *lines[50:]]))
    run_script(temo, tmp_path / "run", *TINY, "--dataset", path)
    capsys.readouterr()
    evaluated(tmp_path / "run", "--datasets", tmp_path / "other.csv")
    assert "has changed" not in capsys.readouterr().out
    path.write_text("".join(lines[:40]))
    evaluated(tmp_path / "run", "--datasets", tmp_path / "other.csv")
    assert f"WARNING: {path} has changed since the run" in capsys.readouterr().out


def test_a_test_file_of_classes_learns_from_the_training_images(root, tmp_path, capsys):
    flags = "--cpu --workers 0 --image-size 16 --batch-size 8 --max-steps 1 --eval-every 0".split()
    train = str(root / "train.csv")
    test = str(root / "test.csv")
    run_script(temperature_schedules, tmp_path / "run", *flags, "--dataset", train)
    metrics = evaluated(tmp_path / "run", "--datasets", test)[test]["metrics"]
    assert metrics["images"] == 30
    assert "knn@1" in metrics
    assert f"knn and probe learn from the training images of {train}" in capsys.readouterr().out


def test_held_out_names_of_a_meta_set_are_left_out_and_counted(root, tmp_path):
    sets = open_splits(root / "train.csv")
    train = sets.pop("train")
    names = train.column("key")[:5] + sets["val"].column("key")[:2] + sets["test"].column("key")[:1]
    file = tmp_path / "clean.txt"
    file.write_text("\n".join(names))
    for others in (sets, {}):  # the training set need not be among those that are evaluated
        rows, description = named_rows(train, file, others)
        assert rows.tolist() == [0, 1, 2, 3, 4]
        assert description == "by name, 3 of val or test left out"
    file.write_text("\n".join([*names, "nobody"]))
    with pytest.raises(UserError, match="1 of its 9 names are not in train, first 'nobody'"):
        named_rows(train, file, sets)


# ======================================== the start of a run ======================================
STOPPED = {
    "--image-encoder no/such": "no/such: ",
    "--init-from text.pt": "--init-from .*text.pt: ",
    "--init-from other.safetensors": ".*none of its 1 tensors fits the model",
    "--init-from nan.safetensors": r".*\(val\): the model's outputs are not finite for \d+ of",
    "--lr 1e30 --lr-end 1e30 --grad-clip 0 --eval-every 0": (
        r"the loss is not finite at step 1: .*loss nan, .*keys \['\d+.png'"),
    "--output-dir text.pt": ".*text.pt.*: .*Not a directory"}
FEW_STEPS = "--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 2".split()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_captions(tmp_path_factory.mktemp("good"), 24)


def stopped(dataset, out, *flags):
    """The one line of the UserError that ends this run."""
    with pytest.raises(UserError) as error:
        run_script(temo, out / "a", *flags, base=[*FEW_STEPS, "--dataset", dataset])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    return str(error.value)


@pytest.mark.parametrize("flags", STOPPED)
def test_what_ends_a_run_before_or_in_its_first_steps(flags, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_bytes(TEXT)
    save_file({"other": torch.zeros(2)}, "other.safetensors")
    save_file({"vision.projection.weight": torch.full((16, 128), float("nan"))}, "nan.safetensors")
    assert re.match(STOPPED[flags], stopped(good, tmp_path, *flags.split()))


def test_too_many_bad_samples_stop_the_run(tmp_path):
    """Two of the first batch cannot be read: counted, listed, and above --max-bad-fraction the
    end."""
    csv = write_captions(tmp_path / "data", 60)
    train = common.load_data(str(csv), "train")
    _, first = next(batches.epoch_batches(len(train), 8, 42, 0, 1))
    bad = [train.key(int(first[1])), train.key(int(first[4]))]
    (csv.parent / bad[0]).write_bytes(TEXT)
    (csv.parent / bad[1]).write_bytes(TRUNCATED)
    flags = [*FEW_STEPS, "--dataset", csv, "--max-bad-fraction", 0.1]
    summary = run_script(temo, tmp_path / "r", *flags)
    assert summary["bad_samples"] == 2
    assert summary["steps"] == 2
    message = stopped(csv, tmp_path)
    assert "2 of about 40 samples cannot be read, above --max-bad-fraction 0.01" in message
    for folder in "ra":
        lines = (tmp_path / folder / "bad_samples.txt").read_text().splitlines()
        assert {line.split("\t")[0] for line in lines} == set(bad)
