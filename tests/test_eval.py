"""eval.py on runs of all scripts: what training printed, every task, several sets, one and two
processes."""

import contextlib
import dataclasses
import functools
import io
import json
import shutil
import sys

import common
from contrastive import core, encoders, evaluation
from contrastive.core.files import slug
from contrastive.core.processes import UserError
from contrastive.data import evaluation_options
from contrastive.data.images import CIFAR_STATS, TEMO_17
from contrastive.evaluation import saved_pieces

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
    "neighbours": (temo, "--dataset moving-emoji --clips 60 8 60 --frames 2"),
    "videos": (
        temo,
        f"--dataset moving-emoji {CLIPS} --frame-sampling middle --eval-datasets VIDEOS",
    ),
    "tars": (temo, "--dataset TARS --batch-size 8"),
    "classes": (ts, "--batch-size 32 --image-size 32 --imbalance-ratio 50"),
    "long tail": (
        ts,
        "--dataset cifar10-lt --data-dir CIFAR10 --batch-size 32 --image-encoder small "
        "--image-size 32 --imbalance-ratio 9 --epochs 1 --head-norm none",
    ),
    "mmts": (mmts, f"{CLIPS} --num-clusters 4"),
    "mama": (mama, f"{CLIPS} --caption-noise 0.5 --baseline"),
    "ncl": (ncl, f"{CLIPS} --max-steps 6 --eval-datasets moving-emoji emoji"),
    "oracle": (ncl, f"{CLIPS} --normalize oracle"),
}
DRAWN = {"temo": "retrieval_emoji", "ncl": "retrieval_emoji"}
IMAGES = {"classes": 140, "long tail": 40, "tars": 5, "videos": 4}  # that are tested


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
        return train(root / name, words, script)

    return functools.cache(made)


@pytest.fixture
def run(runs):
    return runs("temo")[0]


def evaluate(*flags, pictures=False):
    """eval.py's result; its pictures take longer than these evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_answers", "draw_retrieval"):
            if not pictures:
                patch.setattr(eval_py, name, lambda *_, **__: None)
        return eval_py.main(eval_py.parse_args([*SMALL, *map(str, flags)]))


def embedded(run, data):
    """The embeddings of the images of data by a run's model, unit rows."""
    model, _, transform = common.load_model(run)
    encoded = evaluation.embed.encode_images(model, data, transform, torch.device("cpu"))
    return F.normalize(encoded.image, dim=1)


# ---------------------------------------- as in training -----------------------------------------
@pytest.mark.parametrize("name", RUNS)
def test_what_training_printed_is_printed_without_a_flag(name, runs, capsys):
    """Every line of its tables, to the digit, and not a word of a difference; the same split
    and classes."""
    folder, own, of_run = runs(name)
    tables = of_run[next(k for k, line in enumerate(of_run) if "in brackets: chance" in line) : -3]
    result = evaluate("--checkpoint", folder, pictures=name in DRAWN)["datasets"]
    said = capsys.readouterr().out
    chance = json.loads((folder / "summary.json").read_text())["chance"]
    assert not [line for line in tables if line not in said.splitlines()]
    assert result.keys() == own.keys()
    for dataset in own:
        for found, trained in (("metrics", own), ("chance", chance)):
            found, numbers = map(core.files.flatten, (result[dataset][found], trained[dataset]))
            assert {k: found.get(k) for k in numbers} == numbers
    assert IMAGES.get(name) in (None, own[dataset].get("images"))
    if name == "ncl":
        modes = [own[dataset]["normalized_by"] for dataset in ("moving-emoji", "emoji")]
        assert modes == ["queue", "none"]
    assert all((folder / "eval" / f"{of}.png").exists() for of in DRAWN.get(name, "").split())
    # the run has a queue beside, which does not make the reported numbers fair
    assert ("by all test queries, so no fair result" in said) == (name == "oracle")


def test_repeated_texts_are_right_but_in_published_sets(sets, tmp_path, capsys):
    names = helpers.write_images(tmp_path, range(40))
    rows = [
        (x, f"a {('pear', 'plum')[i % 2]}", "test" if i < 20 else "train")
        for i, x in enumerate(names)
    ]
    csv = helpers.write_rows(tmp_path / "twice.csv", ["image", "words", "split"], rows)
    flags = "--caption-column words --batch-size 8".split()
    folder, own, of_run = train(tmp_path / "r", ["--dataset", csv, *flags])
    found = evaluate("--checkpoint", folder)["datasets"]
    for said in (capsys.readouterr().out, "\n".join(of_run)):
        assert "20 captions, 20 repeated captions positive; in brackets: chance" in said
    assert found[str(csv)]["metrics"] == own[str(csv)]
    assert found[str(csv)]["chance"]["image_to_text"]["R@1"] == pytest.approx(50)
    # by the papers' protocols
    assert common.load_data("coco", "test", data_dir=str(sets / "coco")).same_text == "wrong"
    assert common.load_data("emoji", "test").same_text == "positive"


def test_rows_that_were_trained_on_are_left_out_of_a_test_file(tmp_path, capsys):
    """Those of the training set and of --extra-pairs; they are counted."""
    names = helpers.write_images(tmp_path, range(60))
    rows = [(name, f"picture {i}") for i, name in enumerate(names)]
    csv = [tmp_path / f"{name}.csv" for name in ("train", "more", "test")]
    for path, part in zip(csv, (rows[:30], rows[30:40], rows[20:])):
        helpers.write_rows(path, ["image", "caption"], part)
    flags = f"--dataset {csv[0]} --extra-pairs {csv[1]} --batch-size 8 --weighting none"
    folder, _, _ = train(tmp_path / "r", flags.split(), mama)
    trained = set(common.load_data(str(csv[0]), "train").keys())
    trained |= set(common.load_data(str(csv[1]), "train").keys())
    expected = [name for name, _ in rows[20:] if name not in trained]
    assert any(name in expected for name, _ in rows[20:30])  # held out of train by the run
    found = evaluate("--checkpoint", folder, "--datasets", csv[2])["datasets"][str(csv[2])]
    assert 20 <= found["metrics"]["images"] == len(expected) < 40
    said = capsys.readouterr().out
    assert "rows left out, whose files were trained on" in said and "has changed" not in said


def test_neighbours_by_the_embeddings(runs):
    """A run and eval.py, against one neighbour by hand."""
    folder, own, _ = runs("neighbours")
    options = dict(clips=[60, 8, 60], frames=2, image_size=16)
    known, asked = (
        common.load_data("moving-emoji", split, **options) for split in ("train", "test"))
    near = (embedded(folder, asked) @ embedded(folder, known).T).argmax(1)
    hits = known.labels[near.numpy()] == asked.labels
    right = 100 * np.mean([hits[asked.labels == c].mean() for c in np.unique(asked.labels)])
    assert own["moving-emoji"]["knn@1"]["mean_per_class"] == pytest.approx(right) and right > 0


def test_val_of_a_set_without_one_is_what_the_run_held_out(sets, tmp_path):
    words = "--dataset cifar10 --image-encoder small --train-features clean --batch-size 8"
    flags = [*words.split(), "--data-dir", sets / "cifar10"]
    asked = ["--split", "val", "--tasks", "zero-shot", "knn", "--checkpoint"]
    with pytest.raises(UserError, match="cifar10 has no val split"):
        evaluate(*asked, train(tmp_path / "all", flags, ts)[0])
    held = evaluate(*asked, train(tmp_path / "held", [*flags, "--holdout-fraction", 0.05], ts)[0])
    assert held["datasets"]["cifar10"]["metrics"]["images"] == 10


def test_results_of_other_commands_stay_in_eval_json(run, tmp_path, monkeypatch):
    for command in ("a", "b", "a"):
        monkeypatch.setattr(sys, "argv", [command])
        evaluate("--checkpoint", run, "--tasks", "gap", "--output-dir", tmp_path)
    newest = json.loads((tmp_path / "eval.json").read_text())
    (earlier,) = newest["earlier"]
    assert newest["command"].endswith(" a") and earlier["command"].endswith(" b")
    assert earlier["datasets"] == newest["datasets"] and newest["steps"] > 0


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


def test_saved_embeddings_are_all_of_them_in_the_order_of_the_data(
        run, tmp_path, monkeypatch, capsys):
    """Also above the number of rows that pictures read; each with its key and captions."""
    monkeypatch.setattr(saved_pieces, "MAX_ROWS", 7)
    evaluate("--checkpoint", run, "--save-embeddings", tmp_path / "embeddings",
             "--output-dir", tmp_path, "--tasks", "retrieval")
    path = tmp_path / "embeddings" / "emoji.safetensors"
    assert f"embeddings: {path}" in capsys.readouterr().out
    pieces = saved_pieces.read_pieces(path)["emoji"]
    data = common.load_data("emoji", "test")
    assert pieces.keys == list(data.keys()) and pieces.num_pictures == 0
    assert torch.allclose(F.normalize(pieces.image), embedded(run, data), atol=1e-6)
    assert pieces.texts == [text for row in range(len(data)) for text in data.captions(row)]
    for caption, image in enumerate(pieces.owner.tolist()):
        assert pieces.texts[caption] in data.captions(image)
    own = (F.normalize(pieces.text) * F.normalize(pieces.image)[pieces.owner]).sum(1)
    assert torch.allclose(pieces.cosines_of_pairs(), own)


def test_files_of_a_set_above_this_folder_are_not_hidden():
    assert [slug(name) for name in ("../x.csv", "./a b/", "...")] == ["x.csv", "a-b", ""]


def test_folders_of_the_command_line_are_those_of_all_sets():
    words = eval_py.expand_names(["msrvtt", "didemo=D", "mine.csv", "temo-17"], "A", "mine.csv")
    assert words == ["msrvtt=A", "didemo=D", "mine.csv", *TEMO_17]
    flags = temo.parse_args(["--video-dir", "OF-RUN"])
    for folder, video_dir, expected in (
            ("", "", ("", "OF-RUN")), ("A", "", ("A", "A")), ("A", "V", ("A", "V"))):
        options = evaluation_options(flags, "msrvtt", folder, video_dir)
        assert (options.data_dir, options.video_dir) == expected


# ---------------------------------------- sets and views -----------------------------------------
def test_all_tasks_on_several_sets(run, sets, tmp_path, monkeypatch):
    flags = ["--checkpoint", run, "--output-dir", tmp_path]
    flags += "--tasks retrieval zero-shot knn probe gap --datasets".split()
    flags += [f"dtd={sets / 'dtd'}", f"coco={sets / 'coco'}"]
    dtd, coco = evaluate(*flags)["datasets"].values()
    assert dtd["left_out"] == {}  # the names of its classes serve as captions
    assert coco["left_out"] == dict.fromkeys(
        ("zero-shot", "knn", "probe"), "the set has no classes"
    )
    learnt = {"knn@1", "knn@10", "few-shot", "all"}
    assert dtd["metrics"].keys() >= {"text_to_image", "zero-shot", "images", "unreadable", *learnt}
    assert coco["metrics"]["captions"] == 24
    assert dtd["chance"].keys() >= {"text_to_image", "zero-shot", *learnt}
    # all are opened before the first is encoded
    monkeypatch.setattr(evaluation.measure, "encode_images", None)
    with pytest.raises(UserError, match="no such file or folder"):
        evaluate(*flags, "/no/such/set")


def test_temo_17_is_one_word_for_seventeen_sets():
    words = eval_py.expand_names(["temo-17=DIR", "coco"])
    assert words == [*(f"{name}=DIR/{name}" for name in TEMO_17), "coco"]
    assert eval_py.expand_names(["temo-17"]) == list(TEMO_17)


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
    evaluate(*flags)
    half, imagenet = encoders.base.STATS["half"], encoders.base.STATS["imagenet"]
    crops = {"dtd": imagenet, "cifar100": CIFAR_STATS["cifar100"]}
    assert seen == {
        *((name, split, "crop", *crops[name]) for name in crops for split in ("train", "test")),
        *((name, "test", "squash", *half) for name in ("dtd", "cifar100", "coco", "emoji")),
        ("emoji", "train", "squash", *half),
    }


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


def test_an_image_of_two_classes_is_refused(tmp_path):
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=helpers.CLASSES))
    images = [{"bytes": helpers.encode(helpers.picture(i)), "path": None} for i in (0, 0, 1)]
    path = tmp_path / "table.parquet"
    datasets.Dataset.from_dict({"image": images, "label": [0, 1, 2]}, features=features).to_parquet(
        str(path))
    with pytest.raises(UserError, match="row 1 has the labels 'apple', 'pear_tree'"):
        helpers.all_rows(path)


def test_training_images_of_other_classes_are_none(run, sets, tmp_path):
    why = dict.fromkeys(("knn", "probe"), "there are no other training images of the same classes")
    shutil.copytree(sets / "classes" / "test", tmp_path / "alone" / "test")
    name = str(tmp_path / "alone")
    words = ["--datasets", name, "--tasks", "zero-shot", *why, "--output-dir", tmp_path]
    found = evaluate("--checkpoint", run, *words)["datasets"][name]
    assert found["left_out"] == why and "zero-shot" in found["metrics"]
    train, test = (common.load_data("emoji", split) for split in ("train", "test"))
    table = test.table.cast_column(
        "label", datasets.ClassLabel(names=[f"{n} " for n in test.label_names])
    )
    renamed = dataclasses.replace(test, table=table)
    towers = (None, None, None)
    for data, lacking in ((test, {}), (renamed, {"knn": why["knn"]})):
        assert evaluation.measure.unsupported_tasks(["knn"], data, towers, train) == lacking


# ---------------------------------------- models by name -----------------------------------------
def test_a_clip_by_name_sees_an_image_as_its_own_processor_does(tmp_path, tokenizer):
    own = CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size=32, image_mean=[0.5, 0.4, 0.3], image_std=[0.2] * 3
    )
    helpers.tiny_model("clip", tmp_path, tokenizer)
    own.save_pretrained(tmp_path)
    _, _, transform = eval_py.open_clip_by_name(str(tmp_path))
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
def test_a_clip_by_name_is_evaluated_with_the_flags_defaults(tmp_path, tokenizer):
    helpers.tiny_model("clip", tmp_path, tokenizer)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(tmp_path)
    flags = ["--checkpoint", tmp_path, "--output-dir", tmp_path / "out"]
    found = evaluate(*flags, "--datasets", "emoji")["datasets"]["emoji"]
    assert found["metrics"]["images"] == len(common.load_data("emoji", "test"))
    with pytest.raises(UserError, match="--datasets is needed"):
        evaluate(*flags)


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
    flags += ["--normalize", "oracle", "--tau", 0.1]
    metrics = evaluate(*flags)["datasets"]["moving-emoji"]["metrics"]
    assert metrics["normalized_by"] == "oracle" and "by_cluster_size" not in metrics


# ---------------------------------------- bad input ----------------------------------------------
@pytest.mark.parametrize(
    "flags,message",
    [
        ("", "required: --checkpoint"),
        ("--checkpoint x --tasks qa gap", "--tasks qa: its model answers questions; give it alone"),
        ("--checkpoint x --tau 0.1", "--tau: only with --normalize queue, oracle or dsl"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert message in helpers.refused(eval_py.parse_args, flags.split(), capsys)


@pytest.mark.parametrize(
    "name, flags, message",
    [
        (
            "temo",
            "--tasks qa",
            "^emoji: nothing can be measured on its test split: qa: the model answers no",
        ),
        ("temo", "--normalize oracle", "--normalize oracle: give --tau"),
        ("temo", "--normalize queue --tau 1", "only on the data set of a run of ncl.py"),
        ("temo", "--rerank 5", "has no matching head"),
        ("half", "", "half: the run has not ended; x goes on with it by --resume .*half"),
        ("none", "", "--datasets is needed: .*none is no folder of a run"),
        (
            "none",
            "--datasets emoji",
            "^--checkpoint .*none .no args.json of a run there, so a CLIP by name.: ",
        ),
    ],
)
def test_what_a_run_cannot_give(name, flags, message, runs, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "args.json").write_text('{"dataset": "emoji", "script": "x"}')
    folder = runs(name)[0] if name in RUNS else tmp_path / name
    with pytest.raises(UserError, match=message):
        evaluate("--checkpoint", folder, *flags.split(), "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out" / "eval.json").exists()
