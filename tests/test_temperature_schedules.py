"""TS: schedule and losses against loops, MoCo's queue, SDCLR's branches, the tested weights."""

import copy
import json
import math
from types import SimpleNamespace

import common
from contrastive.core.processes import UserError
from contrastive.encoders.models import model_of_spec
from contrastive.evaluation.measure import Evaluator
from contrastive.papers.ts_records import cosine_counts, coverage

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import temperature_schedules as ts
from helpers import (
    equal_files, few_steps, rows, run_script, tensors_of, unit, write_files, write_images)
from tools import figures as figure_program
from variants import sdclr

N, D, K = 5, 4, 7
MOVING = (
    "--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --frames 2 --image-size 16 "
    "--batch-size 16 --eval-every 0 --log-every 1").split()  # two steps an epoch


# ---------------------------------------------------- method --------------------------------------
@pytest.mark.parametrize("schedule, epochs, expected", [
    ("cos", (0, 1, 2, 2.8, 4, 6), (0.5, 0.3, 0.1, 0.3 + 0.2 * math.cos(1.4 * math.pi), 0.5, 0.1)),
    ("step", (0, 1, 2, 3, 4), (0.1, 0.1, 0.5, 0.5, 0.1)),
    ("oscillating", (0, 1, 2, 3, 4), (0.5, 0.3, 0.1, 0.3, 0.5)),
    ("fixed", (0, 2), (0.1, 0.1))])
def test_the_schedules_by_hand(schedule, epochs, expected):
    temperatures = [ts.temperature(epoch, schedule, 0.1, 0.5, 4) for epoch in epochs]
    assert temperatures == pytest.approx(expected)


def test_a_random_schedule_is_drawn_from_seed_and_epoch():
    draws = [ts.temperature(epoch, "random", 0.1, 0.5, seed=3) for epoch in range(200)]
    assert draws == [ts.temperature(epoch, "random", 0.1, 0.5, seed=3) for epoch in range(200)]
    assert draws != [ts.temperature(epoch, "random", 0.1, 0.5, seed=4) for epoch in range(200)]
    assert 0.1 <= min(draws) < 0.12
    assert 0.48 < max(draws) <= 0.5


Q, KEYS, QUEUE = unit(N, D, seed=1), unit(N, D, seed=2), unit(K, D, seed=3)
TAU = torch.linspace(0.1, 1, N, dtype=torch.float64)


def cross_entropy(logits, positive):
    """Over Python floats."""
    return math.log(sum(math.exp(x) for x in logits)) - positive


def test_nt_xent_against_a_loop():
    z, total = torch.cat([Q, KEYS]), 0.0
    for i in range(2 * N):
        sims = [float(z[i] @ z[j]) / float(TAU[i % N]) for j in range(2 * N)]
        positive = sims[(i + N) % (2 * N)]
        del sims[i]
        total += cross_entropy(sims, positive)
    assert ts.nt_xent(3 * Q, KEYS, TAU).item() == pytest.approx(total / (2 * N))


def test_moco_loss_against_a_loop():
    total = 0.0
    for i in range(N):
        logits = [float(Q[i] @ key) / float(TAU[i]) for key in (KEYS[i], *QUEUE)]
        total += cross_entropy(logits, logits[0])
    assert ts.moco_loss(Q, 2 * KEYS, QUEUE, TAU).item() == pytest.approx(total / N)


def test_moco_loss_has_no_gradient_of_keys():
    q, k = Q.clone().requires_grad_(), KEYS.clone().requires_grad_()
    ts.moco_loss(q, k, QUEUE, TAU).backward()
    assert k.grad is None
    assert q.grad.abs().sum() > 0


def test_coarse_temperature_by_hand():
    tau = ts.coarse_temperature(torch.tensor([0, 3, 1, 2]), {0, 1}, 1.0, 0.1)
    assert tau.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])


def test_coverage_of_points_by_hand():
    point = torch.randn(1, 8).expand(30, 8)
    assert coverage(point) == (pytest.approx(1 / 500), [30])
    assert coverage(torch.cat([point, -point])) == (pytest.approx(2 / 500), [30, 30])


def test_cosine_counts_by_hand():
    """Cosines: 1 once, -1 twice, 0 three times."""
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [0.0, 3.0]])
    assert cosine_counts(z, bins=5) == [2, 0, 3, 0, 1]
    assert sum(cosine_counts(torch.randn(50, 3), limit=9)) == 36


# ---------------------------------------------------- SDCLR ---------------------------------------
def test_prune_masks_keep_the_largest_weights_of_all_layers_together():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(20, 5))
    with torch.no_grad():
        net[0].weight.uniform_(2, 3)
        net[2].weight.uniform_(-1, 1)
    masks = sdclr.PruneMasks(net)
    masks.prune(net, 0.25)
    assert masks.names == ["0.weight", "2.weight"]
    assert masks["0.weight"].all()
    sizes, mask = net[2].weight.abs(), masks["2.weight"]
    assert (~mask).sum() == math.ceil(0.25 * 208)  # the small ones alone
    assert sizes[mask].min() >= sizes[~mask].max()


def resnet():
    spec = dict(
        image_encoder="resnet18-cifar", text_encoder="", embed_dim=0, image_size=16,
        image_stats="imagenet", eval_resize="crop")
    return model_of_spec(spec, None, False)[0]


def network(encoder, kind=ts.EncoderAndHead):
    return kind(encoder, ts.simclr_head(encoder.vision.width, 8, "batch")).double().train()


def two_networks(model, masks):
    """The plain way of SDCLR: copies without and with the masks, each with its BatchNorms."""
    dense = network(copy.deepcopy(model.encoder))
    dense.head.load_state_dict(model.head.state_dict())
    sparse = copy.deepcopy(dense)
    for name, norm in zip(model.norm_names, model.norms, strict=True):
        sparse.get_submodule(name).load_state_dict(norm.state_dict())
    with torch.no_grad():
        for name in masks.names:
            sparse.encoder.get_parameter(name).mul_(masks[name])
    return dense, sparse


def test_sdclr_s_branches_against_two_networks():
    """Shared weights, masked in the second; BatchNorms, weights and statistics, of each alone."""
    torch.manual_seed(0)
    model = network(resnet(), sdclr.SDCLRNet)
    for norm in (*map(model.get_submodule, model.norm_names), *model.norms):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    masks, pixels = sdclr.PruneMasks(model.encoder), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    masks.prune(model.encoder, 0.9)
    dense, sparse = two_networks(model, masks)
    ts.nt_xent(dense(pixels[:4]), sparse(pixels[4:]), 0.2).backward()
    ts.nt_xent(*sdclr.encode(model, masks, pixels[:4], pixels[4:]), 0.2).backward()
    for name, norm in zip(model.norm_names, model.norms):
        of_sparse = sparse.get_submodule(name)
        assert torch.allclose(norm.weight.grad, of_sparse.weight.grad, atol=1e-10), name
        assert torch.allclose(norm.running_mean, of_sparse.running_mean), name
        of_model, of_dense = model.get_submodule(name), dense.get_submodule(name)
        assert torch.allclose(of_model.running_var, of_dense.running_var), name
    for name, p in dense.named_parameters():
        expected = p.grad
        if name.rpartition(".")[0] not in model.norm_names:
            weight = name.removeprefix("encoder.")
            mask = masks[weight] if weight in masks.names else 1
            expected = p.grad + sparse.get_parameter(name).grad * mask
        assert torch.allclose(model.get_parameter(name).grad, expected, atol=1e-10), name


def test_sdclr_prunes_anew_in_each_epoch(tmp_path, monkeypatch):
    calls, prune, nt_xent = [], sdclr.PruneMasks.prune, sdclr.nt_xent

    def watched_prune(*args):
        calls.append("prune")
        prune(*args)

    def watched_loss(*args):
        calls.append("step")
        return nt_xent(*args)

    monkeypatch.setattr(sdclr.PruneMasks, "prune", watched_prune)
    monkeypatch.setattr(sdclr, "nt_xent", watched_loss)
    few_steps(sdclr, tmp_path / "run", "--max-steps", 4, base=MOVING)
    assert calls == ["prune", "step", "step"] * 2


# ---------------------------------------------------- MoCo ----------------------------------------
def test_a_queue_starts_with_unit_keys_of_the_seed():
    first, again, other = (ts.Queue(64, 8, seed).keys for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.allclose(first.norm(dim=1), torch.ones(64))


def test_queue_is_first_in_first_out():
    queue = ts.Queue(5, 2)
    pushed = list(queue.keys.clone())
    for size in (2, 2, 2, 8):  # 2 does not divide 5; 8 is more than 5
        keys = unit(size, 2, seed=len(pushed)).float()
        queue.push(keys)
        pushed += keys
        last = torch.stack(pushed[-5:]).sort(dim=0).values
        assert torch.allclose(queue.keys.sort(dim=0).values, last, atol=1e-6)


@pytest.fixture(scope="module")
def with_batchnorm():
    encoder = resnet()
    return ts.EncoderAndHead(encoder, torch.nn.Linear(encoder.vision.width, 8))


IMAGES = torch.randn(64, 3, 8, 8)


def test_keys_do_not_share_their_query_s_batch_statistics(with_batchnorm):
    with_batchnorm.train()
    queries, keys = with_batchnorm(IMAGES), ts.encode_keys(with_batchnorm, IMAGES, seed=1)
    assert keys.shape == queries.shape
    assert not torch.allclose(queries, keys, atol=1e-3)


def test_keys_have_the_order_of_their_queries(with_batchnorm):
    with_batchnorm.eval()
    keys = ts.encode_keys(with_batchnorm, IMAGES, seed=1)
    assert torch.allclose(with_batchnorm(IMAGES), keys, atol=1e-5)


@pytest.mark.parametrize("processes, expected", [(1, [8] * 8), (2, [8] * 4), (8, [4, 4])])
def test_groups_of_keys(processes, expected, with_batchnorm, monkeypatch):
    """Of 64 / 8 on up to 4 processes; on a CPU two or more on any number."""
    sizes = []

    def noted(module, inputs, output):
        sizes.append(len(output))

    monkeypatch.setattr(ts, "world_size", lambda: processes)
    hook = with_batchnorm.register_forward_hook(noted)
    ts.encode_keys(with_batchnorm, IMAGES[: 64 // processes], seed=1)
    hook.remove()
    assert sizes == expected


MOCO = (
    "--loss moco --queue-size 40 --max-steps 2 --optimizer sgd --lr 1 --warmup-fraction 0").split()


def test_what_moco_s_step_does_to_the_key_encoder(tmp_path, monkeypatch):
    distances, update = [], ts.update_momentum

    def watched_update(key, network, momentum):
        before = [p.detach().clone() for p in key.parameters()]
        update(key, network, momentum)
        for after, old, query in zip(key.parameters(), before, network.parameters(), strict=True):
            assert torch.allclose(after, 0.99 * old + 0.01 * query, atol=1e-6)
            distances.append((old - query).abs().max().item())

    monkeypatch.setattr(ts, "update_momentum", watched_update)
    few_steps(ts, tmp_path / "run", *MOCO, base=MOVING)
    assert max(distances) > 1e-3


def test_what_moco_s_step_does_to_the_queue(tmp_path, monkeypatch):
    """No anchor has its own key among its negatives; in the next step it is in the queue."""
    calls, loss = [], ts.moco_loss

    def watched_loss(q, k, queue, tau):
        calls.append((F.normalize(k, dim=1), queue.clone()))
        return loss(q, k, queue, tau)

    monkeypatch.setattr(ts, "moco_loss", watched_loss)
    few_steps(ts, tmp_path / "run", *MOCO, base=MOVING)
    (first_keys, first_queue), (keys, queue) = calls
    assert len(queue) == 40
    assert (first_keys @ first_queue.T).max() < 1 - 1e-4
    assert (keys @ queue.T).max() < 1 - 1e-4
    assert torch.allclose(queue[:16], first_keys, atol=1e-6)


# ---------------------------------------------------- runs ----------------------------------------
def test_the_temperature_is_that_of_the_epoch(tmp_path):
    log = few_steps(ts, tmp_path / "a", "--max-steps", 6, "--period", 3, base=MOVING)
    assert [row["tau"] for row in log] == [ts.temperature(k // 2, period=3) for k in range(6)]


def test_a_replaced_image_has_the_temperature_of_its_own_class(tmp_path, monkeypatch):
    """Coarse supervision: images of the tail replace the unreadable half of those of the head."""
    folder, batches, iterate = tmp_path / "data", [], common.Batches.__iter__
    write_images(folder / "a", range(40))
    write_images(folder / "b", range(40, 80))
    for i in range(20, 40):
        (folder / "a" / f"{i:03}.png").write_bytes(b"no image")

    def watched_batches(self):
        for batch in iterate(self):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(common.Batches, "__iter__", watched_batches)
    flags = (
        "--cpu --workers 0 --batch-size 8 --max-steps 3 --schedule coarse --max-bad-fraction 1 "
        "--log-every 1").split()
    log = few_steps(ts, tmp_path / "r", "--dataset", folder, *flags)
    labels = np.asarray(common.load_data(str(folder), "train").labels)
    head = np.bincount(labels).argmax()
    num_replaced = 0
    for row, batch in zip(log, batches):
        in_head = labels[np.asarray(batch["rows"])] == head
        assert row["tau"] == pytest.approx(np.where(in_head, 1.0, 0.1).mean())
        num_replaced += np.sum(np.asarray(batch["rows"]) != np.asarray(batch["index"]))
    assert num_replaced > 0


# ---------------------------------------------------- which weights are tested --------------------
def test_the_epoch_is_chosen_among_every_twentieth_and_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(common.Run, "note_best_step", lambda run: None)  # few_steps measures none
    flags = "--epochs 21 --batch-size 32 --eval-epoch best".split()
    few_steps(ts, tmp_path / "a", *flags, base=MOVING)
    assert [row["step"] for row in rows(tmp_path / "a") if "eval" in row] == [0, 20, 21]


def phase_step(words, per_epoch, total):
    return ts.phase_step(
        ts.parse_args(words.split()), SimpleNamespace(per_epoch=per_epoch, total=total))


@pytest.mark.parametrize("words, per_epoch, total, last", [
    # the paper's: 1,880 of 2,000 epochs
    ("--dataset cifar10-lt --eval-epoch last --stop-at-phase 0.7", 21, 2000 * 21, 1880 * 21),
    ("--period 10 --stop-at-phase 0.5", 1, 40, 35),
    ("--period 10 --stop-at-phase 0.5", 1, 29, 15)])
def test_the_last_step_of_stop_at_phase(words, per_epoch, total, last):
    assert phase_step(words, per_epoch, total) == last


def test_stop_at_phase_needs_a_whole_period():
    with pytest.raises(UserError, match="holds no full --period 10; give more epochs"):
        phase_step("--period 10 --stop-at-phase 0.5", 1, 9)


def test_stop_at_phase_keeps_the_schedules(tmp_path):
    flags = ["--epochs", 9, "--period", 4]
    whole = few_steps(ts, tmp_path / "whole", *flags, base=MOVING)
    cut = few_steps(ts, tmp_path / "cut", *flags, "--stop-at-phase", 0.75, base=MOVING)
    assert (len(whole), len(cut)) == (18, 14)  # (2 - 1 + 0.75) * 4 epochs of 2 steps
    for cut_row, row in zip(cut, whole):
        assert (cut_row["lr"], cut_row["loss"]) == (row["lr"], row["loss"])


@pytest.fixture
def best_is_step_4(monkeypatch):
    """Val is replaced by a plan: its best after step 0, of equal ones the first."""
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


EVALUATED = [*MOVING, "--max-steps", 8, "--period", 4, "--eval-every", 2]


def test_eval_epoch_tests_the_weights_of_the_best_val(best_is_step_4, tmp_path):
    """They are those of a run with the same schedules that ended there."""
    best = run_script(ts, tmp_path / "best", "--eval-epoch", "best", base=EVALUATED)
    assert (best["tested_step"], best["steps"]) == (4, 8)
    number = run_script(ts, tmp_path / "number", "--eval-epoch", 2, base=EVALUATED)
    assert (number["tested_step"], number["steps"]) == (4, 4)
    assert number["test"] == best["test"]
    weights = [tmp_path / name / "model.safetensors" for name in ("best", "number")]
    assert equal_files(*weights)
    last, tested = tensors_of(tmp_path / "best", 8), tensors_of(tmp_path / "number", 4)
    assert any(not torch.equal(x, tested[name]) for name, x in last.items() if "model/" in name)


# ---------------------------------------------------- pictures ------------------------------------
def write_run(folder, period, epochs, height):
    """A log of 4 steps an epoch, whose top-1 is best at phase 0.7 of the later periods."""
    log = [{"step": 1, "loss": 2.0}]
    for epoch in range(0, epochs + 1, 10):
        top1 = height - 10 * abs((epoch % period) / period - 0.7)
        if epoch < period:
            top1 -= 100
        log.append({"step": 4 * epoch, "eval": {"d": {"few-shot": {"top1": top1}}}})
    write_files(folder, {
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in log),
        "args.json": {"dataset": "d", "period": period, "schedule": "cos"},
        "summary.json": {"steps": 4 * epochs, "epochs": epochs}})


def test_figure_4_is_the_mean_over_the_last_period_of_runs(tmp_path, capsys):
    """tools.figures phase; 10 epochs of a third period are left out."""
    write_run(tmp_path / "a", 100, 200, 50.0)
    write_run(tmp_path / "b", 200, 410, 60.0)
    picture = tmp_path / "p.png"
    figure_program.main(["phase", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(picture)])
    assert "0.700    55.00     5.00" in capsys.readouterr().out
    assert picture.stat().st_size
