"""What holds for all losses alike: gradient, blocks of rows, half precision, finite ends, what a
temperature may be. test_distributed.py has the gradient on several processes."""

from contrastive.core import row_blocks

import pytest
import torch

import common
import mmts
import ncl
import temo
from helpers import unit
from loss_table import IN_BLOCKS, LOSSES, D, N, parameters
from variants import mama_qa

# losses by what their p.tau or p.anchor is: a temperature or margin of each anchor, or one number
TAU = ("temo", "multimodal", "info_nce, (B,)", "cwcl", "slip", "ts", "moco", "mmts", "mama")
MARGIN = ("mmts, max-margin", "hardest negative", "mama, mu")
ONE_NUMBER = ("ncl", "temo, tau_min", "sinkhorn")


def sinkhorn(e, p):
    return ncl.sinkhorn_biases(e[0] @ e[1].T, p.tau)


def answers(e, p):
    loss = mama_qa.answer_loss(e[0], torch.arange(N) % D)
    return loss.mean()


FUNCTIONS = LOSSES | {"sinkhorn": sinkhorn, "answers": answers}


def embeddings():
    """I, T, I~ and T~, (N, D) each."""
    return [unit(N, D, seed=seed).requires_grad_() for seed in range(4)]


def gradients_of(loss, leaves):
    """Zeros for what the loss does not read."""
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


# ----------------------------------------------- gradients and blocks -----------------------------
DETACHED_IN_PART = ("temo, detached", "ncl", "cwcl")


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - set(DETACHED_IN_PART)))
def test_gradient_is_the_slope(name):
    """Of I, T and tau, by differences; I~, T~ and MoCo's keys stay."""
    p = parameters()
    image, text, *others = embeddings()

    def loss(image, text, tau):
        return LOSSES[name]([image, text, *others], p._replace(tau=tau))

    torch.autograd.gradcheck(loss, (image, text, p.tau), fast_mode=True, atol=1e-7)


def value_and_gradients(name):
    p, e = parameters(), embeddings()
    loss = LOSSES[name](e, p)
    return [loss, *gradients_of(loss, [*e, p.tau, p.anchor, p.pair])]


@pytest.mark.parametrize("block", [1, 5, N - 1])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_equal_the_whole_matrix(name, block, monkeypatch):
    whole = value_and_gradients(name)
    monkeypatch.setattr(row_blocks, "rows_at_a_time", block)
    torch.testing.assert_close(value_and_gradients(name), whole, rtol=1e-9, atol=1e-9)


def test_a_matrix_above_a_gibibyte_is_cut(monkeypatch):
    """4,096 pairs; no block is asked for."""
    sizes = []

    def watched_checkpoint(function, *rows, **options):
        sizes.append(len(rows[0]))
        return function(*rows)

    monkeypatch.setattr(row_blocks, "checkpoint", watched_checkpoint)
    image = unit(4096, 2).requires_grad_()
    temo.info_nce(image, image.detach(), 0.1)
    assert sum(sizes) == 4096 and max(sizes) < 200


# ----------------------------------------------- half precision, extremes -------------------------
@pytest.mark.parametrize("name", [*LOSSES, "answers"])
def test_loss_is_float32_under_autocast_and_of_16_bits(name):
    loss = FUNCTIONS[name]
    p = parameters(dtype=torch.float32)
    floats = [x.detach().float() for x in embeddings()]
    halves = [x.bfloat16() for x in floats]
    rounded = [x.float() for x in halves]
    expected = loss(floats, p), loss(rounded, p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = loss(floats, p), loss(halves, p)
    # their type, too, is float32
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)


SIGNS = {
    "equal": torch.ones(N, 1),
    "opposite": -torch.ones(N, 1),
    "mixed": (-1.0) ** torch.arange(N)[:, None]}


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_finite_at_the_ends(name, signs):
    """At a temperature of 0.01, whose exp would overflow in float32."""
    p = parameters(dtype=torch.float32)
    for tau in (p.tau, p.anchor, p.pair):
        tau.data.fill_(0.01)
    same = torch.ones(N, D)
    other = SIGNS[signs] * same
    e = [x.clone().requires_grad_() for x in (same, other, other, same)]
    loss = LOSSES[name](e, p)
    assert loss.isfinite()
    for gradient in gradients_of(loss, [*e, p.tau]):
        assert gradient.isfinite().all()


# ----------------------------------------------- what tau, gamma and margins may be ---------------
def loss_at(name, tau):
    """A loss at this temperature or margin."""
    p = parameters()._replace(tau=tau, anchor=tau)
    return FUNCTIONS[name](embeddings(), p)


@pytest.mark.parametrize("name", [*TAU, *MARGIN])
def test_a_temperature_or_margin_belongs_to_its_anchor(name):
    """Anchors of two temperatures, and the two exchanged: together what the two give alone."""
    low, high = torch.tensor([0.1, 0.7], dtype=torch.float64)
    is_low = torch.arange(N) % 3 == 0
    mixed = loss_at(name, torch.where(is_low, low, high))
    exchanged = loss_at(name, torch.where(is_low, high, low))
    alone = loss_at(name, low) + loss_at(name, high)
    torch.testing.assert_close(mixed + exchanged, alone)
    assert abs(mixed - exchanged) > 1e-4


def wrong_shapes():
    """(name of a loss, shape of a temperature that it cannot have)."""
    cases = []
    for name in (*TAU, *MARGIN, *ONE_NUMBER):
        shapes = [(1,), (N - 1,), (N, 1), (N, N + 1)]
        if name in ONE_NUMBER:
            shapes.append((N,))
        if name != "info_nce, (B,)":
            shapes.append((N, N))
        cases += [(name, shape) for shape in shapes]
    return cases


@pytest.mark.parametrize("name, shape", wrong_shapes())
def test_a_temperature_of_another_shape_is_refused(name, shape):
    with pytest.raises(ValueError, match="give a number"):
        loss_at(name, torch.full(shape, 0.5))


@pytest.mark.parametrize("value", [0, -0.01, float("nan")])
@pytest.mark.parametrize("name", [*TAU, *ONE_NUMBER])
def test_a_temperature_that_is_not_above_0_is_refused(name, value):
    with pytest.raises(ValueError, match="must be above 0"):
        loss_at(name, value)


def test_numpy_arrays_are_refused():
    array = unit(N, D).numpy()
    with pytest.raises(TypeError, match="give torch tensors"):
        temo.info_nce(array, array, 0.1)


# MoCo's keys have a size of their own
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"moco", "info_nce, (B, N)"}))
def test_embeddings_of_different_shapes_are_refused(name):
    """Row i of both is a pair."""
    image, *others = embeddings()
    shorter = [x[:-1] for x in others]
    with pytest.raises(ValueError, match=r"shapes \(1[56], 8\) and \(1[56], 8\)"):
        LOSSES[name]([image, *shorter], parameters())


def test_one_pair_has_no_margin_to_a_negative():
    one = unit(1, D)
    with pytest.raises(ValueError, match="needs at least two pairs"):
        mmts.max_margin_loss(one, one, 0.2)


def test_a_parameter_that_a_step_does_not_use_has_gradient_zero():
    """So that AdamW decays it, and its momentum goes on, as on several processes."""
    used = torch.nn.Parameter(torch.ones(2))
    unused = torch.nn.Parameter(torch.ones(2))
    fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    used.sum().backward()
    common.average_gradients([used, unused, fixed])
    assert used.grad.tolist() == [1, 1]
    assert unused.grad.tolist() == [0, 0]
    assert fixed.grad is None
