"""Questions about videos: the model that answers them, what it reads of a row, how it is scored.

The model is VIOLET's in small (Fu et al. 2021): [CLS], a token for each frame and the words of the question go through
one transformer, and a linear layer on [CLS] scores the answers. Open questions have a vocabulary of answers, a score
each; questions with choices one score for each text "question choice", fused likewise. `dual` has no fusion: its scores
are cosines of the video with these texts. All of them are two towers before that, so their embeddings have cosines; or
every video goes with every text through the fusion, after two tokens in the place of [CLS], one for the video and one
for the text, and the cosine is that of what these two become (`similarity` fused).

common.build_model opens this file where model.json says `questions`; mama.py through common.answers().
"""

import dataclasses
import math
from collections import Counter

import common

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


# ======================================================= model =======================================================
class QuestionAnswerer(common.TwoTower):
    """Videos and questions -> scores of answers.

    Args:
        vision, text: the towers.
        answers: the vocabulary of open questions, most frequent first; [] = questions with choices.
        model: 'fusion'; or 'dual', for questions with choices alone.
        layers: of the fusion.   frames: tokens of a clip at most.
        similarity: of videos with texts: 'pooled', of their embeddings before the fusion; or 'fused'.
    block: texts at a time that go through the fusion with all videos; 0 = automatic, see common.by_rows.
    """
    block = 0

    def __init__(self, vision, text, answers=(), model="fusion", layers=2, frames=1, similarity="pooled"):
        super().__init__(vision, text)
        self.answers, self.model, self.frames, self.similarity = list(answers), model, frames, similarity
        if model == "dual":
            self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())    # as CLIP's
            return
        width = text.width
        self.frame = nn.Linear(vision.width, width)
        self.place = nn.Parameter(torch.randn(1 + frames, width) * 0.02)   # [CLS], and where each frame stands
        self.fusion = common.Transformer(width, layers, next(h for h in (12, 8, 4, 2, 1) if width % h == 0))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, max(1, len(self.answers)))
        if similarity == "fused":
            self.pair = nn.Parameter(torch.randn(2, width) * 0.02)
            vision.projection.requires_grad_(False)                        # they reach no loss: DDP would wait for them
            text.projection.requires_grad_(False)

    def forward(self, pixels=None, tokens=None, question=None, choices=None):
        """pixels (B, [T,] 3, S, S); tokens (B, L) of the texts that are paired with them, None in evaluation; question:
        tokens (B, L); choices: tokens (B, C, L) of "question choice", and `there` (B, C), False where one has fewer.

        Returns: video (B, D), text (B, D), scores (B, A) of the vocabulary or (B, C), -inf where no choice is; without
            a question what TwoTower returns. Where the similarity is fused and tokens are given, video and text are
            cosines (B, N) with all texts and all videos of the global batch: see `cosines`.
        """
        if question is None:
            return super().forward(pixels, tokens)
        frames = self.vision.frames(pixels)                                # (B * T, width)
        _, video = self.vision.pool(frames, pixels)                        # (B, D)
        frames = frames.unflatten(0, (len(pixels), -1))                    # (B, T, width)
        paired = None
        if tokens is not None and self.similarity == "fused":
            video, paired = self.cosines(frames, *self.text.words(**tokens)[:1], tokens["attention_mask"])
        elif tokens is not None:
            paired = self.text(**tokens)                                   # (B, D)
        if self.answers:
            words, _ = self.text.words(**question)                         # (B, L, W)
            first = self.fuse(self.place[:1], frames, words, question["attention_mask"])                 # (B, 1, W)
            return video, paired, self.head(first[:, 0])                   # (B, A)
        choices = choices or {k: v[:, None] for k, v in question.items()}  # one choice: the question itself
        B, C = choices["input_ids"].shape[:2]
        flat = {k: choices[k].flatten(0, 1) for k in ("input_ids", "attention_mask")}                    # (B * C, L)
        words, text = self.text.words(**flat)                              # (B * C, L, W), (B * C, D)
        if self.model == "dual":
            cosine = (common.normalize(video)[:, None] * common.normalize(text).unflatten(0, (B, C))).sum(-1)
            scores = cosine * self.log_scale.exp()                         # (B, C)
        else:
            each = frames.repeat_interleave(C, 0)                          # (B * C, T, width)
            scores = self.head(self.fuse(self.place[:1], each, words, flat["attention_mask"])).view(B, C)
        there = choices.get("there")
        return video, paired, scores if there is None else scores.masked_fill(~there, -math.inf)

    def fuse(self, first, frames, words, keep):
        """What the transformer makes of tokens (f, W) that stand before the frames (b, T, width) of a clip and words
        (b, L, W), keep (b, L) where there are words: (b, f, W)."""
        b, T = frames.shape[:2]
        if T > self.frames:
            raise common.UserError(f"{T} frames of a clip, but this model knows the places of {self.frames}; use "
                                   f"--frames {self.frames}")
        first = first.expand(b, -1, -1)                                    # (b, f, W)
        x = torch.cat([first, self.frame(frames) + self.place[1:1 + T], words], 1)   # (b, f + T + L, W)
        keep = torch.cat([keep.new_ones(b, first.shape[1] + T), keep], 1).bool()     # (b, f + T + L)
        return self.norm(self.fusion(x, keep, first.shape[1]))

    def cosines(self, frames, words, keep):
        """Cosines of all pairs of the global batch, each by a pass through the fusion.

        Args: frames (B, T, width), words (B, L, W), keep (B, L): of this process; row i of all is a pair.
        Returns: (B, N) its videos with all texts, (B, N) its texts with all videos. Each process fuses B * N pairs,
            those of its texts (all clips have T frames, while the texts of other processes may be longer).
        """
        videos = common.gather(frames)                                     # (N, T, width)
        N, length = len(videos), 2 + frames.shape[1] + words.shape[1]

        def rows(words, keep):                                             # b texts at a time
            each = videos.repeat(len(words), 1, 1)                         # (b * N, T, width)
            pairs = self.fuse(self.pair, each, words.repeat_interleave(N, 0), keep.repeat_interleave(N, 0))
            video, text = common.normalize(pairs).unbind(1)                # (b * N, W) each
            return (video * text).sum(1).view(-1, N)                       # (b, N)
        size = N * len(self.fusion) * length * words.shape[2]              # numbers in one activation of a text's pairs
        texts = common.by_rows(rows, words, keep, columns=size, block=self.block)                        # (B, N)
        return common.gather(texts)[:, common.positive_index(texts)].T, texts


def refuse_untrained(model):
    """Raises: UserError where the embeddings of a model that answers questions have reached no loss."""
    if getattr(model, "similarity", "") == "fused":
        raise common.UserError("the model was trained with --qa-similarity fused, not its embeddings before the fusion")


# ======================================================= rows ========================================================
def check(data, choices):
    """Raises: UserError where the rows are no questions, or have no choices that are asked for."""
    where = f"{data.name} ({data.split})"
    if data.streamed or data.column("question") is None or data.column("answer") is None:
        raise common.UserError(f"{where} has no questions; moving-emoji and the sets of sets/questions.py have")
    lacking = sum(len(c) < 2 for c in data.column("choices") or [[]] * len(data)) if choices else 0
    if lacking:
        raise common.UserError(f"{where}: {lacking:,} of its {len(data):,} questions have no choices; use --task "
                               "qa-open")


def texts(data, limit=None):
    """All that a tokenizer should know: captions, questions, answers, choices."""
    for i in range(min(len(data), limit or len(data))):
        yield from (*data.captions(i), data.column("question")[i], data.column("answer")[i], *_choices(data, i))


def inputs(data, rows, tokenizer, vocabulary, device):
    """What QuestionAnswerer reads of these rows beside the pixels, on the device.

    Returns: question {..: (B, L)}; answers (B,), see right_answers; and without a vocabulary choices {..: (B, C, L),
        there: (B, C)}, C the most that a row here has.
    """
    questions = [data.column("question")[i] for i in rows]
    found = {"question": tokenizer(questions), "answers": right_answers(data, rows, vocabulary)}
    if not vocabulary:
        choices = [_choices(data, i) for i in rows]
        C = max(map(len, choices))
        words = [f"{q} {c}" for q, some in zip(questions, choices) for c in [*some, *[""] * (C - len(some))]]
        there = torch.tensor([[k < len(some) for k in range(C)] for some in choices])                    # (B, C)
        found["choices"] = {k: v.unflatten(0, (-1, C)) for k, v in tokenizer(words).items()} | {"there": there}
    return {k: {n: t.to(device) for n, t in v.items()} if isinstance(v, dict) else v.to(device)
            for k, v in found.items()}


def right_answers(data, rows, vocabulary):
    """(B,) long: number of the right answer of each of these rows in the vocabulary, -1 where that lacks it; without a
    vocabulary its number among the choices."""
    answers = [data.column("answer")[i] for i in rows]
    return answer_numbers(answers, vocabulary, None if vocabulary else [_choices(data, i) for i in rows])


def cut_short(data, tokenizer, choices, limit=1000):
    """How many of the first `limit` questions (with their choices) have more tokens than the tokenizer keeps."""
    n, cut = min(limit, len(data)), 0
    for i in range(n):
        q = data.column("question")[i]
        longest = max([f"{q} {c}" for c in _choices(data, i)] if choices else [q], key=len)
        cut += len(tokenizer.tokenizer(longest)["input_ids"]) > tokenizer.length
    return cut, n


def banner_lines(questions, train, tokenizer, args):
    """What the banner of a run says of its questions: {word: text}."""
    cut, tried = cut_short(train, tokenizer, not questions["answers"])
    words = f"{args.task}, {args.qa_model}, similarity {args.qa_similarity}, eta {args.eta:g}"
    if questions["answers"]:
        known = set(questions["answers"])
        wrong = sum(a not in known for a in train.column("answer"))
        words += (f"; {len(known):,} answers, most frequent {questions['answers'][0]!r}; {wrong:,} training questions "
                  "have another, and no loss of it")
    words += f"; {cut} of the first {tried:,} texts are cut at --text-length {args.text_length}" if cut else ""
    return {"questions": words + ("; SHUFFLED VIDEOS, a control" if args.shuffle_video else "")}


def _choices(data, i):
    choices = data.column("choices")
    return choices[i] or [] if choices is not None else []


def shuffled(data, seed=0):
    """The same questions, each with the video of another row: what a model can tell without a look at the video."""
    rows = np.random.default_rng([7, seed]).permutation(len(data))
    rows = np.roll(rows, 1)[np.argsort(rows)]                              # one cycle: no row keeps its video
    if data.pixels is not None:
        return dataclasses.replace(data, pixels=data.pixels[torch.from_numpy(rows)])
    import datasets
    table = datasets.concatenate_datasets([data.texts, data.sources.select(rows)], axis=1)
    return dataclasses.replace(data, table=table)


# ======================================================= scores ======================================================
def answer_vocabulary(answers, size=1500):
    """The most frequent answers of a training split, for open questions; equally frequent ones by the alphabet."""
    counts = Counter(answers)
    return sorted(counts, key=lambda a: (-counts[a], a))[:size]


def answer_numbers(answers, vocabulary=None, choices=None):
    """(Q,) long: the place of each answer in the vocabulary, or among its own choices (Q lists); -1 = not there."""
    if choices is not None:
        places = [c.index(a) if a in c else -1 for a, c in zip(answers, choices, strict=True)]
    else:
        number = {answer: i for i, answer in enumerate(vocabulary)}
        places = [number.get(a, -1) for a in answers]
    return torch.tensor(places, dtype=torch.long)


def answer_hits(scores, answers):
    """Is the right answer's score above all others? (Q,) bool; ties count against the model.

    Args: scores: (Q, A) of a vocabulary's answers or of the choices, -inf where a question has fewer choices;
        answers: (Q,) long, the right one; -1 = the vocabulary lacks it: wrong, as the upper bound tells.
    Raises: NotFinite for NaN or +inf."""
    if torch.isnan(scores).any() or torch.isposinf(scores).any():
        raise common.NotFinite("scores of answers hold NaN or infinity")
    index = answers.clamp(min=0)[:, None]  # (Q, 1)
    others = scores.scatter(1, index, -math.inf).amax(1)  # (Q,)
    return (answers >= 0) & (scores.gather(1, index)[:, 0] > others)


def question_metrics(hits, types=None, pairs=None, known=None):
    """Accuracy of answers to questions, in percent: {accuracy[, upper_bound], accuracy TYPE for each type}.

    Args:
        hits: (Q,) right or wrong; or the chance of being right, 1 / choices, which gives what guessing gives.
        types: Q words, or pairs of words whose first is a family with an accuracy of its own ("causal why").
        pairs: (Q,) numbers; rows of one are one question, right when all are (Causal-VidQA's answer and reason), in
            `accuracy` and for a family; a type of two words counts its own rows alone.
        known: (Q,) is the answer in the vocabulary at all?
    """
    hits = np.asarray(hits, dtype=np.float64)
    def percent(values, rows):
        ids = np.arange(len(rows)) if pairs is None else np.unique(np.asarray(pairs)[rows], return_inverse=True)[1]
        right = np.ones(ids.max() + 1)
        np.multiply.at(right, ids, values[rows])  # a pair is right when both of its rows are
        return float(100 * right.mean())

    out = {"accuracy": percent(hits, np.arange(len(hits)))}
    if known is not None:
        out["upper_bound"] = percent(np.asarray(known, dtype=np.float64), np.arange(len(hits)))
    types = np.asarray([] if types is None else types, dtype=object)
    families = np.asarray([t.split()[0] for t in types], dtype=object)
    named = {name: np.flatnonzero((types == name) | (families == name)) for name in {*types, *families}}
    return out | {f"accuracy {name}": percent(hits, rows) for name, rows in sorted(named.items())}


def whole_pairs(data, index):
    """(Q,) bool, False for an answer or a reason without the other among these rows of data (part of the split is
    meta-data, or beyond --limit): by itself it would count as a question, and be an easier one.

    Raises: UserError where none is whole."""
    pairs, types = data.column("pair"), data.column("question_type")
    if pairs is None:
        return np.ones(len(index), bool)
    here = Counter(pairs[index].tolist())
    whole = np.array([here[pairs[i]] > 1 or len(types[i].split()) < 2 for i in index])                   # (Q,)
    if not whole.all():
        common.say(f"{data.name} ({data.split}): {(~whole).sum():,} of {len(index):,} questions are left out, answers "
                   "or reasons without the other")
    if not whole.any():
        raise common.UserError(f"{data.name} ({data.split}): no question has both its answer and its reason here")
    return whole


def evaluate(model, tokenizer, transform, data, device, batch=256, workers=0):
    """Accuracy of the answers, as question_metrics, beside what guessing gives. Collective.

    Returns: metrics; chance, of the most frequent answer of training or of a draw among the choices; the pieces that
        `draw` wants. Videos that cannot be read are left out and counted."""
    check(data, not model.answers)
    width = len(model.answers) or max(len(_choices(data, i)) for i in range(len(data)))

    def answer(rows, pixels):
        asked = inputs(data, rows, tokenizer, model.answers, device)
        video, _, scores = model(pixels, None, asked["question"], asked.get("choices"))
        return video, F.pad(scores, (0, width - scores.shape[1]), value=-math.inf)                       # (b, width)
    index, _, scores, bad = common.encode_images(model, data, transform, device, batch, workers, forward=answer)
    common.say_unreadable(data, bad)
    whole = whole_pairs(data, index)
    index, scores = index[whole], scores[torch.from_numpy(whole)]
    right = right_answers(data, index, model.answers)                     # (Q,)
    hits = answer_hits(scores, right).numpy()                       # (Q,)
    types, pairs = ([data.column(c)[i] for i in index] if data.column(c) is not None else None
                    for c in ("question_type", "pair"))
    known = (right >= 0).numpy() if model.answers else None
    guess = (right == 0).numpy() if model.answers else [1 / len(_choices(data, i)) for i in index]
    metrics = question_metrics(hits, types, pairs, known) | {"questions": len(index), "unreadable": len(bad)}
    chance = question_metrics(guess, types, pairs)
    given = [model.answers[k] if model.answers else _choices(data, i)[k]
             for i, k in zip(index, scores.argmax(1).tolist())]
    return metrics, chance, {"data": data, "index": index, "given": given, "hits": hits}


class Evaluator(common.Evaluator):
    """common.Evaluator for questions."""

    def check(self):
        """Before training: every split has questions of this kind, and readable videos."""
        for splits in self.sets.values():
            for data in splits.values():
                check(data, not self.model.answers)
        super().check()

    def measure(self, data, train):
        """metrics, chance and pieces of one split."""
        towers = self.model, self.tokenizer, self.transform
        return evaluate(*towers, data, self.device, self.args.eval_batch, self.args.workers)


def table(title, metrics, chance):
    """The result as lines of text, each accuracy beside what guessing gives."""
    lines = [f"{title}: {metrics['questions']} questions"]
    lines += [f"{name:<28}{metrics[name]:8.1f} ({value:6.1f})" for name, value in chance.items()]
    if "upper_bound" in metrics:
        lines.append(f"{'answers in the vocabulary':<28}{metrics['upper_bound']:8.1f}")
    guess = "the most frequent answer of training" if "upper_bound" in metrics else "a draw among the choices"
    return "\n".join([*lines, f"(in brackets: {guess})"])


def task(case):
    """The task qa of eval.py: writes the numbers of a Case (tools/case.py): answers by type of question, beside them
    the most frequent answer, or a draw among the choices."""
    subject, args = case.subject, case.args
    how = subject.transform, case.data, subject.device, args.eval_batch, args.workers
    if subject.own.get("shuffle_video"):
        common.say(f"WARNING: {case.name}: the run was a control (--shuffle-video); here each question has its own "
                   "video")
    metrics, case.chance["qa"], pieces = evaluate(subject.model, subject.tokenizer, *how)
    case.metrics["qa"] = {k: v for k, v in metrics.items() if k != "unreadable"}
    if common.rank() == 0:
        common.picture(case.picture("answers"), common.figures().draw_answers, pieces)
