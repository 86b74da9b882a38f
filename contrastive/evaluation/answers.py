"""Questions about videos: the input of the model that answers them, and its scores.

The model is a small VIOLET (Fu et al. 2021). [CLS], one token per frame and the words of the question go through one
transformer, and a linear layer on [CLS] scores the answers. An open question has one score per answer of a vocabulary.
A question with choices has one score per text "question choice", fused in the same way. Below the fusion there are two
towers, and by default their embeddings give the cosine of a video and a text. With `similarity` fused, every video goes
through the fusion with every text, after one token for the video and one for the text in place of [CLS]; the cosine is
that of their outputs. The model is common.QuestionAnswerer; `vgt` is in encoders/vgt.py.

This file has the flags, prepares the input and scores the output.
"""

import argparse
import dataclasses
import math
from collections import Counter

from contrastive.encoders.vgt import FRAMES
from contrastive.engine.processes import UserError, mean_over_processes, say, to_device
from contrastive.engine.ranges import below_one, between, count
from contrastive.evaluation.embed import encode_images
from contrastive.evaluation.metrics import answer_hits, answer_vocabulary, question_metrics

import numpy as np
import torch
import torch.nn.functional as F


# ======================================================= flags =======================================================
def add_flags(p):
    """The flags of mama.py's models that answer questions."""
    g = p.group("with --task qa-open or qa-choice", task=("qa-open", "qa-choice"))
    g.add_argument("--qa-model", choices=["fusion", "vgt"], default="fusion",
                   help="one transformer of frames and words, as VIOLET's; or VGT's graph")
    g.add_argument("--qa-similarity", choices=["pooled", "fused"], default="pooled",
                   help="s_ij of Eq. 1: before the fusion; or in it, which all B x N pairs go through")
    g.add_argument("--shuffle-video", action=argparse.BooleanOptionalAction, default=False,
                   help="a control: every question gets the video of another")
    g = p.group("with --task qa-open", task="qa-open")
    g.add_argument("--answers", type=between(2, 10**6, int), default=1500,
                   help="the most frequent of training; all others count as wrong")
    g = p.group("where questions have --qa-model fusion", task=("qa-open", "qa-choice"), qa_model="fusion")
    g.add_argument("--fusion-layers", type=between(1, 64, int), default=2, help="of that transformer")
    g = p.group("with --qa-model vgt", qa_model="vgt")
    g.add_argument("--region-dir", default="", metavar="DIR",
                   help="features in VGT's files (docs/data.md); empty = from boxes of the set (moving-emoji)")
    g.add_argument("--regions", type=count, default=0, help="R, boxes of a frame; NExT-QA 5, others 10")
    g.add_argument("--dropout", type=below_one, default=0.3, help="of VGT's own layers; BERT keeps its own")


def check_flags(p, args):
    """Refuses flags of questions that do not go together."""
    vgt, fused, files = args.qa_model == "vgt", args.qa_similarity == "fused", bool(args.region_dir)
    p.require(args.contrastive_weight or args.task != "retrieval" and args.eta,
              "--contrastive-weight 0: without questions (--task qa-open or qa-choice, --eta above 0) no loss is left")
    p.only(args.contrastive_weight, "with --contrastive-weight above 0", "--loss", "--qa-similarity")
    p.require(not fused or args.qa_model == "fusion", "--qa-similarity fused: only with --qa-model fusion")
    p.require(not (fused and args.chunk_size), "--chunk-size: --qa-similarity fused needs all videos and texts at once")
    p.require(files == (args.image_encoder == "regions"),
              "--region-dir DIR and --image-encoder regions go together, and both need --qa-model vgt")
    p.require(not vgt or args.frames % FRAMES == 0,
              f"--frames {args.frames}: VGT has clips of {FRAMES} frames; use a multiple of {FRAMES}")
    p.require(not vgt or (args.crop_min, args.flip) == (1, 0),
              "--qa-model vgt: its boxes follow neither crop nor mirror image; use --crop-min 1 --flip 0")
    p.require(not (vgt and args.clean_captions), "--qa-model vgt: --clean-captions would break up its [SEP]")
    p.only(not vgt, "without --qa-model vgt, which reads all words", "--text-pooling")
    p.only(not files, "without --region-dir", "--video-dir", "--frame-cache", "--frame-sampling", "--jitter",
           "--eval-datasets", "--image-stats", "--eval-resize")


# ======================================================= rows ========================================================
AT_FRAMES = ("tgif-qa-r-action", "tgif-qa-r-transition")  # the sets in which VGT's step 8 also sees single frames


def lacking(data, choices):
    """Why a model of questions (with choices) cannot use the rows; "" if it can."""
    if data.streamed or data.column("question") is None or data.column("answer") is None:
        return f"{data.name} ({data.split}) has no questions"
    if choices and any(len(c) < 2 for c in asked(data).column("choices") or [()]):
        return f"{data.name} ({data.split}) has questions without choices; use --task qa-open"
    return ""


def asked(data):
    """The rows that have a question. Those of --extra-pairs have none; their answer loss is 0 (eta_i of Eq. 3)."""
    data = data.own or data
    rows = [i for i, question in enumerate(data.column("question")) if question is not None]
    return data if len(rows) == len(data) else data.select(rows)


def texts(data, limit=None):
    """All texts to train a tokenizer on: captions, questions, answers and choices."""
    for i in range(min(len(data), limit or len(data))):
        said = [text for c in ("question", "answer") if (text := data.cell(c, i)) is not None]
        yield from (*data.captions(i), *said, *_choices(data, i))


def inputs(data, rows, tokenizer, vocabulary, device, model="fusion"):
    """The inputs of QuestionAnswerer for these rows, apart from the pixels, on the device.

    Returns: question {..: (B, L)} and, if the set has regions for VGT, its boxes (B, T, R, 4); answers (B,), see
        right_answers; and without a vocabulary choices {..: (B, C, L), there: (B, C)}, C = the largest number of
        choices of these rows. A row without a question gets its caption as question and one choice: its scores are
        finite but enter no loss.
    """
    questions = [data.captions(i)[0] if (q := data.cell("question", i)) is None else q for i in rows]
    found = {"question": tokenizer(questions), "answers": right_answers(data, rows, vocabulary)}
    if "boxes" in data.texts.column_names:
        found["question"]["boxes"] = torch.tensor([data.cell("boxes", i) for i in rows])                 # (B, T, R, 4)
    if not vocabulary:
        choices = [_choices(data, i) or [""] for i in rows]
        C = max(map(len, choices))
        some = [[*of_row, *[""] * (C - len(of_row))] for of_row in choices]
        words = asked_choices(questions, some, model, tokenizer)           # B * C texts
        there = torch.tensor([[k < len(some) for k in range(C)] for some in choices])                    # (B, C)
        found["choices"] = {k: v.unflatten(0, (-1, C)) for k, v in tokenizer(words).items()} | {"there": there}
    return {k: {n: to_device(t, device) for n, t in v.items()} if isinstance(v, dict) else to_device(v, device)
            for k, v in found.items()}


def asked_choices(questions, choices, model, tokenizer):
    """The texts "question choice" of Q questions, in order; choices: Q lists. For VGT the text encoder's own token,
    BERT's [SEP], stands between them."""
    token = tokenizer.tokenizer.sep_token if model == "vgt" else ""
    join = f" {token} " if token else " "
    return [f"{question}{join}{choice}" for question, some in zip(questions, choices) for choice in some]


def right_answers(data, rows, vocabulary):
    """(B,) long: index of each row's right answer in the vocabulary, -1 if it is not there or the row has no question.
    Without a vocabulary: its index among the row's choices."""
    number, answers = {answer: k for k, answer in enumerate(vocabulary)}, [data.cell("answer", i) for i in rows]
    if vocabulary:
        return torch.tensor([number.get(a, -1) for a in answers])
    choices = [_choices(data, i) for i in rows]
    return torch.tensor([of_row.index(a) if a in of_row else -1 for a, of_row in zip(answers, choices)])


def questions_of(train, args):
    """The settings of the question-answering model; None for retrieval.

    Raises: UserError if the rows do not have such questions."""
    if args.task == "retrieval":
        if any(train.captions(i) == [q] for i, q in enumerate(train.column("question") or ())):
            raise UserError(f"--task retrieval: {train.name} has questions in place of captions; use --task qa-open or "
                            "qa-choice, or msrvtt, msvd, ...")
        return None
    choices = args.task == "qa-choice"
    if why := lacking(train, choices):
        raise UserError(why)
    known = [] if choices else answer_vocabulary(asked(train).column("answer"), args.answers)
    if args.qa_model == "vgt" and args.image_encoder != "regions" and train.column("boxes") is None:
        raise UserError(f"--qa-model vgt: {train.name} has no boxes of its own, as moving-emoji has; give features of "
                        "regions with --region-dir DIR --image-encoder regions")
    similarity = args.qa_similarity if args.contrastive_weight else "none"
    found = {"answers": known, "model": args.qa_model, "similarity": similarity}
    if args.qa_model == "vgt":
        return found | {"regions": args.regions, "dropout": args.dropout, "at_frames": args.dataset in AT_FRAMES}
    return found | {"layers": args.fusion_layers, "frames": args.frames}


def guess_of(train, questions):
    """Mean answer loss of a random guess, in nats: the logarithm of the size of the vocabulary or of the mean number of
    choices, times the share of the rows that have such a loss (answer_loss); 0 for retrieval."""
    if not questions:
        return 0.0
    some, known = asked(train), set(questions["answers"])
    many = len(known) or sum(map(len, some.column("choices"))) / len(some)
    right = sum(a in known for a in some.column("answer")) if known else len(some)
    return math.log(many) * right / len(train)


def question_lines(questions, train, args):
    """The banner's lines about a run's questions and the texts that are paired with the videos: {word: text}."""
    some, rows = asked(train), len(train)
    words = f"{args.task}, {args.qa_model}, similarity {args.qa_similarity}, eta {args.eta:g}"
    words += f", contrastive weight {args.contrastive_weight:g}"
    if questions["answers"]:
        known = set(questions["answers"])
        wrong = sum(a not in known for a in some.column("answer"))
        words += f"; {len(known):,} answers; {wrong:,} training questions have another answer, which enters no loss"
    bare = sum(some.captions(i) == [question] for i, question in enumerate(some.column("question")))
    paired = f"of {rows:,} rows {rows - bare:,} have a caption, {bare:,} use the question in its place"
    paired += f"; {rows - len(some):,} have no question, and eta 0" if len(some) < rows else ""
    return {"questions": words + ("; SHUFFLED VIDEOS, a control" if args.shuffle_video else ""), "paired text": paired}


def numbers(scores, right, losses, rows, data, device):
    """Columns of the log: CE, the mean answer loss, 0 for rows without a question (Eq. 3); and answered, the share of
    the batch's questions that are answered right, %. Collective.

    Args: scores (B, A), right (B,), losses (B,): of this process; rows (B,): of data."""
    known = torch.tensor([data.cell("question", i) is not None for i in rows])                           # (B,)
    means = mean_over_processes({"CE": losses.mean(), "answered": 100 * answer_hits(scores, right).float().mean(),
                                 "known": known.float().mean()}, device)
    share, right = means.pop("known"), means.pop("answered")
    return means | ({"answered": right / share} if share else {})


def _choices(data, i):
    return data.cell("choices", i) or [] if "choices" in data.texts.column_names else []


def shuffled(data, seed=0):
    """The same questions, each with the video of another row. It shows what a model can tell without the video."""
    rows = np.random.default_rng([7, seed]).permutation(len(data))
    rows = np.roll(rows, 1)[np.argsort(rows)]                              # a single cycle: no row keeps its video
    if (boxes := data.column("boxes")) is not None:                        # they go with the video
        moved = data.table.remove_columns("boxes").add_column("boxes", [boxes[i] for i in rows])
        data = dataclasses.replace(data, table=moved)
    if data.pixels is not None:
        return dataclasses.replace(data, pixels=data.pixels[torch.from_numpy(rows)])
    import datasets
    table = datasets.concatenate_datasets([data.texts, data.sources.select(rows)], axis=1)
    return dataclasses.replace(data, table=table)


def whole_pairs(data, index):
    """(Q,) bool, False for an answer whose reason is not among these rows of data, or the reverse (because of meta-data
    or a bad sample). Alone, it would count as a question, and as an easier one.

    Raises: UserError if no pair is complete."""
    pairs, types = data.column("pair"), data.column("question_type")
    if pairs is None:
        return np.ones(len(index), bool)
    here = Counter(pairs[index].tolist())
    whole = np.array([here[pairs[i]] > 1 or len(types[i].split()) < 2 for i in index])                   # (Q,)
    if not whole.all():
        say(f"{data.name} ({data.split}): {(~whole).sum():,} of {len(index):,} questions are left out: answers "
            "without their reason, or the reverse")
    if not whole.any():
        raise UserError(f"{data.name} ({data.split}): no question has both its answer and its reason here")
    return whole


def evaluate(model, tokenizer, transform, data, device, workers=0, batch=256):
    """Accuracy of the answers, as in question_metrics, and of guessing. Collective.

    Returns: metrics; chance: of the most frequent training answer, or of a random choice; the pieces that `draw` needs.
        Videos that cannot be read are left out and counted."""
    width = len(model.answers) or max(len(_choices(data, i)) for i in range(len(data)))
    kind = getattr(model, "model", "fusion")

    def answer(rows, pixels):
        asked = inputs(data, rows, tokenizer, model.answers, device, kind)
        video, _, scores = model(pixels, None, asked["question"], asked.get("choices"))
        return video, F.pad(scores, (0, width - scores.shape[1]), value=-math.inf)                       # (b, width)
    index, _, scores, bad = encode_images(model, data, transform, device, batch, workers, forward=answer)
    whole = whole_pairs(data, index)
    index, scores = index[whole], scores[torch.from_numpy(whole)]
    right = right_answers(data, index, model.answers)                      # (Q,)
    hits = answer_hits(scores, right).numpy()                              # (Q,)
    types, pairs = ([data.column(c)[i] for i in index] if data.column(c) is not None else None
                    for c in ("question_type", "pair"))
    known = (right >= 0).numpy() if model.answers else None
    guess = (right == 0).numpy() if model.answers else [1 / len(_choices(data, i)) for i in index]
    metrics = question_metrics(hits, types, pairs, known) | {"questions": len(index), "unreadable": len(bad)}
    read = [data.cell("question", i) for i in index]                       # (Q,)
    if not model.answers:
        read = asked_choices(read, [_choices(data, i) for i in index], kind, tokenizer)
    if cut := tokenizer.cut(read):
        metrics["texts_cut"] = cut
    chance = question_metrics(guess, types, pairs)
    given = [model.answers[k] if model.answers else _choices(data, i)[k]
             for i, k in zip(index, scores.argmax(1).tolist())]
    return metrics, chance, {"data": data, "index": index, "given": given, "hits": hits}
