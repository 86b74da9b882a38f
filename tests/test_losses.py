"""What holds for all losses alike, in one table: gradient, blocks of rows, half precision, ends,
and what a temperature may be. test_distributed.py has the gradient on several processes."""

from types import SimpleNamespace

from contrastive.core import row_blocks

import pytest
import torch

import common
import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import unit
from loss_table import IN_BLOCKS, LOSSES, D, N, parameters
from variants import mama_qa, slip

# ----------------------------------------------- gradients and blocks -----------------------------
@pytest.mark.parametrize(
    "name", [name for name in LOSSES if name not in ("temo, detached", "ncl", "cwcl")]
)
def test_the_gradient_is_the_slope(name, h=1e-6):
    """Along one way for I, T and tau, by differences; I~, T~ and MoCo's keys stay. (The three are
    detached in part.)"""
    p, e = parameters(), [unit(N, D, seed=k).requires_grad_() for k in range(4)]
    ways = [unit(N, D, seed=7), unit(N, D, seed=8), torch.tensor(0.1, dtype=torch.float64)]

    def moved(by):
        there = SimpleNamespace(**vars(p) | {"tau": p.tau + by * ways[2]})
        return LOSSES[name]([e[0] + by * ways[0], e[1] + by * ways[1], *e[2:]], there).item()

    gradients = torch.autograd.grad(
        LOSSES[name](e, p), [*e[:2], p.tau], allow_unused=True, materialize_grads=True
    )
    slope = sum((g * way).sum() for g, way in zip(gradients, ways)).item()
    assert slope == pytest.approx((moved(h) - moved(-h)) / (2 * h), rel=1e-5) and abs(slope) > 1e-4


def value_and_gradients(name):
    p, e = parameters(), [unit(N, D, seed=k).requires_grad_() for k in range(4)]
    loss, leaves = LOSSES[name](e, p), [*e, p.tau, p.anchor, p.pair]
    return loss, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_equal_the_whole_matrix(name, monkeypatch):
    whole = value_and_gradients(name)
    for block in (1, 5, N - 1):
        monkeypatch.setattr(row_blocks, "rows_at_a_time", block)
        for ours, literal in zip(value_and_gradients(name), whole, strict=True):
            torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-9)


def test_a_large_batch_is_cut_by_itself(monkeypatch):
    """At 4,096 pairs the whole matrices would be over 1 GiB; no block is asked for."""
    seen = []
    monkeypatch.setattr(
        row_blocks, "checkpoint", lambda f, x, *more, **_: seen.append(len(x)) or f(x, *more)
    )
    LOSSES["temo"](
        [unit(4096, 2, seed=k).float() for k in range(4)], parameters(dtype=torch.float32)
    )
    assert seen and max(seen) < 200


# ----------------------------------------------- half precision, extremes -------------------------
@pytest.mark.parametrize("name", [*(name for name in LOSSES if "fused" not in name), "answers"])
def test_a_loss_is_fp32_under_bf16_autocast(name):
    """And of embeddings in 16 bits."""
    p = parameters(dtype=torch.float32)
    loss = LOSSES.get(name, lambda e, p: mama_qa.answer_loss(e[0], torch.arange(N) % D).mean())
    e = [unit(N, D, seed=s).float() for s in range(4)]
    expected, rounded = loss(e, p), loss([x.bfloat16().float() for x in e], p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, of_16_bits = loss(e, p), loss([x.bfloat16() for x in e], p)
    assert inside.dtype == of_16_bits.dtype == torch.float32
    assert torch.equal(inside, expected) and torch.equal(of_16_bits, rounded)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_finite_at_the_ends(name):
    """Equal, opposite and mixed embeddings at a temperature of 0.01, whose exp would overflow in
    fp32."""
    p, same = parameters(dtype=torch.float32), torch.ones(N, D)
    for tau in (p.tau, p.anchor, p.pair):
        tau.data.fill_(0.01)
    for sign in (torch.ones(N, 1), -torch.ones(N, 1), torch.arange(N)[:, None] % 2 * 2.0 - 1):
        e = [x.clone().requires_grad_() for x in (same, sign * same, sign * same, same)]
        loss = LOSSES[name](e, p)
        gradients = torch.autograd.grad(
            loss, [*e, p.tau], allow_unused=True, materialize_grads=True
        )
        assert all(x.isfinite().all() for x in (loss, *gradients))


# ----------------------------------------------- what tau, gamma and margins may be ---------------
B = 6
X, Y, Z, W = (unit(B, 5, seed=s) for s in range(4))  # (B, D) each
# every public loss as a function of its temperature or margin -> a number or (B,)
TAU = {
    "info_nce": lambda t: temo.info_nce(X, Y, t),
    "multimodal": lambda t: temo.multimodal_loss(X, Y, t),
    "temo": lambda t: temo.temo_loss(X, Y, Z, W, 0.5, tau=t),
    "cwcl": lambda t: temo.cwcl_loss(X, Y, t),
    "simclr": lambda t: slip.nt_xent(X, Y, t),
    "nt_xent": lambda t: ts.nt_xent(X, Y, t),
    "moco": lambda t: ts.moco_loss(X, Y, Z, t),
    "clip": lambda t: mmts.clip_loss(X, Y, t),
    "mama": lambda t: mama.angular_margin_loss(X, Y, t, 0.2),
}
ONE = {
    "ncl": lambda t: ncl.ncl_loss(X, Y, t),
    "sinkhorn": lambda t: ncl.sinkhorn_biases(X @ Y.T, t)[0],
    "tau_min": lambda t: temo.temo_loss(X, Y, Z, W, 0.5, tau_min=t),
}
MARGIN = {
    "max-margin": lambda m: mmts.max_margin_loss(X, Y, m),
    "hardest": lambda m: ncl.hardest_negative_loss(X, Y, m),
    "mu": lambda m: mama.angular_margin_loss(X, Y, 0.5, m),
}
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


@pytest.mark.parametrize("name", [*TAU, *ONE, *MARGIN])
def test_another_shape_or_number_is_refused_in_one_line(name):
    """One per pair, (B, B), serves one direction alone."""
    loss = (TAU | ONE | MARGIN)[name]
    for shape in (
        [(1,), (B - 1,), (B, 1), (B, B + 1)]
        + [(B,)] * (name in ONE)
        + [(B, B)] * (name != "info_nce")
    ):
        with pytest.raises(ValueError, match=r"^.*\(\d.*give a number.*$"):
            loss(torch.full(shape, 0.5))
    for value in () if name in MARGIN else (0, -0.01, float("nan"), [0.5] * B):
        with pytest.raises(ValueError, match="must be above 0|or a tensor"):
            loss(value)


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"moco", "info_nce, (B, N)"}))
def test_embeddings_of_different_shapes_are_refused(name):
    """Row i of both is a pair; all losses but MoCo's, whose keys have a size of their own."""
    p, e = parameters(), [unit(N, D, seed=k) for k in range(4)]
    with pytest.raises(ValueError, match=r"shapes \(1[56], 8\) and \(1[56], 8\)"):
        LOSSES[name]([e[0], *(x[:-1] for x in e[1:])], p)


def test_the_max_margin_loss_refuses_a_single_pair():
    with pytest.raises(ValueError, match="needs at least two pairs"):
        mmts.max_margin_loss(X[:1], Y[:1], 0.2)


def test_a_parameter_that_a_step_does_not_use_has_gradient_zero_on_one_process_too():
    """So that AdamW decays it, and its momentum goes on, as on several processes."""
    used, unused = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    used.sum().backward()
    common.average_gradients([used, unused, fixed])
    assert fixed.grad is None and unused.grad.tolist() == [[0, 0], [0, 0]]
    assert used.grad.tolist() == [[1, 1], [1, 1]]
