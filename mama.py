"""The key frames of MAMA (Eqs. 14-15)."""

import torch


def key_frames(features, k=6, q=12):
    """Key frames of a video by density peaks (Eqs. 14-15): frames with many like them, far from any frame with more.

        d_j = exp(-mean of |h_l - h_j|^2 over the k nearest other frames)                            (14)
        gamma_j = min of |h_l - h_j|^2 over the denser frames, d_l > d_j; the densest: its largest   (15)

    Eq. 15 as printed has the condition under its min the wrong way round and one distance without its square; this is
    the reading that its own case condition needs. Of two equally dense frames the earlier counts as denser, so that a
    still shot gives one peak and not as many as it has frames.

    Args:
        features: (n, D) of the frames in the order of time, finite.
        k: neighbours, at most the n - 1 others count.   q: frames wanted.
    Returns: (min(q, n),) long, the frames with the largest d * gamma, in the order of time.
    Raises: ValueError for another shape, values that are not finite, or k or q below 1.
    """
    x = torch.as_tensor(features).detach().double()                            # (n, D)
    if x.ndim != 2 or not x.isfinite().all() or min(k, q) < 1:
        raise ValueError(f"features {tuple(x.shape)}, k {k}, q {q}: expected finite (n, D), k and q at least 1")
    n = len(x)
    if n <= q:
        return torch.arange(n)
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()  # (n, n), 0 for equal frames
    others = distance.clone().fill_diagonal_(torch.inf)                        # (n, n)
    log_d = -others.sort(dim=1).values[:, :min(k, n - 1)].mean(dim=1)          # (n,); d itself is 0 beyond 745
    time = torch.arange(n, device=x.device)                                    # (n,)
    tie = (log_d == log_d[:, None]) & (time < time[:, None])                   # (n, n), l as dense as j and earlier
    denser = (log_d > log_d[:, None]) | tie                                    # (n, n), l denser than j
    gamma = distance.masked_fill(~denser, torch.inf).amin(dim=1)               # (n,)
    gamma = torch.where(denser.any(dim=1), gamma, distance.amax(dim=1))        # (n,)
    peaks = (log_d + gamma.log()).sort(descending=True, stable=True).indices   # (n,), by d * gamma
    return peaks[:q].sort().values.cpu()
