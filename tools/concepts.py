"""Fig. 5 of MAMA from two runs: the gain of one over the other for each concept, against the concept's frequency.

    python -m tools.concepts runs/infonce runs/mama --out concepts.png

A concept is the class (label or verb) of the clip that a caption describes, or the answer to a question. Its frequency
is its share of the training rows. (The paper's Figs. 2 and 5a count topics of a topic model, LDA, which is not here.)
The test split is evaluated again with the encoders of both runs. The gain is a difference in points, since the paper's
relative gain is undefined where the first run gets nothing right.
"""

import argparse
from collections import Counter

import common
from contrastive.data import open_data
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit, opening, say
from contrastive.evaluation import answers
from contrastive.evaluation.metrics import retrieval_metrics
from contrastive.figures.base import figure, save_figure

import numpy as np
import torch

from tools.margins import finished

DATA = ("dataset", "data_dir", "task", "clips", "clip_law", "fold", "caption_column", "label_column", "hold_out_val",
        "shuffle_video")


def hits(folder, args):
    """(concepts (Q,), hits (Q,) 0 or 1, {concept: share of the training rows}, keys (Q,)) of a run's queries.

    Raises: UserError if the set has no test split or no classes."""
    lacking = sorted({"task", "dataset", "hold_out_val", "eval_datasets", "workers"} - args.keys())
    if lacking:
        raise UserError(f"{folder}: its args.json does not say {', '.join(lacking)}; is it whole?")
    args = argparse.Namespace(**args | {"eval_every": 0, "extra_pairs": []})  # extra pairs have no classes
    train, evals = open_data(args)
    if getattr(args, "shuffle_video", False):                              # the control has its own task
        evals = {name: {k: answers.shuffled(d) for k, d in of.items()} for name, of in evals.items()}
    if "test" not in evals.get(args.dataset, {}):
        raise UserError(f"{folder}: {args.dataset} has no test split of its own in this run")
    columns = {"qa-open": ["answer"], "qa-choice": ["question_type"]}.get(args.task, ["label", "verb"])
    column = next((c for c in columns if train.column(c) is not None), None)
    if column is None:
        raise UserError(f"{folder}: {args.dataset} has no column {' or '.join(columns)} to take concepts "
                        "from")
    sets = {args.dataset: {"test": evals[args.dataset]["test"]}}
    _, _, pieces = common.Evaluator(*common.load_model(folder), sets, train, torch.device("cpu"), args)("test")
    found = pieces[args.dataset]
    data, rows = found["data"], np.asarray(found["index"])
    if args.task == "retrieval":
        right = retrieval_metrics(found["text"], found["image"], found["positives"], ranks=True) == 1
        rows = rows[found["owner"]]                                        # (Q,) of each caption
    else:
        right = np.asarray(found["hits"]) > 0
    names, known = data.names(column), data.column(column)
    has = np.array([names is None or known[i] >= 0 for i in rows])         # (Q,) -1: without a class
    if not has.all():
        say(f"{folder}: {(~has).sum():,} of {len(has):,} queries have no {column} and are left out")
    rows, right = rows[has], np.asarray(right, dtype=float)[has]
    said = names.__getitem__ if names else str
    share = {said(c): n / len(train) for c, n in Counter(train.column(column)).items() if not names or c >= 0}
    return np.array([said(known[i]) for i in rows]), right, share, [data.key(i) for i in rows]


def gains(concepts, base, other, share):
    """[(share of the training rows, gain in points, queries, concept)] from hits (Q,), the most frequent first."""
    out = []
    for c in np.unique(concepts):
        of = concepts == c
        out.append((share.get(c, 0.0), 100 * float((other[of] - base[of]).mean()), int(of.sum()), c))
    return sorted(out, key=lambda g: (-g[0], g[3]))


def thirds(found):
    """[(name, from, to, gain)] of the thirds of the queries, sorted by the frequency of their concepts. A concept is
    not divided: it belongs to the third in which its middle query falls."""
    queries = np.array([g[2] for g in found])
    middle = (queries.cumsum() - queries / 2) / queries.sum()
    where = np.minimum((3 * middle).astype(int), 2)
    out = []
    for k, name in enumerate(("frequent", "middle", "rare")):
        of = [g for g, w in zip(found, where) if w == k]
        if of:
            mean = round(sum(g[1] * g[2] for g in of) / sum(g[2] for g in of), 9)  # without rounding's 1e-16
            out.append((name, of[0][0], of[-1][0], mean))
    return out


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLine("python -m tools.concepts", __doc__.splitlines()[0])
    p.add_argument("base", metavar="BASE", help="folder of a finished run of mama.py")
    p.add_argument("other", metavar="RUN", help="folder of a run on the same data, whose gain over BASE is drawn")
    p.add_argument("--out", default="concepts.png", metavar="FILE", help="picture, .png or .pdf")
    args = p.parse_args(argv)
    runs = [finished(folder)[0] for folder in (args.base, args.other)]
    for k in DATA:
        p.require(runs[0].get(k) == runs[1].get(k), f"{args.other} and {args.base} differ in --{k.replace('_', '-')}: "
                                                    "they cannot be compared")
    (concepts, base, share, keys), (_, other, _, others) = (
        hits(folder, run) for folder, run in zip((args.base, args.other), runs))
    p.require(keys == others, f"{args.other}: its test queries are not those of {args.base}")
    found = gains(concepts, base, other, share)
    parts = thirds(found)
    fig, (left, right) = figure(2)
    x, y, size = (np.array([g[k] for g in found]) for k in range(3))
    left.axhline(0, color="grey", lw=0.8)
    left.scatter(100 * x, y, s=8 + 60 * size / size.max(), alpha=0.6)
    left.set(title="gain by concept (Fig. 5)", xlabel="part of the training rows, %; size: queries",
             ylabel="gain, points")
    if x.min() > 0:
        left.set_xscale("log")
        left.xaxis.set_major_formatter("{x:g}")
    right.axhline(0, color="grey", lw=0.8)
    right.bar([name for name, *_ in parts], [gain for *_, gain in parts])
    right.set(title="by thirds of the queries", xlabel="how frequent in training", ylabel="gain, points")
    what = "text -> video R@1" if runs[0]["task"] == "retrieval" else "accuracy"
    fig.suptitle(f"test {what}: {100 * base.mean():.1f} -> {100 * other.mean():.1f} %")
    with opening(args.out):
        save_figure(fig, args.out)
    said = [f"{100 * f:8.2f} % {g:+8.1f} {n:6d}  {c}" for f, g, n, c in found]
    said += [f"{name}: {100 * low:.2f} to {100 * high:.2f} % of the training rows, gain {gain:+.2f}"
             for name, high, low, gain in parts]
    say("\n".join([*said, f"written to {args.out}"]))


if __name__ == "__main__":
    with clean_exit():
        main()
