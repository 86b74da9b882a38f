"""Pictures of every run: what they show, in which order, and how it is named."""

from types import SimpleNamespace

from contrastive.core.metrics import normalize
from contrastive.core.processes import UserError
from contrastive.evaluation.measure import usual_tasks
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.report import table
from contrastive.figures import base, mama, mmts, several, ts

import numpy as np
import pytest
import torch


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, as arguments of save_figure."""
    figures = []
    for module in (base, mama):
        monkeypatch.setattr(module, "save_figure", lambda *args: figures.append(args))
    return figures


@pytest.fixture
def pieces():
    """24 images on a circle; caption i lies at image i, but beside i others for i > 11."""
    angles = torch.arange(24) / 24 * 2 * torch.pi
    image = torch.stack([angles.cos(), angles.sin()], 1)
    shift = torch.tensor([0] * 12 + [*range(1, 13)])
    text = image[(torch.arange(24) + shift) % 24]
    data = SimpleNamespace(
        name="/home/me/test.csv", split="test", clip=None, pixels=None,
        read=lambda i: torch.full((3, 4, 4), i, dtype=torch.uint8),
    )
    return EvaluationPieces(
        data, np.arange(24), image, text, [f"caption {i}" for i in range(24)], np.arange(24),
        torch.arange(24)[:, None],
    )


def test_queries_stand_at_quantiles_of_the_rank(pieces):
    ranks = base.retrieval_ranks(pieces.text, pieces.image, pieces.positives)
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
    ranks = base.retrieval_ranks(pieces.text, pieces.image, pieces.positives)
    for text, examples in rows:
        i = int(text.split()[1])
        first = examples[0]
        assert first.above == f"correct: rank {ranks[i]}" and first.framed
        assert first.pixels[0, 0, 0] == i and len(examples) == 6
        framed = [example.framed for example in examples[1:]]
        assert framed == [ranks[i] == k for k in range(1, 6)]


def test_losses_stand_first_and_speed_last_and_low(drawn, tmp_path):
    names = ("step", "samples_seen", "loss", "lr", "samples_per_s", "step_s", "data_s", "mine")
    log = [dict.fromkeys(names, k) for k in range(3)]
    column = lambda name, x="step": ([row[x] for row in log if name in row],  # noqa: E731
                                     [row[name] for row in log if name in row])
    run = SimpleNamespace(
        log=SimpleNamespace(rows=log, column=column), chance={}, tau_column="tau", folder=tmp_path)
    base.draw_training_curves(run, [("loss", "loss", {"loss": "loss"}), *base.batch_panels()])
    ((fig, path),) = drawn
    titles = [ax.get_title() for ax in fig.axes]
    assert path == tmp_path / "curves.png"
    assert titles == ["loss", "learning rate", "mine", "speed", "time of a step"]
    fig.draw_without_rendering()
    heights = [ax.get_subplotspec().get_position(fig).height for ax in fig.axes]
    assert heights[3] == heights[4] == pytest.approx(0.6 * heights[0], rel=0.1)


@pytest.mark.parametrize("schedule, head, labels", [
    ("fixed", 0, ["tau 0.2"]), ("cos", 0, ["tau 0.2", "tau 0.6", "tau 1"]),
    ("cos", 0.5, ["tau 0.1", "tau 0.5"])])
def test_figure_2_of_ts_has_the_temperatures_of_the_run(schedule, head, labels):
    args = SimpleNamespace(
        schedule=schedule, tau_min=0.2, tau_max=1.0, tau_head=head, tau_tail=0.2 * head)
    _, axes = base.figure(3)
    ts.draw_shares(axes, normalize(torch.randn(9, 4)), args)
    assert axes[0].get_legend_handles_labels()[1] == labels


def test_curves_of_many_runs_look_different(monkeypatch):
    """Eight colours; the ninth curve has the first one's with another line."""
    figures = []
    monkeypatch.setattr(several, "save_figure", lambda fig, _: figures.append(fig))
    log = [{"step": 0, "loss": 1.0, "tau": 0.1}, {"step": 1, "loss": 1.0, "tau": 0.1}]
    several.draw_temperatures({f"run {k}": log for k in range(20)}, "temperatures.png")
    for ax in figures[0].axes:
        looks = {(line.get_color(), line.get_linestyle()) for line in ax.lines}
        assert len(looks) == len(ax.lines) == 20


def test_runs_of_other_classes_or_with_margins_are_refused():
    of_run = dict(sizes=np.array([3, 1]), label_names=["cat", "dog"])
    for other in ({"sizes": np.array([4, 1])}, {"label_names": ["cat", "cow"]}):
        runs = {"a": SimpleNamespace(**of_run), "b": SimpleNamespace(**of_run | other)}
        with pytest.raises(UserError, match="b: its classes, or their numbers of training images"):
            several.draw_tails(runs, "tails.png")
    with pytest.raises(UserError, match="margins: its log has no temperature"):
        several.draw_temperatures({"margins": [{"step": 0, "loss": 1.0, "margin": 0.2}]}, "a.png")


@pytest.mark.parametrize("num_mismatched, labels", [(0, []), (3, ["matched", "mismatched"])])
def test_pairs_are_called_matched_only_where_it_is_known(num_mismatched, labels, drawn):
    batch = torch.rand(8, 3)
    batch[:, 2] = (torch.arange(8) < num_mismatched).float()
    mama.draw_weights({"last_batch": batch}, "focal", "weights.png")
    ax = drawn[0][0].axes[0]
    assert ax.get_legend_handles_labels()[1] == labels
    assert sum(len(points.get_offsets()) for points in ax.collections) == 8


def test_a_class_without_a_test_image_has_no_accuracy(monkeypatch):
    """It had 0 %. In the pictures of a run (Figs. 3 and 5) and of several."""
    sizes, names, accuracies = np.array([9, 5, 4]), ["cat", "dog", "cow"], {0: 50.0, 1: 0.0}
    _, (ax,) = base.figure(1)
    ts.draw_accuracies(ax, sizes, names, accuracies, "mean")
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([50, 0, np.nan], nan_ok=True)
    figures = []
    monkeypatch.setattr(several, "save_figure", lambda fig, _: figures.append(fig))
    labels = np.repeat([0, 1, 2], sizes)
    run = SimpleNamespace(
        sizes=sizes, label_names=names, per_class=accuracies, train_labels=labels,
        train_features=torch.randn(18, 8))
    assert several.draw_tails({"a": run}, "tails.png") == [
        "a: mean of classes 25.0 %; by class, largest first: 50.0 0.0 -"]
    legends = [text.get_text() for ax in figures[0].axes if ax.get_legend()
               for text in ax.get_legend().get_texts()]
    assert "head: cat (9), kNN@1 50 %" in legends and "tail: cow (4), no test image" in legends


def test_few_classes_have_their_names():
    _, (few, many) = base.figure(2)
    ts.name_classes(few, [1, 0], ["cat", "dog"])
    ts.name_classes(many, range(21), [str(i) for i in range(21)])
    assert [text.get_text() for text in few.get_xticklabels()] == ["dog", "cat"]
    assert len(many.get_xticks()) < 21
    assert many.get_xlabel() == "21 classes, from 0 (largest) to 20"


def test_sets_of_few_queries_have_no_pictures(pieces):
    few = EvaluationPieces(pieces.data, np.arange(10), texts=["a"] * 19)
    questions = EvaluationPieces(pieces.data, np.arange(20))
    sets = base.by_set({"few": few, "a": pieces, "questions": questions})
    assert [(name, suffix) for name, suffix, _ in sets] == [
        ("a", "_a"), ("questions", "_questions")
    ]


def test_one_caption_is_no_captions():
    text = table("a (test)", {"images": 1, "captions": 1, "captions_cut": 1}, {})
    assert "1 image, 1 caption, 1 caption cut;" in text
    assert "one of 1 image is worth 100.0 points" in text


def test_emoji_have_no_neighbours_where_raw_pixels_are_above_towers():
    model = SimpleNamespace()
    for name, has_knn in (("emoji", False), ("moving-emoji", True), ("own.csv", True)):
        data = SimpleNamespace(name=name, has_captions=True)
        assert ("knn" in usual_tasks(model, object(), data)) == has_knn
    assert usual_tasks(model, None, SimpleNamespace(name="emoji")) == ("knn", "probe")


def test_clusters_have_captions_in_their_number(pieces, monkeypatch):
    tables = []
    monkeypatch.setattr(base, "draw_examples", lambda *args, **_: tables.append(args))
    examples = [{"size": size, "captions": ["a"], "rows": [0]} for size in (2000, 2, 1)]
    mmts.draw_clusters(pieces.data, examples, "clusters.png", "a.csv")
    assert [label for label, _ in tables[0][0]] == ["2,000 captions", "2 captions", "1 caption"]


def test_retrieval_panel_names_both_directions(pieces):
    run = SimpleNamespace(val_pieces={"a.csv": pieces})
    title, _, columns = base.recall_panel(run)
    assert title == "retrieval, val (t = text, i = image)"
    assert columns["t->i R@1"] == "eval/a.csv/text_to_image/R@1"
    assert columns["i->t R@10"] == "eval/a.csv/image_to_text/R@10"
