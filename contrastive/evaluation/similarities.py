"""Cosines of positive and of negative pairs: what TeMo's Figs. 4 and 5 show."""

from contrastive.core.files import write_json
from contrastive.core.metrics import normalize
from contrastive.core.processes import rank

import numpy as np
import torch


def save_similarities(pieces, path):
    """Writes the similarity_histograms of each split that has texts: {data set: histograms}.

    Args: pieces: {data set: EvaluationPieces}.
    """
    if rank() == 0:
        histograms = {}
        for name, pieces_of_set in pieces.items():
            if pieces_of_set.owner is not None:  # it has texts
                histograms[name] = similarity_histograms(pieces_of_set)
        write_json(path, histograms)


def similarity_histograms(pieces):
    """Histograms of the cosines of positive and of negative pairs over -1..1.

    Of at most 2,000 images and their captions. The threshold of TeMo's Figs. 4 and 5 is where
    positives become denser than negatives. Densities of few pairs cross many times: it is the edge
    above which there are most positives in excess.

    Returns: {edges, positive, negative: lists, the last two densities; threshold: None if that
        excess is within chance}, which can be written as JSON.
    """
    image = normalize(pieces.image[:2000])                                 # (m, D)
    rows = np.flatnonzero(pieces.owner < len(image))                       # captions of these
    text = normalize(pieces.text)[rows]                                    # (c, D)
    sim = text @ image.T                                                   # (c, m)
    is_positive = torch.zeros(sim.shape, dtype=torch.bool)                 # (c, m)
    for row, caption in enumerate(rows):
        items = pieces.positives[caption]                                  # (P,)
        items = items[(items >= 0) & (items < len(image))]
        is_positive[row, items] = True
    edges = np.linspace(-1, 1, 101)
    num_positives = int(is_positive.sum())
    positive = density(sim[is_positive], edges)                            # (100,)
    negative = density(sim[~is_positive], edges)                           # (100,)
    width = edges[1] - edges[0]
    excess = np.cumsum((positive - negative)[::-1]) * width                # (100,) of the last bins
    threshold = None
    if excess.max() > 1.36 / max(1, num_positives) ** 0.5:  # Kolmogorov-Smirnov, 5 %
        threshold = edges[-2 - excess.argmax()].item()
    return {"edges": edges.tolist(), "positive": positive.tolist(), "negative": negative.tolist(),
            "threshold": threshold}


def density(values, edges):
    """The density of values (n,) in the bins over -1..1 with these edges: (bins,)."""
    counts = np.histogram(values.numpy(), edges)[0]
    return counts / max(1, len(values)) * len(counts) / 2
