"""Tables: the file types, column names and split names that are recognised, opening a table with `datasets`, rows of
one file, and classes of several splits."""

import contextlib
import dataclasses
import re
from pathlib import Path

import numpy as np

from contrastive.engine.base import DISK, UserError, first_line, hub_reason, say_once

IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif", "jp2", "ppm", "pgm")
VIDEO_TYPES = ("mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts", "m2ts", "wmv", "flv", "ogv", "3gp")
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "file_name", "filename", "filepath", "image_path",
                 "path")
VIDEO_COLUMNS = ("video", "video_path", "video_id", "clip_id")  # a path, a file name or its stem
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentence", "sentences", "title", "description")
LABEL_COLUMNS = ("label", "cls", "fine_label", "class")
WINDOW_COLUMNS = (("segment",), ("start", "end"), ("start_time", "end_time"), ("start_seconds", "end_seconds"))
SPLIT_NAMES = {"train": ("train", "training", "restval"), "val": ("validation", "valid", "val", "dev"),
               "test": ("test", "testing")}
SPLIT_WORDS = tuple(word for words in SPLIT_NAMES.values() for word in words)
TABLES = ("csv", "tsv", "txt", "token", "json", "jsonl", "parquet")  # files of paths and captions
PACKED = re.compile(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)  # names of compressed tars


def ending(path):
    """'jpg' of a.JPG."""
    return Path(path).suffix.lower().lstrip(".")


def is_video(path):
    """By the ending of its name."""
    return ending(path) in VIDEO_TYPES


def folders_of(path):
    """Names of the subfolders that hold data. Hidden and empty folders, __MACOSX and our own runs are left out."""
    below = [f for f in path.iterdir() if f.is_dir() and not f.name.startswith((".", "__"))]
    return [f.name for f in below if any(f.iterdir()) and not any(f.glob("*/args.json"))]


def split_words(name):
    """The splits named in a file's or folder's name, train first: 'photos-train-00' -> ['train']."""
    words = re.split("[^a-z]+", name.lower())
    return [s for s, known in SPLIT_NAMES.items() if any(w in known for w in words)]


def split_of(word):
    """train, val or test for a folder's or file's word ('validation', 'testing', ...); None for any other."""
    return next(iter(split_words(word)), None)


def split_and_class(file):
    """(outermost folder named after a split, innermost folder below it: the class) of a file; "" where one lacks."""
    folders = file.parts[:-1]
    k = next((k for k, word in enumerate(folders) if split_words(word)), -1)
    return folders[k] if k >= 0 else "", (folders[k + 1:] or ("",))[-1]


def plain_names(columns):
    """{name: column}, each under its own name and under its stripped lower-case name: ' Caption' is also caption."""
    return {c.strip().lower(): c for c in columns} | {c: c for c in columns}


@contextlib.contextmanager
def quiet_datasets():
    """Silences the bars and error messages of the library `datasets`: we report its errors ourselves, once."""
    import datasets
    logging, no_bars = datasets.utils.logging, datasets.are_progress_bars_disabled()
    level = logging.get_verbosity()
    logging.set_verbosity(50)  # not even errors
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if not no_bars:
            datasets.enable_progress_bars()


TABLE_ERRORS = {"corresponds to no data": "it has no rows", "BatchSize must be greater than 0": "it has no rows",
                "No (supported) data files": "nothing in it can be read; expected images, videos, tars or tables",
                "recursion depth": "nested too deeply; expected rows of image and caption",
                "decoding depth limit": "nested too deeply; expected rows of image and caption"}


def table_words(error, reason):
    """What an error of `datasets` (and `reason`, its cause) means for a table, in plain words; "" if unknown."""
    import datasets
    if isinstance(reason, UnicodeDecodeError) or "codec can't decode" in str(reason):
        return f"not UTF-8 text ({first_line(reason)}); save it as UTF-8"
    place, path = str(datasets.config.HF_DATASETS_CACHE), str(getattr(reason, "filename", None) or "-")
    ours = path.startswith(place) or place.startswith(path) or getattr(reason, "errno", None) in DISK
    if isinstance(reason, OSError) and (ours or "disk space" in str(reason)):
        why = reason.strerror or first_line(reason).split(".")[0]
        return f"the cache of `datasets` in {place} cannot be written: {why}; HF_DATASETS_CACHE names another folder"
    return next((words for sign, words in TABLE_ERRORS.items() if sign in f"{error} {reason}"), "")


def open_table(kind, name, gated="", **files):
    """datasets.load_dataset without its own output. Raises: UserError of one line for any of its many errors."""
    import datasets
    try:
        with quiet_datasets():
            return datasets.load_dataset(kind, **files)
    except Exception as error:
        reason = error.__cause__ or error
        if "gated" in f"{error} {reason}".lower():
            raise UserError(gated_message(name, gated or name)) from error
        raise UserError(f"--dataset {name}: {table_words(error, reason) or hub_reason(reason)}") from error


def gated_message(name, repo):
    """The message for a gated data set: how to get access."""
    return (f"{name}: {repo} is gated: accept its terms on https://huggingface.co/datasets/{repo} and run `hf auth "
            "login`, or give a local copy with --data-dir")


class NoColumn(UserError):
    """A flag names a column that the table does not have. The message begins with the flag."""
    option = property(lambda error: str(error).split()[0].removeprefix("--").replace("-", "_"))  # load_data's name


def pick_column(flag, options, columns, usual, name, required=True):
    """The column that a flag names, else the first usual name that exists in any case. NoColumn lists what exists."""
    wanted = options.get(flag.removeprefix("--").replace("-", "_"))
    named, there = plain_names(columns), ", ".join(columns) if len(columns) < 30 else f"{len(columns)} others"
    if wanted:
        if wanted not in named:
            raise NoColumn(f"{flag} {wanted}: {name} has no such column; it has: {there}")
        return named[wanted]
    found = next((named[c] for c in usual if c in named), None)
    if found is None and required:
        raise UserError(f"{flag} is needed: {name} has none of {', '.join(usual)}; it has: {there}")
    return found


def image_column(name, table, options):
    """The column of images or videos: decoded ones before paths, unless --image-column names it."""
    pixels = [c for c, f in table.features.items() if type(f).__name__ in ("Image", "Video")]
    usual = pixels or IMAGE_COLUMNS + VIDEO_COLUMNS
    return pick_column("--image-column", options, table.column_names, usual, name)


def class_column(options, table, name):
    """The class column, or None. A column of lists or records (several classes per row) is ignored with a warning."""
    label = pick_column("--label-column", options, table.column_names, LABEL_COLUMNS, name, required=False)
    if label is None or hasattr(table.features[label], "dtype"):
        return label
    several = f"{name} holds lists or records there, and an example has one class"
    if options.get("label_column"):
        raise UserError(f"--label-column {label}: {several}")
    say_once(f"WARNING: --label-column {label} is not read: {several}")
    return None


def is_class(label):
    """Whether a label names a class; None, an empty text, NaN and -1 do not."""
    return label is not None and label == label and str(label).strip() not in ("", "-1")


def clean_list(texts):
    """A caption, a list of captions or None -> the list of those that are not empty, stripped."""
    texts = texts if isinstance(texts, (list, tuple)) else [texts]
    return [str(t).strip() for t in texts if t is not None and t == t and str(t).strip()]  # NaN differs from itself


def merge_rows(name, paths, sizes, captions, labels):
    """Gives the captions of all rows of a file to its first row, in place, and returns how many rows have none by that.
    A file of several classes has none (-1). Images inside a table (their sizes are not None) are only warned of."""
    first, merged, twins, several = {}, 0, 0, set()
    for i, (path, size) in enumerate(zip(paths, sizes)):
        k = first.setdefault((path, size), i)
        if path is None or k == i:
            continue
        if size is not None:  # the name of an image inside a table may mean nothing
            twins += 1
            continue
        merged += 1
        captions[k] += [t for t in captions[i] if t not in captions[k]]
        captions[i] = []
        if labels and labels[k] == -1:
            labels[k] = labels[i]
        elif labels and labels[i] not in (-1, labels[k]):
            several.add(k)
    for k in several:
        labels[k] = -1
    if several:
        say_once(f"WARNING: {name}: {len(several):,} images have rows of several classes and count as without a class, "
                 f"first {paths[min(several)]}")
    if twins:
        say_once(f"WARNING: {name}: {twins:,} rows have an image of the same name and size as another row: if they "
                 "are one image, they are negatives of each other; write one row per image with a list of captions")
    return merged


def same_classes(splits):
    """Gives all splits one list of class names and renumbers their labels, since a split may lack a class."""
    known = {s: d for s, d in splits.items() if d.label_names}
    names = sorted({n for d in known.values() for n in d.label_names})
    if len({tuple(d.label_names) for d in known.values()}) < 2:
        return splits
    for s, d in known.items():
        number = np.array([*(names.index(n) for n in d.label_names), -1])  # (classes + 1,) old -> new; -1 is the last
        splits = splits | {s: with_classes(d, number[d.labels], names)}
    return splits


def with_classes(data, labels, names):
    """The data with new labels, (M,) numbers, and new class names."""
    import datasets
    named = datasets.ClassLabel(names=names)
    table = data.table.remove_columns("label").add_column("label", labels, feature=named)  # a cast copies all rows
    return dataclasses.replace(data, table=table)
