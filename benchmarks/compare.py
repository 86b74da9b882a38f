"""Compares commands of any scripts and forks on any data, by paired differences to the first.

    python -m benchmarks.compare "temo.py --loss infonce" temo.py mine.py --dataset captions.csv
    python -m benchmarks.compare "ncl.py --loss infonce" ncl.py --tune tau=0.05,0.1,0.2 \
        --dataset moving-emoji --seeds 5
    python -m benchmarks.compare "temperature_schedules.py --schedule fixed" \
        temperature_schedules.py --vary split-seed --metric few-shot/mean_per_class \
        --also knn@1 knn@10 few-shot all                                      # TS, Table 7

Each positional argument is one quoted command; every flag that is not listed here is appended to
each. All run with the seeds 0, 1, ... (--vary: with these values of another flag), so differences
are taken pair by pair. With --tune each command first runs with each of the values, on a seed that
no pair has; val chooses, test is compared. An interval is Student's t over all pairs; where several
commands are compared, Holm's correction decides. Pairs whose differences are all alike show no
spread and decide nothing. "Could show": the smallest effect that these pairs show 80 % of the time.
--also: a second table, of further metrics or whole groups of them, mean ± standard deviation over
a command's runs.

A finished run is one small file below OUT/runs, so that the same words go on where they stopped. It
counts until the script, common.py, the package or a file that the command names is edited. Edits
inside folders are not seen: give another --out. A run's warnings of flags without an effect are
printed. Writes OUT/comparison.json, .md and .png.
"""

import argparse
import concurrent.futures
import datetime
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from contrastive.engine.log import versions
from contrastive.core.files import flatten, read_json, write_json
from contrastive.core.number_types import int_ge1
from contrastive.figures.base import figure, save_figure

import torch
from safetensors.torch import load_file
from scipy import stats
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# what is kept of a run's summary
SUMMARY_KEYS = (
    "commit", "steps", "wall_s", "samples_per_s", "peak_memory_mib", "val", "test", "chance")
# {data set: number of its recipe}, 1 of all others; it grows when the code changes its numbers.
# emoji: 2 = accents stay in the vocabulary, which seven captions have.
RECIPE_VERSIONS = {"emoji": 2}
TUNING_SEED = 1000  # the first seed that tunes; no pair has it
MAX_HITS = 5000  # queries of a direction whose hits are kept with a record
NARROW = 1.5  # points: an interval around 0 of at most this half width is "no difference"
ROUNDING = 1e-9  # points: differences that are alike differ by less
LESS_IS_BETTER = {
    "MdR", "MnR", "modality_gap", "gap", "error", "info_nce", "alignment", "uniformity", "neg_cos"}
NOT_IN_POINTS = {"embeddings"}  # groups of metrics that are no percentages


# ----------------------------------------------------- statistics ---------------------------------
@dataclass
class Comparison:
    """The paired differences of two arms, and what follows from them.

    Attributes:
        seeds: that both arms have.
        differences: of the two values of each seed.
        mean, half: their mean, and half the width of its 95 % interval.
        sign: -1 if less is better, else 1.
        smallest_effect: seen with 80 % power at a two-sided 5 %, given the spread of the pairs; the
            sum of two quantiles, whose power is 73 % at 2 pairs, 77 at 3, 79 at 5.
        p: two-sided.
        p_holm, verdict: by `correct` and `verdict_of`.
        further: {title of a further metric: (mean, half)}.
    """

    seeds: list
    differences: list
    mean: float
    half: float
    sign: int
    smallest_effect: float
    p: float
    p_holm: float | None = None
    verdict: str = ""
    further: dict = field(default_factory=dict)


def standard_error(values):
    """Standard error of the mean of values.

    It is infinite where no spread is seen, which is no evidence: one value, or all alike (a metric
    of few examples has few steps).
    """
    if len(values) < 2:
        return math.inf
    deviation = statistics.stdev(values)
    if deviation < ROUNDING:
        return math.inf
    return deviation / math.sqrt(len(values))


def interval(values):
    """(mean, half width of its 95 % interval by Student's t)."""
    degrees = max(1, len(values) - 1)
    return statistics.mean(values), stats.t.ppf(0.975, degrees) * standard_error(values)


def compare_pairs(first, second, sign=1):
    """The Comparison of two {seed: value}, first - second, over the seeds that both have.

    Args:
        sign: -1 if less is better.
    """
    seeds = sorted(first.keys() & second.keys())
    differences = [first[seed] - second[seed] for seed in seeds]
    degrees = max(1, len(seeds) - 1)
    error = standard_error(differences)
    mean, half = interval(differences)
    smallest_effect = half + stats.t.ppf(0.8, degrees) * error
    p = 2 * stats.t.sf(abs(mean / error), degrees)
    return Comparison(seeds, differences, mean, half, sign, smallest_effect, p)


def correct(comparisons, number=0):
    """Sets p_holm of comparisons that are read together, from their p (Holm 1979).

    Args:
        number: of all that are read together, if it is larger; those that are not there, such as
            runs that are not done, count with p = 1.
    """
    number = max(number, len(comparisons))
    p_holm = 0.0
    for k, comparison in enumerate(sorted(comparisons, key=lambda comparison: comparison.p)):
        p_holm = max(p_holm, min(1.0, (number - k) * comparison.p))
        comparison.p_holm = p_holm


def verdict_of(comparison, narrow=NARROW):
    """The verdict of a Comparison, in words.

    Args:
        narrow: largest half width of an interval that counts as "no difference".
    """
    size = abs(comparison.mean)
    if comparison.p_holm < 0.05 and comparison.sign * comparison.mean > 0:
        return "better"
    if comparison.p_holm < 0.05:
        return "worse"
    if comparison.half <= narrow and size <= comparison.half:
        return f"no difference above {size + comparison.half:.1f}"
    return "not decidable"


def sign_of(metric):
    """-1 if less is better, else 1."""
    if LESS_IS_BETTER.isdisjoint(metric.split("/")):
        return 1
    return -1


def narrow_of(metric):
    """`narrow` of verdict_of for a metric; 0, so that nothing is "no difference", if its unit is
    not points."""
    if sign_of(metric) < 0 or not NOT_IN_POINTS.isdisjoint(metric.split("/")):
        return 0
    return NARROW


# ----------------------------------------------------- runs ---------------------------------------
@dataclass
class Arm:
    """What is compared: trials, of which one is chosen on val and then measured on test.

    Attributes:
        metric: on val it chooses the trial.
        trials: list of [script, *flags].
        test_metric: what is compared on test.
        scale: factor of `test_metric`.
        further: {title: metric, or a group, which stands for all below it}, reported beside.
        tuning: seeds that choose the trial: the mean over those with which all trials have run.
    """

    metric: str
    trials: list
    test_metric: str
    scale: float = 1
    further: dict = field(default_factory=dict)
    tuning: int = 1

    def tuning_seeds(self):
        """The seeds that choose the trial; none where there is one trial."""
        if len(self.trials) == 1:
            return range(0)
        return range(TUNING_SEED, TUNING_SEED + self.tuning)


@dataclass
class Measured:
    """What the finished runs of an arm's chosen trial say.

    Attributes:
        flags: the trial, as words.
        tuning: {trial: its mean metric on val}.
        metric: that `test` has.
        test: {seed: value}.
        further: {title: {seed: value}} of further metrics.
        trivial: {what needs no training: its value of the metric that tunes}.
        steps, wall_s, commits, machines: of the runs.
    """

    flags: str
    tuning: dict
    metric: str
    test: dict
    further: dict
    trivial: dict
    steps: int
    wall_s: list
    commits: list
    machines: list


def recipe_version(record):
    """The version of the recipe of the data set of a record, as the code has it now."""
    return RECIPE_VERSIONS.get(next(iter(record["test"]), ""), 1)


def metrics_of(record, split):
    """{metric: value} of the first data set of a record."""
    return flatten(next(iter(record[split].values()), {}))


def metric_of(record, split, metric):
    """One metric of the first data set of a record; ends the program if it is not there."""
    metrics = metrics_of(record, split)
    if metric not in metrics:
        raise SystemExit(f"{metric}: not in the {split} results of `{record['command']}`: "
                         + ", ".join(metrics))
    return metrics[metric]


def further_metrics(groups, tests):
    """{title: {seed: value}} of further metrics that all runs have.

    Args:
        groups: {title: metric or group}, as in Arm.
        tests: {seed: {metric: value}} on test.
    """
    values = {}
    for title, group in groups.items():
        for name in next(iter(tests.values())):
            in_group = f"{name}/".startswith(f"{group}/")
            if in_group and all(name in metrics for metrics in tests.values()):
                of_seeds = {seed: metrics[name] for seed, metrics in tests.items()}
                values[title + name.removeprefix(group)] = of_seeds
    return values


def trivial_values(record, metric):
    """{pixels, colours, the untrained tower: value} of a metric, where a record has them."""
    trivial = next(iter(record["chance"].values()), {}).get("trivial", {})
    values = {}
    for kind, metrics in trivial.items():
        metrics = flatten(metrics)
        if metric in metrics:
            values[kind] = metrics[metric]
    return values


@dataclass
class Runs:
    """Finished runs, one small file each in `folder`.

    Attributes:
        vary: the flag whose values are the pairs.
        jobs: runs side by side, each with one thread; 0: one run with all threads.
        by_source: a run does not count if the code or a file that its command names was edited
            since.
    """

    folder: Path
    vary: str = "seed"
    jobs: int = 0
    by_source: bool = False

    def words(self, trial, seed):
        """The command of a trial with a seed."""
        return [trial[0], f"--{self.vary}", str(seed), *trial[1:]]

    def file(self, words):
        """SCRIPT-HASH.json of a command."""
        # the names of files are of the time when OMP_NUM_THREADS=1 was a flag
        key = " ".join([*words[:3], "--threads", "1", *words[3:]])
        if self.by_source:
            key += Path(words[0]).read_text(encoding="utf8") + hash_of_package()
            for word in words[1:]:  # PATH, or --FLAG=PATH
                key += state_of_file(word.partition("=")[2] or word)
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / f"{Path(words[0]).stem}-{digest[:12]}.json"

    def record(self, trial, seed):
        """What a run has measured; None before it has ended well. Ends the program if it was
        another version of the recipe."""
        file = self.file(self.words(trial, seed))
        record = read_json(file, {})
        if record and record.get("version", 1) != recipe_version(record):
            raise SystemExit(f"{file}: measured with version {record.get('version', 1)} of the "
                             f"recipe, now {recipe_version(record)}; remove it, to run it again")
        return record or None

    def tuning_values(self, arm):
        """{flags of a trial: its mean metric on val over the tuning seeds}.

        Seeds with which not all trials have run do not count; empty if there are none.
        """
        finished_seeds = []
        for seed in arm.tuning_seeds():
            if all(self.record(trial, seed) for trial in arm.trials):
                finished_seeds.append(seed)
        values = {}
        if finished_seeds:
            for trial in arm.trials:
                records = [self.record(trial, seed) for seed in finished_seeds]
                on_val = [metric_of(record, "val", arm.metric) for record in records]
                values[" ".join(trial)] = statistics.mean(on_val)
        return values

    def best_trial(self, arm):
        """The trial with the best metric on val, or the only one; None before all have run."""
        if len(arm.trials) == 1:
            return arm.trials[0]
        values = list(self.tuning_values(arm).values())
        if not values:
            return None
        best = max(values)
        if sign_of(arm.metric) < 0:
            best = min(values)
        return arm.trials[values.index(best)]

    def planned_runs(self, arms, pairs):
        """{file: command} of the runs that are known: more follow once an arm is tuned."""
        commands = []
        for arm in arms:
            for seed in arm.tuning_seeds():
                commands += [self.words(trial, seed) for trial in arm.trials]
        best_trials = [self.best_trial(arm) for arm in arms]
        for seed in pairs:
            commands += [self.words(trial, seed) for trial in best_trials if trial]
        return {self.file(words): words for words in commands}  # arms may share trials

    def missing_runs(self, arms, pairs):
        """Commands of the planned runs that have no file."""
        return self.unfinished(self.planned_runs(arms, pairs).values())

    def unfinished(self, commands):
        """The commands that have no file, each once."""
        files = {self.file(words): words for words in commands}
        return [words for file, words in files.items() if not file.exists()]

    def measure(self, arm, pairs):
        """The Measured of an arm over the seeds `pairs`; None before it is tuned and has run."""
        trial = self.best_trial(arm)
        if trial is None:
            return None
        records = {seed: self.record(trial, seed) for seed in pairs}
        records = {seed: record for seed, record in records.items() if record}
        if not records:
            return None
        test = {}
        for seed, record in records.items():
            test[seed] = arm.scale * metric_of(record, "test", arm.test_metric)
        tests = {seed: metrics_of(record, "test") for seed, record in records.items()}
        first = next(iter(records.values()))
        return Measured(
            flags=" ".join(trial),
            tuning=self.tuning_values(arm),
            metric=arm.test_metric,
            test=test,
            further=further_metrics(arm.further, tests),
            trivial=trivial_values(first, arm.metric),
            steps=first["steps"],
            wall_s=[record["wall_s"] for record in records.values()],
            commits=sorted({record["commit"] for record in records.values()}),
            machines=sorted({record["machine"] for record in records.values()}))

    def run(self, words):
        """Runs a command and writes what it measured. Returns: whether it ended well."""
        environment = os.environ.copy()
        path = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}"  # for forks elsewhere
        file = self.file(words)  # that of the code with which the run starts
        command = f"python {' '.join(words)}"
        if self.jobs:
            environment["OMP_NUM_THREADS"] = "1"
            command = f"OMP_NUM_THREADS=1 {command}"
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.run(
                [sys.executable, *words, "--output-dir", folder, "--run-name", "r"],
                capture_output=True, text=True, env=environment)
            summary = read_json(Path(folder) / "r" / "summary.json", {})
            hits = read_hits(Path(folder) / "r" / "test_ranks.safetensors")
        if process.returncode or not summary:
            last_line = process.stderr.strip().splitlines()[-1:]
            print(f"failed ({process.returncode}): {' '.join(words)}", *last_line, flush=True)
            return False
        for line in process.stdout.splitlines():
            if line.startswith("WARNING") and "no effect" in line:
                print(f"{words[0]}: {line}", flush=True)
        record = {"command": command, "date": str(datetime.date.today()), "machine": machine(),
                  "versions": versions()[:9]}
        for key in SUMMARY_KEYS:
            record[key] = summary[key]
        if hits:
            record["hits"] = hits
        record["version"] = recipe_version(record)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(file, record)
        return True

    def run_all(self, missing_runs):
        """Runs what missing_runs() returns, until only failed commands are missing.

        Returns: the failed commands, a set of strings.
        """
        failed = set()
        with concurrent.futures.ThreadPoolExecutor(self.jobs or 1) as pool:
            while True:
                commands = [words for words in missing_runs() if str(words) not in failed]
                if not commands:
                    return failed
                outcomes = tqdm(pool.map(self.run, commands), "runs", len(commands), unit="run")
                # outcomes first: zip asks them for one more at the end, and so the bar ends
                for ended_well, words in zip(outcomes, commands):
                    if not ended_well:
                        failed.add(str(words))


def hash_of_package():
    """Digest of common.py and of all modules of the package, as they are now."""
    digest = hashlib.sha256()
    for path in (ROOT / "common.py", *sorted((ROOT / "contrastive").rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def state_of_file(word):
    """Size and time of the file that a word of a command names; empty if it names none."""
    path = os.path.expanduser(word)
    if not os.path.isfile(path):  # False for a word that is too long for a path, too
        return ""
    state = os.stat(path)
    return f"{state.st_size} {state.st_mtime_ns}"


def read_hits(path):
    """{direction: "0110..."} of the first data set of a run: whether each test query found a right
    item first. {} without the file, and for more than MAX_HITS queries."""
    if not path.exists():
        return {}
    hits = {}
    ranks = load_file(path)
    data_set = next(iter(ranks)).rpartition("/")[0]
    for name, values in ranks.items():
        if name.rpartition("/")[0] == data_set and len(values) <= MAX_HITS:
            digits = [str(int(rank == 1)) for rank in values.tolist()]
            hits[name.rpartition("/")[2]] = "".join(digits)
    return hits


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


# ----------------------------------------------------- tables -------------------------------------
COULD_SHOW = "could show: the smallest difference that such pairs detect 80 % of the time"
COLUMNS = ["pairs", "difference, 95 % interval", "could show", "verdict"]


def cells(comparison, digits=1):
    """The COLUMNS of a Comparison."""
    return [str(len(comparison.seeds)),
            f"{comparison.mean:+.{digits}f} ± {comparison.half:.{digits}f}",
            f"{comparison.smallest_effect:.{digits}f}",
            comparison.verdict]


def markdown(titles, rows):
    """The lines of a markdown table."""
    head, *body = ["| " + " | ".join(row) + " |" for row in (titles, *rows)]
    return [head, "|---" * len(titles) + "|", *body]


def draw(comparisons, title, unit, path):
    """Draws the pairs' differences as points, their mean and its 95 % interval.

    Args:
        comparisons: {command: Comparison}.
    """
    fig, (ax,) = figure(1, width=8, height=1.6 + 0.55 * len(comparisons))
    names = []
    for y, (command, comparison) in enumerate(comparisons.items()):
        half = None  # no bar, where the interval has no end
        if math.isfinite(comparison.half):
            half = comparison.half
        ax.errorbar(comparison.mean, y, xerr=half, fmt="s", color="black", capsize=4)
        ax.plot(comparison.differences, [y + 0.2] * len(comparison.differences), "o", alpha=0.6)
        names.append(f"{textwrap.fill(command, 44)}\n{comparison.verdict}")
    ax.axvline(0, color="grey", linewidth=1)
    ax.set(ylim=(-0.5, len(comparisons) - 0.3),
           xlabel=f"difference in {unit}; dots: pairs; square and bar: mean, 95 %")
    ax.set_yticks(range(len(comparisons)), names)
    fig.suptitle(title)
    save_figure(fig, path)


def mean_and_deviation(values):
    """'mean ± standard deviation' (of a sample; of one value there is none)."""
    values = list(values)
    mean = f"{statistics.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2f}"


def to_json(result):
    """A Comparison or a Measured as results files have it."""
    values = asdict(result)
    values["also"] = values.pop("further")
    return values


def write(stem, results, arms, lines):
    """STEM.json, and STEM.md of these lines and the commits and machines of the measured arms."""
    commits = set()
    machines = set()
    for arm in arms:
        commits.update(arm.commits)
        machines.update(arm.machines)
    write_json(stem.with_suffix(".json"), results)
    source = f"Commits {', '.join(sorted(commits))}; {'; '.join(sorted(machines))}."
    stem.with_suffix(".md").write_text("\n".join([*lines, "", source, ""]), encoding="utf8")


# ----------------------------------------------------- command line -------------------------------
def claims_parser(description, claims, num_seeds):
    """The flags that benchmarks.claims and benchmarks.frozen share.

    Args:
        description: docstring of the program, whose first line --help shows.
        claims: {name: Claim}.
        num_seeds: default of --seeds.
    """
    p = argparse.ArgumentParser(description=description.splitlines()[0], allow_abbrev=False)
    p.add_argument("--claims", nargs="+", choices=claims, default=list(claims),
                   help="claims whose missing runs are run")
    p.add_argument("--seeds", type=int_ge1, default=num_seeds,
                   help="pairs of runs of each method, at its best trials")
    p.add_argument("--jobs", type=int_ge1, default=os.cpu_count(),
                   help="runs side by side, one thread each")
    p.add_argument("--report", action="store_true", help="run nothing, write the tables")
    return p


def parse_args(argv=None):
    """The flags of this program, and in `shared` those of every command."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("commands", nargs="+",
                   help="each quoted: 'temo.py --loss infonce'; differences are to the first")
    p.add_argument("--seeds", type=int_ge1, default=3, help="pairs of runs")
    p.add_argument("--tune", action="append", default=[], metavar="FLAG=A,B",
                   help="values of a flag that are tried on val, for all commands alike")
    p.add_argument("--vary", default="seed", metavar="FLAG",
                   help="pairs have the values 0, 1, ... of this flag")
    p.add_argument("--metric", default="text_to_image/R@1",
                   help="metric of the first data set that chooses trials and decides")
    p.add_argument("--also", nargs="+", default=[], metavar="NAME",
                   help="metrics, or groups of them, that are reported beside")
    p.add_argument("--out", type=Path, default=Path("runs/compare"),
                   help="folder of the results and of the records of runs")
    args, args.shared = p.parse_known_args(argv)
    grid = {}
    for tune in args.tune:
        flag, _, values = tune.partition("=")
        words = [f"--{flag}={value}" for value in values.split(",")]
        grid.setdefault(flag, {}).update(dict.fromkeys(words))             # each once
    args.grid = list(itertools.product(*grid.values()))
    check_commands(p, args, [f"--{flag}" for flag in (args.vary, *grid)])
    return args


def check_commands(parser, args, reserved):
    """Refuses a command without a script, or with a flag of `reserved`."""
    for command in args.commands:
        script, *flags = shlex.split(command) + args.shared
        for flag in flags:
            name = flag.partition("=")[0]
            if name in reserved:
                parser.error(f"{command}: {name} is set by --vary or --tune; leave it out of the "
                             "commands")
        if not Path(script).is_file():
            parser.error(f"{script}: no such script; commands come first, each quoted")


def arm_of(command, args):
    """The Arm of a command: one trial for each value of --tune."""
    trials = [[*shlex.split(command), *args.shared, *values] for values in args.grid]
    return Arm(args.metric, trials, args.metric, further=dict(zip(args.also, args.also)))


def table_of(args, measured, comparisons):
    """The lines of comparison.md: {command: Measured}, {command: Comparison to the first}."""
    rows = []
    for command, arm in measured.items():
        row = [f"`{arm.flags}`", mean_and_deviation(arm.test.values())]
        if command in comparisons:
            row += cells(comparisons[command], 2)
        else:
            row += [""] * len(COLUMNS)
        rows.append(row)
    table = markdown(["command", f"{args.metric} on test", *COLUMNS], rows)
    if args.also:
        metrics = {}  # of any command, in order
        for arm in measured.values():
            metrics.update(dict.fromkeys(arm.further))
        rows = []
        for metric in metrics:
            row = [metric]
            for arm in measured.values():
                values = arm.further.get(metric)
                row.append(mean_and_deviation(values.values()) if values else "-")
            rows.append(row)
        titles = [f"`{command}`" for command in measured]
        table += ["", *markdown(["metric on test", *titles], rows)]
    return table


def main(argv=None):
    """Tunes, runs what is missing, compares each command with the first, prints and writes."""
    args = parse_args(argv)
    runs = Runs(args.out / "runs", args.vary, by_source=True)
    pairs = range(args.seeds)
    arms = {command: arm_of(command, args) for command in args.commands}
    planned = runs.planned_runs(arms.values(), pairs)
    num_stored = sum(file.exists() for file in planned)
    if num_stored:
        print(f"{num_stored} of {len(planned)} runs are stored in {runs.folder}", flush=True)
    failed = runs.run_all(lambda: runs.missing_runs(arms.values(), pairs))
    measured = {command: runs.measure(arm, pairs) for command, arm in arms.items()}
    if None in measured.values():
        raise SystemExit("runs failed, so there is nothing to compare; see above")

    first, *other_commands = args.commands
    sign = sign_of(args.metric)
    comparisons = {}
    for command in other_commands:
        if measured[command].test.keys().isdisjoint(measured[first].test):
            raise SystemExit(f"{command}: has no pair with {first}, since runs failed; see above")
        comparisons[command] = compare_pairs(measured[command].test, measured[first].test, sign)
    correct(comparisons.values())
    for comparison in comparisons.values():
        comparison.verdict = verdict_of(comparison, narrow_of(args.metric))

    table = table_of(args, measured, comparisons)
    stem = args.out / "comparison"
    results = {
        "metric": args.metric,
        "arms": {command: to_json(arm) for command, arm in measured.items()},
        "against": {first: {command: to_json(line) for command, line in comparisons.items()}}}
    write(stem, results, measured.values(), table)
    draw(comparisons, f"difference to {first}", args.metric, stem.with_suffix(".png"))
    print("", *table, "", COULD_SHOW, f"{stem}.md, .json, .png", sep="\n")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
