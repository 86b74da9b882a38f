"""Some 200 annotation files of named sets as they should not be: read with what is lost counted, or refused in one line
that names the file. All in one process; the videos are empty files, which nothing opens before training."""

import json
import pickle

import common
from contrastive import engine
from contrastive.engine.base import UserError

import numpy as np
import pytest

DEEP = b"[" * 200_000 + b"]" * 200_000
LATIN = "caf\u00e9".encode("latin1")
LONG = "x" * 200_000
EPIC = ["narration_id", "video_id", "start_timestamp", "stop_timestamp", "narration", "verb_class", "noun_class",
        "all_noun_classes"]
NEXT = "video frame_count width height question answer qid type a0 a1 a2 a3 a4".split()


def csv_of(header, *rows, separator=","):
    def cell(x):
        return '"' + str(x).replace('"', '""') + '"' if set(str(x)) & {separator, '"'} else str(x)
    return "".join(separator.join(map(cell, row)) + "\n" for row in [header, *rows]).encode()


def epic_row(k, video="P01_01", start="00:00:01.00", end="00:00:02.00", said=None, verb=1, noun=2, nouns="[2, 3]"):
    return [f"{video}_{k}", video, start, end, said or f"wash pan {k}", verb, noun, nouns]


def qa_row(k, **changes):
    return {"answer": ["two", "one"][k % 2], "id": k, "question": f"how many {k}?", "video_id": k} | changes


def next_row(k, question="why?", answer=0, kind="CW", choices="abcde", **more):
    return [k, 9, 9, 9, question, answer, more.get("qid", k), kind, *choices]


def causal(part, **changes):
    kinds = {"descriptive": 1, "explanatory": 1, "predictive": 2, "counterfactual": 2}
    value = {kind: {"question": f"{kind}?"} if part == "text" else {} for kind in kinds}
    for kind, parts in kinds.items():
        for which in ("answer", "reason")[:parts]:
            value[kind][which] = [f"{which} {k}" for k in range(5)] if part == "text" else 1
            value[kind][which] = changes.get(f"{kind} {which}", value[kind][which])
    return json.dumps(value).encode()


def ssv2_row(k, **changes):
    return {"id": str(k), "label": f"holding thing {k}", "template": "Holding [something]"} | changes


FRAMES = ["original_vido_id video_id frame_id path labels", *(f"{k} {k} 0 {k}/0.jpg 1" for k in range(3))]
# set: (split, its files, its videos)
GOOD = {
    "epic-kitchens-100": ("test", {
        "EPIC_100_retrieval_test.csv": csv_of(EPIC, *(epic_row(k) for k in range(3))),
        "EPIC_100_retrieval_test_sentence.csv": csv_of(["narration_id", "narration"], ["P01_01_0", "wash pan 0"],
                                                       ["P01_01_2", "wash pan 2"]),
        "relevancy/caption_relevancy_EPIC_100_retrieval_test.pkl": pickle.dumps(np.full((3, 2), 0.5))},
        ["P01_01.MP4"]),
    "ssv2-lt": ("train", {
        "something-something-v2-train.json": json.dumps([ssv2_row(k) for k in range(3)]).encode(),
        "train.csv": "\n".join(FRAMES).encode()}, ["0.webm", "1.webm", "2.webm"]),
    "msrvtt-qa": ("train", {"train_qa.json": json.dumps([qa_row(k) for k in range(3)]).encode()},
                  ["video0.mp4", "video1.mp4", "video2.mp4"]),
    "msvd-qa": ("train", {"train_qa.json": json.dumps([qa_row(k) for k in range(3)]).encode(),
                          "youtube_mapping.txt": b"a vid0\nb vid1\n"}, ["a.avi", "vid1.avi", "vid2.avi"]),
    "tgif-qa-r-frame": ("train", {"Train_frameqa_question.csv": csv_of(
        ["gif_name", "question", "answer", "type", "vid_id"], ["g0", "what?", "red", 2, "F0"],
        ["g1", "who?", "man", 0, "F1"], separator="\t")}, ["g0.gif", "g1.gif"]),
    "tgif-qa-r-action": ("train", {"Train_action_question.csv": csv_of(
        ["gif_name", "question", "a1", "a2", "a3", "a4", "a5", "answer", "vid_id"], ["g0", "what?", *"abcde", 2, "A0"],
        ["g1", "who?", *"abcde", 0, "A7"], separator="\t")}, ["g0.gif", "g1.gif"]),
    "nextqa": ("train", {"train.csv": csv_of(NEXT, *(next_row(k) for k in range(3)))}, ["0.mp4", "1.mp4", "2.mp4"]),
    "causal-vidqa": ("train", {"train.pkl": pickle.dumps(["v0", "v1"]), "QA/v0/text.json": causal("text"),
                               "QA/v0/answer.json": causal("answer"), "QA/v1/text.json": causal("text"),
                               "QA/v1/answer.json": causal("answer")}, ["v0.mp4", "v1.mp4"]),
    "msrvtt": ("train", {"MSRVTT_train.9k.csv": b"video_id\nvideo0\nvideo1\n", "MSRVTT_data.json": json.dumps(
        {"sentences": [{"video_id": f"video{k}", "caption": f"a man {k}"} for k in range(2)]}).encode()},
        ["video0.mp4", "video1.mp4"]),
    "msvd": ("train", {"train_list.txt": b"v0\nv1\n", "raw-captions.pkl": pickle.dumps(
        {f"v{k}": [["a", "man", str(k)]] for k in range(2)})}, ["v0.avi", "v1.avi"]),
    "activitynet": ("train", {"train.json": json.dumps(
        {f"v_{k}": {"sentences": ["one.", "two."]} for k in range(2)}).encode()}, ["v_0.mp4", "v_1.mp4"]),
    "didemo": ("train", {"train_data.json": json.dumps(
        [{"video": f"d{k}.mov", "description": "a cat"} for k in range(2)]).encode()}, ["d0.mp4", "d1.mp4"]),
    "youcook2": ("train", {"youcookii_annotations_trainval.json": json.dumps({"database": {f"y{k}": {
        "subset": "training", "annotations": [{"segment": [1, 5], "sentence": "cut"}]} for k in range(2)}}).encode()},
        ["y0.mp4", "y1.mp4"]),
    "howto100m": ("train", {"caption.json": json.dumps({f"h{k}": {"start": [0.0], "end": [2.0], "text": ["cut it"]}
                                                        for k in range(2)}).encode()}, ["h0.mp4", "h1.mp4"])}
ROWS = {"epic-kitchens-100": 3, "ssv2-lt": 3, "msrvtt-qa": 3, "msvd-qa": 3, "nextqa": 3, "causal-vidqa": 12}


def data_of(name, folder, file=None, content=None):
    """The split of a set whose files are good but for one; content None: that file is not there."""
    split, files, videos = GOOD[name]
    for path, good in files.items():
        wanted = good if path != file else content
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if wanted is not None:
            (folder / path).write_bytes(wanted)
    (folder / "videos").mkdir(exist_ok=True)
    for video in videos:
        (folder / "videos" / video).touch()
    engine.base.say_once.cache_clear()
    return common.load_data(name, split, data_dir=str(folder), video_dir=str(folder / "videos"), frames=2)


def refused(name, folder, file, content, *words):
    with pytest.raises(UserError) as error:
        data_of(name, folder, file, content)
    said = str(error.value)
    assert file.rpartition("/")[2] in said and "\n" not in said and len(said) < 900, said[:2000]
    assert "chunk-size" not in said and all(word in said for word in words), said


@pytest.mark.parametrize("name", GOOD)
def test_the_files_are_good(name, tmp_path):
    assert len(data_of(name, tmp_path)) == ROWS.get(name, 2)


# ------------------------------------------------ any file of any set -----------------------------------------------
TEXTS = [(name, file) for name, (_, files, _) in GOOD.items() for file in files if not file.endswith(".pkl")]
PICKLES = [(name, file) for name, (_, files, _) in GOOD.items() for file in files if file.endswith(".pkl")]


@pytest.mark.parametrize("name, file", TEXTS)
def test_text_that_is_not_utf8(name, file, tmp_path):
    good = GOOD[name][1][file]
    refused(name, tmp_path, file, good[:-2] + LATIN + good[-2:], "UTF-8")
    refused(name, tmp_path, file, good.decode().encode("utf-16"), "UTF-8")


@pytest.mark.parametrize("name, file", TEXTS)
def test_a_byte_order_mark_is_no_letter(name, file, tmp_path):
    assert len(data_of(name, tmp_path, file, b"\xef\xbb\xbf" + GOOD[name][1][file])) == ROWS.get(name, 2)


@pytest.mark.parametrize("name, file", [(n, f) for n, f in TEXTS if f != "youtube_mapping.txt"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\0" * 64], ids=["empty", "blank", "zeros"])
def test_text_of_nothing(name, file, content, tmp_path):
    refused(name, tmp_path, file, content)


@pytest.mark.parametrize("name, file", [(n, f) for n, f in TEXTS if f.endswith(".json")])
def test_json_of_another_kind(name, file, tmp_path):
    for content in (DEEP, GOOD[name][1][file][:-3], b"{}", b"[]", b"3", b'"text"', b"null", b"[null]", b"[[1, 2]]",
                    b'{"a": null}', b'{"database": 3}', b'{"sentences": {"a": 1}}', b'{"a": [1]}'):
        refused(name, tmp_path, file, content)


@pytest.mark.parametrize("name, file", PICKLES)
def test_pickles_of_another_kind(name, file, tmp_path):
    for content in (b"", b"no pickle", GOOD[name][1][file][:-4], b"cos\nsystem\n(S'true'\ntR.",
                    b"cnumpyevil\nndarray\n.", b"cnumpy\nndarray\n(tR.", pickle.dumps(3), pickle.dumps([[1, 2]]),
                    b"]" * 100_000 + b"a" * 99_999 + b".", pickle.dumps({"a": 3}), pickle.dumps([None])):
        refused(name, tmp_path, file, content)


@pytest.mark.parametrize("name", GOOD)
def test_half_a_letter_is_replaced(name, tmp_path):
    file, good = next(((f, c) for f, c in GOOD[name][1].items() if f.endswith(".json")), (None, b""))
    for word in (b"how many 1", b"holding thing 1", b"a man 1", b"one.", b"a cat", b'"cut', b"descriptive?"):
        if word in good:
            data = data_of(name, tmp_path, file, good.replace(word, word + b"\\ud800"))
            assert any("\ufffd" in text for i in range(len(data)) for text in data.captions(i))


# ------------------------------------------------ EPIC-KITCHENS-100 -------------------------------------------------
CLIPS, SENTENCES, RELEVANCY = GOOD["epic-kitchens-100"][1]


@pytest.mark.parametrize("changes, words", [
    (dict(nouns="[1e999]"), ["line 3"]), (dict(nouns="[" + "9" * 400 + "]"), ["line 3"]),
    (dict(nouns="{1: 2}"), ["line 3"]), (dict(nouns="'12'"), ["line 3"]), (dict(nouns="[1.9]"), ["line 3", "1.9"]),
    (dict(nouns="[True]"), ["line 3"]), (dict(nouns="[300]"), ["line 3", "0..299"]), (dict(nouns="[-1]"), ["line 3"]),
    (dict(nouns="[" * 500), ["line 3"]), (dict(nouns="()" * 9), ["line 3"]), (dict(nouns="3"), ["line 3"]),
    (dict(verb="1.5"), ["line 3"]), (dict(verb="nan"), ["line 3"]), (dict(verb="97"), ["0..96"]),
    (dict(noun="1e999"), ["line 3"]), (dict(start="-00:00:01.00"), ["line 3"]), (dict(start="00:00:-1"), ["line 3"]),
    (dict(start="00:00:nan"), ["line 3"]), (dict(end="00:00:inf"), ["line 3"]),
    (dict(end="9" * 400 + ":0:0"), ["line 3"]), (dict(start="1:2"), ["line 3"]), (dict(start="00:00:09"), ["line 3",
    "it ends before its start"]),
    (dict(said=" "), ["line 3", "no narration"])])
def test_a_row_of_epic(changes, words, tmp_path):
    rows = [epic_row(0), epic_row(1, **changes), epic_row(2)]
    refused("epic-kitchens-100", tmp_path, CLIPS, csv_of(EPIC, *rows), *words)


def test_rows_of_epic_that_are_odd_and_right(tmp_path):
    rows = [epic_row(0, said=LONG), epic_row(1, nouns="[]"), epic_row(2, said='a "big" pan')]
    data = data_of("epic-kitchens-100", tmp_path, CLIPS, csv_of(EPIC, *rows))
    assert [data.captions(i)[0][:9] for i in range(3)] == ["x" * 9, "wash pan ", 'a "big" p']
    assert data.column("nouns")[1] == [2]


@pytest.mark.parametrize("content, words", [
    (csv_of(EPIC, epic_row(0), epic_row(0), epic_row(2)), ["P01_01_0", "twice"]),
    (csv_of(EPIC), ["no rows"]), (csv_of(EPIC[1:], epic_row(0)[1:]), ["narration_id"]),
    (csv_of(epic_row(0), epic_row(1)), ["no column"]), (csv_of(EPIC, epic_row(0)[:4]), ["line 2", "4 fields"]),
    (csv_of(EPIC, [*epic_row(0), "more"]), ["line 2", "9 fields"]),
    (csv_of(EPIC, epic_row(0)) + b'P01_01_1,"open', ["line 3", "never closed"])])
def test_the_clips_of_epic(content, words, tmp_path):
    refused("epic-kitchens-100", tmp_path, CLIPS, content, *words)


@pytest.mark.parametrize("content, words", [
    (b"P01_01_0,wash pan 0\nP01_01_2,wash pan 2\n", ["header"]),
    (b"narration_id,narration\nP09_09_0,a\n", ["first P09_09_0"]), (b"narration_id,narration\n", ["empty"]),
    (b"narration_id,narration\nP01_01_0,a\nP01_01_0,a\n", ["P01_01_0", "twice"]),
    (b'narration_id,narration\nP01_01_0,"a\nP01_01_2,b\n', ["never closed"])])
def test_the_sentences_of_epic(content, words, tmp_path):
    refused("epic-kitchens-100", tmp_path, SENTENCES, content, *words)


@pytest.mark.parametrize("value", [np.full((2, 3), 0.5), np.full((3, 2), np.nan), np.full((3, 2), 2.0),
                                   np.full((3, 2), -0.1), np.ones((3, 2), int), np.zeros((3, 2), object), "abc",
                                   [[0.5, 0.5]] * 2])
def test_relevancies_are_read_before_training(value, tmp_path):
    refused("epic-kitchens-100", tmp_path, RELEVANCY, pickle.dumps(value))


def test_two_chunks_of_one_second(tmp_path):
    (tmp_path / "videos" / "P01_01").mkdir(parents=True)
    for chunk in ("0.MP4", "00.MP4"):
        (tmp_path / "videos" / "P01_01" / chunk).touch()
    with pytest.raises(UserError, match="0.MP4 and 00.MP4 both begin at second 0"):
        data_of("epic-kitchens-100", tmp_path)


# ------------------------------------------------ Something-Something v2 --------------------------------------------
LABELS, LIST = GOOD["ssv2-lt"][1]


@pytest.mark.parametrize("row", [ssv2_row(1, template=None), ssv2_row(1, label=[1]), {"id": "1"}, ssv2_row(1,
                                  template=["a"]), [1], None, "1"])
def test_a_row_of_ssv2(row, tmp_path):
    refused("ssv2-lt", tmp_path, LABELS, json.dumps([ssv2_row(0), row, ssv2_row(2)]).encode())


@pytest.mark.parametrize("content", ["\n".join(FRAMES[1:]), FRAMES[0], "video\n1\n", "original_video,id"])
def test_the_list_of_ssv2(content, tmp_path):
    refused("ssv2-lt", tmp_path, LIST, content.encode())


def test_a_clip_of_ssv2_without_a_caption(tmp_path):
    rows = [ssv2_row(0), ssv2_row(1, label=None), ssv2_row(2)]
    data = data_of("ssv2-lt", tmp_path, LABELS, json.dumps(rows).encode())
    assert len(data) == 2 and "1 without a caption" in data.note


def test_a_clip_of_ssv2_that_is_told_twice(tmp_path):
    rows = [ssv2_row(0), ssv2_row(1), ssv2_row(1, label="putting thing 9"), ssv2_row(2)]
    refused("ssv2-lt", tmp_path, LABELS, json.dumps(rows).encode(), "1", "twice")


# ------------------------------------------------ questions ---------------------------------------------------------
@pytest.mark.parametrize("changes, note", [
    (dict(answer=None), "1 questions without an answer"), (dict(answer=" "), "1 questions without an answer"),
    (dict(question=None), "1 questions without a question"), (dict(question=""), "1 questions without a question"),
    (dict(video_id="video9"), "1 videos (1 questions) are not in")])
@pytest.mark.parametrize("name", ["msrvtt-qa", "msvd-qa"])
def test_an_open_question_that_is_left_out(name, changes, note, tmp_path):
    rows = [qa_row(0), qa_row(1, **changes), qa_row(2), qa_row(2, id=7, answer="one")]
    data = data_of(name, tmp_path, "train_qa.json", json.dumps(rows).encode())
    assert len(data) == 3 and note in data.note and "None" not in data.column("answer"), data.note


@pytest.mark.parametrize("row", [qa_row(1, answer=["two"]), qa_row(1, answer={"a": 1}), qa_row(1, question=["a"]),
                                 qa_row(1, question=True), qa_row(1, video_id=None), qa_row(1, video_id=[1]), None, [1],
                                 {"answer": "two"}, qa_row(1, video_id=1.5)])
def test_an_open_question_of_another_kind(row, tmp_path):
    refused("msrvtt-qa", tmp_path, "train_qa.json", json.dumps([qa_row(0), row]).encode())


def test_questions_with_one_answer_are_no_task(tmp_path):
    rows = [qa_row(k, answer="two") for k in range(3)]
    refused("msrvtt-qa", tmp_path, "train_qa.json", json.dumps(rows).encode(), "one answer")


@pytest.mark.parametrize("row, words", [
    (next_row(1, answer="1.9"), ["line 3", "1.9"]), (next_row(1, answer="x"), ["line 3"]),
    (next_row(1, answer=""), ["line 3"]), (next_row(1, answer="nan"), ["line 3"]),
    (next_row(1, answer="9" * 400), ["line 3"]), (next_row(1, kind="ZZ"), ["line 3", "ZZ"]),
    (next_row(1)[:-1], ["line 3", "12 fields"]), ([*next_row(1), "more"], ["line 3", "14 fields"])])
def test_a_question_with_choices_of_another_kind(row, words, tmp_path):
    refused("nextqa", tmp_path, "train.csv", csv_of(NEXT, next_row(0), row, next_row(2)), *words)


@pytest.mark.parametrize("row, note", [
    (next_row(1, answer=5), "1 questions whose answer is none of the choices"),
    (next_row(1, answer=-1), "1 questions whose answer is none of the choices"),
    (next_row(1, choices=["a", "", "", "", ""]), "1 questions without choices"),
    (next_row(1, question=""), "1 questions without a question")])
def test_a_question_with_choices_that_is_left_out(row, note, tmp_path):
    data = data_of("nextqa", tmp_path, "train.csv", csv_of(NEXT, next_row(0), next_row(2), row))
    assert len(data) == 2 and note in data.note, data.note


@pytest.mark.parametrize("file, content", [
    ("text.json", causal("text", **{"predictive answer": "abcde"})),
    ("text.json", causal("text", **{"predictive answer": [[1], 2, 3, 4, 5]})),
    ("text.json", causal("text", **{"predictive answer": {"a": 1}})),
    ("answer.json", causal("answer", **{"predictive answer": 1.9})),
    ("answer.json", causal("answer", **{"predictive answer": "x"})),
    ("answer.json", causal("answer", **{"predictive answer": None})),
    ("answer.json", causal("answer", **{"predictive answer": True})), ("answer.json", b'{"descriptive": {}}'),
    ("text.json", b'{"descriptive": {}}'), ("text.json", LATIN), ("answer.json", DEEP), ("answer.json", b"[1]")])
def test_causal_vidqa_names_the_file_that_is_wrong(file, content, tmp_path):
    refused("causal-vidqa", tmp_path, f"QA/v1/{file}", content, "v1")


def test_causal_vidqa_without_a_file_of_a_video(tmp_path):
    data = data_of("causal-vidqa", tmp_path / "a", "QA/v1/text.json", None)
    assert len(data) == 6 and "without text.json" in data.note
    refused("causal-vidqa", tmp_path / "b", "QA/v1/answer.json", None, "v1")


# ------------------------------------------------ captions of videos ------------------------------------------------
def step(segment, sentence="cut"):
    rows = {"y0": {"subset": "training", "annotations": [{"segment": [1, 5], "sentence": "mix"},
                                                         {"segment": segment, "sentence": sentence}]}}
    return json.dumps({"database": rows}).encode()


@pytest.mark.parametrize("segment", ["x", [1], [None, 2], [5, 1], [-2, 1], [float("nan"), 2], [0, float("inf")],
                                     ["9" * 400, 2], [0, True], {}, None, [[], 2]])
def test_a_window_of_another_kind(segment, tmp_path):
    refused("youcook2", tmp_path, "youcookii_annotations_trainval.json", step(segment))


def test_questions_of_one_name_are_counted(tmp_path):
    data = data_of("nextqa", tmp_path, "train.csv", csv_of(NEXT, next_row(0), next_row(2), next_row(2)))
    assert len(data) == 3 and "1 questions share their id with another one of their video" in data.note


@pytest.mark.parametrize("sentence", ["", None, " "])
def test_a_window_without_a_caption(sentence, tmp_path):
    data = data_of("youcook2", tmp_path, "youcookii_annotations_trainval.json", step([6, 7], sentence))
    assert len(data) == 1 and "1 without a caption" in data.note, data.note


@pytest.mark.parametrize("name, file, rows", [
    ("didemo", "train_data.json", [{"video": "x" * 5000, "description": "a"}, {"video": "d0", "description": "b"}]),
    ("activitynet", "train.json", {"x" * 5000: {"sentences": ["a"]}, "v_0": {"sentences": ["b"]}}),
    ("didemo", "train_data.json", [{"video": "a\0b", "description": "a"}, {"video": "d0", "description": "b"}])])
def test_a_video_whose_name_no_disk_takes(name, file, rows, tmp_path):
    data = data_of(name, tmp_path, file, json.dumps(rows).encode())
    assert len(data) == 1 and "1 videos are not in" in data.note


@pytest.mark.parametrize("line", [{"start": [0.0], "end": [2.0], "text": "cut it"}, {"start": [], "end": [2],
                                  "text": ["a"]},
                                  {"start": ["x"], "end": [2], "text": ["a"]}, {"text": ["a"]}, None, 3,
                                  {"start": [float("nan")], "end": [2], "text": ["a"]}])
def test_a_line_of_speech_of_another_kind(line, tmp_path):
    refused("howto100m", tmp_path, "caption.json", json.dumps({"h0": line}).encode())
