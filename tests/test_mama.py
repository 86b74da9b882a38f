"""MAMA: the loss against loops, the gradient of the weight network, other weights, meta-data."""

import copy
import functools
import math

import common
from contrastive.core.processes import UserError
from contrastive.encoders.base import SmallText, Transformer
from contrastive.papers.meta import balanced_rows, meta_data

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

import mama
from helpers import assert_close, evaluated, few_steps, of_set, run_script, tensors_of, unit
from tools.check import drift

BASE = (
    "--cpu --workers 0 --clips 64 16 16 --batch-size 16 --meta-batch-size 8 --meta-size 24 "
    "--log-every 1 --eval-every 0").split()


# -------------------------------------- margin and loss --------------------------------------
@pytest.mark.parametrize("step, a2, expected", [
    (0, 0.1, 2 / 11),
    (60, 0.1, 2 / (10 + math.exp(-6))),
    (10**6, 0.1, 0.2),
    (10**6, -0.1, 0)])  # of Section 4.1
def test_margin_by_hand(step, a2, expected):
    assert mama.margin(step, a2=a2) == pytest.approx(expected, rel=1e-12, abs=1e-200)


@pytest.mark.parametrize("schedule, mu", [
    ("logistic", 2 / (10 + math.exp(-6))), ("constant", 0.2), ("none", 0)])
def test_the_margin_of_each_schedule(schedule, mu):
    args = mama.parse_args(["--a0", "2"])
    args.margin_schedule = schedule
    assert mama.margin_at(60, args) == pytest.approx(mu)


def loop_loss(anchor, candidates, tau, mu):
    """L_v2t,i or L_t2v,i (Eqs. 1, 4, 5), with acos as printed."""
    losses = []
    for i in range(len(anchor)):
        cosines = candidates @ anchor[i]
        angle = cosines[i].clamp(-1, 1).acos()
        if angle <= math.pi / 2:
            cosines[i] = (angle - mu).clamp(min=0).cos()
        logits = cosines / tau
        losses.append(logits.exp().sum().log() - logits[i])
    return torch.stack(losses)


@pytest.mark.parametrize("tau", [1.0, 0.01])
@pytest.mark.parametrize("mu", [0.0, 0.2, 1.5])
def test_loss_against_a_loop(mu, tau):
    """Eq. 3; embeddings are normalised inside."""
    video = unit(12, 6)
    text = F.normalize(video + 0.7 * unit(12, 6, seed=1), dim=1)
    text[-2:] *= -1  # two pairs point away from each other
    L_v2t = loop_loss(video, text, tau, mu)
    L_t2v = loop_loss(text, video, tau, mu)
    loss = mama.angular_margin_loss(3 * video, 0.2 * text, tau, mu)
    assert_close(loss, L_v2t + L_t2v, 1e-9)


# -------------------------------------- the gradient of the weight network -------------------
class Towers(nn.Module):
    """Transformers for both modalities, with dropout and the statistics of a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.frame = nn.Linear(5, 16)
        self.blocks = Transformer(16, 1, 4)
        self.text = SmallText(30, 7, width=16)
        self.text.norm = nn.Sequential(self.text.norm, nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, pixels, tokens):
        is_frame = torch.ones(pixels.shape[:2], dtype=torch.bool)
        video = self.blocks(self.frame(pixels), is_frame).mean(1)
        _, text = self.text(**tokens)
        return self.norm(video), text, None


def batch_of_towers(n, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = 2 + torch.arange(n)[:, None] % 6
    mask = (torch.arange(7) < lengths).long()
    tokens = torch.randint(1, 30, (n, 7), generator=generator)
    return {
        "pixels": torch.randn(n, 4, 5, generator=generator, dtype=torch.float64),
        "tokens": {"input_ids": tokens, "attention_mask": mask}}


def loss_at(tau, mu):
    return functools.partial(mama.angular_margin_loss, tau=tau, mu=mu)


def leaves_of(parameters):
    return {name: p.detach().requires_grad_() for name, p in parameters.items()}


def moved(parameters, gradients, lr):
    """{name: parameter} after a step of SGD."""
    return {name: p - lr * g for (name, p), g in zip(parameters.items(), gradients)}


def naive_gradient(losses, parameters, batch, meta_batch, weight_net, lr):  # noqa: PLR0917
    """Algorithm 1 differentiated by autograd from end to end."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        Theta = leaves_of(parameters)
        L = losses(Theta, batch)
        w = weight_net(L.detach())
        gradient = torch.autograd.grad((w * L).mean(), list(Theta.values()), create_graph=True)
        virtual_Theta = moved(Theta, gradient, lr)
        meta_loss = losses(virtual_Theta, meta_batch).mean()
        return torch.autograd.grad(meta_loss, list(weight_net.parameters()))


@pytest.mark.parametrize("method", ["forward", "second-order"])
def test_weightnet_gradient_against_second_order(method):
    """With the same dropout in all passes; weights, statistics and random state do not change."""
    torch.manual_seed(0)
    towers = Towers().double().train()
    net = mama.WeightNet(10).double()
    losses = mama.look_ahead_losses(towers, loss_at(0.2, 0.2))
    parameters = dict(towers.named_parameters())
    case = losses, parameters, batch_of_towers(6, 1), batch_of_towers(5, 2), net, 0.05
    before = copy.deepcopy(towers.state_dict())
    random_state = torch.get_rng_state()
    gradient = mama.weightnet_gradient(*case, method)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_close(towers.state_dict(), before, 0)
    for p in (*parameters.values(), *net.parameters()):
        assert p.grad is None
    for g, expected in zip(gradient, naive_gradient(*case), strict=True):
        length = expected.norm()
        assert length > 1e-9
        assert (g - expected).norm() < 1e-8 * length


# -------------------------------------- other weightings -------------------------------------
@pytest.mark.parametrize("gamma, weights", [
    (2, [0, 0.01, 0.25, 0.81]), (1, [0, 0.1, 0.5, 0.9])])
def test_focal_weights_by_hand(gamma, weights):
    # probability of the pair, the same in both directions
    p = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
    losses = -2 * p.log()
    assert mama.focal_weights(losses, gamma).tolist() == pytest.approx(weights)


@pytest.mark.parametrize("progress, start, weights", [
    (0, 0.5, [0, 1, 0, 1]),
    (0, 0.75, [1, 1, 0, 1]),
    (0, 1.0, [1, 1, 1, 1]),
    (0, 0.0, [0, 1, 0, 0]),
    (0.5, 0.5, [1, 1, 0, 1])])  # half way from 0.5 to 1
def test_spl_weights_by_hand(progress, start, weights):
    losses = torch.tensor([3.0, 1.0, 4.0, 2.0])
    assert mama.spl_weights(losses, progress, start=start).tolist() == weights


def square_losses(parameters, batch):
    """(x Theta - y)^2 / 20 of a linear model."""
    x, y = batch
    return (x @ parameters["Theta"] - y) ** 2 / 20


def test_l2rw_weights_by_hand():
    """G_j = <grad L_j, grad L^meta>, at Theta itself."""
    parameters = {"Theta": unit(3).requires_grad_()}
    batch = unit(5, 3, seed=1), unit(5, seed=2)
    meta_batch = unit(4, 3, seed=3), unit(4, seed=4)
    L_meta = square_losses(parameters, meta_batch).mean()
    meta_gradient = torch.autograd.grad(L_meta, parameters["Theta"])[0]
    useful = []
    for L in square_losses(parameters, batch):
        gradient = torch.autograd.grad(L, parameters["Theta"], retain_graph=True)[0]
        G = gradient @ meta_gradient
        useful.append(G.clamp(min=0))
    assert 0 < np.count_nonzero(useful) < 5
    gain = mama.meta_gain(square_losses, parameters, batch, meta_batch)
    expected = 5 * torch.stack(useful) / sum(useful)
    assert_close(mama.l2rw_weights(gain), expected, 1e-9)


def test_l2rw_weights_are_0_where_no_step_helps():
    weights = mama.l2rw_weights(torch.tensor([-1.0, 0.0]))
    assert weights.tolist() == [0, 0]


# -------------------------------------- meta-data --------------------------------------------
def meta_of(*flags):
    """(train, evals, the meta-data, the evals that are left)."""
    args = mama.parse_args([*of_set(BASE, flags), *map(str, flags)])
    train, evals = common.open_data(args)
    return train, evals, *meta_data(train, evals, args)


NOISY = "--caption-noise 0.5 --clips 400 40 16 --meta-size 48".split()


def test_meta_data_are_clean_and_of_train():
    train, evals, meta, remaining = meta_of(*NOISY)
    assert len(meta) == 48
    assert any(train.column("noisy")) and not any(meta.column("noisy"))
    assert set(meta.column("key")) <= set(train.column("key"))
    assert remaining is evals


def test_meta_data_are_balanced():
    """Only a class without more clean examples may have fewer."""
    train, _, meta, _ = meta_of(*NOISY)
    is_clean = ~np.asarray(train.column("noisy"))
    clean = np.bincount(np.asarray(train.labels)[is_clean], minlength=24)
    counts = np.bincount(meta.labels, minlength=24)
    fair = np.minimum(clean, counts.max())
    assert (counts >= fair - 1).all()
    assert (counts == fair).mean() > 0.5


@pytest.mark.parametrize("column", ["noun", None])
def test_meta_data_of_unfolded_rows_are_of_as_many_clips(column):
    """With --unfold-captions the rows of a clip share its name; they would follow each other."""
    keys = [f"k{i}" for i in range(60)]
    table = common.make_table(
        [["one", "two", "three"]] * 60, keys, classes={"noun": ["cat", "dog", "owl"]},
        noun=np.arange(60) % 3)
    data = common.Data("own", "train", table).unfold()
    rows, _ = balanced_rows(data, 30, column)
    assert len({data.key(i) for i in rows}) == 30


def test_meta_data_of_val_leave_its_evaluation():
    flags = "--meta-set val --meta-size 10 --weighting none".split()
    _, evals, meta, remaining = meta_of(*flags)
    after = remaining["moving-emoji"]
    assert len(after["val"]) == 6
    assert set(after["val"].column("key")).isdisjoint(meta.column("key"))
    assert after["test"] is evals["moving-emoji"]["test"]


def test_eval_leaves_out_the_meta_data_of_val(tmp_path):
    flags = "--max-steps 2 --meta-set val --meta-size 10".split()
    summary = run_script(mama, tmp_path / "run", *flags, base=BASE)
    result = evaluated(tmp_path / "run", "--split", "val", "--tasks", "retrieval")["moving-emoji"]
    assert summary["val"]["moving-emoji"]["images"] == result["metrics"]["images"] == 6


def test_meta_data_by_name_leave_out_noisy_rows(tmp_path):
    names = tmp_path / "names.txt"
    rows = [29, *range(30)]
    names.write_text("".join(f"train {row}\n" for row in rows))
    train, _, meta, _ = meta_of("--meta-set", names, "--caption-noise", 0.3)
    is_noisy = train.column("noisy")[:30]
    assert 0 < is_noisy.sum() < 22
    clean_rows = np.flatnonzero(~is_noisy)
    assert meta.column("key") == [f"train {row}" for row in clean_rows]


@pytest.mark.parametrize("words, reason", [
    ("--meta-set names.txt", "1 of its 2 names are not in train, first 'nobody'"),
    ("--meta-size 4", "4 examples .*are fewer than --meta-batch-size 8"),
    ("--meta-set val --meta-size 99", "val has 16 examples")])
def test_too_little_meta_data_are_refused(words, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("train 1\nnobody\n")
    with pytest.raises(UserError, match=reason):
        meta_of(*words.split())


# -------------------------------------- runs -------------------------------------------------
def test_the_margin_and_the_weights_are_those_of_the_step(tmp_path):
    flags = "--max-steps 4 --weighting spl --a0 4".split()
    log = few_steps(mama, tmp_path / "run", *flags, base=BASE)
    for k, row in enumerate(log):
        assert row["w"] == (8 + 2 * k) / 16
        assert row["mu"] == pytest.approx(mama.margin(k, 4.0))


def test_matched_and_mismatched_losses_are_those_of_the_step(tmp_path):
    """A batch is all 64 clips."""
    flags = "--max-steps 2 --weighting none --batch-size 64 --caption-noise 0.2".split()
    train = common.load_data("moving-emoji", "train", clips=[64, 16, 16], caption_noise=0.2)
    num_swapped = np.sum(train.column("noisy"))
    for row in few_steps(mama, tmp_path / "run", *flags, base=BASE):
        assert row["loss"] == pytest.approx(row["L"], rel=1e-5)
        mismatched = num_swapped * row["L_mismatched"]
        matched = (64 - num_swapped) * row["L_matched"]
        assert 64 * row["L"] == pytest.approx(mismatched + matched)


RATE = 0.05  # of a step


class Watch:
    """What main reads, and its networks as they were before."""

    def __init__(self, monkeypatch):
        self.inputs = []
        inputs_of, net_of, build_model = mama.inputs_of, mama.WeightNet, common.build_model

        def watched_inputs(*args):
            self.inputs.append(inputs_of(*args))
            return self.inputs[-1]

        def watched_net(*args):
            self.trained_net = net_of(*args)
            self.net = copy.deepcopy(self.trained_net)
            return self.trained_net

        def watched_model(*args):
            model, tokenizer, transform = build_model(*args)
            self.model = copy.deepcopy(model)
            return model, tokenizer, transform

        monkeypatch.setattr(common, "learning_rate", lambda *_: RATE)
        monkeypatch.setattr(mama, "inputs_of", watched_inputs)
        monkeypatch.setattr(mama, "WeightNet", watched_net)
        monkeypatch.setattr(common, "build_model", watched_model)

    def losses(self):
        """The L_i of the first step, a function of parameters and inputs."""
        return mama.look_ahead_losses(self.model, loss_at(0.1, mama.margin(0, 0.1)))


STEP = (
    "--lr 0.5 --max-steps 1 --optimizer sgd --betas 0 0 --weight-decay 0 --grad-clip 0").split()


def test_a_step_of_main_is_algorithm_1(tmp_path, monkeypatch):
    """By autograd on what main read."""
    watch = Watch(monkeypatch)
    flags = [*STEP, "--weighting", "meta", "--meta-lr", 0.01]
    few_steps(mama, tmp_path / "run", *flags, base=BASE)
    batch, meta_batch = watch.inputs
    losses, net = watch.losses(), copy.deepcopy(watch.net)
    start = dict(watch.model.named_parameters())
    # Eqs. 9, 10, 12
    gradient = naive_gradient(losses, start, batch, meta_batch, net, RATE)
    for p, g in zip(net.parameters(), gradient):
        p.grad = g
    adam = torch.optim.AdamW(
        net.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-12, weight_decay=1e-3)
    adam.step()
    # Eq. 8
    Theta = leaves_of(start)
    L = losses(Theta, batch)
    w = net(L).detach()
    gradient = torch.autograd.grad((w * L).mean(), list(Theta.values()))
    Theta = moved(Theta, gradient, RATE)

    after = tensors_of(tmp_path / "run", 1)
    assert drift({name: after[f"model/{name}"] for name in Theta}, Theta, start) < 0.05
    # Adam: a gradient near 0 may turn its sign
    net_after, net_before = watch.trained_net.state_dict(), watch.net.state_dict()
    assert drift(net_after, net.state_dict(), net_before) < 0.1


def test_joint_weights_are_trained_with_the_encoders(tmp_path, monkeypatch):
    watch = Watch(monkeypatch)
    few_steps(mama, tmp_path / "run", *STEP, "--weighting", "joint", base=BASE)
    (batch,) = watch.inputs
    start = dict(watch.model.named_parameters())
    theta = dict(watch.net.named_parameters())
    Theta = leaves_of(start)
    L = watch.losses()(Theta, batch)
    w = watch.net(L.detach())
    loss = (w * L).mean()
    gradient = torch.autograd.grad(loss, list(Theta.values()), retain_graph=True)
    theta_gradient = torch.autograd.grad(loss, list(theta.values()))
    Theta = moved(Theta, gradient, RATE)
    theta_after = moved(theta, theta_gradient, RATE)

    after = tensors_of(tmp_path / "run", 1)
    assert drift({name: after[f"model/{name}"] for name in Theta}, Theta, start) < 0.05
    assert drift(dict(watch.trained_net.named_parameters()), theta_after, theta) < 0.05


def test_losses_and_weights_of_pairs_are_saved(tmp_path):
    folder = tmp_path / "run"
    for k, row in enumerate(few_steps(mama, folder, "--max-steps", 2, base=BASE)):
        pairs = load_file(folder / f"pairs_{k + 1}.safetensors")["pairs"]
        assert pairs.shape == (16, 3)
        losses, weights, _ = pairs.T
        assert row["L"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert row["w"] == pytest.approx(weights.mean().item(), rel=1e-5)


def test_the_look_ahead_is_fp32_under_mixed_precision(tmp_path, monkeypatch):
    """The passes of the virtual step, of the meta-data and of forward mode; the step is in bf16."""
    is_half, forward = [], common.TextEncoder.forward

    def watched_forward(tower, *args, **options):
        if tower.training:
            is_half.append(torch.is_autocast_enabled("cpu"))
        return forward(tower, *args, **options)

    monkeypatch.setattr(common.TextEncoder, "forward", watched_forward)
    few_steps(mama, tmp_path / "run", "--max-steps", "2", "--mixed-precision", "bf16", base=BASE)
    assert is_half == [False, False, False, True] * 2
