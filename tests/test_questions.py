"""Video question answering: the files of each set as its authors wrote them, real videos, how answers are scored."""

import json
import pickle

import common
from contrastive import data as data_sets
from contrastive import evaluation
from contrastive.engine.processes import UserError
from contrastive.evaluation.metrics import answer_hits

import pytest
import torch

from helpers import write_rows, write_video

OPTIONS = {"frames": 2, "image_size": 32}


def write_videos(folder, names, suffix="mp4", codec="libx264", **more):
    for k, name in enumerate(names):
        write_video(folder / f"{name}.{suffix}", [3 * k, 3 * k + 1, 3 * k + 2], codec, **more)
    return str(folder)


def opened(name, root, split="train", **more):
    """The rows of a split as {key: (question, answer, choices, question_type)}, and the data."""
    questions_of = common.load_data(name, split, data_dir=str(root), **OPTIONS | more)
    types = questions_of.column("question_type") or [""] * len(questions_of)
    columns = zip(*(questions_of.column(c) for c in ("question", "answer", "choices")), types)
    return dict(zip(questions_of.column("key"), columns)), questions_of


# ---------------------------------------------------- MSRVTT-QA, MSVD-QA --------------------------------------------
def test_msrvtt_qa(tmp_path, capsys):
    videos = write_videos(tmp_path / "videos", ["video0", "video7"])
    rows = [{"answer": "couch", "category_id": 14, "id": 0, "question": "what is a man sitting on?", "video_id": 0},
            {"answer": "man", "category_id": 14, "id": 1, "question": "who is sitting?", "video_id": 0},
            {"answer": "two", "category_id": 3, "id": 2, "question": "how many cars are there?", "video_id": "video7"},
            {"answer": "dog", "category_id": 3, "id": 3, "question": "what barks?", "video_id": 9},
            {"answer": "", "category_id": 3, "id": 4, "question": "what is it?", "video_id": 7},
            {"answer": "cat", "category_id": 3, "id": 5, "question": " ", "video_id": 7}]
    (tmp_path / "train_qa.json").write_text(json.dumps(rows))
    found, data = opened("msrvtt-qa", tmp_path, video_dir=videos)
    assert found == {"video0 0": ("what is a man sitting on?", "couch", [], ""),
                     "video0 1": ("who is sitting?", "man", [], ""),
                     "video7 2": ("how many cars are there?", "two", [], "")}
    assert data.captions(0) == ["what is a man sitting on?"] and not data.has_captions
    assert data.read(2).shape == (2, 3, 37, 56) and torch.equal(data.read(0), data.read(1))
    for words in ("2 questions without an answer left out",
                  f"1 videos (1 rows) are not in {videos}, first video9", "3 examples, 158,581 expected"):
        assert words in data.note
    assert "not comparable" in capsys.readouterr().out
    assert data.select([2])[0]["answer"] == "two" and data.select([2])[0]["choices"] == []


@pytest.mark.parametrize("named", ["vid1", "-4wsuPCjDBc_5_15"])
def test_msvd_qa_by_number_or_by_the_mapping(named, tmp_path):
    videos = write_videos(tmp_path / "YouTubeClips", [named], "avi", "mpeg4")
    (tmp_path / "youtube_mapping.txt").write_text("-4wsuPCjDBc_5_15 vid1\n-7KMZQEsJW4_205_208 vid2\n")
    row = {"answer": "squirrel", "id": 30933, "question": "what eats a peanut?", "video_id": 1}
    (tmp_path / "val_qa.json").write_text(json.dumps([row]))
    found, data = opened("msvd-qa", tmp_path, "val", video_dir=videos)
    assert found == {"vid1 30933": ("what eats a peanut?", "squirrel", [], "")} and len(data.read(0)) == 2


# ---------------------------------------------------- TGIF-QA-R ----------------------------------------------------
CHOICE = ["gif_name", "question", *(f"a{k}" for k in range(1, 6)), "answer", "vid_id", "key"]


def write_tgif(root, name, header, rows):
    """Tab separated, and called csv."""
    root.mkdir(exist_ok=True)
    (root / name).write_text("".join("\t".join(map(str, row)) + "\n" for row in [header, *rows]))


@pytest.mark.parametrize("kind", ["action", "transition"])
def test_tgif_choices(kind, tmp_path, capsys):
    write_videos(tmp_path, ["tumblr_a_250", "tumblr_b_250"], "gif", "gif", pixels="rgb8")
    write_tgif(tmp_path, f"Train_{kind}_question.csv", CHOICE, [
        ("tumblr_a_250", "What does the cat do 3 times ?", "sit", 'say "no', "wave", "run", "nod", 1, "ACTION7", 5),
        ("tumblr_b_250", "What does it do before yawn ?", "yell", "nod", "yell", "sit", "run", 2, "ACTION8", 6),
        ("tumblr_b_250", "What does it do after yawn ?", "yell", "nod", "jump", "sit", "run", 5, "ACTION9", 6),
        ("tumblr_b_250", "What does it do ?", "", "", "", "", "", 0, "ACTION10", 6),
        ("tumblr_c_250", "What does it do 2 times ?", "yell", "nod", "jump", "sit", "run", 0, "ACTION11", 7)])
    found, data = opened(f"tgif-qa-r-{kind}", tmp_path)
    choices = ["sit", 'say "no', "wave", "run", "nod"]
    assert found == {
        "tumblr_a_250 ACTION7": ("What does the cat do 3 times ?", 'say "no', choices, ""),
        "tumblr_b_250 ACTION8": ("What does it do before yawn ?", "yell", ["nod", "yell", "sit", "run"], "")}
    for words in ("2 questions without an answer left out", "1 videos (1 rows) are not in"):
        assert words in data.note
    assert "TGIF-QA's" not in data.note and len(data.read(1)) == 2


def test_held_out_questions_are_of_other_videos(tmp_path):
    names = [f"tumblr_{i}" for i in range(60)]
    write_videos(tmp_path, names, "gif", "gif", pixels="rgb8")
    write_tgif(tmp_path, "Train_action_question.csv", CHOICE, [
        (name, f"What does it do {k} times ?", "sit", "run", "wave", "nod", "yell", 1, f"ACTION{4 * i + k}", 5)
        for i, name in enumerate(names) for k in range(4)])
    held, rest = (common.load_data("tgif-qa-r-action", split, data_dir=str(tmp_path), hold_out_val=True, **OPTIONS)
                  for split in ("val", "train"))
    assert len(held) and len(held) + len(rest) == 240 and not {*held.column("video")} & {*rest.column("video")}
    assert "held out of 240" in held.note


def test_the_choices_of_tgif_qa_before_they_were_drawn_anew_are_told(tmp_path, capsys):
    write_videos(tmp_path, ["tumblr_a_250"], "gif", "gif", pixels="rgb8")
    known = "vacuum with unnattached tube,tilt head,tip hat,removes glasses,sing passionately".split(",")
    row = ("tumblr_a_250", "What does the man do before point to the camera ?", *known, 4, "TRANS23", 23)
    write_tgif(tmp_path, "Test_transition_question.csv", CHOICE, [row])
    data = common.load_data("tgif-qa-r-transition", "test", data_dir=str(tmp_path), **OPTIONS)
    assert "the choices are TGIF-QA's" in data.note and "gives the answer away" in capsys.readouterr().out


def test_tgif_frame(tmp_path):
    write_videos(tmp_path / "gifs", ["tumblr_a_250"], "gif", "gif", pixels="rgb8")
    header = ["gif_name", "question", "answer", "type", "vid_id", "key", "description"]
    write_tgif(tmp_path, "Test_frameqa_question.csv", header, [
        ("tumblr_a_250", "what is the color of the shirt ?", "black", 2, "FRAMEQA4460", 87751, "a black shirt ."),
        ("tumblr_a_250", "how many men are there ?", "two", 1, "FRAMEQA3809", 81281, "two men .")])
    found, _ = opened("tgif-qa-r-frame", tmp_path, "test", video_dir=str(tmp_path / "gifs"))
    assert found == {"tumblr_a_250 FRAMEQA4460": ("what is the color of the shirt ?", "black", [], "color"),
                     "tumblr_a_250 FRAMEQA3809": ("how many men are there ?", "two", [], "number")}


# ---------------------------------------------------- NExT-QA, Causal-VidQA -----------------------------------------
def test_nextqa(tmp_path):
    """The videos lie in folders of VidOR."""
    write_videos(tmp_path / "NExTVideo" / "1164", ["4010069381", "2574374895"])
    header = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()
    write_rows(tmp_path / "nextqa" / "val.csv", header, [
        (4010069381, 369, 640, 480, "how do the two man play the instrument", 0, 6, "CH", "roll the handle",
         "tap their feet", "strum the string", "hit with sticks", "pat, with hand"),
        (4010069381, 369, 640, 480, "what did he do before sitting", 4, 7, "TP", "a", "b", "c", "d", "e"),
        (2574374895, 719, 320, 240, "where is this place", 1, 8, "DL", "mall", "river", "pool", "room", "hill")])
    found, data = opened("nextqa", tmp_path, "val")
    assert list(found) == ["4010069381 6", "4010069381 7", "2574374895 8"]
    assert found["4010069381 6"][1:] == ("roll the handle", ["roll the handle", "tap their feet", "strum the string",
                                                             "hit with sticks", "pat, with hand"], "causal how")
    assert [row[3] for row in found.values()] == ["causal how", "temporal next", "descriptive location"]
    assert found["4010069381 7"][1] == "e" and data.read(2).shape[0] == 2


def causal_video(root, name, right, **changes):
    """QA/NAME/text.json and answer.json; right: number of the right choice everywhere."""
    kinds = {"descriptive": 1, "explanatory": 1, "predictive": 2, "counterfactual": 2}
    text = {kind: {"question": f"{kind} of [person_1]?", "answer": [f"{kind[0]}{k}" for k in range(5)]}
            | ({"reason": [f"because {k}" for k in range(5)]} if parts == 2 else {}) for kind, parts in kinds.items()}
    answer = {kind: {part: changes.get(f"{kind} {part}", right) for part in text[kind] if part != "question"}
              for kind in kinds}
    folder = root / "QA" / name
    folder.mkdir(parents=True)
    (folder / "text.json").write_text(json.dumps(text))
    (folder / "answer.json").write_text(json.dumps(answer))


def test_causal_vidqa_asks_six_times_and_pairs_answer_and_reason(tmp_path):
    names = ["-0AbC_000015_000025", "x1_1_11", "gone_1_11"]
    videos = write_videos(tmp_path / "videos", names[:2])
    causal_video(tmp_path, names[0], 2)
    causal_video(tmp_path, names[1], 4, **{"predictive reason": 7})
    causal_video(tmp_path, names[2], 0)
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "valid.pkl").write_bytes(pickle.dumps(names))
    found, data = opened("causal-vidqa", tmp_path, "val", video_dir=videos)
    types = ["descriptive", "explanatory", "predictive answer", "predictive reason", "counterfactual answer",
             "counterfactual reason"]
    assert [row[3] for row in found.values()] == [*types, *types[:2], *types[4:]]  # half a pair is none
    assert found[f"{names[0]} predictive reason"] == (
        "predictive of [person_1]?", "because 2", [f"because {k}" for k in range(5)], "predictive reason")
    pair = data.column("pair").tolist()
    assert pair == [0, 1, 2, 2, 3, 3, 4, 5, 7, 7]
    for words in ("2 questions without an answer left out", "1 videos (6 rows) are not in"):
        assert words in data.note
    code = b"cos\nsystem\n(S'true'\ntR."  # a pickle that calls a program
    (tmp_path / "split" / "valid.pkl").write_bytes(code)
    data_sets._named.cache_clear()
    with pytest.raises(UserError, match="only plain data is read from pickles"):
        opened("causal-vidqa", tmp_path, "val", video_dir=videos)


# ---------------------------------------------------- bad input -----------------------------------------------------
def test_what_is_missing_is_said_in_one_line(tmp_path):
    def refused(name="msrvtt-qa", split="train", **options):
        with pytest.raises(UserError) as info:
            common.load_data(name, split, **options)
        assert "\n" not in str(info.value)
        return str(info.value)

    root = str(tmp_path)
    assert "msrvtt-qa needs --data-dir" in refused()
    assert "none of train_qa.json is there" in refused(data_dir=root)
    assert "no val split; it has: train, test" in refused("tgif-qa-r-frame", "val", data_dir=root)
    (tmp_path / "train_qa.json").write_text('[{"question": "what?", "answer": "cat", "id": 1}]')
    assert "train_qa.json: 'video_id'" in refused(data_dir=root)
    (tmp_path / "train_qa.json").write_text('[{"question": "what?", "answer": "cat", "id": 1, "video_id": 3}]')
    data_sets._named.cache_clear()
    assert "looked for video3); --video-dir names" in refused(data_dir=root)
    assert "no such folder" in refused(data_dir=root, video_dir=str(tmp_path / "no"))
    (tmp_path / "Test_frameqa_question.csv").write_text("gif_name\tquestion\na\tb\tc\n")
    assert "Test_frameqa_question.csv: zip() argument 2 is longer" in refused("tgif-qa-r-frame", "test", data_dir=root)


# ---------------------------------------------------- scores -------------------------------------------------------
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
    assert evaluation.metrics.answer_numbers(["cat", "dog", "two"], vocabulary).tolist() == [1, -1, 0]
    assert evaluation.metrics.answer_numbers(["b", "z"], choices=[["a", "b"], ["a", "b", "c"]]).tolist() == [1, -1]


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
