"""Draws figures of the papers over several finished runs, and prints their numbers.

    python -m tools.figures phase runs/T200 runs/T400 runs/T1000           # TS, Fig. 4
    python -m tools.figures margins runs/mu0 runs/mu1 runs/mu2             # MAMA, Fig. 4
    python -m tools.figures concepts runs/infonce runs/mama --topics 10    # MAMA, Figs. 2 and 5
    python -m tools.figures clusters mmts.py --dataset youcook2 --data-dir ANNOTATIONS

phase: mean and deviation of the few-shot probe on val over each run's last full period, of runs of
temperature_schedules.py with --eval-every > 0 that differ only in seeds and periods (paper:
T = 200, 400, 1000, 2000). --stop-at-phase should stop at the phase with the highest mean.

margins (Fig. 4, left and middle): accuracy on val against the margin a0 / a1 and a2 of Eq. 6, of
runs of mama.py that differ only in --margin-schedule, --a0, --a1, --a2 and --seed. A point is a
run, lines connect the means over seeds. The paper's caption puts a0 in the middle panel, which
would repeat the left one (a1 = 10 throughout); its text says a2, which is drawn here. (Right panel:
weights.png of each run.)

concepts: what the second run gains over the first for each concept, in percent of the first's R@1
or accuracy (Fig. 5), against the concept's share of the training rows (Fig. 2). Where the first
gets nothing right there is no such gain: "-". A concept is the answer to a question, or of
retrieval the class (label or verb) of the clip that a caption describes; with --topics K the
likeliest of K topics that an LDA finds in the captions of the training clips, a clip's together
(the paper does not say its K). The test split is evaluated again with the encoders of both runs.

Over any runs, the first the baseline: temperatures, gap, similarities, false-positives (TeMo, Figs.
2, 3, 4 and 5, 6); errors, queries, modalities (NCL, Figs. 2, 6, 7 and 8); tails (TS, Figs. 3 and 5,
runs at several temperatures).

clusters: with the flags of mmts.py, its clusters and their pictures (MM-TS, Figs. 3 to 11), without
training and without videos, into --output-dir; Tables 10 to 12 are printed.
"""

import argparse
import dataclasses
import functools
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import common
from contrastive.data import data_options, load_data, open_data
from contrastive.engine.flags import OneLineErrorParser
from contrastive.engine.log import logged_rows
from contrastive.core.files import flatten, read_json, slug
from contrastive.core.processes import UserError, clean_exit, opening, say
from contrastive.core.number_types import whole
from contrastive.core.words import flag_of
from contrastive.evaluation.clusters import check_source, name_of_class, open_clusters
from contrastive.core.metrics import retrieval_ranks
from contrastive.evaluation.evaluated_model import temperature_of_run
from contrastive.evaluation.facts import read_facts
from contrastive.evaluation.measure import Towers, measure
from contrastive.evaluation.meta import class_columns
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.figures import several
from contrastive.figures.base import figure, legend_above, save_figure
from contrastive.figures.mmts import draw_figures

import numpy as np
import torch
from safetensors.torch import load_file

import mmts
import ncl

# flags that do not change what is learnt
IGNORED_FLAGS = {
    "output_dir", "run_name", "resume", "cpu", "workers", "save_every", "eval_every", "log_every",
    "tracker", "changed", "given", "command_line", "hub", "command"}
# flags in which the runs of a figure may differ
PHASE_FLAGS = {
    "period", "epochs", "max_steps", "warmup_epochs", "stop_at_phase", "eval_epoch", "seed",
    "split_seed"}
MARGIN_FLAGS = {"margin_schedule", "a0", "a1", "a2", "seed", "loss"}


# ----------------------------------------------------- files of a run -----------------------------
def read_flags(folders, varied):
    """The flags of each run.

    Args:
        varied: names of flags in which the runs may differ.
    Raises: UserError if the runs differ in others.
    """
    runs = [read_json(Path(folder) / "args.json") for folder in folders]
    first = runs[0]
    for folder, args in zip(folders, runs):
        names = {*first, *args} - varied - IGNORED_FLAGS
        for name in sorted(names):
            if first.get(name) != args.get(name):
                raise UserError(f"{folder} and {folders[0]} differ in {flag_of(name)} "
                                f"({args.get(name)}, {first.get(name)}): they cannot be compared")
    return runs


def read_log(folder):
    """The rows of a run's log."""
    with opening(folder):
        return logged_rows(Path(folder) / "metrics.jsonl")


def read_results(folder):
    """{data set: test metrics} of a run."""
    with opening(folder):
        return read_json(Path(folder) / "summary.json")["test"]


def read_evaluation_flags(folder):
    """The flags of a run, for its data in an evaluation: without extra pairs."""
    flags = read_json(Path(folder) / "args.json")
    flags.update(eval_every=0, extra_pairs=[])
    return argparse.Namespace(**flags)


# ----------------------------------------------------- TS, Fig. 4 ---------------------------------
def last_period(folder):
    """A run's last full period, which ends at phase 1: phases (M,), few-shot accuracies (M,)."""
    with opening(folder):
        args = read_json(Path(folder) / "args.json")
        summary = read_json(Path(folder) / "summary.json")
    column = f"eval/{args['dataset']}/few-shot/top1"
    period = args["period"]
    num_epochs = summary["epochs"]
    end = int(num_epochs / period + 1e-6) * period                         # epoch
    phases = []
    values = []
    for row in map(flatten, read_log(folder)):
        if column in row and row["step"]:
            epoch = row["step"] * num_epochs / summary["steps"]
            phases.append(1 - (end - epoch) / period)
            values.append(row[column])
    phases = np.array(phases)                                              # (n,)
    is_last = (phases >= -1e-6) & (phases <= 1 + 1e-6)
    if not end or is_last.sum() < 2:
        raise UserError(f"{folder}: {is_last.sum()} evaluations on val in its last full period of "
                        f"{period:g} epochs; at least two are needed (--eval-every)")
    return phases[is_last].clip(0, 1), np.array(values)[is_last]


def draw_phase(folders, path):
    """TS, Fig. 4: few-shot accuracy over the phase of the period. Returns: numbers as lines."""
    args = read_flags(folders, PHASE_FLAGS)[0]
    grid = np.linspace(0, 1, 41)                                           # phases
    values = []
    for folder in folders:
        values.append(np.interp(grid, *last_period(folder), left=np.nan, right=np.nan))
    values = np.stack(values)                                              # (runs, 41)
    # where a run has no value, single runs would decide
    in_all_runs = ~np.isnan(values).any(0)
    phases, values = grid[in_all_runs], values[:, in_all_runs]
    mean, deviation = values.mean(0), values.std(0)

    fig, (ax,) = figure(1)
    ax.fill_between(phases, mean - deviation, mean + deviation, color="tab:blue", alpha=0.25)
    ax.plot(phases, mean, color="tab:blue")
    ax.set_title(f"last period of {len(values)} runs (Fig. 4)")
    ax.set_xlabel("phase of the period")
    ax.set_ylabel("val few-shot/top1, %")
    if args["schedule"] == "cos" and not args["tau_head"]:
        right_ax = ax.twinx()
        right_ax.plot(grid, (1 + np.cos(2 * np.pi * grid)) / 2, color="tab:orange")
        right_ax.set_ylabel("tau of the cosine, relative", color="tab:orange")
    save_figure(fig, path)

    lines = [" phase     mean      std"]
    for row in zip(phases, mean, deviation):
        lines.append("{:6.3f} {:8.2f} {:8.2f}".format(*row))
    best = phases[mean.argmax()]
    lines.append(f"best at phase {best:.3f}")
    return lines


# ----------------------------------------------------- MAMA, Fig. 4 -------------------------------
class MarginRun(NamedTuple):
    """A run with its margin."""

    value: float  # on val, percent
    mu: float  # a0 / a1, radians; 0 = no margin
    a2: float | None  # None if the margin does not grow


def read_margin_run(folder, args, metric):
    """The MarginRun of a folder with its flags."""
    with opening(folder):
        val = read_json(Path(folder) / "summary.json")["val"][args["dataset"]]
        value = flatten(val)[metric]
        mu, a2 = 0.0, None
        if args["margin_schedule"] != "none":
            mu = args["a0"] / args["a1"]
        if args["margin_schedule"] == "logistic":
            a2 = args["a2"]
        return MarginRun(value, mu, a2)


def margin_lines(runs, axis, same):
    """{label: {x: [values]}}: one line per value of `same`, if it has two or more x.

    A run without a margin belongs to every line over mu.
    Args:
        runs: list of MarginRun.
        axis, same: 'mu' and 'a2', or the other way round.
    """
    without_margin = [run.value for run in runs if not run.mu]
    curves = {}
    for run in runs:
        x, group = getattr(run, axis), getattr(run, same)
        if not run.mu or x is None:
            continue
        label = "constant"
        if group is not None:
            label = f"{same} = {group:g}"
        if label not in curves:
            curves[label] = {}
            if axis == "mu" and without_margin:
                curves[label][0.0] = without_margin
        curves[label].setdefault(x, []).append(run.value)
    return {label: curve for label, curve in sorted(curves.items()) if len(curve) > 1}


def draw_margins(folders, path):
    """MAMA, Fig. 4: accuracy over the margin and over its growth. Returns: numbers as lines."""
    flags = read_flags(folders, MARGIN_FLAGS)
    metric = "accuracy"
    if flags[0]["task"] == "retrieval":
        metric = "text_to_image/R@1"
    runs = [read_margin_run(folder, args, metric) for folder, args in zip(folders, flags)]
    panels = [
        ("margin (Fig. 4, left)", "a0 / a1, radians; 0 = none", margin_lines(runs, "mu", "a2")),
        ("a2 of the margin's growth (Fig. 4, middle)", "a2, per step",
         margin_lines(runs, "a2", "mu"))]
    panels = [panel for panel in panels if panel[2]]  # of runs with two margins, or two a2
    if not panels:
        raise UserError("margins: no two of the runs differ in --a0 / --a1 or in --a2 alone")
    fig, axes = figure(len(panels))
    lines = []
    for ax, (title, xlabel, curves) in zip(axes, panels):
        for k, (label, curve) in enumerate(curves.items()):
            means = {}
            for x, values in sorted(curve.items()):
                means[x] = np.mean(values)
                ax.scatter([x] * len(values), values, s=18, color=f"C{k}")
                lines.append(f"{title}, {label}: {x:g}: {means[x]:.2f} ({len(values)} runs)")
            ax.plot(list(means), list(means.values()), color=f"C{k}", label=label)
        ax.set_title(title)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(f"val {metric}, %")
        legend_above(ax)
    save_figure(fig, path)
    return lines


# ----------------------------------------------------- MAMA, Figs. 2 and 5 ------------------------
class Topics:
    """The likeliest of k topics of an LDA over the captions of the training clips.

    Attributes:
        names: three words of each topic.
        of_clips: (M,) topic of each training clip, -1 for a text without a word that is known.
    """

    def __init__(self, train, k):
        from sklearn.decomposition import LatentDirichletAllocation
        from sklearn.feature_extraction.text import CountVectorizer

        clips = train.folded()
        texts = [" ".join(clips.captions(i)) for i in range(len(clips))]
        self.words = CountVectorizer(stop_words="english")
        counts = self.words.fit_transform(texts)                           # (M, words)
        self.model = LatentDirichletAllocation(k, random_state=0).fit(counts)
        vocabulary = self.words.get_feature_names_out()
        self.names = []
        for topic in self.model.components_:                               # (words,)
            self.names.append(" ".join(vocabulary[np.argsort(-topic)[:3]]))
        self.of_clips = self.likeliest(counts)

    def likeliest(self, counts):
        """(M, words) counts -> (M,) topics, -1 without words."""
        has_words = counts.sum(1).A1 > 0
        return np.where(has_words, self.model.transform(counts).argmax(1), -1)

    def of_texts(self, texts):
        """(M,) topic of each text."""
        return self.likeliest(self.words.transform(texts))


class Hits(NamedTuple):
    """Which test queries a run gets right."""

    concepts: np.ndarray  # (Q,) names
    hits: np.ndarray  # (Q,) 0 or 1
    shares: dict  # {concept: its share of the training rows}
    keys: list  # of the Q examples


def read_hits(folder, num_topics=0):
    """The Hits of a run, which is evaluated again.

    Args:
        num_topics: of an LDA whose topics are the concepts; 0 = the classes of the data.
    Raises: UserError if there are no concepts.
    """
    with opening(folder):
        args = read_evaluation_flags(folder)  # extra pairs have no classes
        train, evals = open_data(args)
        test = evals[args.dataset]["test"]
        towers = Towers(*common.load_model(folder))
    pieces, rows, hits = evaluate_queries(args, towers, test)
    if args.task == "retrieval" and num_topics:
        column, topics = "topic", Topics(train, num_topics)
        names, train_values = topics.names, topics.of_clips
        values = topics.of_texts(pieces.texts)                             # (Q,)
    else:
        column = concept_column(folder, args, train)
        names, train_values = test.names(column), train.column(column)
        test_values = test.column(column)
        values = [test_values[i] for i in rows]                            # (Q,)

    chosen = []  # queries that have a concept
    concepts = []
    keys = []
    for query, value in enumerate(values):
        concept = name_of_class(value, names)
        if concept is not None:
            chosen.append(query)
            concepts.append(concept)
            keys.append(test.key(rows[query]))
    if not chosen:
        raise UserError(f"{folder}: none of its {len(values):,} queries has a {column}")
    if len(chosen) < len(values):
        say(f"{folder}: {len(values) - len(chosen):,} of {len(values):,} queries have no {column} "
            "and are left out")
    shares = {}
    for value, number in Counter(train_values).items():
        concept = name_of_class(value, names)
        if concept is not None:
            shares[concept] = number / len(train_values)
    return Hits(np.array(concepts), hits[chosen].astype(float), shares, keys)


def evaluate_queries(args, towers, test):
    """Evaluates the task of a run of mama.py on its test data.

    Returns: EvaluationPieces; the row of each query, (Q,); whether it is right, (Q,) bool.
    """
    task = "qa"
    if args.task == "retrieval":
        task = "retrieval"
    _, _, pieces = measure(towers, test, [task], device=torch.device("cpu"), workers=args.workers)
    rows = np.asarray(pieces.index)
    if task == "qa":
        return pieces, rows, np.asarray(pieces.hits) > 0
    ranks = retrieval_ranks(pieces.text, pieces.image, pieces.positives)   # (Q,) of each caption
    return pieces, rows[pieces.owner], ranks == 1


def concept_column(folder, args, train):
    """The column of a run's data that has the concepts. Raises: UserError if there is none."""
    columns = class_columns(args.task)
    for column in columns:
        if train.column(column) is not None:
            return column
    raise UserError(f"{folder}: {args.dataset} has no column {' or '.join(columns)} to take "
                    "concepts from")


class Gain(NamedTuple):
    """What the second run gains over the first on the queries of a concept."""

    share: float  # of the training rows
    first_hits: int
    second_hits: int
    queries: int
    concept: str

    @property
    def percent(self):
        """Of the hits of the first run; nan if it has none."""
        return relative_gain(self.first_hits, self.second_hits)


def gains(concepts, first_hits, second_hits, shares):
    """A Gain of each concept, the most frequent first, from hits (Q,) of two runs."""
    concept_gains = []
    for concept in np.unique(concepts):
        mask = concepts == concept                                         # (Q,)
        first = int(first_hits[mask].sum())
        second = int(second_hits[mask].sum())
        share = shares.get(concept, 0.0)
        concept_gains.append(Gain(share, first, second, int(mask.sum()), concept))
    return sorted(concept_gains, key=lambda gain: (-gain.share, gain.concept))


def relative_gain(first_hits, second_hits):
    """Gain in percent of the hits of the first run (Fig. 5); nan if it has none."""
    if not first_hits:
        return np.nan
    return 100 * (second_hits - first_hits) / first_hits


class Third(NamedTuple):
    """A third of the queries, by the frequency of their concepts."""

    name: str
    highest: float  # share of the training rows
    lowest: float
    gain: float  # percent, nan if the first run has no hit


def thirds(concept_gains):
    """The Thirds of a list of Gain, the most frequent first.

    A concept is not divided: it belongs to the third in which its middle query falls.
    """
    num_queries = sum(gain.queries for gain in concept_gains)
    gains_of_third = {"frequent": [], "middle": [], "rare": []}
    names = list(gains_of_third)
    num_before = 0
    for gain in concept_gains:
        middle = num_before + gain.queries / 2
        name = names[int(3 * middle / num_queries)]
        gains_of_third[name].append(gain)
        num_before += gain.queries
    parts = []
    for name, inside in gains_of_third.items():
        if inside:
            first_hits = sum(gain.first_hits for gain in inside)
            second_hits = sum(gain.second_hits for gain in inside)
            percent = relative_gain(first_hits, second_hits)
            parts.append(Third(name, inside[0].share, inside[-1].share, percent))
    return parts


def draw_concepts(folders, path, num_topics=0):
    """MAMA, Figs. 2 and 5: the gain of the second run by concept. Returns: numbers as lines."""
    first, second = (read_hits(folder, num_topics) for folder in folders)
    if first.keys != second.keys or first.concepts.tolist() != second.concepts.tolist():
        raise UserError(f"{folders[1]}: its test queries and their concepts are not those of "
                        f"{folders[0]}")
    concept_gains = gains(first.concepts, first.hits, second.hits, first.shares)
    parts = thirds(concept_gains)
    num_panels = 2
    if num_topics:
        num_panels = 3
    fig, (left, middle, *right) = figure(num_panels)
    draw_gains(left, concept_gains)
    draw_thirds(middle, parts)
    for ax in right:
        topics = list(first.shares)
        percent = 100 * np.array(list(first.shares.values()))
        ax.barh(topics[::-1], percent[::-1])
        ax.set_title("topics (Fig. 2)")
        ax.set_xlabel("part of the training clips, %")
    fig.suptitle(f"test hits: {100 * first.hits.mean():.1f} -> {100 * second.hits.mean():.1f} %")
    save_figure(fig, path)
    return gain_lines(concept_gains, parts)


def draw_gains(ax, concept_gains):
    """Fig. 5: the gain of each concept by its share of the training rows."""
    x = np.array([gain.share for gain in concept_gains])
    y = np.array([gain.percent for gain in concept_gains])
    size = np.array([gain.queries for gain in concept_gains])
    ax.scatter(100 * x, y, s=8 + 60 * size / size.max(), alpha=0.6)
    ax.set_title("gain by concept (Fig. 5)")
    ax.set_xlabel("part of the training rows, %; size: queries")
    ax.set_ylabel("gain, % of the first run's")
    if x.min() > 0:
        ax.set_xscale("log")
        ax.xaxis.set(major_formatter="{x:g}", minor_formatter="")
    ax.axhline(0, color="grey", lw=0.8)


def draw_thirds(ax, parts):
    """The gain of each Third."""
    names = []
    for place, part in enumerate(parts):
        ax.bar(place, part.gain, color="C0")
        if np.isnan(part.gain):
            names.append(f"{part.name}:\nfirst has 0")
        else:
            names.append(part.name)
    ax.set_title("by thirds of the queries")
    ax.set_xlabel("how frequent in training")
    ax.set_ylabel("gain, % of the first run's")
    ax.set_xlim(-0.6, len(parts) - 0.4)
    ax.set_xticks(range(len(parts)), names)
    ax.axhline(0, color="grey", lw=0.8)


def gain_lines(concept_gains, parts):
    """The numbers of draw_concepts as lines."""
    lines = ["   share   gain, %   points queries  concept"]
    for gain in concept_gains:
        percent = f"{gain.percent:+8.1f} %".replace("+nan %", "   - %")
        points = 100 * (gain.second_hits - gain.first_hits) / gain.queries
        lines.append(f"{100 * gain.share:8.2f} % {percent} {points:+8.1f} {gain.queries:6d}  "
                     + gain.concept)
    for part in parts:
        percent = f"{part.gain:+.2f} %".replace("+nan %", "- (the first run has no hit)")
        lines.append(f"{part.name}: {100 * part.lowest:.2f} to {100 * part.highest:.2f} % of the "
                     f"training rows, gain {percent}")
    return lines


# ----------------------------------------------------- TS, TeMo, NCL: several.py ------------------
@dataclasses.dataclass
class RunPieces(EvaluationPieces):
    """The pieces of a run for figures/several.py."""

    gamma: float = 0.0  # temperature; 0 if no figure needs it
    bias: object = 0.0  # (M,) of ncl.py, added to the cosines of the images
    sizes: np.ndarray | None = None  # (C,) training images of each class


def read_pieces(folder):
    """What the evaluation of a run's first data set (test, else val) keeps; it is encoded again."""
    with opening(folder):
        args = read_evaluation_flags(folder)
        is_long_tail = hasattr(args, "imbalance_ratio")  # temperature_schedules.py
        if is_long_tail:
            splits = common.labelled_splits(args)
            train, evals = splits["train"], {args.dataset: splits}
        else:
            train, evals = open_data(args)
        if is_long_tail and args.train_features == "augmented":  # as the run's own probes
            train = common.padded_and_flipped(train, args.seed)
        model = common.load_model(folder)
        queues = {}
        queue_file = Path(folder) / "queues.safetensors"  # ncl.py
        if queue_file.is_file():
            queues = load_file(queue_file)
    name, splits = next(iter(evals.items()))
    split = "test" if "test" in splits else "val"
    tests = {name: {"test": splits[split]}}
    evaluator = common.Evaluator(*model, tests, train, device=torch.device("cpu"), args=args)
    _, _, pieces = evaluator("test")
    pieces = RunPieces(**vars(pieces[name]))
    if queues:
        pieces.gamma = queues["gamma"].item()
    if is_long_tail:
        pieces.sizes = np.bincount(train.labels, minlength=len(train.label_names))
    elif queues and args.loss == "ncl" and len(queues["texts"]):
        pieces.bias = ncl.retrieval_biases(
            pieces.image, queues["texts"], pieces.gamma, args.iterations)
    return pieces


def read_query_pieces(folder):
    """As read_pieces, with the temperature that divides the cosines.

    Raises: UserError if the run has no single temperature.
    """
    run = Path(folder)
    facts = read_facts(run)
    if facts.tau is None:
        raise UserError(f"{run}: has no single temperature (none, or its own change over time "
                        "or pairs), by which the errors of queries are drawn; give other runs")
    pieces = read_pieces(folder)
    if not pieces.gamma:  # else it is that of the queues of ncl.py
        pieces.gamma = temperature_of_run(facts, run)
    return pieces


# {figure: (what is read of each run, what draws {run: it})}
FIGURES_OF_ANY_RUNS = {
    "temperatures": (read_log, several.draw_temperatures),
    "gap": (read_results, several.draw_gap),
    "errors": (read_results, several.draw_errors),
    "similarities": (read_pieces, several.draw_similarities),
    "false-positives": (read_pieces, several.draw_false_positives),
    "queries": (read_query_pieces, several.draw_queries),
    "modalities": (read_pieces, several.draw_modalities),
    "tails": (read_pieces, several.draw_tails),
}


# ----------------------------------------------------- MM-TS, Figs. 3 to 11, Tables 10 to 12 ------
def draw_clusters(argv):
    """Makes and draws the clusters of mmts.py with these flags, and prints a few captions."""
    args = mmts.parse_args(argv)
    usual_name = f"clusters__{slug(args.dataset)}__{slug(args.clusters)}__s{args.seed}"
    folder = Path(args.output_dir) / (args.run_name or usual_name)
    options = data_options(args).replace(without_videos=args.clusters != "vision")
    train = load_data(args.dataset, "train", options)
    check_source(train, args.clusters)
    with opening(folder):
        folder.mkdir(parents=True, exist_ok=True)
    cluster_captions = functools.partial(mmts.cluster_captions, seed=args.seed)
    clusters = open_clusters(folder, args, train, torch.device("cpu"), cluster_captions)
    if clusters is None:
        raise UserError("--clusters none: there is nothing to draw; name another --clusters")
    args = common.fit_to_data(args, train)  # the steps of a run with these flags
    total = common.count_steps(args, train).total
    period, alpha = mmts.schedule_of(args, total)
    curve = functools.partial(mmts.sample_temperature, period=period, alpha=alpha)
    draw_figures(folder, args, train, clusters, total=total,
                 shifts=mmts.shifts_of(clusters, args), period=period, curve=curve)
    for example in clusters.meta["examples"]:
        captions = "; ".join(example["captions"][:4])
        say(f"#{example['cluster'] + 1} of {len(clusters.sizes)}, {example['size']:,}: {captions}")
    say(f"written to {folder}")


# ----------------------------------------------------- command line -------------------------------
FIGURES = ["phase", "margins", "concepts", *FIGURES_OF_ANY_RUNS]
# {figure of one script's runs: a flag that only these have}
OWN_FLAGS = {
    "phase": "period", "tails": "train_features", "margins": "margin_schedule",
    "concepts": "qa_model"}


def main(argv=None):
    """The command line. Raises: UserError."""
    words = sys.argv[1:] if argv is None else argv
    if words[:2] == ["clusters", "mmts.py"]:
        draw_clusters(words[2:])
        return
    p = OneLineErrorParser("python -m tools.figures", __doc__.splitlines()[0])
    p.add_argument("figure", choices=FIGURES, help="figure to draw; see the pages of docs/")
    p.add_argument("runs", nargs="+", metavar="RUN",
                   help="folders of finished runs; concepts: two, the baseline first")
    p.add_argument("--out", default="", metavar="FILE",
                   help="picture, .png or .pdf; empty = FIGURE.png")
    p.add_argument("--topics", type=whole, default=0, metavar="K",
                   help="topics of an LDA that are the concepts of retrieval; 0 = its classes")
    args = p.parse_args(argv)
    p.only(args.figure == "concepts", "for concepts", "--topics")
    if args.figure in OWN_FLAGS:
        name = OWN_FLAGS[args.figure]
        for run in args.runs:
            p.require(name in read_json(Path(run) / "args.json"),
                      f"{args.figure}: {run} has no {flag_of(name)}, which the runs of this "
                      "figure have (docs/)")
    out = args.out or f"{args.figure}.png"
    if args.figure == "phase":
        lines = draw_phase(args.runs, out)
    elif args.figure == "margins":
        lines = draw_margins(args.runs, out)
    elif args.figure == "concepts":
        p.require(len(args.runs) == 2, "concepts: give two runs, the baseline first")
        lines = draw_concepts(args.runs, out, args.topics)
    else:
        names = [Path(run).name for run in args.runs]
        p.require(len(set(names)) == len(names),
                  f"{' '.join(names)}: give the runs different names")
        read, draw = FIGURES_OF_ANY_RUNS[args.figure]
        lines = draw(dict(zip(names, map(read, args.runs))), out)
    say("\n".join([*lines, f"written to {out}"]))


if __name__ == "__main__":
    with clean_exit():
        main()
