"""NCL: Normalized Contrastive Learning for Text-Video Retrieval (Park et al., EMNLP 2022).

In retrieval, a softmax lets every query spread a total probability of 1 over the items. Some items, called hubs,
collect much of it and are returned for queries that are not theirs; others collect almost none and are never found. NCL
adds a bias to each text and video, computed from the similarity matrix by Sinkhorn-Knopp, so that all items collect the
same share. Nothing is learnt, and the encoders do not change. In training the biases come from the batch. At test time
the queries are unknown, so training queries, kept in a queue, take their place.

Equations, s_ij = <t_i, v_j>, rows = texts, columns = videos:
    (2)      P_t2v(v_j | t_i) = exp(s_ij / gamma) / sum_k exp(s_ik / gamma)
    (4)      L = 1/2 (L_t2v + L_v2t), each the mean cross-entropy of the pair              ncl_terms, ncl_loss
    (5)      normalisation error: mean_j |1 - sum_i P_t2v(v_j | t_i)|                      common.normalization_error
    (6, 12)  sim*(t_i, v_j) = a_i + b_j + s_ij, for s_ij in (4) and in retrieval           ncl_terms, retrieval_biases
    (7)      P = diag(alpha) exp(S / gamma) diag(beta), rows sum to 1/m and columns to 1/n
    (10, 11) a_i = gamma log(alpha_i / sum alpha),  b_j = gamma log(beta_j / sum beta)     sinkhorn_biases

    symbol      variable           shape          unit and paper value
    t, v        text, video        (B, D)         this process's embeddings, normalised inside; text first, as there
    gamma       gamma, --tau       ()             divides the cosine; CLIP's logit scale, at least 0.01; SSB 0.07
    a, b        a, b               (m,), (n,)     cosine units
    K           queue_size         ()             training queries kept of each kind; 16,384

Commands:
    accelerate launch ncl.py                                     # moving emoji, two minutes on two CPU cores
    accelerate launch ncl.py --loss infonce                      # the CLIP4Clip baseline
    accelerate launch ncl.py --dataset msrvtt --data-dir ANNOTATIONS --video-dir VIDEOS      # the paper's; msvd, ...
    # Table 4: SSB with NCL, and with its own loss
    accelerate launch ncl.py --dataset msrvtt ... --image-encoder ssb --feature-dir MOTION APPEARANCE
    accelerate launch ncl.py --dataset msrvtt ... --image-encoder ssb --feature-dir MOTION APPEARANCE --loss max-margin
    accelerate launch ncl.py --dataset clips.csv --video-dir VIDEOS   # own data: columns video, caption[, start, end]
    python eval.py --checkpoint RUN --normalize queue            # test-time normalisation of any script's checkpoint

A fork edits METHOD, the flags of the method group, and the loss in the loop, not what is marked as shared.

Differences from the paper (there is no authors' code) and from CLIP4Clip, its base:
 1. Eqs. 8 and 9 are printed with right-hand sides exchanged; rows sum to 1/m, columns to 1/n (it matters for queues).
 2. The code of Fig. 4 is printed as an image, which we could not read. Here: the log domain, rows first, columns last,
    4 rounds; a plain exp overflows at gamma = 0.01.
 3. After 4 rounds at gamma = 0.01 the sums are far from 1; the paper calls the residual small. It is logged, as the
    error after a batch's biases.
 4. a cancels in text -> video and b in video -> text (a softmax sees no constant): each direction needs one bias.
 5. The paper does not say whether a gradient flows through the biases. By default none does (at convergence it is
    zero, Eq. 28); with detach=False of ncl_loss it does.
 6. Adam: torch's AdamW with CLIP4Clip's beta2, epsilon and weight decay; its BertAdam has no bias correction and clips
    each tensor as well. Norms, biases and the logit scale are not decayed (CLIP4Clip decays CLIP's norms by an accident
    of names). The towers run in bf16 (CLIP4Clip: float32; --mixed-precision no), which is not measured at scale.
 7. The learning rate follows a cosine to 0 after the warm-up; CLIP4Clip's drops to 0.976 of the peak at its end. Frames
    are uniform in time, CLIP4Clip's uniform over a list of one frame a second; a short clip repeats frames, CLIP4Clip
    pads and masks. Frames are scaled twice (8/7 of the size while decoding, then antialiased bilinear); CLIP4Clip once,
    bicubic. It tests the best epoch (of MSR-VTT on the test split); here it is the last.
 8. The batch size is not stated; it is CLIP4Clip's 128. On MSR-VTT and MSVD every caption is a training example
    (--unfold-captions), so a batch may hold a clip twice. As in the base code, the pair is then an unmasked false
    negative, and the priors stay uniform.
 9. Table 4 is on SSB (Patrick et al. 2021), which has no public code: --image-encoder ssb is a RECONSTRUCTION that does
    not promise the printed numbers; encoders/ssb.py says of each value whether it is NCL's, from memory or ours. SSB's
    margin loss is summed over the batch (--loss-scale 64: App. C's factor 15 fits no mean), and its captioning loss
    is kept beside NCL's, as the paper does not say that it is dropped. Dropout (App. C: 0.1 on MSVD and MSR-VTT, 0 on
    ActivityNet) follows the first layer, the attention and the MLP of both heads; T5 keeps its own 0.1 as well.
10. The pictures show only the run itself: Fig. 2 without biases, with the queue and with oracle (the paper: CLIP4Clip
    beside NCL with its queue), Fig. 6 its retrievals without sums, Fig. 7 a PCA for t-SNE. Table 5's row None is
    CLIP4Clip (--loss infonce), not NCL without biases. Figs. 7 and 8 show the start only if there is a val split (not
    MSR-VTT). App. D's decomposition (Eqs. 19 to 23, except the gap, which is logged) and video weights (Eqs. 24 to 27)
    are not computed.
"""

import argparse
import functools
import math

import common

from common import (  # isort: skip
    Captioner, Evaluator, Parser, Run, below_one, between, by_rows, captioning_loss, clean_exit, count,
    fp32, freeze_as_clip4clip, gather, is_clip, nonnegative, normalize,
    one_number, open_data, part, per_anchor, positive, positive_index, rank, retrieval_both_ways, set_dropout,
    ssb_recipe, support_summary, to_device, write_tensors)

import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.ncl import draw, first_captions  # isort: skip


# ======================================================= METHOD ======================================================
def sinkhorn_biases(sim, gamma, iterations=4, row_prior=None, col_prior=None):
    """Biases (a, b) under which each row and column of exp((a + b + sim) / gamma) gets its share (Eqs. 7 to 11).

    Args:
        sim: (m, n) cosines, rows = texts (or queries), columns = videos (or items).   gamma: temperature, > 0.
        iterations: rounds, at least 1; each normalises the rows, then the columns, which are exact at the end.
        row_prior (m,), col_prior (n,): shares that sum to 1; None = 1/m and 1/n.
    Returns: a (m,), b (n,) in cosine units, fp32 at least. Log domain: finite for any cosine and gamma.
    """
    (m, n), gamma = sim.shape, one_number(gamma, "gamma")
    logits = (sim if sim.dtype == torch.float64 else sim.float()) / gamma           # (m, n) S
    log_r = -math.log(m) if row_prior is None else row_prior.to(logits).log()       # () or (m,)
    log_c = -math.log(n) if col_prior is None else col_prior.to(logits).log()       # () or (n,)
    log_beta = logits.new_zeros(n)                                                  # (n,)
    for _ in range(iterations):
        log_alpha = log_r - torch.logsumexp(logits + log_beta, dim=1)               # (m,) rows of P sum to r
        log_beta = log_c - torch.logsumexp(logits + log_alpha[:, None], dim=0)      # (n,) columns sum to c
    return gamma * log_alpha.log_softmax(0), gamma * log_beta.log_softmax(0)        # (m,), (n,); Eqs. 10 and 11


@fp32
def ncl_terms(text, video, gamma, iterations=4, detach=True, block=0):
    """Both directions of Eq. 4 with the adjusted similarity (Eq. 12); biases from the matrix of the whole global batch.

    Args:
        text, video: (B, D) this process's embeddings, row i of both is a pair.
        gamma: temperature, divides the cosine, float or () tensor, > 0; the biases need one for the whole matrix.
        iterations: rounds of Sinkhorn-Knopp; 0 = no biases, plain InfoNCE.   detach: no gradient through the biases.
        block: rows of the loss at a time (0 = automatic, see common.by_rows); the biases need the whole matrix.
    Returns: {"L_t2v", "L_v2t"}: scalars fp32 (float64 stays), means over the B local pairs. A random guess is about
        ln N each.
    """
    text, video, gamma = normalize(text), normalize(video), one_number(gamma, "gamma")  # (B, D), (B, D), ()
    texts, videos = gather(text), gather(video)                            # (N, D)
    a = b = 0.0
    if iterations:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            a, b = sinkhorn_biases(texts @ videos.T, gamma, iterations)    # (N,), (N,)

    def one_way(anchor, candidates, bias):                                 # (B, D), (N, D), (N,) or 0.0
        def rows(x, target):                                               # b anchors at a time
            return F.cross_entropy((x @ candidates.T + bias) / gamma, target)       # ()
        return by_rows(rows, anchor, positive_index(anchor), columns=len(candidates), block=block)
    # a_i, equal along a row of text -> video, cancels there, and b_j in the other direction
    return {"L_t2v": one_way(text, videos, b), "L_v2t": one_way(video, texts, a)}


def ncl_loss(text, video, gamma, iterations=4, detach=True, block=0):
    """L = 1/2 (L_t2v + L_v2t) (Eq. 4); arguments and type as ncl_terms. Scalar; a random guess is about ln N."""
    terms = ncl_terms(text, video, gamma, iterations, detach, block)
    return (terms["L_t2v"] + terms["L_v2t"]) / 2


# ------------------------------------------------------- test time ---------------------------------------------------
def retrieval_biases(items, queries, gamma, iterations=4):
    """Bias (n,) of each item (Sec. 3.4), from queries (K, D) that stand in for the unknown ones; items (n, D).

    Equal to the columns' biases of sinkhorn_biases, in blocks of queries to spare memory; a fork changes both loops.
    """
    items, queries = normalize(items), normalize(queries)                  # (n, D), (K, D)
    log_beta = items.new_zeros(len(items))                                 # (n,)
    for _ in range(iterations):
        total = items.new_full((len(items),), -math.inf)                   # (n,) log of the column sums so far
        for block in queries.split(1024):
            logits = block @ items.T / gamma                               # (k, n)
            log_alpha = -math.log(len(queries)) - torch.logsumexp(logits + log_beta, 1)              # (k,)
            total = torch.logaddexp(total, torch.logsumexp(logits + log_alpha[:, None], 0))          # (n,)
        log_beta = -math.log(len(items)) - total                           # (n,)
    return gamma * log_beta.log_softmax(0)


class QueryQueue(nn.Module):
    """First in, first out: the last `size` training queries, the same on all processes. Read at test time only."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("queries", torch.zeros(size, dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))   # pushed so far

    @torch.no_grad()
    def push(self, x):
        """Add this step's embeddings of all processes: (B, D) local rows, any scale."""
        x, size = gather(normalize(x)), len(self.queries)                  # (N, D)
        at = (self.count + torch.arange(len(x), device=x.device))[-size:] % size        # (min(N, size),)
        self.queries[at] = x[-size:].to(self.queries)
        self.count += len(x)

    def get(self):
        """The queries pushed so far, oldest first, (min(pushed, size), D); places not filled yet are left out."""
        size, pushed = len(self.queries), int(self.count)
        return self.queries[:pushed] if pushed < size else self.queries.roll(-(pushed % size), 0)


def normalized_retrieval(pieces, gamma, iterations, texts=None, videos=None):
    """Retrieval without biases, with biases from stand-in queries, and from the test queries themselves (Table 5).

    Args: pieces: as retrieval_pieces returns them.
        texts (K, D), videos (K, D): stand-in queries; None or empty = no 'queue' row.
    Returns: {none, queue, oracle} -> {text_to_image, image_to_text, R-Mean, error {text_to_image, image_to_text}},
        and by the same names the biases, (M,) of the images and (C,) of the texts.
    """
    device = pieces.get("device")
    image, text = (normalize(pieces[kind].to(device)) for kind in ("image", "text"))    # (M, D), (C, D)
    stand_ins = {"oracle": (text, image)}
    if texts is not None and len(texts):
        stand_ins = {"queue": (texts.to(device), videos.to(device))} | stand_ins
    biases = {"none": (image.new_zeros(len(image)), image.new_zeros(len(text)))}
    for name, (t, v) in stand_ins.items():
        biases[name] = retrieval_biases(image, t, gamma, iterations), retrieval_biases(text, v, gamma, iterations)
    sim, results = text @ image.T, {}                                      # (C, M)
    for name, (b, a) in biases.items():                                    # (M,), (C,)
        error = {"text_to_image": common.normalization_error(sim + b, gamma),
                 "image_to_text": common.normalization_error(sim.T + a, gamma)}
        results[name] = retrieval_both_ways(pieces, b, a)[0] | {"error": error}
    return results, {name: (b.cpu(), a.cpu()) for name, (b, a) in biases.items()}


# ------------------------------------------------------- baselines ---------------------------------------------------
@fp32
def max_margin_terms(text, video, margin=0.2):
    """Triplets with the hardest negative of the batch (Faghri et al. 2018): {"L_t2v", "L_v2t"}, scalars fp32 (float64
    stays).

    Args: text, video: (B, D) this process's embeddings, row i of both is a pair.   margin: in cosine units, >= 0: a
        float, (), or (B,) per anchor.
    """
    text, video = normalize(text), normalize(video)                        # (B, D)
    texts, videos = gather(text), gather(video)                            # (N, D)
    target, margin = positive_index(text)[:, None], per_anchor(margin, text, "margin", positive=False)       # (B, 1)

    def one_way(anchor, candidates):
        sim = anchor @ candidates.T                                        # (B, N)
        hardest = sim.scatter(1, target, -math.inf).amax(1, keepdim=True)  # (B, 1)
        return (margin - sim.gather(1, target) + hardest).relu().mean()
    return {"L_t2v": one_way(text, videos), "L_v2t": one_way(video, texts)}


def max_margin_loss(text, video, margin=0.2):
    """SSB's loss, the sum of both directions; arguments as max_margin_terms. Scalar; of equal cosines 2 margin."""
    terms = max_margin_terms(text, video, margin)
    return terms["L_t2v"] + terms["L_v2t"]


# ======================================================= flags =======================================================
# Defaults by data set, one line per group. 'paper': Appendix B, and where it says nothing CLIP4Clip, its base; 'ours':
# tuned on the validation split. Flags override them; other data sets use 'own'.
CLIP4CLIP = dict(
    recipe="paper; optimiser and batch from CLIP4Clip",
    image_encoder="openai/clip-vit-base-patch32", text_encoder="openai/clip-vit-base-patch32", pretrained=True,
    embed_dim=512, image_size=224, image_stats="encoder", eval_resize="crop", frames=12, frame_sampling="uniform",
    text_length=32, text_pooling="cls", clean_captions=False, unfold_captions=True, join_captions=False,
    epochs=5.0, batch_size=128, chunk_size=32, optimizer="adamw", lr=1e-7, lr_end=0.0, lr_schedule="cosine",
    warmup_epochs=0.0, warmup_fraction=0.1, weight_decay=0.2, beta1=0.9, beta2=0.98, eps=1e-6, grad_clip=1.0,
    tau=0.01, learnable_tau=True, loss_scale=1.0, queue_size=16_384, crop_min=1.0, flip=0.0, jitter=0.0,
    freeze="clip4clip", mixed_precision="bf16", log_every=50, save_every=500, eval_every=0)
PARAGRAPHS = CLIP4CLIP | dict(epochs=10.0, chunk_size=8, text_length=64, frames=64, unfold_captions=False)
IMAGES = CLIP4CLIP | dict(recipe="ours; as msrvtt, on images", chunk_size=0, unfold_captions=False)
MOVING = CLIP4CLIP | dict(
    recipe="ours",
    image_encoder="small", text_encoder="small", pretrained=False, embed_dim=128, freeze="none",
    image_size=32, image_stats="encoder", frames=4, text_length=24, text_pooling="mean", unfold_captions=False,
    epochs=24.0, chunk_size=0, lr=2e-3, lr_end=2e-5, warmup_epochs=2.0, warmup_fraction=0.0, weight_decay=0.1, eps=1e-8,
    tau=0.1, learnable_tau=False, queue_size=2000, mixed_precision="no",
    crop_min=0.8, jitter=0.2, log_every=10, save_every=120, eval_every=120)
EMOJI = MOVING | dict(recipe="ours; as moving-emoji", image_size=48, crop_min=0.35, flip=0.5, jitter=0.4)
OWN = MOVING | dict(
    recipe="ours; small towers from scratch", image_size=64, text_length=32, frames=8, save_every=500, eval_every=0)
RECIPES = {
    "moving-emoji": MOVING, "emoji": EMOJI, "msrvtt": CLIP4CLIP, "activitynet": PARAGRAPHS,
    "msvd": CLIP4CLIP | dict(epochs=3.0, warmup_fraction=0.0),
    "didemo": PARAGRAPHS | dict(recipe="ours; as activitynet, which is as long"),
    "youcook2": CLIP4CLIP | dict(recipe="ours; as msrvtt"),
    "howto100m": CLIP4CLIP | dict(recipe="ours; as msrvtt", epochs=1.0, unfold_captions=False),
    "coco": IMAGES, "flickr30k": IMAGES, "cc3m": IMAGES, "cc12m": IMAGES, "own": OWN}


def loss_defaults(chosen):
    """Defaults of --loss and of SSB's towers; chosen: the flags recipe, loss and image_encoder."""
    defaults = {} if chosen.loss == "ncl" else dict(normalize="none")      # baselines are reported as they are
    if chosen.loss == "max-margin":
        defaults |= dict(learnable_tau=False)
    if chosen.image_encoder and not is_clip(chosen.image_encoder):         # of a recipe with another encoder
        defaults |= dict(freeze="none")
    if chosen.image_encoder == "ssb":                                      # App. C
        defaults |= ssb_recipe(chosen)
    return defaults


def parse_args(argv=None):
    """Flags; the recipe of --dataset, --loss and --image-encoder gives the defaults."""
    p = Parser(__file__, "NCL: Sinkhorn-normalised contrastive retrieval, in training and at test time.")
    yesno = argparse.BooleanOptionalAction
    g = p.group("method")
    g.add_argument("--loss", choices=["ncl", "infonce", "max-margin"], default="ncl",
                   help="NCL; CLIP4Clip's loss; SSB's hardest-negative margin loss")
    g.add_argument("--tau", type=positive, help="gamma, divides the cosine, > 0; CLIP's 0.01; SSB 0.07")
    g.add_argument("--iterations", type=count, default=4, help="rounds of Sinkhorn-Knopp; paper 4")
    g.add_argument("--loss-scale", type=nonnegative, help="factor of the loss; NCL on SSB 15")
    g.add_argument("--normalize", choices=["queue", "oracle", "none"], default="queue",
                   help="reported biases: from training queries; from the test queries (not a fair result); none")
    g.add_argument("--queue-size", type=count, help="K, training queries kept of each kind; paper 16,384")
    g.add_argument("--captioning-weight", type=nonnegative, default=0.0,
                   help="of SSB's captioning loss, which needs a T5 as --text-encoder; SSB 10; 0 = off")
    g.add_argument("--freeze", choices=["clip4clip", "none"],
                   help="of a CLIP its embeddings and first norm, as CLIP4Clip's scripts do; or nothing")
    g = p.group("with --loss ncl or infonce", loss=("ncl", "infonce"))
    g.add_argument("--learnable-tau", action=yesno, help="learn gamma from --tau on, as CLIP's logit scale")
    g = p.group("with --captioning-weight", captioning_weight=True)
    g.add_argument("--support-tau", type=positive, default=0.1, help="T, divides the cosines of its support set")
    g = p.group("with --loss max-margin", loss="max-margin")
    g.add_argument("--margin", type=between(0, 2), default=0.2, help="cosine units; SSB 0.2")
    g = p.group("views")
    g.add_argument("--crop-min", type=part, help="least area of the crop, all frames alike; 1 = none (CLIP4Clip)")
    g.add_argument("--flip", type=part, help="share of mirror images")
    g.add_argument("--jitter", type=nonnegative, help="of brightness, contrast, saturation, all frames alike")
    g.add_argument("--text-dropout", action=yesno, default=True, help="a transformers text encoder keeps its own")
    g = p.group("with --image-encoder ssb", image_encoder="ssb")
    g.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR",
                   help="VIDEO.npy (time, width), such as motion and appearance, resampled to --frames, concatenated")
    g.add_argument("--dropout", type=below_one, default=0.0, help="of these towers; App. C: 0.1, ActivityNet 0")
    args = p.parse(argv, RECIPES, loss_defaults)
    p.require(not args.learnable_tau or args.tau >= 0.01, "--tau: if learnt at least 0.01")
    p.require(args.image_encoder != "ssb" or args.feature_dir, "--image-encoder ssb: --feature-dir?")
    p.only(args.text_encoder != "small", "with a transformers --text-encoder", "--text-dropout")
    p.only(args.image_encoder != "ssb", "with frames", "--crop-min", "--flip", "--jitter", "--frame-sampling")
    p.require(not args.feature_dir or {word.partition("=")[0] for word in args.eval_datasets} <= {args.dataset},
              f"--eval-datasets: --feature-dir is of {args.dataset} alone; eval.py --feature-dir evaluates on others")
    return args


# ======================================================= main ========================================================
def main(args):
    """One run: data, model, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    train, evals = open_data(args)
    run = Run(__file__, args, train, evals, RECIPES)

    # ------------------------------------------- model and optimiser -------------------------------------------------
    tower, tokenizer, transform = run.towers()
    set_dropout(tower, args.dropout, args.text_dropout)
    if args.freeze == "clip4clip":
        freeze_as_clip4clip(tower)
    own = nn.ModuleDict()                                                  # gamma and the queues stay outside DDP
    own["tau"] = nn.ParameterDict({"log_tau": torch.tensor(math.log(args.tau))} if args.learnable_tau else {})
    own["texts"] = QueryQueue(args.queue_size, args.embed_dim)
    own["videos"] = QueryQueue(args.queue_size, args.embed_dim)
    if args.captioning_weight:
        own["captioner"] = Captioner(tower.text, args.embed_dim, run.start[0], args.text_dropout)
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
                          squash=args.eval_resize == "squash")
    batches = run.batches([view], transform)

    # ------------------------------------------- loop ----------------------------------------------------------------
    rounds = args.iterations if args.loss == "ncl" else 0                  # 0: plain InfoNCE
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, run.device, args,
                          also=functools.partial(evaluate_normalized, own=own, args=args))
    run.begin(evaluator, random_guess(tokenizer, args), banner_lines(own, args))
    if run.step == 0 and rank() == 0:                                      # Figs. 7 and 8 compare with the start
        start = {f"{name}/{k}": x for name, p in run.val_pieces.items() for k, x in first_captions(p).items()}
        write_tensors(run.folder / "embeddings_before.safetensors", start)
    for batch in batches:
        run.set_lr(common.cosine_lr(run.step, run.total, run.warmup, args.lr, args.lr_end, args.lr_schedule))
        texts = common.pick(batch["captions"], batch["draws"])
        tokens = {k: v.to(run.device) for k, v in tokenizer(texts).items()}             # (B, L)
        inputs = {"pixels": batch["views"][0], "tokens": tokens}           # (B, [T,] 3, S, S), (B, L)
        video, text = chunks.encode(inputs)                                # (B, D) each

        gamma = gamma_of(own, args)                                        # () or a float
        if args.loss == "max-margin":
            loss = args.loss_scale * max_margin_loss(text, video, args.margin)
        else:
            loss = args.loss_scale * ncl_loss(text, video, gamma, rounds)
        more = {}
        if args.captioning_weight:                                         # SSB's second loss
            video_id = to_device(torch.tensor([*map(common.key_hash, batch["keys"])]), run.device)      # (B,)
            z = support_summary(text, gather(video), video_id, gather(video_id), args.support_tau)      # (B, D)
            more["L_cap"] = captioning_loss(z, **tokens, decoder=own["captioner"])
            loss = loss + args.captioning_weight * more["L_cap"]

        run.check_finite(loss, gamma, (text, video), batch)
        chunks.backward(loss)                                              # the full batch's gradient
        common.average_gradients(own.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_([*tower.parameters(), *own.parameters()], args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            own["tau"]["log_tau"].data.clamp_(min=math.log(0.01))            # as CLIP's
        own["texts"].push(text)
        own["videos"].push(video)

        numbers = numbers_of(text, video, gamma, args, run, more) if run.due("log") else {}
        run.done(batch, loss, gamma_of(own, args), numbers)                # gamma as it is saved

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    if rank() == 0:
        queues = {kind: own[kind].get() for kind in ("texts", "videos")}
        queues["gamma"] = torch.as_tensor(gamma_of(own, args), dtype=torch.float64).detach().reshape(1)
        write_tensors(run.folder / "queues.safetensors", queues)
    return run.finish(lambda run: draw(run, retrieval_biases))


@torch.no_grad()
def numbers_of(text, video, gamma, args, run, more):
    """Columns of the log: the loss's terms and `more`, the health of the space, the normalisation error (Fig. 2)."""
    if args.loss == "max-margin":
        terms = max_margin_terms(text, video, args.margin)
    else:
        terms = ncl_terms(text, video, gamma, args.iterations if args.loss == "ncl" else 0)
    numbers = common.mean_over_processes(terms | more, run.device)
    text, video = gather(normalize(text)), gather(normalize(video))                     # (N, D)
    sim = text @ video.T                                                   # (N, N)
    fair = sim + sinkhorn_biases(sim, gamma, args.iterations)[1]                        # (N, N)
    errors = {name: common.normalization_error(s, gamma) for name, s in (("error", sim), ("error_normalized", fair))}
    return numbers | common.embedding_health(video, text) | errors


def gamma_of(own, args):
    """gamma of the loss and the log: () with gradient, or a float if it is not learnt."""
    return own["tau"]["log_tau"].exp() if args.learnable_tau else args.tau


def random_guess(tokenizer, args):
    """The loss at the start and the end if all similarities are equal; None in a fork whose loss has another."""
    guess = args.loss_scale * (2 * args.margin if args.loss == "max-margin" else math.log(args.batch_size))
    if args.captioning_weight:
        guess += args.captioning_weight * math.log(len(tokenizer.tokenizer))        # a word of the vocabulary
    return guess, guess


@torch.no_grad()
def banner_lines(own, args):
    """The banner's words on the method."""
    rounds = f", {args.iterations} rounds of Sinkhorn-Knopp" if args.loss == "ncl" else ""
    factor = f", times {args.loss_scale:g}" if args.loss_scale != 1 else ""
    factor += f", + {args.captioning_weight:g} x captioning (T {args.support_tau:g})" if args.captioning_weight else ""
    lines = {"loss": f"{args.loss}{rounds}{factor}", "frozen": args.freeze,
             "temperature": f"gamma {float(gamma_of(own, args)):g}" + ", learnt" * args.learnable_tau,
             "test time": f"--normalize {args.normalize}; queues, of {args.dataset} alone: {args.queue_size:,} each"}
    if args.image_encoder == "ssb":
        lines["recipe"] = f"{args.recipe} (reconstruction of SSB; encoders/ssb.py says which values are from memory)"
    return lines


def evaluate_normalized(pieces, own, args):
    """The metrics of one data set in an evaluation: those under --normalize first, and all normalisations beside them.

    The queues are only used for the set that they come from. The biases stay in the pieces, for the pictures.
    """
    queues = ()
    if pieces["data"].name == args.dataset:
        queues = own["texts"].get().cpu(), own["videos"].get().cpu()       # (K, D) each
    results, pieces["biases"] = normalized_retrieval(pieces, float(gamma_of(own, args)), args.iterations, *queues)
    mode = args.normalize if args.normalize in results else "none"         # before the first step there is no queue
    return {k: v for k, v in results[mode].items() if k != "error"} | {"normalize": results, "normalized_by": mode}


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
