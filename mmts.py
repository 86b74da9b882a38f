"""MM-TS: Multi-Modal Temperature and Margin Schedules for Contrastive Learning with Long-Tail Data
(Sheludzko et al., WACV 2026).

Captions come in clusters of very different size. Where thousands of captions say nearly the same,
pushing all pairs apart destroys what they share; a rare caption must be told from its neighbours.
MM-TS gives each sample of a batch its own temperature, which is higher for larger clusters of
captions. All temperatures swing together along a cosine over training, between telling instances
apart (low) and keeping groups together (high); in a max-margin loss they are margins. No parameters
are added, and the clusters are made once, before training.

Equations (s_ij: cosine of anchor i and candidate j of the global batch; t: optimiser step)
    (2, 10, 11) L_t2v, L_v2t: -1/N sum_i log( exp(s_ii / tau_i) / sum_j exp(s_ij / tau_i) )
    (5, 12)     L = 1/2 (L_v2t + L_t2v)                                  clip_terms, clip_loss
    (3)         L = mean of max(0, s_ij - s_ii + m_i) over i != j, both ways   max_margin_loss
    (6)         sh(c) = (K_c - min K) / (max K - min K) (sh+ - sh-) + sh-        cluster_shift
    (7)         tau_base(t) = alpha / 2 cos(2 pi t / T)                       base_temperature
    (8)         tau_i = tau_base(t) + sh(c_i), or m_i                       sample_temperature

Symbols
    v, t        image, text           (B, D)  embeddings of this process
    tau_i, m_i  tau, margin           (B,)    of an anchor: divides cosines; a difference of cosines
    alpha       alpha                 ()      range of the swing, twice its amplitude; CC3M 0.04
    sh-, sh+    shift_min, shift_max  ()      of the smallest and largest cluster; CC3M 0.05, 0.10
    T           period                ()      optimiser steps; authors' code a fifth of the run
    K_c         sizes                 (K,)    captions in cluster c, largest first; 200 clusters

Commands
    accelerate launch mmts.py                            # moving emoji, 71 s on two CPU cores
    accelerate launch mmts.py --no-schedule --no-shifts  # baseline
    accelerate launch mmts.py --no-schedule              # ICS alone; --no-shifts: TS alone
    accelerate launch mmts.py --dataset cc3m             # the paper's run
    accelerate launch mmts.py --dataset captions.csv     # own data: image, caption

docs/mmts.md: commands for every table, recipes, differences from the paper, results.
To try an idea of your own, copy this file and edit it; docs/forking.md.
"""

import argparse
import functools
import math
from typing import NamedTuple

import common

from common import (
    Augment, EvaluationFacts, Evaluator, MatchingLoss, Parser, Run, Temperature, between,
    check_source, clean_exit, fp32, gather, hard_pairs, head_mid_tail, k_means, largest_first,
    nonnegative_float, normalize, open_clusters, open_data, fraction, per_anchor, positive_float, positive_index,
    rate, row_blocks, to_device, int_ge0, world_size)

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.mmts import draw


# ======================================================= METHOD ===================================
def base_temperature(step, period, alpha):
    """tau_base(t) = alpha / 2 cos(2 pi t / T) (Eq. 7), a float, highest at step 0.

    Args:
        step, period: t and T, in optimiser steps.
        alpha: range of the swing; 0 = no schedule.
    """
    return alpha / 2 * math.cos(2 * math.pi * step / period)


def cluster_shift(sizes, sh_min, sh_max):
    """sh(c) (Eq. 6): linear in the size, sh_min of the smallest and sh_max of the largest cluster.

    Args:
        sizes: (K,) captions in each cluster, a tensor or numbers.
    Returns: (K,) float32; sh_min for all if all have the same size (0 / 0 in the equation).
    """
    sizes = torch.as_tensor(sizes, dtype=torch.float64)                    # (K,)
    spread = sizes.max() - sizes.min()
    if spread == 0:
        share = torch.zeros_like(sizes)                                    # (K,)
    else:
        share = (sizes - sizes.min()) / spread                             # (K,) 0..1
    return (share * (sh_max - sh_min) + sh_min).float()


def sample_temperature(step, shift, period, alpha):
    """tau_i = tau_base(t) + sh(c_i) (Eq. 8), or the margin m_i: shift (B,) -> (B,).

    The checks of the flags, the banner and the pictures call this function too.
    """
    return shift + base_temperature(step, period, alpha)


@row_blocks
def info_nce_per_anchor(anchor, target, tau, *, candidates, label_smoothing):
    """Eq. 2 of each anchor: (b, D), (b,), tau, (N, D) -> (b,)."""
    logits = anchor @ candidates.T / tau                                   # (b, N)
    return F.cross_entropy(logits, target, reduction="none",
                           label_smoothing=label_smoothing)                # (b,)


@fp32
def clip_terms(image, text, tau, label_smoothing=0.0):
    """Both directions of InfoNCE with a temperature for each anchor (Eqs. 10 and 11).

    Args:
        image, text: (B, D) embeddings of this process; row i of both is a positive pair.
        tau: temperature > 0: a number, () or (B,). tau_i serves image i in image -> text and text i
            in text -> image.
        label_smoothing: share of the target that is spread over all candidates; VAST 0.1.
    Returns: {"L_v2t", "L_t2v": ()}, means over the anchors, float32. A random guess is about ln N.
    """
    image, text = normalize(image), normalize(text)                        # (B, D)
    tau = per_anchor(tau, image)                                           # () or (B, 1)
    target = positive_index(image)                                         # (B,)
    # each direction has its own matrix: the transpose of the first would have the temperatures of
    # the candidates
    v2t = info_nce_per_anchor(image, target, tau, candidates=gather(text),
                              label_smoothing=label_smoothing)             # (B,)
    t2v = info_nce_per_anchor(text, target, tau, candidates=gather(image),
                              label_smoothing=label_smoothing)             # (B,)
    return {"L_v2t": v2t.mean(), "L_t2v": t2v.mean()}


def clip_loss(image, text, tau, label_smoothing=0.0):
    """L = 1/2 (L_v2t + L_t2v) (Eq. 12), the mean of clip_terms: (). A random guess: about ln N."""
    terms = clip_terms(image, text, tau, label_smoothing)
    return (terms["L_v2t"] + terms["L_t2v"]) / 2


@row_blocks
def max_margin_per_anchor(anchor, target, margin, *, candidates):
    """Eq. 3, the mean over the negatives of each anchor: (b, D), (b,), margin, (N, D) -> (b,)."""
    target_column = target[:, None]                                        # (b, 1)
    sim = anchor @ candidates.T                                            # (b, N)
    hinge = (sim - sim.gather(1, target_column) + margin).relu()           # (b, N)
    hinge = hinge.scatter(1, target_column, 0.0)                           # (b, N)
    return hinge.sum(1) / (len(candidates) - 1)                            # (b,)


@fp32
def max_margin_terms(image, text, margin):
    """Both directions of the max-margin loss with a margin for each anchor (Eq. 3).

    Args:
        image, text: (B, D) embeddings of this process; row i of both is a positive pair.
        margin: >= 0, in units of the cosine: a number, () or (B,), as tau of clip_terms.
    Returns: {"L_v2t", "L_t2v": ()}, means over the pairs of an anchor and a negative, float32. If
        all cosines are equal, they are the mean margin.
    """
    image, text = normalize(image), normalize(text)                        # (B, D)
    margin = per_anchor(margin, image, "margin", positive=False)           # () or (B, 1)
    target = positive_index(image)                                         # (B,)
    v2t = max_margin_per_anchor(image, target, margin, candidates=gather(text))          # (B,)
    t2v = max_margin_per_anchor(text, target, margin, candidates=gather(image))          # (B,)
    return {"L_v2t": v2t.mean(), "L_t2v": t2v.mean()}


def max_margin_loss(image, text, margin):
    """Eq. 3, its mean over the 2 N (N - 1) negative pairs of both directions: ()."""
    terms = max_margin_terms(image, text, margin)
    return (terms["L_v2t"] + terms["L_t2v"]) / 2


# ------------------------------------------------------- clusters ---------------------------------
def cluster_captions(embeddings, k, seed, counts=None):
    """Clusters embeddings of captions by K-Means (Section 4.4).

    It starts from k-means++; more than 100,000 points go in mini-batches.

    Args:
        embeddings: (M, D), normalised here.
        k: number of clusters.
        seed: of K-Means.
        counts: (M,) how often each occurs in the data; None = once.
    Returns: labels (M,) long; sizes (K,) long, K_c of Eq. 6, largest first; K < k if points
        coincide.
    Raises: ValueError from scikit-learn if embeddings are not finite or fewer than k.
    """
    x = normalize(torch.as_tensor(embeddings)).numpy()                     # (M, D)
    labels = k_means(x, k, seed, counts)                                   # (M,)
    labels, sizes, _ = largest_first(labels, counts)                       # (M,), (K,)
    return labels, sizes


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, which stand in parse_args and, for the flags of all
# scripts, in contrastive/engine/flags.py. 'recipe' says whose values they are (docs/mmts.md).
MOVING = dict(
    recipe="ours", image_size=32, frames=4, text_length=24, batch_size=128,
    log_every=5, save_every=120, eval_every=120)
EMOJI = MOVING | dict(
    recipe="ours; as moving-emoji", image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
OWN = dict(
    recipe="ours; small towers from scratch", frames=8, batch_size=128,
    num_clusters=0)                                                        # by the number of items
CC3M = dict(
    recipe="paper; optimiser, views and captions from the CC3M trainer",
    image_encoder="resnet50.a1_in1k", text_encoder="distilbert/distilbert-base-uncased",
    pretrained=True, embed_dim=256, projection_bias=True,
    image_size=256, image_stats="clip", eval_resize="squash",
    text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=512, lr=2e-4, lr_end=1e-5, weight_decay=0.02, beta2=0.999,
    grad_clip=0.0,
    warmup_epochs=0.35,                                                    # 2,000 steps
    tau=0.01, cluster_encoder="distilbert/distilbert-base-uncased",
    crop_min=0.5, flip=0.5, jitter=0.0, randaugment_ops=2, randaugment_magnitude=21,
    randaugment_strengths="cc3m",
    mixed_precision="bf16", eval_datasets=["coco", "flickr30k"], log_every=50, save_every=1000)
AVION = dict(
    recipe="paper; towers, views and optimiser from AVION",
    # AVION's text tower has GELU, as this one; --init-from loads AVION's LaViLa weights into both
    image_encoder="video_vit_base_patch16_clip_224.openai",
    text_encoder="laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    pretrained=True, embed_dim=256,
    image_size=224, image_stats="clip", frames=16, frame_sampling="random",
    text_length=77, text_pooling="cls",
    epochs=100.0, batch_size=512, chunk_size=16, lr=3e-5, lr_end=1e-5, weight_decay=0.01,
    beta2=0.999, grad_clip=0.0, warmup_epochs=1.0,
    loss="max-margin", tau=0.07,
    clusters="noun", cluster_encoder="sentence-transformers/all-MiniLM-L6-v2",
    crop_min=0.5, jitter=0.0,
    mixed_precision="fp16", log_every=20)
VAST = AVION | dict(
    recipe="paper; towers, views, optimiser and matching head from VAST",
    # --init-from loads VAST's released weights into all of it
    image_encoder="vast", text_encoder="google-bert/bert-base-uncased",
    embed_dim=512, eval_resize="squash", text_length=40,
    frames=8, eval_frames=16,                          # in evaluation the middles of their segments
    epochs=30.0, batch_size=64, chunk_size=4,
    lr_end=0.0, lr_schedule="linear", warmup_epochs=0.0, warmup_fraction=0.1,
    lr=3e-5,                                           # in VAST's script; its other sets have 2e-5
    image_lr=5e-7, beta2=0.98, eps=1e-6,
    loss="infonce", label_smoothing=0.1, matching_weight=0.1, clusters="captions", crop_min=1.0)
FROZEN = dict(
    recipe="ours; published encoders, frozen: their projections learn",
    # the weights, and the text encoder all-MiniLM-L6-v2, are installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean", cached_views=4,
    max_steps=1000, batch_size=512, lr=3e-4, warmup_epochs=0.0, warmup_fraction=0.05,
    num_clusters=0, crop_min=0.35, flip=0.5, jitter=0.0, log_every=50)
RECIPES = {
    "moving-emoji": MOVING,
    "emoji": EMOJI,
    "cc3m": CC3M,
    "own": OWN,
    "frozen": FROZEN,
    "epic-kitchens-100": AVION | dict(caption_relevancy=0.1),
    "youcook2": VAST,
    "ssv2-lt": VAST | dict(clusters="label", lr=2e-5, modalities="v")}
# whose weights a recipe fine-tunes, and the image encoder into which they fit
FIRST_WEIGHTS = {
    "epic-kitchens-100": ("LaViLa's", AVION["image_encoder"]),
    "youcook2": ("VAST's", "vast"),
    "ssv2-lt": ("VAST's", "vast")}


class Range(NamedTuple):
    """Defaults of --alpha, --shift-min and --shift-max, and whose values they are."""

    alpha: float
    shift_min: float
    shift_max: float
    source: str


# By recipe and loss, from Section 7 of the supplement; 'ours' where it has none. Any other recipe
# has those of 'own'.
RANGES = {
    ("cc3m", "infonce"): Range(0.04, 0.05, 0.10, "paper: CLIP on CC3M"),
    ("epic-kitchens-100", "infonce"): Range(0.08, 0.05, 0.20, "paper: AVION, CLIP"),
    ("epic-kitchens-100", "max-margin"): Range(0.20, 0.17, 0.30, "paper: AVION, MI-MM"),
    ("youcook2", "infonce"): Range(0.06, 0.06, 0.09, "paper: VAST, CLIP"),
    ("youcook2", "max-margin"): Range(0.20, 0.10, 0.30, "paper: VAST, MI-MM"),
    ("ssv2-lt", "infonce"): Range(
        0.04, 0.07, 0.11, "paper: a cell of Table 8; Table 7 does not say"),
    ("ssv2-lt", "max-margin"): Range(0.20, 0.10, 0.30, "ours: VAST's MI-MM"),
    ("own", "infonce"): Range(0.08, 0.08, 0.12, "ours"),
    ("own", "max-margin"): Range(0.20, 0.17, 0.30, "ours: AVION's MI-MM")}
TAU_LIMITS = (0.01, 1.0)                                                   # if learnt; AVION 0.01


def value_name(loss):
    """What Eq. 8 gives to a loss, by its name in the log: 'tau', or 'margin' with max-margin."""
    return "margin" if loss == "max-margin" else "tau"


def default_range(recipe, loss):
    """The Range of a recipe and a loss; that of own data if the recipe has none."""
    if loss != "max-margin":
        # a loss that a fork adds has the temperatures of InfoNCE
        loss = "infonce"
    return RANGES.get((recipe, loss), RANGES["own", loss])


def method_defaults(chosen):
    """Defaults that depend on --recipe, --loss and --image-encoder."""
    recipe = RECIPES[chosen.recipe]
    recipe_loss = recipe.get("loss", "infonce")
    loss = chosen.loss or recipe_loss                                      # "" = that of the recipe
    default = default_range(chosen.recipe, loss)
    defaults = {"loss": recipe_loss, "alpha": default.alpha, "shift_min": default.shift_min,
                "shift_max": default.shift_max}
    if loss == "max-margin":
        defaults["label_smoothing"] = 0.0                                  # of InfoNCE alone
    is_vast = chosen.image_encoder in ("", "vast", "vast-small")
    if "matching_weight" in recipe and not is_vast:
        # of VAST alone
        defaults.update(matching_weight=0.0, image_lr=0.0, modalities="auto")
    return defaults


def check_flags(parser, args):
    """Refuses flags that contradict each other, and temperatures that are not above 0."""
    if args.learnable_tau:
        if args.loss != "infonce" or args.schedule or args.shifts:
            parser.error("--learnable-tau: a learnt temperature has no schedule and no shifts; add "
                         "--loss infonce --no-schedule --no-shifts")
        low, high = TAU_LIMITS
        if not low <= args.tau <= high:
            parser.error(f"--tau {args.tau}: a learnt temperature must start between {low} and "
                         f"{high}")
    if args.image_lr and not args.lr:
        parser.error("--image-lr: not with --lr 0, of which it is a multiple")
    if args.shift_min > args.shift_max:
        parser.error(f"--shift-min {args.shift_min:g}: larger than --shift-max "
                     f"{args.shift_max:g}")
    # a period of one step: the range does not depend on the steps of the run
    low, high = value_range(args, args.periods)
    if args.loss != "max-margin" and low <= 0:
        parser.error(f"the temperatures of the run, {low:g} .. {high:g}, must be above 0; lower "
                     "--alpha, or raise --shift-min or --tau")
    if args.loss == "max-margin" and (low < 0 or high >= 2):
        parser.error(f"the margins of the run, {low:g} .. {high:g}, must be from 0 to below 2, as "
                     "differences of cosines; change --alpha, --shift-min, --shift-max or --margin")
    if args.clusters == "none" and args.shifts:
        parser.error("--clusters none: --shifts need clusters; add --no-shifts")
    if args.cluster_encoder == "small":
        parser.error("--cluster-encoder small: it has no trained weights; use tf-idf, or a "
                     "transformers id or folder")
    check_first_weights(parser, args)


def check_first_weights(parser, args):
    """Refuses the recipes of AVION and of VAST without the weights that they fine-tune."""
    owner, image_encoder = FIRST_WEIGHTS.get(args.recipe, ("", ""))
    has_weights = args.init_from or args.resume
    if args.image_encoder == image_encoder and args.pretrained and not has_weights:
        parser.error(f"--init-from is needed: this recipe fine-tunes {owner} weights, and without "
                     "them it would train encoders that do not belong together; give "
                     "--no-pretrained to train from scratch")


def parse_args(argv=None):
    """Flags; their defaults follow --dataset or --recipe, and --loss."""
    parser = Parser(__file__, "MM-TS: a temperature or margin for each sample, by the size of the "
                              "cluster of its caption.")
    yes_or_no = argparse.BooleanOptionalAction
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=["infonce", "max-margin"], default=None,
                        help="InfoNCE with temperatures, or the max-margin loss with margins")
    method.add_argument("--schedule", action=yes_or_no, default=True,
                        help="temperatures or margins swing along a cosine over the run (TS of "
                             "Tables 4 and 9)")
    method.add_argument("--shifts", action=yes_or_no, default=True,
                        help="each sample has a temperature or margin by the size of its cluster "
                             "(ICS of Tables 4 and 9); else --tau or --margin for all")
    method.add_argument("--alpha", type=nonnegative_float,
                        help="highest minus lowest value of the schedule; paper 0.04 to 0.08 for "
                             "temperatures, 0.2 for margins")
    method.add_argument("--periods", type=positive_float, default=5.0,
                        help="periods of the schedule in the run; authors' code 5")
    method.add_argument("--shift-min", type=nonnegative_float,
                        help="temperature or margin of the smallest cluster without the "
                             "schedule, sh-; paper 0.05 to 0.07, margins 0.1 and 0.17")
    method.add_argument("--shift-max", type=nonnegative_float,
                        help="temperature or margin of the largest cluster without the "
                             "schedule, sh+; paper 0.09 to 0.2, margins 0.3")
    method.add_argument("--tau", type=positive_float, default=0.1,
                        help="temperature of InfoNCE with --no-shifts, divides the cosine; CLIP "
                             "on CC3M 0.01, AVION and VAST 0.07; also that at which hard negatives "
                             "of --matching-weight are drawn")
    method.add_argument("--learnable-tau", action=yes_or_no, default=False,
                        help="learn the temperature, with --no-schedule --no-shifts (VAST's "
                             "InfoNCE): from --tau on, or from that of VAST's released weights")
    method.add_argument("--margin", type=nonnegative_float, default=0.2,
                        help="margin of --loss max-margin with --no-shifts, in units of the "
                             "cosine, 0..2; AVION 0.2")
    method.add_argument("--label-smoothing", type=fraction, default=0.0,
                        help="share of InfoNCE's target that is spread over all candidates, 0..1; "
                             "VAST 0.1")
    method.add_argument("--matching-weight", type=nonnegative_float, default=0.0,
                        help="weight of the loss of VAST's matching head, which is trained beside "
                             "the other loss and re-ranks in eval.py; VAST 0.1; 0 = no head")
    method.add_argument("--image-lr", type=rate, default=0.0,
                        help="learning rate of the image encoder after the warm-up, its highest; "
                             "VAST 5e-7; 0 = --lr")
    method.add_argument("--clusters", metavar="SOURCE", default="captions",
                        help="source of the clusters: captions or vision (K-Means of embeddings); "
                             "label, verb, noun or verb-noun (classes); a JSON file of {key: "
                             "cluster}; or none")
    method.add_argument("--num-clusters", type=between(2, 10**6, int), default=200,
                        help="number of clusters of K-Means, at least 2; paper 200; own data and "
                             "--recipe frozen: a quarter of what is clustered, at most 200")
    method.add_argument("--cluster-encoder", default="tf-idf",
                        help="embeddings for K-Means: tf-idf, or a transformers id or folder "
                             "(vision: an image encoder); paper: SentenceBERT, on CC3M DistilBERT")

    views = parser.add_argument_group("views")
    views.add_argument("--crop-min", type=fraction, default=0.8,
                       help="smallest crop as a share of the frame's area, 0..1, the same in all "
                            "frames; AVION and CC3M trainer 0.5; 1 = no crop")
    views.add_argument("--flip", type=fraction, default=0.0,
                       help="share of images or clips that are mirrored, 0..1; CC3M trainer 0.5")
    views.add_argument("--jitter", type=nonnegative_float, default=0.2,
                       help="strength of changes in brightness, contrast and saturation, in all "
                            "views and the same in all frames; AVION and CC3M trainer 0")
    views.add_argument("--randaugment-ops", type=int_ge0, default=0,
                       help="operations of RandAugment, each with probability 1/2; CC3M trainer 2; "
                            "0 = off")
    views.add_argument("--randaugment-magnitude", type=between(0, 30, int), default=0,
                       help="strength of RandAugment, 0..30, beside --randaugment-ops; at 0 only "
                            "AutoContrast and Equalize of torchvision's change anything; CC3M "
                            "trainer 21 (7 of its 10)")
    views.add_argument("--randaugment-strengths", choices=["torchvision", "cc3m"],
                       default="torchvision",
                       help="strengths at 30: torchvision's; or the CC3M trainer's, shifts by 10 "
                            "pixels, light and sharpness times 1.9, grey outside")
    return parser.parse(argv, RECIPES, method_defaults, check=check_flags)


# ------------------------------------------------------- schedule and shifts of a run -------------
def schedule_of(args, total_steps):
    """T in steps and alpha of Eq. 7 for a run of total_steps; alpha is 0 with --no-schedule."""
    if args.schedule:
        return total_steps / args.periods, args.alpha
    return total_steps, 0.0


def fixed_value(args):
    """The temperature or margin of all samples without --shifts, around which a schedule swings."""
    if args.loss == "max-margin":
        return args.margin
    return args.tau


def shifts_of(clusters, args):
    """(K + 1,) sh(c) of each cluster, the last one (index -1) for examples without a cluster.

    Without --shifts (1,): --tau or --margin.
    """
    if not args.shifts:
        return torch.tensor([fixed_value(args)])
    shifts = cluster_shift(clusters.sizes, args.shift_min, args.shift_max)               # (K,)
    return torch.cat([shifts, shifts.new_tensor([args.shift_min])])


def value_range(args, total_steps):
    """Lowest and highest temperature or margin of a run of total_steps."""
    if args.shifts:
        extremes = [args.shift_min, args.shift_max]
    else:
        extremes = [fixed_value(args)]
    shifts = torch.tensor(extremes, dtype=torch.float64)                   # (2,) or (1,)
    period, alpha = schedule_of(args, total_steps)
    # through sample_temperature, so that a fork's own schedule is checked as well: 64 points of a
    # period have the extremes of the cosine, and no more than 1,000 periods are needed
    times = [*np.arange(0, min(total_steps, 1000 * period), period / 64), total_steps]
    values = [sample_temperature(time, shifts, period, alpha) for time in times]
    values = torch.stack(values)                                           # (times, 2 or 1)
    # without rounding errors, which could lie below 0
    return round(values.min().item(), 12), round(values.max().item(), 12)


# ======================================================= main =====================================
def main(args):  # noqa: C901, PLR0912
    """One run: data, model, clusters, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    # before any process group, so that errors come quickly
    train, evals = open_data(args)
    check_source(train, args.clusters)
    # a CLIP as --image-encoder is the text encoder as well
    args = common.adjust_flags_to_encoder(args)
    # the batch and the epochs of a user's small data
    args = common.adjust_flags_to_data(args, train)
    steps = common.count_steps(args, train)        # per epoch, in total, of the warm-up
    run = Run(__file__, args, train, evals, steps, RECIPES)
    run.tau_column = value_name(args.loss)

    # ------------------------------------------- model and optimiser ------------------------------
    tower, tokenizer, transform = common.build_towers(args, train, run)
    # made after the towers, so that their initial weights do not depend on the clusters
    kmeans = functools.partial(cluster_captions, seed=args.seed)
    clusters = open_clusters(run.folder, args, train, run.device, kmeans)
    # parameters of the loss; they stand outside DDP and are saved
    loss_modules = nn.ModuleDict()
    if args.learnable_tau:
        loss_modules["tau"] = Temperature(released_or_given_tau(args, tower), TAU_LIMITS)
    loss_modules.to(run.device)
    trained_modules = [tower, loss_modules]
    if args.image_lr:
        common.scale_lr(tower.vision, args.image_lr / args.lr)
    # >>> shared: optimizer
    groups = common.decay_groups(trained_modules, args.weight_decay)
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.beta1)
    else:
        kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps,
                         fused=run.fused)
    # <<< shared
    model, optimizer = run.wrap(tower, loss_modules, optimizer)            # DDP, torch.compile
    run.resume()                                                           # with --resume
    encode_inputs = functools.partial(encode, model)
    matching = None                                                        # VAST's loss
    second_pass = None
    if args.matching_weight:
        matching = MatchingLoss(model, args.matching_weight)
        second_pass = matching.second_pass
    chunks = common.Chunks(
        encode_inputs, model, run.accelerator, args.chunk_size, second_pass)

    # ------------------------------------------- views and batches --------------------------------
    # features of frozen encoders (--freeze), which are computed once
    cache = common.open_feature_cache(args, run, tower, tokenizer, transform)
    tokenizer = cache.tokenizer
    batches = run.batches([training_view(args)], transform, cache)

    # ------------------------------------------- loop ---------------------------------------------
    shifts = shifts_of(clusters, args)                                     # (K + 1,) or (1,)
    period, alpha = schedule_of(args, steps.total)
    method_metrics = functools.partial(head_mid_tail, clusters=clusters)
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, device=run.device,
                          args=args, method_metrics=method_metrics)
    run.begin(evaluator, random_guess(args, steps.total, clusters),
              banner_lines(args, steps.total, clusters, loss_modules))
    # listed once, since a walk through all modules takes milliseconds
    clipped_parameters = [*tower.parameters(), *loss_modules.parameters()]
    for batch in batches:
        run.set_lr(common.learning_rate(run.step, steps, args))
        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        tokens = {name: ids.to(run.device) for name, ids in tokenizer(texts).items()}    # (B, L)
        inputs = {"pixels": batch["views"][0], "tokens": tokens}           # (B, [T,] 3, S, S)
        image, text = chunks.encode(inputs)                                # (B, D)

        num_missing = 0
        if args.learnable_tau:
            value = loss_modules["tau"]()                                  # ()
        else:
            if args.shifts:
                # -1, an example that was not clustered, picks the last of shifts
                cluster, num_missing = clusters.look_up(batch["keys"], texts)            # (B,)
                shift = shifts[cluster]                                    # (B,)
            else:
                shift = shifts.expand(len(texts))                          # (B,)
            value = sample_temperature(run.step, shift, period, alpha)     # (B,) tau_i or m_i
            value = to_device(value, run.device)

        if args.loss == "infonce":
            loss = clip_loss(image, text, tau=value, label_smoothing=args.label_smoothing)
        elif args.loss == "max-margin":
            loss = max_margin_loss(image, text, margin=value)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")

        run.check_finite(loss, value, (image, text))
        if matching:
            draws = torch.from_numpy(batch["draws"][:, 1:3])               # (B, 2)
            sampling_tau = value.detach() if args.learnable_tau else args.tau
            pairs = hard_pairs(image, text, tokens, draws, tau=sampling_tau,
                               length=args.text_length)
            matching.begin(pairs, len(texts))                              # for the second pass
        chunks.backward(loss)                                              # of the full batch
        if matching:
            loss = loss.detach() + args.matching_weight * matching.total   # ()
            # `done` looks at the loss that was given last
            run.check_finite(loss, value, (image, text))
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_(clipped_parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            loss_modules["tau"].clamp()
        columns = {}
        if run.due("log", run.step + 1):
            # times the processes, so that the mean over them is the sum
            batch_terms = {"not_in_clusters": world_size() * num_missing}
            if matching:
                batch_terms["L_match"] = matching.total
            columns = log_columns(image, text, value, batch_terms, run)
        run.done(batch, loss, value, columns)                              # count, log, save, stop

    # ------------------------------------------- save and evaluate --------------------------------
    curve = functools.partial(sample_temperature, period=period, alpha=alpha)
    tower.spec["evaluation"] = vars(evaluation_facts(args))                # for eval.py
    return run.finish(functools.partial(draw, clusters=clusters, shifts=shifts, period=period,
                                        curve=curve))


# ------------------------------------------------------- views and encoders -----------------------
def training_view(args):
    """The view of an image, or of a clip, the same for all its frames."""
    randaugment = (0, 0)                                                   # off
    if args.randaugment_ops:
        randaugment = (args.randaugment_ops, args.randaugment_magnitude,
                       args.randaugment_strengths)
    return Augment(args.image_size, args.crop_min, args.flip, jitter_p=1.0,
                   brightness=args.jitter, contrast=args.jitter, saturation=args.jitter,
                   randaugment=randaugment, squash=args.eval_resize == "squash")


def released_or_given_tau(args, tower):
    """The first value of a learnt temperature: that of VAST's released weights, if they are loaded
    and --tau is not on the command line; else --tau."""
    released_tau = getattr(tower, "released_tau", None)
    if released_tau is None or "--tau" in args.command_line:
        return args.tau
    return released_tau


def encode(model, inputs):
    """pixels (b, [T,] 3, S, S), tokens (b, L) -> image, text: (b, D) each."""
    image, text, _ = model(inputs["pixels"], inputs["tokens"])
    return image, text


# ------------------------------------------------------- banner and log ---------------------------
def random_guess(args, total_steps, clusters):
    """The loss at the start and at the end of training if all cosines are equal.

    None if it is unknown, as for a loss that a fork adds.
    """
    matching_guess = args.matching_weight * math.log(2)
    if args.loss == "infonce":
        guess = math.log(args.batch_size) + matching_guess                 # at any temperature
        return [guess, guess]
    if args.loss != "max-margin":
        return None
    shifts = shifts_of(clusters, args)                                     # (K + 1,) or (1,)
    period, alpha = schedule_of(args, total_steps)
    guesses = []
    for step in (0, total_steps):
        margins = sample_temperature(step, shifts, period, alpha)          # (K + 1,) or (1,)
        if args.shifts:
            share = clusters.sizes / clusters.sizes.sum()                  # (K,)
            guesses.append(margins[:-1].dot(share).item() + matching_guess)
        else:
            guesses.append(margins.item() + matching_guess)
    return guesses


def banner_lines(args, total_steps, clusters, loss_modules):
    """Lines of the banner: {title: text}."""
    lines = {"loss": f"{args.loss}, {variant_name(args)}"}
    if args.learnable_tau:
        lines["temperature"] = f"tau {loss_modules['tau'].start:.4g} at first, learnt"
    else:
        title = "margin" if args.loss == "max-margin" else "temperature"
        lines[title] = describe_range(args, total_steps)
    if clusters is None:
        return lines
    method = f"by {args.clusters}"
    if args.clusters in ("captions", "vision"):
        method = f"K-Means on {args.cluster_encoder}, {args.clusters}"
    sizes = clusters.sizes                                                 # (K,)
    lines["clusters"] = (f"{len(sizes):,}, {method}; largest {sizes[0]:,}, smallest "
                         f"{sizes[-1]:,}")
    num_without = clusters.meta["without"]
    if num_without:
        lines["examples"] = (f"{num_without:,} without a cluster are treated as in the smallest "
                             "one")
    return lines


def variant_name(args):
    """The name of a row of Tables 4 and 9."""
    if args.learnable_tau:
        return "learnt tau (a baseline)"
    if args.schedule and args.shifts:
        return "schedule and shifts (MM-TS)"
    if args.schedule:
        return "schedule alone (TS)"
    if args.shifts:
        return "shifts alone (ICS)"
    return "fixed (the baseline)"


def describe_range(args, total_steps):
    """The temperatures or margins of a run in words, and whose values they are."""
    low, high = value_range(args, total_steps)
    text = f"{value_name(args.loss)} {low:g} .. {high:g}"
    if args.schedule:
        period, _ = schedule_of(args, total_steps)
        text += f" over the run, period {period:g} steps"
    if args.schedule or args.shifts:
        source = default_range(args.recipe, args.loss).source
        if {"--alpha", "--shift-min", "--shift-max"}.intersection(args.changed):
            source = "by flags"
        text += f" ({source})"
    return text


@torch.no_grad()
def log_columns(image, text, value, batch_terms, run):
    """Columns of the log: terms of the loss, health of the space, range of the temperatures.

    Args:
        image, text: (B, D) embeddings of this process.
        value: temperature or margin of the loss, (B,) or ().
        batch_terms: {'not_in_clusters': number of captions or examples of the batch that were not
            clustered, 'L_match': ()}. Such a caption takes the nearest cluster, such an example
            gets sh-.
        run: the Run.
    """
    args = run.args
    terms = {}
    if args.loss == "infonce":
        terms = clip_terms(image, text, value, args.label_smoothing)
    elif args.loss == "max-margin":
        terms = max_margin_terms(image, text, value)
    columns = common.mean_over_processes(terms | batch_terms, run.device)
    image, text = gather(normalize(image)), gather(normalize(text))        # (N, D)
    columns.update(common.embedding_health(image, text))
    columns.update(range_columns(value_name(args.loss), value))
    return columns


@torch.no_grad()
def range_columns(name, value):
    """{NAME_min, NAME_mean, NAME_max} over all processes of a value (B,) or ()."""
    values = gather(value.reshape(-1))                                     # (N,), or (W,) of ()
    return {f"{name}_min": values.min().item(), f"{name}_mean": values.mean().item(),
            f"{name}_max": values.max().item()}


def evaluation_facts(args):
    """What eval.py has to know of a run."""
    tau = args.tau
    if args.loss == "max-margin" or args.schedule or args.shifts:
        tau = None                                                         # none, or it changes
    return EvaluationFacts(tau=tau, learnable_tau=args.learnable_tau,
                           knn_features=args.knn_features)


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
