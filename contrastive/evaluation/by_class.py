"""Classes: nearest neighbours, linear probes, zero-shot; frequent and rare classes or queries separately."""

import dataclasses

from contrastive.data.views import uniforms
from contrastive.engine.processes import UserError
from contrastive.evaluation.embed import encode_texts, on_card
from contrastive.evaluation.metrics import (
    head_mid_tail,
    knn_accuracy,
    knn_chance,
    linear_probe,
    normalize,
    recalls,
    zero_shot_accuracy,
)

import numpy as np
import torch
import torch.nn.functional as F


def recall_by_frequency(ranks, frequency):
    """R@1 R@5 R@10 R@50 (percent), MdR and MnR, separately for queries of frequent and of rare clusters.

    Args: ranks (Q,): rank of each query's best positive, from 1 (retrieval_metrics(..., ranks=True) gives them).
        frequency (Q,): size of the query's training cluster or class.
    Returns: {head, mid, tail}, each with these keys, queries, and from, to (its frequencies). They are thirds of the
        queries, the most frequent first. Queries of equal frequency stay together, in the third where their middle
        falls, so the thirds may differ in size, and one may be missing; {} if all frequencies are equal.
    """
    ranks, frequency = np.asarray(ranks), np.asarray(frequency)
    sizes, where, count = np.unique(-frequency, return_inverse=True, return_counts=True)  # most frequent first
    middle = (count.cumsum() - count / 2) / len(ranks)  # the middle of each frequency's queries, in 0..1
    third = np.minimum((3 * middle).astype(int), 2)[where]  # (Q,)
    out = {}
    for number, name in enumerate(("head", "mid", "tail") if len(sizes) > 1 else ()):
        part = third == number  # (Q,)
        if part.any():
            own = frequency[part]
            span = {"queries": int(part.sum()), "from": own.min().item(), "to": own.max().item()}
            out[name] = recalls(ranks[part]) | span
    return out


def with_class(features, labels):
    """The rows of features (M, width) and labels (M,), numpy, that have a class (>= 0); the labels as a tensor."""
    return features[torch.from_numpy(labels >= 0)], torch.from_numpy(labels[labels >= 0])


def neighbours(train, train_labels, test, test_labels, limits=None, device=None):
    """The nearest and the ten nearest neighbours: the class metrics below as knn@1 and knn@10, and those of chance.

    Args: train (M, width), test (Q, width): embeddings or features, labels numpy, -1 without a class; limits: of
        head_mid_tail; device: where neighbours are computed.
    Returns: metrics and chance, {name: {top1, mean_per_class, head, mid, tail}} in percent; the per-class knn@1.
    """
    (train, y), (test, truth) = with_class(train, train_labels), with_class(test, test_labels)
    known, asked = on_card(device, train, test)
    found = {f"knn@{k}": knn_accuracy(known, y, asked, truth, k, per_class=True) for k in (1, 10) if k <= len(train)}
    per_class, chance = found["knn@1"]["per_class"], knn_chance(y.numpy(), truth.numpy())
    return _by_thirds(found, y, limits), {name: chance for name in found}, per_class


def probes(train, train_labels, test, test_labels, few=None, limits=None):
    """LinearSVC on a few and on all training images, as `few-shot` and `all`; see `neighbours`.

    few: (features, labels) for the few-shot probe; else as many images per class as the smallest has."""
    (train, y), (test, truth) = with_class(train, train_labels), with_class(test, test_labels)
    classes, sizes = np.unique(y.numpy(), return_counts=True)
    source, shots = (with_class(*few), None) if few else ((train, y), int(sizes.min()))
    found = {"few-shot": linear_probe(*source, test, truth, few_shot=shots, per_class=True),
             "all": linear_probe(train, y, test, truth, per_class=True)}
    chance = dict.fromkeys(("top1", "mean_per_class"), 100 / len(classes))
    return _by_thirds(found, y, limits), {name: chance for name in found}


def _by_thirds(found, train_labels, limits):
    """{name: {top1, mean_per_class, head, mid, tail}} of results that have per_class."""
    return {name: {k: v for k, v in of.items() if k != "per_class"}
            | head_mid_tail(train_labels.numpy(), of["per_class"], limits) for name, of in found.items()}


def zero_shot(model, tokenizer, image, labels, data, device):
    """Top-1/3/5 by the nearest class embedding: the mean of its normalised prompt embeddings, as in CLIP and TeMo's
    code; and, as names_top1 and so on, the embedding of its name alone.

    Args: image (M, D), labels (M,) numpy; data: its label_names and prompts, which are not cleaned as captions are.
    Returns: metrics and chance, {top1, ..., names_top5: percent}. Collective."""
    image, labels = with_class(image, labels)
    names = [n.strip().replace("_", " ") for n in data.label_names]        # a repeated name has a trailing blank
    metrics, chance = {}, {}
    for reading, prompts in (("", data.prompts or ["a photo of a {c}."]), ("names_", ["{c}"])):
        texts = [prompt.replace("{c}", n) for n in names for prompt in prompts]
        texts = encode_texts(model, tokenizer.plain(), texts, device)      # (C * P, D)
        embeddings = normalize(texts).view(len(names), len(prompts), -1)   # (C, P, D)
        found = zero_shot_accuracy(image, labels, embeddings.mean(1))
        metrics |= {reading + k: v for k, v in found.items()}
        chance |= {f"{reading}top{k}": 100 * min(1.0, k / len(names)) for k in (1, 3, 5)}
    return metrics, chance


def padded_and_flipped(data, seed):
    """The images after one crop with 4 pixels of padding and a flip with probability 1/2, drawn once (the TS authors'
    notebook)."""
    if data.pixels is None:
        raise UserError("--train-features augmented: only for small images in memory (CIFAR); use clean")
    u = torch.from_numpy(uniforms(seed, 0, np.arange(len(data)), 3, stream=9))  # (M, 3)
    H, W = data.pixels.shape[-2:]
    padded = F.pad(data.pixels, (4, 4, 4, 4))  # (M, 3, H + 8, W + 8)
    tops, lefts = (u[:, :2] * 9).long().unbind(1)  # (M,) each
    crops = [x[..., t:t + H, l:l + W] for x, t, l in zip(padded, tops.tolist(), lefts.tolist())]
    views = [c.flip(-1) if f < 0.5 else c for c, f in zip(crops, u[:, 2].tolist())]
    return dataclasses.replace(data, pixels=torch.stack(views))
