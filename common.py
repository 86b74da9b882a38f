"""All that the five method scripts import of ours; a variant imports its script, too.

Notation, where a file's Symbols say nothing else:
    B    batch of this process                 W    processes
    N    global batch, B * W; the number of candidates of each anchor in a loss
    D    width of the embeddings               V    views
    K    captions of one example               T    frames of one clip
    tau  temperature, divides the cosine       sim  cosine matrix; rows are queries (anchors)
Shapes stand beside the line that makes them: logits = image @ text.T / tau    # (B, N)

This file holds what a loss and its optimiser need: gradients over processes, the temperature, the
learning rate and the optimizer. Everything else is imported here by name. The order of the packages
is that in which they import each other.
"""

import math

# ---- contrastive/core: processes, files, types of flags, losses in blocks of rows, metrics ----
from contrastive.core.processes import (
    UserError,              # an error that the user can fix: one line, exit code 2
    clean_exit,             # stands around a program
    gather,                 # (B, ...) of each process -> (N, ...), with gradient
    make_accelerator,       # the Accelerator that the flags ask for
    mean_over_processes,    # of the columns of a log
    positive_index,         # the column of each row's own pair: (B,)
    rank,                   # index of this process
    require_gpu,            # refuses a paper's recipe without one
    print_main,             # print on the main process
    set_seed,               # of all random generators
    to_device,              # copies a tensor without making the host wait
    world_size)             # number of processes
from contrastive.core.files import read_json, write_json, write_tensors
from contrastive.core.number_types import (
    below_one, between, fraction, int_ge0, int_ge1, nonnegative_float, positive_float, rate)
from contrastive.core.loss_inputs import (
    fp32,                   # decorator: a loss computes in float32
    one_number,             # checks that a temperature or margin is no tensor of several
    per_anchor)             # brings a temperature or margin to a shape that fits (B, N)
from contrastive.core.row_blocks import by_rows, row_blocks  # a loss of few rows at a time
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
from contrastive.data.views import (
    Augment, key_hash, simclr_view, training_view, uniforms,
    pick)                   # one caption of each example

# ---- contrastive/encoders: encoders by name, tokenizers, and the texts of a batch ----
from contrastive.encoders.base import (
    Backbone, TwoTower, batchnorms, sync_batchnorm)
from contrastive.encoders.experts import Expert  # a frozen encoder beside those that learn (TeMo)
from contrastive.encoders.feature_cache import open_feature_cache  # --freeze
from contrastive.encoders.freezing import freeze_as_clip4clip, set_drop_path
from contrastive.encoders.image_encoders import (
    IMAGE_ENCODERS, EncoderKind)  # IMAGE_ENCODERS["mynet"] = EncoderKind(function)
from contrastive.encoders.models import adjust_flags_to_encoder, build_model, load_model
from contrastive.encoders.texts import build_tokenizer, train_wordpiece
from contrastive.encoders.towers import TextEncoder, VisionEncoder
from contrastive.encoders.transform import EvalTransform

# ---- contrastive/evaluation: whole evaluations ----
from contrastive.evaluation.by_class import padded_and_flipped  # training images of TS's probes
from contrastive.evaluation.embed import encode_texts
from contrastive.evaluation.measure import Evaluator  # of the val and test splits of a run
from contrastive.evaluation.retrieval import retrieval_both_ways
from contrastive.evaluation.saved_pieces import save_pieces  # for pictures
from contrastive.evaluation.similarities import save_similarities

# ---- contrastive/papers: what belongs to one paper ----
from contrastive.papers.baselines import (  # losses of other papers
    cwcl_loss, dystress_temperature, focal_weights, hardest_negative_loss, l2rw_weights,
    spl_weights, ts_temperature)
from contrastive.papers.clusters import (  # of captions (MM-TS)
    check_clusters, head_mid_tail, k_means, largest_first, open_clusters, save_temperatures,
    temperature_banner)
from contrastive.papers.key_frames import key_frames  # of a video (MAMA)
from contrastive.papers.mama_records import (  # for the log and the figures of MAMA
    record_pairs, save_training_texts)
from contrastive.papers.meta import (  # a few clean examples (MAMA)
    meta_batches, meta_data, save_meta_names)
from contrastive.papers.ncl_records import (  # for the figures of NCL, and eval.py
    recall_by_queue_size, save_queues)
from contrastive.papers.text_pairs import (  # T and T~ (TeMo)
    Paraphrases, describe_texts, drop_and_swap, tokenize_pair,
    text_pair)              # chooses T and T~ of a batch
from contrastive.papers.ts_records import (  # for the log and the figures of TS
    add_val_columns, long_tail_banner, probe_images, val_and_test)

# ---- contrastive/engine: the flags and the book-keeping of a run ----
from contrastive.engine.flags import OneLineErrorParser, Parser  # argparse with recipes
from contrastive.engine.functional import functional_encoder, trained_parameters
from contrastive.engine.grad_cache import GradCache  # encodes, a chunk at a time (--chunk-size)
from contrastive.engine.precision import tf32  # for encoders, on GPUs
from contrastive.engine.run import (
    Run,                    # folder, log, checkpoints and evaluations of a run
    adjust_flags_to_data,   # a batch and epochs that fit small data
    count_steps)            # per epoch, in total, of the warm-up

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
    """Mean over processes of gradients that DDP does not average, in place: a tuple.

    They come from autograd.grad, or are the .grad of parameters outside DDP.
    """
    gradients = tuple(g.contiguous() for g in gradients)
    if world_size() > 1:
        for g in gradients:
            dist.all_reduce(g)
            g /= world_size()
    return gradients


# ===================================================== temperature ================================
class Temperature(nn.Module):
    """A temperature, which divides the cosines: a fixed number, or learnt as its logarithm.

    Args:
        start: value at the first step, > 0.
        learnable: whether it is learnt.
        limits: lowest and highest value of a learnt temperature, None for no limit on a side.
    """

    def __init__(self, start, learnable=False, limits=(None, None)):
        super().__init__()
        self.start = start
        self.learnable = learnable
        self.limits = limits
        if learnable:
            self.log_tau = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self):
        """tau: a number, or () with gradient if it is learnt."""
        if self.learnable:
            return self.log_tau.exp()
        return self.start

    @torch.no_grad()
    def clamp(self):
        """Brings a learnt temperature back into its limits after a step."""
        if not self.learnable:
            return
        low, high = self.limits
        if low is not None:
            self.log_tau.clamp_(min=math.log(low))
        if high is not None:
            self.log_tau.clamp_(max=math.log(high))


# ===================================================== optimiser ==================================
def learning_rate(step, steps, args):
    """The learning rate of a step: a linear warm-up to --lr, then --lr-schedule.

    A pure function that the loop writes into the optimiser at each step: a scheduler that
    accelerate has prepared would be stepped W times on W processes.

    Args:
        step: optimiser steps before this one.
        steps: Steps, as count_steps returns them.
        args: lr, lr_schedule and, unless that is constant, lr_end.
    """
    if step < steps.warmup:
        return args.lr * (step + 1) / steps.warmup
    position = step - steps.warmup
    length = max(1, steps.total - steps.warmup)
    if args.lr_schedule == "constant":
        return args.lr
    if args.lr_schedule == "linear":
        return args.lr_end + (args.lr - args.lr_end) * (1 - position / length)
    if args.lr_schedule == "cosine":
        cosine = math.cos(math.pi * position / length)
        return args.lr_end + (args.lr - args.lr_end) * 0.5 * (1 + cosine)
    raise ValueError(f"--lr-schedule {args.lr_schedule} has no branch in learning_rate")


def set_lr(optimizer, lr):
    """Writes the learning rate into the optimiser, times a group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1)


def make_optimizer(modules, args, eps=1e-8):
    """The optimiser that the flags ask for.

    Args:
        modules: those that learn; what needs no gradient in them is left out.
        args: optimizer, lr, lr_scale, weight_decay, betas, of which SGD's momentum is the first.
        eps: Adam's epsilon.
    """
    mark_lr_scales(modules, args.lr_scale)
    groups = decay_groups(modules, args.weight_decay)
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.betas[0])
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    fused = True if groups[0]["params"][0].is_cuda else None               # None: torch chooses
    return kinds[args.optimizer](groups, lr=args.lr, betas=args.betas, eps=eps, fused=fused)


def decay_groups(modules, weight_decay):
    """Parameter groups for an optimiser: matrices and kernels, then biases and norms, then scalars.

    Only the first group has weight decay. The third is left out if there are no scalars, such as a
    learnt tau. Parameters that scale_lr has marked have groups of their own (split_by_lr).
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
    """Parameter groups, each split by the factors of its parameters; first those at --lr itself."""
    split_groups = []
    for group in groups:
        parameters_by_factor = {1.0: []}
        for p in group["params"]:
            factor = getattr(p, "lr_scale", 1.0)
            parameters_by_factor.setdefault(factor, []).append(p)
        for factor, parameters in parameters_by_factor.items():
            if not parameters:
                continue
            split_group = group | {"params": parameters}
            if factor != 1.0:
                split_group["lr_scale"] = factor  # set_lr multiplies by it
            split_groups.append(split_group)
    return split_groups


def mark_lr_scales(modules, words):
    """Marks the parameters of the parts that --lr-scale names, for split_by_lr.

    Args: words: PART=FACTOR each; image and text are the encoders without their projections, head
        is all else.
    """
    factors = {}
    for word in words:
        part, _, factor = word.partition("=")
        factors[part] = float(factor)
    if not factors:
        return
    for module in modules:
        scale_lr(module, factors.get("head", 1.0))
        for encoder in module.modules():
            if isinstance(encoder, VisionEncoder):
                scale_lr(encoder.body, factors.get("image", 1.0))
            elif isinstance(encoder, TextEncoder):
                scale_lr(encoder.body, factors.get("text", 1.0))


def scale_lr(module, factor):
    """Lets the parameters of a module learn at --lr times this factor."""
    for p in module.parameters():
        p.lr_scale = factor
