"""Answers to questions: loss and model by hand, accuracy, runs of both tasks, their gradients and processes."""

import math

import common
from contrastive import evaluation
from contrastive.engine.processes import UserError
from contrastive.evaluation.metrics import answer_hits

import pytest
import torch
from safetensors.torch import load_file

import eval as eval_py
import mama
from helpers import drift, of_set, one_and_two, refused, write_rows
from helpers import steps as logged
from tools import figures as several
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


def test_answer_loss_against_a_loop():
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[1, 3:] = -math.inf  # a question with three choices
    right = torch.tensor([4, 2, -1, 0])
    expected = [0.0 if k < 0 else math.log(sum(math.exp(float(s - row[k])) for s in row)) for row, k in
                zip(scores, right.tolist())]
    loss = mama.answer_loss(scores, right)
    assert loss.tolist() == pytest.approx(expected, rel=1e-6) and loss[2] == 0
    leaf = scores.requires_grad_()
    mama.answer_loss(leaf, right).sum().backward()
    assert leaf.grad.isfinite().all() and not leaf.grad[2].any() and not leaf.grad[1, 3:].any()


# ---------------------------------------------------- model ----------------------------------------------------------


def model_of(choices=(), **more):
    torch.manual_seed(0)
    towers = common.VisionEncoder("small", 16, False), common.TextEncoder("small", 16, length=12, vocabulary=50)
    keywords = dict(answers=choices, frames=3) | more
    return common.QuestionAnswerer(*towers, **keywords).eval()


def clips_of(n):
    return torch.randn(n, 3, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def words(*shape, keep=None):
    ids = torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(shape, dtype=torch.long)
    if keep is not None:
        mask[..., keep:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_open_scores_look_at_question_and_frames_but_not_at_padding():
    model, clips = model_of(["yes", "no", "two"]), clips_of(2)
    question = words(2, 8, keep=5)
    video, text, scores = model(clips, None, question)
    assert scores.shape == (2, 3) and text is None
    short = {k: v[:, :5] for k, v in question.items()}
    other = question | {"input_ids": torch.cat([question["input_ids"][:, :5], words(2, 3)["input_ids"]], 1)}
    assert torch.allclose(model(clips, None, short)[2], scores, atol=1e-5)
    assert torch.allclose(model(clips, None, other)[2], scores, atol=1e-5)
    assert not torch.allclose(model(clips, None, words(2, 8))[2], scores, atol=1e-3)
    assert not torch.allclose(model(clips.flip(1), None, question)[2], scores, atol=1e-3)  # the order of time
    plain = model(clips, question)  # without a question: two towers
    assert torch.allclose(plain[0], video, atol=1e-6) and plain[2].shape == (2, 128)


@torch.no_grad()
def test_scores_of_choices():
    """Each choice by itself gives the score that it has among others; absent ones are -inf."""
    model, clips = model_of(), clips_of(2)
    choices = words(2, 4, 6) | {"there": torch.tensor([[True] * 4, [True, True, False, False]])}
    scores = model(clips, words(2, 5), words(2, 5), choices)[2]
    assert scores.shape == (2, 4) and scores.isneginf().tolist() == (~choices["there"]).tolist()
    for b, c in choices["there"].nonzero().tolist():
        alone = {k: choices[k][b:b + 1, c:c + 1] for k in ("input_ids", "attention_mask")}
        single = model(clips[b:b + 1], None, words(1, 5), alone)[2]
        assert torch.allclose(single[0, 0], scores[b, c], atol=1e-4)


@torch.no_grad()
def test_video_swin_gives_a_token_for_two_frames():
    tower = common.VisionEncoder("swin3d_t", 8, pretrained=False).eval()
    clips = torch.randn(1, 5, 3, 32, 32)
    frames, (features, embedding) = tower.frames(clips), tower(clips)
    assert frames.shape == (3, tower.width) and torch.allclose(features, frames.mean(0, keepdim=True), atol=1e-5)
    assert embedding.shape == (1, 8)


def test_fused_cosines_are_those_of_each_pair_alone():
    """One pass for all pairs, in blocks or not, against a double loop; so is the loss, and its gradient is finite."""
    model, clips = model_of(["yes", "no"], similarity="fused", layers=2).double(), clips_of(4).double()
    tokens, question = words(4, 6), words(4, 5)
    for row, length in enumerate((6, 3, 5, 1)):
        tokens["attention_mask"][row, length:] = 0
    assert not torch.equal(model(clips, None, question)[0], model(clips, tokens, question)[0])
    video, text, scores = model(clips, tokens, question)
    assert video.shape == text.shape == (4, 4) and torch.equal(video, text.T) and scores.shape == (4, 2)
    frames = model.vision.frames(clips).unflatten(0, (4, 3))
    for i in range(4):
        for j, length in enumerate(tokens["attention_mask"].sum(1).tolist()):
            short = {k: v[j:j + 1, :length] for k, v in tokens.items()}
            v, t = model.fuse(model.pair, frames[i:i + 1], model.text.words(**short)[0], short["attention_mask"])[0]
            assert torch.cosine_similarity(v, t, 0).item() == pytest.approx(video[i, j].item(), abs=1e-9)
    losses, mu, tau = mama.fused_margin_loss(video, text, 0.5, 0.3), 0.3, 0.5
    for i in range(4):
        expected = 0.0
        for row in (video[i], video[:, i]):
            angle = math.acos(row[i].item())
            near = math.cos(max(angle - mu, 0)) if angle <= math.pi / 2 else row[i].item()
            others = sum(math.exp(row[k].item() / tau) for k in range(4) if k != i)
            expected += math.log(math.exp(near / tau) + others) - near / tau
        assert losses[i].item() == pytest.approx(expected, rel=1e-6)
    gradients = []
    for model.block in (0, 1, 3):
        model.zero_grad()
        mama.fused_margin_loss(*model(clips, tokens, question)[:2], 0.5, 0.3).sum().backward()
        gradients.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    for name in ("pair", "place", "frame.weight", "fusion.0.qkv.weight", "text.body.token.weight"):
        whole = gradients[0][name]
        assert whole.isfinite().all() and whole.any()
        assert all(torch.allclose(whole, parts[name], rtol=1e-6, atol=1e-12) for parts in gradients[1:])


# ---------------------------------------------------- accuracy -------------------------------------------------------


def test_a_hit_is_the_highest_score_and_ties_are_none():
    inf = float("inf")
    scores = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.5, 0.1], [2.0, 1.0, -inf], [0.0, 0.0, 0.0], [3.0, 1.0, 2.0]])
    assert answer_hits(scores, torch.tensor([1, 0, 0, 2, -1])).tolist() == [True, False, True, False, False]
    assert answer_hits(scores[:1].half(), torch.tensor([0])).tolist() == [False]
    for bad in (float("nan"), inf):
        with pytest.raises(ValueError, match="non-finite"):
            answer_hits(torch.tensor([[bad, 0.0]]), torch.tensor([1]))


def test_the_vocabulary_is_of_the_most_frequent_answers():
    answers = ["two", "dog", "cat", "two", "cat", "two", "ant"]
    assert evaluation.metrics.answer_vocabulary(answers) == ["two", "cat", "ant", "dog"]
    vocabulary = evaluation.metrics.answer_vocabulary(answers, 2)
    table = common.make_table([["x"]] * 3, "abc", ["x"] * 3, answer=["cat", "dog", "two"], choices=[["a", "cat"]] * 3)
    data = common.Data("some", "test", table)
    assert evaluation.answers.right_answers(data, range(3), vocabulary).tolist() == [1, -1, 0]
    assert evaluation.answers.right_answers(data, range(2), []).tolist() == [1, -1]


def test_accuracy_by_hand():
    assert evaluation.metrics.question_metrics([True, False, True, True]) == {"accuracy": 75.0}
    known = [True, False, True, True, False]  # two answers are not in the vocabulary: wrong, and the bound is 60
    assert evaluation.metrics.question_metrics([1, 0, 0, 1, 0], known=known) == {"accuracy": 40.0, "upper_bound": 60.0}
    types = ["causal why", "causal how", "causal why", "temporal next", "descriptive"]
    assert evaluation.metrics.question_metrics([1, 1, 0, 0, 1], types) == {
        "accuracy": 60.0, "accuracy causal": pytest.approx(200 / 3), "accuracy causal how": 100.0,
        "accuracy causal why": 50.0, "accuracy descriptive": 100.0, "accuracy temporal": 0.0,
        "accuracy temporal next": 0.0}


def test_answer_and_reason_must_both_be_right():
    """Causal-VidQA: four questions a video in the mean of all, predictive and counterfactual right by both halves."""
    types = ["descriptive", "explanatory", "predictive answer", "predictive reason", "counterfactual answer",
             "counterfactual reason"]
    hits = [[1, 0, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0]]
    pairs = [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 7]
    found = evaluation.metrics.question_metrics(sum(hits, []), types * 2, pairs)
    assert found == {
        "accuracy": 50.0,  # descriptive 2, explanatory 1, predictive 1, counterfactual 0 of 8
        "accuracy descriptive": 100.0, "accuracy explanatory": 50.0, "accuracy predictive": 50.0,
        "accuracy predictive answer": 50.0, "accuracy predictive reason": 100.0, "accuracy counterfactual": 0.0,
        "accuracy counterfactual answer": 50.0, "accuracy counterfactual reason": 0.0}
    chance = evaluation.metrics.question_metrics([1 / 5] * 12, types * 2, pairs)  # of a random choice among five
    assert chance["accuracy"] == pytest.approx(100 * (0.2 + 0.2 + 0.04 + 0.04) / 4)
    assert chance["accuracy predictive"] == pytest.approx(4.0) and chance["accuracy predictive reason"] == 20.0


def data_of(asked, types=None, pairs=None, split="test"):
    """asked: (question, answer, choices) for each row; the clips differ."""
    columns = dict(zip(("question", "answer", "choices"), map(list, zip(*asked))))
    columns |= {"question_type": types} if types else {}
    columns |= {"pair": pairs} if pairs else {}
    table = common.make_table([[q] for q, *_ in asked], [f"row {i}" for i in range(len(asked))], **columns)
    pixels = torch.arange(len(asked) * 2 * 3 * 64, dtype=torch.uint8).view(len(asked), 2, 3, 8, 8)
    return common.Data("asked", split, table, pixels=pixels)


class Told(torch.nn.Module):
    """Scores by the questions it was told, in place of a model; a question is its own number."""

    def __init__(self, scores, known):
        super().__init__()
        self.scores, self.answers = torch.tensor(scores), known

    def forward(self, pixels, tokens=None, question=None, choices=None):
        rows = question["input_ids"][:, 0]
        found = self.scores[rows]
        if choices is not None:
            there = choices["there"]
            found = found[:, :there.shape[1]].masked_fill(~there, -math.inf)
        return pixels.flatten(1)[:, :4].float(), None, found


def number(texts):
    return {"input_ids": torch.tensor([[int(t.split()[0])] for t in texts]),
            "attention_mask": torch.ones(len(texts), 1, dtype=torch.long)}


number.cut = lambda texts: 0


def scored(model, data, batch=256):
    view = common.EvalTransform(8, (0, 0, 0), (1, 1, 1))
    return evaluation.answers.evaluate(model, number, view, data, CPU, batch=batch)


def test_accuracy_of_open_answers_by_hand():
    data = data_of([("0", "cat", []), ("1", "dog", []), ("2", "emu", []), ("3", "cat", []), ("4", "dog", [])],
                   types=["what", "what", "who", "who", "who"])
    assert evaluation.metrics.answer_vocabulary(data.column("answer"), 2) == ["cat", "dog"]
    scores = [[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 2.0]]  # right, wrong, unknown, tie, right
    metrics, chance, pieces = scored(Told(scores, ["cat", "dog"]), data, batch=4)
    assert (metrics["accuracy"], metrics["upper_bound"], metrics["questions"]) == (40, 80, 5)
    assert (metrics["accuracy what"], metrics["accuracy who"]) == (50, pytest.approx(100 / 3))
    assert (chance["accuracy"], chance["accuracy what"]) == (40, 50)  # always "cat"
    assert pieces["given"] == ["cat", "cat", "cat", "cat", "dog"] and pieces["hits"].tolist() == [1, 0, 0, 0, 1]


def test_accuracy_of_choices_by_hand_and_of_pairs(capsys):
    """Causal-VidQA's rule: answer and reason must both be right."""
    four = ["a", "b", "c", "d"]
    data = data_of([("0", "b", four), ("1", "a", four), ("2", "c", ["a", "c"]), ("3", "a", ["a", "b"])],
                   ["predictive answer", "predictive reason", "predictive answer", "predictive reason"], [0, 0, 1, 1])
    scores = [[0.0, 1, 0, 0], [0.0, 1, 0, 0], [0.0, 1, 9, 9], [1.0, 0, 9, 9]]
    metrics, chance, pieces = scored(Told(scores, []), data, batch=3)  # batches with four and with two choices
    assert (metrics["accuracy"], metrics["accuracy predictive"]) == (50, 50)
    assert (metrics["accuracy predictive answer"], metrics["accuracy predictive reason"]) == (100, 50)
    assert chance["accuracy"] == pytest.approx(100 * (1 / 16 + 1 / 4) / 2) and "upper_bound" not in metrics
    assert pieces["given"] == ["b", "b", "c", "a"]
    metrics, chance, pieces = scored(Told(scores, []), data.select([1, 2, 3]))  # half of the first pair is gone
    assert (metrics["accuracy"], metrics["questions"], pieces["given"]) == (100, 2, ["c", "a"])
    assert chance["accuracy"] == 25 and "1 of 3 questions are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="no question has both its answer and its reason"):
        scored(Told(scores, []), data.select([0, 2]))


def test_inputs_of_rows():
    data = data_of([("0", "b", ["a", "b", "c"]), ("1", "a", ["b", "a"])])
    seen = []

    def tokenizer(texts):
        seen.append(texts)
        return {"input_ids": torch.zeros(len(texts), 2), "attention_mask": torch.ones(len(texts), 2)}
    found = evaluation.answers.inputs(data, [1, 0], tokenizer, [], CPU)
    assert seen == [["1", "0"], ["1 b", "1 a", "1 ", "0 a", "0 b", "0 c"]]
    assert found["answers"].tolist() == [1, 1] and found["choices"]["there"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found["choices"]["input_ids"].shape == (2, 3, 2) and found["question"]["input_ids"].shape == (2, 2)
    assert evaluation.answers.inputs(data, [1, 0], tokenizer, ["a"], CPU)["answers"].tolist() == [0, -1]


def test_shuffled_videos_are_all_of_others():
    data = common.load_data("moving-emoji", "val", clips=(64, 24, 24))
    other = evaluation.answers.shuffled(data)
    assert other.column("question") == data.column("question") and other.column("key") == data.column("key")
    assert not any(torch.equal(a, b) for a, b in zip(other.pixels, data.pixels))
    assert sorted(x.sum().item() for x in other.pixels) == sorted(x.sum().item() for x in data.pixels)


# ---------------------------------------------------- runs -----------------------------------------------------------


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
    assert score.short_captions(data, "") == ["one two", "four", "five six"]
    assert score.caption_pairs(data, "") == {0: ["one two", "one two three"]}
    write_rows(tmp_path / "short.csv", ["video", "caption"], [("c.mp4", "x"), ("a.mp4", "one two three four")])
    assert score.short_captions(data, str(tmp_path / "short.csv")) == ["one two three four", "", "x"]
    assert score.caption_pairs(data, str(tmp_path / "short.csv")) == {2: ["x", "five six"]}
    write_rows(tmp_path / "none.csv", ["video", "caption"], [("x.mp4", "x")])
    with pytest.raises(UserError, match="none of its 1 rows matches a clip of files"):
        score.short_captions(data, str(tmp_path / "none.csv"))

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


def test_answers_are_concepts(runs_of):
    """Fig. 5 of a run with questions: a hit is a right answer."""
    folder, summaries = runs_of
    for task in ("qa-open", "qa-choice"):
        concept, right, _, _ = several.hits(folder / task)
        accuracy = summaries[task]["test"]["moving-emoji"]["accuracy"]
        assert len(concept) == len(right) == 24 and 100 * right.mean() == pytest.approx(accuracy)


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


@pytest.mark.parametrize("model, weight, expected", [("fusion", "0", "none"), ("vgt", "0", "none"),
                                                     ("vgt", "1", "pooled")])
def test_which_losses_train_the_embeddings_of_a_model(model, weight, expected):
    args = mama.parse_args(["--task", "qa-choice", "--qa-model", model, "--contrastive-weight", weight, "--clips", "9",
                            "2", "2"])
    assert evaluation.answers.questions_of(common.open_data(args)[0], args)["similarity"] == expected


@pytest.mark.parametrize("task", ["qa-open", "qa-choice"])
def test_cut_questions_and_choices_are_counted(runs_of, task, tmp_path, capsys):
    asked = "--checkpoint", runs_of[0] / task, "--cpu", "--text-length", "6", "--output-dir", tmp_path
    found = eval_py.main(eval_py.parse_args([*map(str, asked)]))["datasets"]["moving-emoji"]["metrics"]["texts_cut"]
    data, whole = common.load_data("moving-emoji", "test", clips=(64, 24, 24)), common.load_model(runs_of[0] / task)[1]
    texts = data.column("question")
    if task == "qa-choice":
        texts = [f"{q} {choice}" for q, choices in zip(texts, data.column("choices")) for choice in choices]
    assert found == sum(len(ids) > 6 for ids in whole.tokenizer([*texts])["input_ids"]) > 0
    assert f", {found} texts cut" in capsys.readouterr().out


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
