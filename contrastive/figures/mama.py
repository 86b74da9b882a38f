"""Pictures of MAMA: weights (Fig. 4, right), short and detailed captions (Tables 9, 10), described clips (Fig. 6)."""

from contrastive.figures import base
from contrastive.figures.base import figure, save_figure

import numpy as np
from safetensors.torch import load_file


def draw_weights(tensors, weighting, path):
    """Fig. 4, right: weights against losses, over the run (if a network gives them) and of the last batch's pairs."""
    fig, axes = figure(2 if "curves" in tensors else 1)
    if "curves" in tensors:
        curves, grid = tensors["curves"], tensors["loss_grid"]             # (K, 1 + 64), (64,)
        for k in np.unique(np.linspace(0, len(curves) - 1, 5).round().astype(int)):
            axes[0].plot(grid, curves[k, 1:], label=f"step {curves[k, 0]:.0f}")
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


def draw_clips(clips, path, title, width, words):
    """Draws clips [(picture (H, W, 3), words below it)], two in a row: descriptions (Fig. 6), or scores (Tables 9, 10).

    width: of a picture, inches.   words: inches for those below."""
    cells = [(pixels, "", below, False) for pixels, below in clips]
    base.draw_examples([("", cells[k:k + 2]) for k in range(0, len(cells), 2)], path, title, width=width, words=words)


def draw(run):
    """The pictures of a run: curves, weights (Fig. 4, right), retrieval or answers."""
    args, val = run.args, f"eval/{next(iter(run.val_pieces or run.test_pieces), '')}"
    ways = {"t->v": "text_to_image", "v->t": "image_to_text"}
    scores = {f"{k}, {label}": f"{val}/{way}/{k}" for label, way in ways.items() for k in ("R@1", "R@10")}
    scored, kind, function = "retrieval, val", "retrieval", base.draw_retrieval
    if args.task != "retrieval":
        scores, scored = {"val": f"{val}/accuracy", "training batch": "answered"}, "answers"
        kind, function = "answers", base.draw_answers
    base.draw_curves(run, [
        ("loss", "nats", {"weighted, Eq. 8": "loss", "L_i, all pairs": "L", "L_i, matched": "L_matched",
                          "L_i, mismatched (stays high)": "L_mismatched"}),
        ("margin", "mu, radians", {"mu": "mu"}),
        ("weights", "mean over the batch", {"all": "w", "matched": "w_matched", "mismatched": "w_mismatched"}),
        *base.BATCH, (scored, "%", scores)], run.folder / "curves.png", rest=True)
    if args.weighting != "none":
        tensors = load_file(run.folder / "weights.safetensors")
        draw_weights(tensors, args.weighting, run.folder / "weights.png")
    for _, suffix, pieces in base.by_set(run.test_pieces):
        function(pieces, run.folder / f"{kind}{suffix}.png")
