"""Puts the tables of benchmarks/results/ into docs/results.md, so that none is typed by hand.

    python -m benchmarks.report            # fills the page
    python -m benchmarks.report --check    # exit code 1 if page and files differ; a test calls it

A block of the page begins with `<!-- results: NAME -->` and ends with `<!-- /results -->`. Between
them is the first table of benchmarks/results/NAME.md, with the list of what was not run.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def first_table(name):
    """The first table of a results file, and the list "Not run" if it follows: consecutive lines
    that begin with |, and then with -."""
    path = ROOT / "benchmarks" / "results" / f"{name}.md"
    text = path.read_text(encoding="utf8")
    return re.search(r"(^\|.*\n)+(\nNot run:\n\n(^- .*\n)+)?", text, re.MULTILINE)[0]


def fill_block(match):
    """A block of the page with the table of its file."""
    begin, name, end = match.groups()
    return begin + first_table(name) + end


def fill(text):
    """The page, with the table of each block replaced by that of its file."""
    return BLOCK.sub(fill_block, text)


def main(argv=None):
    """Fills the page, or with --check only tells whether it agrees with the files."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--check", action="store_true",
                   help="change nothing; exit code 1 if a table differs")
    args = p.parse_args(argv)
    page = PAGE.read_text(encoding="utf8")
    filled_page = fill(page)
    if args.check and page != filled_page:
        raise SystemExit("docs/results.md: a table differs from benchmarks/results; run "
                         "python -m benchmarks.report")
    PAGE.write_text(filled_page, encoding="utf8")


if __name__ == "__main__":
    main()
