"""The losses of all methods, each of the same embeddings, for tests that hold for all of them."""

import functools
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
    features = unit(N, 5, seed=5)
    keys = unit(7, D, seed=6)
    tensors = [tau, anchor[rows], pair[rows], features[rows], keys]
    p = Parameters(*[x.to(dtype) for x in tensors])
    for x in (p.tau, p.anchor, p.pair):
        x.requires_grad_()
    return p


def of_pair(loss, name="tau"):
    """The entry of a loss (I, T, a field of Parameters) -> () or (B,)."""
    return lambda e, p: loss(e[0], e[1], getattr(p, name)).mean()


def of_views(**options):
    """The entry of TeMo's loss with these options."""
    return lambda e, p: temo.temo_loss(*e, 0.3, **options)


def moco(e, p):
    """I and I~, T and T~."""
    image = ts.moco_loss(e[0], e[2], p.keys, p.tau)
    text = ts.moco_loss(e[1], e[3], p.keys, p.tau)
    return image + text


def experts(e, p):
    return temo_experts.expert_loss(e[0], e[1], p.features, p.features[:, 1:])


def dystress(e, p):
    return temo.multimodal_loss(e[0], e[1], temo.dystress_temperature)


def mama_at_margin(e, p):
    return mama.angular_margin_loss(e[0], e[1], 0.5, p.tau).mean()


IN_BLOCKS = {  # e: I, T, I~, T~ (B, D) each, p: Parameters -> (), the mean over these rows
    "temo": lambda e, p: temo.temo_loss(*e, 0.3, p.tau),
    "temo, tau_min": lambda e, p: temo.temo_loss(*e, 0.3, tau_min=p.tau),
    "temo, detached": of_views(detach=True),
    "temo, bare cosine": of_views(shifted=False),
    "temo, experts": experts,
    "multimodal": of_pair(temo.multimodal_loss),
    "info_nce, (B,)": of_pair(temo.info_nce, "anchor"),
    "info_nce, (B, N)": of_pair(temo.info_nce, "pair"),
    "dystress": dystress,
    "cwcl": of_pair(temo.cwcl_loss),
    "slip": of_pair(slip.nt_xent),
    "ts": of_pair(ts.nt_xent),
    "ts, (B,)": of_pair(ts.nt_xent, "anchor"),
    "ncl": of_pair(ncl.ncl_loss),
    "ncl, gradient of biases": of_pair(functools.partial(ncl.ncl_loss, detach=False)),
    "mmts": of_pair(mmts.clip_loss, "anchor"),
    "mmts, max-margin": of_pair(mmts.max_margin_loss, "anchor"),
    "mama": of_pair(functools.partial(mama.angular_margin_loss, mu=0.2)),
    "mama, mu": mama_at_margin,
}
LOSSES = IN_BLOCKS | {"moco": moco, "hardest negative": of_pair(ncl.hardest_negative_loss)}
