"""Questions about videos by hand: the loss, the model, its meta-gradient and accuracies; runs."""

import functools
import math

import common
from contrastive.core.metrics import answer_vocabulary, question_metrics
from contrastive.core.processes import UserError
from contrastive.encoders.base import STATS
from contrastive.encoders.questions import QuestionAnswerer
from contrastive.evaluation import answers

import pytest
import torch

import mama
from helpers import CPU, assert_close, refused, run_script, steps
from variants import mama_qa


# ---------------------------------------- loss and model --------------------------------------
def test_answer_loss_against_a_loop():
    """A missing choice has the score -inf; -1 is an answer outside the vocabulary."""
    scores = torch.tensor([
        [1.0, 2.0, 0.5],
        [3.0, -math.inf, 1.0],
        [1.0, -math.inf, 1.0]])
    scores.requires_grad_()
    right = torch.tensor([1, 2, -1])
    losses = mama_qa.answer_loss(scores, right)
    first = math.log(math.exp(1) + math.exp(2) + math.exp(0.5)) - 2
    second = math.log(math.exp(3) + math.exp(1)) - 1
    assert losses.tolist() == pytest.approx([first, second, 0])
    losses.sum().backward()
    assert scores.grad.isfinite().all()
    assert not scores.grad[2].any()


def answerer(vocabulary=()):
    torch.manual_seed(0)
    text = common.TextEncoder("small", 16, length=12, vocabulary=50)
    vision = common.VisionEncoder("small", 16, False)
    return QuestionAnswerer(vision, text, answers=list(vocabulary), frames=3).eval()


def tokens_of(*shape):
    ids = torch.randint(1, 50, shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def test_open_scores_depend_on_question_and_order_but_not_on_padding():
    model = answerer(["yes", "no", "two"])
    clips = torch.randn(2, 3, 3, 32, 32)
    question = tokens_of(2, 5)
    padded = tokens_of(2, 8)
    padded["input_ids"][:, :5] = question["input_ids"]
    padded["attention_mask"][:, 5:] = 0
    _, _, scores = model(clips, None, question)
    _, _, of_padded = model(clips, None, padded)
    _, _, backwards = model(clips.flip(1), None, question)
    _, _, of_another = model(clips, None, tokens_of(2, 5))
    assert_close(of_padded, scores)
    assert not torch.allclose(backwards, scores, atol=1e-3)
    assert not torch.allclose(of_another, scores, atol=1e-3)


@torch.no_grad()
def test_a_choice_scores_the_same_alone():
    """Missing choices are -inf."""
    model = answerer()
    clips = torch.randn(2, 3, 3, 32, 32)
    question = tokens_of(2, 5)
    choices = tokens_of(2, 3, 6)
    choices["choice_mask"] = torch.ones(2, 3, dtype=torch.bool)
    choices["choice_mask"][1, 2] = False
    second = {name: x[:, 1:2] for name, x in choices.items()}
    _, _, scores = model(clips, None, question, choices)
    _, _, alone = model(clips, None, question, second)
    assert torch.equal(scores.isneginf(), ~choices["choice_mask"])
    assert_close(alone, scores[:, 1:2], 1e-4)


def meta_batch(task, n):
    """Inputs and right answers of n questions in float64."""
    inputs = {"pixels": torch.randn(n, 3, 16, 16).double()}
    inputs |= {"tokens": tokens_of(n, 6), "question": tokens_of(n, 5)}
    if task == "qa-choice":
        choice_mask = torch.ones(n, 3, dtype=torch.bool)
        choice_mask[0, 2] = False
        inputs["choices"] = tokens_of(n, 3, 4) | {"choice_mask": choice_mask}
    return inputs, torch.randint(0, 2, (n,))


@pytest.mark.parametrize("task, vocabulary", [
    ("qa-open", ["yes", "no"]),
    ("qa-choice", [])])
def test_meta_gradient_of_questions(task, vocabulary):
    """The look-ahead has both losses; forward mode gives their second-order gradient."""
    model = answerer(vocabulary).double()
    parameters = dict(model.named_parameters())
    loss = functools.partial(
        mama_qa.question_loss, tau=0.5, mu=0.2, eta=1.5, contrastive_weight=0.5)
    losses = mama_qa.look_ahead_losses(model, loss)
    net = mama.WeightNet(8).double()
    batch = meta_batch(task, 5)
    inputs = losses, parameters, batch, meta_batch(task, 4), net, 0.1
    forward = mama.weightnet_gradient(*inputs, "forward")
    second_order = mama.weightnet_gradient(*inputs, "second-order")
    assert all(gradient.any() for gradient in forward)
    torch.testing.assert_close(forward, second_order, rtol=1e-5, atol=1e-10)


# ------------------------------------------- accuracy -----------------------------------------
def test_accuracies_by_type_and_family():
    """Causal-VidQA's answer and reason must both be right."""
    types = ["causal why", "causal how", "causal why", "descriptive"]
    types += ["predictive answer", "predictive reason"] * 2
    hits = [1, 1, 0, 0, 1, 1, 1, 0]
    pairs = [0, 1, 2, 3, 4, 4, 5, 5]
    assert question_metrics(hits, types, pairs) == {
        "accuracy": 50.0,  # causal 2 of 3, descriptive 0 of 1, predictive 1 of 2
        "accuracy causal": pytest.approx(200 / 3),
        "accuracy causal how": 100.0,
        "accuracy causal why": 50.0,
        "accuracy descriptive": 0.0,
        "accuracy predictive": 50.0,
        "accuracy predictive answer": 100.0,
        "accuracy predictive reason": 50.0}


def data_of(right_answers, **columns):
    """Rows whose question is their number."""
    questions = [*map(str, range(len(right_answers)))]
    captions = [[question] for question in questions]
    table = common.make_table(
        captions, questions, question=questions, answer=right_answers, **columns)
    pixels = torch.zeros(len(questions), 2, 3, 8, 8, dtype=torch.uint8)
    return common.Data("numbers", "test", table, pixels=pixels)


class ScoreTable(torch.nn.Module):
    """Scores by the number of a question, in place of a model."""

    model = "fusion"

    def __init__(self, scores, vocabulary):
        super().__init__()
        self.scores = torch.tensor(scores)
        self.answers = vocabulary

    def forward(self, pixels, tokens=None, question=None, choices=None):
        scores = self.scores[question["input_ids"][:, 0]]
        if choices is not None:
            mask = choices["choice_mask"]
            scores = scores[:, :mask.shape[1]]
            scores = scores.masked_fill(~mask, -math.inf)
        return pixels.flatten(1), None, scores


def number_of(texts):
    """The tokenizer: the first word of a text is a number."""
    numbers = [int(text.split()[0]) for text in texts]
    ids = torch.tensor(numbers)[:, None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


number_of.count_cut = lambda texts: 0


def evaluate(model, data, batch=256):
    transform = common.EvalTransform(8, *STATS["half"])
    towers = model, number_of, transform
    return answers.evaluate(towers, data, CPU, batch=batch)


def test_open_answers_by_hand():
    """Of a vocabulary of the two most frequent; chance is always the first."""
    types = ["what", "what", "who", "who", "who"]
    data = data_of(["cat", "dog", "emu", "cat", "dog"], question_type=types)
    vocabulary = answer_vocabulary(data.column("answer"), 2)
    assert vocabulary == ["cat", "dog"]
    model = ScoreTable([
        [2.0, 1.0],  # right
        [2.0, 1.0],  # wrong
        [2.0, 1.0],  # unknown
        [1.0, 1.0],  # tie
        [1.0, 2.0]], vocabulary)
    metrics, chance, pieces = evaluate(model, data, batch=4)
    assert pieces.hits.tolist() == [1, 0, 0, 0, 1]
    assert pieces.predicted == ["cat", "cat", "cat", "cat", "dog"]
    assert metrics["accuracy"] == 40
    assert metrics["upper_bound"] == 80
    assert metrics["accuracy what"] == 50
    assert chance["accuracy"] == 40


@pytest.fixture
def choices():
    """A model of four questions, answers and reasons of two pairs, and their data."""
    four = ["a", "b", "c", "d"]
    types = ["predictive answer", "predictive reason"] * 2
    options = [four, four, ["a", "c"], ["a", "b"]]
    right = ["b", "a", "c", "a"]
    data = data_of(right, choices=options, question_type=types, pair=[0, 0, 1, 1])
    model = ScoreTable([
        [0.0, 1.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [0.0, 1.0, 9.0, 9.0],
        [1.0, 0.0, 9.0, 9.0]], [])
    return model, data


def test_choices_and_pairs_by_hand(choices):
    """In batches with four and with two choices."""
    metrics, chance, pieces = evaluate(*choices, batch=3)
    assert pieces.predicted == ["b", "b", "c", "a"]
    assert metrics["accuracy"] == 50
    assert metrics["accuracy predictive answer"] == 100
    expected = 100 * (1 / 16 + 1 / 4) / 2
    assert chance["accuracy"] == pytest.approx(expected)


def test_half_a_pair_is_left_out(choices, capsys):
    model, data = choices
    three = data.select([1, 2, 3])
    metrics, chance, _ = evaluate(model, three)
    assert metrics["accuracy"] == 100
    assert metrics["questions"] == 2
    assert chance["accuracy"] == 25
    assert "1 of 3 questions are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="no question has both its answer and its reason"):
        evaluate(model, data.select([0, 2]))


# --------------------------------------------- runs -------------------------------------------
RUN = "--cpu --clips 64 24 24 --batch-size 16 --log-every 1 --eval-every 0 --max-steps 2".split()
META = "--meta-batch-size 8 --meta-size 24".split()


def test_a_run_of_open_questions(tmp_path):
    """Of which the vocabulary is the three most frequent answers."""
    flags = [*RUN, *META, "--answers", 3]
    summary = run_script(mama_qa, tmp_path / "run", *flags, pictures=True)
    for row in steps(tmp_path / "run"):
        assert 0 < row["CE"] < row["L"]
        expected = row["w"] * row["L"]
        assert row["loss"] == pytest.approx(expected, rel=0.2)
    test = summary["test"]["moving-emoji"]
    assert test["questions"] == 24
    assert 0 < test["upper_bound"] < 50
    assert {"accuracy noun", "accuracy verb", "accuracy colour"} < test.keys()
    model, _, _ = common.load_model(tmp_path / "run")
    train = common.load_data("moving-emoji", "train", clips=(64, 24, 24))
    assert model.answers == answer_vocabulary(train.column("answer"), 3)
    assert (tmp_path / "run" / "answers.png").is_file()


def test_a_run_of_choices(tmp_path):
    flags = [*RUN, *META, "--task", "qa-choice"]
    summary = run_script(mama_qa, tmp_path / "run", *flags)
    assert summary["test"]["moving-emoji"]["questions"] == 24
    assert summary["chance"]["moving-emoji"]["accuracy"] == pytest.approx(20)


def test_the_loss_of_the_baseline_is_that_of_the_answers(tmp_path):
    run_script(mama_qa, tmp_path / "run", *RUN, "--baseline")
    for row in steps(tmp_path / "run"):
        assert row["loss"] == pytest.approx(row["CE"])


@pytest.mark.parametrize("flags, words", [
    ("--baseline --tau 1", "--tau: only with --contrastive-weight above 0"),
    ("--baseline --margin-schedule logistic", "neither margin nor weights: give --baseline"),
    ("--baseline --contrastive-weight 1", "--baseline is --contrastive-weight 0"),
    ("--baseline --eta 0", "--contrastive-weight 0 --eta 0 leaves no loss"),
    ("--task qa-choice --answers 9", "--answers: only with --task qa-open"),
    ("--regions 5", "--regions: only with --qa-model vgt"),
])
def test_flags_that_do_not_fit_are_refused(flags, words, capsys):
    assert words in refused(mama_qa.parse_args, flags.split(), capsys)
