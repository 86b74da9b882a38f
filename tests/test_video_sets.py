"""Video sets by name: replicas of their authors' files and of the hub's, and what is read from
them."""

import os
import pickle

import common
from contrastive.data.annotations import Files

import numpy as np
import pytest

from helpers import TEXT, complains, numbers, write_clips, write_files

# Every set is about the same videos, b in two folders deep; `gone` is not there.
VIDEOS = {"v_a.mp4": (0, 80), "deep/er/b.webm": (5, 20), "c.gif": (25, 8)}
MSRVTT = {
    "videos": [{"video_id": "a", "category": 3, "start time": 1.0, "end time": 2.0}],
    "sentences": [
        {"sen_id": 0, "video_id": "a", "caption": "a says 0"},
        {"sen_id": 1, "video_id": "c", "caption": "of the test"},
        {"sen_id": 2, "video_id": "b", "caption": "b says 0"},
        {"sen_id": 3, "video_id": "a", "caption": "a says 1"},
        {"sen_id": 4, "video_id": "gone", "caption": "x"}]}
# a clip that is cut already
CUT = {"video_id": "a", "category": 18, "start time": 5.0, "end time": 9.0}
WORDS = [["a", "man", "0"], ["a", "man", "1"]]
YOUCOOK2 = {
    "a": {"subset": "training", "annotations": [
        {"id": 0, "segment": [2, 4], "sentence": "step 0"},
        {"id": 1, "segment": [6.0, 8.5], "sentence": "step 1"}]},
    "b": {"subset": "validation", "annotations": [
        {"id": 0, "segment": [1.0, 3.0], "sentence": "step 2"}]},
    "gone": {"subset": "training", "annotations": [
        {"id": 0, "segment": [0, 1], "sentence": "step 3"}]}}
HUB_STEP = {"sentence": "step 0", "video_path": "deep/er/b.webm", "youtube_id": "b"}
LABELS = [
    {"id": "x", "label": "moving it up", "template": "Moving [a] up"},
    {"id": "b", "label": "holding b", "template": "Holding [a]"},
    {"id": "a", "label": "moving a up", "template": "Moving [a] up"},
    {"id": "gone", "label": "holding it", "template": "Holding [a]"}]
FILES = {  # {folder of a set: {file: content}}
    "msrvtt": {
        "MSRVTT_train.9k.csv": "video_id\na\nb\ngone\n",
        "MSRVTT_data.json": MSRVTT,
        "MSRVTT_JSFUSION_test.csv": (
            'key,vid_key,video_id,sentence\nr0,m1,c,"one, with a comma"\nr1,m2,gone,x\n')},
    "msrvtt of the hub": {
        "msrvtt_train_9k.json": [
            CUT | {"video": "a.mp4", "caption": ["a says 0", "a says 1"]},
            CUT | {"video": "gone.mp4", "caption": ["x"]}],
        "msrvtt_test_1k.json": [CUT | {"video": "c.mp4", "caption": "one string"}]},
    "msvd": {
        "train_list.txt": "a \r\ngone\r\n\r\n",
        "val_list.txt": "b\n",
        "test_list.txt": "c\n",
        "raw-captions.pkl": dict.fromkeys(["a", "b", "c", "gone"], WORDS)},
    "msvd of the hub": {
        "msvd_test.json": [{"video": "a.avi", "caption": ["a man", "a man", "music"]}]},
    "activitynet": {
        "train.json": {
            "v_a": {"duration": 8.0, "sentences": [" It begins. ", " It ends."]},
            "c": {"sentences": []},
            "v_gone": {"sentences": ["gone"]}},
        "val_1.json": {"v_c": {"sentences": ["It is.", "It was."]}},
        "val_2.json": {"v_a": {"sentences": ["other"]}}},
    "didemo": {
        "train_data.json": [
            {"video": "a.mov", "description": "first a.", "times": [[0, 0]]},
            {"video": "b.m4v", "description": "first b.", "times": [[0, 0]]},
            {"video": "a.mov", "description": "then a.", "times": [[1, 1]]},
            {"video": "gone.avi", "description": "gone.", "times": [[0, 0]]}],
        "val_data.json": [{"video": "b.m4v", "description": "b in val."}]},
    "didemo of the hub": {
        "didemo_train.json": [{"video": "a.mov", "caption": ["first a.", "then a."]}]},
    "youcook2": {"annotations/youcookii_annotations_trainval.json": {"database": YOUCOOK2}},
    "youcook2 of the hub": {
        "data/val-00000-of-00001.parquet": [HUB_STEP | {"id": 0, "segment": [1.0, 3.0]}]},
    "howto100m": {
        "caption.json": {
            "a": {"start": [0.0, 1.0], "end": [0.9, 2.0], "text": ["a zero", "a one"]},
            "gone": {"start": [0.0], "end": [1.0], "text": ["never"]},
            "b": {"start": [], "end": [], "text": []}}},
    "ssv2-lt": {
        "something-something-v2-train.json": LABELS,
        "something-something-v2-validation.json": [
            {"id": "c", "label": "holding c", "template": "Holding [a]"}],
        "train.csv": "original_vido_id video_id frame_id\nb 0 1\nb 0 2\na 1 1\ngone 2 1\n",
        "val.csv": "original_vido_id\nc 0 1\n",
        "trainval.csv": "original_vido_id\na 0 0\nc 0 0\n"}}

# four frames of each
WHOLE_A = [0, 26, 53, 79]
WHOLE_B = [100, 106, 113, 119]
WHOLE_C = [200, 202, 205, 207]
HALF_A = [0, 20, 39, 59]  # of its first 30 seconds
SECONDS_1_TO_3 = [102, 103, 104, 105]  # of b
A_SAYS = ["a says 0", "a says 1"]
A_MAN = ["a man 0", "a man 1"]
LOST = "1 videos (1 rows) are not in"
# {set and split: [words of the note, and of each row (key, captions, four frames[, class])]}; what
# stands after "of" in the name of a set is which of its layouts
EXPECTED = {
    ("msrvtt", "train"): [
        f"{LOST}; 1 without a class; WARNING: 2 examples, 9,000 expected",
        ("a", A_SAYS, WHOLE_A, "sports"),
        ("b", ["b says 0"], WHOLE_B, None)],
    ("msrvtt", "test"): [LOST, ("c", ["one, with a comma"], WHOLE_C, None)],
    ("msrvtt of the hub", "train"): [LOST, ("a.mp4", A_SAYS, WHOLE_A, "beauty")],
    ("msrvtt of the hub", "test"): ["", ("c.mp4", ["one string"], WHOLE_C, "beauty")],
    ("msvd", "train"): [LOST, ("a", A_MAN, WHOLE_A)],
    ("msvd", "val"): ["100 expected", ("b", A_MAN, WHOLE_B)],
    ("msvd", "test"): ["670 expected", ("c", A_MAN, WHOLE_C)],
    # twice is two queries: the papers count 27,763
    ("msvd of the hub", "test"): ["", ("a.avi", ["a man", "a man", "music"], WHOLE_A)],
    ("activitynet", "train"): [
        f"{LOST}; 1 without a caption", ("v_a", ["It begins. It ends."], WHOLE_A)],
    ("activitynet", "test"): ["4,917 expected", ("v_c", ["It is. It was."], WHOLE_C)],
    ("didemo", "train"): [
        LOST,
        ("a.mov 0-30 s", ["first a. then a."], HALF_A),
        ("b.m4v 0-30 s", ["first b."], WHOLE_B)],
    ("didemo", "val"): ["1,065 expected", ("b.m4v 0-30 s", ["b in val."], WHOLE_B)],
    ("didemo of the hub", "train"): [
        "8,395 expected", ("a.mov 0-30 s", ["first a. then a."], HALF_A)],
    ("youcook2", "train"): [
        LOST,
        ("a 2-4 s", ["step 0"], [4, 5, 6, 7]),
        ("a 6-8.5 s", ["step 1"], [12, 13, 15, 16])],
    ("youcook2", "test"): ["3,492 expected", ("b 1-3 s", ["step 2"], SECONDS_1_TO_3)],
    ("youcook2 of the hub", "test"): [
        "", ("deep/er/b.webm 1-3 s", ["step 0"], SECONDS_1_TO_3)],
    ("howto100m", "train"): [
        LOST, ("a 0", ["a zero"], [0, 0, 1, 1]), ("a 1", ["a one"], [2, 2, 3, 3])],
    ("ssv2-lt", "train"): [
        f"{LOST}; 50,418 expected",
        ("b", ["holding b"], WHOLE_B, "Holding a"),
        ("a", ["moving a up"], WHOLE_A, "Moving a up")],
    ("ssv2-lt", "test"): ["2,610 expected", ("c", ["holding c"], WHOLE_C, "Holding a")],
    ("ssv2-lt", "val"): [
        "6,960 expected",
        ("a", ["moving a up"], WHOLE_A, "Moving a up"),
        ("c", ["holding c"], WHOLE_C, "Holding a")]}


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """The files of all sets in a folder each, and the videos: 40, 10 and 4 seconds of two
    frames."""
    root = tmp_path_factory.mktemp("sets")
    for name, (first, length) in VIDEOS.items():
        write_clips(root / "videos", {first: name}, length, fps=2)
    for layout, files in FILES.items():
        write_files(root / layout, files)
    return root


def load(root, layout, split, **options):
    where = {"data_dir": str(root / layout), "video_dir": str(root / "videos"), "frames": 4}
    return common.load_data(layout.split()[0], split, **(where | options))


@pytest.mark.parametrize("layout, split", EXPECTED)
def test_rows_of_a_set(layout, split, replica):
    words, *rows = EXPECTED[layout, split]
    data = load(replica, layout, split)
    assert data.split == split
    assert len(data) == len(rows)
    for k, (key, captions, frames, *label) in enumerate(rows):
        assert data.key(k) == key
        assert data.captions(k) == captions
        assert numbers(data.read(k)) == frames
        if label:
            names = [*data.label_names, None]  # label -1 has no name
            assert names[data.labels[k]] == label[0]
    for part in words.split("; "):
        assert part in data.note
    assert data.grouped == layout.startswith("msvd")


@pytest.mark.parametrize("layout, split, shown", [
    ("youcook2", "test", [103, 105]), ("didemo", "val", [100, 119])])
def test_random_frames_of_an_evaluation_lie_where_the_papers_have_them(
        layout, split, shown, replica):
    """In the middles of the parts, or from the first frame to the last."""
    data = load(replica, layout, split, frame_sampling="random", frames=2)
    assert numbers(data.read(0)) == shown


@pytest.mark.parametrize("flag", ["data_dir", "video_dir"])
def test_annotations_and_videos_may_lie_in_one_folder(flag, replica):
    assert common.load_data("msvd", "test", **{flag: str(replica)}).key(0) == "c"


# ---- what can be wrong with them ----
@pytest.mark.parametrize("name, split, layout, words", [
    ("msrvtt", "train", None, "--dataset msrvtt needs --data-dir"),
    ("msrvtt", "train", "msrvtt", "none of 3 videos is below "),
    ("msrvtt", "val", "msrvtt", "msrvtt has no val split; it has: train, test"),
    ("didemo", "val", "msrvtt", "no annotation file of its val split"),
    ("msvd", "train", "msrvtt", "none of train_list.txt, *train*.json* is there")])
def test_set_without_its_files_is_refused(name, split, layout, words, tmp_path):
    options = {}
    if layout:
        write_files(tmp_path, FILES[layout])
        options = {"data_dir": str(tmp_path), "video_dir": str(tmp_path)}
    complains(name, split, words, **options)


def test_several_files_of_one_name_are_refused(tmp_path):
    write_files(tmp_path, {"train_list.txt": "a\n", "old/train_list.txt": "b\n"})
    words = ["train_list.txt may be ", f"{tmp_path}/old/train_list.txt or ", "remove one of them"]
    complains("msvd", "train", *words, data_dir=str(tmp_path))


@pytest.mark.parametrize("content", [b'{"database": {"a"', b"[1, 2]", b"\xff\xfe"])
@pytest.mark.parametrize("name, split, file", [
    ("msrvtt", "train", "MSRVTT_data.json"),
    ("msrvtt", "test", "msrvtt_test_1k.json"),
    ("activitynet", "train", "train.json"),
    ("youcook2", "test", "youcookii_annotations_trainval.json")])
def test_damaged_annotation_file_is_named(name, split, file, content, tmp_path):
    write_clips(tmp_path, {0: "a.mp4"})
    write_files(tmp_path, {"MSRVTT_train.9k.csv": "video_id\na\n", file: content})
    complains(name, split, file, data_dir=str(tmp_path))


class Attack:
    """A pickle of it runs a command when it is read."""

    def __reduce__(self):
        return os.system, ("touch marker",)


@pytest.mark.parametrize("content, words", [
    (pickle.dumps({"a": Attack()}, 0), "asks for posix.system"),
    (pickle.dumps({"a": Attack()}, 4), "asks for posix.system"),
    (b"cbuiltins\neval\n(S'1'\ntR.", "asks for builtins.eval"),
    (TEXT, "")])
def test_pickle_that_is_no_data_is_refused(content, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"train_list.txt": "a\n", "raw-captions.pkl": content})
    complains("msvd", "train", "raw-captions.pkl", words, data_dir=str(tmp_path))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_of_plain_values_and_arrays_is_read(protocol, tmp_path):
    content = [1, 2.5, "x", None, True, (1, 2), {3}, frozenset([4]), b"bytes"]
    content += [np.arange(6.0).reshape(2, 3), np.float32(2), np.array(["a", "bc"])]
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content, protocol))
    assert repr(Files(tmp_path).pickle("a.pkl")) == repr(content)
