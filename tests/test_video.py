"""Videos: frames of every format, moving emoji, sets by name, own data, the frame cache, batches of clips, features.

The clips are encoded here."""

import dataclasses
import functools
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from contrastive import evaluation
from contrastive.data import clips as data_clips
from contrastive.data import frames as data_frames
from contrastive.data import moving_emoji
from contrastive.data.annotations import Files
from contrastive.data.clips import Clips
from contrastive.data.frames import read_frames
from contrastive.data.table import EmptySplit
from contrastive.engine.processes import UserError
from contrastive.evaluation.trivial import colour_histogram

import av
import numpy as np
import pytest
import torch
from PIL import Image

import helpers
from helpers import TEXT, counted, frame, frame_number, open_splits, write_rows, write_video

SPLITS = ("train", "val", "test")
CPU = torch.device("cpu")


def numbers(clip):
    """What the frames show: (n, H, W, 3) of read_frames, or (T, 3, H, W) of a data set."""
    clip = np.asarray(clip)
    return [frame_number(x if x.shape[-1] == 3 else x.transpose(1, 2, 0)) for x in clip]


def error_of(clip, shown, **size):
    """Largest mean error of a frame against the pictures that were encoded."""
    pairs = zip(clip, shown, strict=True)
    return max(np.abs(np.asarray(x).astype(int) - frame(i, **size)).mean() for x, i in pairs)


# ---------------------------------------------------- formats --------------------------------------------------------
# name: (suffix, codec, mean error allowed, how it is written)
FORMATS = {
    "mp4 h264": ("mp4", "libx264", 3, {}), "mp4 h265": ("mp4", "libx265", 3, {}),
    "mp4 av1": ("mp4", "libsvtav1", 6, {}), "mp4 mpeg4": ("mp4", "mpeg4", 3, {}),
    "webm vp9": ("webm", "libvpx-vp9", 3, {}), "webm live": ("webm", "libvpx-vp9", 3, {"muxer": {"live": "1"}}),
    "mkv h264": ("mkv", "libx264", 3, {}), "mkv lossless": ("mkv", "ffv1", 0, {"pixels": "bgr0"}),
    "mov h264": ("mov", "libx264", 3, {}), "avi mpeg4": ("avi", "mpeg4", 3, {}), "avi h264": ("avi", "libx264", 3, {}),
    "ts h264": ("ts", "libx264", 3, {}), "gif": ("gif", "gif", 2, {"pixels": "rgb8"})}


def write_format(name, folder, frames, **more):
    suffix, codec, _, how = FORMATS[name]
    return write_video(folder / f"clip.{suffix}", frames, codec, **(how | more))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(format, n=20): its clip of n frames, 0 to n - 1, at 10 a second; not to be changed."""
    return functools.cache(lambda name, n=20: write_format(name, tmp_path_factory.mktemp("clip"), range(n)))


@pytest.fixture(scope="module")
def two_seconds(written):
    """x264 with its usual B frames."""
    return written("mp4 h264")


@pytest.mark.parametrize("name", FORMATS)
def test_all_fewer_and_more_frames_of_every_format_from_paths_and_bytes(name, written):
    path = written(name)
    clip = read_frames(path, 20)
    assert clip.shape == (20, 64, 96, 3) and clip.dtype == np.uint8
    assert numbers(clip) == list(range(20)) and error_of(clip, range(20)) <= FORMATS[name][2]
    for source in (str(path), path.read_bytes(), bytearray(path.read_bytes())):
        assert np.array_equal(read_frames(source, 20), clip)
    assert np.array_equal(common.read_frames(path, 2, 1.0, 1.2), clip[10:12])  # the name that users know
    few, many = read_frames(path, 6), read_frames(path, 45)
    assert np.array_equal(few, clip[[0, 4, 8, 11, 15, 19]])  # nearest to 0, 3.8, 7.6, ...
    shown = numbers(many)
    assert shown == sorted(shown) and set(shown) == set(range(20)) and np.array_equal(many, clip[shown])


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "mp4 h265"])  # which PyAV cannot write with one frame
def test_a_clip_of_one_frame(name, tmp_path):
    path = write_format(name, tmp_path, [9])
    somewhere = {"sampling": "random", "draws": [0.1, 0.9, 0.4]}
    for n, options in ((1, {}), (3, {}), (3, {"sampling": "middle"}), (3, somewhere), (3, {"start": 0, "end": 30})):
        assert numbers(read_frames(path, n, **options)) == [9] * n


# ---------------------------------------------------- which frames ---------------------------------------------------
@pytest.mark.parametrize("sampling, n, shown", [
    ("uniform", 1, [10]), ("uniform", 2, [0, 19]), ("uniform", 4, [0, 6, 13, 19]), ("uniform", 20, [*range(20)]),
    ("middle", 2, [5, 15]), ("middle", 4, [2, 7, 12, 17]), ("middle", 5, [2, 6, 10, 14, 18]), ("middle", 1, [10])])
def test_frames_spread_over_the_clip(sampling, n, shown, two_seconds):
    assert numbers(read_frames(two_seconds, n, sampling=sampling)) == shown


def test_random_frames_lie_where_their_draws_say(two_seconds):
    def read(draws):
        return numbers(read_frames(two_seconds, len(draws), sampling="random", draws=draws))

    assert read([0, 0.25, 0.5, 0.999]) == [0, 6, 12, 19] and read(np.float32([0.5] * 4)) == [2, 7, 12, 17]
    shown = [read(row) for row in common.uniforms(0, 0, range(12), 4)]
    assert all(5 * k <= i < 5 * (k + 1) for clip in shown for k, i in enumerate(clip))  # one in each quarter
    assert all(len({clip[k] for clip in shown}) == 5 for k in range(4))                 # and any of it


# ten seconds, so that a window is sought from the key frame before it; key frames 2 s apart, or only the first
WINDOWS = [(0.0, 1.0), (1.0, 2.0), (1.95, 2.5), (2.5, 4.0), (3.0, 5.0), (3.75, 4.2), (5.9, 6.5), (6.0, 6.5),
           (7.0, None), (None, 1.5), (9.0, 20.0), (9.85, None)]


@pytest.mark.parametrize("gop", [20, 250])
@pytest.mark.parametrize("name", [n for n in FORMATS if n != "mkv lossless"])
def test_windows_are_the_same_frames_as_in_the_whole_clip(name, gop, tmp_path):
    options = {"g": str(gop)} | ({"sc_threshold": "0"} if "h264" in name else {})
    path = write_format(name, tmp_path, range(100), options=options)
    whole = read_frames(path, 100)
    assert numbers(whole) == list(range(100))
    for start, end in WINDOWS:
        first = 0 if start is None else int(np.ceil(start * 10 - 1e-6))
        stop = 100 if end is None else min(100, int(np.ceil(end * 10 - 1e-6)))
        first = min(first, 99)  # a window between two frames shows the earlier one
        n = stop - first
        clip = read_frames(path, n, start, end)
        assert numbers(clip) == list(range(first, stop)), f"window {start} to {end}"
        assert np.array_equal(clip, whole[first:stop]), f"window {start} to {end}"
        assert numbers(read_frames(path, 1, start, end, sampling="middle")) == [(first + stop) // 2]


def test_a_late_window_is_read_from_the_key_frame_before_it(tmp_path):
    """What lies before is not decoded: here it is destroyed."""
    path = write_video(tmp_path / "a.mp4", range(100), options={"g": "20", "sc_threshold": "0"})
    intact, data = read_frames(path, 5, 6.0, 6.5), bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(video=0) if p.size]
    assert [k for k, p in enumerate(packets) if p.is_keyframe] == [0, 20, 40, 60, 80]
    for p in packets[:40]:
        data[p.pos:p.pos + p.size] = bytes(p.size)
    assert np.array_equal(read_frames(data, 5, 6.0, 6.5), intact)
    with pytest.raises((ValueError, OSError)):
        read_frames(data, 5, 1.0, 1.5)


@pytest.mark.parametrize("start", [1.02, 0.52])
def test_a_window_shorter_than_a_frame_shows_that_frame(start, two_seconds):
    for options in ({}, {"sampling": "middle"}, {"sampling": "random", "draws": [0.1, 0.5, 0.9]}):
        assert numbers(read_frames(two_seconds, 3, start, start + 0.05, **options)) == [int(start * 10)] * 3


@pytest.mark.parametrize("start, end", [(2.05, 3.0), (5.0, 6.0), (5.0, None), (1.5, 0.5)])
@pytest.mark.parametrize("name", ["mp4 h264", "webm vp9", "avi mpeg4", "gif"])
def test_a_window_with_no_frame_is_named(name, start, end, written):
    assert "frame" in refused(written(name), rf"{start:g}", start=start, end=end)


SLOWING = [*range(0, 10), *range(10, 100, 10)]  # in tenths of a second: ten frames in the first, then one a second


@pytest.mark.parametrize("name", ["mp4 h264", "mov h264", "webm vp9", "mkv h264", "gif", "avi mpeg4"])
def test_a_variable_frame_rate_is_sampled_evenly_in_time(name, tmp_path):
    path = write_format(name, tmp_path, range(19), at=SLOWING)
    assert numbers(read_frames(path, 10)) == [0, *range(10, 19)]  # a frame a second
    assert numbers(read_frames(path, 4, 2.5, 7.0)) == [12, 13, 14, 15]
    shown = numbers(read_frames(path, 5, sampling="middle"))
    assert all(abs(SLOWING[i] / 10 - (k + 0.5) * 2) <= 1.1 for k, i in enumerate(shown))


@pytest.mark.parametrize("name", ["mp4 h264", "mov h264", "mkv h264", "webm vp9", "gif"])
def test_a_last_frame_that_stays_belongs_to_the_clip(name, tmp_path):
    """A slide show, a screen recording: its last frame is on show for long, and nothing is missing."""
    options = {"bf": "0"} if "h264" in name else {}
    path = write_format(name, tmp_path, range(3), at=[0, 5, 10], hold=90, options=options)
    assert numbers(read_frames(path, 3)) == [0, 1, 2]
    assert numbers(read_frames(path, 2, 5.0, 8.0)) == [2, 2]
    assert numbers(read_frames(path, 10, sampling="middle")) == [1, *[2] * 9]


@pytest.mark.parametrize("name", ["mp4 h264", "mp4 mpeg4"])
def test_a_clip_cut_by_its_edit_list_starts_where_it_was_cut(name, written):
    """As `ffmpeg -ss 0.5 -c copy` leaves it: the first frames are there for the decoder only."""
    data = bytearray(written(name).read_bytes())
    at = data.index(b"elst") + 12  # after version, flags and the count of edits
    start = struct.unpack(">i", data[at + 4:at + 8])[0]
    with av.open(io.BytesIO(data)) as container:
        half_second = int(0.5 / container.streams.video[0].time_base)
    data[at:at + 8] = struct.pack(">Ii", 1500, start + half_second)
    assert numbers(read_frames(data, 15)) == list(range(5, 20))
    assert numbers(read_frames(data, 3, 0.5, 0.8)) == [10, 11, 12]


# ---------------------------------------------------- size, turn, transparency ---------------------------------------
@pytest.mark.parametrize("size, short, shape", [
    ((64, 96), 32, (32, 48)), ((64, 96), 64, (64, 96)), ((64, 96), 200, (64, 96)), ((64, 96), 0, (64, 96)),
    ((128, 96), 48, (64, 48)), ((64, 130), 40, (40, 81))])
def test_short_scales_the_short_side_down_only(size, short, shape, tmp_path):
    height, width = size
    path = write_video(tmp_path / "a.mp4", [frame(k, height, width) for k in (3, 77, 200)])
    clip = read_frames(path, 3, short=short)
    assert clip.shape == (3, *shape, 3) and numbers(clip) == [3, 77, 200]
    assert error_of(clip, (3, 77, 200), height=shape[0], width=shape[1]) < 10  # the edges are soft


@pytest.mark.parametrize("turn, matrix", [(1, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (3, (0, -1, 1, 0))])
def test_a_clip_is_turned_as_the_camera_says(turn, matrix, tmp_path):
    """matrix: (a, b, c, d) of the mp4's track header, x' = a x + c y, y' = b x + d y: the picture as stored goes `turn`
    quarters clockwise."""
    stored = [np.rot90(frame(k), turn) for k in range(8)]  # counterclockwise, to be turned back
    data = bytearray(write_video(tmp_path / "a.mp4", stored).read_bytes())
    at = data.index(b"tkhd") + 44  # version, times, track, length, layer, volume
    a, b, c, d = (65536 * v for v in matrix)
    assert struct.unpack(">9i", data[at:at + 36]) == (65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    data[at:at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip = read_frames(data, 8)
    assert clip.shape == (8, 64, 96, 3) and numbers(clip) == list(range(8)) and error_of(clip, range(8)) < 3
    assert read_frames(data, 2, short=32).shape == (2, 32, 48, 3)
    assert Clips(2)(bytes(data)).shape == (2, 3, 64, 96)


def test_transparency_of_a_gif_ends_on_white(tmp_path):
    pictures = []
    for k in range(4):
        pictures.append(Image.new("RGBA", (96, 64), (0, 0, 0, 0)))
        pictures[k].paste((219, 36, 85, 255), (20 * k, 10, 20 * k + 20, 40))
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=100, disposal=2)
    for k, x in enumerate(read_frames(tmp_path / "a.gif", 4)):
        want = np.full((64, 96, 3), 255)
        want[10:40, 20 * k:20 * k + 20] = (219, 36, 85)
        assert np.abs(x - want).max() <= 1


# ---------------------------------------------------- what is no video -----------------------------------------------
def write_sound(path, codec, pieces=20, shown=()):
    """Silence; shown: numbers of the frames of a film beside it, ten a second."""
    with av.open(str(path), "w") as out:
        sound = out.add_stream(codec, rate=44100)
        if shown:
            film = out.add_stream("libx264", rate=10, options=helpers.ENCODERS["libx264"])
            film.width, film.height, film.pix_fmt = 96, 64, "yuv420p"
        kind = "s16" if codec == "pcm_s16le" else "fltp"
        for k in range(pieces):
            silence = np.zeros((1, 1024), np.int16 if kind == "s16" else np.float32)
            piece = av.AudioFrame.from_ndarray(silence, format=kind, layout="mono")
            piece.sample_rate, piece.pts = 44100, 1024 * k
            out.mux(sound.encode(piece))
        for k, number in enumerate(shown):
            x = av.VideoFrame.from_ndarray(frame(number), format="rgb24")
            x.pts = k
            out.mux(film.encode(x))
        out.mux(sound.encode(None) + (film.encode(None) if shown else []))
    return path


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
def test_sound_before_the_picture_and_longer_is_passed_over(suffix, tmp_path):
    path = write_sound(tmp_path / f"a.{suffix}", "aac", 130, range(20))  # three seconds
    assert numbers(read_frames(path, 20)) == list(range(20))
    assert numbers(read_frames(path, 2, 1.0, 1.2)) == [10, 11]
    refused(path, "no frame between 2.5", start=2.5, end=2.8)  # there is sound, but no picture


def refused(source, match=None, **options):
    """The reason, on one line, why read_frames gives nothing."""
    with pytest.raises((ValueError, OSError, av.FFmpegError), match=match) as error:
        read_frames(source, 4, **options)
    assert str(error.value).strip() and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name, codec", [("a.wav", "pcm_s16le"), ("a.m4a", "aac")])
def test_sound_is_no_video(name, codec, tmp_path):
    refused(write_sound(tmp_path / name, codec), "no video stream")


def test_what_is_no_video_is_refused_with_the_reason(tmp_path):
    for data in (b"", TEXT, TEXT * 1000, bytes(5000)):
        (tmp_path / "a.mp4").write_bytes(data)
        refused(data)
        refused(tmp_path / "a.mp4")
    refused(tmp_path / "none.mp4", "No such file")
    refused(tmp_path)


@pytest.mark.parametrize("name", ["mp4 h264", "mp4 faststart", "mov h264"])
@pytest.mark.parametrize("part", [0.05, 0.2, 0.5, 0.8])
def test_a_cut_download_is_refused(name, part, written, tmp_path):
    if name == "mp4 faststart":
        path = write_format("mp4 h264", tmp_path, range(100), muxer={"movflags": "faststart"})
    else:
        path = written(name, 100)
    data = path.read_bytes()
    assert numbers(read_frames(data, 4)) == [0, 33, 66, 99]
    refused(data[:int(part * len(data))])


@pytest.mark.parametrize("lost", [1, 6, 20])
def test_frames_that_do_not_decode(lost, written):
    """The last packets say 'not coded', as encoders do that drop frames: the picture stays; but there must be one."""
    path = written("mp4 mpeg4")
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(video=0) if p.size]
    for p in packets[20 - lost:]:
        data[p.pos:p.pos + p.size] = b"\0\0\1\xb6\x50\x9f".ljust(p.size, b"\0")  # a P picture, vop_coded = 0
    if lost == 20:
        refused(data, "only 0 of 4 frames can be decoded")
    else:
        assert numbers(read_frames(data, 20)) == [*range(20 - lost), *[19 - lost] * lost]


@pytest.mark.parametrize("name", ["gif", "webm live", "webm vp9", "mkv h264", "avi mpeg4"])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.9])
def test_another_cut_file_gives_real_frames_or_none(name, part, written):
    data = written(name, 50).read_bytes()
    try:
        clip = read_frames(data[:int(part * len(data))], 6)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error)
        return
    shown = numbers(clip)
    assert shown == sorted(shown) and shown[-1] < 50 * part + 3
    real = [np.abs(x.astype(int) - frame(i)).mean() < 4 for x, i in zip(clip, shown)]
    assert sum(real) >= 5  # a gif's last frame may be cut itself


# ---------------------------------------------------- containers whose packets are not the frames --------------------
def plain_decode(path):
    """(numbers of all frames in the order of a plain decode, their times or None where these do not only grow)."""
    with av.open(str(path)) as container:
        frames = [(frame_number(f.to_ndarray(format="rgb24")), f.pts) for f in container.decode(video=0)]
    stamps = [pts for _, pts in frames]
    grow = all(a is not None and b is not None and b > a for a, b in itertools.pairwise(stamps))
    return [n for n, _ in frames], np.array(stamps, float) if grow else None


def nearest(numbers_of, at, n=8):
    """The frames nearest to n times from the first to the last."""
    return [numbers_of[np.abs(at - t).argmin()] for t in np.linspace(at[0], at[-1], n)]


def write_packed(path, n=41):
    """MPEG-4 as DivX wrote it: a P-frame and the B-frame before it in one packet, then an empty VOP in its place."""
    source = write_video(path.with_name("plain.avi"), range(n), codec="mpeg4", fps=25,
                         options={"bf": "1", "g": "100", "sc_threshold": "1000000000"})
    with av.open(str(source)) as container, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(container.streams.video[0])
        packets = [bytes(p) for p in container.demux(video=0) if p.size]
        kinds = [p[p.find(b"\0\0\1\xb6") + 4] >> 6 for p in packets]  # 0 I, 1 P, 2 B
        assert kinds == [0] + [1, 2] * (n // 2)  # I P B P B ..., in the order of decoding
        joined = [b"\0\0\1\xb2DivX503b1393p" + packets[0]]
        for k in range(1, n, 2):
            # a VOP that is not coded: P, no second begins, marker, time (5 bits), marker, coded 0, stuffing
            bits = f"0101{(k + 1) % 25:05b}100" + "1111"
            joined += [packets[k] + packets[k + 1], b"\0\0\1\xb6" + int(bits, 2).to_bytes(2, "big")]
        for k, content in enumerate(joined):
            packet = av.Packet(content)
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, k, k, k == 0
            out.mux(packet)
    return path


UNSURE = [("msmpeg4v2", "avi", {}), ("msmpeg4", "avi", {}), ("cinepak", "avi", {}), ("mpeg4", "avi", {"bf": "2"}),
          ("mpeg1video", "avi", {"bf": "2"}), ("libx264", "avi", {"bf": "2"}), ("mpeg1video", "mpg", {"bf": "2"}),
          ("mpeg2video", "mpg", {"bf": "2"}), ("mpeg2video", "ts", {"bf": "2"}), ("mpeg2video", "m2v", {})]


@pytest.mark.parametrize("codec, kind, options", UNSURE, ids=lambda v: v if isinstance(v, str) else "")
def test_frames_of_containers_that_tell_no_times(codec, kind, options, tmp_path):
    """As a plain decode of all frames has them: whole, with frames left out, from the middle, and two files joined."""
    how = {"codec": codec, "fps": 25, "options": options, "pixels": "rgb24" if codec == "cinepak" else "yuv420p"}
    path = write_video(tmp_path / f"whole.{kind}", range(60), **how)
    whole, _ = plain_decode(path)
    assert whole == list(range(60))
    assert numbers(read_frames(path, 8)) == nearest(whole, np.arange(60))
    window = numbers(read_frames(path, 4, 0.4, 1.0))
    assert window[0] in (10, 11) and window[-1] in (23, 24, 25) and window == sorted(set(window))
    if kind != "m2v":  # it has no times at all
        gaps = write_video(tmp_path / f"gaps.{kind}", range(60), at=[k + k // 7 * 3 for k in range(60)], **how)
        numbers_of, at = plain_decode(gaps)
        if at is not None:
            assert numbers(read_frames(gaps, 8)) == nearest(numbers_of, at)
    if kind in ("mpg", "ts"):
        content = path.read_bytes()
        size = {"mpg": 2048, "ts": 188}[kind]
        cut = tmp_path / f"cut.{kind}"
        cut.write_bytes(content[int(0.3 * len(content)) // size * size:])  # some packets have lost their key frame
        numbers_of, at = plain_decode(cut)
        assert len(numbers_of) < 60 and numbers(read_frames(cut, 8)) == nearest(numbers_of, at)
        twice = tmp_path / f"twice.{kind}"
        twice.write_bytes(content + content)  # the times begin anew
        numbers_of, _ = plain_decode(twice)
        assert numbers_of == [*range(60)] * 2
        assert numbers(read_frames(twice, 8)) == nearest(numbers_of, np.arange(120))


def test_packed_b_frames(tmp_path):
    path = write_packed(tmp_path / "packed.avi")
    numbers_of, _ = plain_decode(path)
    assert len(numbers_of) >= 40 and numbers_of == sorted(numbers_of)
    assert numbers(read_frames(path, 8)) == nearest(numbers_of, np.arange(len(numbers_of)))


def test_containers_with_sure_times_are_decoded_no_further_than_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(data_frames, "_count_frames", lambda *_: pytest.fail("counted"))
    for name, codec in (("a.mp4", "libx264"), ("a.mkv", "libx264"), ("a.webm", "libvpx-vp9")):
        assert len(read_frames(write_video(tmp_path / name, range(12), codec=codec), 4)) == 4


# ---------------------------------------------------- moving emoji ---------------------------------------------------
@pytest.fixture(scope="module")
def moving():
    return {s: common.load_data("moving-emoji", s) for s in SPLITS}


def small(split="train", **options):
    return common.load_data("moving-emoji", split, **({"frames": 2, "image_size": 8, "clips": [200, 30, 40]} | options))


# What a caption of moving emoji can be: every form has a verb, a noun and a colour.
FORMS = ("the {n} {v} on a {c} background", "against a {c} background {a} {n} {v}",
         "{a} {n} that {v}, with {c} all around", "on {c} ground one {n} {v}",
         "a {c} scene in which the {n} {v}", "one {n} {v}, the rest is {c}")


def facts(data, i):
    """{true caption of clip i: its (form, phrase, name)}."""
    verb, noun, colour = (data.column(c)[i] for c in ("verb", "noun", "colour"))
    phrases = list(moving_emoji.MOTIONS.values())[verb][0]
    return {form.format(n=n, v=v, c=list(moving_emoji.COLOURS)[colour], a="an" if n[0] in "aeiou" else "a"):
            (form, v, n) for form in FORMS for v in phrases for n in moving_emoji.sprites(32)[0][noun]}


def agree(data, i, captions=None):
    """Which of these captions (those of clip i) say what clip i shows: its verb, its noun and its colour."""
    true = facts(data, i)
    return [c in true for c in captions or data.captions(i)]


def question(data, i):
    return {c: data.column(c)[i] for c in ("question", "answer", "choices")}


def both(data):
    """[(verb, noun), ...] of all clips, as numbers."""
    return list(zip(data.column("verb").tolist(), data.column("noun").tolist(), strict=True))


def groups_are_facts(d):
    """Is a group what captions say, verb, noun and colour?"""
    said = list(zip(*(d.column(c).tolist() for c in ("verb", "noun", "colour")), strict=True))
    return len(set(said)) == len(set(d.groups.tolist())) == len(set(zip(said, d.groups.tolist(), strict=True)))


def drawn(d):
    return {x.numpy().tobytes() for x in d.pixels}


def test_moving_emoji_counts_and_shapes(moving):
    sizes = {s: (n, 4, 3, 32, 32) for s, n in zip(SPLITS, (2000, 300, 300))}
    assert {s: tuple(d.pixels.shape) for s, d in moving.items()} == sizes
    columns = ("verb", "noun", "colour", "label", "group", "noisy", "question", "question_type", "answer", "choices")
    for d in moving.values():
        assert d.pixels.dtype == torch.uint8 and len(d) == len(d.pixels) == len(d.groups)
        assert all(len(d.column(c)) == len(d) for c in columns)
        example = d[5]
        assert set(example) == {"pixels", "captions", "key", *columns} - {"group"}
        verb, noun = d.column("verb")[5], d.column("noun")[5]
        assert (example["label"], example["verb"], example["noun"]) == (verb, verb, noun)
        assert d.label_names == d.names("verb") == list(moving_emoji.MOTIONS)
        assert d.names("colour") == list(moving_emoji.COLOURS)
        assert d.names("noun") == [n[0] for n in moving_emoji.sprites(32)[0]] and len(d.names("noun")) == 120
        assert d.clip is None
    assert len({d.key(i) for d in moving.values() for i in range(len(d))}) == 2600


def test_moving_emoji_is_the_same_every_time_and_by_index(moving):
    whole, options = moving["val"], {"frames": 4, "image_size": 32, "clips": (2000, 300, 300)}
    again = moving_emoji.load("moving-emoji", "val", options)
    assert torch.equal(again.pixels, whole.pixels) and again.column("captions") == whole.column("captions")
    part = again.select(np.array([150, 7]), "val")
    assert torch.equal(part.read(0), whole.pixels[150]) and torch.equal(part.read(1), whole.pixels[7])
    assert question(part, 1) == question(whole, 7) and all(agree(part, 0))
    there = pickle.loads(pickle.dumps(part))  # as a spawned worker gets it
    assert torch.equal(there.read(1), whole.pixels[7]) and there.captions(1) == whole.captions(7)


def test_moving_emoji_moves_and_shows_what_its_captions_say(moving):
    for d in moving.values():
        still = {d.label_names[v] for v, x in zip(d.column("verb"), d.pixels.numpy()) if (x[0] == x).all()}
        assert still == {"stands still"} and len(drawn(d)) == len(d)
        assert all(all(agree(d, i)) for i in range(len(d)))
        unlike = [i for i in range(len(d) - 1) if d.groups[i] != d.groups[i + 1]]
        assert not any(any(agree(d, i, d.captions(i + 1))) for i in unlike)
        corners = d.pixels[:, 0, :, 0, 0].numpy()  # the drawing seldom reaches a corner
        ground = np.array(list(moving_emoji.COLOURS.values()))[d.column("colour")]
        assert (np.abs(corners.astype(int) - ground).max(1) <= 1).mean() > 0.97
    assert len({tuple(moving["test"].captions(i)) for i in range(300)}) == 300


def test_moving_emoji_captions_are_paraphrases(moving):
    """Three of a clip: the same facts in other forms and phrases, and another name where the noun has two."""
    assert all(f.count(word) == 1 for f in FORMS for word in ("{n}", "{v}", "{c}")) and len(set(FORMS)) == 6
    forms, names = Counter(), moving_emoji.sprites(32)[0]
    assert all(re.fullmatch("[a-z ]+", n) for of in names for n in of) and sum(len(of) > 1 for of in names) > 10
    for d in moving.values():
        for i in range(len(d)):
            true = facts(d, i)
            said = [true[c] for c in d.captions(i)]
            assert [len({x[k] for x in said}) for k in (0, 1)] == [3, 3]
            assert {x[2] for x in said} == set(names[d.column("noun")[i]][:3])
            forms.update(x[0] for x in said)
    assert len(forms) == 6 and min(forms.values()) > 0.14 * sum(forms.values())


def test_moving_emoji_holds_out_pairs_but_neither_verbs_nor_nouns(moving):
    pairs = {s: set(both(d)) for s, d in moving.items()}
    assert not pairs["train"] & (pairs["val"] | pairs["test"]) and not pairs["val"] & pairs["test"]
    for s in ("val", "test"):
        for part in (0, 1):  # verbs, nouns
            assert {p[part] for p in pairs[s]} <= {p[part] for p in pairs["train"]}
        assert len(pairs[s]) == 300  # every clip another pair: no two test clips share their words
    for part, share in ((0, 0.15), (1, 0.1)):  # and training has a long tail of either
        counts = sorted(Counter(pair[part] for pair in both(moving["train"])).values(), reverse=True)
        assert counts[0] > share * 2000 and counts[0] > 10 * counts[-1] and counts[0] > 1.5 * counts[1]
    assert {verb for verb, _ in pairs["train"]} == set(range(24))
    for d in moving.values():  # clips of one pair and colour are one group of positives
        assert groups_are_facts(d)
        assert d.note.endswith(f"{len(set(d.groups.tolist()))} descriptions; law of val and test: once")


def test_moving_emoji_thousands_of_distinct_test_clips():
    """Each pair in turn: a pair comes again in another colour, and only after all its colours in one it had."""
    train, test = (small(s, clips=[4000, 30, 2000], image_size=16) for s in ("train", "test"))
    assert len(drawn(test)) == len(test) == len(set(test.groups.tolist())) == 2000 and groups_are_facts(test)
    times = Counter(both(test))
    assert len(times) < 400 and max(times.values()) - min(times.values()) == 1 and max(times.values()) <= 6
    assert not set(times) & set(both(train)) and not drawn(test) & drawn(train)
    assert all(all(agree(test, i)) for i in range(0, 2000, 7)) and "2000 descriptions" in test.note
    more = small("test", clips=[500, 30, 2200])
    ids = Counter(more.groups.tolist())
    assert len(more) == 2200 and max(ids.values()) > 1 and groups_are_facts(more)
    assert f"{len(ids)} descriptions" in more.note
    positives = evaluation.retrieval.positives_table(more.groups, more.groups)
    i = int(np.argmax([ids[g] for g in more.groups.tolist()]))
    alike = [j for j in positives[i].tolist() if j >= 0]
    assert len(alike) == max(ids.values()) and i in alike and {both(more)[j] for j in alike} == {both(more)[i]}
    assert all(all(agree(more, i, more.captions(j))) for j in alike)


def test_moving_emoji_by_the_law_of_training():
    once, zipf = ({s: small(s, clips=[2000, 300, 2000], image_size=16, clip_law=law) for s in SPLITS}
                  for law in ("once", "zipf"))
    assert torch.equal(once["train"].pixels, zipf["train"].pixels)  # the training set is the same
    assert once["train"].column("captions") == zipf["train"].column("captions")
    train, test = (Counter(both(zipf[s])) for s in ("train", "test"))
    for s in ("val", "test"):
        d = zipf[s]
        assert groups_are_facts(d) and all(all(agree(d, i)) for i in range(0, len(d), 9))
        assert f"{len(set(d.groups.tolist()))} descriptions; law of val and test: zipf" in d.note
        assert len(drawn(d)) == len(d) and not drawn(d) & drawn(zipf["train"])
        assert not set(both(d)) & {*both(once["val"]), *both(once["test"])}
    assert not drawn(zipf["val"]) & drawn(zipf["test"])
    often = [pair for pair, _ in train.most_common(30)]  # a third of all clips, as often in test as in train
    shares = [sum(pairs[pair] for pair in often) / 2000 for pairs in (train, test)]
    assert shares[0] > 0.25 and abs(shares[1] - shares[0]) < 0.05
    seen = sum(n for pair, n in test.items() if pair in train) / 2000
    assert 0.7 < seen < 0.95  # the tail is drawn anew


def test_moving_emoji_tests_nothing_that_a_small_training_set_never_shows():
    train, val, test = (small(s, clips=[60, 80, 80]) for s in SPLITS)
    for d in (val, test):
        for c in ("verb", "noun"):
            assert set(d.column(c).tolist()) <= set(train.column(c).tolist())
        assert not set(d.groups.tolist()) & set(train.groups.tolist())
    with pytest.raises(UserError, match="--clips 2 2 2"):
        small(clips=[2, 2, 2])


def test_moving_emoji_questions(moving):
    places, kinds = Counter(), Counter()
    again = {s: moving_emoji.load("moving-emoji", s, {}) for s in ("val", "test")}
    asked = {"what is in the picture?": "noun", "what does it do?": "verb", "which colour is the background?": "colour"}
    for d in moving.values():
        for i in range(0, len(d), 3 if d.split == "train" else 1):
            q = question(d, i)
            kind = asked[q["question"]]
            assert q["answer"] == d.names(kind)[d.column(kind)[i]] and q["answer"] in q["choices"]
            assert len(set(q["choices"])) == len(q["choices"]) == 5 and d.column("question_type")[i] == kind
            assert d.split == "train" or question(again[d.split], i) == q
            places[q["choices"].index(q["answer"])] += 1
            kinds[kind] += 1
    assert len(kinds) == 3 and len(places) == 5
    assert min(places.values()) > 0.15 * sum(places.values())  # the place tells nothing


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_caption_noise_mismatches_the_announced_part_of_training(noise):
    clean, noisy = (small("train", clips=[1000, 40, 40], caption_noise=n) for n in (0.0, noise))
    right, wrong = np.array([sum(agree(noisy, i)) for i in range(1000)]), noisy.column("noisy")
    assert not clean.column("noisy").any() and wrong.sum() == round(1000 * noise)
    # not one caption fits by chance, as the most frequent pair is 6 % of the clips
    assert np.array_equal(right, np.where(wrong, 0, 3))
    assert torch.equal(clean.pixels, noisy.pixels) and np.array_equal(clean.column("verb"), noisy.column("verb"))
    dealt = [sorted(map(tuple, d.column("captions"))) for d in (clean, noisy)]
    assert dealt[0] == dealt[1]  # dealt anew, none lost
    for s in ("val", "test"):
        other = small(s, clips=[1000, 40, 40], caption_noise=noise)
        assert not other.column("noisy").any() and all(all(agree(other, i)) for i in range(40))
    assert f"{round(1000 * noise)} clips" in noisy.note
    rows = np.arange(0, 1000, 7)
    assert np.array_equal(noisy.select(rows, "train").column("noisy"), wrong[rows])


def test_moving_emoji_sizes_are_flags():
    assert {s: small(s).pixels.shape for s in SPLITS} == {
        s: (n, 2, 3, 8, 8) for s, n in zip(SPLITS, (200, 30, 40))}
    assert small(frames=5).pixels.shape == (200, 5, 3, 8, 8)
    plain, large = (small("test", clips=[300, 5, 2], image_size=size).pixels for size in (64, 640))
    assert plain.shape == (2, 2, 3, 64, 64)  # and the same scene at another size
    assert (torch.nn.functional.avg_pool2d(large.flatten(0, 1).float(), 10) - plain.flatten(0, 1)).abs().mean() < 4


def test_moving_emoji_unfolded():
    plain, unfolded = small(caption_noise=0.2), small(caption_noise=0.2, unfold_captions=True)
    assert [unfolded.captions(i) for i in range(len(unfolded))] == [[c] for i in range(200) for c in plain.captions(i)]
    for name in ("verb", "noun", "noisy", "group", "label"):
        assert np.array_equal(unfolded.column(name), np.repeat(plain.column(name), 3)), name
    assert np.array_equal(unfolded.groups, np.repeat(plain.groups, 3))
    assert torch.equal(unfolded.pixels, plain.pixels.repeat_interleave(3, 0))
    assert question(unfolded, 7) == question(plain, 2)


def test_emoji_scenes_show_their_class_and_hide_it_from_pixels_and_colours():
    sets = {s: common.load_data("emoji-scenes", s, scenes=[20, 2, 5]) for s in ("train", "val", "test")}
    assert [len(d) for d in sets.values()] == [1200, 120, 300]
    train, test = sets["train"], sets["test"]
    assert train.pixels.shape[1:] == (3, 32, 32) and np.bincount(test.labels).tolist() == [5] * 60
    names = train.label_names
    assert len({*names}) == 60 and all(train.captions(i)[0] == names[y] for i, y in enumerate(train.labels))
    again = common.load_data("emoji-scenes", "train", scenes=[20, 2, 5])
    assert torch.equal(train.pixels, again.pixels)
    corners = train.pixels[:, :, 0, 0].float()  # mostly background
    assert corners.std(0).min() > 50  # of 0..255, uniform: 74
    pixels, colours = (lambda d: d.pixels.flatten(1).float()), (lambda d: colour_histogram(d.pixels / 255))
    for features, most in ((pixels, 12), (colours, 20)):
        found = common.knn_accuracy(features(train), torch.as_tensor(train.labels),
                                    features(test), torch.as_tensor(test.labels))
        assert found["mean_per_class"] < most  # chance: 1.7


# ---------------------------------------------------- sets by name ---------------------------------------------------
SHOWN = [0, 2, 5, 7]  # of eight frames, four spread


def write_clips(folder, names, length=8, fps=10):
    """Clip k shows the numbers 8 k, 8 k + 1, ...; avi as mpeg4, webm as vp9, gif, others as h264."""
    for k, name in names.items():
        codec = {"avi": "mpeg4", "webm": "libvpx-vp9", "gif": "gif"}.get(name.rpartition(".")[2], "libx264")
        pixels = "rgb8" if codec == "gif" else "yuv420p"
        write_video(Path(folder) / name, range(8 * k, 8 * k + length), codec, fps, pixels=pixels)


def check(data, expected):
    """expected: (key, captions, number of its clip) in order."""
    assert len(data) == len(expected)
    for i, (key, captions, k) in enumerate(expected):
        example = data[i]
        assert (example["key"], example["captions"], data.captions(i)) == (key, captions, captions)
        assert example["pixels"].shape == (4, 3, 64, 96) and example["pixels"].dtype == torch.uint8
        assert numbers(example["pixels"]) == [8 * k + j for j in SHOWN]


def lines(prefix, n=3):
    return [f"{prefix}, sentence {k}" for k in range(n)]


def clip4clip_msrvtt(root):
    """The layout of CLIP4Clip's download; video3 is not there."""
    names = {0: "video0.mp4", 1: "video1.mp4", 2: "video2.mp4", 4: "video7010.mp4", 5: "video7011.mp4"}
    write_clips(root / "videos" / "all", names)
    notes = root / "msrvtt_data"
    write_rows(notes / "MSRVTT_train.9k.csv", ["video_id"], [[f"video{k}"] for k in (0, 1, 2, 3)])
    write_rows(notes / "MSRVTT_JSFUSION_test.csv", ["key", "vid_key", "video_id", "sentence"],
               [("ret0", "msr7010", "video7010", "a test, with a comma"), ("ret1", "msr7011", "video7011", "another"),
                ("ret2", "msr7012", "video7012", "gone")])
    order = ("video0", "video7010", "video1", "video2", "video3")
    sentences = [{"sen_id": 9 * k + j, "video_id": v, "caption": lines(v)[j]}
                 for j in range(3) for k, v in enumerate(order)]
    about = [{"video_id": "video0", "url": "", "split": "train", "category": 3, "start time": 1.0, "end time": 2.0,
              "id": 0}]
    content = {"info": {}, "sentences": sentences, "videos": about}
    (notes / "MSRVTT_data.json").write_text(json.dumps(content))
    return {"data_dir": str(notes), "video_dir": str(root / "videos"), "frames": 4}


def test_msrvtt_as_clip4clip_has_it(tmp_path):
    options = clip4clip_msrvtt(tmp_path)
    train = common.load_data("msrvtt", "train", **options)
    check(train, [(f"video{k}", lines(f"video{k}"), k) for k in range(3)])
    assert "1 videos (3 rows) are not in" in train.note and "video3" in train.note
    assert "3 examples, 9,000 expected" in train.note
    test = common.load_data("msrvtt", "test", **options)
    check(test, [("video7010", ["a test, with a comma"], 4), ("video7011", ["another"], 5)])
    assert test.split == "test" and "video7012" in test.note and not test.grouped
    with pytest.raises(UserError, match="msrvtt has no val split; it has: train, test"):
        common.load_data("msrvtt", "val", **options)


def test_msrvtt_as_rows_of_json(tmp_path):
    write_clips(tmp_path / "MSRVTT_Videos", {0: "video0.mp4", 1: "video1.mp4", 2: "video7010.mp4"})
    about = {"source": "MSR-VTT", "category": 3, "url": "", "start time": 5.0, "end time": 9.0, "id": 0}

    def row(v, captions):
        return {"video_id": v, "video": f"{v}.mp4", "caption": captions} | about

    train = [row("video0", lines("a", 20)), row("video1", lines("b", 20)), row("video5", lines("c"))]
    (tmp_path / "msrvtt_train_9k.json").write_text(json.dumps(train))
    (tmp_path / "msrvtt_test_1k.json").write_text(json.dumps([row("video7010", "one string")]))
    here, below = str(tmp_path), str(tmp_path / "MSRVTT_Videos")
    for options in ({"data_dir": here}, {"video_dir": here}, {"data_dir": here, "video_dir": below}):
        train = common.load_data("msrvtt", "train", frames=4, **options)
        # the clips are cut already: no window
        check(train, [("video0.mp4", lines("a", 20), 0), ("video1.mp4", lines("b", 20), 1)])
        assert "1 videos" in train.note and "video5" in train.note
        test = common.load_data("msrvtt", "test", frames=4, **options)
        check(test, [("video7010.mp4", ["one string"], 2)])
    unfolded = common.load_data("msrvtt", "train", frames=4, data_dir=str(tmp_path), unfold_captions=True)
    check(unfolded, [(f"video{k}.mp4", [c], k) for k, name in enumerate("ab") for c in lines(name, 20)])


def test_msvd(tmp_path):
    ids = {"train": ["-4wsuPCjDBc_5_15", "0lh_UWF9ZP4_62_69", "gone_1_2"], "val": ["abc_1_2"], "test": ["def.g_3_4"]}
    every = sum(ids.values(), [])
    write_clips(tmp_path / "YouTubeClips", dict(enumerate(f"{v}.avi" for v in every if v != "gone_1_2")))
    for split, names in ids.items():
        (tmp_path / f"{split}_list.txt").write_bytes(" \r\n".join(names).encode() + b"\r\n\r\n")
    words = {v: [["a", "man", str(k)] for k in range(5)] for v in every}
    (tmp_path / "raw-captions.pkl").write_bytes(pickle.dumps(words, protocol=2))
    said, place = [f"a man {k}" for k in range(5)], itertools.count()
    for split, names in ids.items():
        data = common.load_data("msvd", split, data_dir=str(tmp_path), frames=4)
        check(data, [(v, said, next(place)) for v in names if v != "gone_1_2"])
        assert data.grouped is True and ("gone_1_2" in data.note) == (split == "train")


def test_activitynet_joins_its_sentences_and_leaves_out_what_has_none(tmp_path):
    write_clips(tmp_path / "videos", {0: "v_aaaaaaaaaa1.mp4", 1: "bbbbbbbbbb2.mp4", 2: "v_cccccccccc3.webm"})

    def write(file, **sentences):
        notes = {v: {"duration": 8.0, "timestamps": [[0.0, 0.5], [0.4, 0.8]], "sentences": said}
                 for v, said in sentences.items()}
        (tmp_path / file).write_text(json.dumps(notes))

    write("train.json", v_aaaaaaaaaa1=[" It begins. ", " It ends."], v_cccccccccc3=[], v_bbbbbbbbbb2="one text",
          v_dddddddddd4=["gone"])
    write("val_1.json", v_cccccccccc3=["It is.", "It was."])
    write("val_2.json", v_aaaaaaaaaa1=["another"])
    (tmp_path / "train_ids.json").write_text(json.dumps(["v_aaaaaaaaaa1"]))
    options = {"data_dir": str(tmp_path), "video_dir": str(tmp_path / "videos"), "frames": 4}
    train = common.load_data("activitynet", "train", **options)
    check(train, [("v_aaaaaaaaaa1", ["It begins. It ends."], 0), ("v_bbbbbbbbbb2", ["one text"], 1)])
    assert "v_dddddddddd4" in train.note and "1 without a caption" in train.note
    test = common.load_data("activitynet", "test", **options)
    check(test, [("v_cccccccccc3", ["It is. It was."], 2)])


def test_didemo_joins_its_descriptions_and_keeps_to_thirty_seconds(tmp_path):
    write_video(tmp_path / "1@N02_1_a.mov", range(80), fps=2)  # 40 seconds
    write_video(tmp_path / "2@N02_2_b.mp4", range(100, 120), fps=2)
    said = [("1@N02_1_a.mov", "first a."), ("2@N02_2_b.m4v", "first b."), ("1@N02_1_a.mov", "then a."),
            ("3@N02_3_c.avi", "gone.")]
    rows = [{"video": v, "description": d, "times": [[0, 0]], "num_segments": 6, "annotation_id": k, "dl_link": ""}
            for k, (v, d) in enumerate(said)]
    (tmp_path / "train_data.json").write_text(json.dumps(rows))
    (tmp_path / "val_data.json").write_text(json.dumps(rows[1:2]))
    train = common.load_data("didemo", "train", data_dir=str(tmp_path), frames=60)
    assert [train.captions(i) for i in range(len(train))] == [["first a. then a."], ["first b."]]
    assert "3@N02_3_c.avi" in train.note
    assert numbers(train.read(0)) == list(range(60))  # 30 s at 2 a second
    assert set(numbers(train.read(1))) == set(range(100, 120))
    assert len(common.load_data("didemo", "val", data_dir=str(tmp_path), frames=4)) == 1


def test_didemo_in_the_hub_s_layout_is_the_same_set(tmp_path):
    write_video(tmp_path / "a.mov", range(80), fps=2)  # 40 seconds
    write_rows(tmp_path / "didemo_train.json", ["video", "caption"], [("a.mov", ["first a.", "then a."])])
    train = common.load_data("didemo", "train", data_dir=str(tmp_path), frames=60)
    assert train.captions(0) == ["first a. then a."] and numbers(train.read(0)) == list(range(60))
    with pytest.raises(EmptySplit, match="no annotation file of its val split"):
        common.load_data("didemo", "val", data_dir=str(tmp_path), frames=4)


def test_a_caption_that_is_there_twice_is_two_queries(tmp_path):
    """As in the authors' pickle: the papers count 27,763 captions of MSVD's test videos."""
    write_video(tmp_path / "v1.avi", range(4), codec="mpeg4")
    write_rows(tmp_path / "msvd_test.json", ["video", "caption"], [("v1.avi", ["a man plays", "a man plays", "music"])])
    test = common.load_data("msvd", "test", data_dir=str(tmp_path), frames=2)
    assert test.captions(0) == ["a man plays", "a man plays", "music"]


def youcook2_database():
    parts = {"yt1": ("training", [[2.0, 4.0], [6.0, 8.5]]), "yt2": ("validation", [[1.0, 3.0]]),
             "yt3": ("training", [[0.0, 1.0]])}
    database = {}
    for v, (subset, windows) in parts.items():
        steps = [{"id": k, "segment": w, "sentence": f"step {k} of {v}"} for k, w in enumerate(windows)]
        database[v] = {"subset": subset, "recipe_type": "101", "duration": 10.0, "video_url": "", "annotations": steps}
    return {"database": database}


def test_youcook2_reads_the_window_of_each_step(tmp_path):
    for name in ("raw_videos/training/101/yt1.mp4", "raw_videos/validation/101/yt2.webm"):
        write_video(tmp_path / name, range(100), "libvpx-vp9" if name.endswith("webm") else "libx264")
    (tmp_path / "annotations").mkdir()
    file = tmp_path / "annotations" / "youcookii_annotations_trainval.json"
    file.write_text(json.dumps(youcook2_database()))
    train = common.load_data("youcook2", "train", data_dir=str(tmp_path), frames=4)
    assert [train.captions(i) for i in range(len(train))] == [["step 0 of yt1"], ["step 1 of yt1"]]
    assert "yt3" in train.note
    assert numbers(train.read(0)) == [20, 26, 33, 39] and numbers(train.read(1)) == [60, 68, 76, 84]
    assert train.key(0) != train.key(1) and "yt1" in train.key(0) and "2-4 s" in train.key(0)
    test = common.load_data("youcook2", "test", data_dir=str(tmp_path), frames=4)
    assert test.captions(0) == ["step 0 of yt2"] and numbers(test.read(0)) == [10, 16, 23, 29]
    vast = common.load_data("youcook2", "test", data_dir=str(tmp_path), frames=4, frame_sampling="random")
    assert numbers(vast.read(0)) == [12, 17, 22, 27]  # the middles of four segments


def test_youcook2_as_the_hub_has_it(tmp_path):
    """Parquet rows beside a folder of videos that is itself called val."""
    write_video(tmp_path / "YouCookIIVideos" / "val" / "101" / "yt2.mp4", range(100))
    columns = ["id", "video_url", "recipe_type", "segment", "sentence", "video_path", "youtube_id"]
    rows = [(k, "", "101", [1.0 + 3 * k, 3.0 + 3 * k], f"step {k}", "YouCookIIVideos/val/101/yt2.mp4", "yt2")
            for k in range(2)]
    write_rows(tmp_path / "data" / "val-00000-of-00001.parquet", columns, rows)
    test = common.load_data("youcook2", "test", data_dir=str(tmp_path), frames=4)
    assert [test.captions(k) for k in range(len(test))] == [["step 0"], ["step 1"]]
    assert numbers(test.read(1)) == [40, 46, 53, 59]
    vast = common.load_data("youcook2", "test", data_dir=str(tmp_path), frames=4, frame_sampling="random")
    assert numbers(vast.read(1)) == [42, 47, 52, 57]  # the middles of four segments


def test_howto100m_is_one_example_a_line_of_speech(tmp_path):
    for k, name in enumerate(("aaa.mp4", "bbb.webm", "silent.mp4", "other.mp4")):
        codec = "libvpx-vp9" if name.endswith("webm") else "libx264"
        write_video(tmp_path / "videos" / name, range(100 * k % 200, 100 * k % 200 + 50), codec)
    speech = {"aaa": {"start": [0.0, 1.0, 3.0], "end": [0.4, 2.0, 3.4], "text": ["a zero", "a one", "a two"]},
              "gone": {"start": [0.0], "end": [1.0], "text": ["never"]},
              "silent": {"start": [], "end": [], "text": []},
              "bbb": {"start": [2.5, 4.0], "end": [2.9, 4.4], "text": ["b zero", "b one"]}}
    (tmp_path / "caption.json").write_text(json.dumps(speech))
    options = {"data_dir": str(tmp_path), "video_dir": str(tmp_path / "videos"), "frames": 4}
    data = common.load_data("howto100m", "train", **options)
    assert [data.captions(i) for i in range(len(data))] == [["a zero"], ["a one"], ["a two"], ["b zero"], ["b one"]]
    frames = [numbers(data.read(i)) for i in range(5)]
    assert frames == [[0, 1, 2, 3], [10, 13, 16, 19], [30, 31, 32, 33], [125, 126, 127, 128], [140, 141, 142, 143]]
    assert len({data.key(i) for i in range(5)}) == 5 and all("aaa" in data.key(i) for i in range(3))
    assert "1 videos (1 rows) are not in" in data.note and data[4]["captions"] == ["b one"]
    with pytest.raises(UserError, match="howto100m has no test split"):
        common.load_data("howto100m", "test", data_dir=str(tmp_path))


# ---------------------------------------------------- what can be wrong with them ------------------------------------
def complains(name, split, *words, **options):
    with pytest.raises(UserError) as error:
        common.load_data(name, split, **options)
    message = str(error.value)
    assert "\n" not in message and all(w in message for w in words), message
    return message


def test_a_set_without_its_videos_or_annotations(tmp_path):
    complains("msrvtt", "train", "msrvtt", "--video-dir", "--data-dir")
    options = clip4clip_msrvtt(tmp_path / "a")
    empty, nowhere = str(tmp_path / "empty"), str(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    complains("msrvtt", "train", "none of 4 videos", empty, "--video-dir", **options | {"video_dir": empty})
    complains("msrvtt", "train", nowhere, "--video-dir", **options | {"video_dir": nowhere})
    complains("msrvtt", "test", "MSRVTT_JSFUSION_test.csv", empty, "--data-dir", **options | {"data_dir": empty})
    speech = {"data_dir": empty, "video_dir": options["video_dir"]}
    complains("howto100m", "train", "caption.json", "--data-dir", **speech)
    lines_of = {"zzz": {"start": [0.0], "end": [1.0], "text": ["x"]}}
    (tmp_path / "empty" / "caption.json").write_text(json.dumps(lines_of))
    complains("howto100m", "train", "none of 1 videos", "--video-dir", **speech)
    os.remove(Path(options["data_dir"]) / "MSRVTT_data.json")
    complains("msrvtt", "train", "MSRVTT_data.json", options["data_dir"], **options)


DAMAGE = {"cut": b'{"database": {"yt1"', "numbers": b"[1, 2, 3]", "other": b'{"a": 1}', "list": b"[]", "nothing": b"{}",
          "bytes": b"\xff\xfe\x00damaged"}


@pytest.mark.parametrize("name, split, file", [
    ("msrvtt", "train", "MSRVTT_data.json"), ("activitynet", "train", "train.json"),
    ("didemo", "train", "train_data.json"), ("youcook2", "train", "youcookii_annotations_trainval.json"),
    ("howto100m", "train", "caption.json"), ("msrvtt", "test", "msrvtt_test_1k.json")])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_annotation_file_is_named(name, split, file, damage, tmp_path):
    write_clips(tmp_path, {0: "yt1.mp4"})
    (tmp_path / "MSRVTT_train.9k.csv").write_text("video_id\nvideo0\n")
    (tmp_path / file).write_bytes(DAMAGE[damage])
    complains(name, split, "" if damage in ("list", "nothing") else file, data_dir=str(tmp_path))  # no videos in these


class Attack:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_is_data_or_refused(tmp_path):
    write_clips(tmp_path, {0: "v0.avi"})
    (tmp_path / "train_list.txt").write_text("v0\n")
    complains("msvd", "train", "raw-captions.pkl", str(tmp_path), data_dir=str(tmp_path))
    bad = [pickle.dumps({"v0": Attack(tmp_path / "marker")}, protocol=p) for p in (0, 2, 4)]
    bad += [b"cos\nsystem\n(S'touch " + str(tmp_path / "marker").encode() + b"'\ntR.", b"cbuiltins\neval\n(S'1'\ntR."]
    for data in bad:
        (tmp_path / "raw-captions.pkl").write_bytes(data)
        asked = "eval" if b"eval" in data else "system"
        complains("msvd", "train", "raw-captions.pkl", asked, data_dir=str(tmp_path))
    for data in (pickle.dumps({"v0": [["a"]]})[:-5], b"", TEXT):
        (tmp_path / "raw-captions.pkl").write_bytes(data)
        complains("msvd", "train", "raw-captions.pkl", data_dir=str(tmp_path))
    assert not (tmp_path / "marker").exists()
    plain = {"a": [1, 2.5, "x", None, True, (1, 2), {3}, frozenset([4]), b"bytes"],
             "b": np.arange(6.0).reshape(2, 3), "c": np.float32(2), "d": np.array(["a", "bc"])}
    for protocol in range(6):
        (tmp_path / "plain.pkl").write_bytes(pickle.dumps(plain, protocol=protocol))
        back = Files(tmp_path).pickle("plain.pkl")
        assert back["a"] == plain["a"] and all(np.array_equal(back[k], plain[k]) for k in "bcd")


# ---------------------------------------------------- own data -------------------------------------------------------
OWN = [*range(19), 31]  # 18 of them train, videos/031.mp4 is held out as val, videos/013.mp4 as test


def numbered(folder, which=OWN, suffix="mp4"):
    """Clips 000, 001, ... of eight frames each; returns their file names."""
    write_clips(folder, {k: f"{k:03}.{suffix}" for k in which})
    return [f"{k:03}.{suffix}" for k in which]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 clips in videos/ and a csv of paths and two captions each beside it."""
    root = tmp_path_factory.mktemp("own")
    names = numbered(root / "videos")
    rows = [(f"videos/{x}", f"clip {k}, take {t}") for t in range(2) for k, x in zip(OWN, names)]
    write_rows(root / "captions.csv", ["video", "caption"], rows)
    return root


def takes(k):
    return [f"clip {k}, take {t}" for t in range(2)]


def examples(path, **options):
    """[(data set, index)] over the three splits."""
    sets = open_splits(path, **({"frames": 4} | options)).values()
    return [(data, i) for data in sets for i in range(len(data))]


def clip_by_caption(path, **options):
    """{first caption: number of the clip that is shown}."""
    return {d.captions(i)[0]: numbers(d.read(i))[0] // 8 for d, i in examples(path, **options)}


def write_layout(layout, videos, root):
    """The clips of a folder with their takes, as a table of paths or in another layout: (path, options)."""
    names = {k: f"{k:03}.mp4" for k in OWN}
    content = {k: (videos / name).read_bytes() for k, name in names.items()}
    if layout == "tars":
        samples = {f"{k:06}": {"mp4": content[k], "txt": "\n".join(takes(k)).encode()} for k in OWN}
        helpers.write_tar(root / "tars" / "0.tar", dict(list(samples.items())[:7]))
        helpers.write_tar(root / "tars" / "1.tar", dict(list(samples.items())[7:]))
        return root / "tars", {}
    if layout == "videos in parquet":
        import datasets
        features = datasets.Features(video=datasets.Video(), caption=datasets.List(datasets.Value("string")))
        table = {"video": [{"bytes": content[k], "path": names[k]} for k in OWN], "caption": [takes(k) for k in OWN]}
        (root / "data").mkdir()
        datasets.Dataset.from_dict(table, features=features).to_parquet(root / "data" / "train-00000-of-00001.parquet")
        return root / "data", {}
    if layout == "metadata.csv":
        shutil.copytree(videos, root / "clips")
        rows = [(names[k], c) for k in OWN for c in takes(k)]
        return write_rows(root / "clips" / layout, ["file_name", "caption"], rows).parent, {}
    rows = [(str(videos / names[k]), takes(k)[t]) for t in range(2) for k in OWN] + [("nowhere.mp4", "it is not there")]
    return write_rows(root / layout, ["video", "caption"], rows), {"video_dir": str(videos)}


@pytest.mark.parametrize("layout", [
    "a.csv", "a.jsonl", "a.json", "a.parquet", "metadata.csv", "tars", "videos in parquet"])
def test_videos_and_captions_in_every_layout(layout, folder, tmp_path):
    path, options = write_layout(layout, folder / "videos", tmp_path)
    found = {int(re.findall(r"\d+", Path(d.key(i)).name)[0]): (d, i) for d, i in examples(path, **options)}
    assert sorted(found) == OWN and len(examples(path, **options)) == len(OWN)
    for k, (data, i) in found.items():
        assert data.captions(i) == takes(k)
    for k in (0, 11, 31):
        data, i = found[k]
        assert numbers(data[i]["pixels"]) == [8 * k + j for j in SHOWN]
    assert ("nowhere.mp4" in found[0][0].note) == layout.startswith("a.")


def test_a_stream_of_videos(folder, tmp_path):
    path, _ = write_layout("tars", folder / "videos", tmp_path)
    stream = common.load_data(str(path), "train", frames=4, streaming=True)
    stream = dataclasses.replace(stream, buffer=3)
    batch = next(iter(common.Batches(stream, [PLAIN], TRANSFORM, 4, 0, 0, 1, CPU)))
    assert batch["views"][0].shape == (4, 4, 3, 32, 32)
    assert sorted(shown(batch)) == sorted((key, [8 * int(key) + j for j in SHOWN]) for key in batch["keys"])


@pytest.mark.parametrize("file", ["a.csv", "a.jsonl", "a.parquet"])
def test_windows_of_one_video_are_examples_of_their_own(file, tmp_path):
    write_video(tmp_path / "long.mp4", range(100))
    rows = [("long.mp4", k, k + 0.5, f"window {k}, take {t}") for t in range(2) for k in range(8)]
    path = str(write_rows(tmp_path / file, ["video", "start", "end", "caption"], rows))
    seen, every = [], examples(path, frames=5)
    assert len({d.key(i) for d, i in every}) == 8
    for data, i in every:
        k = int(data.captions(i)[0].split(",")[0].split()[1])
        assert data.captions(i) == [f"window {k}, take {t}" for t in range(2)]
        assert numbers(data.read(i)) == [10 * k + j for j in range(5)]
        seen.append(k)
    assert sorted(seen) == list(range(8))


def test_open_windows(tmp_path):
    write_video(tmp_path / "long.mp4", range(100))
    rows = [("long.mp4", None, None, "all"), ("long.mp4", 9.0, None, "the end"),
            ("long.mp4", None, 1.0, "the start"), ("long.mp4", 8.0, None, "nearly the end")]
    path = str(write_rows(tmp_path / "a.jsonl", ["video", "start", "end", "caption"], rows))
    every = examples(path, frames=2)
    shown = {d.captions(i)[0]: numbers(d.read(i)) for d, i in every}
    assert shown == {"all": [0, 99], "the end": [90, 99], "the start": [0, 9], "nearly the end": [80, 99]}
    assert len({d.key(i) for d, i in every}) == 4  # what bad_samples.txt names
    rows = [("long.mp4", "soon", "later", "x")]
    complains(str(write_rows(tmp_path / "b.csv", ["video", "start", "end", "caption"], rows)), "train", "b.csv", "soon")


@pytest.mark.parametrize("layout", ["a.csv", "tars", "videos in parquet"])
def test_captions_joined_and_unfolded(layout, folder, tmp_path):
    path, options = write_layout(layout, folder / "videos", tmp_path)
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


@pytest.mark.parametrize("splits", [False, True])
def test_class_folders_of_videos(splits, tmp_path):
    """Every class has its own 000.mp4, as exported clips often do."""
    where = {}
    for k in range(18):
        top, each = (f"{SPLITS[k // 3 % 3]}/", 9) if splits else ("", 3)
        where[k] = f"{top}{helpers.CLASSES[k % 3]}/{k // each:03}.{'avi' if k % 2 else 'mp4'}"
    write_clips(tmp_path, where)
    seen = []
    for split, data in open_splits(tmp_path, frames=4).items():
        assert data.label_names == helpers.CLASSES and data.has_captions is False
        for i in range(len(data)):
            example = data[i]
            k = numbers(example["pixels"])[0] // 8
            assert example["label"] == k % 3 and example["captions"] == [helpers.CLASSES[k % 3].replace("_", " ")]
            assert example["key"] == where[k]
            assert not splits or where[k].startswith(split)
            seen.append(k)
    assert sorted(seen) == list(range(18))


def test_video_dir_finds_videos_by_path_name_and_stem(tmp_path):
    """Folders in a name decide: another one's video is missing."""
    names = {0: "deep/er/000.mp4", 1: "001.webm", 2: "v_002.avi", 3: "x.003.mp4", 4: "004.gif"}
    write_clips(tmp_path / "all", names)
    (tmp_path / "all" / "no_video" / "000.mp4").mkdir(parents=True)  # a folder, as EPIC-KITCHENS in pieces has them
    rows = [("er/000", "a"), ("001.mp4", "b"), ("002", "c"), ("x.003", "d"), ("004", "e"), ("elsewhere/001", "f")]
    path = write_rows(tmp_path / "notes" / "a.csv", ["video", "caption"], rows)
    assert clip_by_caption(path, video_dir=str(tmp_path / "all")) == dict(zip("abcde", range(5)))


@pytest.mark.parametrize("suffix", [".mp4", ""])
def test_the_path_decides_between_videos_of_one_name(suffix, tmp_path):
    """P01/01 is not P02/01: neither with nor without a suffix, and not where it is missing."""
    write_clips(tmp_path, {k: f"P{k:02}/01.mp4" for k in range(5)})
    rows = [(f"P{k:02}/01{suffix}", f"{k}") for k in range(6)]
    path = write_rows(tmp_path / "a.csv", ["video", "caption"], rows)
    assert clip_by_caption(path, video_dir=str(tmp_path)) == {str(k): k for k in range(5)}
    assert "P05/01" in examples(path, video_dir=str(tmp_path))[0][0].note


@pytest.mark.parametrize("header, name", [(["row", "video_id", "caption"], "{:03}"),
                                          (["", "video", "caption"], "{:03}.mp4")])  # as pandas writes it by default
def test_ids_of_a_csv_are_text_and_an_index_column_may_have_no_name(header, name, tmp_path):
    """000 is a file name and NA a caption, not a number and nothing."""
    write_clips(tmp_path, {k: f"{k:03}.mp4" for k in range(4)})
    captions = {name.format(k): ["NA" if k == 3 else f"clip {k}"] for k in range(4)}
    write_rows(tmp_path / "a.csv", header, [(k, v, *c) for k, (v, c) in enumerate(captions.items())])
    assert {d.key(i): d.captions(i) for d, i in examples(tmp_path / "a.csv")} == captions


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


def test_a_replaced_video_is_decoded_anew(tmp_path):
    path, clips = write_video(tmp_path / "a.mp4", range(4)), Clips(4, cache=str(tmp_path / "cache"))
    before = numbers(clips(path))
    write_video(path, range(8, 12))
    os.utime(path, (0, os.path.getmtime(path) + 60))
    assert before == [0, 1, 2, 3] and numbers(clips(path)) == numbers(clips(path)) == [8, 9, 10, 11]
    assert len(list((tmp_path / "cache").rglob("*.jpg"))) == 2


def test_two_at_once_may_cache_one_clip(tmp_path):
    """With one process number, as in two containers: threads have one too."""
    path, clips = write_video(tmp_path / "a.mp4", range(4)), Clips(4, cache=str(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        found = [job.result() for job in [pool.submit(clips, path) for _ in range(8)]]
    assert all(torch.equal(x, found[0]) for x in found)
    assert [p.suffix for p in (tmp_path / "cache").rglob("*.*")] == [".jpg"]


def test_clips_of_one_name_and_clips_from_memory_have_their_own_cache(tmp_path):
    clips = Clips(4, cache=str(tmp_path / "cache"))
    paths = [write_video(tmp_path / d / "bytes.mp4", range(8 * k, 8 * k + 8)) for k, d in enumerate(("x", "y"))]
    for _ in range(2):
        for k, p in enumerate(paths):
            assert numbers(clips(p)) == numbers(clips(p.read_bytes())) == [8 * k + j for j in SHOWN]
    assert len(list((tmp_path / "cache").rglob("*.jpg"))) == 4


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


# ---------------------------------------------------- batches of clips -----------------------------------------------
TRANSFORM = common.EvalTransform(32, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
PLAIN = common.Augment(32, squash=True)  # nothing random, nothing cut off: its views can be read
VIEWS = [common.Augment(32, 0.4, 0.5), common.Augment(32, 0.2, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)]


def batches_of(data, augments=VIEWS, size=6, last=6, workers=0, folder=None, limit=1.0):
    return common.Batches(data, augments, TRANSFORM, size, 3, 0, last, CPU, workers, limit, folder)


def shown(batch, view=0):
    """(key's number, numbers of its frames) of every clip of a batch of PLAIN views."""
    x = batch["views"][view] * torch.tensor(TRANSFORM.std)[:, None, None] + torch.tensor(TRANSFORM.mean)[:, None, None]
    return [(key, numbers((clip * 255).round().numpy())) for key, clip in zip(batch["keys"], x)]


def same(a, b):
    words = (a["keys"], a["captions"], a["epoch"]) == (b["keys"], b["captions"], b["epoch"])
    views = all(torch.equal(x, y) for x, y in zip(a["views"], b["views"]))
    return words and views and np.array_equal(a["draws"], b["draws"])


def test_a_forked_process_reads_clips_after_its_parent(tmp_path):
    """As loader workers do after an evaluation without any: no thread that the fork left behind is waited for."""
    clip = str(write_video(tmp_path / "a.mp4", range(6)))
    whole = read_frames(clip, 4, short=32)
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(int(
        not np.array_equal(whole, read_frames(clip, 4, short=32)))))
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 0


@pytest.mark.parametrize("sampling", ["uniform", "random"])
def test_batches_of_clips_do_not_depend_on_workers(sampling, folder):
    data = common.load_data(str(folder / "captions.csv"), "train", frames=4, frame_sampling=sampling)
    alone, workers = (list(batches_of(data, workers=w)) for w in (0, 2))
    assert len(alone) == 6 and all(same(a, b) for a, b in zip(alone, workers, strict=True))
    assert [tuple(v.shape) for v in alone[0]["views"]] == [(6, 4, 3, 32, 32)] * 2
    assert not torch.equal(*alone[0]["views"])
    for epoch in (alone[:3], alone[3:]):
        assert sorted(k for b in epoch for k in b["keys"]) == sorted(data.column("key"))
    for b in alone:
        for k, c in zip(b["keys"], b["captions"], strict=True):
            assert c == [f"clip {int(k[7:10])}, take {t}" for t in range(2)]


def test_random_frames_change_with_the_epoch(folder):
    data = common.load_data(str(folder / "captions.csv"), "train", frames=4, frame_sampling="random")
    batches = list(batches_of(data, [PLAIN]))
    first, second = (dict(pair for b in batches[3 * e:3 * e + 3] for pair in shown(b)) for e in range(2))
    assert set(first) == set(second) and sum(first[k] != second[k] for k in first) > 12
    for key, clip in itertools.chain(first.items(), second.items()):
        assert all(2 * j <= i - 8 * int(key[7:10]) < 2 * (j + 1) for j, i in enumerate(clip))  # one of each quarter


def test_all_frames_of_a_clip_get_the_same_view(tmp_path):
    """Clips that stand still, without loss: their views must stand still too."""
    for k in range(10):
        write_video(tmp_path / f"{k:03}.mkv", [k + 1] * 4, "ffv1", pixels="bgr0")
    rows = [(f"{k:03}.mkv", f"{k}") for k in range(10)]
    path = str(write_rows(tmp_path / "a.csv", ["video", "caption"], rows))
    data = common.load_data(path, "train", frames=4)
    assert torch.equal(data.read(0), data.read(0)[:1].expand(4, -1, -1, -1))
    views, moved = {}, 0
    for batch in batches_of(data, VIEWS, 5, 4):
        for v, x in enumerate(batch["views"]):
            assert (x - x[:, :1]).abs().max() < 1e-4, v
            for key, clip in zip(batch["keys"], x):
                moved += (key, v) in views and not torch.equal(views[key, v], clip[0])
                views[key, v] = clip[0]
    assert moved == 20  # but every epoch shows another crop


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_clip_is_replaced_by_the_next_and_listed(workers, tmp_path):
    names = numbered(tmp_path, range(14))
    rows = [(x, f"clip {k}") for k, x in enumerate(names)]
    data = common.load_data(str(write_rows(tmp_path / "a.csv", ["video", "caption"], rows)), "train", frames=4)
    bad, after = data.key(4), data.key(5)
    whole = (tmp_path / bad).read_bytes()
    (tmp_path / bad).write_bytes(whole[:len(whole) * 6 // 10])
    batches = batches_of(data, [PLAIN], last=2, workers=workers, folder=tmp_path)
    clips = [pair for b in counted(batches) for pair in shown(b)]
    assert sorted(k for k, _ in clips) == sorted([*(k for k in data.column("key") if k != bad), after])
    assert all(clip == [8 * int(key[:3]) + j for j in SHOWN] for key, clip in clips)
    assert list(batches.bad) == [bad] and bad in (tmp_path / "bad_samples.txt").read_text()


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
    sets = [common.load_data(str(path), s, frames=4, feature_dir=folders) for s in SPLITS]
    assert sum(map(len, sets)) == 8 and data_clips.feature_shape(sets[0]) == [4, 5]
    with pytest.raises(UserError, match="^--image-encoder ssb: the data set has pixels"):
        data_clips.feature_shape(small("test"))
    for d in sets:
        for i in range(len(d)):
            k, x = int(d.key(i)[1]), d[i]["pixels"]
            assert x.shape == (4, 5) and x.dtype == torch.float32 and d.captions(i) == [f"clip {k}"]
            assert x[:, 0].tolist() == x[:, 2].tolist() == np.linspace(0, 9 + k, 4).round().tolist()
            assert x[:, 3].tolist() == x[:, 4].tolist() == [100, 101, 103, 104]
    only = common.load_data(str(path), "train", frames=20, feature_dir=folders[1:])
    assert only.read(0).shape == (20, 2)  # more rows than there are
    assert set(only.read(0)[:, 0].tolist()) == {100, 101, 102, 103, 104}


def test_a_vector_is_a_row(features):
    path, folders = features
    np.save(Path(folders[1]) / "v3.npy", np.float32([7, 8]))
    clip = data_clips.Features(folders, 4)
    x = clip("v3.mp4")
    assert x.shape == (4, 5) and x[:, 3:].tolist() == [[7, 8]] * 4


def test_features_have_no_windows(features):
    path, folders = features
    assert "whole files" not in common.load_data(str(path), "train", feature_dir=folders).note
    rows = [("v0.mp4", f"part {k}", k, k + 1) for k in range(4)]
    path = write_rows(path.with_name("b.csv"), ["video", "caption", "start", "end"], rows)
    with pytest.raises(UserError, match="several windows"):
        common.load_data(str(path), "train", feature_dir=folders)
    rows = [(f"v{k}.mp4", f"part {k}", k, k + 1) for k in range(4)]  # one each: the features are still of all of it
    path = write_rows(path.with_name("c.csv"), ["video", "caption", "start", "end", "split"],
                      [(*row, "train") for row in rows])
    assert "those of whole files, not of the windows" in common.load_data(str(path), "train", feature_dir=folders).note
    speech = {"v0": {"start": [0.0, 1.0], "end": [1.0, 2.0], "text": ["a", "b"]}}
    (path.parent / "caption.json").write_text(json.dumps(speech))
    complains("howto100m", "train", "several windows", data_dir=str(path.parent), feature_dir=folders)


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
    batches = batches_of(data, [PLAIN, PLAIN], 6, 1, folder=tmp_path)
    batch, = counted(batches)
    assert list(batches.bad) == [bad] and bad not in batch["keys"] and batch["keys"].count(data.key(3)) == 2
    assert [tuple(v.shape) for v in batch["views"]] == [(6, 4, 5)] * 2 and torch.isfinite(batch["views"][0]).all()


# ----------------------------------------------------- reviewed points ----------------------------------------------
def test_no_random_crop_is_the_evaluation_view():
    """crop_min 1: the centre square that evaluation sees (CLIP4Clip trains on it), or the whole picture where
    evaluation squashes it."""
    x = torch.arange(40 * 80, dtype=torch.float).view(1, 40, 80).expand(3, -1, -1).div(13).to(torch.uint8)
    u = common.uniforms(0, 0, [5], 16)
    for mode in ("crop", "squash"):
        view = common.Augment(40, squash=mode == "squash").crop_one(x, u[0])
        assert torch.equal(view, common.EvalTransform(40, (0,) * 3, (1,) * 3, mode).raw(x)), mode


def test_evaluation_batches_count_frames_and_few_open_files(tmp_path):
    """Clips in batches of eval_batch frames; the loader hands over one tensor a batch, whatever could not be read."""
    names = numbered(tmp_path, range(14))
    (tmp_path / names[3]).write_bytes(TEXT)
    rows = [(x, f"clip {k}") for k, x in enumerate(names)]
    path = str(write_rows(tmp_path / "a.csv", ["video", "caption"], rows))
    data, sizes = common.load_data(path, "train", frames=4), []

    class Model(torch.nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x.mean((1, 2, 3, 4))[:, None], None, x.mean((1, 3, 4))
    index, _, features, bad = evaluation.embed.encode_images(Model(), data, TRANSFORM, CPU, batch=16, workers=2)
    assert max(sizes) == 4 and len(index) == len(features) == len(data) - len(bad)
    assert (names[3] in bad) == (names[3] in data.column("key"))
