"""Figures of the papers that compare runs: TS's 3 and 5, TeMo's 2 to 6, NCL's 2, 6, 7, 8.

The first argument of a function is {name of a run: its log, results or pieces}, in the order of the
command line. Each draws a picture and returns its numbers as lines of text.
"""

from contrastive.core.processes import UserError
from contrastive.core.metrics import normalize
from contrastive.figures import base, ncl
from contrastive.figures.base import figure, legend_above, save_figure, whole_ticks
from contrastive.figures.ts import draw_space

import numpy as np


# ----------------------------------------------------- logs and results --------------------------
def draw_temperatures(logs, path):
    """TeMo, Fig. 2: the mean temperature of positive and of negative pairs along training.

    Args:
        logs: {run: rows of its log}.
    """
    fig, axes = figure(2)
    lines = []
    panels = (("tau_pos", "positive pairs (Fig. 2)"), ("tau_neg", "negative pairs (Fig. 2)"))
    for ax, (column, title) in zip(axes, panels):
        for run, rows in logs.items():
            rows = [row for row in rows if "loss" in row]
            steps = [row["step"] for row in rows]
            values = [row.get(column, row["tau"]) for row in rows]
            ax.plot(steps, values, label=run)
            lines.append(f"{title}, {run}: {values[0]:.4f} first, {values[-1]:.4f} last")
        ax.set(title=title, xlabel="step", ylabel="mean temperature of the batch")
        whole_ticks(ax)
        legend_above(ax)
    save_figure(fig, path)
    return lines


def draw_bars(panels, path):
    """Draws a bar for each run and label.

    Args:
        panels: {title: {run: {label: value}}}.
    """
    labels_of = {}
    for title, runs in panels.items():
        labels = dict.fromkeys(label for values in runs.values() for label in values)
        if not labels:
            raise UserError(f"{title}: no run has these results; give runs that were evaluated so")
        labels_of[title] = list(labels)
    most_labels = max(len(labels) for labels in labels_of.values())
    fig, axes = figure(len(panels), width=max(5, 1.4 * most_labels))  # for the labels' words
    lines = []
    for ax, (title, runs) in zip(axes, panels.items()):
        labels = labels_of[title]
        width = 0.8 / len(runs)
        for k, (run, values) in enumerate(runs.items()):
            x = np.arange(len(labels)) + width * (k + 0.5) - 0.4
            heights = [values.get(label, np.nan) for label in labels]
            ax.bar(x, heights, width, label=run)
            for label, value in values.items():
                lines.append(f"{title}, {' '.join(label.split())}, {run}: {value:.3f}")
        ax.set(title=title)
        ax.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels])
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
            for mode, result in metrics.get("normalize", {}).items():
                if mode not in ("none", "queue"):
                    continue
                for direction, error in result["error"].items():
                    label = f"{name}\n{direction.replace('_to_', ' to ')}, {mode}"
                    panel[run][label] = error
    return draw_bars({"normalisation error (Fig. 2)": panel}, path)


def draw_gap(results, path):
    """TeMo, Fig. 3: the modality gap, and the nearest neighbour's accuracy if a run has it.

    Args:
        results: as in draw_errors.
    """
    gap, knn = {}, {}
    for run, sets in results.items():
        gap[run], knn[run] = {}, {}
        for name, metrics in sets.items():
            if "modality_gap" in metrics:
                gap[run][name] = metrics["modality_gap"]
            for k in (1, 10):
                if f"knn@{k}" in metrics:
                    knn[run][f"{name}\nkNN@{k}"] = metrics[f"knn@{k}"]["mean_per_class"]
    panels = {"modality gap (Fig. 3)": gap}
    if any(knn.values()):
        panels["mean per class, % (Fig. 3)"] = knn
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
    for run, of_run in pieces.items():
        same_texts = of_run.texts == first.texts
        if not same_texts or of_run.index.tolist() != first.index.tolist():
            raise UserError(f"{run}: its test captions are not those of {first_run}; compare runs "
                            "on the same data")
    return first


def draw_similarities(pieces, path):
    """TeMo, Figs. 4 and 5: densities of the cosines of positive and negative pairs."""
    histograms = {}
    for run, of_run in pieces.items():
        histograms[run] = base.similarity_histograms(of_run)
    name = first_pieces(pieces).data.name
    base.draw_histograms(histograms, path, f"{name}: image-text cosines (Figs. 4, 5)")
    lines = []
    for run, histogram in histograms.items():
        threshold = histogram["threshold"]
        if threshold is not None:
            threshold = round(threshold, 3)
        lines.append(f"{run}: threshold {threshold}")
    return lines


def draw_false_positives(pieces, path, num_pairs=5):
    """TeMo, Fig. 6: the pairs whose cosine falls most from the first to the last run."""
    first = first_pieces(pieces)
    cosines = {}                                                           # {run: (C,)}
    for run, of_run in pieces.items():
        image = normalize(of_run.image[of_run.owner])                # (C, D)
        cosines[run] = (normalize(of_run.text) * image).sum(1)
    runs = list(cosines)
    fall = cosines[runs[0]] - cosines[runs[-1]]                            # (C,)
    cells, lines = [], []
    for row in fall.argsort(descending=True)[:num_pairs].tolist():
        text = first.texts[row]
        values = ", ".join(f"{run} {cosine[row]:.2f}" for run, cosine in cosines.items())
        picture = base.picture(first.data, int(first.index[first.owner[row]]))
        cells.append((picture, values, base.wrap(text, 20), False))
        lines.append(f"{values}: {text}")
    title = f"{first.data.name}: pairs whose cosine falls most (Fig. 6)"
    base.draw_examples([("", cells)], path, title, width=2.4, words=1.0)
    return lines


def draw_queries(pieces, path):
    """NCL, Fig. 6: the same queries in each run, and what each answer collects of all queries.

    Args:
        pieces: have bias, (M,) or 0.0, and gamma, too.
    """
    first = first_pieces(pieces)
    sims, gammas = {}, {}                                                  # {run: (C, M)}
    for run, of_run in pieces.items():
        cosine = normalize(of_run.text) @ normalize(of_run.image).T  # (C, M)
        sims[run] = cosine + of_run.bias
        gammas[run] = of_run.gamma
    lines = []
    for run, total in ncl.draw_queries(sims, gammas, first, path).items():
        fair = 100 * (abs(total - 1) < 0.5).float().mean()
        lines.append(f"{run}: {fair:.1f} % of the items collect 0.5 to 1.5")
    return lines


def draw_modalities(pieces, path):
    """NCL, Figs. 7 and 8: both modalities in the plane, and mean cosines in and between them."""
    first = first_pieces(pieces)
    stages = {run: ncl.first_captions(of_run) for run, of_run in pieces.items()}
    return ncl.draw_modalities(stages, base.kind_of(first), first.data.name, path)


def draw_tails(pieces, path):
    """TS, Figs. 3 and 5: a head and a tail class, and kNN@1 of each class, for each run.

    Args:
        pieces: have sizes, (classes,) training images of each class, too.
    """
    fig, axes = figure(len(pieces) + 1)
    *spaces, below = axes
    lines = []
    for (run, of_run), ax in zip(pieces.items(), spaces):
        sizes, per_class = of_run.sizes, of_run.per_class
        mean = np.mean(list(per_class.values()))
        title = f"{run}: mean of classes {mean:.1f} %"
        draw_space(ax, of_run.train_features, of_run.train_labels, sizes=sizes,
                   names=of_run.class_names, accuracies=per_class, title=f"{title} (Fig. 3)")
        largest_first = np.argsort(-sizes, kind="stable")                  # (classes,)
        values = [per_class.get(int(c), 0) for c in largest_first]
        below.plot(values, label=title, marker=".")
        numbers = " ".join(f"{value:.1f}" for value in values)
        lines.append(f"{title}; by class, largest first: {numbers}")
    below.set(title="kNN@1 per class (Fig. 5)", xlabel="class, largest first",
              ylabel="test accuracy, %")
    legend_above(below)
    save_figure(fig, path)
    return lines
