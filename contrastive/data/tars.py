"""Tars as the library webdataset has them, read in place by an index of their samples.

A sample is the adjacent files of a tar that share a name up to the first dot: 000017.jpg,
000017.txt, 000017.cls. The index is a table in the cache of `datasets`; tars that changed are
indexed again.
"""

import itertools
import json
import os
import re
import tarfile

from contrastive.core.processes import UserError, first_line, opening
from contrastive.core.words import counted, shortened
from contrastive.data.clips import clip_options
from contrastive.data.folders import check_name
from contrastive.data.options import DataOptions
from contrastive.data.pixels import IMAGE_TYPES, VIDEO_TYPES
from contrastive.data.table import ROWS_AT_ONCE, Data, join_notes
from contrastive.data.table_files import TEXT_OF_CONTAINER, find_column, generating

import numpy as np

TEXT_TYPES = ("txt", "cls")  # files that are read while the index is built
INDEX_VERSION = 9  # the cache compares arguments, not code: changed rows need a new number
SAMPLE_NAME = re.compile("(.*/)?[^/.]*")  # the path of a file up to the first dot of its name


# ---- the splits of tars ----
def open_tars(name, tars, options):
    """{split: Data} of {split: paths}."""
    return {split: index_tars(name, split, tars[split], options) for split in tars}


# ---- samples ----
class StrictTarInfo(tarfile.TarInfo):
    """A member of a tar. A bad header is an error; tarfile takes it for the end of the file."""

    @classmethod
    def fromtarfile(cls, tar):
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # zeros: the regular end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{first_line(error)} at byte {tar.offset}") from error


def sample_name(member):
    """The path of a member up to the first dot of its name."""
    return SAMPLE_NAME.match(member.name)[0]


def is_sample_file(member):
    """Whether a member of a tar is a file whose name does not begin with a dot."""
    return member.isreg() and not os.path.basename(member.name).startswith(".")


def read_samples(file, types):
    """Yields (name, {extension: content}) of the samples of a tar.

    Args:
        file: an open file.
        types: extensions whose content is read. Content of others: (offset, size).
    """
    with tarfile.open(fileobj=file, mode="r:", tarinfo=StrictTarInfo) as tar:
        files = filter(is_sample_file, tar)
        for name, members in itertools.groupby(files, sample_name):
            parts = {}
            for member in members:
                extension = member.name[len(name) + 1:].lower()
                if extension in types:
                    parts[extension] = tar.extractfile(member).read()
                else:
                    parts[extension] = (member.offset_data, member.size)
            yield name.lstrip("/"), parts


def parse_sample(parts, options):
    """(extension of the image or video, captions, class) of {extension: content}; the class is -1
    if there is none. Raises: ValueError or UserError without an image or a caption."""
    extension = find_column(
        "--image-column", options.image_column, parts, usual_names=(*IMAGE_TYPES, *VIDEO_TYPES))
    label_part = find_column(
        "--label-column", options.label_column, parts, usual_names=("cls",), required=False)
    caption_part = find_column(
        "--caption-column", options.caption_column, parts, usual_names=("txt",),
        required=label_part is None)

    label = -1
    if label_part is not None:
        label = int(parts[label_part])
    if caption_part is None and label < 0:
        raise ValueError(f"the class is {label}, which is none, and there is no caption")
    if caption_part is None:
        return extension, [class_caption(label)], label
    text = parts[caption_part].decode("utf-8-sig")
    if TEXT_OF_CONTAINER.match(text):
        raise ValueError(f"{shortened(text)!r} is the text of a list, but needs a caption a line")
    lines = text.split("\n")  # splitlines would also split at U+2028
    captions = [line.strip() for line in lines if line.strip()]
    if not captions:
        raise ValueError("an empty caption")
    return extension, captions, label


def class_caption(label):
    """The caption of a sample that has a class alone."""
    return f"class {label}"


# ---- the index ----
def index_tars(name, split, tars, options):
    """Data of all samples of these tars in their order. The key of a row is the sample's name; if
    several samples share one, it is TAR/NAME."""
    table = read_index(name, tars, options)
    columns = {}                                                           # {name: (M,)}
    for column in ("error", "video", "shard", "key", "label"):
        columns[column] = table.data.column(column).to_numpy()
    errors = columns["error"]
    reasons = errors[errors != ""]
    readable = np.flatnonzero(errors == "")
    note = ""
    if len(reasons):
        note = f"{counted(len(reasons), 'samples')} left out, first {reasons[0]}"
    if len(readable) <= len(reasons):
        raise UserError(f"--dataset {name}: {note or 'no samples'}")

    shards = columns["shard"][readable]
    keys = columns["key"][readable]
    table = table.select(readable).remove_columns(["shard", "video", "error"])
    if len(set(keys)) < len(keys):  # every tar counts from 0
        names = [path.removesuffix(".tar") for path in paths_below_one_folder(tars)]
        keys = [f"{names[shard]}/{key}" for shard, key in zip(shards, keys)]
        table = table.remove_columns("key").add_column("key", keys)
    has_captions = not are_class_numbers(table.select_columns(["captions", "label"]))
    if columns["label"][readable].max() < 0:
        table = table.remove_columns("label")

    clip = None
    if columns["video"].any():
        clip = clip_options(options)
    if not has_captions and not options.by_class:
        note = join_notes(note, "no captions: the classes serve as captions")
    return Data(name, split, table, clip=clip, has_captions=has_captions, shards=shards, note=note)


def read_index(name, tars, options):
    """The table of index_rows, from the cache of `datasets` if these tars are in it."""
    import datasets

    files = []
    for tar in tars:
        files.append([os.path.abspath(tar), os.stat(tar).st_ctime_ns])
    columns = [options.image_column, options.caption_column, options.label_column]
    text = datasets.Value("string")
    number = datasets.Value("int64")
    features = datasets.Features({
        "source": {"path": text, "offset": number, "size": number},
        "captions": datasets.List(text), "key": text, "label": number, "shard": number,
        "video": datasets.Value("bool"), "error": text})
    arguments = {  # as text, since `datasets` divides a list among processes
        "files": json.dumps(files), "columns": json.dumps(columns), "version": INDEX_VERSION}
    with opening(f"--dataset {name}"), generating():
        return datasets.Dataset.from_generator(index_rows, features=features, gen_kwargs=arguments)


def index_rows(files, columns, version):
    """Yields the rows of an index, tar by tar; `error` says why a sample is left out.

    Args:
        files: JSON of [path, time] of each tar.
        columns: JSON of the columns of image, caption and label that the user named, or "".
        version: of the index.
    """
    image_column, caption_column, label_column = json.loads(columns)
    options = DataOptions(
        image_column=image_column, caption_column=caption_column, label_column=label_column)
    types = {*TEXT_TYPES, caption_column, label_column} - {image_column, ""}
    for shard, (path, _) in enumerate(json.loads(files)):
        with opening(f"{path}: not a tar that can be read to its end"), open(path, "rb") as file:
            samples = list(read_samples(file, types))
        for name, parts in samples:
            check_name(f"{path}/{name}")
            row = {"key": name, "shard": shard, "captions": [], "label": -1, "video": False,
                   "error": ""}
            try:
                extension, row["captions"], row["label"] = parse_sample(parts, options)
                row["video"] = extension in VIDEO_TYPES
                offset, size = parts[extension]
                row["source"] = {"path": path, "offset": offset, "size": size}
            except Exception as error:
                row["error"] = f"{name} of {path}: {first_line(error)}"
            yield row


def paths_below_one_folder(tars):
    """The paths of tars below the deepest folder that holds them all."""
    paths = [os.path.abspath(tar) for tar in tars]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, folder) for path in paths]


def are_class_numbers(table):
    """Whether the captions of all rows of an index are their classes, as parse_sample writes
    them."""
    for rows in table.iter(ROWS_AT_ONCE):
        for captions, label in zip(rows["captions"], rows["label"]):
            if captions != [class_caption(label)]:
                return False
    return True
