"""Videos: frames by time, the frame cache, features in place of frames, and where the videos of annotations lie.

The `clip` of a data set is callable: clip(source, start=None, end=None, draws=None) -> (T, 3, H, W) uint8 frames
(Clips) or (T, F) float features (Features). A source is a path or the bytes of a file; start and end are seconds in it.
"""

import contextlib
import functools
import hashlib
import io
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import common
from common import UserError, first_line

import numpy as np
import torch

ALPHA = ("bgra", "rgba", "argb", "abgr", "pal8", "yuva420p")  # pixel formats that may be transparent
JPEG_ROWS = 65_500  # no jpeg can hold more
COUNTED = ("avi", "mpeg", "mpegts", "mpegvideo")  # containers whose packets are not the frames: see _count_frames
KEPT = 2**27  # bytes of decoded frames that are kept while they are counted; a larger clip is decoded twice


# ---- frames ----
def read_frames(source, n, start=None, end=None, sampling="uniform", draws=None, short=0):
    """n frames of a clip in the order of time: (n, H, W, 3) uint8. Fewer are repeated; there is never an empty one.

    Args:
        source: path or bytes of mp4, webm, mkv, avi, gif, ... (whatever FFmpeg reads).
        start, end: window in seconds; None = the clip's own ends.
        sampling: times of the frames: 'uniform' from the first to the last frame; 'middle' of n equal segments;
            'random' inside each segment, by draws (n,) in 0..1; 'at' these seconds: draws (n,), ascending.
        short: scale to this short side in pixels while decoding, when the clip is larger; 0 = never.
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
        with av.open(file, metadata_errors="ignore") as container:
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
                pictures = [_rgb(kept[k], short) for k in places]  # n of (H, W, 3)
            else:
                pictures = _decode_frames(container, stream, times, places, short)  # at most n of (H, W, 3)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise ValueError(f"not a readable video ({error.strerror})") from error
    if len(pictures) < 0.9 * n:
        raise ValueError(f"only {len(pictures)} of {n} frames can be decoded")
    return np.stack(pictures + pictures[-1:] * (n - len(pictures)))  # (n, H, W, 3)


@functools.lru_cache(maxsize=1024)
def duration(path):
    """Seconds of a video file, by its packets. Raises as read_frames."""
    import av
    with av.open(path, metadata_errors="ignore") as container:
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


def _rewind(container, stream, back):
    """To the key frame before `back`, in units of the stream; None = to the beginning."""
    if back:
        container.seek(back, stream=stream)
    else:
        container.seek(0)


def _packets(container, stream, back, end):
    """[(time, length)] in units of the stream, as stored, from the key frame before `back` (None = all) to `end` s."""
    out, origin, unit = [], stream.start_time or 0, float(stream.time_base or 0)
    with contextlib.suppress(OSError, ValueError):
        _rewind(container, stream, back)
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


def _decode_frames(container, stream, times, places, short):
    """The frames of these numbers, each (H, W, 3) uint8; fewer where the file ends early."""
    unit, origin, last = float(stream.time_base or 0), stream.start_time or 0, len(times.seconds) - 1
    pictures = []
    _rewind(container, stream, times.back)
    for k, frame in enumerate(container.decode(stream)):
        told = times.known and frame.pts is not None
        now = (frame.pts - origin) * unit if told else times.seconds[min(k, last)]
        due = int((times.seconds[places[len(pictures):]] <= now + 1e-6).sum())  # how often it is wanted
        if due:
            pictures += [_rgb(frame, short)] * due
        if len(pictures) == len(places):
            break
    return pictures


def _rgb(frame, short):
    """One decoded frame as (H, W, 3) uint8: scaled, transparency on white, turned as the camera says."""
    w, h = frame.width, frame.height
    if short and min(w, h) > short:
        w, h = (max(short, round(side * short / min(w, h))) for side in (w, h))
    if frame.format.name in ALPHA:
        x = frame.to_ndarray(format="rgba", width=w, height=h).astype(np.int32)  # (H, W, 4)
        rgb, alpha = x[..., :3], x[..., 3:]
        x = ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)  # (H, W, 3)
    else:
        x = frame.to_ndarray(format="rgb24", width=w, height=h)  # (H, W, 3)
    return np.rot90(x, frame.rotation // 90) if frame.rotation else x


# ---- clips ----
class Clips:
    """How a video becomes (T, 3, H, W) uint8: frames T, sampling, short side in pixels, a cache folder ('' = none).

    The cache holds one JPEG per clip, its frames one below the other (three for each wanted one with random
    sampling): decoded once, 4:4:4."""

    at_rest = "uniform"  # how random frames are placed in evaluation

    def __init__(self, frames=12, sampling="uniform", short=256, cache=""):
        self.frames, self.sampling, self.short, self.cache = frames, sampling, short, cache

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, 3, H, W) uint8; draws (T,) in 0..1 place random frames, None = evaluation. Raises as read_frames."""
        if self.cache:
            return self._cached(source, start, end, draws)
        sampling = self.at_rest if self.sampling == "random" and draws is None else self.sampling
        return _channels_first(self.decode(source, self.frames, start, end, sampling, draws))

    def decode(self, source, n, start, end, sampling, draws):
        """(n, H, W, 3) uint8 frames of one source, as read_frames."""
        return read_frames(source, n, start, end, sampling, draws, self.short)

    def _cached(self, source, start, end, draws):
        spare = self.sampling == "random"  # three frames to choose from
        keep, spread = (3 * self.frames, "middle") if spare else (self.frames, self.sampling)
        file = self._file(source, f"{start} {end} {keep} {spread} {self.short}")
        try:
            x = common.decode(file).unflatten(1, (keep, -1)).transpose(0, 1)  # (keep, 3, H, W)
        except (OSError, ValueError, RuntimeError):  # not there yet, or cut by a crash
            x = self._fill(file, self.decode(source, keep, start, end, spread, None))  # (keep, 3, H, W)
        if not spare:
            return x
        choice = 1  # the middle one of three
        if draws is not None:
            choice = np.minimum(np.asarray(draws)[:self.frames] * 3, 2).astype(int)  # (T,)
        return x[torch.from_numpy(np.arange(self.frames) * 3 + choice)]  # (T, 3, H, W)

    def _file(self, source, settings):
        """Where the cache holds a clip: by its path, or the bytes, and everything that changes its frames."""
        if isinstance(source, (bytes, bytearray)):
            stem, content = "clip", source
        else:
            stem, content = Path(source).stem, str(Path(source).resolve()).encode()
        name = hashlib.sha1(content)
        name.update(settings.encode())
        digest = name.hexdigest()
        return Path(self.cache) / digest[:2] / f"{common.slug(stem)[:80]}-{digest[:12]}.jpg"

    def _fill(self, file, frames):
        """Writes (keep, H, W, 3) frames to the cache; returns what a later epoch will read."""
        from PIL import Image
        if len(frames) * frames.shape[1] > JPEG_ROWS:  # not cached
            return _channels_first(frames)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        tall = frames.reshape(-1, *frames.shape[2:])  # (keep * H, W, 3)
        with common.writing(f"--frame-cache {self.cache}"):  # no fault of this video, so no bad sample
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(tall).save(temporary, "jpeg", quality=92, subsampling=0)
            os.replace(temporary, file)
        return common.decode(file).unflatten(1, (len(frames), -1)).transpose(0, 1)  # (keep, 3, H, W)


def _channels_first(frames):
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)  # (T, 3, H, W)


class Features:
    """Precomputed features in place of frames: one VIDEO.npy (time, width) in each folder (motion, appearance, ...),
    each brought to T rows, side by side: (T, F) float."""
    sampling = "uniform"

    def __init__(self, folders, frames):
        self.folders, self.frames, self.width = folders, frames, None

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, F) float32 of the video's name. Raises OSError or ValueError with the reason."""
        x = np.concatenate([self._rows(folder, Path(source).stem) for folder in self.folders], 1)  # (T, F)
        if self.width not in (None, x.shape[1]):
            raise ValueError(f"features of width {x.shape[1]}, others have {self.width}")
        return torch.from_numpy(x)

    def _rows(self, folder, stem):
        try:
            x = np.load(Path(folder).expanduser() / f"{stem}.npy", allow_pickle=False)
            x = np.atleast_2d(x).astype(np.float32)  # (time, width)
        except (EOFError, TypeError, ValueError) as error:  # an empty file, an npz: a bad sample like any other
            why = "it holds Python objects" if "pickle" in str(error) else first_line(error)
            raise ValueError(f"{folder}: {stem}.npy is not an array of numbers ({why})") from error
        if x.ndim != 2 or not len(x) or not np.isfinite(x).all():
            raise ValueError(f"{folder}: features of shape {x.shape}, expected (time, width), finite")
        return x[np.linspace(0, len(x) - 1, self.frames).round().astype(int)]  # (T, width)


def feature_shape(data):
    """[T, F] of a data set of features; from now on all must have it. Raises UserError where none can be read."""
    reasons = []
    for i in range(min(len(data), 100)):
        try:
            shape = list(data.read(i).shape)
            data.clip.width = shape[1]
            return shape
        except (OSError, ValueError) as error:
            reasons.append(f"{data.key(i)}: {first_line(error)}")
    raise UserError(f"{data.name}: none of its first features can be read, first {reasons[0]}")


def clip_options(options, kind=Clips):
    """Clips (or another kind of them), or Features with --feature-dir, from the options of load_data."""
    frames = options.get("frames") or 12
    if options.get("feature_dir"):
        return Features(options["feature_dir"], frames)
    short = round((options.get("image_size") or 224) * 8 / 7)
    return kind(frames, options.get("frame_sampling") or "uniform", short, options.get("frame_cache") or "")


# ---- where videos are ----
@functools.lru_cache(maxsize=16)
def video_index(folder):
    """{file name, and its stem: paths} of all videos (or files of features) below a folder."""
    suffixes = {f".{kind}" for kind in (*common.VIDEO_TYPES, "gif", "npy")}
    out = {}
    for path in sorted(p for p in Path(folder).expanduser().rglob("*") if p.suffix.lower() in suffixes):
        if path.is_file():  # EPIC-KITCHENS has folders called P01_01.MP4
            for name in (path.name, path.stem):
                out.setdefault(name, []).append(str(path))
    return out


def find_video(index, name):
    """Path of a video by its file name or stem ('v_' may be missing), or None; where several have the name, the one
    below the folders that the name says."""
    return next(iter(_namesakes(index, name)), None)


def _namesakes(index, name):
    """Paths of all videos that a name may mean."""
    video = Path(name)
    names = (video.name, video.stem, video.stem.removeprefix("v_"), f"v_{video.stem}")
    found = next((index[n] for n in names if n in index), [])
    if len(found) > 1 and len(video.parts) > 1:
        tails = tuple(f"/{v.as_posix()}" for v in (video, video.with_suffix("")))
        either = ((p, Path(p).as_posix(), Path(p).with_suffix("").as_posix()) for p in found)
        found = [p for p, whole, bare in either if whole.endswith(tails) or bare.endswith(tails)]
    return found


def _said_of_namesakes(index, videos):
    """A note where names stand for several files that are no copies of one: the first of them is read."""
    several = {v: found for v in videos if len(found := _namesakes(index, v)) > 1}
    several = {v: found for v, found in several.items() if len({os.path.getsize(p) for p in found}) > 1}
    if not several:
        return ""
    video, found = next(iter(several.items()))
    return (f"{len(several):,} names stand for SEVERAL videos, of {video} {found[0]} is read and not {found[1]}: say "
            "the folder in the name")


def clips_of(name, split, annotations, options, root=None, labels=None):
    """Data of annotated videos, found below --video-dir by path, file name or stem; missing ones are counted.

    Args:
        annotations: {(video, start, end): captions}; start and end in seconds or None; captions a list or one string.
        options: of load_data; with join_captions the captions of a clip become one text.
        root: where the videos are when no option says so.
        labels: {(video, start, end): class} of those that have one, for the column label, or None for no such column.
    Raises: UserError when the folder or every video is missing, or features stand for several windows of a video.
    """
    folders = options.get("feature_dir") or [options.get("video_dir") or options.get("data_dir") or root]
    folder = Path(folders[0]).expanduser()
    if not folder.is_dir():
        raise UserError(f"--video-dir {folder}: no such folder")
    texts = {k: common.clean_list(v) for k, v in annotations.items()}
    texts = {k: v for k, v in texts.items() if v}
    if not texts:
        raise UserError(f"{name} ({split}): the annotations name no video")
    index, found, missing = video_index(str(folder)), {}, []
    for key in texts:
        video = str(key[0])
        path = str(folder / video) if (folder / video).is_file() else find_video(index, video)
        if path:
            found[key] = path
        else:
            missing.append(video)
    if not found:
        looked = f"none of {len(texts):,} videos is below {folder} (looked for {missing[0]})"
        raise UserError(f"{name} ({split}): {looked}; --video-dir names the folder of the videos")
    if options.get("feature_dir") and len(set(found.values())) < len(found):
        raise UserError(f"{name} ({split}): several windows of one video, but --feature-dir has one file for a video")
    captions = [texts[k] for k in found]
    if options.get("join_captions"):
        captions = [[" ".join(t.strip() for t in c)] for c in captions]
    sources = [{"path": path, "start": start, "end": end} for (_, start, end), path in found.items()]
    classes, columns = None, {}
    if labels is not None:
        names = sorted({str(labels[k]) for k in texts if k in labels})  # also of videos that are not there
        number = {y: i for i, y in enumerate(names)}
        classes, columns = {"label": names}, {"label": [number[labels[k]] if k in labels else -1 for k in found]}
    table = common.make_table(captions, [_window_key(*k) for k in found], sources, classes, **columns)
    notes = [f"{len(set(missing)):,} videos are not in {folder}, first {missing[0]}"] if missing else []
    by_name = dict.fromkeys(str(v) for v, *_ in found if not (folder / str(v)).is_file())
    notes += [note for note in [_said_of_namesakes(index, by_name)] if note]
    data = common.Data(name, split, table, clip=clip_options(options), note="; ".join(notes))
    return common.with_notes(data, len(annotations) - len(texts))


def _window_key(video, start, end):
    """The video's name, and where it has a window its seconds: 'yt1 2-4 s'."""
    if start is None and end is None:
        return f"{video}"
    return f"{video} {'-'.join('' if t is None else f'{t:g}' for t in (start, end))} s"


def video_folder(name, path, options):
    """{split: Data} of class folders of videos, in train/val/test folders where there are some; the class names serve
    as captions. Raises UserError for a video in no class folder."""
    files = {p for paths in video_index(str(path)).values() for p in paths if not p.endswith(".npy")}
    common.check_split_names(name, common.folders_of(path))
    splits = {}
    for file in sorted(Path(p) for p in files):
        parts = file.relative_to(path).parts
        split = common.split_of(parts[0]) if len(parts) > 2 else None
        if len(parts) < 2 + bool(split):
            what = f"{file.name} is in no class folder and there is no metadata.csv (file_name, caption)"
            raise UserError(f"--dataset {name}: {what}")
        splits.setdefault(split or "train", []).append(file)
    names = sorted({file.parent.name for part in splits.values() for file in part})
    note = "no captions: the class names serve as captions"
    out = {}
    for split, part in splits.items():
        labels = [names.index(file.parent.name) for file in part]
        captions, keys = [[names[y].replace("_", " ")] for y in labels], [str(f.relative_to(path)) for f in part]
        sources = [{"path": str(file)} for file in part]
        table = common.make_table(captions, keys, sources, {"label": names}, label=labels)
        out[split] = common.Data(name, split, table, clip=clip_options(options), note=note, has_captions=False)
    return out
