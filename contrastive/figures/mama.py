"""Pictures of mama.py: weights (Fig. 4, right) and described clips (Fig. 6; tools/caption.py)."""

from contrastive.figures import base
from contrastive.figures.base import figure, save_figure

import numpy as np
from safetensors.torch import load_file

NUM_CURVES = 5  # of the weights along a run


def draw_weights(tensors, weighting, path):
    """Draws weights against losses (Fig. 4, right): of a network over the run, and of pairs.

    Args:
        tensors: the content of weights.safetensors. last_batch (N, 3): loss, weight and 1 if
            mismatched; of a network loss_grid (64,) and curves (K, 1 + 64), a step and its weights.
        weighting: its name, for the title.
    """
    if "curves" in tensors:
        fig, (left, right) = figure(2)
        draw_weight_curves(left, tensors["loss_grid"], tensors["curves"])
    else:
        fig, (right,) = figure(1)
    sample, weight, mismatched = tensors["last_batch"].unbind(1)           # (N,) each
    right.set(title="the pairs of the last batch", xlabel="L_i, nats", ylabel="w_i")
    if mismatched.any():
        for label, value in (("matched", 0), ("mismatched", 1)):
            pairs = mismatched == value                                    # (N,) bool
            right.scatter(sample[pairs], weight[pairs], s=14, alpha=0.7, label=label)
        base.legend_above(right)
    else:
        # of the user's own data nobody knows which captions are wrong
        right.scatter(sample, weight, s=14, alpha=0.7)
    fig.suptitle(f"--weighting {weighting}")
    save_figure(fig, path)


def draw_weight_curves(ax, grid, curves):
    """Draws the weights (K, 1 + 64) of the losses grid (64,) at up to five of K steps."""
    chosen = np.linspace(0, len(curves) - 1, NUM_CURVES).round().astype(int)
    for k in np.unique(chosen):
        step = curves[k, 0]
        ax.plot(grid, curves[k, 1:], label=f"step {step:.0f}")
    ax.set(title="weight over loss along the run (Fig. 4)", xlabel="L_i, nats", ylabel="w_i")
    base.legend_above(ax)


def draw_clips(clips, path, title, width, words):
    """Draws clips two in a row, with descriptions (Fig. 6).

    Args:
        clips: [(picture (H, W, 3), words below it)].
        width: of a picture, in inches.
        words: height of the words, in inches.
    """
    examples = [base.Example(pixels, "", below) for pixels, below in clips]
    rows = []
    for k in range(0, len(examples), 2):
        rows.append(("", examples[k:k + 2]))
    base.draw_examples(rows, path, title, width=width, words=words)


def draw(run):
    """The pictures of a run: curves, weights (Fig. 4, right), retrieval or answers."""
    args = run.args
    draw_curves(run)
    if args.weighting != "none":
        tensors = load_file(run.folder / "weights.safetensors")
        draw_weights(tensors, args.weighting, run.folder / "weights.png")
    for _, suffix, pieces in base.by_set(run.test_pieces):
        if args.task == "retrieval":
            base.draw_retrieval(pieces, run.folder / f"retrieval{suffix}.png")
        else:
            base.draw_answers(pieces, run.folder / f"answers{suffix}.png")


def draw_curves(run):
    """The curves of a run, with the retrieval or the accuracy of its first evaluation set."""
    if run.args.task == "retrieval":
        scores = base.recall_panel(run)
    else:
        name = next(iter(run.val_pieces or run.test_pieces), "")
        accuracies = {"val": f"eval/{name}/accuracy", "training batch": "answered"}
        scores = ("answers", "%", accuracies)
    losses = {
        "weighted, Eq. 8": "loss",
        "L_i, all pairs": "L",
        "L_i, matched": "L_matched",
        "L_i, mismatched (stays high)": "L_mismatched"}
    weights = {"all": "w", "matched": "w_matched", "mismatched": "w_mismatched"}
    base.draw_training_curves(run, [
        ("loss", "nats", losses),
        scores,
        ("temperature", "tau", {"tau": "tau"}),
        ("margin", "mu, radians", {"mu": "mu"}),
        ("weights", "mean over the batch", weights),
        *base.batch_panels()])
