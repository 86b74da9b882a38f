"""What is read with the library `datasets`: the tables of files and hub ids, their columns by the
names that flags give, and whole folders of the Hugging Face hub."""

import contextlib
import csv
import glob
import hashlib
import itertools
import os
import re
from pathlib import Path

from contrastive.core.processes import UserError

import pyarrow as pa
import pyarrow.parquet as pq

COMMITS = {}  # {repository: commit} of all that this process has read, for summary.json
WINDOW = ("start", "end")  # columns of a window in a video, in seconds
FIELDS_OF_CSV = "commas separate fields, and a field with a comma stands in quotation marks"


# ---- the hub ----
def hub_folder(repository, patterns, revision=None):
    """Downloads the files of a data set on the hub whose names have one of these patterns, or
    finds them in the hub's cache. Returns: their folder."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(
        repository, repo_type="dataset", allow_patterns=patterns, revision=revision))
    COMMITS[repository] = folder.name
    return folder


def note_commit(model):
    """Notes the commit of a model that has just been loaded by its hub id; a folder has none."""
    from huggingface_hub import constants

    folder = f"models--{model.replace('/', '--')}"
    latest = Path(constants.HF_HUB_CACHE) / folder / "refs" / "main"
    if latest.is_file() and not Path(model).exists():
        COMMITS[model] = latest.read_text()


# ---- tables ----
# {ending: builder of `datasets`}
TABLE_KINDS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json",
               ".parquet": "parquet", ".arrow": "arrow"}


def table_kind(file):
    """The builder of `datasets` that reads a file, csv for instance; None if it is no table."""
    return TABLE_KINDS.get(Path(str(file).removesuffix(".gz")).suffix.lower())


def read_files(files):
    """{split: table} of {split: paths}, files of one kind."""
    import datasets

    paths = list(itertools.chain(*files.values()))
    kind = table_kind(paths[0])
    if kind is None:
        raise UserError(f"{paths[0]}: a {Path(paths[0]).suffix} file is not one of csv, json, "
                        "jsonl, parquet, tar")
    options = {}
    if kind == "csv":
        options = csv_options(paths)
    check_class_names(kind, paths)
    patterns = {}
    for split in files:
        patterns[split] = [glob.escape(path) for path in files[split]]
    # `datasets` knows a cached table by the times of its files, which an unpacked file may share
    # with the one before; a name with their sizes makes it another table.
    sizes = "-".join(str(os.path.getsize(path)) for path in paths)
    name = f"{kind}-{hashlib.sha256(sizes.encode()).hexdigest()[:16]}"
    with without_progress_bars():
        return prepare(datasets.load_dataset_builder(kind, name, data_files=patterns, **options))


def check_class_names(kind, files):
    """Raises UserError if two parquet or arrow files number the classes of a column in other ways:
    `datasets` gives the numbers of all files the names of one."""
    import datasets

    first = {}  # {column: (class names, file)}
    for file in files:
        features = datasets.Features()
        if kind in ("parquet", "arrow"):
            features = datasets.Features.from_arrow_schema(read_schema(kind, file))
        for column, feature in features.items():
            names = getattr(feature, "names", None)
            if names is None:
                continue
            first_names, first_file = first.setdefault(column, (names, file))
            if names != first_names:
                raise UserError(f"{first_file} and {file} number the classes of the column {column}"
                                f" in other ways, {', '.join(first_names)} and {', '.join(names)}: "
                                "write both with one ClassLabel")


def read_schema(kind, file):
    """The arrow schema of a parquet or arrow file."""
    if kind == "parquet":
        return pq.read_schema(file)
    with pa.memory_map(str(file)) as content:
        try:
            return pa.ipc.open_stream(content).schema
        except pa.ArrowInvalid:  # the other of the two formats
            return pa.ipc.open_file(content).schema


def read_repository(source, revision=None):
    """{split: table} of a hub id (str) or a folder (Path), as `datasets` finds its files, by its
    names of splits.

    Args:
        revision: commit, branch or tag of a hub id.
    """
    import datasets

    builder = datasets.load_dataset_builder(str(source), revision=revision)
    if isinstance(source, str):
        COMMITS[source] = builder.hash
        is_cached = type(builder).__name__ == "Cache"  # it takes the latest commit in the cache
        if revision and is_cached and builder.hash != revision:
            raise UserError(f"without the hub, the cache of {source} has the commit "
                            f"{builder.hash} alone")
    if is_plain_csv(builder):
        options = csv_options(list(itertools.chain(*builder.config.data_files.values())))
        builder = datasets.load_dataset_builder(str(source), revision=revision, **options)
    elif isinstance(source, Path) and builder.info.features is None:
        files = list(itertools.chain(*builder.config.data_files.values()))
        check_class_names(table_kind(files[0]), files)
    return prepare(builder)


def is_plain_csv(builder):
    """Whether a builder reads csv files of whose columns a data card says nothing."""
    from datasets.packaged_modules.csv.csv import Csv

    if not isinstance(builder, Csv):
        return False
    if builder.info.features is not None:  # the card names the types, such as classes
        return False
    return builder.config.sep == "," and builder.config.names is None


def prepare(builder):
    """{split: table} of a builder of `datasets`, from its cache if they are in it."""
    with generating():
        builder.download_and_prepare()
    return builder.as_dataset()


@contextlib.contextmanager
def without_progress_bars():
    """Inside, `datasets` shows no progress bars: those of a table on the disk say "0 examples"."""
    import datasets

    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def csv_options(files):
    """Options of a builder that reads the cells of csv files as text: 000 and NA stay as they are.
    """
    import datasets

    separator = separator_of(files[0])
    headers = [read_header(file, separator) for file in files]
    check_headers(files, headers)
    features = datasets.Features()
    for number, column in enumerate(headers[0]):
        features[column or f"Unnamed: {number}"] = datasets.Value("string")
    return {"features": features, "sep": separator, "encoding": "utf-8-sig",
            "keep_default_na": False}


def check_headers(files, headers):
    """Raises UserError unless all csv files have the same columns, each of them once: `datasets`
    drops the columns that the first file lacks."""
    for file, header in zip(files, headers):
        for column in header:
            if column and header.count(column) > 1:
                raise UserError(f"{file}: two columns are called {column}; its header is "
                                + ", ".join(header))
        if set(header) != set(headers[0]):
            raise UserError(f"{files[0]} has the columns {', '.join(headers[0])}, but {file} has "
                            f"{', '.join(header)}: give both the same columns, empty ones too, or "
                            "move one of the files away")


def separator_of(file):
    """The separator of a csv: a tab if its first line has one and no comma."""
    with open_csv(file) as text:
        first_line = text.readline()
    if "\t" in first_line and "," not in first_line:
        return "\t"
    return ","


def open_csv(file):
    """A csv, opened as text."""
    import fsspec

    return fsspec.open(file, "rt", encoding="utf-8-sig", newline="", compression="infer")


def read_header(file, separator):
    """The fields of the first line of a csv.

    Raises: UserError if the first row has more fields than the header: pandas would take the first
        of them for an index. Later rows that are longer it refuses itself (`generating`).
    """
    with open_csv(file) as text:
        lines = csv.reader(text, delimiter=separator)
        header = next(lines)
        for row in lines:
            if len(row) > len(header):
                raise UserError(
                    f"{file}: line {lines.line_num} has {len(row)} fields, the header "
                    f"{len(header)}; {FIELDS_OF_CSV}")
            if row:
                break
    return header


@contextlib.contextmanager
def generating():
    """Inside, what `datasets` cannot generate is an error with its cause's own words."""
    import datasets

    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__ or error
        if isinstance(cause, datasets.table.CastError):
            raise ValueError(
                f"one file has the columns {', '.join(cause.table_column_names)}, another "
                f"{', '.join(cause.requested_column_names)}, or columns of other types") from None
        longer = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(cause))
        if longer:
            expected, line, number = longer.groups()
            raise ValueError(f"line {line} has {number} fields, the header {expected}; "
                             + FIELDS_OF_CSV) from None
        raise cause from None


# ---- columns ----
def pick_column(flag, named_column, columns, candidates):
    """The column that a flag names; without one, the first of the candidates that exists, or None.

    Raises: UserError if the named column does not exist.
    """
    if named_column:
        if named_column not in columns:
            raise UserError(f"{flag} {named_column}: there is no such column; there are: "
                            + ", ".join(columns))
        return named_column
    for name in candidates:
        if name in columns:
            return name
    return None


def require_column(flag, named_column, columns, candidates):
    """As pick_column, but raises UserError if there is none."""
    column = pick_column(flag, named_column, columns, candidates)
    if column is None:
        raise UserError(f"{flag}: none of {', '.join(candidates)} is there; there are: "
                        + ", ".join(columns))
    return column
