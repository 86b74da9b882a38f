"""Embeddings of a whole data set, each item once over all processes."""

import common
from engine import CORES
from engine.base import (
    Stopped,
    UserError,
    first_line,
    gather_objects,
    own_words,
    plain_words,
    rank,
    say,
    signals,
    world,
)

import numpy as np
import torch


class _EvalImages(torch.utils.data.Dataset):
    def __init__(self, data, rows, transform):
        self.data, self.rows, self.transform = data, rows, transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        i = int(self.rows[k])
        try:
            return i, self.transform.raw(self.data.read(i)), ""
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            if words := plain_words(error):  # any other sample would fail like this one
                raise UserError(words) from error
            return i, None, first_line(error)


def _collate_eval(items):
    """One tensor a batch: a worker sends every tensor as an open file, and 1,024 of these is the usual limit."""
    good = [(i, x) for i, x, _ in items if x is not None]
    pixels = torch.stack([x for _, x in good]) if good else None  # (b, [T,] 3, S, S)
    return [i for i, _ in good], pixels, [(i, why) for i, x, why in items if x is None]


def _heed_signals():
    if signals:  # of this process; the others learn of it when all have come to the end of their share
        raise Stopped


def _raise_first(failures):
    """What went wrong on any process, on all of them: words, or that a signal came."""
    for failure in filter(None, failures):
        raise failure if isinstance(failure, Stopped) else RuntimeError(failure)


@torch.no_grad()
def encode_images(model, data, transform, device, batch=256, workers=0, rows=None, forward=None):
    """Embeddings of a data set's images or clips, each item once over all processes; batch: images, or frames of clips.

    forward: function (rows, pixels (b, ...)) -> what stands in for image (b, D) and features (b, width).
    Returns: index (M,) numpy, image (M, D), features (M, width) on the CPU, {key: reason} of what could not be read."""
    rows = np.arange(len(data)) if rows is None else np.asarray(rows)
    mine, training = rows[rank()::world()], model.training
    model.eval()
    index, image, features, bad = [], [], [], {}
    batch = max(1, batch // common.frames_of(data))
    few = data.pixels is not None or len(mine) < 2 * batch  # starting workers costs more than they save
    workers = 0 if few else min(workers, CORES)
    loader = common.Loader(_EvalImages(data, mine, transform), batch_size=batch, num_workers=workers,
                           collate_fn=_collate_eval, generator=torch.Generator().manual_seed(0),
                           **common.worker_options(workers))
    failure = None
    try:
        for good, pixels, broken in common.watched(loader, workers):
            _heed_signals()
            bad |= {data.key(i): why for i, why in broken}
            if good:
                pixels = pixels.to(device)
                if pixels.dtype == torch.uint8:
                    pixels = transform.normalise(pixels.float() / 255)
                e, f = forward(good, pixels) if forward else model(pixels)[::2]  # (b, D), (b, width)
                index += good
                image.append(e.float().cpu())
                features.append(f.float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = error if isinstance(error, Stopped) else own_words(error)
    model.train(training)
    mine = [torch.cat(x) if x else None for x in (image, features)]
    parts = gather_objects((np.array(index, dtype=np.int64), *mine, bad, failure))
    _raise_first(p[4] for p in parts)
    index = np.concatenate([p[0] for p in parts])
    if not len(index):
        first = next((f", first {key}: {why}" for p in parts for key, why in p[3].items()), "")
        raise UserError(f"{data.name} ({data.split}): none of its {len(rows)} images can be read{first}")
    order = np.argsort(index)
    image, features = (torch.cat([p[k] for p in parts if p[k] is not None])[order] for k in (1, 2))
    return index[order], image, features, {k: v for p in parts for k, v in p[3].items()}


@torch.no_grad()
def encode_texts(model, tokenizer, texts, device, batch=512):
    """Embeddings (len(texts), D) on the CPU, each text once over all processes."""
    training = model.training
    model.eval()
    mine = list(range(len(texts)))[rank()::world()]
    out, failure = [], None
    try:
        for j in range(0, len(mine), batch):
            _heed_signals()
            tokens = {k: v.to(device) for k, v in tokenizer([texts[i] for i in mine[j:j + batch]]).items()}
            out.append(model(tokens=tokens)[1].float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = error if isinstance(error, Stopped) else own_words(error)
    model.train(training)
    parts = gather_objects((np.array(mine, dtype=np.int64), torch.cat(out) if out else None, failure))
    _raise_first(p[2] for p in parts)
    order = np.argsort(np.concatenate([p[0] for p in parts]))
    return torch.cat([p[1] for p in parts if p[1] is not None])[order]


def say_unreadable(data, bad):
    """How many images an evaluation has left out; bad: {key: reason}."""
    if bad:
        say(f"{data.name} ({data.split}): {len(bad)} of {len(data)} images cannot be read and are left out, "
            f"first {next(iter(bad.items()))}")


FEW_QUERIES = 50  # below, a single query moves the numbers


def few_queries(**counts):
    """What one query is worth where there are few, for under a table: {what it is: how many} -> text or ""."""
    few = [f"of {n} {kind} one is worth {100 / n:.1f} points" for kind, n in counts.items() if 0 < n < FEW_QUERIES]
    return "FEW QUERIES: " + ", ".join(few) if few else ""
