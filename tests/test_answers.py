"""Questions and answers by hand: the loss, the model, its gradient and the accuracies; runs of both
tasks, eval.py, chunks and processes, flags that are refused."""

import functools
import math

import common
from contrastive import evaluation
from contrastive.core.processes import UserError
from contrastive.encoders.questions import QuestionAnswerer
from contrastive.evaluation.answers import right_answers
from contrastive.core.metrics import answer_vocabulary, question_metrics

import pytest
import torch

import mama
from helpers import (
    CPU, evaluated, refused, run_script, steps)
from variants import mama_qa

INF = math.inf


# -------------------------------------- loss and model ---------------------------------------
def test_answer_loss_against_a_loop():
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[1, 3:] = -INF  # a question with three choices
    right = torch.tensor([4, 2, -1, 0])
    expected = [
        0.0 if k < 0 else math.log(sum(math.exp(float(s - row[k])) for s in row))
        for row, k in zip(scores, right.tolist())
    ]
    leaf = scores.requires_grad_()
    loss = mama_qa.answer_loss(leaf, right)
    assert loss.tolist() == pytest.approx(expected, rel=1e-6) and loss[2] == 0
    loss.sum().backward()
    assert leaf.grad.isfinite().all() and not leaf.grad[2].any() and not leaf.grad[1, 3:].any()


def model_of(choices=(), **more):
    torch.manual_seed(0)
    towers = (
        common.VisionEncoder("small", 16, False),
        common.TextEncoder("small", 16, length=12, vocabulary=50),
    )
    return QuestionAnswerer(*towers, **dict(answers=choices, frames=3) | more).eval()


def clips_of(n, side=32):
    return torch.randn(n, 3, 3, side, side, generator=torch.Generator().manual_seed(2))


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
    other = question | {
        "input_ids": torch.cat([question["input_ids"][:, :5], words(2, 3)["input_ids"]], 1)
    }
    for same in ({k: v[:, :5] for k, v in question.items()}, other):
        assert torch.allclose(model(clips, None, same)[2], scores, atol=1e-5)
    for pixels, asked in (
        (clips, words(2, 8)),
        (clips.flip(1), question),
    ):  # other words, the order of time
        assert not torch.allclose(model(pixels, None, asked)[2], scores, atol=1e-3)
    plain = model(clips, question)  # without a question: two towers
    assert torch.allclose(plain[0], video, atol=1e-6) and plain[2].shape == (2, 128)


@torch.no_grad()
def test_scores_of_choices():
    """Each choice by itself gives the score that it has among others; absent ones are -inf."""
    model, clips = model_of(), clips_of(2)
    choices = words(2, 4, 6)
    choices["choice_mask"] = torch.tensor([[True] * 4, [True, True, False, False]])
    scores = model(clips, words(2, 5), words(2, 5), choices)[2]
    assert scores.isneginf().tolist() == (~choices["choice_mask"]).tolist()
    for b, c in choices["choice_mask"].nonzero().tolist():
        alone = {k: choices[k][b : b + 1, c : c + 1] for k in ("input_ids", "attention_mask")}
        single = model(clips[b : b + 1], None, words(1, 5), alone)[2]
        assert torch.allclose(single[0, 0], scores[b, c], atol=1e-4)


@pytest.mark.parametrize("task, weight", [("qa-open", 2.0), ("qa-choice", 0.5)])
def test_meta_gradient_of_questions(task, weight):
    """The look-ahead has the losses of a step; forward mode gives their second-order gradient."""
    model = model_of(["yes", "no"] if task == "qa-open" else ()).double()
    generator = torch.Generator().manual_seed(5)

    def batch(n):
        made = {
            "pixels": torch.randn(n, 3, 16, 16, generator=generator, dtype=torch.float64),
            "tokens": words(n, 6),
            "question": words(n, 5),
        }
        choice_mask = torch.tensor([[True, True, k > 0] for k in range(n)])
        choices = words(n, 3, 4) | {"choice_mask": choice_mask}
        made = made if task == "qa-open" else made | {"choices": choices}
        return made, torch.randint(0, 2, (n,), generator=generator)

    def losses_of(eta, weight):
        loss_fn = functools.partial(
            mama_qa.question_loss, tau=0.5, mu=0.2, eta=eta, contrastive_weight=weight
        )
        return mama_qa.look_ahead_losses(model, loss_fn, CPU)

    losses, first, meta = losses_of(1.5, weight), batch(5), batch(4)
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    answering = 1.5 * mama_qa.answer_loss(model(**first[0])[2], first[1])
    expected = weight * losses_of(0.0, 1.0)(parameters, first) + answering
    assert torch.allclose(losses(parameters, first), expected, rtol=1e-9)
    assert torch.allclose(losses_of(1.5, 0.0)(parameters, first), answering, rtol=1e-9)
    net = mama.WeightNet(8).double()
    forward, second = (
        mama.weightnet_gradient(losses, parameters, first, meta, net, 0.1, m)
        for m in ("forward", "second-order")
    )
    for a, b in zip(forward, second):
        assert a.isfinite().all() and a.any() and torch.allclose(a, b, rtol=1e-5, atol=1e-10)


# -------------------------------------- accuracy ---------------------------------------------
def test_accuracies_by_hand():
    """By types and their families; Causal-VidQA's answer and reason must both be right."""
    types = [
        "causal why",
        "causal how",
        "causal why",
        "descriptive",
        *["predictive answer", "predictive reason"] * 2,
    ]
    pairs = [0, 1, 2, 3, 4, 4, 5, 5]
    assert question_metrics([1, 1, 0, 0, 1, 1, 1, 0], types, pairs) == {
        "accuracy": 50.0,  # causal 2 of 3, descriptive 0 of 1, predictive 1 of 2
        "accuracy causal": pytest.approx(200 / 3),
        "accuracy causal how": 100.0,
        "accuracy causal why": 50.0,
        "accuracy descriptive": 0.0,
        "accuracy predictive": 50.0,
        "accuracy predictive answer": 100.0,
        "accuracy predictive reason": 50.0,
    }
    chance = question_metrics([1 / 5] * 8, types, pairs)  # of a random choice among five
    assert chance["accuracy"] == pytest.approx(100 * (4 * 0.2 + 2 * 0.04) / 6)
    assert chance["accuracy predictive"] == pytest.approx(4.0)
    assert chance["accuracy predictive reason"] == 20.0


def data_of(asked, types=None, pairs=None):
    """asked: (question, answer, choices) for each row; the clips differ."""
    columns = dict(zip(("question", "answer", "choices"), map(list, zip(*asked))))
    columns |= {"question_type": types} if types else {}
    columns |= {"pair": pairs} if pairs else {}
    table = common.make_table(
        [[q] for q, *_ in asked], [f"row {i}" for i in range(len(asked))], **columns
    )
    pixels = torch.arange(len(asked) * 2 * 3 * 64, dtype=torch.uint8).view(len(asked), 2, 3, 8, 8)
    return common.Data("asked", "test", table, pixels=pixels)


class Told(torch.nn.Module):
    """Scores by the questions it was told, in place of a model; a question is its own number."""

    model = "fusion"

    def __init__(self, scores, known):
        super().__init__()
        self.scores, self.answers = torch.tensor(scores), known

    def forward(self, pixels, tokens=None, question=None, choices=None):
        found = self.scores[question["input_ids"][:, 0]]
        if choices is not None:
            choice_mask = choices["choice_mask"]
            found = found[:, : choice_mask.shape[1]].masked_fill(~choice_mask, -INF)
        return pixels.flatten(1)[:, :4].float(), None, found


def number(texts):
    return {
        "input_ids": torch.tensor([[int(t.split()[0])] for t in texts]),
        "attention_mask": torch.ones(len(texts), 1, dtype=torch.long),
    }


number.count_cut = lambda texts: 0


def scored(model, data, batch=256):
    view = common.EvalTransform(8, (0, 0, 0), (1, 1, 1))
    return evaluation.answers.evaluate((model, number, view), data, CPU, batch=batch)


def test_open_answers_by_hand():
    data = data_of(
        [("0", "cat", []), ("1", "dog", []), ("2", "emu", []), ("3", "cat", []), ("4", "dog", [])],
        types=["what", "what", "who", "who", "who"],
    )
    known = answer_vocabulary(data.column("answer"), 2)  # the most frequent, else by the alphabet
    assert known == ["cat", "dog"] and right_answers(data, range(3), known).tolist() == [0, 1, -1]
    # right, wrong, unknown, tie, right
    scores = [[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 2.0]]
    metrics, chance, pieces = scored(Told(scores, known), data, batch=4)
    assert (metrics["accuracy"], metrics["upper_bound"], metrics["questions"]) == (40, 80, 5)
    assert (metrics["accuracy what"], metrics["accuracy who"]) == (50, pytest.approx(100 / 3))
    assert (chance["accuracy"], chance["accuracy what"]) == (40, 50)  # always "cat"
    assert pieces.predicted == ["cat", "cat", "cat", "cat", "dog"]
    assert pieces.hits.tolist() == [1, 0, 0, 0, 1]


def test_choices_and_pairs_by_hand(capsys):
    four = ["a", "b", "c", "d"]
    data = data_of(
        [("0", "b", four), ("1", "a", four), ("2", "c", ["a", "c"]), ("3", "a", ["a", "b"])],
        ["predictive answer", "predictive reason", "predictive answer", "predictive reason"],
        [0, 0, 1, 1],
    )
    model = Told([[0.0, 1, 0, 0], [0.0, 1, 0, 0], [0.0, 1, 9, 9], [1.0, 0, 9, 9]], [])
    metrics, chance, pieces = scored(model, data, batch=3)  # batches with four and with two choices
    assert (metrics["accuracy"], metrics["accuracy predictive"]) == (50, 50)
    assert (metrics["accuracy predictive answer"], metrics["accuracy predictive reason"]) == (
        100,
        50,
    )
    assert chance["accuracy"] == pytest.approx(100 * (1 / 16 + 1 / 4) / 2)
    assert "upper_bound" not in metrics
    assert pieces.predicted == ["b", "b", "c", "a"]
    # half of the first pair is gone
    metrics, chance, pieces = scored(model, data.select([1, 2, 3]))
    assert (metrics["accuracy"], metrics["questions"], pieces.predicted) == (100, 2, ["c", "a"])
    assert chance["accuracy"] == 25 and "1 of 3 questions are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="no question has both its answer and its reason"):
        scored(model, data.select([0, 2]))


# -------------------------------------- runs -------------------------------------------------
BASE = (
    "--cpu --clips 64 24 24 --batch-size 16 --meta-batch-size 8 --meta-size 24 --log-every 1 "
    "--eval-every 0 --max-steps 2"
).split()


def main(folder, *flags):
    return run_script(mama_qa, folder, *flags, base=BASE)


def evaluate(folder, *flags):
    return evaluated(folder, *flags)["moving-emoji"]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """A run of each task, with the pictures of the first: (folder, {task: summary})."""
    folder = tmp_path_factory.mktemp("runs")
    summary = run_script(mama_qa, folder / "qa-open", "--task", "qa-open", base=BASE, pictures=True)
    return folder, {
        "qa-open": summary,
        "qa-choice": main(folder / "qa-choice", "--task", "qa-choice"),
    }


@pytest.mark.parametrize("task", ["qa-open", "qa-choice"])
def test_a_run_and_its_checkpoint(runs_of, task):
    """eval.py gives its numbers; of shorter texts those that are cut are counted."""
    folder, summary = runs_of[0] / task, runs_of[1][task]
    test, chance = (summary[k]["moving-emoji"] for k in ("test", "chance"))
    assert test["questions"] == 24
    assert {"accuracy noun", "accuracy verb", "accuracy colour"} < test.keys()
    assert ("upper_bound" in test) == (task == "qa-open") and chance.keys() <= test.keys()
    assert chance["accuracy"] == pytest.approx(20) or task == "qa-open"
    for row in steps(folder):
        assert 0 < row["CE"] < row["L"]
        assert row["loss"] == pytest.approx(row["w"] * row["L"], rel=0.2)
    found = evaluate(folder)
    assert found["metrics"] == test and found["chance"] == chance and not found["left_out"]
    model, tokenizer, _ = common.load_model(folder)
    train, data = (
        common.load_data("moving-emoji", split, clips=(64, 24, 24)) for split in ("train", "test")
    )
    texts = data.column("question")
    if task == "qa-open":
        assert (folder / "answers.png").is_file()
        assert (folder / "eval" / "answers_moving-emoji.png").is_file()
        assert model.answers == answer_vocabulary(train.column("answer"), 1500)
    else:
        texts = [
            f"{q} {choice}"
            for q, choices in zip(texts, data.column("choices"))
            for choice in choices
        ]
    tokenizer.length = 6
    cut = evaluation.answers.count_cut_texts(data, range(24), model, tokenizer)
    assert cut == sum(len(ids) > 6 for ids in tokenizer.tokenizer([*texts])["input_ids"]) > 0


def test_a_vocabulary_of_three_answers(tmp_path):
    summary = main(tmp_path / "run", *"--task qa-open --answers 3".split())
    assert 0 < summary["test"]["moving-emoji"]["upper_bound"] < 50
    assert len(common.load_model(tmp_path / "run")[0].answers) == 3


def test_answers_alone_are_the_bases_of_tables_1_and_2(tmp_path):
    """--baseline: the loss is that of the answers."""
    args = mama_qa.parse_args(["--baseline"])
    assert (args.weighting, args.margin_schedule, args.contrastive_weight) == ("none", "none", 0)
    main(tmp_path / "alone", "--baseline")
    log = steps(tmp_path / "alone")
    assert [r["loss"] for r in log] == pytest.approx([r["CE"] for r in log])


# -------------------------------------- flags that are refused -------------------------------
@pytest.mark.parametrize(
    "flags, words",
    [
        ("--baseline --learnable-tau", "--learnable-tau: only with --contrastive-weight above 0"),
        ("--baseline --margin-schedule logistic", "neither margin nor weights: give --baseline"),
        ("--baseline --contrastive-weight 1", "--baseline is --contrastive-weight 0"),
        ("--contrastive-weight 0", "neither margin nor weights: give --baseline"),
        ("--baseline --eta 0", "--contrastive-weight 0 --eta 0 leaves no loss"),
        ("--task qa-choice --answers 9", "--answers: only with --task qa-open"),
        ("--regions 5", "--regions: only with --qa-model vgt"),
    ],
)
def test_bad_flags(flags, words, capsys):
    assert words in refused(mama_qa.parse_args, flags.split(), capsys)
