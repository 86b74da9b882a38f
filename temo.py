"""TeMo: Temperature Modulation for Multimodal Contrastive Learning (anonymous, under review).

Two encoders map images I and texts T, and an augmentation I~ and T~ of each, into one space.
InfoNCE at a low and fixed temperature pushes all negatives apart. TeMo adds three losses in which
each pair has its own temperature: it grows with the similarity of the pair, so that similar items
are pushed apart less. A quadratic schedule moves the weight from InfoNCE to these losses during
training. No parameters are added; by default I~ and T~ are encoded without gradient
(--grad-augmented).

Equations (s_ij: cosine of anchor i and candidate j; t: progress of training, 0..1)
    (1, 2)  I(x_a, X; tau) = -log( exp(s_ap / tau) / sum_k exp(s_ak / tau) )    info_nce
    (3)     L_MM = 1/2 [ I(I, T; tau) + I(T, I; tau) ]                          multimodal_loss
    (4)     tau_ij = tau_min + tau_alpha sqrt((1 + s_ij) / 2), authors' code   modulated_temperature
    (5, 6)  L_M-I2I, L_M-T2T, L_M-I2T, L_M-T2I: (1) with the tau_ij of (4)      modulated_loss
    (7)     L_M-MM = 1/2 (L_M-I2T + L_M-T2I)                          modulated_multimodal_loss
    (8)     L = (1-t)^2 L_MM + t^2 (L_M-MM + L_M-I2I + L_M-T2T)                 temo_loss

Symbols
    I, T                  image, text             (B, D)  embeddings of this process
    I~, T~                image_aug, text_aug     (B, D)  second view of I; paraphrase of T
    tau, tau_ij           tau                     () or (B, N)  divides the cosine; paper 0.01
    tau_min, tau_alpha    tau_min, tau_alpha      ()      lowest tau_ij, range; paper 0.01, 0.04
    t                     progress                ()      optimiser step / all steps

Commands
    accelerate launch temo.py                                      # emoji, 2 minutes on two cores
    accelerate launch temo.py --dataset cc3m --paraphrases p.jsonl # the paper's run
    accelerate launch temo.py --dataset cc3m --row e               # a row of the paper's Table 3
    accelerate launch temo.py --dataset captions.csv               # own data: image, caption
    accelerate launch temo.py --loss infonce                       # a baseline

docs/temo.md: commands for every table, recipes, differences from the paper, results.
To try an idea of your own, copy this file and edit it; docs/forking.md.
"""

import argparse
import functools
import math

import common

from common import (
    Augment, EvaluationFacts, Evaluator, Expert, Paraphrases, Parser, Run, Temperature, between,
    clean_exit, fp32, gather, nonnegative, normalize, one_number, open_data, part, per_anchor,
    positive, positive_index, row_blocks, text_pair, text_words, whole)

import torch
import torch.nn as nn
import torch.nn.functional as F

from contrastive.figures.temo import draw, save_similarities


# ======================================================= METHOD ===================================
@row_blocks
def info_nce_per_anchor(anchor, target, tau, *, candidates):
    """Eq. 1 of each anchor: (b, D), (b,), tau, (N, D) -> (b,)."""
    logits = anchor @ candidates.T / tau                                   # (b, N)
    return F.cross_entropy(logits, target, reduction="none")               # (b,)


@fp32
def info_nce(anchor, candidates, tau):
    """InfoNCE of anchors against the candidates of the global batch (Eqs. 1 and 2).

    Args:
        anchor, candidates: (B, D) embeddings of this process; row i of both is a positive pair.
        tau: temperature > 0: a number, (), (B,) for each anchor or (B, N) for each pair.
    Returns: () mean over the anchors of this process, float32. A random guess is about ln N.
    """
    anchor, candidates = normalize(anchor), gather(normalize(candidates))  # (B, D), (N, D)
    tau = per_anchor(tau, anchor, columns=len(candidates))                 # (), (B, 1), (B, N)
    target = positive_index(anchor)                                        # (B,)
    return info_nce_per_anchor(anchor, target, tau, candidates=candidates).mean()


def multimodal_loss(image, text, tau):
    """L_MM, the mean of InfoNCE in both directions (Eq. 3 as Algorithm 1 has it).

    Args:
        image, text: (B, D) embeddings of this process.
        tau: temperature > 0: a number, () or (B,) for each anchor.
    Returns: (), float32.
    """
    # raises for (B, N): temperatures of pairs belong to one direction
    per_anchor(tau, image)
    image_to_text = info_nce(image, text, tau)
    text_to_image = info_nce(text, image, tau)
    return (image_to_text + text_to_image) / 2


def modulated_temperature(sim, tau_min=0.01, tau_alpha=0.04, detach=False, similarity="shifted"):
    """tau_ij = tau_min + tau_alpha sqrt((1 + s_ij) / 2) (Eq. 4), higher for similar pairs.

    Args:
        sim: cosines, any shape.
        tau_min: lowest temperature, > 0.
        tau_alpha: highest temperature minus the lowest, >= 0.
        detach: stop the gradient through the temperature.
        similarity: 'shifted', as above, or 'cosine', sqrt(s_ij) as printed, 0 where s_ij < 0.
    Returns: temperatures of sim's shape; the gradient is finite everywhere.
    """
    if detach:
        sim = sim.detach()
    if similarity == "shifted":
        share = (1 + sim) / 2                                              # 0..1
    elif similarity == "cosine":
        share = sim
    else:
        raise ValueError(f"similarity={similarity!r}: give 'shifted' or 'cosine'")
    # without the clamp the gradient of the root is infinite at 0
    return tau_min + tau_alpha * share.clamp(min=1e-8).sqrt()


@row_blocks
def per_pair_cross_entropy(anchor, target, *, candidates, temperature):
    """Eq. 1 of each anchor with a temperature for each pair: (b, D), (b,) -> (b,).

    Args:
        candidates: (N, D).
        temperature: function of cosines (b, N) -> temperatures (b, N).
    """
    sim = anchor @ candidates.T                                            # (b, N)
    tau = temperature(sim)                                                 # (b, N)
    return F.cross_entropy(sim / tau, target, reduction="none")            # (b,)


@fp32
def modulated_loss(anchor, candidates, tau_min, tau_alpha, *, detach=False, similarity="shifted"):
    """InfoNCE with a temperature for each pair: L_M-I2I, L_M-T2T, L_M-I2T or L_M-T2I (Eqs. 5, 6).

    Args:
        anchor, candidates: as in info_nce.
        tau_min, tau_alpha, detach, similarity: as in modulated_temperature.
    Returns: () mean over the anchors of this process, float32.
    """
    one_number(tau_min, "tau_min")
    anchor, candidates = normalize(anchor), gather(normalize(candidates))  # (B, D), (N, D)
    target = positive_index(anchor)                                        # (B,)
    temperature = functools.partial(modulated_temperature, tau_min=tau_min, tau_alpha=tau_alpha,
                                    detach=detach, similarity=similarity)
    return per_pair_cross_entropy(
        anchor, target, candidates=candidates, temperature=temperature).mean()


def modulated_multimodal_loss(image, text, tau_min, tau_alpha, **options):
    """L_M-MM, the mean of modulated_loss in both directions (Eq. 7).

    options: detach, similarity.
    """
    image_to_text = modulated_loss(image, text, tau_min, tau_alpha, **options)
    text_to_image = modulated_loss(text, image, tau_min, tau_alpha, **options)
    return (image_to_text + text_to_image) / 2


def temo_terms(image, text, image_aug, text_aug, *, names, tau=0.01, tau_min=0.01, tau_alpha=0.04,
               detach=False, similarity="shifted"):
    """The terms of Eq. 8 by their names in the paper.

    Args:
        image, text, image_aug, text_aug: (B, D) embeddings I, T, I~, T~ of this process.
        names: the terms to compute, such as 'L_M-MM'.
        tau: temperature of L_MM, and of L_I2I and L_T2T (Eq. 2).
        tau_min, tau_alpha, detach, similarity: as in modulated_temperature.
    Returns: {name: ()}.
    """
    modulation = dict(tau_min=tau_min, tau_alpha=tau_alpha, detach=detach,
                      similarity=similarity)
    terms = {}
    for name in names:
        if name == "L_MM":
            terms[name] = multimodal_loss(image, text, tau)
        elif name == "L_M-MM":
            terms[name] = modulated_multimodal_loss(image, text, **modulation)
        elif name == "L_M-I2I":
            terms[name] = modulated_loss(image, image_aug, **modulation)
        elif name == "L_M-T2T":
            terms[name] = modulated_loss(text, text_aug, **modulation)
        elif name == "L_I2I":
            terms[name] = info_nce(image, image_aug, tau)
        elif name == "L_T2T":
            terms[name] = info_nce(text, text_aug, tau)
        else:
            raise ValueError(f"{name} has no branch in temo_terms")
    return terms


def term_weights(progress, base=True, modulated=True, unimodal="modulated", blend="quadratic"):
    """The weights of the terms of Eq. 8 at t = progress, for the rows a to g of Table 3.

    Args:
        progress: t, 0..1.
        base: whether L_MM is a term.
        modulated: whether L_M-MM is a term.
        unimodal: 'none', 'plain' (L_I2I, L_T2T) or 'modulated' (L_M-I2I, L_M-T2T).
        blend: 'quadratic', alpha = (1-t)^2 for L_MM and beta = t^2 for the others, or 'fixed', 1/2
            for all. L_MM alone, or the others alone, have weight 1.
    Returns: {term: weight} without terms of weight 0.
    """
    beta_terms = []
    if modulated:
        beta_terms.append("L_M-MM")
    if unimodal == "plain":
        beta_terms += ["L_I2I", "L_T2T"]
    elif unimodal == "modulated":
        beta_terms += ["L_M-I2I", "L_M-T2T"]
    elif unimodal != "none":
        raise ValueError(f"unimodal={unimodal!r}: give 'none', 'plain' or 'modulated'")
    if not 0 <= progress <= 1:
        raise ValueError(f"progress={progress}: give step / all steps, 0..1")

    if not base or not beta_terms:
        alpha, beta = 1.0, 1.0
    elif blend == "quadratic":
        alpha, beta = (1 - progress) ** 2, progress ** 2
    elif blend == "fixed":
        alpha, beta = 0.5, 0.5
    else:
        raise ValueError(f"blend={blend!r}: give 'quadratic' or 'fixed'")

    weights = {}
    if base and alpha > 0:
        weights["L_MM"] = alpha
    if beta > 0:
        for name in beta_terms:
            weights[name] = beta
    return weights


def temo_loss(  # noqa: PLR0917
        image, text, image_aug, text_aug, progress, tau=0.01, tau_min=0.01, tau_alpha=0.04, *,
        base=True, modulated=True, unimodal="modulated", blend="quadratic",
        detach=False, similarity="shifted"):
    """L = alpha L_MM + beta (L_M-MM + L_M-I2I + L_M-T2T) (Eq. 8, Algorithm 1).

    Args:
        image, text: (B, D) embeddings I, T of this process.
        image_aug, text_aug: (B, D) embeddings I~, T~, or None with unimodal='none'. They may have
            no gradient.
        progress: t = step / all steps, 0..1.
        tau, tau_min, tau_alpha, detach, similarity: as in temo_terms.
        base, modulated, unimodal, blend: as in term_weights.
    Returns: (), float32.
    """
    weights = term_weights(progress, base, modulated, unimodal, blend)
    terms = temo_terms(image, text, image_aug, text_aug, names=list(weights), tau=tau,
                       tau_min=tau_min, tau_alpha=tau_alpha, detach=detach, similarity=similarity)
    return sum(weights[name] * terms[name] for name in weights)


@fp32
def expert_temperature(features, tau_min=0.01, tau_alpha=0.04):
    """Temperatures from the cosines of an expert's features (App. F): (B, width) -> (B, N).

    They have no gradient. tau_min, tau_alpha: as in modulated_temperature.
    """
    features = normalize(features.detach())                                # (B, width)
    return modulated_temperature(features @ gather(features).T, tau_min, tau_alpha)


def expert_terms(embeddings, features, tau=0.01, tau_min=0.01, tau_alpha=0.04):
    """L_MM, and for each expert CE(X X^T / tau^X) of its modality X (App. F, the authors' code).

    The positive of an anchor is the anchor itself.

    Args:
        embeddings: {'image': I, 'text': T}, (B, D) each.
        features: {modality: (B, width)} of the experts, whose cosines give tau^X.
        tau: temperature of L_MM.
        tau_min, tau_alpha: of tau^X, as in modulated_temperature.
    Returns: {'L_MM', 'L_E-image', 'L_E-text': ()}; a missing expert has no term.
    """
    terms = {"L_MM": multimodal_loss(embeddings["image"], embeddings["text"], tau)}
    for modality, expert_features in features.items():
        pair_tau = expert_temperature(expert_features, tau_min, tau_alpha)           # (B, N)
        embedding = embeddings[modality]                                   # (B, D)
        terms[f"L_E-{modality}"] = info_nce(embedding, embedding, pair_tau)
    return terms


# ------------------------------------------------------- baselines --------------------------------
def ts_temperature(progress, tau_min=0.01, tau_max=0.05, periods=5):
    """TS (Kukleva et al. 2023): a cosine between tau_max and tau_min, `periods` times in a run."""
    return tau_min + (tau_max - tau_min) * (1 + math.cos(2 * math.pi * periods * progress)) / 2


def dystress_temperature(sim, tau_min=0.01, tau_max=0.04, shifted=False, detach=False):
    """DySTreSS (Manna et al. 2025): tau_min + (tau_max - tau_min) (1 + cos(pi (1 + s_ij))) / 2.

    Args:
        sim: cosines, any shape.
        tau_min, tau_max: temperatures at s = 0 and at s = -1 and 1.
        shifted: the phase is pi (s - 0.4) / 0.7 below s = 0.4 and 0 above: tau_max for s >= 0.4,
            falling to tau_min at s = -0.3 and rising again to tau_max at s = -1.
        detach: stop the gradient through the temperature.
    Returns: temperatures of sim's shape.
    """
    if detach:
        sim = sim.detach()
    if shifted:
        phase = math.pi * (sim - 0.4).clamp(max=0) / 0.7
    else:
        phase = math.pi * (1 + sim)
    return tau_min + (tau_max - tau_min) * (1 + torch.cos(phase)) / 2


@fp32
def dystress_loss(anchor, candidates, tau_min=0.01, tau_max=0.04, *, shifted=False, detach=False):
    """InfoNCE with the temperatures of DySTreSS in one direction: (B, D), (B, D) -> ()."""
    anchor, candidates = normalize(anchor), gather(normalize(candidates))  # (B, D), (N, D)
    target = positive_index(anchor)                                        # (B,)
    temperature = functools.partial(dystress_temperature, tau_min=tau_min, tau_max=tau_max,
                                    shifted=shifted, detach=detach)
    return per_pair_cross_entropy(
        anchor, target, candidates=candidates, temperature=temperature).mean()


def dystress_multimodal_loss(image, text, tau_min=0.01, tau_max=0.04, **options):
    """The mean of dystress_loss in both directions. options: shifted, detach."""
    image_to_text = dystress_loss(image, text, tau_min, tau_max, **options)
    text_to_image = dystress_loss(text, image, tau_min, tau_max, **options)
    return (image_to_text + text_to_image) / 2


@row_blocks
def cwcl_per_anchor(image, tau, *, candidates, images):
    """Weighted cross-entropy of each image: (b, D), tau, texts (N, D), images (N, D) -> (b,)."""
    weight = (1 + image.detach() @ images.T) / 2                           # (b, N) no gradient
    log_p = F.log_softmax(image @ candidates.T / tau, dim=1)               # (b, N)
    return -(weight * log_p).sum(1) / weight.sum(1)                        # (b,)


@fp32
def cwcl_loss(image, text, tau):
    """CWCL (Srinivasa et al. 2023): each text counts by how similar its image is to the anchor.

    L_I2T = -1/B sum_i sum_j w_ij log softmax_j(s_ij / tau) / sum_j w_ij,  L_T2I is InfoNCE,
    w_ij = (1 + <I_i, I_j>) / 2. There is no public code: that w has no gradient is our choice.

    Args:
        image, text: (B, D) embeddings of this process.
        tau: temperature > 0: a number, () or (B,).
    Returns: () mean of both directions, float32.
    """
    anchor, candidates = normalize(image), gather(normalize(text))         # (B, D), (N, D)
    images = gather(anchor.detach())                                       # (N, D)
    tau_column = per_anchor(tau, anchor)                                   # () or (B, 1)
    image_to_text = cwcl_per_anchor(anchor, tau_column, candidates=candidates, images=images).mean()
    return (image_to_text + info_nce(text, image, tau)) / 2


@row_blocks
def nt_xent_of_view(anchor, target, tau, *, same_view, other_view):
    """Mean NT-Xent of anchors of one view: (b, D), (b,), tau -> ().

    Args: same_view, other_view: (N, D), the view of the anchors and the other view.
    """
    same_sim = anchor @ same_view.T                                        # (b, N)
    other_sim = anchor @ other_view.T                                      # (b, N)
    logits = torch.cat([other_sim, same_sim], dim=1) / tau                 # (b, 2N)
    anchor_column = len(same_view) + target[:, None]                       # (b, 1)
    logits = logits.scatter(1, anchor_column, -math.inf)                   # (b, 2N)
    return F.cross_entropy(logits, target)                                 # ()


@fp32
def nt_xent(z1, z2, tau):
    """The image loss of SLIP: NT-Xent of two views, 2N - 2 negatives.

    Args:
        z1, z2: (B, D) two views of the same images.
        tau: temperature > 0: a number, () or (B,).
    Returns: () mean over both views, float32.
    """
    z1, z2 = normalize(z1), normalize(z2)                                  # (B, D)
    all_z1, all_z2 = gather(z1), gather(z2)                                # (N, D)
    tau = per_anchor(tau, z1)                                              # () or (B, 1)
    target = positive_index(z1)                                            # (B,)
    loss_1 = nt_xent_of_view(z1, target, tau, same_view=all_z1, other_view=all_z2)
    loss_2 = nt_xent_of_view(z2, target, tau, same_view=all_z2, other_view=all_z1)
    return (loss_1 + loss_2) / 2


def slip_head(width, hidden=4096, dim=256):
    """SLIP's projection head, (B, width) -> (B, dim).

    LayerNorm takes the place of its BatchNorm, so that results do not depend on processes and
    chunks.
    """
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, dim))


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, which stand in parse_args and, for the flags of all
# scripts, in contrastive/engine/flags.py. 'recipe' says whose values they are (docs/temo.md).
EMOJI = dict(
    recipe="ours",
    image_size=48, text_length=24,
    aug_hue=0.0,                                                           # captions name colours
    log_every=5, save_every=100, eval_every=70)
MOVING = EMOJI | dict(
    recipe="ours; as emoji, no mirror images: left and right are words of captions",
    image_size=32, frames=4, epochs=40.0, batch_size=128,
    flip=0.0, aug_flip=0.0, crop_min=0.8, aug_crop_min=0.5)
CC3M = dict(
    recipe="paper; optimiser, views and captions from the code",
    image_encoder="resnet50.a1_in1k", text_encoder="distilbert/distilbert-base-uncased",
    pretrained=True, embed_dim=256, projection_bias=True,
    image_size=256, image_stats="clip", eval_resize="squash",
    text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=2048, lr_end=1e-5, weight_decay=0.02, beta2=0.999, grad_clip=0.0,
    warmup_epochs=1.4,                                                     # 2,000 steps
    tau=0.01, tau_min=0.01, tau_alpha=0.04,
    crop_min=0.5, jitter=0.0, randaugment_ops=2, randaugment_magnitude=21,
    randaugment_strengths="cc3m",
    aug_crop_min=0.08, aug_blur=0.5,
    mixed_precision="bf16", eval_datasets=["cc3m", "coco", "flickr30k"],
    log_every=50, save_every=1000)
CC12M = CC3M | dict(
    recipe="paper; optimiser, views and captions from the code (SLIP)",
    # CLIP's text transformer and tokenizer, from scratch; offline: a folder with these files
    image_encoder="vit_base_patch16_224", text_encoder="openai/clip-vit-base-patch32",
    pretrained=False, embed_dim=512, projection_bias=False,
    image_size=224, image_stats="imagenet", eval_resize="crop",
    text_length=77, clean_captions=False,
    batch_size=4096, chunk_size=128, warmup_epochs=1.0, beta2=0.98, tau_clamp=[0.01, 1.0],
    image_aug="simclr", grad_augmented=True, paraphrase_anchor=False,
    flip=0.0, randaugment_ops=0, eval_datasets=["cc12m", "coco", "flickr30k"],
    class_names="clip", prompts="slip")                                    # of ImageNet
OWN = dict(recipe="ours; small towers from scratch")
FROZEN = dict(
    recipe="ours; published encoders, frozen: their projections learn",
    # the weights, and the text encoder all-MiniLM-L6-v2, are installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean", cached_views=4,
    max_steps=1000, batch_size=512, lr=3e-4, warmup_epochs=0.0, warmup_fraction=0.05,
    jitter=0.0, log_every=50)
RECIPES = {"emoji": EMOJI, "cc3m": CC3M, "cc12m": CC12M, "moving-emoji": MOVING, "own": OWN,
           "frozen": FROZEN}
# of Table 3; a and b have one term, and so no weights to blend
ROWS = {
    "a": dict(base=True, modulated=False, unimodal="none", blend="quadratic"),
    "b": dict(base=False, modulated=True, unimodal="none", blend="quadratic"),
    "c": dict(base=True, modulated=False, unimodal="plain", blend="fixed"),
    "d": dict(base=True, modulated=True, unimodal="none", blend="fixed"),
    "e": dict(base=True, modulated=True, unimodal="none", blend="quadratic"),
    "f": dict(base=True, modulated=True, unimodal="modulated", blend="fixed"),
    "g": dict(base=True, modulated=True, unimodal="modulated", blend="quadratic")}
DYSTRESS = ("dystress", "dystress-shifted")


def method_defaults(chosen):
    """Defaults that depend on --loss, --row, the experts, --recipe and --image-encoder."""
    # baselines and experts do not use Table 3's flags; those get the values of row a
    row = ""
    if chosen.loss == "temo" and not uses_experts(chosen):
        row = chosen.row
    defaults = {"row": row}
    defaults.update(ROWS.get(row, ROWS["a"]))
    if chosen.image_expert and chosen.text_expert:                         # the code's weights
        defaults.update(image_expert_weight=0.1, text_expert_weight=0.1)
    if chosen.loss == "slip":                                              # Section 4; SLIP's code
        defaults.update(tau=0.07, learnable_tau=True, tau_clamp=[0.01, 1.0])

    if chosen.recipe in ("cc3m", "cc12m"):
        if chosen.loss == "cwcl":
            defaults["tau"] = 0.05                                         # Table 1
        if chosen.loss in DYSTRESS:
            defaults["tau_alpha"] = 0.03
        if row == "b":
            defaults["tau_alpha"] = 0.05
    if chosen.recipe == "cc3m":
        defaults.update(cc3m_defaults(chosen, row))
    if chosen.recipe == "cc12m":
        if chosen.loss == "slip" or row not in ("", "a"):
            defaults.update(lr=3e-3, weight_decay=0.1)                     # SLIP's values
        else:
            defaults.update(lr=5e-4, weight_decay=0.5)                     # those of its CLIP
    return defaults


def cc3m_defaults(chosen, row):
    """The learning rates of the code, and the size of a ViT."""
    defaults = {"lr": 8e-4}
    if chosen.loss in DYSTRESS or row in ("c", "f", "g"):
        defaults["lr"] = 2e-4
    if chosen.image_encoder.startswith("vit"):
        defaults["image_size"] = 224
    return defaults


def check_flags(parser, args):
    """Refuses flags that contradict each other."""
    low, high = args.tau_clamp
    if args.learnable_tau and not low <= args.tau <= high:
        parser.error(f"--tau {args.tau}: a learnt temperature must start within "
                     f"--tau-clamp {low} {high}")
    if args.image_expert and args.freeze in ("image", "both") and args.feature_cache != "none":
        parser.error(f"--freeze {args.freeze}: --image-expert reads pixels, in place of which a "
                     "run has features; add --feature-cache none")
    # baselines and experts do not use these flags
    has_rows = args.loss == "temo" and not uses_experts(args)
    if has_rows and not args.base and not args.modulated and args.unimodal == "none":
        parser.error("--no-base --no-modulated --unimodal none leaves no loss; keep one of "
                     "its terms")


def parse_args(argv=None):
    """Flags; their defaults follow --dataset or --recipe, --loss, --row and the experts."""
    parser = Parser(__file__, "TeMo: a temperature for each pair, multimodal and unimodal.")
    yes_or_no = argparse.BooleanOptionalAction
    method = parser.add_argument_group("method")
    method.add_argument(
        "--loss", default="temo",
        choices=["temo", "infonce", "ts", "dystress", "dystress-shifted", "cwcl", "slip"],
        help="loss: TeMo's, or that of a baseline in the paper's tables")
    method.add_argument("--tau", type=positive, default=0.1,
                        help="temperature of InfoNCE, divides the cosine; paper 0.01, CWCL 0.05, "
                             "SLIP 0.07 at the start")
    method.add_argument("--learnable-tau", action=yes_or_no, default=False,
                        help="learn the temperature of InfoNCE, from --tau on")
    method.add_argument("--tau-clamp", type=positive, nargs=2, default=[0.001, 0.5],
                        metavar=("LOW", "HIGH"),
                        help="lowest and highest value of a learnt temperature; SLIP 0.01 1")
    method.add_argument("--tau-min", type=positive, default=0.05,
                        help="lowest temperature of a pair, and of the schedule of ts; paper 0.01")
    method.add_argument("--tau-alpha", type=nonnegative, default=0.1,
                        help="highest temperature of a pair, or of ts, minus the lowest; paper "
                             "0.04; code: row b 0.05, dystress 0.03")
    method.add_argument("--detach-tau", action=yes_or_no, default=False,
                        help="stop the gradient through the temperature of a pair")
    method.add_argument("--similarity", choices=["shifted", "cosine"], default="shifted",
                        help="similarity of a pair in Eq. 4: (1 + cosine) / 2 (code), or "
                             "max(cosine, 0) (paper)")
    method.add_argument("--row", choices=list(ROWS), default="g",
                        help="row of the paper's Table 3; sets --base --modulated --unimodal "
                             "--blend, on cc3m and cc12m also --lr --weight-decay --tau-alpha; "
                             "the paper's method is g")
    method.add_argument("--base", action=yes_or_no,
                        help="InfoNCE between images and texts, L_MM, is in the loss (Table 3: "
                             "Base)")
    method.add_argument("--modulated", action=yes_or_no,
                        help="InfoNCE between images and texts with a temperature for each pair, "
                             "L_M-MM, is in the loss (Table 3: Mod.)")
    method.add_argument("--unimodal", choices=["none", "plain", "modulated"],
                        help="InfoNCE between images and their views, and between texts and their "
                             "paraphrases (Table 3: U.L.): none, at --tau, or with a temperature "
                             "for each pair")
    method.add_argument("--blend", choices=["quadratic", "fixed"],
                        help="weights of L_MM and of the other terms: (1-t)^2 and t^2, where t is "
                             "the progress of training, 0..1; or 0.5 and 0.5")
    method.add_argument("--image-expert", default="",
                        help="frozen DINO whose cosines set the temperatures (App. F): a "
                             "transformers id or folder; empty = none; paper DINOv2-Small")
    method.add_argument("--text-expert", default="",
                        help="frozen text encoder whose cosines set the temperatures (App. F): a "
                             "transformers id or folder; empty = none; paper all-roberta-large-v1")
    method.add_argument("--image-expert-weight", type=nonnegative, default=0.6,
                        help="weight of the term of --image-expert; code 0.6, with two experts 0.1")
    method.add_argument("--text-expert-weight", type=nonnegative, default=0.4,
                        help="weight of the term of --text-expert; code 0.4, with two experts 0.1")
    method.add_argument("--expert-inputs", choices=["clean", "training"], default="clean",
                        help="what the experts read: the whole image and the caption as "
                             "--clean-captions has it (code), or the view of I and the caption as "
                             "it is")
    method.add_argument("--expert-pooling", choices=["cls", "patches"], default="cls",
                        help="features of --image-expert: class token (code), or mean of the "
                             "patches (paper)")

    views = parser.add_argument_group("view of I")
    views.add_argument("--crop-min", type=part, default=0.35,
                       help="smallest crop as a share of the image's area, 0..1; CC3M code 0.5")
    views.add_argument("--flip", type=part, default=0.5,
                       help="share of views that are mirrored, 0..1; SLIP 0")
    views.add_argument("--jitter", type=part, default=0.4,
                       help="strength of changes in brightness, contrast and saturation, 0..1, in "
                            "80 %% of the views")
    views.add_argument("--randaugment-ops", type=whole, default=0,
                       help="operations of RandAugment, each with probability 1/2; CC3M code 2; "
                            "0 = off")
    views.add_argument("--randaugment-magnitude", type=between(0, 30, int), default=0,
                       help="strength of RandAugment, 0..30, beside --randaugment-ops; at 0 only "
                            "AutoContrast and Equalize of torchvision's change anything; CC3M "
                            "code 21 (7 of its 10)")
    views.add_argument("--randaugment-strengths", choices=["torchvision", "cc3m"],
                       default="torchvision",
                       help="strengths at 30: torchvision's; or the CC3M code's, shifts by 10 "
                            "pixels, light and sharpness times 1.9, grey outside")

    augmented = parser.add_argument_group("I~ and T~ of the unimodal terms, and SLIP's views")
    augmented.add_argument("--grad-augmented", action=yes_or_no, default=False,
                           help="let the gradient pass through I~ and T~, too (CC12M code; CC3M "
                                "code: no)")
    augmented.add_argument("--image-aug", choices=["same", "simclr", "crop"], default="same",
                           help="view I~ of an image: a second draw of the view of I (CC3M code), "
                                "SimCLR's view (CC12M code), or a crop alone")
    augmented.add_argument("--paraphrases", default="", metavar="FILE",
                           help="paraphrases of captions for T~ and, with "
                                "--paraphrase-anchor, T: JSON lines of tools/paraphrase.py; paper: "
                                "five of each caption")
    augmented.add_argument("--paraphrase-anchor", action=yes_or_no, default=True,
                           help="with --paraphrases, draw T from the caption and its paraphrases "
                                "(CC3M code); --no-paraphrase-anchor: T is the caption (CC12M "
                                "code)")
    augmented.add_argument("--aug-crop-min", type=part, default=0.2,
                           help="SimCLR's view: smallest crop as a share of the area, 0..1; SimCLR "
                                "0.08")
    augmented.add_argument("--aug-flip", type=part, default=0.5,
                           help="SimCLR's view: share that is mirrored, 0..1; SimCLR 0.5")
    augmented.add_argument("--aug-jitter", type=part, default=0.4,
                           help="SimCLR's view: strength of changes in brightness, contrast and "
                                "saturation, 0..1, in 80 %% of the views; SLIP 0.4")
    augmented.add_argument("--aug-hue", type=between(0, 0.5), default=0.1,
                           help="SimCLR's view: strength of changes in hue, 0..0.5; SLIP 0.1")
    augmented.add_argument("--aug-blur", type=part, default=0.0,
                           help="SimCLR's view: share that is blurred, 0..1; SimCLR 0.5")
    choosers = ("--loss", "--row", "--image-expert", "--text-expert")
    return parser.parse(argv, RECIPES, method_defaults, choosers, check_flags)


# ------------------------------------------------------- what the flags amount to -----------------
# These functions read a flag only if it has an effect: a run warns of flags that nothing has read.
def uses_experts(args):
    """Whether the temperatures come from frozen encoders (App. F)."""
    return args.loss == "temo" and bool(args.image_expert or args.text_expert)


def uses_tau(args):
    """Whether a term of the loss is at --tau; ts, DySTreSS and row b have none."""
    if args.loss == "ts" or args.loss in DYSTRESS:
        return False
    if args.loss != "temo" or uses_experts(args):
        return True
    return args.base or args.unimodal == "plain"


def uses_augmented(args):
    """Whether the loss has I~ and T~."""
    return args.loss == "temo" and not uses_experts(args) and args.unimodal != "none"


def row_options(args):
    """Keywords of term_weights: what Table 3 varies."""
    options = dict(base=args.base, modulated=args.modulated, unimodal=args.unimodal)
    if args.base and (args.modulated or args.unimodal != "none"):
        options["blend"] = args.blend
    return options


def pair_options(args):
    """Keywords of temo_loss for Eq. 4; none if no term has a temperature for each pair."""
    if not args.modulated and args.unimodal != "modulated":
        return {}
    return dict(tau_min=args.tau_min, tau_alpha=args.tau_alpha, detach=args.detach_tau,
                similarity=args.similarity)


# ======================================================= main =====================================
def main(args):  # noqa: C901, PLR0912
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    # before any process group, so that errors come quickly
    train, evals = open_data(args)
    # a CLIP as --image-encoder is the text encoder as well
    args = common.fit_to_encoder(args)
    # the batch and the epochs of a user's small data
    args = common.fit_to_data(args, train)
    steps = common.count_steps(args, train)        # per epoch, in total, of the warm-up
    augmented = uses_augmented(args)
    paraphrases = None
    paraphrase_anchor = False
    if augmented and args.paraphrases:
        paraphrases = Paraphrases(args.paraphrases)
        paraphrase_anchor = args.paraphrase_anchor
    run = Run(__file__, args, train, evals, steps, RECIPES)

    # ------------------------------------------- model and optimiser ------------------------------
    tower, tokenizer, transform = common.build_towers(args, train, run)
    # parameters of the loss; they stand outside DDP and are saved
    loss_modules = nn.ModuleDict()
    if uses_tau(args):
        limits = args.tau_clamp if args.learnable_tau else None
        loss_modules["tau"] = Temperature(args.tau, limits)
    if args.loss == "slip":
        loss_modules["head"] = slip_head(tower.vision.width)
    loss_modules.to(run.device)
    experts = {}
    if uses_experts(args):
        if args.image_expert:
            experts["image"] = Expert(args.image_expert, "image", transform, run.device,
                                      precision=args.mixed_precision,
                                      pooling=args.expert_pooling)
        if args.text_expert:
            experts["text"] = Expert(args.text_expert, "text", transform, run.device,
                                     precision=args.mixed_precision)
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
    encode_inputs = functools.partial(encode, model, slip=args.loss == "slip")
    chunks = common.Chunks(encode_inputs, model, run.accelerator, args.chunk_size)

    # ------------------------------------------- views and batches --------------------------------
    views = [anchor_view(args)]
    if augmented:
        views.append(candidate_view(args))
    if args.loss == "slip":
        views += [simclr_view(args), simclr_view(args)]
    num_tower_views = len(views)
    if "image" in experts and args.expert_inputs == "clean":
        views.append(Augment(args.image_size, squash=True))                # the whole image
    draw_texts = functools.partial(
        text_pair, paraphrases=paraphrases, templates=train.templates, second=augmented,
        paraphrase_anchor=paraphrase_anchor)                               # T and T~
    # features of frozen encoders (--freeze), which are computed once
    cache = common.open_feature_cache(args, run, tower, tokenizer, transform, draw_texts)
    tokenizer = cache.tokenizer
    batches = run.batches(views, transform, cache)

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(tower, tokenizer, transform, evals, train, device=run.device,
                          args=args)
    lines = {}
    if augmented:
        lines["texts"] = text_words(train, paraphrases, paraphrase_anchor, run.remark)
    # half way, where every term has a weight; with experts they are the same all along
    weights = loss_weights(args, 0.5)
    if "L_MM" in weights and len(weights) > 1:
        # in the progress bar, since the whole loss is a sum of terms, whose weights may change
        run.loss_column = "L_MM"
    run.begin(evaluator, random_guess(args), lines)
    if run.step == 0:
        save_similarities(run)                                             # for Figs. 4 and 5
    # listed once, since a walk through all modules takes milliseconds
    clipped_parameters = [*tower.parameters(), *loss_modules.parameters()]
    for batch in batches:
        progress = run.step / steps.total                                  # t of Eq. 8
        run.set_lr(common.learning_rate(run.step, steps, args))

        texts, texts_aug = draw_texts(batch["captions"], batch["draws"])
        tower_views = batch["views"][:num_tower_views]                     # (B, [T,] 3, S, S) each
        inputs = inputs_of(tower_views, texts, texts_aug, tokenizer, run.device)
        if augmented and not args.grad_augmented:
            # I~ and T~ come first: BatchNorm may not change between I and its backward
            inputs, inputs_aug = split_augmented(inputs)
            embeddings_aug = chunks.encode_without_gradient(inputs_aug)    # I~, T~: (B, D)
            embeddings = chunks.encode(inputs) + embeddings_aug            # I, T, I~, T~: (B, D)
        else:
            embeddings = chunks.encode(inputs)                             # I, T[, I~, T~]: (B, D)
        image, text = embeddings[:2]

        if args.loss == "ts":
            tau = ts_temperature(progress, args.tau_min, args.tau_min + args.tau_alpha)
        elif uses_tau(args):
            tau = loss_modules["tau"]()                                    # a number or ()
        else:
            # Each pair has its own. The log has their mean (log_columns), or this lowest one if the
            # unimodal terms are alone.
            tau = args.tau_min

        features = {}
        if experts:
            if args.expert_inputs == "clean":
                texts = tokenizer.cleaned(texts)
            # the last view is the whole image, or that of I
            features = expert_features(experts, batch["views"][-1], texts)           # (B, width)
            terms = expert_terms({"image": image, "text": text}, features, tau, args.tau_min,
                                 args.tau_alpha)
            loss = sum(weights[name] * terms[name] for name in weights)
        elif args.loss == "temo":
            image_aug, text_aug = embeddings[2:] or (None, None)           # (B, D)
            loss = temo_loss(image, text, image_aug, text_aug, progress, tau, **row_options(args),
                             **pair_options(args))
        elif args.loss in ("infonce", "ts"):
            loss = multimodal_loss(image, text, tau)
        elif args.loss in DYSTRESS:
            loss = dystress_multimodal_loss(
                image, text, args.tau_min, args.tau_min + args.tau_alpha,
                shifted=args.loss == "dystress-shifted", detach=args.detach_tau)
        elif args.loss == "cwcl":
            loss = cwcl_loss(image, text, tau)
        elif args.loss == "slip":
            loss = multimodal_loss(image, text, tau)
            z1, z2 = [loss_modules["head"](x) for x in embeddings[2:]]     # (B, 256)
            # SLIP's weight is 1, its temperature 0.1
            loss = loss + nt_xent(z1, z2, 0.1)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")

        run.check_finite(loss, tau, embeddings)
        chunks.backward(loss)                                              # of the full batch
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            run.accelerator.clip_grad_norm_(clipped_parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if "tau" in loss_modules:
            loss_modules["tau"].clamp()
        columns = {}
        if run.due("log", run.step + 1):
            columns = log_columns(embeddings, features, tau, run)
        run.done(batch, loss, tau, columns)                                # count, log, save, stop

    # ------------------------------------------- save and evaluate --------------------------------
    tower.spec["evaluation"] = vars(evaluation_facts(args))                # for eval.py
    return run.finish(draw)


# ------------------------------------------------------- views and encoders -----------------------
def anchor_view(args):
    """The view of I."""
    randaugment = (0, 0)                                                   # off
    if args.randaugment_ops:
        randaugment = (args.randaugment_ops, args.randaugment_magnitude,
                       args.randaugment_strengths)
    return Augment(args.image_size, args.crop_min, args.flip, jitter_p=0.8, brightness=args.jitter,
                   contrast=args.jitter, saturation=args.jitter, randaugment=randaugment,
                   squash=args.eval_resize == "squash")


def candidate_view(args):
    """The view of I~ (--image-aug)."""
    if args.image_aug == "same":
        return anchor_view(args)
    if args.image_aug == "simclr":
        return simclr_view(args)
    if args.image_aug == "crop":
        return Augment(args.image_size, args.crop_min, squash=args.eval_resize == "squash")
    raise ValueError(f"--image-aug {args.image_aug} has no view here")


def simclr_view(args):
    """The strong view of SimCLR and SLIP."""
    return Augment(args.image_size, args.aug_crop_min, args.aug_flip, jitter_p=0.8,
                   brightness=args.aug_jitter, contrast=args.aug_jitter, saturation=args.aug_jitter,
                   hue=args.aug_hue, grey=0.2, blur=args.aug_blur,
                   squash=args.eval_resize == "squash")


def inputs_of(views, texts, texts_aug, tokenizer, device):
    """The inputs of the encoders: pixels of all views, and tokens of T and T~.

    Args:
        views: (B, [T,] 3, S, S) each: of I and I~, or of I and SLIP's two; of a frozen encoder
            features (B, [T,] width).
        texts: B texts T.
        texts_aug: B texts T~, or an empty list.
        tokenizer: of the text encoder.
        device: for the tokens; the pixels are there.
    Returns: {'pixels': {view: (B, [T,] 3, S, S)}, 'tokens': {text: {name: (B, L)}}}, numbered from
        0; view 0 is I, text 0 is T.
    """
    B = len(texts)
    all_tokens = tokenizer(texts + texts_aug)                              # (B, L) or (2B, L) each
    tokens = {0: {name: x[:B].to(device) for name, x in all_tokens.items()}}
    if texts_aug:
        tokens[1] = {name: x[B:].to(device) for name, x in all_tokens.items()}
    return {"pixels": dict(enumerate(views)), "tokens": tokens}


def split_augmented(inputs):
    """The inputs of I and T, number 0 of inputs_of, and those of I~ and T~, number 1."""
    inputs_anchor = {kind: {0: pair[0]} for kind, pair in inputs.items()}
    inputs_aug = {kind: {1: pair[1]} for kind, pair in inputs.items()}
    return inputs_anchor, inputs_aug


def encode(model, inputs, slip=False):
    """Encodes all views and texts in one forward.

    Args:
        model: the towers.
        inputs: as inputs_of returns them, of b examples.
        slip: whether views 1 and 2 are SLIP's.
    Returns: (b, D) each: I, T; or I~, T~; or I, T, I~, T~. With slip: I, T and the features
        (b, width) of views 1 and 2.
    """
    from accelerate.utils import concatenate
    pixels = list(inputs["pixels"].values())                               # (b, [T,] 3, S, S) each
    texts = list(inputs["tokens"].values())
    tokens = {}
    for name in texts[0]:
        tokens[name] = torch.cat([text[name] for text in texts])           # (b, L) or (2b, L)
    image, text, features = model(concatenate(pixels), tokens)
    if slip:
        _, features_1, features_2 = features.chunk(3)                      # (b, width)
        return image.chunk(3)[0], text, features_1, features_2
    embeddings = []
    for pair in zip(image.chunk(len(pixels)), text.chunk(len(texts)), strict=True):
        embeddings += pair                                                 # (b, D) each
    return tuple(embeddings)


def expert_features(experts, pixels, texts):
    """The features of the experts, from pixels and texts: {modality: (B, width)}."""
    features = {}
    if "image" in experts:
        features["image"] = experts["image"](pixels)
    if "text" in experts:
        features["text"] = experts["text"](texts)
    return features


# ------------------------------------------------------- banner and log ---------------------------
def loss_weights(args, progress):
    """The weights of the terms at t = progress, {term: weight}.

    A baseline counts as one loss of about ln N, under the name L_MM.
    """
    if args.loss != "temo":
        return {"L_MM": 1.0}
    if not uses_experts(args):
        return term_weights(progress, **row_options(args))
    weights = {"L_MM": 1.0}
    if args.image_expert:
        weights["L_E-image"] = args.image_expert_weight
    if args.text_expert:
        weights["L_E-text"] = args.text_expert_weight
    return weights


def random_guess(args):
    """The loss at the start and at the end of training if all cosines are equal.

    None if it is unknown: with experts, and for a loss that a fork adds.
    """
    if args.loss not in ("temo", "infonce", "ts", "cwcl", "slip", *DYSTRESS):
        return None
    if uses_experts(args):
        # the positive of an expert's term is the anchor itself: not ln N
        return None
    guesses = []
    for progress in (0, 1):
        guess = sum(loss_weights(args, progress).values()) * math.log(args.batch_size)
        if args.loss == "slip":
            guess += math.log(2 * args.batch_size - 1)
        guesses.append(guess)
    return guesses


def evaluation_facts(args):
    """What eval.py has to know of a run."""
    tau = args.tau if uses_tau(args) else None
    return EvaluationFacts(tau=tau, learnable_tau=args.learnable_tau,
                           knn_features=args.knn_features)


@torch.no_grad()
def log_columns(embeddings, features, tau, run):
    """Columns of the log: terms of the loss, health of the space, temperatures of pairs (Fig. 2).

    Args:
        embeddings: I, T, and with augmented views I~, T~, (B, D) each.
        features: {modality: (B, width)} of the experts.
        tau: temperature of the step, a number or ().
        run: the Run.
    """
    args = run.args
    image, text = embeddings[:2]
    terms = {}                                                             # without weights
    if features:
        terms = expert_terms({"image": image, "text": text}, features, tau, args.tau_min,
                             args.tau_alpha)
    elif args.loss == "temo":
        image_aug, text_aug = embeddings[2:] or (None, None)               # (B, D)
        terms = temo_terms(image, text, image_aug, text_aug, names=list(loss_weights(args, 0.5)),
                           tau=tau, **pair_options(args))
    elif args.loss in ("infonce", "ts", "slip"):
        terms = {"L_MM": multimodal_loss(image, text, tau)}
    columns = common.mean_over_processes(terms, run.device)
    image, text = gather(normalize(image)), gather(normalize(text))        # (N, D)
    columns.update(common.embedding_health(image, text))

    # at most 2,048 rows, for memory
    sim = image[:2048] @ text[:2048].T                                     # (n, n)
    if args.loss in DYSTRESS:
        pair_tau = dystress_temperature(sim, args.tau_min, args.tau_min + args.tau_alpha,
                                        args.loss == "dystress-shifted")   # (n, n)
    elif "L_M-MM" in loss_weights(args, 0.5):
        pair_tau = modulated_temperature(sim, args.tau_min, args.tau_alpha,
                                         similarity=args.similarity)       # (n, n)
    else:
        return columns
    n = len(pair_tau)
    tau_pos = pair_tau.diagonal().mean().item()
    columns["tau_pos"] = tau_pos
    columns["tau_neg"] = (pair_tau.sum().item() - n * tau_pos) / max(1, n * n - n)
    if not uses_tau(args):
        columns["tau"] = pair_tau.mean().item()
    return columns


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
