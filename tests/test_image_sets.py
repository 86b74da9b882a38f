"""Image sets by name, on replicas in the true form of the repositories.

Tars, parquet, files of classes and prompts; long tails: sizes, splits, SDCLR's files, ImageNet100's
lists, thirds of the classes.
"""

import common
from contrastive import data as data_sets
from contrastive import evaluation
from contrastive.core.metrics import accuracy_by_class_size
from contrastive.core.processes import UserError
from contrastive.data import images, long_tail
from contrastive.data.hub import COMMITS, announce_download
from contrastive.data.registry import SETS

import numpy as np
import pytest
import torch
from huggingface_hub import DryRunFileInfo
from timm.data import ImageNetInfo

import temperature_schedules as ts
from helpers import (
    CLASSES, caption, complains, encode, picture, rows, run_script, tar_samples, write_files,
    write_hub_table, write_images, write_tar)

PROMPTS = common.read_json(images.PROMPTS_FILE)


def write_classes(path, labels):
    """A tar of a classification set: s0.webp and s0.cls."""
    samples = {}
    for i, label in enumerate(labels):
        pixels = encode(picture(i), "webp", lossless=True)
        samples[f"s{i:07}"] = {"cls": str(label).encode(), "webp": pixels}
    write_tar(path, samples)


# {tar: its samples}
TARS = {
    "coco/test/0.tar": range(0, 6),
    "coco/test/1.tar": range(6, 12),
    "coco/train/0.tar": range(20, 26),
    "flickr30k/test/0.tar": range(0, 6),
    "cc3m/cc3m-train-0000.tar": range(0, 10),
    "cc3m/cc3m-train-0001.tar": range(10, 20),
    "cc3m/cc3m-validation-0000.tar": range(40, 46),
    "cc12m/cc12m-train-0000.tar": range(0, 3),
    "cc12m/cc12m-train-0001.tar": range(3, 6),
    "cc12m/cc12m-train-2175.tar": range(6, 9),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with local copies: coco, flickr30k, dtd, cc3m, cc12m, cifar100."""
    root = tmp_path_factory.mktemp("hub")
    for name, samples in TARS.items():
        write_tar(root / name, tar_samples(samples, "jpg", "json", "txt"))
    write_classes(root / "dtd" / "test" / "0.tar", [0, 1, 2, 0, 1, 2])
    write_files(root / "dtd", {
        "classnames.txt": "apple\npear_tree\nzebra\n\n",
        "zeroshot_classification_templates.txt": "a {c} texture.\na {c} pattern.\n"})
    file = root / "cifar100" / "cifar100" / "test-00000-of-00001.parquet"
    pictures = [picture(i) for i in range(6)]
    write_hub_table(file, [0, 1, 2, 0, 1, 2], CLASSES, pictures, image="img", label="fine_label")
    return root


# ---------------------------------------------------- the hub's sets -----------------------------
# set, split: (numbers of the pictures, prompts if it has classes, published count)
EXPECTED = {
    ("coco", "test"): (range(12), None, "5,000"),
    ("coco", "train"): (range(20, 26), None, "82,783"),
    ("flickr30k", "test"): (range(6), None, "1,000"),
    ("cc3m", "train"): (range(20), None, "2,910,000"),
    ("cc3m", "val"): (range(40, 46), None, "13,400"),
    ("cc12m", "train"): (range(6), None, "10,968,539"),
    ("cc12m", "val"): (range(6, 9), None, "5,000"),  # the last shard
    ("dtd", "test"): (range(6), ["a {c} texture.", "a {c} pattern."], "1,880"),
    ("cifar100", "test"): (range(6), PROMPTS["cifar"], "10,000"),
}


@pytest.mark.parametrize("name, split", EXPECTED)
def test_rows_of_a_set(name, split, hub):
    samples, prompts, count = EXPECTED[name, split]
    data = common.load_data(name, split, data_dir=f"{hub}/{name}")
    assert data.split == split
    assert data.prompts == prompts
    assert f"{len(samples)} examples, {count} expected" in data.note
    assert len(data) == len(samples)
    for k, i in enumerate(samples):
        pixels = data.read(k).permute(1, 2, 0).numpy()
        assert np.allclose(pixels, picture(i), atol=12)
        if prompts is None:
            assert data.captions(k) == [caption(i), caption(i, 1)]
        else:
            assert data.label_names[data.labels[k]] == CLASSES[i % 3]
            assert data.captions(k) == [CLASSES[i % 3].replace("_", " ")]


@pytest.mark.parametrize("counts, count", [("other_counts", 20), ("splits", 20.4)])
def test_number_of_another_paper_or_in_two_percent_is_published(counts, count, hub, monkeypatch):
    monkeypatch.setitem(getattr(SETS["cc3m"], counts), "train", count)
    data_sets.open_named.cache_clear()
    data = common.load_data("cc3m", "train", data_dir=f"{hub}/cc3m")
    assert "expected" not in data.note


COMMIT = "b" * 40
ONLY_HUB = "only what is read from the hub has a revision"


@pytest.mark.parametrize("name, split, words, options", [
    ("cifar100", "val", "it has: train, test; --holdout-fraction 0.05", {}),
    ("cc3m", "test", "cc3m has no test split; it has: train, val", {}),
    ("coco", "test", "a local copy: --data-dir, to evaluate on coco=DIR", {}),
    ("cifar10", "test", "a local copy: --data-dir, to evaluate on cifar10=DIR", {}),
    (f"emoji@{COMMIT}", "test", ONLY_HUB, {}),
    (f"/tmp@{COMMIT}", "test", ONLY_HUB, {}),
    (f"dtd@{COMMIT}", "test", ONLY_HUB, {"data_dir": "/tmp"}),
    ("cifar10-lt", "val", "-file x: --dataset cifar10-lt does not use it", {"few_shot_file": "x"}),
])
def test_what_a_set_does_not_have_is_refused(name, split, words, options):
    complains(name, split, words, **options)


# ---------------------------------------------------- ImageNet -----------------------------------
LABELS = [0, 134, 517, 744]  # the first synonym of two classes is crane
NAMES = {
    "wordnet": ["tench", "crane bird", "crane", "projectile"],
    "clip": ["tench", "crane bird", "construction crane", "missile"]}
NUM_PROMPTS = {"openai": 80, "slip": 7}
SLIP_PROMPTS = {
    "itap of a {c}.", "a bad photo of the {c}.", "a origami {c}.", "a photo of the large {c}.",
    "a {c} in a video game.", "art of the {c}.", "a photo of the small {c}."}


def write_imagenet_table(root):
    """As the gated repository; its validation split is the papers' test."""
    info = ImageNetInfo("imagenet-1k")
    names = [info.label_name_to_description(word) for word in info.label_names()]
    names[517] = "crane, machine"
    file = root / "data" / "validation-00000-of-00001.parquet"
    write_hub_table(file, LABELS, names, [picture(0)] * 4)


def write_imagenet_folders(root):
    """A part of the classes, whose folders are WordNet's ids."""
    for word in ("n01440764", "n02012849", "n03126707", "n04008634"):
        write_images(root / "val" / word, [0], "jpg")


def write_imagenet_tars(root):
    """Whatever names and prompts the tars have."""
    write_classes(root / "test" / "0.tar", LABELS)
    (root / "classnames.txt").write_text("\n".join(f"name {i}" for i in range(1000)))
    (root / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")


@pytest.mark.parametrize("class_names, prompts", [("wordnet", "openai"), ("clip", "slip")])
@pytest.mark.parametrize("name, write", [
    ("imagenet", write_imagenet_table), ("imagenet", write_imagenet_folders),
    ("imagenet1k", write_imagenet_tars)])
def test_classes_of_imagenet_have_the_names_and_prompts_of_clip_or_slip(
        name, write, class_names, prompts, tmp_path):
    write(tmp_path)
    options = {"class_names": class_names, "prompts": prompts, "data_dir": str(tmp_path)}
    data = common.load_data(name, "test", **options)
    assert data.split == "test"
    assert [data.captions(k)[0].strip() for k in range(4)] == NAMES[class_names]
    assert len(set(data.prompts)) == NUM_PROMPTS[prompts]
    assert SLIP_PROMPTS <= set(data.prompts) <= set(PROMPTS["imagenet"])


def test_folders_that_are_no_wordnet_ids_are_refused(tmp_path):
    write_images(tmp_path / "val" / "n01440764", [0])
    write_images(tmp_path / "val" / "n03126708", [0])
    words = "has 2 classes, of which n03126708 is no WordNet id of ImageNet's"
    complains("imagenet", "test", words, data_dir=str(tmp_path))


# ---------------------------------------------------- the hub itself -----------------------------
@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder where the hub's repositories are."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_data_set_of_the_hub_at_a_commit(cache):
    repo = cache / "datasets--clip-benchmark--wds_vtab-dtd"
    latest = "a" * 40
    write_files(repo, {"refs/main": latest})
    for commit in (latest, COMMIT):
        folder = repo / "snapshots" / commit
        write_classes(folder / "test" / "0.tar", [0])
        write_files(folder, {"classnames.txt": commit})
    for name, commit in (("dtd", latest), (f"dtd@{COMMIT}", COMMIT)):
        data = common.load_data(name, "test")
        assert data.name == "dtd"
        assert data.label_names == [commit]
        assert COMMITS["clip-benchmark/wds_vtab-dtd"] == commit
    complains(f"dtd@{'c' * 40}", "test", "dtd: clip-benchmark/wds_vtab-dtd ")


def test_download_is_announced_and_refused_without_space(cache, capsys):
    cached = DryRunFileInfo(COMMIT, 10**18, "a.tar", "", True, False)
    small = DryRunFileInfo(COMMIT, 10**5, "b.tar", "", False, True)
    large = DryRunFileInfo(COMMIT, 10**15, "c.tar", "", False, True)
    announce_download("org/name", [cached])
    assert capsys.readouterr().out == ""
    announce_download("org/name", [cached, small])
    assert capsys.readouterr().out.startswith("org/name: 0.0 GB to download into ")
    with pytest.raises(UserError, match="1000000.0 GB to download .* are free; the variable HF"):
        announce_download("org/name", [large])


# ---------------------------------------------------- long tails ---------------------------------
def sizes_of(data):
    return np.bincount(data.labels, minlength=len(data.label_names)).tolist()


def test_long_tail_counts_are_the_papers():
    ten = common.long_tail_counts(4500, 10, 100)
    assert ten == [4500, 2697, 1617, 969, 581, 348, 208, 125, 75, 45]
    assert sum(common.long_tail_counts(450, 100, 100)) == 9_754
    assert common.long_tail_counts(100, 5, 1) == [100] * 5


def test_emoji_by_class():
    train, val, test = long_tail.labelled_sets("emoji").values()
    assert len(train) == 3118
    assert len(train.label_names) == 70
    assert sizes_of(val) == [1] * 70
    assert sizes_of(test) == [2] * 70
    held_out = {*val.keys(), *test.keys()}
    assert len(held_out) == 210
    assert held_out.isdisjoint(key.split()[0] for key in train.keys())


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Copies of ten classes of 20 training and 4 test images, whose colour is their number in
    torchvision's order: `hub` in the order of the tar, `other` in torchvision's. Beside them the
    files of SDCLR's splits."""
    root = tmp_path_factory.mktemp("cifar")
    labels = np.random.default_rng(1).permutation(200) % 10
    names = [f"class {c}" for c in range(10)]
    batches = np.arange(200).reshape(5, 40)
    for copy, order in (("hub", [3, 2, 1, 4, 0]), ("other", [0, 1, 2, 3, 4])):
        for split, numbers in (("train", batches[order].flatten()), ("test", batches[0])):
            file = root / copy / f"{split}-00000-of-00001.parquet"
            pictures = [np.full((32, 32, 3), i, np.uint8) for i in numbers]
            write_hub_table(file, labels[numbers], names, pictures, image="img")
    tail = []
    for label, size in enumerate(common.long_tail_counts(16, 10, 4)):
        tail.extend(np.flatnonzero(labels == label)[:size])
    val = np.setdiff1d(batches, tail)[:30]
    np.save(root / "tail.npy", tail[::-1])
    np.save(root / "val.npy", val)
    np.save(root / "shared.npy", [*val, tail[0]])
    return root


def sets_of(root, ratio, copy="hub", split_seed=0, **files):
    """The splits of a copy of CIFAR-10-LT; files: {kind: its name}."""
    options = {"imbalance_ratio": ratio, "split_seed": split_seed, "data_dir": str(root / copy)}
    for kind, name in files.items():
        options[f"{kind}_file"] = str(root / name)
    return long_tail.labelled_sets("cifar10-lt", **options)


def numbers_of(data):
    """torchvision's number of each image."""
    return data.pixels[:, 0, 0, 0].tolist()


def test_cifar_long_tail(cifar):
    """A tenth of each class is set aside as val."""
    train, val, test = sets_of(cifar, 9).values()
    assert sorted(sizes_of(train), reverse=True) == common.long_tail_counts(18, 10, 9)
    assert sizes_of(val) == [2] * 10
    assert len(test) == 40
    assert train.pixels.shape[1:] == (3, 32, 32)
    assert not set(numbers_of(train)) & set(numbers_of(val))
    assert sizes_of(sets_of(cifar, 1)["train"]) == [18] * 10
    other = sets_of(cifar, 9, split_seed=1)["train"]
    assert sizes_of(other) != sizes_of(train)


def test_index_files_of_sdclr_name_torchvisions_images(cifar):
    train, val, _ = sets_of(cifar, 4, index="tail.npy").values()
    tail = np.load(cifar / "tail.npy").tolist()
    assert numbers_of(train) == tail
    assert not set(numbers_of(val)) & set(tail)
    assert sizes_of(val) == [2] * 10  # a tenth
    val = sets_of(cifar, 4, index="tail.npy", val="val.npy")["val"]
    assert sorted(numbers_of(val)) == np.load(cifar / "val.npy").tolist()


@pytest.mark.parametrize("copy, val, words", [
    ("hub", "shared.npy", "--val-file .*: 1 of its images are in --index-file"),
    ("other", "val.npy", "torchvision's, and the images in the order of the hub")])
def test_files_of_sdclr_that_do_not_fit_are_refused(copy, val, words, cifar):
    with pytest.raises(UserError, match=words):
        sets_of(cifar, 4, copy, index="tail.npy", val=val)


def test_tail_that_leaves_a_class_without_images_is_refused(cifar):
    words = "--imbalance-ratio 100 leaves 4 of 10 classes without an image; the largest"
    complains("cifar10-lt", "train", words, data_dir=str(cifar / "hub"))


# ---- ImageNet100's lists ----
LISTS = {  # {list: numbers of the images of each of three classes}
    "index": [range(48), range(30), range(6)],
    "val": [range(50, 52)] * 3,
    "test": [range(56, 60)] * 3,
    "few_shot": [range(53, 55)] * 3,
}


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A small ImageNet tree and lists as SDCLR's: 48, 30 and 6 images of three classes."""
    root = tmp_path_factory.mktemp("imagenet")
    for c in range(3):
        write_images(root / "train" / f"n0{c}", range(60), "jpg")
    for name, numbers in LISTS.items():
        lines = []
        for c in range(3):
            lines += [f"train/n0{c}/{i:03}.jpg {c}\n" for i in numbers[c]]
        (root / f"{name}.txt").write_text("".join(lines))
    return root


def listed(root, **files):
    """The sets of some lists: {kind: list}."""
    options = {f"{kind}_file": str(root / f"{name}.txt") for kind, name in files.items()}
    return long_tail.labelled_sets("imagenet100-lt", data_dir=str(root), **options)


def test_imagenet100_has_the_images_of_its_lists(lists):
    """Nothing is held out."""
    assert listed(lists, index="index", test="test").keys() == {"train", "test"}
    files = {kind: kind for kind in LISTS}
    for data, name in zip(listed(lists, **files).values(), LISTS):
        lines = (lists / f"{name}.txt").read_text().splitlines()
        for key, label, line in zip(data.keys(), data.labels, lines, strict=True):
            assert f"{key} {label}" == line


@pytest.mark.parametrize("kind", ["val", "test"])
def test_imagenet100_lists_that_share_images_are_refused(kind, lists):
    files = {"index": "index", "test": "test"} | {kind: "index"}
    with pytest.raises(UserError, match=f"--{kind}-file .*: 84 of its images are in --index-file "):
        listed(lists, **files)


def test_imagenet100_runs_without_val(lists, tmp_path):
    flags = (
        "--cpu --dataset imagenet100-lt --image-encoder small --head-norm none --image-size 24 "
        "--batch-size 8 --workers 0 --max-steps 2 --shot-limits 20 10 "
        f"--data-dir {lists} --index-file {lists}/index.txt --test-file {lists}/test.txt "
        f"--few-shot-file {lists}/few_shot.txt"
    ).split()
    summary = run_script(ts, tmp_path / "r", *flags)
    assert summary["val"] == {"imagenet100-lt": {}}
    metrics = summary["test"]["imagenet100-lt"]["few-shot"]
    assert {"top1", "head", "tail"} <= metrics.keys()
    assert "mid" not in metrics  # thirds would be one class each
    assert common.load_model(tmp_path / "r")[2].short == round(24 / 0.875)
    for row in rows(tmp_path / "r"):
        assert "eval" not in row or row["coverage"] > 0
    with pytest.raises(UserError, match="val"):
        run_script(ts, tmp_path / "best", *flags, "--eval-epoch", "best", "--eval-every", 1)


def test_few_shot_probe_learns_from_its_own_images():
    """Axes 0..3 as classes: the training images say another class than the few-shot images."""
    axes = torch.eye(4)
    train = (None, axes, np.array([3, 0, 1, 2]))
    few = (None, axes, np.arange(4))
    metrics, _, _ = evaluation.by_class.class_metrics(["probe"], train, few, few=few)
    assert metrics["few-shot"]["top1"] == 100
    assert metrics["few-shot"]["shots"] == 1
    assert metrics["all"]["top1"] == 0


def test_head_mid_and_tail_are_classes_above_100_and_below_20_images_or_thirds():
    train_labels = np.repeat([0, 1, 2, 3], [20, 101, 19, 100])
    accuracy = {0: 4.0, 1: 1.0, 2: 8.0, 3: 2.0}
    parts = accuracy_by_class_size(train_labels, accuracy, [100, 20])
    assert parts == {"head": 1.0, "mid": 3.0, "tail": 8.0}
    thirds = accuracy_by_class_size(train_labels, accuracy)
    assert thirds == {"head": 1.5, "mid": 4.0, "tail": 8.0}
