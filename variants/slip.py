"""SLIP (Mu et al. 2022), a baseline of TeMo's Table 2: InfoNCE, and NT-Xent between two views.

    L = L_MM(I, T; tau) + NT-Xent(h(I1), h(I2); 0.1)     multimodal_loss, nt_xent, slip_head

I1 and I2 are two strong views (SimCLR's) of the image, h is a head on the features before the
projection. docs/temo.md lists the differences from SLIP's code. This is a copy of ../temo.py with
another loss: compare the two with diff.

    accelerate launch -m variants.slip --dataset cc12m
"""

import common

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, clean_exit, nonnegative_float,
    nt_xent, positive_float, slip_head)
from temo import multimodal_loss

import torch
import torch.nn as nn


# ======================================================= flags ====================================
EMOJI = dict(
    source="ours; small encoders from scratch",
    image_size=48, text_length=24,
    aug_hue=0.0,                                                           # captions name colours
    log_every=5, save_every=100, eval_every=70)
CC12M = dict(
    source="SLIP's code",
    # CLIP's text transformer and tokenizer, from scratch; offline: a folder with these files
    image_encoder="vit_base_patch16_224", text_encoder="openai/clip-vit-base-patch32",
    embed_dim=512, image_size=224, image_stats="imagenet", text_length=77,
    epochs=30.0, batch_size=4096, chunk_size=128, lr=3e-3, lr_end=1e-5, weight_decay=0.1,
    beta2=0.98, grad_clip=0.0, warmup_epochs=1.0,
    crop_min=0.5, flip=0.0, jitter=0.0, aug_crop_min=0.08, aug_blur=0.5,
    mixed_precision="bf16", eval_datasets=["cc12m", "coco", "flickr30k"],
    class_names="clip", prompts="slip",                                    # of ImageNet
    log_every=50, save_every=1000)
OWN = dict(source="ours; small encoders from scratch")
RECIPES = {"emoji": EMOJI, "cc12m": CC12M, "own": OWN}


def parse_args(argv=None):
    """The flags of a run: defaults, then --dataset or --recipe, then the command line."""
    parser = Parser(__file__, "SLIP: InfoNCE, and NT-Xent between two views of the image.")
    method = parser.add_argument_group("method")
    method.add_argument("--tau", type=positive_float, default=0.07,
                        help="temperature of InfoNCE at the start, which is learnt; SLIP 0.07")
    method.add_argument("--tau-clamp", type=positive_float, nargs=2, default=[0.01, 1.0],
                        metavar=("LOW", "HIGH"),
                        help="lowest and highest value of the temperature; SLIP 0.01 1")
    method.add_argument("--image-tau", type=positive_float, default=0.1,
                        help="temperature of NT-Xent; SLIP 0.1")
    method.add_argument("--image-weight", type=nonnegative_float, default=1.0,
                        help="weight of NT-Xent; SLIP 1")
    parser.add_view_flags(crop_min=0.35, flip=0.5, jitter=0.4, jitter_p=0.8)
    parser.add_simclr_view_flags()
    return parser.parse(argv, RECIPES)


# ======================================================= main =====================================
def encode(model, views, tokens):
    """I, T (b, D) and the features of I1 and I2 (b, width), in one forward of the image encoder."""
    image, text, features = model(torch.cat(views), tokens)
    _, features_1, features_2 = features.chunk(3)
    return image.chunk(3)[0], text, features_1, features_2


def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    train, evals = common.open_data(args)
    args = common.adjust_flags_to_encoder(args)  # a CLIP is the text encoder as well
    args = common.adjust_flags_to_data(args, train)  # batch and epochs of a user's small data
    steps = common.count_steps(args, train)        # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, evals, steps)            # its book-keeping
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    temperature = Temperature(args.tau, args.tau_clamp)
    head = slip_head(model.vision.width)
    loss_modules = nn.ModuleList([temperature, head]).to(accelerator.device)
    optimizer = common.make_optimizer([model, loss_modules], args)
    parameters = [*model.parameters(), *loss_modules.parameters()]

    # >>> shared: prepare
    torch.manual_seed(args.seed + accelerator.process_index)               # of dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # evaluated and saved
    if args.compile:
        model = torch.compile(model)
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    # <<< shared
    run.resume(raw_model, optimizer, tau=temperature, head=head)           # with --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size,            # with --chunk-size
                           lambda **inputs: encode(model, **inputs))

    # ------------------------------------------- views --------------------------------------------
    strong = common.simclr_view(args)
    batches = run.batches([common.training_view(args), strong, strong], transform)

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(raw_model, tokenizer, transform, evals, train, device=accelerator.device,
                          args=args)
    run.start(evaluator, shown=("L_MM", "L_image", "tau"))
    for batch in batches:
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))
        texts = common.pick(batch["captions"], batch["draws"])
        image, text, features_1, features_2 = grad_cache.encode(           # (B, D), (B, width)
            views=batch["views"], tokens=tokenizer(texts))

        tau = temperature()
        terms = {"L_MM": multimodal_loss(image, text, tau),
                 "L_image": nt_xent(head(features_1), head(features_2), args.image_tau)}
        loss = terms["L_MM"] + args.image_weight * terms["L_image"]        # ()

        accelerator.backward(loss)                                         # of the full batch
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()
        run.end_step(batch, loss, {"tau": tau, **terms}, [image, text])    # count, log, save, stop

    # ------------------------------------------- save and evaluate --------------------------------
    return run.finish(figures="temo")


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
