"""Figures of MAMA: of a run, curves, weights (Fig. 4, right), retrieval or answers; of several
runs, Figures 2, 4 and 5; clips with captions (Fig. 6), for tools/caption.py."""

from collections import Counter
from typing import NamedTuple

from contrastive.core.files import flatten, read_json
from contrastive.core.metrics import retrieval_ranks
from contrastive.core.processes import UserError, opening
from contrastive.figures import base
from contrastive.figures.base import figure, save_figure

import numpy as np
from safetensors.torch import load_file

NUM_TOPICS = 10  # of captions, in Figs. 2 and 5
# flags in which the runs of Fig. 4 may differ; --baseline sets others, which are compared
MARGIN_FLAGS = {"margin_schedule", "a0", "a1", "a2", "baseline", "seed"}


# ======================================================= one run ==================================
def draw(folder):
    """Draws the figures of a run into its folder."""
    run = base.FinishedRun(folder)
    draw_training(run)
    pairs = read_pairs(run.folder)
    if pairs and run.args.weighting != "none":
        draw_weights(pairs, run.args.weighting, run.folder / "weights.png")
    for _, suffix, pieces in base.by_set(run.test, min_queries=1):
        if pieces.predicted is not None:
            base.draw_answers(pieces, run.folder / f"answers{suffix}.png")
        else:
            base.draw_retrieval(pieces, run.folder / f"retrieval{suffix}.png")


def draw_training(run):
    """Draws curves.png: what the log has of the training steps."""
    logged = {name for row in run.rows for name in row}
    scores = base.recall_panel(run)
    if "answered" in logged:
        name = next(iter(run.val or run.test), "")
        accuracies = {"val": f"eval/{name}/accuracy", "training batch": "answered"}
        scores = ("answers", "%", accuracies)
    losses = {
        "weighted, Eq. 8": "loss",
        "L_i, all pairs": "L",
        "L_i, matched": "L_matched",
        "L_i, mismatched (stays high)": "L_mismatched"}
    weights = {"all": "w", "matched": "w_matched", "mismatched": "w_mismatched"}
    base.draw_training_curves(run, [
        ("loss", "nats", losses),
        scores,
        ("temperature", "tau", {"tau": "tau"}),
        ("margin", "mu, radians", {"mu": "mu"}),
        ("weights", "mean over the batch", weights),
        *base.batch_panels()])


def read_pairs(folder):
    """{step: (N, 3)} of pairs_STEP.safetensors in the order of steps: loss, weight, 1 = mismatched.
    """
    pairs = {}
    for path in folder.glob("pairs_*.safetensors"):
        step = int(path.stem.removeprefix("pairs_"))
        with opening(path):
            pairs[step] = load_file(path)["pairs"]
    return dict(sorted(pairs.items()))


def draw_weights(pairs, weighting, path):
    """Draws weights over losses (Fig. 4, right): along the run, and of the last batch.

    Args:
        pairs: as read_pairs returns them.
        weighting: its name, for the title.
    """
    learnt = weighting in ("meta", "joint")                                # a function of the loss
    if learnt:
        fig, (left, right) = figure(2)
        draw_weight_curves(left, pairs)
    else:
        fig, (right,) = figure(1)
    *_, last = pairs.values()
    sample_loss, weight, mismatched = last.unbind(1)                       # (N,) each
    right.set(title="the pairs of the last batch", xlabel="L_i, nats", ylabel="w_i")
    if mismatched.any():
        for label, value in (("matched", 0), ("mismatched", 1)):
            chosen = mismatched == value                                   # (N,) bool
            right.scatter(sample_loss[chosen], weight[chosen], s=14, alpha=0.7, label=label)
        base.legend_above(right)
    else:
        # of the user's own data nobody knows which captions are wrong
        right.scatter(sample_loss, weight, s=14, alpha=0.7)
    fig.suptitle(f"--weighting {weighting}")
    save_figure(fig, path)


def draw_weight_curves(ax, pairs):
    """Draws the weight that a network gives to a loss at each of the steps."""
    for step, pairs_of_step in pairs.items():
        order = pairs_of_step[:, 0].argsort()                              # (N,)
        sample_loss, weight, _ = pairs_of_step[order].unbind(1)            # (N,) each
        ax.plot(sample_loss, weight, label=f"step {step}")
    ax.set(title="weight over loss along the run (Fig. 4)", xlabel="L_i, nats", ylabel="w_i")
    base.legend_above(ax)


def draw_clips(clips, path, title, width, words):
    """Draws clips two in a row, with their captions (Fig. 6).

    Args:
        clips: [(picture (H, W, 3), words below it)].
        width: of a picture, in inches.
        words: height of the words, in inches.
    """
    examples = [base.Example(pixels, "", below) for pixels, below in clips]
    rows = []
    for k in range(0, len(examples), 2):
        rows.append(("", examples[k:k + 2]))
    base.draw_examples(rows, path, title, width=width, words=words)


# ======================================================= several runs, Fig. 4 =====================
class MarginRun(NamedTuple):
    """A run with its margin."""

    score: float  # on val, percent
    mu: float  # a0 / a1, radians; 0 = no margin
    a2: float | None  # None if the margin does not grow


def read_margin_run(run):
    """The MarginRun of a FinishedRun, and the name of its score: accuracy, or R@1."""
    metrics = flatten(next(iter(run.summary["val"].values()), {}))
    metric = "accuracy"
    if metric not in metrics:
        metric = "text_to_image/R@1"
    if metric not in metrics:
        raise UserError(f"{run.folder}: has neither an accuracy nor R@1 on val; give runs of "
                        "mama.py with a val split")
    mu, a2 = 0.0, None
    if run.args.margin_schedule != "none":
        mu = run.args.a0 / run.args.a1
    if run.args.margin_schedule == "logistic":
        a2 = run.args.a2
    return MarginRun(metrics[metric], mu, a2), metric


def margin_lines(runs, axis, same):
    """{label: {x: [scores]}}: one line for each value of `same` that has two or more x.

    A run without a margin belongs to every line over mu.

    Args:
        runs: list of MarginRun.
        axis, same: 'mu' and 'a2', or the other way round.
    """
    without_margin = [run.score for run in runs if not run.mu]
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
        curves[label].setdefault(x, []).append(run.score)
    return {label: curve for label, curve in sorted(curves.items()) if len(curve) > 1}


def draw_margins(folders, path):
    """Fig. 4: the score on val over the margin and over its growth."""
    finished_runs = base.read_runs(folders)
    base.require_same_flags(finished_runs, MARGIN_FLAGS, "the margin and the seed alone")
    runs = []
    for run in finished_runs.values():
        margin_run, metric = read_margin_run(run)
        runs.append(margin_run)
    panels = [
        ("margin (Fig. 4, left)", "a0 / a1, radians; 0 = none", margin_lines(runs, "mu", "a2")),
        ("a2 of the margin's growth (Fig. 4, middle)", "a2, per step",
         margin_lines(runs, "a2", "mu"))]
    panels = [panel for panel in panels if panel[2]]  # of runs with two margins, or two a2
    if not panels:
        raise UserError("margins: no two of the runs differ in --a0 / --a1 or in --a2 alone; give "
                        "runs with several margins")
    fig, axes = figure(len(panels))
    lines = []
    for ax, (title, xlabel, curves) in zip(axes, panels):
        for k, (label, curve) in enumerate(curves.items()):
            means = {}
            for x, scores in sorted(curve.items()):
                means[x] = np.mean(scores)
                ax.scatter([x] * len(scores), scores, s=18, color=f"C{k}")
                lines.append(f"{title}, {label}: {x:g}: {means[x]:.2f} ({len(scores)} runs)")
            ax.plot(list(means), list(means.values()), color=f"C{k}", label=label)
        ax.set_title(title)
        ax.set_xlabel(xlabel)
        ax.set_ylabel(f"val {metric}, %")
        base.legend_above(ax)
    save_figure(fig, path)
    return lines


# ======================================================= two runs, Figs. 2 and 5 ==================
class Concept(NamedTuple):
    """The test queries of one topic, or of one answer, in two runs."""

    name: str
    share: float  # of the training examples, percent
    queries: int
    first_hits: int
    second_hits: int

    @property
    def gain(self):
        """Of the second run, in percent of the hits of the first; nan if it has none."""
        if not self.first_hits:
            return np.nan
        return 100 * (self.second_hits - self.first_hits) / self.first_hits


def draw_concepts(folders, path):
    """Figs. 2 and 5: how frequent concepts are in the training data, and what the second run gains
    on the test queries of each. Concepts are the answers of open questions, else topics of texts.
    """
    runs = base.read_runs(folders)
    if len(runs) != 2:
        raise UserError(f"concepts: {len(runs)} runs; give two, of which the first is the baseline")
    first, second = base.first_test_sets(runs).values()
    first_run, _ = runs.values()
    training_names, names = concepts_of(first_run, first)                  # M, Q words
    counts = Counter(training_names)
    first_hits, second_hits = hits_of(first), hits_of(second)              # (Q,)
    concepts = []
    for name in {*training_names, *names}:
        share = 100 * counts[name] / len(training_names)
        chosen = np.array(names) == name                                   # (Q,)
        concepts.append(Concept(
            name, share, int(chosen.sum()), int(first_hits[chosen].sum()),
            int(second_hits[chosen].sum())))
    concepts.sort(key=lambda concept: (-concept.share, concept.name))

    fig, (left, right) = figure(2, height=4)
    shown = concepts[:20][::-1]
    left.barh([concept.name for concept in shown], [concept.share for concept in shown])
    left.set_title("concepts (Fig. 2)")
    right.scatter(
        [concept.share for concept in concepts], [concept.gain for concept in concepts], alpha=0.6)
    right.set_title("gain by concept (Fig. 5)")
    right.set_ylabel("gain, % of the first run's")
    right.axhline(0, color="grey", lw=0.8)
    for ax in (left, right):
        ax.set_xlabel("part of the training data, %")
    save_figure(fig, path)

    lines = []
    for concept in concepts:
        if not concept.queries:
            continue
        gain = f"gain {concept.gain:+.1f} %"
        if not concept.first_hits:
            gain = "no gain, since the first run has no hit"
        lines.append(f"{concept.name}: {concept.share:.2f} % of the training data, hits "
                     f"{concept.first_hits} -> {concept.second_hits} of {concept.queries}, {gain}")
    return lines


def concepts_of(run, pieces):
    """The concepts of M training examples and of Q test queries: two lists of names.

    Args:
        run: FinishedRun, whose training texts define the topics.
        pieces: SavedPieces of its test.
    """
    file = run.folder / "training_texts.json"
    training_texts = read_json(file)["texts"]
    if getattr(run.args, "task", "") == "qa-open":
        return training_texts, pieces.answers
    return topics_of(training_texts, pieces.questions or pieces.texts)


def hits_of(pieces):
    """(Q,) bool: whether each question, or the first image of each caption, is right."""
    if pieces.hits is not None:
        return pieces.hits.numpy() > 0
    return retrieval_ranks(pieces.text, pieces.image, pieces.positives) == 1


def topics_of(training_texts, texts):
    """The likeliest of NUM_TOPICS topics of each of M training texts and of Q other texts, by an
    LDA over the training texts: two lists of three words each."""
    from sklearn.decomposition import LatentDirichletAllocation
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(stop_words="english")
    counts = words.fit_transform(training_texts)                           # (M, words)
    model = LatentDirichletAllocation(NUM_TOPICS, random_state=0).fit(counts)
    vocabulary = words.get_feature_names_out()
    names = []
    for topic in model.components_:                                        # (words,)
        names.append(" ".join(vocabulary[np.argsort(-topic)[:3]]))
    names.append("no known word")
    topics = []
    for counts_of_split in (counts, words.transform(texts)):               # (M or Q, words)
        likeliest = model.transform(counts_of_split).argmax(1)             # (M or Q,)
        likeliest[counts_of_split.sum(1).A1 == 0] = -1
        topics.append([names[topic] for topic in likeliest])
    return topics


FIGURES = {
    "margins": draw_margins,
    "concepts": draw_concepts}
