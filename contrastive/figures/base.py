"""What all pictures share, and those that every run has: curves, retrieval, answers, pairs, histograms.

    fig, (left, right) = figure(2)
    left.plot(steps, loss)
    save_figure(fig, folder / "mine.png")      # or .pdf

`pieces` is what `retrieval_pieces` returns: image (M, D), text (C, D), owner (C,) the row of each caption's image,
texts (C captions), index (M,) into data, positives (C, P), data.
"""

import functools
import math
import textwrap

from contrastive.data.table import frames_of
from contrastive.engine.processes import flatten, opening, slug
from contrastive.evaluation.metrics import normalize

import numpy as np
import torch

LETTERS = 11  # points, for all text: readable in half a column of a paper, and from the back of a room
COLOURS = [f"tab:{name}" for name in "blue orange green red purple brown pink gray".split()]
STYLE = dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize",
                       "legend.fontsize", "legend.title_fontsize", "figure.titlesize"), LETTERS) | {
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 200,
    "legend.handlelength": 1.2, "legend.columnspacing": 0.8, "legend.handletextpad": 0.5, "legend.borderaxespad": 0,
    "text.parse_math": False,  # a '$' in a caption is a dollar
    "pdf.fonttype": 42,        # TrueType: journals refuse matplotlib's default, Type 3
    "axes.prop_cycle": f"cycler(color={COLOURS}, ls={2 * ['-', '--', ':', '-.']})"}
wrap = functools.partial(textwrap.fill, max_lines=3, placeholder=" ...")  # (text, width in letters)


# ======================================================= any figure ==================================================
def figure(panels, columns=0, width=3.6, height=2.7):
    """A matplotlib figure without a display: (fig, flat array of axes).

    Args: columns: of the grid, 0 = all in one row; width, height: of one panel in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    columns = columns or panels
    rows = math.ceil(panels / columns)
    fig = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes[panels:]:
        ax.remove()
    return fig, axes[:panels]


def save_figure(fig, path):
    """Writes a figure as .png or .pdf. Titles and labels of one line are wrapped to the size of their panel."""
    fig.draw_without_rendering()  # lays the panels out, so that their sizes are known
    rooms = [(fig.suptitle(fig.get_suptitle()), fig.bbox.width)]           # (text, dots that it may take)
    for ax in fig.axes:
        rooms += [(ax.title, ax.bbox.width), (ax.xaxis.label, ax.bbox.width), (ax.yaxis.label, ax.bbox.height)]
    for text, room in rooms:
        letters = int(room / fig.dpi * 72 / (0.52 * LETTERS))              # a letter is about half as wide as high
        if "\n" not in text.get_text():
            text.set_text(textwrap.fill(text.get_text(), letters, break_long_words=False))
    with opening(path):
        fig.savefig(path)


def legend_above(ax):
    """A legend in room of its own: the y axis grows by what it takes, so that it covers nothing that is drawn."""
    names = ax.get_legend_handles_labels()[1]
    columns = 2 if len(names) > 2 and max(map(len, names)) <= 14 else 1
    ax.legend(loc="upper center", ncols=columns)
    row = 1.7 * LETTERS / 72 * ax.figure.dpi / ax.bbox.height    # as a part of the panel, which the layout makes lower
    low, high = ax.get_ylim()
    ax.set_yticks([tick for tick in ax.get_yticks() if low <= tick <= high])     # none in the legend's room: no 150 %
    ax.set_ylim(low, low + (high - low) / (1 - min(0.6, row * math.ceil(len(names) / columns))))


def whole_ticks(ax):
    """Ticks of the x axis at whole numbers only: steps, samples, epochs."""
    ax.locator_params(axis="x", integer=True, nbins=5)


def by_set(pieces):
    """[(name, suffix of its pictures' file names, pieces)] of the sets of a run; the first set has no suffix."""
    return [(name, f"_{slug(name)}" if k else "", piece) for k, (name, piece) in enumerate(pieces.items())]


# ======================================================= curves ======================================================
BATCH = [("learning rate", "lr", {"lr": "lr"}),  # panels of all methods that train on pairs
         ("cosine", "mean over the batch", {"positive pairs": "pos_cos", "negative pairs": "neg_cos"}),
         ("spread (0 = collapsed, 1 = whole sphere)", "std x sqrt(D)",
          {"first of a pair": "std_image", "second": "std_text"}),
         ("space", "of the batch", {"alignment": "alignment", "uniformity": "uniformity", "gap": "gap",
                                    "std of pairs": "pos_std"}),
         ("speed", "samples per second", {"all processes": "samples_per_s"}),
         ("time of a step", "seconds", {"whole": "step_s", "waiting for data": "data_s"})]
POSITION = {"step", "epoch", "samples_seen", "tau"}  # columns that need no panel: tau is in those of its method


def recalls(run, name=""):
    """{legend: column} of R@1 and R@10 both ways on val, of the set `name`, or of the first."""
    name = name or next(iter(run.val_pieces), "")
    ways = {"text -> item": "text_to_image", "item -> text": "image_to_text"}
    return {f"{k}, {label}": f"eval/{name}/{way}/{k}" for label, way in ways.items() for k in ("R@1", "R@10")}


def draw_curves(run, panels, path, x="step", rest=False):
    """Draws logged numbers in panels; those without a number are left out. Dotted: chance, of numbers on val.

    Args: panels: [(title, y label, {legend: column of the log})]; x: step or samples_seen; rest: a panel more for every
        column of the training steps that no panel has, such as those of a fork."""
    if rest:
        drawn = POSITION | {run.tau_word} | {name for *_, lines in panels for name in lines.values()}
        logged = dict.fromkeys(name for row in run.log.rows if "loss" in row for name in row)
        panels = panels + [(name, "mean over the batch", {name: name}) for name in logged if name not in drawn]
    panels = [panel for panel in panels if any(run.log.column(name)[0] for name in panel[2].values())]
    fig, axes = figure(len(panels), columns=2)
    chance = flatten({"eval": run.chance})
    for ax, (title, label, lines) in zip(axes, panels):
        for legend, name in lines.items():
            at, values = run.log.column(name, x)
            if at:
                ax.plot(at, values, label=legend, marker="." if len(at) < 12 else "")
        if guesses := {chance[name] for name in lines.values() if name in chance}:
            ax.hlines([*guesses], *ax.get_xlim(), color="grey", ls=":", lw=1, label="chance")
        ax.set(title=title, xlabel=x.replace("_", " "), ylabel=label)
        whole_ticks(ax)
        if len(ax.get_legend_handles_labels()[1]) > 1:
            legend_above(ax)
    save_figure(fig, path)


# ======================================================= examples ====================================================
def picture(data, i, frames=4):
    """Example i as a picture (H, W, 3) uint8: the image, or up to `frames` frames side by side; white if it cannot be
    read, as a few of a training set, or has features for pixels."""
    try:
        x = data.read(i)                                         # (3, H, W), (T, 3, H, W) or features (T, F)
    except Exception:
        x = torch.empty(0, 0)
    if x.ndim == 2:
        return np.full((32, 32, 3), 255, np.uint8)
    if x.ndim == 4:
        some = np.linspace(0, len(x) - 1, min(frames, len(x))).round().astype(int)
        x = torch.cat([x[k] for k in some], -1)                  # (3, H, frames * W)
    return x.permute(1, 2, 0).numpy()


def draw_examples(table, path, title, width, words):
    """Draws pictures in rows, each with words above and below.

    Args: table: [(words on the left, [(picture (H, W, 3), above, below, whether it is right: a green frame)])]; width:
        of a picture in inches; words: inches for those above and below."""
    columns, (high, wide) = max(len(row) for _, row in table), table[0][1][0][0].shape[:2]
    fig, axes = figure(columns * len(table), columns, width, width * high / wide + words)
    fig.set_figwidth(columns * width + 1.9)                      # room for the words on the left
    for line, (label, row) in zip(axes.reshape(len(table), columns), table):
        line[0].set_ylabel(wrap(label, 18, max_lines=4), rotation=0, ha="right", va="center", labelpad=8)
        for ax, (pixels, above, below, right) in zip(line, row):
            ax.imshow(pixels)
            ax.set(xticks=[], yticks=[], title=above, xlabel=below)
            for spine in ax.spines.values():
                spine.set(visible=True, color="tab:green" if right else "lightgrey", linewidth=3 if right else 1)
        for ax in line[len(row):]:
            ax.set_axis_off()
    fig.suptitle(title)
    save_figure(fig, path)


def kind_of(pieces):
    """What the pieces of an evaluation are of, image or video."""
    return "video" if frames_of(pieces["data"]) else "image"


def some_queries(pieces, queries):
    """Rows of captions: the first caption of at most `queries` examples, which are drawn with a fixed seed."""
    items = np.sort(np.random.default_rng(0).permutation(len(pieces["image"]))[:queries])
    return [int(np.flatnonzero(pieces["owner"] == i)[0]) for i in items if (pieces["owner"] == i).any()]


def draw_retrieval(pieces, path, queries=6, bias=None):
    """Draws a few queries with their first images or strips of frames by rank.

    Args: pieces: see the top; bias (M,): as in common.retrieval_metrics."""
    rows = some_queries(pieces, queries)
    sim = normalize(pieces["text"][rows]) @ normalize(pieces["image"]).T  # (q, M)
    sim = sim if bias is None else sim + bias
    hits = [(pieces["texts"][row], set(pieces["positives"][row].tolist()), s, [f"{x:.2f}" for x in s])
            for row, s in zip(rows, sim)]
    draw_hits(pieces, hits, path, f"{'cosine' if bias is None else 'adjusted similarity'} below")


def draw_hits(pieces, hits, path, title):
    """Draws a row per query: its text, then its first five images or three strips, right ones framed in green.

    Args: hits: [(words, right items, similarity of each item (M,), words below each)]."""
    data, it, table = pieces["data"], kind_of(pieces), []
    first, width = (3, 2.4) if it == "video" else (5, 1.4)
    for words, right, sim, below in hits:
        best = sim.topk(min(first, len(sim))).indices.tolist()
        table.append((words, [(picture(data, int(pieces["index"][j])), f"rank {k}", below[j], j in right)
                              for k, j in enumerate(best, 1)]))
    draw_examples(table, path, f"{data.name} ({data.split}): text -> {it}, the first of {len(pieces['image'])}; "
                               f"green = right, {title}", width, words=0.5)


def draw_pairs(pieces, path):
    """Draws the pairs with the lowest and the highest cosine, as pictures with their captions."""
    sim = (normalize(pieces["text"]) * normalize(pieces["image"][pieces["owner"]])).sum(1)       # (C,)
    order, data = sim.argsort().tolist(), pieces["data"]
    n = max(1, min(6, len(order) // 2))
    table = [(label, [(picture(data, int(pieces["index"][pieces["owner"][row]])), f"cos {sim[row]:.2f}",
                       wrap(pieces["texts"][row], 20), False) for row in rows])
             for label, rows in (("lowest", order[:n]), ("highest", order[-n:][::-1]))]
    draw_examples(table, path, f"{data.name} ({data.split}): positive pairs with the lowest (top) and highest (bottom) "
                               "cosine", width=1.7, words=1.1)


def draw_answers(pieces, path):
    """Draws four questions with a right and four with a wrong answer, chosen with a fixed seed.

    pieces: of evaluation/answers.py."""
    data, index, hits = pieces["data"], pieces["index"], np.asarray(pieces["hits"])
    questions, answers = data.column("question"), data.column("answer")
    order, table = np.random.default_rng(0).permutation(len(index)), []
    for label, those in (("right", order[hits[order] > 0]), ("wrong", order[hits[order] == 0])):
        rows = [(int(index[r]), pieces["given"][r]) for r in those[:4]]
        table.append((label, [(picture(data, i), wrap(questions[i], 34), f"given: {wrap(given, 27)}"
                               + f"\nright: {wrap(answers[i], 27)}" * (label == "wrong"), label == "right")
                              for i, given in rows]))
    title = f"{data.name} ({data.split}): answers, {100 * hits.mean():.1f} % of {len(hits)} right"
    draw_examples([row for row in table if row[1]], path, title, width=2.6, words=0.7)


# ======================================================= histograms ==================================================
def similarity_histograms(pieces, bins=100):
    """Histograms (densities) of the cosines of positive and negative pairs over -1..1: {edges, positive, negative}, and
    the threshold of TeMo's Figs. 4 and 5, the edge of the first bin, above the negatives' mode, where positives are
    denser (None if they nowhere are).

    Uses at most 2,000 images and their captions. The result can be written as JSON."""
    image, text = normalize(pieces["image"][:2000]), normalize(pieces["text"])  # (m, D), (C, D)
    keep = [k for k, o in enumerate(pieces["owner"]) if o < len(image)]
    sim = text[keep] @ image.T                                   # (c, m)
    mask = torch.zeros(len(keep), len(image), dtype=torch.bool)  # (c, m) True on positives
    for r, k in enumerate(keep):
        mask[r, [j for j in pieces["positives"][k].tolist() if 0 <= j < len(image)]] = True
    edges = np.linspace(-1, 1, bins + 1)
    counts = [(np.histogram(x.numpy(), edges)[0], max(1, len(x))) for x in (sim[mask], sim[~mask])]
    positive, negative = ((count / pairs * bins / 2).tolist() for count, pairs in counts)        # (bins,) densities
    crossed = [k for k in range(int(np.argmax(negative)), bins) if positive[k] > negative[k]]
    return {"edges": edges.tolist(), "positive": positive, "negative": negative,
            "threshold": edges[crossed[0]].item() if crossed else None}


def draw_histograms(stages, path, title):
    """Draws negative (left) and positive (right) pairs, with a line at the threshold.

    stages: {name: similarity_histograms(...)}: before, after."""
    fig, axes = figure(2)
    kinds = "negative", "positive"
    used = np.any([h[kind] for h in stages.values() for kind in kinds], axis=0)          # (bins,) some pair is there
    for ax, kind in zip(axes, kinds):
        for k, (name, h) in enumerate(stages.items()):
            edges = np.array(h["edges"])
            ax.stairs(h[kind], edges, label=name, fill=True, color=f"C{k}", alpha=0.5)
            if h["threshold"] is not None:
                ax.axvline(h["threshold"], ymax=0.6, color=f"C{k}", ls=":")
        ax.set(title=f"{kind} pairs", xlabel="cosine", ylabel="density",
               xlim=(edges[:-1][used].min() - 0.04, edges[1:][used].max() + 0.04))
        ax.locator_params(axis="x", nbins=5)                               # more numbers would run into each other
        if len(stages) > 1:
            legend_above(ax)
    fig.suptitle(f"{title}\nlines: above the negatives' mode, the first cosine where positives are denser")
    save_figure(fig, path)
