"""MAMA: the loss against loops, the gradient of the weight network, other weights, meta-data."""

import copy
import functools
import math

import common
from contrastive.encoders.base import SmallText, Transformer
from contrastive.core.processes import UserError
from contrastive.papers.meta import balanced_rows, meta_data

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

import helpers
import mama
from helpers import drift, evaluated, few_steps, run_script, steps, unit

BASE = (
    "--cpu --workers 0 --clips 64 16 16 --batch-size 16 --meta-batch-size 8 --meta-size 24 "
    "--log-every 1 --eval-every 0"
).split()


# -------------------------------------- margin and loss --------------------------------------
def test_margin_grows_from_two_elevenths_to_a_fifth():
    assert mama.margin(0) == pytest.approx(2 / 11) and mama.margin(10**6) == 0.2
    assert mama.margin(60) == pytest.approx(2 / (10 + math.exp(-6)), rel=1e-12)
    # the values of Section 4.1 fall
    assert mama.margin(10**6, a2=-0.1) == pytest.approx(0, abs=1e-200)


def loop_loss(video, text, tau, mu):
    """Eqs. 1, 3 to 5 over Python floats, with acos as printed."""
    out = []
    for i in range(len(video)):
        total = 0.0
        for a, b in ((video, text), (text, video)):
            sims = [max(-1.0, min(1.0, float(a[i] @ c))) for c in b]
            angle = math.acos(sims[i])
            sims[i] = math.cos(max(angle - mu, 0)) if angle <= math.pi / 2 else sims[i]
            total += math.log(sum(math.exp((s - sims[i]) / tau) for s in sims))
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("tau", [1.0, 0.01])
@pytest.mark.parametrize("mu", [0.0, 0.2, 1.5])
def test_loss_against_a_loop(mu, tau):
    video = unit(12, 6)
    text = F.normalize(video + 0.7 * unit(12, 6, seed=1), dim=1)
    text[-2:] *= -1  # two pairs point away from each other
    loss = mama.angular_margin_loss(3 * video, 0.2 * text, tau, mu)  # normalised inside
    assert torch.allclose(loss, loop_loss(video, text, tau, mu), rtol=1e-9, atol=1e-9)


# -------------------------------------- the gradient of the weight network -------------------
class Towers(nn.Module):
    """Transformers for both modalities, with dropout and the statistics of a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.frame, self.blocks, self.text = (
            nn.Linear(5, 16),
            Transformer(16, 1, 4),
            SmallText(30, 7, width=16),
        )
        self.text.norm = nn.Sequential(self.text.norm, nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, pixels, tokens):
        video = self.blocks(self.frame(pixels), pixels.new_ones(pixels.shape[:2]).bool()).mean(1)
        return self.norm(video), self.text(**tokens)[1], None


def transformer_batch(n, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(7)[None] < 2 + torch.arange(n)[:, None] % 6
    return {
        "pixels": torch.randn(n, 4, 5, generator=g, dtype=torch.float64),
        "tokens": {
            "input_ids": torch.randint(1, 30, (n, 7), generator=g),
            "attention_mask": mask.long(),
        },
    }


def loss_at(tau, mu):
    return functools.partial(mama.angular_margin_loss, tau=tau, mu=mu)


def naive_gradient(losses, parameters, batch, meta_batch, weight_net, lr):  # noqa: PLR0917
    """Algorithm 1 differentiated by autograd from end to end."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
        sample = losses(leaves, batch)
        objective = (weight_net(sample.detach()) * sample).mean()
        gradient = torch.autograd.grad(objective, list(leaves.values()), create_graph=True)
        virtual = {k: p - lr * g for (k, p), g in zip(leaves.items(), gradient)}
        return torch.autograd.grad(
            losses(virtual, meta_batch).mean(), list(weight_net.parameters())
        )


@pytest.mark.parametrize("method", ["forward", "second-order"])
def test_weightnet_gradient_against_second_order(method):
    """With the same dropout in all passes; weights, statistics and random state do not change."""
    torch.manual_seed(0)
    towers, net = Towers().double().train(), mama.WeightNet(10).double()
    losses = mama.look_ahead_losses(towers, loss_at(0.2, 0.2))
    parameters = dict(towers.named_parameters())
    case = losses, parameters, transformer_batch(6, 1), transformer_batch(5, 2), net, 0.05
    before, state = copy.deepcopy(towers.state_dict()), torch.get_rng_state()
    gradient = mama.weightnet_gradient(*case, method)
    assert torch.equal(torch.get_rng_state(), state)
    for g, expected in zip(gradient, naive_gradient(*case), strict=True):
        assert expected.norm() > 1e-9 and (g - expected).norm() / expected.norm() < 1e-8
    assert all(torch.equal(x, before[k]) for k, x in towers.state_dict().items())
    assert all(p.grad is None for p in (*parameters.values(), *net.parameters()))


# -------------------------------------- other weightings -------------------------------------
def test_focal_and_spl_weights_by_hand():
    # probability of the pair, the same in both directions
    p = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
    assert mama.focal_weights(-2 * p.log()).tolist() == pytest.approx([0, 0.01, 0.25, 0.81])
    assert mama.focal_weights(-2 * p.log(), 1).tolist() == pytest.approx([0, 0.1, 0.5, 0.9])
    losses = torch.tensor([3.0, 1.0, 4.0, 2.0])
    for share, weights in (
        (0.5, [0, 1, 0, 1]),
        (0.75, [1, 1, 0, 1]),
        (1.0, [1] * 4),
        (0.0, [0, 1, 0, 0]),
    ):
        assert mama.spl_weights(losses, 0, start=share).tolist() == weights
    assert mama.spl_weights(losses, 0.5).tolist() == [1, 1, 0, 1]  # half way from 0.5 to 1


def test_l2rw_weights_by_hand():
    """Of a linear model, (x Theta - y)^2 / 2: how far a step on each helps, at Theta itself."""

    def losses(parameters, batch):
        x, y = batch
        return (x @ parameters["theta"] - y) ** 2 / 2

    theta = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    (x, y), (xm, ym) = ((2 * unit(n, 3, seed=n), unit(1, n, seed=n + 9)[0]) for n in (5, 4))
    y = torch.cat([(2 * x @ theta - y)[:2], y[2:]])  # steps on the first two harm the meta-data
    error, meta_gradient = x @ theta - y, ((xm @ theta - ym)[:, None] * xm).mean(0)
    useful = (error[:, None] * x @ meta_gradient).clamp(min=0)
    assert 0 < (useful > 0).sum() < 5

    def weights(meta_batch):
        gain = mama.meta_gain(losses, {"theta": theta}, (x, y), meta_batch)
        return mama.l2rw_weights(gain)

    assert torch.allclose(weights((xm, ym)), 5 * useful / useful.sum(), rtol=1e-12)
    assert weights((xm, xm @ theta)).tolist() == [0] * 5


# -------------------------------------- meta-data --------------------------------------------
def meta_of(*flags):
    """(train, evals, the meta-data, the evals that are left)."""
    args = mama.parse_args([*helpers.of_set(BASE, flags), *flags])
    train, evals = common.open_data(args)
    return train, evals, *meta_data(train, evals, args)


def test_meta_data_are_clean_balanced_and_stay_in_train():
    flags = "--caption-noise 0.5 --clips 400 40 16 --meta-size 48".split()
    train, evals, meta, rest = meta_of(*flags)
    assert len(meta) == 48 and not any(meta.column("noisy")) and any(train.column("noisy"))
    assert set(meta.column("key")) <= set(train.column("key")) and rest is evals
    counts = np.bincount(meta.labels, minlength=24)
    clean = np.bincount(np.asarray(train.labels)[~np.asarray(train.column("noisy"))], minlength=24)
    short = clean < counts.max()  # only a class without more may have fewer
    assert (counts[~short] >= counts.max() - 1).all()
    assert (counts[short] == clean[short]).sum() >= short.sum() - 1
    assert meta_of(*flags)[2].column("key") == meta.column("key")
    table = common.make_table(
        [["x"]] * 9,
        [f"{k}.png" for k in range(9)],
        label=[-1] * 6 + [0, 0, 1],
        classes={"label": ["a", "b"]},
    )
    rows, _ = balanced_rows(common.Data("x", "train", table), 3, "label")
    assert rows.tolist() == [6, 7, 8]  # -1 is no class


def test_meta_data_of_val_leave_every_evaluation(tmp_path):
    _, evals, meta, rest = meta_of(*"--meta-set val --meta-size 10 --weighting none".split())
    assert len(rest["moving-emoji"]["val"]) == 6 and len(evals["moving-emoji"]["val"]) == 16
    assert rest["moving-emoji"]["test"] is evals["moving-emoji"]["test"]
    assert not set(meta.column("key")) & set(rest["moving-emoji"]["val"].column("key"))
    summary = run_script(
        mama, tmp_path / "run", *"--max-steps 2 --meta-set val --meta-size 10".split(), base=BASE
    )
    found = evaluated(tmp_path / "run", "--split", "val", "--tasks", "retrieval")["moving-emoji"]
    assert summary["val"]["moving-emoji"]["images"] == found["metrics"]["images"] == 6


def test_bad_samples_of_the_meta_data_are_counted_and_listed(tmp_path):
    """Those of val are nowhere else: training does not read them, and they leave its evaluation."""
    flags = [
        "--dataset",
        helpers.write_captions(tmp_path / "data", 120),
        "--holdout-fraction",
        0.2,
        "--meta-set",
        "val",
        *"--meta-size 4 --meta-batch-size 4 --image-size 16 --batch-size 8".split(),
        *"--max-steps 2 --workers 0".split(),
    ]
    lost = meta_of(*map(str, flags))[2].column("key")[1]
    (tmp_path / "data" / lost).unlink()
    few_steps(mama, tmp_path / "r", *flags, "--max-bad-fraction", 0.5, base=["--cpu"])
    assert (tmp_path / "r" / "bad_samples.txt").read_text().split("\t")[0] == lost


def test_meta_data_by_name_and_too_little_of_them(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("".join(f"train {i}\n" for i in (29, *range(30))))
    train, _, meta, _ = meta_of("--meta-set", str(names), "--caption-noise", "0.3")
    is_noisy = train.column("noisy")[:30]
    assert 0 < is_noisy.sum() < 22
    assert meta.column("key") == [f"train {i}" for i in range(30) if not is_noisy[i]]
    assert f"{is_noisy.sum()} with another's captions left out" in meta.note
    names.write_text("train 1\nnobody\n")
    for flags, words in (
        (["--meta-set", str(names)], "1 of its 2 names are not in train, first 'nobody'"),
        (["--meta-size", "4"], "4 examples .*are fewer than --meta-batch-size 8"),
        (["--meta-set", "val", "--meta-size", "99"], "val has 16 examples, so none would be left"),
    ):
        with pytest.raises(UserError, match=words):
            meta_of(*flags)


# -------------------------------------- runs -------------------------------------------------
def test_the_margin_and_the_weights_are_those_of_the_step(tmp_path):
    log = few_steps(
        mama, tmp_path / "spl", *"--max-steps 4 --weighting spl --a0 4".split(), base=BASE
    )
    assert [row["w"] for row in log] == [k / 16 for k in (8, 10, 12, 14)]
    assert [row["mu"] for row in log] == pytest.approx([mama.margin(k, 4.0) for k in range(4)])
    flags = "--max-steps 2 --weighting none --batch-size 64 --caption-noise 0.2".split()
    train = common.load_data("moving-emoji", "train", clips=[64, 16, 16], caption_noise=0.2)
    swapped = int(np.sum(train.column("noisy")))  # of all 64 clips, which are a batch
    for row in few_steps(mama, tmp_path / "none", *flags, base=BASE):
        assert row["loss"] == pytest.approx(row["L"], rel=1e-5) and row["w"] == 1
        assert 64 * row["L"] == pytest.approx(
            swapped * row["L_mismatched"] + (64 - swapped) * row["L_matched"]
        )
    for row in few_steps(
        mama, tmp_path / "l2rw", *"--max-steps 2 --weighting l2rw".split(), base=BASE
    ):
        assert row["w"] == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("weighting", ["meta", "joint"])
def test_a_step_of_main_is_algorithm_1(weighting, tmp_path, monkeypatch):
    """Two steps of SGD, the second at half the rate, by autograd on what main read."""
    seen, read = {}, []
    inputs_of, net_of, build_model = mama.inputs_of, mama.WeightNet, common.build_model

    def watch_net(*args):
        seen["net"] = net_of(*args)
        seen["first net"] = copy.deepcopy(seen["net"])
        return seen["net"]

    def watch_model(*args):
        out = build_model(*args)
        seen["model"] = copy.deepcopy(out[0])
        return out

    monkeypatch.setattr(mama, "inputs_of", lambda *args: read.append(inputs_of(*args)) or read[-1])
    monkeypatch.setattr(mama, "WeightNet", watch_net)
    monkeypatch.setattr(common, "build_model", watch_model)
    flags = (
        f"--weighting {weighting} --lr 0.05 --max-steps 2 --lr-schedule linear --lr-end 0 "
        "--optimizer sgd --betas 0 0"
    )
    run_script(
        mama,
        tmp_path / "run",
        *flags.split(),
        *"--weight-decay 0 --grad-clip 0 --warmup-fraction 0".split(),
        *(["--meta-lr", 0.01] if weighting == "meta" else []),
        base=BASE,
    )
    net, start = seen["first net"], copy.deepcopy(seen["first net"].state_dict())
    theta = dict(seen["model"].named_parameters())
    adam = torch.optim.AdamW(
        net.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-12, weight_decay=1e-3
    )
    # meta-data are read after each batch
    pairs_read = (
        zip(read[::2], read[1::2]) if weighting == "meta" else ((batch, None) for batch in read)
    )
    for k, (lr, (batch, meta)) in enumerate(zip((0.05, 0.025), pairs_read, strict=True)):
        mu = mama.margin(k, 0.1)
        losses = mama.look_ahead_losses(seen["model"], loss_at(0.1, mu))
        leaves = {n: p.detach().requires_grad_() for n, p in theta.items()}
        if weighting == "meta":
            for p, g in zip(net.parameters(), naive_gradient(losses, leaves, batch, meta, net, lr)):
                p.grad = g
            adam.step()
        sample = losses(leaves, batch)
        weight = net(sample.detach())
        names = [*leaves.values(), *(net.parameters() if weighting == "joint" else [])]
        objective = ((weight if weighting == "joint" else weight.detach()) * sample).mean()
        gradients = torch.autograd.grad(objective, names)
        theta = {n: p.detach() - lr * g for (n, p), g in zip(leaves.items(), gradients)}
        if weighting == "joint":
            with torch.no_grad():
                for p, g in zip(net.parameters(), gradients[len(leaves) :]):
                    p -= lr * g
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert (
        drift({name: saved[name] for name in theta}, theta, dict(seen["model"].named_parameters()))
        < 0.05
    )
    # Adam: a gradient near 0 may turn its sign
    assert drift(seen["net"].state_dict(), net.state_dict(), start) < 0.1
    for step in (1, 2):
        pairs = load_file(tmp_path / "run" / f"pairs_{step}.safetensors")["pairs"]
        assert pairs.shape == (16, 3)
        row = steps(tmp_path / "run")[step - 1]
        assert pairs[:, 0].mean().item() == pytest.approx(row["L"], rel=1e-5)
        assert pairs[:, 1].mean().item() == pytest.approx(row["w"], rel=1e-5)


def test_the_look_ahead_is_fp32_under_mixed_precision(tmp_path, monkeypatch):
    """The passes of the virtual step, of the meta-data and of forward mode; the step is in bf16."""
    halves, forward = [], common.TextEncoder.forward

    def watch(tower, *args, **more):
        if tower.training:
            halves.append(torch.is_autocast_enabled("cpu"))
        return forward(tower, *args, **more)

    monkeypatch.setattr(common.TextEncoder, "forward", watch)
    few_steps(mama, tmp_path / "run", "--max-steps", "2", "--mixed-precision", "bf16", base=BASE)
    assert halves == [False, False, False, True] * 2
