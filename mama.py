"""MAMA: Meta-optimized Angular Margin Contrastive Framework for Video-Language Representation
Learning (Nguyen et al., ECCV 2024).

A caption seldom describes all of its video: a margin is subtracted from the angle of a pair, so
that the two come near but need not coincide. Some pairs do not match and some concepts are rare: a
small network maps the loss of each pair to its weight. It is meta-learned: the encoders take a
virtual step with its weights, after which their loss on M clean meta-data should be lower.

Equations (s_ij = cos(lambda_ij): cosine of video i and text j; Theta: parameters of the encoders)
    (1)       L_v2t,i = -log( e^(m_i / tau) / (e^(m_i / tau) + sum_{j != i} e^(s_ij / tau)) )
    (after 4) m_i = cos([lambda_ii - mu]_+) if lambda_ii <= pi / 2, else s_ii   cosine_with_margin
    (3)       L_i = L_v2t,i + L_t2v,i                                          angular_margin_loss
    (6)       mu(k) = a0 / (a1 + exp(-a2 k))                                                margin
    (7)       w_i = MLP_theta(L_i)                                                       WeightNet
    (9)       Theta^ = Theta - alpha/B sum_j w_j grad L_j, a virtual step             virtual_step
    (13)      G_j = <grad 1/M sum_i L_i^meta(Theta^), grad L_j>             directional_derivative
    (10, 12)  theta <- an AdamW step along alpha/B sum_j G_j grad_theta w_j     weightnet_gradient
    (8, 11)   Theta <- a step on 1/B sum_i w_i L_i, with the w_i of the new theta             main
    (14, 15)  density and distance of each frame of a video     contrastive/papers/key_frames.py

Symbols
    v, t          video, text           (B, D)  embeddings of this process
    L_i, w_i      sample_loss, weight   (B,)    nats; 0..1
    L_i(Theta)    losses                        function (parameters, batch) -> (B,)
    tau, mu       tau, mu               ()      divides the cosine, paper 1; radians, paper 0.2
    alpha, beta   virtual_lr, meta_lr   ()      learning rates of the virtual step and of theta
Commands
    accelerate launch mama.py                               # moving emoji, some captions swapped
    accelerate launch mama.py --baseline                    # neither margin nor weights
    accelerate launch mama.py --dataset msrvtt --data-dir ANNOTATIONS --video-dir VIDEOS
    accelerate launch mama.py --dataset clips.csv --video-dir VIDEOS      # own data: video, caption

docs/mama.md: commands for every table, recipes, differences from the paper, results; questions:
variants/mama_qa.py. To try an idea, copy this file and edit it (docs/forking.md).
"""

import copy
import functools
import math

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, below_one, between, clean_exit, focal_weights,
    fp32, fraction, gather, int_ge1, l2rw_weights, nonnegative_float, normalize, per_anchor,
    positive_float, positive_index, rate, row_blocks, spl_weights)
# a public name of this file: the frames that are captioned (Eqs. 14 and 15)
from common import key_frames  # noqa: F401

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
    exponent = min(-a2 * step, 700.0)  # exp overflows at 710
    return a0 / (a1 + math.exp(exponent))


def cosine_with_margin(sim, mu):
    """cos([lambda - mu]_+) for sim = cos(lambda), and sim itself if lambda > pi / 2 (after Eq. 4).

    Computed as cos(lambda) cos(mu) + sin(lambda) sin(mu). As functions of the cosine, lambda and
    its sine have an infinite slope at 1: hence the clamp and the first `where`. At lambda = pi / 2
    the result jumps by sin(mu), as in the paper.

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


# row_blocks saves memory and changes no value: it calls the function with b rows of the positional
# tensors at a time, and with all of the keyword arguments
@row_blocks
def angular_margin_per_anchor(anchor, target, tau, mu, *, candidates):
    """L_v2t,i or L_t2v,i of each anchor (after Eq. 4): (b, D), (b,), tau, mu, (N, D) -> (b,)."""
    sim = anchor @ candidates.T                                            # (b, N)
    target_column = target[:, None]                                        # (b, 1)
    pair = cosine_with_margin(sim.gather(1, target_column), mu)            # (b, 1)
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
    target = positive_index(video, text)                                   # (B,)
    video_to_text = angular_margin_per_anchor(video, target, tau, mu, candidates=all_texts)
    text_to_video = angular_margin_per_anchor(text, target, tau, mu, candidates=all_videos)
    return video_to_text + text_to_video                                   # (B,) the sum of Eq. 3


# ------------------------------------------------------- weights ----------------------------------
class WeightNet(nn.Module):
    """w_i = MLP(L_i) (Eq. 7): losses (B,) -> weights (B,) between 0 and 1, about 1/2 at the start.

    Args:
        hidden: number of hidden units; MW-Net 100.
        max_loss: each hidden unit is initialised with its kink at a random loss from 0 to this, in
            nats. With PyTorch's own biases three quarters of the kinks would lie below 1.
    """

    def __init__(self, hidden=100, max_loss=10.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(),
                                    nn.Linear(hidden, 1), nn.Sigmoid())
        first, last = self.layers[0], self.layers[2]
        with torch.no_grad():
            first.bias.copy_(-first.weight[:, 0] * max_loss * torch.rand(hidden))
            last.weight.mul_(0.1)                                          # nearly constant
            last.bias.zero_()

    def forward(self, sample_loss):
        return self.layers(sample_loss[:, None])[:, 0]


# fused attention has neither forward-mode nor second derivatives
@sdpa_kernel(SDPBackend.MATH)
def weightnet_gradient(  # noqa: PLR0917
        losses, parameters, batch, meta_batch, weight_net, virtual_lr, method="forward"):
    """Gradient of the meta loss after a virtual step, for the weight network (Eqs. 9, 12, 13).

    Eq. 10 takes its step along it. The virtual step is plain gradient descent, whatever the
    optimiser is.

    Args:
        losses: function (parameters, batch) -> (B,), the differentiable L_j of this process. It
            must return the same for the same arguments, also with dropout.
        parameters: {name: tensor} of the encoders, Theta. They are not changed.
        batch, meta_batch: second arguments of `losses`.
        weight_net: losses (B,) -> weights (B,); it sees L_j without gradient.
        virtual_lr: alpha.
        method: 'forward': forward-mode derivatives, about 1.3 times the memory of a plain step; or
            'second-order': double backward, with the same result in more memory.
    Returns: d meta / d p for each p of weight_net.parameters(), in order, the mean over processes.
    """
    leaves = make_leaves(parameters)                                       # Theta
    sample_loss = losses(leaves, batch)                                    # (B,)
    weight = weight_net(sample_loss.detach())                              # (B,) Eq. 7
    gradient = loss_gradient((weight * sample_loss).mean(), leaves)        # {name: tensor}
    virtual = virtual_step(parameters, gradient, virtual_lr)               # Theta^, Eq. 9
    meta_loss = losses(virtual, meta_batch).mean()                         # ()
    meta_gradient = loss_gradient(meta_loss, virtual)                      # {name: tensor}
    if method == "forward":
        G = directional_derivative(losses, parameters, batch, meta_gradient)         # (B,) Eq. 13
    elif method == "second-order":
        G = double_backward_derivative(losses, parameters, batch, meta_gradient)     # (B,) Eq. 13
    else:
        raise ValueError(f"method={method!r}: give 'forward' or 'second-order'")
    # d meta / d w_j, times the number of processes, for the mean over them
    weight_gradient = -virtual_lr * G / len(G)                             # (B,)
    theta_gradient = torch.autograd.grad(                                  # Eq. 12
        weight, list(weight_net.parameters()), weight_gradient, materialize_grads=True)
    return common.average(theta_gradient)                                  # over processes


@sdpa_kernel(SDPBackend.MATH)
def meta_gain(losses, parameters, batch, meta_batch):
    """G_j at Theta itself, without a virtual step, for L2RW: (B,). Args: as weightnet_gradient."""
    leaves = make_leaves(parameters)                                       # Theta
    meta_loss = losses(leaves, meta_batch).mean()                          # ()
    meta_gradient = loss_gradient(meta_loss, leaves)                       # {name: tensor}
    return directional_derivative(losses, parameters, batch, meta_gradient)


def make_leaves(parameters):
    """The same values, of which autograd can take the gradient: {name: tensor}."""
    return {name: p.detach().requires_grad_() for name, p in parameters.items()}


def loss_gradient(loss, parameters):
    """Gradient of a loss (), the mean over processes: {name: tensor} like the parameters."""
    gradient = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, common.average(gradient)))


def virtual_step(parameters, gradient, virtual_lr):
    """Theta^ = Theta - alpha gradient (Eq. 9): {name: tensor}."""
    return make_leaves({name: p - virtual_lr * gradient[name] for name, p in parameters.items()})


def directional_derivative(losses, parameters, batch, direction):
    """<direction, grad L_j> of each pair of this process: (B,), in one forward pass.

    With the meta gradient as direction it is G_j (Eq. 13), which is positive where a step on L_j
    lowers the meta loss. Forward mode keeps no graph.

    Args:
        losses, parameters, batch: as in weightnet_gradient.
        direction: {name: tensor} like the parameters.
    """
    with torch.no_grad(), forward_ad.dual_level():
        dual = {}
        for name, p in parameters.items():
            dual[name] = forward_ad.make_dual(p.detach(), direction[name])
        return forward_ad.unpack_dual(losses(dual, batch)).tangent         # (B,)


def double_backward_derivative(losses, parameters, batch, direction):
    """The same as directional_derivative, by double backward."""
    leaves = make_leaves(parameters)                                       # Theta
    sample_loss = losses(leaves, batch)                                    # (B,)
    u = torch.ones_like(sample_loss, requires_grad=True)                   # (B,)
    gradient = torch.autograd.grad(                                        # of sum_j u_j L_j
        sample_loss, list(leaves.values()), u, create_graph=True, materialize_grads=True)
    # <direction, gradient> = sum_j u_j G_j, whose derivatives by u are the G_j
    (G,) = torch.autograd.grad(gradient, [u], list(direction.values()))              # (B,)
    return G


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here and in contrastive/engine/flags.py; 'source'
# says whose values they are (docs/mama.md).
MSRVTT = dict(
    source="paper; schedule and betas from the authors' code",
    image_encoder="openai/clip-vit-base-patch16", text_encoder="openai/clip-vit-base-patch16",
    pretrained=True, embed_dim=512, image_size=224, frame_sampling="random",
    text_length=70, text_pooling="cls", unfold_captions=True,
    epochs=5.0, batch_size=4, lr=5e-6, lr_end=0.0, warmup_fraction=0.01, weight_decay=5e-2,
    meta_lr=5e-6, meta_batch_size=4, log_every=50, save_every=1000)
PARAGRAPHS = MSRVTT | dict(epochs=20.0, unfold_captions=False)
# ours, for small encoders from scratch and for frozen ones; a0 makes mu 0.01 rad, since at tau 0.1
# and the paper's 0.2 rad few pairs would have a gradient
SMALL = dict(tau=0.1, a0=0.1)
OWN = SMALL | dict(
    source="ours; small encoders from scratch", frames=8, frame_sampling="random",
    epochs=10.0, batch_size=64, warmup_fraction=0.1, crop_min=0.8, jitter=0.2)
EMOJI = OWN | dict(image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
MOVING = OWN | dict(
    source="ours; captions of 30 % of the training clips swapped, for the weights to find",
    image_size=32, frames=4, text_length=24, save_every=120, eval_every=100, caption_noise=0.3)
FROZEN = SMALL | dict(
    source="ours; published encoders, frozen: their projections learn",
    # these weights and the text encoder, all-MiniLM-L6-v2, come with installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean",
    max_steps=1000, batch_size=512, lr=3e-4, warmup_fraction=0.05,
    crop_min=0.35, flip=0.5, log_every=50)
RECIPES = {
    "moving-emoji": MOVING,
    "emoji": EMOJI,
    "msrvtt": MSRVTT,
    "didemo": PARAGRAPHS,
    "activitynet": PARAGRAPHS,
    "msvd": MSRVTT | dict(source="ours; as msrvtt"),
    "youcook2": MSRVTT | dict(source="ours; as msrvtt"),
    "howto100m": MSRVTT | dict(
        source="ours; as msrvtt", epochs=1.0, warmup_fraction=0.05, unfold_captions=False),
    "own": OWN,
    "frozen": FROZEN}
BASELINE = dict(margin_schedule="none", weighting="none")


def add_method_flags(parser, method):
    """Adds the flags of margin and weights to a group, and those of meta-data."""
    method.add_argument("--margin-schedule", choices=["logistic", "constant", "none"],
                        default="logistic",
                        help="angular margin: that of Eq. 6, its limit a0 / a1 in all steps, or "
                             "none")
    method.add_argument("--a0", type=nonnegative_float, default=2.0,
                        help="numerator of the margin, whose limit is a0 / a1 radians; paper 2")
    method.add_argument("--a1", type=positive_float, default=10.0,
                        help="denominator of the margin, which starts at a0 / (a1 + 1) radians; "
                             "paper 10")
    method.add_argument("--a2", type=between(-1000), default=0.1,
                        help="growth of the margin per step; if negative, the margin falls to 0; "
                             "paper 0.1")
    method.add_argument("--weighting", default="meta",
                        choices=["meta", "joint", "focal", "spl", "l2rw", "none"],
                        help="weights of pairs: from a network that is meta-learned (meta) or "
                             "trained with the encoders (joint, Table 8); focal, self-paced (spl) "
                             "or L2RW (Table 6); all 1 (none)")
    method.add_argument("--weight-hidden", type=int_ge1, default=100,
                        help="hidden units of the network of --weighting meta and joint; MW-Net "
                             "100, authors' code 64")

    meta = parser.add_argument_group("meta-data")
    meta.add_argument("--meta-set", default="train", metavar="train|val|FILE",
                      help="source of the meta-data: a split, or a file with the name (key) of a "
                           "training example in each line")
    meta.add_argument("--meta-size", type=int_ge1, default=256,
                      help="examples that --meta-set takes from train or val, balanced over "
                           "classes if there are any; not in the paper")
    meta.add_argument("--meta-batch-size", type=between(2, 10**9, int), default=32,
                      help="GLOBAL batch M of meta-data; not in the paper")
    meta.add_argument("--meta-lr", type=rate, default=2e-4,
                      help="beta, learning rate of the network; paper: alpha for questions, not "
                           "printed for retrieval; authors' code 1e-5, MW-Net 1e-3")
    meta.add_argument("--meta-weight-decay", type=rate, default=1e-3,
                      help="weight decay of the network; authors' code 1e-3")
    meta.add_argument("--meta-betas", type=below_one, nargs=2, default=[0.9, 0.98],
                      metavar=("BETA1", "BETA2"),
                      help="decay of the moments of the network's AdamW, 0..1; authors' code 0.9 "
                           "0.98")
    meta.add_argument("--meta-every", type=int_ge1, default=1,
                      help="steps between updates of the network; paper 1")


def add_caption_flags(parser):
    """Adds the flags of captions that training has beside those of its set: their group."""
    group = parser.add_argument_group("captions")
    group.add_argument("--extra-captions", default="", metavar="FILE",
                       help="table of video (or image), caption and perhaps start, end: further "
                            "captions of training examples")
    group.add_argument("--extra-pairs", nargs="+", default=[], metavar="SET",
                       help="sets whose pairs join training, NAME[=DIR]: howto100m=DIR, "
                            "mine.csv=DIR")
    return group


# Flags that all scripts share are in contrastive/engine/flags.py. Precedence: default < recipe
# (--dataset, --recipe) < preset (--baseline) < saved flags of --resume < command line.
def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "MAMA: angular margin and meta-learned sample weights.")
    method = parser.add_argument_group("method")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, InfoNCE, with everything else equal: "
                             "sets --margin-schedule none --weighting none")
    parser.add_tau_flags(method, tau=1.0, tau_clamp=[0.005, 1.0], note="paper 1")
    add_method_flags(parser, method)
    captions = add_caption_flags(parser)
    captions.add_argument("--caption-noise", type=fraction, default=0.0,
                          help="share of the training examples that get another one's captions, "
                               "0..1")
    parser.add_unfold_flag(captions)
    parser.add_view_flags(crop_min=1.0, flip=0.0, jitter=0.0)
    parser.add_frozen_flags()
    return parser.parse(argv, RECIPES, BASELINE, check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    is_plain = args.margin_schedule == "none" and args.weighting == "none"
    parser.require(not args.baseline or is_plain,
                   "--baseline is --margin-schedule none --weighting none; leave out --baseline, "
                   "or the other flags of margin and weights")
    parser.check_tau_flags(args)
    check_method_flags(parser, args)


def check_method_flags(parser, args):
    """Refuses contradictory flags of add_method_flags, and those without effect."""
    parser.only(args.margin_schedule != "none", "with --margin-schedule logistic or constant",
                "--a0", "--a1")
    parser.only(args.margin_schedule == "logistic", "with --margin-schedule logistic", "--a2")
    parser.require(args.a0 / args.a1 <= math.pi / 2,
                   f"--a0 {args.a0:g} --a1 {args.a1:g}: the margin a0 / a1 must be at most pi / 2")

    parser.only(args.weighting in ("meta", "joint"), "with --weighting meta or joint",
                "--weight-hidden")
    parser.only(args.weighting == "meta", "with --weighting meta", "--meta-lr",
                "--meta-weight-decay", "--meta-betas", "--meta-every")
    parser.only(has_meta_data(args), "with --weighting meta or l2rw, or --meta-set val",
                "--meta-set", "--meta-size", "--meta-batch-size")
    parser.only(args.meta_set in ("train", "val"), "with --meta-set train or val", "--meta-size")
    if looks_ahead(args):
        parser.require(not args.lr_scale,
                       f"--lr-scale: the virtual step of --weighting {args.weighting} has one "
                       "learning rate for all parameters; give --weighting joint or none")
        parser.require(not args.chunk_size,
                       f"--chunk-size: --weighting {args.weighting} encodes the whole batch at "
                       "once; use a smaller --batch-size, or another --weighting")


def looks_ahead(args):
    """Whether the weights come from a step on meta-data (Algorithm 1, L2RW)."""
    return args.weighting in ("meta", "l2rw")


def has_meta_data(args):
    """Whether a run takes meta-data: if it looks ahead, and with --meta-set val in any case, so
    that runs of all --weighting are evaluated on the same rows of val."""
    return looks_ahead(args) or args.meta_set == "val"


# ======================================================= main =====================================
def main(args):
    """One run: data, model, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    train, eval_sets = common.open_data(args)
    meta_data = None
    if has_meta_data(args):
        meta_data, eval_sets = common.meta_data(train, eval_sets, args)
    args = common.adjust_flags_to_encoder(args)      # a CLIP brings its text encoder
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    temperature = Temperature(args.tau, args.learnable_tau, args.tau_clamp).to(accelerator.device)
    # outside DDP: average_gradients does for these what DDP does for the model
    loss_modules = nn.ModuleList([temperature])
    weight_net, meta_optimizer = None, None
    if args.weighting == "meta":                                           # learns by Eq. 10 alone
        weight_net = WeightNet(args.weight_hidden).to(accelerator.device)
        meta_optimizer = make_meta_optimizer(weight_net, args)
    elif args.weighting == "joint":
        weight_net = WeightNet(args.weight_hidden).to(accelerator.device)
        loss_modules.append(weight_net)
    optimizer = common.make_optimizer([model, loss_modules], args)
    parameters = [*model.parameters(), *loss_modules.parameters()]
    # for the look-ahead: shares the weights, but keeps the float32 forward, which prepare replaces
    plain_model = copy.copy(model)

    # >>> shared: prepare (the same lines in all scripts)
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # without DDP
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    if args.compile:
        model = torch.compile(model)
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
    if looks_ahead(args):
        meta_batches = common.meta_batches(
            meta_data, view, transform, run, every=args.meta_every, cache=cache)
        encoder_parameters = common.trained_parameters(plain_model)        # {name: parameter}

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args)
    run.start(evaluator, shown=("L", "w", "tau"), **banner_lines(args, steps.total, meta_data))
    # "views": (B, [T,] 3, S, S) each; "captions": B lists; "draws": (B, 32) random numbers in 0..1,
    # which choose texts; "rows": B
    for batch in batches:
        lr = common.learning_rate(run.step, steps, args)
        common.set_lr(optimizer, lr)
        inputs = inputs_of(batch, tokenizer)
        tau = temperature()
        mu = margin_at(run.step, args)
        criterion = functools.partial(angular_margin_loss, tau=tau, mu=mu)           # L_i, Eq. 3

        gain = None
        # before the graph of the step exists, so that both are never in memory together
        if looks_ahead(args) and run.step % args.meta_every == 0:
            meta_batch = next(meta_batches)
            batch["bad"] += meta_batch["bad"]                              # unreadable files
            meta_inputs = inputs_of(meta_batch, tokenizer)
            losses = look_ahead_losses(plain_model, criterion)
            if args.weighting == "meta":
                gradient = weightnet_gradient(                             # Eqs. 9, 12
                    losses, encoder_parameters, inputs, meta_inputs, weight_net, virtual_lr=lr)
                update_weight_net(weight_net, meta_optimizer, gradient)    # Eq. 10
            elif args.weighting == "l2rw":
                gain = meta_gain(losses, encoder_parameters, inputs, meta_inputs)    # (B,)

        video, text, _ = grad_cache.encode(**inputs)                       # (B, D)
        sample_loss = criterion(video, text)                               # (B,)
        progress = run.step / steps.total
        weight = pair_weights(args, sample_loss.detach(), weight_net, gain, progress)        # (B,)
        loss = (weight * sample_loss).mean()                               # () Eq. 8

        accelerator.backward(loss)
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()

        log_row = {"tau": tau, "mu": mu, "L": sample_loss.mean(), "w": weight.mean()}
        log_row.update(common.record_pairs(run, sample_loss, weight, batch["rows"]))
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [video, text])

    # ------------------------------------------- save and evaluate --------------------------------
    if args.meta_set == "val":
        # which eval.py leaves out
        common.save_meta_names(run, meta_data)
    common.save_training_texts(run, train, "captions")                     # for Figs. 2 and 5
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


def pair_weights(args, sample_loss, weight_net, gain, progress):
    """w_i of each pair: of the network (Eq. 7), of a baseline of Table 6, or 1.

    Args:
        sample_loss: (B,) L_i, without gradient.
        weight_net: of --weighting meta and joint.
        gain: (B,) G_i as meta_gain returns it, of --weighting l2rw.
        progress: step / all steps, 0..1.
    Returns: (B,); those of --weighting joint have a gradient, by which L trains the network.
    """
    if args.weighting == "meta":
        return weight_net(sample_loss).detach()                            # (B,) of the new theta
    if args.weighting == "joint":
        return weight_net(sample_loss)
    if args.weighting == "focal":
        return focal_weights(sample_loss)
    if args.weighting == "spl":
        return spl_weights(sample_loss, progress)
    if args.weighting == "l2rw":
        return l2rw_weights(gain)
    if args.weighting == "none":
        return torch.ones_like(sample_loss)
    raise ValueError(f"--weighting {args.weighting} has no branch here")


# ------------------------------------------------------- meta-learning ----------------------------
def make_meta_optimizer(weight_net, args, eps=1e-12):
    """AdamW of the weight network.

    Its gradients have the factor alpha / B, and are about 1e-8 at --lr 5e-6: hence a tiny eps, and
    a decay that is not added to them.
    """
    return torch.optim.AdamW(
        weight_net.parameters(), lr=args.meta_lr, betas=args.meta_betas, eps=eps,
        weight_decay=args.meta_weight_decay)


def update_weight_net(weight_net, meta_optimizer, gradient):
    """theta <- a step of the optimiser along this gradient (Eq. 10)."""
    for p, g in zip(weight_net.parameters(), gradient):
        p.grad = g
    meta_optimizer.step()
    meta_optimizer.zero_grad()


def look_ahead_losses(model, criterion):
    """Makes the function `losses` of weightnet_gradient: (parameters, inputs) -> (B,), in float32.

    Args:
        model: the encoders, without DDP and autocast.
        criterion: function (video, text) -> (B,).
    """
    encode = common.functional_encoder(model)

    def losses(parameters, inputs):
        video, text, _ = encode(parameters, inputs)                        # (B, D)
        return criterion(video, text)                                      # (B,)
    return losses


# ------------------------------------------------------- banner -----------------------------------
def banner_lines(args, total_steps, meta_data):
    """Lines of the banner: {title: text}."""
    start, end = margin_at(0, args), margin_at(total_steps, args)
    lines = {"margin": f"mu {start:.3g} .. {end:.3g} radians"}
    if meta_data is not None:
        lines["meta-data"] = meta_data.note
    return lines


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
