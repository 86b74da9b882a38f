"""Image sets by name, on replicas in the true form of the repositories, and the table of names.

Tars, parquet, files of classes and prompts; long tails: sizes, splits, SDCLR's files, ImageNet100's
lists, thirds of the classes.
"""

import importlib
import re
import shutil
from types import SimpleNamespace

import common
from contrastive import data as data_sets
from contrastive import evaluation
from contrastive.data import images, long_tail, questions, videos
from contrastive.data.hub import COMMITS, announce_download
from contrastive.data.registry import SETS
from contrastive.encoders.base import hub_encoder
from contrastive.core.files import read_json
from contrastive.core.processes import UserError
from contrastive.core.metrics import accuracy_by_class_size
from contrastive.evaluation.measure import unsupported_tasks

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub import DryRunFileInfo
from timm.data import ImageNetInfo

import helpers
import temo
import temperature_schedules as ts
from helpers import (
    CLASSES, complains, encode, picture, rows, run_script, tar_samples, write_images, write_tar)

PROMPTS = common.read_json(images.PROMPTS_FILE)


def write_table(path, numbers, classes, *, names, image, label, pictures=picture):
    """A parquet file as the hub has them: `image` without paths, and each row's class number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=names)})
    content = {
        image: [{"bytes": encode(pictures(i)), "path": None} for i in numbers],
        label: [*map(int, classes)],
    }
    datasets.Dataset.from_dict(content, features=features).to_parquet(str(path))


def write_classes(path, classes, kind="png", **options):
    """A tar of a classification set, s0.png and s0.cls; classes {number of the picture: class}."""
    write_tar(
        path,
        {
            f"s{i:07}": {"cls": str(y).encode(), kind: encode(picture(i % 100), kind, **options)}
            for i, y in classes.items()
        },
    )


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with local copies: coco, flickr30k, dtd, cc3m, cc12m, cifar100."""
    root = tmp_path_factory.mktemp("hub")
    for name in ("coco", "flickr30k"):
        for split, first in (("test", 0), ("train", 20)):
            for shard in range(2):
                write_tar(
                    root / name / split / f"{shard}.tar",
                    tar_samples(range(first + 6 * shard, first + 6 * shard + 6), "jpg", "txt"),
                )
    write_classes(
        root / "dtd" / "test" / "0.tar", {i: i % 3 for i in range(12)}, "webp", lossless=True
    )
    (root / "dtd" / "classnames.txt").write_text("apple\npear_tree\nzebra\n\n")
    (root / "dtd" / "zeroshot_classification_templates.txt").write_text(
        "a {c} texture.\na {c} pattern.\n"
    )
    for name, numbers in (
        ("cc3m/cc3m-train-0000", range(10)),
        ("cc3m/cc3m-train-0001", range(10, 20)),
        ("cc3m/cc3m-validation-0000", range(40, 46)),
        ("cc12m/cc12m-train-0000", range(3)),
        ("cc12m/cc12m-train-0001", range(3, 6)),
        ("cc12m/cc12m-train-2175", range(6, 9)),
    ):
        write_tar(root / f"{name}.tar", tar_samples(numbers, "jpg", "json", "txt"))
    for split, numbers in (("train", range(34)), ("test", range(20, 26))):
        write_table(
            root / "cifar100" / "cifar100" / f"{split}-00000-of-00001.parquet",
            numbers,
            [i % 3 for i in numbers],
            names=CLASSES,
            image="img",
            label="fine_label",
        )
    return root


# ---------------------------------------------------- the hub's sets -----------------------------
WORDS = [c.replace("_", " ") for c in CLASSES]
EXPECTED = {  # (set, split): numbers of the pictures, captions of each, words of the note
    ("coco", "test"): (
        range(12),
        lambda i: [helpers.caption(i), helpers.caption(i, 1)],
        "12 examples, 5,000 expected",
    ),
    ("flickr30k", "train"): (
        range(20, 32),
        lambda i: [helpers.caption(i), helpers.caption(i, 1)],
        "29,000 expected",
    ),
    ("dtd", "test"): (
        range(12),
        lambda i: [WORDS[i % 3]],
        "no captions: the classes serve as captions",
    ),
    ("cc3m", "train"): (
        range(20),
        lambda i: [helpers.caption(i), helpers.caption(i, 1)],
        "2,910,000 expected",
    ),
    ("cc3m", "val"): (
        range(40, 46),
        lambda i: [helpers.caption(i), helpers.caption(i, 1)],
        "13,400 expected",
    ),
    ("cc12m", "train"): (range(6), lambda i: [helpers.caption(i), helpers.caption(i, 1)], ""),
    ("cc12m", "val"): (
        range(6, 9),
        lambda i: [helpers.caption(i), helpers.caption(i, 1)],
        "",
    ),  # the last shard
    ("cifar100", "test"): (range(20, 26), lambda i: [WORDS[i % 3]], "10,000 expected"),
}


@pytest.mark.parametrize("name, split", EXPECTED)
def test_the_rows_of_a_set(name, split, hub):
    numbers, captions, words = EXPECTED[name, split]
    data = common.load_data(name, split, data_dir=str(hub / name))
    assert data.column("captions") == [captions(i) for i in numbers]
    assert words in data.note
    assert data.split == split
    off = [
        np.abs(data.read(k).permute(1, 2, 0).numpy().astype(int) - picture(i)).mean()
        for k, i in enumerate(numbers)
    ]
    assert max(off) < 3
    if name in ("dtd", "cifar100"):
        assert data.label_names == CLASSES and data.labels.tolist() == [i % 3 for i in numbers]
        assert data.prompts == (
            ["a {c} texture.", "a {c} pattern."] if name == "dtd" else PROMPTS["cifar"]
        )


def test_the_count_of_either_paper_will_do(hub, monkeypatch):
    monkeypatch.setitem(SETS["cc3m"].other_counts, "train", 20)
    data_sets.open_named.cache_clear()
    assert "WARNING" not in common.load_data("cc3m", "train", data_dir=str(hub / "cc3m")).note


def test_a_split_that_a_set_lacks(hub):
    where = {"data_dir": str(hub / "cifar100")}
    held, rest = (
        common.load_data("cifar100", s, holdout_fraction=0.05, **where) for s in ("val", "train")
    )
    assert held.column("key") == ["33"]  # no names: numbers of rows
    assert rest.column("key") == [str(row) for row in range(33)]
    complains(
        "cifar100",
        "val",
        "cifar100 has no val split; it has: train, test; --holdout-fraction 0.05 takes",
        **where,
    )
    complains("cc3m", "test", "cc3m has no test split; it has: train, val")
    for name in ("coco", "cifar10"):  # and no hub
        complains(name, "test", f"a local copy: --data-dir, to evaluate on {name}=DIR")


def test_the_hub_s_imagenet_has_the_published_names(tmp_path):
    """The first synonym of two classes is crane."""
    info = ImageNetInfo("imagenet-1k")
    names = [info.label_name_to_description(word) for word in info.label_names()]
    names[517] = "crane, machine"
    file = tmp_path / "data" / "validation-00000-of-00001.parquet"  # the papers' test
    labels = [0, 134, 2, 517] * 2
    write_table(file, range(8), labels, names=names, image="image", label="label")
    data = common.load_data("imagenet", "test", data_dir=str(tmp_path))
    assert len(set(data.label_names)) == 1000 and data.labels.tolist() == labels
    captions = [data.captions(k)[0] for k in range(4)]
    assert captions == ["tench", "crane bird", "great white shark", "crane"]
    assert data.split == "test" and data.prompts == PROMPTS["imagenet"]
    flags = {"class_names": "clip", "prompts": "slip"}
    data = common.load_data("imagenet", "test", data_dir=str(tmp_path), **flags)
    assert data.label_names[517] == "construction crane" and len(data.prompts) == 7


def test_folders_of_wordnet_ids_are_imagenet(tmp_path):
    """All of them or a part; other folders would get wrong names."""
    ids = {"n01440764": "tench", "n02012849": "crane bird", "n03126707": "crane"}
    for word in ids:
        write_images(tmp_path / "val" / word, range(2), "jpg")
    data = common.load_data("imagenet", "test", data_dir=str(tmp_path))
    assert list(data.label_names) == list(ids.values())
    assert [data.captions(k)[0] for k in (0, 2, 4)] == list(ids.values())
    data = common.load_data("imagenet", "test", data_dir=str(tmp_path), class_names="clip")
    assert data.label_names[2] == "construction crane"
    (tmp_path / "val" / "n03126707").rename(tmp_path / "val" / "n03126708")
    data_sets.open_named.cache_clear()
    complains(
        "imagenet", "test", "has 3 classes, of which n03126708 is no WordNet id of ImageNet's",
        data_dir=str(tmp_path))


def test_only_train_of_coco_may_differ_from_the_published_number(hub, monkeypatch):
    for split in ("train", "test"):
        count = len(common.load_data("coco", split, data_dir=str(hub / "coco")))
        monkeypatch.setitem(SETS["coco"].splits, split, count + 1)
        monkeypatch.setitem(SETS["coco"].tolerance, "train", 0.5)
    data_sets.open_named.cache_clear()
    assert "expected" not in common.load_data("coco", "train", data_dir=str(hub / "coco")).note
    assert "expected" in common.load_data("coco", "test", data_dir=str(hub / "coco")).note
    data_sets.open_named.cache_clear()


def test_imagenet_has_clip_s_prompts_and_the_names_that_are_asked_for(tmp_path):
    """Whatever the tars have; WordNet's first names and CLIP's 80 prompts are the default."""
    prompts, where = PROMPTS["imagenet"], {"data_dir": str(tmp_path)}
    some = [
        "a photo of a {c}.",
        "itap of my {c}.",
        "the {c} in a video game.",
        "a jpeg corrupted photo of the {c}.",
        "the plushie {c}.",
        "graffiti of a {c}.",
        "a photo of the hard to see {c}.",
        "a photo of many {c}.",
    ]
    assert len(set(prompts)) == 80 == len(prompts) and {*some} < {*prompts}
    assert all(p.count("{c}") == 1 and "  " not in p for p in (*prompts, *PROMPTS["cifar"]))
    assert len(set(PROMPTS["cifar"])) == 18
    write_classes(tmp_path / "test" / "0.tar", {i: i for i in (0, 134, 517)})
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")
    (tmp_path / "classnames.txt").write_text("\n".join(f"name {i}" for i in range(1000)))
    for flags, names in (
        ({}, ["tench", "crane bird", "crane"]),
        ({"class_names": "clip"}, ["tench", "crane bird", "construction crane"]),
    ):
        data = common.load_data("imagenet1k", "test", **where, **flags)
        assert [data.captions(k)[0].strip() for k in range(3)] == names
        assert data.prompts == prompts and len(set(data.label_names)) == 1000


def test_imagenet_has_the_names_and_prompts_of_slip_s_code(tmp_path):
    """CLIP's 1,000 names, two of them twice, and seven of CLIP's prompts."""
    facts = common.read_json(images.CLIP_NAMES_FILE)
    assert len(facts["names"]) == 1000 and "MIT" in facts["licence"] and facts["source"]
    twice = {name for name in facts["names"] if facts["names"].count(name) > 1}
    assert twice == {"missile", "sunglasses"}
    write_classes(tmp_path / "test" / "0.tar", {i: i for i in (0, 657, 744, 999)})
    flags = {"class_names": "clip", "prompts": "slip"}
    data = common.load_data("imagenet1k", "test", data_dir=str(tmp_path), **flags)
    names = [data.captions(k)[0].strip() for k in range(4)]
    assert names == ["tench", "missile", "missile", "toilet paper"]
    assert set(data.prompts) == {
        "itap of a {c}.",
        "a bad photo of the {c}.",
        "a origami {c}.",
        "a photo of the large {c}.",
        "a {c} in a video game.",
        "art of the {c}.",
        "a photo of the small {c}.",
    }
    assert set(data.prompts) < set(PROMPTS["imagenet"])


def test_the_cc3m_recipe_trains_on_tars_and_is_evaluated_on_three_sets(hub, tmp_path):
    others = [f"{name}={hub / name}" for name in ("cc3m", "coco", "flickr30k")]
    words = (
        "--dataset cc3m --image-encoder small --text-encoder small --no-pretrained --batch-size 8 "
        "--max-steps 2 --image-size 24 --cpu --workers 2 --mixed-precision bf16"
    )
    flags = [*words.split(), "--data-dir", hub / "cc3m", "--eval-datasets", *others]
    summary = run_script(temo, tmp_path / "r", *flags)
    assert set(summary["test"]) == {"coco", "flickr30k"} and set(summary["val"]) == {"cc3m"}
    assert summary["test"]["coco"]["captions"] == 24


# ---------------------------------------------------- revisions ----------------------------------
A, B, C = "a" * 40, "b" * 40, "c" * 40  # commits


def test_a_data_set_of_the_hub_at_a_commit(tmp_path, monkeypatch):
    """dtd@COMMIT is read at that commit; a path is a path.

    A commit that the cache lacks, and one of what is not from the hub, are refused.
    """
    repo = tmp_path / "datasets--clip-benchmark--wds_vtab-dtd"
    for commit, classes in ((A, "x\ny\nz"), (B, "p\nq\nr")):
        write_classes(repo / "snapshots" / commit / "test" / "0.tar", {i: i % 3 for i in range(6)})
        (repo / "snapshots" / commit / "classnames.txt").write_text(classes)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(A)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, names, commit in (("dtd", ["x", "y", "z"], A), (f"dtd@{B}", ["p", "q", "r"], B)):
        data = common.load_data(name, "test")
        assert data.label_names == names and data.name == "dtd"
        assert COMMITS["clip-benchmark/wds_vtab-dtd"] == commit
    complains(f"dtd@{C}", "test", "dtd: clip-benchmark/wds_vtab-dtd ")
    path = helpers.write_rows(tmp_path / "a@home.csv", ["image", "caption"], [("1.png", "x")])
    assert len(common.load_data(str(path), "train")) == 1
    for name, options in (
        (f"dtd@{B}", {"data_dir": str(tmp_path)}),
        (f"emoji@{B}", {}),
        (f"{tmp_path}@{B}", {}),
    ):
        complains(name, "test", "only what is read from the hub has a revision", **options)


def test_a_download_is_announced_and_refused_without_space(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def files(size):
        cached = DryRunFileInfo(A, 10**18, "a.tar", "", is_cached=True, will_download=False)
        return [cached, DryRunFileInfo(A, size, "b.tar", "", is_cached=False, will_download=True)]

    announce_download("org/name", files(0))
    assert capsys.readouterr().out == ""
    announce_download("org/name", files(3 * 10**5))
    assert capsys.readouterr().out.startswith("org/name: 0.0 GB to download into ")
    with pytest.raises(UserError, match="1000000.0 GB to download .* are free; the variable HF"):
        announce_download("org/name", files(10**15))


def test_a_run_on_a_commit_of_own_data_and_weights_says_which(tmp_path, tiny, monkeypatch):
    """The caches of `datasets` and of transformers, as a first run with the hub leaves them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    for split, numbers in (("train", range(30)), ("test", range(30, 40))):
        helpers.write_parquet_images(tmp_path / "pictures" / f"{split}.parquet", numbers)
    builder = datasets.load_dataset_builder(str(tmp_path / "pictures"))
    builder.download_and_prepare(
        str(tmp_path / "datasets" / "some___pictures" / "default" / "0.0.0" / A)
    )
    complains(f"some/pictures@{B}", "train", f"the cache of some/pictures has the commit {A} alone")
    summary = run_script(
        temo,
        tmp_path / "r",
        "--dataset",
        f"some/pictures@{A}",
        *"--image-encoder small --text-encoder small --no-pretrained --batch-size 8 --max-steps 1 "
        "--image-size 24 --cpu --workers 0 --eval-every 0".split(),
    )
    assert summary["hub"]["some/pictures"] == A and summary["dataset"] == "some/pictures"
    shutil.copytree(tiny("bert")[0], tmp_path / "models--some--bert" / "snapshots" / C)
    (tmp_path / "models--some--bert" / "refs").mkdir()
    (tmp_path / "models--some--bert" / "refs" / "main").write_text(C)
    hub_encoder("some/bert", "text", True, None)
    assert COMMITS["some/bert"] == C


# ---------------------------------------------------- the table of names -------------------------
def test_every_set_says_what_it_is():
    for name, data_set in SETS.items():
        module = importlib.import_module(f"contrastive.data.{data_set.module}")
        assert callable(module.load) and data_set.licence, name
        assert set(data_set.splits) <= {"train", "val", "test"}, name
        assert set(data_set.tars or data_set.splits) == set(data_set.splits), name
    for module, splits_of in (
        (videos, lambda layout: set(layout.files)),
        (questions, lambda layout: set(layout[2])),
    ):
        named = {
            name
            for name, data_set in SETS.items()
            if data_set.module == module.__name__.rpartition(".")[2]
        }
        assert module.LAYOUTS.keys() == named  # the registry and the file
        for name in named:
            assert splits_of(module.LAYOUTS[name]) == set(SETS[name].splits), name
    assert len(images.TEMO_17) == 17 and all("test" in SETS[n].splits for n in images.TEMO_17)


def test_classes_of_own_tars_have_numbers_and_no_names(tmp_path):
    """Neighbours need none; zero-shot does."""
    for split in ("train", "test"):
        write_tar(tmp_path / f"{split}.tar", tar_samples(range(6), "jpg", "txt", "cls"))
    train, test = (common.load_data(str(tmp_path), split) for split in ("train", "test"))
    towers = SimpleNamespace(), object(), None
    why = unsupported_tasks(["knn", "zero-shot"], test, towers, train)
    assert why == {"zero-shot": "the classes have no names"}


# ---------------------------------------------------- long tails ---------------------------------
def sizes_of(data):
    return np.bincount(data.labels, minlength=len(data.label_names))


def test_long_tail_counts_are_the_papers():
    ten, hundred = common.long_tail_counts(4500, 10, 100), common.long_tail_counts(450, 100, 100)
    assert ten == [4500, 2697, 1617, 969, 581, 348, 208, 125, 75, 45] and sum(ten) == 11_165
    assert sum(hundred) == 9_754 and (hundred[0], hundred[-1]) == (450, 4)
    assert common.long_tail_counts(100, 5, 1) == [100] * 5


def test_emoji_classes_and_a_ratio_that_they_do_not_have():
    """Sets with a tail of their own: the order of classes is drawn, a small one may be first."""
    sets = long_tail.labelled_sets("emoji")
    assert len(sets["train"]) == 3118
    assert len(sizes_of(sets["train"])) == 70
    assert sizes_of(sets["train"]).min() == 5
    assert set(sizes_of(sets["test"])) == {2} and set(sizes_of(sets["val"])) == {1}
    base = {s: {k.split()[0] for k in d.keys()} for s, d in sets.items()}
    assert not base["train"] & base["test"]
    assert not base["train"] & base["val"]
    assert not base["val"] & base["test"]
    train = long_tail.labelled_sets("emoji", imbalance_ratio=10)["train"]
    said = re.search(
        r"WARNING: .*-ratio 10 takes; the ratio is ([\d.]+), (\d+) to (\d+) images", train.note
    )
    assert list(map(int, said.group(2, 3))) == [sizes_of(train).max(), sizes_of(train).min()]
    assert float(said[1]) > 11


def write_cifar(root, labels, pictures, splits):
    """A local copy in the form of uoft-cs/cifar10: splits {name: numbers}."""
    for split, numbers in splits.items():
        file, names = root / f"{split}-00000-of-00001.parquet", [f"class {c}" for c in range(10)]
        classes = [labels[i] for i in numbers]
        columns = dict(image="img", label="label")
        write_table(file, numbers, classes, names=names, pictures=pictures, **columns)
    return str(root)


def test_cifar_long_tail(tmp_path):
    """Ten classes of 20 and 4 images."""
    root = write_cifar(
        tmp_path,
        np.arange(200) % 10,
        lambda i: picture(i % 120, 32, 32),
        {"train": range(200), "test": range(40)},
    )

    def open_sets(ratio, split_seed=0, name="cifar10-lt", **options):
        return long_tail.labelled_sets(
            name, imbalance_ratio=ratio, split_seed=split_seed, data_dir=root, **options
        )

    sets = open_sets(9)
    sizes = sizes_of(sets["train"])
    # a tenth of each class is set aside
    assert sorted(sizes)[::-1] == common.long_tail_counts(18, 10, 9)
    assert len(sets["val"]) == 20
    assert len(sets["test"]) == 40
    assert sets["train"].pixels.shape[1:] == (3, 32, 32)
    assert not {*sets["train"].keys()} & {*sets["val"].keys()}
    # another split, another order of the classes
    assert not np.array_equal(sizes_of(open_sets(9, 1)["train"]), sizes)
    assert np.array_equal(sizes_of(open_sets(1)["train"]), [18] * 10)
    with pytest.raises(
        UserError,
        match="--imbalance-ratio 100 leaves 4 of 10 classes without an image; the largest",
    ):
        # the usual tail, in any other program
        common.load_data("cifar10-lt", "train", data_dir=root)
    # by its plain name it has no val: everything is trained on, or --holdout-fraction takes one
    # out; cifar10-lt has one
    plain, held = (open_sets(0, name="cifar10", holdout_fraction=h) for h in (0, 0.05))
    assert set(plain) == {"train", "test"} and len(plain["train"]) == 200
    train, val = ({*held[s].keys()} for s in ("train", "val"))
    assert val and not train & val and len(train | val) == 200
    same = open_sets(9, holdout_fraction=0.05)
    assert all([*sets[s].keys()] == [*same[s].keys()] for s in sets)


def test_index_files_of_sdclr_name_torchvision_s_images(tmp_path):
    """500 images, whose colour is their number in torchvision's order.

    In the hub's files the batches come as in the tar. A copy in torchvision's order is refused.
    """
    labels = np.random.default_rng(1).permutation(np.repeat(range(10), 50))
    tail_of = [3, 7, 1, 0, 9, 2, 8, 5, 6, 4]
    for name, order in (("hub", (4, 3, 2, 5, 1)), ("other", (1, 2, 3, 4, 5))):
        write_cifar(
            tmp_path / name,
            labels,
            lambda i: np.full((32, 32, 3), (i % 256, i // 256, 0), dtype=np.uint8),
            {
                "train": np.concatenate([np.arange(100 * b - 100, 100 * b) for b in order]),
                "test": range(40),
            },
        )

    def open_sets(file, root="hub", ratio=10, **more):
        return long_tail.labelled_sets(
            "cifar10-lt",
            imbalance_ratio=ratio,
            index_file=str(tmp_path / file),
            data_dir=str(tmp_path / root),
            **more,
        )

    def numbers_of(data):
        return (
            data.pixels[:, 0, 0, 0].numpy() + 256 * data.pixels[:, 1, 0, 0].numpy().astype(int)
        ).tolist()

    sizes, rng, files = common.long_tail_counts(44, 10, 10), np.random.default_rng(0), {}
    for name, of_class in (("tail", sizes), ("uniform", [16] * 10)):
        chosen = [
            rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(tail_of, of_class)
        ]
        files[name] = rng.permutation(np.concatenate(chosen))
    files |= {"val": np.setdiff1d(np.arange(500), files["tail"])[:30], "out": np.array([3, 999])}
    for name, indices in files.items():
        np.save(tmp_path / f"{name}.npy", indices)
    sets = open_sets("tail.npy")
    assert numbers_of(sets["train"]) == files["tail"].tolist()
    assert sizes_of(sets["train"])[tail_of].tolist() == sizes
    assert not {*numbers_of(sets["val"])} & {*files["tail"].tolist()}
    assert {*sizes_of(sets["val"])} == {5}  # a tenth
    for ratio in (0, 1):  # without a tail
        assert (
            numbers_of(open_sets("uniform.npy", ratio=ratio)["train"]) == files["uniform"].tolist()
        )
    val = open_sets("tail.npy", val_file=str(tmp_path / "val.npy"))["val"]
    assert sorted(numbers_of(val)) == files["val"].tolist()
    np.save(tmp_path / "shared.npy", [*files["val"][1:], files["tail"][0]])
    shared = dict(val_file=str(tmp_path / "shared.npy"))
    for file, more, words in (
        ("tail.npy", shared, "--val-file .*shared.npy: 1 of its images are in --index-file"),
        ("tail.npy", dict(root="other"), "torchvision's, and the images in the order of the hub"),
        ("uniform.npy", {}, "not a long tail of --imbalance-ratio 10: "),
        ("out.npy", {}, "^--index-file .*out.npy: index 999 is out of bounds .* size 500$"),
    ):
        with pytest.raises(UserError, match=words):
            open_sets(file, **more)
    for name, kind in (("cifar10-lt", "few_shot"), ("emoji", "index")):
        with pytest.raises(UserError, match=f"-file x: --dataset {name} does not use it"):
            long_tail.labelled_sets(name, **{f"{kind}_file": "x"})


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A small ImageNet tree and lists as SDCLR's: 48, 30 and 6 images of three classes."""
    root = tmp_path_factory.mktemp("imagenet")
    for c in range(3):
        write_images(root / "train" / f"n0{c}", range(60), "jpg")
    keys = [[f"train/n0{c}/{i:03}.jpg {c}\n" for i in range(60)] for c in range(3)]
    for name, slices in (
        ("index", [(0, 48), (0, 30), (0, 6)]),
        ("val", [(50, 52)] * 3),
        ("few_shot", [(53, 55)] * 3),
        ("test", [(56, 60)] * 3),
    ):
        lines = [line for of, (first, last) in zip(keys, slices) for line in of[first:last]]
        (root / f"{name}.txt").write_text("".join(lines))
    return root


def test_imagenet100_list_files(lists):
    keys = {
        name: [line.split()[0] for line in (lists / f"{name}.txt").read_text().splitlines()]
        for name in ("index", "test", "val", "few_shot")
    }
    for names in (("index", "test"), ("index", "test", "val", "few_shot")):
        sets = long_tail.labelled_sets(
            "imagenet100-lt",
            data_dir=str(lists),
            **{f"{name}_file": str(lists / f"{name}.txt") for name in names},
        )
        renamed = {"index": "train", "few_shot": "few-shot"}  # nothing is held out
        assert {s: [*d.keys()] for s, d in sets.items()} == {
            renamed.get(name, name): keys[name] for name in names
        }
    assert sizes_of(sets["train"]).tolist() == [48, 30, 6]


@pytest.mark.parametrize("kind", ["val", "test"])
def test_imagenet100_lists_that_share_images_are_refused(kind, lists, tmp_path):
    first_line = (lists / "index.txt").read_text().splitlines(keepends=True)[0]
    file = tmp_path / "list.txt"
    file.write_text(first_line + (lists / f"{kind}.txt").read_text())
    files = {name: str(lists / f"{name}.txt") for name in ("index", "test")}
    files[kind] = str(file)
    options = {f"{name}_file": path for name, path in files.items()}
    with pytest.raises(UserError, match=f"--{kind}-file .*: 1 of its images are in --index-file "):
        long_tail.labelled_sets("imagenet100-lt", data_dir=str(lists), **options)


def test_imagenet100_runs_without_val(lists, tmp_path, monkeypatch):
    probed, class_metrics = [], evaluation.by_class.class_metrics

    def watch(tasks, train, test, few, *args, **options):
        probed.append(few)
        return class_metrics(tasks, train, test, few, *args, **options)

    monkeypatch.setattr(evaluation.measure, "class_metrics", watch)
    files = [
        word
        for kind in ("index", "test", "few-shot")
        for word in (f"--{kind}-file", lists / f"{kind.replace('-', '_')}.txt")
    ]
    flags = [
        *"--cpu --dataset imagenet100-lt --image-encoder small --head-norm none".split(),
        *"--image-size 24 --batch-size 8 --workers 0 --max-steps 2 --log-every 1".split(),
        *"--shot-limits 40 10".split(),
        "--data-dir",
        lists,
        *files,
    ]
    summary = run_script(ts, tmp_path / "r", *flags)
    assert summary["val"] == {"imagenet100-lt": {}}
    spec = read_json(tmp_path / "r" / "model.json")
    assert (spec["eval_crop"], common.load_model(tmp_path / "r")[2].short) == (
        0.875,
        round(24 / 0.875),
    )
    found = [r for r in rows(tmp_path / "r") if "eval" in r]
    assert all(r["eval"] == {"imagenet100-lt": {}} and r["coverage"] > 0 for r in found)
    assert len(found) == 2
    few = summary["test"]["imagenet100-lt"]["few-shot"]
    assert {"top1", "head", "mid", "tail"} <= few.keys()
    assert len(probed[-1].neighbour_features) == 6  # the images of the list
    with pytest.raises(UserError, match="val"):
        run_script(ts, tmp_path / "best", *flags, *"--eval-epoch best --eval-every 1".split())


def test_few_shot_probe_learns_from_its_own_images():
    """Axes 0..3 as classes: the training images say another class than the few-shot images."""
    eye = torch.eye(4)
    train, y = eye.repeat(6, 1), np.roll(np.arange(4), 1).tolist() * 6
    data = ["probe"], (None, train, np.array(y)), (None, eye, np.arange(4))
    metrics, _, _ = evaluation.by_class.class_metrics(*data, few=(None, eye, np.arange(4)))
    assert metrics["few-shot"]["top1"] == 100 and metrics["all"]["top1"] == 0
    assert metrics["few-shot"]["shots"] == 1
    assert evaluation.by_class.class_metrics(*data)[0]["few-shot"]["top1"] == 0


def test_head_mid_tail_of_imagenet100():
    sizes = np.r_[np.linspace(1280, 101, 39).astype(int), [100] * 24, [20] * 24, [19] * 12, 6]
    labels, hit = np.repeat(np.arange(100), sizes), {c: float(c) for c in range(100)}
    parts = accuracy_by_class_size(labels, hit, [100, 20])
    assert parts == {
        "head": np.mean(range(39)),
        "mid": np.mean(range(39, 87)),
        "tail": np.mean(range(87, 100)),
    }
    assert (
        accuracy_by_class_size(labels, hit)["head"]
        == np.mean(range(34))
        == accuracy_by_class_size(labels, hit, [0, 0])["head"]
    )


def test_own_class_folders_with_a_tail(tmp_path, capsys):
    for c, name in enumerate(helpers.CLASSES):
        write_images(tmp_path / "data" / name, range(40 * c, 40 * c + 40))
    words = (
        "--cpu --image-size 16 --batch-size 8 --max-steps 2 --train-features augmented "
        "--imbalance-ratio 4 --dataset"
    )
    helpers.few_steps(ts, tmp_path / "r", *words.split(), tmp_path / "data")
    assert re.search(r"classes +3, 28 to 7 images", capsys.readouterr().out)
    with pytest.raises(UserError, match="--label-column: there is no column"):
        long_tail.labelled_sets(str(helpers.write_captions(tmp_path / "c", 30)))
