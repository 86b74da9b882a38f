"""TeMo: Temperature Modulation for Multimodal Contrastive Learning (anonymous, under review).

Two encoders map images I and texts T, and a second view I~ and T~ of each, into one space. InfoNCE
at a low, fixed temperature pushes all negatives apart. TeMo adds three losses in which each pair
has its own temperature: it grows with the similarity of the pair, so that similar items are pushed
apart less. A quadratic schedule moves the weight from InfoNCE to these losses during training.

Equations (s_ij: cosine of anchor i and candidate j; t: progress of training, 0..1)
    (1, 2)  NCE(X, Y; tau) = -mean_i log( exp(s_ii / tau) / sum_j exp(s_ij / tau) )     info_nce
    (3)     L_MM = 1/2 [ NCE(I, T; tau) + NCE(T, I; tau) ], without the          multimodal_loss
            second sum that is printed
    (4)     tau_ij = tau_min + tau_alpha sqrt(s_ij); authors' code         modulated_temperature
            and here: (1 + s_ij) / 2 in place of s_ij
    (5)     L_M-I2I = NCE(I, I~; tau_ij), L_M-T2T = NCE(T, T~; tau_ij)           info_nce
    (6, 7)  L_M-MM = 1/2 [ NCE(I, T; tau_ij) + NCE(T, I; tau_ij) ]               multimodal_loss
    (8)     L = (1-t)^2 L_MM + t^2 (L_M-MM + L_M-I2I + L_M-T2T)                  temo_loss

Symbols
    I, T                  image, text             (B, D)  embeddings of this process
    I~, T~                image_aug, text_aug     (B, D)  second view of I; paraphrase of T
    tau                   tau                     ()      divides the cosine; paper 0.01
    tau_ij                tau_ij                  (b, N)  cosines of b anchors -> temperatures
    tau_min, tau_alpha    tau_min, tau_alpha      ()      lowest tau_ij, range; paper 0.01, 0.04
    t                     progress                ()      optimiser step / all steps

Commands
    accelerate launch temo.py                                      # emoji, 2 minutes on two cores
    accelerate launch temo.py --dataset cc3m --paraphrases p.jsonl # the paper's run
    accelerate launch temo.py --dataset cc3m --row e --lr 8e-4     # a row of the paper's Table 3
    accelerate launch temo.py --dataset captions.csv               # own data: image, caption
    accelerate launch temo.py --baseline                           # InfoNCE; T is a caption

docs/temo.md: commands for every table, recipes, differences from the paper, results; variants:
variants/temo_experts.py, slip.py. To try an idea, copy this file and edit it (docs/forking.md).
"""

import argparse
import functools

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, GradCache, Paraphrases, Parser, Run, Temperature, clean_exit, cwcl_loss,
    dystress_temperature, fp32, gather, nonnegative_float, normalize, one_number, per_anchor,
    positive_float, positive_index, row_blocks, ts_temperature)

import torch
import torch.nn.functional as F


# ======================================================= METHOD ===================================
# row_blocks saves memory and changes no value: it calls the function with b rows of the positional
# tensors at a time, and with all of the keyword arguments
@row_blocks
def info_nce_per_anchor(anchor, target, tau, *, candidates):
    """Eq. 1 of each anchor: (b, D), (b,), tau, (N, D) -> (b,)."""
    sim = anchor @ candidates.T                                            # (b, N)
    if callable(tau):
        tau = tau(sim)                                                     # (b, N)
    return F.cross_entropy(sim / tau, target, reduction="none")            # (b,)


@fp32
def info_nce(anchor, candidates, tau):
    """InfoNCE of anchors against the candidates of the global batch (Eqs. 1, 2, 5 and 6).

    Args:
        anchor, candidates: (B, D) embeddings of this process; row i of both is a positive pair.
        tau: temperature > 0: a number, (), (B,) for each anchor or (B, N) for each pair; or a
            function of the cosines, (b, N) -> (b, N).
    Returns: () mean over the anchors of this process, float32. A random guess is about ln N.
    """
    anchor, candidates = normalize(anchor), normalize(candidates)          # (B, D) each
    target = positive_index(anchor, candidates)                            # (B,)
    # gather sums the gradient over processes and DDP averages it: together they give that of the
    # mean over all N anchors
    candidates = gather(candidates)                                        # (N, D)
    # one tau for each anchor becomes a column, which divides the anchor's row of cosines
    tau = per_anchor(tau, anchor, columns=len(candidates))
    return info_nce_per_anchor(anchor, target, tau, candidates=candidates).mean()


def multimodal_loss(image, text, tau):
    """The mean of InfoNCE in both directions: L_MM (Eq. 3), or L_M-MM with tau_ij (Eqs. 6 and 7).

    Args: tau: as in info_nce, except (B, N), which belongs to one direction.
    """
    if torch.is_tensor(tau) and tau.ndim > 1:
        raise ValueError(f"tau: a tensor of shape {tuple(tau.shape)} belongs to one direction; "
                         "give a number, a tensor of shape () or (B,), or a function")
    return (info_nce(image, text, tau) + info_nce(text, image, tau)) / 2


def modulated_temperature(sim, tau_min=0.01, tau_alpha=0.04, detach=False, shifted=True):
    """tau_ij (Eq. 4), with (1 + s_ij) / 2 in place of s_ij as the authors' code has it.

    Args:
        sim: cosines, any shape.
        tau_min: lowest temperature, > 0.
        tau_alpha: highest temperature minus the lowest, >= 0.
        detach: stop the gradient through the temperature.
        shifted: True: (1 + s_ij) / 2 under the root; False: s_ij, as printed, with negative
            cosines as 1e-8.
    Returns: temperatures of sim's shape, higher for similar pairs.
    """
    if detach:
        sim = sim.detach()
    if shifted:
        sim = (1 + sim) / 2                                                # 0..1
    # without the clamp the gradient of the root is infinite at 0
    return tau_min + tau_alpha * sim.clamp(min=1e-8).sqrt()


def temo_loss(  # noqa: PLR0917
        image, text, image_aug, text_aug, progress, tau=0.01, tau_min=0.01, tau_alpha=0.04, *,
        base=True, modulated=True, unimodal="modulated", blend="quadratic",
        detach=False, shifted=True, terms=None):
    """The loss of Algorithm 1; Table 3 varies which terms there are, and their weights.

    Args:
        image, text: (B, D) embeddings I, T of this process.
        image_aug, text_aug: (B, D) embeddings I~, T~, with or without gradient; None with
            unimodal='none'.
        progress: t = step / all steps, 0..1.
        tau: temperature of InfoNCE: a number, () or (B,) for each anchor.
        tau_min, tau_alpha, detach, shifted: as in modulated_temperature.
        base, modulated: whether L_MM and L_M-MM are in the loss.
        unimodal: 'none', 'plain' (L_I2I, L_T2T at tau) or 'modulated' (L_M-I2I, L_M-T2T).
        blend: 'quadratic' or 'fixed', 1/2 each; without L_MM, or with one term, all weights are 1.
        terms: dict that receives the terms by their names, for the log.
    Returns: (), float32.
    """
    # one for each anchor would be added to the wrong axis of the cosines
    tau_min = one_number(tau_min, "tau_min")
    if unimodal in ("plain", "modulated") and (image_aug is None or text_aug is None):
        raise ValueError(f"unimodal={unimodal!r} needs image_aug and text_aug; give them, or "
                         "unimodal='none'")

    def tau_ij(sim):                                                       # Eq. 4
        return modulated_temperature(sim, tau_min, tau_alpha, detach, shifted)

    losses = {}
    if base:
        losses["L_MM"] = multimodal_loss(image, text, tau)                 # Eq. 3
    if modulated:
        losses["L_M-MM"] = multimodal_loss(image, text, tau_ij)            # Eqs. 6, 7
    if unimodal == "modulated":
        losses["L_M-I2I"] = info_nce(image, image_aug, tau_ij)             # Eq. 5
        losses["L_M-T2T"] = info_nce(text, text_aug, tau_ij)               # Eq. 5
    elif unimodal == "plain":
        losses["L_I2I"] = info_nce(image, image_aug, tau)
        losses["L_T2T"] = info_nce(text, text_aug, tau)
    elif unimodal != "none":
        raise ValueError(f"unimodal={unimodal!r}: give 'none', 'plain' or 'modulated'")
    if not losses:
        raise ValueError("no term is left: set base or modulated, or give another unimodal")
    if terms is not None:
        terms.update(losses)

    alpha, beta = blend_weights(progress, blend)                           # Eq. 8
    weights = dict.fromkeys(losses, beta)
    if base:
        weights["L_MM"] = alpha
    if not base or len(losses) == 1:  # nothing to blend
        weights = dict.fromkeys(losses, 1.0)
    return sum(weights[name] * loss for name, loss in losses.items())


def blend_weights(progress, blend="quadratic"):
    """alpha = (1-t)^2 of L_MM and beta = t^2 of all other terms (Eq. 8), or 1/2 each."""
    if not 0 <= progress <= 1:
        raise ValueError(f"progress={progress}: give step / all steps, 0..1")
    if blend == "quadratic":
        return (1 - progress) ** 2, progress ** 2
    if blend == "fixed":
        return 0.5, 0.5
    raise ValueError(f"blend={blend!r}: give 'quadratic' or 'fixed'")


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here and in contrastive/engine/flags.py. Two
# entries are for the banner: 'source' says whose values they are, 'baseline_rates' which rates the
# paper's baseline has (docs/temo.md).
SMALL = dict(tau=0.1, tau_min=0.05, tau_alpha=0.1, crop_min=0.35, jitter=0.4, aug_crop_min=0.2,
             aug_blur=0.0)
EMOJI = SMALL | dict(
    source="ours",
    image_size=48, text_length=24,
    aug_hue=0.0,                                                           # captions name colours
    log_every=5, save_every=100, eval_every=70)
MOVING = EMOJI | dict(
    source="ours; as emoji, no mirror images: left and right are words of captions",
    image_size=32, frames=4, epochs=40.0, warmup_fraction=2 / 40, batch_size=128,
    flip=0.0, aug_flip=0.0, crop_min=0.8, aug_crop_min=0.5)
CC3M = dict(
    source="paper; optimiser, views and captions from the code",
    image_encoder="resnet50.a1_in1k", text_encoder="distilbert/distilbert-base-uncased",
    pretrained=True, embed_dim=256, projection_bias=True,
    image_size=256, image_stats="clip", eval_resize="squash",
    text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=2048, lr=2e-4, lr_end=1e-5, weight_decay=0.02,
    betas=[0.9, 0.999], grad_clip=0.0,
    warmup_fraction=1.4 / 30,                                              # 2,000 steps
    baseline_rates="--lr 8e-4",
    randaugment=[2, 21],
    mixed_precision="bf16", eval_datasets=["cc3m", "coco", "flickr30k"],
    log_every=50, save_every=1000)
CC12M = CC3M | dict(
    source="paper; optimiser, views and captions from the code (SLIP)",
    # CLIP's text transformer and tokenizer, from scratch; offline: a folder with these files
    image_encoder="vit_base_patch16_224", text_encoder="openai/clip-vit-base-patch32",
    pretrained=False, embed_dim=512, projection_bias=False,
    image_size=224, image_stats="imagenet", eval_resize="crop",
    text_length=77, clean_captions=False,
    batch_size=4096, chunk_size=128, lr=3e-3, weight_decay=0.1, betas=[0.9, 0.98],
    warmup_fraction=1 / 30,
    baseline_rates="--lr 5e-4 --weight-decay 0.5",
    tau_clamp=[0.01, 1.0],
    image_aug="simclr", grad_augmented=True, paraphrase_anchor=False,
    flip=0.0, randaugment=[0, 0], eval_datasets=["cc12m", "coco", "flickr30k"],
    class_names="clip", prompts="slip")                                    # of ImageNet
OWN = SMALL | dict(source="ours; small encoders from scratch")
FROZEN = SMALL | dict(
    source="ours; published encoders, frozen: their projections learn",
    # these weights and the text encoder, all-MiniLM-L6-v2, come with installed packages
    image_encoder="tf_efficientnet_lite0", pretrained=True, freeze="both", embed_dim=256,
    image_size=128, text_pooling="mean",
    max_steps=1000, batch_size=512, lr=3e-4, warmup_fraction=0.05,
    jitter=0.0, log_every=50)
RECIPES = {"emoji": EMOJI, "cc3m": CC3M, "cc12m": CC12M, "moving-emoji": MOVING, "own": OWN,
           "frozen": FROZEN}
# arguments of temo_loss for the rows of Table 3 (--row); a and b have one term, without a weight
ROWS = {
    "a": dict(base=True, modulated=False, unimodal="none"),
    "b": dict(base=False, modulated=True, unimodal="none"),
    # the paper does not print the weights of c: 1/2 each is our choice
    "c": dict(base=True, modulated=False, unimodal="plain", blend="fixed"),
    "d": dict(base=True, modulated=True, unimodal="none", blend="fixed"),
    "e": dict(base=True, modulated=True, unimodal="none", blend="quadratic"),
    "f": dict(base=True, modulated=True, unimodal="modulated", blend="fixed"),
    "g": dict(base=True, modulated=True, unimodal="modulated", blend="quadratic")}
BASELINE = dict(loss="infonce")
LOSSES = ["temo", "infonce", "ts", "dystress", "dystress-shifted", "cwcl"]


# Flags that all scripts share are in contrastive/engine/flags.py. Precedence: default < recipe
# (--dataset, --recipe) < preset (--baseline) < saved flags of --resume < command line.
def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "TeMo: a temperature for each pair, multimodal and unimodal.")
    yes_or_no = argparse.BooleanOptionalAction
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=LOSSES, default="temo",
                        help="TeMo, or a baseline in the paper's tables")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, InfoNCE, with everything else equal; T "
                             "is then the caption alone: sets --loss infonce")
    parser.add_tau_flags(method, tau=0.01, tau_clamp=[0.001, 0.5], note="paper 0.01, CWCL 0.05")
    method.add_argument("--tau-min", type=positive_float, default=0.01,
                        help="lowest temperature of a pair (--loss ts: of the schedule)")
    method.add_argument("--tau-alpha", type=nonnegative_float, default=0.04,
                        help="highest minus lowest temperature of a pair (--loss ts: of the "
                             "schedule); code: row b 0.05, dystress 0.03")
    method.add_argument("--detach-tau", action=yes_or_no, default=False,
                        help="stop the gradient through the temperature of a pair")
    method.add_argument("--similarity", choices=["shifted", "cosine"], default="shifted",
                        help="similarity of a pair in Eq. 4: (1 + cosine) / 2 (code), or "
                             "max(cosine, 0) (paper)")
    method.add_argument("--row", choices=list(ROWS), default="g",
                        help="row of the paper's Table 3, whose terms and weights the loss has: a "
                             "is InfoNCE, g TeMo; docs/temo.md has all")

    augmented = parser.add_argument_group("I~ and T~")
    augmented.add_argument("--grad-augmented", action=yes_or_no, default=False,
                           help="let the gradient pass through I~ and T~, too (CC12M code; CC3M "
                                "code: no)")
    augmented.add_argument("--image-aug", choices=["same", "simclr", "crop"], default="same",
                           help="I~: a second draw of the view of I (CC3M code), SimCLR's view "
                                "(CC12M code), or a crop alone")
    augmented.add_argument("--paraphrases", default="", metavar="FILE",
                           help="paraphrases of captions for T~ and, with --paraphrase-anchor, T: "
                                "JSON lines of tools/paraphrase.py; paper: five of each caption")
    augmented.add_argument("--paraphrase-anchor", action=yes_or_no, default=True,
                           help="with --paraphrases, draw T from the caption and its paraphrases "
                                "(CC3M code); no: T is the caption (CC12M code)")
    parser.add_view_flags(crop_min=0.5, flip=0.5, jitter=0.0, randaugment=True)
    parser.add_simclr_view_flags()
    parser.add_cc3m_flags()
    parser.add_frozen_flags()
    return parser.parse(argv, RECIPES, BASELINE, check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    is_temo = args.loss == "temo"
    has_tau_ij = pair_temperature(args) is not None
    unimodal = has_unimodal_terms(args)
    parser.require(not args.baseline or args.loss == "infonce",
                   f"--loss {args.loss}: --baseline is --loss infonce; leave out one of the two")
    parser.only(is_temo, "with --loss temo", "--row")
    parser.only(uses_tau(args), "with --loss infonce, cwcl, or temo and any --row but b",
                "--tau", "--learnable-tau")
    parser.check_tau_flags(args)
    parser.only(has_tau_ij or args.loss == "ts",
                "with --loss ts, dystress, dystress-shifted, or temo and any --row but a and c",
                "--tau-min", "--tau-alpha")
    parser.only(has_tau_ij,
                "with --loss dystress, dystress-shifted, or temo and any --row but a and c",
                "--detach-tau")
    parser.only(has_tau_ij and is_temo, "with --loss temo and any --row but a and c",
                "--similarity")
    parser.only(unimodal, "with --loss temo and --row c, f or g", *parser.flags_of("I~ and T~"))
    parser.only(unimodal and args.image_aug == "simclr", "with --image-aug simclr",
                *parser.flags_of("SimCLR's view"))
    parser.only(args.paraphrases, "with --paraphrases", "--paraphrase-anchor")


def uses_tau(args):
    """Whether a term of the loss is InfoNCE at --tau."""
    if args.loss == "temo":
        return ROWS[args.row]["base"]
    return args.loss in ("infonce", "cwcl")


def has_unimodal_terms(args):
    """Whether the loss reads I~ and T~."""
    return args.loss == "temo" and ROWS[args.row]["unimodal"] != "none"


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

    # ------------------------------------------- views and texts ----------------------------------
    unimodal = has_unimodal_terms(args)
    views = [common.training_view(args, jitter_p=0.8)]                     # I; 0.8 as SimCLR
    paraphrases = None
    if unimodal:
        views.append(common.training_view(args, args.image_aug, jitter_p=0.8))           # I~
        if args.paraphrases:
            paraphrases = Paraphrases(args.paraphrases)
    draw_texts = functools.partial(                                        # T and T~
        common.text_pair, paraphrases=paraphrases, templates=train.templates, augment=unimodal,
        paraphrase_anchor=args.paraphrase_anchor)
    # with --freeze, features of the frozen encoders, computed once, replace pixels and tokens
    cache = common.open_feature_cache(args, run, raw_model, tokenizer, transform, draw_texts)
    tokenizer = cache.tokenizer
    batches = run.batches(views, transform, cache)

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args)
    banner_lines = {}
    if unimodal:
        banner_lines["texts"] = common.describe_texts(
            train, paraphrases, args.paraphrase_anchor, args.recipe_source)
    tau_ij = pair_temperature(args)            # for the log; None if all pairs have one temperature
    run.start(evaluator, shown=("L_MM", "loss", "tau", "tau_pos"), **banner_lines)
    if run.step == 0:                                                      # for Figs. 4 and 5
        common.save_similarities(run.val_pieces, run.folder / "similarity_before.json")
    # "views": (B, [T,] 3, S, S) each; "captions": B lists; "draws": (B, 32) random numbers in 0..1,
    # which choose texts
    for batch in batches:
        progress = run.step / steps.total                                  # t of Eq. 8
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        # B captions each; no T~ for a loss without unimodal terms
        texts, texts_aug = draw_texts(batch["captions"], batch["draws"])
        tokens, tokens_aug = common.tokenize_pair(tokenizer, texts, texts_aug)
        image_aug, text_aug = None, None
        if unimodal:
            with torch.set_grad_enabled(args.grad_augmented):
                image_aug, text_aug, _ = grad_cache.encode(                # (B, D)
                    pixels=batch["views"][1], tokens=tokens_aug)
        image, text, _ = grad_cache.encode(                                # (B, D)
            pixels=batch["views"][0], tokens=tokens)

        tau = temperature()
        log_row = {}
        if args.loss == "temo":
            loss = temo_loss(                                              # ()
                image, text, image_aug, text_aug, progress, tau, **modulation_flags(args),
                **ROWS[args.row], terms=log_row)
        else:
            loss, tau = baseline_loss(args, image, text, tau, progress)

        accelerator.backward(loss)
        common.average_gradients(temperature.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()

        if uses_tau(args) or args.loss == "ts":
            log_row["tau"] = tau
        if tau_ij and run.logs_next():
            log_row.update(mean_temperatures(image, text, tau_ij))
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [image, text])

    # ------------------------------------------- save and evaluate --------------------------------
    return run.finish(figures="temo")


# ------------------------------------------------------- baselines and log ------------------------
def baseline_loss(args, image, text, tau, progress):
    """The loss of a baseline (--loss), and its temperature: a number, () or the function tau_ij."""
    if args.loss == "cwcl":
        return cwcl_loss(image, text, tau), tau
    if args.loss == "ts":
        tau = ts_temperature(progress, args.tau_min, args.tau_min + args.tau_alpha)
    elif args.loss in ("dystress", "dystress-shifted"):
        tau = pair_temperature(args)
    elif args.loss != "infonce":
        raise ValueError(f"--loss {args.loss} has no branch in baseline_loss")
    return multimodal_loss(image, text, tau), tau


def pair_temperature(args):
    """tau_ij of images and texts, a function of the cosines; None if all pairs have one tau."""
    if args.loss in ("dystress", "dystress-shifted"):
        return functools.partial(
            dystress_temperature, tau_min=args.tau_min, tau_max=args.tau_min + args.tau_alpha,
            shifted=args.loss == "dystress-shifted", detach=args.detach_tau)
    if args.loss == "temo" and ROWS[args.row]["modulated"]:
        return functools.partial(modulated_temperature, **modulation_flags(args))
    return None


def modulation_flags(args):
    """The flags of Eq. 4, as arguments of temo_loss and of modulated_temperature."""
    return dict(tau_min=args.tau_min, tau_alpha=args.tau_alpha, detach=args.detach_tau,
                shifted=args.similarity == "shifted")


@torch.no_grad()
def mean_temperatures(image, text, tau_ij):
    """Mean tau_ij of positive and of negative pairs (Fig. 2): {'tau_pos', 'tau_neg': ()}.

    Of the first 2,048 examples of the global batch, for memory.
    """
    image, text = gather(normalize(image))[:2048], gather(normalize(text))[:2048]    # (n, D)
    temperatures = tau_ij(image @ text.T)                                  # (n, n)
    n = len(temperatures)
    tau_pos = temperatures.diagonal().mean()
    tau_neg = (temperatures.sum() - n * tau_pos) / max(1, n * n - n)
    return {"tau_pos": tau_pos, "tau_neg": tau_neg}


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
