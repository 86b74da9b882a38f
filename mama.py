"""MAMA: Meta-optimized Angular Margin Contrastive Framework for Video-Language Representation Learning (Nguyen et al.,
ECCV 2024).

A caption seldom says all that its video shows, so a pair should come near, not together: the angle of each pair counts
as smaller by a margin, which shrinks the pair's gradient and ends it inside the margin. Some pairs do not belong
together at all, and some concepts are rare: each pair's loss gets a weight from a small network that sees that loss
alone. The network learns what weights are good for by a look ahead: it makes a step of the encoders with its weights,
asks how well they then do on a few clean, balanced examples (the meta-data), and changes so that they would have done
better. Nothing is kept at test time but the encoders.

Equations, s_ij = cos(lambda_ij) = cosine of video i and text j, all candidates of the global batch in the denominator:
    (1)      L_contrastive,i = -log( exp(s_ii / tau) / sum_j exp(s_ij / tau) )     angular_margin_loss with mu = 0
    (3)      L_i = L_v2t,i + L_t2v,i, the sum of both directions                   angular_margin_loss
             + eta CE_i of the answer, where the text is a question                answer_loss
    (4) ff.  s_ii becomes cos([lambda_ii - mu]_+) where lambda_ii <= pi / 2         angular_cosine
    (6)      mu(k) = a0 / (a1 + exp(-a2 k)), k = optimiser step                    margin
    (7)      w_i = MLP_theta(L_i), 1-100-1, ReLU, sigmoid                          WeightNet
    (8)      L = 1/B sum_i w_i L_i                                                 main
    (9)      Theta^ = Theta - alpha/B sum_j w_j grad L_j                           weightnet_gradient
    (10)     theta steps against the gradient of 1/M sum_i L_i^meta(Theta^)        weightnet_gradient, main
    (11)     Theta steps with the weights of the new theta                         main
    (12, 13) that gradient: -alpha/B sum_j <grad L^meta(Theta^), grad L_j> dw_j/dtheta   directional_derivative
    (14, 15) density and distance of each frame of a video, for its captioner      key_frames

    symbol     variable               shape      unit and paper value
    v, t       video, text            (B, D)     this process's embeddings, normalised inside the loss
    L_i        sample                 (B,)       nats, both directions, with the margin
    w_i        weight                 (B,)       0 .. 1 (L2RW: mean 1), constant for the encoders
    tau        tau                    ()         divides the cosine; 1 as printed
    y_i        answers                (B,)       number of the right answer, -1: no question, or not in the vocabulary
    eta        eta                    ()         weight of the answers' loss; 1, and 0 of a row without a question
    mu         mu                     ()         radians; a0 = 2, a1 = 10, a2 = 0.1: 0.182 to 0.2
    alpha      virtual_lr             ()         the learning rate of the step
    beta       meta_lr                ()         of the weight network; alpha = beta in the paper
    B, M       batch_size, meta_batch_size       4, and not said

Commands:
    accelerate launch mama.py                                    # moving emoji, a part of the captions swapped
    accelerate launch mama.py --loss infonce                     # neither margin nor weights
    accelerate launch mama.py --weighting focal                  # spl, l2rw, joint: Tables 6 and 8; none: ours
    accelerate launch mama.py --margin-schedule none             # constant; the margin's part (Fig. 4)
    accelerate launch mama.py --dataset msrvtt --data-dir ANNOTATIONS --video-dir VIDEOS   # the paper's; didemo, ...
    accelerate launch mama.py --task qa-open                     # questions about moving emoji; qa-choice: five choices
    accelerate launch mama.py --dataset msrvtt-qa --data-dir ANNOTATIONS --video-dir VIDEOS    # msvd-qa, nextqa, ...
    accelerate launch mama.py --dataset nextqa --qa-model vgt --data-dir ANNOTATIONS --region-dir FEATURES
    accelerate launch mama.py --task qa-open --contrastive-weight 0    # the answers' loss alone: rows VIOLET and VGT
    accelerate launch mama.py --dataset clips.csv --video-dir VIDEOS    # own data: columns video, caption[, start, end]

A fork edits METHOD, the flags of the method group, and the loss in the loop, not what is marked as shared.

Differences from the paper and from the authors' code, which has neither schedule nor weights for retrieval (its margin
is 0) and whose meta step for question answering changes nothing (it joins the letters of a name, not its parts):
 1. The recipes encode with CLIP (ViT-B/16) and the mean of its frames. CLIP-ViP, which the paper starts from (no size
    is said, the authors' script runs base_32): --image-encoder clip_vip:openai/clip-vit-base-patch16 --init-from
    pretrain_clipvip_base_16.pt, its batch and tau, --batch-size 128 --tau 0.01 --learnable-tau, and another margin
    (--a0). Its evaluation ranks and selects by the dual softmax: eval.py --normalize dsl.
 2. Batch 4 at tau = 1 is what the paper prints (3 negatives, at least 0.34 nats a direction). At a small tau the margin
    weighs much more: mu / tau = 18 at 0.01, where hardly a pair has a gradient left. Tune them together.
 3. Section 4.1 prints a0 = 0.2 and a2 = -0.1, a margin that falls from 0.018 to 0; Section 4.3 prints a0 = 2 and
    a2 = 0.1, which grows to the best margin of Fig. 4. We follow 4.3.
 4. As printed the margin ends at lambda = pi / 2 with a jump of the logit by sin(mu) / tau: kept.
 5. Eq. 8 as printed lets a gradient flow through w; as MW-Net (Shu et al. 2019), whose algorithm this is, we do not.
    Eq. 10 prints a plain step, and eta for beta; for theta we take AdamW as the authors' code does.
 6. The virtual step is plain gradient descent, as in Eq. 9, whatever --optimizer does.
 7. beta for retrieval is not said (here alpha, as of questions); how the weight network starts is ours (WeightNet).
 8. The meta-data are said to be small, clean and balanced. Here: training examples by a hash of their names, which stay
    in train; or of val, which leave its evaluation (--meta-set val); or a file of names. Clean: without swapped
    captions and --extra-pairs; nobody has checked other sets. Balanced: in turn verbs of moving-emoji, MSR-VTT's
    categories, answers or types of questions; elsewhere --meta-balance captions takes 50 clusters of captions.
 9. Not specified: focal has (1 - p)^2, p the geometric mean of both directions' probabilities of the pair; SPL keeps
    the easiest part of the batch, which grows linearly to all of it; L2RW is times B, since Eq. 8 divides by B.
10. Read or chosen by us: MSR-VTT's 5 epochs are of its 180,000 pairs, "30 words" of a question 30 tokens; frames are
    random in training; the warm-up of 1 % and the cosine of questions (the authors' code: linear, 10 %).
11. Captions of a vision-language model (Section 3.3) are further captions of training clips (--extra-captions), of
    which each epoch draws one, or pairs (--extra-pairs; eta = 0 beside questions); Table 5's first row has neither.
12. Questions are answered by a model in VIOLET's way (common.QuestionAnswerer), from published towers but with a new
    fusion of two layers, not from VIOLET's pre-training. The cosine of Eq. 1 is that of video and text before the
    fusion; the paper's comes from a layer on [CLS], after it, and is no cosine as such; --qa-similarity fused sends all
    pairs through it. The text is a caption of the row (--extra-captions), else the question itself.
13. Video Swin-B has weights of Kinetics-400, the paper's of 600; each token of it is a time, the mean over the picture.
14. An answer outside --answers has no loss in training and is wrong in evaluation, whose upper bound is printed, as in
    the authors' code, which tests the best epoch; here it is the last. Table 2's accuracies by type: docs/methods.md.
15. --qa-model vgt is the base of Table 2's best rows. It reads features of regions (--region-dir DIR), and
    encoders/vgt.py lists its differences. The paper takes "BERT-Base embeddings" and 32 random frames; here it is all
    of BERT and the 32 frames of VGT's files, as in VGT's code.
"""

import argparse
import copy
import math
import warnings

import common

from common import (  # isort: skip
    Evaluator, Parser, Run, UserError, answers, between, by_rows, clean_exit, count, fp32, gather, meta_data,
    nonnegative, normalize, open_data, pair_cosines, part, per_anchor, positive, positive_index, rank, rate,
    write_json, write_tensors)

import torch
import torch.nn as nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from contrastive.figures.mama import draw  # isort: skip


# ======================================================= METHOD ======================================================
def margin(step, a0=2.0, a1=10.0, a2=0.1):
    """mu = a0 / (a1 + exp(-a2 step)) in radians (Eq. 6): 0.182 at step 0, a0 / a1 = 0.2 after about 60 steps."""
    return a0 / (a1 + math.exp(min(-a2 * step, 700.0)))                    # a2 < 0: down to 0 without an overflow


def angular_cosine(sim, mu):
    """cos([lambda - mu]_+) of cosines sim = cos(lambda), any shape (mu spreads over it); sim where lambda > pi / 2.

    cos(lambda - mu) = s cos(mu) + sqrt(1 - s^2) sin(mu): acos has no finite slope at 1, this has one everywhere.
    """
    sine = ((1 - sim) * (1 + sim)).clamp(min=1e-12).sqrt()                 # of lambda
    cos_mu, sin_mu = (mu.cos(), mu.sin()) if torch.is_tensor(mu) else (math.cos(mu), math.sin(mu))
    nearer = torch.where(sim > cos_mu, torch.ones_like(sim), sim * cos_mu + sine * sin_mu)
    return torch.where(sim < 0, sim, nearer)


@fp32
def angular_margin_loss(video, text, tau, mu, block=0):
    """L_i = L_v2t,i + L_t2v,i over the global batch, with the angle of each pair smaller by mu (Eqs. 1, 3, 4).

    Args:
        video, text: (B, D) this process's embeddings, any float dtype; row i of both is a pair.
        tau: temperature, divides the cosine, > 0.   mu: margin in radians, 0 .. pi / 2; 0 = plain InfoNCE. Both: a
            float, (), or (B,): that of pair i, both ways.   block: rows at a time (0 = automatic, see common.by_rows).
    Returns: (B,) fp32 (float64 stays), one loss for each local pair. A random guess is about 2 ln N without a margin.
    """
    video, text = normalize(video), normalize(text)                        # (B, D)
    videos, texts = gather(video), gather(text)                            # (N, D)
    tau, mu = per_anchor(tau, video), per_anchor(mu, video, "mu", positive=False)       # () or (B, 1)

    def rows(v, t, target, tau, mu):                                       # b pairs at a time
        return one_way(v @ texts.T, target, tau, mu) + one_way(t @ videos.T, target, tau, mu)
    return by_rows(rows, video, text, positive_index(video), tau, mu, columns=len(videos), block=block)


@fp32
def fused_margin_loss(video, text, tau, mu, block=0):
    """angular_margin_loss from cosines that a fusion gives: (B, N) of this process's videos with all texts, and of its
    texts with all videos; -> (B,). block: has no part here, the matrices are there already."""
    target = positive_index(video)                                         # (B,)
    tau, mu = per_anchor(tau, video), per_anchor(mu, video, "mu", positive=False)
    return one_way(video, target, tau, mu) + one_way(text, target, tau, mu)


def one_way(sim, target, tau, mu):
    """-log softmax of each row's pair, its angle smaller by mu: cosines (b, N), the pairs' columns (b,) -> (b,)."""
    pair = sim.gather(1, target[:, None])                                  # (b, 1)
    logits = sim.scatter(1, target[:, None], angular_cosine(pair, mu)) / tau
    return F.cross_entropy(logits, target, reduction="none")


@fp32
def answer_loss(scores, answers):
    """CE_i of Eq. 3, -log q(y_i | v_i, t_i), q = softmax of the scores.

    Args: scores: (B, A) of a vocabulary's answers, or of the choices (-inf: none there); answers: (B,) long, the right
        one; -1 = the vocabulary lacks it, or the row has no question (its eta is 0).
    Returns: (B,) fp32, 0 where there is no right one. A random guess is ln A.
    """
    return F.cross_entropy(scores, answers, ignore_index=-1, reduction="none")


class WeightNet(nn.Module):
    """w_i = MLP(L_i) (Eq. 7): losses (B,) -> weights (B,) in 0 .. 1, about 1/2 at first.

    reach: the hidden units begin to act at losses spread over 0 .. reach nats (torch's own biases put nearly all of
    these points next to 0: a straight line before the sigmoid), and the start has hardly a slope of its own."""

    def __init__(self, hidden=100, reach=10.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid())
        with torch.no_grad():
            self.layers[0].bias.copy_(-self.layers[0].weight[:, 0] * reach * torch.rand(hidden))
            self.layers[2].weight.mul_(0.1)
            self.layers[2].bias.zero_()

    def forward(self, losses):
        return self.layers(losses[:, None])[:, 0]


def weightnet_gradient(losses, parameters, batch, meta_batch, weight_net, virtual_lr, method="forward"):
    """Gradient of the meta loss after one step with the weights of weight_net (Eqs. 9, 10, 12, 13).

    Args:
        losses: function (parameters, batch) -> (B,) differentiable losses L_j of this process's part of a batch, the
            same for the same arguments (dropout too).   parameters: {name: tensor}, Theta; they are not changed.
        weight_net: losses (B,) -> weights (B,); it sees L_j without gradient.
        virtual_lr: alpha of the virtual step, a plain gradient step with 1/B sum_j w_j L_j.
        method: 'forward' needs the memory of a plain step; 'second-order' keeps the graph of a gradient.
    Returns: d meta / d p for each p of weight_net.parameters(), in order, averaged over processes; meta = the mean of
        losses(virtual parameters, meta_batch).
    """
    leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
    theta, second = list(weight_net.parameters()), method == "second-order"
    with sdpa_kernel(SDPBackend.MATH):                                     # fused attention has no further derivatives
        sample = losses(leaves, batch)                                     # (B,)
        weight = weight_net(sample.detach())                               # (B,)
        objective = ((weight if second else weight.detach()) * sample).mean()
        gradient = _grad(objective, leaves.values(), create_graph=second)
        averaged = common.average([g.detach() for g in gradient])
        virtual = {k: p.detach() - virtual_lr * g for (k, p), g in zip(leaves.items(), averaged)}        # Eq. 9
        direction = meta_direction(losses, virtual, meta_batch)            # like Theta^
        if second:                                                         # d meta / dg = -alpha direction
            gradient = _grad(gradient, theta, [-virtual_lr * v for v in direction.values()])
        else:
            agreement = directional_derivative(losses, leaves, batch, direction)                         # (B,)
            gradient = _grad(weight, theta, -virtual_lr * agreement / len(sample))                       # Eq. 12
    return common.average(gradient)


def meta_direction(losses, parameters, meta_batch):
    """Gradient of 1/M sum_i L_i^meta at the given parameters, {name: tensor}; arguments as weightnet_gradient."""
    leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
    with sdpa_kernel(SDPBackend.MATH):
        gradient = _grad(losses(leaves, meta_batch).mean(), leaves.values())
    return dict(zip(leaves, common.average(gradient)))


def directional_derivative(losses, parameters, batch, direction):
    """<direction, grad L_j> of each local sample, (B,): sum_i G_ij / M (Eq. 13), in one pass of forward mode.

    A tangent walks beside each activation, so no graph is kept; positive: a step on L_j also lowers the meta loss."""
    with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        dual = {k: forward_ad.make_dual(p.detach(), direction[k]) for k, p in parameters.items()}
        value, tangent = forward_ad.unpack_dual(losses(dual, batch))       # (B,), (B,)
    return torch.zeros_like(value) if tangent is None else tangent


def _grad(of, by, weights=None, **graph):
    """torch.autograd.grad with zeros where nothing is reached."""
    return torch.autograd.grad(of, list(by), weights, materialize_grads=True, **graph)


# ------------------------------------------------------- key frames (Eqs. 14, 15) ------------------------------------
def key_frames(features, k=6, q=12):
    """Key frames of a video by density peaks (Eqs. 14-15): frames with many like them, far from any frame with more.

        d_j = exp(-mean of |h_l - h_j|^2 over the k nearest other frames)                            (14)
        gamma_j = min of |h_l - h_j|^2 over the denser frames, d_l > d_j; the densest: its largest   (15)

    Eq. 15 as printed has the condition under its min the wrong way round and one distance without its square; this is
    the reading that its own case condition needs. Of two equally dense frames the earlier counts as denser, so that a
    still shot gives one peak and not as many as it has frames.

    Args:
        features: (n, D) of the frames in the order of time, finite.
        k: neighbours, at most the n - 1 others count.   q: frames wanted.
    Returns: (min(q, n),) long, the frames with the largest d * gamma, in the order of time.
    Raises: ValueError for another shape, values that are not finite, or k or q below 1.
    """
    x = torch.as_tensor(features).detach().double()                            # (n, D)
    if x.ndim != 2 or not x.isfinite().all() or min(k, q) < 1:
        raise ValueError(f"features {tuple(x.shape)}, k {k}, q {q}: expected finite (n, D), k and q at least 1")
    n = len(x)
    if n <= q:
        return torch.arange(n)
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()  # (n, n), 0 for equal frames
    others = distance.clone().fill_diagonal_(torch.inf)                        # (n, n)
    log_d = -others.sort(dim=1).values[:, :min(k, n - 1)].mean(dim=1)          # (n,); d itself is 0 beyond 745
    time = torch.arange(n, device=x.device)                                    # (n,)
    tie = (log_d == log_d[:, None]) & (time < time[:, None])                   # (n, n), l as dense as j and earlier
    denser = (log_d > log_d[:, None]) | tie                                    # (n, n), l denser than j
    gamma = distance.masked_fill(~denser, torch.inf).amin(dim=1)               # (n,)
    gamma = torch.where(denser.any(dim=1), gamma, distance.amax(dim=1))        # (n,)
    peaks = (log_d + gamma.log()).sort(descending=True, stable=True).indices   # (n,), by d * gamma
    return peaks[:q].sort().values.cpu()


# ------------------------------------------------------- baselines ---------------------------------------------------
def focal_weights(losses, gamma=2.0):
    """Focal loss (Lin et al. 2017): (1 - p_i)^gamma, p_i = exp(-L_i / 2), the mean of both directions; (B,) -> (B,)."""
    return (-torch.expm1(-losses / 2)).clamp(min=0) ** gamma


def spl_weights(losses, kept):
    """Self-paced learning: 1 for the easiest part `kept` (0..1) of the global batch, else 0; (B,) -> (B,)."""
    every = gather(losses).sort().values                                   # (N,)
    return (losses <= every[max(1, round(kept * len(every))) - 1]).to(losses)


def l2rw_weights(losses, parameters, batch, meta_batch):
    """L2RW (Ren et al. 2018): weights (B,) in proportion to how far a step on L_j lowers the meta loss, 0 if it does
    not, with mean 1 over the global batch (all 0 where none helps). The meta gradient is that of Theta itself."""
    direction = meta_direction(losses, parameters, meta_batch)
    useful = directional_derivative(losses, parameters, batch, direction).clamp(min=0)                   # (B,)
    every = gather(useful)                                                 # (N,)
    total = every.sum()
    return torch.where(total > 0, len(every) * useful / total, useful)     # an if would wait for a card


# --weighting: losses (B,), own, progress 0..1 of the run, args -> weights (B,). A fork adds a line (docs/forking.md);
# what is learnt, said and drawn follows the name. 'meta' has the new theta (Eq. 11); of 'joint' the loss trains it.
WEIGHTINGS = {
    "meta": lambda losses, own, progress, args: own["weight_net"](losses),
    "joint": lambda losses, own, progress, args: own["weight_net"](losses),              # Table 8
    "focal": lambda losses, own, progress, args: focal_weights(losses, args.focal_gamma),                # Table 6
    "spl": lambda losses, own, progress, args: spl_weights(losses, args.spl_start + (1 - args.spl_start) * progress),
    "none": lambda losses, own, progress, args: torch.ones_like(losses)}


# ======================================================= flags =======================================================
# Defaults by data set, one line a group. 'paper': Section 4.1 and Appendix D; what they do not say from the authors'
# code; 'ours': ncl.py's towers and optimiser, tau and margin tuned on val of moving-emoji. Other sets take 'own'.
MSRVTT = dict(
    recipe="paper; schedule and betas from the authors' code",
    image_encoder="openai/clip-vit-base-patch16", text_encoder="openai/clip-vit-base-patch16", pretrained=True,
    embed_dim=512, image_size=224, image_stats="encoder", eval_resize="crop", frames=12, frame_sampling="random",
    text_length=70, text_pooling="cls", clean_captions=False, join_captions=False, unfold_captions=False,
    epochs=5.0, batch_size=4, optimizer="adamw", lr=5e-6, lr_end=0.0, lr_schedule="cosine", warmup_epochs=0.05,
    weight_decay=5e-2, beta1=0.9, beta2=0.98, eps=1e-8, grad_clip=1.0,
    tau=1.0, meta_lr=5e-6, meta_batch_size=4, crop_min=1.0, flip=0.0, jitter=0.0,
    mixed_precision="no", log_every=50, save_every=1000, eval_every=0)
LONGER = MSRVTT | dict(epochs=20.0, warmup_epochs=0.2)
MOVING = MSRVTT | dict(
    recipe="ours; captions of 30 % of the training clips swapped, for the weights to find",
    image_encoder="small", text_encoder="small", pretrained=False, embed_dim=128,
    image_size=32, image_stats="encoder", frames=4, text_length=24, text_pooling="mean",
    epochs=10.0, batch_size=64, lr=2e-3, lr_end=2e-5, warmup_epochs=1.0, weight_decay=0.1,
    tau=0.1, a0=0.1, meta_lr=2e-4, meta_batch_size=32,                     # tau, a0: benchmarks/results/mama_default.md
    crop_min=0.8, jitter=0.2, log_every=10, save_every=120, eval_every=100)
OWN = MOVING | dict(
    recipe="ours; small towers from scratch", image_size=64, text_length=32, frames=8, save_every=500, eval_every=0)
QUESTIONS = MSRVTT | dict(
    recipe="paper; warm-up, schedule and clipping from the authors' code or ours", task="qa-open",
    image_encoder="swin3d_b", text_encoder="google-bert/bert-base-uncased", embed_dim=768, frames=5, text_length=30,
    epochs=10.0, lr=2e-5, warmup_epochs=0.1, weight_decay=1e-3, meta_lr=2e-5)
CHOICES = QUESTIONS | dict(task="qa-choice", text_length=60)               # of "question choice"
RECIPES = {
    "moving-emoji": MOVING | dict(caption_noise=0.3),
    "emoji": OWN | dict(image_size=48, crop_min=0.35, flip=0.5, jitter=0.4),
    "msrvtt": MSRVTT | dict(unfold_captions=True), "didemo": LONGER, "activitynet": LONGER,
    **dict.fromkeys(("msvd", "youcook2"), MSRVTT | dict(recipe="ours; as msrvtt", unfold_captions=True)),
    "howto100m": MSRVTT | dict(recipe="ours; as msrvtt", epochs=1.0), "own": OWN,
    "msrvtt-qa": QUESTIONS, "msvd-qa": QUESTIONS, "tgif-qa-r-frame": QUESTIONS,
    "tgif-qa-r-action": CHOICES, "tgif-qa-r-transition": CHOICES, "nextqa": CHOICES, "causal-vidqa": CHOICES}
ASKED = RECIPES | {                                                        # under --task qa-open and qa-choice
    "moving-emoji": MOVING | dict(recipe="ours; small towers from scratch", fusion_layers=1, meta_every=4, a0=2.0)}
GRAPH = dict(                                                              # with --qa-model vgt
    recipe="the paper's batch, epochs, frames and rate; sizes and all else from VGT's code",
    image_encoder="regions", embed_dim=512, regions=10, dropout=0.3, frames=32,
    epochs=30.0, optimizer="adam", lr=1e-5, meta_lr=1e-5, warmup_epochs=0.0,                             # beta = alpha
    weight_decay=0.0, beta2=0.999, grad_clip=12.0)                         # of VGT's code; its batch is 64
# text_length is that of VGT's code; of Causal-VidQA that of CoVGT, its successor; of MSVD-QA ours, as MSRVTT-QA's
VGT = ASKED | {name: recipe | GRAPH | dict(text_length=38 if name in ("nextqa", "causal-vidqa") else 20)
               for name, recipe in RECIPES.items() if "task" in recipe}
VGT["nextqa"]["regions"] = 5                                               # of 20 in its file
VGT["moving-emoji"] = ASKED["moving-emoji"] | dict(                        # benchmarks/results/vgt_moving_emoji.md
    recipe="ours; VGT on boxes that are known", regions=5, dropout=0.1, frames=8, crop_min=1.0, lr=5e-4)
TAU_LIMITS = 0.005, 1.0                                                    # of a learnable tau; CLIP-ViP's


def loss_defaults(chosen):
    """Neither margin nor weights: --loss infonce, and the answers' loss alone (--contrastive-weight 0)."""
    plain = chosen.loss == "infonce" or not chosen.contrastive_weight
    return dict(margin_schedule="none", weighting="none") if plain else {}


def looks_ahead(args):
    """Does the weighting take a virtual step on meta-data (Algorithm 1, L2RW)?"""
    return args.weighting in ("meta", "l2rw")


def parse_args(argv=None):
    """Flags; the recipe of --dataset, --task and --loss gives the defaults."""
    p = Parser(__file__, "MAMA: angular margin and meta-learned sample weights.")
    g = p.group("method")
    g.add_argument("--loss", choices=["mama", "infonce"], default="mama", help="infonce: neither margin nor weights")
    g.add_argument("--task", choices=["retrieval", "qa-open", "qa-choice"], default="retrieval",
                   help="pairs; or questions, with a vocabulary of answers or with choices")
    g.add_argument("--contrastive-weight", type=nonnegative, default=1.0,
                   help="of Eq. 1 beside the answers' loss; 0 = the rows VIOLET and VGT of Tables 1 and 2")
    g = p.group("with --contrastive-weight above 0", contrastive_weight=True)
    g.add_argument("--tau", type=positive, help="temperature, divides the cosine, > 0; paper 1")
    g.add_argument("--learnable-tau", action=argparse.BooleanOptionalAction, default=False, help="from --tau on")
    g = p.group("with --loss mama and --contrastive-weight above 0", loss="mama", contrastive_weight=True)
    g.add_argument("--margin-schedule", choices=["logistic", "constant", "none"], default="logistic",
                   help="of Eq. 6; its limit a0 / a1 throughout; or none")
    g.add_argument("--weighting", choices=[*WEIGHTINGS, "l2rw"], default="meta",
                   help="Algorithm 1; joint: Table 8; focal, spl, l2rw: Table 6; none: 1")
    g = p.group("with a margin", margin_schedule=("logistic", "constant"))
    g.add_argument("--a0", type=nonnegative, default=2.0, help="of Eq. 6; the limit of the margin is a0 / a1, radians")
    g.add_argument("--a1", type=positive, default=10.0, help="of Eq. 6; the margin starts at a0 / (a1 + 1)")
    g = p.group("with --margin-schedule logistic", margin_schedule="logistic")
    g.add_argument("--a2", type=between(-1000), default=0.1, help="of Eq. 6, per step; below 0 it falls to 0")
    g = p.group("with --weighting focal", weighting="focal")
    g.add_argument("--focal-gamma", type=nonnegative, default=2.0, help="its exponent")
    g = p.group("with --weighting spl", weighting="spl")
    g.add_argument("--spl-start", type=part, default=0.5, help="part of the batch that it starts with")
    g = p.group("with --weighting meta or joint", weighting=("meta", "joint"))
    g.add_argument("--weight-hidden", type=count, default=100, help="its hidden units; MW-Net 100")
    g = p.group("with --weighting meta", weighting="meta")
    g.add_argument("--meta-lr", type=rate, help="beta of its AdamW; paper: alpha, MW-Net 1e-3")
    g.add_argument("--meta-weight-decay", type=rate, default=1e-3, help="its decay (1e-3)")
    g.add_argument("--virtual-lr", type=rate, default=0.0, help="alpha; 0 = the learning rate of the moment")
    g.add_argument("--meta-every", type=count, default=1, help="steps between updates of the network; paper 1")
    g = p.group("with --weighting meta or l2rw", has_meta=True)
    g.add_argument("--meta-set", default="train", metavar="train|val|FILE",
                   help="source of the meta-data; FILE: a name (key) of a training example a line")
    g.add_argument("--meta-batch-size", type=between(2, 10**9, int), help="M, GLOBAL: of a step; paper: not said")
    g = p.group("with --weighting meta or l2rw and --meta-set train or val", has_meta=True, meta_set=("train", "val"))
    g.add_argument("--meta-size", type=count, default=256, help="examples of the meta-data; paper: not said")
    g.add_argument("--meta-balance", choices=["auto", "classes", "captions", "none"], default="auto",
                   help="classes if any, or K-Means of captions; difference 8")
    g = p.group("with --task qa-open or qa-choice", task=("qa-open", "qa-choice"))
    g.add_argument("--eta", type=nonnegative, default=1.0, help="of Eq. 3, weight of the answers' loss; paper 1")
    answers.add_flags(p)
    g = p.group("views")
    g.add_argument("--crop-min", type=part, help="least area of the crop of a clip; 1 = none")
    g.add_argument("--flip", type=part, help="share of mirror images")
    g.add_argument("--jitter", type=nonnegative, help="of brightness, contrast, saturation, all frames alike")
    args = p.parse(argv, recipes_of, loss_defaults, ("--task", "--qa-model", "--contrastive-weight"),
                   lambda a: {"has_meta": looks_ahead(a) or a.meta_set == "val"})
    p.require(args.a0 / args.a1 <= math.pi / 2,
              f"--a0 {args.a0:g} --a1 {args.a1:g}: the margin a0 / a1 must be at most pi / 2")
    p.require(not args.learnable_tau or TAU_LIMITS[0] <= args.tau <= TAU_LIMITS[1], f"--tau: if learnt in {TAU_LIMITS}")
    p.require(not (looks_ahead(args) and args.chunk_size),
              f"--chunk-size: --weighting {args.weighting} encodes the whole batch in its passes; use a smaller "
              "--batch-size, or another --weighting")
    answers.check_flags(p, args)
    return args


def recipes_of(args):
    """The recipes by data set for a task and the model of its questions."""
    if args.qa_model == "vgt":
        return VGT
    return RECIPES if args.task == "retrieval" else ASKED


# ======================================================= main ========================================================
def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    train, evals = open_data(args)
    if args.shuffle_video:
        train = answers.shuffled(train)                                    # each question with another's video
        evals = {name: {k: answers.shuffled(d) for k, d in of.items()} for name, of in evals.items()}
    questions = answers.questions_of(train, args)                          # None for retrieval
    meta = None
    if looks_ahead(args) or args.meta_set == "val":                        # val's leave every evaluation
        meta, evals = meta_data(train, evals, args.dataset, args.meta_set, args.meta_size, args.meta_batch_size,
                                args.task, args.meta_balance)
    run = Run(__file__, args, train, evals, recipes_of(args))

    # ------------------------------------------- model and optimiser -------------------------------------------------
    tower, tokenizer, transform = run.towers(questions and (lambda: answers.texts(train, 200_000)), questions)
    contrast = fused_margin_loss if args.qa_similarity == "fused" else angular_margin_loss
    tower.by_rows = by_rows                                                # of the pairs that a fusion sees
    own, weight_net = nn.ModuleDict(), WeightNet(args.weight_hidden)       # outside DDP
    own["tau"] = nn.ParameterDict({"log_tau": torch.tensor(math.log(args.tau))} if args.learnable_tau else {})
    if args.weighting in ("meta", "joint"):
        own["weight_net"] = weight_net
    own.to(run.device)
    learnt, meta_optimizer = [tower, own], None
    if args.weighting == "meta":
        rest = [module for module in own.values() if module is not weight_net]              # what else a loss learns
        learnt = [tower, nn.ParameterDict(own.named_parameters(recurse=False)), *rest]
        # the gradients carry alpha: a usual eps, or decay added to them (MW-Net's Adam), would outweigh them
        meta_optimizer = torch.optim.AdamW(weight_net.parameters(), lr=args.meta_lr, betas=(0.9, 0.98), eps=1e-12,
                                           weight_decay=args.meta_weight_decay)
    # >>> shared: optimizer
    groups = common.decay_groups(learnt, args.weight_decay)
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.beta1)
    else:
        kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps, fused=run.fused)
    # <<< shared
    plain = copy.copy(tower)                                               # for the passes without DDP and autocast
    model, optimizer = run.wrap(tower, own, optimizer, meta_optimizer)     # SyncBatchNorm, torch.compile, DDP
    run.resume()                                                           # with --resume: the last checkpoint
    chunks = common.Chunks(lambda inputs: encode(model, **inputs), model, run.accelerator, args.chunk_size)

    # ------------------------------------------- views and batches ---------------------------------------------------
    view = common.Augment(args.image_size, args.crop_min, args.flip, float(args.jitter > 0), *[args.jitter] * 3,
                          squash=args.eval_resize == "squash")
    batches = run.batches([view], transform)
    if looks_ahead(args):
        every = args.meta_every if args.weighting == "meta" else 1         # L2RW looks ahead at each step
        first, last = (-(-step // every) for step in (run.step, run.last))
        meta_batches = iter(common.Batches(meta, [view], transform, args.meta_batch_size, args.seed, first, last,
                                           run.device, min(2, args.workers)))

    # ------------------------------------------- loop ----------------------------------------------------------------
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, run.device, args)
    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)  # torch's own rules of forward mode
    margins = margin_at(0, args), margin_at(run.total, args)
    guesses = [random_guess(mu, args, answers.guess_of(train, questions)) for mu in margins]
    about = answers.question_lines(questions, train, args) if questions else {}
    run.loss_word = "L"                                                    # without weights, as a random guess's is
    run.begin(evaluator, guesses, banner_lines(args, meta, margins) | about)
    for batch in batches:
        progress, mu = run.step / run.total, margin_at(run.step, args)
        tau = own["tau"]["log_tau"].exp() if args.learnable_tau else args.tau               # () or a float
        run.set_lr(common.cosine_lr(run.step, run.total, run.warmup, args.lr, args.lr_end, args.lr_schedule))
        inputs = inputs_of(batch, tokenizer, run.device, train, questions)
        due = args.weighting == "meta" and run.step % args.meta_every == 0
        if due or args.weighting == "l2rw":
            meta_batch = next(meta_batches)
            batch["bad"] += meta_batch["bad"]                              # counted and listed with the batch's own
            meta_inputs = inputs_of(meta_batch, tokenizer, run.device, meta, questions)
            losses = losses_of(plain, tau, mu, run.device, args.eta, contrast, args.contrastive_weight)
            theta = {k: p for k, p in plain.named_parameters() if p.requires_grad}
            look_ahead = losses, theta, inputs, meta_inputs
        if args.weighting == "l2rw":
            weight = l2rw_weights(*look_ahead)                             # (B,)
        if due:
            gradient = weightnet_gradient(*look_ahead, weight_net, args.virtual_lr or run.lr)
            for p, g in zip(weight_net.parameters(), gradient):
                p.grad = g
            meta_optimizer.step()                                          # Eq. 10
            meta_optimizer.zero_grad()

        video, text, *scores = chunks.encode(inputs)                       # (B, D) each, (B, A) of questions
        sample = args.contrastive_weight * contrast(video, text, tau, mu)  # (B,)
        if questions:
            answered = answer_loss(*scores, inputs["answers"])             # (B,)
            sample = sample + args.eta * answered                          # Eq. 3
        if args.weighting != "l2rw":
            weight = WEIGHTINGS[args.weighting](sample.detach(), own, progress, args)   # (B,)
        if "weight_net" in own and not weight.requires_grad:
            raise UserError(f"--weighting {args.weighting}: its network has no part in them; take --weighting none")
        weight = weight.detach() if args.weighting == "meta" else weight   # (B,); its network learns by Eq. 10 alone
        loss = (weight * sample).mean()                                    # (); Eq. 8

        run.check_finite(loss, tau, (video, text), batch)
        chunks.backward(loss)                                              # the full batch's gradient
        common.average_gradients(own.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_([*tower.parameters(), *own.parameters()], args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            own["tau"]["log_tau"].data.clamp_(*map(math.log, TAU_LIMITS))
            tau = own["tau"]["log_tau"].detach().exp()

        numbers = {}
        if run.due("log"):
            noisy = train.column("noisy")                                  # (M,) bool: captions of another clip
            swapped = torch.zeros_like(sample) if noisy is None else torch.as_tensor(noisy[batch["rows"]]).to(sample)
            numbers = {"mu": mu} | numbers_of(sample, weight, swapped, (video, text), args, run, weight_net)
            if questions:
                numbers |= answers.numbers(*scores, inputs["answers"], answered, batch["rows"], train, run.device)
        run.done(batch, loss, tau, numbers)

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    if rank() == 0:
        write_tensors(run.folder / "weights.safetensors", run.tensors)
        if args.meta_set == "val":                                         # eval.py leaves them out as well
            write_json(run.folder / "meta_data.json", {f"{args.dataset} val": meta.column("key")})
    return run.finish(draw)


def margin_at(step, args):
    """mu at an optimiser step, radians."""
    if args.margin_schedule == "logistic":
        return margin(step, args.a0, args.a1, args.a2)
    return args.a0 / args.a1 if args.margin_schedule == "constant" else 0.0


def random_guess(mu, args, answer=0.0):
    """The unweighted loss where every angle is pi / 2, so that the margin makes each pair's cosine sin(mu); and of
    answers that are all alike (nats)."""
    pair = angular_cosine(torch.zeros((), dtype=torch.float64), mu).item()              # sin(mu)
    way = math.log1p((args.batch_size - 1) * math.exp(-pair / args.tau))
    return 2 * args.contrastive_weight * way + args.eta * answer


def banner_lines(args, meta, margins):
    """What the banner says of the method."""
    if not args.contrastive_weight:
        return {"loss": "that of the answers alone (--contrastive-weight 0)"}
    tau = f"tau {args.tau:g}{', learnt' * args.learnable_tau}"
    lines = {"loss": f"{args.loss}: weights {args.weighting}, margin {args.margin_schedule}",
             "temperature": f"{tau}; mu {margins[0]:.3g} .. {margins[1]:.3g} rad"}
    return lines | ({"meta-data": meta.note} if meta else {})


def inputs_of(batch, tokenizer, device, data=None, questions=None):
    """What the model reads of a batch of data: pixels (B, [T,] 3, S, S) and tokens (B, L) of a caption; and where there
    are questions, question (B, L), answers (B,), choices (B, C, L)."""
    asked = {}
    if questions:
        asked = answers.inputs(data, batch["rows"], tokenizer, questions["answers"], device, questions["model"])
    texts = common.pick(batch["captions"], batch["draws"])
    return {"pixels": batch["views"][0], "tokens": {k: v.to(device) for k, v in tokenizer(texts).items()}} | asked


def encode(model, pixels, tokens, question=None, choices=None, answers=None):
    """pixels (b, [T,] 3, S, S), tokens (b, L) -> video, text: (b, D) each; with a question (b, L) scores (b, A) too, or
    (b, C) of choices (b, C, L), and under --qa-similarity fused cosines (b, N) in place of video and text."""
    if question is None:
        return model(pixels, tokens)[:2]
    return model(pixels, tokens, question, choices)


def losses_of(tower, tau, mu, device, eta=1.0, contrast=angular_margin_loss, contrastive_weight=1.0):
    """The function (parameters, inputs) -> (B,) of weightnet_gradient: the towers with other weights, in float32, with
    the dropout in each call that a step begun now has; neither weights nor statistics of the towers change."""
    cards = [device] if device.type == "cuda" else []
    random = common.random_state(device)

    def losses(parameters, inputs):
        state = dict(parameters) | {k: b.clone() for k, b in tower.named_buffers()}
        with torch.random.fork_rng(cards):                                 # afterwards as before
            common.set_random_state(random, device)
            video, text, *scores = encode(lambda *x: common.functional_call(tower, state, x), **inputs)
        sample = contrastive_weight * contrast(video, text, tau, mu)       # (B,)
        return sample + eta * answer_loss(*scores, inputs["answers"]) if scores else sample
    return losses


# ------------------------------------------------------- numbers of the log ------------------------------------------
@torch.no_grad()
def numbers_of(sample, weight, swapped, embeddings, args, run, weight_net):
    """Columns of the log: losses and weights, also of mismatched pairs, (B,) each; the health of the space. Keeps what
    the pictures need: the last batch (N, 3), and the curve of the weight network, one row a log."""
    run.tensors["last_batch"] = gather(torch.stack([sample, weight, swapped], 1)).cpu()                  # (N, 3)
    if "weight_net" in run.own:
        answers_of = {"qa-open": args.answers, "qa-choice": 5}.get(args.task, 1)        # of a question; 1 = no question
        grid = torch.linspace(0, 3 * math.log(args.batch_size) + 1.5 * math.log(answers_of) + 1, 64)    # (64,) nats
        curve = torch.cat([torch.tensor([run.step + 1.0]), weight_net(grid.to(run.device)).cpu()])[None]  # (1, 65)
        run.tensors |= {"loss_grid": grid, "curves": torch.cat([run.tensors.get("curves", curve[:0]), curve])}
    sample, weight, swapped = run.tensors["last_batch"].unbind(1)          # (N,) each
    numbers = {"L": sample.mean().item(), "w": weight.mean().item()}
    for name, those in (("matched", swapped == 0), ("mismatched", swapped == 1)):
        if swapped.any() and those.any():
            numbers |= {f"L_{name}": sample[those].mean().item(), f"w_{name}": weight[those].mean().item()}
    video, text = embeddings                                               # (B, D) each, or cosines (B, N)
    if args.qa_similarity == "fused":
        return numbers | pair_cosines(gather(video))
    return numbers | common.embedding_health(gather(normalize(video)), gather(normalize(text)))


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
