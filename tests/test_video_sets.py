"""Video sets by name: replicas of their authors' files and of the hub's, and what is read from
them."""

import os
import pickle

import common
from contrastive.data.annotations import Files

import numpy as np
import pytest

from helpers import TEXT, complains, numbers, write_clips, write_files


def row(**columns):
    return dict(columns)


def said(name, n=2):
    return [f"{name} says {k}" for k in range(n)]


def step(start, end, sentence):
    return {"id": 0, "segment": [start, end], "sentence": sentence}


def clip_of_ssv2(number, template):
    return {
        "id": number,
        "label": f"holding {number}",
        "placeholders": [number],
        "template": template,
    }


# Every set is about the same videos, b in two folders deep; `gone` is not there. {folder: {file:
# its content}}
CLIP4CLIP = {
    "info": {},
    "videos": [{"video_id": "a", "category": 3, "start time": 1.0, "end time": 2.0}],
    "sentences": [
        {"sen_id": k, "video_id": v, "caption": said(v)[k]} for k in range(2) for v in "acb"
    ]
    + [{"sen_id": 9, "video_id": "gone", "caption": "x"}],
}
# the hub's clips are cut already
CUT = {"video_id": "a", "category": 18, "start time": 5.0, "end time": 9.0}
YOUCOOK2 = {
    "a": {"subset": "training", "annotations": [step(2, 4, "step 0"), step(6.0, 8.5, "step 1")]},
    "b": {"subset": "validation", "annotations": [step(1.0, 3.0, "step 2")]},
    "gone": {"subset": "training", "annotations": [step(0, 1, "step 3")]},
}
SPEECH = {
    "a": {"start": [0.0, 1.0], "end": [0.9, 2.0], "text": ["a zero", "a one"]},
    "gone": {"start": [0.0], "end": [1.0], "text": ["never"]},
    "b": {"start": [], "end": [], "text": []},
}
DIDEMO = [("a.mov", "first a."), ("b.m4v", "first b."), ("a.mov", "then a."), ("gone.avi", "gone.")]
FILES = {
    "msrvtt": {
        "MSRVTT_train.9k.csv": "video_id\na\nb\ngone\n",
        "MSRVTT_data.json": CLIP4CLIP,
        "MSRVTT_JSFUSION_test.csv": (
            'key,vid_key,video_id,sentence\nr0,m1,c,"one, with a comma"\nr1,m2,gone,x\n'
        ),
    },
    "msrvtt of the hub": {
        "msrvtt_train_9k.json": [
            CUT | row(video="a.mp4", caption=said("a")),
            CUT | row(video="b.mp4", caption=["b"]),
            CUT | row(video="gone.mp4", caption=["x"]),
        ],
        "msrvtt_test_1k.json": [CUT | row(video="c.mp4", caption="one string")],
    },
    "msvd": {
        "train_list.txt": "a \r\ngone\r\n\r\n",
        "val_list.txt": "b\n",
        "test_list.txt": "c\n",
        "raw-captions.pkl": {v: [["a", "man", k] for k in "01"] for v in ("a", "b", "c", "gone")},
    },
    "msvd of the hub": {
        "msvd_test.json": [row(video="a.avi", caption=["a man", "a man", "music"])]
    },
    "activitynet": {
        "train.json": {
            "v_a": row(
                duration=8.0, timestamps=[[0.0, 0.5]] * 2, sentences=[" It begins. ", " It ends."]
            ),
            "c": row(sentences=[]),
            "v_b": row(sentences="one text"),
            "v_gone": row(sentences=["gone"]),
        },
        "val_1.json": {"v_c": row(sentences=["It is.", "It was."])},
        "val_2.json": {"v_a": row(sentences=["other"])},
    },
    "didemo": {
        "train_data.json": [
            row(video=v, description=d, times=[[0, 0]], num_segments=6) for v, d in DIDEMO
        ],
        "val_data.json": [row(video="b.m4v", description="b in val.")],
    },
    "didemo of the hub": {
        "didemo_train.json": [row(video="a.mov", caption=["first a.", "then a."])]
    },
    "youcook2": {"annotations/youcookii_annotations_trainval.json": {"database": YOUCOOK2}},
    "youcook2 of the hub": {
        "data/val-00000-of-00001.parquet": [
            row(
                id=k,
                segment=[1.0 + 3 * k, 3.0 + 3 * k],
                sentence=f"step {k}",
                video_path="deep/er/b.webm",
                youtube_id="b",
            )
            for k in range(2)
        ]
    },
    "howto100m": {"caption.json": SPEECH},
    "ssv2-lt": {
        "something-something-v2-train.json": [
            clip_of_ssv2("x", "Moving [a] up"),
            clip_of_ssv2("b", "Holding [a]"),
            clip_of_ssv2("a", "Moving [a] up"),
            clip_of_ssv2("gone", "Holding [a]"),
        ],
        "something-something-v2-validation.json": [clip_of_ssv2("c", "Holding [a]")],
        "train.csv": "original_vido_id video_id frame_id\nb 0 1\nb 0 2\na 1 1\ngone 2 1\n",
        "val.csv": "original_vido_id\nc 0 1\n",
        "trainval.csv": "original_vido_id\na 0 0\nc 0 0\n",
    },
}

# four frames of each
WHOLE_A = [0, 26, 53, 79]
WHOLE_B = [100, 106, 113, 119]
WHOLE_C = [200, 202, 205, 207]
HALF_A = [0, 20, 39, 59]  # of its first 30 seconds
LOST = "1 videos (1 rows) are not in"
# set, split: {key: (captions, four frames)}, the classes of the rows, words of the note; what
# stands after "of" in the name of a set is which of its layouts
EXPECTED = {
    ("msrvtt", "train"): (
        {"a": (said("a"), WHOLE_A), "b": (said("b"), WHOLE_B)},
        ["sports", None],
        f"{LOST}; 1 without a class; WARNING: 2 examples, 9,000 expected",
    ),
    ("msrvtt", "test"): ({"c": (["one, with a comma"], WHOLE_C)}, [None], f"{LOST}"),
    ("msrvtt of the hub", "train"): (
        {"a.mp4": (said("a"), WHOLE_A), "b.mp4": (["b"], WHOLE_B)},
        ["beauty"] * 2,
        LOST,
    ),
    ("msrvtt of the hub", "test"): ({"c.mp4": (["one string"], WHOLE_C)}, ["beauty"], ""),
    ("msvd", "train"): ({"a": (["a man 0", "a man 1"], WHOLE_A)}, [], LOST),
    ("msvd", "val"): ({"b": (["a man 0", "a man 1"], WHOLE_B)}, [], "100 expected"),
    ("msvd", "test"): ({"c": (["a man 0", "a man 1"], WHOLE_C)}, [], "670 expected"),
    # twice is two queries: the papers count 27,763
    ("msvd of the hub", "test"): ({"a.avi": (["a man", "a man", "music"], WHOLE_A)}, [], ""),
    ("activitynet", "train"): (
        {"v_a": (["It begins. It ends."], WHOLE_A), "v_b": (["one text"], WHOLE_B)},
        [],
        f"{LOST}; 1 without a caption",
    ),
    ("activitynet", "test"): ({"v_c": (["It is. It was."], WHOLE_C)}, [], ""),
    ("didemo", "train"): (
        {"a.mov 0-30 s": (["first a. then a."], HALF_A), "b.m4v 0-30 s": (["first b."], WHOLE_B)},
        [],
        LOST,
    ),
    ("didemo", "val"): ({"b.m4v 0-30 s": (["b in val."], WHOLE_B)}, [], ""),
    ("didemo of the hub", "train"): ({"a.mov 0-30 s": (["first a. then a."], HALF_A)}, [], ""),
    ("youcook2", "train"): (
        {"a 2-4 s": (["step 0"], [4, 5, 6, 7]), "a 6-8.5 s": (["step 1"], [12, 13, 15, 16])},
        [],
        LOST,
    ),
    ("youcook2", "test"): ({"b 1-3 s": (["step 2"], [102, 103, 104, 105])}, [], ""),
    ("youcook2 of the hub", "test"): (
        {
            "deep/er/b.webm 1-3 s": (["step 0"], [102, 103, 104, 105]),
            "deep/er/b.webm 4-6 s": (["step 1"], [108, 109, 110, 111]),
        },
        [],
        "",
    ),
    ("howto100m", "train"): (
        {"a 0": (["a zero"], [0, 0, 1, 1]), "a 1": (["a one"], [2, 2, 3, 3])},
        [],
        LOST,
    ),
    ("ssv2-lt", "train"): (
        {"b": (["holding b"], WHOLE_B), "a": (["holding a"], WHOLE_A)},
        ["Holding a", "Moving a up"],
        f"{LOST}; WARNING: 2 examples, 50,418 expected",
    ),
    ("ssv2-lt", "test"): ({"c": (["holding c"], WHOLE_C)}, ["Holding a"], "2,610 expected"),
    ("ssv2-lt", "val"): (
        {"a": (["holding a"], WHOLE_A), "c": (["holding c"], WHOLE_C)},
        ["Moving a up", "Holding a"],
        "6,960 expected",
    ),
}


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """The files of all sets in a folder each, and the videos: 40, 10 and 4 seconds of two
    frames."""
    root = tmp_path_factory.mktemp("sets")
    for name, first, length in (("v_a.mp4", 0, 80), ("deep/er/b.webm", 5, 20), ("c.gif", 25, 8)):
        write_clips(root / "videos", {first: name}, length, fps=2)
    for layout, files in FILES.items():
        write_files(root / layout, files)
    return root


def opened(root, layout, split, **options):
    where = {"data_dir": str(root / layout), "video_dir": str(root / "videos"), "frames": 4}
    return common.load_data(layout.split()[0], split, **(where | options))


@pytest.mark.parametrize("layout, split", EXPECTED)
def test_the_rows_of_a_set(layout, split, replica):
    rows, classes, words = EXPECTED[layout, split]
    data = opened(replica, layout, split)
    found = {data.key(i): (data.captions(i), numbers(data.read(i))) for i in range(len(data))}
    assert found == rows and [*found] == [*rows] and len(data) == len(rows)
    assert [
        data.label_names[y] if y >= 0 else None for y in (data.labels if classes else ())
    ] == classes
    assert all(word in data.note for word in words.split("; ")), data.note
    assert data.split == split and data.grouped == (layout.split()[0] == "msvd")


def test_random_frames_of_an_evaluation_lie_in_the_middles_where_vast_has_them(replica):
    youcook2, didemo = (
        opened(replica, name, split, frame_sampling="random")
        for name, split in (("youcook2", "test"), ("didemo", "val"))
    )
    assert numbers(youcook2.read(0)) == [102, 103, 104, 105] and numbers(didemo.read(0)) == WHOLE_B
    four = opened(replica, "youcook2", "train", frame_sampling="random", frames=2)
    assert numbers(four.read(0)) == [5, 7]  # of the frames 4 to 7 those in the middle of each half


def test_annotations_and_videos_may_lie_in_one_folder(replica):
    for flag in ("data_dir", "video_dir"):
        assert common.load_data("msvd", "test", **{flag: str(replica)}).key(0) == "c"


# ---- what can be wrong with them ----
def test_several_files_of_one_name_are_refused(tmp_path):
    write_clips(tmp_path / "videos", {0: "v0.avi"})
    files = {"train_list.txt": "v0\n", "raw-captions.pkl": {"v0": [["a"]]}}
    write_files(tmp_path, files | {"old/train_list.txt": "v1\n"})
    complains("msvd", "train", "train_list.txt may be ", f"{tmp_path}/old/train_list.txt or ",
              "remove one of them", data_dir=str(tmp_path))
    (tmp_path / "old" / "train_list.txt").unlink()
    write_clips(tmp_path / "other", {1: "v0.mp4"})
    complains("msvd", "train", "v0 may be ", "other/v0.mp4 or ", data_dir=str(tmp_path))


def test_a_set_without_its_videos_or_annotations(replica, tmp_path):
    empty, videos = {"data_dir": str(tmp_path)}, {"video_dir": str(replica / "videos")}
    own = {"data_dir": str(replica / "msrvtt")}
    complains("msrvtt", "train", "--dataset msrvtt needs --data-dir", "--video-dir")
    complains(
        "msrvtt",
        "train",
        f"none of 3 videos is below {tmp_path} (looked for a)",
        video_dir=str(tmp_path),
        **own,
    )
    complains(
        "msrvtt", "train", "no such folder", "--video-dir", **own, video_dir=str(tmp_path / "none")
    )
    complains("msrvtt", "val", "msrvtt has no val split; it has: train, test", **own)
    complains("didemo", "val", "no annotation file of its val split", **empty)
    complains("howto100m", "train", f"{tmp_path}: none of caption.json is there", **empty, **videos)
    complains("msvd", "train", "none of train_list.txt, *train*.json* is there", **empty, **videos)


@pytest.mark.parametrize(
    "content", [b'{"database": {"yt1"', b"[1, 2, 3]", b'{"a": 1}', b"\xff\xfe\x00damaged"]
)
def test_a_damaged_annotation_file_is_named(content, tmp_path):
    write_clips(tmp_path, {0: "a.mp4"})
    for name, split, file in (
        ("msrvtt", "train", "MSRVTT_data.json"),
        ("activitynet", "train", "train.json"),
        ("youcook2", "test", "youcookii_annotations_trainval.json"),
        ("msrvtt", "test", "msrvtt_test_1k.json"),
    ):
        write_files(tmp_path, {"MSRVTT_train.9k.csv": "video_id\na\n"})
        (tmp_path / file).write_bytes(content)
        complains(name, split, file, data_dir=str(tmp_path))


class Attack:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_is_data_or_refused(tmp_path):
    write_clips(tmp_path, {0: "v0.avi"})
    write_files(tmp_path, {"train_list.txt": "v0\n"})
    bad = {
        pickle.dumps({"v0": Attack(tmp_path / "marker")}, protocol=p): "asks for posix.system"
        for p in (0, 2, 4)
    }
    bad |= {b"cbuiltins\neval\n(S'1'\ntR.": "asks for builtins.eval", b"": "", TEXT: ""}
    for data, words in bad.items():
        (tmp_path / "raw-captions.pkl").write_bytes(data)
        complains("msvd", "train", "raw-captions.pkl", words, data_dir=str(tmp_path))
    assert not (tmp_path / "marker").exists()
    plain = {
        "a": [1, 2.5, "x", None, True, (1, 2), {3}, frozenset([4]), b"bytes"],
        "b": np.arange(6.0).reshape(2, 3),
        "c": np.float32(2),
        "d": np.array(["a", "bc"]),
    }
    for protocol in range(6):
        (tmp_path / "plain.pkl").write_bytes(pickle.dumps(plain, protocol=protocol))
        back = Files(tmp_path).pickle("plain.pkl")
        assert back["a"] == plain["a"] and all(np.array_equal(back[k], plain[k]) for k in "bcd")
