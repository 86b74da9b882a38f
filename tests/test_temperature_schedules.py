"""TS: the schedule, the losses against loops in float64, the queue, the prune masks, long tails, resume, several
processes, bad input."""

import copy
import json
import math
import os
import re
import shutil
from types import SimpleNamespace

import common
from contrastive import engine, evaluation, figures
from contrastive.data import long_tail
from contrastive.engine.processes import UserError, flatten
from contrastive.evaluation.metrics import head_mid_tail

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

import helpers
import launch
import temperature_schedules as ts
from helpers import (
    CLASSES,
    equal_files,
    fork,
    picture,
    refused,
    rows,
    run_script,
    steps,
    tensors_of,
    unit,
    write_images,
)

N, D, K = 5, 4, 7
SMALL = ["--cpu", *" --batch-size 64 --image-size 24 --eval-every 0 --log-every 1".split()]
TAIL = [*SMALL, *"--imbalance-ratio 50 --eval-every 2 --max-steps 8 --period 0.1".split()]  # 27 steps an epoch


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
    simclr = SimpleNamespace(loss="simclr", batch_size=N)
    guess = ts.random_guess(SimpleNamespace(args=simclr))
    assert [ts.nt_xent(same, same, 0.3).item()] * 2 == pytest.approx(guess)
    moco = SimpleNamespace(loss="moco", batch_size=N, queue_size=12)
    ts.random_guess(run := SimpleNamespace(args=moco))
    queue = unit(1, D).expand(run.negatives, D)
    assert len(queue) == 12 and ts.moco_loss(same, same, queue, 0.3).item() == pytest.approx(math.log(13))


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
    for _, norm in model.dense_norms():
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    for norm in model.norms:
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
        assert not torch.allclose(norm.running_var, model.get_submodule(name).running_var), name


def test_sdclr_s_recipes():
    def flags(words):
        args = ts.parse_args(words.split())
        return args.schedule, args.tau_min, args.prune
    assert flags("--dataset imagenet100-lt --loss sdclr") == ("fixed", 0.3, 0.3)
    assert flags("--dataset cifar10-lt --loss sdclr") == ("fixed", 0.2, 0.9)
    assert flags("--dataset cifar10-lt --loss sdclr --schedule cos") == ("cos", 0.1, 0.9)
    assert flags("--dataset cifar10-lt --schedule fixed") == ("fixed", 0.2, 0.9)
    assert flags("--schedule fixed --tau-min 0.5") == ("fixed", 0.5, 0.9)
    assert flags("--dataset imagenet100-lt") == ("cos", 0.1, 0.9) and flags("--loss sdclr") == ("cos", 0.1, 0.9)


def test_queue_is_first_in_first_out():
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


def _key_groups(rank, world, folder):
    """Sizes of the groups in which this process's share of 64 images becomes keys."""
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init{world}", rank=rank, world_size=world)
    encoder, sizes = ts.Contrastive(resnet(), 8, "batch", linear=True).train(), []
    encoder.register_forward_hook(lambda module, inputs, out: sizes.append(len(out)))
    for splits in (8, 1):
        ts.encode_keys(encoder, torch.randn(64 // world, 3, 8, 8), seed=1, splits=splits)
    engine.processes.write_json(f"{folder}/{world}_{rank}.json", sizes)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def test_key_groups_do_not_depend_on_the_processes(tmp_path):
    """The images in a group, 64 / 8; on a CPU, where queries have their process's statistics, always two groups."""
    for world in (1, 2):
        launch.spawn(_key_groups, (world, str(tmp_path)), world)
    one, two, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1"))
    assert one == [8] * 8 + [64] and two == other == [8] * 4 + [32]


def test_keys_are_encoded_in_the_precision_of_the_queries(tmp_path):
    for i, name in enumerate(CLASSES):
        write_images(tmp_path / "data" / name, range(i, 48, 3))
    seen, flags = {}, [*SMALL, "--dataset", str(tmp_path / "data"), *"--batch-size 8 --workers 0".split()]
    def note(module, inputs, out):
        if isinstance(module, torch.nn.Linear) and module.training:
            seen.setdefault("query" if module.weight.requires_grad else "key", set()).add(out.dtype)
    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        for precision, kind in (("no", torch.float32), ("bf16", torch.bfloat16)):
            seen.clear()
            main(tmp_path / precision, *flags, *"--loss moco --max-steps 2 --queue-size 100".split(),
                 "--mixed-precision", precision)
            assert seen == {"query": {kind}, "key": {kind}}
    finally:
        hook.remove()


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
        images = [{"bytes": helpers.encode(picture(i % 120, 32, 32)), "path": None} for i in range(n)]
        table = datasets.Dataset.from_dict({"img": images, "label": [i % 10 for i in range(n)]}, features=features)
        table.to_parquet(str(root / f"{split}-00000-of-00001.parquet"))
    return root.parent


def test_a_ratio_that_the_data_do_not_have_is_said():
    """Sets with a tail of their own: the order of the classes is drawn, and a small one may have to be the largest."""
    train = long_tail.labelled_sets("emoji", 10, 0)["train"]
    sizes = np.bincount(train.labels)
    said = re.search(r"WARNING: .*-ratio 10 takes; the ratio is ([\d.]+), (\d+) to (\d+) images", train.note)
    assert list(map(int, said.group(2, 3))) == [sizes.max(), sizes.min()]
    assert float(said[1]) == pytest.approx(sizes.max() / sizes.min(), rel=0.01) and float(said[1]) > 11


def test_cifar_long_tail(cifar):
    def open_sets(ratio, split_seed=0, name="cifar10-lt", **options):
        return long_tail.labelled_sets(name, ratio, split_seed, data_dir=str(cifar), **options)
    sets = open_sets(9)
    sizes = np.bincount(sets["train"].labels, minlength=10)
    assert sorted(sizes)[::-1] == common.long_tail_counts(18, 10, 9)  # a tenth of each class is set aside
    assert len(sets["val"]) == 20 and len(sets["test"]) == 40 and sets["train"].pixels.shape[1:] == (3, 32, 32)
    assert not set(keys_of(sets["train"])) & set(keys_of(sets["val"]))
    other = np.bincount(open_sets(9, 1)["train"].labels, minlength=10)
    assert not np.array_equal(other, sizes)  # another split, another order of the classes
    assert np.array_equal(np.bincount(open_sets(1)["train"].labels), [18] * 10)
    with pytest.raises(UserError, match="--imbalance-ratio 100 leaves 4 of 10 classes without an image; the largest"):
        common.load_data("cifar10-lt", "train", data_dir=str(cifar))  # the usual tail, in any other program
    # by its plain name it has no val: everything is trained on, or --hold-out-val takes one out; cifar10-lt has its own
    plain, held = (open_sets(0, name="cifar10", hold_out_val=h) for h in (False, True))
    assert set(plain) == {"train", "test"} and len(plain["train"]) == 200
    train, val = (set(keys_of(held[s])) for s in ("train", "val"))
    assert val and not train & val and len(train | val) == 200
    same = open_sets(9, hold_out_val=True)
    assert all(keys_of(sets[s]) == keys_of(same[s]) for s in sets)


TAIL_OF = [3, 7, 1, 0, 9, 2, 8, 5, 6, 4]  # classes, largest first, of the index files below


@pytest.fixture(scope="module")
def torchvision_s(tmp_path_factory):
    """CIFAR-10 of 500 images, whose colour is their number in torchvision's order: the labels in that order, a folder
    in the hub's form, where the batches come as in the tar, and one in torchvision's order, which is refused."""
    import datasets
    labels = np.random.default_rng(1).permutation(np.repeat(range(10), 50))
    names = datasets.ClassLabel(names=[f"class {c}" for c in range(10)])
    features, folders = datasets.Features(img=datasets.Image(), label=names), []
    batches = dict(zip((1, 2, 3, 4, 5), np.arange(500).reshape(5, 100)))
    for order in ((4, 3, 2, 5, 1), (1, 2, 3, 4, 5)):
        root = tmp_path_factory.mktemp("cifar10")
        for split, numbers in (("train", np.concatenate([batches[b] for b in order])), ("test", np.arange(40))):
            images = [np.full((32, 32, 3), (i % 256, i // 256, 0), dtype=np.uint8) for i in numbers]
            images = [{"bytes": helpers.encode(image), "path": None} for image in images]
            table = datasets.Dataset.from_dict({"img": images, "label": labels[numbers].tolist()}, features=features)
            table.to_parquet(str(root / f"{split}-00000-of-00001.parquet"))
        folders.append(root)
    return labels, *folders


def numbers_of(data):
    """The numbers in torchvision's order that the images of `torchvision_s` show."""
    return data.pixels[:, 0, 0, 0].numpy() + 256 * data.pixels[:, 1, 0, 0].numpy().astype(int)


def test_index_files_of_sdclr_name_torchvision_s_images(torchvision_s, tmp_path):
    labels, hub, other = torchvision_s

    def open_sets(file, root=hub, ratio=10, **more):
        return long_tail.labelled_sets("cifar10-lt", ratio, 0, index_file=str(tmp_path / file), data_dir=str(root),
                                       **more)

    def write(name, sizes):
        rng = np.random.default_rng(0)
        rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(TAIL_OF, sizes)]
        np.save(tmp_path / name, rng.permutation(np.concatenate(rows)))
        return np.load(tmp_path / name)
    sizes = common.long_tail_counts(44, 10, 10)
    indices = write("split1_D_i.npy", sizes)
    sets = open_sets("split1_D_i.npy")
    assert numbers_of(sets["train"]).tolist() == indices.tolist()
    assert np.bincount(sets["train"].labels)[TAIL_OF].tolist() == sizes
    val = numbers_of(sets["val"])
    assert not set(val) & set(indices) and set(np.bincount(sets["val"].labels)) == {5}  # a tenth, outside the file
    with pytest.raises(UserError, match="torchvision's, and the images in the order of the hub"):
        open_sets("split1_D_i.npy", other)

    uniform = write("split1_D_b.npy", [16] * 10)
    for ratio in (0, 1):  # without a tail
        assert numbers_of(open_sets("split1_D_b.npy", ratio=ratio)["train"]).tolist() == uniform.tolist()
    with pytest.raises(UserError, match="not a long tail of --imbalance-ratio 1: .*the order of the hub"):
        open_sets("split1_D_b.npy", other, ratio=1)
    np.save(tmp_path / "valIdxList.npy", np.setdiff1d(np.arange(500), indices)[:30])
    val = open_sets("split1_D_i.npy", val_file=str(tmp_path / "valIdxList.npy"))["val"]
    assert set(numbers_of(val)) == set(np.load(tmp_path / "valIdxList.npy"))


def test_index_files_that_name_no_long_tail(torchvision_s, tmp_path):
    labels, hub, _ = torchvision_s
    file = tmp_path / "some.npy"
    balanced = np.concatenate([np.flatnonzero(labels == c)[:16] for c in range(10)])
    for named, words in ((balanced, "not a long tail of --imbalance-ratio 10: "),
                         ([3, 999], "^--index-file .*some.npy: index 999 is out of bounds .* size 500$")):
        np.save(file, np.array(named))
        with pytest.raises(UserError, match=words):
            long_tail.labelled_sets("cifar10-lt", 10, 0, index_file=str(file), data_dir=str(hub))
    for name, kind in (("cifar10-lt", "few_shot"), ("emoji", "index")):
        with pytest.raises(UserError, match=f"-file x: --dataset {name} does not use it"):
            long_tail.labelled_sets(name, **{f"{kind}_file": "x"})


def test_only_cifar10_is_in_another_order(tmp_path):
    np.save(tmp_path / "all.npy", np.arange(50_000))
    rows, same = (long_tail._rows(base, "", str(tmp_path / "all.npy"), 50_000) for base in ("cifar10", "cifar100"))
    # torchvision's batch 1 is the last of the tar, 4 the first
    assert rows[[0, 10_000, 20_000, 30_000, 40_000]].tolist() == [40_000, 20_000, 10_000, 0, 30_000]
    assert sorted(rows) == list(range(50_000)) and rows[9_999] == 49_999
    assert (same == np.arange(50_000)).all()


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A small ImageNet tree and lists in the form of SDCLR's: 48, 30 and 6 images of three classes."""
    root = tmp_path_factory.mktemp("imagenet")
    for c in range(3):
        write_images(root / "train" / f"n0{c}", range(60), "jpg")
    keys = [[f"train/n0{c}/{i:03}.jpg {c}\n" for i in range(60)] for c in range(3)]
    for name, slices in (("LT", (48, 30, 6)), ("val", ((50, 52),) * 3), ("few", ((53, 55),) * 3),
                         ("test", ((56, 60),) * 3)):
        parts = [k[slice(*s)] if isinstance(s, tuple) else k[:s] for k, s in zip(keys, slices)]
        (root / f"{name}.txt").write_text("".join(line for part in parts for line in part))
    return root


def flags_of(root, *names):
    kinds = {"index": "LT", "test": "test", "val": "val", "few_shot": "few"}
    return {f"{kind}_file": str(root / f"{kinds[kind]}.txt") for kind in ("index", "test", *names)}


def test_imagenet100_list_files(lists):
    def open_sets(*names, **options):
        return long_tail.labelled_sets("imagenet100-lt", data_dir=str(lists), **flags_of(lists, *names), **options)

    def listed(name):
        return [line.split()[0] for line in (lists / f"{name}.txt").read_text().splitlines()]
    sets = open_sets()
    assert set(sets) == {"train", "test"} and keys_of(sets["train"]) == listed("LT")  # nothing is held out
    assert np.bincount(sets["train"].labels).tolist() == [48, 30, 6] and keys_of(sets["test"]) == listed("test")
    sets = open_sets("val", "few_shot")
    assert keys_of(sets["val"]) == listed("val") and keys_of(sets["few-shot"]) == listed("few")


def test_imagenet100_runs_without_val(lists, tmp_path, monkeypatch):
    probed, scores = [], evaluation.by_class.class_metrics
    monkeypatch.setattr(evaluation.retrieval, "class_metrics", lambda *args: (probed.append(args[3]), scores(*args))[1])
    files = [word for k, v in flags_of(lists, "few_shot").items() for word in (f"--{k.replace('_', '-')}", v)]
    flags = [*SMALL, *"--dataset imagenet100-lt --image-encoder small --head-norm none --batch-size 8 --workers 0 "
             "--max-steps 2 --shot-limits 40 10".split(), "--data-dir", str(lists), *files]
    summary = main(tmp_path / "r", *flags)
    assert summary["val"] == {"imagenet100-lt": {}} and summary["eval_epoch_val"] is None
    spec = engine.processes.read_json(tmp_path / "r" / "model.json")
    assert (spec["eval_crop"], common.load_model(tmp_path / "r")[2].short) == (0.875, round(24 / 0.875))
    found = [r for r in rows(tmp_path / "r") if "eval" in r]
    assert all(r["eval"] == {"imagenet100-lt": {}} and r["coverage"] > 0 for r in found) and len(found) == 2
    few = summary["test"]["imagenet100-lt"]["few-shot"]
    assert {"top1", "head", "mid", "tail"} <= few.keys()
    assert len(probed[-1][0]) == len((lists / "few.txt").read_text().splitlines()) == 6  # the images of the list
    with pytest.raises(UserError, match="imagenet100-lt has no val split; see --val-file"):
        main(tmp_path / "auto", *flags, *"--eval-epoch auto --eval-every 1".split())


def test_few_shot_probe_learns_from_its_own_images():
    """Axes 0..3 as classes: the training images say another class than the few-shot images."""
    eye = torch.eye(4)
    train, y = eye.repeat(6, 1), np.roll(np.arange(4), 1).tolist() * 6
    data = ["probe"], (None, train, np.array(y)), (None, eye, np.arange(4))
    metrics, _, _ = evaluation.by_class.class_metrics(*data, few=(None, eye, np.arange(4)))
    assert metrics["few-shot"]["top1"] == 100 and metrics["all"]["top1"] == 0
    assert evaluation.by_class.class_metrics(*data)[0]["few-shot"]["top1"] == 0


def test_head_mid_tail_of_imagenet100():
    sizes = np.r_[np.linspace(1280, 101, 39).astype(int), [100] * 24, [20] * 24, [19] * 12, 6]
    labels, hit = np.repeat(np.arange(100), sizes), {c: float(c) for c in range(100)}
    parts = head_mid_tail(labels, hit, [100, 20])
    assert parts == {"head": np.mean(range(39)), "mid": np.mean(range(39, 87)), "tail": np.mean(range(87, 100))}
    assert head_mid_tail(labels, hit)["head"] == np.mean(range(34)) == head_mid_tail(labels, hit, [0, 0])[
        "head"]
    assert ts.parse_args("--dataset imagenet100-lt".split()).shot_limits == [100, 20]


def test_imagenet_s_evaluation_view():
    from torchvision.transforms.v2 import functional as V
    args = ts.parse_args("--dataset imagenet100-lt".split())
    transform = common.EvalTransform(args.image_size, (0.5,) * 3, (0.5,) * 3, args.eval_resize, args.eval_crop)
    for H, W in ((300, 400), (500, 375), (333, 333)):
        image = torch.randint(256, (3, H, W), dtype=torch.uint8)
        expected = V.center_crop(V.resize(image, 256, antialias=True), [224, 224])
        differs = (transform.raw(image).int() - expected.int()).abs()
        assert differs.float().mean() < 1  # torchvision rounds the long side down
    square = torch.randint(256, (3, 256, 256), dtype=torch.uint8)
    assert torch.equal(transform.raw(square), square[:, 16:240, 16:240])


# ---------------------------------------------------- runs -----------------------------------------------------------
def resumed(folder, last):
    """folder/whole as if killed before its last step was saved, resumed as folder/cut: its last checkpoint, equal."""
    cut = shutil.copytree(folder / "whole", folder / "cut")
    (cut / "checkpoints" / f"step_{last}.pt").unlink()
    (cut / "model.safetensors").unlink()
    ts.main(ts.parse_args(["--resume", str(cut)]))
    whole, other = (folder / name / "checkpoints" / f"step_{last}.pt" for name in ("whole", "cut"))
    assert equal_files(whole, other)
    return tensors_of(folder / "whole", last)


@pytest.mark.parametrize("loss", ["simclr", "moco", "sdclr"])
def test_resume_goes_on_as_if_never_stopped(tmp_path, monkeypatch, pictures, loss):
    flags = [*SMALL, "--loss", loss, *"--max-steps 7 --save-every 3 --period 0.1 --imbalance-ratio 50".split(),
             *(["--queue-size", "100"] if loss == "moco" else [])]
    main(tmp_path / "whole", *flags)
    monkeypatch.setattr(ts, "draw", lambda *a: None)  # once is enough
    a = resumed(tmp_path, 7)  # from step 6
    more = {"moco": {"own"}, "sdclr": {"tensors"}}.get(loss, set())        # queue and keys, masks
    assert {k.split("/")[0] for k in a} == {"model", "optimizer", "processes"} | more
    trained = sum(v.numel() for k, v in a.items() if k.startswith("model/"))  # not MoCo's second encoder
    assert engine.processes.read_json(tmp_path / "whole" / "summary.json")["parameters"] == trained
    whole, cut = ([(r["step"], r["loss"], r["tau"]) for r in steps(tmp_path / name)] for name in ("whole", "cut"))
    assert whole == cut
    assert {p.name for p in (tmp_path / "whole").iterdir()} >= {
        "curves.png", "classes.png", "figures.png", "summary.json", "model.safetensors"}
    model, tokenizer, transform = common.load_model(tmp_path / "whole")
    features = model(transform(torch.zeros(3, 30, 30, dtype=torch.uint8))[None])[0]
    assert tokenizer is None and features.shape == (1, model.vision.width)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Class folders of ten small images each."""
    root = tmp_path_factory.mktemp("folders")
    for c, name in enumerate(CLASSES):
        write_images(root / name, range(10 * c, 10 * c + 10))
    return root


RESNET = [*"--cpu --batch-size 8 --image-size 16 --log-every 1 --image-encoder resnet18-cifar "
          "--no-pretrained --head-norm batch --optimizer sgd --train-features clean".split()]


def test_the_queue_starts_with_random_keys_and_not_with_the_anchors_own(folders, tmp_path, monkeypatch):
    """Unit keys, the same wherever the seed is; in the first steps no anchor finds its own key among its negatives."""
    torch.manual_seed(1)
    first, again, other = (ts.Queue(64, 8, seed).keys for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.allclose(first.norm(dim=1), torch.ones(64)) and first.mean(0).norm() < 0.5
    seen, real = [], ts.moco_loss
    monkeypatch.setattr(ts, "moco_loss", lambda q, k, queue, tau: (
        seen.append((F.normalize(k, dim=1), queue.clone())), real(q, k, queue, tau))[1])
    few = "--cpu --batch-size 8 --image-size 16 --workers 0 --loss moco --max-steps 2 --queue-size 100"
    main(tmp_path / "r", "--dataset", folders, *few.split())
    for keys, queue in seen:
        assert len(queue) == 100 and not torch.isclose(keys @ queue.T, torch.ones(()), atol=1e-6).any()
    assert torch.allclose(seen[1][1][:len(seen[0][0])], seen[0][0], atol=1e-6)  # of the first step: in the second


def test_both_sets_of_batchnorms_are_resumed(folders, tmp_path):
    flags = [*RESNET, "--dataset", str(folders), *"--loss sdclr --max-steps 3 --save-every 2 --lr 0.1".split()]
    main(tmp_path / "whole", *flags)
    a = resumed(tmp_path, 3)
    a = {k.removeprefix("model/"): v for k, v in a.items() if k.startswith("model/")}
    assert sum(k.startswith("norms.") and k.endswith("running_var") for k in a) == 22
    assert all((a[k] == 3).all() for k in a if k.endswith("num_batches_tracked"))
    assert not torch.equal(a["norms.0.running_mean"], a["tower.vision.body.bn1.running_mean"])


def test_a_seed_that_draws_no_split_is_refused(capsys):
    lists = "--index-file a --test-file b --data-dir .".split()
    for flags, allowed in ((["--dataset", "cifar10-lt"], True), (["--dataset", "cifar10-lt", *lists[:2]], False),
                           (["--dataset", "imagenet100-lt", *lists], False),
                           (["--dataset", "imagenet100-lt", *lists, "--imbalance-ratio", "50"], True)):
        asked = [*flags, "--split-seed", "3"]
        if allowed:
            assert ts.parse_args(asked).split_seed == 3
        else:
            assert "--split-seed: only where a long tail is drawn" in refused(ts.parse_args, asked, capsys)


def test_decay_and_start_of_the_authors(folders, tmp_path):
    decays, starts, learnt = {}, {}, ("--schedule", "fixed", "--learnable-tau")
    for name, more in (("ours", ()), ("authors", ("--decay-all", "--no-zero-init", *learnt))):
        main(tmp_path / name, *RESNET, "--dataset", folders, *"--max-steps 1 --lr 0 --lr-end 0".split(),
             "--weight-decay", 1e-4, *more)
        state = torch.load(tmp_path / name / "checkpoints" / "step_1.pt", weights_only=True)
        decays[name] = [g["weight_decay"] for g in state["optimizer"]["param_groups"]]
        weights = load_file(tmp_path / name / "model.safetensors")
        starts[name] = [float(weights[f"vision.body.layer1.0.bn{k}.weight"].mean()) for k in (1, 2)]
    assert decays == {"ours": [1e-4, 0], "authors": [1e-4, 1e-4, 0]}       # the third is the learnt tau's
    assert starts == {"ours": [1, 0], "authors": [1, 1]}
    groups = torch.load(tmp_path / "authors/checkpoints/step_1.pt", weights_only=True)["optimizer"]["param_groups"]
    assert len(groups[2]["params"]) == 1
    for name in ts.RECIPES:
        args = ts.parse_args(["--dataset", name])
        assert (args.decay_all, args.zero_init) == ((True, False) if name.endswith("-lt") else (False, True))


def test_recipes_that_end_at_their_worst_phase_choose_the_epoch_on_val(folders, tmp_path, capsys):
    chosen = {name: ts.parse_args(["--dataset", name]).eval_epoch for name in ts.RECIPES}
    assert {name for name, epoch in chosen.items() if epoch == "auto"} == {"cifar10-lt", "cifar100-lt",
                                                                           "fashion-mnist-lt"}
    assert ts.parse_args("--dataset cifar10-lt --stop-at-phase 0.7".split()).eval_epoch == ""
    summary = main(tmp_path / "auto", *SMALL, "--dataset", str(folders), *"--epochs 21 --batch-size 16".split(),
                   *"--image-size 8 --eval-epoch auto".split())
    per_epoch = summary["steps"] // 21
    assert [r["step"] for r in rows(tmp_path / "auto") if "eval" in r] == [0, 20 * per_epoch, 21 * per_epoch]
    assert f"other splits: --eval-epoch {summary['eval_epoch']:g}\n" in capsys.readouterr().out


def test_stop_at_phase_keeps_the_schedules(tmp_path):
    args = ts.parse_args("--dataset cifar10-lt --stop-at-phase 0.7".split())  # the paper's: 1,880 of 2,000 epochs
    assert ts.last_step(SimpleNamespace(args=args, per_epoch=21, total=2000 * 21)) == 1880 * 21
    flags = [*SMALL, *"--epochs 0.3 --period 0.1".split()]
    whole, cut = main(tmp_path / "a", *flags), main(tmp_path / "b", *flags, "--stop-at-phase", "0.7")
    assert (whole["steps"], cut["steps"]) == (14, round((3 - 1 + 0.7) * 0.1 * 48)) and cut["steps"] < whole["steps"]
    a, b = ([(r["lr"], r["loss"]) for r in steps(tmp_path / name)] for name in "ab")
    assert b == a[:cut["steps"]]
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
    assert auto == engine.processes.read_json(tmp_path / "auto" / "summary.json")
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
    launch.finish("temperature_schedules", [*flags, "two"], tmp_path / "log", processes=2)
    two, means = engine.processes.read_json(tmp_path / "two" / "summary.json"), {"one": {}, "two": {}}
    for name, summary in (("one", one), ("two", two)):  # a pure function of the rows
        for row in [r for r in rows(tmp_path / name) if "eval" in r and r["step"]]:
            results = [m["mean_per_class"] for m in row["eval"]["emoji"].values() if isinstance(m, dict)]
            means[name][row["step"]] = np.mean(results)
        best = max(means[name], key=means[name].get)
        assert list(means[name]) == [2, 4] and best == round(27 * summary["eval_epoch"])
    assert two["processes"] == 2 and two["eval_epoch"] == one["eval_epoch"]
    assert list(means["two"].values()) == pytest.approx(list(means["one"].values()), abs=1)  # of 140 images rounding
    assert flatten(two["test"]) == pytest.approx(flatten(one["test"]), abs=7)  # may turn one or two


def test_own_class_folders_with_a_tail(tmp_path, capsys):
    for c, name in enumerate(CLASSES):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    summary = main(tmp_path / "r", *SMALL, "--dataset", tmp_path / "data", "--imbalance-ratio", 4,
                   *"--batch-size 8 --max-steps 2 --train-features augmented".split())
    assert summary["steps"] == 2 and re.search(r"classes +\d, \d+ to (8|9|10) images", capsys.readouterr().out)


def test_a_replaced_image_has_the_temperature_of_its_own_class(tmp_path):
    """Coarse supervision: the last two of 40 head images cannot be read, and the first two of the tail replace them."""
    for c, name in enumerate(("a", "b")):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    for i in range(20, 40):
        (tmp_path / "data" / "a" / f"{i:03}.png").write_bytes(b"no image")
    args = [*SMALL, "--dataset", tmp_path / "data", *"--batch-size 8 --max-steps 3 --tau-head 1.0 --tau-tail 0.1 "
            "--max-bad-fraction 1 --log-every 1".split()]
    seen, batches = [], common.Batches.__iter__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Batches, "__iter__", lambda self: (seen.append(b) or b for b in batches(self)))
        main(tmp_path / "r", *args)
    data = common.load_data(str(tmp_path / "data"), "train")
    sizes = np.bincount(data.labels)
    head = int(np.argsort(-sizes, kind="stable")[0])
    for row, batch in zip(steps(tmp_path / "r"), seen):
        own = np.asarray(data.labels)[np.asarray(batch["rows"])] == head
        assert row["tau"] == pytest.approx(np.where(own, 1.0, 0.1).mean())
        assert [data.key(i) for i in batch["rows"]] == list(batch["keys"])
    assert any((np.asarray(batch["rows"]) != np.asarray(batch["index"])).any() for batch in seen)


def test_figure_2_is_of_z(folders, tmp_path, monkeypatch, pictures):
    """Whose cosines may be negative: the features have a width of 512 and are never below 0."""
    seen, shares = [], figures.ts.draw_shares
    monkeypatch.setattr(figures.ts, "draw_shares", lambda axes, unit, args: (
        seen.append(unit), shares(axes, unit, args)))
    main(tmp_path / "r", *RESNET, "--dataset", folders, "--max-steps", 1)
    assert seen[0].shape[1] == 128 and seen[0].min() < 0


def test_figures_have_a_fork_s_schedule(tmp_path, monkeypatch, pictures):
    """The temperature beside the class sizes and over the period (Fig. 4) is the script's own, which the loss has."""
    own = fork(ts, tmp_path, "    phase = (epoch % period) / period ", "    return 0.3 + epoch / 100\n    phase = 0 ")
    drawn = []
    monkeypatch.setattr(figures.ts, "save_figure", lambda *args: drawn.append(args))
    flags = "--imbalance-ratio 50 --eval-every 2 --max-steps 4 --period 3 --batch-size 860 --image-size 12".split()
    run_script(own, tmp_path / "fork", *SMALL, *flags, pictures=True)
    used = {row["epoch"]: row["tau"] for row in steps(tmp_path / "fork")}
    stairs, = helpers.panel(drawn, "and coverage of the sphere").patches
    beside, = (ax for ax in helpers.panel(drawn, "(Fig. 4)").figure.axes if ax.get_ylabel() == "tau")
    line, = beside.lines
    epochs = np.arange(len(used))
    assert len(used) > 1 and list(stairs.get_data().values) == list(line.get_ydata()) == list(used.values())
    assert list(line.get_xdata()) == list(epochs % 3 / 3)
    assert list(used.values()) == pytest.approx(0.3 + epochs / 100)


def write_run(folder, period, epochs, accuracy, every=10):
    """What tools.figures phase reads of a run with 4 steps an epoch: accuracy(phase) at every `every` epochs."""
    folder.mkdir()
    args = {"dataset": "d", "period": period, "schedule": "cos", "tau_head": 0.0}
    engine.processes.write_json(folder / "args.json", args)
    engine.processes.write_json(folder / "summary.json", {"steps": 4 * epochs, "epochs": epochs})
    found = [{"step": 4 * e, "eval": {"d": {"few-shot": {"top1": accuracy(e)}}}} for e in range(0, epochs + 1, every)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"step": 1, "loss": 2.0}, *found]))


def test_figure_4_is_the_mean_over_the_last_period_of_runs(tmp_path, capsys):
    from tools import figures as several

    def peak(period, height):
        return lambda e: height - 10 * abs((e % period) / period - 0.7) - (100 if e < period else 0)
    write_run(tmp_path / "a", 100, 200, peak(100, 50.0))
    write_run(tmp_path / "b", 200, 410, peak(200, 60.0))  # 10 epochs of a third period do not count
    several.main(["phase", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert "best at phase 0.700" in out and "0.700    55.00     5.00" in out and (tmp_path / "p.png").stat().st_size
    write_run(tmp_path / "high", 10, 20, lambda e: 70.0, every=1)  # flat curves; the second is not read at phase 0
    write_run(tmp_path / "low", 20, 20, lambda e: 50.0, every=2)
    several.main(["phase", str(tmp_path / "high"), str(tmp_path / "low"), "--out", str(tmp_path / "p.png")])
    values = {line.split()[1] for line in capsys.readouterr().out.splitlines() if re.match(r" +[01]\.\d{3} ", line)}
    assert values == {"60.00"}
    write_run(tmp_path / "short", 300, 200, peak(300, 50.0))
    with pytest.raises(UserError, match="last full period"):
        several.last_period(tmp_path / "short")


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
        launch.spawn(_gradients, (world, str(tmp_path)), world)
        for rank in range(world):
            got = torch.load(tmp_path / f"{world}_{rank}.pt", weights_only=True)
            for name in one:
                near = 1e-10 if name != "queue" else 0
                assert torch.allclose(got[name], one[name], atol=near), (world, rank, name)


# ---------------------------------------------------- bad input ------------------------------------------------------
@pytest.mark.parametrize("flags,message", [
    ("--tau-head 1 --tau-tail 0.1 --tau-max 0.6", "--tau-max: only without --schedule fixed, --tau-head and"),
    ("--tau-max 0.05", "must be at least --tau-min"), ("--tau-head 1", "give both"), ("--tau-tail 1", "give both"),
    ("--stop-at-phase 0.7 --period 99", "hold no full --period"),
    ("--loss moco --chunk-size 8", "not with --loss moco"),
    ("--eval-epoch 31", "at most --epochs 30"),
    ("--eval-epoch 0", "must be auto, or > 0"), ("--eval-epoch last", "must be auto"),
    ("--eval-epoch 3 --stop-at-phase 0.7", "only without --eval-epoch"),
    ("--shot-limits 20 100", "TAIL must be from 1 to HEAD + 1"), ("--shot-limits 5 0", "or both 0")])
def test_bad_flags(flags, message, capsys):
    assert message in refused(ts.parse_args, flags.split(), capsys)


def test_bad_data(tmp_path):
    def stopped(*flags):
        with pytest.raises(UserError) as error:
            main(tmp_path / "runs" / "r", *SMALL, *flags)
        assert "\n" not in str(error.value)
        return str(error.value)
    assert "no classes" in stopped("--dataset", helpers.write_captions(tmp_path / "c", 30))
    assert "has BatchNorm" in stopped(*"--image-encoder resnet18-cifar --chunk-size 8 --max-steps 1".split())


def test_which_row_s_weights_are_tested():
    rows = [{"step": s, "eval": {}} | more for s, more in ((0, {"val_mean": 1.0}), (50, {"val_mean": 9.0}), (100, {}))]
    assert ts.chosen_row(rows, SimpleNamespace(eval_epoch=""))["step"] == 100
    assert ts.chosen_row(rows, SimpleNamespace(eval_epoch="auto"))["step"] == 50
    assert ts.chosen_row(rows[-1:], SimpleNamespace(eval_epoch="auto"))["step"] == 100
