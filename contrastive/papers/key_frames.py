"""The key frames of a video (MAMA, Sec. 3.3), which a language model captions."""

import torch


def key_frames(features, k=6, q=12):
    """Key frames of a video by density peaks (Eqs. 14 and 15), in the order of time.

        d_j = exp(-mean of |h_l - h_j|^2 over the k nearest other frames)                      (14)
        gamma_j = min of |h_l - h_j|^2 over the denser frames l; of the densest its largest    (15)

    Eq. 15 is printed with the condition under its min reversed and one distance without a square.
    Of two equally dense frames the earlier one counts as denser, so that a still shot has one peak.

    Args:
        features: (n, D) of the frames in the order of time, finite.
        k: neighbours; at most the n - 1 others count.
        q: number of key frames.
    Returns: (min(q, n),) long, the frames with the largest d * gamma.
    Raises: ValueError for another shape, values that are not finite, or k or q below 1.
    """
    x = torch.as_tensor(features).detach().double()                        # (n, D)
    if x.ndim != 2 or not x.isfinite().all() or min(k, q) < 1:
        raise ValueError(f"features {tuple(x.shape)}, k {k}, q {q}: expected finite (n, D), k and "
                         "q at least 1")
    n = len(x)
    if n <= q:
        return torch.arange(n)
    # without a matrix product, so that equal frames have distance 0 exactly
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()   # (n, n)
    neighbours = distance.clone().fill_diagonal_(torch.inf)                # (n, n)
    nearest = neighbours.sort(dim=1).values[:, :min(k, n - 1)]             # (n, k)
    # the logarithm, since d itself is 0 beyond a distance of 745
    log_d = -nearest.mean(dim=1)                                           # (n,)
    time = torch.arange(n, device=x.device)                                # (n,)
    tie = (log_d == log_d[:, None]) & (time < time[:, None])               # (n, n)
    denser = (log_d > log_d[:, None]) | tie                                # (n, n) l denser than j
    gamma = distance.masked_fill(~denser, torch.inf).amin(dim=1)           # (n,)
    gamma = torch.where(denser.any(dim=1), gamma, distance.amax(dim=1))    # (n,)
    peaks = (log_d + gamma.log()).sort(descending=True, stable=True).indices             # (n,)
    return peaks[:q].sort().values.cpu()
