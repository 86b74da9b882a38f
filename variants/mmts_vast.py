"""MM-TS on VAST (Tables 3, 6 to 9): clips of frames, sound and subtitles, and a matching head.

MM-TS replaces VAST's contrastive loss alone. Its matching head learns beside it: it says whether a
caption belongs to a clip, from the true pairs and from one hard negative of each caption and of
each clip, and re-ranks the first candidates in eval.py (--rerank 50). The head reads all tokens of
a clip, and those of a batch do not fit into memory. So a first pass encodes the batch without a
graph; a second one encodes it again in chunks, and adds the gradient of the pairs of each chunk.

Equations (s_ij: cosine of query i and candidate j)
    w_ij = softmax_j(s_ij / tau_neg) + 1e-4 for j != i, w_ii = 0
    p_ij = w_ij / sum_j w_ij: probability that j is the hard negative of i   hard_negatives
    L_match = mean of the cross-entropies of the 3 N pairs                   matching_loss
    L = L_MM-TS + 0.1 L_match                                 MatchingCache, clip_loss (mmts.py)

Commands
    accelerate launch -m variants.mmts_vast                  # a small VAST on moving emoji
    accelerate launch -m variants.mmts_vast --dataset youcook2 --data-dir ANNOTATIONS \\
        --video-dir VIDEOS --init-from PRETRAIN_VAST         # the paper's run
    accelerate launch -m variants.mmts_vast --baseline --learnable-tau     # VAST's own loss

docs/mmts.md has the commands of the tables and the differences from VAST's code. main is a copy of
that of ../mmts.py with another step (compare with diff); the rest is imported from there.
"""

import functools

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common
import mmts

from common import (
    Evaluator, GradCache, Parser, Run, Temperature, clean_exit, fraction, gather, nonnegative_float,
    normalize)
from contrastive.encoders.vast import MODALITIES, Pairs
from mmts import clip_loss, cluster_captions, max_margin_loss, sample_temperature

import torch
import torch.nn as nn
import torch.nn.functional as F


# ======================================================= METHOD ===================================
NEGATIVES_TAU = 0.07  # tau_neg, unless a temperature is learnt


def hard_negatives(sim, tau, draws):
    """Draws one wrong candidate of each query; near ones are likelier.

    Args:
        sim: (N, N) cosines, the diagonal that of the true pairs.
        tau: temperature > 0, a number or ().
        draws: (N,) numbers in 0..1.
    Returns: (N,) long.
    """
    weights = (sim.double() / tau).softmax(1) + 1e-4                       # (N, N)
    weights.fill_diagonal_(0)
    # a weight's share of its row is its probability: draws are positions in the whole row
    cumulative = weights.cumsum(1)                                         # (N, N)
    position = draws[:, None] * cumulative[:, -1:]                         # (N, 1)
    candidate = torch.searchsorted(cumulative, position, right=True)       # (N, 1)
    # with NaN it is N, which is no index; end_step then stops the run at the loss
    return candidate[:, 0].clamp(max=len(sim) - 1)


@torch.no_grad()
def hard_pairs(clip, text, tokens, draws, *, tau, length):
    """The Pairs that the matching head classifies. Collective.

    Three for each i of the global batch: (clip i, text i), (clip i, hard text of i), (hard clip of
    i, text i). Each process gets the pairs of its own clips, so it encodes no others.

    Args:
        clip, text: (B, D) embeddings of this process.
        tokens: {input_ids, attention_mask: (B, L)} of its captions.
        draws: (B, 2) numbers in 0..1.
        tau: temperature of the sampling, a number or ().
        length: number of tokens to which captions are padded, the same on all processes.
    """
    pad = length - tokens["input_ids"].shape[1]
    ids = gather(F.pad(tokens["input_ids"], (0, pad)))                     # (N, length)
    mask = gather(F.pad(tokens["attention_mask"], (0, pad)))               # (N, length)
    sim = gather(normalize(clip.float())) @ gather(normalize(text.float())).T            # (N, N)
    draws = gather(draws.to(clip.device))                                  # (N, 2)
    index = torch.arange(len(sim), device=clip.device)                     # (N,)
    hard_texts = hard_negatives(sim, tau, draws[:, 0])                     # (N,) one for each clip
    hard_clips = hard_negatives(sim.T, tau, draws[:, 1])                   # (N,) one for each text
    pair_clips = torch.cat([index, index, hard_clips])                     # (3 N,)
    pair_texts = torch.cat([index, hard_texts, index])                     # (3 N,)
    order = pair_clips.argsort(stable=True)                                # (3 N,)
    pair_clips, pair_texts = pair_clips[order], pair_texts[order]
    target = (pair_clips == pair_texts).long()                             # (3 N,)
    pairs = Pairs(pair_clips, ids[pair_texts], mask[pair_texts], target)
    B = len(clip)
    return pairs.of_clips(common.rank() * B, (common.rank() + 1) * B)


def matching_loss(logits, target, num_clips):
    """A chunk's part of L_match: the sum of the cross-entropies of its pairs, divided by 3 B.

    Summed over chunks and averaged over processes, it is the mean over all 3 N pairs.

    Args:
        logits, target: (P, 2), (P,).
        num_clips: B, clips of this process.
    """
    return F.cross_entropy(logits.float(), target, reduction="sum") / (3 * num_clips)


class MatchingCache(GradCache):
    """A GradCache that adds the gradient of the matching loss. A step has four parts:

    1. encode: the first pass encodes the batch without a graph, always, also if it is one chunk.
    2. start_pairs: takes the pairs, which are drawn by these embeddings.
    3. accelerator.backward of the contrastive loss: its gradient at the embeddings.
    4. backward_of_chunk, called by 3: the second pass encodes each chunk with a graph, and sends
       the gradients of both losses through it.

    Args:
        model, accelerator: as of GradCache.
        chunk_size: clips at a time on this process; 0 = all.
        weight: of the matching loss.
    Attributes:
        matching_loss: after 3 that of the batch, () without the weight.
    """

    def __init__(self, model, accelerator, chunk_size, weight):
        super().__init__(model, accelerator, chunk_size or 10**9)  # one chunk for all
        self.weight = weight
        self.pairs = None

    def is_in_chunks(self, num_examples):
        return True

    def start_pairs(self, pairs, num_clips):
        """Takes the Pairs of a batch of B clips."""
        self.pairs = pairs
        self.num_clips = num_clips
        self.matching_loss = 0.0

    def backward_of_chunk(self, chunk, start, gradients):
        clip_gradient, text_gradient, _ = gradients                        # (B, D) each
        stop = start + len(chunk["tokens"]["input_ids"])
        pairs = self.pairs.of_clips(start, stop)
        clip, text, logits = self.model(**chunk, pairs=pairs)              # (b, D), (P, 2)
        chunk_loss = matching_loss(logits, pairs.target, self.num_clips)   # ()
        self.matching_loss += chunk_loss.detach()
        weighted_loss = self.weight * chunk_loss                           # ()
        if self.accelerator.scaler:                                        # of fp16
            weighted_loss = self.accelerator.scaler.scale(weighted_loss)
        # a scalar needs no gradient to start from
        torch.autograd.backward(
            [weighted_loss, clip, text],
            [None, clip_gradient[start:stop].to(clip.dtype),
             text_gradient[start:stop].to(text.dtype)])


class LinearTemperature(nn.Module):
    """VAST's temperature: learnt as the number that divides the cosines, not as its logarithm.

    Args:
        start: value at the first step.
        limits: (lowest, highest) value.
    """

    def __init__(self, start, limits):
        super().__init__()
        self.limits = limits
        self.tau = nn.Parameter(torch.tensor(float(start)))

    def forward(self):
        return self.tau

    @torch.no_grad()
    def clamp(self):
        """Brings the temperature back into its limits after a step."""
        self.tau.clamp_(*self.limits)


# ======================================================= flags ====================================
# A recipe holds what differs from the defaults: of the flags below VAST's values on YouCook2, of
# the others those of mmts.py.
MOVING = mmts.MOVING | dict(
    source="ours; a small VAST from scratch", image_encoder="vast-small")
OWN = mmts.OWN | dict(source="ours; a small VAST from scratch", image_encoder="vast-small")
YOUCOOK2 = dict(
    source="paper; encoders, views, optimiser and matching head from VAST",
    image_encoder="vast", text_encoder="google-bert/bert-base-uncased", pretrained=True,
    needs_weights="VAST's weights",                                        # of all parts
    embed_dim=512, image_size=224, image_stats="clip", eval_resize="squash",
    frames=8, eval_frames=16, frame_sampling="random",                     # in training alone
    text_length=40, text_pooling="cls",
    epochs=30.0, batch_size=64, chunk_size=4, lr=3e-5, lr_scale=[f"image={5e-7 / 3e-5}"],
    lr_end=0.0, lr_schedule="linear", warmup_fraction=0.1,
    weight_decay=0.01, eps=1e-6, grad_clip=0.0, drop_path=0.4,
    tau=0.07, alpha=0.06, shift_min=0.06, shift_max=0.09,
    crop_min=1.0, flip=0.0, mixed_precision="fp16", log_every=20)
SSV2_LT = YOUCOOK2 | dict(
    clusters="label", modalities="v", lr=2e-5, lr_scale=[f"image={5e-7 / 2e-5}"],
    alpha=0.04, shift_min=0.07, shift_max=0.11)        # of a cell of Table 8
RECIPES = {"moving-emoji": MOVING, "youcook2": YOUCOOK2, "ssv2-lt": SSV2_LT, "own": OWN}


def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "MM-TS on VAST: frames, sound, subtitles and a matching head.")
    method = mmts.add_method_flags(parser)
    method.set_defaults(tau_clamp=[0.001, 1.0])
    method.add_argument("--label-smoothing", type=fraction, default=0.1,
                        help="part of the target of --loss clip that is spread over all "
                             "candidates, 0..1; VAST 0.1")
    method.add_argument("--matching-weight", type=nonnegative_float, default=0.1,
                        help="weight of the loss of the matching head; VAST 0.1")
    vast = parser.add_argument_group("VAST's fine-tuning")
    parser.add_eps_flag(vast)
    vast.add_argument("--drop-path", type=common.below_one, default=0.0,
                      help="probability with which the last residual branch of the image encoder "
                           "is dropped in training, 0..1, of earlier ones in proportion; VAST 0.4")
    clips = parser.add_argument_group("clips")
    clips.add_argument("--modalities", choices=MODALITIES, default="vas",
                       help="what is read of a clip, as far as the data have it: v frames, a "
                            "sound, s a subtitle")
    clips.add_argument("--eval-frames", type=common.int_ge0, default=0,
                       help="frames of a clip of val and test; VAST 16; 0 = as in training")
    parser.add_view_flags(crop_min=1.0, flip=0.0, jitter=0.0)
    return parser.parse(argv, RECIPES, mmts.BASELINE, check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    mmts.check_flags(parser, args)
    parser.require(args.image_encoder in ("vast", "vast-small"),
                   f"--image-encoder {args.image_encoder}: it has no matching head; give vast or "
                   "vast-small, or train it by mmts.py")
    parser.only(args.loss == "clip", "with --loss clip", "--label-smoothing")
    parser.require_weights(YOUCOOK2, args)  # on any data


# ======================================================= main =====================================
def main(args):
    """One run: data, model, clusters, views, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    train, eval_sets = common.open_data(args)
    common.check_clusters(train, args)
    args = common.adjust_flags_to_encoder(args)      # VAST has a text encoder of its own
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    model, tokenizer, transform = common.build_model(args, train, run)     # both encoders
    if args.drop_path:
        common.set_drop_path(model, args.drop_path)
    # after the model, so that its initial weights do not depend on the clusters
    kmeans = functools.partial(cluster_captions, seed=args.seed)
    clusters = common.open_clusters(run.folder, args, train, accelerator.device, kmeans)
    temperature = Temperature(args.tau)
    if args.learnable_tau:
        temperature = LinearTemperature(first_tau(args, model), args.tau_clamp)
    temperature.to(accelerator.device)
    optimizer = common.make_optimizer([model, temperature], args, args.eps)
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
    grad_cache = MatchingCache(model, accelerator, args.chunk_size, args.matching_weight)

    # ------------------------------------------- views --------------------------------------------
    batches = run.batches([common.training_view(args)], transform)

    # ------------------------------------------- loop ---------------------------------------------
    quantity = "margin" if args.loss == "max-margin" else "tau"            # a column of the log
    shifts = mmts.shifts_of_clusters(clusters, args).to(accelerator.device)              # (K,)
    shift = shifts[-1]                                                     # () with --no-shifts
    period = steps.total / args.periods                                    # T of Eq. 7
    alpha = mmts.alpha_of_run(args)
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args,
        method_metrics=functools.partial(common.head_mid_tail, clusters=clusters))
    run.start(evaluator, shown=("loss", "L_match", quantity),
              **common.temperature_banner(args, mmts.range_of_run(args), clusters))
    # "views": {frames, sound, subtitle}; "captions": B lists; "draws": (B, 32) random numbers in
    # 0..1, which choose texts and negatives; "keys": B
    for batch in batches:
        common.set_lr(optimizer, common.learning_rate(run.step, steps, args))

        texts = common.pick(batch["captions"], batch["draws"])             # B captions
        tokens = tokenizer(texts)                                          # (B, L) each
        image, text, _ = grad_cache.encode(                                # (B, D)
            pixels=batch["views"][0], tokens=tokens)

        num_missing = 0                                                    # new since clustering
        if args.shifts:
            # without a cluster -1, which is the last and smallest one
            cluster, num_missing = clusters.look_up(batch["keys"], texts)  # (B,)
            shift = shifts[common.to_device(cluster, accelerator.device)]  # (B,)
        negatives_tau = NEGATIVES_TAU
        if args.learnable_tau:                                             # as VAST itself
            tau_or_margin = temperature()                                  # ()
            negatives_tau = tau_or_margin.detach()
        else:
            tau_or_margin = sample_temperature(run.step, shift, period, alpha)  # (B,) or ()

        terms = {}                                                         # for the log
        if args.loss == "clip":
            loss = clip_loss(image, text, tau_or_margin, args.label_smoothing, terms=terms)
        elif args.loss == "max-margin":
            loss = max_margin_loss(image, text, tau_or_margin, terms=terms)
        else:
            raise ValueError(f"--loss {args.loss} has no branch in this loop")
        # of an example's random numbers the first chose its caption, these its hard negatives
        draws = torch.from_numpy(batch["draws"][:, 1:3])                   # (B, 2)
        pairs = hard_pairs(image, text, tokens, draws, tau=negatives_tau, length=args.text_length)
        grad_cache.start_pairs(pairs, len(texts))

        # grad_cache adds the gradient of the matching loss
        accelerator.backward(loss)
        loss = loss.detach() + args.matching_weight * grad_cache.matching_loss           # ()
        common.average_gradients(temperature.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        temperature.clamp()

        # end_step averages over processes, and not_in_clusters is a sum over them
        log_row = {quantity: tau_or_margin.mean(), **terms, "L_match": grad_cache.matching_loss,
                   "not_in_clusters": common.world_size() * num_missing}
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [image, text])

    # ------------------------------------------- save and evaluate --------------------------------
    if clusters is not None and not args.learnable_tau:                    # for the pictures
        common.save_temperatures(run, args.periods, functools.partial(
            sample_temperature, shift=shifts, period=period, alpha=alpha))
    return run.finish(figures="mmts")


def first_tau(args, model):
    """The first value of a learnt temperature: that of VAST's released weights, if they are loaded
    and --tau is not on the command line; else --tau."""
    if model.released_tau is None or "--tau" in args.command_line:
        return args.tau
    return model.released_tau


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
