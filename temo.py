"""TeMo: Temperature Modulation for Multimodal Contrastive Learning (anonymous, under review).

Two encoders map a batch of images I and texts T and their augmentations I~ and T~ into one space. The standard
image-text InfoNCE, at a low fixed temperature, pushes all negatives apart. In three further losses each pair of the
similarity matrix has its own temperature, which grows with the pair's similarity, so that similar items are pushed
apart less: one loss between the modalities and one within each. A quadratic schedule moves the weight from InfoNCE to
these losses during training: coarse separation first, local structure later. There are no additional parameters or
heads; I~ and T~ are encoded without gradient, so that only the anchors learn from them.

Equations, s_ij = cosine, rows = anchors, all candidates of the global batch in the denominator (t = step / steps):
    (1)  I(x_a, X; tau) = -log( exp(s_ap / tau_ap) / sum_k exp(s_ak / tau_ak) )          info_nce
    (2)  L_I2I~ = 1/N sum_i I(I_i, I~; tau),  the same for texts                         info_nce
    (3)  L_MM = 1/2 [ 1/N sum_i I(I_i, T; tau) + 1/N sum_i I(T_i, I; tau) ]              multimodal_loss
    (4)  tau_ij = lambda(x_i, y_j) = tau_min + tau_alpha sqrt((1 + s_ij) / 2)            modulated_temperature
    (5)  L_M-I2I, L_M-T2T: (2) with tau_ij from (4), anchors I (T), candidates I~ (T~)   modulated_loss
    (6)  L_M-I2T, L_M-T2I: one direction of (3) with tau_ij from (4)                     modulated_loss
    (7)  L_M-MM = 1/2 (L_M-I2T + L_M-T2I)                                                modulated_multimodal_loss
    (8)  L = (1-t)^2 L_MM + t^2 (L_M-MM + L_M-I2I + L_M-T2T)                             temo_terms, temo_loss

    symbol          variable                  shape     unit and paper value
    I, T            image, text               (B, D)    this process's embeddings, normalised inside the losses
    I~, T~          image_aug, text_aug       (B, D)    a second draw of I's view; a paraphrase; no gradient
    tau             tau                       ()        divides the cosine; 0.01
    tau_ij          tau                       (B, N)    0.01 at s = -1, 0.038 at 0, 0.05 at 1
    tau_min         tau_min                   ()        0.01         tau_alpha  tau_alpha  ()  0.04
    t               progress                  ()        0..1, optimiser step / all steps

Commands:
    accelerate launch temo.py                                    # emoji, three minutes on two CPU cores
    accelerate launch temo.py --dataset cc3m --paraphrases p.jsonl  # the paper's run, ResNet-50 + DistilBERT
    accelerate launch temo.py --dataset cc3m --image-encoder vit_base_patch16_224.augreg_in21k_ft_in1k --chunk-size 64
    accelerate launch temo.py --dataset cc3m --row e             # a row of Table 3, with its learning rate
    accelerate launch temo.py --dataset captions.csv             # own data: columns image, caption
    python temo.py --loss infonce                                # a baseline: ts, dystress[-shifted], cwcl, slip

A fork edits METHOD, the flags of the method group, and the loss in the loop, not what is marked as shared.

The default is what made the paper's tables: public development code, whose kNN values are the paper's. Where it and the
paper's text differ, or both leave something open:
 1. Eq. 4 is printed as tau_min + tau_alpha sqrt(s) for similarities in 0..1. In the code they are (1 + cosine) / 2: an
    unrelated pair has 0.038, not 0.010. --similarity cosine: the bare cosine, 0 where it is negative.
 2. In the code a gradient flows through tau_ij, for DySTreSS too; the paper is silent. --detach-tau stops it.
 3. The paper is silent; the CC3M code encodes I~ and T~ apart, without gradient, CC12M's with it (--grad-augmented).
 4. I~ is a second draw of I's own transform in the CC3M code (--image-aug same), SimCLR's view in the CC12M code
    (simclr, with a flag for each strength), a crop alone in a version of it (crop); the paper is silent.
 5. With --paraphrases and unimodal losses T is drawn from the caption and its paraphrases, T~ from the paraphrases
    (CC3M code); --no-paraphrase-anchor: T is the caption (the paper's words, CC12M code). Without --paraphrases T is
    the caption, and T~ another caption, a template (emoji) or word dropout and swap: ours.
 6. "The same optimization settings" (Section 4) are not the code's: rows a, b, d, e, InfoNCE and TS have lr 8e-4, rows
    c, f, g and DySTreSS 2e-4; row b has tau_alpha 0.05. --row chooses all of it. The 8e-4 of CWCL and SLIP are ours.
    On CC12M InfoNCE has 5e-4 and decay 0.5, SLIP and TeMo 3e-3 and 0.1, as SLIP's authors; no run of TeMo there is
    public, and the other baselines are as InfoNCE: ours.
 7. "Pre-trained on ImageNet-1k": resnet50.a1_in1k at 256 px; at 224 px a ViT-B/16 that saw ImageNet-21k before.
 8. Eq. 3 as printed sums an average again; we follow Algorithm 1: 1/2 (L_I2T + L_T2I), each a mean over the batch.
 9. The code's learning rate is constant within an epoch and its warm-up of 2,000 steps stops after 1,400 of them; here
    both follow the step. It trains in fp16, here bf16; draws CC3M's shards with replacement; has BatchNorm for each
    card; tests the epoch that is best on COCO's val, here the last. Crops are antialiased bilinear (code: bicubic).
10. Experts (App. F) in the code: L = L_MM + w_I CE(I I^T / tau^I) + w_T CE(T T^T / tau^T), tau^I (tau^T) by Eq. 4 from
    an image (text) expert's cosines. Weights: 0.6 and 0.4 of runs with one expert (with two, larger ones, 0.1 each).
    DINOv2's class token stands where the paper has the mean of the patches (--expert-pooling).
11. --loss slip has LayerNorm instead of BatchNorm in its head: results do not depend on processes and chunks. CWCL has
    no public code: its weights are the cosines of the trained images, detached, and tau Table 1's 0.05.
12. CC12M follows SLIP's code: a ViT-B/16 and CLIP's text transformer from scratch, though Table 2 ticks no "Scr.".
13. Fig. 7 is zero-shot ImageNet during training. Here: zero-shot by prompts on each set of --eval-datasets with classes
    and no captions, during training if it has a val split (ImageNet: --hold-out-val), in the run's own view and with
    one prompt where the set has no others; the paper's number is that of eval.py --datasets imagenet1k.
"""

import argparse
import functools
import math

import common

from common import (  # isort: skip
    Evaluator, Expert, Paraphrases, Parser, Run, between, by_rows, clean_exit, fp32, gather, nonnegative, normalize,
    one_number, open_data, part, per_anchor, positive, positive_index, text_pair, text_words, whole)

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
    """L_MM (Eq. 3, averaged as in Algorithm 1): the mean of both directions of InfoNCE. tau as there, but no (B, N)."""
    if not callable(tau):
        per_anchor(tau, image)                                             # one per pair would be of one direction
    return (info_nce(image, text, tau, block) + info_nce(text, image, tau, block)) / 2


def modulated_temperature(sim, tau_min=0.01, tau_alpha=0.04):
    """tau_ij = tau_min + tau_alpha sqrt((1 + sim_ij) / 2) (Eq. 4): similar pairs get a higher temperature.

    Args: sim: cosines, any shape.   tau_min > 0, tau_alpha >= 0.
    Returns: temperatures of sim's shape, which divide the cosine; the gradient is finite everywhere.
    """
    return tau_min + tau_alpha * ((1 + sim) / 2).clamp(min=1e-8).sqrt()


def pair_temperature(sim, loss="temo", tau_min=0.01, tau_alpha=0.04, detach=False, similarity="shifted"):
    """tau_ij of --loss temo or dystress[-shifted] from cosines of any shape: for the loss, its log and its pictures.

    detach: no gradient through tau_ij.   similarity: 'cosine' is Eq. 4 on the bare cosine, 0 where it is negative."""
    sim = sim.detach() if detach else sim
    if loss == "temo":                                                     # Eq. 4 makes s of 2 s - 1
        return modulated_temperature(2 * sim.clamp(min=0) - 1 if similarity == "cosine" else sim, tau_min, tau_alpha)
    return dystress_temperature(sim, tau_min, tau_min + tau_alpha, loss == "dystress-shifted")


def modulated_loss(anchor, candidates, tau_min, tau_alpha, detach=False, similarity="shifted", block=0):
    """One direction of InfoNCE with modulated temperatures (Eqs. 5 and 6): L_M-I2I, L_M-T2T, L_M-I2T or L_M-T2I.

    Args: as in info_nce and pair_temperature.   Returns: scalar fp32 (float64 stays).
    """
    tau_of = functools.partial(pair_temperature, tau_min=one_number(tau_min, "tau_min"), tau_alpha=tau_alpha,
                               detach=detach, similarity=similarity)       # (b, N) -> (b, N)
    return info_nce(anchor, candidates, tau_of, block)


def modulated_multimodal_loss(image, text, tau_min, tau_alpha, **more):
    """L_M-MM (Eq. 7): mean of both directions; the temperatures of one are the transpose of the other's."""
    image_to_text = modulated_loss(image, text, tau_min, tau_alpha, **more)
    return (image_to_text + modulated_loss(text, image, tau_min, tau_alpha, **more)) / 2


def temo_terms(image, text, image_aug, text_aug, tau=0.01, tau_min=0.01, tau_alpha=0.04, detach=False,
               similarity="shifted", block=0, names=("L_MM", "L_M-MM", "L_M-I2I", "L_M-T2T")):
    """The terms of Eq. 8 under their names in the paper: {name: scalar fp32 (float64 stays)}.

    Args:
        image, text, image_aug, text_aug: (B, D) embeddings I, T, I~, T~ of this process.   tau: temperature of L_MM.
        tau_min, tau_alpha: Eq. 4.   detach, similarity, block: as modulated_loss.
        names: the terms to compute, in this order; also L_I2I and L_T2T (Eq. 2, at tau).
    """
    eq_4 = dict(tau_min=tau_min, tau_alpha=tau_alpha, detach=detach, similarity=similarity, block=block)
    later = functools.partial                                              # computed if its name is wanted
    terms = {"L_MM": later(multimodal_loss, image, text, tau, block),
             "L_M-MM": later(modulated_multimodal_loss, image, text, **eq_4),
             "L_M-I2I": later(modulated_loss, image, image_aug, **eq_4),
             "L_M-T2T": later(modulated_loss, text, text_aug, **eq_4),
             "L_I2I": later(info_nce, image, image_aug, tau, block),
             "L_T2T": later(info_nce, text, text_aug, tau, block)}
    return {name: terms[name]() for name in names}


def term_weights(progress, base=True, modulated=True, unimodal="modulated", blend="quadratic"):
    """{term: weight} of the rows a-g of Table 3 at t = progress; a term of weight 0 is left out.

    alpha, beta of Eq. 8: (1-t)^2 and t^2; 'fixed': 1/2 and 1/2. A part without the other has 1."""
    others = ["L_M-MM"] * modulated
    others += {"none": [], "plain": ["L_I2I", "L_T2T"], "modulated": ["L_M-I2I", "L_M-T2T"]}[unimodal]
    alpha, beta = {"quadratic": ((1 - progress) ** 2, progress ** 2), "fixed": (0.5, 0.5)}[blend]
    if not (base and others):
        alpha, beta = float(base), float(bool(others))
    weights = {"L_MM": alpha} | dict.fromkeys(others, beta)
    return {name: weight for name, weight in weights.items() if weight}


def temo_loss(image, text, image_aug, text_aug, progress, tau=0.01, tau_min=0.01, tau_alpha=0.04, base=True,
              modulated=True, unimodal="modulated", blend="quadratic", **more):
    """L = alpha L_MM + beta (L_M-MM + L_M-I2I + L_M-T2T) (Eq. 8, Algorithm 1).

    Args:
        image, text, image_aug, text_aug: (B, D) embeddings I, T, I~, T~ (the last two unused with unimodal='none';
            encode them under torch.no_grad to do as the authors' code).
        progress: t = step / steps, 0..1.   tau, tau_min, tau_alpha, more: as temo_terms.
        base, modulated, unimodal ('none', 'plain' at tau, 'modulated'), blend: rows a-g of Table 3.
    Returns: scalar fp32 (float64 stays). A term of weight 0 is not computed.
    """
    weights = term_weights(progress, base, modulated, unimodal, blend)
    terms = temo_terms(image, text, image_aug, text_aug, tau, tau_min, tau_alpha, names=weights, **more)
    return sum(weights[name] * term for name, term in terms.items())


@fp32
def expert_temperature(features, tau_min=0.01, tau_alpha=0.04):
    """Eq. 4 on the cosines of an expert's features (App. F): (B, width) -> (B, N), no gradient."""
    features = normalize(features.detach())                                # (B, width)
    return modulated_temperature(features @ gather(features).T, tau_min, tau_alpha)


def expert_terms(embeddings, features, tau=0.01, tau_min=0.01, tau_alpha=0.04, block=0):
    """The terms of the loss with experts (App. F): L_MM, and of each expert CE(X X^T / tau^X), X its modality.

    Args: embeddings: {'image': I (B, D), 'text': T (B, D)}.   features: {modality: (B, width) of its expert}, whose
        cosines set tau^X.   tau: of L_MM.
    Returns: {'L_MM', 'L_E-image', 'L_E-text': scalar fp32}; an anchor's positive is itself.
    """
    terms = {"L_MM": multimodal_loss(embeddings["image"], embeddings["text"], tau, block)}
    for modality, own in features.items():
        of_expert = expert_temperature(own, tau_min, tau_alpha)            # (B, N)
        terms[f"L_E-{modality}"] = info_nce(embeddings[modality], embeddings[modality], of_expert, block)
    return terms


# ------------------------------------------------------- baselines ---------------------------------------------------
def ts_temperature(progress, tau_min=0.01, tau_max=0.05, periods=5):
    """TS (Kukleva et al. 2023): tau_min + (tau_max - tau_min) (1 + cos(2 pi periods t)) / 2 for t = progress."""
    return tau_min + (tau_max - tau_min) * (1 + math.cos(2 * math.pi * periods * progress)) / 2


def dystress_temperature(sim, tau_min=0.01, tau_max=0.04, shifted=False):
    """DySTreSS (Manna et al. 2025): tau_ij = tau_min + (tau_max - tau_min) (1 + cos(pi (1 + s_ij))) / 2.

    tau_min at s = 0, tau_max at s = +-1. shifted: (1 + cos(pi (s - 0.4) / 0.7)) / 2 in its place, and 1 above s = 0.4:
    tau_min at s = -0.3."""
    phase = math.pi * (sim - 0.4).clamp(max=0) / 0.7 if shifted else math.pi * (1 + sim)
    return tau_min + (tau_max - tau_min) * (1 + torch.cos(phase)) / 2


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


class SlipHead(nn.Sequential):
    """SLIP's projection head of three layers, (B, width) -> (B, out), with LayerNorm instead of BatchNorm."""

    def __init__(self, width, hidden=4096, out=256):
        super().__init__(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, out))


# ======================================================= flags =======================================================
# Defaults by data set, one line per group. 'code': the public development code and the trainers that it forks; 'ours':
# tuned on val. Other sets use 'own'. What depends on the loss or on the row of Table 3 stands in defaults_of.
CC3M = dict(
    recipe="paper; optimiser, views and captions from the code",
    image_encoder="resnet50.a1_in1k", text_encoder="distilbert/distilbert-base-uncased", pretrained=True, embed_dim=256,
    image_size=256, image_stats="clip", eval_resize="squash", text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=2048, lr_end=1e-5, warmup_epochs=1.4,  # 2,000 steps of 1,420 an epoch
    optimizer="adamw", lr_schedule="cosine", beta1=0.9, eps=1e-8, weight_decay=0.02, beta2=0.999, grad_clip=0.0,
    frames=12, frame_sampling="uniform", join_captions=False, unfold_captions=False,
    tau=0.01, tau_min=0.01, tau_alpha=0.04,
    image_aug="same", grad_augmented=False, paraphrase_anchor=True,
    crop_min=0.5, flip=0.5, aug_flip=0.5, randaugment_ops=2, randaugment_magnitude=21, jitter=0.0,
    aug_crop_min=0.08, aug_jitter=0.4, aug_hue=0.1, aug_blur=0.5,
    mixed_precision="bf16", eval_datasets=["cc3m", "coco", "flickr30k"], log_every=50, save_every=1000, eval_every=0)
CC12M = CC3M | dict(
    recipe="paper; optimiser, views and captions from the code (SLIP)",
    # configuration and tokenizer of CLIP's text transformer, trained from scratch; offline: a folder with these files
    image_encoder="vit_base_patch16_224", text_encoder="openai/clip-vit-base-patch32", pretrained=False, embed_dim=512,
    image_size=224, image_stats="imagenet", eval_resize="crop", text_length=77, clean_captions=False,
    batch_size=4096, chunk_size=128, warmup_epochs=1.0, beta2=0.98, tau_clamp=[0.01, 1.0],
    image_aug="simclr", grad_augmented=True, paraphrase_anchor=False,
    flip=0.0, randaugment_ops=0, eval_datasets=["cc12m", "coco", "flickr30k"])
EMOJI = dict(
    recipe="ours", image_encoder="small", text_encoder="small", pretrained=False, embed_dim=128,
    image_size=48, image_stats="encoder", eval_resize="crop", text_length=24, text_pooling="mean", clean_captions=False,
    epochs=24.0, batch_size=256, lr=2e-3, lr_end=2e-5, warmup_epochs=2.0, weight_decay=0.1, beta2=0.98, grad_clip=1.0,
    optimizer="adamw", lr_schedule="cosine", beta1=0.9, eps=1e-8,
    frames=12, frame_sampling="uniform", join_captions=False, unfold_captions=False,
    tau=0.1, tau_min=0.05, tau_alpha=0.1,
    image_aug="same", grad_augmented=False, paraphrase_anchor=True,
    crop_min=0.35, flip=0.5, aug_flip=0.5, randaugment_ops=0, randaugment_magnitude=0, jitter=0.4,
    aug_crop_min=0.2, aug_jitter=0.4, aug_hue=0.0, aug_blur=0.0,           # no other hue: captions name colours
    mixed_precision="no", eval_datasets=[], log_every=5, save_every=100, eval_every=70)
MOVING = EMOJI | dict(recipe="ours; as emoji, no mirror images: left and right are words of captions", image_size=32,
                      frames=4, epochs=40.0, batch_size=128, flip=0.0, aug_flip=0.0, crop_min=0.8, aug_crop_min=0.5)
OWN = EMOJI | dict(recipe="ours; small towers from scratch", image_size=64, text_length=32, aug_hue=0.1,
                   log_every=10, eval_every=0, save_every=500)
RECIPES = {"emoji": EMOJI, "cc3m": CC3M, "cc12m": CC12M, "moving-emoji": MOVING, "own": OWN}
ROWS = {  # Table 3: which terms the loss has, and their weights
    "a": dict(base=True, modulated=False, unimodal="none", blend="quadratic"),
    "b": dict(base=False, modulated=True, unimodal="none", blend="quadratic"),
    "c": dict(base=True, modulated=False, unimodal="plain", blend="fixed"),
    "d": dict(base=True, modulated=True, unimodal="none", blend="fixed"),
    "e": dict(base=True, modulated=True, unimodal="none", blend="quadratic"),
    "f": dict(base=True, modulated=True, unimodal="modulated", blend="fixed"),
    "g": dict(base=True, modulated=True, unimodal="modulated", blend="quadratic")}


def defaults_of(chosen):
    """Defaults that follow from what was chosen first: loss, row, experts, recipe and image encoder."""
    row = "" if chosen.image_expert or chosen.text_expert or chosen.loss != "temo" else chosen.row
    found = {"row": row, "detach_tau": False, "similarity": "shifted"} | ROWS.get(row, ROWS["a"])  # experts: L_MM alone
    if chosen.loss == "slip":
        found |= dict(tau=0.07, learnable_tau=True, tau_clamp=[0.01, 1.0])  # paper, Section 4; clamp of SLIP's code
    if chosen.recipe not in ("cc3m", "cc12m"):
        return found
    dystress, unimodal = chosen.loss.startswith("dystress"), row in ("c", "f", "g")
    if chosen.loss == "cwcl":
        found["tau"] = 0.05                                                # Table 1
    if dystress or row == "b":
        found["tau_alpha"] = 0.03 if dystress else 0.05
    if chosen.recipe == "cc3m":
        found["lr"] = 2e-4 if dystress or unimodal else 8e-4
        return found | ({"image_size": 224} if chosen.image_encoder.startswith("vit") else {})
    slip = chosen.loss == "slip" or row not in ("", "a")                   # SLIP's values, else those of its CLIP
    return found | (dict(lr=3e-3, weight_decay=0.1) if slip else dict(lr=5e-4, weight_decay=0.5))


def parts_of(args):
    """What the loss has, {name: bool}: which flags have an effect follows from it."""
    is_temo, expert = args.loss == "temo", bool(args.image_expert or args.text_expert)
    eq_4 = is_temo and (args.modulated or args.unimodal == "modulated")
    pair, augmented = eq_4 or args.loss.startswith("dystress"), is_temo and args.unimodal != "none"
    at_tau = args.base or args.unimodal == "plain" if is_temo else args.loss in ("infonce", "cwcl", "slip")
    return {"without_expert": is_temo and not expert, "expert": expert,
            "at_tau": at_tau,                                              # a term at --tau
            "eq_4": eq_4, "pair": pair,                                    # tau_ij by the batch's own cosines
            "ranged": pair or expert or args.loss == "ts",                 # from --tau-min, by --tau-alpha
            "augmented": augmented,                                        # I~ and T~
            "blended": not expert and args.base and (eq_4 or augmented),
            "simclr": args.loss == "slip" or augmented and args.image_aug == "simclr"}


def parse_args(argv=None):
    """Flags; the recipe of --dataset or --recipe and what defaults_of says give the defaults."""
    p = Parser(__file__, "TeMo: per-pair temperature, multimodal and unimodal.")
    yesno = argparse.BooleanOptionalAction
    g = p.group("method")
    g.add_argument("--loss", choices=["temo", "infonce", "ts", "dystress", "dystress-shifted", "cwcl", "slip"],
                   default="temo", help="TeMo or a baseline of its tables")
    g = p.group("with L_MM, --unimodal plain, or --loss infonce, cwcl or slip", at_tau=True)
    g.add_argument("--tau", type=positive, help="of L_MM and baselines; paper 0.01, SLIP from 0.07, CWCL 0.05")
    g = p.group("with --loss infonce, slip or cwcl", loss=("infonce", "slip", "cwcl"))
    g.add_argument("--learnable-tau", action=yesno, default=False, help="learn tau")
    g = p.group("with --loss temo", loss="temo")
    g.add_argument("--image-expert", default="", help="transformers id or folder (App. F: DINOv2-Small)")
    g.add_argument("--text-expert", default="", help="the same for texts (App. F: all-roberta-large-v1)")
    g = p.group("with --loss temo, without experts", without_expert=True)
    g.add_argument("--row", choices=[*ROWS], default="g", help="of Table 3: --base --modulated --unimodal --blend; on "
                   "cc3m and cc12m also --lr --weight-decay --tau-alpha")
    g.add_argument("--base", action=yesno, help="L_MM in the loss (Table 3: Base)")
    g.add_argument("--modulated", action=yesno, help="L_M-MM in the loss (Table 3: Mod.)")
    g.add_argument("--unimodal", choices=["none", "plain", "modulated"], help="Table 3: U.L.; plain = at --tau")
    g = p.group("with L_MM and another term of --loss temo", blended=True)
    g.add_argument("--blend", choices=["quadratic", "fixed"], help="weights (1-t)^2, t^2; or 0.5, 0.5")
    g = p.group("with --image-expert", image_expert=True)
    g.add_argument("--image-expert-weight", type=nonnegative, default=0.6, help="of its term; code 0.6 or 0.1")
    g.add_argument("--expert-pooling", choices=["cls", "patches"], default="cls",
                   help="class token (code), or mean of the patches (paper)")
    g = p.group("with --text-expert", text_expert=True)
    g.add_argument("--text-expert-weight", type=nonnegative, default=0.4, help="of its term; code 0.4 or 0.1")
    g = p.group("with --loss temo (a modulated term, or an expert), ts or dystress", ranged=True)
    g.add_argument("--tau-min", type=positive, help="lowest modulated tau, > 0; paper 0.01")
    g.add_argument("--tau-alpha", type=nonnegative, help="its range; paper 0.04; code 0.05 in row b, dystress 0.03")
    g = p.group("with --loss temo (a modulated term) or dystress", pair=True)
    g.add_argument("--detach-tau", action=yesno, help="no gradient through the per-pair temperature")
    g = p.group("with --loss temo (a modulated term)", eq_4=True)
    g.add_argument("--similarity", choices=["shifted", "cosine"],
                   help="s of Eq. 4: (1 + cosine) / 2, or the cosine, 0 where negative")
    g = p.group("with --learnable-tau", learnable_tau=True)
    g.add_argument("--tau-clamp", type=positive, nargs=2, default=[0.001, 0.5], metavar=("LOW", "HIGH"),
                   help="of a learnable tau; SLIP 0.01 1")
    g = p.group("views")
    g.add_argument("--crop-min", type=part, help="I: least area of the crop; CC3M trainer 0.5")
    g.add_argument("--flip", type=part, help="I: share of mirror images; CC3M trainer 0.5, SLIP 0")
    g.add_argument("--jitter", type=part, help="I: of brightness, contrast, saturation, in 80 %% of the views")
    g.add_argument("--randaugment-ops", type=whole, help="I: each with probability 1/2; CC3M trainer 2; 0 = off")
    g.add_argument("--randaugment-magnitude", type=between(0, 30, int), help="I: 0..30; CC3M trainer's 7 of 10 = 21")
    g = p.group("with I~ and T~ (--loss temo and --unimodal)", augmented=True)
    g.add_argument("--grad-augmented", action=yesno, help="gradient into I~ and T~ (CC12M code; CC3M's has none)")
    g.add_argument("--image-aug", choices=["same", "simclr", "crop"],
                   help="I~: I's view (CC3M code); SimCLR's (CC12M code); a crop alone")
    g.add_argument("--paraphrases", default="", metavar="FILE", help="JSON lines of tools/paraphrase.py; paper: five")
    g = p.group("with --paraphrases", paraphrases=True)
    g.add_argument("--paraphrase-anchor", action=yesno, help="T may be a paraphrase (CC3M code; CC12M's: no)")
    g = p.group("with --image-aug simclr or --loss slip", simclr=True)
    g.add_argument("--aug-crop-min", type=part, help="I~: least area of the crop; SimCLR 0.08")
    g.add_argument("--aug-flip", type=part, help="I~: share of mirror images; SimCLR 0.5")
    g.add_argument("--aug-jitter", type=part, help="I~: as --jitter; SLIP 0.4")
    g.add_argument("--aug-hue", type=between(0, 0.5), help="I~: strength, 0..0.5; SLIP 0.1")
    g.add_argument("--aug-blur", type=part, help="I~: share of blurred images; SimCLR 0.5")
    args = p.parse(argv, RECIPES, defaults_of, ("--row", "--image-expert", "--text-expert"), parts_of)
    p.only(args.randaugment_ops, "with --randaugment-ops above 0", "--randaugment-magnitude")
    p.require(not args.learnable_tau or args.tau_clamp[0] <= args.tau <= args.tau_clamp[1],
              f"--tau-clamp {args.tau_clamp}: must hold 0 < LOW <= --tau ({args.tau}) <= HIGH")
    p.require(args.base or args.modulated or args.unimodal != "none",
              "--no-base --no-modulated --unimodal none leaves no loss")
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
        own["head"] = SlipHead(tower.vision.width)
    own.to(run.device)
    names = {"image": args.image_expert, "text": args.text_expert}
    experts = {kind: Expert(name, kind, transform, run.device, args.mixed_precision, args.expert_pooling)
               for kind, name in names.items() if name}
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
    chunks = common.Chunks(functools.partial(encode, model, slip=args.loss == "slip"), model, run.accelerator,
                           args.chunk_size)

    # ------------------------------------------- views and batches ---------------------------------------------------
    base_view = common.Augment(args.image_size, args.crop_min, args.flip, 0.8, args.jitter, args.jitter, args.jitter,
                               randaugment=(args.randaugment_ops, args.randaugment_magnitude))
    simclr_view = common.Augment(args.image_size, args.aug_crop_min, args.aug_flip, 0.8, args.aug_jitter,
                                 args.aug_jitter, args.aug_jitter, args.aug_hue, 0.2, args.aug_blur)
    second = {"same": base_view, "simclr": simclr_view, "crop": common.Augment(args.image_size, args.crop_min)}
    augmented = parts_of(args)["augmented"]                                # I~ and T~ are needed
    views = [base_view] + [second[args.image_aug]] * augmented + [simclr_view] * 2 * (args.loss == "slip")
    batches = run.batches(views, transform)

    # ------------------------------------------- loop ----------------------------------------------------------------
    tau_max, eq_4 = args.tau_min + args.tau_alpha, dict(tau_min=args.tau_min, tau_alpha=args.tau_alpha)
    how = eq_4 | dict(detach=args.detach_tau, similarity=args.similarity)
    tau_of = functools.partial(pair_temperature, loss=args.loss, **how)
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, run.device, args)
    words = "T is the caption"
    if augmented:
        words = text_words(train, paraphrases, args.paraphrase_anchor, RECIPES[args.recipe]["recipe"])
    run.begin(evaluator, random_guess(args), banner_lines(args, tau_of) | {"texts": words})
    run.loss_word = "L_MM" if parts_of(args)["blended"] else "loss"        # of the bar: the sum climbs by its weights
    for batch in batches:
        progress = run.step / run.total                                    # t of Eq. 8
        run.set_lr(common.cosine_lr(run.step, run.total, run.warmup, args.lr, args.lr_end, args.lr_schedule))
        texts, other = text_pair(batch["captions"], batch["draws"], paraphrases, train.templates, second=augmented,
                                 anchor=args.paraphrase_anchor)            # B texts T, and T~
        B, ids = len(texts), tokenizer(texts + other)                      # (B, L) or (2B, L) each, of one length
        tokens = {i: {k: v[i * B:(i + 1) * B].to(run.device) for k, v in ids.items()} for i in range(1 + augmented)}
        inputs = {"pixels": dict(enumerate(batch["views"])), "tokens": tokens}
        apart = {kind: {1: of.pop(1)} for kind, of in inputs.items()} if augmented and not args.grad_augmented else {}
        fixed = chunks.encode_without_gradient(apart) if apart else ()     # I~, T~; first, since BatchNorm's statistics
        image, text, *more = *chunks.encode(inputs), *fixed                # may not change between I and its backward

        tau = own["tau"]["log_tau"].exp() if args.learnable_tau else args.tau
        if args.loss == "ts":
            tau = ts_temperature(progress, args.tau_min, tau_max)
        features = {k: experts[k](batch["views"][0] if k == "image" else texts) for k in experts}  # (B, width) each
        if experts:
            terms = expert_terms({"image": image, "text": text}, features, tau, **eq_4)
            loss = sum(weight * terms[name] for name, weight in weights_of(args, progress).items())
        elif args.loss == "temo":
            loss = temo_loss(image, text, *(more or (None, None)), progress, tau, base=args.base,
                             modulated=args.modulated, unimodal=args.unimodal, blend=args.blend, **how)
        elif args.loss == "cwcl":
            loss = cwcl_loss(image, text, tau)
        else:                                                              # infonce, ts, dystress, SLIP's text half
            loss = multimodal_loss(image, text, tau_of if args.loss.startswith("dystress") else tau)
        if args.loss == "slip":
            z1, z2 = own["head"](more[0]), own["head"](more[1])            # (B, 256)
            loss = loss + simclr_loss(z1, z2, 0.1)                         # weight and temperature of SLIP

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
        numbers = numbers_of((image, text, *more), features, tau_of, how, args, run) if run.due("log") else {}
        run.done(batch, loss, tau, numbers)

    # ------------------------------------------- save and evaluate ---------------------------------------------------
    return run.finish(draw)


def random_guess(args):
    """The loss at the start and the end if all cosines are equal; None in a fork whose loss has another."""
    of_views = math.log(2 * args.batch_size - 1) if args.loss == "slip" else 0
    return [sum(weights_of(args, t).values()) * math.log(args.batch_size) + of_views for t in (0, 1)]


def banner_lines(args, tau_of):
    """The method's lines of the banner: the row of Table 3 or the terms with experts, and the temperatures."""
    has, ends = parts_of(args), f"{args.tau_min:g} .. {args.tau_min + args.tau_alpha:g}"
    loss = args.loss + f", row {args.row}" * bool(args.row)
    if has["expert"]:
        loss = " + ".join(f"{w:g} {name}" for name, w in weights_of(args, 0).items())
    at = ", ".join(f"{tau:.3g}" for tau in tau_of(torch.tensor([-1.0, 0.0, 1.0])).tolist())
    words = {f"tau {args.tau}{', learnt' * args.learnable_tau}": has["at_tau"], f"by experts {ends}": has["expert"],
             f"per pair {at} at cosine -1, 0, 1": has["pair"], f"over the run {ends}": args.loss == "ts"}
    return {"loss": loss, "temperature": "; ".join(word for word, holds in words.items() if holds)}


@torch.no_grad()
def numbers_of(embeddings, features, tau_of, how, args, run):
    """Columns of the log: the terms of the loss, common.embedding_health, and the temperatures (Fig. 2).

    embeddings: I, T[, I~, T~], (B, D) each; features: of experts; tau_of: pair_temperature; how: its keywords."""
    image, text, *more = embeddings
    if features:
        terms = expert_terms({"image": image, "text": text}, features, args.tau, args.tau_min, args.tau_alpha)
    else:
        names = {"L_MM": 0} | weights_of(args, 0.5)
        terms = temo_terms(image, text, *(more or (None, None)), args.tau, names=names, **how)
    numbers = common.mean_over_processes(terms, run.device)                # L_MM: comparable along the run
    image, text = gather(normalize(image)), gather(normalize(text))                                          # (N, D)
    numbers |= common.embedding_health(image, text)
    if not parts_of(args)["pair"]:
        return numbers
    temperatures = tau_of(image[:2048] @ text[:2048].T)                    # (n, n), of at most 2,048 pairs
    n, on_pairs = len(temperatures), temperatures.diagonal().mean().item()
    numbers |= {} if parts_of(args)["at_tau"] else {"tau": temperatures.mean().item()}           # no term at --tau
    return numbers | {"tau_pos": on_pairs, "tau_neg": (temperatures.sum().item() - n * on_pairs) / max(1, n * n - n)}


def weights_of(args, progress):
    """{term: weight} of the loss at t = progress: those of Eq. 8, or with experts; L_MM alone for the baselines."""
    if parts_of(args)["without_expert"]:
        return term_weights(progress, args.base, args.modulated, args.unimodal, args.blend)
    weights = {"L_MM": 1.0} | ({"L_E-image": args.image_expert_weight} if args.image_expert else {})
    return weights | ({"L_E-text": args.text_expert_weight} if args.text_expert else {})


def encode(model, inputs, slip=False):
    """All views and texts in one forward: pixels {view: (b, [T,] 3, S, S)}, tokens {text: (b, L)} -> I, T[, I~, T~] or
    I~, T~, (b, D) each; for SLIP I, T and the features (b, width) of its two views."""
    pixels, tokens = inputs["pixels"], inputs["tokens"]
    joined = {k: torch.cat([t[k] for t in tokens.values()]) for k in ("input_ids", "attention_mask")}    # (b or 2b, L)
    image, text, features = model(torch.cat([*pixels.values()]), joined)
    if slip:                                                               # I and two strong views
        return image.chunk(3)[0], text, *features.chunk(3)[1:]
    pairs = zip(image.chunk(len(pixels)), text.chunk(len(tokens)), strict=True)
    return tuple(embedding for pair in pairs for embedding in pair)


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
