"""Annotation files of the sets by name: found below --data-dir, read, and counted against the papers."""

import contextlib
import csv
import json
from pathlib import Path

from engine.base import UserError, first_line, say


def check_split(name, split, splits, hint=""):
    """Raises UserError where a set has no such split."""
    if split not in splits:
        raise UserError(f"{name} has no {split} split; it has: {', '.join(splits)}{hint}")


def annotation_root(name, files, options):
    """Folder of the annotation files: --data-dir, else --video-dir.   files: {split: [(name or pattern, reader)]}."""
    root = options.get("data_dir") or options.get("video_dir")
    if not root:
        patterns = ", ".join(pattern for of_split in files.values() for pattern, _ in of_split)
        raise UserError(f"--dataset {name} needs --video-dir (the folder of its videos) and --data-dir (its annotation "
                        f"files: {patterns})")
    return Path(root).expanduser()


def annotation_file(name, split, files, root):
    """(annotation file of a split, its reader): the first of `files` that is below a folder."""
    for pattern, reader in files[split]:
        if file := find_file(root, pattern):
            return file, reader
    patterns = ", ".join(pattern for pattern, _ in files[split])
    raise UserError(f"{name} ({split}): none of {patterns} is in {root}; --data-dir names the folder of the annotation "
                    "files")


def find_file(root, *patterns):
    """The first file of these names or patterns below a folder, in their order; None where there is none."""
    return next((f for pattern in patterns for f in sorted(root.rglob(pattern)) if f.is_file()), None)


@contextlib.contextmanager
def layout_of(file, *further):
    """Around the reading of an annotation file: what another layout than expected raises, and errors of the `further`
    kinds, are a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, *further) as error:  # ValueError: no json
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{file} has another layout than expected ({why})") from error


def load_json(file):
    """Content of a UTF-8 file of JSON (Path). Raises ValueError."""
    return json.loads(file.read_text(encoding="utf8"))


def csv_rows(file, separator=","):
    """(number of its last line, row as a dict) for each row of a csv file with a header.

    Raises: UserError for a row with another number of fields."""
    with open(file, newline="", encoding="utf-8-sig") as f:
        reader = csv.DictReader(f, delimiter=separator)
        for row in reader:
            if None in row or None in row.values():
                first = next(iter(row.values()))
                raise UserError(f"{file}: the row of {first} has another number of fields than the header")
            yield reader.line_num, row


def load_plain_pickle(path):
    """What an annotation pickle holds: builtin containers, numbers, strings and numpy arrays.

    Raises: UserError for a pickle that asks for anything else, or that cannot be read.
    """
    import pickle
    arrays = {"ndarray", "dtype", "scalar", "_reconstruct", "_frombuffer"}
    builtin = {"set", "frozenset", "complex", "bytearray", "unicode", "long"}
    plain = {"builtins": builtin, "__builtin__": builtin}

    class Plain(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes, and so arrays, for Python 2
                return lambda text, _: text.encode("latin1")
            if name in (arrays if module.startswith("numpy") else plain.get(module, ())):
                return super().find_class(module, name)
            raise UserError(f"{path}: asks for {module}.{name}; only plain data is read from pickles")
    try:
        with open(path, "rb") as f:
            return Plain(f, encoding="latin1").load()
    except UserError:
        raise
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
        raise UserError(f"{path}: not a readable pickle ({first_line(error)})") from error


def count_note(name, split, found, expected, what="examples"):
    """"", or a warning, said and for the note, where a split has not the number of examples that the papers have."""
    if found == expected:
        return ""
    say(f"WARNING: {name} ({split}) has {found:,} {what}, {expected:,} are expected: the numbers are not comparable "
        "with the papers'")
    return f"WARNING: {found:,} {what}, {expected:,} expected"
