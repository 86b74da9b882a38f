"""TeMo: Temperature Modulation for Multimodal Contrastive Learning (anonymous, under review).

A batch of images I and texts T and their augmentations I~ and T~ go through two encoders into one space. The standard image-text
InfoNCE at a low fixed temperature pushes every negative apart. Beside it stand losses in which each pair of the similarity matrix has
a temperature of its own, growing with the pair's similarity, so that look-alikes are pushed less: one between the modalities, one inside each.
A quadratic scheduler moves the weight from the first to the others over training: coarse separation first, local structure later.
No further parameters, no further heads; the encoders see each example twice.

Equations, s_ij = cosine, rows = anchors, all candidates of the global batch in the denominator (t = step / steps):
    (1)  I(x_a, X; tau) = -log( exp(s_ap / tau_ap) / sum_k exp(s_ak / tau_ak) )                 info_nce
    (2)  L_I2I~ = 1/N sum_i I(I_i, I~; tau),  the same for texts                               info_nce
    (3)  L_MM   = 1/2 [ 1/N sum_i I(I_i, T; tau) + 1/N sum_i I(T_i, I; tau) ]                   multimodal_loss
    (4)  tau_ij = lambda(x_i, y_j) = tau_min + tau_alpha sqrt(s_ij)                             modulated_temperature
    (5)  L_M-I2I, L_M-T2T: (2) with tau_ij from (4), anchors I (T), candidates I~ (T~)          modulated_loss
    (6)  L_M-I2T, L_M-T2I: one direction of (3) with tau_ij from (4)                            modulated_loss
    (7)  L_M-MM = 1/2 (L_M-I2T + L_M-T2I)                                                       modulated_multimodal_loss
    (8)  L = (1-t)^2 L_MM + t^2 (L_M-MM + L_M-I2I + L_M-T2T)                                    temo_loss

    symbol          variable                  shape     unit and paper value
    I, T            image, text               (B, D)    this process's embeddings, normalised inside the losses
    I~, T~          image_aug, text_aug       (B, D)    SimCLR-like view; paraphrase
    tau             tau                       ()        divides the cosine; 0.01
    tau_ij          tau                       (B, N)    tau_min .. tau_min + tau_alpha = 0.01 .. 0.05
    tau_min         tau_min                   ()        0.01         tau_alpha  tau_alpha  ()  0.04
    t               progress                  ()        0..1, optimiser step / all steps

Commands:
    accelerate launch temo.py                                                     # emoji, three minutes on two CPU cores
    accelerate launch temo.py --dataset cc3m                                      # the paper's run, ResNet-50 + DistilBERT, batch 2048
    accelerate launch temo.py --dataset cc3m --chunk-size 64                      # the same gradient on a small card
    accelerate launch temo.py --dataset captions.csv                              # own data: columns image, caption
    torchrun --nproc_per_node 2 temo.py --cpu                                     # two processes without a GPU
    python temo.py --loss infonce                                                 # a baseline; --loss ts|dystress|dystress-shifted|cwcl|slip

Differences from the paper (there is no authors' code):
 1. Eq. 3 as printed sums an average again; we follow Algorithm 1: 1/2 (L_I2T + L_T2I), each a mean over the batch.
 2. Eq. 4 takes the root of a cosine, which may be negative: tau_ij = tau_min there. The root sees at least 1e-8, so gradients are finite.
 3. Whether a gradient flows through tau_ij is not said. "As a proxy" reads as no: detached by default, --no-detach-tau for the other.
 4. The augmentation of images is not given: SimCLR's (SLIP's) values, every strength a flag. I itself has the CC3M trainer's view.
 5. Without --paraphrases the texts T~ come from other captions, templates (emoji) or word dropout and swap; the banner says which.
 6. The learning rate follows a cosine per step; the CC3M trainer changes it per epoch.
 7. Crops are antialiased bilinear (the CC3M trainer: bicubic); RandAugment is torchvision's, on the trainer's operations and probability.
 8. Appendix F does not say which losses the experts serve: here the image expert sets the tau_ij of L_M-I2I, the text expert of L_M-T2T.
 9. --loss slip has LayerNorm, not BatchNorm, in its projection head, so that every promise about processes and chunks holds.
10. --loss dystress-shifted: the shifted form is not printed anywhere; (1 + s) / 2 in place of s is our reading.
"""

import argparse
import math
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import UserError, by_rows, fp32, gather, normalize, positive_index, say

# Defaults by data set. 'paper': Section 4 and the appendix; 'base code': the CC3M trainer TeMo builds on (Qiu et al. 2024) or SLIP;
# 'ours': tuned on the validation split. Flags override. A data set that is not here takes 'own'.
CC3M = dict(
    recipe="paper; optimiser, views and captions from the base code", image_encoder="resnet50.tv_in1k", text_encoder="distilbert/distilbert-base-uncased",
    pretrained=True, embed_dim=256, image_size=256, text_length=30, text_pooling="cls", image_stats="clip", eval_resize="squash", clean_captions=True,
    epochs=30.0, batch_size=2048, lr=2e-4, lr_end=1e-5, warmup_epochs=1.4, weight_decay=0.02, beta2=0.999, grad_clip=0.0,  # warm-up: 2,000 steps of 1,420
    tau=0.01, tau_min=0.01, tau_alpha=0.04, crop_min=0.5, flip=0.5, randaugment_ops=2, randaugment_magnitude=21, jitter=0.0,
    aug_crop_min=0.08, aug_brightness=0.4, aug_contrast=0.4, aug_saturation=0.4, aug_hue=0.1, aug_blur=0.5, mixed_precision="bf16", streaming=True,
    eval_datasets=["cc3m", "coco", "flickr30k"], log_every=50, save_every=1000, eval_every=0)
CC12M = CC3M | dict(
    recipe="paper; optimiser and views from the base code (SLIP)", image_encoder="vit_base_patch16_224", text_encoder="distilbert/distilbert-base-uncased",
    pretrained=False, image_size=224, image_stats="imagenet", eval_resize="crop", batch_size=4096, lr=3e-3, warmup_epochs=1.0, weight_decay=0.1, beta2=0.98, randaugment_ops=0, eval_datasets=["cc12m", "coco", "flickr30k"])
EMOJI = dict(
    recipe="ours", image_encoder="small", text_encoder="small", pretrained=False, embed_dim=128, image_size=48, text_length=24, text_pooling="mean",
    image_stats="half", eval_resize="crop", clean_captions=False, epochs=24.0, batch_size=256, lr=2e-3, lr_end=2e-5, warmup_epochs=2.0, weight_decay=0.1, beta2=0.98,
    grad_clip=1.0, tau=0.1, tau_min=0.05, tau_alpha=0.1, crop_min=0.35, flip=0.5, randaugment_ops=0, randaugment_magnitude=0, jitter=0.4,
    aug_crop_min=0.2, aug_brightness=0.4, aug_contrast=0.4, aug_saturation=0.4, aug_hue=0.0, aug_blur=0.0, mixed_precision="no", streaming=False,  # hue names things here
    eval_datasets=[], log_every=5, save_every=100, eval_every=70)
RECIPES = {"emoji": EMOJI, "cc3m": CC3M, "cc12m": CC12M, "own": EMOJI | dict(recipe="ours; small towers from scratch", image_size=64, text_length=32, aug_hue=0.1, log_every=10, eval_every=0, save_every=500),
           "moving-emoji": EMOJI | dict(recipe="ours; as emoji, no mirror images: left and right are words of the captions", image_size=32, frames=4, flip=0.0, epochs=40.0, batch_size=128, crop_min=0.8, aug_crop_min=0.5)}
LOSSES = {"slip": dict(tau=0.07, learnable_tau=True)}  # SLIP's own start (paper, Section 4)


def parse_args(argv=None):
    """Flags in two stages: --dataset, --loss and --resume choose the defaults, the rest overrides them."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default="emoji"), first.add_argument("--loss", default="temo"), first.add_argument("--resume", default="")
    chosen, _ = first.parse_known_args(argv)
    yesno = argparse.BooleanOptionalAction
    p = common.Parser(prog="temo.py", description="TeMo: per-pair temperature, multimodal and unimodal.", allow_abbrev=False,
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
    g.add_argument("--dataset", default="emoji", help="emoji, moving-emoji, cc3m, cc12m, any other name of common.HUB or common.VIDEO; or a folder, csv, tsv, jsonl, parquet, tar, or hub id (org/name)")
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
    g.add_argument("--text-pooling", choices=["cls", "mean"], default="cls", help="of a transformers text encoder; CC3M trainer: cls")
    g.add_argument("--embed-dim", type=int, default=256, help="D, width of the common space")
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
    g.add_argument("--loss", choices=["temo", "infonce", "ts", "dystress", "dystress-shifted", "cwcl", "slip"], default="temo", help="TeMo or a baseline of its tables")
    g.add_argument("--tau", type=float, default=0.01, help="temperature of L_MM and of the baselines, > 0; paper 0.01, SLIP starts at 0.07")
    g.add_argument("--learnable-tau", action=yesno, default=False, help="learn tau (infonce, slip, cwcl)")
    g.add_argument("--tau-clamp", type=float, nargs=2, default=[0.001, 0.5], metavar=("LOW", "HIGH"), help="limits of a learnable tau")
    g.add_argument("--tau-min", type=float, default=0.01, help="lowest modulated temperature, > 0; paper 0.01. ts, dystress: their lowest as well")
    g.add_argument("--tau-alpha", type=float, default=0.04, help="range of the modulated temperature, >= 0; paper 0.04")
    g.add_argument("--base", action=yesno, default=True, help="L_MM in the loss (Table 3: Base)")
    g.add_argument("--modulated", action=yesno, default=True, help="L_M-MM in the loss (Table 3: Mod.)")
    g.add_argument("--unimodal", choices=["none", "plain", "modulated"], default="modulated", help="unimodal losses (Table 3: U.L.); plain = at --tau")
    g.add_argument("--blend", choices=["quadratic", "fixed"], default="quadratic", help="weights (1-t)^2, t^2; or 0.5, 0.5, and 1 where one part is alone")
    g.add_argument("--detach-tau", action=yesno, default=True, help="no gradient through the per-pair temperature")
    g.add_argument("--ts-periods", type=int, default=5, help="periods of the cosine temperature of --loss ts; paper 5")
    g.add_argument("--slip-weight", type=float, default=1.0, help="weight of SLIP's image loss")
    g.add_argument("--slip-tau", type=float, default=0.1, help="temperature of SLIP's image loss, > 0")
    g.add_argument("--slip-hidden", type=int, default=4096, help="hidden width of SLIP's projection head")
    g.add_argument("--slip-dim", type=int, default=256, help="output width of SLIP's projection head")
    g.add_argument("--image-expert", default="", help="transformers id or folder (DINOv2) whose mean patch features set the tau of L_M-I2I (App. F)")
    g.add_argument("--text-expert", default="", help="transformers id or folder (all-roberta-large-v1), mean-pooled, that sets the tau of L_M-T2T (App. F)")
    g.add_argument("--loss-block", type=int, default=0, help="rows of the (B, N) matrices at a time, recomputed in backward; 0 = whole below 1 GiB")
    g = p.add_argument_group("views")
    g.add_argument("--paraphrases", default="", metavar="FILE", help="JSON lines of caption and paraphrases, for T~; paper: five PEGASUS paraphrases")
    g.add_argument("--write-paraphrases", default="", metavar="FILE", help="write that file for the training captions, then stop; continues an earlier call")
    g.add_argument("--paraphrase-model", default="tuner007/pegasus_paraphrase", help="seq2seq model or folder for --write-paraphrases")
    g.add_argument("--paraphrase-batch", type=int, default=16, help="captions at a time for --write-paraphrases")
    g.add_argument("--word-drop", type=float, default=0.1, help="probability of losing a word, where no other text exists for T~")
    g.add_argument("--word-swap", type=float, default=0.1, help="probability per word of one swap of neighbours, likewise")
    g.add_argument("--crop-min", type=float, default=0.5, help="I: smallest area of the random crop, 0..1; CC3M trainer 0.5")
    g.add_argument("--flip", type=float, default=0.5, help="I and I~: probability of a mirror image")
    g.add_argument("--jitter", type=float, default=0.0, help="I: brightness, contrast and saturation strength")
    g.add_argument("--jitter-p", type=float, default=0.8, help="I: probability of that jitter")
    g.add_argument("--randaugment-ops", type=int, default=0, help="I: RandAugment operations, each applied with probability 1/2; CC3M trainer 2; 0 = off")
    g.add_argument("--randaugment-magnitude", type=int, default=21, help="I: RandAugment magnitude, 0..30; the CC3M trainer's 7 of 10 is 21 here")
    g.add_argument("--aug-crop-min", type=float, default=0.08, help="I~: smallest area of the crop; SimCLR 0.08")
    g.add_argument("--aug-jitter-p", type=float, default=0.8, help="I~: probability of the colour jitter; SimCLR 0.8")
    g.add_argument("--aug-brightness", type=float, default=0.4, help="I~: strength; SLIP 0.4")
    g.add_argument("--aug-contrast", type=float, default=0.4, help="I~: strength; SLIP 0.4")
    g.add_argument("--aug-saturation", type=float, default=0.4, help="I~: strength; SLIP 0.4")
    g.add_argument("--aug-hue", type=float, default=0.1, help="I~: strength, 0..0.5; SLIP 0.1")
    g.add_argument("--aug-grey", type=float, default=0.2, help="I~: probability of grey; SimCLR 0.2")
    g.add_argument("--aug-blur", type=float, default=0.5, help="I~: probability of a Gaussian blur; SimCLR 0.5")
    g = p.add_argument_group("evaluation")
    g.add_argument("--eval-datasets", nargs="*", default=[], metavar="NAME[=DIR]", help="data sets of the evaluation (val and test splits), each with an optional local copy (annotations and videos); none = the training set's own")
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
    for name in ("tau", "tau_min", "slip_tau"):
        if not getattr(args, name) > 0:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be > 0; it divides the cosine")
    if not args.tau_alpha >= 0:
        p.error(f"--tau-alpha {args.tau_alpha}: must be >= 0")
    parts = ("crop_min", "flip", "jitter_p", "word_drop", "word_swap", "aug_crop_min", "aug_jitter_p", "aug_grey", "aug_blur")
    for name, high in (dict.fromkeys(parts, 1) | {"aug_hue": 0.5, "randaugment_magnitude": 30}).items():
        if not 0 <= getattr(args, name) <= high:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be between 0 and {high}")
    if args.paraphrase_batch < 1:
        p.error(f"--paraphrase-batch {args.paraphrase_batch}: must be at least 1")
    if not 0 < args.tau_clamp[0] <= args.tau <= args.tau_clamp[1] and args.learnable_tau:
        p.error(f"--tau-clamp {args.tau_clamp}: must hold 0 < LOW <= --tau ({args.tau}) <= HIGH")
    if args.loss == "temo" and not (args.base or args.modulated or args.unimodal != "none"):
        p.error("--no-base --no-modulated --unimodal none leaves no loss")
    if args.learnable_tau and args.loss not in ("infonce", "slip", "cwcl"):
        p.error(f"--learnable-tau: --loss {args.loss} has no single temperature to learn; use infonce, slip or cwcl")
    if (args.image_expert or args.text_expert) and not (args.loss == "temo" and args.unimodal == "modulated"):
        p.error("--image-expert and --text-expert set the temperatures of --loss temo --unimodal modulated")
    return args


# ======================================================= METHOD ======================================================
@fp32
def info_nce(anchor, candidates, tau, block=0):
    """InfoNCE over the global batch with a temperature for each pair (Eq. 1, averaged as in Eq. 2).

    Args:
        anchor, candidates: (B, D) this process's embeddings, any float dtype; row i of both is the positive pair.
        tau: temperature, divides the cosine, > 0: a float, (B,) per anchor, (B, N) per pair, or a function of the cosines (b, N) -> (b, N).
        block: rows at a time (0 = automatic, see common.by_rows).
    Returns: scalar fp32, mean over the B local anchors. A random guess is about ln N.
    """
    anchor, candidates = normalize(anchor), gather(normalize(candidates))  # (B, D), (N, D)
    if torch.is_tensor(tau) and tau.ndim == 1:
        tau = tau[:, None]                                                 # (B, 1)

    def rows(a, t, target):                                                # b anchors at a time
        sim = a @ candidates.T                                             # (b, N)
        logits = sim / (t(sim) if callable(t) else t)                      # (b, N)
        return F.cross_entropy(logits, target, reduction="none")           # (b,)
    return by_rows(rows, anchor, tau, positive_index(anchor), columns=len(candidates), block=block).mean()


def multimodal_loss(image, text, tau, block=0):
    """L_MM (Eq. 3, averaged as in Algorithm 1): the mean of image -> text and text -> image InfoNCE. tau as in info_nce."""
    return (info_nce(image, text, tau, block) + info_nce(text, image, tau, block)) / 2


def modulated_temperature(sim, tau_min=0.01, tau_alpha=0.04):
    """tau_ij = tau_min + tau_alpha sqrt(sim_ij) (Eq. 4): similar pairs get a higher temperature and are pushed less.

    Args: sim: cosines, any shape.   tau_min > 0, tau_alpha >= 0.
    Returns: temperatures of sim's shape; exactly tau_min where sim <= 0; the gradient is finite everywhere.
    """
    positive = sim > 0
    root = torch.where(positive, sim, torch.ones_like(sim)).clamp(min=1e-8).sqrt()  # the double where: no root of 0, no 0 * inf
    return tau_min + tau_alpha * torch.where(positive, root, torch.zeros_like(sim))


def modulated_loss(anchor, candidates, tau_min, tau_alpha, detach=True, block=0, tau=None):
    """One direction of InfoNCE with modulated temperatures (Eqs. 5 and 6): L_M-I2I, L_M-T2T, L_M-I2T or L_M-T2I.

    Args: as info_nce; detach: no gradient through tau_ij; tau: (B, N) temperatures from elsewhere (an expert) instead.
    Returns: scalar fp32.
    """
    def modulate(sim):                                                     # (b, N) -> (b, N)
        return modulated_temperature(sim.detach() if detach else sim, tau_min, tau_alpha)
    return info_nce(anchor, candidates, modulate if tau is None else tau, block)


def modulated_multimodal_loss(image, text, tau_min, tau_alpha, detach=True, block=0):
    """L_M-MM (Eq. 7): mean of both directions; the text -> image temperatures are the transpose of the image -> text ones."""
    return (modulated_loss(image, text, tau_min, tau_alpha, detach, block) + modulated_loss(text, image, tau_min, tau_alpha, detach, block)) / 2


def blend_weights(progress, blend="quadratic", base=True, others=True):
    """(alpha, beta) of Eq. 8 at t = progress: (1-t)^2 and t^2; 'fixed': 1/2 and 1/2. A part that stands alone has weight 1."""
    if not (base and others):
        return float(base), float(others)
    return ((1 - progress) ** 2, progress ** 2) if blend == "quadratic" else (0.5, 0.5)


def temo_loss(image, text, image_aug, text_aug, progress, tau=0.01, tau_min=0.01, tau_alpha=0.04, base=True, modulated=True,
              unimodal="modulated", blend="quadratic", detach=True, block=0, image_tau=None, text_tau=None):
    """L = alpha L_MM + beta (L_M-MM + L_M-I2I + L_M-T2T) (Eq. 8, Algorithm 1).

    Args:
        image, text, image_aug, text_aug: (B, D) embeddings I, T, I~, T~ of this process (the last two unused with unimodal='none').
        progress: t = step / steps, 0..1.   tau: temperature of L_MM.   tau_min, tau_alpha: Eq. 4.
        base, modulated, unimodal ('none', 'plain' at tau, 'modulated'), blend: rows a-g of Table 3.
        detach, block: as modulated_loss.   image_tau, text_tau: (B, N) temperatures of an expert for L_M-I2I, L_M-T2T (App. F).
    Returns: scalar fp32. A term of weight 0 is not computed.
    """
    alpha, beta = blend_weights(progress, blend, base, modulated or unimodal != "none")
    loss = (image.sum() + text.sum()) * 0.0                                # keeps the graph whole where a weight is 0
    if alpha:
        loss = loss + alpha * multimodal_loss(image, text, tau, block)
    if beta and modulated:
        loss = loss + beta * modulated_multimodal_loss(image, text, tau_min, tau_alpha, detach, block)
    if beta and unimodal == "modulated":
        loss = loss + beta * modulated_loss(image, image_aug, tau_min, tau_alpha, detach, block, image_tau)
        loss = loss + beta * modulated_loss(text, text_aug, tau_min, tau_alpha, detach, block, text_tau)
    if beta and unimodal == "plain":
        loss = loss + beta * (info_nce(image, image_aug, tau, block) + info_nce(text, text_aug, tau, block))
    return loss


# ------------------------------------------------------- baselines ---------------------------------------------------
def ts_temperature(progress, tau_min=0.01, tau_max=0.05, periods=5):
    """TS (Kukleva et al. 2023): tau = tau_min + (tau_max - tau_min) (1 + cos(2 pi periods t)) / 2 for t = progress; starts at tau_max."""
    return tau_min + (tau_max - tau_min) * (1 + math.cos(2 * math.pi * periods * progress)) / 2


def dystress_temperature(sim, tau_min=0.01, tau_max=0.05, shifted=False):
    """DySTreSS (Manna et al. 2025): tau_ij = tau_min + (tau_max - tau_min) (1 + cos(pi (1 + s_ij))) / 2.

    tau_min at s = 0, tau_max at s = +-1; shifted: (1 + s) / 2 in place of s, so tau_min at s = -1."""
    s = (1 + sim) / 2 if shifted else sim
    return tau_min + (tau_max - tau_min) * (1 + torch.cos(math.pi * (1 + s))) / 2


@fp32
def cwcl_loss(image, text, tau, block=0):
    """CWCL (Srinivasa et al. 2023): image -> text with every text weighted by its image's similarity, text -> image plain InfoNCE.

    L_I2T = -1/B sum_i sum_j w_ij log softmax_j(s_ij / tau) / sum_j w_ij,  w_ij = (1 + <I_i, I_j>) / 2, without gradient.
    Args: image, text (B, D); tau a float or 0-d tensor.   Returns: scalar fp32, the mean of both directions.
    """
    anchor, candidates = normalize(image), gather(normalize(text))         # (B, D), (N, D)
    images = gather(anchor.detach())                                       # (N, D)

    def rows(a, t):
        weight = (1 + a.detach() @ images.T) / 2                           # (b, N)
        log_p = F.log_softmax(a @ candidates.T / t, dim=1)                 # (b, N)
        return -(weight * log_p).sum(1) / weight.sum(1)                    # (b,)
    image_to_text = by_rows(rows, anchor, tau, columns=len(candidates), block=block).mean()
    return (image_to_text + info_nce(text, image, tau, block)) / 2


@fp32
def simclr_loss(z1, z2, tau):
    """SLIP's image loss: NT-Xent of two views over the global batch, 2N - 2 negatives. z1, z2 (B, D).   Returns: scalar fp32."""
    a, b = normalize(z1), normalize(z2)                                    # (B, D)
    all_a, all_b, target = gather(a), gather(b), positive_index(a)         # (N, D), (N, D), (B,)
    self_pair = F.one_hot(target, len(all_a)).bool()                       # (B, N)
    def one_way(x, same, other):
        others = (x @ same.T).masked_fill(self_pair, -math.inf)            # (B, N) without the anchor itself
        return F.cross_entropy(torch.cat([x @ other.T, others], 1) / tau, target)
    return (one_way(a, all_a, all_b) + one_way(b, all_b, all_a)) / 2


class SlipHead(nn.Sequential):
    """SLIP's projection of the image features: three layers, (B, width) -> (B, out). LayerNorm in place of BatchNorm."""

    def __init__(self, width, hidden, out):
        super().__init__(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, out))


# ======================================================= main ========================================================
def main(args):
    """One run: set-up, data, model, resume, loop, save, evaluate. Returns the summary."""
    # ------------------------------------------- data (before any process group: its errors are quick) ---------------
    started = time.time()
    train = common.load_data(args.dataset, "train", **common.data_options(args))
    if args.write_paraphrases:
        if int(os.environ.get("RANK", 0)):
            return None                                                    # one process writes
        device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
        captions = common.all_captions(train)
        return common.write_paraphrases(captions, args.write_paraphrases, args.paraphrase_model, batch=args.paraphrase_batch, device=device)
    eval_sets = common.evaluation_sets(args)
    paraphrases = common.Paraphrases(args.paraphrases) if args.paraphrases else None
    steps_per_epoch = common.epoch_length(train, args.batch_size)
    total = args.max_steps or max(1, round(args.epochs * steps_per_epoch))
    warmup = min(round(args.warmup_epochs * steps_per_epoch), total // 10)

    # ------------------------------------------- set-up --------------------------------------------------------------
    accelerator = common.set_up(args)
    device, processes = accelerator.device, common.world()
    folder = common.start_run(args, "temo")

    # ------------------------------------------- model and optimiser -------------------------------------------------
    tokenizer = common.build_tokenizer(args.text_encoder, args.text_length, lambda: common.all_captions(train, 200_000), folder / "tokenizer",
                                       args.clean_captions, keep=bool(args.resume))
    spec = {k: getattr(args, k) for k in ("image_encoder", "text_encoder", "embed_dim", "image_size", "text_length", "text_pooling", "image_stats", "eval_resize", "clean_captions")}
    tower, transform = common.build_model(spec, tokenizer, args.pretrained, "" if args.resume else args.init_from)
    extra = nn.ParameterDict({"log_tau": nn.Parameter(torch.tensor(math.log(args.tau)))} if args.learnable_tau else {})
    head = SlipHead(tower.vision.width, args.slip_hidden, args.slip_dim) if args.loss == "slip" else nn.Module()
    extra = nn.ModuleDict({"tau": extra, "head": head}).to(device)         # the loss's own parameters stay outside DDP
    tower = common.batchnorm_policy(tower.to(device), args)
    torch.manual_seed(args.seed + common.rank())                           # the weights are the same on all processes; dropout should not be
    optimizer = common.make_optimizer(args, [tower, extra])
    model = torch.compile(tower) if args.compile else tower
    model, optimizer = accelerator.prepare(model, optimizer)
    experts = {"image": common.Expert(args.image_expert, "image", transform, device) if args.image_expert else None,
               "text": common.Expert(args.text_expert, "text", transform, device) if args.text_expert else None}

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
    base_view = common.Augment(args.image_size, args.crop_min, args.flip, args.jitter_p, args.jitter, args.jitter, args.jitter, randaugment=(args.randaugment_ops, args.randaugment_magnitude))
    strong_view = common.Augment(args.image_size, args.aug_crop_min, args.flip, args.aug_jitter_p, args.aug_brightness, args.aug_contrast,
                                 args.aug_saturation, args.aug_hue, args.aug_grey, args.aug_blur)
    pairs = args.loss == "temo" and args.unimodal != "none"                # I~ and T~ are needed
    views = [base_view] + ([strong_view] if pairs else [strong_view, strong_view] if args.loss == "slip" else [])
    batches = common.Batches(train, views, transform, args.batch_size, args.seed, step, total, device, args.workers, args.max_bad_fraction, folder, positions, args.compile)
    highest = args.tau_min + args.tau_alpha
    common.banner("temo.py", args, RECIPES.get(args.dataset, RECIPES["own"])["recipe"], tower, extra, train, eval_sets, folder, accelerator, total, steps_per_epoch, warmup, {
        "loss": args.loss + (f" (base {args.base}, modulated {args.modulated}, unimodal {args.unimodal}, blend {args.blend})" if args.loss == "temo" else ""),
        "temperature": f"tau {args.tau}" + (", learnt" if args.learnable_tau else "") + (f"; per pair {args.tau_min} .. {highest:g}" if args.loss in ("temo", "ts", "dystress", "dystress-shifted") else ""),
        "texts T~": common.text_view_note(train, paraphrases) if pairs else "not used"})

    def encode(inputs):
        """{pixels: V x (b, 3, S, S), tokens: one or two texts} -> I, T, and I~, T~ or the features of SLIP's two views: (b, D) each."""
        pixels, tokens = list(inputs["pixels"].values()), list(inputs["tokens"].values())
        image, text, features = model(torch.cat(pixels), {k: torch.cat([t[k] for t in tokens]) for k in tokens[0]})
        images, texts = image.chunk(len(pixels)), text.chunk(len(tokens))
        if args.loss == "slip":
            return images[0], texts[0], *features.chunk(len(pixels))[1:]
        return (images[0], texts[0], images[1], texts[1]) if pairs else (images[0], texts[0])

    # ------------------------------------------- loop ----------------------------------------------------------------
    evaluator = common.Evaluator(tower, tokenizer, transform, eval_sets, train, device, args)
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
    for batch in batches:
        progress = step / total
        lr = common.cosine_lr(step, total, warmup, args.lr, args.lr_end, args.lr_schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        texts, other = common.text_pair(batch["captions"], batch["draws"], paraphrases, train.templates, args.word_drop, args.word_swap, second=pairs)
        tokens = {k: v.to(device) for k, v in tokenizer(texts + other).items()}          # (B, L) or (2B, L)
        B = len(texts)
        inputs = {"pixels": dict(enumerate(batch["views"])), "tokens": {i: {k: v[i * B:(i + 1) * B] for k, v in tokens.items()} for i in range(2 if other else 1)}}
        image_tau = text_tau = None
        if experts["image"]:
            sim = experts["image"](batch["views"][0]) @ gather(experts["image"](batch["views"][1])).T        # (B, N)
            image_tau = modulated_temperature(sim, args.tau_min, args.tau_alpha)
        if experts["text"]:
            text_tau = modulated_temperature(experts["text"](texts) @ gather(experts["text"](other)).T, args.tau_min, args.tau_alpha)

        def loss_fn(image, text, *more):
            tau = extra["tau"]["log_tau"].exp() if args.learnable_tau else args.tau
            if args.loss == "temo":
                loss = temo_loss(image, text, *(more or (None, None)), progress, tau, args.tau_min, args.tau_alpha, args.base, args.modulated,
                                 args.unimodal, args.blend, args.detach_tau, args.loss_block, image_tau, text_tau)
            elif args.loss == "cwcl":
                loss = cwcl_loss(image, text, tau, args.loss_block)
            elif args.loss == "ts":
                loss = multimodal_loss(image, text, ts_temperature(progress, args.tau_min, highest, args.ts_periods), args.loss_block)
            elif args.loss.startswith("dystress"):
                loss = multimodal_loss(image, text, pair_temperature, args.loss_block)
            else:
                loss = multimodal_loss(image, text, tau, args.loss_block)
            if args.loss == "slip":
                loss = loss + args.slip_weight * simclr_loss(extra["head"](more[0]), extra["head"](more[1]), args.slip_tau)
            common.check_finite(loss, step, tau.item() if torch.is_tensor(tau) else tau, (image, text, *more), batch["keys"])
            return loss

        def pair_temperature(sim):
            """Temperatures of --loss temo or dystress for cosines of any shape."""
            if args.loss.startswith("dystress"):
                return dystress_temperature(sim.detach() if args.detach_tau else sim, args.tau_min, highest, args.loss == "dystress-shifted")
            return modulated_temperature(sim, args.tau_min, args.tau_alpha)

        loss, embeddings = common.backward_in_chunks(encode, inputs, loss_fn, model, accelerator, args.chunk_size)
        common.average_gradients(extra.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_([*tower.parameters(), *extra.parameters()], args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if args.learnable_tau:
            extra["tau"]["log_tau"].data.clamp_(*map(math.log, args.tau_clamp))
        step += 1
        tau = extra["tau"]["log_tau"].exp().item() if args.learnable_tau else ts_temperature(progress, args.tau_min, highest, args.ts_periods) if args.loss == "ts" else args.tau

        # --------------------------------------- log, evaluate, save -------------------------------------------------
        due = common.due(step, total, args)
        if due["log"]:
            image, text = gather(normalize(embeddings[0])), gather(normalize(embeddings[1]))                 # (N, D)
            row = common.log_row(step, batch, loss, lr, tau, args, (time.perf_counter() - clock) / (step - logged), processes) | common.embedding_health(image, text)
            row["loss_mm"] = common.all_sum(multimodal_loss(*embeddings[:2], args.tau).item(), device=device)[0] / processes  # comparable along the run
            if args.loss in ("temo", "dystress", "dystress-shifted"):
                temperatures = pair_temperature(image[:2048] @ text[:2048].T)                                # (n, n), Fig. 2
                n, positive = len(temperatures), temperatures.diagonal().mean().item()
                row |= {"tau_pos": positive, "tau_neg": (temperatures.sum().item() - n * positive) / max(1, n * n - n)}
            log.write(row)
            logged, clock = step, time.perf_counter()
            bar.set_postfix(loss=f"{row['loss']:.3f}", tau=f"{row.get('tau_pos', tau):.3f}", samples=f"{row['samples_per_s']:.0f}/s", refresh=False)
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
    # >>> shared: finish
    if common.rank() == 0:
        common.save_model(folder, tower, tokenizer, spec)
    val, _, val_pieces = evaluator("val")
    test, chance, test_pieces = evaluator("test")
    log.write({"step": step, "samples_seen": step * args.batch_size, "eval": val})
    summary = common.summarize(args, folder, step, steps_per_epoch, wall_before + time.time() - started, tower, extra, batches, val, test, chance, evaluator.errors, processes)
    # <<< shared
    if common.rank() == 0:
        draw(folder, log, val_pieces or test_pieces, test_pieces, args)
    say(common.report(summary, folder))
    common.end_run(accelerator)
    return summary


def draw(folder, log, val, test, args):
    """The pictures of a run: curves, retrieval, and the paper's Figures 2 to 7. val, test: picture pieces by data set."""
    per_pair = args.loss in ("temo", "dystress", "dystress-shifted")
    common.draw_curves(log, [
        ("loss (its weights change along the run)" if args.loss == "temo" else "loss", "loss", {"the run's loss": "loss", "L_MM alone": "loss_mm"}),
        ("temperature (Fig. 2)", "mean over the batch", {"positive pairs": "tau_pos", "negative pairs": "tau_neg"} if per_pair else {"tau": "tau"}),
        ("learning rate", "lr", {"lr": "lr"}),
        ("cosine", "mean over the batch", {"positive pairs": "pos_cos", "negative pairs": "neg_cos"}),
        ("spread (0 = collapsed, 1 = whole sphere)", "std x sqrt(D)", {"images": "std_image", "texts": "std_text"}),
        ("speed", "samples per second", {"all processes": "samples_per_s"})], folder / "curves.png")
    before = common.read_json(folder / "similarity_before.json", {})
    for name in val:
        suffix = "" if name == next(iter(val)) else f"_{common.slug(name)}"
        common.draw_curves(log, [
            ("retrieval, val (Fig. 7)", "%", {f"{k}, {label}": f"eval/{name}/{way}/{k}" for way, label in (("text_to_image", "text -> image"), ("image_to_text", "image -> text")) for k in ("R@1", "R@10")}),
            ("modality gap, val (Fig. 3)", "distance of the means", {"gap": f"eval/{name}/modality_gap"}),
            ("kNN@1 of images, val (Fig. 3)", "%", {"top-1": f"eval/{name}/knn@1/top1", "mean per class": f"eval/{name}/knn@1/mean_per_class"})],
            folder / f"evaluation{suffix}.png", x="samples_seen")
        stages = ({"before training": before[name]} if name in before else {}) | {f"after {args.loss}": common.similarity_histograms(val[name])}
        common.draw_histograms(stages, folder / f"similarities{suffix}.png", f"{name} ({val[name]['data'].split}): image-text cosines (Fig. 4)")
        common.draw_pairs(val[name], folder / f"positive_pairs{suffix}.png")
    for name in test:
        common.draw_retrieval(test[name], folder / ("retrieval.png" if name == next(iter(test)) else f"retrieval_{common.slug(name)}.png"))


if __name__ == "__main__":
    with common.clean_exit():
        main(parse_args())
