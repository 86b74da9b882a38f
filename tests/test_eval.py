"""eval.py on real runs: every task, several sets, one and two processes; probes against scikit-learn."""

import dataclasses
import json
import re
import shutil
import types

import common
from contrastive import encoders, engine, evaluation
from contrastive.data import open_data
from contrastive.data.images import TEMO_17
from contrastive.engine.processes import UserError

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from sklearn.svm import LinearSVC
from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

import eval as eval_py
import launch
import mama
import mmts
import ncl
import temo
import temperature_schedules
from helpers import TEXT, refused, tar_samples, tiny_model, write_images, write_rows, write_tar, write_video
from test_hub import hub  # noqa: F401  (a fixture)
from test_temperature_schedules import cifar  # noqa: F401

SMALL = ["--cpu", "--workers", "0"]


def train(folder, *flags, script=temo):
    """A run of a step or a few -> (its folder, the numbers of each test set)."""
    small = [*SMALL, "--max-steps", "1", "--batch-size", "16", "--image-size", "16", "--output-dir", folder.parent]
    summary = script.main(script.parse_args([*map(str, [*small, "--run-name", folder.name, *flags])]))
    return folder, summary["test"]


def evaluate(*flags):
    return eval_py.main(eval_py.parse_args([*SMALL, *map(str, flags)]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "r"
    return train(folder, "--max-steps", "3", "--batch-size", "64", "--image-size", "24")[0]


def same(found, own):
    """A result of eval.py has all numbers of a run's summary, under the same names."""
    found, own = engine.processes.flatten(found), engine.processes.flatten(own)
    assert {k: found.get(k) for k in own} == pytest.approx(own, rel=1e-4)


def test_it_gives_the_numbers_of_the_run(run):
    found = evaluate("--checkpoint", run)["datasets"]["emoji"]
    summary = json.loads((run / "summary.json").read_text())
    same(found["metrics"], summary["test"]["emoji"])
    same(found["chance"], summary["chance"]["emoji"])
    left = "eval.json", "retrieval_emoji.png", "similarities_emoji.png"
    assert all((run / "eval" / name).exists() for name in left)


CLIPS = "--clips 60 8 16 --frames 2"


@pytest.mark.parametrize("script, flags", [
    (temo, "--text-length 4"), (temperature_schedules, ""), (mmts, f"{CLIPS} --num-clusters 4"), (mama, CLIPS),
    (mama, f"{CLIPS} --task qa-open"), (ncl, f"{CLIPS} --max-steps 6 --eval-datasets moving-emoji emoji"),
    (ncl, f"{CLIPS} --normalize oracle"), (ncl, f"{CLIPS} --loss infonce"), (temo, "SQUASHED")],
    ids="temo ts mmts mama qa ncl oracle infonce squashed".split())
def test_what_training_printed_is_printed_without_a_flag(script, flags, tmp_path, capsys):
    """Every line of its tables, to the digit, and not a word of a difference."""
    flags, sets = flags.split(), ["--eval-datasets", tmp_path / "classes", "emoji"]
    for i in range(12):
        write_images(tmp_path / "classes" / ("train", "test")[i % 2] / "abc"[i % 3], [i])
    flags = ["--eval-resize", "squash", *sets] if flags == ["SQUASHED"] else flags
    folder, own = train(tmp_path / "r", *flags, "--eval-every", "0", script=script)
    of_run = capsys.readouterr().out.splitlines()
    tables = of_run[next(k for k, line in enumerate(of_run) if "number (chance)" in line):-3]
    result = evaluate("--checkpoint", folder)["datasets"]
    said = capsys.readouterr().out
    assert not [line for line in tables if line not in said.splitlines()]
    assert " in training" not in said
    for name in own:
        found, numbers = map(engine.processes.flatten, (result[name]["metrics"], own[name]))
        assert {k: found.get(k) for k in numbers} == numbers
    if script is ncl and "infonce" not in flags and "oracle" not in flags:
        assert own["moving-emoji"]["normalized_by"] == "queue" != own["emoji"]["normalized_by"] == "none"


def test_what_differs_from_training_is_said(run, tmp_path, capsys):
    """A line for each value; how many texts lose their end stands beside the numbers."""
    assert "captions cut" not in capsys.readouterr().out
    found = evaluate("--checkpoint", run, "--text-length", "4", "--knn-features", "backbone", "--output-dir", tmp_path)
    said = capsys.readouterr().out
    assert "--text-length 4: 24 in training" in said and "--knn-features backbone: projected in training" in said
    words, (_, short, _) = common.load_data("emoji", "test").first_captions(), common.load_model(run)
    lengths = [len(of) for of in short.tokenizer([*words])["input_ids"]]
    cut = found["datasets"]["emoji"]["metrics"]["captions_cut"]
    assert cut == sum(n > 4 for n in lengths) and 0 < cut < len(lengths) and f", {cut} captions cut" in said
    with pytest.raises(UserError, match="--text-length 99: the run's text encoder has 24 positions"):
        evaluate("--checkpoint", run, "--text-length", "99", "--output-dir", tmp_path)


def test_repeated_texts_are_right_unless_a_paper_or_the_run_says_otherwise(hub, tmp_path, capsys):  # noqa: F811
    names, words = write_images(tmp_path, range(40)), ["a pear", "a plum"]
    rows = [(x, words[i % 2], "test" if i < 20 else "train") for i, x in enumerate(names)]
    csv = write_rows(tmp_path / "twice.csv", ["image", "caption", "split"], rows)
    where = "--dataset", csv, "--batch-size", "8", "--eval-every", "0"
    folder, own = train(tmp_path / "r", *where, "--same-text", "wrong")
    said = "20 captions are word for word those of another image too: wrong in image -> text"
    assert said in capsys.readouterr().out
    found = evaluate("--checkpoint", folder)["datasets"][str(csv)]
    assert said in (out := capsys.readouterr().out) and " in training" not in out
    assert found["metrics"] == own[str(csv)]
    assert found["chance"]["image_to_text"]["R@1"] == pytest.approx(5)
    found = evaluate("--checkpoint", folder, "--same-text", "positive")["datasets"][str(csv)]
    assert "--same-text positive: wrong in training" in capsys.readouterr().out
    assert found["metrics"]["same_text"] == "positive" and found["chance"]["image_to_text"]["R@1"] == pytest.approx(50)
    usual = {name: common.load_data(name, "test", data_dir=str(hub / name)).same_text for name in ("coco", "flickr30k")}
    assert usual == {"coco": "wrong", "flickr30k": "wrong"}                # by the papers' protocol
    for name in (str(csv), "emoji", "moving-emoji"):
        assert common.load_data(name, "test").same_text == "positive"
    assert common.load_data("coco", "test", data_dir=str(hub / "coco"), same_text="positive").same_text == "positive"


def test_own_data_by_another_path_are_those_of_the_run(tmp_path, monkeypatch):
    """Its columns and its folder, however the path is written."""
    rows = [(x, f"picture {i}", "test" if i < 8 else "train") for i, x in enumerate(write_images(tmp_path, range(24)))]
    write_rows(tmp_path / "clips.csv", ["image", "words", "split"], rows)
    monkeypatch.chdir(tmp_path)
    folder, own = train(tmp_path / "r", "--dataset", "clips.csv", "--caption-column", "words", "--batch-size", "8",
                        "--eval-every", "0")
    for other in ("./clips.csv", tmp_path / "clips.csv"):
        same(evaluate("--checkpoint", folder, "--datasets", other)["datasets"]["clips.csv"]["metrics"],
             own["clips.csv"])


@pytest.mark.parametrize("where", ["projected", "backbone"])
def test_neighbours_by_the_embeddings_or_the_features(where, tmp_path):
    """A run and eval.py, against one neighbour by hand; eval.py follows the run and can be told otherwise."""
    folder, own = train(tmp_path / "r", "--max-steps", "3", "--batch-size", "64", "--image-size", "24", "--eval-every",
                        "0", "--knn-features", where)
    model, _, transform = common.load_model(folder)
    data = [common.load_data("emoji", split) for split in ("train", "test")]
    found = {}
    for kind, which in (("projected", 1), ("backbone", 2)):
        known, asked = (F.normalize(evaluation.embed.encode_images(model, d, transform, torch.device("cpu"))[which])
                        for d in data)
        near = (asked @ known.T).argmax(1).numpy()
        right, truth = data[0].labels[near] == data[1].labels, data[1].labels
        found[kind] = 100 * np.mean([right[truth == c].mean() for c in np.unique(truth)])
    assert found["projected"] != found["backbone"]
    assert own["emoji"]["knn@1"]["mean_per_class"] == pytest.approx(found[where])
    for flags, expected in (([], found[where]), (["--knn-features", "backbone"], found["backbone"])):
        got = evaluate("--checkpoint", folder, "--tasks", "knn", *flags)["datasets"]["emoji"]["metrics"]
        assert got["knn@1"]["mean_per_class"] == pytest.approx(expected)


@pytest.mark.parametrize("name, flags, options", [
    ("emoji", ["--fold", "3"], {"fold": 3}),
    ("moving-emoji", ["--clip-law", "zipf", "--clips", "40", "8", "60"], {"clip_law": "zipf", "clips": [40, 8, 60]}),
], ids=["fold", "law"])
def test_a_run_keeps_its_fold_and_its_law(name, flags, options, tmp_path, capsys):
    """The split that the flags name is the one that the run tests, and the one that eval.py opens again."""
    folder, own = train(tmp_path / "r", "--eval-every", "0", "--dataset", name, *flags)
    own = own[name]
    assert {"emoji": "fold 3 of 10", "moving-emoji": "law of val and test: zipf"}[name] in capsys.readouterr().out
    test, plain = (common.load_data(name, "test", **o) for o in (options, options | {"fold": 0, "clip_law": ""}))
    assert own["images"] == len(test) and list(test.column("captions")) != list(plain.column("captions"))
    tasks = ["--tasks", "retrieval", "mir", "knn", "gap"]
    same(evaluate("--checkpoint", folder, *tasks)["datasets"][name]["metrics"], own)


def test_all_tasks_on_several_sets(run, hub, capsys, monkeypatch):  # noqa: F811
    sets = ["emoji", f"dtd={hub / 'dtd'}", f"coco={hub / 'coco'}"]
    tasks = ["--tasks", "retrieval", "zero-shot", "knn", "probe", "gap", "--max-captions", "1"]
    result = evaluate("--checkpoint", run, "--datasets", *sets, *tasks)["datasets"]
    assert list(result) == ["emoji", "dtd", "coco"]
    dtd, coco = result["dtd"], result["coco"]
    assert dtd["left_out"] == dict.fromkeys(("retrieval", "gap"), "the set has no captions")
    assert coco["left_out"] == dict.fromkeys(("zero-shot", "knn", "probe"), "the set has no classes")
    tops = {"top1": 100 / 3, "top3": 100, "top5": 100}
    assert dtd["chance"]["zero-shot"] == pytest.approx(tops | {f"names_{k}": v for k, v in tops.items()})
    assert {"zero-shot", "knn@1", "knn@10", "few-shot", "all"} == dtd["metrics"].keys() - {"images", "unreadable"}
    assert dtd["chance"].keys() - {"trivial"} == dtd["metrics"].keys() - {"images", "unreadable"}
    beside = dtd["chance"]["trivial"]
    assert list(beside) == ["pixels", "colours", "untrained"]
    assert all(of.keys() == {"knn@1", "knn@10", "few-shot", "all"} for of in beside.values())
    assert coco["metrics"]["captions"] == 12 and {"head", "mid", "tail"} <= result["emoji"]["metrics"]["knn@1"].keys()
    out = capsys.readouterr().out
    assert "text -> image" in out and "(chance)" in out and "left out: knn: the set has no classes" in out
    said = ", ".join(f"{name} {of['few-shot']['mean_per_class']:.2f}" for name, of in beside.items())
    assert f"mean_per_class of {said}" in out
    monkeypatch.setattr(evaluation.retrieval, "encode_images", None)       # all are opened before the first is encoded
    with pytest.raises(UserError, match="no such file or folder"):
        evaluate("--checkpoint", run, "--datasets", *sets, "/no/such/set", *tasks)


def test_zero_shot_reports_both_readings_of_the_prompts(run, hub, tmp_path):  # noqa: F811
    """The mean of normalised template embeddings, and the class names alone, against a loop."""
    name = f"dtd={hub / 'dtd'}"
    flags = ["--checkpoint", run, "--datasets", name, "--tasks", "zero-shot", "--output-dir", tmp_path]
    got = evaluate(*flags)["datasets"]["dtd"]["metrics"]["zero-shot"]
    model, words, transform = common.load_model(run)
    data, device = common.load_data("dtd", "test", data_dir=str(hub / "dtd")), torch.device("cpu")
    _, image, _, _ = evaluation.embed.encode_images(model, data, transform, device)
    for reading, prompts in (("top1", data.prompts), ("names_top1", ["{c}"])):
        classes = []
        for c in ("apple", "pear tree", "zebra"):
            texts = evaluation.embed.encode_texts(model, words, [t.replace("{c}", c) for t in prompts], device)
            classes.append(F.normalize(texts, dim=1).mean(0))
        near = (F.normalize(image, dim=1) @ F.normalize(torch.stack(classes), dim=1).T).argmax(1).numpy()
        assert got[reading] == pytest.approx(100 * (near == data.labels).mean())


def test_prompts_are_not_cleaned_as_captions(monkeypatch):
    """The CC3M trainer cleans captions alone: a prompt keeps its full stop and its hyphens."""
    learnt, asked = encoders.texts.train_wordpiece(["a photo of a t-shirt."] * 9), []
    words = encoders.texts.Tokenizer(learnt, 16, clean=True)
    monkeypatch.setattr(evaluation.by_class, "encode_texts", lambda model, words, texts, device: asked.append(
        (texts, words.clean)) or torch.ones(len(texts), 2))
    for prompts in ((), ("a {c}, worn.", "one {c}.")):                     # a set's own prompts, if it has some
        data = types.SimpleNamespace(label_names=["t-shirt"], prompts=prompts)
        evaluation.by_class.zero_shot(None, words, torch.ones(1, 2), np.zeros(1, dtype=int), data, "cpu")
    assert asked == [(["a photo of a t-shirt."], False), (["t-shirt"], False),
                     (["a t-shirt, worn.", "one t-shirt."], False), (["t-shirt"], False)]
    long, short = (len(of(["a photo of a t-shirt."])["input_ids"][0]) for of in (words.plain(), words))
    assert long > short


def test_the_sets_that_are_meant(capsys):
    """temo-17 is one word for seventeen sets; of the run's own sets those without the split are named."""
    def wanted(*flags, **own):
        return eval_py.wanted_sets(eval_py.parse_args(["--checkpoint", "r", *flags]), own)
    sets = wanted("--datasets", "temo-17=DIR", "coco")
    assert list(sets) == [*TEMO_17, "coco"] and sets["dtd"] == "DIR/dtd" and not sets["coco"] and len(sets) == 18
    assert wanted("--split", "val", eval_datasets=["emoji", "coco"], dataset="cc3m") == {"emoji": ""}
    assert "left out, since they have no val split: coco" in capsys.readouterr().out
    assert wanted(dataset="coco") == {"coco": ""}
    with pytest.raises(UserError, match="--datasets is needed"):
        wanted()
    with pytest.raises(UserError, match="--datasets dtd: named with two folders"):
        wanted("--datasets", "dtd=a", "emoji", "dtd=b")
    with pytest.raises(UserError, match="--eval-datasets emoji: named with two folders"):
        open_data(temo.parse_args(["--eval-datasets", "emoji=a", "emoji=b", "--cpu"]))


def squashing(run, folder):
    """The same run as if the CC3M trainer's recipe had made it."""
    shutil.copytree(run, folder)
    spec = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(spec | {"eval_resize": "squash"}))
    return folder


def test_the_views_of_the_cc3m_trainer(run, hub, tmp_path):  # noqa: F811
    """Retrieval squashes; the classes of other sets are seen by a centre crop with their own statistics."""
    folder = squashing(run, tmp_path / "r")
    sets = [f"{n}={hub / n}" for n in ("dtd", "cifar100", "coco")]
    tasks = ["--tasks", "retrieval", "zero-shot", "knn"]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        encode = evaluation.retrieval.encode_images

        def spy(model, data, transform, *device, **how):
            seen.append((data.name, data.split, transform.resize, transform.mean, transform.std))
            return encode(model, data, transform, *device, **how)
        for module in (evaluation.retrieval, evaluation.by_class):
            patch.setattr(module, "encode_images", spy)
        result = evaluate("--checkpoint", folder, "--datasets", *sets, "emoji", *tasks)["datasets"]
        automatic, seen[:] = set(seen), []
        evaluate("--checkpoint", folder, "--datasets", *sets, *tasks, "--eval-resize", "own", "--image-stats", "own")
        own, seen[:] = set(seen), []
        evaluate("--checkpoint", run, "--datasets", *sets, *tasks, "--eval-resize", "squash", "--image-stats", "cifar")
    half, imagenet = encoders.base.STATS["half"], encoders.base.STATS["imagenet"]
    cifar100 = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    cifar10 = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    both = ("train", "test")
    assert automatic == {*(("dtd", s, "crop", *imagenet) for s in both), ("dtd", "test", "squash", *half),
                         *(("cifar100", s, "crop", *cifar100) for s in both), ("cifar100", "test", "squash", *half),
                         ("coco", "test", "squash", *half), *(("emoji", s, "squash", *half) for s in both)}
    assert {row[2:] for row in own} == {("squash", *half)}
    assert {row[0]: row[2:] for row in seen} == {"dtd": ("squash", *cifar10), "coco": ("squash", *cifar10),
                                                 "cifar100": ("squash", *cifar100)}
    assert result["dtd"]["views"] == "images of the tasks by class seen as crop, statistics imagenet"
    assert not result["emoji"]["views"]


def test_images_without_a_class_count_nowhere_among_classes(run, tmp_path):
    rows = []
    for i in range(12):
        write_images(tmp_path / "data" / "train", [i])
        write_images(tmp_path / "data" / "test", [i])
        rows.append((f"{i:03}.png", f"picture {i}", "" if i % 4 == 3 else "abc"[i % 3]))
    for split in ("train", "test"):
        write_rows(tmp_path / "data" / split / "metadata.csv", ["file_name", "caption", "label"], rows)
    tasks = ["--tasks", "retrieval", "zero-shot", "knn", "probe"]
    result = evaluate("--checkpoint", run, "--datasets", tmp_path / "data", *tasks, "--output-dir", tmp_path / "out")
    found = result["datasets"][str(tmp_path / "data")]
    assert not found["left_out"]
    metrics = found["metrics"]
    assert metrics["images"] == 12 and metrics["without_class"] == 3
    for numbers in (metrics["knn@1"], metrics["all"]):  # test images are training images
        assert numbers["top1"] == pytest.approx(100, abs=100 / 9 * 3.1)
    assert metrics["knn@1"]["top1"] >= 800 / 9  # one of the training images may be held out for val
    assert (metrics["zero-shot"]["names_top1"] * 9 / 100 + 0.5) % 1 == pytest.approx(0.5)  # of nine images


def test_a_clip_by_name_sees_an_image_as_its_own_processor_does(tmp_path, tokenizer):
    own = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32, image_mean=[0.5, 0.4, 0.3], image_std=[0.2] * 3)
    tiny_model("clip", tmp_path, tokenizer)
    own.save_pretrained(tmp_path)
    args = eval_py.parse_args([*SMALL, "--checkpoint", str(tmp_path), "--image-size", "32"])
    _, _, transform, _ = evaluation.case.open_model(args)
    for size in ((48, 73), (20, 20), (90, 40)):  # of an odd margin torchvision cuts the other half pixel
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
        theirs = own(images=image, return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(transform(image), theirs, atol=1e-5), size


def test_random_projections_are_said_and_those_of_a_file_are_not(tmp_path, tiny, tokenizer, capsys):
    folder, clip = tiny("clip")
    CLIPVisionModelWithProjection(clip.config.vision_config).save_pretrained(tmp_path / "tower")
    spec = dict(image_encoder=str(tmp_path / "tower"), text_encoder=folder, embed_dim=256,
                image_size=32, text_length=12, text_pooling="cls", image_stats="clip", eval_resize="crop")
    save_file(common.build_model(spec, tokenizer, True)[0].state_dict(), tmp_path / "both.safetensors")
    flags = ["--image-encoder", tmp_path / "tower", "--text-encoder", folder, "--image-size", "32"]
    for more, random in (([], True), (["--init-from", tmp_path / "both.safetensors"], False)):
        args = eval_py.parse_args([*SMALL, *map(str, flags + more)])
        _, words, _, _ = evaluation.case.open_model(args)
        assert ("the projections of this pair are random" in capsys.readouterr().out) == random == (words is None)
        assert args.knn_features == "backbone" * random


def test_train_is_evaluated_without_the_run_s_noise(tmp_path):
    flags = "--clips 40 8 8 --frames 2 --caption-noise 0.5 --loss infonce"
    folder = train(tmp_path / "r", *flags.split(), script=mama)[0]
    with pytest.MonkeyPatch.context() as patch:
        seen, measure = [], eval_py.measure
        patch.setattr(eval_py, "measure", lambda *args: seen.append(args[1]) or measure(*args))
        evaluate("--checkpoint", folder, "--split", "train", "--tasks", "gap")
    plain = common.load_data("moving-emoji", "train", clips=[40, 8, 8], frames=2)
    assert seen[0].column("captions") == plain.column("captions")


def test_trivial_neighbours_by_hand(run, monkeypatch):
    """One neighbour by cosine on pixels and on 64 colours, in numpy; the untrained tower is the run's before its first
    step; no more rows than the limits."""
    data = {split: common.load_data("emoji", split, image_size=24) for split in ("train", "val")}
    (*_, transform), own = common.load_model(run), json.loads((run / "args.json").read_text())
    first = encoders.models.untrained(json.loads((run / "model.json").read_text()), own["seed"])
    how = transform, torch.device("cpu"), 0, True, ["knn"], {"untrained": first}
    found = evaluation.trivial.trivial_accuracy(data["train"], data["val"], None, *how)
    assert found["pixels"].keys() == {"knn@1", "knn@10"}
    images = {k: np.stack([transform.raw(of.read(i)).numpy() for i in range(len(of))]) for k, of in data.items()}

    def colours(image):                                                    # (3, S, S) -> (64,)
        r, g, b = (image // 64).reshape(3, -1).astype(int)
        return np.histogram(16 * r + 4 * g + b, np.arange(65))[0]
    for name, feature in (("pixels", np.ravel), ("colours", colours)):
        x, q = (np.stack([feature(i) for i in images[k]]).astype(np.float64) for k in ("train", "val"))
        x, q = (y / np.linalg.norm(y, axis=1, keepdims=True) for y in (x, q))
        hits = data["train"].labels[(q @ x.T).argmax(1)] == data["val"].labels
        assert found[name]["knn@1"]["top1"] == pytest.approx(100 * hits.mean(), abs=1.2)        # ties of two of 177
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = next(row for row in rows if "eval" in row)
    assert before["step"] == 0 and found["untrained"]["knn@1"] == before["eval"]["emoji"]["knn@1"]
    monkeypatch.setattr(evaluation.trivial, "TEST", 10)
    few = evaluation.trivial.trivial_accuracy(data["train"], data["val"], None, *how)["pixels"]["knn@1"]["top1"]
    assert few * 10 / 100 == pytest.approx(round(few * 10 / 100))


def test_two_processes_count_each_item_once(run, tmp_path):
    flags = ["--checkpoint", str(run), "--cpu", "--tasks", "retrieval", "zero-shot", "knn", "gap", "--output-dir"]
    eval_py.main(eval_py.parse_args([*flags, str(tmp_path / "1")]))
    launch.finish("eval", [*flags, tmp_path / "2"], tmp_path / "log", processes=2)
    a, b = (json.loads((tmp_path / n / "eval.json").read_text())["datasets"]["emoji"] for n in "12")
    for kind in ("metrics", "chance"):
        ours, theirs = engine.processes.flatten(a[kind]), engine.processes.flatten(b[kind])
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-3)
    assert (tmp_path / "log").read_text().count("written to") == 1


@pytest.mark.parametrize("flags,message", [
    ([], "give what to evaluate"),
    (["--checkpoint", "x", "--normalize", "queue", "--split", "train"], "--normalize oracle"),
    (["--checkpoint", "x", "--gamma", "0.1"], "--gamma: only with --normalize queue, oracle or dsl"),
    (["--checkpoint", "x", "--normalize", "dsl", "--iterations", "3"], "--iterations: only with --normalize queue or"),
    (["--checkpoint", "x", "--text-encoder", "y"], "--text-encoder: only without --checkpoint"),
    (["--checkpoint", "x", "--tasks", "gap", "--knn-features", "backbone"], "--knn-features: only with --tasks knn"),
    (["--image-encoder", "small", "--text-encoder", "y"], "small have weights only in a run")])
def test_bad_flags(flags, message, capsys):
    assert message in refused(eval_py.parse_args, flags, capsys)


def test_a_temperature_that_a_run_does_not_have_is_not_made_up(tmp_path):
    gamma = evaluation.case._gamma
    row_b = {"loss": "temo", **temo.ROWS["b"]}  # no term at --tau
    for own in ({"loss": "max-margin"}, {"loss": "ts"}, {"loss": "infonce", "shifts": False, "schedule": True}, row_b):
        with pytest.raises(UserError, match="no single temperature"):
            gamma(own | {"tau": 0.07}, tmp_path)
    with pytest.raises(UserError, match="own.safetensors: No such file"):  # the learnt one
        gamma({"loss": "infonce", "tau": 0.07, "learnable_tau": True}, tmp_path)
    for own in ({"loss": "infonce"}, {"loss": "temo", "base": False, "unimodal": "plain"}):
        assert gamma(own | {"tau": 0.07}, tmp_path) == 0.07


def test_nothing_measured_is_an_error(run, tmp_path):
    with pytest.raises(UserError, match="nothing was measured, every task was left out"):
        evaluate("--checkpoint", run, "--output-dir", tmp_path, "--tasks", "qa")
    left_out = json.loads((tmp_path / "eval.json").read_text())["datasets"]["emoji"]["left_out"]
    assert left_out == {"qa": "the model answers no questions"}
    with pytest.raises(UserError, match="--normalize oracle is for the task retrieval; the tasks are knn gap"):
        evaluate("--checkpoint", run, "--tasks", "knn", "gap", "--normalize", "oracle")


def test_held_out_images_that_a_run_trained_on_are_no_val(cifar, tmp_path):  # noqa: F811
    where = ["--dataset", "cifar10", "--data-dir", cifar]
    flags = [*where, "--image-encoder", "small", "--train-features", "clean", "--batch-size", "8"]
    folder, _ = train(tmp_path / "r", *flags, script=temperature_schedules)
    asked = ["--checkpoint", folder, "--split", "val", "--hold-out-val", "--tasks", "zero-shot", "knn"]
    with pytest.raises(UserError, match="--hold-out-val: the run trained on all of cifar10"):
        evaluate(*asked)
    held, _ = train(tmp_path / "held", *flags, "--hold-out-val", script=temperature_schedules)
    assert evaluate("--checkpoint", held, *asked[2:])["datasets"]["cifar10"]["metrics"]["images"] == 10


def test_queries_of_a_class_do_not_stand_together_in_the_queue(run, monkeypatch):
    """Fig. 5 takes the last 16, 32, ... of them."""
    seen, stand_ins = [], eval_py.Subject.stand_ins
    monkeypatch.setattr(eval_py.Subject, "stand_ins", lambda *args: seen.append(stand_ins(*args)) or seen[0])
    evaluate("--checkpoint", run, "--tasks", "retrieval", "--normalize", "queue")
    texts, videos = seen[0]
    data, (model, _, transform) = common.load_data("emoji", "train"), common.load_model(run)
    index, in_order, _, _ = evaluation.embed.encode_images(model, data, transform, torch.device("cpu"))
    assert len(videos) == len(in_order) and not torch.allclose(videos, in_order)
    same = (F.normalize(videos) @ F.normalize(in_order).T).max(1).values
    assert same.min() > 0.9999 and len(texts) > 16


def test_bad_checkpoints(tmp_path, run, capsys):
    for flags in (["--init-from", "w.pt"], ["--image-size", "64"]):
        said = refused(eval_py.parse_args, ["--checkpoint", str(run), *flags], capsys)
        assert f"{flags[0]}: only with a model by name: a run has its own weights" in said
    with pytest.raises(UserError, match=str(tmp_path)):
        evaluate("--checkpoint", tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "args.json").write_text("{}")                     # of a run that has not ended
    with pytest.raises(UserError, match="half.model.json: .*No such file"):
        evaluate("--checkpoint", tmp_path / "half")


def test_linear_probe_is_linear_svc():
    rng = np.random.default_rng(0)
    x, q = rng.normal(size=(120, 10)), rng.normal(size=(60, 10))
    y, truth = rng.permutation(np.repeat(np.arange(4), 30)), rng.integers(0, 4, 60)
    data = [torch.from_numpy(a) for a in (x, y, q, truth)]

    def unit(a):
        return a / np.linalg.norm(a, axis=1, keepdims=True)
    got = common.linear_probe(*data)
    expected = LinearSVC(random_state=42).fit(unit(x), y).predict(unit(q))
    assert got["top1"] == pytest.approx(100 * (expected == truth).mean())
    found = []
    for seed in (42, 7):
        order = np.random.RandomState(seed).permutation(120)
        rows = np.concatenate([order[y[order] == c][:5] for c in range(4)])
        few = LinearSVC(random_state=42).fit(unit(x)[rows], y[rows]).predict(unit(q))
        found.append(common.linear_probe(*data, few_shot=5, seed=seed)["top1"])
        assert found[-1] == pytest.approx(100 * (few == truth).mean())
    assert found[0] != found[1]
    with pytest.raises(ValueError, match="smallest class has 30"):
        common.linear_probe(*data, few_shot=31)


def test_classes_on_a_long_tail():
    """Head, mid and tail by the limits that are given, else by thirds; the few are drawn by seed 42."""
    generator, sizes = torch.Generator().manual_seed(0), [30, 20, 10, 9, 8]
    known, features = (torch.randn(n, 6, generator=generator) for n in (sum(sizes), 50))
    known_labels, labels = torch.arange(5).repeat_interleave(torch.tensor(sizes)), torch.arange(5).repeat(10)
    data = (known, known, known_labels.numpy()), (features, features, labels.numpy())
    of_class = common.knn_accuracy(known, known_labels, features, labels, per_class=True)["per_class"]
    thirds = [evaluation.metrics.head_mid_tail(known_labels.numpy(), of_class, limits) for limits in ([25, 9], None)]
    for limits, expected in zip(([25, 9], None), thirds):
        metrics, chance, per_class = evaluation.by_class.class_metrics(["knn"], *data, limits=limits)
        assert expected.items() <= metrics["knn@1"].items() and metrics.keys() == chance.keys() == {"knn@1", "knn@10"}
        assert per_class["knn@1"] == of_class
    assert thirds[0] != thirds[1]
    few = common.linear_probe(known, known_labels, features, labels, 8)
    metrics, chance, _ = evaluation.by_class.class_metrics(["probe"], *data)
    assert few.items() <= metrics["few-shot"].items() and chance["all"] == {"top1": 20, "mean_per_class": 20}


def test_images_are_padded_moved_and_flipped():
    """By up to four pixels down or up and right or left, then mirrored: one bright pixel says where to."""
    Images = dataclasses.make_dataclass("Images", ["pixels"], namespace={"__len__": lambda self: len(self.pixels)})
    pixels = torch.zeros(600, 3, 16, 20, dtype=torch.uint8)
    pixels[:, :, 6, 7] = 255
    moved = evaluation.by_class.padded_and_flipped(Images(pixels), 3).pixels
    assert moved.shape == pixels.shape and moved.count_nonzero() == 600 * 3
    u = common.uniforms(3, 0, np.arange(600), 3, stream=9)
    down, right = (4 - np.floor(9 * u[:, k]).astype(int) for k in (0, 1))
    assert set(down) == set(right) == {*range(-4, 5)}
    place = moved[:, 0].flatten(1).argmax(1).numpy()
    assert (place // 20 == 6 + down).all()
    assert (place % 20 == np.where(u[:, 2] < 0.5, 19 - (7 + right), 7 + right)).all()


def test_zero_shot_accuracy():
    classes = torch.eye(4)
    images = F.normalize(torch.tensor([[1, 0.5, 0, 0], [1, 0.5, 0, 0], [0, 0, 0.2, 1], [1.0, 1, 1, 1]]), dim=1)
    got = common.zero_shot_accuracy(images, torch.tensor([0, 1, 0, 2]), classes, topk=(1, 2, 4))
    assert got == {"top1": 25.0, "top2": 50.0, "top4": 100.0}  # the third and the fourth (all tied) come last
    with pytest.raises(ValueError, match="non-finite"):
        common.zero_shot_accuracy(images * float("nan"), torch.zeros(4), classes)


@pytest.fixture(scope="module")
def ts_runs(tmp_path_factory, cifar):  # noqa: F811
    """Runs of temperature_schedules.py, and the class metrics of their own evaluation: {set: (folder, metrics)}."""
    root = tmp_path_factory.mktemp("ts")
    small = ["--image-encoder", "small", "--image-size", "32", "--imbalance-ratio", "9", "--epochs", "1"]
    sets = {"emoji": [], "moving-emoji": ["--clips", "120", "24", "24"],
            "cifar10-lt": ["--data-dir", str(cifar), *small, "--head-norm", "none"]}
    runs = {name: train(root / name, "--dataset", name, "--batch-size", "32", "--image-size", "32", *more,
                        script=temperature_schedules) for name, more in sets.items()}
    return {name: (folder, test[name]) for name, (folder, test) in runs.items()}


@pytest.mark.parametrize("name", ["emoji", "moving-emoji", "cifar10-lt"])
def test_a_run_of_temperature_schedules_keeps_its_classes(ts_runs, name):
    """Its own 70 classes and held-out drawings of emoji, and verbs of moving emoji, not the splits of other scripts; of
    CIFAR-LT kNN and probes learn from padded and flipped images, here as in the run."""
    folder, own = ts_runs[name]
    augmented = json.loads((folder / "args.json").read_text())["train_features"] == "augmented"
    assert own["images"] == {"emoji": 140, "moving-emoji": 24, "cifar10-lt": 40}[name] and augmented == ("lt" in name)
    same(evaluate("--checkpoint", folder, "--tasks", "knn", "probe")["datasets"][name]["metrics"], own)


def test_a_fork_of_temperature_schedules_and_a_model_without_texts(ts_runs, tmp_path):
    folder, own = ts_runs["emoji"]
    shutil.copytree(folder, tmp_path / "fork")
    args = json.loads((folder / "args.json").read_text())
    (tmp_path / "fork" / "args.json").write_text(json.dumps(args | {"script": "mine"}))
    result = evaluate("--checkpoint", tmp_path / "fork")["datasets"]["emoji"]  # known by its flags, not by its name
    assert not result["left_out"]                                          # the tasks of a run without texts
    assert result["metrics"]["images"] == own["images"] and result["metrics"]["knn@1"] == own["knn@1"]


def test_training_images_are_not_found_among_themselves(run, tmp_path):
    """kNN with k = 1 would be 100 % whatever the model; what needs no training set is there."""
    result = evaluate("--checkpoint", run, "--split", "train", "--tasks", "zero-shot", "knn", "probe",
                      "--output-dir", tmp_path)["datasets"]["emoji"]
    why = "there are no other training images of the same classes"
    assert result["left_out"] == {"knn": why, "probe": why} and "zero-shot" in result["metrics"]


def test_dual_softmax(run, tmp_path, capsys):
    """--normalize dsl: at CLIP-ViP's 0.01, not the checkpoint's, from all test queries, and it says so."""
    plain = evaluate("--checkpoint", run, "--tasks", "retrieval", "--output-dir", tmp_path)
    found = evaluate("--checkpoint", run, "--tasks", "retrieval", "--normalize", "dsl", "--output-dir", tmp_path)
    got, was = (r["datasets"]["emoji"]["metrics"] for r in (found, plain))
    assert got["normalized_by"] == "dsl" and got["text_to_image"] == got["normalize"]["dsl"]["text_to_image"]
    assert got["normalize"]["none"]["text_to_image"] == was["text_to_image"] != got["text_to_image"]
    assert "--normalize dsl: by all test queries, so no fair result; gamma 0.01" in capsys.readouterr().out
    assert (tmp_path / "retrieval_emoji.png").is_file() and not (tmp_path / "normalization_emoji.png").exists()


def test_a_streamed_run_is_tested_on_what_it_held_out(tmp_path):
    for k in range(3):
        write_tar(tmp_path / "tars" / f"{k:05}.tar", tar_samples(range(k * 10, k * 10 + 10), "jpg", "txt", "cls"))
    name = str(tmp_path / "tars")
    folder, own = train(tmp_path / "s", "--dataset", name, "--streaming", "--batch-size", "8")
    result = evaluate("--checkpoint", folder, "--tasks", "retrieval", "knn", "probe")["datasets"][name]
    assert own[name]["images"] == 10                                       # the last shard, and no example of training
    assert result["metrics"]["text_to_image"] == own[name]["text_to_image"]
    assert result["left_out"].keys() == {"knn", "probe"}
    with pytest.raises(UserError, match="--split train: .* is a stream"):
        evaluate("--checkpoint", folder, "--split", "train")


def test_no_image_is_its_own_negative():
    """gap: the health of the space by one caption of each image; one image has none."""
    image, text = torch.randn(6, 5, generator=torch.manual_seed(0)).split([3, 3])
    pieces = {"image": image, "text": text.repeat_interleave(4, 0), "owner": np.arange(3).repeat(4)}
    metrics, chance = evaluation.retrieval.gap_of(pieces)
    a, b = (F.normalize(x.double(), dim=1) for x in (image, text))
    others = [(i, j) for i in range(3) for j in range(3) if i != j]
    far = np.log(np.mean([np.exp(-2 * float((a[i] - a[j]).square().sum())) for i, j in others]))
    assert metrics["embeddings"]["uniformity"] == pytest.approx(far, abs=1e-5)
    assert chance == {"modality_gap": pytest.approx((1 / 3 + 1 / 12) ** 0.5)}
    assert metrics["embeddings"]["neg_cos"] == pytest.approx(np.mean([float(a[i] @ b[j]) for i, j in others]), abs=1e-5)
    one = {"image": image[:1], "text": text[:2], "owner": np.zeros(2, int)}
    assert not evaluation.retrieval.gap_of(one)[0]["embeddings"]           # a spread of one is nan, which is no JSON


def test_other_classes_leave_both_tasks_out(run, tmp_path):
    for split, names in (("train", "abc"), ("test", "abd")):
        for c in names:
            write_images(tmp_path / "a" / split / c, range(4))
    shutil.copytree(tmp_path / "a" / "test", tmp_path / "b" / "test")
    tasks, sets = ["knn", "probe", "zero-shot"], [tmp_path / "a", tmp_path / "b"]
    result = evaluate("--checkpoint", run, "--datasets", *sets, "--tasks", *tasks, "--output-dir", tmp_path / "out")
    a, b = result["datasets"].values()
    assert not a["left_out"]  # one list of names for both: a split may lack a class
    assert b["left_out"].keys() == {"knn", "probe"} and "zero-shot" in b["metrics"]        # there is no train split
    emoji = common.load_data("emoji", "test")
    table = emoji.table.cast_column("label", datasets.ClassLabel(names=[f"{n} " for n in emoji.label_names]))
    with pytest.MonkeyPatch.context() as patch:
        data = {"train": common.load_data("emoji", "train"), "test": dataclasses.replace(emoji, table=table)}
        patch.setattr(evaluation.case, "load_data", lambda name, split, **options: data[split])
        result = evaluate("--checkpoint", run, "--tasks", *tasks, "--output-dir", tmp_path / "out")["datasets"]["emoji"]
    assert result["left_out"].keys() == {"knn", "probe"}
    assert result["chance"]["zero-shot"]["top1"] == pytest.approx(100 / len(emoji.label_names))


def test_a_set_of_which_nothing_can_be_read(tmp_path):
    (tmp_path / "some" / "test").mkdir(parents=True)
    (tmp_path / "some" / "test" / "0.png").write_bytes(TEXT)
    write_rows(tmp_path / "some" / "test" / "metadata.csv", ["file_name", "caption"], [("0.png", "a word")])
    with pytest.raises(UserError, match=r"some \(test\): none of its 1 images can be read, first .*0.png"):
        train(tmp_path / "r", "--eval-datasets", tmp_path / "some", "--eval-every", "0")
    assert (tmp_path / "r" / "model.safetensors").exists()                 # all before it is saved


def test_class_names_as_captions_and_what_a_fork_adds(tmp_path, monkeypatch, capsys):
    """Every image of a class is right for its name; a tower that a fork adds is rebuilt; what a method measures itself
    stands in the table, and what an evaluation set has lost in the banner and beside the table."""
    for i in range(12):
        write_images(tmp_path / "classes" / ("train", "test")[i % 2] / "abc"[i % 3], [i])
    rows = [(x, f"picture {i}" if i % 5 else "") for i, x in enumerate(write_images(tmp_path / "own", range(40)))]
    whole, test = (str(write_rows(tmp_path / "own" / f"{name}.csv", ["image", "caption", "split"], [
        (*row, split) for row in rows])) for name, split in (("all", "train"), ("eval", "test")))
    by_name = encoders.models.image_tower
    def image_tower(name, *args):
        body = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
        return encoders.base.Tower(body, 12) if name == "mean_tower" else by_name(name, *args)
    monkeypatch.setattr(encoders.models, "image_tower", image_tower)
    name = str(tmp_path / "classes")
    folder, own = train(tmp_path / "r", "--dataset", whole, "--eval-datasets", name, test, "--image-encoder",
                        "mean_tower", "--batch-size", "8")
    said, chance = capsys.readouterr().out, json.loads((folder / "summary.json").read_text())["chance"]
    assert re.search(r"\n  zero-shot +top1 [0-9.]+ \(33.33\)  top3 100.00 ", said)
    assert "32 test (8 rows without an image or a caption left out" in said
    assert own[name]["captions"] == 6
    assert chance[name]["text_to_image"]["R@1"] == pytest.approx(100 / 3)  # 2 of 6 images
    assert own[name]["image_to_text"]["R@1"] == own[name]["zero-shot"]["top1"]
    result = evaluate("--checkpoint", folder, "--datasets", test, "--tasks", "retrieval")
    assert result["datasets"][test]["metrics"]["R-Mean"] == own[test]["R-Mean"]
    assert f"{test} (test): 8 rows without an image or a caption left out" in capsys.readouterr().out
    monkeypatch.undo()
    with pytest.raises(UserError, match="mean_tower: Unknown model"):
        common.load_model(folder)


def test_other_videos_are_seen_as_in_training(tmp_path):
    """--frame-sampling of the run counts for the sets that it evaluates beside its own."""
    rows = [(f"{i}.mp4", f"picture {i}", "val" if i < 2 else "test") for i in range(6)]
    write_rows(tmp_path / "videos" / "metadata.csv", ["file_name", "caption", "split"], rows)
    for i, (name, *_) in enumerate(rows):
        write_video(tmp_path / "videos" / name, range(8 * i, 8 * i + 8))
    folder, own = train(tmp_path / "r", "--dataset", "moving-emoji", "--clips", "40", "8", "8", "--frames", "2",
                        "--frame-sampling", "middle", "--eval-datasets", tmp_path / "videos", "--eval-every", "0")
    found, own = evaluate("--checkpoint", folder)["datasets"][str(tmp_path / "videos")], own[str(tmp_path / "videos")]
    assert own["clips"] == 4
    same(found["metrics"], own)
