"""TS: schedule and losses against loops, MoCo's queue, SDCLR's branches, the tested weights."""

import copy
import json
import math
from types import SimpleNamespace

import common
from contrastive.core.processes import UserError
from contrastive.encoders.models import model_of_spec
from contrastive.evaluation.measure import Evaluator
from contrastive.figures import ts as figures
from contrastive.papers.ts_records import cosine_counts, coverage

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import helpers
import temperature_schedules as ts
from helpers import (
    few_steps, panel, refused, rows, run_script, steps, tensors_of, unit, write_files,
    write_images)
from tools import figures as figure_program
from variants import sdclr

N, D, K = 5, 4, 7
MOVING = (
    "--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --frames 2 --image-size 16 "
    "--batch-size 16 --eval-every 0 --log-every 1"
).split()  # two steps an epoch


# ---------------------------------------------------- method --------------------------------------
def temperatures(schedule, epochs, **options):
    return [ts.temperature(epoch, schedule, **options) for epoch in epochs]


def test_the_schedules_by_hand():
    cosine = temperatures("cos", (0, 100, 200, 280, 400, 600))  # 0, T/4, T/2, 0.7 T, T, 1.5 T
    at_280 = 0.1 + 0.45 * (1 + math.cos(1.4 * math.pi))
    assert cosine == pytest.approx([1.0, 0.55, 0.1, at_280, 1.0, 0.1])
    limits = dict(tau_min=0.1, tau_max=0.5, period=4)
    assert temperatures("step", range(5), **limits) == [0.1, 0.1, 0.5, 0.5, 0.1]
    triangle = temperatures("oscillating", range(5), **limits)
    assert triangle == pytest.approx([0.5, 0.3, 0.1, 0.3, 0.5])


def test_a_random_schedule_is_drawn_from_seed_and_epoch():
    limits = dict(tau_min=0.1, tau_max=0.5)
    draws = temperatures("random", range(200), seed=3, **limits)
    assert draws == temperatures("random", range(200), seed=3, **limits)
    assert draws != temperatures("random", range(200), seed=4, **limits)
    assert 0.1 <= min(draws) < 0.12
    assert 0.48 < max(draws) <= 0.5


def test_a_schedule_that_does_not_exist():
    with pytest.raises(ValueError, match="schedule='linear': give 'cos', 'step'"):
        ts.temperature(0, "linear")


def test_nt_xent_against_a_loop():
    z1, z2 = unit(N, D, seed=1), unit(N, D, seed=2)
    tau = torch.rand(N, dtype=torch.float64) + 0.1
    z, total = torch.cat([z1, z2]), 0.0
    for i in range(2 * N):
        logits = {j: float(z[i] @ z[j]) / float(tau[i % N]) for j in range(2 * N) if j != i}
        total += -logits[(i + N) % (2 * N)] + math.log(sum(math.exp(x) for x in logits.values()))
    terms = {}
    loss = ts.nt_xent(3 * z1, z2, tau, terms=terms)
    assert loss.item() == pytest.approx(total / (2 * N))
    assert terms == {"L_c": loss}


def test_moco_loss_against_a_loop():
    q = unit(N, D, seed=1).requires_grad_()
    k = unit(N, D, seed=2).requires_grad_()
    queue = unit(K, D, seed=3)
    tau, total = torch.rand(N, dtype=torch.float64) + 0.1, 0.0
    for i in range(N):
        logits = [(q[i] @ x).item() / tau[i].item() for x in (k[i], *queue)]
        total += -logits[0] + math.log(sum(math.exp(x) for x in logits))
    terms = {}
    loss = ts.moco_loss(q, 2 * k, queue, tau, terms=terms)
    loss.backward()
    assert loss.item() == pytest.approx(total / N)
    assert terms == {"L_c": loss}
    assert k.grad is None
    assert q.grad.abs().sum() > 0


def test_coarse_temperature_by_hand():
    tau = ts.coarse_temperature(torch.tensor([0, 3, 1, 2]), {0, 1}, 1.0, 0.1)
    assert tau.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])


def test_coverage_by_hand():
    part, images = coverage(torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1)))
    assert part > 0.7
    assert sum(images) == 20_000
    assert len(images) > 450
    assert images == sorted(images, reverse=True)
    one = torch.randn(1, 8).expand(30, 8)
    assert coverage(one) == (pytest.approx(1 / 500), [30])
    assert coverage(torch.cat([one, -one])) == (pytest.approx(2 / 500), [30, 30])


def test_cosine_counts_by_hand():
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [0.0, 3.0]])
    counts = cosine_counts(z, bins=5)  # cosines: 1 once, -1 twice, 0 three times
    assert counts == [2, 0, 3, 0, 1]
    assert sum(cosine_counts(torch.randn(50, 3), limit=9)) == 36


# ---------------------------------------------------- SDCLR ---------------------------------------
def test_prune_masks_keep_the_largest_weights_of_all_layers_together():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(20, 5)
    )
    with torch.no_grad():
        net[0].weight.uniform_(2, 3)
        net[2].weight.uniform_(-1, 1)
    masks = sdclr.PruneMasks(net)
    assert masks.names == ["0.weight", "2.weight"]
    masks.prune(net, 0.25)
    assert masks["0.weight"].all()
    assert (~masks["2.weight"]).sum() == math.ceil(0.25 * 208)  # the small ones alone
    sizes, mask = net[2].weight.abs(), masks["2.weight"]
    assert sizes[mask].min() >= sizes[~mask].max()
    for fraction, num_weights in ((0, 208), (1, 1)):
        masks.prune(net, fraction)
        assert sum(mask.sum() for mask in masks.buffers()) == num_weights


def resnet():
    spec = dict(
        image_encoder="resnet18-cifar",
        text_encoder="",
        embed_dim=0,
        image_size=16,
        image_stats="imagenet",
        eval_resize="crop",
    )
    return model_of_spec(spec, None, False)[0]


def network(encoder, kind=ts.SimCLRNet):
    return kind(encoder, ts.simclr_head(encoder.vision.width, 8, "batch")).double().train()


def test_sdclr_s_branches_against_two_networks():
    """Shared weights, masked in the second; BatchNorms, weights and statistics, of each alone."""
    torch.manual_seed(0)
    model = network(resnet(), sdclr.SDCLRNet)
    names = model.norm_names
    for norm in (*map(model.get_submodule, names), *model.norms):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    masks, pixels = sdclr.PruneMasks(model.encoder), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    masks.prune(model.encoder, 0.9)

    # the plain way: two networks
    dense = network(copy.deepcopy(model.encoder))
    dense.head.load_state_dict(model.head.state_dict())
    sparse = copy.deepcopy(dense)
    assert len(names) == len(model.norms) == 22  # 20 of the encoder, 2 of the head
    for name, norm in zip(names, model.norms):
        sparse.get_submodule(name).load_state_dict(norm.state_dict())
    with torch.no_grad():
        for name in masks.names:
            sparse.encoder.get_parameter(name).mul_(masks[name])
    ts.nt_xent(dense(pixels[:4]), sparse(pixels[4:]), 0.2).backward()

    ts.nt_xent(*sdclr.encode(model, masks, pixels[:4], pixels[4:]), 0.2).backward()
    norm_parameters = {f"{name}.{k}" for name in names for k in ("weight", "bias")}
    for name, p in dense.named_parameters():
        expected = p.grad
        if name not in norm_parameters:
            weight = name.removeprefix("encoder.")
            mask = masks[weight] if weight in masks.names else 1
            expected = p.grad + sparse.get_parameter(name).grad * mask
        assert torch.allclose(model.get_parameter(name).grad, expected, atol=1e-10), name
    for name, norm in zip(names, model.norms):
        apart = sparse.get_submodule(name)
        assert torch.allclose(norm.weight.grad, apart.weight.grad, atol=1e-10), name
        assert torch.allclose(norm.running_mean, apart.running_mean), name
        assert norm.num_batches_tracked == 1, name
        ours, literal = model.get_submodule(name), dense.get_submodule(name)
        assert torch.allclose(ours.running_var, literal.running_var), name


def test_sdclr_prunes_anew_in_each_epoch(tmp_path, monkeypatch):
    calls, prune, nt_xent = [], sdclr.PruneMasks.prune, sdclr.nt_xent
    monkeypatch.setattr(
        sdclr.PruneMasks, "prune", lambda *args: (calls.append("prune"), prune(*args))
    )
    monkeypatch.setattr(
        sdclr, "nt_xent", lambda *z, **terms: (calls.append("step"), nt_xent(*z, **terms))[1]
    )
    few_steps(sdclr, tmp_path / "run", "--max-steps", 4, base=MOVING)
    assert calls == ["prune", "step", "step"] * 2


def test_sdclr_has_the_fixed_temperature_of_its_scripts():
    for dataset, expected in (("cifar100-lt", (0.2, 0.9)), ("imagenet100-lt", (0.3, 0.3))):
        args = sdclr.parse_args(["--dataset", dataset])
        assert (args.tau, args.prune) == expected


# ---------------------------------------------------- MoCo ----------------------------------------
def test_a_queue_starts_with_unit_keys_of_the_seed():
    first, again, other = (ts.Queue(64, 8, seed).keys for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.allclose(first.norm(dim=1), torch.ones(64))
    assert first.mean(0).norm() < 0.5


def test_queue_is_first_in_first_out():
    queue = ts.Queue(5, 2)
    expected = list(queue.keys.clone())
    for size in (2, 2, 2, 8):  # 2 does not divide 5; 8 is more than 5
        keys = unit(size, 2, seed=len(expected)).float()
        queue.push(keys)
        expected += keys
        last = torch.stack(expected[-5:]).sort(dim=0).values
        assert torch.allclose(queue.keys.sort(dim=0).values, last, atol=1e-6)
        assert queue.count == len(expected) - 5


def test_keys_do_not_share_their_query_s_batch_statistics(monkeypatch):
    """Groups of 64 / 8 on up to 4 processes; on a CPU two or more on any number."""
    encoder = resnet()
    network = ts.SimCLRNet(encoder, torch.nn.Linear(encoder.vision.width, 8)).train()
    x, sizes = torch.randn(64, 3, 8, 8), []
    whole, split = network(x), ts.encode_keys(network, x, seed=1)
    assert split.shape == whole.shape
    assert not torch.allclose(whole, split, atol=1e-3)  # other statistics
    network.register_forward_hook(lambda module, inputs, out: sizes.append(len(out)))
    for processes, expected in ((1, [8] * 8), (2, [8] * 4), (8, [4, 4])):
        monkeypatch.setattr(ts, "world_size", lambda processes=processes: processes)
        sizes.clear()
        ts.encode_keys(network, x[: 64 // processes], seed=1)
        assert sizes == expected
    network.eval()
    same_order = ts.encode_keys(network, x, seed=1)
    assert torch.allclose(network(x), same_order, atol=1e-5)


MOCO = (
    "--loss moco --queue-size 40 --max-steps 2 --optimizer sgd --lr 1 --warmup-fraction 0"
).split()


def test_what_moco_s_step_does_to_the_key_encoder(tmp_path, monkeypatch):
    moved, update = [], ts.update_momentum

    def watch(key, network, momentum):
        before = [p.detach().clone() for p in key.parameters()]
        queries = [p.detach().clone() for p in network.parameters()]
        update(key, network, momentum)
        for k, a, b in zip(key.parameters(), before, queries, strict=True):
            moved.append((a - b).abs().max().item())
            assert torch.allclose(k, 0.99 * a + 0.01 * b, atol=1e-6)

    monkeypatch.setattr(ts, "update_momentum", watch)
    few_steps(ts, tmp_path / "run", *MOCO, base=MOVING)
    assert max(moved) > 1e-3


def test_what_moco_s_step_does_to_the_queue(tmp_path, monkeypatch):
    """No anchor has its own key among its negatives; in the next step it is in the queue."""
    seen, loss = [], ts.moco_loss

    def watch(q, k, queue, tau, **terms):
        seen.append((F.normalize(k, dim=1), queue.clone()))
        return loss(q, k, queue, tau, **terms)

    monkeypatch.setattr(ts, "moco_loss", watch)
    few_steps(ts, tmp_path / "run", *MOCO, base=MOVING)
    assert len(seen) == 2
    for keys, queue in seen:
        assert len(queue) == 40
        assert not torch.isclose(keys @ queue.T, torch.ones(()), atol=1e-4).any()
    assert torch.allclose(seen[1][1][:16], seen[0][0], atol=1e-6)


# ---------------------------------------------------- runs ----------------------------------------
def test_the_temperature_is_that_of_the_epoch(tmp_path):
    log = few_steps(ts, tmp_path / "a", "--max-steps", 6, "--period", 3, base=MOVING)
    assert [row["tau"] for row in log] == [ts.temperature(k // 2, period=3) for k in range(6)]


def test_a_replaced_image_has_the_temperature_of_its_own_class(tmp_path, monkeypatch):
    """Coarse supervision: images of the tail replace the unreadable half of those of the head."""
    for c, name in enumerate(("a", "b")):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    for i in range(20, 40):
        (tmp_path / "data" / "a" / f"{i:03}.png").write_bytes(b"no image")
    seen, batches = [], common.Batches.__iter__

    def watch(self):
        for batch in batches(self):
            seen.append(batch)
            yield batch

    monkeypatch.setattr(common.Batches, "__iter__", watch)
    flags = (
        "--cpu --workers 0 --batch-size 8 --max-steps 3 --schedule coarse "
        "--max-bad-fraction 1 --log-every 1"
    ).split()
    log = few_steps(ts, tmp_path / "r", "--dataset", tmp_path / "data", *flags)
    data = common.load_data(str(tmp_path / "data"), "train")
    head = int(np.argsort(-np.bincount(data.labels), kind="stable")[0])
    for row, batch in zip(log, seen):
        in_head = np.asarray(data.labels)[np.asarray(batch["rows"])] == head
        assert row["tau"] == pytest.approx(np.where(in_head, 1.0, 0.1).mean())
    assert any((np.asarray(batch["rows"]) != np.asarray(batch["index"])).any() for batch in seen)


# ---------------------------------------------------- which weights are tested --------------------
def test_the_epoch_is_chosen_among_every_twentieth_and_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(common.Run, "note_best_step", lambda run: None)  # few_steps measures none
    flags = "--epochs 21 --batch-size 32 --eval-epoch best".split()
    few_steps(ts, tmp_path / "a", *flags, base=MOVING)
    assert [row["step"] for row in rows(tmp_path / "a") if "eval" in row] == [0, 20, 21]


def phase_step(words, per_epoch, total):
    steps = SimpleNamespace(per_epoch=per_epoch, total=total)
    return ts.phase_step(ts.parse_args(words.split()), steps)


def test_the_last_step_of_stop_at_phase():
    paper = "--dataset cifar10-lt --eval-epoch last --stop-at-phase 0.7"  # 1,880 of 2,000 epochs
    assert phase_step(paper, 21, 2000 * 21) == 1880 * 21
    words = "--period 10 --stop-at-phase 0.5"
    for total, last in ((40, 35), (29, 15)):
        assert phase_step(words, 1, total) == last
    with pytest.raises(UserError, match="holds no full --period 10; give more epochs"):
        phase_step(words, 1, 9)


def test_stop_at_phase_keeps_the_schedules(tmp_path):
    flags = ["--epochs", 9, "--period", 4]
    whole = few_steps(ts, tmp_path / "whole", *flags, base=MOVING)
    cut = few_steps(ts, tmp_path / "cut", *flags, "--stop-at-phase", 0.75, base=MOVING)
    assert (len(whole), len(cut)) == (18, 14)  # (2 - 1 + 0.75) * 4 epochs of 2 steps
    for cut_row, row in zip(cut, whole):
        assert (cut_row["lr"], cut_row["loss"]) == (row["lr"], row["loss"])


def test_eval_epoch_best_tests_the_weights_of_the_best_val(tmp_path, monkeypatch, capsys):
    """Val is replaced by a plan: its best after step 0, of equal ones the first, is tested."""
    evaluate, plan = Evaluator.__call__, [90.0, 20.0, 30.0, 30.0, 10.0]  # at steps 0, 2, 4, 6, 8

    def planned(self, split):
        metrics, chance, pieces = evaluate(self, split)
        if split == "val" and plan:
            value = plan.pop(0)
            for result in metrics["moving-emoji"].values():
                if isinstance(result, dict):
                    result["mean_per_class"] = value
        return metrics, chance, pieces

    monkeypatch.setattr(Evaluator, "__call__", planned)
    base = [*MOVING, "--max-steps", 8, "--period", 4, "--eval-every", 2]
    best = run_script(ts, tmp_path / "best", "--eval-epoch", "best", "--save-every", 3, base=base)
    assert (best["tested_step"], best["steps"], plan) == (4, 8, [])
    assert "or --index-file, and --eval-epoch 2\n" in capsys.readouterr().out

    # the way to the other splits: the same schedules, ended there
    number = run_script(ts, tmp_path / "number", "--eval-epoch", 2, base=base)
    assert (number["steps"], number["tested_step"], number["test"]) == (4, 4, best["test"])
    weights = [tmp_path / name / "model.safetensors" for name in ("best", "number")]
    assert helpers.equal_files(*weights)
    # the run went on after it
    last, tested = tensors_of(tmp_path / "best", 8), tensors_of(tmp_path / "number", 4)
    names = [name for name in last if name.startswith("model/")]
    assert any(not torch.equal(last[name], tested[name]) for name in names)


# ---------------------------------------------------- flags ---------------------------------------
def test_the_baseline_is_the_paper_s_fixed_temperature():
    args = ts.parse_args(["--dataset", "cifar10-lt", "--baseline"])
    method = vars(ts.parse_args(["--dataset", "cifar10-lt"]))
    changed = {name for name, value in method.items() if getattr(args, name) != value}
    assert (args.schedule, args.tau) == ("fixed", 0.2)
    assert changed == {"baseline", "schedule", "changed", "command_line", "method_flags"}
    assert ts.parse_args(["--baseline", "--tau", "0.5"]).tau == 0.5


REFUSED = {  # flags: words of the refusal
    "--baseline --schedule cos": "--baseline has a fixed temperature",
    "--schedule fixed --tau-min 0.1": "--tau-min: only with a --schedule other than fixed",
    "--tau 0.1": "--tau: only with --schedule fixed",
    "--schedule fixed --period 3": "--period: only with --schedule cos",
    "--schedule random --period 3": "--period: only with --schedule cos",
    "--schedule coarse --period 3": "--period: only with --schedule cos, step or oscillating",
    "--schedule fixed --learnable-tau --tau .001": "must start within --tau-clamp 0.01 10.0",
    "--queue-size 9": "--queue-size: only with --loss moco",
    "--loss moco --head-norm batch": "--head-norm: only with --loss simclr",
    "--tau-min 2": "must be at least --tau-min 2",
    "--eval-epoch best --eval-every 1 --stop-at-phase .5": "only with --eval-epoch last",
    "--imbalance-ratio .5": "must be at least 1",
    "--shot-limits 1 5": "TAIL must be from 1 to HEAD + 1"}


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_contradict_each_other_are_refused(words, capsys):
    assert REFUSED[words] in refused(ts.parse_args, words.split(), capsys)


# ---------------------------------------------------- pictures ------------------------------------
def test_figures_have_the_temperature_and_the_cosines_of_the_log(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda *args: drawn.append(args))
    flags = "--eval-every 2 --max-steps 8 --period 3".split()
    run_script(ts, tmp_path / "run", *flags, base=MOVING)
    drawn.clear()
    figures.draw(tmp_path / "run")
    taus = [row["tau"] for row in steps(tmp_path / "run")]
    (logged,) = panel(drawn, "and coverage of the sphere").lines
    assert list(logged.get_ydata()) == taus
    (beside,) = (ax for ax in panel(drawn, "(Fig. 4)").figure.axes if ax.get_ylabel() == "tau")
    (line,) = beside.lines
    assert list(line.get_ydata()) == taus
    assert list(line.get_xdata())[::2] == [0, 1 / 3, 2 / 3, 0]
    counts = [row["cosines"] for row in rows(tmp_path / "run") if "cosines" in row]
    assert len(counts) == 5 and sum(counts[-1]) == 32 * 31 / 2 and sum(counts[-1][:50]) > 0


def test_figure_4_is_the_mean_over_the_last_period_of_runs(tmp_path, capsys):
    """tools.figures phase: 4 steps an epoch; 10 epochs of a third period are left out."""
    for name, period, epochs, height in (("a", 100, 200, 50.0), ("b", 200, 410, 60.0)):
        log = [{"step": 1, "loss": 2.0}]
        for e in range(0, epochs + 1, 10):
            top1 = height - 10 * abs((e % period) / period - 0.7) - (100 if e < period else 0)
            log.append({"step": 4 * e, "eval": {"d": {"few-shot": {"top1": top1}}}})
        files = {
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in log),
            "args.json": {"dataset": "d", "period": period, "schedule": "cos"},
            "summary.json": {"steps": 4 * epochs, "epochs": epochs},
        }
        write_files(tmp_path / name, files)
    picture = tmp_path / "p.png"
    figure_program.main(["phase", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(picture)])
    out = capsys.readouterr().out
    assert "best at phase 0.700" in out
    assert "0.700    55.00     5.00" in out
    assert picture.stat().st_size
