"""The claims of the papers with frozen published encoders, on real pictures and titles.

    python -m benchmarks.frozen --claims ncl-training temo --seeds 10 --jobs 2
    python -m benchmarks.frozen --report                 # the table of the finished runs; no run

Needs the data set openclipart (contrastive/data/openclipart.py says how to get it) in the folder
openclipart, or a link of this name to it, and the two packages of --recipe frozen. The encoders are
frozen, their features are computed once, and a run trains the two linear projections for 1,000
steps at batch 512.

Every method is tuned over the same six temperatures by R@1 on val, the mean over both directions
and three seeds that no pair has. Where the best two of a method lie within twice the standard error
of their difference, both are run, and a claim is held only if it holds at both. Two intervals
decide: over the paired seeds (Student's t), and over the test pictures (a bootstrap of the hits,
averaged over the seeds). A claim is held if the larger of both p is below 0.05 after Holm's
correction within its paper; it is level if both intervals lie within 0.5 points.

Finished runs are small files below results/frozen/. Writes results/frozen.json, .md and .png.
"""

import argparse
import os
from dataclasses import dataclass
from statistics import mean, stdev

from contrastive.core.files import write_json
from contrastive.core.number_types import count
from contrastive.figures.base import figure, save_figure

from benchmarks.compare import (
    RESULTS, TUNING_SEED, Runs, compare_pairs, correct, markdown, metric_of)

import numpy as np
from scipy import stats

CONDITION = ("--recipe frozen --dataset openclipart --data-dir openclipart --max-steps 1000 "
             "--eval-every 0")
TAUS = (0.03, 0.05, 0.07, 0.1, 0.14, 0.2)
TUNING_SEEDS = range(TUNING_SEED, TUNING_SEED + 3)
PAIRS = range(20)  # all seeds that may have been run
LEVEL = 0.5  # points
RESAMPLES = 9999  # of the bootstrap
R1 = "R@1-Mean"  # of both directions, percent
NCL_R1 = "normalize/none/R@1-Mean"  # that of ncl.py, without biases at test time


# ===================================================== methods ====================================
def infonce(tau):
    """The command of InfoNCE at a fixed temperature."""
    return f"temo.py --loss infonce --tau {tau:g}"


def learnt_tau(tau):
    """The command of InfoNCE with a learnt temperature, from tau on."""
    return f"temo.py --loss infonce --learnable-tau --tau {tau:g}"


def ncl(tau):
    """The command of NCL's training."""
    return f"ncl.py --tau {tau:g}"


def mmts(tau):
    """The paper's range on CC3M, scaled: alpha 4/7, shifts 5/7 and 10/7 of tau."""
    return (f"mmts.py --alpha {4 * tau / 7:.4g} --shift-min {5 * tau / 7:.4g} "
            f"--shift-max {10 * tau / 7:.4g}")


def mmts_schedule(tau):
    """The command of MM-TS without shifts."""
    return f"mmts.py --no-shifts --tau {tau:g} --alpha {4 * tau / 7:.4g}"


def mmts_shifts(tau):
    """The command of MM-TS without its schedule."""
    return f"mmts.py --no-schedule --shift-min {5 * tau / 7:.4g} --shift-max {10 * tau / 7:.4g}"


def temo_row(row):
    """A function tau -> command of a row of TeMo's Table 3, in the paper's proportions."""
    def command(tau):
        return f"temo.py --row {row} --tau {tau:g} --tau-min {tau:g} --tau-alpha {4 * tau:g}"
    return command


def mama_margin(radians):
    """A function tau -> command of MAMA's loss with a margin, without weights."""
    def command(tau):
        return f"mama.py --weighting none --caption-noise 0 --a0 {10 * radians:g} --tau {tau:g}"
    return command


@dataclass
class Method:
    """Commands ("script flags"), of which val chooses, and the metric that chooses and decides."""

    name: str
    trials: list
    metric: str = R1


def tuned(name, command, metric=R1):
    """The Method of a function tau -> command."""
    return Method(name, [command(tau) for tau in TAUS], metric)


INFONCE = tuned("InfoNCE", infonce)
LEARNT_TAU = Method("learnt tau", [learnt_tau(0.07)])
NCL = tuned("NCL", ncl, NCL_R1)
MMTS = tuned("MM-TS", mmts)
TEMO = tuned("TeMo", temo_row("g"))


@dataclass
class Claim:
    """A claim of a paper: a method against its baselines."""

    paper: str
    says: str
    method: Method
    baselines: list


CLAIMS = {
    "ncl-training": Claim(
        "NCL", "training with Sinkhorn's biases beats InfoNCE (Tables 1 to 4)", NCL,
        [INFONCE, LEARNT_TAU]),
    "mmts": Claim(
        "MM-TS", "temperatures by schedule and cluster size beat a fixed one (Table 4)", MMTS,
        [INFONCE, LEARNT_TAU]),
    "mmts-schedule": Claim(
        "MM-TS", "the schedule alone beats a fixed temperature (Table 4)",
        tuned("TS", mmts_schedule), [INFONCE]),
    "mmts-shifts": Claim(
        "MM-TS", "shifts by cluster size alone beat a fixed temperature (Table 4)",
        tuned("ICS", mmts_shifts), [INFONCE]),
    "temo": Claim(
        "TeMo", "temperatures by pair and unimodal terms beat InfoNCE (Table 1)", TEMO,
        [INFONCE, LEARNT_TAU]),
    "temo-weights": Claim(
        "TeMo", "the quadratic weights of Eq. 8 beat fixed ones (Table 3, row g against f)", TEMO,
        [tuned("row f", temo_row("f"))]),
    "temo-temperature": Claim(
        "TeMo", "temperatures by pair beat plain unimodal terms (Table 3, row f against c)",
        tuned("row f", temo_row("f")), [tuned("row c", temo_row("c"))]),
    "mama-margin": Claim(
        "MAMA", "a subtractive margin of 0.2 rad beats none (Fig. 4)",
        tuned("0.2 rad", mama_margin(0.2)), [INFONCE, LEARNT_TAU]),
}


# ===================================================== tuning =====================================
def command_words(trial):
    """The words of a trial with the condition."""
    script, *flags = trial.split()
    return [script, *CONDITION.split(), *flags]


def val_values(runs, method):
    """{trial: its metric on val for each tuning seed}; {} before all trials have run."""
    values = {}
    for trial in method.trials:
        records = [runs.record(command_words(trial), seed) for seed in TUNING_SEEDS]
        if not all(records):
            return {}
        values[trial] = [metric_of(record, "val", method.metric) for record in records]
    return values


def best_trials(runs, method):
    """The best trial on val, and the second best if both lie within their noise."""
    if len(method.trials) == 1:
        return method.trials
    values = val_values(runs, method)
    if not values:
        return []
    first, second, *_ = sorted(values, key=lambda trial: -mean(values[trial]))
    differences = [a - b for a, b in zip(values[first], values[second])]
    noise = 2 * stdev(differences) / len(differences) ** 0.5
    if mean(differences) <= noise:
        return [first, second]
    return [first]


def missing_runs(runs, claims, pairs):
    """Commands of these claims that can run now: the pairs follow once a method is tuned."""
    commands = []
    for name in claims:
        for method in (CLAIMS[name].method, *CLAIMS[name].baselines):
            if len(method.trials) > 1:
                for seed in TUNING_SEEDS:
                    commands += [runs.words(command_words(trial), seed) for trial in method.trials]
            for trial in best_trials(runs, method):
                commands += [runs.words(command_words(trial), seed) for seed in pairs]
    files = {runs.file(words): words for words in commands}  # claims share methods
    return [words for file, words in files.items() if not file.exists()]


# ===================================================== verdicts ===================================
@dataclass
class Line:
    """A method against a baseline, each at one trial.

    Attributes:
        seeds: Comparison over the paired seeds.
        pictures: (low, high) of the 95 % interval over the test pictures.
        p: the larger one of both.
    """

    claim: str
    method: str
    baseline: str
    method_mean: float
    baseline_mean: float
    seeds: object
    pictures: tuple
    p: float
    p_holm: float | None = None
    verdict: str = ""


def records_of(runs, trial):
    """{seed: record} of the finished pairs of a trial."""
    records = {seed: runs.record(command_words(trial), seed) for seed in PAIRS}
    return {seed: record for seed, record in records.items() if record}


def picture_hits(records, seeds):
    """(Q,) how often each test picture and its caption are found first, mean over seeds, percent.

    The data set has one caption a picture, so that the directions have the same pictures.
    """
    hits = []
    for seed in seeds:
        for digits in records[seed]["hits"].values():
            hits.append([100 * int(digit) for digit in digits])
    return np.mean(hits, axis=0)


def bootstrap(differences):
    """(low, high), p: 95 % interval and two-sided p of the mean of (Q,) differences."""
    result = stats.bootstrap(
        (differences,), np.mean, n_resamples=RESAMPLES, method="percentile",
        rng=np.random.default_rng(0))
    means = result.bootstrap_distribution
    below, above = np.mean(means <= 0), np.mean(means >= 0)
    p = min(1.0, 2 * max(min(below, above), 1 / len(means)))
    return tuple(result.confidence_interval), p


def compare_trials(runs, name, method, trial, baseline, baseline_trial):  # noqa: PLR0917
    """The Line of two trials; None before two pairs have run."""
    records, others = records_of(runs, trial), records_of(runs, baseline_trial)
    seeds = sorted(records.keys() & others.keys())
    if len(seeds) < 2:
        return None
    values = {seed: metric_of(records[seed], "test", method.metric) for seed in seeds}
    other_values = {seed: metric_of(others[seed], "test", baseline.metric) for seed in seeds}
    comparison = compare_pairs(values, other_values)
    differences = picture_hits(records, seeds) - picture_hits(others, seeds)          # (Q,)
    pictures, p = bootstrap(differences)
    return Line(name, trial, baseline_trial, mean(values.values()), mean(other_values.values()),
                comparison, pictures, max(p, comparison.p))


def lines_of(runs, name):
    """The Lines of a claim: each baseline, at each of the best trials of both sides."""
    claim = CLAIMS[name]
    lines = []
    for baseline in claim.baselines:
        for trial in best_trials(runs, claim.method):
            for other in best_trials(runs, baseline):
                line = compare_trials(runs, name, claim.method, trial, baseline, other)
                if line is not None:
                    lines.append(line)
    return lines


def decide(lines):
    """Sets p_holm and the verdict of the lines of one paper."""
    correct(lines)
    for line in lines:
        low, high = line.pictures
        lows = min(low, line.seeds.mean - line.seeds.half)
        highs = max(high, line.seeds.mean + line.seeds.half)
        if line.p_holm < 0.05 and line.seeds.mean > 0:
            line.verdict = "better"
        elif line.p_holm < 0.05:
            line.verdict = "worse"
        elif lows >= -LEVEL and highs <= LEVEL:
            line.verdict = "level"
        else:
            line.verdict = "not decidable"


# ===================================================== the table ==================================
def verdict_of_claim(lines):
    """The verdict of a claim against one baseline: held only if it holds at all trials."""
    verdicts = {line.verdict for line in lines}
    if verdicts == {"better"}:
        return "held"
    if verdicts == {"worse"}:
        return "not held: the baseline is better"
    if verdicts == {"level"}:
        return "level"
    return "not decidable"


def write_report(runs):
    """Writes the table, its numbers and the picture of the tuning. Returns: the table's lines."""
    by_paper = {}
    for name, claim in CLAIMS.items():
        by_paper.setdefault(claim.paper, []).extend(lines_of(runs, name))
    rows, lines = [], []
    for paper_lines in by_paper.values():
        decide(paper_lines)
        lines += paper_lines
    for name, claim in CLAIMS.items():
        for baseline in claim.baselines:
            of_baseline = [line for line in lines
                           if line.claim == name and line.baseline in baseline.trials]
            verdict = verdict_of_claim(of_baseline) if of_baseline else "not run"
            for line in of_baseline or [None]:
                rows.append(row_of(claim, baseline, line, verdict))
                verdict = ""
    table = markdown(["claim", "method", "against", "pairs", "difference, seeds",
                      "95 %, pictures", "verdict"], rows)
    text = [*table, "", f"R@1, mean of both directions, {CONDITION}."]
    RESULTS.joinpath("frozen.md").write_text("\n".join([*text, ""]), encoding="utf8")
    write_json(RESULTS / "frozen.json", [to_json(line) for line in lines])
    draw_tuning(runs, RESULTS / "frozen.png")
    return table


def row_of(claim, baseline, line, verdict):
    """A row of the table; without a line it says that the claim is not run."""
    start = [f"{claim.paper}: {claim.says}", claim.method.name, baseline.name]
    if line is None:
        return [*start, "", "", "", "not run"]
    start[1] += f" `{line.method}` {line.method_mean:.1f}"
    start[2] += f" `{line.baseline}` {line.baseline_mean:.1f}"
    low, high = line.pictures
    return [*start, str(len(line.seeds.seeds)), f"{line.seeds.mean:+.2f} ± {line.seeds.half:.2f}",
            f"{low:+.2f} to {high:+.2f}", verdict]


def to_json(line):
    """A Line as plain values."""
    return {
        "claim": line.claim, "method": line.method, "baseline": line.baseline,
        "method_mean": line.method_mean, "baseline_mean": line.baseline_mean,
        "seeds": line.seeds.seeds, "differences": line.seeds.differences,
        "half": line.seeds.half, "pictures": list(line.pictures), "p": line.p,
        "p_holm": line.p_holm, "verdict": line.verdict}


def draw_tuning(runs, path):
    """Draws R@1 on val over the temperature, the method and its first baseline of each claim."""
    claims = [name for name, claim in CLAIMS.items() if val_values(runs, claim.method)]
    if not claims:
        return
    fig, axes = figure(len(claims))
    for ax, name in zip(axes, claims):
        for method in (CLAIMS[name].method, CLAIMS[name].baselines[0]):
            values = val_values(runs, method)
            if values:
                means = [mean(values[trial]) for trial in method.trials]
                ax.plot(TAUS, means, marker=".", label=method.name)
        ax.set(title=name, xlabel="temperature", ylabel="R@1 on val, %", xscale="log")
        ax.legend()
    save_figure(fig, path)


def main(argv=None):
    """Runs what is missing, and writes the table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS),
                   help="claims whose missing runs are run")
    p.add_argument("--seeds", type=count, default=10, help="pairs of runs of each trial")
    p.add_argument("--jobs", type=count, default=os.cpu_count(),
                   help="runs side by side, one thread each")
    p.add_argument("--report", action="store_true", help="run nothing, write the table")
    args = p.parse_args(argv)
    runs = Runs(RESULTS / "frozen", jobs=args.jobs)
    failed = set()
    if not args.report:
        failed = runs.run_all(lambda: missing_runs(runs, args.claims, range(args.seeds)))
    print(*write_report(runs), sep="\n")
    print(f"{len(missing_runs(runs, args.claims, range(args.seeds)))} runs left of "
          f"{', '.join(args.claims)}, more where methods are not tuned")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
