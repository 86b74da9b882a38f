"""Pictures of NCL: errors, mistakes and queues with its biases (Figs. 2, 3, 5), queries (6), modalities (7, 8)."""

from contrastive.evaluation.metrics import normalization_error, normalize, pair_cosines
from contrastive.evaluation.retrieval import retrieval_both_ways
from contrastive.figures import base
from contrastive.figures.base import figure, save_figure

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def draw_normalization(pieces, gamma, iterations, queues, biases_of, path):
    """Figs. 2, 3 and 5: normalisation errors, mistakes against an item's summed probability, R@1 against queue size.

    Args: pieces: with biases, as normalized_retrieval returns them.   queues: {texts, videos}: (K, D) or empty.
        biases_of: ncl.py's retrieval_biases."""
    image, text = normalize(pieces["image"]), normalize(pieces["text"])    # (M, D), (C, D)
    sim, biases, it = text @ image.T, pieces["biases"], base.kind_of(pieces)             # (C, M)
    fig, axes = figure(5 if len(queues["texts"]) else 4, columns=2)
    for shift, label, s, side in ((-0.2, f"text -> {it}", sim, 0), (0.2, f"{it} -> text", sim.T, 1)):
        errors = [normalization_error(s + b[side], gamma) for b in biases.values()]
        axes[0].bar(np.arange(len(errors)) + shift, errors, 0.4, label=label)
    axes[0].set(title="normalisation error (Fig. 2)", ylabel="mean |1 - sum P|", xticks=range(len(biases)),
                xticklabels=list(biases))
    for mode, (b, _) in biases.items():
        share = collected(sim + b, gamma)                                  # (M,)
        bins = np.digitize(share.numpy(), [0.25, 0.5, 0.75, 1.25, 1.5, 2, 3])            # (M,) 0..7
        at = np.unique(bins)
        for ax, rates in zip(axes[1:3], mistakes(sim + b, pieces["positives"])):
            ax.plot(at, [100 * rates[bins == i].mean() for i in at], label=mode, marker=".")
        axes[3].plot(np.sort(share.numpy())[::-1], label=mode)
    for ax, title in ((axes[1], "false negatives (Fig. 3)"), (axes[2], "false positives (Fig. 3)")):
        ax.set(title=title, xlabel=f"summed probability of one {it}", ylabel="% of the queries", xticks=range(8))
        ax.set_xticklabels(["< .25", "< .5", "< .75", "< 1.25", "< 1.5", "< 2", "< 3", "> 3"], rotation=45)
    axes[3].set_yscale("log", base=2)
    axes[3].set(title=f"what each {it} collects", xlabel=f"{it}, most first",
                ylabel="sum of probabilities, 1 = fair")
    axes[3].yaxis.set(major_formatter="{x:g}", minor_formatter="")
    if len(axes) == 5:
        draw_queue_sizes(axes[4], pieces, gamma, iterations, queues, biases_of)
    for ax in axes:
        ax.legend() if ax is axes[3] else base.legend_above(ax)
    data = pieces["data"]
    fig.suptitle(f"{data.name} ({data.split}): {len(image)} items, {len(text)} texts, gamma {gamma:.3g}. Biases from: "
                 "queue = training queries, which help if test is like training; oracle = the test queries, a bound")
    save_figure(fig, path)


def collected(sim, gamma):
    """Sum over all queries of each item's probability, (C, M) -> (M,), scaled so that 1 is every item's fair share."""
    return F.softmax(sim / gamma, 1).sum(0) * sim.shape[1] / sim.shape[0]


def mistakes(sim, positives):
    """For each item: (M,) share of its own queries that rank no right item first, (M,) share of the others that rank
    this one first.

    Args: sim (C, M): similarities with biases added.   positives (C, P): right items of each query, padded with -1."""
    right = torch.zeros(sim.shape, dtype=torch.bool)                       # (C, M)
    query, place = (positives >= 0).nonzero(as_tuple=True)
    right[query, positives[query, place]] = True
    hit = F.one_hot(sim.argmax(1), sim.shape[1]).bool()                    # (C, M) retrieved first
    lost = ~(hit & right).any(1, keepdim=True)                             # (C, 1)
    missed = (right & lost).sum(0) / right.sum(0).clamp(min=1)             # (M,)
    wrong = (hit & ~right).sum(0) / (~right).sum(0).clamp(min=1)           # (M,)
    return missed.numpy(), wrong.numpy()


def draw_queue_sizes(ax, pieces, gamma, iterations, queues, biases_of):
    """Fig. 5: R@1 with the last 16, 32, ... queries of the queues; dotted lines: without a queue."""
    kept, it = len(queues["texts"]), base.kind_of(pieces)
    sizes = sorted({min(kept, 2**k) for k in range(4, 20)})
    found = [retrieval_both_ways(pieces, biases_of(pieces["image"], queues["texts"][-size:], gamma, iterations),
                                 biases_of(pieces["text"], queues["videos"][-size:], gamma, iterations))[0]
             for size in sizes]
    plain = retrieval_both_ways(pieces)[0]
    for k, (way, label) in enumerate((("text_to_image", f"text -> {it}"), ("image_to_text", f"{it} -> text"))):
        ax.plot(sizes, [f[way]["R@1"] for f in found], marker="o", ms=3, label=label, color=f"C{k}")
        ax.axhline(plain[way]["R@1"], ls=":", color=f"C{k}", label=f"{label}, no queue")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(title="R@1 by queue size (Fig. 5)", xlabel="training queries in the queue", ylabel="R@1, %")


def draw_queries(sims, gamma, pieces, path, queries=3):
    """Fig. 6: the same queries in each stage or run, and each answer's probability summed over all queries.

    Queries whose first answer changes from the first to the last come first.
    Args: sims: {name: (C, M) with biases}; gamma: {name: number}.
    Returns: {name: (M,) what each item collects}."""
    shares = {name: collected(sim, gamma[name]) for name, sim in sims.items()}
    some = base.some_queries(pieces, 200)
    before, *_, after = (sim[some].argmax(1) for sim in sims.values())     # (q,) each
    rows = [some[k] for k in (before == after).int().sort(stable=True).indices[:queries]]
    hits = [(f"{name}: {pieces['texts'][row]}", set(pieces["positives"][row].tolist()), sim[row],
             [f"{s:.2f}, sum {total:.2f}" for s, total in zip(sim[row], shares[name])])
            for row in rows for name, sim in sims.items()]
    base.draw_hits(pieces, hits, path, "below: similarity, and what each collects of all queries (1 = fair; Fig. 6)")
    return shares


def first_captions(pieces):
    """{text, image}: (n, D) each, of the first 500 clips and the first caption of each."""
    clips, first = np.unique(pieces["owner"], return_index=True)           # (M,) each
    return {"text": pieces["text"][first[:500]], "image": pieces["image"][clips[:500]]}


def draw_modalities(stages, it, title, path):
    """Figs. 7 and 8 of stages or runs, {name: {text (n, D), image (k, D)}}; it: image or video.   Returns: the mean
    cosines as lines."""
    fig, axes = figure(len(stages) + 1)
    said, width, kinds = [], 0.8 / len(stages), ["text-text", f"{it}-{it}", f"text-{it}"]
    for k, ((stage, e), ax) in enumerate(zip(stages.items(), axes)):
        text, image = normalize(e["text"]), normalize(e["image"])                        # (n, D), (k, D)
        both = torch.cat([text, image])                                    # (n + k, D)
        both = both - both.mean(0)
        plane = both @ torch.linalg.svd(both, full_matrices=False)[2][:2].T             # (n + k, 2)
        ax.scatter(*plane[:len(text)].T.numpy(), s=5, label="texts")
        ax.scatter(*plane[len(text):].T.numpy(), s=5, label=f"{it}s")
        ax.set(title=f"{stage} (Fig. 7, PCA)", xlabel="first direction", ylabel="second")
        cosines = [*(pair_cosines(x @ x.T)["neg_cos"] for x in (text, image)), (text @ image.T).mean().item()]
        axes[-1].bar(np.arange(3) + (k - (len(stages) - 1) / 2) * width, cosines, width, label=stage)
        said.append(f"{stage}: " + ", ".join(f"{kind} {cos:.3f}" for kind, cos in zip(kinds, cosines)))
    axes[-1].set(title="mean cosine (Fig. 8)", xticks=range(3), xticklabels=kinds)
    for ax in axes:
        base.legend_above(ax)
    fig.suptitle(title)
    save_figure(fig, path)
    return said


def draw(run, retrieval_biases):
    """The pictures of a run: curves; the paper's Figures 2, 3, 5 and 6 for each test set, 7 and 8 for val.

    retrieval_biases: the script's own function, which its evaluation uses too."""
    args, val = run.args, run.val_pieces or run.test_pieces
    queues = load_file(run.folder / "queues.safetensors")
    gamma = queues["gamma"].item()
    before = load_file(run.folder / "embeddings_before.safetensors")
    ways, modes = {"t->v": "text_to_image", "v->t": "image_to_text"}, ("none", "queue")
    recalls = {f"{way}, {mode}": f"eval/{next(iter(val), '')}/normalize/{mode}/{key}/R@1"
               for way, key in ways.items() for mode in modes}
    for by_chance in run.chance.values():
        by_chance["normalize"] = dict.fromkeys(modes, {key: by_chance[key] for key in ways.values()})
    base.draw_curves(run, [
        ("loss", "loss", {"the run's loss": "loss", "L_t2v": "L_t2v", "L_v2t": "L_v2t", "L_cap": "L_cap"}),
        ("temperature", "gamma", {"gamma": "tau"}), *base.BATCH,
        ("normalisation error, batch", "mean |1 - sum P|",
         {"as it is": "error", f"{args.iterations} rounds": "error_normalized"}),
        ("retrieval, val", "R@1, %", recalls)], run.folder / "curves.png", rest=True)
    for name, suffix, pieces in base.by_set(run.test_pieces):
        of_set = queues if name == args.dataset else {"texts": [], "videos": []}
        draw_normalization(pieces, gamma, args.iterations, of_set, retrieval_biases,
                           run.folder / f"normalization{suffix}.png")
        start = {k: before[f"{name}/{k}"] for k in ("text", "image") if f"{name}/{k}" in before}
        last = val.get(name, pieces)
        draw_modalities(({"before training": start} if start else {}) | {"after training": first_captions(last)},
                        base.kind_of(last), f"{last['data'].name} ({last['data'].split})",
                        run.folder / f"modalities{suffix}.png")
        mode = args.normalize if args.normalize in pieces["biases"] and args.normalize != "none" else "oracle"
        sim = normalize(pieces["text"]) @ normalize(pieces["image"]).T     # (C, M)
        stages = {"cosine": sim, f"with biases ({mode})": sim + pieces["biases"][mode][0]}
        draw_queries(stages, dict.fromkeys(stages, gamma), pieces, run.folder / f"retrieval{suffix}.png")
