"""The meta-data of MAMA, which are balanced over classes."""

from collections import Counter

import common
from contrastive.papers.meta import balanced_rows, meta_data

import numpy as np
import pytest

import mama
from helpers import write_files, write_rows, write_video


@pytest.fixture
def msrvtt(tmp_path):
    """Flags of CLIP4Clip's layout: 12 videos of three categories for training, four for test."""
    videos = []
    sentences = []
    for k, category in enumerate([0] * 9 + [7] * 2 + [19] * 5):
        name = f"video{k}"
        write_video(tmp_path / f"{name}.mp4", [5 * k, 5 * k + 1])
        videos.append({"video_id": name, "split": "train", "category": category})
        sentences.append({"sen_id": k, "video_id": name, "caption": f"words {k}"})
    write_files(tmp_path, {"MSRVTT_data.json": {"videos": videos, "sentences": sentences}})
    train = [[video["video_id"]] for video in videos[:12]]
    write_rows(tmp_path / "MSRVTT_train.9k.csv", ["video_id"], train)
    test = [("ret", "msr", video["video_id"], "a clip") for video in videos[12:]]
    write_rows(
        tmp_path / "MSRVTT_JSFUSION_test.csv", ["key", "vid_key", "video_id", "sentence"], test)
    folder = str(tmp_path)
    return ["--cpu", "--dataset", "msrvtt", "--data-dir", folder, "--video-dir", folder]


def test_meta_data_of_msrvtt_are_balanced(msrvtt):
    """One of each of three categories, of which one has three quarters of the rows."""
    args = mama.parse_args([*msrvtt, "--meta-size", "3", "--meta-batch-size", "2"])
    meta, _ = meta_data(*common.open_data(args), args)
    assert Counter(meta.labels.tolist()) == {0: 1, 7: 1, 19: 1}


@pytest.mark.parametrize("column", ["noun", None])
def test_meta_data_of_unfolded_rows_are_of_as_many_clips(column):
    """With --unfold-captions the rows of a clip share its name; they would follow each other."""
    keys = [f"k{i}" for i in range(60)]
    table = common.make_table(
        [["one", "two", "three"]] * 60, keys, classes={"noun": ["cat", "dog", "owl"]},
        noun=np.arange(60) % 3)
    data = common.Data("own", "train", table).unfold()
    rows, _ = balanced_rows(data, 30, column)
    assert len({data.key(i) for i in rows}) == 30
