"""How a clip becomes pixels or features: the frame cache, and features in place of frames."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from contrastive.data import clips as data_clips
from contrastive.data.clips import Clips
from contrastive.engine.processes import UserError

import numpy as np
import pytest
import torch

from helpers import TEXT, batches_of, complains, counted, numbers, open_splits, write_rows, write_video

# ---------------------------------------------------- frame cache ----------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "middle"])
def test_the_frame_cache_needs_the_video_once(sampling, tmp_path):
    path = write_video(tmp_path / "videos" / "a.mp4", range(20))
    plain, cached = (Clips(4, sampling, 48, cache=c) for c in ("", str(tmp_path / "cache")))
    decoded, first = plain(path), cached(path)
    assert numbers(first) == numbers(decoded)
    assert first.shape == decoded.shape == (4, 3, 48, 72) and first.dtype == torch.uint8
    assert (first.int() - decoded.int()).abs().float().mean() < 2
    window = cached(path, 0.5, 1.5)
    files = sorted(f for f in (tmp_path / "cache").rglob("*") if f.is_file())
    assert len(files) == 2 and all(f.suffix == ".jpg" for f in files)
    content, changed = path.stat().st_size, path.stat().st_mtime_ns
    path.write_bytes(bytes(content))
    os.utime(path, ns=(changed, changed))  # it is not read again
    assert torch.equal(cached(path), first) and torch.equal(cached(path, 0.5, 1.5), window)
    assert numbers(window) != numbers(first)
    with pytest.raises((OSError, ValueError)):
        Clips(5, sampling, 48, str(tmp_path / "cache"))(path)  # other frames are not in it
    assert sorted(f for f in (tmp_path / "cache").rglob("*") if f.is_file()) == files  # nothing half written


def test_a_clip_in_the_cache_is_of_this_path_this_time_or_these_bytes(tmp_path):
    clips = Clips(4, cache=str(tmp_path / "cache"))
    paths = [write_video(tmp_path / d / "bytes.mp4", range(8 * k, 8 * k + 4)) for k, d in enumerate(("x", "y"))]
    for _ in range(2):
        for k, p in enumerate(paths):
            assert numbers(clips(p)) == numbers(clips(p.read_bytes())) == [8 * k + j for j in range(4)]
    assert len(list((tmp_path / "cache").rglob("*.jpg"))) == 4
    write_video(paths[0], range(16, 20))
    os.utime(paths[0], (0, os.path.getmtime(paths[0]) + 60))
    assert numbers(clips(paths[0])) == [16, 17, 18, 19]


def test_two_at_once_may_cache_one_clip(tmp_path):
    """With one process number, as in two containers: threads have one too."""
    path, clips = write_video(tmp_path / "a.mp4", range(4)), Clips(4, cache=str(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        found = [job.result() for job in [pool.submit(clips, path) for _ in range(8)]]
    assert all(torch.equal(x, found[0]) for x in found)
    assert [p.suffix for p in (tmp_path / "cache").rglob("*.*")] == [".jpg"]


def test_random_frames_come_from_the_cache(tmp_path):
    path = write_video(tmp_path / "a.mp4", range(24))
    clips = Clips(4, "random", cache=str(tmp_path / "cache"))

    def read(draws):
        return numbers(clips(path, draws=draws))

    assert read([0, 0.4, 0.7, 0.999]) == [1, 9, 17, 23]  # of each quarter's six frames 1, 3 and 5 are kept
    evaluated = clips(path)  # without draws: what it sees without a cache, in a file of its own
    assert numbers(evaluated) == numbers(Clips(4, "random")(path)) == numbers(Clips(4)(path))
    assert read([0.5] * 4) == [3, 9, 15, 21] and read([0.999] * 4) == [5, 11, 17, 23]
    assert read([0] * 4) == [1, 7, 13, 19]
    assert torch.equal(clips(path), evaluated) and len(list((tmp_path / "cache").rglob("*.jpg"))) == 2


# ---------------------------------------------------- features -------------------------------------------------------


@pytest.fixture
def features(tmp_path):
    """Two kinds of features of eight videos, of other lengths and widths; row t of the first kind is t, of the second
    100 + t."""
    for k in range(8):
        for kind, (length, width, base) in {"motion": (10 + k, 3, 0), "appearance": (5, 2, 100)}.items():
            (tmp_path / kind).mkdir(exist_ok=True)
            rows = np.repeat(base + np.arange(length)[:, None], width, 1)  # (length, width)
            np.save(tmp_path / kind / f"v{k}.npy", rows.astype(np.float64 if k % 2 else np.float16))
    path = write_rows(tmp_path / "a.csv", ["video", "caption"], [(f"v{k}.mp4", f"clip {k}") for k in range(8)])
    return path, [str(tmp_path / kind) for kind in ("motion", "appearance")]


def test_features_of_two_folders_stand_side_by_side(features):
    path, folders = features
    sets = [*open_splits(path, frames=4, feature_dir=folders).values()]
    assert sum(map(len, sets)) == 8 and data_clips.feature_shape(sets[0]) == [4, 5]
    with pytest.raises(UserError, match="^--image-encoder ssb: the data set has pixels"):
        data_clips.feature_shape(common.load_data("emoji", "val"))
    for d in sets:
        for i in range(len(d)):
            k, x = int(d.key(i)[1]), d[i]["pixels"]
            assert x.shape == (4, 5) and x.dtype == torch.float32 and d.captions(i) == [f"clip {k}"]
            assert x[:, 0].tolist() == x[:, 2].tolist() == np.linspace(0, 9 + k, 4).round().tolist()
            assert x[:, 3].tolist() == x[:, 4].tolist() == [100, 101, 103, 104]
    only = common.load_data(str(path), "train", frames=20, feature_dir=folders[1:]).read(0)
    assert only.shape == (20, 2) and set(only[:, 0].tolist()) == {100, 101, 102, 103, 104}  # more than there are
    np.save(Path(folders[1]) / "v3.npy", np.float32([7, 8]))  # a vector is a row
    assert data_clips.Features(folders, 4)("v3.mp4")[:, 3:].tolist() == [[7, 8]] * 4


def test_features_have_no_windows(features):
    path, folders = features
    assert "whole files" not in common.load_data(str(path), "train", feature_dir=folders).note
    rows = [("v0.mp4", f"part {k}", k, k + 1) for k in range(4)]
    path = write_rows(path.with_name("b.csv"), ["video", "caption", "start", "end"], rows)
    complains(path, "train", "several windows", feature_dir=folders)
    rows = [(f"v{k}.mp4", f"part {k}", k, k + 1) for k in range(4)]  # one each: the features are still of all of it
    path = write_rows(path.with_name("c.csv"), ["video", "caption", "start", "end", "split"],
                      [(*row, "train") for row in rows])
    assert "those of whole files, not of the windows" in common.load_data(str(path), "train", feature_dir=folders).note


BROKEN = {"nan": np.full((5, 2), np.nan), "3-d": np.zeros((5, 2, 2)), "objects": np.array([{"a": 1}], dtype=object)}


@pytest.mark.parametrize("kind", [*BROKEN, "missing", "text"])
def test_unusable_features_are_a_bad_sample(kind, features, tmp_path):
    path, folders = features
    data = common.load_data(str(path), "train", frames=4, feature_dir=folders)
    bad = data.key(2)
    file = Path(folders[1]) / f"{bad[:2]}.npy"
    file.unlink()
    if kind == "text":
        file.write_bytes(TEXT)
    elif kind != "missing":
        np.save(file, BROKEN[kind], allow_pickle=True)
    batches = batches_of(data, [common.Augment(32)] * 2, 6, last=1)
    batch, = counted(batches)
    assert list(batches.bad) == [bad] and bad not in batch["keys"] and batch["keys"].count(data.key(3)) == 2
    assert [tuple(v.shape) for v in batch["views"]] == [(6, 4, 5)] * 2 and torch.isfinite(batch["views"][0]).all()
