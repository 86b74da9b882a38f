"""Pictures of runs and evaluations: base.py for all runs, and one file per paper."""

import importlib


def draw(name, run):
    """Draws the pictures of a run that has ended into its folder.

    Args: name: the module here that has a function draw(run), such as 'temo'.
    """
    importlib.import_module(f"contrastive.figures.{name}").draw(run)
