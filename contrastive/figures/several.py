"""Figures of the papers that compare runs: TS's 3 and 5, TeMo's 2 to 6, NCL's 2, 6, 7, 8.

of: {name of a run: its rows, results or pieces}, in the order of the command line.   Returns: numbers as lines.
"""

from contrastive.engine.processes import UserError
from contrastive.evaluation.metrics import normalize
from contrastive.figures import base, ncl
from contrastive.figures.base import figure, legend_above, save_figure, whole_ticks
from contrastive.figures.ts import draw_space

import numpy as np


def draw_temperatures(of, path):
    """TeMo, Fig. 2: the mean temperature of positive and of negative pairs along training. of: rows of the logs."""
    fig, axes = figure(2)
    said = []
    for ax, key, title in zip(axes, ("tau_pos", "tau_neg"), ("positive pairs (Fig. 2)", "negative pairs (Fig. 2)")):
        for run, rows in of.items():
            found = [(row["step"], row[key] if key in row else row["tau"]) for row in rows if "loss" in row]
            ax.plot(*zip(*found), label=run)
            said.append(f"{title}, {run}: {found[0][1]:.4f} first, {found[-1][1]:.4f} last")
        ax.set(title=title, xlabel="step", ylabel="mean temperature of the batch")
        whole_ticks(ax)
        legend_above(ax)
    save_figure(fig, path)
    return said


def labelled(sets, read):
    """{name of a set and label, a line each: value} of a run."""
    return {f"{name}\n{k}".strip(): v for name, metrics in sets.items() for k, v in read(metrics).items()}


def draw_bars(of, panels, path):
    """A bar for each run. of: {run: {set: test metrics}}; panels: {title: function(metrics) -> {label: value}}."""
    tables = [{run: labelled(sets, read) for run, sets in of.items()} for read in panels.values()]
    labels_of = [list(dict.fromkeys(label for values in found.values() for label in values)) for found in tables]
    fig, axes = figure(len(panels), width=max(5, 1.4 * max(map(len, labels_of))))        # room for the labels' words
    said = []
    for ax, title, found, labels in zip(axes, panels, tables, labels_of):
        if not labels:
            raise UserError(f"{title}: no run has these results")
        for k, (run, values) in enumerate(found.items()):
            at = np.arange(len(labels)) + 0.8 * ((k + 0.5) / len(of) - 0.5)
            ax.bar(at, [values.get(label, np.nan) for label in labels], 0.8 / len(of), label=run)
            said += [f"{title}, {' '.join(label.split())}, {run}: {v:.3f}" for label, v in values.items()]
        ax.set(title=title)
        ax.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels])
        legend_above(ax)
    save_figure(fig, path)
    return said


def draw_errors(of, path):
    """NCL, Fig. 2: normalisation errors of the test, as they are and with the queue's biases."""
    def read(metrics):
        modes = metrics.get("normalize", {}).items()
        return {f"{way.replace('_to_', ' to ')}, {mode}": error for mode, result in modes if mode in ("none", "queue")
                for way, error in result["error"].items()}
    return draw_bars(of, {"normalisation error (Fig. 2)": read}, path)


def draw_gap(of, path):
    """TeMo, Fig. 3: the modality gap, and the nearest neighbour's accuracy."""
    def knn(metrics):
        return {f"kNN@{k}": metrics[f"knn@{k}"]["mean_per_class"] for k in (1, 10) if f"knn@{k}" in metrics}
    panels = {"modality gap (Fig. 3)": lambda m: {"": m["modality_gap"]} if "modality_gap" in m else {}}
    return draw_bars(of, panels | ({"mean per class, % (Fig. 3)": knn} if any(
        map(knn, (m for sets in of.values() for m in sets.values()))) else {}), path)


# ---- of the pieces of an evaluation ----
def same_queries(of):
    """The pieces of the first run. Raises: UserError if the runs did not evaluate the same captions."""
    first = next(iter(of.values()))
    for run, pieces in of.items():
        if pieces["texts"] != first["texts"] or pieces["index"].tolist() != first["index"].tolist():
            raise UserError(f"{run}: its test captions are not those of {next(iter(of))}")
    return first


def draw_similarities(of, path):
    """TeMo, Figs. 4 and 5: densities of the cosines of positive and negative pairs."""
    found = {run: base.similarity_histograms(pieces) for run, pieces in of.items()}
    base.draw_histograms(found, path, f"{same_queries(of)['data'].name}: image-text cosines (Figs. 4, 5)")
    return [f"{run}: threshold {h['threshold'] if h['threshold'] is None else round(h['threshold'], 3)}"
            for run, h in found.items()]


def draw_false_positives(of, path, n=5):
    """TeMo, Fig. 6: the pairs of the data whose cosine falls most from the first run to the last."""
    first, cosines = same_queries(of), {}
    for run, p in of.items():
        cosines[run] = (normalize(p["text"]) * normalize(p["image"][p["owner"]])).sum(1)                    # (C,)
    before, *_, after = cosines.values()
    worst, data = (before - after).argsort(descending=True)[:n].tolist(), first["data"]
    said = {row: ", ".join(f"{run} {cos[row]:.2f}" for run, cos in cosines.items()) for row in worst}
    table = [("", [(base.picture(data, int(first["index"][first["owner"][row]])), said[row],
                    base.wrap(first["texts"][row], 20), False) for row in worst])]
    base.draw_examples(table, path, f"{data.name}: pairs whose cosine falls most (Fig. 6)", width=2.4, words=1.0)
    return [f"{said[row]}: {first['texts'][row]}" for row in worst]


def draw_queries(of, path):
    """NCL, Fig. 6: the same queries in each run, and what each answer collects of all queries. The pieces have bias
    (M,) or 0.0, and gamma."""
    first = same_queries(of)
    sims = {run: normalize(p["text"]) @ normalize(p["image"]).T + p["bias"] for run, p in of.items()}      # (C, M)
    sums = ncl.draw_queries(sims, {run: p["gamma"] for run, p in of.items()}, first, path)
    return [f"{run}: {100 * (abs(total - 1) < 0.5).float().mean():.1f} % of the items collect 0.5 to 1.5"
            for run, total in sums.items()]


def draw_modalities(of, path):
    """NCL, Figs. 7 and 8: both modalities in the plane, and mean cosines within and between them."""
    pieces = same_queries(of)
    return ncl.draw_modalities({run: ncl.first_captions(p) for run, p in of.items()}, base.kind_of(pieces),
                               pieces["data"].name, path)


def draw_tails(of, path):
    """TS, Figs. 3 and 5: a head and a tail class, and kNN@1 of each class, for several temperatures. The pieces have
    sizes (classes,)."""
    fig, axes = figure(len(of) + 1)
    said = []
    for (run, p), place in zip(of.items(), axes):
        order, known = np.argsort(-p["sizes"], kind="stable"), p["per_class"]            # classes, largest first
        title = f"{run}: mean of classes {np.mean(list(known.values())):.1f} %"
        draw_space(place, p["train_features"], p["train_labels"], p["sizes"], p["names"], known, f"{title} (Fig. 3)")
        values = [known.get(int(c), 0) for c in order]
        axes[-1].plot(values, label=title, marker=".")
        said.append(f"{title}; by class, largest first: {' '.join(f'{v:.1f}' for v in values)}")
    axes[-1].set(title="kNN@1 per class (Fig. 5)", xlabel="class, largest first", ylabel="test accuracy, %")
    legend_above(axes[-1])
    save_figure(fig, path)
    return said
