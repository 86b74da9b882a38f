"""Further captions of a set's clips and further pairs beside it, also beside questions (MAMA, Eq. 3 and Sec. 3.3)."""

import argparse
import json
import math

import common
from contrastive import data as data_sets
from contrastive.encoders.texts import Tokenizer
from contrastive.engine.processes import UserError
from contrastive.evaluation import answers
from contrastive.evaluation.meta import meta_data

import pytest
import torch
from PIL import Image

import mama
from helpers import one_and_two, write_rows, write_video


def test_extra_captions_of_training_clips(tmp_path, capsys):
    """By file name and window, in any folder; what matches nothing is counted."""
    for k, name in enumerate(["x/e", "y/a", "b", "c"]):
        write_video(tmp_path / "videos" / f"{name}.mp4", [k, k + 1, k + 2])
    (tmp_path / "msrvtt").mkdir()
    rows = [("x/e.mp4", None, None, "one"), ("y/a.mp4", None, None, "two"), ("b", 0.0, 0.1, "three"),
            ("b", 0.1, 0.3, "four"), ("c", None, None, "five")]
    write_rows(tmp_path / "train_9k.json", ["video", "start", "end", "caption"], rows)
    write_rows(tmp_path / "more.csv", ["video", "start", "end", "caption"], [
        ("e.mp4", "", "", "first"), ("b.mp4", "0.1", "0.3", "second"), ("b.mp4", "0.1", "0.3", "four"),
        ("b.mp4", "", "", "of no window"), ("d.mp4", "", "", "of no clip"),
        ("c", "", "", "third, with a comma")])
    options = {"data_dir": str(tmp_path), "video_dir": str(tmp_path / "videos"), "frames": 2}
    data = common.load_data("msrvtt", "train", extra_captions=str(tmp_path / "more.csv"), **options)
    assert [data.captions(i) for i in range(5)] == [["one", "first"], ["two"], ["three"], ["four", "second"],
                                                    ["five", "third, with a comma"]]
    assert "3 captions added from more.csv; 2 of its rows match no training clip, first b.mp4" in data.note
    plain = common.load_data("msrvtt", "train", **options)
    assert [plain.captions(i) for i in range(5)] == [["one"], ["two"], ["three"], ["four"], ["five"]]
    assert torch.equal(data.read(3), plain.read(3)) and list(data.keys()) == list(plain.keys())
    unfolded = common.load_data("msrvtt", "train", extra_captions=str(tmp_path / "more.csv"), unfold_captions=True,
                                **options)
    assert len(unfolded) == 8 and unfolded.captions(1) == ["first"] and torch.equal(unfolded.read(1), plain.read(0))
    write_rows(tmp_path / "none.csv", ["video", "caption"], [("d.mp4", "x")])
    with pytest.raises(UserError, match="none of its 1 rows matches a clip of msrvtt"):
        common.load_data("msrvtt", "train", extra_captions=str(tmp_path / "none.csv"), **options)
    for header, words in (("name,caption", "--image-column: none of video, video_path"),
                          ("video,words", "--caption-column: none of caption, captions")):
        (tmp_path / "odd.csv").write_text(f"{header}\nx,y\n")
        with pytest.raises(UserError, match=f"^{words}.* is there; there are: {header.replace(',', ', ')}$"):
            data_sets.add_captions(plain, tmp_path / "odd.csv")
    drawn = common.Data("drawn", "train", common.make_table([["x"]], ["0"]), pixels=torch.zeros(1, 2, 3, 8, 8).byte())
    with pytest.raises(UserError, match="drawn has no files of its own"):
        data_sets.add_captions(drawn, tmp_path / "more.csv")


def pairs_of(tmp_path, more, evals=(), **flags):
    """The training split of tmp_path/own.csv with --extra-pairs `more`."""
    args = argparse.Namespace(**({"video_dir": str(tmp_path), "frames": 2} | flags))
    own = {k: getattr(args, k) for k in ("video_dir", "frames", "unfold_captions") if hasattr(args, k)}
    data = common.load_data(str(tmp_path / "own.csv"), "train", **own)
    return data, data_sets.add_pairs(data, more, args, {"x": dict(evals)})


def test_captions_of_more_pairs_are_joined_as_those_of_the_set(tmp_path):
    splits = ["train", "train", "val", "test"]
    for name, first in (("own", 0), ("more", 4)):
        for k in range(first, first + 4):
            write_video(tmp_path / f"v{k}.mp4", [k, k + 1, k + 2])
        rows = [(f"v{first + k}.mp4", f"{name} {k} {w}", splits[k]) for k in range(4) for w in ("one", "two")]
        write_rows(tmp_path / f"{name}.csv", ["video", "caption", "split"], rows)
    _, both = pairs_of(tmp_path, str(tmp_path / "more.csv"), join_captions=True)
    assert both.captions(2) == ["more 0 one more 0 two"] and len(both) == 4


def test_pairs_of_another_set_join_training(tmp_path):
    """Their rows stand behind the set's own, read as they are alone; clips of the evaluation are left out by name."""
    for k, name in enumerate(["v0", "v1", "v2", "v3", "v4", "v5", "more/w0", "more/w1", "more/v9"]):
        write_video(tmp_path / f"{name}.mp4", [k, k + 1, k + 2])
    write_rows(tmp_path / "own.csv", ["video", "caption", "label", "split"],
               [(f"v{k}.mp4", f"own {k}", "ab"[k % 2], ("train", "val", "test")[max(0, k - 3)]) for k in range(6)])
    speech = {v: {"start": [0.0, 0.1], "end": [0.1, 0.3], "text": [f"{v} one", f"{v} two"]} for v in ("w0", "w1", "v9")}
    (tmp_path / "more" / "caption.json").write_text(json.dumps(speech))
    held = common.Data("x", "test", common.make_table([["t"]], ["0"], [str(tmp_path / "elsewhere" / "v9.mp4")]))
    data, both = pairs_of(tmp_path, f"howto100m={tmp_path / 'more'}", {"test": held})
    alone = common.load_data("howto100m", "train", video_dir=str(tmp_path / "more"), frames=2)
    kept = [i for i in range(len(alone)) if not alone.key(i).startswith("v9")]
    assert len(data) == 4 and len(kept) == 4 and len(both) == 8 and both.own is data and data.own is None
    for i in range(4):
        assert both.captions(i) == data.captions(i) and torch.equal(both.read(i), data.read(i))
        assert both.captions(4 + i) == alone.captions(kept[i])
        assert torch.equal(both.read(4 + i), alone.read(kept[i])) and both.key(4 + i) == alone.key(kept[i])
    assert not torch.equal(both.read(4), both.read(5))  # two windows of one video
    for words in ("4 more pairs from howto100m, 50% of an epoch", "2 of clips that the evaluation reads left out"):
        assert words in both.note, both.note
    meta, _ = meta_data(both, {}, "own", "train", 8, 2)  # clean examples are the set's own
    assert sorted(meta.keys()) == sorted(data.keys())
    cut = both.select([5, 0])
    assert cut.own is None and torch.equal(cut.read(0), both.read(5))
    assert len(pairs_of(tmp_path, f"howto100m={tmp_path / 'more'}", unfold_captions=True)[1].which) == 10


def test_pairs_that_cannot_join_are_refused(tmp_path):
    for name in ("v0", "v1", "v2"):
        write_video(tmp_path / f"{name}.mp4", [1, 2])
    rows = [("v0.mp4", "x", "train"), ("v1.mp4", "y", "val"), ("v2.mp4", "y", "test")]
    write_rows(tmp_path / "own.csv", ["video", "caption", "split"], rows)
    (tmp_path / "pictures").mkdir()
    for k in range(40):
        Image.new("RGB", (8, 8), (k, 0, 0)).save(tmp_path / "pictures" / f"{k}.png")
    write_rows(tmp_path / "pictures" / "metadata.csv", ["file_name", "caption"], [(f"{k}.png", "x") for k in range(40)])
    data = common.load_data(str(tmp_path / "own.csv"), "train", video_dir=str(tmp_path))
    for more in ("moving-emoji", str(tmp_path / "pictures")):
        with pytest.raises(UserError, match="^--extra-pairs .*only joins files with captions, videos to videos"):
            pairs_of(tmp_path, more)
    with pytest.raises(UserError, match=f"^--extra-captions {tmp_path}/gone.csv: "):
        data_sets.add_captions(data, tmp_path / "gone.csv")


# ---------------------------------------------------- beside questions -----------------------------------------------

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
    for file, videos in (("own.csv", range(6)), ("more.csv", range(8, 12))):
        write_rows(root / file, ["video", "caption"], [(f"video{k}.mp4", f"clip {k} by a model") for k in videos])
    return root


def opened(files, name="msrvtt-qa", more=()):
    """(training data, evaluation sets) of mama.py's flags."""
    return data_sets.open_data(mama.parse_args([*flags_of(files, name), *more]))


def flags_of(files, name="nextqa"):
    return [str(x) for x in ("--dataset", name, "--data-dir", files, "--video-dir", files / "videos", *HOW,
                             "--batch-size", "10", "--meta-batch-size", "4", "--meta-size", "8")]


def extra(files, *names):
    """The flags of the two ways."""
    flags = {"captions": ["--extra-captions", files / "own.csv"],
             "pairs": ["--extra-pairs", f"{files / 'more.csv'}={files / 'more'}"]}
    return [str(x) for name in names for x in flags[name]]


def test_all_questions_about_a_video_take_its_caption(files):
    plain, _ = opened(files)
    data, evals = opened(files, more=extra(files, "captions"))
    assert len(data) == len(plain) == 18 and "18 captions added from own.csv" in data.note
    for i in range(18):
        assert plain.captions(i) == [plain.column("question")[i]] and data.key(i) == plain.key(i)
        assert data.captions(i) == [f"clip {i // 3} by a model"]
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
    some = dict(questions, answers=["a"]) if name == "msrvtt-qa" else questions            # others enter no loss
    share = sum(not some["answers"] or a == "a" for a in own.column("answer")) / len(data)
    assert answers.guess_of(data, some) == pytest.approx(math.log(len(some["answers"]) or 5) * share)
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


SGD = "--optimizer sgd --grad-clip 0 --lr-schedule constant --warmup-epochs 0".split()


def test_two_processes_are_one(files, tmp_path):
    """Where one process has more questions than the other: losses, weights, what is answered, the towers."""
    flags = [*flags_of(files, "msrvtt-qa"), *extra(files, "captions", "pairs"), *SGD, "--max-steps", "4"]
    one_and_two(tmp_path, flags, 0.02, ("loss", "L", "w", "CE", "answered"))
