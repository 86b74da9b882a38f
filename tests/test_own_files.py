"""Files and tables of the user that differ from the plainest ones: names of splits, words in names,
links, one picture in several rows, lists as text, csv files that shift."""

import io
import json
import os
import shutil
import tarfile

from contrastive.core.processes import UserError
from contrastive.data import folders, open_unnamed, user_data
from contrastive.data.options import DataOptions
from contrastive.data.folders import split_of_name

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import (
    caption, complains, encode, open_splits, picture, tar_samples, write_clips, write_images,
    write_rows, write_tar, write_video)

PNG = encode(picture(1))


def put(root, *names, count=3, kind="png"):
    """Files 0.png, 1.png, ... in each of these folders; a name with a dot is a file."""
    for name in names:
        files = [f"{name}/{i}.{kind}" for i in range(count)]
        if "." in name:
            files = [name]
        for file in files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_bytes(PNG)
    return root


def opened(path, **options):
    """{split: the keys} without those of splits that are held out, which are train's."""
    splits = {}
    for split, data in open_splits(path, **options).items():
        if "held out of" in data.note:
            split = "train"
        splits.setdefault(split, set()).update(data.keys())
    return splits


def folders_of(splits):
    """{split: the folders of its keys}."""
    return {split: {key.rpartition("/")[0] for key in keys} for split, keys in splits.items()}


def note_of(path, **options):
    return next(iter(open_splits(path, **options).values())).note


# ---------------------------------------- names of splits ----------------------------------------
NAMES = {  # (train, val, test)
    "capitals": ("Train", "Validation", "Test"),
    "shouted": ("TRAIN", "VAL", "TEST"),
    "ing": ("Training", "valid", "Testing"),
    "set": ("trainset", "devset", "testset"),
    "two words": ("training_set", "validation-data", "test images"),
    "camel case": ("trainingSet", "valSet", "testSet"),
    "years": ("train2014", "val2014", "test2015"),
    "eval": ("train", "eval", "test"),
}


@pytest.fixture(params=NAMES)
def names(request):
    return dict(zip(("train", "val", "test"), NAMES[request.param]))


def test_class_folders_in_folders_of_splits(names, tmp_path):
    for name in names.values():
        put(tmp_path, f"{name}/cat", f"{name}/dog")
    wanted = {split: {f"{name}/cat", f"{name}/dog"} for split, name in names.items()}
    assert folders_of(opened(tmp_path)) == wanted


def test_metadata_in_folders_of_splits(names, tmp_path):
    for name in names.values():
        put(tmp_path, name)
        rows = [(f"{i}.png", caption(i)) for i in range(3)]
        write_rows(tmp_path / name / "metadata.csv", ["file_name", "caption"], rows)
    wanted = {split: {name} for split, name in names.items()}
    assert folders_of(opened(tmp_path)) == wanted


def test_one_file_of_metadata_above_the_folders_of_splits(names, tmp_path):
    put(tmp_path, *names.values())
    rows = [(f"{name}/{i}.png", caption(i)) for name in names.values() for i in range(3)]
    write_rows(tmp_path / "metadata.jsonl", ["file_name", "caption"], rows)
    wanted = {split: {name} for split, name in names.items()}
    assert folders_of(opened(tmp_path)) == wanted


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_named_after_splits(kind, names, tmp_path):
    for split, name in names.items():
        rows = [(f"{split}/{i}.png", caption(i)) for i in range(3)]
        write_rows(tmp_path / "data" / f"{name}-00000.{kind}", ["image", "caption"], rows)
    assert folders_of(opened(tmp_path)) == {split: {split} for split in names}


def test_tars_named_after_splits(names, tmp_path):
    for number, name in enumerate(names.values()):
        numbers = range(6 * number, 6 * number + 6)
        write_tar(tmp_path / name / "0.tar", tar_samples(numbers, "jpg", "txt"))
    firsts = {split: min(keys) for split, keys in opened(tmp_path).items()}
    assert firsts == {"train": "000000", "val": "000006", "test": "000012"}


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_stream_warns_where_one_split_serves_as_two(split, tmp_path):
    for number, name in enumerate(("train", split)):
        tar = tar_samples(range(6 * number, 6 * number + 6), "jpg", "txt")
        write_tar(tmp_path / name / "0.tar", tar)
    splits = open_unnamed(str(tmp_path), DataOptions(streaming=True))
    assert list(splits["val"].keys()) == list(splits["test"].keys())
    other = {"val": "test", "test": "val"}[split]
    words = f"WARNING: no tar is named {other}: those of {split} are {other}, too"
    assert words in splits["train"].note


def test_words_of_the_column_split(names, tmp_path):
    rows = [(f"{split}/{i}.png", "x", f" {name} ") for split, name in names.items() for i in "123"]
    path = write_rows(tmp_path / "a.csv", ["image", "caption", "split"], rows)
    assert folders_of(opened(path)) == {split: {split} for split in names}


def test_a_column_split_in_capitals_divides_the_rows(names, tmp_path):
    rows = [(f"{split}/{i}.png", "x", name) for split, name in names.items() for i in "123"]
    path = write_rows(tmp_path / "a.csv", ["image", "caption", "Split"], rows)
    assert folders_of(opened(path)) == {split: {split} for split in names}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_words_for_splits_that_has_another_name_is_refused(kind, tmp_path):
    """Else its test rows would be trained on. Beside files of splits, and as words of one split
    alone, it says nothing new."""
    rows = [(f"{i}.png", caption(i), "Test" if i % 3 else "train") for i in range(9)]
    header = ["image", "caption", "subset"]
    path = write_rows(tmp_path / f"a.{kind}", header, rows)
    complains(path, "train", "the column subset holds test, train; call it split if")
    for split in ("train", "test"):
        write_rows(tmp_path / "b" / f"{split}.{kind}", header, rows[:6])
    assert {*opened(tmp_path / "b")} == {"train", "test"}
    path = write_rows(tmp_path / f"c.{kind}", header, [row for row in rows if row[2] == "train"])
    assert len(opened(path)["train"]) == 3


@pytest.mark.parametrize("kind", ["rows", "videos"])
def test_a_split_of_which_nothing_is_left_is_warned_of(kind, tmp_path):
    """Since a part of train takes its place."""
    rows = [(f"{i}.png", caption(i), "train") for i in range(9)]
    rows += [(f"{i}.png", "", "test") for i in range(9, 12)]
    header = ["image", "caption", "split"]
    if kind == "videos":
        write_clips(tmp_path, {i: f"{i}.mp4" for i in range(9)})
        rows = [(name.replace("png", "mp4"), "x", split) for name, _, split in rows]
        header[0] = "video"
    note = note_of(write_rows(tmp_path / "a.csv", header, rows))
    assert "WARNING: all 3 rows of the split test are left out" in note


def test_names_with_words_of_no_split_or_of_two():
    for name in ("bus", "tested", "attest", "train_test_split", "protest", "2014", ""):
        assert split_of_name(name) is None, name
    for path in ("train/test", "Training/my-test-set/cat"):
        with pytest.raises(UserError, match="is it test or train"):
            splits_of_paths([path, "val"])


def test_what_all_share_names_a_split_only_if_nothing_else_does():
    assert splits_of_paths(["test_data/train", "test_data/test"]) == {
        "test_data/train": "train",
        "test_data/test": "test",
    }
    assert splits_of_paths(["test/a", "test/b"]) == {"test/a": "test", "test/b": "test"}
    with pytest.raises(UserError, match="is it test or train"):
        splits_of_paths(["test/part1", "test/train_part"])


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_what_belongs_to_no_split_beside_others_is_refused(kind, tmp_path):
    for number, name in enumerate(("Train", "Test", "extra")):
        if kind == "folder":
            put(tmp_path, f"{name}/cat", f"{name}/dog")
        else:
            write_tar(tmp_path / name / "0.tar", tar_samples([number], "jpg", "txt"))
    complains(tmp_path, "train", "extra", " belongs to no split, beside Test")


def test_a_table_that_belongs_to_no_split_beside_others_is_counted(tmp_path):
    for name in ("train", "test", "sample_submission"):
        rows = [(f"{name}/{i}.png", caption(i)) for i in range(3)]
        write_rows(tmp_path / f"{name}.csv", ["image", "caption"], rows)
    assert folders_of(opened(tmp_path)) == {"train": {"train"}, "test": {"test"}}
    assert "1 tables name no split and are not read, first sample_sub" in note_of(tmp_path)


@pytest.mark.parametrize("kind", ["folders", "tables", "tars", "card"])
def test_trainval_beside_val_is_refused(kind, tmp_path):
    """It holds the images of val: all of them would be trained on."""
    words = ["train", "val", "trainval", "test"]
    for word in words:
        if kind == "folders":
            put(tmp_path, f"{word}/cat", f"{word}/dog")
        elif kind == "tars":
            write_tar(tmp_path / f"{word}.tar", tar_samples(range(3), "jpg", "txt"))
        else:
            write_rows(tmp_path / f"{word}.csv", ["image", "caption"], [(f"{word}.png", "x")])
    if kind == "card":
        card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
        for word in words:
            card += f"  - split: {word}\n    path: {word}.csv\n"
        (tmp_path / "README.md").write_text(card + "---\n")
    complains(tmp_path, "train", "trainval holds the rows of val, too", "leave one of them out")


def test_trainval_is_train_where_there_is_no_val(tmp_path):
    for word in ("trainval", "test"):
        write_rows(tmp_path / f"{word}.csv", ["image", "caption"], [(f"{word}.png", "x")])
    assert opened(tmp_path) == {"train": {"trainval.png"}, "test": {"test.png"}}


def test_files_in_several_splits_are_counted(tmp_path):
    rows = [(f"{i}.png", "x", "train" if i < 9 else "test") for i in range(12)]
    rows += [("3.png", "y", "test"), ("./5.png", "y", "val"), ("0.png", "y", "train")]
    path = write_rows(tmp_path / "a.csv", ["image", "caption", "split"], rows)
    assert "WARNING: 2 files with rows in several splits, first 3.png" in note_of(path)
    rows[-3:] = []
    path = write_rows(tmp_path / "b.csv", ["image", "caption", "split"], rows)
    assert "several splits" not in note_of(path)

    write_video(tmp_path / "a.mp4", range(50))
    rows = [("a.mp4", 0, 1, "x", "train"), ("a.mp4", 1, 2, "y", "test")]
    path = write_rows(tmp_path / "c.csv", ["video", "start", "end", "caption", "split"], rows)
    assert "WARNING: 1 file with rows in several splits, first a.mp4" in note_of(path)


def test_pictures_of_tables_in_several_splits_are_counted(tmp_path):
    for name, numbers in (("train", range(6)), ("test", range(4, 8))):
        rows = [(encode(picture(i)), caption(i)) for i in numbers]
        write_rows(tmp_path / f"{name}.parquet", ["image", "caption"], rows)
    assert "WARNING: 2 files with rows in several splits, first row" in note_of(tmp_path)


def test_a_data_card_names_the_splits_and_others_are_counted(tmp_path):
    for name in ("one", "two"):
        rows = [(f"{name}/{i}.png", caption(i)) for i in range(3)]
        write_rows(tmp_path / f"{name}.csv", ["image", "caption"], rows)
    card = [{"split": "Test", "path": "one.csv"}, {"split": "minival", "path": "two.csv"}]
    card = json.dumps({"configs": [{"config_name": "default", "data_files": card}]})
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    assert folders_of(opened(tmp_path)) == {"test": {"one"}}
    assert "3 rows of the split minival are not read" in note_of(tmp_path)


def test_the_column_split_divides_a_single_split_of_any_name(tmp_path):
    words = ["train"] * 7 + ["val"] + ["test"] * 2
    rows = [(f"{word}/{i}.png", caption(i), word) for i, word in enumerate(words)]
    head = ["image", "caption", "split"]
    file = write_rows(tmp_path / "data" / "test-00000-of-00001.parquet", head, rows)
    for path in (file, tmp_path):
        assert folders_of(opened(path)) == {word: {word} for word in ("train", "val", "test")}
    write_rows(tmp_path / "data" / "train-00000-of-00001.parquet", head, rows[:7])
    open_unnamed.cache_clear()
    splits = {split: len(keys) for split, keys in opened(tmp_path).items()}
    assert splits == {"train": 7, "test": 10}


# ---------------------------------------- words in other names -----------------------------------
def test_a_column_split_beside_files_of_splits_is_noted(tmp_path):
    for split in ("train", "test"):
        rows = [(f"{split}/{i}.png", caption(i), "val") for i in range(3)]
        write_rows(tmp_path / f"{split}.csv", ["image", "caption", "split"], rows)
    splits = open_unnamed(str(tmp_path), DataOptions())
    assert folders_of(opened(tmp_path))["test"] == {"test"}
    assert "the column split is not read" in splits["train"].note


def test_words_for_splits_in_names_of_files_and_classes(tmp_path):
    put(tmp_path, "bus", "train", "bullet_train", "test_tube", count=5)
    put(tmp_path, *[f"bus/test-{i}.png" for i in range(5)])
    put(tmp_path, *[f"train/train-{i}.png" for i in range(5)])
    splits = open_splits(tmp_path)
    assert sum(map(len, splits.values())) == 30 and "not" not in splits["train"].note
    assert splits["train"].label_names == ["bullet_train", "bus", "test_tube", "train"]


def test_words_for_splits_in_names_of_files_beside_metadata(tmp_path):
    files = [f"COCO_{word}2014_{i}.png" for word in ("train", "val", "test") for i in range(4)]
    put(tmp_path, *files)
    rows = [(file, caption(i)) for i, file in enumerate(files)]
    write_rows(tmp_path / "metadata.csv", ["file_name", "caption"], rows)
    assert opened(tmp_path) == {"train": set(files)}


@pytest.mark.parametrize(
    "tree, words",
    [
        (["Train", "Test"], "Test, Train are splits, not classes"),
        (["cat/train", "cat/test", "dog/train", "dog/test"], "test, train are splits"),
        (["cat"], "cat is its only class folder"),
        (["train/cat", "test/cat"], "cat is its only class folder"),
        (["cat", "dog", "logo.png"], "some files are in no class folder"),
        (["train/cat", "train/dog", "test"], "class folders are at different depths"),
        (["images", "captions.csv"], "captions.csv reads this table"),
    ],
)
def test_folders_that_are_no_classes_are_refused_in_one_sentence(tree, words, tmp_path):
    put(tmp_path, *tree)
    complains(tmp_path, "train", words)


# ---------------------------------------- files --------------------------------------------------
def test_images_without_a_row_and_rows_without_a_file_are_counted(tmp_path):
    put(tmp_path / "data", *[f"{i}.png" for i in range(10)])
    put(tmp_path, "elsewhere.png")
    rows = [(f"{i}.png", caption(i)) for i in range(4, 11)]
    rows += [("../elsewhere.png", "far"), ("", "nothing")]
    write_rows(tmp_path / "data" / "metadata.csv", ["file_name", "caption"], rows)
    keys = {f"{i}.png" for i in range(4, 10)} | {"../elsewhere.png"}
    assert opened(tmp_path / "data") == {"train": keys}
    note = note_of(tmp_path / "data")
    assert "4 images or videos are in no row of the metadata, first " in note
    assert "2 rows name files that are not there, first " in note


def test_links_to_folders_are_followed_once(tmp_path):
    put(tmp_path / "classes", "bus", "car")
    put(tmp_path / "disk", "plane")
    (tmp_path / "classes" / "plane").symlink_to(tmp_path / "disk" / "plane")
    (tmp_path / "classes" / "also_bus").symlink_to(tmp_path / "classes" / "bus")
    (tmp_path / "classes" / "bus" / "loop").symlink_to(tmp_path / "classes")
    assert folders_of(opened(tmp_path / "classes")) == {"train": {"bus", "car", "plane"}}
    words = "2 links to folders that are read already, passed over, first "
    assert words in note_of(tmp_path / "classes")
    write_tar(tmp_path / "disk" / "tars" / "0.tar", tar_samples(range(6), "jpg", "txt"))
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "test").symlink_to(tmp_path / "disk" / "tars")
    assert [*opened(tmp_path / "tars")] == ["test"]
    write_clips(tmp_path / "disk" / "videos", {0: "video0.mp4"})
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "more").symlink_to(tmp_path / "disk" / "videos")
    path = write_rows(tmp_path / "a.csv", ["video", "caption"], [("video0", "x")])
    assert opened(path, video_dir=str(tmp_path / "videos")) == {"train": {"video0"}}


def test_glob_characters_in_the_names_of_folders(tmp_path):
    put(tmp_path / "a[1] {b}*?", "cat[0]", "dog")
    assert folders_of(opened(tmp_path / "a[1] {b}*?")) == {"train": {"cat[0]", "dog"}}
    path = write_rows(tmp_path / "c[2]*" / "a.csv", ["image", "caption"], [("0.png", "x")])
    assert opened(path) == opened(path.parent) == {"train": {"0.png"}}


def test_files_of_macos_are_no_samples(tmp_path):
    put(tmp_path / "f", "cat", "dog", "cat/._0.png", "__MACOSX/cat/._1.png", "dog/.hidden.png")
    assert folders_of(opened(tmp_path / "f")) == {"train": {"cat", "dog"}}
    assert "1 hidden images or videos are not read" in note_of(tmp_path / "f")
    (tmp_path / "t").mkdir()
    with tarfile.open(tmp_path / "t" / "0.tar", "w") as tar:
        for i in range(6):
            for name, content in ((f"{i}.png", PNG), (f"{i}.txt", b"words")):
                for member in (f"._{name}", name):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    assert opened(tmp_path / "t") == {"train": {str(i) for i in range(6)}}
    assert "left out" not in note_of(tmp_path / "t")


def test_images_beside_tars_are_named_and_most_frequent_files_are_read(tmp_path):
    write_tar(tmp_path / "0.tar", tar_samples(range(6), "jpg", "txt"))
    put(tmp_path, "preview.png")
    assert "images and videos beside the tars are not read" in note_of(tmp_path)
    put(tmp_path / "x", "cat", "dog", "dog/clip.mp4")
    write_tar(tmp_path / "x" / "images.tar", {})
    assert "1 files are not read, since most are images" in note_of(tmp_path / "x")


def test_tables_of_another_kind_are_counted(tmp_path):
    for k in range(2):
        write_rows(tmp_path / f"train_{k}.csv", ["image", "caption"], [(f"{k}.png", "x")])
    write_rows(tmp_path / "labels.jsonl", ["image", "caption"], [("2.png", "x")])
    assert opened(tmp_path) == {"train": {"0.png", "1.png"}}
    assert f"1 json table not read, first {tmp_path / 'labels.jsonl'}" in note_of(tmp_path)


def test_a_table_of_another_kind_that_names_a_split_is_refused(tmp_path):
    """Else test would be rows of train."""
    for name in ("train_1.csv", "train_2.csv", "test.jsonl"):
        write_rows(tmp_path / name, ["image", "caption"], [(f"{name}.png", "x")])
    complains(tmp_path, "train", "test.jsonl would not be read, since most tables of the folder "
              "are csv: write it as csv, or move it away")


@pytest.mark.parametrize("kind", ["metadata", "classes", "tars"])
def test_tables_beside_what_is_read_are_counted(kind, tmp_path):
    put(tmp_path, "images/0000", "images/0001")
    write_rows(tmp_path / "captions.csv", ["image", "caption"], [("images/0000/0.png", "x")])
    if kind == "metadata":
        rows = [(f"images/{k}/{i}.png", "x") for k in ("0000", "0001") for i in range(3)]
        write_rows(tmp_path / "metadata.csv", ["file_name", "caption"], rows)
    elif kind == "tars":
        for k in range(8):
            write_tar(tmp_path / f"{k}.tar", tar_samples(range(3), "jpg", "txt"))
        (tmp_path / "9.tar.gz").touch()
        assert "1 archive not read (unpack them), first " in note_of(tmp_path)
    assert f"1 csv table not read, first {tmp_path / 'captions.csv'}" in note_of(tmp_path)


def test_images_in_an_archive_are_not_read(tmp_path):
    put(tmp_path / "a", "cat", "dog")
    shutil.make_archive(str(tmp_path / "b" / "images"), "zip", tmp_path / "a")
    complains(tmp_path / "b", "train", "nothing in it can be read; unpack ", "images.zip")
    write_rows(tmp_path / "b" / "a.csv", ["image", "caption"], [("cat/0.png", "x")])
    assert "1 archive not read (unpack them), first " in note_of(tmp_path / "b")
    write_rows(tmp_path / "a" / "metadata.csv", ["file_name", "caption"], [("cat/0.png", "x")])
    shutil.make_archive(str(tmp_path / "c" / "images"), "zip", tmp_path / "a")
    card = "---\nconfigs:\n- config_name: default\n  data_files: images.zip\n---\n"
    (tmp_path / "c" / "README.md").write_text(card)
    complains(tmp_path / "c", "train", "cat/0.png::", "is inside an archive; unpack it")


def test_gifs_that_are_read_as_images_are_counted(tmp_path):
    put(tmp_path, "cat", "dog")
    put(tmp_path, "dog/x.gif", "cat/y.GIF")
    assert "2 gif files read as still images; a column video reads" in note_of(tmp_path)


# ---------------------------------------- one picture in several rows ----------------------------
ROWS = [(i, k) for i in range(40) for k in range(3)]


def write_embedded(path, paths, column="image", **columns):
    """A parquet file of 40 pictures with three captions each, a row for each caption."""
    features = {column: datasets.Image(), "caption": datasets.Value("string")}
    content = [{"bytes": encode(picture(i)), "path": path} for (i, _), path in zip(ROWS, paths)]
    content = {column: content, "caption": [caption(i, k) for i, k in ROWS], **columns}
    table = datasets.Dataset.from_dict(content)
    for name, feature in features.items():
        table = table.cast_column(name, feature)
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
        "with and without ./": ["./" * k + f"{i}.png" for i, k in ROWS],
    }[kind]
    check_pictures(write_embedded(tmp_path / "a.parquet", paths))


def test_pictures_in_a_table_are_hashed_once(tmp_path, monkeypatch):
    path = write_embedded(tmp_path / "a.parquet", [None] * 120)
    keys = opened(path)
    monkeypatch.setattr(user_data, "hashlib", None)
    open_unnamed.cache_clear()
    assert opened(path) == keys


def test_rows_of_one_file_on_the_disk_are_one_example(tmp_path):
    write_images(tmp_path, range(40))
    forms = ("{}", "./{}", "x/../{}")
    rows = [(forms[k].format(f"{i:03}.png"), caption(i, k)) for i, k in ROWS]
    check_pictures(write_rows(tmp_path / "a.csv", ["image", "caption"], rows))
    rows = [(f"{tmp_path}/" * (k == 1) + f"{i:03}.png", caption(i, k)) for i, k in ROWS]
    check_pictures(write_rows(tmp_path / "b.jsonl", ["image", "caption"], rows))


def test_names_of_one_video_are_one_example(tmp_path):
    write_clips(tmp_path, {0: "video0.mp4", 1: "video1.mp4"})
    forms = ("video{}", "video{}.mp4", "./video{}.mp4")
    rows = [(form.format(i), caption(i)) for form in forms for i in range(2)]
    path = write_rows(tmp_path / "a.csv", ["video", "caption"], rows)
    assert opened(path) == {"train": {"video0", "video1"}}


def test_a_video_inside_a_table_has_no_windows(tmp_path):
    content = write_video(tmp_path / "a.mp4", range(8)).read_bytes()
    table = {"video": [content] * 2, "caption": ["a", "b"], "start": [0.0, 0.4]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    complains(tmp_path / "a.parquet", "train", "the column start cuts files on the disk")


@pytest.mark.parametrize("kind", ["bytes", "large bytes", "struct", "struct without path"])
def test_a_parquet_of_bytes_without_a_note_of_the_library(kind, tmp_path):
    contents = [encode(picture(i)) for i, _ in ROWS]
    column = {
        "bytes": pa.array(contents, pa.binary()),
        "large bytes": pa.array(contents, pa.large_binary()),
        "struct": pa.array([{"bytes": x, "path": None} for x in contents]),
        "struct without path": pa.array([{"bytes": x} for x in contents]),
    }[kind]
    table = pa.table({"image": column, "caption": [caption(i, k) for i, k in ROWS]})
    pq.write_table(table, tmp_path / "a.parquet")
    check_pictures(tmp_path / "a.parquet")


def test_rows_of_a_table_without_bytes_are_counted(tmp_path):
    contents = [encode(picture(i)) if i else None for i in range(12)]
    table = pa.table({"picture": contents, "caption": [caption(i) for i in range(12)]})
    pq.write_table(table, tmp_path / "a.parquet")
    note = note_of(tmp_path / "a.parquet", image_column="picture")
    assert f"1 row without an image or a caption left out, the first: {caption(0)}" in note


# ---------------------------------------- cells --------------------------------------------------
def captions_of(path, **options):
    """The captions of all examples."""
    splits = open_splits(path, **options).values()
    return sorted(data.captions(i) for data in splits for i in range(len(data)))


def write_cells(path, cells):
    return write_rows(path, ["image", "caption"], [(f"{i}.png", x) for i, x in enumerate(cells)])


@pytest.mark.parametrize("write", [json.dumps, repr])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_text_of_a_list_is_a_list(write, kind, tmp_path):
    texts = [["a dog, brown", "it's a dog"], ["a cat"], [], ['a "big" car', "b"]]
    path = write_cells(tmp_path / f"a.{kind}", [*map(write, texts), ""])
    assert captions_of(path) == sorted(text for text in texts if text)
    assert "2 rows without an image or a caption left out" in note_of(path)


@pytest.mark.parametrize("other", ["a dog", "['a dog' 'a brown dog']", "[3, 4]", '["a", 3]'])
def test_texts_of_lists_beside_others_are_refused(other, tmp_path):
    path = write_cells(tmp_path / "a.csv", ['["a cat", "a big cat"]', other])
    complains(path, "train", "some cells of caption are the text of a list", " is not the text of")


def test_brackets_alone_are_no_list(tmp_path):
    cells = ["[music]", "[applause] 'thanks'", "[2019]", "a 'dog'"]
    assert captions_of(write_cells(tmp_path / "a.csv", cells)) == sorted([cell] for cell in cells)


def test_a_list_of_captions_in_a_tar(tmp_path):
    samples = tar_samples(range(6), "jpg")
    texts = {key: [f"a {key}", f"b {key}"] for key in samples}
    for kind in ("json", "txt"):
        parts = {k: v | {kind: json.dumps(texts[k]).encode()} for k, v in samples.items()}
        path = write_tar(tmp_path / f"{kind}.tar", parts)
        assert captions_of(path, caption_column=kind) == sorted(texts.values())
    path = write_tar(tmp_path / "raw.tar", tar_samples(range(6), "jpg", "json"))
    complains(path, "train", "is not the text of a list", caption_column="json")


@pytest.mark.parametrize(
    "head, rows, words",
    [
        ("image,caption", ["0.png,a,"], "line 2 has 3 fields, the header 2"),
        ("image,caption,label", ["0.png,a,cat,"], "line 2 has 4 fields, the header 3"),
        ("image,caption", ["0.png,a", "1.png,b, c"], "line 3 has 3 fields, the header 2"),
        ("image\tcaption", ["0.png\ta\tb"], "line 2 has 3 fields, the header 2"),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "metadata.csv", "folder of test/train.csv"])
def test_a_csv_with_rows_longer_than_its_header(head, rows, words, name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([head.replace("image", "file_name"), *rows]) + "\n")
    complains(path if name == "a.csv" else path.parent, "train", words)


@pytest.mark.parametrize("name", ["a folder", "with a card"])
def test_csv_files_with_other_columns_are_refused(name, tmp_path):
    """`datasets` drops the columns that the first file lacks: train would lose its windows."""
    folder = tmp_path / name
    write_rows(folder / "test.csv", ["video", "caption"], [("a.mp4", "x")])
    rows = [("a.mp4", "y", 0, 1), ("a.mp4", "z", 1, 2)]
    write_rows(folder / "train.csv", ["video", "caption", "start", "end"], rows)
    if name == "with a card":
        card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
        for split in ("test", "train"):
            card += f"  - split: {split}\n    path: {split}.csv\n"
        (folder / "README.md").write_text(card + "---\n")
    complains(folder, "train", "test.csv has the columns video, caption, but ",
              "train.csv has video, caption, start, end: give both the same columns")


def test_a_csv_of_a_data_card_is_text(tmp_path):
    rows = [(f"{i:03}", "NA" if i == 3 else f"clip {i}") for i in range(4)]
    write_rows(tmp_path / "a" / "own.csv", ["image", "caption"], rows)
    card = "---\nconfigs:\n- config_name: default\n  data_files: own.csv\n"
    (tmp_path / "a" / "README.md").write_text(f"{card}---\n")
    assert opened(tmp_path / "a") == {"train": {"000", "001", "002", "003"}}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "own.csv").write_text("image;caption\n0.png;x, y\n1.png;z\n")
    (tmp_path / "b" / "README.md").write_text(f"{card}  sep: ';'\n---\n")
    assert captions_of(tmp_path / "b") == [["x, y"], ["z"]]


def test_json_files_with_other_columns_are_refused_in_one_line(tmp_path):
    write_rows(tmp_path / "test.jsonl", ["image", "caption"], [("0.png", "x")])
    write_rows(tmp_path / "train.jsonl", ["image", "caption", "label"], [("0.png", "x", "y")])
    complains(tmp_path, "train", "one file has the columns image, caption, label, another "
              "image, caption, or ")


def test_a_csv_with_a_column_twice_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("image,caption,caption\n0.png,x,y\n")
    complains(tmp_path / "a.csv", "train", "a.csv: two columns are called caption")


@pytest.mark.parametrize(
    "cell, kind",
    [
        ([{"raw": "a dog", "tokens": ["a", "dog"]}], "list<item: struct<"),  # Karpathy's list
        ([["a", "dog"]], "list<item: list<item: string>>"),
        ({"raw": "a dog"}, "struct<raw: string>"),
        ([2, 3], "list<item: int64>"),
    ],
)
def test_captions_that_are_no_texts_are_refused(cell, kind, tmp_path):
    rows = [(f"{i}.png", cell) for i in range(3)]
    path = write_rows(tmp_path / "a.json", ["filename", "sentences"], rows)
    complains(path, "train", f"a.json: the column sentences holds {kind}", "needs texts or lists")


@pytest.mark.parametrize("column", ["image", "caption", "label"])
def test_a_number_among_the_texts_of_a_json_is_refused(column, tmp_path):
    """`datasets` writes all cells of such a column as JSON, with quotation marks."""
    rows = [{"image": f"{i}.png", "caption": f"c {i}", "label": f"l {i}"} for i in range(6)]
    rows[3][column] = 3
    path = write_rows(tmp_path / "a.jsonl", list(rows[0]), [row.values() for row in rows])
    complains(path, "train", f"a.jsonl: the column {column} holds extension<arrow.json>")


def test_empty_lists_of_captions_are_counted(tmp_path):
    rows = [(f"{i}.png", ["a dog"] * (i > 0)) for i in range(3)]
    path = write_rows(tmp_path / "a.json", ["image", "caption"], rows)
    assert "1 row without an image or a caption left out" in note_of(path)


def test_a_csv_of_the_same_time_is_read_again_if_its_size_differs(tmp_path):
    for number in (40, 60):  # as tar -x or cp -p write it
        path = write_rows(
            tmp_path / "a.csv", ["image", "caption"], [(f"{i}.png", "x") for i in range(number)])
        os.utime(path, (1e9, 1e9))
        open_unnamed.cache_clear()
        assert len(opened(path)["train"]) == number


def test_captions_of_a_tar_are_divided_at_line_breaks_alone(tmp_path):
    text = "a\u2028b\x85c\x0bd\r\ne\n"
    samples = {k: v | {"txt": text.encode()} for k, v in tar_samples(range(6), "jpg").items()}
    path = write_tar(tmp_path / "a.tar", samples)
    assert captions_of(path)[0] == ["a\u2028b\x85c\x0bd", "e"]


def test_classes_of_one_name_are_said_to_be_joined(tmp_path):
    put(tmp_path, "train/animals/mouse", "train/animals/cat", "train/computers/mouse")
    put(tmp_path, "test/animals/mouse", "test/animals/cat")
    words = "1 class name of several folders, which are one class: first train/animals/mouse and "
    assert words in note_of(tmp_path)


def test_the_column_file_name_comes_before_others_of_that_ending(tmp_path):
    put(tmp_path, "image", "mask")
    rows = [(f"mask/{i}.png", f"image/{i}.png", "x") for i in range(3)]
    write_rows(tmp_path / "metadata.csv", ["mask_file_name", "file_name", "caption"], rows)
    assert folders_of(opened(tmp_path)) == {"train": {"image"}}


def test_captions_with_line_breaks_are_counted(tmp_path):
    rows = [f"{i}.png,words {i}\n" for i in range(9)]
    rows[2], rows[5] = '2.png,"words 2\n', '5.png,words 5"\n'
    (tmp_path / "a.csv").write_text("image,caption\n" + "".join(rows))
    assert len(captions_of(tmp_path / "a.csv")) == 6
    assert "1 captions have line breaks, first of 2.png (in a csv, a stray" in note_of(
        tmp_path / "a.csv"
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_nan_in_a_column_of_seconds_is_an_open_side(kind, tmp_path):
    write_video(tmp_path / "a.mp4", range(50))
    rows = [("a.mp4", np.nan, 2.5, "x"), ("a.mp4", 1.0, 2.0, "y")]
    path = write_rows(tmp_path / f"b.{kind}", ["video", "start", "end", "caption"], rows)
    assert opened(path) == {"train": {"a.mp4 -2.5 s", "a.mp4 1-2 s"}}
    assert "1 rows have nan in the column start, which counts as empty" in note_of(path)


def test_a_folder_is_walked_once_for_each_real_folder(tmp_path):
    put(tmp_path, "a", "b")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    assert len(folders.files_below(tmp_path)) == 6


def test_an_infinite_end_is_the_end_of_the_video(tmp_path):
    """So that all windows of a video are held out together."""
    rows = []
    for i in range(30):
        rows += [(f"{i}.mp4", 0.0, 2.0, "x"), (f"{i}.mp4", "2", "inf", "y")]
        (tmp_path / f"{i}.mp4").touch()
    path = write_rows(tmp_path / "a.csv", ["video", "start", "end", "caption"], rows)
    videos = []
    for data in open_splits(path).values():
        assert len(data) % 2 == 0
        videos += {key.partition(" ")[0] for key in data.keys()}
    assert len(videos) == len(set(videos)) == 30
    assert data.key(1).endswith(" 2- s") and data.sources[1]["source"]["end"] is None


@pytest.mark.parametrize("place", ["disk", "table"])
def test_images_have_no_windows(place, tmp_path):
    """Rows of one image are one example, whatever columns start and end say."""
    rows = [(f"{i // 2}.png", caption(i), float(i), i + 1.0) for i in range(8)]
    if place == "table":
        rows = [({"bytes": encode(picture(i // 2)), "path": None}, *rows[i][1:]) for i in range(8)]
    header = ["image", "caption", "start", "end"]
    path = write_rows(tmp_path / "a.parquet", header, rows)
    assert sorted(captions_of(path)) == [[caption(i), caption(i + 1)] for i in range(0, 8, 2)]


def test_class_numbers_as_pandas_writes_them(tmp_path):
    """An int column with a hole becomes 3.0, -1.0 and nothing, beside a file of whole numbers."""
    words = ["0.0", "1.0", "-1.0", "", "NaN", "2"]
    rows = [(f"{i}.png", caption(i), word) for i, word in enumerate(words)]
    write_rows(tmp_path / "train.csv", ["image", "caption", "label"], rows)
    rows = [(f"{i}.png", caption(i), str(i % 3)) for i in range(10, 13)]
    write_rows(tmp_path / "test.csv", ["image", "caption", "label"], rows)
    test = open_splits(tmp_path)["test"]
    assert test.label_names == ["0", "1", "2"] and list(test.labels) == [1, 2, 0]
    assert "3 without a class" in test.note


def test_a_column_of_classes_as_captions_gives_their_names(tmp_path):
    features = datasets.Features({
        "image": datasets.Value("string"), "kind": datasets.ClassLabel(names=["a_cat", "a dog"])})
    rows = {"image": [f"{i}.png" for i in range(5)], "kind": [0, 1, 1, 0, -1]}
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(str(tmp_path / "a.parquet"))
    captions = captions_of(tmp_path / "a.parquet", caption_column="kind")
    assert captions == [["a cat"], ["a cat"], ["a dog"], ["a dog"]]


@pytest.mark.parametrize("kind", ["classes", "metadata", "tars"])
def test_files_of_unknown_kinds_are_counted(kind, tmp_path):
    """Images that are not read, such as HEIC and those without an ending; README.md is none."""
    put(tmp_path, "cat/x.heic", "dog/x.tga", "README.md")
    (tmp_path / "dog" / "unnamed").write_bytes(PNG)
    if kind == "tars":
        write_tar(tmp_path / "0.tar", tar_samples(range(6), "jpg", "txt"))
    else:
        put(tmp_path, "cat", "dog")
    number = 3
    if kind == "metadata":
        rows = [("cat/0.png", "x"), ("dog/unnamed", "y")]  # what a row names is read
        write_rows(tmp_path / "metadata.csv", ["file_name", "caption"], rows)
        number = 2
    note = note_of(tmp_path)
    assert f"{number} other files not read, first {tmp_path}/cat/x.heic" in note


def test_a_sample_of_a_tar_without_a_class_is_no_class(tmp_path):
    """With captions it stays; without, it is left out and counted."""
    samples = tar_samples(range(9), "jpg", "cls")
    for key in list(samples)[::4]:
        samples[key]["cls"] = b"-1"
    write_tar(tmp_path / "a" / "0.tar", samples)
    assert {text for [text] in captions_of(tmp_path / "a")} == {"class 0", "class 1", "class 2"}
    words = "3 samples left out, first 000000 of "
    assert words in note_of(tmp_path / "a") and "the class is -1" in note_of(tmp_path / "a")
    for number, parts in enumerate(samples.values()):
        parts["txt"] = f"class {number + 5} of steam engines".encode()
    write_tar(tmp_path / "b" / "0.tar", samples)
    assert len(captions_of(tmp_path / "b")) == 9
    assert "the classes serve as captions" not in note_of(tmp_path / "b")


def test_splits_of_tars_that_only_a_data_card_names_are_refused(tmp_path):
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: a/*.tar\n  - split: validation\n    path: b/*.tar\n---\n"
    )
    layouts = {"unnamed": ("a", "b"), "named": ("train", "val"), "a part": ("train",)}
    for layout, names in layouts.items():
        for number, name in enumerate(names):
            tar = tmp_path / layout / name / "0.tar"
            write_tar(tar, tar_samples([number], "jpg", "txt"))
        (tmp_path / layout / "README.md").write_text(card)
    words = "README.md names val, but no tar", "such as a/0.tar"
    complains(tmp_path / "unnamed", "train", *words)
    assert {*opened(tmp_path / "named")} == {"train", "val"}
    assert {*opened(tmp_path / "a part")} == {"train"}


def test_captions_of_tars_of_the_hub_are_a_line_each(tmp_path):
    """As `datasets` reads them, with a column __key__, and as our index of tars does."""
    tar = write_tar(tmp_path / "0.tar", tar_samples(range(6), "jpg", "txt"))
    table = datasets.load_dataset("webdataset", data_files={"train": str(tar)})
    tables = folders.Tables({"train": table["train"]}, from_hub=True)
    data = user_data.data_of_tables("org/name", tables, DataOptions(), tmp_path)["train"]
    assert list(data.keys()) == [f"{i:06}" for i in range(6)]
    assert data.column("captions") == [[caption(i), caption(i, 1)] for i in range(6)]
    assert "line breaks" not in data.note


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_files_that_number_classes_in_other_ways_are_refused(kind, tmp_path):
    """As class_encode_column makes them of splits one by one, of which one lacks a class."""
    classes = {"train": ["bird", "cat", "dog"], "test": ["cat", "dog"]}
    for folder in ("a", "b"):
        for split, names in classes.items():
            if folder == "b":
                names = classes["train"]
            features = datasets.Features({
                "image": datasets.Image(), "caption": datasets.Value("string"),
                "label": datasets.ClassLabel(names=names)})
            rows = {"image": [{"bytes": encode(picture(i))} for i in range(6)],
                    "caption": ["x"] * 6, "label": ["cat", "dog"] * 3}
            table = datasets.Dataset.from_dict(rows, features=features)
            if kind == "parquet":
                (tmp_path / folder).mkdir(exist_ok=True)
                table.to_parquet(str(tmp_path / folder / f"{split}.parquet"))
            else:
                table.save_to_disk(str(tmp_path / folder / split))
    words = "number the classes of the column label in other ways, "
    complains(tmp_path / "a", "train", words + "cat, dog and bird, cat, dog: write both with one")
    assert open_splits(tmp_path / "b")["test"].label_names == classes["train"]


def test_class_numbers_of_files_that_a_data_card_names(tmp_path):
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    for split, names in {"train": ["bird", "cat", "dog"], "test": ["cat", "dog"]}.items():
        features = datasets.Features({
            "image": datasets.Image(), "caption": datasets.Value("string"),
            "label": datasets.ClassLabel(names=names)})
        rows = {"image": [{"bytes": PNG}], "caption": ["x"], "label": ["cat"]}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(str(tmp_path / f"{split}.parquet"))
        card += f"  - split: {split}\n    path: {split}.parquet\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    words = "number the classes of the column label in other ways"
    complains(tmp_path, "train", words, "bird, cat, dog and cat, dog")
