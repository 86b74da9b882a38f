"""MM-TS: Multi-Modal Temperature and Margin Schedules for Contrastive Learning with Long-Tail Data (WACV 2026).

Captions come in clusters of very different size. Where thousands of captions say nearly the same, pushing all pairs
apart destroys what they share; a rare caption, in contrast, must be told from everything near it. So each pair i of a
batch has its own temperature, which is higher for larger clusters of captions. All temperatures swing together along a
cosine over training, between telling instances apart (low) and keeping groups together (high). In a max-margin loss
the margin takes the place of the temperature. No added parameters or forward passes; the clusters are made once.

Equations, s_ij = cosine, rows = anchors i, all candidates of the global batch (t = optimiser step):
    (2, 5, 12)  L = 1/2 (L_v2t + L_t2v), each -1/N sum_i log( exp(s_ii / tau_i) / sum_j exp(s_ij / tau_i) )  clip_loss
    (3)         L = mean over the 2 N (N - 1) pairs i != j of both directions of max(0, s_ij - s_ii + m_i)
                                                                                           max_margin_loss
    (6)         sh(c) = (K_c - min K) / (max K - min K) (sh+ - sh-) + sh-                  cluster_shift
    (7)         tau_base(t) = alpha / 2 cos(2 pi t / T)                                    base_temperature
    (8)         tau_i = tau_base(t) + sh(c_i), or m_i                                      sample_temperature

    symbol      variable            shape     unit and paper values
    v, t        image, text         (B, D)    this process's embeddings, normalised inside the losses
    tau_i, m_i  tau, margin         (B,)      divides the cosine, > 0; cosine units, >= 0; of the anchor, both ways
    alpha       alpha               ()        range of the swing, twice its amplitude; 0.04 on CC3M
    sh-, sh+    shift_min, _max     ()        shift of the smallest and the largest cluster; 0.05, 0.10 on CC3M
    T           period              ()        optimiser steps; a fifth of the run
    K_c         sizes               (K,)      captions in cluster c, largest first; 200 clusters

Commands:
    accelerate launch mmts.py                                    # moving emoji, a minute and a half on two CPU cores
    accelerate launch mmts.py --no-schedule --no-shifts          # its baseline; --no-shifts: TS, --no-schedule: ICS
    accelerate launch mmts.py --loss max-margin --clusters noun  # margins, and classes in place of clusters
    accelerate launch mmts.py --dataset cc3m                     # the paper's run, ResNet-50 + DistilBERT
    accelerate launch mmts.py --dataset epic-kitchens-100 --data-dir ANNOTATIONS --video-dir VIDEOS --init-from WEIGHTS
    accelerate launch mmts.py --dataset youcook2 --data-dir ANNOTATIONS --video-dir VIDEOS   # or ssv2-lt
    accelerate launch mmts.py --dataset captions.csv             # own data: columns image, caption

A fork edits METHOD, the flags of the method group, and the loss in the loop, not what is marked as shared.

Differences from the paper and from the authors' code (released only for EPIC-KITCHENS-100), and what is left open:
 1. The supplement prints one tau in its losses. As in the code it is the anchor's tau_i, in both directions: image i's
    in image -> text, text i's in text -> image. Negatives do not bring their own.
 2. Eq. 3 is printed without a mean and a second direction. We take the code's mean over all 2 N (N - 1) pairs, without
    the diagonal. As there, relevancy does not enter the loss, whatever "multi-instance" max-margin may suggest.
 3. T is not in the paper; the code has five periods in the run, which ends at the highest temperature.
 4. The code never checks that tau > 0. Here a setting whose lowest temperature is not above 0 is refused. The paper's
    own rule (shifts within the default +- alpha / 2) is not enforced, since its own values break it.
 5. --alpha, --shift-min and --shift-max follow --dataset and --loss (the supplement's Section 7). In the code margins
    have the values of the temperatures, unless flags say otherwise.
 6. Without shifts the schedule swings around --tau (the margin's around --margin). The tables' rows "w/ TS" do not say.
 7. Clusters are K-Means', as in Section 3.2; --clusters FILE reads others. The paper gives neither the initialisation
    nor the pooling. Here: unit, mean-pooled embeddings, k-means++, one start, all captions; above
    100,000 in mini-batches. If all clusters have the same size, all get sh-.
 8. An example without a cluster counts as one of the smallest. The code gives it frequency 1, which may be smaller.
 9. VAST's audio, subtitles and re-ranking ("with refinement") are not reproduced: YouCook2 and SSv2-LT use CLIP's
    ViT-B/16 with VAST's fine-tuning values, but one rate for both towers (VAST's vision: 5e-7) and 8 frames in the test
    (VAST: 16). VAST learns InfoNCE's temperature, from 0.07: its baseline is --no-schedule --no-shifts --learnable-tau
    (AVION's is frozen). "SentenceBERT" names no model; we chose all-MiniLM-L6-v2. SSv2-LT's temperatures are a cell of
    Table 8 with Table 7's R@1; two more cells have it. Its epochs and batch, which nobody says, are YouCook2's.
10. CC3M's batch, epochs, optimiser and text tower are not stated. Our guess is the CC3M trainer's (iSogCLR,
    DistilBERT), in bf16 for its fp16; warm-ups start near 0 (AVION: at 1e-6, the CC3M trainer: at 1e-5). The learning
    rate's cosine is by step. Table 1's "Avg." is the mean of both R@1, beside R-Mean.
11. Misprints: "text-to-image retrieval improving by 3.4 %" is image -> text (Table 1, TR@1); Table 5's nDCG of nouns,
    65.3, is 65.8 in Tables 2 and 4. In Table 9 the authors' own baseline with refinement (53.1, R@1) is no worse than
    MM-TS (53.0). Section 4.6's gain of 4.3 % mAP (TS, CLIP loss) is 5.3 in Table 4.
12. Thirds of the test queries by the size of their training cluster (head, mid, tail) are reported; the paper has none.
13. AVION's tower is VideoViT (encoders/towers.py; its docstring gives the differences). AVION's fp16, its random frame
    in each of 16 segments and its captions by relevancy (--caption-relevancy) are here. Table 2 needs LaViLa's weights
    (--init-from). AVION chooses the best epoch on the test split; here the last weights are tested.
"""

import argparse
import functools
import math

import common

from common import (  # isort: skip
    Evaluator, Parser, Run, between, by_rows, check_source, clean_exit, fp32, gather,
    head_mid_tail, k_means, largest_first, nonnegative, normalize, open_clusters, open_data, part, per_anchor,
    positive, positive_index, to_device, whole, world)

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.mmts import draw  # isort: skip


# ======================================================= METHOD ======================================================
def base_temperature(step, period, alpha):
    """tau_base(t) = alpha / 2 cos(2 pi t / T) (Eq. 7): a float, highest at step 0.   period: T, in optimiser steps."""
    return alpha / 2 * math.cos(2 * math.pi * step / period)


def cluster_shift(sizes, sh_min, sh_max):
    """sh(c) (Eq. 6): linear in the size, sh_min for the smallest cluster and sh_max for the largest.

    Args: sizes: (K,) captions in each cluster, a tensor or numbers.
    Returns: (K,) fp32; sh_min for all if all clusters have the same size (where the equation has 0 / 0).
    """
    sizes = torch.as_tensor(sizes, dtype=torch.float64)                    # (K,)
    spread = sizes.max() - sizes.min()
    share = (sizes - sizes.min()) / spread if spread else torch.zeros_like(sizes)        # (K,) 0..1
    return (share * (sh_max - sh_min) + sh_min).float()


def sample_temperature(step, shift, period, alpha):
    """tau_i = tau_base(t) + sh(c_i) (Eq. 8), or the margin m_i: shift (B,) -> (B,); alpha = 0: --no-schedule.

    The checks, the banner and the pictures of the schedule call this function too."""
    return shift + base_temperature(step, period, alpha)


@fp32
def clip_terms(image, text, tau, label_smoothing=0.0, block=0):
    """Both directions of InfoNCE with a temperature for each anchor (Eqs. 10 and 11).

    Args:
        image, text: (B, D) this process's embeddings, any float dtype; row i of both is the positive pair.
        tau: temperature, divides the cosine, > 0: a float, () tensor, or (B,): tau_i is used in image i's row and in
            text i's row.
        label_smoothing: this share of the target is spread over all candidates; VAST 0.1.
        block: rows at a time (0 = automatic, see common.by_rows).
    Returns: {"L_v2t", "L_t2v"}: scalars fp32 (float64 stays), means over the B local anchors. A random guess is about
        ln N.
    """
    image, text, tau = normalize(image), normalize(text), per_anchor(tau, image)        # (B, D), (B, D), () or (B, 1)

    def one_way(anchor, candidates):
        def rows(a, t, target):                                            # b anchors at a time
            logits = a @ candidates.T / t                                  # (b, N)
            return F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)        # (b,)
        return by_rows(rows, anchor, tau, positive_index(anchor), columns=len(candidates), block=block).mean()
    # each direction needs its own matrix: the transpose of the first would have the temperatures of the candidates
    return {"L_v2t": one_way(image, gather(text)), "L_t2v": one_way(text, gather(image))}


def clip_loss(image, text, tau, label_smoothing=0.0, block=0):
    """L = 1/2 (L_v2t + L_t2v) (Eq. 12); arguments and type as in clip_terms. Scalar; a random guess is about ln N."""
    terms = clip_terms(image, text, tau, label_smoothing, block)
    return (terms["L_v2t"] + terms["L_t2v"]) / 2


@fp32
def max_margin_terms(image, text, margin, block=0):
    """Both directions of the max-margin loss (Eq. 3) with a margin for each anchor.

    Args: image, text, block: as clip_terms.   margin: cosine units, >= 0: a float, () or (B,) as tau of clip_terms.
    Returns: {"L_v2t", "L_t2v"}: scalars fp32 (float64 stays), means over the B (N - 1) pairs of a local anchor and a
        negative. If all cosines are equal, it is the mean margin.
    """
    image, text = normalize(image), normalize(text)                        # (B, D)
    margin = per_anchor(margin, image, "margin", positive=False)           # () or (B, 1)

    def one_way(anchor, candidates):
        def rows(a, m, target):
            sim, target = a @ candidates.T, target[:, None]                # (b, N), (b, 1)
            hinge = (sim - sim.gather(1, target) + m).relu()               # (b, N)
            return hinge.scatter(1, target, 0.0).sum(1) / (len(candidates) - 1)         # (b,) without the pair itself
        return by_rows(rows, anchor, margin, positive_index(anchor), columns=len(candidates), block=block).mean()
    return {"L_v2t": one_way(image, gather(text)), "L_t2v": one_way(text, gather(image))}


def max_margin_loss(image, text, margin, block=0):
    """Mean over the 2 N (N - 1) pairs that are not positives (Eq. 3); arguments as in max_margin_terms. Scalar."""
    terms = max_margin_terms(image, text, margin, block)
    return (terms["L_v2t"] + terms["L_t2v"]) / 2


# ------------------------------------------------------- clusters ---------------------------------------------------
def cluster_captions(embeddings, k, seed, counts=None):
    """K-Means of unit embeddings (Section 4.4), from k-means++; above 100,000 in mini-batches.

    Args: embeddings: (M, D), normalised here.   counts: (M,) how often each occurs in the data; None = once.
    Returns: labels (M,) long; sizes (K,) long, K_c of Eq. 6, largest first; K < k if points coincide.
    Raises: ValueError, scikit-learn's, on non-finite embeddings, or fewer than k.
    """
    x = normalize(torch.as_tensor(embeddings)).numpy()                     # (M, D)
    labels = k_means(x, k, seed, counts)                                   # (M,) without empty clusters
    return largest_first(labels, counts)[:2]                               # (M,), (K,)


# ======================================================= flags =======================================================
# Defaults by data set, one line per group. 'paper': Sections 4.3 and 7, and its base (the CC3M trainer, AVION, VAST)
# for the rest; 'ours': for small towers, not tuned for this loss. Other sets use 'own'.
CC3M = dict(
    recipe="paper; optimiser, views and captions from the CC3M trainer",
    image_encoder="resnet50.tv_in1k", text_encoder="distilbert/distilbert-base-uncased", pretrained=True, embed_dim=256,
    image_size=256, image_stats="clip", eval_resize="squash", text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=512, lr=2e-4, lr_end=1e-5, warmup_epochs=0.35,  # 2,000 steps of 5,680 an epoch
    optimizer="adamw", lr_schedule="cosine", beta1=0.9, eps=1e-8, weight_decay=0.02, beta2=0.999, grad_clip=0.0,
    frames=12, frame_sampling="uniform", join_captions=False, unfold_captions=False,
    loss="infonce", tau=0.01, clusters="captions", cluster_encoder="distilbert/distilbert-base-uncased",
    crop_min=0.5, flip=0.5, jitter=0.0, randaugment_ops=2, randaugment_magnitude=21,
    mixed_precision="bf16", eval_datasets=["coco", "flickr30k"], log_every=50, save_every=1000, eval_every=0)
AVION = CC3M | dict(
    recipe="paper; towers, views and optimiser from AVION",
    # AVION's text tower has GELU, like this one; --init-from loads AVION's LaViLa weights into both towers
    image_encoder="video_vit_base_patch16_clip_224.openai", text_encoder="laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    image_size=224, eval_resize="crop", frames=16, frame_sampling="random", text_length=77, clean_captions=False,
    epochs=100.0, chunk_size=16, lr=3e-5, warmup_epochs=1.0, weight_decay=0.01,
    loss="max-margin", tau=0.07, clusters="noun", cluster_encoder="sentence-transformers/all-MiniLM-L6-v2",
    flip=0.0, randaugment_ops=0, randaugment_magnitude=0,
    mixed_precision="fp16", eval_datasets=[], log_every=20, save_every=500)
VAST = AVION | dict(
    recipe="paper; CLIP's towers with VAST's fine-tuning values",
    image_encoder="openai/clip-vit-base-patch16", text_encoder="openai/clip-vit-base-patch16", embed_dim=512,
    eval_resize="squash", frames=8,  # random in their segments, in evaluation their middles (data/videos.py)
    # 3e-5 in VAST's script for YouCook2, 2e-5 for its other sets
    epochs=30.0, batch_size=64, lr=3e-5, lr_end=0.0, lr_schedule="linear", warmup_epochs=3.0, beta2=0.98, eps=1e-6,
    loss="infonce", label_smoothing=0.1, clusters="captions", crop_min=1.0)
MOVING = CC3M | dict(
    recipe="ours",
    image_encoder="small", text_encoder="small", pretrained=False, embed_dim=128, clean_captions=False,
    image_size=32, image_stats="encoder", eval_resize="crop", frames=4, text_length=24, text_pooling="mean",
    epochs=24.0, batch_size=128, lr=2e-3, lr_end=2e-5, warmup_epochs=2.0, weight_decay=0.1, beta2=0.98, grad_clip=1.0,
    tau=0.1, cluster_encoder="tf-idf",
    crop_min=0.8, flip=0.0, jitter=0.2, randaugment_ops=0, randaugment_magnitude=0,
    mixed_precision="no", eval_datasets=[], log_every=5, save_every=120, eval_every=120)
EMOJI = MOVING | dict(recipe="ours; as moving-emoji", image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
OWN = MOVING | dict(recipe="ours; small towers from scratch", image_size=64, frames=8, text_length=32, num_clusters=0,
                    log_every=10, save_every=500, eval_every=0)
RECIPES = {"moving-emoji": MOVING, "emoji": EMOJI, "cc3m": CC3M, "own": OWN,
           "epic-kitchens-100": AVION | dict(caption_relevancy=0.1),
           "youcook2": VAST, "ssv2-lt": VAST | dict(clusters="label", lr=2e-5)}
# alpha, sh-, sh+ of the supplement's Section 7 by recipe and loss; if it has none, the nearest ones, marked 'ours'
RANGES = {("cc3m", "infonce"): (0.04, 0.05, 0.10, "paper: CLIP on CC3M"),
          ("cc3m", "max-margin"): (0.20, 0.17, 0.30, "ours: AVION's MI-MM"),
          ("epic-kitchens-100", "infonce"): (0.08, 0.05, 0.20, "paper: AVION, CLIP"),
          ("epic-kitchens-100", "max-margin"): (0.20, 0.17, 0.30, "paper: AVION, MI-MM"),
          ("youcook2", "infonce"): (0.06, 0.06, 0.09, "paper: VAST, CLIP"),
          ("youcook2", "max-margin"): (0.20, 0.10, 0.30, "paper: VAST, MI-MM"),
          ("ssv2-lt", "infonce"): (0.04, 0.07, 0.11, "paper: a cell of Table 8; Table 7 does not say"),
          ("ssv2-lt", "max-margin"): (0.20, 0.10, 0.30, "ours: VAST's MI-MM"),
          ("own", "infonce"): (0.08, 0.08, 0.12, "ours"),
          ("own", "max-margin"): (0.20, 0.17, 0.30, "ours: AVION's MI-MM")}
TAU_LIMITS = 0.01, 1.0                                                    # of a learnable tau; AVION: at least 0.01
WORDS = {"infonce": "tau", "max-margin": "margin"}                        # the quantity with schedule and shifts


def ranges_of(recipe, loss):
    """(alpha, sh-, sh+, their source) of a recipe and a loss."""
    return RANGES.get((recipe, loss)) or RANGES["own", loss]


def loss_defaults(chosen):
    """Defaults for --recipe and --loss together; chosen: these flags. Only InfoNCE has label smoothing."""
    recipe = RECIPES[chosen.recipe]
    loss = chosen.loss or recipe["loss"]
    if loss not in ("infonce", "max-margin"):
        return {}                                                          # argparse refuses it
    alpha, low, high, _ = ranges_of(chosen.recipe, loss)
    smoothing = recipe.get("label_smoothing", 0.0) if loss == "infonce" else 0.0
    return dict(alpha=alpha, shift_min=low, shift_max=high, label_smoothing=smoothing)


def parse_args(argv=None):
    """Flags; the recipe of --dataset and --loss gives the defaults."""
    p = Parser(__file__, "MM-TS: temperatures and margins per sample, from the distribution of the captions.")
    yesno = argparse.BooleanOptionalAction
    g = p.group("method")
    g.add_argument("--loss", choices=["infonce", "max-margin"], default=None, help="with the two parts below or not")
    g.add_argument("--schedule", action=yesno, default=True, help="swing by tau_base (TS of Tables 4, 9)")
    g.add_argument("--shifts", action=yesno, default=True, help="by cluster size (ICS), or --tau, --margin for all")
    g.add_argument("--clusters", metavar="SOURCE",
                   help="captions or vision (K-Means of embeddings); label, verb, noun, verb-noun (classes); a JSON "
                        "file of {key: cluster}; or none")
    g = p.group("with --loss infonce", loss="infonce")
    g.add_argument("--label-smoothing", type=part, default=0.0, help="of its target; VAST 0.1")
    g = p.group("with --loss infonce --no-schedule --no-shifts", loss="infonce", schedule=False, shifts=False)
    g.add_argument("--learnable-tau", action=yesno, default=False, help="learn it, from --tau")
    g = p.group("with --loss infonce --no-shifts", loss="infonce", shifts=False)
    g.add_argument("--tau", type=positive, help="divides the cosine; CLIP on CC3M 0.01, AVION and VAST 0.07")
    g = p.group("with --loss max-margin --no-shifts", loss="max-margin", shifts=False)
    g.add_argument("--margin", type=nonnegative, default=0.2, help="cosine units; AVION 0.2")
    g = p.group("with --shifts", shifts=True)
    g.add_argument("--shift-min", type=nonnegative, default=0.05, help="sh-, of the smallest cluster; paper: Sec. 7")
    g.add_argument("--shift-max", type=nonnegative, default=0.10, help="sh+, of the largest cluster; paper: Sec. 7")
    g = p.group("with --schedule", schedule=True)
    g.add_argument("--alpha", type=nonnegative, default=0.04, help="range, twice the amplitude; paper: Sec. 7")
    g.add_argument("--periods", type=positive, default=5.0, help="in the run, of T = steps / periods; code 5")
    g = p.group("with --clusters captions or vision", clusters=("captions", "vision"))
    g.add_argument("--num-clusters", type=between(2, 10**6, int), default=200,
                   help="K of K-Means; paper 200; own data: a quarter of the items, at most 200")
    g.add_argument("--cluster-encoder",
                   help="tf-idf, or a transformers id or folder (vision: an image encoder); paper: SentenceBERT, on "
                        "CC3M DistilBERT")
    g = p.group("views")
    g.add_argument("--crop-min", type=part, help="least area of the crop, all frames alike; AVION, CC3M trainer 0.5")
    g.add_argument("--flip", type=part, help="share of mirror images; CC3M trainer 0.5")
    g.add_argument("--jitter", type=nonnegative, help="of brightness, contrast, saturation, all frames alike")
    g.add_argument("--randaugment-ops", type=whole, help="each with probability 1/2; CC3M trainer 2; 0 = off")
    g.add_argument("--randaugment-magnitude", type=between(0, 30, int), help="0..30; CC3M trainer's 7 of 10 = 21")
    args = p.parse(argv, RECIPES, loss_defaults)
    p.require(args.shift_min <= args.shift_max,
              f"--shift-min {args.shift_min:g}: larger than --shift-max {args.shift_max:g}")
    lowest, highest = range_of(args, args.periods, 1)
    p.require(args.loss != "infonce" or lowest > 0,
              f"the temperatures of the run, {lowest:g} .. {highest:g}, must be above 0; lower --alpha, or raise "
              "--shift-min or --tau")
    p.require(args.loss != "max-margin" or 0 <= lowest <= highest < 2,
              f"the margins of the run, {lowest:g} .. {highest:g}, must be from 0 to below 2 (cosines); see --alpha, "
              "--shift-min, --shift-max, --margin")
    p.only(args.randaugment_ops, "with --randaugment-ops above 0", "--randaugment-magnitude")
    p.require(not args.learnable_tau or TAU_LIMITS[0] <= args.tau <= TAU_LIMITS[1], f"--tau: if learnt in {TAU_LIMITS}")
    p.require(args.clusters != "none" or not args.shifts, "--clusters none: --shifts need clusters; add --no-shifts")
    p.require(args.cluster_encoder != "small",
              "--cluster-encoder small: has no trained weights; use tf-idf, an id or a folder")
    return args


def range_of(args, steps, period):
    """Lowest and highest temperature (or margin) of a run. steps, period: in steps, or in periods with period = 1."""
    center = args.tau if args.loss == "infonce" else args.margin
    low, high = (args.shift_min, args.shift_max) if args.shifts else (center, center)
    grid = [*np.arange(0, min(steps, 1000 * period), period / 64), steps]  # extremes are at 64ths of a period
    shifts = torch.tensor([low, high], dtype=torch.float64)                # (2,)
    values = torch.stack([sample_temperature(t, shifts, period, args.alpha * args.schedule) for t in grid])  # (S, 2)
    return round(values.min().item(), 12), round(values.max().item(), 12)


# ======================================================= main ========================================================
def main(args):
    """One run: data, model, clusters, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    train, evals = open_data(args)
    check_source(train, args.clusters)
    run = Run(__file__, args, train, evals, RECIPES)
    period = run.total / args.periods                                      # T in steps
    run.tau_word = WORDS[args.loss]

    # ------------------------------------------- model and optimiser -------------------------------------------------
    tower, tokenizer, transform = run.towers()
    # made after the towers, so that their initial weights do not depend on the clusters; None with --clusters none
    kmeans = functools.partial(cluster_captions, seed=args.seed)
    clusters = open_clusters(run.folder, args, train, run.device, kmeans)
    own = nn.ModuleDict()                                                  # a learnable tau stays outside DDP
    own["tau"] = nn.ParameterDict({"log_tau": torch.tensor(math.log(args.tau))} if args.learnable_tau else {})
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
    model, optimizer = run.wrap(tower, own, optimizer)                     # SyncBatchNorm, torch.compile, DDP
    run.resume()                                                           # with --resume: the last checkpoint
    chunks = common.Chunks(lambda inputs: model(**inputs)[:2], model, run.accelerator, args.chunk_size)

    # ------------------------------------------- views and batches ---------------------------------------------------
    view = common.Augment(args.image_size, args.crop_min, args.flip, float(args.jitter > 0), *[args.jitter] * 3,
                          randaugment=(args.randaugment_ops, args.randaugment_magnitude),
                          squash=args.eval_resize == "squash")
    batches = run.batches([view], transform)

    # ------------------------------------------- loop ----------------------------------------------------------------
    shifts, alpha = shifts_of(clusters, args), args.alpha * args.schedule
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, run.device, args,
                          also=functools.partial(head_mid_tail, clusters=clusters))
    guess = [random_guess(step, shifts, clusters, period, args) for step in (0, run.total)]
    run.begin(evaluator, guess, banner_lines(clusters, run.total, period, args))
    for batch in batches:
        run.set_lr(common.cosine_lr(run.step, run.total, run.warmup, args.lr, args.lr_end, args.lr_schedule))
        texts = common.pick(batch["captions"], batch["draws"])
        tokens = {k: v.to(run.device) for k, v in tokenizer(texts).items()}             # (B, L)
        image, text = chunks.encode({"pixels": batch["views"][0], "tokens": tokens})    # (B, D) each

        if args.shifts:
            cluster, lost = clusters.look_up(batch["keys"], texts)         # (B,) -1 = none; how many were not found
            shift = shifts[cluster]                                        # (B,)
        else:
            shift, lost = shifts.expand(len(texts)), 0                     # (B,)
        tau = to_device(sample_temperature(run.step, shift, period, alpha), run.device)  # (B,) of Eq. 8, or margins
        if args.learnable_tau:
            tau = own["tau"]["log_tau"].exp()                              # ()
        if args.loss == "max-margin":
            loss = max_margin_loss(image, text, tau)
        else:
            loss = clip_loss(image, text, tau, args.label_smoothing)
        used = tau.detach()

        run.check_finite(loss, used.mean(), (image, text), batch)
        chunks.backward(loss)                                              # the full batch's gradient
        common.average_gradients(own.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_([*tower.parameters(), *own.parameters()], args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            own["tau"]["log_tau"].data.clamp_(*map(math.log, TAU_LIMITS))
            tau = own["tau"]["log_tau"].detach().exp()

        numbers = numbers_of(image, text, used, tau, lost, args, run) if run.due("log") else {}
        run.done(batch, loss, tau, numbers)

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    curve = functools.partial(sample_temperature, period=period, alpha=alpha)               # (step, shifts) -> (K,)
    return run.finish(functools.partial(draw, clusters=clusters, shifts=shifts, period=period, curve=curve))


@torch.no_grad()
def numbers_of(image, text, used, tau, lost, args, run):
    """Columns of the log: both directions of the loss, the range of temperatures (margins) over all processes, and
    common.embedding_health. used, tau: (B,) or (), of the loss and after the step (they differ if learnt); lost:
    number of captions of this batch that are in no cluster."""
    if args.loss == "max-margin":
        terms = max_margin_terms(image, text, used)
    else:
        terms = clip_terms(image, text, used, args.label_smoothing)
    all_tau = gather(tau) if tau.ndim else tau[None]                       # (N,)
    terms["not_in_clusters"] = world() * lost                              # whose mean is the sum over processes
    numbers = common.mean_over_processes(terms, run.device)
    numbers |= {f"{WORDS[args.loss]}_{k}": v.item()
                for k, v in (("min", all_tau.min()), ("mean", all_tau.mean()), ("max", all_tau.max()))}
    return numbers | common.embedding_health(gather(normalize(image)), gather(normalize(text)))


def shifts_of(clusters, args):
    """(K + 1,) sh(c) of each cluster, the last (index -1) for examples without one; else (1,): --tau or --margin."""
    if not args.shifts:
        return torch.tensor([args.tau if args.loss == "infonce" else args.margin])
    shifts = cluster_shift(clusters.sizes, args.shift_min, args.shift_max)              # (K,)
    return torch.cat([shifts, shifts.new_tensor([args.shift_min])])


def random_guess(step, shifts, clusters, period, args):
    """The loss if all similarities are equal: ln N at any temperature, or the mean margin."""
    if args.loss == "infonce":
        return math.log(args.batch_size)
    margins = sample_temperature(step, shifts, period, args.alpha * args.schedule)     # (K + 1,) or (1,)
    return margins[:-1].dot(clusters.sizes / clusters.sizes.sum()).item() if args.shifts else margins.item()


def banner_lines(clusters, steps, period, args):
    """The method's lines of the banner."""
    kind = {(True, True): "schedule and shifts (MM-TS)", (True, False): "schedule alone (TS)",
            (False, True): "shifts alone (ICS)", (False, False): "fixed (the baseline)"}[args.schedule, args.shifts]
    low, high = range_of(args, steps, period)
    name, values = WORDS[args.loss], "temperature" if args.loss == "infonce" else "margin"
    alpha, sh_min, sh_max, source = ranges_of(args.recipe, args.loss)
    same = (alpha, sh_min, sh_max) == (args.alpha, args.shift_min, args.shift_max)
    words = f"{name} {low:g} .. {high:g}" + f" over the run, period {period:g} steps" * args.schedule
    words += f" ({source if same else 'by flags'})" * (args.schedule or args.shifts)
    if args.learnable_tau:
        kind, words = "learnt tau (a baseline)", f"tau {args.tau:g}, learnt"
    lines = {"loss": f"{args.loss}, {kind}", values: words}
    if clusters:
        sizes, by_words = clusters.sizes, args.clusters in ("captions", "vision")
        how = f"K-Means on {args.cluster_encoder}, {args.clusters}" if by_words else f"by {args.clusters}"
        lines["clusters"] = f"{len(sizes):,}, {how}; largest {sizes[0]:,}, smallest {sizes[-1]:,}"
        if clusters.meta["without"]:
            lines["left out"] = f"{clusters.meta['without']:,} without a cluster are treated as in the smallest one"
    return lines


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
