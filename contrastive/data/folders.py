"""Folders of the user: the files in them, also behind links; the split of each, by names; and class
folders and files of metadata as tables."""

import functools
import itertools
import os
import re
from pathlib import Path

from contrastive.core.processes import UserError
from contrastive.core.words import shortened
from contrastive.data.pixels import media_kind
from contrastive.data.table_files import TABLE_TYPES, join_tables, read_table

SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
               "test": "test"}
# train2017, test-00000-of-00003 and, as `datasets` once wrote it, -0123456789abcdef behind that
NUMBERS = re.compile(r"([-_.]?\d+)+(-of-\d+(-[0-9a-f]{16})?)?$")
# names that speak of a split in other words; a blank is between two words
LIKE_A_SPLIT = re.compile(
    r"\b(train|test|valid|eval|hold ?out|held ?out|(val|dev)(set|data|elopment)?\b)")
# an entry in the card of a data set, YAML or JSON, that assigns files to splits
CONFIGS = re.compile(r"""(?m)^[\s{"']*configs["']?:""")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FORMS = ("a folder for each class, in train/, val/ and test/ or without these; a metadata.csv with "
         "file_name and caption or label; tables called train, val and test; or tars")


# ---- files ----
def files_below(folder, *, refuses_links=False):
    """Paths of all files below a folder, also behind links, except names that begin with a dot.

    Each folder is read once.
    Args:
        refuses_links: whether a second way to a folder, by a link, is a UserError.
    """
    files = []
    first_paths = {}  # {real path of a folder: the path by which it was read}
    for parent, folders, names in os.walk(str(folder), followlinks=True):
        first_path = first_paths.setdefault(os.path.realpath(parent), parent)
        if first_path != parent and refuses_links:
            raise UserError(f"{parent} and {first_path} are one folder, by a link; remove the link")
        if first_path != parent:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                files.append(os.path.join(parent, name))
    for file in files:
        if not file.isascii():
            check_name(file)
    return files


def check_name(path):
    """Raises UserError if the name of a file is not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        readable = os.fsencode(path).decode("utf8", "backslashreplace")
        raise UserError(f"{readable}: its name is not UTF-8; rename it") from None


def sort_files(folder):
    """{kind: sorted paths below the folder} of the kinds image, video, tar, metadata, table and
    other. Raises: UserError for a data card that says which files are which split."""
    files = {kind: [] for kind in ("image", "video", "tar", "metadata", "table", "other")}
    for path in sorted(files_below(folder, refuses_links=True)):
        name = os.path.basename(path)
        kind = media_kind(path)
        if name.endswith(".tar"):
            kind = "tar"
        elif name in METADATA:
            kind = "metadata"
        elif Path(name).suffix in TABLE_TYPES:
            kind = "table"
        files[kind or "other"].append(path)
    card = Path(folder, "README.md")
    if card.is_file() and CONFIGS.search(card.read_text(encoding="utf8", errors="replace")):
        raise UserError(f"{card} says which files are which split, which is not read: give a folder"
                        " with the files alone, or the hub id")
    refuse_mixtures(folder, files)
    refuse_empty_splits(folder, files)
    return files


def refuse_empty_splits(folder, files):
    """Raises UserError for a folder with the name of a split, but no file, since a part of train
    would take its place."""
    paths = list(itertools.chain(*files.values()))
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        is_split = os.path.isdir(path) and name.lower() in SPLIT_WORDS
        if is_split and not any(file.startswith(path + os.sep) for file in paths):
            raise UserError(f"{path} has no file; remove it if a part of train may take its place")


# ---- names of splits ----
def split_of_name(name):
    """train, val or test, if a name is a word for it, in any case and with or without a number
    behind it; None of a name that is about no split. Raises: ValueError for one that may be."""
    word = NUMBERS.sub("", name.strip().lower())
    if word in SPLIT_WORDS:
        return SPLIT_WORDS[word]
    if is_like_a_split(name):
        raise ValueError(f"the name {shortened(name)} seems to mean a split, but is none of "
                         f"{', '.join(SPLIT_WORDS)}: rename it")
    return None


def is_like_a_split(name):
    """Whether a name has a word for a split, or one that begins so."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()
    return LIKE_A_SPLIT.search(re.sub("[^a-z]+", " ", name)) is not None


@functools.cache
def split_of_path(path):
    """The split that a part of a path names, None if none does. Raises: UserError for two."""
    splits = {split_of_name(part) for part in path.split(os.sep)} - {None}
    if len(splits) > 1:
        raise UserError(f"{path} names both {' and '.join(sorted(splits))}: rename a part of it")
    return next(iter(splits), None)


def sort_by_split(folder, files):
    """{split: files}, by the parts of their paths below the folder; None is of no split."""
    splits = {}
    for file in files:
        path = os.path.splitext(os.path.relpath(file, folder))[0]
        splits.setdefault(split_of_path(path), []).append(file)
    return splits


def train_if_unnamed(splits, paths=None):
    """{split: [path, ...]} with train in place of None.

    Args:
        paths: of all rows, if `splits` has row numbers.
    Raises: ValueError if some are of no split beside others.
    """
    if None not in splits:
        return splits
    if len(splits) > 1:
        first = splits[None][0]
        if paths is not None:
            first = paths[first]
        raise ValueError(f"{shortened(first, 200)} names no split, as others do: it, or a folder "
                         "around it, needs the name train, val or test; or move it away")
    return {"train": splits[None]}


# ---- tables ----
def read_folder(folder, files):
    """({split: table}, files that are not read) of the files of a folder, without tars. The tables
    have one column image or video, whose paths begin at the folder."""
    media = files["image"] + files["video"]
    if not files["metadata"]:
        refuse_caption_files(folder, media, files["table"] + files["other"])
    if files["metadata"]:
        tables, named_files = read_metadata(folder, files["metadata"])
        return tables, sorted({*files["other"], *media} - named_files)
    if files["table"]:
        return read_tables(folder, files["table"]), files["other"]
    if media:
        return read_class_folders(folder, media), files["other"]
    raise UserError(f"{folder} has no file that can be read, but needs {FORMS}")


def refuse_mixtures(folder, files):
    """Raises UserError if the {kind: paths} of a folder may be read in two ways."""
    media = files["image"] + files["video"]
    tables = files["metadata"] + files["table"]
    pairs = [(files["tar"], media), (files["metadata"], files["table"])]
    if not tables:
        pairs.append((files["image"], files["video"]))
    for first, second in pairs:
        if first and second:
            raise UserError(f"{folder} has both {first[0]} and {second[0]}, which are read in "
                            "different ways: move one kind away, or give it alone")


def read_tables(folder, files):
    """{split: table} of tables that are named after splits."""
    splits = sort_by_split(folder, files)
    if None in splits:
        raise UserError(f"{splits[None][0]} names no split: call it train, val or test, give it "
                        f"alone (--dataset {splits[None][0]}), or move it away")
    tables = {}
    for split, paths in splits.items():
        tables[split] = join_tables([read_table(path) for path in paths])
    return tables


def refuse_caption_files(folder, media, other_files):
    """Raises UserError if captions seem to lie beside images or videos: NAME.jpg and NAME.txt. The
    names of the folders would be the captions."""
    texts = {}  # {path without ending: path}
    for file in other_files:
        if file.endswith((".txt", ".caption", ".json")):
            texts[os.path.splitext(file)[0]] = file
    for file in media:
        text = texts.get(os.path.splitext(file)[0])
        if text is not None:
            raise UserError(f"{text} beside {os.path.basename(file)} is not read: write {folder}"
                            "/metadata.csv with the columns file_name and caption, or tars")


def read_class_folders(folder, files):
    """{split: table} of images or videos whose folders are their classes."""
    import datasets

    kind = media_kind(files[0])
    rows = {}  # {split: {column: values}}
    class_folders = set()
    for file in files:
        path = os.path.relpath(file, folder)
        parents = path.split(os.sep)[:-1]
        split = "train"
        if len(parents) == 2:
            split = split_of_name(parents[0])
        if split is None or len(parents) not in (1, 2):
            raise UserError(f"{file} is not in a class folder of {folder}, or of train/, val/ and "
                            f"test/ in it; images or videos need {FORMS}")
        name = parents[-1]
        class_folders.add((len(parents), name))
        columns = rows.setdefault(split, {kind: [], "label": []})
        columns[kind].append(path)
        columns["label"].append(name)
    check_classes(folder, class_folders)

    names = sorted({name for _, name in class_folders})
    features = datasets.Features(
        {kind: datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    tables = {}
    for split, columns in rows.items():
        tables[split] = datasets.Dataset.from_dict(columns, features=features)
    return tables


def check_classes(folder, class_folders):
    """Raises UserError unless {(depth, name)} are two classes or more, at one depth, and no
    splits."""
    names = sorted({name for _, name in class_folders})
    splits = {SPLIT_WORDS.get(name.lower()) for name in names} - {None}
    if len(splits) > 1 or all(map(is_like_a_split, names)):
        raise UserError(f"{folder}: {', '.join(names[:5])} seem to be splits, but have no class "
                        f"folders; images or videos need {FORMS}")
    if len(names) == 1:
        raise UserError(f"{folder}: {names[0]} is its only class folder, so there is nothing to "
                        f"tell apart; images or videos need {FORMS}")
    if len({depth for depth, _ in class_folders}) > 1:
        raise UserError(f"{folder}: some class folders are in train/, val/ or test/, others are "
                        "not; move one kind away")


def read_metadata(folder, files):
    """({split: table}, paths that they name) of files of metadata. The folders of an image or
    video say which split it is of."""
    tables = []
    paths = []  # path of each row's file, below the folder
    for file in files:
        table = read_table(file)
        if "file_name" not in table.column_names:
            raise UserError(f"{file} has no column file_name; it has: "
                            + ", ".join(table.column_names))
        parent = os.path.relpath(os.path.dirname(file), folder)
        for name in table["file_name"][:]:
            path = ""
            if name:
                path = os.path.normpath(os.path.join(parent, name))
            paths.append(path)
        tables.append(table.remove_columns("file_name"))
    kind = media_kind(next(filter(None, paths), "")) or "image"
    table = join_tables(tables).add_column(kind, paths)

    rows = {}  # {split: row numbers}
    for row, path in enumerate(paths):
        rows.setdefault(split_of_path(os.path.dirname(path)), []).append(row)
    result = {}
    for split, numbers in train_if_unnamed(rows, paths).items():
        result[split] = table.select(numbers)
    return result, {os.path.join(folder, path) for path in paths}
