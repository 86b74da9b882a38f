"""Pictures of every run: what they show and in which order; what is saved for them."""

from types import SimpleNamespace

from contrastive.core.files import write_json
from contrastive.core.metrics import retrieval_ranks
from contrastive.core.processes import UserError
from contrastive.engine.run import evaluation_interval
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.saved_pieces import SavedPieces, read_pieces, save_pieces
from contrastive.figures import base, mama, temo, ts

import numpy as np
import pytest
import torch

from tools import methods


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, as arguments of save_figure."""
    figures = []
    for module in (base, mama, temo, ts):
        monkeypatch.setattr(module, "save_figure", lambda *args: figures.append(args))
    return figures


def evaluation(num_images=24):
    """Images on a circle; caption i lies at image i, but beside i others for i > 11."""
    angles = torch.arange(num_images) / num_images * 2 * torch.pi
    image = torch.stack([angles.cos(), angles.sin()], 1)
    rows = torch.arange(num_images)
    shift = (rows - 11).clamp(min=0)
    data = SimpleNamespace(
        name="/home/me/test.csv", split="test", clip=None, pixels=None, key=str,
        read=lambda i: torch.full((3, 8, 8), i % 250, dtype=torch.uint8))
    text = image[(rows + shift) % num_images]
    texts = [f"caption {i}" for i in range(num_images)]
    index = rows.numpy()
    return EvaluationPieces(data, index, image, text, texts, index, rows[:, None])


def saved(folder, pieces, num_pictures=500):
    """SavedPieces, as a figure reads them."""
    path = folder / "test.safetensors"
    save_pieces(path, {"/home/me/test.csv": pieces}, num_pictures)
    return read_pieces(path)["/home/me/test.csv"]


@pytest.fixture
def pieces(tmp_path):
    return saved(tmp_path, evaluation())


def finished_run(folder, rows=(), flags=None, **summary):
    """A FinishedRun with this log."""
    folder.mkdir()
    write_json(folder / "args.json", flags or {"loss": "temo"})
    write_json(folder / "summary.json", {"val_chance": {}} | summary)
    lines = [str(row).replace("'", '"') + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return base.FinishedRun(folder)


# ---------------------------------------- what is saved --------------------------------------
def test_saved_rows_belong_together(pieces):
    """In a random order: row, key, caption, positive and picture."""
    original = evaluation()
    rows = [int(key) for key in pieces.keys]
    assert rows != sorted(rows)
    assert sorted(rows) == list(range(24))
    assert torch.equal(pieces.image, original.image[rows])
    for caption, text in enumerate(pieces.texts):
        owner = pieces.owner[caption]
        row = rows[owner]
        assert text == f"caption {row}"
        assert torch.equal(pieces.text[caption], original.text[row])
        assert pieces.positives[caption].tolist() == [owner]
        pixel = int(pieces.picture(owner)[0, 0, 0])
        assert pixel == pytest.approx(row, abs=1)  # JPEG


def test_many_captions_save_fewer_images(tmp_path):
    """At most 5 captions of an image and 5,000 in all; positives that are not saved are dropped."""
    whole = evaluation(1500)
    whole.owner = np.repeat(np.arange(1500), 6)
    whole.texts = [f"caption {i}" for i in range(9000)]
    whole.text = whole.image[whole.owner]
    owner = torch.from_numpy(whole.owner)
    whole.positives = torch.stack([owner, (owner + 1) % 1500], 1)
    part = saved(tmp_path, whole, num_pictures=3)
    assert len(part.image) == 1000
    assert len(part.text) == 5000
    assert part.num_pictures == 3
    assert torch.equal(part.positives[:, 0], part.owner)
    keys = torch.tensor([int(key) for key in part.keys])
    second = part.positives[:, 1]
    is_saved = second >= 0
    assert 0 < is_saved.sum() < 5000
    next_keys = (keys[part.owner] + 1) % 1500
    assert torch.equal(keys[second[is_saved]], next_keys[is_saved])


def test_a_file_of_no_evaluation_can_be_read(tmp_path):
    """Own data too few for a val or test split."""
    save_pieces(tmp_path / "val.safetensors", {})
    assert read_pieces(tmp_path / "val.safetensors") == {}


# -------------------------------------- pictures of a run ------------------------------------
def test_pictures_that_few_queries_do_not_have_are_named(tmp_path, capsys):
    few = saved(tmp_path, evaluation(19))
    enough = saved(tmp_path, evaluation(20))
    sets = {"few": few, "enough": enough}
    assert base.by_set(sets) == [("enough", "_enough", enough)]
    assert capsys.readouterr().out == (
        "test.csv (test): pictures that need 20 queries are left out; it has 19\n")


def test_a_chance_level_has_the_colour_of_its_curve(tmp_path):
    """Grey, where two curves share it."""
    rows = [{"step": 1, "a": 1, "b": 2, "c": 3}]
    run = finished_run(tmp_path / "run", rows)
    levels = {"a": 0.5, "b": 0.25, "c": 0.25}
    _, (ax,) = base.figure(1)
    base.draw_lines(ax, run, {"A": "a", "B": "b", "C": "c"}, "step", levels)
    first, second, third, *chance, _ = ax.lines
    heights = [line.get_ydata()[0] for line in chance]
    assert heights == [0.5, 0.25]
    assert [line.get_color() for line in chance] == [first.get_color(), "grey"]
    assert {line.get_marker() for line in (first, second, third)} == {"."}


@pytest.mark.parametrize("values, corner", [
    ([[9, 0]], "upper right"), ([[0, 9]], "upper left"), ([[9, 9], [0, 9]], "lower right")])
def test_a_legend_stands_in_a_free_corner(values, corner):
    fig, (ax,) = base.figure(1)
    for name, curve in zip("ab", values):
        ax.plot(curve, label=name)
    fig.draw_without_rendering()
    base.place_legend(ax)
    left, bottom, width, height = ax.bbox.bounds
    x, y, *_ = ax.get_legend().get_window_extent().bounds
    down = "upper" if y > bottom + height / 2 else "lower"
    side = "right" if x > left + width / 2 else "left"
    assert f"{down} {side}" == corner


def test_a_legend_without_a_free_corner_stands_above():
    """Single points count, which are no curve."""
    fig, (ax,) = base.figure(1)
    for x, y in ((0, 0), (0, 1), (1, 0), (1, 1)):
        ax.plot([x], [y], marker=".", label=f"{x} {y}")
    fig.draw_without_rendering()
    base.place_legend(ax)
    _, top = ax.get_ylim()
    assert top > 1.2


def test_queries_stand_at_quantiles_of_the_rank(pieces):
    ranks = retrieval_ranks(pieces.text, pieces.image, pieces.positives)
    rows = base.queries_by_rank(pieces, 6)
    in_order = np.sort(ranks)
    assert ranks[rows].tolist() == in_order[2::4].tolist()


def test_the_correct_image_stands_first_with_its_rank(pieces, monkeypatch):
    tables = []
    monkeypatch.setattr(base, "draw_examples", lambda table, *args, **_: tables.append(table))
    base.draw_retrieval(pieces, "retrieval.png")
    ranks = retrieval_ranks(pieces.text, pieces.image, pieces.positives)
    rank_of = dict(zip(pieces.texts, ranks.tolist()))
    for text, examples in tables[0]:
        assert examples[0].above == f"correct: rank {rank_of[text]}"
        number = int(text.removeprefix("caption "))
        pixel = int(examples[0].pixels[0, 0, 0])
        assert pixel == pytest.approx(number, abs=1)
        for rank, example in enumerate(examples):
            assert example.framed == (rank in (0, rank_of[text]))


def test_runs_of_other_classes_are_refused():
    sizes = torch.tensor([3, 1])
    one = SavedPieces("a", "image", 4, [], label_names=["cat", "dog"], class_sizes=sizes)
    for changes in ({"class_sizes": sizes + 1}, {"label_names": ["cat", "cow"]}):
        other = SavedPieces(**vars(one) | changes)
        with pytest.raises(UserError, match="b: its classes, or their numbers of training images"):
            ts.check_classes({"a": one, "b": other})


def test_runs_of_another_test_set_are_refused(tmp_path):
    runs = {}
    for name, num_images in (("a", 24), ("b", 30)):
        runs[name] = finished_run(tmp_path / name)
        saved(tmp_path / name, evaluation(num_images))
    with pytest.raises(UserError, match="b: its test images and captions are not those of a"):
        base.first_test_sets(runs)


def test_a_run_without_a_temperature_has_no_figure_of_it(tmp_path):
    finished_run(tmp_path / "margins", [{"step": 0, "loss": 1.0, "margin": 0.2}])
    with pytest.raises(UserError, match="margins: its log has no temperature"):
        temo.draw_temperatures([tmp_path / "margins"], "a.png")


def test_a_class_without_a_test_image_has_no_accuracy():
    _, (ax,) = base.figure(1)
    pieces = SavedPieces(
        "a", "image", 3, [], label_names=["cat", "dog", "cow"],
        class_sizes=torch.tensor([9, 5, 4]), class_accuracy=torch.tensor([50, 0, torch.nan]))
    ts.draw_accuracies(ax, pieces, "mean")
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == pytest.approx([50, 0, np.nan], nan_ok=True)


# ------------------------------------ Figures 2, 4 and 5 of MAMA -----------------------------
def test_concepts_have_their_shares_of_the_training_data(tmp_path, drawn):
    """Not those of the test: half of the questions, but one in four of training, asks for a cat."""
    texts = ["dog"] * 9 + ["cat"] * 3
    questions = evaluation()
    questions.text = None
    questions.data.cell = lambda column, row: ("cat", "dog")[row % 2]
    questions.predicted = ["cat"] * 24
    for name, num_right in (("base", 4), ("mama", 6)):
        finished_run(tmp_path / name, flags={"task": "qa-open"})
        write_json(tmp_path / name / "training_texts.json", {"texts": texts})
        questions.hits = np.zeros(24, bool)
        questions.hits[:2 * num_right:2] = True
        save_pieces(tmp_path / name / "test.safetensors", {"a": questions})
    dog, cat = mama.draw_concepts([tmp_path / "base", tmp_path / "mama"], "concepts.png")
    assert dog.startswith("dog: 75.00 % of the training data, hits 0 -> 0 of 12, no gain")
    assert cat == "cat: 25.00 % of the training data, hits 4 -> 6 of 12, gain +50.0 %"
    ((figure, _),) = drawn
    assert [bar.get_width() for bar in figure.axes[0].patches] == [25, 75]


def test_topics_are_those_of_the_training_texts():
    training = ["red apple pie"] * 5 + ["fast blue car"] * 7
    in_training, in_test = mama.topics_of(training, ["blue car", "apple", "zebra"])
    assert in_training[0] != in_training[-1]
    assert in_test == [in_training[-1], in_training[0], "no known word"]


def test_margins_are_compared_where_nothing_else_differs(tmp_path, drawn):
    flags = {"margin_schedule": "constant", "a0": 1.0, "a1": 10.0, "a2": 0.1, "lr": 0.1}
    changes = {
        "a": {},
        "b": {"a0": 2.0, "seed": 1},
        "c": {"a0": 2.0, "lr": 0.2},
    }
    for name, changed in changes.items():
        recall = 100 * changed.get("a0", 1.0)
        val = {"x": {"text_to_image": {"R@1": recall}}}
        finished_run(tmp_path / name, flags=flags | changed, val=val)
    assert mama.draw_margins([tmp_path / "a", tmp_path / "b"], "margins.png") == [
        "margin (Fig. 4, left), constant: 0.1: 100.00 (1 runs)",
        "margin (Fig. 4, left), constant: 0.2: 200.00 (1 runs)"]
    with pytest.raises(UserError, match="c and a differ in --lr"):
        mama.draw_margins([tmp_path / "a", tmp_path / "c"], "margins.png")


# ------------------------------------ when and what is measured ------------------------------
@pytest.mark.parametrize("last", [5, 7, 12, 100, 500, 501, 10**6])
def test_a_run_is_evaluated_five_to_eight_times_by_default(last):
    args = SimpleNamespace(eval_every=-1)
    interval = evaluation_interval(args, {"a": {"val": None, "test": None}}, last)
    assert 5 <= len({0, last, *range(0, last, interval)}) <= 8
    assert evaluation_interval(args, {"a": {"test": None}}, last) == 0


def test_the_picture_of_the_methods_is_drawn_from_their_functions(tmp_path):
    methods.main([str(tmp_path / "methods.png")])
    assert (tmp_path / "methods.png").stat().st_size > 20_000
