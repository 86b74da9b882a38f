"""TS: Temperature Schedules for Self-Supervised Contrastive Methods on Long-Tail Data (Kukleva et
al., ICLR 2023).

Two views of an image attract each other, all other images repel; there are no labels, and most
images are of a few classes. At a low temperature only the nearest negatives count (instance
discrimination): embeddings spread over the sphere, which helps rare classes. At a high one many
negatives count (group-wise discrimination): embeddings form clusters, which helps frequent classes.
TS alternates: the temperature follows a cosine over the epochs. Nothing is added to the model.

Equations (s_ij: cosine of anchor i and candidate j; t: epoch, from 0)
    (1)   L_c = mean_i -log( exp(s_ii / tau) / (exp(s_ii / tau) + sum_{j != i} exp(s_ij / tau)) )
          with the other views as negatives, or a queue of keys              nt_xent, moco_loss
    (5)   tau(t) = (tau+ - tau-) (1 + cos(2 pi t / T)) / 2 + tau-                   temperature
    Sec. 3.3  tau_i = tau_head if the class of i is frequent, else tau_tail  coarse_temperature

Symbols
    u, v        z1, z2 (q, k)     (B, D)  embeddings of two views, of this process; D = 128
    tau-, tau+  tau_min, tau_max  ()      divide the cosine; paper 0.1, 1.0
    T           period            ()      epochs; paper 400
                queue             (K, D)  MoCo's keys of earlier batches; paper K = 10,000

Commands
    accelerate launch temperature_schedules.py                       # emoji, two CPU cores
    accelerate launch temperature_schedules.py --schedule fixed      # the baseline, tau = 0.2
    accelerate launch temperature_schedules.py --dataset cifar10-lt  # the paper's; --loss moco
    accelerate launch temperature_schedules.py --dataset folder/ --imbalance-ratio 100  # own data

docs/temperature_schedules.md: commands for every table, recipes, differences, results.
To try an idea of your own, copy this file and edit it; docs/forking.md.
"""

import argparse
import copy
import functools
import math

import common

from common import (
    Augment, EvaluationFacts, Evaluator, Parser, Run, Temperature, UserError, batchnorms, between,
    clean_exit, int_ge1, fp32, gather, labelled_splits, nonnegative_float, normalize, padded_and_flipped,
    fraction, per_anchor, positive_float, positive_index, row_blocks, print_main, to_device, int_ge0, world_size)

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.ts import draw


# ======================================================= METHOD ===================================
def temperature(  # noqa: PLR0917
        epoch, schedule="cos", tau_min=0.1, tau_max=1.0, period=400, seed=0):
    """tau of an epoch (Eq. 5 for 'cos', Table 5 for the others), the same on every process.

    Args:
        epoch: from 0; tau is constant within an epoch.
        schedule: 'cos' and 'oscillating' (a linear triangle) start at tau_max; 'step' is tau_min
            for the first half of a period and tau_max for the second; 'random' is uniform between
            both, drawn from (seed, epoch); 'fixed' is tau_min.
        tau_min, tau_max: lowest and highest temperature.
        period: T in epochs.
    Returns: float.
    """
    phase = (epoch % period) / period                                      # 0..1
    if schedule == "cos":
        return tau_min + (tau_max - tau_min) * (1 + math.cos(2 * math.pi * phase)) / 2
    if schedule == "oscillating":
        return tau_min + (tau_max - tau_min) * abs(1 - 2 * phase)
    if schedule == "step":
        return tau_min if phase < 0.5 else tau_max
    if schedule == "random":
        generator = np.random.default_rng([seed, int(epoch)])
        return tau_min + (tau_max - tau_min) * generator.random()
    if schedule == "fixed":
        return tau_min
    raise ValueError(f"schedule={schedule!r}: give 'cos', 'step', 'random', 'oscillating' or "
                     "'fixed'")


@row_blocks
def nt_xent_of_view(anchor, target, tau, *, same_view, other_view):
    """Mean of Eq. 1 over anchors of one view: (b, D), (b,), tau -> ().

    Args: same_view, other_view: (N, D), the view of the anchors and the other view.
    """
    same_sim = anchor @ same_view.T                                        # (b, N)
    other_sim = anchor @ other_view.T                                      # (b, N)
    logits = torch.cat([other_sim, same_sim], dim=1) / tau                 # (b, 2N)
    anchor_column = len(same_view) + target[:, None]                       # (b, 1)
    logits = logits.scatter(1, anchor_column, -math.inf)                   # (b, 2N)
    return F.cross_entropy(logits, target)                                 # ()


@fp32
def nt_xent(z1, z2, tau):
    """NT-Xent (Eq. 1, averaged): each of the 2N views has one positive and 2N - 2 negatives.

    Args:
        z1, z2: (B, D) embeddings of this process; row i of both is of the same image.
        tau: temperature > 0: a number, () or (B,) for each image.
    Returns: () mean over the 2B anchors, float32. A random guess is about ln(2N - 1).
    """
    z1, z2 = normalize(z1), normalize(z2)                                  # (B, D)
    all_z1, all_z2 = gather(z1), gather(z2)                                # (N, D)
    tau = per_anchor(tau, z1)                                              # () or (B, 1)
    target = positive_index(z1)                                            # (B,)
    loss_1 = nt_xent_of_view(z1, target, tau, same_view=all_z1, other_view=all_z2)
    loss_2 = nt_xent_of_view(z2, target, tau, same_view=all_z2, other_view=all_z1)
    return (loss_1 + loss_2) / 2


@fp32
def moco_loss(q, k, queue, tau):
    """L_c with a queue of earlier keys as negatives (Eq. 1, averaged; He et al. 2020).

    Args:
        q, k: (B, D) queries and keys of this process; row i of both is of the same image. k gets no
            gradient.
        queue: (K, D) keys of earlier batches.
        tau: temperature > 0: a number, () or (B,) for each query.
    Returns: () mean over the queries, float32. A random guess is about ln(K + 1).
    """
    q, k, queue = normalize(q), normalize(k.detach()), normalize(queue)    # (B, D), (B, D), (K, D)
    positives = (q * k).sum(dim=1, keepdim=True)                           # (B, 1)
    logits = torch.cat([positives, q @ queue.T], dim=1)                    # (B, 1 + K)
    logits = logits / per_anchor(tau, q)                                   # (B, 1 + K)
    target = torch.zeros(len(q), dtype=torch.long, device=q.device)        # (B,)
    return F.cross_entropy(logits, target)


def coarse_temperature(labels, head_classes, tau_head, tau_tail):
    """tau of each anchor by the frequency of its class (Sec. 3.3): (B,) long -> (B,) float.

    Args: head_classes: numbers of the classes with tau_head; all others have tau_tail.
    """
    head = torch.as_tensor(sorted(head_classes), device=labels.device)     # (classes,)
    return torch.where(torch.isin(labels, head), tau_head, tau_tail)       # (B,)


def prune_masks(module, share):
    """Masks of SDCLR's second branch, which lacks the smallest `share` of the encoder's weights.

    The weights of all its convolutions and linear layers are compared together, so that layers with
    small weights lose more of them.

    Returns: {name of a weight: bool mask of its shape, False where it is pruned}.
    """
    magnitudes = {}
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
            magnitudes[f"{name}.weight"] = layer.weight.detach().abs()
    flat = torch.cat([x.flatten() for x in magnitudes.values()])           # (weights,)
    num_pruned = min(math.ceil(share * len(flat)), len(flat) - 1)
    threshold = flat.kthvalue(num_pruned + 1).values                       # ()
    return {name: x >= threshold for name, x in magnitudes.items()}


def coverage(z, bins=500):
    """How z (M, D) covers the sphere: each row goes to the nearest random direction (Fig. 1).

    Returns: the effective share of the directions, exp(entropy) / bins (ours); and the number of
        rows at each direction that has any, largest first.
    """
    generator = torch.Generator().manual_seed(0)
    directions = normalize(torch.randn(bins, z.shape[1], generator=generator))           # (bins, D)
    nearest = (normalize(z) @ directions.to(z).T).argmax(1)                # (M,)
    counts = nearest.bincount().sort(descending=True).values               # (up to bins,)
    entropy = torch.special.entr(counts / counts.sum()).sum()              # ()
    return entropy.exp().item() / bins, counts[counts > 0].tolist()


# ------------------------------------------------------- modules ----------------------------------
def simclr_head(width, dim, norm):
    """SimCLR's projection head as in the authors' code, (B, width) -> (B, dim).

    Args: norm: 'batch', or 'none' for a head without BatchNorm.
    """
    if norm == "batch":
        norm_layer = nn.BatchNorm1d
    elif norm == "none":
        norm_layer = nn.Identity
    else:
        raise ValueError(f"norm={norm!r}: give 'batch' or 'none'")
    return nn.Sequential(nn.Linear(width, width), norm_layer(width), nn.ReLU(),
                         nn.Linear(width, dim, bias=False), norm_layer(dim))


class Contrastive(nn.Module):
    """An image tower and a projection head, which is not part of the evaluation.

    Args:
        tower: TwoTower, whose features go into the head.
        head: module, (B, width) -> (B, D).
        pruned: whether there is SDCLR's second branch, which has BatchNorms of its own.
    """

    def __init__(self, tower, head, pruned=False):
        super().__init__()
        self.tower = tower
        self.head = head
        if pruned:
            norms = [copy.deepcopy(norm) for norm in self.dense_norms().values()]
            self.norms = nn.ModuleList(norms)

    def dense_norms(self):
        """{name: BatchNorm} of tower and head."""
        norms = {}
        for name, module in self.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not name.startswith("norms"):
                norms[name] = module
        return norms

    def forward(self, pixels, masks=None, half=None):
        """Views (V * B, [T,] 3, S, S) -> z (V * B, D).

        Args:
            masks: of SDCLR, as prune_masks returns them; None = no second branch.
            half: number of rows of the first view; all others go through the pruned tower.
        """
        if masks is None:
            features = self.tower(pixels)[2]                               # (V * B, width)
            return self.head(features)
        pruned_tensors = self.pruned_tensors(masks)
        dense = self(pixels[:half])                                        # (B, D)
        pruned = common.functional_call(self, pruned_tensors, (pixels[half:],))          # (B, D)
        return torch.cat([dense, pruned])

    def pruned_tensors(self, masks):
        """{name: tensor} in which SDCLR's second branch differs: masked weights, its BatchNorms."""
        tensors = {}
        for name, mask in masks.items():
            tensors[f"tower.{name}"] = self.tower.get_parameter(name) * mask
        for name, norm in zip(self.dense_norms(), self.norms, strict=True):
            for key, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
                tensors[f"{name}.{key}"] = tensor
        return tensors


class Queue(nn.Module):
    """MoCo's last K keys (K, D), first in, first out, the same on all processes.

    It starts with random keys (He et al.).
    """

    def __init__(self, size, dim, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("keys", normalize(torch.randn(size, dim, generator=generator)))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))   # pushed so far

    @torch.no_grad()
    def push(self, k):
        """Adds the keys of a step, (B, D) on each process, normalised here."""
        k = gather(normalize(k))                                           # (N, D)
        size = len(self.keys)
        numbers = self.count + torch.arange(len(k), device=k.device)       # (N,) as they arrive
        rows = numbers[-size:] % size                                      # (min(N, K),)
        self.keys[rows] = k[-size:]
        self.count += len(k)


@torch.no_grad()
def encode_keys(network, pixels, seed, splits=8):
    """MoCo's keys (B, D) of pixels (B, [T,] 3, S, S).

    With BatchNorm they are encoded in a random order and in groups, so that no key has the batch
    statistics of its own query.

    Args:
        seed: of the order.
        splits: groups of the global batch. With 1, 2, 4 or 8 processes on GPUs their size is the
            same, but which keys share a group, and with it the gradient, depends on the processes.
    """
    if not batchnorms(network):
        return network(pixels)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    order = to_device(order, pixels.device)                                # (B,)
    # on a CPU, without SyncBatchNorm, one group would have the statistics of the queries
    min_groups = 1 if pixels.is_cuda else min(splits, 2)
    num_groups = max(min_groups, splits // world_size())
    num_groups = min(num_groups, max(1, len(pixels) // 2))                 # two images or more each
    groups = order.tensor_split(num_groups)                                # (b,) each
    keys = torch.cat([network(pixels[group]) for group in groups])         # (B, D)
    return keys[order.argsort()]


@torch.no_grad()
def update_momentum(key_network, network, momentum):
    """key <- momentum key + (1 - momentum) query, for the weights; BatchNorm's buffers stay."""
    for key, query in zip(key_network.parameters(), network.parameters(), strict=True):
        key.lerp_(query, 1 - momentum)


@torch.no_grad()
def project(head, features):
    """z (M, D) of features (M, width), on the head's device, with its running statistics."""
    head.eval()
    z = head(features.to(next(head.parameters()).device))                  # (M, D)
    head.train()
    return z


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, which stand in parse_args and, for the flags of all
# scripts, in contrastive/engine/flags.py. 'recipe' says whose values they are
# (docs/temperature_schedules.md).
CIFAR = dict(
    recipe="paper; optimiser and views from the authors' code",
    image_encoder="resnet18-cifar", image_size=32, image_stats="imagenet",
    epochs=2000.0, batch_size=512, warmup_epochs=10.0,
    optimizer="sgd", lr=0.5, lr_end=1e-6, weight_decay=1e-4, beta2=0.999, grad_clip=0.0,
    head_norm="batch", decay_all=True, zero_init=False,
    period=400.0, queue_size=10_000, crop_min=0.1,
    imbalance_ratio=100.0, train_features="augmented", eval_epoch="auto",
    save_every=1000, log_every=50)
IMAGENET100 = CIFAR | dict(
    image_encoder="resnet50", image_size=224, epochs=800.0, crop_min=0.08, blur=0.5,
    imbalance_ratio=0.0, train_features="clean", eval_epoch="",
    eval_crop=0.875, shot_limits=[100, 20])
FASHION = CIFAR | dict(
    recipe="ours; as cifar10-lt", epochs=500.0, period=100.0, jitter_p=0.0, grey=0.0)
SMALL = dict(epochs=30.0, weight_decay=0.05, beta2=0.999, grad_clip=0.0)
EMOJI = SMALL | dict(
    recipe="ours", image_size=32,
    hue=0.02,                                                              # hue tells classes apart
    save_every=100, eval_every=50, log_every=5)
MOVING = EMOJI | dict(
    recipe="ours; as emoji, classes = verbs", frames=4, flip=0.0, crop_min=0.6)
SCENES = EMOJI | dict(
    epochs=60.0, hue=0.5, imbalance_ratio=100.0, eval_every=0, log_every=20, save_every=1000)
OWN = SMALL | dict(recipe="ours; small tower from scratch")
RECIPES = {
    "emoji": EMOJI,
    "cifar10-lt": CIFAR,
    "cifar100-lt": CIFAR,
    "imagenet100-lt": IMAGENET100,
    "fashion-mnist-lt": FASHION,
    "moving-emoji": MOVING,
    "emoji-scenes": SCENES,
    "own": OWN}
FIXED_TAU = 0.2                                                            # the paper's baseline
LOWEST_TAU = 0.01                                                          # if learnt; CLIP's


def method_defaults(chosen):
    """Defaults that depend on --loss, --schedule, --stop-at-phase and --recipe."""
    defaults = {"schedule": chosen.schedule or "cos"}
    fixed_tau = FIXED_TAU
    if chosen.loss == "sdclr":
        # SDCLR's own scripts have a fixed temperature
        defaults["schedule"] = chosen.schedule or "fixed"
        if chosen.recipe == "imagenet100-lt":
            fixed_tau = 0.3
            defaults["prune"] = 0.3
    if defaults["schedule"] == "fixed":
        defaults["tau_min"] = fixed_tau
    if chosen.stop_at_phase:
        defaults["eval_epoch"] = ""
    return defaults


def check_flags(parser, args):
    """Refuses flags that contradict each other."""
    if args.schedule != "fixed" and args.tau_max < args.tau_min:
        parser.error(f"--tau-max {args.tau_max}: must be at least --tau-min {args.tau_min}")
    if args.learnable_tau and (args.schedule != "fixed" or args.tau_head):
        parser.error("--learnable-tau: a learnt temperature follows no schedule and no classes; "
                     "give --schedule fixed, and no --tau-head")
    if args.learnable_tau and args.tau_min < LOWEST_TAU:
        parser.error(f"--tau-min {args.tau_min}: a learnt temperature must start at {LOWEST_TAU} "
                     "or above")
    if args.tau_head and "--schedule" in args.command_line:
        parser.error(f"--schedule {args.schedule}: not beside --tau-head and --tau-tail, which "
                     "take the place of a schedule")
    if (args.tau_head > 0) != (args.tau_tail > 0):
        parser.error(f"--tau-head {args.tau_head} and --tau-tail {args.tau_tail}: give both, > 0, "
                     "or neither")
    if 0 < args.imbalance_ratio < 1:
        parser.error(f"--imbalance-ratio {args.imbalance_ratio}: must be at least 1, or 0 to leave "
                     "the data as they are")
    head, tail = args.shot_limits
    if (head or tail) and not 0 < tail <= head + 1:
        parser.error(f"--shot-limits {head} {tail}: TAIL must be from 1 to HEAD + 1, or both 0")
    if args.loss == "moco" and args.chunk_size:
        parser.error("--chunk-size: not with --loss moco; lower --batch-size")
    check_end(parser, args)


def check_end(parser, args):
    """Refuses a --stop-at-phase that the run does not reach and an --eval-epoch that is no epoch.

    last_step checks that the epoch is before the end of the run, since fit_to_data may raise
    --epochs.
    """
    # fit_to_data may raise the epochs of own data
    has_epochs = not args.max_steps and args.recipe != "own"
    if args.stop_at_phase and has_epochs and args.epochs < args.period:
        parser.error(f"--stop-at-phase {args.stop_at_phase}: --epochs {args.epochs:g} hold no full "
                     f"--period {args.period:g}")
    if args.eval_epoch not in ("", "auto"):
        is_number = args.eval_epoch.replace(".", "", 1).isdecimal()
        if not is_number or float(args.eval_epoch) == 0:
            parser.error(f"--eval-epoch {args.eval_epoch}: must be auto, or a number > 0")


def parse_args(argv=None):
    """Flags; their defaults follow --dataset or --recipe, --loss, --schedule, --stop-at-phase."""
    parser = Parser(__file__, "TS: a temperature schedule for SimCLR and MoCo on long-tail images.",
                    texts=False)
    yes_or_no = argparse.BooleanOptionalAction
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=["simclr", "moco", "sdclr"], default="simclr",
                        help="loss: SimCLR's NT-Xent, MoCo's with a queue, or the baseline SDCLR's")
    method.add_argument("--schedule", choices=["cos", "step", "random", "oscillating", "fixed"],
                        help="temperature over the epochs: a cosine between --tau-max and "
                             "--tau-min (the paper's method); those of Table 5; or --tau-min")
    method.add_argument("--tau-min", type=positive_float, default=0.1,
                        help="lowest temperature, or the fixed one; paper 0.1, fixed 0.2, SDCLR "
                             "0.2 or 0.3")
    method.add_argument("--tau-max", type=positive_float, default=1.0,
                        help="highest temperature of a schedule; paper 1.0, Table 5 0.5")
    method.add_argument("--period", type=positive_float, default=12.0,
                        help="T, epochs of a full period of the schedule; paper 400")
    method.add_argument("--learnable-tau", action=yes_or_no, default=False,
                        help="learn the temperature from --tau-min on, with --schedule fixed")
    method.add_argument("--tau-head", type=nonnegative_float, default=0.0,
                        help="coarse supervision in place of a schedule: temperature of the half "
                             "of the classes that have the most images; paper 1.0; 0 = off")
    method.add_argument("--tau-tail", type=nonnegative_float, default=0.0,
                        help="coarse supervision: temperature of all other classes; paper 0.1")
    method.add_argument("--queue-size", type=int_ge1, default=1024,
                        help="K, keys in MoCo's queue; paper 10,000")
    method.add_argument("--momentum", type=fraction, default=0.99,
                        help="momentum of MoCo's key encoder, 0..1; the paper does not say")
    method.add_argument("--prune", type=fraction, default=0.9,
                        help="share of the encoder's weights that SDCLR's second branch lacks, "
                             "0..1; SDCLR 0.9, ImageNet100-LT 0.3")
    method.add_argument("--head-norm", choices=["batch", "none"], default="none",
                        help="BatchNorm in the head of SimCLR and SDCLR; authors' code: batch")
    method.add_argument("--decay-all", action=yes_or_no, default=False,
                        help="weight decay of biases and norms, too, as in the authors' code")
    method.add_argument("--zero-init", action=yes_or_no, default=True,
                        help="the last BatchNorm of a timm ResNet's blocks starts at 0; authors' "
                             "code: at 1")

    views = parser.add_argument_group("views")
    views.add_argument("--crop-min", type=fraction, default=0.3,
                       help="smallest crop as a share of the image's area, 0..1; CIFAR 0.1, "
                            "ImageNet 0.08")
    views.add_argument("--flip", type=fraction, default=0.5,
                       help="share of views that are mirrored, 0..1; paper 0.5")
    views.add_argument("--jitter-p", type=fraction, default=0.8,
                       help="share of views with --jitter and --hue, 0..1; paper 0.8")
    views.add_argument("--jitter", type=nonnegative_float, default=0.4,
                       help="strength of changes in brightness, contrast and saturation; paper 0.4")
    views.add_argument("--hue", type=between(0, 0.5), default=0.1,
                       help="strength of changes in hue, 0..0.5; paper 0.1")
    views.add_argument("--grey", type=fraction, default=0.2,
                       help="share of grey views, 0..1; paper 0.2")
    views.add_argument("--blur", type=fraction, default=0.0,
                       help="share of blurred views, 0..1; authors' code for ImageNet100 0.5")

    tail = parser.add_argument_group("long tail")
    tail.add_argument("--imbalance-ratio", type=nonnegative_float, default=0.0,
                      help="images of the largest class per image of the smallest, of any labelled "
                           "data; paper 50, 100, 150; 1 = balanced; 0 = as the data are")
    tail.add_argument("--split-seed", type=int_ge0, default=0,
                      help="seed of the order of the classes and of their images; paper: 3 splits")
    tail.add_argument("--index-file", default="", metavar="FILE",
                      help="training images: .npy of torchvision's indices (CIFAR, Fashion-MNIST), "
                           "or lines 'path class' (imagenet100-lt)")
    tail.add_argument("--val-file", default="", metavar="FILE",
                      help="val images, as in --index-file; empty = a tenth of each class (CIFAR, "
                           "Fashion-MNIST), none (imagenet100-lt)")
    tail.add_argument("--test-file", default="", metavar="FILE",
                      help="test images of imagenet100-lt, as in --index-file")
    tail.add_argument("--few-shot-file", default="", metavar="FILE",
                      help="images of imagenet100-lt's few-shot probe, as in --index-file; empty = "
                           "of each class as many training images as the smallest has")

    evaluation = parser.add_argument_group("evaluation by class")
    evaluation.add_argument("--train-features", choices=["clean", "augmented"], default="clean",
                            help="training images of kNN and probes: as they are, or cropped and "
                                 "flipped once; authors' code: augmented on CIFAR")
    evaluation.add_argument("--shot-limits", type=int_ge0, nargs=2, default=[0, 0],
                            metavar=("HEAD", "TAIL"),
                            help="head classes have more training images than HEAD, tail classes "
                                 "fewer than TAIL; ImageNet100-LT 100 20; 0 0 = thirds")
    evaluation.add_argument("--eval-crop", type=between(0.1, 1), default=1.0,
                            help="share of the short side that --eval-resize crop keeps, 0.1..1; "
                                 "ImageNet 0.875")
    evaluation.add_argument("--eval-epoch", default="", metavar="auto|N",
                            help="weights that are tested: empty = the last; auto = those of the "
                                 "best epoch on val (App. A.2), which is evaluated every 20 epochs "
                                 "unless --eval-every is given; N = stop after epoch N of the same "
                                 "schedules")
    evaluation.add_argument("--stop-at-phase", type=fraction, default=0.0,
                            help="stop at this phase of the last full period, 0..1, of the same "
                                 "schedules; paper about 0.7 (1,880 of 2,000 epochs); 0 = the end")
    choosers = ("--schedule", "--stop-at-phase")
    return parser.parse(argv, RECIPES, method_defaults, choosers, check_flags)


# ------------------------------------------------------- what the flags amount to -----------------
# These functions read a flag only if it has an effect: a run warns of flags that nothing has read.
def last_step(args, steps):
    """The optimiser step at which a run ends; its schedules still span all of `steps`.

    Raises: UserError for an --eval-epoch after the end, except in a resumed run.
    """
    if args.eval_epoch not in ("", "auto"):
        step = max(1, round(float(args.eval_epoch) * steps.per_epoch))
        if step > steps.total and not args.resume:
            raise UserError(f"--eval-epoch {args.eval_epoch}: the run ends after epoch "
                            f"{steps.total / steps.per_epoch:g}")
        return min(steps.total, step)
    if args.stop_at_phase:
        epochs = args.epochs
        if args.max_steps:
            epochs = steps.total / steps.per_epoch
        num_periods = math.floor(epochs / args.period + 1e-9)
        if num_periods > 0:
            epoch = (num_periods - 1 + args.stop_at_phase) * args.period
            return min(steps.total, round(epoch * steps.per_epoch))
        print_main(f"WARNING: --stop-at-phase {args.stop_at_phase}: the run holds no full --period "
                   f"and "
                   "goes to its end")
    return steps.total


def most_frequent_half(sizes):
    """The head classes of coarse supervision, a set: the half that has the most images, 5 of 10 in
    the paper."""
    order = np.argsort(-sizes, kind="stable")                              # largest first
    return set(order[:round(len(order) / 2)].tolist())


def scheduled_temperature(epoch, args):
    """tau of an epoch from the flags of the schedule."""
    if args.schedule == "fixed":
        return temperature(epoch, "fixed", args.tau_min)
    return temperature(epoch, args.schedule, args.tau_min, args.tau_max, args.period, args.seed)


# ======================================================= main =====================================
def main(args):  # noqa: C901, PLR0912
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    # before any process group, so that errors come quickly
    splits = labelled_splits(args)                                         # {train, val, test, ...}
    train = splits["train"]
    evals = {args.dataset: {name: splits[name] for name in ("val", "test") if name in splits}}
    if args.eval_epoch == "auto" and "val" not in splits:
        raise UserError(f"--eval-epoch auto: {args.dataset} has no val split; see --val-file and "
                        "--hold-out-val")
    # the batch and the epochs of a user's small data
    args = common.adjust_flags_to_data(args, train)
    steps = common.count_steps(args, train)        # per epoch, in total, of the warm-up
    if args.eval_epoch == "auto" and not args.eval_every:
        args.eval_every = 20 * steps.per_epoch
    labels = torch.from_numpy(np.asarray(train.labels))                    # (M,)
    sizes = np.bincount(train.labels, minlength=len(train.label_names))    # (classes,) of train
    last = last_step(args, steps)                  # the schedules still span steps.total
    run = Run(__file__, args, train, evals, steps, RECIPES)
    run.last = last
    run.negatives = num_negatives(args)

    # ------------------------------------------- model and optimiser ------------------------------
    # the tower is saved and tested, the head is not
    tower, _, transform = common.build_towers(args, train, run)
    if not args.zero_init:
        start_norms_at_one(tower)
    if args.loss == "moco":
        head = nn.Linear(tower.vision.width, args.embed_dim)
    else:
        head = simclr_head(tower.vision.width, args.embed_dim, args.head_norm)
    network = Contrastive(tower, head, pruned=args.loss == "sdclr").to(run.device)
    # parameters and buffers of the loss; they stand outside DDP and are saved
    loss_modules = nn.ModuleDict()
    if args.learnable_tau:
        loss_modules["tau"] = Temperature(args.tau_min, (LOWEST_TAU, None))
    if args.loss == "moco":
        loss_modules["key"] = copy.deepcopy(network).requires_grad_(False)
        loss_modules["queue"] = Queue(args.queue_size, args.embed_dim, args.seed)
    if args.eval_epoch == "auto":
        # the weights that are best on val
        loss_modules["best"] = copy.deepcopy(network).requires_grad_(False)
    loss_modules.to(run.device)
    trained_modules = [network, loss_modules]
    # >>> shared: optimizer
    groups = common.decay_groups(trained_modules, args.weight_decay)
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.beta1)
    else:
        kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps,
                         fused=run.fused)
    # <<< shared
    if args.decay_all:
        # biases and norms; a learnt tau is in a third group
        optimizer.param_groups[1]["weight_decay"] = args.weight_decay
    model, optimizer = run.wrap(network, loss_modules, optimizer)          # DDP, torch.compile
    run.resume()                                                           # with --resume
    # SDCLR's masks, which are saved; empty until its first epoch
    masks = {name: mask.to(run.device) for name, mask in run.tensors.items()}
    run.tensors = masks
    encode_inputs = functools.partial(encode, model)
    if args.loss == "sdclr":
        encode_inputs = functools.partial(encode, model, masks=masks)
    chunks = common.Chunks(encode_inputs, model, run.accelerator, args.chunk_size)

    # ------------------------------------------- views and batches --------------------------------
    view = training_view(args)
    batches = run.batches([view, view], transform)

    # ------------------------------------------- loop ---------------------------------------------
    # what kNN and probes learn from
    reference = train
    if args.train_features == "augmented":
        reference = padded_and_flipped(train, args.seed)
    evaluator = Evaluator(tower, None, transform, evals, reference, device=run.device, args=args,
                          few_shot=splits.get("few-shot"))
    head_classes = most_frequent_half(sizes)
    after_val = functools.partial(log_val_and_keep_best, run=run, network=network,
                                  loss_modules=loss_modules)
    run.begin(evaluator, random_guess(args),
              banner_lines(args, steps, last, sizes, head_classes), after_val)
    # listed once, since a walk through all modules takes milliseconds
    clipped_parameters = [*network.parameters(), *loss_modules.parameters()]
    for batch in batches:
        epoch = run.step // steps.per_epoch
        run.set_lr(common.learning_rate(run.step, steps, args))

        if args.tau_head:
            tau = coarse_temperature(labels[batch["rows"]], head_classes, args.tau_head,
                                     args.tau_tail)
            tau = to_device(tau, run.device)                               # (B,)
        elif "tau" in loss_modules:
            tau = loss_modules["tau"]()                                    # ()
        else:
            tau = scheduled_temperature(epoch, args)                       # a number

        u, v = batch["views"]                                              # (B, [T,] 3, S, S) each
        if args.loss == "simclr":
            z1, z2 = chunks.encode({"u": u, "v": v})                       # (B, D)
            loss = nt_xent(z1, z2, tau)
        elif args.loss == "sdclr":
            if run.step % steps.per_epoch == 0:
                masks.update(prune_masks(tower, args.prune))
            z1, z2 = chunks.encode({"u": u, "v": v})                       # (B, D)
            loss = nt_xent(z1, z2, tau)
        elif args.loss == "moco":
            # the keys first, and in the precision of the queries
            with run.accelerator.autocast(), common.tf32(chunks.uses_tf32):
                z2 = encode_keys(loss_modules["key"], v, args.seed + run.step)      # (B, D)
            z1, = chunks.encode({"u": u})                                  # (B, D)
            loss = moco_loss(z1, z2, loss_modules["queue"].keys, tau)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")

        run.check_finite(loss, tau, (z1, z2))
        chunks.backward(loss)                                              # of the full batch
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_(clipped_parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if "tau" in loss_modules:
            loss_modules["tau"].clamp()
        if args.loss == "moco":
            update_momentum(loss_modules["key"], network, args.momentum)
            loss_modules["queue"].push(z2)
        columns = {}
        if run.due("log", run.step + 1):
            columns = log_columns(z1, z2)
        run.done(batch, loss, tau, columns)                                # count, log, save, stop

    # ------------------------------------------- save and evaluate --------------------------------
    val_row = chosen_row(run.log.rows, args)
    run.val = val_row["eval"]
    tested_epoch = val_row["step"] / steps.per_epoch
    val_mean = val_row.get("val_mean")
    accuracy = "without a val accuracy"
    if val_mean is not None:
        accuracy = f"whose four val accuracies have the mean {val_mean:.1f} %"
    print_main(f"the test reads the weights of epoch {tested_epoch:g}, {accuracy}")
    if "best" in loss_modules:
        network.load_state_dict(loss_modules["best"].state_dict())
        # App. A.2: the epoch chosen on the first split serves the others
        print_main("for other splits run this command with their --split-seed or --index-file, and "
                   "with "
                   f"--eval-epoch {tested_epoch:g}")
    epochs = range(math.ceil(run.step / steps.per_epoch))
    taus = [scheduled_temperature(epoch, args) for epoch in epochs]
    project_features = functools.partial(project, network.head)
    draw_run = functools.partial(draw, sizes=sizes, taus=taus, project=project_features)
    tower.spec["evaluation"] = vars(evaluation_facts(args))                # for eval.py
    return run.finish(draw_run, eval_epoch=tested_epoch, eval_epoch_val=val_mean)


# ------------------------------------------------------- views and encoders -----------------------
def training_view(args):
    """The view of u and of v."""
    return Augment(args.image_size, args.crop_min, args.flip, jitter_p=args.jitter_p,
                   brightness=args.jitter, contrast=args.jitter, saturation=args.jitter,
                   hue=args.hue, grey=args.grey, blur=args.blur,
                   squash=args.eval_resize == "squash")


def start_norms_at_one(tower):
    """Sets the weights of BatchNorms that start at 0, the last of a block in timm, to 1."""
    for norm in batchnorms(tower):
        if not norm.weight.any():
            nn.init.ones_(norm.weight)


def encode(model, views, masks=None):
    """Encodes all views in one forward: {view: (b, [T,] 3, S, S)} -> z of each, (b, D).

    Args: masks: SDCLR's, for the second of two views.
    """
    pixels = torch.cat(list(views.values()))                               # (V * b, [T,] 3, S, S)
    if masks is None:
        z = model(pixels)                                                  # (V * b, D)
    else:
        z = model(pixels, masks, half=len(pixels) // 2)                    # (2b, D)
    return z.chunk(len(views))


# ------------------------------------------------------- banner, log and val ----------------------
def num_negatives(args):
    """Negatives of an anchor: MoCo's queue, or all other views."""
    if args.loss == "moco":
        return args.queue_size
    return 2 * args.batch_size - 2


def random_guess(args):
    """The loss at the start and at the end of training if all cosines are equal.

    None if it is unknown, as for a loss that a fork adds.
    """
    if args.loss not in ("simclr", "moco", "sdclr"):
        return None
    guess = math.log(1 + num_negatives(args))
    return [guess, guess]


def banner_lines(args, steps, last, sizes, head_classes):
    """The method's lines of the banner: {title: text}. last: step at which the run ends."""
    last_epoch = max(0, last - 1) // steps.per_epoch
    line = describe_temperature(args, last_epoch, head_classes)
    if last < steps.total:
        line += f"; ends at step {last:,}, epoch {last / steps.per_epoch:g}"
    smallest = sizes[sizes > 0].min()
    return {"loss": args.loss, "temperature": line,
            "classes": f"{len(sizes)}, {sizes.max()} to {smallest} images"}


def describe_temperature(args, last_epoch, head_classes):
    """The temperature of the run in words, for the banner."""
    if args.tau_head:
        return (f"coarse: {args.tau_head:g} for {len(head_classes)} head classes, "
                f"{args.tau_tail:g} for the others")
    if args.learnable_tau:
        return f"learnt, from {args.tau_min:g} on"
    if args.schedule == "fixed":
        return f"fixed, {args.tau_min:g}"
    last_tau = scheduled_temperature(last_epoch, args)
    return (f"{args.schedule}, {args.tau_min:g} .. {args.tau_max:g}, period {args.period:g} "
            f"epochs, last {last_tau:.3f}")


@torch.no_grad()
def log_columns(z1, z2):
    """Columns of the log: health of the space of both views, (B, D) each."""
    first, second = gather(normalize(z1)), gather(normalize(z2))           # (N, D)
    return common.embedding_health(first, second)


@torch.no_grad()
def log_val_and_keep_best(row, pieces, run, network, loss_modules):
    """Adds accuracy and coverage of the sphere to a val row of the log; copies the best weights.

    The accuracy is the mean of kNN@1, kNN@10 and both probes, each a mean over the classes.
    """
    name = run.args.dataset
    if "val" in run.evals[name]:
        results = [result for result in row["eval"][name].values() if isinstance(result, dict)]
        row["val_mean"] = float(np.mean([result["mean_per_class"] for result in results]))
    z = project(network.head, pieces[name].train_features)                 # (M, D)
    row["coverage"], row["sphere"] = coverage(z)
    if "best" in loss_modules and chosen_row([*run.log.rows, row], run.args) is row:
        loss_modules["best"].load_state_dict(network.state_dict())


def chosen_row(rows, args):
    """The val row whose weights are tested: the last, or with --eval-epoch auto the best.

    Of equally good rows it is the first. A row before training counts only if there is no other.
    """
    val_rows = [row for row in rows if "eval" in row]
    if args.eval_epoch != "auto":
        return val_rows[-1]
    trained = [row for row in val_rows if "val_mean" in row and row["step"] > 0]
    if not trained:
        return val_rows[-1]
    return max(trained, key=lambda row: row["val_mean"])


def evaluation_facts(args):
    """What eval.py has to know of a run."""
    return EvaluationFacts(
        long_tail=True, train_features=args.train_features, shot_limits=args.shot_limits)


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
