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


def keys_of(path):
    """{split: its keys}, with splits that are held out of train in train."""
    keys = {}
    for split, data in open_splits(path).items():
        if "held out of" in data.note:
            split = "train"
        keys.setdefault(split, set()).update(data.keys())
    return keys


def note_of(path):
    return next(iter(open_splits(path).values())).note


def images(*folders):
    """{path: content} of 0.png, 1.png and 2.png in each of these folders."""
    files = {}
    for folder in folders:
        for i in range(3):
            files[f"{folder}/{i}.png"] = PNG
    return files


# ======================================== the five forms ==========================================
def write_table(path, samples):
    names = write_images(path.parent, samples)
    rows = []
    for i, name in zip(samples, names):
        rows.append((name, caption(i), CLASSES[i % 3]))
    write_rows(path, ["file_name", "text", "class"], rows)


def write_classes(folder, samples):
    for i in samples:
        write_images(folder / CLASSES[i % 3], [i])


def write_class_clips(folder, samples):
    for i in samples:
        write_clips(folder / CLASSES[i % 3], {i: f"{i}.mp4"})


def write_pairs(path, samples):
    write_tar(path, tar_samples(samples, "png", "txt", "cls"))


def write_class_numbers(path, samples):
    write_tar(path, tar_samples(samples, "png", "cls"))


def class_words(i):
    return CLASSES[i % 3].replace("_", " ")


def class_number(i):
    return f"class {i % 3}"


# name: (writer, what it writes, first caption of sample i)
FORMS = {
    "csv": (write_table, "SPLIT.csv", caption),
    "tsv": (write_table, "SPLIT.tsv", caption),
    "json": (write_table, "SPLIT.json", caption),
    "jsonl": (write_table, "SPLIT.jsonl", caption),
    "parquet of paths": (write_table, "SPLIT.parquet", caption),
    "parquet of images": (write_parquet_images, "SPLIT-00000-of-00001.parquet", caption),
    "class folders": (write_classes, "SPLIT", class_words),
    "class folders of videos": (write_class_clips, "SPLIT", class_words),
    "metadata": (write_table, "SPLIT/metadata.jsonl", caption),
    "tar": (write_pairs, "SPLIT/0.tar", caption),
    "tar of classes": (write_class_numbers, "SPLIT/0.tar", class_number)}
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


def check_examples(data, first_caption=caption):
    """Each example has its own caption and class. Returns: the numbers of the samples."""
    samples = []
    for k in range(len(data)):
        i = number_of(data.read(k))
        samples.append(i)
        assert data.captions(k)[0] == first_caption(i)
        assert data.labels[k] == i % 3
    return samples


@pytest.mark.parametrize("form", FORMS)
def test_form_has_the_splits_that_it_names(form, tmp_path):
    write, path, first_caption = FORMS[form]
    for name, samples in SPLITS.values():
        write(tmp_path / path.replace("SPLIT", name), samples)
    for split, (_, samples) in SPLITS.items():
        data = common.load_data(str(tmp_path), split, frames=4)
        assert data.split == split
        assert str(tmp_path) not in str(data.column("key"))  # the same in any folder
        assert sorted(check_examples(data, first_caption)) == list(samples)


def test_column_split_says_which_rows_are_whose(tmp_path):
    rows = []
    for name, samples in SPLITS.values():
        files = write_images(tmp_path, samples)
        for i, file in zip(samples, files):
            rows.append((file, caption(i), CLASSES[i % 3], f" {name} "))
    path = write_rows(tmp_path / "a.csv", [*HEAD, "label", "split"], rows)
    for split, (_, samples) in SPLITS.items():
        data = common.load_data(str(path), split)
        assert check_examples(data) == list(samples)
        assert data.label_names == CLASSES


@pytest.mark.parametrize("name, split", [
    ("val-00000-of-00003", "val"), ("dev", "val"), ("valid", "val"), ("protest", None),
    ("constrain", None), ("2014", None)])
def test_split_is_the_whole_name(name, split):
    assert split_of_name(name) == split


@pytest.mark.parametrize("name", ["Training", "trainset", "test images", "trainval", "valSet"])
def test_name_with_a_split_among_other_words_is_refused(name):
    with pytest.raises(ValueError, match=f"the name {name} seems to mean a split"):
        split_of_name(name)


def test_classes_and_images_may_have_words_of_splits(tmp_path):
    write_files(tmp_path, images("cat", "training shoes") | {"cat/test_0.png": PNG})
    keys = keys_of(tmp_path)
    assert len(keys["train"]) == 7


# ======================================== what is refused =========================================
LONG = "x" * 500  # a message never shows so much of a cell
BOTH = "image,caption\n0.png,x\n"
SPLIT = "image,caption,split\n0.png,x,train\n"


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
    "nothing": ({"a.bin": b"", "b.bin": b""}, "has no file that can be read, but needs a folder"),
    "long row": (f"{BOTH}1.png,a, b\n", "a.csv, line 3 has 3 fields, the header 2"),
    "tabs": ("image\tcaption\n0.png\tx\n", "a.csv: ", "fields are separated by a comma"),
    "stray mark": (
        'image,caption\n0.png,"one\n1.png,two"\n',
        "a.csv, line 2: ", "remove the stray quotation mark"),
    "no last mark": (
        f'{BOTH}1.png,"{LONG}\n2.png,x\n', "a.csv, line 3: ", "a quoted field ends with"),
    "UTF-16": ({"a.csv": BOTH.encode("utf16")}, "a.csv is not in UTF-8: save it again"),
    "two paths": (f"{BOTH}./0.png,y\n", "'0.png', './0.png' are one file: call it by one name"),
    # ---- columns ----
    "no image": (
        "picture,caption\n0.png,x\n",
        "--image-column: there is no column 'image', ", "there are: 'picture', 'caption'"),
    "no caption": ("image,said\n0.png,x\n", "--caption-column: there is no column 'caption', "),
    "two captions": (
        "image,text,caption\n0.png,x,y\n",
        "it has the columns caption and text; --caption-column says which"),
    "two labels": (
        f"image,caption,label\n0.png,x,{LONG}\n0.png,y,dog\n",
        "0.png has the labels ", "but may have one"),
    "start": (
        f"video,start,caption\na.mp4,{LONG},x\n", "in the column start is no number of seconds"),
    "videos inside": (
        {"a.parquet": [{"video": b"x", "caption": "y"}]},
        "the column video holds videos: write them to files"),
    # ---- splits ----
    "word": (f"{SPLIT}1.png,x,{LONG}\n", "in the column split is none of train, val"),
    "no train": ("image,caption,split\n0.png,x,test\n", "no train split; it has: test"),
    "split by another name": (
        "image,caption,part\n0.png,x,train\n1.png,y,test\n",
        "the column part holds ", "call it split if it divides"),
    "test without a caption": (f"{SPLIT}1.png,,test\n", "no row of the split test has a caption"),
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
    "extra": (images("train/cat", "extra/cat"), "extra/cat/0.png is not in a class folder"),
    "class beside splits": (
        images("train/cat", "train/dog", "cow"), "some class folders are in train/, val/ or test/"),
    "splits as classes": (
        images("train", "test"), "test, train seem to be splits, but have no class folders"),
    "one class": (images("train/cat", "test/cat"), "cat is its only class folder"),
    "a tar, too": (
        {"0.tar": {}, **images("cat", "dog")},
        "which are read in different ways: move one kind away"),
    "NAME.txt": ({"00/0.png": PNG, "00/0.txt": "x"}, "00/0.txt beside 0.png is not read: write "),
    "data card": (
        {"README.md": "configs:\n- a\n", "train.csv": BOTH},
        "README.md says which files are which split"),
    # ---- tars ----
    "no text": (
        {"a.tar": tar_samples([0], "jpg", "json")},
        "--caption-column: there is no column 'txt'; there are: 'jpg', 'json'")}


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
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl_of("a dog", cell))
    complains(path, "train", "the column caption holds the text of a list", "jsonl")


def test_captions_may_be_lists_and_have_words_in_brackets(tmp_path):
    texts = ["[music]", "[applause] 'thanks'", '("so he said")', "(a dog)"]
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl_of(texts, ["a dog"]))
    data = all_rows(path)
    assert data.column("captions") == [texts, ["a dog"]]


def test_classes_that_two_files_number_in_other_ways(tmp_path):
    for split, names in {"train": ["bird", "cat"], "test": ["cat", "dog"]}.items():
        features = datasets.Features({
            "image": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        table = datasets.Dataset.from_dict({"image": ["x"], "label": ["cat"]}, features=features)
        table.to_parquet(str(tmp_path / f"{split}.parquet"))
    complains(tmp_path, "train", "the column label is ClassLabel(names=['cat', 'dog']) in one file")


# ======================================== files and columns =======================================
def test_links_to_folders_are_followed(tmp_path):
    write_files(tmp_path, images("classes/bus", "classes/car", "disk"))
    folder = tmp_path / "classes"
    (folder / "plane").symlink_to(tmp_path / "disk")
    keys = keys_of(folder)
    assert len(keys["train"]) == 9
    assert "plane/0.png" in keys["train"]
    (folder / "also").symlink_to(folder / "bus")
    complains(folder, "train", "are one folder, by a link; remove the link")


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


def test_column_flags_and_data_dir(tmp_path):
    """Before the usual names."""
    write_images(tmp_path, range(2))
    rows = [("000.png", "a", "other words", "1"), ("001.png", "b", "other words", "0")]
    header = ["picture", "said", "text", "kind"]
    path = write_rows(tmp_path / "tables" / "a.csv", header, rows)
    columns = dict(image_column="picture", caption_column="said", label_column="kind")
    data = all_rows(path, data_dir=str(tmp_path), **columns)
    assert data.column("captions") == [["a"], ["b"]]
    assert data.labels.tolist() == [1, 0]
    assert number_of(data.read(1)) == 1
    columns["label_column"] = "none"
    words = "--label-column: there is no column 'none'; there are: 'picture', "
    complains(path, "train", words, **columns)


def test_methods_without_texts_refuse_captions_alone(tmp_path):
    path = write_rows(tmp_path / "a.csv", HEAD, [("0.png", "x")])
    complains(path, "train", "there is no column 'label'", "temo.py, ncl.py", by_class=True)


# ======================================== rows and examples =======================================
def test_cells_of_a_csv_are_text(tmp_path):
    """000 is a file name and NA a caption; a quoted field may have a line break. An index column
    may have no name."""
    rows = [(0, "000", "NA"), (1, "001", "null"), (2, "002", "two\nlines")]
    path = write_rows(tmp_path / "a.csv", ["", *HEAD], rows)
    data = all_rows(path)
    assert data.column("key") == ["000", "001", "002"]
    assert data.column("captions") == [["NA"], ["null"], ["two\nlines"]]


def test_rows_of_one_image_are_one_example(tmp_path):
    rows = [
        ("0", "a", "cat"), ("4", "e", "dog"), ("4", "f", ""), ("0", "c", "cat"), ("0", "a", "cat")]
    path = write_rows(tmp_path / "a.csv", [*HEAD, "label"], rows)
    data = all_rows(path)
    assert data.column("captions") == [["a", "c"], ["e", "f"]]
    assert data.labels.tolist() == [0, 1]


def test_rows_without_an_image_a_caption_or_a_class_are_counted(tmp_path):
    rows = [("0", "a", "cat"), ("", LONG, "cat"), ("2", " ", "dog"), ("3", "d", "")]
    path = write_rows(tmp_path / "a.csv", [*HEAD, "label"], rows)
    data = all_rows(path)
    assert data.column("captions") == [["a"], ["d"]]
    assert data.labels.tolist() == [0, -1]
    assert "2 rows without an image or a caption left out" in data.note
    assert LONG not in data.note
    assert "1 without a class" in data.note


def test_captions_unfolded_in_training_alone(tmp_path):
    rows = []
    for image, split in (("0", "train"), ("1", "train"), ("2", "test")):
        for text in ("a", "b"):
            rows.append((image, f"{image} {text}", split))
    path = str(write_rows(tmp_path / "a.csv", [*HEAD, "split"], rows))
    train = common.load_data(path, "train", unfold_captions=True)
    captions = [train.captions(k) for k in range(4)]
    assert captions == [["0 a"], ["0 b"], ["1 a"], ["1 b"]]
    assert train.column("key") == ["0", "0", "1", "1"]
    assert train.folded().column("key") == ["0", "1"]
    assert train.folded().captions(1) == ["1 a", "1 b"]
    test = common.load_data(path, "test", unfold_captions=True)
    assert test.captions(0) == ["2 a", "2 b"]


@pytest.mark.parametrize("part, content", [("txt", b" "), ("cls", b"-1")])
def test_samples_of_a_tar_without_a_caption_or_a_class_are_counted(part, content, tmp_path):
    samples = tar_samples(range(9), "jpg", part)
    samples["000004"][part] = content
    del samples["000006"][part]
    data = all_rows(write_tar(tmp_path / "a.tar", samples))
    assert set(data.keys()) == samples.keys() - {"000004", "000006"}
    assert "2 samples left out, first 000004 of " in data.note


# ---------------------------------------- pictures in tables -------------------------------------
@pytest.mark.parametrize("kind", ["bytes", "no path", "one path"])
def test_rows_of_one_picture_in_a_table_are_one_example(kind, tmp_path):
    rows = []
    for row in range(36):
        i = row % 12
        cell = encode(picture(i))
        if kind != "bytes":
            cell = {"bytes": cell}
        if kind == "one path":
            cell["path"] = "image.png"
        rows.append((cell, caption(i, row // 12), CLASSES[i % 3]))
    path = write_rows(tmp_path / "a.parquet", [*HEAD, "label"], rows)
    samples = []
    for data in open_splits(path).values():
        samples += check_examples(data)
        assert all(len(texts) == 3 for texts in data.column("captions"))
    assert sorted(samples) == list(range(12))


# ---------------------------------------- videos -------------------------------------------------
@pytest.mark.parametrize("file", ["a.csv", "a.jsonl"])
def test_windows_of_one_video_are_examples_of_their_own(file, tmp_path):
    """Also where one side or both are open."""
    write_video(tmp_path / "long.mp4", range(40))
    windows = [(1, 1.5), (None, None), (3, None), (None, 1)]
    rows = []
    for text in ("one", "two"):
        for window in windows:
            rows.append(("long.mp4", *window, f"{text} {window}"))
    path = write_rows(tmp_path / file, ["video", "start", "end", "caption"], rows)
    data = all_rows(path, frames=2)
    assert data.column("captions") == [[f"one {window}", f"two {window}"] for window in windows]
    shown = [numbers(data.read(k)) for k in range(4)]
    assert shown == [[10, 14], [0, 39], [30, 39], [0, 9]]


def test_video_dir_finds_videos_by_path_name_and_stem(tmp_path):
    """Folders in a name decide: another one's video is missing. A dot is no ending: else clip.2
    would be the video of clip."""
    files = ["deep/er/000.mp4", "001.webm", "v_002.avi", "x.003.mp4", "P05/01.mp4", "P06/01.mp4"]
    write_clips(tmp_path / "all", dict(enumerate(files)))
    names = ["er/000", "001.mp4", "002", "x.003", "P05/01", "P06/01.mp4"]
    missing = ["elsewhere/001", "P07/01", "001.2"]
    rows = [(name, "words") for name in names + missing]
    path = write_rows(tmp_path / "a.csv", ["video", "caption"], rows)
    data = all_rows(path, video_dir=str(tmp_path / "all"), frames=4)
    assert data.column("key") == names
    shown = [number_of(data.read(k)) for k in range(6)]
    assert shown == list(range(6))
    assert "3 videos not there, first elsewhere/001" in data.note


# ======================================== splits ==================================================
def test_example_of_several_splits_stays_in_the_last_alone(tmp_path):
    """Also behind a link of either kind."""
    names = write_images(tmp_path, range(4))
    os.link(tmp_path / names[1], tmp_path / "hard.png")
    (tmp_path / "link.png").symlink_to(names[2])
    rows = [(name, "x", "train") for name in names]
    rows += [("hard.png", "y", "test"), ("link.png", "y", "val"), (names[3], "y", "test")]
    path = write_rows(tmp_path / "a.csv", [*HEAD, "split"], rows)
    assert keys_of(path) == {
        "train": {names[0]}, "val": {"link.png"}, "test": {"hard.png", names[3]}}
    assert "WARNING: 3 examples of train or val left out, which are in val or" in note_of(path)


def test_picture_in_tables_of_two_splits_stays_in_the_last_alone(tmp_path):
    write_parquet_images(tmp_path / "train.parquet", range(6))
    write_parquet_images(tmp_path / "test.parquet", range(4, 8))
    train = common.load_data(str(tmp_path), "train")
    assert "2 examples of train or val left out" in train.note
    splits = open_splits(tmp_path)
    assert len(splits["train"]) == 4
    assert len(splits["test"]) == 4


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
    smaller = set()
    for fraction in (0.01, 0.05, 0.3):
        sets = open_splits(path, holdout_fraction=fraction)
        keys = []
        for data in sets.values():
            keys += data.column("key")
        assert sorted(keys) == sorted(name for name, _ in rows)
        for split in ("val", "test"):
            assert len(sets[split]) == pytest.approx(4000 * fraction, rel=0.5)
        assert "held out of 4,000" in sets["val"].note
        val = set(sets["val"].keys())
        assert smaller < val
        smaller = val
    # a run may be resumed years later: these must never change
    sets = open_splits(path)
    assert sets["val"].column("key")[:4] == ["029.png", "078.png", "146.png", "153.png"]
    assert sets["test"].column("key")[:4] == ["007.png", "027.png", "054.png", "069.png"]


def test_windows_of_a_video_are_held_out_together(tmp_path):
    """Seconds as they come, 1e-05 too; another window moves none."""
    windows = [(None, 3), (1e-5, 2), (7.25, None), (1e6, 2e6)]
    videos = [f"v{k}.mp4" for k in range(100)]
    for video in videos:
        (tmp_path / video).touch()
    splits_of = []
    for some in (windows, windows[3:]):
        rows = []
        for video in videos:
            rows += [(video, start, end, "words") for start, end in some]
        path = tmp_path / f"{len(some)}.jsonl"
        write_rows(path, ["video", "start", "end", "caption"], rows)
        split_of = set()
        for split, data in open_splits(path).items():
            split_of.update((key.split()[0], split) for key in data.keys())
        assert len(split_of) == 100
        splits_of.append(split_of)
    assert splits_of[0] == splits_of[1]


@pytest.mark.parametrize("num_images, least", [(12, 2), (60, 10), (119, 19), (300, 20)])
def test_small_data_hold_out_twenty_images_or_a_sixth(num_images, least):
    fractions = np.random.default_rng(num_images).random(num_images)
    masks = held_out_masks(fractions, ["val", "test"], HELD_OUT_FRACTION)
    sizes = [mask.sum() for mask in masks.values()]
    assert min(sizes) >= least
    assert max(sizes) <= max(least, 0.1 * num_images)
    assert not (masks["val"] & masks["test"]).any()


def test_held_out_files_of_the_hub_depend_neither_on_the_cache_nor_on_the_commit(
        tmp_path, monkeypatch):
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    keys = []
    for home, commit in (("a", "1" * 40), ("b/c", "2" * 40)):
        snapshot = tmp_path / home / "datasets--some--pets" / "snapshots" / commit
        write_classes(snapshot, range(60))
        files = [str(path) for path in sorted(snapshot.glob("*/*"))]
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
    assert all(key.startswith(tuple(CLASSES)) for key in keys[0]["test"])


def test_captions_are_exchanged_in_training_alone(tmp_path):
    name = write_captions(tmp_path, 60)
    clean = open_splits(name)
    noisy = open_splits(name, caption_noise=0.5)
    before = clean.pop("train").column("captions")
    after = noisy["train"].column("captions")
    for split, data in clean.items():
        assert noisy[split].column("captions") == data.column("captions")
    is_exchanged = [a != b for a, b in zip(after, before)]
    assert sum(is_exchanged) == round(0.5 * len(before))
    assert noisy["train"].column("noisy").tolist() == is_exchanged
    assert sorted(after) == sorted(before)
    assert f"{sum(is_exchanged)} examples with another's captions" in noisy["train"].note


# ======================================== sets that are evaluated alone ===========================
TINY = ("--cpu --workers 0 --image-size 16 --batch-size 8 --max-steps 1 --eval-every 0").split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """train.csv of 40 images, test.csv of 30 others, both.csv of all; each has a class."""
    root = tmp_path_factory.mktemp("own")
    rows = []
    for i, name in enumerate(write_images(root, range(70))):
        rows.append((name, f"words of {name}", f"class {i % 2}"))
    header = [*HEAD, "label"]
    write_rows(root / "train.csv", header, rows[:40])
    write_rows(root / "test.csv", header, rows[40:])
    write_rows(root / "both.csv", header, rows)
    return root


def open_sets(root, file):
    """The training set of train.csv, and {name: splits} of what it is evaluated on: this file."""
    words = ["--dataset", str(root / "train.csv"), "--eval-datasets", str(root / file)]
    return open_data(temo.parse_args(words))


def test_another_file_is_test_as_a_whole_but_for_rows_that_are_trained_on(root):
    """Train then gives val, and keeps the rest."""
    train, sets = open_sets(root, "both.csv")
    val = sets[str(root / "train.csv")].pop("val")
    test = sets[str(root / "both.csv")].pop("test")
    assert not any(sets.values())  # there is no other split
    assert len(train) == 34
    assert len(val) == 6
    assert len(test) == 70 - 34
    trained = set(train.keys())
    assert not trained & {*val.keys(), *test.keys()}
    assert "34 rows left out, whose files were trained on" in test.note


def test_file_of_which_all_rows_are_trained_on_is_refused(root):
    train, _ = open_sets(root, "test.csv")
    rows = [(name, "words") for name in train.keys()]
    write_rows(root / "again.csv", HEAD, rows)
    with pytest.raises(EmptySplit, match="all of its 34 rows were trained on"):
        open_sets(root, "again.csv")


def test_eval_py_leaves_out_rows_that_were_trained_on(root, tmp_path, capsys):
    """Not of sets that the run evaluated: training has left these out of --extra-pairs."""
    rows = [(f"{i:03}.png", f"words {i}") for i in range(70)]
    pairs = write_rows(root / "pairs.csv", HEAD, rows[30:50])
    old = str(write_rows(root / "evaluated.csv", HEAD, rows[45:60]))
    new = str(root / "both.csv")
    flags = ["--dataset", root / "train.csv", "--weighting", "none", "--extra-pairs", pairs]
    run_script(mama, tmp_path / "run", *TINY, *flags, "--eval-datasets", old)
    results = evaluated(tmp_path / "run", "--tasks", "retrieval", "--datasets", old, new)
    assert results[old]["metrics"]["images"] == 15
    assert results[new]["metrics"]["images"] == 70 - 34 - 9
    words = "rows left out, whose files were trained on"
    assert f"34 {words}; 9 {words}" in capsys.readouterr().out


def test_eval_py_warns_of_a_training_set_that_has_changed(root, tmp_path, capsys):
    """A file that was cut holds out other rows, some of which were trained on."""
    path = root / "changing.csv"
    lines = (root / "train.csv").read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    run_script(temo, tmp_path / "run", *TINY, "--dataset", path)
    for num_rows, is_changed in ((41, False), (31, True)):
        path.write_text("".join(lines[:num_rows]))
        evaluated(tmp_path / "run", "--datasets", root / "test.csv")
        words = f"WARNING: {path} has changed since the run"
        assert (words in capsys.readouterr().out) == is_changed


def test_a_test_file_of_classes_learns_from_the_training_images(root, tmp_path, capsys):
    train = str(root / "train.csv")
    test = str(root / "test.csv")
    run_script(temperature_schedules, tmp_path / "run", *TINY, "--dataset", train)
    metrics = evaluated(tmp_path / "run", "--datasets", test)[test]["metrics"]
    assert metrics["images"] == 30
    assert "knn@1" in metrics
    assert f"knn and probe learn from the training images of {train}" in capsys.readouterr().out


def test_held_out_names_of_a_meta_set_are_left_out_and_counted(root, tmp_path):
    sets = open_splits(root / "train.csv")
    train = sets.pop("train")
    names = train.column("key")[:5]
    for data in sets.values():
        names.append(data.key(0))
    file = tmp_path / "clean.txt"
    file.write_text("\n".join(names))
    for others in (sets, {}):  # the training set need not be among those that are evaluated
        rows, description = named_rows(train, file, others)
        assert rows.tolist() == [0, 1, 2, 3, 4]
        assert description == "by name, 2 of val or test left out"


# ======================================== the start of a run ======================================
STOPPED = {
    "--image-encoder no/such": "no/such: ",
    "--init-from nan.safetensors": r".*\(val\): the model's outputs are not finite for \d+ of",
    "--lr 1e30 --lr-end 1e30 --grad-clip 0": (
        r"the loss is not finite at step 1: .*loss nan, .*keys \['\d+.png'"),
    "--output-dir text.pt": ".*text.pt.*: .*Not a directory"}


def stopped(dataset, folder, *flags):
    """The one line of the UserError that ends this run of two steps."""
    words = [*TINY, "--embed-dim", 16, "--max-steps", 2, "--dataset", dataset]
    with pytest.raises(UserError) as error:
        run_script(temo, folder, *words, *flags)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


@pytest.mark.parametrize("flags", STOPPED)
def test_what_ends_a_run_before_or_in_its_first_steps(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_bytes(TEXT)
    weight = torch.full((16, 128), float("nan"))
    save_file({"vision.projection.weight": weight}, "nan.safetensors")
    message = stopped(write_captions(tmp_path, 24), tmp_path / "run", *flags.split())
    assert re.match(STOPPED[flags], message)


def test_too_many_bad_samples_stop_the_run(tmp_path):
    """Two of the first batch cannot be read: counted, listed, and above --max-bad-fraction the
    end."""
    csv = write_captions(tmp_path / "data", 60)
    train = common.load_data(str(csv), "train")
    _, first_batch = next(batches.epoch_batches(len(train), 8, 42, 0, 1))
    bad = {train.key(row) for row in first_batch[:2].tolist()}
    for content, name in zip((TEXT, TRUNCATED), bad):
        (csv.parent / name).write_bytes(content)
    flags = [*TINY, "--dataset", csv, "--max-bad-fraction", 0.1]
    summary = run_script(temo, tmp_path / "all", *flags)
    assert summary["bad_samples"] == 2
    assert summary["steps"] == 1
    message = stopped(csv, tmp_path / "ended")
    assert "2 of about 40 samples cannot be read, above --max-bad-fraction 0.01" in message
    for run in ("all", "ended"):
        lines = (tmp_path / run / "bad_samples.txt").read_text().splitlines()
        assert {line.split("\t")[0] for line in lines} == bad
