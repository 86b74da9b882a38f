"""The losses of all methods, each of the same embeddings, for tests that hold for all of them."""

from types import SimpleNamespace

import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import unit
from variants import slip, temo_experts

N, D = 16, 8


def parameters(rows=slice(0, N), dtype=torch.float64):
    """What a loss reads beside the embeddings of these rows of a global batch of N.

    A learnt tau (), and one of each anchor (B,) and pair (B, N); an expert's features (B, 5);
    earlier keys (7, D).
    """
    generator = torch.Generator().manual_seed(3)
    anchor, pair = (0.05 + 0.2 * torch.rand(shape, generator=generator) for shape in ((N,), (N, N)))
    taus = {"tau": torch.tensor(0.13), "anchor": anchor[rows], "pair": pair[rows]}
    taus = {name: x.to(dtype).requires_grad_() for name, x in taus.items()}
    features = unit(N, 5, seed=5)[rows].to(dtype)
    keys = unit(7, D, seed=6).to(dtype)
    return SimpleNamespace(**taus, features=features, keys=keys)


LOSSES = {  # e: I, T, I~, T~ (B, D) each, p: parameters -> (), the mean over these rows
    "temo": lambda e, p: temo.temo_loss(*e, 0.3, p.tau),
    "temo, detached": lambda e, p: temo.temo_loss(*e, 0.3, detach=True),
    "temo, bare cosine": lambda e, p: temo.temo_loss(*e, 0.3, shifted=False),
    "temo, plain": lambda e, p: temo.temo_loss(*e, 0.3, unimodal="plain"),
    "temo, I~ and T~ apart": lambda e, p: temo.temo_loss(*e[:2], *(x.detach() for x in e[2:]), 0.3),
    "temo, experts": lambda e, p: temo_experts.expert_loss(*e[:2], p.features, p.features[:, 1:]),
    "multimodal": lambda e, p: temo.multimodal_loss(*e[:2], p.tau),
    "info_nce, (B,)": lambda e, p: temo.info_nce(*e[:2], p.anchor),
    "info_nce, (B, N)": lambda e, p: temo.info_nce(*e[:2], p.pair),
    "dystress": lambda e, p: temo.multimodal_loss(*e[:2], temo.dystress_temperature),
    "cwcl": lambda e, p: temo.cwcl_loss(*e[:2], p.tau),
    "slip": lambda e, p: slip.nt_xent(*e[:2], p.tau),
    "ts": lambda e, p: ts.nt_xent(*e[:2], p.tau),
    "ts, (B,)": lambda e, p: ts.nt_xent(*e[:2], p.anchor),
    "ncl": lambda e, p: ncl.ncl_loss(e[1], e[0], p.tau),
    "ncl, gradient of biases": lambda e, p: ncl.ncl_loss(e[1], e[0], p.tau, detach=False),
    "ncl, no biases": lambda e, p: ncl.ncl_loss(e[1], e[0], p.tau, 0),
    "mmts": lambda e, p: mmts.clip_loss(*e[:2], p.anchor),
    "mmts, smoothed": lambda e, p: mmts.clip_loss(*e[:2], p.tau, 0.1),
    "mmts, max-margin": lambda e, p: mmts.max_margin_loss(*e[:2], 4 * p.anchor),
    "mama": lambda e, p: mama.angular_margin_loss(*e[:2], p.tau, 0.2).mean(),
}
IN_BLOCKS = [*LOSSES]
LOSSES |= {  # those without blocks of rows
    "moco": lambda e, p: sum(
        ts.moco_loss(*pair, p.keys, p.tau) for pair in (e[::2], e[1::2])
    ),  # I and I~, T and T~
    "hardest negative": lambda e, p: ncl.hardest_negative_loss(e[1], e[0]),
}
