"""What the readers of annotation files share: finding and reading files, finding videos, and Data
of annotated videos.

A reader yields rows: dicts of video (a name), captions (a text or a list of texts), perhaps start
and end (seconds) and key, and further columns.
"""

import csv
import functools
import io
import json
import os
import pickle
from pathlib import Path

from contrastive.core.processes import UserError
from contrastive.data.clips import clip_options
from contrastive.data.folders import files_below
from contrastive.data.pixels import IMAGE_TYPES, VIDEO_TYPES
from contrastive.data.sound import SOUND_TYPES, has_sound
from contrastive.data.table import Data, make_table, window_key, with_column, with_note


# ---- annotation files ----
class Files:
    """The annotation files of a data set below a folder.

    A file is named by patterns, of which the first that some file has counts. `last` is the file
    that was found last: it is read if no pattern is given, and `opening(files)` names it.
    """

    def __init__(self, root):
        self.root = Path(root).expanduser()
        self.paths = sorted(map(Path, files_below(self.root)))
        self.last = self.root

    def __str__(self):
        return str(self.last)

    def has(self, *patterns):
        """The file with the first of these patterns that some file has; None if there is none.
        Raises: UserError if several files have it."""
        for pattern in patterns:
            files = [file for file in self.paths if file.match(pattern) and file.is_file()]
            if files:
                return only_file(pattern, files)
        return None

    def find(self, *patterns):
        """As `has`, but raises UserError if there is none. Without patterns the last file."""
        if not patterns:
            return self.last
        file = self.has(*patterns)
        if file is None:
            raise UserError(f"{self.root}: none of {', '.join(patterns)} is there; --data-dir "
                            "names the folder of the annotation files")
        self.last = file
        return file

    def text(self, *patterns):
        """The content of a text file."""
        return self.find(*patterns).read_text(encoding="utf-8-sig")

    def json(self, *patterns):
        """The content of a JSON file."""
        return json.loads(self.text(*patterns))

    def lines(self, *patterns):
        """The lines of a text file that are not empty, without white space around them."""
        lines = [line.strip() for line in self.text(*patterns).splitlines()]
        return [line for line in lines if line]

    def csv(self, *patterns, separator=","):
        """The rows of a csv file, {column: text}."""
        text = io.StringIO(self.text(*patterns))
        header, *rows = csv.reader(text, delimiter=separator, strict=True)
        return [dict(zip(header, row, strict=True)) for row in rows if row]

    def pickle(self, *patterns):
        """The content of a pickle of plain values."""
        content = io.BytesIO(self.find(*patterns).read_bytes())
        return PlainPickle(content, encoding="latin1").load()


# What a pickle of sets and of numpy arrays (numpy 1 and 2) imports. Lists, dicts, numbers and texts
# import nothing.
PLAIN_MODULES = (
    "builtins", "__builtin__", "numpy",
    "numpy.core.multiarray", "numpy.core.numeric",
    "numpy._core.multiarray", "numpy._core.numeric")
PLAIN_NAMES = ("set", "frozenset", "ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")


class PlainPickle(pickle.Unpickler):
    """Reads builtin containers, numbers, strings and numpy arrays; nothing else is imported or
    called."""

    def find_class(self, module, name):
        if (module, name) == ("_codecs", "encode"):
            return encode_latin1
        if module in PLAIN_MODULES and name in PLAIN_NAMES:
            return super().find_class(module, name)
        raise ValueError(f"asks for {module}.{name}; only plain data is read from pickles")


def encode_latin1(text, encoding):
    """Stands for codecs.encode, by which Python 3 writes bytes, and so arrays, for Python 2."""
    return text.encode("latin1")


def files_of(name, options):
    """The Files of a data set: below data_dir, else video_dir. Raises UserError without either."""
    root = options.data_dir or options.video_dir
    if not root:
        raise UserError(f"--dataset {name} needs --data-dir (its annotation files) and --video-dir "
                        "(its videos)")
    return Files(root)


# ---- videos ----
def without_ending(name):
    """A name or path without the ending of an image, of a video or of features; "clip.2" has
    none."""
    stem, ending = os.path.splitext(name)
    if ending.lower()[1:] in (*VIDEO_TYPES, *IMAGE_TYPES, "npy"):
        return stem
    return name


class Videos:
    """The videos, or files of features, below a folder: `videos[name]` is a path or None.

    A name is a path or the end of one, from any folder on, with or without suffix and `v_` before
    it. Raises: UserError for a name that several files have.

    Args:
        files: {name: paths} in place of those below the folder.
    """

    def __init__(self, folder, files=None):
        self.folder = Path(folder).expanduser()
        self.files = files or video_index(str(self.folder))

    def __getitem__(self, name):
        if os.path.isfile(self.folder / name):
            return str(self.folder / name)
        stem = without_ending(name)
        for alias in (name, stem, stem.removeprefix("v_"), f"v_{stem}"):
            if alias in self.files:
                return only_file(alias, self.files[alias])
        return None


def only_file(name, files):
    """The only one of the files with a name. Raises: UserError if there are several."""
    if len(files) > 1:
        raise UserError(f"{name} may be {files[0]} or {files[1]}: remove one of them, or move it "
                        "away")
    return files[0]


@functools.lru_cache(maxsize=16)
def video_index(folder):
    """{name: paths} of the videos, or files of features, below a folder. Names of a path are its
    ends, from any folder on, with and without suffix."""
    if not os.path.isdir(folder):
        raise UserError(f"--video-dir {folder}: no such folder")
    index = {}
    for path in sorted(map(Path, files_below(folder))):
        if path.suffix.lower()[1:] not in (*VIDEO_TYPES, "gif", "npy"):
            continue
        folders = path.relative_to(folder).parts[:-1]
        for k in range(len(folders) + 1):
            for name in {path.name, path.stem}:
                index.setdefault("/".join((*folders[k:], name)), []).append(str(path))
    return index


@functools.lru_cache(maxsize=16)
def sound_index(folder):
    """{stem: paths} of the files of sound below a folder."""
    index = {}
    for path in sorted(map(Path, files_below(folder))):
        if path.suffix.lower()[1:] in SOUND_TYPES:
            index.setdefault(path.stem, []).append(str(path))
    return index


def with_sound(data, files):
    """The data with a column `sound`, and a note of how many examples have none, which is zeros
    then.

    Args:
        files: M paths of files of sound; None = the sound of the clip's own file, if it has one.
    """
    import datasets

    column = []
    for file, cell in zip(files, data.sources["source"][:]):
        if file is None and has_sound(cell["path"]):
            file = ""  # the clip's own
        column.append(file)
    data = with_column(data, "sound", column, datasets.Value("string"))
    num_missing = column.count(None)
    if num_missing:
        data = with_note(data, f"{num_missing:,} without sound, which is zeros")
    return data


def with_subtitle_note(data, options):
    """The data with a note of how many examples have no subtitle, if these are read."""
    subtitles = data.column("subtitle")
    if "s" not in options.modalities or subtitles is None:
        return data
    num_missing = len([text for text in subtitles if not text])
    if num_missing:
        data = with_note(data, f"{num_missing:,} without a subtitle")
    return data


def video_folder(options, root=None):
    """The folder of the videos, or of their features.

    Args:
        root: the folder if no option names one.
    """
    if options.feature_dir:
        folder = options.feature_dir[0]
    else:
        folder = options.video_dir or options.data_dir or root
    return Path(folder).expanduser()


# ---- Data of annotated videos ----
def clips_of(name, split, rows, options, *, classes=None, clip=None, videos=None, **attributes):
    """Data of the rows of a reader.

    Rows of one (video, start, end, key) become one example with all their captions. Those without
    a caption or a video are left out and counted. The column label holds class names, or None.

    Args:
        classes: {column: class names}; None = those of the rows.
        clip: reads the videos; None = clip_options.
        videos: {name: path or None}; None = those of the folder.
        attributes: further fields of Data.
    """
    folder = video_folder(options)
    if videos is None:
        videos = Videos(folder)
    joined = join_rows(rows, videos)
    if not joined.examples:
        first = next(iter(joined.paths), "none")
        raise UserError(f"{name} ({split}): none of {len(joined.paths):,} videos is below {folder} "
                        f"(looked for {first}); --video-dir names their folder")
    table = table_of_rows(joined, classes or {})
    if clip is None:
        clip = clip_options(options)
    data = Data(name, split, table, clip=clip, **attributes)
    data = with_note(data, *left_out_notes(joined, folder, data.labels))
    if "a" in options.modalities:
        data = with_sounds_by_name(data, [video for video, *_ in joined.examples], options)
    return with_subtitle_note(data, options)


def with_sounds_by_name(data, videos, options):
    """As with_sound, of the files of sound below the folders of the data set that have the stems of
    these M videos."""
    stems = [without_ending(Path(video).name) for video in videos]
    sounds = {}
    for root in filter(None, (options.video_dir, options.data_dir)):
        sounds = sound_index(str(Path(root).expanduser())) | sounds
    files = []
    for stem in stems:
        file = None
        if stem in sounds:
            file = only_file(stem, sounds[stem])
        files.append(file)
    return with_sound(data, files)


class JoinedRows:
    """Rows of a reader, joined to examples, and what was left out."""

    def __init__(self):
        self.examples = {}  # {(video, start, end, key): row with a list of captions}
        self.paths = {}  # {video: path or None}
        self.labels = set()  # names of all classes, and None, also of missing videos
        self.num_without_caption = 0
        self.num_without_video = 0


def join_rows(rows, videos):
    """The JoinedRows of rows.

    Args:
        videos: {name: path or None}.
    """
    joined = JoinedRows()
    for row in rows:
        captions = caption_list(row["captions"])
        if not captions:
            joined.num_without_caption += 1
            continue
        video = row["video"]
        if video not in joined.paths:
            joined.paths[video] = videos[video]
        joined.labels.add(row.get("label"))
        if not joined.paths[video]:
            joined.num_without_video += 1
            continue
        example_key = (video, row.get("start"), row.get("end"), row.get("key"))
        example = joined.examples.setdefault(example_key, {**row, "captions": []})
        example["captions"] += captions
    return joined


def caption_list(captions):
    """The captions of a row, a text or a list of texts, that are not empty."""
    if not isinstance(captions, list):
        captions = [captions]
    captions = [caption.strip() for caption in captions if caption]
    return [caption for caption in captions if caption]


def table_of_rows(joined, classes):
    """The table of JoinedRows, with classes {column: class names}."""
    rows = list(joined.examples.values())
    columns = {}
    for column in rows[0]:
        if column not in ("captions", "start", "end", "key"):
            columns[column] = [row[column] for row in rows]
    if "key" not in rows[0]:  # else rows of one video have names of their own
        del columns["video"]
    classes = dict(classes)
    if "label" in columns:
        classes.setdefault("label", sorted(joined.labels - {None}))
        numbers = {label: k for k, label in enumerate(classes["label"])}
        columns["label"] = [numbers.get(label, -1) for label in columns["label"]]
    sources = []
    keys = []
    for video, start, end, key in joined.examples:
        sources.append({"path": joined.paths[video], "start": start, "end": end})
        keys.append(key or window_key(video, start, end))
    captions = [row["captions"] for row in rows]
    return make_table(captions, keys, sources, classes, **columns)


def left_out_notes(joined, folder, labels):
    """Yields what the banner says about what JoinedRows lack.

    Args:
        labels: (M,) of the examples, -1 = unknown, or None.
    """
    missing = [video for video, path in joined.paths.items() if not path]
    if missing:
        yield (f"{len(missing):,} videos ({joined.num_without_video:,} rows) are not in {folder}, "
               f"first {missing[0]}")
    if joined.num_without_caption:
        yield f"{joined.num_without_caption:,} without a caption left out"
    if labels is not None and -1 in labels:
        yield f"{(labels == -1).sum():,} without a class"
