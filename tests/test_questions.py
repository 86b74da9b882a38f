"""Video question answering: the files of each set as its authors wrote them. Further captions of a
set's clips and further pairs beside it, also beside questions (MAMA, Eq. 3 and Sec. 3.3)."""

import argparse
import functools

import common
from contrastive import data as data_sets
from contrastive.core.processes import UserError
from contrastive.data import add_captions
from contrastive.encoders.questions import QuestionAnswerer
from contrastive.evaluation import answers
from contrastive.evaluation.measure import unsupported_tasks
from contrastive.papers.meta import meta_data

import numpy as np
import pytest
import torch

import mama
from helpers import assert_close, complains, steps, write_clips, write_files, write_rows
from tools import check
from variants import mama_qa


def tabs(*rows):
    """Text of a table separated by tabs."""
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def msrvtt_row(answer, number, question, video):
    return {
        "answer": answer, "category_id": 3, "id": number, "question": question, "video_id": video}


# ---- Causal-VidQA: a folder of two files for each video ----
CAUSAL = ["-0AbC_000015_000025", "x1_1_11"]
FIVE = {  # choices of each kind of question and part
    "answer": [f"a{k}" for k in range(5)],
    "reason": [f"because {k}" for k in range(5)]}
CAUSAL_TEXTS = {
    "descriptive": {"question": "what?", "answer": FIVE["answer"]},
    "explanatory": {"question": "why?", "answer": FIVE["answer"]},
    "predictive": {"question": "what next?", **FIVE},
    "counterfactual": {"question": "what if?", **FIVE}}
CAUSAL_RIGHT = {
    "descriptive": {"answer": 2},
    "explanatory": {"answer": 2},
    "predictive": {"answer": 2, "reason": 3},
    "counterfactual": {"answer": 2, "reason": 3}}
WITHOUT_A_REASON = CAUSAL_RIGHT | {"predictive": {"answer": 2, "reason": 7}}
# {key behind that of the video: (question, answer, choices, type)} of a whole video
CAUSAL_ROWS = {
    "descriptive answer": ("what?", "a2", FIVE["answer"], "descriptive"),
    "explanatory answer": ("why?", "a2", FIVE["answer"], "explanatory"),
    "predictive answer": ("what next?", "a2", FIVE["answer"], "predictive answer"),
    "predictive reason": ("what next?", "because 3", FIVE["reason"], "predictive reason"),
    "counterfactual answer": ("what if?", "a2", FIVE["answer"], "counterfactual answer"),
    "counterfactual reason": ("what if?", "because 3", FIVE["reason"], "counterfactual reason")}

# ---- the other sets ----
TGIF = ["gif_name", "question", "a1", "a2", "a3", "a4", "a5", "answer", "vid_id", "key"]
YELL = ["yell", "nod", "jump", "sit", "run"]
ACTION = tabs(  # tab separated, and called csv
    TGIF,
    ("tumblr_a", "What does the cat do ?", "sit", 'say "no', "wave", "run", "nod", 1, "ACTION7", 5),
    # a wrong choice that equals the answer, an answer that is no choice, no choices, no video
    ("tumblr_b", "What before yawn ?", "yell", "nod", "yell", "sit", "run", 2, "ACTION8", 6),
    ("tumblr_b", "What after yawn ?", *YELL, 5, "ACTION9", 6),
    ("tumblr_b", "What does it do ?", "", "", "", "", "", 0, "ACTION10", 6),
    ("tumblr_c", "What 2 times ?", *YELL, 0, "ACTION11", 7))
BIASED = [
    "vacuum with unnattached tube", "tilt head", "tip hat", "removes glasses",
    "sing passionately"]
FILES = {
    "train_qa.json": [
        msrvtt_row("couch", 0, "what is a man sitting on?", 0),
        msrvtt_row("two", 2, "how many cars are there?", "video7"),
        msrvtt_row("dog", 3, "what barks?", 9),
        msrvtt_row("", 4, "what is it?", 7),
        msrvtt_row("cat", 5, " ", 7)],
    "val_qa.json": [
        msrvtt_row("squirrel", 30933, "what eats a peanut?", 1),
        msrvtt_row("dog", 30934, "what runs?", 2)],
    "youtube_mapping.txt": "-4wsuPCjDBc_5_15 vid1\n-7KMZQEsJW4_205_208 vid2\n",
    "Train_action_question.csv": ACTION,
    "Train_transition_question.csv": ACTION,
    "Test_transition_question.csv": tabs(
        TGIF, ("tumblr_a", "What before point ?", *BIASED, 4, "TRANS23", 23)),
    "Test_frameqa_question.csv": tabs(
        ["gif_name", "question", "answer", "type", "vid_id", "key", "description"],
        ("tumblr_a", "what color ?", "black", 2, "FRAMEQA4460", 87751, "a black shirt ."),
        ("tumblr_a", "how many men ?", "two", 1, "FRAMEQA3809", 81281, "two men .")),
    "nextqa/val.csv": (
        "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
        '4010069381,369,640,480,how do they play,0,6,CH,roll,tap,strum,hit,"pat, with hand"\n'
        "4010069381,369,640,480,what did he do before sitting,4,7,TP,a,b,c,d,e\n"),
    "valid.pkl": CAUSAL,
    f"QA/{CAUSAL[0]}/text.json": CAUSAL_TEXTS,
    f"QA/{CAUSAL[0]}/answer.json": CAUSAL_RIGHT,
    f"QA/{CAUSAL[1]}/text.json": CAUSAL_TEXTS,
    f"QA/{CAUSAL[1]}/answer.json": WITHOUT_A_REASON}
VIDEOS = [
    "video0.mp4", "video7.mp4", "vid2.avi", "-4wsuPCjDBc_5_15.avi", "tumblr_a.gif", "tumblr_b.gif",
    "1164/4010069381.mp4", f"{CAUSAL[0]}.mp4", f"{CAUSAL[1]}.mp4"]

CHOICES = {
    "tumblr_a ACTION7": (
        "What does the cat do ?", 'say "no', ["sit", 'say "no', "wave", "run", "nod"], ""),
    "tumblr_b ACTION8": ("What before yawn ?", "yell", ["nod", "yell", "sit", "run"], "")}
UNANSWERED = "2 questions without an answer left out; 1 videos (1 rows) are not in"
# set: (split, {key: (question, answer, choices, question_type)}, words of the note)
EXPECTED = {
    "msrvtt-qa": ("train", {
        "video0 0": ("what is a man sitting on?", "couch", [], ""),
        "video7 2": ("how many cars are there?", "two", [], "")},
        f"{UNANSWERED}; first video9; 2 examples, 158,581 expected"),
    "msvd-qa": ("val", {
        "vid1 30933": ("what eats a peanut?", "squirrel", [], ""),
        "vid2 30934": ("what runs?", "dog", [], "")}, "6,415 expected"),
    "tgif-qa-r-action": ("train", CHOICES, f"{UNANSWERED}; 20,475 expected"),
    "tgif-qa-r-transition": ("train", CHOICES, f"{UNANSWERED}; 52,704 expected"),
    "tgif-qa-r-frame": ("test", {
        "tumblr_a FRAMEQA4460": ("what color ?", "black", [], "color"),
        "tumblr_a FRAMEQA3809": ("how many men ?", "two", [], "number")}, "13,691 expected"),
    "nextqa": ("val", {
        "4010069381 6": (
            "how do they play", "roll", ["roll", "tap", "strum", "hit", "pat, with hand"],
            "causal how"),
        "4010069381 7": (
            "what did he do before sitting", "e", ["a", "b", "c", "d", "e"], "temporal next")},
        "4,996 expected"),
    "causal-vidqa": ("val", {
        **{f"{CAUSAL[0]} {key}": row for key, row in CAUSAL_ROWS.items()},
        # half a pair is none
        **{f"{CAUSAL[1]} {key}": row for key, row in CAUSAL_ROWS.items() if "pred" not in key}},
        "2 questions without an answer left out; 16,170 expected")}


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """Files of all sets as their authors wrote them, and real videos of most."""
    root = write_files(tmp_path_factory.mktemp("asked"), FILES)
    write_clips(root / "videos", dict(enumerate(VIDEOS)), 3)
    return root


def load(root, name, split):
    videos = str(root / "videos")
    return common.load_data(name, split, data_dir=str(root), video_dir=videos, frames=2)


@pytest.mark.parametrize("name", EXPECTED)
def test_questions_of_a_set(name, replica):
    split, rows, words = EXPECTED[name]
    data = load(replica, name, split)
    assert data.column("key") == list(rows)
    kinds = data.column("question_type") or [""] * len(data)
    for k, row in enumerate(rows.values()):
        columns = [data.column(column)[k] for column in ("question", "answer", "choices")]
        assert (*columns, kinds[k]) == row
        assert data.captions(k) == [row[0]]
    assert not data.has_captions
    assert len(data.read(0)) == 2
    for part in words.split("; "):
        assert part in data.note


def test_answer_and_reason_are_one_pair(replica):
    pairs = load(replica, "causal-vidqa", "val").column("pair").tolist()
    assert pairs == [0, 1, 2, 2, 3, 3, 4, 5, 7, 7]


def test_choices_of_tgif_qa_before_they_were_drawn_anew_are_warned_of(replica):
    data = load(replica, "tgif-qa-r-transition", "test")
    assert "WARNING: the choices are TGIF-QA's, whose bias gives the answer away" in data.note
    assert "WARNING: the choices" not in load(replica, "tgif-qa-r-transition", "train").note


def test_two_folders_of_one_video_are_refused(tmp_path):
    write_files(tmp_path, FILES)
    write_files(tmp_path / "old" / CAUSAL[0], {"text.json": CAUSAL_TEXTS})
    words = [f"QA/{CAUSAL[0]}", f"old/{CAUSAL[0]}", "are of one video; leave one"]
    complains("causal-vidqa", "val", *words, data_dir=str(tmp_path))


def test_held_out_questions_are_of_other_videos(tmp_path):
    rows = []
    for number in range(240):
        gif = f"tumblr_{number // 4}"
        (tmp_path / f"{gif}.gif").touch()
        rows.append((gif, f"What {number} ?", *YELL, 1, f"ACTION{number}", 5))
    write_files(tmp_path, {"Train_action_question.csv": tabs(TGIF, *rows)})
    options = {"data_dir": str(tmp_path), "holdout_fraction": 0.05}
    held = common.load_data("tgif-qa-r-action", "val", **options)
    train = common.load_data("tgif-qa-r-action", "train", **options)
    assert len(held)
    assert len(held) + len(train) == 240
    assert not set(held.column("video")) & set(train.column("video"))


# -------------------------------------- further captions --------------------------------------
COLUMNS = ["video", "start", "end", "caption"]


def test_extra_captions_of_training_clips(tmp_path):
    """By file name and window, in any folder; what matches nothing is counted."""
    write_clips(tmp_path, {0: "x/e.mp4", 1: "b.mp4", 2: "c.mp4"}, 3)
    write_rows(tmp_path / "train_9k.json", COLUMNS, [
        ("x/e.mp4", None, None, "one"),
        ("b", 0.0, 0.1, "two"),
        ("b", 0.1, 0.3, "three"),
        ("c", None, None, "four")])
    more = write_rows(tmp_path / "more.csv", COLUMNS, [
        ("e.mp4", "", "", "first"),
        ("b.mp4", "0.1", "0.3", "second"),
        ("b.mp4", "0.1", "0.3", "three"),
        ("b.mp4", "", "", "of no window"),
        ("d.mp4", "", "", "of no clip"),
        ("c", "", "", "third, with a comma")])
    options = {"data_dir": str(tmp_path), "frames": 2, "extra_captions": str(more)}
    data = common.load_data("msrvtt", "train", **options)
    assert data.column("captions") == [
        ["one", "first"], ["two"], ["three", "second"], ["four", "third, with a comma"]]
    words = "3 captions added from more.csv; 2 of its rows match no training clip, first b.mp4"
    assert words in data.note
    unfolded = common.load_data("msrvtt", "train", unfold_captions=True, **options)
    assert [*unfolded.first_captions()][:3] == ["one", "first", "two"]


FILE_SOURCES = ["x/a.mp4", "y/a.mp4"]
INSIDE = [{"path": "image.png", "bytes": b"x"}] * 2


@pytest.mark.parametrize("sources, rows, words", [
    ([FILE_SOURCES], "video,caption\nx/a.mp4,y\n", "x/a.mp4 may be any of x/a.mp4, y/a.mp4"),
    ([INSIDE], "image,caption\nimage.png,y\n", "none of its 1 rows matches a clip"),
    ([], "video,caption\nx/a.mp4,y\n", "some has no files of its own")])
def test_extra_captions_that_match_nothing_or_anything_are_refused(sources, rows, words, tmp_path):
    (tmp_path / "more.csv").write_text(rows)
    table = common.make_table([["q"], ["q"]], ["0", "1"], *sources)
    with pytest.raises(UserError, match=words):
        add_captions(common.Data("some", "train", table), tmp_path / "more.csv")


# -------------------------------------- further pairs -----------------------------------------
@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """own.csv of two training clips; more/more.csv of three windows, of which v9 is a clip of the
    evaluation."""
    root = tmp_path_factory.mktemp("pairs")
    write_clips(root, {0: "v0.mp4", 1: "v1.mp4", 2: "v2.mp4"}, 3)
    write_clips(root / "more", {3: "w0.mp4", 4: "v9.mp4"}, 3)
    write_rows(root / "own.csv", ["video", "caption", "label", "split"], [
        ("v0.mp4", "own 0", "a", "train"),
        ("v1.mp4", "own 1", "b", "train"),
        ("v2.mp4", "own 2", "a", "val")])
    write_rows(root / "more" / "more.csv", [*COLUMNS, "split"], [
        ("w0.mp4", 0, 0.1, "one", "train"),
        ("w0.mp4", 0, 0.1, "two", "train"),
        ("w0.mp4", 0.1, 0.2, "three", "train"),
        ("v9.mp4", 0, 0.1, "four", "train")])
    return root


def join_pairs(root, more):
    """(the training split of own.csv, the same with --extra-pairs, the pairs alone)."""
    options = {"video_dir": str(root), "frames": 2, "unfold_captions": False}
    data = common.load_data(str(root / "own.csv"), "train", **options)
    pairs = data_sets.open_pairs(str(more), argparse.Namespace(**options))
    table = common.make_table([["t"]], ["0"], [str(root / "elsewhere" / "v_v9.webm")])
    evaluated = {"x": {"test": common.Data("x", "test", table)}}
    return data, data_sets.add_pairs(data, pairs, evaluated, f"--extra-pairs {more}"), pairs


def test_pairs_of_another_set_join_training(pairs):
    """Their rows stand behind the set's own; clips of the evaluation are left out by name, with or
    without v_ before it."""
    data, both, more = join_pairs(pairs, pairs / "more" / "more.csv")
    assert both.before_extra_pairs is data  # of which meta-data are
    assert both.column("key") == data.column("key") + more.column("key")[:2]
    assert both.column("captions") == [["own 0"], ["own 1"], ["one", "two"], ["three"]]
    assert torch.equal(both.read(1), data.read(1))
    assert torch.equal(both.read(3), more.read(1))
    assert not torch.equal(both.read(2), both.read(3))
    assert "2 more pairs from " in both.note
    assert "50% of an epoch" in both.note
    assert "1 of clips that the evaluation reads left out" in both.note


def test_pairs_join_videos_to_videos(pairs, tmp_path):
    rows = [(f"{k}.png", "x") for k in range(40)]
    pictures = write_rows(tmp_path / "p.csv", ["image", "caption"], rows)
    with pytest.raises(UserError, match="^--extra-pairs .*only joins files with captions, videos"):
        join_pairs(pairs, pictures)


# -------------------------------------- beside questions --------------------------------------
HOW = (
    "--workers 0 --cpu --image-encoder small --text-encoder small --no-pretrained --embed-dim 16 "
    "--image-size 32 --frames 2 --text-length 16 --eval-every 0 --log-every 1 --batch-size 10 "
    "--meta-batch-size 4 --meta-size 8 "
    "--optimizer sgd --grad-clip 0 --lr-schedule constant --warmup-fraction 0"
).split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Six videos with three questions each, two more for val and test, four without questions; the
    captions that tools/caption.py writes for the training clips and for those four."""
    root = tmp_path_factory.mktemp("asked")
    write_clips(root / "videos", {k: f"video{k}.mp4" for k in range(8)}, 3)
    write_clips(root / "more", {k: f"video{k}.mp4" for k in range(8, 12)}, 3)
    for split, videos in (("train", range(6)), ("val", [6]), ("test", [7])):
        rows = []
        for video in videos:
            for k, answer in enumerate("abc"):
                question = f"what is number {video}, {k}"
                rows.append(msrvtt_row(answer, 3 * video + k, question, video))
        write_files(root, {f"{split}_qa.json": rows})
    for file, videos in (("own.csv", range(6)), ("more.csv", range(8, 12))):
        rows = [(f"video{k}.mp4", f"clip {k} by a model") for k in videos]
        write_rows(root / file, ["video", "caption"], rows)
    return root


def flags_of(root, more=""):
    words = f"--dataset msrvtt-qa --data-dir {root} --video-dir {root}/videos {more}"
    return [*HOW, *words.split()]


def flags_with_pairs(root):
    pairs = f"{root}/more.csv={root}/more"
    return flags_of(root, f"--extra-captions {root}/own.csv --extra-pairs {pairs}")


def test_all_questions_about_a_video_take_its_caption(files):
    flags = flags_of(files, f"--extra-captions {files}/own.csv")
    data, evaluation_sets = data_sets.open_data(mama_qa.parse_args(flags))
    assert "18 captions added from own.csv" in data.note
    assert data.column("captions") == [[f"clip {k // 3} by a model"] for k in range(18)]
    test = evaluation_sets["msrvtt-qa"]["test"]
    assert test.captions(0) == ["what is number 7, 0"]
    assert unsupported_tasks(["retrieval"], test, (None, None, None))


def test_pairs_beside_questions_have_none(files):
    """The vocabulary and the meta-data leave them out."""
    own, _ = data_sets.open_data(mama_qa.parse_args(flags_of(files)))
    args = mama_qa.parse_args(flags_with_pairs(files))
    data, evaluation_sets = data_sets.open_data(args)
    num_pairs = len(data) - 18
    assert 1 <= num_pairs <= 4
    assert data.column("question") == own.column("question") + [None] * num_pairs
    assert answers.question_settings(data, args)["answers"] == ["a", "b", "c"]
    meta, _ = meta_data(data, evaluation_sets, args, args.task)
    assert None not in meta.column("question")
    assert len(meta) == 8


QUESTIONS = ["one number 1", "one number 22"]
CAPTIONS = ["red apple", "green pear", "blue bird", "a tree"]


@pytest.fixture(params=["open", "choices"])
def four(request, tokenizer):
    """A model, its inputs and the right answers of two questions between two pairs without one."""
    columns = {"question": [None, *QUESTIONS, None], "answer": [None, "a", "c", None]}
    settings = {"answers": ["a", "b", "c"], "model": "fusion"}
    if request.param == "choices":
        columns["choices"] = [None, ["a", "b"], ["a", "b", "c"], None]
        settings["answers"] = []
    captions = [[caption] for caption in CAPTIONS]
    data = common.Data("asked", "train", common.make_table(captions, CAPTIONS, **columns))
    torch.manual_seed(0)
    batch = {
        "views": [torch.randn(4, 2, 3, 32, 32)],
        "rows": [0, 1, 2, 3],
        "captions": captions,
        "draws": np.zeros((4, 32))}
    inputs, target = mama_qa.inputs_of(batch, tokenizer, data, settings)
    vision = common.VisionEncoder("small", 16, False)
    words = len(tokenizer.tokenizer)
    text = common.TextEncoder("small", 16, length=12, vocabulary=words)
    model = QuestionAnswerer(vision, text, **settings, frames=2)
    return model, inputs, target


def test_text_of_eq_1_is_the_caption_and_that_of_eq_2_the_question(four, tokenizer):
    _, inputs, target = four
    captions = tokenizer(CAPTIONS)["input_ids"]
    assert torch.equal(inputs["tokens"]["input_ids"], captions)
    expected = tokenizer(QUESTIONS)["input_ids"]                            # (2, L)
    assert torch.equal(inputs["question"]["input_ids"][1:3], expected)
    assert target.tolist() == [-1, 0, 2, -1]


def test_loss_is_equation_3(four):
    """L_i is the weighted contrast, and with eta CE_i where there is a question."""
    model, inputs, target = four
    video, text, scores = model(**inputs)
    expected = 0.5 * mama.angular_margin_loss(video, text, 0.5, 0.2)        # (4,)
    cross_entropy = torch.nn.CrossEntropyLoss(reduction="none")
    expected[1:3] += 1.5 * cross_entropy(scores[1:3], target[1:3])
    loss_fn = functools.partial(
        mama_qa.question_loss, tau=0.5, mu=0.2, eta=1.5, contrastive_weight=0.5)
    losses = mama_qa.look_ahead_losses(model, loss_fn)
    parameters = dict(model.named_parameters())
    assert_close(losses(parameters, (inputs, target)), expected)


def test_logged_answers_leave_out_pairs_without_a_question():
    table = common.make_table([["a"]] * 3, ["0", "1", "2"], question=[None, "q", "q"])
    data = common.Data("asked", "train", table)
    scores = torch.eye(3)[[0, 1, 0]]
    right = torch.tensor([-1, 1, 2])
    assert answers.answered_column(scores, right, data, [0, 1, 2]) == {"answered": 50}
    assert answers.answered_column(scores[:1], right[:1], data, [0]) == {}


def test_processes_may_have_different_numbers_of_questions(files, tmp_path, capsys):
    """Losses, weights and the log are those of one process."""
    two, *_ = check.VARIANTS
    flags = [*flags_with_pairs(files), *check.FIXED, "--lr", "0.02"]
    flags += ["--output-dir", str(tmp_path)]
    job = check.Job(mama_qa, [*flags, "--run-name", "one"], tmp_path / "one.log")
    code, output = check.run(job)
    assert code == 0, output
    assert check.keeps_promise(two, mama_qa, flags, tmp_path), capsys.readouterr().out
    for row, expected in zip(steps(tmp_path / two.name), steps(tmp_path / "one")):
        for column in ("L", "w", "CE", "answered"):
            assert row[column] == pytest.approx(expected[column], rel=1e-2, abs=1e-4)
