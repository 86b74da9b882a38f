"""Streams (--streaming): tars on disk or on a server, read in order without an index or a download.

A Stream guarantees less than Data: equal batch counts, the same views per key, and resume at the start of a shard. The
batches depend on the number of processes and workers. In an epoch, each shard belongs to one reader, but readers do not
wait for each other between epochs. Each sample lost to damage in a shard counts as one bad sample.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from pathlib import Path

import common

import numpy as np
import torch

from contrastive.engine.base import UserError, first_line, join_notes, rank, say, world
from contrastive.readers.clips import clip_options
from contrastive.readers.columns import VIDEO_TYPES
from contrastive.readers.damage import Front, Loss, Losses, expected, not_followed
from contrastive.readers.guards import split_files
from contrastive.readers.pictures import MAX_PIXELS, decode
from contrastive.readers.tars import check_compressed, index, sample_parts


def open_tars(name, tars, options):
    """{split: Data} of one tar or the tars of one folder; with streaming, train is a Stream.

    Args: tars: paths, in order.   options: those of load_data.
    Raises: UserError if a tar cannot be read, most samples cannot be used, more are lost than the option
        max_bad_fraction allows, or a stream has only one shard.
    """
    base = Path(name).expanduser()
    # only names inside the data set count, not the folders above it
    of = split_files(name, {tar: str(tar.name if tar == base else tar.relative_to(base)).removesuffix(".tar")
                            for tar in tars})
    if options.get("streaming"):
        return _streamed(name, of, options)
    return {split: index(name, split, files, options) for split, files in of.items()}


def _streamed(name, of, options):
    """{train: Stream, val, test: Data}; one shard is held out if no tar is called val or test."""
    train, held_out = of.get("train", []), ""
    if "val" not in of and "test" not in of:
        if len(train) < 2:
            raise UserError(f"--streaming: {name} has one shard; "
                            "streaming needs one to train on and one to hold out")
        train, of["val"], held_out = train[:-1], train[-1:], "the last shard is held out as val and test"
    elif len(found := [split for split in ("val", "test") if split in of]) == 1:
        held_out = f"the tars of {found[0]} are both val and test"
    if not train:
        raise UserError(f"--streaming: {name} has no shard to train on, only val and test ones")
    check_compressed(name, train)
    stream = Stream(name, [str(tar) for tar in train], options, counts=expected(train))
    stream.note = join_notes(stream.note, held_out)
    val, test = of.get("val") or of["test"], of.get("test") or of["val"]
    return {"train": stream, "val": index(name, "val", val, options), "test": index(name, "test", test, options)}


TRIES = 100  # the run stops after this many consecutive unreadable samples of one reader
FEW_BUFFERS = 20  # with fewer samples for a reader, times its buffer, repeats within a batch are not rare
GUESS = 5000  # samples per shard if their number is not known


@dataclasses.dataclass
class Stream:
    """Web-scale tars, read in order. Shards are shuffled per epoch and divided among processes and workers.

    urls: paths or fsspec addresses (hf://...).   length: number of samples of the published set, None = not known.
    buffer: size of a reader's shuffle buffer, in samples that are not decoded yet.
    counts: {path: (samples, the file that says so)} where that is known; if it is of all shards, length is not used.
    """
    name: str
    urls: list
    options: dict
    length: int | None = None
    buffer: int = 1000
    note: str = "streaming: resume at the shard; batches depend on the number of processes and workers"
    counts: dict = dataclasses.field(default_factory=dict)
    max_pixels: int = MAX_PIXELS
    # attributes that Data has too; of a stream no more is known
    split, streamed, has_captions, templates = "train", True, True, ()
    pixels = clip = labels = label_names = None

    def __post_init__(self):
        if len(self.counts) == len(self.urls):
            self.length = sum(n for n, _ in self.counts.values())

    @property
    def distinct(self):
        """Number of different samples, infinity if it is not known."""
        return self.length or float("inf")

    @property
    def identity(self):
        """In words, which shards these are: the samples of an epoch, on which schedules depend, and a hash of the names
        and sizes of files. A resumed run compares it."""
        of = [(os.path.basename(url), os.path.getsize(url) if os.path.exists(url) else 0) for url in self.urls]
        digest = hashlib.sha256(repr(of).encode()).hexdigest()[:12]
        return f"of {len(of)} shards, {self.examples:,} samples ({digest})"

    @functools.cached_property
    def examples(self):
        """Samples of one epoch, a guess if their number is not known."""
        if self.length:
            return self.length
        n = GUESS * len(self.urls)
        say(f"--streaming: the number of samples is not known; an epoch counts 5,000 per shard, {n:,} in all")
        return n

    def column(self, name):
        """None: a stream has no columns but images and captions."""

    def samples(self, seed, place, places, start=0):
        """Endless (url, key, parts, ordinal, epoch) of reader `place` of `places`, from its `start`-th shard on.

        parts: {extension: bytes}, or the error of a lost sample or a broken shard.
        """
        ordinal, url = 0, ""
        for epoch in range(10**9):
            order = np.random.default_rng([seed, epoch]).permutation(len(self.urls))
            empty = ordinal >= start
            for url in (self.urls[i] for i in order[place::places]):
                if ordinal >= start:
                    for key, parts in read_tar(url, self.counts.get(os.path.abspath(url))):
                        yield url, key, parts, ordinal, epoch
                        empty = empty and isinstance(parts, Loss)
                ordinal += 1
            if empty:  # else this would loop forever unnoticed
                yield url, url, ValueError("no samples in it"), ordinal - 1, epoch

    def first_captions(self, limit=None):
        """Captions of the first `limit` samples, at most 20,000 (None: of all, once), to train a tokenizer on."""
        limit = limit and min(limit, 20_000)  # a tokenizer needs no more
        for k, (_, key, parts, _, epoch) in enumerate(self.samples(0, 0, 1)):
            if epoch or k == limit:
                return
            with contextlib.suppress(ValueError):  # bad samples are counted during training, not here
                if not isinstance(parts, Exception):
                    yield from sample_parts(key, parts, parts.__getitem__, self.options, self.name)[1]

    def raw_batches(self, batches):
        """Iterator of the raw batches of this process. Sets batches.workers, and drops positions that do not fit.

        batches: common.Batches.   Raises: UserError, at the call, if there are fewer shards than processes.
        """
        processes, shards = world(), len(self.urls)
        if shards < processes:
            raise UserError(f"--streaming: {shards} shards are too few for {processes} processes; "
                            "use fewer processes or smaller shards")
        workers = min(batches.workers, shards // processes)
        if batches.positions.pop("workers", workers) != workers:
            say("--streaming: the number of workers has changed: "
                "the shards are read from the start of their order again")
            batches.positions.clear()
        if workers < batches.workers:
            say(f"--workers: {batches.workers} reduced to {workers}, so that each has a shard")
        batches.workers = workers
        readers = processes * max(1, workers)
        each = (self.length or 0) / readers  # 0: not known
        if shards % readers:
            say(f"--streaming: {shards} shards for {readers} readers: those with fewer begin their next epoch earlier, "
                "so that a batch can hold a sample twice")
        if 0 < each < FEW_BUFFERS * self.buffer:
            say(f"WARNING: --streaming: {each:,.0f} samples for each reader, which mixes {self.buffer:,} at a time "
                "across epochs: a batch can hold a sample twice; fewer --workers, or these tars without --streaming")
        views = StreamViews(self, batches.augments, batches.seed, rank(), processes, dict(batches.positions))
        loader = common.Loader(views, batch_size=batches.local, drop_last=True,
                               collate_fn=common.collate, **common.loader_options(batches))

        def read():  # the workers start with the first batch
            yield from loader
        return read()


class StreamViews(torch.utils.data.IterableDataset):
    """Items of one process. Each of its workers reads its shards through a shuffle buffer of undecoded samples.

    positions: {worker: the shard of its order to begin with}, as given in the items.
    """

    def __init__(self, stream, augments, seed, process, processes, positions):
        self.stream, self.augments, self.seed = stream, augments, seed
        self.process, self.processes, self.positions = process, processes, positions

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 0)
        readers = max(1, workers)  # of this process
        place, start = self.process * readers + worker, self.positions.get(str(worker), 0)
        bad, tries, damaged = [], 0, ""
        for url, key, parts, ordinal, epoch in self._shuffled(place, self.processes * readers, start):
            item = {"views": None, "captions": None, "index": 0, "key": None, "epoch": epoch, "positions": {}}
            try:
                image, captions = self._decode(key, parts, epoch)
            except (OSError, ValueError, RuntimeError) as error:
                name = f"{url}:{key}".encode("utf8", "backslashreplace").decode()  # it may not be UTF-8
                bad.append((name, first_line(error)))
                tries += not isinstance(error, Loss) or url != damaged  # a damaged shard counts as one try
                damaged = url
                if tries < TRIES:
                    continue
            else:
                number = common.key_hash(key)
                views = common.crop_views(image, self.augments, self.seed, epoch, number)
                item |= {"views": views, "captions": captions, "index": number, "key": key,
                         "positions": {str(worker): ordinal, "workers": workers}}
            yield item | {"bad": bad}
            bad, tries, damaged = [], 0, ""

    def _shuffled(self, place, places, start):
        """The samples of one reader, each drawn at random from the buffer."""
        rng, buffer = np.random.default_rng([self.seed, place, start]), []
        for sample in self.stream.samples(self.seed, place, places, start):
            buffer.append(sample)
            if len(buffer) < self.stream.buffer:
                continue
            pick = int(rng.integers(len(buffer)))
            buffer[pick], buffer[-1] = buffer[-1], buffer[pick]
            yield buffer.pop()

    def _decode(self, key, parts, epoch):
        """Image (3, H, W) or clip (T, 3, H, W), uint8, and captions. Raises OSError or ValueError with the reason."""
        if isinstance(parts, Loss):
            raise parts
        if isinstance(parts, Exception):
            raise ValueError(f"broken shard: {parts}")
        options = self.stream.options
        source, captions, _ = sample_parts(key, parts, parts.__getitem__, options, self.stream.name)
        if not any(parts.get(kind) is source for kind in VIDEO_TYPES):
            return decode(source, self.stream.max_pixels), captions
        clip = clip_options(options)
        draws = common.frame_draws(clip, self.seed, epoch, common.key_hash(key))  # (T,) or None
        return clip(source, draws=draws), captions


def read_tar(url, known=None):
    """Yields (key, {extension: bytes}) in the order of the tar, (key, Loss) for each lost sample or skipped member, and
    (url, error) at the end if the tar cannot be read.

    known: (samples, the file that says so). Samples beside damage come last: the others show what a whole one has.
    """
    import fsspec
    sample, parts, seen, suspects, losses = None, {}, set(), [], Losses()
    try:
        with fsspec.open(url, "rb") as raw:
            for key, extension, member, data in losses.files(Front(raw), lambda extension: True):
                if key != sample:
                    if parts and sample in losses.suspects:
                        suspects.append((sample, parts))
                    elif parts:
                        yield sample, parts
                    again = key in seen
                    sample, parts = key, {}
                    seen.add(key)
                if why := not_followed(member):
                    yield f"{key} not followed", Loss(why)
                elif again or extension in parts:
                    yield f"{key} again", Loss(f"{member.name} is there twice, the first is used")
                elif data is not None:
                    parts[extension] = data
        entries, partial = losses.each(known)
        suspects += [(sample, parts)] if parts else []
        yield from (pair for pair in suspects if pair[0] not in partial)
        for key, why in entries:
            yield key, Loss(why)
    except Exception as error:  # not a tar, or a network error of any kind: counted as a bad sample
        yield str(url), error
