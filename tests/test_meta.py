"""The meta-data of MAMA, which are balanced over classes."""

import json
from collections import Counter

import common
from contrastive import evaluation
from contrastive.papers.meta import balanced_rows, meta_data

import numpy as np

import mama
from helpers import run_script, write_rows, write_video

SMALL = (
    "--workers 0 --cpu --image-encoder small --text-encoder small --no-pretrained --embed-dim 16 "
    "--image-size 32 --frames 2 --text-length 16 --text-pooling mean --log-every 1 "
    "--batch-size 8 --max-steps 2 --meta-batch-size 2 --lr 1e-3"
).split()


def msrvtt(root):
    """CLIP4Clip's layout: 12 videos of three categories for training, four for test."""
    for k in range(16):
        write_video(root / "videos" / f"video{k}.mp4", [5 * k, 5 * k + 1])
    write_rows(root / "MSRVTT_train.9k.csv", ["video_id"], [[f"video{k}"] for k in range(12)])
    write_rows(
        root / "MSRVTT_JSFUSION_test.csv",
        ["key", "vid_key", "video_id", "sentence"],
        [(f"ret{k}", f"msr{k}", f"video{k}", f"clip number {k}") for k in range(12, 16)],
    )
    about = [
        {"video_id": f"video{k}", "split": "train", "category": 0 if k < 9 else 7 if k < 11 else 19}
        for k in range(16)
    ]
    said = [
        {"sen_id": k, "video_id": f"video{k % 16}", "caption": f"words {k % 16} of {'abcd'[k % 4]}"}
        for k in range(32)
    ]
    (root / "MSRVTT_data.json").write_text(json.dumps({"videos": about, "sentences": said}))
    folders = ["--data-dir", str(root), "--video-dir", str(root / "videos")]
    return ["--dataset", "msrvtt", *folders, *SMALL]


def meta_of(flags, *more):
    args = mama.parse_args([*flags, *map(str, more)])
    meta, _ = meta_data(*common.open_data(args), args)
    return meta


def test_meta_data_of_msrvtt_are_balanced(tmp_path):
    """One of each of three categories, of which one has three quarters of the rows."""
    flags = [*msrvtt(tmp_path), "--meta-size", "3"]
    meta = meta_of(flags)
    assert Counter(meta.labels.tolist()) == {0: 1, 7: 1, 19: 1}
    assert meta.note.startswith("3 of train, balanced over label, not known to be clean")


def test_meta_data_of_unfolded_rows_are_of_as_many_clips():
    """With --unfold-captions the rows of a clip share its name; they would follow each other."""
    captions = [[f"clip {i} take {k}" for k in range(5)] for i in range(60)]
    keys = [f"k{i}" for i in range(60)]
    classes = {"noun": ["cat", "dog", "owl"]}
    table = common.make_table(captions, keys, classes=classes, noun=np.arange(60) % 3)
    data = common.Data("made", "train", table).unfold()
    for column in ("noun", None):
        rows, _ = balanced_rows(data, 30, column)
        assert len({data.key(i) for i in rows}) == 30


def test_neighbours_are_clips(tmp_path, monkeypatch):
    """Of rows of --unfold-captions kNN encodes each clip once."""
    files = msrvtt(tmp_path)
    seen, encode = [], evaluation.by_class.encode_images
    monkeypatch.setattr(
        evaluation.by_class,
        "encode_images",
        lambda model, data, *more, **k: (
            seen.append(list(data.keys())),
            encode(model, data, *more, **k),
        )[1],
    )
    run_script(mama, tmp_path / "mama", *files, "--meta-size", "4", "--unfold-captions")
    assert seen and all(len(keys) == len(set(keys)) for keys in seen)
