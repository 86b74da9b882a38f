"""MM-TS: Multi-Modal Temperature and Margin Schedules for Contrastive Learning with Long-Tail Data
(Sheludzko et al., WACV 2026).

Captions form clusters of very different size. Where thousands of captions say nearly the same,
pushing all pairs apart destroys what they share; a rare caption must be told from its neighbours.
MM-TS gives each sample its own temperature: the larger the cluster of its caption, the higher. All
temperatures also follow a cosine over training, between group-wise discrimination (high) and
instance discrimination (low). In a max-margin loss they are margins. No parameters are added, and
the clusters are made once, before training.

Equations (s_ij: cosine of anchor i and candidate j of the global batch; t: optimiser step)
    (2, 10, 11) L_v2t, L_t2v: -1/N sum_i log( exp(s_ii / tau_i) / sum_j exp(s_ij / tau_i) )
    (5, 12)     L = 1/2 (L_v2t + L_t2v)                                             clip_loss
    (3)         L = mean of max(0, s_ij - s_ii + m_i), i != j, v2t and t2v    max_margin_loss
    (6)         sh(c) = (K_c - min_c K_c) / (max_c K_c - min_c K_c) (sh+ - sh-) + sh-  cluster_shift
    (7)         tau_base(t) = alpha / 2 cos(2 pi t / T)                       base_temperature
    (8)         tau_i = tau_base(t) + sh(c_i), or m_i                       sample_temperature

Symbols
    v, t        image, text           (B, D)  embeddings of this process
    tau_i, m_i  tau, margin           (B,)    of anchor i; tau divides cosines, a margin is added
    alpha       alpha                 ()      range of the schedule, highest - lowest; CC3M 0.04
    sh-, sh+    sh_min, sh_max        ()      --shift-min, --shift-max; CC3M 0.05, 0.10
    T           period                ()      optimiser steps; --periods in a run, authors' code 5
    K_c         sizes                 (K,)    captions in cluster c, largest first; paper K = 200

Commands
    accelerate launch mmts.py                            # moving emoji, 71 s on two CPU cores
    accelerate launch mmts.py --baseline                 # one fixed temperature, all else equal
    accelerate launch mmts.py --no-schedule              # the shifts alone (ICS in Table 4)
    accelerate launch mmts.py --no-shifts                # the schedule alone (TS in Table 4)
    accelerate launch mmts.py --dataset cc3m             # the paper's run
    accelerate launch mmts.py --dataset captions.csv     # own data: image, caption

docs/mmts.md: commands for every table, recipes, differences from the paper, results.
"""

import argparse
import functools
import math

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, between, clean_exit, fp32, gather,
    nonnegative_float, normalize, per_anchor, positive_float, positive_index, row_blocks)

import torch
import torch.nn.functional as F


# ======================================================= METHOD ===================================
def base_temperature(step, period, alpha):
    """tau_base(t) = alpha / 2 cos(2 pi t / T) (Eq. 7), a float, highest at step 0.

    Args:
        step, period: t and T, in optimiser steps.
        alpha: highest minus lowest value; 0 = no schedule.
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
        relative_size = torch.zeros_like(sizes)                            # (K,)
    else:
        relative_size = (sizes - sizes.min()) / spread                     # (K,)
    return (relative_size * (sh_max - sh_min) + sh_min).float()


def sample_temperature(step, shift, period, alpha):
    """tau_i = tau_base(t) + sh(c_i) (Eq. 8), or the margin m_i: shift (B,) -> (B,).

    The check of the flags, the banner and the pictures call this function, too.
    """
    return shift + base_temperature(step, period, alpha)


# row_blocks saves memory and changes no value: it calls the function with b rows of the positional
# tensors at a time, and with all of the keyword arguments
@row_blocks
def info_nce_per_anchor(anchor, target, tau, *, candidates, label_smoothing):
    """Eq. 2 of each anchor: (b, D), (b,), tau, (N, D) -> (b,)."""
    logits = anchor @ candidates.T / tau                                   # (b, N)
    return F.cross_entropy(logits, target, reduction="none",
                           label_smoothing=label_smoothing)                # (b,)


@fp32
def clip_loss(image, text, tau, label_smoothing=0.0, *, terms=None):
    """L = 1/2 (L_v2t + L_t2v), InfoNCE with a temperature for each anchor (Eqs. 5 and 10 to 12).

    Args:
        image, text: (B, D) embeddings of this process; row i of both is a positive pair.
        tau: temperature > 0: a number, () or (B,). tau_i is that of both anchors, image i and text
            i.
        label_smoothing: part of the target that is spread over all candidates; VAST 0.1.
        terms: dict that receives L_v2t and L_t2v, means over the anchors.
    Returns: (), float32. A random guess is about ln N.
    """
    image, text = normalize(image), normalize(text)                        # (B, D)
    tau = per_anchor(tau, image)                                           # () or (B, 1)
    target = positive_index(image, text)                                   # (B,)
    # one matrix and its transpose would not do: tau_i divides the row of anchor i, which is a
    # column of the transpose
    loss_v2t = info_nce_per_anchor(image, target, tau, candidates=gather(text),
                                   label_smoothing=label_smoothing).mean()
    loss_t2v = info_nce_per_anchor(text, target, tau, candidates=gather(image),
                                   label_smoothing=label_smoothing).mean()
    if terms is not None:
        terms.update({"L_v2t": loss_v2t, "L_t2v": loss_t2v})
    return (loss_v2t + loss_t2v) / 2


@row_blocks
def max_margin_per_anchor(anchor, target, margin, *, candidates):
    """Eq. 3, the mean over the negatives of each anchor: (b, D), (b,), margin, (N, D) -> (b,)."""
    if len(candidates) < 2:
        raise ValueError("the max-margin loss needs at least two pairs: one alone has no negative")
    target_column = target[:, None]                                        # (b, 1)
    sim = anchor @ candidates.T                                            # (b, N)
    hinge = (sim - sim.gather(1, target_column) + margin).relu()           # (b, N)
    hinge = hinge.scatter(1, target_column, 0.0)                           # (b, N)
    return hinge.sum(1) / (len(candidates) - 1)                            # (b,)


@fp32
def max_margin_loss(image, text, margin, *, terms=None):
    """Eq. 3 with a margin for each anchor, the mean over the 2 N (N - 1) negative pairs.

    Args:
        image, text: (B, D) embeddings of this process; row i of both is a positive pair.
        margin: >= 0, in units of the cosine: a number, () or (B,), as tau of clip_loss.
        terms: dict that receives L_v2t and L_t2v, the means of both directions.
    Returns: (), float32. If all cosines are equal, it is the mean margin.
    """
    image, text = normalize(image), normalize(text)                        # (B, D)
    margin = per_anchor(margin, image, "margin", positive=False)           # () or (B, 1)
    target = positive_index(image, text)                                   # (B,)
    loss_v2t = max_margin_per_anchor(image, target, margin, candidates=gather(text)).mean()
    loss_t2v = max_margin_per_anchor(text, target, margin, candidates=gather(image)).mean()
    if terms is not None:
        terms.update({"L_v2t": loss_v2t, "L_t2v": loss_t2v})
    return (loss_v2t + loss_t2v) / 2


def cluster_captions(embeddings, k, seed, counts=None):
    """Clusters embeddings of captions by K-Means (Section 4.4); with --clusters vision, of images.

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
    labels = common.k_means(x, k, seed, counts)                            # (M,)
    labels, sizes, _ = common.largest_first(labels, counts)                # (M,), (K,)
    return labels, sizes


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here and in contrastive/engine/flags.py; 'source'
# says whose values they are (docs/mmts.md), 'needs_weights' what --init-from has to load.
SMALL = dict(
    tau=0.1, alpha=0.08, shift_min=0.08, shift_max=0.12, cluster_encoder="tf-idf",
    crop_min=0.8, flip=0.0, jitter=0.2)
MOVING = SMALL | dict(
    source="ours; small encoders from scratch",
    image_size=32, frames=4, text_length=24, batch_size=128,
    log_every=5, save_every=120, eval_every=120)
EMOJI = MOVING | dict(
    source="ours; as moving-emoji", image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
OWN = SMALL | dict(
    source="ours; small encoders from scratch", frames=8, batch_size=128,
    num_clusters=0)                                                        # by the number of items
FROZEN = SMALL | dict(
    source="ours; published encoders, frozen: their projections learn",
    # these weights and the text encoder, all-MiniLM-L6-v2, come with installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean",
    max_steps=1000, batch_size=512, lr=3e-4, warmup_fraction=0.05,
    num_clusters=0, crop_min=0.35, flip=0.5, jitter=0.0, log_every=50)
CC3M = dict(
    source="paper; optimiser, views and captions from the CC3M trainer",
    image_encoder="resnet50.a1_in1k", text_encoder="distilbert/distilbert-base-uncased",
    pretrained=True, embed_dim=256, projection_bias=True,
    image_size=256, image_stats="clip", eval_resize="squash",
    text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=512, lr=2e-4, lr_end=1e-5, weight_decay=0.02,
    betas=[0.9, 0.999], grad_clip=0.0,
    warmup_fraction=0.35 / 30,                                             # 2,000 steps
    cluster_encoder="distilbert/distilbert-base-uncased",
    randaugment=[2, 21],
    mixed_precision="bf16", eval_datasets=["coco", "flickr30k"], log_every=50, save_every=1000)
EPIC = dict(
    source="paper; encoders, views and optimiser from AVION",
    # AVION's text encoder has GELU, as this one; --init-from loads LaViLa's weights into both
    image_encoder="video_vit_base_patch16_clip_224.openai",
    text_encoder="laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    pretrained=True, needs_weights="LaViLa's weights", embed_dim=256,
    image_size=224, image_stats="clip", frames=16, frame_sampling="random",
    text_length=77, text_pooling="cls", caption_relevancy=0.1,
    epochs=100.0, batch_size=512, chunk_size=16, lr=3e-5, lr_end=1e-5, weight_decay=0.01,
    betas=[0.9, 0.999], grad_clip=0.0, warmup_fraction=1 / 100,
    loss="max-margin", alpha=0.2, shift_min=0.17, shift_max=0.3, clusters="noun",
    tau=0.07,                                                              # with --loss clip
    flip=0.0, mixed_precision="fp16", log_every=20)
RECIPES = {"moving-emoji": MOVING, "emoji": EMOJI, "cc3m": CC3M, "own": OWN, "frozen": FROZEN,
           "epic-kitchens-100": EPIC}
# one temperature or margin for all samples and steps: --tau or --margin
BASELINE = dict(schedule=False, shifts=False)


# Flags that all scripts share are in contrastive/engine/flags.py. Precedence: default < recipe
# (--dataset, --recipe) < preset (--baseline) < saved flags of --resume < command line.
def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "MM-TS: a temperature or margin for each sample, by the size of the "
                              "cluster of its caption.")
    add_method_flags(parser)
    parser.add_view_flags(crop_min=0.5, flip=0.5, jitter=0.0, randaugment=True)
    parser.add_cc3m_flags()
    parser.add_frozen_flags()
    return parser.parse(argv, RECIPES, BASELINE, check_flags)


def add_method_flags(parser):
    """Adds the flags of the method, here and in VAST's variant. Returns: their group."""
    yes_or_no = argparse.BooleanOptionalAction
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=["clip", "max-margin"], default="clip",
                        help="InfoNCE with temperatures, or the max-margin loss with margins")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, one --tau or --margin for all, with "
                             "everything else equal: sets --no-schedule --no-shifts")
    method.add_argument("--schedule", action=yes_or_no, default=True,
                        help="temperatures or margins follow a cosine over the run (TS of Tables "
                             "4 and 9)")
    method.add_argument("--shifts", action=yes_or_no, default=True,
                        help="each sample has a temperature or margin by the size of its cluster "
                             "(ICS of Tables 4 and 9); else --tau or --margin for all")
    method.add_argument("--alpha", type=nonnegative_float, default=0.04,
                        help="highest minus lowest value of the schedule; paper 0.02 to 0.08 for "
                             "temperatures, 0.2 for margins")
    method.add_argument("--periods", type=positive_float, default=5.0,
                        help="periods of the schedule in the run; authors' code 5")
    method.add_argument("--shift-min", type=nonnegative_float, default=0.05,
                        help="temperature or margin of the smallest cluster without the "
                             "schedule, sh-; paper 0.05 to 0.07, margins 0.1 and 0.17")
    method.add_argument("--shift-max", type=nonnegative_float, default=0.1,
                        help="temperature or margin of the largest cluster without the "
                             "schedule, sh+; paper 0.09 to 0.2, margins 0.3")
    parser.add_tau_flags(method, tau=0.01, tau_clamp=(0.01, 1.0),
                         note="with --no-shifts; paper 0.01, AVION 0.07")
    method.add_argument("--margin", type=nonnegative_float, default=0.2,
                        help="margin of --loss max-margin with --no-shifts, in units of the "
                             "cosine, 0..2; AVION 0.2")
    method.add_argument("--clusters", metavar="SOURCE", default="captions",
                        help="source of the clusters: captions or vision (K-Means of embeddings); "
                             "label, verb, noun or verb-noun (classes); a JSON file of {key: "
                             "cluster}; or none")
    method.add_argument("--num-clusters", type=between(0, 10**6, int), default=200,
                        help="number of clusters of K-Means; paper 200; 0 = a quarter of what is "
                             "clustered, at most 200")
    method.add_argument("--cluster-encoder", default="sentence-transformers/all-MiniLM-L6-v2",
                        help="embeddings for K-Means: tf-idf, or a transformers id or folder "
                             "(vision: an image encoder); paper: SentenceBERT, on CC3M DistilBERT")
    return method


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    has_margins = args.loss == "max-margin"
    has_one_tau = not (has_margins or args.schedule or args.shifts)
    parser.only(args.schedule, "with --schedule", "--alpha", "--periods")
    parser.only(args.shifts, "with --shifts", "--shift-min", "--shift-max")
    parser.only(not has_margins and not args.shifts, "with --loss clip --no-shifts", "--tau")
    parser.only(has_margins and not args.shifts, "with --loss max-margin --no-shifts", "--margin")
    parser.only(args.clusters in ("captions", "vision"), "with --clusters captions or vision",
                "--num-clusters", "--cluster-encoder")
    parser.require(has_one_tau or not args.learnable_tau,
                   "--learnable-tau: a learnt temperature has no schedule and no shifts; add "
                   "--loss clip --baseline")
    parser.check_tau_flags(args)
    parser.require(args.shift_min <= args.shift_max,
                   f"--shift-min {args.shift_min:g}: larger than --shift-max {args.shift_max:g}")
    parser.require(args.clusters != "none" or not args.shifts,
                   "--clusters none: --shifts need clusters; add --no-shifts")
    check_range(parser, args)


def check_range(parser, args):
    """Refuses temperatures or margins out of bounds, and those of a recipe with the other loss."""
    has_margins = args.loss == "max-margin"
    low, high = range_of_run(args)
    if has_margins:
        parser.require(low >= 0 and high < 2,
                       f"the margins of the run, {low:g} .. {high:g}, must be from 0 to below 2, "
                       "as differences of cosines; change --alpha, --shift-min, --shift-max or "
                       "--margin")
    else:
        parser.require(low > 0,
                       f"the temperatures of the run, {low:g} .. {high:g}, must be above 0; lower "
                       "--alpha, or raise --shift-min or --tau")
    recipe_has_margins = parser.get_default("loss") == "max-margin"
    if has_margins != recipe_has_margins:
        # temperatures are no margins, so the command line has to give those that are used
        given_or_unused = parser.without_effect.union(args.command_line)
        flags = ("--alpha", "--shift-min", "--shift-max")
        missing = [flag for flag in flags if flag not in given_or_unused]
        parser.require(not missing,
                       f"--loss {args.loss}: add {' '.join(missing)}, since the recipe's values "
                       f"are of the other loss; the paper's {' '.join(flags)} are 0.2 0.17 0.3 "
                       "for margins, 0.04 0.05 0.1 for temperatures (docs/mmts.md has all)")


def range_of_run(args):
    """Lowest and highest temperature or margin of a run."""
    sh_min, sh_max = range_of_shifts(args)
    alpha = alpha_of_run(args)
    period = 1 / args.periods  # a run is from step 0 to 1 here
    # the cosine is lowest at half a period; the other steps are for another base_temperature
    steps = [min(period / 2, 1), *torch.linspace(0, 1, 1001).tolist()]
    lowest = min(sample_temperature(step, sh_min, period, alpha) for step in steps)
    highest = max(sample_temperature(step, sh_max, period, alpha) for step in steps)
    # rounded, since 0 could come out as -1e-17
    return round(lowest, 12), round(highest, 12)


def range_of_shifts(args):
    """sh- and sh+ of Eq. 6; with --no-shifts both are --tau or --margin."""
    if args.shifts:
        return args.shift_min, args.shift_max
    if args.loss == "max-margin":
        return args.margin, args.margin
    return args.tau, args.tau


def alpha_of_run(args):
    """alpha of Eq. 7; 0 with --no-schedule."""
    return args.alpha if args.schedule else 0.0


def shifts_of_clusters(clusters, args):
    """(K,) sh(c) of each cluster, with --no-shifts --tau or --margin; (1,) if there are none."""
    sh_min, sh_max = range_of_shifts(args)
    if clusters is None:
        return torch.tensor([sh_min])                                      # (1,)
    return cluster_shift(clusters.sizes, sh_min, sh_max)                   # (K,)


# ======================================================= main =====================================
def main(args):
    """One run: data, model, clusters, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    train, eval_sets = common.open_data(args)
    common.check_clusters(train, args)
    args = common.adjust_flags_to_encoder(args)      # a CLIP brings its text encoder
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    # after the model, so that its initial weights do not depend on the clusters
    kmeans = functools.partial(cluster_captions, seed=args.seed)
    clusters = common.open_clusters(run.folder, args, train, accelerator.device, kmeans)
    # outside DDP: average_gradients does for it what DDP does for the model
    temperature = Temperature(args.tau, args.learnable_tau, args.tau_clamp).to(accelerator.device)
    optimizer = common.make_optimizer([model, temperature], args)
    parameters = [*model.parameters(), *temperature.parameters()]

    # >>> shared: prepare (the same lines in all scripts)
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # without DDP
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    if args.compile:
        model = torch.compile(model)
    # <<< shared
    run.resume(raw_model, optimizer, tau=temperature)                      # no-op without --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size)            # encodes in chunks

    # ------------------------------------------- views --------------------------------------------
    # with --freeze, features of the frozen encoders, computed once, replace pixels and tokens
    cache = common.open_feature_cache(args, run, raw_model, tokenizer, transform)
    tokenizer = cache.tokenizer
    batches = run.batches([common.training_view(args)], transform, cache)

    # ------------------------------------------- loop ---------------------------------------------
    quantity = "margin" if args.loss == "max-margin" else "tau"            # a column of the log
    shifts = shifts_of_clusters(clusters, args).to(accelerator.device)     # (K,)
    shift = shifts[-1]                                                     # () with --no-shifts
    period = steps.total / args.periods                                    # T of Eq. 7
    alpha = alpha_of_run(args)
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args,
        method_metrics=functools.partial(common.head_mid_tail, clusters=clusters))
    run.start(evaluator, shown=("loss", quantity),
              **common.temperature_banner(args, range_of_run(args), clusters))
    # "views": (B, [T,] 3, S, S) each; "captions": B lists; "draws": (B, 32) random numbers in 0..1,
    # which choose texts; "keys": B
    for batch in batches:
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        image, text, _ = grad_cache.encode(                                # (B, D)
            pixels=batch["views"][0], tokens=tokenizer(texts))

        num_missing = 0                                                    # new since clustering
        if args.shifts:
            # without a cluster -1, which is the last and smallest one
            cluster, num_missing = clusters.look_up(batch["keys"], texts)  # (B,)
            shift = shifts[common.to_device(cluster, accelerator.device)]  # (B,)
        if args.learnable_tau:
            tau_or_margin = temperature()                                  # ()
        else:
            tau_or_margin = sample_temperature(run.step, shift, period, alpha)  # (B,) or ()

        terms = {}                                                         # for the log
        if args.loss == "clip":
            loss = clip_loss(image, text, tau_or_margin, terms=terms)
        elif args.loss == "max-margin":
            loss = max_margin_loss(image, text, tau_or_margin, terms=terms)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")

        accelerator.backward(loss)
        common.average_gradients(temperature.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()

        # end_step averages over processes, and not_in_clusters is a sum over them
        log_row = {quantity: tau_or_margin.mean(), **terms,
                   "not_in_clusters": common.world_size() * num_missing}
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [image, text])

    # ------------------------------------------- save and evaluate --------------------------------
    if clusters is not None and not args.learnable_tau:                    # for the pictures
        common.save_temperatures(run, args.periods, functools.partial(
            sample_temperature, shift=shifts, period=period, alpha=alpha))
    return run.finish(figures="mmts")


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
