"""The meta-data of MAMA: a few clean, balanced examples on which its weights are measured.

They come from train, from val (whose evaluation then leaves them out), or from a file of names.
"""

import collections
import math
from pathlib import Path

from contrastive.core.files import write_json
from contrastive.core.processes import UserError, opening, rank
from contrastive.data.batches import Batches
from contrastive.data.views import key_hash

import numpy as np

# columns that may divide the examples of a task into classes, in this order
CLASS_COLUMNS = {
    "retrieval": ("label", "verb"),
    "qa-open": ("answer",),
    "qa-choice": ("question_type",)}


def meta_data(train, evals, args, task="retrieval"):
    """Takes the meta-data that --meta-set asks for.

    Args:
        train, evals: as open_data returns them.
        args: dataset, meta_set, meta_size, meta_batch_size.
        task: key of CLASS_COLUMNS.
    Returns: Data of the meta-data, with a note for the banner; and the evaluation sets without it.
    Raises: UserError if there are too few examples.
    """
    source = train
    if args.meta_set == "val":
        source = evals.get(args.dataset, {}).get("val")
    if source is None:
        raise UserError(f"--meta-set {args.meta_set}: {args.dataset} has no such split to take "
                        "rows from")
    # without the rows of --extra-pairs, which come last
    candidates = source.before_extra_pairs or source
    if args.meta_set in ("train", "val"):
        columns = [name for name in CLASS_COLUMNS[task] if candidates.column(name) is not None]
        column = columns[0] if columns else None
        rows, description = balanced_rows(candidates, args.meta_size, column)
    else:
        rows, description = named_rows(candidates, args.meta_set, evals.get(args.dataset, {}))
    if len(rows) < args.meta_batch_size:
        raise UserError(f"--meta-set {args.meta_set}: {len(rows)} examples ({description}) are "
                        f"fewer than --meta-batch-size {args.meta_batch_size}: name more, or lower "
                        "it")

    note = f"{len(rows)} of {source.split}, {description}; {args.meta_batch_size} per step"
    if args.meta_set == "val":
        remaining_rows = np.setdiff1d(np.arange(len(source)), rows)
        if not len(remaining_rows):
            raise UserError(f"--meta-size {args.meta_size}: val has {len(source)} examples, so "
                            "none would be left to evaluate on")
        splits = evals[args.dataset] | {"val": source.select(remaining_rows)}
        evals = evals | {args.dataset: splits}
        note += ("; they are left out of evaluation, and only --weighting meta and l2rw learn from "
                 "them")
    meta = source.select(rows)
    meta.note = note
    return meta, evals


def meta_batches(meta, view, transform, run, *, every, cache=None):
    """Iterator over batches of meta-data: one for each `every` steps, from here to the last step.

    Args:
        meta: Data of the meta-data.
        view, transform, cache: those of training.
    """
    args = run.args
    return iter(Batches(
        meta, [view], transform, args.meta_batch_size, args.seed,
        first=math.ceil(run.step / every), last=math.ceil(run.last / every), device=run.device,
        workers=min(2, args.workers), cache=cache))


def save_meta_names(run, meta):
    """Writes the names of meta-data that are taken from val to meta_data.json."""
    if rank() == 0:
        keys = {f"{run.args.dataset} val": meta.column("key")}
        write_json(run.folder / "meta_data.json", keys)


def balanced_rows(data, size, column=None):
    """Rows in the order of a hash of their names, from each class in turn.

    Rows that are known to be noisy are left out. Of unfolded rows, all names come before one comes
    a second time.

    Args:
        size: number of rows.
        column: of the classes; None = without. Rows of class -1, unknown, come last.
    Returns: (size,) rows in ascending order, and words that describe them.
    """
    hashes = np.array([key_hash(f"meta {key}") for key in data.keys()])    # (M,)
    rows = np.argsort(hashes, kind="stable")                               # (M,)
    noisy = data.column("noisy")                                           # (M,) bool
    cleanliness = "not known to be clean: captions as the set has them"
    if noisy is not None:
        rows = rows[~np.asarray(noisy)[rows]]
        cleanliness = "none with another's captions"
    rows = rows[np.argsort(occurrence_numbers(hashes[rows].tolist()), kind="stable")]

    balance = "at random"
    if column is not None:
        balance = f"balanced over {column}"
        classes = np.asarray(data.column(column))[rows].tolist()
        turns = np.where(np.array(classes) == -1, len(rows), occurrence_numbers(classes))
        rows = rows[np.argsort(turns, kind="stable")]
    return np.sort(rows[:size]), f"{balance}, {cleanliness}"


def occurrence_numbers(values):
    """Number of equal values before each one: [a, b, a] -> [0, 0, 1]."""
    counts = collections.Counter()
    numbers = []
    for value in values:
        numbers.append(counts[value])
        counts[value] += 1
    return numbers


def named_rows(data, file, splits):
    """The rows whose names (keys) stand in a file, one in each line.

    Rows that are known to be noisy are left out.

    Args: splits: {split: Data} of val and test; names of theirs, and of rows held out for them, are
        left out.
    Returns: (n,) rows in ascending order, and words that describe them.
    """
    with opening(f"--meta-set {file}: has to be a file with the names of clean examples, one in "
                 "each line"):
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    names = dict.fromkeys(line.strip() for line in lines if line.strip())
    # a name has several rows with --unfold-captions
    rows_of_name = collections.defaultdict(list)
    for i, key in enumerate(data.keys()):
        rows_of_name[key].append(i)
    held_out = set(data.held_out)
    for split in splits.values():
        held_out.update(split.keys())
    outside = [name for name in names if name not in rows_of_name]
    unknown = [name for name in outside if name not in held_out]
    if unknown:
        raise UserError(f"--meta-set {file}: {len(unknown)} of its {len(names)} names are not in "
                        f"train, first {unknown[0][:100]!r}; a name of train: "
                        f"{next(iter(rows_of_name))!r}")
    noisy = data.column("noisy")                                           # (M,) bool
    rows = []
    num_noisy = 0
    for name in names:
        for row in rows_of_name.get(name, []):
            if noisy is not None and noisy[row]:
                num_noisy += 1
            else:
                rows.append(row)
    description = "by name"
    if num_noisy:
        description += f", {num_noisy} with another's captions left out"
    if outside:
        description += f", {len(outside)} of val or test left out"
    return np.sort(rows).astype(np.int64), description
