"""MAMA: Meta-optimized Angular Margin Contrastive Framework for Video-Language Representation
Learning (Nguyen et al., ECCV 2024).

A caption seldom describes all of its video, so a pair should come near but not coincide: a margin
is subtracted from its angle, which shrinks the gradient of near pairs and ends it inside the
margin. Some pairs do not match and some concepts are rare, so a small network gives each pair a
weight, from its loss. The network learns by looking ahead: the encoders take a virtual step with
its weights, and it lowers their loss after that step on a few clean examples (the meta-data).

Equations (s_ij = cos(lambda_ij): cosine of video i and text j)
    (1, 4)      L_v2t,i = -log( e^(cos([lambda_ii - mu]_+) / tau) / sum_j e^(s_ij / tau) ), in which
                the pair keeps s_ii if lambda_ii > pi / 2     angular_cosine, angular_margin_loss
    (3)         L_i = L_v2t,i + L_t2v,i                                       angular_margin_loss
    (6)         mu(k) = a0 / (a1 + exp(-a2 k))                                             margin
    (7, 8)      w_i = MLP_theta(L_i),  L = 1/B sum_i w_i L_i                      WeightNet, main
    (9)         Theta^ = Theta - alpha/B sum_j w_j grad L_j, a virtual step
    (10, 12)    theta <- theta - beta grad_theta 1/M sum_i L_i^meta(Theta^)     weightnet_gradient
    (11)        Theta <- a step on 1/B sum_i w_i L_i, with the w_i of the new theta           main
    (13)        <grad L^meta, grad L_j>                    meta_direction, directional_derivative
    (14, 15)    density and distance of each frame of a video                          key_frames

Symbols
    v, t          video, text           (B, D)  embeddings of this process
    L_i, w_i      sample_loss, weight   (B,)    nats; 0..1
    tau, mu       tau, mu               ()      divides the cosine, paper 1; radians, paper 0.2
    alpha, beta   virtual_lr, meta_lr   ()      rates of the virtual step and of the network
Commands
    accelerate launch mama.py                               # moving emoji, some captions swapped
    accelerate launch mama.py --baseline                    # neither margin nor weights
    accelerate launch mama.py --dataset msrvtt --data-dir ANNOTATIONS --video-dir VIDEOS
    accelerate launch mama.py --dataset clips.csv --video-dir VIDEOS      # own: video, caption

docs/mama.md: commands for every table, recipes, differences from the paper, results. Tables 1 and
2: variants/mama_qa.py. To try an idea of your own, copy this file and edit it; docs/forking.md.
"""

import copy
import functools
import math
import random
import warnings
from collections.abc import Callable
from typing import NamedTuple

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, below_one, between, clean_exit, focal_weights,
    fp32, fraction, gather, int_ge1, l2rw_weights, nonnegative_float, normalize, per_anchor,
    positive_float, positive_index, rank, rate, row_blocks, spl_weights)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel


# ======================================================= METHOD ===================================
def margin(step, a0=2.0, a1=10.0, a2=0.1):
    """mu = a0 / (a1 + exp(-a2 step)) in radians (Eq. 6): from 0.182 to 0.2 in about 60 steps.

    The values are those of Sec. 4.3; with those of Sec. 4.1 (a0 = 0.2, a2 = -0.1) it would fall.
    """
    exponent = min(-a2 * step, 700.0)                                      # exp does not overflow
    return a0 / (a1 + math.exp(exponent))


def angular_cosine(sim, mu):
    """cos([lambda - mu]_+) of cosines sim = cos(lambda), and sim if lambda > pi / 2 (after Eq. 4).

    It is computed without acos, whose slope at 1 is infinite.

    Args:
        sim: cosines, any shape.
        mu: margin in radians, 0 to pi / 2: a number, or a tensor that broadcasts with sim.
    Returns: cosines of sim's shape; the gradient is finite everywhere.
    """
    if torch.is_tensor(mu):
        cos_mu, sin_mu = mu.cos(), mu.sin()
    else:
        cos_mu, sin_mu = math.cos(mu), math.sin(mu)
    sine = ((1 - sim) * (1 + sim)).clamp(min=1e-12).sqrt()                 # sin(lambda)
    cosine = sim * cos_mu + sine * sin_mu                                  # cos(lambda - mu)
    cosine = torch.where(sim > cos_mu, torch.ones_like(sim), cosine)       # 1 inside the margin
    return torch.where(sim < 0, sim, cosine)


# row_blocks cuts the positional tensors into blocks of b rows, so that no large (B, N) matrix is
# kept for the backward; keyword arguments stay whole
@row_blocks
def angular_margin_per_anchor(anchor, target, tau, mu, *, candidates):
    """The margin loss of each anchor (after Eq. 4): (b, D), (b,), tau, mu, (N, D) -> (b,)."""
    sim = anchor @ candidates.T                                            # (b, N)
    target_column = target[:, None]                                        # (b, 1)
    pair = angular_cosine(sim.gather(1, target_column), mu)                # (b, 1)
    logits = sim.scatter(1, target_column, pair) / tau                     # (b, N)
    return F.cross_entropy(logits, target, reduction="none")               # (b,)


@fp32
def angular_margin_loss(video, text, tau, mu):
    """L_v2t,i + L_t2v,i over the global batch with an angular margin (Eq. 3).

    Args:
        video, text: (B, D) embeddings of this process; row i of both is a positive pair.
        tau: temperature > 0: a number, () or (B,) for each pair.
        mu: margin in radians, 0 to pi / 2: a number, () or (B,). 0 is InfoNCE.
    Returns: (B,) one loss for each pair, float32. A random guess is about 2 ln N without a margin.
    """
    video, text = normalize(video), normalize(text)                        # (B, D)
    all_videos, all_texts = gather(video), gather(text)                    # (N, D)
    tau = per_anchor(tau, video)                                           # () or (B, 1)
    mu = per_anchor(mu, video, "mu", positive=False)                       # () or (B, 1)
    target = positive_index(video)                                         # (B,)
    video_to_text = angular_margin_per_anchor(video, target, tau, mu, candidates=all_texts)
    text_to_video = angular_margin_per_anchor(text, target, tau, mu, candidates=all_videos)
    return video_to_text + text_to_video                                   # (B,) the sum of Eq. 3


# ------------------------------------------------------- weights ----------------------------------
class WeightNet(nn.Module):
    """w_i = MLP(L_i) (Eq. 7): losses (B,) -> weights (B,) between 0 and 1, about 1/2 at the start.

    Args:
        hidden: number of hidden units; MW-Net 100.
        reach: at the start the kink of each unit lies at a loss between 0 and this, in nats. With
            PyTorch's biases three quarters would lie below 1.
    """

    def __init__(self, hidden=100, reach=10.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(),
                                    nn.Linear(hidden, 1), nn.Sigmoid())
        first, last = self.layers[0], self.layers[2]
        with torch.no_grad():
            first.bias.copy_(-first.weight[:, 0] * reach * torch.rand(hidden))
            last.weight.mul_(0.1)                                          # nearly constant
            last.bias.zero_()

    def forward(self, losses):
        return self.layers(losses[:, None])[:, 0]


def weightnet_gradient(  # noqa: PLR0917
        losses, parameters, batch, meta_batch, weight_net, virtual_lr, method="forward"):
    """Gradient of the meta loss after a virtual step with respect to the parameters of the weight
    network (Eqs. 9, 10, 12, 13).

    The virtual step is plain gradient descent on 1/B sum_j w_j L_j, whatever the optimiser is.

    Args:
        losses: function (parameters, batch) -> (B,) differentiable losses L_j of this process. It
            must return the same for the same arguments, also with dropout.
        parameters: {name: tensor} Theta of the encoders, which are not changed.
        batch, meta_batch: second arguments of `losses`.
        weight_net: losses (B,) -> weights (B,); it sees L_j without gradient.
        virtual_lr: alpha.
        method: 'forward', with about 1.3 times the memory of a plain step, or 'second-order', with
            3.4 times, which keeps the graph of a gradient.
    Returns: d meta / d p for each p of weight_net.parameters(), in order, the mean over processes.
    """
    if method not in ("forward", "second-order"):
        raise ValueError(f"method={method!r}: give 'forward' or 'second-order'")
    second_order = method == "second-order"
    leaves, theta = as_leaves(parameters), list(weight_net.parameters())
    # fused attention has neither second nor forward-mode derivatives
    with sdpa_kernel(SDPBackend.MATH):
        sample_loss = losses(leaves, batch)                                # (B,)
        weight = weight_net(sample_loss.detach())                          # (B,)
        step_weight = weight if second_order else weight.detach()          # (B,)
        objective = (step_weight * sample_loss).mean()                     # ()
        gradient = gradients(objective, leaves.values(), create_graph=second_order)

        averaged = common.average([g.detach() for g in gradient])
        virtual = {}                                                       # Theta^, Eq. 9
        for (name, p), g in zip(leaves.items(), averaged):
            virtual[name] = p.detach() - virtual_lr * g
        direction = meta_direction(losses, virtual, meta_batch)            # like Theta^

        if second_order:
            # d meta / d g, where g is the gradient of the virtual step
            g_gradient = [-virtual_lr * d for d in direction.values()]
            network_gradient = gradients(gradient, theta, g_gradient)
        else:
            agreement = directional_derivative(losses, leaves, batch, direction)         # (B,)
            weight_gradient = -virtual_lr * agreement / len(sample_loss)   # (B,)
            network_gradient = gradients(weight, theta, weight_gradient)   # Eq. 12
    return common.average(network_gradient)


def meta_direction(losses, parameters, meta_batch):
    """Gradient of the meta loss 1/M sum_i L_i^meta: {name: tensor}, the mean over processes.

    Args: losses, parameters, meta_batch: as in weightnet_gradient.
    """
    leaves = as_leaves(parameters)
    with sdpa_kernel(SDPBackend.MATH):
        meta_loss = losses(leaves, meta_batch).mean()                      # ()
        gradient = gradients(meta_loss, leaves.values())
    return dict(zip(leaves, common.average(gradient)))


def directional_derivative(losses, parameters, batch, direction):
    """<direction, grad L_j> of each pair of this process (Eq. 13): (B,), in one forward pass.

    Forward mode keeps no graph. The result is positive where a step on L_j lowers the meta loss.

    Args:
        losses, parameters, batch: as in weightnet_gradient.
        direction: {name: tensor}, as meta_direction returns it.
    """
    with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        dual = {}
        for name, p in parameters.items():
            dual[name] = forward_ad.make_dual(p.detach(), direction[name])
        sample_loss, tangent = forward_ad.unpack_dual(losses(dual, batch))           # (B,), (B,)
    if tangent is None:                        # no parameter has a part in the losses
        return torch.zeros_like(sample_loss)
    return tangent


def as_leaves(parameters):
    """{name: tensor} that share the memory of these and start a new graph."""
    return {name: p.detach().requires_grad_() for name, p in parameters.items()}


def gradients(outputs, inputs, output_gradients=None, create_graph=False):
    """torch.autograd.grad with zeros for inputs that have no part in the outputs."""
    return torch.autograd.grad(outputs, list(inputs), output_gradients, create_graph=create_graph,
                               materialize_grads=True)


# ------------------------------------------------------- key frames, for tools/caption.py ---------
def key_frames(features, k=6, q=12):
    """Key frames of a video by density peaks (Eqs. 14 and 15), in the order of time.

        d_j = exp(-mean of |h_l - h_j|^2 over the k nearest other frames)                      (14)
        gamma_j = min of |h_l - h_j|^2 over the denser frames l; of the densest its largest    (15)

    Eq. 15 is printed with the condition under its min reversed and one distance without a square.
    Of two equally dense frames the earlier one counts as denser, so that a still shot has one peak.

    Args:
        features: (n, D) of the frames in the order of time, finite.
        k: neighbours; at most the n - 1 others count.
        q: number of key frames.
    Returns: (min(q, n),) long, the frames with the largest d * gamma.
    Raises: ValueError for another shape, values that are not finite, or k or q below 1.
    """
    x = torch.as_tensor(features).detach().double()                        # (n, D)
    if x.ndim != 2 or not x.isfinite().all() or min(k, q) < 1:
        raise ValueError(f"features {tuple(x.shape)}, k {k}, q {q}: expected finite (n, D), k and "
                         "q at least 1")
    n = len(x)
    if n <= q:
        return torch.arange(n)
    # without a matrix product, so that equal frames have distance 0 exactly
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()   # (n, n)
    neighbours = distance.clone().fill_diagonal_(torch.inf)                # (n, n)
    nearest = neighbours.sort(dim=1).values[:, :min(k, n - 1)]             # (n, k)
    # the logarithm, since d itself is 0 beyond a distance of 745
    log_d = -nearest.mean(dim=1)                                           # (n,)
    time = torch.arange(n, device=x.device)                                # (n,)
    tie = (log_d == log_d[:, None]) & (time < time[:, None])               # (n, n)
    denser = (log_d > log_d[:, None]) | tie                                # (n, n) l denser than j
    gamma = distance.masked_fill(~denser, torch.inf).amin(dim=1)           # (n,)
    gamma = torch.where(denser.any(dim=1), gamma, distance.amax(dim=1))    # (n,)
    peaks = (log_d + gamma.log()).sort(descending=True, stable=True).indices             # (n,)
    return peaks[:q].sort().values.cpu()


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults; 'source' says whose values they are (docs/mama.md).
MSRVTT = dict(
    source="paper; schedule and betas from the authors' code",
    image_encoder="openai/clip-vit-base-patch16", text_encoder="openai/clip-vit-base-patch16",
    pretrained=True, embed_dim=512, image_size=224, frame_sampling="random",
    text_length=70, text_pooling="cls", unfold_captions=True,
    epochs=5.0, batch_size=4, lr=5e-6, lr_end=0.0, warmup_epochs=0.05, weight_decay=5e-2,
    meta_lr=5e-6, meta_batch_size=4, log_every=50, save_every=1000)
PARAGRAPHS = MSRVTT | dict(epochs=20.0, warmup_epochs=0.2, unfold_captions=False)
# of small encoders from scratch, and of published encoders that are frozen
SMALL = dict(tau=0.1, a0=0.1)
OWN = SMALL | dict(
    source="ours; small encoders from scratch", frames=8, frame_sampling="random",
    epochs=10.0, batch_size=64, warmup_epochs=1.0, crop_min=0.8, jitter=0.2)
EMOJI = OWN | dict(image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
MOVING = OWN | dict(
    source="ours; captions of 30 % of the training clips swapped, for the weights to find",
    image_size=32, frames=4, text_length=24, save_every=120, eval_every=100, caption_noise=0.3)
FROZEN = SMALL | dict(
    source="ours; published encoders, frozen: their projections learn",
    # the weights, and the text encoder all-MiniLM-L6-v2, are installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean", cached_views=4,
    max_steps=1000, batch_size=512, lr=3e-4, warmup_epochs=0.0, warmup_fraction=0.05,
    crop_min=0.35, flip=0.5, log_every=50)
RECIPES = {
    "moving-emoji": MOVING,
    "emoji": EMOJI,
    "msrvtt": MSRVTT,
    "didemo": PARAGRAPHS,
    "activitynet": PARAGRAPHS,
    "msvd": MSRVTT | dict(source="ours; as msrvtt"),
    "youcook2": MSRVTT | dict(source="ours; as msrvtt"),
    "howto100m": MSRVTT | dict(source="ours; as msrvtt", epochs=1.0, unfold_captions=False),
    "own": OWN,
    "frozen": FROZEN}
BASELINE = {True: dict(margin_schedule="none", weighting="none")}


def add_method_flags(parser, method):
    """Adds the flags of temperature, margin and weights to a group, and those of meta-data."""
    parser.add_tau_flags(method, tau=1.0, tau_clamp=[0.005, 1.0], note="paper 1")
    add = method.add_argument
    add("--margin-schedule", choices=["logistic", "constant", "none"], default="logistic",
        help="angular margin: that of Eq. 6, its limit a0 / a1 in all steps, or none")
    add("--a0", type=nonnegative_float, default=2.0,
        help="numerator of the margin, whose limit is a0 / a1 radians; paper 2")
    add("--a1", type=positive_float, default=10.0,
        help="denominator of the margin, which starts at a0 / (a1 + 1) radians; paper 10")
    add("--a2", type=between(-1000), default=0.1,
        help="growth of the margin per step; below 0 it falls to 0; paper 0.1")
    add("--weighting", default="meta", choices=["meta", "joint", "focal", "spl", "l2rw", "none"],
        help="weights of pairs: of a network that learns by looking ahead (meta), or with the "
             "encoders (joint, Table 8); focal, self-paced (spl) or L2RW (Table 6); all 1 (none)")
    add("--weight-hidden", type=int_ge1, default=100,
        help="hidden units of the network of --weighting meta and joint; MW-Net 100, authors' "
             "code 64")
    add("--focal-gamma", type=nonnegative_float, default=2.0,
        help="exponent of --weighting focal")
    add("--spl-start", type=fraction, default=0.5,
        help="fraction of the batch, 0..1, with which --weighting spl starts; it grows to 1")

    add = parser.add_argument_group("meta-data").add_argument
    add("--meta-set", default="train", metavar="train|val|FILE",
        help="where the meta-data come from: a split, or a file with the name (key) of a training "
             "example in each line")
    add("--meta-size", type=int_ge1, default=256,
        help="examples that --meta-set takes from train or val, balanced over classes if there are "
             "any; not in the paper")
    add("--meta-batch-size", type=between(2, 10**9, int), default=32,
        help="GLOBAL batch M of meta-data; not in the paper")
    add("--meta-lr", type=rate, default=2e-4,
        help="beta, learning rate of the network; paper: alpha for questions, not printed for "
             "retrieval; authors' code 1e-5, MW-Net 1e-3")
    add("--meta-weight-decay", type=rate, default=1e-3,
        help="weight decay of the network; authors' code 1e-3")
    add("--meta-beta1", type=below_one, default=0.9,
        help="decay of the first moment of the network's AdamW, 0..1; authors' code 0.9")
    add("--meta-beta2", type=below_one, default=0.98,
        help="decay of the second moment of the network's AdamW, 0..1; authors' code 0.98")
    add("--meta-eps", type=between(1e-30, 1e30), default=1e-12,
        help="epsilon of the network's AdamW, whose gradients are about 1e-8")
    add("--virtual-lr", type=rate, default=0.0,
        help="alpha, learning rate of the virtual step; 0 = the learning rate of the encoders at "
             "that step (paper)")
    add("--meta-every", type=int_ge1, default=1,
        help="steps between updates of the network; paper 1")


# Flags that all scripts share are in contrastive/engine/flags.py. Precedence: default < recipe
# (--dataset, --recipe) < preset (--baseline) < saved flags of --resume < command line.
def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "MAMA: angular margin and meta-learned sample weights.")
    method = parser.add_argument_group("method")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, InfoNCE, with everything else equal: "
                             "sets --margin-schedule none --weighting none")
    add_method_flags(parser, method)
    parser.add_view_flags(crop_min=1.0, flip=0.0, jitter=0.0, jitter_p=1.0)
    return parser.parse(argv, RECIPES, {"--baseline": BASELINE}, check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    is_plain = args.margin_schedule == "none" and args.weighting == "none"
    parser.require(not args.baseline or is_plain,
                   "--baseline is --margin-schedule none --weighting none; leave out --baseline, "
                   "or the other flags of margin and weights")
    check_method_flags(parser, args)


def check_method_flags(parser, args):
    """Refuses contradictory flags of add_method_flags, and those without effect."""
    parser.check_tau_flags(args)
    parser.only(args.margin_schedule != "none", "with --margin-schedule logistic or constant",
                "--a0", "--a1")
    parser.only(args.margin_schedule == "logistic", "with --margin-schedule logistic", "--a2")
    parser.require(args.a0 / args.a1 <= math.pi / 2,
                   f"--a0 {args.a0:g} --a1 {args.a1:g}: the margin a0 / a1 must be at most pi / 2")

    parser.only(args.weighting in ("meta", "joint"), "with --weighting meta or joint",
                "--weight-hidden")
    parser.only(args.weighting == "focal", "with --weighting focal", "--focal-gamma")
    parser.only(args.weighting == "spl", "with --weighting spl", "--spl-start")
    parser.only(args.weighting == "meta", "with --weighting meta", "--meta-lr",
                "--meta-weight-decay", "--meta-beta1", "--meta-beta2", "--meta-eps",
                "--virtual-lr", "--meta-every")
    parser.only(has_meta_data(args), "with --weighting meta or l2rw, or --meta-set val",
                "--meta-set", "--meta-size", "--meta-batch-size")
    parser.only(args.meta_set in ("train", "val"), "with --meta-set train or val", "--meta-size")
    parser.require(not looks_ahead(args) or not args.chunk_size,
                   f"--chunk-size: --weighting {args.weighting} encodes the whole batch at once; "
                   "use a smaller --batch-size, or another --weighting")


def looks_ahead(args):
    """Whether the weights come from a step on meta-data (Algorithm 1, L2RW)."""
    return args.weighting in ("meta", "l2rw")


def has_meta_data(args):
    """Whether there are meta-data: for looking ahead; with --meta-set val always, so that all runs
    are evaluated on the same rows of val."""
    return looks_ahead(args) or args.meta_set == "val"


# ======================================================= main =====================================
def main(args):
    """One run: data, model, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    # before the processes start, so that a wrong path fails fast
    train, eval_sets = common.open_data(args)
    meta = None
    if has_meta_data(args):
        meta, eval_sets = common.meta_data(train, eval_sets, args)
    args = common.adjust_flags_to_encoder(args)      # a CLIP brings its text encoder
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    # None: the temperature is fixed
    limits = args.tau_clamp if args.learnable_tau else None
    temperature = Temperature(args.tau, limits).to(accelerator.device)
    # outside DDP: average_gradients does for these what DDP does for the model
    loss_modules = nn.ModuleList([temperature])
    weight_net, meta_optimizer = None, None
    if args.weighting in ("meta", "joint"):
        weight_net = WeightNet(args.weight_hidden).to(accelerator.device)
    if args.weighting == "joint":
        loss_modules.append(weight_net)
    if args.weighting == "meta":                                           # learns by Eq. 10 alone
        meta_optimizer = make_meta_optimizer(weight_net, args)
    optimizer = common.make_optimizer([model, loss_modules], args)
    parameters = [*model.parameters(), *loss_modules.parameters()]
    # shares the weights; `prepare` replaces `forward`, and the look-ahead needs the plain one
    plain_model = copy.copy(model)

    # >>> shared: prepare
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # evaluated and saved
    if args.compile:
        model = torch.compile(model)
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    # <<< shared
    run.resume(raw_model, optimizer, tau=temperature, weight_net=weight_net,
               meta_optimizer=meta_optimizer)                              # no-op without --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size)            # encodes in chunks

    # ------------------------------------------- views --------------------------------------------
    view = common.training_view(args)
    # with --freeze, features of the frozen encoders, computed once, replace pixels and tokens
    cache = common.open_feature_cache(args, run, raw_model, tokenizer, transform)
    tokenizer = cache.tokenizer
    batches = run.batches([view], transform, cache)
    meta_every = args.meta_every if args.weighting == "meta" else 1
    if looks_ahead(args):
        meta_batches = open_meta_batches(meta, view, transform, run, every=meta_every, cache=cache)

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args)
    pictured_steps = {max(1, round(k * steps.total / 4)) for k in range(5)}
    # PyTorch warns of a function that its own forward mode calls
    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)
    run.start(evaluator, shown=("L", "w", "tau"), **banner_lines(args, steps.total, meta))
    for batch in batches:  # "views": (B, [T,] 3, S, S) each; "captions", "draws", "keys": B each
        lr = common.learning_rate(run.step, steps, args)
        common.set_lr(optimizer, lr)
        inputs = inputs_of(batch, tokenizer)
        tau, mu = temperature(), margin_at(run.step, args)
        # L_i of Eq. 3; the look-ahead calls it, too
        loss_fn = functools.partial(angular_margin_loss, tau=tau, mu=mu)

        # look ahead, before the graph of the step itself takes memory
        look_ahead = None
        if looks_ahead(args) and run.step % meta_every == 0:
            meta_batch = next(meta_batches)
            batch["bad"] += meta_batch["bad"]                              # are listed, too
            losses = look_ahead_losses(plain_model, loss_fn, accelerator.device)
            look_ahead = LookAhead(losses, trained_parameters(plain_model), inputs,
                                   inputs_of(meta_batch, tokenizer))
        if args.weighting == "meta" and look_ahead:
            update_weight_net(weight_net, meta_optimizer, look_ahead, args.virtual_lr or lr)

        video, text, _ = grad_cache.encode(**inputs)                       # (B, D)
        sample_loss = loss_fn(video, text)                                 # (B,)
        if args.weighting == "meta":
            weight = weight_net(sample_loss.detach()).detach()             # (B,) of the new theta
        elif args.weighting == "joint":
            weight = weight_net(sample_loss.detach())                      # (B,) trained by L
        else:
            progress = run.step / steps.total
            weight = baseline_weight(args, sample_loss.detach(), progress, look_ahead)   # (B,)
        loss = (weight * sample_loss).mean()                               # () Eq. 8

        accelerator.backward(loss)
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()

        log_row = {"tau": tau, "mu": mu, "L": sample_loss.mean(), "w": weight.mean()}
        if run.logs_next():
            log_row.update(mismatch_columns(sample_loss, weight, train, batch["rows"]))
        if run.step + 1 in pictured_steps:                                 # for weights.png
            save_pairs(run, sample_loss, weight, train, batch["rows"])
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [video, text])

    # ------------------------------------------- save and evaluate --------------------------------
    if args.meta_set == "val":
        save_meta_names(run, meta)                                         # eval.py leaves them out
    save_training_texts(run, train, "captions")                            # for Figs. 2 and 5
    return run.finish(figures="mama")


def inputs_of(batch, tokenizer):
    """The inputs of the encoders: {'pixels': (B, [T,] 3, S, S), 'tokens': {name: (B, L)}}."""
    texts = common.pick(batch["captions"], batch["draws"])                 # B captions
    return {"pixels": batch["views"][0], "tokens": tokenizer(texts)}


def margin_at(step, args):
    """mu at an optimiser step, in radians."""
    if args.margin_schedule == "logistic":
        return margin(step, args.a0, args.a1, args.a2)
    if args.margin_schedule == "constant":
        return args.a0 / args.a1
    if args.margin_schedule == "none":
        return 0.0
    raise ValueError(f"--margin-schedule {args.margin_schedule} has no margin here")


def baseline_weight(args, sample_loss, progress, look_ahead):
    """The weights of the other methods of Table 6, or none: (B,) losses -> (B,).

    Args:
        progress: step / all steps, 0..1.
        look_ahead: LookAhead of the step, for L2RW.
    """
    if args.weighting == "focal":
        return focal_weights(sample_loss, args.focal_gamma)
    if args.weighting == "spl":
        return spl_weights(sample_loss, args.spl_start + (1 - args.spl_start) * progress)
    if args.weighting == "l2rw":
        losses, parameters, batch, meta_batch = look_ahead
        # at Theta, without a virtual step
        direction = meta_direction(losses, parameters, meta_batch)
        return l2rw_weights(directional_derivative(losses, parameters, batch, direction))
    if args.weighting == "none":
        return torch.ones_like(sample_loss)
    raise ValueError(f"--weighting {args.weighting} has no branch here")


# ------------------------------------------------------- looking ahead ----------------------------
def make_meta_optimizer(weight_net, args):
    """AdamW of the weight network.

    Its gradients are about 1e-8: hence a tiny eps, and a decay that is not added to them.
    """
    return torch.optim.AdamW(
        weight_net.parameters(), lr=args.meta_lr, betas=(args.meta_beta1, args.meta_beta2),
        eps=args.meta_eps, weight_decay=args.meta_weight_decay)


def update_weight_net(weight_net, meta_optimizer, look_ahead, virtual_lr):
    """A step of the weight network (Eqs. 9, 10 and 12). Args: look_ahead: LookAhead."""
    gradient = weightnet_gradient(*look_ahead, weight_net, virtual_lr)
    for p, g in zip(weight_net.parameters(), gradient):
        p.grad = g
    meta_optimizer.step()
    meta_optimizer.zero_grad()


class LookAhead(NamedTuple):
    """The first arguments of weightnet_gradient at a step."""

    losses: Callable  # (parameters, inputs) -> (B,)
    parameters: dict  # {name: tensor} of the encoders
    batch: dict  # the inputs of the step
    meta_batch: dict  # the inputs of its meta-data


def look_ahead_losses(model, loss_fn, device):
    """Makes the function `losses` of weightnet_gradient: (parameters, inputs) -> (B,), in float32.

    Args:
        model: the encoders, without DDP.
        loss_fn: function (video, text) -> (B,).
        device: of the model.
    """
    encode = functional_encoder(model, device)

    def losses(parameters, inputs):
        video, text, _ = encode(parameters, inputs)                        # (B, D)
        return loss_fn(video, text)                                        # (B,)
    return losses


def functional_encoder(model, device):
    """The model as a function of its parameters: (parameters, inputs) -> its outputs.

    Each call draws the same dropout. The weights, statistics and random state do not change.
    """
    random_state = common.random_state(device)
    devices = []                                                           # the CPU is implied
    if device.type == "cuda":
        devices.append(device)

    def encode(parameters, inputs):
        tensors = dict(parameters)
        for name, buffer in model.named_buffers():
            tensors[name] = buffer.clone()
        with torch.random.fork_rng(devices):
            common.set_random_state(random_state, device)
            return common.functional_call(model, tensors, inputs)
    return encode


def trained_parameters(model):
    """{name: parameter} of the model, without frozen ones."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def open_meta_batches(meta, view, transform, run, *, every, cache=None):
    """Iterator over the batches of meta-data from here to the last step, one in `every` steps."""
    args = run.args
    return iter(common.Batches(
        meta, [view], transform, args.meta_batch_size, args.seed,
        first=math.ceil(run.step / every), last=math.ceil(run.last / every), device=run.device,
        workers=min(2, args.workers), cache=cache))


def save_meta_names(run, meta):
    """Writes the names of meta-data that are taken from val to meta_data.json."""
    if rank() == 0:
        keys = {f"{run.args.dataset} val": meta.column("key")}
        common.write_json(run.folder / "meta_data.json", keys)


def save_training_texts(run, train, column):
    """Writes texts of the training set to training_texts.json, from which the frequencies of
    concepts are read; of more than 200,000 rows so many, drawn by a fixed seed.

    Args: column: 'captions', of which those of a clip are joined; 'question' or 'answer'.
    """
    if rank() > 0:
        return
    clips = (train.before_extra_pairs or train).folded()
    texts = list(clips.values_of_column(column))
    if column == "captions":
        texts = [" ".join(captions) for captions in texts]
    if len(texts) > 200_000:
        texts = random.Random(0).sample(texts, 200_000)
    common.write_json(run.folder / "training_texts.json", {"texts": texts})


# ------------------------------------------------------- banner and log ---------------------------
def banner_lines(args, total_steps, meta):
    """Lines of the banner: {title: text}."""
    start, end = margin_at(0, args), margin_at(total_steps, args)
    lines = {"margin": f"mu {start:.3g} .. {end:.3g} radians"}
    if meta is not None:
        lines["meta-data"] = meta.note
    return lines


@torch.no_grad()
def weighted_pairs(sample_loss, weight, data, rows):
    """(N, 3) of the global batch: loss, weight, and 1 if the caption is known to be another clip's.

    Args: rows: (B,) rows of data.
    """
    mismatched = torch.zeros_like(sample_loss)                             # (B,)
    noisy = data.column("noisy")                                           # (M,) bool, or None
    if noisy is not None:
        mismatched = torch.as_tensor(noisy[rows]).to(sample_loss)          # (B,)
    return gather(torch.stack([sample_loss, weight, mismatched], dim=1)).cpu()


def mismatch_columns(sample_loss, weight, data, rows):
    """Columns of the log: mean loss and weight of matched and of mismatched pairs. Collective.

    Args: as in weighted_pairs.
    Returns: {name: number}; {} if no pair is known to be mismatched.
    """
    sample_loss, weight, mismatched = weighted_pairs(sample_loss, weight, data, rows).unbind(1)
    columns = {}
    if mismatched.any():
        for name, value in (("matched", 0), ("mismatched", 1)):
            chosen = mismatched == value                                   # (N,) bool
            if chosen.any():
                columns[f"L_{name}"] = sample_loss[chosen].mean().item()
                columns[f"w_{name}"] = weight[chosen].mean().item()
    return columns


def save_pairs(run, sample_loss, weight, data, rows):
    """Writes the pairs of a step to pairs_STEP.safetensors. Collective. Args: as weighted_pairs."""
    pairs = weighted_pairs(sample_loss, weight, data, rows)                # (N, 3)
    if rank() == 0:
        common.write_tensors(run.folder / f"pairs_{run.step + 1}.safetensors", {"pairs": pairs})


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
