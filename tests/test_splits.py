"""Which split an example is in and what the data hold: names of splits, held-out examples, classes, captions, twins."""

import io
import json
import os
import shutil
from pathlib import Path

import common
from contrastive import engine, evaluation, readers, sets
from contrastive.engine.base import UserError
from contrastive.sets import long_tail

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import temo
from helpers import (
    CLASSES,
    caption,
    encode,
    held_out,
    open_splits,
    picture,
    tar_samples,
    write_captions,
    write_images,
    write_parquet_images,
    write_rows,
    write_tar,
    write_video,
)
from tools import check

WORDS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing")
N = 9  # examples of a split that a folder or file names


def open_anew(path, **options):
    """open_splits of data that may have changed since they were opened."""
    sets.own.own_data.cache_clear()
    return open_splits(path, **options)


def refused(path, *words, split="train"):
    """The one line that refuses these data; all words stand in it."""
    with pytest.raises(UserError) as error:
        common.load_data(str(path), split)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    return message


# ---------------------------------------------------- names of splits ------------------------------------------------
def class_folders(folder, word, numbers):
    for i in numbers:
        write_images(folder / word / CLASSES[i % 3], [i])


def described(folder, word, numbers):
    names = write_images(folder / word, numbers)
    write_rows(folder / word / "metadata.csv", ["file_name", "caption"], [(x, f"words of {x}") for x in names])


def parquet(folder, word, numbers):
    write_parquet_images(folder / "data" / f"{word}-00000-of-00001.parquet", numbers)


def tars(folder, word, numbers):
    write_tar(folder / f"{word}-0000.tar", tar_samples(numbers, "jpg", "txt"))


def folders_of_tars(folder, word, numbers):
    write_tar(folder / word / "0000.tar", tar_samples(numbers, "jpg", "txt"))


def clips(folder, word, numbers):
    write_video(folder / "clip.mp4", range(2))
    for i in numbers:
        path = folder / word / CLASSES[i % 3] / f"{i:03}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "clip.mp4", path)
    (folder / "clip.mp4").unlink()


def images_in_a_table(folder, images, classes=None, **columns):
    """folder/train.parquet as `datasets` writes it; images: [(bytes, name)]; classes: names of a ClassLabel."""
    images = [{"bytes": content, "path": name} for content, name in images]
    table = datasets.Dataset.from_dict({"image": images} | columns).cast_column("image", datasets.Image())
    if classes:
        table = table.cast_column("label", datasets.ClassLabel(names=classes))
    folder.mkdir(exist_ok=True)
    table.to_parquet(str(folder / "train.parquet"))
    return folder


def a_csv(folder, names):
    folder.mkdir()
    return write_rows(folder / "a.csv", ["image", "caption"], [(f"{x}.png", f"words of {x}") for x in names])


LAYOUTS = [class_folders, described, parquet, tars, folders_of_tars, clips]


def write_both(layout, folder, train, test):
    layout(folder, train, range(N))
    layout(folder, test, range(N, 2 * N))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_name_that_is_no_split_beside_one_that_is_is_refused(layout, tmp_path):
    """A slip of the pen must neither leave images out nor put them into training."""
    for words in (("trian", "test"), ("train", "tset")):
        path = write_both(layout, tmp_path / "-".join(words), *words)
        for split in ("train", "val", "test"):
            refused(path, *words, *WORDS, split=split)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("words", [("train", "test"), ("training", "testing"), ("Train", "Test")])
def test_two_named_splits_are_these_two(words, layout, tmp_path):
    """In capitals, too: they never put test images into training."""
    found = open_splits(write_both(layout, tmp_path, *words))
    assert len(found["test"]) == N and sum(map(len, found.values())) == 2 * N


@pytest.mark.parametrize("where", ["own.csv", "own.jsonl", "metadata.csv", "parquet"])
def test_a_column_split_says_which_rows_are_whose(where, tmp_path):
    """One file for all splits, as Karpathy's: restval is train; each row keeps its own picture, caption and class."""
    words, names = ["train", "val", "restval", "test", "validation", "train"], write_images(tmp_path, range(6))
    columns = {"caption": [f"words {k}" for k in range(6)], "label": ["dog", "cat"] * 3, "split": words}
    if where == "parquet":
        name = images_in_a_table(tmp_path / where, [((tmp_path / x).read_bytes(), x) for x in names], **columns)
    else:
        write_rows(tmp_path / where, ["image", *columns], [*zip(names, *columns.values())])
        name = tmp_path if where == "metadata.csv" else tmp_path / where
    for split, wanted in (("train", [0, 2, 5]), ("val", [1, 4]), ("test", [3])):
        data = common.load_data(str(name), split)
        assert data.column("captions") == [[f"words {k}"] for k in wanted]
        for i, k in enumerate(wanted):
            assert (data.read(i).permute(1, 2, 0).numpy() == picture(k)).all()
            assert data.label_names[data.labels[i]] == ("cat" if k % 2 else "dog")
            assert data.key(i).endswith(names[k])


def test_a_column_split_of_other_words(tmp_path, capsys):
    rows = [(f"{k}.png", "x", "left" if k % 2 else "right") for k in range(60)]
    write_rows(tmp_path / "own.csv", ["image", "caption", "split"], rows)
    assert len(common.load_data(str(tmp_path / "own.csv"), "train")) > 40  # no name of a split: no column of splits
    assert "no value of its column split names a split, first 'right'" in capsys.readouterr().out
    write_rows(tmp_path / "odd.csv", ["image", "caption", "split"], [*rows[:59], ("59.png", "x", "train")])
    with pytest.raises(UserError, match="'right' in its column split names no split"):
        common.load_data(str(tmp_path / "odd.csv"), "train")


@pytest.mark.parametrize("column, words, said", [
    (" split", ("train", "test"), ""), ("SPLIT", ("TRAIN ", " Test"), ""), ("Split ", ("train2017", "test2017"), ""),
    ("subset", ("train", "test"), "its column subset names splits (test, train) and is not read"),
    (" Set", ("Train", "Test"), "Set names splits (test, train) and is not read"),
    ("is_test", ("0", "1"), "its column is_test is not read, test rows would be trained on"),
    ("is_training_image", ("1", "0"), "its column is_training_image is not read"),
    ("split", ("0", "1"), "its column split holds numbers (0), which name no split"),
    ("split", ("True", "False"), "its column split holds numbers (True)")])
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_column_that_says_whose_the_rows_are_is_never_passed_over(column, words, said, ending, tmp_path):
    """Passed over, its test rows are trained on."""
    names = write_images(tmp_path, range(30))
    rows = [(x, caption(i), words[i >= 20]) for i, x in enumerate(names)]
    file = write_rows(tmp_path / f"own.{ending}", ["image", "caption", column], rows)
    if said:
        refused(file, said)
    else:
        found = open_splits(file)
        assert [*found["test"].keys()] == names[20:] and sum(map(len, found.values())) == 30


def test_a_file_called_test_is_evaluated_whole(tmp_path, capsys):
    """A twentieth of it would be a gallery of few, and its recall a high one."""
    names = write_images(tmp_path, range(40))
    rows = [(x, caption(i)) for i, x in enumerate(names)]
    for word in ("flickr_test", "captions_val2017"):
        file, split = write_rows(tmp_path / f"{word}.json", ["image", "caption"], rows), readers.columns.split_of(word)
        assert len(common.load_data(str(file), split)) == 40
        refused(file, f"no train split; it has: {split}, as its name says; rename it to train on it")
    for word in ("trainval", "train_test", "greatest"):
        file = write_rows(tmp_path / f"{word}.csv", ["image", "caption"], rows)
        assert len(common.load_data(str(file), "train")) > 30
    file = write_rows(tmp_path / "other.csv", ["image", "caption"], rows)
    held = common.load_data(str(file), "test")
    assert f"{len(held)} of its 40 images, held out since none of its names says test" in held.note
    assert capsys.readouterr().out == ""
    flags = ["--cpu", "--dataset", str(tmp_path / "train_test.csv"), "--eval-datasets", str(file)]
    engine.data.evaluation_sets(temo.parse_args(flags))
    assert f"WARNING: {file}: test is only {len(held)} of its 40 images, held out for it" in capsys.readouterr().out
    engine.data.evaluation_sets(temo.parse_args(["--cpu", "--dataset", str(file)]))
    assert capsys.readouterr().out == ""


def test_tables_of_one_folder_are_splits_by_their_own_names(tmp_path):
    for word in ("Train", "Test"):
        write_parquet_images(tmp_path / f"{word}.parquet", range(N))
    assert len(open_splits(tmp_path)["test"]) == N


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_test_split_alone_is_evaluated_and_not_trained_on(layout, tmp_path):
    layout(tmp_path, "test", range(N))
    with pytest.raises(UserError, match="no train split; it has: test") as error:
        common.load_data(str(tmp_path), "train")
    assert not isinstance(error.value, common.EmptySplit)  # training ends there, evaluation goes on without val
    with pytest.raises(common.EmptySplit, match="no val split; it has: test"):
        common.load_data(str(tmp_path), "val")
    found = engine.data.evaluation_sets(temo.parse_args(["--eval-datasets", str(tmp_path), "--cpu"]))
    assert {s: len(d) for s, d in found[str(tmp_path)].items()} == {"test": N}


def test_words_in_names_of_files_lose_no_image(tmp_path):
    """some_test_007.png is an image like others, and so is one of the class test tube in train/ or test/."""
    for i in range(20):
        folder = tmp_path / "files" / CLASSES[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{'test' if i % 4 == 0 else 'img'}_{i:03}.png").write_bytes(encode(picture(i)))
        write_images(tmp_path / "folders" / "photos" / ["cat", "dog", "train station"][i % 3], [i])
        write_images(tmp_path / "both" / ("train", "test")[i % 2] / ("cat", "test tube")[i // 2 % 2], [i])
    assert sum(map(len, open_splits(tmp_path / "files").values())) == 20
    refused(tmp_path / "folders", "cat, dog beside train station: not a name of a split")
    found = open_splits(tmp_path / "both")
    assert len(found["test"]) == 10 and found["test"].label_names == ["cat", "test tube"]
    assert {int(Path(key).stem) % 2 for s in ("train", "val") for key in found[s].keys()} == {0}


def test_folders_that_name_splits_have_metadata_all_or_none(tmp_path):
    described(tmp_path / "a", "train", range(N))
    class_folders(tmp_path / "a", "test", range(N))
    refused(tmp_path / "a", "no metadata.csv, .jsonl or .parquet in test, but in train")
    for word in ("train", "val", "valid"):
        described(tmp_path / "b", word, range(N))
    refused(tmp_path / "b", "two of train, val, valid name one split")
    described(tmp_path / "c", "train", range(N))
    described(tmp_path / "c", "trian", range(N))
    write_captions(tmp_path / "c", 3, "metadata.csv")  # which is read instead of looking at the folders
    assert sum(map(len, open_splits(tmp_path / "c").values())) == 3


def test_what_other_programs_leave_in_a_folder_is_no_split(tmp_path):
    parquet(tmp_path / "a", "train", range(N))
    (tmp_path / "a" / "data" / "dataset_infos.json").write_text("{}")
    assert sum(map(len, open_splits(tmp_path / "a").values())) == N
    for word in ("train", "test"):
        class_folders(tmp_path / "b", word, range(N))
        (tmp_path / "b" / word / CLASSES[0] / "._000.png").write_bytes(b"of the Finder")
    for name in ("__MACOSX", ".ipynb_checkpoints"):
        class_folders(tmp_path / "b", name, range(3))
    (tmp_path / "b" / "empty").mkdir()
    assert len(open_splits(tmp_path / "b")["test"]) == N


# ---------------------------------------------------- held-out examples ----------------------------------------------
DOT = encode(np.zeros((1, 1, 3), np.uint8))  # an image, as small as they are


def images_in_parquet(folder, names):
    return images_in_a_table(folder, [(DOT, f"{x}.png") for x in names], caption=[f"words of {x}" for x in names])


def in_a_tar(folder, names):
    return write_tar(folder / "a.tar", {x: {"png": DOT, "txt": f"words of {x}".encode()} for x in names})


def in_class_folders(folder, names):
    for x in names:
        path = folder / CLASSES[int(x[-1]) % 3] / f"{x}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DOT)
    return folder


def places(path):
    """{name: split} of a data set."""
    found = {key: split for split, data in open_splits(path).items() for key in data.column("key")}
    assert set(found.values()) == {"train", "val", "test"}
    return found


@pytest.mark.parametrize("write", [a_csv, images_in_parquet, in_a_tar, in_class_folders])
def test_more_rows_move_no_old_one(write, tmp_path):
    """One row or a thousand, before, between or after the others; and the same data in another place."""
    many = 300 if write is in_class_folders else 1000  # files take their time
    old = [f"m{i:04}" for i in range(300)]
    before = places(write(tmp_path / "old", old))
    assert len(before) == 300
    for at, letter in ((0, "a"), (150, "m0149x"), (300, "z")):
        for count in (1, many):
            new = [f"{letter}{k:04}" for k in range(count)]
            after = places(write(tmp_path / f"{letter}{count}", old[:at] + new + old[at:]))
            assert len(after) == 300 + count and {x: after[x] for x in before} == before
            held = [x for x in after if after[x] != "train" and x not in before]
            assert count == 1 or 0.06 < len(held) / count < 0.14


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


def test_one_name_for_all_images_is_none(tmp_path):
    """Some parquet files call every image image.png: all would fall into one split."""
    images_in_a_table(tmp_path, [(DOT, "image.png")] * 100, caption=[caption(i) for i in range(100)])
    assert sorted(places(tmp_path), key=int) == [str(i) for i in range(100)]


def test_a_large_table_is_held_out_alike(tmp_path, monkeypatch):
    path = a_csv(tmp_path / "a", [f"m{i:04}" for i in range(300)])
    small, prints = places(path), {s: engine.verify.fingerprint(d) for s, d in open_splits(path).items()}
    monkeypatch.setattr(common, "IN_MEMORY", 0)
    assert {key: split for split, d in open_anew(path).items() for key in d.keys()} == small
    assert {s: engine.verify.fingerprint(d) for s, d in open_splits(path).items()} == prints


def test_too_little_to_hold_out_is_said(tmp_path):
    path = write_captions(tmp_path, 6)
    assert set(open_splits(path)) == {"train"}
    for split in ("val", "test"):
        with pytest.raises(common.EmptySplit, match=f"none of its names falls into the 5% .* for {split}; give a"):
            common.load_data(str(path), split)
    names = [x for x in (f"{i}.png" for i in range(2000)) if common.held_out_place(x) < 0.1][:9]
    path = write_rows(tmp_path / "b.csv", ["image", "caption"], [(x, f"words of {x}") for x in names])
    assert "all of its rows are held out" in refused(path)
    write_parquet_images(tmp_path / "hub" / "train.parquet", range(20))
    write_parquet_images(tmp_path / "hub" / "test.parquet", range(20, 26))
    options = {"data_dir": str(tmp_path / "hub"), "image_column": "image", "label_column": "label"}
    with pytest.raises(common.EmptySplit, match="cifar10: none of its names .* held out for val"):
        common.load_data("cifar10", "val", hold_out_val=True, **options)


# ---------------------------------------------------- fingerprints and twins -----------------------------------------
def prints(path):
    return {s: engine.verify.fingerprint(d) for s, d in open_anew(path).items()}


def test_a_fingerprint_knows_rows_names_and_sizes(tmp_path):
    path = write_captions(tmp_path / "a", 30)
    saved = prints(path)
    assert saved == prints(path) and engine.verify.changes(saved, open_splits(path)) == []
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert saved == prints(tmp_path / "b" / "captions.csv")  # and where they lie does not matter
    assert saved["train"]["examples"] == 27 and saved["train"]["digest"] != saved["val"]["digest"]

    text = path.read_text()
    path.write_text(text + "more.png,one more\n")
    assert engine.verify.changes(saved, open_anew(path)) == ["train: 27 examples, now 28"]
    path.write_text(text.replace("003.png", "renamed.png"))
    (tmp_path / "a" / "003.png").rename(tmp_path / "a" / "renamed.png")
    other = ["train: 27 examples as before, but other names or sizes"]
    assert engine.verify.changes(saved, open_anew(path)) == other
    (tmp_path / "a" / "renamed.png").rename(tmp_path / "a" / "003.png")
    words = next(line.partition(",")[2] for line in text.splitlines() if "003.png" in line)
    path.write_text(text.replace(words, "another word"))
    assert engine.verify.changes(saved, open_anew(path)) == ["train: 27 examples as before, but other captions"]
    older = {split: {k: v for k, v in of.items() if k != "captions"} for split, of in saved.items()}
    assert engine.verify.changes(older, open_anew(path)) == []  # a run from before captions were part of it
    path.write_text(text)
    assert engine.verify.changes(saved, open_anew(path)) == []
    write_images(tmp_path / "a", [5], height=40)
    assert engine.verify.changes(saved, open_anew(path)) == other
    (tmp_path / "a" / "005.png").unlink()
    assert engine.verify.changes(saved, open_anew(path)) == other
    assert engine.verify.changes({}, open_splits(path)) == []  # a run from before there were fingerprints


def test_a_fingerprint_of_very_many_rows_is_that_of_a_sample(tmp_path, monkeypatch, capsys):
    """All processes wait for it: 136 million rows took most of an hour."""
    def data(n, changed=-1):
        captions = [["another" if i == changed else f"number {i}"] for i in range(n)]
        return common.Data("made", "train", common.make_table(captions, [f"{i}.mp4" for i in range(n)], ["a.mp4"] * n))
    whole = engine.verify.fingerprint(data(100))
    monkeypatch.setattr(engine.verify, "SAMPLE", 20)
    monkeypatch.setattr(engine.verify, "STRETCH", 5)
    read, keys = [], common.Data.keys
    monkeypatch.setattr(common.Data, "keys", lambda self: (read.append(key) or key for key in keys(self)))
    saved = engine.verify.fingerprint(data(100))
    assert saved["examples"] == 100 and saved["sample"] == 20
    assert read[:5] == [f"{i}.mp4" for i in range(5)] and read[-1] == "99.mp4" and len(set(read)) == len(read) == 20
    assert engine.verify.changes({"train": saved}, {"train": data(100)}) == []
    assert engine.verify.changes({"train": saved}, {"train": data(101)}) == ["train: 100 examples, now 101"]
    assert len(engine.verify.changes({"train": saved}, {"train": data(100, changed=99)})) == 1
    assert engine.verify.changes({"train": saved}, {"train": data(100, changed=6)}) == []  # that is the price
    assert engine.verify.changes({"train": whole}, {"train": data(100)}) == []  # a run from before there were samples
    assert len(engine.verify.changes({"train": whole}, {"train": data(100, changed=6)})) == 1
    engine.verify.compare(tmp_path, data(100), {})
    assert "train: a resumed run will compare 20 of its 100 examples, and their number" in capsys.readouterr().out
    assert engine.base.read_json(tmp_path / "data.json") == {"train": saved}


@pytest.mark.parametrize("layout", [class_folders, parquet, tars, clips])
def test_a_fingerprint_of_every_layout(layout, tmp_path):
    layout(tmp_path / "a", "train", range(30))
    saved = prints(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert prints(tmp_path / "b") == saved
    file = max((p for p in (tmp_path / "b").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if layout in (class_folders, clips):
        file.write_bytes(file.read_bytes() + b"more")
    else:
        layout(tmp_path / "b", "train", [*range(29), 60])
    changed = engine.verify.changes(saved, open_anew(tmp_path / "b"))
    assert changed and all("examples" in line for line in changed)


SAME = [3, 5, 7]  # numbers of training pictures that the test split shows again


@pytest.mark.parametrize("layout", [class_folders, described, parquet, tars])
@pytest.mark.parametrize("in_memory", [False, True])
def test_twins_are_counted(layout, in_memory, tmp_path):
    layout(tmp_path, "train", range(10))
    layout(tmp_path, "test", [*SAME, *range(20, 26)])
    data = [common.load_data(str(tmp_path), s) for s in ("train", "test")]
    train, test = (d.in_memory() if in_memory else d for d in data)
    assert (train.pixels is not None) == in_memory
    seen = {int(Path(k).stem) for k in train.column("key")}
    assert engine.verify.twins(train, test) == len(seen & set(SAME)) >= 2
    again = [i for i, k in enumerate(test.column("key")) if int(Path(k).stem) in SAME]
    others = [i for i in range(len(test)) if i not in again]
    assert engine.verify.twins(train, test.select(others)) == 0
    assert engine.verify.twins(test, test.select([*again, *again, others[0]])) == 7


def test_windows_and_what_cannot_be_read_are_no_twins(tmp_path):
    write_video(tmp_path / "a.mp4", range(8))
    rows = [("a.mp4", k / 10, k / 10 + 0.1, f"part {k}") for k in range(4)]
    path = write_rows(tmp_path / "a.jsonl", ["video", "start", "end", "caption"], rows)
    data = common.load_data(str(path), "train")
    assert engine.verify.twins(data, data) == 0
    path = write_captions(tmp_path / "b", 6)
    data = common.load_data(str(path), "train")
    (tmp_path / "b" / "000.png").unlink()
    (tmp_path / "b" / "001.png").write_bytes(b"")
    assert engine.verify.twins(data, data) == 4


# ---------------------------------------------------- classes and captions -------------------------------------------
M = 35  # rows, of which at least one is held out as val and one as test in each layout
PICTURES = [(encode(picture(i)), f"{i:03}.png") for i in range(M)]


def classes_in_parquet(kind):
    """A parquet file of images whose rows 4 and 6 have no class; kind: of its label column."""
    def write(folder):
        labels = {"class": [i % 3 for i in range(M)], "number": [10 + i % 3 for i in range(M)],
                  "word": [CLASSES[i % 3] for i in range(M)]}[kind]
        labels[4], labels[6] = "" if kind == "word" else -1, None
        names = CLASSES if kind == "class" else None
        return images_in_a_table(folder, PICTURES, names, caption=[caption(i) for i in range(M)], label=labels)
    return write


def classes_in_rows(name):
    def write(folder):
        words = [CLASSES[i % 3] for i in range(M)]
        words[4], words[6] = "-1", "" if name.endswith("csv") else None
        rows = [(x, caption(i), words[i]) for i, x in enumerate(write_images(folder, range(M)))]
        return write_rows(folder / name, ["image", "caption", "label"], rows)
    return write


def classes_in_a_tar(folder):
    samples = tar_samples(range(M), "png", "txt", "cls")
    samples[f"{4:06}"]["cls"] = b"-1\n"
    del samples[f"{6:06}"]["cls"]
    return write_tar(folder / "a.tar", samples)


@pytest.mark.parametrize("write", [
    classes_in_parquet("class"), classes_in_parquet("number"), classes_in_parquet("word"),
    classes_in_rows("a.csv"), classes_in_rows("a.jsonl"), classes_in_rows("a.parquet"), classes_in_a_tar],
    ids=["ClassLabel", "numbers", "words", "csv", "jsonl", "parquet", "tar"])
def test_a_row_without_a_class_is_in_no_class(write, tmp_path):
    path = write(tmp_path)
    found = open_splits(path)
    where = {int(Path(key).stem): (d, i) for d in found.values() for i, key in enumerate(d.keys())}
    assert sorted(where) == list(range(M))  # its image and caption are used
    for k, (data, i) in where.items():
        assert data.labels[i] == (-1 if k in (4, 6) else k % 3)
    names = found["train"].label_names
    assert names == (None if path.suffix == ".tar" else ["10", "11", "12"] if names[0] == "10" else CLASSES)
    for data in found.values():
        assert "2 without a class (not used where classes are)" in data.note
    if names:
        tail = long_tail.labelled_sets(str(path), ratio=2.0)
        assert all(set(d.labels.tolist()) <= {0, 1, 2} for d in tail.values())
        whole = long_tail.labelled_sets(str(path))["train"]
        assert len(whole) == len(found["train"]) - sum(where[k][0].split == "train" for k in (4, 6))


class Eyes(torch.nn.Module):
    """Embeds a picture by its mean colours; texts at random."""

    def forward(self, x=None, tokens=None):
        if tokens is not None:
            return None, tokens["text"], None
        colours = x.mean((2, 3))  # (b, 3)
        return colours, None, colours


def test_knn_does_not_see_rows_without_a_class(tmp_path, monkeypatch):
    path = classes_in_rows("a.csv")(tmp_path)
    seen, whole = [], evaluation.by_class.knn_accuracy

    def knn_accuracy(train, train_labels, test, test_labels, **more):
        seen.append((len(train), train_labels.tolist(), len(test), test_labels.tolist()))
        return whole(train, train_labels, test, test_labels, **more)

    monkeypatch.setattr(evaluation.by_class, "knn_accuracy", knn_accuracy)
    train = common.load_data(str(path), "train")

    def tokenizer(texts):
        return {"text": torch.rand(len(texts), 3)}
    data = train.select([1, 2, *np.flatnonzero(train.labels < 0)])
    transform = common.EvalTransform(16, (0.5,) * 3, (0.5,) * 3)
    metrics, chance, _ = evaluation.retrieval.evaluate(Eyes(), tokenizer, transform, data, torch.device("cpu"), train)
    (rows, labels, others, theirs), = seen
    unknown = int((train.labels < 0).sum())
    assert unknown == 2 and rows == len(labels) == len(train) - unknown and others == len(theirs) == 2
    assert min(labels) == 0 and metrics["knn@1"]["top1"] == 100 and chance["knn@1"]["top1"] > 20


def silent_parquet(folder):
    """Rows 4 and 6 have nothing to say, row 8 says it among other things."""
    texts = [[caption(i), caption(i, 1)] for i in range(M)]
    texts[4], texts[6], texts[8] = None, [" ", None], ["", caption(8), None, " "]
    return images_in_a_table(folder, PICTURES, caption=texts), {}


def silent_rows(name):
    def write(folder):
        texts = [caption(i) for i in range(M)]
        texts[4], texts[6] = " \t", "" if name.endswith("csv") else None
        if name.endswith("jsonl"):
            texts = [[t] if t is not None else t for t in texts]
            texts[8] = ["", caption(8), None, " "]
        rows = [(x, texts[i]) for i, x in enumerate(write_images(folder, range(M)))]
        return write_rows(folder / name, ["image", "caption"], rows), {}
    return write


def silent_tar(folder):
    samples = tar_samples(range(M), "png", "txt")
    samples[f"{4:06}"]["txt"], samples[f"{6:06}"]["txt"] = b"", b" \n\n"
    samples[f"{8:06}"]["txt"] = f"\n {caption(8)} \n\n".encode()
    return write_tar(folder / "a.tar", samples), {}


def silent_json_in_a_tar(folder):
    samples = tar_samples(range(M), "png", "json")
    for i, title in ((4, None), (6, ["", None]), (8, ["", caption(8), None])):
        samples[f"{i:06}"]["json"] = json.dumps({"title": title}).encode()
    return write_tar(folder / "a.tar", samples), {"caption_column": "json.title"}


@pytest.mark.parametrize("write", [silent_parquet, silent_rows("a.csv"), silent_rows("a.jsonl"),
                                   silent_rows("a.parquet"), silent_tar, silent_json_in_a_tar],
                         ids=["images in parquet", "csv", "jsonl", "parquet", "tar", "json in a tar"])
def test_captions_that_say_nothing_are_left_out_and_counted(write, tmp_path):
    path, options = write(tmp_path)
    found = open_splits(path, **options)
    said = {int(Path(key).stem): d.captions(i) for d in found.values() for i, key in enumerate(d.keys())}
    assert sorted(said) == [i for i in range(M) if i not in (4, 6)]
    assert all(t == t.strip() and t.startswith(f"picture number {i}, ") for i, texts in said.items() for t in texts)
    assert said[8] == [caption(8)]
    for data in found.values():
        assert "2 without a caption left out" in data.note or "2 samples without an image or a caption" in data.note


def test_one_caption_for_all_is_said(tmp_path):
    names = write_images(tmp_path, range(M))
    rows = write_rows(tmp_path / "a.csv", ["image", "caption"], [(x, "a photo") for x in names])
    tar = write_tar(tmp_path / "a.tar", {f"{i:06}": {"png": DOT, "txt": b"a photo"} for i in range(M)})
    images_in_a_table(tmp_path / "images", [(DOT, x) for x in names], caption=["a photo"] * M)
    for path in (rows, tar, tmp_path / "images"):
        assert "ALL CAPTIONS ARE THE SAME" in common.load_data(str(path), "train").note, path
    other = write_rows(tmp_path / "b.csv", ["image", "caption"], [(x, f"a photo of {x}") for x in names])
    assert "THE SAME" not in common.load_data(str(other), "train").note
    class_folders(tmp_path / "classes", "train", range(0, 9, 3))  # class names are no captions
    class_folders(tmp_path / "classes", "train", [1])
    assert "THE SAME" not in common.load_data(str(tmp_path / "classes"), "train").note


def test_other_spellings_of_a_path_are_one_image(tmp_path):
    write_images(tmp_path / "p", range(6))
    spelled = ["p/000.png", "./p/000.png", "p//000.png", "p/../p/000.png"]
    rows = [(x, f"take {k}", "a") for k, x in enumerate(spelled)]
    rows += [(f"./p/{i:03}.png", caption(i), "b") for i in range(1, 6)] + [("", "an image that is not there", "c")]
    found = open_splits(write_rows(tmp_path / "a.csv", ["image", "caption", "label"], rows)).values()
    said = [(key, d.captions(i), d.label_names[d.labels[i]]) for d in found for i, key in enumerate(d.keys())]
    assert sorted(said) == [("p/000.png", [f"take {k}" for k in range(4)], "a"),
                            *((f"p/{i:03}.png", [caption(i)], "b") for i in range(1, 6))]
    assert all("1 rows without an image left out" in d.note and d.label_names == ["a", "b"] for d in found)


# ---------------------------------------------------- a strict reading -----------------------------------------------
def cut_with_an_end():
    """A JPEG whose second half is missing, but for the end marker."""
    whole = encode(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), "jpeg")
    return whole[:len(whole) // 2] + b"\xff\xd9"


def spoilt(folder):
    """A csv of twelve images: one cut, one a pipe, one too large, one a text, one missing."""
    path = write_captions(folder, 12)
    (folder / "001.png").write_bytes(cut_with_an_end())
    (folder / "002.png").unlink()
    os.mkfifo(folder / "002.png")
    out = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(out, "png")  # 196 million pixels in few bytes
    (folder / "003.png").write_bytes(out.getvalue())
    (folder / "004.png").write_bytes(b"this is no picture\n")
    (folder / "005.png").unlink()
    return path


def test_a_strict_reading_finds_what_decoders_pass_over(tmp_path, capfd):
    assert readers.pictures.decode(cut_with_an_end()).shape == (3, 64, 64)  # with grey where pixels are missing
    data = common.load_data(str(spoilt(tmp_path)), "train")
    bad = engine.verify.unreadable(data)
    assert set(bad) == {f"{i:03}.png" for i in range(1, 6)}
    assert "premature end" in bad["001.png"] and bad["002.png"] == "not a regular file"
    assert "196000000 pixels" in bad["003.png"]
    assert "not a readable image" in bad["004.png"] and "No such file" in bad["005.png"]
    os.write(2, b"stderr is back\n")
    said = capfd.readouterr().err
    assert said.endswith("stderr is back\n") and said.count("premature") == 1  # of decode, not of unreadable
    for i, key in enumerate(data.column("key")):
        assert engine.verify.content(data, i) or key in ("002.png", "005.png")
    with pytest.raises(ValueError, match="30 pixels|6 x 5 pixels"):
        readers.pictures.decode(encode(picture(0, 5, 6)), max_pixels=29)
    assert readers.pictures.decode(encode(picture(0, 5, 6)), max_pixels=30).shape == (3, 5, 6)


def test_what_is_too_large_to_compare_is_said(tmp_path, monkeypatch, capsys):
    for word in ("train", "test"):
        write_images(tmp_path / word, range(6))
        write_rows(tmp_path / word / "metadata.csv", ["file_name", "caption"], [(f"{i:03}.png", "a") for i in range(6)])
    check.main(["--dataset", str(tmp_path)])
    assert "test: 6 of 6 images are in train as well" in capsys.readouterr().out
    monkeypatch.setattr(engine.verify, "MOST", 4)
    check.main(["--dataset", str(tmp_path)])
    assert "test: its images are not compared with those of train" in capsys.readouterr().out
    data = open_anew(tmp_path)
    assert "not compared" in engine.verify.compare(tmp_path, data["train"], {"a": {"test": data["test"]}})


def test_a_pipe_is_no_video(tmp_path):
    os.mkfifo(tmp_path / "a.mp4")
    with pytest.raises(ValueError, match="not a regular file"):
        common.read_frames(tmp_path / "a.mp4", 4)
    with pytest.raises(OSError):
        common.read_frames(tmp_path / "none.mp4", 4)


def test_the_command_reads_every_split_there_is(tmp_path, capsys):
    spoilt(tmp_path / "a")
    check.main(["--dataset", str(tmp_path / "a" / "captions.csv")])
    said = capsys.readouterr().out
    assert "train: {'examples': 11, 'digest': " in said and "test: {'examples': 1" in said
    assert "for val; give a val split" in said and "test: 0 of 1 images are in train as well" in said
    assert "train: 002.png: not a regular file" in said
    described(tmp_path / "b", "test", range(N))
    check.main(["--dataset", str(tmp_path / "b")])
    assert "no train split; it has: test" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such path"):
        check.main(["--dataset", str(tmp_path / "nothing")])


# ---------------------------------------------------- classes, windows, bars -----------------------------------------
def test_rows_without_a_class_have_none_where_a_split_lacks_one(tmp_path):
    """Classes are numbered anew for all splits; -1 is no class and stays -1."""
    for word, labels in (("train", ["dog", "", "cat"]), ("validation", ["dog", ""]), ("test", ["cat", "dog", ""])):
        names = write_images(tmp_path / word, range(len(labels)))
        rows = [(x, f"words of {x}", y) for x, y in zip(names, labels)]
        write_rows(tmp_path / word / "metadata.csv", ["file_name", "caption", "label"], rows)
    splits = open_anew(tmp_path)
    assert {tuple(d.label_names) for d in splits.values()} == {("cat", "dog")}
    labels = {s: d.labels.tolist() for s, d in splits.items()}
    assert labels == {"train": [1, -1, 0], "val": [1, -1], "test": [0, 1, -1]}
    assert "1 without a class" in splits["train"].note


def test_two_tables_of_one_split_are_refused(tmp_path):
    """A card on the hub may give them any names; the second would take the place of the first."""
    for word in ("train_a", "train_b"):
        write_parquet_images(tmp_path / f"{word}.parquet", range(6))
    files = "".join(f"\n  - split: {w}\n    path: {w}.parquet" for w in ("train_a", "train_b"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:{files}\n---\n")
    with pytest.raises(UserError, match="two of train_a, train_b name one split"):
        sets.own.tables(str(tmp_path), {}, "some/set", {})


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_several_classes_of_an_example_are_none(ending, tmp_path, capsys):
    names = write_images(tmp_path, range(12))
    rows = [(x, caption(i), [i % 3, 2]) for i, x in enumerate(names)]
    file = write_rows(tmp_path / f"a.{ending}", ["image", "caption", "label"], rows)
    engine.base.say_once.cache_clear()
    assert common.load_data(str(file), "train").labels is None
    assert "--label-column label is not read: " in capsys.readouterr().out
    with pytest.raises(UserError, match="--label-column label: a.* holds lists or records there"):
        common.load_data(str(file), "train", label_column="label")


def test_windows_are_of_videos(tmp_path):
    """A column of an image csv that is called like one is nothing that an image has."""
    names = write_images(tmp_path, range(12))
    rows = [(x, caption(i), "left half") for i, x in enumerate(names)]
    file = write_rows(tmp_path / "a.csv", ["image", "caption", "segment"], rows)
    assert sum(map(len, open_anew(file).values())) == 12
    file = write_rows(tmp_path / "b.csv", ["video", "caption", "segment"], [("a.mp4", "words", "left half")])
    refused(file, "column segment: expected seconds")


@pytest.mark.parametrize("start, end", [("0", "1e999"), ("-3", "2"), ("5", "2"), ("0", "9" * 400), ("-1", "")])
def test_a_window_that_no_clip_has(start, end, tmp_path):
    """Read on, it would show other frames than those that were meant."""
    rows = [("a.mp4", "words", "1", "2"), ("a.mp4", "more", start, end)]
    refused(write_rows(tmp_path / "b.csv", ["video", "caption", "start", "end"], rows), "row 2", "expected seconds")


def test_images_beside_a_folder_of_videos_are_images(tmp_path):
    """--video-dir is of the videos that are trained on; an evaluation on images is given it, too."""
    write_captions(tmp_path / "images", 12)
    for file in ("images", "images/captions.csv"):
        splits = open_anew(tmp_path / file, video_dir=str(tmp_path))
        assert all(d.clip is None for d in splits.values()) and splits["train"].read(0).shape == (3, 20, 24)


def test_bars_of_the_library_stay_as_they_were(tmp_path):
    write_captions(tmp_path, 12)
    for switch, off in ((datasets.disable_progress_bars, True), (datasets.enable_progress_bars, False)):
        switch()
        open_anew(tmp_path)
        assert datasets.are_progress_bars_disabled() == off


# ---------------------------------------------------- what a folder leaves out ---------------------------------------
def table_beside_table(folder):
    write_parquet_images(folder / "train.parquet", range(N))
    write_rows(folder / "test.csv", ["image", "caption"], [("a.png", "a cat")])


def two_descriptions(folder):
    write_captions(folder, N, name="metadata.csv")
    write_rows(folder / "metadata.jsonl", ["file_name", "caption"], [("000.png", "a dog")])


def images_beside_videos(folder):
    for i in range(N):
        write_video(folder / CLASSES[i % 3] / f"{i}.mp4", range(4))
    write_images(folder / CLASSES[0], [20])


@pytest.mark.parametrize("write, said", [(table_beside_table, "1 .csv files are not read, only .parquet"),
                                         (two_descriptions, "1 .jsonl files are not read, only metadata.csv"),
                                         (images_beside_videos, "1 .png files are not read, only videos")])
def test_files_that_a_folder_leaves_out_are_said(write, said, tmp_path, capsys):
    write(tmp_path / "own")
    engine.base.say_once.cache_clear()
    assert len(common.load_data(str(tmp_path / "own"), "train")) > 0
    assert said in "".join(capsys.readouterr())


def test_a_folder_that_is_read_whole_says_nothing(tmp_path, capsys):
    write_parquet_images(tmp_path / "own" / "train.parquet", range(N))
    engine.base.say_once.cache_clear()
    common.load_data(str(tmp_path / "own"), "train")
    assert "not read" not in "".join(capsys.readouterr())


# ---------------------------------------------- what looks like another layout --------------------------------------
def test_a_folder_of_tables_of_paths(tmp_path):
    """Rows of an image become its captions, and paths start in the folder of the table."""
    halves = {"train": range(6), "test": range(6, 9)}
    for split, numbers in halves.items():
        rows = [(f"../images/{x}", f"{x} {k}") for x in write_images(tmp_path / "images", numbers) for k in range(3)]
        write_rows(tmp_path / "tables" / f"{split}.csv", ["image", "caption"], rows)
    data = open_anew(tmp_path / "tables")
    assert {split: len(of) for split, of in data.items()} == {"train": 6, "test": 3}
    for split, numbers in halves.items():
        for k, i in enumerate(numbers):
            assert data[split].captions(k) == [f"{i:03}.png {n}" for n in range(3)]
            assert torch.equal(data[split].read(k), torch.from_numpy(picture(i)).permute(2, 0, 1))


def test_windows_in_a_folder_of_tables(tmp_path):
    write_video(tmp_path / "videos" / "a.mp4", range(20))
    rows = [("a.mp4", f"part {k}", 0.5 * k, 0.5 * k + 0.5) for k in range(4)]  # a name that is not held out for test
    for split in ("train", "val"):
        write_rows(tmp_path / "tables" / f"{split}.csv", ["video", "caption", "start", "end"], rows)
    data = open_anew(tmp_path / "tables", frames=2, image_size=32, video_dir=str(tmp_path / "videos"))["train"]
    assert len(data) == 4 and data.clip and not torch.equal(data.read(0), data.read(3))


def test_a_folder_of_csv_keeps_its_cells_as_text(tmp_path):
    """As one csv does: 0003 is a name, 01 a class and None a caption."""
    for k, split in enumerate(("train", "val", "test")):
        for i in range(3 * k, 3 * k + 3):
            write_video(tmp_path / "videos" / f"{i:04}.mp4", range(4))
        rows = [(f"{i:04}", "None" if i % 3 else "NA", f"0{i % 2}") for i in range(3 * k, 3 * k + 3)]
        write_rows(tmp_path / "tables" / f"{split}.csv", ["video_id", "caption", "label"], rows)
    data = open_anew(tmp_path / "tables", video_dir=str(tmp_path / "videos"))
    assert [data[s].column("key") for s in data] == [[f"{i:04}" for i in range(3 * k, 3 * k + 3)] for k in range(3)]
    assert [c for s in data for c in data[s].column("captions")] == [["NA"], ["None"], ["None"]] * 3
    assert data["test"].label_names == ["00", "01"]


def test_csv_files_of_a_split_have_the_same_columns(tmp_path):
    names = write_images(tmp_path / "images", range(12))
    for k, header in enumerate((["image", "caption"], ["Caption", " Image"])):
        rows = [(f"../images/{x}", f"about {x}") for x in names[6 * k:6 * k + 6]]
        write_rows(tmp_path / "tables" / f"train-{k}.csv", header, [r[::1 - 2 * k] for r in rows])
    write_rows(tmp_path / "tables" / "test.csv", ["image", "caption"], [(f"../images/{names[0]}", "a")])
    write_rows(tmp_path / "tables" / "val.csv", ["image", "caption"], [(f"../images/{names[1]}", "a")])
    train = open_anew(tmp_path / "tables")["train"]
    assert [train.captions(i) for i in range(12)] == [[f"about {x}"] for x in names]
    write_rows(tmp_path / "tables" / "train-1.csv", ["image", "caption", "label"], [(names[0], "a", "b")])
    sets.own.own_data.cache_clear()
    refused(tmp_path / "tables", "train-1.csv has the columns image, caption, label, and train-0.csv image, caption")


def test_a_missing_video_is_not_its_namesake(tmp_path):
    """dog/0001 is not there: its captions are not those of cat/0001."""
    for i in (0, 1):
        write_video(tmp_path / "videos" / "cat" / f"{i:04}.mp4", range(4))
    write_video(tmp_path / "videos" / "dog" / "0000.mp4", range(4))
    rows = [(f"{kind}/{i:04}.mp4", f"a {kind}", kind, "train") for kind in ("cat", "dog") for i in range(2)]
    file = write_rows(tmp_path / "c.csv", ["video", "caption", "label", "split"], rows)
    train = open_anew(file, video_dir=str(tmp_path / "videos"))["train"]
    assert train.column("key") == ["cat/0000.mp4", "cat/0001.mp4", "dog/0000.mp4"]
    assert train.column("captions") == [["a cat"], ["a cat"], ["a dog"]] and train.labels.tolist() == [0, 0, 1]
    assert "1 videos are not in" in train.note


def test_two_names_of_a_video_are_one_video(tmp_path):
    """Else its windows would stand in train and in val, and equal windows would be each other's negatives."""
    for i in range(30):
        write_video(tmp_path / f"{i:04}.mp4", range(20))
    rows = [(f"{i:04}{kind}", f"{i} {k}{kind}", str(i % 2) if i or k else "1", start, start + 0.5) for i in range(30)
            for k, (kind, start) in enumerate((("", 0.0), (".mp4", 0.0), (".mp4", 0.5)))]  # 0000: two classes
    file = write_rows(tmp_path / "clips.csv", ["video", "caption", "label", "start", "end"], rows)
    data = open_anew(file)
    of_video = [{k.split()[0] for k in data[split].column("key")} for split in ("train", "val", "test")]
    assert sum(map(len, data.values())) == 60 and sum(map(len, of_video)) == 30 == len(set.union(*of_video))
    row = data["train"].column("key").index("0000 0-0.5 s")
    assert data["train"].captions(row) == ["0 0", "0 1.mp4"] and data["train"].labels[row] == -1


def test_rows_of_an_image_in_a_subfolder_are_its_captions(tmp_path):
    for part in ("a", "b"):
        names = write_images(tmp_path / part, range(20))
        write_rows(tmp_path / part / "metadata.csv", ["file_name", "caption"],
                   [(x, f"{part} {x} {k}") for x in names for k in range(2)])
    data = open_anew(tmp_path)
    assert sum(len(of) for of in data.values()) == 40 and "caption" not in data["train"].note
    assert all(len(of.captions(i)) == 2 for of in data.values() for i in range(len(of)))


def test_classes_of_rows_of_an_image(tmp_path, capsys):
    """One row may lack the class; two of them are none, and that is said."""
    for part in ("a", "b"):
        names = write_images(tmp_path / part, range(30))
        rows = [(x, f"{part} {x} {k}", ("cat", "" if x != names[4] else "dog")[k]) for x in names for k in range(2)]
        write_rows(tmp_path / part / "metadata.csv", ["file_name", "caption", "label"], rows)
    data = open_anew(tmp_path)
    unlabelled = [of.key(i) for of in data.values() for i in np.flatnonzero(np.asarray(of.labels) < 0)]
    assert sorted(unlabelled) == ["a/004.png", "b/004.png"]
    assert "2 images have rows of several classes" in capsys.readouterr().out


def test_paths_with_classes_alone_have_the_class_names_as_captions(tmp_path):
    images = [str(tmp_path / "images" / x) for x in write_images(tmp_path / "images", range(30))]
    table = datasets.Dataset.from_dict({"path": images, "label": [i % 3 for i in range(30)]})
    (tmp_path / "t").mkdir()
    table.cast_column("label", datasets.ClassLabel(names=CLASSES)).to_parquet(str(tmp_path / "t" / "train.parquet"))
    data = open_anew(tmp_path / "t")["train"]
    assert not data.has_captions and data.read(0).ndim == 3
    assert data.captions(0) == [CLASSES[data.labels[0]].replace("_", " ")]  # of whichever row was not held out


def test_an_image_twice_in_a_table_is_said(tmp_path, capsys):
    images = [(encode(picture(i)), f"{i}.png") for i in (0, 0, 1)]
    images_in_a_table(tmp_path / "t", images, caption=["a", "b", "c"])
    open_anew(tmp_path / "t")
    assert "1 rows have an image of the same name and size as another row" in capsys.readouterr().out


def test_descriptions_of_videos_in_subfolders_are_refused(tmp_path):
    for part in ("a", "b"):
        write_video(tmp_path / part / f"{part}.mp4", range(2))
        write_rows(tmp_path / part / "metadata.csv", ["file_name", "caption"], [(f"{part}.mp4", "it moves")])
    refused(tmp_path, "a/metadata.csv lies beside videos in a subfolder")


def test_a_table_over_folders_of_splits_needs_a_column_split(tmp_path):
    names = [f"{word}/{x}" for word in ("train", "test") for x in write_images(tmp_path / word, range(4))]
    write_rows(tmp_path / "metadata.csv", ["file_name", "caption"], [(x, f"words of {x}") for x in names])
    refused(tmp_path, "folders of several splits (test, train)", "no column split")
    write_rows(tmp_path / "metadata.csv", ["file_name", "caption", "split"],
               [(x, f"words of {x}", x.split("/")[0]) for x in names])
    assert {s: len(d) for s, d in open_anew(tmp_path).items()} == {"train": 4, "test": 4}
    file = write_rows(tmp_path / "train.csv", ["image", "caption"], [(x, f"words of {x}") for x in names])
    assert len(open_anew(file)["train"]) >= 5  # its name says that all rows are for training


def test_rows_of_several_classes_are_of_none(tmp_path, capsys):
    names = write_images(tmp_path, range(30))
    rows = [(x, f"words of {x}", c) for x in names for c in (("cat", "dog") if x == names[3] else ("cat",))]
    data = open_anew(write_rows(tmp_path / "a.csv", ["image", "caption", "label"], rows))
    assert [d.key(i) for d in data.values() for i in np.flatnonzero(np.asarray(d.labels) < 0)] == [names[3]]
    assert "1 images have rows of several classes" in capsys.readouterr().out


def test_one_parquet_file_of_images_is_read_as_its_folder(tmp_path):
    write_parquet_images(tmp_path / "t" / "train.parquet", range(40))
    one, folder = open_anew(tmp_path / "t" / "train.parquet"), open_splits(tmp_path / "t")
    assert {s: list(d.keys()) for s, d in one.items()} == {s: list(d.keys()) for s, d in folder.items()}
    assert torch.equal(one["train"].read(0), folder["train"].read(0)) and one["train"].label_names == CLASSES


def test_lists_that_numpy_wrote_are_refused_and_an_empty_list_is_no_caption(tmp_path):
    names = write_images(tmp_path, range(20))
    listed = np.array(["a cat.", "an animal"])
    refused(write_rows(tmp_path / "a.csv", ["image", "caption"], [(x, str(listed)) for x in names]),
            "lists without commas", "glued together")
    rows = [(x, "[]" if x == names[2] else str([f"a cat, {x}", "it's one"])) for x in names]
    data = open_anew(write_rows(tmp_path / "b.csv", ["image", "caption"], rows))
    assert sum(map(len, data.values())) == 19
    assert data["train"].captions(0) == [f"a cat, {data['train'].key(0)}", "it's one"]


def test_names_that_tars_repeat_get_the_tar_before_them(tmp_path):
    """Else one bad sample stands for those of all tars, and --verify-images leaves good ones out."""
    for k in range(3):
        samples = tar_samples(range(20), "png", "txt")
        if k == 1:
            samples["000004"]["png"] = samples["000004"]["png"][:60]
        write_tar(tmp_path / "t" / f"{k}.tar", samples)
    data = open_anew(tmp_path / "t")
    keys = [key for of in data.values() for key in of.keys()]
    assert len({*keys}) == 60 and "1/000004" in keys
    bad = {k: why for of in data.values() for k, why in engine.verify.unreadable(of).items()}
    assert [*bad] == ["1/000004"]
    assert sum(len(engine.verify.leave_out(of, bad)) for of in data.values()) == 59


def test_flags_that_would_do_nothing_are_refused(tmp_path, capsys):
    file = write_captions(tmp_path / "a", 30)
    tar = write_tar(tmp_path / "0.tar", tar_samples(range(30), "png", "txt"))
    for path, said, flags in ((file, "--streaming: reads tars", {"streaming": True}),
                              ("org/name", "--streaming: reads tars", {"streaming": True}),
                              ("org/name", "--data-dir .*no effect", {"data_dir": str(tmp_path)}),
                              (tar, "--data-dir .*no effect", {"data_dir": str(tmp_path)})):
        with pytest.raises(UserError, match=said):
            common.load_data(str(path), "train", **flags)
    data = common.load_data(str(tar), "train", join_captions=True)
    assert data.captions(0) == [" ".join(common.load_data(str(tar), "train").captions(0))]
    assert common.load_data("emoji", "train", join_captions=True).captions(0) == ["hash key hash"]
    common.load_data(str(file), "test", join_captions=True)
    assert "captions.csv (test) has several captions to join" in capsys.readouterr().out
    flags = {"join_captions": True}
    assert engine.data.other_options(flags, str(file))["join_captions"]
    assert "join_captions" not in engine.data.other_options(flags, "msvd")  # evaluated as its papers do


def test_drawn_sets_have_no_folder_and_no_columns(capsys):
    for flags in (["--data-dir", "."], ["--caption-column", "name"], ["--frame-cache", "f"], ["--extra-captions", "f"]):
        with pytest.raises(SystemExit):
            temo.parse_args(["--dataset", "emoji", *flags])
        assert f"{flags[0]}: only for data in files; it would have no effect" in capsys.readouterr().err
    temo.parse_args(["--dataset", "emoji", "--caption-column", "name", "--eval-datasets", "mine.csv"])


def test_clean_names_may_be_held_out_or_spelt_otherwise(tmp_path, capsys):
    file = write_captions(tmp_path, 200)
    data = open_anew(file)
    clean = tmp_path / "clean.txt"
    clean.write_text("".join(f"./{i:03}.png\n" for i in range(200)))
    rows, how = engine.data.named_rows(data["train"], clean, data)
    assert len(rows) == len(data["train"]) and f"{200 - len(rows)} held out" in how
    both = data["train"].select(np.repeat(np.arange(len(data["train"])), 2))  # as --unfold-captions: all of a name
    assert engine.data.named_rows(both, clean, data)[0].tolist() == list(range(len(both)))
    clean.write_text("000.png\nnever.png\n")
    with pytest.raises(UserError, match="1 of its 2 names are not in train, first 'never.png'"):
        engine.data.named_rows(data["train"], clean, data)
