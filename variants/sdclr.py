"""SDCLR: Self-Damaging Contrastive Learning (Jiang et al., ICML 2021), a baseline of TS's Table 3.

SimCLR on long-tail images, but the second view of an image goes through a pruned copy of the model,
which lacks the smallest weights of the encoder. Rare classes, which a network forgets first when it
is pruned, differ more between both views, and so have more weight in the loss. The masks are new in
each epoch; both branches share the weights, and both receive the gradient. The pruned branch has
BatchNorms of its own.

    L = nt_xent(f(view1), f_pruned(view2); tau)              nt_xent of temperature_schedules.py
    f_pruned: the weights below a threshold on |w| are 0         PruneMasks, SDCLRNet

Symbols: view1, view2: two views of an image; f: encoder and head; tau: a fixed temperature.

    accelerate launch -m variants.sdclr                                # emoji, two CPU cores
    accelerate launch -m variants.sdclr --dataset cifar10-lt           # Table 3

docs/temperature_schedules.md: the commands of Table 3, differences. `main` is that of
../temperature_schedules.py but for the model and its masks; the rest is imported.
"""

import copy
import functools
import math

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

from common import (
    Evaluator, GradCache, Parser, Run, batchnorms, clean_exit, fraction,
    positive_float)
from temperature_schedules import (
    EncoderAndHead, decay_vectors, nt_xent, simclr_head, start_norms_at_one, training_view)

import numpy as np
import torch
import torch.nn as nn


# ======================================================= METHOD ===================================
class PruneMasks(nn.Module):
    """Masks of the weights of an encoder's convolutions and linear layers, saved as buffers.

    The name of a buffer may have no dot: it has slashes in their place. The masks are True
    everywhere until `prune` is called.
    """

    def __init__(self, encoder):
        super().__init__()
        self.names = []
        for name, layer in encoder.named_modules():
            if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
                self.names.append(f"{name}.weight")
        for name in self.names:
            mask = torch.ones_like(encoder.get_parameter(name), dtype=torch.bool)
            self.register_buffer(name.replace(".", "/"), mask)

    def __getitem__(self, name):
        """The mask of a weight, of its shape."""
        return self.get_buffer(name.replace(".", "/"))

    @torch.no_grad()
    def prune(self, encoder, part):
        """Sets the masks False for this part of the weights, 0..1, those of smallest magnitude.

        The weights of all layers are compared together, so that layers with small weights lose more
        of them.
        """
        magnitudes = [encoder.get_parameter(name).abs() for name in self.names]
        flat = torch.cat([x.flatten() for x in magnitudes])                # (weights,)
        num_pruned = min(math.ceil(part * len(flat)), len(flat) - 1)       # one weight stays
        # the smallest weight that stays; kthvalue counts from 1
        threshold = flat.kthvalue(num_pruned + 1).values                   # ()
        for name, x in zip(self.names, magnitudes, strict=True):
            self[name].copy_(x >= threshold)


class SDCLRNet(EncoderAndHead):
    """EncoderAndHead with a second, pruned branch, which has BatchNorms of its own.

    Args: encoder, head: as in EncoderAndHead.
    """

    def __init__(self, encoder, head):
        super().__init__(encoder, head)
        norms = batchnorms(self)
        self.norm_names = [name for name, module in self.named_modules() if module in norms]
        self.norms = nn.ModuleList(copy.deepcopy(norms))                   # of the pruned branch

    def forward(self, pixels, masks=None, num_dense=None):
        """Views (2b, [T,] 3, S, S) -> z (2b, D).

        Args:
            masks: PruneMasks; None = the dense branch alone.
            num_dense: so many first rows use the dense branch, the others the pruned one.
        """
        if masks is None:
            return super().forward(pixels)
        tensors = self.pruned_tensors(masks)
        dense = self(pixels[:num_dense])                                   # (b, D)
        # calls this module with the tensors in place of its own; their gradient reaches the weights
        pruned = torch.func.functional_call(self, tensors, pixels[num_dense:])           # (b, D)
        return torch.cat([dense, pruned])                                  # (2b, D)

    def pruned_tensors(self, masks):
        """{name: tensor} in which the pruned branch differs: masked weights, its BatchNorms."""
        tensors = {}
        for name in masks.names:
            tensors[f"encoder.{name}"] = self.encoder.get_parameter(name) * masks[name]
        for name, norm in zip(self.norm_names, self.norms, strict=True):
            for key, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
                tensors[f"{name}.{key}"] = tensor
        return tensors


def encode(model, masks, view1, view2):
    """z1, z2 (b, D): the dense branch of view1, the pruned one of view2; (b, [T,] 3, S, S) each."""
    z = model(torch.cat([view1, view2]), masks, num_dense=len(view1))      # (2b, D)
    return z.chunk(2)


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults, here (--tau and --prune are SDCLR's) and in
# contrastive/engine/flags.py.
CIFAR = dict(
    source="SDCLR's code; lengths, optimiser and views as TS",
    image_encoder="resnet18-cifar", image_size=32, image_stats="imagenet",
    epochs=2000.0, batch_size=512, warmup_fraction=10 / 2000,
    optimizer="sgd", lr=0.5, lr_end=1e-6, weight_decay=1e-4,
    betas=[0.9, 0.999],                                                    # 0.9: SGD's momentum
    grad_clip=0.0,
    imbalance_ratio=100.0, train_features="augmented", eval_epoch="best",
    save_every=1000, log_every=50)
IMAGENET100 = CIFAR | dict(
    tau=0.3, prune=0.3,
    image_encoder="resnet50", image_size=224, epochs=800.0,
    warmup_fraction=10 / 800, crop_min=0.08, blur=0.5,
    imbalance_ratio=0.0, train_features="clean", eval_epoch="last",
    eval_crop=0.875, shot_limits=[100, 20])
# SMALL and EMOJI are as in temperature_schedules.py
SMALL = dict(
    source="ours; small encoder from scratch",
    epochs=30.0, warmup_fraction=2 / 30, weight_decay=0.05, betas=[0.9, 0.999], grad_clip=0.0,
    head_norm="none", decay_all=False, crop_min=0.3)
EMOJI = SMALL | dict(
    source="ours", image_size=32,
    hue=0.02,                                                              # hue tells classes apart
    save_every=100, eval_every=50, log_every=5)
RECIPES = {
    "emoji": EMOJI,
    "cifar10-lt": CIFAR,
    "cifar100-lt": CIFAR,
    "imagenet100-lt": IMAGENET100,
    "own": SMALL}


def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "SDCLR: SimCLR whose second view goes through a pruned model.",
                    texts=False)
    method = parser.add_argument_group("method")
    method.add_argument("--tau", type=positive_float, default=0.2,
                        help="temperature, divides the cosine; SDCLR 0.2, ImageNet100-LT 0.3")
    method.add_argument("--prune", type=fraction, default=0.9,
                        help="fraction of the encoder's weights that the pruned branch lacks, "
                             "0..1; SDCLR 0.9, ImageNet100-LT 0.3")
    method.add_argument("--head-norm", choices=["batch", "none"], default="batch",
                        help="BatchNorm in the projection head; SDCLR's code: batch")
    parser.add_long_tail_flags()
    return parser.parse(argv, RECIPES, check=Parser.check_long_tail_flags)


# ======================================================= main =====================================
def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    splits = common.labelled_splits(args)                                  # {train, val, test, ...}
    train = splits["train"]
    eval_sets = {args.dataset: common.val_and_test(splits)}
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up
    if args.eval_epoch == "best" and args.eval_every <= 0:
        args.eval_every = 20 * steps.per_epoch  # ours; App. A.2 of TS chooses an epoch on val
    sizes = np.bincount(train.labels, minlength=len(train.label_names))    # (classes,) of train

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    encoder, _, transform = common.build_model(args, train, run)           # evaluated and saved
    start_norms_at_one(encoder)  # as the authors' code; timm's start at 0
    head = simclr_head(encoder.vision.width, args.embed_dim, args.head_norm)
    model = SDCLRNet(encoder, head).to(accelerator.device)
    masks = PruneMasks(encoder)
    optimizer = common.make_optimizer([model], args)
    if args.decay_all:
        decay_vectors(optimizer, args.weight_decay)

    # >>> shared: prepare (the same lines in all scripts)
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # without DDP
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    if args.compile:
        model = torch.compile(model)
    # <<< shared
    run.resume(                                                            # no-op without --resume
        encoder, optimizer, head=head, norms=raw_model.norms, masks=masks)
    grad_cache = GradCache(model, accelerator, args.chunk_size,            # encodes in chunks
                           encode=functools.partial(encode, model, masks))

    # ------------------------------------------- views --------------------------------------------
    view = training_view(args)
    batches = run.batches([view, view], transform)                         # view1, view2

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        encoder, None, transform, eval_sets, common.probe_images(train, args),
        device=accelerator.device, args=args, few_shot=splits.get("few-shot"))
    run.start(evaluator,
              pair=("view1", "view2"),                                     # their names in the log
              after_val=functools.partial(common.add_val_columns, head=head),     # for the figures
              score="val_mean",                                            # of --eval-epoch best
              classes=f"{len(sizes)}, {sizes.max()} to {sizes[sizes > 0].min()} images")
    for batch in batches:  # "views": (B, [T,] 3, S, S) each
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        if run.step % steps.per_epoch == 0:
            masks.prune(encoder, args.prune)
        view1, view2 = batch["views"]                                      # (B, [T,] 3, S, S) each
        z1, z2 = grad_cache.encode(view1=view1, view2=view2)               # (B, D)
        loss = nt_xent(z1, z2, args.tau)                                   # ()

        accelerator.backward(loss)
        if args.grad_clip:
            accelerator.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, {"tau": args.tau, "L_c": loss}, [z1, z2])

    # ------------------------------------------- save and evaluate --------------------------------
    return run.finish(figures="ts")


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
