"""Reads users' text, csv, json and pickle files, whichever program wrote them and even if they were cut short.

Every error is one line that names the file and, if there is one, the line in it. All text that is returned can be
written as UTF-8: a lone half of a surrogate pair becomes U+FFFD, with a warning.
"""

import contextlib
import csv
import io
import itertools
import json
import math
import pickle
import re
from pathlib import Path

from contrastive.engine.base import UserError, first_line, say_once

LAYOUT = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, MemoryError,
          ZeroDivisionError)
END = "\x1eend of the file\x1e"  # appended as a last row; it does not come as a row of its own if a quote is open


@contextlib.contextmanager
def expected_layout(file):
    """Context around code that parses a file: an unexpected key, type or number becomes a UserError with its name."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise too_large(file) from error
    except LAYOUT as error:
        why = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise UserError(f"{file} has another layout than expected ({why}); is it the right one, and whole?") from error


def too_large(file):
    """The UserError for a MemoryError while a file is read, which no flag of the training can prevent."""
    return UserError(f"{file}: not enough memory to read it; close other programs, or take a machine with more")


def read_text(path):
    """All of a text file, in UTF-8 with or without a byte order mark.   Raises: UserError."""
    try:
        raw = Path(path).read_bytes()
    except MemoryError as error:
        raise too_large(path) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from error
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}: not UTF-8 text (it is UTF-16); save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text; save it as UTF-8") from error


def read_lines(path):
    """[line] of the lines that are not empty, stripped."""
    return [line.strip() for line in io.StringIO(read_text(path)) if line.strip()]


def read_json(path):
    """What a JSON file holds.   Raises: UserError."""
    text = read_text(path)
    try:
        value = json.loads(text)
        return _writable(path, value) if re.search(r"\\u[dD][89a-fA-F]", text) else value
    except MemoryError as error:
        raise too_large(path) from error
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply to be a list of examples") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({first_line(error)}); is it whole?") from error


def _writable(path, value):
    """A JSON value with all its texts changed so that they can be written as UTF-8."""
    if isinstance(value, dict):
        return {_writable(path, k): _writable(path, v) for k, v in value.items()}
    if isinstance(value, list):
        return [_writable(path, v) for v in value]
    if not isinstance(value, str):
        return value
    whole = re.sub("[\ud800-\udfff]", "\ufffd", value)
    if whole != value:
        say_once(f"WARNING: {path}: some texts hold half of a surrogate pair, replaced by \ufffd")
    return whole


def csv_rows(path, needed=(), separator=","):
    """(line, {column: text}) of each row of a csv with a header; empty lines are skipped.

    Raises: UserError if a column of `needed` is missing, a row and the header differ in their number of fields, or a
        quote is never closed."""
    csv.field_size_limit(2**31 - 1)  # allow captions of a megabyte
    text = read_text(path)
    if "\0" in text:
        raise UserError(f"{path}: not UTF-8 text (it holds zeros); save it as UTF-8")
    rows = csv.reader(itertools.chain(io.StringIO(text, newline=""), [END]), delimiter=separator)
    header = next((row for row in rows if row), [END])
    columns = [c.strip() for c in header]
    missing = [c for c in needed if c not in columns]
    if missing or header == [END]:
        raise UserError(f"{path}: has no column {', '.join(missing)}" if missing else f"{path}: it is empty")
    begin = rows.line_num + 1
    for row in rows:
        if row == [END]:
            return
        if row and END in row[-1]:
            raise UserError(f"{path}: a quote in the row that begins at line {begin} is never closed")
        if row and len(row) != len(columns):
            raise UserError(f"{path}, line {begin}: {len(row)} fields, where the header has {len(columns)}")
        if row:
            yield begin, dict(zip(columns, row))
        begin = rows.line_num + 1


def whole_number(value):
    """int of a whole number, also one in a text.   Raises: ValueError for all else, 1.9, true and nan included."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or float(value) != int(float(value)):
        raise ValueError(f"{str(value)[:40]} is not a whole number")
    return int(float(value))


def number(value):
    """float of a finite number, also one in a text.   Raises: ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(float(value)):
        raise ValueError(f"{str(value)[:40]} is not a number")
    return float(value)


def words(value):
    """The text of a value: a string, a number as text, "" for null.   Raises: TypeError for anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
        raise TypeError(f"{str(value)[:40]} is not text")
    return "" if value is None else str(value)


def window(start, end):
    """(start, end) of a clip in seconds.   Raises: ValueError for a start before 0 or an end before the start."""
    start, end = number(start), number(end)
    if start < 0 or end < start:
        raise ValueError(f"a window from {start:g} s to {end:g} s: it ends before its start, or starts before 0")
    return start, end


# what a pickle of plain values and numpy arrays imports; numpy 1 and 2 name their modules differently
ARRAYS = {("numpy", "ndarray"), ("numpy", "dtype"),
          *((f"numpy.{core}.{file}", name) for core in ("core", "_core")
            for file, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer")))}
VALUES = {(module, name) for module in ("builtins", "__builtin__")
          for name in ("set", "frozenset", "complex", "bytearray", "unicode", "long")}


class PlainPickle(pickle.Unpickler):
    """Reads only builtin containers, numbers, strings and numpy arrays; nothing else is imported or called."""

    def find_class(self, module, name):
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes, and so arrays, for Python 2
            return lambda text, _: text.encode("latin1")
        if (module, name) in ARRAYS | VALUES:
            return super().find_class(module, name)
        raise UserError(f"asks for {module}.{name}; only plain data is read from pickles")


def load_plain_pickle(path):
    """What a pickle of plain data holds.   Raises: UserError if it cannot be read or asks for anything else."""
    try:
        with open(path, "rb") as f:
            return PlainPickle(f, encoding="latin1").load()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (pickle.UnpicklingError, EOFError, ImportError, OSError, *LAYOUT) as error:
        raise UserError(f"{path}: not a readable pickle ({first_line(error)})") from error
