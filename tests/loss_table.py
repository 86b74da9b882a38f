"""The losses of all methods, each of the same embeddings, for tests that hold for all of them."""

from typing import NamedTuple

import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import unit
from variants import slip, temo_experts

N, D = 16, 8


class Parameters(NamedTuple):
    """What a loss reads beside the embeddings of B rows of a global batch of N."""

    tau: torch.Tensor  # ()
    anchor: torch.Tensor  # (B,), a temperature of each
    pair: torch.Tensor  # (B, N), a temperature of each
    features: torch.Tensor  # (B, 5), of an expert
    keys: torch.Tensor  # (7, D), earlier ones


def parameters(rows=slice(0, N), dtype=torch.float64):
    """The Parameters of these rows; temperatures are learnt."""
    generator = torch.Generator().manual_seed(3)
    tau = torch.tensor(0.13)
    anchor = 0.05 + 0.2 * torch.rand(N, generator=generator)
    pair = 0.05 + 0.2 * torch.rand(N, N, generator=generator)
    taus = [x.to(dtype).requires_grad_() for x in (tau, anchor[rows], pair[rows])]
    features = unit(N, 5, seed=5)[rows].to(dtype)
    return Parameters(*taus, features, unit(7, D, seed=6).to(dtype))


def moco(e, p):
    """I and I~, T and T~."""
    image = ts.moco_loss(e[0], e[2], p.keys, p.tau)
    text = ts.moco_loss(e[1], e[3], p.keys, p.tau)
    return image + text


IN_BLOCKS = {  # e: I, T, I~, T~ (B, D) each, p: Parameters -> (), the mean over these rows
    "temo": lambda e, p: temo.temo_loss(*e, 0.3, p.tau),
    "temo, tau_min": lambda e, p: temo.temo_loss(*e, 0.3, tau_min=p.tau),
    "temo, detached": lambda e, p: temo.temo_loss(*e, 0.3, detach=True),
    "temo, bare cosine": lambda e, p: temo.temo_loss(*e, 0.3, shifted=False),
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
    "mmts": lambda e, p: mmts.clip_loss(*e[:2], p.anchor),
    "mmts, max-margin": lambda e, p: mmts.max_margin_loss(*e[:2], 4 * p.anchor),
    "mama": lambda e, p: mama.angular_margin_loss(*e[:2], p.tau, 0.2).mean(),
    "mama, mu": lambda e, p: mama.angular_margin_loss(*e[:2], 0.5, p.tau).mean(),
}
LOSSES = IN_BLOCKS | {
    "moco": moco,
    "hardest negative": lambda e, p: ncl.hardest_negative_loss(e[1], e[0], p.tau),
}
