"""Draws figures of finished runs from their folders, and prints their numbers.

    python -m tools.figures temo runs/NAME ...                  # the pictures of each run, again
    python -m tools.figures similarities runs/infonce runs/temo # a figure of several runs

The first argument is a method, whose pictures are drawn into the folder of each run, or a figure
that compares runs, of which the first is the baseline. The pages of docs/ have the commands.
"""

import sys
from pathlib import Path

from contrastive.core.processes import clean_exit, print_main
from contrastive.engine.flags import OneLineErrorParser
from contrastive.figures import METHODS, draw, figures_of_runs


def parse_args(argv=None):
    """The command line."""
    parser = OneLineErrorParser("python -m tools.figures", __doc__.splitlines()[0])
    parser.add_argument("figure", choices=[*METHODS, *figures_of_runs()],
                        help="method or figure; see the pages of docs/")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs")
    parser.add_argument("--out", default="", metavar="FILE",
                        help="picture of a figure of several runs, .png or .pdf; empty = "
                             "FIGURE.png")
    args = parser.parse_args(argv)
    parser.only(args.figure not in METHODS, "with a figure of several runs: pictures of a run go "
                "into its folder", "--out")
    return args


def modification_times(folder):
    """{name: time of its last change in ns} of the pictures of a folder."""
    times = {}
    for path in sorted(Path(folder).glob("*.png")):
        times[path.name] = path.stat().st_mtime_ns
    return times


def main(argv=None):
    """Draws. Raises: UserError."""
    args = parse_args(argv)
    if args.figure in METHODS:
        for run in args.runs:
            before = modification_times(run)
            draw(args.figure, run)
            after = modification_times(run)
            drawn = [name for name in after if after[name] != before.get(name)]
            print_main(f"drawn into {run}: {', '.join(drawn)}")
        return
    path = Path(args.out or f"{args.figure}.png")
    lines = figures_of_runs()[args.figure](args.runs, path)
    print_main("\n".join([*lines, f"written to {path}"]))


if __name__ == "__main__":
    with clean_exit():
        main(sys.argv[1:])
