"""Splits of the user's own data: files that are test alone, small data, names that are held out."""

import argparse
import json

from contrastive.core.processes import UserError
from contrastive.data import load_data, open_data, open_pairs, open_unnamed
from contrastive.data.options import DataOptions
from contrastive.data.splits import choose_rows, hash_fraction
from contrastive.data.table import EmptySplit
from contrastive.papers.meta import named_rows

import datasets
import numpy as np
import pytest

import eval as eval_py
import temo
import temperature_schedules
from helpers import (
    caption, encode, evaluated, open_splits, picture, refused, run_script, write_captions,
    write_images, write_rows)

TINY = (
    "--cpu --workers 0 --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 1 "
    "--eval-every 0".split()
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """train.csv of 40 images, test.csv of 30 others, both.csv of all."""
    root = tmp_path_factory.mktemp("own")
    write_images(root, range(70))
    names = sorted(path.name for path in root.glob("*.png"))
    for file, some in (("train", names[:40]), ("test", names[40:]), ("both", names)):
        rows = [(name, f"words of {name}") for name in some]
        write_rows(root / f"{file}.csv", ["image", "caption"], rows)
    return root


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """A run on train.csv."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_script(temo, folder, *TINY, "--dataset", root / "train.csv")
    return folder


# ---------------------------------------- sets that are evaluated alone --------------------------
def parse(root, *files, train="train.csv"):
    files = [str(root / file) for file in files]
    return temo.parse_args(["--dataset", str(root / train), "--eval-datasets", *files])


def test_a_test_file_of_ones_own_is_test_as_a_whole(root):
    _, sets = open_data(parse(root, "test.csv", "train.csv"))
    test = sets[str(root / "test.csv")]
    assert list(test) == ["test"] and len(test["test"]) == 30
    own = sets[str(root / "train.csv")]  # the training set still has its held-out splits
    assert (len(own["val"]), len(own["test"])) == (6, 6)


def test_beside_a_test_file_train_gives_val_and_keeps_the_rest(root):
    args = parse(root, "test.csv")
    train, sets = open_data(args)
    own = sets[str(root / "train.csv")]
    assert list(sets[str(root / "test.csv")]) == ["test"] and list(own) == ["val"]
    assert (len(train), len(own["val"])) == (34, 6)
    assert not set(train.keys()) & set(own["val"].keys())
    assert train.note == "6 of 40 held out for val, by a hash of the name"
    args = temo.parse_args(["--eval-every", "0", "--eval-datasets", str(root / "test.csv")])
    _, sets = open_data(args)
    assert list(sets) == [str(root / "test.csv")]  # emoji is no file of the user


def test_rows_that_were_trained_on_are_left_out_and_counted(root):
    train, sets = open_data(parse(root, "both.csv"))
    test = sets[str(root / "both.csv")]["test"]
    assert len(train) == 34 and len(test) == 36
    assert not set(train.keys()) & set(test.keys())
    assert "34 rows left out, whose files were trained on" in test.note
    assert "WARNING: 6 of its rows are in the val split of the training set" in test.note
    _, sets = open_data(parse(root, "test.csv"))
    assert "WARNING" not in sets[str(root / "test.csv")]["test"].note


def test_files_inside_tables_are_said_not_to_be_compared(tmp_path, capsys):
    for name in ("train", "test"):
        rows = [(encode(picture(i)), caption(i)) for i in range(30)]
        write_rows(tmp_path / f"{name}.parquet", ["image", "caption"], rows)
    _, sets = open_data(parse(tmp_path, "test.parquet", train="train.parquet"))
    test = sets[str(tmp_path / "test.parquet")]["test"]
    words = "WARNING: files inside tables and tars are not compared with those trained on"
    assert words in test.note
    run_script(temo, tmp_path / "run", *TINY, "--dataset", tmp_path / "train.parquet")
    capsys.readouterr()
    for name, count in (("train", 0), ("test", 1)):
        evaluated(tmp_path / "run", "--datasets", tmp_path / f"{name}.parquet")
        assert capsys.readouterr().out.count(words) == count


def test_a_set_of_nothing_else_than_the_training_rows_is_an_error(root):
    train = load_data(str(root / "train.csv"), "train")
    rows = [(name, "words") for name in train.keys()]
    write_rows(root / "again.csv", ["image", "caption"], rows)
    with pytest.raises(EmptySplit, match="all of its 28 rows were trained on"):
        open_data(parse(root, "again.csv"))


def test_eval_py_reads_a_test_file_as_a_whole(root, run, tmp_path, capsys):
    files = [str(root / "test.csv"), str(root / "both.csv")]
    found = evaluated(run, "--output-dir", tmp_path, "--datasets", *files)
    assert [found[file]["metrics"]["images"] for file in files] == [30, 42]
    assert "28 rows left out, whose files were trained on" in capsys.readouterr().out


def test_files_of_extra_pairs_are_left_out_of_other_sets_alone(root, tmp_path, capsys):
    """The sets that the run evaluated keep all rows: training has left those out of the pairs."""
    names = sorted(path.name for path in root.glob("*.png"))
    for file, some in (("pairs", names[30:50]), ("evaluated", names[45:60])):
        rows = [(name, f"words of {name}") for name in some]
        write_rows(root / f"{file}.csv", ["image", "caption"], rows)
    flags = ["--extra-pairs", root / "pairs.csv", "--eval-datasets", root / "evaluated.csv"]
    run_script(temo, tmp_path / "run", *TINY, "--dataset", root / "train.csv", *flags)
    args = json.loads((tmp_path / "run" / "args.json").read_text())
    args = argparse.Namespace(**args)
    train, _ = open_data(args)
    trained = set(train.keys()) | set(open_pairs(str(root / "pairs.csv"), args).keys())
    files = [str(root / "test.csv"), str(root / "evaluated.csv")]
    flags = ["--tasks", "retrieval", "--datasets"]
    found = evaluated(tmp_path / "run", *flags, *files)
    num_trained = len(trained & set(names[40:]))
    assert num_trained >= 5
    images = [found[file]["metrics"]["images"] for file in files]
    assert images == [30 - num_trained, 15]
    assert f"{num_trained} rows left out, whose files were" in capsys.readouterr().out
    (root / "pairs.csv").rename(root / "moved.csv")
    open_unnamed.cache_clear()
    found = evaluated(tmp_path / "run", *flags, files[0])
    assert found[files[0]]["metrics"]["images"] == 30
    assert "pairs.csv of the run cannot be read, so rows" in capsys.readouterr().out


def test_exchanged_captions_of_extra_pairs_are_known(root):
    names = sorted(path.name for path in root.glob("*.png"))
    rows = [(name, f"words of {name}") for name in names[30:50]]
    more = str(write_rows(root / "more.csv", ["image", "caption"], rows))
    flags = ["--dataset", str(root / "train.csv"), "--caption-noise", "0.5", "--extra-pairs", more]
    train, _ = open_data(temo.parse_args(flags))
    is_other = []
    for row, key in enumerate(train.keys()):
        is_other.append(train.captions(row) != [f"words of {key}"])
    assert train.column("noisy").tolist() == is_other
    num_own = len(train.before_extra_pairs)
    assert 0 < sum(is_other[:num_own]) < num_own < len(train)
    assert 0 < sum(is_other[num_own:]) < len(train) - num_own


def test_neighbours_are_those_of_the_set_without_extra_pairs(root, tmp_path):
    """In training as in eval.py."""
    names = sorted(path.name for path in root.glob("*.png"))
    rows = [(name, f"words of {name}", "ab"[k % 2]) for k, name in enumerate(names)]
    own = write_rows(root / "labelled.csv", ["image", "caption", "label"], rows[:40])
    more = write_rows(root / "unlabelled.csv", ["image", "caption"], [row[:2] for row in rows[40:]])
    flags = [*TINY, "--dataset", own, "--extra-pairs", more]
    trained = run_script(temo, tmp_path / "run", *flags)["test"][str(own)]
    loaded = evaluated(tmp_path / "run", "--tasks", "knn")[str(own)]["metrics"]
    assert trained["knn@1"] == loaded["knn@1"] and trained["knn@10"] == loaded["knn@10"]


def test_eval_py_warns_of_a_training_set_that_has_changed(tmp_path, capsys):
    """A file that was cut holds out other rows, some of which were trained on."""
    path = write_captions(tmp_path, 60)
    header, *lines = path.read_text().splitlines(keepends=True)
    second = [f"{line.partition(',')[0]},another caption {k}\n" for k, line in enumerate(lines)]
    path.write_text(header + "".join(lines + second))
    other = path.with_name("other.csv")
    other.write_text(header + "".join(lines[50:]))
    run_script(temo, tmp_path / "run", *TINY, "--dataset", path, "--unfold-captions")
    capsys.readouterr()
    for more in ([], ["--datasets", other]):
        evaluated(tmp_path / "run", *more)
    assert "has changed" not in capsys.readouterr().out
    path.write_text(header + "".join(lines[:40]))
    open_unnamed.cache_clear()
    for more in ([], ["--datasets", other]):
        evaluated(tmp_path / "run", *more)
        out = capsys.readouterr().out
        assert f"WARNING: {path} has changed since the run, which trained on other rows" in out
        assert out.count("has changed since the run") == 1
    path.unlink()
    open_unnamed.cache_clear()
    evaluated(tmp_path / "run", "--datasets", other)
    assert f"WARNING: {path} cannot be read, so rows that were" in capsys.readouterr().out


def test_a_test_file_of_classes_learns_from_the_training_images(root, tmp_path, capsys):
    names = sorted(path.name for path in root.glob("*.png"))
    for file, some in (("train", names[:40]), ("test", names[40:])):
        rows = [(name, f"class {i % 2}") for i, name in enumerate(some)]
        write_rows(root / f"classes_{file}.csv", ["image", "label"], rows)
    flags = "--cpu --workers 0 --image-size 16 --batch-size 8 --max-steps 1 --eval-every 0".split()
    trained_on = str(root / "classes_train.csv")
    run_script(temperature_schedules, tmp_path / "run", *flags, "--dataset", trained_on)
    test = str(root / "classes_test.csv")
    found = evaluated(tmp_path / "run", "--datasets", test)[test]
    assert found["metrics"]["images"] == 30 and "knn@1" in found["metrics"]
    said = f"knn and probe learn from the training images of {trained_on}"
    assert said in capsys.readouterr().out


# ---------------------------------------- files of the hub ---------------------------------------
def test_held_out_files_of_the_hub_depend_neither_on_the_cache_nor_on_the_commit(
    tmp_path, monkeypatch
):
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    names = []
    for home, commit in (("a", "1" * 40), ("b/c", "2" * 40)):
        files = []
        for kind in ("cat", "dog"):
            folder = tmp_path / home / "datasets--some--pets" / "snapshots" / commit / "data" / kind
            files += [str(folder / name) for name in write_images(folder, range(30))]
        cache = tmp_path / home / "datasets"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        builder = ImageFolder(dataset_name="pets", hash=commit, data_files={"train": files})
        builder.download_and_prepare()
        config = cache / "pets" / builder.config_id
        config.rename(config.with_name("default"))
        (cache / "pets").rename(cache / "some___pets")
        monkeypatch.chdir(tmp_path / home)
        open_unnamed.cache_clear()
        splits = open_splits("some/pets")
        names.append({split: set(data.keys()) for split, data in splits.items()})
    assert names[0] == names[1] and "cat/000.png" in set.union(*names[0].values())
    assert len(names[0]["test"]) == 10


# ---------------------------------------- small data ---------------------------------------------
@pytest.mark.parametrize(
    "images, least", [(5, 0), (6, 1), (12, 2), (60, 10), (119, 19), (120, 20), (300, 20)]
)
def test_small_data_hold_out_twenty_images_or_a_sixth(images, least):
    fractions = np.random.default_rng(images).random(images)
    rows = np.concatenate([fractions, fractions[: images // 2]])           # windows of some videos
    masks = choose_rows(rows, ["val", "test"], DataOptions())
    for split, low in (("val", 0.0), ("test", 0.05)):
        in_band = ((fractions >= low) & (fractions < low + 0.05)).sum()
        assert len(np.unique(rows[masks[split]])) == max(least, in_band) or split == "val"
        assert len(np.unique(rows[masks[split]])) >= least
        for fraction in np.unique(rows[masks[split]]):  # windows stay together
            assert masks[split][rows == fraction].all()
    assert not (masks["val"] & masks["test"]).any()
    for val_fraction in (0.01, 0.4):
        others = choose_rows(rows, ["val", "test"], DataOptions(val_fraction=val_fraction))
        assert (others["test"] == masks["test"]).all()


def test_few_rows_that_are_held_out_are_warned_of(tmp_path):
    sets = open_splits(write_captions(tmp_path, 24))
    for split in ("val", "test"):
        warning = f"WARNING: fewer than 20 rows, --{split}-fraction holds out more"
        assert len(sets[split]) == 4 and warning in sets[split].note


def test_test_fraction(tmp_path):
    names = [f"{i:03}.png" for i in range(2000)]
    rows = [(name, f"words of {name}") for name in names]
    path = write_rows(tmp_path / "a.csv", ["image", "caption"], rows)
    small, large = open_splits(path), open_splits(path, test_fraction=0.3)
    assert len(large["test"]) == pytest.approx(600, rel=0.1)
    assert set(small["test"].keys()) < set(large["test"].keys())
    assert set(small["val"].keys()) == set(large["val"].keys())
    assert sum(map(len, large.values())) == 2000


def test_a_run_that_is_older_than_the_flag_keeps_its_splits(run, root):
    """Else eval.py would test what the run has trained on."""
    file = run / "args.json"
    text = file.read_text()
    flags = json.loads(text)
    assert flags.pop("test_fraction") == 0.05
    file.write_text(json.dumps(flags))
    args = temo.parse_args(["--resume", str(run)])
    train, _ = open_data(args)
    names = sorted(path.name for path in root.glob("*.png"))[:40]
    assert args.test_fraction == 0 and len(train) > 28
    assert set(train.keys()) == {name for name in names if hash_fraction(name) >= 0.1}
    model = eval_py.EvaluatedModel(eval_py.parse_args(["--checkpoint", str(run), "--cpu"]), "cpu")
    splits = eval_py.EvaluatedSplits(model, str(root / "train.csv"), "")
    assert splits.options.test_fraction == 0
    file.write_text(text)


# ---------------------------------------- names, columns, classes --------------------------------
def test_held_out_names_of_a_meta_set_are_left_out_and_counted(root, tmp_path):
    sets = open_splits(root / "train.csv")
    train, splits = sets["train"], {split: sets[split] for split in ("val", "test")}
    names = [*train.keys()][:5] + [*splits["val"].keys()][:2] + [*splits["test"].keys()][:1]
    file = tmp_path / "clean.txt"
    file.write_text("\n".join(names))
    for others in (splits, {}):  # the training set need not be among those that are evaluated
        rows, description = named_rows(train, file, others)
        assert rows.tolist() == [0, 1, 2, 3, 4]
        assert description == "by name, 3 of val or test left out"
    file.write_text("\n".join([*names, "nobody"]))
    with pytest.raises(UserError, match="1 of its 9 names are not in train, first 'nobody'"):
        named_rows(train, file, splits)


@pytest.mark.parametrize("column", ["filepath", "file", "filename", "url"])
def test_csv_files_of_open_clip_need_no_flag(column, tmp_path):
    write_images(tmp_path, range(12))
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    lines = [f"{column}\ttitle", *(f"{name}\twords, of {name}" for name in names)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    train = load_data(str(tmp_path / "a.csv"), "train")
    assert len(train) == 8 and train.captions(0) == [f"words, of {[*train.keys()][0]}"]


def test_caption_noise_exchanges_captions_of_training_rows_alone(tmp_path):
    name = write_captions(tmp_path, 60)
    clean = {split: load_data(name, split) for split in ("train", "val", "test")}
    noisy = {split: load_data(name, split, caption_noise=0.5) for split in clean}
    for split in ("val", "test"):
        assert noisy[split].column("captions") == clean[split].column("captions")
    before, after = (splits["train"].column("captions") for splits in (clean, noisy))
    is_exchanged = [a != b for a, b in zip(after, before, strict=True)]
    assert noisy["train"].column("noisy").tolist() == is_exchanged
    assert sum(is_exchanged) == round(0.5 * len(before))
    assert sorted(after) == sorted(before)
    assert f"{sum(is_exchanged)} examples with another's captions" in noisy["train"].note
    unfolded = load_data(name, "train", caption_noise=0.5, unfold_captions=True)
    assert unfolded.captions(0) == [after[0][0]]


def test_caption_noise_needs_captions(tmp_path):
    for k in range(2):
        write_images(tmp_path / f"class {k}", range(30 * k, 30 * k + 30))
    with pytest.raises(UserError, match="has no captions to exchange"):
        load_data(str(tmp_path), "train", caption_noise=0.5)


def test_a_flat_folder_has_no_classes(tmp_path):
    names = write_images(tmp_path / "flat", range(12))
    path = write_rows(tmp_path / "flat.csv", ["image", "caption"], [(x, "words") for x in names])
    for data, message in (
        (tmp_path / "flat", "in no class folder.* a folder for each class, .*caption or label"),
        (path, "needs classes: a folder per class, or a column label"),
    ):
        with pytest.raises(UserError, match=message):
            run_script(temperature_schedules, tmp_path / "r", *TINY, "--dataset", data)


def test_a_column_label_is_enough_without_captions(tmp_path):
    write_images(tmp_path, range(12))
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    path = write_rows(
        tmp_path / "a.csv", ["image", "label"], [(x, "ab"[i % 2]) for i, x in enumerate(names)])
    train = load_data(str(path), "train", by_class=True)
    assert train.label_names == ["a", "b"]
    with pytest.raises(UserError, match="--caption-column: none of"):
        load_data(str(path), "train")


def test_flags_of_other_code_bases(capsys):
    for word, flag in (
        ("--learning-rate=1", "--lr"), ("--train-data", "--dataset"),
        ("--val_data", "--eval-datasets"), ("--temperature", "--tau"),
        ("--model", "--image-encoder"), ("--precision", "--mixed-precision"),
        ("--wandb", "--tracker"), ("--report-to", "--tracker"), ("--name", "--run-name"),
        ("--logs", "--output-dir"), ("--wd", "--weight-decay"), ("--max-grad-norm", "--grad-clip"),
        ("--tau-mim", "--tau-min"), ("--zzzzzzz", "nothing"),
    ):
        message = refused(temo.parse_args, [word], capsys)
        assert message.split("; ")[1].strip() == f"the nearest flag: {flag}"
