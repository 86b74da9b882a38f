"""Compares commands of any scripts and forks on any data, by paired differences to the first.

    python -m benchmarks.compare "temo.py --loss infonce" temo.py mine.py --dataset captions.csv
    python -m benchmarks.compare "ncl.py --loss infonce {--tau 0.05|--tau 0.1|--tau 0.2}" \
        "ncl.py {--tau 0.05|--tau 0.1|--tau 0.2}" --dataset moving-emoji --tuning-seeds 3 --seeds 5
    python -m benchmarks.compare "temperature_schedules.py --schedule fixed" \
        temperature_schedules.py --vary split-seed --metric few-shot/mean_per_class \
        --also knn@1 knn@10 few-shot all                                      # TS, Table 7
    python -m benchmarks.compare --claims benchmarks/claims.txt               # the stored table
    python -m benchmarks.compare --claims benchmarks/claims.txt temo --seeds 20

Each command is quoted; every flag that is not listed here is appended to each. A command may have
alternatives in one pair of braces: each runs with the tuning seeds 1000, 1001, ..., and the best
mean on val is chosen. Then all commands run with the seeds 0, 1, ..., are measured on test, and
differences are taken seed by seed. Before the first run, each script's parser reads its commands.

Verdicts: better or worse, if p of Student's t over the pairs is below 0.05 after Holm's correction
over the comparisons of this call, or over --family of them; else open, and the interval says how
open. One pair, or pairs that are all alike, decide nothing.

A finished run is a line of OUT/runs.jsonl, so that the same call goes on where it stopped. It
counts until the script, common.py, the package or a file that the command names is edited. Edits
inside folders are not seen: give another --out. A table and a picture, named by the commands, are
written to OUT.

--claims compares what a file says (benchmarks/claims.txt explains itself). Its runs are those of
benchmarks/results/runs.parquet, and of OUT/runs.jsonl what is missing there. A claim whose runs are
all stored keeps its stored verdict, any other has that of this program.
"""

import argparse
import datetime
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import re
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from contrastive.engine.log import versions
from contrastive.core.files import flatten, read_json, slug
from contrastive.core.number_types import int_ge1
from contrastive.core.processes import UserError, clean_exit
from contrastive.evaluation.report import COUNTS
from contrastive.figures.base import figure, save_figure

import pandas
import torch
from scipy import stats
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TUNING_SEED = 1000  # the first seed that tunes; no pair has it
MAX_PAIRS = 100  # of a claim: all that have run are compared
ROUNDING = 1e-9  # differences that are alike differ by less
LESS_IS_BETTER = {
    "MdR", "MnR", "modality_gap", "gap", "error", "info_nce", "alignment", "uniformity", "neg_cos"}
EPILOG = """\
metrics: text_to_image/R@1, image_to_text/R@10, R@1-Mean, knn@1/mean_per_class, knn@1/tail,
few-shot/mean_per_class, zero-shot/top1, modality_gap and all others of `test` in a run's
summary.json, with a slash between the names. Of MdR, MnR, error, modality_gap and losses less is
better.

verdicts: better, worse: p < 0.05 of Student's t over the pairs, after Holm's correction;
open: neither, and the interval says how open."""


# ----------------------------------------------------- statistics ---------------------------------
@dataclass
class Comparison:
    """The paired differences of a method to another one.

    Attributes:
        claim: the Claim that is compared.
        labels: of the settings of both.
        means: of both, over the pairs.
        differences: of the two values of each seed.
        mean, half: their mean, and half the width of its 95 % interval; inf without a spread.
        p: two-sided, of Student's t.
        is_stored: all its runs are those of runs.parquet.
        verdict: in one word.
    """

    claim: object
    labels: tuple
    means: tuple
    differences: list
    mean: float
    half: float
    p: float
    is_stored: bool = False
    verdict: str = ""


def student(differences):
    """(mean, half width of its 95 % interval, two-sided p) by Student's t.

    One difference, or differences that are all alike, show no spread, which is no evidence: their
    interval is infinite and p is 1.
    """
    mean = statistics.mean(differences)
    if len(differences) < 2 or statistics.stdev(differences) < ROUNDING:
        return mean, math.inf, 1.0
    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval(0.95)
    return mean, float(interval.high - interval.low) / 2, float(test.pvalue)


def holm(p_values, family=0):
    """The p values after Holm's correction (1979), in their order.

    Args:
        family: how many are read together, if that is more; the others count with p = 1.
    """
    family = max(family, len(p_values))
    corrected = [0.0] * len(p_values)
    highest = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for k, place in enumerate(order):
        highest = max(highest, min(1.0, (family - k) * p_values[place]))
        corrected[place] = highest
    return corrected


def judge(comparisons, family=0):
    """Sets the verdicts of comparisons that are read together."""
    p_values = [comparison.p for comparison in comparisons]
    for comparison, p in zip(comparisons, holm(p_values, family)):
        is_higher = comparison.mean > 0
        if p >= 0.05:
            comparison.verdict = "open"
        elif is_higher == (sign_of(comparison.claim.test_metric) > 0):
            comparison.verdict = "better"
        else:
            comparison.verdict = "worse"


def sign_of(metric):
    """-1 if less is better, else 1."""
    if LESS_IS_BETTER.isdisjoint(metric.split("/")):
        return 1
    return -1


# ----------------------------------------------------- commands and claims ------------------------
@dataclass
class Method:
    """A command, with what val chooses among.

    Attributes:
        name: in tables: a name, or the command itself.
        metric: on val it chooses the setting.
        settings: {alternative in the braces: [script, *flags]}; {"": ...} of a command without
            braces.
    """

    name: str
    metric: str
    settings: dict

    def label(self, alternative):
        """The name with the words of an alternative."""
        if "{" in self.name:
            return re.sub(r"\{.*\}", lambda _: alternative, self.name)
        if alternative:
            return f"{self.name} `{alternative}`"
        return self.name


@dataclass
class Claim:
    """A comparison of two methods.

    Attributes:
        name, paper, words: in the table; empty where the command line compares.
        metric: on test; empty: that of each method.
        method, against: Methods; differences are method - against.
        verdict: that is stored, of the runs that are stored.
    """

    method: Method
    against: Method
    metric: str = ""
    name: str = ""
    paper: str = ""
    words: str = ""
    verdict: str = ""

    @property
    def test_metric(self):
        """The metric on test, as the table names it."""
        return self.metric or self.method.metric


def settings_of(command, shared):
    """The settings of a Method with a command, to which the words `shared` are appended."""
    if not re.fullmatch(r"[^{}]*(\{[^{}]*\}[^{}]*)?", command):
        raise UserError(f"{command}: has more than one pair of braces, or half of one; write all "
                         "alternatives into one pair, as in {--tau 0.05|--tau 0.1}")
    before, _, rest = command.partition("{")
    alternatives, _, after = rest.partition("}")
    settings = {}
    for alternative in alternatives.split("|"):
        words = shlex.split(f"{before} {alternative} {after}")
        settings[alternative.strip()] = [*words, *shared]
    return settings


def read_claims(path, shared):
    """The Claims of a file, one for each method that a claim is against.

    Args:
        shared: words that are appended to each command.
    """
    claims = []
    methods = {}
    flags = []
    for line in Path(path).read_text(encoding="utf8").splitlines():
        kind, *cells = line.split(" | ")
        if kind == "flags" and len(cells) == 1:
            flags = cells[0].split()
        elif kind == "method" and len(cells) == 3:
            name, metric, command = cells
            methods[name] = Method(name, metric, settings_of(command, [*flags, *shared]))
        elif kind == "claim" and len(cells) == 6:
            name, paper, words, metric, method, others = cells
            if metric == "-":
                metric = ""
            for other in others.split("; "):
                against, verdict = other.split(": ")
                claims.append(Claim(
                    method=methods[method], against=methods[against], metric=metric, name=name,
                    paper=paper, words=words, verdict=verdict))
        elif line and not line.startswith("#"):
            raise UserError(f"{path}: a line is one of flags, method, claim or #, with 1, 3 or 6 "
                             f"cells after it, but this one is not: {line}")
    return claims


# ----------------------------------------------------- runs ---------------------------------------
@dataclass
class Runs:
    """Finished runs, by their command.

    Attributes:
        file: runs.jsonl, to which finished runs are appended.
        vary: the flag whose values are the pairs.
        rows: {command: row of `file` or of runs.parquet}. Those of runs.parquet have no state of
            the code, and count whatever has been edited since.
        failed: commands that did not end well.
        needed: (split, metric) pairs that each new run must have; none of claims.
    """

    file: Path
    vary: str
    rows: dict
    failed: set
    needed: list

    def words(self, setting, seed):
        """The words of a setting's command with a seed."""
        return [setting[0], f"--{self.vary}", str(seed), *setting[1:]]

    def row(self, setting, seed):
        """The row of a run; None before it has ended well with the code as it is."""
        words = self.words(setting, seed)
        row = self.rows.get(shlex.join(words))
        if row and "state" in row and row["state"] != state_of_code(words):
            return None
        return row

    def pairs(self, setting, seeds):
        """{seed: row} of the finished runs of a setting."""
        rows = {seed: self.row(setting, seed) for seed in seeds}
        return {seed: row for seed, row in rows.items() if row}

    def values_on_val(self, method, tuning_seeds):
        """{alternative: mean metric on val} over the tuning seeds that all settings have run with;
        {} if there are none."""
        rows = {}
        seeds = set(tuning_seeds)
        for alternative, setting in method.settings.items():
            rows[alternative] = self.pairs(setting, tuning_seeds)
            seeds &= rows[alternative].keys()
        if not seeds:
            return {}
        values = {}
        for alternative, of_setting in rows.items():
            on_val = [metric_of(of_setting[seed], "val", method.metric) for seed in seeds]
            values[alternative] = statistics.mean(on_val)
        return values

    def chosen(self, method, tuning_seeds):
        """The alternatives that are compared; [] before the method is tuned.

        They are those whose pairs are stored for this method; else the best one on val.
        """
        alternatives = []
        for alternative, setting in method.settings.items():
            row = self.row(setting, 0)
            if row and method.name in row.get("methods", "").split("; "):
                alternatives.append(alternative)
        if alternatives or len(method.settings) == 1:
            return alternatives or list(method.settings)
        values = self.values_on_val(method, tuning_seeds)
        sign = sign_of(method.metric)
        return sorted(values, key=lambda alternative: -sign * values[alternative])[:1]

    def missing(self, methods, tuning_seeds, pairs):
        """{command: words} of the runs that are missing and have not failed.

        Of a method that is not tuned these are the runs that tune it; its pairs follow.
        """
        planned = []
        for method in methods:
            if len(method.settings) > 1:
                planned += itertools.product(method.settings.values(), tuning_seeds)
            for alternative in self.chosen(method, tuning_seeds):
                planned += itertools.product([method.settings[alternative]], pairs)
        commands = {}
        for setting, seed in planned:
            words = self.words(setting, seed)
            command = shlex.join(words)
            if command not in self.failed and self.row(setting, seed) is None:
                commands[command] = words
        return commands

    def run(self, words):
        """Runs a command and appends what it measured to the file, or adds it to `failed`.

        Raises: UserError if it has not measured what the comparison needs.
        """
        command = shlex.join(words)
        state = state_of_code(words)  # that of the code with which the run starts
        path = os.environ.get("PYTHONPATH", "")
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{path}"}  # for forks
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.run(
                [sys.executable, *words, "--output-dir", folder, "--run-name", "r"],
                capture_output=True, text=True, env=environment)
            summary = read_json(Path(folder) / "r" / "summary.json", {})
        if process.returncode or not summary:
            last_line = process.stderr.strip().splitlines()[-1:]
            print(f"failed ({process.returncode}): {command}", *last_line, sep="\n", flush=True)
            self.failed.add(command)
            return
        for line in process.stdout.splitlines():
            if line.startswith("WARNING") and "no effect" in line:
                print(f"{command}: {line}", flush=True)
        row = {
            "command": command,
            "state": state,
            "commit": summary["commit"],
            "date": str(datetime.date.today()),
            "machine": machine(),
            "versions": ", ".join(versions(sha=summary["commit"])[:9]),
            "steps": summary["steps"],
            "wall_s": round(summary["wall_s"], 1),
            "val": json.dumps(summary["val"]),
            "test": json.dumps(summary["test"]),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows[command] = row
        for split, metric in self.needed:
            metric_of(row, split, metric)


def read_rows(file):
    """{command: row} of runs.jsonl or runs.parquet; {} without the file."""
    if not file.exists():
        return {}
    if file.suffix == ".parquet":
        rows = pandas.read_parquet(file).to_dict("records")
    else:
        rows = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
    return {row["command"]: row for row in rows}


def metrics_of(row, split):
    """{metric: value} of a run on the first data set; {} without one."""
    first = next(iter(json.loads(row[split]).values()), {})
    return flatten(first)


def metric_of(row, split, metric):
    """One metric of a run; ends the program if it is not there."""
    metrics = metrics_of(row, split)
    if metric not in metrics:
        names = [name for name in metrics if name.split("/")[-1] not in COUNTS]
        reason = f"not in the {split} results of `{row['command']}`, which have "
        reason += ", ".join(names) or "no metrics"
        nearest = difflib.get_close_matches(metric, names, 1, cutoff=0)
        if nearest:
            reason = f"the nearest: {nearest[0]}; {reason}"
        raise UserError(f"metric {metric}: {reason}")
    return metrics[metric]


def state_of_code(words):
    """Digest of a command's script, of common.py and the package, and of the size and time of the
    files that its words name."""
    digest = hashlib.sha256(Path(words[0]).read_bytes())
    for path in (ROOT / "common.py", *sorted((ROOT / "contrastive").rglob("*.py"))):
        digest.update(path.read_bytes())
    for word in words[1:]:  # PATH, or --FLAG=PATH
        path = os.path.expanduser(word.partition("=")[2] or word)
        if os.path.isfile(path):  # False for a word that is too long for a path, too
            state = os.stat(path)
            digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def machine():
    """Processor, cores and GPU, for the record."""
    name = platform.machine()
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
                break
    gpu = "no GPU"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return f"{name}, {os.cpu_count()} cores, {gpu}"


# ----------------------------------------------------- comparisons --------------------------------
def compare(runs, claim, tuning_seeds, pairs):
    """The Comparisons of a claim, without verdicts, one for each pair of chosen settings that has
    run."""
    comparisons = []
    metric = claim.metric or claim.method.metric
    other_metric = claim.metric or claim.against.metric
    for first, second in itertools.product(
            runs.chosen(claim.method, tuning_seeds), runs.chosen(claim.against, tuning_seeds)):
        rows = runs.pairs(claim.method.settings[first], pairs)
        other_rows = runs.pairs(claim.against.settings[second], pairs)
        seeds = sorted(rows.keys() & other_rows.keys())
        if not seeds:
            continue
        values = [metric_of(rows[seed], "test", metric) for seed in seeds]
        other_values = [metric_of(other_rows[seed], "test", other_metric) for seed in seeds]
        differences = [a - b for a, b in zip(values, other_values)]
        means = statistics.mean(values), statistics.mean(other_values)
        used_rows = [rows[seed] for seed in seeds] + [other_rows[seed] for seed in seeds]
        comparisons.append(Comparison(
            claim, (claim.method.label(first), claim.against.label(second)), means, differences,
            *student(differences), is_stored=not any("state" in row for row in used_rows)))
    return comparisons


def digits_of(comparison):
    """Decimals of a Comparison: two, or four where the metric is below 1."""
    if max(map(abs, comparison.means)) < 1:
        return 4
    return 2


def difference_text(comparison):
    """The mean difference with its interval, or why it has none."""
    digits = digits_of(comparison)
    mean = f"{comparison.mean:+.{digits}f}"
    if len(comparison.differences) == 1:
        return f"{mean}, one pair"
    if math.isinf(comparison.half):
        return f"{mean}, all pairs alike"
    return f"{mean} ± {comparison.half:.{digits}f}"


def markdown(titles, rows):
    """The lines of a markdown table."""
    head, *body = ["| " + " | ".join(row) + " |" for row in (titles, *rows)]
    return [head, "|---" * len(titles) + "|", *body]


def difference_table(comparisons):
    """The lines of the table of Comparisons; what is claimed stands in the first line of a
    claim."""
    rows = []
    last_name = None
    for comparison in comparisons:
        digits = digits_of(comparison)
        cells = []
        for label, mean in zip(comparison.labels, comparison.means):
            cells.append(f"{label} {mean:.{digits}f}")
        text = ""
        if comparison.claim.name != last_name:
            text = claim_text(comparison.claim)
        last_name = comparison.claim.name
        rows.append([
            text, *cells, str(len(comparison.differences)), difference_text(comparison),
            comparison.verdict])
    return markdown(
        ["claim", "method", "against", "pairs", "difference, 95 % over seeds", "verdict"], rows)


def claim_text(claim):
    """The first cell of a claim: its words and paper, if it has some, and its metric."""
    metric = claim.test_metric
    if sign_of(metric) < 0:
        metric += ", less is better"
    if claim.words:
        return f"{claim.words} ({claim.paper}): {metric}"
    return metric


def mean_and_deviation(values):
    """'mean ± standard deviation' (of a sample; of one value there is none)."""
    mean = f"{statistics.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2f}"


def metric_table(rows_of_label, metrics):
    """The lines of a table of metrics on test, mean ± standard deviation over a command's runs.

    Args:
        rows_of_label: {label of a command: its rows}.
        metrics: names of metrics, or of groups of them, which stand for all below.
    """
    values = {}  # {metric: {label: text}}
    for label, rows in rows_of_label.items():
        tests = [metrics_of(row, "test") for row in rows]
        for group, name in itertools.product(metrics, tests[0]):
            in_group = f"{name}/".startswith(f"{group}/")
            if in_group and all(name in test for test in tests):
                of_runs = [test[name] for test in tests]
                values.setdefault(name, {})[label] = mean_and_deviation(of_runs)
    table = []
    for name, of_labels in values.items():
        table.append([name, *(of_labels.get(label, "-") for label in rows_of_label)])
    return markdown(["metric on test, ± standard deviation", *rows_of_label], table)


def tuning_lines(runs, methods, tuning_seeds):
    """What was chosen on val, and from what: a line for each method that has a choice."""
    lines = []
    for method in methods:
        if len(method.settings) == 1:
            continue
        chosen = [f"`{words}`" for words in runs.chosen(method, tuning_seeds)]
        values = runs.values_on_val(method, tuning_seeds)
        texts = [f"`{words}` {value:.2f}" for words, value in values.items()]
        line = f"- {method.name}: {' and '.join(chosen)}; {method.metric} on val: "
        line += ", ".join(texts)
        if is_tie(values, method.metric):
            line += "; the best are equal, so val has not chosen between them"
        lines.append(line)
    if lines:
        lines = ["", "Chosen:", "", *lines]
    return lines


def is_tie(values, metric):
    """Whether several alternatives have the best value on val. values: {alternative: mean}."""
    sign = sign_of(metric)
    ordered = sorted((sign * value for value in values.values()), reverse=True)
    return len(ordered) > 1 and ordered[0] - ordered[1] < ROUNDING


def source_lines(rows):
    """How many queries the test split has, and the commits and machines of runs."""
    sizes = {}
    commits = set()
    machines = set()
    for row in rows:
        for name, metrics in json.loads(row["test"]).items():
            if "images" in metrics:
                sizes[name] = metrics["images"]
        commits.add(row["commit"])
        machines.add(row["machine"])
    lines = [""]
    for name, size in sizes.items():
        lines.append(f"Test split of {name}: {size} images or clips, so that one of them is "
                     f"{100 / size:.2f} points.")
    lines.append(f"Commits {', '.join(sorted(commits))}; {'; '.join(sorted(machines))}.")
    return lines


def draw(comparisons, path):
    """Draws the differences of the pairs as points, their mean and its 95 % interval."""
    fig, (ax,) = figure(1, width=8, height=1.6 + 0.55 * len(comparisons))
    names = []
    for y, comparison in enumerate(comparisons):
        half = None  # no bar, where the interval has no end
        if math.isfinite(comparison.half):
            half = comparison.half
        ax.errorbar(comparison.mean, y, xerr=half, fmt="s", color="black", capsize=4)
        heights = [y + 0.2] * len(comparison.differences)
        ax.plot(comparison.differences, heights, "o", alpha=0.6)
        label = comparison.labels[0].strip("`")
        names.append(f"{textwrap.fill(label, 44)}\n{comparison.verdict}")
    ax.axvline(0, color="grey", linewidth=1)
    ax.set(ylim=(-0.5, len(comparisons) - 0.3),
           xlabel=f"{comparisons[0].claim.test_metric}; dots: pairs; square and bar: mean, 95 %")
    ax.set_yticks(range(len(comparisons)), names)
    against = comparisons[0].labels[1].strip("`")
    fig.suptitle(f"difference to {against}")
    save_figure(fig, path)


# ----------------------------------------------------- command line -------------------------------
def parse_args(argv=None):
    """The flags of this program, and in `shared` those of every command."""
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("commands", nargs="*", default=[],
                   help="each quoted, before all flags: 'temo.py --loss infonce'; differences are "
                        "to the first. {A|B}: alternatives, of which val chooses one")
    p.add_argument("--claims", nargs="+", default=[], metavar=("FILE", "NAME"),
                   help="a file of claims in place of commands, and the names of some of its "
                        "claims, else all")
    p.add_argument("--seeds", type=int_ge1, default=3,
                   help="pairs of runs; of a claim more, if more are stored (default: %(default)s)")
    p.add_argument("--tuning-seeds", type=int_ge1, default=3,
                   help="seeds that choose among alternatives; no pair has them (default: "
                        "%(default)s)")
    p.add_argument("--vary", default="seed", metavar="FLAG",
                   help="pairs have the values 0, 1, ... of this flag (default: %(default)s)")
    p.add_argument("--metric", default="text_to_image/R@1",
                   help="metric of the first data set that chooses alternatives and decides "
                        "(default: %(default)s)")
    p.add_argument("--also", nargs="+", default=[], metavar="NAME",
                   help="metrics, or groups of them, that are reported beside")
    p.add_argument("--family", type=int_ge1, default=1,
                   help="comparisons that Holm's correction counts, if they are more than those of "
                        "this call")
    p.add_argument("--out", type=Path, default=Path("runs/compare"),
                   help="folder of the tables, the pictures and the finished runs (default: "
                        "%(default)s)")
    args, args.shared = p.parse_known_args(argv)
    if bool(args.commands) == bool(args.claims) or len(args.commands) == 1:
        p.error("give two or more commands, before all flags and each quoted, or --claims FILE")
    if args.claims and (args.also or args.metric != p.get_default("metric")):
        p.error("--metric and --also have no effect beside --claims: the file has the metrics")
    for word in args.shared:
        if re.search("[{}]", word):
            p.error(f"{word}: braces stand inside a quoted command")
    return args


@functools.cache
def parser_of(script):
    """The parse_args of a script."""
    names = runpy.run_path(script)
    if "parse_args" not in names:
        raise UserError(f"{script}: has no function parse_args, as our scripts and their forks do")
    return names["parse_args"]


def check_command(words):
    """Ends the program, and names the command, unless its script reads it."""
    command = shlex.join(words)
    script, vary, seed, *flags = words
    if not Path(script).is_file():
        raise UserError(f"{command}: there is no script {script} in this folder")
    for word in flags:
        if word.partition("=")[0] == vary:
            raise UserError(f"{command}: leave {vary} out, since the pairs have its values")
    parse = parser_of(script)
    try:
        parse([vary, seed, *flags])
    except SystemExit as error:  # argparse has said why, but not of which command
        raise UserError(f"in the command: {command}") from error


def claims_of(args):
    """The Methods and Claims of the command line or of its file."""
    if args.claims:
        file, *names = args.claims
        claims = read_claims(file, args.shared)
        unknown = set(names) - {claim.name for claim in claims}
        if unknown:
            raise UserError(f"{file}: has no claim {', '.join(sorted(unknown))}")
        if names:
            claims = [claim for claim in claims if claim.name in names]
        methods = {}
        for claim in claims:
            methods[claim.method.name] = claim.method
            methods[claim.against.name] = claim.against
        return list(methods.values()), claims
    methods = []
    for command in args.commands:
        settings = settings_of(command, args.shared)
        if settings in [method.settings for method in methods]:
            raise UserError(f"{command}: is given twice, so there is no difference to measure; "
                            "change a flag of one of the two")
        methods.append(Method(f"`{command}`", args.metric, settings))
    return methods, [Claim(method, methods[0]) for method in methods[1:]]


def needed_metrics(args, methods):
    """`needed` of Runs: --metric on test, and on val if it chooses among alternatives."""
    if args.claims:
        return []
    if any(len(method.settings) > 1 for method in methods):
        return [("val", args.metric), ("test", args.metric)]
    return [("test", args.metric)]


def name_of_call(args):
    """The name of the files of a call: its commands, and a digest of these, of the flags that they
    share and of the metrics."""
    words = [*args.commands, *args.shared, args.metric, *args.also, args.vary]
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
    commands = re.sub("-+", "-", slug(" ".join(args.commands)))
    return f"{commands[:80]}-{digest[:6]}"


def run_all(runs, methods, tuning_seeds, pairs):
    """Checks the commands, then runs what tunes, then the pairs, until only failed ones are
    missing."""
    commands = runs.missing(methods, tuning_seeds, pairs)
    for words in commands.values():
        check_command(words)
    while commands:
        for words in tqdm(commands.values(), "runs", unit="run"):
            runs.run(words)
        commands = runs.missing(methods, tuning_seeds, pairs)


def compare_all(runs, claims, tuning_seeds, pairs, family):
    """The Comparisons of claims, with verdicts: the stored one if all runs are stored."""
    comparisons = []
    for claim in claims:
        comparisons += compare(runs, claim, tuning_seeds, pairs)
    new_comparisons = []
    for comparison in comparisons:
        if comparison.is_stored:
            comparison.verdict = comparison.claim.verdict
        else:
            new_comparisons.append(comparison)
    judge(new_comparisons, family)
    return comparisons


def main(argv=None):
    """Tunes, runs what is missing, compares each command with the first, prints and writes."""
    args = parse_args(argv)
    methods, claims = claims_of(args)
    file = args.out / "runs.jsonl"
    rows = read_rows(file)
    if args.claims:
        rows |= read_rows(RESULTS / "runs.parquet")
    needed = needed_metrics(args, methods)
    runs = Runs(file, args.vary, rows, failed=set(), needed=needed)
    tuning_seeds = range(TUNING_SEED, TUNING_SEED + args.tuning_seeds)
    pairs = range(args.seeds)
    run_all(runs, methods, tuning_seeds, pairs)

    if args.claims:
        pairs = range(MAX_PAIRS)
    rows_of_label = {}  # {label of a setting: rows of its pairs}
    for method in methods:
        for alternative in runs.chosen(method, tuning_seeds):
            rows = runs.pairs(method.settings[alternative], pairs)
            if rows:
                rows_of_label[method.label(alternative)] = list(rows.values())
    if not rows_of_label:
        raise UserError("all runs failed, so there is nothing to compare; see above")
    comparisons = compare_all(runs, claims, tuning_seeds, pairs, args.family)

    lines = []
    if comparisons:
        lines += difference_table(comparisons)
    if not args.claims:
        lines += ["", *metric_table(rows_of_label, [args.metric, *args.also])]
    lines += tuning_lines(runs, methods, tuning_seeds)
    lines += source_lines(itertools.chain.from_iterable(rows_of_label.values()))
    print("", *lines, sep="\n")
    if not args.claims:
        table = args.out / f"{name_of_call(args)}.md"
        table.write_text("\n".join([*lines, ""]), encoding="utf8")
        print("", table, sep="\n")
        if comparisons:
            picture = table.with_name(f"{table.stem}.png")
            draw(comparisons, picture)
            print(picture)
    if runs.failed:
        raise UserError(f"{len(runs.failed)} runs failed; see above")


if __name__ == "__main__":
    with clean_exit():
        main()
