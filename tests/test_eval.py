"""eval.py on runs of all scripts: what training printed, every task, several sets, one and two
processes."""

import contextlib
import dataclasses
import functools
import io
import json
import shutil
import types

import common
from contrastive import core, encoders, evaluation
from contrastive.data.images import CIFAR_STATS, TEMO_17
from contrastive.core.processes import UserError

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import CLIPImageProcessor

import eval as eval_py
import helpers
import launch
import mama
import mmts
import ncl
import temo
import temperature_schedules as ts

SMALL = ["--cpu", "--workers", "0"]
BASE = [*SMALL, "--max-steps", "1", "--batch-size", "16", "--image-size", "16", "--eval-every", "0"]
LARGER = "--max-steps 3 --batch-size 64 --image-size 24"
CLIPS = "--clips 60 8 16 --frames 2"
RUNS = {  # name: (script, its flags; words in capitals are folders)
    "temo": (temo, f"{LARGER} --eval-every 2"),
    "squashed": (temo, "--eval-resize squash --text-length 4 --eval-datasets CLASSES emoji"),
    "law": (temo, "--dataset moving-emoji --clip-law zipf --clips 40 8 60"),
    "backbone": (temo, f"{LARGER} --knn-features backbone"),
    "videos": (
        temo,
        f"--dataset moving-emoji {CLIPS} --frame-sampling middle --eval-datasets VIDEOS",
    ),
    "stream": (temo, "--dataset TARS --streaming --batch-size 8"),
    "classes": (ts, "--batch-size 32 --image-size 32 --imbalance-ratio 50"),
    "long tail": (
        ts,
        "--dataset cifar10-lt --data-dir CIFAR10 --batch-size 32 --image-encoder small "
        "--image-size 32 --imbalance-ratio 9 --epochs 1 --head-norm none",
    ),
    "mmts": (mmts, f"{CLIPS} --num-clusters 4"),
    "mama": (mama, f"{CLIPS} --caption-noise 0.5 --loss infonce"),
    "ncl": (ncl, f"{CLIPS} --max-steps 6 --eval-datasets moving-emoji emoji"),
    "oracle": (ncl, f"{CLIPS} --normalize oracle"),
}
DRAWN = {
    "temo": "retrieval_emoji similarities_emoji",
    "oracle": "retrieval_moving-emoji normalization_moving-emoji",
}
SAID = {"law": "law of val and test: zipf"}
IMAGES = {"classes": 140, "long tail": 40, "stream": 10, "videos": 4}  # that are tested


@contextlib.contextmanager
def measured_as(name):
    """Within it a run of RUNS is trained and evaluated. Of emoji, kNN takes seconds: one run
    measures it, which is left out else. Probes of pixels do, too: one run draws their images."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "backbone":
            patch.setattr(evaluation.measure, "WITHOUT_KNN", ())
        if name == "classes":
            patch.setattr(evaluation.trivial, "MAX_TRAIN", 300)
        yield


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Local copies of coco and dtd as tars, of cifar10 and cifar100 as parquet; a folder of
    classes, one of videos, and tars of pairs."""
    root = tmp_path_factory.mktemp("sets")
    for name, parts in (("coco", ("jpg", "txt")), ("dtd", ("png", "cls"))):
        for split, numbers in (("train", range(12, 30)), ("test", range(12))):
            helpers.write_tar(root / name / split / "0.tar", helpers.tar_samples(numbers, *parts))
            (root / name / split / "nshards.txt").write_text("1")
        (root / name / "dataset_type.txt").write_text("retrieval")
    (root / "dtd" / "classnames.txt").write_text("apple\npear_tree\nzebra\n\n")
    for name, folder, label in (
        ("cifar10", "plain_text", "label"),
        ("cifar100", "cifar100", "fine_label"),
    ):
        of_classes = datasets.ClassLabel(names=[f"class {c}" for c in range(10)])
        features = datasets.Features({"img": datasets.Image(), label: of_classes})
        (root / name / folder).mkdir(parents=True)
        for split, n in (("train", 200), ("test", 40)):
            images = [
                {"bytes": helpers.encode(helpers.picture(i % 120, 32, 32)), "path": None}
                for i in range(n)
            ]
            table = datasets.Dataset.from_dict(
                {"img": images, label: [i % 10 for i in range(n)]}, features=features
            )
            table.to_parquet(str(root / name / folder / f"{split}-00000-of-00001.parquet"))
    for i in range(12):
        helpers.write_images(root / "classes" / ("train", "test")[i % 2] / "abc"[i % 3], [i])
    rows = [(f"{i}.mp4", f"picture {i}", "val" if i < 2 else "test") for i in range(6)]
    helpers.write_rows(root / "videos" / "metadata.csv", ["file_name", "caption", "split"], rows)
    for i in range(6):
        helpers.write_video(root / "videos" / f"{i}.mp4", range(8 * i, 8 * i + 8))
    for k in range(3):
        pairs = helpers.tar_samples(range(k * 10, k * 10 + 10), "jpg", "txt", "cls")
        helpers.write_tar(root / "tars" / f"{k:05}.tar", pairs)
    return root


def train(folder, words, script=temo):
    """(folder, numbers of each test set, lines printed) of a run."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        summary = helpers.run_script(script, folder, *words, base=BASE)
    return folder, summary["test"], said.getvalue().splitlines()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sets):
    """Function of a name in RUNS -> `train` of it, once."""
    root = tmp_path_factory.mktemp("eval")

    def made(name):
        script, flags = RUNS[name]
        words = [
            sets / word.lower() if word.isalnum() and word.isupper() else word
            for word in flags.split()
        ]
        with measured_as(name):
            return train(root / name, words, script)

    return functools.cache(made)


@pytest.fixture
def run(runs):
    return runs("temo")[0]


def evaluate(*flags, pictures=False):
    """eval.py's result; its pictures take longer than these evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_answers", "draw_retrieval", "draw_histograms", "draw_normalization"):
            if not pictures:
                patch.setattr(eval_py, name, lambda *_, **__: None)
        return eval_py.main(eval_py.parse_args([*SMALL, *map(str, flags)]))


def embedded(run, data, which):
    """Of `encode_images` of a run's model: 1 embeddings, 2 features; unit rows."""
    model, _, transform = common.load_model(run)
    return F.normalize(
        evaluation.embed.encode_images(model, data, transform, torch.device("cpu"))[which], dim=1
    )


# ---------------------------------------- as in training -----------------------------------------
@pytest.mark.parametrize("name", RUNS)
def test_what_training_printed_is_printed_without_a_flag(name, runs, capsys):
    """Every line of its tables, to the digit, and not a word of a difference; the same split,
    fold and classes."""
    folder, own, of_run = runs(name)
    tables = of_run[next(k for k, line in enumerate(of_run) if "in brackets: chance" in line) : -3]
    with measured_as(name):
        result = evaluate("--checkpoint", folder, pictures=name in DRAWN)["datasets"]
    said = capsys.readouterr().out
    chance = json.loads((folder / "summary.json").read_text())["chance"]
    assert not [line for line in tables if line not in said.splitlines()]
    assert " in training" not in said and result.keys() == own.keys()
    for dataset in own:
        for found, trained in (("metrics", own), ("chance", chance)):
            found, numbers = map(core.files.flatten, (result[dataset][found], trained[dataset]))
            assert {k: found.get(k) for k in numbers} == numbers
    assert SAID.get(name, "") in "\n".join(of_run)
    assert IMAGES.get(name) in (None, own[dataset].get("images"))
    if name == "ncl":
        modes = [own[dataset]["normalized_by"] for dataset in ("moving-emoji", "emoji")]
        assert modes == ["queue", "none"]
    assert all((folder / "eval" / f"{of}.png").exists() for of in DRAWN.get(name, "").split())
    # the run has a queue beside, which does not make the reported numbers fair
    assert ("by all test queries, so no fair result" in said) == (name == "oracle")


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_says_of_itself_is_what_its_flags_say(name, runs):
    """A run from before model.json had the entry is evaluated by its flags, with the same facts."""
    folder, _, _ = runs(name)
    flags = json.loads((folder / "args.json").read_text())
    assert "evaluation" in json.loads((folder / "model.json").read_text())
    assert evaluation.facts.read_facts(folder) == evaluation.facts.facts_of_flags(flags)


def test_what_differs_from_training_is_said(run, tmp_path, capsys):
    """A line for each value; how many texts lose their end stands beside the numbers."""
    flags = "--text-length 4 --knn-features backbone".split()
    found = evaluate("--checkpoint", run, *flags, "--output-dir", tmp_path)
    said = capsys.readouterr().out
    assert "--text-length 4: 24 in training" in said
    assert "--knn-features backbone: projected in training" in said
    words = common.load_data("emoji", "test").first_captions()
    tokenizer = common.load_model(run)[1].tokenizer
    cut = sum(len(of) > 4 for of in tokenizer([*words])["input_ids"])
    assert found["datasets"]["emoji"]["metrics"]["captions_cut"] == cut > 0
    assert f", {cut} captions cut" in said


def test_repeated_texts_are_right_unless_a_paper_or_the_run_says_otherwise(sets, tmp_path, capsys):
    """And own data by another path are those of the run: its columns, its rules."""
    names = helpers.write_images(tmp_path, range(40))
    rows = [
        (x, f"a {('pear', 'plum')[i % 2]}", "test" if i < 20 else "train")
        for i, x in enumerate(names)
    ]
    csv = helpers.write_rows(tmp_path / "twice.csv", ["image", "words", "split"], rows)
    flags = "--caption-column words --batch-size 8 --same-text wrong".split()
    folder, own, of_run = train(tmp_path / "r", ["--dataset", csv, *flags])
    other_path = tmp_path / "r" / ".." / "twice.csv"
    found = evaluate("--checkpoint", folder, "--datasets", other_path)["datasets"]
    for said in (capsys.readouterr().out, "\n".join(of_run)):
        assert "20 captions, 20 repeated captions wrong; in brackets: chance" in said
        assert " in training" not in said
    assert found[str(csv)]["metrics"] == own[str(csv)]
    assert found[str(csv)]["chance"]["image_to_text"]["R@1"] == pytest.approx(5)
    found = evaluate("--checkpoint", folder, "--same-text", "positive")["datasets"][str(csv)]
    assert "--same-text positive: wrong in training" in capsys.readouterr().out
    assert found["chance"]["image_to_text"]["R@1"] == pytest.approx(50)
    # by the papers
    assert common.load_data("coco", "test", data_dir=str(sets / "coco")).same_text == "wrong"
    assert common.load_data("emoji", "test").same_text == "positive"


def test_neighbours_by_the_embeddings_or_the_features(runs):
    """A run and eval.py, against one neighbour by hand; eval.py can be told otherwise."""
    folder, own, _ = runs("backbone")
    known, asked = (common.load_data("emoji", split) for split in ("train", "test"))
    right = []
    for which in (1, 2):
        near = (embedded(folder, asked, which) @ embedded(folder, known, which).T).argmax(1)
        hits = known.labels[near.numpy()] == asked.labels
        right.append(
            100 * np.mean([hits[asked.labels == c].mean() for c in np.unique(asked.labels)])
        )
    found = evaluate("--checkpoint", folder, "--tasks", "knn", "--knn-features", "projected")[
        "datasets"
    ]["emoji"]
    assert right[0] != right[1] == pytest.approx(own["emoji"]["knn@1"]["mean_per_class"])
    assert found["metrics"]["knn@1"]["mean_per_class"] == pytest.approx(right[0])


def test_train_is_evaluated_without_the_run_s_noise(runs, monkeypatch):
    seen, measure = [], eval_py.measure

    def spy(towers, data, *more, **options):
        seen.append(data)
        return measure(towers, data, *more, **options)

    monkeypatch.setattr(eval_py, "measure", spy)
    evaluate("--checkpoint", runs("mama")[0], "--split", "train", "--tasks", "gap")
    plain = common.load_data("moving-emoji", "train", clips=[60, 8, 16], frames=2)
    assert seen[0].column("captions") == plain.column("captions")


def test_val_of_a_set_without_one_is_what_the_run_held_out(sets, tmp_path):
    words = "--dataset cifar10 --image-encoder small --train-features clean --batch-size 8"
    flags = [*words.split(), "--data-dir", sets / "cifar10"]
    asked = ["--split", "val", "--tasks", "zero-shot", "knn", "--checkpoint"]
    with pytest.raises(UserError, match="cifar10 has no val split"):
        evaluate(*asked, train(tmp_path / "all", flags, ts)[0])
    held = evaluate(*asked, train(tmp_path / "held", [*flags, "--hold-out-val"], ts)[0])
    assert held["datasets"]["cifar10"]["metrics"]["images"] == 10


def test_two_processes_count_each_item_once(run, tmp_path):
    tasks = "--tasks retrieval zero-shot knn gap".split()
    flags = ["--checkpoint", run, *tasks, "--output-dir"]
    evaluate(*flags, tmp_path / "1")
    ended = launch.ranks(tmp_path, lambda _: evaluate(*flags, tmp_path / "2"))
    assert [code for code, _ in ended] == [0, 0], ended
    a, b = (json.loads((tmp_path / n / "eval.json").read_text())["datasets"]["emoji"] for n in "12")
    for kind in ("metrics", "chance"):
        ours, theirs = core.files.flatten(a[kind]), core.files.flatten(b[kind])
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-3)


# ---------------------------------------- sets and views -----------------------------------------
def test_all_tasks_on_several_sets(run, sets, tmp_path, capsys, monkeypatch):
    flags = ["--checkpoint", run, "--output-dir", tmp_path]
    flags += "--max-captions 1 --tasks retrieval zero-shot knn probe gap --datasets".split()
    flags += [f"dtd={sets / 'dtd'}", f"coco={sets / 'coco'}"]
    dtd, coco = evaluate(*flags)["datasets"].values()
    assert dtd["left_out"] == dict.fromkeys(("retrieval", "gap"), "the set has no captions")
    assert coco["left_out"] == dict.fromkeys(
        ("zero-shot", "knn", "probe"), "the set has no classes"
    )
    learnt, beside = {"knn@1", "knn@10", "few-shot", "all"}, dtd["chance"].pop("trivial")
    assert dtd["metrics"].keys() == {"zero-shot", "images", "unreadable", *learnt}
    assert coco["metrics"]["captions"] == 12
    assert dtd["chance"].keys() == {"zero-shot", *learnt}
    assert list(beside) == ["pixels", "colours", "untrained"]
    assert all(of.keys() == learnt for of in beside.values())
    table = capsys.readouterr().out
    assert "coco: --max-captions 1: all without it" in table
    said = ", ".join(
        f"{name} {of['few-shot']['mean_per_class']:.2f}" for name, of in beside.items()
    )
    assert f"mean_per_class of {said}" in table
    # all are opened before the first is encoded
    monkeypatch.setattr(evaluation.measure, "encode_images", None)
    with pytest.raises(UserError, match="no such file or folder"):
        evaluate(*flags, "/no/such/set")


def test_the_sets_that_are_meant():
    """temo-17 is one word for seventeen sets; without any, they are the run's own."""

    def wanted(*flags, dataset=None, eval_datasets=()):
        args = eval_py.parse_args(["--checkpoint", "r", *flags])
        return eval_py.sets_to_evaluate(args, dataset, eval_datasets)

    sets = wanted("--datasets", "temo-17=DIR", "coco", "dtd=a")  # one of them lies elsewhere
    last = TEMO_17[-1]
    assert list(sets) == [*TEMO_17, "coco"]
    assert (sets[last], sets["dtd"], sets["coco"]) == (f"DIR/{last}", "a", "")
    args = eval_py.parse_args("--checkpoint r --datasets coco temo-17".split())
    assert eval_py.tasks_of_set(args, last) == ["zero-shot"]
    assert eval_py.tasks_of_set(args, "coco") == []  # as in training
    assert wanted(eval_datasets=["emoji", "coco"], dataset="cc3m") == {"emoji": "", "coco": ""}
    assert wanted(dataset="coco") == {"coco": ""}
    assert wanted("--datasets", "coco=a", "coco=a") == {"coco": "a"}
    assert wanted("--datasets", "dtd=a", "temo-17")["dtd"] == "a"
    with pytest.raises(UserError, match="--datasets coco: named with two folders"):
        wanted("--datasets", "coco", "coco=a")
    with pytest.raises(UserError, match="--datasets is needed"):
        wanted()


def test_the_views_of_the_cc3m_trainer(runs, sets, tmp_path, monkeypatch):
    """Retrieval squashes; the classes of other sets are seen by a centre crop with their own
    statistics."""
    folder, seen, encode_images = runs("squashed")[0], set(), evaluation.embed.encode_images

    def spy(model, data, transform, *device, **how):
        seen.add((data.name, data.split, transform.resize, transform.mean, transform.std))
        return encode_images(model, data, transform, *device, **how)

    for module in (evaluation.measure, evaluation.by_class):
        monkeypatch.setattr(module, "encode_images", spy)
    names = [f"{name}={sets / name}" for name in ("dtd", "cifar100", "coco")] + ["emoji"]
    flags = ["--checkpoint", folder, "--output-dir", tmp_path]
    flags += ["--tasks", "retrieval", "zero-shot", "knn", "--datasets", *names]
    result = evaluate(*flags)["datasets"]
    half, imagenet = encoders.base.STATS["half"], encoders.base.STATS["imagenet"]
    crops = {"dtd": imagenet, "cifar100": CIFAR_STATS["cifar100"]}
    assert seen == {
        *((name, split, "crop", *crops[name]) for name in crops for split in ("train", "test")),
        *((name, "test", "squash", *half) for name in ("dtd", "cifar100", "coco", "emoji")),
        ("emoji", "train", "squash", *half),
    }
    words = "images of the tasks by class are cropped, statistics imagenet"
    assert result["dtd"]["views"] == words
    assert not result["emoji"]["views"]
    assert not result["coco"]["views"]  # no task by class


def test_images_without_a_class_count_nowhere_among_classes(run, tmp_path):
    rows = [(f"{i:03}.png", f"picture {i}", "" if i % 4 == 3 else "abc"[i % 3]) for i in range(12)]
    for split in ("train", "test"):
        helpers.write_images(tmp_path / "data" / split, range(12))
        helpers.write_rows(
            tmp_path / "data" / split / "metadata.csv", ["file_name", "caption", "label"], rows
        )
    tasks = ["--tasks", "retrieval", "zero-shot", "knn", "probe"]
    result = evaluate(
        "--checkpoint", run, "--datasets", tmp_path / "data", *tasks, "--output-dir", tmp_path
    )
    metrics = result["datasets"][str(tmp_path / "data")]["metrics"]
    assert metrics["images"] == 12 and metrics["without_class"] == 3
    # test images are training images, of which one may be held out for val
    assert metrics["knn@1"]["top1"] >= 800 / 9
    hits = metrics["zero-shot"]["names_top1"] * 9 / 100
    assert hits == pytest.approx(round(hits))  # of nine images


def test_class_names_are_captions_of_all_images_of_their_class(runs, sets):
    folder, own, _ = runs("squashed")
    name = str(sets / "classes")
    chance = json.loads((folder / "summary.json").read_text())["chance"]
    assert own[name]["captions"] == 6
    assert chance[name]["text_to_image"]["R@1"] == pytest.approx(100 / 3)  # 2 of 6


def test_images_of_several_classes_are_of_no_class_together(tmp_path):
    """Pictures 0 and 1 of a table occur twice, with two classes each, which are their captions."""
    labels = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (3, 0), (4, 1), (5, 2)]
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=helpers.CLASSES))
    images = [{"bytes": helpers.encode(helpers.picture(i)), "path": None} for i, _ in labels]
    table = {"image": images, "label": [label for _, label in labels]}
    path = tmp_path / "table.parquet"
    datasets.Dataset.from_dict(table, features=features).to_parquet(str(path))
    data = helpers.all_rows(path)
    assert data.labels.tolist() == [-1, -1, 2, 0, 1, 2] and not data.has_captions
    texts, owner = evaluation.retrieval.captions_of(data, np.arange(6))
    groups = evaluation.retrieval.groups_of_images(data)
    positives = evaluation.retrieval.positives_table(groups[owner], groups)
    for text, image, right in zip(texts, owner, positives.tolist(), strict=True):
        assert image in right
        assert all(text in data.captions(other) for other in right if other >= 0)


def test_training_images_of_other_classes_are_none(run, sets, tmp_path):
    """Nor is the evaluated split itself: kNN with k = 1 would be 100 % whatever the model."""
    why = dict.fromkeys(("knn", "probe"), "there are no other training images of the same classes")
    shutil.copytree(sets / "classes" / "test", tmp_path / "alone" / "test")
    for words, name in (
        (["--split", "train"], "emoji"),
        (["--datasets", tmp_path / "alone"], str(tmp_path / "alone")),
    ):
        found = evaluate(
            "--checkpoint", run, *words, "--tasks", "zero-shot", *why, "--output-dir", tmp_path
        )
        found = found["datasets"][name]
        assert found["left_out"] == why and "zero-shot" in found["metrics"]
    train, test = (common.load_data("emoji", split) for split in ("train", "test"))
    table = test.table.cast_column(
        "label", datasets.ClassLabel(names=[f"{n} " for n in test.label_names])
    )
    renamed = dataclasses.replace(test, table=table)
    towers = (None, None, None)
    for data, lacking in ((test, {}), (renamed, {"knn": why["knn"]})):
        assert evaluation.measure.unsupported_tasks(["knn"], data, towers, train) == lacking


def test_class_three_of_another_set_is_another_class():
    """Where classes have no names."""
    train, test, other = (common.load_data("emoji", split) for split in ("train", "test", "test"))
    other = dataclasses.replace(other, name="other.csv")
    for data in (train, test, other):
        data.label_names = None
    towers, reasons = (None, None, None), []
    for data in (test, other):
        reasons.append(evaluation.measure.unsupported_tasks(["knn"], data, towers, train))
    assert reasons == [{}, {"knn": "there are no other training images of the same classes"}]


def test_frames_are_compared_with_those_of_the_run_s_evaluations(capsys):
    flags = {"frames": 8, "eval_frames": 16}
    for frames in ("8", "16"):
        model = types.SimpleNamespace(
            args=eval_py.parse_args(["--checkpoint", "x", "--frames", frames]))
        evaluation.evaluated_model.EvaluatedModel.compare_flags(model, flags)
    assert capsys.readouterr().out == "--frames 8: 16 in the evaluations of the run\n"


def test_trivial_neighbours_by_hand(runs):
    """One neighbour by cosine on pixels and on 64 colours, in numpy; the untrained tower is the
    run's before its first step."""
    run = runs("backbone")[0]
    data = {split: common.load_data("emoji", split, image_size=24) for split in ("train", "val")}
    (*_, transform), spec = common.load_model(run), json.loads((run / "model.json").read_text())
    first = encoders.models.untrained(spec, seed=42)
    options = evaluation.by_class.FeatureOptions(transform, torch.device("cpu"), 0, "backbone")
    found = evaluation.trivial.trivial_accuracy(
        data["train"], data["val"], None, options, tasks=["knn"], models={"untrained": first}
    )
    images = {
        k: np.stack([transform.raw(of.read(i)).numpy() for i in range(len(of))])
        for k, of in data.items()
    }

    def colours(image):  # (3, S, S) -> (64,)
        return np.bincount(np.tensordot([16, 4, 1], image // 64, 1).ravel(), minlength=64)

    for name, feature in (("pixels", np.ravel), ("colours", colours)):
        x, q = (
            np.stack([feature(i) for i in images[k]]).astype(np.float64) for k in ("train", "val")
        )
        x, q = (y / np.linalg.norm(y, axis=1, keepdims=True) for y in (x, q))
        hits = data["train"].labels[(q @ x.T).argmax(1)] == data["val"].labels
        # ties of two of 177
        assert found[name]["knn@1"]["top1"] == pytest.approx(100 * hits.mean(), abs=1.2)
    before = next(row for row in helpers.rows(run) if "eval" in row)
    assert before["step"] == 0 and found["untrained"]["knn@1"] == before["eval"]["emoji"]["knn@1"]


def test_trivial_baselines_of_some_images_have_no_classes_by_size(run, monkeypatch):
    """They would be other classes than the model's; the table has the number of images drawn."""
    monkeypatch.setattr(evaluation.trivial, "MAX_TRAIN", 100)
    train, val = (common.load_data("emoji", split) for split in ("train", "val"))
    sizes = np.bincount(train.labels[train.labels >= 0])
    options = evaluation.measure.ClassOptions(
        train=train, shot_limits=(np.median(sizes), np.median(sizes)), build_untrained=lambda: None)
    towers = evaluation.measure.Towers(*common.load_model(run))
    metrics, chance, _ = evaluation.measure.measure(
        towers, val, ["knn", "probe"], options, device=torch.device("cpu"))
    assert {"head", "tail"} <= metrics["knn@1"].keys() and "few-shot" in metrics
    for accuracies in chance["trivial"].values():
        assert accuracies["knn@1"].keys() == {"top1", "mean_per_class"}
        assert accuracies.keys() == {"knn@1", "knn@10", "all"}
    assert chance["trivial_images"] == {"train": 100, "test": len(val)}
    table = evaluation.report.table("emoji", metrics, chance)
    assert f" (100 training, {len(val)} test images)" in table


# ---------------------------------------- models by name -----------------------------------------
def test_a_clip_by_name_sees_an_image_as_its_own_processor_does(tmp_path, tokenizer):
    own = CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size=32, image_mean=[0.5, 0.4, 0.3], image_std=[0.2] * 3
    )
    helpers.tiny_model("clip", tmp_path, tokenizer)
    own.save_pretrained(tmp_path)
    args = eval_py.parse_args([*SMALL, "--checkpoint", str(tmp_path)])
    (_, _, transform), _ = evaluation.evaluated_model.open_model(args, torch.device("cpu"))
    for size in (
        (48, 73),
        (20, 20),
        (90, 40),
    ):  # of an odd margin torchvision cuts the other half pixel
        image = Image.fromarray(
            np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        )
        theirs = own(images=image, return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(transform(image), theirs, atol=1e-5), size


# ---------------------------------------- normalisation ------------------------------------------
def test_dual_softmax(run, tmp_path, capsys):
    """--normalize dsl: at CLIP-ViP's 0.01, not the checkpoint's, from all test queries, and it
    says so."""
    flags = ["--checkpoint", run, "--tasks", "retrieval", "--output-dir", tmp_path]
    was, got = (
        evaluate(*flags, *more)["datasets"]["emoji"]["metrics"]
        for more in ([], ["--normalize", "dsl"])
    )
    assert got["normalized_by"] == "dsl"
    assert got["text_to_image"] == got["normalize"]["dsl"]["text_to_image"]
    assert got["normalize"]["none"]["text_to_image"] == was["text_to_image"] != got["text_to_image"]
    words = "--normalize dsl: by all test queries, so no fair result; gamma 0.01"
    assert words in capsys.readouterr().out


def test_recalls_by_cluster_size_are_by_cosine(runs, tmp_path):
    """So they do not stand beside normalised ones."""
    flags = ["--checkpoint", runs("mmts")[0], "--tasks", "retrieval", "--output-dir", tmp_path]
    assert "by_cluster_size" in evaluate(*flags)["datasets"]["moving-emoji"]["metrics"]
    flags += ["--normalize", "oracle", "--gamma", 0.1]
    metrics = evaluate(*flags)["datasets"]["moving-emoji"]["metrics"]
    assert metrics["normalized_by"] == "oracle" and "by_cluster_size" not in metrics


def test_a_set_without_training_queries_is_refused_before_anything_is_encoded(
    run, tmp_path, monkeypatch
):
    names = helpers.write_images(tmp_path / "data" / "test", range(6))
    rows = [(name, f"picture {i}") for i, name in enumerate(names)]
    helpers.write_rows(tmp_path / "data" / "test" / "metadata.csv", ["file_name", "caption"], rows)
    monkeypatch.setattr(evaluation.measure, "encode_images", None)
    flags = ["--datasets", "emoji", tmp_path / "data", "--tasks", "retrieval"]
    with pytest.raises(UserError, match="has no train split"):
        evaluate("--checkpoint", run, *flags, "--normalize", "queue")


def test_queries_of_a_class_do_not_stand_together_in_the_queue(run, monkeypatch):
    """Fig. 5 takes the last 16, 32, ... of them."""
    seen, training_queries = [], eval_py.training_queries

    def spy(*data):
        seen.append(training_queries(*data))
        return seen[0]

    monkeypatch.setattr(eval_py, "training_queries", spy)
    evaluate("--checkpoint", run, "--tasks", "retrieval", "--normalize", "queue")
    (texts, videos), in_order = seen[0], embedded(run, common.load_data("emoji", "train"), 1)
    same = F.normalize(videos) @ in_order.T  # (M, M)
    assert len(videos) == len(in_order) and len(texts) > 16
    assert same.max(1).values.min() > 0.9999 and (same.diagonal() < 0.99).float().mean() > 0.5


# ---------------------------------------- bad input ----------------------------------------------
@pytest.mark.parametrize(
    "flags,message",
    [
        ("", "required: --checkpoint"),
        ("--checkpoint x --normalize queue --split train", "--normalize oracle"),
        ("--checkpoint x --tasks qa gap", "--tasks qa: its model answers questions; give it alone"),
        (
            "--checkpoint RUN --init-from w.pt",
            "--init-from: only with a CLIP by name: a run has its own weights",
        ),
    ],
)
def test_bad_flags(flags, message, run, capsys):
    assert message in helpers.refused(
        eval_py.parse_args, flags.replace("RUN", str(run)).split(), capsys
    )


@pytest.mark.parametrize(
    "name, flags, message",
    [
        (
            "temo",
            "--tasks qa",
            "^--tasks: nothing can be measured: emoji: qa: the model answers no questions$",
        ),
        ("temo", "--class-names clip", "--class-names: only with an ImageNet"),
        ("temo", "--text-length 25", "--text-length 25: .* learnt the positions of 24 tokens"),
        ("stream", "--split train", "--split train: .* is a stream"),
        ("half", "", "half.model.json: .*No such file"),  # of a run that has not ended
        (
            "none",
            "--datasets emoji",
            "^--checkpoint .*none .no args.json of a run there, so a CLIP by name.: ",
        ),
    ],
)
def test_what_a_run_cannot_give(name, flags, message, runs, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "args.json").write_text("{}")
    folder = runs(name)[0] if name in RUNS else tmp_path / name
    with pytest.raises(UserError, match=message):
        evaluate("--checkpoint", folder, *flags.split(), "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out" / "eval.json").exists()


def test_saved_embeddings_are_those_of_the_table(run, tmp_path):
    """Row by row those of the model, with the keys and captions that they belong to."""
    flags = ["--tasks", "retrieval", "--save-embeddings", tmp_path / "e", "--output-dir", tmp_path]
    evaluate("--checkpoint", run, *flags)
    tensors = helpers.load_file(tmp_path / "e" / "emoji.safetensors")
    rows = json.loads((tmp_path / "e" / "emoji.json").read_text())
    data = common.load_data("emoji", "test")
    assert rows["keys"] == [*data.keys()]
    assert len(rows["captions"]) == len(tensors["text"]) == len(tensors["owner"])
    for caption, owner in zip(rows["captions"], tensors["owner"].tolist()):
        assert caption in data.captions(owner)
    image = torch.nn.functional.normalize(tensors["image"])
    assert torch.allclose(image, embedded(run, data, 1), atol=1e-5)
