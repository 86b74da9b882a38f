"""Finds the videos that annotations name, by path, file name or stem, and makes Data of them."""

import functools
import os
from pathlib import Path

import common

from contrastive.engine.base import UserError, join_notes
from contrastive.readers.clips import clip_options
from contrastive.readers.columns import VIDEO_TYPES, clean_list

ONE_FILE = "several windows of one video, but --feature-dir has only one file per video"


@functools.lru_cache(maxsize=16)
def video_index(folder):
    """{name: paths} of all videos (or feature files) below a folder; each is listed by file name and by stem."""
    suffixes = {f".{kind}" for kind in (*VIDEO_TYPES, "gif", "npy")}
    out = {}
    for path in sorted(p for p in Path(folder).expanduser().rglob("*") if p.suffix.lower() in suffixes):
        if path.is_file():  # EPIC-KITCHENS has folders called P01_01.MP4
            for name in (path.name, path.stem):
                out.setdefault(name, []).append(str(path))
    return out


def find_video(index, name):
    """Path of a video by its file name or stem ('v_' may be missing), or None. If several files match, folders in the
    name decide."""
    return next(iter(_namesakes(index, name)), None)


def _namesakes(index, name):
    """Paths of all videos that match a name."""
    video = Path(name)
    names = (video.name, video.stem, video.stem.removeprefix("v_"), f"v_{video.stem}")
    found = next((index[n] for n in names if n in index), [])
    if len(found) > 1 and len(video.parts) > 1:
        tails = tuple(f"/{v.as_posix()}" for v in (video, video.with_suffix("")))
        either = ((p, Path(p).as_posix(), Path(p).with_suffix("").as_posix()) for p in found)
        found = [p for p, whole, bare in either if whole.endswith(tails) or bare.endswith(tails)]
    return found


def _path_of(folder, index, video):
    """Where a video lies: by its path below the folder, else by its name; None if it is nowhere."""
    return str(folder / video) if os.path.isfile(folder / video) else find_video(index, video)


def _ends_with(path, name):
    """Whether a path ends with the name, which may lack the ending of the file."""
    ends = (Path(path).as_posix(), Path(path).with_suffix("").as_posix())
    return any(end == Path(name).as_posix() or end.endswith(f"/{Path(name).as_posix()}") for end in ends)


def _said_of_namesakes(index, videos):
    """A note on names that match several different files, of which the first is read; "" if there are none."""
    several = {v: found for v in videos if len(found := _namesakes(index, v)) > 1}
    several = {v: found for v, found in several.items() if len({os.path.getsize(p) for p in found}) > 1}
    if not several:
        return ""
    video, found = next(iter(several.items()))
    return (f"{len(several):,} names match SEVERAL videos (for {video}, {found[0]} is read and not {found[1]}): put "
            "the folder into the name")


def video_folder(options, root=None):
    """The folder of the videos, or of their features. Raises: UserError if it does not exist."""
    folders = options.get("feature_dir") or [options.get("video_dir") or options.get("data_dir") or root]
    folder = Path(folders[0]).expanduser()
    if not folder.is_dir():
        raise UserError(f"--video-dir {folder}: no such folder")
    return folder


def clips_of(name, split, annotations, options, root=None, labels=None):
    """Data of annotated videos, found below --video-dir by path, file name or stem; missing ones are counted.

    Args:
        annotations: {(video, start, end): captions}; start and end in seconds or None; captions a list or one string.
        options: of load_data.
        root: where the videos are if no option says so.
        labels: {(video, start, end): class} of the clips that have one, for the column label; None = no such column.
    Raises: UserError if the folder or every video is missing, or a feature file belongs to several windows of a video.
    """
    folder = video_folder(options, root)
    said = {k: clean_list(v) for k, v in annotations.items()}
    said = {k: v for k, v in said.items() if v}
    if not said:
        raise UserError(f"{name} ({split}): the annotations name no video")
    index = video_index(str(folder))
    paths = {video: _path_of(folder, index, str(video)) for video, *_ in said}  # None where it is missing
    first = {}  # path -> the first name that it ends with: 0000 and 0000.mp4 are one video
    for video, path in paths.items():
        if path and _ends_with(path, str(video)):
            first.setdefault(path, video)
    for video, path in paths.items():  # dog/0001 is missing, and not the cat/0001 that another name means
        if path in first and not _ends_with(path, str(video)) and len(Path(str(video)).parts) > 1:
            paths[video] = None
    missing = [str(video) for video, path in paths.items() if not path]
    found, texts, classes = {}, {}, {}
    for (video, *window), captions in said.items():
        if not paths[video]:
            continue
        key = (first.get(paths[video], video), *window)
        found[key] = paths[video]
        known = texts.setdefault(key, [])
        known += [t for t in captions if t not in known] if known else captions
        if labels and (video, *window) in labels:
            classes.setdefault(key, set()).add(labels[video, *window])
    if not found:
        looked = f"none of {len(said):,} videos is below {folder} (looked for {missing[0]})"
        raise UserError(f"{name} ({split}): {looked}; --video-dir names the folder of the videos")
    if options.get("feature_dir") and len(set(found.values())) < len(found):
        raise UserError(f"{name} ({split}): {ONE_FILE}")
    notes = [f"{len(set(missing)):,} videos are not in {folder}, first {missing[0]}"] if missing else []
    if options.get("feature_dir") and any(window != [None, None] for _, *window in found):
        notes.append("the features are those of whole files, not of the windows (start, end)")
    by_name = dict.fromkeys(str(v) for v, *_ in found if not os.path.isfile(folder / str(v)))
    note = join_notes(*notes, _said_of_namesakes(index, by_name))
    names, label = None, {}
    if labels is not None:
        names = sorted({labels[k] for k in said if k in labels})  # also the classes of missing videos
        label = {k: {"label": names.index(*classes[k]) if len(classes.get(k, ())) == 1 else -1} for k in found}
    rows = [{"source": {"path": path, "start": k[1], "end": k[2]}, "key": _window_key(*k),
             "captions": texts[k]} | label.get(k, {}) for k, path in found.items()]
    rows += [{"captions": []}] * (len(annotations) - len(said))
    return common.from_rows(name, split, rows, options, {"label": names}, clip=clip_options(options), note=note)


def _window_key(video, start, end):
    """The key of a clip: the video's name and, if it has a window, the seconds: 'yt1 2-4 s'."""
    if start is None and end is None:
        return f"{video}"
    return f"{video} {'-'.join('' if t is None else f'{t:g}' for t in (start, end))} s"
