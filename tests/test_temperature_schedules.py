"""TS: the schedule and the losses against loops in float64, MoCo's queue and keys, SDCLR's branches, which weights are
tested, pictures. test_long_tail.py has the data."""

import copy
import json
import math
from types import SimpleNamespace

import common
from contrastive import evaluation, figures
from contrastive.engine.processes import UserError, write_json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import helpers
import temperature_schedules as ts
from helpers import CLASSES, few_steps, fork, rows, run_script, steps, tensors_of, unit, write_images
from tools import figures as several

N, D, K = 5, 4, 7
SMALL = ["--cpu", *"--workers 0 --batch-size 64 --image-size 24 --eval-every 0 --log-every 1".split()]
TAIL = [*SMALL, *"--imbalance-ratio 50 --eval-every 2 --max-steps 8 --period 0.1".split()]  # 27 steps an epoch
MOVING = [*SMALL, *"--dataset moving-emoji --clips 32 16 16 --frames 2 --batch-size 16".split()]  # two steps an epoch


def main(folder, *flags):
    """A run; the fixture `pictures` says whether it draws."""
    return run_script(ts, folder, *flags, pictures=True)


# ---------------------------------------------------- method ---------------------------------------------------------
def test_cosine_temperature():
    values = [ts.temperature(e, "cos", 0.1, 1.0, 400) for e in (0, 100, 200, 280, 400, 600)]
    at_280 = 0.1 + 0.45 * (1 + math.cos(1.4 * math.pi))
    assert values == pytest.approx([1.0, 0.55, 0.1, at_280, 1.0, 0.1])  # 0, T/4, T/2, 0.7 T, T, 1.5 T


def test_other_schedules():
    def values(schedule):
        return [ts.temperature(e, schedule, 0.1, 0.5, 4) for e in range(5)]
    assert values("step") == [0.1, 0.1, 0.5, 0.5, 0.1]
    assert values("oscillating") == pytest.approx([0.5, 0.3, 0.1, 0.3, 0.5])
    assert ts.temperature(123, "fixed", 0.2, 1.0) == 0.2
    draws = [ts.temperature(e, "random", 0.1, 0.5, seed=3) for e in range(200)]
    assert draws == [ts.temperature(e, "random", 0.1, 0.5, seed=3) for e in range(200)]
    assert min(draws) >= 0.1 and max(draws) <= 0.5 and np.std(draws) > 0.1
    assert draws[0] != ts.temperature(0, "random", 0.1, 0.5, seed=4)


@pytest.mark.parametrize("per_anchor", [False, True])
def test_nt_xent_against_a_loop(per_anchor):
    z1, z2 = unit(N, D, seed=1), unit(N, D, seed=2)
    tau = torch.rand(N, dtype=torch.float64) + 0.1 if per_anchor else 0.2
    z, total = torch.cat([z1, z2]), 0.0
    for i in range(2 * N):
        t = float(tau[i % N]) if per_anchor else tau
        logits = {j: float(z[i] @ z[j]) / t for j in range(2 * N) if j != i}
        total += -logits[(i + N) % (2 * N)] + math.log(sum(math.exp(x) for x in logits.values()))
    assert ts.nt_xent(3 * z1, z2, tau).item() == pytest.approx(total / (2 * N))
    assert torch.isfinite(ts.nt_xent(z1.float(), z1.float(), 0.01))  # exp(100) would overflow


@pytest.mark.parametrize("per_anchor", [False, True])
def test_moco_loss_against_a_loop(per_anchor):
    q, k, queue = unit(N, D, seed=1).requires_grad_(), unit(N, D, seed=2).requires_grad_(), unit(K, D, seed=3)
    tau = torch.rand(N, dtype=torch.float64) + 0.1 if per_anchor else 0.2
    total = 0.0
    for i in range(N):
        t = float(tau[i]) if per_anchor else tau
        logits = [float(q[i] @ k[i]) / t] + [float(q[i] @ x) / t for x in queue]
        total += -logits[0] + math.log(sum(math.exp(x) for x in logits))
    loss = ts.moco_loss(q, k, queue, tau)
    assert loss.item() == pytest.approx(total / N)
    loss.backward()
    assert k.grad is None and q.grad.abs().sum() > 0


def test_coarse_temperature():
    tau = ts.coarse_temperature(torch.tensor([0, 3, 1, 2]), {0, 1}, 1.0, 0.1)
    assert tau.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])


def test_a_random_guess_has_the_loss_that_the_banner_says():
    """Equal embeddings: ln of the positive and the negatives, which for MoCo are the keys of the queue."""
    same = unit(1, D).expand(N, D)
    guess = ts.random_guess(SimpleNamespace(args=SimpleNamespace(loss="simclr", batch_size=N)))
    assert [ts.nt_xent(same, same, 0.3).item()] * 2 == pytest.approx(guess)
    run = SimpleNamespace(args=SimpleNamespace(loss="moco", batch_size=N, queue_size=12))
    loss = ts.moco_loss(same, same, unit(1, D).expand(12, D), 0.3).item()
    assert (loss, loss) == pytest.approx(ts.random_guess(run)) and run.negatives == 12


def test_coverage_counts_directions():
    part, images = ts.coverage(torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1)))
    assert part > 0.7 and sum(images) == 20_000 and len(images) > 450 and images == sorted(images, reverse=True)
    one = torch.randn(1, 8).expand(30, 8)
    assert ts.coverage(one) == (pytest.approx(1 / 500), [30])
    assert ts.coverage(torch.cat([one, -one])) == (pytest.approx(2 / 500), [30, 30])


def test_the_temperature_is_that_of_the_epoch(tmp_path):
    log = few_steps(ts, tmp_path / "a", "--max-steps", 6, "--period", 3, base=MOVING)
    assert [row["tau"] for row in log] == [ts.temperature(k // 2, period=3) for k in range(6)]


def test_a_learnt_tau_is_logged_as_it_is_saved(tmp_path):
    flags = "--max-steps 2 --schedule fixed --learnable-tau --lr 0.1 --lr-schedule constant".split()
    taus = [row["tau"] for row in few_steps(ts, tmp_path / "a", *flags, base=MOVING)]
    saved = torch.load(tmp_path / "a" / "checkpoints" / "step_2.pt", weights_only=True)["own"]["tau.log_tau"]
    assert taus[1] == saved.exp().item() and len({0.2, *taus}) == 3


# ---------------------------------------------------- SDCLR ----------------------------------------------------------
def test_prune_masks_keep_the_largest_weights_of_all_layers_together():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(20, 5))
    with torch.no_grad():
        net[0].weight.uniform_(2, 3)
        net[2].weight.uniform_(-1, 1)
    masks = ts.prune_masks(net, 0.25)
    assert set(masks) == {"0.weight", "2.weight"}
    assert masks["0.weight"].all() and (~masks["2.weight"]).sum() == math.ceil(0.25 * 208)  # the small ones alone
    assert net[2].weight[masks["2.weight"]].abs().min() >= net[2].weight[~masks["2.weight"]].abs().max()
    assert all(m.all() for m in ts.prune_masks(net, 0.0).values())
    assert sum(m.sum() for m in ts.prune_masks(net, 1.0).values()) == 1


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
    masks, pixels = ts.prune_masks(model.tower, 0.9), torch.randn(8, 3, 16, 16, dtype=torch.float64)

    # the plain way: two networks
    dense = ts.Contrastive(copy.deepcopy(model.tower), 8, "batch").double().train()
    dense.head.load_state_dict(model.head.state_dict())
    sparse = copy.deepcopy(dense)
    names = [name for name, _ in model.dense_norms()]
    assert len(names) == len(model.norms) == 22  # 20 of the encoder, 2 of the head
    for name, norm in zip(names, model.norms):
        sparse.get_submodule(name).load_state_dict(norm.state_dict())
    with torch.no_grad():
        for name, mask in masks.items():
            sparse.tower.get_parameter(name).mul_(mask)
    ts.nt_xent(dense(pixels[:4]), sparse(pixels[4:]), 0.2).backward()

    z1, z2 = ts.encode(model, {0: pixels[:4], 1: pixels[4:]}, masks)
    ts.nt_xent(z1, z2, 0.2).backward()
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
    prune, loss = ts.prune_masks, ts.nt_xent
    monkeypatch.setattr(ts, "prune_masks", lambda *args: (events.append("prune_masks"), prune(*args))[1])
    monkeypatch.setattr(ts, "nt_xent", lambda *args: (events.append("nt_xent"), loss(*args))[1])
    few_steps(ts, tmp_path / "run", "--loss", "sdclr", "--max-steps", 4, base=MOVING)
    assert events == ["prune_masks", "nt_xent", "nt_xent"] * 2


# ---------------------------------------------------- MoCo -----------------------------------------------------------
def test_queue_is_first_in_first_out():
    """It starts with unit keys of the seed."""
    first, again, other = (ts.Queue(64, 8, seed).keys for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.allclose(first.norm(dim=1), torch.ones(64)) and first.mean(0).norm() < 0.5
    queue = ts.Queue(5, 2)
    start = queue.keys.clone()
    pushed = [unit(2, 2, seed=s).float() for s in range(4)]
    for keys in pushed:
        queue.push(keys)
        if keys is pushed[0]:
            assert torch.allclose(queue.keys, torch.cat([keys, start[2:]]), atol=1e-6)
    last = torch.cat(pushed)[-5:]
    assert torch.allclose(queue.keys.sort(dim=0).values, last.sort(dim=0).values, atol=1e-6)
    queue.push(F.normalize(torch.randn(8, 2), dim=1))  # more than it holds
    assert len(queue.keys) == 5 and queue.count == 16


def test_keys_do_not_share_their_query_s_batch_statistics():
    encoder = ts.Contrastive(resnet(), 8, "batch", linear=True).train()
    x = torch.randn(16, 3, 16, 16)
    whole, split = encoder(x), ts.encode_keys(encoder, x, seed=1, splits=4)
    assert split.shape == whole.shape and not torch.allclose(whole, split, atol=1e-3)  # other statistics
    encoder.eval()
    assert torch.allclose(encoder(x), ts.encode_keys(encoder, x, seed=1, splits=4), atol=1e-5)  # same order


def test_key_groups_do_not_depend_on_the_processes(monkeypatch):
    """The images in a group, 64 / 8; on a CPU, where queries have their process's statistics, always two groups."""
    encoder, sizes = ts.Contrastive(resnet(), 8, "batch", linear=True).train(), []
    encoder.register_forward_hook(lambda module, inputs, out: sizes.append(len(out)))
    for processes, expected in ((1, [8] * 8 + [64]), (2, [8] * 4 + [32])):
        monkeypatch.setattr(ts, "world", lambda processes=processes: processes)
        sizes.clear()
        for splits in (8, 1):
            ts.encode_keys(encoder, torch.randn(64 // processes, 3, 8, 8), seed=1, splits=splits)
        assert sizes == expected


def test_what_moco_s_step_does(tmp_path, monkeypatch):
    """The key encoder follows by the momentum; no anchor finds its own key among its negatives; in the second step they
    are in the queue; keys are encoded in the precision of the queries."""
    moved, seen, kinds, update, loss = [], [], {}, ts.update_momentum, ts.moco_loss

    def watch(key, tower, momentum):
        before, online = ([p.detach().clone() for p in m.parameters()] for m in (key, tower))
        update(key, tower, momentum)
        for k, a, b in zip(key.parameters(), before, online, strict=True):
            moved.append((a - b).abs().max().item())
            assert torch.allclose(k, 0.99 * a + 0.01 * b, atol=1e-6)

    def note(module, inputs, out):
        if isinstance(module, torch.nn.Linear) and module.training:
            kinds.setdefault("query" if module.weight.requires_grad else "key", set()).add(out.dtype)
    monkeypatch.setattr(ts, "update_momentum", watch)
    monkeypatch.setattr(ts, "moco_loss", lambda q, k, queue, tau: (
        seen.append((F.normalize(k, dim=1), queue.clone())), loss(q, k, queue, tau))[1])
    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        few_steps(ts, tmp_path / "run", *"--loss moco --queue-size 40 --max-steps 2 --optimizer sgd --lr 1".split(),
                  *"--warmup-epochs 0 --mixed-precision bf16".split(), base=MOVING)
    finally:
        hook.remove()
    assert max(moved) > 1e-3 and kinds == {"query": {torch.bfloat16}, "key": {torch.bfloat16}}
    for keys, queue in seen:
        assert len(queue) == 40 and not torch.isclose(keys.float() @ queue.T, torch.ones(()), atol=1e-4).any()
    assert torch.allclose(seen[1][1][:16], seen[0][0].float(), atol=1e-2)


# ---------------------------------------------------- runs -----------------------------------------------------------
@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Class folders of ten small images each."""
    root = tmp_path_factory.mktemp("folders")
    for c, name in enumerate(CLASSES):
        write_images(root / name, range(10 * c, 10 * c + 10))
    return root


def test_a_replaced_image_has_the_temperature_of_its_own_class(tmp_path):
    """Coarse supervision: half of the head's images cannot be read, and some of the tail replace them."""
    for c, name in enumerate(("a", "b")):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    for i in range(20, 40):
        (tmp_path / "data" / "a" / f"{i:03}.png").write_bytes(b"no image")
    seen, batches = [], common.Batches.__iter__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Batches, "__iter__", lambda self: (seen.append(b) or b for b in batches(self)))
        flags = "--batch-size 8 --max-steps 3 --tau-head 1.0 --tau-tail 0.1 --max-bad-fraction 1".split()
        log = few_steps(ts, tmp_path / "r", *SMALL, "--dataset", tmp_path / "data", *flags)
    data = common.load_data(str(tmp_path / "data"), "train")
    head = int(np.argsort(-np.bincount(data.labels), kind="stable")[0])
    for row, batch in zip(log, seen):
        own = np.asarray(data.labels)[np.asarray(batch["rows"])] == head
        assert row["tau"] == pytest.approx(np.where(own, 1.0, 0.1).mean())
        assert [data.key(i) for i in batch["rows"]] == list(batch["keys"])
    assert any((np.asarray(batch["rows"]) != np.asarray(batch["index"])).any() for batch in seen)


# ---------------------------------------------------- which weights are tested ---------------------------------------
def test_recipes_that_end_at_their_worst_phase_choose_the_epoch_on_val(folders, tmp_path, capsys):
    chosen = {name: ts.parse_args(["--dataset", name]).eval_epoch for name in ts.RECIPES}
    assert {name for name, epoch in chosen.items() if epoch == "auto"} == {"cifar10-lt", "cifar100-lt",
                                                                           "fashion-mnist-lt"}
    summary = main(tmp_path / "auto", *SMALL, "--dataset", str(folders), *"--epochs 21 --batch-size 16".split(),
                   *"--image-size 8 --eval-epoch auto".split())
    per_epoch = summary["steps"] // 21
    assert [r["step"] for r in rows(tmp_path / "auto") if "eval" in r] == [0, 20 * per_epoch, 21 * per_epoch]
    assert f"their --split-seed or --index-file, --eval-epoch {summary['eval_epoch']:g}\n" in capsys.readouterr().out


def test_stop_at_phase_keeps_the_schedules(tmp_path):
    args = ts.parse_args("--dataset cifar10-lt --stop-at-phase 0.7".split())  # the paper's: 1,880 of 2,000 epochs
    assert ts.last_step(SimpleNamespace(args=args, per_epoch=21, total=2000 * 21)) == 1880 * 21
    flags = [*SMALL, *"--epochs 0.3 --period 0.1".split()]
    whole, cut = few_steps(ts, tmp_path / "a", *flags), few_steps(ts, tmp_path / "b", *flags, "--stop-at-phase", "0.7")
    assert (len(whole), len(cut)) == (14, round((3 - 1 + 0.7) * 0.1 * 48))
    assert [(r["lr"], r["loss"]) for r in cut] == [(r["lr"], r["loss"]) for r in whole[:len(cut)]]
    for total, last in ((40, 35), (29, 15), (9, 9)):  # in place of epochs; 9 steps hold no period of 10
        args = ts.parse_args(f"--max-steps {total} --period 10 --epochs 10 --stop-at-phase 0.5".split())
        assert ts.last_step(SimpleNamespace(args=args, per_epoch=1, total=total)) == last


def test_eval_epoch_auto_tests_the_weights_of_the_best_val(tmp_path, monkeypatch):
    """Real runs whose val results are replaced by a plan: its best after step 0, of equals the first, is what is saved
    and tested."""
    monkeypatch.setattr(ts, "draw", lambda *a: None)
    evaluate, plan = evaluation.retrieval.Evaluator.__call__, []

    def planned(self, split, *more):
        metrics, chance, pieces = evaluate(self, split)
        if split == "val" and plan:
            value = plan.pop(0)
            for result in [r for r in metrics["emoji"].values() if isinstance(r, dict)]:
                result["mean_per_class"] = value
        return metrics, chance, pieces
    monkeypatch.setattr(evaluation.retrieval.Evaluator, "__call__", planned)

    def resume():
        return ts.main(ts.parse_args(["--resume", str(tmp_path / "auto")]))

    plan[:] = 90.0, 20.0, 30.0, 30.0, 10.0  # at steps 0, 2, 4, 6, 8
    auto = main(tmp_path / "auto", *TAIL, "--eval-epoch", "auto", "--save-every", "3")
    assert (auto["eval_epoch"], auto["eval_epoch_val"], auto["steps"], plan) == (4 / 27, 30.0, 8, [])
    assert auto["val"]["emoji"] == rows(tmp_path / "auto")[6]["eval"]["emoji"]

    # the way to the other splits: the same schedules, ended there
    number = main(tmp_path / "number", *TAIL, "--eval-epoch", f"{4 / 27:g}")
    assert (number["steps"], number["eval_epoch"]) == (4, 4 / 27)
    assert number["test"] == auto["test"] and number["parameters"] == auto["parameters"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("auto", "number"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    last = tensors_of(tmp_path / "auto", 8)
    first = next(iter(a))
    assert not torch.equal(last[f"model/tower.{first}"], a[first])  # the run went on after it

    (tmp_path / "auto" / "checkpoints" / "step_8.pt").unlink()
    plan[:] = [10.0]  # resumed from step 6: the best lies in the checkpoint
    assert resume()["test"] == auto["test"]
    plan[:] = [40.0]  # a finished run evaluates its last step again
    assert resume()["eval_epoch"] == 8 / 27


# ---------------------------------------------------- pictures -------------------------------------------------------
def test_figures_have_a_fork_s_schedule_and_z(tmp_path, monkeypatch, pictures):
    """The temperature beside the class sizes and over the period (Fig. 4) is the script's own, which the loss has.
    Fig. 2 is of z, whose cosines may be negative: features are never below 0."""
    own = fork(ts, tmp_path, "    phase = (epoch % period) / period ", "    return 0.3 + epoch / 100\n    phase = 0 ")
    drawn, seen, shares = [], [], figures.ts.draw_shares
    monkeypatch.setattr(figures.ts, "save_figure", lambda *args: drawn.append(args))
    monkeypatch.setattr(figures.ts, "draw_shares", lambda axes, unit, args: (
        seen.append(unit), shares(axes, unit, args)))
    flags = "--imbalance-ratio 50 --eval-every 2 --max-steps 4 --period 3 --batch-size 860 --image-size 12".split()
    run_script(own, tmp_path / "fork", *SMALL, *flags, pictures=True)
    assert seen[0].shape[1] == 128 and seen[0].min() < 0
    used = {row["epoch"]: row["tau"] for row in steps(tmp_path / "fork")}
    logged, = helpers.panel(drawn, "and coverage of the sphere").lines
    beside, = (ax for ax in helpers.panel(drawn, "(Fig. 4)").figure.axes if ax.get_ylabel() == "tau")
    line, = beside.lines
    epochs = np.arange(len(used))
    assert len(used) > 1 and list(line.get_ydata()) == list(used.values())
    assert list(logged.get_ydata()) == [row["tau"] for row in steps(tmp_path / "fork")]
    assert list(line.get_xdata()) == list(epochs % 3 / 3)
    assert list(used.values()) == pytest.approx(0.3 + epochs / 100)


def write_run(folder, period, epochs, accuracy, every=10):
    """What tools.figures phase reads of a run with 4 steps an epoch: accuracy(phase) at every `every` epochs."""
    folder.mkdir()
    write_json(folder / "args.json", {"dataset": "d", "period": period, "schedule": "cos", "tau_head": 0.0})
    write_json(folder / "summary.json", {"steps": 4 * epochs, "epochs": epochs})
    found = [{"step": 4 * e, "eval": {"d": {"few-shot": {"top1": accuracy(e)}}}} for e in range(0, epochs + 1, every)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"step": 1, "loss": 2.0}, *found]))
    return str(folder)


def test_figure_4_is_the_mean_over_the_last_period_of_runs(tmp_path, capsys):
    def peak(period, height):
        return lambda e: height - 10 * abs((e % period) / period - 0.7) - (100 if e < period else 0)
    runs = [write_run(tmp_path / "a", 100, 200, peak(100, 50.0)),
            write_run(tmp_path / "b", 200, 410, peak(200, 60.0))]  # 10 epochs of a third period do not count
    several.main(["phase", *runs, "--out", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert "best at phase 0.700" in out and "0.700    55.00     5.00" in out and (tmp_path / "p.png").stat().st_size
    flat = [write_run(tmp_path / "high", 10, 20, lambda e: 70.0, every=1),  # the second is not read at phase 0
            write_run(tmp_path / "low", 20, 20, lambda e: 50.0, every=2)]
    several.main(["phase", *flat, "--out", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert {line.split()[1] for line in out.splitlines() if line.lstrip()[:2] in ("0.", "1.")} == {"60.00"}
    with pytest.raises(UserError, match="last full period"):
        several.last_period(tmp_path / write_run(tmp_path / "short", 300, 200, peak(300, 50.0)))


def test_a_seed_that_draws_no_split_is_refused(capsys):
    lists = "--index-file a --test-file b --data-dir .".split()
    for flags, allowed in ((["--dataset", "cifar10-lt"], True), (["--dataset", "cifar10-lt", *lists[:2]], False),
                           (["--dataset", "imagenet100-lt", *lists], False),
                           (["--dataset", "imagenet100-lt", *lists, "--imbalance-ratio", "50"], True)):
        asked = [*flags, "--split-seed", "3"]
        if allowed:
            assert ts.parse_args(asked).split_seed == 3
        else:
            said = helpers.refused(ts.parse_args, asked, capsys)
            assert "--split-seed: only where --imbalance-ratio" in said


def test_decay_of_all_but_a_learnt_tau(tmp_path):
    few = "--cpu --workers 0 --max-steps 1 --batch-size 8 --image-size 16 --eval-every 0".split()
    run_script(ts, tmp_path / "r", *few, *"--decay-all --weight-decay 0.3 --schedule fixed --learnable-tau".split())
    state = torch.load(tmp_path / "r" / "checkpoints" / "step_1.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0] and len(groups[2]["params"]) == 1
