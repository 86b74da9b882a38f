"""What a kNN or a probe has to be clearly above: raw pixels, a histogram of 64 colours, and the untrained tower."""

from contrastive.data.table import has_clips
from contrastive.encoders.models import EvalTransform
from contrastive.engine.processes import say
from contrastive.evaluation.by_class import neighbours, probes
from contrastive.evaluation.embed import encode_images

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

TRAIN, TEST = 5_000, 2_000  # rows at most, so that a large set takes minutes
SIDE, CLIP_SIDE, PROBE_SIDE = 48, 32, 8  # pixels at most


def colour_histogram(images):
    """(M, [T,] 3, S, S) in 0..1 -> (M, 64): the share of each of 4 x 4 x 4 colours."""
    levels = (images * 255).round().movedim(-3, -1).flatten(1, -2).long() // 64    # (M, pixels, 3)
    colour = levels[..., 0] * 16 + levels[..., 1] * 4 + levels[..., 2]             # (M, pixels)
    return torch.stack([torch.bincount(row, minlength=64) for row in colour]).float() / colour.shape[1]


def trivial_features(data, transform, device, workers=0):
    """Of each readable image, or clip, at most SIDE or CLIP_SIDE pixels high and wide.

    Returns: index (M,) numpy; {pixels, colours}: (for kNN, for probes), (M, width) each. The pixels of a clip's frames
        are side by side for kNN; a probe, which would take an hour, gets their mean at PROBE_SIDE. Collective."""
    size = min(transform.size, CLIP_SIDE if has_clips(data) else SIDE)
    view = EvalTransform(size, (0, 0, 0), (1, 1, 1), transform.resize, transform.size / transform.short)

    def forward(_, images):                                                # (b, [T,] 3, S, S), 0..1
        return images.flatten(1), torch.cat([colour_histogram(images), thumbnails(images)], 1)
    index, pixels, rest, _ = encode_images(nn.Identity(), data, view, device, workers=workers, forward=forward)
    return index, {"pixels": (pixels, rest[:, 64:]), "colours": (rest[:, :64], rest[:, :64])}


def thumbnails(images):
    """(M, [T,] 3, S, S) -> (M, width): the mean of a clip's frames, small."""
    images = images.mean(1) if images.ndim == 5 else images
    return F.adaptive_avg_pool2d(images, min(PROBE_SIDE, images.shape[-1])).flatten(1)


def trivial_accuracy(train, test, few, transform, device, tasks, models, limits=None, projected=True, workers=0):
    """{pixels, colours and each of `models`: {knn@1, knn@10 and/or few-shot, all: of neighbours and probes}}.

    Args: train, test, few: Data, few None or of the few-shot probe; of more than TRAIN and TEST rows so many are drawn.
        tasks: knn, probe.   models: {name: model}, measured beside the trivial ones; projected: kNN on its embeddings,
        else on features. Sets of features from files have no pixels: only the models are measured. Collective."""
    parts = {"train": _some(train, TRAIN), "test": _some(test, TEST)} | ({"few": few} if few else {})
    features, labels = {}, {}                                              # {name: {part: (for kNN, for probes)}}
    for part, data in parts.items():
        if not hasattr(data.clip, "width"):
            index, found = trivial_features(data, transform, device, workers)
            for name, pair in found.items():
                features.setdefault(name, {})[part] = pair
            labels[part] = data.labels[index]
        for name, model in models.items():
            index, image, backbone, _ = encode_images(model, data, transform, device, workers=workers)
            features.setdefault(name, {})[part] = image if projected else backbone, backbone
            labels[part] = data.labels[index]
    out = {name: {} for name in features}
    for name, of in features.items():
        if "knn" in tasks:
            out[name] |= neighbours(of["train"][0], labels["train"], of["test"][0], labels["test"], limits, device)[0]
        if "probe" in tasks:
            some = (of["few"][1], labels["few"]) if few else None
            out[name] |= probes(of["train"][1], labels["train"], of["test"][1], labels["test"], some, limits)[0]
    return out


def _some(data, most):
    """At most so many of its rows."""
    if len(data) <= most:
        return data
    say(f"{data.name} ({data.split}): pixels, colours and the untrained tower on {most:,} of {len(data):,} images")
    return data.select(np.sort(np.random.default_rng(42).permutation(len(data))[:most]))
