"""Pictures of runs and evaluations, fit to be shown: titles are not cut, ticks are whole steps, no panel is empty.

    from contrastive.figures.base import figure, save_figure
    fig, (left, right) = figure(2)
    left.plot(steps, loss)
    right.plot(steps, tau)
    save_figure(fig, folder / "mine.png")      # or .pdf

`pieces` is what `retrieval_pieces` returns: image (M, D), text (C, D), owner (C,) the row of each caption's image,
texts (C captions), index (M,) into data, positives (C, P), data.
"""

import contextlib
import math
import textwrap
import warnings

from contrastive.data.table import has_clips
from contrastive.engine.processes import first_line, say, slug
from contrastive.evaluation.metrics import normalize

import numpy as np
import torch


def draw_picture(path, function, *args, **options):
    """Draws one picture, function(*args, path, **options). If it fails, it is left out with a message."""
    try:
        function(*args, path, **options)
    except Exception as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # no half-written pictures
        say(f"{path.name} cannot be drawn and is left out: {type(error).__name__}: {first_line(error)}")


def by_set(pieces):
    """[(name, suffix of its pictures' file names, pieces)] of the sets of a run; the first set has no suffix."""
    return [(name, f"_{slug(name)}" if k else "", piece) for k, (name, piece) in enumerate(pieces.items())]


GREEN, GREY = "tab:green", "lightgrey"
LETTERS = 11  # points, for all text: readable in half a column of a paper, and from the back of a room
DASHES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 1.5, 1, 1.5)))
MARKERS = "os^D"


# ======================================================= any figure ==================================================
def figure(columns, rows=1, width=3.6, height=2.7, panels=0):
    """A matplotlib figure without a display: (fig, flat array of axes).

    Args: columns, rows: of the grid; width, height: of one panel in inches; panels: how many places of the grid are
        used, 0 = all. If the last row is not full, its panels are wider.
    """
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * columns, height * rows), layout="constrained")
    rest = (panels or rows * columns) - (rows - 1) * columns     # panels of the last row
    units = math.lcm(columns, max(1, rest))                      # a panel spans units / (panels of its row)
    grid = fig.add_gridspec(rows, units)
    axes = []
    for row in range(rows):
        in_row = rest if row == rows - 1 else columns
        for k in range(in_row):
            axes.append(fig.add_subplot(grid[row, k * units // in_row:(k + 1) * units // in_row]))
            axes[-1].spines[["top", "right"]].set_visible(False)
    return fig, np.array(axes, dtype=object)


def save_figure(fig, path):
    """Writes a figure as .png or .pdf. Empty panels say so, '$' is not read as TeX, and titles are made to fit."""
    from matplotlib import rc_context

    panels = {}  # all axes of one place: a panel and those drawn over it with twinx
    for ax in fig.axes:
        panels.setdefault(ax.get_subplotspec() or ax, []).append(ax)
    for axes in panels.values():
        if axes[0].axison and not any(_has_data(ax) for ax in axes):
            _say_no_data(axes)
    for text in _written(fig):
        text.set_parse_math(False)
        text.set_fontsize(LETTERS)
    for ax in fig.axes:
        ax.tick_params(labelsize=LETTERS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a missing letter is drawn as a box, no warning
        fig.draw_without_rendering()  # lays out the panels, so that the space for their titles is known
        for ax in fig.axes:
            _fit_labels(ax)
        if fig.get_suptitle():
            _fit(fig._suptitle, fig.bbox.width)
        with rc_context({"pdf.fonttype": 42}):  # TrueType: journals refuse matplotlib's default, Type 3
            fig.savefig(path, dpi=200)


def line_style(k, lines):
    """Keywords of `plot` for line k of `lines`. Later lines are thinner and dashed, so that no line hides another."""
    return {"ls": DASHES[k % len(DASHES)], "lw": 1.5 + 0.6 * min(3, lines - 1 - k)}


def marker_style(k, lines):
    """Keywords of `plot` for the points of line k of `lines`; later ones are smaller, as in `line_style`."""
    return {"marker": MARKERS[k % len(MARKERS)], "ms": 3 + 2 * min(3, lines - 1 - k)}


def legend_above(ax):
    """A legend in room of its own: the y axis grows by what it takes, so that it covers nothing that is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    renderer = FigureCanvasAgg(ax.figure).get_renderer()  # measures text; the figure need not be laid out for it
    names = len(ax.get_legend_handles_labels()[0])
    for columns in (2, 1) if names > 2 else (1,):
        legend = ax.legend(loc="upper center", ncols=columns, frameon=False, handlelength=2.4 / columns,
                           columnspacing=0.8, handletextpad=0.5, borderaxespad=0, fontsize=LETTERS)
        box = legend.get_window_extent(renderer)
        if box.width <= 1.2 * ax.bbox.width:  # the layout makes panels wider than they are here, and lower
            break
    low, high = ax.get_ylim()
    taken = min(0.6, 1.3 * box.height / ax.bbox.height)
    ax.set_ylim(low, low + (high - low) / (1 - taken))


def whole_ticks(ax):
    """Ticks of the x axis at whole numbers only: steps, samples, epochs (5k = 5,000)."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def _has_data(ax):
    points = any(np.isfinite(np.asarray(line.get_ydata(orig=False), dtype=float)).any() for line in ax.lines)
    scattered = any(len(c.get_offsets()) for c in ax.collections)
    return bool(points or scattered or ax.images or ax.patches or ax.texts)


def _say_no_data(axes):
    first, *over = axes
    for ax in over:
        ax.set_axis_off()
    if first.get_legend():
        first.get_legend().remove()
    first.xaxis.set_visible(False)
    first.yaxis.set_visible(False)
    first.spines[:].set_visible(False)
    first.text(0.5, 0.5, "no data", ha="center", va="center", color="grey", transform=first.transAxes)


def _written(fig):
    """All texts but the tick labels, in which matplotlib itself uses '$' on logarithmic axes."""
    for ax in fig.axes:
        yield from (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts)
        if ax.get_legend():
            yield from (ax.get_legend().get_title(), *ax.get_legend().get_texts())
    if fig.get_suptitle():
        yield fig._suptitle


def _fit_labels(ax):
    place, width, height = ax.get_subplotspec(), *ax.figure.bbox.size
    columns, rows = 1, 1
    if place:
        grid = place.get_gridspec()
        columns, rows = grid.ncols / len(place.colspan), grid.nrows / len(place.rowspan)
    middle = ax.bbox.x0 + ax.bbox.width / 2
    room = min(width / columns, 2 * middle, 2 * (width - middle))  # up to the neighbour and the border
    _fit(ax.title, room)
    _fit(ax.xaxis.label, room)
    if ax.yaxis.label.get_rotation() == 90:
        _fit(ax.yaxis.label, height / rows, side="height", lines=2)


def _fit(text, room, side="width", lines=3):
    """Wraps a text into at most `lines` lines, then shrinks it, until it fits into `room` pixels."""
    def size():
        return getattr(text.get_window_extent(), side)

    room, words = room - 12, text.get_text()  # with a margin on both sides
    if not words.strip() or size() <= room:
        return
    if "\n" not in words:
        for n in range(2, lines + 1):
            text.set_text("\n".join(textwrap.wrap(words, math.ceil(1.1 * len(words) / n), break_long_words=False)))
            if size() <= room:
                return
    text.set_fontsize(text.get_fontsize() * room / size())


# ======================================================= curves ======================================================
BATCH = [("learning rate", "lr", {"lr": "lr"}),  # panels for methods that train on pairs of image and text
         ("cosine", "mean over the batch", {"positive pairs": "pos_cos", "negative pairs": "neg_cos"}),
         ("spread (0 = collapsed, 1 = whole sphere)", "std x sqrt(D)", {"images": "std_image", "texts": "std_text"}),
         ("speed", "samples per second", {"all processes": "samples_per_s"})]


def draw_curves(log, panels, path, x="step"):
    """Draws logged numbers against optimiser steps or samples seen, in panels.

    Args: log: has column(name, x) -> (xs, values); panels: list of (title, y label, {legend: column of the log});
        x: step or samples_seen.
    """
    columns = min(2, len(panels))
    fig, axes = figure(columns, math.ceil(len(panels) / columns), panels=len(panels))
    for ax, (title, label, lines) in zip(axes, panels, strict=True):
        for k, (legend, name) in enumerate(lines.items()):
            at, values = log.column(name, x)
            points = marker_style(k, len(lines)) if len(at) < 12 else {}
            if at:
                ax.plot(at, values, label=legend, color=f"C{k}", **line_style(k, len(lines)), **points)
        ax.set(title=title, xlabel={"step": "step", "samples_seen": "samples seen"}[x], ylabel=label)
        whole_ticks(ax)
        if len(lines) > 1 and ax.lines:
            legend_above(ax)
    save_figure(fig, path)


# ======================================================= examples ====================================================
def picture(data, i, frames=4):
    """Example i as a picture (H, W, 3) uint8: the image, or up to `frames` frames side by side.

    Raises: OSError, ValueError if it cannot be read.
    """
    x = data.read(i)                                             # (3, H, W), (T, 3, H, W) or features (T, F)
    if x.ndim == 2:                                              # features: their first columns as grey values
        grey = 255 * (x[:, :4 * len(x)] - x.min()) / (x.max() - x.min()).clamp(min=1e-9)  # (T, up to 4 T)
        return grey.byte()[..., None].expand(-1, -1, 3).numpy()
    if x.ndim == 4:
        some = np.linspace(0, len(x) - 1, min(frames, len(x))).round().astype(int)
        x = torch.cat([x[k] for k in some], -1)                  # (3, H, frames * W)
    return x.permute(1, 2, 0).numpy()


def show(ax, data, i, colour=GREY, width=1):
    """Draws example i into a panel, with a frame around it and no ticks."""
    pixels = picture(data, i)
    every = max(1, min(pixels.shape[:2]) // 256)                 # thin out photographs: they are drawn small
    ax.imshow(pixels[::every, ::every])
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set(visible=True, color=colour, linewidth=width)


def some_queries(pieces, queries):
    """Rows of captions: the first caption of at most `queries` examples, which are drawn with a fixed seed."""
    owner, rng = pieces["owner"], np.random.default_rng(0)
    items = np.sort(rng.permutation(len(pieces["image"]))[:queries])
    return [int(np.flatnonzero(owner == i)[0]) for i in items if (owner == i).any()]


def draw_retrieval(pieces, path, queries=6, bias=None):
    """Draws queries with their first images or strips of frames, by rank; a green frame marks a right one.

    Args: pieces: see the top; queries: how many, drawn with a fixed seed; bias (M,): as in common.retrieval_metrics.
    """
    data, index, rows = pieces["data"], pieces["index"], some_queries(pieces, queries)
    sim = normalize(pieces["text"][rows]) @ normalize(pieces["image"]).T  # (q, M)
    sim = sim if bias is None else sim + bias
    best = sim.topk(min(hits_shown(data, index), sim.shape[1]), dim=1)  # (q, top)
    hits = [(pieces["texts"][row], set(pieces["positives"][row].tolist()), best.indices[r].tolist(),
             [f"{v:.2f}" for v in best.values[r]]) for r, row in enumerate(rows)]
    below = "cosine" if bias is None else "adjusted similarity"
    top = best.indices.shape[1]
    draw_hits(pieces, hits, path, f"first {top} of {len(pieces['image'])}; green = right, {below} below")


def kind_of(pieces):
    """What the pieces of an evaluation are of, image or video."""
    return "video" if has_clips(pieces["data"]) else "image"


def hits_shown(data, index):
    """Number of answers drawn per query: five images, or three strips of frames."""
    return 5 if cell(data, index)[0] < 2 else 3


def draw_hits(pieces, hits, path, title):
    """Draws a row per query: its text on the left, then its first images or strips by rank, right ones framed in green.

    Args: hits: [(words, right items, items by rank, text below each)]."""
    data, index = pieces["data"], pieces["index"]
    columns, (width, height) = max(len(found) for _, _, found, _ in hits), cell(data, index)
    fig, axes = figure(columns, len(hits), width, height)
    fig.set_figwidth(columns * width + 1.9)                      # room for the captions on the left
    axes = axes.reshape(len(hits), columns)
    for row, (words, right, found, below) in zip(axes, hits, strict=True):
        row[0].set_ylabel(wrap(words, 18), rotation=0, ha="right", va="center", labelpad=8)
        for ax, j, number in zip(row, found, below):
            show(ax, data, int(index[j]), *((GREEN, 3) if j in right else (GREY, 1)))
            ax.set_xlabel(number, labelpad=2)
    for c in range(columns):
        axes[0, c].set_title(f"rank {c + 1}")
    fig.suptitle(f"{data.name} ({data.split}): text -> {kind_of(pieces)}, {title}")
    save_figure(fig, path)


def draw_pairs(pieces, path, n=6):
    """Draws the pairs with the lowest and the highest cosine, as pictures with their captions."""
    image_of_text = pieces["image"][pieces["owner"]]             # (C, D)
    sim = (normalize(pieces["text"]) * normalize(image_of_text)).sum(1)  # (C,)
    order, data = sim.argsort().tolist(), pieces["data"]
    n = min(n, len(order) // 2) or 1
    width, height = cell(data, pieces["index"])
    fig, axes = figure(n, 2, width=width + 0.3, height=height + 0.9)
    for ax, row in zip(axes, order[:n] + order[-n:][::-1], strict=True):
        show(ax, data, int(pieces["index"][pieces["owner"][row]]))
        ax.set_title(f"cos {sim[row]:.2f}")
        ax.set_xlabel(wrap(pieces["texts"][row], 20))
    axes[0].set_ylabel("lowest")
    axes[n].set_ylabel("highest")
    fig.suptitle(f"{data.name} ({data.split}): positive pairs with the lowest (top) and highest (bottom) cosine")
    save_figure(fig, path)


def draw_answers(pieces, path, each=4):
    """Draws questions with the given answer and, if it is wrong, the right one; a green frame marks right answers.

    Args: pieces: of evaluation/answers.py; each: how many right and how many wrong ones, drawn with a fixed seed.
    """
    data, index, hits = pieces["data"], pieces["index"], np.asarray(pieces["hits"])
    order = np.random.default_rng(0).permutation(len(index))
    rows = [r for hit in (True, False) for r in order[hits[order] == hit][:each]]
    width, height = cell(data, index)
    columns = min(each, len(rows))
    fig, axes = figure(columns, math.ceil(len(rows) / columns), max(2.6, width), height + 0.7, panels=len(rows))
    for ax, r in zip(axes, rows, strict=True):
        show(ax, data, int(index[r]), *((GREEN, 3) if hits[r] else (GREY, 1)))
        question, answer = (data.column(c)[int(index[r])] for c in ("question", "answer"))
        ax.set_title(wrap(question, 34))
        given = [f"right: {answer}"] if hits[r] else [f"given: {pieces['given'][r]}", f"right: {answer}"]
        ax.set_xlabel("\n".join(wrap(words, 34) for words in given))
    fig.suptitle(f"{data.name} ({data.split}): answers, {100 * hits.mean():.1f} % of {len(hits)} right")
    save_figure(fig, path)


def cell(data, index):
    """Width and height in inches of a panel for this set's pictures, from the first of them."""
    high, wide = picture(data, int(index[0])).shape[:2]
    return min(2.4, 1.4 * max(1, wide / high)), 1.6 if wide < 2 * high else 1.1


def wrap(text, width, lines=3):
    """A text wrapped at words into at most `lines` lines of at most `width` letters."""
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" ..."))


# ======================================================= histograms ==================================================
def similarity_histograms(pieces, bins=100):
    """Histograms (densities) of the cosines of positive and negative pairs over -1..1: {edges, positive, negative}, and
    the threshold of TeMo's Figs. 4 and 5, the edge of the first bin, above the negatives' mode, where positives are
    denser (None if they nowhere are).

    Uses at most 2,000 images and their captions. The result can be written as JSON.
    """
    image, text = normalize(pieces["image"][:2000]), normalize(pieces["text"])  # (m, D), (C, D)
    keep = [k for k, o in enumerate(pieces["owner"]) if o < len(image)]
    sim = text[keep] @ image.T                                   # (c, m)
    mask = torch.zeros(len(keep), len(image), dtype=torch.bool)  # (c, m) True on positives
    for r, k in enumerate(keep):
        mask[r, [j for j in pieces["positives"][k].tolist() if 0 <= j < len(image)]] = True
    edges = np.linspace(-1, 1, bins + 1)

    def density(x):
        return (np.histogram(x.numpy(), edges)[0] / max(1, x.numel()) * bins / 2).tolist()

    positive, negative = density(sim[mask]), density(sim[~mask])
    crossed = [k for k in range(int(np.argmax(negative)), bins) if positive[k] > negative[k]]
    return {"edges": edges.tolist(), "positive": positive, "negative": negative,
            "threshold": edges[crossed[0]].item() if crossed else None}


def draw_histograms(stages, path, title):
    """Draws negative (left) and positive (right) pairs, with a line at the threshold.

    stages: {name: similarity_histograms(...)}: before, after."""
    from matplotlib.colors import to_rgba

    fig, axes = figure(2)
    for ax, kind in zip(axes, ("negative", "positive"), strict=True):
        for k, (name, h) in enumerate(stages.items()):
            if any(h[kind]):
                ax.stairs(h[kind], h["edges"], label=name, fill=True, facecolor=to_rgba(f"C{k}", 0.35),
                          edgecolor=f"C{k}", lw=1.2, ls=DASHES[k % len(DASHES)])
            if h.get("threshold") is not None:
                ax.axvline(h["threshold"], ymax=0.6, color=f"C{k}", lw=1.2, ls=DASHES[k % len(DASHES)])
        ax.set(title=f"{kind} pairs", xlabel="cosine", ylabel="density", xlim=_mass(stages))
        if ax.patches and len(stages) > 1:
            legend_above(ax)
    fig.suptitle(f"{title}\nlines: above the negatives' mode, the first cosine where positives are denser")
    save_figure(fig, path)


def _mass(stages):
    """The range of the cosine axis, the same for both panels, in which any stage has pairs."""
    used = [(low, high) for h in stages.values() for kind in ("negative", "positive")
            for low, high, density in zip(h["edges"], h["edges"][1:], h[kind], strict=False) if density]
    if not used:
        return -1, 1
    low, high = min(u[0] for u in used), max(u[1] for u in used)
    air = 0.08 * (high - low)
    return low - air, high + air
