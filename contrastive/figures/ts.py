"""Pictures of temperature_schedules.py: class sizes, temperature, the paper's Figures 1 to 5.

sizes: (classes,) training images of each class.
"""

from contrastive.core.metrics import normalize
from contrastive.figures.base import (
    batch_panels, draw_training_curves, figure, legend_above, save_figure, whole_ticks)

import numpy as np
import torch

MAX_NAMES = 20  # classes at most whose names stand below a panel


def draw(run, sizes, taus, project):
    """The pictures of a run: curves, class sizes, and the paper's Figures 1 to 5.

    Args:
        taus: temperature of each epoch.
        project: the script's function, features (M, width) -> z (M, D).
    """
    knn = f"eval/{run.args.dataset}/knn@1"
    args = run.args
    title = "loss"
    if args.learnable_tau or (args.schedule != "fixed" and not args.tau_head):
        title = "loss, which moves with its temperature"
    panels = [
        (title, "loss", {"L_c": "loss"}),
        ("kNN@1, val", "%", {"top-1": f"{knn}/top1", "tail": f"{knn}/tail"}),
        ("temperature", "tau", {"tau": "tau"}),
        *batch_panels("view 1", "view 2")]
    draw_training_curves(run, panels)
    draw_classes(run, sizes, run.folder / "classes.png")
    if run.args.dataset in run.test_pieces:
        draw_figures(run, sizes, taus, project, run.folder / "figures.png")


def draw_classes(run, sizes, path):
    """Draws the class sizes, and beside them the temperature and the coverage of the sphere."""
    fig, (left, right) = figure(2)
    largest_first = np.argsort(-sizes, kind="stable")                      # (classes,)
    left.bar(range(len(sizes)), sizes[largest_first], width=1.0)
    left.set(
        title="training images of each class",
        ylabel="images")
    name_classes(left, largest_first, run.train.label_names)
    coverage_axis = right.twinx()
    draw_column(right, run, "tau", "tab:orange", "mean tau of the batch")
    draw_column(coverage_axis, run, "coverage", "o-", "effective part of 500 directions")
    right.set(title="temperature and coverage of the sphere", xlabel="epoch")
    right.set_ylim(bottom=0)
    whole_ticks(right)
    save_figure(fig, path)


def draw_column(ax, run, name, style, label):
    """Draws a column of the log over epochs; the label of its axis has its colour."""
    steps, values = run.log.column(name)
    epochs = np.array(steps) / run.steps.per_epoch
    line, = ax.plot(epochs, values, style, ms=3)
    ax.set_ylabel(label, color=line.get_color())


def draw_figures(run, sizes, taus, project, path):
    """Figures 1 to 5 of the paper; arguments as in draw."""
    pieces = run.test_pieces[run.args.dataset]
    rows = np.random.default_rng(0).permutation(len(pieces.train_labels))[:4000]
    features = pieces.train_features[rows]                              # (M, width)
    accuracies = pieces.per_class                                       # {class: kNN@1}
    mean = np.mean(list(accuracies.values()))
    mean = f"mean of all classes {mean:.1f} %"
    fig, axes = figure(7, columns=2)
    draw_coverage(axes[0], run)
    z = project(features)                                                  # (M, D)
    draw_shares(axes[1:4], normalize(z).cpu(), run.args)
    draw_space(
        axes[4], features, pieces.train_labels[rows],
        sizes=sizes,
        names=pieces.label_names,
        accuracies=accuracies,
        title=f"PCA, a head and a tail class (Fig. 3)\nkNN@1, {mean}")
    draw_phase(axes[5], run, taus)
    draw_accuracies(axes[6], sizes, pieces.label_names, accuracies, mean)
    save_figure(fig, path)


def draw_accuracies(ax, sizes, names, accuracies, mean):
    """Fig. 5: kNN@1 of each class. mean: words on all of them."""
    order = np.argsort(-sizes, kind="stable")                              # largest first
    heights = accuracies_of(order, accuracies)
    ax.bar(range(len(order)), heights, width=1.0)
    ax.set(
        title=f"kNN@1 per class, {mean} (Fig. 5)",
        ylabel="test accuracy, %")
    name_classes(ax, order, names)


def accuracies_of(labels, accuracies):
    """The accuracy of each of these classes, a list; nan, which is not drawn, of a class without a
    test image.

    Args: accuracies: {class: percent}.
    """
    return [accuracies.get(int(label), np.nan) for label in labels]


def name_classes(ax, order, names):
    """Names the bars of classes in this order; of many classes the first and the last."""
    if len(order) <= MAX_NAMES:
        ax.set_xlabel("class, largest first")
        ax.set_xticks(range(len(order)), [names[label] for label in order], rotation=90)
    else:
        first, last = names[order[0]], names[order[-1]]
        ax.set_xlabel(f"{len(order)} classes, from {first} (largest) to {last}")


def draw_coverage(ax, run):
    """Fig. 1: how many training images are nearest to each of 500 directions, along the run."""
    for row in run.log.rows:
        if "sphere" in row:
            ax.plot(row["sphere"], "-", color=shade(row["step"], run))
    ax.set(
        title="coverage of the sphere (Fig. 1)",
        xlabel="of 500 directions, fullest first; light = early",
        ylabel="images nearest to it",
        yscale="log")
    ax.yaxis.set(major_formatter="{x:g}", minor_formatter="")


def shade(step, run):
    """A grey for a step: light = early, black = the end."""
    return str(0.85 * (1 - step / run.step))


def draw_shares(axes, unit, args):
    """Fig. 2: by cosine, the weight of one negative in the loss, their number, the total weight.

    Args: axes: three. unit: (M, D) normalised z, M > 1.
    """
    single, histogram, together = axes
    not_itself = ~torch.eye(len(unit), dtype=torch.bool)
    cosines = (unit @ unit.T)[not_itself].numpy()                          # (M * (M - 1),)
    edges = np.linspace(-1, 1, 101)                                        # (101,)
    counts, _ = np.histogram(cosines, edges)                               # (100,)
    middles = (edges[1:] + edges[:-1]) / 2                                 # (100,)
    taus = {args.tau_head, args.tau_tail} - {0}
    if not taus and args.schedule == "fixed":
        taus = {args.tau_min}                                              # the first, if learnt
    elif not taus:
        taus = {args.tau_min, (args.tau_min + args.tau_max) / 2, args.tau_max}
    for tau in sorted(taus):
        label = f"tau {tau:g}"
        share = np.exp((middles - 1) / tau)                                # (100,) not yet scaled
        total = share * counts                                             # (100,)
        single.plot(middles, share / share.max(), label=label)
        together.plot(middles, total / max(total.max(), 1e-30), label=label)
    histogram.fill_between(middles, counts / counts.max(), color="tab:grey", step="mid")
    single.set_title("share of one negative (Fig. 2a)")
    histogram.set_title("negatives (Fig. 2b)")
    together.set_title("share of all negatives (Fig. 2c)")
    for ax in axes:
        ax.set(
            xlabel="cosine of z to the anchor",
            ylabel="maximum 1",
            xticks=(-1, -0.5, 0, 0.5, 1))
    legend_above(single)
    legend_above(together)


def draw_space(place, features, labels, *, sizes, names, accuracies, title):
    """Fig. 3: the largest and the smallest class among features by PCA, in the place of these axes.

    Args:
        features, labels: (M, width), (M,).
        names, accuracies: of the classes; {class: kNN@1 in percent}.
    """
    from sklearn.decomposition import PCA

    largest_first = np.argsort(-sizes, kind="stable")                      # (classes,)
    present = largest_first[np.isin(largest_first, labels)]
    space = PCA(3).fit_transform(normalize(features))                      # (M, 3)
    solid = place.figure.add_subplot(place.get_subplotspec(), projection="3d")
    place.remove()
    solid.scatter(*space.T, s=4, color="lightgrey", alpha=0.3)
    head_and_tail = (("head", present[0], "tab:red"), ("tail", present[-1], "tab:blue"))
    for name, label, colour in head_and_tail:
        points = space[labels == label]                                    # (m, 3)
        legend = f"{name}: {names[label]} ({sizes[label]}), "
        if int(label) in accuracies:
            legend += f"kNN@1 {accuracies[int(label)]:.0f} %"
        else:
            legend += "no test image"
        solid.scatter(*points.T, s=14, color=colour, label=legend)
    # the legend is wider than the axes
    solid.legend(loc="upper center", bbox_to_anchor=(0.5, 0.1)).set_in_layout(False)
    solid.set(title=title, xticklabels=(), yticklabels=(), zticklabels=())


def draw_phase(ax, run, taus):
    """Fig. 4: the few-shot probe on val over the phase of the period, with the temperature."""
    args = run.args
    steps, values = run.log.column(f"eval/{args.dataset}/few-shot/top1")
    steps = steps[1:]                                                      # after step 0
    epochs = np.array(steps) / run.steps.per_epoch
    phases = 1 - (-epochs % args.period) / args.period     # a period ends at 1, not at 0
    ax.scatter(phases, values[1:], s=20, color=[shade(step, run) for step in steps])
    ax.set(
        title="few-shot probe over the period (Fig. 4)",
        xlabel="phase of the period; light = early",
        ylabel="val top-1, %",
        xlim=(-0.05, 1.05))
    has_wave = not args.tau_head and args.schedule not in ("random", "fixed")
    if has_wave and steps:
        tau_axis = ax.twinx()
        epoch_phases = np.arange(len(taus)) % args.period / args.period    # tau is one in an epoch
        tau_axis.plot(epoch_phases, taus, ".", ms=3, color="tab:orange")
        tau_axis.set_ylabel("tau", color="tab:orange")


FIGURES = {}  # of several runs
