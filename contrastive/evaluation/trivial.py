"""What a kNN or a probe has to be clearly above: raw pixels, a histogram of 64 colours, and the untrained tower."""

from contrastive.data.table import frames_of
from contrastive.encoders.models import EvalTransform
from contrastive.engine.processes import say
from contrastive.evaluation.by_class import class_metrics, labelled
from contrastive.evaluation.embed import encode_images

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

MOST = {"train": 5_000, "test": 2_000}  # rows, so that a large set takes minutes
SIDE, CLIP_SIDE, PROBE_SIDE = 48, 32, 8  # pixels at most


def pixels_and_colours(_, images):
    """Of images or clips (b, [T,] 3, S, S) in 0..1: all pixels (b, many); and (b, 64 + few) the share of each of
    4 x 4 x 4 colours and the pixels for a probe, which would take an hour on all: the mean of the frames at PROBE_SIDE.
    """
    levels = (images * 255).round().movedim(-3, -1).flatten(1, -2).long() // 64    # (b, pixels, 3)
    colour = levels[..., 0] * 16 + levels[..., 1] * 4 + levels[..., 2]             # (b, pixels)
    colours = torch.stack([torch.bincount(row, minlength=64) for row in colour]).float() / colour.shape[1]
    frame = images.mean(1) if images.ndim == 5 else images                         # (b, 3, S, S)
    small = F.adaptive_avg_pool2d(frame, min(PROBE_SIDE, frame.shape[-1])).flatten(1)
    return images.flatten(1), torch.cat([colours, small], 1)


def trivial_accuracy(train, test, few, transform, device, workers, projected, tasks, models, limits=None):
    """{pixels, colours and each of `models`: {knn@1, knn@10 and/or few-shot, all: as class_metrics has them}}.

    Args: train, test, few: Data, few None or of the few-shot probe; of more than MOST rows so many are drawn.
        tasks: knn, probe.   models: {name: model}, measured beside the trivial ones; projected: kNN on its embeddings,
        else on features. Pixels are those of a view at most SIDE or CLIP_SIDE high and wide; sets of features from
        files have none: only the models are measured. Collective."""
    size = min(transform.size, CLIP_SIDE if frames_of(train) else SIDE)
    view = EvalTransform(size, (0, 0, 0), (1, 1, 1), transform.resize, transform.size / transform.short)
    features = {}                                                          # {name: {part: as of `labelled`}}
    parts = {"train": train, "test": test} | ({"few": few} if few else {})
    for part, data in parts.items():
        most = MOST.get(part, len(data))
        if len(data) > most:
            say(f"{data.name} ({data.split}): trivial baselines on {most:,} of {len(data):,} images")
            data = data.select(np.sort(np.random.default_rng(42).permutation(len(data))[:most]))
        found = {k: labelled(model, data, transform, device, workers, projected) for k, model in models.items()}
        if getattr(data.clip, "has_pixels", True):
            index, pixels, rest, _ = encode_images(nn.Identity(), data, view, device, workers=workers,
                                                   rows=np.flatnonzero(data.labels >= 0), forward=pixels_and_colours)
            labels, colours, small = data.labels[index], rest[:, :64], rest[:, 64:]
            found = {"pixels": (pixels, small, labels), "colours": (colours, colours, labels)} | found
        for name, of in found.items():
            features.setdefault(name, {})[part] = of
    return {name: class_metrics(tasks, **of, limits=limits, device=device)[0] for name, of in features.items()}
