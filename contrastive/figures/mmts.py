"""Pictures of MM-TS: temperatures or margins of clusters over a run (Figs. 3, 5, 8 to 11); the clusters (4, 6, 7)."""

from contrastive.figures import base
from contrastive.figures.base import draw_curves, figure, save_figure, whole_ticks

import numpy as np


def draw_cluster_curves(steps, values, sizes, path, title, label, lines=5):
    """Draws the temperature or margin of a few clusters over a run, from the largest cluster to the smallest.

    Args: steps (S,); values (S, K): of each cluster; sizes (K,): largest first; label: of the values."""
    fig, (ax,) = figure(1, width=6.4, height=3.6)
    shown = np.unique([np.abs(sizes - s).argmin() for s in np.linspace(*sizes[[0, -1]], lines)])  # evenly in size
    for c in shown:
        ax.plot(steps, values[:, c], label=f"{sizes[c]:,}")
    ax.set(title=title, xlabel="step", ylabel=label)
    ax.set_ylim(bottom=min(0, values.min()))
    whole_ticks(ax)
    ax.legend(title="cluster size", loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(fig, path)


def draw_distribution(sizes, values, path, title, label):
    """Draws the sizes of clusters, largest first, and beside them each cluster's temperature or margin with its range.

    Args: sizes (K,); values (S, K): at each step; label: of the values."""
    fig, (left, right) = figure(2)
    x = np.arange(1, len(sizes) + 1)
    left.bar(x, sizes, width=1.0)
    left.set(title="how many captions or examples", xlabel="cluster, largest first", ylabel="size")
    low, high = values.min(0), values.max(0)                               # (K,)
    right.fill_between(x, low, high, step="mid", color="C1", alpha=0.3, lw=0, label="range over the run")
    right.step(x, (low + high) / 2, where="mid", color="C1", label="middle")
    right.set(title=f"{label} of each", xlabel="cluster, largest first", ylabel=label)
    right.set_ylim(bottom=min(0, values.min()))
    base.legend_above(right)
    for ax in (left, right):
        whole_ticks(ax)
    fig.suptitle(title)
    save_figure(fig, path)


def draw_map(embeddings, labels, path, title):
    """Draws embeddings (n, D) in the plane by t-SNE, coloured by their clusters, labels (n,)."""
    from sklearn.manifold import TSNE

    fig, (ax,) = figure(1, width=5.5, height=5)
    plane = TSNE(perplexity=min(30, max(1, len(embeddings) // 4)), init="pca", random_state=0,
                 metric="cosine").fit_transform(np.asarray(embeddings, np.float64))  # (n, 2)
    ax.scatter(*plane.T, c=labels * 7 % 20, cmap="tab20", s=8)
    below = f"{len(plane):,} points of {len(set(labels.tolist()))} clusters; a colour serves several"
    ax.set(title=title, xticks=[], yticks=[], xlabel=below)
    save_figure(fig, path)


def draw_clusters(data, examples, path, title, unit="captions"):
    """Draws three pictures and captions each from the largest, a middle and the smallest cluster.

    Args: examples: list of {size, captions, rows}, largest cluster first; rows: of data; unit: what a size counts."""
    shown = [examples[k] for k in sorted({0, len(examples) // 2, len(examples) - 1})]
    table = [(f"{e['size']:,} {unit}", [(base.picture(data, i), "", base.wrap(words, 22), False)
                                        for i, words in zip(e["rows"][:3], e["captions"])]) for e in shown]
    base.draw_examples(table, path, f"{title}: clusters by size", width=2.2, words=0.7)


def draw(run, clusters, shifts, period, curve):
    """The pictures of a run: curves, retrieval, and those of its clusters; arguments as in draw_figures."""
    args = run.args
    word, long_word = ("tau", "temperature") if args.loss == "infonce" else ("margin", "margin")
    draw_curves(run, [
        ("loss, which moves with its schedule", "loss", {"the run's loss": "loss", "L_v2t": "L_v2t", "L_t2v": "L_t2v"}),
        (f"{long_word} of the batch", f"{word}, logged steps", {k: f"{word}_{k}" for k in ("max", "mean", "min")}),
        ("retrieval, val", "%", base.recalls(run)), *base.BATCH,
        ("captions that are in no cluster", "of the batch", {"captions": "not_in_clusters"})
    ], run.folder / "curves.png", rest=True)
    for name, suffix, pieces in base.by_set(run.val_pieces):
        it = base.kind_of(pieces)
        thirds = {part_of: f"eval/{name}/by_cluster_size/{part_of}/R@1" for part_of in ("head", "mid", "tail")}
        draw_curves(run, [
            ("retrieval, val", "%", base.recalls(run, name)),
            ("multi-instance retrieval, val", "%", {k: f"eval/{name}/mir/{k}" for k in ("mAP", "nDCG")}),
            ("by the size of the query's cluster, val", f"R@1, text -> {it}, %", thirds),
            ("modality gap, val", "distance of the means", {"gap": f"eval/{name}/modality_gap"})
        ], run.folder / f"evaluation{suffix}.png")
    for _, suffix, pieces in base.by_set(run.test_pieces):
        base.draw_retrieval(pieces, run.folder / f"retrieval{suffix}.png")
    if clusters is not None:
        draw_figures(run.folder, args, run.total, run.train, clusters, shifts, period, curve)


def draw_figures(folder, args, total, train, clusters, shifts, period, curve):
    """The paper's Figures 3 to 11, from clusters.

    Args: folder: of the pictures; total: steps; shifts (K + 1,) or (1,): one per cluster, or one for all; curve: the
        script's own function, (step, shifts) -> temperatures or margins."""
    word, long_word = ("tau", "temperature") if args.loss == "infonce" else ("margin", "margin")
    points = min(total, max(1000, round(20 * total / period)))             # 20 per period, if the run has so many steps
    steps = np.unique(np.linspace(0, total, points + 1).round())           # (S,)
    values = np.array([curve(t, shifts).numpy() for t in steps])           # (S, K + 1) or (S, 1)
    source = f"{args.dataset}, {args.clusters}"
    if not args.learnable_tau:                                             # a learnable tau ignores the clusters
        sizes = clusters.sizes.numpy()
        values = values[:, :-1] if args.shifts else values.repeat(len(sizes), 1)                 # (S, K)
        draw_cluster_curves(steps, values, sizes, folder / "temperatures.png",
                            title=f"{long_word} of clusters over the run (Fig. 3): {source}", label=word)
        draw_distribution(sizes, values, folder / "distribution.png",
                          title=f"{source}: {len(sizes)} clusters (Figs. 5, 8 to 11)", label=word)
    if "sample" in clusters.tensors:
        draw_map(clusters.tensors["sample"].numpy(), clusters.tensors["sample_labels"].numpy(), folder / "tsne.png",
                 title=f"{source}: embeddings by t-SNE (Figs. 4, 7)")
    if not train.streamed:
        unit = "captions" if clusters.by == "caption" else "examples"
        draw_clusters(train, clusters.meta["examples"], folder / "clusters.png", f"{source} (Fig. 6)", unit)
