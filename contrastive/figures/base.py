"""What all figures share, and those that every run has: curves, retrieval, answers.

    fig, (left, right) = figure(2)
    left.plot(steps, loss)
    save_figure(fig, folder / "mine.png")      # or .pdf
"""

import argparse
import dataclasses
import functools
import math
import textwrap
from pathlib import Path
from typing import NamedTuple

from contrastive.core.files import flatten, logged_rows, read_json, slug
from contrastive.core.metrics import retrieval_ranks
from contrastive.core.processes import UserError, opening, print_main
from contrastive.core.words import flag_of
from contrastive.evaluation.saved_pieces import read_pieces

import numpy as np
import torch

# points, for all text: readable in half a column of a paper, and from the back of a lecture hall
LETTERS = 11
TEXTS = (
    "font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize",
    "legend.fontsize", "legend.title_fontsize", "figure.titlesize")
COLOURS = [
    "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink",
    "tab:gray"]
LINE_STYLES = ["-", "--", ":", "-."]
# of 32 curves; where a colour comes again, its line is another
LINES = [LINE_STYLES[(k + k // 8) % 4] for k in range(32)]
STYLE = {
    **dict.fromkeys(TEXTS, LETTERS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 0.8,
    "legend.handletextpad": 0.5,
    "legend.borderaxespad": 0,
    "savefig.dpi": 200,
    # a '$' in a caption is a dollar
    "text.parse_math": False,
    # TrueType: journals refuse matplotlib's default, Type 3
    "pdf.fonttype": 42,
    "axes.prop_cycle": f"cycler(color={COLOURS * 4}, ls={LINES})"}
# entries of args.json that change nothing that is learnt
WITHOUT_EFFECT = {
    "output_dir", "run_name", "resume", "cpu", "workers", "save_every", "eval_every", "log_every",
    "tracker", "hub", "command_line", "changed", "method_flags", "recipes", "recipe_source"}
MIN_QUERIES = 20  # of a set; of fewer there are examples, and no other pictures
# (text, width in letters)
wrap = functools.partial(textwrap.fill, max_lines=3, placeholder=" ...")


# ======================================================= any figure ===============================
def figure(panels, columns=0, width=3.6, height=2.7):
    """A matplotlib figure without a display.

    Args:
        panels: how many.
        columns: of the grid; 0 = all panels in one row.
        width, height: of a panel, in inches.
    Returns: figure, flat array of axes; the last one takes what is left of its row.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    columns = columns or panels
    rows = math.ceil(panels / columns)
    fig = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False).ravel()
    if panels % columns:
        row = axes[0].get_gridspec()[rows - 1, (panels - 1) % columns:]
        axes[panels - 1].set_subplotspec(row)
    for unused in axes[panels:]:
        unused.remove()
    return fig, axes[:panels]


def save_figure(fig, path):
    """Writes a figure as .png or .pdf."""
    wrap_labels(fig)
    with opening(path):
        fig.savefig(path)


def wrap_labels(fig):
    """Wraps titles and labels of one line to their panel."""
    fig.draw_without_rendering()  # lays the panels out, so that their sizes are known
    wrap_text(fig.suptitle(fig.get_suptitle()), fig.bbox.width)
    for ax in fig.axes:
        wrap_text(ax.title, ax.bbox.width)
        wrap_text(ax.xaxis.label, ax.bbox.width)
        wrap_text(ax.yaxis.label, ax.bbox.height)


def wrap_text(text, dots):
    """Wraps a text of a figure, if it is one line, to a length in dots."""
    letter_width = 0.52 * LETTERS                                          # points, about
    num_letters = int(dots / text.figure.dpi * 72 / letter_width)
    if "\n" not in text.get_text():
        wrapped = textwrap.fill(text.get_text(), num_letters, break_long_words=False)
        text.set_text(wrapped)


def place_legend(ax):
    """A legend in a corner of a panel that no curve enters, else above the curves."""
    for corner in ("upper right", "upper left", "lower right", "lower left"):
        box = ax.legend(loc=corner).get_window_extent()
        is_free = True
        for line in ax.lines:
            curve = line.get_path().transformed(line.get_transform())
            # a point alone intersects nothing
            if box.count_contains(curve.vertices) or curve.intersects_bbox(box, filled=False):
                is_free = False
        if is_free:
            return
    legend_above(ax)


def legend_above(ax):
    """A legend that covers nothing: the y axis grows by its height."""
    names = ax.get_legend_handles_labels()[1]
    longest = max(map(len, names))
    columns = 1
    if longest <= 6:
        columns = 3
    elif longest <= 12:
        columns = 2
    ax.legend(loc="upper center", ncols=columns)
    # height of a row as a part of the panel, which the layout makes lower
    row_height = 1.7 * LETTERS / 72 * ax.figure.dpi / ax.bbox.height
    rows = math.ceil(len(names) / columns)
    legend_height = min(0.6, row_height * (rows + 0.5))
    low, high = ax.get_ylim()
    # no ticks beside the legend, such as 150 %
    ticks = ax.get_yticks()
    ax.set_yticks(ticks[(ticks >= low) & (ticks <= high)])
    height = (high - low) / (1 - legend_height)
    ax.set_ylim(low, low + height)


def whole_ticks(ax):
    """Ticks of the x axis at whole numbers only: steps, samples, epochs."""
    ax.locator_params(axis="x", integer=True, nbins=5)


# ======================================================= a run ====================================
class FinishedRun:
    """The files of a run folder that figures read.

    Attributes:
        folder: Path.
        args: its flags.
        summary: content of summary.json.
        rows: of its log; the keys of nested dicts are joined with '/'.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.args = argparse.Namespace(**read_json(self.folder / "args.json"))
        self.summary = read_json(self.folder / "summary.json")
        with opening(self.folder / "metrics.jsonl"):
            self.rows = [flatten(row) for row in logged_rows(self.folder / "metrics.jsonl")]

    @functools.cached_property
    def val(self):
        """{data set: SavedPieces} of the last evaluation on val."""
        return read_pieces(self.folder / "val.safetensors")

    @functools.cached_property
    def test(self):
        """{data set: SavedPieces} of the test splits."""
        return read_pieces(self.folder / "test.safetensors")

    def column(self, name, x="step"):
        """(steps, values) of a logged number."""
        steps, values = [], []
        for row in self.rows:
            if name in row:
                steps.append(row[x])
                values.append(row[name])
        return steps, values


def read_runs(folders):
    """{name of the folder: FinishedRun}. Raises: UserError for two folders of one name."""
    runs = {Path(folder).name: FinishedRun(folder) for folder in folders}
    if len(runs) < len(folders):
        names = ", ".join(runs)
        raise UserError(f"{names}: the legend names runs by their folders; give the folders "
                        "different names")
    return runs


def require_same_flags(runs, except_flags, advice):
    """Raises: UserError if runs differ in a flag that changes what is learnt.

    Args:
        runs: as read_runs returns them.
        except_flags: names in which they may differ.
        advice: which runs to give, in words.
    """
    first_name, first = next(iter(runs.items()))
    for name, run in runs.items():
        flags = vars(first.args).keys() | vars(run.args).keys()
        for flag in sorted(flags - except_flags - WITHOUT_EFFECT):
            value = getattr(run.args, flag, None)
            first_value = getattr(first.args, flag, None)
            if value != first_value:
                raise UserError(f"{name} and {first_name} differ in {flag_of(flag)} ({value}, "
                                f"{first_value}); compare runs that differ in {advice}")


def first_test_sets(runs):
    """{run: SavedPieces} of the first data set of each run: test, else val.

    Args: runs: as read_runs returns them.
    Raises: UserError if the runs did not evaluate the same images with the same captions.
    """
    pieces = {}
    for name, run in runs.items():
        sets = run.test or run.val
        if not sets:
            raise UserError(f"{run.folder}: has no test.safetensors, which figures read; give a "
                            "run that has ended")
        pieces[name] = next(iter(sets.values()))
    first_run, first = next(iter(pieces.items()))
    for name, run_pieces in pieces.items():
        if run_pieces.keys != first.keys or run_pieces.texts != first.texts:
            raise UserError(f"{name}: its test images and captions are not those of {first_run}; "
                            "compare runs on the same data")
    return pieces


def require_texts(pieces):
    """Raises: UserError if runs have no captions. pieces: {run: SavedPieces}."""
    for name, run_pieces in pieces.items():
        if run_pieces.text is None:
            raise UserError(f"{name}: its evaluation has no captions, which this figure compares; "
                            "give runs with images and texts")


def by_set(sets, min_queries=MIN_QUERIES):
    """The data sets of a run: [(name, suffix of its pictures' file names, pieces)].

    The first has no suffix.

    Args:
        sets: {name: SavedPieces}.
        min_queries: sets of fewer captions, or images without any, are left out, which is printed:
            statistics of them would mislead.
    """
    result = []
    for place, (name, pieces) in enumerate(sets.items()):
        suffix = f"_{slug(name)}" if place else ""
        queries = pieces.keys if pieces.texts is None else pieces.texts
        if len(queries) >= min_queries:
            result.append((name, suffix, pieces))
        else:
            print_main(f"{pieces.title}: pictures that need {min_queries} queries are left out; it "
                       f"has {len(queries)}")
    return result


# ======================================================= curves ===================================
# panels: title, y label, {legend: column of the log}
# the last panels of all methods
SPEED = [
    ("speed", "samples per second", {"all processes": "samples_per_s"}),
    ("time of a step", "seconds", {"whole": "step_s", "waiting for data": "data_s"})]
# columns that need no panel of their own; that of tau is each method's
POSITION = {"step", "epoch", "samples_seen", "tau"}


def batch_panels(first="image", second="text"):
    """The panels of all methods that train on pairs.

    Args: first, second: names of the two embeddings of a pair, as Run.start has them.
    """
    return [
        ("learning rate", "lr", {"lr": "lr"}),
        ("InfoNCE at temperature 0.07", "mean over the batch", {"info_nce": "info_nce"}),
        ("cosine", "mean over the batch",
         {"positive pairs": "pos_cos", "negative pairs": "neg_cos"}),
        ("spread (0 = collapsed, 1 = whole sphere)", "std x sqrt(D)",
         {first: f"std_{first}", second: f"std_{second}"}),
        ("geometry of the embeddings", "of the batch",
         {"alignment": "alignment", "uniformity": "uniformity", "gap": "gap",
          "std of pairs": "pos_std"})]


def recall_panel(run, name=""):
    """The panel of R@1 and R@10 both ways on val, of the set `name`, or of the first."""
    name = name or next(iter(run.val), "")
    kind = run.val[name].kind if name in run.val else "image"
    columns = {}
    for label, way in ((f"t->{kind[0]}", "text_to_image"), (f"{kind[0]}->t", "image_to_text")):
        for metric in ("R@1", "R@10"):
            columns[f"{label} {metric}"] = f"eval/{name}/{way}/{metric}"
    return f"retrieval, val (t = text, {kind[0]} = {kind})", "%", columns


def draw_training_curves(run, panels, chance=None):
    """Draws curves.png: panels of a method, those of all methods, one for every further column of
    the training steps, such as those of a fork, and speed last. chance: as in draw_curves."""
    further = remaining_panels(run, panels + SPEED)
    draw_curves(run, [*panels, *further, *SPEED], run.folder / "curves.png", chance=chance)


def draw_curves(run, panels, path, x="step", *, chance=None):
    """Draws logged numbers in panels; those without a number are left out.

    Dotted: chance, of numbers on val, in the colour of the curve.

    Args:
        panels: [(title, y label, {legend: column of the log})].
        x: 'step' or 'samples_seen'.
        chance: {data set: levels}, by the names of its metrics; None = those of the run.
    """
    if chance is None:
        chance = run.summary["val_chance"]
    levels = flatten({"eval": chance})
    panels = [panel for panel in panels if has_numbers(run, panel)]
    fig, axes = figure(len(panels), columns=2, height=3.0)
    for ax, (title, label, lines) in zip(axes, panels):
        draw_lines(ax, run, lines, x, levels)
        ax.set_title(title)
        ax.set_xlabel(x.replace("_", " "))
        ax.set_ylabel(label)
        whole_ticks(ax)
    wrap_labels(fig)
    fig.draw_without_rendering()  # panels have their last sizes
    for ax in axes:
        names = ax.get_legend_handles_labels()[1]
        if len(names) > 1:
            place_legend(ax)
    save_figure(fig, path)


def remaining_panels(run, panels):
    """A panel for every column of the training steps that no panel has."""
    columns = set(POSITION)
    for _, _, lines in panels:
        columns.update(lines.values())
    remaining = []
    for row in run.rows:
        for name in row:
            if "loss" in row and name not in columns:
                columns.add(name)
                remaining.append((name, "mean over the batch", {name: name}))
    return remaining


def has_numbers(run, panel):
    """Whether the log has numbers for a panel."""
    _, _, lines = panel
    return any(run.column(name)[0] for name in lines.values())


def draw_lines(ax, run, lines, x, chance):
    """Draws columns of the log, {legend: column}, with the chance level of those that have one.

    A chance level has the colour of its curve, or is grey if several curves share it.

    Args: chance: {column: level}.
    """
    colours = {}  # {chance level: colour}
    for legend, name in lines.items():
        steps, values = run.column(name, x)
        if steps:
            (curve,) = ax.plot(steps, values, label=legend, marker=marker_of(steps))
            level = chance.get(name)
            if level in colours:
                colours[level] = "grey"
            elif level is not None:
                colours[level] = curve.get_color()
    if colours:
        dots = (0, (1, 3))  # wider apart than those of a dotted curve
        for level, colour in colours.items():
            ax.axhline(level, color=colour, ls=dots, lw=1.2)
        ax.plot([], [], color="grey", ls=dots, lw=1.2, label="chance")


def marker_of(steps):
    """A marker at each of a few steps: one alone has no line."""
    if len(steps) < 12:
        return "."
    return ""


# ======================================================= examples =================================
class Example(NamedTuple):
    """A picture with words."""

    pixels: np.ndarray  # (H, W, 3)
    above: str
    below: str
    framed: bool = False  # in green


class QueryHits(NamedTuple):
    """A query and its similarity to all items."""

    text: str
    right: set  # items that are right
    sim: torch.Tensor  # (M,)
    below: list  # words below each item


def draw_examples(table, path, title, width, words):
    """Draws rows of pictures with words above and below.

    Args:
        table: [(words on the left, [Example])].
        width: of a picture, in inches.
        words: height of those above and below a picture, in inches.
    """
    columns = max(len(examples) for _, examples in table)
    _, examples = table[0]
    height, original_width, _ = examples[0].pixels.shape
    height = width * height / original_width + words
    fig, axes = figure(columns * len(table), columns, width, height)
    fig.set_figwidth(columns * width + 1.9)                                # for words on the left
    rows = axes.reshape(len(table), columns)
    for row, (label, examples) in zip(rows, table):
        label = wrap(label, 18, max_lines=4)
        row[0].set_ylabel(label, rotation=0, ha="right", va="center", labelpad=8)
        for ax, example in zip(row, examples):
            draw_example(ax, example)
        for ax in row[len(examples):]:
            ax.set_axis_off()
    fig.suptitle(title)
    save_figure(fig, path)


def draw_example(ax, example):
    """Draws an Example."""
    ax.imshow(example.pixels)
    ax.set(xticks=[], yticks=[], title=example.above, xlabel=example.below)
    colour, line_width = "lightgrey", 1
    if example.framed:
        colour, line_width = "tab:green", 3
    for spine in ax.spines.values():
        spine.set(visible=True, color=colour, linewidth=line_width)


def with_pictures(pieces):
    """The SavedPieces of the images that have a picture, with their captions."""
    n = pieces.num_pictures
    rows = torch.nonzero(pieces.owner < n).flatten()                       # (c,)
    positives = pieces.positives[rows]                                     # (c, P)
    biases = {}
    for mode, (image_bias, text_bias) in pieces.biases.items():
        biases[mode] = image_bias[:n], text_bias[rows]
    return dataclasses.replace(
        pieces, keys=pieces.keys[:n], image=pieces.image[:n], text=pieces.text[rows],
        texts=[pieces.texts[row] for row in rows], owner=pieces.owner[rows],
        positives=torch.where(positives < n, positives, -1), biases=biases)


def queries_by_rank(pieces, queries, bias=None):
    """Captions at evenly spaced quantiles of the rank of their best positive, the best first."""
    ranks = retrieval_ranks(pieces.text, pieces.image, pieces.positives, bias)       # (C,)
    order = np.argsort(ranks, kind="stable")                               # (C,)
    queries = min(queries, len(order))
    quantiles = (np.arange(queries) + 0.5) / queries                       # the middles of parts
    places = (quantiles * len(order)).astype(int)
    return order[places].tolist()


def draw_retrieval(pieces, path, mode=""):
    """Draws six queries at even quantiles of the rank, with their first images or strips of frames.

    Args:
        pieces: SavedPieces.
        mode: of the biases that are added to the cosines of images (NCL); "" = none.
    """
    pieces = with_pictures(pieces)
    number, bias = "cosine", None
    if mode:
        number, (bias, _) = "adjusted similarity", pieces.biases[mode]
    sim = pieces.cosines()                                                 # (C, M)
    if bias is not None:
        sim = sim + bias
    title = f"{number} below. Queries from best to worst, at even quantiles of the rank"
    hits = []
    for row in queries_by_rank(pieces, 6, bias):
        right = set(pieces.positives[row].tolist())
        below = [f"{value:.2f}" for value in sim[row]]
        hits.append(QueryHits(pieces.texts[row], right, sim[row], below))
    draw_hits(pieces, hits, path, title)


def draw_hits(pieces, hits, path, title):
    """Draws a row for each query: its text, the correct image with its rank, and the first images.

    Of images there are five, of strips of frames three. Correct ones are framed in green.

    Args:
        pieces: as with_pictures returns them.
        hits: [QueryHits].
    """
    num_items, width = 5, 1.4
    if pieces.kind == "video":
        num_items, width = 3, 2.4
    table = []
    for text, right, sim, below in hits:
        right_items = sorted(right - {-1})
        best = right_items[int(sim[right_items].argmax())]
        rank_of_best = int((sim >= sim[best]).sum())
        places = [(best, f"correct: rank {rank_of_best}")]
        items = sim.topk(min(num_items, len(sim))).indices.tolist()
        for rank, item in enumerate(items, 1):
            places.append((item, f"rank {rank}"))
        examples = []
        for item, above in places:
            examples.append(Example(pieces.picture(item), above, below[item], item in right))
        table.append((text, examples))
    gallery = f"{len(pieces.image)}"
    if pieces.num_images > len(pieces.image):
        gallery += f" (drawn from {pieces.num_images:,})"
    title = (f"{pieces.title}: text -> {pieces.kind}: the correct one with its rank, then the "
             f"first of {gallery}; green = correct, {title}")
    draw_examples(table, path, title, width, words=0.5)


def draw_answers(pieces, path):
    """Draws four questions with a right and four with a wrong answer. pieces: SavedPieces."""
    table = []
    hits = pieces.hits[:pieces.num_pictures]                               # (n,)
    for label, is_right in (("right", True), ("wrong", False)):
        examples = []
        for row in torch.nonzero(hits == is_right).flatten()[:4].tolist():
            below = f"given: {wrap(pieces.predicted[row], 27)}"
            if not is_right:
                below += f"\nright: {wrap(pieces.answers[row], 27)}"
            question = wrap(pieces.questions[row], 34)
            examples.append(Example(pieces.picture(row), question, below, is_right))
        if examples:
            table.append((label, examples))
    percent = 100 * pieces.hits.float().mean()
    title = f"{pieces.title}: answers, {percent:.1f} % of {len(pieces.hits)} right"
    draw_examples(table, path, title, width=2.6, words=0.7)


# ======================================================= histograms ===============================
def draw_histograms(stages, path, title):
    """Draws negative (left) and positive (right) pairs, with a line at the threshold.

    Args: stages: {name: similarity_histograms(...)}, such as before and after training.
    """
    fig, axes = figure(2)
    densities = []
    for histogram in stages.values():
        edges = np.array(histogram["edges"])                               # (bins + 1,), of all
        densities += [histogram["negative"], histogram["positive"]]
    filled = np.flatnonzero(np.any(densities, axis=0))                     # bins with a pair
    low, high = edges[filled[0]], edges[filled[-1] + 1]
    for ax, kind in zip(axes, ("negative", "positive")):
        for k, (name, histogram) in enumerate(stages.items()):
            colour = f"C{k}"
            ax.stairs(histogram[kind], edges, label=name, fill=True, color=colour, alpha=0.5)
            if histogram["threshold"] is not None:
                ax.axvline(histogram["threshold"], ymax=0.6, color=colour, ls=":")
        ax.set_title(f"{kind} pairs")
        ax.set_xlabel("cosine")
        ax.set_ylabel("density")
        ax.set_xlim(low - 0.04, high + 0.04)
        # more numbers, or such as -0.125, would run into each other
        ax.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
        if len(stages) > 1:
            legend_above(ax)
    fig.suptitle(f"{title}\ndotted: where positives become denser than negatives")
    save_figure(fig, path)


# ======================================================= bars =====================================
def draw_bars(panels, path):
    """Draws a bar for each run and label. Returns: the numbers as lines.

    Args:
        panels: {title: {run: {label: value}}}.
    Raises: UserError if no run has a number of a panel.
    """
    labels = {}  # {title: labels of all runs}
    for title, runs in panels.items():
        labels[title] = list({label: 0 for values in runs.values() for label in values})
        if not labels[title]:
            raise UserError(f"{title}: no run has these results; give runs that were evaluated so")
    most_labels = max(map(len, labels.values()))
    fig, axes = figure(len(panels), width=max(5, 1.4 * most_labels))  # for the labels' words
    lines = []
    for ax, (title, runs) in zip(axes, panels.items()):
        places = np.arange(len(labels[title]))
        width = 0.8 / len(runs)
        for k, (run, values) in enumerate(runs.items()):
            shift = width * (k + 0.5) - 0.4
            heights = [values.get(label, np.nan) for label in labels[title]]
            ax.bar(places + shift, heights, width, label=run)
            for label, value in values.items():
                label = " ".join(label.split())
                lines.append(f"{title}, {label}, {run}: {value:.3f}")
        ax.set_title(title)
        ax.set_xticks(places, [label.replace(", ", ",\n") for label in labels[title]])
        legend_above(ax)
    save_figure(fig, path)
    return lines
