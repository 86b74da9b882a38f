"""Compares commands of any scripts, forks too, on any data: paired differences to the first, in words.

    python -m benchmarks.compare "temo.py --loss infonce" temo.py mine.py --dataset captions.csv --seeds 3
    python -m benchmarks.compare "ncl.py --loss infonce" ncl.py --tune tau=0.05,0.1,0.2 --dataset moving-emoji
    python -m benchmarks.compare "temperature_schedules.py --schedule fixed" temperature_schedules.py \
        --vary split-seed --metric few-shot/mean_per_class --also knn@1 knn@10 few-shot all   # TS, Table 7

Each positional argument is one quoted command; every flag that is not listed here is appended to each. All run with
the seeds 0, 1, ... (--vary: with these values of another flag), so differences are taken pair by pair. With --tune each
command first runs with each of the values, on a seed that no pair has; val chooses, test is compared. An interval is
Student's t over all pairs; where several commands are compared, Holm's correction decides. Pairs whose differences are
all alike show no spread and decide nothing. "Could show": the smallest effect that these pairs show 80 % of the time.
--also: a second table, of further metrics or whole groups of them, mean ± standard deviation over a command's runs.

A finished run is one small file below OUT/runs, so that the same words go on where they stopped; an edited script is
run again. Writes OUT/comparison.json, .md and .png.
"""

import argparse
import concurrent.futures
import datetime
import functools
import hashlib
import itertools
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

from contrastive.engine.log import versions
from contrastive.engine.processes import flatten, read_json, write_json
from contrastive.engine.ranges import count
from contrastive.figures.base import figure, save_figure

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEPT = ("commit", "steps", "wall_s", "samples_per_s", "peak_memory_mb", "val", "test", "chance")  # of a summary
TUNING_SEED = 1000  # the first of those that no pair has
NARROW = 1.5  # points: an interval that holds 0 and has at most this half width counts as "no difference"
LESS_IS_BETTER = {"MdR", "MnR", "modality_gap", "error"}


# ------------------------------------------------------- statistics --------------------------------------------------
@functools.cache
def student(degrees):
    """Student's t with so many degrees of freedom: (angles, P(|T| <= sqrt(degrees) tan(angle)))."""
    angle = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (degrees - 1)
    area = np.append(0, np.cumsum(density[1:] + density[:-1]))
    return angle, area / area[-1]


def within(t, degrees):
    """P(|T| <= t)."""
    return float(np.interp(math.atan(abs(t) / math.sqrt(degrees)), *student(degrees)))


def quantile(p, degrees):
    """The t with P(|T| <= t) = p."""
    return math.sqrt(degrees) * math.tan(np.interp(p, *student(degrees)[::-1]))


def interval(values):
    """(mean, half width of its 95 % interval by Student's t); infinite where no spread is seen, which is no evidence:
    one value, or all alike (a metric of few examples has few steps)."""
    n = len(values)
    spread = (statistics.stdev(values) if n > 1 else 0) or math.inf
    return statistics.mean(values), quantile(0.95, max(1, n - 1)) * spread / math.sqrt(n)


def paired(these, those, sign=1):
    """The comparison of two {seed: value} over the seeds that both have.

    sign: -1 if less is better.   Returns: a dict of seeds, differences (these - those), mean, half (of the interval),
    smallest_effect (seen with 80 % power at a two-sided 5 %, given the spread of all pairs; by the usual sum of two
    quantiles, whose power is 73 % at 2 pairs, 77 at 3, 79 at 5), p (two-sided) and sign."""
    seeds = sorted(these.keys() & those.keys())
    differences, degrees = [these[k] - those[k] for k in seeds], max(1, len(seeds) - 1)
    mean, half = interval(differences)
    error = half / quantile(0.95, degrees)
    return {"seeds": seeds, "differences": differences, "mean": mean, "half": half, "sign": sign,
            "smallest_effect": half + quantile(0.6, degrees) * error,            # t of 97.5 and of 80 %
            "p": 1 - within(mean / error, degrees)}


def decide(lines, narrow=NARROW):
    """Adds to lines of `paired` that are read together their p by Holm, and the verdict."""
    at_least = 0.0
    for k, line in enumerate(sorted(lines, key=lambda line: line["p"])):
        at_least = max(at_least, min(1.0, (len(lines) - k) * line["p"]))
        line["p_holm"] = at_least
        if at_least < 0.05:
            line["verdict"] = "better" if line["sign"] * line["mean"] > 0 else "worse"
        elif line["half"] <= narrow and abs(line["mean"]) <= line["half"]:
            line["verdict"] = f"no difference above {abs(line['mean']) + line['half']:.1f}"
        else:
            line["verdict"] = "not decidable"


def sign_of(metric):
    """-1 if less is better, else 1."""
    return 1 if LESS_IS_BETTER.isdisjoint(metric.split("/")) else -1


# ------------------------------------------------------- runs --------------------------------------------------------
class Arm(NamedTuple):
    """What is compared: trials, of which val chooses one by `metric`; `read`, times scale, is compared on test."""
    metric: str
    trials: list  # of [script, *flags]
    read: str
    scale: float = 1
    also: dict = {}  # {title: metric, or a group, which stands for all below it}, reported beside
    tuning: int = 1  # seeds that choose the trial: the mean over those with which all trials have run

    def seeds(self):
        """The seeds that tune; none of a single trial."""
        return range(TUNING_SEED, TUNING_SEED + self.tuning * (len(self.trials) > 1))


def numbers(record, split):
    """{metric: value} of the first data set of a record."""
    return flatten(next(iter(record[split].values()), {}))


def number(record, split, metric):
    """A metric of the first data set of a record; ends the program if it is not there."""
    found = numbers(record, split)
    if metric not in found:
        raise SystemExit(f"{metric}: not in the {split} results of `{record['command']}`: {', '.join(found)}")
    return found[metric]


class Runs(NamedTuple):
    """Finished runs, one small file each in `folder`."""
    folder: Path
    vary: str = "seed"  # the flag whose values are the pairs
    jobs: int = 0  # runs side by side, each with one thread; 0: one run with all threads
    by_source: bool = False  # a run of a script that was edited since does not count

    def words(self, trial, seed):
        """The command of a trial with a seed."""
        return [trial[0], f"--{self.vary}", str(seed), *trial[1:]]

    def file(self, words):
        """SCRIPT-HASH.json of a command. Names are of the time when OMP_NUM_THREADS=1 was a flag."""
        key = " ".join([*words[:3], "--threads", "1", *words[3:]])
        key += Path(words[0]).read_text(encoding="utf8") if self.by_source else ""
        return self.folder / f"{Path(words[0]).stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    def record(self, trial, seed):
        """What a run left; None before it has ended well."""
        return read_json(self.file(self.words(trial, seed)), {}) or None

    def tuned(self, arm):
        """{flags of a trial: its mean val metric over tuning seeds}; empty before all have run, and of one trial."""
        runs = [[self.record(trial, seed) for trial in arm.trials] for seed in arm.seeds()]
        whole = [records for records in runs if all(records)]                # of each seed, of each trial
        return {" ".join(trial): statistics.mean(number(record, "val", arm.metric) for record in records)
                for trial, records in zip(arm.trials, zip(*whole))}

    def best(self, arm):
        """The trial with the best val metric, or the only one; None before all have run."""
        if len(arm.trials) == 1:
            return arm.trials[0]
        values = [sign_of(arm.metric) * value for value in self.tuned(arm).values()]
        return arm.trials[values.index(max(values))] if values else None

    def left(self, arms, pairs):
        """Commands without a file that can run now: more follow once an arm is tuned."""
        best = [self.best(arm) for arm in arms]
        now = [self.words(trial, seed) for arm in arms for seed in arm.seeds() for trial in arm.trials]
        now += [self.words(trial, seed) for seed in pairs for trial in best if trial]
        files = {self.file(words): words for words in now}                   # arms may share trials
        return [words for file, words in files.items() if not file.exists()]

    def measure(self, arm, pairs):
        """An arm's chosen trial, its test metric and its records; None before it is tuned and has run."""
        trial = self.best(arm)
        records = {k: r for k in pairs if (r := self.record(trial, k))} if trial else {}
        if not records:
            return None
        first, tests = next(iter(records.values())), {k: numbers(r, "test") for k, r in records.items()}
        shared = [name for name in numbers(first, "test") if all(name in of for of in tests.values())]
        trivial = next(iter(first["chance"].values()), {}).get("trivial", {})
        return {"flags": " ".join(trial), "tuning": self.tuned(arm), "metric": arm.read,
                "test": {k: arm.scale * number(r, "test", arm.read) for k, r in records.items()},
                "also": {title + name.removeprefix(at): {k: of[name] for k, of in tests.items()}
                         for title, at in arm.also.items() for name in shared if f"{name}/".startswith(f"{at}/")},
                "trivial": {kind: flatten(of)[arm.metric] for kind, of in trivial.items() if arm.metric in flatten(of)},
                "steps": first["steps"], "wall_s": [r["wall_s"] for r in records.values()],
                **{f"{what}s": sorted({r[what] for r in records.values()}) for what in ("commit", "machine")}}

    def run(self, words):
        """Runs a command and keeps what it measured. Returns whether it ended well."""
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}  # for forks elsewhere
        threads = {"OMP_NUM_THREADS": "1"} if self.jobs else {}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, *words, "--output-dir", folder, "--run-name", "r"],
                                  capture_output=True, text=True, env=os.environ | paths | threads)
            summary = read_json(Path(folder) / "r" / "summary.json", {})
        if done.returncode or not summary:
            print(f"failed ({done.returncode}): {' '.join(words)}", *done.stderr.strip().splitlines()[-1:], flush=True)
            return False
        record = {"command": f"{'OMP_NUM_THREADS=1 ' if threads else ''}python {' '.join(words)}",
                  "date": str(datetime.date.today()), "machine": machine(), "versions": versions()[:9],
                  **{k: summary[k] for k in KEPT}}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.file(words), record)
        return True

    def run_all(self, left):
        """Runs what left() returns, until only failed ones are left: the set of these."""
        failed = set()
        with concurrent.futures.ThreadPoolExecutor(self.jobs or 1) as pool:
            while now := [words for words in left() if str(words) not in failed]:
                ended = tqdm(pool.map(self.run, now), "runs", len(now), unit="run")
                failed |= {str(words) for words, well in zip(now, ended) if not well}
        return failed


def machine():
    """Processor, cores and GPU, for the record."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {os.cpu_count()} cores, {gpu}"


# ------------------------------------------------------- tables ------------------------------------------------------
LINE = ["pairs", "difference, 95 % interval", "could show", "verdict"]


def cells(line, digits=1):
    """The columns LINE of a line of `paired` with its verdict."""
    return [str(len(line["seeds"])), f"{line['mean']:+.{digits}f} ± {line['half']:.{digits}f}",
            f"{line['smallest_effect']:.{digits}f}", line["verdict"]]


def markdown(heads, rows):
    """The lines of a markdown table."""
    head, *body = ("| " + " | ".join(row) + " |" for row in (heads, *rows))
    return [head, "|---" * len(heads) + "|", *body]


def draw(lines, title, unit, path):
    """{what: line of `paired`}: the pairs' differences as points, their mean and 95 % interval."""
    fig, (axis,) = figure(1, width=8, height=1.6 + 0.55 * len(lines))
    for y, line in enumerate(lines.values()):
        half = line["half"] if math.isfinite(line["half"]) else 0
        axis.errorbar(line["mean"], y, xerr=half, fmt="s", color="black", capsize=4)
        axis.plot(line["differences"], [y + 0.2] * len(line["differences"]), "o", alpha=0.6)
    axis.axvline(0, color="grey", linewidth=1)
    axis.set(ylim=(-0.5, len(lines) - 0.3), xlabel=f"{unit}; dots: pairs; square and bar: mean, 95 %")
    names = [f"{textwrap.fill(what, 44)}\n{line['verdict']}" for what, line in lines.items()]
    axis.set_yticks(range(len(lines)), names)
    fig.suptitle(title)
    save_figure(fig, path)


def spread(values):
    """'mean ± standard deviation' (of a sample; of one value there is none)."""
    values = list(values)
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def write(stem, results, arms, lines):
    """STEM.json, and STEM.md of these lines and the commits and machines of measured arms."""
    commits, machines = (sorted({x for arm in arms for x in arm[k]}) for k in ("commits", "machines"))
    write_json(stem.with_suffix(".json"), results)
    text = [*lines, "", f"Commits {', '.join(commits)}; {'; '.join(machines)}.", ""]
    stem.with_suffix(".md").write_text("\n".join(text), encoding="utf8")


# ------------------------------------------------------- commands ----------------------------------------------------
def parse_args(argv=None):
    """Our flags, and in `shared` those of every command."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("commands", nargs="+", help="quoted: 'temo.py --loss infonce'; differences are to the first")
    p.add_argument("--seeds", type=count, default=3, help="pairs of runs")
    p.add_argument("--tune", action="append", default=[], metavar="FLAG=A,B", help="values tried on val for all alike")
    p.add_argument("--vary", default="seed", metavar="FLAG", help="pairs have the values 0, 1, ... of this flag")
    p.add_argument("--metric", default="text_to_image/R@1", help="of the first data set; it chooses trials and decides")
    p.add_argument("--also", nargs="+", default=[], metavar="NAME", help="metrics, or groups of them, reported beside")
    p.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of files and runs")
    args, args.shared = p.parse_known_args(argv)
    grid = [(flag, values.split(",")) for flag, _, values in (tune.partition("=") for tune in args.tune)]
    args.grid = list(itertools.product(*([f"--{flag}={value}" for value in values] for flag, values in grid)))
    ours = {f"--{flag}" for flag in (args.vary, *dict(grid))}
    for command in args.commands:
        script, *flags = shlex.split(command) + args.shared
        if twice := ours & {flag.partition("=")[0] for flag in flags}:
            p.error(f"{command}: {twice.pop()} is set by --vary or --tune, so it stands in no command")
        if not Path(script).is_file():
            p.error(f"{script}: no such script; commands come first, each quoted")
    return args


def main(argv=None):
    """Tunes, runs what is missing, compares each command with the first, prints and writes."""
    args = parse_args(argv)
    runs, pairs, sign = Runs(args.out / "runs", args.vary, by_source=True), range(args.seeds), sign_of(args.metric)
    arms = {c: Arm(args.metric, [[*shlex.split(c), *args.shared, *values] for values in args.grid], args.metric,
                   also=dict(zip(args.also, args.also))) for c in args.commands}
    failed = runs.run_all(lambda: runs.left(arms.values(), pairs))
    measured = {c: runs.measure(arm, pairs) for c, arm in arms.items()}
    if None in measured.values():
        raise SystemExit("runs failed, so there is nothing to compare; see above")
    first, *others = args.commands
    lines = {c: paired(measured[c]["test"], measured[first]["test"], sign) for c in others}
    decide(lines.values(), NARROW if sign > 0 else 0)                        # points; other metrics have other units
    rows = [[f"`{arm['flags']}`", spread(arm["test"].values()),
             *(cells(lines[c], 2) if c in lines else [""] * 4)] for c, arm in measured.items()]
    table, stem = markdown(["command", f"{args.metric} on test", *LINE], rows), args.out / "comparison"
    if args.also:
        beside = [[metric, *(spread(arm["also"][metric].values()) for arm in measured.values())]
                  for metric in measured[first]["also"]]
        table += ["", *markdown(["metric on test", *(f"`{c}`" for c in measured)], beside)]
    write(stem, {"metric": args.metric, "arms": measured, "against": {first: lines}}, measured.values(), table)
    draw(lines, f"difference to {first}", args.metric, stem.with_suffix(".png"))
    print("", *table, "", f"{stem}.md, .json, .png", sep="\n")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
