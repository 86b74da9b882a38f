"""The user's own data: a table, a folder or a hub id. Its rows become the examples of Data: those
of one image, or of one window of a video, are one example with all their captions.

docs/data.md has the forms that are read. What looks like another form is refused.
"""

import dataclasses
import hashlib
import itertools
import os
import re
from pathlib import Path

from contrastive.core.processes import opening
from contrastive.core.words import counted, listed, shortened
from contrastive.data.annotations import Videos, video_folder, with_sound
from contrastive.data.clips import clip_options
from contrastive.data.folders import (
    SPLIT_WORDS, files_below, is_like_a_split, read_folder, sort_by_split, sort_files,
    split_of_name, train_if_unnamed)
from contrastive.data.hub import has_tars, hub_folder, open_repository
from contrastive.data.pixels import media_kind
from contrastive.data.registry import SPLITS
from contrastive.data.table import Data, make_table, window_key, with_column, with_note
from contrastive.data.table_files import (
    TEXT_OF_CONTAINER, find_column, generating, join_tables, read_table)
from contrastive.data.tars import open_tars

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NO_CLASS = ("", "-1")  # how tables write an unknown class
NUMBER_OF_PANDAS = re.compile(r"-?\d+\.0|[Nn]a[Nn]")  # where an int column has empty cells
SECONDS = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
MANY_SPLITS = 10  # a column with more words does not divide the rows into splits
HASHED_AT_ONCE = 100  # images of a table that are in memory while they are hashed
NEEDS_CLASSES = (
    "; methods without texts need classes; temo.py, ncl.py, mmts.py and mama.py read captions")


def open_user_data(name, options):
    """{split: Data} of a table, tars, a folder or a hub id, with the splits that it has."""
    with opening(f"--dataset {name}"):
        tables, tars, not_read = read_source(name, options.revision or None)
        if tars:
            splits = open_tars(name, tars, options)
        else:
            splits = data_of_tables(name, tables, options, options.data_dir or folder_of(name))
    if not_read:
        note = f"{counted(len(not_read), 'files')} not read, first {not_read[0]}"
        splits = {split: with_note(data, note) for split, data in splits.items()}
    return splits


def folder_of(name):
    """The folder where the paths of a table or folder begin; "" of a hub id."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.parent
    if path.is_dir():
        return path
    return ""


def read_source(name, revision=None):
    """({split: table}, {split: tars}, what is not read) of a path or a hub id: tables or tars."""
    path = Path(name).expanduser()
    if path.suffix == ".tar":
        return {}, {"train": [str(path)]}, []
    if path.is_file():
        return {"train": read_table(path)}, {}, []
    if not path.is_dir():
        return read_hub(name, revision)
    folder = os.path.abspath(path)
    files = sort_files(folder)
    if files["tar"]:
        tars = train_if_unnamed(sort_by_split(folder, files["tar"]))
        return {}, tars, files["metadata"] + files["table"] + files["other"]
    tables, not_read = read_folder(folder, files)
    return tables, {}, not_read


def read_hub(name, revision):
    """As read_source, of a hub id; its splits with other names are not read."""
    builder = open_repository(name, revision)
    if has_tars(builder):
        folder = hub_folder(name, ["*.tar"], revision)
        tars = [file for file in files_below(folder) if file.endswith(".tar")]
        return {}, train_if_unnamed(sort_by_split(folder, sorted(tars))), []
    with generating():
        builder.download_and_prepare()
    tables = {}
    not_read = []
    for word, table in builder.as_dataset().items():
        split = SPLIT_WORDS.get(word.lower())
        if split is None:
            not_read.append(f"the split {word}")
        else:
            tables[split] = table
    if not tables:
        raise ValueError(f"it has no split train, validation or test, but {', '.join(not_read)}")
    return tables, {}, not_read


# ---- the rows of a table ----
@dataclasses.dataclass
class Rows:
    """The rows of all tables of the user, one list for each column, as long as the tables together.

    Rows that are left out are still in the lists.
    """

    names: list  # names of the images or videos, "" = none
    captions: list  # lists of texts
    labels: list  # names of classes, None = unknown
    splits: list = ()
    # number of each row in the table of its split
    numbers: list = dataclasses.field(default_factory=list)
    pictures: object = None  # table of the column source if the files are inside, else None
    label_names: list = None  # names of all classes in the order of the table, if it has one
    has_captions: bool = True  # False if class names take the place of captions
    is_video: bool = False
    columns: set = frozenset()  # names of the columns of images, captions and classes
    notes: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Example:
    """Rows of one split, file and window."""

    row: int  # the first one
    captions: list
    label: str | None = None


def data_of_tables(name, tables, options, root, *, is_published=False):
    """{split: Data} of {split: table}. The column `split` divides a single table.

    Args:
        root: folder where relative paths begin; "" of a hub id, whose files `datasets` finds.
        is_published: whether this is a set by name: each row is an example, and none is moved or
            left out for being in two splits.
    """
    table = join_tables(list(tables.values()))
    rows = read_rows(table, options)
    rows.splits = splits_of_rows(tables, table, rows.columns)
    for part in tables.values():
        rows.numbers += range(len(part))
    if rows.pictures is None:
        root = str(root) or shared_folder(rows)
        files = find_files(rows, options, Path(root).expanduser())
    elif is_published:
        files = [str(row) for row in range(len(table))]
    else:
        files = identify_pictures(rows)
    starts = ends = [None] * len(table)
    if rows.is_video:
        starts, ends = windows_of_rows(table)
    examples = group_rows(rows, files, starts, ends)
    if not examples:
        raise ValueError("no row has an image and a caption, or no file is found: "
                         + "; ".join(rows.notes))
    if not is_published:
        examples = without_shared_examples(rows, examples)
        refuse_empty_splits(rows.splits, [split for split, *_ in examples])

    clip = None
    if rows.is_video:
        clip = clip_options(options)
    data = Data(name, "", table_of_examples(rows, examples), clip=clip,
                has_captions=rows.has_captions)
    if not rows.has_captions and not options.by_class:
        rows.notes.append("no captions: the class names serve as captions")
    data = with_labels(data, rows, examples)
    data = with_note(data, *rows.notes)
    if rows.is_video and "a" in options.modalities:
        data = with_sound(data, [None] * len(data))  # the videos' own
    splits = np.array([split for split, *_ in examples])
    result = {}
    for split in np.unique(splits).tolist():
        result[split] = data.select(np.flatnonzero(splits == split), split)
    return result


def read_rows(table, options):
    """The Rows of a table; data_of_tables fills in `splits` and `numbers`."""
    import datasets

    names = table.column_names
    image = find_column("--image-column", options.image_column, names)
    label = find_column("--label-column", options.label_column, names,
                        required=options.by_class, advice=NEEDS_CLASSES)
    class_names = None
    if label is not None:
        class_names = getattr(table.features[label], "names", None)
    caption = find_column("--caption-column", options.caption_column, names,
                          required=not options.by_class and class_names is None)

    kind = kind_of_cells(table.features[image])
    rows = Rows([], [], [], label_names=class_names, has_captions=caption is not None,
                columns={image, caption, label})
    if kind is None:
        rows.names = texts_of(table, image)
    else:
        pictures = table.select_columns(image).rename_column(image, "source")
        pictures = pictures.cast_column("source", getattr(datasets, kind)(decode=False))
        cells = pictures.with_format("arrow")["source"][:]
        rows.names = trimmed_texts(pc.struct_field(cells, "path"))
        if pc.struct_field(cells, "bytes").null_count < len(table):
            rows.pictures = pictures
    first = next(filter(None, rows.names), "")
    rows.is_video = (image == "video" or kind == "Video" or media_kind(first) == "video"
                     or bool(options.feature_dir))
    if rows.is_video and rows.pictures is not None:
        raise ValueError(f"the column {image} holds videos: write them to files, and their paths "
                         "into the column")
    rows.labels = [None] * len(table)
    if label is not None:
        rows.labels = labels_of_rows(table, label)
    if caption is None:
        rows.captions = [[(name or "").replace("_", " ")] for name in rows.labels]
    else:
        rows.captions = captions_of_rows(table, caption)
    return rows


def kind_of_cells(feature):
    """Image or Video if the cells of a column are files, as `datasets` or others write them, None
    if they are texts."""
    kind = type(feature).__name__
    if kind in ("Image", "Video"):
        return kind
    holds_bytes = getattr(feature, "dtype", "") in ("binary", "large_binary")
    if holds_bytes or (isinstance(feature, dict) and "bytes" in feature):
        return "Image"
    return None


def texts_of(table, column):
    """The cells of a column of texts or numbers as texts, "" = none."""
    cells = table.with_format("arrow")[column][:]
    if pa.types.is_nested(cells.type) or isinstance(cells.type, pa.BaseExtensionType):
        raise ValueError(f"the column {column} holds {cells.type}, but needs texts or numbers")
    return trimmed_texts(cells)


def trimmed_texts(cells):
    """The cells of an arrow column as texts without white space around them, "" = none."""
    return pc.utf8_trim_whitespace(cells.cast(pa.string())).fill_null("").to_pylist()


def captions_of_rows(table, column):
    """The captions of each row, a list of texts. Raises: ValueError for numbers, and for the text
    of a list."""
    kind = table.features[column]
    is_list = type(kind).__name__ in ("List", "LargeList")
    if is_list:
        kind = kind.feature
    if getattr(kind, "dtype", "") not in ("string", "large_string", "null"):
        raise ValueError(f"the column {column} holds {kind}, but captions are texts or lists of "
                         "texts")
    if is_list:
        lists = table[column][:]
        captions = [[(text or "").strip() for text in texts or ()] for texts in lists]
    else:
        captions = [[text] for text in texts_of(table, column)]
    for text in itertools.chain.from_iterable(captions):
        if TEXT_OF_CONTAINER.match(text):
            raise ValueError(f"the column {column} holds the text of a list, {shortened(text)!r}: "
                             "a jsonl or parquet file has lists of captions, a csv one caption a "
                             "row")
    return captions


def labels_of_rows(table, column):
    """The name of the class of each row, None where there is none."""
    names = getattr(table.features[column], "names", None)
    labels = []
    for word in texts_of(table, column):
        if NUMBER_OF_PANDAS.fullmatch(word):
            raise ValueError(f"{listed([word])} in the column {column}, as pandas writes whole "
                             "numbers beside empty cells: write names or whole numbers, or nothing")
        if word in NO_CLASS:
            labels.append(None)
        elif names is None:
            labels.append(word)
        else:
            labels.append(names[int(word)])
    return labels


# ---- splits ----
def splits_of_rows(tables, table, columns):
    """The split of each row of {split: table}, one after the other: that of its table or, of a
    single table, that of the column `split`.

    Args:
        columns: of images, captions and classes, which may hold any word.
    Raises: ValueError if the column names no split, or another one than the tables; and if another
        column of a single table holds words for splits alone.
    """
    splits = []
    for split, part in tables.items():
        splits += itertools.repeat(split, len(part))
    if "split" in table.column_names:
        words = texts_of(table, "split")
        split_of_word = {word: split_of_name(word) for word in set(words)}
        if None in split_of_word.values():
            word = next(word for word in words if split_of_word[word] is None)
            raise ValueError(f"{listed([word])} in the column split is none of "
                             + ", ".join(SPLIT_WORDS))
        cells = [split_of_word[word] for word in words]
        if len(tables) > 1 and cells != splits:
            raise ValueError("the column split names other splits than the files, or folders, that "
                             "are called train, val or test: drop the column or rename these")
        return cells
    if len(tables) == 1:
        for column in set(table.column_names) - columns:
            refuse_split_words(table, column)
    return splits


def refuse_split_words(table, column):
    """Raises ValueError if a column of another name seems to divide the rows into splits: rows of
    test would be trained on."""
    if getattr(table.features[column], "dtype", "") not in ("string", "large_string"):
        return
    words = pc.unique(table.with_format("arrow")[column][:]).to_pylist()
    words = sorted({word.strip() for word in words if word and word.strip()})
    num_split_words = sum(is_like_a_split(word) for word in words)
    has_val_or_test = any(SPLIT_WORDS.get(word.lower()) in ("val", "test") for word in words)
    divides = len(words) <= MANY_SPLITS and (num_split_words > 1 or has_val_or_test)
    if divides or column.strip().lower() == "split":
        raise ValueError(f"the column {column} holds {listed(words)}; call it split if it divides "
                         "the rows, with the words train, val and test, else drop it")


def refuse_empty_splits(splits_of_rows, splits_of_examples):
    """Raises ValueError if a split has rows, but no example: a part of train would take its
    place."""
    for split in sorted(set(splits_of_rows) - set(splits_of_examples)):
        raise ValueError(f"no row of the split {split} has a caption and a file that is there and "
                         "in no later split; a part of train would take its place: drop its rows "
                         "if it may")


def without_shared_examples(rows, examples):
    """The examples without those that are in another split, too, and come later there: of train,
    those of val and test, and of val those of test. Notes how many these are, and how many videos
    have other windows in several splits."""
    if len(set(rows.splits)) == 1:
        return examples
    splits_of_file = {}  # {file: names of splits}
    last_split = {}  # {(file, start, end): the split in which the example stays}
    files = {}  # {path: device and inode, equal for all links to a file; or the path}
    for split, file, start, end in examples:
        files[file] = file
        if rows.pictures is None and os.path.exists(file):
            status = os.stat(file)
            files[file] = (status.st_dev, status.st_ino)
        splits_of_file.setdefault(files[file], set()).add(split)
        place = (files[file], start, end)
        last_split[place] = max(last_split.get(place, split), split, key=SPLITS.index)
    result = {}
    removed = []
    for (split, file, start, end), example in examples.items():
        if last_split[files[file], start, end] == split:
            result[split, file, start, end] = example
        else:
            removed.append(rows.names[example.row] or f"row {rows.numbers[example.row]}")
    if removed:
        rows.notes.append(f"WARNING: {counted(len(removed), 'examples')} of train or val left out, "
                          f"which are in val or test, too, the first: {shortened(removed[0])}")
    num_shared = sum(len(splits) > 1 for splits in splits_of_file.values())
    if rows.is_video and num_shared:
        rows.notes.append(f"WARNING: {counted(num_shared, 'videos')} with windows in several "
                          "splits")
    return result


# ---- rows to examples ----
def windows_of_rows(table):
    """(starts, ends) of the rows in seconds, None = the video's own."""
    windows = []
    for column in ("start", "end"):
        seconds = [None] * len(table)
        if column in table.column_names:
            seconds = [seconds_of(text, column) for text in texts_of(table, column)]
        windows.append(seconds)
    return windows


def seconds_of(text, column):
    """The number of a text, None of an empty one. Raises: ValueError for what is none, also inf and
    nan."""
    if not text:
        return None
    if not SECONDS.fullmatch(text):
        raise ValueError(f"{listed([text])} in the column {column} is no number of seconds; an "
                         f"empty cell is the video's own {column}")
    return float(text)


def group_rows(rows, files, starts, ends):
    """Joins the rows of one split, file and window, and notes how many are left out.

    Args:
        files: of each row, a text that rows of one image or video share; "" = the row names none,
            None = it is not there.
    Returns: {(split, file, start, end): Example}, in the order of their first rows.
    """
    examples = {}
    rows_left_out = []
    names_of_files = {}
    for row, file in enumerate(files):
        captions = list(filter(None, rows.captions[row]))
        if file is None:
            continue
        if not file or not captions:
            rows_left_out.append(row)
            continue
        name = names_of_files.setdefault(file, rows.names[row])
        if name != rows.names[row] and rows.pictures is None:
            raise ValueError(f"{listed([name, rows.names[row]])} are one file: call it by one name")
        key = (rows.splits[row], file, starts[row], ends[row])
        example = examples.setdefault(key, Example(row, []))
        example.captions += [text for text in captions if text not in example.captions]
        label = rows.labels[row]
        if example.label is None:
            example.label = label
        elif label is not None and label != example.label:
            name = shortened(name or f"row {rows.numbers[row]}")
            both = listed([example.label, label])
            raise ValueError(f"{name} has the labels {both}, but may have one")
    if rows_left_out:
        row = rows_left_out[0]
        first = rows.names[row] or next(filter(None, rows.captions[row]), "an empty row")
        rows.notes.append(f"{counted(len(rows_left_out), 'rows')} without an image or a caption "
                          f"left out, the first: {shortened(first)}")
    return examples


def with_labels(data, rows, examples):
    """The data with a column label of class numbers, -1 = unknown, if any row has a class."""
    import datasets

    labels = [example.label for example in examples.values()]
    names = rows.label_names or sorted(set(labels) - {None})
    if not names:
        return data
    numbers = {name: number for number, name in enumerate(names)}
    data = with_column(data, "label", [numbers.get(label, -1) for label in labels],
                       datasets.ClassLabel(names=names))
    if None in labels:
        data = with_note(data, f"{labels.count(None):,} without a class")
    return data


# ---- files ----
def shared_folder(rows):
    """The folder below which all files are that `datasets` has found in the cache of the hub, from
    which on the rows then name them: paths in the cache depend on HF_HOME and on the commit."""
    folders = {os.path.dirname(name) for name in rows.names if name}
    if not all(map(os.path.isabs, folders)):
        raise ValueError("its table only names files; --data-dir is the folder where these are")
    folder = os.path.commonpath(folders)
    rows.names = [name and os.path.relpath(name, folder) for name in rows.names]
    return folder


def find_files(rows, options, root):
    """The path of the file of each row; "" where there is none, None where a video is not there,
    which is noted."""
    if not rows.is_video:
        return [name and os.path.normpath(os.path.join(root, name)) for name in rows.names]
    videos = Videos(video_folder(options, root))
    files = {"": ""}
    missing = []
    for name in dict.fromkeys(filter(None, rows.names)):
        files[name] = videos[name]
        if files[name] is None:
            missing.append(name)
        else:
            files[name] = os.path.normpath(files[name])
    if missing:
        rows.notes.append(f"{counted(len(missing), 'videos')} not there, first "
                          + shortened(missing[0]))
    return [files[name] for name in rows.names]


def identify_pictures(rows):
    """What the rows of one image or video in the table share: its path if each row has another one,
    else a hash of its bytes; "" where there are no bytes. The hashes stay in the cache of
    `datasets`."""
    paths = {os.path.normpath(name) for name in rows.names if name}
    if len(paths) == len(rows.names):
        return rows.names
    with generating():
        hashes = rows.pictures.with_format("arrow").map(
            hash_cells, batched=True, batch_size=HASHED_AT_ONCE, remove_columns="source",
            desc="hashing images")
    return hashes.with_format(None)["hash"][:]


def hash_cells(cells):
    """An arrow table of hash, that of the bytes of each image; "" without bytes."""
    hashes = []
    for cell in cells["source"].to_pylist():
        digest = ""
        if cell is not None and cell["bytes"]:
            digest = hashlib.sha256(cell["bytes"]).hexdigest()
        hashes.append(digest)
    return pa.table({"hash": pa.array(hashes, pa.string())})


def table_of_examples(rows, examples):
    """The table of Data. A key is the name of the file as the user wrote it, with the window of a
    video; of files in a table the row number in its split, if the names are not unique."""
    import datasets

    first_rows = [example.row for example in examples.values()]
    captions = [example.captions for example in examples.values()]
    sources = []
    keys = []
    for row, (_, file, start, end) in zip(first_rows, examples):
        sources.append({"path": file, "start": start, "end": end})
        keys.append(window_key(rows.names[row], start, end))
    if rows.pictures is None:
        return make_table(captions, keys, sources)
    splits = [split for split, *_ in examples]
    if "" in keys or len(set(zip(splits, keys))) < len(keys):
        keys = [str(rows.numbers[row]) for row in first_rows]
    others = datasets.Dataset.from_dict({"captions": captions, "key": keys})
    return datasets.concatenate_datasets([rows.pictures.select(first_rows), others], axis=1)
