r"""TeMo with experts (App. F): frozen encoders say how similar two images, or two texts, are.

Beside InfoNCE, each modality X with an expert has a term whose temperatures come from the cosines
of the expert's features of the batch. The positive of an anchor is the anchor itself.

Equations (s^X_ij: cosine of the expert's features of examples i and j)
    tau^X_ij = tau_min + tau_alpha sqrt((1 + s^X_ij) / 2)        expert_temperature
    L = L_MM + w_I CE(I I^T / tau^I) + w_T CE(T T^T / tau^T)     expert_loss, authors' code
        CE: mean cross-entropy of the rows, whose targets are on the diagonal

Commands
    accelerate launch -m variants.temo_experts --dataset cc3m --image-expert facebook/dinov2-small
    accelerate launch -m variants.temo_experts --dataset cc3m \
        --text-expert sentence-transformers/all-roberta-large-v1

docs/temo.md has both experts' commands (Tables 9 and 10) and the differences from the paper. `main`
is that of ../temo.py but for the experts and their loss; the rest is imported.
"""

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, Expert, GradCache, Parser, Run, Temperature, clean_exit, fp32,
    gather, nonnegative_float, normalize, positive_float)
from temo import info_nce, modulated_temperature, multimodal_loss

import torch


# ======================================================= METHOD ===================================
@fp32
def expert_temperature(features, tau_min=0.01, tau_alpha=0.04):
    """tau^X from the features of an expert: (B, width) -> (B, N), without gradient."""
    features = normalize(features.detach())                                # (B, width)
    return modulated_temperature(features @ gather(features).T, tau_min, tau_alpha)


def expert_loss(  # noqa: PLR0917
        image, text, image_features, text_features, tau=0.01, tau_min=0.01, tau_alpha=0.04, *,
        image_weight=0.6, text_weight=0.4, terms=None):
    """InfoNCE between images and texts, and a term for each expert.

    Args:
        image, text: (B, D) embeddings I, T of this process.
        image_features, text_features: (B, width) of the experts, None without one.
        tau: temperature of L_MM.
        tau_min, tau_alpha: of tau^X, as in modulated_temperature.
        image_weight, text_weight: weights w_I and w_T.
        terms: dict that receives the terms by their names, for the log.
    Returns: (), float32.
    """
    multimodal = multimodal_loss(image, text, tau)
    losses = {"L_MM": multimodal}
    total = multimodal
    if image_features is not None:
        image_tau = expert_temperature(image_features, tau_min, tau_alpha)               # (B, N)
        image_loss = info_nce(image, image, image_tau)
        losses["L_E-image"] = image_loss
        total = total + image_weight * image_loss
    if text_features is not None:
        text_tau = expert_temperature(text_features, tau_min, tau_alpha)                 # (B, N)
        text_loss = info_nce(text, text, text_tau)
        losses["L_E-text"] = text_loss
        total = total + text_weight * text_loss
    if terms is not None:
        terms.update(losses)
    return total


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here and in contrastive/engine/flags.py; 'source'
# says whose values they are (docs/temo.md).
SMALL = dict(tau=0.1, tau_min=0.05, tau_alpha=0.1, crop_min=0.35, jitter=0.4)
EMOJI = SMALL | dict(
    source="ours; small encoders from scratch",
    image_size=48, text_length=24, log_every=5, save_every=100, eval_every=70)
CC3M = dict(
    source="paper; optimiser, views and captions from the code",
    image_encoder="resnet50.a1_in1k", text_encoder="distilbert/distilbert-base-uncased",
    pretrained=True, embed_dim=256, projection_bias=True,
    image_size=256, image_stats="clip", eval_resize="squash",
    text_length=30, text_pooling="cls", clean_captions=True,
    epochs=30.0, batch_size=2048, lr=8e-4, lr_end=1e-5, weight_decay=0.02,
    betas=[0.9, 0.999], grad_clip=0.0,
    warmup_fraction=1.4 / 30,                                              # 2,000 steps
    randaugment=[2, 21],
    mixed_precision="bf16", eval_datasets=["cc3m", "coco", "flickr30k"],
    log_every=50, save_every=1000)
OWN = SMALL | dict(source="ours; small encoders from scratch")
RECIPES = {"emoji": EMOJI, "cc3m": CC3M, "own": OWN}


def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "TeMo with temperatures from frozen encoders.",
                    needs="--text-expert sentence-transformers/all-MiniLM-L6-v2")
    method = parser.add_argument_group("method")
    method.add_argument("--image-expert", default="",
                        help="frozen DINO: a transformers id or folder; empty = none; paper "
                             "DINOv2-Small")
    method.add_argument("--text-expert", default="",
                        help="frozen text encoder: a transformers id or folder; empty = none; "
                             "paper all-roberta-large-v1")
    method.add_argument("--image-expert-weight", type=nonnegative_float, default=0.6,
                        help="weight of the term of --image-expert; code 0.6, with two experts 0.1")
    method.add_argument("--text-expert-weight", type=nonnegative_float, default=0.4,
                        help="weight of the term of --text-expert; code 0.4, with two experts 0.1")
    method.add_argument("--expert-inputs", choices=["clean", "training"], default="clean",
                        help="what the experts read: clean, the whole image and the caption, "
                             "cleaned if --clean-captions is on (code); training, the view of I "
                             "and the caption as it is in the data")
    method.add_argument("--expert-pooling", choices=["cls", "patches"], default="cls",
                        help="features of --image-expert: class token (code), or mean of the "
                             "patches (paper)")
    parser.add_tau_flags(method, tau=0.01, tau_clamp=[0.001, 0.5], note="paper 0.01")
    method.add_argument("--tau-min", type=positive_float, default=0.01,
                        help="lowest temperature of a pair")
    method.add_argument("--tau-alpha", type=nonnegative_float, default=0.04,
                        help="highest minus lowest temperature of a pair")
    parser.add_view_flags(crop_min=0.5, flip=0.5, jitter=0.0, randaugment=True)
    parser.add_cc3m_flags()
    parser.add_frozen_flags()
    return parser.parse(argv, RECIPES, check=check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    parser.require(args.image_expert or args.text_expert,
                   "--image-expert, --text-expert: give one of them, or both; without an expert "
                   "the loss is that of temo.py --baseline")
    parser.only(args.image_expert, "with --image-expert", "--image-expert-weight",
                "--expert-pooling")
    parser.only(args.text_expert, "with --text-expert", "--text-expert-weight")
    parser.check_tau_flags(args)
    keeps_features = args.freeze in ("image", "both") and args.feature_cache != "none"
    parser.require(not args.image_expert or not keeps_features,
                   f"--freeze {args.freeze}: --image-expert reads pixels, in place of which a run "
                   "has features; add --feature-cache none")


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

    # ------------------------------------------- model, experts, optimizer ------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    # outside DDP: average_gradients does for it what DDP does for the model
    temperature = Temperature(args.tau, args.learnable_tau, args.tau_clamp).to(accelerator.device)
    image_expert, text_expert = None, None
    if args.image_expert:
        image_expert = Expert(args.image_expert, "image", transform, accelerator.device,
                              precision=args.mixed_precision, pooling=args.expert_pooling)
    if args.text_expert:
        text_expert = Expert(args.text_expert, "text", transform, accelerator.device,
                             precision=args.mixed_precision)
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
    views = [common.training_view(args, jitter_p=0.8)]                     # I
    if image_expert and args.expert_inputs == "clean":
        views.append(common.Augment(args.image_size, squash=True))         # the whole image
    # with --freeze, features of the frozen encoders, computed once, replace pixels and tokens
    cache = common.open_feature_cache(args, run, raw_model, tokenizer, transform)
    tokenizer = cache.tokenizer
    batches = run.batches(views, transform, cache)

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args)
    run.start(evaluator, shown=("L_MM", "loss", "tau"))
    if run.step == 0:                                                      # for similarities.png
        common.save_similarities(run.val_pieces, run.folder / "similarity_before.json")
    # "views": (B, [T,] 3, S, S) each; "captions": B lists; "draws": (B, 32) random numbers in 0..1,
    # which choose texts
    for batch in batches:
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        image, text, _ = grad_cache.encode(                                # (B, D)
            pixels=batch["views"][0], tokens=tokenizer(texts))

        image_features, text_features = None, None
        if image_expert:
            expert_pixels = batch["views"][-1]                             # (B, [T,] 3, S, S)
            image_features = image_expert(expert_pixels)                   # (B, width)
        if text_expert:
            if args.expert_inputs == "clean":
                texts = tokenizer.clean_texts(texts)
            text_features = text_expert(texts)                             # (B, width)

        tau = temperature()
        terms = {}                                                         # for the log
        loss = expert_loss(                                                # ()
            image, text, image_features, text_features, tau, args.tau_min, args.tau_alpha,
            image_weight=args.image_expert_weight, text_weight=args.text_expert_weight,
            terms=terms)

        accelerator.backward(loss)
        common.average_gradients(temperature.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, {"tau": tau, **terms}, [image, text])

    # ------------------------------------------- save and evaluate --------------------------------
    return run.finish(figures="temo")


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
