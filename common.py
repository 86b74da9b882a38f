"""All that the five method scripts import of ours, apart from their own pictures.

Notation, used in every file of this project:
    B    batch of this process                 W    processes
    N    global batch, B * W; the number of candidates of each anchor in a loss
    D    width of the embeddings               V    views
    K    captions of one example               T    frames of one clip
    tau  temperature, divides the cosine       sim  cosine matrix; rows are queries (anchors)
Shapes stand beside the line that makes them: logits = image @ text.T / tau    # (B, N)

This file holds what a loss and its optimiser need: gradients over processes, the temperature, an
exact gradient in chunks, the learning rate and the parameter groups. Everything else is imported
here by name. The order of the packages is that in which they import each other.
"""

import contextlib
import functools
import math

# ---- contrastive/core: processes, files, types of flags, losses in blocks of rows, metrics ----
from contrastive.core.processes import (
    UserError,              # an error that the user can fix: one line, exit code 2
    clean_exit,             # stands around a program
    gather,                 # (B, ...) of each process -> (N, ...), with gradient
    mean_over_processes,    # of the columns of a log
    positive_index,         # the column of each row's own pair: (B,)
    rank,                   # index of this process
    say,                    # print on the main process
    to_device,              # copies a tensor without making the host wait
    world)                  # number of processes
from contrastive.core.files import read_json, write_json, write_tensors
from contrastive.core.number_types import (
    below_one, between, count, nonnegative, part, positive, rate, whole)
from contrastive.core.row_blocks import by_rows, row_blocks
from contrastive.core.metrics import (
    embedding_health, knn_accuracy, linear_probe, mir_metrics, modality_gap, normalization_error,
    normalize, retrieval_metrics, zero_shot_accuracy)

# ---- contrastive/data: from files to batches ----
from contrastive.data import load_data, open_data  # one split; all splits that the flags name
from contrastive.data.batches import Batches
from contrastive.data.frames import read_frames
from contrastive.data.long_tail import labelled_splits, long_tail_counts
from contrastive.data.registry import SETS  # SETS["mine"] = function (split, options) -> Data
from contrastive.data.table import Data, make_table
from contrastive.data.views import Augment, key_hash, pick, uniforms

# ---- contrastive/encoders: towers by name, tokenizers, and the texts of a batch ----
from contrastive.encoders.base import (
    TwoTower, batchnorms, functional_call, is_clip, run_again, statistics_stay)
from contrastive.encoders.build import build_towers, fit_to_encoder
from contrastive.encoders.cached import open_feature_cache  # --freeze
from contrastive.encoders.frozen import Expert  # a frozen encoder beside the towers (TeMo)
from contrastive.encoders.models import (
    EvalTransform, TextEncoder, VisionEncoder, build_model, load_model)
from contrastive.encoders.questions import QuestionAnswerer  # (MAMA)
from contrastive.encoders.ssb import (  # SSB, a base of NCL
    Captioner, captioning_loss, ssb_recipe, support_summary)
from contrastive.encoders.texts import (
    Paraphrases, build_tokenizer, drop_and_swap, text_pair, text_words, train_wordpiece)
from contrastive.encoders.towers import freeze_as_clip4clip, set_dropout
from contrastive.encoders.vast import MatchingLoss, hard_pairs  # VAST, a base of MM-TS

# ---- contrastive/evaluation: whole evaluations, clusters and meta-data ----
from contrastive.evaluation import answers  # questions and their answers (MAMA)
from contrastive.evaluation.by_class import padded_and_flipped  # training images of TS's probes
from contrastive.evaluation.clusters import (  # of captions (MM-TS)
    check_source, head_mid_tail, k_means, largest_first, open_clusters)
from contrastive.evaluation.embed import encode_texts
from contrastive.evaluation.meta import meta_data  # a few clean examples (MAMA)
from contrastive.evaluation.facts import EvaluationFacts  # what a run tells eval.py
from contrastive.evaluation.measure import Evaluator
from contrastive.evaluation.retrieval import retrieval_both_ways

# ---- contrastive/engine: the flags and the book-keeping of a run ----
from contrastive.engine.flags import OneLineErrorParser, Parser  # argparse with recipes
from contrastive.engine.run import Run, count_steps, fit_to_data

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


# ===================================================== gradients ==================================
def average_gradients(parameters):
    """Replaces .grad by its mean over processes, for parameters of the loss, outside DDP.

    A parameter that no process has used gets zeros on one process as on several: the optimiser
    would pass over None, and with zeros it still applies weight decay and momentum.
    """
    for p in parameters:
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = average([grad])[0]


def average(gradients):
    """Mean over processes of gradients from autograd.grad, which DDP does not average: a tuple."""
    gradients = tuple(g.contiguous() for g in gradients)
    if world() > 1:
        for g in gradients:
            dist.all_reduce(g)
            g /= world()
    return gradients


# ===================================================== losses =====================================
def fp32(loss):
    """Decorator of a loss, which then runs in float32 outside autocast, whatever the caller does.

    Half precision becomes float32; float64 stays.
    """
    @functools.wraps(loss)
    def wrapped(*args, **kwargs):
        from accelerate.utils import convert_to_fp32, find_device
        with torch.autocast(find_device((args, kwargs)).type, enabled=False):
            return loss(*convert_to_fp32(args), **convert_to_fp32(kwargs))
    return wrapped


def per_anchor(value, anchor, name="tau", positive=True, columns=0):
    """A temperature or margin in a shape that divides or shifts the logits (B, N) of the anchors.

    Args:
        value: a number, () or (B,), one for each anchor.
        anchor: (B, D).
        name: of the value, for the message.
        positive: whether a number must be above 0. The values of a tensor are not checked, since
            that would wait for the GPU.
        columns: N, if the loss also accepts (B, N), one for each pair.
    Returns: a number, (), (B, N), or (B,) as (B, 1).
    Raises: ValueError for any other shape, which would broadcast wrongly.
    """
    if not torch.is_tensor(value):
        return one_number(value, name, positive)
    B = len(anchor)
    if value.ndim == 0 or value.shape == (B, columns):
        return value
    if value.shape == (B,):
        return value[:, None]                                              # (B, 1)
    pairs = f", or ({B}, {columns}), one per pair" if columns else ""
    raise ValueError(f"{name}: a tensor of shape {tuple(value.shape)}; give a number, or a tensor "
                     f"of shape () or ({B},), one value per anchor of this process{pairs}")


def one_number(value, name="tau", positive=True):
    """Checks that a temperature or margin is one number, and returns it as it is.

    Args:
        value: a number, or a tensor of shape ().
        name, positive: as in per_anchor.
    Raises: ValueError for any other shape, and for a number that is not above 0.
    """
    if torch.is_tensor(value):
        if value.ndim > 0:
            raise ValueError(f"{name}: a tensor of shape {tuple(value.shape)}; give a number or a "
                             "tensor of shape ()")
        return value
    if np.ndim(value) > 0:
        raise ValueError(f"{name}: an array of shape {np.shape(value)}; give a number or a tensor")
    if positive and not value > 0:
        raise ValueError(f"{name} {value}: must be above 0; the cosines are divided by it")
    return value


class Temperature(nn.Module):
    """A temperature, which divides the cosines: a fixed number, or learnt as its logarithm.

    Args:
        start: value at the first step, > 0.
        limits: (lowest, highest) value of a learnt temperature, None for no limit on a side.
            None in place of the pair: it is fixed.
    """

    def __init__(self, start, limits=None):
        super().__init__()
        self.start = start
        self.limits = limits
        if limits is not None:
            self.log_tau = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self):
        """tau: a number, or () with gradient if it is learnt."""
        if self.limits is None:
            return self.start
        return self.log_tau.exp()

    @torch.no_grad()
    def clamp(self):
        """Brings a learnt temperature back into its limits after a step."""
        if self.limits is not None:
            low, high = self.limits
            if low is not None:
                self.log_tau.clamp_(min=math.log(low))
            if high is not None:
                self.log_tau.clamp_(max=math.log(high))


# ===================================================== chunks =====================================
@contextlib.contextmanager
def tf32(enabled=True):
    """Context in which a CUDA GPU multiplies float32 matrices in TF32 (11 bits, not 24).

    For encoders, never for a loss, which divides the cosines by 0.01.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


class _CallInBackward(torch.autograd.Function):
    """The identity of embeddings; backward calls a function before it enters their encoders."""

    @staticmethod
    def forward(ctx, function, *embeddings):
        ctx.function = function
        ctx.set_materialize_grads(False)
        return tuple(e.view_as(e) for e in embeddings)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.function()
        return None, *gradients


class Chunks:
    """Encodes a batch, and passes the gradient of a loss back into the encoders.

    With chunks (gradient caching) this needs the memory of one chunk and gives the exact gradient
    of the full batch: `encode` encodes the batch without a graph; the script computes its loss from
    these embeddings; `backward` computes the gradient of the loss at the embeddings, encodes each
    chunk again with the random state of the first pass, and passes the gradient through it.

    Args:
        encode: function of nested dicts of (b, ...) tensors -> tuple of (b, D) embeddings, rows as
            in the inputs.
        model: what `encode` calls, as prepared by the accelerator.
        accelerator: the Accelerator of the run.
        chunk: examples at a time on this process; 0 = all, without a second pass.
        second_pass: function (inputs of a chunk, number of its first row) -> (embeddings as of
            `encode`, a further loss () of the chunk). If given, there always is a second pass,
            which calls it in place of `encode`, and the gradients of both losses add up.
    """

    def __init__(self, encode, model, accelerator, chunk=0, second_pass=None):
        self.encode_piece = encode
        self.second_pass = second_pass
        self.model = model
        self.accelerator = accelerator
        self.chunk = chunk
        # encoders multiply float32 in TF32, forward and backward; the loss never does
        self.uses_tf32 = accelerator.device.type == "cuda"
        self.in_backward = False
        self.pieces = []  # of the last batch, each with the random state of its first pass
        self.embeddings = ()  # of the last batch, if it has pieces
        self.keep_statistics = contextlib.nullcontext
        norms = batchnorms(model)
        if norms and run_again(model):  # with --grad-checkpointing
            self.keep_statistics = functools.partial(statistics_stay, norms)

    def encode(self, inputs):
        """Nested dict of (B, ...) tensors -> tuple of (B, D) embeddings, for a loss."""
        from accelerate.utils import find_batch_size
        B = find_batch_size(inputs)
        self.pieces = []
        if self.second_pass or 0 < self.chunk < B:
            return self.encode_in_chunks(inputs, B)
        with tf32(self.uses_tf32):
            embeddings = self.encode_piece(inputs)                         # (B, D) each
        if self.uses_tf32:
            embeddings = _CallInBackward.apply(self.enter_encoders, *embeddings)
        return embeddings

    def encode_in_chunks(self, inputs, B):
        """The first pass: embeddings without a graph, which are leaves of the loss's graph."""
        from accelerate.utils import slice_tensors
        device = self.accelerator.device
        parts = []
        with torch.no_grad(), tf32(self.uses_tf32):
            step = self.chunk or B
            for start in range(0, B, step):
                piece = slice_tensors(inputs, slice(start, start + step))
                self.pieces.append((piece, random_state(device)))
                parts.append(self.encode_piece(piece))                     # (b, D) each
        self.embeddings = tuple(x.requires_grad_() for x in join_parts(parts))
        return self.embeddings                                             # (B, D) each

    @torch.no_grad()
    def encode_without_gradient(self, inputs):
        """As encode, but without a graph, for candidates through which no gradient passes."""
        from accelerate.utils import find_batch_size, slice_tensors
        B = find_batch_size(inputs)
        step = self.chunk or B
        parts = []
        with tf32(self.uses_tf32):
            for start in range(0, B, step):
                piece = slice_tensors(inputs, slice(start, start + step))
                parts.append(self.encode_piece(piece))                     # (b, D) each
        return join_parts(parts)                                           # (B, D) each

    def backward(self, loss):
        """Fills .grad of the model's parameters, and of the loss's, for the last `encode`."""
        self.in_backward = True
        with tf32(enabled=False), self.keep_statistics():
            self.accelerator.backward(loss)
        self.in_backward = False
        if self.pieces:
            with tf32(self.uses_tf32):
                self.backward_in_chunks()

    def enter_encoders(self):
        """Switches to TF32 when `backward` comes from the loss to the encoders.

        A script's own autograd.grad stays in float32.
        """
        if self.in_backward:
            torch.set_float32_matmul_precision("high")  # until the end of `backward`

    def backward_in_chunks(self):
        """The second pass: encodes each chunk with a graph, and passes its gradient through."""
        device = self.accelerator.device
        state_after = random_state(device)
        for k, (piece, state) in enumerate(self.pieces):
            set_random_state(state, device)
            sync = contextlib.nullcontext()
            if k < len(self.pieces) - 1:
                # processes average their gradients in the last chunk only
                sync = self.accelerator.no_sync(self.model)
            with sync:
                self.backward_of_chunk(piece, start=k * self.chunk)
        set_random_state(state_after, device)

    def backward_of_chunk(self, piece, start):
        outputs, gradients = [], []
        if self.second_pass:
            embeddings, loss = self.second_pass(piece, start)
            if self.accelerator.scaler:
                loss = self.accelerator.scaler.scale(loss)
            outputs.append(loss)
            gradients.append(None)
        else:
            embeddings = self.encode_piece(piece)
        for output, embedding in zip(embeddings, self.embeddings):
            # a frozen encoder has no gradient, and the loss may use only some embeddings
            if output.requires_grad and embedding.grad is not None:
                gradient = embedding.grad[start:start + len(output)]       # (b, D)
                outputs.append(output)
                gradients.append(gradient.to(output.dtype))
        torch.autograd.backward(outputs, gradients)


def join_parts(parts):
    """Embeddings of chunks, a list of tuples (b, D) -> of the batch, a tuple (B, D) each."""
    return tuple(torch.cat(embeddings) for embeddings in zip(*parts))


def random_state(device):
    """Random states of the CPU and, if the device is a GPU, of the device."""
    cuda = None
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state(device)
    return torch.get_rng_state(), cuda


def set_random_state(state, device):
    """Restores what random_state returned."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


# ===================================================== optimiser ==================================
def learning_rate(step, steps, args):
    """The learning rate of a step: a linear warm-up to --lr, then --lr-schedule.

    A pure function that the loop writes into the optimiser at each step: a scheduler object would
    be stepped W times on W processes.

    Args:
        step: optimiser steps before this one.
        steps: Steps, as count_steps returns them.
        args: lr, lr_schedule and, unless that is constant, lr_end.
    """
    position = max(0, step - steps.warmup)
    length = max(1, steps.total - steps.warmup)
    if args.lr_schedule == "constant":
        lr = args.lr
    elif args.lr_schedule == "linear":
        lr = args.lr_end + (args.lr - args.lr_end) * (1 - position / length)
    elif args.lr_schedule == "cosine":
        cosine = math.cos(math.pi * position / length)
        lr = args.lr_end + (args.lr - args.lr_end) * 0.5 * (1 + cosine)
    else:
        raise ValueError(f"--lr-schedule {args.lr_schedule} has no branch in learning_rate")
    # after the schedule, so that its flags count as read from the first step on
    if step < steps.warmup:
        return args.lr * (step + 1) / steps.warmup
    return lr


def decay_groups(modules, weight_decay):
    """Parameter groups for an optimiser: matrices and kernels, then biases and norms, then scalars.

    Only the first group has weight decay. The third is left out if there are no scalars, such as a
    learnt tau. Parameters that scale_lr has marked have groups of their own.
    """
    matrices, vectors, scalars = [], [], []
    for module in modules:
        for p in module.parameters():
            if not p.requires_grad:
                continue
            if p.ndim > 1:
                matrices.append(p)
            elif p.ndim == 1:
                vectors.append(p)
            else:
                scalars.append(p)
    groups = [{"params": matrices, "weight_decay": weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    if scalars:
        groups.append({"params": scalars, "weight_decay": 0.0})
    return split_by_lr(groups)


def split_by_lr(groups):
    """Parameter groups, each split by the learning rates of its parameters; first those at --lr."""
    split_groups = []
    for group in groups:
        parameters = {1.0: []}  # {part of --lr: parameters}
        for p in group["params"]:
            parameters.setdefault(getattr(p, "lr_scale", 1.0), []).append(p)
        for scale, members in parameters.items():
            split_group = group | {"params": members}
            if scale != 1.0:
                split_group["lr_scale"] = scale  # Run.set_lr multiplies by it
            split_groups.append(split_group)
    return split_groups


def scale_lr(module, scale):
    """Lets the parameters of a module learn at this part of --lr."""
    for p in module.parameters():
        p.lr_scale = scale
