"""eval.py on real runs: every task, several sets, search, one and two processes; probes against scikit-learn."""

import dataclasses
import json
import re
import shutil
import types

import common
from contrastive import encoders, engine, evaluation
from contrastive.data import evaluation_sets
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
import temo
import temperature_schedules
from helpers import TEXT, tar_samples, write_captions, write_images, write_rows, write_tar, write_video
from test_hub import hub  # noqa: F401  (a fixture)
from test_models import tiny_clip, tokenizer  # noqa: F401
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


def test_it_gives_the_numbers_of_the_run(run):
    result = evaluate("--checkpoint", run)
    own = json.loads((run / "summary.json").read_text())["test"]["emoji"]
    got = result["datasets"]["emoji"]["metrics"]
    assert got["retrieval"]["text_to_image"] == own["text_to_image"] and got["retrieval"]["R-Mean"] == own["R-Mean"]
    assert got["knn"]["k=1"]["top1"] == own["knn@1"]["top1"]
    assert got["gap"]["modality_gap"] == pytest.approx(own["modality_gap"], rel=1e-4)
    assert (run / "eval" / "eval.json").exists() and (run / "eval" / "retrieval.png").exists()


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
        got = evaluate("--checkpoint", folder, "--tasks", "knn", "--knn-k", "1", *flags)["datasets"]["emoji"]["metrics"]
        assert got["knn"]["k=1"]["mean_per_class"] == pytest.approx(expected)


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
    got = evaluate("--checkpoint", folder)["datasets"][name]["metrics"]["retrieval"]
    assert all(got[way] == own[way] for way in ("text_to_image", "image_to_text"))


def test_all_tasks_on_several_sets(run, hub, capsys):  # noqa: F811
    sets = ["emoji", f"dtd={hub / 'dtd'}", f"coco={hub / 'coco'}", "/no/such/set"]
    tasks = ["retrieval", "zero-shot", "knn", "probe", "gap", "histograms"]
    result = evaluate("--checkpoint", run, "--datasets", *sets, "--tasks", *tasks, "--knn-k", "1", "3",
                      "--max-captions", "1")
    assert set(result["datasets"]) == {"emoji", "dtd", "coco"}
    assert "no such file or folder" in result["errors"]["/no/such/set"]
    dtd, coco = result["datasets"]["dtd"], result["datasets"]["coco"]
    assert dtd["left_out"]["retrieval"] == "the set has no captions"
    assert coco["left_out"]["knn"] == "the set has no labels"
    tops = {"top1": 100 / 3, "top3": 100, "top5": 100}
    assert dtd["chance"]["zero-shot"] == pytest.approx(tops | {f"names_{k}": v for k, v in tops.items()})
    assert dtd["metrics"]["zero-shot"].keys() == dtd["chance"]["zero-shot"].keys()
    assert set(dtd["metrics"]["knn"]) == {"k=1", "k=3"} and "few-shot (6 a class)" in dtd["metrics"]["probe"]
    assert coco["metrics"]["captions"] == 12
    assert {"head", "mid", "tail"} <= set(result["datasets"]["emoji"]["metrics"]["knn"]["k=1"])
    out = capsys.readouterr().out
    assert "text to image" in out and "(" in out and "left out: the set has no labels" in out


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
    seen = []
    monkeypatch.setattr(evaluation.case, "encode_texts", lambda model, words, *_: seen.append(words))
    learnt = encoders.tokenizers.train_wordpiece(["a photo of a t-shirt."] * 9)
    words = encoders.tokenizers.Tokenizer(learnt, 16, clean=True)
    subject = types.SimpleNamespace(model=None, tokenizer=words, device="cpu")
    for clean in (False, True):
        evaluation.case.Subject.texts(subject, ["a photo of a t-shirt."], clean=clean)
    assert [of.clean for of in seen] == [False, True] and words.clean
    asked, data = [], types.SimpleNamespace(label_names=["t-shirt"], prompts=())
    subject.texts = lambda texts, clean=True: asked.append((texts, clean)) or torch.ones(len(texts), 2)
    case = types.SimpleNamespace(subject=subject, data=data, metrics={}, chance={},
                                 labelled=lambda task: (torch.ones(1, 2), None, torch.zeros(1, dtype=torch.long)))
    evaluation.by_class.zero_shot(case)
    assert asked == [(["a photo of a t-shirt."], False), (["t-shirt"], False)]
    monkeypatch.setattr(evaluation.by_class, "encode_texts", lambda tower, words, *_, device: asked.append(words)
                        or torch.ones(1, 2))
    data = types.SimpleNamespace(label_names=["t-shirt"], prompts=(), has_captions=False, labels=np.zeros(1, dtype=int))
    pieces = {"data": data, "index": np.arange(1), "image": torch.ones(1, 2)}
    evaluation.by_class.zero_shot_of_run(None, words, "cpu", pieces)
    assert not asked[-1].clean  # the accuracy that is logged is the same
    long, short = (len(of(["a photo of a t-shirt."])["input_ids"][0]) for of in (seen[0], words))
    assert long > short


def test_temo_17_is_one_word_for_seventeen_sets(run, hub, tmp_path, capsys):  # noqa: F811
    """Two of them are there; the others are named, and the rest runs; zero-shot is what is measured."""
    for name in ("dtd", "cifar100"):
        shutil.copytree(hub / name, tmp_path / "sets" / name)
    flags = ["--checkpoint", run, "--datasets", f"temo-17={tmp_path / 'sets'}", "--output-dir", tmp_path / "out"]
    result = evaluate(*flags)
    from contrastive.data.images import TEMO_17
    assert list(result["datasets"]) == ["cifar100", "dtd"] and len(result["errors"]) == 15
    assert set(result["datasets"]) | set(result["errors"]) == set(TEMO_17)
    assert all({"zero-shot"} == set(d["metrics"]) & set(eval_py.TASKS) for d in result["datasets"].values())
    assert "country211 is left out: country211: no such folder" in capsys.readouterr().out
    with pytest.raises(UserError, match="evaluation failed: cifar10: .* no such folder"):
        eval_py.complain(result)


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
    tasks = ["--tasks", "retrieval", "zero-shot", "knn", "--knn-k", "1"]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        encode = evaluation.case.encode_images

        def spy(model, data, transform, *more):
            seen.append((data.name, data.split, transform.resize, transform.mean, transform.std))
            return encode(model, data, transform, *more)
        patch.setattr(evaluation.case, "encode_images", spy)
        result = evaluate("--checkpoint", folder, "--datasets", *sets, "emoji", *tasks)["datasets"]
        automatic, seen[:] = set(seen), []
        evaluate("--checkpoint", folder, "--datasets", *sets, *tasks, "--eval-resize", "own", "--image-stats", "own")
        own, seen[:] = set(seen), []
        evaluate("--checkpoint", run, "--datasets", *sets, *tasks, "--eval-resize", "squash", "--image-stats", "cifar")
    half, imagenet = encoders.base.STATS["half"], encoders.base.STATS["imagenet"]
    cifar100 = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    cifar10 = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    both = ("train", "test")
    assert automatic == {*(("dtd", s, "crop", *imagenet) for s in both),
                         *(("cifar100", s, "crop", *cifar100) for s in both),
                         ("coco", "test", "squash", *half), *(("emoji", s, "squash", *half) for s in both)}
    assert {row[2:] for row in own} == {("squash", *half)}
    assert {row[0]: row[2:] for row in seen} == {"dtd": ("squash", *cifar10), "coco": ("squash", *cifar10),
                                                 "cifar100": ("squash", *cifar100)}
    assert result["dtd"]["metrics"]["views"]["zero-shot"] == {"resize": "crop", "stats": "imagenet"}
    assert "views" not in result["emoji"]["metrics"] and "views" not in result["coco"]["metrics"]


def test_images_without_a_class_count_nowhere_among_classes(run, tmp_path):
    rows = []
    for i in range(12):
        write_images(tmp_path / "data" / "train", [i])
        write_images(tmp_path / "data" / "test", [i])
        rows.append((f"{i:03}.png", f"picture {i}", "" if i % 4 == 3 else "abc"[i % 3]))
    for split in ("train", "test"):
        write_rows(tmp_path / "data" / split / "metadata.csv", ["file_name", "caption", "label"], rows)
    tasks = ["--tasks", "retrieval", "zero-shot", "knn", "probe", "--knn-k", "1"]
    result = evaluate("--checkpoint", run, "--datasets", tmp_path / "data", *tasks, "--output-dir", tmp_path / "out")
    found = result["datasets"][str(tmp_path / "data")]
    assert not found["left_out"] and not result["errors"]
    metrics = found["metrics"]
    assert metrics["images"] == 12 and metrics["without_class"] == 3
    for numbers in (metrics["knn"]["k=1"], metrics["probe"]["all"]):  # test images are training images
        assert numbers["top1"] == pytest.approx(100, abs=100 / 9 * 3.1)
    assert metrics["knn"]["k=1"]["top1"] >= 800 / 9  # one of the training images may be held out for val
    assert (metrics["zero-shot"]["names_top1"] * 9 / 100 + 0.5) % 1 == pytest.approx(0.5)  # of nine images


def test_search_draws_the_hits(run, tmp_path):
    write_images(tmp_path / "photos" / "deep", range(8))
    (tmp_path / "photos" / "broken.png").write_bytes(TEXT)
    result = evaluate("--checkpoint", run, "--query", "red apple", "--dataset", tmp_path / "photos", "--top", "3",
                      "--output-dir", tmp_path / "out")
    cosines = [h["cosine"] for h in result["hits"]]
    assert len(cosines) == 3 and cosines == sorted(cosines, reverse=True)
    assert result["images"] == 8 and result["unreadable"] == 1
    assert (tmp_path / "out" / "query.png").stat().st_size > 1000


def test_clip_by_folder(tmp_path, tokenizer):  # noqa: F811
    tiny_clip(tmp_path / "clip", tokenizer)
    data = write_captions(tmp_path / "data", 40)
    result = evaluate("--checkpoint", tmp_path / "clip", "--image-size", "32", "--datasets", data,
                      "--tasks", "retrieval", "--output-dir", tmp_path / "out")
    assert result["datasets"][str(data)]["metrics"]["images"] == 2  # 5 % of 40 are held out as test


def test_a_clip_by_name_sees_an_image_as_its_own_processor_does(tmp_path, tokenizer):  # noqa: F811
    own = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32, image_mean=[0.5, 0.4, 0.3], image_std=[0.2] * 3)
    tiny_clip(tmp_path, tokenizer)
    own.save_pretrained(tmp_path)
    args = eval_py.parse_args([*SMALL, "--checkpoint", str(tmp_path), "--image-size", "32"])
    _, _, transform, _ = evaluation.case.open_model(args)
    for size in ((48, 73), (20, 20), (90, 40)):  # of an odd margin torchvision cuts the other half pixel
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
        theirs = own(images=image, return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(transform(image), theirs, atol=1e-5), size


def test_random_projections_are_said_and_those_of_a_file_are_not(tmp_path, tokenizer, capsys):  # noqa: F811
    clip = tiny_clip(tmp_path / "clip", tokenizer)
    CLIPVisionModelWithProjection(clip.config.vision_config).save_pretrained(tmp_path / "tower")
    spec = dict(image_encoder=str(tmp_path / "tower"), text_encoder=str(tmp_path / "clip"), embed_dim=256,
                image_size=32, text_length=12, text_pooling="cls", image_stats="clip", eval_resize="crop")
    save_file(common.build_model(spec, tokenizer, True)[0].state_dict(), tmp_path / "both.safetensors")
    flags = ["--image-encoder", tmp_path / "tower", "--text-encoder", tmp_path / "clip", "--image-size", "32"]
    for more, random in (([], True), (["--init-from", tmp_path / "both.safetensors"], False)):
        evaluation.case.open_model(eval_py.parse_args([*SMALL, *map(str, flags + more)]))
        assert ("the projections of this pair are random" in capsys.readouterr().out) == random


def test_train_without_the_run_s_noise_is_no_change_of_the_data(tmp_path, capsys):
    folder = train(tmp_path / "r", *"--clips 40 8 8 --frames 2 --caption-noise 0.5 --loss infonce".split(),
                   "--weighting", "none", script=mama)[0]
    result = evaluate("--checkpoint", folder, "--split", "train", "--tasks", "gap")
    assert "changed" not in result["datasets"]["moving-emoji"]
    assert "moving-emoji (train): without the run's --caption-noise" in capsys.readouterr().out


def test_two_processes_count_each_item_once(run, tmp_path):
    flags = ["--checkpoint", str(run), "--cpu", "--tasks", "retrieval", "zero-shot", "knn", "gap", "--output-dir"]
    eval_py.main(eval_py.parse_args([*flags, str(tmp_path / "1")]))
    launch.finish("eval", [*flags, tmp_path / "2"], tmp_path / "log", processes=2)
    a, b = (engine.processes.flatten(json.loads((tmp_path / n / "eval.json").read_text())["datasets"]) for n in "12")
    assert a.keys() == b.keys() and all(a[k] == pytest.approx(b[k], rel=1e-3, abs=1e-3) for k in a)
    assert (tmp_path / "log").read_text().count("written to") == 1


@pytest.mark.parametrize("flags,message", [
    ([], "give what to evaluate"), (["--checkpoint", "x", "--query", "a"], "go together"),
    (["--checkpoint", "x", "--eval-batch", "0"], "--eval-batch 0: must be between 1"),
    (["--checkpoint", "x", "--gamma", "-1"], "--gamma -1: must be at least 0"),
    (["--checkpoint", "x", "--knn-k", "1", "0"], "--knn-k 0: must be between 1"),
    (["--checkpoint", "x", "--normalize", "queue", "--split", "val", "--queue-split", "val"], "--normalize oracle"),
    (["--checkpoint", "x", "--gamma", "0.1"], "--gamma: only with --normalize queue, oracle or dsl"),
    (["--checkpoint", "x", "--normalize", "dsl", "--iterations", "3"], "--iterations: only with --normalize queue or"),
    (["--checkpoint", "x", "--normalize", "oracle", "--queue-split", "val"], "--queue-split: only with --normalize"),
    (["--checkpoint", "x", "--text-encoder", "y"], "--text-encoder: only without --checkpoint"),
    (["--checkpoint", "x", "--top", "3"], "--top: only with --query"),
    (["--checkpoint", "x", "--few-shot", "5"], "--few-shot: only with --tasks probe"),
    (["--checkpoint", "x", "--tasks", "gap", "--knn-k", "5"], "--knn-k: only with --tasks knn"),
    (["--checkpoint", "x", "--query", "a", "--dataset", "b", "--tasks", "knn"], "--tasks: only without --query"),
    (["--checkpoint", "x", "--query", "a", "--dataset", "b", "--datasets", "c"], "--datasets: only without --query"),
    (["--checkpoint", "x", "--tasks", "magic"], "invalid choice")])
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        eval_py.parse_args(flags)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and message in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_search_reads_clips_as_the_run_did(tmp_path, monkeypatch):
    flags = "--dataset moving-emoji --clips 30 12 12 --frames 3 --image-size 16".split()
    folder, _ = train(tmp_path / "r", *flags)
    seen, encode = [], eval_py.Subject.images
    monkeypatch.setattr(eval_py.Subject, "images", lambda self, data, *more: (
        seen.append(data), encode(self, data, *more))[1])
    evaluate("--checkpoint", folder, "--query", "red apple", "--dataset", "moving-emoji")
    assert seen[0].pixels.shape == (12, 3, 3, 16, 16)


@pytest.mark.parametrize("flags, words", [
    ("--loss ts", "no single temperature"), ("--loss infonce --learnable-tau", "own.safetensors: No such file")])
def test_a_temperature_that_a_run_does_not_have_is_not_made_up(flags, words, tmp_path):
    folder, _ = train(tmp_path / "r", *flags.split())
    (folder / "own.safetensors").unlink()                                  # the learnt one
    asked = ["--checkpoint", folder, "--tasks", "retrieval", "--normalize", "oracle"]
    assert words in evaluate(*asked)["datasets"]["emoji"]["left_out"]["normalize"]
    assert not evaluate(*asked, "--gamma", "0.1")["datasets"]["emoji"]["left_out"]


def test_a_loss_without_a_temperature_gives_none(run, monkeypatch):
    subject = types.SimpleNamespace(own={"loss": "max-margin", "tau": 0.07}, args=types.SimpleNamespace(checkpoint=run))
    with pytest.raises(UserError, match="the run's loss has no temperature; give --gamma"):
        evaluation.stand_ins._gamma(subject)
    subject.own = {"loss": "infonce", "tau": 0.07, "shifts": False, "schedule": True}  # mmts.py --no-shifts
    with pytest.raises(UserError, match="no single temperature"):
        evaluation.stand_ins._gamma(subject)


def test_an_earlier_result_is_kept(run, tmp_path, monkeypatch, capsys):
    for k, task in enumerate(("retrieval", "gap", "gap")):
        monkeypatch.setattr("sys.argv", ["eval.py", "--tasks", task])
        evaluate("--checkpoint", run, "--output-dir", tmp_path, "--tasks", task)
        assert ("the earlier eval.json is now eval_1.json" in capsys.readouterr().out) == (k == 1)
    first, last = (json.loads((tmp_path / f"{name}.json").read_text())["datasets"] for name in ("eval_1", "eval"))
    assert "retrieval" in first["emoji"]["metrics"] and "retrieval" not in last["emoji"]["metrics"]


def test_nothing_measured_is_an_error(run, tmp_path):
    result = evaluate("--checkpoint", run, "--output-dir", tmp_path, "--tasks", "knn", "--knn-k", "99999")
    with pytest.raises(UserError, match="nothing was measured, every task was left out: emoji: knn: k = 99999"):
        eval_py.complain(result)


def test_held_out_images_that_a_run_trained_on_are_no_val(cifar, tmp_path, capsys):  # noqa: F811
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
    seen = []
    monkeypatch.setattr(eval_py, "stand_ins", lambda case: seen.append(evaluation.stand_ins.stand_ins(case)) or seen[0])
    evaluate("--checkpoint", run, "--tasks", "retrieval", "--normalize", "queue")
    texts, videos, _ = seen[0]
    data, (model, _, transform) = common.load_data("emoji", "train"), common.load_model(run)
    index, in_order, _, _ = evaluation.embed.encode_images(model, data, transform, torch.device("cpu"))
    assert len(videos) == len(in_order) and not torch.allclose(videos, in_order)
    same = (F.normalize(videos) @ F.normalize(in_order).T).max(1).values
    assert same.min() > 0.9999 and len(texts) > 16


def test_bad_checkpoints(tmp_path, run, capsys):
    for flag in (["--init-from", "w.pt"], ["--no-pretrained"], ["--image-size", "64"]):
        with pytest.raises(SystemExit):
            eval_py.parse_args(["--checkpoint", str(run), *flag])
        assert f"{flag[0]}: only with a model by name: a run has its own weights" in capsys.readouterr().err
    with pytest.raises(UserError, match="neither a run folder nor a model"):
        evaluate("--checkpoint", tmp_path)
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="this run has not ended"):
        evaluate("--checkpoint", tmp_path / "half")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="Not a directory"):
        evaluate("--checkpoint", run, "--output-dir", tmp_path / "file" / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        evaluate("--checkpoint", run, "--query", "a", "--dataset", tmp_path / "empty")


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
    order = np.random.RandomState(42).permutation(120)
    rows = np.concatenate([order[y[order] == c][:5] for c in range(4)])
    few = LinearSVC(random_state=42).fit(unit(x)[rows], y[rows]).predict(unit(q))
    assert common.linear_probe(*data, few_shot=5)["top1"] == pytest.approx(100 * (few == truth).mean())
    other = np.random.RandomState(7).permutation(120)
    rows = np.concatenate([other[y[other] == c][:5] for c in range(4)])
    right = LinearSVC(random_state=42).fit(unit(x)[rows], y[rows]).predict(unit(q)) == truth
    assert common.linear_probe(*data, few_shot=5, seed=7)["top1"] == pytest.approx(100 * right.mean())
    assert (few == truth).sum() != right.sum()
    with pytest.raises(ValueError, match="smallest class has 30"):
        common.linear_probe(*data, few_shot=31)


@pytest.mark.parametrize("name", ["mine", "other"])
def test_tasks_by_class_on_a_long_tail(name):
    """The run's own limits of head and tail count on its own set alone; --seed draws the few; chance is in percent."""
    generator, sizes = torch.Generator().manual_seed(0), [30, 20, 10, 9, 8]
    known, features = (torch.randn(n, 6, generator=generator) for n in (sum(sizes), 50))
    known_labels, labels = torch.arange(5).repeat_interleave(torch.tensor(sizes)), torch.arange(5).repeat(10)
    case = types.SimpleNamespace(
        name=name, metrics={}, chance={}, train=lambda task: (known, known_labels), few_shot=lambda task: None,
        labelled=lambda task: (None, features, labels), args=types.SimpleNamespace(knn_k=[1], few_shot=0, seed=7),
        subject=types.SimpleNamespace(own={"dataset": "mine", "shot_limits": [25, 9]}, device=torch.device("cpu"),
                                      knn_features="backbone"))
    evaluation.by_class.knn(case)
    evaluation.by_class.probe(case)
    of_class = common.knn_accuracy(known, known_labels, features, labels, per_class=True)["per_class"]
    ours, thirds = (evaluation.metrics.head_mid_tail(known_labels.numpy(), of_class, k) for k in ([25, 9], None))
    found = {k: case.metrics["knn"]["k=1"][k] for k in ("head", "mid", "tail")}
    assert found == (ours if name == "mine" else thirds) and ours != thirds
    few = {seed: common.linear_probe(known, known_labels, features, labels, 8, seed) for seed in (7, 42)}
    assert case.metrics["probe"]["few-shot (8 a class)"] == few[7] != few[42]
    assert case.chance["probe"] == {k: {"top1": 20} for k in ("few-shot (8 a class)", "all")}


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


@pytest.mark.parametrize("name", ["emoji", "moving-emoji"])
def test_a_run_of_temperature_schedules_keeps_its_classes(ts_runs, name):
    """Its own 70 classes and held-out drawings of emoji, and verbs of moving emoji, not the splits of other scripts."""
    folder, own = ts_runs[name]
    metrics = evaluate("--checkpoint", folder, "--tasks", "knn", "probe")["datasets"][name]["metrics"]
    assert metrics["images"] == own["images"] == {"emoji": 140, "moving-emoji": 24}[name]
    for k in (1, 10):
        assert metrics["knn"][f"k={k}"]["top1"] == pytest.approx(own[f"knn@{k}"]["top1"], abs=0.8)
    assert metrics["probe"]["all"]["top1"] == pytest.approx(own["all"]["top1"], abs=0.8)


def test_augmented_training_features_are_those_of_the_run(ts_runs):
    """The recipe of CIFAR-LT: kNN and probes learn from padded and flipped images, here as in the run."""
    folder, own = ts_runs["cifar10-lt"]
    assert json.loads((folder / "args.json").read_text())["train_features"] == "augmented"
    metrics = evaluate("--checkpoint", folder, "--tasks", "knn", "probe")["datasets"]["cifar10-lt"]["metrics"]
    assert metrics["images"] == own["images"] == 40
    for k in (1, 10):
        for name in ("top1", "mean_per_class", "head", "mid", "tail"):
            assert metrics["knn"][f"k={k}"][name] == pytest.approx(own[f"knn@{k}"][name])
    few = next(v for k, v in metrics["probe"].items() if k.startswith("few-shot"))
    assert few["top1"] == pytest.approx(own["few-shot"]["top1"])
    assert metrics["probe"]["all"]["top1"] == pytest.approx(own["all"]["top1"])


def test_a_fork_of_temperature_schedules_and_a_model_without_texts(ts_runs, tmp_path):
    folder, own = ts_runs["emoji"]
    shutil.copytree(folder, tmp_path / "fork")
    args = json.loads((folder / "args.json").read_text())
    (tmp_path / "fork" / "args.json").write_text(json.dumps(args | {"script": "mine"}))
    result = evaluate("--checkpoint", tmp_path / "fork")["datasets"]["emoji"]  # known by its flags, not by its name
    assert result["metrics"]["images"] == own["images"]
    assert result["left_out"] == dict.fromkeys(("retrieval", "gap"), "the model has no text encoder")
    assert result["metrics"]["knn"]["k=1"]["top1"] == pytest.approx(own["knn@1"]["top1"], abs=0.8)
    with pytest.raises(UserError, match="--query: .* has no text encoder"):
        evaluate("--checkpoint", tmp_path / "fork", "--query", "a", "--dataset", "emoji")


def test_training_images_are_not_found_among_themselves(run, tmp_path):
    """kNN with k = 1 would be 100 % whatever the model; what needs no training set is there."""
    result = evaluate("--checkpoint", run, "--split", "train", "--limit", "20", "--tasks", "retrieval", "knn", "probe",
                      "--output-dir", tmp_path)["datasets"]["emoji"]
    assert result["left_out"] == dict.fromkeys(("knn", "probe"), "--split train: each image would find itself among "
                                               "the training images")
    assert result["metrics"]["images"] == 20 and "retrieval" in result["metrics"]


def test_dual_softmax(run, tmp_path, capsys):
    """--normalize dsl: at the checkpoint's temperature, from all test queries, and it says so."""
    plain = evaluate("--checkpoint", run, "--tasks", "retrieval", "--output-dir", tmp_path)
    found = evaluate("--checkpoint", run, "--tasks", "retrieval", "--normalize", "dsl", "--output-dir", tmp_path)
    words = capsys.readouterr().out
    got, was = (r["datasets"]["emoji"]["metrics"] for r in (found, plain))
    assert got["normalized_by"] == "dsl" and got["normalize"]["none"] == was["retrieval"] != got["retrieval"]
    assert "--normalize dsl: gamma 0.1, by all test queries, so no fair result" in words
    assert "emoji (reported: dsl)" in words and "normalisation" in words
    assert (tmp_path / "retrieval.png").is_file() and not (tmp_path / "normalization.png").exists()


def test_a_streamed_run_is_tested_on_what_it_held_out(tmp_path):
    for k in range(3):
        write_tar(tmp_path / "tars" / f"{k:05}.tar", tar_samples(range(k * 10, k * 10 + 10), "jpg", "txt", "cls"))
    name = str(tmp_path / "tars")
    folder, own = train(tmp_path / "s", "--dataset", name, "--streaming", "--batch-size", "8")
    result = evaluate("--checkpoint", folder, "--tasks", "retrieval", "knn", "probe")["datasets"][name]
    own = own[name]
    assert result["metrics"]["images"] == own["images"] == 10  # the last shard, and no example of training
    assert result["metrics"]["retrieval"]["text_to_image"] == own["text_to_image"]
    assert result["left_out"] == dict.fromkeys(("knn", "probe"), "the training set is a stream: no kNN or probe")
    with pytest.raises(UserError, match="--split train: .* is a stream"):
        evaluate("--checkpoint", folder, "--split", "train")


def test_sets_without_the_split_are_named(capsys):
    args = eval_py.parse_args(["--checkpoint", "r", "--split", "val"])
    assert eval_py.wanted_sets(args, {"eval_datasets": ["emoji", "coco"]}) == [("emoji", "")]
    assert "left out, since they have no val split: coco" in capsys.readouterr().out


def test_no_image_is_its_own_negative():
    """gap: the health of the space by one caption of each image; one image has none."""
    image, text = torch.randn(6, 5, generator=torch.manual_seed(0)).split([3, 3])
    pieces = {"image": image, "text": text.repeat_interleave(4, 0), "owner": np.arange(3).repeat(4)}
    case = types.SimpleNamespace(pieces=pieces, metrics={}, chance={})
    eval_py.gap(case)
    a, b = (F.normalize(x.double(), dim=1) for x in (image, text))
    others = [(i, j) for i in range(3) for j in range(3) if i != j]
    far = np.log(np.mean([np.exp(-2 * float((a[i] - a[j]).square().sum())) for i, j in others]))
    assert case.metrics["gap"]["uniformity"] == pytest.approx(far, abs=1e-5)
    assert case.chance["gap"] == {"modality_gap": pytest.approx((1 / 3 + 1 / 12) ** 0.5)}
    assert case.metrics["gap"]["neg_cos"] == pytest.approx(np.mean([float(a[i] @ b[j]) for i, j in others]), abs=1e-5)
    case.pieces = {"image": image[:1], "text": text[:2], "owner": np.zeros(2, int)}
    eval_py.gap(case)
    assert list(case.metrics["gap"]) == ["modality_gap"]  # a spread of one is nan, which is no JSON


def test_other_classes_leave_both_tasks_out(run, tmp_path):
    for split, names in (("train", "abc"), ("test", "abd")):
        for c in names:
            write_images(tmp_path / split / c, range(4))
    tasks = ["knn", "probe", "zero-shot"]
    result = evaluate("--checkpoint", run, "--datasets", tmp_path, "--tasks", *tasks, "--output-dir", tmp_path / "out")
    assert not result["datasets"][str(tmp_path)]["left_out"]  # one list of names for both: a split may lack a class
    emoji = common.load_data("emoji", "test")
    table = emoji.table.cast_column("label", datasets.ClassLabel(names=[f"{n} " for n in emoji.label_names]))
    with pytest.MonkeyPatch.context() as patch:
        data = {"train": common.load_data("emoji", "train"), "test": dataclasses.replace(emoji, table=table)}
        patch.setattr(evaluation.case, "load_data", lambda name, split, **options: data[split])
        result = evaluate("--checkpoint", run, "--tasks", *tasks, "--output-dir", tmp_path / "out")["datasets"]["emoji"]
    assert result["left_out"] == dict.fromkeys(("knn", "probe"), "train and test name different classes")
    assert result["chance"]["zero-shot"]["top1"] == pytest.approx(100 / len(emoji.label_names))


def test_what_would_be_lost_in_silence_is_refused(run, hub, tmp_path):  # noqa: F811
    """A set with two folders has one place in eval.json; a normalisation without retrieval changes nothing."""
    sets = [f"dtd={hub / 'dtd'}", "emoji", f"dtd={tmp_path}"]
    with pytest.raises(UserError, match="--datasets dtd: named with two folders"):
        evaluate("--checkpoint", run, "--datasets", *sets)
    with pytest.raises(UserError, match="--eval-datasets dtd: named with two folders"):
        evaluation_sets(temo.parse_args(["--eval-datasets", *sets, "--cpu"]))
    with pytest.raises(UserError, match="--normalize oracle is for the task retrieval; the tasks are knn gap"):
        evaluate("--checkpoint", run, "--tasks", "knn", "gap", "--normalize", "oracle")
    once = evaluate("--checkpoint", run, "--datasets", *sets[:2], sets[0], "--tasks", "zero-shot", "--output-dir",
                    tmp_path)
    assert list(once["datasets"]) == ["dtd", "emoji"]


def test_class_names_as_captions_and_what_a_fork_adds(tmp_path, monkeypatch, capsys):
    """Every image of a class is right for its name; a tower that a fork adds is rebuilt; what a method measures itself
    stands in the table, and what an evaluation set has lost in the banner and beside the table."""
    for i in range(12):
        write_images(tmp_path / "classes" / ("train", "test")[i % 2] / "abc"[i % 3], [i])
    rows = [(x, f"picture {i}" if i % 5 else "") for i, x in enumerate(write_images(tmp_path / "own", range(40)))]
    whole, test = (str(write_rows(tmp_path / "own" / f"{name}.csv", ["image", "caption", "split"], [
        (*row, split) for row in rows])) for name, split in (("all", "train"), ("eval", "test")))
    by_name = encoders.two_tower.image_tower
    def image_tower(name, *args):
        body = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
        return encoders.base.Tower(body, 12) if name == "mean_tower" else by_name(name, *args)
    monkeypatch.setattr(encoders.two_tower, "image_tower", image_tower)
    name = str(tmp_path / "classes")
    folder, own = train(tmp_path / "r", "--dataset", whole, "--eval-datasets", name, test, "--image-encoder",
                        "mean_tower", "--batch-size", "8")
    said, chance = capsys.readouterr().out, json.loads((folder / "summary.json").read_text())["chance"]
    assert re.search(r"\nzero-shot +top1 +[0-9.]+ +top3 100.000 ", said)
    assert "32 test (8 rows without an image or a caption left out" in said
    assert own[name]["captions"] == 6
    assert chance[name]["text_to_image"]["R@1"] == pytest.approx(100 / 3)  # 2 of 6 images
    assert own[name]["image_to_text"]["R@1"] == own[name]["zero-shot"]["top1"]
    result = evaluate("--checkpoint", folder, "--datasets", test, "--tasks", "retrieval")
    assert result["datasets"][test]["metrics"]["retrieval"]["R-Mean"] == own[test]["R-Mean"]
    assert f"{test} (test): 8 rows without an image or a caption left out" in capsys.readouterr().out
    monkeypatch.undo()
    with pytest.raises(UserError, match="^--image-encoder mean_tower: not small"):
        common.load_model(folder)


def test_other_videos_are_seen_as_in_training(tmp_path):
    """--frame-sampling of the run counts for the sets that it evaluates beside its own."""
    rows = [(f"{i}.mp4", f"picture {i}", "val" if i < 2 else "test") for i in range(6)]
    write_rows(tmp_path / "videos" / "metadata.csv", ["file_name", "caption", "split"], rows)
    for i, (name, *_) in enumerate(rows):
        write_video(tmp_path / "videos" / name, range(8 * i, 8 * i + 8))
    folder, own = train(tmp_path / "r", "--dataset", "moving-emoji", "--clips", "40", "8", "8", "--frames", "2",
                        "--frame-sampling", "middle", "--eval-datasets", tmp_path / "videos", "--eval-every", "0")
    own = own[str(tmp_path / "videos")]
    found = evaluate("--checkpoint", folder, "--tasks", "gap")["datasets"][str(tmp_path / "videos")]["metrics"]
    assert found["clips"] == own["clips"] == 4
    assert found["gap"]["modality_gap"] == pytest.approx(own["modality_gap"], rel=1e-4)
