"""Numbers in messages, and the names of flags and scripts."""

import os
import re
from pathlib import Path


def counted(number, name):
    """'2 captions cut' of 2 and 'captions_cut', '1 caption cut' of 1; '1 without class'."""
    words = name.replace("_", " ")
    if number == 1:
        words = re.sub(r"(?<!s)s\b", "", words, count=1)
    return f"{number:,} {words}"


def shortened(text, length=60):
    """The text, of which a message shows so many characters."""
    text = str(text)
    if len(text) > length:
        return text[:length] + "..."
    return text


def short_path(name):
    """The last two parts of a path or of an id on the hub, which tell it from others in a line."""
    return "/".join(Path(name).parts[-2:])


def listed(words, count=10):
    """Words in a message, 'a', 'b': the first of them, and each not longer than a message needs."""
    shown = [repr(shortened(word)) for word in words[:count]]
    if len(words) > count:
        shown.append("...")
    return ", ".join(shown)


def name_of(flag):
    """'tau_min' of '--tau-min', 'base' of '--no-base'."""
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def flag_of(name):
    """'--tau-min' of 'tau_min'."""
    return "--" + name.replace("_", "-")


def command_of(file):
    """A script as python takes it here, 'temo.py'; in a package '-m variants.temo_experts'."""
    path = Path(file)
    if (path.parent / "__init__.py").exists():
        return f"-m {path.parent.name}.{path.stem}"
    return os.path.relpath(path)
