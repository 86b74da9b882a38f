"""Embeddings of a whole data set. The processes share the work, and each item is encoded once."""

import functools
import math

from contrastive import CORES
from contrastive.data.batches import Loader, worker_options
from contrastive.data.table import frames_of
from contrastive.engine.processes import UserError, first_line, gather_objects, rank, say, world
from contrastive.evaluation.metrics import NotFinite

import numpy as np
import torch
import torch.distributed as dist


def read_batch(data, transform, rows):
    """(readable rows, their pixels (b, [T,] 3, S, S), {row: why not} of the others), with the evaluation's transform.
    The pixels are one tensor because a worker sends each tensor as an open file, of which 1,024 is the usual limit.

    Raises: UserError for a failure that every row would have."""
    good, pixels, bad = [], [], {}
    for i in rows:
        try:
            pixels.append(transform.raw(data.read(i)))
            good.append(i)
        except Exception as error:
            bad[i] = first_line(error)
    return good, torch.stack(pixels) if pixels else None, bad


def _raise_first(failures):
    """Raises the first failure of any process on all of them, as _failure gives it."""
    for failure in filter(None, failures):
        raise failure


def _failure(error):
    """What all processes raise for an error of one: its type if it is the user's, and its first line."""
    return (UserError if isinstance(error, UserError) else RuntimeError)(first_line(error))


def together(work, *args, **more):
    """work(*args, **more), which is this process's own; a failure on one is raised on all, or the others would go on
    to another exchange. Collective."""
    if world() == 1:
        return work(*args, **more)
    found, failure = None, None
    try:
        found = work(*args, **more)
    except Exception as error:  # a card without memory, say; a metric's own errors keep their types
        failure = type(error)(str(error)) if type(error) in (NotFinite, ValueError) else _failure(error)
    _raise_first(gather_objects(failure))
    return found


def gather_rows(rows, device, piece=2**26):
    """The float32 rows (n, ...) of the processes that have some (the others: None), on the CPU: a list. Collective.

    piece: bytes of each process that pass through the device at a time: all rows may be more than its memory."""
    if world() == 1:
        return [] if rows is None else [rows]
    shapes = gather_objects(None if rows is None else tuple(rows.shape))
    counts, of_row = [shape[0] if shape else 0 for shape in shapes], next((s[1:] for s in shapes if s), (0,))
    if not math.prod(of_row):
        return [torch.zeros(shape) for shape in shapes if shape]
    step = max(1, min(max(counts), piece // (4 * math.prod(of_row))))
    part, *parts = together(torch.zeros, len(counts) + 1, step, *of_row, device=device)  # (s, ...) each, padded
    found = [[] for _ in counts]
    for start in range(0, max(counts), step):
        if rows is not None:
            mine = rows[start:start + step]
            part[:len(mine)] = mine
        dist.all_gather(parts, part)
        for of, n, got in zip(found, counts, parts):
            of.append(got[:max(0, n - start)].to("cpu", copy=True))
    return [torch.cat(of) for of, shape in zip(found, shapes) if shape]


@torch.no_grad()
def encode_images(model, data, transform, device, batch=256, workers=0, rows=None, forward=None):
    """Embeddings of a data set's images or clips, each encoded once. batch: number of images, or of frames of clips.

    forward: function (rows, pixels (b, ...)) -> values used in place of image (b, D) and features (b, width).
    Returns: index (M,) numpy, image (M, D), features (M, width) on the CPU, {key: reason} of unreadable items."""
    rows = np.arange(len(data)) if rows is None else np.asarray(rows)
    mine, training = rows[rank()::world()].tolist(), model.training
    model.eval()
    index, image, features, bad = [], [], [], {}
    batch = max(1, batch // frames_of(data))
    few = data.pixels is not None or len(mine) < 2 * batch  # then starting workers costs more than they save
    workers = 0 if few else min(workers, CORES)
    loader = Loader(mine, batch_size=batch, num_workers=workers,
                    collate_fn=functools.partial(read_batch, data, transform),
                    generator=torch.Generator().manual_seed(0), **worker_options(workers))
    failure = None
    try:
        for good, pixels, broken in loader:
            bad |= {data.key(i): why for i, why in broken.items()}
            if good:
                pixels = pixels.to(device)
                if pixels.dtype == torch.uint8:
                    pixels = transform.normalise(pixels.float() / 255)
                e, f = forward(good, pixels) if forward else model(pixels)[::2]  # (b, D), (b, width)
                index += good
                image.append(e.float().cpu())
                features.append(f.float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = _failure(error)
    model.train(training)
    parts = gather_objects((np.array(index, dtype=np.int64), bad, failure))
    _raise_first(p[2] for p in parts)
    index = np.concatenate([p[0] for p in parts])
    if not len(index):
        first = next((f", first {key}: {why}" for p in parts for key, why in p[1].items()), "")
        raise UserError(f"{data.name} ({data.split}): none of its {len(rows)} images can be read{first}")
    order = np.argsort(index)
    image, features = (torch.cat(gather_rows(torch.cat(x) if x else None, device))[order]
                       for x in (image, features))
    return index[order], image, features, {k: v for p in parts for k, v in p[1].items()}


@torch.no_grad()
def encode_texts(model, tokenizer, texts, device, batch=512):
    """Embeddings (len(texts), D) on the CPU; the processes share the work."""
    training = model.training
    model.eval()
    mine = range(len(texts))[rank()::world()]
    out, failure = [], None
    try:
        for j in range(0, len(mine), batch):
            tokens = {k: v.to(device) for k, v in tokenizer([texts[i] for i in mine[j:j + batch]]).items()}
            out.append(model(tokens=tokens)[1].float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = _failure(error)
    model.train(training)
    parts = gather_objects((np.array(mine, dtype=np.int64), failure))
    _raise_first(p[1] for p in parts)
    order = np.argsort(np.concatenate([p[0] for p in parts]))
    return torch.cat(gather_rows(torch.cat(out) if out else None, device))[order]


def say_unreadable(data, bad):
    """Prints how many images an evaluation has left out; bad: {key: reason}."""
    if bad:
        say(f"{data.name} ({data.split}): {len(bad)} of {len(data)} images cannot be read and are left out, "
            f"first {next(iter(bad.items()))}")


FEW_QUERIES = 50  # with fewer, a single query moves the numbers


def few_queries(**counts):
    """A line below a table that says how much one query is worth if there are few. counts: {kind: number}."""
    few = [f"of {n} {kind} one is worth {100 / n:.1f} points" for kind, n in counts.items() if 0 < n < FEW_QUERIES]
    return "FEW QUERIES: " + ", ".join(few) if few else ""
