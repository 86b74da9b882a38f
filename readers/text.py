"""Somebody's text, csv, json and pickles, as any program on any machine may have written or cut them.

Every refusal is one line that names the file and, where there is one, the line. What is read is text that every later
step can write again: a lone half of a surrogate pair becomes U+FFFD, and that is said.
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

from engine.base import UserError, first_line, say_once

LAYOUT = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, MemoryError,
          ZeroDivisionError)
END = "\x1eend of the file\x1e"  # a row that no file has: inside an open quote it never comes


@contextlib.contextmanager
def expected_layout(file):
    """Around what takes a file apart: an unexpected key, type or number is a UserError that names the file."""
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
    """A UserError in place of a MemoryError while a file is read: no flag of the training makes it smaller."""
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
    """[line] without blanks around it, of those that are not empty."""
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
        raise UserError(f"{path}: nested too deep to be a list of examples") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({first_line(error)}); is it whole?") from error


def _writable(path, value):
    """A value of JSON whose texts can be written as UTF-8."""
    if isinstance(value, dict):
        return {_writable(path, k): _writable(path, v) for k, v in value.items()}
    if isinstance(value, list):
        return [_writable(path, v) for v in value]
    if not isinstance(value, str):
        return value
    whole = re.sub("[\ud800-\udfff]", "\ufffd", value)
    if whole != value:
        say_once(f"WARNING: {path}: some texts hold half a letter, written \ufffd here")
    return whole


def csv_rows(path, needed=(), separator=","):
    """(line, {column: text}) of each row of a csv with a header; an empty line is none.

    Raises: UserError where a column of `needed` is not there, a row has another number of fields than the header, or a
        quote is never closed."""
    csv.field_size_limit(2**31 - 1)  # a caption of a megabyte is one
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
    """int of a number or text that is one; 1.9, true and nan are none.   Raises: ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or float(value) != int(float(value)):
        raise ValueError(f"{str(value)[:40]} is no whole number")
    return int(float(value))


def number(value):
    """float of a number or text that is one, and finite.   Raises: ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(float(value)):
        raise ValueError(f"{str(value)[:40]} is no number")
    return float(value)


def words(value):
    """The text of a value: a string, a number as text, "" for null.   Raises: TypeError for anything else."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
        raise TypeError(f"{str(value)[:40]} is no text")
    return "" if value is None else str(value)


def window(start, end):
    """(start, end) in seconds of a clip.   Raises: ValueError where it does not begin at 0 or later, and end after."""
    start, end = number(start), number(end)
    if start < 0 or end < start:
        raise ValueError(f"a window from {start:g} s to {end:g} s: an end before the start, or a start before 0")
    return start, end


# names that a pickle of plain values and numpy arrays asks for; numpy 1 and 2 call their modules differently
ARRAYS = {("numpy", "ndarray"), ("numpy", "dtype"),
          *((f"numpy.{core}.{file}", name) for core in ("core", "_core")
            for file, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer")))}
VALUES = {(module, name) for module in ("builtins", "__builtin__")
          for name in ("set", "frozenset", "complex", "bytearray", "unicode", "long")}


class PlainPickle(pickle.Unpickler):
    """Reads builtin containers, numbers, strings and numpy arrays; nothing else is imported or called."""

    def find_class(self, module, name):
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes, and so arrays, for Python 2
            return lambda text, _: text.encode("latin1")
        if (module, name) in ARRAYS | VALUES:
            return super().find_class(module, name)
        raise UserError(f"asks for {module}.{name}; only plain data is read from pickles")


def load_plain_pickle(path):
    """What a pickle of plain data holds.   Raises: UserError where it cannot be read, or asks for anything else."""
    try:
        with open(path, "rb") as f:
            return PlainPickle(f, encoding="latin1").load()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (pickle.UnpicklingError, EOFError, ImportError, OSError, *LAYOUT) as error:
        raise UserError(f"{path}: not a readable pickle ({first_line(error)})") from error
