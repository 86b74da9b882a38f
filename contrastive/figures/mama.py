"""Pictures of MAMA: weights (Fig. 4, right), short and detailed captions (Tables 9, 10), described clips (Fig. 6)."""

from contrastive.figures import base
from contrastive.figures.base import figure, line_style, save_figure, wrap

import numpy as np
from safetensors.torch import load_file


def draw_weights(tensors, weighting, path):
    """Fig. 4, right: weights against losses, over the run (if a network gives them) and of the last batch's pairs."""
    fig, axes = figure(2 if "curves" in tensors else 1)
    if "curves" in tensors:
        curves, grid = tensors["curves"], tensors["loss_grid"]             # (K, 1 + 64), (64,)
        some = np.unique(np.linspace(0, len(curves) - 1, min(5, len(curves))).round().astype(int)).tolist()
        for turn, k in enumerate(some):
            axes[0].plot(grid, curves[k, 1:], label=f"step {curves[k, 0]:.0f}", **line_style(turn, len(some)))
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

    Args: rows: [(row of data, [short, detailed], [[score of each run] of each caption])]; runs: their names."""
    cells = [(base.picture(data, i), "", "\n\n".join(
        f"{wrap(caption, 36, max_lines=5)}\n{' | '.join(f'{score:.3f}' for score in of_runs)}"
        for caption, of_runs in zip(captions, scores)), False) for i, captions, scores in rows]
    base.draw_examples([("", cells[k:k + 2]) for k in range(0, len(cells), 2)], path,
                       f"{title}\nscores by {' | '.join(runs)}", width=3.2, words=1.8)


def draw_descriptions(clips, path, title):
    """Draws clips [(frames (n, 3, H, W) uint8, words)], each as a strip, with a model's caption of them (Fig. 6)."""
    cells = [(np.concatenate([*frames.permute(0, 2, 3, 1).numpy()], axis=1), "", wrap(words, 50), False)
             for frames, words in clips]                                   # (H, n * W, 3) each
    base.draw_examples([("", cells[k:k + 2]) for k in range(0, len(cells), 2)], path, title, width=4.2, words=0.3)


def draw(run):
    """The pictures of a run: curves, weights (Fig. 4, right), retrieval or answers."""
    args, val = run.args, f"eval/{next(iter(run.val_pieces or run.test_pieces), '')}"
    ways = {"t->v": "text_to_image", "v->t": "image_to_text"}
    scores = {f"{k}, {label}": f"{val}/{way}/{k}" for label, way in ways.items() for k in ("R@1", "R@10")}
    scored, kind, function = "retrieval, val", "retrieval", base.draw_retrieval
    if args.task != "retrieval":
        scores, scored = {"val": f"{val}/accuracy", "training batch": "answered"}, "answers"
        kind, function = "answers", base.draw_answers
    run.picture("curves.png", base.draw_curves, run, [
        ("loss", "nats", {"weighted, Eq. 8": "loss", "L_i, all pairs": "L", "L_i, matched": "L_matched",
                          "L_i, mismatched": "L_mismatched"}),
        ("margin", "mu, radians", {"mu": "mu"}),
        ("weights", "mean over the batch", {"all": "w", "matched": "w_matched", "mismatched": "w_mismatched"}),
        *base.BATCH, (scored, "%", scores)], rest=True)
    if args.weighting != "none":
        run.picture("weights.png", draw_weights, load_file(run.folder / "weights.safetensors"), args.weighting)
    for _, suffix, pieces in base.by_set(run.test_pieces):
        run.picture(f"{kind}{suffix}.png", function, pieces)
