"""Trivial baselines of neighbours and probes: raw pixels, colour histograms, untrained towers."""

import functools

from contrastive.core.processes import print_main
from contrastive.data.table import frames_of
from contrastive.encoders.models import EvalTransform
from contrastive.evaluation.by_class import LabelledFeatures, class_metrics, labelled
from contrastive.evaluation.embed import outputs_of_images

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

# rows at most, so that a large data set takes minutes
MAX_TRAIN = 5_000
MAX_TEST = 2_000
# sides in pixels at most: of an image, of a clip, of the pixels that a probe sees
IMAGE_SIDE = 48
CLIP_SIDE = 32
PROBE_SIDE = 8


def pixels_and_colours(_, images, frames=0):
    """Raw pixels and colour histograms of images or clips.

    Args:
        images: (b, [T,] 3, S, S) in 0..1.
        frames: of a clip that are read, evenly spaced (--eval-frames may be more than training's).
    Returns: all pixels (b, many); the share of each of 4 x 4 x 4 colours and the pixels for a
        probe, (b, 64 + few). A probe of all pixels would take an hour, so these are the mean of the
        frames, PROBE_SIDE high and wide.
    """
    if frames and images.ndim == 5:
        images = images[:, torch.linspace(0, images.shape[1] - 1, frames).round().long()]
    levels = (images * 255).round().movedim(-3, -1).flatten(1, -2).long() // 64          # (b, P, 3)
    colour = levels[..., 0] * 16 + levels[..., 1] * 4 + levels[..., 2]     # (b, P)
    counts = torch.stack([torch.bincount(row, minlength=64) for row in colour])          # (b, 64)
    shares = counts.float() / colour.shape[1]                              # (b, 64)
    frame = images
    if images.ndim == 5:
        frame = images.mean(1)                                             # (b, 3, S, S)
    side = min(PROBE_SIDE, frame.shape[-1])
    small = F.adaptive_avg_pool2d(frame, side).flatten(1)                  # (b, 3 * side * side)
    return images.flatten(1), torch.cat([shares, small], 1)


class BodyFeatures(nn.Module):
    """The features of a frozen image encoder as embeddings: what its projection has to improve."""

    def __init__(self, tower):
        super().__init__()
        self.tower = tower
        self.cached_images = tower.cached_images
        self.train(tower.training)

    def forward(self, pixels):
        _, _, features = self.tower(pixels)                                # (b, width)
        return features, None, features


def trivial_accuracy(train, test, few, options, *, tasks, models, limits=None):
    """Accuracies of trivial features, which a trained model must clearly exceed. Collective.

    Where the data are features from files, there are no pixels, and only `models` are measured. Of
    more than MAX_TRAIN or MAX_TEST images with a class so many are drawn. Then there are no
    accuracies of head, mid and tail, which would be other classes than the model's, and no
    few-shot probe without `few`, which would have fewer images than the model's.

    Args:
        train, test: Data.
        few: Data of the few-shot probe, or None.
        options: FeatureOptions; pixels and colours are those of a smaller view.
        tasks: 'knn', 'probe' or both.
        models: {name: model}, measured beside pixels and colours.
        limits: as in class_metrics.
    Returns: {pixels, colours and each of `models`: as class_metrics}.
    """
    has_drawn_images = bool(drawn_images(train, test))
    view = small_view(options.transform, train)
    forward = functools.partial(pixels_and_colours, frames=frames_of(train))
    train_features = features_of(at_most(train, MAX_TRAIN), view, options, models, forward)
    test_features = features_of(at_most(test, MAX_TEST), view, options, models, forward)
    few_features = {}
    if few:
        few_features = features_of(few, view, options, models, forward)
    result = {}
    for name in train_features:
        result[name], _, _ = class_metrics(
            tasks, train_features[name], test_features[name], few_features.get(name), limits,
            with_few_shot=not has_drawn_images, device=options.device)
        if has_drawn_images:
            result[name] = overall_accuracies(result[name])
    return result


def overall_accuracies(accuracies):
    """{task: {top1, mean_per_class}}: the accuracies without those of head, mid and tail."""
    result = {}
    for task, values in accuracies.items():
        result[task] = {name: values[name] for name in ("top1", "mean_per_class")}
    return result


def small_view(transform, data):
    """The EvalTransform for pixels and colours: smaller, and without statistics."""
    max_side = CLIP_SIDE if frames_of(data) else IMAGE_SIDE
    size = min(transform.size, max_side)
    part = transform.size / transform.short
    return EvalTransform(size, (0, 0, 0), (1, 1, 1), transform.resize, part)


def drawn_images(train, test):
    """{train, test: number of images} of the trivial baselines, {} if they use all images."""
    num_train, num_test = np.sum(train.labels >= 0), np.sum(test.labels >= 0)
    if num_train <= MAX_TRAIN and num_test <= MAX_TEST:
        return {}
    return {"train": int(min(num_train, MAX_TRAIN)), "test": int(min(num_test, MAX_TEST))}


def at_most(data, num_rows):
    """Data with so many labelled rows at most, drawn with a fixed seed."""
    rows = np.flatnonzero(data.labels >= 0)
    if len(rows) <= num_rows:
        return data
    print_main(f"{data.full_name}: trivial baselines on {num_rows:,} of {len(rows):,} images")
    rows = rows[np.random.default_rng(42).permutation(len(rows))[:num_rows]]
    return data.select(np.sort(rows))


def features_of(data, view, options, models, forward):
    """{name: LabelledFeatures} of pixels and colours, which `forward` returns, and the models."""
    features = {}
    if getattr(data.clip, "has_pixels", True):
        index, (pixels, compact), _ = outputs_of_images(
            nn.Identity(), data, view, options.device, forward=forward, workers=options.workers,
            rows=np.flatnonzero(data.labels >= 0))
        labels = data.labels[index]
        colours, small = compact[:, :64], compact[:, 64:]
        features["pixels"] = LabelledFeatures(pixels, small, labels)
        features["colours"] = LabelledFeatures(colours, colours, labels)
    for name, model in models.items():
        features[name] = labelled(model, data, options)
    return features
