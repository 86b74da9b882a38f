"""NCL: Normalized Contrastive Learning for Text-Video Retrieval (Park et al., EMNLP 2022).

In retrieval, a softmax lets each query spread a probability of 1 over the items. Some items, called
hubs, collect much of it and are returned for queries that are not theirs; others are never found.
NCL adds a bias to each text and video, computed from the similarity matrix by Sinkhorn-Knopp, so
that all items collect the same share. The biases add no parameters, and the encoders stay what they
are. In training the biases come from the batch; at test time from training queries in a queue.

Equations (s_ij = <t_i, v_j>, without the paper's 1 / gamma; rows are texts, columns videos)
    (2, 3)   P_t2v(v_j | t_i) = exp(s_ij / gamma) / sum_k exp(s_ik / gamma), P_v2t likewise
    (4)      L = 1/2 (L_t2v + L_v2t), each the mean cross-entropy of the pairs ncl_terms, ncl_loss
    (5)      error = mean_j |1 - sum_i P_t2v(v_j | t_i)|              common.normalization_error
    (6, 12)  sim*(t_i, v_j) = a_i + b_j + s_ij takes the place of s_ij  ncl_terms, retrieval_biases
    (7 to 9) P = diag(alpha) exp(S / gamma) diag(beta), rows sum to 1/m and columns to 1/n
    (10, 11) a_i = gamma log(alpha_i / sum alpha), b_j likewise                  sinkhorn_biases

Symbols
    t, v        text, video          (B, D)     embeddings of this process; text comes first
    gamma       gamma, --tau         ()         divides the cosine; 1 / CLIP's logit scale; SSB 0.07
    a, b        a, b                 (m,), (n,) biases, in units of the cosine
    K           queue_size           ()         training queries in the queue; paper 16,384

Commands
    accelerate launch ncl.py                                  # moving emoji, 2 minutes on two cores
    accelerate launch ncl.py --loss infonce                   # the baseline, CLIP4Clip
    accelerate launch ncl.py --dataset msrvtt --data-dir ANNOTATIONS --video-dir VIDEOS
    accelerate launch ncl.py --dataset clips.csv --video-dir VIDEOS       # own: video, caption
    python eval.py --checkpoint RUN --normalize queue           # test-time biases for any run

docs/ncl.md: commands for every table, recipes, differences from the paper, results.
To try an idea of your own, copy this file and edit it; docs/forking.md.
"""

import argparse
import functools
import math

import common

from common import (
    Augment, Captioner, EvaluationFacts, Evaluator, Parser, Run, Temperature, below_one, between,
    captioning_loss, clean_exit, int_ge1, fp32, freeze_as_clip4clip, gather, is_clip, nonnegative_float,
    normalize, one_number, open_data, fraction, per_anchor, positive_float, positive_index, rank,
    retrieval_both_ways, row_blocks, print_main, set_dropout, ssb_recipe, support_summary, to_device,
    write_tensors)

import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.ncl import draw, first_captions


# ======================================================= METHOD ===================================
def sinkhorn_biases(sim, gamma, iterations=4, row_prior=None, col_prior=None):
    """Biases that give each row and column of exp((a + b + sim) / gamma) its share (Eqs. 7 to 11).

    It works in the log domain, where exp(1 / 0.01) does not overflow. Each round normalises rows,
    then columns, so that the columns are exact at the end. (The paper prints Eqs. 8 and 9 with
    their right-hand sides exchanged.)

    Args:
        sim: (m, n) cosines; rows are texts (or queries), columns videos (or items).
        gamma: temperature > 0, a number or ().
        iterations: rounds of Sinkhorn-Knopp, >= 1.
        row_prior, col_prior: shares (m,), (n,) that sum to 1; None = 1/m, 1/n.
    Returns: a (m,), b (n,), float32 or float64.
    """
    one_number(gamma, "gamma")
    m, n = sim.shape
    if sim.dtype != torch.float64:
        sim = sim.float()
    logits = sim / gamma                                                   # (m, n)
    log_row_share = -math.log(m)
    if row_prior is not None:
        log_row_share = row_prior.to(logits).log()                         # (m,)
    log_col_share = -math.log(n)
    if col_prior is not None:
        log_col_share = col_prior.to(logits).log()                         # (n,)
    log_beta = logits.new_zeros(n)                                         # (n,)
    for _ in range(iterations):
        log_alpha = log_row_share - torch.logsumexp(logits + log_beta, dim=1)            # (m,)
        log_beta = log_col_share - torch.logsumexp(logits + log_alpha[:, None], dim=0)   # (n,)
    a = gamma * log_alpha.log_softmax(0)                                   # (m,) Eq. 10
    b = gamma * log_beta.log_softmax(0)                                    # (n,) Eq. 11
    return a, b


@row_blocks
def biased_cross_entropy(anchor, target, *, candidates, bias, gamma):
    """Mean cross-entropy of anchors with biased cosines (Eqs. 2, 3, 12): (b, D), (b,) -> ().

    Args:
        candidates: (N, D).
        bias: (N,) of the candidates, or 0.
        gamma: temperature.
    """
    logits = (anchor @ candidates.T + bias) / gamma                        # (b, N)
    return F.cross_entropy(logits, target)                                 # ()


@fp32
def ncl_terms(text, video, gamma, iterations=4, detach=True):
    """Both directions of Eq. 4, with biases from the matrix of the global batch.

    Args:
        text, video: (B, D) embeddings of this process; row i of both is a pair.
        gamma: temperature > 0, a number or (): the biases need one for the whole matrix.
        iterations: rounds of Sinkhorn-Knopp; 0 = no biases, InfoNCE.
        detach: stop the gradient through the biases. The paper does not say; at convergence it is
            zero (Eq. 28).
    Returns: {"L_t2v", "L_v2t": ()}, means over the pairs, float32. A random guess is about ln N.
    """
    one_number(gamma, "gamma")
    text, video = normalize(text), normalize(video)                        # (B, D)
    all_texts, all_videos = gather(text), gather(video)                    # (N, D)
    a, b = 0.0, 0.0
    if iterations > 0:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            a, b = sinkhorn_biases(all_texts @ all_videos.T, gamma, iterations)          # (N,)
    target = positive_index(text)                                          # (B,)
    # a_i is the same for all videos of text i, and cancels in the softmax over them; so does b_j
    # in the softmax over texts
    t2v = biased_cross_entropy(text, target, candidates=all_videos, bias=b, gamma=gamma)
    v2t = biased_cross_entropy(video, target, candidates=all_texts, bias=a, gamma=gamma)
    return {"L_t2v": t2v, "L_v2t": v2t}


def ncl_loss(text, video, gamma, iterations=4, detach=True):
    """L = 1/2 (L_t2v + L_v2t) (Eq. 4): the mean of ncl_terms, (). A random guess is about ln N."""
    terms = ncl_terms(text, video, gamma, iterations, detach)
    return (terms["L_t2v"] + terms["L_v2t"]) / 2


# ------------------------------------------------------- test time --------------------------------
def retrieval_biases(items, queries, gamma, iterations=4):
    """Biases b of the items, from queries in place of those of the test (Sec. 3.4).

    The same numbers as b of sinkhorn_biases(queries @ items.T), 1,024 queries at a time. Edit both
    together.

    Args:
        items: (n, D) embeddings.
        queries: (K, D) embeddings of the other modality.
        gamma, iterations: as in sinkhorn_biases.
    Returns: (n,)
    """
    items, queries = normalize(items), normalize(queries)                  # (n, D), (K, D)
    log_beta = items.new_zeros(len(items))                                 # (n,)
    for _ in range(iterations):
        log_column_sums = items.new_full((len(items),), -math.inf)         # (n,)
        for block in queries.split(1024):
            logits = block @ items.T / gamma                               # (k, n)
            log_row_sums = torch.logsumexp(logits + log_beta, dim=1)       # (k,)
            log_alpha = -math.log(len(queries)) - log_row_sums             # (k,)
            block_sums = torch.logsumexp(logits + log_alpha[:, None], dim=0)             # (n,)
            log_column_sums = torch.logaddexp(log_column_sums, block_sums)               # (n,)
        log_beta = -math.log(len(items)) - log_column_sums                 # (n,)
    return gamma * log_beta.log_softmax(0)


class QueryQueue(nn.Module):
    """The last `size` training queries, the same on all processes, for use at test time alone.

    Args:
        size: K, number of queries.
        dim: D, width of a query.
    """

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("queries", torch.zeros(size, dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))   # pushed so far

    @torch.no_grad()
    def push(self, x):
        """Adds the embeddings of a step, (B, D) on each process, normalised here."""
        x = gather(normalize(x))                                           # (N, D)
        size = len(self.queries)
        numbers = self.count + torch.arange(len(x), device=x.device)       # (N,) as they arrive
        rows = numbers[-size:] % size                                      # (min(N, size),)
        self.queries[rows] = x[-size:].to(self.queries)
        self.count += len(x)

    def get(self):
        """The queries pushed so far, oldest first: (min(pushed, size), D)."""
        size, pushed = len(self.queries), int(self.count)
        if pushed < size:
            return self.queries[:pushed]
        return self.queries.roll(-(pushed % size), dims=0)


def normalized_retrieval(pieces, gamma, iterations, texts=None, videos=None):
    """Retrieval without biases, with those of training and with those of test queries (Table 5).

    Args:
        pieces: EvaluationPieces of a split, with captions.
        gamma, iterations: as in sinkhorn_biases.
        texts, videos: (K, D) training queries; without them there is no entry 'queue'.
    Returns:
        {'none', 'queue', 'oracle': {'text_to_image', 'image_to_text', 'R-Mean', 'error'}}, and
        {'none', 'queue', 'oracle': (biases of images (M,), of texts (C,))}.
    """
    device = pieces.device
    image = normalize(pieces.image.to(device))                             # (M, D)
    text = normalize(pieces.text.to(device))                               # (C, D)
    biases = {"none": (image.new_zeros(len(image)), image.new_zeros(len(text)))}
    if texts is not None and len(texts) > 0:
        biases["queue"] = (retrieval_biases(image, texts.to(device), gamma, iterations),
                           retrieval_biases(text, videos.to(device), gamma, iterations))
    biases["oracle"] = (retrieval_biases(image, text, gamma, iterations),
                        retrieval_biases(text, image, gamma, iterations))

    sim = text @ image.T                                                   # (C, M)
    results = {}
    biases_on_cpu = {}
    for name, (image_bias, text_bias) in biases.items():                   # (M,), (C,)
        results[name], _ = retrieval_both_ways(pieces, image_bias, text_bias)
        results[name]["error"] = {
            "text_to_image": common.normalization_error(sim + image_bias, gamma),
            "image_to_text": common.normalization_error(sim.T + text_bias, gamma)}
        biases_on_cpu[name] = (image_bias.cpu(), text_bias.cpu())
    return results, biases_on_cpu


# ------------------------------------------------------- baselines --------------------------------
def mean_triplet_loss(anchor, candidates, target, margin):
    """Mean triplet loss of anchors with their hardest negatives, in one direction.

    Args:
        anchor: (B, D).
        candidates: (N, D).
        target: (B,) column of each anchor's own candidate.
        margin: a number, () or (B, 1).
    Returns: ()
    """
    sim = anchor @ candidates.T                                            # (B, N)
    target_column = target[:, None]                                        # (B, 1)
    negatives = sim.scatter(1, target_column, -math.inf)                   # (B, N)
    hardest = negatives.amax(dim=1, keepdim=True)                          # (B, 1)
    return (margin - sim.gather(1, target_column) + hardest).relu().mean()


@fp32
def hardest_negative_terms(text, video, margin=0.2):
    """Triplets with the hardest negative of the global batch, by direction (Faghri et al. 2018).

    Args:
        text, video: (B, D) embeddings of this process; row i of both is a positive pair.
        margin: >= 0, in units of the cosine: a number, () or (B,) for each anchor.
    Returns: {"L_t2v", "L_v2t": ()}, means over the anchors, float32.
    """
    text, video = normalize(text), normalize(video)                        # (B, D)
    all_texts, all_videos = gather(text), gather(video)                    # (N, D)
    margin = per_anchor(margin, text, "margin", positive=False)            # () or (B, 1)
    target = positive_index(text)                                          # (B,)
    return {"L_t2v": mean_triplet_loss(text, all_videos, target, margin),
            "L_v2t": mean_triplet_loss(video, all_texts, target, margin)}


def hardest_negative_loss(text, video, margin=0.2):
    """The loss of SSB: the sum of hardest_negative_terms, (). With equal cosines it is 2 margin."""
    terms = hardest_negative_terms(text, video, margin)
    return terms["L_t2v"] + terms["L_v2t"]


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, which stand in parse_args and, for the flags of all
# scripts, in contrastive/engine/flags.py. 'recipe' says whose values they are (docs/ncl.md).
CLIP4CLIP = dict(
    recipe="paper; optimiser and batch from CLIP4Clip",
    image_encoder="openai/clip-vit-base-patch32", text_encoder="openai/clip-vit-base-patch32",
    pretrained=True, embed_dim=512, image_size=224,
    text_pooling="cls", unfold_captions=True,
    epochs=5.0, batch_size=128, chunk_size=32, lr=1e-7, lr_end=0.0,
    warmup_epochs=0.0, warmup_fraction=0.1, weight_decay=0.2, eps=1e-6,
    tau=0.01, learnable_tau=True, queue_size=16_384, crop_min=1.0, jitter=0.0,
    freeze="clip4clip", mixed_precision="bf16", log_every=50)
PARAGRAPHS = CLIP4CLIP | dict(
    epochs=10.0, chunk_size=8, text_length=64, frames=64, unfold_captions=False)
IMAGES = CLIP4CLIP | dict(
    recipe="ours; as msrvtt, on images", chunk_size=0, unfold_captions=False)
MOVING = dict(
    recipe="ours", image_size=32, frames=4, text_length=24, batch_size=128,
    save_every=120, eval_every=120)
EMOJI = MOVING | dict(
    recipe="ours; as moving-emoji", image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
OWN = dict(recipe="ours; small towers from scratch", frames=8, batch_size=128)
FROZEN = dict(
    recipe="ours; published encoders, frozen: their projections learn",
    # the weights, and the text encoder all-MiniLM-L6-v2, are installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean", cached_views=4,
    max_steps=1000, batch_size=512, lr=3e-4, warmup_epochs=0.0, warmup_fraction=0.05,
    crop_min=0.35, flip=0.5, jitter=0.0, log_every=50)
RECIPES = {
    "moving-emoji": MOVING,
    "emoji": EMOJI,
    "msrvtt": CLIP4CLIP,
    "activitynet": PARAGRAPHS,
    "msvd": CLIP4CLIP | dict(epochs=3.0, warmup_fraction=0.0),
    "didemo": PARAGRAPHS | dict(recipe="ours; as activitynet, which is as long"),
    "youcook2": CLIP4CLIP | dict(recipe="ours; as msrvtt"),
    "howto100m": CLIP4CLIP | dict(recipe="ours; as msrvtt", epochs=1.0, unfold_captions=False),
    "coco": IMAGES,
    "flickr30k": IMAGES,
    "cc3m": IMAGES,
    "cc12m": IMAGES,
    "own": OWN,
    "frozen": FROZEN}
LOWEST_TAU = 0.01                                                          # if learnt; CLIP's


def method_defaults(chosen):
    """Defaults that depend on --loss, --recipe and --image-encoder."""
    defaults = {}
    if chosen.loss != "ncl":
        # the retrieval that is reported of a baseline has no biases
        defaults["normalize"] = "none"
    if chosen.loss == "max-margin":
        defaults["learnable_tau"] = False
    freeze = RECIPES[chosen.recipe].get("freeze")
    if freeze == "clip4clip" and chosen.image_encoder and not is_clip(chosen.image_encoder):
        defaults["freeze"] = "none"
    if chosen.image_encoder == "ssb":
        defaults.update(ssb_recipe(chosen))                                # App. C
    return defaults


def check_flags(parser, args):
    """Refuses flags that contradict each other."""
    if args.learnable_tau and args.loss == "max-margin":
        parser.error("--learnable-tau: --loss max-margin has no temperature, which would not learn")
    if args.learnable_tau and args.tau < LOWEST_TAU:
        parser.error(f"--tau {args.tau}: a learnt temperature must start at {LOWEST_TAU} or above")
    if args.loss == "max-margin" and args.normalize != "none":
        parser.error(f"--normalize {args.normalize}: --loss max-margin trains no temperature; give "
                     "one to the run afterwards, eval.py --normalize queue --gamma GAMMA")
    if args.image_encoder == "ssb" and not args.feature_dir:
        parser.error("--image-encoder ssb reads features: give their folder, --feature-dir DIR")
    if args.captioning_weight and args.freeze in ("text", "both"):
        parser.error(f"--freeze {args.freeze}: the captioning loss trains the text encoder; add "
                     "--captioning-weight 0")
    eval_names = {word.partition("=")[0] for word in args.eval_datasets}
    if args.feature_dir and not eval_names <= {args.dataset}:
        parser.error(f"--eval-datasets: the features of --feature-dir are those of {args.dataset} "
                     "alone; evaluate other sets by eval.py --feature-dir")


def parse_args(argv=None):
    """Flags; their defaults follow --dataset or --recipe, --loss and --image-encoder."""
    parser = Parser(__file__, "NCL: all items get the same share of probability.",
                    freeze=["clip4clip"])
    yes_or_no = argparse.BooleanOptionalAction
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=["ncl", "infonce", "max-margin"], default="ncl",
                        help="loss: NCL's, CLIP4Clip's InfoNCE, or SSB's margin loss with the "
                             "hardest negative")
    method.add_argument("--tau", type=positive_float, default=0.1,
                        help="temperature gamma, divides the cosine; CLIP 0.01, SSB 0.07")
    method.add_argument("--learnable-tau", action=yes_or_no, default=False,
                        help="learn the temperature, from --tau on; its inverse is CLIP's logit "
                             "scale")
    method.add_argument("--iterations", type=int_ge1, default=4,
                        help="rounds of Sinkhorn-Knopp for the biases; paper 4")
    method.add_argument("--normalize", choices=["queue", "oracle", "none"], default="queue",
                        help="biases of the reported retrieval: from training queries, from the "
                             "test queries (not a fair result), or none; --loss max-margin, "
                             "which trains no temperature, has none")
    method.add_argument("--queue-size", type=int_ge1, default=2000,
                        help="K: how many of the latest training texts, and as many videos, are "
                             "kept for the biases; paper 16,384")
    method.add_argument("--margin", type=between(0, 2), default=0.2,
                        help="margin of --loss max-margin in units of the cosine, 0..2; SSB 0.2")
    method.add_argument("--loss-scale", type=nonnegative_float, default=1.0,
                        help="factor of the loss, but not of the captioning loss; NCL on SSB 15")
    method.add_argument("--captioning-weight", type=nonnegative_float, default=0.0,
                        help="weight of SSB's captioning loss, which needs a T5 as --text-encoder; "
                             "SSB 10; 0 = off")
    method.add_argument("--support-tau", type=positive_float, default=0.1,
                        help="temperature that weights the videos of the captioning loss's support "
                             "set")

    views = parser.add_argument_group("views")
    views.add_argument("--crop-min", type=fraction, default=0.8,
                       help="smallest crop as a share of the frame's area, 0..1, the same in all "
                            "frames; 1 = no crop (CLIP4Clip)")
    views.add_argument("--flip", type=fraction, default=0.0,
                       help="share of clips that are mirrored, 0..1; CLIP4Clip 0")
    views.add_argument("--jitter", type=nonnegative_float, default=0.2,
                       help="strength of changes in brightness, contrast and saturation, in all "
                            "views and the same in all frames; CLIP4Clip 0")

    towers = parser.add_argument_group("towers")
    towers.add_argument("--text-dropout", action=yes_or_no, default=True,
                        help="keep the dropout with which a transformers text encoder was "
                             "published")
    towers.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR",
                        help="folders of features for --image-encoder ssb, VIDEO.npy of shape "
                             "(time, width), such as motion and appearance; they are resampled to "
                             "--frames and concatenated")
    towers.add_argument("--dropout", type=below_one, default=0.0,
                        help="dropout of SSB's video tower and text head, 0..1; App. C 0.1, "
                             "ActivityNet 0")
    return parser.parse(argv, RECIPES, method_defaults, check=check_flags)


# ------------------------------------------------------- what the flags amount to -----------------
# These functions read a flag only if it has an effect: a run warns of flags that nothing has read.
def first_tau(args):
    """The first or fixed temperature; 1 with the max-margin loss, in which --tau has no effect and
    counts as unread."""
    if args.loss == "max-margin":
        return 1.0
    return args.tau


def dropout_of(args):
    """Dropout of SSB's heads, and whether a transformers text encoder keeps its own."""
    head_dropout = 0.0
    if args.image_encoder == "ssb" or args.text_pooling == "ssb":
        head_dropout = args.dropout
    keeps_text_dropout = True
    if args.text_encoder != "small":
        keeps_text_dropout = args.text_dropout
    return head_dropout, keeps_text_dropout


# ======================================================= main =====================================
def main(args):  # noqa: C901, PLR0912
    """One run: data, model, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    # before any process group, so that errors come quickly
    train, evals = open_data(args)
    # a CLIP as --image-encoder is the text encoder as well
    args = common.adjust_flags_to_encoder(args)
    # the batch and the epochs of a user's small data
    args = common.adjust_flags_to_data(args, train)
    steps = common.count_steps(args, train)        # per epoch, in total, of the warm-up
    run = Run(__file__, args, train, evals, steps, RECIPES)

    # ------------------------------------------- model and optimiser ------------------------------
    tower, tokenizer, transform = common.build_towers(args, train, run)
    set_dropout(tower, *dropout_of(args))
    if args.image_encoder == "ssb":
        run.remark = "reconstruction"                                      # for the banner
        print_main("WARNING: --image-encoder ssb is a reconstruction of SSB; "
                   "contrastive/encoders/ssb.py "
                   "says which values are from memory")
    if args.freeze == "clip4clip":
        freeze_as_clip4clip(tower)
    # parameters and buffers of the loss; they stand outside DDP and are saved
    loss_modules = nn.ModuleDict()
    limits = (LOWEST_TAU, None) if args.learnable_tau else None
    loss_modules["tau"] = Temperature(first_tau(args), limits)
    loss_modules["texts"] = QueryQueue(args.queue_size, args.embed_dim)
    loss_modules["videos"] = QueryQueue(args.queue_size, args.embed_dim)
    if args.captioning_weight:
        loss_modules["captioner"] = Captioner(tower.text, args.embed_dim, tower.pretrained,
                                              args.text_dropout)
    loss_modules.to(run.device)
    trained_modules = [tower, loss_modules]
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
    chunks = common.Chunks(encode_inputs, model, run.accelerator, args.chunk_size)

    # ------------------------------------------- views and batches --------------------------------
    # features of frozen encoders (--freeze), which are computed once
    cache = common.open_feature_cache(args, run, tower, tokenizer, transform)
    tokenizer = cache.tokenizer
    batches = run.batches([training_view(args)], transform, cache)

    # ------------------------------------------- loop ---------------------------------------------
    method_metrics = None
    if args.loss != "max-margin":  # which trains no temperature for biases
        method_metrics = functools.partial(evaluate_normalized, loss_modules=loss_modules,
                                           dataset=args.dataset, mode=args.normalize,
                                           iterations=args.iterations)
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, device=run.device,
                          args=args, method_metrics=method_metrics)
    run.begin(evaluator, random_guess(args, tokenizer))
    if run.step == 0:
        save_start(run)                                                    # for Figs. 7 and 8
    # listed once, since a walk through all modules takes milliseconds
    clipped_parameters = [*tower.parameters(), *loss_modules.parameters()]
    for batch in batches:
        run.set_lr(common.learning_rate(run.step, steps, args))
        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        tokens = {name: ids.to(run.device) for name, ids in tokenizer(texts).items()}    # (B, L)
        inputs = {"pixels": batch["views"][0], "tokens": tokens}           # (B, [T,] 3, S, S)
        video, text = chunks.encode(inputs)                                # (B, D)

        gamma = loss_modules["tau"]()                                      # a number or ()
        if args.loss == "ncl":
            loss = ncl_loss(text, video, gamma, args.iterations)
        elif args.loss == "infonce":
            loss = ncl_loss(text, video, gamma, iterations=0)
        elif args.loss == "max-margin":
            loss = hardest_negative_loss(text, video, args.margin)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")
        loss = args.loss_scale * loss
        captioning_terms = {}
        if args.captioning_weight:
            # SSB's second loss; a batch may hold a video twice
            hashes = [common.key_hash(key) for key in batch["keys"]]
            video_id = to_device(torch.tensor(hashes), run.device)         # (B,)
            summary = support_summary(text, gather(video), video_id, gather(video_id),
                                      args.support_tau)                    # (B, D)
            loss_cap = captioning_loss(summary, **tokens, decoder=loss_modules["captioner"])
            loss = loss + args.captioning_weight * loss_cap
            captioning_terms["L_cap"] = loss_cap

        run.check_finite(loss, gamma, (text, video))
        chunks.backward(loss)                                              # of the full batch
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_(clipped_parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        loss_modules["tau"].clamp()
        loss_modules["texts"].push(text)
        loss_modules["videos"].push(video)
        columns = {}
        if run.due("log", run.step + 1):
            columns = log_columns(text, video, gamma, captioning_terms, run)
        run.done(batch, loss, gamma, columns)                              # count, log, save, stop

    # ------------------------------------------- save and evaluate --------------------------------
    save_queues(run, loss_modules)
    tower.spec["evaluation"] = vars(evaluation_facts(args))                # for eval.py
    return run.finish(functools.partial(draw, retrieval_biases=retrieval_biases))


# ------------------------------------------------------- views and encoders -----------------------
def training_view(args):
    """The view of a clip; --crop-min 1 keeps the whole frame."""
    if args.image_encoder == "ssb":
        # for SSB's features, which have no views, a view that changes nothing
        return Augment(args.image_size)
    return Augment(args.image_size, args.crop_min, args.flip, jitter_p=1.0,
                   brightness=args.jitter, contrast=args.jitter, saturation=args.jitter,
                   squash=args.eval_resize == "squash")


def encode(model, inputs):
    """pixels (b, [T,] 3, S, S), tokens (b, L) -> video, text: (b, D) each."""
    video, text, _ = model(inputs["pixels"], inputs["tokens"])
    return video, text


# ------------------------------------------------------- banner, log and files --------------------
def random_guess(args, tokenizer):
    """The loss at the start and at the end of training if all cosines are equal.

    None if it is unknown, as for a loss that a fork adds.
    """
    if args.loss in ("ncl", "infonce"):
        guess = args.loss_scale * math.log(args.batch_size)
    elif args.loss == "max-margin":
        guess = args.loss_scale * 2 * args.margin
    else:
        return None
    if args.captioning_weight:
        # a random guess at each word of a caption
        guess += args.captioning_weight * math.log(len(tokenizer.tokenizer))
    return [guess, guess]


@torch.no_grad()
def log_columns(text, video, gamma, captioning_terms, run):
    """Columns of the log: terms of the loss, health of the space, normalisation error (Fig. 2).

    Args:
        text, video: (B, D) embeddings of this process.
        gamma: temperature of the step, a number or ().
        captioning_terms: {'L_cap': ()}, or empty.
        run: the Run.
    """
    args = run.args
    terms = {}
    if args.loss == "ncl":
        terms = ncl_terms(text, video, gamma, args.iterations)
    elif args.loss == "infonce":
        terms = ncl_terms(text, video, gamma, iterations=0)
    elif args.loss == "max-margin":
        terms = hardest_negative_terms(text, video, args.margin)
    columns = common.mean_over_processes(terms | captioning_terms, run.device)
    text, video = gather(normalize(text)), gather(normalize(video))        # (N, D)
    columns.update(common.embedding_health(video, text))
    if args.loss == "max-margin":
        return columns  # no temperature was trained
    sim = text @ video.T                                                   # (N, N)
    _, b = sinkhorn_biases(sim, gamma, args.iterations)                    # (N,)
    columns["error"] = common.normalization_error(sim, gamma)
    columns["error_normalized"] = common.normalization_error(sim + b, gamma)
    return columns


@torch.no_grad()
def evaluate_normalized(pieces, loss_modules, dataset, mode, iterations):
    """The retrieval metrics of a set with the biases of --normalize, and those of all its modes.

    Args:
        pieces: EvaluationPieces of a split. The biases are added to them, for the pictures.
        loss_modules: temperature and queues of the run.
        dataset: name of the run's data set, the only one that has a queue.
        mode: --normalize.
        iterations: rounds of Sinkhorn-Knopp.
    """
    gamma = float(loss_modules["tau"]())
    texts = videos = None
    if pieces.data.name == dataset:
        texts = loss_modules["texts"].get()                                # (K, D)
        videos = loss_modules["videos"].get()
    results, pieces.biases = normalized_retrieval(pieces, gamma, iterations, texts, videos)
    if mode not in results:
        # no queue: before the first step, and for other sets than the run's
        mode = "none"
    metrics = {name: value for name, value in results[mode].items() if name != "error"}
    return metrics | {"normalize": results, "normalized_by": mode}


def evaluation_facts(args):
    """What eval.py has to know of a run."""
    return EvaluationFacts(
        tau=None if args.loss == "max-margin" else args.tau, learnable_tau=args.learnable_tau,
        normalize=args.normalize, iterations=args.iterations, knn_features=args.knn_features)


def save_start(run):
    """Writes the embeddings of the val splits before training."""
    if rank() == 0:
        start = {}
        for name, pieces in run.val_pieces.items():
            for kind, embeddings in first_captions(pieces).items():
                start[f"{name}/{kind}"] = embeddings
        write_tensors(run.folder / "embeddings_before.safetensors", start)


def save_queues(run, loss_modules):
    """Writes queues and gamma, for eval.py --normalize queue and the pictures."""
    if rank() == 0:
        gamma = torch.as_tensor(loss_modules["tau"](), dtype=torch.float64).detach().reshape(1)
        queues = {name: loss_modules[name].get() for name in ("texts", "videos")}
        write_tensors(run.folder / "queues.safetensors", queues | {"gamma": gamma})


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
