"""Puts the tables of benchmarks/results/ into docs/results.md, so that no number of a table is typed by hand.

    python -m benchmarks.report            # fills the page
    python -m benchmarks.report --check    # exit code 1 if page and files differ; a test calls it

A block of the page begins with `<!-- results: NAME -->` and ends with `<!-- /results -->`. Between them is the first
table of benchmarks/results/NAME.md.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def first_table(name):
    """The first table of a results file: consecutive lines that begin with |."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf8")
    return re.search(r"(^\|.*\n)+", text, re.MULTILINE)[0]


def filled(text):
    """The page, with the table of each block replaced by that of its file."""
    return BLOCK.sub(lambda block: block[1] + first_table(block[2]) + block[3], text)


def main(argv=None):
    """Fills the page, or with --check only tells whether it agrees with the files."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table differs")
    check, now = p.parse_args(argv).check, PAGE.read_text(encoding="utf8")
    if check and now != filled(now):
        raise SystemExit("docs/results.md: a table differs from benchmarks/results; run python -m benchmarks.report")
    PAGE.write_text(filled(now), encoding="utf8")


if __name__ == "__main__":
    main()
