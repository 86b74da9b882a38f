"""TS: Temperature Schedules for Self-Supervised Contrastive Methods on Long-Tail Data (Kukleva et
al., ICLR 2023).

Two views of an image attract each other and all other images repel; there are no labels, and most
images are of a few classes. At a low temperature only the nearest negatives count: embeddings
spread over the sphere, which helps rare classes. At a high one many negatives count: embeddings
form clusters, which helps frequent classes. TS alternates between both: the temperature follows a
cosine over the epochs. Nothing is added to the model.

Equations (s_ij: cosine of anchor i and candidate j; t: epoch, from 0)
    (1)   L_c = mean_i -log( exp(s_ii / tau) / (exp(s_ii / tau) + sum_{j != i} exp(s_ij / tau)) ),
          printed as a sum over i with N - 1 negatives; as in the code
          of N images the 2N - 2 other views are negatives (SimCLR)                  nt_xent
          or a queue of earlier keys (MoCo)                                          moco_loss
    (5)   tau(t) = (tau+ - tau-) (1 + cos(2 pi t / T)) / 2 + tau-                    temperature
    Sec. 3.3  tau_i = tau_head if the class of i is frequent, else tau_tail   coarse_temperature

Symbols
    u, v        z1, z2 (q, k)     (B, D)  embeddings of two views, of this process; D = 128
    tau-, tau+  tau_min, tau_max  ()      divide the cosine; paper 0.1, 1.0
    T           period            ()      epochs; paper 400
                queue             (K, D)  MoCo's keys of earlier batches; paper K = 10,000

Commands
    accelerate launch temperature_schedules.py                       # emoji, two CPU cores
    accelerate launch temperature_schedules.py --baseline            # fixed temperature, 0.2
    accelerate launch temperature_schedules.py --dataset cifar10-lt  # the paper's; --loss moco
    accelerate launch temperature_schedules.py --dataset folder/ --imbalance-ratio 100  # own data

docs/temperature_schedules.md: commands for every table, recipes, differences, results.
variants/sdclr.py: the baseline SDCLR. To try an idea of your own, copy this file and edit it
(docs/forking.md).
"""

import copy
import functools
import math

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Augment, Evaluator, GradCache, Parser, Run, Temperature, UserError, batchnorms, clean_exit,
    fp32, fraction, gather, int_ge1, normalize, per_anchor, positive_float, positive_index,
    print_main, row_blocks, to_device, world_size)

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


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


# row_blocks saves memory and changes no value: it calls the function with b rows of the positional
# tensors at a time, and with all of the keyword arguments
@row_blocks
def nt_xent_of_view(anchor, target, tau, *, same_view, other_view):
    """Mean of Eq. 1 over the anchors of one view: (b, D), (b,), tau -> ().

    Args: same_view, other_view: (N, D) views of all images: that of the anchors, and the other.
    """
    same_sim = anchor @ same_view.T                                        # (b, N)
    other_sim = anchor @ other_view.T                                      # (b, N)
    logits = torch.cat([other_sim, same_sim], dim=1) / tau                 # (b, 2N)
    anchor_column = len(same_view) + target[:, None]                       # (b, 1)
    # an anchor is not its own negative
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
    target = positive_index(z1, z2)                                        # (B,)
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
    """tau of each image by the frequency of its class (Sec. 3.3).

    Args:
        labels: class numbers, any shape: of all training images in main.
        head_classes: numbers of the classes with tau_head; all others have tau_tail.
    Returns: temperatures of labels' shape.
    """
    head = torch.as_tensor(sorted(head_classes), device=labels.device)     # (classes,)
    return torch.where(torch.isin(labels, head), tau_head, tau_tail)


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


class EncoderAndHead(nn.Module):
    """An image encoder, which is evaluated, and a projection head, which is not.

    Args:
        encoder: TwoTower, whose features go into the head.
        head: module, (B, width) -> (B, D).
    """

    def __init__(self, encoder, head):
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, pixels):
        """Views (V * B, [T,] 3, S, S) -> z (V * B, D)."""
        _, _, features = self.encoder(pixels)                              # (V * B, width)
        return self.head(features)


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
        numbers = self.count + torch.arange(len(k), device=k.device)       # (N,) oldest first
        rows = numbers[-size:] % size                                      # (min(N, K),)
        self.keys[rows] = k[-size:]
        self.count += len(k)


@torch.no_grad()
def encode_keys(model, pixels, seed, num_groups=8):
    """MoCo's keys of a batch: (B, [T,] 3, S, S) -> (B, D).

    With BatchNorm a key is encoded in a random group of the batch (Shuffling BN of MoCo): else a
    query could recognise its key by batch statistics that both have.

    Args:
        seed: of the groups.
        num_groups: of the global batch. Groups of up to 8 GPUs have one size, but which keys share
            a group, and with it the gradient, depends on the number of processes.
    """
    if not batchnorms(model):
        return model(pixels)
    # on a CPU, without SyncBatchNorm, a single group would have the statistics of the same images
    # as the queries
    fewest = 1 if pixels.is_cuda else 2
    groups_per_process = max(fewest, num_groups // world_size())
    # BatchNorm needs at least two images in a group
    groups_per_process = min(groups_per_process, max(1, len(pixels) // 2))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    order = to_device(order, pixels.device)                                # (B,)
    keys = [model(pixels[group]) for group in order.tensor_split(groups_per_process)]
    return torch.cat(keys)[order.argsort()]                                # (B, D)


@torch.no_grad()
def update_momentum(key_model, model, momentum):
    """key <- momentum key + (1 - momentum) query, for the weights.

    BatchNorm's buffers are the key model's own.
    """
    for key, query in zip(key_model.parameters(), model.parameters(), strict=True):
        key.lerp_(query, 1 - momentum)


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here and in contrastive/engine/flags.py; 'source'
# says whose values they are (docs/temperature_schedules.md).
CIFAR = dict(
    source="paper; optimiser and views from the authors' code",
    image_encoder="resnet18-cifar", image_size=32, image_stats="imagenet",
    epochs=2000.0, batch_size=512, warmup_fraction=10 / 2000,
    optimizer="sgd", lr=0.5, lr_end=1e-6, weight_decay=1e-4,
    betas=[0.9, 0.999],                                                    # 0.9: SGD's momentum
    grad_clip=0.0,
    imbalance_ratio=100.0, train_features="augmented", eval_epoch="best",
    save_every=1000, log_every=50)
IMAGENET100 = CIFAR | dict(
    image_encoder="resnet50", image_size=224, epochs=800.0,
    warmup_fraction=10 / 800, crop_min=0.08, blur=0.5,
    imbalance_ratio=0.0, train_features="clean", eval_epoch="last",
    eval_crop=0.875, shot_limits=[100, 20])
FASHION = CIFAR | dict(
    source="ours; as cifar10-lt", epochs=500.0, warmup_fraction=10 / 500, period=100.0,
    jitter_p=0.0, grey=0.0)
SMALL = dict(
    source="ours; small encoder from scratch",
    epochs=30.0, warmup_fraction=2 / 30, weight_decay=0.05, betas=[0.9, 0.999], grad_clip=0.0,
    period=12.0, queue_size=1024, head_norm="none", decay_all=False, crop_min=0.3)
EMOJI = SMALL | dict(
    source="ours", image_size=32,
    hue=0.02,                                                              # hue tells classes apart
    save_every=100, eval_every=50, log_every=5)
MOVING = EMOJI | dict(
    source="ours; as emoji, classes = verbs", frames=4, flip=0.0, crop_min=0.6)
SCENES = EMOJI | dict(
    epochs=60.0, warmup_fraction=2 / 60, hue=0.5, imbalance_ratio=100.0,
    eval_every=0, log_every=20, save_every=1000)
RECIPES = {
    "emoji": EMOJI,
    "cifar10-lt": CIFAR,
    "cifar100-lt": CIFAR,
    "imagenet100-lt": IMAGENET100,
    "fashion-mnist-lt": FASHION,
    "moving-emoji": MOVING,
    "emoji-scenes": SCENES,
    "own": SMALL}
BASELINE = dict(schedule="fixed", tau=0.2)                                 # Sec. 4.3


# Flags that all scripts share are in contrastive/engine/flags.py. Precedence: default < recipe
# (--dataset, --recipe) < preset (--baseline) < saved flags of --resume < command line.
def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "TS: a temperature schedule for SimCLR and MoCo on long-tail images.",
                    texts=False)
    method = parser.add_argument_group("method")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, a fixed temperature, with everything "
                             "else equal: sets --schedule fixed --tau 0.2")
    method.add_argument("--loss", choices=["simclr", "moco"], default="simclr",
                        help="SimCLR's NT-Xent, or MoCo's loss with a queue of keys")
    method.add_argument("--schedule", default="cos",
                        choices=["cos", "step", "random", "oscillating", "fixed", "coarse"],
                        help="course of the temperature over the epochs: a cosine (the paper's "
                             "method), the others of Table 5, or fixed at --tau; or coarse "
                             "supervision: --tau-max for the half of the classes that have the "
                             "most images, --tau-min for the others")
    method.add_argument("--tau-min", type=positive_float, default=0.1,
                        help="lowest temperature of a schedule; paper 0.1")
    method.add_argument("--tau-max", type=positive_float, default=1.0,
                        help="highest temperature of a schedule; paper 1.0, Table 5 0.5")
    method.add_argument("--period", type=positive_float, default=400.0,
                        help="T, epochs of a full period of the schedule; paper 400")
    parser.add_tau_flags(method, tau=0.2, tau_clamp=(0.01, 10.0),
                         note="with --schedule fixed; paper 0.2")
    method.add_argument("--queue-size", type=int_ge1, default=10_000,
                        help="K, keys in MoCo's queue; paper 10,000")
    method.add_argument("--momentum", type=fraction, default=0.99,
                        help="momentum of MoCo's key encoder, 0..1; the paper does not say")
    method.add_argument("--head-norm", choices=["batch", "none"], default="batch",
                        help="BatchNorm in SimCLR's head; authors' code: batch")
    method.add_argument("--stop-at-phase", type=fraction, default=0.0,
                        help="end the run at this phase of the last full period, 0..1, on "
                             "unchanged schedules; paper about 0.7 (1,880 of 2,000 epochs); 0 = "
                             "run to the end")
    parser.add_long_tail_flags()
    return parser.parse(argv, RECIPES, BASELINE, check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    is_fixed = args.schedule == "fixed"
    has_period = args.schedule in ("cos", "step", "oscillating")
    parser.require(not args.baseline or is_fixed,
                   f"--schedule {args.schedule}: --baseline has a fixed temperature; leave out one "
                   "of the two")
    parser.only(not is_fixed, "with a --schedule other than fixed", "--tau-min", "--tau-max")
    parser.only(has_period or args.stop_at_phase, "with --schedule cos, step or oscillating, or "
                "with --stop-at-phase", "--period")
    parser.only(is_fixed, "with --schedule fixed", "--tau", "--learnable-tau")
    parser.check_tau_flags(args)
    parser.only(args.loss == "moco", "with --loss moco", "--queue-size", "--momentum")
    parser.only(args.loss != "moco", "with --loss simclr", "--head-norm")
    parser.require(args.tau_min <= args.tau_max,
                   f"--tau-max {args.tau_max}: must be at least --tau-min {args.tau_min}")
    parser.check_long_tail_flags(args)
    parser.only(args.eval_epoch == "last", "with --eval-epoch last", "--stop-at-phase")


# ======================================================= main =====================================
def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    splits = common.labelled_splits(args)                                  # {train, val, test, ...}
    train = splits["train"]
    eval_sets = {args.dataset: common.val_and_test(splits)}
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up
    sizes = np.bincount(train.labels, minlength=len(train.label_names))    # (classes,) of train
    if args.eval_epoch == "best" and args.eval_every <= 0:
        args.eval_every = 20 * steps.per_epoch  # ours; App. A.2 chooses an epoch on val

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps,        # log and checkpoints
              last=phase_step(args, steps))                                # --stop-at-phase
    encoder, _, transform = common.build_model(args, train, run)           # evaluated and saved
    start_norms_at_one(encoder)  # as the authors' code; timm's start at 0
    if args.loss == "moco":
        head = nn.Linear(encoder.vision.width, args.embed_dim)
    else:
        head = simclr_head(encoder.vision.width, args.embed_dim, args.head_norm)
    model = EncoderAndHead(encoder, head).to(accelerator.device)
    # outside DDP: average_gradients does for it what DDP does for the model
    fixed_tau = Temperature(                                               # of --schedule fixed
        args.tau, args.learnable_tau, args.tau_clamp).to(accelerator.device)
    checkpoint_parts = {"head": head, "tau": fixed_tau}
    if args.loss == "moco":
        key_model = copy.deepcopy(model).requires_grad_(False)
        queue = Queue(args.queue_size, args.embed_dim, args.seed).to(accelerator.device)
        checkpoint_parts |= {"key_model": key_model, "queue": queue}
    optimizer = common.make_optimizer([model, fixed_tau], args)
    if args.decay_all:
        decay_vectors(optimizer, args.weight_decay)
    parameters = [*model.parameters(), *fixed_tau.parameters()]

    # >>> shared: prepare (the same lines in all scripts)
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # without DDP
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    if args.compile:
        model = torch.compile(model)
    # <<< shared
    run.resume(encoder, optimizer, **checkpoint_parts)                     # no-op without --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size,            # encodes in chunks
                           encode=functools.partial(encode, model))

    # ------------------------------------------- views --------------------------------------------
    view = training_view(args)
    batches = run.batches([view, view], transform)                         # view1, view2

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        encoder, None, transform, eval_sets, common.probe_images(train, args),
        device=accelerator.device, args=args, few_shot=splits.get("few-shot"))
    if args.schedule == "coarse":
        labels = torch.from_numpy(np.asarray(train.labels))                # (M,) training images
        coarse_tau = coarse_temperature(labels, most_frequent_half(sizes),                # (M,)
                                        tau_head=args.tau_max, tau_tail=args.tau_min)
    run.start(evaluator,
              pair=("view1", "view2"),                                     # their names in the log
              after_val=functools.partial(common.add_val_columns, head=head),     # for the figures
              score="val_mean",                                            # of --eval-epoch best
              **common.long_tail_banner(args, steps, run.last, sizes))
    for batch in batches:  # "views": (B, [T,] 3, S, S) each; "rows": B numbers of training images
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        if args.schedule == "fixed":
            tau = fixed_tau()                                              # a number, or () learnt
        elif args.schedule == "coarse":
            tau = to_device(coarse_tau[batch["rows"]], accelerator.device)                # (B,)
        else:
            epoch = run.step // steps.per_epoch
            tau = temperature(                                             # a number
                epoch, args.schedule, args.tau_min, args.tau_max, args.period, args.seed)

        view1, view2 = batch["views"]                                      # (B, [T,] 3, S, S) each
        if args.loss == "simclr":
            z1, z2 = grad_cache.encode(view1=view1, view2=view2)           # (B, D)
            loss = nt_xent(z1, z2, tau)                                    # ()
        elif args.loss == "moco":
            # the keys in the precision of the queries
            with accelerator.autocast(), common.tf32(grad_cache.uses_tf32):
                z2 = encode_keys(key_model, view2, args.seed + run.step)   # (B, D)
            (z1,) = grad_cache.encode(view1=view1)                         # (B, D)
            loss = moco_loss(z1, z2, queue.keys, tau)                      # ()
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")

        accelerator.backward(loss)
        common.average_gradients(fixed_tau.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        fixed_tau.clamp()
        if args.loss == "moco":
            update_momentum(key_model, raw_model, args.momentum)
            queue.push(z2)
        if args.schedule == "coarse":
            tau = tau.mean()                                               # () for the log
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, {"tau": tau, "L_c": loss}, [z1, z2])

    # ------------------------------------------- save and evaluate --------------------------------
    if args.eval_epoch == "best":  # App. A.2: the epoch of the first split serves the others
        print_main("for other splits: --split-seed or --index-file, and --eval-epoch "
                   f"{run.best_step / steps.per_epoch:g}")
    return run.finish(figures="ts")


# ------------------------------------------------------- data and views --------------------------
def training_view(args):
    """The random view, drawn twice of each image."""
    return Augment(args.image_size, args.crop_min, args.flip, jitter_p=args.jitter_p,
                   brightness=args.jitter, contrast=args.jitter, saturation=args.jitter,
                   hue=args.hue, grey=args.grey, blur=args.blur,
                   squash=args.eval_resize == "squash")


def encode(model, **views):
    """Encodes all views in one forward: (b, [T,] 3, S, S) each -> z of each, (b, D)."""
    z = model(torch.cat(list(views.values())))                             # (V * b, D)
    return z.chunk(len(views))


def start_norms_at_one(model):
    """Sets the weights of BatchNorms that start at 0, the last of a block in timm, to 1."""
    for norm in batchnorms(model):
        if not norm.weight.any():
            nn.init.ones_(norm.weight)


def decay_vectors(optimizer, weight_decay):
    """Gives biases and norms weight decay, too; a learnt tau, which is a scalar, has none."""
    for group in optimizer.param_groups:
        if group["params"][0].ndim == 1:
            group["weight_decay"] = weight_decay


# ------------------------------------------------------- schedule ---------------------------------
def phase_step(args, steps):
    """The optimizer step at which --stop-at-phase ends a run; None = as --eval-epoch says.

    The schedules still span all steps (Sec. 4.3).
    Raises: UserError if the run has no full period.
    """
    if not args.stop_at_phase:
        return None
    num_epochs = steps.total / steps.per_epoch
    num_periods = math.floor(num_epochs / args.period + 1e-9)
    if num_periods == 0:
        raise UserError(f"--stop-at-phase {args.stop_at_phase}: a run of {num_epochs:g} epochs "
                        f"holds no full --period {args.period:g}; give more epochs or a shorter "
                        "period")
    epoch = (num_periods - 1 + args.stop_at_phase) * args.period
    return min(steps.total, round(epoch * steps.per_epoch))


def most_frequent_half(sizes):
    """The head classes of coarse supervision, a set: the half that has the most images, 5 of 10 in
    the paper."""
    order = np.argsort(-sizes, kind="stable")                              # largest first
    return set(order[:round(len(order) / 2)].tolist())


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
