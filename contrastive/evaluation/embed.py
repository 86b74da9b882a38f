"""Embeddings of a whole data set. The processes share the work, and each item is encoded once."""

import functools

from contrastive import CORES
from contrastive.data.batches import loader
from contrastive.data.table import frames_of
from contrastive.engine.processes import UserError, first_line, gather_objects, rank, say, world

import numpy as np
import torch


def read_batch(data, transform, rows):
    """(readable rows, their pixels (b, [T,] 3, S, S), {row: why not} of the others), with the evaluation's transform.
    The pixels are one tensor because a worker sends each tensor as an open file, of which 1,024 is the usual limit.
    """
    good, pixels, bad = [], [], {}
    for i in rows:
        try:
            pixels.append(transform.raw(data.read(i)))
            good.append(i)
        except Exception as error:
            bad[i] = first_line(error)
    return good, torch.stack(pixels) if pixels else None, bad


def gather_rows(parts, piece=4096):
    """The rows (n, ...) of all processes on the CPU, by rank. parts: [(b, ...)] of this one. Collective.

    piece: so many rows pass at a time: all may be more than a card's memory."""
    rows = torch.cat(parts) if parts else torch.empty(0)
    if world() == 1:
        return rows
    starts = range(0, max(gather_objects(len(rows))), piece)
    found = zip(*(gather_objects(rows[start:start + piece].clone()) for start in starts))
    return torch.cat([part for of_one in found for part in of_one if len(part)])


@torch.no_grad()
def encode_images(model, data, transform, device, batch=256, workers=0, rows=None, forward=None):
    """Embeddings of a data set's images or clips, each encoded once. batch: number of images, or of frames of clips.

    forward: function (rows, pixels (b, ...)) -> values used in place of image (b, D) and features (b, width).
    Returns: index (M,) numpy, image (M, D), features (M, width) on the CPU, {key: reason} of unreadable items.
    Raises: UserError if none can be read. Collective."""
    rows = np.arange(len(data)) if rows is None else np.asarray(rows)
    mine, training = rows[rank()::world()].tolist(), model.training
    model.eval()
    index, image, features, bad = [], [], [], {}
    batch = max(1, batch // (frames_of(data) or 1))
    few = data.pixels is not None or len(mine) < 2 * batch  # then starting workers costs more than they save
    workers = 0 if few else min(workers, CORES)
    batches = loader(mine, workers, batch_size=batch, collate_fn=functools.partial(read_batch, data, transform),
                     pin_memory=device.type == "cuda")
    for good, pixels, broken in batches:
        bad |= {data.key(i): why for i, why in broken.items()}
        if good:
            pixels = pixels.to(device, non_blocking=True)
            if pixels.dtype == torch.uint8:
                pixels = transform.normalise(pixels.float() / 255)
            e, f = forward(good, pixels) if forward else model(pixels)[::2]  # (b, D), (b, width)
            index += good
            image.append(e.float().cpu())
            features.append(f.float().cpu())
    model.train(training)
    parts = gather_objects((index, bad))
    index, bad = np.array([i for part, _ in parts for i in part]), {k: why for _, of in parts for k, why in of.items()}
    if not len(index):
        raise UserError(f"{data.name} ({data.split}): none of its {len(rows)} images can be read, first "
                        f"{next(iter(bad.items()), '')}")
    if bad:
        say(f"{data.name} ({data.split}): {len(bad)} of {len(rows)} images cannot be read and are left out, first "
            f"{next(iter(bad.items()))}")
    order = np.argsort(index)
    return index[order], gather_rows(image)[order], gather_rows(features)[order], bad


@torch.no_grad()
def encode_texts(model, tokenizer, texts, device, batch=512):
    """Embeddings (len(texts), D) on the CPU; the processes share the work. Collective."""
    training, W = model.training, world()
    model.eval()
    mine, out = [texts[i] for i in range(rank(), len(texts), W)], []
    for start in range(0, len(mine), batch):
        tokens = {k: v.to(device) for k, v in tokenizer(mine[start:start + batch]).items()}
        out.append(model(tokens=tokens)[1].float().cpu())
    model.train(training)
    order = np.argsort(np.concatenate([np.arange(k, len(texts), W) for k in range(W)]))
    return gather_rows(out)[order]
