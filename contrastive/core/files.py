"""Small files of a run: JSON and tensors, and names that are safe in paths."""

import contextlib
import json
import os
import re
from pathlib import Path

from contrastive.core.processes import opening

from safetensors.torch import save_file


def read_json(path, default=None):
    """The content of a JSON file, or `default`, if one is given, where there is no file."""
    if default is not None and not Path(path).is_file():
        return default
    with opening(path):
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))


def logged_rows(path):
    """The rows of a metrics.jsonl; a crash may have cut the last one, or a run is writing it."""
    lines = Path(path).read_text(encoding="utf8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def whole_file(path, suffix=".tmp"):
    """Yields a temporary path to write, which takes the name `path` at the end, so that no file is
    ever half written; if something fails, it is removed.

    Args:
        suffix: of the temporary path, in place of the file's own.
    Raises: UserError, one line with the path.
    """
    temporary = Path(path).with_suffix(suffix)
    try:
        with opening(path):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    """Writes a JSON file. Tensors and arrays become lists of numbers; what JSON does not have
    becomes a string."""
    text = json.dumps(value, indent=1, default=plain_value)
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf8")


def plain_value(value):
    """A tensor or an array as a list of numbers, anything else as a string."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def write_tensors(path, tensors, metadata=None):
    """Writes a safetensors file of {name: tensor}, and {name: text} of its metadata."""
    copies = {}
    for name, tensor in tensors.items():
        # safetensors refuses tensors that share memory
        copies[name] = tensor.detach().cpu().contiguous().clone()
    mask = os.umask(0)
    os.umask(mask)
    with whole_file(path) as temporary:
        # an empty dict beside no tensors would make a header that cannot be read
        save_file(copies, temporary, metadata or None)
        temporary.chmod(0o666 & ~mask)  # save_file lets nobody but the user read it


def slug(name):
    """A data set's name as a part of a file name: letters, digits, dots and dashes alone, and at
    its ends neither a dot, which would hide the file, nor a dash."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(name)).strip(".-")


def flatten(tree, prefix=""):
    """Joins the keys of nested dicts: {'a': {'b': 1}} -> {'a/b': 1}."""
    leaves = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update(flatten(value, f"{prefix}{key}/"))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
