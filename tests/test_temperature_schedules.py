"""TS: schedule and losses against loops, MoCo's queue and keys, SDCLR's branches, the weights that are tested."""

import copy
import json
import math
from types import SimpleNamespace

import common
from contrastive import figures
from contrastive.evaluation.retrieval import Evaluator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import helpers
import temperature_schedules as ts
from helpers import few_steps, fork, panel, rows, run_script, steps, tensors_of, unit, write_files, write_images
from tools import figures as several

N, D, K = 5, 4, 7
MOVING = ("--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --frames 2 --image-size 16 --batch-size 16 "
          "--eval-every 0 --log-every 1").split()                          # two steps an epoch


# ---------------------------------------------------- method --------------------------------------------------------
def test_the_schedules_by_hand():
    cosine = [ts.temperature(e, "cos", 0.1, 1.0, 400) for e in (0, 100, 200, 280, 400, 600)]
    at_280 = 0.1 + 0.45 * (1 + math.cos(1.4 * math.pi))
    assert cosine == pytest.approx([1.0, 0.55, 0.1, at_280, 1.0, 0.1])     # 0, T/4, T/2, 0.7 T, T, 1.5 T
    step, triangle, fixed = ([ts.temperature(e, kind, 0.1, 0.5, 4) for e in range(5)]
                             for kind in ("step", "oscillating", "fixed"))
    assert step == [0.1, 0.1, 0.5, 0.5, 0.1] and fixed == [0.1] * 5
    assert triangle == pytest.approx([0.5, 0.3, 0.1, 0.3, 0.5])
    draws, again, other = ([ts.temperature(e, "random", 0.1, 0.5, seed=s) for e in range(200)] for s in (3, 3, 4))
    assert draws == again != other and 0.1 <= min(draws) < 0.12 and 0.48 < max(draws) <= 0.5


def test_nt_xent_against_a_loop():
    z1, z2 = unit(N, D, seed=1), unit(N, D, seed=2)
    tau = torch.rand(N, dtype=torch.float64) + 0.1
    z, total = torch.cat([z1, z2]), 0.0
    for i in range(2 * N):
        logits = {j: float(z[i] @ z[j]) / float(tau[i % N]) for j in range(2 * N) if j != i}
        total += -logits[(i + N) % (2 * N)] + math.log(sum(math.exp(x) for x in logits.values()))
    assert ts.nt_xent(3 * z1, z2, tau).item() == pytest.approx(total / (2 * N))


def test_moco_loss_against_a_loop():
    q, k, queue = unit(N, D, seed=1).requires_grad_(), unit(N, D, seed=2).requires_grad_(), unit(K, D, seed=3)
    tau, total = torch.rand(N, dtype=torch.float64) + 0.1, 0.0
    for i in range(N):
        logits = [(q[i] @ x).item() / tau[i].item() for x in (k[i], *queue)]
        total += -logits[0] + math.log(sum(math.exp(x) for x in logits))
    loss = ts.moco_loss(q, 2 * k, queue, tau)
    loss.backward()
    assert loss.item() == pytest.approx(total / N) and k.grad is None and q.grad.abs().sum() > 0


def test_coarse_temperature_and_coverage_by_hand():
    tau = ts.coarse_temperature(torch.tensor([0, 3, 1, 2]), {0, 1}, 1.0, 0.1)
    assert tau.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])
    part, images = ts.coverage(torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1)))
    assert part > 0.7 and sum(images) == 20_000 and len(images) > 450 and images == sorted(images, reverse=True)
    one = torch.randn(1, 8).expand(30, 8)
    assert ts.coverage(one) == (pytest.approx(1 / 500), [30])
    assert ts.coverage(torch.cat([one, -one])) == (pytest.approx(2 / 500), [30, 30])


# ---------------------------------------------------- SDCLR ---------------------------------------------------------
def test_prune_masks_keep_the_largest_weights_of_all_layers_together():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(20, 5))
    with torch.no_grad():
        net[0].weight.uniform_(2, 3)
        net[2].weight.uniform_(-1, 1)
    masks = ts.prune_masks(net, 0.25)
    assert set(masks) == {"0.weight", "2.weight"}
    assert masks["0.weight"].all() and (~masks["2.weight"]).sum() == math.ceil(0.25 * 208)  # the small ones alone
    assert net[2].weight[masks["2.weight"]].abs().min() >= net[2].weight[~masks["2.weight"]].abs().max()
    assert [sum(m.sum() for m in ts.prune_masks(net, part).values()) for part in (0, 1)] == [208, 1]


def resnet():
    spec = dict(image_encoder="resnet18-cifar", text_encoder="", embed_dim=0, image_size=16, image_stats="imagenet",
                eval_resize="crop")
    return common.build_model(spec, None, False)[0]


def test_sdclr_s_branches_against_two_networks():
    """Shared weights, masked in the second; BatchNorms, their weights and statistics, of each branch alone."""
    torch.manual_seed(0)
    model = ts.Contrastive(resnet(), 8, "batch", pruned=True).double().train()
    for norm in (*(norm for _, norm in model.dense_norms()), *model.norms):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    masks, pixels = ts.prune_masks(model.tower, 0.9), torch.randn(8, 3, 8, 8, dtype=torch.float64)

    # the plain way: two networks
    dense = ts.Contrastive(copy.deepcopy(model.tower), 8, "batch").double().train()
    dense.head.load_state_dict(model.head.state_dict())
    sparse, names = copy.deepcopy(dense), [name for name, _ in model.dense_norms()]
    assert len(names) == len(model.norms) == 22                            # 20 of the encoder, 2 of the head
    for name, norm in zip(names, model.norms):
        sparse.get_submodule(name).load_state_dict(norm.state_dict())
    with torch.no_grad():
        for name, mask in masks.items():
            sparse.tower.get_parameter(name).mul_(mask)
    ts.nt_xent(dense(pixels[:4]), sparse(pixels[4:]), 0.2).backward()

    ts.nt_xent(*ts.encode(model, {0: pixels[:4], 1: pixels[4:]}, masks), 0.2).backward()
    norms = {f"{name}.{k}" for name in names for k in ("weight", "bias")}
    for name, p in dense.named_parameters():
        other = sparse.get_parameter(name).grad
        expected = p.grad if name in norms else p.grad + other * masks.get(name.removeprefix("tower."), 1)
        assert torch.allclose(model.get_parameter(name).grad, expected, atol=1e-10), name
    for name, norm in zip(names, model.norms):
        apart = sparse.get_submodule(name)
        assert torch.allclose(norm.weight.grad, apart.weight.grad, atol=1e-10), name
        assert torch.allclose(norm.running_mean, apart.running_mean) and norm.num_batches_tracked == 1, name
        assert torch.allclose(model.get_submodule(name).running_var, dense.get_submodule(name).running_var), name


def test_sdclr_prunes_anew_in_each_epoch(tmp_path, monkeypatch):
    events = []
    for name in ("prune_masks", "nt_xent"):
        of = getattr(ts, name)
        monkeypatch.setattr(ts, name, lambda *args, name=name, of=of: (events.append(name), of(*args))[1])
    few_steps(ts, tmp_path / "run", "--loss", "sdclr", "--max-steps", 4, base=MOVING)
    assert events == ["prune_masks", "nt_xent", "nt_xent"] * 2


# ---------------------------------------------------- MoCo ----------------------------------------------------------
def test_queue_is_first_in_first_out():
    """It starts with unit keys of the seed."""
    first, again, other = (ts.Queue(64, 8, seed).keys for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.allclose(first.norm(dim=1), torch.ones(64)) and first.mean(0).norm() < 0.5
    queue = ts.Queue(5, 2)
    expected = list(queue.keys.clone())
    for size in (2, 2, 2, 8):                                              # 2 does not divide 5; 8 is more than 5
        keys = unit(size, 2, seed=len(expected)).float()
        queue.push(keys)
        expected += keys
        held = torch.stack(expected[-5:]).sort(dim=0).values
        assert torch.allclose(queue.keys.sort(dim=0).values, held, atol=1e-6) and queue.count == len(expected) - 5


def test_keys_do_not_share_their_query_s_batch_statistics(monkeypatch):
    """Groups of 64 / 8 on any number of processes; two or more on a CPU, whose queries have their own statistics."""
    encoder, x, sizes = ts.Contrastive(resnet(), 8, "batch", linear=True).train(), torch.randn(64, 3, 8, 8), []
    whole, split = encoder(x), ts.encode_keys(encoder, x, seed=1, splits=4)
    assert split.shape == whole.shape and not torch.allclose(whole, split, atol=1e-3)       # other statistics
    encoder.register_forward_hook(lambda module, inputs, out: sizes.append(len(out)))
    for processes, expected in ((1, [8] * 8 + [64]), (2, [8] * 4 + [32])):
        monkeypatch.setattr(ts, "world", lambda processes=processes: processes)
        sizes.clear()
        for splits in (8, 1):
            ts.encode_keys(encoder, x[:64 // processes], seed=1, splits=splits)
        assert sizes == expected
    encoder.eval()
    assert torch.allclose(encoder(x), ts.encode_keys(encoder, x, seed=1, splits=4), atol=1e-5)            # same order


def test_what_moco_s_step_does(tmp_path, monkeypatch):
    """Keys follow by the momentum; no anchor has its own among its negatives; later they are in the queue."""
    moved, seen, update, loss = [], [], ts.update_momentum, ts.moco_loss

    def watch(key, tower, momentum):
        before, online = ([p.detach().clone() for p in m.parameters()] for m in (key, tower))
        update(key, tower, momentum)
        for k, a, b in zip(key.parameters(), before, online, strict=True):
            moved.append((a - b).abs().max().item())
            assert torch.allclose(k, 0.99 * a + 0.01 * b, atol=1e-6)
    monkeypatch.setattr(ts, "update_momentum", watch)
    monkeypatch.setattr(ts, "moco_loss", lambda q, k, queue, tau: (
        seen.append((F.normalize(k, dim=1), queue.clone())), loss(q, k, queue, tau))[1])
    few_steps(ts, tmp_path / "run", *"--loss moco --queue-size 40 --max-steps 2 --optimizer sgd --lr 1".split(),
              "--warmup-epochs", 0, base=MOVING)
    assert max(moved) > 1e-3 and len(seen) == 2
    for keys, queue in seen:
        assert len(queue) == 40 and not torch.isclose(keys @ queue.T, torch.ones(()), atol=1e-4).any()
    assert torch.allclose(seen[1][1][:16], seen[0][0], atol=1e-6)


# ---------------------------------------------------- runs ----------------------------------------------------------
def test_the_temperature_is_that_of_the_epoch(tmp_path):
    log = few_steps(ts, tmp_path / "a", "--max-steps", 6, "--period", 3, base=MOVING)
    assert [row["tau"] for row in log] == [ts.temperature(k // 2, period=3) for k in range(6)]


def test_a_replaced_image_has_the_temperature_of_its_own_class(tmp_path):
    """Coarse supervision: half of the head's images cannot be read, and some of the tail replace them."""
    for c, name in enumerate(("a", "b")):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    for i in range(20, 40):
        (tmp_path / "data" / "a" / f"{i:03}.png").write_bytes(b"no image")
    seen, batches = [], common.Batches.__iter__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Batches, "__iter__", lambda self: (seen.append(b) or b for b in batches(self)))
        flags = "--batch-size 8 --max-steps 3 --tau-head 1.0 --tau-tail 0.1 --max-bad-fraction 1 --log-every 1".split()
        log = few_steps(ts, tmp_path / "r", "--cpu", "--workers", 0, "--dataset", tmp_path / "data", *flags)
    data = common.load_data(str(tmp_path / "data"), "train")
    head = int(np.argsort(-np.bincount(data.labels), kind="stable")[0])
    for row, batch in zip(log, seen):
        own = np.asarray(data.labels)[np.asarray(batch["rows"])] == head
        assert row["tau"] == pytest.approx(np.where(own, 1.0, 0.1).mean())
    assert any((np.asarray(batch["rows"]) != np.asarray(batch["index"])).any() for batch in seen)


# ---------------------------------------------------- which weights are tested --------------------------------------
def test_the_epoch_is_chosen_among_every_twentieth_and_the_last(tmp_path):
    few_steps(ts, tmp_path / "a", *"--epochs 21 --batch-size 32 --eval-epoch auto".split(), base=MOVING)
    assert [r["step"] for r in rows(tmp_path / "a") if "eval" in r] == [0, 20, 21]


def test_stop_at_phase_keeps_the_schedules(tmp_path):
    args = ts.parse_args("--dataset cifar10-lt --stop-at-phase 0.7".split())  # the paper's: 1,880 of 2,000 epochs
    assert ts.last_step(SimpleNamespace(args=args, per_epoch=21, total=2000 * 21)) == 1880 * 21
    whole, cut = (few_steps(ts, tmp_path / f"r{len(flags)}", "--epochs", 9, "--period", 4, *flags, base=MOVING)
                  for flags in ([], ["--stop-at-phase", 0.75]))
    assert (len(whole), len(cut)) == (18, 14)                              # (2 - 1 + 0.75) * 4 epochs of 2 steps
    assert [(r["lr"], r["loss"]) for r in cut] == [(r["lr"], r["loss"]) for r in whole[:14]]
    for total, last in ((40, 35), (29, 15), (9, 9)):                       # 9 steps hold no period of 10
        args = ts.parse_args(f"--max-steps {total} --period 10 --epochs 10 --stop-at-phase 0.5".split())
        assert ts.last_step(SimpleNamespace(args=args, per_epoch=1, total=total)) == last


def test_eval_epoch_auto_tests_the_weights_of_the_best_val(tmp_path, monkeypatch, capsys):
    """Real runs, val replaced by a plan: its best after step 0, of equals the first, is saved and tested."""
    evaluate, plan = Evaluator.__call__, [90.0, 20.0, 30.0, 30.0, 10.0]    # at steps 0, 2, 4, 6, 8

    def planned(self, split, *more):
        metrics, chance, pieces = evaluate(self, split)
        if split == "val" and plan:
            value = plan.pop(0)
            for result in [r for r in metrics["moving-emoji"].values() if isinstance(r, dict)]:
                result["mean_per_class"] = value
        return metrics, chance, pieces
    monkeypatch.setattr(Evaluator, "__call__", planned)
    base = [*MOVING, "--max-steps", 8, "--period", 4, "--eval-every", 2]
    auto = run_script(ts, tmp_path / "auto", "--eval-epoch", "auto", "--save-every", 3, base=base)
    assert (auto["eval_epoch"], auto["eval_epoch_val"], auto["steps"], plan) == (2, 30.0, 8, [])
    assert "their --split-seed or --index-file, --eval-epoch 2\n" in capsys.readouterr().out

    # the way to the other splits: the same schedules, ended there
    number = run_script(ts, tmp_path / "number", "--eval-epoch", 2, base=base)
    assert (number["steps"], number["eval_epoch"], number["test"]) == (4, 2, auto["test"])
    assert helpers.equal_files(*(tmp_path / name / "model.safetensors" for name in ("auto", "number")))
    last, tested = tensors_of(tmp_path / "auto", 8), tensors_of(tmp_path / "number", 4)
    assert any(not torch.equal(last[k], tested[k]) for k in last if k.startswith("model/"))  # the run went on after it

    (tmp_path / "auto" / "checkpoints" / "step_8.pt").unlink()
    plan[:] = [10.0]                                                       # resumed from step 6: the best lies in it
    assert ts.main(ts.parse_args(["--resume", str(tmp_path / "auto")]))["test"] == auto["test"]
    plan[:] = [40.0]                                                       # a finished run evaluates its end again
    assert ts.main(ts.parse_args(["--resume", str(tmp_path / "auto")]))["eval_epoch"] == 4


# ---------------------------------------------------- pictures ------------------------------------------------------
def test_figures_have_a_fork_s_schedule_and_z(tmp_path, monkeypatch):
    """Its temperature, which the loss has; Fig. 2 is of z, whose cosines may be negative, not of features."""
    own = fork(ts, tmp_path, "    phase = (epoch % period) / period ", "    return 0.3 + epoch / 100\n    phase = 0 ")
    drawn, seen, shares = [], [], figures.ts.draw_shares
    monkeypatch.setattr(figures.ts, "save_figure", lambda *args: drawn.append(args))
    monkeypatch.setattr(figures.ts, "draw_shares", lambda axes, unit, args: (
        seen.append(unit), shares(axes, unit, args)))
    run_script(own, tmp_path / "fork", *"--eval-every 2 --max-steps 8 --period 3".split(), base=MOVING, pictures=True)
    assert seen[0].shape[1] == 128 and seen[0].min() < 0
    used = [row["tau"] for row in steps(tmp_path / "fork")]
    logged, = panel(drawn, "and coverage of the sphere").lines
    beside, = (ax for ax in panel(drawn, "(Fig. 4)").figure.axes if ax.get_ylabel() == "tau")
    line, = beside.lines
    assert list(logged.get_ydata()) == used and list(line.get_ydata()) == used[::2]
    assert used[::2] == pytest.approx([0.3, 0.31, 0.32, 0.33])
    assert list(line.get_xdata()) == [0, 1 / 3, 2 / 3, 0]


def test_figure_4_is_the_mean_over_the_last_period_of_runs(tmp_path, capsys):
    """tools.figures phase, of runs with 4 steps an epoch; 10 epochs of a third period do not count."""
    for name, period, epochs, height in (("a", 100, 200, 50.0), ("b", 200, 410, 60.0)):
        log = [{"step": 1, "loss": 2.0}]
        for e in range(0, epochs + 1, 10):
            top1 = height - 10 * abs((e % period) / period - 0.7) - (100 if e < period else 0)
            log.append({"step": 4 * e, "eval": {"d": {"few-shot": {"top1": top1}}}})
        write_files(tmp_path / name, {
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in log),
            "args.json": {"dataset": "d", "period": period, "schedule": "cos", "tau_head": 0.0},
            "summary.json": {"steps": 4 * epochs, "epochs": epochs}})
    several.main(["phase", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert "best at phase 0.700" in out and "0.700    55.00     5.00" in out and (tmp_path / "p.png").stat().st_size
