"""The Hugging Face hub: whole folders of it, tables, and the commits that were read."""

import contextlib
import os
import shutil
from pathlib import Path

from contrastive.core.processes import UserError, print_main

COMMITS = {}  # {repository: commit} of all that this process has read, for summary.json


def hub_folder(repository, patterns, revision=None):
    """Downloads the files of a data set on the hub whose names have one of these patterns, or
    finds them in the hub's cache. Returns: their folder."""
    from huggingface_hub import errors, snapshot_download

    selection = dict(repo_type="dataset", allow_patterns=patterns, revision=revision)
    with contextlib.suppress(errors.DryRunError):  # without the hub, whose cache is then read
        announce_download(repository, snapshot_download(repository, dry_run=True, **selection))
    folder = Path(snapshot_download(repository, **selection))
    COMMITS[repository] = folder.name
    return folder


def announce_download(repository, files):
    """Prints the size of a download and the free space.

    Args: files: of the repository, DryRunFileInfo.
    Raises: UserError if there is too little space.
    """
    from huggingface_hub import constants

    size = sum(file.file_size or 0 for file in files if file.will_download)
    if not size:
        return
    os.makedirs(constants.HF_HUB_CACHE, exist_ok=True)
    free = shutil.disk_usage(constants.HF_HUB_CACHE).free
    words = (f"{repository}: {size / 1e9:.1f} GB to download into {constants.HF_HUB_CACHE}, where "
             f"{free / 1e9:.1f} GB are free")
    if size > free:
        raise UserError(f"{words}; the variable HF_HOME names another folder")
    print_main(words)


def note_commit(model):
    """Notes the commit of a model that has just been loaded by its hub id; a folder has none."""
    from huggingface_hub import constants

    folder = f"models--{model.replace('/', '--')}"
    latest = Path(constants.HF_HUB_CACHE) / folder / "refs" / "main"
    if latest.is_file() and not Path(model).exists():
        COMMITS[model] = latest.read_text()


def open_repository(repository, revision=None):
    """The builder of `datasets` for a hub id.

    Args:
        revision: commit, branch or tag.
    """
    import datasets

    builder = datasets.load_dataset_builder(repository, revision=revision)
    COMMITS[repository] = builder.hash
    is_cached = type(builder).__name__ == "Cache"  # it takes the latest commit in the cache
    if revision and is_cached and builder.hash != revision:
        raise UserError(f"without the hub, the cache of {repository} has the commit {builder.hash} "
                        "alone")
    return builder


def has_tars(builder):
    """Whether the files that a builder of `datasets` reads are tars of webdataset."""
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    return isinstance(builder, WebDataset)
