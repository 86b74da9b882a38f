"""Row blocks: the literal loss to rounding, and memory linear in the batch where the literal form's is quadratic."""

import os
import subprocess
import sys
from pathlib import Path

import common

import pytest
import torch
import torch.nn.functional as F

import ncl
import temo
import temperature_schedules as ts

ROOT = Path(__file__).resolve().parents[1]
N, D, WHOLE = 23, 6, 10**9  # a block of at least N rows is the literal form


def leaf(*shape, seed, low=None):
    """A float64 leaf: normal, or uniform in low..low + 0.2 for temperatures."""
    generator = torch.Generator().manual_seed(seed)
    how = dict(generator=generator, dtype=torch.float64)
    x = torch.randn(shape, **how) if low is None else low + 0.2 * torch.rand(shape, **how)
    return x.requires_grad_()


E = [leaf(N, D, seed=k) for k in range(4)]  # I, T, I~, T~
SCALAR, PER_ANCHOR, PER_PAIR = leaf(seed=5, low=0.05), leaf(N, seed=6, low=0.05), leaf(N, N, seed=7, low=0.05)


def modulated(sim):
    return SCALAR * temo.modulated_temperature(sim)


LOSSES = {
    "info_nce, float": lambda block: temo.info_nce(*E[:2], 0.1, block),
    "info_nce, learnable": lambda block: temo.info_nce(*E[:2], SCALAR, block),
    "info_nce, (B,)": lambda block: temo.info_nce(*E[:2], PER_ANCHOR, block),
    "info_nce, (B, N)": lambda block: temo.info_nce(*E[:2], PER_PAIR, block),
    "info_nce, function": lambda block: temo.info_nce(*E[:2], modulated, block),
    "temo": lambda block: temo.temo_loss(*E, 0.3, block=block),
    "temo, no gradient through tau": lambda block: temo.temo_loss(*E, 0.3, SCALAR, detach=True, block=block),
    "temo, plain": lambda block: temo.temo_loss(*E, 0.3, unimodal="plain", block=block),
    "temo, experts": lambda block: sum(temo.expert_terms({"image": E[0], "text": E[1]}, {"image": E[2].detach()},
                                                          block=block).values()),
    "cwcl": lambda block: temo.cwcl_loss(*E[:2], SCALAR, block),
    "ncl": lambda block: ncl.ncl_loss(*E[:2], SCALAR, block=block),
    "ncl, gradient through the biases": lambda block: ncl.ncl_loss(*E[:2], SCALAR, detach=False, block=block),
    "slip": lambda block: temo.simclr_loss(*E[:2], 0.1, block),
    "nt_xent": lambda block: ts.nt_xent(*E[:2], SCALAR, block),
    "nt_xent, (B,)": lambda block: ts.nt_xent(*E[:2], PER_ANCHOR, block),
}


def value_and_gradients(loss):
    leaves = [*E, SCALAR, PER_ANCHOR, PER_PAIR]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads))]


@pytest.mark.parametrize("block", [1, 5, N - 1])
@pytest.mark.parametrize("name", LOSSES)
def test_blocks_equal_the_literal_loss(name, block):
    in_blocks, whole = value_and_gradients(LOSSES[name](block)), value_and_gradients(LOSSES[name](WHOLE))
    for ours, literal in zip(in_blocks, whole, strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-9)


def test_literal_info_nce_is_cross_entropy():
    sim = F.normalize(E[0], dim=1) @ F.normalize(E[1], dim=1).T
    literal = value_and_gradients(F.cross_entropy(sim / PER_PAIR, torch.arange(N)))
    for ours, expected in zip(value_and_gradients(temo.info_nce(*E[:2], PER_PAIR, 4)), literal, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


PEAK = """
import torch, temo, temperature_schedules
torch.set_num_threads(1)

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024  # MiB

def peak(which, n, block):
    e = [torch.randn(n, 64).requires_grad_() for _ in range(4)]
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
    before = status("VmRSS")
    losses = {"temo": lambda: temo.temo_loss(*e, 0.3, block=block), "cwcl": lambda: temo.cwcl_loss(*e[:2], 0.05, block),
              "nt_xent": lambda: temperature_schedules.nt_xent(*e[:2], 0.1, block)}
    losses[which]().backward()
    return status("VmHWM") - before

for which in ("temo", "cwcl", "nt_xent"):
    peak(which, 256, 128)  # libraries and thread pools come in
    print(*(peak(which, n, block) for block in (128, 10**9) for n in (1024, 2048)))
"""


@pytest.fixture(scope="module")
def peaks():
    """{loss: [MiB of blocks at 1024 and 2048 pairs, of the literal form]}"""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [[float(x) for x in line.split()] for line in done.stdout.splitlines()]
    return dict(zip(["temo", "cwcl", "nt_xent"], lines, strict=True))


@pytest.mark.parametrize("loss", [lambda e: temo.temo_loss(*e, 0.3), lambda e: temo.simclr_loss(*e[:2], 0.1),
                                  lambda e: ts.nt_xent(*e[:2], 0.1)], ids=["temo", "slip", "nt_xent"])
def test_a_large_batch_is_cut_by_itself(loss, monkeypatch):
    """At 4,096 pairs the whole matrices would be over 1 GiB; no block is asked for."""
    seen = []
    monkeypatch.setattr(common, "checkpoint", lambda f, x, *more, **_: seen.append(len(x)) or f(x, *more))
    loss([torch.randn(4096, 2, generator=torch.Generator().manual_seed(k)) for k in range(4)])  # no graph is kept
    assert seen and max(seen) < 200


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("loss", ["temo", "cwcl", "nt_xent"])
def test_memory_of_blocks_is_linear(peaks, loss):
    blocks, literal = peaks[loss][:2], peaks[loss][2:]
    print(f"{loss}: peak MiB at 1024 and 2048: blocks {blocks}, literal {literal}")
    assert blocks[1] / blocks[0] <= 2.5
    assert literal[1] / literal[0] > 3
    assert blocks[1] < 0.2 * literal[1]
