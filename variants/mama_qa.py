"""MAMA for questions about videos (Tables 1 and 2), on a model in VIOLET's way or on VGT.

Beside its contrastive loss each pair has the loss of its question's answer, a class of a vocabulary
or one of a few choices. `main` is a copy of that of ../mama.py with this loss: compare the two with
diff. All else of the method is imported from there.

Equations
    (2)     CE_i = -log softmax(scores of question i)[right answer]                  answer_loss
    (3)     L_i = c (L_v2t,i + L_t2v,i) + eta CE_i,  paper c = eta = 1            question_loss

Commands
    accelerate launch -m variants.mama_qa                     # questions about moving emoji
    accelerate launch -m variants.mama_qa --task qa-choice    # with five choices
    accelerate launch -m variants.mama_qa --baseline          # the loss of answers alone
    accelerate launch -m variants.mama_qa --dataset msrvtt-qa --data-dir DIR --video-dir VIDEOS

docs/mama.md: commands of the tables, recipes, differences from the paper and from VGT's code.
"""

import copy
import functools

# ours before torch, which reads OMP_WAIT_POLICY when it is imported
import common

import mama

from common import (
    Evaluator, GradCache, Parser, Run, between, clean_exit, fp32, int_ge1, nonnegative_float,
    positive_float)
from contrastive.encoders.vgt import CLIP_FRAMES
from contrastive.evaluation import answers
from mama import WeightNet, angular_margin_loss, meta_gain, pair_weights, weightnet_gradient

import torch
import torch.nn as nn
import torch.nn.functional as F


# ======================================================= METHOD ===================================
@fp32
def answer_loss(scores, target):
    """CE_i: cross-entropy of the right answer (Eq. 2).

    Args:
        scores: (B, A) of the answers of a vocabulary, or of the choices; -inf for a missing one.
        target: (B,) long, the right answer; -1 = not in the vocabulary, or the row has no question.
    Returns: (B,) float32, 0 where there is no right answer. A random guess is ln A.
    """
    return F.cross_entropy(scores, target, ignore_index=-1, reduction="none")


def question_loss(  # noqa: PLR0917
        video, text, scores, target, tau, mu, contrastive_weight=1.0, eta=1.0, *, terms=None):
    """L_i of Eq. 3, one for each pair.

    Args:
        video, text, tau, mu: as in angular_margin_loss.
        scores, target: as in answer_loss.
        contrastive_weight: weight of L_v2t,i + L_t2v,i; paper 1.
        eta: weight of CE_i; paper 1.
        terms: dict that receives "CE", the mean of CE_i over all B rows. A row without a right
            answer counts as 0, so that the log may average over processes.
    Returns: (B,), float32.
    """
    contrastive = angular_margin_loss(video, text, tau, mu)                # (B,)
    answer = answer_loss(scores, target)                                   # (B,)
    if terms is not None:
        terms["CE"] = answer.mean()
    return contrastive_weight * contrastive + eta * answer


# ======================================================= flags ====================================
SMALL = dict(
    tau=0.1, frames=4, frame_sampling="random", image_size=32, text_length=24, epochs=10.0,
    batch_size=64, warmup_fraction=0.1, meta_every=4, crop_min=0.8, jitter=0.2, save_every=120,
    eval_every=100)
QUESTIONS = dict(
    source="paper; warm-up, schedule and clipping from the authors' code or ours",
    image_encoder="swin3d_b", text_encoder="google-bert/bert-base-uncased", pretrained=True,
    embed_dim=768, image_size=224, frames=5, frame_sampling="random",
    text_length=30, text_pooling="cls",
    epochs=10.0, batch_size=4, lr=2e-5, lr_end=0.0, warmup_fraction=0.01, weight_decay=1e-3,
    meta_lr=2e-5, meta_batch_size=4, log_every=50, save_every=1000)
# a text is a question with one of its choices
CHOICES = QUESTIONS | dict(task="qa-choice", text_length=60)
# numbers of answers: VIOLET's
VIOLET_RECIPES = {
    "moving-emoji": SMALL | dict(source="ours; small encoders from scratch", fusion_layers=1),
    "msrvtt-qa": QUESTIONS,
    "msvd-qa": QUESTIONS | dict(answers=1000),
    "tgif-qa-r-frame": QUESTIONS | dict(answers=1540),
    "tgif-qa-r-action": CHOICES,
    "tgif-qa-r-transition": CHOICES,
    "nextqa": CHOICES,
    "causal-vidqa": CHOICES}

# lengths of texts: VGT's code; of Causal-VidQA CoVGT's
VGT = dict(
    source="the paper's batch, epochs, frames, optimizer, schedule and rate; sizes and all else "
           "from VGT's code",
    qa_model="vgt", image_encoder="regions", text_encoder="google-bert/bert-base-uncased",
    pretrained=True, embed_dim=512, image_size=224, regions=10, frames=32, frame_sampling="random",
    text_length=20, text_pooling="cls",
    epochs=30.0, batch_size=4, optimizer="adam", lr=1e-5, lr_end=0.0, warmup_fraction=0.0,
    weight_decay=0.0, betas=[0.9, 0.999], grad_clip=12.0,
    meta_lr=1e-5, meta_batch_size=4, log_every=50, save_every=1000)
VGT_CHOICES = VGT | dict(task="qa-choice")
VGT_RECIPES = {
    "moving-emoji-vgt": SMALL | dict(
        source="ours; VGT on boxes that are known", qa_model="vgt", regions=5, vgt_dropout=0.1,
        frames=8, crop_min=1.0, lr=5e-4),
    "msrvtt-qa-vgt": VGT,
    "msvd-qa-vgt": VGT | dict(answers=1000),
    "tgif-qa-r-frame-vgt": VGT | dict(answers=1540),
    "tgif-qa-r-action-vgt": VGT_CHOICES,
    "tgif-qa-r-transition-vgt": VGT_CHOICES,
    "nextqa-vgt": VGT_CHOICES | dict(regions=5, text_length=38),
    "causal-vidqa-vgt": VGT_CHOICES | dict(text_length=38)}
RECIPES = VIOLET_RECIPES | VGT_RECIPES
BASELINE = dict(contrastive_weight=0.0, margin_schedule="none", weighting="none")


def parse_args(argv=None):
    """The flags of a run. argv: words of the command line; None = those of this process."""
    parser = Parser(__file__, "MAMA for questions about videos.",
                    data="msrvtt-qa --data-dir ANNOTATIONS --video-dir VIDEOS")
    method = parser.add_argument_group("method")
    method.add_argument("--baseline", action="store_true",
                        help="train the paper's baseline, the base model alone, with everything "
                             "else equal: sets --contrastive-weight 0 --margin-schedule none "
                             "--weighting none")
    method.add_argument("--contrastive-weight", type=nonnegative_float, default=1.0,
                        help="weight of the contrastive loss beside that of the answers; paper 1")
    method.add_argument("--eta", type=nonnegative_float, default=1.0,
                        help="weight of the answers' loss; paper 1")
    method.add_argument("--tau", type=positive_float, default=1.0,
                        help="temperature of the contrastive loss, divides the cosine; paper 1")
    mama.add_method_flags(parser, method)

    group = parser.add_argument_group("questions")
    group.add_argument("--task", choices=["qa-open", "qa-choice"], default="qa-open",
                       help="questions with a vocabulary of answers, or with choices")
    group.add_argument("--answers", type=between(2, 10**6, int), default=1500,
                       help="size of the vocabulary, the most frequent answers of training; all "
                            "others count as wrong; VIOLET 1500, MSVD-QA 1000, TGIF-Frame 1540")
    group.add_argument("--qa-model", choices=["fusion", "vgt"], default="fusion",
                       help="model that answers: a transformer over frames and words (VIOLET), or "
                            "VGT's graph")
    group.add_argument("--fusion-layers", type=between(1, 64, int), default=2,
                       help="layers of the transformer of --qa-model fusion")
    group.add_argument("--region-dir", default="", metavar="DIR",
                       help="folder of region features in VGT's format (docs/data.md); empty = "
                            "features of the set's own boxes (moving-emoji)")
    group.add_argument("--regions", type=int_ge1, default=0,
                       help="regions R of a frame for --qa-model vgt; VGT's code 5 on NExT-QA, "
                            "else 10")
    group.add_argument("--vgt-dropout", type=between(0, 0.9999999), default=0.3,
                       help="dropout of VGT's layers, 0..1; the text encoder keeps its own; VGT's "
                            "code 0.3")
    mama.add_caption_flags(parser)
    parser.add_view_flags(crop_min=1.0, flip=0.0, jitter=0.0)
    return parser.parse(argv, RECIPES, BASELINE, check_flags)


def check_flags(parser, args):
    """Refuses contradictory flags and flags without effect."""
    mama.check_method_flags(parser, args)
    is_vgt = args.qa_model == "vgt"
    is_plain = args.margin_schedule == "none" and args.weighting == "none"
    has_contrastive = args.contrastive_weight > 0
    parser.only(has_contrastive, "with --contrastive-weight above 0", "--tau")
    parser.require(has_contrastive or is_plain,
                   "--contrastive-weight 0 leaves the loss of the answers, which has neither "
                   "margin nor weights: give --baseline")
    parser.require(not args.baseline or not has_contrastive,
                   "--baseline is --contrastive-weight 0; leave out one of the two")
    parser.require(has_contrastive or args.eta > 0,
                   "--contrastive-weight 0 --eta 0 leaves no loss; raise one of them")
    parser.only(args.task == "qa-open", "with --task qa-open", "--answers")
    parser.only(not is_vgt, "with --qa-model fusion", "--fusion-layers")
    parser.only(is_vgt, "with --qa-model vgt", "--region-dir", "--regions", "--vgt-dropout")
    parser.require(bool(args.region_dir) == (args.image_encoder == "regions"),
                   "--region-dir DIR and --image-encoder regions go together, with --qa-model vgt")
    parser.require(not is_vgt or args.regions > 0 and args.frames % CLIP_FRAMES == 0,
                   f"--qa-model vgt: give --regions, and a multiple of {CLIP_FRAMES} --frames; or "
                   "a recipe of VGT, such as --recipe msrvtt-qa-vgt")
    parser.require(not is_vgt or args.crop_min == 1 and args.flip == 0,
                   "--qa-model vgt: its boxes are those of the whole frame; give --crop-min 1 "
                   "--flip 0")


# ======================================================= main =====================================
def main(args):
    """One run: data, model, view, loop, evaluation. Returns the summary."""
    # ------------------------------------------- data ---------------------------------------------
    common.require_gpu(args)                         # for a paper's recipe, unless --cpu
    # before the process group starts, so that a wrong path fails fast
    train, eval_sets = common.open_data(args)
    questions = answers.question_settings(train, args)                     # of the model
    meta_data = None
    if mama.has_meta_data(args):
        meta_data, eval_sets = common.meta_data(train, eval_sets, args, task=args.task)
    args = common.adjust_flags_to_encoder(args)      # a CLIP brings its text encoder
    args = common.adjust_flags_to_data(args, train)  # small own data: smaller batch, more epochs
    steps = common.count_steps(args, train)          # per epoch, in total, of the warm-up

    # ------------------------------------------- model and optimizer ------------------------------
    accelerator = common.make_accelerator(args)
    common.set_seed(args.seed)
    run = Run(__file__, args, accelerator, train, eval_sets, steps)        # log and checkpoints
    # from which a tokenizer is trained, where the text encoder brings none
    texts = functools.partial(answers.texts_for_tokenizer, train, 200_000)
    model, tokenizer, transform = common.build_model(args, train, run, texts, questions)
    # outside DDP: average_gradients does for these what DDP does for the model
    loss_modules = nn.ModuleList()
    weight_net, meta_optimizer = None, None
    if args.weighting == "meta":                                           # learns by Eq. 10 alone
        weight_net = WeightNet(args.weight_hidden).to(accelerator.device)
        meta_optimizer = mama.make_meta_optimizer(weight_net, args)
    elif args.weighting == "joint":
        weight_net = WeightNet(args.weight_hidden).to(accelerator.device)
        loss_modules.append(weight_net)
    optimizer = common.make_optimizer([model, loss_modules], args)
    parameters = [*model.parameters(), *loss_modules.parameters()]
    # for the look-ahead: shares the weights, but keeps the float32 forward, which prepare replaces
    plain_model = copy.copy(model)

    # >>> shared: prepare (the same lines in all scripts)
    torch.manual_seed(args.seed + accelerator.process_index)  # each process draws its own dropout
    model = common.sync_batchnorm(model, args)
    raw_model = model                                                      # without DDP
    model, optimizer = accelerator.prepare(model, optimizer)               # DDP, mixed precision
    if args.compile:
        model = torch.compile(model)
    # <<< shared
    run.resume(raw_model, optimizer, weight_net=weight_net,
               meta_optimizer=meta_optimizer)                              # no-op without --resume
    grad_cache = GradCache(model, accelerator, args.chunk_size)            # encodes in chunks

    # ------------------------------------------- views --------------------------------------------
    view = common.training_view(args)
    batches = run.batches([view], transform)
    meta_every = args.meta_every
    if args.weighting == "l2rw":  # each batch needs its G_j
        meta_every = 1
    if mama.looks_ahead(args):
        meta_batches = common.meta_batches(meta_data, view, transform, run, every=meta_every)
        encoder_parameters = common.trained_parameters(plain_model)        # {name: parameter}

    # ------------------------------------------- loop ---------------------------------------------
    evaluator = Evaluator(
        raw_model, tokenizer, transform, eval_sets, train, device=accelerator.device, args=args)
    lines = mama.banner_lines(args, steps.total, meta_data)
    lines |= answers.banner_lines(questions, train, args)
    run.start(evaluator, shown=("L", "CE", "answered"), **lines)
    # "views": (B, [T,] 3, S, S) each; "captions": B lists; "draws": (B, 32) random numbers in 0..1,
    # which choose texts; "rows": B
    for batch in batches:
        lr = common.learning_rate(run.step, steps, args)
        common.set_lr(optimizer, lr)
        inputs, target = inputs_of(batch, tokenizer, train, questions)
        mu = mama.margin_at(run.step, args)
        criterion = functools.partial(                                     # L_i, Eq. 3
            question_loss, tau=args.tau, mu=mu, contrastive_weight=args.contrastive_weight,
            eta=args.eta)

        gain = None
        # before the graph of the step exists, so that both are never in memory together
        if mama.looks_ahead(args) and run.step % meta_every == 0:
            meta_batch = next(meta_batches)
            batch["bad"] += meta_batch["bad"]                              # unreadable files
            meta_pair = inputs_of(meta_batch, tokenizer, meta_data, questions)
            losses = look_ahead_losses(plain_model, criterion)
            if args.weighting == "meta":
                gradient = weightnet_gradient(                             # Eqs. 9, 12
                    losses, encoder_parameters, (inputs, target), meta_pair, weight_net,
                    virtual_lr=lr)
                mama.update_weight_net(weight_net, meta_optimizer, gradient)         # Eq. 10
            elif args.weighting == "l2rw":
                gain = meta_gain(                                          # (B,)
                    losses, encoder_parameters, (inputs, target), meta_pair)

        video, text, scores = grad_cache.encode(**inputs)                  # (B, D), (B, A)
        terms = {}                                                         # for the log
        sample_loss = criterion(video, text, scores, target, terms=terms)  # (B,)
        progress = run.step / steps.total
        weight = pair_weights(args, sample_loss.detach(), weight_net, gain, progress)        # (B,)
        loss = (weight * sample_loss).mean()                               # () Eq. 8

        accelerator.backward(loss)
        common.average_gradients(loss_modules.parameters())
        if args.grad_clip:
            accelerator.clip_grad_norm_(parameters, args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

        log_row = {"tau": args.tau, "mu": mu, "L": sample_loss.mean(), "w": weight.mean()}
        log_row.update(terms)
        log_row.update(common.record_pairs(run, sample_loss, weight, batch["rows"]))
        if run.logs_next():
            log_row.update(answers.answered_column(scores, target, train, batch["rows"]))
        # counts the step, logs, saves, evaluates; stops at a NaN or a signal
        run.end_step(batch, loss, log_row, [video, text])

    # ------------------------------------------- save and evaluate --------------------------------
    if args.meta_set == "val":
        # which eval.py leaves out
        common.save_meta_names(run, meta_data)
    column = "answer" if args.task == "qa-open" else "question"
    common.save_training_texts(run, train, column)                         # for Figs. 2 and 5
    return run.finish(figures="mama")


# ------------------------------------------------------- questions --------------------------------
def inputs_of(batch, tokenizer, data, questions):
    """The inputs of the model for a batch of pairs, and their right answers.

    Args:
        data: Data of which the batch has rows: the training set or the meta-data.
        questions: settings of the model, as question_settings returns them.
    Returns: a dict, and the right answers (B,) long, -1 for none. The dict has
        pixels: (B, T, 3, S, S) frames, or features of regions
        tokens, question: {name: (B, L)} of the caption and of the question; the latter also has
            boxes (B, T, R, 4) if the set has them for VGT
        choices: {name: (B, C, L)} and choice_mask (B, C), for --task qa-choice
    """
    inputs = mama.inputs_of(batch, tokenizer)
    device, vocabulary = inputs["pixels"].device, questions["answers"]
    inputs.update(answers.question_inputs(
        data, batch["rows"], tokenizer, vocabulary, device, model=questions["model"]))
    target = answers.right_answers(data, batch["rows"], vocabulary)        # (B,)
    return inputs, common.to_device(target, device)


def look_ahead_losses(model, criterion):
    """Makes the function `losses` of weightnet_gradient, as mama.look_ahead_losses does; its second
    argument is a pair (inputs, target), as inputs_of returns it."""
    encode = common.functional_encoder(model)

    def losses(parameters, pair):
        inputs, target = pair
        return criterion(*encode(parameters, inputs), target)              # (B,)
    return losses


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
