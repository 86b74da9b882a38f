"""MAMA on questions: margin and weights on and off, the other models, and a control that sees another clip.

    python benchmarks/questions.py --seeds 1 --jobs 2

Both tasks on moving-emoji's questions with the default recipe (310 steps). The control, --shuffle-video, gives every
question the clip of another: what it answers right needs no video. Every finished run is one small file below
results/claims/; a restart only runs what has no file. Writes results/mama_qa_rows.json and mama_qa_rows.md.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from contrastive.engine.processes import write_json  # noqa: E402
from contrastive.engine.ranges import count  # noqa: E402

from benchmarks import claims  # noqa: E402

FLAGS = "--eval-every 0"
ROWS = {
    "qa-open": {
        "margin and weights (default)": "", "no margin": "--margin-schedule none", "no weights": "--weighting none",
        "neither (InfoNCE)": "--loss infonce", "similarity after the fusion": "--qa-similarity fused",
        "control: another's video": "--shuffle-video"},
    "qa-choice": {
        "margin and weights (default)": "", "no margin": "--margin-schedule none", "no weights": "--weighting none",
        "neither (InfoNCE)": "--loss infonce", "dual model": "--qa-model dual",
        "control: another's video": "--shuffle-video"}}
COLUMNS = {"accuracy": "accuracy", "noun": "accuracy noun", "verb": "accuracy verb", "colour": "accuracy colour"}
CHANCE = {"qa-open": "chance: the most frequent answer", "qa-choice": "chance: a draw among the choices"}


def commands(seeds):
    """{(task, row): [the words of the command for each seed]}."""
    return {(task, row): [["mama.py", "--seed", str(k), *shlex.split(f"{FLAGS} --task {task} {flags}")]
                          for k in range(seeds)]
            for task, rows in ROWS.items() for row, flags in rows.items()}


def cells(records, split, names):
    """The cell of each column: percent, over the seeds."""
    found = [claims.numbers(record, split) for record in records]
    return [claims.spread([of[name] for of in found]) for name in names]


def write(wanted):
    """Writes results/mama_qa_rows.json and .md from the runs that have a file; returns the markdown table."""
    lines = []
    done = {key: [record for words in of if (record := claims.record_of(words))] for key, of in wanted.items()}
    for task in ROWS:
        rows = {row: records for (t, row), records in done.items() if t == task and records}
        for row, records in rows.items():
            test, val = cells(records, "test", COLUMNS.values()), cells(records, "val", ["accuracy"])
            lines.append([task, row, str(len(records)), *test, *val])
        for records in list(rows.values())[:1]:
            lines.append([task, CHANCE[task], "-", *cells(records[:1], "chance", COLUMNS.values()), "-"])
    records = [r for of in done.values() for r in of]
    if not records:
        raise SystemExit("no run has ended well: nothing to write")
    left = [f"{task}, {row}" for (task, row), of in done.items() if not of]
    words = ["Questions about moving-emoji, the default recipe, test split: accuracy in percent, 100 questions of each "
             "kind (one standard error of a single accuracy is 2.9 points over all and up to 5 of a kind). It shows "
             "that the answers need the video; the rows that see it do not differ by more than these errors unless "
             "several seeds say so.",
             *(["Not run: " + "; ".join(left) + "."] if left else []),
             "Commits " + ", ".join(sorted({r["commit"][:12] for r in records})) + "; "
             + "; ".join(sorted({r["machine"] for r in records})) + "; " + ", ".join(records[0]["versions"]) + ".",
             "Commands:", "\n".join(f"- `{r['command']}`" for r in records)]
    table = "\n".join(claims.markdown(["task", "variant", "seeds", *COLUMNS, "val accuracy"], lines))
    (claims.RESULTS / "mama_qa_rows.md").write_text("\n\n".join([table, *words]) + "\n")
    write_json(claims.RESULTS / "mama_qa_rows.json", {"runs": records})
    return table


def main(argv=None):
    """Run what is missing, then write the table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--seeds", type=count, default=1, help="runs of each row")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side, one thread each")
    p.add_argument("--keep", default="", help="folder in which to keep the run folders, without their checkpoints")
    args = p.parse_args(argv)
    wanted = commands(args.seeds)
    failed = claims.run_all(lambda: claims.missing(sum(wanted.values(), [])), {}, args.jobs, args.keep)
    print(write(wanted))
    if failed:
        raise SystemExit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    main()
