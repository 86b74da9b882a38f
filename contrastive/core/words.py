"""Numbers in messages."""

import re


def counted(number, name):
    """'2 captions cut' of 2 and 'captions_cut', '1 caption cut' of 1; '1 without class'."""
    words = name.replace("_", " ")
    if number == 1:
        words = re.sub(r"(?<!s)s\b", "", words, count=1)
    return f"{number:,} {words}"
