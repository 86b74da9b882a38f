"""TS: Temperature Schedules for Self-Supervised Contrastive Methods on Long-Tail Data (Kukleva et al., ICLR 2023).

Contrastive learning without labels on long-tail data: two views of an image attract each other, and all other images
repel. With a small temperature the loss sees only the nearest negatives (instance discrimination): embeddings spread
uniformly over the sphere, which helps the tail. With a large one it spreads the push over many negatives (group-wise
discrimination): they form dense clusters, which helps the head. TS alternates between the two: the temperature follows
a cosine over the epochs, and the network learns to tell both groups and instances apart. No labels are needed.

Equations, s_ij = cosine (t = epoch from 0, constant inside an epoch):
    (1)  L_c = 1/2B sum_i -log( exp(s_ii+ / tau) / (exp(s_ii+ / tau) + sum_j- exp(s_ij / tau)) )   nt_xent, moco_loss
    (5)  tau(t) = (tau+ - tau-) (1 + cos(2 pi t / T)) / 2 + tau-                                   temperature
    Sec. 3.3, coarse supervision: tau_i = tau_head for anchors of frequent classes, else tau_tail  coarse_temperature

    symbol        variable            shape    unit and paper value
    v, v+         z1, z2 (q, k)       (B, D)   two views, 128-d, normalised inside the losses
    tau-, tau+    tau_min, tau_max    ()       divide the cosine; 0.1, 1.0
    T             period              ()       epochs; 400
    queue         queue               (K, D)   MoCo's keys of earlier batches; K = 10,000

Commands:
    accelerate launch temperature_schedules.py                                   # emoji, long-tailed, on two CPU cores
    accelerate launch temperature_schedules.py --schedule fixed                  # the baseline, tau = 0.2
    accelerate launch temperature_schedules.py --dataset cifar10-lt --loss moco  # or sdclr; the epoch by val (App. A.2)
    accelerate launch temperature_schedules.py --dataset cifar10-lt --stop-at-phase 0.7   # the paper's advice
    accelerate launch temperature_schedules.py --dataset cifar10-lt --index-file split1_D_i.npy  # the authors' split
    python -m tools.figures phase RUN RUN ...                     # Fig. 4 over runs; tails: Figs. 3 and 5
    accelerate launch temperature_schedules.py --dataset folder/ --imbalance-ratio 100    # own data: class folders

A fork edits METHOD, the flags of the method group, and the loss in the loop, not what is marked as shared.

Differences from the paper and from the authors' code:
 1. Eq. 1 is printed as a sum over the batch; the code takes the mean, and so do we.
 2. The authors' flag t_max is HALF the period: their 200 is --period 400 here. Their epochs count from 1, ours from 0.
 3. Log-sum-exp throughout: the authors' plain exp overflows below tau = 0.012.
 4. The authors gather without gradient and multiply the loss by W, right only with DDP's mean; our gradient is exact.
 5. MoCo's code is not released. Ours: one linear head, momentum 0.99, SimCLR's batch of 512, a queue that starts with
    random keys (He et al.). With BatchNorm a query could recognise its key by the batch statistics: keys are encoded in
    a random order and in 8 groups of the global batch. The default towers have no BatchNorm.
 6. SDCLR, as in its authors' code: the second view goes through the pruned network, without the smallest `prune` of all
    weights of the encoder's convolutions and linear layers together; masks are refreshed every epoch. It has its own
    BatchNorms (weights and statistics), in the head too. Both branches receive the gradient.
 7. Colour operations have a fixed order and one blur radius; ImageNet100's blur is in the code alone. Crops are
    bilinear and antialiased (common.Augment), the authors' bicubic. An epoch's last, short batch is left out.
 8. Weight decay and initialisation of the ResNets: --decay-all (biases and norms too) and --no-zero-init (timm starts
    the last BatchNorm of each block at 0) follow the authors' code. The paper's recipes and fashion-mnist-lt set both.
    The 3x3 stem of resnet18-cifar has torch's default initialisation, theirs He's normal one.
 9. App. A.2 names no measure for the choice of an epoch on val: --eval-epoch auto, the default on CIFAR, takes the mean
    of kNN@1, kNN@10 and both probes, each a mean over the classes, and prints --eval-epoch for the other splits.
10. Figs. 1 and 2 do not say whose coverage and cosines they show; here those of z, which the loss sees and spreads.
    Fig. 3 shows features, as its kNN uses, of the largest and the smallest class, not of two similar ones.
11. Table 10's uniform set is read as all images outside val, 4,500 per class (--imbalance-ratio 1), not the 1,116 of
    SDCLR's split1_D_b.npy. The few-shot and the all-images probe then learn from the same images; the paper's differ.
12. Val of CIFAR is a tenth of each class, outside --index-file; SDCLR's own is --val-file valIdxList.npy.
    ImageNet100-LT has none (App. A.2); its batch is the paper's 512, not the README's 256. Its few-shot images are of
    the long tail, as the paper says, or SDCLR's list, as in the authors' notebook (--few-shot-file: 12 per class).
"""

import argparse
import copy
import functools
import math

import common

from common import (  # isort: skip
    Evaluator, Parser, Run, UserError, batchnorms, between, by_rows, clean_exit, count, fp32, gather,
    labelled_splits, nonnegative, normalize, padded_and_flipped, part, per_anchor, positive, positive_index, say,
    to_device, whole, world)

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.ts import draw  # isort: skip


# ======================================================= METHOD ======================================================
def temperature(epoch, schedule="cos", tau_min=0.1, tau_max=1.0, period=400, seed=0):
    """tau of an epoch (Eq. 5 for 'cos', Table 5 for the others): the same on every process and after a resume.

    Args: epoch: from 0, constant inside an epoch.   period: T in epochs.   seed: of 'random'.
    Returns: float. cos and oscillating (linear triangle) start at tau_max; step is tau_min for the first half of a
        period, tau_max for the second; random is uniform in (tau_min, tau_max) from (seed, epoch); fixed is tau_min.
    """
    phase = (epoch % period) / period                                      # 0..1
    if schedule == "cos":
        return tau_min + (tau_max - tau_min) * (1 + math.cos(2 * math.pi * phase)) / 2
    if schedule == "oscillating":
        return tau_min + (tau_max - tau_min) * abs(1 - 2 * phase)
    if schedule == "step":
        return tau_min if phase < 0.5 else tau_max
    if schedule == "random":
        return tau_min + (tau_max - tau_min) * np.random.default_rng([seed, int(epoch)]).random()
    if schedule == "fixed":
        return tau_min
    raise ValueError(f"no schedule {schedule!r}")


@fp32
def nt_xent(z1, z2, tau, block=0):
    """NT-Xent (Eq. 1, averaged): each of the 2B views has one positive and 2N - 2 negatives.

    Args:
        z1, z2: (B, D) two views, any float dtype; row i of both from one image.
        tau: temperature, divides the cosine, > 0: a float, (), or (B,) per anchor image.
        block: rows at a time (0 = automatic, see common.by_rows).
    Returns: scalar fp32 (float64 stays), mean over the 2B local anchors. A random guess is about ln(2N - 1).
    """
    a, b = normalize(z1), normalize(z2)                                    # (B, D)
    all_a, all_b, tau = gather(a), gather(b), per_anchor(tau, a)           # (N, D), (N, D), () or (B, 1)

    def one_way(anchor, own_view, other_view):                             # (B, D), (N, D), (N, D)
        def rows(x, t, target):                                            # b anchors at a time
            own = x @ own_view.T                                           # (b, N)
            logits = torch.cat([x @ other_view.T, own], 1) / t             # (b, 2N)
            itself = len(own_view) + target[:, None]                       # (b, 1), left out of its negatives
            return F.cross_entropy(logits.scatter(1, itself, -math.inf), target)                             # ()
        return by_rows(rows, anchor, tau, positive_index(anchor), columns=2 * len(own_view), block=block)
    return (one_way(a, all_a, all_b) + one_way(b, all_b, all_a)) / 2


@fp32
def moco_loss(q, k, queue, tau):
    """L_c with a queue of earlier keys as negatives (Eq. 1, averaged; He et al. 2020).

    Args: q, k: (B, D) query and key of the same image; k gets no gradient.   queue: (K, D).   tau: float, () or (B,).
    Returns: scalar fp32 (float64 stays), mean over the B local queries. A random guess is about ln(K + 1).
    """
    q, k, queue = normalize(q), normalize(k.detach()), normalize(queue)    # (B, D), (B, D), (K, D)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1)     # (B, 1 + K)
    logits = logits / per_anchor(tau, q)                                   # (B, 1 + K)
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def coarse_temperature(labels, head_classes, tau_head, tau_tail):
    """tau of each anchor, by the frequency of its class (Sec. 3.3): (B,) long, a set of classes -> (B,) float."""
    head = torch.isin(labels, torch.as_tensor(sorted(head_classes), device=labels.device))                  # (B,) bool
    return torch.where(head, tau_head, tau_tail)


def prune_masks(module, part):
    """SDCLR: {name: bool mask} of the weights that the second branch keeps, the largest 1 - part of all weights of
    convolutions and linear layers together. Layers with small weights lose more."""
    layers = (nn.Linear, nn.modules.conv._ConvNd)
    sizes = {f"{n}.weight": m.weight.detach().abs() for n, m in module.named_modules() if isinstance(m, layers)}
    every = torch.cat([size.flatten() for size in sizes.values()])         # (weights,)
    limit = every.kthvalue(min(math.ceil(part * len(every)) + 1, len(every))).values
    return {name: size >= limit for name, size in sizes.items()}


def coverage(z, bins=500):
    """How z (M, D) covers the sphere (Fig. 1): each row is assigned to the nearest of `bins` random directions.

    Returns: the effective share of the directions, exp(entropy) / bins, and their numbers of rows, largest first.
    """
    sphere = torch.randn(bins, z.shape[1], generator=torch.Generator().manual_seed(0))                      # (bins, D)
    nearest = (normalize(z) @ normalize(sphere).to(z).T).argmax(1)         # (M,)
    rows = nearest.bincount().sort(descending=True).values                 # (up to bins,)
    effective = torch.special.entr(rows / rows.sum()).sum().exp().item()
    return effective / bins, rows[rows > 0].tolist()


# ------------------------------------------------------- modules -----------------------------------------------------
class Queue(nn.Module):
    """The last K keys (K, D), first in, first out: equal on all processes and saved in the checkpoint. It starts with
    random keys (He et al.), so that no anchor finds its own key among its negatives."""

    def __init__(self, size, dim, seed=0):
        super().__init__()
        start = torch.randn(size, dim, generator=torch.Generator().manual_seed(seed))                       # (K, D)
        self.register_buffer("keys", normalize(start))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))   # pushed so far

    @torch.no_grad()
    def push(self, k):
        """Adds this step's keys of all processes; k: the (B, D) local rows."""
        k, size = gather(normalize(k)), len(self.keys)                     # (N, D)
        at = (self.count + torch.arange(len(k), device=k.device))[-size:] % size
        self.keys[at] = k[-size:]
        self.count += len(k)


class Contrastive(nn.Module):
    """Encoder and projection head; views (V * B, 3, S, S) -> z (V * B, D). The head is discarded in evaluation."""

    def __init__(self, encoder, dim, norm, linear=False, pruned=False):
        super().__init__()
        self.tower, width = encoder, encoder.vision.width
        if linear:                                                         # MoCo
            self.head = nn.Linear(width, dim)
        else:                                                              # SimCLR: the authors' head
            bn = nn.BatchNorm1d if norm == "batch" else nn.Identity
            self.head = nn.Sequential(nn.Linear(width, width), bn(width), nn.ReLU(),
                                      nn.Linear(width, dim, bias=False), bn(dim))
        if pruned:                                                         # SDCLR: the second branch's BatchNorms
            self.norms = nn.ModuleList(copy.deepcopy(m) for _, m in self.dense_norms())

    def dense_norms(self):
        """[(name, BatchNorm)] of encoder and head."""
        both = *self.tower.named_modules(prefix="tower"), *self.head.named_modules(prefix="head")
        return [(name, m) for name, m in both if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def forward(self, pixels, masks=None, half=None):
        """masks, half (SDCLR): the views from row `half` on go through the pruned encoder."""
        if masks is None:
            return self.head(self.tower(pixels)[2])
        other = {f"tower.{name}": self.tower.get_parameter(name) * mask for name, mask in masks.items()}
        for (name, _), norm in zip(self.dense_norms(), self.norms, strict=True):
            other |= {f"{name}.{k}": x for k, x in (*norm.named_parameters(), *norm.named_buffers())}
        return torch.cat([self(pixels[:half]), common.functional_call(self, other, (pixels[half:],))])


@torch.no_grad()
def project(head, features):
    """z (M, D) of features (M, width), with running statistics in the head's norms; on the head's device."""
    head.eval()
    z = head(features.to(next(head.parameters()).device))
    head.train()
    return z


@torch.no_grad()
def encode_keys(encoder, pixels, seed, splits=8):
    """MoCo's keys (B, D). With BatchNorm they are encoded in random order and in groups, so that no key shares the
    batch statistics of its own query. splits: groups of the global batch: their size does not depend on processes."""
    if not batchnorms(encoder):
        return encoder(pixels)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    order = to_device(order, pixels.device)
    least = 1 if pixels.is_cuda else min(splits, 2)                        # a CPU has no SyncBatchNorm for the queries
    groups = order.tensor_split(min(max(least, splits // world()), max(1, len(pixels) // 2)))
    return torch.cat([encoder(pixels[g]) for g in groups])[order.argsort()]


@torch.no_grad()
def update_momentum(encoder, online, momentum):
    """key <- momentum key + (1 - momentum) online, for the weights; the key encoder has its own buffers."""
    for key, query in zip(encoder.parameters(), online.parameters()):
        key.lerp_(query, 1 - momentum)


# ======================================================= flags =======================================================
# Defaults by data set, one line per group. 'ours': tuned on val. Other data sets use 'own'.
CIFAR = dict(
    recipe="paper; optimiser and views from the authors' code",
    image_encoder="resnet18-cifar", pretrained=False, embed_dim=128, head_norm="batch",
    image_size=32, image_stats="imagenet", eval_resize="crop",
    epochs=2000.0, batch_size=512, optimizer="sgd", lr=0.5, lr_end=1e-6, warmup_epochs=10.0, weight_decay=1e-4,
    decay_all=True, zero_init=False, beta1=0.9, grad_clip=0.0,
    lr_schedule="cosine", beta2=0.999, eps=1e-8, mixed_precision="no", frames=12, frame_sampling="uniform",
    tau_min=0.1, tau_max=1.0, period=400.0, queue_size=10_000,
    crop_min=0.1, flip=0.5, jitter_p=0.8, jitter=0.4, hue=0.1, grey=0.2, blur=0.0,
    imbalance_ratio=100.0, train_features="augmented", save_every=1000, eval_every=0, eval_epoch="auto", log_every=50)
IMAGENET100 = CIFAR | dict(
    image_encoder="resnet50", image_size=224, epochs=800.0, crop_min=0.08, blur=0.5,
    imbalance_ratio=0.0, eval_epoch="", train_features="clean", eval_crop=0.875, shot_limits=[100, 20])
FASHION = CIFAR | dict(recipe="ours; as cifar10-lt", epochs=500.0, period=100.0, jitter_p=0.0, grey=0.0)
EMOJI = CIFAR | dict(
    recipe="ours", image_encoder="small", head_norm="none", image_stats="encoder",
    epochs=30.0, batch_size=256, optimizer="adamw", lr=2e-3, lr_end=2e-5, warmup_epochs=2.0, weight_decay=0.05,
    decay_all=False, zero_init=True, period=12.0, queue_size=1024,
    crop_min=0.3, hue=0.02,  # small, since hue tells classes apart
    imbalance_ratio=0.0, train_features="clean", save_every=100, eval_every=50, eval_epoch="", log_every=5)
MOVING = EMOJI | dict(recipe="ours; as emoji, classes = verbs", frames=4, flip=0.0, crop_min=0.6)
SCENES = EMOJI | dict(epochs=60.0, hue=0.5, imbalance_ratio=100.0, eval_every=0, log_every=20, save_every=1000)
OWN = EMOJI | dict(
    recipe="ours; small tower from scratch", image_size=64, hue=0.1, log_every=10, eval_every=0, save_every=500)
RECIPES = {"emoji": EMOJI, "cifar10-lt": CIFAR, "cifar100-lt": CIFAR, "imagenet100-lt": IMAGENET100,
           "fashion-mnist-lt": FASHION, "moving-emoji": MOVING, "emoji-scenes": SCENES, "own": OWN}
SCHEDULES = "cos", "step", "random", "oscillating"
SDCLR = {"cifar10-lt": dict(tau_min=0.2, prune=0.9), "cifar100-lt": dict(tau_min=0.2, prune=0.9),
         "imagenet100-lt": dict(tau_min=0.3, prune=0.3)}                   # with a fixed tau, from its scripts


def chosen_defaults(chosen):
    """By --loss, --schedule (fixed: the baseline's 0.2; cos and others: the recipe's) and --stop-at-phase."""
    own = SDCLR.get(chosen.recipe, {}) if chosen.loss == "sdclr" else {}
    found = {"tau_min": 0.2} | own | {"schedule": chosen.schedule or ("fixed" if own else "cos")}
    if found["schedule"] != "fixed":
        del found["tau_min"]
    return found | ({"eval_epoch": ""} if chosen.stop_at_phase else {})


def parse_args(argv=None):
    """Flags; the recipe of --dataset gives the defaults."""
    p = Parser(__file__, "TS: a temperature schedule for SimCLR and MoCo on long-tail images.", texts=False)
    yesno = argparse.BooleanOptionalAction
    g = p.group("method")
    g.add_argument("--loss", choices=["simclr", "moco", "sdclr"], default="simclr", help="what the schedule is for")
    g.add_argument("--period", type=positive, help="T, epochs of a full period; paper 400")
    g.add_argument("--tau-head", type=nonnegative, default=0.0,
                   help="coarse supervision in place of the schedule: tau of frequent classes; paper 1.0; 0 = off")
    g.add_argument("--tau-tail", type=nonnegative, default=0.0, help="and of the other classes; paper 0.1")
    g.add_argument("--decay-all", action=yesno, help="weight decay of biases and norms (authors' code)")
    g.add_argument("--zero-init", action=yesno, help="a timm ResNet's last BatchNorms start at 0 (authors': at 1)")
    g = p.group("without --tau-head and --tau-tail", tau_head=False)
    g.add_argument("--schedule", choices=[*SCHEDULES, "fixed"], default=None,
                   help="of tau over the epochs; fixed = --tau-min throughout")
    g.add_argument("--tau-min", type=positive, help="tau-, > 0; paper 0.1 (the fixed baseline: 0.2)")
    g = p.group("without --schedule fixed, --tau-head and --tau-tail", tau_head=False, schedule=SCHEDULES)
    g.add_argument("--tau-max", type=positive, help="tau+, >= tau-; paper 1.0, Table 5 0.5")
    g = p.group("with --schedule fixed, without --tau-head and --tau-tail", tau_head=False, schedule="fixed")
    g.add_argument("--learnable-tau", action=yesno, default=False, help="learn it, from --tau-min on; not of the paper")
    g = p.group("with --loss moco", loss="moco")
    g.add_argument("--queue-size", type=count, help="K, keys in MoCo's queue; paper 10,000")
    g.add_argument("--momentum", type=part, default=0.99, help="of MoCo's key encoder; ours")
    g = p.group("with --loss sdclr", loss="sdclr")
    g.add_argument("--prune", type=part, default=0.9, help="of the second branch; SDCLR 0.9, ImageNet100-LT 0.3")
    g = p.group("with --loss simclr or sdclr", loss=("simclr", "sdclr"))
    g.add_argument("--head-norm", choices=["batch", "none"], help="BatchNorm in the head (authors' code)")
    g = p.group("views")
    g.add_argument("--crop-min", type=part, help="least area of the crop; CIFAR 0.1, ImageNet 0.08")
    g.add_argument("--flip", type=part, help="share of mirror images")
    g.add_argument("--jitter-p", type=part, help="share of images with --jitter and --hue; paper 0.8")
    g.add_argument("--jitter", type=nonnegative, help="of brightness, contrast, saturation; paper 0.4")
    g.add_argument("--hue", type=between(0, 0.5), help="strength, 0..0.5; paper 0.1")
    g.add_argument("--grey", type=part, help="share of grey images; paper 0.2")
    g.add_argument("--blur", type=part, help="share of blurred images; ImageNet 0.5")
    g = p.group("long tail, of emoji, the sets -lt, or any labelled folder, parquet or hub id")
    g.add_argument("--imbalance-ratio", type=nonnegative,
                   help="largest class over smallest; paper 50, 100, 150; 1 = balanced; 0 = as the data are")
    g.add_argument("--split-seed", type=whole, default=0, help="of the classes' order and images; paper: 0, 1, 2")
    g.add_argument("--index-file", default="", metavar="FILE",
                   help="training images: .npy of torchvision's indices (CIFAR), or lines 'path class' (ImageNet)")
    g.add_argument("--val-file", default="", metavar="FILE",
                   help="val images, the same; empty = a tenth of each class (CIFAR), none (imagenet100-lt)")
    g.add_argument("--test-file", default="", metavar="FILE", help="test images of imagenet100-lt, the same")
    g.add_argument("--few-shot-file", default="", metavar="FILE",
                   help="of imagenet100-lt's few-shot probe; empty = training images, as many as of the smallest class")
    g = p.group("evaluation by class")
    g.add_argument("--train-features", choices=["clean", "augmented"],
                   help="training views in kNN and probes; authors: augmented on CIFAR")
    g.add_argument("--shot-limits", type=whole, nargs=2, default=[0, 0], metavar=("HEAD", "TAIL"),
                   help="head classes have more images than HEAD, tail fewer than TAIL; ImageNet100-LT 100 20; "
                        "0 0 = thirds of the classes")
    g.add_argument("--eval-crop", type=between(0.1, 1), default=1.0,
                   help="share of the short side kept by --eval-resize crop; ImageNet 0.875")
    g.add_argument("--eval-epoch", metavar="auto|N",
                   help="the weights to test: empty = the last; auto = the best on val after step 0 (App. A.2), of "
                        "every 20 epochs without --eval-every; N = stop after epoch N of the same schedules")
    g = p.group("without --eval-epoch", eval_epoch=False)
    g.add_argument("--stop-at-phase", type=part, default=0.0,
                   help="end at epoch (floor(epochs / T) - 1 + phase) T of the same schedules; paper about 0.7 "
                        "(1,880 of 2,000); 0 = the end")
    args = p.parse(argv, RECIPES, chosen_defaults, choosers=("--schedule", "--stop-at-phase"))
    epoch, auto = args.eval_epoch, args.eval_epoch == "auto"
    number = float(epoch) if epoch.replace(".", "", 1).isdecimal() else 0.0
    last = math.inf if args.max_steps else args.epochs
    p.require(args.schedule == "fixed" or args.tau_max >= args.tau_min,
              f"--tau-max {args.tau_max}: must be at least --tau-min {args.tau_min}")
    p.require(not args.learnable_tau or args.tau_min >= 0.01, "--tau-min: if learnt at least 0.01")
    p.require((args.tau_head > 0) == (args.tau_tail > 0),
              f"--tau-head {args.tau_head} and --tau-tail {args.tau_tail}: give both, > 0, or neither")
    p.require(args.imbalance_ratio == 0 or args.imbalance_ratio >= 1,
              f"--imbalance-ratio {args.imbalance_ratio}: must be at least 1, or 0 to leave the data as they are")
    cut = args.imbalance_ratio >= 1 and (not args.index_file or args.dataset == "imagenet100-lt")
    p.only(cut, "where --imbalance-ratio, and no --index-file, makes the tail", "--split-seed")
    p.require(not any(args.shot_limits) or 0 < args.shot_limits[1] <= args.shot_limits[0] + 1,
              f"--shot-limits {args.shot_limits[0]} {args.shot_limits[1]}: TAIL must be from 1 to HEAD + 1, or both 0")
    p.require(not args.stop_at_phase or args.epochs >= args.period,
              f"--stop-at-phase {args.stop_at_phase}: --epochs {args.epochs:g} hold no full --period {args.period:g}")
    p.require(not epoch or auto or 0 < number <= last,
              f"--eval-epoch {epoch}: must be auto, or > 0 and at most --epochs {args.epochs:g}")
    p.require(args.loss != "moco" or not args.chunk_size, "--chunk-size: not with --loss moco; lower --batch-size")
    return args


# ======================================================= main ========================================================
def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    sets = labelled_splits(args)
    train, evals = sets["train"], {args.dataset: {s: sets[s] for s in ("val", "test") if s in sets}}
    if args.eval_epoch == "auto" and "val" not in sets:
        raise UserError(f"--eval-epoch auto: {args.dataset} has no val split; see --val-file and --hold-out-val")
    run = Run(__file__, args, train, evals, RECIPES)
    run.last = last_step(run)                                              # the schedules still span run.total
    if args.eval_epoch == "auto" and not args.eval_every:
        args.eval_every = 20 * run.per_epoch
    sizes = np.bincount(train.labels, minlength=len(train.label_names))    # (classes,) training images of each
    order = np.argsort(-sizes, kind="stable")                              # classes, largest first
    head_classes = set(order[:round(len(order) / 2)].tolist())             # paper: 5 of 10

    # ------------------------------------------- model and optimiser -------------------------------------------------
    encoder, _, transform = run.towers()                                   # what is saved and tested
    for m in encoder.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and not args.zero_init and not m.weight.any():
            nn.init.ones_(m.weight)                                        # timm starts a block's last one at 0
    moco, sdclr = args.loss == "moco", args.loss == "sdclr"
    tower = Contrastive(encoder, args.embed_dim, args.head_norm, linear=moco, pruned=sdclr).to(run.device)
    own = nn.ModuleDict()                                                  # outside DDP, saved in every checkpoint
    own["tau"] = nn.ParameterDict({"log_tau": torch.tensor(math.log(args.tau_min))} if args.learnable_tau else {})
    if moco:
        own["key"] = copy.deepcopy(tower).requires_grad_(False)
        own["queue"] = Queue(args.queue_size, args.embed_dim, args.seed)
    if args.eval_epoch == "auto":
        own["best"] = copy.deepcopy(tower).requires_grad_(False)           # the best on val so far
    own.to(run.device)
    learnt = [tower, own]
    # >>> shared: optimizer
    groups = common.decay_groups(learnt, args.weight_decay)
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.beta1)
    else:
        kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps, fused=run.fused)
    # <<< shared
    if args.decay_all:                                                     # also biases and norms; not a learnt tau
        optimizer.param_groups[1]["weight_decay"] = args.weight_decay
    model, optimizer = run.wrap(tower, own, optimizer)                     # SyncBatchNorm, torch.compile, DDP
    run.resume()                                                           # with --resume: the last checkpoint
    run.tensors = {k: v.to(run.device) for k, v in run.tensors.items()}    # SDCLR: the masks of this epoch
    chunks = common.Chunks(lambda inputs: encode(model, inputs, run.tensors if sdclr else {}), model, run.accelerator,
                           args.chunk_size)

    # ------------------------------------------- views and batches ---------------------------------------------------
    view = common.Augment(args.image_size, args.crop_min, args.flip, args.jitter_p, *[args.jitter] * 3, args.hue,
                          args.grey, args.blur)
    batches = run.batches([view, view], transform)
    labels = torch.from_numpy(np.asarray(train.labels))                    # (M,), for coarse supervision

    # ------------------------------------------- loop ----------------------------------------------------------------
    tau_of = functools.partial(temperature, schedule=args.schedule, tau_min=args.tau_min, tau_max=args.tau_max,
                               period=args.period, seed=args.seed)

    @torch.no_grad()
    def after_val(row, pieces):
        """Adds the mean accuracy and the coverage of the sphere to a val row; keeps the best weights so far."""
        if "val" in sets:
            results = [m for m in row["eval"][args.dataset].values() if isinstance(m, dict)]
            row["val_mean"] = float(np.mean([m["mean_per_class"] for m in results]))
        row["coverage"], row["sphere"] = coverage(project(tower.head, pieces[args.dataset]["train_features"]))
        if "best" in own and chosen_row([*run.log.rows, row], args) is row:
            own["best"].load_state_dict(tower.state_dict())

    seen = padded_and_flipped(train, args.seed) if args.train_features == "augmented" else train
    evaluator = Evaluator(encoder, None, transform, run.evals, seen, run.device, args, few=sets.get("few-shot"))
    run.begin(evaluator, random_guess(run), banner_lines(run, sizes, head_classes, tau_of), after_val)
    for batch in batches:
        epoch = run.step // run.per_epoch
        run.set_lr(common.cosine_lr(run.step, run.total, run.warmup, args.lr, args.lr_end, args.lr_schedule))
        tau = own["tau"]["log_tau"].exp() if args.learnable_tau else tau_of(epoch)         # () or float
        if args.tau_head:                                                  # coarse supervision replaces the schedule
            tau = coarse_temperature(labels[batch["rows"]], head_classes, args.tau_head, args.tau_tail)
            tau = to_device(tau, run.device)                               # (B,)
        if sdclr and (run.step % run.per_epoch == 0 or not run.tensors):
            run.tensors = prune_masks(encoder, args.prune)                 # kept in the checkpoints for a resume

        inputs = dict(enumerate(batch["views"]))                           # {0: v, 1: v+}, (B, [T,] 3, S, S) each
        if moco:
            with run.accelerator.autocast(), common.tf32(chunks.tf32):                # in the precision of the queries
                keys = encode_keys(own["key"], inputs.pop(1), args.seed + run.step)                         # (B, D)
        z = chunks.encode(inputs)                                          # (B, D) each: z1, z2; for MoCo only q
        if moco:
            loss = moco_loss(z[0], keys, own["queue"].keys, tau)
            z = z[0], keys
        else:
            loss = nt_xent(*z, tau)

        run.check_finite(loss, tau, z, batch)
        chunks.backward(loss)                                              # the full batch's gradient
        common.average_gradients(own.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_([*tower.parameters(), *own.parameters()], args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            own["tau"]["log_tau"].data.clamp_(min=math.log(0.01))          # as CLIP's
            tau = own["tau"]["log_tau"].detach().exp()
        if moco:
            update_momentum(own["key"], tower, args.momentum)
            own["queue"].push(keys)

        numbers = {}
        if run.due("log"):
            numbers = common.embedding_health(*(gather(normalize(e.detach())) for e in z))              # of (N, D) each
        run.done(batch, loss, tau, numbers)

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    chosen = chosen_row(run.log.rows, args)
    run.val, epoch, mean = chosen["eval"], chosen["step"] / run.per_epoch, chosen.get("val_mean")
    val = "no val accuracy" if mean is None else f"mean of the four val accuracies {mean:.1f} %"
    say(f"tested: the weights of epoch {epoch:g}, {val}")
    if "best" in own:
        tower.load_state_dict(own.pop("best").state_dict())
        say(f"other splits: this command, their --split-seed or --index-file, --eval-epoch {epoch:g}")  # App. A.2
    def sphere(features):                                                  # (M, width) -> (M, D), unit rows
        return normalize(project(tower.head, features)).cpu()
    return run.finish(lambda run: draw(run, sizes, tau_of, sphere), eval_epoch=epoch, eval_epoch_val=mean)


def last_step(run):
    """The optimiser step at which the run ends: --eval-epoch N, --stop-at-phase, or the end of the schedules."""
    args = run.args
    if args.eval_epoch not in ("", "auto"):
        return min(run.total, max(1, round(float(args.eval_epoch) * run.per_epoch)))
    epochs = run.total / run.per_epoch if args.max_steps else args.epochs
    whole_periods = math.floor(epochs / args.period + 1e-9)
    if args.stop_at_phase and whole_periods:                               # few --max-steps may hold no period
        return min(run.total, round((whole_periods - 1 + args.stop_at_phase) * args.period * run.per_epoch))
    return run.total


def encode(model, views, masks):
    """All views in one forward: {view: (b, [T,] 3, S, S)} -> z of each, (b, D). masks: SDCLR's, for the second view."""
    pixels = torch.cat(list(views.values()))                               # (V * b, [T,] 3, S, S)
    z = model(pixels, masks, half=len(pixels) // 2) if masks else model(pixels)         # (V * b, D)
    return z.chunk(len(views))


def random_guess(run):
    """Tells the banner the negatives of an anchor, the other views or MoCo's queue. Returns: the loss at the start and
    the end if all cosines are equal; None in a fork whose loss has another."""
    run.negatives = run.args.queue_size if run.args.loss == "moco" else 2 * run.args.batch_size - 2
    return 2 * [math.log(1 + run.negatives)]


def banner_lines(run, sizes, head_classes, tau_of):
    """The method's lines of the banner: {word: text}."""
    args = run.args
    last = tau_of(max(0, run.last - 1) // run.per_epoch)
    tau = f"{args.schedule}, {args.tau_min:g} .. {args.tau_max:g}, period {args.period:g} epochs, last {last:.3f}"
    if args.schedule == "fixed":
        tau = f"learnt, from {args.tau_min:g} on" if args.learnable_tau else f"fixed, {args.tau_min:g}"
    if args.tau_head:
        tau = f"coarse: {args.tau_head:g} for {len(head_classes)} head classes, {args.tau_tail:g} for the others"
    if run.last < run.total:
        tau += f"; ends at step {run.last:,}, epoch {run.last / run.per_epoch:g}"
    classes = f"{len(sizes)}, {sizes.max()} to {sizes[sizes > 0].min()} images"
    return {"loss": args.loss, "temperature": tau, "classes": classes}


def chosen_row(rows, args):
    """The val row whose weights are tested: the last, or with --eval-epoch auto the best after step 0 (App. A.2), the
    earliest of equal ones. At step 0 it is the row of that step."""
    rows = [r for r in rows if "eval" in r]
    if args.eval_epoch != "auto":
        return rows[-1]
    trained = [r for r in rows if "val_mean" in r and r["step"] > 0]
    return max(trained, key=lambda r: r["val_mean"]) if trained else rows[-1]


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
