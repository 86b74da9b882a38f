"""Tars: an index of their samples, a table in the cache of `datasets` (tars whose size or time changed are indexed
again), or a stream that reads them in order (--streaming). A sample is the adjacent files of a tar that share a name up
to the first dot: 000017.jpg, 000017.txt, 000017.cls."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import tarfile

from contrastive.data.batches import TRIES, crop_views, frame_draws
from contrastive.data.clips import clip_options
from contrastive.data.table import IMAGE_TYPES, SPLITS, VIDEO_TYPES, Data, decode, generating, notes, pick
from contrastive.data.views import key_hash
from contrastive.engine.processes import UserError, first_line, opening, rank, world

import numpy as np
import torch

TEXTS = ("txt", "caption", "text", "cls")  # parts that are read while the index is built
COLUMNS = ("image_column", "caption_column", "label_column")  # the options that change an index
VERSION = 3  # of the index: the cache compares arguments, not code, so a change of index_rows needs a new number
NAME = re.compile("(.*/)?[^/.]*")  # of a sample: its files' path up to the first dot of their names
GUESS = 5000  # samples per shard if their number is not known


def open_tars(name, path, options):
    """{split: Data} of a tar, or of a folder's by the words in their names; with streaming, train is a Stream, and
    without val and test the last shard is both."""
    of = {}
    for tar in sorted(path.rglob("*.tar")) if path.is_dir() else [path]:
        words = re.split("[^a-z]+", str(tar.relative_to(path) if path.is_dir() else tar.stem).lower())
        of.setdefault(next((SPLITS[w] for w in words if w in SPLITS), "train"), []).append(str(tar))
    if not options.get("streaming"):
        return {split: index(name, split, files, options) for split, files in of.items()}
    train, note = of.get("train", []), ""
    if "val" not in of and "test" not in of:
        train, of["val"], note = train[:-1], train[-1:], "the last shard is held out as val and test"
    if not train:
        raise UserError(f"--streaming: {name} has no shard to train on")
    held = {s: index(name, s, of.get(s) or of[other], options) for s, other in (("val", "test"), ("test", "val"))}
    return {"train": Stream(name, train, options, note=note)} | held


# ---- tars ----
class Strict(tarfile.TarInfo):
    """A member of a tar. A bad header is an error; tarfile takes it for the end."""

    @classmethod
    def fromtarfile(cls, tar):
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # zeros: the regular end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{first_line(error)} at byte {tar.offset}") from error


def samples(file, mode, read=None):
    """(name, {extension: bytes}) of the samples of an open file; of extensions not in `read` (offset, size) instead."""
    with tarfile.open(fileobj=file, mode=mode, tarinfo=Strict) as tar:
        members = filter(tarfile.TarInfo.isreg, tar)
        for name, group in itertools.groupby(members, lambda member: NAME.match(member.name)[0]):
            parts = {}
            for member in group:
                extension = member.name[len(name) + 1:].lower()
                whole = read is None or extension in read
                parts[extension] = tar.extractfile(member).read() if whole else (member.offset_data, member.size)
            yield name.lstrip("/"), parts


def parts_of(parts, options):
    """(extension of the image or video, captions, class or -1) of one sample {extension: content}. Raises ValueError or
    UserError without an image or a caption."""
    image = pick("--image-column", options, parts, (*IMAGE_TYPES, *VIDEO_TYPES))
    label = pick("--label-column", options, parts, ("cls",), required=False)
    caption = pick("--caption-column", options, parts, ("txt", "caption", "text"), required=not label)
    number = int(parts[label]) if label else -1
    texts = parts[caption].decode("utf-8-sig").splitlines() if caption else [f"class {number}"]  # a caption a line
    texts = [t.strip() for t in texts if t.strip()]
    if not texts:
        raise ValueError("an empty caption")
    return image, texts, number


# ---- the index ----
def index(name, split, tars, options):
    """Data of all samples of these tars in their order. A key is the sample's name; if several share one, TAR/NAME."""
    import datasets
    files = [[os.path.abspath(tar), os.path.getsize(tar), os.stat(tar).st_mtime_ns] for tar in tars]
    flags = {k: options[k] for k in COLUMNS if options.get(k)}
    text, number = datasets.Value("string"), datasets.Value("int64")
    features = datasets.Features({
        "source": {"path": text, "offset": number, "size": number}, "captions": datasets.List(text), "key": text,
        "label": number, "shard": number, "video": datasets.Value("bool"), "wrong": text})
    arguments = {"tars": json.dumps(files), "flags": json.dumps(flags), "version": VERSION}  # no list: it is divided
    with opening(f"--dataset {name}"), generating():
        table = datasets.Dataset.from_generator(index_rows, features=features, gen_kwargs=arguments)
    keys, shards, labels, video, wrong = (
        table.data.column(c).to_numpy() for c in ("key", "shard", "label", "video", "wrong"))
    good, bad = np.flatnonzero(wrong == ""), wrong[wrong != ""]
    lost = f"{len(bad):,} samples left out, first {bad[0]}" if len(bad) else ""
    if len(good) <= len(bad):
        raise UserError(f"--dataset {name}: {lost or 'no samples'}")
    table, keys, shards, labels = table.select(good), keys[good], shards[good], labels[good]
    if len({*keys}) < len(keys):  # every tar counts from 0
        top = os.path.commonpath([os.path.dirname(path) for path, _, _ in files])
        named = [os.path.relpath(path, top).removesuffix(".tar") for path, _, _ in files]
        table = table.remove_columns("key").add_column("key", [f"{named[s]}/{k}" for s, k in zip(shards, keys)])
    table = table.remove_columns(["shard", "video", "wrong"] + ["label"] * bool(labels.max() < 0))
    classes = all(len(c) == 1 and c[0].startswith("class ") for c in table[:100]["captions"])
    return Data(name, split, table, clip=clip_options(options) if video.any() else None, has_captions=not classes,
                shards=shards, note=notes(lost, "no captions: the classes serve as captions" if classes else ""))


def index_rows(tars, flags, version):
    """Rows of the index, tar by tar; `wrong` says why a sample is left out."""
    flags = json.loads(flags)
    for shard, (path, _, _) in enumerate(json.loads(tars)):
        with opening(f"{path}: not a tar that can be read to its end"), open(path, "rb") as file:
            found = [*samples(file, "r:", {*TEXTS, *flags.values()} - {flags.get("image_column")})]
        for name, parts in found:
            row = {"key": name, "shard": shard, "captions": [], "label": -1, "video": False, "wrong": ""}
            try:
                image, row["captions"], row["label"] = parts_of(parts, flags)
                row["video"] = image in VIDEO_TYPES
                row["source"] = dict(zip(("path", "offset", "size"), (path, *parts[image])))
            except Exception as error:
                row["wrong"] = f"{name} of {path}: {first_line(error)}"
            yield row


# ---- streams ----
@dataclasses.dataclass
class Stream:
    """Tars read in order. Shards are shuffled per epoch and dealt to processes and workers; each of these readers mixes
    `buffer` undecoded samples. A resumed stream passes over the samples before, undecoded."""
    name: str
    urls: list                        # paths or fsspec addresses (hf://...)
    options: dict
    length: int | None = None         # samples of the published set, None = not known
    buffer: int = 1000
    note: str = ""
    # attributes that Data has too; of a stream no more is known
    split, streamed, has_captions, templates, own = "train", True, True, (), None
    pixels = clip = labels = label_names = which = sources = sentences = None

    def __post_init__(self):
        guess = "" if self.length else f"; an epoch is taken to be {GUESS:,} samples per shard"
        self.note = notes(self.note, "streaming: batches depend on the number of processes and workers" + guess)
        self.examples = self.length or GUESS * len(self.urls)  # of one epoch

    def column(self, name):
        """None: a stream has no columns but images and captions."""

    def identity(self):
        """What a resumed run compares: number and names of the shards."""
        names = "\n".join(os.path.basename(url) for url in self.urls)
        return {"shards": len(self.urls), "names": hashlib.sha256(names.encode()).hexdigest()[:16]}

    def samples(self, seed, epoch, place=0, places=1):
        """(name, {extension: bytes} or what is wrong with a tar) of an epoch, for reader `place` of `places`."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self.urls))
        for k in order[place::places]:
            yield from read_tar(self.urls[k])

    def mixed(self, seed, place, places):
        """Endless (epoch, *sample) of reader `place` of `places`, each drawn at random from a buffer."""
        rng, buffer = np.random.default_rng([seed, place]), []
        for epoch in itertools.count():
            for sample in self.samples(seed, epoch, place, places):
                buffer.append((epoch, *sample))
                if len(buffer) >= self.buffer:
                    k = int(rng.integers(len(buffer)))
                    buffer[k], buffer[-1] = buffer[-1], buffer[k]
                    yield buffer.pop()

    def first_captions(self, limit=None):
        """Captions of the first `limit` samples, at most 20,000, to train a tokenizer on."""
        for _, parts in itertools.islice(self.samples(0, 0), min(limit or 20_000, 20_000)):
            if isinstance(parts, dict):
                yield from parts_of(parts, self.options)[1]

    def reader(self, batches):
        """The items of this process from batches.first on."""
        if len(self.urls) < world():
            raise UserError(f"--streaming: {len(self.urls)} shards are too few for {world()} processes")
        return StreamViews(self, batches.augments, batches.seed, (rank(), world()), batches.first, batches.local)


class StreamViews(torch.utils.data.IterableDataset):
    """Items of one process, as batches.Samples has them, from step `first` on. The loader takes batches of `local`
    samples from its workers in turn, so worker w goes on as reader first + w. A sample that cannot be read has the next
    readable one in its place, which has its own, too: a resumed reader only has to count. of: (process, processes)."""

    def __init__(self, stream, augments, seed, of, first, local):
        self.stream, self.augments, self.seed, self.of = stream, augments, seed, of
        self.first, self.local, self.clip = first, local, clip_options(stream.options)

    def __iter__(self):
        info, (process, processes) = torch.utils.data.get_worker_info(), self.of
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader = (self.first + worker) % workers
        done = len(range(reader, self.first, workers)) * self.local  # samples of this reader before
        found = self.stream.mixed(self.seed, process * workers + reader, processes * workers)
        bad = []
        for epoch, name, parts in itertools.islice(found, done, None):
            number = key_hash(name)
            item = {"views": None, "captions": None, "keys": name, "index": number, "rows": number, "epochs": epoch}
            try:
                if isinstance(parts, Exception):
                    raise parts
                extension, captions, _ = parts_of(parts, self.stream.options)
                if extension in VIDEO_TYPES:
                    image = self.clip(parts[extension], draws=frame_draws(self.clip, self.seed, epoch, number))
                else:
                    image = decode(parts[extension])
            except Exception as error:
                bad.append((name, first_line(error)))
                if len(bad) < TRIES:
                    continue
            else:
                item |= {"views": crop_views(image, self.augments, self.seed, epoch, number), "captions": captions}
            yield item | {"bad": bad}
            yield from [item | {"bad": []}] * (len(bad) - (item["views"] is None))  # in the places of the bad ones
            bad = []


def read_tar(url):
    """Yields (name, {extension: bytes}) in the order of a tar; if it cannot be read to its end, last (url, error)."""
    import fsspec
    try:
        with fsspec.open(url, "rb") as file:
            yield from samples(file, "r|")
    except Exception as error:  # not a tar, or a network error of any kind
        yield url, error
