"""Questions about videos (MAMA): their rows, the input of a model, and its accuracy.

The models are QuestionAnswerer (encoders/questions.py) and VGT (encoders/vgt.py). An open question
has a score for each answer of a vocabulary, a question with choices one for each of its choices.
"""

import math
from collections import Counter

from contrastive.core.metrics import answer_hits, answer_vocabulary, question_metrics
from contrastive.core.processes import UserError, gather, print_main, to_device
from contrastive.evaluation.embed import check_outputs, outputs_of_images
from contrastive.evaluation.pieces import EvaluationPieces

import numpy as np
import torch
import torch.nn.functional as F

# sets for which VGT attends to words at single frames as well as at clips
FRAME_LEVEL_SETS = ("tgif-qa-r-action", "tgif-qa-r-transition")


# ===================================================== rows =======================================
def reason_without_questions(data, with_choices):
    """Why the data cannot be used to answer questions; "" if they can.

    Args:
        with_choices: whether the model scores choices.
    """
    if data.column("question") is None or data.column("answer") is None:
        return f"{data.full_name} has no questions"
    if with_choices:
        choices = rows_with_questions(data).column("choices") or [()]
        if min(map(len, choices)) < 2:
            return f"{data.full_name} has questions without choices; use --task qa-open"
    return ""


def rows_with_questions(data):
    """The data without the rows of --extra-pairs, which have no question."""
    data = data.before_extra_pairs or data
    questions = data.column("question")
    rows = [i for i in range(len(data)) if questions[i] is not None]
    if len(rows) == len(data):
        return data
    return data.select(rows)


def choices_of_row(data, i):
    """The choices of row i; [] of an open question, and of a row without a question."""
    if "choices" not in data.annotations.column_names:
        return []
    return data.cell("choices", i) or []


def texts_for_tokenizer(data, limit=None):
    """Yields the texts from which a tokenizer learns: captions, questions, answers and choices.

    Args:
        limit: number of rows; None = all.
    """
    for i in range(min(len(data), limit or len(data))):
        yield from data.captions(i)
        for column in ("question", "answer"):
            if data.cell(column, i) is not None:
                yield data.cell(column, i)
        yield from choices_of_row(data, i)


# ===================================================== model ======================================
def question_settings(train, args):
    """The keywords of the model that answers questions, as model.json has them.

    Args: args: the flags of variants/mama_qa.py.
    Raises: UserError if the rows do not have such questions.
    """
    with_choices = args.task == "qa-choice"
    reason = reason_without_questions(train, with_choices)
    if reason:
        raise UserError(f"{reason}; give a set with questions")
    vocabulary = []
    if not with_choices:
        answers = rows_with_questions(train).column("answer")
        vocabulary = answer_vocabulary(answers, args.answers)
    settings = {"answers": vocabulary, "model": args.qa_model}
    if args.qa_model == "fusion":
        return settings | {"layers": args.fusion_layers, "frames": args.frames}
    if args.image_encoder != "regions" and train.column("boxes") is None:
        raise UserError(f"--qa-model vgt: {train.name} has no boxes of its own, as moving-emoji "
                        "has; give features of regions with --region-dir DIR --image-encoder "
                        "regions")
    return settings | {"regions": args.regions, "dropout": args.vgt_dropout,
                       "at_frames": args.dataset in FRAME_LEVEL_SETS}


# ===================================================== input ======================================
def question_inputs(data, rows, tokenizer, vocabulary, device, *, model="fusion"):
    """The inputs of a model that answers questions, without the pixels, on the device.

    A row without a question gets its caption as the question, and one choice. Its scores are finite
    but enter no loss.

    Args:
        vocabulary: answers of open questions; [] = questions with choices.
        model: 'fusion' or 'vgt'.
    Returns: a dict of
        question: tokens {name: (B, L)}, and boxes (B, T, R, 4) if the set has them for VGT
        choices, without a vocabulary: tokens {name: (B, C, L)}, where C is the largest number of
            choices of these rows, and choice_mask (B, C), False for a missing choice
    """
    questions = []
    for i in rows:
        question = data.cell("question", i)
        questions.append(data.captions(i)[0] if question is None else question)
    tokens = dict(tokenizer(questions))                                    # (B, L) each
    if "boxes" in data.annotations.column_names:
        tokens["boxes"] = torch.tensor([data.cell("boxes", i) for i in rows])        # (B, T, R, 4)
    inputs = {"question": tensors_to_device(tokens, device)}
    if vocabulary:
        return inputs

    choices = [choices_of_row(data, i) or [""] for i in rows]
    C = max(map(len, choices))
    padded = [row_choices + [""] * (C - len(row_choices)) for row_choices in choices]
    tokens = tokenizer(choice_texts(questions, padded, model, tokenizer))  # (B * C, L) each
    tokens = {name: ids.unflatten(0, (-1, C)) for name, ids in tokens.items()}           # (B, C, L)
    num_choices = torch.tensor([len(row_choices) for row_choices in choices])            # (B,)
    tokens["choice_mask"] = torch.arange(C) < num_choices[:, None]         # (B, C)
    inputs["choices"] = tensors_to_device(tokens, device)
    return inputs


def tensors_to_device(tensors, device):
    """{name: tensor} on the device."""
    return {name: to_device(x, device) for name, x in tensors.items()}


def choice_texts(questions, choices, model, tokenizer):
    """The texts "question choice" of all choices, in order: Q questions, Q lists -> list of str.

    For VGT the text encoder's own separator, BERT's [SEP], stands between them.
    """
    separator = " "
    if model == "vgt" and tokenizer.tokenizer.sep_token:
        separator = f" {tokenizer.tokenizer.sep_token} "
    result = []
    for question, row_choices in zip(questions, choices):
        result += [f"{question}{separator}{choice}" for choice in row_choices]
    return result


def right_answers(data, rows, vocabulary):
    """(B,) long: number of each row's right answer in the vocabulary, or among its choices.

    It is -1 for an answer that is in neither, and for a row without a question.
    """
    numbers = []
    number_of_answer = {answer: k for k, answer in enumerate(vocabulary)}
    for i in rows:
        answer = data.cell("answer", i)
        if vocabulary:
            numbers.append(number_of_answer.get(answer, -1))
        else:
            choices = choices_of_row(data, i)
            numbers.append(choices.index(answer) if answer in choices else -1)
    return torch.tensor(numbers)


# ===================================================== log and banner =============================
@torch.no_grad()
def answered_column(scores, target, data, rows):
    """Column of the log: {'answered': percent of the questions of the global batch}; {} of none."""
    has_question = torch.tensor([data.cell("question", i) is not None for i in rows])    # (B,)
    hits = answer_hits(scores, target)                                     # (B,)
    counts = torch.stack([hits, has_question.to(hits.device)], dim=1)      # (B, 2)
    num_hits, num_questions = gather(counts.float()).sum(0).tolist()
    if not num_questions:
        return {}
    return {"answered": 100 * num_hits / num_questions}


def banner_lines(questions, train, args):
    """Lines of the banner: {title: text}. Args: questions: as question_settings returns them."""
    rows = rows_with_questions(train)
    line = f"{args.task}, {args.qa_model}"
    vocabulary = set(questions["answers"])
    if vocabulary:
        num_unknown = sum(answer not in vocabulary for answer in rows.column("answer"))
        line += f"; {len(vocabulary):,} answers; {num_unknown:,} questions have another and no loss"
    num_repeated = sum(rows.captions(i) == [q] for i, q in enumerate(rows.column("question")))
    pairs = f"{num_repeated:,} of {len(train):,} rows have no caption: the question takes its place"
    if len(rows) < len(train):
        pairs += f"; {len(train) - len(rows):,} have no question, and eta 0"
    return {"questions": line, "paired text": pairs}


# ===================================================== evaluation =================================
def evaluate(towers, data, device, *, workers=0, batch=256):
    """Accuracy of the answers, as question_metrics has it, and of guessing. Collective.

    Videos that cannot be read are left out and counted.

    Args:
        towers: (model, tokenizer, transform).
    Returns: metrics; chance, of the most frequent training answer or of a random choice;
        EvaluationPieces with index (Q,), predicted (Q answers) and hits (Q,).
    """
    model, tokenizer, transform = towers
    width = len(model.answers)
    if not model.answers:
        width = max(len(choices_of_row(data, i)) for i in range(len(data)))
    kind = model.model

    def answer(rows, pixels):
        inputs = question_inputs(data, rows, tokenizer, model.answers, device, model=kind)
        _, _, scores = model(pixels, None, inputs["question"], inputs.get("choices"))
        # other batches may have more choices
        num_missing = width - scores.shape[1]
        return (F.pad(scores, (0, num_missing), value=-math.inf),)         # (b, width)

    index, (scores,), unreadable, _ = outputs_of_images(
        model, data, transform, device, forward=answer, batch=batch, workers=workers)
    check_outputs(data.full_name, scores.masked_fill(scores == -math.inf, 0))
    is_complete = complete_pairs(data, index)                              # (M,)
    index, scores = index[is_complete], scores[torch.from_numpy(is_complete)]
    target = right_answers(data, index, model.answers)                     # (Q,)
    hits = answer_hits(scores, target).numpy()                             # (Q,)
    guesses, in_vocabulary = guess_probabilities(data, index, target, model.answers)
    types = cells_of(data, "question_type", index)
    pairs = cells_of(data, "pair", index)
    metrics = question_metrics(hits, types, pairs, in_vocabulary)
    metrics.update(questions=len(index), unreadable=len(unreadable))
    num_cut = count_cut_texts(data, index, model, tokenizer)
    if num_cut:
        metrics["texts_cut"] = num_cut
    chance = question_metrics(guesses, types, pairs)

    answers = []
    for i, best in zip(index, scores.argmax(1).tolist()):
        candidates = model.answers or choices_of_row(data, i)
        answers.append(candidates[best])
    return metrics, chance, EvaluationPieces(data, index, predicted=answers, hits=hits)


def complete_pairs(data, index):
    """(M,) bool: False for an answer without its reason among these rows, or the reverse.

    The other part may be among the meta-data, or a bad sample. A single part would count as an
    easier question.

    Raises: UserError if no pair is complete.
    """
    pairs, types = data.column("pair"), data.column("question_type")
    if pairs is None:
        return np.ones(len(index), bool)
    num_parts = Counter(pairs[index].tolist())
    is_complete = []
    for i in index:
        has_one_part = len(types[i].split()) < 2
        is_complete.append(has_one_part or num_parts[pairs[i]] > 1)
    is_complete = np.array(is_complete)                                    # (M,)
    if not is_complete.all():
        num_left_out = (~is_complete).sum()
        print_main(f"{data.full_name}: {num_left_out:,} of {len(index):,} questions are left "
                   "out: answers without their reason, or the reverse")
    if not is_complete.any():
        raise UserError(f"{data.full_name}: no question has both its answer and its "
                        "reason here")
    return is_complete


def guess_probabilities(data, index, target, vocabulary):
    """The chance of a guess, (Q,), and whether the answer is in the vocabulary, (Q,) or None.

    A guess is the most frequent answer of training, which is the first of the vocabulary, or a
    random choice.
    """
    if vocabulary:
        return (target == 0).numpy(), (target >= 0).numpy()
    return [1 / len(choices_of_row(data, i)) for i in index], None


def cells_of(data, column, index):
    """The values of a column in these rows; None without the column."""
    values = data.column(column)
    if values is None:
        return None
    return [values[i] for i in index]


def count_cut_texts(data, index, model, tokenizer):
    """Number of questions, or of texts "question choice", that are longer than --text-length."""
    questions = [data.cell("question", i) for i in index]
    if model.answers:
        return tokenizer.count_cut(questions)
    choices = [choices_of_row(data, i) for i in index]
    return tokenizer.count_cut(choice_texts(questions, choices, model.model, tokenizer))
