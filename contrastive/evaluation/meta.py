"""Meta-data of mama.py: a few clean, balanced examples, from train, from val (which are then not evaluated on), or
those that a file names."""

import collections
from pathlib import Path

from contrastive.data.views import key_hash
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.engine.processes import UserError, opening
from contrastive.evaluation.clusters import k_means

import numpy as np
import torch

CLUSTERS = 50  # of captions; they take the place of classes to balance meta-data
CLUSTERED = 20_000  # rows that are clustered: the first in the order of the hash of their names


def meta_data(train, evals, dataset, wanted, size, batch, task="retrieval", balance="auto"):
    """(Data of the meta-data, the evaluation sets without them).

    Args: wanted: train, val or a file of names; size: number of examples from train or val; batch: examples per step;
        balance: over classes if there are any (auto), over classes or refuse (classes), over caption clusters, or none.
    Raises: UserError if there are too few, or the data are a stream."""
    source = train if wanted != "val" else evals.get(dataset, {}).get("val")
    if source is None or source.streamed:
        raise UserError(f"--meta-set {wanted}: {dataset} has no such split to take rows from")
    own = source.own or source                                             # without --extra-pairs, whose rows come last
    if wanted in ("train", "val"):
        columns = {"qa-open": ["answer"], "qa-choice": ["question_type"]}.get(task, ["label", "verb"])
        if balance == "classes" and all(own.column(c) is None for c in columns):
            raise UserError(f"--meta-balance classes: {own.name} has no column {' or '.join(columns)}")
        rows, how = balanced_rows(own, size, columns if balance in ("auto", "classes") else (), balance == "captions")
    else:
        rows, how = named_rows(own, wanted)
    if len(rows) < batch:
        raise UserError(f"--meta-set {wanted}: {len(rows)} examples, fewer than --meta-batch-size {batch}")
    note = f"{len(rows)} of {source.split}, {how}; {batch} per step"
    if wanted == "val":
        rest = np.setdiff1d(np.arange(len(source)), rows)
        if not len(rest):
            raise UserError(f"--meta-size {size}: val has {len(source)} examples, so none would be left to evaluate on")
        evals = evals | {dataset: evals[dataset] | {"val": source.select(rest)}}
        note += "; they are left out of evaluation, and only --weighting meta and l2rw learn from them"
    meta = source.select(rows)
    meta.note = note
    return meta, evals


def balanced_rows(data, size, columns=("label", "verb"), captions=False):
    """(size,) rows in the order of a hash of their names, taking classes (or caption clusters) in turn and leaving out
    rows known to be noisy; of unfolded rows, all names come before one comes again; and a description for the note."""
    place = np.array([key_hash(f"meta {key}") for key in data.keys()])                            # (M,)
    noisy = data.column("noisy")
    rows = np.argsort(place, kind="stable")
    rows = rows if noisy is None else rows[~np.asarray(noisy)[rows]]
    rows = rows[np.argsort(turns(place[rows].tolist()), kind="stable")]
    column, kinds = next((c for c in columns if data.column(c) is not None), None), None
    if column:
        kinds, of = np.asarray(data.column(column))[rows].tolist(), column
    elif captions:
        rows = rows[:max(size, CLUSTERED)]
        kinds = caption_clusters(data, rows)
        of = f"{len({*kinds})} clusters of captions"
    if kinds is not None:
        turn = np.where(np.array(kinds) == -1, len(rows), turns(kinds))    # rows without a class are taken last
        rows = rows[np.argsort(turn, kind="stable")]
    clean = ", known to be clean" if noisy is not None else ", not known to be clean: captions as the set has them"
    return np.sort(rows[:size]), ("at random" if kinds is None else f"balanced over {of}") + clean


def turns(kinds):
    """How many of its kind come before each: [a, b, a] -> [0, 0, 1]."""
    seen, out = collections.Counter(), []
    for kind in kinds:
        out.append(seen[kind])
        seen[kind] += 1
    return out


def caption_clusters(data, rows):
    """[cluster number of each row]: K-Means on tf-idf, with all captions of a row as one text (mmts.py clusters single
    captions). The result is the same on every process and for every --seed."""
    texts = [" ".join(data.captions(i)) for i in rows]
    encoder = SentenceEncoder("tf-idf", torch.device("cpu"), texts)
    return k_means(encoder(texts).numpy(), min(CLUSTERS, len({*texts})), seed=0).tolist()


def named_rows(data, file):
    """(rows of the names (keys) in a file with one name per line, words for the note)."""
    with opening(file):
        names = dict.fromkeys(x.strip() for x in Path(file).read_text(encoding="utf-8-sig").splitlines() if x.strip())
    where = {}  # a name has several rows with --unfold-captions
    for i, key in enumerate(data.keys()):
        where.setdefault(key, []).append(i)
    missing = [n for n in names if n not in where]
    if missing:
        raise UserError(f"--meta-set {file}: {len(missing)} of its {len(names)} names are not in train, first "
                        f"{missing[0][:100]!r}; a name of train: {next(iter(where))!r}")
    return np.sort([i for n in names for i in where[n]]).astype(np.int64), "by name"
