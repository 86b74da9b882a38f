"""Long-tail sets of labelled images: sizes, splits, SDCLR's files, ImageNet100's lists, thirds of the classes."""

import re

import common
from contrastive import evaluation
from contrastive.data import long_tail
from contrastive.engine.processes import UserError, read_json
from contrastive.evaluation.metrics import head_mid_tail

import numpy as np
import pytest
import torch

import helpers
import temperature_schedules as ts
from helpers import picture, rows, run_script, write_images


def keys_of(data):
    return [data.key(i) for i in range(len(data))]


def sizes_of(data):
    return np.bincount(data.labels, minlength=len(data.label_names))


def test_long_tail_counts_are_the_papers():
    ten, hundred = common.long_tail_counts(4500, 10, 100), common.long_tail_counts(450, 100, 100)
    assert ten == [4500, 2697, 1617, 969, 581, 348, 208, 125, 75, 45] and sum(ten) == 11_165
    assert sum(hundred) == 9_754 and (hundred[0], hundred[-1]) == (450, 4)
    assert common.long_tail_counts(100, 5, 1) == [100] * 5


def test_emoji_classes_and_a_ratio_that_they_do_not_have():
    """Sets with a tail of their own: the order of the classes is drawn, and a small one may have to be the largest."""
    sets = long_tail.labelled_sets("emoji")
    assert len(sets["train"]) == 3118 and len(sizes_of(sets["train"])) == 70 and sizes_of(sets["train"]).min() == 5
    assert set(sizes_of(sets["test"])) == {2} and set(sizes_of(sets["val"])) == {1}
    base = {s: {k.split()[0] for k in keys_of(d)} for s, d in sets.items()}
    assert not base["train"] & base["test"] and not base["train"] & base["val"] and not base["val"] & base["test"]
    train = long_tail.labelled_sets("emoji", 10, 0)["train"]
    said = re.search(r"WARNING: .*-ratio 10 takes; the ratio is ([\d.]+), (\d+) to (\d+) images", train.note)
    assert list(map(int, said.group(2, 3))) == [sizes_of(train).max(), sizes_of(train).min()]
    assert float(said[1]) > 11


def write_cifar(root, labels, pictures, splits):
    """A local copy in the form of uoft-cs/cifar10, parquet with img and label: splits {name: numbers}."""
    import datasets
    classes = datasets.ClassLabel(names=[f"class {c}" for c in range(10)])
    features = datasets.Features(img=datasets.Image(), label=classes)
    for split, numbers in splits.items():
        images = [{"bytes": helpers.encode(pictures(i)), "path": None} for i in numbers]
        rows = {"img": images, "label": [int(labels[i]) for i in numbers]}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(str(root / f"{split}-00000-of-00001.parquet"))
    return root


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Ten classes of 20 and 4 images."""
    root = tmp_path_factory.mktemp("cifar")
    return write_cifar(root, np.arange(200) % 10, lambda i: picture(i % 120, 32, 32),
                       {"train": range(200), "test": range(40)})


def test_cifar_long_tail(cifar):
    def open_sets(ratio, split_seed=0, name="cifar10-lt", **options):
        return long_tail.labelled_sets(name, ratio, split_seed, data_dir=str(cifar), **options)
    sets = open_sets(9)
    sizes = sizes_of(sets["train"])
    assert sorted(sizes)[::-1] == common.long_tail_counts(18, 10, 9)  # a tenth of each class is set aside
    assert len(sets["val"]) == 20 and len(sets["test"]) == 40 and sets["train"].pixels.shape[1:] == (3, 32, 32)
    assert not set(keys_of(sets["train"])) & set(keys_of(sets["val"]))
    assert not np.array_equal(sizes_of(open_sets(9, 1)["train"]), sizes)  # another split, another order of the classes
    assert np.array_equal(sizes_of(open_sets(1)["train"]), [18] * 10)
    with pytest.raises(UserError, match="--imbalance-ratio 100 leaves 4 of 10 classes without an image; the largest"):
        common.load_data("cifar10-lt", "train", data_dir=str(cifar))  # the usual tail, in any other program
    # by its plain name it has no val: everything is trained on, or --hold-out-val takes one out; cifar10-lt has its own
    plain, held = (open_sets(0, name="cifar10", hold_out_val=h) for h in (False, True))
    assert set(plain) == {"train", "test"} and len(plain["train"]) == 200
    train, val = (set(keys_of(held[s])) for s in ("train", "val"))
    assert val and not train & val and len(train | val) == 200
    same = open_sets(9, hold_out_val=True)
    assert all(keys_of(sets[s]) == keys_of(same[s]) for s in sets)


def test_index_files_of_sdclr_name_torchvision_s_images(tmp_path):
    """500 images, whose colour is their number in torchvision's order; in the hub's files the batches come as in the
    tar. A copy in torchvision's order is refused."""
    labels, tail_of = np.random.default_rng(1).permutation(np.repeat(range(10), 50)), [3, 7, 1, 0, 9, 2, 8, 5, 6, 4]
    batches = dict(zip((1, 2, 3, 4, 5), np.arange(500).reshape(5, 100)))
    for name, order in (("hub", (4, 3, 2, 5, 1)), ("other", (1, 2, 3, 4, 5))):
        (tmp_path / name).mkdir()
        write_cifar(tmp_path / name, labels, lambda i: np.full((32, 32, 3), (i % 256, i // 256, 0), dtype=np.uint8),
                    {"train": np.concatenate([batches[b] for b in order]), "test": range(40)})

    def open_sets(file, root="hub", ratio=10, **more):
        return long_tail.labelled_sets("cifar10-lt", ratio, 0, index_file=str(tmp_path / file),
                                       data_dir=str(tmp_path / root), **more)

    def write(name, sizes):
        rng = np.random.default_rng(0)
        rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(tail_of, sizes)]
        np.save(tmp_path / name, rng.permutation(np.concatenate(rows)))
        return np.load(tmp_path / name)

    def numbers_of(data):
        return data.pixels[:, 0, 0, 0].numpy() + 256 * data.pixels[:, 1, 0, 0].numpy().astype(int)
    sizes = common.long_tail_counts(44, 10, 10)
    indices, uniform = write("tail.npy", sizes), write("uniform.npy", [16] * 10)
    sets = open_sets("tail.npy")
    assert numbers_of(sets["train"]).tolist() == indices.tolist() and sizes_of(sets["train"])[tail_of].tolist() == sizes
    assert not set(numbers_of(sets["val"])) & set(indices) and set(sizes_of(sets["val"])) == {5}  # a tenth, outside
    for ratio in (0, 1):  # without a tail
        assert numbers_of(open_sets("uniform.npy", ratio=ratio)["train"]).tolist() == uniform.tolist()
    np.save(tmp_path / "val.npy", np.setdiff1d(np.arange(500), indices)[:30])
    val = open_sets("tail.npy", val_file=str(tmp_path / "val.npy"))["val"]
    assert set(numbers_of(val)) == set(np.load(tmp_path / "val.npy"))
    np.save(tmp_path / "out.npy", np.array([3, 999]))
    for file, more, words in (("tail.npy", dict(root="other"), "torchvision's, and the images in the order of the hub"),
                              ("uniform.npy", dict(root="other", ratio=1), "not a long tail of --imbalance-ratio 1: "),
                              ("uniform.npy", {}, "not a long tail of --imbalance-ratio 10: "),
                              ("out.npy", {}, "^--index-file .*out.npy: index 999 is out of bounds .* size 500$")):
        with pytest.raises(UserError, match=words):
            open_sets(file, **more)
    for name, kind in (("cifar10-lt", "few_shot"), ("emoji", "index")):
        with pytest.raises(UserError, match=f"-file x: --dataset {name} does not use it"):
            long_tail.labelled_sets(name, **{f"{kind}_file": "x"})
    np.save(tmp_path / "all.npy", np.arange(50))
    assert (long_tail._rows("cifar100", "", str(tmp_path / "all.npy"), 50) == np.arange(50)).all()


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A small ImageNet tree and lists in the form of SDCLR's: 48, 30 and 6 images of three classes."""
    root = tmp_path_factory.mktemp("imagenet")
    for c in range(3):
        write_images(root / "train" / f"n0{c}", range(60), "jpg")
    keys = [[f"train/n0{c}/{i:03}.jpg {c}\n" for i in range(60)] for c in range(3)]
    for name, slices in (("index", [(0, 48), (0, 30), (0, 6)]), ("val", [(50, 52)] * 3), ("few_shot", [(53, 55)] * 3),
                         ("test", [(56, 60)] * 3)):
        lines = [line for of, (first, last) in zip(keys, slices) for line in of[first:last]]
        (root / f"{name}.txt").write_text("".join(lines))
    return root


def test_imagenet100_list_files(lists):
    def open_sets(*names, **options):
        files = {f"{name}_file": str(lists / f"{name}.txt") for name in ("index", "test", *names)}
        return long_tail.labelled_sets("imagenet100-lt", data_dir=str(lists), **files, **options)

    def listed(name):
        return [line.split()[0] for line in (lists / f"{name}.txt").read_text().splitlines()]
    sets = open_sets()
    assert set(sets) == {"train", "test"} and keys_of(sets["train"]) == listed("index")  # nothing is held out
    assert sizes_of(sets["train"]).tolist() == [48, 30, 6] and keys_of(sets["test"]) == listed("test")
    sets = open_sets("val", "few_shot")
    assert keys_of(sets["val"]) == listed("val") and keys_of(sets["few-shot"]) == listed("few_shot")


def test_imagenet100_runs_without_val(lists, tmp_path, monkeypatch):
    probed, scores = [], evaluation.by_class.class_metrics
    monkeypatch.setattr(evaluation.retrieval, "class_metrics", lambda *args: (probed.append(args[3]), scores(*args))[1])
    files = [word for kind in ("index", "test", "few-shot")
             for word in (f"--{kind}-file", lists / f"{kind.replace('-', '_')}.txt")]
    flags = [*"--cpu --dataset imagenet100-lt --image-encoder small --head-norm none --image-size 24".split(),
             *"--batch-size 8 --workers 0 --max-steps 2 --shot-limits 40 10 --log-every 1".split(), "--data-dir", lists,
             *files]
    summary = run_script(ts, tmp_path / "r", *flags)
    assert summary["val"] == {"imagenet100-lt": {}} and summary["eval_epoch_val"] is None
    spec = read_json(tmp_path / "r" / "model.json")
    assert (spec["eval_crop"], common.load_model(tmp_path / "r")[2].short) == (0.875, round(24 / 0.875))
    found = [r for r in rows(tmp_path / "r") if "eval" in r]
    assert all(r["eval"] == {"imagenet100-lt": {}} and r["coverage"] > 0 for r in found) and len(found) == 2
    few = summary["test"]["imagenet100-lt"]["few-shot"]
    assert {"top1", "head", "mid", "tail"} <= few.keys() and len(probed[-1][0]) == 6  # the images of the list
    with pytest.raises(UserError, match="imagenet100-lt has no val split; see --val-file"):
        run_script(ts, tmp_path / "auto", *flags, *"--eval-epoch auto --eval-every 1".split())


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
    assert head_mid_tail(labels, hit)["head"] == np.mean(range(34)) == head_mid_tail(labels, hit, [0, 0])["head"]


def test_imagenet_s_evaluation_view():
    from torchvision.transforms.v2 import functional as V
    args = ts.parse_args("--dataset imagenet100-lt".split())
    transform = common.EvalTransform(args.image_size, (0.5,) * 3, (0.5,) * 3, args.eval_resize, args.eval_crop)
    image = torch.randint(256, (3, 300, 400), dtype=torch.uint8)
    expected = V.center_crop(V.resize(image, 256, antialias=True), [224, 224])
    assert (transform.raw(image).int() - expected.int()).abs().float().mean() < 1  # torchvision rounds the long side
    square = torch.randint(256, (3, 256, 256), dtype=torch.uint8)
    assert torch.equal(transform.raw(square), square[:, 16:240, 16:240])


def test_own_class_folders_with_a_tail(tmp_path, capsys):
    for c, name in enumerate(helpers.CLASSES):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    helpers.few_steps(ts, tmp_path / "r", "--dataset", tmp_path / "data", "--imbalance-ratio", 4,
                      *"--cpu --image-size 16 --batch-size 8 --max-steps 2 --train-features augmented".split())
    assert re.search(r"classes +\d, \d+ to (8|9|10) images", capsys.readouterr().out)
    with pytest.raises(UserError, match="no classes; --label-column names them"):
        long_tail.labelled_sets(str(helpers.write_captions(tmp_path / "c", 30)))
