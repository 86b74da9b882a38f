"""NCL: Normalized Contrastive Learning for Text-Video Retrieval (Park et al., EMNLP 2022).

Retrieval by softmax gives every query one unit of probability to spend on the items. Some items collect many units and answer queries
that are not theirs (hubs), others collect almost none and are never found. NCL gives each text and each video a bias, computed from the
similarity matrix by Sinkhorn-Knopp, so that every item collects the same share; nothing is learnt, nothing is added to the encoders.
In training the biases come from the batch. At test time the queries are unknown: training queries kept in a queue stand in for them.

Equations, s_ij = <t_i, v_j>, rows = texts, columns = videos:
    (2)  P_t2v(v_j | t_i) = exp(s_ij / gamma) / sum_k exp(s_ik / gamma)
    (4)  L = 1/2 (L_t2v + L_v2t), each the mean cross-entropy of the pair                               ncl_loss
    (5)  normalisation error: mean_j |1 - sum_i P_t2v(v_j | t_i)|                                       common.normalization_error
    (6, 12)  sim*(t_i, v_j) = a_i + b_j + s_ij, in place of s_ij in (4) and in retrieval                ncl_loss, retrieval_biases
    (7)  P = diag(alpha) exp(S / gamma) diag(beta) with rows that sum to 1/m and columns that sum to 1/n
    (10, 11)  a_i = gamma log(alpha_i / sum alpha),  b_j = gamma log(beta_j / sum beta)                 sinkhorn_biases

    symbol      variable           shape          unit and paper value
    t, v        text, video        (B, D)         this process's embeddings, normalised inside; text comes first, as in the paper
    gamma       gamma, --tau       ()             divides the cosine; CLIP's logit scale, at least 0.01; SSB 0.07
    a, b        a, b               (m,), (n,)     cosine units
    K           queue_size         ()             training queries kept of each kind; 16,384

Commands:
    accelerate launch ncl.py                                                    # moving emoji, two minutes on two CPU cores
    accelerate launch ncl.py --loss infonce                                     # the CLIP4Clip baseline
    accelerate launch ncl.py --dataset msrvtt --data-dir ANNOTATIONS --video-dir VIDEOS        # the paper's run; msvd, activitynet
    accelerate launch ncl.py --dataset msrvtt ... --image-encoder features --feature-dir F --loss max-margin   # as SSB; --loss ncl for NCL on it
    accelerate launch ncl.py --dataset clips.csv --video-dir VIDEOS             # own data: columns video, caption[, start, end]
    python eval.py --checkpoint RUN --normalize queue                           # test-time normalisation of any checkpoint of any script

Differences from the paper (there is no authors' code) and from CLIP4Clip, its base:
 1. Eqs. 8 and 9 are printed with their right-hand sides exchanged; rows sum to 1/m and columns to 1/n (it matters for queues).
 2. The code of Fig. 4 is an image that the text lacks. Here: the log domain, rows first, columns last, 4 rounds; a plain exp overflows at gamma = 0.01.
 3. After 4 rounds at gamma = 0.01 the sums are far from 1; the paper calls the residual small. It is logged (error after a batch's biases).
 4. a cancels in text -> video and b in video -> text, since a softmax does not see a constant: each direction needs one bias only.
 5. Whether a gradient flows through the biases is not said: none by default (at convergence it is zero, Eq. 28), --no-detach-biases for the other.
 6. Adam: torch's AdamW with CLIP4Clip's beta2, epsilon and weight decay; its BertAdam has no bias correction and clips each tensor as well.
    Norms, biases and the logit scale are not decayed (CLIP4Clip decays CLIP's norms by an accident of names).
 7. The learning rate follows a cosine to 0 after the warm-up; CLIP4Clip's drops to 0.976 of the peak at its end. Frames are uniform in time, CLIP4Clip's
    uniform over a list of one frame a second; a short clip repeats frames, CLIP4Clip pads and masks. Frames are scaled twice (8/7 of the size while decoding, then
    antialiased bilinear); CLIP4Clip once, bicubic.
 8. Batch size is not stated: CLIP4Clip's 128. On MSR-VTT and MSVD every caption is a training example (--unfold-captions), so a batch may hold a
    clip twice: an unmasked false negative, and uniform priors all the same, as in the base code.
 9. SSB: one transformer layer over projected features with mean pooling, without its CNN, RNN and dropout; T5 text (--text-encoder t5-base).
"""

import argparse
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import common
from common import UserError, fp32, gather, normalize, positive_index, say

# Defaults by data set, marked as in temo.py. A data set that is not here takes 'own'.
CLIP4CLIP = dict(
    recipe="paper; optimiser and batch from CLIP4Clip", image_encoder="openai/clip-vit-base-patch32", text_encoder="openai/clip-vit-base-patch32", pretrained=True, embed_dim=512, image_size=224,
    image_stats="encoder", eval_resize="crop", text_length=32, text_pooling="cls", clean_captions=False, unfold_captions=True, frames=12, epochs=5.0, batch_size=128, optimizer="adamw",
    lr=1e-7, lr_end=0.0, warmup_epochs=0.5, weight_decay=0.2, beta2=0.98, eps=1e-6, grad_clip=1.0, tau=0.01, learnable_tau=True, tau_clamp=[0.01, 1000.0], queue_size=16_384,
    crop_min=1.0, flip=0.0, jitter=0.0, save_every=500, eval_every=0, log_every=50, mixed_precision="no", streaming=False, loss_scale=1.0)
MOVING = CLIP4CLIP | dict(
    recipe="ours", image_encoder="small", text_encoder="small", pretrained=False, embed_dim=128, image_size=32, image_stats="half", text_length=24, text_pooling="mean", unfold_captions=False, frames=4,
    epochs=24.0, lr=2e-3, lr_end=2e-5, warmup_epochs=2.0, weight_decay=0.1, eps=1e-8, tau=0.1, learnable_tau=False, queue_size=2000, crop_min=0.8, jitter=0.2, save_every=120, eval_every=120, log_every=10)
RECIPES = {"msrvtt": CLIP4CLIP, "msvd": CLIP4CLIP | dict(epochs=3.0, warmup_epochs=0.0), "activitynet": CLIP4CLIP | dict(epochs=10.0, warmup_epochs=1.0, text_length=64, frames=64, unfold_captions=False),
           "didemo": CLIP4CLIP | dict(recipe="ours; as activitynet, which is as long", epochs=10.0, warmup_epochs=1.0, text_length=64, frames=64, unfold_captions=False),
           "youcook2": CLIP4CLIP | dict(recipe="ours; as msrvtt"), "howto100m": CLIP4CLIP | dict(recipe="ours; as msrvtt", epochs=1.0, warmup_epochs=0.1, unfold_captions=False),
           "moving-emoji": MOVING, "emoji": MOVING | dict(recipe="ours; as moving-emoji", image_size=48, crop_min=0.35, flip=0.5, jitter=0.4),
           **{name: CLIP4CLIP | dict(recipe="ours; as msrvtt, on images", unfold_captions=False, streaming=name.startswith("cc")) for name in ("coco", "flickr30k", "cc3m", "cc12m")},
           "own": MOVING | dict(recipe="ours; small towers from scratch", image_size=64, text_length=32, frames=8, eval_every=0, save_every=500)}
PLAIN = dict(normalize="none")                                              # the baselines are reported as they are
SSB = dict(tau=0.07, learnable_tau=False)                                      # App. C: on precomputed features
SSB_TOWERS = SSB | dict(text_encoder="t5-base", text_pooling="mean", lr=1e-4)   # on the paper's sets; the learning rate of its new towers is ours
LOSSES = {"infonce": PLAIN, "max-margin": PLAIN | dict(learnable_tau=False)} | {
    f"{loss} on features{of}": own | towers for of, towers in (("", SSB), (" of a paper's set", SSB_TOWERS))
    for loss, own in (("ncl", dict(loss_scale=15.0)), ("infonce", PLAIN), ("max-margin", PLAIN))}


def parse_args(argv=None):
    """Flags in two stages: --dataset, --loss and --resume choose the defaults, the rest overrides them."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default="moving-emoji"), first.add_argument("--loss", default="ncl"), first.add_argument("--resume", default="")
    first.add_argument("--image-encoder", default="")
    chosen, _ = first.parse_known_args(argv)
    if chosen.image_encoder == "features":
        chosen.loss += " on features" + (" of a paper's set" if RECIPES.get(chosen.dataset, MOVING)["lr"] == CLIP4CLIP["lr"] else "")
    yesno = argparse.BooleanOptionalAction
    p = common.Parser(prog="ncl.py", description="NCL: Sinkhorn-normalised contrastive retrieval, in training and at test time.", allow_abbrev=False,
                                formatter_class=common.Help)
    # >>> shared: run
    g = p.add_argument_group("run")
    g.add_argument("--output-dir", default="runs", help="folder of all runs")
    g.add_argument("--run-name", default="", help="folder of this run in --output-dir; empty = script, data set, seed and time")
    g.add_argument("--resume", default="", metavar="RUN_DIR", help="continue this run exactly, from its last checkpoint; needs no other flag")
    g.add_argument("--seed", type=int, default=42, help="of weights, order and views")
    g.add_argument("--cpu", action=yesno, default=False, help="stay on the CPU even where there is a GPU")
    g.add_argument("--threads", type=int, default=0, help="CPU threads of each process; 0 = cores / local processes")
    g.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no", help="of the encoders; the loss is always float32")
    g.add_argument("--compile", action=yesno, default=False, help="torch.compile the encoders and the colour operations of the views")
    g.add_argument("--save-every", type=int, default=1000, help="optimiser steps between checkpoints (the last two are kept); 0 = only at the end")
    g.add_argument("--eval-every", type=int, default=0, help="optimiser steps between evaluations on the val split; 0 = only at the end")
    g.add_argument("--log-every", type=int, default=10, help="optimiser steps between rows of metrics.jsonl; 0 = only at the end")
    g.add_argument("--tracker", choices=["", "tensorboard", "wandb", "trackio"], default="", help="log there as well as to metrics.jsonl")
    # <<< shared
    g = p.add_argument_group("data")
    g.add_argument("--dataset", default="moving-emoji", help="moving-emoji, msrvtt, msvd, activitynet, didemo, youcook2, howto100m, or any image set of temo.py; or a folder, csv, tsv, jsonl, parquet, tar, or hub id (org/name)")
    g.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR", help="for --image-encoder features: folders of VIDEO.npy (time, width), motion and appearance say, side by side")
    # >>> shared: texts
    g.add_argument("--caption-column", default="", help="column (or tar extension, or json.KEY) of the captions; empty = the usual names")
    g.add_argument("--streaming", action=yesno, default=False, help="read tars in order instead of at random (web scale); other layouts are not read so")
    g.add_argument("--text-length", type=int, default=32, help="tokens kept of a caption")
    g.add_argument("--clean-captions", action=yesno, default=False, help="lower case, no punctuation, 30 words, as the CC3M trainer")
    g.add_argument("--join-captions", action=yesno, default=False, help="the captions of a video become one paragraph (video sets, files of paths and captions; ActivityNet and DiDeMo always)")
    g.add_argument("--unfold-captions", action=yesno, default=False, help="one training example for each (image or clip, caption) instead of a caption drawn each epoch")
    # <<< shared
    # >>> shared: data
    g.add_argument("--data-dir", default="", help="where relative paths start, and where a video set's annotation files lie; empty = beside the captions file")
    g.add_argument("--video-dir", default="", help="folder of the videos, which are found by path, file name or stem; empty = --data-dir")
    g.add_argument("--image-column", default="", help="column (or tar extension) of the images or videos; empty = the usual names")
    g.add_argument("--label-column", default="", help="column of the class, for kNN evaluation; empty = the usual names")
    g.add_argument("--max-bad-fraction", type=float, default=0.01, help="stop when more than this part of the samples tried cannot be read, 0..1")
    g.add_argument("--workers", type=int, default=4, help="loader processes per process; 0 = none. Sets in memory use none; the samples never depend on it")
    g.add_argument("--image-size", type=int, default=224, help="pixels of a side")
    g.add_argument("--frames", type=int, default=12, help="T, frames of a clip; CLIP4Clip 12, of paragraphs 64")
    g.add_argument("--frame-sampling", choices=["uniform", "middle", "random"], default="uniform", help="of videos: frames from the first to the last; of the middles of T segments; random in each segment (in training)")
    g.add_argument("--frame-cache", default="", metavar="DIR", help="decode each video once, to one small JPEG there")
    g.add_argument("--clips", type=int, nargs=3, default=[2000, 300, 300], metavar=("TRAIN", "VAL", "TEST"), help="clips of moving-emoji")
    g.add_argument("--caption-noise", type=float, default=0.0, help="part of moving-emoji's training clips that get the captions of another, 0..1")
    # <<< shared
    g = p.add_argument_group("model")
    g.add_argument("--text-encoder", default="small", help="small, or a transformers id or folder (CLIP: its text tower)")
    g.add_argument("--text-pooling", choices=["cls", "mean"], default="cls", help="of a transformers text encoder; CLIP: its own")
    g.add_argument("--embed-dim", type=int, default=512, help="D, width of the common space; CLIP ViT-B/32 512")
    # >>> shared: model
    g.add_argument("--image-encoder", default="small", help="small, resnet18-cifar, any timm name, or a transformers id or folder (CLIP: its vision tower)")
    g.add_argument("--pretrained", action=yesno, default=True, help="start from published weights; --no-pretrained = from scratch")
    g.add_argument("--init-from", default="", help="a .safetensors, .pt, .bin or run folder whose tensors are loaded first, for the model or one encoder; timm weights are then not downloaded")
    g.add_argument("--image-stats", choices=["encoder", "imagenet", "clip", "half"], default="encoder", help="mean and std of the pixels; encoder = what its weights saw")
    g.add_argument("--eval-resize", choices=["crop", "squash"], default="crop", help="evaluation view: short side and centre crop, or both sides (CC3M trainer)")
    # <<< shared
    # >>> shared: optimisation
    g = p.add_argument_group("optimisation")
    g.add_argument("--epochs", type=float, default=30.0, help="passes over the training set; the paper's value is its recipe's default")
    g.add_argument("--max-steps", type=int, default=0, help="optimiser steps instead of --epochs; every schedule spans them; 0 = off")
    g.add_argument("--batch-size", type=int, default=256, help="N, GLOBAL: split over processes, sets the negatives; the paper's value is its recipe's default")
    g.add_argument("--chunk-size", type=int, default=0, help="examples encoded at a time on each process: the full batch's gradient, a chunk's memory; 0 = all")
    g.add_argument("--allow-batchnorm-chunks", action=yesno, default=False, help="let BatchNorm see chunks: an approximation")
    g.add_argument("--optimizer", choices=["adamw", "adam", "sgd"], default="adamw", help="sgd takes --beta1 as its momentum")
    g.add_argument("--lr", type=float, default=2e-4, help="peak learning rate")
    g.add_argument("--lr-end", type=float, default=1e-5, help="last learning rate of the cosine")
    g.add_argument("--lr-schedule", choices=["cosine", "constant"], default="cosine", help="after the warm-up")
    g.add_argument("--warmup-epochs", type=float, default=1.0, help="epochs of linear warm-up; at most a tenth of the run")
    g.add_argument("--weight-decay", type=float, default=0.02, help="of matrices and kernels; none for biases, norms and scalars")
    g.add_argument("--beta1", type=float, default=0.9, help="Adam's first moment")
    g.add_argument("--beta2", type=float, default=0.999, help="Adam's second moment")
    g.add_argument("--eps", type=float, default=1e-8, help="Adam's epsilon; CLIP4Clip 1e-6")
    g.add_argument("--grad-clip", type=float, default=0.0, help="largest global gradient norm; 0 = off")
    # <<< shared
    g = p.add_argument_group("method")
    g.add_argument("--loss", choices=["ncl", "infonce", "max-margin"], default="ncl", help="NCL; CLIP4Clip's loss; the hardest-negative margin loss of SSB")
    g.add_argument("--tau", type=float, default=0.01, help="gamma, divides the cosine, > 0; CLIP's 0.01; SSB 0.07; where it starts when it is learnt")
    g.add_argument("--learnable-tau", action=yesno, default=False, help="learn gamma, as CLIP's logit scale")
    g.add_argument("--tau-clamp", type=float, nargs=2, default=[0.01, 1000.0], metavar=("LOW", "HIGH"), help="limits of a learnable gamma; CLIP: at least 0.01")
    g.add_argument("--iterations", type=int, default=4, help="rounds of Sinkhorn-Knopp; paper 4")
    g.add_argument("--detach-biases", action=yesno, default=True, help="no gradient through the biases")
    g.add_argument("--loss-scale", type=float, default=1.0, help="factor of the loss; SSB with NCL 15")
    g.add_argument("--margin", type=float, default=0.2, help="of --loss max-margin, in cosine units, >= 0")
    g.add_argument("--queue-size", type=int, default=16_384, help="K, training queries kept of each kind for test-time normalisation; paper 16,384")
    g = p.add_argument_group("views")
    g.add_argument("--crop-min", type=float, default=1.0, help="smallest area of the random crop, all frames alike, 0..1; 1 = none (CLIP4Clip)")
    g.add_argument("--flip", type=float, default=0.0, help="probability of a mirror image")
    g.add_argument("--jitter", type=float, default=0.0, help="brightness, contrast and saturation strength, all frames alike")
    g = p.add_argument_group("evaluation")
    g.add_argument("--eval-datasets", nargs="*", default=[], metavar="NAME[=DIR]", help="data sets of the evaluation (val and test splits), each with an optional local copy (annotations and videos); none = the training set's own")
    g.add_argument("--normalize", choices=["queue", "oracle", "none"], default="queue", help="biases of the reported numbers: from the queue of training queries, from the test queries themselves (not a fair result), or none")
    # >>> shared: parse
    g.add_argument("--eval-batch", type=int, default=256, help="images, or frames of clips, at a time in evaluation")
    p.set_defaults(**{k: v for k, v in RECIPES.get(chosen.dataset, RECIPES["own"]).items() if k != "recipe"})
    p.set_defaults(dataset=chosen.dataset, **LOSSES.get(chosen.loss, {}))
    saved = {}
    if chosen.resume:
        try:
            saved = common.run_args(chosen.resume, p.prog[:-3])
        except UserError as error:
            p.error(str(error))
        p.set_defaults(**{k: v for k, v in saved.items() if k not in ("resume", "run_name")})
    args = p.parse_args(argv)
    common.check_args(p, args, saved)
    # <<< shared
    if not 0 < args.tau < math.inf:
        p.error(f"--tau {args.tau}: must be > 0 and finite; it divides the cosine")
    if not 0 < args.tau_clamp[0] <= args.tau <= args.tau_clamp[1] and args.learnable_tau:
        p.error(f"--tau-clamp {args.tau_clamp}: must hold 0 < LOW <= --tau ({args.tau}) <= HIGH")
    if args.learnable_tau and args.loss == "max-margin":
        p.error("--learnable-tau: --loss max-margin has no temperature")
    if (args.image_encoder == "features") != bool(args.feature_dir):
        p.error("--image-encoder features and --feature-dir go together")
    for name, low in {"iterations": 1, "queue_size": 1, "margin": 0, "loss_scale": 0, "jitter": 0}.items():
        if not getattr(args, name) >= low:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    for name in ("crop_min", "flip"):
        if not 0 <= getattr(args, name) <= 1:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be between 0 and 1")
    return args


# ======================================================= METHOD ======================================================
def sinkhorn_biases(sim, gamma, iterations=4, row_prior=None, col_prior=None):
    """Biases (a, b) under which every row and every column of exp((a + b + sim) / gamma) gets its share (Eqs. 7 to 11).

    Args:
        sim: (m, n) cosines, rows = texts (or queries), columns = videos (or items).   gamma: temperature, > 0.
        iterations: rounds, at least 1; each sets the rows right, then the columns, so the columns are exact at the end.
        row_prior (m,), col_prior (n,): shares that sum to 1; None = 1/m and 1/n.
    Returns: a (m,), b (n,) in cosine units, fp32 at least. Log domain: finite for any cosine and gamma.
    """
    m, n = sim.shape
    logits = (sim if sim.dtype == torch.float64 else sim.float()) / gamma  # (m, n) S
    log_r = -math.log(m) if row_prior is None else row_prior.to(logits).log()  # () or (m,)
    log_c = -math.log(n) if col_prior is None else col_prior.to(logits).log()  # () or (n,)
    log_beta = logits.new_zeros(n)                                         # (n,)
    for _ in range(iterations):
        log_alpha = log_r - torch.logsumexp(logits + log_beta, dim=1)      # (m,) rows of P sum to r
        log_beta = log_c - torch.logsumexp(logits + log_alpha[:, None], dim=0)  # (n,) columns sum to c
    return gamma * log_alpha.log_softmax(0), gamma * log_beta.log_softmax(0)  # (m,), (n,); Eqs. 10 and 11


@fp32
def ncl_loss(text, video, gamma, iterations=4, detach=True):
    """L (Eq. 4) with the adjusted similarity (Eq. 12); the biases come from the matrix of the whole global batch.

    Args:
        text, video: (B, D) this process's embeddings, row i of both is a pair.   gamma: temperature, float or () tensor, > 0.
        iterations: rounds of Sinkhorn-Knopp; 0 = no biases, plain InfoNCE.   detach: no gradient through the biases.
    Returns: scalar fp32, mean over the B local pairs. A random guess is about ln N.
    """
    text, video = normalize(text), normalize(video)                        # (B, D)
    texts, videos, target = gather(text), gather(video), positive_index(text)  # (N, D), (N, D), (B,)
    a = b = 0.0
    if iterations:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            a, b = sinkhorn_biases(texts @ videos.T, gamma, iterations)    # (N,), (N,)
    t2v = F.cross_entropy((text @ videos.T + b) / gamma, target)           # (B, N); a_i is the same for all of a row and cancels
    v2t = F.cross_entropy((video @ texts.T + a) / gamma, target)           # (B, N); here b_j cancels
    return (t2v + v2t) / 2


def retrieval_biases(items, queries, gamma, iterations=4):
    """Test time (Sec. 3.4): bias (n,) of each item, from queries (K, D) that stand in for the unknown ones; items (n, D).

    The columns' biases of sinkhorn_biases, in blocks of queries: a round needs each row once, so memory is that of a block."""
    items, queries = normalize(items), normalize(queries)                  # (n, D), (K, D)
    log_beta = items.new_zeros(len(items))                                 # (n,)
    for _ in range(iterations):
        total = items.new_full((len(items),), -math.inf)                   # (n,) log of what the columns hold so far
        for block in queries.split(1024):
            logits = block @ items.T / gamma                               # (k, n)
            log_alpha = -math.log(len(queries)) - torch.logsumexp(logits + log_beta, 1)              # (k,)
            total = torch.logaddexp(total, torch.logsumexp(logits + log_alpha[:, None], 0))
        log_beta = -math.log(len(items)) - total
    return gamma * log_beta.log_softmax(0)


# ------------------------------------------------------- baselines ---------------------------------------------------
@fp32
def max_margin_loss(text, video, margin=0.2):
    """SSB's loss: triplets with the hardest negative of the batch (Faghri et al. 2018), both directions. (B, D), (B, D) -> scalar fp32."""
    text, video = normalize(text), normalize(video)                        # (B, D)
    texts, videos, target = gather(text), gather(video), positive_index(text)  # (N, D), (N, D), (B,)

    def one_way(anchor, candidates):
        sim = anchor @ candidates.T                                        # (B, N)
        itself = F.one_hot(target, len(candidates)).bool()                 # (B, N)
        return (margin - sim[itself] + sim.masked_fill(itself, -math.inf).amax(1)).relu().mean()
    return one_way(text, videos) + one_way(video, texts)


# ------------------------------------------------------- modules -----------------------------------------------------
class QueryQueue(nn.Module):
    """First in, first out: the last `size` training queries, equal on all processes, in the checkpoint. Read at test time only."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("queries", torch.zeros(size, dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))   # pushed so far

    @torch.no_grad()
    def push(self, x):
        """Add this step's embeddings of all processes: (B, D) local rows, any scale."""
        x, size = gather(normalize(x)), len(self.queries)                  # (N, D)
        at = (self.count + torch.arange(len(x), device=x.device))[-size:] % size
        self.queries[at] = x[-size:].to(self.queries)
        self.count += len(x)

    def get(self):
        """The queries that are there, oldest first, (min(pushed, size), D); the empty places are no queries."""
        size, count = len(self.queries), int(self.count)
        return self.queries[:count] if count < size else self.queries.roll(-(count % size), 0)


# ------------------------------------------------------- test-time normalisation -------------------------------------
def normalized_retrieval(pieces, gamma, iterations, texts=None, videos=None):
    """Retrieval without normalisation, with biases from stand-in queries, and from the test queries themselves (the paper's Table 5).

    Args: pieces: as common.retrieval_pieces gives them.   texts (K, D), videos (K, D): stand-in queries; None = no 'queue' row.
    Returns: {none, queue, oracle} -> {text_to_image, image_to_text, R-Mean, error {text_to_image, image_to_text}}, and the biases by the same names.
    """
    image, text = normalize(pieces["image"]), normalize(pieces["text"])    # (M, D), (C, D)
    biases = {"none": (torch.zeros(len(image)), torch.zeros(len(text)))}
    if texts is not None and len(texts):
        biases["queue"] = (retrieval_biases(image, texts, gamma, iterations), retrieval_biases(text, videos, gamma, iterations))
    biases["oracle"] = (retrieval_biases(image, text, gamma, iterations), retrieval_biases(text, image, gamma, iterations))
    sim, results = text @ image.T, {}                                      # (C, M)
    for name, (b, a) in biases.items():                                    # (M,), (C,)
        results[name] = common.retrieval_both_ways(pieces, b, a)[0] | {
            "error": {"text_to_image": common.normalization_error(sim + b, gamma), "image_to_text": common.normalization_error(sim.T + a, gamma)}}
    return results, biases


# ======================================================= main ========================================================
def main(args):
    """One run: set-up, data, model, resume, loop, save, evaluate. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    started = time.time()
    train = common.load_data(args.dataset, "train", **common.data_options(args))
    eval_sets = common.evaluation_sets(args)
    steps_per_epoch = common.epoch_length(train, args.batch_size)
    total = args.max_steps or max(1, round(args.epochs * steps_per_epoch))
    warmup = min(round(args.warmup_epochs * steps_per_epoch), total // 10)

    # ------------------------------------------- set-up --------------------------------------------------------------
    accelerator = common.set_up(args)
    device, processes = accelerator.device, common.world()
    folder = common.start_run(args, "ncl")

    # ------------------------------------------- model and optimiser -------------------------------------------------
    tokenizer = common.build_tokenizer(args.text_encoder, args.text_length, lambda: common.all_captions(train, 200_000), folder / "tokenizer",
                                       args.clean_captions, keep=bool(args.resume))
    spec = {k: getattr(args, k) for k in ("image_encoder", "text_encoder", "embed_dim", "image_size", "text_length", "text_pooling", "image_stats", "eval_resize", "clean_captions")}
    if args.image_encoder == "features":
        spec["features"] = common.feature_shape(train)
    tower, transform = common.build_model(spec, tokenizer, args.pretrained, "" if args.resume else args.init_from)
    extra = nn.ModuleDict({"tau": nn.ParameterDict({"log_tau": nn.Parameter(torch.tensor(math.log(args.tau)))} if args.learnable_tau else {}),
                           "texts": QueryQueue(args.queue_size, args.embed_dim), "videos": QueryQueue(args.queue_size, args.embed_dim)}).to(device)  # outside DDP
    tower = common.batchnorm_policy(tower.to(device), args)
    torch.manual_seed(args.seed + common.rank())                           # the weights are the same on all processes; dropout should not be
    optimizer = common.make_optimizer(args, [tower, extra])
    model = torch.compile(tower) if args.compile else tower
    model, optimizer = accelerator.prepare(model, optimizer)

    # ------------------------------------------- resume --------------------------------------------------------------
    step, positions, tracker_id, wall_before, checkpoint = 0, {}, None, 0.0, common.latest_checkpoint(folder)
    if args.resume and checkpoint:
        state, _, positions = common.load_checkpoint(checkpoint, tower, extra, optimizer.optimizer, accelerator.scaler)
        step, tracker_id, wall_before = state["step"], state["tracker_id"], state["wall_s"]
        say(f"resumed {checkpoint} at step {step} of {total}")
    if step > total:
        raise UserError(f"--resume {args.resume}: its checkpoint is at step {step}, beyond the {total} steps that --max-steps or --epochs ask for")
    log = common.Log(folder, accelerator, args.tracker, tracker_id, vars(args), step, total)

    # ------------------------------------------- views and batches ---------------------------------------------------
    view = common.Augment(args.image_size, args.crop_min, args.flip, float(args.jitter > 0), args.jitter, args.jitter, args.jitter, squash=args.eval_resize == "squash")
    batches = common.Batches(train, [view], transform, args.batch_size, args.seed, step, total, device, args.workers, args.max_bad_fraction, folder, positions, args.compile)
    recipe = RECIPES.get(args.dataset, RECIPES["own"])["recipe"] + ("; with features: SSB's gamma and factor, the towers ours" if args.image_encoder == "features" else "")
    common.banner("ncl.py", args, recipe, tower, extra, train, eval_sets, folder, accelerator, total, steps_per_epoch, warmup, {
        "loss": args.loss + (f", {args.iterations} rounds of Sinkhorn-Knopp on {args.batch_size} x {args.batch_size}" if args.loss == "ncl" else "") + (f", times {args.loss_scale:g}" if args.loss_scale != 1 else ""),
        "temperature": f"gamma {args.tau:g}" + (f", learnt in {args.tau_clamp[0]:g} .. {args.tau_clamp[1]:g}" if args.learnable_tau else ""),
        "test time": f"--normalize {args.normalize}, queues of {args.queue_size:,} texts and clips" + (f" ({args.queue_size / len(train):.1f} epochs)" if hasattr(train, "__len__") else "")})

    def gamma_now():
        """gamma as a number."""
        return extra["tau"]["log_tau"].exp().item() if args.learnable_tau else args.tau

    def normalized(pieces):
        """The numbers of a data set under every normalisation; those of --normalize stand in front. The queues serve the set they come from."""
        texts, videos = (extra[k].get().cpu() if pieces["data"].name == args.dataset else None for k in ("texts", "videos"))
        results, pieces["biases"] = normalized_retrieval(pieces, gamma_now(), args.iterations, texts, videos)
        chosen = results.get(args.normalize, results["none"])              # before the first step the queues are empty
        return {k: v for k, v in chosen.items() if k != "error"} | {"normalize": results}

    def encode(inputs):
        """{pixels (b, [T,] 3, S, S), tokens} -> text, video: (b, D) each."""
        video, text, _ = model(inputs["pixels"], inputs["tokens"])
        return text, video

    # ------------------------------------------- loop ----------------------------------------------------------------
    evaluator = common.Evaluator(tower, tokenizer, transform, eval_sets, train, device, args, also=normalized)
    # >>> shared: before
    evaluator.check()
    if step == 0:                                                          # where training starts from: the left end of every curve
        before, _, pieces = evaluator("val")
        log.write({"step": 0, "samples_seen": 0, "eval": before})
        if common.rank() == 0:
            common.write_json(folder / "similarity_before.json", {name: common.similarity_histograms(p) for name, p in pieces.items()})
    bar = tqdm(total=total, initial=step, disable=common.rank() > 0, dynamic_ncols=True, unit="step", mininterval=1.0)
    tower.train(), extra.train()
    logged, clock = step, time.perf_counter()
    # <<< shared
    if step == 0 and common.rank() == 0:                                   # Figs. 7 and 8 compare with the start
        save_file({f"{name}/{kind}": p[kind][:500].contiguous() for name, p in pieces.items() for kind in ("text", "image")}, folder / "embeddings_before.safetensors")
    for batch in batches:
        lr = common.cosine_lr(step, total, warmup, args.lr, args.lr_end, args.lr_schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        texts, _ = common.text_pair(batch["captions"], batch["draws"], second=False)
        inputs = {"pixels": batch["views"][0], "tokens": {k: v.to(device) for k, v in tokenizer(texts).items()}}   # (B, [T,] 3, S, S), (B, L)

        def loss_fn(text, video):
            gamma = extra["tau"]["log_tau"].exp() if args.learnable_tau else args.tau
            if args.loss == "max-margin":
                loss = max_margin_loss(text, video, args.margin)
            else:
                loss = ncl_loss(text, video, gamma, args.iterations if args.loss == "ncl" else 0, args.detach_biases)
            common.check_finite(loss, step, gamma_now(), (text, video), batch["keys"])
            return args.loss_scale * loss

        loss, (text, video) = common.backward_in_chunks(encode, inputs, loss_fn, model, accelerator, args.chunk_size)
        common.average_gradients(extra.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_([*tower.parameters(), *extra.parameters()], args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            extra["tau"]["log_tau"].data.clamp_(*map(math.log, args.tau_clamp))
        extra["texts"].push(text), extra["videos"].push(video)
        step += 1

        # --------------------------------------- log, evaluate, save -------------------------------------------------
        due = common.due(step, total, args)
        if due["log"]:
            text, video, gamma = gather(normalize(text)), gather(normalize(video)), gamma_now()              # (N, D)
            sim = text @ video.T                                           # (N, N)
            row = common.log_row(step, batch, loss, lr, gamma, args, (time.perf_counter() - clock) / (step - logged), processes) | common.embedding_health(video, text)
            row |= {"error": common.normalization_error(sim, gamma), "error_normalized": common.normalization_error(sim + sinkhorn_biases(sim, gamma, args.iterations)[1], gamma)}
            log.write(row)
            logged, clock = step, time.perf_counter()
            bar.set_postfix(loss=f"{row['loss']:.3f}", tau=f"{gamma:.3f}", samples=f"{row['samples_per_s']:.0f}/s", refresh=False)
        bar.update()
        # >>> shared: after
        if due["eval"]:
            log.write({"step": step, "samples_seen": step * args.batch_size, "eval": evaluator("val")[0]})
        if due["save"]:
            common.save_checkpoint(folder, step, tower, extra, optimizer.optimizer, accelerator.scaler,
                                   {"tracker_id": log.tracker_id, "wall_s": wall_before + time.time() - started}, positions=batches.positions)
        if due["eval"] or due["save"]:
            logged, clock = step, time.perf_counter()                      # the speed of training alone
        # <<< shared
    bar.close()

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)               # the last evaluation in float32, as eval.py does it
    if common.rank() == 0:
        save_file({"texts": extra["texts"].get().cpu().contiguous(), "videos": extra["videos"].get().cpu().contiguous(), "gamma": torch.tensor([gamma_now()])}, folder / "queues.safetensors")
    # >>> shared: finish
    if common.rank() == 0:
        common.save_model(folder, tower, tokenizer, spec)
    val, _, val_pieces = evaluator("val")
    test, chance, test_pieces = evaluator("test")
    log.write({"step": step, "samples_seen": step * args.batch_size, "eval": val})
    summary = common.summarize(args, folder, step, steps_per_epoch, wall_before + time.time() - started, tower, extra, batches, val, test, chance, evaluator.errors, processes)
    # <<< shared
    if common.rank() == 0:
        draw(folder, log, val_pieces, test_pieces, gamma_now(), args)
    say(common.report(summary, folder) + normalization_table(summary["test"]))
    common.end_run(accelerator)
    return summary


def normalization_table(metrics):
    """Every normalisation of every data set, as lines of text."""
    lines = []
    for name, m in metrics.items():
        lines += [f"\n{name}", f"{'normalisation':<22}{'t->v R@1':>10}{'R@10':>8}{'v->t R@1':>10}{'R@10':>8}{'error t->v':>12}{'v->t':>8}"]
        for mode, r in m["normalize"].items():
            t, v, e = r["text_to_image"], r["image_to_text"], r["error"]
            lines.append(f"{mode:<22}{t['R@1']:10.1f}{t['R@10']:8.1f}{v['R@1']:10.1f}{v['R@10']:8.1f}{e['text_to_image']:12.3f}{e['image_to_text']:8.3f}")
    return "\n".join(["", *lines])


def draw(folder, log, val, test, gamma, args):
    """Pictures: curves, the paper's Figures 2, 3, 5 and 6 of each test set, 7 and 8 of val. val, test: picture pieces by data set."""
    queues, before = load_file(folder / "queues.safetensors"), load_file(folder / "embeddings_before.safetensors")
    first = next(iter(test), "")
    common.draw_curves(log, [
        ("loss", "loss", {"loss": "loss"}), ("temperature", "gamma", {"gamma": "tau"}), ("learning rate", "lr", {"lr": "lr"}),
        ("normalisation error, batch", "mean |1 - sum P|", {"as it is": "error", f"{args.iterations} rounds": "error_normalized"}),
        ("cosine", "mean over the batch", {"pairs": "pos_cos", "others": "neg_cos"}),
        ("retrieval, val", "R@1, %", {f"{way}, {mode}": f"eval/{first}/normalize/{mode}/{key}/R@1" for way, key in (("t->v", "text_to_image"), ("v->t", "image_to_text")) for mode in ("none", "queue")})],
        folder / "curves.png")
    for name, pieces in test.items():
        suffix = "" if name == first else f"_{common.slug(name)}"
        draw_normalization(pieces, gamma, args.iterations, queues, folder / f"normalization{suffix}.png")
        start = {k: before[f"{name}/{k}"] for k in ("text", "image")} if f"{name}/text" in before else None
        draw_modalities(start, val.get(name, pieces), folder / f"modalities{suffix}.png")
        common.draw_retrieval(pieces, folder / f"retrieval{suffix}.png", bias=pieces["biases"].get(args.normalize, (None,))[0])


def draw_normalization(pieces, gamma, iterations, queues, path):
    """Figs. 2, 3 and 5: the errors, false negatives and positives by the probability an item collects, R@1 by the size of the queue."""
    image, text = normalize(pieces["image"]), normalize(pieces["text"])    # (M, D), (C, D)
    sim, biases = text @ image.T, pieces["biases"]                         # (C, M)
    fig, axes = common.figure(3, 2)
    axes[5].set_axis_off()
    for shift, (label, s, side) in zip((-0.2, 0.2), (("text -> video", sim, 0), ("video -> text", sim.T, 1))):
        values = [common.normalization_error(s + b[side], gamma) for b in biases.values()]
        axes[0].bar(np.arange(len(values)) + shift, values, 0.4, label=label)
    axes[0].set(title="normalisation error (Fig. 2)", xticks=range(len(biases)), xticklabels=list(biases), ylabel="mean |1 - sum P|")
    for mode, (b, _) in biases.items():
        P = F.softmax((sim + b) / gamma, 1)                                # (C, M)
        share = P.sum(0) * sim.shape[1] / sim.shape[0]                     # (M,) 1 = fair
        right = torch.zeros_like(P, dtype=torch.bool)                      # (C, M)
        rows = torch.arange(len(P))[:, None].expand_as(pieces["positives"])
        right[rows[pieces["positives"] >= 0], pieces["positives"][pieces["positives"] >= 0]] = True
        hit = torch.zeros_like(right)                                      # (C, M) retrieved first
        hit[torch.arange(len(hit)), (sim + b).argmax(1)] = True
        missed = 1 - (hit & right).sum(0) / right.sum(0).clamp(min=1)      # (M,) of its own queries, those that do not find it
        wrong = (hit & ~right).sum(0) / (~right).sum(0).clamp(min=1)       # (M,) of the others, those that do
        bins = np.digitize(share.numpy(), [0.25, 0.5, 0.75, 1.25, 1.5, 2, 3])
        at = [k for k in range(8) if (bins == k).any()]
        for ax, rate in ((axes[1], missed), (axes[2], wrong)):
            ax.plot(at, [100 * rate.numpy()[bins == k].mean() for k in at], marker="o", ms=3, label=mode)
    names = ["<.25", "-.5", "-.75", "-1.25", "-1.5", "-2", "-3", ">3"]
    for ax, title in ((axes[1], "false negatives (Fig. 3)"), (axes[2], "false positives (Fig. 3)")):
        ax.set(title=title, xlabel="sum of the probabilities of a video", ylabel="% of the queries", xticks=range(8))
        ax.set_xticklabels(names, fontsize=7)
    if len(queues["texts"]):
        sizes = sorted({min(len(queues["texts"]), 2**k) for k in range(4, 20)})
        found = [common.retrieval_both_ways(pieces, retrieval_biases(image, queues["texts"][-k:], gamma, iterations), retrieval_biases(text, queues["videos"][-k:], gamma, iterations))[0] for k in sizes]
        plain = common.retrieval_both_ways(pieces)[0]
        for way, label, colour in (("text_to_image", "text -> video", "tab:blue"), ("image_to_text", "video -> text", "tab:orange")):
            axes[3].plot(sizes, [f[way]["R@1"] for f in found], marker="o", ms=3, label=label, color=colour)
            axes[3].axhline(plain[way]["R@1"], ls=":", color=colour, label=f"{label}, no queue")
        axes[3].set(xscale="log", title="R@1 by queue size (Fig. 5)", xlabel="training queries in the queue", ylabel="R@1, %")
    else:
        axes[3].set_axis_off()
    for mode, (b, _) in biases.items():
        share = np.sort((F.softmax((sim + b) / gamma, 1).sum(0) * sim.shape[1] / sim.shape[0]).numpy())[::-1]
        axes[4].plot(share, label=mode)
    axes[4].set(yscale="log", title="what each video collects", xlabel="video, most first", ylabel="sum of probabilities, 1 = fair")
    for ax in axes:
        if ax.axison:
            ax.legend(frameon=False, fontsize=7)
    fig.suptitle(f"{pieces['data'].name} ({pieces['data'].split}): {len(image)} items, {len(text)} texts, gamma {gamma:.3g}", fontsize=10)
    common.save_figure(fig, path)


def draw_modalities(before, pieces, path):
    """Figs. 7 and 8: both modalities in the plane, and mean cosines inside and between them, before and after training."""
    stages = ({"before": before} if before else {}) | {"after": {k: pieces[k][:500] for k in ("text", "image")}}
    fig, axes = common.figure(len(stages) + 1)
    for (stage, e), ax, shift in zip(stages.items(), axes, (-0.2, 0.2)):
        text, image = normalize(e["text"]), normalize(e["image"])          # (n, D), (k, D)
        both = torch.cat([text, image])
        both = both - both.mean(0)
        plane = both @ torch.linalg.svd(both, full_matrices=False)[2][:2].T  # (n + k, 2)
        ax.scatter(*plane[:len(text)].T.numpy(), s=5, label="texts")
        ax.scatter(*plane[len(text):].T.numpy(), s=5, label="videos")
        ax.set(title=f"{stage} training (Fig. 7, PCA)", xlabel="first direction", ylabel="second")
        off = lambda x: (x @ x.T)[~torch.eye(len(x), dtype=torch.bool)].mean().item()
        axes[-1].bar(np.arange(3) + shift * (len(stages) - 1), [off(text), off(image), (text @ image.T).mean().item()], 0.4, label=stage)
    axes[-1].set(title="mean cosine (Fig. 8)", xticks=range(3), xticklabels=["text-text", "video-video", "text-video"])
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
    fig.suptitle(f"{pieces['data'].name} ({pieces['data'].split})", fontsize=10)
    common.save_figure(fig, path)


if __name__ == "__main__":
    with common.clean_exit():
        main(parse_args())
