"""Methods against baselines over seeds: runs a script once per (variant, seed), writes the table to benchmarks/results.

    python benchmarks/claims.py --name temo_emoji --seeds 0 1 2 --variant "TeMo" --variant "InfoNCE: --loss infonce"

Runs that are finished already (same flags, seed and commit in the results file) are not run again. The table shows
mean and spread (standard deviation over seeds) of the test split. Every run is one process with all cores; nothing else
should run beside it.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

TS_COLUMNS = {"kNN@1": "knn@1/mean_per_class", "kNN@10": "knn@10/mean_per_class",
              "few-shot": "few-shot/mean_per_class", "all": "all/mean_per_class",
              "kNN@1 head": "knn@1/head", "mid": "knn@1/mid", "tail": "knn@1/tail"}
NCL_COLUMNS = {"t2v R@1": "text_to_image/R@1", "t2v R@10": "text_to_image/R@10",
               "v2t R@1": "image_to_text/R@1", "v2t R@10": "image_to_text/R@10",
               "error t2v": "error/text_to_image", "error v2t": "error/image_to_text"}
COLUMNS = {"t2i R@1": "text_to_image/R@1", "t2i R@10": "text_to_image/R@10",
           "i2t R@1": "image_to_text/R@1", "i2t R@10": "image_to_text/R@10",
           "kNN@1": "knn@1/top1", "gap": "modality_gap"}
KEPT = ("commit", "steps", "wall_s", "samples_per_s", "peak_memory_mb", "val", "test", "chance")  # of a run's summary


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


def main():
    """Run what is missing, write the results file and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--name", required=True, help="of the results file")
    parser.add_argument("--script", default="temo.py", help="script to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds")
    parser.add_argument("--variant", action="append", required=True, help="'NAME' or 'NAME: flags'; repeat")
    parser.add_argument("--common", default="", help="flags of every run")
    args = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / f"{args.name}.json"
    results = json.loads(path.read_text()) if path.exists() else {"runs": []}
    for seed in args.seeds:
        for variant in args.variant:
            name, _, flags = variant.partition(":")
            command = f"python {args.script} --seed {seed} {args.common} {flags.strip()}".split()
            text = " ".join(command)
            if any(r["command"] == text and r["commit"] == common.commit() for r in results["runs"]):
                continue
            summary = run(ROOT / args.script, command[2:])
            results["runs"].append({
                "variant": name, "seed": seed, "command": text, "date": str(datetime.date.today()),
                "machine": machine(), "versions": common.versions().split("\n")[:9], **{k: summary[k] for k in KEPT}})
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(results, indent=1))
            print(name, seed, short(summary["test"]), f"{summary['wall_s']:.0f} s", flush=True)
    table = markdown(results["runs"])
    path.with_suffix(".md").write_text(table)
    print(table)


def run(script, flags):
    """The summary of one run of a script, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), *flags, "--output-dir", folder, "--run-name", "run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.loads((Path(folder) / "run" / "summary.json").read_text())


def short(test):
    """The numbers of the table's columns, of the first data set."""
    numbers = common.flatten(next(iter(test.values())))
    return {k: round(numbers.get(v, float("nan")), 2) for k, v in columns_of(test).items()}


def columns_of(test):
    """The columns of a retrieval result, plain or under one normalisation, or of a classification one."""
    first = next(iter(test.values()))
    if "error" in first:
        return NCL_COLUMNS
    return COLUMNS if "text_to_image" in first else TS_COLUMNS


def by_normalization(runs):
    """A run with several test-time normalisations (ncl.py) counts as one variant for each."""
    split = []
    for r in runs:
        for mode in next(iter(r["test"].values())).get("normalize", {}):
            test = {name: result["normalize"][mode] for name, result in r["test"].items()}
            split.append(r | {"variant": f"{r['variant']}; test time: {mode}", "test": test})
    return split or runs


def markdown(runs):
    """The table of a results file: mean ± spread of the test split, chance in the last row."""
    commands, runs = [r["command"] for r in runs], by_normalization(runs)
    columns = columns_of(runs[-1]["test"])
    lines = [f"| variant | seeds | {' | '.join(columns)} | wall, s |", "|---" * (len(columns) + 3) + "|"]
    for name in dict.fromkeys(r["variant"] for r in runs):
        mine = [r for r in runs if r["variant"] == name]
        cells = [mean_and_spread(mine, key) for key in columns.values()]
        wall = statistics.median(r["wall_s"] for r in mine)
        lines.append(f"| {name} | {len(mine)} | {' | '.join(cells)} | {wall:.0f} |")
    chance = common.flatten(next(iter(runs[-1]["chance"].values())))
    cells = [f"{chance[k]:.2f}" if k in chance else "-" for k in columns.values()]
    lines.append(f"| chance | | {' | '.join(cells)} | |")
    commits, machines = sorted({r["commit"] for r in runs}), sorted({r["machine"] for r in runs})
    where = f"Commits {', '.join(commits)}; {'; '.join(machines)}; {', '.join(runs[-1]['versions'])}."
    return "\n".join([*lines, "", where, "", "Commands:", "", *(f"- `{c}`" for c in commands)]) + "\n"


def mean_and_spread(runs, key):
    """One cell of the table, '-' where a run lacks the number."""
    values = [common.flatten(next(iter(r["test"].values()))).get(key) for r in runs]
    if None in values:
        return "-"
    spread = statistics.stdev(values) if len(values) > 1 else 0
    return f"{statistics.mean(values):.2f} ± {spread:.2f}"


if __name__ == "__main__":
    main()
