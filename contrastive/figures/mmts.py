"""Figures of MM-TS: temperatures or margins of clusters over a run (Figs. 3, 5, 8 to 11), and the
clusters themselves (Figs. 4, 6, 7)."""

from pathlib import Path

from contrastive.core.files import read_json
from contrastive.core.words import counted
from contrastive.evaluation.saved_pieces import read_picture
from contrastive.figures import base
from contrastive.figures.base import draw_curves, figure, save_figure, whole_ticks

import numpy as np
from safetensors.torch import load_file

NUM_COLOURS = 20  # of the map "tab20"


def draw_cluster_curves(steps, values, sizes, path, *, title, label):
    """Draws the temperatures or margins of five clusters over a run, from largest to smallest.

    Args:
        steps: (S,).
        values: (S, K) of each cluster.
        sizes: (K,) largest first.
        label: what the values are.
    """
    fig, (ax,) = figure(1, width=6.4, height=3.6)
    targets = np.linspace(sizes[0], sizes[-1], 5)                          # evenly in size
    clusters = np.abs(sizes - targets[:, None]).argmin(1)                  # (5,)
    for cluster in np.unique(clusters):
        ax.plot(steps, values[:, cluster], label=f"{sizes[cluster]:,}")
    ax.set_title(title)
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    ax.set_ylim(bottom=min(0, values.min()))
    whole_ticks(ax)
    ax.legend(title="cluster size", loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(fig, path)


def draw_distribution(sizes, values, path, *, title, label):
    """Draws the sizes of the clusters, and beside them the range of each one's values.

    Args:
        sizes: (K,) largest first.
        values: (S, K) temperature or margin of each cluster at each step.
        label: what the values are.
    """
    fig, (left, right) = figure(2)
    place = np.arange(1, len(sizes) + 1)                                   # (K,)
    left.bar(place, sizes, width=1.0)
    left.set_title("how many captions or examples")
    left.set_ylabel("size")
    low = values.min(0)                                                    # (K,)
    high = values.max(0)                                                   # (K,)
    right.fill_between(place, low, high, step="mid", color="C1", alpha=0.3, lw=0,
                       label="range over the run")
    right.step(place, (low + high) / 2, where="mid", color="C1", label="middle")
    right.set_title(f"{label} of each")
    right.set_ylabel(label)
    right.set_ylim(bottom=min(0, values.min()))
    base.legend_above(right)
    for ax in (left, right):
        ax.set_xlabel("cluster, largest first")
        whole_ticks(ax)
    fig.suptitle(title)
    save_figure(fig, path)


def draw_map(embeddings, labels, path, title):
    """Draws embeddings (n, D) in the plane by t-SNE, coloured by their clusters, labels (n,)."""
    from sklearn.manifold import TSNE

    fig, (ax,) = figure(1, width=5.5, height=5)
    perplexity = min(30, max(1, len(embeddings) // 4))
    model = TSNE(perplexity=perplexity, init="pca", random_state=0, metric="cosine")
    plane = model.fit_transform(embeddings.astype(np.float64))             # (n, 2)
    ax.scatter(plane[:, 0], plane[:, 1], c=labels * 7 % NUM_COLOURS, cmap="tab20", s=8)
    num_clusters = len(np.unique(labels))
    label = f"{len(plane):,} points of {num_clusters} clusters"
    if num_clusters > NUM_COLOURS:
        label += "; a colour serves several"
    ax.set(title=title, xticks=[], yticks=[], xlabel=label)
    save_figure(fig, path)


def draw_examples(clusters, tensors, path, title):
    """Draws three pictures and captions of the largest, a middle and the smallest cluster.

    Args:
        clusters: content of clusters.json.
        tensors: of clusters.safetensors, with the pictures.
    """
    unit = "examples"
    if clusters["by"] == "caption":
        unit = "captions"
    table = []
    number = 0  # of the picture
    for cluster in clusters["examples"]:
        examples = []
        for k in cluster.get("pictured", []):
            pixels = read_picture(tensors["jpeg"], tensors["jpeg_ends"], number)
            examples.append(base.Example(pixels, "", base.wrap(cluster["captions"][k], 22)))
            number += 1
        if examples:
            table.append((counted(cluster["size"], unit), examples))
    if table:
        base.draw_examples(table, path, f"{title}: clusters by size", width=2.2, words=0.7)


def draw(folder):
    """Draws the figures of a run into its folder."""
    run = base.FinishedRun(folder)
    draw_training(run)
    for name, suffix, pieces in base.by_set(run.val):
        draw_evaluation(run, name, suffix, pieces.kind)
    for _, suffix, pieces in base.by_set(run.test, min_queries=1):
        base.draw_retrieval(pieces, run.folder / f"retrieval{suffix}.png")
    if (run.folder / "clusters.json").exists():
        draw_clusters(run)


def draw_training(run):
    """Draws what is logged in training."""
    word, long_word = quantity(run.args)
    losses = {"the run's loss": "loss", "L_v2t": "L_v2t", "L_t2v": "L_t2v"}
    title = "loss"
    if run.args.schedule:
        title = "loss, which moves with its schedule"
    panels = [
        (title, "loss", losses),
        base.recall_panel(run),
        (f"{long_word} of the batch", f"mean {word}", {"mean": word}),
        *base.batch_panels(),
        ("captions that were not clustered", "of the batch", {"captions": "not_in_clusters"})]
    base.draw_training_curves(run, panels)


def draw_evaluation(run, name, suffix, kind):
    """Draws the evaluations of a val set on the way.

    Args:
        name: of the set.
        suffix: of the file's name, "" for the first set.
        kind: image or video.
    """
    multi_instance = {"mAP": f"eval/{name}/mir/mAP", "nDCG": f"eval/{name}/mir/nDCG"}
    thirds = {}
    for third in ("head", "mid", "tail"):
        thirds[third] = f"eval/{name}/by_cluster_size/{third}/R@1"
    gap = {"gap": f"eval/{name}/modality_gap"}
    panels = [
        ("multi-instance retrieval, val", "%", multi_instance),
        ("by the size of the query's cluster, val", f"R@1, text -> {kind}, %", thirds),
        ("modality gap, val", "distance of the means", gap)]
    if suffix:  # curves.png has that of the first set
        panels.insert(0, base.recall_panel(run, name))
    draw_curves(run, panels, run.folder / f"evaluation{suffix}.png")


def draw_clusters(run):
    """Draws the paper's Figures 3 to 11, from the clusters of a run."""
    folder = run.folder
    source = f"{Path(run.args.dataset).name}, {run.args.clusters}"
    clusters = read_json(folder / "clusters.json")
    tensors = load_file(folder / "clusters.safetensors")
    if (folder / "temperatures.safetensors").exists():                     # not of a learnt tau
        word, long_word = quantity(run.args)
        curves = load_file(folder / "temperatures.safetensors")
        steps, values = curves["steps"].numpy(), curves["values"].numpy()  # (S,), (S, K)
        sizes = tensors["sizes"].numpy()                                   # (K,)
        draw_cluster_curves(
            steps, values, sizes, folder / "temperatures.png", label=word,
            title=f"{long_word} of clusters over the run (Fig. 3): {source}")
        draw_distribution(
            sizes, values, folder / "distribution.png", label=word,
            title=f"{source}: {len(sizes)} clusters (Figs. 5, 8 to 11)")
    if "sample" in tensors:
        sample = tensors["sample"].numpy()                                 # (n, D)
        labels = tensors["sample_labels"].numpy()                          # (n,)
        title = f"{source}: embeddings by t-SNE (Figs. 4, 7)"
        draw_map(sample, labels, folder / "tsne.png", title)
    draw_examples(clusters, tensors, folder / "clusters.png", f"{source} (Fig. 6)")


def quantity(args):
    """What has a schedule: its column of the log, and its name in titles."""
    if args.loss == "max-margin":
        return "margin", "margin"
    return "tau", "temperature"


FIGURES = {}  # of several runs
