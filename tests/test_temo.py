"""TeMo's equations against loops written from the paper, in float64, and the limiting cases."""

import math

import pytest
import torch
import torch.nn.functional as F

import temo

N, D = 6, 5


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1)


def loop_info_nce(anchor, candidates, tau):
    """Eq. 1, averaged: plain Python over floats; tau(i, k) -> float."""
    total = 0.0
    for i in range(len(anchor)):
        logits = [float(anchor[i] @ candidates[k]) / tau(i, k) for k in range(len(candidates))]
        total += -logits[i] + math.log(sum(math.exp(l) for l in logits))
    return total / len(anchor)


def loop_tau(a, b, tau_min, tau_alpha):
    return lambda i, k: tau_min + tau_alpha * math.sqrt(max(float(a[i] @ b[k]), 0.0))


def loop_temo(image, text, image_aug, text_aug, t, tau, tau_min, tau_alpha):
    """Algorithm 1, line by line."""
    def I(a, b, temperature):
        return loop_info_nce(a, b, temperature)
    mm = (I(image, text, lambda i, k: tau) + I(text, image, lambda i, k: tau)) / 2
    i2t = I(image, text, loop_tau(image, text, tau_min, tau_alpha))
    m_mm = (i2t + I(text, image, loop_tau(text, image, tau_min, tau_alpha))) / 2
    ii = I(image, image_aug, loop_tau(image, image_aug, tau_min, tau_alpha))
    tt = I(text, text_aug, loop_tau(text, text_aug, tau_min, tau_alpha))
    return (1 - t) ** 2 * mm + t ** 2 * (m_mm + ii + tt)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tau,tau_min,tau_alpha", [(0.01, 0.01, 0.04), (0.1, 0.05, 0.1)])
def test_temo_loss_is_algorithm_1(progress, tau, tau_min, tau_alpha):
    views = [unit(N, D, seed=s) for s in range(4)]
    expected = loop_temo(*views, progress, tau, tau_min, tau_alpha)
    assert temo.temo_loss(*views, progress, tau, tau_min, tau_alpha).item() == pytest.approx(expected, rel=1e-9)
    scaled = [3.0 * v.float() for v in views]  # embeddings are normalised inside; fp32
    assert temo.temo_loss(*scaled, progress, tau, tau_min, tau_alpha).item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_temo_loss_at_cosines_minus_one_zero_and_one(progress):
    image = torch.eye(4, dtype=torch.float64)
    text = torch.stack([image[0], -image[1], image[3], image[2]])  # cosines 1, -1, 0, 0 on the diagonal
    views = [image, text, image.clone(), -text]
    leaves = [v.clone().requires_grad_() for v in views]
    for detach in (True, False):
        loss = temo.temo_loss(*leaves, progress, detach=detach)
        assert loss.item() == pytest.approx(loop_temo(*views, progress, 0.01, 0.01, 0.04), rel=1e-3)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert all(torch.isfinite(g).all() for g in grads if g is not None)


def test_modulated_temperature():
    sim = torch.tensor([-1.0, -1e-3, 0.0, 1e-12, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    tau = temo.modulated_temperature(sim, 0.01, 0.04)
    assert tau[:3].tolist() == [0.01] * 3
    assert tau[4:].tolist() == pytest.approx([0.03, 0.05])
    gradient, = torch.autograd.grad(tau.sum(), sim)
    assert torch.isfinite(gradient).all() and gradient[:3].abs().sum() == 0
    assert gradient[4].item() == pytest.approx(0.04 * 0.5 / 0.5)


def test_limits():
    image, text, image_aug, text_aug = (unit(N, D, seed=s) for s in range(4))
    plain = temo.multimodal_loss(image, text, 0.01)
    assert temo.temo_loss(image, text, image_aug, text_aug, 0.0) == plain  # t = 0: L_MM alone
    assert torch.isclose(temo.modulated_multimodal_loss(image, text, 0.01, 0.0), plain)  # tau_alpha = 0: InfoNCE
    expected = plain + temo.info_nce(image, image_aug, 0.01) + temo.info_nce(text, text_aug, 0.01)
    at_the_end = temo.temo_loss(image, text, image_aug, text_aug, 1.0, tau_alpha=0.0)  # t = 1: three terms, weight 1
    assert torch.isclose(at_the_end, expected)
    same = unit(1, D).expand(N, D)
    assert temo.info_nce(same, same, 0.07).item() == pytest.approx(math.log(N))  # a random guess


def test_temperature_shapes_and_transpose():
    a, b = unit(N, D, seed=1), unit(N, D, seed=2)
    per_anchor, per_pair = torch.rand(N, dtype=torch.float64) + 0.1, torch.rand(N, N, dtype=torch.float64) + 0.1
    expected = loop_info_nce(a, b, lambda i, k: float(per_anchor[i]))
    assert temo.info_nce(a, b, per_anchor).item() == pytest.approx(expected)
    expected = loop_info_nce(a, b, lambda i, k: float(per_pair[i, k]))
    assert temo.info_nce(a, b, per_pair).item() == pytest.approx(expected)
    matrix = temo.modulated_temperature(a @ b.T)
    expected = (temo.info_nce(a, b, matrix) + temo.info_nce(b, a, matrix.T)) / 2  # T_T2I = T_I2T^T
    assert torch.isclose(temo.modulated_multimodal_loss(a, b, 0.01, 0.04), expected)


def test_detach_changes_the_gradient_not_the_loss():
    a, b = unit(N, D, seed=1).requires_grad_(), unit(N, D, seed=2)
    kept, free = (temo.modulated_loss(a, b, 0.01, 0.04, detach=d) for d in (True, False))
    assert kept == free
    g_kept, g_free = (torch.autograd.grad(l, a)[0] for l in (kept, free))
    assert not torch.allclose(g_kept, g_free)
    s = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)  # facts: 33.3 against 22.2 there
    assert torch.autograd.grad(s / temo.modulated_temperature(s), s)[0].item() == pytest.approx(22.2, abs=0.1)
    assert (1 / temo.modulated_temperature(s)).item() == pytest.approx(33.3, abs=0.1)


def test_table_3_rows():
    views, t = [unit(N, D, seed=s) for s in range(4)], 0.3
    mm, mod = temo.multimodal_loss(*views[:2], 0.01), temo.modulated_multimodal_loss(*views[:2], 0.01, 0.04)
    plain = temo.info_nce(views[0], views[2], 0.01) + temo.info_nce(views[1], views[3], 0.01)
    uni = temo.modulated_loss(views[0], views[2], 0.01, 0.04) + temo.modulated_loss(views[1], views[3], 0.01, 0.04)
    rows = {"a": (dict(modulated=False, unimodal="none"), mm),
            "b": (dict(base=False, unimodal="none"), mod),
            "c": (dict(modulated=False, unimodal="plain", blend="fixed"), mm / 2 + plain / 2),
            "d": (dict(unimodal="none", blend="fixed"), mm / 2 + mod / 2),
            "e": (dict(unimodal="none"), 0.49 * mm + 0.09 * mod),
            "f": (dict(blend="fixed"), mm / 2 + (mod + uni) / 2),
            "g": ({}, 0.49 * mm + 0.09 * (mod + uni))}
    for row, (flags, expected) in rows.items():
        assert torch.isclose(temo.temo_loss(*views, t, **flags), expected), row


def test_experts_replace_the_unimodal_temperature():
    views = [unit(N, D, seed=s) for s in range(4)]
    tau = torch.rand(N, N, dtype=torch.float64) + 0.05
    got = temo.temo_loss(*views, 1.0, image_tau=tau)
    image_term = temo.info_nce(views[0], views[2], tau)
    text_term = temo.modulated_loss(views[1], views[3], 0.01, 0.04)
    expected = temo.modulated_multimodal_loss(*views[:2], 0.01, 0.04) + image_term + text_term
    assert torch.isclose(got, expected)


def test_loss_is_fp32_under_bf16_autocast():
    views = [unit(64, 32, seed=s).float() for s in range(4)]
    expected = temo.temo_loss(*views, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = temo.temo_loss(*views, 0.5)
        assert loss.dtype == torch.float32 and loss == expected
        assert torch.isfinite(temo.temo_loss(*(v.bfloat16() for v in views), 0.5))


# ---------------------------------------------------- baselines ------------------------------------------------------
def test_ts_schedule():
    values = [temo.ts_temperature(p) for p in (0.0, 0.1, 0.2, 0.3, 1.0)]
    assert values == pytest.approx([0.05, 0.01, 0.05, 0.01, 0.05])  # five periods: half a period is 0.1


def test_dystress_temperature():
    s = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64)
    assert temo.dystress_temperature(s).tolist() == pytest.approx([0.05, 0.03, 0.01, 0.03, 0.05])
    shifted = [0.01 + 0.02 * (1 + math.cos(math.pi * (1 + (1 + x) / 2))) for x in s.tolist()]
    assert temo.dystress_temperature(s, shifted=True).tolist() == pytest.approx(shifted)


def test_cwcl_loss():
    image, text, tau = unit(N, D, seed=1), unit(N, D, seed=2), 0.05
    total = 0.0
    for i in range(N):
        logits = [float(image[i] @ text[j]) / tau for j in range(N)]
        lse = math.log(sum(math.exp(l) for l in logits))
        w = [(1 + float(image[i] @ image[j])) / 2 for j in range(N)]
        total -= sum(wj * (l - lse) for wj, l in zip(w, logits)) / sum(w)
    expected = (total / N + loop_info_nce(text, image, lambda i, k: tau)) / 2
    assert temo.cwcl_loss(image, text, tau).item() == pytest.approx(expected)


def test_slip_image_loss_is_nt_xent():
    z1, z2, tau = unit(N, D, seed=1), unit(N, D, seed=2), 0.1
    z, total = torch.cat([z1, z2]), 0.0
    for i in range(2 * N):
        logits = {j: float(z[i] @ z[j]) / tau for j in range(2 * N) if j != i}
        total += -logits[(i + N) % (2 * N)] + math.log(sum(math.exp(l) for l in logits.values()))
    assert temo.simclr_loss(z1, z2, tau).item() == pytest.approx(total / (2 * N))
