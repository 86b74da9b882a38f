"""Every loss in one table: in blocks of rows, in half precision, by each anchor's temperature; what a temperature may
be, and how much memory blocks take. test_distributed.py has its gradient on several processes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive.engine.processes import gather

import pytest
import torch
import torch.nn.functional as F

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import unit

ROOT = Path(__file__).resolve().parents[1]
N, D = 16, 8


def parameters(rows=slice(0, N), dtype=torch.float64, device="cpu", block=0):
    """What a loss reads beside the embeddings of these rows of a global batch of N: a learnt tau, () and one of each
    anchor (B,) and pair (B, N), an expert's features (B, 5), earlier keys (7, D)."""
    generator = torch.Generator().manual_seed(3)
    anchor, pair = (0.05 + 0.2 * torch.rand(shape, generator=generator) for shape in ((N,), (N, N)))
    taus = {"tau": torch.tensor(0.13), "anchor": anchor[rows], "pair": pair[rows]}
    taus = {name: x.to(device, dtype).requires_grad_() for name, x in taus.items()}
    features, keys = unit(N, 5, seed=5)[rows].to(device, dtype), unit(7, D, seed=6).to(device, dtype)
    return SimpleNamespace(**taus, features=features, keys=keys, block=block)


def coarse(like):
    """(B,) temperatures of TS's coarse supervision: the classes are the places in the batch of this process."""
    labels = torch.arange(len(like), device=like.device) % 2
    return ts.coarse_temperature(labels, {0}, 1.0, 0.1)


LOSSES = {  # e: I, T, I~, T~ (B, D) each, p: parameters -> (), the mean over these rows
    "temo": lambda e, p: temo.temo_loss(*e, 0.3, p.tau, block=p.block),
    "temo, detached": lambda e, p: temo.temo_loss(*e, 0.3, detach=True, block=p.block),
    "temo, bare cosine": lambda e, p: temo.temo_loss(*e, 0.3, similarity="cosine", block=p.block),
    "temo, plain": lambda e, p: temo.temo_loss(*e, 0.3, unimodal="plain", block=p.block),
    "temo, I~ and T~ apart": lambda e, p: temo.temo_loss(*e[:2], *(x.detach() for x in e[2:]), 0.3, block=p.block),
    "temo, experts": lambda e, p: sum(temo.expert_terms(
        {"image": e[0], "text": e[1]}, {"image": p.features, "text": p.features[:, 1:]}, block=p.block).values()),
    "multimodal": lambda e, p: temo.multimodal_loss(*e[:2], p.tau, p.block),
    "info_nce, (B,)": lambda e, p: temo.info_nce(*e[:2], p.anchor, p.block),
    "info_nce, (B, N)": lambda e, p: temo.info_nce(*e[:2], p.pair, p.block),
    "dystress": lambda e, p: temo.multimodal_loss(*e[:2], temo.dystress_temperature, p.block),
    "cwcl": lambda e, p: temo.cwcl_loss(*e[:2], p.tau, p.block),
    "slip": lambda e, p: temo.simclr_loss(*e[:2], p.tau, p.block),
    "ts": lambda e, p: ts.nt_xent(*e[:2], p.tau, p.block),
    "ts, (B,)": lambda e, p: ts.nt_xent(*e[:2], p.anchor, p.block),
    "ncl": lambda e, p: ncl.ncl_loss(e[1], e[0], p.tau, block=p.block),
    "ncl, gradient of biases": lambda e, p: ncl.ncl_loss(e[1], e[0], p.tau, detach=False, block=p.block),
    "ncl, no biases": lambda e, p: ncl.ncl_loss(e[1], e[0], p.tau, 0, block=p.block),
    "mmts": lambda e, p: mmts.clip_loss(*e[:2], p.anchor, block=p.block),
    "mmts, smoothed": lambda e, p: mmts.clip_loss(*e[:2], p.tau, 0.1, block=p.block),
    "mmts, max-margin": lambda e, p: mmts.max_margin_loss(*e[:2], 4 * p.anchor, block=p.block),
    "mama": lambda e, p: mama.angular_margin_loss(*e[:2], p.tau, 0.2, p.block).mean()}
IN_BLOCKS = [*LOSSES]
LOSSES |= {  # those without blocks of rows
    "ts, coarse": lambda e, p: ts.nt_xent(*e[:2], coarse(e[0])),
    "moco": lambda e, p: sum(ts.moco_loss(*pair, p.keys, p.tau) for pair in (e[::2], e[1::2])),  # I and I~, T and T~
    "hardest negative": lambda e, p: ncl.max_margin_loss(e[1], e[0]),
    "mama, fused": lambda e, p: mama.fused_margin_loss(
        e[0] @ gather(e[1]).T, e[1] @ gather(e[0]).T, p.tau, p.anchor).mean()}


# ----------------------------------------------- gradients and blocks -----------------------------------------------
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("temo, detached", "ncl", "cwcl")])
def test_the_gradient_is_the_slope(name, h=1e-6):
    """Along one way for I, T and tau, by differences; I~, T~ and MoCo's keys stay. (The three are detached in part.)"""
    p, e = parameters(), [unit(N, D, seed=k).requires_grad_() for k in range(4)]
    ways = [unit(N, D, seed=7), unit(N, D, seed=8), torch.tensor(0.1, dtype=torch.float64)]

    def moved(by):
        there = SimpleNamespace(**vars(p) | {"tau": p.tau + by * ways[2]})
        return LOSSES[name]([e[0] + by * ways[0], e[1] + by * ways[1], *e[2:]], there).item()
    gradients = torch.autograd.grad(LOSSES[name](e, p), [*e[:2], p.tau], allow_unused=True, materialize_grads=True)
    slope = sum((g * way).sum() for g, way in zip(gradients, ways)).item()
    assert slope == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=1e-5) and abs(slope) > 1e-4


def value_and_gradients(name, block):
    p, e = parameters(block=block), [unit(N, D, seed=k).requires_grad_() for k in range(4)]
    loss, leaves = LOSSES[name](e, p), [*e, p.tau, p.anchor, p.pair]
    return loss, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_equal_the_whole_matrix(name):
    whole = value_and_gradients(name, 10**9)
    for block in (1, 5, N - 1):
        for ours, literal in zip(value_and_gradients(name, block), whole, strict=True):
            torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["temo", "slip", "ts"])
def test_a_large_batch_is_cut_by_itself(name, monkeypatch):
    """At 4,096 pairs the whole matrices would be over 1 GiB; no block is asked for."""
    seen = []
    monkeypatch.setattr(common, "checkpoint", lambda f, x, *more, **_: seen.append(len(x)) or f(x, *more))
    LOSSES[name]([unit(4096, 2, seed=k).float() for k in range(4)], parameters(dtype=torch.float32))
    assert seen and max(seen) < 200


PEAK = """
import torch, temo
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024  # MiB
def peak(n, block):
    e = [torch.randn(n, 64).requires_grad_() for _ in range(4)]
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
    before = status("VmRSS")
    temo.temo_loss(*e, 0.3, block=block).backward()
    return status("VmHWM") - before
peak(256, 128)  # libraries and thread pools come in
print(*(peak(n, block) for block in (128, 10**9) for n in (1024, 2048)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_of_blocks_is_linear():
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    small, large, small_whole, large_whole = map(float, done.stdout.split())                # MiB
    assert large / small <= 2.5 and large_whole / small_whole > 3 and large < 0.2 * large_whole


# ----------------------------------------------- half precision -----------------------------------------------------
@pytest.mark.parametrize("name", [*(name for name in LOSSES if "fused" not in name), "answers"])
def test_a_loss_is_fp32_under_bf16_autocast(name):
    """And of embeddings in 16 bits."""
    p = parameters(dtype=torch.float32)
    loss = LOSSES.get(name, lambda e, p: mama.answer_loss(e[0], torch.arange(N) % D).mean())
    e = [unit(N, D, seed=s).float() for s in range(4)]
    expected, rounded = loss(e, p), loss([x.bfloat16().float() for x in e], p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, of_16_bits = loss(e, p), loss([x.bfloat16() for x in e], p)
    assert inside.dtype == of_16_bits.dtype == torch.float32
    assert torch.equal(inside, expected) and torch.equal(of_16_bits, rounded)


# ----------------------------------------------- what tau, gamma and margins may be ---------------------------------
B = 6
X, Y, Z, W = (unit(B, 5, seed=s) for s in range(4))                        # (B, D) each
# every public loss as a function of its temperature or margin -> a number or (B,)
TAU = {"info_nce": lambda t: temo.info_nce(X, Y, t), "multimodal": lambda t: temo.multimodal_loss(X, Y, t),
       "temo": lambda t: temo.temo_loss(X, Y, Z, W, 0.5, tau=t), "cwcl": lambda t: temo.cwcl_loss(X, Y, t),
       "simclr": lambda t: temo.simclr_loss(X, Y, t), "nt_xent": lambda t: ts.nt_xent(X, Y, t),
       "moco": lambda t: ts.moco_loss(X, Y, Z, t), "clip": lambda t: mmts.clip_loss(X, Y, t),
       "mama": lambda t: mama.angular_margin_loss(X, Y, t, 0.2),
       "mama fused": lambda t: mama.fused_margin_loss(X @ Y.T, Y @ X.T, t, 0.2)}
ONE = {"ncl": lambda t: ncl.ncl_loss(X, Y, t), "infonce of ncl": lambda t: ncl.ncl_loss(X, Y, t, 0),
       "sinkhorn": lambda t: ncl.sinkhorn_biases(X @ Y.T, t)[0],
       "tau_min": lambda t: temo.modulated_loss(X, Y, t, 0.1)}
MARGIN = {"max-margin": lambda m: mmts.max_margin_loss(X, Y, m), "hardest": lambda m: ncl.max_margin_loss(X, Y, m),
          "mu": lambda m: mama.angular_margin_loss(X, Y, 0.5, m),
          "mu fused": lambda m: mama.fused_margin_loss(X @ Y.T, Y @ X.T, 0.5, m)}
FIRST = torch.tensor([True, False, False, True, False, False])


@pytest.mark.parametrize("name", [*TAU, *MARGIN])
def test_a_temperature_or_margin_belongs_to_its_anchor(name):
    """Anchors of two temperatures, and the two exchanged: together what the two give alone."""
    loss, low, high = (TAU | MARGIN)[name], 0.1, 0.7
    mixed, other = (loss(torch.where(some, low, high)).mean() for some in (FIRST, ~FIRST))
    one, two = loss(low).mean(), loss(high).mean()
    torch.testing.assert_close(mixed + other, one + two)
    assert abs(mixed - (one + two) / 2) > 1e-4
    torch.testing.assert_close(loss(torch.tensor(low, dtype=torch.float64)).mean(), one)


@pytest.mark.parametrize("name", ["mama", "mama fused", "mu", "mu fused"])
def test_each_pair_has_its_own(name):
    loss, values = (TAU | MARGIN)[name], torch.linspace(0.1, 0.8, B, dtype=torch.float64)
    torch.testing.assert_close(loss(values), torch.stack([loss(v.item())[i] for i, v in enumerate(values)]))


@pytest.mark.parametrize("name", [*TAU, *ONE, *MARGIN])
def test_another_shape_or_number_is_refused_in_one_line(name):
    loss = (TAU | ONE | MARGIN)[name]
    for shape in [(1,), (B - 1,), (B, 1), (B, B + 1)] + [(B,)] * (name in ONE):
        with pytest.raises(ValueError, match=r"^.*\(\d.*give a number.*$"):
            loss(torch.full(shape, 0.5))
    for value in () if name in MARGIN else (0, -0.01, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            loss(value)


def test_both_directions_have_no_temperature_per_pair():
    """Its rows are the anchors of one of them."""
    with pytest.raises(ValueError, match="give a number"):
        temo.multimodal_loss(X, Y, torch.full((B, B), 0.5))


def test_a_list_is_no_temperature():
    with pytest.raises(ValueError, match="or a tensor"):
        temo.info_nce(X, Y, [0.5] * B)


def test_info_nce_of_pairs_is_cross_entropy():
    p = parameters()
    a, b = (F.normalize(unit(N, D, seed=s), dim=1) for s in (0, 1))
    literal = F.cross_entropy(a @ b.T / p.pair, torch.arange(N))
    torch.testing.assert_close(temo.info_nce(3 * a, b, p.pair, 4), literal)
