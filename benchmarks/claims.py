"""The table of the papers' claims, on data that come with the project: compare.py's runs and statistics, every method
against equally tuned baselines, among them InfoNCE with a learnt temperature where a temperature or margin is claimed.

    python -m benchmarks.claims --claims ncl-training mama-weights --seeds 5 --jobs 2
    python -m benchmarks.claims --claims ts-long-tail --length 3 --seeds 3
    python -m benchmarks.claims --report                        # tables of the finished runs; no run

A claim compares arms on one metric of the test split; arms share data, order, views and seeds. Every arm of a claim has
equally many trials, compared by one metric on val. Longer than 1, epochs, warm-up, the period of TS and the rise of
MAMA's margin grow with the run; arms are tuned again at length 3, last by half and twice the learning rate of the best
trial, and longer runs keep that choice. Holm's correction is over all lines of one length. A claim tuned by kNN decides
nothing unless its baseline's kNN is clearly above raw pixels, colours and the untrained tower ("no ground").

Finished runs are small files below results/claims/. Writes results/claims.json and .md (length 1), claims_3, claims_10.
"""

import argparse
import functools
import math
import os
from statistics import mean

from contrastive.engine.ranges import count

from benchmarks.compare import LINE, RESULTS, Arm, Runs, cells, decide, interval, markdown, paired, write

TUNED, RATES = 3, (0.5, 2.0)  # the length at which longer runs are tuned; factors of the learning rate tried there
PAIRS, LENGTHS = range(20), (1, TUNED, 10)  # all that may have been run
T2V, V2T, KNN = "text_to_image/R@1", "image_to_text/R@1", "knn@1/mean_per_class"
ALSO = {  # reported beside a metric, but no claim is decided by them
    T2V: {"t2v R@1": T2V, "t2v R@10": "text_to_image/R@10", "v2t R@1": V2T, "v2t R@10": "image_to_text/R@10"},
    KNN: {"kNN@1": KNN, "kNN@10": "knn@10/mean_per_class", "few-shot probe": "few-shot/mean_per_class",
          "head kNN@1": "knn@1/head", "mid kNN@1": "knn@1/mid", "tail kNN@1": "knn@1/tail"}}

# the same data set, towers and order of clips in all five scripts, so that an arm can be used for every claim
MOVING = ("--dataset moving-emoji --clips 4000 300 2000 --epochs 10 --batch-size 128 --warmup-epochs 1 --jitter 0.2 "
          "--crop-min 0.8 --eval-every 0")
MAMA = "mama.py --weighting none --caption-noise 0 --grad-clip 2"  # its loss is the sum of both directions, twice NCL's
PLAIN = f"normalize/none/{T2V}"  # of ncl.py, which reports numbers after the queue's biases


def learnt(script, rates=("2e-3", "1e-3", "4e-3")):
    """InfoNCE with a learnt temperature, which each script clamps: the field's first baseline."""
    return [f"{script} --loss infonce --learnable-tau --tau 0.07 --lr {rate}" for rate in rates]


FIXED_MMTS, TS_PY = "mmts.py --no-schedule --no-shifts", "temperature_schedules.py"
LEARNT, LEARNT_MMTS = (PLAIN, learnt("ncl.py")), learnt(FIXED_MMTS)
INFONCE = (PLAIN, [f"ncl.py --loss infonce --tau {t}" for t in (0.05, 0.1, 0.2)])
NCL = (PLAIN, [f"ncl.py --tau {t}" for t in (0.05, 0.1, 0.2)])
WITH_QUEUE = (f"normalize/queue/{T2V}", NCL[1])  # the paper's NCL, tuned and tested with its queue
ERROR = "normalize/{}/error/text_to_image"
MMTS = ["mmts.py", "mmts.py --alpha 0.04 --shift-min 0.04 --shift-max 0.08",
        "mmts.py --alpha 0.04 --shift-min 0.1 --shift-max 0.2"]
MARGIN = [f"{MAMA} --tau 0.1 --a0 0.5", f"{MAMA} --tau 0.1 --a0 1", f"{MAMA} --tau 0.2 --a0 2"]
TEMO = [f"temo.py --tau {t} --tau-min {m} --tau-alpha {a}" for t, m, a in (
    (0.1, 0.05, 0.1), (0.05, 0.05, 0.1), (0.05, 0.03, 0.07))]
OF_ROW = {"a": "--tau 0.05", "b": "--tau-min 0.05 --tau-alpha 0.1", "c": "--tau 0.05"}  # b: no L_MM; a, c: no tau_ij
ROWS = {f"row {r}": [f"temo.py --row {r} {OF_ROW.get(r, '--tau 0.05 --tau-min 0.05 --tau-alpha 0.1')}"]
        for r in "gfedcba"}
PRINTED = "--similarity cosine --grad-augmented --image-aug simclr"  # and T the caption: there are no paraphrases here
TEMO_INFONCE = [f"temo.py --loss infonce --tau {t}" for t in (0.05, 0.1, 0.2)]  # its jitter meets 80 % of the images
GRID = [(0.1, 0.1), (0.5, 0.1), (1, 0.1), (2, 0.1), (1, 0.05), (1, 0.2)]  # (mu / tau, tau); mu is a0 / 10 radians
TAUS = (0.1, 0.05, 0.2, 0.07, 0.14, 0.03)
TS = [f"temo.py --loss ts --tau-min {t} --tau-alpha {a}" for t, a in ((0.05, 0.1), (0.03, 0.07), (0.1, 0.1))]
AGAINST_TEMO = {"TeMo": TEMO, "InfoNCE": TEMO_INFONCE, "learnt tau": learnt("temo.py"), "TS": TS}
# 500 images of the largest of 60 classes to 5 of the smallest; 5 periods of 12 epochs, less the last 0.3
LONG_TAIL = "--dataset emoji-scenes --epochs 60 --warmup-epochs 2 --period 12 --eval-every 0"
STOPPED = LONG_TAIL + " --stop-at-phase 0.7"
SWITCHES = ("step", "random", "oscillating")
COSINE = [f"{TS_PY} {f}" for f in ("--tau-max 0.5", "--tau-max 1.0", "--tau-min 0.07 --tau-max 0.3")]
FIXED = [f"{TS_PY} --schedule fixed --tau-min {t}" for t in (0.1, 0.2, 0.4)]
LEARNT_TS = [f"{TS_PY} --schedule fixed --learnable-tau --tau-min 0.07 --lr {r}" for r in ("2e-3", "1e-3", "4e-3")]
AGAINST_COSINE = {"cosine": COSINE, "fixed": FIXED, "learnt tau": LEARNT_TS}
NOISY = ("--dataset moving-emoji --clips 2000 300 2000 --caption-noise 0.3 --margin-schedule none --eval-every 0 "
         "--weighting")
META = [f"mama.py meta --meta-lr {r}" for r in ("2e-4", "6e-4", "6e-5")]
UNWEIGHTED = [f"mama.py none --tau {t}" for t in (0.1, 0.05, 0.2)]


def claim(says, paper, arms, flags=MOVING, metric=T2V, **more):
    """says: the claim; the metric is added.   paper: where it is, and its method minus its baseline in points.   arms:
    name -> its trials (script and flags) or (metric, trials); the method comes first.   flags: of every arm, before its
    own.   metric: on val it chooses the trial.   more: read: the metric compared on test, if it is another, or {arm:
    metric}; scale: factor, so that more is better; tuning: seeds of the trials, if not one."""
    if metric and "read" not in more:
        says += {T2V: " (text -> video R@1)", KNN: " (kNN@1)"}[metric]
    return {"says": says, "paper": paper, "flags": flags, "metric": metric, "arms": arms, "read": metric} | more


on_long_tail = functools.partial(claim, flags=STOPPED, metric=KNN, tuning=3)
ZIPF = MOVING + " --clip-law zipf"
AT_TEST = {kind: (f"normalize/{kind}/{T2V}", ["ncl.py"]) for kind in ("none", "queue", "oracle")}


def margin_grid(weighting, says):
    """The margin and no margin, each over equally many trials of a fine grid."""
    arm = MAMA.replace("none", weighting)
    return claim(f"the subtractive margin beats none, both of a fine grid, {says}", "MAMA, Fig. 4", {
        "margin": [f"{arm} --tau {t} --a0 {10 * r * t:g}" for r, t in GRID],
        "no margin": [f"{arm} --margin-schedule none --tau {t}" for t in TAUS],
        "learnt tau": (PLAIN, learnt("ncl.py", ("2e-3", "1e-3", "4e-3", "1.4e-3", "2.8e-3", "5e-4")))})


CLAIMS = {
    "ncl-training": claim("training with Sinkhorn's biases beats InfoNCE", "NCL, Tables 1 to 4, its training alone",
                          {"NCL": NCL, "InfoNCE": INFONCE, "learnt tau": LEARNT}),
    "ncl-paper": claim("NCL with its queue beats InfoNCE as it is, every test clip new",
                       "NCL, Tables 1 to 3: +5.4 ActivityNet, +1.6 MSVD, +1.8 MSR-VTT",
                       {"NCL and queue": WITH_QUEUE, "InfoNCE": INFONCE, "learnt tau": LEARNT}),
    "ncl-error": claim(
        "training with Sinkhorn's biases lowers the normalisation error (text -> video; here its hundredths below 0)",
        "NCL, Fig. 2, without its queue", {"NCL": NCL, "InfoNCE": INFONCE}, read=ERROR.format("none"), scale=-100),
    "ncl-error-queue": claim(
        "NCL with its queue lowers the normalisation error of InfoNCE, every test clip new (text -> video; its "
        "hundredths below 0)", "NCL, Fig. 2", {"NCL and queue": WITH_QUEUE, "InfoNCE": INFONCE}, scale=-100,
        read={"NCL and queue": ERROR.format("queue"), "InfoNCE": ERROR.format("none")}),
    "mmts-all": claim("temperatures by schedule and cluster size beat the best fixed one",
                      "MM-TS, Table 4; Table 1, CC3M: +0.6 Flickr30K, -0.1 COCO",
                      {"TS and ICS": MMTS, "InfoNCE": INFONCE, "learnt tau": LEARNT_MMTS}),
    "mama-margin": claim("the subtractive margin beats none", "MAMA, Fig. 4",
                         {"margin": MARGIN, "InfoNCE": INFONCE, "learnt tau": LEARNT}),
    "mama-margin-grid": margin_grid("none", "without weights"),
    "mama-margin-grid-weights": margin_grid("meta", "with learnt weights"),
    "ts-long-tail": on_long_tail("a cosine temperature beats the best fixed one on a long tail",
                                 "TS, Table 1: +3.2 CIFAR10-LT, +2.2 CIFAR100-LT", AGAINST_COSINE),
    "ts-tail": on_long_tail("the gain of the cosine temperature is in the rare classes (kNN@1 of the tail)",
                            "TS, Tables 7 to 9: +2.9 CIFAR10-LT, +1.1 CIFAR100-LT, +2.4 ImageNet100-LT",
                            AGAINST_COSINE, read="knn@1/tail"),
    "ts-few-shot": on_long_tail("a cosine temperature beats the best fixed one on a long tail (few-shot probe)",
                                "TS, Table 1: +3.6 CIFAR10-LT, +3.2 CIFAR100-LT, +2.5 ImageNet100-LT",
                                AGAINST_COSINE, read="few-shot/mean_per_class"),
    "ts-stop": on_long_tail("a run of TS is best stopped at 0.7 of its last period", "TS, Section 4.3", {
        "stopped": [f"{c} --stop-at-phase 0.7" for c in COSINE], "whole": COSINE}, flags=LONG_TAIL),
    "ts-range": on_long_tail("a wider range of temperatures is better on a long tail", "TS, Table 4", {
        "0.07 to 1.0": [f"{TS_PY} --tau-min 0.07 --tau-max 1.0"], "0.1 to 0.3": [f"{TS_PY} --tau-max 0.3"]}),
    "ts-switching": on_long_tail("the cosine is the best way to switch, and any is better than none", "TS, Table 5", {
        "cosine": COSINE, **{kind: [f"{c} --schedule {kind}" for c in COSINE] for kind in SWITCHES}, "fixed": FIXED,
        "learnt tau": LEARNT_TS}),
    "ts-uniform": on_long_tail(
        "a cosine temperature beats a fixed one on classes of one size; the paper sees no gain", "TS, Table 10",
        {arm: [f"{t} --imbalance-ratio 1 --scenes 110 10 25" for t in trials] for arm, trials in
         AGAINST_COSINE.items()}),
    "temo-retrieval": claim("TeMo beats InfoNCE and TS in retrieval",
                            "TeMo, Table 1: +1.6 and +1.3 COCO, +2.0 and +1.3 Flickr30K", AGAINST_TEMO),
    "temo-gap": claim("TeMo's embeddings have the smallest modality gap (hundredths below 0)", "TeMo, Fig. 3",
                      AGAINST_TEMO, read="modality_gap", scale=-100),
    "mama-weights": claim("weights learnt by looking ahead beat none under mismatched captions", "none; see Table 8",
                          {"meta": META, "no weights": UNWEIGHTED}, flags=NOISY, tuning=3),  # one seed misled
    "mama-others": claim(
        "weights learnt by looking ahead beat other weights under mismatched captions", "MAMA, Tables 6 and 8",
        {"meta": META, "focal": [f"mama.py focal --focal-gamma {g}" for g in (0.5, 1, 2)],
         "SPL": [f"mama.py spl --spl-start {k}" for k in (0.3, 0.5, 0.7)],
         "joint": [f"mama.py joint --lr {r}" for r in ("2e-3", "6e-4", "6e-3")]}, flags=NOISY),
    "mmts-rare": claim(
        "the gain of MM-TS is in rare captions (R@1 of the queries of the smallest clusters)", "none; MM-TS, Section 3",
        {"TS and ICS": MMTS, "fixed": [f"{FIXED_MMTS} --tau {t}" for t in (0.05, 0.1, 0.2)],
         "learnt tau": LEARNT_MMTS}, read="by_cluster_size/tail/R@1"),
    "mmts-parts": claim(
        "one fixed temperature beats a learnt one and MM-TS, its parts and variants", "MM-TS, Tables 4 and 8", {
            "fixed": [f"{FIXED_MMTS} --tau 0.1"], "learnt tau": LEARNT_MMTS[:1], "TS and ICS": ["mmts.py"],
            "TS": ["mmts.py --no-shifts --tau 0.1"], "ICS": ["mmts.py --no-schedule"],
            "narrow": ["mmts.py --alpha 0.02 --shift-min 0.09 --shift-max 0.11"],
            "true clusters": ["mmts.py --clusters verb-noun"], "ends low": ["mmts.py --periods 4.5"]}),
    "ncl-queue": claim("the queue's biases at test time raise R@1 where test queries are like training queries",
                       "NCL, Table 5", {"queue": AT_TEST["queue"], "none": AT_TEST["none"]}, flags=ZIPF, metric=""),
    "ncl-oracle": claim("biases from the test queries themselves are a bound above the queue's", "NCL, Table 5",
                        {"oracle": AT_TEST["oracle"], "queue": AT_TEST["queue"]}, flags=ZIPF, metric=""),
    "mmts-margin": claim(
        "margins by schedule and cluster size beat the best fixed one", "MM-TS, Table 9",
        {"TS and ICS": [f"mmts.py --loss max-margin {f}" for f in (
            "", "--alpha 0.1 --shift-min 0.1 --shift-max 0.2", "--alpha 0.1 --shift-min 0.3 --shift-max 0.5")],
         "fixed": [f"mmts.py --loss max-margin --no-schedule --no-shifts --margin {m}" for m in (0.2, 0.1, 0.4)],
         "learnt tau": LEARNT_MMTS}),
    "temo-printed": claim(
        "TeMo as its authors' code has it beats TeMo as printed, with and without a gradient through tau",
        "none; TeMo, Eq. 4", {"code": TEMO, "printed": [f"{t} {PRINTED}" for t in TEMO],
                              "printed, tau detached": [f"{t} {PRINTED} --detach-tau" for t in TEMO]}),
    "temo-rows": claim("the whole of TeMo is better than its parts", "TeMo, Table 3", ROWS),
    "temo-views": claim("a second draw of I's view is the best I~", "none", {
        "same": ROWS["row g"], "SimCLR's": [ROWS["row g"][0] + " --image-aug simclr"],
        "crop": [ROWS["row g"][0] + " --image-aug crop"]}),
}


# ------------------------------------------------------- commands ----------------------------------------------------
def times(words, flag, factor, today):
    """The words with `factor` times a flag's number, or times `today` at the end where it is not said."""
    if flag not in words:
        return [*words, flag, f"{factor * today:g}"]
    at = len(words) - words[::-1].index(flag)  # behind the last of several, which counts
    return [*words[:at], f"{factor * float(words[at]):g}", *words[at + 1:]]


def scaled(words, length, rate=1):
    """A command `length` times as long, with `rate` times the learning rate; unchanged at length 1."""
    if length != 1:
        words = times(words, "--epochs", length, 10)
        words = times(words, "--warmup-epochs", length, 10 if words[0] == "temperature_schedules.py" else 1)
        words = times(words, "--period", length, 0) if "--period" in words else words
        if words[0] == "mama.py" and "--margin-schedule" not in words:
            words = times(words, "--a2", 1 / length, 0.1)
    return words if rate == 1 else times(words, "--lr", rate, 2e-3)


def arm_of(runs, name, arm, length):
    """The arm of a claim at a length, with the trials that can be compared so far.

    Longer than TUNED it is the choice of that length; before that is known, it is the arm of that length."""
    claim = CLAIMS[name]
    value, read = claim["arms"][arm], claim["read"]
    metric, flags = value if isinstance(value, tuple) else (claim["metric"], value)
    read = read[arm] if isinstance(read, dict) else metric if read == claim["metric"] else read
    plain = next(m for m in ALSO if metric.endswith(m))  # without normalize/none/ and the like
    also = {title: metric.removesuffix(plain) + path for title, path in ALSO[plain].items()}
    tried = [([script, *claim["flags"].split(), *own], 1) for script, *own in map(str.split, flags)]

    def made(length):
        trials = [scaled(words, length, rate) for words, rate in tried]
        return Arm(metric, trials, read, claim.get("scale", 1), also, claim.get("tuning", 1))
    first = made(min(length, TUNED))
    best = runs.best(first)
    if length == 1 or best is None:
        return first
    if len(tried) > 1:
        tried += [(tried[first.trials.index(best)][0], rate) for rate in RATES]
    tuned = made(TUNED)
    best = runs.best(tuned)
    if length == TUNED or best is None:
        return tuned
    tried = [tried[tuned.trials.index(best)]]
    return made(length)


# ------------------------------------------------------- tables ------------------------------------------------------
def judge_all(runs, length):
    """{claim: {method, arms: {name: measured}, against: {baseline: line with its verdict}}} of a length, from its
    finished runs."""
    found, lines = {}, []
    words = {"better": "held", "worse": "not held: the baseline is better", "not decidable": "not decidable here"}
    for name, claim in CLAIMS.items():
        arms = {arm: of for arm in claim["arms"] if (of := runs.measure(arm_of(runs, name, arm, length), PAIRS))}
        method, *baselines = claim["arms"]
        against = {}
        for baseline in baselines:
            these, those = (arms.get(arm, {"test": {}}) for arm in (method, baseline))
            if len(these["test"].keys() & those["test"].keys()) < 2:
                continue
            against[baseline] = line = paired(these["test"], those["test"])
            line["also"] = {title: interval([of[k] - those["also"][title][k] for k in line["seeds"]])
                            for title, of in these["also"].items()}
            line["verdict"] = "no ground"
            least, half = interval([*those["also"].get("kNN@1", {0: 0}).values()])
            if claim["metric"] != KNN or least - half > max(those["trivial"].values(), default=math.inf):
                lines.append(line)
        found[name] = {"method": method, "arms": arms, "against": against}
    decide(lines)
    for line in lines:
        line["verdict"] = words.get(line["verdict"], line["verdict"])
    return found


def rows_of(name, result):
    """Rows of a claim: each baseline against the method on the seeds that both have, and all metrics; or not run."""
    words = [CLAIMS[name]["says"], CLAIMS[name]["paper"]]
    for baseline in [arm for arm in CLAIMS[name]["arms"] if arm != result["method"]]:
        line, names, also = result["against"].get(baseline), [result["method"], baseline], []
        if line:
            names = [f"{arm} {mean(result['arms'][arm]['test'][k] for k in line['seeds']):.1f}" for arm in names]
            also = [f"{title} {at:+.1f} ± {half:.1f}" for title, (at, half) in line["also"].items()]
            also += [f"{name} {value:.1f}" for name, value in result["arms"][baseline]["trivial"].items()]
        yield [*words, *names, *(cells(line) if line else ["", "", "", "not run"])], [name, *names, "; ".join(also)]
        words = ["", ""]


def write_tables(runs):
    """The tables of all lengths from the finished runs; returns their lines."""
    printed = []
    for length in LENGTHS:
        found = {name: result for name, result in judge_all(runs, length).items() if result["against"] or length == 1}
        rows, also = zip(*(pair for name, result in found.items() for pair in rows_of(name, result)))
        arms = [arm for result in found.values() for arm in result["arms"].values()]
        table = markdown(["claim", "paper, its difference", "method", "against", *LINE], rows)
        write(RESULTS / ("claims" if length == 1 else f"claims_{length}"), found, arms, [
            *table, "", "All directions and metrics, differences with 95 % intervals; a claim is decided by one:", "",
            *markdown(["claim", "method", "against", "differences"], [row for row in also if row[-1]])])
        printed += [f"length {length}", "", *table, ""]
    return printed


def main(argv=None):
    """Runs what is missing, and writes the tables."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="which are run")
    p.add_argument("--length", type=count, default=1, help="times the steps of today's runs; tables have 1, 3 and 10")
    p.add_argument("--seeds", type=count, default=5, help="pairs of runs of each arm")
    p.add_argument("--jobs", type=count, default=os.cpu_count(), help="runs side by side, one thread each")
    p.add_argument("--report", action="store_true", help="run nothing")
    args = p.parse_args(argv)
    runs = Runs(RESULTS / "claims", jobs=args.jobs)

    def left():
        arms = [arm_of(runs, name, arm, args.length) for name in args.claims for arm in CLAIMS[name]["arms"]]
        return runs.left(arms, range(args.seeds))
    failed = () if args.report else runs.run_all(left)
    print(*write_tables(runs), sep="\n")
    print(f"{len(left())} runs left of {', '.join(args.claims)} at length {args.length}, more where arms are not tuned")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
