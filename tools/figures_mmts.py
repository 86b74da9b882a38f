"""Pictures of MM-TS: what clusters get over a run (Figs. 3, 5, 8 to 11), and the clusters (Figs. 4, 6, 7)."""

import numpy as np

from tools import figures


def draw_cluster_curves(steps, swing, center, sizes, path, title, label, lines=5):
    """The value of a few clusters over a run, from the largest to the smallest.

    Args: steps, swing (S,): what all clusters add at each step; center, sizes (K,): largest first; label: of the value.
    """
    fig, (ax,) = figures.figure(1, width=6.4, height=3.6)
    shown = np.unique(np.linspace(sizes[0], sizes[-1], lines).round())[::-1]  # even in size, as the value is
    shown = np.unique([np.abs(sizes - s).argmin() for s in shown])
    for k, c in enumerate(shown):
        ax.plot(steps, center[c] + swing, label=f"{sizes[c]:,}", color=f"C{k}", **figures.line_style(k, len(shown)))
    ax.set(title=title, xlabel="step", ylabel=label)
    ax.set_ylim(*_with_air(min(0, (center.min() + swing.min())), center.max() + swing.max()))
    figures.whole_ticks(ax)
    ax.legend(title="cluster size", frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figures.save_figure(fig, path)


def draw_distribution(sizes, center, swing, path, title, label):
    """Sizes of clusters, largest first, and beside them each cluster's value and how far it swings.

    Args: sizes, center (K,); swing: (lowest, highest) that the schedule adds; label: of the value."""
    fig, (left, right) = figures.figure(2)
    x = np.arange(1, len(sizes) + 1)
    left.bar(x, sizes, width=1.0)
    left.set(title="how many captions or examples", xlabel="cluster, largest first", ylabel="size")
    right.fill_between(x, center + swing[0], center + swing[1], step="mid", color="C1", alpha=0.3, lw=0,
                       label="range over the run")
    right.step(x, center, where="mid", color="C1", label="middle")
    right.set(title=f"{label} of each", xlabel="cluster, largest first", ylabel=label)
    right.set_ylim(*_with_air(min(0, (center + swing[0]).min()), (center + swing[1]).max()))
    right.legend(frameon=False, fontsize=8)
    for ax in (left, right):
        figures.whole_ticks(ax)
    fig.suptitle(title, fontsize=10)
    figures.save_figure(fig, path)


def draw_map(embeddings, labels, path, title):
    """Embeddings (n, D) in the plane by t-SNE, coloured by their clusters, labels (n,)."""
    from sklearn.manifold import TSNE

    fig, (ax,) = figures.figure(1, width=5.5, height=5)
    plane = TSNE(perplexity=min(30, max(1, len(embeddings) // 4)), init="pca", random_state=0,
                 metric="cosine").fit_transform(np.asarray(embeddings, np.float64))  # (n, 2)
    ax.scatter(*plane.T, c=labels * 7 % 20, cmap="tab20", s=8)
    below = f"{len(plane):,} points of {len(set(labels.tolist()))} clusters; a colour serves several"
    ax.set(title=title, xticks=[], yticks=[], xlabel=below)
    figures.save_figure(fig, path)


def draw_clusters(data, examples, path, title):
    """Pictures and captions from the largest, a middle and the smallest cluster.

    Args: examples: list of {size, captions, rows}, largest cluster first; rows: of data."""
    shown = [examples[k] for k in sorted({0, len(examples) // 2, len(examples) - 1})]
    shown = [e for e in shown if e["rows"]]
    columns = max(len(e["rows"]) for e in shown)
    width, height = figures.cell(data, shown[0]["rows"])
    fig, axes = figures.figure(columns, len(shown), width=width + 0.3, height=height + 0.55)
    axes = axes.reshape(len(shown), columns)
    for row, e in zip(axes, shown, strict=True):
        for k, ax in enumerate(row):
            if k >= len(e["rows"]):
                ax.set_axis_off()
                continue
            figures.show(ax, data, e["rows"][k])
            ax.set_xlabel("\n".join(figures.wrap(e["captions"][k], 22)), fontsize=7)
        row[0].set_ylabel(f"{e['size']:,}", fontsize=9)
    fig.suptitle(f"{title}: clusters by size", fontsize=10)
    figures.save_figure(fig, path)


def _with_air(low, high):
    air = 0.05 * (high - low) or 1
    return low - air * (low < 0), high + air
