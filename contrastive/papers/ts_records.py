"""The book-keeping of TS: what is evaluated, the banner, and, for the log and the figures, how the
embeddings cover the sphere."""

import math

from contrastive.core.metrics import normalize
from contrastive.evaluation.by_class import padded_and_flipped

import torch


def val_and_test(splits):
    """{val: Data, test: Data} of all splits, as far as they exist."""
    return {name: splits[name] for name in ("val", "test") if name in splits}


def probe_images(train, args):
    """The training images from which kNN and probes learn (--train-features)."""
    if args.train_features == "augmented":
        return padded_and_flipped(train, args.seed)
    return train


def long_tail_banner(args, steps, last, sizes):
    """Lines of the banner of TS: {title: text}.

    Args:
        last: the last step.
        sizes: (classes,) numbers of training images.
    """
    num_candidates = 2 * args.batch_size - 1
    if args.loss == "moco":
        num_candidates = args.queue_size + 1
    guess = f"ln {num_candidates} = {math.log(num_candidates):.3f}"
    lines = {
        "classes": f"{len(sizes)}, {sizes.max()} to {sizes[sizes > 0].min()} images",
        "candidates": f"{num_candidates:,} of each anchor; L_c of a random guess: {guess}"}
    if last < steps.total:
        lines["end"] = f"at step {last:,}, epoch {last / steps.per_epoch:g}"
    return lines


@torch.no_grad()
def add_val_columns(row, pieces, head):
    """Adds columns to a row of the log that has an evaluation on val.

    coverage, sphere and cosines say how z of the training images covers the sphere (Figs. 1, 2b);
    val_mean is the mean of kNN@1, kNN@10 and both probes, each a mean over the classes.

    Args:
        pieces: {data set: EvaluationPieces}.
        head: projection head, features -> z.
    """
    for name, pieces_of_set in pieces.items():
        z = project(head, pieces_of_set.train_features)                    # (M, D)
        row["coverage"], row["sphere"] = coverage(z)
        row["cosines"] = cosine_counts(z)
        accuracies = []
        for metrics in row["eval"][name].values():
            if isinstance(metrics, dict):
                accuracies.append(metrics["mean_per_class"])
        if accuracies:  # there is a val split
            row["val_mean"] = sum(accuracies) / len(accuracies)


@torch.no_grad()
def project(head, features):
    """z (M, D) of features (M, width), on the head's device, with its running statistics."""
    head.eval()
    z = head(features.to(next(head.parameters()).device))                  # (M, D)
    head.train()
    return z


def coverage(z, bins=500):
    """How z (M, D) covers the sphere: each row goes to the nearest random direction (Fig. 1).

    Returns: the effective fraction of the directions, exp(entropy) / bins (ours); and the number of
        rows at each direction that has any, largest first.
    """
    generator = torch.Generator().manual_seed(0)
    directions = normalize(torch.randn(bins, z.shape[1], generator=generator))           # (bins, D)
    nearest = (normalize(z) @ directions.to(z).T).argmax(1)                # (M,)
    counts = nearest.bincount().sort(descending=True).values               # (up to bins,)
    entropy = torch.special.entr(counts / counts.sum()).sum()              # ()
    return entropy.exp().item() / bins, counts[counts > 0].tolist()


def cosine_counts(z, bins=100, limit=4000):
    """The number of pairs of rows of z (M, D) by their cosine, in bins over -1..1 (Fig. 2b).

    Of more than `limit` rows, that many are drawn.
    """
    rows = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:limit]
    z = normalize(z[rows.to(z.device)])                                    # (m, D)
    above_diagonal = torch.ones(len(z), len(z), dtype=torch.bool, device=z.device).triu(1)
    cosines = (z @ z.T)[above_diagonal].cpu()                              # (pairs,)
    return cosines.clamp(-1, 1).histc(bins, -1, 1).int().tolist()
