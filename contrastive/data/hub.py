"""What is read with pandas and the library `datasets`: tables of the user and of the Hugging Face
hub, columns by the names that flags give, and whole folders of the hub."""

import contextlib
import glob
import os
import re
import warnings
from pathlib import Path

from contrastive.core.processes import UserError, opening

import pyarrow as pa

COMMITS = {}  # {repository: commit} of all that this process has read, for summary.json
TABLE_TYPES = (".csv", ".tsv", ".jsonl", ".parquet")
FILE_TYPES = (*TABLE_TYPES, ".tar")
# the text of a list or dict, as tables are written to a csv; "[music]" is none
TEXT_OF_LIST = re.compile(r"""(?s)^\s*[\[{]\s*['"].*[\]}]\s*$""")


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


def read_repository(repository, revision=None):
    """{split as the hub calls it: table} of a hub id.

    Args:
        revision: commit, branch or tag.
    """
    import datasets

    builder = datasets.load_dataset_builder(repository, revision=revision)
    COMMITS[repository] = builder.hash
    is_cached = type(builder).__name__ == "Cache"  # it takes the latest commit in the cache
    if revision and is_cached and builder.hash != revision:
        raise UserError(f"without the hub, the cache of {repository} has the commit {builder.hash} "
                        "alone")
    with generating():
        builder.download_and_prepare()
    return builder.as_dataset()


@contextlib.contextmanager
def generating():
    """Inside, what `datasets` cannot generate is the error that was the cause."""
    import datasets

    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ or error.__context__ or error) from None


# ---- tables ----
def read_table(path):
    """The table (datasets.Dataset) of a csv, tsv, jsonl or parquet file."""
    import datasets

    path = str(path)
    kind = Path(path).suffix
    if kind not in TABLE_TYPES:
        raise UserError(f"{path} is none of {', '.join(FILE_TYPES)}")
    with opening(path), generating():
        if kind in (".csv", ".tsv"):
            return read_csv(path, {".csv": ",", ".tsv": "\t"}[kind])
        # `datasets` knows a cached table by the time of its file, which an unpacked file may share
        # with the one before; a name with the size makes it another table.
        builder = {".jsonl": "json", ".parquet": "parquet"}[kind]
        name = f"{builder}-{os.path.getsize(path)}"
        return datasets.load_dataset(
            builder, name, data_files={"train": glob.escape(path)}, split="train")


def read_csv(path, separator):
    """The table of a csv, whose cells are text: 000 and NA stay as they are. Raises: UserError for
    what pandas would read otherwise than it is meant."""
    import datasets
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            cells = pandas.read_csv(
                path, sep=separator, dtype=str, keep_default_na=False, index_col=False,
                encoding="utf-8-sig")
        except pandas.errors.ParserWarning:  # where later rows are longer, pandas names the line
            raise UserError(f"{path}: its rows have more fields than the header; a field with a "
                            "comma stands in quotation marks, and a file with tabs is a .tsv"
                            ) from None
    columns = {}
    for name in cells.columns:
        if name.endswith(".1") and name[:-2] in cells.columns:  # as pandas calls the second one
            raise UserError(f"{path}: two columns are called {name[:-2]}")
        texts = cells[name].tolist()
        for text in texts:
            if "\n" in text or "\r" in text:
                raise UserError(f"{path}: a cell of {name} has a line break, as where a stray "
                                f"quotation mark swallows rows: {text[:60]!r}; a jsonl or parquet "
                                "file may have line breaks")
        columns[name] = pa.array(texts, pa.string())
    return datasets.Dataset(pa.table(columns))


# ---- columns ----
def find_column(flag, name, columns, candidates, *, required=True):
    """The column that a flag names; without one, that of the candidates which exists. None if
    there is none and none is required. Raises: UserError if there is none, or several."""
    names = candidates
    if name:
        names = [name]
    existing = [column for column in names if column in columns]
    if len(existing) > 1:
        raise UserError(f"{flag}: which of {' and '.join(existing)} is it?")
    if existing:
        return existing[0]
    if name or required:
        raise UserError(f"{flag}: there is no column {' or '.join(names)}; there are: "
                        + ", ".join(columns))
    return None
