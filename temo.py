"""TeMo: Temperature Modulation for Multimodal Contrastive Learning (anonymous, under review).

Two encoders map a batch of images I and texts T and their augmentations I~ and T~ into one space. The standard
image-text InfoNCE, at a low fixed temperature, pushes all negatives apart. In three further losses each pair of the
similarity matrix has its own temperature, which grows with the pair's similarity, so that similar items are pushed
apart less: one loss between the modalities and one within each. A quadratic schedule moves the weight from InfoNCE to
these losses during training: coarse separation first, local structure later. There are no additional parameters or
heads; the encoders see each example twice.

Equations, s_ij = cosine, rows = anchors, all candidates of the global batch in the denominator (t = step / steps):
    (1)  I(x_a, X; tau) = -log( exp(s_ap / tau_ap) / sum_k exp(s_ak / tau_ak) )          info_nce
    (2)  L_I2I~ = 1/N sum_i I(I_i, I~; tau),  the same for texts                         info_nce
    (3)  L_MM = 1/2 [ 1/N sum_i I(I_i, T; tau) + 1/N sum_i I(T_i, I; tau) ]              multimodal_loss
    (4)  tau_ij = lambda(x_i, y_j) = tau_min + tau_alpha sqrt(s_ij)                      modulated_temperature
    (5)  L_M-I2I, L_M-T2T: (2) with tau_ij from (4), anchors I (T), candidates I~ (T~)   modulated_loss
    (6)  L_M-I2T, L_M-T2I: one direction of (3) with tau_ij from (4)                     modulated_loss
    (7)  L_M-MM = 1/2 (L_M-I2T + L_M-T2I)                                                modulated_multimodal_loss
    (8)  L = (1-t)^2 L_MM + t^2 (L_M-MM + L_M-I2I + L_M-T2T)                             temo_terms, temo_loss

    symbol          variable                  shape     unit and paper value
    I, T            image, text               (B, D)    this process's embeddings, normalised inside the losses
    I~, T~          image_aug, text_aug       (B, D)    SimCLR-like view; paraphrase
    tau             tau                       ()        divides the cosine; 0.01
    tau_ij          tau                       (B, N)    tau_min .. tau_min + tau_alpha = 0.01 .. 0.05
    tau_min         tau_min                   ()        0.01         tau_alpha  tau_alpha  ()  0.04
    t               progress                  ()        0..1, optimiser step / all steps

Commands:
    accelerate launch temo.py                                    # emoji, three minutes on two CPU cores
    accelerate launch temo.py --dataset cc3m --paraphrases p.jsonl  # the paper's run, ResNet-50 + DistilBERT
    accelerate launch temo.py --dataset cc3m --image-encoder vit_base_patch16_224.augreg_in1k --chunk-size 64
    accelerate launch temo.py --dataset captions.csv             # own data: columns image, caption
    python temo.py --loss infonce                                # a baseline: ts, dystress[-shifted], cwcl, slip

The blocks between `# >>> shared` and `# <<< shared` are the same in all scripts (a test says so) and keep runs
comparable and reproducible; a fork edits METHOD, the flags of the method group, and the loss in the loop.

Differences from the paper (there is no authors' code), and what it leaves open:
 1. Eq. 3 as printed sums an average again; we follow Algorithm 1: 1/2 (L_I2T + L_T2I), each a mean over the batch.
 2. In Eq. 4 a cosine may be negative: tau_ij = tau_min there. The root's argument is at least 1e-8 (finite gradients).
 3. The paper does not say whether a gradient flows through tau_ij. We read "as a proxy" as no: it is detached by
    default; --no-detach-tau lets it flow. --loss dystress[-shifted] follows the same flag.
 4. The augmentation of images is not given. We take SimCLR's (SLIP's) values, with a flag for each strength. I itself
    has the view of the base code: the CC3M trainer's, and for CC12M SLIP's, which does not mirror images.
 5. Without --paraphrases T~ is another caption, a template (emoji) or word dropout and swap; the banner says which.
 6. The learning rate's cosine is per step, the CC3M trainer's per epoch. It tests its best epoch; here it is the last.
 7. Crops are antialiased bilinear (CC3M trainer: bicubic); RandAugment is torchvision's, on the trainer's operations.
 8. Appendix F does not say in which losses the experts set temperatures. Table 10's numbers are near Table 7's rows
    without unimodal losses (CIFAR10 51 to 55; with them 61 to 64), so an expert sets the tau_ij of L_M-MM, in both
    directions, by its cosines among I (among T). Our reading: two experts give the mean of their temperatures. For the
    tables use --unimodal none. --expert-serves unimodal is the other reading: experts set tau of L_M-I2I and L_M-T2T.
 9. --loss slip has LayerNorm instead of BatchNorm in its head: results do not depend on processes and chunks.
10. Our readings: dystress has TeMo's range of tau; its shifted form, which is not printed, has (1 + s) / 2 in place of
    s; CWCL's weights are the cosines of the trained images, detached.
11. CC12M follows SLIP's code: a ViT-B/16 and CLIP's text transformer from scratch, though Table 2 ticks no "Scr.".
12. Table 3: 0.5 and 0.5 are given for rows d and f; that row c has them too (--blend fixed) is our reading.
13. Sections 1, 4.2 and 5 describe the schedule as fine to coarse; Section 3 and App. I, as here, as coarse to fine.
14. Misprints: Table 1's caption swaps TR and IR (IR is text -> image); Table 7's row 3 (our c) lacks the tick of Base;
    row e has other numbers in Table 6 than in Table 3; SLIP's Top-3 on CC12M in Table 5 is TeMo's (Table 2: 59.42).
15. Fig. 7 is zero-shot ImageNet during training. Here: zero-shot by class names on each set of --eval-datasets with
    classes and no captions, during training if it has a val split (ImageNet, first WordNet names: --hold-out-val).
"""

import argparse
import functools
import math

import common

from common import (  # isort: skip
    Evaluator, Expert, Paraphrases, Parser, Run, between, by_rows, clean_exit, count, encode_texts, fp32, gather,
    nonnegative, normalize, one_number, open_data, part, per_anchor, positive, positive_index, whole, with_class)

import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.temo import draw  # isort: skip


# ======================================================= METHOD ======================================================
@fp32
def info_nce(anchor, candidates, tau, block=0):
    """InfoNCE over the global batch with a temperature for each pair (Eq. 1, averaged as in Eq. 2).

    Args:
        anchor, candidates: (B, D) this process's embeddings, any float dtype; row i of both is the positive pair.
        tau: temperature, divides the cosine, > 0: a float, (), (B,) per anchor, (B, N) per pair, or a function of the
            cosines, (b, N) -> (b, N).
        block: rows at a time (0 = automatic, see common.by_rows).
    Returns: scalar fp32 (float64 stays), mean over the B local anchors. A random guess is about ln N.
    """
    anchor, candidates = normalize(anchor), gather(normalize(candidates))  # (B, D), (N, D)
    tau = tau if callable(tau) else per_anchor(tau, anchor, columns=len(candidates))    # () or (B, 1) or (B, N)

    def rows(a, t, target):                                                # b anchors at a time
        sim = a @ candidates.T                                             # (b, N)
        logits = sim / (t(sim) if callable(t) else t)                      # (b, N)
        return F.cross_entropy(logits, target, reduction="none")           # (b,)
    return by_rows(rows, anchor, tau, positive_index(anchor), columns=len(candidates), block=block).mean()


def multimodal_loss(image, text, tau, block=0):
    """L_MM (Eq. 3, averaged as in Algorithm 1): the mean of both directions of InfoNCE. tau as in info_nce."""
    return (info_nce(image, text, tau, block) + info_nce(text, image, tau, block)) / 2


def modulated_temperature(sim, tau_min=0.01, tau_alpha=0.04):
    """tau_ij = tau_min + tau_alpha sqrt(sim_ij) (Eq. 4): similar pairs get a higher temperature and are pushed less.

    Args: sim: cosines, any shape.   tau_min > 0, tau_alpha >= 0.
    Returns: temperatures of sim's shape; exactly tau_min where sim <= 0; the gradient is finite everywhere.
    """
    alike = sim > 0
    root = torch.where(alike, sim, torch.ones_like(sim)).clamp(min=1e-8).sqrt()  # two wheres: no gradient of sqrt(0)
    return tau_min + tau_alpha * torch.where(alike, root, torch.zeros_like(sim))


def modulated_loss(anchor, candidates, tau_min, tau_alpha, detach=True, block=0, tau=None):
    """One direction of InfoNCE with modulated temperatures (Eqs. 5 and 6): L_M-I2I, L_M-T2T, L_M-I2T or L_M-T2I.

    Args: as in info_nce; detach: no gradient through tau_ij; tau: (B, N) temperatures of an expert, used instead.
    Returns: scalar fp32 (float64 stays).
    """
    one_number(tau_min, "tau_min")
    def modulate(sim):                                                     # (b, N) -> (b, N)
        return modulated_temperature(sim.detach() if detach else sim, tau_min, tau_alpha)
    return info_nce(anchor, candidates, modulate if tau is None else tau, block)


def modulated_multimodal_loss(image, text, tau_min, tau_alpha, detach=True, block=0, tau=None):
    """L_M-MM (Eq. 7): mean of both directions; the temperatures of one are the transpose of the other's.

    tau: (B, N) temperatures of an expert for both, rows of a symmetric matrix (of its cosines among I or T)."""
    image_to_text = modulated_loss(image, text, tau_min, tau_alpha, detach, block, tau)
    return (image_to_text + modulated_loss(text, image, tau_min, tau_alpha, detach, block, tau)) / 2


def expert_temperature(anchor, candidates, tau_min=0.01, tau_alpha=0.04):
    """Eq. 4 on the cosines of an expert's unit features (App. F): (B, width), (B, width) -> (B, N), no gradient."""
    return modulated_temperature(anchor @ gather(candidates).T, tau_min, tau_alpha)


def blend_weights(progress, blend="quadratic", base=True, others=True):
    """(alpha, beta) of Eq. 8 at t = progress: (1-t)^2 and t^2; 'fixed': 1/2 and 1/2. A part without the other has 1."""
    if not (base and others):
        return float(base), float(others)
    return {"quadratic": ((1 - progress) ** 2, progress ** 2), "fixed": (0.5, 0.5)}[blend]


def temo_terms(image, text, image_aug, text_aug, tau=0.01, tau_min=0.01, tau_alpha=0.04, detach=True, block=0,
               image_tau=None, text_tau=None, multimodal_tau=None, names=("L_MM", "L_M-MM", "L_M-I2I", "L_M-T2T")):
    """The terms of Eq. 8 under their names in the paper: {name: scalar fp32 (float64 stays)}.

    Args:
        image, text, image_aug, text_aug: (B, D) embeddings I, T, I~, T~ of this process.   tau: temperature of L_MM.
        tau_min, tau_alpha: Eq. 4.   detach, block: as modulated_loss.
        multimodal_tau, image_tau, text_tau: (B, N) temperatures of experts for L_M-MM, L_M-I2I, L_M-T2T (App. F).
        names: the terms to compute, in this order; also L_I2I and L_T2T (Eq. 2, at tau).
    """
    modulation = tau_min, tau_alpha, detach, block
    terms = {"L_MM": lambda: multimodal_loss(image, text, tau, block),
             "L_M-MM": lambda: modulated_multimodal_loss(image, text, *modulation, multimodal_tau),
             "L_M-I2I": lambda: modulated_loss(image, image_aug, *modulation, image_tau),
             "L_M-T2T": lambda: modulated_loss(text, text_aug, *modulation, text_tau),
             "L_I2I": lambda: info_nce(image, image_aug, tau, block),
             "L_T2T": lambda: info_nce(text, text_aug, tau, block)}
    return {name: terms[name]() for name in names}


def term_weights(progress, base=True, modulated=True, unimodal="modulated", blend="quadratic"):
    """{term: weight} of the rows a-g of Table 3 at t = progress; a term of weight 0 is left out."""
    unimodal_terms = {"none": [], "plain": ["L_I2I", "L_T2T"], "modulated": ["L_M-I2I", "L_M-T2T"]}[unimodal]
    others = ["L_M-MM"] * modulated + unimodal_terms
    alpha, beta = blend_weights(progress, blend, base, bool(others))
    weights = {"L_MM": alpha} | dict.fromkeys(others, beta)
    return {name: weight for name, weight in weights.items() if weight}


def temo_loss(image, text, image_aug, text_aug, progress, tau=0.01, tau_min=0.01, tau_alpha=0.04, base=True,
              modulated=True, unimodal="modulated", blend="quadratic", **more):
    """L = alpha L_MM + beta (L_M-MM + L_M-I2I + L_M-T2T) (Eq. 8, Algorithm 1).

    Args:
        image, text, image_aug, text_aug: (B, D) embeddings I, T, I~, T~ (the last two unused with unimodal='none').
        progress: t = step / steps, 0..1.   tau, tau_min, tau_alpha, more: as temo_terms.
        base, modulated, unimodal ('none', 'plain' at tau, 'modulated'), blend: rows a-g of Table 3.
    Returns: scalar fp32 (float64 stays). A term of weight 0 is not computed.
    """
    weights = term_weights(progress, base, modulated, unimodal, blend)
    terms = temo_terms(image, text, image_aug, text_aug, tau, tau_min, tau_alpha, names=weights, **more)
    loss = image[:0].sum() + text[:0].sum()                                # 0, keeps all parameters in the graph
    for name, term in terms.items():
        loss = loss + weights[name] * term
    return loss


# ------------------------------------------------------- baselines ---------------------------------------------------
def ts_temperature(progress, tau_min=0.01, tau_max=0.05, periods=5):
    """TS (Kukleva et al. 2023): tau_min + (tau_max - tau_min) (1 + cos(2 pi periods t)) / 2 for t = progress."""
    return tau_min + (tau_max - tau_min) * (1 + math.cos(2 * math.pi * periods * progress)) / 2


def dystress_temperature(sim, tau_min=0.01, tau_max=0.05, shifted=False):
    """DySTreSS (Manna et al. 2025): tau_ij = tau_min + (tau_max - tau_min) (1 + cos(pi (1 + s_ij))) / 2.

    tau_min at s = 0, tau_max at s = +-1; shifted: (1 + s) / 2 in place of s, so tau_min at s = -1."""
    s = (1 + sim) / 2 if shifted else sim
    return tau_min + (tau_max - tau_min) * (1 + torch.cos(math.pi * (1 + s))) / 2


@fp32
def cwcl_loss(image, text, tau, block=0):
    """CWCL (Srinivasa et al. 2023): image -> text weights texts by their images' similarity; text -> image is InfoNCE.

    L_I2T = -1/B sum_i sum_j w_ij log softmax_j(s_ij / tau) / sum_j w_ij,  w_ij = (1 + <I_i, I_j>) / 2, no gradient.
    Args: image, text (B, D); tau a float, () or (B,).   Returns: scalar fp32 (float64 stays), mean of both directions.
    """
    anchor, candidates = normalize(image), gather(normalize(text))         # (B, D), (N, D)
    images = gather(anchor.detach())                                       # (N, D)

    def rows(a, t):
        weight = (1 + a.detach() @ images.T) / 2                           # (b, N)
        log_p = F.log_softmax(a @ candidates.T / t, dim=1)                 # (b, N)
        return -(weight * log_p).sum(1) / weight.sum(1)                    # (b,)
    image_to_text = by_rows(rows, anchor, per_anchor(tau, anchor), columns=len(candidates), block=block).mean()
    return (image_to_text + info_nce(text, image, tau, block)) / 2


@fp32
def simclr_loss(z1, z2, tau, block=0):
    """SLIP's image loss: NT-Xent of two views, 2N - 2 negatives. z1, z2 (B, D), tau a float, () or (B,) -> scalar."""
    a, b = normalize(z1), normalize(z2)                                    # (B, D)
    all_a, all_b = gather(a), gather(b)                                    # (N, D)

    def one_way(anchor, same, other):                                      # (B, D), (N, D), (N, D)
        def rows(x, t, target):
            own = x @ same.T                                               # (b, N)
            logits = torch.cat([x @ other.T, own], 1) / t                  # (b, 2N)
            itself = len(same) + target[:, None]                           # (b, 1), left out of its negatives
            return F.cross_entropy(logits.scatter(1, itself, -math.inf), target)                             # ()
        return by_rows(rows, anchor, per_anchor(tau, z1), positive_index(anchor), columns=2 * len(same), block=block)
    return (one_way(a, all_a, all_b) + one_way(b, all_b, all_a)) / 2


def pair_temperature(sim, loss, tau_min, tau_max, detach=True):
    """tau_ij of --loss temo or dystress[-shifted] from cosines of any shape, for the loss, the log and Fig. 2."""
    if loss == "temo":
        return modulated_temperature(sim, tau_min, tau_max - tau_min)
    return dystress_temperature(sim.detach() if detach else sim, tau_min, tau_max, loss == "dystress-shifted")


class SlipHead(nn.Sequential):
    """SLIP's projection head of three layers, (B, width) -> (B, out), with LayerNorm instead of BatchNorm."""

    def __init__(self, width, hidden, out):
        super().__init__(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, out))


# ======================================================= flags =======================================================
# Defaults by data set, one line per group. 'paper': Section 4 and the appendix; 'base code': the CC3M trainer on which
# TeMo builds (Qiu et al. 2024) or SLIP; 'ours': tuned on the validation split. Flags override; other sets use 'own'.
CC3M = dict(
    recipe="paper; optimiser, views and captions from the base code",
    image_encoder="resnet50.tv_in1k", text_encoder="distilbert/distilbert-base-uncased", pretrained=True, embed_dim=256,
    image_size=256, image_stats="clip", eval_resize="squash", text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=2048, lr=2e-4, lr_end=1e-5, warmup_epochs=1.4,  # 2,000 steps of 1,420 an epoch
    optimizer="adamw", lr_schedule="cosine", beta1=0.9, eps=1e-8, weight_decay=0.02, beta2=0.999, grad_clip=0.0,
    frames=12, frame_sampling="uniform", join_captions=False, unfold_captions=False,
    tau=0.01, tau_min=0.01, tau_alpha=0.04,
    crop_min=0.5, flip=0.5, aug_flip=0.5, randaugment_ops=2, randaugment_magnitude=21, jitter=0.0,
    aug_crop_min=0.08, aug_brightness=0.4, aug_contrast=0.4, aug_saturation=0.4, aug_hue=0.1, aug_blur=0.5,
    mixed_precision="bf16", eval_datasets=["cc3m", "coco", "flickr30k"], log_every=50, save_every=1000, eval_every=0)
CC12M = CC3M | dict(
    recipe="paper; optimiser, views and captions from the base code (SLIP)",
    # this id gives the configuration and tokenizer of CLIP's text transformer (12 layers, 512 wide, 8 heads, 77 BPE
    # tokens); its weights are trained from scratch; offline: --text-encoder FOLDER with these files
    image_encoder="vit_base_patch16_224", text_encoder="openai/clip-vit-base-patch32", pretrained=False, embed_dim=512,
    image_size=224, image_stats="imagenet", eval_resize="crop", text_length=77, clean_captions=False,
    # SLIP's settings for every loss, since the paper says all are equal (SLIP's authors train CLIP at 5e-4, decay 0.5)
    batch_size=4096, chunk_size=128, lr=3e-3, warmup_epochs=1.0, weight_decay=0.1, beta2=0.98, tau_clamp=[0.01, 1.0],
    flip=0.0, randaugment_ops=0, eval_datasets=["cc12m", "coco", "flickr30k"])
EMOJI = dict(
    recipe="ours",
    image_encoder="small", text_encoder="small", pretrained=False, embed_dim=128,
    image_size=48, image_stats="encoder", eval_resize="crop", text_length=24, text_pooling="mean", clean_captions=False,
    epochs=24.0, batch_size=256, lr=2e-3, lr_end=2e-5, warmup_epochs=2.0, weight_decay=0.1, beta2=0.98, grad_clip=1.0,
    optimizer="adamw", lr_schedule="cosine", beta1=0.9, eps=1e-8,
    frames=12, frame_sampling="uniform", join_captions=False, unfold_captions=False,
    tau=0.1, tau_min=0.05, tau_alpha=0.1,
    crop_min=0.35, flip=0.5, aug_flip=0.5, randaugment_ops=0, randaugment_magnitude=0, jitter=0.4,
    # no change of hue: captions name colours
    aug_crop_min=0.2, aug_brightness=0.4, aug_contrast=0.4, aug_saturation=0.4, aug_hue=0.0, aug_blur=0.0,
    mixed_precision="no", eval_datasets=[], log_every=5, save_every=100, eval_every=70)
MOVING = EMOJI | dict(
    recipe="ours; as emoji, no mirror images: left and right are words of the captions",
    image_size=32, frames=4, epochs=40.0, batch_size=128, flip=0.0, aug_flip=0.0, crop_min=0.8, aug_crop_min=0.5)
OWN = EMOJI | dict(
    recipe="ours; small towers from scratch",
    image_size=64, text_length=32, aug_hue=0.1, log_every=10, eval_every=0, save_every=500)
RECIPES = {"emoji": EMOJI, "cc3m": CC3M, "cc12m": CC12M, "moving-emoji": MOVING, "own": OWN}
LOSSES = {"slip": dict(tau=0.07, learnable_tau=True, tau_clamp=[0.01, 1.0])}  # paper, Section 4; clamp of SLIP's code


def per_pair(args):
    """Whether a term of the loss has a temperature for each pair."""
    modulated = args.modulated or args.unimodal == "modulated"
    return args.loss.startswith("dystress") or args.loss == "temo" and modulated


def parse_args(argv=None):
    """Flags; the recipe of --dataset and --loss gives the defaults."""
    p = Parser(__file__, "TeMo: per-pair temperature, multimodal and unimodal.")
    yesno = argparse.BooleanOptionalAction
    g = p.group("method")
    g.add_argument("--loss", choices=["temo", "infonce", "ts", "dystress", "dystress-shifted", "cwcl", "slip"],
                   default="temo", help="TeMo or a baseline of its tables")
    g.add_argument("--tau", type=positive,
                   help="tau of L_MM and of baselines, divides the cosine; paper 0.01, SLIP from 0.07, CWCL 0.05")
    g.add_argument("--learnable-tau", action=yesno, default=False, help="learn tau (infonce, slip, cwcl)")
    g.add_argument("--image-expert", default="",
                   help="transformers id or folder whose mean patch features set temperatures (App. F: DINOv2-Small)")
    g.add_argument("--text-expert", default="", help="the same for texts, mean-pooled (App. F: all-roberta-large-v1)")
    g.add_argument("--loss-block", type=whole, default=0,
                   help="rows of the (B, N) matrices at a time, recomputed in backward; 0 = all below 1 GiB")
    g = p.group("with --loss temo", lambda a: a.loss == "temo")
    g.add_argument("--base", action=yesno, default=True, help="L_MM in the loss (Table 3: Base)")
    g.add_argument("--modulated", action=yesno, default=True, help="L_M-MM in the loss (Table 3: Mod.)")
    g.add_argument("--unimodal", choices=["none", "plain", "modulated"], default="modulated",
                   help="unimodal losses (Table 3: U.L.); plain = at --tau")
    g.add_argument("--blend", choices=["quadratic", "fixed"], default="quadratic",
                   help="weights (1-t)^2, t^2; or 0.5, 0.5; in both cases 1 if the other part is off")
    g.add_argument("--expert-serves", choices=["multimodal", "unimodal"], default="multimodal",
                   help="where experts set tau: in L_M-MM, our reading of Tables 9 and 10; or in L_M-I2I (L_M-T2T)")
    g = p.group("with --loss temo (a modulated term), ts or dystress", lambda a: per_pair(a) or a.loss == "ts")
    g.add_argument("--tau-min", type=positive,
                   help="lowest modulated temperature, > 0; paper 0.01; also the lowest of ts and dystress")
    g.add_argument("--tau-alpha", type=nonnegative, help="range of the modulated temperature, >= 0; paper 0.04")
    g = p.group("with --loss temo (a modulated term) or dystress", per_pair)
    g.add_argument("--detach-tau", action=yesno, default=True, help="no gradient through the per-pair temperature")
    g = p.group("with --learnable-tau", lambda a: a.learnable_tau)
    g.add_argument("--tau-clamp", type=positive, nargs=2, default=[0.001, 0.5], metavar=("LOW", "HIGH"),
                   help="limits of a learnable tau; CC3M trainer 0.001 0.5, SLIP 0.01 1")
    g = p.group("with --loss ts", lambda a: a.loss == "ts")
    g.add_argument("--ts-periods", type=count, default=5, help="periods of the cosine of --loss ts; paper 5")
    g = p.group("with --loss slip", lambda a: a.loss == "slip")
    g.add_argument("--slip-weight", type=nonnegative, default=1.0, help="weight of SLIP's image loss")
    g.add_argument("--slip-tau", type=positive, default=0.1, help="temperature of SLIP's image loss, > 0")
    g.add_argument("--slip-hidden", type=count, default=4096, help="hidden width of SLIP's projection head")
    g.add_argument("--slip-dim", type=count, default=256, help="output width of SLIP's projection head")
    g = p.group("views")
    g.add_argument("--crop-min", type=part, help="I: smallest area of the random crop, 0..1; CC3M trainer 0.5")
    g.add_argument("--flip", type=part,
                   help="I: probability of a mirror image; CC3M trainer 0.5, SLIP 0; see --aug-flip")
    g.add_argument("--jitter", type=part, help="I: brightness, contrast and saturation strength")
    g.add_argument("--jitter-p", type=part, default=0.8, help="I: probability of that jitter")
    g.add_argument("--randaugment-ops", type=whole,
                   help="I: RandAugment operations, each applied with probability 1/2; CC3M trainer 2; 0 = off")
    g.add_argument("--randaugment-magnitude", type=between(0, 30, int),
                   help="I: RandAugment magnitude, 0..30; the CC3M trainer's 7 of 10 is 21 here")
    g = p.group("with T~ (--loss temo and --unimodal)", lambda a: a.loss == "temo" and a.unimodal != "none")
    g.add_argument("--paraphrases", default="", metavar="FILE",
                   help="JSON lines of caption and paraphrases, for T~; paper: five by PEGASUS (tools/paraphrase.py)")
    g.add_argument("--word-drop", type=part, default=0.1, help="probability of dropping a word, without another text")
    g.add_argument("--word-swap", type=part, default=0.1, help="expected swaps per word, at most one in a text")
    g = p.group("with I~ (--loss temo and --unimodal) or slip",
                lambda a: a.loss == "slip" or a.loss == "temo" and a.unimodal != "none")
    g.add_argument("--aug-crop-min", type=part, help="I~: smallest area of the crop; SimCLR 0.08")
    g.add_argument("--aug-flip", type=part, help="I~: probability of a mirror image; SimCLR 0.5")
    g.add_argument("--aug-jitter-p", type=part, default=0.8, help="I~: probability of the colour jitter; SimCLR 0.8")
    g.add_argument("--aug-brightness", type=part, help="I~: strength; SLIP 0.4")
    g.add_argument("--aug-contrast", type=part, help="I~: strength; SLIP 0.4")
    g.add_argument("--aug-saturation", type=part, help="I~: strength; SLIP 0.4")
    g.add_argument("--aug-hue", type=between(0, 0.5), help="I~: strength, 0..0.5; SLIP 0.1")
    g.add_argument("--aug-grey", type=part, default=0.2, help="I~: probability of grey; SimCLR 0.2")
    g.add_argument("--aug-blur", type=part, help="I~: probability of a Gaussian blur; SimCLR 0.5")
    args = p.parse(argv, RECIPES, LOSSES)
    p.require(not args.learnable_tau or args.tau_clamp[0] <= args.tau <= args.tau_clamp[1],
              f"--tau-clamp {args.tau_clamp}: must hold 0 < LOW <= --tau ({args.tau}) <= HIGH")
    p.require(args.loss != "temo" or args.base or args.modulated or args.unimodal != "none",
              "--no-base --no-modulated --unimodal none leaves no loss")
    p.require(not args.learnable_tau or args.loss in ("infonce", "slip", "cwcl"),
              f"--learnable-tau: --loss {args.loss} has no single temperature to learn; use infonce, slip or cwcl")
    one_tau = args.base or args.unimodal == "plain" if args.loss == "temo" else args.loss in ("infonce", "cwcl", "slip")
    p.only(one_tau, "with L_MM, --unimodal plain, or --loss infonce, cwcl or slip", "--tau")
    served = args.modulated if args.expert_serves == "multimodal" else args.unimodal == "modulated"
    p.require(not (args.image_expert or args.text_expert) or (args.loss == "temo" and served),
              "--image-expert and --text-expert need --loss temo --modulated; with --expert-serves unimodal they need "
              "--loss temo --unimodal modulated")
    return args


# ======================================================= main ========================================================
def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    train, evals = open_data(args)
    paraphrases = Paraphrases(args.paraphrases) if args.paraphrases else None
    run = Run(__file__, args, train, evals, RECIPES)

    # ------------------------------------------- model and optimiser -------------------------------------------------
    tower, tokenizer, transform = run.towers()
    own = nn.ModuleDict()                                                  # the loss's own parameters stay outside DDP
    own["tau"] = nn.ParameterDict({"log_tau": torch.tensor(math.log(args.tau))} if args.learnable_tau else {})
    if args.loss == "slip":
        own["head"] = SlipHead(tower.vision.width, args.slip_hidden, args.slip_dim)
    own.to(run.device)
    experts = {kind: Expert(name, kind, transform, run.device, args.mixed_precision)
               for name, kind in ((args.image_expert, "image"), (args.text_expert, "text")) if name}
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
    chunks = common.Chunks(lambda inputs: encode(model, **inputs), model, run.accelerator, args.chunk_size, args.tf32)

    # ------------------------------------------- views and batches ---------------------------------------------------
    base_view = common.Augment(args.image_size, args.crop_min, args.flip, args.jitter_p, args.jitter, args.jitter,
                               args.jitter, randaugment=(args.randaugment_ops, args.randaugment_magnitude))
    strong_view = common.Augment(args.image_size, args.aug_crop_min, args.aug_flip, args.aug_jitter_p,
                                 args.aug_brightness, args.aug_contrast, args.aug_saturation, args.aug_hue,
                                 args.aug_grey, args.aug_blur)
    pairs = args.loss == "temo" and args.unimodal != "none"                # I~ and T~ are needed
    views = [base_view] + ([strong_view] if pairs else [strong_view, strong_view] if args.loss == "slip" else [])
    batches = run.batches(views, transform)

    # ------------------------------------------- loop ----------------------------------------------------------------
    tau_max = args.tau_min + args.tau_alpha
    tau_of = functools.partial(pair_temperature, loss=args.loss, tau_min=args.tau_min, tau_max=tau_max,
                               detach=args.detach_tau)
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, run.device, args,
                          also=functools.partial(zero_shot, tower, tokenizer, run.device))
    parts = f" (base {args.base}, modulated {args.modulated}, unimodal {args.unimodal}, blend {args.blend})"
    run.begin(evaluator, (random_guess(0, args), random_guess(1, args)), {
        "loss": args.loss + (parts if args.loss == "temo" else ""),
        "temperature": f"tau {args.tau}" + ", learnt" * args.learnable_tau
                       + f"; per pair {args.tau_min} .. {tau_max:g}" * per_pair(args)
                       + f" only in the log; over the run {args.tau_min} .. {tau_max:g}" * (args.loss == "ts"),
        "texts T~": second_texts(train, paraphrases, args.dataset) if pairs else "not used"})
    for batch in batches:
        progress = run.step / run.total                                    # t of Eq. 8
        run.set_lr(common.cosine_lr(run.step, run.total, run.warmup, args.lr, args.lr_end, args.lr_schedule))
        texts, other = common.text_pair(batch["captions"], batch["draws"], paraphrases, train.templates, args.word_drop,
                                        args.word_swap, second=pairs)
        inputs = {"pixels": dict(enumerate(batch["views"])), "tokens": tokens_of(tokenizer, texts, other, run.device)}
        image, text, *more = chunks.encode(inputs)                         # (B, D) each; I~ and T~, or SLIP's features

        tau = own["tau"]["log_tau"].exp() if args.learnable_tau else args.tau
        if args.loss == "ts":
            tau = ts_temperature(progress, args.tau_min, tau_max, args.ts_periods)
        modulation = dict(tau_min=args.tau_min, tau_alpha=args.tau_alpha, detach=args.detach_tau, block=args.loss_block,
                          **expert_temperatures(experts, batch["views"], (texts, other), args))
        if args.loss == "temo":
            loss = temo_loss(image, text, *(more or (None, None)), progress, tau, base=args.base,
                             modulated=args.modulated, unimodal=args.unimodal, blend=args.blend, **modulation)
        elif args.loss == "cwcl":
            loss = cwcl_loss(image, text, tau, args.loss_block)
        elif args.loss.startswith("dystress"):
            loss = multimodal_loss(image, text, tau_of, args.loss_block)
        else:                                                              # infonce, ts, and SLIP's text half
            loss = multimodal_loss(image, text, tau, args.loss_block)
        if args.loss == "slip":
            z1, z2 = own["head"](more[0]), own["head"](more[1])            # (B, slip_dim)
            loss = loss + args.slip_weight * simclr_loss(z1, z2, args.slip_tau, args.loss_block)

        run.check_finite(loss, tau, (image, text, *more), batch)
        chunks.backward(loss)                                              # the full batch's gradient
        common.average_gradients(own.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_([*tower.parameters(), *own.parameters()], args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            own["tau"]["log_tau"].data.clamp_(*map(math.log, args.tau_clamp))
            tau = own["tau"]["log_tau"].detach().exp()
        numbers = numbers_of((image, text, *more), tau_of, modulation, args, run) if run.logs_now() else {}
        run.done(batch, loss, tau, numbers)

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    return run.finish(draw)


def second_texts(train, paraphrases, dataset):
    """The source of T~, for the banner, with a warning if a recipe of the paper runs without its paraphrases."""
    note = "templates around the captions" if train.templates else "another caption, else word dropout and swap"
    note += " (not the paper's paraphrases; see tools/paraphrase.py)"
    if paraphrases:
        return paraphrases.note(train, note)
    warning = "WARNING: NOT THE PAPER'S T~, which are paraphrases by PEGASUS; give --paraphrases FILE. Now: "
    return warning + note if RECIPES.get(dataset, OWN)["recipe"].startswith("paper") else note


def zero_shot(tower, tokenizer, device, pieces):
    """Top-1, 3, 5 with class names as prompts (Section 4, Fig. 7), on a set with classes and no captions of its own."""
    data = pieces["data"]
    if data.has_captions or not data.label_names:
        return {}
    names = [n.strip().replace("_", " ") for n in data.label_names]
    (labels,), (image,) = with_class((data.labels[pieces["index"]],), (pieces["image"],))  # (M,), (M, D)
    classes = encode_texts(tower, tokenizer.plain(), names, device)        # (C, D)
    return {"zero-shot": common.zero_shot_accuracy(image, torch.from_numpy(labels), classes)}


@torch.no_grad()
def numbers_of(embeddings, tau_of, modulation, args, run):
    """Columns of the log: the terms of the loss, common.embedding_health, and the temperatures (Fig. 2).

    embeddings: I, T[, I~, T~], (B, D) each; tau_of: cosines (n, n) -> temperatures; modulation: as in temo_terms."""
    image, text, *more = embeddings
    names = term_weights(0.5, True, args.modulated, args.unimodal) if args.loss == "temo" else ["L_MM"]
    terms = temo_terms(image, text, *(more or (None, None)), args.tau, names=names, **modulation)
    numbers = common.mean_over_processes(terms, run.device)                # L_MM: comparable along the run
    image, text = gather(normalize(image)), gather(normalize(text))                                          # (N, D)
    numbers |= common.embedding_health(image, text)
    if not per_pair(args):
        return numbers
    temperatures = tau_of(image[:2048] @ text[:2048].T)                    # (n, n), of at most 2,048 pairs
    if "multimodal_tau" in modulation:
        temperatures = gather(modulation["multimodal_tau"])[:2048, :2048]
    n, on_pairs = len(temperatures), temperatures.diagonal().mean().item()
    return numbers | {"tau_pos": on_pairs, "tau_neg": (temperatures.sum().item() - n * on_pairs) / max(1, n * n - n)}


def expert_temperatures(experts, views, texts, args):
    """Temperatures (B, N) of the experts {kind: Expert}, as keywords of temo_terms (App. F); {} without experts."""
    found, inside = {}, args.expert_serves == "multimodal"                 # cosines among I (T), not with I~ (T~)
    for kind, expert in experts.items():
        pair = views if kind == "image" else texts                         # only I (T) with --unimodal none
        anchor = expert(pair[0])                                           # (B, width)
        candidates = anchor if inside else expert(pair[1])                 # (B, width)
        found[f"{kind}_tau"] = expert_temperature(anchor, candidates, args.tau_min, args.tau_alpha)
    return {"multimodal_tau": sum(found.values()) / len(found)} if found and inside else found


def tokens_of(tokenizer, texts, other, device):
    """Token ids of T and T~, padded to one length: {0: {input_ids, attention_mask} (B, L), 1: ...}; T~ may be empty."""
    tokens, B = tokenizer(texts + other), len(texts)                       # (B, L) or (2B, L)
    return {i: {k: v[i * B:(i + 1) * B].to(device) for k, v in tokens.items()} for i in range(2 if other else 1)}


def encode(model, pixels, tokens):
    """All views and texts in one forward: {view: (b, [T,] 3, S, S)}, {text: tokens (b, L)} -> I, T[, I~, T~], (b, D)
    each; for SLIP I, T and the features (b, width) of its two views."""
    views, texts = list(pixels.values()), list(tokens.values())
    joined = {k: torch.cat([t[k] for t in texts]) for k in texts[0]}       # (b or 2b, L)
    image, text, features = model(torch.cat(views), joined)
    images, texts = image.chunk(len(views)), text.chunk(len(texts))
    if len(images) == 3:                                                   # SLIP: I and two strong views
        return images[0], texts[0], *features.chunk(3)[1:]
    return (images[0], texts[0], images[1], texts[1]) if len(texts) == 2 else (images[0], texts[0])


def random_guess(progress, args):
    """The loss at t = progress if all similarities are equal: ln N for each InfoNCE."""
    log_n = math.log(args.batch_size)
    if args.loss == "temo":
        return sum(term_weights(progress, args.base, args.modulated, args.unimodal, args.blend).values()) * log_n
    return log_n + (args.slip_weight * math.log(2 * args.batch_size - 1) if args.loss == "slip" else 0)


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
