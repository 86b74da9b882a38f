"""The claims of the papers with frozen published encoders, on drawings that people made and named.

    python -m benchmarks.frozen --claims ncl-training temo --seeds 10 --jobs 2
    python -m benchmarks.frozen --claims temo --further --seeds 5  # other conditions, no verdict
    python -m benchmarks.frozen --report                 # the table of the finished runs; no run

Needs the data set openclipart (contrastive/data/openclipart.py says how to get it) in the folder
openclipart, or a link of this name to it, and the two packages of --recipe frozen. The encoders are
frozen, their features are computed once, and a run trains the two linear projections for 1,000
steps at batch 512.

Every method is tuned over the same six temperatures by R@1 on val, averaged over both directions
and over three seeds that no pair uses. Where the best two of a method lie within twice the standard
error of their difference, both are run, and a claim is held only if it holds at both. Two intervals
decide: over the paired seeds (Student's t), and over the test pictures (a bootstrap of the hits,
averaged over the seeds; of R@1 without biases alone). A claim is held if the largest p of all is
below 0.05 after Holm's correction; it is level if all intervals, over pictures too, lie within 0.5
points. The correction joins the comparisons of a paper's main claims, its method against baselines,
and, apart from them, those of all its other claims. A comparison that has not run counts with
p = 1, so that no verdict depends on what has run. kNN decides only where the baseline is above kNN
of the frozen features themselves.

Finished runs are small files below results/frozen/. Writes results/frozen.json, .md and .png, and
frozen_further.md.
"""

import math

from dataclasses import dataclass
from statistics import mean, stdev

from contrastive.core.files import write_json
from contrastive.core.words import flag_of
from contrastive.figures.base import figure, save_figure

from benchmarks.claims import Method
from benchmarks.compare import (
    RESULTS, TUNING_SEED, Runs, claims_parser, compare_pairs, correct, interval, markdown,
    metric_of, trivial_values)

import numpy as np
from scipy import stats

OPENCLIPART = "--recipe frozen --dataset openclipart --data-dir openclipart"
CONDITION = f"{OPENCLIPART} --max-steps 1000 --eval-every 0"  # of tuning and verdicts
FURTHER_CONDITIONS = {
    "5,000 steps": f"{OPENCLIPART} --max-steps 5000 --eval-every 0",
    "two layers": f"{CONDITION} --projection mlp",
    "emoji": "--recipe frozen --dataset emoji --max-steps 1000 --eval-every 0",
}
TAUS = (0.03, 0.05, 0.07, 0.1, 0.14, 0.2)
TUNING_SEEDS = range(TUNING_SEED, TUNING_SEED + 3)
PAIRS = range(20)  # all seeds that may have been run
LEVEL = 0.5  # points
RESAMPLES = 9999  # of the bootstrap
R1 = "R@1-Mean"  # of both directions, percent
NCL_R1 = "normalize/none/R@1-Mean"  # that of ncl.py, without biases at test time
QUEUE_R1 = "normalize/queue/R@1-Mean"
WITH_HITS = (R1, NCL_R1)  # metrics whose hits on each test picture are kept
KNN = "knn@1/mean_per_class"
# 100 training pictures each, read by eye
META_SET = "benchmarks/meta_openclipart.txt"
EMOJI_META_SET = "benchmarks/meta_emoji.txt"


# ===================================================== the claims =================================
@dataclass
class Claim:
    """A claim of a paper: a method against its baselines, all in CONDITION.

    Attributes:
        paper: its name.
        says: the claim, in words.
        source: where the paper has it.
        methods: list of Method, each tuned by its own metric; the first is claimed to be better
            than the others.
        main: whether it is the paper's method against baselines, not a part of it, a variant or
            another metric.
        test_metric: what is compared on test; empty: the metric of each method.
        scale: factor of `test_metric`, so that more is better.
    """

    paper: str
    says: str
    source: str
    methods: list
    main: bool = False
    test_metric: str = ""
    scale: float = 1


def over_taus(**factors):
    """The trials of a method: each flag is this factor times each of TAUS."""
    trials = []
    for tau in TAUS:
        words = []
        for name, factor in factors.items():
            words.append(f"{flag_of(name)} {factor * tau:.4g}")
        trials.append(" ".join(words))
    return tuple(trials)


# In the proportions of the papers: TeMo's 0.01 to 0.05; MM-TS's alpha and shifts on CC3M.
TAU = over_taus(tau=1)
RANGE = over_taus(tau_min=1, tau_alpha=4)
TEMO_RANGE = over_taus(tau=1, tau_min=1, tau_alpha=4)
SCHEDULE_AND_SHIFTS = over_taus(alpha=4 / 7, shift_min=5 / 7, shift_max=10 / 7)

# InfoNCE is the same run in all scripts; ncl.py measures biases and the normalisation error, too.
INFONCE = Method("InfoNCE", "ncl.py --loss infonce", TAU, NCL_R1)
# In 1,000 steps it moves little (from 0.1 to 0.085), so that its first value is tuned.
LEARNT_TAU = Method("learnt tau", "ncl.py --loss infonce --learnable-tau", TAU, NCL_R1)
BASELINES = [INFONCE, LEARNT_TAU]
NCL = Method("NCL", "ncl.py", TAU, NCL_R1)
NCL_AND_QUEUE = Method("NCL and queue", "ncl.py", TAU, QUEUE_R1)
MMTS = Method("MM-TS", "mmts.py", SCHEDULE_AND_SHIFTS, R1)
FIXED_MMTS = Method("fixed", "mmts.py --no-schedule --no-shifts", TAU, R1)


def temo_method(name, flags):
    """TeMo with these flags."""
    return Method(name, f"temo.py {flags}", TEMO_RANGE, R1)


def mama_method(name, flags):
    """MAMA with these flags, of which the first is the share of captions that are exchanged.

    Its loss is the sum of both directions, twice that of the others; hence the clipping.
    """
    return Method(name, f"mama.py --grad-clip 2 --caption-noise {flags}", TAU, R1)


TEMO = temo_method("TeMo", "--row g")
ROW_F = temo_method("row f", "--row f")
ROW_C = temo_method("row c", "--row c")
PRINTED = "--row g --similarity cosine --grad-augmented --image-aug simclr"
META = f"--weighting meta --a0 2 --meta-set {META_SET}"
NO_WEIGHTS = "--weighting none --a0 2"
NOISY_META = mama_method("meta, 30 %", f"0.3 {META}")

CLAIMS = {
    "ncl-training": Claim(
        paper="NCL",
        main=True,
        says="training with Sinkhorn's biases beats InfoNCE",
        source="Tables 1 to 4",
        methods=[NCL, *BASELINES]),
    "ncl-paper": Claim(
        paper="NCL",
        main=True,
        says="NCL with its queue beats InfoNCE as it is",
        source="Tables 1 to 3",
        methods=[NCL_AND_QUEUE, *BASELINES]),
    "ncl-queue": Claim(
        paper="NCL",
        says="the queue's biases at test time raise R@1",
        source="Table 5",
        methods=[NCL_AND_QUEUE, NCL]),
    "ncl-error": Claim(
        paper="NCL",
        says="training with Sinkhorn's biases lowers the normalisation error (text to image, "
             "hundredths below 0; both at InfoNCE's best temperature, on which it depends)",
        source="Fig. 2",
        methods=[
            Method("NCL", "ncl.py --tau 0.1", metric=NCL_R1),
            Method("InfoNCE", "ncl.py --loss infonce --tau 0.1", metric=NCL_R1),
        ],
        test_metric="normalize/none/error/text_to_image",
        scale=-100),
    "mmts": Claim(
        paper="MM-TS",
        main=True,
        says="temperatures by schedule and cluster size beat a fixed one",
        source="Table 4",
        methods=[MMTS, *BASELINES]),
    "mmts-rare": Claim(
        paper="MM-TS",
        says="the gain is in rare captions (R@1 of the third of the smallest clusters)",
        source="Section 3",
        methods=[MMTS, FIXED_MMTS],
        test_metric="by_cluster_size/tail/R@1"),
    "mmts-frequent": Claim(
        paper="MM-TS",
        says="MM-TS beats a fixed temperature on frequent captions (R@1 of the third of the "
             "largest clusters)",
        source="Section 3",
        methods=[MMTS, FIXED_MMTS],
        test_metric="by_cluster_size/head/R@1"),
    "mmts-schedule": Claim(
        paper="MM-TS",
        says="the schedule alone beats a fixed temperature",
        source="Table 4",
        methods=[
            Method("schedule", "mmts.py --no-shifts", over_taus(tau=1, alpha=4 / 7), R1),
            INFONCE,
        ]),
    "mmts-shifts": Claim(
        paper="MM-TS",
        says="shifts by cluster size alone beat a fixed temperature",
        source="Table 4",
        methods=[
            Method(
                "shifts", "mmts.py --no-schedule", over_taus(shift_min=5 / 7, shift_max=10 / 7),
                R1),
            INFONCE,
        ]),
    "mmts-margin": Claim(
        paper="MM-TS",
        says="margins by schedule and cluster size beat a fixed one",
        source="Table 9",
        methods=[
            Method("MM-TS, margin", "mmts.py --loss max-margin", SCHEDULE_AND_SHIFTS, R1),
            Method(
                "fixed margin",
                "mmts.py --loss max-margin --no-schedule --no-shifts",
                over_taus(margin=1),
                R1),
            INFONCE,
        ]),
    "temo": Claim(
        paper="TeMo",
        main=True,
        says="temperatures by pair and unimodal terms beat InfoNCE and TS",
        source="Table 1",
        methods=[TEMO, *BASELINES, Method("TS", "temo.py --loss ts", RANGE, R1)]),
    "temo-others": Claim(
        paper="TeMo",
        says="TeMo beats other temperatures and weights by pair",
        source="Table 1",
        methods=[
            TEMO,
            Method("DySTReSS", "temo.py --loss dystress", RANGE, R1),
            Method("CWCL", "temo.py --loss cwcl", TAU, R1),
        ]),
    "temo-knn": Claim(
        paper="TeMo",
        says="TeMo classifies better (kNN@1 over sub-categories)",
        source="Table 7",
        methods=[TEMO, *BASELINES],
        test_metric=KNN),
    "temo-gap": Claim(
        paper="TeMo",
        says="TeMo has a smaller modality gap (hundredths below 0)",
        source="Fig. 3",
        methods=[TEMO, *BASELINES],
        test_metric="modality_gap",
        scale=-100),
    "temo-weights": Claim(
        paper="TeMo",
        says="the quadratic weights of Eq. 8 beat fixed ones",
        source="Table 3, rows g and f",
        methods=[TEMO, ROW_F]),
    "temo-temperature": Claim(
        paper="TeMo",
        says="temperatures by pair beat plain unimodal terms",
        source="Table 3, rows f and c",
        methods=[ROW_F, ROW_C]),
    "temo-unimodal": Claim(
        paper="TeMo",
        says="plain unimodal terms, with second views and one temperature, beat InfoNCE",
        source="Table 3, rows c and a",
        methods=[ROW_C, INFONCE]),
    "temo-rows": Claim(
        paper="TeMo",
        says="the whole of TeMo beats its parts",
        source="Table 3",
        methods=[TEMO, *(temo_method(f"row {row}", f"--row {row}") for row in "ebd")]),
    "temo-printed": Claim(
        paper="TeMo",
        says="TeMo as its authors' code has it beats TeMo as printed",
        source="Eq. 4",
        methods=[
            TEMO,
            temo_method("printed", PRINTED),
            temo_method("printed, tau detached", f"{PRINTED} --detach-tau"),
        ]),
    "temo-views": Claim(
        paper="TeMo",
        says="a second draw of I's view is the best second view",
        source="none",
        methods=[
            TEMO,
            temo_method("SimCLR's", "--row g --image-aug simclr"),
            temo_method("crop", "--row g --image-aug crop"),
        ]),
    "mama-margin": Claim(
        paper="MAMA",
        main=True,
        says="a subtractive margin of 0.2 rad, the paper's, beats none",
        source="Fig. 4",
        methods=[mama_method("0.2 rad", f"0 {NO_WEIGHTS}"), *BASELINES]),
    "mama-small-margin": Claim(
        paper="MAMA",
        says="a subtractive margin of 0.01 rad, our default, beats none",
        source="Fig. 4",
        methods=[mama_method("0.01 rad", "0 --weighting none --a0 0.1"), INFONCE]),
    # the paper has no such comparison, but its weights are the method, and they need noise to act
    "mama-weights": Claim(
        paper="MAMA",
        main=True,
        says="weights learnt by looking ahead beat none, 30 % of the captions exchanged",
        source="none; see Table 8",
        methods=[NOISY_META, mama_method("no weights, 30 %", f"0.3 {NO_WEIGHTS}")]),
    "mama-weights-clean": Claim(
        paper="MAMA",
        says="weights learnt by looking ahead beat none, captions as they are",
        source="Table 5",
        methods=[
            mama_method("meta", f"0 {META}"),
            mama_method("0.2 rad", f"0 {NO_WEIGHTS}"),
        ]),
    "mama-others": Claim(
        paper="MAMA",
        says="weights learnt by looking ahead beat other weights, 30 % of the captions exchanged",
        source="Tables 6 and 8",
        methods=[
            NOISY_META,
            mama_method("focal, 30 %", "0.3 --weighting focal --a0 2"),
            mama_method("SPL, 30 %", "0.3 --weighting spl --a0 2"),
            mama_method("joint, 30 %", "0.3 --weighting joint --a0 2"),
        ]),
}


# ===================================================== tuning =====================================
def trials_of(method):
    """The commands ("script flags") of a method."""
    return [f"{method.command} {trial}".strip() for trial in method.trials]


def command_words(trial, condition=CONDITION):
    """The words of a trial in a condition."""
    script, *flags = trial.split()
    return [script, *condition.split(), *flags]


def val_values(runs, method):
    """{trial: its metric on val for each tuning seed}; {} before all trials have run."""
    values = {}
    for trial in trials_of(method):
        records = [runs.record(command_words(trial), seed) for seed in TUNING_SEEDS]
        if not all(records):
            return {}
        values[trial] = [metric_of(record, "val", method.metric) for record in records]
    return values


def best_trials(runs, method):
    """The best trial on val, and the second best if twice the standard error of their difference
    does not separate them."""
    if len(method.trials) == 1:
        return trials_of(method)
    values = val_values(runs, method)
    if not values:
        return []
    first, second, *_ = sorted(values, key=lambda trial: -mean(values[trial]))
    differences = [a - b for a, b in zip(values[first], values[second])]
    noise = 2 * stdev(differences) / len(differences) ** 0.5
    if mean(differences) <= noise:
        return [first, second]
    return [first]


def missing_runs(runs, claims, pairs, further=False):
    """Commands of these claims that can run now: the pairs follow once a method is tuned.

    Args:
        further: in the further conditions, which have no tuning of their own.
    """
    commands = []
    if further:
        for name in claims:
            for condition in further_conditions(CLAIMS[name]).values():
                for trial in first_trials(runs, CLAIMS[name], condition):
                    words = command_words(trial, condition)
                    commands += [runs.words(words, seed) for seed in pairs]
        return runs.unfinished(commands)
    for name in claims:
        for method in CLAIMS[name].methods:
            best = best_trials(runs, method)
            if len(method.trials) > 1:
                for trial in trials_of(method):
                    commands += [runs.words(command_words(trial), seed) for seed in TUNING_SEEDS]
            for trial in best:
                commands += [runs.words(command_words(trial), seed) for seed in pairs]
    return runs.unfinished(commands)


def first_trials(runs, claim, condition):
    """The best trial of a claim's method and that of its first baseline, as they run in a further
    condition; [] before both are tuned."""
    trials = []
    for method in claim.methods[:2]:
        for trial in best_trials(runs, method)[:1]:
            if condition == FURTHER_CONDITIONS["emoji"]:
                trial = trial.replace(META_SET, EMOJI_META_SET)
            trials.append(trial)
    if len(trials) < 2:
        return []
    return trials


def further_conditions(claim):
    """Those of FURTHER_CONDITIONS that have the metric of a claim."""
    conditions = dict(FURTHER_CONDITIONS)
    if claim.test_metric == KNN:
        del conditions["emoji"]
    return conditions


# ===================================================== verdicts ===================================
@dataclass
class Line:
    """A method against a baseline, each at one trial.

    Attributes:
        paired: Comparison over the paired seeds.
        pictures: (low, high) of the 95 % interval over the test pictures; None of a metric whose
            hits are not kept.
        p: two-sided, the larger one of both intervals.
    """

    method: str
    baseline: str
    method_mean: float
    baseline_mean: float
    paired: object
    pictures: tuple | None
    p: float

    def bounds(self):
        """(low, high) that hold both intervals."""
        lows = [self.paired.mean - self.paired.half]
        highs = [self.paired.mean + self.paired.half]
        if self.pictures is not None:
            lows.append(self.pictures[0])
            highs.append(self.pictures[1])
        return min(lows), max(highs)


@dataclass
class Result:
    """A claim against one of its baselines.

    Attributes:
        name: of the claim in CLAIMS.
        lines: a Line for each of the best trials of both sides; the claim has to hold at all.
        has_ground: whether the baseline's kNN is above that of features that learnt nothing.
        p: the largest of the lines; 1 before they have run, or if they differ in sign.
        p_holm: after Holm's correction.
    """

    name: str
    claim: Claim
    baseline: Method
    lines: list
    has_ground: bool = True
    p: float = 1.0
    p_holm: float = 1.0

    @property
    def verdict(self):
        """The verdict in words."""
        if not self.lines:
            return "not run"
        if not self.has_ground:
            return "no ground: the baseline's kNN is not above that of the frozen features"
        differences = [line.paired.mean for line in self.lines]
        if self.p_holm < 0.05 and min(differences) > 0:
            return "held"
        if self.p_holm < 0.05 and max(differences) < 0:
            return "not held: the baseline is better"
        if all(is_level(line) for line in self.lines):
            return "level"
        return "not decidable"


def is_level(line):
    """Whether both intervals of a Line lie within LEVEL points of 0."""
    if line.pictures is None:
        return False
    low, high = line.bounds()
    return low >= -LEVEL and high <= LEVEL


def joint_p(lines):
    """The p of a claim that has to hold at all Lines; 1 if there are none or they disagree."""
    signs = {line.paired.mean > 0 for line in lines}
    if len(signs) != 1:
        return 1.0
    return max(line.p for line in lines)


def records_of(runs, trial, condition=CONDITION):
    """{seed: record} of the finished pairs of a trial."""
    words = command_words(trial, condition)
    records = {seed: runs.record(words, seed) for seed in PAIRS}
    return {seed: record for seed, record in records.items() if record}


def picture_hits(records):
    """(Q,) how often each test picture and its caption are found first, mean over seeds, percent.

    The data set has one caption a picture, so that the directions have the same pictures.
    """
    hits = []
    for record in records.values():
        for digits in record["hits"].values():
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


def test_values(claim, method, records):
    """{seed: what a claim compares} of the records of one of its methods."""
    metric = claim.test_metric or method.metric
    values = {}
    for seed, record in records.items():
        values[seed] = claim.scale * metric_of(record, "test", metric)
    return values


def compare_trials(runs, claim, baseline, trials, condition=CONDITION):
    """The Line of two trials, of a claim's method and of a baseline.

    Returns: None before two pairs have run.
    """
    records = records_of(runs, trials[0], condition)
    others = records_of(runs, trials[1], condition)
    seeds = sorted(records.keys() & others.keys())
    if len(seeds) < 2:
        return None
    records = {seed: records[seed] for seed in seeds}
    others = {seed: others[seed] for seed in seeds}
    values = test_values(claim, claim.methods[0], records)
    baseline_values = test_values(claim, baseline, others)
    comparison = compare_pairs(values, baseline_values)
    line = Line(*trials, mean(values.values()), mean(baseline_values.values()), comparison, None,
                comparison.p)
    metrics = {claim.test_metric or method.metric for method in (claim.methods[0], baseline)}
    if condition == CONDITION and metrics <= set(WITH_HITS):
        differences = picture_hits(records) - picture_hits(others)          # (Q,)
        if abs(differences.mean() - comparison.mean) > 1e-6:
            raise ValueError(f"{trials[0]}: the hits are not those of its R@1")
        line.pictures, p = bootstrap(differences)
        line.p = max(p, comparison.p)
    return line


def baseline_has_ground(runs, claim, baseline):
    """Whether a claim by kNN can be decided: its baseline is clearly above the frozen features."""
    if claim.test_metric != KNN:
        return True
    for trial in best_trials(runs, baseline):
        records = list(records_of(runs, trial).values())
        if len(records) < 2:
            return False
        center, half = interval([metric_of(record, "test", KNN) for record in records])
        if center - half <= max(trivial_values(records[0], KNN).values()):
            return False
    return True


def lines_of(runs, claim, baseline):
    """The Lines of a claim against a baseline, at each of the best trials of both sides; [] before
    all of them have run."""
    lines = []
    for trial in best_trials(runs, claim.methods[0]):
        for baseline_trial in best_trials(runs, baseline):
            lines.append(compare_trials(runs, claim, baseline, (trial, baseline_trial)))
    if None in lines:
        return []
    return lines


def results_of(runs):
    """The Results of all claims, run or not, with Holm's correction."""
    results = []
    families = {}  # {(paper, main): its Results that Holm's correction joins}
    for name, claim in CLAIMS.items():
        for baseline in claim.methods[1:]:
            result = Result(name, claim, baseline, lines_of(runs, claim, baseline))
            results.append(result)
            result.p = joint_p(result.lines)
            if result.lines:
                result.has_ground = baseline_has_ground(runs, claim, baseline)
            if not result.has_ground:
                result.p = 1.0
            families.setdefault((claim.paper, claim.main), []).append(result)
    for family in families.values():
        correct(family)
    return results


# ===================================================== the table ==================================
def write_report(runs):
    """Writes the table, its numbers and the picture of the tuning. Returns: the table's lines."""
    results = results_of(runs)
    rows, not_run = [], []
    for result in results:
        claim = f"{result.claim.paper}: {result.claim.says} ({result.claim.source})"
        verdict = result.verdict
        if verdict in ("held", "not held: the baseline is better", "not decidable"):
            verdict += f" (p {result.p_holm:.2g})"
        for line in result.lines:
            rows.append([claim, *row_of(result, line), verdict])
            claim = ""  # only in its first line
            verdict = ""
        if not result.lines:
            not_run.append(f"- {result.claim.paper}: {result.claim.says}: "
                           f"{result.claim.methods[0].name} against {result.baseline.name}")
    table = markdown(["claim", "method", "against", "pairs", "difference, 95 % over seeds",
                      "95 % over pictures", "verdict"], rows)
    text = [*table, ""]
    if not_run:
        text += ["Not run:", "", *not_run, ""]
    text += [f"{CONDITION}; R@1 is the mean of both directions.", ""]
    RESULTS.joinpath("frozen.md").write_text("\n".join(text), encoding="utf8")
    further = further_table(runs)
    if further:
        RESULTS.joinpath("frozen_further.md").write_text("\n".join(further), encoding="utf8")
    write_json(RESULTS / "frozen.json", [to_json(result) for result in results if result.lines])
    draw_tuning(runs, RESULTS / "frozen.png")
    return text + further


def row_of(result, line):
    """A row of the table, without the claim and the verdict."""
    pictures = ""
    if line.pictures is not None:
        low, high = line.pictures
        pictures = f"{low:+.2f} to {high:+.2f}"
    return [
        f"{result.claim.methods[0].name} `{line.method}` {line.method_mean:.1f}",
        f"{result.baseline.name} `{line.baseline}` {line.baseline_mean:.1f}",
        str(len(line.paired.seeds)),
        difference_text(line.paired),
        pictures]


def difference_text(paired):
    """The mean of a Comparison with its interval, which pairs that are all alike do not give."""
    if math.isinf(paired.half):
        return f"{paired.mean:+.2f}, all pairs alike"
    return f"{paired.mean:+.2f} ± {paired.half:.2f}"


def further_table(runs):
    """The lines of a table of the further conditions, without verdicts; [] before any has run."""
    rows = []
    for claim in CLAIMS.values():
        baseline = claim.methods[1]
        for title, condition in further_conditions(claim).items():
            trials = first_trials(runs, claim, condition)
            line = None
            if trials:
                line = compare_trials(runs, claim, baseline, trials, condition)
            if line is not None:
                rows.append([
                    title, f"{claim.paper}: {claim.says}",
                    f"{claim.methods[0].name} `{line.method}` {line.method_mean:.1f}",
                    f"{baseline.name} `{line.baseline}` {line.baseline_mean:.1f}",
                    str(len(line.paired.seeds)),
                    difference_text(line.paired)])
    if not rows:
        return []
    titles = ["condition", "claim", "method", "against", "pairs", "difference, 95 % over seeds"]
    return ["Other conditions at the same temperatures, without a verdict:", "",
            *markdown(titles, rows), ""]


def to_json(result):
    """A Result as plain values."""
    lines = []
    for line in result.lines:
        lines.append({
            "method": line.method, "baseline": line.baseline, "method_mean": line.method_mean,
            "baseline_mean": line.baseline_mean, "seeds": line.paired.seeds,
            "differences": line.paired.differences, "half": line.paired.half,
            "pictures": line.pictures, "p": line.p})
    return {"claim": result.name, "baseline": result.baseline.name, "lines": lines, "p": result.p,
            "p_holm": result.p_holm, "verdict": result.verdict}


def draw_tuning(runs, path):
    """Draws R@1 on val over the temperature, a panel for each claim.

    Bars are the standard error over the seeds. A claim whose curves all stand in an earlier panel
    has none.
    """
    panels = {}  # {title: {name of a method: for each of TAUS its values on val}}
    for claim in CLAIMS.values():
        curves = {}
        for method in claim.methods:
            values = list(val_values(runs, method).values())
            if len(values) > 1:
                curves[method.name] = values
        if curves and not any(is_part_of(curves, panel) for panel in panels.values()):
            panels[f"{claim.paper}: {claim.says}"] = curves
    if not panels:
        return
    fig, axes = figure(len(panels), columns=3, width=4.6, height=3.2)
    for ax, (title, curves) in zip(axes, panels.items()):
        for name, values in curves.items():
            means = [mean(of_trial) for of_trial in values]
            errors = [stdev(of_trial) / len(of_trial) ** 0.5 for of_trial in values]
            ax.errorbar(TAUS, means, errors, marker=".", capsize=2, label=name)
        ax.set(title=title, xlabel="temperature", ylabel="R@1 on val, %", xscale="log")
        ax.set_xticks(TAUS, [f"{tau:g}" for tau in TAUS])
        ax.minorticks_off()
        ax.margins(y=0.3)  # room for the legend
        ax.legend()
    save_figure(fig, path)


def is_part_of(curves, panel):
    """Whether a panel has all these curves, under whatever name: methods may share runs."""
    return all(values in panel.values() for values in curves.values())


def main(argv=None):
    """Runs what is missing, and writes the table."""
    p = claims_parser(__doc__, CLAIMS, num_seeds=10)
    p.add_argument("--further", action="store_true",
                   help="run the further conditions: 5,000 steps, two layers, emoji")
    args = p.parse_args(argv)
    runs = Runs(RESULTS / "frozen", jobs=args.jobs)

    def missing():
        return missing_runs(runs, args.claims, range(args.seeds), args.further)

    failed = set()
    if not args.report:
        failed = runs.run_all(missing)
    print(*write_report(runs), sep="\n")
    print(f"{len(missing())} runs left of {', '.join(args.claims)}, more where methods are not "
          "tuned")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
