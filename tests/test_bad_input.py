"""Data, weights and folders that a user can get wrong: one clear line each, and which of it costs samples only."""

import re
from importlib.util import find_spec

import common
from contrastive import evaluation
from contrastive.data import batches
from contrastive.data.batches import epoch_batches
from contrastive.engine.processes import UserError

import pytest
import torch
from safetensors.torch import save_file

import helpers
import temo
from helpers import run_script

TINY = "--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 2".split()


def stopped(dataset, out, *flags):
    """The one line of the UserError that ends this run."""
    with pytest.raises(UserError) as error:
        run_script(temo, out / "a", *flags, base=[*TINY, "--dataset", dataset])
    message = str(error.value)
    assert "\n" not in message and len(message) < 700
    return message


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return helpers.write_captions(tmp_path_factory.mktemp("good"), 24)


# ---------------------------------------------------- opening a data set --------------------------------------------
def write_set(folder, kind):
    """A data set that cannot be opened, in `folder` -> its path."""
    names = helpers.write_images(folder, range(4)) if kind in ("foto.csv", "few.csv") else []
    if kind == "foto.csv":
        return helpers.write_rows(folder / kind, ["foto", "worte"], [(x, "some words") for x in names])
    if kind == "few.csv":
        return helpers.write_captions(folder, 2, kind)
    if kind == "elsewhere.csv":
        return helpers.write_rows(folder / kind, ["image", "caption"], [(f"{i}.png", "words") for i in range(30)])
    if kind in ("no words", "cat"):
        samples = helpers.tar_samples(range(6), "jpg", *(["json"] if kind == "no words" else ["txt"]))
        more = {} if kind == "no words" else {"cls": b"cat"}
        helpers.write_tar(folder / kind / "a.tar", {k: v | more for k, v in samples.items()})
    elif kind == "empty":
        (folder / kind / "inside").mkdir(parents=True)
    elif kind.startswith("a."):
        (folder / kind).write_bytes(helpers.TEXT * 100 if kind == "a.tar" else b"")
    return folder / kind


SETS = {  # kind, flags: words of the line
    ("/no/such", ""): "--dataset /no/such: no such file or folder",
    ("emojis", ""): "--dataset emojis: no such file or folder.*org/name.*known set: .*emoji, .*cifar10-lt",
    ("nobody-at-all/nothing", ""): "--dataset nobody-at-all/nothing: ", ("empty", ""): ".*any data files",
    ("a.csv", ""): "--dataset .*a.csv: .{5}", ("a.jsonl", ""): "--dataset .*: .{5}",
    ("a.parquet", ""): "--dataset .*: .{5}",
    ("a.xyz", ""): ".*a .xyz file is not one of csv, json, jsonl, parquet, tar",
    ("a.tar", ""): ".*a.tar: not a tar that can be read to its end",
    ("foto.csv", ""): ".*--image-column: none of image, .* is there; there are: foto, worte",
    ("foto.csv", "--image-column foto"): ".*--caption-column: none of caption, .* is there; there are: foto, worte",
    ("few.csv", ""): "--batch-size 8: larger than the 2 training examples of",
    ("no words", ""): ".*--caption-column.* there are: jpg, json", ("cat", ""): ".*000000 of .*a.tar: .*cat",
    ("elsewhere.csv", ""): r"100 samples in a row cannot be read, the first: \d+.png"}


@pytest.mark.parametrize("kind, flags", SETS)
def test_a_data_set_that_cannot_be_opened(kind, flags, tmp_path):
    named = kind in ("/no/such", "emojis", "nobody-at-all/nothing")
    assert re.match(SETS[kind, flags], stopped(kind if named else write_set(tmp_path, kind), tmp_path, *flags.split()))


# ---------------------------------------------------- the start of a run --------------------------------------------
COLUMNS = "there is no such column; there are: image, caption"
STOPPED = {
    "--image-column nope": f"--image-column nope: {COLUMNS}", "--label-column nope": f"--label-column nope: {COLUMNS}",
    "--caption-column nope": f"--caption-column nope: {COLUMNS}",
    "--batch-size 64": "--batch-size 64: larger than the 23 training examples of .*captions.csv",
    "--image-encoder resnet_99": "resnet_99: Unknown model", "--image-encoder no/such": "no/such: ",
    "--paraphrases /no.jsonl": "--paraphrases /no.jsonl: .*/no.jsonl",
    "--text-encoder nobody/none": "nobody/none: .*connect",
    "--image-encoder resnet18-cifar --chunk-size 4": "--chunk-size 4: resnet18-cifar has BatchNorm.* chunk",
    "--init-from text.pt": "--init-from .*text.pt: ",
    "--init-from other.safetensors": ".*none of its 1 tensors fits the model; its first names are .'other'., the",
    "--init-from nan.safetensors": r"the loss is not finite at step 0 \(tau 0.1\); .*norms up to nan.*keys \['\d+.png'",
    "--lr 1e30 --lr-end 1e30 --grad-clip 0": r"the loss is not finite at step 1 \(tau 0.1\); process 0: norms "
                                             r"up to .*keys \['\d+.png'.*a lower learning rate",
    "--output-dir text.pt": ".*text.pt.*: .*Not a directory"}


@pytest.mark.parametrize("words", STOPPED)
def test_what_ends_a_run_before_or_in_its_first_steps(words, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_bytes(helpers.TEXT)
    save_file({"other": torch.zeros(2)}, "other.safetensors")
    save_file({"vision.projection.weight": torch.full((16, 128), float("nan"))}, "nan.safetensors")
    assert re.match(STOPPED[words], stopped(good, tmp_path, *words.split()))


def test_a_batch_that_no_three_processes_share(good, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "world", lambda: 3)
    assert "a batch of 8 is not divisible by 3 processes" in stopped(good, tmp_path)


@pytest.mark.skipif(find_spec("wandb") is not None, reason="it is installed")
def test_missing_tracker(good, tmp_path):
    assert "--tracker wandb: not installed: pip install wandb" in stopped(good, tmp_path, "--tracker", "wandb")


def test_own_data_without_a_batch_size_take_what_fits(good, tmp_path, capsys):
    """And say so; a resumed run keeps it. A set with a recipe, or a --batch-size, is left alone."""
    flags = [*"--cpu --workers 0 --max-steps 1 --image-size 16".split(), "--dataset", good]
    summary = run_script(temo, tmp_path / "r", *flags)
    out = capsys.readouterr().out
    assert summary["batch"] == 23 and "; --batch-size 256 -> 23, which fits the data" in out
    assert "batch        23 = 1 x 23; 22 negatives" in out
    said = f"recipe       own (ours; small towers from scratch), but --image-size by flag; {good} has none "
    assert out.startswith(f"temo.py\n  {said}") and "FEW QUERIES: of " in out
    assert temo.parse_args(["--resume", str(tmp_path / "r")]).batch_size == 23
    said = evaluation.retrieval.table("emoji", {"captions": 80, "images": 16, "unreadable": 3}, {})
    assert said.splitlines()[-1] == "FEW QUERIES: of 16 images one is worth 6.2 points"
    assert "FEW" not in evaluation.retrieval.table("emoji", {"captions": 50, "images": 50, "unreadable": 3}, {})


# ---------------------------------------------------- samples that cannot be read ------------------------------------
def test_a_few_bad_samples_are_replaced_counted_and_listed_and_too_many_stop_the_run(tmp_path):
    """Of 60 pictures one of the first batch is missing, one cut off, one a text."""
    csv = helpers.write_captions(tmp_path / "data", 60)
    train = common.load_data(str(csv), "train")
    order = next(epoch_batches(len(train), 8, 42, 0, 1))[1]
    missing, cut, text = (train.key(int(i)) for i in order[[1, 4, 6]])
    (csv.parent / missing).unlink()
    (csv.parent / cut).write_bytes(helpers.TRUNCATED)
    (csv.parent / text).write_bytes(helpers.TEXT)
    summary = run_script(temo, tmp_path / "r", "--max-bad-fraction", 0.1, base=[*TINY, "--dataset", csv])
    assert summary["bad_samples"] == 3 and summary["steps"] == 2
    lines = (tmp_path / "r" / "bad_samples.txt").read_text(encoding="utf8").splitlines()
    listed = dict(line.split("\t") for line in lines)
    assert set(listed) == {missing, cut, text}
    assert "No such file" in listed[missing] and "truncated" in listed[cut] and "cannot identify" in listed[text]
    message = stopped(csv, tmp_path)
    assert re.match(r"3 of about 56 samples cannot be read, above --max-bad-fraction 0.01; the first: \S+: "
                    r".*/a/bad_samples.txt\)", message)
    assert (tmp_path / "a" / "bad_samples.txt").read_text().count("\n") == 3
