"""Evaluation by class: nearest neighbours, linear probes, zero-shot; frequent and rare classes."""

import dataclasses
from typing import NamedTuple

from contrastive.core.metrics import (
    accuracy_by_class_size, knn_accuracy, linear_probe, normalize, recalls, zero_shot_accuracy)
from contrastive.core.processes import UserError
from contrastive.data.images import CIFAR_STATS
from contrastive.data.views import uniforms
from contrastive.encoders.base import STATS
from contrastive.encoders.transform import EvalTransform
from contrastive.evaluation.embed import encode_images, encode_texts

import numpy as np
import torch
import torch.nn.functional as F

PROMPTS = ["a photo of a {c}."]  # of data without prompts


# ======================================================= frequency ================================
def recall_by_frequency(ranks, frequency):
    """Recall, separately for queries of frequent and of rare clusters or classes.

    The queries are split into thirds, the most frequent first. Queries of equal frequency stay
    together, in the third where their middle falls, so that the thirds may differ in size and one
    may be missing.

    Args:
        ranks: (Q,) rank of each query's best positive, from 1, as retrieval_ranks returns
            them.
        frequency: (Q,) size of the query's cluster or class in training.
    Returns: {head, mid, tail: {R@1, R@5, R@10, R@50 in percent, MdR, MnR, queries, from, to}}, from
        and to being the lowest and highest frequency; {} if all frequencies are equal.
    """
    ranks, frequency = np.asarray(ranks), np.asarray(frequency)
    # negative, so that the most frequent come first
    values, group, counts = np.unique(-frequency, return_inverse=True, return_counts=True)
    if len(values) < 2:
        return {}
    middles = (counts.cumsum() - counts / 2) / len(ranks)                  # (groups,) 0..1
    third = np.minimum((3 * middles).astype(int), 2)[group]                # (Q,)
    result = {}
    for number, name in enumerate(("head", "mid", "tail")):
        rows = third == number                                             # (Q,)
        if rows.any():
            frequencies = frequency[rows]
            result[name] = recalls(ranks[rows])
            result[name]["queries"] = len(frequencies)
            result[name]["from"] = frequencies.min().item()
            result[name]["to"] = frequencies.max().item()
    return result


# ======================================================= features =================================
class FeatureOptions(NamedTuple):
    """How images are encoded for neighbours and probes."""

    transform: object  # EvalTransform
    device: torch.device
    workers: int


class LabelledFeatures(NamedTuple):
    """The images of a split that have a class."""

    neighbour_features: torch.Tensor  # (M, D) embeddings
    probe_features: torch.Tensor  # (M, width) before the projection
    labels: np.ndarray  # (M,)


def view_of(transform, name, trained_on):
    """The view in which the classes of a data set are evaluated.

    A run that squashes its images (the recipe of the CC3M trainer) sees the classes of other data
    sets as that trainer does: cropped, with the statistics of ImageNet or CIFAR.

    Args:
        transform: EvalTransform of the run.
        name, trained_on: data set of the evaluation, and of the run.
    Returns: EvalTransform, or None if it is `transform`.
    """
    if transform.resize != "squash" or name == trained_on:
        return None
    if name.startswith("cifar100"):
        stats = "cifar100"
    elif name.startswith("cifar10"):
        stats = "cifar10"
    else:
        stats = "imagenet"
    mean_and_std = (STATS | CIFAR_STATS)[stats]
    part = transform.size / transform.short
    return EvalTransform(transform.size, *mean_and_std, "crop", part)


def labelled(model, data, options):
    """LabelledFeatures of a split. options: FeatureOptions. Collective."""
    rows = np.flatnonzero(data.labels >= 0)
    encoded = encode_images(
        model, data, options.transform, options.device, workers=options.workers, rows=rows)
    return LabelledFeatures(encoded.image, encoded.features, data.labels[encoded.index])


def padded_and_flipped(data, seed):
    """Images after one random crop with 4 pixels of padding and one flip with probability 1/2.

    So the TS authors' notebook probes them. Each image is drawn once.
    """
    if data.pixels is None:
        raise UserError("--train-features augmented: only for small images in memory (CIFAR); use "
                        "clean")
    draws = uniforms(seed, 0, np.arange(len(data)), 3, stream=9)
    draws = torch.from_numpy(draws)                                        # (M, 3)
    height, width = data.pixels.shape[-2:]
    padded = F.pad(data.pixels, (4, 4, 4, 4))                              # (M, 3, H + 8, W + 8)
    corners = (draws[:, :2] * 9).long().tolist()                           # M of (top, left)
    flips = (draws[:, 2] < 0.5).tolist()                                   # M
    views = []
    for image, (top, left), flip in zip(padded, corners, flips, strict=True):
        view = image[..., top:top + height, left:left + width]             # (3, H, W)
        if flip:
            view = view.flip(-1)
        views.append(view)
    return dataclasses.replace(data, pixels=torch.stack(views))


# ======================================================= tasks ====================================
def class_metrics(tasks, train, test, few=None, limits=None, *, device=None):
    """Accuracy of nearest neighbours and of linear probes.

    Args:
        tasks: 'knn', 'probe' or both.
        train, test: LabelledFeatures.
        few: those from which the few-shot probe learns; None = as many training images of each
            class as the smallest has.
        limits: as in accuracy_by_class_size.
        device: where neighbours are computed.
    Returns: {knn@1, knn@10, few-shot, all: {top1, mean_per_class, head, mid, tail}} in percent, and
        `shots` of few-shot; {top1, mean_per_class} of each by chance; {class: percent} of knn@1, or
        None.
    """
    _, _, train_labels = train
    metrics, chance, per_class = {}, {}, None
    if "knn" in tasks:
        neighbours, guesses = neighbour_metrics(train, test, device)
        metrics.update(neighbours)
        chance.update(guesses)
    if "probe" in tasks:
        probes, guesses = probe_metrics(train, test, few)
        metrics.update(probes)
        chance.update(guesses)
    for name, result in metrics.items():
        accuracies = result.pop("per_class")
        result.update(accuracy_by_class_size(train_labels, accuracies, limits))
        if name == "knn@1":
            per_class = accuracies
    return metrics, chance, per_class


def neighbour_metrics(train, test, device):
    """{knn@1, knn@10: accuracies} by the nearest training images; the accuracies of each by chance.

    By chance one neighbour is a random training image. Ten random ones mostly vote for the most
    frequent class.
    """
    features, _, labels = train
    test_features, _, test_labels = test
    features, test_features = features.to(device), test_features.to(device)
    share = np.bincount(labels, minlength=test_labels.max() + 1) / len(labels)          # (classes,)
    guess = {"top1": float(100 * share[test_labels].mean()),
             "mean_per_class": float(100 * share[np.unique(test_labels)].mean())}
    guesses = {1: guess, 10: guess_or_constant(guess, labels, test_labels)}
    metrics, chance = {}, {}
    for k in (1, 10):
        if k <= len(labels):
            metrics[f"knn@{k}"] = knn_accuracy(
                features, torch.from_numpy(labels), test_features, torch.from_numpy(test_labels),
                k, per_class=True)
            chance[f"knn@{k}"] = guesses[k]
    return metrics, chance


def guess_or_constant(guess, labels, test_labels):
    """A guess {top1, mean_per_class} with the top1 of a constant answer if that is higher.

    The answer is the most frequent training class, which features of pure noise lead to.

    Args: labels, test_labels: of training (M,) and test images (Q,), numpy.
    """
    constant = np.bincount(labels).argmax()
    top1 = float(100 * (test_labels == constant).mean())
    return guess | {"top1": max(guess["top1"], top1)}


def probe_metrics(train, test, few=None):
    """{few-shot, all: accuracies} of probes of a few and of all images; the accuracies of each by
    chance. The `shots` of few-shot are the images of a class, on average."""
    _, features, labels = train
    _, test_features, test_labels = test
    num_classes = len(np.unique(labels))
    guess = dict.fromkeys(("top1", "mean_per_class"), 100 / num_classes)
    metrics = {}
    chance = {"all": guess_or_constant(guess, labels, test_labels), "few-shot": guess}
    labels, test_labels = torch.from_numpy(labels), torch.from_numpy(test_labels)
    if few:
        _, few_features, few_labels = few
        metrics["few-shot"] = linear_probe(
            few_features, torch.from_numpy(few_labels), test_features, test_labels, per_class=True)
        metrics["few-shot"]["shots"] = round(len(few_labels) / len(np.unique(few_labels)))
    else:
        smallest = int(labels.unique(return_counts=True)[1].min())
        metrics["few-shot"] = linear_probe(
            features, labels, test_features, test_labels, few_shot=smallest, per_class=True)
        metrics["few-shot"]["shots"] = smallest
    metrics["all"] = linear_probe(features, labels, test_features, test_labels, per_class=True)
    return metrics, chance


def zero_shot(model, tokenizer, image, labels, data, *, device):
    """Top-1, top-3 and top-5 by the nearest class embedding. Collective.

    The embedding of a class is the mean of its normalised prompt embeddings, as in CLIP and in
    TeMo's code. The keys names_top1, names_top3 and names_top5 have the accuracy with the embedding
    of the class name alone. Prompts are not cleaned as captions are.

    Args:
        image, labels: embeddings (M, D), classes (M,).
        data: its label_names and prompts.
    Returns: {top1, ..., names_top5: percent}; the same for chance; how many of the prompts and
        names are cut.
    """
    # of two equal class names, data/images.py has added a blank to the second one
    names = [name.strip().replace("_", " ") for name in data.label_names]
    plain_tokenizer = tokenizer.plain()
    metrics, chance, num_cut = {}, {}, 0
    for prefix, prompts in (("", data.prompts or PROMPTS), ("names_", ["{c}"])):
        texts = []
        for name in names:
            texts += [prompt.replace("{c}", name) for prompt in prompts]
        num_cut += plain_tokenizer.count_cut(texts)
        embeddings = normalize(encode_texts(model, plain_tokenizer, texts, device))     # (C * P, D)
        embeddings = embeddings.view(len(names), len(prompts), -1).mean(1)               # (C, D)
        accuracy = zero_shot_accuracy(image, torch.from_numpy(labels), embeddings)
        for k in (1, 3, 5):
            metrics[f"{prefix}top{k}"] = accuracy[f"top{k}"]
            chance[f"{prefix}top{k}"] = 100 * min(1.0, k / len(names))
    return metrics, chance, num_cut
