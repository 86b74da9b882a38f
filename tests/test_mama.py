"""MAMA: the loss against loops in float64, the weight network's gradient against second order and closed forms, other
weightings by hand, the meta-data, whole runs, resume, several processes, bad input."""

import copy
import json
import math
import time
from pathlib import Path

import common
from contrastive import data as data_sets
from contrastive import engine
from contrastive.encoders.base import SmallText, Transformer
from contrastive.engine.processes import UserError, write_json
from contrastive.evaluation.meta import balanced_rows, meta_data

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

import eval as eval_py
import helpers
import launch
import mama
from helpers import drift, equal_files, of_set, refused, run_script, steps, tensors_of, unit
from tools import figures as several
from tools import score

DRAWS = True  # main below says which runs do
CPU = torch.device("cpu")
BASE = ["--cpu", "--clips", "64", "16", "16", "--batch-size", "16", "--meta-batch-size", "8",
        "--meta-size", "24", "--log-every", "1", "--eval-every", "0"]


def pairs(n=12, d=6, noise=0.7, seed=0):
    """Videos and the texts near them, (n, d) float64; the last two pairs point away from each other."""
    video = unit(n, d, seed=seed)
    text = F.normalize(video + noise * unit(n, d, seed=seed + 1), dim=1)
    text[-2:] *= -1
    return video, text


# ---------------------------------------------------- margin and loss -----------------------------------------------
def test_margin_grows_from_two_elevenths_to_a_fifth():
    assert mama.margin(0) == pytest.approx(2 / 11) and mama.margin(10**6) == 0.2
    values = [mama.margin(k) for k in range(200)]
    assert values == sorted(values) and values[60] == pytest.approx(2 / (10 + math.exp(-6)), rel=1e-12)
    assert mama.margin(10**6, a2=-0.1) == pytest.approx(0, abs=1e-200)  # the values of Section 4.1 fall


def loop_loss(video, text, tau, mu):
    """Eqs. 1, 3 to 5 over Python floats, with acos as printed."""
    out = []
    for i in range(len(video)):
        total = 0.0
        for a, b in ((video, text), (text, video)):
            sims = [max(-1.0, min(1.0, float(a[i] @ b[j]))) for j in range(len(b))]
            angle = math.acos(sims[i])
            sims[i] = math.cos(max(angle - mu, 0)) if angle <= math.pi / 2 else sims[i]
            top = max(sims) / tau
            total -= sims[i] / tau - top - math.log(sum(math.exp(s / tau - top) for s in sims))
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("mu", [0.0, 0.2, 0.6, 1.5])
def test_loss_against_a_loop(mu, tau):
    video, text = pairs()
    video, text = 3 * video, 0.2 * text  # normalised inside
    expected = loop_loss(F.normalize(video, dim=1), F.normalize(text, dim=1), tau, mu)
    angles = torch.acos((F.normalize(video, dim=1) * F.normalize(text, dim=1)).sum(1))
    assert mu == 0 or (angles > math.pi / 2).any() and (angles[:-2] < 1.5).any()
    loss = mama.angular_margin_loss(video, text, tau, mu)
    assert loss.shape == (12,) and torch.allclose(loss, expected, rtol=1e-9, atol=1e-9)
    single = mama.angular_margin_loss(video.float(), text.float(), tau, mu)
    assert single.dtype == torch.float32 and torch.allclose(single.double(), expected, rtol=1e-4, atol=2e-5 / tau)
    in_blocks = mama.angular_margin_loss(video, text, tau, mu, block=5)
    assert torch.allclose(in_blocks, loss, rtol=1e-12, atol=1e-12)


def test_angles_inside_and_outside_of_the_margin():
    angles = torch.tensor([0.0, 0.1, 0.2, 0.3, math.pi / 2 - 1e-9, math.pi / 2 + 1e-9, 3.0], dtype=torch.float64)
    expected = [1.0, 1.0, 1.0, math.cos(0.1), math.sin(0.2), 0.0, math.cos(3.0)]
    cosines = angles.cos().requires_grad_()
    value = mama.angular_cosine(cosines, 0.2)
    assert value.tolist() == pytest.approx(expected, abs=1e-8)
    slope, = torch.autograd.grad(value.sum(), cosines)                     # sin(angle - mu) / sin(angle) in the cosine
    by_hand = [0.0, 0.0, math.sin(0.1) / math.sin(0.3), math.cos(0.2), 1.0, 1.0]  # less than 1: Theorem 1
    assert slope[[0, 1, 3, 4, 5, 6]].tolist() == pytest.approx(by_hand, abs=1e-7)


@pytest.mark.parametrize("mu", [0.0, 1e-4, 0.2])
def test_gradient_is_finite_at_both_ends(mu):
    same = unit(4, 5).float()
    for text in (same, -same):
        video, text = same.clone().requires_grad_(), text.clone().requires_grad_()
        loss = mama.angular_margin_loss(video, text, 0.01, mu)
        loss.sum().backward()
        assert all(torch.isfinite(x).all() for x in (loss, video.grad, text.grad))
    ends = torch.tensor([-1.0, 1.0, 1.0 + 1e-6, -1.0 - 1e-6], requires_grad=True)
    value = mama.angular_cosine(ends, mu)
    value.sum().backward()
    assert torch.isfinite(ends.grad).all() and value[1] == 1 and value[0] == -1


# ---------------------------------------------------- the weight network's gradient ----------------------------------
class Towers(nn.Module):
    """Transformers for both modalities, as a TwoTower takes its inputs."""

    def __init__(self):
        super().__init__()
        self.frame, self.blocks, self.text = nn.Linear(5, 16), Transformer(16, 1, 4), SmallText(30, 7, width=16)
        self.register_buffer("unused", torch.zeros(2))

    def forward(self, pixels, tokens):
        video = self.blocks(self.frame(pixels), pixels.new_ones(pixels.shape[:2]).bool()).mean(1)
        return video, self.text(**tokens)[1], None


def transformer_batch(n, seed, dtype):
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(7)[None] < 2 + torch.arange(n)[:, None] % 6
    return {"pixels": torch.randn(n, 4, 5, generator=g, dtype=torch.float64).to(dtype),
            "tokens": {"input_ids": torch.randint(1, 30, (n, 7), generator=g), "attention_mask": mask.long()}}


def transformer_case(dtype, n=6, m=5):
    torch.manual_seed(0)
    towers, net = Towers().to(dtype), mama.WeightNet(10).to(dtype)
    losses = mama.losses_of(towers, 0.2, 0.2, CPU)
    parameters = dict(towers.named_parameters())
    return losses, parameters, transformer_batch(n, 1, dtype), transformer_batch(m, 2, dtype), net, 0.05


def naive_gradient(losses, parameters, batch, meta_batch, weight_net, lr):
    """Algorithm 1 differentiated by autograd from end to end."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
        sample = losses(leaves, batch)
        objective = (weight_net(sample.detach()) * sample).mean()
        gradient = torch.autograd.grad(objective, list(leaves.values()), create_graph=True)
        virtual = {k: p - lr * g for (k, p), g in zip(leaves.items(), gradient)}
        return torch.autograd.grad(losses(virtual, meta_batch).mean(), list(weight_net.parameters()))


def relative(a, b):
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("method", ["forward", "second-order"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-8), (torch.float32, 1e-4)], ids=["fp64", "fp32"])
def test_weightnet_gradient_against_second_order(dtype, tolerance, method):
    case = transformer_case(dtype)
    before = copy.deepcopy(case[1])
    gradient, expected = mama.weightnet_gradient(*case, method), naive_gradient(*case)
    assert [g.shape for g in gradient] == [p.shape for p in case[4].parameters()]
    assert all(g.dtype == dtype and g.norm() > 1e-9 for g in expected) and relative(gradient, expected) < tolerance
    assert all(g.dtype == dtype for g in gradient)
    assert all(torch.equal(p, before[k]) and p.grad is None for k, p in case[1].items())
    assert all(p.grad is None for p in case[4].parameters())


def test_dropout_is_the_same_in_all_passes_and_the_random_state_stays():
    """With other masks in the directional derivative the gradient would be another."""
    losses, parameters, batch, meta, net, lr = transformer_case(torch.float64)
    towers = Towers().double()
    towers.text.norm = nn.Sequential(towers.text.norm, nn.Dropout(0.5))
    losses = mama.losses_of(towers.train(), 0.2, 0.2, CPU)
    case = losses, dict(towers.named_parameters()), batch, meta, net, lr
    torch.manual_seed(5)
    gradient, after = mama.weightnet_gradient(*case), torch.rand(1)
    torch.manual_seed(5)
    assert relative(gradient, naive_gradient(*case)) < 1e-8
    torch.manual_seed(5)
    assert after == torch.rand(1)


def test_statistics_of_the_towers_stay():
    """Batch statistics are those of the batch in each pass, and no pass moves the running ones."""
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision, self.text = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Linear(4, 8)

        def forward(self, pixels, tokens):
            return self.vision(pixels), self.text(tokens), None
    torch.manual_seed(0)
    towers, net = Normed().double(), mama.WeightNet(5).double()
    batch, meta = ({"pixels": unit(6, 4, seed=s), "tokens": unit(6, 4, seed=s + 1)} for s in (1, 3))
    before = copy.deepcopy(dict(towers.named_buffers()))
    case = mama.losses_of(towers, 0.2, 0.2, CPU), dict(towers.named_parameters()), batch, meta, net, 0.1
    gradient = mama.weightnet_gradient(*case)
    assert relative(gradient, naive_gradient(*case)) < 1e-8
    assert all(torch.equal(b, before[k]) for k, b in towers.named_buffers())


def linear_toy():
    """losses(parameters, (x, y)) = (x Theta - y)^2 / 2 per sample, and Theta (3,), a batch of 5 and meta-data of 4."""
    def losses(parameters, batch):
        x, y = batch
        return (x @ parameters["theta"] - y) ** 2 / 2
    theta = {"theta": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
    batch, meta = ((2 * unit(n, 3, seed=n), unit(1, n, seed=n + 9)[0]) for n in (5, 4))
    torch.manual_seed(1)
    return losses, theta, batch, meta, mama.WeightNet(7).double()


def closed_form(theta, batch, meta, net, alpha):
    """Eq. 12 by hand: the gradient for each parameter of the network."""
    (x, y), (xm, ym) = batch, meta
    error = x @ theta - y
    gradients = error[:, None] * x                                          # (B, 3) of each L_j
    weight = net(error ** 2 / 2)
    virtual = theta - alpha / len(x) * (weight.detach()[:, None] * gradients).sum(0)
    meta_gradient = ((xm @ virtual - ym)[:, None] * xm).mean(0)             # (3,)
    G = gradients @ meta_gradient                                           # (B,)
    total = [torch.zeros_like(p) for p in net.parameters()]
    for j in range(len(x)):
        dw = torch.autograd.grad(weight[j], list(net.parameters()), retain_graph=True)
        total = [t - alpha / len(x) * G[j] * d for t, d in zip(total, dw)]
    return total


@pytest.mark.parametrize("method", ["forward", "second-order"])
def test_algorithm_1_on_a_linear_toy(method):
    losses, theta, batch, meta, net = linear_toy()
    expected = closed_form(theta["theta"], batch, meta, net, 0.1)
    gradient = mama.weightnet_gradient(losses, theta, batch, meta, net, 0.1, method)
    assert relative(gradient, expected) < 1e-12 and all(g.norm() > 1e-6 for g in gradient)


# ---------------------------------------------------- other weightings -----------------------------------------------
def test_focal_weights_by_hand():
    p = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)  # of the pair, the same in both directions
    assert mama.focal_weights(-2 * p.log()).tolist() == pytest.approx([0, 0.01, 0.25, 0.81])
    assert mama.focal_weights(-2 * p.log(), 1).tolist() == pytest.approx([0, 0.1, 0.5, 0.9])
    assert mama.focal_weights(-2 * p.log(), 0).tolist() == [1.0] * 4


def test_spl_weights_by_hand():
    losses = torch.tensor([3.0, 1.0, 4.0, 2.0])
    assert mama.spl_weights(losses, 0.5).tolist() == [0, 1, 0, 1]
    assert mama.spl_weights(losses, 0.75).tolist() == [1, 1, 0, 1]
    assert mama.spl_weights(losses, 1.0).tolist() == [1] * 4 and mama.spl_weights(losses, 0.0).tolist() == [0, 1, 0, 0]


def test_l2rw_weights_by_hand():
    losses, theta, (x, y), (xm, ym), _ = linear_toy()
    y = torch.cat([(2 * x @ theta["theta"] - y)[:2], y[2:]])  # steps on the first two harm the meta-data
    error, meta_gradient = x @ theta["theta"] - y, ((xm @ theta["theta"] - ym)[:, None] * xm).mean(0)
    useful = (error[:, None] * x @ meta_gradient).clamp(min=0)  # at Theta itself, not at a virtual step
    assert 0 < (useful > 0).sum() < 5
    weights = mama.l2rw_weights(losses, theta, (x, y), (xm, ym))
    assert torch.allclose(weights, 5 * useful / useful.sum(), rtol=1e-12)
    opposite = xm, 2 * xm @ theta["theta"] - ym  # the meta gradient turned round
    assert (mama.l2rw_weights(losses, theta, (x, y), opposite) > 0).tolist() == (useful == 0).tolist()
    nothing = xm, xm @ theta["theta"]
    assert mama.l2rw_weights(losses, theta, (x, y), nothing).tolist() == [0] * 5


# ---------------------------------------------------- meta-data ------------------------------------------------------
def arguments(*flags):
    return mama.parse_args([*of_set(BASE, flags), *flags])


def meta_of(train, evals, args):
    return meta_data(train, evals, args.dataset, args.meta_set, args.meta_size, args.meta_batch_size, args.task)


def test_meta_data_are_clean_balanced_and_stay_in_train():
    args = arguments("--caption-noise", "0.5", "--clips", "400", "40", "16", "--meta-size", "48")
    train, evals = data_sets.open_data(args)
    meta, rest = meta_of(train, evals, args)
    assert len(meta) == 48 and not any(meta.column("noisy")) and any(train.column("noisy"))
    assert set(meta.column("key")) <= set(train.column("key")) and rest is evals
    counts = np.bincount(meta.labels, minlength=24)
    clean = np.bincount(np.asarray(train.labels)[~np.asarray(train.column("noisy"))], minlength=24)
    short = clean < counts.max()  # only a class that has no more may have fewer, and then by more than one
    assert (counts[~short] >= counts.max() - 1).all() and (counts[short] == clean[short]).sum() >= short.sum() - 1
    again, _ = meta_of(train, evals, args)
    assert again.column("key") == meta.column("key") and "known to be clean" in meta.note


def test_rows_without_a_class_are_no_class_of_the_meta_data():
    table = common.make_table([["x"]] * 9, [f"{k}.png" for k in range(9)], label=[-1] * 6 + [0, 0, 1],
                              classes={"label": ["a", "b"]})
    rows, _ = balanced_rows(common.Data("x", "train", table), 3)
    assert rows.tolist() == [6, 7, 8]


def test_meta_data_of_val_leave_every_evaluation():
    for weighting in ("meta", "none"):
        args = arguments("--meta-set", "val", "--meta-size", "10", "--weighting", weighting)
        train, evals = data_sets.open_data(args)
        meta, rest = meta_of(train, evals, args)
        assert len(rest["moving-emoji"]["val"]) == 6 and len(evals["moving-emoji"]["val"]) == 16
        assert rest["moving-emoji"]["test"] is evals["moving-emoji"]["test"]
        assert not set(meta.column("key")) & set(rest["moving-emoji"]["val"].column("key"))


def test_meta_data_by_name(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("".join(f"train {i}\n" for i in (9, 3, 5, 9, 7, 8, 1, 2, 0)))
    args = arguments("--meta-set", str(names))
    train, evals = data_sets.open_data(args)
    assert meta_of(train, evals, args)[0].column("key") == [f"train {i}" for i in (0, 1, 2, 3, 5, 7, 8, 9)]
    names.write_text("train 1\nnobody\n")
    with pytest.raises(UserError, match="1 of its 2 names are not in train, first 'nobody'"):
        meta_of(train, evals, args)


# ---------------------------------------------------- runs -----------------------------------------------------------
def main(folder, *flags, pictures=False):
    return run_script(mama, folder, *flags, base=BASE, pictures=pictures)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, main(folder, "--max-steps", "4", pictures=True)


def test_a_run_leaves_weights_and_pictures(run):
    folder, summary = run
    assert summary["method"] == "mama" and summary["steps"] == 4
    assert {"curves.png", "weights.png", "retrieval.png", "weights.safetensors"} <= {p.name for p in folder.iterdir()}
    for row in steps(folder):
        assert 0 < row["w_mismatched"] < 1 and 0 < row["w_matched"] < 1
        assert row["mu"] == pytest.approx(mama.margin(row["step"] - 1, 0.1))
    tensors = load_file(folder / "weights.safetensors")
    assert tensors["curves"].shape == (4, 65) and tensors["curves"][:, 0].tolist() == [1, 2, 3, 4]
    assert not torch.equal(tensors["curves"][0, 1:], tensors["curves"][3, 1:])
    assert tensors["last_batch"].shape == (16, 3)


OTHER = {"joint": ["--weighting", "joint"], "focal": ["--weighting", "focal"],
         "gamma": ["--weighting", "focal", "--focal-gamma", "1"], "spl": ["--weighting", "spl"],
         "spl start": ["--weighting", "spl", "--spl-start", ".9"], "l2rw": ["--weighting", "l2rw"],
         "none": ["--weighting", "none"], "constant": ["--margin-schedule", "constant"],
         "no margin": ["--margin-schedule", "none"], "a0": ["--a0", "4"], "a1": ["--a1", "5"], "a2": ["--a2", "1"],
         "tau": ["--tau", ".2"], "meta lr": ["--meta-lr", ".1"], "virtual lr": ["--virtual-lr", "5"],
         "meta size": ["--meta-size", "9"], "meta batch": ["--meta-batch-size", "12"], "every": ["--meta-every", "2"],
         "meta set": ["--meta-set", "val", "--meta-size", "8"], "infonce": ["--loss", "infonce"],
         "learnt tau": ["--learnable-tau"], "weight": ["--contrastive-weight", "2"]}


@pytest.mark.parametrize("name", OTHER)
def test_every_flag_has_an_effect(run, name, tmp_path):
    main(tmp_path / "other", "--max-steps", "4", *OTHER[name])
    ours, theirs = steps(run[0]), steps(tmp_path / "other")
    column = "mu" if name.startswith("a") else "loss"  # in four steps hardly a pair is as near as the margin's change
    assert len(theirs) == 4 and ours[-1][column] != theirs[-1][column]
    if name == "spl":
        assert [r["w"] for r in theirs] == [k / 16 for k in (8, 10, 12, 14)]
    if name in ("none", "infonce"):
        assert all(r["loss"] == pytest.approx(r["L"], rel=1e-5) and r["w"] == 1 for r in theirs)
    if name == "l2rw":
        assert all(r["w"] == pytest.approx(1, rel=1e-5) for r in theirs)


@pytest.mark.parametrize("weighting", ["none", "meta"])
def test_a_learnt_tau_takes_the_step_of_its_gradient(weighting, tmp_path, monkeypatch, capsys):
    """CLIP-ViP's row: log tau - lr d L / d log tau, within its limits; the look ahead does not move it."""
    seen, loss_of = [], mama.angular_margin_loss
    monkeypatch.setattr(mama, "angular_margin_loss", lambda v, t, tau, mu: (
        seen.append((v.detach(), t.detach(), tau.item(), mu)), loss_of(v, t, tau, mu))[1])
    main(tmp_path / "r", *"--max-steps 2 --learnable-tau --optimizer sgd --beta1 0 --lr 0.5 --grad-clip 0".split(),
         *"--warmup-epochs 0 --lr-schedule constant --weighting".split(), weighting)
    rows, net = steps(tmp_path / "r"), len(seen) // 2                      # losses of a step; its own is the last
    for k, after in enumerate(row["tau"] for row in rows):
        video, text, tau, mu = seen[net * k + net - 1]
        log_tau = torch.tensor(math.log(tau), requires_grad=True)
        loss = loss_of(video, text, log_tau.exp(), mu)
        weight = rows[k]["loss"] / rows[k]["L"]                            # about 1/2, nearly the same for all
        slope, = torch.autograd.grad(weight * loss.mean(), log_tau)
        assert abs(after / tau - 1) > 1e-3 and math.log(after / tau) == pytest.approx(-0.5 * slope.item(), rel=0.05)
    assert load_file(tmp_path / "r" / "own.safetensors")["tau.log_tau"].exp().item() == pytest.approx(rows[-1]["tau"])
    capsys.readouterr()
    assert helpers.refused(mama.parse_args, ["--learnable-tau", "--tau", "2"], capsys).startswith("error: --tau")


def test_eval_leaves_the_meta_data_of_val_out(tmp_path):
    summary = main(tmp_path / "run", "--max-steps", "2", "--meta-set", "val", "--meta-size", "10", "--text-length", "8")
    flags = ["--checkpoint", str(tmp_path / "run"), "--cpu", "--split", "val", "--tasks", "retrieval"]
    result = eval_py.main(eval_py.parse_args([*flags, "--output-dir", str(tmp_path / "eval")]))
    assert summary["val"]["moving-emoji"]["images"] == result["datasets"]["moving-emoji"]["metrics"]["images"] == 6


def test_two_processes_learn_as_one(tmp_path):
    """After five steps: SGD, so that the towers are as near as the gradients are, and Adam for the weight network."""
    five = "--max-steps 5 --optimizer sgd --lr .02 --grad-clip 0 --meta-lr .01 --warmup-epochs 0".split()
    runs = {"start": (1, "--lr", "0", "--meta-lr", "0"), "one": (1,), "two": (2,)}
    for name, (processes, *more) in runs.items():
        flags = [*BASE, *five, *more, "--output-dir", str(tmp_path), "--run-name", name]
        launch.finish("mama", flags, tmp_path / "log.txt", processes)

    def part(name, kind):
        state = tensors_of(tmp_path / name, 5)
        return {k: v for k, v in state.items() if k.startswith(kind)}
    ours = [r["w"] for r in steps(tmp_path / "one")]
    assert len(ours) == 5 and abs(ours[0] - ours[-1]) > 0.1
    for kind, near in (("model/", 0.05), ("own/", 0.2)):  # Adam: a gradient near 0 may turn its sign
        assert drift(part("two", kind), part("one", kind), part("start", kind)) < near, kind
    assert [r["w"] for r in steps(tmp_path / "two")] == pytest.approx(ours, rel=1e-2)


@pytest.mark.parametrize("weighting", ["meta", "joint"])
def test_a_step_of_main_is_algorithm_1(weighting, tmp_path, monkeypatch):
    """Two steps of plain SGD, the second at half the rate, recomputed from the batches that main read, by autograd from
    end to end."""
    seen, inputs_of, loss_of, net_of = {"inputs": []}, mama.inputs_of, mama.losses_of, mama.WeightNet

    def watch_inputs(*args):
        seen["inputs"].append(inputs_of(*args))
        return seen["inputs"][-1]

    def watch_net(*args):
        seen["net"] = net_of(*args)
        seen["first net"] = copy.deepcopy(seen["net"])
        return seen["net"]

    def watch_towers(module, *args, towers=engine.run.Run.towers):
        out = towers(module, *args)
        seen["tower"] = copy.deepcopy(out[0])
        return out
    monkeypatch.setattr(mama, "inputs_of", watch_inputs)
    monkeypatch.setattr(mama, "WeightNet", watch_net)
    monkeypatch.setattr(engine.run.Run, "towers", watch_towers)
    rates = 0.05, 0.025
    main(tmp_path / "run", "--weighting", weighting, "--lr", str(rates[0]),
         *"--max-steps 2 --optimizer sgd --beta1 0 --lr-schedule linear --lr-end 0 --warmup-epochs 0".split(),
         *"--weight-decay 0 --grad-clip 0".split(),
         *("--meta-lr 0.01".split() if weighting == "meta" else ()))
    net, start = seen["first net"], copy.deepcopy(seen["first net"].state_dict())
    theta = dict(seen["tower"].named_parameters())
    adam = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-12, weight_decay=1e-3)
    read = seen["inputs"]  # with meta-data before each batch of it
    pairs_read = zip(read[::2], read[1::2]) if weighting == "meta" else ((batch, None) for batch in read)
    for k, (lr, (batch, meta)) in enumerate(zip(rates, pairs_read, strict=True)):
        losses = loss_of(seen["tower"], 0.1, mama.margin(k, 0.1), CPU)
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
                for p, g in zip(net.parameters(), gradients[len(leaves):]):
                    p -= lr * g
    assert k == 1
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert drift({name: saved[name] for name in theta}, theta, dict(seen["tower"].named_parameters())) < 0.05
    assert drift(seen["net"].state_dict(), net.state_dict(), start) < 0.1  # Adam: a gradient near 0 may turn its sign


def test_the_look_ahead_is_fp32_under_mixed_precision(tmp_path, monkeypatch):
    """Passes over the virtual step's batch, the meta-data and in forward mode, then the step itself in bf16."""
    halves, forward = [], common.TextEncoder.forward

    def watch(tower, *args, **more):
        if tower.training:
            halves.append(torch.is_autocast_enabled("cpu"))
        return forward(tower, *args, **more)
    monkeypatch.setattr(common.TextEncoder, "forward", watch)
    main(tmp_path / "run", "--max-steps", "2", "--mixed-precision", "bf16")
    assert halves == [False, False, False, True] * 2


def test_a_stream_trains_without_a_look_ahead(tmp_path):
    for shard in range(2):
        samples = helpers.tar_samples(range(40 * shard, 40 * shard + 40), "png", "txt")
        helpers.write_tar(tmp_path / "data" / f"train-{shard:03}.tar", samples)
    flags = ["--dataset", str(tmp_path / "data"), "--streaming", "--workers", "0", "--batch-size", "8"]
    flags += ["--cpu", "--max-steps", "2", "--log-every", "1", "--output-dir", str(tmp_path)]
    mama.main(mama.parse_args([*flags, "--weighting", "focal", "--run-name", "run"]))
    log = steps(tmp_path / "run")
    assert [row["step"] for row in log] == [1, 2] and all("w_mismatched" not in row for row in log)
    with pytest.raises(UserError, match="--meta-set train: .* has no such split"):
        mama.main(mama.parse_args(flags))


def test_hidden_units_begin_all_along_the_losses():
    torch.manual_seed(0)
    layer = mama.WeightNet(200).layers[0]
    begin = -layer.bias / layer.weight[:, 0]
    assert begin.min() > -1e-4 and begin.max() < 10 + 1e-4
    assert ((begin > 5).double().mean() - 0.5).abs() < 0.1


# ---------------------------------------------------- resume and several processes -----------------------------------
LONG = [*BASE, *"--max-steps 9 --save-every 3 --meta-every 2 --clips 96 16 16".split()]


def test_killed_and_resumed_is_the_uninterrupted_run(tmp_path):
    """Bitwise: towers, weight network, both optimisers, random state, the curves for the pictures."""
    where = ["--output-dir", str(tmp_path)]
    killed = launch.start("mama", [*LONG, *where, "--run-name", "killed"], tmp_path / "killed.txt", hold=8)
    while not any(r["step"] >= 4 for r in steps(tmp_path / "killed")):
        assert killed.is_alive(), (tmp_path / "killed.txt").read_text()[-3000:]
        time.sleep(0.005)
    killed.kill()
    killed.join(300)
    last = next(iter(engine.checkpoints.checkpoints_of(tmp_path / "killed")), None)
    assert last and last.stem in ("step_3", "step_6"), "killed too early or too late"
    main(tmp_path / "whole", *LONG[len(BASE):])
    launch.finish("mama", ["--resume", str(tmp_path / "killed")], tmp_path / "resumed.txt")
    ours, theirs = (tmp_path / r / "checkpoints/step_9.pt" for r in ("whole", "killed"))
    assert equal_files(ours, theirs)
    a = tensors_of(tmp_path / "whole", 9)
    assert {k.split("/")[0] for k in a} == {"model", "own", "optimizer", "second", "tensors", "processes"}
    assert {"second/state/0/exp_avg", "second/state/3/step", "tensors/curves", "processes/0/cpu"} <= a.keys()
    timeless = ("step_s", "data_s", "samples_per_s")
    ours, theirs = ({r["step"]: {k: v for k, v in r.items() if k not in timeless} for r in steps(tmp_path / name)}
                    for name in ("whole", "killed"))
    assert ours == theirs


def part_of(batch, rows):
    return {"pixels": batch["pixels"][rows], "tokens": {k: v[rows] for k, v in batch["tokens"].items()}}


def gradients(rows_of):
    """What the public functions give for these rows of a batch of 6 and meta-data of 4: forward, second order, L2RW."""
    losses, parameters, batch, meta, net, lr = transformer_case(torch.float64, 6, 4)
    case = losses, parameters, part_of(batch, rows_of(6)), part_of(meta, rows_of(4))
    out = {m: mama.weightnet_gradient(*case, net, lr, m) for m in ("forward", "second-order")}
    return out | {"l2rw": [mama.l2rw_weights(*case)], "spl": [mama.spl_weights(losses(parameters, case[2]), 0.5)]}


def compare(rank, folder):
    torch.set_num_threads(1)
    alone = gradients(slice)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    both = gradients(lambda n: slice(rank * n // 2, (rank + 1) * n // 2))
    mine = slice(rank * 3, rank * 3 + 3)
    out = {m: relative(both[m], alone[m]) for m in ("forward", "second-order")}
    out |= {k: (both[k][0] - alone[k][0][mine]).abs().max().item() for k in ("l2rw", "spl")}
    Path(folder, f"{rank}.json").write_text(json.dumps(out | {"weights": alone["l2rw"][0].tolist()}))
    dist.destroy_process_group()


def test_meta_gradients_on_two_processes_are_those_of_one(tmp_path):
    mp.spawn(compare, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        out = json.loads((tmp_path / f"{rank}.json").read_text())
        assert any(out.pop("weights")) and max(out.values()) < 1e-10, out


# ---------------------------------------------------- flags ----------------------------------------------------------
BAD = {
    ("--chunk-size", "4", "--weighting", "l2rw"): "--chunk-size: --weighting l2rw encodes",
    ("--loss", "infonce", "--weighting", "meta"): "--weighting: only with --loss mama",
    ("--a0", "20"): "--a0 20 --a1 10: the margin a0 / a1 must be at most pi / 2",
    ("--weighting", "l2rw", "--meta-every", "2"): "--meta-every: only with --weighting meta",
    ("--chunk-size", "4"): "--chunk-size: --weighting meta encodes the whole batch",
    ("--eta", "2"): "--eta: only with --task qa-open or qa-choice; it would have no effect",
    ("--focal-gamma=2",): "--focal-gamma: only with --weighting focal",
    ("--spl-start", ".5"): "--spl-start: only with --weighting spl",
    ("--answers", "9"): "--answers: only with --task qa-open", ("--fusion-layers", "3"): "--fusion-layers: only where",
    ("--weighting", "none", "--meta-lr", "1"): "--meta-lr: only with --weighting meta;",
    ("--weighting", "none", "--meta-batch-size", "8"): "--meta-batch-size: only with --weighting meta or l2rw",
    ("--meta-set", __file__, "--meta-size", "24"):
        "--meta-size: only with --weighting meta or l2rw and --meta-set train or val",
    ("--margin-schedule", "none", "--a0", "1"): "--a0: only with a margin",
    ("--margin-schedule", "constant", "--a2", "1"): "--a2: only with --margin-schedule logistic"}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags(flags, capsys):
    assert BAD[flags] in refused(mama.parse_args, [*of_set(BASE, flags), *flags], capsys)


def test_too_little_meta_data(tmp_path):
    for flags, words in ((["--meta-size", "4"], "4 examples, fewer than --meta-batch-size 8"),
                         (["--meta-set", "val", "--meta-size", "99"], "val has 16 examples, so none would be left")):
        with pytest.raises(UserError, match=words):
            main(tmp_path / "run", "--max-steps", "2", *flags)
        assert not (tmp_path / "run").exists()


def test_recipes_are_the_paper_s():
    for name, epochs in (("msrvtt", 5.0), ("didemo", 20.0), ("activitynet", 20.0)):
        args = mama.parse_args(["--dataset", name])
        assert (args.lr, args.weight_decay, args.batch_size, args.epochs) == (5e-6, 5e-2, 4, epochs)
        assert (args.tau, args.a0, args.a1, args.a2, args.frames, args.image_size, args.text_length) == (
            1.0, 2.0, 10.0, 0.1, 12, 224, 70)
        assert args.weighting == "meta" and args.meta_lr == args.lr and args.virtual_lr == 0
        assert mama.RECIPES[name]["recipe"].startswith("paper")
    assert not mama.RECIPES["msvd"]["recipe"].startswith("paper")


def test_random_guess():
    args = mama.parse_args(["--dataset", "msrvtt"])
    n, mu = args.batch_size, 0.2
    expected = 2 * -math.log(math.exp(math.sin(mu)) / (math.exp(math.sin(mu)) + n - 1))
    assert mama.random_guess(mu, args) == pytest.approx(expected)
    assert mama.random_guess(0.0, args) == pytest.approx(2 * math.log(n))


# ---------------------------------------------------- pictures of several runs --------------------------------------
def folder_of(path, val=10.0, **flags):
    """What tools.figures margins reads of a finished run."""
    path.mkdir(parents=True)
    args = dict(margin_schedule="logistic", a0=2.0, a1=10.0, a2=0.1, seed=0, task="retrieval", dataset="set", tau=0.1)
    write_json(path / "args.json", args | {"run_name": path.name, "changed": [path.name]} | flags)
    write_json(path / "summary.json", {"val": {"set": {"text_to_image": {"R@1": val}, "accuracy": val + 1}}})
    return str(path)


def test_margins_of_several_runs(tmp_path, capsys):
    folders = [folder_of(tmp_path / "none", 5, margin_schedule="none"), folder_of(tmp_path / "one", 10),
               folder_of(tmp_path / "two", 20, seed=1), folder_of(tmp_path / "wide", 8, a0=4.0),
               folder_of(tmp_path / "slow", 9, a2=0.01), folder_of(tmp_path / "still", 12, margin_schedule="constant")]
    several.main(["margins", *folders, "--out", str(tmp_path / "a.png")])
    said = capsys.readouterr().out
    over = "margin (Fig. 4, left), a2 = 0.1: "
    assert f"{over}0: 5.00 (1 runs)\n" in said and f"{over}0.2: 15.00 (2 runs)\n" in said
    assert f"{over}0.4: 8.00" in said and "(Fig. 4, left), constant: 0.2: 12.00" in said
    assert "middle), mu = 0.2: 0.01: 9.00" in said and "middle), mu = 0.2: 0.1: 15.00 (2 runs)" in said
    assert "mu = 0.4" not in said and (tmp_path / "a.png").stat().st_size > 5000
    with pytest.raises(UserError, match=r"differ in --tau \(0.2, 0.1\)"):
        several.main(["margins", folders[1], folder_of(tmp_path / "tau", tau=0.2), "--out", str(tmp_path / "b.png")])


def test_queries_without_a_class_are_no_concept(tmp_path, capsys):
    """Class -1 is no name of the last class; further pairs, which have no classes, take none away."""
    splits = ["train"] * 10 + ["val"] * 2 + ["test"] * 6
    rows = [(name, f"words {k}", "" if k in (0, 14) else "ab"[k % 2], splits[k])
            for k, name in enumerate(helpers.write_images(tmp_path, range(18)))]
    helpers.write_rows(tmp_path / "own.csv", ["image", "caption", "label", "split"], rows)
    more = [(f"b/{name}", "x") for name in helpers.write_images(tmp_path / "b", range(30, 50))]
    helpers.write_rows(tmp_path / "more.csv", ["image", "caption"], more)
    main(tmp_path / "r", "--dataset", str(tmp_path / "own.csv"), "--extra-pairs", str(tmp_path / "more.csv"),
         "--weighting", "none", "--max-steps", "1")
    found, right, share, keys = several.hits(tmp_path / "r")
    assert sorted(found) == ["a", "a", "b", "b", "b"] and len(keys) == len(right) == 5 and "014.png" not in keys
    assert share == {"a": 0.4, "b": 0.5}
    assert "1 of 6 queries have no label and are left out" in capsys.readouterr().out


def test_scores_are_of_a_clip_s_own_captions(tmp_path):
    """Whatever captions the run has swapped, and with a row for each of them."""
    args = vars(arguments("--caption-noise", "0.9", "--unfold-captions"))
    write_json(tmp_path / "args.json", args)
    data = score.data_of(tmp_path, "train")
    clean = common.load_data("moving-emoji", "train", clips=args["clips"])
    assert data.column("captions") == clean.column("captions") and list(data.keys()) == list(clean.keys())


def test_gain_by_concept(run, tmp_path):
    base, other = np.array([0, 1, 0, 0, 1.0]), np.array([1, 1, 0, 1, 0.0])
    found = several.gains(np.array(["a", "a", "a", "b", "c"]), base, other, {"a": 0.5, "b": 0.3, "c": 0.2})
    assert found == [(0.5, 1, 2, 3, "a"), (0.3, 0, 1, 1, "b"), (0.2, 1, 0, 1, "c")]
    assert [several.relative(a, b) for _, a, b, *_ in found] == [100, pytest.approx(math.nan, nan_ok=True), -100]
    assert [(name, g) for name, *_, g in several.thirds(found)] == [("frequent", 100), ("rare", 0)]
    folder, summary = run
    main(tmp_path / "other", "--max-steps", "4", "--margin-schedule", "none")
    several.main(["concepts", str(folder), str(tmp_path / "other"), "--out", str(tmp_path / "c.png")])
    ours = summary["test"]["moving-emoji"]["text_to_image"]["R@1"]
    _, hits, share, _ = several.hits(folder)
    assert 100 * hits.mean() == pytest.approx(ours) and sum(share.values()) == pytest.approx(1)
    assert (tmp_path / "c.png").stat().st_size > 5000
    main(tmp_path / "fewer", "--max-steps", "1", "--clips", "64", "24", "9", "--weighting", "none")
    with pytest.raises(UserError, match="its test queries and their concepts are not those of"):
        several.main(["concepts", str(folder), str(tmp_path / "fewer")])
