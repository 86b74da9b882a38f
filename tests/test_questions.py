"""Video question answering: the files of each set as its authors wrote them. Further captions of a
set's clips and further pairs beside it, also beside questions (MAMA, Eq. 3 and Sec. 3.3)."""

import argparse
import functools
import shutil

import common
from contrastive import data as data_sets
from contrastive.data import add_captions
from contrastive.encoders.questions import QuestionAnswerer
from contrastive.encoders.texts import Tokenizer
from contrastive.core.processes import UserError
from contrastive.evaluation import answers
from contrastive.evaluation.measure import unsupported_tasks
from contrastive.papers.meta import meta_data

import pytest
import torch

import mama
from helpers import steps, write_clips, write_files, write_rows
from tools import check
from variants import mama_qa

OPTIONS = {"frames": 2, "image_size": 32}
CAUSAL = ["-0AbC_000015_000025", "x1_1_11", "gone_1_11"]
# 2: an answer and its reason
KINDS = {"descriptive": 1, "explanatory": 1, "predictive": 2, "counterfactual": 2}
TYPES = [
    "descriptive",
    "explanatory",
    "predictive answer",
    "predictive reason",
    "counterfactual answer",
    "counterfactual reason",
]


def tabs(*rows):
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def five(letter):
    return [f"{letter}{k}" for k in range(5)]


def causal(right, **changes):
    """text.json and answer.json of a video; right: number of the right choice but in changes."""
    said, chosen = {}, {}
    for kind, parts in KINDS.items():
        choices = {"answer": five(kind[0]), "reason": five("because ")}
        choices = {part: choices[part] for part in ("answer", "reason")[:parts]}
        said[kind] = {"question": f"{kind} of [person_1]?", **choices}
        chosen[kind] = {part: changes.get(f"{kind} {part}", right) for part in choices}
    return said, chosen


def of_msrvtt(answer, number, question, video):
    return {
        "answer": answer,
        "category_id": 3,
        "id": number,
        "question": question,
        "video_id": video,
    }


TGIF = ["gif_name", "question", *(f"a{k}" for k in range(1, 6)), "answer", "vid_id", "key"]
ACTION = tabs(  # tab separated, and called csv
    TGIF,
    (
        "tumblr_a_250",
        "What does the cat do ?",
        "sit",
        'say "no',
        "wave",
        "run",
        "nod",
        1,
        "ACTION7",
        5,
    ),
    ("tumblr_b_250", "What before yawn ?", "yell", "nod", "yell", "sit", "run", 2, "ACTION8", 6),
    ("tumblr_b_250", "What after yawn ?", "yell", "nod", "jump", "sit", "run", 5, "ACTION9", 6),
    ("tumblr_b_250", "What does it do ?", "", "", "", "", "", 0, "ACTION10", 6),
    ("tumblr_c_250", "What 2 times ?", "yell", "nod", "jump", "sit", "run", 0, "ACTION11", 7),
)
BIASED = "vacuum with unnattached tube,tilt head,tip hat,removes glasses,sing passionately".split(
    ","
)
FILES = {
    "train_qa.json": [
        of_msrvtt("couch", 0, "what is a man sitting on?", 0),
        of_msrvtt("man", 1, "who is sitting?", 0),
        of_msrvtt("two", 2, "how many cars are there?", "video7"),
        of_msrvtt("dog", 3, "what barks?", 9),
        of_msrvtt("", 4, "what is it?", 7),
        of_msrvtt("cat", 5, " ", 7),
    ],
    "val_qa.json": [
        of_msrvtt("squirrel", 30933, "what eats a peanut?", 1),
        of_msrvtt("dog", 30934, "what runs?", 2),
    ],
    "youtube_mapping.txt": "-4wsuPCjDBc_5_15 vid1\n-7KMZQEsJW4_205_208 vid2\n",
    "Train_action_question.csv": ACTION,
    "Train_transition_question.csv": ACTION,
    "Test_transition_question.csv": tabs(
        TGIF, ("tumblr_a_250", "What before point ?", *BIASED, 4, "TRANS23", 23)
    ),
    "Test_frameqa_question.csv": tabs(
        "gif_name question answer type vid_id key description".split(),
        ("tumblr_a_250", "what color ?", "black", 2, "FRAMEQA4460", 87751, "a black shirt ."),
        ("tumblr_a_250", "how many men ?", "two", 1, "FRAMEQA3809", 81281, "two men ."),
    ),
    "nextqa/val.csv": "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
    '4010069381,369,640,480,how do they play,0,6,CH,roll,tap,strum,hit,"pat, with hand"\n'
    "4010069381,369,640,480,what did he do before sitting,4,7,TP,a,b,c,d,e\n"
    "4010069381,719,320,240,where is this place,1,8,DL,mall,river,pool,room,hill\n",
    "valid.pkl": CAUSAL,
}
for video, parts in zip(CAUSAL, (causal(2), causal(4, **{"predictive reason": 7}), causal(0))):
    FILES |= {f"QA/{video}/text.json": parts[0], f"QA/{video}/answer.json": parts[1]}
VIDEOS = (
    "video0.mp4",
    "video7.mp4",
    "vid2.avi",
    "-4wsuPCjDBc_5_15.avi",
    "tumblr_a_250.gif",
    "tumblr_b_250.gif",
    "1164/4010069381.mp4",
    *(f"{name}.mp4" for name in CAUSAL[:2]),
)

# set, split, {key: (question, answer, choices, question_type)}, words of the note
CHOICES = {
    "tumblr_a_250 ACTION7": (
        "What does the cat do ?",
        'say "no',
        ["sit", 'say "no', "wave", "run", "nod"],
        "",
    ),
    "tumblr_b_250 ACTION8": ("What before yawn ?", "yell", ["nod", "yell", "sit", "run"], ""),
}
# the video, its right choice; half a pair is none
WHOLE = [(0, 2, TYPES), (1, 4, [*TYPES[:2], *TYPES[4:]])]
EXPECTED = [
    (
        "msrvtt-qa",
        "train",
        {
            "video0 0": ("what is a man sitting on?", "couch", [], ""),
            "video0 1": ("who is sitting?", "man", [], ""),
            "video7 2": ("how many cars are there?", "two", [], ""),
        },
        [
            "2 questions without an answer left out",
            "1 videos (1 rows) are not in",
            "first video9",
            "3 examples, 158,581 expected",
        ],
    ),
    (
        "msvd-qa",
        "val",
        {
            "vid1 30933": ("what eats a peanut?", "squirrel", [], ""),
            "vid2 30934": ("what runs?", "dog", [], ""),
        },
        [],
    ),
    *[
        (
            f"tgif-qa-r-{kind}",
            "train",
            CHOICES,
            ["2 questions without an answer left out", "1 videos (1 rows)"],
        )
        for kind in ("action", "transition")
    ],
    (
        "tgif-qa-r-frame",
        "test",
        {
            "tumblr_a_250 FRAMEQA4460": ("what color ?", "black", [], "color"),
            "tumblr_a_250 FRAMEQA3809": ("how many men ?", "two", [], "number"),
        },
        [],
    ),
    (
        "nextqa",
        "val",
        {
            "4010069381 6": (
                "how do they play",
                "roll",
                ["roll", "tap", "strum", "hit", "pat, with hand"],
                "causal how",
            ),
            "4010069381 7": ("what did he do before sitting", "e", [*"abcde"], "temporal next"),
            "4010069381 8": (
                "where is this place",
                "river",
                ["mall", "river", "pool", "room", "hill"],
                "descriptive location",
            ),
        },
        [],
    ),
    (
        "causal-vidqa",
        "val",
        {
            f"{CAUSAL[v]} {kind if ' ' in kind else f'{kind} answer'}": (
                f"{kind.split()[0]} of [person_1]?",
                choices[right],
                choices,
                kind,
            )
            for v, right, kinds in WHOLE
            for kind in kinds
            for choices in [five("because " if "reason" in kind else kind[0])]
        },
        ["2 questions without an answer left out", "1 videos (6 rows) are not in"],
    ),
]


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """Files of all sets as their authors wrote them, and real videos of most."""
    root = write_files(tmp_path_factory.mktemp("asked"), FILES)
    write_clips(root / "videos", dict(enumerate(VIDEOS)), 3)
    return root


def opened(root, name, split):
    return common.load_data(
        name, split, data_dir=str(root), video_dir=str(root / "videos"), **OPTIONS
    )


def test_two_folders_of_one_video_are_refused(replica, tmp_path):
    shutil.copytree(replica, tmp_path / "all")
    video = next(iter(CAUSAL))
    shutil.copytree(replica / "QA" / video, tmp_path / "all" / "old" / video)
    with pytest.raises(UserError, match=f"QA/{video} and .*old/{video} are of one video; leave"):
        opened(tmp_path / "all", "causal-vidqa", "val")


@pytest.mark.parametrize("name, split, rows, words", EXPECTED, ids=[name for name, *_ in EXPECTED])
def test_the_questions_of_a_set(name, split, rows, words, replica):
    data = opened(replica, name, split)
    columns = [data.column(c) for c in ("question", "answer", "choices")]
    kinds = data.column("question_type") or [""] * len(data)
    assert dict(zip(data.column("key"), zip(*columns, kinds))) == rows
    assert all(w in data.note for w in words) and "TGIF-QA's" not in data.note
    assert [data.captions(i) for i in range(len(data))] == [[q] for q in columns[0]]
    assert not data.has_captions
    assert len(data.read(len(data) - 1)) == 2
    if name == "causal-vidqa":  # answer and reason have one number
        assert data.column("pair").tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 7, 7]


def test_the_choices_of_tgif_qa_before_they_were_drawn_anew_are_told(replica, capsys):
    data = opened(replica, "tgif-qa-r-transition", "test")
    assert "the choices are TGIF-QA's" in data.note
    assert "gives the answer away" in capsys.readouterr().out


def test_held_out_questions_are_of_other_videos(tmp_path):
    rows = [
        (
            f"tumblr_{i}",
            f"What {k} times ?",
            "sit",
            "run",
            "wave",
            "nod",
            "yell",
            1,
            f"ACTION{4 * i + k}",
            5,
        )
        for i in range(60)
        for k in range(4)
    ]
    write_files(tmp_path, {"Train_action_question.csv": tabs(TGIF, *rows)})
    for i in range(60):
        (tmp_path / f"tumblr_{i}.gif").touch()
    held, rest = (
        common.load_data("tgif-qa-r-action", split, data_dir=str(tmp_path), holdout_fraction=0.05)
        for split in ("val", "train")
    )
    assert len(held)
    assert len(held) + len(rest) == 240
    assert not {*held.column("video")} & {*rest.column("video")}
    assert "held out of 240" in held.note


# -------------------------------------- further captions --------------------------------------
def test_extra_captions_of_training_clips(tmp_path):
    """By file name and window, in any folder; what matches nothing is counted."""
    columns = ["video", "start", "end", "caption"]
    write_clips(tmp_path / "videos", dict(enumerate(["x/e.mp4", "b.mp4", "c.mp4"])), 3)
    rows = [
        ("x/e.mp4", None, None, "one"),
        ("b", 0.0, 0.1, "two"),
        ("b", 0.1, 0.3, "three"),
        ("c", None, None, "four"),
    ]
    write_rows(tmp_path / "train_9k.json", columns, rows)
    more = write_rows(
        tmp_path / "more.csv",
        columns,
        [
            ("e.mp4", "", "", "first"),
            ("b.mp4", "0.1", "0.3", "second"),
            ("b.mp4", "0.1", "0.3", "three"),
            ("b.mp4", "", "", "of no window"),
            ("d.mp4", "", "", "of no clip"),
            ("c", "", "", "third, with a comma"),
        ],
    )
    where = {"data_dir": str(tmp_path), "video_dir": str(tmp_path / "videos")}
    extra = {"extra_captions": str(more)}
    plain, data, unfolded = (
        common.load_data("msrvtt", "train", frames=2, **where, **flags)
        for flags in ({}, extra, extra | {"unfold_captions": True})
    )
    assert plain.column("captions") == [["one"], ["two"], ["three"], ["four"]]
    assert data.column("captions") == [
        ["one", "first"],
        ["two"],
        ["three", "second"],
        ["four", "third, with a comma"],
    ]
    assert (
        "3 captions added from more.csv; 2 of its rows match no training clip, first b.mp4"
        in data.note
    )
    assert torch.equal(data.read(2), plain.read(2)) and [*data.keys()] == [*plain.keys()]
    assert len(unfolded) == 7
    assert unfolded.captions(1) == ["first"]
    assert torch.equal(unfolded.read(1), plain.read(0))


def test_extra_captions_that_match_nothing_or_anything_are_refused(tmp_path):
    (tmp_path / "odd.csv").write_text("name,caption\nx,y\n")
    write_rows(tmp_path / "x.csv", ["video", "caption"], [("x/a.mp4", "of which?")])
    write_rows(
        tmp_path / "inside.csv", ["image", "caption"], [("image.png", "one name for all is none")]
    )

    def data(*sources):
        return common.Data("some", "train", common.make_table([["q"]] * 2, ["0", "1"], *sources))

    files, inside = data(["x/a.mp4", "y/a.mp4"]), data([{"path": "image.png", "bytes": b"x"}] * 2)
    for some, file, words in (
        (files, "x.csv", "x/a.mp4 may be any of x/a.mp4, y/a.mp4"),
        (inside, "inside.csv", "none of its 1 rows matches a clip"),
        (data(), "x.csv", "some has no files of its own"),
        (files, "odd.csv", "--image-column: there is no column 'image', .*: 'name', 'caption'"),
    ):
        with pytest.raises(UserError, match=words):
            add_captions(some, tmp_path / file)


# -------------------------------------- further pairs -----------------------------------------
def pairs_of(folder, more, evals=(), **flags):
    """The training split of folder/own.csv, and with --extra-pairs `more`."""
    given = {"video_dir": str(folder), "frames": 2, "unfold_captions": False, **flags}
    own = {name: given[name] for name in ("video_dir", "frames", "unfold_captions")}
    data = common.load_data(str(folder / "own.csv"), "train", **own)
    args = argparse.Namespace(**given)
    pairs = data_sets.open_pairs(str(more), args)
    return data, data_sets.add_pairs(data, pairs, {"x": dict(evals)}, f"--extra-pairs {more}")


def test_pairs_of_another_set_join_training(tmp_path):
    """Their rows stand behind the set's own; clips of the evaluation are left out by name, with or
    without v_ before it."""
    splits, names = ["train"] * 4 + ["val", "test"], ["more/w0.mp4", "more/w1.mp4", "more/v9.mp4"]
    write_clips(tmp_path, dict(enumerate([*(f"v{k}.mp4" for k in range(6)), *names])), 3)
    write_rows(
        tmp_path / "own.csv",
        ["video", "caption", "label", "split"],
        [(f"v{k}.mp4", f"own {k}", "ab"[k % 2], split) for k, split in enumerate(splits)],
    )
    rows = [
        (f"{v}.mp4", k / 10, k / 10 + 0.1, f"{v} {k} {word}", "train")
        for v in ("w0", "w1", "v9")
        for k in (0, 1)
        for word in ("one", "two")
    ]
    more = write_rows(
        tmp_path / "more" / "more.csv", ["video", "start", "end", "caption", "split"], rows
    )
    held = common.Data(
        "x", "test", common.make_table([["t"]], ["0"], [str(tmp_path / "elsewhere" / "v_v9.webm")])
    )
    data, both = pairs_of(tmp_path, f"{more}={tmp_path / 'more'}", {"test": held})
    alone = common.load_data(str(more), "train", frames=2)
    assert len(data) == 4 and len(alone) == 6 and len(both) == 8
    assert both.before_extra_pairs is data and data.before_extra_pairs is None
    for i in range(8):
        of, k = (data, i) if i < 4 else (alone, i - 4)  # the last of them are those of v9
        assert both.captions(i) == of.captions(k)
        assert both.key(i) == of.key(k)
        assert torch.equal(both.read(i), of.read(k))
    assert not torch.equal(both.read(4), both.read(5))  # two windows of one video
    for words in (
        "4 more pairs from ",
        "50% of an epoch",
        "2 of clips that the evaluation reads left out",
    ):
        assert words in both.note, both.note
    args = argparse.Namespace(
        dataset="own",
        meta_set="train",
        meta_size=8,
        meta_batch_size=2,
    )
    meta, _ = meta_data(both, {}, args)  # clean examples are the set's own
    assert sorted(meta.keys()) == sorted(data.keys())
    assert both.select([5, 0]).before_extra_pairs is None
    _, unfolded = pairs_of(tmp_path, f"{more}={tmp_path / 'more'}", unfold_captions=True)
    assert len(unfolded.caption_numbers) == 4 + 12
    pictures = write_rows(
        tmp_path / "p.csv", ["image", "caption"], [(f"{k}.png", "x") for k in range(40)]
    )
    for other in ("moving-emoji", pictures):
        with pytest.raises(
            UserError, match="^--extra-pairs .*only joins files with captions, videos to videos"
        ):
            pairs_of(tmp_path, other)


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
    layout = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()
    write_clips(root / "videos", {k: f"video{k}.mp4" for k in range(8)}, 3)
    write_clips(root / "more", {k: f"video{k}.mp4" for k in range(8, 12)}, 3)
    for split, videos in {"train": range(6), "val": [6], "test": [7]}.items():
        asked = [
            of_msrvtt("abc"[(k + q) % 3], 3 * k + q, f"what is number {k}, {q}", k)
            for k in videos
            for q in range(3)
        ]
        write_files(root, {f"{split}_qa.json": asked})
        write_rows(
            root / f"{split}.csv",
            layout,
            [
                (
                    f"video{r['video_id']}",
                    3,
                    96,
                    64,
                    r["question"],
                    "abc".index(r["answer"]),
                    r["id"],
                    "CW",
                    *"abcde",
                )
                for r in asked
            ],
        )
    for file, videos in (("own.csv", range(6)), ("more.csv", range(8, 12))):
        write_rows(
            root / file,
            ["video", "caption"],
            [(f"video{k}.mp4", f"clip {k} by a model") for k in videos],
        )
    return root


def flags_of(files, name, captions=True, pairs=True):
    flags = [*HOW, "--dataset", name, "--data-dir", files, "--video-dir", files / "videos"]
    flags += ["--extra-captions", files / "own.csv"] if captions else []
    flags += ["--extra-pairs", f"{files / 'more.csv'}={files / 'more'}"] if pairs else []
    return [str(x) for x in flags]


def prepared(files, name, **more):
    """args, training data, evaluation sets, settings of the questions, and a tokenizer."""
    args = mama_qa.parse_args(flags_of(files, name, **more))
    data, evals = data_sets.open_data(args)
    tokenizer = Tokenizer(common.train_wordpiece(answers.texts_for_tokenizer(data)), 16)
    return args, data, evals, answers.question_settings(data, args), tokenizer


def test_all_questions_about_a_video_take_its_caption(files):
    _, data, evals, *_ = prepared(files, "msrvtt-qa", pairs=False)
    assert len(data) == 18 and "18 captions added from own.csv" in data.note
    assert data.column("captions") == [[f"clip {k} by a model"] for k in range(6) for _ in range(3)]
    assert evals["msrvtt-qa"]["test"].captions(0) == ["what is number 7, 0"]
    reasons = unsupported_tasks(
        ["retrieval"], evals["msrvtt-qa"]["test"], (None, None, None))
    assert "the captions of the set are its questions" in reasons["retrieval"]


@pytest.mark.parametrize("name, known", [("msrvtt-qa", ["a", "b", "c"]), ("nextqa", [])])
def test_pairs_beside_questions_have_none(files, name, known):
    """Banner, vocabulary and guess leave them out; meta-data have questions."""
    _, own, *_ = prepared(files, name, captions=False, pairs=False)
    args, data, evals, questions, _ = prepared(files, name)
    extras = len(data) - 18
    assert 1 <= extras <= 4
    assert data.column("question") == [*own.column("question"), *[None] * extras]
    assert answers.rows_with_questions(own) is own
    assert len(answers.rows_with_questions(data)) == 18
    assert not answers.reason_without_questions(data, not known)
    assert questions["answers"] == known
    for rows, words in (
        (
            data,
            f"0 of {len(data)} rows have no caption: the question takes its place; {extras} have "
            "no question, and eta 0",
        ),
        (own, "18 of 18 rows have no caption: the question takes its place"),
    ):
        assert answers.banner_lines(questions, rows, args)["paired text"] == words
    meta, _ = meta_data(data, evals, args, args.task)
    assert None not in meta.column("question") and len(meta) == 8


@pytest.mark.parametrize("name", ["msrvtt-qa", "nextqa"])
def test_the_loss_is_equation_3(files, name):
    """L_i is the contrast, and with eta CE_i where there is a question; the text of Eq. 1 is the
    caption, that of Eq. 2 the question. (The meta step: test_answers.py.)"""
    _, data, _, questions, tokenizer = prepared(files, name)
    rows = [18, 0, 4, 18]
    batch = {
        "views": [torch.randn(4, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))],
        "rows": rows,
        "captions": [data.captions(i) for i in rows],
        "draws": torch.zeros(4, 32).numpy(),
    }
    inputs, target = mama_qa.inputs_of(batch, tokenizer, data, questions)
    for texts, part in (
        (batch["captions"], "tokens"),
        ([data.column("question")[i] for i in rows], "question"),
    ):
        for k in (1, 2):
            wanted = tokenizer([texts[k] if part == "question" else texts[k][0]])["input_ids"][0]
            assert inputs[part]["input_ids"][k][: len(wanted)].tolist() == wanted.tolist()
    torch.manual_seed(0)
    towers = (
        common.VisionEncoder("small", 16, False),
        common.TextEncoder("small", 16, length=16, vocabulary=len(tokenizer.tokenizer)),
    )
    model = QuestionAnswerer(*towers, **questions)
    theta = {k: p for k, p in model.named_parameters() if p.requires_grad}
    video, text, scores = model(**inputs)
    expected = mama.angular_margin_loss(video, text, 0.5, 0.2)
    right = {k: "abc".index(data.column("answer")[rows[k]]) for k in (1, 2)}
    ce = {k: scores[k].logsumexp(0) - scores[k, r] for k, r in right.items()}
    expected = torch.stack([x + 1.5 * ce.get(k, 0) for k, x in enumerate(expected)])  # (4,)
    loss_fn = functools.partial(mama_qa.question_loss, tau=0.5, mu=0.2, eta=1.5)
    found = mama_qa.look_ahead_losses(model, loss_fn)(theta, (inputs, target))  # (4,)
    assert torch.allclose(found, expected, rtol=1e-5)
    grads = torch.autograd.grad(found.mean(), list(theta.values()), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in grads)
    assert target.tolist() == [-1, *right.values(), -1]
    told = torch.zeros_like(scores)
    told[1, right[1]], told[2, right[2]] = 9, -9
    assert answers.answered_column(told, target, data, rows) == {"answered": 50}
    # no question: nothing is right or wrong
    assert answers.answered_column(scores[:1], target[:1], data, [18]) == {}


def test_processes_may_have_different_numbers_of_questions(files, tmp_path, capsys):
    """Losses, weights and the log are those of one process."""
    two, *_ = check.VARIANTS
    flags = [*flags_of(files, "msrvtt-qa"), *check.FIXED, "--lr", "0.02"]
    flags += ["--output-dir", str(tmp_path)]
    code, output = check.run(check.Job(
        mama_qa, [*flags, "--run-name", "one"], tmp_path / "one.log"))
    assert code == 0, output
    assert check.keeps_promise(two, mama_qa, flags, tmp_path), capsys.readouterr().out
    for row, expected in zip(steps(tmp_path / two.name), steps(tmp_path / "one")):
        for column in ("loss", "L", "w", "CE", "answered"):
            assert row[column] == pytest.approx(expected[column], rel=1e-2, abs=1e-4)
