"""What the five method files share: gradients over processes, image views, encoders, data sets and batches.

Notation, used in every file of this project:
    B  batch of this process      W  processes      N = B * W  global batch (every loss sees N candidates)
    D  embedding width            V  views          K  captions of one example      T  frames of one clip
    tau  temperature, divides the cosine            sim  plain cosine matrix, rows = queries (anchors)
    shapes stand beside the line that makes them, e.g.  logits = image @ text.T / tau    # (B, N)

Sections: processes | losses on any card | random numbers | image views | text | encoders | data | batches. This file
imports errors and words (engine/base.py), metrics (evaluation/metrics.py), encoders and tokenizers (encoders/) and file
readers (readers/). It is imported by the data sets (sets/), evaluation/, figures/, and the flags and book-keeping of a
run (engine/). engine/__init__.py is imported first and keeps waiting threads of torch from spinning.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import math
import os
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.checkpoint import checkpoint

from contrastive import sets
from contrastive.encoders.base import FROM_FILES, STATS, Transformer
from contrastive.encoders.tokenizers import Tokenizer, build_tokenizer, train_wordpiece  # noqa: F401
from contrastive.encoders.towers import freeze_unused
from contrastive.encoders.two_tower import EvalTransform, TextEncoder, TwoTower, VisionEncoder
from contrastive.encoders.vgt import VGT
from contrastive.encoders.weights import check_spec, init_from
from contrastive.engine import CORES, base
from contrastive.engine.base import UserError, first_line, join_notes, rank, world, writing
from contrastive.evaluation.metrics import (  # noqa: F401  (public names of this file)
    embedding_health,
    knn_accuracy,
    linear_probe,
    mir_metrics,
    modality_gap,
    normalization_error,
    normalize,
    retrieval_metrics,
    zero_shot_accuracy,
)
from contrastive.readers.clips import clip_options
from contrastive.readers.columns import SPLIT_NAMES, NoColumn, clean_list, is_video
from contrastive.readers.frames import read_frames  # noqa: F401
from contrastive.readers.pictures import MAX_PIXELS, decode


# ==================================================== processes =====================================================
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _all_rows(x)

    @staticmethod
    def backward(ctx, grad):
        return _SumRows.apply(grad)

    @staticmethod
    def jvp(ctx, tangent):  # forward mode: tangents are gathered as the values are
        return _all_rows(tangent)


class _SumRows(torch.autograd.Function):
    """The transpose of _Gather, (N, ...) -> (B, ...), so that a gradient has a gradient."""

    @staticmethod
    def forward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # every process used our rows as its columns: sum their gradients
        return grad.chunk(world())[rank()]  # (B, ...)

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad)


def _all_rows(x):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world())]
    dist.all_gather(parts, x)
    return torch.cat(parts)  # (N, ...)


def gather(x):
    """Concatenate the rows of all processes, with gradient: (B, ...) -> (N, ...); the identity on one process.

    With a loss that is the mean over local rows, DDP's mean over processes makes the gradient exactly that of one
    process with the whole batch. Every process must pass the same B.
    """
    return _Gather.apply(x) if world() > 1 else x


def positive_index(anchor):
    """Column of each local row's own pair among the gathered candidates: (B,) long."""
    return rank() * len(anchor) + torch.arange(len(anchor), device=anchor.device)


def average_gradients(parameters):
    """Mean over processes of .grad, for parameters of the loss, which are outside DDP (a learnable tau, a head)."""
    for p in parameters:
        if world() > 1 and p.requires_grad:
            p.grad, = average([torch.zeros_like(p) if p.grad is None else p.grad])


def average(gradients):
    """Mean over processes of gradients from autograd.grad, which DDP does not average: a tuple of tensors."""
    gradients = tuple(g.contiguous() for g in gradients)
    for g in gradients if world() > 1 else ():
        dist.all_reduce(g)
        g /= world()
    return gradients


def check_finite(loss, step, tau, embeddings, keys, rates="--lr"):
    """Stop all processes together, with one message, when the loss is not finite on any of them.

    Args: loss (); tau: float for the message; embeddings: tensors (B, D), whose norms it gives; keys: B sample keys;
        rates: the flags of the learning rates that it advises to lower.
    Raises: UserError on every process.
    """
    finite = torch.isfinite(loss.detach()).to(torch.int32)
    if world() > 1:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if finite.item():
        return
    norms = [e.detach().float().norm(dim=-1) for e in embeddings]  # (B,) each
    broken = sorted({i for n in norms for i in (~torch.isfinite(n)).nonzero().flatten().tolist()}) or range(len(keys))
    largest = ", ".join(f"{n.max():.3g}" for n in norms)
    ours = f"process {rank()}: embedding norms up to {largest}, keys {[keys[i] for i in broken][:8]}"
    lines = base.gather_objects(None if torch.isfinite(loss.detach()) else ours)
    raise UserError(f"the loss is not finite at step {step} (tau {tau:.4g}); {'; '.join(x for x in lines if x)}. "
                    f"Try a lower {rates}, --grad-clip 1 or a higher temperature, and look at these samples.")


def mean_over_processes(numbers, device):
    """{name: () tensor or float} of each process -> {name: float}, the mean over processes. Collective."""
    values = [v.item() if torch.is_tensor(v) else v for v in numbers.values()]
    return {k: v / world() for k, v in zip(numbers, base.all_sum(*values, device=device))}


# ================================================ losses on any card ================================================
def fp32(loss):
    """Decorator: the loss runs outside autocast and on float32 in place of half precision, whatever the caller does."""
    def full(x):
        return x.float() if torch.is_tensor(x) and x.dtype in (torch.float16, torch.bfloat16) else x

    @functools.wraps(loss)
    def wrapped(*args, **kwargs):
        device = next((a.device.type for a in (*args, *kwargs.values()) if torch.is_tensor(a)), "cpu")
        with torch.autocast(device, enabled=False):
            return loss(*map(full, args), **{k: full(v) for k, v in kwargs.items()})
    return wrapped


def rows_at_once(rows, columns, device):
    """How many rows of (rows, columns) matrices a loss computes at a time: all, if their float32 temporaries fit into
    1 GiB; else as many as fit into 64 MiB on a CPU (for its cache), into 1 GiB on a card (to keep it busy)."""
    per_row = 4 * 21 * columns  # bytes; Algorithm 1 of TeMo written out keeps about 21 (B, N) matrices
    return rows if rows * per_row <= 2**30 else max(1, 2**(30 if device.type == "cuda" else 26) // per_row)


def per_anchor(value, anchor, name="tau", positive=True, columns=0):
    """Checks a temperature or margin of a loss. Returns: a number or () unchanged, (B,), one per anchor, as (B, 1).

    Args: name: for the message; positive: a number must be above 0 (a tensor's values are not checked: that would wait
        for the card); columns: N if the loss also accepts one value per pair, (B, N).
    Raises: ValueError for a number that is not above 0, and for any other shape, which would broadcast wrongly."""
    if not torch.is_tensor(value):
        one_number(value, name, positive)
    elif value.ndim and value.shape != (len(anchor),) and value.shape != (len(anchor), columns):
        pairs = f", or ({len(anchor)}, {columns}), one per pair" if columns else ""
        raise ValueError(f"{name}: a tensor {tuple(value.shape)}; give a number, () or ({len(anchor)},), one per "
                         f"anchor of this process{pairs}")
    elif value.ndim == 1:
        return value[:, None]  # (B, 1)
    return value


def one_number(value, name="tau", positive=True):
    """Returns a number or () unchanged. Raises: ValueError for any other shape, and for a number not above 0."""
    if torch.is_tensor(value) and value.ndim or not torch.is_tensor(value) and np.ndim(value):
        shape = tuple(value.shape) if torch.is_tensor(value) else np.shape(value)
        raise ValueError(f"{name}: {shape}; give a number or ()" + ("" if torch.is_tensor(value) else ", or a tensor"))
    if positive and not torch.is_tensor(value) and not value > 0:
        raise ValueError(f"{name} {value}: must be above 0; the cosines are divided by it")
    return value


def by_rows(loss, *rows, columns, block=0):
    """The loss of each row; for large (B, N) matrices in blocks of rows, which backward recomputes: memory linear in N.

    Args:
        loss: function of slices of `rows` -> (b,), or () their mean; gradients flow back through the slices.
        rows: tensors whose first axis is B are sliced; anything else is passed whole.
        columns: N.   block: rows at a time; 0 = see rows_at_once.
    Returns: (B,), or () the mean over all rows.
    """
    B = len(rows[0])
    block = block or rows_at_once(B, columns, rows[0].device)
    if block >= B:
        return loss(*rows)
    def cut(x, i):
        return x[i:i + block] if torch.is_tensor(x) and x.ndim and len(x) == B else x
    if torch.is_grad_enabled():  # otherwise there is nothing to recompute, and older torch refuses forward mode in it
        loss = functools.partial(checkpoint, loss, use_reentrant=False, preserve_rng_state=False)
    parts = [loss(*(cut(x, i) for x in rows)) for i in range(0, B, block)]
    if parts[0].ndim:
        return torch.cat(parts)
    return sum(part * (min(block, B - i) / B) for part, i in zip(parts, range(0, B, block)))  # the last may be short


@contextlib.contextmanager
def tf32(on=True):
    """Inside, a CUDA card multiplies float32 matrices in TF32 (11 bits, not 24): for encoders, never for a loss."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Border(torch.autograd.Function):
    """The identity, placed between encoders and loss: backward calls `crossed` when it reaches the encoders."""

    @staticmethod
    def forward(ctx, crossed, *embeddings):
        ctx.crossed = crossed
        ctx.set_materialize_grads(False)
        return tuple(e.view_as(e) for e in embeddings)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.crossed()
        return None, *gradients


class Chunks:
    """Encodes a batch, and passes the gradient of a loss back into the encoders: all at once, or `chunk` examples at a
    time, with the memory of one chunk and the exact gradient of the full batch (gradient caching).

    With chunks, the batch is first encoded without a graph. The script computes its loss from these embeddings. Then
    `backward` computes the loss's gradient at the embeddings, encodes each chunk again with the random state of the
    first pass, and passes the gradient through it.

    Args:
        encode: function of nested dicts of (b, ...) tensors -> tuple of (b, D) embeddings, rows as in the inputs.
        model: what `encode` calls, as prepared by the accelerator.
        chunk: examples at a time on this process, 0 = all.
        tf32: on a CUDA card the encoders multiply float32 in TF32, forward and backward; the loss never does.
    """

    def __init__(self, encode, model, accelerator, chunk=0, tf32=False):
        self.function, self.model, self.accelerator, self.chunk = encode, model, accelerator, chunk
        self.tf32, self.on_the_way_back = tf32 and accelerator.device.type == "cuda", False

    def fast(self):
        """The context in which encoders run."""
        return tf32(self.tf32)

    def _crossed(self):
        if self.on_the_way_back:  # not when a script calls autograd.grad itself
            torch.set_float32_matmul_precision("high")

    def encode(self, inputs):
        """Nested dict of (B, ...) tensors -> tuple of (B, D) embeddings, from which a loss can be computed."""
        from accelerate.utils import find_batch_size, slice_tensors
        B, device = find_batch_size(inputs), self.accelerator.device
        self.pieces = []  # of the inputs, each with the random state of its first pass
        if not self.chunk or self.chunk >= B:
            with self.fast():
                whole = self.function(inputs)
            return _Border.apply(self._crossed, *whole) if self.tf32 else whole
        parts = []
        with torch.no_grad(), self.fast():
            for i in range(0, B, self.chunk):
                piece = slice_tensors(inputs, slice(i, i + self.chunk))
                self.pieces.append((piece, random_state(device)))
                parts.append(self.function(piece))
        self.embeddings = tuple(torch.cat(e).detach().requires_grad_() for e in zip(*parts))  # (B, D) each
        return self.embeddings

    def backward(self, loss):
        """Fill .grad of the model's parameters (and of the loss's own) for a loss of the last `encode`'s embeddings."""
        self.on_the_way_back = self.tf32
        with tf32(on=False):  # undoes what _crossed has switched on
            self.accelerator.backward(loss)
        self.on_the_way_back = False
        if not self.pieces:
            return
        with self.fast():
            self._backward_in_chunks()

    def _backward_in_chunks(self):
        device = self.accelerator.device
        after = random_state(device)
        for k, (piece, state) in enumerate(self.pieces, 1):
            set_random_state(state, device)
            rows = slice((k - 1) * self.chunk, k * self.chunk)
            wait = k == len(self.pieces)  # processes wait for each other in the last chunk only
            with contextlib.nullcontext() if wait else self.accelerator.no_sync(self.model):
                again = self.function(piece)  # (b, D) each, with a graph
                used = [(e, whole.grad[rows]) for e, whole in zip(again, self.embeddings) if whole.grad is not None]
                torch.autograd.backward([e for e, _ in used], [g.to(e.dtype) for e, g in used])
        set_random_state(after, device)


def random_state(device):
    """Random states of the CPU and, if the device is a GPU, of the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state, device):
    """Restores what random_state returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def cosine_lr(step, total, warmup, peak, end, schedule="cosine"):
    """Learning rate at step `step` (from 0): linear warm-up over `warmup` steps, then cosine or linear to `end`, or
    constant.

    A pure function, written into the optimiser each step: a scheduler object would be stepped W times on W processes.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return end + (peak - end) * (1 - (step - warmup) / max(1, total - warmup))
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def decay_groups(modules, weight_decay):
    """Parameter groups for an optimiser: weight decay for matrices and kernels, none for biases, norms and scalars."""
    params = [p for m in modules for p in m.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


# ================================================== random numbers ==================================================
def _mix(x):
    """splitmix64 finaliser on uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed, epoch, keys, n, stream=0):
    """(len(keys), n) float32 numbers in [0, 1): a function of (seed, epoch, key, stream) and of nothing else.

    epoch: one, or one per key.   keys: integers (the sample's index, or `key_hash` of its name).   stream: one per
    view: views are independent.
    """
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        x = _mix(np.asarray(keys, dtype=np.int64).astype(np.uint64) * golden + np.uint64(seed))
        x = _mix(x ^ _mix(np.uint64(epoch) * golden + np.uint64(stream) * np.uint64(0xD1B54A32D192ED03)))
        x = _mix(x[:, None] + np.arange(1, n + 1, dtype=np.uint64)[None] * golden)
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # 24 bits: exact in float32


def key_hash(key):
    """63-bit integer of a sample's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little") >> 1


# =================================================== image views ====================================================
GREY = (0.2989, 0.587, 0.114)  # ITU-R 601 luma, as torchvision


class Augment:
    """One random image view: crop and RandAugment per sample, then flip, colour, grey and blur in batch, on the device.

    Every decision is read from a row of `uniforms`, never from a global generator.

    Args: size (pixels); scale_min: smallest area of the random crop, as a part of the image (1 = no crop); flip, grey,
        blur, jitter_p: probabilities; brightness, contrast, saturation, hue: strengths as in torchvision.ColorJitter;
        randaugment: (operations, magnitude out of 30), or (0, 0); squash: with no crop, do not keep the aspect.
    """
    DRAWS = 16

    def __init__(self, size, scale_min=1.0, flip=0.0, jitter_p=0.0, brightness=0.0, contrast=0.0, saturation=0.0,
                 hue=0.0, grey=0.0, blur=0.0, randaugment=(0, 0), squash=False):
        self.size, self.scale_min, self.squash, self.randaugment = size, scale_min, squash, randaugment
        self.flip, self.grey, self.blur = flip, grey, blur
        self.jitter_p, self.brightness, self.contrast = jitter_p, brightness, contrast
        self.saturation, self.hue = saturation, hue

    def boxes(self, height, width, u):
        """Random-resized-crop boxes (B, 4) long (top, left, height, width) for draws u (B, DRAWS); aspect 3/4..4/3.

        With scale_min = 1 it is the evaluation view: the centre square, or with squash the whole image. Sides longer
        than the image's are cut to them (torchvision draws again, up to ten times)."""
        if self.scale_min == 1:
            h, w = (height, width) if self.squash else (min(height, width),) * 2
            return np.tile(np.array([[(height - h) // 2, (width - w) // 2, h, w]]), (len(u), 1))
        area = height * width * (self.scale_min + (1 - self.scale_min) * u[:, 0])  # (B,)
        ratio = np.exp(np.log(3 / 4) + np.log(16 / 9) * u[:, 1])
        h = np.clip(np.round(np.sqrt(area / ratio)), 1, height)
        w = np.clip(np.round(np.sqrt(area * ratio)), 1, width)
        top, left = np.floor(u[:, 2] * (height - h + 1)), np.floor(u[:, 3] * (width - w + 1))
        return np.stack([top, left, h, w], 1).astype(np.int64)

    def crop_one(self, image, u):
        """Worker side: (..., 3, H, W) uint8 of any size -> (..., 3, size, size) uint8, all frames alike; u (DRAWS,)."""
        from torchvision.transforms.v2 import functional as V
        top, left, h, w = self.boxes(*image.shape[-2:], u[None])[0].tolist()
        image = V.resized_crop(image, top, left, h, w, [self.size, self.size], antialias=True)
        return randaugment(image, u, *self.randaugment) if self.randaugment[0] else image

    def finish(self, x, u):
        """Device side: (B, 3, S, S) float in 0..1 -> the same after flip, jitter, grey and blur; u (B, DRAWS).

        The four colour operations come in the fixed order brightness, contrast, saturation, hue (torchvision permutes
        them per sample); each equals torchvision's functional at the same parameter."""
        return self.photometric(x, torch.from_numpy(u).to(x.device)[:, :, None, None, None])

    def photometric(self, x, u):
        """finish for draws as a tensor (B, DRAWS, 1, 1, 1); fuses well under torch.compile."""
        if self.flip:
            x = torch.where(u[:, 4] < self.flip, x.flip(-1), x)
        if self.jitter_p and (self.brightness or self.contrast or self.saturation or self.hue):
            on = (u[:, 5] < self.jitter_p).flatten()  # (B,)
            everywhere = x.is_cuda or torch.compiler.is_compiling()
            rows = slice(None) if everywhere else on.nonzero().flatten()  # on a CPU only the rows that are jittered
            f = 2 * u[rows] - 1  # (b, DRAWS, 1, 1, 1)
            y = (x[rows] * (1 + f[:, 6] * self.brightness)).clamp_(0, 1)
            y = _blend(y, luma(y).mean((-2, -1), keepdim=True), 1 + f[:, 7] * self.contrast)
            y = _blend(y, luma(y), 1 + f[:, 8] * self.saturation)
            y = shift_hue(y, f[:, 9] * self.hue) if self.hue else y
            x = torch.where(on[:, None, None, None], y, x) if everywhere else x.index_copy(0, rows, y)
        if self.grey:
            x = torch.where(u[:, 10] < self.grey, luma(x).expand_as(x), x)
        if self.blur:
            x = torch.where(u[:, 11] < self.blur, gaussian_blur(x, 0.1 + 1.9 * u[:, 14, 0, 0, 0]), x)
        return x


LEVELS = np.arange(256.0)
# RandAugment's operations in torchvision's order: a function of one plane (H, W) uint8 and a strength; the strength at
# magnitude 30 (of shears and light a factor, of shifts a part of the side, of rotations degrees; 0: it has none).
OPERATIONS = {
    "Identity": (lambda p, m: p, 0),
    "ShearX": (lambda p, m: _moved(p, 1, m, 0, 0, 1, 0), 0.3),
    "ShearY": (lambda p, m: _moved(p, 1, 0, 0, m, 1, 0), 0.3),
    "TranslateX": (lambda p, m: _moved(p, 1, 0, -int(m * p.shape[1]), 0, 1, 0), 150 / 331),
    "TranslateY": (lambda p, m: _moved(p, 1, 0, 0, 0, 1, -int(m * p.shape[0])), 150 / 331),
    "Rotate": (lambda p, m: np.asarray(Image.fromarray(p).rotate(m)), 30),
    "Brightness": (lambda p, m: _looked_up(p, LEVELS * (1 + m)), 0.9),
    "Sharpness": (lambda p, m: _sharpened(p, 1 + m), 0.9),
    "AutoContrast": (lambda p, m: _stretched(p, int(p.min()), int(p.max())), 0),
    "Equalize": (lambda p, m: np.asarray(ImageOps.equalize(Image.fromarray(p))), 0)}


def randaugment(image, u, operations, magnitude):
    """Applies `operations` random OPERATIONS to (..., 3, H, W) uint8, each with probability 1/2, as the sample's own
    draws u (DRAWS,) say; magnitude: out of 30.

    Choices, signs and strengths are those of torchvision's v2.RandAugment after torch.manual_seed. The images equal its
    within one grey level, except where a shear hits the middle between two pixels, and for 1 pixel in 400 of a rotation
    at 256 px. Plane by plane, temporaries fit the cache: allocating larger ones costs more than the work."""
    random = torch.Generator().manual_seed(int(u[12] * 2**24) * 2**24 + int(u[13] * 2**24))
    for _ in range(operations):
        if torch.rand((), generator=random) >= 0.5:
            continue
        change, most = [*OPERATIONS.values()][torch.randint(len(OPERATIONS), (), generator=random)]
        strength = most * magnitude / 30
        if most and torch.rand((), generator=random) <= 0.5:
            strength = -strength
        planes = image.numpy().reshape(-1, *image.shape[-2:])  # (... * 3, H, W)
        image = torch.from_numpy(np.stack([change(p, strength) for p in planes])).view(image.shape)
    return image


def _moved(plane, *matrix):
    """At each (x, y) the plane's (H, W) pixel nearest to (a x + b y + c, d x + e y + f); black outside the plane."""
    return np.asarray(Image.fromarray(plane).transform(plane.shape[::-1], Image.Transform.AFFINE, matrix))


def _looked_up(plane, levels):
    """The plane with new grey levels (256,), rounded down."""
    table = levels.clip(0, 255).astype(np.uint8).tobytes()
    return np.frombuffer(plane.tobytes().translate(table), np.uint8).reshape(plane.shape)


def _stretched(plane, low, high):
    """The plane with its grey levels low..high stretched to 0..255."""
    return _looked_up(plane, (LEVELS - low) * 255 / (high - low)) if high > low else plane


def _sharpened(plane, ratio):
    """The plane (H, W) moved away from (ratio > 1) or towards the mean of 3 x 3 pixels, in which the centre counts 5
    times; the border stays."""
    x, out = plane.astype(np.int16), plane.copy()
    rows = x[:, :-2] + x[:, 1:-1] + x[:, 2:]  # (H, W - 2)
    x = x[1:-1, 1:-1]  # (H - 2, W - 2)
    mean = (rows[:-2] + rows[1:-1] + rows[2:] + 4 * x + 6) // 13  # rounded: a thirteenth is never half way
    out[1:-1, 1:-1] = (mean + np.float32(ratio) * (x - mean)).clip(0, 255)
    return out


def luma(x):
    """Brightness of RGB images by ITU-R 601, (..., 3, H, W) -> (..., 1, H, W)."""
    r, g, b = x.unbind(-3)
    return (GREY[0] * r + GREY[1] * g + GREY[2] * b).unsqueeze(-3)


def _blend(x, other, ratio):
    return torch.lerp(other.expand_as(x), x, ratio.expand_as(x) if torch.is_tensor(ratio) else ratio).clamp_(0, 1)


def shift_hue(x, shift):
    """Hue rotated by `shift` turns ((B, 1, 1, 1), -0.5..0.5): (B, 3, S, S) in 0..1. Closed form of HSV -> RGB."""
    r, g, b = x.unbind(-3)  # (B, S, S)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    c = chroma.clamp(min=1e-8)
    sextant = torch.where(r == high, (g - b) / c, torch.where(g == high, 2 + (b - r) / c, 4 + (r - g) / c))
    sextant = sextant + 6 * shift.squeeze(-3)
    def channel(n):
        k = sextant + n
        k = k - 6 * torch.floor(k / 6)  # 0..6
        return high - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)
    return torch.stack([channel(5), channel(3), channel(1)], -3)


def gaussian_blur(x, sigma):
    """Gaussian blur with one sigma (pixels) per sample: (B, 3, S, S), (B,) -> (B, 3, S, S).

    Reflected borders, radius S/20 as SimCLR."""
    B, C, S, _ = x.shape
    radius = max(1, S // 20)
    t = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (t / sigma[:, None]) ** 2)  # (B, 2r+1)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(C, 0)
    y = F.pad(x.reshape(1, B * C, S, S), (radius,) * 4, mode="reflect")
    y = F.conv2d(y, kernel[:, None, :, None], groups=B * C)
    return F.conv2d(y, kernel[:, None, None, :], groups=B * C).reshape(B, C, S, S)


def crop_batch(augment, images, u):
    """(B, [T,] 3, H, W) uint8 -> (B, [T,] 3, size, size) float in 0..1; the boxes of Augment.crop_one for draws u."""
    boxes = base.to_device(torch.from_numpy(augment.boxes(*images.shape[-2:], u)), images.device)  # (B, 4)
    frames = images.reshape(-1, *images.shape[-3:])  # (B * T, 3, H, W)
    boxes = boxes.repeat_interleave(len(frames) // len(images), 0)  # (B * T, 4): one box for all frames of a clip
    out = resize_boxes(frames, boxes, augment.size).unflatten(0, images.shape[:-3])  # (B, [T,] 3, size, size)
    if augment.randaugment[0]:
        pairs = zip((out * 255).round().byte().cpu(), u)
        views = [randaugment(x, row, *augment.randaugment) for x, row in pairs]
        out = torch.stack(views).to(images.device) / 255
    return out


def resize_boxes(images, boxes, size):
    """Crop and resize each image by its own box, antialiased bilinear as torchvision: two small matrix products.

    images (B, 3, H, W) uint8 or float; boxes (B, 4) top, left, height, width -> (B, 3, size, size) float, in 0..1.
    """
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    rows = _resize_weights(boxes[:, 0], boxes[:, 2], size, x.shape[-2])  # (B, size, H)
    cols = _resize_weights(boxes[:, 1], boxes[:, 3], size, x.shape[-1])  # (B, size, W)
    B, C, H, W = x.shape
    x = torch.bmm(x.reshape(B, C * H, W), cols.transpose(1, 2))  # (B, C * H, size), one product for each image
    return (rows[:, None] @ x.view(B, C, H, size)).clamp_(0, 1)


def _resize_weights(start, length, size, side):
    """(B, size, side): weight of each input pixel in each output pixel; triangle filter as wide as the shrinking."""
    start, length = start[:, None, None].float(), length[:, None, None].float()
    scale = length / size
    centre = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale  # (B, size, 1)
    pixel = torch.arange(side, device=start.device) + 0.5  # (side,)
    inside = (pixel > start) & (pixel < start + length)
    weight = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0) * inside
    return weight / weight.sum(-1, keepdim=True)


# ======================================================= text =======================================================
def drop_and_swap(text, u, drop=0.1, swap=0.1):
    """Word dropout and one swap of neighbours, from draws u (>= 16,): a poor man's paraphrase. Never an empty text."""
    words = text.split()
    kept = [w for i, w in enumerate(words) if u[2 + i % (len(u) - 2)] >= drop] or words[:1]
    if len(kept) > 1 and u[0] < swap * len(kept):
        i = int(u[1] * (len(kept) - 1))
        kept[i], kept[i + 1] = kept[i + 1], kept[i]
    return " ".join(kept)


def text_pair(captions, u, paraphrases=None, templates=(), drop=0.1, swap=0.1, second=True):
    """Pick T and its other view T~ for a batch.

    Args: captions: B lists of str; u (B, 32) draws; paraphrases: a Paraphrases or None; templates: formats such as
        "a drawing of {}". T~ is a paraphrase from the file, else a template around any caption, else another caption,
        else word dropout and swap.
    Returns: two lists of B str (the second is empty when `second` is False).
    """
    first = [c[int(r[0] * len(c))] for c, r in zip(captions, u)]
    if not second:
        return first, []
    known = paraphrases.get(first) if paraphrases else [[]] * len(first)
    other = []
    for text, options, all_captions, r in zip(first, known, captions, u):
        if not options and templates:
            options = [t.format(c) for c in all_captions for t in templates]
        if not options:
            options = [c for c in all_captions if c != text]
        other.append(options[int(r[1] * len(options))] if options else drop_and_swap(text, r[2:], drop, swap))
    return first, other


# ===================================================== encoders =====================================================
class QuestionAnswerer(TwoTower):
    """Videos and questions -> scores of answers.

    Args:
        vision, text: the towers.
        answers: the vocabulary of open questions, most frequent first; [] = questions with choices.
        model: 'fusion'; or 'dual', only for questions with choices.
        layers: of the fusion.   frames: the most frames that a clip may have.
        similarity: how videos are compared with texts: 'pooled', before the fusion; or 'fused', by a pass through it.
    block: how many texts at a time go through the fusion with all videos; 0 = automatic, see by_rows.
    """
    block = 0

    def __init__(self, vision, text, answers=(), model="fusion", layers=2, frames=1, similarity="pooled"):
        super().__init__(vision, text)
        self.answers, self.model, self.frames, self.similarity = list(answers), model, frames, similarity
        if model == "dual":
            self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())    # as CLIP's
            return
        width = text.width
        self.frame = nn.Linear(vision.width, width)
        self.place = nn.Parameter(torch.randn(1 + frames, width) * 0.02)   # of [CLS] and of each frame
        self.fusion = Transformer(width, layers, next(h for h in (12, 8, 4, 2, 1) if width % h == 0))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, max(1, len(self.answers)))
        if similarity == "fused":
            self.pair = nn.Parameter(torch.randn(2, width) * 0.02)
            vision.projection.requires_grad_(False)                        # no loss uses them: DDP would wait for them
            text.projection.requires_grad_(False)

    def forward(self, pixels=None, tokens=None, question=None, choices=None):
        """pixels (B, [T,] 3, S, S); tokens (B, L) of the texts paired with them, None in evaluation; question: tokens
        (B, L); choices: tokens (B, C, L) of "question choice", and `there` (B, C), False for a choice that is missing.

        Returns: video (B, D), text (B, D), scores (B, A) of the vocabulary or (B, C) of choices, -inf for a missing
            one; without a question what TwoTower returns. With fused similarity and tokens, video and text are instead
            the cosines (B, N) with all texts and all videos of the global batch: see `cosines`.
        """
        if question is None:
            return super().forward(pixels, tokens)
        frames = self.vision.frames(pixels)                                # (B * T, width)
        _, video = self.vision.pool(frames, pixels)                        # (B, D)
        frames = frames.unflatten(0, (len(pixels), -1))                    # (B, T, width)
        paired = None
        if tokens is not None and self.similarity == "fused":
            video, paired = self.cosines(frames, *self.text.words(**tokens)[:1], tokens["attention_mask"])
        elif tokens is not None:
            paired = self.text(**tokens)                                   # (B, D)
        if self.answers:
            words, _ = self.text.words(**question)                         # (B, L, W)
            first = self.fuse(self.place[:1], frames, words, question["attention_mask"])                 # (B, 1, W)
            return video, paired, self.head(first[:, 0])                   # (B, A)
        choices = choices or {k: v[:, None] for k, v in question.items()}  # one choice: the question itself
        B, C = choices["input_ids"].shape[:2]
        flat = {k: choices[k].flatten(0, 1) for k in ("input_ids", "attention_mask")}                    # (B * C, L)
        words, text = self.text.words(**flat)                              # (B * C, L, W), (B * C, D)
        if self.model == "dual":
            cosine = (normalize(video)[:, None] * normalize(text).unflatten(0, (B, C))).sum(-1)
            scores = cosine * self.log_scale.exp()                         # (B, C)
        else:
            each = frames.repeat_interleave(C, 0)                          # (B * C, T, width)
            scores = self.head(self.fuse(self.place[:1], each, words, flat["attention_mask"])).view(B, C)
        there = choices.get("there")
        return video, paired, scores if there is None else scores.masked_fill(~there, -math.inf)

    def fuse(self, first, frames, words, keep):
        """Output (b, f, W) of the transformer at tokens `first` (f, W), which precede the frames (b, T, width) of a
        clip and words (b, L, W); keep (b, L) is 0 at padding."""
        b, T = frames.shape[:2]
        if T > self.frames:
            raise UserError(f"{T} frames per clip, but this model was made for at most {self.frames}; use "
                            f"--frames {self.frames}")
        first = first.expand(b, -1, -1)                                    # (b, f, W)
        x = torch.cat([first, self.frame(frames) + self.place[1:1 + T], words], 1)   # (b, f + T + L, W)
        keep = torch.cat([keep.new_ones(b, first.shape[1] + T), keep], 1).bool()     # (b, f + T + L)
        return self.norm(self.fusion(x, keep, first.shape[1]))

    def cosines(self, frames, words, keep):
        """Cosines of all pairs of the global batch, each by a pass through the fusion.

        Args: frames (B, T, width), words (B, L, W), keep (B, L): of this process; row i of each is one pair.
        Returns: (B, N) its videos with all texts, (B, N) its texts with all videos. Each process fuses B * N pairs,
            those of its own texts (all clips have T frames, while the texts of other processes may be longer).
        """
        videos = gather(frames)                                            # (N, T, width)
        N, length = len(videos), 2 + frames.shape[1] + words.shape[1]

        def rows(words, keep):                                             # b texts at a time
            each = videos.repeat(len(words), 1, 1)                         # (b * N, T, width)
            pairs = self.fuse(self.pair, each, words.repeat_interleave(N, 0), keep.repeat_interleave(N, 0))
            video, text = normalize(pairs).unbind(1)                       # (b * N, W) each
            return (video * text).sum(1).view(-1, N)                       # (b, N)
        size = N * len(self.fusion) * length * words.shape[2]              # numbers in one activation of a text's pairs
        texts = by_rows(rows, words, keep, columns=size, block=self.block)                               # (B, N)
        return gather(texts)[:, positive_index(texts)].T, texts


SPEC = ("image_encoder", "text_encoder", "embed_dim", "image_size", "text_length", "text_pooling", "image_stats",
        "eval_resize", "eval_crop", "clean_captions")


def spec_of(args):
    """The model flags of a script, for build_model; without texts only features, on which a script puts its head."""
    without = {} if hasattr(args, "text_encoder") else {"text_encoder": "", "embed_dim": 0}
    return {k: getattr(args, k) for k in SPEC if hasattr(args, k)} | without


def build_model(spec, tokenizer, pretrained, weights=""):
    """TwoTower and EvalTransform from a spec (the content of model.json), which holds the model flags.

    weights: a file for init_from; a timm image encoder is then only downloaded if the file has none of its tensors."""
    hub_id, asked = "/" in spec["image_encoder"], spec.get("questions") or {}
    graph = asked.get("model") == "vgt"
    embed_dim = 0 if graph else spec["embed_dim"]  # VGT has projections of its own
    vision_encoder = functools.partial(
        VisionEncoder, spec["image_encoder"], embed_dim, image_size=spec["image_size"],
        config=spec.get("vision_config"), features=spec.get("features", (0, 0)), frames=spec.get("frames", 0))
    vision = vision_encoder(pretrained=pretrained and (hub_id or not weights))
    text = None
    if spec["text_encoder"]:
        vocabulary = len(tokenizer.tokenizer) if tokenizer else 0
        text = TextEncoder(spec["text_encoder"], embed_dim, pretrained, spec["text_length"], vocabulary,
                           spec["text_pooling"], spec.get("text_config"))
    of_encoder = vision.stats if spec["image_stats"] == "encoder" else STATS[spec["image_stats"]]
    mean, std = spec.get("stats") or of_encoder
    spec.update(stats=[list(mean), list(std)], vision_config=vision.config, text_config=text.config if text else None)
    model = TwoTower(vision, text)
    if graph:
        model = VGT(vision, text, spec["embed_dim"], tokenizer, **asked)
    elif asked:
        model = QuestionAnswerer(vision, text, **asked)
    model.from_file = set(init_from(model, weights)) if weights else set()  # names of tensors
    if weights and pretrained and not any(name.startswith("vision.") for name in model.from_file):
        if not hub_id and spec["image_encoder"] not in ("small", *FROM_FILES):
            model.vision = vision_encoder(pretrained=True)                 # the file is the text encoder's
    if spec["image_encoder"] != "small" or spec["text_encoder"] not in ("small", ""):
        freeze_unused(model, tokenizer, spec)
    return model, EvalTransform(spec["image_size"], mean, std, spec["eval_resize"], spec.get("eval_crop", 1.0))


def load_model(run_dir):
    """(model, tokenizer, transform) of a finished run, on the CPU, in eval mode, offline; tokenizer None without texts.

    model(transform(image)[None])[0] and model(tokens=tokenizer(["a caption"]))[1] are embeddings (1, D) of one space.
    They are not of unit length: `normalize` them, and their products are cosines.
    Raises: UserError when the folder holds no model, or a damaged one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    run_dir = Path(run_dir)
    if not (run_dir / "model.json").is_file():
        raise UserError(f"{run_dir}: no model.json there; a run writes it when it ends")
    again = f"; --resume {run_dir} writes it again" if any(run_dir.glob("checkpoints/step_*/state.json")) else ""
    try:
        spec = base.read_json(run_dir / "model.json")
        check_spec(spec)
        tokenizer = None
        if spec["text_encoder"]:
            tokenizer = Tokenizer.load(run_dir / "tokenizer", spec["text_length"], spec["clean_captions"])
        model, transform = build_model(spec, tokenizer, pretrained=False)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{run_dir}: its model.json is damaged ({reason}){again}") from error
    try:
        weights = run_dir / "model.safetensors"
        if spec.get("sha256") not in (None, base.checksum(weights)):
            raise OSError("not the bytes that the run wrote; if that is intended, remove sha256 from model.json")
        tensors = load_file(weights)
        if more := sorted(tensors.keys() - model.state_dict().keys()):
            raise UserError(f"{run_dir}: its model.safetensors holds {more[0]}, which a fork added to the encoders and "
                            "model.json cannot describe; modules of a loss belong into `own`, and a backbone needs a "
                            "name in image_tower (docs/fork.md)")
        model.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = first_line(error)
        raise UserError(f"{run_dir}: its model.safetensors is damaged or of another model ({reason}){again}") from error
    return model.eval(), tokenizer, transform


# ======================================================= data =======================================================
HELD_OUT = 0.05  # part of the images held out for val, and as much for test, if the data lack these splits
MOST_HELD_OUT = 5000  # at most so many of them are evaluated
IN_MEMORY = 2**18  # rows whose captions and keys are kept as Python lists; larger tables are read row by row


@functools.lru_cache(maxsize=2 * 16)  # the tars read at a time, and those read next
def _opened(path):
    return open(path, "rb", buffering=0)  # closed when it leaves the cache


def part_of(path, offset, size):
    """Bytes of a tar. Its handle stays open, since a network disk takes milliseconds to open a file."""
    if not hasattr(os, "pread"):  # Windows; elsewhere pread, as forks share a handle's position and it uses none
        with open(path, "rb") as tar:
            tar.seek(offset)
            return tar.read(size)
    return os.pread(_opened(path).fileno(), size, offset)


@dataclasses.dataclass
class Data:
    """One split of a data set: a `datasets.Dataset` table with one row per example, and how its pixels are read.

    Columns of the table: source (struct of path or bytes; offset and size inside a tar; start and end in seconds),
    captions (list of str), key, and where the set has them label (ClassLabel), group (rows of one group are positives
    of each other), verb, noun, question, answer, choices, question_type, pair (sets/questions.py); question is None
    in rows of --extra-pairs.
    To change an attribute: dataclasses.replace(data, note=...).
    """
    name: str
    split: str
    table: object                     # datasets.Dataset
    pixels: torch.Tensor = None       # (M, [T,] 3, H, W) uint8 if the whole split is in memory
    clip: object = None               # how a video becomes frames (readers/clips.py); None for images
    note: str = ""                    # what was left out or held out, for the banner
    templates: tuple = ()             # formats around a caption that serve as paraphrases, "a drawing of {}"
    prompts: tuple = None             # zero-shot templates with {c}
    has_captions: bool = True         # False if class names take their place
    grouped: bool = False             # video -> text ranks videos by their best caption (MSVD's protocol)
    max_captions: int = 0             # captions of an example used in evaluation; 0 = all
    max_pixels: int = MAX_PIXELS      # a larger image is not decoded
    shards: np.ndarray = None         # (M,) number of the tar of each row
    rows: np.ndarray = None           # (M,) row numbers in the table that was opened first
    which: np.ndarray = None          # (M,) number of the one caption of each row, after unfold()
    sentences: object = None          # the texts that multi-instance retrieval ranks, and relevancies (sets/epic.py)
    caption_relevancy: float = 0.0    # training draws among the sentences above this relevancy; 0 = own captions
    own: object = None                # the set's own rows, which come first, if --extra-pairs added others
    streamed = False                  # readers/stream.py answers True

    def __post_init__(self):
        table = self.table
        # reading a caption must not read image bytes
        self.texts = table.remove_columns("source") if "source" in table.column_names else table
        self.sources = table.select_columns("source") if "source" in table.column_names else None
        self.rows = np.arange(len(table)) if self.rows is None else self.rows
        self.columns, self.features = {}, self.texts.features  # asking the table for these copies them each time

    def __len__(self):
        return len(self.table)

    examples = distinct = property(__len__)  # rows per epoch, and distinct rows; a stream may not know them

    def column(self, name):
        """A whole column: numbers as an array (M,), anything else as a list; None where the set has no such column."""
        if name not in self.texts.column_names:
            return None
        if name not in self.columns:
            values, kind = self.texts[name][:], getattr(self.features[name], "dtype", "list")
            self.columns[name] = values if kind in ("list", "string", "large_string") else np.asarray(values, kind)
        return self.columns[name]

    def names(self, column):
        """Class names of a column; None where it has none."""
        return getattr(self.features.get(column), "names", None)

    @property
    def labels(self):
        """(M,) class of each row, or None."""
        return self.column("label")

    @property
    def label_names(self):
        """Names of the classes, or None."""
        return self.names("label")

    @property
    def groups(self):
        """(M,) ids: rows of one group are positives of each other; each row for itself where the set has no groups."""
        return self.rows if self.column("group") is None else self.column("group")

    def cell(self, column, i):
        """The value of one column in row i."""
        if len(self) <= IN_MEMORY:
            return self.column(column)[i]
        return self.texts[int(i)][column]

    def captions(self, i):
        """The captions of row i; its pixels are not read."""
        captions = self.cell("captions", i)
        return captions if self.which is None else [captions[self.which[i]]]

    def training_captions(self, i, seed, epoch, number):
        """The captions of row i; with caption_relevancy one sentence that is relevant to it, drawn for sample `number`
        of the epoch."""
        if not self.caption_relevancy:
            return self.captions(i)
        u = uniforms(seed, epoch, [number], 1, stream=98)[0, 0]
        drawn = self.sentences.draw(int(self.rows[i]), self.caption_relevancy, u)
        return self.captions(i) if drawn is None else [drawn]

    def key(self, i):
        """The name of row i: it does not change with the split or with other rows."""
        return self.cell("key", i)

    def read(self, i, draws=None):
        """Image (3, H, W) or clip (T, 3, H, W), uint8; draws (T,) place random frames. Raises OSError or ValueError."""
        if self.pixels is not None:
            return self.pixels[i]
        source = self.sources[int(i)]["source"]
        if source is None:
            raise ValueError("no image in this row")
        content = source.get("bytes") or source["path"]
        if source.get("size") is not None:
            content = part_of(source["path"], source["offset"], source["size"])
        if self.clip:
            return self.clip(content, source.get("start"), source.get("end"), draws)
        return decode(content, self.max_pixels)

    def __getitem__(self, i):
        more = {c: self.column(c)[i] for c in self.texts.column_names if c not in ("captions", "key", "group")}
        return {"pixels": self.read(i), "captions": self.captions(i), "key": self.key(i)} | more

    def select(self, rows, split=None):
        """The same data set with only these rows, in this order; a row may come twice."""
        rows = np.asarray(rows, dtype=None if len(rows) else np.int64)  # numpy takes an empty list for floats
        cut = {k: v[rows] for k in ("rows", "which", "shards") if (v := getattr(self, k)) is not None}
        pixels = None if self.pixels is None else self.pixels[torch.from_numpy(rows)]
        table = self.table.select(rows)
        return dataclasses.replace(self, split=split or self.split, table=table, pixels=pixels, own=None, **cut)

    def unfold(self):
        """One example for each (image or clip, caption): an epoch sees every caption, and a batch may hold a clip twice
        (CLIP4Clip on MSR-VTT and MSVD)."""
        batches = self.texts.select_columns("captions").iter(10_000)
        of_row = np.array([len(captions) for batch in batches for captions in batch["captions"]])  # (M,)
        rows, which = np.repeat(np.arange(len(self)), of_row), np.concatenate([np.arange(n) for n in of_row])
        return dataclasses.replace(self.select(rows), which=which)

    def in_memory(self, limit=96):
        """The same examples, with pixels in one uint8 tensor if they are small and all of one size; else unchanged."""
        if self.pixels is not None or not len(self):
            return self
        try:
            if max(self.read(0).shape[-2:]) > limit:
                return self
            images = [self.read(i) for i in range(len(self))]  # (3, H, W) each
        except (OSError, ValueError):  # an unreadable one is counted when it is drawn
            return self
        return dataclasses.replace(self, pixels=torch.stack(images)) if len({x.shape for x in images}) == 1 else self

    def keys(self):
        """The names of all rows in order, in batches, since row by row takes minutes."""
        for batch in self.texts.select_columns("key").iter(10_000):
            yield from batch["key"]

    def first_captions(self, limit=None):
        """Captions in order (of the first `limit` examples): for a tokenizer or paraphrases."""
        for i in range(min(len(self), limit or len(self))):
            yield from self.captions(i)


def make_table(captions, keys, sources=None, classes=None, **columns):
    """A table in memory for `Data`.

    Args: captions: M lists of str; keys: M str; sources: M paths, or dicts as in the column `source`, or None where
        pixels are in memory; classes: {column: class names}; columns: label=..., group=..., verb=...: M values each.
    """
    import datasets
    text, number, seconds = (datasets.Value(kind) for kind in ("string", "int64", "float64"))
    kinds = {"path": text, "bytes": datasets.Value("binary"), "offset": number, "size": number,
             "start": seconds, "end": seconds}
    features, content = {"captions": [text], "key": text}, {"captions": list(captions), "key": list(keys)}
    if sources is not None:
        content["source"] = [{"path": s} if isinstance(s, str) else s for s in sources]
        features["source"] = {k: kinds[k] for k in kinds if any(k in s for s in content["source"][:1])}
    for name, values in columns.items():
        content[name] = values.tolist() if isinstance(values, np.ndarray) else list(values)
        known = (classes or {}).get(name)
        inferred = datasets.Dataset.from_dict({name: content[name]}).features[name]
        features[name] = datasets.ClassLabel(names=list(known)) if known is not None else inferred
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def from_rows(name, split, rows, options, classes=None, **attributes):
    """`Data` of the rows that were read from annotation files.

    Args: rows: dicts with source (a path, or a dict as in the column `source`), captions (list of str), key and further
        columns; rows without a caption are left out and counted in the note. classes: {column: class names}.
    """
    rows = [r | {"captions": clean_list(r["captions"])} for r in rows]
    kept = [r for r in rows if r["captions"]]
    if not kept:
        raise UserError(f"--dataset {name}: no row has an image and a caption")
    more = {k: [r[k] for r in kept] for k in kept[0] if k not in ("source", "captions", "key")}
    sources = [r["source"] for r in kept]
    table = make_table([r["captions"] for r in kept], [r["key"] for r in kept], sources, classes, **more)
    paths = [s if isinstance(s, str) else s.get("path", "") for s in sources]
    clip = clip_options(options) if any(is_video(p) for p in paths) else None
    return with_notes(Data(name, split, table, **({"clip": clip} | attributes)), len(rows) - len(kept))


def with_notes(data, silent):
    """The data, with a note that says what was left out or looks wrong. silent: how many rows had no caption."""
    lost = f"{silent:,} without a caption left out" if silent else ""
    labels = data.column("label")
    unknown = int((labels < 0).sum()) if labels is not None else 0
    missing = f"{unknown:,} without a class (not used where classes are)" if unknown else ""
    first = data.captions(0) if data.has_captions and 1 < len(data) <= IN_MEMORY else None
    same = "ALL CAPTIONS ARE THE SAME" if first and all(data.captions(i) == first for i in range(len(data))) else ""
    return dataclasses.replace(data, note=join_notes(data.note, lost, missing, same))


def has_clips(data):
    """Whether its examples are clips; tables then say video instead of image."""
    return bool(data.clip) or data.pixels is not None and data.pixels.ndim == 5


def frames_of(data):
    """T of a clip; 1 for images."""
    if data.pixels is not None and data.pixels.ndim == 5:
        return data.pixels.shape[1]
    return data.clip.frames if data.clip else 1


def find_set(name):
    """The module of sets/ that knows this name, or None. Raises: UserError if importing it fails."""
    try:
        return importlib.import_module(sets.MODULES[name]) if name in sets.MODULES else None
    except Exception as error:  # only this set is lost
        raise UserError(f"--dataset {name}: its file, {sets.MODULES[name]}, is broken ({first_line(error)})") from error


def options_of(name):
    """The options of load_data that only this data set has: its file declares them as flags."""
    module = find_set(name)
    return [flag[2:].replace("-", "_") for flag in module.SETS[name].get("options", {})] if module else []


def splits_of(name, hold_out_val=False):
    """The splits of a data set; one by name that comes without val has it only if it is held out of train."""
    module = find_set(name)
    own = tuple(module.SETS[name]["splits"]) if module else tuple(SPLIT_NAMES)
    return (*own, "val") if hold_out_val and set(own) == {"train", "test"} else own


def load_data(name, split, **options):
    """Open one split of a data set.

    Args:
        name: a name that a file of sets/ knows; a folder (class folders, images or videos with a metadata.csv, .jsonl
            or .parquet, tars, parquet); a csv, tsv, json(l) or parquet file of paths and captions; a .tar; or a hub id
            such as 'org/name'.   split: train, val or test.
        options: data_dir (annotations; where relative paths start), video_dir, image_column, caption_column,
            label_column, streaming, join_captions, unfold_captions; of clips: frames, frame_sampling, frame_cache,
            image_size, feature_dir; caption_relevancy: training draws among the sentences above it (EPIC-KITCHENS);
            hold_out_val: in a set by name without val, a part of train becomes val, and the rest stays train;
            max_pixels of an image; max_bad_fraction: the part of the samples in tars that may be damaged;
            extra_captions, a file of further captions for the train split; columns_of_training, {image_column: ...},
            which are used if these data have them, too; and the options of the set's own file.
    Returns: Data, or a stream of tars (train split with streaming=True).
    Raises: UserError naming the path or column and what exists instead.
    """
    if split not in SPLIT_NAMES:
        raise ValueError(f"split must be one of {list(SPLIT_NAMES)}, not {split!r}")
    columns = dict(options.pop("columns_of_training", {}))
    if columns and not find_set(name):
        try:
            return load_data(name, split, **options | columns)
        except NoColumn as error:  # then the usual column in its place
            if not columns.pop(error.option, ""):
                raise
            return load_data(name, split, **options, columns_of_training=columns)
    own = {"max_bad_fraction", *options_of(name)}                          # 0 and False are values of these
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()
             if (v or k in own and v is not None) and k not in ("unfold_captions", "max_pixels", "extra_captions")}
    key = tuple(sorted(given.items()))
    try:
        data = _known_set(name, split, key) if find_set(name) else _own_split(name, split, key)
    except MemoryError as error:  # no training flag makes a list of examples smaller
        raise UserError(f"--dataset {name}: not enough memory to read its lists of examples; close other programs, or "
                        "take a machine with more") from error
    if not data.streamed and not len(data):
        if split == "train":
            raise UserError(f"--dataset {name}: all of its rows are held out for val and test, by their names; give "
                            "these splits, or more data")
        raise EmptySplit(f"--dataset {name}: none of its names falls into the {HELD_OUT:.0%} that are held out for "
                         f"{split}; give a {split} split, or more data")
    if data.streamed and any(options.get(k) for k in ("unfold_captions", "join_captions", "feature_dir")):
        raise UserError("--streaming: leave out --unfold-captions, --join-captions and --feature-dir, which a stream "
                        "cannot have")
    if options.get("streaming") and split == "train" and not data.streamed:
        raise UserError(f"--streaming: reads tars, and {name} holds none; leave it out")
    if options.get("join_captions"):
        from contrastive.sets.own import joined
        if max(map(len, data.column("captions"))) < 2:
            base.say_once(f"WARNING: --join-captions: no example of {name} ({split}) has several captions to join")
        data = joined(data)
    if options.get("max_pixels"):
        data = dataclasses.replace(data, max_pixels=options["max_pixels"])
    if options.get("caption_relevancy") and split == "train":
        if data.sentences is None:
            raise UserError(f"--caption-relevancy: {name} has no sentences with relevancies (epic-kitchens-100 has); "
                            "set it to 0")
        if options.get("unfold_captions"):
            raise UserError("--caption-relevancy draws a sentence for each clip; leave out --unfold-captions")
        data = dataclasses.replace(data, caption_relevancy=options["caption_relevancy"])
    if options.get("extra_captions") and split == "train":
        from contrastive.sets.own import add_captions
        data = add_captions(data, Path(options["extra_captions"]).expanduser())
    return data.unfold() if options.get("unfold_captions") and split == "train" else data


class EmptySplit(UserError):
    """An evaluation split that the data do not have, or for which no row was held out."""


def _own_split(name, split, options):
    from contrastive.sets.own import own_data
    splits = own_data(name, options)
    if split not in splits:
        kind = UserError if split == "train" else EmptySplit
        rename = ", as its name says; rename it to train on it" if Path(name).is_file() and split == "train" else ""
        raise kind(f"--dataset {name}: no {split} split; it has: {', '.join(splits)}{rename}")
    return splits[split]


@functools.lru_cache(maxsize=32)
def _known_set(name, split, options):
    options, module = dict(options), find_set(name)
    held = options.pop("hold_out_val", False) and set(module.SETS[name]["splits"]) == {"train", "test"}
    if not held or split == "test":
        return module.load(name, split, options)
    train = module.load(name, "train", options)
    if train.streamed:
        raise UserError(f"--hold-out-val: {name} is a stream here, from which nothing can be held out")
    return hold_out({"train": train, "test": ()})[split]


def held_out_place(key):
    """A number in 0..1 from the hash of a name alone (all windows of a video share it), whatever the other rows."""
    video = re.sub(r" [\d.e+-]*-[\d.e+-]* s$", "", key)  # 1e-05-2 s is a window too
    return key_hash(f"held out {video}") / 2**63


def hold_out(splits):
    """Takes missing val and test splits out of train, HELD_OUT of it each. The hash of its name decides for each row,
    so that other rows do not matter. Each split keeps at most MOST_HELD_OUT. Without train nothing is held out."""
    train = splits.get("train")
    missing = [s for s in ("val", "test") if s not in splits]
    if train is None or train.streamed or not missing:
        return splits
    if len(train) < 3:
        raise UserError(f"--dataset {train.name}: {len(train)} readable examples are too few to train on and hold some "
                        "out")
    videos = train.column("video")  # of sets whose rows share videos under names of their own
    place = np.array([held_out_place(name) for name in videos or train.keys()])  # (M,)
    band = (place / HELD_OUT).astype(int)  # (M,) 0: the first of `missing`, 1: the second, others: train
    out, notes = dict(splits), []
    for k, s in enumerate(missing):
        rows = np.flatnonzero(band == k)
        used = np.sort(rows[np.argsort(place[rows], kind="stable")[:MOST_HELD_OUT]])
        it = "rows" if videos else "videos" if has_clips(train) else "images"
        note = f"{len(used):,} of its {len(train):,} {it}, held out since none of its names says {s}"
        out[s] = dataclasses.replace(train.select(used, s), note=join_notes(train.note, note))
        some = f", {len(used):,} of them used" if len(used) < len(rows) else ""
        notes.append(f"{s}: {len(rows):,} {it} held out of train{some}")
    out["train"] = dataclasses.replace(train.select(np.flatnonzero(band >= len(missing)), "train"),
                                       note=join_notes(train.note, *notes))
    return out


def long_tail_counts(n_max, classes, ratio):
    """Images per class of an exponential tail, int(n_max * ratio ** (-c / (classes - 1))): n_max to n_max / ratio."""
    return [int(n_max * ratio ** (-c / max(1, classes - 1))) for c in range(classes)]


# ===================================================== batches ======================================================
SHARDS_AT_ONCE = 16  # shards whose samples are mixed: the disk reads a few files, the order is random enough


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


class _Views(torch.utils.data.Dataset):
    """(epoch, index) -> the cropped uint8 views, captions, and the samples that could not be read."""
    TRIES = 100

    def __init__(self, data, augments, seed):
        self.data, self.augments, self.seed = data, augments, seed

    def __getitem__(self, place):
        epoch, index = place
        item = {"views": None, "captions": None, "index": int(index), "key": None, "epoch": epoch, "bad": []}
        draws = frame_draws(self.data.clip, self.seed, epoch, index)
        for k in range(min(self.TRIES, len(self.data))):  # an unreadable sample is replaced by the next one
            i = int((index + k) % len(self.data))
            try:
                image = self.data.read(i, draws)
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                item["bad"].append((self.data.key(i), first_line(error)))
                if words := base.plain_words(error):  # a full disk, no memory: any other would fail, too
                    return item | {"fatal": words}
                continue
            views = crop_views(image, self.augments, self.seed, epoch, index)
            captions = self.data.training_captions(i, self.seed, epoch, index)
            return item | {"views": views, "captions": captions, "key": self.data.key(i), "row": i}
        return item


def frame_draws(clip, seed, epoch, number):
    """(T,) draws that place the random frames of a clip; None where frames are not random."""
    if clip is None or clip.sampling != "random":
        return None
    return uniforms(seed, epoch, [number], clip.frames, stream=99)[0]


def crop_views(image, augments, seed, epoch, number):
    """V cropped uint8 views, (3, S, S) or (T, 3, S, S), of one decoded image or clip, each from its own draws."""
    if image.is_floating_point():  # features have no views
        return [image] * len(augments)
    draws = [uniforms(seed, epoch, [number], a.DRAWS, stream=v + 1)[0] for v, a in enumerate(augments)]  # (DRAWS,) each
    return [a.crop_one(image, u) for a, u in zip(augments, draws)]


def collate(items):
    """Items (dicts of views, captions, index, key, epoch, bad[, positions]) -> a raw batch; views None if any is."""
    whole = all(i["views"] is not None for i in items)
    positions = {}
    for i in items:
        positions |= i.get("positions", {})
    return {"views": [torch.stack(v) for v in zip(*(i["views"] for i in items))] if whole else None,
            "captions": [i["captions"] for i in items], "index": np.array([i["index"] for i in items]),
            "rows": np.array([i.get("row", i["index"]) for i in items]),
            "keys": [i["key"] for i in items], "epochs": np.array([i["epoch"] for i in items]),
            "bad": [b for i in items for b in i["bad"]], "positions": positions,
            "fatal": next((i["fatal"] for i in items if "fatal" in i), "")}


SLICE = 256  # frames whose colours a card changes at a time: temporaries take six times the memory of these frames


def in_slices(function, size, *rows):
    """function(*rows) -> (M, ...), for at most `size` of the M rows at a time; 0 = all."""
    parts = -(-len(rows[0]) // size) if size else 1
    if parts < 2:
        return function(*rows)
    done, start = None, 0
    for piece in zip(*(x.chunk(parts) for x in rows)):  # of one length except the last: few shapes to compile for
        y = function(*piece)
        done = y.new_empty(len(rows[0]), *y.shape[1:]) if done is None else done
        done[start:start + len(y)] = y
        start += len(y)
    return done


LOADER_SECONDS = 1200  # without a batch, after which workers count as dead


def loader_options(batches):
    """Keywords of a DataLoader: workers with one thread each, a generator of their own, two or four batches ahead."""
    ahead = 2 if batches.data.clip else 4
    return dict(num_workers=batches.workers, pin_memory=batches.device.type == "cuda",
                generator=torch.Generator().manual_seed(batches.seed),
                prefetch_factor=ahead if batches.workers else None, **worker_options(batches.workers))


class Loader(torch.utils.data.DataLoader):
    """A DataLoader whose workers start with SIGTERM blocked, until they have left the process group."""

    def __iter__(self):
        if not self.num_workers or not hasattr(signal, "pthread_sigmask"):
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_options(workers):
    """Keywords of any DataLoader with so many workers: each in its own process group, with a time limit on batches."""
    if not workers:
        return {}
    start = "fork" if sys.platform == "linux" else None  # a forkserver would be ended by a signal to the group
    return dict(worker_init_fn=_place_worker, timeout=LOADER_SECONDS, multiprocessing_context=start)


def _place_worker(_):
    """Runs first in a worker. SIGTERM and Ctrl-C go to the process group, which it leaves: the main process decides."""
    with contextlib.suppress(AttributeError, OSError):  # Windows has no groups
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops one that Loader held back
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if sys.platform == "linux":
        base.end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)


being_read = weakref.WeakSet()  # generators of raw batches; their workers end with them


def watched(batches, workers):
    """The items of a loader; a failure of its workers becomes one line.

    When memory is short, Python may wait for a thread that never started. No timeout of a loader ends that: an alarm
    does. Raises: UserError if a worker died, or none answers for a little more than LOADER_SECONDS."""
    source = None
    while True:
        try:
            with alarm(LOADER_SECONDS + 30 if workers else 0):
                source = source or iter(batches)
                item = next(source)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:  # a worker's pipe may break, too
            if not workers or isinstance(error, RuntimeError) and "worker" not in str(error):
                raise
            raise UserError(base.worker_died(error)) from error
        yield item


@contextlib.contextmanager
def alarm(seconds):
    """Raises RuntimeError inside after that many seconds; never if they are 0, or outside of the main thread."""
    main = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    if not (seconds and main and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL):
        yield
        return
    def ring(*_):
        raise RuntimeError(f"no loader worker answered for {seconds:g} s")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


class Batches:
    """Training batches of this process, steps `first` to `last`: the same on any number of processes and workers.

    Iterating gives dicts: views (V tensors (B, [T,] 3, S, S), augmented and normalised, on `device`), captions (B lists
    of str), keys (B), index (B), rows (B; those read, with another in place of a bad one), draws (B, 32) for the text
    views, epoch, seconds waited for data, bad (samples not counted yet). Sets in memory are cropped on the device in
    batch, files by DataLoader workers. Bad samples are counted over all processes and listed in bad_samples.txt; above
    max_bad_fraction (of those tried, or of the first 1,000) all processes stop.
    """

    def __init__(self, data, augments, transform, batch_size, seed, first, last, device, workers=0,
                 max_bad_fraction=0.01, folder=None, positions=None, compiled=False):
        self.data, self.augments, self.transform, self.device, self.seed = data, augments, transform, device, seed
        self.local, self.batch_size, self.first, self.last = batch_size // world(), batch_size, first, last
        self.max_bad_fraction, self.folder, self.bad = max_bad_fraction, folder, {}
        self.positions, self.compiled = dict(positions or {}), compiled
        self.lagged = False  # True: the caller passes the bad samples of each batch to count_bad, later
        self.workers = 0 if data.pixels is not None else min(workers, CORES)  # those that are started
        if data.streamed:
            data.raw_batches(self)  # nothing is read yet, but a stream refuses now what it cannot do

    def raw(self):
        """Cropped views and texts of this process's share of each global batch, without colours and normalisation.

        Yields dicts: views (V tensors (B, [T,] 3, S, S), uint8 or, of pixels in memory, float on the device), captions,
        index (B,), rows (B,), keys, epochs (B,), bad, positions."""
        data, mine = self.data, slice(rank() * self.local, (rank() + 1) * self.local)
        if data.streamed:
            yield from data.raw_batches(self)
            return
        plan = epoch_batches(len(data), self.batch_size, self.seed, self.first, self.last, data.shards)
        plan = ((epoch, batch[mine]) for epoch, batch in plan)
        if data.pixels is None:
            order = ([(epoch, i) for i in index] for epoch, index in plan)
            views, how = _Views(data, self.augments, self.seed), loader_options(self)
            yield from Loader(views, batch_sampler=order, collate_fn=collate, **how)
            return
        pixels = data.pixels.to(self.device)  # (M, [T,] 3, H, W) uint8
        for epoch, index in plan:
            x = pixels[base.to_device(torch.from_numpy(index), self.device)]  # (B, [T,] 3, H, W)
            views = [crop_batch(a, x, uniforms(self.seed, epoch, index, a.DRAWS, stream=v + 1))
                     for v, a in enumerate(self.augments)]
            captions = [data.training_captions(i, self.seed, epoch, i) for i in index]
            yield {"views": views, "captions": captions, "index": index, "rows": index, "bad": [],
                   "keys": [data.key(i) for i in index], "epochs": np.full(len(index), epoch), "positions": {}}

    def __iter__(self):
        finish = [a.photometric for a in self.augments]
        if self.compiled:  # in this process: workers get plain views
            finish = [torch.compile(f, dynamic=False) for f in finish]
        source = watched(self.raw(), self.workers)
        being_read.add(source)
        for step in range(self.first, self.last):
            began = time.perf_counter()
            raw = next(source)
            waited = time.perf_counter() - began
            bad, lost = raw["bad"], raw["views"] is None
            if self.lagged and lost or not self.lagged and self._anywhere(bad):
                self.count_bad(bad, step, lost, raw.get("fatal", ""))
            self.positions |= raw["positions"]
            index, epochs = raw["index"], raw["epochs"]
            draws = [uniforms(self.seed, epochs, index, a.DRAWS, v + 1) for v, a in enumerate(self.augments)]
            draws = base.to_device(torch.from_numpy(np.stack(draws)), self.device)  # (V, B, DRAWS)
            views = [self._finish(*each) for each in zip(raw["views"], finish, draws)]
            yield {"views": views, "captions": raw["captions"], "keys": raw["keys"], "index": index,
                   "rows": raw["rows"], "draws": uniforms(self.seed, epochs, index, 32), "epoch": int(epochs[0]),
                   "seconds": waited, "bad": bad if self.lagged else []}

    def _finish(self, x, photometric, draws):
        """Applies colours and normalisation to cropped views (B, [T,] 3, S, S), on the device; features stay as they
        are. draws: (B, DRAWS)."""
        x = x.to(self.device, non_blocking=True)
        if x.ndim == 3:  # features
            return x
        frames = x.reshape(-1, *x.shape[-3:])  # (B * T, 3, S, S)
        draws = draws.repeat_interleave(len(frames) // len(x), 0)  # (B * T, DRAWS): all frames of a clip alike

        def finish(frames, draws):
            frames = frames.float().div_(255) if frames.dtype == torch.uint8 else frames
            return self.transform.normalise(photometric(frames, draws))
        size = SLICE if self.device.type == "cuda" else 0
        return in_slices(finish, size, frames, draws[:, :, None, None, None]).view(x.shape)

    def _anywhere(self, bad):
        """Whether any process has a bad sample. Collective."""
        return self.data.pixels is None and base.all_sum(len(bad), device=self.device)[0]

    def count_bad(self, bad, step, hopeless=False, fatal=""):
        """Every process learns of every bad sample, and all decide alike. Collective, with one exception: if `lagged`,
        a process without a batch ends by itself, since the others do not look before they take their next one."""
        alone = self.lagged and hopeless
        mine = bad, hopeless, fatal
        for part, lost, words in [mine] if alone else base.gather_objects(mine):
            if words:
                raise UserError(words)
            hopeless |= lost
            new = {k: why for k, why in part if k not in self.bad}
            self.bad.update(new)
            list_bad_samples(self.folder, new)
        n = self.data.distinct
        tried = max(min((step + 1) * self.batch_size + len(self.bad), n), min(n, 1000))
        if hopeless or len(self.bad) > self.max_bad_fraction * tried:
            key, why = next(iter(self.bad.items()))
            where = f" (all in {self.folder}/bad_samples.txt)" if self.folder and rank() == 0 else ""
            raise UserError(f"{len(self.bad)} of about {tried} samples cannot be read, above --max-bad-fraction "
                            f"{self.max_bad_fraction}; the first: {key}: {why}{where}; mend them, correct --data-dir, "
                            "or raise the limit")


def list_bad_samples(folder, bad):
    """Adds {key: reason} to bad_samples.txt of a run, one per line. Only the main process writes."""
    path = Path(folder or ".") / "bad_samples.txt"
    if rank() == 0 and folder and bad:
        with writing(path), open(path, "a", encoding="utf8", errors="replace") as f:
            f.writelines("\t".join(re.sub(r"\s", " ", base.printable(x)) for x in pair) + "\n" for pair in bad.items())
