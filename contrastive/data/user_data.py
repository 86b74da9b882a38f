"""The user's own data: what the library `datasets` reads (csv, json(l), parquet, imagefolder,
videofolder, a hub id), or tars.

A column `split` divides the rows of one split. Several rows of an image, or of one window of a
video, become one example with all their captions.
"""

import dataclasses
import hashlib
import os
from pathlib import Path

from contrastive.core.processes import UserError, opening
from contrastive.data.annotations import (
    TEXT_OF_LIST, Videos, parse_list, video_folder, window_key)
from contrastive.data.clips import clip_options
from contrastive.data.folders import (
    SPLIT_WORDS, holds_tars, media_kind, read_tables, settle_eval, split_of_name)
from contrastive.data.hub import WINDOW, generating, pick_column, require_column
from contrastive.data.table import Data, with_column, with_note
from contrastive.data.tars import open_tars

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "file_name", "image_path", "path")
FILE_COLUMNS = ("filepath", "filename", "file", "url")  # of images, if there is no other column
VIDEO_COLUMNS = ("video", "video_path", "video_id", "clip_id")  # a path, a file name or its stem
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentence", "sentences", "title",
                   "description")
LABEL_COLUMNS = ("label", "cls", "fine_label", "class")
NO_CLASS = ("", "-1", "nan")  # how tables write an unknown class
HASHED_AT_ONCE = 100  # images of a table that are in memory while they are hashed


def open_user_data(name, options):
    """{split: Data} of a file, a folder or a hub id, with the splits that it has."""
    path = Path(name).expanduser()
    if holds_tars(path):
        return open_tars(name, path, options)
    root = path.parent
    if options.data_dir:
        root = options.data_dir
    elif path.is_dir():
        root = path
    source = name
    if path.exists():
        source = path
    with opening(f"--dataset {name}"):
        tables = read_tables(source, options.revision or None)
        return data_of_tables(name, tables, options, Path(root).expanduser())


# ---- from tables to Data ----
@dataclasses.dataclass
class UserTable:
    """All rows of the user's data in one table, and what its columns are."""

    name: str
    table: object  # datasets.Dataset, all splits one after the other
    splits: np.ndarray  # (rows,) train, val, test or a word of the user's own
    row_numbers: np.ndarray  # (rows,) of each row in the table of its split
    image: str  # column of the image or video
    caption: str | None  # column; None = class names take the place of captions
    label: str | None  # column
    media: str = ""  # "Image" or "Video" if `datasets` has found or holds the files, else ""
    path: object = None  # (rows,) arrow: path or name of the file; None = no name
    in_table: bool = False  # whether the table holds the bytes of the files
    notes: list = dataclasses.field(default_factory=list)  # what the banner says was left out


def data_of_tables(name, tables, options, root, *, joins_rows=True):
    """{split: Data} of Tables. If all rows are in one split, the column `split` may divide them.

    Args:
        root: folder where relative paths begin.
        joins_rows: whether rows of one picture inside the tables are one example.
    """
    user = describe_tables(name, tables, options)
    is_video = shows_videos(user, options)
    if not user.in_table:
        files = find_files(user, options, root, is_video)
    elif joins_rows:
        files = identify_pictures(user)
    else:
        files = pa.array(np.arange(len(user.table)).astype(str))
    examples = group_examples(user, files)
    if not len(examples):
        reasons = "; ".join(user.notes)
        raise UserError(f"--dataset {name}: no row has an image and a caption, or no file is found"
                        f" ({reasons})")
    if user.in_table:
        check_no_windows(user, examples)
        sources, keys = files_in_table(user, examples)
    else:
        sources, keys = files_on_disk(user, examples, root, is_video)

    clip = None
    if is_video:
        clip = clip_options(options)
    table = join_columns(sources, captions=examples["captions"], key=keys)
    data = Data(name, "", table, has_captions=user.caption is not None, clip=clip)
    if user.caption is None:
        user.notes.append("no captions: the class names serve as captions")
    if user.label is not None:
        data = add_labels(data, user, examples)
        num_unknown = int((data.labels < 0).sum())
        if num_unknown:
            user.notes.append(f"{num_unknown:,} without a class")
    data = with_note(data, *user.notes)

    splits = np.array(examples["split"])
    result = {}
    for split in np.unique(splits).tolist():
        result[split] = data.select(np.flatnonzero(splits == split), split)
    return result


def describe_tables(name, tables, options):
    """The UserTable of Tables: finds its columns. Raises: UserError naming a column that does not
    exist."""
    import datasets

    words = settle_eval({word: split_of_name(word) for word in tables.splits})
    notes = list(tables.notes)
    splits = []
    row_numbers = []
    for word, part in tables.splits.items():
        if words[word] is None:
            notes.append(f"{len(part):,} rows of the split {word} are not read")
        splits.append(np.full(len(part), words[word] or word))
        row_numbers.append(np.arange(len(part)))
    splits = np.concatenate(splits)
    table = datasets.concatenate_datasets(list(tables.splits.values()))
    names = table.column_names
    if "split" in names and len(set(splits)) == 1:
        splits = read_split_column(name, table)

    media = find_media_columns(table, options)
    image = require_column("--image-column", options.image_column, names,
                           (*media, *IMAGE_COLUMNS, *VIDEO_COLUMNS, *FILE_COLUMNS))
    label = pick_column("--label-column", options.label_column, names, LABEL_COLUMNS)
    if options.by_class and label is None:
        raise UserError(f"--dataset {name}: needs classes: a folder per class, or a column label; "
                        f"there are: {', '.join(names)}")
    has_class_names = label is not None and hasattr(table.features[label], "names")
    if options.by_class or has_class_names:
        caption = pick_column("--caption-column", options.caption_column, names, CAPTION_COLUMNS)
    else:
        caption = require_column("--caption-column", options.caption_column, names, CAPTION_COLUMNS)

    row_numbers = np.concatenate(row_numbers)
    user = UserTable(name, table, splits, row_numbers, image, caption, label, notes=notes)
    if image in media:
        user.media = media[image]
        undecoded = getattr(datasets, user.media)(decode=False)  # bytes, or paths of a folder
        user.table = table.cast_column(image, undecoded)
        cells = user.table.with_format("arrow")[image][:]
        user.path = pc.struct_field(cells, "path")
        user.in_table = pc.struct_field(cells, "bytes").null_count < len(table)
    else:
        user.path = table.with_format("arrow")[image][:]
    return user


def find_media_columns(table, options):
    """{column: Image or Video} of the columns that `datasets` marks so, and of the one in use if
    it has bytes, or bytes and path, without this mark."""
    media = {}
    for column, feature in table.features.items():
        if type(feature).__name__ in ("Image", "Video"):
            media[column] = type(feature).__name__
    column = options.image_column
    if not column and not media:
        column = pick_column("--image-column", "", table.column_names,
                             (*IMAGE_COLUMNS, *VIDEO_COLUMNS))
    if column not in table.column_names or column in media:
        return media
    feature = table.features[column]
    holds_bytes = getattr(feature, "dtype", "") in ("binary", "large_binary")
    if holds_bytes or (isinstance(feature, dict) and {"bytes", "path"} & set(feature)):
        media[column] = "Image"
        if column in VIDEO_COLUMNS:
            media[column] = "Video"
    return media


def read_split_column(name, table):
    """(rows,) the split of each row by the column `split`. Raises: UserError naming an unknown
    word."""
    words = [str(word) for word in table["split"][:]]
    splits = settle_eval({word: split_of_name(word) for word in set(words)})
    unknown = sorted(word for word, split in splits.items() if split is None)
    if unknown:
        raise UserError(f"--dataset {name}: '{unknown[0]}' in the column split is none of "
                        + ", ".join(SPLIT_WORDS))
    return np.array([splits[word] for word in words])


def add_labels(data, user, examples):
    """The data with a column label of class numbers, -1 = unknown."""
    import datasets

    names = getattr(user.table.features[user.label], "names", None)
    if names is None:
        names = sorted(examples["label"].drop_null().unique().to_pylist())
    numbers = pc.index_in(examples["label"], pa.array(names, pa.string())).fill_null(-1)
    numbers = numbers.to_numpy().astype(int)                                # (M,)
    return with_column(data, "label", numbers, datasets.ClassLabel(names=names))


# ---- rows to examples ----
def group_examples(user, files):
    """Joins the rows of one split, file and window to one example with all their captions, and
    notes how many rows are left out.

    Args:
        files: (rows,) arrow, text that rows of one image or video share; "" = the row names none,
            null = it is not there.
    Returns: an arrow table of split, file, row (the first one), start, end, captions, and label,
        the name of the class or None if there are several; in the order of the first rows.
    """
    table = user.table
    columns = {user.caption, user.label, *WINDOW} & set(table.column_names)
    content = table.select_columns(sorted(columns)).with_format("arrow")[:]
    label = label_names_of(user, content)
    text = caption_texts_of(user, content, label)
    rows = {"file": files, "row": np.arange(len(table)), "split": user.splits, "label": label}
    for column in WINDOW:
        rows[column] = seconds_of(user, content, column)
    rows = pa.table(rows)
    num_rows = pc.sum(pc.is_valid(files)).as_py() or 0
    if pa.types.is_list(text.type) or pa.types.is_large_list(text.type):  # a row for each caption
        rows = rows.take(pc.list_parent_indices(text))
        text = pc.list_flatten(text)
    rows = rows.append_column("caption", trimmed(text))
    rows = rows.filter(pc.and_(is_not_empty(rows["caption"]), is_not_empty(rows["file"])))
    num_left_out = num_rows - pc.count_distinct(rows["row"]).as_py()
    if num_left_out:
        user.notes.append(f"{num_left_out:,} rows without an image or a caption left out")
    note_line_breaks(user, rows)

    # Grouping keeps no order: `place` is that of the first row of each group.
    rows = rows.append_column("place", pa.array(np.arange(len(rows))))
    example = ["split", "file", *WINDOW]
    captions = rows.group_by([*example, "caption"]).aggregate(  # each caption once
        [("place", "min"), ("row", "min"), ("label", "min"), ("label", "max")])
    captions = captions.sort_by("place_min")
    examples = captions.group_by(example, use_threads=False).aggregate(
        [("caption", "list"), ("place_min", "min"), ("row_min", "min"), ("label_min", "min"),
         ("label_max", "max")])
    examples = examples.rename_columns([*example, "captions", "place", "row", "low", "high"])
    examples = examples.sort_by("place")
    has_one_label = pc.equal(examples["low"], examples["high"])
    label = pc.if_else(has_one_label, examples["low"], None)
    return examples.append_column("label", label)


def seconds_of(user, content, column):
    """(rows,) arrow: start or end of each row; null is an open side, as is nan, which is noted.
    Raises: an error of arrow naming a text that is no number."""
    if column not in content.column_names:
        return pa.nulls(len(content), pa.float64())
    seconds = content[column]
    if pa.types.is_string(seconds.type):  # of a csv
        seconds = trimmed(seconds)
        seconds = pc.if_else(is_not_empty(seconds), seconds, None)
    seconds = seconds.cast(pa.float64())
    is_nan = pc.is_nan(seconds).fill_null(False)
    num_nan = pc.sum(is_nan).as_py()
    if num_nan:
        user.notes.append(f"{num_nan:,} rows have nan in the column {column}, which counts as "
                          f"empty: the video's own {column}")
    return pc.if_else(is_nan, None, seconds)


def note_line_breaks(user, rows):
    """Notes how many captions have line breaks, which a stray quotation mark in a csv makes."""
    broken = rows.filter(pc.match_substring_regex(rows["caption"], "[\\r\\n]"))
    if len(broken):
        first = user.path[broken["row"][0].as_py()].as_py()
        user.notes.append(f"{len(broken):,} captions have line breaks, first of {first} (in a csv, "
                          "a stray quotation mark swallows the rows behind it)")


def label_names_of(user, content):
    """(rows,) arrow: the name of the class of each row; null where there is none."""
    if user.label is None:
        return pa.nulls(len(content), pa.string())
    words = trimmed(content[user.label])
    words = pc.if_else(pc.is_in(words, pa.array(NO_CLASS)), None, words)
    names = getattr(user.table.features[user.label], "names", None)
    if names is None:
        return words
    return pa.array(names).take(words.cast(pa.int64()))


def caption_texts_of(user, content, label):
    """(rows,) arrow: a text or a list of texts; without captions the name of the class. Raises:
    UserError if some cells are the text of a list, and others are not."""
    if user.caption is None:
        return pc.replace_substring(label, "_", " ")
    column = content[user.caption]
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if not is_text or not pc.any(pc.match_substring_regex(column, TEXT_OF_LIST)).as_py():
        return column
    with opening(f"--dataset {user.name}: some cells of {user.caption} are the text of a list"):
        lists = [parse_list(text) for text in column.to_pylist()]
    return pa.array(lists, pa.list_(pa.string()))


def trimmed(column):
    """An arrow column as text, without white space around it."""
    return pc.utf8_trim_whitespace(column.cast(pa.string()))


def is_not_empty(column):
    """(rows,) arrow: whether a text has a character; null where there is no text."""
    return pc.greater(pc.utf8_length(column), 0)


# ---- files inside the table ----
def identify_pictures(user):
    """(rows,) arrow, what the rows of one image or video in the table share: its path if no other
    row has this path, else a hash of its bytes; "" where there are no bytes.

    The hashes stay in the cache of `datasets`.
    """
    names = user.path.to_pylist()
    for row, name in enumerate(names):
        if name:
            names[row] = os.path.normpath(name)
    numbers = pc.dictionary_encode(pa.array(names, pa.string())).indices
    numbers = numbers.fill_null(-1).to_numpy() + 1                          # (rows,), 0 = no path
    is_alone = (np.bincount(numbers)[numbers] == 1) & (numbers > 0)
    rows = np.flatnonzero(~is_alone)
    if not len(rows):
        return pa.array(names, pa.string())
    cells = user.table.select_columns(user.image).select(rows).with_format("arrow")
    with generating():
        hashes = cells.map(
            hash_cells, batched=True, batch_size=HASHED_AT_ONCE, remove_columns=user.image,
            fn_kwargs={"column": user.image}, desc="hashing images")
    for row, digest in zip(rows.tolist(), hashes.with_format(None)["hash"][:]):
        names[row] = digest
    return pa.array(names, pa.string())


def hash_cells(cells, column):
    """An arrow table of hash, that of the bytes of each image; "" without bytes."""
    hashes = []
    for cell in cells[column].to_pylist():
        digest = ""
        if cell is not None and cell["bytes"]:
            digest = hashlib.sha256(cell["bytes"]).hexdigest()
        hashes.append(digest)
    return pa.table({"hash": pa.array(hashes, pa.string())})


def check_no_windows(user, examples):
    """Raises UserError if files inside the table have windows, which would not be cut."""
    for column in WINDOW:
        if examples[column].null_count < len(examples):
            raise UserError(f"--dataset {user.name}: the column {column} cuts files on the disk, "
                            "not videos inside a table; write them to files, or drop the column")


def files_in_table(user, examples):
    """(a table with the column source, the keys) of examples whose files are in the user's table.
    A key is the name of the file, or its row number if the names are not unique."""
    rows = examples["row"].to_pylist()
    if "__key__" in user.table.column_names:
        all_names = user.table["__key__"][:]
    else:
        all_names = user.path.to_pylist()
    names = [all_names[row] for row in rows]
    num_unique = len(set(zip(user.splits[rows], names)))
    if None in names or num_unique < len(names):  # "image.png" in every row is no name
        names = [str(user.row_numbers[row]) for row in rows]
    sources = user.table.select(rows).select_columns(user.image)
    return sources.rename_column(user.image, "source"), names


# ---- files on the disk ----
def shows_videos(user, options):
    """Whether the files of the user's table are videos, or features of videos."""
    is_named_so = user.media == "Video" or user.image in VIDEO_COLUMNS
    if is_named_so or options.feature_dir:
        return True
    paths = trimmed(user.path)
    paths = paths.filter(is_not_empty(paths))
    return any(media_kind(path) == "Video" for path in paths[:1].to_pylist())


def find_files(user, options, root, is_video):
    """(rows,) arrow: paths of the files; "" where there is none, null where it is not there, which
    is noted."""
    videos = None
    if is_video and not user.media:  # these may be names without a folder or a suffix
        videos = Videos(video_folder(options, root))
    paths = pc.dictionary_encode(trimmed(user.path).fill_null("").combine_chunks())
    files = []  # of each path or name in the table
    missing = []
    for path in paths.dictionary.to_pylist():
        file = ""
        if videos is None and path:
            file = os.path.join(root, path)
        elif path:
            file = videos[path]
            if file is None:
                missing.append(path)
        if file:
            file = os.path.normpath(file)  # a.jpg and ./a.jpg are one
        files.append(file)
    if missing:
        user.notes.append(f"{len(missing):,} videos are not there, first {missing[0]}")
    return pa.array(files, pa.string()).take(paths.indices)


def files_on_disk(user, examples, root, is_video):
    """(a table with the column source, the keys) of examples with files of their own. A key is the
    path as the user wrote it, with the window of a video."""
    import datasets

    files = examples["file"].to_pylist()
    if user.media:  # `datasets` has made them absolute
        keys = [os.path.relpath(file, root) for file in files]
    else:
        keys = trimmed(user.path.take(examples["row"])).to_pylist()
    fields = {"path": examples["file"].combine_chunks()}
    if is_video:
        for column in WINDOW:
            fields[column] = examples[column].combine_chunks()
        windows = [examples[column].to_pylist() for column in WINDOW]
        keys = [window_key(key, start, end) for key, start, end in zip(keys, *windows)]
    sources = pa.StructArray.from_arrays(list(fields.values()), list(fields))
    return datasets.Dataset.from_dict({"source": sources}), keys


def join_columns(table, **columns):
    """The table with further columns."""
    import datasets

    return datasets.concatenate_datasets([table, datasets.Dataset.from_dict(columns)], axis=1)


# ---- further captions ----
def read_captions(file):
    """[(path or name, start, end, captions)] of a file of further captions."""
    table = read_tables(Path(file).expanduser()).splits["train"]
    names = table.column_names
    image = require_column("--image-column", "", names, (*VIDEO_COLUMNS, *IMAGE_COLUMNS))
    caption = require_column("--caption-column", "", names, CAPTION_COLUMNS)
    one_split = np.full(len(table), "")
    path = table.with_format("arrow")[image][:]
    user = UserTable(str(file), table, one_split, np.arange(len(table)), image, caption, None)
    examples = group_examples(user, trimmed(path).fill_null(""))
    columns = [examples[column].to_pylist() for column in ("file", *WINDOW, "captions")]
    return list(zip(*columns))
