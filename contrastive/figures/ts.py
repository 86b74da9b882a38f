"""The pictures of temperature_schedules.py: class sizes, temperature and coverage; the paper's Figures 1 to 5.

sizes: (classes,) training images of each class.
"""

import math

from contrastive.evaluation.metrics import normalize
from contrastive.figures.base import BATCH, draw_curves, figure, legend_above, save_figure, whole_ticks

import numpy as np
import torch


def draw_classes(run, sizes, path):
    """Draws the class sizes, and beside them the temperature along the run and the coverage of the sphere."""
    fig, (left, right) = figure(2)
    left.bar(range(len(sizes)), np.sort(sizes)[::-1], width=1.0)
    left.set(title="training images of each class", xlabel="class, largest first", ylabel="images")
    beside = right.twinx()
    for ax, name, style, label in ((right, "tau", "tab:orange", "mean tau of the batch"),
                                   (beside, "coverage", "o-", "effective part of 500 directions")):
        steps, values = run.log.column(name)
        line, = ax.plot(np.array(steps) / run.per_epoch, values, style, ms=3)
        ax.set_ylabel(label, color=line.get_color())
    right.set(title="temperature and coverage of the sphere", xlabel="epoch")
    right.set_ylim(bottom=0)
    whole_ticks(right)
    save_figure(fig, path)


def draw_figures(run, sizes, tau_of, sphere, path):
    """Figures 1 to 5 of the paper; arguments as in draw."""
    pieces = run.test_pieces[run.args.dataset]
    some = np.random.default_rng(0).permutation(len(pieces["train_labels"]))[:4000]
    features, truth = pieces["train_features"][some], pieces["train_labels"][some]                # (M, width), (M,)
    order, known = np.argsort(-sizes, kind="stable"), pieces["per_class"]  # classes, largest first; {class: kNN@1}
    mean = f"mean of all classes {np.mean(list(known.values())):.1f} %"
    fig, axes = figure(7, columns=2)
    for row in run.log.rows:
        if "sphere" in row:
            axes[0].plot(row["sphere"], "-", color=shade(row["step"], run))
    axes[0].set(title="coverage of the sphere (Fig. 1)", xlabel="of 500 directions, fullest first; light = early",
                ylabel="images nearest to it", yscale="log")
    axes[0].yaxis.set(major_formatter="{x:g}", minor_formatter="")
    draw_shares(axes[1:4], sphere(features), run.args)

    draw_space(axes[4], features, truth, sizes, pieces["names"], known,
               f"PCA, a head and a tail class (Fig. 3)\nkNN@1, {mean}")
    draw_phase(axes[5], run, tau_of)
    axes[6].bar(range(len(order)), [known.get(int(c), 0) for c in order], width=1.0)
    axes[6].set(title=f"kNN@1 per class, {mean} (Fig. 5)", xlabel="class, largest first", ylabel="test accuracy, %")
    save_figure(fig, path)


def draw_space(place, features, truth, sizes, names, known, title):
    """Fig. 3, in the place of these axes: the largest and the smallest class among features (M, width), by PCA.

    Args: truth (M,): labels; sizes (classes,); names: of the classes; known: {class: kNN@1}."""
    present = [c for c in np.argsort(-sizes, kind="stable") if (truth == c).any()]
    centred = normalize(features).numpy()
    centred = centred - centred.mean(0)
    space = centred @ np.linalg.svd(centred, full_matrices=False)[2][:3].T                        # (M, 3)
    solid = place.figure.add_subplot(place.get_subplotspec(), projection="3d")
    place.remove()
    solid.scatter(*space.T, s=4, color="lightgrey", alpha=0.3)
    for c, colour, name in ((present[0], "tab:red", "head"), (present[-1], "tab:blue", "tail")):
        label = f"{name}: {names[c]} ({sizes[c]}), kNN@1 {known.get(int(c), 0):.0f} %"
        solid.scatter(*space[truth == c].T, s=14, color=colour, label=label)
    solid.legend(loc="upper center", bbox_to_anchor=(0.5, 0.1)).set_in_layout(False)              # wider than the axes
    solid.set(title=title, xticklabels=(), yticklabels=(), zticklabels=())


def shade(step, run):
    """A grey for a step: light = early, black = the end."""
    return str(0.85 * (1 - step / run.step))


def draw_shares(axes, unit, args):
    """Fig. 2: for each cosine, the weight of one negative in the loss, the number of negatives, and their total weight.

    Args: axes: three.   unit: (M, D) normalised z, M > 1."""
    single, histogram, together = axes
    cosines = (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)].numpy()
    edges = np.linspace(-1, 1, 101)
    middle, number = (edges[1:] + edges[:-1]) / 2, np.histogram(cosines, edges)[0]                          # (100,)
    coarse = {args.tau_head, args.tau_tail} - {0}
    for tau in sorted(coarse or {args.tau_min, (args.tau_min + args.tau_max) / 2, args.tau_max}):
        share = np.exp((middle - 1) / tau)                                 # (100,), before the scale
        single.plot(middle, share / share.max(), label=f"tau {tau:g}")
        together.plot(middle, share * number / max((share * number).max(), 1e-30), label=f"tau {tau:g}")
    histogram.fill_between(middle, number / number.max(), color="tab:grey", step="mid")
    for ax, title in zip(axes, ("share of one negative (Fig. 2a)", "negatives (Fig. 2b)",
                                "share of all negatives (Fig. 2c)")):
        ax.set(title=title, xlabel="cosine of z to the anchor", ylabel="maximum 1", xticks=(-1, -0.5, 0, 0.5, 1))
    legend_above(single)
    legend_above(together)


def draw_phase(ax, run, tau_of):
    """Fig. 4: the few-shot probe on val over the phase of the period, with the temperature tau_of(epoch) beside it."""
    args = run.args
    steps, values = run.log.column(f"eval/{args.dataset}/few-shot/top1")
    epochs = np.array(steps[1:]) / run.per_epoch                           # not before the first step
    phase = 1 - (-epochs % args.period) / args.period                      # a period ends at 1, not at 0
    ax.scatter(phase, values[1:], s=20, color=[shade(s, run) for s in steps[1:]])
    ax.set(title="few-shot probe over the period (Fig. 4)", xlabel="phase of the period; light = early",
           ylabel="val top-1, %", xlim=(-0.05, 1.05))
    if args.tau_head or args.schedule in ("random", "fixed") or not len(phase):  # no wave, or no evaluation on val
        return
    beside, trained = ax.twinx(), np.arange(math.ceil(run.step / run.per_epoch))  # epochs; tau is constant in each
    beside.plot(trained % args.period / args.period, [tau_of(e) for e in trained], ".", ms=3, color="tab:orange")
    beside.set_ylabel("tau", color="tab:orange")


def draw(run, sizes, tau_of, sphere):
    """The pictures of a run: curves, class sizes with tau beside them, and the paper's Figures 1 to 5.

    sizes (classes,). The script's own functions: tau_of: epoch -> tau; sphere: features (M, width) -> (M, D)."""
    of_val = f"eval/{run.args.dataset}/knn@1"
    draw_curves(run, [
        ("loss, which moves with its temperature", "loss", {"L_c": "loss"}),
        ("temperature", "tau", {"tau": "tau"}), *BATCH,
        ("kNN@1, val", "%", {"top-1": f"{of_val}/top1", "tail": f"{of_val}/tail"})
    ], run.folder / "curves.png", rest=True)
    draw_classes(run, sizes, run.folder / "classes.png")
    if run.args.dataset in run.test_pieces:
        draw_figures(run, sizes, tau_of, sphere, run.folder / "figures.png")
