"""TS: schedule and losses against loops, MoCo's queue, SDCLR's branches, the tested weights."""

import copy
import math
from types import SimpleNamespace

import common
from contrastive.core.processes import UserError
from contrastive.encoders.models import model_of_spec
from contrastive.papers.ts_records import cosine_counts, coverage

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import temperature_schedules as ts
from common import batchnorms
from helpers import (
    assert_close, equal_files, few_steps, rows, run_script, unit, write_files, write_images,
    write_rows)
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


def random_temperatures(seed):
    return [ts.temperature(epoch, "random", 0.1, 0.5, seed=seed) for epoch in range(200)]


def test_a_random_schedule_is_drawn_from_seed_and_epoch():
    draws = random_temperatures(seed=3)
    assert draws == random_temperatures(seed=3)
    assert draws != random_temperatures(seed=4)
    assert 0.1 <= min(draws) < 0.12
    assert 0.48 < max(draws) <= 0.5


Q = unit(N, D, seed=1)
KEYS = unit(N, D, seed=2)
QUEUE = unit(K, D, seed=3)
TAU = torch.linspace(0.1, 1, N, dtype=torch.float64)


def test_nt_xent_against_a_loop():
    z = torch.cat([Q, KEYS])
    total = 0.0
    for i in range(2 * N):
        logits = z @ z[i] / TAU[i % N]
        partner = (i + N) % (2 * N)
        others = torch.arange(2 * N) != i
        total += logits[others].exp().sum().log() - logits[partner]
    assert_close(ts.nt_xent(3 * Q, KEYS, TAU), total / (2 * N))


def test_moco_loss_against_a_loop():
    total = 0.0
    for i in range(N):
        candidates = torch.stack([KEYS[i], *QUEUE])
        logits = candidates @ Q[i] / TAU[i]
        total += logits.exp().sum().log() - logits[0]
    assert_close(ts.moco_loss(Q, 2 * KEYS, QUEUE, TAU), total / N)


def test_moco_loss_has_no_gradient_of_keys():
    q = Q.clone().requires_grad_()
    k = KEYS.clone().requires_grad_()
    ts.moco_loss(q, k, QUEUE, TAU).backward()
    assert k.grad is None
    assert q.grad.abs().sum() > 0


def test_coarse_temperature_by_hand():
    tau = ts.coarse_temperature(torch.tensor([0, 3, 1, 2]), {0, 1}, 1.0, 0.1)
    assert tau.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])


def test_coverage_of_points_by_hand():
    point = torch.randn(1, 8).expand(30, 8)
    part, counts = coverage(torch.cat([point, -point]))
    assert part == pytest.approx(2 / 500)
    assert counts == [30, 30]


def test_cosine_counts_by_hand():
    """Cosines: 1 once, -1 twice, 0 three times."""
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [0.0, 3.0]])
    assert cosine_counts(z, bins=5) == [2, 0, 3, 0, 1]
    assert sum(cosine_counts(torch.randn(50, 3), limit=9)) == 36


# ---------------------------------------------------- SDCLR ---------------------------------------
def test_prune_masks_keep_the_largest_weights_of_all_layers_together():
    large = torch.nn.Conv2d(3, 4, 3)
    small = torch.nn.Linear(20, 5)
    torch.nn.init.uniform_(large.weight, 2, 3)
    torch.nn.init.uniform_(small.weight, -1, 1)
    net = torch.nn.Sequential(large, torch.nn.BatchNorm2d(4), small)
    masks = sdclr.PruneMasks(net)
    masks.prune(net, 0.25)  # of 108 + 100 weights
    assert masks.names == ["0.weight", "2.weight"]
    assert masks["0.weight"].all()
    mask = masks["2.weight"]
    stay = small.weight[mask].abs()
    go = small.weight[~mask].abs()
    assert len(go) == 52
    assert stay.min() >= go.max()


def resnet():
    spec = dict(
        image_encoder="resnet18-cifar", text_encoder="", embed_dim=0, image_size=16,
        image_stats="imagenet", eval_resize="crop")
    return model_of_spec(spec, None, False)[0]


def network(encoder, kind=ts.EncoderAndHead):
    head = ts.simclr_head(encoder.vision.width, 8, "batch")
    return kind(encoder, head).double().train()


def two_networks(model, masks):
    """The plain way of SDCLR: copies without and with the masks, each with its BatchNorms."""
    dense = network(copy.deepcopy(model.encoder))
    dense.head.load_state_dict(model.head.state_dict())
    sparse = copy.deepcopy(dense)
    for name, norm in zip(model.norm_names, model.norms, strict=True):
        sparse.get_submodule(name).load_state_dict(norm.state_dict())
    for name in masks.names:
        sparse.encoder.get_parameter(name).data.mul_(masks[name])
    return dense, sparse


def test_sdclr_s_branches_against_two_networks():
    """Shared weights, masked in the second; BatchNorms, weights and statistics, of each alone."""
    torch.manual_seed(0)
    model = network(resnet(), sdclr.SDCLRNet)
    for norm in (*batchnorms(model.encoder), *model.norms):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    masks = sdclr.PruneMasks(model.encoder)
    masks.prune(model.encoder, 0.9)
    dense, sparse = two_networks(model, masks)
    view1, view2 = torch.randn(2, 4, 3, 8, 8, dtype=torch.float64)
    ts.nt_xent(dense(view1), sparse(view2), 0.2).backward()
    z1, z2 = sdclr.encode(model, masks, view1, view2)
    ts.nt_xent(z1, z2, 0.2).backward()

    for name, norm in zip(model.norm_names, model.norms):
        of_model, of_dense, of_sparse = [x.get_submodule(name) for x in (model, dense, sparse)]
        assert_close(norm.weight.grad, of_sparse.weight.grad, 1e-10)
        assert_close(norm.running_mean, of_sparse.running_mean)
        assert_close(of_model.weight.grad, of_dense.weight.grad, 1e-10)
        assert_close(of_model.running_var, of_dense.running_var)
    mask_of = {f"encoder.{name}": masks[name] for name in masks.names}
    for name, p in dense.named_parameters():
        layer, _, _ = name.rpartition(".")
        if layer not in model.norm_names:
            expected = p.grad + sparse.get_parameter(name).grad * mask_of.get(name, 1)
            assert_close(model.get_parameter(name).grad, expected, 1e-10)


def test_sdclr_prunes_anew_in_each_epoch(tmp_path, monkeypatch):
    """Of three steps."""
    calls, prune, nt_xent = [], sdclr.PruneMasks.prune, sdclr.nt_xent

    def watched_prune(*args):
        calls.append("prune")
        prune(*args)

    def watched_loss(*args):
        calls.append("step")
        return nt_xent(*args)

    monkeypatch.setattr(sdclr.PruneMasks, "prune", watched_prune)
    monkeypatch.setattr(sdclr, "nt_xent", watched_loss)
    few_steps(sdclr, tmp_path / "run", "--clips", 48, 16, 16, "--max-steps", 6, base=MOVING)
    assert calls == ["prune", "step", "step", "step"] * 2


# ---------------------------------------------------- MoCo ----------------------------------------
def test_queue_is_first_in_first_out():
    queue = ts.Queue(5, 2)
    keys = unit(14, 2).float()
    pushed = 0
    for size in (2, 2, 2, 8):  # 2 does not divide 5; 8 is more than 5
        queue.push(3 * keys[pushed : pushed + size])
        pushed += size
        last = keys[max(0, pushed - 5) : pushed]
        distances = torch.cdist(last, queue.keys)
        assert distances.amin(1).max() < 1e-3


@pytest.fixture(scope="module")
def with_batchnorm():
    encoder = resnet()
    return ts.EncoderAndHead(encoder, torch.nn.Linear(encoder.vision.width, 8))


IMAGES = torch.randn(64, 3, 8, 8)


def test_keys_have_the_order_of_their_queries(with_batchnorm):
    with_batchnorm.eval()
    keys = ts.encode_keys(with_batchnorm, IMAGES, seed=1)
    assert_close(with_batchnorm(IMAGES), keys)


def test_groups_of_keys_are_drawn_from_the_seed(with_batchnorm):
    with_batchnorm.train()
    keys, other_keys = [ts.encode_keys(with_batchnorm, IMAGES, seed) for seed in (1, 2)]
    assert not torch.allclose(keys, other_keys, atol=1e-3)


@pytest.mark.parametrize("processes, expected", [(1, [8] * 8), (2, [8] * 4), (8, [4, 4])])
def test_keys_share_batch_statistics_in_groups(processes, expected, with_batchnorm, monkeypatch):
    """Of 64 / 8 on up to 4 processes; on a CPU two or more on any number."""
    sizes = []

    def note_size(module, inputs, output):
        sizes.append(len(output))

    monkeypatch.setattr(ts, "world_size", lambda: processes)
    hook = with_batchnorm.register_forward_hook(note_size)
    ts.encode_keys(with_batchnorm, IMAGES[: 64 // processes], seed=1)
    hook.remove()
    assert sizes == expected


MOCO = (
    "--loss moco --queue-size 40 --max-steps 2 --optimizer sgd --lr 1 --warmup-fraction 0").split()


def test_what_moco_s_step_does_to_the_key_encoder(tmp_path, monkeypatch):
    distances, update = [], ts.update_momentum

    def watched_update(key_model, model, momentum):
        before = copy.deepcopy(key_model)
        update(key_model, model, momentum)
        parameters = zip(key_model.parameters(), before.parameters(), model.parameters())
        for key, old_key, query in parameters:
            assert_close(key, 0.99 * old_key + 0.01 * query, 1e-6)
            distances.append((old_key - query).abs().max().item())

    monkeypatch.setattr(ts, "update_momentum", watched_update)
    few_steps(ts, tmp_path / "run", *MOCO, base=MOVING)
    assert max(distances) > 1e-3


def test_what_moco_s_step_does_to_the_queue(tmp_path, monkeypatch):
    """No anchor has its own key among its negatives; in the next step it is in the queue."""
    calls, moco_loss = [], ts.moco_loss

    def watched_loss(q, k, queue, tau):
        calls.append((F.normalize(k, dim=1), queue.clone()))
        return moco_loss(q, k, queue, tau)

    monkeypatch.setattr(ts, "moco_loss", watched_loss)
    few_steps(ts, tmp_path / "run", *MOCO, base=MOVING)
    (keys, queue), (next_keys, next_queue) = calls
    assert len(queue) == 40
    for sim in (keys @ queue.T, next_keys @ next_queue.T):
        assert sim.max() < 1 - 1e-4
    assert_close(next_queue[:16], keys)


# ---------------------------------------------------- runs ----------------------------------------
def test_the_temperature_is_that_of_the_epoch(tmp_path):
    log = few_steps(ts, tmp_path / "run", "--max-steps", 6, "--period", 3, base=MOVING)
    expected = [ts.temperature(epoch, period=3) for epoch in (0, 0, 1, 1, 2, 2)]
    assert [row["tau"] for row in log] == expected


def test_a_replaced_image_has_the_temperature_of_its_own_class(tmp_path, monkeypatch):
    """Coarse supervision: images of the tail replace the unreadable half of those of the head."""
    folder, batches, iterate = tmp_path / "data", [], common.Batches.__iter__
    write_images(folder / "a", range(20))
    write_images(folder / "b", range(20, 60))
    write_files(folder / "a", {f"{i:03}.png": "no image" for i in range(60, 80)})

    def watched_batches(self):
        for batch in iterate(self):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(common.Batches, "__iter__", watched_batches)
    flags = (
        "--cpu --workers 0 --batch-size 8 --max-steps 3 --schedule coarse --max-bad-fraction 1 "
        "--log-every 1").split()
    log = few_steps(ts, tmp_path / "run", "--dataset", folder, *flags)
    labels = common.load_data(str(folder), "train").labels
    head = np.bincount(labels).argmax()
    num_replaced = 0
    for row, batch in zip(log, batches):
        is_in_head = np.asarray(labels)[batch["rows"]] == head
        tau = np.where(is_in_head, 1.0, 0.1)
        assert row["tau"] == pytest.approx(tau.mean())
        is_replaced = np.not_equal(batch["rows"], batch["index"])
        num_replaced += is_replaced.sum()
    assert num_replaced > 0


def test_decay_all_is_of_biases_and_norms_but_not_of_a_learnt_tau():
    tau = common.Temperature(0.1, learnable=True)
    parts = [torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), tau]
    args = ts.parse_args(["--weight-decay", "0.3", "--decay-all"])
    optimizer = common.make_optimizer(parts, args)
    ts.decay_vectors(optimizer, args.weight_decay)
    decay_of_shape = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            decay_of_shape[tuple(p.shape)] = group["weight_decay"]
    assert decay_of_shape == {(2, 2): 0.3, (2,): 0.3, (): 0}


# ---------------------------------------------------- which weights are tested --------------------
def phase_step(words, per_epoch, total):
    args = ts.parse_args(words.split())
    return ts.phase_step(args, SimpleNamespace(per_epoch=per_epoch, total=total))


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
        assert cut_row["lr"] == row["lr"]
        assert cut_row["loss"] == row["loss"]


def test_val_mean_is_of_means_over_classes():
    """Of kNN and probes."""
    row = {"eval": {"d": {
        "knn": {"top1": 90.0, "mean_per_class": 20.0},
        "linear": {"top1": 80.0, "mean_per_class": 40.0},
        "note": "no metrics"}}}
    pieces = {"d": SimpleNamespace(train_features=unit(30, 8).float())}
    common.add_val_columns(row, pieces, torch.nn.Linear(8, 3))
    assert row["val_mean"] == 30


def test_the_epoch_is_chosen_among_every_twentieth_and_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(common.Run, "note_best_step", lambda run: None)  # few_steps measures none
    flags = "--epochs 21 --batch-size 32 --eval-epoch best".split()
    few_steps(ts, tmp_path / "run", *flags, base=MOVING)
    assert [row["step"] for row in rows(tmp_path / "run") if "eval" in row] == [0, 20, 21]


def test_eval_epoch_tests_the_weights_of_the_best_val(tmp_path, monkeypatch):
    """They are those of a run with the same schedules that ended there."""
    # the best of val after step 0, of equal ones the first
    val_mean = {0: 90.0, 2: 20.0, 4: 30.0, 6: 30.0, 8: 10.0}

    def planned_columns(row, pieces, head):
        row["val_mean"] = val_mean[row["step"]]

    monkeypatch.setattr(common, "add_val_columns", planned_columns)
    base = [*MOVING, "--max-steps", 8, "--period", 4, "--eval-every", 2]
    best = run_script(ts, tmp_path / "best", "--eval-epoch", "best", base=base)
    number = run_script(ts, tmp_path / "number", "--eval-epoch", 2, base=base)
    assert (best["tested_step"], best["steps"]) == (4, 8)
    assert (number["tested_step"], number["steps"]) == (4, 4)
    assert number["test"] == best["test"]
    tested = tmp_path / "best" / "model.safetensors"
    assert equal_files(tested, tmp_path / "number" / "model.safetensors")


# ---------------------------------------------------- pictures ------------------------------------
def write_run(folder, period, epochs, top1_of_epoch):
    """A run of 4 steps an epoch."""
    log = [(1, {})]
    for epoch, top1 in top1_of_epoch.items():
        log.append((4 * epoch, {"d": {"few-shot": {"top1": top1}}}))
    write_rows(folder / "metrics.jsonl", ["step", "eval"], log)
    write_files(folder, {
        "args.json": {"dataset": "d", "period": period, "schedule": "cos"},
        "summary.json": {"steps": 4 * epochs, "epochs": epochs}})
    return str(folder)


def test_figure_4_is_the_mean_over_the_last_period_of_runs(tmp_path, capsys):
    """tools.figures phase; 10 epochs of a third period are left out."""
    one = write_run(tmp_path / "a", 100, 200, {70: 0.0, 150: 40.0, 190: 60.0})
    two = write_run(tmp_path / "b", 200, 410, {140: 0.0, 300: 50.0, 380: 70.0, 410: 0.0})
    figure_program.main(["phase", one, two, "--out", str(tmp_path / "p.png")])
    assert "0.700    55.00     5.00" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size
