"""Questions about videos (MAMA alone), in the layouts of the authors' files: MSRVTT-QA, MSVD-QA,
TGIF-QA-R, NExT-QA, Causal-VidQA.

One row is one question, with the columns question, answer (a text), choices (texts, one of them the
answer; empty for open questions) and, if the set has it, question_type, of one or two words
("causal why": its family first). Causal-VidQA asks for an answer and for its reason: two rows of
one `pair`. The caption is the question, unless --extra-captions has another.
"""

import hashlib
from typing import NamedTuple

from contrastive.core.processes import UserError, opening, print_main
from contrastive.data.annotations import Files, Videos, clips_of, files_of, video_folder
from contrastive.data.clips import clip_options
from contrastive.data.regions import Regions
from contrastive.data.table import with_note

NEXTQA_TYPES = {
    "CW": "causal why",
    "CH": "causal how",
    "TN": "temporal next",
    "TP": "temporal next",  # previous; its authors count them together
    "TC": "temporal current",
    "DC": "descriptive count",
    "DL": "descriptive location",
    "DO": "descriptive other"}
FRAME_TYPES = ("object", "number", "color", "location")  # TGIF-QA's 0..3
CAUSAL_PARTS = {
    "descriptive": ("answer",),
    "explanatory": ("answer",),
    "predictive": ("answer", "reason"),
    "counterfactual": ("answer", "reason")}
# hashes of the choices of three questions of TGIF-QA; TGIF-QA-R has other wrong choices
BIASED = {"ACTION1": "9a3a766a", "ACTION4": "12630e82", "TRANS23": "cf2f696d"}
COLUMNS = ("video", "captions", "key", "question", "answer", "choices", "question_type", "pair")


# ---- one reader for each layout ----
# A reader yields dicts of video, id, question and answer (a text, or the number of the right
# choice), and perhaps other_name (of the video), choices, question_type, pair, and size
# (width and height of the video).
def msrvtt_qa(files, prefix="video"):
    """[{video_id, question, answer, id, category_id}]; a video is called video7010 or as its id."""
    for row in files.json():
        video = str(row["video_id"])
        if video.isdecimal():
            video = f"{prefix}{video}"
        yield {"video": video, "id": row["id"], "question": row["question"],
               "answer": row["answer"]}


def msvd_qa(files):
    """[{video_id, question, answer, id}]; a video is called vid1, or as youtube_mapping.txt says.

    Its lines are "NAME vid1".
    """
    rows = list(msrvtt_qa(files, "vid"))
    other_names = {}
    if files.has("youtube_mapping.txt"):
        for line in files.lines("youtube_mapping.txt"):
            name, video = line.split()[:2]
            other_names[video] = name
    for row in rows:
        yield {**row, "other_name": other_names.get(row["video"])}


def tgif_choice(files):
    """gif_name, question, a1 to a5, answer (0..4), vid_id, key, separated by tabs."""
    for row in files.csv(separator="\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"],
               "answer": int(row["answer"]), "choices": [row[f"a{k}"] for k in range(1, 6)]}


def tgif_frame(files):
    """gif_name, question, answer, type (0..3), vid_id, key, description, separated by tabs."""
    for row in files.csv(separator="\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"],
               "answer": row["answer"], "question_type": FRAME_TYPES[int(row["type"])]}


def nextqa(files):
    """csv: video, frame_count, width, height, question, answer (0..4), qid, type, a0 to a4."""
    for row in files.csv():
        yield {"video": row["video"], "id": row["qid"], "question": row["question"],
               "answer": int(row["answer"]), "choices": [row[f"a{k}"] for k in range(5)],
               "question_type": NEXTQA_TYPES[row["type"]],
               "size": (float(row["width"]), float(row["height"]))}


def causal_vidqa(files):
    """A pickled list of videos, each with a folder VIDEO/ of text.json and answer.json.

    text.json is {kind: {question, answer: five[, reason: five]}} and answer.json is
    {kind: {answer: 0..4[, reason: 0..4]}}.
    """
    videos = files.pickle()
    folders = {}                                                            # {video: folder}
    for path in files.paths:
        if path.name == "text.json":
            other = folders.setdefault(path.parent.name, path.parent)
            if other != path.parent:
                raise UserError(f"{other} and {path.parent} are of one video; leave one of them")
    pair = 0
    for video in videos:
        video_files = Files(folders[video])
        with opening(video_files):
            texts, right = video_files.json("text.json"), video_files.json("answer.json")
        for kind, parts in CAUSAL_PARTS.items():
            for part in parts:
                question_type = kind
                if len(parts) > 1:
                    question_type = f"{kind} {part}"
                yield {"video": video, "id": f"{kind} {part}", "question": texts[kind]["question"],
                       "answer": right[kind][part], "choices": texts[kind][part], "pair": pair,
                       "question_type": question_type}
            pair += 1


# ---- the sets ----
class Layout(NamedTuple):
    """How the files of a set are read."""

    read: object  # function (Files) -> rows
    pattern: str  # pattern of the name of a split's file
    words: dict  # {split: its word in the pattern}


TRAIN_VAL_TEST = {"train": "train", "val": "val", "test": "test"}
TRAIN_VALID_TEST = {"train": "train", "val": "valid", "test": "test"}
TGIF_SPLITS = {"train": "Train", "test": "Test"}
LAYOUTS = {
    "msrvtt-qa": Layout(msrvtt_qa, "{}_qa.json", TRAIN_VAL_TEST),
    "msvd-qa": Layout(msvd_qa, "{}_qa.json", TRAIN_VAL_TEST),
    "tgif-qa-r-action": Layout(tgif_choice, "{}_action_question.?sv", TGIF_SPLITS),
    "tgif-qa-r-transition": Layout(tgif_choice, "{}_transition_question.?sv", TGIF_SPLITS),
    "tgif-qa-r-frame": Layout(tgif_frame, "{}_frameqa_question.?sv", TGIF_SPLITS),
    "nextqa": Layout(nextqa, "{}.csv", TRAIN_VAL_TEST),
    "causal-vidqa": Layout(causal_vidqa, "{}.pkl", TRAIN_VALID_TEST)}


def load(name, split, options):
    """Data of one split.

    The annotation files are in --data-dir, the videos below --video-dir or their regions in
    --region-dir.
    """
    layout = LAYOUTS[name]
    files = files_of(name, options)
    files.find(layout.pattern.format(layout.words[split]))
    with opening(files):
        rows = [answered_row(row) for row in layout.read(files)]
    num_rows = len(rows)
    rows = filter_answered(rows)
    clip, video_files = open_videos(rows, split, options)
    videos = {}                                                            # {name: path or None}
    table = []
    for row in rows:
        video = row["video"]
        videos[video] = video_files[video] or video_files[row.get("other_name") or video]
        table.append({column: row[column] for column in COLUMNS if column in row})
    data = clips_of(name, split, table, options, clip=clip, videos=videos, has_captions=False)

    notes = ["captions are the questions"]
    if any(is_biased(row) for row in rows):
        warning = ("WARNING: the choices are TGIF-QA's, whose bias gives the answer away, not "
                   "those of TGIF-QA-R")
        print_main(f"{warning} ({name}, {split}; the files of PengLiang-cn/PGAT)")
        notes.insert(0, warning)
    if len(rows) < num_rows:
        notes.append(f"{num_rows - len(rows):,} questions without an answer left out")
    return with_note(data, *notes)


def answered_row(row):
    """A row with its key, and its answer as a text: "" if it is not whole.

    That is without a question, with a single choice, or with an answer that is none of the choices.
    Of choices that equal the answer (TGIF-QA has some) only the right one stays, since no score
    could tell them apart.
    """
    question = (row["question"] or "").strip()
    answer = row["answer"]
    choices = [choice.strip() for choice in row.get("choices", [])]
    if choices:
        right = answer
        answer = ""
        if 0 <= right < len(choices):
            answer = choices[right]
        choices = [c for k, c in enumerate(choices) if c and (c != answer or k == right)]
    if not question or len(choices) == 1:
        answer = ""
    return {**row, "key": f"{row['video']} {row['id']}", "captions": [question],
            "question": question, "answer": str(answer).strip(), "choices": choices}


def filter_answered(rows):
    """The rows with an answer; of a pair both have one."""
    unanswered = {row.get("pair", row["key"]) for row in rows if not row["answer"]}
    return [row for row in rows if row.get("pair", row["key"]) not in unanswered]


def open_videos(rows, split, options):
    """The reader of clips, or of the features of their regions, and Videos."""
    if not options.region_dir:
        return clip_options(options), Videos(video_folder(options))
    clip = Regions(options.region_dir, split, options.regions, options.frames)
    videos = Videos(options.region_dir, {name: [video] for name, video in clip.index().items()})
    clip.sizes = {videos[row["video"]]: row["size"] for row in rows if "size" in row}
    return clip, videos


def is_biased(row):
    """Whether the choices of a row are those of TGIF-QA, and not of TGIF-QA-R."""
    choices = "\t".join(row["choices"]).encode()
    return BIASED.get(row["id"]) == hashlib.sha1(choices).hexdigest()[:8]
