"""What the readers of annotation files share: finding and reading files, finding videos, and Data of annotated videos.
A reader yields rows: dicts of video, captions (a text or a list), perhaps start, end (seconds), key, and columns."""

import csv
import functools
import io
import json
import os
import pickle
from pathlib import Path

from contrastive.data.clips import clip_options
from contrastive.data.table import VIDEO_TYPES, Data, make_table, notes
from contrastive.engine.processes import UserError


# ---- annotation files ----
class Files:
    """The annotation files of a set below a folder. `last` is the one that is read: `opening(files)` names it."""

    def __init__(self, root):
        self.root = self.last = Path(root).expanduser()

    def __str__(self):
        return str(self.last)

    def has(self, *patterns):
        """The first file with one of these names or patterns, tried in order; None if there is none."""
        return next((f for pattern in patterns for f in sorted(self.root.rglob(pattern)) if f.is_file()), None)

    def find(self, *patterns):
        """As `has`, but raises UserError if there is none."""
        file = self.has(*patterns)
        if file is None:
            raise UserError(f"{self.root}: none of {', '.join(patterns)} is there; --data-dir names the folder of the "
                            "annotation files")
        self.last = file
        return file

    def text(self, *patterns):
        """What the first of these files says."""
        return self.find(*patterns).read_text(encoding="utf-8-sig")

    def json(self, *patterns):
        """What the first of these JSON files holds."""
        return json.loads(self.text(*patterns))

    def lines(self, *patterns):
        """The stripped lines of the first of these files that are not empty."""
        return [*filter(None, map(str.strip, self.text(*patterns).splitlines()))]

    def csv(self, *patterns, separator=","):
        """The rows of the first of these files, {column: text}."""
        header, *rows = csv.reader(io.StringIO(self.text(*patterns)), delimiter=separator, strict=True)
        return [dict(zip(header, row, strict=True)) for row in rows if row]

    def pickle(self, *patterns):
        """What the first of these pickles holds, plain values only."""
        return PlainPickle(io.BytesIO(self.find(*patterns).read_bytes()), encoding="latin1").load()


# what sets and numpy arrays (of numpy 1 and 2) import in a pickle; lists, dicts, numbers and texts import nothing
PLAIN_MODULES = ("builtins", "__builtin__", "numpy",
                 *(f"numpy.{core}.{file}" for core in ("core", "_core") for file in ("multiarray", "numeric")))
PLAIN_NAMES = ("set", "frozenset", "ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")


class PlainPickle(pickle.Unpickler):
    """Reads builtin containers, numbers, strings and numpy arrays; nothing else is imported or called."""

    def find_class(self, module, name):
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes, and so arrays, for Python 2
            return lambda text, _: text.encode("latin1")
        if module in PLAIN_MODULES and name in PLAIN_NAMES:
            return super().find_class(module, name)
        raise ValueError(f"asks for {module}.{name}; only plain data is read from pickles")


def files_of(name, options):
    """The Files of a set: below --data-dir, else --video-dir. Raises UserError without either."""
    root = options.get("data_dir") or options.get("video_dir")
    if not root:
        raise UserError(f"--dataset {name} needs --data-dir (its annotation files) and --video-dir (its videos)")
    return Files(root)


# ---- videos ----
class Videos:
    """The videos (or feature files) below a folder: `videos[name]` is a path or None. A name is a path or the end of
    one, from any folder on, with or without suffix and `v_` before it. index: in place of the folder's own."""

    def __init__(self, folder, index=None):
        self.folder = Path(folder).expanduser()
        self.index = video_index(str(self.folder)) if index is None else index

    def __getitem__(self, name):
        if os.path.isfile(self.folder / name):
            return str(self.folder / name)
        stem = os.path.splitext(name)[0]
        return next(filter(None, map(self.index.get, (name, stem, stem.removeprefix("v_"), f"v_{stem}"))), None)


@functools.lru_cache(maxsize=16)
def video_index(folder):
    """{end of its path, from any folder on, with and without suffix: path} of the videos (or feature files) below a
    folder; the first of one name counts."""
    if not os.path.isdir(folder):
        raise UserError(f"--video-dir {folder}: no such folder")
    out = {}
    for path in sorted(p for p in Path(folder).rglob("*") if p.suffix.lower()[1:] in (*VIDEO_TYPES, "gif", "npy")):
        folders = path.relative_to(folder).parts[:-1]
        if path.is_file():  # EPIC-KITCHENS has folders called P01_01.MP4
            for k in range(len(folders) + 1):
                for last in (path.name, path.stem):
                    out.setdefault("/".join((*folders[k:], last)), str(path))
    return out


def video_folder(options, root=None):
    """The folder of the videos, or of their features."""
    folders = options.get("feature_dir") or [options.get("video_dir") or options.get("data_dir") or root]
    return Path(folders[0]).expanduser()


class Named(dict):
    """In place of Videos: each name stands for itself, for words and classes without any file of a video."""

    def __missing__(self, name):
        return name


# ---- Data of them ----
def clips_of(name, split, rows, options, classes=None, clip=None, videos=None, **attributes):
    """Data of rows; those without a caption or a video are left out and counted, and those of one (video, start, end,
    key) become one with all their captions. label: the name of a class, or None.

    Args: classes: {column: names} if not those of the rows; clip, videos ({name: path or None}): if not the folder's.
    """
    folder = video_folder(options)
    if videos is None:
        videos = Named() if options.get("without_videos") else Videos(folder)
    kept, paths, labels, silent, lost = {}, {}, set(), 0, 0
    for row in rows:
        said = row["captions"] if isinstance(row["captions"], list) else [row["captions"]]
        said = [c.strip() for c in said if c and c.strip()]
        if not said:
            silent += 1
            continue
        video = row["video"]
        if video not in paths:
            paths[video] = videos[video]
        labels.add(row.get("label"))
        if not paths[video]:
            lost += 1
            continue
        window = row.get("start"), row.get("end")
        one = kept.setdefault((video, *window, row.get("key")), row | {"captions": []})
        one["captions"] += said
    if not kept:
        raise UserError(f"{name} ({split}): none of {len(paths):,} videos is below {folder} (looked for "
                        f"{next(iter(paths), 'none')}); --video-dir names their folder")
    rows, classes = list(kept.values()), dict(classes or {})
    columns = {c: [row[c] for row in rows] for c in rows[0] if c not in ("captions", "start", "end", "key")}
    if "key" not in rows[0]:  # else rows of one video have names of their own
        del columns["video"]
    if "label" in columns:
        classes.setdefault("label", sorted(labels - {None}))
        number = {y: k for k, y in enumerate(classes["label"])}
        columns["label"] = [number.get(y, -1) for y in columns["label"]]
    sources = [{"path": paths[video], "start": start, "end": end} for video, start, end, _ in kept]
    keys = [key or window_key(video, start, end) for video, start, end, key in kept]
    table = make_table([row["captions"] for row in rows], keys, sources, classes, **columns)
    missing = [video for video, path in paths.items() if not path]
    note = notes(f"{len(missing):,} videos ({lost:,} rows) are not in {folder}, first {missing[0]}" if missing else "",
                 f"{silent:,} without a caption left out" if silent else "",
                 f"{columns['label'].count(-1):,} without a class" if -1 in columns.get("label", ()) else "")
    return Data(name, split, table, clip=clip or clip_options(options), note=note, **attributes)


def window_key(video, start=None, end=None):
    """The key of a clip: the video's name and, if it has a window, the seconds: 'yt1 2-4 s'."""
    if start is None and end is None:
        return video
    return f"{video} {'-'.join('' if t is None else f'{t:g}' for t in (start, end))} s"
