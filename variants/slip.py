"""SLIP (Mu et al. 2022), a baseline of TeMo's Table 2: InfoNCE, and NT-Xent between two views.

    L = L_MM(I, T; tau) + NT-Xent(h(f(I1)), h(f(I2)); 0.1)     slip_loss, nt_xent, slip_head

I1 and I2 are two strong views (SimCLR's) of the image, f(I1) are the features of the image encoder
before the projection, h is a head on them. docs/temo.md lists the differences from SLIP's code.
`main` is that of ../temo.py but for the head and the two strong views; the rest is imported.

    accelerate launch -m variants.slip --dataset cc12m
"""

import functools
import math

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, clean_exit, fp32, gather,
    nonnegative_float, normalize, per_anchor, positive_float, positive_index, row_blocks)
from temo import multimodal_loss

import torch
import torch.nn as nn
import torch.nn.functional as F


# ======================================================= METHOD ===================================
# row_blocks saves memory and changes no value: it calls the function with b rows of the positional
# tensors at a time, and with all of the keyword arguments
@row_blocks
def nt_xent_of_view(anchor, target, tau, *, same_view, other_view):
    """NT-Xent of each anchor of one view: (b, D), (b,), tau -> (b,).

    Args: same_view, other_view: (N, D), the view of the anchors and the other view.
    """
    same_sim = anchor @ same_view.T                                        # (b, N)
    other_sim = anchor @ other_view.T                                      # (b, N)
    logits = torch.cat([other_sim, same_sim], dim=1) / tau                 # (b, 2N)
    anchor_column = len(same_view) + target[:, None]                       # (b, 1)
    logits = logits.scatter(1, anchor_column, -math.inf)                   # (b, 2N)
    return F.cross_entropy(logits, target, reduction="none")               # (b,)


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
    target = positive_index(z1, z2)                                        # (B,)
    loss_1 = nt_xent_of_view(z1, target, tau, same_view=all_z1, other_view=all_z2)
    loss_2 = nt_xent_of_view(z2, target, tau, same_view=all_z2, other_view=all_z1)
    return (loss_1.mean() + loss_2.mean()) / 2


def slip_head(width, hidden=4096, dim=256):
    """SLIP's projection head, (B, width) -> (B, dim).

    LayerNorm takes the place of its BatchNorm, so that results do not depend on processes and
    chunks.
    """
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, dim))


def slip_loss(image, text, z1, z2, tau, *, image_tau=0.1, image_weight=1.0, terms=None):
    """L_MM + image_weight * NT-Xent.

    Args:
        image, text: (B, D) embeddings I, T of this process.
        z1, z2: (B, dim) outputs of slip_head for both strong views.
        tau, image_tau: temperatures of L_MM and of NT-Xent.
        image_weight: weight of NT-Xent.
        terms: dict that receives both terms, for the log.
    Returns: (), float32.
    """
    multimodal = multimodal_loss(image, text, tau)
    images = nt_xent(z1, z2, image_tau)
    if terms is not None:
        terms.update({"L_MM": multimodal, "L_image": images})
    return multimodal + image_weight * images


def encode_views(model, views, tokens):
    """I, T (b, D) and the features of I1 and I2 (b, width), in one forward of the image encoder.

    Args: views: of I, I1 and I2, (b, [T,] 3, S, S) each.
    """
    images, text, features = model(torch.cat(views), tokens)               # images, features: 3b
    image, _, _ = images.chunk(3)                                          # (b, D)
    _, features_1, features_2 = features.chunk(3)                          # (b, width)
    return image, text, features_1, features_2


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here and in contrastive/engine/flags.py; 'source'
# says whose values they are (docs/temo.md).
SMALL = dict(crop_min=0.35, jitter=0.4, aug_crop_min=0.2, aug_blur=0.0)
EMOJI = SMALL | dict(
    source="ours; small encoders from scratch",
    image_size=48, text_length=24,
    aug_hue=0.0,                                                           # captions name colours
    log_every=5, save_every=100, eval_every=70)
CC12M = dict(
    source="SLIP's code; epochs as TeMo's CC12M, bf16",
    # CLIP's text transformer and tokenizer, from scratch; offline: a folder with these files
    image_encoder="vit_base_patch16_224", text_encoder="openai/clip-vit-base-patch32",
    embed_dim=512, image_size=224, image_stats="imagenet", text_length=77,
    epochs=30.0, batch_size=4096, chunk_size=128, lr=3e-3, lr_end=1e-5, weight_decay=0.1,
    grad_clip=0.0, warmup_fraction=1 / 30,
    flip=0.0,
    mixed_precision="bf16", eval_datasets=["cc12m", "coco", "flickr30k"],
    class_names="clip", prompts="slip",                                    # of ImageNet
    log_every=50, save_every=1000)
OWN = SMALL | dict(source="ours; small encoders from scratch")
RECIPES = {"emoji": EMOJI, "cc12m": CC12M, "own": OWN}


def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "SLIP: InfoNCE, and NT-Xent between two views of the image.")
    method = parser.add_argument_group("method")
    method.add_argument("--tau", type=positive_float, default=0.07,
                        help="temperature of InfoNCE at the start; it is learnt; SLIP 0.07")
    method.add_argument("--tau-clamp", type=positive_float, nargs=2, default=[0.01, 1.0],
                        metavar=("LOW", "HIGH"),
                        help="lowest and highest value of the temperature; SLIP 0.01 1")
    method.add_argument("--image-tau", type=positive_float, default=0.1,
                        help="temperature of NT-Xent; SLIP 0.1")
    method.add_argument("--image-weight", type=nonnegative_float, default=1.0,
                        help="weight of NT-Xent; SLIP 1")
    parser.add_view_flags(crop_min=0.5, flip=0.5, jitter=0.0)
    parser.add_simclr_view_flags()
    return parser.parse(argv, RECIPES)


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
    temperature = Temperature(args.tau, learnable=True, limits=args.tau_clamp)
    head = slip_head(model.vision.width)
    loss_modules = nn.ModuleList([temperature, head]).to(accelerator.device)
    optimizer = common.make_optimizer([model, loss_modules], args)
    parameters = [*model.parameters(), *loss_modules.parameters()]

    # >>> shared: prepare (the same lines in all scripts)
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # without DDP
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    if args.compile:
        model = torch.compile(model)
    # <<< shared
    run.resume(raw_model, optimizer, tau=temperature, head=head)           # no-op without --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size,            # encodes in chunks
                           functools.partial(encode_views, model))

    # ------------------------------------------- views --------------------------------------------
    view = common.training_view(args, jitter_p=0.8)                        # I
    strong = common.simclr_view(args)                                      # I1 and I2
    batches = run.batches([view, strong, strong], transform)

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args)
    run.start(evaluator, shown=("L_MM", "L_image", "tau"))
    # "views": (B, [T,] 3, S, S) each; "captions": B lists; "draws": (B, 32) random numbers in 0..1,
    # which choose texts
    for batch in batches:
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))
        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        image, text, features_1, features_2 = grad_cache.encode(           # (B, D), (B, width)
            views=batch["views"], tokens=tokenizer(texts))

        tau = temperature()
        terms = {}                                                         # for the log
        loss = slip_loss(                                                  # ()
            image, text, head(features_1), head(features_2), tau, image_tau=args.image_tau,
            image_weight=args.image_weight, terms=terms)

        accelerator.backward(loss)
        common.average_gradients(loss_modules.parameters())
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
