"""Image sets by name, on replicas in the true form of the repositories, and the table of names.

Tars, parquet, files of classes and prompts; long tails: sizes, splits, SDCLR's files, ImageNet100's
lists, thirds of the classes.
"""

import importlib

import common
from contrastive import data as data_sets
from contrastive import evaluation
from contrastive.core.metrics import accuracy_by_class_size
from contrastive.core.processes import UserError
from contrastive.data import images, long_tail, questions, videos
from contrastive.data.hub import COMMITS, announce_download
from contrastive.data.registry import SETS

import numpy as np
import pytest
import torch
from huggingface_hub import DryRunFileInfo
from timm.data import ImageNetInfo

import temperature_schedules as ts
from helpers import (
    CLASSES, caption, complains, encode, picture, rows, run_script, tar_samples,
    write_files, write_hub_table, write_images, write_tar)

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
    "flickr30k/train/0.tar": range(20, 26),
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
    for split, samples in (("train", range(34)), ("test", range(6))):
        file = root / "cifar100" / "cifar100" / f"{split}-00000-of-00001.parquet"
        pictures = [picture(i) for i in samples]
        labels = np.array(samples) % 3
        write_hub_table(file, labels, CLASSES, pictures, image="img", label="fine_label")
    return root


def load(name, split, root, **options):
    return common.load_data(name, split, data_dir=str(root / name), **options)


# ---------------------------------------------------- the hub's sets -----------------------------
# set, split: (numbers of the pictures, prompts if it has classes, words of the note)
EXPECTED = {
    ("coco", "test"): (range(12), None, "12 examples, 5,000 expected"),
    ("coco", "train"): (range(20, 26), None, "82,783 expected"),
    ("flickr30k", "train"): (range(20, 26), None, "29,000 expected"),
    ("flickr30k", "test"): (range(6), None, "1,000 expected"),
    ("cc3m", "train"): (range(20), None, "2,910,000 expected"),
    ("cc3m", "val"): (range(40, 46), None, "13,400 expected"),
    ("cc12m", "train"): (range(6), None, "10,968,539 expected"),
    ("cc12m", "val"): (range(6, 9), None, "5,000 expected"),  # the last shard
    ("dtd", "test"): (range(6), ["a {c} texture.", "a {c} pattern."], "1,880 expected"),
    ("cifar100", "test"): (range(6), PROMPTS["cifar"], "10,000 expected"),
}


@pytest.mark.parametrize("name, split", EXPECTED)
def test_rows_of_a_set(name, split, hub):
    samples, prompts, words = EXPECTED[name, split]
    data = load(name, split, hub)
    assert data.split == split
    assert data.prompts == prompts
    assert words in data.note
    assert len(data) == len(samples)
    for k, i in enumerate(samples):
        pixels = data.read(k).permute(1, 2, 0).numpy().astype(int)
        assert np.abs(pixels - picture(i)).mean() < 3
        if prompts is None:
            assert data.captions(k) == [caption(i), caption(i, 1)]
        else:
            assert data.labels[k] == i % 3
            assert data.captions(k) == [CLASSES[i % 3].replace("_", " ")]
    assert data.label_names == (CLASSES if prompts else None)


def test_number_of_another_paper_or_within_a_tolerance_is_as_published(hub, monkeypatch):
    monkeypatch.setitem(SETS["cc3m"].other_counts, "train", 20)
    monkeypatch.setitem(SETS["coco"].splits, "train", 7)
    monkeypatch.setitem(SETS["coco"].tolerance, "train", 0.5)
    data_sets.open_named.cache_clear()
    assert "expected" not in load("cc3m", "train", hub).note
    assert "expected" not in load("coco", "train", hub).note
    data_sets.open_named.cache_clear()


def test_split_that_a_set_lacks_is_held_out_or_refused(hub):
    held = load("cifar100", "val", hub, holdout_fraction=0.05).column("key")
    rest = load("cifar100", "train", hub, holdout_fraction=0.05).column("key")
    assert held
    assert sorted(map(int, held + rest)) == list(range(34))
    where = str(hub / "cifar100")
    complains("cifar100", "val", "it has: train, test; --holdout-fraction 0.05", data_dir=where)
    complains("cc3m", "test", "cc3m has no test split; it has: train, val")


@pytest.mark.parametrize("name", ["coco", "cifar10"])
def test_set_without_the_hub_names_the_flag_of_a_copy(name):
    complains(name, "test", f"a local copy: --data-dir, to evaluate on {name}=DIR")


# ---------------------------------------------------- ImageNet -----------------------------------
LABELS = [0, 134, 517, 744]  # the first synonym of two classes is crane
WORDNET = ["tench", "crane bird", "crane", "projectile"]
CLIP = ["tench", "crane bird", "construction crane", "missile"]
NAMES = {"wordnet": WORDNET, "clip": CLIP}


def write_imagenet_table(root):
    """As the gated repository; its validation split is the papers' test."""
    info = ImageNetInfo("imagenet-1k")
    names = [info.label_name_to_description(word) for word in info.label_names()]
    names[517] = "crane, machine"
    file = root / "data" / "validation-00000-of-00001.parquet"
    write_hub_table(file, LABELS, names, [picture(i) for i in range(4)])


def write_imagenet_folders(root):
    """A part of the classes, whose folders are WordNet's ids."""
    for word in ("n01440764", "n02012849", "n03126707", "n04008634"):
        write_images(root / "val" / word, [0], "jpg")


def write_imagenet_tars(root):
    """Whatever names and prompts the tars have."""
    write_classes(root / "test" / "0.tar", LABELS)
    (root / "classnames.txt").write_text("\n".join(f"name {i}" for i in range(1000)))
    (root / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")


@pytest.mark.parametrize("class_names", NAMES)
@pytest.mark.parametrize("name, write", [
    ("imagenet", write_imagenet_table), ("imagenet", write_imagenet_folders),
    ("imagenet1k", write_imagenet_tars)])
def test_classes_of_imagenet_have_the_names_that_are_asked_for(name, write, class_names, tmp_path):
    write(tmp_path)
    data = common.load_data(name, "test", data_dir=str(tmp_path), class_names=class_names)
    assert [data.captions(k)[0].strip() for k in range(4)] == NAMES[class_names]
    assert data.split == "test"
    assert data.prompts == PROMPTS["imagenet"]


def test_folders_that_are_no_wordnet_ids_are_refused(tmp_path):
    write_imagenet_folders(tmp_path)
    (tmp_path / "val" / "n03126707").rename(tmp_path / "val" / "n03126708")
    words = "has 4 classes, of which n03126708 is no WordNet id of ImageNet's"
    complains("imagenet", "test", words, data_dir=str(tmp_path))


def test_prompts_are_those_of_clip_and_of_slip(tmp_path):
    assert len(PROMPTS["imagenet"]) == len(set(PROMPTS["imagenet"])) == 80
    assert len(PROMPTS["cifar"]) == len(set(PROMPTS["cifar"])) == 18
    assert all(prompt.count("{c}") == 1 for prompt in PROMPTS["imagenet"] + PROMPTS["cifar"])
    write_imagenet_tars(tmp_path)
    data = common.load_data("imagenet1k", "test", data_dir=str(tmp_path), prompts="slip")
    assert set(data.prompts) == {
        "itap of a {c}.", "a bad photo of the {c}.", "a origami {c}.",
        "a photo of the large {c}.", "a {c} in a video game.", "art of the {c}.",
        "a photo of the small {c}."}
    assert set(data.prompts) < set(PROMPTS["imagenet"])


# ---------------------------------------------------- revisions ----------------------------------
A, B, C = "a" * 40, "b" * 40, "c" * 40  # commits


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder where the hub's repositories are."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_data_set_of_the_hub_at_a_commit(cache):
    repo = cache / "datasets--clip-benchmark--wds_vtab-dtd"
    for commit, classes in ((A, "x\ny"), (B, "p\nq")):
        write_classes(repo / "snapshots" / commit / "test" / "0.tar", [0, 1])
        (repo / "snapshots" / commit / "classnames.txt").write_text(classes)
    write_files(repo, {"refs/main": A})
    for name, names, commit in (("dtd", ["x", "y"], A), (f"dtd@{B}", ["p", "q"], B)):
        data = common.load_data(name, "test")
        assert data.label_names == names
        assert data.name == "dtd"
        assert COMMITS["clip-benchmark/wds_vtab-dtd"] == commit
    complains(f"dtd@{C}", "test", "dtd: clip-benchmark/wds_vtab-dtd ")


@pytest.mark.parametrize("name, options", [
    ("dtd", {"data_dir": "/tmp"}), ("emoji", {}), ("/tmp", {})])
def test_only_the_hub_has_revisions(name, options):
    words = "only what is read from the hub has a revision"
    complains(f"{name}@{B}", "test", words, **options)


def test_download_is_announced_and_refused_without_space(cache, capsys):
    cached = DryRunFileInfo(A, 10**18, "a.tar", "", is_cached=True, will_download=False)
    announce_download("org/name", [cached])
    assert capsys.readouterr().out == ""
    small = DryRunFileInfo(A, 10**5, "b.tar", "", is_cached=False, will_download=True)
    announce_download("org/name", [cached, small])
    assert capsys.readouterr().out.startswith("org/name: 0.0 GB to download into ")
    large = DryRunFileInfo(A, 10**15, "b.tar", "", is_cached=False, will_download=True)
    with pytest.raises(UserError, match="1000000.0 GB to download .* are free; the variable HF"):
        announce_download("org/name", [large])


# ---------------------------------------------------- the table of names -------------------------
@pytest.mark.parametrize("name", SETS)
def test_set_has_a_module_splits_and_a_licence(name):
    data_set = SETS[name]
    module = importlib.import_module(f"contrastive.data.{data_set.module}")
    assert callable(module.load)
    assert data_set.licence
    assert set(data_set.splits) <= {"train", "val", "test"}
    assert name not in images.TEMO_17 or "test" in data_set.splits
    if data_set.tars:
        assert set(data_set.tars) == set(data_set.splits)
    if module is videos:
        assert set(videos.LAYOUTS[name].files) == set(data_set.splits)
    if module is questions:
        assert set(questions.LAYOUTS[name][2]) == set(data_set.splits)


# ---------------------------------------------------- long tails ---------------------------------
def sizes_of(data):
    return np.bincount(data.labels, minlength=len(data.label_names)).tolist()


def test_long_tail_counts_are_the_papers():
    ten = common.long_tail_counts(4500, 10, 100)
    assert ten == [4500, 2697, 1617, 969, 581, 348, 208, 125, 75, 45]
    assert sum(ten) == 11_165
    hundred = common.long_tail_counts(450, 100, 100)
    assert sum(hundred) == 9_754
    assert (hundred[0], hundred[-1]) == (450, 4)
    assert common.long_tail_counts(100, 5, 1) == [100] * 5


def test_emoji_by_class():
    sets = long_tail.labelled_sets("emoji")
    drawings = {}
    for split, data in sets.items():
        drawings[split] = {key.split()[0] for key in data.keys()}
    assert len(sets["train"]) == 3118
    assert len(sizes_of(sets["train"])) == 70
    assert set(sizes_of(sets["test"])) == {2}
    assert set(sizes_of(sets["val"])) == {1}
    assert not drawings["train"] & (drawings["val"] | drawings["test"])
    assert not drawings["val"] & drawings["test"]


def write_cifar(root, labels, pictures, rows):
    """A local copy in the form of uoft-cs/cifar10, with these rows in train, and 40 in test."""
    names = [f"class {c}" for c in range(10)]
    for split, numbers in (("train", rows), ("test", range(40))):
        some = [pictures[i] for i in numbers]
        write_hub_table(root / f"{split}-00000-of-00001.parquet", labels[numbers], names, some,
                    image="img")


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Ten classes of 20 and 4 images."""
    root = tmp_path_factory.mktemp("cifar")
    pictures = [picture(i % 120, 32, 32) for i in range(200)]
    write_cifar(root, np.arange(200) % 10, pictures, np.arange(200))
    return str(root)


def test_cifar_long_tail(cifar):
    """A tenth of each class is set aside as val."""
    sets = long_tail.labelled_sets("cifar10-lt", imbalance_ratio=9, data_dir=cifar)
    sizes = sizes_of(sets["train"])
    assert sorted(sizes, reverse=True) == common.long_tail_counts(18, 10, 9)
    assert len(sets["val"]) == 20
    assert len(sets["test"]) == 40
    assert sets["train"].pixels.shape[1:] == (3, 32, 32)
    assert not set(sets["train"].keys()) & set(sets["val"].keys())
    # another split seed is another order of the classes
    other = long_tail.labelled_sets("cifar10-lt", imbalance_ratio=9, split_seed=1, data_dir=cifar)
    assert sizes_of(other["train"]) != sizes
    flat = long_tail.labelled_sets("cifar10-lt", imbalance_ratio=1, data_dir=cifar)
    assert sizes_of(flat["train"]) == [18] * 10


def test_tail_that_leaves_a_class_without_images_is_refused(cifar):
    words = "--imbalance-ratio 100 leaves 4 of 10 classes without an image; the largest"
    complains("cifar10-lt", "train", words, data_dir=cifar)


# ---- SDCLR's files ----
@pytest.fixture(scope="module")
def sdclr(tmp_path_factory):
    """500 images, whose colour is their number in torchvision's order, as the hub has them, in the
    order of the tar, and in `other` in torchvision's; lists of them; classes by size."""
    root = tmp_path_factory.mktemp("sdclr")
    rng = np.random.default_rng(1)
    labels = rng.permutation(np.repeat(range(10), 50))
    pictures = []
    for i in range(500):
        pictures.append(np.full((32, 32, 3), (i % 256, i // 256, 0), dtype=np.uint8))
    batches = np.arange(500).reshape(5, 100)
    write_cifar(root / "hub", labels, pictures, batches[[3, 2, 1, 4, 0]].ravel())
    write_cifar(root / "other", labels, pictures, np.arange(500))
    tail = []
    uniform = []
    for label, size in enumerate(common.long_tail_counts(44, 10, 10)):
        images_of_class = rng.permutation(np.flatnonzero(labels == label))
        tail.append(images_of_class[:size])
        uniform.append(images_of_class[:16])
    tail = rng.permutation(np.concatenate(tail))
    np.save(root / "tail.npy", tail)
    np.save(root / "uniform.npy", rng.permutation(np.concatenate(uniform)))
    val = np.setdiff1d(np.arange(500), tail)[:30]
    np.save(root / "val.npy", val)
    np.save(root / "shared.npy", [*val, tail[0]])
    np.save(root / "out.npy", [3, 999])
    return root


def sets_of_sdclr(root, file, copy="hub", ratio=10, **options):
    return long_tail.labelled_sets(
        "cifar10-lt", imbalance_ratio=ratio, index_file=str(root / file),
        data_dir=str(root / copy), **options)


def numbers_of(data):
    """torchvision's number of each image."""
    return (data.pixels[:, 0, 0, 0].int() + 256 * data.pixels[:, 1, 0, 0].int()).tolist()


def test_index_files_of_sdclr_name_torchvisions_images(sdclr):
    sets = sets_of_sdclr(sdclr, "tail.npy")
    tail = np.load(sdclr / "tail.npy").tolist()
    assert numbers_of(sets["train"]) == tail
    assert sizes_of(sets["train"]) == common.long_tail_counts(44, 10, 10)
    assert not set(numbers_of(sets["val"])) & set(tail)
    assert set(sizes_of(sets["val"])) == {5}  # a tenth
    val = sets_of_sdclr(sdclr, "tail.npy", val_file=str(sdclr / "val.npy"))["val"]
    assert sorted(numbers_of(val)) == np.load(sdclr / "val.npy").tolist()


@pytest.mark.parametrize("file, copy, val, words", [
    ("tail.npy", "hub", "shared.npy", "--val-file .*: 1 of its images are in --index-file"),
    ("tail.npy", "other", "", "torchvision's, and the images in the order of the hub"),
    ("uniform.npy", "hub", "", "not a long tail of --imbalance-ratio 10: "),
    ("out.npy", "hub", "", "^--index-file .*out.npy: index 999 is out of bounds")])
def test_files_of_sdclr_that_do_not_fit_are_refused(file, copy, val, words, sdclr):
    with pytest.raises(UserError, match=words):
        sets_of_sdclr(sdclr, file, copy, val_file=val and str(sdclr / val))


@pytest.mark.parametrize("name, kind", [("cifar10-lt", "few_shot"), ("emoji", "index")])
def test_list_that_a_set_does_not_use_is_refused(name, kind):
    with pytest.raises(UserError, match=f"-file x: --dataset {name} does not use it"):
        long_tail.labelled_sets(name, **{f"{kind}_file": "x"})


# ---- ImageNet100's lists ----
# {list: first and last image of each of three classes}
LISTS = {
    "index": [(0, 48), (0, 30), (0, 6)],
    "val": [(50, 52)] * 3,
    "few_shot": [(53, 55)] * 3,
    "test": [(56, 60)] * 3,
}


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A small ImageNet tree and lists as SDCLR's: 48, 30 and 6 images of three classes."""
    root = tmp_path_factory.mktemp("imagenet")
    for c in range(3):
        write_images(root / "train" / f"n0{c}", range(60), "jpg")
    for name, parts in LISTS.items():
        lines = []
        for c, (first, last) in enumerate(parts):
            lines += [f"train/n0{c}/{i:03}.jpg {c}\n" for i in range(first, last)]
        (root / f"{name}.txt").write_text("".join(lines))
    return root


def listed(root, *names, **files):
    """The sets of some lists."""
    for name in names:
        files[f"{name}_file"] = str(root / f"{name}.txt")
    return long_tail.labelled_sets("imagenet100-lt", data_dir=str(root), **files)


def test_imagenet100_has_the_images_of_its_lists(lists):
    """Nothing is held out."""
    assert set(listed(lists, "index", "test")) == {"train", "test"}
    sets = listed(lists, *LISTS)
    assert sizes_of(sets["train"]) == [48, 30, 6]
    for split, name in (("val", "val"), ("test", "test"), ("few-shot", "few_shot")):
        lines = (lists / f"{name}.txt").read_text().splitlines()
        assert [f"{data} {y}" for data, y in zip(sets[split].keys(), sets[split].labels)] == lines


@pytest.mark.parametrize("kind", ["val", "test"])
def test_imagenet100_lists_that_share_images_are_refused(kind, lists, tmp_path):
    first_line = (lists / "index.txt").read_text().splitlines(keepends=True)[0]
    (tmp_path / "list.txt").write_text(first_line + (lists / f"{kind}.txt").read_text())
    others = {"index", "test"} - {kind}
    with pytest.raises(UserError, match=f"--{kind}-file .*: 1 of its images are in --index-file "):
        listed(lists, *others, **{f"{kind}_file": str(tmp_path / "list.txt")})


def test_imagenet100_runs_without_val(lists, tmp_path):
    flags = (
        "--cpu --dataset imagenet100-lt --image-encoder small --head-norm none --image-size 24 "
        "--batch-size 8 --workers 0 --max-steps 2 --shot-limits 40 10"
    ).split()
    flags += ["--data-dir", lists, "--index-file", lists / "index.txt"]
    flags += ["--test-file", lists / "test.txt", "--few-shot-file", lists / "few_shot.txt"]
    summary = run_script(ts, tmp_path / "r", *flags)
    assert summary["val"] == {"imagenet100-lt": {}}
    assert {"top1", "head", "mid", "tail"} <= summary["test"]["imagenet100-lt"]["few-shot"].keys()
    assert common.load_model(tmp_path / "r")[2].short == round(24 / 0.875)
    for row in rows(tmp_path / "r"):
        assert "eval" not in row or row["coverage"] > 0
    with pytest.raises(UserError, match="val"):
        run_script(ts, tmp_path / "best", *flags, "--eval-epoch", "best", "--eval-every", 1)


def test_few_shot_probe_learns_from_its_own_images():
    """Axes 0..3 as classes: the training images say another class than the few-shot images."""
    eye = torch.eye(4)
    train = (None, eye.repeat(6, 1), np.array([3, 0, 1, 2] * 6))
    few = (None, eye, np.arange(4))
    metrics, _, _ = evaluation.by_class.class_metrics(["probe"], train, few, few=few)
    assert metrics["few-shot"]["top1"] == 100
    assert metrics["few-shot"]["shots"] == 1
    assert metrics["all"]["top1"] == 0
    metrics, _, _ = evaluation.by_class.class_metrics(["probe"], train, few)
    assert metrics["few-shot"]["top1"] == 0


def test_head_mid_and_tail_are_classes_above_100_and_below_20_images():
    sizes = [1280] * 39 + [100] * 24 + [20] * 24 + [19] * 12 + [6]
    labels = np.repeat(np.arange(100), sizes)
    hits = dict(enumerate(map(float, range(100))))
    parts = accuracy_by_class_size(labels, hits, [100, 20])
    assert parts["head"] == np.mean(range(39))
    assert parts["mid"] == np.mean(range(39, 87))
    assert parts["tail"] == np.mean(range(87, 100))
    # thirds of the classes
    assert accuracy_by_class_size(labels, hits)["head"] == np.mean(range(34))
