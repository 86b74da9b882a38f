"""Image sets by name, on replicas in the true form of the repositories: tars, parquet, class and prompt files."""

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive import data as data_sets
from contrastive.data import images as hub_sets
from contrastive.data.stream import Stream
from contrastive.data.table import COMMITS
from contrastive.encoders.base import hub_encoder
from contrastive.evaluation.retrieval import lacks

import datasets
import numpy as np
import pytest
import torch

import temo
from helpers import (
    CLASSES,
    complains,
    encode,
    picture,
    tar_samples,
    write_parquet_images,
    write_rows,
    write_tar,
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with local copies: coco, flickr30k, dtd, cc3m, cifar100."""
    root = tmp_path_factory.mktemp("hub")
    for name in ("coco", "flickr30k"):
        for split, numbers in (("train", range(20, 32)), ("test", range(12))):
            half = list(numbers)
            for shard, part in enumerate((half[:6], half[6:])):
                samples = tar_samples(part, "jpg", "txt").values()
                write_tar(root / name / split / f"{shard}.tar", {f"s{i:07}": p for i, p in zip(part, samples)})
            (root / name / split / "nshards.txt").write_text("2")
        (root / name / "dataset_type.txt").write_text("retrieval")
    for split, numbers in (("train", range(12, 30)), ("test", range(12))):
        samples = {f"s{i:07}": {"cls": str(i % 3).encode(), "webp": encode(picture(i), "webp", lossless=True)}
                   for i in numbers}
        write_tar(root / "dtd" / split / "0.tar", samples)
        (root / "dtd" / split / "nshards.txt").write_text("1")
    prompts = "a photo of a {c} texture.\na photo of a {c} pattern.\n"
    (root / "dtd" / "classnames.txt").write_text("apple\npear_tree\nzebra\n\n")
    (root / "dtd" / "zeroshot_classification_templates.txt").write_text(prompts)
    for shard in range(4):
        samples = tar_samples(range(10 * shard, 10 * shard + 10), "jpg", "json", "txt")
        write_tar(root / "cc3m" / f"cc3m-train-{shard:04}.tar", samples)
    write_tar(root / "cc3m" / "cc3m-validation-0000.tar", tar_samples(range(40, 46), "jpg", "json", "txt"))
    fine, coarse = datasets.ClassLabel(names=CLASSES), datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features(img=datasets.Image(), fine_label=fine, coarse_label=coarse)
    (root / "cifar100" / "cifar100").mkdir(parents=True)
    for split, numbers in (("train", range(34)), ("test", range(20, 26))):
        rows = {"img": [{"bytes": encode(picture(i)), "path": None} for i in numbers],
                "fine_label": [i % 3 for i in numbers], "coarse_label": [i % 2 for i in numbers]}
        file = root / "cifar100" / "cifar100" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(file))
    return root


def test_retrieval_tars_have_a_caption_a_line(hub):
    data = common.load_data("coco", "test", data_dir=str(hub / "coco"))
    assert len(data) == 12 and data.key(3) == "s0000003" and data.has_captions
    assert data.captions(3) == ["picture number 3, take 0", "picture number 3, take 1"]
    assert np.abs(data.read(3).permute(1, 2, 0).numpy().astype(int) - picture(3)).mean() < 3
    assert "WARNING: 12 examples, 5,000 expected" in data.note
    assert len(common.load_data("flickr30k", "train", data_dir=str(hub / "flickr30k"))) == 12
    stream = common.load_data("coco", "train", data_dir=str(hub / "coco"), streaming=True)
    assert stream.urls == [str(hub / "coco" / "train" / f"{k}.tar") for k in (0, 1)]


def test_classification_tars_bring_class_names_and_prompts(hub):
    data = common.load_data("dtd", "test", data_dir=str(hub / "dtd"))
    assert data.label_names == CLASSES and data.labels.tolist() == [i % 3 for i in range(12)] and not data.has_captions
    assert data.prompts == ["a photo of a {c} texture.", "a photo of a {c} pattern."]
    assert torch.equal(data.read(5).permute(1, 2, 0), torch.from_numpy(picture(5)))
    assert data.column("captions")[:3] == [["apple"], ["pear tree"], ["zebra"]]
    assert "no captions: the classes serve as captions" in data.note


def test_two_classes_of_one_name_stay_two(tmp_path):
    """CLIP's names for ImageNet have some names twice; a label beyond the names is said."""
    samples = {f"s{i}": {"cls": str(i % 3).encode(), "png": encode(picture(i))} for i in range(6)}
    write_tar(tmp_path / "test" / "0.tar", samples)
    (tmp_path / "classnames.txt").write_text("missile\nant\nmissile\n")
    data = common.load_data("dtd", "test", data_dir=str(tmp_path))
    assert data.labels.tolist() == [0, 1, 2] * 2
    assert [n.strip() for n in data.label_names] == ["missile", "ant", "missile"]
    (tmp_path / "classnames.txt").write_text("a\nb\n")
    data_sets._named.cache_clear()
    complains("dtd", "test", "a label is 2, but there are 2 class names", data_dir=str(tmp_path))


def test_the_last_shard_of_cc12m_is_its_val_and_not_trained_on(tmp_path):
    for k, shard in enumerate(("0000", "0001", "2175")):
        write_tar(tmp_path / f"cc12m-train-{shard}.tar", tar_samples(range(3 * k, 3 * k + 3), "jpg", "txt"))
    train, val = (common.load_data("cc12m", s, data_dir=str(tmp_path)) for s in ("train", "val"))
    assert train.column("key") == [f"{i:06}" for i in range(6)] and val.column("key") == ["000006", "000007", "000008"]
    stream = common.load_data("cc12m", "train", data_dir=str(tmp_path), streaming=True)
    assert [Path(u).name for u in stream.urls] == ["cc12m-train-0000.tar", "cc12m-train-0001.tar"]


def test_parquet_tables(hub):
    data = common.load_data("cifar100", "test", data_dir=str(hub / "cifar100"))
    assert len(data) == 6 and data.label_names == CLASSES and list(data.labels) == [i % 3 for i in range(20, 26)]
    assert torch.equal(data.read(0).permute(1, 2, 0), torch.from_numpy(picture(20)))
    assert data.prompts == hub_sets.CIFAR_PROMPTS and len(data.prompts) == 18
    where = {"data_dir": str(hub / "cifar100")}
    held, rest = (common.load_data("cifar100", s, hold_out_val=True, **where) for s in ("val", "train"))
    assert held.column("key") == ["33"] and len(rest) == 33  # images without names: the number of the row
    assert "33" not in rest.column("key") and len(common.load_data("cifar100", "train", **where)) == 34
    complains("cifar100", "val", "cifar100 has no val split; it has: train, test; --hold-out-val takes", **where)


def test_classes_of_imagenet_have_the_first_of_their_names(tmp_path):
    names = ["tench, Tinca tinca", "crane", "great white shark, white shark, man-eater", "crane, machine"]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    rows = {"image": [{"bytes": encode(picture(i)), "path": None} for i in range(8)], "label": [0, 1, 2, 3] * 2}
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "validation-00000-of-00001.parquet"  # the papers' test
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(file))
    data = common.load_data("imagenet", "test", data_dir=str(tmp_path))
    assert [n.strip() for n in data.label_names] == ["tench", "crane", "great white shark", "crane"]
    assert data.captions(2) == ["great white shark"] and data.labels.tolist() == [0, 1, 2, 3] * 2
    assert data.split == "test" and data.prompts == hub_sets.IMAGENET_PROMPTS
    complains("imagenet", "test", "come with the tars of imagenet1k alone", data_dir=str(tmp_path), class_names="clip")


def test_imagenet_has_clip_s_prompts_and_the_names_that_are_asked_for(tmp_path):
    """The tars have CLIP's names and perhaps other prompts beside them; WordNet's first names are the default."""
    prompts = hub_sets.IMAGENET_PROMPTS
    some = ["a photo of a {c}.", "itap of my {c}.", "the {c} in a video game.", "a jpeg corrupted photo of the {c}.",
            "the plushie {c}.", "graffiti of a {c}.", "a photo of the hard to see {c}.", "a photo of many {c}."]
    assert len(set(prompts)) == 80 == len(prompts) and {*some} < {*prompts}
    assert all(p.count("{c}") == 1 and "  " not in p for p in prompts)
    samples = {f"s{i}": {"cls": str(i).encode(), "png": encode(picture(i % 100))} for i in (0, 134, 517)}
    write_tar(tmp_path / "test" / "0.tar", samples)
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")
    of, where = {}, {"data_dir": str(tmp_path)}
    complains("imagenet1k", "test", "--class-names clip: no classnames.txt in ", class_names="clip", **where)
    (tmp_path / "classnames.txt").write_text("\n".join(f"name {i}" for i in range(1000)))
    for names in ("wordnet", "clip"):
        data = common.load_data("imagenet1k", "test", class_names=names, **where)
        of[names] = [data.captions(k)[0].strip() for k in range(3)]
        assert data.prompts == prompts and len(set(data.label_names)) == 1000
    assert of == {"wordnet": ["tench", "crane bird", "crane"], "clip": ["name 0", "name 134", "name 517"]}
    assert common.load_data("imagenet1k", "test", **where).captions(0) == ["tench"]


def test_cc3m_streams_or_is_indexed(hub):
    options = {"data_dir": str(hub / "cc3m")}
    stream = common.load_data("cc3m", "train", streaming=True, **options)
    assert isinstance(stream, Stream) and stream.streamed and len(stream.urls) == 4 and stream.length == 2_910_000
    assert sorted(stream.first_captions(40))[0] == "picture number 0, take 0"
    indexed = common.load_data("cc3m", "train", **options)
    assert isinstance(indexed, common.Data) and not indexed.streamed and len(indexed) == 40
    assert indexed.shards.tolist() == [shard for shard in range(4) for _ in range(10)]
    assert len(common.load_data("cc3m", "val", streaming=True, **options)) == 6
    complains("cc3m", "test", "cc3m has no test split; it has: train, val", **options)


def test_without_the_hub_one_line_says_what_to_do():
    for name, split in (("coco", "test"), ("cifar10", "test"), ("cc3m", "val")):
        complains(name, split, f"a local copy: --data-dir, to evaluate on {name}=DIR")


def test_the_17_sets_of_table_7_are_there():
    assert len(hub_sets.TEMO_17) == 17 and all("test" in hub_sets.SETS[n]["splits"] for n in hub_sets.TEMO_17)
    expected = {"cifar10": 10_000, "mnist": 10_000, "food101": 25_250, "imagenet1k": 50_000}
    assert {n: hub_sets.SETS[n]["splits"]["test"] for n in expected} == expected
    assert all(set(facts["splits"]) == set(facts.get("files", facts["splits"])) for facts in hub_sets.SETS.values())


@pytest.mark.parametrize("streaming", [False, True])
def test_the_cc3m_recipe_trains_on_tars_and_is_evaluated_on_three_sets(streaming, hub, tmp_path):
    others = [f"{name}={hub / name}" for name in ("cc3m", "coco", "flickr30k")]
    flags = ["--dataset", "cc3m", "--data-dir", str(hub / "cc3m"), "--eval-datasets", *others,
             "--image-encoder", "small", "--text-encoder", "small", "--no-pretrained", "--batch-size", "8",
             "--max-steps", "2", "--image-size", "24", "--cpu", "--workers", "2",
             "--mixed-precision", "bf16", "--output-dir", str(tmp_path), "--run-name", "r"]
    summary = temo.main(temo.parse_args(flags + ["--streaming"] * streaming))
    assert set(summary["test"]) == {"coco", "flickr30k"} and set(summary["val"]) == {"cc3m"}
    assert summary["test"]["coco"]["captions"] == 24


@pytest.mark.parametrize("n, there", [(2_860_000, True), (3_318_333, True), (3_300_000, True), (3_100_000, False),
                                      (2_800_000, False)])
def test_cc3m_is_that_of_temo_or_of_mm_ts(n, there):
    """Pages vanished between the two papers; a count between them is neither's."""
    counts = [hub_sets.SETS["cc3m"]["splits"]["train"], hub_sets.SETS["cc3m"]["also"]["train"]]
    assert any(abs(n - count) <= hub_sets.SETS["cc3m"]["about"] * count for count in counts) == there

A, B, C = "a" * 40, "b" * 40, "c" * 40  # commits


def test_a_data_set_of_the_hub_at_a_commit(tmp_path, monkeypatch):
    """dtd@COMMIT is read at that commit; a commit that the cache lacks, and one of what is not from the hub, are
    refused; a path is a path."""
    repo = tmp_path / "datasets--clip-benchmark--wds_vtab-dtd"
    for commit, classes in ((A, "x y z"), (B, "p q r")):
        samples = {f"s{i}": {"cls": str(i % 3).encode(), "png": encode(picture(i))} for i in range(6)}
        write_tar(repo / "snapshots" / commit / "test" / "0.tar", samples)
        (repo / "snapshots" / commit / "classnames.txt").write_text("\n".join(classes.split()))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(A)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, names in (("dtd", ["x", "y", "z"]), (f"dtd@{B}", ["p", "q", "r"])):
        data = common.load_data(name, "test")
        assert data.label_names == names and data.name == "dtd" and COMMITS[hub_sets.SETS["dtd"]["repo"]] == (
            A if name == "dtd" else B)
    complains(f"dtd@{C}", "test", "dtd: clip-benchmark/wds_vtab-dtd ")
    path = write_rows(tmp_path / "a@home.csv", ["image", "caption"], [("1.png", "x")])
    assert len(common.load_data(str(path), "train")) == 1
    for name, options in ((f"dtd@{B}", {"data_dir": str(tmp_path)}), (f"emoji@{B}", {}), (f"{tmp_path}@{B}", {})):
        complains(name, "test", "only what is read from the hub has a revision", **options)


def test_a_run_on_a_commit_of_own_data_and_weights_says_which(tmp_path, tiny, monkeypatch):
    """The caches of `datasets` and of transformers, as a first run with the hub leaves them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    for split, numbers in (("train", range(30)), ("test", range(30, 40))):
        write_parquet_images(tmp_path / "pictures" / f"{split}.parquet", numbers)
    builder = datasets.load_dataset_builder(str(tmp_path / "pictures"))
    builder.download_and_prepare(str(tmp_path / "datasets" / "some___pictures" / "default" / "0.0.0" / A))
    complains(f"some/pictures@{B}", "train", f"the cache of some/pictures has the commit {A} alone")
    args = temo.parse_args(["--dataset", f"some/pictures@{A}", "--image-encoder", "small", "--text-encoder", "small",
                            "--no-pretrained", "--batch-size", "8", "--max-steps", "1", "--image-size", "24", "--cpu",
                            "--workers", "0", "--eval-every", "0", "--output-dir", str(tmp_path), "--run-name", "r"])
    assert (args.dataset, args.revision) == ("some/pictures", A)
    summary = temo.main(args)
    assert summary["hub"]["some/pictures"] == A and summary["dataset"] == "some/pictures"
    shutil.copytree(tiny("bert")[0], tmp_path / "models--some--bert" / "snapshots" / C)
    (tmp_path / "models--some--bert" / "refs").mkdir()
    (tmp_path / "models--some--bert" / "refs" / "main").write_text(C)
    hub_encoder("some/bert", "text", True, None)
    assert COMMITS["some/bert"] == C


def test_classes_of_own_tars_have_numbers_and_no_names(tmp_path):
    """Neighbours need none; zero-shot does."""
    for split in ("train", "test"):
        write_tar(tmp_path / f"{split}.tar", tar_samples(range(6), "jpg", "txt", "cls"))
    train, test = (common.load_data(str(tmp_path), split) for split in ("train", "test"))
    towers = SimpleNamespace(), object(), None
    why = lacks(["knn", "zero-shot"], test, towers, train)
    assert why == {"knn": "", "zero-shot": "the classes have no names"}



# ---------------------------------------------------- the table of names ---------------------------------------------
A_SET = '''"""A data set is one file."""
import common
import torch
SETS = {"zz-noise": {"splits": {"train": 24, "val": 4, "test": 4}, "licence": "none", "where": "drawn here"}}
def load(name, split, options):
    n = SETS[name]["splits"][split]
    table = common.make_table([[f"noise number {i}"] for i in range(n)], [f"{split} {i}" for i in range(n)])
    pixels = torch.arange(n * 3 * 16 * 16).view(n, 3, 16, 16).to(torch.uint8)
    return common.Data(name, split, table, pixels=pixels, note="zz was here")
'''


def test_a_new_set_is_one_file_and_a_line(tmp_path, monkeypatch):
    (tmp_path / "zz_test_set.py").write_text(A_SET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(data_sets.MODULES, "zz-noise", "zz_test_set")
    train, evals = data_sets.open_data(temo.parse_args(["--dataset", "zz-noise", "--batch-size", "8"]))
    assert (len(train), train.note) == (24, "zz was here") and {k: len(d) for k, d in evals["zz-noise"].items()} == {
        "val": 4, "test": 4}


def test_every_set_says_what_it_is():
    files = [f"contrastive.data.{f.stem}" for f in Path(data_sets.__file__).parent.glob("*.py") if f.stem != "__init__"]
    rooms = [room for room in map(importlib.import_module, files) if hasattr(room, "SETS")]
    names = [name for room in rooms for name in room.SETS]
    assert len(names) == len(set(names)) and all(callable(room.load) for room in rooms)
    assert data_sets.MODULES == {name: room.__name__ for room in rooms for name in room.SETS}  # the table and the files
    for room in rooms:
        for name, facts in room.SETS.items():
            assert set(facts["splits"]) <= {"train", "val", "test"} and facts["licence"], name
            assert data_sets.find_set(name) is room and data_sets.splits_of(name) == tuple(facts["splits"])
    assert data_sets.find_set("no/such") is None and data_sets.splits_of("no/such") == ("train", "val", "test")
