"""Draws what the five methods change, a panel each, from the functions of their scripts.

    python -m tools.methods                        # methods.png
    python -m tools.methods docs/methods.png
"""

from pathlib import Path

from contrastive.core.processes import clean_exit, print_main
from contrastive.engine.flags import OneLineErrorParser
from contrastive.figures.base import figure, save_figure

import numpy as np
import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules


def draw_methods(path):
    """Writes the figure: one row of five panels."""
    fig, axes = figure(5, width=3.1, height=2.9)
    draw_ts(axes[0])
    draw_mmts(axes[1])
    draw_ncl(axes[2])
    draw_mama(axes[3])
    draw_temo(axes[4])
    save_figure(fig, path)


def draw_ts(ax):
    """TS: the temperature of all pairs over the epochs of the paper."""
    epochs = np.arange(2000)
    tau = [temperature_schedules.temperature(epoch) for epoch in epochs]
    ax.plot(epochs, tau)
    ax.set(title="TS: one temperature\nthat swings", xlabel="epoch", ylabel="tau")


def draw_mmts(ax):
    """MM-TS: the temperature of a caption by the size of its cluster, at three moments."""
    sizes = torch.arange(1, 101)                                           # (K,) captions
    shift = mmts.cluster_shift(sizes, 0.02, 0.05)                          # (K,)
    for step, words in ((0, "highest"), (25, "middle"), (50, "lowest")):
        tau = mmts.sample_temperature(step, shift, 100, 0.02)              # (K,)
        ax.plot(sizes, tau, label=f"{words} of the schedule")
    ax.set(title="MM-TS: and grows with\nthe cluster of a caption",
           xlabel="captions in the cluster", ylabel="tau", ylim=(0, 0.11))
    ax.legend(loc="upper left")


def draw_ncl(ax):
    """NCL: the probability that each video collects from all texts, without and with biases."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.nn.functional.normalize(torch.randn(12, 8, generator=generator), dim=1)
    videos = texts + 0.5 * torch.randn(12, 8, generator=generator)
    sim = texts @ torch.nn.functional.normalize(videos, dim=1).T           # (m, n)
    gamma = 0.1
    _, bias = ncl.sinkhorn_biases(sim, gamma, iterations=10)               # (n,)
    before = (sim / gamma).softmax(1).sum(0)                               # (n,)
    after = ((sim + bias) / gamma).softmax(1).sum(0)                       # (n,)
    order = before.argsort()
    places = np.arange(len(order))
    ax.bar(places - 0.2, before[order], 0.4, label="cosines")
    ax.bar(places + 0.2, after[order], 0.4, label="with biases")
    ax.set(title="NCL: each item collects\nthe same probability", xlabel="video",
           ylabel="summed over texts", ylim=(0, 3.2))
    ax.set_xticks([])
    ax.legend(loc="upper left")


def draw_mama(ax):
    """MAMA: the cosine of a positive pair without and with the margin, which is subtracted from its
    angle."""
    sim = torch.linspace(-0.5, 1, 200)                                     # cosines
    ax.plot(sim, sim, label="no margin")
    for mu in (0.1, 0.2):
        ax.plot(sim, mama.cosine_with_margin(sim, mu), label=f"margin {mu} rad")
    ax.set(title="MAMA: a margin for positives;\nclean pairs teach weights",
           xlabel="cosine of a positive pair", ylabel="in the loss", ylim=(-0.6, 2))
    ax.legend(loc="upper left")


def draw_temo(ax):
    """TeMo: the temperature of a pair by its cosine, and the weights of the terms over the run."""
    sim = torch.linspace(-1, 1, 200)                                       # cosines
    ax.plot(sim, temo.modulated_temperature(sim), label="tau of a pair, by cosine")
    ax.set(title="TeMo: a temperature for\neach pair, blended in", xlabel="cosine of a pair",
           ylabel="tau", ylim=(0, 0.1))
    inset = ax.inset_axes([0.14, 0.68, 0.5, 0.22])
    progress = np.linspace(0, 1, 50)
    weights = np.array([temo.blend_weights(t) for t in progress])          # (50, 2)
    inset.plot(progress, weights[:, 0], color="tab:gray", ls="-")
    inset.plot(progress, weights[:, 1], color="tab:orange", ls="--")
    inset.set(xticks=[], yticks=[0, 1])
    inset.set_title("L_MM fades, others come", fontsize="small")


def main(argv=None):
    """Draws into the file that is named, or methods.png."""
    parser = OneLineErrorParser("python -m tools.methods", __doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=Path("methods.png"),
                        help="picture that is written")
    path = parser.parse_args(argv).path
    draw_methods(path)
    print_main(f"written to {path}")


if __name__ == "__main__":
    with clean_exit():
        main()
