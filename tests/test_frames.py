"""Frames of videos by time: read_frames on every format; the clips are encoded here. How a clip
becomes pixels or features: the frame cache, and features in place of frames."""

import os
import struct
from glob import glob

from contrastive.data.clips import Clips, Features, feature_shape
from contrastive.data.frames import read_frames

import av
import numpy as np
import pytest
import torch

from helpers import all_rows, complains, encode, frame, numbers, write_rows, write_video


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
    return write_video(folder / f"clip.{suffix}", frames, codec, **usual, **options)


def shown(source, *args, **options):
    """The numbers of the frames that read_frames gives."""
    return numbers(read_frames(source, *args, **options))


@pytest.fixture(scope="module")
def two_seconds(tmp_path_factory):
    """{name: clip of two seconds, frames 0 to 19} of each format; not to be changed."""
    clips = {}
    for name in FORMATS:
        clips[name] = write_format(name, tmp_path_factory.mktemp("clip"), range(20))
    return clips


@pytest.mark.parametrize("name", FORMATS)
def test_all_fewer_and_more_frames_of_every_format(name, two_seconds):
    path = two_seconds[name]
    clip = read_frames(path, 20)
    assert clip.shape == (20, 64, 96, 3)
    assert clip.dtype == np.uint8
    for number, pixels in enumerate(clip):
        error = np.abs(pixels.astype(int) - frame(number))
        assert error.mean() <= FORMATS[name][2]
    assert np.array_equal(read_frames(path.read_bytes(), 20), clip)
    assert shown(path, 6) == [0, 4, 8, 11, 15, 19]  # nearest to 0, 3.8, 7.6, ...
    more = shown(path, 45)
    assert more == sorted(more)
    assert set(more) == set(range(20))


SAMPLINGS = [{}, {"sampling": "middle"}, {"sampling": "random", "draws": [0.1, 0.9, 0.4]}]


@pytest.mark.parametrize("options", SAMPLINGS)
@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4", "gif"])
def test_clip_of_one_frame_repeats_it(name, options, tmp_path):
    path = write_format(name, tmp_path, [9])
    assert shown(path, 3, **options) == [9, 9, 9]


# ---- which frames ----
@pytest.mark.parametrize("sampling, draws, expected", [
    ("uniform", None, [10]),
    ("middle", None, [10]),
    ("middle", None, [2, 7, 12, 17]),
    ("random", [0, 0.25, 0.5, 0.999], [0, 6, 12, 19]),
])
def test_frames_lie_where_their_sampling_says(sampling, draws, expected, two_seconds):
    path = two_seconds["mp4 h264"]
    assert shown(path, len(expected), sampling=sampling, draws=draws) == expected


# start, end, first frame and frame behind the last of windows in ten seconds with a key frame every
# two, from which a window is sought
WINDOWS = [
    (0.0, 1.0, 0, 10),
    (1.95, 2.5, 20, 25),
    (6.0, 6.5, 60, 65),
    (7.0, None, 70, 100),
    (None, 1.5, 0, 15),
    (9.0, 20.0, 90, 100),
    (9.85, None, 99, 100),
]
WINDOW_FORMATS = ["mp4 h264", "mp4 av1", "webm vp9", "mkv h264", "avi h264", "ts h264", "gif"]


@pytest.mark.parametrize("name", WINDOW_FORMATS)
def test_windows_are_the_same_frames_as_in_the_whole_clip(name, tmp_path):
    path = write_format(name, tmp_path, range(100), options={"g": "20", "sc_threshold": "0"})
    whole = read_frames(path, 100)
    assert numbers(whole) == list(range(100))
    for start, end, first, stop in WINDOWS:
        assert np.array_equal(read_frames(path, stop - first, start, end), whole[first:stop])
        middle = (first + stop) // 2
        assert shown(path, 1, start, end, sampling="middle") == [middle]


@pytest.mark.parametrize("options", SAMPLINGS)
@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4"])
def test_window_between_two_frames_shows_the_earlier(name, options, two_seconds):
    assert shown(two_seconds[name], 3, 1.02, 1.07, **options) == [10, 10, 10]


@pytest.mark.parametrize("start, end", [(2.05, 3.0), (5.0, None), (1.5, 0.5)])
@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4"])
def test_window_with_no_frame_is_named(name, start, end, two_seconds):
    with pytest.raises(ValueError, match=f"no frame between {start:g}"):
        read_frames(two_seconds[name], 4, start, end)


@pytest.mark.parametrize("muxer", [None, {"movflags": "faststart"}])
@pytest.mark.parametrize("part", [0, 0.5, 0.8])
def test_cut_download_is_refused(part, muxer, tmp_path):
    content = write_format("mp4 h264", tmp_path, range(100), muxer=muxer).read_bytes()
    with pytest.raises((ValueError, av.FFmpegError)):
        read_frames(content[: int(part * len(content))], 4)


# in tenths of a second: ten frames in the first, then one a second
SLOWING = [*range(0, 10), *range(10, 100, 10)]


@pytest.mark.parametrize("name", ["mp4 h264", "webm vp9", "gif", "avi mpeg4"])
def test_variable_frame_rate_is_sampled_evenly_in_time(name, tmp_path):
    path = write_format(name, tmp_path, range(19), at=SLOWING)
    assert shown(path, 10) == [0, *range(10, 19)]  # a frame a second
    assert shown(path, 4, 2.5, 7.0) == [12, 13, 14, 15]


@pytest.mark.parametrize("file, codec", [
    ("a.avi", "mpeg4"),
    ("a.mpg", "mpeg2video"),
    ("a.m2v", "mpeg2video"),
])
def test_frames_of_containers_whose_packets_are_not_the_frames(file, codec, tmp_path):
    path = write_video(tmp_path / file, range(60), codec, 25, options={"bf": "2"})
    assert shown(path, 8) == [0, 8, 17, 25, 34, 42, 51, 59]
    window = shown(path, 4, 0.4, 1.0)
    assert window[0] in (10, 11)
    assert window[-1] in (23, 24, 25)
    assert window == sorted(set(window))


# ---- size, turn, cover art ----
@pytest.mark.parametrize("size, short, shape", [
    ((64, 96), 200, (64, 96)),
    ((128, 96), 48, (64, 48)),
    ((64, 130), 40, (40, 81)),
])
def test_short_scales_the_short_side_down_only(size, short, shape, tmp_path):
    path = write_video(tmp_path / "a.mp4", [frame(203, *size)])
    clip = read_frames(path, 1, short=short)
    assert clip.shape == (1, *shape, 3)
    assert numbers(clip) == [203]


def test_clip_is_turned_as_the_camera_says(tmp_path):
    """By the matrix in the mp4's track header, of 16.16 numbers (the last 2.30)."""
    stored = [np.rot90(frame(k)) for k in range(8)]  # counterclockwise, to be turned back
    content = bytearray(write_video(tmp_path / "a.mp4", stored).read_bytes())
    place = content.index(b"tkhd") + 44  # version, times, track, length, layer, volume
    one = 1 << 16
    matrix = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    content[place : place + len(matrix)] = matrix
    clip = Clips(8, short=48)(bytes(content))
    assert clip.shape == (8, 3, 48, 72)
    assert numbers(clip) == list(range(8))


def box(kind, content):
    """A box of an mp4."""
    return (len(content) + 8).to_bytes(4, "big") + kind + content


def test_cover_art_is_not_the_video(two_seconds, tmp_path):
    """The attached picture of an mp4, whose metadata stand before the streams'."""
    content = two_seconds["mp4 h264"].read_bytes()
    handler = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    picture = box(b"data", b"\0\0\0\x0d\0\0\0\0" + encode(frame(99), "jpeg"))
    items = box(b"ilst", box(b"covr", picture))
    metadata = box(b"udta", box(b"meta", bytes(4) + handler + items))
    frames, _, movie = content.partition(b"moov")  # in this order, so that their places stay
    path = tmp_path / "b.mp4"
    path.write_bytes(frames[:-4] + box(b"moov", metadata + movie))
    assert shown(path, 20) == list(range(20))


# ---- frame cache ----
@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def test_frame_cache_needs_the_video_once(cache, tmp_path):
    path = write_video(tmp_path / "a.mp4", range(20))
    clips = Clips(4, "middle", 48, cache)
    first = clips(path)
    assert first.shape == (4, 3, 48, 72)
    assert numbers(first) == [2, 7, 12, 17]
    window = clips(path, 0.5, 1.5)
    assert numbers(window) == [6, 8, 11, 13]
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))  # it is not read again
    assert torch.equal(clips(path), first)
    assert torch.equal(clips(path, 0.5, 1.5), window)
    for frames, short in ((5, 48), (4, 40)):
        with pytest.raises((OSError, ValueError)):
            Clips(frames, "middle", short, cache)(path)  # other frames are not in it
    assert len(glob(f"{cache}/*/*")) == 2


def test_clip_in_the_cache_is_of_this_path_this_time_or_these_bytes(cache, tmp_path):
    clips = Clips(4, cache=cache)
    for folder, first in (("x", 0), ("y", 8), ("x", 16)):
        frames = range(first, first + 4)
        path = write_video(tmp_path / folder / "a.mp4", frames)
        os.utime(path, (0, first))
        assert numbers(clips(path)) == list(frames)
        assert numbers(clips(path.read_bytes())) == list(frames)
    assert len(glob(f"{cache}/*/*")) == 6


def test_random_frames_come_from_the_cache(cache, tmp_path):
    """Of each quarter's six frames 1, 3 and 5 are kept."""
    path = write_video(tmp_path / "a.mp4", range(24))
    clips = Clips(4, "random", cache=cache)
    assert numbers(clips(path, draws=[0, 0.4, 0.7, 0.999])) == [1, 9, 17, 23]
    # an evaluation sees what it sees without a cache
    assert numbers(clips(path)) == numbers(Clips(4)(path))
    assert numbers(clips(path, draws=[0.5, 0.5, 0, 0])) == [3, 9, 13, 19]
    assert len(glob(f"{cache}/*/*")) == 2


# ---- features ----
@pytest.fixture
def folders(tmp_path):
    """Two folders of features of a.mp4: row t of the first is t, of the second 100 + t."""
    motion, appearance = tmp_path / "motion", tmp_path / "appearance"
    motion.mkdir()
    appearance.mkdir()
    np.save(motion / "a.npy", np.arange(11)[:, None])
    np.save(appearance / "a.npy", np.arange(100, 105)[:, None])
    return [str(motion), str(appearance)]


def write_windows(path, *windows):
    """A csv of a.mp4 and these windows."""
    rows = [("a.mp4", "words", *window) for window in windows]
    return write_rows(path, ["video", "caption", "start", "end"], rows)


def test_features_of_two_folders_stand_side_by_side(folders, tmp_path):
    path = write_windows(tmp_path / "a.csv", ("", ""))
    data = all_rows(path, frames=4, feature_dir=folders)
    assert "whole files" not in data.note
    assert feature_shape(data) == [4, 2]
    rows = data.read(0)
    assert rows.dtype == torch.float32
    assert rows[:, 0].tolist() == [0, 3, 7, 10]
    assert rows[:, 1].tolist() == [100, 101, 103, 104]


def test_several_windows_of_one_file_of_features_are_refused(folders, tmp_path):
    path = write_windows(tmp_path / "b.csv", (0, 1), (1, 2))
    complains(path, "train", "several windows of one video", feature_dir=folders)


def test_features_of_one_window_are_noted_to_be_of_the_whole_file(folders, tmp_path):
    path = write_windows(tmp_path / "c.csv", (0, 1))
    data = all_rows(path, feature_dir=folders)
    assert "those of whole files, not of the windows" in data.note


def test_features_that_are_not_finite_are_refused(folders):
    np.save(f"{folders[1]}/a.npy", [[np.nan]])
    with pytest.raises(ValueError, match="not finite"):
        Features(folders, 4)("a.mp4")
