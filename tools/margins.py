"""Fig. 4 of MAMA, left and middle, from several runs: val accuracy against the margin a0 / a1 and a2 of Eq. 6.

    python -m tools.margins runs/mu0 runs/mu1 runs/mu2 --out margins.png

The runs are finished runs of mama.py that differ only in --margin-schedule, --a0, --a1, --a2 and --seed. A point is a
run, and lines connect the means over seeds. The paper's caption puts a0 in the middle panel, which would repeat the
left one (a1 = 10 throughout); its text says a2, which is drawn here. (Right panel: weights.png of each run.)
"""

from pathlib import Path

from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit, opening, read_json, say
from contrastive.figures.base import figure, line_style, save_figure

import numpy as np

VARIED = {"margin_schedule", "a0", "a1", "a2", "seed", "loss"}
ASIDE = {"output_dir", "run_name", "resume", "cpu", "threads", "workers", "save_every", "eval_every", "log_every",
         "figures", "tracker"}  # flags that do not change what is learnt


def finished(folder):
    """(args, summary) of a finished run of mama.py. Raises: UserError if it is none, or its files are damaged."""
    args, summary = (read_json(Path(folder) / name) for name in ("args.json", "summary.json"))
    if not args or not summary or "margin_schedule" not in args:
        raise UserError(f"{folder}: not a finished run of mama.py")
    return args, summary


def same_but(folders, runs, varied):
    """Raises: UserError if the runs differ in flags other than `varied`, or a run is named twice."""
    first, *others = (args for args, _ in runs)
    for folder, args in zip(folders[1:], others):
        other = [k for k in sorted({*first, *args} - varied - ASIDE) if first.get(k) != args.get(k)]
        if other:
            raise UserError(f"{folder} and {folders[0]} differ in --{other[0].replace('_', '-')} "
                            f"({args.get(other[0])}, {first.get(other[0])}): they cannot be compared")
    if len({Path(f).resolve() for f in folders}) < len(folders):
        raise UserError(f"{folders[0]} ...: a run is named twice")


def point(folder, args, summary):
    """{mu, a2, value} of a run: a0 / a1 in radians (0 = no margin; the limit if a2 > 0), a2 (None if not used), and val
    accuracy in %."""
    with opening(f"{folder}: what its args.json and summary.json hold"):
        schedule, val = args["margin_schedule"], summary.get("val", {}).get(args["dataset"])
        if not val:
            raise UserError(f"{folder}: no evaluation on val of {args['dataset']}")
        value = val["text_to_image"]["R@1"] if args["task"] == "retrieval" else val["accuracy"]
        mu = 0.0 if schedule == "none" else float(args["a0"]) / float(args["a1"])
        return {"mu": mu, "schedule": schedule, "value": float(value),
                "a2": float(args["a2"]) if schedule == "logistic" else None}


def lines(points, axis, same):
    """{label: {x: [values]}}: one line per value of `same`, if it has two or more x. A run without a margin belongs to
    every line over mu."""
    out = {}
    for p in (p for p in points if p[axis] is not None and p["schedule"] != "none"):
        label = "constant" if p[same] is None else f"{same} = {p[same]:g}"
        out.setdefault(label, {}).setdefault(p[axis], []).append(p["value"])
    without = [p["value"] for p in points if p["schedule"] == "none"]
    if axis == "mu" and without:
        out = {label: {0.0: without} | line for label, line in out.items()}
    return {label: line for label, line in out.items() if len(line) > 1}


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLine("python -m tools.margins", __doc__.splitlines()[0])
    p.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs of mama.py")
    p.add_argument("--out", default="margins.png", metavar="FILE", help="picture, .png or .pdf")
    args = p.parse_args(argv)
    runs = [finished(folder) for folder in args.runs]
    same_but(args.runs, runs, VARIED)
    points = [point(folder, *run) for folder, run in zip(args.runs, runs)]
    panels = [("margin (Fig. 4, left)", "a0 / a1, radians; 0 = none", lines(points, "mu", "a2")),
              ("a2 of the margin's growth (Fig. 4, middle)", "a2, per step", lines(points, "a2", "mu"))]
    panels = [panel for panel in panels if panel[2]]
    p.require(panels, f"{args.runs[0]} ...: the runs have one margin and one a2; give runs with two of either")
    name = "text -> video R@1" if runs[0][0]["task"] == "retrieval" else "accuracy"
    fig, axes = figure(len(panels))
    said = []
    for ax, (title, xlabel, found) in zip(axes, panels):
        for k, (label, line) in enumerate(sorted(found.items())):
            xs = sorted(line)
            means = [np.mean(line[x]) for x in xs]
            ax.plot(xs, means, label=label, color=f"C{k}", **line_style(k, len(found)))
            ax.scatter([x for x in xs for _ in line[x]], [v for x in xs for v in line[x]], s=18, color=f"C{k}")
            said += [f"{title}, {label}: {x:g}: {m:.2f} ({len(line[x])} runs)" for x, m in zip(xs, means)]
        ax.set(title=title, xlabel=xlabel, ylabel=f"val {name}, %")
        ax.locator_params(axis="x", nbins=6)
        ax.legend(frameon=False)
    with opening(args.out):
        save_figure(fig, args.out)
    say("\n".join([*said, f"written to {args.out}"]))


if __name__ == "__main__":
    with clean_exit():
        main()
