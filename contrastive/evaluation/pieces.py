"""What the evaluation of a split returns, for tables and pictures."""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch


@dataclasses.dataclass
class EvaluationPieces:
    """What pictures and a method's own metrics read of an evaluated split.

    M images or clips could be read; they have C captions. A field is None if no task has made it.
    """

    data: object = None                   # Data of the split
    index: np.ndarray | None = None       # (M,) rows of the data that could be read
    image: torch.Tensor | None = None     # (M, D) embeddings, on the CPU

    # ---- of retrieval, mir and gap ----
    text: torch.Tensor | None = None      # (C, D) embeddings, on the CPU
    texts: list | None = None             # C captions
    owner: np.ndarray | None = None       # (C,) row of each caption's image among the M
    positives: torch.Tensor | None = None           # (C, P) images of each caption, padded with -1
    positives_of_image: torch.Tensor | None = None  # (M, P) captions of each image, likewise
    device: torch.device | None = None    # where similarities are computed
    num_cut: int = 0                      # captions that lose their end
    num_repeated: int = 0                 # captions that images of several groups have
    biases: dict = dataclasses.field(default_factory=dict)  # NCL: {mode: ((M,), (C,))}
    recall_by_queue_size: dict | None = None  # NCL: {training queries: {direction: R@1}}

    # ---- of knn and probe ----
    per_class: dict | None = None         # {class: accuracy of the nearest neighbour, %}
    train_features: torch.Tensor | None = None      # (N, width) of N training images
    train_labels: np.ndarray | None = None          # (N,)
    features: torch.Tensor | None = None            # (L, width) of the L images that have a class
    labels: np.ndarray | None = None                # (L,)
    label_names: list | None = None

    # ---- of questions ----
    predicted: list | None = None         # M answers of the model
    hits: np.ndarray | None = None        # (M,) whether they are right


class Measurement(NamedTuple):
    """The evaluation of a split."""

    metrics: dict  # {name: number, or a dict of such}
    chance: dict  # the same names, where the chance level is known
    pieces: EvaluationPieces
