"""Answers to questions: the loss and the model by hand, and their accuracy."""

import math

import common
from contrastive import evaluation
from contrastive.engine.processes import UserError
from contrastive.evaluation.metrics import answer_hits

import pytest
import torch

import mama

CPU = torch.device("cpu")


def test_answer_loss_against_a_loop():
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[1, 3:] = -math.inf  # a question with three choices
    right = torch.tensor([4, 2, -1, 0])
    expected = [0.0 if k < 0 else math.log(sum(math.exp(float(s - row[k])) for s in row)) for row, k in
                zip(scores, right.tolist())]
    loss = mama.answer_loss(scores, right)
    assert loss.tolist() == pytest.approx(expected, rel=1e-6) and loss[2] == 0
    leaf = scores.requires_grad_()
    mama.answer_loss(leaf, right).sum().backward()
    assert leaf.grad.isfinite().all() and not leaf.grad[2].any() and not leaf.grad[1, 3:].any()


# ---------------------------------------------------- model ----------------------------------------------------------


def model_of(choices=(), **more):
    torch.manual_seed(0)
    towers = common.VisionEncoder("small", 16, False), common.TextEncoder("small", 16, length=12, vocabulary=50)
    keywords = dict(answers=choices, frames=3) | more
    return common.QuestionAnswerer(*towers, **keywords).eval()


def clips_of(n):
    return torch.randn(n, 3, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def words(*shape, keep=None):
    ids = torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(shape, dtype=torch.long)
    if keep is not None:
        mask[..., keep:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_open_scores_look_at_question_and_frames_but_not_at_padding():
    model, clips = model_of(["yes", "no", "two"]), clips_of(2)
    question = words(2, 8, keep=5)
    video, text, scores = model(clips, None, question)
    assert scores.shape == (2, 3) and text is None
    short = {k: v[:, :5] for k, v in question.items()}
    other = question | {"input_ids": torch.cat([question["input_ids"][:, :5], words(2, 3)["input_ids"]], 1)}
    assert torch.allclose(model(clips, None, short)[2], scores, atol=1e-5)
    assert torch.allclose(model(clips, None, other)[2], scores, atol=1e-5)
    assert not torch.allclose(model(clips, None, words(2, 8))[2], scores, atol=1e-3)
    assert not torch.allclose(model(clips.flip(1), None, question)[2], scores, atol=1e-3)  # the order of time
    plain = model(clips, question)  # without a question: two towers
    assert torch.allclose(plain[0], video, atol=1e-6) and plain[2].shape == (2, 128)


@torch.no_grad()
def test_scores_of_choices():
    """Each choice by itself gives the score that it has among others; absent ones are -inf."""
    model, clips = model_of(), clips_of(2)
    choices = words(2, 4, 6) | {"there": torch.tensor([[True] * 4, [True, True, False, False]])}
    scores = model(clips, words(2, 5), words(2, 5), choices)[2]
    assert scores.shape == (2, 4) and scores.isneginf().tolist() == (~choices["there"]).tolist()
    for b, c in choices["there"].nonzero().tolist():
        alone = {k: choices[k][b:b + 1, c:c + 1] for k in ("input_ids", "attention_mask")}
        single = model(clips[b:b + 1], None, words(1, 5), alone)[2]
        assert torch.allclose(single[0, 0], scores[b, c], atol=1e-4)


def test_fused_cosines_are_those_of_each_pair_alone():
    """One pass for all pairs, in blocks or not, against a double loop; so is the loss, and its gradient is finite."""
    model, clips = model_of(["yes", "no"], similarity="fused", layers=2).double(), clips_of(4).double()
    tokens, question = words(4, 6), words(4, 5)
    for row, length in enumerate((6, 3, 5, 1)):
        tokens["attention_mask"][row, length:] = 0
    assert not torch.equal(model(clips, None, question)[0], model(clips, tokens, question)[0])
    video, text, scores = model(clips, tokens, question)
    assert video.shape == text.shape == (4, 4) and torch.equal(video, text.T) and scores.shape == (4, 2)
    frames = model.vision.frames(clips).unflatten(0, (4, 3))
    for i in range(4):
        for j, length in enumerate(tokens["attention_mask"].sum(1).tolist()):
            short = {k: v[j:j + 1, :length] for k, v in tokens.items()}
            v, t = model.fuse(model.pair, frames[i:i + 1], model.text.words(**short)[0], short["attention_mask"])[0]
            assert torch.cosine_similarity(v, t, 0).item() == pytest.approx(video[i, j].item(), abs=1e-9)
    losses, mu, tau = mama.fused_margin_loss(video, text, 0.5, 0.3), 0.3, 0.5
    for i in range(4):
        expected = 0.0
        for row in (video[i], video[:, i]):
            angle = math.acos(row[i].item())
            near = math.cos(max(angle - mu, 0)) if angle <= math.pi / 2 else row[i].item()
            others = sum(math.exp(row[k].item() / tau) for k in range(4) if k != i)
            expected += math.log(math.exp(near / tau) + others) - near / tau
        assert losses[i].item() == pytest.approx(expected, rel=1e-6)
    gradients = []
    for model.block in (0, 1, 3):
        model.zero_grad()
        mama.fused_margin_loss(*model(clips, tokens, question)[:2], 0.5, 0.3).sum().backward()
        gradients.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    for name in ("pair", "place", "frame.weight", "fusion.0.qkv.weight", "text.body.token.weight"):
        whole = gradients[0][name]
        assert whole.isfinite().all() and whole.any()
        assert all(torch.allclose(whole, parts[name], rtol=1e-6, atol=1e-12) for parts in gradients[1:])


# ---------------------------------------------------- accuracy -------------------------------------------------------


def test_a_hit_is_the_highest_score_and_ties_are_none():
    inf = float("inf")
    scores = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.5, 0.1], [2.0, 1.0, -inf], [0.0, 0.0, 0.0], [3.0, 1.0, 2.0]])
    assert answer_hits(scores, torch.tensor([1, 0, 0, 2, -1])).tolist() == [True, False, True, False, False]
    assert answer_hits(scores[:1].half(), torch.tensor([0])).tolist() == [False]
    for bad in (float("nan"), inf):
        with pytest.raises(ValueError, match="non-finite"):
            answer_hits(torch.tensor([[bad, 0.0]]), torch.tensor([1]))


def test_the_vocabulary_is_of_the_most_frequent_answers():
    answers = ["two", "dog", "cat", "two", "cat", "two", "ant"]
    assert evaluation.metrics.answer_vocabulary(answers) == ["two", "cat", "ant", "dog"]
    vocabulary = evaluation.metrics.answer_vocabulary(answers, 2)
    table = common.make_table([["x"]] * 3, "abc", ["x"] * 3, answer=["cat", "dog", "two"], choices=[["a", "cat"]] * 3)
    data = common.Data("some", "test", table)
    assert evaluation.answers.right_answers(data, range(3), vocabulary).tolist() == [1, -1, 0]
    assert evaluation.answers.right_answers(data, range(2), []).tolist() == [1, -1]


def test_accuracy_by_hand():
    assert evaluation.metrics.question_metrics([True, False, True, True]) == {"accuracy": 75.0}
    known = [True, False, True, True, False]  # two answers are not in the vocabulary: wrong, and the bound is 60
    assert evaluation.metrics.question_metrics([1, 0, 0, 1, 0], known=known) == {"accuracy": 40.0, "upper_bound": 60.0}
    types = ["causal why", "causal how", "causal why", "temporal next", "descriptive"]
    assert evaluation.metrics.question_metrics([1, 1, 0, 0, 1], types) == {
        "accuracy": 60.0, "accuracy causal": pytest.approx(200 / 3), "accuracy causal how": 100.0,
        "accuracy causal why": 50.0, "accuracy descriptive": 100.0, "accuracy temporal": 0.0,
        "accuracy temporal next": 0.0}


def test_answer_and_reason_must_both_be_right():
    """Causal-VidQA: four questions a video in the mean of all, predictive and counterfactual right by both halves."""
    types = ["descriptive", "explanatory", "predictive answer", "predictive reason", "counterfactual answer",
             "counterfactual reason"]
    hits = [[1, 0, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0]]
    pairs = [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 7]
    found = evaluation.metrics.question_metrics(sum(hits, []), types * 2, pairs)
    assert found == {
        "accuracy": 50.0,  # descriptive 2, explanatory 1, predictive 1, counterfactual 0 of 8
        "accuracy descriptive": 100.0, "accuracy explanatory": 50.0, "accuracy predictive": 50.0,
        "accuracy predictive answer": 50.0, "accuracy predictive reason": 100.0, "accuracy counterfactual": 0.0,
        "accuracy counterfactual answer": 50.0, "accuracy counterfactual reason": 0.0}
    chance = evaluation.metrics.question_metrics([1 / 5] * 12, types * 2, pairs)  # of a random choice among five
    assert chance["accuracy"] == pytest.approx(100 * (0.2 + 0.2 + 0.04 + 0.04) / 4)
    assert chance["accuracy predictive"] == pytest.approx(4.0) and chance["accuracy predictive reason"] == 20.0


def data_of(asked, types=None, pairs=None, split="test"):
    """asked: (question, answer, choices) for each row; the clips differ."""
    columns = dict(zip(("question", "answer", "choices"), map(list, zip(*asked))))
    columns |= {"question_type": types} if types else {}
    columns |= {"pair": pairs} if pairs else {}
    table = common.make_table([[q] for q, *_ in asked], [f"row {i}" for i in range(len(asked))], **columns)
    pixels = torch.arange(len(asked) * 2 * 3 * 64, dtype=torch.uint8).view(len(asked), 2, 3, 8, 8)
    return common.Data("asked", split, table, pixels=pixels)


class Told(torch.nn.Module):
    """Scores by the questions it was told, in place of a model; a question is its own number."""

    def __init__(self, scores, known):
        super().__init__()
        self.scores, self.answers = torch.tensor(scores), known

    def forward(self, pixels, tokens=None, question=None, choices=None):
        rows = question["input_ids"][:, 0]
        found = self.scores[rows]
        if choices is not None:
            there = choices["there"]
            found = found[:, :there.shape[1]].masked_fill(~there, -math.inf)
        return pixels.flatten(1)[:, :4].float(), None, found


def number(texts):
    return {"input_ids": torch.tensor([[int(t.split()[0])] for t in texts]),
            "attention_mask": torch.ones(len(texts), 1, dtype=torch.long)}


number.cut = lambda texts: 0


def scored(model, data, batch=256):
    view = common.EvalTransform(8, (0, 0, 0), (1, 1, 1))
    return evaluation.answers.evaluate(model, number, view, data, CPU, batch=batch)


def test_accuracy_of_open_answers_by_hand():
    data = data_of([("0", "cat", []), ("1", "dog", []), ("2", "emu", []), ("3", "cat", []), ("4", "dog", [])],
                   types=["what", "what", "who", "who", "who"])
    assert evaluation.metrics.answer_vocabulary(data.column("answer"), 2) == ["cat", "dog"]
    scores = [[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 2.0]]  # right, wrong, unknown, tie, right
    metrics, chance, pieces = scored(Told(scores, ["cat", "dog"]), data, batch=4)
    assert (metrics["accuracy"], metrics["upper_bound"], metrics["questions"]) == (40, 80, 5)
    assert (metrics["accuracy what"], metrics["accuracy who"]) == (50, pytest.approx(100 / 3))
    assert (chance["accuracy"], chance["accuracy what"]) == (40, 50)  # always "cat"
    assert pieces["given"] == ["cat", "cat", "cat", "cat", "dog"] and pieces["hits"].tolist() == [1, 0, 0, 0, 1]


def test_accuracy_of_choices_by_hand_and_of_pairs(capsys):
    """Causal-VidQA's rule: answer and reason must both be right."""
    four = ["a", "b", "c", "d"]
    data = data_of([("0", "b", four), ("1", "a", four), ("2", "c", ["a", "c"]), ("3", "a", ["a", "b"])],
                   ["predictive answer", "predictive reason", "predictive answer", "predictive reason"], [0, 0, 1, 1])
    scores = [[0.0, 1, 0, 0], [0.0, 1, 0, 0], [0.0, 1, 9, 9], [1.0, 0, 9, 9]]
    metrics, chance, pieces = scored(Told(scores, []), data, batch=3)  # batches with four and with two choices
    assert (metrics["accuracy"], metrics["accuracy predictive"]) == (50, 50)
    assert (metrics["accuracy predictive answer"], metrics["accuracy predictive reason"]) == (100, 50)
    assert chance["accuracy"] == pytest.approx(100 * (1 / 16 + 1 / 4) / 2) and "upper_bound" not in metrics
    assert pieces["given"] == ["b", "b", "c", "a"]
    metrics, chance, pieces = scored(Told(scores, []), data.select([1, 2, 3]))  # half of the first pair is gone
    assert (metrics["accuracy"], metrics["questions"], pieces["given"]) == (100, 2, ["c", "a"])
    assert chance["accuracy"] == 25 and "1 of 3 questions are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="no question has both its answer and its reason"):
        scored(Told(scores, []), data.select([0, 2]))


def test_inputs_of_rows():
    data = data_of([("0", "b", ["a", "b", "c"]), ("1", "a", ["b", "a"])])
    seen = []

    def tokenizer(texts):
        seen.append(texts)
        return {"input_ids": torch.zeros(len(texts), 2), "attention_mask": torch.ones(len(texts), 2)}
    found = evaluation.answers.inputs(data, [1, 0], tokenizer, [], CPU)
    assert seen == [["1", "0"], ["1 b", "1 a", "1 ", "0 a", "0 b", "0 c"]]
    assert found["answers"].tolist() == [1, 1] and found["choices"]["there"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found["choices"]["input_ids"].shape == (2, 3, 2) and found["question"]["input_ids"].shape == (2, 2)
    assert evaluation.answers.inputs(data, [1, 0], tokenizer, ["a"], CPU)["answers"].tolist() == [0, -1]


def test_shuffled_videos_are_all_of_others():
    data = common.load_data("moving-emoji", "val", clips=(64, 24, 24))
    other = evaluation.answers.shuffled(data)
    assert other.column("question") == data.column("question") and other.column("key") == data.column("key")
    assert not any(torch.equal(a, b) for a, b in zip(other.pixels, data.pixels))
    assert sorted(x.sum().item() for x in other.pixels) == sorted(x.sum().item() for x in data.pixels)
