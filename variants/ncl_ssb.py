"""NCL on SSB (Table 4 of NCL): NCL's loss, and SSB's captioning loss, on features of videos.

Support-set bottlenecks for video-text representation learning (Patrick et al., ICLR 2021): a text
encoder over T5, a video encoder over precomputed features, and a loss that generates each caption
from the other videos of the batch. NCL replaces SSB's margin loss and keeps the rest. There is no
public code: this is a reconstruction, which may not reach the printed numbers.

Equations (c(x): x at unit length; S_i: the global batch without the rows of caption i's video)
    L     = 15 L_NCL + 10 L_cap;  SSB: 64 L_margin + 10 L_cap, L_margin a mean over the batch of 64
    w_ij  = softmax over j in S_i of <c(t_i), c(v_j)> / T
    z_i   = sum_{j in S_i} w_ij c(v_j)                                              support_summary
    L_cap = mean_i mean_l -log p(t_il | t_i1 .. t_i,l-1; z_i), p by T5's decoder    captioning_loss
            (t_il: token l of caption i)

Commands
    accelerate launch -m variants.ncl_ssb --dataset msrvtt --data-dir ANNOTATIONS \\
        --feature-dir MOTION APPEARANCE
    accelerate launch -m variants.ncl_ssb --baseline ...         # SSB

Differences from SSB: features of any length are resampled to --frames steps (nearest rows, folder
by folder), while SSB cuts at a number of seconds and masks; the word embeddings of T5's encoder and
decoder are not tied. main is a copy of that of ../ncl.py with another loop (compare with diff); the
biases and their evaluation are imported from there.
"""

import argparse
import functools

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common
import ncl

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, below_one, between, clean_exit, gather,
    hardest_negative_loss, nonnegative_float, normalize, positive_float)
from contrastive.encoders.ssb import Captioner, set_dropout
from ncl import QueryQueue, ncl_loss

import torch
import torch.nn as nn
import torch.nn.functional as F


# ======================================================= METHOD ===================================
def support_summary(text, videos, video_id, video_ids, tau=0.1):
    """z_i, the summary of caption i by the other videos; gradients reach both encoders.

    Args:
        text: (B, D) captions of this process.
        videos: (N, D) of the global batch.
        video_id: (B,) long, the video of each caption.
        video_ids: (N,) long, of the global batch.
        tau: temperature T > 0, divides the cosine; 0.1 is ours.
    Returns: (B, D); zeros for a caption if the batch holds no other video.
    """
    text, videos = normalize(text), normalize(videos)                      # (B, D), (N, D)
    in_support = video_id[:, None] != video_ids                            # (B, N) S_i
    logits = text @ videos.T / tau                                         # (B, N)
    lowest = torch.finfo(logits.dtype).min
    weights = logits.masked_fill(~in_support, lowest).softmax(1)           # (B, N)
    # zeros where there is no support at all
    weights = weights * in_support                                         # (B, N)
    return weights @ videos                                                # (B, D)


def captioning_loss(z, input_ids, attention_mask, decoder):
    """L_cap: the loss of generating each caption from the summary of its support set.

    The mean over a caption's tokens is ours; as we remember SSB, it has their sum. With the mean,
    10 L_cap is about as large as 15 L_NCL.

    Args:
        z: (B, D) summaries.
        input_ids, attention_mask: (B, L) tokens of the captions, padded at the end.
        decoder: a Captioner, or any function (z, ids) -> logits (B, L, V) in which position l sees
            only the ids before it.
    Returns: () mean over the captions of this process. A random guess is ln V.
    """
    logits = decoder(z, input_ids).transpose(1, 2)                         # (B, V, L)
    nll = F.cross_entropy(logits, input_ids, reduction="none")             # (B, L)
    per_caption = (nll * attention_mask).sum(1) / attention_mask.sum(1)    # (B,)
    return per_caption.mean()                                              # ()


def batch_captioning_loss(text, video, tokens, keys, decoder):
    """L_cap of a batch, whose support sets are of all processes. Collective.

    Args:
        text, video: (B, D) embeddings of this process.
        tokens: {input_ids, attention_mask: (B, L)} of its captions.
        keys: B, of the videos: a batch may hold two captions of one.
        decoder: as in captioning_loss.
    Returns: ()
    """
    hashes = torch.tensor([common.key_hash(key) for key in keys])          # (B,)
    video_id = common.to_device(hashes, video.device)                      # (B,)
    summary = support_summary(text, gather(video), video_id, gather(video_id))           # (B, D)
    return captioning_loss(summary, **tokens, decoder=decoder)


# ======================================================= flags ====================================
# A word beside each value says where it comes from. NCL: Sec. 4 and App. C of the NCL paper;
# memory: the SSB paper as we remember it, not looked up; ours: our choice.
SSB = dict(
    source="reconstruction",
    image_encoder="ssb", text_encoder="google-t5/t5-base", pretrained=True,  # NCL
    text_pooling="ssb", embed_dim=1024,                                    # memory
    optimizer="adam", lr=5e-5, grad_clip=0.2, batch_size=64,               # memory
    weight_decay=1e-5,                                                     # memory, weak
    lr_schedule="constant", lr_end=5e-5, warmup_fraction=0.0,              # ours
    betas=[0.9, 0.999],                                                    # Adam's own
    # memory, values on MSR-VTT; unfold_captions, an epoch of captions and not of clips: ours
    epochs=20.0, frames=32, text_length=100, unfold_captions=True,
    log_every=50)
ACTIVITYNET = SSB | dict(
    epochs=28.0, frames=512, text_length=256, unfold_captions=False,       # memory
    dropout=0.0, text_dropout=False)                                       # NCL; T5's: ours
RECIPES = {
    "msrvtt": SSB,
    "msvd": SSB | dict(frames=64),                                         # ours
    "activitynet": ACTIVITYNET,
    "own": SSB | dict(unfold_captions=False, queue_size=2000, log_every=10)}
# SSB. The paper does not say so, but its margin loss is probably a sum over the batch of 64, as in
# VSE++'s code: it is then about as large as 15 L_NCL. Ours is a mean, and so is scaled by 64.
BASELINE = dict(loss="max-margin", loss_scale=64.0, normalize="none")


# Flags that all scripts share are in contrastive/engine/flags.py. Precedence: default < recipe
# (--dataset, --recipe) < preset (--baseline) < saved flags of --resume < command line.
def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "NCL on SSB: features of videos, and a captioning loss.",
                    needs="--feature-dir FEATURES")
    method = parser.add_argument_group("method")
    method.add_argument("--loss", choices=["ncl", "infonce", "max-margin"], default="ncl",
                        help="loss beside the captioning loss: NCL's, InfoNCE, or SSB's margin "
                             "loss with the hardest negative")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, SSB, with everything else equal: sets "
                             "--loss max-margin --loss-scale 64 --normalize none")
    method.add_argument("--tau", type=positive_float, default=0.07,
                        help="temperature, the paper's gamma, divides the cosine; paper 0.07")
    method.add_argument("--margin", type=between(0, 2), default=0.2,
                        help="margin of --loss max-margin in units of the cosine, 0..2; SSB 0.2")
    method.add_argument("--loss-scale", type=nonnegative_float, default=15.0,
                        help="factor of the loss, but not of the captioning loss; paper 15, SSB "
                             "64, the sum over its batch")
    ncl.add_bias_flags(method)
    method.add_argument("--captioning-weight", type=nonnegative_float, default=10.0,
                        help="weight of the captioning loss, which needs a T5 as --text-encoder; "
                             "SSB 10; 0 = off")

    parser.add_unfold_flag(parser.add_argument_group("captions"))
    encoders = parser.add_argument_group("SSB's encoders")
    encoders.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR",
                          help="folders of features, VIDEO.npy of shape (time, width), such as "
                               "motion and appearance; they are resampled to --frames and "
                               "concatenated")
    encoders.add_argument("--dropout", type=below_one, default=0.1,
                          help="dropout of the video encoder and the text head, 0..1; paper 0.1, "
                               "ActivityNet 0")
    encoders.add_argument("--text-dropout", action=argparse.BooleanOptionalAction, default=True,
                          help="keep the dropout with which T5 was published")
    return parser.parse(argv, RECIPES, BASELINE, check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    has_margin = args.loss == "max-margin"
    parser.require(not args.baseline or has_margin,
                   f"--loss {args.loss}: --baseline is --loss max-margin; leave out one of the "
                   "two")
    parser.require(args.feature_dir,
                   "--feature-dir: SSB reads features of videos; give their folders")
    parser.only(has_margin, "with --loss max-margin", "--margin")
    parser.only(not has_margin, "with --loss ncl or infonce", "--tau", "--iterations")
    parser.require(not has_margin or args.normalize == "none",
                   f"--normalize {args.normalize}: --loss max-margin trains no temperature, which "
                   "biases need; add --normalize none")
    eval_names = {word.partition("=")[0] for word in args.eval_datasets}
    parser.require(eval_names <= {args.dataset},
                   f"--eval-datasets: the features of --feature-dir are those of {args.dataset} "
                   "alone; leave it out")


# ======================================================= main =====================================
def main(args):
    """One run: data, model, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    train, eval_sets = common.open_data(args)
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    set_dropout(model, args.dropout, args.text_dropout)
    temperature = Temperature(args.tau)                                    # fixed
    # outside DDP: average_gradients does for these what DDP does for the model
    text_queue = QueryQueue(args.queue_size, args.embed_dim)
    video_queue = QueryQueue(args.queue_size, args.embed_dim)
    loss_modules = nn.ModuleDict({"texts": text_queue, "videos": video_queue})
    if args.captioning_weight:
        captioner = Captioner(model.text, args.embed_dim, model.pretrained, args.text_dropout)
        loss_modules["captioner"] = captioner
    loss_modules.to(accelerator.device)
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
    run.resume(raw_model, optimizer, **loss_modules)                       # no-op without --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size)            # encodes in chunks

    # ------------------------------------------- views --------------------------------------------
    plain_view = common.Augment(args.image_size)  # without a random part: features as they are
    batches = run.batches([plain_view], transform)

    # ------------------------------------------- loop ---------------------------------------------
    has_biases = args.loss != "max-margin"  # biases need a temperature; max-margin has none
    method_metrics = None
    if has_biases:
        method_metrics = functools.partial(
            ncl.evaluate_normalized, args=args, temperature=temperature, text_queue=text_queue,
            video_queue=video_queue)
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args,
        method_metrics=method_metrics)
    run.start(evaluator, shown=("loss", "L_cap"))
    # Figs. 7 and 8 compare val before and after training
    if run.step == 0 and common.rank() == 0:
        common.save_pieces(run.folder / "val_before.safetensors", run.val_pieces)
    # "views": (B, T, F); "captions": B lists; "draws": (B, 32) random numbers in 0..1, which choose
    # texts; "keys": B
    for batch in batches:
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        tokens = tokenizer(texts)                                          # (B, L) each
        video, text, _ = grad_cache.encode(                                # (B, D)
            pixels=batch["views"][0], tokens=tokens)

        gamma = temperature()
        terms = {}                                                         # for the log
        if args.loss == "ncl":
            loss = ncl_loss(text, video, gamma, iterations=args.iterations, terms=terms)
        elif args.loss == "infonce":
            loss = ncl_loss(text, video, gamma, iterations=0, terms=terms)
        elif args.loss == "max-margin":
            loss = hardest_negative_loss(text, video, args.margin, terms=terms)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")
        loss = args.loss_scale * loss
        if args.captioning_weight:
            terms["L_cap"] = batch_captioning_loss(text, video, tokens, batch["keys"], captioner)
            loss = loss + args.captioning_weight * terms["L_cap"]

        accelerator.backward(loss)
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        text_queue.push(text)
        video_queue.push(video)

        log_row = dict(terms)
        if has_biases:
            log_row["tau"] = gamma
            if run.logs_next():
                log_row.update(ncl.batch_errors(text, video, gamma, args.iterations))
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [video, text])

    # ------------------------------------------- save and evaluate --------------------------------
    # with --eval-epoch best: weights and queues of the best step, before the queues are saved
    run.restore_best()
    if has_biases:
        common.save_queues(run, args.tau, text_queue.get(), video_queue.get())
    return run.finish(figures="ncl")


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
