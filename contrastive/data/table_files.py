"""Files of tables, csv, json and parquet, and the columns in them by usual names or by flags."""

import contextlib
import csv
import glob
import os
import re
from pathlib import Path

from contrastive.core.processes import UserError, opening
from contrastive.core.words import counted, listed, shortened

import pyarrow as pa

TABLE_TYPES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
FILE_TYPES = (*TABLE_TYPES, ".tar")
# {flag: usual names of its column}
USUAL_COLUMNS = {
    "--image-column": ("image", "video", "file_name", "filepath", "img", "jpg"),
    "--caption-column": ("caption", "captions", "text", "txt", "title"),
    "--label-column": ("label", "class", "cls")}
# The text of a list, dict, tuple or array of texts, or of an empty one, as tables are written to a
# csv. "[music]" and ("so he said") are none.
TEXT_OF_CONTAINER = re.compile(r"""
    (?s)                        # captions may have several lines
    \s*(\w+\()?                # array( or another type
    (
        (\[([\[({\s] | \w+\( | (None|nan|null),)* | {\s* | \((?=.*['"],))   # opens: a tuple has a
        u?['"].*                                                         # comma behind a text
    |
        [\[({]\s*(None|nan|null)?\s*
    )
    [\])}]\s*$""", re.VERBOSE)


# ---- tables ----
def read_table(path):
    """The table (datasets.Dataset) of a csv, tsv, json, jsonl or parquet file."""
    import datasets

    path = str(path)
    kind = Path(path).suffix
    if kind not in TABLE_TYPES:
        raise UserError(f"{path} is none of {', '.join(FILE_TYPES)}")
    with opening(path), generating():
        if kind in (".csv", ".tsv"):
            return read_csv(path, {".csv": ",", ".tsv": "\t"}[kind])
        # `datasets` knows a cached table by the time of its file, which an unpacked file may share
        # with the one before; no two have this other time.
        builder = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}[kind]
        name = f"{builder}-{os.stat(path).st_ctime_ns}"
        return datasets.load_dataset(
            builder, name, data_files={"train": glob.escape(path)}, split="train")


def join_tables(tables):
    """One table with the rows of several; a column that one of them lacks is empty there.

    Raises: ValueError if a column is of two kinds, or numbers its classes in two ways.
    """
    import datasets

    kinds = {}
    for table in tables:
        for column, kind in table.features.items():
            if kind == datasets.Value("null"):
                continue
            other = kinds.setdefault(column, kind)
            if other != kind:
                raise ValueError(f"the column {column} is {shortened(other, 100)} in one file or "
                                 f"split and {shortened(kind, 100)} in another; write both alike")
    return datasets.concatenate_datasets(tables)


def read_csv(path, separator):
    """The table of a csv file, whose cells are texts: 000 and NA stay as they are.

    Raises: UserError with the line of what could be read in two ways.
    """
    import datasets

    rows = []
    line = 1  # where the next row begins
    with open(path, encoding="utf-8-sig", newline="") as file:
        # strict: text behind the end of a quoted field is an error
        lines = csv.reader(file, delimiter=separator, strict=True)
        try:
            header = next(lines, [])
            check_header(path, header, separator)
            line = lines.line_num + 1
            for fields in lines:
                if fields:  # no blank line
                    check_fields(f"{path}, line {line}", fields, header, separator)
                    rows.append(fields)
                line = lines.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}, line {line}: {error}; a quoted field ends with a quotation "
                            "mark, and inside it one is written twice") from None
        except UnicodeDecodeError:
            raise UserError(f"{path} is not in UTF-8: save it again with this encoding") from None
    if not rows:
        raise UserError(f"{path} has a header, but no rows: write some, or move it away")
    columns = {}
    for name, texts in zip(header, zip(*rows)):
        columns[name] = pa.array(texts, pa.string())
    return datasets.Dataset(pa.table(columns))


def check_header(path, header, separator):
    """Raises UserError unless the header of a csv file has two columns or more, each once."""
    if not header:
        raise UserError(f"{path} is empty, but needs a header such as image,caption")
    for name in header:
        if header.count(name) > 1:
            raise UserError(f"{path}: two columns are called {listed([name])}: rename one")
    if len(header) == 1:
        sign = {",": "a comma", "\t": "a tab, as its ending .tsv says"}[separator]
        raise UserError(f"{path}: its header is one field, {listed(header)}; fields are separated "
                        f"by {sign}")


def check_fields(place, fields, header, separator):
    """Raises UserError unless a row of a csv file has as many fields as the header, and no field
    that holds another row, as where a stray quotation mark swallows rows."""
    if len(fields) != len(header):
        raise UserError(f"{place} has {counted(len(fields), 'fields')}, the header {len(header)}; "
                        "a field with a comma or a line break stands in quotation marks")
    for text in fields:
        lines = text.splitlines()
        if len(lines) > 1 and holds_row(lines, len(header), separator):
            raise UserError(f"{place}: a field holds whole rows, {shortened(text)!r}; remove the "
                            "stray quotation mark, or write a jsonl file")


def holds_row(lines, num_fields, separator):
    """Whether one of these lines alone has as many fields as a row."""
    return any(len(fields) == num_fields for fields in csv.reader(lines, delimiter=separator))


@contextlib.contextmanager
def generating():
    """Inside, what `datasets` cannot generate is the error that was the cause."""
    import datasets

    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ or error.__context__ or error) from None


# ---- columns ----
def find_column(flag, name, columns, *, usual_names=None, required=True, advice=""):
    """The column that a flag names; without one, the only one with a usual name.

    Args:
        flag: a key of USUAL_COLUMNS, or another flag with `usual_names`.
        name: that the user gave, or "".
        columns: that exist.
        advice: behind the message, if there is none.
    Returns: None if there is none and none is required.
    Raises: ValueError if there is none, or several.
    """
    names = usual_names or USUAL_COLUMNS[flag]
    if name:
        names = [name]
    existing = [column for column in names if column in columns]
    if len(existing) > 1:
        raise ValueError(f"it has the columns {' and '.join(existing)}; {flag} says which it is")
    if existing:
        return existing[0]
    if name or required:
        raise ValueError(f"{flag}: there is no column {listed(names)}; there are: "
                         + listed(list(columns)) + advice)
    return None
