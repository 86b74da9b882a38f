"""Training batches: the order of the examples, reading them, and their views."""

import re
import signal
import sys
import time
from pathlib import Path

from contrastive import CORES
from contrastive.data.views import crop_batch, uniforms
from contrastive.engine.processes import UserError, end_with_parent, first_line, gather_objects, rank, to_device, world

import numpy as np
import torch

SHARDS_AT_ONCE = 16  # shards whose samples are mixed: the disk reads a few files, the order is random enough
SLICE = 256  # frames whose colours a card changes at a time: temporaries take six times the memory of these frames
TRIES = 100  # unreadable samples in a row, after which a run stops
LOADER_SECONDS = 1200  # without a batch, after which workers count as dead


# ---- the order ----
def epoch_order(n, seed, epoch, shards=None):
    """A permutation of n rows, a pure function of (seed, epoch). Given the shard of each row (n,), the shards come in
    random order, and the rows of SHARDS_AT_ONCE shards at a time are mixed: a disk then reads few files at a time."""
    rng = np.random.default_rng([seed, epoch])
    present = () if shards is None else np.unique(shards)
    if len(present) <= SHARDS_AT_ONCE:
        return rng.permutation(n)
    turn = rng.permutation(len(present))  # when each shard is read
    place = turn[np.searchsorted(present, shards)]  # (n,)
    by_place = np.argsort(place, kind="stable")
    ends = np.searchsorted(place[by_place], np.arange(SHARDS_AT_ONCE, len(present), SHARDS_AT_ONCE))
    return np.concatenate([rng.permutation(part) for part in np.split(by_place, ends)])


def epoch_batches(n, batch, seed, first_step, last_step, shards=None):
    """(epoch, global batch of indices) for optimiser steps first_step..last_step-1: a function of (n, batch, seed).

    Every epoch is a fresh order; the incomplete last batch is dropped."""
    per_epoch, epoch = n // batch, -1
    for step in range(first_step, last_step):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = epoch_order(n, seed, epoch, shards)
        k = step % per_epoch
        yield epoch, order[k * batch:(k + 1) * batch]


# ---- one sample ----
class Samples(torch.utils.data.Dataset):
    """(epoch, index) -> the cropped uint8 views, the captions, and what could not be read on the way: the next sample
    that can be read takes the place of one that cannot. The views are None after TRIES that cannot."""

    def __init__(self, data, augments, seed):
        self.data, self.augments, self.seed = data, augments, seed

    def __getitems__(self, places):
        """A list of items, dicts; the table is asked once for all of them."""
        data, items = self.data, []
        for (epoch, index), source in zip(places, data.sources[[index for _, index in places]]["source"]):
            bad, item = [], {"views": None, "captions": None, "keys": "", "index": index, "rows": index}
            draws = frame_draws(data.clip, self.seed, epoch, index)
            for k in range(min(TRIES, len(data))):
                i = (index + k) % len(data)
                try:
                    image = data.read_source(source, draws) if k == 0 else data.read(i, draws)
                except Exception as error:
                    bad.append((data.key(i), first_line(error)))
                    continue
                captions = data.training_captions(i, self.seed, epoch, index)
                item |= {"views": crop_views(image, self.augments, self.seed, epoch, index), "captions": captions,
                         "keys": data.key(i), "rows": i}
                break
            items.append(item | {"epochs": epoch, "bad": bad})
        return items


def frame_draws(clip, seed, epoch, number):
    """(T,) draws that place the random frames of a clip; None where frames are not random."""
    random = clip is not None and clip.sampling == "random"
    return uniforms(seed, epoch, [number], clip.frames, stream=99)[0] if random else None


def crop_views(image, augments, seed, epoch, number):
    """V cropped uint8 views, (3, S, S) or (T, 3, S, S), of one decoded image or clip, each from its own draws."""
    if image.is_floating_point():  # features have no views
        return [image] * len(augments)
    return [a.crop_one(image, uniforms(seed, epoch, [number], a.DRAWS, stream=v)[0]) for v, a in enumerate(augments, 1)]


def collate(items):
    """Items -> a raw batch; its views are None if an item has none."""
    raw = {k: [item[k] for item in items] for k in items[0]}
    whole = None not in raw["views"]
    raw |= {k: np.array(raw[k]) for k in ("index", "rows", "epochs")}
    return raw | {"views": [*map(torch.stack, zip(*raw["views"]))] if whole else None, "bad": sum(raw["bad"], [])}


# ---- the loader ----
def loader(dataset, workers, seed=0, **how):
    """A DataLoader with a generator of its own; its workers are forked, deaf to signals, with a time limit."""
    start = "fork" if sys.platform == "linux" else None  # a forkserver would be ended by a signal to the group
    if workers:
        how |= dict(worker_init_fn=_place_worker, timeout=LOADER_SECONDS, multiprocessing_context=start)
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(dataset, num_workers=workers, generator=generator, **how)


def _place_worker(_):
    """Runs first in a worker: signals are for the main process alone, with which it ends (clean_exit)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)


# ---- batches ----
class Batches:
    """Training batches of this process, steps `first` to `last`: the same on any number of processes and workers.

    Iterating gives dicts: views (V tensors (B, [T,] 3, S, S), augmented and normalised, on `device`), captions (B lists
    of str), keys (B), index (B), rows (B; those read, with another in place of a bad one), draws (B, 32) for the text
    views, epoch, seconds waited for data, bad [(key, reason)], which is for count_bad. Sets in memory are cropped on
    the device in batch, files by DataLoader workers.

    positions: what identifies the data, from a checkpoint ({} in a new run, None: not compared).
    Raises: UserError if the data are not those of the checkpoint."""

    def __init__(self, data, augments, transform, batch_size, seed, first, last, device, workers=0,
                 max_bad_fraction=0.01, folder=None, positions=None, compiled=False):
        self.data, self.augments, self.transform, self.device, self.seed = data, augments, transform, device, seed
        self.local, self.batch_size, self.first, self.last = batch_size // world(), batch_size, first, last
        if batch_size % world():
            raise UserError(f"a batch of {batch_size} is not divisible by {world()} processes")
        self.max_bad_fraction, self.folder, self.bad, self.compiled = max_bad_fraction, folder, {}, compiled
        self.workers = 0 if data.pixels is not None else min(workers, CORES)  # those that are started
        if data.streamed:
            self.workers = min(self.workers, len(data.urls) // world())  # each has a shard
        self.slice = SLICE if device.type == "cuda" else sys.maxsize
        self.positions = positions
        if positions is not None:
            readers = {"processes": world(), "workers": self.workers} if data.streamed else {}
            self.positions = data.identity() | readers
            if positions and positions != self.positions:
                raise UserError(f"--resume: the run had {positions}, now {self.positions}: give it the same data"
                                + ", processes and --workers" * data.streamed)

    def raw(self):
        """Iterator of this process's share of each global batch, without colours and normalisation, as `collate` has
        it; the views are uint8 or, of pixels in memory, float on the device."""
        data, mine = self.data, slice(rank() * self.local, (rank() + 1) * self.local)
        if data.streamed:
            items, how = data.reader(self), {"batch_size": self.local, "drop_last": True}
        else:
            plan = epoch_batches(len(data), self.batch_size, self.seed, self.first, self.last, data.shards)
            if data.pixels is not None:
                return self._in_memory((epoch, batch[mine]) for epoch, batch in plan)
            order = ([(epoch, i) for i in batch[mine].tolist()] for epoch, batch in plan)
            items, how = Samples(data, self.augments, self.seed), {"batch_sampler": order}
        how |= {"collate_fn": collate, "pin_memory": self.device.type == "cuda"}
        return iter(loader(items, self.workers, self.seed, **how))

    def _in_memory(self, plan):
        """`raw` of data in memory: cropped in batch, on the device."""
        data, pixels = self.data, self.data.pixels.to(self.device)  # (M, [T,] 3, H, W) uint8
        for epoch, index in plan:
            x = pixels[to_device(torch.from_numpy(index), self.device)]  # (B, [T,] 3, H, W)
            views = [crop_batch(a, x, uniforms(self.seed, epoch, index, a.DRAWS, stream=v + 1))
                     for v, a in enumerate(self.augments)]
            captions = [data.training_captions(i, self.seed, epoch, i) for i in index]
            yield {"views": views, "captions": captions, "index": index, "rows": index, "bad": [],
                   "keys": [data.key(i) for i in index], "epochs": np.full(len(index), epoch)}

    def __iter__(self):
        finish = [a.photometric for a in self.augments]
        if self.compiled:  # in this process: workers get plain views
            finish = [torch.compile(f, dynamic=False) for f in finish]
        source = self.raw()
        for _ in range(self.first, self.last):
            began = time.perf_counter()
            raw = next(source)
            waited = time.perf_counter() - began
            if raw["views"] is None:  # this process ends alone, and a launcher ends the others
                raise UserError(f"{TRIES} samples in a row cannot be read, the first: {': '.join(raw['bad'][0])}")
            index, epochs = raw["index"], raw["epochs"]
            draws = [uniforms(self.seed, epochs, index, a.DRAWS, v + 1) for v, a in enumerate(self.augments)]
            draws = to_device(torch.from_numpy(np.stack(draws)), self.device)  # (V, B, DRAWS)
            views = [self._finish(*each) for each in zip(raw["views"], finish, draws)]
            yield {"views": views, "captions": raw["captions"], "keys": raw["keys"], "index": index,
                   "rows": raw["rows"], "draws": uniforms(self.seed, epochs, index, 32), "epoch": int(epochs[0]),
                   "seconds": waited, "bad": raw["bad"]}

    def _finish(self, x, photometric, draws):
        """Applies colours and normalisation to cropped views (B, [T,] 3, S, S), on the device; features stay as they
        are. draws: (B, DRAWS)."""
        x = x.to(self.device, non_blocking=True)
        if x.ndim == 3:  # features
            return x
        frames = x.reshape(-1, *x.shape[-3:])  # (B * T, 3, S, S)
        draws = draws.repeat_interleave(len(frames) // len(x), 0)  # (B * T, DRAWS): all frames of a clip alike
        out = []
        for part, u in zip(frames.split(self.slice), draws[:, :, None, None, None].split(self.slice)):
            part = part.float().div_(255) if part.dtype == torch.uint8 else part
            out.append(self.transform.normalise(photometric(part, u)))
        return (torch.cat(out) if len(out) > 1 else out[0]).view(x.shape)  # the cat of one is a copy

    def count_bad(self, bad, step):
        """Lists the bad samples of all processes in bad_samples.txt; above max_bad_fraction of those tried (or of the
        first 1,000) all processes stop. Collective."""
        new = {}
        for part in gather_objects(bad):
            new |= {key: why for key, why in part if key not in self.bad}
        self.bad |= new
        if rank() == 0 and self.folder and new:
            path = Path(self.folder) / "bad_samples.txt"
            with open(path, "a", encoding="utf8", errors="replace") as f:
                f.writelines("\t".join(re.sub(r"\s", " ", word) for word in pair) + "\n" for pair in new.items())
        n = self.data.examples
        tried = max(min((step + 1) * self.batch_size + len(self.bad), n), min(n, 1000))
        if len(self.bad) > self.max_bad_fraction * tried:
            key, why = next(iter(self.bad.items()))
            raise UserError(f"{len(self.bad)} of about {tried} samples cannot be read, above --max-bad-fraction "
                            f"{self.max_bad_fraction}; the first: {key}: {why} (all in {self.folder}/bad_samples.txt)")
