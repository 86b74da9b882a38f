"""Fig. 4 of TS from several runs: mean and deviation of the few-shot probe over each run's last full period.

    python -m tools.phase runs/T200 runs/T400 runs/T1000 --out phase.png

The runs are finished runs of temperature_schedules.py with --eval-every > 0. Only their seeds and periods may differ
(paper: T = 200, 400, 1000, 2000). The numbers are printed too; --stop-at-phase should stop at the phase with the
highest mean.
"""

import json
from pathlib import Path

from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit, first_line, opening, read_json, say, say_once
from contrastive.figures.base import figure, save_figure

import numpy as np

from tools.margins import same_but

VARIED = {"period", "epochs", "min_steps", "max_steps", "warmup_epochs", "stop_at_phase", "eval_epoch", "seed",
          "split_seed"}
GRID = np.linspace(0, 1, 41)  # phases


def rows_of(file):
    """(line, row) of a run's metrics.jsonl; a cut last line is left out with a warning.   Raises: UserError."""
    lines = Path(file).read_text(encoding="utf8").rstrip("\n").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(f"{file}, line {number}: not JSON ({first_line(error)}); is it whole?") from error
            say_once(f"WARNING: {file}, line {number}: cut, and left out")


def last_period(folder, measure="few-shot/top1"):
    """(phases (M,), values (M,)) of the evaluations on val in the last full period of a run; a period ends at phase 1.

    Raises: UserError if the run is not finished, has no full period, or fewer than two evaluations in it.
    """
    folder = Path(folder)
    args, summary = (read_json(folder / name) for name in ("args.json", "summary.json"))
    theirs = args and "period" in args and "periods" not in args  # mmts.py has both
    if not (theirs and summary and (folder / "metrics.jsonl").is_file()):
        raise UserError(f"{folder}: not a finished run of temperature_schedules.py")
    if args.get("schedule") in ("fixed", "random"):
        raise UserError(f"{folder}: a run with --schedule {args['schedule']}, which has no phases")
    if args.get("tau_head"):
        raise UserError(f"{folder}: a run with --tau-head, whose temperatures do not change")
    with opening(f"{folder}: what its args.json and summary.json hold"):
        period, epochs, steps = float(args["period"]), float(summary["epochs"]), summary["steps"]
        per_epoch, data = float(steps) / epochs, args["dataset"]
        end = int(epochs / period + 1e-6) * period
    task, name = measure.split("/", 1)
    found, file = {}, folder / "metrics.jsonl"
    for number, row in rows_of(file):
        with opening(f"{file}, line {number}"):
            value = row.get("eval", {}).get(data, {}).get(task, {}).get(name)
            phase = 1 - (end - row["step"] / per_epoch) / period
            if value is not None and row["step"] and -1e-6 <= phase <= 1 + 1e-6:
                found[min(max(phase, 0.0), 1.0)] = float(value)
    if not end or len(found) < 2:
        raise UserError(f"{folder}: {len(found)} evaluations on val of {measure} in its last full period of "
                        f"{period:g} epochs; at least two are needed (--eval-every)")
    return np.array(sorted(found)), np.array([found[p] for p in sorted(found)])


def over_phases(folders, measure="few-shot/top1"):
    """(runs, len(GRID)) values at the phases of GRID: interpolated between a run's evaluations, NaN outside them."""
    return np.stack([np.interp(GRID, *last_period(f, measure), left=np.nan, right=np.nan) for f in folders])


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLine("python -m tools.phase", __doc__.splitlines()[0])
    p.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs")
    p.add_argument("--measure", default="few-shot/top1", metavar="TASK/NAME",
                   help="a number of the val evaluations. TASK: few-shot, all, knn@1 or knn@10; NAME: top1, "
                        "mean_per_class, head, mid or tail")
    p.add_argument("--out", default="phase.png", metavar="FILE", help="picture, .png or .pdf")
    args = p.parse_args(argv)
    p.require(args.measure.count("/") == 1, f"--measure {args.measure}: must be TASK/NAME, as few-shot/top1")
    values = over_phases(args.runs, args.measure)                          # (runs, phases)
    same_but(args.runs, [(read_json(Path(folder) / "args.json"), None) for folder in args.runs], VARIED)
    seen = ~np.isnan(values).any(0)                                        # else single runs would decide at the edges
    if not seen.any():
        raise UserError("no phase lies between evaluations of every run; give runs with more of them (--eval-every)")
    grid, mean, std = GRID[seen], values[:, seen].mean(0), values[:, seen].std(0)
    fig, (ax,) = figure(1)
    ax.fill_between(grid, mean - std, mean + std, color="tab:blue", alpha=0.25)
    ax.plot(grid, mean, color="tab:blue")
    ax.set(title=f"last period of {len(values)} runs (Fig. 4)", xlabel="phase of the period",
           ylabel=f"val {args.measure}, %")
    if read_json(Path(args.runs[0]) / "args.json").get("schedule") == "cos":
        beside = ax.twinx()
        beside.plot(GRID, (1 + np.cos(2 * np.pi * GRID)) / 2, color="tab:orange")
        beside.set_ylabel("tau of the cosine, relative", color="tab:orange")
    with opening(args.out):
        save_figure(fig, args.out)
    lines = [f"{g:6.3f} {m:8.2f} {s:8.2f}" for g, m, s in zip(grid, mean, std)]
    say("\n".join([" phase     mean      std", *lines, f"best at phase {grid[mean.argmax()]:.3f}: {args.out}"]))


if __name__ == "__main__":
    with clean_exit():
        main()
