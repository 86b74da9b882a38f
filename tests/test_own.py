"""The user's own data: every layout, of pictures and of videos; its splits, columns, windows and
names; and what a user can get wrong with data, weights and folders: one clear line each."""

import re
from importlib.util import find_spec

import common
from contrastive.data import batches, data_options
from contrastive.data.splits import hash_fraction
from contrastive.data.options import HELD_OUT_FRACTION
from contrastive.core.processes import UserError

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import temo
import temperature_schedules
from helpers import (
    CLASSES, TEXT, TRUNCATED, all_rows, caption, complains, encode, evaluated, numbers,
    open_splits, picture, run_script, tar_samples, write_captions, write_clips, write_images,
    write_rows, write_tar, write_video)

# where a layout names its splits
HALVES = {"train": range(0, 8), "validation": range(8, 10), "test": range(10, 12)}
SHOWN = [0, 2, 5, 7]  # of eight frames, four spread


# ---- layouts ----
@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """{kind: bytes of the twelve samples}."""
    root = tmp_path_factory.mktemp("clips")
    write_clips(root, {i: f"{i}.mp4" for i in range(12)})
    make = {
        "png": lambda i: encode(picture(i)),
        "jpg": lambda i: encode(picture(i), "jpeg", quality=95),
        "mp4": lambda i: (root / f"{i}.mp4").read_bytes(),
    }
    return {kind: [of(i) for i in range(12)] for kind, of in make.items()}


def takes(i):
    return [caption(i, k) for k in range(2)]


def write_file(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def held_out(names):
    """{split: names} as the hash of each name places it, where train alone is given: a twentieth,
    but at least 20 images or a sixth of them."""
    images = sorted({hash_fraction(name) for name in names})
    least = min(20, len(images) // 6)
    behind = [x for x in images if x >= HELD_OUT_FRACTION]
    test = behind[: max(least, sum(x < 2 * HELD_OUT_FRACTION for x in behind))]
    others = [x for x in images if x not in test]
    val = others[: max(least, sum(x < HELD_OUT_FRACTION for x in others))]
    out = {"val": [], "test": [], "train": []}
    for name in names:
        x = hash_fraction(name)
        split = "train"
        if x in val:
            split = "val"
        elif x in test:
            split = "test"
        out[split].append(name)
    return out


def paths_file(name):
    def write(root, word, some, kind):
        for i, content in some.items():
            write_file(root / "files" / f"{i:03}.{kind}", content)
        rows = [(f"files/{i:03}.{kind}", text, CLASSES[i % 3]) for i in some for text in takes(i)]
        write_rows(root / name, ["video" if kind == "mp4" else "image", "caption", "label"], rows)

    return write


def class_folders(root, word, some, kind):
    for i, content in some.items():  # every class has its own 000, as exported clips often do
        write_file(root / word / CLASSES[i % 3] / f"{i // 3:03}.{kind}", content)


def metadata(name):
    def write(root, word, some, kind):
        for i, content in some.items():
            write_file(root / word / f"{i:03}.{kind}", content)
        rows = [(f"{i:03}.{kind}", text) for i in some for text in takes(i)]
        write_rows(root / word / name, ["file_name", "text"], rows)

    return write


def tars(part):
    def write(root, word, some, kind):
        texts = {
            "txt": lambda i: "\n".join(takes(i)).encode(),
            "cls": lambda i: str(i % 3).encode(),
        }
        samples = {f"{i:06}": {kind: content, part: texts[part](i)} for i, content in some.items()}
        write_tar(root / f"{word or 'all'}-000.tar", samples)

    return write


def parquet(root, word, some, kind):
    import datasets

    column, feature = ("video", datasets.Video()) if kind == "mp4" else ("image", datasets.Image())
    features = datasets.Features(
        {
            column: feature,
            "caption": datasets.List(datasets.Value("string")),
            "label": datasets.ClassLabel(names=CLASSES),
        }
    )
    rows = {
        column: [{"bytes": content, "path": f"{i:03}.{kind}"} for i, content in some.items()],
        "caption": [takes(i) for i in some],
        "label": [i % 3 for i in some],
    }
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(root / f"{word or 'train'}-00000-of-00001.parquet")


def word_of(i):
    return [CLASSES[i % 3].replace("_", " ")]


# name: (writer, what is opened, kind of files, captions of sample i, has classes, names its splits)
LAYOUTS = {
    "csv": (paths_file("a.csv"), "a.csv", "png", takes, True, False),
    "jsonl": (paths_file("a.jsonl"), "a.jsonl", "png", takes, True, False),
    "parquet of paths": (paths_file("a.parquet"), "a.parquet", "mp4", takes, True, False),
    "class folders": (class_folders, "", "mp4", word_of, True, False),
    "class folders in splits": (class_folders, "", "png", word_of, True, True),
    "metadata": (metadata("metadata.csv"), "", "mp4", takes, False, False),
    "metadata in splits": (metadata("metadata.jsonl"), "", "png", takes, False, True),
    "tar of classes": (
        tars("cls"),
        "all-000.tar",
        "jpg",
        lambda i: [f"class {i % 3}"],
        True,
        False,
    ),
    "tars": (tars("txt"), "", "mp4", takes, False, False),
    "tars in splits": (tars("txt"), "", "jpg", takes, False, True),
    "parquet": (parquet, "", "mp4", takes, True, False),
    "parquet in splits": (parquet, "", "png", takes, True, True),
}


def number_of(pixels):
    """Which sample this is: an image, or a clip of four frames."""
    if pixels.ndim == 4:
        shown = numbers(pixels)
        assert [i - shown[0] for i in shown] == SHOWN
        return shown[0] // 8
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 20, 24)
    off = [
        np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - picture(i)).max() for i in range(12)
    ]
    assert min(off) <= 8  # jpegs
    return int(np.argmin(off))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, contents, tmp_path):
    write, name, kind, captions, classes, named = LAYOUTS[layout]
    for word, part in HALVES.items() if named else [("", range(12))]:
        write(tmp_path, word, {i: contents[kind][i] for i in part}, kind)
    sets = open_splits(tmp_path / name, frames=4)
    found, keys = {s: [number_of(d.read(k)) for k in range(len(d))] for s, d in sets.items()}, {}
    for split, data in sets.items():
        keys[split] = [*data.keys()]
        assert data.split == split
        assert str(tmp_path) not in str(keys)  # a key does not change with the folder
        for k, i in enumerate(found[split]):
            example = data[k]
            assert example["captions"] == data.captions(k) == captions(i)
            assert example["key"] == data.key(k) == keys[split][k]
            assert example.get("label") == (i % 3 if classes else None)
        assert data.label_names == (CLASSES if classes and "tar" not in layout else None)
    assert sorted(sum(found.values(), [])) == list(range(12))  # nothing lost, nothing in two splits
    every = sum(keys.values(), [])
    assert len({*every}) == 12
    if named:
        assert [sorted(found[s]) for s in ("train", "val", "test")] == [
            [*part] for part in HALVES.values()
        ]
    else:
        assert {s: sorted(of) for s, of in keys.items()} == {
            s: of for s, of in held_out(sorted(every)).items() if of
        }


# ---- splits ----
def test_held_out_splits_are_a_twentieth_each_and_the_same_every_time(tmp_path):
    """Bands of one hash: for another val_fraction test stays, and val holds what a smaller one
    held."""
    names = [f"{i:03}.png" for i in range(4000)]
    path = write_rows(
        tmp_path / "a.csv", ["image", "caption"], [(x, f"words of {x}") for x in names]
    )
    sets = open_splits(path)
    keys = {s: d.column("key") for s, d in sets.items()}
    assert keys == held_out(names) and all(160 < len(keys[s]) < 240 for s in ("val", "test"))
    assert "held out for val and test" in sets["train"].note
    assert "held out of 4,000" in sets["val"].note
    # a run may be resumed years later: these must never change
    assert keys["val"][:4] == ["029.png", "078.png", "146.png", "153.png"]
    assert keys["test"][:4] == ["007.png", "027.png", "054.png", "069.png"]
    for fraction in (0.01, 0.3):
        others = open_splits(path, val_fraction=fraction)
        other = {s: {*d.keys()} for s, d in others.items()}
        assert other["test"] == {*keys["test"]}
        assert len(other["val"]) == pytest.approx(4000 * fraction, rel=0.5)
        assert len(set.union(*other.values())) == 4000 == sum(map(len, other.values()))
        assert other["val"] < {*keys["val"]} or other["val"] > {*keys["val"]}
        assert "fewer than 20 rows" not in others["val"].note


@pytest.mark.parametrize(
    "script, flags, hold_out_val, val_fraction",
    [
        (temo, "--val-fraction 0.1", False, 0.05),  # emoji has a val
        (temo, "--hold-out-val", False, 0.05),
        (temo, "--dataset x.csv --hold-out-val", False, 0.05),  # held out without this flag
        (temperature_schedules, "--dataset cifar10-lt --hold-out-val", False, 0.05),
        (temo, "--dataset x.csv --val-fraction 0.1", False, 0.1),
        (temo, "--dataset cifar10 --hold-out-val", True, 0.05),
        (temo, "--dataset cifar10 --val-fraction 0.1", False, 0.05),
    ],
)
def test_nothing_is_held_out_for_val_where_there_is_one(
    script, flags, hold_out_val, val_fraction
):
    """Such flags are not read, so that a run warns of them."""
    options = data_options(script.parse_args(flags.split()))
    assert (options.hold_out_val, options.val_fraction) == (hold_out_val, val_fraction)


def test_eval_datasets_may_be_held_out():
    flags = "--eval-datasets imagenet --hold-out-val --val-fraction 0.1"
    options = data_options(temo.parse_args(flags.split()), "imagenet")
    assert options.hold_out_val and options.val_fraction == 0.1


def test_windows_of_a_video_stay_together(tmp_path):
    """Seconds as they come, 1e-05 too; another window moves none."""
    windows = [(None, 3), (1e-5, 2), (2, 4.5), (7.25, None), (100000.5, 200000), (1e6, 2e6)]
    videos = [f"v{k}.mp4" for k in range(100)]
    for video in videos:
        write_file(tmp_path / video, b"not opened")
    for first in (3, 0):
        rows = [
            (video, start, end, f"{video} {start}")
            for start, end in windows[first:]
            for video in videos
        ]
        path = write_rows(tmp_path / f"{first}.jsonl", ["video", "start", "end", "caption"], rows)
        found = {
            s: sorted({key.split()[0] for key in d.keys()}) for s, d in open_splits(path).items()
        }
        assert found == held_out(sorted(videos)) and all(found.values())


def test_names_of_one_video_are_in_one_split(tmp_path):
    """Windows of a.mp4, ./a.mp4 and a; a video that all call alike stays where it is."""
    videos = [f"v{k}.mp4" for k in range(60)]
    for video in videos:
        write_file(tmp_path / video, b"not opened")
    for forms in (("{}", "./{}", "{}"), ("{}",) * 3):
        rows = []
        for start, form in enumerate(forms):
            for k, video in enumerate(videos):
                name = form.format(video)
                if start == 2 and k < 30:
                    name = video.removesuffix(".mp4")
                rows.append((name, start, start + 1, video))
        path = write_rows(tmp_path / "a.jsonl", ["video", "start", "end", "caption"], rows)
        found = {
            split: sorted({data.captions(i)[0] for i in range(len(data))})
            for split, data in open_splits(path).items()
        }
        assert found == held_out(sorted(videos)) and all(found.values())


def test_a_name_of_two_videos_is_noted(tmp_path):
    write_clips(tmp_path / "all", {0: "a/1.mp4", 1: "b/1.mp4", 2: "b/2.mp4"})
    for name, words in (("1", "1 name of several files"), ("b/1", "")):
        path = write_rows(
            tmp_path / f"{len(name)}.csv", ["video", "caption", "split"],
            [(name, "x", "train"), ("2", "y", "train")])
        data = open_splits(path, video_dir=str(tmp_path / "all"), frames=4)["train"]
        assert ("several files" in data.note) == bool(words) and words in data.note
        if words:
            assert "1 is" in data.note and "a/1.mp4, not" in data.note and "b/1.mp4" in data.note


def test_a_column_split_says_which_rows_are_whose(tmp_path):
    """Each row keeps its own picture, caption and class; a word that names no split is refused."""
    words = ["train", "val", "training", "test", "validation", "train"]
    names = write_images(tmp_path, range(6))
    rows = [(name, f"words {k}", ["dog", "cat"][k % 2], words[k]) for k, name in enumerate(names)]
    path = write_rows(tmp_path / "own.csv", ["image", "caption", "label", "split"], rows)
    for split, wanted in (("train", [0, 2, 5]), ("val", [1, 4]), ("test", [3])):
        data = common.load_data(str(path), split)
        assert data.column("captions") == [[f"words {k}"] for k in wanted]
        assert data.label_names == ["cat", "dog"]
        for i, k in enumerate(wanted):
            assert number_of(data.read(i)) == k and data.labels[i] == (k + 1) % 2
    odd = write_rows(
        tmp_path / "odd.csv", ["image", "caption", "split"], [("000.png", "x", "trian")]
    )
    complains(odd, "train", "'trian' in the column split is none of")
    alone = write_rows(
        tmp_path / "test.csv", ["image", "caption", "split"], [("000.png", "x", "test")]
    )
    # it is evaluated, and nothing trained on
    complains(alone, "train", "no train split; it has: test")


# ---- columns ----
def test_rows_of_one_image_are_one_example_and_those_without_something_are_counted(tmp_path):
    rows = [
        ("0", "a", "cat"),
        ("", "b", "cat"),
        ("2", " ", "dog"),
        ("3", "d", ""),
        ("4", "e", "dog"),
        ("4", "f", "cat"),
        ("0", "c", "cat"),
        ("0", "a", "cat"),
    ]
    data = common.load_data(
        str(write_rows(tmp_path / "a.csv", ["image", "caption", "label"], rows)), "train"
    )
    assert data.column("captions") == [["a", "c"], ["d"], ["e", "f"]]
    assert data.labels.tolist() == [0, -1, -1]
    assert "2 rows without an image or a caption left out" in data.note
    assert "2 without a class" in data.note
    rows = [("0", ["a", "b"]), ("1", []), ("2", ["c"])]
    data = common.load_data(
        str(write_rows(tmp_path / "b.jsonl", ["image", "captions"], rows)), "train"
    )
    assert data.column("captions") == [["a", "b"], ["c"]]
    assert "1 row without an image or a caption left out, the first: 1; " in data.note


def test_column_flags_and_data_dir(tmp_path):
    write_images(tmp_path / "pictures", range(4))
    rows = [(f"{i:03}.png", caption(i), "other words", "0010"[i]) for i in range(4)]
    path = str(write_rows(tmp_path / "a.csv", ["picture", "said", "text", "kind"], rows))
    flags = {"image_column": "picture", "caption_column": "said", "label_column": "kind"}
    data = common.load_data(path, "train", data_dir=str(tmp_path / "pictures"), **flags)
    assert data.captions(2) == [caption(2)]
    assert data.label_names == ["0", "1"]
    assert data.labels.tolist() == [0, 0, 1, 0]
    assert number_of(data.read(3)) == 3
    for flag in flags:
        words = (
            f"--{flag.replace('_', '-')} none: there is no such column; there are: picture, said"
        )
        complains(path, "train", words, **flags | {flag: "none"})
    complains(path, "train", "--image-column: none of image, ")


def test_images_of_one_name_in_a_table_are_known_by_their_row(tmp_path):
    import datasets

    rows = {
        "image": [{"bytes": encode(picture(i)), "path": "image.png"} for i in range(8)],
        "caption": ["", *(caption(i) for i in range(1, 8))],
    }
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    table.to_parquet(str(tmp_path / "train.parquet"))
    data = all_rows(tmp_path / "train.parquet")
    assert data.column("key") == [str(i) for i in range(1, 8)] and "1 row without" in data.note
    assert [number_of(data.read(k)) for k in range(7)] == list(range(1, 8))


def test_captions_joined_and_unfolded(tmp_path):
    """Of training; evaluations keep all captions."""
    rows = [
        (f"{i}.png", text, split)
        for i, split in enumerate(("train", "train", "val", "test"))
        for text in takes(i)
    ]
    path = str(write_rows(tmp_path / "a.csv", ["image", "caption", "split"], rows))
    assert common.load_data(path, "val", join_captions=True).column("captions") == [
        [" ".join(takes(2))]
    ]
    unfolded = common.load_data(path, "train", unfold_captions=True)
    assert [unfolded.captions(k) for k in range(4)] == [
        [text] for i in range(2) for text in takes(i)
    ]
    assert common.load_data(path, "test", unfold_captions=True).captions(0) == takes(3)


# ---- videos ----
@pytest.mark.parametrize("file", ["a.csv", "a.jsonl"])
def test_windows_of_one_video_are_examples_of_their_own(file, tmp_path):
    """Also where one side or both are open."""
    write_video(tmp_path / "long.mp4", range(100))
    windows = {
        (1, 1.5): [10, 14],
        (3, 3.5): [30, 34],
        (None, None): [0, 99],
        (9, None): [90, 99],
        (None, 1): [0, 9],
    }
    rows = [("long.mp4", *window, f"{window}, {t}") for t in range(2) for window in windows]
    sets = open_splits(
        write_rows(tmp_path / file, ["video", "start", "end", "caption"], rows), frames=2
    ).values()
    every = {d.key(i): (d.captions(i), numbers(d.read(i))) for d in sets for i in range(len(d))}
    assert len(every) == 5 and sorted(every.values()) == sorted(
        ([f"{window}, {t}" for t in range(2)], shown) for window, shown in windows.items()
    )
    path = write_rows(
        tmp_path / "b.csv",
        ["video", "start", "end", "caption"],
        [("long.mp4", "soon", "later", "x")],
    )
    complains(path, "train", "b.csv", "soon")


def test_video_dir_finds_videos_by_path_name_and_stem(tmp_path):
    """Folders in a name decide: another one's video is missing."""
    names = {
        0: "deep/er/000.mp4",
        1: "001.webm",
        2: "v_002.avi",
        3: "x.003.mp4",
        4: "004.gif",
        5: "P05/01.mp4",
        6: "P06/01.mp4",
    }
    write_clips(tmp_path / "all", names)
    # a folder, as EPIC-KITCHENS in pieces has them
    (tmp_path / "all" / "no_video" / "000.mp4").mkdir(parents=True)
    asked = [
        "er/000",
        "001.mp4",
        "002",
        "x.003",
        "004",
        "P05/01",
        "P06/01.mp4",
        "elsewhere/001",
        "P07/01",
    ]
    path = write_rows(
        tmp_path / "notes" / "a.csv",
        ["video", "caption"],
        [(v, str(k)) for k, v in enumerate(asked)],
    )
    sets = open_splits(path, video_dir=str(tmp_path / "all"), frames=4)
    assert {
        d.captions(i)[0]: number_of(d.read(i)) for d in sets.values() for i in range(len(d))
    } == {str(k): k for k in range(7)}
    assert "2 videos are not there, first elsewhere/001" in sets["train"].note


def test_a_dot_in_the_name_of_a_missing_video_is_no_ending(tmp_path):
    """Else clip.2 would be the video of clip, with the captions of both."""
    write_clips(tmp_path, {0: "clip.mp4", 1: "a.b.mp4"})
    asked = ["clip", "clip.2", "clip.avi", "a.b", "a.MTS"]
    rows = [(name, f"words of {name}") for name in asked]
    sets = open_splits(write_rows(tmp_path / "a.csv", ["video", "caption"], rows))
    found = {d.key(i): d.captions(i) for d in sets.values() for i in range(len(d))}
    assert found == {"clip": ["words of clip", "words of clip.avi"], "a.b": ["words of a.b"]}
    assert "2 videos are not there, first clip.2" in sets["train"].note
    rows = [("clip.2", "more"), ("a.b", "more"), ("x/a.b.avi", "most")]
    more = write_rows(tmp_path / "more.csv", ["video", "caption"], rows)
    data = common.load_data(
        str(tmp_path / "a.csv"), "train", extra_captions=str(more), val_fraction=0.01,
        test_fraction=0.01)
    assert "2 captions added from more.csv" in data.note and "1 of its rows match no" in data.note


def test_ids_of_a_csv_are_text_and_an_index_column_may_have_no_name(tmp_path):
    """000 is a file name and NA a caption, not a number and nothing; the index as pandas writes it
    by default."""
    write_clips(tmp_path, {k: f"{k:03}.mp4" for k in range(4)})
    rows = [(k, f"{k:03}", "NA" if k == 3 else f"clip {k}") for k in range(4)]
    sets = open_splits(write_rows(tmp_path / "a.csv", ["", "video_id", "caption"], rows))
    assert {d.key(i): d.captions(i) for d in sets.values() for i in range(len(d))} == {
        v: [c] for _, v, c in rows
    }


# ---- what cannot be opened ----
@pytest.mark.parametrize(
    "name, words",
    [
        ("/no/such", "/no/such: no such file or folder"),
        ("no/such.csv", "no/such.csv: no such file or folder"),
        ("emojis", "no hub id (org/name), and no known set: "),
        ("nobody-at-all/nothing", "--dataset nobody-at-all/nothing: "),
        ("empty", "any data files"),
        ("a.csv", "a.csv: "),
        ("a.parquet", "a.parquet: "),
        ("a.xyz", "a .xyz file is not one of csv, json, jsonl, parquet, tar"),
        ("silent", "--caption-column"),
        ("cat", "000000 of "),
    ],
)
def test_a_data_set_that_cannot_be_opened(name, words, tmp_path):
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    for file in ("a.csv", "a.parquet", "a.xyz"):
        (tmp_path / file).touch()
    write_tar(tmp_path / "silent" / "a.tar", tar_samples(range(6), "jpg", "json"))
    samples = tar_samples(range(6), "jpg", "txt")
    write_tar(tmp_path / "cat" / "a.tar", {k: v | {"cls": b"cat"} for k, v in samples.items()})
    complains(tmp_path / name if (tmp_path / name).exists() else name, "train", words)


# ---- the start of a run ----
TINY = "--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 2".split()
STOPPED = {
    "--batch-size 64": "--batch-size 64: larger than the 16 training examples of .*captions.csv",
    "--image-encoder resnet_99": "resnet_99: Unknown model",
    "--image-encoder no/such": "no/such: ",
    "--paraphrases /no.jsonl": "--paraphrases /no.jsonl: .*/no.jsonl",
    "--text-encoder nobody/none": "nobody/none: .*connect",
    "--image-encoder resnet18-cifar --chunk-size 4": (
        "--chunk-size 4: resnet18-cifar has BatchNorm.* chunk"
    ),
    "--init-from text.pt": "--init-from .*text.pt: ",
    "--init-from other.safetensors": (
        ".*none of its 1 tensors fits the model; its first names are .'other'., the"
    ),
    "--init-from nan.safetensors": (
        r".*captions.csv \(val\): the model's outputs are not finite for \d+ of \d+.*a lower --lr"
    ),
    "--lr 1e30 --lr-end 1e30 --grad-clip 0": (
        r"the loss is not finite at step 1 \(tau 0.1\); process 0: norms "
        r"up to .*keys \['\d+.png'.*a lower learning rate"
    ),
    "--output-dir text.pt": ".*text.pt.*: .*Not a directory",
}
if not find_spec("wandb"):
    STOPPED["--tracker wandb"] = "--tracker wandb: not installed: pip install wandb"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_captions(tmp_path_factory.mktemp("good"), 24)


def stopped(dataset, out, *flags):
    """The one line of the UserError that ends this run."""
    with pytest.raises(UserError) as error:
        run_script(temo, out / "a", *flags, base=[*TINY, "--dataset", dataset])
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    return str(error.value)


@pytest.mark.parametrize("words", STOPPED)
def test_what_ends_a_run_before_or_in_its_first_steps(words, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_bytes(TEXT)
    write_captions(tmp_path, 6, "test.csv")
    save_file({"other": torch.zeros(2)}, "other.safetensors")
    save_file({"vision.projection.weight": torch.full((16, 128), float("nan"))}, "nan.safetensors")
    assert re.match(STOPPED[words], stopped(good, tmp_path, *words.split()))


def test_own_data_without_a_batch_size_take_what_fits(good, tmp_path, capsys):
    """And say so; a resumed run keeps it."""
    flags = [*"--cpu --workers 0 --max-steps 1 --image-size 16".split(), "--dataset", good]
    summary = run_script(temo, tmp_path / "r", *flags)
    out = capsys.readouterr().out
    assert summary["batch"] == 16 and "--batch-size 256 -> 16, which fits the data" in out
    assert "batch        16 = 1 x 16; 15 negatives" in out and "FEW QUERIES: one of " in out
    assert temo.parse_args(["--resume", str(tmp_path / "r")]).batch_size == 16


@pytest.mark.parametrize(
    "fraction, enough", [(0.011, 0.02), (0.02, 0.02), (0.0201, 0.05), (0.4, 0.5), (0.51, 1)]
)
def test_the_fraction_that_would_do_is_the_smallest_round_one(fraction, enough):
    assert batches.round_above(fraction) == enough


def test_the_first_image_that_cannot_be_read_is_named_without_addresses(good, tmp_path, capsys):
    """In evaluation, beside how many they are."""
    rows = good.read_text().splitlines()
    csv = tmp_path / "test.csv"
    csv.write_text("\n".join(rows[:7]) + "\n")
    for row in rows[1:7]:
        name = row.partition(",")[0]
        (tmp_path / name).write_bytes((good.parent / name).read_bytes())
    (tmp_path / rows[2].partition(",")[0]).write_bytes(TEXT)
    run_script(temo, tmp_path / "r", base=[*TINY, "--dataset", good])
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
    bad = [
        train.key(int(i)) for i in next(batches.epoch_batches(len(train), 8, 42, 0, 1))[1][[1, 4]]
    ]
    for key, content in zip(bad, (TEXT, TRUNCATED)):
        (csv.parent / key).write_bytes(content)
    summary = run_script(
        temo, tmp_path / "r", "--max-bad-fraction", 0.1, base=[*TINY, "--dataset", csv]
    )
    assert summary["bad_samples"] == 2 and summary["steps"] == 2
    message = stopped(csv, tmp_path)
    assert re.match(
        r"2 of about 40 samples cannot be read, above --max-bad-fraction 0.01; the first: \S+: ",
        message,
    )
    assert message.endswith("/bad_samples.txt lists, or train without them by "
                            "--max-bad-fraction 0.05")
    for run in "ra":
        lines = (tmp_path / run / "bad_samples.txt").read_text().splitlines()
        assert {line.split("\t")[0] for line in lines} == {*bad}
