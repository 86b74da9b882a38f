"""The picture of mama.py's weights; the paper's Figure 4, right."""

import numpy as np

from tools import figures


def draw_weights(tensors, weighting, path):
    """Fig. 4, right: weight over loss, along the run where a network gives it, and of the pairs of the last batch."""
    fig, axes = figures.figure(2 if "curves" in tensors else 1)
    if "curves" in tensors:
        curves, grid = tensors["curves"], tensors["loss_grid"]             # (K, 1 + 64), (64,)
        some = np.unique(np.linspace(0, len(curves) - 1, min(5, len(curves))).round().astype(int)).tolist()
        for turn, k in enumerate(some):
            axes[0].plot(grid, curves[k, 1:], label=f"step {curves[k, 0]:.0f}", color=f"C{turn}",
                         **figures.line_style(turn, len(some)))
        axes[0].set(title="weight over loss along the run (Fig. 4)", xlabel="L_i, nats", ylabel="w_i")
        axes[0].legend(frameon=False, fontsize=8)
    sample, weight, swapped = tensors["last_batch"].unbind(1)              # (N,) each
    for label, those in (("matched", swapped == 0), ("mismatched", swapped == 1)):
        if those.any():
            axes[-1].scatter(sample[those], weight[those], s=14, alpha=0.7, label=label)
    axes[-1].set(title="the pairs of the last batch", xlabel="L_i, nats", ylabel="w_i")
    axes[-1].legend(frameon=False, fontsize=8)
    fig.suptitle(f"--weighting {weighting}", fontsize=10)
    figures.save_figure(fig, path)
