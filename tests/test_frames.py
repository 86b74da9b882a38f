"""Frames of videos by time: read_frames on every format; the clips are encoded here."""

import functools
import io
import itertools
import struct

import common
from contrastive.data.clips import Clips
from contrastive.data.frames import read_frames

import av
import numpy as np
import pytest
from PIL import Image

from helpers import TEXT, frame, frame_number, numbers, write_video


def error_of(clip, shown, **size):
    """Largest mean error of a frame against the pictures that were encoded."""
    pairs = zip(clip, shown, strict=True)
    return max(np.abs(np.asarray(x).astype(int) - frame(i, **size)).mean() for x, i in pairs)

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
@pytest.mark.parametrize("name", ["mp4 h264", "mp4 av1", "webm vp9", "mkv h264", "avi h264", "ts h264", "gif"])
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


@pytest.mark.parametrize("name", ["mp4 h264", "webm vp9", "avi mpeg4", "gif"])
def test_a_window_with_no_frame_is_named_and_one_between_two_frames_shows_the_earlier(name, written):
    for start, end in ((2.05, 3.0), (5.0, None), (1.5, 0.5)):
        assert "frame" in refused(written(name), rf"{start:g}", start=start, end=end)
    for options in ({}, {"sampling": "middle"}, {"sampling": "random", "draws": [0.1, 0.5, 0.9]}):
        assert numbers(read_frames(written(name), 3, 1.02, 1.07, **options)) == [10] * 3


SLOWING = [*range(0, 10), *range(10, 100, 10)]  # in tenths of a second: ten frames in the first, then one a second


@pytest.mark.parametrize("name", ["mp4 h264", "webm vp9", "mkv h264", "gif", "avi mpeg4"])
def test_a_variable_frame_rate_is_sampled_evenly_in_time(name, tmp_path):
    path = write_format(name, tmp_path, range(19), at=SLOWING)
    assert numbers(read_frames(path, 10)) == [0, *range(10, 19)]  # a frame a second
    assert numbers(read_frames(path, 4, 2.5, 7.0)) == [12, 13, 14, 15]
    shown = numbers(read_frames(path, 5, sampling="middle"))
    assert all(abs(SLOWING[i] / 10 - (k + 0.5) * 2) <= 1.1 for k, i in enumerate(shown))


@pytest.mark.parametrize("name", ["mp4 h264", "mkv h264", "webm vp9", "gif"])
def test_a_last_frame_that_stays_belongs_to_the_clip(name, tmp_path):
    """A slide show, a screen recording: its last frame is on show for long, and nothing is missing."""
    options = {"bf": "0"} if "h264" in name else {}
    path = write_format(name, tmp_path, range(3), at=[0, 5, 10], hold=90, options=options)
    assert numbers(read_frames(path, 3)) == [0, 1, 2]
    assert numbers(read_frames(path, 2, 5.0, 8.0)) == [2, 2]
    assert numbers(read_frames(path, 10, sampling="middle")) == [1, *[2] * 9]


def test_a_clip_cut_by_its_edit_list_starts_where_it_was_cut(two_seconds):
    """As `ffmpeg -ss 0.5 -c copy` leaves it: the first frames are there for the decoder only."""
    data = bytearray(two_seconds.read_bytes())
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


def write_sound(path):
    """A second of silence."""
    with av.open(str(path), "w") as out:
        sound = out.add_stream("aac", rate=44100)
        piece = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.float32), format="fltp", layout="mono")
        piece.sample_rate = 44100
        out.mux(sound.encode(piece) + sound.encode(None))
    return path


def refused(source, match=None, **options):
    """The reason, on one line, why read_frames gives nothing."""
    with pytest.raises((ValueError, OSError, av.FFmpegError), match=match) as error:
        read_frames(source, 4, **options)
    assert str(error.value).strip() and "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_video_is_refused_with_the_reason(tmp_path):
    refused(write_sound(tmp_path / "a.m4a"), "no video stream")
    for data in (b"", TEXT, TEXT * 1000, bytes(5000)):
        (tmp_path / "a.mp4").write_bytes(data)
        refused(data)
        refused(tmp_path / "a.mp4")
    refused(tmp_path / "none.mp4", "No such file")


@pytest.mark.parametrize("muxer", [None, {"movflags": "faststart"}])
def test_a_cut_download_is_refused(muxer, tmp_path):
    data = write_format("mp4 h264", tmp_path, range(100), muxer=muxer).read_bytes()
    assert numbers(read_frames(data, 4)) == [0, 33, 66, 99]
    for part in (0.05, 0.2, 0.5, 0.8):
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


@pytest.mark.parametrize("name", ["gif", "webm live", "mkv h264", "avi mpeg4"])
@pytest.mark.parametrize("part", [0.02, 0.6])
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


UNSURE = [("msmpeg4v2", "avi", {}), ("cinepak", "avi", {}), ("mpeg4", "avi", {"bf": "2"}),
          ("libx264", "avi", {"bf": "2"}), ("mpeg2video", "mpg", {"bf": "2"}),
          ("mpeg2video", "ts", {"bf": "2"}), ("mpeg2video", "m2v", {})]


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
