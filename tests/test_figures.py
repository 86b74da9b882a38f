"""Pictures of every run: what they show, in which order, and how it is named."""

from types import SimpleNamespace

from contrastive.core.files import write_json
from contrastive.core.metrics import retrieval_ranks
from contrastive.core.processes import UserError
from contrastive.engine.run import evaluation_interval
from contrastive.evaluation.measure import usual_tasks
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.saved_pieces import SavedPieces, read_pieces, save_pieces
from contrastive.figures import base, mama, temo, ts

import numpy as np
import pytest
import torch


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
    shift = torch.tensor([*[0] * 12, *range(1, num_images - 11)])
    text = image[(torch.arange(num_images) + shift) % num_images]
    data = SimpleNamespace(
        name="/home/me/test.csv", split="test", clip=None, pixels=None, key=str,
        read=lambda i: torch.full((3, 8, 8), i % 250, dtype=torch.uint8))
    return EvaluationPieces(
        data, np.arange(num_images), image, text, [f"caption {i}" for i in range(num_images)],
        np.arange(num_images), torch.arange(num_images)[:, None])


def saved(path, pieces, num_pictures=500):
    """SavedPieces, as a figure reads them."""
    save_pieces(path, {"/home/me/test.csv": pieces}, num_pictures)
    return read_pieces(path)["/home/me/test.csv"]


def test_a_file_of_no_evaluation_can_be_read(tmp_path):
    """Own data too few for a val or test split."""
    save_pieces(tmp_path / "val.safetensors", {})
    assert read_pieces(tmp_path / "val.safetensors") == {}


@pytest.fixture
def pieces(tmp_path):
    return saved(tmp_path / "test.safetensors", evaluation())


def finished_run(folder, rows, flags=None, **summary):
    """A FinishedRun with this log."""
    folder.mkdir()
    write_json(folder / "args.json", flags or {"loss": "temo"})
    write_json(folder / "summary.json", {"val_chance": {}} | summary)
    lines = [str(row).replace("'", '"') + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return base.FinishedRun(folder)


# ---------------------------------------- what is saved ------------------------------------------
def test_saved_rows_belong_together(pieces):
    """In a random order, the same each time: row, key, caption, positive and picture."""
    original = evaluation()
    assert pieces.title == "test.csv (test)" and pieces.kind == "image"
    rows = [int(key) for key in pieces.keys]
    assert sorted(rows) == list(range(24)) and rows != sorted(rows)
    assert torch.equal(pieces.image, original.image[rows])
    for caption, text in enumerate(pieces.texts):
        row = rows[pieces.owner[caption]]
        assert text == f"caption {row}"
        assert torch.equal(pieces.text[caption], original.text[row])
        assert pieces.positives[caption].tolist() == [pieces.owner[caption]]
        assert abs(int(pieces.picture(pieces.owner[caption])[0, 0, 0]) - row) <= 1  # JPEG


def test_many_captions_save_fewer_images(tmp_path):
    """At most 5 captions of an image and 5,000 in all; positives that are not saved are dropped."""
    whole = evaluation(1500)
    whole.owner = np.repeat(np.arange(1500), 6)
    whole.texts = [f"caption {i}" for i in range(9000)]
    whole.text = whole.image[whole.owner]
    own, other = torch.from_numpy(whole.owner), torch.from_numpy((whole.owner + 1) % 1500)
    whole.positives = torch.stack([own, other], 1)
    part = saved(tmp_path / "test.safetensors", whole, num_pictures=3)
    assert (len(part.image), len(part.text), part.num_pictures) == (1000, 5000, 3)
    assert part.num_images == 1500
    assert torch.equal(part.positives[:, 0], part.owner)
    has_other = part.positives[:, 1] >= 0
    keys = torch.tensor([int(key) for key in part.keys])
    assert 0 < has_other.float().mean() < 1
    assert torch.equal(
        keys[part.positives[has_other, 1]], (keys[part.owner[has_other]] + 1) % 1500)
    shown = base.with_pictures(part)
    assert len(shown.image) == 3 and len(shown.text) == 15 and shown.positives.max() < 3


# ---------------------------------------- pictures of a run --------------------------------------
def test_queries_stand_at_quantiles_of_the_rank(pieces):
    ranks = retrieval_ranks(pieces.text, pieces.image, pieces.positives)
    rows = base.queries_by_rank(pieces, 6)
    assert rows == sorted(rows, key=lambda row: ranks[row])
    assert list(ranks[rows]) == list(np.sort(ranks)[[2, 6, 10, 14, 18, 22]])
    assert ranks[rows[0]] == 1 and ranks[rows[-1]] > 20
    assert len(base.queries_by_rank(pieces, 100)) == 24


def test_the_correct_image_stands_first_with_its_rank(pieces, monkeypatch):
    tables = []
    monkeypatch.setattr(base, "draw_examples", lambda *args, **_: tables.append(args))
    base.draw_retrieval(pieces, "retrieval.png")
    rows, _, title, *_ = tables[0]
    assert title.startswith("test.csv (test): text -> image")
    ranks = dict(zip(
        pieces.texts, retrieval_ranks(pieces.text, pieces.image, pieces.positives)))
    for text, examples in rows:
        first = examples[0]
        assert first.above == f"correct: rank {ranks[text]}" and first.framed
        assert abs(int(first.pixels[0, 0, 0]) - int(text.split()[1])) <= 1
        assert len(examples) == 6
        framed = [example.framed for example in examples[1:]]
        assert framed == [ranks[text] == k for k in range(1, 6)]


def test_runs_of_other_data_or_without_a_temperature_are_refused(tmp_path):
    sizes = torch.tensor([3, 1])
    one = SavedPieces("a", "image", 4, [], label_names=["cat", "dog"], class_sizes=sizes)
    for changes in (dict(class_sizes=sizes + 1), dict(label_names=["cat", "cow"])):
        other = SavedPieces(**vars(one) | changes)
        with pytest.raises(UserError, match="b: its classes, or their numbers of training images"):
            ts.check_classes({"a": one, "b": other})
    finished_run(tmp_path / "margins", [{"step": 0, "loss": 1.0, "margin": 0.2}])
    with pytest.raises(UserError, match="margins: its log has no temperature"):
        temo.draw_temperatures([tmp_path / "margins"], "a.png")
    runs = {}
    for name, num_images in (("a", 24), ("b", 30)):
        runs[name] = finished_run(tmp_path / name, [])
        saved(tmp_path / name / "test.safetensors", evaluation(num_images))
    with pytest.raises(UserError, match="b: its test images and captions are not those of a"):
        base.first_test_sets(runs)


# ---------------------------------------- Figures 2, 4 and 5 of MAMA -----------------------------
def test_concepts_have_their_shares_of_the_training_data(tmp_path, drawn):
    """Not those of the test: half of the questions, but one in four of training, asks for a cat."""
    folders = []
    for run, num_right in (("base", 4), ("mama", 6)):
        folders.append(tmp_path / run)
        finished_run(tmp_path / run, [], {"task": "qa-open"})
        write_json(tmp_path / run / "training_texts.json", {"texts": [*["dog"] * 9, *["cat"] * 3]})
        questions = evaluation()
        questions.text = None
        questions.data.cell = lambda column, row: ("cat", "dog")[row % 2]
        questions.predicted = ["cat"] * 24
        questions.hits = np.array([row % 2 == 0 and row < 2 * num_right for row in range(24)])
        save_pieces(tmp_path / run / "test.safetensors", {"a": questions})
    assert mama.draw_concepts(folders, "concepts.png") == [
        "dog: 75.00 % of the training data, hits 0 -> 0 of 12, no gain, since the first run has no "
        "hit",
        "cat: 25.00 % of the training data, hits 4 -> 6 of 12, gain +50.0 %"]
    ((fig, _),) = drawn
    assert [bar.get_width() for bar in fig.axes[0].patches] == [25, 75]
    assert fig.axes[1].collections[0].get_offsets()[1].tolist() == [25, 50]


def test_topics_are_those_of_the_training_texts():
    training = ["red apple pie"] * 5 + ["fast blue car"] * 7
    in_training, in_test = mama.topics_of(training, ["blue car", "apple", "zebra"])
    assert in_test == [in_training[-1], in_training[0], "no known word"]
    assert len(set(in_training[:5])) == len(set(in_training[5:])) == 1
    assert in_training[0] != in_training[-1]


def test_margins_are_compared_where_nothing_else_differs(tmp_path, drawn):
    flags = {"margin_schedule": "constant", "a0": 1.0, "a1": 10.0, "a2": 0.1, "lr": 0.1}
    changes = {"a": {}, "b": {"a0": 2.0, "seed": 1, "run_name": "b"}, "c": {"a0": 2.0, "lr": 0.2}}
    for name, changed in changes.items():
        finished_run(
            tmp_path / name, [], flags | changed,
            val={"x": {"text_to_image": {"R@1": 100 * changed.get("a0", 1.0)}}})
    assert mama.draw_margins([tmp_path / "a", tmp_path / "b"], "margins.png") == [
        "margin (Fig. 4, left), constant: 0.1: 100.00 (1 runs)",
        "margin (Fig. 4, left), constant: 0.2: 200.00 (1 runs)"]
    with pytest.raises(UserError, match="c and a differ in --lr .0.2, 0.1.; compare runs that"):
        mama.draw_margins([tmp_path / "a", tmp_path / "c"], "margins.png")


# ---------------------------------------- classes ------------------------------------------------
def test_a_class_without_a_test_image_has_no_accuracy():
    _, (ax,) = base.figure(1)
    pieces = SavedPieces(
        "a", "image", 3, [], label_names=["cat", "dog", "cow"],
        class_sizes=torch.tensor([9, 5, 4]), class_accuracy=torch.tensor([50, 0, torch.nan]))
    ts.draw_accuracies(ax, pieces, "mean")
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([50, 0, np.nan], nan_ok=True)


def test_sets_of_few_queries_have_examples_alone(pieces):
    few = SavedPieces("few", "image", 10, ["a"] * 10, texts=["a"] * 19)
    questions = SavedPieces("questions", "image", 20, ["a"] * 20)
    sets = base.by_set({"few": few, "a": pieces, "questions": questions})
    assert [(name, suffix) for name, suffix, _ in sets] == [
        ("a", "_a"), ("questions", "_questions")
    ]
    examples = base.by_set({"few": few, "a": pieces}, min_queries=1)
    assert [name for name, _, _ in examples] == ["few", "a"]


def test_a_run_is_evaluated_five_to_eight_times_by_default():
    evals = {"a": {"val": None, "test": None}}
    for last in (5, 7, 12, 100, 500, 501, 10**6):
        interval = evaluation_interval(SimpleNamespace(eval_every=-1), evals, last)
        steps = {0, last, *range(0, last, interval)}
        assert 5 <= len(steps) <= 8, (last, interval)
    assert evaluation_interval(SimpleNamespace(eval_every=9), evals, 100) == 9
    without_val = {"a": {"test": None}}
    assert evaluation_interval(SimpleNamespace(eval_every=-1), without_val, 100) == 0


def test_emoji_have_no_neighbours_where_raw_pixels_are_above_towers():
    model = SimpleNamespace()
    for name, has_knn in (("emoji", False), ("moving-emoji", True), ("own.csv", True)):
        data = SimpleNamespace(name=name, has_captions=True)
        assert ("knn" in usual_tasks(model, object(), data)) == has_knn
    assert usual_tasks(model, None, SimpleNamespace(name="emoji")) == ("knn", "probe")


