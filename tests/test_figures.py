"""Pictures of every run: what they show and in which order; what is saved for them."""

import dataclasses
import json
from types import SimpleNamespace

from contrastive.core.metrics import retrieval_ranks
from contrastive.core.processes import UserError
from contrastive.engine.run import evaluation_interval
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.saved_pieces import SavedPieces, read_pieces, save_pieces
from contrastive.figures import base, mama, ts

import numpy as np
import pytest
import torch

from helpers import unit, write_files
from tools import methods

SET = "/home/me/test.csv"


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the figures that are drawn."""
    axes = []
    for module in (base, mama):
        monkeypatch.setattr(module, "save_figure", lambda fig, path: axes.extend(fig.axes))
    return axes


def filled_image(i):
    return torch.full((3, 8, 8), i % 250, dtype=torch.uint8)


def evaluation(num_images=24):
    """Image i and caption i, whose embeddings have nothing to do with each other."""
    data = SimpleNamespace(
        name=SET, split="test", clip=None, pixels=None, key=str, read=filled_image)
    rows = torch.arange(num_images)
    index = rows.numpy()
    texts = [f"caption {i}" for i in index]
    image = unit(num_images, 4).float()
    text = unit(num_images, 4, seed=1).float()
    return EvaluationPieces(data, index, image, text, texts, index, rows[:, None])


def saved(folder, pieces, num_pictures=500):
    """SavedPieces, as a figure reads them."""
    path = folder / "test.safetensors"
    save_pieces(path, {SET: pieces}, num_pictures)
    return read_pieces(path)[SET]


@pytest.fixture
def pieces(tmp_path):
    return saved(tmp_path, evaluation())


def finished_run(folder, rows=(), flags=(), **summary):
    """The folder of a run with this log."""
    log = [json.dumps(row) + "\n" for row in rows]
    return write_files(folder, {
        "args.json": dict(flags), "summary.json": summary, "metrics.jsonl": "".join(log)})


# ---------------------------------------- what is saved --------------------------------------
def test_saved_rows_belong_together(pieces):
    """In a random order: row, key, caption, positive and picture."""
    original = evaluation()
    rows = [int(key) for key in pieces.keys]
    assert rows != sorted(rows)
    assert sorted(rows) == list(range(24))
    assert torch.equal(pieces.image, original.image[rows])
    for caption, owner in enumerate(pieces.owner):
        row = rows[owner]
        assert pieces.texts[caption] == f"caption {row}"
        assert torch.equal(pieces.text[caption], original.text[row])
        assert pieces.positives[caption] == owner
        pixel = int(pieces.picture(owner)[0, 0, 0])
        assert pixel == pytest.approx(row, abs=1)  # JPEG


def test_many_captions_save_fewer_images(tmp_path):
    """At most 5 captions of an image and 5,000 in all; positives that are not saved are dropped."""
    whole = evaluation(1500)
    whole.texts = ["caption"] * 9000
    whole.text = torch.zeros(9000, 4)
    whole.owner = np.repeat(np.arange(1500), 6)
    owner = torch.from_numpy(whole.owner)
    whole.positives = torch.stack([owner, (owner + 1) % 1500, torch.full((9000,), -1)], 1)
    part = saved(tmp_path, whole, num_pictures=3)
    assert len(part.image) == 1000
    assert len(part.text) == 5000
    assert part.num_pictures == 3
    first, second, padding = part.positives.T
    assert torch.equal(first, part.owner)
    assert torch.all(padding == -1)
    assert 0 < (second == -1).sum() < 5000


def test_a_file_of_no_evaluation_can_be_read(tmp_path):
    """Own data too few for a val or test split."""
    save_pieces(tmp_path / "val.safetensors", {})
    assert read_pieces(tmp_path / "val.safetensors") == {}


# -------------------------------------- pictures of a run ------------------------------------
def curves_of(axes):
    """[(title, heights of the lines)]."""
    curves = []
    for ax in axes:
        heights = [list(line.get_ydata()) for line in ax.lines]
        curves.append((ax.get_title(), heights))
    return curves


def test_curves_are_those_of_the_log_with_their_chance(tmp_path, drawn):
    """A panel for each that has numbers, those of a fork, and speed last."""
    log = [
        {"step": 1, "loss": 3.0, "mine": 1.0, "samples_per_s": 9.0},
        {"step": 1, "eval": {"a": {"R@1": 5.0, "R@10": 50.0}}},
        {"step": 2, "loss": 2.0, "mine": 0.5, "samples_per_s": 8.0}]
    run = base.FinishedRun(finished_run(tmp_path, log, val_chance={"a": {"R@10": 10.0}}))
    panels = [
        ("loss", "nats", {"all": "loss"}),
        ("nothing", "", {"no": "number"}),
        ("val", "%", {"one": "eval/a/R@1", "ten": "eval/a/R@10"})]
    base.draw_training_curves(run, panels)
    assert curves_of(drawn) == [
        ("loss", [[3, 2]]),
        ("val", [[5], [50], [10, 10], []]),  # of both, chance, its name in the legend
        ("mine", [[1, 0.5]]),
        ("speed", [[9, 8]])]


def test_pictures_that_few_queries_do_not_have_are_named(tmp_path, capsys):
    few = saved(tmp_path, evaluation(19))
    enough = saved(tmp_path, evaluation(20))
    shown = base.by_set({"few": few, "enough": enough})
    assert shown == [("enough", "_enough", enough)]
    assert capsys.readouterr().out.startswith("test.csv (test): pictures that need 20 queries")


def test_retrieval_has_queries_at_quantiles_and_the_correct_image_first(pieces, monkeypatch):
    tables = []
    monkeypatch.setattr(base, "draw_examples", lambda table, *args, **_: tables.append(table))
    base.draw_retrieval(pieces, "retrieval.png")
    ranks = retrieval_ranks(pieces.text, pieces.image, pieces.positives).tolist()
    rank_of = dict(zip(pieces.texts, ranks))
    (table,) = tables
    shown_ranks = []
    for text, examples in table:
        rank_of_correct = rank_of[text]
        shown_ranks.append(rank_of_correct)
        assert examples[0].above == f"correct: rank {rank_of_correct}"
        number = int(text.removeprefix("caption "))
        pixel = int(examples[0].pixels[0, 0, 0])
        assert pixel == pytest.approx(number, abs=1)
        for rank, example in enumerate(examples):
            assert example.framed == (rank in (0, rank_of_correct))
    assert shown_ranks == sorted(ranks)[2::4]


def test_runs_of_other_classes_are_refused():
    sizes = torch.tensor([3, 1])
    one = SavedPieces("a", "image", 4, [], label_names=["cat", "dog"], class_sizes=sizes)
    for changes in ({"class_sizes": sizes + 1}, {"label_names": ["cat", "cow"]}):
        other = dataclasses.replace(one, **changes)
        with pytest.raises(UserError, match="b: its classes, or their numbers of training images"):
            ts.check_classes({"a": one, "b": other})


# ------------------------------------ Figures 2, 4 and 5 of MAMA -----------------------------
def test_concepts_have_their_shares_of_the_training_data(tmp_path, drawn):
    """Not those of the test: half of the questions, but one in four of training, asks for a cat."""
    questions = evaluation()
    questions.text = None
    questions.data.cell = lambda column, row: ("cat", "dog")[row % 2]
    questions.predicted = ["cat"] * 24
    folders = []
    texts = ["dog"] * 9 + ["cat"] * 3
    for name, num_right in (("base", 4), ("mama", 6)):
        folder = finished_run(tmp_path / name, flags={"task": "qa-open"})
        write_files(folder, {"training_texts.json": {"texts": texts}})
        questions.hits = np.arange(24) % 2 == 0
        questions.hits[2 * num_right:] = False
        saved(folder, questions)
        folders.append(folder)
    dog, cat = mama.draw_concepts(folders, "concepts.png")
    assert dog.startswith("dog: 75.00 % of the training data, hits 0 -> 0 of 12, no gain")
    assert cat == "cat: 25.00 % of the training data, hits 4 -> 6 of 12, gain +50.0 %"
    shares = [bar.get_width() for bar in drawn[0].patches]
    assert shares == [25, 75]


def test_topics_are_those_of_the_training_texts():
    training = ["red apple pie"] * 5 + ["fast blue car"] * 7
    in_training, in_test = mama.topics_of(training, ["blue car", "apple", "zebra"])
    assert in_training[0] != in_training[-1]
    assert in_test == [in_training[-1], in_training[0], "no known word"]


def test_margins_are_compared_where_nothing_else_differs(tmp_path, drawn):
    flags = {"margin_schedule": "constant", "a1": 10.0, "a2": 0.1, "lr": 0.1}
    changes = {
        "a": {"a0": 1.0},
        "b": {"a0": 2.0, "seed": 1},
        "c": {"a0": 2.0, "lr": 0.2}}
    for name, changed in changes.items():
        val = {"x": {"text_to_image": {"R@1": 10 * changed["a0"]}}}
        finished_run(tmp_path / name, flags=flags | changed, val=val)
    lines = mama.draw_margins([tmp_path / "a", tmp_path / "b"], "margins.png")
    assert lines == [
        "margin (Fig. 4, left), constant: 0.1: 10.00 (1 runs)",
        "margin (Fig. 4, left), constant: 0.2: 20.00 (1 runs)"]
    with pytest.raises(UserError, match="c and a differ in --lr"):
        mama.draw_margins([tmp_path / "a", tmp_path / "c"], "margins.png")


# ------------------------------------ when and what is measured ------------------------------
@pytest.mark.parametrize("last", [5, 12, 501, 1000])
def test_a_run_is_evaluated_five_to_eight_times_by_default(last):
    args = SimpleNamespace(eval_every=-1)
    interval = evaluation_interval(args, {"a": {"val": None, "test": None}}, last)
    evaluated = {0, last, *range(0, last, interval)}
    assert 5 <= len(evaluated) <= 8
    assert evaluation_interval(args, {"a": {"test": None}}, last) == 0


def test_the_picture_of_the_methods_is_drawn_from_their_functions(tmp_path):
    methods.main([str(tmp_path / "methods.png")])
    assert (tmp_path / "methods.png").stat().st_size > 20_000
