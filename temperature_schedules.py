"""TS: Temperature Schedules for Self-Supervised Contrastive Methods on Long-Tail Data (Kukleva et al., ICLR 2023).

Contrastive learning without labels on long-tail data: two views of an image attract, everything else repels. A small temperature makes
the loss look at the nearest negatives only: instance discrimination, a uniform sphere, which helps the tail. A large one spreads the
push over many negatives: group-wise discrimination, dense clusters, which helps the head. TS asks for neither but both in turn:
the temperature follows a cosine over the epochs, and the network learns to tell groups and instances apart. One line of code, no labels.

Equations (t = epoch from 0, constant inside an epoch; s_ij = cosine):
    (1)  L_c = 1/2B sum_i -log( exp(s_ii+ / tau) / (exp(s_ii+ / tau) + sum_j- exp(s_ij / tau)) )            nt_xent, moco_loss
    (5)  tau(t) = (tau+ - tau-) (1 + cos(2 pi t / T)) / 2 + tau-                                            temperature
    Sec. 3.3, coarse supervision: tau_i = tau_head for anchors of frequent classes, tau_tail for the others  coarse_temperature

    symbol        variable            shape    unit and paper value
    v, v+         z1, z2 (q, k)       (B, D)   two views, 128-d, normalised inside the losses
    tau-, tau+    tau_min, tau_max    ()       divide the cosine; 0.1, 1.0
    T             period              ()       epochs; 400
    queue         queue               (K, D)   MoCo's keys of earlier batches; K = 10,000

Commands:
    accelerate launch temperature_schedules.py                                            # emoji, long-tailed, on two CPU cores
    accelerate launch temperature_schedules.py --schedule fixed --tau-min 0.2             # the baseline
    accelerate launch temperature_schedules.py --dataset cifar10-lt --stop-at-phase 0.7   # the paper's advice: 1,880 of 2,000 epochs
    accelerate launch temperature_schedules.py --dataset cifar10-lt --eval-every 420 --eval-epoch auto   # App. A.2; then --split-seed 1 --eval-epoch N
    accelerate launch temperature_schedules.py --dataset cifar10-lt --loss moco           # or sdclr
    accelerate launch temperature_schedules.py --dataset folder/ --imbalance-ratio 100    # own data: class folders

Differences from the paper and from the authors' code:
 1. Eq. 1 is printed as a sum over the batch; the code takes the mean, and so do we.
 2. The authors' flag t_max is HALF the period: their 200 is --period 400 here. Their epochs count from 1, ours from 0.
 3. Log-sum-exp throughout: the authors' plain exp overflows below tau = 0.012.
 4. Gradients: their no-grad gather with the loss times W is right only together with DDP's mean; ours is exact for any optimiser.
 5. MoCo's code is not released. Ours: one linear head, momentum 0.99. BatchNorm would let a query see its key through the batch
    statistics; the keys are therefore encoded in a random order and in --key-splits groups, so that no key shares its query's
    statistics. The default towers have no BatchNorm and nothing to leak.
 6. SDCLR: the second view goes through the magnitude-pruned network (largest 1 - prune of each layer's weights, masks refreshed every
    epoch); both branches share the weights and both receive the gradient.
 7. Colour operations come in a fixed order, one blur radius; crops are antialiased (see common.Augment).
 8. Weight decay: all parameters in the authors' code; here biases and norms have none.
 9. App. A.2 chooses the tested epoch on val but names no measure: --eval-epoch auto takes the mean of kNN@1, kNN@10 and both probes, each
    a mean over the classes; a tie keeps the earlier epoch. The number N that it says is for the other splits. Default: the end of the run.
10. Fig. 1 does not say which representation's coverage it shows; here that of z, which the loss spreads.
"""

import argparse
import copy
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.func import functional_call
from tqdm import tqdm

import common
from common import UserError, fp32, gather, normalize, positive_index, say

# Defaults by data set, marked as in temo.py. A data set that is not here takes 'own'.
CIFAR = dict(
    recipe="paper; optimiser and views from the authors' code", image_encoder="resnet18-cifar", pretrained=False, image_size=32, image_stats="imagenet", eval_resize="crop",
    embed_dim=128, head_norm="batch", epochs=2000.0, batch_size=512, optimizer="sgd", lr=0.5, lr_end=1e-6, warmup_epochs=10.0, weight_decay=1e-4, beta1=0.9, grad_clip=0.0,
    tau_min=0.1, tau_max=1.0, period=400.0, crop_min=0.1, flip=0.5, jitter_p=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.2, blur=0.0,
    imbalance_ratio=100.0, train_features="augmented", save_every=1000, eval_every=0, log_every=50, queue_size=10_000)
IMAGENET100 = CIFAR | dict(image_encoder="resnet50", image_size=224, epochs=800.0, crop_min=0.08, blur=0.5, train_features="clean", imbalance_ratio=0.0)
EMOJI = CIFAR | dict(
    recipe="ours", image_encoder="small", image_size=32, image_stats="half", head_norm="none", epochs=30.0, batch_size=256, optimizer="adamw", lr=2e-3, lr_end=2e-5, warmup_epochs=2.0,
    weight_decay=0.05, period=12.0, crop_min=0.3, hue=0.02, imbalance_ratio=0.0, train_features="clean", save_every=100, eval_every=50, log_every=5, queue_size=1024)  # hue tells classes apart
RECIPES = {"emoji": EMOJI, "cifar10-lt": CIFAR, "cifar100-lt": CIFAR, "imagenet100-lt": IMAGENET100, "fashion-mnist-lt": CIFAR | dict(recipe="ours; as cifar10-lt", jitter_p=0.0, grey=0.0, epochs=500.0, period=100.0),
           "own": EMOJI | dict(recipe="ours; small tower from scratch", image_size=64, hue=0.1, log_every=10, eval_every=0, save_every=500),
           "moving-emoji": EMOJI | dict(recipe="ours; as emoji, classes = verbs", frames=4, flip=0.0, crop_min=0.6)}
LOSSES = {}


def parse_args(argv=None):
    """Flags in two stages: --dataset, --loss and --resume choose the defaults, the rest overrides them."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default="emoji"), first.add_argument("--loss", default="simclr"), first.add_argument("--resume", default="")
    chosen, _ = first.parse_known_args(argv)
    yesno = argparse.BooleanOptionalAction
    p = common.Parser(prog="temperature_schedules.py", description="TS: a temperature schedule for SimCLR and MoCo on long-tail images.", allow_abbrev=False, formatter_class=common.Help)
    # >>> shared: run
    g = p.add_argument_group("run")
    g.add_argument("--output-dir", default="runs", help="folder of all runs")
    g.add_argument("--run-name", default="", help="folder of this run in --output-dir; empty = script, data set, seed and time")
    g.add_argument("--resume", default="", metavar="RUN_DIR", help="continue this run exactly, from its last checkpoint; needs no other flag")
    g.add_argument("--seed", type=int, default=42, help="of weights, order and views")
    g.add_argument("--cpu", action=yesno, default=False, help="stay on the CPU even where there is a GPU")
    g.add_argument("--threads", type=int, default=0, help="CPU threads of each process; 0 = cores / local processes")
    g.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no", help="of the encoders; the loss is always float32")
    g.add_argument("--compile", action=yesno, default=False, help="torch.compile the encoders and the colour operations of the views")
    g.add_argument("--save-every", type=int, default=1000, help="optimiser steps between checkpoints (the last two are kept); 0 = only at the end")
    g.add_argument("--eval-every", type=int, default=0, help="optimiser steps between evaluations on the val split; 0 = only at the end")
    g.add_argument("--log-every", type=int, default=10, help="optimiser steps between rows of metrics.jsonl; 0 = only at the end")
    g.add_argument("--tracker", choices=["", "tensorboard", "wandb", "trackio"], default="", help="log there as well as to metrics.jsonl")
    # <<< shared
    g = p.add_argument_group("data")
    g.add_argument("--dataset", default="emoji", help="emoji, cifar10-lt, cifar100-lt, fashion-mnist-lt, imagenet100-lt; or any labelled folder, parquet or hub id (org/name)")
    g.add_argument("--imbalance-ratio", type=float, default=0.0, help="largest class over smallest, >= 1; paper 50, 100, 150; 1 = balanced; 0 = the data as they are")
    g.add_argument("--split-seed", type=int, default=0, help="of the order of the classes and of the images drawn; the paper averages three splits")
    g.add_argument("--index-file", default="", help="training images: .npy indices (SDCLR's splits of CIFAR), or lines 'path class' under --data-dir (imagenet100-lt)")
    g.add_argument("--test-file", default="", help="test images of imagenet100-lt: lines 'path class' under --data-dir")
    # >>> shared: data
    g.add_argument("--data-dir", default="", help="where relative paths start, and where a video set's annotation files lie; empty = beside the captions file")
    g.add_argument("--video-dir", default="", help="folder of the videos, which are found by path, file name or stem; empty = --data-dir")
    g.add_argument("--image-column", default="", help="column (or tar extension) of the images or videos; empty = the usual names")
    g.add_argument("--label-column", default="", help="column of the class, for kNN evaluation; empty = the usual names")
    g.add_argument("--max-bad-fraction", type=float, default=0.01, help="stop when more than this part of the samples tried cannot be read, 0..1")
    g.add_argument("--workers", type=int, default=4, help="loader processes per process; 0 = none. Sets in memory use none; the samples never depend on it")
    g.add_argument("--image-size", type=int, default=224, help="pixels of a side")
    g.add_argument("--frames", type=int, default=12, help="T, frames of a clip; CLIP4Clip 12, of paragraphs 64")
    g.add_argument("--frame-sampling", choices=["uniform", "middle", "random"], default="uniform", help="of videos: frames from the first to the last; of the middles of T segments; random in each segment (in training)")
    g.add_argument("--frame-cache", default="", metavar="DIR", help="decode each video once, to one small JPEG there")
    g.add_argument("--clips", type=int, nargs=3, default=[2000, 300, 300], metavar=("TRAIN", "VAL", "TEST"), help="clips of moving-emoji")
    g.add_argument("--caption-noise", type=float, default=0.0, help="part of moving-emoji's training clips that get the captions of another, 0..1")
    # <<< shared
    g = p.add_argument_group("model")
    g.add_argument("--embed-dim", type=int, default=128, help="D, output of the projection head; paper 128")
    g.add_argument("--head-norm", choices=["batch", "none"], default="batch", help="BatchNorm in SimCLR's head, as the authors' code; none = the default towers' promise")
    # >>> shared: model
    g.add_argument("--image-encoder", default="small", help="small, resnet18-cifar, any timm name, or a transformers id or folder (CLIP: its vision tower)")
    g.add_argument("--pretrained", action=yesno, default=True, help="start from published weights; --no-pretrained = from scratch")
    g.add_argument("--init-from", default="", help="a .safetensors, .pt, .bin or run folder whose tensors are loaded first, for the model or one encoder; timm weights are then not downloaded")
    g.add_argument("--image-stats", choices=["encoder", "imagenet", "clip", "half"], default="encoder", help="mean and std of the pixels; encoder = what its weights saw")
    g.add_argument("--eval-resize", choices=["crop", "squash"], default="crop", help="evaluation view: short side and centre crop, or both sides (CC3M trainer)")
    # <<< shared
    # >>> shared: optimisation
    g = p.add_argument_group("optimisation")
    g.add_argument("--epochs", type=float, default=30.0, help="passes over the training set; the paper's value is its recipe's default")
    g.add_argument("--max-steps", type=int, default=0, help="optimiser steps instead of --epochs; every schedule spans them; 0 = off")
    g.add_argument("--batch-size", type=int, default=256, help="N, GLOBAL: split over processes, sets the negatives; the paper's value is its recipe's default")
    g.add_argument("--chunk-size", type=int, default=0, help="examples encoded at a time on each process: the full batch's gradient, a chunk's memory; 0 = all")
    g.add_argument("--allow-batchnorm-chunks", action=yesno, default=False, help="let BatchNorm see chunks: an approximation")
    g.add_argument("--optimizer", choices=["adamw", "adam", "sgd"], default="adamw", help="sgd takes --beta1 as its momentum")
    g.add_argument("--lr", type=float, default=2e-4, help="peak learning rate")
    g.add_argument("--lr-end", type=float, default=1e-5, help="last learning rate of the cosine")
    g.add_argument("--lr-schedule", choices=["cosine", "constant"], default="cosine", help="after the warm-up")
    g.add_argument("--warmup-epochs", type=float, default=1.0, help="epochs of linear warm-up; at most a tenth of the run")
    g.add_argument("--weight-decay", type=float, default=0.02, help="of matrices and kernels; none for biases, norms and scalars")
    g.add_argument("--beta1", type=float, default=0.9, help="Adam's first moment")
    g.add_argument("--beta2", type=float, default=0.999, help="Adam's second moment")
    g.add_argument("--eps", type=float, default=1e-8, help="Adam's epsilon; CLIP4Clip 1e-6")
    g.add_argument("--grad-clip", type=float, default=0.0, help="largest global gradient norm; 0 = off")
    # <<< shared
    g = p.add_argument_group("method")
    g.add_argument("--loss", choices=["simclr", "moco", "sdclr"], default="simclr", help="the contrastive method under the schedule")
    g.add_argument("--schedule", choices=["cos", "step", "random", "oscillating", "fixed"], default="cos", help="of the temperature over the epochs; fixed = --tau-min throughout")
    g.add_argument("--tau-min", type=float, default=0.1, help="tau-, > 0; paper 0.1 (the fixed baseline: 0.2)")
    g.add_argument("--tau-max", type=float, default=1.0, help="tau+, >= tau-; paper 1.0, Table 5 0.5")
    g.add_argument("--period", type=float, default=400.0, help="T, epochs of a full period; paper 400")
    g.add_argument("--stop-at-phase", type=float, default=0.0, help="end at epoch (floor(epochs / T) - 1 + this) T of the same schedules, 0..1; paper about 0.7 (1,880 of 2,000); 0 = run to the end")
    g.add_argument("--tau-head", type=float, default=0.0, help="coarse supervision: tau of anchors of frequent classes (paper 1.0); 0 = off; needs --tau-tail")
    g.add_argument("--tau-tail", type=float, default=0.0, help="coarse supervision: tau of the other anchors (paper 0.1)")
    g.add_argument("--head-part", type=float, default=0.5, help="part of the classes, largest first, that counts as head there; paper 5 of 10")
    g.add_argument("--queue-size", type=int, default=10_000, help="K, keys in MoCo's queue; paper 10,000")
    g.add_argument("--momentum", type=float, default=0.99, help="of MoCo's key encoder, 0..1")
    g.add_argument("--key-splits", type=int, default=8, help="groups in which MoCo's keys are encoded where the encoder has BatchNorm")
    g.add_argument("--prune", type=float, default=0.9, help="SDCLR: part of each layer's weights that the second branch loses, 0..1; SDCLR 0.9")
    g = p.add_argument_group("views")
    g.add_argument("--crop-min", type=float, default=0.1, help="smallest area of the random crop; CIFAR 0.1, ImageNet 0.08")
    g.add_argument("--flip", type=float, default=0.5, help="probability of a mirror image")
    g.add_argument("--jitter-p", type=float, default=0.8, help="probability of the colour jitter; paper 0.8")
    g.add_argument("--brightness", type=float, default=0.4, help="strength; paper 0.4")
    g.add_argument("--contrast", type=float, default=0.4, help="strength; paper 0.4")
    g.add_argument("--saturation", type=float, default=0.4, help="strength; paper 0.4")
    g.add_argument("--hue", type=float, default=0.1, help="strength, 0..0.5; paper 0.1")
    g.add_argument("--grey", type=float, default=0.2, help="probability of grey; paper 0.2")
    g.add_argument("--blur", type=float, default=0.0, help="probability of a Gaussian blur; ImageNet 0.5")
    g = p.add_argument_group("evaluation")
    g.add_argument("--train-features", choices=["clean", "augmented"], default="clean", help="views of the training images in kNN and probes; the authors' notebook: augmented (crop with padding, flip) on CIFAR")
    g.add_argument("--eval-epoch", default="", metavar="auto|N", help="whose weights are tested; empty = of the end; auto = of the best val evaluation after step 0 (App. A.2); N = the run ends after epoch N of the same schedules")
    # >>> shared: parse
    g.add_argument("--eval-batch", type=int, default=256, help="images, or frames of clips, at a time in evaluation")
    p.set_defaults(**{k: v for k, v in RECIPES.get(chosen.dataset, RECIPES["own"]).items() if k != "recipe"})
    p.set_defaults(dataset=chosen.dataset, **LOSSES.get(chosen.loss, {}))
    saved = {}
    if chosen.resume:
        try:
            saved = common.run_args(chosen.resume, p.prog[:-3])
        except UserError as error:
            p.error(str(error))
        p.set_defaults(**{k: v for k, v in saved.items() if k not in ("resume", "run_name")})
    args = p.parse_args(argv)
    common.check_args(p, args, saved)
    # <<< shared
    for name in ("tau_min", "period"):
        if not getattr(args, name) > 0:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be > 0")
    parts = ("crop_min", "flip", "jitter_p", "grey", "blur", "momentum", "prune", "stop_at_phase", "head_part")
    for name, high in (dict.fromkeys(parts, 1) | {"hue": 0.5}).items():
        if not 0 <= getattr(args, name) <= high:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be between 0 and {high}")
    epoch, auto = args.eval_epoch, args.eval_epoch == "auto"
    number = float(epoch) if epoch.replace(".", "", 1).isdecimal() else 0.0
    for wrong, message in (
            (args.schedule != "fixed" and not args.tau_max >= args.tau_min, f"--tau-max {args.tau_max}: must be at least --tau-min {args.tau_min}"),
            ((args.tau_head > 0) != (args.tau_tail > 0) or min(args.tau_head, args.tau_tail) < 0, f"--tau-head {args.tau_head} and --tau-tail {args.tau_tail}: give both, > 0, or neither"),
            (args.imbalance_ratio and not args.imbalance_ratio >= 1, f"--imbalance-ratio {args.imbalance_ratio}: must be at least 1, or 0 to leave the data as they are"),
            (args.stop_at_phase and args.epochs < args.period, f"--stop-at-phase {args.stop_at_phase}: --epochs {args.epochs:g} hold no full --period {args.period:g}"),
            (epoch and not auto and not 0 < number <= (math.inf if args.max_steps else args.epochs), f"--eval-epoch {epoch}: must be auto, or > 0 and at most --epochs {args.epochs:g}"),
            (epoch and args.stop_at_phase, f"--eval-epoch {epoch}: --stop-at-phase {args.stop_at_phase} says it already; give one of them"),
            (auto and not args.eval_every, "--eval-epoch auto: needs --eval-every > 0, the steps between the evaluations it chooses from"),
            (saved and auto != (saved.get("eval_epoch") == "auto"), "--eval-epoch: a resumed run can neither begin nor end auto, which keeps the best weights from the start"),
            (args.loss == "moco" and args.chunk_size, "--chunk-size: MoCo's loss is linear in the batch and its key encoder has no gradient; lower --batch-size instead"),
            (args.queue_size < 1 or args.key_splits < 1, "--queue-size and --key-splits must be at least 1")):
        if wrong:
            p.error(message)
    return args


# ======================================================= METHOD ======================================================
def temperature(epoch, schedule="cos", tau_min=0.1, tau_max=1.0, period=400, seed=0):
    """tau of an epoch (Eq. 5 for 'cos'; Table 5 for the others). A pure function: the same on any process and after a resume.

    Args: epoch: from 0, constant inside an epoch.   period: T in epochs.   seed: of 'random'.
    Returns: float. cos and oscillating (linear triangle) start at tau_max; step is tau_min for the first half of a period, tau_max for
        the second; random is uniform in (tau_min, tau_max) from (seed, epoch); fixed is tau_min.
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
    return tau_min


@fp32
def nt_xent(z1, z2, tau):
    """NT-Xent (Eq. 1, averaged): each of the 2B views has one positive and 2N - 2 negatives.

    Args: z1, z2: (B, D) two views, row i of both from one image.   tau: float, or (B,) per anchor image; divides the cosine.
    Returns: scalar fp32, mean over the 2B local anchors; a random guess is about ln(2N - 1).
    """
    a, b = normalize(z1), normalize(z2)                                    # (B, D)
    all_a, all_b, target = gather(a), gather(b), positive_index(a)         # (N, D), (N, D), (B,)
    itself = F.one_hot(target, len(all_a)).bool()                          # (B, N)
    tau = tau[:, None] if torch.is_tensor(tau) and tau.ndim else tau       # (B, 1)

    def one_way(x, own_view, other_view):
        negatives = (x @ own_view.T).masked_fill(itself, -math.inf)        # (B, N), the anchor itself left out
        logits = torch.cat([x @ other_view.T, negatives], 1) / tau         # (B, 2N)
        return F.cross_entropy(logits, target)
    return (one_way(a, all_a, all_b) + one_way(b, all_b, all_a)) / 2


@fp32
def moco_loss(q, k, queue, tau):
    """InfoNCE of a query against its key and a queue of earlier keys (He et al. 2020).

    Args: q, k: (B, D) query and key of the same image; k gets no gradient.   queue: (K, D).   tau: float or (B,).
    Returns: scalar fp32, mean over the B local queries; a random guess is about ln(K + 1).
    """
    q, k, queue = normalize(q), normalize(k.detach()), normalize(queue)    # (B, D), (B, D), (K, D)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1)     # (B, 1 + K)
    tau = tau[:, None] if torch.is_tensor(tau) and tau.ndim else tau
    return F.cross_entropy(logits / tau, torch.zeros(len(q), dtype=torch.long, device=q.device))


def coarse_temperature(labels, head_classes, tau_head, tau_tail):
    """tau of each anchor by its class's frequency (Sec. 3.3): (B,) long, a set of classes -> (B,) float."""
    head = torch.isin(labels, torch.as_tensor(sorted(head_classes), device=labels.device))  # (B,) bool
    return torch.where(head, tau_head, tau_tail)


def prune_masks(module, part):
    """SDCLR: which weights the second branch keeps, the largest 1 - part of each layer by magnitude: {name: bool mask}."""
    out = {}
    for name, weight in module.named_parameters():
        if weight.ndim > 1:
            keep = max(1, round(weight.numel() * (1 - part)))
            limit = weight.detach().abs().flatten().kthvalue(weight.numel() - keep + 1).values
            out[name] = weight.detach().abs() >= limit
    return out


# ------------------------------------------------------- modules -----------------------------------------------------
class Queue(nn.Module):
    """First in, first out: the last K keys, equal on all processes, in the checkpoint."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))   # pushed so far

    @torch.no_grad()
    def push(self, k):
        """Add this step's keys of all processes: (B, D) local rows."""
        k, size = gather(normalize(k)), len(self.keys)                     # (N, D)
        at = (self.count + torch.arange(len(k), device=k.device))[-size:] % size
        self.keys[at] = k[-size:]
        self.count += len(k)

    def get(self):
        """The valid keys (min(pushed, K), D)."""
        return self.keys[:int(self.count.clamp(max=len(self.keys)))]


class Contrastive(nn.Module):
    """Encoder and projection head; views (V * B, 3, S, S) -> z (V * B, D). The head is discarded in evaluation."""

    def __init__(self, tower, dim, norm, linear=False):
        super().__init__()
        width = tower.vision.width
        bn = nn.BatchNorm1d if norm == "batch" else nn.Identity
        self.tower = tower
        self.head = nn.Linear(width, dim) if linear else nn.Sequential(  # MoCo: one linear layer; SimCLR: the authors' head
            nn.Linear(width, width), bn(width), nn.ReLU(), nn.Linear(width, dim, bias=False), bn(dim))

    def forward(self, pixels, masks=None, half=None):
        """masks, half: the views from row `half` on go through the pruned encoder (SDCLR)."""
        if masks is None:
            return self.head(self.tower(pixels)[2])
        weights = {n: w * masks[n] if n in masks else w for n, w in self.tower.named_parameters()}
        features = [self.tower(pixels[:half])[2], functional_call(self.tower, weights, (pixels[half:],))[2]]
        return self.head(torch.cat(features))


# ======================================================= main ========================================================
def main(args):
    """One run: set-up, data, model, resume, loop, save, evaluate. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    started = time.time()
    options = common.data_options(args, index_file=args.index_file, test_file=args.test_file)
    sets = common.labelled_sets(args.dataset, args.imbalance_ratio, args.split_seed, **{k: v for k, v in options.items() if v})
    train, sizes = sets["train"], np.bincount(sets["train"].labels, minlength=len(sets["train"].label_names))       # (classes,)
    order = np.argsort(-sizes, kind="stable")                              # classes, largest first
    head_classes = set(order[:round(args.head_part * len(order))].tolist())
    steps_per_epoch = common.epoch_length(train, args.batch_size)
    total = args.max_steps or max(1, round(args.epochs * steps_per_epoch))
    warmup = min(round(args.warmup_epochs * steps_per_epoch), total // 10)
    last = total                                                           # the schedules span `total` wherever the run ends
    if args.eval_epoch not in ("", "auto"):
        last = min(total, max(1, round(float(args.eval_epoch) * steps_per_epoch)))
    if args.stop_at_phase:
        last = min(total, round((math.floor(args.epochs / args.period + 1e-9) - 1 + args.stop_at_phase) * args.period * steps_per_epoch))

    # ------------------------------------------- set-up --------------------------------------------------------------
    accelerator = common.set_up(args)
    device, processes = accelerator.device, common.world()
    folder = common.start_run(args, "temperature_schedules")

    # ------------------------------------------- model and optimiser -------------------------------------------------
    spec = {k: getattr(args, k) for k in ("image_encoder", "image_size", "image_stats", "eval_resize")} | dict(text_encoder="", embed_dim=0)
    tower, transform = common.build_model(spec, None, args.pretrained, "" if args.resume else args.init_from)
    learner = Contrastive(tower, args.embed_dim, args.head_norm, linear=args.loss == "moco")
    learner = common.batchnorm_policy(learner.to(device), args)
    extra = nn.ModuleDict()                                                # what lives beside DDP: MoCo's key encoder and queue, the best weights
    if args.loss == "moco":
        extra["key"] = Contrastive(common.build_model(dict(spec), None, False)[0], args.embed_dim, args.head_norm, linear=True)
        extra["key"].load_state_dict(learner.state_dict())
        extra["key"].requires_grad_(False)
        extra["queue"] = Queue(args.queue_size, args.embed_dim)
        extra.to(device)
    if args.eval_epoch == "auto":
        extra["best"] = copy.deepcopy(learner.tower).requires_grad_(False)  # the best on val so far; here it is in every checkpoint
    optimizer = common.make_optimizer(args, [learner])
    model = torch.compile(learner) if args.compile else learner
    model, optimizer = accelerator.prepare(model, optimizer)

    # ------------------------------------------- resume --------------------------------------------------------------
    step, tensors, positions, tracker_id, wall_before, checkpoint = 0, {}, {}, None, 0.0, common.latest_checkpoint(folder)
    if args.resume and checkpoint:
        state, tensors, positions = common.load_checkpoint(checkpoint, learner, extra, optimizer.optimizer, accelerator.scaler)
        step, tracker_id, wall_before = state["step"], state["tracker_id"], state["wall_s"]
        say(f"resumed {checkpoint} at step {step} of {last}")
    if step > last:
        raise UserError(f"--resume {args.resume}: its checkpoint is at step {step}, beyond the {last} steps that --max-steps or --epochs ask for")
    log = common.Log(folder, accelerator, args.tracker, tracker_id, vars(args), step, last)

    # ------------------------------------------- views and batches ---------------------------------------------------
    view = common.Augment(args.image_size, args.crop_min, args.flip, args.jitter_p, args.brightness, args.contrast, args.saturation, args.hue, args.grey, args.blur)
    batches = common.Batches(train, [view, view], transform, args.batch_size, args.seed, step, last, device, args.workers, args.max_bad_fraction, folder, positions, args.compile)
    labels = torch.from_numpy(np.asarray(train.labels))
    tau_of = lambda epoch: temperature(epoch, args.schedule, args.tau_min, args.tau_max, args.period, args.seed)
    evaluator = common.ClassEvaluator(learner.tower, transform, sets, device, args)
    ends = tau_of(0), tau_of(max(0, (last - 1) // steps_per_epoch))
    common.banner("temperature_schedules.py", args, RECIPES.get(args.dataset, RECIPES["own"])["recipe"], learner.tower, learner.head, train, {args.dataset: {s: sets[s] for s in ("val", "test")}},
                  folder, accelerator, total, steps_per_epoch, warmup, {
        "loss": args.loss, "temperature": f"{args.schedule}, {args.tau_min:g} .. {args.tau_max if args.schedule != 'fixed' else args.tau_min:g}, period {args.period:g} epochs; first {ends[0]:.3f}, last {ends[1]:.3f}"
                                          + (f"; coarse: {args.tau_head:g} for {len(head_classes)} head classes, {args.tau_tail:g} for the others" if args.tau_head else "")
                                          + (f"; ends at step {last:,}, epoch {last / steps_per_epoch:g}" if last < total else ""),
        "classes": f"{len(sizes)}, {sizes.max()} to {sizes[sizes > 0].min()} images"})
    if common.rank() == 0:
        common.write_json(folder / "class_counts.json", {train.label_names[c]: int(sizes[c]) for c in order})

    def encode(inputs):
        """{a, b: (b, 3, S, S)} -> z of both views, or of the query alone for MoCo: (b, D) each."""
        if args.loss == "moco":
            return (model(inputs["a"]),)
        pixels = torch.cat([inputs["a"], inputs["b"]])                     # one forward for both views
        return model(pixels, masks, len(inputs["a"])).chunk(2) if args.loss == "sdclr" else model(pixels).chunk(2)

    @torch.no_grad()
    def validate():
        """Log the val split and the coverage of the sphere. Returns the row whose weights are tested if the run ends here: the last or, with auto, the best (App. A.2)."""
        val, _, pieces = evaluator("val")
        mean = float(np.mean([m["mean_per_class"] for m in val[args.dataset].values() if isinstance(m, dict)]))
        learner.head.eval()
        part, images = coverage(learner.head(pieces[args.dataset]["train_features"].to(device)))
        learner.head.train()
        log.write({"step": step, "samples_seen": step * args.batch_size, "eval": val, "val_mean": mean, "coverage": part, "sphere": images})
        if args.eval_epoch != "auto":
            return log.rows[-1]
        best = max(log.rows, key=lambda r: (r["step"] > 0, r.get("val_mean", -1)))  # the first of equals
        if best is log.rows[-1]:
            extra["best"].load_state_dict(learner.tower.state_dict())
        return best

    # ------------------------------------------- loop ----------------------------------------------------------------
    masks = {k: v.bool().to(device) for k, v in tensors.items()}           # SDCLR: as they were at the start of this epoch
    if step in (0, last):                                                  # the left end of every curve; or a finished run
        chosen = validate()
    bar = tqdm(total=last, initial=step, disable=common.rank() > 0, dynamic_ncols=True, unit="step", mininterval=1.0)
    learner.train(), extra.train()
    logged, clock = step, time.perf_counter()
    for batch in batches:
        epoch = step // steps_per_epoch
        lr = common.cosine_lr(step, total, warmup, args.lr, args.lr_end, args.lr_schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        tau = tau_of(epoch)
        anchor_tau = coarse_temperature(labels[batch["index"]].to(device), head_classes, args.tau_head, args.tau_tail) if args.tau_head else tau  # (B,) or float
        if args.loss == "sdclr" and (step % steps_per_epoch == 0 or not masks):
            masks = prune_masks(learner.tower, args.prune)
        inputs = dict(zip("ab", batch["views"]))

        keys = encode_keys(extra["key"], inputs["b"], args.key_splits, args.seed + step) if args.loss == "moco" else None  # (B, D)

        def loss_fn(z1, z2=None):
            if args.loss == "moco":                                        # the first step has no negatives yet but the batch's own keys
                loss = moco_loss(z1, keys, extra["queue"].get() if step else gather(keys), anchor_tau)
            else:
                loss = nt_xent(z1, z2, anchor_tau)
            common.check_finite(loss, step, tau, [z for z in (z1, z2) if z is not None], batch["keys"])
            return loss

        loss, embeddings = common.backward_in_chunks(encode, inputs, loss_fn, model, accelerator, args.chunk_size)
        if args.grad_clip:
            accelerator.clip_grad_norm_(learner.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.loss == "moco":
            update_momentum(extra["key"], learner, args.momentum)
            extra["queue"].push(keys)
        step += 1

        # --------------------------------------- log, evaluate, save -------------------------------------------------
        due = common.due(step, last, args)
        if due["log"]:
            health = common.embedding_health(*(gather(normalize(e)) for e in (embeddings[0], embeddings[1] if keys is None else keys)))
            log.write(common.log_row(step, batch, loss, lr, tau, args, (time.perf_counter() - clock) / (step - logged), processes) | health)
            logged, clock = step, time.perf_counter()
            bar.set_postfix(loss=f"{log.rows[-1]['loss']:.3f}", tau=f"{tau:.3f}", samples=f"{log.rows[-1]['samples_per_s']:.0f}/s", refresh=False)
        bar.update()
        if due["eval"] or step == last:
            chosen = validate()
        if due["save"]:
            common.save_checkpoint(folder, step, learner, extra, optimizer.optimizer, accelerator.scaler,
                                   {"tracker_id": log.tracker_id, "wall_s": wall_before + time.time() - started}, masks, batches.positions)
        if due["eval"] or due["save"]:
            logged, clock = step, time.perf_counter()                      # the speed of training alone
    bar.close()

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)               # the last evaluation in float32, as eval.py does it
    if "best" in extra:
        learner.tower.load_state_dict(extra.pop("best").state_dict())
    if common.rank() == 0:
        common.save_model(folder, learner.tower, None, spec)
    common.barrier()
    learner.tower.load_state_dict(load_file(folder / "model.safetensors"))  # every process tests what is on disk
    test, chance, pieces = evaluator("test")
    summary = common.summarize(args, folder, step, steps_per_epoch, wall_before + time.time() - started, learner, extra, batches, chosen["eval"], test, chance, evaluator.errors, processes)
    summary |= {"eval_epoch": chosen["step"] / steps_per_epoch, "eval_epoch_val": chosen["val_mean"]}
    if common.rank() == 0:
        common.write_json(folder / "summary.json", summary)
        draw(folder, log, pieces[args.dataset], sizes, tau_of, steps_per_epoch, args)
    say(f"tested: the weights of epoch {summary['eval_epoch']:g}, mean of the four val accuracies {summary['eval_epoch_val']:.1f} %")
    say(common.report(summary, folder, common.class_table))
    common.end_run(accelerator)
    return summary


@torch.no_grad()
def encode_keys(encoder, pixels, splits, seed):
    """MoCo's keys (B, D). With BatchNorm: in random order and in groups, so that no key shares the batch statistics of its own query."""
    if not common.has_batchnorm(encoder):
        return encoder(pixels)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed)).to(pixels.device)
    groups = order.chunk(min(splits, max(1, len(pixels) // 2)))
    return torch.cat([encoder(pixels[g]) for g in groups])[order.argsort()]


@torch.no_grad()
def update_momentum(encoder, online, momentum):
    """key <- momentum key + (1 - momentum) online, for weights; buffers are the key encoder's own."""
    for key, query in zip(encoder.parameters(), online.parameters()):
        key.lerp_(query, 1 - momentum)


def coverage(z, bins=500):
    """Fig. 1, each z (M, D) to the nearest of `bins` random directions: the effective part of these, exp(entropy) / bins, and the images of each, fullest first."""
    sphere = normalize(torch.randn(bins, z.shape[1], generator=torch.Generator().manual_seed(0))).to(z)              # (bins, D)
    count = (normalize(z) @ sphere.T).argmax(1).bincount().sort(descending=True).values                              # (up to bins,)
    return torch.special.entr(count / count.sum()).sum().exp().item() / bins, count[count > 0].tolist()


def draw(folder, log, pieces, sizes, tau_of, steps_per_epoch, args):
    """Pictures: curves; class sizes with tau beside them; the paper's Figures 1 to 5. pieces: what ClassEvaluator kept of the test."""
    common.draw_curves(log, [
        ("loss", "loss", {"loss": "loss"}), ("temperature", "tau", {"tau": "tau"}), ("learning rate", "lr", {"lr": "lr"}),
        ("cosine", "mean over the batch", {"views of one image": "pos_cos", "other images": "neg_cos"}), ("spread (0 = collapsed, 1 = whole sphere)", "std x sqrt(D)", {"view 1": "std_image"}),
        ("kNN@1, val", "%", {"top-1": f"eval/{args.dataset}/knn@1/top1", "tail": f"eval/{args.dataset}/knn@1/tail"})], folder / "curves.png")

    fig, (left, right) = common.figure(2)                                  # class sizes, with the schedule beside them
    left.bar(range(len(sizes)), np.sort(sizes)[::-1], width=1.0)
    left.set(title="training images of each class", xlabel="class, largest first", ylabel="images")
    right.stairs([tau_of(e) for e in range(max(1, math.ceil(log.rows[-1]["step"] / steps_per_epoch)))], baseline=None, color="tab:orange")
    right.set(title=f"temperature ({args.schedule}) and coverage of the sphere", xlabel="epoch", ylim=(0, None))
    right.set_ylabel("tau", color="tab:orange")
    steps, part = log.column("coverage")
    beside = right.twinx()
    beside.plot(np.array(steps) / steps_per_epoch, part, "o-", ms=3)
    beside.set_ylabel("effective part of 500 directions", color="tab:blue")
    common.save_figure(fig, folder / "classes.png")

    unit, truth = normalize(pieces["train_features"]), pieces["train_labels"]                                     # (M, width), at most 4,000 training images
    some = np.random.default_rng(0).permutation(len(unit))[:4000]
    unit, truth = unit[some], truth[some]
    off = (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)].numpy()  # cosines to the negatives
    edges = np.linspace(-1, 1, 101)
    middle, histogram = (edges[1:] + edges[:-1]) / 2, np.histogram(off, edges)[0]
    fig, axes = common.figure(3, 2)
    shade = lambda step: str(0.85 * (1 - step / log.rows[-1]["step"]))     # of grey: light = early, black = the end
    for row in log.rows:
        if "sphere" in row:
            axes[0].plot(row["sphere"], color=shade(row["step"]))
    axes[0].set(title="coverage of the sphere (Fig. 1)", xlabel="of 500 directions, fullest first; light = early", ylabel="images nearest to it", yscale="log")
    for tau in sorted({args.tau_min, (args.tau_min + args.tau_max) / 2, args.tau_max} if args.schedule != "fixed" else {args.tau_min, 0.5, 1.0}):
        single = np.exp((middle - 1) / tau)
        axes[1].plot(middle, single / single.max(), label=f"tau {tau:g}")
        axes[2].plot(middle, single * histogram / max((single * histogram).max(), 1e-30), label=f"tau {tau:g}")
    for ax, title in ((axes[1], "loss share of one negative (Fig. 2a)"), (axes[2], "of all negatives together (Fig. 2c)")):
        ax.set(title=title, xlabel="cosine to the anchor", ylabel="share, maximum 1", xticks=(-1, -0.5, 0, 0.5, 1))
        ax.legend(frameon=False, fontsize=8)
    order = np.argsort(-sizes, kind="stable")
    present = [c for c in order if (truth == c).any()]
    centred = (unit - unit.mean(0)).numpy()
    plane = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T  # (M, 2)
    axes[3].scatter(*plane.T, s=4, color="lightgrey")
    for c, colour, name in ((present[0], "tab:red", "head"), (present[-1], "tab:blue", "tail")):
        axes[3].scatter(*plane[truth == c].T, s=14, color=colour, label=f"{name}: {pieces['names'][c]} ({sizes[c]})")
    axes[3].legend(frameon=False, fontsize=8)
    axes[3].set(title="PCA, a head and a tail class (Fig. 3)", xlabel="first direction", ylabel="second")
    steps, values = log.column(f"eval/{args.dataset}/few-shot/top1")
    at = 1 - -np.array(steps[1:]) / steps_per_epoch % args.period / args.period                                   # a period ends at 1, not at 0
    axes[4].scatter(at, values[1:], s=20, color=[shade(s) for s in steps[1:]])
    axes[4].set(title="few-shot probe over the period (Fig. 4)", xlabel="phase of the period; light = early", ylabel="val top-1, %", xlim=(-0.05, 1.05))
    beside, grid = axes[4].twinx(), np.linspace(0, 1, 101)
    beside.plot(grid, [tau_of(g * args.period) for g in grid], color="tab:orange")
    beside.set_ylabel("tau", color="tab:orange")
    axes[5].bar(range(len(order)), [pieces["per_class"].get(int(c), 0) for c in order], width=1.0)
    axes[5].set(title="kNN@1 per class (Fig. 5)", xlabel="class, largest first", ylabel="test accuracy, %")
    common.save_figure(fig, folder / "figures.png")


if __name__ == "__main__":
    with common.clean_exit():
        main(parse_args())
