"""What holds for all losses alike: gradient, blocks of rows, half precision, finite ends, what a
temperature may be. test_distributed.py has the gradient on several processes."""

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
    loss, p, e = LOSSES[name], parameters(), embeddings()
    steps = [unit(N, D, seed=7), unit(N, D, seed=8), torch.tensor(0.1, dtype=torch.float64)]

    def value_at(distance):
        image = e[0] + distance * steps[0]
        text = e[1] + distance * steps[1]
        tau = p.tau + distance * steps[2]
        return loss([image, text, *e[2:]], p._replace(tau=tau)).item()

    slope = 0.0
    for gradient, step in zip(gradients_of(loss(e, p), [e[0], e[1], p.tau]), steps):
        slope += (gradient * step).sum().item()
    difference = (value_at(1e-6) - value_at(-1e-6)) / 2e-6
    assert abs(slope) > 1e-4
    assert slope == pytest.approx(difference, rel=1e-5)


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
    image, text = (unit(4096, 2, seed=seed).requires_grad_() for seed in (0, 1))
    temo.info_nce(image, text, 0.1)
    assert sum(sizes) == 4096 and max(sizes) < 200


# ----------------------------------------------- half precision, extremes -------------------------
def answer_loss(e, p):
    return mama_qa.answer_loss(e[0], torch.arange(N) % D).mean()


@pytest.mark.parametrize("name", [*LOSSES, "answers"])
def test_loss_is_float32_under_autocast_and_of_16_bits(name):
    p, loss = parameters(dtype=torch.float32), LOSSES.get(name, answer_loss)
    e = [x.detach().float() for x in embeddings()]
    halves = [x.bfloat16() for x in e]
    expected = loss(e, p)
    expected_of_halves = loss([x.float() for x in halves], p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        of_floats, of_halves = loss(e, p), loss(halves, p)
    assert of_floats.dtype == of_halves.dtype == torch.float32
    assert torch.equal(of_floats, expected)
    assert torch.equal(of_halves, expected_of_halves)


SIGNS = {
    "equal": torch.ones(N, 1),
    "opposite": -torch.ones(N, 1),
    "mixed": torch.arange(N)[:, None] % 2 * 2.0 - 1}


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_finite_at_the_ends(name, signs):
    """At a temperature of 0.01, whose exp would overflow in float32."""
    p, same = parameters(dtype=torch.float32), torch.ones(N, D)
    for tau in (p.tau, p.anchor, p.pair):
        tau.data.fill_(0.01)
    other = SIGNS[signs] * same
    e = [x.clone().requires_grad_() for x in (same, other, other, same)]
    loss = LOSSES[name](e, p)
    assert loss.isfinite()
    for gradient in gradients_of(loss, [*e, p.tau]):
        assert gradient.isfinite().all()


# ----------------------------------------------- what tau, gamma and margins may be ---------------
B = 6
X, Y, Z, W = (unit(B, 5, seed=seed) for seed in range(4))  # (B, D) each
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
ONE_NUMBER = {
    "ncl": lambda t: ncl.ncl_loss(X, Y, t),
    "sinkhorn": lambda t: ncl.sinkhorn_biases(X @ Y.T, t)[0],
    "tau_min": lambda t: temo.temo_loss(X, Y, Z, W, 0.5, tau_min=t),
}
MARGIN = {
    "max-margin": lambda m: mmts.max_margin_loss(X, Y, m),
    "hardest": lambda m: ncl.hardest_negative_loss(X, Y, m),
    "mu": lambda m: mama.angular_margin_loss(X, Y, 0.5, m),
}
PUBLIC = TAU | ONE_NUMBER | MARGIN


@pytest.mark.parametrize("name", [*TAU, *MARGIN])
def test_a_temperature_or_margin_belongs_to_its_anchor(name):
    """Anchors of two temperatures, and the two exchanged: together what the two give alone."""
    loss = PUBLIC[name]
    is_low = torch.tensor([True, False, False, True, False, False])
    mixed = loss(torch.where(is_low, 0.1, 0.7)).mean()
    exchanged = loss(torch.where(is_low, 0.7, 0.1)).mean()
    low, high = loss(0.1).mean(), loss(0.7).mean()
    torch.testing.assert_close(mixed + exchanged, low + high)
    assert abs(mixed - exchanged) > 1e-4


WRONG_SHAPES = [(1,), (B - 1,), (B, 1), (B, B + 1), (B,), (B, B)]
ACCEPTED = {name: [(B,)] for name in [*TAU, *MARGIN]} | {"info_nce": [(B,), (B, B)]}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_temperature_of_another_shape_is_refused(name):
    for shape in WRONG_SHAPES:
        if shape not in ACCEPTED.get(name, ()):
            with pytest.raises(ValueError, match="give a number"):
                PUBLIC[name](torch.full(shape, 0.5))


@pytest.mark.parametrize("value", [0, -0.01, float("nan")])
@pytest.mark.parametrize("name", [*TAU, *ONE_NUMBER])
def test_a_temperature_that_is_not_above_0_is_refused(name, value):
    with pytest.raises(ValueError, match="must be above 0"):
        PUBLIC[name](value)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"temo, I~ and T~ apart"}))
def test_numpy_arrays_are_refused(name):
    arrays = [x.detach().numpy() for x in embeddings()]
    with pytest.raises(TypeError, match="give torch tensors"):
        LOSSES[name](arrays, parameters())


# MoCo's keys have a size of their own
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"moco", "info_nce, (B, N)"}))
def test_embeddings_of_different_shapes_are_refused(name):
    """Row i of both is a pair."""
    image, *others = embeddings()
    with pytest.raises(ValueError, match=r"shapes \(1[56], 8\) and \(1[56], 8\)"):
        LOSSES[name]([image, *(x[:-1] for x in others)], parameters())


def test_one_pair_has_no_margin_to_a_negative():
    with pytest.raises(ValueError, match="needs at least two pairs"):
        mmts.max_margin_loss(unit(1, D), unit(1, D, seed=1), 0.2)


def test_a_parameter_that_a_step_does_not_use_has_gradient_zero():
    """So that AdamW decays it, and its momentum goes on, as on several processes."""
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    used.sum().backward()
    common.average_gradients([used, unused, fixed])
    assert used.grad.tolist() == [1, 1]
    assert unused.grad.tolist() == [0, 0]
    assert fixed.grad is None
