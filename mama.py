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
    (2, 3)      L_i = L_v2t,i + L_t2v,i + eta CE_i of the answer       sample_losses, answer_loss
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
    tau           tau                   ()      divides the cosine; paper 1
    mu            mu                    ()      radians; paper 0.18 to 0.2, default 0.01
    alpha, beta   virtual_lr, meta_lr   ()      rates of the virtual step and of the network

Commands
    accelerate launch mama.py                               # moving emoji, some captions swapped
    accelerate launch mama.py --loss infonce                # the baseline; --weighting focal, ...
    accelerate launch mama.py --task qa-open                # questions; --dataset msrvtt-qa, ...
    accelerate launch mama.py --dataset clips.csv --video-dir VIDEOS      # own: video, caption

docs/mama.md: commands for every table, recipes, differences from the paper, VGT, results.
To try an idea of your own, copy this file and edit it; docs/forking.md.
"""

import argparse
import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import common

from common import (
    Augment, EvaluationFacts, Evaluator, Parser, Run, Temperature, answers, between, clean_exit,
    count, fp32, gather, meta_data, nonnegative, normalize, open_data, part, per_anchor, positive,
    positive_index, rank, rate, row_blocks, write_json, write_tensors)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from contrastive.figures.mama import draw


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


@fp32
def answer_loss(scores, target):
    """CE_i: cross-entropy of the right answer (Eq. 2).

    Args:
        scores: (B, A) of the answers of a vocabulary, or of the choices; -inf for a missing one.
        target: (B,) long, the right answer; -1 = not in the vocabulary, or the row has no question.
    Returns: (B,) float32, 0 where there is no right answer. A random guess is ln A.
    """
    return F.cross_entropy(scores, target, ignore_index=-1, reduction="none")


def sample_losses(encoded, target, tau, mu, *, contrastive_weight=1.0, eta=1.0):
    """L_i of Eq. 3, one for each pair: (B,).

    Args:
        encoded: what `encode` returns: (video, text) or, with questions, (video, text, scores).
        target: (B,) the right answers, as in answer_loss; None without questions.
        tau, mu: as in angular_margin_loss.
        contrastive_weight: weight of L_v2t,i + L_t2v,i; paper 1.
        eta: weight of CE_i; paper 1.
    """
    video, text, *scores = encoded
    contrastive_loss = angular_margin_loss(video, text, tau, mu)           # (B,)
    sample_loss = contrastive_weight * contrastive_loss                    # (B,)
    if scores:
        sample_loss = sample_loss + eta * answer_loss(scores[0], target)   # (B,)
    return sample_loss


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


# ------------------------------------------------------- baselines --------------------------------
def focal_weights(losses, gamma=2.0):
    """Focal loss (Lin et al. 2017): (1 - p_i)^gamma, (B,) -> (B,).

    p_i = exp(-L_i / 2) is the geometric mean of the pair's probability in both directions; with
    questions L_i has the loss of the answer as well.
    """
    return (-torch.expm1(-losses / 2)).clamp(min=0) ** gamma


def spl_weights(losses, share):
    """Self-paced learning: 1 for the easiest share (0..1) of the global batch, else 0: (B,)."""
    sorted_losses = gather(losses).sort().values                           # (N,)
    num_easiest = max(1, round(share * len(sorted_losses)))
    return (losses <= sorted_losses[num_easiest - 1]).to(losses)           # (B,)


def l2rw_weights(losses, parameters, batch, meta_batch):
    """L2RW (Ren et al. 2018): in proportion to how far a step on L_j lowers the meta loss: (B,).

    The weight is 0 where it does not, and 1 in the mean over the global batch (all are 0 where no
    step helps). The gradient of the meta loss is taken at Theta, without a virtual step.

    Args: as in weightnet_gradient.
    """
    direction = meta_direction(losses, parameters, meta_batch)
    gain = directional_derivative(losses, parameters, batch, direction).clamp(min=0)     # (B,)
    all_gains = gather(gain)                                               # (N,)
    total = all_gains.sum()                                                # ()
    # an `if` would wait for the GPU
    return torch.where(total > 0, len(all_gains) * gain / total, gain)     # (B,)


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
# A recipe holds what differs from the defaults, which stand in parse_args and, for the flags of all
# scripts, in contrastive/engine/flags.py. 'recipe' says whose values they are (docs/mama.md).
MSRVTT = dict(
    recipe="paper; schedule and betas from the authors' code",
    image_encoder="openai/clip-vit-base-patch16", text_encoder="openai/clip-vit-base-patch16",
    pretrained=True, embed_dim=512, image_size=224, frame_sampling="random",
    text_length=70, text_pooling="cls", unfold_captions=True,
    epochs=5.0, batch_size=4, lr=5e-6, lr_end=0.0, warmup_epochs=0.05, weight_decay=5e-2,
    tau=1.0, a0=2.0, meta_lr=5e-6, meta_batch_size=4, crop_min=1.0, jitter=0.0,
    log_every=50, save_every=1000)
PARAGRAPHS = MSRVTT | dict(epochs=20.0, warmup_epochs=0.2, unfold_captions=False)
# InfoNCE on CLIP-ViP's encoders, as its authors train it: the base of Tables 3 and 4. Their batch
# is 16 on each of 8 GPUs (ActivityNet 8); the epochs are those of MAMA.
CLIP_VIP = dict(lr=1e-6, weight_decay=0.2, tau=0.01, learnable_tau=True, batch_size=128,
                chunk_size=16)
CLIP_VIP_RECIPES = {
    "msrvtt": CLIP_VIP | dict(text_length=50),
    "activitynet": CLIP_VIP | dict(frames=32, batch_size=64, chunk_size=8)}
OWN = dict(
    recipe="ours; small towers from scratch", frames=8, frame_sampling="random",
    epochs=10.0, batch_size=64, warmup_epochs=1.0)
EMOJI = OWN | dict(image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
MOVING = OWN | dict(image_size=32, frames=4, text_length=24, save_every=120, eval_every=100)
QUESTIONS = MSRVTT | dict(
    recipe="paper; warm-up, schedule and clipping from the authors' code or ours", task="qa-open",
    image_encoder="swin3d_b", text_encoder="google-bert/bert-base-uncased", embed_dim=768,
    frames=5, text_length=30, unfold_captions=False,
    epochs=10.0, lr=2e-5, warmup_epochs=0.1, weight_decay=1e-3, meta_lr=2e-5)
MSVD_QA = QUESTIONS | dict(answers=1000)                                   # VIOLET's
TGIF_FRAME = QUESTIONS | dict(answers=1540)                                # VIOLET's
CHOICES = QUESTIONS | dict(task="qa-choice", text_length=60)               # of "question choice"
FROZEN = dict(
    recipe="ours; published encoders, frozen: their projections learn",
    # the weights, and the text encoder all-MiniLM-L6-v2, are installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean", cached_views=4,
    max_steps=1000, batch_size=512, lr=3e-4, warmup_epochs=0.0, warmup_fraction=0.05,
    crop_min=0.35, flip=0.5, jitter=0.0, log_every=50)
RECIPES = {
    "moving-emoji": MOVING | dict(
        recipe="ours; captions of 30 % of the training clips swapped, for the weights to find",
        caption_noise=0.3),
    "emoji": EMOJI,
    "msrvtt": MSRVTT,
    "didemo": PARAGRAPHS,
    "activitynet": PARAGRAPHS,
    "msvd": MSRVTT | dict(recipe="ours; as msrvtt"),
    "youcook2": MSRVTT | dict(recipe="ours; as msrvtt"),
    "howto100m": MSRVTT | dict(recipe="ours; as msrvtt", epochs=1.0, unfold_captions=False),
    "own": OWN,
    "frozen": FROZEN,
    "msrvtt-qa": QUESTIONS,
    "msvd-qa": MSVD_QA,
    "tgif-qa-r-frame": TGIF_FRAME,
    "tgif-qa-r-action": CHOICES,
    "tgif-qa-r-transition": CHOICES,
    "nextqa": CHOICES,
    "causal-vidqa": CHOICES}
# with --task qa-open and qa-choice
MOVING_QUESTIONS = MOVING | dict(fusion_layers=1, meta_every=4, a0=2.0)
QUESTION_RECIPES = RECIPES | {"moving-emoji": MOVING_QUESTIONS}
# with --qa-model vgt; lengths of texts from VGT's code, of Causal-VidQA from CoVGT's
GRAPH = dict(
    recipe="the paper's batch, epochs, frames and rate; sizes and all else from VGT's code",
    image_encoder="regions", embed_dim=512, regions=10, frames=32, text_length=20,
    epochs=30.0, optimizer="adam", lr=1e-5, meta_lr=1e-5, warmup_epochs=0.0, weight_decay=0.0,
    beta2=0.999, grad_clip=12.0)
CHOICE_GRAPH = CHOICES | GRAPH
VGT_RECIPES = QUESTION_RECIPES | {
    "moving-emoji": MOVING_QUESTIONS | dict(
        recipe="ours; VGT on boxes that are known", regions=5, dropout=0.1, frames=8, crop_min=1.0,
        lr=5e-4),
    "msrvtt-qa": QUESTIONS | GRAPH,
    "msvd-qa": MSVD_QA | GRAPH,
    "tgif-qa-r-frame": TGIF_FRAME | GRAPH,
    "tgif-qa-r-action": CHOICE_GRAPH,
    "tgif-qa-r-transition": CHOICE_GRAPH,
    "nextqa": CHOICE_GRAPH | dict(regions=5, text_length=38),
    "causal-vidqa": CHOICE_GRAPH | dict(text_length=38)}
TAU_LIMITS = (0.005, 1.0)                                                  # if learnt; CLIP-ViP's


def recipes_of(args):
    """The recipes by data set for --task and --qa-model."""
    if args.qa_model == "vgt":
        return VGT_RECIPES
    if args.task == "retrieval":
        return RECIPES
    return QUESTION_RECIPES


def method_defaults(chosen):
    """Defaults that depend on --loss, --contrastive-weight, --image-encoder and --recipe."""
    defaults = {}
    if chosen.loss == "infonce" or chosen.contrastive_weight == 0:
        defaults.update(margin_schedule="none", weighting="none")
    if chosen.loss == "infonce" and chosen.image_encoder.startswith("clip_vip:"):
        defaults.update(CLIP_VIP_RECIPES.get(chosen.recipe, CLIP_VIP))
    return defaults


def check_flags(parser, args):
    """Refuses flags that contradict each other."""
    low, high = TAU_LIMITS
    if args.learnable_tau and not low <= args.tau <= high:
        parser.error(f"--tau {args.tau}: a learnt temperature must start between {low} and {high}")
    if args.a0 / args.a1 > math.pi / 2:
        parser.error(f"--a0 {args.a0:g} --a1 {args.a1:g}: the margin a0 / a1 must be at most "
                     "pi / 2")
    if args.margin_schedule != "none" or args.weighting != "none":
        if args.loss == "infonce":
            parser.error("--loss infonce has neither margin nor weights: use --loss mama for "
                         "--margin-schedule and --weighting")
        if args.contrastive_weight == 0:
            parser.error("--contrastive-weight 0 leaves the loss of the answers, which has neither "
                         "margin nor weights: leave out --margin-schedule and --weighting")
    if args.contrastive_weight == 0 and args.learnable_tau:
        parser.error("--learnable-tau: --contrastive-weight 0 leaves no loss at that temperature")
    if looks_ahead(args) and args.chunk_size:
        parser.error(f"--chunk-size: --weighting {args.weighting} encodes the whole batch at once; "
                     "use a smaller --batch-size, or another --weighting")
    answers.check_flags(parser, args)


def parse_args(argv=None):
    """Flags; their defaults follow --dataset or --recipe, --task, --qa-model and --loss."""
    parser = Parser(__file__, "MAMA: angular margin and meta-learned sample weights.")
    yes_or_no = argparse.BooleanOptionalAction
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=["mama", "infonce"], default="mama",
                        help="MAMA; or InfoNCE, with neither margin nor weights")
    method.add_argument("--task", choices=["retrieval", "qa-open", "qa-choice"],
                        default="retrieval",
                        help="retrieval between videos and texts; or questions with a vocabulary "
                             "of answers, or with choices")
    method.add_argument("--contrastive-weight", type=nonnegative, default=1.0,
                        help="weight of the contrastive loss beside that of answers; paper 1; 0 = "
                             "rows VIOLET and VGT of Tables 1 and 2")
    method.add_argument("--tau", type=positive, default=0.1,
                        help="temperature, divides the cosine; paper 1")
    method.add_argument("--learnable-tau", action=yes_or_no, default=False,
                        help="learn the temperature, from --tau on")
    method.add_argument("--margin-schedule", choices=["logistic", "constant", "none"],
                        default="logistic",
                        help="angular margin: of Eq. 6, its limit a0 / a1 in all steps, or none")
    method.add_argument("--a0", type=nonnegative, default=0.1,
                        help="the limit of the margin is a0 / a1 radians; paper 2")
    method.add_argument("--a1", type=positive, default=10.0,
                        help="the margin starts at a0 / (a1 + 1) radians; paper 10")
    method.add_argument("--a2", type=between(-1000), default=0.1,
                        help="growth of the margin per step; below 0 it falls to 0; paper 0.1")
    method.add_argument("--weighting", default="meta",
                        choices=["meta", "joint", "focal", "spl", "l2rw", "none"],
                        help="weights of pairs: meta = of a network that learns by looking ahead; "
                             "joint = of one that learns with the encoders (Table 8); focal, spl "
                             "(self-paced), l2rw: Table 6; none = all 1")
    method.add_argument("--weight-hidden", type=count, default=100,
                        help="hidden units of the network of --weighting meta and joint; MW-Net "
                             "100")
    method.add_argument("--focal-gamma", type=nonnegative, default=2.0,
                        help="exponent of --weighting focal")
    method.add_argument("--spl-start", type=part, default=0.5,
                        help="share of the batch, 0..1, with which --weighting spl starts; it "
                             "grows to 1 in the run")
    method.add_argument("--eta", type=nonnegative, default=1.0,
                        help="weight of the answers' loss; paper 1")

    meta = parser.add_argument_group("meta-data")
    meta.add_argument("--meta-set", default="train", metavar="train|val|FILE",
                      help="where the meta-data come from: a split, or a file with the name (key) "
                           "of a training example in each line")
    meta.add_argument("--meta-size", type=count, default=256,
                      help="examples taken from train or val; not in the paper")
    meta.add_argument("--meta-balance", choices=["auto", "classes", "none"], default="auto",
                      help="what the meta-data are balanced over: classes (auto: if there are "
                           "any), or nothing")
    meta.add_argument("--meta-batch-size", type=between(2, 10**9, int), default=32,
                      help="GLOBAL batch M of meta-data; not in the paper")
    meta.add_argument("--meta-lr", type=rate, default=2e-4,
                      help="beta, learning rate of the network's AdamW; paper: alpha for "
                           "questions, not printed for retrieval; MW-Net 1e-3")
    meta.add_argument("--meta-weight-decay", type=rate, default=1e-3,
                      help="weight decay of the network; authors' code 1e-3")
    meta.add_argument("--virtual-lr", type=rate, default=0.0,
                      help="alpha, learning rate of the virtual step; 0 = the learning rate of "
                           "the encoders at that step (paper)")
    meta.add_argument("--meta-every", type=count, default=1,
                      help="steps between updates of the network; paper 1")
    answers.add_flags(parser)

    views = parser.add_argument_group("views")
    views.add_argument("--crop-min", type=part, default=0.8,
                       help="smallest crop as a share of the frame's area, 0..1, the same in all "
                            "frames; 1 = no crop (paper)")
    views.add_argument("--flip", type=part, default=0.0,
                       help="share of clips that are mirrored, 0..1; paper 0")
    views.add_argument("--jitter", type=nonnegative, default=0.2,
                       help="strength of changes in brightness, contrast and saturation, in all "
                            "views and the same in all frames; paper 0")
    choosers = ("--task", "--qa-model", "--contrastive-weight")
    return parser.parse(argv, recipes_of, method_defaults, choosers, check_flags)


# ------------------------------------------------------- what the flags amount to -----------------
# These functions read a flag only if it has an effect: a run warns of flags that nothing has read.
def looks_ahead(args):
    """Whether the weights come from a step on meta-data (Algorithm 1, L2RW)."""
    return args.weighting in ("meta", "l2rw")


def uses_meta_set(args):
    """Whether there are meta-data: for looking ahead; with --meta-set val always, so that all runs
    are evaluated on the same rows of val."""
    if looks_ahead(args):
        return True
    # not args.meta_set, which would count as read
    return vars(args)["meta_set"] == "val"


def first_tau(args):
    """The first or fixed temperature; 1 without the contrastive loss, in which --tau has no effect
    and counts as unread."""
    if args.contrastive_weight == 0:
        return 1.0
    return args.tau


# ======================================================= main =====================================
def main(args):  # noqa: C901, PLR0912
    """One run: data, model, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    # before any process group, so that errors come quickly
    train, evals = open_data(args)
    questions = answers.question_settings(train, args)                     # None for retrieval
    meta = None
    if uses_meta_set(args):
        meta, evals = meta_data(train, evals, args)
    # a CLIP as --image-encoder is the text encoder as well
    args = common.fit_to_encoder(args)
    # the batch and the epochs of a user's small data
    args = common.fit_to_data(args, train)
    steps = common.count_steps(args, train)        # per epoch, in total, of the warm-up
    run = Run(__file__, args, train, evals, steps, recipes_of(args))

    # ------------------------------------------- model and optimiser ------------------------------
    # from these texts a new tokenizer learns its words; None = from the captions
    tokenizer_texts = None
    if questions:
        tokenizer_texts = functools.partial(answers.texts_for_tokenizer, train, 200_000)
    tower, tokenizer, transform = common.build_towers(args, train, run, tokenizer_texts, questions)
    # parameters of the loss; they stand outside DDP and are saved
    loss_modules = nn.ModuleDict()
    limits = TAU_LIMITS if args.learnable_tau else None
    loss_modules["tau"] = Temperature(first_tau(args), limits)
    if args.weighting in ("meta", "joint"):
        loss_modules["weight_net"] = WeightNet(args.weight_hidden)
    loss_modules.to(run.device)
    averaged_modules = nn.ModuleDict(loss_modules)                         # that learn by the loss
    meta_optimizer = None
    if args.weighting == "meta":
        weight_net = averaged_modules.pop("weight_net")                    # learns by Eq. 10 alone
        # its gradients have the factor alpha / B: AdamW's default eps, or a decay that is added to
        # them as in MW-Net's Adam, would outweigh them
        meta_optimizer = torch.optim.AdamW(
            weight_net.parameters(), lr=args.meta_lr, betas=(0.9, 0.98), eps=1e-12,
            weight_decay=args.meta_weight_decay)
    trained_modules = [tower, averaged_modules]
    # >>> shared: optimizer
    groups = common.decay_groups(trained_modules, args.weight_decay)
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.beta1)
    else:
        kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps,
                         fused=run.fused)
    # <<< shared
    # for looking ahead, without DDP and autocast
    plain_tower = copy.copy(tower)
    model, optimizer = run.wrap(tower, loss_modules, optimizer, meta_optimizer)
    run.resume()                                                           # with --resume
    encode_inputs = functools.partial(encode, model)
    chunks = common.Chunks(encode_inputs, model, run.accelerator, args.chunk_size)

    # ------------------------------------------- views and batches --------------------------------
    view = training_view(args)
    # features of frozen encoders (--freeze), which are computed once
    cache = common.open_feature_cache(args, run, tower, tokenizer, transform)
    tokenizer = cache.tokenizer
    batches = run.batches([view], transform, cache)
    if looks_ahead(args):
        every = 1
        if args.weighting == "meta":
            every = args.meta_every
        meta_batches = look_ahead_batches(meta, view, transform, run, every=every, cache=cache)

    # ------------------------------------------- loop ---------------------------------------------
    eta = 0.0
    if questions:
        eta = args.eta
    pair_loss = functools.partial(sample_losses, contrastive_weight=args.contrastive_weight,
                                  eta=eta)
    answer_guess = answers.random_guess(train, questions)                  # 0 for retrieval
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, device=run.device,
                          args=args)
    # PyTorch warns of a function that its own forward mode calls
    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)
    # in the progress bar: the loss without weights, to be compared with a random guess
    run.loss_column = "L"
    lines = banner_lines(args, steps.total, meta)
    if questions:
        lines.update(answers.banner_lines(questions, train, args))
    run.begin(evaluator, random_guess(args, steps.total, eta * answer_guess), lines)
    # listed once, since a walk through all modules takes milliseconds
    clipped_parameters = [*tower.parameters(), *loss_modules.parameters()]
    for batch in batches:
        progress = run.step / steps.total
        run.set_lr(common.learning_rate(run.step, steps, args))
        inputs = inputs_of(batch, tokenizer, run.device, train, questions)
        tau = loss_modules["tau"]()                                        # a number or ()
        mu = margin_at(run.step, args)                                     # radians

        # look ahead, before the graph of the step itself takes memory
        network_is_due = args.weighting == "meta" and run.step % args.meta_every == 0
        if network_is_due or args.weighting == "l2rw":
            meta_batch = next(meta_batches)
            # bad samples of the meta-data are listed, too
            batch["bad"] += meta_batch["bad"]
            meta_inputs = inputs_of(meta_batch, tokenizer, run.device, meta, questions)
            losses = look_ahead_losses(plain_tower, pair_loss, tau, mu, run.device)
            look_ahead = LookAhead(losses, trained_parameters(plain_tower), inputs,
                                   meta_inputs)
        if network_is_due:
            gradient = weightnet_gradient(*look_ahead, weight_net, args.virtual_lr or run.lr)
            for p, g in zip(weight_net.parameters(), gradient):
                p.grad = g
            meta_optimizer.step()                                          # Eq. 10
            meta_optimizer.zero_grad()
        if args.weighting == "l2rw":
            l2rw_weight = l2rw_weights(*look_ahead)                        # (B,)

        encoded = chunks.encode(inputs)        # video, text: (B, D); of questions scores: (B, A)
        if args.loss in ("mama", "infonce"):                               # infonce: mu = 0, w = 1
            sample_loss = pair_loss(encoded, inputs.get("answers"), tau, mu)  # (B,)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")

        if args.weighting == "meta":
            weight = weight_net(sample_loss.detach()).detach()             # (B,) Eq. 11: new theta
        elif args.weighting == "joint":
            weight = loss_modules["weight_net"](sample_loss.detach())      # (B,) trained by L
        elif args.weighting == "focal":
            weight = focal_weights(sample_loss.detach(), args.focal_gamma)  # (B,)
        elif args.weighting == "spl":
            share = args.spl_start + (1 - args.spl_start) * progress
            weight = spl_weights(sample_loss.detach(), share)              # (B,)
        elif args.weighting == "l2rw":
            weight = l2rw_weight                                           # (B,)
        elif args.weighting == "none":
            weight = torch.ones_like(sample_loss)                          # (B,)
        else:
            raise ValueError(f"--weighting {args.weighting} has no branch in this loop")
        loss = (weight * sample_loss).mean()                               # () Eq. 8

        run.check_finite(loss, tau, encoded[:2])
        chunks.backward(loss)                                              # of the full batch
        common.average_gradients(averaged_modules.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_(clipped_parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        loss_modules["tau"].clamp()
        columns = {}
        if run.due("log", run.step + 1):
            mismatched = mismatched_pairs(train, batch["rows"], sample_loss)  # (B,) 0 or 1
            last_batch = torch.stack([sample_loss, weight, mismatched], dim=1)  # (B, 3)
            columns = {"mu": mu, **log_columns(last_batch, encoded, run)}
            if questions:
                scores, target = encoded[2], inputs["answers"]             # (B, A), (B,)
                answer_losses = answer_loss(scores, target)                # (B,)
                columns.update(answers.log_columns(scores, target, answer_losses, batch["rows"],
                                                   train))
        run.done(batch, loss, tau, columns)                                # count, log, save, stop

    # ------------------------------------------- save and evaluate --------------------------------
    if rank() == 0:
        write_tensors(run.folder / "weights.safetensors", run.tensors)
        if meta is not None and args.meta_set == "val":
            # eval.py leaves them out
            keys = {f"{args.dataset} val": meta.column("key")}
            write_json(run.folder / "meta_data.json", keys)
    tower.spec["evaluation"] = vars(evaluation_facts(args))                # for eval.py
    return run.finish(draw)


# ------------------------------------------------------- views and encoders -----------------------
def training_view(args):
    """The view of a clip; --crop-min 1 keeps the whole frame."""
    return Augment(args.image_size, args.crop_min, args.flip, jitter_p=1.0,
                   brightness=args.jitter, contrast=args.jitter, saturation=args.jitter,
                   squash=args.eval_resize == "squash")


def inputs_of(batch, tokenizer, device, data=None, questions=None):
    """The inputs of the encoders.

    Args:
        batch: of training or of meta-data.
        tokenizer: of the text encoder.
        device: for the tokens; the pixels are there.
        data: Data of the batch, which has the questions.
        questions: settings of the model that answers them; None for retrieval.
    Returns: {'pixels': (B, [T,] 3, S, S), 'tokens': {name: (B, L)} of the captions}, and of
        questions 'question', 'answers' and perhaps 'choices', as answers.question_inputs has them.
    """
    texts = common.pick(batch["captions"], batch["draws"])                 # B captions
    tokens = {name: ids.to(device) for name, ids in tokenizer(texts).items()}            # (B, L)
    inputs = {"pixels": batch["views"][0], "tokens": tokens}
    if questions:
        inputs.update(answers.question_inputs(data, batch["rows"], tokenizer, questions["answers"],
                                              device, model=questions["model"]))
    return inputs


def encode(model, inputs):
    """Inputs of inputs_of -> video, text: (b, D) each, and with questions scores: (b, A)."""
    if "question" in inputs:
        return model(inputs["pixels"], inputs["tokens"], inputs["question"], inputs.get("choices"))
    video, text, _ = model(inputs["pixels"], inputs["tokens"])
    return video, text


# ------------------------------------------------------- looking ahead ----------------------------
class LookAhead(NamedTuple):
    """The arguments that weightnet_gradient and l2rw_weights share, at a step."""

    losses: Callable  # (parameters, inputs) -> (B,)
    parameters: dict  # {name: tensor} of the encoders
    batch: dict  # the inputs of the step
    meta_batch: dict  # the inputs of its meta-data


def look_ahead_losses(tower, pair_loss, tau, mu, device):
    """Makes the function `losses` of weightnet_gradient: (parameters, inputs) -> (B,), in float32.

    Each call draws the same dropout. The weights and statistics of the tower do not change.

    Args:
        tower: the encoders, without DDP.
        pair_loss: function (encoded, target, tau, mu) -> (B,), such as sample_losses.
        tau, mu: of this step.
        device: of the tower.
    """
    random_state = common.random_state(device)
    devices = []                                                           # the CPU is implied
    if device.type == "cuda":
        devices.append(device)

    def losses(parameters, inputs):
        tensors = dict(parameters)
        for name, buffer in tower.named_buffers():
            tensors[name] = buffer.clone()

        def model(*model_inputs):
            return common.functional_call(tower, tensors, model_inputs)

        with torch.random.fork_rng(devices):
            common.set_random_state(random_state, device)
            encoded = encode(model, inputs)
        return pair_loss(encoded, inputs.get("answers"), tau, mu)
    return losses


def trained_parameters(module):
    """{name: parameter} of the module, without frozen ones."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def look_ahead_batches(meta, view, transform, run, *, every, cache):
    """Iterator over the batches of meta-data from here to the last step, one in `every` steps."""
    args = run.args
    first, last = math.ceil(run.step / every), math.ceil(run.last / every)
    return iter(common.Batches(meta, [view], transform, args.meta_batch_size, args.seed,
                               first=first, last=last, device=run.device,
                               workers=min(2, args.workers), cache=cache))


# ------------------------------------------------------- banner and log ---------------------------
def margin_at(step, args):
    """mu at an optimiser step, in radians."""
    if args.margin_schedule == "logistic":
        return margin(step, args.a0, args.a1, args.a2)
    if args.margin_schedule == "constant":
        return args.a0 / args.a1
    if args.margin_schedule == "none":
        return 0.0
    raise ValueError(f"--margin-schedule {args.margin_schedule} has no margin here")


def random_guess(args, total_steps, answer_guess=0.0):
    """The loss without weights at the start and at the end of training if all cosines are 0.

    The margin makes the cosine of each pair sin(mu). None if it is unknown, as for a loss that a
    fork adds.

    Args: answer_guess: eta CE_i of answers with equal scores.
    """
    if args.loss not in ("mama", "infonce"):
        return None
    guesses = []
    for step in (0, total_steps):
        zero = torch.zeros((), dtype=torch.float64)
        pair = angular_cosine(zero, margin_at(step, args)).item()
        one_direction = math.log1p((args.batch_size - 1) * math.exp(-pair / first_tau(args)))
        guesses.append(2 * args.contrastive_weight * one_direction + answer_guess)
    return guesses


def banner_lines(args, total_steps, meta):
    """Lines of the banner: {title: text}."""
    lines = {}
    if args.contrastive_weight == 0:
        lines["loss"] = "that of the answers alone (--contrastive-weight 0)"
    else:
        start, end = margin_at(0, args), margin_at(total_steps, args)
        lines["margin"] = f"mu {start:.3g} .. {end:.3g} radians"
    if meta:
        lines["meta-data"] = meta.note
    return lines


def mismatched_pairs(data, rows, like):
    """1 for rows of data whose captions are known to be another clip's, else 0: as like, (B,)."""
    noisy = data.column("noisy")                                           # (M,) bool
    if noisy is None:
        return torch.zeros_like(like)
    return torch.as_tensor(noisy[rows]).to(like)


@torch.no_grad()
def log_columns(last_batch, encoded, run):
    """Columns of the log: losses and weights, also of mismatched pairs; health of the space.

    Keeps what the pictures need in run.tensors: the last batch, and the curve of the network.

    Args:
        last_batch: (B, 3) loss and weight of each pair, and 1 if it is known to be mismatched.
        encoded: as in sample_losses.
    """
    last_batch = gather(last_batch).cpu()                                  # (N, 3)
    run.tensors["last_batch"] = last_batch
    if run.args.weighting in ("meta", "joint"):
        keep_curve(run)
    sample_loss, weight, mismatched = last_batch.unbind(1)                 # (N,) each
    columns = {"L": sample_loss.mean().item(), "w": weight.mean().item()}
    if mismatched.any():
        for name, value in (("matched", 0), ("mismatched", 1)):
            pairs = mismatched == value                                    # (N,) bool
            if pairs.any():
                columns[f"L_{name}"] = sample_loss[pairs].mean().item()
                columns[f"w_{name}"] = weight[pairs].mean().item()
    video, text = encoded[:2]                                              # (B, D) each
    video, text = gather(normalize(video)), gather(normalize(text))        # (N, D)
    columns.update(common.embedding_health(video, text))
    return columns


def keep_curve(run):
    """Adds the weights that the network gives to 64 losses to run.tensors (Fig. 4, right)."""
    args = run.args
    # One and a half times the sum of both directions for a random guess. The losses of pairs can
    # lie above it at a low tau, or with --contrastive-weight or --eta above 1.
    highest = 3 * math.log(args.batch_size)                                # nats
    if args.task == "qa-open":
        highest += 1.5 * math.log(args.answers)
    elif args.task == "qa-choice":
        highest += 1.5 * math.log(5)
    grid = torch.linspace(0, highest + 1, 64)                              # (64,)
    weight = run.loss_modules["weight_net"](grid.to(run.device)).cpu()     # (64,)
    curve = torch.cat([torch.tensor([run.step + 1.0]), weight])[None]      # (1, 65)
    curves = run.tensors.get("curves", curve[:0])                          # (K, 65)
    run.tensors["loss_grid"] = grid
    run.tensors["curves"] = torch.cat([curves, curve])


def evaluation_facts(args):
    """What eval.py has to know of a run."""
    tau = args.tau
    if args.contrastive_weight == 0:
        tau = None  # no temperature was trained
    return EvaluationFacts(
        tau=tau, learnable_tau=args.learnable_tau, knn_features=args.knn_features)


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
