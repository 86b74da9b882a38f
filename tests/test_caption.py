"""Key frames, and captions of a vision-language model: real mp4 files, tiny models built from their configs."""

import math

import pytest
import torch

import mama


# ---------------------------------------------------- key frames -----------------------------------------------------
def peaks_by_loop(features, k, q):
    """Eqs. 14-15 word by word; no two frames may be equally dense."""
    n = len(features)
    squared = [[sum((a - b) ** 2 for a, b in zip(x, y)) for y in features] for x in features]
    d = [math.exp(-sum(sorted(squared[j][l] for l in range(n) if l != j)[:k]) / k) for j in range(n)]
    gamma = []
    for j in range(n):
        denser = [squared[j][l] for l in range(n) if d[l] > d[j]]
        gamma.append(min(denser) if denser else max(squared[j]))
    return sorted(sorted(range(n), key=lambda j: -d[j] * gamma[j])[:q])


@pytest.mark.parametrize("n, k, q", [(30, 6, 12), (30, 3, 5), (13, 6, 12), (9, 2, 1), (60, 6, 4)])
def test_key_frames_are_the_equations_on_random_features(n, k, q):
    for seed in range(10):
        x = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)) / 3
        found = mama.key_frames(x, k, q)
        assert found.tolist() == peaks_by_loop(x.double().tolist(), k, q) and found.dtype == torch.long


def test_each_of_separated_clusters_gives_one_key_frame():
    generator = torch.Generator().manual_seed(1)
    centres = 3 * torch.eye(4)  # shots of 8 to 11 frames, far from each other
    shots = [c + 0.05 * torch.randn(8 + i, 4, generator=generator) for i, c in enumerate(centres)]
    found = mama.key_frames(torch.cat(shots), k=6, q=4).tolist()
    starts = [0, 8, 17, 27, 38]
    assert [sum(a <= f < b for f in found) for a, b in zip(starts, starts[1:])] == [1, 1, 1, 1]
    assert found == sorted(found) == peaks_by_loop(torch.cat(shots).double().tolist(), 6, 4)


def test_key_frames_far_apart_do_not_underflow():
    """exp(-d) of features 100 times as large is 0 in any float: the order is that of the logarithms."""
    x = 100 * torch.randn(20, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    n, squared = len(x), torch.cdist(x, x).square()
    log_d = [-squared[j].sort().values[1:4].mean() for j in range(n)]
    gamma = [min((squared[j, l] for l in range(n) if log_d[l] > log_d[j]), default=squared[j].max()) for j in range(n)]
    wanted = sorted(sorted(range(n), key=lambda j: -(log_d[j] + gamma[j].log()))[:5])
    assert mama.key_frames(x, 3, 5).tolist() == wanted != list(range(5))


def test_a_still_shot_is_one_key_frame_not_all_of_them():
    still, moving = torch.zeros(20, 3), torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
    found = mama.key_frames(torch.cat([still, moving]), q=6).tolist()
    assert found[0] == 0 and len(found) == 6 and all(f >= 20 for f in found[1:])


def test_few_frames_equal_frames_and_what_is_refused():
    assert mama.key_frames(torch.zeros(5, 2), q=12).tolist() == [0, 1, 2, 3, 4]
    assert mama.key_frames(torch.zeros(1, 2), q=1).tolist() == [0]
    assert mama.key_frames(torch.zeros(30, 2), q=4).tolist() == [0, 1, 2, 3]         # equal: the first
    assert mama.key_frames([[0.0], [1.0], [5.0]], k=6, q=2).tolist() == [0, 1]       # k is capped, lists will do
    for bad in (torch.zeros(3), torch.full((3, 2), math.nan)):
        with pytest.raises(ValueError, match="finite"):
            mama.key_frames(bad, q=1)
    with pytest.raises(ValueError, match="at least 1"):
        mama.key_frames(torch.zeros(3, 2), k=0)
