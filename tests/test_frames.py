"""Frames of videos by time: read_frames on every format; the clips are encoded here. How a clip
becomes pixels or features: the frame cache, and features in place of frames."""

import functools
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import common
from contrastive.data.clips import Clips, Features, feature_shape
from contrastive.data.frames import read_frames

import av
import numpy as np
import pytest
import torch

from helpers import (
    TEXT, all_rows, batches_of, complains, counted, encode, frame, numbers,
    write_rows, write_video)


def largest_error(clip, shown, **size):
    """The largest mean error of a frame against the pictures that were encoded."""
    errors = []
    for pixels, number in zip(clip, shown, strict=True):
        errors.append(np.abs(pixels.astype(int) - frame(number, **size)).mean())
    return max(errors)


# name: (suffix, codec, mean error allowed, how it is written)
FORMATS = {
    "mp4 h264": ("mp4", "libx264", 3, {}),
    "mp4 av1": ("mp4", "libsvtav1", 6, {}),
    "webm vp9": ("webm", "libvpx-vp9", 3, {}),
    "webm live": ("webm", "libvpx-vp9", 3, {"muxer": {"live": "1"}}),
    "mkv h264": ("mkv", "libx264", 3, {}),
    "mkv lossless": ("mkv", "ffv1", 0, {"pixels": "bgr0"}),
    "avi mpeg4": ("avi", "mpeg4", 3, {}),
    "avi h264": ("avi", "libx264", 3, {}),
    "ts h264": ("ts", "libx264", 3, {}),
    "gif": ("gif", "gif", 2, {"pixels": "rgb8"}),
}


def write_format(name, folder, frames, **options):
    suffix, codec, _, usual = FORMATS[name]
    return write_video(folder / f"clip.{suffix}", frames, codec, **(usual | options))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(format): its clip of two seconds, frames 0 to 19; not to be changed."""
    return functools.cache(
        lambda name: write_format(name, tmp_path_factory.mktemp("clip"), range(20)))


@pytest.fixture(scope="module")
def two_seconds(written):
    """x264 with its usual B frames."""
    return written("mp4 h264")


@pytest.mark.parametrize("name", FORMATS)
def test_all_fewer_and_more_frames_of_every_format(name, written):
    path = written(name)
    clip = read_frames(path, 20)
    assert clip.shape == (20, 64, 96, 3)
    assert clip.dtype == np.uint8
    assert numbers(clip) == list(range(20))
    assert largest_error(clip, range(20)) <= FORMATS[name][2]
    assert np.array_equal(read_frames(path.read_bytes(), 20), clip)
    few = read_frames(path, 6)
    assert np.array_equal(few, clip[[0, 4, 8, 11, 15, 19]])  # nearest to 0, 3.8, 7.6, ...
    shown = numbers(read_frames(path, 45))
    assert shown == sorted(shown)
    assert set(shown) == set(range(20))


@pytest.mark.parametrize("options", [
    {}, {"sampling": "middle"}, {"sampling": "random", "draws": [0.1, 0.9, 0.4]},
    {"start": 0, "end": 30}])
@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4", "gif"])
def test_clip_of_one_frame(name, options, tmp_path):
    path = write_format(name, tmp_path, [9])
    assert numbers(read_frames(path, 3, **options)) == [9, 9, 9]


# ---- which frames ----
@pytest.mark.parametrize("sampling, shown", [
    ("uniform", [10]), ("uniform", [0, 6, 13, 19]), ("middle", [2, 7, 12, 17]),
    ("middle", [2, 6, 10, 14, 18]), ("middle", [10])])
def test_frames_spread_over_the_clip(sampling, shown, two_seconds):
    assert numbers(read_frames(two_seconds, len(shown), sampling=sampling)) == shown


@pytest.mark.parametrize("draws, shown", [
    ([0, 0.25, 0.5, 0.999], [0, 6, 12, 19]), (np.float32([0.5] * 4), [2, 7, 12, 17])])
def test_random_frames_lie_where_their_draws_say(draws, shown, two_seconds):
    clip = common.read_frames(str(two_seconds), 4, sampling="random", draws=draws)
    assert numbers(clip) == shown


# ten seconds, so that a window is sought from the key frame before it: (start, end, first frame,
# frame behind the last)
WINDOWS = [
    (0.0, 1.0, 0, 10),
    (1.95, 2.5, 20, 25),
    (3.75, 4.2, 38, 42),
    (6.0, 6.5, 60, 65),
    (7.0, None, 70, 100),
    (None, 1.5, 0, 15),
    (9.0, 20.0, 90, 100),
    (9.85, None, 99, 100),
]


@pytest.mark.parametrize("name, key_frames", [
    ("mp4 h264", 20), ("mp4 h264", 250), ("mp4 av1", 20), ("webm vp9", 20), ("mkv h264", 20),
    ("avi h264", 20), ("ts h264", 20), ("gif", 20)])
def test_windows_are_the_same_frames_as_in_the_whole_clip(name, key_frames, tmp_path):
    options = {"g": str(key_frames)}
    if "h264" in name:
        options["sc_threshold"] = "0"
    path = write_format(name, tmp_path, range(100), options=options)
    whole = read_frames(path, 100)
    assert numbers(whole) == list(range(100))
    for start, end, first, stop in WINDOWS:
        assert np.array_equal(read_frames(path, stop - first, start, end), whole[first:stop])
        middle = read_frames(path, 1, start, end, sampling="middle")
        assert numbers(middle) == [(first + stop) // 2]


def check_refused(source, words, **options):
    """read_frames gives nothing, with the reason on one line."""
    with pytest.raises((ValueError, OSError, av.FFmpegError), match=words) as error:
        read_frames(source, 4, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("start, end", [(2.05, 3.0), (5.0, None), (1.5, 0.5)])
@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4"])
def test_window_with_no_frame_is_named(name, start, end, written):
    check_refused(written(name), f"no frame between {start:g}", start=start, end=end)


@pytest.mark.parametrize("options", [
    {}, {"sampling": "middle"}, {"sampling": "random", "draws": [0.1, 0.5, 0.9]}])
@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4"])
def test_window_between_two_frames_shows_the_earlier(name, options, written):
    assert numbers(read_frames(written(name), 3, 1.02, 1.07, **options)) == [10, 10, 10]


# in tenths of a second: ten frames in the first, then one a second
SLOWING = [*range(0, 10), *range(10, 100, 10)]


@pytest.mark.parametrize("name", ["mp4 h264", "webm vp9", "gif", "avi mpeg4"])
def test_variable_frame_rate_is_sampled_evenly_in_time(name, tmp_path):
    path = write_format(name, tmp_path, range(19), at=SLOWING)
    assert numbers(read_frames(path, 10)) == [0, *range(10, 19)]  # a frame a second
    assert numbers(read_frames(path, 4, 2.5, 7.0)) == [12, 13, 14, 15]


# ---- size, turn, transparency ----
@pytest.mark.parametrize("size, short, shape", [
    ((64, 96), 32, (32, 48)), ((64, 96), 200, (64, 96)), ((128, 96), 48, (64, 48)),
    ((64, 130), 40, (40, 81))])
def test_short_scales_the_short_side_down_only(size, short, shape, tmp_path):
    path = write_video(tmp_path / "a.mp4", [frame(3, *size), frame(200, *size)])
    clip = read_frames(path, 2, short=short)
    assert clip.shape == (2, *shape, 3)
    assert numbers(clip) == [3, 200]
    # the edges are soft
    assert largest_error(clip, (3, 200), height=shape[0], width=shape[1]) < 10


@pytest.mark.parametrize("turn, matrix", [(1, (0, 1, -1, 0)), (3, (0, -1, 1, 0))])
def test_clip_is_turned_as_the_camera_says(turn, matrix, tmp_path):
    """matrix: (a, b, c, d) of the mp4's track header, x' = a x + c y, y' = b x + d y: the picture
    as stored goes `turn` quarters clockwise."""
    stored = [np.rot90(frame(k), turn) for k in range(8)]  # counterclockwise, to be turned back
    content = bytearray(write_video(tmp_path / "a.mp4", stored).read_bytes())
    place = content.index(b"tkhd") + 44  # version, times, track, length, layer, volume
    a, b, c, d = (65536 * value for value in matrix)
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip = read_frames(content, 8)
    assert clip.shape == (8, 64, 96, 3)
    assert numbers(clip) == list(range(8))
    assert Clips(2, short=32)(bytes(content)).shape == (2, 3, 32, 48)


# ---- what is no whole video ----
def box(kind, content):
    """A box of an mp4."""
    return (len(content) + 8).to_bytes(4, "big") + kind + content


@pytest.mark.parametrize("is_first", [True, False])
def test_cover_art_is_not_the_video(is_first, two_seconds, tmp_path):
    """The attached picture of an mp4, whose metadata stand before or behind the streams'."""
    content = two_seconds.read_bytes()
    picture = box(b"data", bytes([0, 0, 0, 13, 0, 0, 0, 0]) + encode(frame(99), "jpeg"))
    handler = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    metadata = box(b"meta", bytes(4) + handler + box(b"ilst", box(b"covr", picture)))
    start = content.index(b"moov") - 4  # behind the frames, whose places stay
    parts = [content[start + 8 :], box(b"udta", metadata)]
    if is_first:
        parts.reverse()
    (tmp_path / "b.mp4").write_bytes(content[:start] + box(b"moov", b"".join(parts)))
    with av.open(str(tmp_path / "b.mp4")) as container:
        assert len(container.streams.video) == 2
    assert numbers(read_frames(tmp_path / "b.mp4", 20)) == list(range(20))


@pytest.mark.parametrize("content", [b"", TEXT * 1000])
def test_what_is_no_video_is_refused(content, tmp_path):
    (tmp_path / "a.mp4").write_bytes(content)
    check_refused(content, ".")
    check_refused(tmp_path / "a.mp4", ".")


@pytest.mark.parametrize("muxer", [None, {"movflags": "faststart"}])
@pytest.mark.parametrize("part", [0.05, 0.5, 0.8])
def test_cut_download_is_refused(part, muxer, tmp_path):
    content = write_format("mp4 h264", tmp_path, range(100), muxer=muxer).read_bytes()
    check_refused(content[: int(part * len(content))], ".")


# ---- containers whose packets are not the frames ----
@pytest.mark.parametrize("codec, kind, options", [
    ("msmpeg4v2", "avi", {}), ("mpeg4", "avi", {"bf": "2"}), ("libx264", "avi", {"bf": "2"}),
    ("mpeg2video", "mpg", {"bf": "2"}), ("mpeg2video", "ts", {"bf": "2"}),
    ("mpeg2video", "m2v", {})])
def test_frames_of_containers_that_tell_no_times(codec, kind, options, tmp_path):
    path = write_video(tmp_path / f"a.{kind}", range(60), codec, 25, options=options)
    assert numbers(read_frames(path, 8)) == [0, 8, 17, 25, 34, 42, 51, 59]
    window = numbers(read_frames(path, 4, 0.4, 1.0))
    assert window[0] in (10, 11)
    assert window[-1] in (23, 24, 25)
    assert window == sorted(set(window))


# ---- frame cache ----
@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def cached_files(cache):
    """Names of all files; nothing is half written."""
    files = []
    for _, _, names in os.walk(cache):
        files += names
    assert all(name.endswith(".jpg") for name in files)
    return files


def test_frame_cache_needs_the_video_once(cache, tmp_path):
    path = write_video(tmp_path / "a.mp4", range(20))
    clips = Clips(4, "middle", 48, cache)
    first = clips(path)
    window = clips(path, 0.5, 1.5)
    decoded = Clips(4, "middle", 48)(path)
    assert numbers(first) == numbers(decoded) != numbers(window)
    assert first.shape == (4, 3, 48, 72)
    assert first.dtype == torch.uint8
    assert (first.int() - decoded.int()).abs().float().mean() < 2
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))  # it is not read again
    assert torch.equal(clips(path), first)
    assert torch.equal(clips(path, 0.5, 1.5), window)
    for other in (Clips(5, "middle", 48, cache), Clips(4, "middle", 40, cache)):
        with pytest.raises((OSError, ValueError)):
            other(path)  # other frames are not in it
    assert len(cached_files(cache)) == 2


def test_clip_in_the_cache_is_of_this_path_this_time_or_these_bytes(cache, tmp_path):
    clips = Clips(4, cache=cache)
    for folder, first in (("x", 0), ("y", 8), ("x", 16)):
        path = write_video(tmp_path / folder / "a.mp4", range(first, first + 4))
        os.utime(path, (0, first))
        for _ in range(2):
            shown = list(range(first, first + 4))
            assert numbers(clips(path)) == numbers(clips(path.read_bytes())) == shown
    assert len(cached_files(cache)) == 6


def test_two_at_once_may_cache_one_clip(cache, two_seconds):
    """With one process number, as in two containers: threads have one, too."""
    clips = Clips(4, cache=cache)
    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(clips, [two_seconds] * 8)
    assert all(torch.equal(first, other) for other in others)
    assert len(cached_files(cache)) == 1


@pytest.mark.parametrize("draws, shown", [
    ([0, 0.4, 0.7, 0.999], [1, 9, 17, 23]), ([0.5] * 4, [3, 9, 15, 21]), ([0] * 4, [1, 7, 13, 19])])
def test_random_frames_come_from_the_cache(draws, shown, cache, tmp_path):
    """Of each quarter's six frames 1, 3 and 5 are kept."""
    path = write_video(tmp_path / "a.mp4", range(24))
    clips = Clips(4, "random", cache=cache)
    assert numbers(clips(path, draws=draws)) == shown
    # an evaluation sees what it sees without a cache
    assert numbers(clips(path)) == numbers(Clips(4)(path))
    assert numbers(clips(path, draws=draws)) == shown
    assert len(cached_files(cache)) == 2


# ---- features ----
@pytest.fixture
def features(tmp_path):
    """(csv, folders of features) of eight videos: row t of the first kind is t, of the second 100 +
    t."""
    for kind in ("motion", "appearance"):
        (tmp_path / kind).mkdir()
    for k in range(8):
        motion = np.arange(10.0 + k)[:, None].repeat(3, 1)
        np.save(tmp_path / "motion" / f"v{k}.npy", motion)
        appearance = np.arange(100, 105)[:, None].repeat(2, 1)
        np.save(tmp_path / "appearance" / f"v{k}.npy", appearance.astype(np.float16))
    rows = [(f"v{k}.mp4", f"clip {k}") for k in range(8)]
    path = write_rows(tmp_path / "a.csv", ["video", "caption"], rows)
    return path, [str(tmp_path / "motion"), str(tmp_path / "appearance")]


def test_features_of_two_folders_stand_side_by_side(features):
    path, folders = features
    data = all_rows(path, frames=4, feature_dir=folders)
    assert feature_shape(data) == [4, 5]
    assert "whole files" not in data.note
    for k in range(8):
        rows = data.read(k)
        assert rows.dtype == torch.float32
        assert rows[:, 2].tolist() == np.linspace(0, 9 + k, 4).round().tolist()
        assert rows[:, 4].tolist() == [100, 101, 103, 104]
    more = Features(folders[1:], 20)("v0.mp4")  # more than there are
    assert more.shape == (20, 2)
    assert set(more[:, 0].tolist()) == {100, 101, 102, 103, 104}


def test_features_have_no_windows(features, tmp_path):
    columns = ["video", "caption", "start", "end"]
    rows = [("v0.mp4", "one", 0, 1), ("v0.mp4", "two", 1, 2)]
    path = write_rows(tmp_path / "b.csv", columns, rows)
    complains(path, "train", "several windows of one video", feature_dir=features[1])
    path = write_rows(tmp_path / "c.csv", columns, rows[:1])
    note = all_rows(path, feature_dir=features[1]).note
    assert "those of whole files, not of the windows" in note


BROKEN = {
    "nan": np.full((5, 2), np.nan),
    "3-d": np.zeros((5, 2, 2)),
    "objects": np.array([{"a": 1}], dtype=object),
}


@pytest.mark.parametrize("kind", [*BROKEN, "missing"])
def test_unusable_features_are_a_bad_sample(kind, features, tmp_path):
    path, folders = features
    file = tmp_path / "appearance" / "v2.npy"
    file.unlink()
    if kind != "missing":
        np.save(file, BROKEN[kind], allow_pickle=True)
    data = all_rows(path, frames=4, feature_dir=folders)
    batches = batches_of(data, [common.Augment(32)] * 2, 8, last=1)
    (batch,) = counted(batches)
    assert list(batches.bad) == ["v2.mp4"]
    assert sorted(batch["rows"]) == [0, 1, 3, 3, 4, 5, 6, 7]
    assert [view.shape for view in batch["views"]] == [(8, 4, 5)] * 2
    assert torch.isfinite(batch["views"][0]).all()
