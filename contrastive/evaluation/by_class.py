"""Evaluation by class: nearest neighbours, zero-shot, linear probes, and frequent and rare classes separately.

temperature_schedules.py uses it to evaluate as its authors do; the other scripts take their kNN from here.
"""

import dataclasses
import functools

from contrastive.data.views import uniforms
from contrastive.engine.processes import UserError, lost_another, on_card, say, with_place
from contrastive.evaluation.embed import encode_images, encode_texts, few_queries, together
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
    Raises: ValueError on lengths that differ.
    """
    ranks, frequency = np.asarray(ranks), np.asarray(frequency)
    if ranks.shape != frequency.shape or ranks.ndim != 1:
        raise ValueError(f"ranks {ranks.shape} and frequencies {frequency.shape} must be (Q,) both")
    sizes, where, count = np.unique(-frequency, return_inverse=True, return_counts=True)  # most frequent first
    if len(sizes) < 2:
        return {}
    middle = (count.cumsum() - count / 2) / len(ranks)  # the middle of each frequency's queries, in 0..1
    third = np.minimum((3 * middle).astype(int), 2)[where]  # (Q,)
    out = {}
    for number, name in enumerate(("head", "mid", "tail")):
        part = third == number  # (Q,)
        if part.any():
            own = frequency[part]
            span = {"queries": int(part.sum()), "from": own.min().item(), "to": own.max().item()}
            out[name] = recalls(ranks[part]) | span
    return out


def nearest(known, known_labels, features, labels, device=None):
    """(kNN@1, its chance) of features (Q, width) with labels (Q,) among known (M, width), without rows of no class."""
    (mine, theirs), (known, features) = with_class((known_labels, labels), (known, features))
    known, features = on_card(device, known, features)
    found = knn_accuracy(known, torch.from_numpy(mine), features, torch.from_numpy(theirs))
    return found, knn_chance(mine, theirs)


def with_class(labels, features):
    """Keeps the rows that have a class (>= 0). labels: (M,) numpy of each split; features: (M, width) of each split."""
    has = [y >= 0 for y in labels]  # (M,) bool each
    return [y[h] for y, h in zip(labels, has)], [f[torch.from_numpy(h)] for f, h in zip(features, has)]


def zero_shot_metrics(image, labels, data, encode):
    """Top-1/3/5 by the nearest class embedding: the mean of its normalised prompt embeddings, as in CLIP and TeMo's
    code; and, as names_top1 and so on, the embedding of its name alone.

    Args: image (M, D), labels (M,); data: its label_names and prompts; encode: texts -> (len(texts), D).
    Returns: metrics and chance, {top1, ..., names_top5: percent}."""
    names = [n.strip().replace("_", " ") for n in data.label_names]        # a repeated name has a trailing blank
    metrics, chance = {}, {}
    for reading, prompts in (("", data.prompts or ["a photo of a {c}."]), ("names_", ["{c}"])):
        texts = encode([t.replace("{c}", n) for n in names for t in prompts])                      # (C * P, D)
        embeddings = normalize(texts).view(len(names), len(prompts), -1)                           # (C, P, D)
        found = zero_shot_accuracy(image, labels, embeddings.mean(1))
        metrics |= {reading + k: v for k, v in found.items()}
        chance |= {f"{reading}top{k}": 100 * min(1.0, k / len(names)) for k in (1, 3, 5)}
    return metrics, chance


def zero_shot_of_run(tower, tokenizer, device, pieces):
    """{'zero-shot': zero_shot_metrics} of the pieces of an evaluation, for a set with classes and no captions (TeMo,
    Fig. 7); {} for others."""
    data = pieces["data"]
    if data.has_captions or not data.label_names:
        return {}
    (labels,), (image,) = with_class((data.labels[pieces["index"]],), (pieces["image"],))  # (M,), (M, D)
    encode = functools.partial(encode_texts, tower, tokenizer.plain(), device=device)
    return {"zero-shot": zero_shot_metrics(image, torch.from_numpy(labels), data, encode)[0]}


def class_metrics(train, train_labels, test, test_labels, few=None, limits=None, device=None):
    """kNN@1, kNN@10, the few-shot probe (as many images per class as the smallest has) and the probe on all images.

    Args: train (M, width), test (Q, width), labels numpy; few: (features, labels) for the few-shot probe instead;
        limits: of head_mid_tail; device: where neighbours are computed.
    Returns: metrics and chance, {name: {top1, mean_per_class, head, mid, tail}} in percent; the per-class kNN@1.
    """
    y, truth = torch.from_numpy(train_labels), torch.from_numpy(test_labels)
    classes, data = np.unique(train_labels), (train, y, test, truth)
    smallest = int(np.bincount(train_labels)[classes].min())
    known, asked = on_card(device, train, test)
    results = {f"knn@{k}": knn_accuracy(known, y, asked, truth, k, per_class=True) for k in (1, 10) if k <= len(train)}
    source, shots = ((few[0], torch.from_numpy(few[1])), None) if few else ((train, y), smallest)
    results["few-shot"] = linear_probe(*source, test, truth, few_shot=shots, per_class=True)
    results["all"] = linear_probe(*data, per_class=True)
    metrics, chance = {}, {}
    for name, result in results.items():
        overall = {k: v for k, v in result.items() if k != "per_class"}
        metrics[name] = overall | head_mid_tail(train_labels, result["per_class"], limits)
        uniform = {"top1": 100 / len(classes), "mean_per_class": 100 / len(classes)}
        chance[name] = knn_chance(train_labels, test_labels) if name.startswith("knn") else uniform
    return metrics, chance, results["knn@1"]["per_class"]


def class_table(title, metrics, chance):
    """class_metrics as lines of text, each number with its chance level."""
    header = f"{'':<12}{'top-1 (chance)':>20}{'mean per class':>20}{'head':>8}{'mid':>8}{'tail':>8}"
    lines = [f"{title}: {metrics['images']} images", header]
    for name in chance:
        m, c = metrics[name], chance[name]
        thirds = [f"{m[k]:.1f}" if k in m else "-" for k in ("head", "mid", "tail")]  # none of classes of one size
        parts = "".join(f"{x:>8}" for x in thirds)
        lines.append(f"{name:<12}{m['top1']:12.1f} ({c['top1']:5.1f}){m['mean_per_class']:12.1f} "
                     f"({c['mean_per_class']:5.1f}){parts}")
    lines.append(few_queries(images=metrics["images"]))
    return "\n".join(line for line in lines if line)


class ClassEvaluator:
    """Evaluation of features by class: evaluator('val') -> metrics, chance and picture pieces, by data set; {} if it
    fails, with the reason in .errors. Without such a split it returns only the training features. Collective.

    train_features 'augmented': the training images after one crop with 4 pixels of padding and a flip (the TS authors'
    notebook). sets: from labelled_sets; the few-shot probe learns from its split few-shot."""

    def __init__(self, model, transform, sets, device, args):
        self.model, self.transform, self.sets, self.device, self.args = model, transform, sets, device, args
        self.train, self.errors = sets["train"], {}
        if getattr(args, "train_features", "clean") == "augmented":
            self.train = padded_and_flipped(self.train, args.seed)

    def check(self):
        """Does nothing: the sets are open already."""

    def __call__(self, split):
        name = self.args.dataset
        try:
            return tuple({name: part} for part in self._evaluate(split))
        except (UserError, ValueError, RuntimeError, OSError) as error:
            if lost_another(error):
                raise
            self.errors[f"{name}/{split}"] = with_place(error)
            say(f"evaluation of {name} ({split}) failed and is left out: {with_place(error)}")
            return {}, {}, {}

    def _evaluate(self, split):
        args, few = self.args, None
        how = self.transform, self.device, 256, args.workers
        rows, _, known, _ = encode_images(self.model, self.train, *how)
        train_labels = self.train.labels[rows]
        pieces = {"train_features": known, "train_labels": train_labels}
        if split not in self.sets:
            return {}, {}, pieces
        data = self.sets[split]
        index, _, features, bad = encode_images(self.model, data, *how)
        labels = data.labels[index]
        if "few-shot" in self.sets:
            shots, _, some, _ = encode_images(self.model, self.sets["few-shot"], *how)
            few = some, self.sets["few-shot"].labels[shots]
        metrics, chance, per_class = together(class_metrics, known, train_labels, features, labels, few=few,
                                              limits=getattr(args, "shot_limits", None), device=self.device)
        metrics |= {"images": len(index), "unreadable": len(bad)}
        pieces |= {"features": features, "labels": labels, "names": data.label_names, "per_class": per_class}
        return metrics, chance, pieces


def padded_and_flipped(data, seed):
    """The images after one crop with 4 pixels of padding and a flip with probability 1/2, drawn once."""
    if data.pixels is None:
        raise UserError("--train-features augmented: only for small images in memory (CIFAR); use clean")
    u = torch.from_numpy(uniforms(seed, 0, np.arange(len(data)), 3, stream=9))  # (M, 3)
    H, W = data.pixels.shape[-2:]
    padded = F.pad(data.pixels, (4, 4, 4, 4))  # (M, 3, H + 8, W + 8)
    tops, lefts = (u[:, :2] * 9).long().unbind(1)  # (M,) each
    crops = [x[..., t:t + H, l:l + W] for x, t, l in zip(padded, tops.tolist(), lefts.tolist())]
    views = [c.flip(-1) if f < 0.5 else c for c, f in zip(crops, u[:, 2].tolist())]
    return dataclasses.replace(data, pixels=torch.stack(views))


# ======================================================= tasks of eval.py ============================================
# Each takes a Case (evaluation/case.py) and writes its numbers into case.metrics and case.chance.
def zero_shot(case):
    """zero_shot_metrics of the set."""
    data, (image, _, labels) = case.data, case.labelled("zero-shot")       # (M, D), (M,)
    if not data.label_names:
        raise UserError("the set has no class names")
    encode = functools.partial(case.subject.texts, clean=False)            # only captions are cleaned
    case.metrics["zero-shot"], case.chance["zero-shot"] = zero_shot_metrics(image, labels, data, encode)


def knn(case):
    """Nearest neighbours among the training images, for each k."""
    (known, known_labels), (image, features, labels) = case.train("knn"), case.labelled("knn")
    features = image if case.subject.knn_features == "projected" else features     # (M, D) or (M, width)
    case.metrics["knn"], case.chance["knn"] = metrics, chance = {}, {}     # so that other k survive a too large one
    own = case.subject.own
    limits = own.get("shot_limits") if case.name == own.get("dataset") else None         # the run's many, medium, few
    known, features = together(on_card, case.subject.device, known, features)
    for k in case.args.knn_k:
        result = together(knn_accuracy, known, known_labels, features, labels, k=k, per_class=True)
        per_class = result.pop("per_class")
        metrics[f"k={k}"] = result | head_mid_tail(known_labels.numpy(), per_class, limits)
        chance[f"k={k}"] = knn_chance(known_labels.numpy(), labels.numpy())


def probe(case):
    """Linear classifiers trained on a few and on all training images."""
    (known, known_labels), (_, features, labels) = case.train("probe"), case.labelled("probe")
    classes, sizes = np.unique(known_labels.numpy(), return_counts=True)
    shots, listed, args = case.args.few_shot or int(sizes.min()), case.few_shot("probe"), case.args
    if listed:
        name, few = "few-shot (the run's list)", linear_probe(*listed, features, labels, seed=args.seed)
    else:
        name = f"few-shot ({shots} a class)"
        few = linear_probe(known, known_labels, features, labels, few_shot=shots, seed=args.seed)
    everything = linear_probe(known, known_labels, features, labels, seed=args.seed)
    case.metrics["probe"] = {name: few, "all": everything}
    case.chance["probe"] = {k: {"top1": 100 / len(classes)} for k in case.metrics["probe"]}


TASKS = {"zero-shot": zero_shot, "knn": knn, "probe": probe}
