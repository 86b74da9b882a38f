"""Ranges of flags, as argparse's `type`: a value that is outside or not finite is refused in one line."""

import argparse
import math
from pathlib import Path


def between(low, high=math.inf, kind=float, words=""):
    """A `type` for add_argument: finite numbers from low to high; anything else is refused in one line."""
    words = words or (f"between {low} and {high}" if high < 10**6 else f"at least {low}")
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be a {'' if kind is float else 'whole '}number") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {words} and finite")
        if value < low or high < value < 10**6:
            raise argparse.ArgumentTypeError(f"{text}: must be {words}")
        if value > high:
            raise argparse.ArgumentTypeError(f"{text}: must be at most {high:,}")
        return value
    return parse


positive = between(math.nextafter(0, 1), words="> 0")          # temperatures, periods
nonnegative = between(0)                                       # weights, strengths
rate = between(0, 1e30)                                        # learning rates, weight decay: steps fit in float32
part = between(0, 1)                                           # probabilities, shares
below_one = between(0, 1 - 1e-7, words="at least 0 and below 1")  # betas, momentum
count = between(1, 10**9, int, words="at least 1")             # sizes, rounds
whole = between(0, 10**9, int, words="at least 0")             # 0 = off


def new_file(*endings):
    """A `type` for a file that will be written, with one of these endings (none: any). It is refused before the work if
    it is a folder, or is in no existing folder."""
    def parse(text):
        path, inside = Path(text), f"give a file in it, such as {Path(text) / ('out' + (endings or ('.csv',))[0])}"
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: cannot be written (it is a folder); {inside}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: cannot be written (there is no folder {path.parent}); make it")
        if endings and path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(f"{text}: must end in {' or '.join(endings)}")
        return text
    return parse


picture_file = new_file(".png", ".pdf")
