"""Folders of the user: the files in them, also behind links; the split of each, by the words in
names; and class folders and files of metadata as tables."""

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple

from contrastive.core.processes import UserError
from contrastive.core.words import counted
from contrastive.data.hub import read_files, read_repository, table_kind
from contrastive.data.pixels import IMAGE_TYPES, VIDEO_TYPES

import numpy as np

SPLIT_WORDS = {
    "train": "train", "training": "train", "trainval": "train",
    "val": "val", "valid": "val", "validation": "val", "validate": "val", "dev": "val",
    "development": "val",
    "test": "test", "testing": "test",
    "eval": "eval", "evaluation": "eval", "holdout": "eval", "heldout": "eval"}
FILE_WORDS = ("set", "sets", "data", "split", "splits", "image", "images", "img", "imgs", "photos",
              "video", "videos", "sample", "samples", "file", "files", "folder", "dir")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
ARCHIVES = (".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".7z", ".rar")
# descriptions that the library datasets, or a model, leaves beside tables
NOT_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json",
            "state.json")
# names and endings of descriptions, and of what systems add
NO_SAMPLES = ("readme", "license", ".md", "thumbs.db", "desktop.ini")


# ---- files ----
def files_below(folder):
    """Paths of all files below a folder, as walk_once finds them."""
    files, _ = walk_once(folder)
    return files


def walk_once(folder):
    """Paths of all files below a folder, in no order, and the links to folders that are passed
    over, since each folder is read once.

    What macOS adds, files ._NAME and folders __MACOSX, is no file of the user.
    """
    files = []
    repeated_links = []
    visited = set()
    starts = [str(folder)]
    for start in starts:  # grows by the links to folders, which come after the folders themselves
        for parent, folders, names in os.walk(start):
            real = os.path.realpath(parent)
            if real in visited:
                repeated_links.append(parent)
                folders.clear()
                continue
            visited.add(real)
            if "__MACOSX" in folders:
                folders.remove("__MACOSX")
            for name in sorted(folders):
                if os.path.islink(os.path.join(parent, name)):
                    starts.append(os.path.join(parent, name))
            for name in names:
                if not name.startswith("._"):
                    files.append(os.path.join(parent, name))
    return files, repeated_links


def media_kind(path):
    """Image or Video by the ending of a file's name; None of any other file."""
    ending = os.path.splitext(path)[1][1:].lower()
    if ending in VIDEO_TYPES:
        return "Video"
    if ending in IMAGE_TYPES:
        return "Image"
    return None


def is_hidden(path):
    """Whether a path has a part that the library `datasets` passes over: .NAME or, of a folder,
    __NAME."""
    *folders, name = path.split(os.sep)
    if name.startswith("."):
        return True
    return any(folder.startswith((".", "__")) for folder in folders)


class FolderFiles(NamedTuple):
    """The files below a folder by their kinds, each sorted by its path."""

    media: dict  # {Image or Video: paths}
    tars: list
    metadata: list
    tables: dict  # {kind: paths} of csv, json and parquet files
    archives: list  # which are not read
    num_hidden: int  # images and videos in hidden folders, or with hidden names
    others: list  # of unknown kinds
    repeated_links: list  # to folders that are read already

    def notes(self):
        """What the banner says of hidden files, of archives and of links."""
        notes = []
        if self.repeated_links:
            notes.append(f"{counted(len(self.repeated_links), 'links')} to folders that are read "
                         f"already, passed over, first {self.repeated_links[0]}")
        if self.num_hidden:
            notes.append(f"{self.num_hidden:,} hidden images or videos are not read")
        if self.archives:
            notes.append(f"{counted(len(self.archives), 'archives')} not read (unpack them), first "
                         + self.archives[0])
        return notes


def sort_files(folder):
    """The FolderFiles of a folder."""
    paths, repeated_links = walk_once(folder)
    files = FolderFiles({"Image": [], "Video": []}, [], [], {}, [], 0, [], repeated_links)
    num_hidden = 0
    start = len(str(folder)) + 1
    for path in sorted(paths):
        name = os.path.basename(path)
        kind = media_kind(path)
        if is_hidden(path[start:]):
            num_hidden += kind is not None
        elif kind is not None:
            files.media[kind].append(path)
        elif name.endswith(".tar"):
            files.tars.append(path)
        elif name.lower().endswith(ARCHIVES):
            files.archives.append(path)
        elif name in METADATA:
            files.metadata.append(path)
        elif table_kind(name) and name not in NOT_DATA:
            files.tables.setdefault(table_kind(name), []).append(path)
        elif name not in NOT_DATA and not describes(name):
            files.others.append(path)
    return files._replace(num_hidden=num_hidden)


def describes(name):
    """Whether a file is a description such as README.md, or was added by the system."""
    name = name.lower()
    return name.startswith(NO_SAMPLES) or name.endswith(NO_SAMPLES)


def most_frequent(files):
    """(kind, paths) of the longest list of {kind: paths}; of equal ones the last kind by name:
    Video before Image, parquet before json and csv."""
    return max(files.items(), key=lambda item: (len(item[1]), item[0]), default=(None, []))


def holds_tars(path):
    """Whether a file is a tar, or a folder has at least as many tars as images and videos."""
    if not path.is_dir():
        return path.suffix == ".tar"
    files = sort_files(path)
    num_media = sum(map(len, files.media.values()))
    return len(files.tars) > 0 and len(files.tars) >= num_media


# ---- words for splits ----
def words_of(name):
    """The words of a name in lower case, also of camelCase; trainset and traindata are train."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", " ", str(name)).lower()
    words = []
    for word in re.findall("[a-z]+", name):
        stem = re.sub(f"({'|'.join(FILE_WORDS)})$", "", word)
        if stem in SPLIT_WORDS:
            word = stem
        words.append(word)
    return words


def split_of_name(name):
    """train, val, test or eval, if a name has words of one of them alone; else None."""
    splits = {SPLIT_WORDS[word] for word in words_of(name) if word in SPLIT_WORDS}
    if len(splits) == 1:
        return splits.pop()
    return None


def find_split_column(columns):
    """The column split, in whatever case; None if there is none."""
    for column in columns:
        if column.lower() == "split":
            return column
    return None


def settle_eval(splits):
    """{name: split} with test in place of eval, or val where others are test; None where others
    are both."""
    words = ("test", "val", None)
    evaluation = next(split for split in words if split not in splits.values())
    settled = {}
    for name, split in splits.items():
        if split == "eval":
            split = evaluation
        settled[name] = split
    return settled


def refuse_trainval(splits):
    """Raises UserError if {name: split} has train by the word trainval beside val."""
    if "val" not in splits.values():
        return
    for name, split in splits.items():
        if split == "train" and "trainval" in words_of(name):
            raise UserError(f"{name}: trainval holds the rows of val, too, and there is a split "
                            "val; leave one of them out")


def split_of_parts(path, parts):
    """The split_of_name of the parts of a path. Raises: UserError if they name two splits."""
    splits = {split_of_name(part) for part in parts} - {None}
    if len(splits) > 1:
        raise UserError(f"{path}: is it {' or '.join(sorted(splits))}? Its parts name both; rename "
                        "one of them")
    if splits:
        return splits.pop()
    return None


def splits_of_paths(paths):
    """{path: split} of paths that begin at one folder, by the words in the names of their parts.

    What all paths share counts unless the rest of each names a split. Where train alone is named,
    all is train; beside val or test, None is a path without a word.
    Raises: UserError for a path that names two splits, or trainval beside val.
    """
    parts = {path: path.split(os.sep) for path in paths}
    num_shared = len(os.path.commonprefix(list(parts.values())))
    splits = {path: split_of_parts(path, parts[path][num_shared:]) for path in parts}
    if None in splits.values():
        splits = {path: split_of_parts(path, parts[path]) for path in parts}
    splits = settle_eval(splits)
    refuse_trainval({os.sep.join(parts[path][num_shared:]): splits[path] for path in parts})
    if set(splits.values()) <= {"train", None}:
        return dict.fromkeys(parts, "train")
    return splits


def refuse_without_split(folder, splits):
    """Raises UserError naming the paths of {path: split} that name no split, if there are any."""
    if None not in splits.values():
        return
    unassigned = sorted(path for path in splits if splits[path] is None)
    assigned = sorted(path for path in splits if splits[path] is not None)
    raise UserError(
        f"{folder}: {', '.join(unassigned[:3])} belongs to no split, beside "
        f"{', '.join(assigned[:3])}: give each a name with train, val or test, or move it away")


# ---- tables ----
class Tables(NamedTuple):
    """Tables of the user's data."""

    splits: dict  # {word for a split: datasets.Dataset}
    notes: tuple = ()  # what the banner says of files that are not read
    from_hub: bool = False  # whether their files lie in the cache of the hub


def read_tables(source, revision=None):
    """The Tables of a file or folder (Path) or of a hub id (str).

    Args:
        revision: commit, branch or tag of a hub id.
    """
    if not isinstance(source, Path):
        return Tables(read_repository(source, revision), from_hub=True)
    if source.is_file():
        return Tables(read_files({"train": [str(source)]}))
    if names_its_files(source):
        return Tables(read_repository(source))
    return read_folder(os.path.abspath(source))


def names_its_files(folder):
    """Whether README.md, as the card of a data set, says which files are which split."""
    return bool(configs_of_card(folder))


def configs_of_card(folder):
    """What README.md, as the card of a data set, says of its files: a list of dicts, or none."""
    from huggingface_hub import DatasetCard

    card = folder / "README.md"
    if not card.is_file() or "configs" not in card.read_text(encoding="utf8", errors="replace"):
        return []
    return DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs") or []


def splits_of_card(folder):
    """The splits train, val and test that README.md names."""
    splits = set()
    for config in configs_of_card(folder):
        files = config.get("data_files")
        if isinstance(files, list):
            names = [item.get("split") for item in files if isinstance(item, dict)]
            splits.update(settle_eval({name: split_of_name(name) for name in names}).values())
    return splits - {None}


def read_folder(folder):
    """The Tables of a folder: its files of metadata, class folders or tables, whichever there are
    most of; the library `datasets` reads folders of other files."""
    files = sort_files(folder)
    _, table_files = most_frequent(files.tables)
    _, media = most_frequent(files.media)
    notes = files.notes()
    if files.metadata:
        notes += notes_on_tables(files.tables)
        return read_metadata(folder, files, notes)
    if not media and not table_files:
        if files.archives:
            raise UserError(f"{folder}: nothing in it can be read; unpack {files.archives[0]}")
        return Tables(read_repository(Path(folder)), tuple(notes))
    if len(media) > len(table_files):
        notes += notes_on_tables(files.tables)
        return read_class_folders(folder, files, notes)
    if media:
        notes.append("images and videos beside the tables are read where these name them")
    return read_table_files(folder, files.tables, notes)


def notes_on_tables(tables):
    """What the banner says of the tables, {kind: paths}, that are not read."""
    notes = []
    for kind, paths in tables.items():
        notes.append(f"{counted(len(paths), f'{kind} tables')} not read, first {paths[0]}")
    return notes


def notes_on_others(paths):
    """What the banner says of files of unknown kinds that are not read."""
    if not paths:
        return []
    return [f"{counted(len(paths), 'other files')} not read, first {paths[0]}"]


def read_table_files(folder, tables, notes):
    """The Tables of the most frequent kind of {kind: paths}, of which each is in one split. Others
    are counted. Raises: UserError if one of these names a split that would be held out then."""
    kind, files = most_frequent(tables)
    others = {other: paths for other, paths in tables.items() if other != kind}
    notes += notes_on_tables(others)
    names = {os.path.relpath(file, folder): file for file in files}
    splits = {}
    unassigned = []
    for name, split in splits_of_paths(names).items():
        if split is None:
            unassigned.append(name)
        else:
            splits.setdefault(split, []).append(names[name])
    for path in itertools.chain(*others.values()):
        split = split_of_name(os.path.basename(path))
        if split is not None and split not in splits:
            raise UserError(f"{path} would not be read, since most tables of the folder are "
                            f"{kind}: write it as {kind}, or move it away")
    if unassigned:
        notes.append(f"{len(unassigned):,} tables name no split and are not read, first "
                     + unassigned[0])
    return Tables(read_files(splits), tuple(notes))


def read_class_folders(folder, files, notes):
    """The Tables of images or videos whose folders are their classes; folders of splits are above
    these.

    Args:
        files: FolderFiles.
    """
    import datasets

    kind, media = most_frequent(files.media)
    _, table_files = most_frequent(files.tables)
    num_others = sum(map(len, files.media.values())) - len(media)
    if num_others:
        notes.append(f"{num_others:,} files are not read, since most are {kind.lower()}s")
    notes += notes_on_others(files.others)
    relative_folders = folders_of(media, folder)
    class_folders = list(relative_folders.values())
    check_class_folders(folder, [path.split(os.sep) for path in class_folders], table_files)
    splits = splits_of_paths({os.path.dirname(path) for path in class_folders})
    refuse_without_split(folder, splits)
    notes += notes_on_classes(class_folders, splits)

    rows = {}  # {split: (paths, classes)}
    for path in media:
        parent, name = os.path.split(relative_folders[os.path.dirname(path)])
        paths, classes = rows.setdefault(splits[parent], ([], []))
        paths.append(path)
        classes.append(name)
    names = sorted({os.path.basename(path) for path in class_folders})
    features = datasets.Features(
        {kind.lower(): getattr(datasets, kind)(), "label": datasets.ClassLabel(names=names)})
    tables = {}
    for split, (paths, classes) in rows.items():
        content = {kind.lower(): paths, "label": classes}
        tables[split] = datasets.Dataset.from_dict(content, features=features)
    return Tables(tables, tuple(notes))


def notes_on_classes(class_folders, splits):
    """What the banner says of classes whose images are in several folders of one split.

    Args:
        class_folders: paths below one folder.
        splits: {folder above class folders: split}.
    """
    folders = {}  # {(split, class): class folders}
    for path in class_folders:
        parent, name = os.path.split(path)
        folders.setdefault((splits[parent], name), []).append(path)
    joined = [paths for paths in folders.values() if len(paths) > 1]
    if not joined:
        return []
    first, second, *_ = joined[0]
    return [f"{counted(len(joined), 'class names')} of several folders, which are one class: first "
            f"{first} and {second}"]


def folders_of(paths, folder):
    """{folder of a file: its path below `folder`} of all files."""
    folders = {os.path.dirname(path) for path in paths}
    return {path: os.path.relpath(path, folder) for path in sorted(folders)}


def check_class_folders(folder, class_folders, table_files):
    """Raises UserError unless there are several classes, all in folders at one depth.

    Args:
        class_folders: the parts of the folder of each class.
        table_files: csv, json or parquet files below the folder, which are not read.
    """
    help_text = ("images or videos are described by a folder for each class, or by a metadata.csv "
                 "with the columns file_name and caption or label")
    if table_files:
        help_text += f"; --dataset {table_files[0]} reads this table"
    by_depth = {}
    for parts in class_folders:
        by_depth[len([part for part in parts if part != "."])] = os.sep.join(parts)
    if 0 in by_depth:
        raise UserError(f"{folder}: some files are in no class folder; {help_text}")
    if len(by_depth) > 1:
        first, second, *_ = by_depth.values()
        raise UserError(f"{folder}: class folders are at different depths, such as {first} and "
                        f"{second}; {help_text}")
    names = sorted({parts[-1] for parts in class_folders})
    if len(names) == 1:
        raise UserError(f"{folder}: {names[0]} is its only class folder, so that there is nothing "
                        f"to tell apart; {help_text}")
    further_words = set()  # beside those for a split
    for name in names:
        words = [word for word in words_of(name) if word not in (*SPLIT_WORDS, *FILE_WORDS)]
        further_words.add(tuple(words))
    splits = {split_of_name(name) for name in names}
    if None not in splits and len(splits) > 1 and len(further_words) == 1:
        raise UserError(f"{folder}: {', '.join(names)} are splits, not classes, but there are no "
                        f"class folders in them; {help_text}")


def read_metadata(folder, files, notes):
    """The Tables of the files of metadata below a folder. The folder of an image or video says
    which split it is of; files in no row, and rows without a file, are counted."""
    import datasets

    media = set(files.media["Image"] + files.media["Video"])
    table, paths = join_metadata(files.metadata)
    extra_files = sorted(media - set(paths))
    if extra_files:
        notes.append(f"{len(extra_files):,} images or videos are in no row of the metadata, first "
                     + extra_files[0])
    notes += notes_on_others(sorted(set(files.others) - set(paths)))
    is_there = np.array([path in media or os.path.isfile(path) for path in paths], bool)
    missing = [paths[row] for row in np.flatnonzero(~is_there)]
    if missing:
        notes.append(f"{len(missing):,} rows name files that are not there, first {missing[0]}")
    rows = np.flatnonzero(is_there)
    paths = [paths[row] for row in rows]

    kind = "Image"
    if "Video" in map(media_kind, paths):
        kind = "Video"
    column = kind.lower()
    table = table.select(rows)
    if column in table.column_names:
        table = table.remove_columns(column)
    table = table.add_column(column, paths).cast_column(column, getattr(datasets, kind)())
    has_column = find_split_column(table.column_names) is not None
    splits = np.array(splits_of_files(folder, paths, has_column))
    tables = {}
    for split in np.unique(splits).tolist():
        tables[split] = table.select(np.flatnonzero(splits == split))
    return Tables(tables, tuple(notes))


def join_metadata(files):
    """The rows of all files of metadata in one table, and the path of the file of each row."""
    import datasets

    tables = []
    paths = []
    for file in files:
        table = read_files({"train": [file]})["train"]
        columns = [name for name in table.column_names if name.endswith("file_name")]
        if not columns:
            raise UserError(f"{file}: it has no column file_name; there are: "
                            + ", ".join(table.column_names))
        column = columns[0]
        if "file_name" in columns:
            column = "file_name"
        for name in table[column][:]:
            path = os.path.join(os.path.dirname(file), name or "")
            paths.append(os.path.normpath(path))
        tables.append(table.remove_columns(column))
    return datasets.concatenate_datasets(tables), paths


def splits_of_files(folder, paths, has_column):
    """The split of each path by the folders below `folder`.

    Args:
        has_column: whether a column `split` divides the rows where folders do not.
    """
    relative_folders = folders_of(paths, folder)
    splits = splits_of_paths(relative_folders.values())
    if has_column and None in splits.values():
        splits = dict.fromkeys(splits, "train")
    refuse_without_split(folder, splits)
    return [splits[relative_folders[os.path.dirname(path)]] for path in paths]
