"""eval.py: the numbers of training, every task, several sets, one and two processes, views."""

import functools

import common
from contrastive import evaluation
from contrastive.core.files import flatten, read_json, write_json
from contrastive.core.processes import UserError
from contrastive.data.images import CIFAR_STATS, TEMO_17
from contrastive.encoders.base import STATS
from contrastive.evaluation import saved_pieces
from contrastive.evaluation.measure import unsupported_tasks

import numpy as np
import pytest
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import balanced_accuracy_score
from transformers import CLIPImageProcessor

import eval as eval_py
import launch
import temo
import temperature_schedules as ts
from helpers import (
    CPU, assert_close, evaluated, picture, refused, run_script, tar_samples, tiny_model,
    write_clips, write_files, write_hub_table, write_images, write_rows)

BASE = (
    "--cpu --workers 0 --max-steps 1 --batch-size 16 --image-size 16 --eval-every 0").split()
RUNS = {  # {name: (script, its flags)}; {NAME} is a folder of `sets`
    "temo": (temo, ""),
    "squashed": (temo, "--eval-resize squash --text-length 4 --eval-datasets {classes} emoji"),
    "videos": (
        temo,
        "--dataset moving-emoji --clips 60 8 60 --frames 2 --frame-sampling middle "
        "--eval-datasets {videos} moving-emoji"),
    "long tail": (
        ts,
        "--dataset cifar10-lt --data-dir {cifar10} --image-encoder small --imbalance-ratio 9 "
        "--epochs 1 --head-norm none"),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """{name: folder}: coco and dtd as tars, cifar10 and cifar100 as parquet; a folder of classes
    and one of videos."""
    root = tmp_path_factory.mktemp("sets")
    files = {"dtd/classnames.txt": "apple\npear_tree\nzebra\n\n"}
    for split, samples in (("train", range(12, 30)), ("test", range(12))):
        files[f"coco/{split}/0.tar"] = tar_samples(samples, "jpg", "txt")
        files[f"dtd/{split}/0.tar"] = tar_samples(samples, "png", "cls")
    write_files(root, files)
    names = [f"class {c}" for c in range(10)]
    for split, number in (("train", 200), ("test", 40)):
        file = f"{split}-00000-of-00001.parquet"
        pictures = [picture(i % 120, 32, 32) for i in range(number)]
        labels = np.arange(number) % 10
        write_hub_table(root / "cifar10" / file, labels, names, pictures, image="img")
        write_hub_table(
            root / "cifar100" / file, labels, names, pictures, image="img", label="fine_label")
    for c, label in enumerate("abc"):
        write_images(root / "classes" / "train" / label, [c, c + 3])
        write_images(root / "classes" / "test" / label, [c + 6, c + 9])
    rows = []
    for i, split in enumerate(["val", "val", "test", "test", "test", "test"]):
        write_clips(root / "videos", {i: f"{i}.mp4"})
        rows.append([f"{i}.mp4", f"picture {i}", split])
    write_rows(root / "videos" / "metadata.csv", ["file_name", "caption", "split"], rows)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sets):
    """Function of a name in RUNS -> the folder of its run, made once."""
    root = tmp_path_factory.mktemp("eval")

    @functools.cache
    def run_of(name):
        script, flags = RUNS[name]
        run_script(script, root / name, *flags.format(**sets).split(), base=BASE)
        return root / name

    return run_of


@pytest.fixture
def run(runs):
    return runs("temo")


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Function of a run and flags of eval.py -> {data set: its result}; without pictures."""
    for name in ("draw_answers", "draw_retrieval"):
        monkeypatch.setattr(eval_py, name, lambda *_, **__: None)
    return lambda run, *flags: evaluated(run, "--output-dir", tmp_path / "eval", *flags)


def embeddings_of(run, data):
    """The unit embeddings of the images of data by a run's model."""
    model, _, transform = common.load_model(run)
    encoded = evaluation.embed.encode_images(model, data, transform, CPU)
    return F.normalize(encoded.image)


# --------------------------------------- as in training --------------------------------------
@pytest.mark.parametrize("name", ["squashed", "videos", "long tail"])
def test_numbers_of_training_without_a_flag(name, runs, evaluate):
    """Of all sets, at the run's views, frames, split and classes."""
    summary = read_json(runs(name) / "summary.json")
    results = evaluate(runs(name))
    assert results.keys() == summary["test"].keys()
    for data, result in results.items():
        for kind, key in (("metrics", "test"), ("chance", "chance")):
            trained = flatten(summary[key][data])
            assert flatten(result[kind]).items() >= trained.items()


def test_a_picture_of_the_retrieval_is_drawn(run):
    evaluated(run)
    assert (run / "eval" / "retrieval_emoji.png").is_file()


def test_neighbours_by_the_embeddings(runs):
    """Of the test clips in the training clips, by hand."""
    run = runs("videos")
    options = {"clips": [60, 8, 60], "frames": 2, "frame_sampling": "middle", "image_size": 16}
    train = common.load_data("moving-emoji", "train", **options)
    test = common.load_data("moving-emoji", "test", **options)
    sim = embeddings_of(run, test) @ embeddings_of(run, train).T
    nearest = sim.argmax(1).numpy()
    expected = balanced_accuracy_score(test.labels, train.labels[nearest])
    metrics = read_json(run / "summary.json")["test"]["moving-emoji"]
    assert metrics["knn@1"]["mean_per_class"] == pytest.approx(100 * expected)
    assert expected > 0


def test_neighbours_and_probes_need_training_images_of_the_same_classes():
    def data_of(*names):
        table = common.make_table([["a"]] * 2, ["x", "y"], classes={"label": names}, label=[0, 1])
        return common.Data("own", "test", table)

    test = data_of("cat", "dog")
    for train, tasks in (
        (data_of("cat", "dog"), []),
        (data_of("dog", "cat"), ["knn", "probe"]),
        (None, ["knn", "probe"]),
    ):
        reasons = unsupported_tasks(["knn", "probe"], test, (None, None, None), train)
        assert list(reasons) == tasks


def test_val_of_a_set_without_one_is_what_the_run_held_out(sets, tmp_path, evaluate):
    flags = "--dataset cifar10 --image-encoder small --train-features clean --batch-size 8".split()
    flags += ["--data-dir", sets["cifar10"]]
    val = "--split val --tasks zero-shot knn".split()
    run_script(ts, tmp_path / "all", *flags, base=BASE)
    with pytest.raises(UserError, match="cifar10 has no val split"):
        evaluate(tmp_path / "all", *val)
    run_script(ts, tmp_path / "held", *flags, "--holdout-fraction", 0.05, base=BASE)
    result = evaluate(tmp_path / "held", *val)["cifar10"]
    assert result["metrics"]["images"] == 10


def test_results_of_other_commands_stay_in_eval_json(run, tmp_path, monkeypatch, evaluate):
    for command in ("a", "b", "a"):
        monkeypatch.setattr("sys.argv", [command])
        evaluate(run, "--tasks", "gap", "--output-dir", tmp_path)
    newest = read_json(tmp_path / "eval.json")
    (earlier,) = newest["earlier"]
    assert newest["command"].endswith(" a")
    assert earlier["command"].endswith(" b")
    assert earlier["datasets"] == newest["datasets"]


def test_two_processes_count_each_item_once(run, tmp_path, evaluate):
    flags = ["--tasks", "retrieval", "zero-shot", "knn", "gap", "--output-dir"]
    one = evaluate(run, *flags, tmp_path / "1")["emoji"]
    outcomes = launch.ranks(tmp_path, lambda _: evaluate(run, *flags, tmp_path / "2"))
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    two = read_json(tmp_path / "2" / "eval.json")["datasets"]["emoji"]
    for kind in ("metrics", "chance"):
        numbers = flatten(one[kind])
        assert flatten(two[kind]) == pytest.approx(numbers, rel=1e-3, abs=1e-3)


def test_saved_embeddings_are_all_of_them_in_the_order_of_the_data(
        run, tmp_path, monkeypatch, evaluate):
    """Also above the number of rows that pictures read; each with its key and captions."""
    monkeypatch.setattr(saved_pieces, "MAX_ROWS", 7)
    evaluate(run, "--save-embeddings", tmp_path, "--tasks", "retrieval")
    pieces = saved_pieces.read_pieces(tmp_path / "emoji.safetensors")["emoji"]
    data = common.load_data("emoji", "test")
    assert pieces.keys == list(data.keys())
    assert_close(F.normalize(pieces.image), embeddings_of(run, data), 1e-6)
    texts = []
    owner = []
    for row in range(len(data)):
        texts += data.captions(row)
        owner += [row] * len(data.captions(row))
    assert pieces.texts == texts
    assert pieces.owner.tolist() == owner


# ------------------------------------------- sets --------------------------------------------
def test_names_of_sets_have_the_folder_of_the_command_line():
    names = eval_py.expand_names(["msrvtt", "didemo=D", "own.csv"], "A", "own.csv")
    assert names == ["msrvtt=A", "didemo=D", "own.csv"]
    assert eval_py.expand_names(["temo-17"]) == list(TEMO_17)
    expected = [f"{name}=DIR/{name}" for name in TEMO_17]
    assert eval_py.expand_names(["temo-17=DIR"]) == expected


def test_a_text_of_two_images_is_a_mistake_in_published_sets_alone(sets):
    assert common.load_data("coco", "test", data_dir=str(sets["coco"])).same_text == "wrong"
    assert common.load_data("emoji", "test").same_text == "positive"


TASKS = "--tasks retrieval zero-shot knn probe".split()


def test_all_tasks_on_several_sets(run, sets, evaluate):
    """Names of classes serve as captions; a set without classes leaves their tasks out."""
    names = [f"dtd={sets['dtd']}", f"coco={sets['coco']}"]
    dtd, coco = evaluate(run, *TASKS, "--datasets", *names).values()
    assert dtd["left_out"] == {}
    tasks = {"text_to_image", "zero-shot", "knn@1", "knn@10", "few-shot", "all"}
    assert dtd["metrics"].keys() >= tasks
    assert dtd["chance"].keys() >= tasks
    # a class name is the caption of all images of its class, here of 4 in 12
    assert dtd["chance"]["text_to_image"]["R@1"] == pytest.approx(100 / 3)
    assert coco["left_out"].keys() == {"zero-shot", "knn", "probe"}
    assert coco["metrics"]["captions"] == 24


def test_the_views_of_the_cc3m_trainer(runs, sets, monkeypatch, evaluate):
    """Retrieval squashes; the classes of other sets are seen by a centre crop with their own
    statistics."""
    run = runs("squashed")
    views = set()
    encode_images = evaluation.embed.encode_images

    def watch(model, data, transform, *args, **options):
        views.add((data.name, data.split, transform.resize, transform.mean))
        return encode_images(model, data, transform, *args, **options)

    monkeypatch.setattr(evaluation.measure, "encode_images", watch)
    monkeypatch.setattr(evaluation.by_class, "encode_images", watch)
    names = [f"{name}={sets[name]}" for name in ("dtd", "cifar100", "coco")]
    tasks = ["retrieval", "zero-shot", "knn"]
    evaluate(run, "--tasks", *tasks, "--datasets", "emoji", *names)
    half, _ = STATS["half"]
    expected = {("emoji", "train", "squash", half)}
    for name in ("emoji", "dtd", "cifar100", "coco"):
        expected.add((name, "test", "squash", half))
    imagenet, _ = STATS["imagenet"]
    cifar, _ = CIFAR_STATS["cifar100"]
    for split in ("train", "test"):
        expected.add(("dtd", split, "crop", imagenet))
        expected.add(("cifar100", split, "crop", cifar))
    assert views == expected


def test_images_without_a_class_count_nowhere_among_classes(run, tmp_path, evaluate):
    """Every fourth of twelve has none. Test images are training images, of which one may be held
    out for val."""
    rows = []
    for i, label in enumerate("abc bca cab "):
        rows.append([f"{i:03}.png", f"picture {i}", label.strip()])
    for split in ("train", "test"):
        folder = tmp_path / "data" / split
        write_images(folder, range(12))
        write_rows(folder / "metadata.csv", ["file_name", "caption", "label"], rows)
    name = str(tmp_path / "data")
    metrics = evaluate(run, "--datasets", name, *TASKS)[name]["metrics"]
    assert metrics["images"] == 12
    assert metrics["without_class"] == 3
    assert metrics["knn@1"]["top1"] >= 800 / 9
    hits = metrics["zero-shot"]["names_top1"] * 9 / 100
    assert hits == pytest.approx(round(hits))


# --------------------------------------- models by name --------------------------------------
@pytest.fixture
def clip(tmp_path, tokenizer):
    """The folder of a CLIP with a processor of its own."""
    tiny_model("clip", tmp_path / "clip", tokenizer)
    processor = CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size=32, image_mean=[0.5, 0.4, 0.3], image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path / "clip")
    return tmp_path / "clip"


@pytest.mark.parametrize("size", [(48, 73), (20, 20), (90, 40)])
def test_a_clip_by_name_sees_an_image_as_its_own_processor_does(clip, size):
    """Of an odd margin torchvision cuts the other half pixel."""
    _, _, transform = eval_py.open_clip_by_name(str(clip))
    draws = np.random.default_rng(0)
    image = Image.fromarray(draws.integers(0, 256, (*size, 3), dtype=np.uint8))
    processor = CLIPImageProcessor.from_pretrained(clip)
    expected = processor(images=image, return_tensors="pt")["pixel_values"][0]
    assert_close(transform(image), expected)


def test_a_clip_by_name_is_evaluated_on_a_set_that_is_named(clip, evaluate):
    metrics = evaluate(clip, "--datasets", "emoji")["emoji"]["metrics"]
    assert metrics["images"] == len(common.load_data("emoji", "test"))


# ---------------------------------------- normalisation --------------------------------------
def test_dual_softmax_is_reported_beside_the_cosines(run, evaluate, capsys):
    """--normalize dsl: from all test queries, and it says so."""
    plain = evaluate(run, "--tasks", "retrieval")["emoji"]["metrics"]
    dsl = evaluate(run, "--tasks", "retrieval", "--normalize", "dsl")["emoji"]["metrics"]
    assert dsl["normalized_by"] == "dsl"
    assert dsl["normalize"]["none"]["text_to_image"] == plain["text_to_image"]
    assert dsl["text_to_image"] == dsl["normalize"]["dsl"]["text_to_image"]
    assert dsl["text_to_image"] != plain["text_to_image"]
    assert "by all test queries, so no fair result; gamma 0.01" in capsys.readouterr().out


# ------------------------------------------ refusals -----------------------------------------
@pytest.mark.parametrize("flags, message", [
    ("--checkpoint x --tasks qa gap", "--tasks qa: its model answers questions; give it alone"),
    ("--checkpoint x --tau 0.1", "--tau: only with --normalize queue, oracle or dsl"),
])
def test_flags_that_do_not_fit_are_refused(flags, message, capsys):
    assert message in refused(eval_py.parse_args, flags.split(), capsys)


@pytest.mark.parametrize("flags, message", [
    ("--tasks qa", "^emoji: nothing can be measured on its test split: qa: the model answers no"),
    ("--normalize oracle", "--normalize oracle: give --tau"),
    ("--normalize queue --tau 1", "only on the data set of a run of ncl.py"),
    ("--rerank 5", "has no matching head"),
])
def test_what_a_run_cannot_give_is_refused(flags, message, run, tmp_path, evaluate):
    with pytest.raises(UserError, match=message):
        evaluate(run, *flags.split())
    assert not (tmp_path / "eval" / "eval.json").exists()


def test_a_folder_that_does_not_exist_is_refused_with_the_nearest(tmp_path, evaluate):
    (tmp_path / "frozen").mkdir()
    with pytest.raises(UserError, match="/frozn: no such folder; the nearest: frozen$"):
        evaluate(tmp_path / "frozn")


@pytest.mark.parametrize("args, message", [
    ({"dataset": "emoji", "script": "x"}, "has not ended; python x.py --resume .* continues it"),
    ({}, "--datasets is needed: .* is no folder of a run"),
])
def test_a_folder_without_a_finished_run_is_refused(args, message, tmp_path, evaluate):
    write_json(tmp_path / "args.json", args)
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path)
