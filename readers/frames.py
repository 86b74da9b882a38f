"""Frames of a video by time: read_frames, through PyAV, decoding and converting only what it keeps."""

import contextlib
import functools
import io
import math
import os
import re
from typing import NamedTuple

import numpy as np
import torch

ALPHA = ("bgra", "rgba", "argb", "abgr", "pal8", "yuva420p")  # pixel formats that may be transparent
COUNTED = ("avi", "mpeg", "mpegts", "mpegvideo")  # containers whose packets are not the frames: see _count_frames
KEPT = 2**27  # bytes of decoded frames that are kept while they are counted; a larger clip is decoded twice


def read_frames(source, n, start=None, end=None, sampling="uniform", draws=None, short=0, long=0):
    """n frames of a clip in the order of time: (n, H, W, 3) uint8. Fewer are repeated; there is never an empty one.

    Args:
        source: path or bytes of mp4, webm, mkv, avi, gif, ... (whatever FFmpeg reads).
        start, end: window in seconds; None = the clip's own ends.
        sampling: times of the frames: 'uniform' from the first to the last frame; 'middle' of n equal segments;
            'random' inside each segment, by draws (n,) in 0..1; 'at' these seconds: draws (n,), ascending.
        short, long: scale to this short side, and to this long one at most, in pixels while decoding, when the clip
            is larger; 0 = never.
    Times count, not frame numbers, so a variable frame rate is sampled evenly. Two passes: over the packets, which
    tell the time of every frame without decoding it, then over the frames up to the last one wanted; only wanted ones
    become RGB. Of avi and MPEG streams the frames themselves are counted, since a packet may hold none or two of them.
    Raises: OSError when the file cannot be opened; ValueError when it holds no video, no frame in the window, or
        clearly less than the length it announces (a cut download; a gif announces none).
    """
    import av
    try:
        inside = isinstance(source, (bytes, bytearray))
        if not inside and os.path.exists(source) and not os.path.isfile(source):
            raise ValueError("not a regular file")  # a pipe would be waited for
        file = io.BytesIO(source) if inside else str(source)
        with _open(file) as container:
            cover = av.stream.Disposition.attached_pic  # the cover of an mp3 is no video
            stream = next((s for s in container.streams.video if not s.disposition & cover), None)
            if stream is None:
                raise ValueError("no video stream")
            if stream.codec_context is None:
                raise ValueError("no decoder for its video stream")
            stream.codec_context.thread_count = torch.get_num_threads()
            stream.thread_type = "AUTO"
            kept = None
            if container.format.name in COUNTED:
                times, kept = _count_frames(container, stream, end)
            else:
                times = _times(container, stream, start, end)
            places = _place_frames(times, n, start or 0.0, math.inf if end is None else end, sampling, draws)  # (n,)
            if kept:
                pictures = [_rgb(kept[k], short, long) for k in places]  # n of (H, W, 3)
            else:
                pictures = _decode_frames(container, stream, times, places, short, long)  # at most n of (H, W, 3)
    except OSError:
        raise
    except av.FFmpegError as error:
        raise ValueError(f"not a readable video ({error.strerror})") from error
    if len(pictures) < 0.9 * n:
        raise ValueError(f"only {len(pictures)} of {n} frames can be decoded")
    return np.stack(pictures + pictures[-1:] * (n - len(pictures)))  # (n, H, W, 3)


def _open(file):
    """av.open for reading; a title that is not UTF-8 is no fault (PyAV 19 never minds, those before are told so)."""
    import av
    return av.open(file, **({"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}))


@functools.lru_cache(maxsize=1024)
def duration(path):
    """Seconds of a video file, by its packets. Raises as read_frames."""
    with _open(path) as container:
        times = _times(container, container.streams.video[0], None, None)
        return times.seconds[-1] + times.tail


class _Times(NamedTuple):
    """When the frames of a stream show, as its packets tell."""
    seconds: np.ndarray  # (frames,) ascending, from the beginning of the clip
    pace: float  # mean length of a frame
    tail: float  # length of the last one, which may stay
    back: int | None  # where decoding begins, in units of the stream; None = at the beginning
    known: bool  # a decoded frame's own time tells which one it is; else they are counted


def _times(container, stream, start, end):
    """_Times of the frames that a window needs. Raises ValueError where there are none, or fewer than announced."""
    unit, origin, form = float(stream.time_base or 0), stream.start_time or 0, container.format.name
    indexed = "mp4" in form or "matroska" in form  # these know their key frames; elsewhere a seek lands anywhere
    late = indexed and start and start > 2 and unit
    back = int(start / unit) + origin if late else None  # from a key frame on: the rest need not be read
    packets = _packets(container, stream, back, end)
    if back and not (packets and packets[0][0] is not None and packets[0][0] <= back):
        back = None  # that key frame shows later than the window begins (open GOP)
        packets = _packets(container, stream, None, end)
    if not packets:
        raise ValueError("no frame can be read" + (f" after {start} s" if back else ""))
    timed = all(time is not None for time, _ in packets)
    seconds = np.arange(len(packets)) / float(stream.average_rate or 25)  # (frames,)
    if timed:
        seconds = np.sort(np.array([time for time, _ in packets], dtype=float) - origin) * unit  # (frames,)
    pace = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)
    tail = max(pace, max(packets)[1] * unit) if timed else pace
    if end is None:
        _refuse_cut(container, stream, seconds[-1] + tail)
    return _Times(seconds, pace, tail, back, timed)


def _refuse_cut(container, stream, there):
    """Raises ValueError where clearly fewer seconds are there than the file announces."""
    if there < 0.9 * _announced(container, stream) - 0.1:
        raise ValueError(f"truncated: {there:.1f} of {_announced(container, stream):.1f} s are there")


def _count_frames(container, stream, end):
    """(_Times, the frames) of what a plain decode gives, up to `end` seconds; None for the frames where they are more
    than KEPT bytes. The packets of these containers lie: one may hold two frames (packed B-frames) or none (a late
    start, a repeated frame), and times may begin anew in the middle, or be missing.

    A frame's time is its own where these only grow, else its number by the frame rate."""
    unit, rate, avi = float(stream.time_base or 0), float(stream.average_rate or 25), container.format.name == "avi"
    stamps, kept, size, told, first = [], [], 0, True, stream.start_time  # of avi a guess
    for frame in container.decode(stream):
        told = told and frame.pts is not None and (not stamps or frame.pts > stamps[-1])
        stamps.append(frame.pts)
        first = frame.pts if first is None or avi and len(stamps) == 1 else first
        size += sum(plane.buffer_size for plane in frame.planes)
        if kept is not None:
            kept.append(frame)
            kept = kept if size <= KEPT else None
        now = (len(stamps) - 1) / rate
        if end is not None and (min(now, (frame.pts - first) * unit) if told else now) > end:
            break
    if not stamps:
        raise ValueError("no frame can be read")
    seconds = np.arange(len(stamps)) / rate  # (frames,)
    if told and avi:  # two steps more than frames are the delay of B-frames; more are frames that were left out
        told = (stamps[-1] - first) * unit * rate > len(stamps) + 1.5
    if told:
        seconds = (np.array(stamps, dtype=float) - first) * unit  # (frames,)
    pace = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)
    if end is None:
        last = max([(pts - first) * unit for pts in stamps if pts is not None], default=0.0)
        _refuse_cut(container, stream, max(seconds[-1], last) + pace)
    return _Times(seconds, pace, pace, None, False), kept


def _packets(container, stream, back, end):
    """[(time, length)] in units of the stream, as stored, from the key frame before `back` (None = all) to `end` s."""
    out, origin, unit = [], stream.start_time or 0, float(stream.time_base or 0)
    with contextlib.suppress(OSError, ValueError):
        container.seek(back or 0, stream=stream if back else None)
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            out.append((packet.pts, packet.duration or 0))
            if end is not None and packet.dts is not None and (packet.dts - origin) * unit > end:
                break
    return out


def _announced(container, stream):
    """Seconds of video that the file says it holds; 0 where it says nothing."""
    if container.format.name == "avi":  # its duration is guessed from the size of the file
        return stream.frames / float(stream.average_rate) if stream.average_rate else 0.0
    if stream.duration:
        return float(stream.duration * stream.time_base)
    alone = "matroska" in container.format.name and len(container.streams) == 1  # else sound may be longer
    return _seconds(stream.metadata.get("DURATION", "")) or (alone and container.duration or 0) / 1e6


def _seconds(text):
    """'00:01:02.5' -> 62.5; 0 where it says nothing."""
    parts = re.fullmatch(r"(\d+):(\d+):([\d.]+)", text)
    return sum(float(x) * f for x, f in zip(parts.groups(), (3600, 60, 1), strict=True)) if parts else 0.0


def _place_frames(times, n, start, end, sampling, draws):
    """Numbers (n,) of the frames to keep, ascending. Raises ValueError where the window shows none."""
    seconds, last = times.seconds, times.seconds[-1]
    inside = np.flatnonzero((seconds >= start - 1e-6) & (seconds < end))
    if not len(inside):  # a window between two frames shows the earlier one
        inside = np.flatnonzero(seconds <= start)[-1:]
        if not len(inside) or start > last + times.tail or end < start:
            raise ValueError(f"no frame between {start:g} and {end:g} s; the clip ends at {last + times.tail:.1f} s")
    own = seconds[inside]  # (frames in the window,)
    if sampling == "uniform":
        at = np.linspace(own[0], own[-1], n) if n > 1 else own[[0, -1]].mean(keepdims=True)  # (n,)
        return inside[np.abs(own[None] - at[:, None]).argmin(1)]
    stop = own[-1] + times.pace
    if inside[-1] == len(seconds) - 1:
        stop = min(own[-1] + times.tail, max(end, stop))
    part = 0.5 if sampling == "middle" else np.asarray(draws)[:n]  # of each segment
    at = part if sampling == "at" else own[0] + (np.arange(n) + part) / n * (stop - own[0])  # (n,)
    return inside[np.searchsorted(own, at + 1e-6, side="right").clip(min=1) - 1]  # the frame on show at that time


def _decode_frames(container, stream, times, places, short, long):
    """The frames of these numbers, each (H, W, 3) uint8; fewer where the file ends early."""
    unit, origin, last = float(stream.time_base or 0), stream.start_time or 0, len(times.seconds) - 1
    pictures = []
    container.seek(times.back or 0, stream=stream if times.back else None)
    for k, frame in enumerate(container.decode(stream)):
        told = times.known and frame.pts is not None
        now = (frame.pts - origin) * unit if told else times.seconds[min(k, last)]
        due = int((times.seconds[places[len(pictures):]] <= now + 1e-6).sum())  # how often it is wanted
        if due:
            pictures += [_rgb(frame, short, long)] * due
        if len(pictures) == len(places):
            break
    return pictures


def _rgb(frame, short, long):
    """One decoded frame as (H, W, 3) uint8: scaled, transparency on white, turned as the camera says."""
    w, h = frame.width, frame.height
    if short and min(w, h) > short:
        w, h = (max(short, round(side * short / min(w, h))) for side in (w, h))
    if long and max(w, h) > long:
        w, h = (max(1, round(side * long / max(w, h))) for side in (w, h))
    size = {"width": w, "height": h, "threads": 1}  # PyAV 19 keeps its threads, and a forked loader waits for them
    if frame.format.name in ALPHA:
        x = frame.to_ndarray(format="rgba", **size).astype(np.int32)  # (H, W, 4)
        rgb, alpha = x[..., :3], x[..., 3:]
        x = ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)  # (H, W, 3)
    else:
        x = frame.to_ndarray(format="rgb24", **size)  # (H, W, 3)
    return np.rot90(x, frame.rotation // 90) if frame.rotation else x
