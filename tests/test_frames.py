"""Frames of videos by time: read_frames on every format; the clips are encoded here. How a clip
becomes pixels or features: the frame cache, and features in place of frames."""

import functools
import io
import itertools
import os
import resource
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from contrastive.data.clips import Clips, Features, feature_shape
from contrastive.data.frames import read_frames
from contrastive.core.processes import UserError

import av
import numpy as np
import pytest
import torch
from PIL import Image

from helpers import (
    TEXT, batches_of, complains, counted, encode, frame, frame_number, numbers, open_splits,
    write_rows, write_video)


def error_of(clip, shown, **size):
    """Largest mean error of a frame against the pictures that were encoded."""
    pairs = zip(clip, shown, strict=True)
    return max(np.abs(np.asarray(x).astype(int) - frame(i, **size)).mean() for x, i in pairs)


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


def write_format(name, folder, frames, **more):
    suffix, codec, _, how = FORMATS[name]
    return write_video(folder / f"clip.{suffix}", frames, codec, **(how | more))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(format, n=20): its clip of n frames, 0 to n - 1, at 10 a second; not to be
    changed."""
    return functools.cache(
        lambda name, n=20: write_format(name, tmp_path_factory.mktemp("clip"), range(n))
    )


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
    assert np.array_equal(read_frames(path.read_bytes(), 20), clip)
    # the name that users know
    assert np.array_equal(common.read_frames(str(path), 2, 1.0, 1.2), clip[10:12])
    few, many = read_frames(path, 6), read_frames(path, 45)
    assert np.array_equal(few, clip[[0, 4, 8, 11, 15, 19]])  # nearest to 0, 3.8, 7.6, ...
    shown = numbers(many)
    assert shown == sorted(shown)
    assert set(shown) == set(range(20))
    assert np.array_equal(many, clip[shown])


@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4", "gif"])
def test_a_clip_of_one_frame(name, tmp_path):
    path = write_format(name, tmp_path, [9])
    somewhere = {"sampling": "random", "draws": [0.1, 0.9, 0.4]}
    for n, options in (
        (1, {}),
        (3, {}),
        (3, {"sampling": "middle"}),
        (3, somewhere),
        (3, {"start": 0, "end": 30}),
    ):
        assert numbers(read_frames(path, n, **options)) == [9] * n


# ---- which frames ----
@pytest.mark.parametrize(
    "sampling, n, shown",
    [
        ("uniform", 1, [10]),
        ("uniform", 4, [0, 6, 13, 19]),
        ("middle", 4, [2, 7, 12, 17]),
        ("middle", 5, [2, 6, 10, 14, 18]),
        ("middle", 1, [10]),
    ],
)
def test_frames_spread_over_the_clip(sampling, n, shown, two_seconds):
    assert numbers(read_frames(two_seconds, n, sampling=sampling)) == shown


def test_random_frames_lie_where_their_draws_say(two_seconds):
    def read(draws):
        return numbers(read_frames(two_seconds, len(draws), sampling="random", draws=draws))

    assert read([0, 0.25, 0.5, 0.999]) == [0, 6, 12, 19]
    assert read(np.float32([0.5] * 4)) == [2, 7, 12, 17]
    shown = [read(row) for row in common.uniforms(0, 0, range(12), 4)]
    # one in each quarter
    assert all(5 * k <= i < 5 * (k + 1) for clip in shown for k, i in enumerate(clip))
    assert all(len({clip[k] for clip in shown}) == 5 for k in range(4))  # and any of it


# ten seconds, so that a window is sought from the key frame before it; key frames 2 s apart, or
# only the first
WINDOWS = [
    (0.0, 1.0),
    (1.95, 2.5),
    (3.75, 4.2),
    (5.9, 6.5),
    (6.0, 6.5),
    (7.0, None),
    (None, 1.5),
    (9.0, 20.0),
    (9.85, None),
]


@pytest.mark.parametrize(
    "name, gop",
    [
        *(
            (name, 20)
            for name in (
                "mp4 h264",
                "mp4 av1",
                "webm vp9",
                "mkv h264",
                "avi h264",
                "ts h264",
                "gif",
            )
        ),
        ("mp4 h264", 250),
    ],
)
def test_windows_are_the_same_frames_as_in_the_whole_clip(name, gop, tmp_path):
    options = {"g": str(gop)} | ({"sc_threshold": "0"} if "h264" in name else {})
    path = write_format(name, tmp_path, range(100), options=options)
    whole = read_frames(path, 100)
    assert numbers(whole) == list(range(100))
    for start, end in WINDOWS:
        first = 0 if start is None else int(np.ceil(start * 10 - 1e-6))
        stop = 100 if end is None else min(100, int(np.ceil(end * 10 - 1e-6)))
        first = min(first, 99)  # a window between two frames shows the earlier one
        clip = read_frames(path, stop - first, start, end)
        assert np.array_equal(clip, whole[first:stop]), f"window {start} to {end}"
        assert numbers(read_frames(path, 1, start, end, sampling="middle")) == [(first + stop) // 2]


@pytest.mark.parametrize("name", ["mp4 h264", "avi mpeg4"])
def test_a_window_with_no_frame_is_named_and_one_between_two_frames_shows_the_earlier(
    name, written
):
    for start, end in ((2.05, 3.0), (5.0, None), (1.5, 0.5)):
        refused(written(name), f"no frame between {start:g}", start=start, end=end)
    for options in ({}, {"sampling": "middle"}, {"sampling": "random", "draws": [0.1, 0.5, 0.9]}):
        assert numbers(read_frames(written(name), 3, 1.02, 1.07, **options)) == [10] * 3


# in tenths of a second: ten frames in the first, then one a second
SLOWING = [*range(0, 10), *range(10, 100, 10)]


@pytest.mark.parametrize("name", ["mp4 h264", "webm vp9", "gif", "avi mpeg4"])
def test_a_variable_frame_rate_is_sampled_evenly_in_time(name, tmp_path):
    path = write_format(name, tmp_path, range(19), at=SLOWING)
    assert numbers(read_frames(path, 10)) == [0, *range(10, 19)]  # a frame a second
    assert numbers(read_frames(path, 4, 2.5, 7.0)) == [12, 13, 14, 15]
    shown = numbers(read_frames(path, 5, sampling="middle"))
    assert all(abs(SLOWING[i] / 10 - (k + 0.5) * 2) <= 1.1 for k, i in enumerate(shown))


@pytest.mark.parametrize("name", ["mp4 h264", "gif"])
def test_a_last_frame_that_stays_belongs_to_the_clip(name, tmp_path):
    """A slide show, a screen recording: its last frame is on show for long, and nothing is
    missing."""
    options = {"bf": "0"} if "h264" in name else {}
    path = write_format(name, tmp_path, range(3), at=[0, 5, 10], hold=90, options=options)
    assert numbers(read_frames(path, 3)) == [0, 1, 2]
    assert numbers(read_frames(path, 2, 5.0, 8.0)) == [2, 2]
    assert numbers(read_frames(path, 10, sampling="middle")) == [1, *[2] * 9]


def test_a_clip_cut_by_its_edit_list_starts_where_it_was_cut(two_seconds):
    """As `ffmpeg -ss 0.5 -c copy` leaves it: the first frames are there for the decoder only."""
    data = bytearray(two_seconds.read_bytes())
    at = data.index(b"elst") + 12  # after version, flags and the count of edits
    start = struct.unpack(">i", data[at + 4 : at + 8])[0]
    with av.open(io.BytesIO(data)) as container:
        half_second = int(0.5 / container.streams.video[0].time_base)
    data[at : at + 8] = struct.pack(">Ii", 1500, start + half_second)
    assert numbers(read_frames(data, 15)) == list(range(5, 20))
    assert numbers(read_frames(data, 3, 0.5, 0.8)) == [10, 11, 12]


# ---- size, turn, transparency ----
@pytest.mark.parametrize(
    "size, short, shape",
    [
        ((64, 96), 32, (32, 48)),
        ((64, 96), 200, (64, 96)),
        ((128, 96), 48, (64, 48)),
        ((64, 130), 40, (40, 81)),
    ],
)
def test_short_scales_the_short_side_down_only(size, short, shape, tmp_path):
    height, width = size
    path = write_video(tmp_path / "a.mp4", [frame(k, height, width) for k in (3, 77, 200)])
    clip = read_frames(path, 3, short=short)
    assert clip.shape == (3, *shape, 3) and numbers(clip) == [3, 77, 200]
    assert error_of(clip, (3, 77, 200), height=shape[0], width=shape[1]) < 10  # the edges are soft


@pytest.mark.parametrize("turn, matrix", [(1, (0, 1, -1, 0)), (3, (0, -1, 1, 0))])
def test_a_clip_is_turned_as_the_camera_says(turn, matrix, tmp_path):
    """matrix: (a, b, c, d) of the mp4's track header, x' = a x + c y, y' = b x + d y: the picture
    as stored goes `turn` quarters clockwise."""
    stored = [np.rot90(frame(k), turn) for k in range(8)]  # counterclockwise, to be turned back
    data = bytearray(write_video(tmp_path / "a.mp4", stored).read_bytes())
    at = data.index(b"tkhd") + 44  # version, times, track, length, layer, volume
    a, b, c, d = (65536 * v for v in matrix)
    assert struct.unpack(">9i", data[at : at + 36]) == (65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip = read_frames(data, 8)
    assert clip.shape == (8, 64, 96, 3)
    assert numbers(clip) == list(range(8))
    assert error_of(clip, range(8)) < 3
    assert read_frames(data, 2, short=32).shape == (2, 32, 48, 3)
    assert Clips(2)(bytes(data)).shape == (2, 3, 64, 96)


def test_transparency_of_a_gif_ends_on_white(tmp_path):
    pictures = []
    for k in range(4):
        pictures.append(Image.new("RGBA", (96, 64), (0, 0, 0, 0)))
        pictures[k].paste((219, 36, 85, 255), (20 * k, 10, 20 * k + 20, 40))
    pictures[0].save(
        tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=100, disposal=2
    )
    for k, x in enumerate(read_frames(tmp_path / "a.gif", 4)):
        want = np.full((64, 96, 3), 255)
        want[10:40, 20 * k : 20 * k + 20] = (219, 36, 85)
        assert np.abs(x - want).max() <= 1


@pytest.mark.parametrize("codec, kind", [
    ("png", "rgba"), ("png", "rgba64be"), ("png", "ya8"), ("qtrle", "argb"),
    ("prores_ks", "yuva444p10le")])
def test_transparency_of_a_video_ends_on_white(codec, kind, tmp_path):
    clear = np.zeros((32, 32, 4), np.uint8)
    clear[:16, :, 3] = 255  # black above, clear below
    with av.open(str(tmp_path / "a.mov"), "w") as out:
        stream = out.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, kind
        for _ in range(3):
            picture = av.VideoFrame.from_ndarray(clear, format="rgba").reformat(format=kind)
            out.mux(stream.encode(picture))
        out.mux(stream.encode())
    for x in read_frames(tmp_path / "a.mov", 3):
        assert x[:14].max() < 3 and x[18:].min() > 252


# ---- what is no whole video ----
def refused(source, match, **options):
    """read_frames gives nothing, with the reason on one line."""
    with pytest.raises((ValueError, OSError, av.FFmpegError), match=match) as error:
        read_frames(source, 4, **options)
    assert "\n" not in str(error.value)


def box(kind, content):
    """A box of an mp4."""
    return (len(content) + 8).to_bytes(4, "big") + kind + content


@pytest.mark.parametrize("first", [True, False])
def test_cover_art_is_not_the_video(first, tmp_path):
    """The attached picture of an mp4, whose metadata stand before or behind the streams'."""
    data = write_video(tmp_path / "a.mp4", range(20)).read_bytes()
    picture = box(b"data", bytes([0, 0, 0, 13, 0, 0, 0, 0]) + encode(frame(99), "jpeg"))
    handler = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    metadata = box(b"meta", bytes(4) + handler + box(b"ilst", box(b"covr", picture)))
    metadata = box(b"udta", metadata)
    start = data.index(b"moov") - 4  # behind the frames, whose places stay
    moov = data[start + 8 :]
    moov = metadata + moov if first else moov + metadata
    (tmp_path / "b.mp4").write_bytes(data[:start] + box(b"moov", moov))
    with av.open(str(tmp_path / "b.mp4")) as container:
        assert len(container.streams.video) == 2
    assert numbers(read_frames(tmp_path / "b.mp4", 20)) == list(range(20))


def test_what_is_no_video_is_refused_with_the_reason(tmp_path):
    for data in (b"", TEXT * 1000):
        (tmp_path / "a.mp4").write_bytes(data)
        refused(data, ".")
        refused(tmp_path / "a.mp4", ".")
    refused(tmp_path / "none.mp4", "No such file")


@pytest.mark.parametrize("muxer", [None, {"movflags": "faststart"}])
def test_a_cut_download_is_refused(muxer, tmp_path):
    data = write_format("mp4 h264", tmp_path, range(100), muxer=muxer).read_bytes()
    assert numbers(read_frames(data, 4)) == [0, 33, 66, 99]
    for part in (0.05, 0.5, 0.8):
        refused(data[: int(part * len(data))], ".")


def test_frames_that_do_not_decode(tmp_path):
    """Packets that say 'not coded', as encoders do that drop frames: the picture stays; but there
    must be one."""
    path = write_video(tmp_path / "a.mp4", range(20), "mpeg4")
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(video=0) if p.size]
    for first, last in ((14, 20), (0, 14)):
        for p in packets[first:last]:
            # a P picture, vop_coded = 0
            data[p.pos : p.pos + p.size] = b"\0\0\1\xb6\x50\x9f".ljust(p.size, b"\0")
        if first:
            assert numbers(read_frames(data, 20)) == [*range(14), *[13] * 6]
    refused(data, "only 0 of 4 frames can be decoded")


# ---- containers whose packets are not the frames ----
def plain_decode(path):
    """(numbers of all frames in the order of a plain decode, their times or None where these do not
    only grow)."""
    with av.open(str(path)) as container:
        frames = [
            (frame_number(f.to_ndarray(format="rgb24")), f.pts) for f in container.decode(video=0)
        ]
    stamps = [pts for _, pts in frames]
    grow = all(a is not None and b is not None and b > a for a, b in itertools.pairwise(stamps))
    return [n for n, _ in frames], np.array(stamps, float) if grow else None


def nearest(numbers_of, at, n=8):
    """The frames nearest to n times from the first to the last."""
    return [numbers_of[np.abs(at - t).argmin()] for t in np.linspace(at[0], at[-1], n)]


@pytest.mark.parametrize(
    "codec, kind, options",
    [
        ("msmpeg4v2", "avi", {}),
        ("mpeg4", "avi", {"bf": "2"}),
        ("libx264", "avi", {"bf": "2"}),
        ("mpeg2video", "mpg", {"bf": "2"}),
        ("mpeg2video", "ts", {"bf": "2"}),
        ("mpeg2video", "m2v", {}),
    ],
)
def test_frames_of_containers_that_tell_no_times(codec, kind, options, tmp_path):
    """As a plain decode of all frames has them: whole, with frames left out, from the middle, and
    two files joined."""
    how = {"codec": codec, "fps": 25, "options": options}
    path = write_video(tmp_path / f"whole.{kind}", range(60), **how)
    whole, _ = plain_decode(path)
    assert whole == list(range(60))
    assert numbers(read_frames(path, 8)) == nearest(whole, np.arange(60))
    window = numbers(read_frames(path, 4, 0.4, 1.0))
    assert window[0] in (10, 11) and window[-1] in (23, 24, 25) and window == sorted(set(window))
    if kind != "m2v":  # it has no times at all
        gaps = write_video(
            tmp_path / f"gaps.{kind}", range(60), at=[k + k // 7 * 3 for k in range(60)], **how
        )
        numbers_of, at = plain_decode(gaps)
        assert at is None or numbers(read_frames(gaps, 8)) == nearest(numbers_of, at)
    if kind in ("mpg", "ts"):
        content, size = path.read_bytes(), {"mpg": 2048, "ts": 188}[kind]
        # some packets have lost their key frame
        cut = content[int(0.3 * len(content)) // size * size :]
        for name, part in (
            ("cut", cut),
            ("twice", content + content),
        ):  # twice: the times begin anew
            file = tmp_path / f"{name}.{kind}"
            file.write_bytes(part)
            numbers_of, at = plain_decode(file)
            assert numbers_of == [*range(60)] * 2 if name == "twice" else len(numbers_of) < 60
            assert numbers(read_frames(file, 8)) == nearest(
                numbers_of, np.arange(120) if name == "twice" else at
            )


# ---- frame cache ----
def test_the_frame_cache_needs_the_video_once(tmp_path):
    path, cache = write_video(tmp_path / "videos" / "a.mp4", range(20)), tmp_path / "cache"
    plain, cached = (Clips(4, "middle", 48, cache=c) for c in ("", str(cache)))
    decoded, first, window = plain(path), cached(path), cached(path, 0.5, 1.5)
    assert numbers(first) == numbers(decoded) != numbers(window)
    assert first.shape == decoded.shape == (4, 3, 48, 72) and first.dtype == torch.uint8
    assert (first.int() - decoded.int()).abs().float().mean() < 2
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    path.write_bytes(bytes(size))
    os.utime(path, ns=(changed, changed))  # it is not read again
    assert torch.equal(cached(path), first) and torch.equal(cached(path, 0.5, 1.5), window)
    for other in (
        Clips(5, "middle", 48, str(cache)),
        Clips(4, "middle", 40, str(cache)),
        Clips(4, cache=str(cache)),
    ):
        with pytest.raises((OSError, ValueError)):
            other(path)  # other frames are not in it
    # nothing half written
    assert [f.suffix for f in cache.rglob("*") if f.is_file()] == [".jpg"] * 2


def test_a_clip_in_the_cache_is_of_this_path_this_time_or_these_bytes(tmp_path):
    clips = Clips(4, cache=str(tmp_path / "cache"))
    paths = [
        write_video(tmp_path / d / "bytes.mp4", range(8 * k, 8 * k + 4))
        for k, d in enumerate(("x", "y"))
    ]
    for _ in range(2):
        for k, p in enumerate(paths):
            assert (
                numbers(clips(p)) == numbers(clips(p.read_bytes())) == [8 * k + j for j in range(4)]
            )
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

    # of each quarter's six frames 1, 3 and 5 are kept
    assert read([0, 0.4, 0.7, 0.999]) == [1, 9, 17, 23]
    evaluated = clips(path)  # without draws: what it sees without a cache, in a file of its own
    assert numbers(evaluated) == numbers(Clips(4, "random")(path)) == numbers(Clips(4)(path))
    assert read([0.5] * 4) == [3, 9, 15, 21] and read([0.999] * 4) == [5, 11, 17, 23]
    assert read([0] * 4) == [1, 7, 13, 19]
    assert torch.equal(clips(path), evaluated)
    assert len(list((tmp_path / "cache").rglob("*.jpg"))) == 2


def test_a_full_disk_leaves_clips_out_of_the_cache(tmp_path, capfd):
    path = write_video(tmp_path / "a.mp4", range(4))
    clips = Clips(4, cache=str(tmp_path / "cache"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        clip = clips(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert numbers(clip) == [0, 1, 2, 3]
    assert "WARNING: --frame-cache" in capfd.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.*"))


# ---- features ----
@pytest.fixture
def features(tmp_path):
    """Two kinds of features of eight videos, of other lengths and widths; row t of the first kind
    is t, of the second 100 + t."""
    for k in range(8):
        for kind, (length, width, base) in {
            "motion": (10 + k, 3, 0),
            "appearance": (5, 2, 100),
        }.items():
            (tmp_path / kind).mkdir(exist_ok=True)
            rows = np.repeat(base + np.arange(length)[:, None], width, 1)  # (length, width)
            np.save(tmp_path / kind / f"v{k}.npy", rows.astype(np.float64 if k % 2 else np.float16))
    path = write_rows(
        tmp_path / "a.csv", ["video", "caption"], [(f"v{k}.mp4", f"clip {k}") for k in range(8)]
    )
    return path, [str(tmp_path / kind) for kind in ("motion", "appearance")]


def test_features_of_two_folders_stand_side_by_side(features):
    path, folders = features
    sets = [*open_splits(path, frames=4, feature_dir=folders).values()]
    assert sum(map(len, sets)) == 8
    assert feature_shape(sets[0]) == [4, 5]
    assert "whole files" not in sets[0].note
    with pytest.raises(UserError, match="^--image-encoder ssb: the data set has pixels"):
        feature_shape(common.load_data("emoji", "val"))
    for d in sets:
        for i in range(len(d)):
            k, x = int(d.key(i)[1]), d[i]["pixels"]
            assert x.shape == (4, 5) and x.dtype == torch.float32 and d.captions(i) == [f"clip {k}"]
            assert x[:, 0].tolist() == x[:, 2].tolist() == np.linspace(0, 9 + k, 4).round().tolist()
            assert x[:, 3].tolist() == x[:, 4].tolist() == [100, 101, 103, 104]
    only = common.load_data(str(path), "train", frames=20, feature_dir=folders[1:]).read(0)
    assert only.shape == (20, 2)
    assert set(only[:, 0].tolist()) == {100, 101, 102, 103, 104}  # more than there are
    np.save(Path(folders[1]) / "v3.npy", np.float32([7, 8]))  # a vector is a row
    assert Features(folders, 4)("v3.mp4")[:, 3:].tolist() == [[7, 8]] * 4


def test_features_have_no_windows(features, tmp_path):
    columns, folders = ["video", "caption", "start", "end", "split"], features[1]
    path = write_rows(
        tmp_path / "b.csv", columns, [("v0.mp4", f"part {k}", k, k + 1, "train") for k in range(4)]
    )
    complains(path, "train", "several windows", feature_dir=folders)
    path = write_rows(
        tmp_path / "c.csv",
        columns,
        [(f"v{k}.mp4", f"part {k}", k, k + 1, "train") for k in range(4)],
    )
    note = common.load_data(str(path), "train", feature_dir=folders).note
    # one each: the features are still of all of it
    assert "those of whole files, not of the windows" in note


BROKEN = {
    "nan": np.full((5, 2), np.nan),
    "3-d": np.zeros((5, 2, 2)),
    "objects": np.array([{"a": 1}], dtype=object),
}


@pytest.mark.parametrize("kind", [*BROKEN, "missing"])
def test_unusable_features_are_a_bad_sample(kind, features):
    path, folders = features
    data = common.load_data(str(path), "train", frames=4, feature_dir=folders)
    bad = data.key(2)
    file = Path(folders[1]) / f"{bad[:2]}.npy"
    file.unlink()
    if kind != "missing":
        np.save(file, BROKEN[kind], allow_pickle=True)
    batches = batches_of(data, [common.Augment(32)] * 2, 6, last=1)
    (batch,) = counted(batches)
    assert list(batches.bad) == [bad]
    assert bad not in batch["keys"]
    assert batch["keys"].count(data.key(3)) == 2
    assert [tuple(v.shape) for v in batch["views"]] == [(6, 4, 5)] * 2
    assert torch.isfinite(batch["views"][0]).all()
