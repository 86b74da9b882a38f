"""Figures of NCL: errors, mistakes and queues (Figs. 2, 3, 5), queries (6), modalities (7, 8)."""

from contrastive.core.metrics import normalization_error, normalize, pair_cosines
from contrastive.evaluation.retrieval import retrieval_both_ways
from contrastive.figures import base
from contrastive.figures.base import figure, save_figure

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

SHARE_EDGES = [0.25, 0.5, 0.75, 1.25, 1.5, 2, 3]  # of the bins of Fig. 3
SHARE_LABELS = ["< .25", "< .5", "< .75", "< 1.25", "< 1.5", "< 2", "< 3", "> 3"]
NO_QUEUES = {"texts": [], "videos": []}


# ===================================================== errors, mistakes, queues ===================
def draw_normalization(  # noqa: PLR0917
        pieces, gamma, iterations, queues, retrieval_biases, path):
    """Draws Figs. 2, 3 and 5: normalisation errors, mistakes by share, R@1 by size of the queue.

    Args:
        pieces: of an evaluation, with biases, as ncl.py's normalized_retrieval returns them.
        gamma, iterations: of the biases.
        queues: {texts, videos}: (K, D), or empty.
        retrieval_biases: ncl.py's function.
        path: of the picture.
    """
    sim = base.cosines(pieces)                                             # (C, M)
    num_texts, num_items = sim.shape
    kind = base.kind_of(pieces)
    num_panels = 4
    has_queue = len(queues["texts"]) > 0
    if has_queue:
        num_panels = 5
    fig, axes = figure(num_panels, columns=2)
    draw_errors(axes[0], sim, pieces.biases, gamma, kind)
    draw_shares(axes[1:4], sim, pieces, gamma, kind)
    if has_queue:
        draw_queue_sizes(axes[4], pieces, gamma, iterations, queues, retrieval_biases)
    for ax in axes:
        if ax is axes[3]:
            ax.legend()
        else:
            base.legend_above(ax)
    fig.suptitle(
        f"{base.title_of(pieces.data)}: {num_items} items, {num_texts} texts, gamma {gamma:.3g}. "
        "Biases from: queue = training queries, which help if test is like training; oracle = the "
        "test queries, a bound")
    save_figure(fig, path)


def draw_errors(ax, sim, biases, gamma, kind):
    """Draws the normalisation errors of both directions as bars (Fig. 2). sim: (C, M)."""
    positions = np.arange(len(biases))
    text_errors = []
    image_errors = []
    for image_bias, text_bias in biases.values():
        text_errors.append(normalization_error(sim + image_bias, gamma))
        image_errors.append(normalization_error(sim.T + text_bias, gamma))
    ax.bar(positions - 0.2, text_errors, 0.4, label=f"text -> {kind}")
    ax.bar(positions + 0.2, image_errors, 0.4, label=f"{kind} -> text")
    ax.set_title("normalisation error (Fig. 2)")
    ax.set_ylabel("mean |1 - sum P|")
    ax.set_xticks(positions, list(biases))


def draw_shares(axes, sim, pieces, gamma, kind):
    """Draws mistakes against an item's summed probability (Fig. 3), and these sums, sorted.

    Args:
        axes: three panels.
        sim: (C, M) cosines.
    """
    *rate_axes, sum_axes = axes
    for mode, (image_bias, _) in pieces.biases.items():
        biased = sim + image_bias                                          # (C, M)
        share = summed_probability(biased, gamma).numpy()                  # (M,)
        bins = np.digitize(share, SHARE_EDGES)                             # (M,) 0..7
        filled = np.unique(bins)
        for ax, rates in zip(rate_axes, mistakes(biased, pieces.positives)):
            percent = [100 * rates[bins == k].mean() for k in filled]
            ax.plot(filled, percent, label=mode, marker=".")
        sum_axes.plot(np.sort(share)[::-1], label=mode)
    rate_axes[0].set_title("false negatives (Fig. 3)")
    rate_axes[1].set_title("false positives (Fig. 3)")
    for ax in rate_axes:
        ax.set_xlabel(f"summed probability of one {kind}")
        ax.set_ylabel("% of the queries")
        ax.set_xticks(range(8), SHARE_LABELS, rotation=45)
    sum_axes.set_yscale("log", base=2)
    sum_axes.set_title(f"what each {kind} collects")
    sum_axes.set_xlabel(f"{kind}, most first")
    sum_axes.set_ylabel("sum of probabilities, 1 = fair")
    sum_axes.yaxis.set(major_formatter="{x:g}", minor_formatter="")


def summed_probability(sim, gamma):
    """Each item's probability summed over all queries, 1 = its fair share: (C, M) -> (M,)."""
    C, M = sim.shape
    return F.softmax(sim / gamma, 1).sum(0) * M / C                        # (M,)


def mistakes(sim, positives):
    """How often each item is missed, and how often it is retrieved for the queries of others.

    Args:
        sim: (C, M) similarities, with biases added.
        positives: (C, P) right items of each query, padded with -1.
    Returns: (M,) share of an item's own queries that rank no right item first; (M,) share of the
        other queries that rank this item first.
    """
    C, M = sim.shape
    is_right = torch.zeros(C, M + 1, dtype=torch.bool)
    is_right.scatter_(1, positives % (M + 1), True)                        # -1 is column M
    is_right = is_right[:, :M]                                             # (C, M)
    is_first = F.one_hot(sim.argmax(1), M).bool()                          # (C, M)
    query_fails = ~(is_first & is_right).any(1, keepdim=True)              # (C, 1)
    num_missed = (is_right & query_fails).sum(0)                           # (M,)
    num_false = (is_first & ~is_right).sum(0)                              # (M,)
    num_right = is_right.sum(0)                                            # (M,)
    num_others = C - num_right                                             # (M,)
    missed_rate = num_missed / num_right.clamp(min=1)                      # (M,)
    false_rate = num_false / num_others.clamp(min=1)                       # (M,)
    return missed_rate.numpy(), false_rate.numpy()


def draw_queue_sizes(ax, pieces, gamma, iterations, queues, retrieval_biases):  # noqa: PLR0917
    """Draws R@1 with the last 16, 32, ... queries of the queues (Fig. 5); dotted: without one."""
    texts = queues["texts"]
    videos = queues["videos"]
    kind = base.kind_of(pieces)
    sizes = sorted({min(len(texts), 2**k) for k in range(4, 20)})
    results = []
    for size in sizes:
        image_bias = retrieval_biases(
            pieces.image, texts[-size:], gamma, iterations)                # (M,)
        text_bias = retrieval_biases(
            pieces.text, videos[-size:], gamma, iterations)                # (C,)
        result, _ = retrieval_both_ways(pieces, image_bias, text_bias)
        results.append(result)
    unbiased, _ = retrieval_both_ways(pieces)
    labels = {"text_to_image": f"text -> {kind}", "image_to_text": f"{kind} -> text"}
    for k, (direction, label) in enumerate(labels.items()):
        colour = f"C{k}"
        recalls = [result[direction]["R@1"] for result in results]
        ax.plot(sizes, recalls, marker="o", ms=3, label=label, color=colour)
        ax.axhline(unbiased[direction]["R@1"], ls=":", color=colour, label=f"{label}, no queue")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_title("R@1 by queue size (Fig. 5)")
    ax.set_xlabel("training queries in the queue")
    ax.set_ylabel("R@1, %")


# ===================================================== queries ====================================
def draw_queries(sims, gamma, pieces, path):
    """Draws the answers of three queries in each stage or run (Fig. 6).

    Below each answer stands its probability summed over all queries. Queries whose first answer
    changes from the first stage to the last come first.

    Args:
        sims: {stage: (C, M) similarities, with biases}.
        gamma: {stage: number}.
        pieces: of an evaluation.
        path: of the picture.
    Returns: {stage: (M,) summed probability of each item}.
    """
    shares = {}
    first_answers = []                                                     # (q,) each
    candidates = base.some_queries(pieces, 200)
    for stage, sim in sims.items():
        shares[stage] = summed_probability(sim, gamma[stage])
        first_answers.append(sim[candidates].argmax(1))
    is_same = first_answers[0] == first_answers[-1]                        # (q,)
    order = is_same.int().sort(stable=True).indices
    hits = []
    for k in order[:3]:
        row = candidates[k]
        right = set(pieces.positives[row].tolist())
        for stage, sim in sims.items():
            text = f"{stage}: {pieces.texts[row]}"
            below = []
            for similarity, share in zip(sim[row], shares[stage]):
                below.append(f"{similarity:.2f}, sum {share:.2f}")
            hits.append(base.QueryHits(text, right, sim[row], below))
    title = "below: similarity, and what each collects of all queries (1 = fair; Fig. 6)"
    base.draw_hits(pieces, hits, path, title)
    return shares


# ===================================================== modalities =================================
def first_captions(pieces):
    """{text, image}: (n, D) each, of the first 500 clips and the first caption of each."""
    clips, captions = np.unique(pieces.owner, return_index=True)           # (M,) each
    text = pieces.text[captions[:500]]
    image = pieces.image[clips[:500]]
    return {"text": text, "image": image}


def draw_modalities(stages, kind, title, path):
    """Draws both modalities of stages or runs in a plane, and mean cosines (Figs. 7 and 8).

    Args:
        stages: {name: {text: (n, D), image: (k, D)}}.
        kind: 'image' or 'video'.
        title, path: of the picture.
    Returns: the mean cosines as lines.
    """
    fig, axes = figure(len(stages) + 1)
    *planes, bars = axes
    pair_names = ["text-text", f"{kind}-{kind}", f"text-{kind}"]
    bar_width = 0.8 / len(stages)
    first_bar = -(len(stages) - 1) / 2 * bar_width
    lines = []
    for k, (stage, embeddings) in enumerate(stages.items()):
        text = normalize(embeddings["text"])                               # (n, D)
        image = normalize(embeddings["image"])                             # (k, D)
        draw_plane(planes[k], text, image, kind)
        planes[k].set_title(f"{stage} (Fig. 7, PCA)")
        in_text = pair_cosines(text @ text.T)["neg_cos"]
        in_image = pair_cosines(image @ image.T)["neg_cos"]
        between = (text @ image.T).mean().item()
        cosines = [in_text, in_image, between]
        places = np.arange(3) + first_bar + k * bar_width
        bars.bar(places, cosines, bar_width, label=stage)
        words = [f"{name} {cosine:.3f}" for name, cosine in zip(pair_names, cosines)]
        lines.append(f"{stage}: {', '.join(words)}")
    bars.set_title("mean cosine (Fig. 8)")
    bars.set_xticks(range(3), pair_names)
    for ax in axes:
        base.legend_above(ax)
    fig.suptitle(title)
    save_figure(fig, path)
    return lines


def draw_plane(ax, text, image, kind):
    """Draws texts (n, D) and images (k, D) in the plane of their first principal components."""
    from sklearn.decomposition import PCA

    both = torch.cat([text, image])                                        # (n + k, D)
    points = PCA(2).fit_transform(both)                                    # (n + k, 2)
    n = len(text)
    ax.scatter(*points[:n].T, s=5, label="texts")
    ax.scatter(*points[n:].T, s=5, label=f"{kind}s")
    ax.set_xlabel("first direction")
    ax.set_ylabel("second")


# ===================================================== a run ======================================
def draw(run, retrieval_biases):
    """Draws the figures of a run: curves; Figs. 2, 3, 5, 6 of test sets, 7 and 8 of val.

    A run without biases (--loss max-margin) has its answers by cosine in place of Figs. 2, 3, 5, 6.

    Args:
        run: the Run, after its evaluations.
        retrieval_biases: ncl.py's function, which its evaluation uses too.
    """
    args = run.args
    val = run.val_pieces or run.test_pieces
    queues = load_file(run.folder / "queues.safetensors")
    gamma = queues["gamma"].item()
    start = load_file(run.folder / "embeddings_before.safetensors")
    draw_training(run, next(iter(val), ""))
    for name, suffix, pieces in base.by_set(run.test_pieces):
        set_queues = NO_QUEUES
        if name == args.dataset:
            set_queues = queues
        pieces_after = val.get(name, pieces)
        stages = {}
        if f"{name}/text" in start:
            stages["before training"] = {
                "text": start[f"{name}/text"],
                "image": start[f"{name}/image"]}
        stages["after training"] = first_captions(pieces_after)
        kind = base.kind_of(pieces_after)
        title = base.title_of(pieces_after.data)
        draw_modalities(stages, kind, title, run.folder / f"modalities{suffix}.png")

        answers = run.folder / f"retrieval{suffix}.png"
        if not pieces.biases:
            base.draw_retrieval(pieces, answers)
            continue
        draw_normalization(pieces, gamma, args.iterations, set_queues, retrieval_biases,
                           run.folder / f"normalization{suffix}.png")
        mode = args.normalize
        if mode == "none" or mode not in pieces.biases:
            mode = "oracle"
        image_bias, _ = pieces.biases[mode]                                # (M,)
        sim = base.cosines(pieces)                                         # (C, M)
        sims = {"cosine": sim, f"with biases ({mode})": sim + image_bias}
        gammas = dict.fromkeys(sims, gamma)
        draw_queries(sims, gammas, pieces, answers)


def draw_training(run, name):
    """Draws curves.png: the log, and R@1 of the val set `name`, with and without biases."""
    directions = {"t->v": "text_to_image", "v->t": "image_to_text"}
    modes = ("none", "queue")
    recalls = {}
    for label, direction in directions.items():
        if run.args.loss == "max-margin":
            recalls[label] = f"eval/{name}/{direction}/R@1"
            continue
        for mode in modes:
            recalls[f"{label}, {mode}"] = f"eval/{name}/normalize/{mode}/{direction}/R@1"
    chance = {}
    for data_set, levels in run.chance.items():
        # of recalls with biases it is the same
        same = {direction: levels[direction] for direction in directions.values()}
        chance[data_set] = levels | {"normalize": dict.fromkeys(modes, same)}
    losses = {"the run's loss": "loss", "L_t2v": "L_t2v", "L_v2t": "L_v2t", "L_cap": "L_cap"}
    errors = {"as it is": "error", f"{run.args.iterations} rounds": "error_normalized"}
    panels = [
        ("loss", "loss", losses),
        ("retrieval, val", "R@1, %", recalls),
        ("temperature", "gamma", {"gamma": "tau"}),
        *base.batch_panels(),
        ("normalisation error, batch", "mean |1 - sum P|", errors)]
    base.draw_training_curves(run, panels, chance)


FIGURES = {}  # of several runs
