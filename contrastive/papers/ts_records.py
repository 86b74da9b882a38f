"""What a run of TS leaves for its log and figures: how its embeddings cover the sphere."""

from contrastive.core.metrics import normalize

import torch


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
