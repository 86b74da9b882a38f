"""The user's own data: what the library `datasets` reads (csv, json(l), parquet, imagefolder,
videofolder, a hub id), or tars.

A column `split` divides the rows of one split. Several rows of an image, or of one window of a
video, become one example with all their captions.
"""

import collections
import dataclasses
import hashlib
import math
import os
import re
from pathlib import Path

from contrastive.core.processes import UserError, opening
from contrastive.core.words import counted
from contrastive.data.annotations import (
    TEXT_OF_LIST, Videos, parse_list, video_folder, window_key, with_sound, with_subtitle_note)
from contrastive.data.clips import clip_options
from contrastive.data.folders import (
    SPLIT_WORDS, find_split_column, holds_tars, media_kind, read_tables, refuse_trainval,
    settle_eval, split_of_name)
from contrastive.data.hub import WINDOW, generating, pick_column, require_column
from contrastive.data.registry import SPLITS, find_data_set
from contrastive.data.table import Data, make_table, with_column, with_note
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
NO_CLASS = ("", "-1", "nan")  # how tables write an unknown class, in lower case
WHOLE_NUMBER = re.compile(r"(-?\d+)\.0")  # 3.0, as pandas writes class 3 beside an unknown class
OPEN_SIDES = {"start": -math.inf, "end": math.inf}  # seconds that cut nothing off a video
SAMPLE_KEY = "__key__"  # column of the names of samples, where `datasets` reads tars of the hub
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
    splits: list  # of each row: train, val, test or a word of the user's own
    row_numbers: list  # of each row in the table of its split
    image: str  # column of the image or video
    caption: str | None  # column; None = class names take the place of captions
    label: str | None  # column
    media: str = ""  # "Image" or "Video" if the column is typed so, else ""
    path: list = ()  # of each row: path or name of the file, "" = none
    in_table: bool = False  # whether the table holds the bytes of the files
    from_hub: bool = False  # whether files that `datasets` has found lie in the cache of the hub
    notes: list = dataclasses.field(default_factory=list)  # what the banner says was left out

    def texts(self, column):
        """The cells of a column as texts without white space around them, "" = none."""
        return texts_of(self.cells(column))

    def cells(self, column):
        """A column of texts, lists of texts or numbers, in arrow. Raises: UserError if it holds
        something else."""
        cells = self.table.with_format("arrow")[column][:]
        kind = cells.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and is_text(kind.value_type):
            return cells
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            raise UserError(f"--dataset {self.name}: the column {column} holds {kind}, but needs "
                            "texts or lists of texts; a number among texts is written as a text, "
                            "\"3\"")
        return cells


@dataclasses.dataclass
class UserExample:
    """The rows of one split, file and window."""

    split: str
    file: str
    start: float | None
    end: float | None
    row: int  # the first one
    captions: list = dataclasses.field(default_factory=list)
    labels: set = dataclasses.field(default_factory=set)  # names of classes

    @property
    def label(self):
        """The name of the class; None if there is none, or several."""
        if len(self.labels) == 1:
            return next(iter(self.labels))
        return None


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
        files = [str(row) for row in range(len(user.table))]
    examples = group_examples(user, files, has_windows=is_video)
    if not examples:
        reasons = "; ".join(user.notes)
        raise UserError(f"--dataset {name}: no row has an image and a caption, or no file is found"
                        f" ({reasons})")
    note_lost_splits(user, examples)
    note_shared_files(user, examples)
    note_gifs(user, examples, is_video)
    if user.in_table:
        check_no_windows(user, examples)
        table = table_of_pictures(user, examples)
    else:
        table = table_of_files(user, examples, root, is_video)

    clip = None
    if is_video:
        clip = clip_options(options)
    data = Data(name, "", table, has_captions=user.caption is not None, clip=clip)
    if user.caption is None:
        user.notes.append("no captions: the class names serve as captions")
    if user.label is not None:
        data = add_labels(data, user, examples)
        num_unknown = int((data.labels < 0).sum())
        if num_unknown:
            user.notes.append(f"{num_unknown:,} without a class")
    data = with_note(data, *user.notes)
    if is_video and options.modalities != "v":
        data = add_sound_and_subtitles(data, user, examples, options, root)

    splits = np.array([example.split for example in examples])
    result = {}
    for split in np.unique(splits).tolist():
        result[split] = data.select(np.flatnonzero(splits == split), split)
    return result


def describe_tables(name, tables, options):
    """The UserTable of Tables: finds its columns. Raises: UserError naming a column that does not
    exist."""
    import datasets

    words = settle_eval({word: split_of_name(word) for word in tables.splits})
    refuse_trainval(words)
    notes = list(tables.notes)
    splits = []
    row_numbers = []
    for word, part in tables.splits.items():
        if words[word] is None:
            notes.append(f"{len(part):,} rows of the split {word} are not read")
        splits += [words[word] or word] * len(part)
        row_numbers += range(len(part))
    table = datasets.concatenate_datasets(list(tables.splits.values()))
    names = table.column_names
    split_column = find_split_column(names)
    if len(set(splits)) > 1:
        if split_column:
            notes.append(f"the column {split_column} is not read, since files or folders name the "
                         "splits")
    elif split_column:
        splits = read_split_column(name, table, split_column)
    else:
        refuse_split_words(name, table)

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

    user = UserTable(name, table, splits, row_numbers, image, caption, label, notes=notes,
                     from_hub=tables.from_hub)
    if image in media:
        user.media = media[image]
        undecoded = getattr(datasets, user.media)(decode=False)  # bytes, or paths of a folder
        user.table = table.cast_column(image, undecoded)
        cells = user.table.with_format("arrow")[image][:]
        user.path = texts_of(pc.struct_field(cells, "path"))
        user.in_table = pc.struct_field(cells, "bytes").null_count < len(table)
        first = next(filter(None, user.path), "")
        if "::" in first and not user.in_table:  # as the library datasets writes it
            raise UserError(f"--dataset {name}: {first} is inside an archive; unpack it")
    else:
        user.path = user.texts(image)
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


def refuse_split_words(name, table):
    """Raises UserError if a column that is not called split holds words for several splits, and
    nothing else: rows of test would be trained on."""
    for column, feature in table.features.items():
        if getattr(feature, "dtype", "") not in ("string", "large_string"):
            continue
        cells = table.select_columns(column)
        first_words = lower_words(cells[:100][column])
        if not first_words <= set(SPLIT_WORDS):
            continue
        words = lower_words(cells[column][:])
        if words <= set(SPLIT_WORDS) and len({SPLIT_WORDS[word] for word in words}) > 1:
            raise UserError(f"--dataset {name}: the column {column} holds "
                            f"{', '.join(sorted(words))}; call it split if it divides the rows, "
                            "else drop it")


def lower_words(cells):
    """The different texts of cells that are not empty, in lower case."""
    return {cell.lower() for cell in cells if cell}


def read_split_column(name, table, column):
    """The split of each row by a column. Raises: UserError naming an unknown word, or trainval
    beside val."""
    words = [str(word) for word in table[column][:]]
    splits = settle_eval({word: split_of_name(word) for word in set(words)})
    refuse_trainval(splits)
    unknown = sorted(word for word, split in splits.items() if split is None)
    if unknown:
        raise UserError(f"--dataset {name}: '{unknown[0]}' in the column {column} is none of "
                        + ", ".join(SPLIT_WORDS))
    return [splits[word] for word in words]


def add_labels(data, user, examples):
    """The data with a column label of class numbers, -1 = unknown."""
    import datasets

    names = getattr(user.table.features[user.label], "names", None)
    if names is None:
        names = sorted({example.label for example in examples} - {None})
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers.get(example.label, -1) for example in examples]
    return with_column(data, "label", labels, datasets.ClassLabel(names=names))


# ---- rows to examples ----
def group_examples(user, files, *, has_windows=True):
    """Joins the rows of one split, file and window to one example with all their captions, and
    notes how many rows are left out.

    Args:
        files: of each row, a text that rows of one image or video share; "" = the row names none,
            None = it is not there.
        has_windows: whether the columns start and end are windows, which images have not.
    Returns: UserExamples, in the order of their first rows.
    """
    labels = labels_of_rows(user)
    captions = captions_of_rows(user, labels)
    starts = ends = [None] * len(user.table)
    if has_windows:
        starts, ends = [seconds_of_rows(user, column) for column in WINDOW]
    examples = {}  # {(split, file, start, end): UserExample}
    rows_left_out = []
    rows_with_breaks = []  # a row for each caption with a line break
    for row, file in enumerate(files):
        if file is None:
            continue
        texts = list(filter(None, captions[row]))
        if not file or not texts:
            rows_left_out.append(row)
            continue
        example_key = (user.splits[row], file, starts[row], ends[row])
        if example_key not in examples:
            examples[example_key] = UserExample(*example_key, row)
        example = examples[example_key]
        if labels[row] is not None:
            example.labels.add(labels[row])
        for text in texts:
            if text not in example.captions:
                example.captions.append(text)
            if "\n" in text or "\r" in text:
                rows_with_breaks.append(row)
    if rows_left_out:
        rows = counted(len(rows_left_out), "rows")
        row = rows_left_out[0]
        first = user.path[row] or next(filter(None, captions[row]), "an empty row")
        user.notes.append(f"{rows} without an image or a caption left out, the first: {first}")
    if rows_with_breaks:
        first = user.path[rows_with_breaks[0]]
        user.notes.append(f"{len(rows_with_breaks):,} captions have line breaks, first of {first} "
                          "(in a csv, a stray quotation mark swallows the rows behind it)")
    return list(examples.values())


def note_lost_splits(user, examples):
    """Notes which of the splits train, val and test have rows, but no example. A part of train
    would take their place; of a data set by name none does."""
    if find_data_set(user.name) is not None:
        return
    remaining = {example.split for example in examples}
    for split in SPLITS:
        if split in user.splits and split not in remaining:
            user.notes.append(f"WARNING: all {user.splits.count(split):,} rows of the split {split}"
                              " are left out")


def note_shared_files(user, examples):
    """Notes how many files have examples in several of the splits train, val and test."""
    splits_of_file = {}  # {file: splits}
    rows_of_files = {}  # {file: its first row}
    for example in examples:
        if example.split in SPLITS:
            splits_of_file.setdefault(example.file, set()).add(example.split)
            rows_of_files.setdefault(example.file, example.row)
    shared = [file for file, splits in splits_of_file.items() if len(splits) > 1]
    if shared:
        row = rows_of_files[shared[0]]
        first = user.path[row] or f"row {user.row_numbers[row]}"
        user.notes.append(f"WARNING: {counted(len(shared), 'files')} with rows in several splits, "
                          f"first {first}")


def note_gifs(user, examples, is_video):
    """Notes how many gif files are read as images, their first picture alone."""
    if is_video:
        return
    names = [user.path[example.row] for example in examples]
    num_gifs = sum(name.lower().endswith(".gif") for name in names)
    if num_gifs:
        user.notes.append(f"{counted(num_gifs, 'gif files')} read as still images; a column video "
                          "reads their frames")


def seconds_of_rows(user, column):
    """The start or end of each row; None is an open side, as are an infinite end and nan, which is
    noted. Raises: ValueError naming a text that is no number."""
    if column not in user.table.column_names:
        return [None] * len(user.table)
    seconds = []
    num_nan = 0
    for text in user.texts(column):
        second = None
        if text:
            second = float(text)
            if math.isnan(second):
                num_nan += 1
            if math.isnan(second) or second == OPEN_SIDES[column]:
                second = None
        seconds.append(second)
    if num_nan:
        user.notes.append(f"{num_nan:,} rows have nan in the column {column}, which counts as "
                          f"empty: the video's own {column}")
    return seconds


def labels_of_rows(user):
    """The name of the class of each row, None where there is none."""
    if user.label is None:
        return [None] * len(user.table)
    return class_names_of_rows(user, user.label)


def class_names_of_rows(user, column):
    """The cells of a column of classes as names, None where there is none."""
    names = getattr(user.table.features[column], "names", None)
    labels = []
    for word in user.texts(column):
        number = WHOLE_NUMBER.fullmatch(word)
        if number:
            word = number[1]
        if word.lower() in NO_CLASS:
            labels.append(None)
        elif names is None:
            labels.append(word)
        else:
            labels.append(names[int(word)])
    return labels


def captions_of_rows(user, labels):
    """The captions of each row, a list of texts; without captions the name of the class. Raises:
    UserError if some cells are the text of a list, and others are not."""
    if user.caption is None:
        return [[caption_of_class(label)] for label in labels]
    if hasattr(user.table.features[user.caption], "names"):
        return [[caption_of_class(name)] for name in class_names_of_rows(user, user.caption)]
    column = user.cells(user.caption)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lists = column.to_pylist()
        return [[str(text or "").strip() for text in texts or ()] for texts in lists]
    texts = texts_of(column)
    if not any(re.match(TEXT_OF_LIST, text) for text in texts):
        if SAMPLE_KEY in user.table.column_names:  # of tars, a caption a line
            return [[line.strip() for line in text.split("\n")] for text in texts]
        return [[text] for text in texts]
    with opening(f"--dataset {user.name}: some cells of {user.caption} are the text of a list"):
        return [[text.strip() for text in parse_list(cell)] for cell in texts]


def caption_of_class(name):
    """A caption from the name of a class, "" from None."""
    return (name or "").replace("_", " ")


def is_text(kind):
    """Whether an arrow type is that of texts, or of cells that are all empty."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def texts_of(column):
    """The cells of an arrow column as texts without white space around them, "" = none."""
    return pc.utf8_trim_whitespace(column.cast(pa.string())).fill_null("").to_pylist()


# ---- files inside the table ----
def identify_pictures(user):
    """What the rows of one image or video in the table share: its path if no other row has this
    path, else a hash of its bytes; "" where there are no bytes.

    The hashes stay in the cache of `datasets`.
    """
    names = [name and os.path.normpath(name) for name in user.path]
    count = collections.Counter(names)
    rows = [row for row, name in enumerate(names) if not name or count[name] > 1]
    if not rows:
        return names
    cells = user.table.select_columns(user.image).select(rows).with_format("arrow")
    with generating():
        hashes = cells.map(
            hash_cells, batched=True, batch_size=HASHED_AT_ONCE, remove_columns=user.image,
            fn_kwargs={"column": user.image}, desc="hashing images")
    for row, digest in zip(rows, hashes.with_format(None)["hash"][:]):
        names[row] = digest
    return names


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
        if any(getattr(example, column) is not None for example in examples):
            raise UserError(f"--dataset {user.name}: the column {column} cuts files on the disk, "
                            "not videos inside a table; write them to files, or drop the column")


def table_of_pictures(user, examples):
    """The table of examples whose files are in the user's table. A key is the name of the file, or
    its row number if the names are not unique."""
    import datasets

    rows = [example.row for example in examples]
    all_names = user.path
    if SAMPLE_KEY in user.table.column_names:
        all_names = user.table[SAMPLE_KEY][:]
    names = [all_names[row] for row in rows]
    num_unique = len({(example.split, name) for example, name in zip(examples, names)})
    if "" in names or num_unique < len(names):  # "image.png" in every row is no name
        names = [str(user.row_numbers[row]) for row in rows]
    sources = user.table.select(rows).select_columns(user.image)
    captions = [example.captions for example in examples]
    others = datasets.Dataset.from_dict({"captions": captions, "key": names})
    sources = sources.rename_column(user.image, "source")
    return datasets.concatenate_datasets([sources, others], axis=1)


# ---- files on the disk ----
def shows_videos(user, options):
    """Whether the files of the user's table are videos, or features of videos."""
    is_named_so = user.media == "Video" or user.image in VIDEO_COLUMNS
    if is_named_so or options.feature_dir:
        return True
    first = next(filter(None, user.path), "")
    return media_kind(first) == "Video"


def find_files(user, options, root, is_video):
    """The path of the file of each row; "" where there is none, None where it is not there, which
    is noted."""
    videos = None
    if is_video and not user.media:  # these may be names without a folder or a suffix
        videos = Videos(video_folder(options, root))
    files = {"": ""}  # {path or name in the table: file}
    for path in user.path:
        if path in files:
            continue
        if videos is None:
            file = os.path.join(root, path)
        else:
            file = videos[path]
        if file is not None:
            file = os.path.normpath(file)  # a.jpg and ./a.jpg are one
        files[path] = file
    missing = [path for path, file in files.items() if file is None]
    if missing:
        user.notes.append(f"{len(missing):,} videos are not there, first {missing[0]}")
    if videos is not None and videos.note():
        user.notes.append(videos.note())
    return [files[path] for path in user.path]


def shared_folder(examples):
    """The folder below which the files of all examples are. Keys of files of the hub begin there,
    since their paths in the cache depend on HF_HOME and on the commit."""
    return os.path.commonpath([os.path.dirname(example.file) for example in examples])


def table_of_files(user, examples, root, is_video):
    """The table of examples with files of their own. A key is the path as the user wrote it, with
    the window of a video.

    Where examples of one file have it by several names (a.mp4, ./a.mp4, a), the column `video` has
    one name for each file, by which splits are held out.
    """
    sources = []
    keys = []
    names = []
    names_of_file = {}  # {file: names}
    if user.media and user.from_hub:
        root = shared_folder(examples)
    for example in examples:
        source = {"path": example.file}
        name = user.path[example.row]
        if user.media:  # `datasets` has made it absolute
            name = os.path.relpath(example.file, root)
        names.append(name)
        names_of_file.setdefault(example.file, set()).add(name)
        key = name
        if is_video:
            source.update(start=example.start, end=example.end)
            key = window_key(name, example.start, example.end)
        sources.append(source)
        keys.append(key)
    columns = {}
    if len(names_of_file) < len(set(names)):
        columns["video"] = [longest_name(names_of_file[example.file]) for example in examples]
    return make_table([example.captions for example in examples], keys, sources, **columns)


def longest_name(names):
    """The longest of a file's names, without ./ and the like: the one with its ending.

    It depends neither on the order of the rows nor on the folder in which the files are.
    """
    normalized = sorted({os.path.normpath(name) for name in names})
    return max(normalized, key=len)


def add_sound_and_subtitles(data, user, examples, options, root):
    """The data with the columns sound and subtitle, by the columns `audio` (a file; empty = the
    video's own sound) and `subtitle` of the first row of each example."""
    import datasets

    rows = [example.row for example in examples]
    table = user.table.select(rows)
    if "s" in options.modalities and "subtitle" in table.column_names:
        subtitles = [(text or "").strip() for text in table["subtitle"][:]]
        data = with_column(data, "subtitle", subtitles, datasets.Value("string"))
        data = with_subtitle_note(data, options)
    if "a" not in options.modalities or user.in_table:
        return data
    files = [None] * len(rows)
    if "audio" in table.column_names:
        missing = []
        for k, name in enumerate(table["audio"][:]):
            path = os.path.join(root, name or "")
            if name and os.path.isfile(path):
                files[k] = path
            elif name:
                missing.append(name)
        if missing:
            data = with_note(data, f"{len(missing):,} files of sound are not there, first "
                                   f"{missing[0]}")
    return with_sound(data, files)


# ---- further captions ----
def read_captions(file):
    """[(path or name, start, end, captions)] of a file of further captions."""
    table = read_tables(Path(file).expanduser()).splits["train"]
    names = table.column_names
    image = require_column("--image-column", "", names, (*VIDEO_COLUMNS, *IMAGE_COLUMNS))
    caption = require_column("--caption-column", "", names, CAPTION_COLUMNS)
    num_rows = len(table)
    user = UserTable(str(file), table, [""] * num_rows, list(range(num_rows)), image, caption, None)
    user.path = user.texts(image)
    examples = group_examples(user, user.path)
    return [(example.file, example.start, example.end, example.captions) for example in examples]
