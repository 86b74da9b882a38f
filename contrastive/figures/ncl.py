"""Figures of NCL: of a run, curves, errors, mistakes and queues (Figs. 2, 3, 5), queries (6) and
modalities (7, 8); of several runs, Figures 2, 6, 7 and 8.

Beside the files of every run they read queues.safetensors, for gamma, and val_before.safetensors.
"""

from typing import NamedTuple

from contrastive.core.metrics import normalize, pair_cosines
from contrastive.core.processes import opening
from contrastive.evaluation.saved_pieces import SavedPieces, read_pieces
from contrastive.figures import base
from contrastive.figures.base import figure, save_figure

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

DIRECTIONS = ("text_to_image", "image_to_text")
SHARE_EDGES = [0.25, 0.5, 0.75, 1.25, 1.5, 2, 3]  # of the bins of Fig. 3
SHARE_LABELS = ["< .25", "< .5", "< .75", "< 1.25", "< 1.5", "< 2", "< 3", "> 3"]


# ===================================================== one run ====================================
def draw(folder):
    """Draws the figures of a run into its folder: Figs. 2, 3, 5, 6 of test sets, 7 and 8 of val.

    A run without biases (variants/ncl_ssb.py --loss max-margin) has no Figs. 2, 3, 5 and 6.
    """
    run = base.FinishedRun(folder)
    draw_training(run)
    before = read_pieces(run.folder / "val_before.safetensors")
    for name, suffix, pieces in base.by_set(run.test):
        after = run.val.get(name, pieces)
        stages = {}
        if name in before:
            stages["before training"] = before[name]
        stages["after training"] = after
        draw_planes(stages, after.title, run.folder / f"modalities{suffix}.png")
        if pieces.biases:
            metrics = run.summary["test"][name]["normalize"]
            path = run.folder / f"normalization{suffix}.png"
            draw_normalization(pieces, metrics, read_gamma(run), path)
    for _, suffix, pieces in base.by_set(run.test, min_queries=1):
        draw_retrieval(run, pieces, run.folder / f"retrieval{suffix}.png")


def draw_retrieval(run, pieces, path):
    """Draws Fig. 6, or the retrieval of a run without biases."""
    if not pieces.biases:
        base.draw_retrieval(pieces, path)
        return
    gamma = read_gamma(run)
    mode = mode_of(run, pieces)
    if mode == "none":
        mode = "oracle"
    draw_answers({
        "cosine": Stage(pieces, "none", gamma),
        f"with biases ({mode})": Stage(pieces, mode, gamma)}, path)


def read_gamma(run):
    """gamma at the end of a run of ncl.py. run: base.FinishedRun."""
    path = run.folder / "queues.safetensors"
    with opening(path):
        return load_file(path)["gamma"].item()


def mode_of(run, pieces):
    """The mode of the biases of a run's reported retrieval on these SavedPieces."""
    if run.args.normalize in pieces.biases:
        return run.args.normalize
    return "none"


def draw_training(run):
    """Draws curves.png: the log, and R@1 of the first val set, with and without biases."""
    name = next(iter(run.val), "")
    modes = ("none", "queue")
    recalls = {}
    for label, direction in zip(("t->v", "v->t"), DIRECTIONS):
        if run.args.loss == "max-margin":
            recalls[label] = f"eval/{name}/{direction}/R@1"
            continue
        for mode in modes:
            recalls[f"{label}, {mode}"] = f"eval/{name}/normalize/{mode}/{direction}/R@1"
    chance = {}
    for data_set, levels in run.summary["val_chance"].items():
        # of recalls with biases it is the same
        same = {direction: levels[direction] for direction in DIRECTIONS}
        chance[data_set] = levels | {"normalize": dict.fromkeys(modes, same)}
    losses = {"the run's loss": "loss", "L_t2v": "L_t2v", "L_v2t": "L_v2t", "L_cap": "L_cap"}
    errors = {"as it is": "error", f"{run.args.iterations} rounds": "error_normalized"}
    panels = [
        ("loss", "loss", losses),
        ("retrieval, val", "R@1, %", recalls),
        ("temperature", "gamma", {"gamma": "tau"}),
        *base.batch_panels(),
        ("normalisation error, batch", "mean |1 - sum P|", errors)]
    base.draw_training_curves(run, panels, chance)


# ===================================================== errors, mistakes, queues ===================
def draw_normalization(pieces, metrics, gamma, path):
    """Draws Figs. 2, 3 and 5: normalisation errors, mistakes by share, R@1 by size of the queue.

    Args:
        pieces: SavedPieces with biases.
        metrics: {mode of the biases: metrics}, 'normalize' of summary.json.
        gamma: of the biases.
        path: of the picture.
    """
    num_panels = 4
    if pieces.recall_by_queue_size:
        num_panels = 5
    fig, axes = figure(num_panels, columns=2)
    draw_error_bars(axes[0], metrics, pieces.kind)
    draw_shares(axes[1:4], pieces, list(metrics), gamma)
    if pieces.recall_by_queue_size:
        draw_queue_sizes(axes[4], pieces, metrics["none"])
    for ax in axes:
        if ax is axes[3]:
            ax.legend()
        else:
            base.legend_above(ax)
    fig.suptitle(
        f"{pieces.title}: {len(pieces.image)} items, {len(pieces.text)} texts, gamma {gamma:.3g}. "
        "Biases from: queue = training queries, which help if test is like training; oracle = the "
        "test queries, a bound")
    save_figure(fig, path)


def draw_error_bars(ax, metrics, kind):
    """Draws the normalisation errors of both directions as bars (Fig. 2)."""
    places = np.arange(len(metrics))
    labels = (f"text -> {kind}", f"{kind} -> text")
    for shift, direction, label in zip((-0.2, 0.2), DIRECTIONS, labels):
        heights = [of_mode["error"][direction] for of_mode in metrics.values()]
        ax.bar(places + shift, heights, 0.4, label=label)
    ax.set_title("normalisation error (Fig. 2)")
    ax.set_ylabel("mean |1 - sum P|")
    ax.set_xticks(places, list(metrics))


def draw_shares(axes, pieces, modes, gamma):
    """Draws mistakes against an item's summed probability (Fig. 3), and these sums, sorted.

    Args:
        axes: three panels.
        modes: of the biases, in the order of the legend.
    """
    kind = pieces.kind
    sim = pieces.cosines()                                                 # (C, M)
    *rate_axes, sum_axes = axes
    for mode in modes:
        image_bias, _ = pieces.biases[mode]                                # (M,)
        biased = sim + image_bias                                          # (C, M)
        share = summed_probability(biased, gamma).numpy()                  # (M,)
        bins = np.digitize(share, SHARE_EDGES)                             # (M,) 0..7
        filled = np.unique(bins)
        for ax, rates in zip(rate_axes, mistakes(biased, pieces.positives)):
            percent = [100 * rates[bins == k].mean() for k in filled]
            ax.plot(filled, percent, label=mode, marker=".")
        sum_axes.plot(np.sort(share)[::-1], label=mode)
    rate_axes[0].set_title("false negatives (Fig. 3)")
    rate_axes[1].set_title("false positives (Fig. 3)")
    for ax in rate_axes:
        ax.set_xlabel(f"summed probability of one {kind}")
        ax.set_ylabel("% of the queries")
        ax.set_xticks(range(8), SHARE_LABELS, rotation=45)
    sum_axes.set_yscale("log", base=2)
    sum_axes.set_title(f"what each {kind} collects")
    sum_axes.set_xlabel(f"{kind}, most first")
    sum_axes.set_ylabel("sum of probabilities, 1 = fair")
    sum_axes.yaxis.set(major_formatter="{x:g}", minor_formatter="")


def summed_probability(sim, gamma):
    """Each item's probability summed over all queries, 1 = its fair share: (C, M) -> (M,)."""
    C, M = sim.shape
    return F.softmax(sim / gamma, 1).sum(0) * M / C                        # (M,)


def mistakes(sim, positives):
    """How often each item is missed, and how often it is retrieved for the queries of others.

    Args:
        sim: (C, M) similarities, with biases added.
        positives: (C, P) right items of each query, padded with -1.
    Returns: (M,) share of an item's own queries that rank no right item first; (M,) share of the
        other queries that rank this item first.
    """
    C, M = sim.shape
    is_right = torch.zeros(C, M + 1, dtype=torch.bool)
    is_right.scatter_(1, positives % (M + 1), True)                        # -1 is column M
    is_right = is_right[:, :M]                                             # (C, M)
    is_first = F.one_hot(sim.argmax(1), M).bool()                          # (C, M)
    query_fails = ~(is_first & is_right).any(1, keepdim=True)              # (C, 1)
    num_missed = (is_right & query_fails).sum(0)                           # (M,)
    num_false = (is_first & ~is_right).sum(0)                              # (M,)
    num_right = is_right.sum(0)                                            # (M,)
    num_others = C - num_right                                             # (M,)
    missed_rate = num_missed / num_right.clamp(min=1)                      # (M,)
    false_rate = num_false / num_others.clamp(min=1)                       # (M,)
    return missed_rate.numpy(), false_rate.numpy()


def draw_queue_sizes(ax, pieces, without_biases):
    """Draws R@1 by the number of training queries that give the biases (Fig. 5).

    Dotted: without biases, whose metrics are handed in.
    """
    recalls = pieces.recall_by_queue_size
    sizes = [int(size) for size in recalls]                                # JSON has texts
    labels = (f"text -> {pieces.kind}", f"{pieces.kind} -> text")
    for colour, direction, label in zip(("C0", "C1"), DIRECTIONS, labels):
        values = [recall[direction] for recall in recalls.values()]
        ax.plot(sizes, values, "-o", ms=3, label=label, color=colour)
        ax.axhline(without_biases[direction]["R@1"], ls=":", label=f"{label}, no queue",
                   color=colour)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_title("R@1 by queue size (Fig. 5)")
    ax.set_xlabel("training queries in the queue")
    ax.set_ylabel("R@1, %")


# ===================================================== queries ====================================
class Stage(NamedTuple):
    """The retrieval of a run, or of a run with other biases."""

    pieces: SavedPieces
    mode: str  # of the biases
    gamma: float


def draw_answers(stages, path):
    """Draws the answers to three queries in each stage (Fig. 6).

    Below each answer is its probability summed over all queries. Queries whose first answer changes
    from the first stage to the last come first.

    Args:
        stages: {name: Stage}, of the same images and captions.
        path: of the picture.
    Returns: {name: (M,) summed probability of each item}.
    """
    shares = {}
    sims = {}
    first_answers = []                                                     # (c,) each
    for name, stage in stages.items():
        image_bias, _ = stage.pieces.biases[stage.mode]                    # (M,)
        sim = stage.pieces.cosines() + image_bias                          # (C, M)
        shares[name] = summed_probability(sim, stage.gamma)
        shown = base.with_pictures(stage.pieces)
        sims[name] = shown.cosines() + image_bias[:len(shown.image)]       # (c, m)
        first_answers.append(sims[name].argmax(1))
    is_same = first_answers[0] == first_answers[-1]                        # (c,)
    changed_first = is_same.int().sort(stable=True).indices.tolist()
    row_of_image = {}
    for row in changed_first:
        row_of_image.setdefault(int(shown.owner[row]), row)                # one query an image
    hits = []
    for row in list(row_of_image.values())[:3]:
        right = set(shown.positives[row].tolist())
        for name, sim in sims.items():
            below = []
            for similarity, share in zip(sim[row], shares[name]):
                below.append(f"{similarity:.2f}, sum {share:.2f}")
            hits.append(base.QueryHits(f"{name}: {shown.texts[row]}", right, sim[row], below))
    title = "below: similarity, and what each collects of all queries (1 = fair; Fig. 6)"
    base.draw_hits(shown, hits, path, title)
    return shares


# ===================================================== modalities =================================
def first_captions(pieces):
    """Texts and images, (n, D) each, of the first 500 images with a caption: pairs."""
    images, captions = np.unique(pieces.owner, return_index=True)          # (n,) each
    return pieces.text[captions[:500]], pieces.image[images[:500]]


def draw_planes(stages, title, path):
    """Draws both modalities of stages or runs in a plane, and mean cosines (Figs. 7 and 8).

    Args:
        stages: {name: SavedPieces}.
        title, path: of the picture.
    Returns: the mean cosines as lines.
    """
    fig, axes = figure(len(stages) + 1)
    *planes, bars = axes
    kind = next(iter(stages.values())).kind
    pair_names = ["text-text", f"{kind}-{kind}", f"text-{kind}"]
    bar_width = 0.8 / len(stages)
    first_bar = -(len(stages) - 1) / 2 * bar_width
    lines = []
    for k, (stage, pieces) in enumerate(stages.items()):
        text, image = first_captions(pieces)
        text, image = normalize(text), normalize(image)                    # (n, D)
        draw_plane(planes[k], text, image, kind)
        planes[k].set_title(f"{stage} (Fig. 7, PCA)")
        cosines = [
            pair_cosines(text @ text.T)["neg_cos"],
            pair_cosines(image @ image.T)["neg_cos"],
            (text @ image.T).mean().item()]
        places = np.arange(3) + first_bar + k * bar_width
        bars.bar(places, cosines, bar_width, label=stage)
        words = [f"{name} {cosine:.3f}" for name, cosine in zip(pair_names, cosines)]
        lines.append(f"{stage}: {', '.join(words)}")
    bars.set_title("mean cosine (Fig. 8)")
    bars.set_xticks(range(3), pair_names)
    for ax in axes:
        base.legend_above(ax)
    fig.suptitle(title)
    save_figure(fig, path)
    return lines


def draw_plane(ax, text, image, kind):
    """Draws texts (n, D) and images (k, D) in the plane of their first principal components."""
    from sklearn.decomposition import PCA

    both = torch.cat([text, image])                                        # (n + k, D)
    points = PCA(2).fit_transform(both)                                    # (n + k, 2)
    n = len(text)
    ax.scatter(*points[:n].T, s=5, label="texts")
    ax.scatter(*points[n:].T, s=5, label=f"{kind}s")
    ax.set_xlabel("first direction")
    ax.set_ylabel("second")


# ===================================================== several runs ===============================
def draw_errors(folders, path):
    """Fig. 2: normalisation errors of the test, as they are and with the queue's biases."""
    errors = {}
    for run, files in base.read_runs(folders).items():
        errors[run] = {}
        for name, metrics in files.summary["test"].items():
            modes = metrics.get("normalize", {})
            for mode in ("none", "queue"):
                if mode not in modes:
                    continue
                for direction, error in modes[mode]["error"].items():
                    direction = direction.replace("_to_", " to ")
                    errors[run][f"{name}\n{direction}, {mode}"] = error
    return base.draw_bars({"normalisation error (Fig. 2)": errors}, path)


def draw_queries(folders, path):
    """Fig. 6: the same queries in each run, and what each answer collects of all queries."""
    runs = base.read_runs(folders)
    pieces = base.first_test_sets(runs)
    base.require_texts(pieces)
    stages = {}
    for run, files in runs.items():
        stages[run] = Stage(pieces[run], mode_of(files, pieces[run]), read_gamma(files))
    lines = []
    for run, share in draw_answers(stages, path).items():
        fair = 100 * (abs(share - 1) < 0.5).float().mean()
        lines.append(f"{run}: {fair:.1f} % of the items collect 0.5 to 1.5")
    return lines


def draw_modalities(folders, path):
    """Figs. 7 and 8: both modalities in the plane, and mean cosines in and between them."""
    pieces = base.first_test_sets(base.read_runs(folders))
    base.require_texts(pieces)
    title = next(iter(pieces.values())).title
    return draw_planes(pieces, title, path)


FIGURES = {"errors": draw_errors, "queries": draw_queries, "modalities": draw_modalities}
