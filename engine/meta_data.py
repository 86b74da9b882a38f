"""The meta-data of mama.py: few, clean and balanced examples of training; of val, and then of no evaluation; or named
ones."""

import common
from engine.base import UserError, say
from engine.clusters import SentenceEncoder, k_means

import numpy as np
import torch

from readers import text

CLUSTERS = 50  # of captions, which stand for classes
CLUSTERED = 20_000  # rows, the first by the hash of their names, among which the clusters are made


def meta_data(train, evals, dataset, wanted, size, batch, task="retrieval", balance="auto"):
    """(Data of the meta-data, the evaluation sets without them).

    Args: wanted: train, val or a file of names; size: examples of train or val; batch: those of a step; balance: over
        classes, where there are some (auto) or else refused (classes), clusters of captions, or none.
    Raises: UserError where they are too few, or asked of a stream."""
    source = train if wanted != "val" else evals.get(dataset, {}).get("val")
    if source is None or source.streamed:
        raise UserError(f"--meta-set {wanted}: {dataset} has no such split to take rows from"
                        + (" (a stream); use --meta-set val" if source is not None else ""))
    own = source.own or source                                             # without --extra-pairs; its rows come first
    if wanted in ("train", "val"):
        columns = {"qa-open": ["answer"], "qa-choice": ["question_type"]}.get(task, ["label", "verb"])
        if balance == "classes" and all(own.column(c) is None for c in columns):
            raise UserError(f"--meta-balance classes: {own.name} has no column {' or '.join(columns)}; --meta-balance "
                            "captions needs none")
        rows, how = balanced_rows(own, size, columns if balance in ("auto", "classes") else (), balance == "captions")
        how += "" if balance != "auto" or how.startswith("balanced") else "; --meta-balance captions would balance them"
    else:
        rows, how = named_rows(own, wanted), "by name"
    if len(rows) < batch:
        raise UserError(f"--meta-set {wanted}: {len(rows)} examples, fewer than --meta-batch-size {batch}")
    note = f"{len(rows)} of {source.split}, {how}; {batch} a step"
    if wanted == "val":
        rest = np.setdiff1d(np.arange(len(source)), rows)
        if not len(rest):
            raise UserError(f"--meta-size {size}: val has {len(source)} examples, none would be left "
                            "to evaluate on")
        evals = evals | {dataset: evals[dataset] | {"val": source.select(rest)}}
        note += "; no evaluation on val sees them, and only --weighting meta and l2rw learn from them"
    meta = source.select(rows)
    meta.note = note
    return meta, evals


def balanced_rows(data, size, columns=("label", "verb"), captions=False):
    """(size,) rows by a hash of their names, classes (or clusters of captions) in turn, without those known to be
    noisy; and words for it."""
    place = np.array([common.key_hash(f"meta {key}") for key in data.keys()])                            # (M,)
    noisy = data.column("noisy")
    rows = np.argsort(place, kind="stable")
    rows = rows if noisy is None else rows[~np.asarray(noisy)[rows]]
    column, kinds = next((c for c in columns if data.column(c) is not None), None), None
    if column:
        kinds, of = np.asarray(data.column(column))[rows].tolist(), column
    elif captions:
        rows = rows[:max(size, CLUSTERED)]
        kinds = caption_clusters(data, rows)
        of = f"{len({*kinds})} clusters of captions"
    if kinds is not None:
        seen, turn = {}, []                                                # how many of its class came before each row
        for c in kinds:
            seen[c] = seen.get(c, -1) + 1
            turn.append(seen[c] if c != -1 else len(rows))                 # without a class: the last to be taken
        rows = rows[np.argsort(turn, kind="stable")]
    clean = ", known to be clean" if noisy is not None else ", not known to be clean: captions as the set has them"
    return np.sort(rows[:size]), ("at random" if kinds is None else f"balanced over {of}") + clean


def caption_clusters(data, rows):
    """[number of the cluster of each row's captions]: K-Means on tf-idf of all captions of a row as one text, where
    mmts.py has single ones. The same on every process, and at every --seed.

    Raises: UserError where no caption has a word."""
    texts = [" ".join(data.captions(i)) for i in rows]
    try:
        encoder = SentenceEncoder("tf-idf", torch.device("cpu"), texts)
    except UserError as error:
        why = str(error).replace("--cluster-encoder tf-idf", "--meta-balance captions")
        raise UserError(why.replace("take a model", "take --meta-balance none")) from error
    return k_means(encoder(texts).numpy(), min(CLUSTERS, len({*texts})), seed=0).tolist()


def named_rows(data, file):
    """Rows of the names (keys) in a file, one a line. Raises: UserError for a name that is not there."""
    lines = text.read_lines(file)
    names = dict.fromkeys(lines)
    if len(names) < len(lines):
        say(f"--meta-set {file}: {len(lines) - len(names):,} of its {len(lines):,} lines name an example again")
    where = {key: i for i, key in enumerate(data.keys())}
    missing = [n for n in names if n not in where]
    if missing:
        raise UserError(f"--meta-set {file}: {len(missing)} of its {len(names)} names are not in train, first "
                        f"{missing[0][:100]!r}; a name of train: {next(iter(where))!r}")
    return np.sort([where[n] for n in names])
