"""Sets by name, on replicas in the true form of the repositories: numbered tars, parquet with Image features, class and prompt files."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

import common
import temo
from helpers import CLASSES, encode, picture, tar_samples, write_parquet_images, write_tar


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with local copies: coco, flickr30k, dtd, cc3m, cifar100, imagenet."""
    root = tmp_path_factory.mktemp("hub")
    for name in ("coco", "flickr30k"):
        for split, numbers in (("train", range(20, 32)), ("test", range(12))):
            half = list(numbers)
            for shard, part in enumerate((half[:6], half[6:])):
                write_tar(root / name / split / f"{shard}.tar", {f"s{i:07}": p for i, p in zip(part, tar_samples(part, "jpg", "txt").values())})
            (root / name / split / "nshards.txt").write_text("2")
        (root / name / "dataset_type.txt").write_text("retrieval")
    for split, numbers in (("train", range(12, 30)), ("test", range(12))):
        samples = {f"s{i:07}": {"cls": str(i % 3).encode(), "webp": encode(picture(i), "webp", lossless=True)} for i in numbers}
        write_tar(root / "dtd" / split / "0.tar", samples)
        (root / "dtd" / split / "nshards.txt").write_text("1")
    (root / "dtd" / "classnames.txt").write_text("apple\npear_tree\nzebra\n\n")
    (root / "dtd" / "zeroshot_classification_templates.txt").write_text("a photo of a {c} texture.\na photo of a {c} pattern.\n")
    for shard in range(4):
        write_tar(root / "cc3m" / f"cc3m-train-{shard:04}.tar", tar_samples(range(10 * shard, 10 * shard + 10), "jpg", "json", "txt"))
    write_tar(root / "cc3m" / "cc3m-validation-0000.tar", tar_samples(range(40, 46), "jpg", "json", "txt"))
    features = datasets.Features(img=datasets.Image(), fine_label=datasets.ClassLabel(names=CLASSES), coarse_label=datasets.ClassLabel(names=["a", "b"]))
    for split, numbers in (("train", range(20)), ("test", range(20, 26))):
        (root / "cifar100" / "cifar100").mkdir(parents=True, exist_ok=True)
        rows = {"img": [{"bytes": encode(picture(i)), "path": None} for i in numbers], "fine_label": [i % 3 for i in numbers], "coarse_label": [i % 2 for i in numbers]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(root / "cifar100" / "cifar100" / f"{split}-00000-of-00001.parquet"))
    for split, numbers in (("train", range(9)), ("validation", range(9, 15))):
        write_parquet_images(root / "imagenet" / "data" / f"{split}-00000-of-00001.parquet", numbers)
    return root


def test_retrieval_tars_have_a_caption_a_line(hub, capsys):
    data = common.load_data("coco", "test", data_dir=str(hub / "coco"))
    assert len(data) == 12 and data.key(3) == "s0000003" and data.has_captions
    assert data.captions(3) == ["picture number 3, take 0", "picture number 3, take 1"]
    assert np.abs(data.read(3).permute(1, 2, 0).numpy().astype(int) - picture(3)).mean() < 3
    assert "WARNING: coco (test) has 12 examples, 5,000 are expected" in capsys.readouterr().out
    assert len(common.load_data("flickr30k", "train", data_dir=str(hub / "flickr30k"))) == 12


def test_classification_tars_bring_class_names_and_prompts(hub):
    data = common.load_data("dtd", "test", data_dir=str(hub / "dtd"))
    assert data.label_names == CLASSES and data.labels.tolist() == [i % 3 for i in range(12)] and not data.has_captions
    assert data.prompts == ["a photo of a {c} texture.", "a photo of a {c} pattern."]
    assert torch.equal(data.read(5).permute(1, 2, 0), torch.from_numpy(picture(5)))


def test_a_label_beyond_the_class_names_is_said(hub, tmp_path):
    write_tar(tmp_path / "test" / "0.tar", {"s0000000": {"cls": b"7", "webp": encode(picture(1), "webp")}})
    (tmp_path / "classnames.txt").write_text("a\nb\n")
    with pytest.raises(common.UserError, match="a label is 7, but classnames.txt has 2 lines"):
        common.load_data("dtd", "test", data_dir=str(tmp_path))


def test_parquet_tables(hub):
    data = common.load_data("cifar100", "test", data_dir=str(hub / "cifar100"))
    assert len(data) == 6 and data.label_names == CLASSES and list(data.labels) == [i % 3 for i in range(20, 26)]
    assert torch.equal(data.read(0).permute(1, 2, 0), torch.from_numpy(picture(20)))
    held, rest = (common.load_data("cifar100", s, data_dir=str(hub / "cifar100")) for s in ("val", "train"))
    assert len(held) == 1 and len(rest) == 20
    imagenet = common.load_data("imagenet", "test", data_dir=str(hub / "imagenet"))  # the validation images are its test
    assert len(imagenet) == 6 and imagenet.split == "test"


def test_cc3m_streams_or_is_indexed(hub):
    stream = common.load_data("cc3m", "train", data_dir=str(hub / "cc3m"), streaming=True)
    assert isinstance(stream, common.Stream) and len(stream.urls) == 4 and stream.length == 2_910_000
    assert sorted(stream.caption_sample(40))[0] == "picture number 0, take 0"
    assert len(common.load_data("cc3m", "train", data_dir=str(hub / "cc3m"))) == 40
    assert len(common.load_data("cc3m", "val", data_dir=str(hub / "cc3m"), streaming=True)) == 6
    with pytest.raises(common.UserError, match="cc3m has no test split; it has: train, val"):
        common.load_data("cc3m", "test", data_dir=str(hub / "cc3m"))


def test_without_the_hub_one_line_says_what_to_do():
    for name in ("coco", "cifar10", "cc3m"):
        with pytest.raises(common.UserError) as error:
            common.load_data(name, "test" if name != "cc3m" else "val")
        assert "\n" not in str(error.value) and ("data-dir" in str(error.value) or "hub" in str(error.value)), name


def test_gated_sets_say_how_to_get_in():
    from huggingface_hub.errors import GatedRepoError
    def gated(_):
        raise GatedRepoError.__new__(GatedRepoError, "403: access to this data set is restricted")
    with pytest.raises(common.UserError, match="accept its terms .* `hf auth login`"):
        common._hub_call("imagenet", "ILSVRC/imagenet-1k", gated)


def test_the_17_sets_of_table_7_are_there():
    assert len(common.TEMO_17) == 17 and all("test" in common.HUB[n]["splits"] for n in common.TEMO_17)
    assert {n: common.HUB[n]["splits"]["test"][1] for n in ("cifar10", "mnist", "food101", "imagenet1k")} == {"cifar10": 10_000, "mnist": 10_000, "food101": 25_250, "imagenet1k": 50_000}


def test_the_cc3m_recipe_trains_on_tars_and_is_evaluated_on_three_sets(hub, tmp_path):
    flags = ["--dataset", "cc3m", "--data-dir", str(hub / "cc3m"), "--eval-datasets", f"cc3m={hub / 'cc3m'}", f"coco={hub / 'coco'}", f"flickr30k={hub / 'flickr30k'}",
             "--image-encoder", "small", "--text-encoder", "small", "--no-pretrained", "--batch-size", "8", "--max-steps", "2", "--image-size", "24", "--cpu", "--threads", "1",
             "--workers", "2", "--mixed-precision", "bf16", "--output-dir", str(tmp_path), "--run-name", "r"]
    summary = temo.main(temo.parse_args(flags))
    assert set(summary["test"]) == {"coco", "flickr30k"} and set(summary["val"]) == {"cc3m"} and not summary["errors"]
    assert summary["test"]["coco"]["captions"] == 24 and (tmp_path / "r" / "retrieval.png").exists()
    assert json.loads((tmp_path / "r" / "args.json").read_text())["streaming"] is True
    assert Path(tmp_path / "r" / "tokenizer").is_dir()
