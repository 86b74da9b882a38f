"""Figures of the papers that compare runs: TS's 3 and 5, TeMo's 2 to 6, NCL's 2, 6, 7, 8.

The first argument of a function is {name of a run: its log, results or pieces}, in the order of the
command line. Each draws a picture and returns its numbers as lines of text.
"""

from contrastive.core.processes import UserError
from contrastive.evaluation.similarities import similarity_histograms
from contrastive.figures import base, ncl
from contrastive.figures.base import figure, legend_above, save_figure, whole_ticks
from contrastive.figures.ts import accuracies_of, draw_space

import numpy as np


# ----------------------------------------------------- logs and results --------------------------
def draw_temperatures(logs, path):
    """TeMo, Fig. 2: the mean temperature of positive and of negative pairs along training.

    Args:
        logs: {run: rows of its log}.
    """
    fig, axes = figure(2)
    lines = []
    titles = {"tau_pos": "positive pairs (Fig. 2)", "tau_neg": "negative pairs (Fig. 2)"}
    for ax, (column, title) in zip(axes, titles.items()):
        for run, rows in logs.items():
            steps = []
            values = []
            for row in rows:
                if "loss" in row:
                    steps.append(row["step"])
                    values.append(temperature_of_row(row, column, run))
            ax.plot(steps, values, label=run)
            lines.append(f"{title}, {run}: {values[0]:.4f} first, {values[-1]:.4f} last")
        ax.set_title(title)
        ax.set_xlabel("step")
        ax.set_ylabel("mean temperature of the batch")
        whole_ticks(ax)
        legend_above(ax)
    save_figure(fig, path)
    return lines


def temperature_of_row(row, column, run):
    """The mean temperature of positive or negative image-text pairs in a row of a run's log.

    Args:
        column: 'tau_pos' or 'tau_neg', which are there if the two differ; else it is tau.
    Raises: UserError for a run with a margin in place of a temperature.
    """
    if column in row:
        return row[column]
    if "tau" not in row:
        raise UserError(f"{run}: its log has no temperature, which this figure compares")
    return row["tau"]


def draw_bars(panels, path):
    """Draws a bar for each run and label.

    Args:
        panels: {title: {run: {label: value}}}.
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


def draw_errors(results, path):
    """NCL, Fig. 2: normalisation errors of the test, as they are and with the queue's biases.

    Args:
        results: {run: {data set: test metrics}}.
    """
    panel = {}
    for run, sets in results.items():
        panel[run] = {}
        for name, metrics in sets.items():
            modes = metrics.get("normalize", {})
            for mode in ("none", "queue"):
                if mode not in modes:
                    continue
                for direction, error in modes[mode]["error"].items():
                    direction = direction.replace("_to_", " to ")
                    panel[run][f"{name}\n{direction}, {mode}"] = error
    return draw_bars({"normalisation error (Fig. 2)": panel}, path)


def draw_gap(results, path):
    """TeMo, Fig. 3: the modality gap, and the nearest neighbour's accuracy if a run has it.

    Args:
        results: as in draw_errors.
    """
    gap = {}
    knn = {}
    for run, sets in results.items():
        gap[run] = {}
        knn[run] = {}
        for name, metrics in sets.items():
            if "modality_gap" in metrics:
                gap[run][name] = metrics["modality_gap"]
            for k in (1, 10):
                accuracies = metrics.get(f"knn@{k}")
                if accuracies:
                    knn[run][f"{name}\nkNN@{k}"] = accuracies["mean_per_class"]
    panels = {"modality gap (Fig. 3)": gap}
    if any(knn.values()):
        panels["kNN, mean per class, % (Fig. 3)"] = knn
    return draw_bars(panels, path)


# ----------------------------------------------------- pieces of evaluations ---------------------
def first_pieces(pieces):
    """The pieces of the first run.

    Args:
        pieces: {run: pieces of its evaluation}, as base.py describes them.
    Raises: UserError if the runs did not evaluate the same captions.
    """
    first_run = next(iter(pieces))
    first = pieces[first_run]
    if first.texts is None:
        raise UserError(f"{first_run}: its evaluation has no captions, which this figure compares")
    for run, run_pieces in pieces.items():
        has_same_texts = run_pieces.texts == first.texts
        if not has_same_texts or not np.array_equal(run_pieces.index, first.index):
            raise UserError(f"{run}: its test captions are not those of {first_run}; compare runs "
                            "on the same data")
    return first


def draw_similarities(pieces, path):
    """TeMo, Figs. 4 and 5: densities of the cosines of positive and negative pairs."""
    name = first_pieces(pieces).data.name
    histograms = {}
    lines = []
    for run, run_pieces in pieces.items():
        histograms[run] = similarity_histograms(run_pieces)
        threshold = histograms[run]["threshold"]
        if threshold is not None:
            threshold = round(threshold, 3)
        lines.append(f"{run}: threshold {threshold}")
    base.draw_histograms(histograms, path, f"{name}: image-text cosines (Figs. 4, 5)")
    return lines


def draw_false_positives(pieces, path):
    """TeMo, Fig. 6: the five pairs whose cosine falls most from the first to the last run."""
    first = first_pieces(pieces)
    cosines = {}                                                           # {run: (C,)}
    for run, run_pieces in pieces.items():
        cosines[run] = base.cosines_of_pairs(run_pieces)
    runs = list(pieces)
    fall = cosines[runs[0]] - cosines[runs[-1]]                            # (C,)
    examples = []
    lines = []
    for row in fall.argsort(descending=True)[:5].tolist():
        text = first.texts[row]
        values = ", ".join(f"{run} {cosine[row]:.2f}" for run, cosine in cosines.items())
        pixels = base.picture_of(first, first.owner[row])
        examples.append(base.Example(pixels, values, base.wrap(text, 20)))
        lines.append(f"{values}: {text}")
    title = f"{first.data.name}: pairs whose cosine falls most (Fig. 6)"
    base.draw_examples([("", examples)], path, title, width=2.4, words=1.0)
    return lines


def draw_queries(pieces, path):
    """NCL, Fig. 6: the same queries in each run, and what each answer collects of all queries.

    Args:
        pieces: have bias, (M,) or 0.0, and gamma, too.
    """
    first = first_pieces(pieces)
    sims = {}                                                              # {run: (C, M)}
    gammas = {}
    for run, run_pieces in pieces.items():
        sims[run] = base.cosines(run_pieces) + run_pieces.bias
        gammas[run] = run_pieces.gamma
    totals = ncl.draw_queries(sims, gammas, first, path)
    lines = []
    for run, total in totals.items():
        fair = 100 * (abs(total - 1) < 0.5).float().mean()
        lines.append(f"{run}: {fair:.1f} % of the items collect 0.5 to 1.5")
    return lines


def draw_modalities(pieces, path):
    """NCL, Figs. 7 and 8: both modalities in the plane, and mean cosines in and between them."""
    first = first_pieces(pieces)
    stages = {}
    for run, run_pieces in pieces.items():
        stages[run] = ncl.first_captions(run_pieces)
    return ncl.draw_modalities(stages, base.kind_of(first), first.data.name, path)


def draw_tails(pieces, path):
    """TS, Figs. 3 and 5: a head and a tail class, and kNN@1 of each class, for each run.

    Args:
        pieces: have sizes, (classes,) training images of each class, too.
    Raises: UserError if the runs have other classes, or other numbers of images of a class.
    """
    first_run = next(iter(pieces))
    first = pieces[first_run]
    for run, run_pieces in pieces.items():
        has_same_names = run_pieces.label_names == first.label_names
        if not has_same_names or not np.array_equal(run_pieces.sizes, first.sizes):
            raise UserError(f"{run}: its classes, or their numbers of training images, are not "
                            f"those of {first_run}; compare runs on the same data")
    fig, axes = figure(len(pieces) + 1)
    *spaces, below = axes
    lines = []
    for ax, (run, run_pieces) in zip(spaces, pieces.items()):
        sizes = run_pieces.sizes
        accuracies = run_pieces.per_class                                  # {class: kNN@1}
        mean = np.mean(list(accuracies.values()))
        title = f"{run}: mean of classes {mean:.1f} %"
        draw_space(
            ax, run_pieces.train_features, run_pieces.train_labels,
            sizes=sizes,
            names=run_pieces.label_names,
            accuracies=accuracies,
            title=f"{title} (Fig. 3)")
        largest_first = np.argsort(-sizes, kind="stable")                  # (classes,)
        values = accuracies_of(largest_first, accuracies)
        below.plot(values, label=title, marker=".")
        numbers = " ".join(f"{value:.1f}" for value in values).replace("nan", "-")
        lines.append(f"{title}; by class, largest first: {numbers}")
    below.set_title("kNN@1 per class (Fig. 5)")
    below.set_xlabel("class, largest first")
    below.set_ylabel("test accuracy, %")
    legend_above(below)
    save_figure(fig, path)
    return lines
