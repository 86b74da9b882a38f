"""Questions about videos by hand: the loss, the model, its meta-gradient and accuracies; runs."""

import functools
import math

import common
from contrastive.core.metrics import answer_vocabulary, question_metrics
from contrastive.core.processes import UserError
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
        [1.0, 1.0, 1.0]])
    scores.requires_grad_()
    losses = mama_qa.answer_loss(scores, torch.tensor([1, 2, -1]))
    first = math.log(math.exp(1 - 2) + 1 + math.exp(0.5 - 2))
    second = math.log(math.exp(3 - 1) + 1)
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
    question = tokens_of(2, 8)
    question["attention_mask"][:, 5:] = 0
    _, text, scores = model(clips, None, question)
    assert text is None
    assert scores.shape == (2, 3)
    short = {name: x[:, :5] for name, x in question.items()}
    assert_close(model(clips, None, short)[2], scores)
    for pixels, tokens in ((clips, tokens_of(2, 8)), (clips.flip(1), question)):
        _, _, other = model(pixels, None, tokens)
        assert not torch.allclose(other, scores, atol=1e-3)


@torch.no_grad()
def test_a_choice_scores_the_same_alone():
    """Missing choices are -inf."""
    model = answerer()
    clips = torch.randn(2, 3, 3, 32, 32)
    question = tokens_of(2, 5)
    choices = tokens_of(2, 3, 6)
    choices["choice_mask"] = torch.tensor([[True] * 3, [True, True, False]])
    _, _, scores = model(clips, None, question, choices)
    assert torch.equal(scores.isneginf(), ~choices["choice_mask"])
    for c in range(2):
        one = {name: x[:, c:c + 1] for name, x in choices.items()}
        _, _, alone = model(clips, None, question, one)
        assert_close(alone[:, 0], scores[:, c], 1e-4)


def meta_batch(task, n):
    """Inputs and right answers of n questions in float64."""
    inputs = {"pixels": torch.randn(n, 3, 16, 16).double()}
    inputs |= {"tokens": tokens_of(n, 6), "question": tokens_of(n, 5)}
    if task == "qa-choice":
        choice_mask = torch.ones(n, 3, dtype=torch.bool)
        choice_mask[0, 2] = False
        inputs["choices"] = tokens_of(n, 3, 4) | {"choice_mask": choice_mask}
    return inputs, torch.randint(0, 2, (n,))


@pytest.mark.parametrize("task, vocabulary", [("qa-open", ["yes", "no"]), ("qa-choice", [])])
def test_meta_gradient_of_questions(task, vocabulary):
    """The look-ahead has both losses; forward mode gives their second-order gradient."""
    model = answerer(vocabulary).double()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    batch = meta_batch(task, 5)
    meta = meta_batch(task, 4)

    def losses_of(eta, weight):
        loss = functools.partial(
            mama_qa.question_loss, tau=0.5, mu=0.2, eta=eta, contrastive_weight=weight)
        return mama_qa.look_ahead_losses(model, loss)

    losses = losses_of(1.5, 0.5)
    contrastive = losses_of(0.0, 1.0)(parameters, batch)
    inputs, right = batch
    answering = mama_qa.answer_loss(model(**inputs)[2], right)
    expected = 0.5 * contrastive + 1.5 * answering
    assert_close(losses(parameters, batch), expected, 1e-9)
    net = mama.WeightNet(8).double()
    gradients = {}
    for method in ("forward", "second-order"):
        gradients[method] = mama.weightnet_gradient(
            losses, parameters, batch, meta, net, 0.1, method)
    for forward, second_order in zip(*gradients.values()):
        assert forward.any()
        torch.testing.assert_close(forward, second_order, rtol=1e-5, atol=1e-10)


# ------------------------------------------- accuracy -----------------------------------------
TYPES = ["causal why", "causal how", "causal why", "descriptive"]
TYPES += ["predictive answer", "predictive reason"] * 2
PAIRS = [0, 1, 2, 3, 4, 4, 5, 5]


def test_accuracies_by_type_and_family():
    """Causal-VidQA's answer and reason must both be right."""
    metrics = question_metrics([1, 1, 0, 0, 1, 1, 1, 0], TYPES, PAIRS)
    assert metrics == {
        "accuracy": 50.0,  # causal 2 of 3, descriptive 0 of 1, predictive 1 of 2
        "accuracy causal": pytest.approx(200 / 3),
        "accuracy causal how": 100.0,
        "accuracy causal why": 50.0,
        "accuracy descriptive": 0.0,
        "accuracy predictive": 50.0,
        "accuracy predictive answer": 100.0,
        "accuracy predictive reason": 50.0,
    }


def test_chance_of_pairs_is_that_both_are_right():
    chance = question_metrics([1 / 5] * 8, TYPES, PAIRS)
    expected = 100 * (4 * 0.2 + 2 * 0.04) / 6
    assert chance["accuracy"] == pytest.approx(expected)
    assert chance["accuracy predictive"] == pytest.approx(4.0)
    assert chance["accuracy predictive reason"] == 20.0


def data_of(right_answers, **columns):
    """Rows whose question is their number."""
    n = len(right_answers)
    questions = [str(i) for i in range(n)]
    table = common.make_table(
        [[question] for question in questions], questions,
        question=questions, answer=right_answers, **columns)
    pixels = torch.zeros(n, 2, 3, 8, 8, dtype=torch.uint8)
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
            choice_mask = choices["choice_mask"]
            scores = scores[:, :choice_mask.shape[1]]
            scores = scores.masked_fill(~choice_mask, -math.inf)
        return pixels.flatten(1)[:, :4].float(), None, scores


def number_of(texts):
    """The tokenizer: the first word of a text is a number."""
    ids = torch.tensor([[int(text.split()[0])] for text in texts])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


number_of.count_cut = lambda texts: 0


def evaluate(model, data, batch=256):
    transform = common.EvalTransform(8, (0.0,) * 3, (1.0,) * 3)
    return answers.evaluate((model, number_of, transform), data, CPU, batch=batch)


def test_open_answers_by_hand():
    """Of a vocabulary of the two most frequent; chance is always the first."""
    types = ["what", "what", "who", "who", "who"]
    data = data_of(["cat", "dog", "emu", "cat", "dog"], question_type=types)
    vocabulary = answer_vocabulary(data.column("answer"), 2)
    assert vocabulary == ["cat", "dog"]
    # right, wrong, unknown, tie, right
    scores = [[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 2.0]]
    metrics, chance, pieces = evaluate(ScoreTable(scores, vocabulary), data, batch=4)
    assert pieces.hits.tolist() == [1, 0, 0, 0, 1]
    assert pieces.predicted == ["cat", "cat", "cat", "cat", "dog"]
    assert metrics["accuracy"] == 40
    assert metrics["upper_bound"] == 80
    assert metrics["accuracy what"] == 50
    assert chance["accuracy"] == 40
    assert chance["accuracy what"] == 50


@pytest.fixture
def choices():
    """A model of four questions, answers and reasons of two pairs, and their data."""
    four = ["a", "b", "c", "d"]
    types = ["predictive answer", "predictive reason"] * 2
    options = [four, four, ["a", "c"], ["a", "b"]]
    data = data_of(
        ["b", "a", "c", "a"], choices=options, question_type=types, pair=[0, 0, 1, 1])
    scores = [[0.0, 1, 0, 0], [0.0, 1, 0, 0], [0.0, 1, 9, 9], [1.0, 0, 9, 9]]
    return ScoreTable(scores, []), data


def test_choices_and_pairs_by_hand(choices):
    """In batches with four and with two choices."""
    metrics, chance, pieces = evaluate(*choices, batch=3)
    assert pieces.predicted == ["b", "b", "c", "a"]
    assert (metrics["accuracy"], metrics["accuracy predictive answer"]) == (50, 100)
    expected = 100 * (1 / 16 + 1 / 4) / 2
    assert chance["accuracy"] == pytest.approx(expected)
    assert "upper_bound" not in metrics


def test_half_a_pair_is_left_out(choices, capsys):
    model, data = choices
    metrics, chance, _ = evaluate(model, data.select([1, 2, 3]))
    assert metrics["accuracy"] == 100
    assert metrics["questions"] == 2
    assert chance["accuracy"] == 25
    assert "1 of 3 questions are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="no question has both its answer and its reason"):
        evaluate(model, data.select([0, 2]))


# --------------------------------------------- runs -------------------------------------------
RUN = "--cpu --clips 64 24 24 --batch-size 16 --log-every 1 --eval-every 0 --max-steps 2".split()
META = "--meta-batch-size 8 --meta-size 24".split()


@pytest.mark.parametrize("task", ["qa-open", "qa-choice"])
def test_a_run_weights_the_loss_with_the_answers(task, tmp_path):
    summary = run_script(mama_qa, tmp_path / "run", *RUN, *META, "--task", task)
    for row in steps(tmp_path / "run"):
        assert 0 < row["CE"] < row["L"]
        assert row["loss"] == pytest.approx(row["w"] * row["L"], rel=0.2)
    test = summary["test"]["moving-emoji"]
    chance = summary["chance"]["moving-emoji"]
    assert test["questions"] == 24
    assert {"accuracy noun", "accuracy verb", "accuracy colour"} < test.keys()
    assert ("upper_bound" in test) == (task == "qa-open")
    if task == "qa-choice":
        assert chance["accuracy"] == pytest.approx(20)


def test_a_vocabulary_of_three_answers(tmp_path):
    flags = [*RUN, *META, "--answers", 3]
    summary = run_script(mama_qa, tmp_path / "run", *flags, pictures=True)
    assert 0 < summary["test"]["moving-emoji"]["upper_bound"] < 50
    model, _, _ = common.load_model(tmp_path / "run")
    train = common.load_data("moving-emoji", "train", clips=(64, 24, 24))
    assert model.answers == answer_vocabulary(train.column("answer"), 3)
    assert (tmp_path / "run" / "answers.png").is_file()


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
