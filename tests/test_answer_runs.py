"""Answers to questions: runs of both tasks and of the their gradients and processes, what is refused."""

import math

import common
from contrastive import evaluation
from contrastive.engine.processes import UserError

import pytest
import torch
from safetensors.torch import load_file

import eval as eval_py
import mama
from helpers import drift, of_set, one_and_two, refused, write_rows
from helpers import steps as logged
from test_answers import data_of, model_of, words
from tools import score

CPU = torch.device("cpu")

BASE = ["--cpu", "--clips", "64", "24", "24", "--batch-size", "16", "--meta-batch-size", "8",
        "--meta-size", "24", "--log-every", "1", "--eval-every", "0", "--max-steps", "2"]


def main(folder, *flags):
    where = ["--output-dir", str(folder.parent), "--run-name", folder.name]
    return mama.main(mama.parse_args([*of_set(BASE, flags), *where, *flags]))


def evaluate(checkpoint, *flags):
    flags = ["--checkpoint", str(checkpoint), "--cpu", *flags]
    return eval_py.main(eval_py.parse_args(flags))["datasets"]["moving-emoji"]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory, without_pictures):
    """A run of each task, with the pictures of the first: (folder, {task: summary})."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mama, "draw", without_pictures[mama])
        summary = main(folder / "qa-open", "--task", "qa-open")
    return folder, {"qa-open": summary, "qa-choice": main(folder / "qa-choice", "--task", "qa-choice")}


@pytest.mark.parametrize("task", ["qa-open", "qa-choice"])
def test_a_run_and_its_checkpoint(runs_of, task, tmp_path):
    folder, summary = runs_of[0] / task, runs_of[1][task]
    test, chance = (summary[k]["moving-emoji"] for k in ("test", "chance"))
    assert test["questions"] == 24 and {"accuracy noun", "accuracy verb", "accuracy colour"} < test.keys()
    assert ("upper_bound" in test) == (task == "qa-open") and chance.keys() <= test.keys()
    assert chance["accuracy"] == pytest.approx(20) or task == "qa-open"
    for row in logged(folder):
        contrast = row["L"] - row["CE"]
        assert 0 < row["CE"] < 9 and contrast > 0 and row["loss"] == pytest.approx(row["w"] * row["L"], rel=0.2)
    model, tokenizer, transform = common.load_model(folder)
    data = common.load_data("moving-emoji", "test", clips=(64, 24, 24))
    metrics, by_chance, _ = evaluation.answers.evaluate(model, tokenizer, transform, data, CPU, batch=12)
    assert metrics == test and by_chance == chance
    found = evaluate(folder, "--output-dir", str(tmp_path))
    assert found["metrics"] == test and not found["left_out"]
    assert found["chance"] == chance and (tmp_path / "answers_moving-emoji.png").is_file()
    if task == "qa-open":
        assert (folder / "answers.png").is_file() and (folder / "curves.png").is_file()
        train = common.load_data("moving-emoji", "train", clips=(64, 24, 24))
        assert model.answers == evaluation.metrics.answer_vocabulary(train.column("answer"), 1500)


def test_scores_of_short_and_detailed_captions(runs_of, tmp_path, capsys):
    """Tables 9 and 10 of two runs: cosines of their embeddings, a csv of all, a picture of some."""
    folders = [str(runs_of[0] / name) for name in ("qa-open", "qa-choice")]

    def run(*flags, of=folders):
        return score.main([*of, "--out", str(tmp_path / "scores"), "--cpu", "--split", "test", *flags])
    found = run()
    data = common.load_data("moving-emoji", "test", clips=(64, 24, 24))
    rows = [*score.caption_pairs(data, "")]                                # of clips with captions of two lengths
    assert found.shape == (2, len(rows), 2) and len(rows) > 12 and (tmp_path / "scores.png").is_file()
    model, tokenizer, transform = common.load_model(folders[1])
    texts = [of(data.captions(rows[5]), key=lambda c: len(c.split())) for of in (min, max)]
    with torch.no_grad():
        video, text = model(transform(data.read(rows[5]))[None], tokenizer(texts))[:2]
    assert torch.allclose(torch.tensor(found[1, 5]).float(), torch.cosine_similarity(video, text), atol=1e-4)
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert lines[0] == "video,detail,caption,qa-open,qa-choice" and len(lines) == 1 + 2 * len(rows)
    assert lines[11].startswith(f"test {rows[5]},short,{texts[0]},")
    assert lines[12].startswith(f"test {rows[5]},detailed,{texts[1]},")
    assert f"{'qa-choice':<34}{found[1, :, 0].mean():9.4f}{found[1, :, 1].mean():10.4f}" in capsys.readouterr().out
    main(tmp_path / "fewer", "--task", "qa-open", "--clips", "64", "24", "23", "--max-steps", "1")
    with pytest.raises(UserError, match="a run on other videos than"):
        run(of=[folders[0], str(tmp_path / "fewer")])


def test_short_captions_of_files_are_found_by_their_names(tmp_path):
    paths = [{"path": str(tmp_path / f"{k}.mp4"), "start": None, "end": None} for k in "abc"]
    table = common.make_table([["one two", "one two three"], ["four"], ["five six"]], list("abc"), paths)
    data = common.Data("files", "test", table)
    assert score.caption_pairs(data, "") == {0: ["one two", "one two three"]}
    write_rows(tmp_path / "short.csv", ["video", "caption"], [("c.mp4", "x"), ("a.mp4", "one two three four")])
    assert score.caption_pairs(data, str(tmp_path / "short.csv")) == {2: ["x", "five six"]}
    write_rows(tmp_path / "none.csv", ["video", "caption"], [("x.mp4", "x")])
    with pytest.raises(UserError, match="none of its 1 rows matches a clip of files"):
        score.caption_pairs(data, str(tmp_path / "none.csv"))

OTHER = {"eta": ["--task", "qa-open", "--eta", "0"],
         "answers": ["--task", "qa-open", "--answers", "3"], "layers": ["--task", "qa-open", "--fusion-layers", "3"],
         "control": ["--task", "qa-open", "--shuffle-video"],
         "fused": ["--task", "qa-choice", "--qa-similarity", "fused"]}


@pytest.mark.parametrize("name", OTHER)
def test_every_flag_has_an_effect(runs_of, name, tmp_path, capsys, monkeypatch):
    asked, measure = [], evaluation.answers.evaluate
    monkeypatch.setattr(evaluation.answers, "evaluate", lambda *args: (asked.append(args[3]), measure(*args))[1])
    summary = main(tmp_path / "other", *OTHER[name])
    ours, theirs = logged(runs_of[0] / OTHER[name][1]), logged(tmp_path / "other")
    assert len(theirs) == 2 and ours[-1]["loss"] != theirs[-1]["loss"]
    if name == "answers":
        assert 0 < summary["test"]["moving-emoji"]["upper_bound"] < 50
        assert len(common.load_model(tmp_path / "other")[0].answers) == 3
    if name == "control":  # eval.py asks with the right videos, and says that it does
        assert {data.split for data in asked} == {"val", "test"}
        for data in asked:
            right = common.load_data("moving-emoji", data.split, clips=(64, 24, 24))
            assert data.column("question") == right.column("question") and not torch.equal(data.pixels, right.pixels)
        evaluate(tmp_path / "other")
        assert "the run was a control (--shuffle-video); here each question has its own" in capsys.readouterr().out
    if name == "fused":
        assert theirs[-1].keys() & {"pos_cos", "gap"} == {"pos_cos"}
        assert evaluate(tmp_path / "other", "--output-dir", str(tmp_path))["metrics"] == summary["test"]["moving-emoji"]
        tasks = "--tasks", "retrieval", "knn", "--knn-features", "backbone"
        found = evaluate(tmp_path / "other", *tasks, "--output-dir", str(tmp_path))
        assert "not its embeddings before the fusion" in found["left_out"]["retrieval"]
        with pytest.raises(UserError, match="other: its model has no trained embeddings"):
            score.main([str(tmp_path / "other"), "--out", str(tmp_path / "scores"), "--cpu"])


@pytest.mark.parametrize("task, similarity, block", [
    ("qa-open", "pooled", 0), ("qa-choice", "pooled", 0), ("qa-open", "fused", 0), ("qa-choice", "fused", 2)])
def test_meta_gradient_of_questions(task, similarity, block):
    """Forward mode is the second-order gradient of L_i with the answers' loss, in float64."""
    model = model_of(["yes", "no"] if task == "qa-open" else (), similarity=similarity).double()
    model.block, contrast = block, mama.fused_margin_loss if similarity == "fused" else mama.angular_margin_loss
    generator = torch.Generator().manual_seed(5)

    def batch(n):
        made = {"pixels": torch.randn(n, 3, 16, 16, generator=generator, dtype=torch.float64), "tokens": words(n, 6),
                "question": words(n, 5), "answers": torch.randint(0, 2, (n,), generator=generator)}
        there = torch.tensor([[True, True, k > 0] for k in range(n)])
        return made if task == "qa-open" else made | {"choices": words(n, 3, 4) | {"there": there}}
    net = mama.WeightNet(8).double()
    losses = mama.losses_of(model, 0.5, 0.2, CPU, eta=1.5, contrast=contrast)
    first, meta = batch(5), batch(4)
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    plain = mama.losses_of(model, 0.5, 0.2, CPU, eta=0.0, contrast=contrast)(parameters, first)
    scores = model(first["pixels"], first["tokens"], first["question"], first.get("choices"))[2]
    expected = plain + 1.5 * mama.answer_loss(scores, first["answers"])
    assert torch.allclose(losses(parameters, first), expected, rtol=1e-9)
    forward, second = (mama.weightnet_gradient(losses, parameters, first, meta, net, 0.1, m) for m in
                       ("forward", "second-order"))
    for a, b in zip(forward, second):
        assert a.isfinite().all() and a.any() and torch.allclose(a, b, rtol=1e-5, atol=1e-10)

SGD = "--optimizer sgd --grad-clip 0 --lr-schedule constant --warmup-epochs 0".split()  # as near as gradients are


def test_chunks_are_exact(tmp_path):
    """--chunk-size encodes questions and choices in parts: the losses and the weights of the whole batch."""
    flags = ["--task", "qa-choice", "--weighting", "none", *SGD]
    for name, chunk, lr in (("start", 0, 0), ("whole", 0, 0.02), ("parts", 5, 0.02)):
        main(tmp_path / name, *flags, "--chunk-size", str(chunk), "--lr", str(lr))
    start, whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "whole", "parts"))
    assert drift(parts, whole, start) < 0.05
    losses = [[r["loss"] for r in logged(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

def test_two_processes_are_one(tmp_path):
    """Losses, weights of the samples and accuracies, with the meta step; texts of fused pairs differ in length between
    the processes."""
    flags = [*BASE, "--task", "qa-open", "--qa-similarity", "fused", "--batch-size", "8", "--meta-batch-size", "4",
             *SGD, "--meta-every", "1", "--max-steps", "4"]
    one_and_two(tmp_path, flags, 0.005, ("loss", "L", "w", "CE", "answered", "pos_cos", "neg_cos"))


def test_what_cannot_be_asked():
    data = data_of([("0", "b", ["a", "b"]), ("1", "a", [])])
    assert not evaluation.answers.lacking(data, choices=False)
    assert "questions without choices; use --task qa-open" in evaluation.answers.lacking(data, choices=True)
    args = mama.parse_args([*of_set(BASE, ["--dataset", "emoji"]), "--dataset", "emoji", "--task", "qa-open"])
    with pytest.raises(UserError, match=r"emoji \(train\) has no questions"):
        mama.main(args)


@pytest.mark.parametrize("flags, words", [
    (["--shuffle-video"], "--shuffle-video: only with --task qa-open or qa-choice"),
    (["--task", "qa-choice", "--chunk-size", "4"], "--chunk-size: --weighting meta encodes the whole batch"),
    (["--qa-similarity", "fused"], "--qa-similarity: only with --task qa-open or qa-choice"),
    (["--task", "qa-choice", "--qa-model", "vgt", "--qa-similarity", "fused"], "with --qa-model fusion"),
    (["--task", "qa-open", "--qa-similarity", "fused", "--weighting", "none", "--chunk-size", "4"],
     "--chunk-size: --qa-similarity fused needs all videos and texts at once")])
def test_bad_flags(flags, words, capsys):
    assert words in refused(mama.parse_args, [*of_set(BASE, flags), *flags], capsys)


def test_answers_alone_are_the_bases_of_tables_1_and_2(tmp_path, capsys):
    """--contrastive-weight 0: the loss is that of the answers, and what belongs to Eq. 1 is refused; between 0 and 1 it
    weighs Eq. 1."""
    alone = "--task", "qa-open", "--contrastive-weight", "0"
    args = mama.parse_args([*alone])
    assert (args.weighting, args.margin_schedule) == ("none", "none")
    main(tmp_path / "alone", *alone)
    said = capsys.readouterr().out
    assert "that of the answers alone" in said and "mu 0" not in said
    assert [row["loss"] for row in logged(tmp_path / "alone")] == pytest.approx([r["CE"] for r in
                                                                                 logged(tmp_path / "alone")])
    found = evaluate(tmp_path / "alone", "--tasks", "probe", "retrieval", "gap", "knn")["left_out"]
    why = "the model was trained with --contrastive-weight 0, on answers alone, not its embeddings"
    assert found == dict.fromkeys(("retrieval", "gap", "knn"), why)
    found = evaluate(tmp_path / "alone", "--tasks", "knn", "--knn-features", "backbone")  # these the answers trained
    assert not found["left_out"] and "knn@1" in found["metrics"]
    main(tmp_path / "half", "--task", "qa-open", "--contrastive-weight", "0.5", "--weighting", "none", "--tau", "1",
         "--margin-schedule", "none")
    row, said = logged(tmp_path / "half")[0], capsys.readouterr().out
    assert math.log(16) - 2 < row["loss"] - row["CE"] < math.log(16) + 2 and "contrastive weight 0.5" in said
    capsys.readouterr()
    assert mama.random_guess(0.0, mama.parse_args(["--batch-size", "16", "--contrastive-weight", "0.5"])) == \
        pytest.approx(math.log(16))
    for flags in (["--tau", "1"], ["--learnable-tau"], ["--margin-schedule", "none"], ["--a0", "1"], ["--loss", "mama"],
                  ["--weighting", "focal"], ["--meta-size", "9"], ["--meta-lr", "1"], ["--qa-similarity", "fused"]):
        assert flags[0] in refused(mama.parse_args, [*alone, *flags], capsys)
    assert "no loss is left" in refused(mama.parse_args, ["--contrastive-weight", "0"], capsys)
    assert "no loss is left" in refused(mama.parse_args, [*alone, "--eta", "0"], capsys)


@pytest.mark.parametrize("weight", ["0.5", "2"])
def test_the_look_ahead_has_the_contrastive_weight(weight):
    """losses_of gives the same (B,) as a step."""
    model, generator = model_of(["yes", "no"]).double(), torch.Generator().manual_seed(5)
    batch = {"pixels": torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64), "tokens": words(4, 6),
             "question": words(4, 5), "answers": torch.tensor([0, 1, -1, 1])}
    parameters = dict(model.named_parameters())
    whole, alone = (mama.losses_of(model, 0.5, 0.2, CPU, eta, contrastive_weight=w)(parameters, batch)
                    for eta, w in ((1.0, float(weight)), (1.0, 0.0)))
    pair = mama.losses_of(model, 0.5, 0.2, CPU, eta=0.0)(parameters, batch)
    assert torch.allclose(whole, alone + float(weight) * pair)


@pytest.mark.parametrize("model, weight, expected", [("fusion", "0", "none"), ("vgt", "0", "none"),
                                                     ("vgt", "1", "pooled")])
def test_which_losses_train_the_embeddings_of_a_model(model, weight, expected):
    args = mama.parse_args(["--task", "qa-choice", "--qa-model", model, "--contrastive-weight", weight, "--clips", "9",
                            "2", "2"])
    assert evaluation.answers.questions_of(common.open_data(args)[0], args)["similarity"] == expected


@pytest.mark.parametrize("task", ["qa-open", "qa-choice"])
def test_cut_questions_and_choices_are_counted(runs_of, task, tmp_path, capsys):
    folder = runs_of[0] / task
    found = evaluate(folder, "--text-length", "6", "--output-dir", str(tmp_path))["metrics"]["texts_cut"]
    data, whole = common.load_data("moving-emoji", "test", clips=(64, 24, 24)), common.load_model(folder)[1]
    texts = data.column("question")
    if task == "qa-choice":
        texts = [f"{q} {choice}" for q, choices in zip(texts, data.column("choices")) for choice in choices]
    assert found == sum(len(ids) > 6 for ids in whole.tokenizer([*texts])["input_ids"]) > 0
    assert f", {found} texts cut" in capsys.readouterr().out
