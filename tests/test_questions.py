"""Video question answering: the files of each set as its authors wrote them."""

import json
import pickle

import common
from contrastive import data as data_sets
from contrastive.engine.processes import UserError

import pytest

from helpers import write_rows, write_video

OPTIONS = {"frames": 2, "image_size": 32}

TGIF = ["gif_name", "question", *(f"a{k}" for k in range(1, 6)), "answer", "vid_id", "key"]

NEXTQA = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()

CAUSAL = ["-0AbC_000015_000025", "x1_1_11", "gone_1_11"]

TYPES = ["descriptive", "explanatory", "predictive answer", "predictive reason", "counterfactual answer",
         "counterfactual reason"]


def write_tgif(root, name, header, *rows):
    """Tab separated, and called csv."""
    (root / name).write_text("".join("\t".join(map(str, row)) + "\n" for row in [header, *rows]))


def write_causal(root, name, right, **changes):
    """QA/NAME/text.json and answer.json; right: number of the right choice everywhere but in changes."""
    folder, kinds = root / "QA" / name, {"descriptive": 1, "explanatory": 1, "predictive": 2, "counterfactual": 2}
    text = {kind: {"question": f"{kind} of [person_1]?", "answer": [f"{kind[0]}{k}" for k in range(5)]}
            | ({"reason": [f"because {k}" for k in range(5)]} if parts == 2 else {}) for kind, parts in kinds.items()}
    answer = {kind: {part: changes.get(f"{kind} {part}", right) for part in text[kind] if part != "question"}
              for kind in kinds}
    folder.mkdir(parents=True)
    (folder / "text.json").write_text(json.dumps(text))
    (folder / "answer.json").write_text(json.dumps(answer))


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """Files of all sets as their authors wrote them, and real videos of most."""
    root = tmp_path_factory.mktemp("asked")
    for k, name in enumerate(("video0.mp4", "video7.mp4", "vid2.avi", "-4wsuPCjDBc_5_15.avi", "tumblr_a_250.gif",
                              "tumblr_b_250.gif", "1164/4010069381.mp4", *(f"{name}.mp4" for name in CAUSAL[:2]))):
        codec, pixels = {"avi": ("mpeg4", "yuv420p"), "gif": ("gif", "rgb8"), "mp4": ("libx264", "yuv420p")}[name[-3:]]
        write_video(root / "videos" / name, [3 * k, 3 * k + 1, 3 * k + 2], codec, pixels=pixels)
    write_rows(root / "train_qa.json", ["answer", "category_id", "id", "question", "video_id"], [
        ("couch", 14, 0, "what is a man sitting on?", 0), ("man", 14, 1, "who is sitting?", 0),
        ("two", 3, 2, "how many cars are there?", "video7"), ("dog", 3, 3, "what barks?", 9),
        ("", 3, 4, "what is it?", 7), ("cat", 3, 5, " ", 7)])
    write_rows(root / "val_qa.json", ["answer", "id", "question", "video_id"], [
        ("squirrel", 30933, "what eats a peanut?", 1), ("dog", 30934, "what runs?", 2)])
    (root / "youtube_mapping.txt").write_text("-4wsuPCjDBc_5_15 vid1\n-7KMZQEsJW4_205_208 vid2\n")
    for kind in ("action", "transition"):
        write_tgif(root, f"Train_{kind}_question.csv", TGIF,
                   ("tumblr_a_250", "What does the cat do ?", "sit", 'say "no', "wave", "run", "nod", 1, "ACTION7", 5),
                   ("tumblr_b_250", "What before yawn ?", "yell", "nod", "yell", "sit", "run", 2, "ACTION8", 6),
                   ("tumblr_b_250", "What after yawn ?", "yell", "nod", "jump", "sit", "run", 5, "ACTION9", 6),
                   ("tumblr_b_250", "What does it do ?", "", "", "", "", "", 0, "ACTION10", 6),
                   ("tumblr_c_250", "What 2 times ?", "yell", "nod", "jump", "sit", "run", 0, "ACTION11", 7))
    known = "vacuum with unnattached tube,tilt head,tip hat,removes glasses,sing passionately".split(",")
    write_tgif(root, "Test_transition_question.csv", TGIF,
               ("tumblr_a_250", "What does the man do before point to the camera ?", *known, 4, "TRANS23", 23))
    write_tgif(root, "Test_frameqa_question.csv", "gif_name question answer type vid_id key description".split(),
               ("tumblr_a_250", "what color ?", "black", 2, "FRAMEQA4460", 87751, "a black shirt ."),
               ("tumblr_a_250", "how many men ?", "two", 1, "FRAMEQA3809", 81281, "two men ."))
    write_rows(root / "nextqa" / "val.csv", NEXTQA, [
        (4010069381, 369, 640, 480, "how do they play", 0, 6, "CH", "roll", "tap", "strum", "hit", "pat, with hand"),
        (4010069381, 369, 640, 480, "what did he do before sitting", 4, 7, "TP", "a", "b", "c", "d", "e"),
        (4010069381, 719, 320, 240, "where is this place", 1, 8, "DL", "mall", "river", "pool", "room", "hill")])
    write_causal(root, CAUSAL[0], 2)
    write_causal(root, CAUSAL[1], 4, **{"predictive reason": 7})
    write_causal(root, CAUSAL[2], 0)
    (root / "valid.pkl").write_bytes(pickle.dumps(CAUSAL))
    return root


def five(letter):
    return [f"{letter}{k}" for k in range(5)]

# set, split, {key: (question, answer, choices, question_type)}, words of the note
CHOICES = {"tumblr_a_250 ACTION7": ("What does the cat do ?", 'say "no', ["sit", 'say "no', "wave", "run", "nod"], ""),
           "tumblr_b_250 ACTION8": ("What before yawn ?", "yell", ["nod", "yell", "sit", "run"], "")}

HALVES = [(0, 2, TYPES), (1, 4, [*TYPES[:2], *TYPES[4:]])]  # the video, its right choice; half a pair is none

EXPECTED = [
    ("msrvtt-qa", "train", {"video0 0": ("what is a man sitting on?", "couch", [], ""),
                            "video0 1": ("who is sitting?", "man", [], ""),
                            "video7 2": ("how many cars are there?", "two", [], "")},
     ["2 questions without an answer left out", "1 videos (1 rows) are not in", "first video9",
      "3 examples, 158,581 expected"]),
    ("msvd-qa", "val", {"vid1 30933": ("what eats a peanut?", "squirrel", [], ""),
                        "vid2 30934": ("what runs?", "dog", [], "")}, []),
    *[(f"tgif-qa-r-{kind}", "train", CHOICES, ["2 questions without an answer left out", "1 videos (1 rows)"])
      for kind in ("action", "transition")],
    ("tgif-qa-r-frame", "test", {"tumblr_a_250 FRAMEQA4460": ("what color ?", "black", [], "color"),
                                 "tumblr_a_250 FRAMEQA3809": ("how many men ?", "two", [], "number")}, []),
    ("nextqa", "val", {
        "4010069381 6": ("how do they play", "roll", ["roll", "tap", "strum", "hit", "pat, with hand"], "causal how"),
        "4010069381 7": ("what did he do before sitting", "e", [*"abcde"], "temporal next"),
        "4010069381 8": ("where is this place", "river", ["mall", "river", "pool", "room", "hill"],
                         "descriptive location")}, []),
    ("causal-vidqa", "val", {f"{CAUSAL[v]} {kind if ' ' in kind else f'{kind} answer'}": (
        f"{kind.split()[0]} of [person_1]?", choices[right], choices, kind)
        for v, right, kinds in HALVES for kind in kinds
        for choices in [five("because " if "reason" in kind else kind[0])]},
     ["2 questions without an answer left out", "1 videos (6 rows) are not in"])]


def opened(root, name, split):
    return common.load_data(name, split, data_dir=str(root), video_dir=str(root / "videos"), **OPTIONS)


@pytest.mark.parametrize("name, split, rows, words", EXPECTED, ids=[name for name, *_ in EXPECTED])
def test_the_questions_of_a_set(name, split, rows, words, replica):
    data = opened(replica, name, split)
    columns = [data.column(c) for c in ("question", "answer", "choices")]
    kinds = data.column("question_type") or [""] * len(data)
    assert dict(zip(data.column("key"), zip(*columns, kinds))) == rows
    assert all(w in data.note for w in words) and "TGIF-QA's" not in data.note
    assert [data.captions(i) for i in range(len(data))] == [[q] for q in columns[0]] and not data.has_captions
    assert len(data.read(len(data) - 1)) == 2
    assert data.select([1])[0]["answer"] == columns[1][1] and data.select([1])[0]["choices"] == columns[2][1]
    if name == "causal-vidqa":  # answer and reason have one number
        assert data.column("pair").tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 7, 7]


def test_the_choices_of_tgif_qa_before_they_were_drawn_anew_are_told(replica, capsys):
    data = opened(replica, "tgif-qa-r-transition", "test")
    assert "the choices are TGIF-QA's" in data.note and "gives the answer away" in capsys.readouterr().out


def test_held_out_questions_are_of_other_videos(tmp_path):
    for i in range(60):
        write_video(tmp_path / f"tumblr_{i}.gif", [i, i + 1], "gif", pixels="rgb8")
    write_tgif(tmp_path, "Train_action_question.csv", TGIF, *[
        (f"tumblr_{i}", f"What {k} times ?", "sit", "run", "wave", "nod", "yell", 1, f"ACTION{4 * i + k}", 5)
        for i in range(60) for k in range(4)])
    held, rest = (common.load_data("tgif-qa-r-action", split, data_dir=str(tmp_path), hold_out_val=True, **OPTIONS)
                  for split in ("val", "train"))
    assert len(held) and len(held) + len(rest) == 240 and not {*held.column("video")} & {*rest.column("video")}
    assert "held out of 240" in held.note


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
    (tmp_path / "valid.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle that calls a program
    assert "only plain data is read from pickles" in refused("causal-vidqa", "val", data_dir=root)
    (tmp_path / "Test_frameqa_question.csv").write_text("gif_name\tquestion\na\tb\tc\n")
    assert "Test_frameqa_question.csv: zip() argument 2 is longer" in refused("tgif-qa-r-frame", "test", data_dir=root)
