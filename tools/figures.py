"""Figures of the papers over several finished runs: a picture, and its numbers as text.

    python -m tools.figures phase runs/T200 runs/T400 runs/T1000           # TS, Fig. 4
    python -m tools.figures margins runs/mu0 runs/mu1 runs/mu2             # MAMA, Fig. 4, left and middle
    python -m tools.figures concepts runs/infonce runs/mama --topics 10    # MAMA, Figs. 2 and 5
    python -m tools.figures clusters mmts.py --dataset youcook2 --data-dir ANNOTATIONS    # MM-TS, Figs. 3 to 11

phase: mean and deviation of the few-shot probe on val over each run's last full period, of runs of
temperature_schedules.py with --eval-every > 0 that differ only in seeds and periods (paper: T = 200, 400, 1000, 2000).
--stop-at-phase should stop at the phase with the highest mean.

margins: accuracy on val against the margin a0 / a1 and a2 of Eq. 6, of runs of mama.py that differ only in
--margin-schedule, --a0, --a1, --a2 and --seed. A point is a run, lines connect the means over seeds. The paper's
caption puts a0 in the middle panel, which would repeat the left one (a1 = 10 throughout); its text says a2, which is
drawn here. (Right panel: weights.png of each run.)

concepts: what the second run gains over the first for each concept, in percent of the first's R@1 or accuracy (Fig. 5),
against the concept's share of the training rows (Fig. 2). Where the first gets nothing right there is no such gain:
"-". A concept is the answer to a question, or of retrieval the class (label or verb) of the clip that a caption
describes; with --topics K the likeliest of K topics that an LDA finds in the captions of the training clips, a clip's
together (the paper does not say its K). The test split is evaluated again with the encoders of both runs.

Over any runs, the first the baseline: temperatures, gap, similarities, false-positives (TeMo, Figs. 2, 3, 4 and 5, 6);
errors, queries, modalities (NCL, Figs. 2, 6, 7 and 8); tails (TS, Figs. 3 and 5, runs at several temperatures).

clusters: with the flags of mmts.py, its clusters and their pictures, without training and without videos, into
--output-dir; Tables 10 to 12 are printed.
"""

import argparse
import functools
import json
import sys
from collections import Counter
from pathlib import Path

import common
from contrastive.data import data_options, load_data, open_data
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit, flatten, opening, read_json, say, slug
from contrastive.engine.ranges import whole
from contrastive.evaluation import answers
from contrastive.evaluation.clusters import check_source, open_clusters
from contrastive.evaluation.metrics import retrieval_metrics
from contrastive.evaluation.retrieval import measure
from contrastive.figures import several
from contrastive.figures.base import figure, legend_above, save_figure
from contrastive.figures.mmts import draw_figures

import numpy as np
import torch
from safetensors.torch import load_file

import mmts
import ncl

ASIDE = {"output_dir", "run_name", "resume", "cpu", "workers", "save_every", "eval_every", "log_every", "tracker",
         "changed", "given", "hub", "command"}  # what does not change what is learnt
PERIODS = {"period", "epochs", "max_steps", "warmup_epochs", "stop_at_phase", "eval_epoch", "seed",
           "split_seed"}
MARGINS = {"margin_schedule", "a0", "a1", "a2", "seed", "loss"}


def args_of(folders, varied):
    """The flags of each run.   Raises: UserError if the runs differ in others than `varied`."""
    runs = [read_json(Path(folder) / "args.json") for folder in folders]
    for folder, args in zip(folders, runs):
        for k in sorted({*runs[0], *args} - varied - ASIDE):
            if runs[0].get(k) != args.get(k):
                raise UserError(f"{folder} and {folders[0]} differ in --{k.replace('_', '-')} ({args.get(k)}, "
                                f"{runs[0].get(k)}): they cannot be compared")
    return runs


# ---- TS, Fig. 4 ----
def last_period(folder):
    """(phases (M,), few-shot accuracies on val (M,)) of a run's last full period, which ends at phase 1."""
    with opening(folder):
        args, summary = (read_json(Path(folder) / name) for name in ("args.json", "summary.json"))
        rows = [flatten(json.loads(line)) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    name, period = f"eval/{args['dataset']}/few-shot/top1", args["period"]
    per_epoch = summary["steps"] / summary["epochs"]
    end = int(summary["epochs"] / period + 1e-6) * period
    steps, values = (np.array([row[k] for row in rows if name in row and row["step"]]) for k in ("step", name))  # (n,)
    phases = 1 - (end - steps / per_epoch) / period
    last = (phases >= -1e-6) & (phases <= 1 + 1e-6)
    if not end or last.sum() < 2:
        raise UserError(f"{folder}: {last.sum()} evaluations on val in its last full period of {period:g} epochs; at "
                        "least two are needed (--eval-every)")
    return phases[last].clip(0, 1), values[last]


def draw_phase(folders):
    """(figure, numbers as lines): few-shot accuracy over the phase of the period."""
    args, grid = args_of(folders, PERIODS)[0], np.linspace(0, 1, 41)       # phases
    values = np.stack([np.interp(grid, *last_period(f), left=np.nan, right=np.nan) for f in folders])     # (runs, 41)
    seen = ~np.isnan(values).any(0)                                        # else single runs would decide at the edges
    at, mean, std = grid[seen], values[:, seen].mean(0), values[:, seen].std(0)
    fig, (ax,) = figure(1)
    ax.fill_between(at, mean - std, mean + std, color="tab:blue", alpha=0.25)
    ax.plot(at, mean, color="tab:blue")
    ax.set(title=f"last period of {len(values)} runs (Fig. 4)", xlabel="phase of the period",
           ylabel="val few-shot/top1, %")
    if args["schedule"] == "cos" and not args["tau_head"]:
        beside = ax.twinx()
        beside.plot(grid, (1 + np.cos(2 * np.pi * grid)) / 2, color="tab:orange")
        beside.set_ylabel("tau of the cosine, relative", color="tab:orange")
    lines = [f"{g:6.3f} {m:8.2f} {s:8.2f}" for g, m, s in zip(at, mean, std)]
    return fig, [" phase     mean      std", *lines, f"best at phase {at[mean.argmax()]:.3f}"]


# ---- MAMA, Fig. 4 ----
def lines_over(axis, same, points):
    """{label: {x: [values]}}: one line per value of `same`, if it has two or more x. A run without a margin belongs to
    every line over mu.

    points: {mu: a0 / a1, radians, 0 = no margin; a2, None if not used; value} of each run."""
    out, without = {}, [p["value"] for p in points if not p["mu"]]
    for p in points:
        if p["mu"] and p[axis] is not None:
            label = "constant" if p[same] is None else f"{same} = {p[same]:g}"
            line = out.setdefault(label, {0.0: without} if axis == "mu" and without else {})
            line.setdefault(p[axis], []).append(p["value"])
    return {label: line for label, line in sorted(out.items()) if len(line) > 1}


def draw_margins(folders):
    """(figure, numbers as lines): accuracy over the margin and over its growth."""
    runs, points = args_of(folders, MARGINS), []
    measure = "text_to_image/R@1" if runs[0]["task"] == "retrieval" else "accuracy"
    for folder, args in zip(folders, runs):
        with opening(folder):
            val = read_json(Path(folder) / "summary.json")["val"][args["dataset"]]
            points.append({"value": flatten(val)[measure],
                           "mu": args["a0"] / args["a1"] if args["margin_schedule"] != "none" else 0.0,
                           "a2": args["a2"] if args["margin_schedule"] == "logistic" else None})
    panels = [("margin (Fig. 4, left)", "a0 / a1, radians; 0 = none", lines_over("mu", "a2", points)),
              ("a2 of the margin's growth (Fig. 4, middle)", "a2, per step", lines_over("a2", "mu", points))]
    panels = [panel for panel in panels if panel[2]]                       # of runs with two margins, or two a2
    (fig, axes), said = figure(len(panels)), []
    for ax, (title, xlabel, found) in zip(axes, panels):
        for k, (label, line) in enumerate(found.items()):
            xs = sorted(line)
            means = [np.mean(line[x]) for x in xs]
            ax.plot(xs, means, label=label)
            ax.scatter([x for x in xs for _ in line[x]], [v for x in xs for v in line[x]], s=18, color=f"C{k}")
            said += [f"{title}, {label}: {x:g}: {m:.2f} ({len(line[x])} runs)" for x, m in zip(xs, means)]
        ax.set(title=title, xlabel=xlabel, ylabel=f"val {measure}, %")
        legend_above(ax)
    return fig, said


# ---- MAMA, Fig. 5 ----
def topics_of(train, queries, k):
    """(topic of each training clip (M,), of each query (Q,), names): the likeliest of k topics of an LDA, -1 for a text
    without a word that it knows."""
    from sklearn.decomposition import LatentDirichletAllocation
    from sklearn.feature_extraction.text import CountVectorizer
    words, train = CountVectorizer(stop_words="english"), train.folded()
    counts = words.fit_transform([" ".join(train.captions(i)) for i in range(len(train))])                # (M, words)
    model, names = LatentDirichletAllocation(k, random_state=0).fit(counts), words.get_feature_names_out()

    def likeliest(counts):
        return np.where(counts.sum(1).A1 > 0, model.transform(counts).argmax(1), -1)
    named = [" ".join(names[np.argsort(-topic)[:3]]) for topic in model.components_]
    return likeliest(counts), likeliest(words.transform(queries)), named


def hits(folder, topics=0):
    """(concepts (Q,), hits (Q,) 0 or 1, {concept: share of the training rows}, keys (Q,)) of a run's queries."""
    with opening(folder):
        args = argparse.Namespace(**read_json(Path(folder) / "args.json") | {"eval_every": 0, "extra_pairs": []})
        train, evals = open_data(args)                                     # extra pairs have no classes
        test = evals[args.dataset]["test"]
        model = common.load_model(folder)
    test = answers.shuffled(test) if args.shuffle_video else test          # the control has its own task
    task = "retrieval" if args.task == "retrieval" else "qa"
    _, _, pieces = measure(model, test, torch.device("cpu"), [task], workers=args.workers)
    columns = {"qa-open": ["answer"], "qa-choice": ["question_type"]}.get(args.task, ["label", "verb"])
    column = next((c for c in columns if train.column(c) is not None), None)
    topics = topics if args.task == "retrieval" else 0
    if column is None and not topics:
        raise UserError(f"{folder}: {args.dataset} has no column {' or '.join(columns)} to take concepts from")
    rows = np.asarray(pieces["index"])
    if args.task == "retrieval":
        rows = rows[pieces["owner"]]                                       # (Q,) of each caption
        right = retrieval_metrics(pieces["text"], pieces["image"], pieces["positives"], ranks=True) == 1
    else:
        right = np.asarray(pieces["hits"]) > 0
    if topics:
        column, (seen, found, names) = "topic", topics_of(train, pieces["texts"], topics)                 # (Q,) found
    else:
        names, known, seen = test.names(column), test.column(column), train.column(column)
        found = [known[i] for i in rows]                                   # (Q,)
    has = np.array([names is None or c >= 0 for c in found])               # (Q,) -1: without a class
    if not has.any():
        raise UserError(f"{folder}: none of its {len(has):,} queries has a {column}")
    if not has.all():
        say(f"{folder}: {(~has).sum():,} of {len(has):,} queries have no {column} and are left out")
    said = names.__getitem__ if names else str
    share = {said(c): n / len(seen) for c, n in Counter(seen).items() if not names or c >= 0}
    concepts = np.array([said(c) for c, there in zip(found, has) if there])
    return concepts, right[has].astype(float), share, [test.key(i) for i in rows[has]]


def gains(concepts, base, other, share):
    """[(share of the training rows, hits of the first run, of the second, queries, concept)] from hits (Q,), the most
    frequent first."""
    found = [(share.get(c, 0.0), *(int(right[concepts == c].sum()) for right in (base, other)),
              int((concepts == c).sum()), c) for c in np.unique(concepts)]
    return sorted(found, key=lambda g: (-g[0], g[4]))


def relative(before, after):
    """Gain in percent of the hits before (Fig. 5); nan if there were none."""
    return 100 * (after - before) / before if before else np.nan


def thirds(found):
    """[(name, from, to, relative gain)] of the thirds of the queries, sorted by the frequency of their concepts. A
    concept is not divided: it belongs to the third in which its middle query falls."""
    frequency, before, after, queries = (np.array(column) for column in list(zip(*found))[:4])
    where = np.minimum(3 * (queries.cumsum() - queries / 2) // queries.sum(), 2)
    parts = [(name, where == k) for k, name in enumerate(("frequent", "middle", "rare"))]
    return [(name, frequency[of][0], frequency[of][-1], relative(before[of].sum(), after[of].sum()))
            for name, of in parts if of.any()]


def draw_concepts(folders, topics=0):
    """(figure, numbers as lines): the gain of the second run over the first by the frequency of concepts."""
    (concepts, base, share, keys), (theirs, other, _, others) = (hits(folder, topics) for folder in folders)
    if (keys, concepts.tolist()) != (others, theirs.tolist()):
        raise UserError(f"{folders[1]}: its test queries and their concepts are not those of {folders[0]}")
    found = gains(concepts, base, other, share)
    parts = thirds(found)
    fig, (left, right, *first) = figure(3 if topics else 2)
    for ax in first:
        ax.barh([*share][::-1], [100 * s for s in share.values()][::-1])
        ax.set(title="topics (Fig. 2)", xlabel="part of the training clips, %")
    x, size = np.array([f for f, *_ in found]), np.array([n for *_, n, _ in found])
    y = np.array([relative(before, after) for _, before, after, *_ in found])
    left.scatter(100 * x, y, s=8 + 60 * size / size.max(), alpha=0.6)
    left.set(title="gain by concept (Fig. 5)", xlabel="part of the training rows, %; size: queries",
             ylabel="gain, % of the first run's")
    if x.min() > 0:
        left.set_xscale("log")
        left.xaxis.set(major_formatter="{x:g}", minor_formatter="")
    right.bar(range(len(parts)), [gain for *_, gain in parts])
    right.set(title="by thirds of the queries", xlabel="how frequent in training",
              ylabel="gain, % of the first run's", xlim=(-0.6, len(parts) - 0.4))
    names = [f"{name}:\nfirst has 0" if np.isnan(gain) else name for name, *_, gain in parts]
    right.set_xticks(range(len(parts)), names)
    for ax in (left, right):
        ax.axhline(0, color="grey", lw=0.8)
    fig.suptitle(f"test hits: {100 * base.mean():.1f} -> {100 * other.mean():.1f} %")
    said = [f"{100 * f:8.2f} % {gain:+8.1f} % {100 * (b - a) / n:+8.1f} {n:6d}  {c}".replace("+nan %", "   - %")
            for (f, a, b, n, c), gain in zip(found, y)]
    said = ["   share   gain, %   points queries  concept", *said]
    of_thirds = [f"{name}: {100 * low:.2f} to {100 * high:.2f} % of the training rows, gain {gain:+.2f} %"
                 for name, high, low, gain in parts]
    return fig, said + [line.replace("+nan %", "- (the first run has no hit)") for line in of_thirds]


# ---- TS, TeMo, NCL: several.py ----
def log_of(folder):
    """The rows of a run's log."""
    with opening(folder):
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def results_of(folder):
    """{set: test metrics} of a run."""
    with opening(folder):
        return read_json(Path(folder) / "summary.json")["test"]


def pieces_of(folder):
    """What an evaluation keeps of a run's first evaluation set (test, else val), which is encoded again."""
    with opening(folder):
        args = argparse.Namespace(**read_json(Path(folder) / "args.json") | {"eval_every": 0, "extra_pairs": []})
        tail = hasattr(args, "imbalance_ratio")                            # temperature_schedules.py
        sets = common.labelled_splits(args) if tail else {}
        train, evals = (sets["train"], {args.dataset: sets}) if tail else open_data(args)
        if tail and args.train_features == "augmented":
            train = common.padded_and_flipped(train, args.seed)            # as the run's own probes
        model = common.load_model(folder)
        queues = Path(folder) / "queues.safetensors"                       # of ncl.py
        queues = load_file(queues) if queues.is_file() else {}
    name, split = next(iter(evals)), "test" if "test" in next(iter(evals.values())) else "val"
    tests = {name: {"test": evals[name][split]}}
    pieces = common.Evaluator(*model, tests, train, torch.device("cpu"), args)("test")[2][name]
    pieces |= {"bias": 0.0, "gamma": queues["gamma"].item() if queues else getattr(args, "tau", 0.01)}
    if tail:
        pieces["sizes"] = np.bincount(train.labels, minlength=len(train.label_names))
    elif queues and args.loss == "ncl" and len(queues["texts"]):
        pieces["bias"] = ncl.retrieval_biases(pieces["image"], queues["texts"], pieces["gamma"], args.iterations)
    return pieces


# {figure: (what is read of each run, what draws {run: it})}
SEVERAL = {"temperatures": (log_of, several.draw_temperatures), "gap": (results_of, several.draw_gap),
           "errors": (results_of, several.draw_errors), "similarities": (pieces_of, several.draw_similarities),
           "false-positives": (pieces_of, several.draw_false_positives), "queries": (pieces_of, several.draw_queries),
           "modalities": (pieces_of, several.draw_modalities), "tails": (pieces_of, several.draw_tails)}


# ---- MM-TS, Figs. 3 to 11, Tables 10 to 12 ----
def clusters_of(argv):
    """Makes the clusters of mmts.py with these flags, draws them, prints captions of the largest and smallest ones."""
    args = mmts.parse_args(argv)
    name = f"clusters__{slug(args.dataset)}__{slug(args.clusters)}__s{args.seed}"
    folder = Path(args.output_dir) / (args.run_name or name)
    train = load_data(args.dataset, "train", **data_options(args, without_videos=args.clusters != "vision"))
    check_source(train, args.clusters)
    with opening(folder):
        folder.mkdir(parents=True, exist_ok=True)
    clusters = open_clusters(folder, args, train, torch.device("cpu"),
                             functools.partial(mmts.cluster_captions, seed=args.seed))
    if clusters is None:
        raise UserError("--clusters none: there is nothing to draw")
    total = args.max_steps or max(1, round(args.epochs * (train.examples // args.batch_size)))
    period = total / args.periods
    draw_figures(folder, args, total, train, clusters, mmts.shifts_of(clusters, args), period,
                 functools.partial(mmts.sample_temperature, period=period, alpha=args.alpha * args.schedule))
    for e in clusters.meta["examples"]:
        say(f"#{e['cluster'] + 1} of {len(clusters.sizes)}, {e['size']:,}: {'; '.join(e['captions'][:4])}")
    say(f"written to {folder}")


FIGURES = {"phase": draw_phase, "margins": draw_margins, "concepts": draw_concepts}


def main(argv=None):
    """The command line. Raises: UserError."""
    words = sys.argv[1:] if argv is None else argv
    if words[:2] == ["clusters", "mmts.py"]:
        return clusters_of(words[2:])
    p = OneLine("python -m tools.figures", __doc__.splitlines()[0])
    p.add_argument("figure", choices=[*FIGURES, *SEVERAL], help="see docs/methods.md")
    p.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs; concepts: two, the baseline first")
    p.add_argument("--out", default="", metavar="FILE", help="picture, .png or .pdf; empty = FIGURE.png")
    p.add_argument("--topics", type=whole, default=0, metavar="K", help="of an LDA, for retrieval; 0 = its classes")
    args = p.parse_args(argv)
    p.only(args.figure == "concepts", "for concepts", "--topics")
    p.require(args.figure != "concepts" or len(args.runs) == 2, "concepts: give two runs, the baseline first")
    out = args.out or f"{args.figure}.png"
    if args.figure in SEVERAL:
        read, draw = SEVERAL[args.figure]
        names = [Path(run).name for run in args.runs]
        p.require(len({*names}) == len(names), f"{' '.join(names)}: give the runs different names")
        said = draw({name: read(run) for name, run in zip(names, args.runs)}, out)
    else:
        fig, said = FIGURES[args.figure](args.runs, **{"topics": args.topics} if args.topics else {})
        save_figure(fig, out)
    say("\n".join([*said, f"written to {out}"]))


if __name__ == "__main__":
    with clean_exit():
        main()
