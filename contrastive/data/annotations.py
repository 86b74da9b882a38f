"""What the readers of annotation files share: finding and reading files, finding videos, and Data of annotated videos.

A reader is a function of (files, split), or of what its family says, that yields rows: dicts of video, captions (a text
or a list), perhaps start, end (seconds) and label. Whatever is wrong in a file is one line with its name.
"""

import contextlib
import csv
import functools
import glob
import json
import os
import pickle
from pathlib import Path

from contrastive.data.clips import clip_options
from contrastive.data.table import VIDEO_TYPES, Data, make_table, notes
from contrastive.engine.processes import UserError, first_line, say


# ---- annotation files ----
class Files:
    """The annotation files of a set below a folder. `last` is the one that is read, for the message of an error."""

    def __init__(self, root):
        self.root = self.last = Path(root).expanduser()

    def find(self, *patterns):
        """The first file with one of these names or patterns, tried in order. Raises UserError if there is none."""
        found = (f for pattern in patterns for f in sorted(self.root.rglob(pattern)) if f.is_file())
        self.last = next(found, None)
        if self.last is None:
            raise UserError(f"{self.root}: none of {', '.join(patterns)} is there; --data-dir names the folder of the "
                            "annotation files")
        return self.last

    def has(self, *patterns):
        """Whether `find` would find one."""
        return any(f.is_file() for pattern in patterns for f in self.root.rglob(pattern))

    def json(self, *patterns):
        """What the first of these JSON files holds."""
        return json.loads(self.find(*patterns).read_text(encoding="utf-8-sig"))

    def lines(self, *patterns):
        """The lines of the first of these text files that are not empty, stripped."""
        lines = self.find(*patterns).read_text(encoding="utf-8-sig").splitlines()
        return [line.strip() for line in lines if line.strip()]

    def csv(self, *patterns, separator=","):
        """The rows of the first of these files, {column: text}."""
        csv.field_size_limit(2**31 - 1)
        with open(self.find(*patterns), newline="", encoding="utf-8-sig") as f:
            rows = list(csv.DictReader(f, delimiter=separator, strict=True))
        odd = next((k for k, row in enumerate(rows, 2) if None in row or None in row.values()), 0)
        if odd:
            raise ValueError(f"row {odd} has not as many fields as the header")
        return rows

    def rows(self, *patterns):
        """The rows of the first of these files, dicts: json, jsonl, csv or parquet, as `datasets` reads it."""
        import datasets
        kind = self.find(*patterns).suffix[1:].replace("jsonl", "json")
        if kind == "csv":
            return self.csv(*patterns)
        return datasets.load_dataset(kind, data_files=glob.escape(str(self.last)), split="train")

    def pickle(self, *patterns):
        """What the first of these pickles holds, plain values only."""
        with open(self.find(*patterns), "rb") as f:
            return PlainPickle(f, encoding="latin1").load()

    @contextlib.contextmanager
    def border(self):
        """Around the reading of these files: whatever goes wrong is one line with the name of the last file."""
        try:
            yield
        except UserError:
            raise
        except KeyError as error:
            raise UserError(f"{self.last}: no {error}; is it the right file, and whole?") from error
        except Exception as error:
            raise UserError(f"{self.last}: {type(error).__name__}: {first_line(error)[:200]}") from error


# what a pickle of plain values and numpy arrays imports; numpy 1 and 2 name their modules differently
ARRAYS = {("numpy", "ndarray"), ("numpy", "dtype"),
          *((f"numpy.{core}.{file}", name) for core in ("core", "_core")
            for file, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer")))}
VALUES = {(module, name) for module in ("builtins", "__builtin__")
          for name in ("set", "frozenset", "complex", "bytearray", "unicode", "long")}


class PlainPickle(pickle.Unpickler):
    """Reads only builtin containers, numbers, strings and numpy arrays; nothing else is imported or called."""

    def find_class(self, module, name):
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes, and so arrays, for Python 2
            return lambda text, _: text.encode("latin1")
        if (module, name) in ARRAYS | VALUES:
            return super().find_class(module, name)
        raise ValueError(f"asks for {module}.{name}; only plain data is read from pickles")


def files_of(name, options):
    """The Files of a set: below --data-dir, else --video-dir. Raises UserError without either."""
    root = options.get("data_dir") or options.get("video_dir")
    if not root:
        raise UserError(f"--dataset {name} needs --data-dir (its annotation files) and --video-dir (its videos)")
    return Files(root)


def count_note(name, split, found, expected, part=0.0):
    """A warning, printed and returned for the note, if a split's count differs from the papers' by more than `part` of
    it; else ""."""
    if expected is None or abs(found - expected) <= part * expected:
        return ""
    say(f"WARNING: {name} ({split}) has {found:,} examples, {expected:,} are expected: the numbers are not comparable "
        "with the papers'")
    return f"WARNING: {found:,} examples, {expected:,} expected"


# ---- videos ----
WHOLE_FILES = "the features are those of whole files, not of the windows (start, end)"


class Videos:
    """The videos (or feature files) below a folder: `videos[name]` is a path or None. A name is a path below the
    folder, a file name or a stem, with or without `v_` before it; folders in the name decide."""

    def __init__(self, folder):
        self.folder = Path(folder).expanduser()
        self.index = video_index(str(self.folder))

    def __getitem__(self, name):
        if os.path.isfile(self.folder / name):
            return str(self.folder / name)
        video = Path(name)
        names = (video.name, video.stem, video.stem.removeprefix("v_"), f"v_{video.stem}")
        found = next((self.index[n] for n in names if n in self.index), [])
        if len(video.parts) > 1:
            tails = tuple(f"/{v.as_posix()}" for v in (video, video.with_suffix("")))
            found = [p for p in found if p.endswith(tails) or os.path.splitext(p)[0].endswith(tails)]
        return next(iter(found), None)


@functools.lru_cache(maxsize=16)
def video_index(folder):
    """{name: paths} of all videos (or feature files) below a folder; each is listed by file name and by stem."""
    if not os.path.isdir(folder):
        raise UserError(f"--video-dir {folder}: no such folder")
    out = {}
    for path in sorted(p for p in Path(folder).rglob("*") if p.suffix.lower()[1:] in (*VIDEO_TYPES, "gif", "npy")):
        if path.is_file():  # EPIC-KITCHENS has folders called P01_01.MP4
            for name in (path.name, path.stem):
                out.setdefault(name, []).append(str(path))
    return out


def video_folder(options, root=None):
    """The folder of the videos, or of their features."""
    folders = options.get("feature_dir") or [options.get("video_dir") or options.get("data_dir") or root]
    return Path(folders[0]).expanduser()


def one_caption_list(rows):
    """Rows of one (video, start, end) become one row with all their captions, in the order of the first of each."""
    out = {}
    for row in rows:
        said = row["captions"] if isinstance(row["captions"], list) else [row["captions"]]
        key = str(row["video"]), row.get("start"), row.get("end")
        out.setdefault(key, row | {"captions": []})["captions"].extend(said)
    return list(out.values())


def clips_of(name, split, rows, options, root=None, classes=None, clip=None, videos=None, **attributes):
    """Data of rows {video, captions[, start, end, key, and columns of the table]}; those without a caption or a video
    are left out and counted. label: the name of a class, or None.

    Args: root: where the videos are if no option says so; classes: {column: names} if not those of the rows;
        clip: how videos are read; videos: name -> path or None, if not by the folder's index."""
    folder = video_folder(options, root)
    videos = Videos(folder) if videos is None else videos
    said = [row | {"captions": [str(c).strip() for c in row["captions"] if str(c or "").strip()]} for row in rows]
    said = [row for row in said if row["captions"]]
    paths = {v: videos[v] for v in dict.fromkeys(str(row["video"]) for row in said)}  # None where it is missing
    kept, missing = [row for row in said if paths[str(row["video"])]], [v for v, path in paths.items() if not path]
    if not kept:
        raise UserError(f"{name} ({split}): none of {len(paths):,} videos is below {folder}"
                        + (f" (looked for {missing[0]})" if missing else "") + "; --video-dir names their folder")
    windows = {(paths[str(r["video"])], r.get("start"), r.get("end")) for r in kept if "key" not in r}
    if options.get("feature_dir") and len({path for path, *_ in windows}) < len(windows):
        raise UserError(f"{name}: several windows of one video, but --feature-dir has only one file per video")
    classes, more = dict(classes or {}), {}
    if any("label" in row for row in said):
        classes.setdefault("label", sorted({row["label"] for row in said} - {None}))
        number = {y: k for k, y in enumerate(classes["label"])}
        more["label"] = [number.get(row["label"], -1) for row in kept]
    columns = [c for c in kept[0] if c not in ("video", "captions", "start", "end", "label", "key")]
    more |= {c: [row[c] for row in kept] for c in columns}
    if "key" in kept[0]:  # rows of one video then have names of their own
        more["video"] = [str(row["video"]) for row in kept]
    sources = [{"path": paths[str(r["video"])], "start": r.get("start"), "end": r.get("end")} for r in kept]
    keys = [r.get("key") or window_key(r["video"], r.get("start"), r.get("end")) for r in kept]
    table = make_table([row["captions"] for row in kept], keys, sources, classes, **more)
    lost = f"{len(missing):,} videos ({len(said) - len(kept):,} rows) are not in {folder}"
    note = notes(f"{lost}, first {missing[0]}" if missing else "",
                 WHOLE_FILES if options.get("feature_dir") and any({*w[1:]} != {None} for w in windows) else "",
                 f"{len(rows) - len(said):,} without a caption left out" if len(said) < len(rows) else "",
                 f"{more['label'].count(-1):,} without a class" if -1 in more.get("label", ()) else "")
    return Data(name, split, table, clip=clip or clip_options(options), note=note, **attributes)


def window_key(video, start=None, end=None):
    """The key of a clip: the video's name and, if it has a window, the seconds: 'yt1 2-4 s'."""
    if start is None and end is None:
        return f"{video}"
    return f"{video} {'-'.join('' if t is None else f'{t:g}' for t in (start, end))} s"
