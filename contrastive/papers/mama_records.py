"""What a run of MAMA leaves for its log and figures: weights of pairs, and training texts."""

import random

from contrastive.core.files import write_json, write_tensors
from contrastive.core.processes import gather, rank

import torch


@torch.no_grad()
def weighted_pairs(sample_loss, weight, data, rows):
    """(N, 3) of the global batch: loss, weight, and 1 if the caption is known to be another clip's.

    Args:
        sample_loss, weight: (B,) of this process.
        rows: (B,) rows of data.
    """
    mismatched = torch.zeros_like(sample_loss)                             # (B,)
    noisy = data.column("noisy")                                           # (M,) bool, or None
    if noisy is not None:
        mismatched = torch.as_tensor(noisy[rows]).to(sample_loss)          # (B,)
    return gather(torch.stack([sample_loss, weight, mismatched], dim=1)).cpu()


def record_pairs(run, sample_loss, weight, rows):
    """Records the pairs of a step, before `end_step`. Collective.

    Of the first step and of each quarter of the run they are written to pairs_STEP.safetensors.

    Args: sample_loss, weight, rows: as in weighted_pairs, of the training data of the run.
    Returns: columns of the log, as mismatch_columns has them; {} in a step that is not logged.
    """
    step = run.step + 1
    pictured_steps = [max(1, round(k * run.steps.total / 4)) for k in range(5)]
    columns = {}
    if step in pictured_steps or run.logs_next():
        pairs = weighted_pairs(sample_loss, weight, run.train, rows)       # (N, 3)
        if run.logs_next():
            columns = mismatch_columns(pairs)
        if step in pictured_steps and rank() == 0:
            write_tensors(run.folder / f"pairs_{step}.safetensors", {"pairs": pairs})
    return columns


def mismatch_columns(pairs):
    """{name: number}: mean loss and weight of matched and of mismatched pairs (N, 3); {} if no pair
    is known to be mismatched."""
    sample_loss, weight, mismatched = pairs.unbind(1)                      # (N,) each
    columns = {}
    if mismatched.any():
        for name, value in (("matched", 0), ("mismatched", 1)):
            chosen = mismatched == value                                   # (N,) bool
            if chosen.any():
                columns[f"L_{name}"] = sample_loss[chosen].mean().item()
                columns[f"w_{name}"] = weight[chosen].mean().item()
    return columns


def save_training_texts(run, train, column):
    """Writes texts of the training set to training_texts.json, in which the figures count concepts:
    at most 200,000, drawn by a fixed seed.

    Args: column: 'captions', of which those of a clip are joined; 'question' or 'answer'.
    """
    if rank() > 0:
        return
    clips = (train.before_extra_pairs or train).folded()
    texts = list(clips.values_of_column(column))
    if column == "captions":
        texts = [" ".join(captions) for captions in texts]
    if len(texts) > 200_000:
        texts = random.Random(0).sample(texts, 200_000)
    write_json(run.folder / "training_texts.json", {"texts": texts})
