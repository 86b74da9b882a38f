"""Training batches: the order of the examples, reading them, and their views."""

import re
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from contrastive import CORES
from contrastive.core.processes import (
    UserError, end_with_parent, first_line, gather_objects, rank, to_device, world_size)
from contrastive.data.views import crop_batch, uniforms

import numpy as np
import torch

SHARDS_AT_ONCE = 16  # shards whose samples are mixed: few files are open, the order is random
# frames whose colours a GPU changes at a time; temporaries take six times their memory
FRAMES_AT_ONCE = 256
UNREADABLE = "could not be read when its features were computed"
TRIES = 100  # unreadable samples in a row, after which a run stops
LOADER_SECONDS = 1200  # without a batch, after which workers count as dead
FRAME_DRAWS = 99  # stream of random numbers that place the frames of a clip
SOUND_DRAWS = 97  # stream of random numbers that choose the slice of a sound
TEXT_DRAWS = 32  # random numbers of an example for its texts
TEXT_CHOICE = 199  # stream of random numbers that choose among the kept texts T~


# ---- the order ----
def epoch_order(num_rows, seed, epoch, shards=None):
    """A permutation of the rows, a pure function of (seed, epoch).

    Args:
        shards: (num_rows,) number of the shard of each row. The shards then come in random order,
            and the rows of SHARDS_AT_ONCE shards at a time are mixed, so that a disk reads few
            files at a time. None = mix all rows.
    """
    rng = np.random.default_rng([seed, epoch])
    if shards is None:
        return rng.permutation(num_rows)
    numbers = np.unique(shards)  # those of shards that have rows
    if len(numbers) <= SHARDS_AT_ONCE:
        return rng.permutation(num_rows)
    turns = rng.permutation(len(numbers))  # when each shard is read
    turn_of_row = turns[np.searchsorted(numbers, shards)]
    rows = np.argsort(turn_of_row, kind="stable")
    first_turns = np.arange(SHARDS_AT_ONCE, len(numbers), SHARDS_AT_ONCE)
    ends = np.searchsorted(turn_of_row[rows], first_turns)
    return np.concatenate([rng.permutation(part) for part in np.split(rows, ends)])


def epoch_batches(num_rows, batch_size, seed, first_step, last_step, *, shards=None):
    """Yields (epoch, global batch of row numbers) of the steps first_step to last_step - 1.

    Every epoch has a fresh order, and its incomplete last batch is dropped. A pure function of
    its arguments, so a resumed run goes on with the same batches.
    """
    steps_per_epoch = num_rows // batch_size
    epoch = -1
    for step in range(first_step, last_step):
        if step // steps_per_epoch != epoch:
            epoch = step // steps_per_epoch
            order = epoch_order(num_rows, seed, epoch, shards)
        start = step % steps_per_epoch * batch_size
        yield epoch, order[start:start + batch_size]


# ---- raw batches ----
class RawBatch(NamedTuple):
    """A batch whose views have no colours and no normalisation yet."""

    epoch: int
    index: np.ndarray  # (B,) row numbers
    rows: np.ndarray  # (B,) those that were read, in place of bad ones
    # V tensors (B, [T,] 3, S, S), uint8 or, of pixels in memory, float; or of features; None if
    # nothing could be read in place of a row
    views: list | None
    captions: list  # B lists of str
    keys: list  # B names of rows
    bad: list  # [(key, reason)] of rows that could not be read
    sound_and_text: dict  # as join_sounds_and_texts makes it


def raw_batch(data, seed, epoch, index, *, rows=None, views, bad=(), sounds_and_texts=()):
    """The RawBatch of views of a training set, whatever they come from.

    Args: rows: None = index.
    """
    if rows is None:
        rows = index
    captions = []
    keys = []
    for number, row in zip(index, rows):
        captions.append(data.training_captions(row, seed, epoch, number))
        keys.append(data.key(row))
    return RawBatch(epoch, index, rows, views, captions, keys, list(bad),
                    join_sounds_and_texts(sounds_and_texts))


class RawBatches(torch.utils.data.Dataset):
    """(epoch, row numbers) -> the RawBatch of files, for workers of a loader.

    The next row that can be read takes the place of one that cannot.
    """

    def __init__(self, data, augments, seed):
        self.data = data
        self.augments = augments
        self.seed = seed

    def __getitem__(self, epoch_and_index):
        epoch, index = epoch_and_index
        # One question to the table for the whole batch; one for each row takes longer.
        sources = self.data.sources[index.tolist()]["source"]
        samples = []
        bad = []
        for number, source in zip(index.tolist(), sources):
            samples.append(self.read(epoch, number, source, bad))
        views = None
        if all(sample.views is not None for sample in samples):
            views = [torch.stack(view) for view in zip(*[sample.views for sample in samples])]
        return raw_batch(
            self.data, self.seed, epoch, index, rows=np.array([sample.row for sample in samples]),
            views=views, bad=bad,
            sounds_and_texts=[sample.sound_and_text for sample in samples])

    def read(self, epoch, number, source, bad):
        """The Sample of a row, or of the next one that can be read.

        Args:
            number: of the row.
            source: its cell of the column source.
            bad: list to which (key, reason) of each row that cannot be read is appended.
        """
        data = self.data
        draws = frame_draws(data.clip, self.seed, epoch, number)
        for attempt in range(min(TRIES, len(data))):
            row = (number + attempt) % len(data)
            try:
                if attempt == 0:
                    image = data.read_source(source, draws)
                else:
                    image = data.read(row, draws)
                sound_and_text = draw_sound_and_text(data, row, self.seed, epoch, number)
            except Exception as error:
                bad.append((data.key(row), first_line(error)))
                continue
            views = crop_views(image, self.augments, self.seed, epoch, number)
            return Sample(row, views, sound_and_text)
        return Sample(number, None, {})


class Sample(NamedTuple):
    """What was read of one row."""

    row: int
    views: list | None  # V of (3, S, S) or (T, 3, S, S); None after TRIES that cannot be read
    sound_and_text: dict


def frame_draws(clip, seed, epoch, number):
    """(T,) numbers in 0..1 that place the random frames of a clip; None if none are random."""
    if clip is None or clip.sampling != "random":
        return None
    return uniforms(seed, epoch, [number], clip.frames, stream=FRAME_DRAWS)[0]


def draw_sound_and_text(data, row, seed, epoch, number):
    """What is read of a row beside its pixels, with a random slice of its sound."""
    if data.modalities == "v":
        return {}
    return data.sound_and_text(row, uniforms(seed, epoch, [number], 1, stream=SOUND_DRAWS)[0, 0])


def crop_views(image, augments, seed, epoch, number):
    """The V cropped uint8 views, (3, S, S) or (T, 3, S, S), of a decoded image or clip. Features
    have no views and stay as they are."""
    if image.is_floating_point():
        return [image] * len(augments)
    views = []
    for stream, augment in enumerate(augments, 1):
        draws = uniforms(seed, epoch, [number], augment.DRAWS, stream)[0]
        views.append(augment.crop_one(image, draws))
    return views


def join_sounds_and_texts(parts):
    """What lies beside the pixels of b examples, as one dict: sound (b, 1024, 64), subtitle, b
    texts; {} if there are pixels alone."""
    joined = {}
    for name in set().union(*parts):
        # empty is the part of an example for which no row could be read; the run stops then
        joined[name] = [part[name] for part in parts if part]
    if "sound" in joined:
        joined["sound"] = torch.stack(joined["sound"])
    return joined


def clip_inputs(frames, sound_and_text, transform):
    """What a model reads of clips: the frames (b, T, 3, S, S) or, with sounds or subtitles beside
    them, {frames, sound: (b, 1024, 64), subtitle: {input_ids, attention_mask: (b, L)}}.

    Args:
        sound_and_text: as join_sounds_and_texts makes it.
        transform: EvalTransform of the model, which has the tokenizer of subtitles.
    """
    if not sound_and_text:
        return frames
    inputs = {"frames": frames}
    if "sound" in sound_and_text:
        inputs["sound"] = to_device(sound_and_text["sound"], frames.device)
    if "subtitle" in sound_and_text and transform.subtitle_tokens is not None:
        tokens = transform.subtitle_tokens(sound_and_text["subtitle"])
        inputs["subtitle"] = {name: to_device(x, frames.device) for name, x in tokens.items()}
    return inputs


def read_batch(data, transform, rows, modalities="v"):
    """Reads some rows of a split for an evaluation.

    Args: modalities: what the model reads; beside "v" only if the data are opened with them.
    Returns: the rows that can be read; their pixels (b, [T,] 3, S, S), one tensor because a worker
        sends each tensor as an open file, of which 1,024 is the usual limit, or None; {row: reason}
        of the others; what lies beside the pixels, as join_sounds_and_texts makes it.
    """
    readable, pixels, unreadable, sounds_and_texts = [], [], {}, []
    for row in rows:
        try:
            image = transform.raw(data.read(row))
            if modalities != "v":
                sounds_and_texts.append(data.sound_and_text(row))
            pixels.append(image)
            readable.append(row)
        except Exception as error:
            unreadable[row] = first_line(error)
    if not pixels:
        return readable, None, unreadable, {}
    return readable, torch.stack(pixels), unreadable, join_sounds_and_texts(sounds_and_texts)


# ---- the loader ----
def loader(dataset, workers, seed=0, **options):
    """A DataLoader with a generator of its own. Its workers are forked, leave signals to the main
    process, and have a time limit."""
    if workers:
        options["worker_init_fn"] = set_up_worker
        options["timeout"] = LOADER_SECONDS
        if sys.platform == "linux":  # a signal to the group would end a forkserver
            options["multiprocessing_context"] = "fork"
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(
        dataset, num_workers=workers, generator=generator, **options)


def unchanged(batch):
    """Stands for a collate_fn where the dataset already makes batches."""
    return batch


def set_up_worker(worker):
    """Runs first in a worker, which ends with the main process and not by signals to it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)


# ---- batches ----
def cached_text_draws(epoch, rows):
    """(B, 32) random numbers for texts whose features are kept: those of seed 0."""
    return uniforms(0, epoch, rows, TEXT_DRAWS)


class Batches:
    """Training batches of this process, the same on any number of processes and workers.

    Iterating gives dicts:
        views: V tensors (B, [T,] 3, S, S), augmented and normalised, on `device`
        captions: B lists of str        keys: B names of rows
        index: (B,) row numbers         rows: (B,) those that were read, in place of bad ones
        draws: (B, 32) random numbers for the texts
        (with sounds or subtitles, a view is a dict, as clip_inputs makes it)
        epoch, seconds waited for data, and bad: [(key, reason)], which is for count_bad
    Sets in memory are cropped on the device in batch, files one by one by DataLoader workers.

    Args:
        data: Data.
        augments: an Augment for each view.
        transform: normalises the views (EvalTransform).
        batch_size: of all processes together.
        first, last: the steps, from `first` to `last` - 1.
        workers: loader processes of this process; 0 = none.
        max_bad_fraction: part of the samples that may be unreadable.
        folder: where bad_samples.txt is written; None = nowhere.
        positions: what identifies the data, from a checkpoint; {} in a new run, None = not checked.
        compiled: whether torch.compile is used for colours and blur.
        cache: FeatureCache of frozen encoders, whose views are features (B, [T,] width); None =
            nothing is cached.
        plan: list of (epoch, row numbers of this process), in place of all rows in random order.
    Raises: UserError if the data are not those of the checkpoint.
    """

    def __init__(self, data, augments, transform, batch_size, seed, *, first, last, device,
                 workers=0, max_bad_fraction=0.01, folder=None, positions=None, compiled=False,
                 cache=None, plan=None):
        if batch_size % world_size():
            raise UserError(f"a batch of {batch_size} is not divisible by {world_size()} processes")
        self.data = data
        self.augments = augments
        self.transform = transform
        self.batch_size = batch_size
        self.local = batch_size // world_size()
        self.seed = seed
        self.first = first
        self.last = last
        self.device = device
        self.max_bad_fraction = max_bad_fraction
        self.folder = folder
        self.compiled = compiled
        self.bad = {}  # {key: reason} of all samples that could not be read
        self.frames_at_once = sys.maxsize
        if device.type == "cuda":
            self.frames_at_once = FRAMES_AT_ONCE
        self.workers = num_workers(data, workers)
        self.plan = plan
        self.cached_views = None
        self.num_texts = 0  # kept texts T~ of an example, from which one is chosen; 0 = any
        if cache is not None:
            self.num_texts = cache.num_texts
        if cache is not None and cache.images is not None:
            self.cached_views = cache.images.views(data, augments)
            self.workers = 0
        self.positions = positions
        if positions is not None:
            self.positions = self.check_positions(positions)

    def check_positions(self, saved):
        """What identifies the data of this run. Raises UserError if a checkpoint has other ones."""
        positions = self.data.identity()
        if saved and saved != positions:
            raise UserError(f"--resume: the run had {saved}, now {positions}: give it the same "
                            "data")
        return positions

    # ---- from files or memory to raw batches ----
    def raw(self):
        """Iterator of the RawBatches of this process."""
        if self.cached_views is not None:
            return self.choose_features()
        if self.data.pixels is not None:
            return self.crop_in_memory()
        return iter(loader(
            RawBatches(self.data, self.augments, self.seed), self.workers, self.seed,
            sampler=self.local_batches(), batch_size=None, collate_fn=unchanged,
            pin_memory=self.device.type == "cuda"))

    def local_batches(self):
        """Yields (epoch, row numbers of this process) of each step."""
        if self.plan is not None:
            yield from self.plan
            return
        start = rank() * self.local
        plan = epoch_batches(
            len(self.data), self.batch_size, self.seed, self.first, self.last,
            shards=self.data.shards)
        for epoch, index in plan:
            yield epoch, index[start:start + self.local]

    def crop_in_memory(self):
        """Yields RawBatches of data in memory, cropped in batch on the device."""
        data = self.data
        pixels = data.pixels.to(self.device)                            # (M, [T,] 3, H, W) uint8
        for epoch, index in self.local_batches():
            images = pixels[to_device(torch.from_numpy(index), self.device)]  # (B, [T,] 3, H, W)
            views = []
            for stream, augment in enumerate(self.augments, 1):
                draws = uniforms(self.seed, epoch, index, augment.DRAWS, stream)
                views.append(crop_batch(augment, images, draws))
            sounds_and_texts = [
                draw_sound_and_text(data, i, self.seed, epoch, i) for i in index]
            yield raw_batch(data, self.seed, epoch, index, views=views,
                            sounds_and_texts=sounds_and_texts)

    def choose_features(self):
        """Yields RawBatches whose views are features of a frozen encoder."""
        for epoch, index in self.local_batches():
            views, rows = self.cached_views.choose(self.seed, epoch, index)
            bad = [(self.data.key(i), UNREADABLE) for i in index[index != rows]]
            yield raw_batch(self.data, self.seed, epoch, index, rows=rows, views=views, bad=bad)

    # ---- from raw batches to batches ----
    def __iter__(self):
        finish = self.colour_functions()
        raw_batches = self.raw()
        for _ in range(self.first, self.last):
            start = time.perf_counter()
            raw = next(raw_batches)
            seconds = time.perf_counter() - start
            if raw.views is None:  # this process ends alone, and a launcher ends the others
                raise UserError(f"{TRIES} samples in a row cannot be read, the first: "
                                + ": ".join(raw.bad[0]))
            yield {
                "views": self.finish_views(raw, finish), "captions": raw.captions,
                "keys": raw.keys, "index": raw.index, "rows": raw.rows,
                "draws": self.text_draws(raw),
                "epoch": raw.epoch, "seconds": seconds, "bad": raw.bad}

    def text_draws(self, raw):
        """(B, 32) random numbers for the texts of a raw batch.

        The first chooses a caption. Of a frozen text encoder the others are those of seed 0 in one
        of the epochs whose texts are kept.
        """
        draws = uniforms(self.seed, raw.epoch, raw.index, TEXT_DRAWS)
        if self.num_texts:
            choice = uniforms(self.seed, raw.epoch, raw.index, 1, TEXT_CHOICE)[:, 0]    # (B,)
            cached_epochs = (choice * self.num_texts).astype(np.int64)
            draws[:, 1:] = cached_text_draws(cached_epochs, raw.rows)[:, 1:]
        return draws

    def colour_functions(self):
        """The function of each view that changes its colours, compiled if that is wanted."""
        functions = [augment.photometric for augment in self.augments]
        if self.compiled:  # in this process alone: workers get plain views
            functions = [torch.compile(function, dynamic=False) for function in functions]
        return functions

    def finish_views(self, raw, functions):
        """V views (B, [T,] 3, S, S) of a raw batch with colours and normalisation."""
        if self.cached_views is not None:
            return raw.views
        draws = []
        for stream, augment in enumerate(self.augments, 1):
            draws.append(uniforms(self.seed, raw.epoch, raw.index, augment.DRAWS, stream))
        draws = to_device(torch.from_numpy(np.stack(draws)), self.device)   # (V, B, DRAWS)
        views = []
        for view, function, u in zip(raw.views, functions, draws):
            view = self.finish_view(view, function, u)
            views.append(clip_inputs(view, raw.sound_and_text, self.transform))
        return views

    def finish_view(self, view, function, draws):
        """Colours and normalisation of cropped images or clips; features stay as they are.

        Args:
            view: (B, [T,] 3, S, S) uint8, or float in 0..1; or features (B, T, F).
            function: Augment.photometric.
            draws: (B, DRAWS).
        """
        view = view.to(self.device, non_blocking=True)
        if view.ndim == 3:
            return view
        frames = view.reshape(-1, *view.shape[-3:])                         # (B * T, 3, S, S)
        # All frames of a clip have the same draws.
        draws = draws.repeat_interleave(len(frames) // len(view), 0)        # (B * T, DRAWS)
        draws = draws[:, :, None, None, None]                           # (B * T, DRAWS, 1, 1, 1)
        chunks = []
        size = self.frames_at_once
        for chunk, u in zip(frames.split(size), draws.split(size)):
            if chunk.dtype == torch.uint8:
                chunk = chunk.float().div_(255)
            chunks.append(self.transform.normalise(function(chunk, u)))
        if len(chunks) == 1:
            return chunks[0].view(view.shape)  # torch.cat of one tensor would copy it
        return torch.cat(chunks).view(view.shape)

    # ---- bad samples ----
    def count_bad(self, bad, step):
        """Lists the bad samples of all processes in bad_samples.txt. Above max_bad_fraction of
        those tried (or of the first 1,000) all processes stop. Collective."""
        new = {}
        for pairs in gather_objects(bad):
            for key, reason in pairs:
                if key not in self.bad:
                    new[key] = reason
        self.bad.update(new)
        if rank() == 0 and self.folder and new:
            self.write_bad(new)
        num_rows = len(self.data)
        num_samples = min((step + 1) * self.batch_size + len(self.bad), num_rows)
        num_samples = max(num_samples, min(num_rows, 1000))
        if len(self.bad) > self.max_bad_fraction * num_samples:
            key, reason = next(iter(self.bad.items()))
            enough = round_above(len(self.bad) / num_samples)
            raise UserError(
                f"{len(self.bad)} of about {num_samples} samples cannot be read, above "
                f"--max-bad-fraction {self.max_bad_fraction}; the first: {key}: {reason}. Remove "
                f"the rows that {self.folder}/bad_samples.txt lists, or train without them by "
                f"--max-bad-fraction {enough}")

    def write_bad(self, bad):
        """Appends {key: reason} to bad_samples.txt, one sample a line."""
        path = Path(self.folder) / "bad_samples.txt"
        with open(path, "a", encoding="utf8", errors="replace") as file:
            for key, reason in bad.items():
                key = re.sub(r"\s", " ", key)
                reason = re.sub(r"\s", " ", reason)
                file.write(f"{key}\t{reason}\n")


def round_above(fraction):
    """The smallest of 0.02, 0.05, 0.1, 0.2, 0.5 and 1 that is not below a fraction of 0..1."""
    for value in (0.02, 0.05, 0.1, 0.2, 0.5):
        if fraction <= value:
            return value
    return 1


def num_workers(data, workers):
    """Loader processes that are started of those that are asked for."""
    if data.pixels is not None:
        return 0
    return min(workers, CORES)
