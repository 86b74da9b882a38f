"""What the five method files share, and the only file of ours that they import.

Notation, used in every file of this project:
    B  batch of this process      W  processes      N = B * W  global batch (every loss sees N candidates)
    D  embedding width            V  views          K  captions of one example      T  frames of one clip
    tau  temperature, divides the cosine            sim  plain cosine matrix, rows = queries (anchors)
    shapes stand beside the line that makes them, e.g.  logits = image @ text.T / tau    # (B, N)

What a loss needs stands in this file. All else is named here, room by room, and stands where the import says.
"""

import contextlib
import functools
import math

# ---- contrastive/data: from a file to batch["views"] ----
from contrastive.data import MODULES as SETS  # data sets by name; SETS["mine"] = function(split, options) -> Data
from contrastive.data import load_data, open_data  # one split of a data set; all of a run, as its flags say
from contrastive.data.batches import Batches  # the training batches
from contrastive.data.frames import read_frames  # frames of one video
from contrastive.data.long_tail import labelled_splits, long_tail_counts  # images with classes, cut to a long tail
from contrastive.data.table import Data, make_table
from contrastive.data.views import Augment, key_hash, pick, uniforms  # image views and captions from numbers by key

# ---- contrastive/encoders: towers by name ----
from contrastive.encoders.base import TwoTower, batchnorms, functional_call, is_clip, run_again, statistics_stay
from contrastive.encoders.frozen import Expert  # a frozen encoder beside the towers (TeMo)
from contrastive.encoders.models import EvalTransform, TextEncoder, VisionEncoder, build_model, load_model
from contrastive.encoders.questions import QuestionAnswerer
from contrastive.encoders.ssb import (  # towers over features, and captioning (NCL)
    Captioner,
    captioning_loss,
    ssb_recipe,
    support_summary,
)
from contrastive.encoders.texts import (  # tokenizers; T and T~ (TeMo)
    Paraphrases,
    build_tokenizer,
    drop_and_swap,
    text_pair,
    text_words,
    train_wordpiece,
)
from contrastive.encoders.towers import freeze_as_clip4clip, set_dropout

# ---- contrastive/engine: a run and its processes ----
from contrastive.engine.flags import OneLine, Parser  # argparse with recipes
from contrastive.engine.processes import (
    UserError,  # what a user can mend: one line, exit code 2
    clean_exit,  # the entry point
    gather,  # (B, ...) of each process -> (N, ...), with gradient
    mean_over_processes,  # of the columns of a log
    positive_index,  # the column of each row's own pair
    rank,
    read_json,
    say,  # print, on the main process only
    to_device,
    world,
    write_json,
    write_tensors,
)
from contrastive.engine.ranges import (  # types of flags
    below_one,
    between,
    count,
    nonnegative,
    part,
    positive,
    rate,
    whole,
)
from contrastive.engine.run import Run  # folder, log, checkpoints, signals, evaluation, summary

# ---- contrastive/evaluation: metrics, and whole evaluations ----
from contrastive.evaluation import answers  # questions and their answers (MAMA)
from contrastive.evaluation.by_class import padded_and_flipped  # training images as TS's authors probe them
from contrastive.evaluation.clusters import (  # of captions (MM-TS)
    check_source,
    head_mid_tail,
    k_means,
    largest_first,
    open_clusters,
)
from contrastive.evaluation.embed import encode_texts
from contrastive.evaluation.meta import meta_data  # a few clean examples (MAMA)
from contrastive.evaluation.metrics import (
    embedding_health,
    knn_accuracy,
    linear_probe,
    mir_metrics,
    modality_gap,
    normalization_error,
    normalize,
    pair_cosines,
    retrieval_metrics,
    zero_shot_accuracy,
)
from contrastive.evaluation.retrieval import Evaluator, retrieval_both_ways

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint


# ===================================================== gradients =====================================================
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


# ================================================ losses on any card ================================================
def fp32(loss):
    """Decorator: the loss runs outside autocast and on float32 in place of half precision, whatever the caller does."""
    @functools.wraps(loss)
    def wrapped(*args, **kwargs):
        from accelerate.utils import convert_to_fp32, find_device
        with torch.autocast(find_device((args, kwargs)).type, enabled=False):
            return loss(*convert_to_fp32(args), **convert_to_fp32(kwargs))
    return wrapped


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
        columns: N.   block: rows at a time; 0 = all, if their float32 temporaries fit into 1 GiB; else as many as fit
            into 64 MiB on a CPU (for its cache), into 1 GiB on a card (to keep it busy).
    Returns: (B,), or () the mean over all rows.
    """
    B = len(rows[0])
    per_row = 4 * 21 * columns  # bytes; Algorithm 1 of TeMo written out keeps about 21 (B, N) matrices
    if not block and B * per_row > 2**30:
        block = max(1, 2**(30 if rows[0].is_cuda else 26) // per_row)
    block = block or B
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

    def __init__(self, encode, model, accelerator, chunk=0, tf32=True):
        self.function, self.model, self.accelerator, self.chunk = encode, model, accelerator, chunk
        self.tf32, self.on_the_way_back = tf32 and accelerator.device.type == "cuda", False
        norms, self.kept = batchnorms(model), contextlib.nullcontext
        if norms and run_again(model):  # --grad-checkpointing
            self.kept = functools.partial(statistics_stay, norms)

    def _crossed(self):
        if self.on_the_way_back:  # not when a script calls autograd.grad itself
            torch.set_float32_matmul_precision("high")

    def encode(self, inputs):
        """Nested dict of (B, ...) tensors -> tuple of (B, D) embeddings, from which a loss can be computed."""
        from accelerate.utils import find_batch_size, slice_tensors
        B, device = find_batch_size(inputs), self.accelerator.device
        self.pieces = []  # of the inputs, each with the random state of its first pass
        if not self.chunk or self.chunk >= B:
            with tf32(self.tf32):
                whole = self.function(inputs)
            return _Border.apply(self._crossed, *whole) if self.tf32 else whole
        parts = []
        with torch.no_grad(), tf32(self.tf32):
            for i in range(0, B, self.chunk):
                piece = slice_tensors(inputs, slice(i, i + self.chunk))
                self.pieces.append((piece, random_state(device)))
                parts.append(self.function(piece))
        self.embeddings = tuple(torch.cat(e).detach().requires_grad_() for e in zip(*parts))  # (B, D) each
        return self.embeddings

    @torch.no_grad()
    def encode_without_gradient(self, inputs):
        """As encode, for what only serves as a candidate: nothing learns from it, and nothing is kept for backward."""
        from accelerate.utils import find_batch_size, slice_tensors
        B = find_batch_size(inputs)
        step = self.chunk or B
        with tf32(self.tf32):
            parts = [self.function(slice_tensors(inputs, slice(i, i + step))) for i in range(0, B, step)]
        return tuple(torch.cat(e) for e in zip(*parts))                    # (B, D) each

    def backward(self, loss):
        """Fill .grad of the model's parameters (and of the loss's own) for a loss of the last `encode`'s embeddings."""
        self.on_the_way_back = self.tf32
        with tf32(on=False), self.kept():  # undoes what _crossed has switched on
            self.accelerator.backward(loss)
        self.on_the_way_back = False
        if not self.pieces:
            return
        with tf32(self.tf32):
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
                used = [(e, whole.grad[rows]) for e, whole in zip(again, self.embeddings)
                        if e.requires_grad and whole.grad is not None]     # not of a frozen encoder
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
    """Parameter groups for an optimiser: weight decay for matrices and kernels, none for biases and norms, and none for
    scalars, such as a learnt tau, which make a third group where there are some."""
    params = [p for m in modules for p in m.parameters() if p.requires_grad]
    scalars = [p for p in params if p.ndim == 0]
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
            *[{"params": scalars, "weight_decay": 0.0}] * bool(scalars)]
