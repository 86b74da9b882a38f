"""Videos: clips of frames, the frame cache, features in place of frames, and where the videos of annotations lie.

The `clip` of a data set is callable: clip(source, start=None, end=None, draws=None) -> (T, 3, H, W) uint8 frames
(Clips) or (T, F) float features (Features). A source is a path or the bytes of a file; start and end are seconds in it.
"""

import functools
import hashlib
import os
import secrets
import socket
from pathlib import Path

import common
from common import UserError, first_line

import numpy as np
import torch

from sets.frames import read_frames

JPEG_ROWS = 65_500  # no jpeg can hold more


# ---- clips ----
class Clips:
    """How a video becomes (T, 3, H, W) uint8: frames T, sampling, short side in pixels, a cache folder ('' = none).

    The cache holds one JPEG per clip, its frames one below the other: decoded once, 4:4:4. Random frames have a JPEG of
    their own, three for each wanted one; evaluation sees the same frames with and without a cache."""

    at_rest = "uniform"  # how random frames are placed in evaluation

    def __init__(self, frames=12, sampling="uniform", short=256, cache=""):
        self.frames, self.sampling, self.short, self.cache = frames, sampling, short, cache

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, 3, H, W) uint8; draws (T,) in 0..1 place random frames, None = evaluation. Raises as read_frames."""
        sampling = self.at_rest if self.sampling == "random" and draws is None else self.sampling
        if self.cache:
            return self._cached(source, start, end, sampling, draws)
        return _channels_first(self.decode(source, self.frames, start, end, sampling, draws))

    def decode(self, source, n, start, end, sampling, draws):
        """(n, H, W, 3) uint8 frames of one source, as read_frames."""
        return read_frames(source, n, start, end, sampling, draws, self.short)

    def _cached(self, source, start, end, sampling, draws):
        keep, spread = self.frames, sampling
        if sampling == "random":  # three frames to choose from
            keep, spread = 3 * self.frames, "middle"
        file = self._file(source, f"{start} {end} {keep} {spread} {self.short}")
        try:
            x = common.decode(file).unflatten(1, (keep, -1)).transpose(0, 1)  # (keep, 3, H, W)
        except (OSError, ValueError, RuntimeError):  # not there yet, or cut by a crash
            x = self._fill(file, self.decode(source, keep, start, end, spread, None))  # (keep, 3, H, W)
        if sampling != "random":
            return x
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
        # two containers may have the same process numbers
        temporary = file.with_suffix(f".{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
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
        except (OSError, ValueError) as error:
            reasons.append(f"{data.key(i)}: {first_line(error)}")
            continue
        if len(shape) > 2:
            raise UserError("--image-encoder features: the data set has pixels; features come with --feature-dir of "
                            "ncl.py")
        data.clip.width = shape[1]
        return shape
    raise UserError(f"{data.name}: none of its first features can be read, first {reasons[0]}")


def windows_of(table):
    """(start, end) in seconds of each row, from one of common.WINDOW_COLUMNS; (None, None) without."""
    named = common.plain_names(table.column_names)
    pair = next(([named[c] for c in p] for p in common.WINDOW_COLUMNS if set(p) <= set(named)), None)
    if not pair:
        return [(None, None)] * len(table)
    def seconds(value):
        return None if value is None or value == "" else float(value)
    try:
        rows = table[pair[0]][:] if len(pair) == 1 else zip(table[pair[0]][:], table[pair[1]][:])
        return [(seconds(start), seconds(end)) for start, end in rows]
    except (TypeError, ValueError) as error:
        raise UserError(f"column {' and '.join(pair)}: expected seconds ({first_line(error)})") from error


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
    common.guard("check_split_names", name, common.folders_of(path))
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
