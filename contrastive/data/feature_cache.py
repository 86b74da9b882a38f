"""The features of frozen encoders, computed once and kept in files.

A folder holds the features of one encoder, of one view of one data set or of a list of texts. Its
name is a hash of all that they depend on, so that no feature is ever out of date. Each file has
4,096 rows in float32. It is written under another name and renamed, and one that exists is not
computed again: an interruption, several processes and several runs at a time need nothing else.

Images and clips are kept as evaluation sees them ("plain"), and those of a training set in four
draws of each view: the draws that a run with --seed 0 makes in its first four epochs. The features
of a row that cannot be read are NaN.
"""

import dataclasses
import functools
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from contrastive.core.files import whole_file
from contrastive.core.processes import (
    UserError, barrier, opening, print_main, rank, to_device, world_size)
from contrastive.data.batches import UNREADABLE, Batches, loader, num_workers, read_batch
from contrastive.data.table import ROWS_AT_ONCE, frames_of
from contrastive.data.views import uniforms

import numpy as np
import torch

FORMAT = 2  # a part of every hash; it changes when the same flags give other features
ROWS_IN_FILE = 4096
OPEN_FILES = 256  # files open at a time; a process may have 1,024
# Images or frames that are encoded at a time. On a CPU each takes 1.5 times as long in batches of
# 64 as in batches of 16, since the activations leave its caches.
BATCH = {"cpu": 16, "cuda": 256}
NUM_VIEWS = 4  # V draws that are kept of each view
VIEW_SEED = 0  # seed of these draws
VIEW_CHOICE = 200  # stream of random numbers that choose among the draws, one for each Augment


# ---- what features depend on ----
def hash_of(**facts):
    """The name of a folder: a hash of plain values."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def hash_of_tensors(tensors):
    """A hash of {name: tensor}."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def hash_of_pixels(data):
    """A hash of the rows of a data set: their names, and the pixels in memory or the files.

    Of a file these are its path, place in a tar, window, size and time; of embedded bytes their
    hash.
    """
    digest = hashlib.sha256()
    for key in data.keys():
        digest.update(f"{key}\n".encode())
    if data.pixels is not None:
        return digest.hexdigest() + hash_of_tensors({"pixels": data.pixels})
    file_state = functools.lru_cache(maxsize=ROWS_AT_ONCE)(state_of_file)
    for source in data.values_of_column("source"):
        facts = dict(source)
        if facts.get("bytes"):
            facts["bytes"] = hashlib.sha256(facts["bytes"]).hexdigest()
        if facts.get("path"):
            facts["state"] = file_state(facts["path"])
        digest.update(json.dumps(facts, sort_keys=True).encode())
    if data.clip is not None:
        for name, value in vars(data.clip).items():
            digest.update(f"{name} {getattr(value, '__qualname__', value)}".encode())
    return digest.hexdigest()


def state_of_file(path):
    """Size and time of a file; None if it is not there."""
    if not os.path.exists(path):
        return None
    state = os.stat(path)
    return [state.st_size, state.st_mtime_ns]


# ---- files ----
@functools.lru_cache(maxsize=OPEN_FILES)
def open_file(path):
    """The features of a file, mapped into memory; each open one takes a file of the process."""
    return np.load(path, mmap_mode="r")


class FeatureTable:
    """The features of all rows of a data set in one or several views, in their files.

    Args:
        files: {(view, number of the block): path}.
        num_rows: M.
        device: of the features that are taken.
    """

    def __init__(self, files, num_rows, device):
        self.files = files
        self.num_rows = num_rows
        self.device = device

    def row(self, row, view=0):
        """The features (...) of a row, on the CPU."""
        block, place = divmod(row, ROWS_IN_FILE)
        return torch.from_numpy(np.array(open_file(self.files[view, block])[place]))

    def take(self, rows, views=None):
        """The features (B, ...) of rows (B,) in views (B,), None = the first, on the device."""
        if views is None:
            views = np.zeros(len(rows), int)
        features = [self.row(int(row), int(view)) for row, view in zip(rows, views)]
        return to_device(torch.stack(features), self.device)

    @functools.cached_property
    def is_readable(self):
        """(M,) whether a row could be read, in all views."""
        is_readable = np.ones(self.num_rows, bool)
        for (_, block), file in self.files.items():
            features = open_file(file)
            first_values = features.reshape(len(features), -1)[:, 0]
            start = block * ROWS_IN_FILE
            is_readable[start:start + len(features)] &= ~np.isnan(first_values)
        return is_readable

    def read(self, rows):
        """As read_batch, of the first view."""
        is_readable = self.is_readable[rows]                                # (b,)
        rows = np.asarray(rows)
        readable = rows[is_readable]
        unreadable = dict.fromkeys(rows[~is_readable].tolist(), UNREADABLE)
        features = None
        if len(readable):
            features = self.take(readable)                                  # (b, ...)
        return readable.tolist(), features, unreadable, {}


class Block(NamedTuple):
    """Rows of one view that stand in one file of each folder."""

    view: int
    number: int  # its place in the view
    rows: range

    def file(self, folder):
        """The path of the features in a folder."""
        return folder / f"{self.view}-{self.number:05}.npy"

    def chunks(self, size):
        """Lists of at most `size` rows."""
        return [list(self.rows[k:k + size]) for k in range(0, len(self.rows), size)]


def blocks_of(num_rows, num_views):
    """The Blocks of a data set, view by view."""
    blocks = []
    for view in range(num_views):
        for number, start in enumerate(range(0, num_rows, ROWS_IN_FILE)):
            rows = range(start, min(start + ROWS_IN_FILE, num_rows))
            blocks.append(Block(view, number, rows))
    return blocks


def open_tables(folders, num_rows, device, encode, *, title, num_views=1):
    """A FeatureTable of each folder; what is missing there is computed first. Collective.

    Args:
        folders: of the tables, whose features are computed together.
        encode: function (blocks) -> iterator of lists of features (b, ...), one for each folder,
            which are the rows of the blocks in order.
        title: what is encoded, in words.
    """
    blocks = blocks_of(num_rows, num_views)
    blocks_to_write = []
    for number, block in enumerate(blocks):
        is_whole = all(block.file(folder).exists() for folder in folders)
        if not is_whole and number % world_size() == rank():
            blocks_to_write.append(block)
    if blocks_to_write:
        print_main(f"{title}: features are computed once, and kept below {folders[0].parent}")
        write_blocks(folders, blocks_to_write, encode(blocks_to_write), title)
    barrier()
    tables = []
    for folder in folders:
        files = {(block.view, block.number): block.file(folder) for block in blocks}
        tables.append(FeatureTable(files, num_rows, device))
    return tables


def write_blocks(folders, blocks, parts, title):
    """Writes the files of the blocks of this process, with a progress bar.

    Args:
        parts: what `encode` of open_tables returns.
    """
    from tqdm import tqdm

    bar = tqdm(total=sum(len(block.rows) for block in blocks), desc=title, unit="row",
               disable=rank() > 0, dynamic_ncols=True)
    for block in blocks:
        columns = [[] for _ in folders]
        num_rows = 0
        while num_rows < len(block.rows):
            part = next(parts)
            for column, features in zip(columns, part):
                column.append(features.float().cpu().numpy())               # (b, ...)
            num_rows += len(part[0])
            bar.update(len(part[0]))
        for folder, column in zip(folders, columns):
            write_features(block.file(folder), np.concatenate(column))
    bar.close()


def write_features(file, features):
    """Writes an array; runs that write the same file do so under names of their own."""
    with opening(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    suffix = f".{secrets.token_hex(8)}.tmp"
    with whole_file(file, suffix) as temporary, open(temporary, "wb") as handle:
        np.save(handle, features)


# ---- images and clips ----
class ImageFeatures:
    """The features of a frozen image encoder on the images or clips of data sets.

    Args:
        root: Path of all folders.
        encoder: hash of the encoder and its weights.
        encode: function of normalised pixels (b, [T,] 3, S, S) -> features (b, [T,] width).
        transform: EvalTransform, whose statistics normalise the views.
        device: of the encoder and the features.
        workers: loader processes.
    """

    def __init__(self, root, encoder, encode, transform, *, device, workers):
        self.root = root
        self.encoder = encoder
        self.encode = encode
        self.transform = transform
        self.device = device
        self.workers = workers
        # By the id of a Data. `hashes` holds the Data, too, so that no other one gets its id, in
        # `tables` either.
        self.hashes = {}  # {id: (Data, hash of their pixels)}
        self.tables = {}  # {(id, hash of the transform): FeatureTable} of plain images

    def hash_of_rows(self, data):
        """hash_of_pixels, computed once."""
        if id(data) not in self.hashes:
            self.hashes[id(data)] = data, hash_of_pixels(data)
        return self.hashes[id(data)][1]

    # ---- plain ----
    def plain(self, data, transform):
        """The FeatureTable of plain images. Collective.

        Args:
            transform: EvalTransform of the images.
        """
        cache_key = id(data), hash_of(transform=vars(transform))
        if cache_key not in self.tables:
            folder = self.root / hash_of(
                encoder=self.encoder, rows=self.hash_of_rows(data), transform=vars(transform))
            batches = functools.partial(self.plain_batches, data, transform)
            table, = open_tables(
                [folder], len(data), self.device, functools.partial(self.encode_batches, batches),
                title=data.full_name)
            self.tables[cache_key] = table
        return self.tables[cache_key]

    def plain_batches(self, data, transform, blocks):
        """Yields ([pixels (b, ...)], whether each row could be read (b,)) of the rows of blocks."""
        chunks = []
        for block in blocks:
            chunks += block.chunks(self.batch_size(data))
        batches = loader(
            chunks, num_workers(data, self.workers), batch_size=None,
            pin_memory=self.device.type == "cuda",
            collate_fn=functools.partial(read_batch, data, transform))
        for rows, (readable, pixels, *_) in zip(chunks, batches):
            is_readable = torch.from_numpy(np.isin(rows, readable))         # (b,)
            if pixels is None:
                pixels = torch.zeros(0, *shape_of_clips(data), 3, transform.size, transform.size)
            if len(pixels) < len(rows):  # zeros, for the shape of the features
                whole = pixels.new_zeros(len(rows), *pixels.shape[1:])
                whole[is_readable] = pixels
                pixels = whole
            pixels = pixels.to(self.device, non_blocking=True)
            if pixels.dtype == torch.uint8:
                pixels = transform.normalise(pixels.float() / 255)
            yield [pixels], is_readable

    # ---- views of training ----
    def views(self, data, augments):
        """The CachedViews of a training set. Collective.

        Args:
            augments: an Augment for each view of a step, at most NUM_VIEWS of which are the same.
        """
        distinct = []
        augment_of_view = []
        for augment in augments:
            augment = augment.simplified()  # scripts whose views are the same share features
            if augment not in distinct:
                distinct.append(augment)
            augment_of_view.append(distinct.index(augment))
        return CachedViews(self.open_views(data, distinct), augment_of_view)

    def open_views(self, data, augments):
        """A FeatureTable of V draws for each Augment."""
        folders = []
        for stream, augment in enumerate(augments, 1):
            folders.append(self.root / hash_of(
                encoder=self.encoder, rows=self.hash_of_rows(data),
                augment=dataclasses.asdict(augment), stream=stream,
                mean=self.transform.mean, std=self.transform.std))
        batches = functools.partial(self.view_batches, data, augments)
        return open_tables(
            folders, len(data), self.device, functools.partial(self.encode_batches, batches),
            num_views=NUM_VIEWS, title=f"{data.full_name}, {NUM_VIEWS} views")

    def view_batches(self, data, augments, blocks):
        """As plain_batches, of random views."""
        plan = []
        for block in blocks:
            plan += [(block.view, np.array(rows)) for rows in block.chunks(self.batch_size(data))]
        batches = Batches(
            data, augments, self.transform, world_size(), VIEW_SEED, first=0, last=len(plan),
            device=self.device, workers=self.workers, plan=plan)
        for batch in batches:
            yield batch["views"], torch.from_numpy(batch["rows"] == batch["index"])

    @torch.no_grad()
    def encode_batches(self, batches, blocks):
        """Yields the features of what `batches` yields of blocks, as open_tables wants them; NaN
        of rows that could not be read."""
        for views, is_readable in batches(blocks):
            is_unreadable = ~is_readable.to(self.device)
            parts = []
            for pixels in views:
                features = self.encode(pixels)                              # (b, ...)
                features[is_unreadable] = torch.nan
                parts.append(features)
            yield parts

    def batch_size(self, data):
        """Images or clips that are encoded at a time."""
        return max(1, BATCH[self.device.type] // (frames_of(data) or 1))


def shape_of_clips(data):
    """(T,) of clips, () of images."""
    if frames_of(data):
        return (frames_of(data),)
    return ()


class CachedViews:
    """The views of a training set, as features.

    Args:
        tables: a FeatureTable for each distinct Augment.
        augment_of_view: for each view of a step, the number of its table.
    Raises: UserError if no row could be read.
    """

    def __init__(self, tables, augment_of_view):
        self.tables = tables
        self.augment_of_view = augment_of_view
        is_readable = np.all([table.is_readable for table in tables], axis=0)           # (M,)
        readable = np.flatnonzero(is_readable)
        if not len(readable):
            raise UserError(f"none of the {len(is_readable)} training examples could be read")
        following = np.searchsorted(readable, np.arange(len(is_readable)))
        self.row_to_read = readable[following % len(readable)]              # (M,)

    def choose(self, seed, epoch, index):
        """The features of a batch.

        Args:
            index: (B,) row numbers.
        Returns: a list of (B, ...) for each view, and the rows (B,) that were read: the next one
            that can takes the place of one that cannot. Views of one Augment are different draws.
        """
        rows = self.row_to_read[index]                                      # (B,)
        views = []
        for position, number in enumerate(self.augment_of_view):
            draws = uniforms(seed, epoch, index, NUM_VIEWS, VIEW_CHOICE + number)
            order = draws.argsort(1)                                        # (B, V)
            turn = self.augment_of_view[:position].count(number)
            views.append(self.tables[number].take(rows, order[:, turn]))
        return views, rows


def cache_folder(folder):
    """The Path of --feature-cache; of "" a folder in the user's cache folder."""
    if folder:
        return Path(folder).expanduser()
    user_folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_folder).expanduser() / "contrastive-temperature" / "features"
