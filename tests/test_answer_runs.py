"""Runs that answer questions: both tasks, eval.py, chunks and processes, what is refused, tools.score."""

import math

import common
from contrastive import evaluation
from contrastive.engine.processes import UserError
from contrastive.evaluation.metrics import answer_vocabulary

import pytest
import torch
from safetensors.torch import load_file

import eval as eval_py
import launch
import mama
from helpers import drift, of_set, refused, run_script, steps
from tools import score

BASE = ["--cpu", "--clips", "64", "24", "24", "--batch-size", "16", "--meta-batch-size", "8",
        "--meta-size", "24", "--log-every", "1", "--eval-every", "0", "--max-steps", "2"]


def main(folder, *flags):
    return run_script(mama, folder, *flags, base=BASE)


def evaluate(folder, *flags):
    flags = ["--checkpoint", str(folder), "--cpu", "--output-dir", str(folder / "eval"), *flags]
    return eval_py.main(eval_py.parse_args(flags))["datasets"]["moving-emoji"]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """A run of each task, with the pictures of the first: (folder, {task: summary})."""
    folder = tmp_path_factory.mktemp("runs")
    summary = run_script(mama, folder / "qa-open", "--task", "qa-open", base=BASE, pictures=True)
    return folder, {"qa-open": summary, "qa-choice": main(folder / "qa-choice", "--task", "qa-choice")}


@pytest.mark.parametrize("task", ["qa-open", "qa-choice"])
def test_a_run_and_its_checkpoint(runs_of, task):
    """eval.py gives its numbers; with shorter texts it counts those that are cut."""
    folder, summary = runs_of[0] / task, runs_of[1][task]
    test, chance = (summary[k]["moving-emoji"] for k in ("test", "chance"))
    assert test["questions"] == 24 and {"accuracy noun", "accuracy verb", "accuracy colour"} < test.keys()
    assert ("upper_bound" in test) == (task == "qa-open") and chance.keys() <= test.keys()
    assert chance["accuracy"] == pytest.approx(20) or task == "qa-open"
    for row in steps(folder):
        assert 0 < row["CE"] < row["L"] and row["loss"] == pytest.approx(row["w"] * row["L"], rel=0.2)
    found = evaluate(folder)
    assert found["metrics"] == test and found["chance"] == chance and not found["left_out"]
    assert (folder / "eval" / "answers_moving-emoji.png").is_file()
    model, tokenizer, _ = common.load_model(folder)
    train, data = (common.load_data("moving-emoji", split, clips=(64, 24, 24)) for split in ("train", "test"))
    texts = data.column("question")
    if task == "qa-open":
        assert (folder / "answers.png").is_file() and (folder / "curves.png").is_file()
        assert model.answers == answer_vocabulary(train.column("answer"), 1500)
    else:
        texts = [f"{q} {choice}" for q, choices in zip(texts, data.column("choices")) for choice in choices]
    cut = evaluate(folder, "--text-length", "6")["metrics"]["texts_cut"]
    assert cut == sum(len(ids) > 6 for ids in tokenizer.tokenizer([*texts])["input_ids"]) > 0


OTHER = {"eta": "qa-open --eta 0", "answers": "qa-open --answers 3", "layers": "qa-open --fusion-layers 3",
         "control": "qa-open --shuffle-video", "fused": "qa-choice --qa-similarity fused"}


@pytest.mark.parametrize("name", OTHER)
def test_every_flag_has_an_effect(runs_of, name, tmp_path, capsys, monkeypatch):
    asked, measure = [], evaluation.answers.evaluate
    monkeypatch.setattr(evaluation.answers, "evaluate", lambda *args: (asked.append(args[3]), measure(*args))[1])
    task, folder = OTHER[name].split()[0], tmp_path / "other"
    summary = main(folder, "--task", *OTHER[name].split())
    ours, theirs = steps(runs_of[0] / task), steps(folder)
    assert len(theirs) == 2 and ours[-1]["loss"] != theirs[-1]["loss"]
    if name == "answers":
        assert 0 < summary["test"]["moving-emoji"]["upper_bound"] < 50
        assert len(common.load_model(folder)[0].answers) == 3
    if name == "control":  # eval.py asks with the right videos, and says that it does
        assert {data.split for data in asked} == {"val", "test"}
        for data in asked:
            right = common.load_data("moving-emoji", data.split, clips=(64, 24, 24))
            assert data.column("question") == right.column("question") and not torch.equal(data.pixels, right.pixels)
        evaluate(folder)
        assert "the run was a control (--shuffle-video); here each question has its own" in capsys.readouterr().out
    if name == "fused":
        assert theirs[-1].keys() & {"pos_cos", "gap"} == {"pos_cos"}
        assert evaluate(folder)["metrics"] == summary["test"]["moving-emoji"]
        found = evaluate(folder, "--tasks", "retrieval", "knn", "--knn-features", "backbone")
        assert "not its embeddings before the fusion" in found["left_out"]["retrieval"]
        with pytest.raises(UserError, match="other: its model has no trained embeddings"):
            score.main([str(folder), "--out", str(tmp_path / "scores"), "--cpu"])


SGD = "--optimizer sgd --grad-clip 0 --lr-schedule constant --warmup-epochs 0".split()  # as near as gradients are


def test_chunks_are_exact(tmp_path):
    """--chunk-size encodes questions and choices in parts: the losses and the weights of the whole batch."""
    for name, chunk, lr in (("start", 0, 0), ("whole", 0, 0.02), ("parts", 5, 0.02)):
        main(tmp_path / name, "--task", "qa-choice", "--weighting", "none", *SGD, "--chunk-size", chunk, "--lr", lr)
    start, whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "whole", "parts"))
    assert drift(parts, whole, start) < 0.05
    losses = [[r["loss"] for r in steps(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_two_processes_are_one(tmp_path):
    """Losses, weights of the samples and accuracies, with the meta step; texts of fused pairs differ in length between
    the processes."""
    flags = [*BASE, "--task", "qa-open", "--qa-similarity", "fused", "--batch-size", "8", "--meta-batch-size", "4",
             *SGD, "--meta-every", "1", "--max-steps", "4"]
    launch.one_and_two(tmp_path, flags, 0.005, ("loss", "L", "w", "CE", "answered", "pos_cos", "neg_cos"))


ALONE = "--task qa-open --contrastive-weight 0"


def test_answers_alone_are_the_bases_of_tables_1_and_2(tmp_path, capsys):
    """--contrastive-weight 0: the loss is that of the answers; between 0 and 1 it weighs Eq. 1."""
    args = mama.parse_args(ALONE.split())
    assert (args.weighting, args.margin_schedule) == ("none", "none")
    main(tmp_path / "alone", *ALONE.split())
    said, log = capsys.readouterr().out, steps(tmp_path / "alone")
    assert "that of the answers alone" in said and [r["loss"] for r in log] == pytest.approx([r["CE"] for r in log])
    found = evaluate(tmp_path / "alone", "--tasks", "retrieval", "gap", "knn", "probe")["left_out"]
    why = "the model was trained with --contrastive-weight 0, on answers alone, not its embeddings"
    assert found == dict.fromkeys(("retrieval", "gap", "knn"), why)
    found = evaluate(tmp_path / "alone", "--tasks", "knn", "--knn-features", "backbone")  # these the answers trained
    assert not found["left_out"] and "knn@1" in found["metrics"]
    main(tmp_path / "half", *"--task qa-open --contrastive-weight 0.5 --weighting none --tau 1 --margin-schedule none"
         .split())
    row = steps(tmp_path / "half")[0]
    assert math.log(16) - 2 < row["loss"] - row["CE"] < math.log(16) + 2   # both directions, a half each
    half = mama.parse_args(["--batch-size", "16", "--contrastive-weight", "0.5"])
    assert mama.random_guess(0.0, half) == pytest.approx(math.log(16))


# ---------------------------------------------------- what is refused ------------------------------------------------
@pytest.mark.parametrize("flags, words", [
    ("--shuffle-video", "--shuffle-video: only with --task qa-open or qa-choice"),
    ("--task qa-choice --chunk-size 4", "--chunk-size: --weighting meta encodes the whole batch"),
    ("--qa-similarity fused", "--qa-similarity: only with --task qa-open or qa-choice"),
    ("--task qa-choice --qa-model vgt --qa-similarity fused", "with --qa-model fusion"),
    ("--task qa-open --qa-similarity fused --weighting none --chunk-size 4",
     "--chunk-size: --qa-similarity fused needs all videos and texts at once"),
    *((f"{ALONE} {flag}", flag.split()[0]) for flag in (
        "--tau 1", "--learnable-tau", "--margin-schedule none", "--loss mama", "--weighting focal", "--meta-size 9",
        "--qa-similarity fused")),
    ("--contrastive-weight 0", "no loss is left"), (f"{ALONE} --eta 0", "no loss is left")])
def test_bad_flags(flags, words, capsys):
    base = [] if "weight 0" in flags else of_set(BASE, flags.split())
    assert words in refused(mama.parse_args, [*base, *flags.split()], capsys)


# ---------------------------------------------------- tools.score ---------------------------------------------------
def test_scores_of_short_and_detailed_captions(runs_of, tmp_path, capsys):
    """Tables 9 and 10 of two runs: cosines of their embeddings, a csv of all, a picture of some."""
    folders = [str(runs_of[0] / name) for name in ("qa-open", "qa-choice")]

    def run(*of):
        return score.main([*of, "--out", str(tmp_path / "scores"), "--cpu", "--split", "test"])
    found, data = run(*folders), common.load_data("moving-emoji", "test", clips=(64, 24, 24))
    rows = [*score.caption_pairs(data, "")]                                # of clips with captions of two lengths
    assert found.shape == (2, len(rows), 2) and len(rows) > 12 and (tmp_path / "scores.png").is_file()
    model, tokenizer, transform = common.load_model(folders[1])
    texts = [of(data.captions(rows[5]), key=lambda c: len(c.split())) for of in (min, max)]
    with torch.no_grad():
        video, text = model(transform(data.read(rows[5]))[None], tokenizer(texts))[:2]
    assert torch.allclose(torch.tensor(found[1, 5]).float(), torch.cosine_similarity(video, text), atol=1e-4)
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert lines[0] == "video,detail,caption,qa-open,qa-choice" and len(lines) == 1 + 2 * len(rows)
    for line, kind, text in ((11, "short", texts[0]), (12, "detailed", texts[1])):
        assert lines[line].startswith(f"test {rows[5]},{kind},{text},")
    assert f"{'qa-choice':<34}{found[1, :, 0].mean():9.4f}{found[1, :, 1].mean():10.4f}" in capsys.readouterr().out
    main(tmp_path / "fewer", "--task", "qa-open", "--clips", "64", "24", "23", "--max-steps", "1")
    with pytest.raises(UserError, match="a run on other videos than"):
        run(folders[0], str(tmp_path / "fewer"))
