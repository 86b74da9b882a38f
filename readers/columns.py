"""Tables: names of files, columns and splits that are known, and opening one through `datasets`."""

import contextlib
import re
from pathlib import Path

from engine.base import DISK, UserError, first_line, hub_reason, say_once

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
    """Names of the folders below a data folder that hold data: none that is hidden, empty, __MACOSX or of our runs."""
    below = [f for f in path.iterdir() if f.is_dir() and not f.name.startswith((".", "__"))]
    return [f.name for f in below if any(f.iterdir()) and not any(f.glob("*/args.json"))]


def split_words(name):
    """The splits that the words of a file's or folder's name say, train first: 'photos-train-00' -> ['train']."""
    words = re.split("[^a-z]+", name.lower())
    return [s for s, known in SPLIT_NAMES.items() if any(w in known for w in words)]


def split_of(word):
    """train, val or test for a folder's or file's word ('validation', 'testing', ...); None for any other."""
    return next(iter(split_words(word)), None)


def split_and_class(file):
    """(The first folder around a file that names a split, the innermost one inside that), "" where there is none."""
    folders = file.parts[:-1]
    k = next((k for k, word in enumerate(folders) if split_words(word)), -1)
    return folders[k] if k >= 0 else "", (folders[k + 1:] or ("",))[-1]


def plain_names(columns):
    """{name: column}, each by its own name and by that without capitals and blanks around it: ' Caption' is caption."""
    return {c.strip().lower(): c for c in columns} | {c: c for c in columns}


@contextlib.contextmanager
def quiet_datasets():
    """The library `datasets` without bars and without its own words for errors, which are said once, by us."""
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
    """What an error of `datasets`, and the one it came from, mean for a table; "" where that is not known."""
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
    """datasets.load_dataset, quietly, with its dozen kinds of errors as one line."""
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
    """How to get into a gated data set."""
    return (f"{name}: {repo} is gated: accept its terms on https://huggingface.co/datasets/{repo} and run `hf auth "
            "login`, or give a local copy with --data-dir")


class NoColumn(UserError):
    """A column that a flag names is not there; the flag is the first word."""
    option = property(lambda error: str(error).split()[0].removeprefix("--").replace("-", "_"))  # of load_data


def pick_column(flag, options, columns, usual, name, required=True):
    """The column a flag names, else the usual one that exists, in capitals or not; a wrong name lists those there."""
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


def class_column(options, table, name):
    """The column of the class, or None. One of lists or records, several classes an example, is said and not read."""
    label = pick_column("--label-column", options, table.column_names, LABEL_COLUMNS, name, required=False)
    if label is None or hasattr(table.features[label], "dtype"):
        return label
    several = f"{name} holds lists or records there, and an example has one class"
    if options.get("label_column"):
        raise UserError(f"--label-column {label}: {several}")
    say_once(f"WARNING: --label-column {label} is not read: {several}")
    return None


def is_class(label):
    """Does a label name a class? None, nothing, NaN and -1 do not."""
    return label is not None and label == label and str(label).strip() not in ("", "-1")


def clean_list(texts):
    """Captions as they come (one, several, None) -> those that say something, blanks at the ends cut off."""
    texts = texts if isinstance(texts, (list, tuple)) else [texts]
    return [str(t).strip() for t in texts if t is not None and t == t and str(t).strip()]  # NaN differs from itself
