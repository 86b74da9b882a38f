"""NCL: Normalized Contrastive Learning for Text-Video Retrieval (Park et al., EMNLP 2022).

A softmax over the items gives the retrieval probabilities of a query, which sum to 1. Summed over
all queries, each item should receive 1, too. But some receive much more and are retrieved for wrong
queries, and others much less and are missed. NCL adds a bias to the cosines of each text and each
video that makes these sums equal. Sinkhorn-Knopp computes it from the similarity matrix: in
training from that of the batch, at test time from that of the last training queries and the test
items. No parameters are added.

Equations (s_ij = <t_i, v_j>, without the paper's 1 / gamma; rows are texts, columns videos)
    (2, 3)   P_t2v(v_j | t_i) = exp(s_ij / gamma) / sum_k exp(s_ik / gamma), P_v2t likewise
    (4)      L = 1/2 (L_t2v + L_v2t), L_t2v = -1/B sum_i log P_t2v(v_i | t_i)           ncl_loss
    (5)      error = mean_j |1 - n/m sum_i P_t2v(v_j | t_i)|, m texts, n videos; n = m in the paper
                                                                      common.normalization_error
    (6, 12)  sim*(t_i, v_j) = a_i + b_j + s_ij replaces s_ij                biased_cross_entropy
    (7 to 9) P = diag(alpha) exp(S / gamma) diag(beta), rows sum to 1/m and columns to 1/n
    (10, 11) a_i = gamma log(alpha_i / sum alpha), b_j likewise                  sinkhorn_biases
    Sec. 3.4 b_j from K training queries in place of the test's  QueryQueue, retrieval_biases

Symbols
    t, v        text, video          (B, D)     embeddings of this process
    gamma       gamma                ()         divides the cosine; --tau, "tau" in the log
    a, b        a, b                 (m,), (n,) biases, in units of the cosine
    K           --queue-size         ()         training queries in the queue; paper 16,384

Commands
    accelerate launch ncl.py                                  # moving emoji, 2 minutes on two cores
    accelerate launch ncl.py --baseline                       # InfoNCE, everything else equal
    accelerate launch ncl.py --dataset msrvtt --data-dir ANNOTATIONS --video-dir VIDEOS
    accelerate launch ncl.py --dataset clips.csv --video-dir VIDEOS       # own: video, caption
    python eval.py --checkpoint RUN --normalize oracle        # biases from the test queries

docs/ncl.md: commands for every table, recipes, differences from the paper, results.
variants/ncl_ssb.py: NCL on SSB (Table 4). To try an idea of your own, copy this file and edit it
(see docs/forking.md).
"""

import functools
import math

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, clean_exit, fp32, gather, int_ge1, normalize,
    one_number, positive_index, retrieval_both_ways, row_blocks)
from common import hardest_negative_loss  # noqa: F401  the loss of SSB, a public name here

import torch
import torch.nn as nn
import torch.nn.functional as F


# ======================================================= METHOD ===================================
def sinkhorn_biases(sim, gamma, iterations=4, row_prior=None, col_prior=None):
    """Biases a of the rows and b of the columns of a similarity matrix (Eqs. 7 to 11).

    With P_ij = exp((a_i + b_j + sim_ij) / gamma), the row sums of P are proportional to row_prior,
    and its column sums to col_prior. Each round normalises rows, then columns. So at the end the
    columns are exact, and the rows nearly on batches of a model (the error of Eq. 5 is small, not
    0). In the log domain exp(1 / 0.01) does not overflow. The paper prints Eqs. 8 and 9 with their
    right-hand sides exchanged.

    Args:
        sim: (m, n) cosines; rows are texts (or queries), columns videos (or items).
        gamma: temperature > 0, a number or ().
        iterations: rounds of Sinkhorn-Knopp, >= 1.
        row_prior, col_prior: (m,), (n,) that sum to 1; None = 1/m and 1/n for all.
    Returns: a (m,), b (n,), float32 or float64.
    """
    if iterations < 1:
        raise ValueError(f"iterations={iterations}: give 1 or more")
    gamma = one_number(gamma, "gamma")
    m, n = sim.shape
    if sim.dtype != torch.float64:
        sim = sim.float()
    logits = sim / gamma                                                   # (m, n)
    log_row_prior = -math.log(m)
    if row_prior is not None:
        log_row_prior = row_prior.to(logits).log()                         # (m,)
    log_col_prior = -math.log(n)
    if col_prior is not None:
        log_col_prior = col_prior.to(logits).log()                         # (n,)
    log_beta = logits.new_zeros(n)                                         # (n,)
    for _ in range(iterations):
        log_alpha = log_row_prior - torch.logsumexp(logits + log_beta, dim=1)            # (m,)
        log_beta = log_col_prior - torch.logsumexp(logits + log_alpha[:, None], dim=0)   # (n,)
    a = gamma * log_alpha.log_softmax(0)                                   # (m,) Eq. 10
    b = gamma * log_beta.log_softmax(0)                                    # (n,) Eq. 11
    return a, b


# row_blocks saves memory and changes no value: it calls the function with b rows of the positional
# tensors at a time, and with all of the keyword arguments
@row_blocks
def biased_cross_entropy(anchor, target, *, candidates, bias, gamma):
    """Mean cross-entropy with biases (Eqs. 2, 3, 12): (b, D), (b,), (N, D), (N,) or 0, () -> ().

    row_blocks weighs the means of its blocks by their rows: the mean over all anchors.
    """
    logits = (anchor @ candidates.T + bias) / gamma                        # (b, N)
    return F.cross_entropy(logits, target)                                 # ()


@fp32
def ncl_loss(text, video, gamma, iterations=4, detach=True, *, terms=None):
    """L = 1/2 (L_t2v + L_v2t), with biases from the matrix of the global batch (Eqs. 4 and 12).

    Args:
        text, video: (B, D) embeddings of this process; row i of both is a pair.
        gamma: temperature > 0, a number or (): the biases need one for the whole matrix.
        iterations: rounds of Sinkhorn-Knopp; 0 = no biases, InfoNCE.
        detach: stop the gradient through the biases. The paper does not say; the gradient of the
            loss through them is zero at convergence (Eq. 28).
        terms: dict that receives L_t2v and L_v2t, means over the anchors.
    Returns: (), float32. A random guess is about ln N.
    """
    gamma = one_number(gamma, "gamma")
    text, video = normalize(text), normalize(video)                        # (B, D)
    all_texts, all_videos = gather(text), gather(video)                    # (N, D)
    a, b = 0.0, 0.0
    if iterations > 0:
        with torch.set_grad_enabled(not detach):
            a, b = sinkhorn_biases(all_texts @ all_videos.T, gamma, iterations)          # (N,)
    target = positive_index(text, video)                                   # (B,)
    # the candidates' biases alone: that of the anchor is in all of its logits, and the softmax
    # cancels it
    loss_t2v = biased_cross_entropy(text, target, candidates=all_videos, bias=b, gamma=gamma)
    loss_v2t = biased_cross_entropy(video, target, candidates=all_texts, bias=a, gamma=gamma)
    if terms is not None:
        terms.update({"L_t2v": loss_t2v, "L_v2t": loss_v2t})
    return (loss_t2v + loss_v2t) / 2


# ------------------------------------------------------- test time --------------------------------
def retrieval_biases(items, queries, gamma, iterations=4):
    """Biases b of the items from a set of queries, at test time those of the queue (Sec. 3.4).

    Args:
        items: (n, D) embeddings.
        queries: (K, D) embeddings of the other modality.
        gamma, iterations: as in sinkhorn_biases.
    Returns: (n,)
    """
    sim = normalize(queries) @ normalize(items).T                          # (K, n)
    _, b = sinkhorn_biases(sim, gamma, iterations)
    return b


class QueryQueue(nn.Module):
    """The last K training queries of one modality, the same on all processes; read at test time.

    Args:
        size: K.
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
        positions = self.count + torch.arange(len(x), device=x.device)     # (N,) since the start
        # the oldest queries make room; of more than K new ones the last K stay
        rows = positions[-size:] % size
        self.queries[rows] = x[-size:].to(self.queries)
        self.count += len(x)

    def get(self):
        """The queries pushed so far, oldest first: (min(pushed, size), D)."""
        size, pushed = len(self.queries), int(self.count)
        if pushed < size:
            return self.queries[:pushed]
        return self.queries.roll(-(pushed % size), dims=0)


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here and in contrastive/engine/flags.py; 'source'
# says whose values they are (docs/ncl.md), 'baseline_rates' which flags the paper's baseline has
# beside --baseline.
SMALL = dict(
    source="ours", tau=0.1, queue_size=2000, crop_min=0.8, jitter=0.2)
MOVING = SMALL | dict(
    image_size=32, frames=4, text_length=24, batch_size=128,
    save_every=120, eval_every=120)
EMOJI = MOVING | dict(
    source="ours; as moving-emoji", image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
OWN = SMALL | dict(source="ours; small encoders from scratch", frames=8, batch_size=128)
FROZEN = SMALL | dict(
    source="ours; published encoders, frozen: their projections learn",
    # these weights and the text encoder, all-MiniLM-L6-v2, come with installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean",
    max_steps=1000, batch_size=512, lr=3e-4, warmup_fraction=0.05,
    crop_min=0.35, flip=0.5, jitter=0.0, log_every=50)
CLIP4CLIP = dict(
    source="paper; optimiser and batch from CLIP4Clip",
    image_encoder="openai/clip-vit-base-patch32", text_encoder="openai/clip-vit-base-patch32",
    pretrained=True, embed_dim=512, image_size=224,
    text_pooling="cls", unfold_captions=True,
    epochs=5.0, batch_size=128, chunk_size=32, lr=1e-7, lr_end=0.0,
    warmup_fraction=0.1, weight_decay=0.2, eps=1e-6,
    learnable_tau=True, freeze="clip4clip", mixed_precision="bf16", log_every=50)
PARAGRAPHS = CLIP4CLIP | dict(
    epochs=10.0, chunk_size=8, text_length=64, frames=64, unfold_captions=False)
IMAGES = CLIP4CLIP | dict(
    source="ours; as msrvtt, on images", chunk_size=0, unfold_captions=False)
RECIPES = {
    "moving-emoji": MOVING,
    "emoji": EMOJI,
    "msrvtt": CLIP4CLIP,
    "activitynet": PARAGRAPHS | dict(baseline_rates="--epochs 5"),
    "msvd": CLIP4CLIP | dict(epochs=3.0, warmup_fraction=0.0,
                             baseline_rates="--epochs 5 --warmup-fraction 0.1"),
    "didemo": PARAGRAPHS | dict(source="ours; as activitynet, which is as long"),
    "youcook2": CLIP4CLIP | dict(source="ours; as msrvtt"),
    "howto100m": CLIP4CLIP | dict(source="ours; as msrvtt", epochs=1.0, unfold_captions=False),
    "coco": IMAGES,
    "flickr30k": IMAGES,
    "cc3m": IMAGES,
    "cc12m": IMAGES,
    "own": OWN,
    "frozen": FROZEN}
# InfoNCE, whose reported retrieval has no biases
BASELINE = dict(loss="infonce", normalize="none")


# Flags that all scripts share are in contrastive/engine/flags.py. Precedence: default < recipe
# (--dataset, --recipe) < preset (--baseline) < saved flags of --resume < command line.
def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "NCL: all items get the same share of probability.")
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=["ncl", "infonce"], default="ncl",
                        help="loss: NCL's, or InfoNCE as in CLIP4Clip")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, InfoNCE, with everything else equal: "
                             "sets --loss infonce --normalize none")
    parser.add_tau_flags(method, tau=0.01, tau_clamp=(0.01, 100.0),
                         note="the paper's gamma; CLIP 0.01")
    add_bias_flags(method)
    clip4clip = parser.add_argument_group("CLIP4Clip")
    parser.add_unfold_flag(clip4clip)
    parser.add_eps_flag(clip4clip)
    parser.add_view_flags(crop_min=1.0, flip=0.0, jitter=0.0)
    parser.add_frozen_flags("clip4clip")
    return parser.parse(argv, RECIPES, BASELINE, check_flags)


def add_bias_flags(group):
    """Adds the flags of the biases to a group, here and in SSB's variant."""
    group.add_argument("--iterations", type=int_ge1, default=4,
                       help="rounds of Sinkhorn-Knopp for the biases; paper 4")
    group.add_argument("--normalize", choices=["queue", "oracle", "none"], default="queue",
                       help="biases of the reported retrieval: from training queries, from the "
                            "test queries (not a fair result), or none")
    group.add_argument("--queue-size", type=int_ge1, default=16_384,
                       help="K: how many of the latest training texts, and as many videos, are "
                            "kept for the biases; paper 16,384")


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    parser.check_tau_flags(args)
    parser.require(not args.baseline or args.loss == "infonce",
                   f"--loss {args.loss}: --baseline is --loss infonce; leave out one of the two")


# ======================================================= main =====================================
def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    train, eval_sets = common.open_data(args)
    args = common.adjust_flags_to_encoder(args)      # a CLIP brings its text encoder
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    if args.freeze == "clip4clip":
        common.freeze_as_clip4clip(model)
    # outside DDP: average_gradients does for it what DDP does for the model
    temperature = Temperature(args.tau, args.learnable_tau, args.tau_clamp).to(accelerator.device)
    text_queue = QueryQueue(args.queue_size, args.embed_dim).to(accelerator.device)
    video_queue = QueryQueue(args.queue_size, args.embed_dim).to(accelerator.device)
    optimizer = common.make_optimizer([model, temperature], args, args.eps)
    parameters = [*model.parameters(), *temperature.parameters()]

    # >>> shared: prepare (the same lines in all scripts)
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # without DDP
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    if args.compile:
        model = torch.compile(model)
    # <<< shared
    run.resume(raw_model, optimizer, tau=temperature, texts=text_queue,
               videos=video_queue)                                         # no-op without --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size)            # encodes in chunks

    # ------------------------------------------- views --------------------------------------------
    # with --freeze, features of the frozen encoders, computed once, replace pixels and tokens
    cache = common.open_feature_cache(args, run, raw_model, tokenizer, transform)
    tokenizer = cache.tokenizer
    batches = run.batches([common.training_view(args)], transform, cache)

    # ------------------------------------------- loop ---------------------------------------------
    method_metrics = functools.partial(
        evaluate_normalized, args=args, temperature=temperature, text_queue=text_queue,
        video_queue=video_queue)
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args,
        method_metrics=method_metrics)
    run.start(evaluator)
    # Figs. 7 and 8 compare val before and after training
    if run.step == 0 and common.rank() == 0:
        common.save_pieces(run.folder / "val_before.safetensors", run.val_pieces)
    # "views": (B, [T,] 3, S, S) each; "captions": B lists; "draws": (B, 32) random numbers in 0..1,
    # which choose texts
    for batch in batches:
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        video, text, _ = grad_cache.encode(                                # (B, D)
            pixels=batch["views"][0], tokens=tokenizer(texts))

        gamma = temperature()
        terms = {}                                                         # for the log
        if args.loss == "ncl":
            loss = ncl_loss(text, video, gamma, iterations=args.iterations, terms=terms)
        elif args.loss == "infonce":
            loss = ncl_loss(text, video, gamma, iterations=0, terms=terms)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")

        accelerator.backward(loss)
        common.average_gradients(temperature.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()
        text_queue.push(text)
        video_queue.push(video)

        log_row = {"tau": gamma, **terms}
        if run.logs_next():
            log_row.update(batch_errors(text, video, gamma, args.iterations))
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [video, text])

    # ------------------------------------------- save and evaluate --------------------------------
    # with --eval-epoch best: weights and queues of the best step, before the queues are saved
    run.restore_best()
    common.save_queues(run, temperature(), text_queue.get(), video_queue.get())
    return run.finish(figures="ncl")


@torch.no_grad()
def batch_errors(text, video, gamma, iterations):
    """Text-to-video errors (Eq. 5) of the global batch, without and with its biases; Fig. 2 has
    those of the test set.

    Returns: {"error", "error_normalized": number}, the same on all processes.
    """
    text, video = gather(normalize(text)), gather(normalize(video))        # (N, D)
    sim = text @ video.T                                                   # (N, N)
    _, b = sinkhorn_biases(sim, gamma, iterations)                         # (N,)
    return {"error": common.normalization_error(sim, gamma),
            "error_normalized": common.normalization_error(sim + b, gamma)}


# ------------------------------------------------------- evaluation -------------------------------
# The evaluation is shared by all scripts and speaks of images; here they are the paper's videos.


@torch.no_grad()
def evaluate_normalized(pieces, args, temperature, text_queue, video_queue):
    """The retrieval metrics of a data set in the mode of --normalize, and those of all modes.

    Args:
        pieces: EvaluationPieces of a split. For the pictures they receive `biases` and, of the test
            split of the training set, `recall_by_queue_size`.
        args: the flags.
        temperature: the Temperature gamma.
        text_queue, video_queue: QueryQueues.
    """
    gamma = float(temperature())
    texts, videos = None, None
    if pieces.data.name == args.dataset:  # the queues hold its training queries
        texts, videos = text_queue.get(), video_queue.get()                # (K, D)
        if pieces.data.split == "test":                                    # for Fig. 5
            biases_of = functools.partial(
                retrieval_biases, gamma=gamma, iterations=args.iterations)
            pieces.recall_by_queue_size = common.recall_by_queue_size(
                pieces, texts, videos, biases_of)
    results, pieces.biases = normalized_retrieval(pieces, gamma, args.iterations, texts, videos)
    return metrics_of_mode(results, args.normalize)


def normalized_retrieval(pieces, gamma, iterations, texts=None, videos=None):
    """Retrieval in three modes (Table 5): 'none' without biases, 'queue' with those from training
    queries, 'oracle' with those from the test queries.

    Args:
        pieces: EvaluationPieces: embeddings of a split, which has captions.
        gamma, iterations: as in sinkhorn_biases.
        texts, videos: (K, D) training queries; without them there is no 'queue'.
    Returns: two dicts by mode: metrics {'text_to_image', 'image_to_text', 'R-Mean', 'error'}; and
        biases of images (M,) and of texts (C,).
    """
    device = pieces.device
    image = normalize(pieces.image.to(device))                             # (M, D)
    text = normalize(pieces.text.to(device))                               # (C, D)
    biases_of = functools.partial(retrieval_biases, gamma=gamma, iterations=iterations)
    biases = {"none": (image.new_zeros(len(image)), image.new_zeros(len(text)))}
    if texts is not None and len(texts) > 0:
        biases["queue"] = (biases_of(items=image, queries=texts.to(device)),
                           biases_of(items=text, queries=videos.to(device)))
    biases["oracle"] = (biases_of(items=image, queries=text),
                        biases_of(items=text, queries=image))

    sim = text @ image.T                                                   # (C, M)
    results = {}
    biases_on_cpu = {}
    for mode, (image_bias, text_bias) in biases.items():                   # (M,), (C,)
        results[mode], _ = retrieval_both_ways(pieces, image_bias, text_bias)
        results[mode]["error"] = {
            "text_to_image": common.normalization_error(sim + image_bias, gamma),
            "image_to_text": common.normalization_error(sim.T + text_bias, gamma)}
        biases_on_cpu[mode] = image_bias.cpu(), text_bias.cpu()
    return results, biases_on_cpu


def metrics_of_mode(results, mode):
    """The metrics of a mode, to be reported, with those of all modes behind them.

    Args:
        results: metrics by mode, as normalized_retrieval returns them.
        mode: of them; if there was no queue, 'queue' is 'none'.
    Returns: metrics {'text_to_image', 'image_to_text', ...}, 'normalize': results and
        'normalized_by': the mode.
    """
    if mode not in results:
        mode = "none"
    metrics = {key: value for key, value in results[mode].items() if key != "error"}
    return metrics | {"normalize": results, "normalized_by": mode}


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
