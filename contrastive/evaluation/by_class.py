"""Classes: nearest neighbours, linear probes, zero-shot; frequent and rare classes or queries separately."""

import dataclasses

from contrastive.data.images import CIFAR_STATS
from contrastive.data.views import uniforms
from contrastive.encoders.base import STATS
from contrastive.encoders.models import EvalTransform
from contrastive.engine.processes import UserError
from contrastive.evaluation.embed import encode_images, encode_texts

from contrastive.evaluation.metrics import (  # isort: skip
    head_mid_tail, knn_accuracy, linear_probe, normalize, recalls, zero_shot_accuracy)

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
            out[name] = recalls(ranks[part]) | {"queries": len(own), "from": own.min().item(), "to": own.max().item()}
    return out


def view_of(transform, name, trained_on):
    """(the view of a set's classes, None if it is `transform`; words on it). A run that squashes (the CC3M trainer's
    recipe) sees the classes of other sets than `trained_on` as that trainer does: cropped, with ImageNet's or CIFAR's
    statistics."""
    if transform.resize != "squash" or name == trained_on:
        return None, ""
    stats = next((s for s in ("cifar100", "cifar10") if name.startswith(s)), "imagenet")
    view = EvalTransform(transform.size, *(STATS | CIFAR_STATS)[stats], "crop", transform.size / transform.short)
    return view, f"images of the tasks by class seen as crop, statistics {stats}"


def labelled(model, data, transform, device, workers, projected):
    """(features for kNN (M, D), for probes (M, width), labels (M,) numpy) of the rows of a split that have a class.

    projected: kNN on embeddings, else on the features before the projection, as probes. Collective."""
    rows = np.flatnonzero(data.labels >= 0)
    index, image, features, _ = encode_images(model, data, transform, device, workers=workers, rows=rows)
    return image if projected else features, features, data.labels[index]


def class_metrics(tasks, train, test, few=None, limits=None, device=None):
    """knn: the nearest training images; probe: LinearSVC on a few and on all training images, as `few-shot` and `all`.

    Args: train, test, few: as `labelled` returns them; without few the few-shot probe has as many images per class as
        the smallest has; limits: of head_mid_tail; device: where neighbours are computed.
    Returns: metrics and chance, {name: {top1, mean_per_class, head, mid, tail}} in percent; {name: of each class}."""
    (near, wide, labels), (asked, asked_wide, truth) = train, test
    y, right, found, chance = torch.from_numpy(labels), torch.from_numpy(truth), {}, {}
    if "knn" in tasks:
        near, asked = near.to(device), asked.to(device)
        found = {f"knn@{k}": knn_accuracy(near, y, asked, right, k, per_class=True) for k in (1, 10) if k <= len(y)}
        share = np.bincount(labels, minlength=truth.max() + 1) / len(labels)  # (C,) a random neighbour's classes
        guess = {"top1": share[truth], "mean_per_class": share[np.unique(truth)]}
        chance = dict.fromkeys(found, {k: float(100 * hit.mean()) for k, hit in guess.items()})
    if "probe" in tasks:
        sizes = np.unique(labels, return_counts=True)[1]
        some, shots = (few[1], torch.from_numpy(few[2])) if few else (wide, y), None if few else int(sizes.min())
        found["few-shot"] = linear_probe(*some, asked_wide, right, few_shot=shots, per_class=True)
        found["all"] = linear_probe(wide, y, asked_wide, right, per_class=True)
        chance |= dict.fromkeys(("few-shot", "all"), dict.fromkeys(("top1", "mean_per_class"), 100 / len(sizes)))
    per_class = {name: of.pop("per_class") for name, of in found.items()}
    for name, of in found.items():
        of |= head_mid_tail(labels, per_class[name], limits)
    return found, chance, per_class


def zero_shot(model, tokenizer, image, labels, data, device):
    """Top-1/3/5 by the nearest class embedding: the mean of its normalised prompt embeddings, as in CLIP and TeMo's
    code; and, as names_top1 and so on, the embedding of its name alone.

    Args: image (M, D), labels (M,) numpy; data: its label_names and prompts, which are not cleaned as captions are.
    Returns: metrics and chance, {top1, ..., names_top5: percent}. Collective."""
    names = [n.strip().replace("_", " ") for n in data.label_names]        # a repeated name has a trailing blank
    metrics, chance = {}, {}
    for reading, prompts in (("", data.prompts or ["a photo of a {c}."]), ("names_", ["{c}"])):
        texts = [prompt.replace("{c}", n) for n in names for prompt in prompts]
        texts = encode_texts(model, tokenizer.plain(), texts, device)      # (C * P, D)
        embeddings = normalize(texts).view(len(names), len(prompts), -1)   # (C, P, D)
        found = zero_shot_accuracy(image, torch.from_numpy(labels), embeddings.mean(1))
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
