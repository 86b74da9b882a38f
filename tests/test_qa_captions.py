"""Questions about videos beside captions of a vision-language model (MAMA, Eq. 3 and Sec. 3.3): further captions of
the videos that are asked about, and further pairs without a question, whose eta is 0."""

import json
import shutil

import common
from contrastive import data as data_sets
from contrastive.data.table import with_column
from contrastive.encoders.texts import Tokenizer
from contrastive.engine.processes import UserError
from contrastive.evaluation import answers
from contrastive.evaluation.meta import meta_data

import pytest
import torch
from safetensors.torch import load_file

import launch
import mama
from helpers import drift, equal_files, run_script, write_rows, write_video
from helpers import steps as logged
from test_caption import SMALL, tiny_model
from tools import caption

CPU = torch.device("cpu")
LAYOUT = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()
HOW = ("--workers 0 --cpu --image-encoder small --text-encoder small --no-pretrained --embed-dim 16 "
       "--image-size 32 --frames 2 --text-length 16 --eval-every 0 --log-every 1").split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Six videos with three questions each, two more for val and test, four that nobody asks about; the captions that
    tools/caption.py writes for the training clips and for those four."""
    root = tmp_path_factory.mktemp("asked")
    for k in range(12):
        write_video(root / ("videos" if k < 8 else "more") / f"video{k}.mp4", [20 * k, 20 * k + 1, 20 * k + 2])
    parts = {"train": range(6), "val": [6], "test": [7]}
    for split, videos in parts.items():
        asked = [{"answer": "abc"[(k + q) % 3], "id": 3 * k + q, "question": f"what is number {k}, {q}", "video_id": k}
                 for k in videos for q in range(3)]
        (root / f"{split}_qa.json").write_text(json.dumps(asked))
        write_rows(root / f"{split}.csv", LAYOUT, [
            (f"video{r['video_id']}", 3, 96, 64, r["question"], "abc".index(r["answer"]), r["id"],
             ["CW", "DO"][r["id"] % 2], *"abcde") for r in asked])
    model = tiny_model("llava", root / "llava")
    for out, flags in (("own.csv", ["--dataset", "msrvtt-qa", "--data-dir", root, "--video-dir", root / "videos"]),
                       ("more.csv", ["--dataset", root / "more"])):
        caption.main([*map(str, flags), "--out", str(root / out), "--model", model, *SMALL])
    return root


def opened(files, name="msrvtt-qa", more=()):
    """(training data, evaluation sets) of mama.py's flags."""
    return data_sets.open_data(mama.parse_args([*flags_of(files, name), *more]))


def flags_of(files, name="nextqa"):
    return [str(x) for x in ("--dataset", name, "--data-dir", files, "--video-dir", files / "videos", *HOW,
                             "--batch-size", "10", "--meta-batch-size", "4", "--meta-size", "8")]


@pytest.mark.parametrize("more", [[], ["--extra-captions", "own.csv"]])
def test_questions_are_not_ranked_as_captions(files, more, tmp_path):
    """--task retrieval: they are the captions of these rows, of all or of those without a caption of their own."""
    more = [str(files / word) if word.endswith("csv") else word for word in more]
    train, _ = opened(files, "msrvtt-qa", more)
    if more:                                                               # a row that nobody has described
        train = with_column(train, "captions", [[q] if k == 3 else c for k, (q, c) in
                                                enumerate(zip(train.column("question"), train.column("captions")))])
    with pytest.raises(UserError, match="--task retrieval: msrvtt-qa has questions in place of captions"):
        mama.answers.questions_of(train, mama.parse_args([*flags_of(files, "msrvtt-qa"), "--task", "retrieval"]))



def extra(files, *names):
    """The flags of the two ways."""
    flags = {"captions": ["--extra-captions", files / "own.csv"],
             "pairs": ["--extra-pairs", f"{files / 'more.csv'}={files / 'more'}"]}
    return [str(x) for name in names for x in flags[name]]


# ---------------------------------------------------- data ----------------------------------------------------------
def test_all_questions_about_a_video_take_its_caption(files):
    plain, _ = opened(files)
    data, evals = opened(files, more=extra(files, "captions"))
    written = {row["video"]: row["caption"] for row in common.load_data(
        str(files / "own.csv"), "train", video_dir=str(files / "videos")).table.map(
            lambda r: {"video": r["key"], "caption": r["captions"][0]})}
    assert len(data) == len(plain) == 18 and "18 captions added from own.csv" in data.note
    for i in range(18):
        assert plain.captions(i) == [plain.column("question")[i]]
        assert data.captions(i) != [data.column("question")[i]] and len(data.captions(i)) == 1
        assert data.captions(i) == data.captions(i - i % 3) and data.key(i) == plain.key(i)
    assert {data.captions(i)[0] for i in range(0, 18, 3)} >= {*written.values()} and len(written) >= 1
    assert evals["msrvtt-qa"]["test"].captions(0) == ["what is number 7, 0"]


def test_a_caption_stands_for_one_question_in_place_of_it_and_windows_count(tmp_path):
    """Several captions of one video; a window that no row has; a name that two folders have."""
    for name in ("c", "x/a", "y/a", "b"):
        write_video(tmp_path / "videos" / f"{name}.mp4", [1, 2, 3])
    paths = [str(tmp_path / "videos" / f"{name}.mp4") for name in ("c", "c", "y/a", "b", "x/a")]
    data = common.Data("asked", "train", common.make_table(
        [[q] for q in "stuvw"], list("01234"), paths, question=list("stuvw"), answer=list("pppqq")))
    from contrastive.data import add_captions
    file = write_rows(tmp_path / "c.csv", ["video", "start", "end", "caption"], [
        ("c.mp4", "", "", "one"), ("c.mp4", "", "", "two"), ("b.mp4", "0", "1", "of no window")])
    found = add_captions(data, file)
    assert [found.captions(i) for i in range(4)] == [["one", "two"], ["one", "two"], ["u"], ["v"]]
    assert "4 captions added from c.csv; 1 of its rows match no training clip" in found.note
    with pytest.raises(UserError, match="x/a.mp4 may be any of .*x/a.mp4, .*y/a.mp4"):
        add_captions(data, write_rows(tmp_path / "e.csv", ["video", "caption"], [("x/a.mp4", "of which?")]))
    inside = common.make_table([["p"], ["q"]], ["0", "1"], [{"path": "image.png", "bytes": b"x"}] * 2)
    with pytest.raises(UserError, match="none of its 1 rows matches a clip"):  # one name for all is none
        add_captions(common.Data("x", "train", inside), write_rows(tmp_path / "d.csv", ["image", "caption"],
                                                                    [("image.png", "x")]))


@pytest.mark.parametrize("name", ["msrvtt-qa", "nextqa"])
def test_pairs_beside_questions_have_none(files, name):
    """Their answers are -1 and cost nothing; banner, vocabulary and guess leave them out; meta-data have questions."""
    own, _ = opened(files, name)
    flags = extra(files, "captions", "pairs")
    args = mama.parse_args([*flags_of(files, name), *flags])
    data, evals = opened(files, name, flags)
    extras = len(data) - 18
    assert 1 <= extras <= 4 and data.column("question")[18:] == [None] * extras
    assert f"{extras} more pairs" in data.note
    assert data.column("question")[:18] == own.column("question") and len(answers.asked(data)) == 18
    assert answers.asked(own) is own and len(answers.asked(data.select([0, 18, 5]))) == 2
    questions = answers.questions_of(data, args)
    assert questions["answers"] == (["a", "b", "c"] if name == "msrvtt-qa" else [])
    guess = torch.tensor(3.0 if name == "msrvtt-qa" else 5.0).log().item() * 18 / len(data)
    assert answers.guess_of(data, questions) == pytest.approx(guess) and answers.guess_of(data, None) == 0
    assert not answers.lacking(data, name == "nextqa")
    tokenizer = Tokenizer(common.train_wordpiece(answers.texts(data)), 16)
    line = answers.question_lines(questions, data, args)["paired text"]
    assert line == f"of {len(data)} rows {len(data)} have a caption, 0 use the question in its place; {extras} " \
                   "have no question, and eta 0"
    line = answers.question_lines(questions, own, args)["paired text"]
    assert line == "of 18 rows 0 have a caption, 18 use the question in its place"
    asked = answers.inputs(data, [18, 0], tokenizer, questions["answers"], CPU)
    assert asked["answers"].tolist() == [-1, 0]
    if name == "nextqa":
        assert asked["choices"]["there"].sum(1).tolist() == [1, 5]
    meta, _ = meta_data(data, evals, name, "train", 8, 4, args.task)
    assert None not in meta.column("question") and len(meta) == 8


@pytest.mark.parametrize("name", ["msrvtt-qa", "nextqa"])
def test_the_loss_is_equation_3(files, name, monkeypatch):
    """L_i is the contrast of a pair without a question, and with eta CE_i for the others; the gradient is finite, and
    that of the loop; the text of Eq. 1 is the caption, that of Eq. 2 the question."""
    data, _ = opened(files, name, extra(files, "captions", "pairs"))
    args = mama.parse_args([*flags_of(files, name), *extra(files, "captions", "pairs")])
    questions = answers.questions_of(data, args)
    tokenizer = Tokenizer(common.train_wordpiece(answers.texts(data)), 16)
    rows = [18, 0, 4, 18]
    batch = {"views": [torch.randn(4, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))], "rows": rows,
             "captions": [data.captions(i) for i in rows], "draws": torch.zeros(4, 32).numpy()}
    inputs = mama.inputs_of(batch, tokenizer, CPU, data, questions)
    for k, i in enumerate(rows):
        for words, part in ((data.captions(i)[0], "tokens"), (data.column("question")[i], "question")):
            if words is not None:
                wanted = tokenizer([words])["input_ids"][0]
                assert inputs[part]["input_ids"][k][:len(wanted)].tolist() == wanted.tolist()
    torch.manual_seed(0)
    keywords = {k: v for k, v in questions.items() if k != "frames"}
    model = common.QuestionAnswerer(
        common.VisionEncoder("small", 16, False), common.TextEncoder("small", 16, length=16,
        vocabulary=len(tokenizer.tokenizer)), frames=2, **keywords)
    losses = mama.losses_of(model, 0.5, 0.2, CPU, eta=1.5)
    theta = {k: p for k, p in model.named_parameters() if p.requires_grad}
    video, text, scores = model(inputs["pixels"], inputs["tokens"], inputs["question"], inputs.get("choices"))
    contrast = mama.angular_margin_loss(video, text, 0.5, 0.2)
    known = [3, 3] if name == "msrvtt-qa" else [5, 5]
    right = [inputs["answers"][k] for k in (1, 2)]
    ce = [-(scores[k, :n] - scores[k, :n].logsumexp(0))[r] for k, n, r in zip((1, 2), known, right)]
    total = (contrast.sum() + 1.5 * sum(ce)) / 4                           # the mean of all rows, eta_i of two is 0
    found = losses(theta, inputs)
    assert found.mean().item() == pytest.approx(total.item(), rel=1e-5)
    assert torch.allclose(found[[0, 3]], contrast[[0, 3]], rtol=1e-5)
    ours, theirs = (torch.autograd.grad(x, list(theta.values()), allow_unused=True) for x in (found.mean(), total))
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None) and (a is None or a.isfinite().all() and torch.allclose(a, b, atol=1e-6))
    told = torch.zeros_like(scores).index_put((torch.tensor([1, 2]), torch.stack(right)), torch.tensor([9.0, -9.0]))
    numbers = answers.numbers(told, inputs["answers"], mama.answer_loss(scores, inputs["answers"]), rows, data, CPU)
    assert numbers["CE"] == pytest.approx(sum(c.item() for c in ce) / 4, rel=1e-5)
    assert numbers["answered"] == pytest.approx(50)                        # of the two questions
    alone = answers.numbers(scores[:1], inputs["answers"][:1], torch.zeros(1), [18], data, CPU)
    assert alone == {"CE": 0}                                              # no question: nothing is right or wrong
    net = mama.WeightNet(8)
    meta = mama.inputs_of(batch | {"rows": [0, 4, 7, 9], "captions": [data.captions(i) for i in (0, 4, 7, 9)]},
                          tokenizer, CPU, data, questions)
    forward, second = (mama.weightnet_gradient(losses, theta, inputs, meta, net, 0.1, m)
                       for m in ("forward", "second-order"))
    for a, b in zip(forward, second):
        assert a.isfinite().all() and a.any() and (a - b).norm() < 1e-3 * b.norm()


# ---------------------------------------------------- runs ----------------------------------------------------------
SGD = "--optimizer sgd --grad-clip 0 --lr-schedule constant --warmup-epochs 0".split()


def test_two_processes_are_one(files, tmp_path):
    """Where one process has more questions than the other: losses, weights, what is answered, the towers."""
    flags = [*flags_of(files, "msrvtt-qa"), *extra(files, "captions", "pairs"), *SGD, "--max-steps", "4",
             "--output-dir", str(tmp_path)]
    for run, processes, lr in (("start", 1, 0), ("one", 1, 0.02), ("two", 2, 0.02)):
        launch.finish("mama", [*flags, "--lr", lr, "--run-name", run], tmp_path / f"{run}.txt", processes)
    one, two = (logged(tmp_path / run) for run in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        for k in ("loss", "L", "w", "CE", "answered"):
            assert b[k] == pytest.approx(a[k], rel=1e-2, abs=1e-4), k
    start, a, b = (load_file(tmp_path / run / "model.safetensors") for run in ("start", "one", "two"))
    assert drift(b, a, start) < 0.1


def test_a_run_goes_on_bitwise(files, tmp_path, capsys):
    """The weights of three steps, and of two of them resumed from the first one's checkpoint."""
    flags = [*flags_of(files), *extra(files, "captions", "pairs"), "--max-steps", "3", "--save-every", "1"]
    for name in ("whole", "cut"):
        summary = run_script(mama, tmp_path / name, *flags)
    assert "have no question, and eta 0" in capsys.readouterr().out
    assert summary["test"]["nextqa"]["questions"] == 3
    assert all(0 < r["w"] < 1 and r["CE"] > 0 and 0 <= r["answered"] <= 100 for r in logged(tmp_path / "cut"))
    (tmp_path / "cut" / "checkpoints" / "step_3.pt").unlink()
    (tmp_path / "cut" / "model.safetensors").unlink()
    mama.main(mama.parse_args(["--resume", str(tmp_path / "cut")]))
    assert equal_files(*(tmp_path / name / "checkpoints/step_3.pt" for name in ("whole", "cut")))


def test_what_has_only_questions_is_no_pair(files, tmp_path):
    """--extra-pairs of a set of questions is refused with the reason."""
    for k in range(3):
        write_video(tmp_path / f"v{k}.mp4", [k, 1])
    write_rows(tmp_path / "own.csv", ["video", "caption", "split"],
               [(f"v{k}.mp4", "x y", s) for k, s in enumerate(("train", "val", "test"))])
    more = tmp_path / "questions"
    shutil.copytree(files / "videos", more)
    shutil.copy(files / "train_qa.json", more)
    args = mama.parse_args(["--dataset", str(tmp_path / "own.csv"), "--extra-pairs", f"msrvtt-qa={more}"])
    with pytest.raises(UserError, match="only joins files with captions"):
        data_sets.open_data(args)
