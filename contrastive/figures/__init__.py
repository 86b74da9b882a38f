"""Figures of runs, drawn from the files of run folders alone.

base.py has what all figures share, and FinishedRun, which reads a folder. A module of a method has

    draw(folder)            the pictures of a run, into its folder: at the end of each run, and
                            again by `python -m tools.figures METHOD RUN ...`
    FIGURES                 {name: function(folders, path) -> its numbers as lines}: figures of
                            several runs, for `python -m tools.figures NAME RUN RUN ...`

What a figure needs beside the log, the summary and the embeddings (evaluation/saved_pieces.py) is
written by a line of the script.
"""

import importlib

METHODS = ("temo", "ncl", "mmts", "mama", "ts")


def draw(method, folder):
    """Draws the pictures of a run that has ended. method: one of METHODS."""
    importlib.import_module(f"contrastive.figures.{method}").draw(folder)


def figures_of_runs():
    """{name: function(folders, path) -> lines} of the figures of several runs."""
    figures = {}
    for method in METHODS:
        module = importlib.import_module(f"contrastive.figures.{method}")
        figures.update(module.FIGURES)
    return figures
