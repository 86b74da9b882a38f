"""Video question answering, in the layouts of the authors' files: MSRVTT-QA, MSVD-QA, TGIF-QA-R, NExT-QA, Causal-VidQA.

One row is one question: question, answer (text), choices (texts, the answer among them; none where the question is
open) and, where the set has it, question_type, of one word or two ("causal why": its family first). Causal-VidQA asks for
an answer and for its reason, two rows with one number in the column `pair`. The captions of a row are its question.
Annotation files lie below --data-dir, videos below --video-dir. Rows left out are counted in the note, by the reason.
"""

import csv
import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path

import common
from common import UserError, first_line

from sets import video, videos

NEXTQA_TYPES = {"CW": "causal why", "CH": "causal how", "TN": "temporal next", "TP": "temporal next",  # as its authors
                "TC": "temporal current", "DC": "descriptive count", "DL": "descriptive location",     # count them
                "DO": "descriptive other"}
FRAME_TYPES = ("object", "number", "color", "location")  # TGIF-QA's 0..3
CAUSAL_PARTS = {"descriptive": ("answer",), "explanatory": ("answer",), "predictive": ("answer", "reason"),
                "counterfactual": ("answer", "reason")}
# the five choices, by their hash, of one question each of TGIF-QA, of which -R has drawn the wrong ones anew
BIASED = {"ACTION1": "3ee53d05", "ACTION4": "", "TRANS23": ""}


# ---- one reader for each layout: rows of video, id, question, answer (text, or number of the choice), choices, type ----
def read_msrvtt(file, root):
    """[{video_id, question, answer, id, category_id}]; the video is video7010.mp4, or the id itself."""
    for row in json.loads(file.read_text(encoding="utf8")):
        yield {"video": _named("video", row["video_id"]), "id": row["id"], "question": row["question"],
               "answer": row["answer"]}


def read_msvd(file, root):
    """[{video_id, question, answer, id}]; youtube_mapping.txt ("NAME vid1" a line) has the name of the video, which may
    also be vid1.avi."""
    mapping = next(iter(sorted(root.rglob("youtube_mapping.txt"))), None)
    pairs = [line.split() for line in mapping.read_text(encoding="utf8").splitlines()] if mapping else []
    names = {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
    for row in json.loads(file.read_text(encoding="utf8")):
        number = _named("vid", row["video_id"])
        yield {"video": number, "also": names.get(number), "id": row["id"], "question": row["question"],
               "answer": row["answer"]}


def _named(prefix, number):
    return f"{prefix}{number}" if str(number).isdigit() else str(number)


def read_tgif_choice(file, root):
    """Tab separated, whatever its name says: gif_name, question, a1..a5, answer (0..4), vid_id, key."""
    for row in _table(file, "\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"], "answer": int(row["answer"]),
               "choices": [row[f"a{k}"] for k in range(1, 6)]}


def read_tgif_frame(file, root):
    """Tab separated: gif_name, question, answer, type (0..3), vid_id, key, description."""
    for row in _table(file, "\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"], "answer": row["answer"],
               "type": FRAME_TYPES[int(row["type"])]}


def read_nextqa(file, root):
    """csv: video, frame_count, width, height, question, answer (0..4), qid, type, a0..a4."""
    for row in _table(file, ","):
        yield {"video": row["video"], "id": row["qid"], "question": row["question"], "answer": int(row["answer"]),
               "choices": [row[f"a{k}"] for k in range(5)], "type": NEXTQA_TYPES[row["type"]]}


def read_causal(file, root):
    """A pickled list of videos, and below VIDEO/ text.json {kind: {question, answer: five[, reason: five]}} and
    answer.json {kind: {answer: 0..4[, reason: 0..4]}}."""
    folders = {path.parent.name: path.parent for path in root.rglob("text.json")}
    for name in map(str, videos.load_plain_pickle(file)):
        if name not in folders:
            yield {"video": name, "id": "", "question": "", "answer": ""}
            continue
        text, right = (json.loads((folders[name] / f"{part}.json").read_text(encoding="utf8"))
                       for part in ("text", "answer"))
        for kind, parts in CAUSAL_PARTS.items():
            for part in parts:
                yield {"video": name, "id": f"{kind} {part}", "question": text[kind]["question"],
                       "answer": int(right[kind][part]), "choices": text[kind][part],
                       "type": f"{kind} {part}" if len(parts) > 1 else kind, "pair": f"{name} {kind}"}


def _table(file, separator):
    """Rows of a csv as dicts. Raises: UserError for a row with another number of fields."""
    with open(file, newline="", encoding="utf-8-sig") as f:
        quotes = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
        for row in csv.DictReader(f, delimiter=separator, quoting=quotes):
            if None in row or None in row.values():
                raise UserError(f"{file}: the row of {next(iter(row.values()))} has another number of fields than the header")
            yield row
