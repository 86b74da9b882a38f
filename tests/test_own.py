"""The user's own data: every layout, of pictures and of videos; its splits, columns, windows and names."""

import shutil
from pathlib import Path

import common
from contrastive.data import HELD_OUT, held_out_place

import numpy as np
import pytest
import torch

import temo
import temperature_schedules
from helpers import (
    CLASSES,
    caption,
    complains,
    encode,
    frame_number,
    numbers,
    open_splits,
    picture,
    refused,
    tar_samples,
    write_clips,
    write_images,
    write_parquet_images,
    write_rows,
    write_tar,
    write_video,
)

HALVES = {"train": range(0, 8), "val": range(8, 10), "test": range(10, 12)}  # where a layout names its splits

N = 35  # samples where it does not: enough that one of each layout's names falls into val and one into test


def held_out(names):
    """{split: names} as the hash of each name places it, where train alone is given."""
    out = {"val": [], "test": [], "train": []}
    for name in names:
        out[("val", "test", "train")[min(2, int(held_out_place(name) / HELD_OUT))]].append(name)
    return out


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
        for word, half in zip(("train", "validation", "test"), HALVES.values()):
            write(folder, word, half)
        return folder, {}
    return write_all

def one(i):
    return [caption(i)]


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
    "class folders in splits": (in_splits(class_folders), word, third, True),
    "metadata.csv": (metadata("metadata.csv"), one, None, False),
    "metadata in splits": (in_splits(metadata("metadata.jsonl")), one, None, True),
    "tars jpg cls": (tars("jpg", "cls"), lambda i: [f"class {i % 3}"], third, False),
    "one tar": (one_tar, lambda i: [caption(i), caption(i, 1)], None, False),
    "tars in splits": (in_splits(tars("jpg", "txt")), lambda i: [caption(i), caption(i, 1)], None, True),
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
            assert str(tmp_path) not in data.key(k)  # a key does not change with the folder
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


# ---------------------------------------------------- splits ---------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_more_or_less_of_train_is_val(fraction, tmp_path):
    """The bands of one hash: test stays, val holds what a smaller one held, and few rows are said."""
    write_rows(tmp_path / "t.csv", ["image", "caption"], [(f"{i}.png", caption(i)) for i in range(1000)])
    usual, other = (open_splits(tmp_path / "t.csv", **more) for more in ({}, {"val_fraction": fraction}))
    before, after = ({split: {*data.keys()} for split, data in of.items()} for of in (usual, other))
    assert after["test"] == before["test"] and len(set.union(*after.values())) == 1000 == sum(map(len, after.values()))
    assert len(after["val"]) == pytest.approx(1000 * fraction, rel=0.5)
    assert after["val"] < before["val"] or after["val"] > before["val"]
    assert ("fewer than 20 rows, --val-fraction holds out more" in other["val"].note) == (fraction < 0.02)


def test_val_fraction_is_refused_where_nothing_is_held_out(capsys):
    assert "for own data" in refused(temo.parse_args, ["--val-fraction", "0.1"], capsys)  # emoji has a val
    for flags in (["--dataset", "x.csv"], ["--eval-datasets", "imagenet", "--hold-out-val"]):
        assert temo.parse_args([*flags, "--val-fraction", "0.1"]).val_fraction == 0.1


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
    keys = {s: common.load_data(path, s).column("key") for s in ("train", "val", "test")}
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
    complains(tmp_path / "odd.csv", "train", "'trian' in the column split is none of")


def test_a_test_split_alone_is_evaluated_and_not_trained_on(tmp_path):
    class_folders(tmp_path, "test", range(12))
    for split in ("train", "val"):
        complains(tmp_path, split, f"no {split} split; it has: test")
    assert len(common.load_data(str(tmp_path), "test")) == 12


# ---------------------------------------------------- columns --------------------------------------------------------


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
    words = "--caption-column none: there is no such column; there are: picture, said"
    complains(path, "train", words, image_column="picture", caption_column="none")


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


# ---------------------------------------------------- videos ---------------------------------------------------------

OWN = [*range(19), 31]  # 18 of them train, one is held out as val and one as test
SHOWN = [0, 2, 5, 7]  # of eight frames, four spread


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 clips of eight frames each."""
    root = tmp_path_factory.mktemp("own")
    write_clips(root, {k: f"{k:03}.mp4" for k in OWN})
    return root


def takes(k):
    return [f"clip {k}, take {t}" for t in range(2)]


def examples(path, **options):
    """[(data set, index)] over the three splits."""
    sets = open_splits(path, **({"frames": 4} | options)).values()
    return [(data, i) for data in sets for i in range(len(data))]


def write_layout(layout, videos, root):
    """The clips of a folder with their takes, as a table of paths or in another layout: (path, options)."""
    names = {k: f"{k:03}.mp4" for k in OWN}
    content = {k: (videos / name).read_bytes() for k, name in names.items()}
    if layout == "tars":
        samples = {f"{k:06}": {"mp4": content[k], "txt": "\n".join(takes(k)).encode()} for k in OWN}
        write_tar(root / "tars" / "0.tar", samples)
        return root / "tars", {}
    if layout == "videos in parquet":
        import datasets
        features = datasets.Features(video=datasets.Video(), caption=datasets.List(datasets.Value("string")))
        table = {"video": [{"bytes": content[k], "path": names[k]} for k in OWN], "caption": [takes(k) for k in OWN]}
        (root / "data").mkdir()
        datasets.Dataset.from_dict(table, features=features).to_parquet(root / "data" / "train-00000-of-00001.parquet")
        return root / "data", {}
    if layout == "class folders":  # every class has its own 000.mp4, as exported clips often do
        for k in OWN:
            (root / "classes" / str(k)).mkdir(parents=True)
            (root / "classes" / str(k) / "000.mp4").write_bytes(content[k])
        return root / "classes", {}
    if layout == "metadata.csv":
        shutil.copytree(videos, root / "clips")
        rows = [(names[k], c) for k in OWN for c in takes(k)]
        return write_rows(root / "clips" / layout, ["file_name", "caption"], rows).parent, {}
    rows = [(str(videos / names[k]), takes(k)[t]) for t in range(2) for k in OWN] + [("nowhere.mp4", "it is not there")]
    return write_rows(root / layout, ["video", "caption"], rows), {"video_dir": str(videos)}


@pytest.mark.parametrize("layout", ["a.csv", "a.parquet", "metadata.csv", "tars", "videos in parquet", "class folders"])
def test_videos_and_captions_in_every_layout(layout, folder, tmp_path):
    path, options = write_layout(layout, folder, tmp_path)
    of, found = {}, []
    for data, i in examples(path, **options):
        k = frame_number(data.read(i)[0].permute(1, 2, 0).numpy()) // 8
        assert data.captions(i) == ([str(k)] if layout == "class folders" else takes(k))
        assert numbers(data.read(i)) == [8 * k + j for j in SHOWN]
        of[data.key(i)] = data
        found.append(k)
    assert sorted(found) == OWN and len(of) == len(OWN)
    assert ("nowhere.mp4" in data.note) == layout.startswith("a.")


@pytest.mark.parametrize("layout", ["a.csv", "tars", "videos in parquet"])
def test_captions_joined_and_unfolded(layout, folder, tmp_path):
    path, options = write_layout(layout, folder, tmp_path)
    joined, plain, unfolded = (common.load_data(str(path), "train", frames=4, **options | more) for more in (
        {"join_captions": True}, {}, {"unfold_captions": True}))
    if layout == "a.csv":
        assert joined.column("captions") == [[" ".join(captions)] for captions in plain.column("captions")]
    pairs = [(plain.key(i), c) for i in range(len(plain)) for c in plain.captions(i)]
    assert [(unfolded.key(i), *unfolded.captions(i)) for i in range(len(unfolded))] == pairs
    assert len(plain) > 12 and torch.equal(unfolded.read(25), plain.read(12))
    assert unfolded.groups.tolist() == [g for g in plain.groups for _ in range(2)]
    for d in open_splits(path, frames=4, unfold_captions=True, **options).values():
        assert d.split == "train" or len(d.captions(0)) == 2  # training only


@pytest.mark.parametrize("file", ["a.csv", "a.jsonl"])
def test_windows_of_one_video_are_examples_of_their_own(file, tmp_path):
    """Also where one side or both are open."""
    write_video(tmp_path / "long.mp4", range(100))
    windows = {(1, 1.5): [10, 14], (3, 3.5): [30, 34], (None, None): [0, 99], (9, None): [90, 99], (None, 1): [0, 9]}
    rows = [("long.mp4", *window, f"{window}, {t}") for t in range(2) for window in windows]
    every = examples(write_rows(tmp_path / file, ["video", "start", "end", "caption"], rows), frames=2)
    shown = {tuple(d.captions(i)): numbers(d.read(i)) for d, i in every}
    assert shown == {tuple(f"{window}, {t}" for t in range(2)): frames for window, frames in windows.items()}
    assert len({d.key(i) for d, i in every}) == 5  # what bad_samples.txt names
    path = write_rows(tmp_path / "b.csv", ["video", "start", "end", "caption"], [("long.mp4", "soon", "later", "x")])
    complains(path, "train", "b.csv", "soon")


def test_video_dir_finds_videos_by_path_name_and_stem(tmp_path):
    """Folders in a name decide: another one's video is missing."""
    names = {0: "deep/er/000.mp4", 1: "001.webm", 2: "v_002.avi", 3: "x.003.mp4", 4: "004.gif", 5: "P05/01.mp4",
             6: "P06/01.mp4"}
    write_clips(tmp_path / "all", names)
    (tmp_path / "all" / "no_video" / "000.mp4").mkdir(parents=True)  # a folder, as EPIC-KITCHENS in pieces has them
    asked = ["er/000", "001.mp4", "002", "x.003", "004", "P05/01", "P06/01.mp4", "elsewhere/001", "P07/01"]
    path = write_rows(tmp_path / "notes" / "a.csv", ["video", "caption"], [(v, str(k)) for k, v in enumerate(asked)])
    every = examples(path, video_dir=str(tmp_path / "all"))
    assert {d.captions(i)[0]: numbers(d.read(i))[0] // 8 for d, i in every} == {str(k): k for k in range(7)}
    assert "2 videos are not there, first elsewhere/001" in every[0][0].note


@pytest.mark.parametrize("header, name", [(["row", "video_id", "caption"], "{:03}"),
                                          (["", "video", "caption"], "{:03}.mp4")])  # as pandas writes it by default
def test_ids_of_a_csv_are_text_and_an_index_column_may_have_no_name(header, name, tmp_path):
    """000 is a file name and NA a caption, not a number and nothing."""
    write_clips(tmp_path, {k: f"{k:03}.mp4" for k in range(4)})
    captions = {name.format(k): ["NA" if k == 3 else f"clip {k}"] for k in range(4)}
    write_rows(tmp_path / "a.csv", header, [(k, v, *c) for k, (v, c) in enumerate(captions.items())])
    assert {d.key(i): d.captions(i) for d, i in examples(tmp_path / "a.csv")} == captions
