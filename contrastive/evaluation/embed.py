"""Embeddings of a whole split. The processes share the work, and each item is encoded once."""

import functools
import hashlib
from collections import Counter
from typing import NamedTuple

from contrastive import CORES
from contrastive.data.batches import clip_inputs, loader, read_batch
from contrastive.data.table import frames_of
from contrastive.core.processes import UserError, gather_objects, rank, print_main, world_size

import numpy as np
import torch


class EncodedImages(NamedTuple):
    """The images or clips of a split that could be read, in the order of its rows."""

    index: np.ndarray  # (M,) their rows
    image: torch.Tensor  # (M, D) embeddings, on the CPU
    features: torch.Tensor  # (M, width) before the projection, on the CPU
    unreadable: dict  # {key: reason} of the others
    num_identical: int  # that have the same pixels as another


def gather_rows(parts, piece=4096):
    """The rows of all processes on the CPU, ordered by process: [(b, ...)] -> (n, ...). Collective.

    Args:
        parts: tensors of this process, on the CPU.
        piece: rows that a process sends at a time: all may exceed the memory of a GPU.
    """
    rows = torch.cat(parts) if parts else torch.empty(0)
    if world_size() == 1:
        return rows
    rows_of_process = [[] for _ in range(world_size())]
    largest = max(gather_objects(len(rows)))
    for start in range(0, largest, piece):
        pieces = gather_objects(rows[start:start + piece].clone())
        for process, received in enumerate(pieces):
            if len(received):
                rows_of_process[process].append(received)
    return torch.cat(sum(rows_of_process, []))


class Outputs(NamedTuple):
    """What a function returned for the images or clips of a split that could be read."""

    index: np.ndarray  # (M,) their rows, in the order of the split
    tensors: list  # of (M, ...), on the CPU: one for each tensor that the function returns
    unreadable: dict  # {key: reason} of the others
    num_identical: int  # images or clips that have the same pixels as another


def encode_images(model, data, transform, device, *, batch=256, workers=0, rows=None):
    """Embeddings of the images or clips of a split. Collective.

    Args:
        model: function of pixels (b, [T,] 3, S, S) -> embeddings, another value, features.
        data, transform, device, batch, workers, rows: as in outputs_of_images.
    Returns: EncodedImages.
    Raises: UserError if none can be read, or if an embedding is not finite.
    """
    def encode(_, pixels):
        embeddings, _, features = model(pixels)                            # (b, D), (b, width)
        return embeddings, features

    index, (image, features), unreadable, num_identical = outputs_of_images(
        model, data, transform, device, forward=encode, batch=batch, workers=workers, rows=rows)
    check_outputs(data.full_name, image)
    return EncodedImages(index, image, features, unreadable, num_identical)


@torch.no_grad()
def outputs_of_images(model, data, transform, device, *, forward, batch=256, workers=0, rows=None):
    """What a function returns for the images or clips of a split. Collective.

    Args:
        model: in evaluation mode meanwhile. If it has `cached_images`, the ImageFeatures of its
            frozen encoder, `forward` gets these features in place of pixels.
        data, transform: the split, and the view that the model reads.
        forward: function (rows, pixels (b, [T,] 3, S, S)) -> tuple of tensors (b, ...).
        batch: images at a time, or frames of clips.
        workers: loader processes.
        rows: of the data; None = all.
    Returns: Outputs.
    Raises: UserError if none can be read.
    """
    if rows is None:
        rows = np.arange(len(data))
    my_rows = np.asarray(rows)[rank()::world_size()].tolist()
    batch = max(1, batch // (frames_of(data) or 1))
    if data.pixels is not None or len(my_rows) < 2 * batch:
        workers = 0  # starting them costs more than they save
    pin_memory = device.type == "cuda"
    modalities = getattr(model, "modalities", "v")                         # of VAST
    read = functools.partial(read_batch, data, transform, modalities=modalities)
    cached_images = getattr(model, "cached_images", None)
    if cached_images is not None:
        workers, pin_memory = 0, False
        read = cached_images.plain(data, transform).read
    batches = loader(
        my_rows, min(workers, CORES), batch_size=batch, pin_memory=pin_memory, collate_fn=read)

    was_training = model.training
    model.eval()
    index, digests, parts, unreadable = [], [], [], {}
    for readable, pixels, reasons, sound_and_text in batches:
        for row, reason in reasons.items():
            unreadable[data.key(row)] = reason
        if not readable:
            continue
        digests += [digest(view) for view in pixels]
        pixels = pixels.to(device, non_blocking=True)
        if pixels.dtype == torch.uint8:
            pixels = transform.normalise(pixels.float() / 255)
        pixels = clip_inputs(pixels, sound_and_text, transform)
        outputs = forward(readable, pixels)                                # tuple of (b, ...)
        index += readable
        parts.append([tensor.float().cpu() for tensor in outputs])
    model.train(was_training)

    num_identical = count_identical(digests)
    index, unreadable = gather_index(index, unreadable)
    report_unreadable(data, len(rows), index, unreadable)
    order = np.argsort(index)
    num_tensors = 0  # of a process without an image that can be read
    if parts:
        num_tensors = len(parts[0])
    num_tensors = max(gather_objects(num_tensors))
    tensors = []
    for k in range(num_tensors):
        tensors.append(gather_rows([outputs[k] for outputs in parts])[order])
    return Outputs(index[order], tensors, unreadable, num_identical)


def digest(view):
    """A hash of the pixels of an image or clip, on the CPU."""
    return hashlib.blake2b(view.contiguous().numpy(), digest_size=8).digest()


def count_identical(digests):
    """How many images of all processes have the digest of another. Collective."""
    counts = Counter()
    for digests_of_process in gather_objects(digests):
        counts.update(digests_of_process)
    return sum(count for count in counts.values() if count > 1)


def check_outputs(name, outputs):
    """Raises UserError if outputs (n, D) of a model hold NaN or infinity. name: of the data."""
    num_finite = int(outputs.isfinite().all(1).sum())
    num_bad = len(outputs) - num_finite
    if num_bad:
        raise UserError(
            f"{name}: the model's outputs are not finite for {num_bad} of {len(outputs)}. If it is "
            "most of them, the weights hold NaN or infinity: train with a lower --lr, --grad-clip "
            "1 or a higher temperature")


def gather_index(index, unreadable):
    """The rows (M,) of all processes, ordered by process, and {key: reason} of all. Collective."""
    all_rows, all_reasons = [], {}
    for rows, reasons in gather_objects((index, unreadable)):
        all_rows += rows
        all_reasons.update(reasons)
    return np.array(all_rows), all_reasons


def report_unreadable(data, num_rows, index, unreadable):
    """Prints how many images cannot be read. Raises UserError if it is all of them."""
    first = ""
    if unreadable:
        key, reason = next(iter(unreadable.items()))
        first = f"the first: {key}: {reason}"
    if not len(index):
        raise UserError(f"{data.full_name}: none of its {num_rows} images can be read, {first}")
    if unreadable:
        print_main(f"{data.full_name}: {len(unreadable)} of {num_rows} images cannot be read "
                   f"and are left out, {first}")


@torch.no_grad()
def encode_texts(model, tokenizer, texts, device, batch=512):
    """Embeddings (len(texts), D) on the CPU; the processes share the work. Collective.

    Raises: UserError if one is not finite.
    """
    num_processes = world_size()
    my_texts = texts[rank()::num_processes]
    was_training = model.training
    model.eval()
    parts = []
    for start in range(0, len(my_texts), batch):
        tokens = tokenizer(my_texts[start:start + batch])                  # (b, L) each
        tokens = {name: ids.to(device) for name, ids in tokens.items()}
        _, text, _ = model(tokens=tokens)                                  # (b, D)
        parts.append(text.float().cpu())
    model.train(was_training)
    # process k has texts k, k + W, k + 2W, ...
    text_of_row = [np.arange(k, len(texts), num_processes) for k in range(num_processes)]
    order = np.argsort(np.concatenate(text_of_row))
    embeddings = gather_rows(parts)[order]
    check_outputs("texts", embeddings)
    return embeddings
