"""Pictures of MAMA: weights (Fig. 4, right), short and detailed captions (Tables 9, 10), described clips (Fig. 6)."""

from contrastive.figures import base
from contrastive.figures.base import figure, save_figure, wrap

import numpy as np
from safetensors.torch import load_file

WRAP, LINES = 36, 5  # letters per line and lines per caption beside a video
GAP = 4  # px between frames


def draw_weights(tensors, weighting, path):
    """Fig. 4, right: weights against losses, over the run (if a network gives them) and of the last batch's pairs."""
    fig, axes = figure(2 if "curves" in tensors else 1)
    if "curves" in tensors:
        curves, grid = tensors["curves"], tensors["loss_grid"]             # (K, 1 + 64), (64,)
        some = np.unique(np.linspace(0, len(curves) - 1, min(5, len(curves))).round().astype(int)).tolist()
        for turn, k in enumerate(some):
            axes[0].plot(grid, curves[k, 1:], label=f"step {curves[k, 0]:.0f}", color=f"C{turn}",
                         **base.line_style(turn, len(some)))
        axes[0].set(title="weight over loss along the run (Fig. 4)", xlabel="L_i, nats", ylabel="w_i")
        base.legend_above(axes[0])
    sample, weight, swapped = tensors["last_batch"].unbind(1)              # (N,) each
    for label, those in (("matched", swapped == 0), ("mismatched", swapped == 1)):
        if those.any():
            axes[-1].scatter(sample[those], weight[those], s=14, alpha=0.7, label=label)
    axes[-1].set(title="the pairs of the last batch", xlabel="L_i, nats", ylabel="w_i")
    base.legend_above(axes[-1])
    fig.suptitle(f"--weighting {weighting}")
    save_figure(fig, path)


def draw_scores(data, rows, runs, path, title):
    """Draws videos, each with a short and a detailed caption and the score that every run gives to both.

    Args: rows: [(row of data, [short, detailed], [[score of each run] of each caption])]; runs: their names.
    """
    wide = 3.4 + 1.1 * len(runs)                                 # inches of the captions and their scores
    strip = base.picture(data, rows[0][0])
    left = min(4.0, max(1.6, 1.2 * strip.shape[1] / strip.shape[0]))
    fig, axes = figure(2, len(rows), (left + wide) / 2, 1.45)
    grid = axes[0].get_gridspec()
    grid.set_width_ratios([left, wide])
    columns = [1 - 1.1 * (len(runs) - k - 0.5) / wide for k in range(len(runs))]
    for at, (i, captions, scores) in enumerate(rows):
        strip, beside = axes[2 * at:2 * at + 2]
        base.show(strip, data, i)
        beside.set_axis_off()
        beside.set(xlim=(0, 1), ylim=(0, 1))
        for caption, of_runs, y in zip(captions, scores, (0.8, 0.35), strict=True):
            beside.text(0, y, wrap(caption, WRAP, LINES) or "(nothing)", va="center")
            for x, score in zip(columns, of_runs, strict=True):
                beside.text(x, y, f"{score:.3f}", ha="center", va="center")
    for x, name in zip(columns, runs, strict=True):
        axes[1].text(x, 1.05, wrap(name, 15, 2), ha="center", va="bottom", fontweight="bold")
    fig.suptitle(title)
    save_figure(fig, path)


def draw_descriptions(clips, path, title, columns=2):
    """Draws clips, each as a strip of frames, with a model's caption of them (Fig. 6).

    Args: clips: [(frames (n, 3, H, W) uint8, words)].
    """
    columns, strips = min(columns, len(clips)), []
    for frames, _ in clips:
        apart = np.pad(frames.permute(0, 2, 3, 1).numpy(), ((0, 0), (0, 0), (0, GAP), (0, 0)), constant_values=255)
        strips.append(np.concatenate([*apart], axis=1)[:, :-GAP])    # (H, n * (W + GAP) - GAP, 3)
    height = 4.4 * max(strip.shape[0] / strip.shape[1] for strip in strips) + 0.6
    fig, axes = figure(columns, -(-len(clips) // columns), 4.4, height, panels=len(clips))
    for ax, strip, (_, words) in zip(axes, strips, clips, strict=True):
        ax.imshow(strip)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.set_xlabel(wrap(words, 60))
    fig.suptitle(title)
    save_figure(fig, path)


def draw(run):
    """The pictures of a run: curves, weights (Fig. 4, right), retrieval."""
    args, log = run.args, run.log
    val = next(iter(run.val_pieces or run.test_pieces), "")
    scores = {f"{k}, {label}": f"eval/{val}/{way}/{k}"
              for way, label in (("text_to_image", "t->v"), ("image_to_text", "v->t")) for k in ("R@1", "R@10")}
    if args.task != "retrieval":
        scores = {"val": f"eval/{val}/accuracy", "training batch": "answered"}
    kinds = {"all": "", "matched": "_matched", "mismatched": "_mismatched"}
    run.picture("curves.png", base.draw_curves, log, [
        ("loss", "nats", {"weighted, Eq. 8": "loss", "L_i, all pairs": "L"}
         | {f"L_i, {k}": f"L{v}" for k, v in kinds.items() if v and log.column(f"L{v}")[0]}),
        ("margin", "mu, radians", {"mu": "mu"}), ("learning rate", "lr", {"lr": "lr"}),
        ("weights", "mean over the batch", {k: f"w{v}" for k, v in kinds.items() if log.column(f"w{v}")[0]}),
        ("cosine", "mean over the batch", {"pairs": "pos_cos", "others": "neg_cos"}),
        ("answers" if args.task != "retrieval" else "retrieval, val", "%", scores)])
    if args.weighting != "none":
        tensors = load_file(run.folder / "weights.safetensors")
        run.picture("weights.png", draw_weights, tensors, args.weighting)
    kind, function = ("retrieval", base.draw_retrieval) if args.task == "retrieval" else ("answers", base.draw_answers)
    for _, suffix, pieces in base.by_set(run.test_pieces):
        run.picture(f"{kind}{suffix}.png", function, pieces)
