"""The pictures of README and docs/results.md, from one finished run of each script.

    python benchmarks/overview.py --ts RUN --mmts RUN --ncl RUN --mama RUN --temo RUN

README has five.png, with one panel for what each method does. Its curves come from the scripts' own functions with the
run's flags, its points from the run's model and files. docs/results.md has pictures that the runs drew, made smaller.
The runs use data sets that need no download; five.md lists them.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402
from contrastive.engine.processes import read_json  # noqa: E402
from contrastive.evaluation.metrics import normalize  # noqa: E402
from contrastive.figures.base import figure, save_figure  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import mmts  # noqa: E402
import ncl  # noqa: E402
import temo  # noqa: E402
import temperature_schedules as ts  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "results" / "pictures"
DRAWN = {"ts": "figures", "mmts": "clusters", "ncl": "normalization", "mama": "weights", "temo": "positive_pairs"}


def embedded(run, split, n):
    """(text (n, D), image (n, D)): unit embeddings of n examples of a split, by the run's model."""
    args = read_json(Path(run) / "args.json")
    model, tokenizer, transform = common.load_model(run)
    options = {k: args[k] for k in ("clips", "image_size", "frames") if args.get(k)}
    data = common.load_data(args["dataset"], split, **options)
    rows = np.linspace(0, len(data) - 1, min(n, len(data))).round().astype(int).tolist()
    with torch.no_grad():
        image = model(torch.stack([transform(data.read(i)) for i in rows]))[0]           # (n, D)
        text = model(tokens=tokenizer([data.captions(i)[0] for i in rows]))[1]           # (n, D)
    return normalize(text), normalize(image)


def command_of(run):
    """The command of a run, without its output folder."""
    words = (Path(run) / "command.txt").read_text().splitlines()[0].split(" #")[0]
    return re.sub(r" --(output-dir|run-name) \S+", "", words).strip()


def schedule(ax, run):
    """TS: the temperature of each epoch."""
    args = read_json(Path(run) / "args.json")
    flags = [args[k] for k in ("schedule", "tau_min", "tau_max", "period", "seed")]
    epochs = np.arange(int(args["epochs"]))
    ax.plot(epochs, [ts.temperature(int(e), *flags) for e in epochs])
    ax.set(title="TS: a temperature for each epoch", xlabel="epoch", ylabel="temperature", ylim=(0, None))


def clusters(ax, run):
    """MM-TS: the temperature of the largest, a middle and the smallest cluster during the run."""
    args, sizes = read_json(Path(run) / "args.json"), load_file(Path(run) / "clusters.safetensors")["sizes"]    # (K,)
    total = read_json(Path(run) / "summary.json")["steps"]
    shifts = mmts.cluster_shift(sizes, args["shift_min"], args["shift_max"])             # (K,)
    steps = np.arange(total)
    swing = np.array([float(mmts.base_temperature(int(t), total / args["periods"], args["alpha"])) for t in steps])
    for c, style in zip((0, len(sizes) // 2, len(sizes) - 1), ("-", "--", ":")):
        ax.plot(steps, shifts[c].item() + swing, style, label=f"{sizes[c]:,} captions")
    ax.set(title="MM-TS: by the size of the caption's cluster", xlabel="step", ylabel="temperature",
           ylim=(0, 1.5 * (shifts[0].item() + swing.max())))
    ax.legend(loc="upper right", frameon=False)


def fairness(ax, run):
    """NCL: the probability that each test video collects from the queries, with and without biases from these."""
    queues = load_file(Path(run) / "queues.safetensors")
    text, video = embedded(run, "test", 300)
    sim, gamma = text @ video.T, queues["gamma"].item()                                  # (n, n)
    fair = sim + ncl.sinkhorn_biases(sim, gamma)[1]                                      # (n, n)
    for label, s, style in (("as it is", sim, "-"), ("with biases (a bound)", fair, "--")):
        collected = (s / gamma).softmax(1).sum(0).sort(descending=True).values           # (n,) 1 = fair
        ax.plot(collected, style, label=label)
    ax.set(title="NCL: every video is retrieved alike", xlabel="video, most retrieved first",
           ylabel="sum of its probabilities", ylim=(0, None))
    ax.legend(frameon=False)


def weights(ax, run):
    """MAMA: the learned weight of each pair in the last batch against its loss."""
    loss, weight, swapped = load_file(Path(run) / "weights.safetensors")["last_batch"].unbind(1)                # (N,)
    for label, those, marker in (("right caption", swapped == 0, "o"), ("another's caption", swapped == 1, "x")):
        ax.scatter(loss[those], weight[those], s=22, marker=marker, label=label)
    ax.set(title="MAMA: a learned weight for each pair", xlabel="loss of the pair", ylabel="weight", ylim=(0, None))
    ax.legend(frameon=False)


def pairs(ax, run):
    """TeMo: the temperature of every pair in a batch of test against its cosine."""
    args = read_json(Path(run) / "args.json")
    text, image = embedded(run, "test", 60)
    sim = text @ image.T                                                                 # (n, n)
    tau = temo.modulated_temperature(sim, args["tau_min"], args["tau_alpha"])            # (n, n), Eq. 4
    own = torch.eye(len(sim), dtype=torch.bool)
    for label, those, size in (("other pairs", ~own, 2), ("image and its text", own, 14)):
        ax.scatter(sim[those], tau[those], s=size, label=label)
    ax.set(title="TeMo: a temperature for each pair", xlabel="cosine of image and text", ylabel="temperature",
           ylim=(0, None))
    ax.legend(frameon=False)


PANELS = {"ts": schedule, "mmts": clusters, "ncl": fairness, "mama": weights, "temo": pairs}


def shrink(source, path, width):
    """Copy a picture with fewer pixels and colours: a small file."""
    from PIL import Image
    image = Image.open(source).convert("RGB")
    image.thumbnail((width, width))
    image.quantize(128).save(path, optimize=True)


def main(argv=None):
    """Draws five.png, copies a picture of each run, and lists the runs' commands in five.md."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for name in PANELS:
        p.add_argument(f"--{name}", required=True, metavar="RUN", help="folder of a finished run")
    args = p.parse_args(argv)
    fig, axes = figure(3, 2, width=3.6, height=2.9, panels=len(PANELS))
    for ax, (name, draw) in zip(axes, PANELS.items()):
        draw(ax, getattr(args, name))
    save_figure(fig, FOLDER / "five.png")
    shrink(FOLDER / "five.png", FOLDER / "five.png", 2000)
    for name, drawn in DRAWN.items():
        shrink(Path(getattr(args, name)) / f"{drawn}.png", FOLDER / f"{name}.png", 1400)
    commits = {name: read_json(Path(getattr(args, name)) / "summary.json")["commit"][:12] for name in PANELS}
    commands = {name: command_of(getattr(args, name)) for name in PANELS}
    (FOLDER / "five.md").write_text("The runs of the pictures in this folder:\n\n" + "".join(
        f"- {name}: `{command}`, commit {commits[name]}\n" for name, command in commands.items()))


if __name__ == "__main__":
    main()
