"""All methods on one data set with one pair of towers, and NCL's normalisation at test time on top of each.

    python benchmarks/claims.py --claims ncl-training mmts-all mama-margin temo-retrieval --keep RUNS
    python benchmarks/cross.py --keep RUNS

No paper shows this. Rows are the arms of those claims, each with the trial that its val split chose, over the same
seeds and the same order of the same clips. Beside the R@1 of the learnt similarities is the R@1 after Sinkhorn's biases
(NCL, Eqs. 7 to 11): `queue` uses training queries; `oracle` uses the test queries of both sides and is only a bound.
Biases and error have the same gamma in all rows, whatever tau val chose, since an error falls as gamma grows.

Every run folder is evaluated once; the result is kept as a small file below results/claims/.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from contrastive.engine.log import commit  # noqa: E402
from contrastive.engine.processes import flatten, read_json, write_json  # noqa: E402

from benchmarks import claims  # noqa: E402

ARMS = {  # row of the table: (claim, arm)
    "InfoNCE": ("ncl-training", "InfoNCE"), "TS (in temo.py)": ("temo-retrieval", "TS"),
    "MM-TS": ("mmts-all", "TS and ICS"), "NCL": ("ncl-training", "NCL"), "MAMA, margin": ("mama-margin", "margin"),
    "TeMo": ("temo-retrieval", "TeMo")}
GAMMA = 0.1  # the tau that val chooses for InfoNCE and NCL
NONE = "normalize/none/"
COLUMNS = {  # title: its path in an evaluation
    "t2v R@1": f"{NONE}text_to_image/R@1", "t2v R@10": f"{NONE}text_to_image/R@10",
    "v2t R@1": f"{NONE}image_to_text/R@1", "v2t R@10": f"{NONE}image_to_text/R@10",
    "error t2v": f"{NONE}error/text_to_image",
    "queue, t2v R@1": "normalize/queue/text_to_image/R@1", "v2t": "normalize/queue/image_to_text/R@1",
    "oracle, t2v R@1": "normalize/oracle/text_to_image/R@1", "v2t ": "normalize/oracle/image_to_text/R@1"}


def evaluation(words, keep):
    """The numbers of eval.py on a kept run, with and without biases, from their file if it exists; None: no run."""
    record = claims.file_of(words)
    file = record.with_name(record.stem + ".normalized.json")
    flags = ["--normalize", "queue", "--queue-split", "train", "--gamma", str(GAMMA)]
    command = "python eval.py --checkpoint RUN --tasks retrieval " + " ".join(flags)
    kept = read_json(file, {})
    if kept.get("command") == command:
        return kept
    run = Path(keep) / record.stem
    if not (keep and run.is_dir()):
        return None
    with tempfile.TemporaryDirectory() as folder:
        claims.evaluate(run, folder, *flags)
        found = read_json(Path(folder) / "eval.json")
    numbers = flatten(next(iter(found["datasets"].values()))["metrics"])
    kept = {"command": command, "commit": commit(), "machine": claims.machine()}
    kept |= {path: numbers[path] for path in COLUMNS.values()}
    write_json(file, kept)
    return kept


def rows_of(seeds, trials, keep):
    """{row: {seed: numbers}} of the runs that are kept, and {row: flags of its trial}."""
    rows, flags = {}, {}
    for row, (claim, arm) in ARMS.items():
        words = claims.chosen(claim, arm, trials, seeds)
        if not words:
            continue
        found = {k: evaluation(of_seed, keep) for k, of_seed in enumerate(words[1:]) if claims.record_of(of_seed)}
        rows[row] = {k: numbers for k, numbers in found.items() if numbers}
        flags[row] = " ".join(words[0][1:])
    return {row: found for row, found in rows.items() if found}, flags


def table(rows):
    """A markdown table: mean ± standard deviation over the seeds that every row has."""
    seeds = sorted(set.intersection(*(set(found) for found in rows.values())))
    if not seeds:
        raise SystemExit(f"no seed for which every row has a run: { {row: sorted(rows[row]) for row in rows} }")
    lines = []
    for row, found in rows.items():
        values = [[found[k][path] for k in seeds] for path in COLUMNS.values()]
        lines.append([row, str(len(seeds)), *(claims.spread(v, 2 if v[0] < 1 else 1) for v in values)])
    return "\n".join(claims.markdown(["method", "seeds", *COLUMNS], lines)) + "\n"


def main(argv=None):
    """Evaluates what is not evaluated yet, then writes results/cross.json and results/cross.md."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--keep", default="", help="folder in which claims.py --keep kept the run folders")
    p.add_argument("--seeds", type=int, default=5, help="as for claims.py")
    p.add_argument("--trials", type=int, default=3, help="as for claims.py")
    args = p.parse_args(argv)
    rows, flags = rows_of(args.seeds, args.trials, args.keep)
    if not rows:
        raise SystemExit("--keep: no run of these claims is there; claims.py --keep leaves them")
    commits, machines = (sorted({numbers[k] for found in rows.values() for numbers in found.values()})
                         for k in ("commit", "machine"))
    words = [f"All with `{claims.MOVING}`: 6,000 captions and 2,000 clips of test; mean ± standard deviation over "
             f"the seeds. Error: of normalisation (NCL, Sec. 3), at gamma {GAMMA:g} as the biases. Oracle: a bound, it "
             "sees all test queries.", "", "Flags that val chose:", "",
             *[f"- {row}: `{flags[row]}`" if row in rows else f"- {row}: not run, or not kept" for row in ARMS], "",
             f"Commits of the evaluations {', '.join(commits)}; {'; '.join(machines)}.", ""]
    (claims.RESULTS / "cross.md").write_text(table(rows) + "\n" + "\n".join(words))
    write_json(claims.RESULTS / "cross.json", {"rows": rows, "flags": flags})
    print(table(rows))


if __name__ == "__main__":
    main()
