"""Figures of TS: of a run, curves, class sizes and the paper's Figures 1 to 5; of several runs,
Figures 3 to 5.

Figures of classes read train_features, class_sizes and class_accuracy of the test split; Figures 1
and 2 read the columns sphere and cosines of the evaluations on val in the log.
"""

from contrastive.core.metrics import normalize
from contrastive.core.processes import UserError
from contrastive.figures.base import (
    FinishedRun, batch_panels, draw_training_curves, figure, legend_above, marker_of, read_runs,
    require_same_flags, save_figure, whole_ticks)

import numpy as np
import torch

MAX_NAMES = 20  # classes at most whose names stand below a panel
MAX_POINTS = 4000  # training images in Fig. 3
# flags in which the runs of Fig. 4 may differ, beside those that change nothing that is learnt
PHASE_FLAGS = {
    "period", "epochs", "max_steps", "warmup_fraction", "stop_at_phase", "eval_epoch", "seed",
    "split_seed"}


# ======================================================= one run ==================================
def draw(folder):
    """Draws the figures of a run into its folder."""
    run = FinishedRun(folder)
    draw_curves(run)
    pieces = run.test.get(run.args.dataset)
    if pieces is None or pieces.class_sizes is None:
        return  # its images have not been evaluated by class
    draw_classes(run, pieces)
    if pieces.class_accuracy is not None:
        draw_figures(run, pieces)


def draw_curves(run):
    """Draws curves.png."""
    args = run.args
    knn = f"eval/{args.dataset}/knn@1"
    title = "loss"
    if temperature_moves(args):
        title = "loss, which moves with its temperature"
    panels = [
        (title, "loss", {"L_c": "loss"}),
        ("kNN@1, val", "%", {"top-1": f"{knn}/top1", "tail": f"{knn}/tail"}),
        ("temperature", "tau", {"tau": "tau"}),
        *batch_panels("view1", "view2")]
    draw_training_curves(run, panels)


def schedule_of(args):
    """The schedule of a run's temperature; a variant without schedules has a fixed one."""
    return getattr(args, "schedule", "fixed")


def temperature_moves(args):
    """Whether the temperature of a run changes over its steps."""
    return schedule_of(args) not in ("fixed", "coarse") or getattr(args, "learnable_tau", False)


def draw_classes(run, pieces):
    """Draws classes.png: class sizes, and beside them the temperature and the coverage."""
    fig, (left, right) = figure(2)
    sizes = pieces.class_sizes.numpy()                                     # (classes,)
    order = largest_first(sizes)
    left.bar(range(len(sizes)), sizes[order], width=1.0)
    left.set_title("training images of each class")
    left.set_ylabel("images")
    name_classes(left, order, pieces.label_names)
    coverage_axis = right.twinx()
    draw_column(right, run, "tau", "tab:orange", "mean tau of the batch")
    draw_column(coverage_axis, run, "coverage", "tab:blue", "effective part of 500 directions")
    right.set_title("temperature and coverage of the sphere")
    right.set_xlabel("epoch")
    _, top = right.get_ylim()
    right.set_ylim(0, 1.2 * top)  # the end of the coverage would hide a highest temperature
    whole_ticks(right)
    save_figure(fig, run.folder / "classes.png")


def draw_column(ax, run, name, colour, label):
    """Draws a column of the log over epochs; the label of its axis has its colour."""
    steps, values = run.column(name)
    ax.plot(epochs_of(run, steps), values, color=colour, marker=marker_of(steps))
    ax.set_ylabel(label, color=colour)


def epochs_of(run, steps):
    """The epochs at these steps of a run: (n,)."""
    return np.array(steps) * run.summary["epochs"] / run.summary["steps"]


def draw_figures(run, pieces):
    """Draws figures.png: Figures 1 to 5 of the paper."""
    fig, axes = figure(7, columns=2)
    draw_coverage(axes[0], run)
    draw_weights(axes[1:4], run)
    mean = f"mean of all classes {mean_accuracy(pieces):.1f} %"
    draw_space(axes[4], pieces, title=f"PCA, a head and a tail class (Fig. 3)\nkNN@1, {mean}")
    draw_accuracies(axes[5], pieces, mean)
    if hasattr(run.args, "period"):  # a variant without schedules has none
        draw_phase(axes[6], run)
    save_figure(fig, run.folder / "figures.png")


def largest_first(sizes):
    """The classes in the order of their sizes: (classes,)."""
    return np.argsort(-sizes, kind="stable")


def mean_accuracy(pieces):
    """kNN@1 in percent, the mean over classes with a test image."""
    return pieces.class_accuracy.nanmean().item()


def draw_accuracies(ax, pieces, mean):
    """Fig. 5: kNN@1 of each class. mean: words on all of them."""
    order = largest_first(pieces.class_sizes.numpy())
    ax.bar(range(len(order)), pieces.class_accuracy.numpy()[order], width=1.0)
    ax.set_title(f"kNN@1 per class, {mean} (Fig. 5)")
    ax.set_ylabel("test accuracy, %")
    name_classes(ax, order, pieces.label_names)


def name_classes(ax, order, names):
    """Names the bars of classes in this order; of many classes the first and the last."""
    names = names or [str(label) for label in range(len(order))]
    if len(order) <= MAX_NAMES:
        ax.set_xlabel("class, largest first")
        ax.set_xticks(range(len(order)), [names[label] for label in order], rotation=90)
    else:
        first, last = names[order[0]], names[order[-1]]
        ax.set_xlabel(f"{len(order)} classes, from {first} (largest) to {last}")


def draw_coverage(ax, run):
    """Fig. 1: how many training images are nearest to each of 500 directions, along the run."""
    for step, images in zip(*run.column("sphere")):
        ax.plot(images, "-", color=shade(step, run))
    ax.set_title("coverage of the sphere (Fig. 1)")
    ax.set_xlabel("of 500 directions, fullest first; light = early")
    ax.set_ylabel("images nearest to it")
    ax.set_yscale("log")
    ax.yaxis.set(major_formatter="{x:g}", minor_formatter="")


def shade(step, run):
    """A grey for a step: light = early, black = the end."""
    return str(0.85 * (1 - step / run.summary["steps"]))


def draw_weights(axes, run):
    """Fig. 2: by cosine, the weight of one negative in the loss, their number, the total weight.

    Of the evaluation whose weights are tested. axes: three.
    """
    single, histogram, together = axes
    by_step = dict(zip(*run.column("cosines")))
    counts = np.array(by_step[run.summary["tested_step"]])                 # (bins,)
    edges = np.linspace(-1, 1, len(counts) + 1)                            # (bins + 1,)
    middles = (edges[1:] + edges[:-1]) / 2                                 # (bins,)
    for tau in temperatures_of(run.args):
        label = f"tau {tau:g}"
        weight = np.exp((middles - 1) / tau)                               # (bins,) not yet scaled
        total = weight * counts                                            # (bins,)
        single.plot(middles, weight / weight.max(), label=label)
        together.plot(middles, total / max(total.max(), 1e-30), label=label)
    histogram.fill_between(middles, counts / counts.max(), color="tab:grey", step="mid")
    single.set_title("weight of one negative (Fig. 2a)")
    histogram.set_title("negatives (Fig. 2b)")
    together.set_title("weight of all negatives (Fig. 2c)")
    for ax in axes:
        ax.set_xlabel("cosine of z to the anchor")
        ax.set_ylabel("maximum 1")
        ax.set_xticks((-1, -0.5, 0, 0.5, 1))
    legend_above(single)
    legend_above(together)


def temperatures_of(args):
    """The temperatures of a run that Fig. 2 shows, lowest first; of a learnt one the first."""
    schedule = schedule_of(args)
    if schedule == "coarse":
        return [args.tau_min, args.tau_max]
    if schedule == "fixed":
        return [args.tau]
    return [args.tau_min, (args.tau_min + args.tau_max) / 2, args.tau_max]


def draw_space(place, pieces, title):
    """Fig. 3: the largest and the smallest class among training features by PCA, in the place of
    these axes."""
    from sklearn.decomposition import PCA

    features = normalize(pieces.train_features[:MAX_POINTS])               # (M, width)
    labels = pieces.train_labels[:MAX_POINTS].numpy()                      # (M,)
    sizes = pieces.class_sizes.numpy()                                     # (classes,)
    order = largest_first(sizes)
    present = order[np.isin(order, labels)]
    space = PCA(3).fit_transform(features)                                 # (M, 3)
    solid = place.figure.add_subplot(place.get_subplotspec(), projection="3d")
    place.remove()
    solid.scatter(*space.T, s=4, color="lightgrey", alpha=0.3)
    head_and_tail = (("head", present[0], "tab:red"), ("tail", present[-1], "tab:blue"))
    for name, label, colour in head_and_tail:
        points = space[labels == label]                                    # (m, 3)
        accuracy = pieces.class_accuracy[label].item()
        legend = f"{name}: {pieces.label_names[label]} ({sizes[label]}), kNN@1 {accuracy:.0f} %"
        if np.isnan(accuracy):
            legend = f"{name}: {pieces.label_names[label]} ({sizes[label]}), no test image"
        solid.scatter(*points.T, s=14, color=colour, label=legend)
    # the legend is wider than the axes
    solid.legend(loc="upper center", bbox_to_anchor=(0.5, 0.1)).set_in_layout(False)
    solid.set(title=title, xticklabels=(), yticklabels=(), zticklabels=())


def draw_phase(ax, run):
    """Fig. 4: the few-shot probe on val over the phase of the period, with the temperature."""
    args = run.args
    period = args.period
    steps, values = run.column(f"eval/{args.dataset}/few-shot/top1")
    steps = steps[1:]                                                      # after step 0
    phases = 1 - (-epochs_of(run, steps) % period) / period  # a period ends at 1, not at 0
    ax.scatter(phases, values[1:], s=20, color=[shade(step, run) for step in steps])
    ax.set_title("few-shot probe over the period (Fig. 4)")
    ax.set_xlabel("phase of the period; light = early")
    ax.set_ylabel("val top-1, %")
    ax.set_xlim(-0.05, 1.05)
    if schedule_of(args) in ("cos", "step", "oscillating"):
        tau_axis = ax.twinx()
        epochs, taus = run.column("tau", x="epoch")
        tau_axis.plot(np.array(epochs) % period / period, taus, ".", ms=3, color="tab:orange")
        tau_axis.set_ylabel("tau", color="tab:orange")


# ======================================================= several runs =============================
def draw_phases(folders, path):
    """Fig. 4: mean and deviation over runs of the few-shot probe on val in the last full period.

    The runs, of temperature_schedules.py with --eval-every > 0, differ only in seeds and periods
    (paper: T = 200, 400, 1000, 2000). --stop-at-phase should stop where the mean is highest.
    """
    runs = read_runs(folders)
    require_same_flags(runs, PHASE_FLAGS, "period and seed")
    grid = np.linspace(0, 1, 41)                                           # phases
    values = []
    for run in runs.values():
        values.append(np.interp(grid, *last_period(run), left=np.nan, right=np.nan))
    values = np.stack(values)                                              # (runs, 41)
    # where a run has no value, single runs would decide
    in_all_runs = ~np.isnan(values).any(0)
    phases, values = grid[in_all_runs], values[:, in_all_runs]
    mean, deviation = values.mean(0), values.std(0)

    fig, (ax,) = figure(1)
    ax.fill_between(phases, mean - deviation, mean + deviation, color="tab:blue", alpha=0.25)
    ax.plot(phases, mean, color="tab:blue")
    ax.set_title(f"last period of {len(values)} runs (Fig. 4)")
    ax.set_xlabel("phase of the period")
    ax.set_ylabel("val few-shot/top1, %")
    if schedule_of(next(iter(runs.values())).args) == "cos":
        right_ax = ax.twinx()
        right_ax.plot(grid, (1 + np.cos(2 * np.pi * grid)) / 2, color="tab:orange")
        right_ax.set_ylabel("tau of the cosine, relative", color="tab:orange")
    save_figure(fig, path)

    lines = [" phase     mean      std"]
    for row in zip(phases, mean, deviation):
        lines.append("{:6.3f} {:8.2f} {:8.2f}".format(*row))
    lines.append(f"best at phase {phases[mean.argmax()]:.3f}")
    return lines


def last_period(run):
    """A run's last full period, which ends at phase 1: phases (n,), few-shot accuracies (n,)."""
    period = run.args.period
    steps, values = run.column(f"eval/{run.args.dataset}/few-shot/top1")
    end = int(run.summary["epochs"] / period + 1e-6) * period              # epoch
    phases = 1 - (end - epochs_of(run, steps)) / period                    # (n,)
    is_last = (phases >= -1e-6) & (phases <= 1 + 1e-6) & (np.array(steps) > 0)
    if not end or is_last.sum() < 2:
        raise UserError(f"{run.folder}: {is_last.sum()} evaluations on val in its last full period "
                        f"of {period:g} epochs; at least two are needed (--eval-every)")
    return phases[is_last].clip(0, 1), np.array(values)[is_last]


def draw_tails(folders, path):
    """Figs. 3 and 5: a head and a tail class, and kNN@1 of each class, for each run."""
    pieces = {}  # {run: SavedPieces}
    for name, run in read_runs(folders).items():
        pieces[name] = run.test.get(run.args.dataset)
        if pieces[name] is None or pieces[name].class_accuracy is None:
            raise UserError(f"{name}: has no accuracies by class on a test split; give runs of "
                            "temperature_schedules.py that have ended")
    check_classes(pieces)
    fig, axes = figure(len(pieces) + 1)
    *spaces, below = axes
    lines = []
    for ax, (run, run_pieces) in zip(spaces, pieces.items()):
        title = f"{run}: mean of classes {mean_accuracy(run_pieces):.1f} %"
        draw_space(ax, run_pieces, title=f"{title} (Fig. 3)")
        order = largest_first(run_pieces.class_sizes.numpy())
        values = run_pieces.class_accuracy.numpy()[order]                  # (classes,)
        below.plot(values, label=title, marker=".")
        numbers = " ".join(f"{value:.1f}" for value in values).replace("nan", "-")
        lines.append(f"{title}; by class, largest first: {numbers}")
    below.set_title("kNN@1 per class (Fig. 5)")
    below.set_xlabel("class, largest first")
    below.set_ylabel("test accuracy, %")
    legend_above(below)
    save_figure(fig, path)
    return lines


def check_classes(pieces):
    """Raises: UserError if runs have other classes, or class sizes. pieces: {run: SavedPieces}."""
    first_run, first = next(iter(pieces.items()))
    for run, run_pieces in pieces.items():
        has_same_names = run_pieces.label_names == first.label_names
        if not has_same_names or not torch.equal(run_pieces.class_sizes, first.class_sizes):
            raise UserError(f"{run}: its classes, or their numbers of training images, are not "
                            f"those of {first_run}; compare runs on the same data")


FIGURES = {"phase": draw_phases, "tails": draw_tails}
