"""Video question answering, in the layouts of the authors' files: MSRVTT-QA, MSVD-QA, TGIF-QA-R, NExT-QA, Causal-VidQA.

One row is one question: question, answer (text), choices (texts, the answer among them; none where the question is
open) and, where the set has it, question_type, of one word or two ("causal why": its family first). Causal-VidQA asks
for an answer and for its reason, two rows with one number in the column `pair`. The caption of a row is its question.
Annotation files lie below --data-dir, videos below --video-dir. Rows left out are counted in the note, by the reason.
"""

import csv
import hashlib
import json
from collections import Counter
from pathlib import Path

import common
from engine.base import UserError, first_line, say

from readers.clips import clip_options
from readers.videos import find_video, video_index
from sets.videos import load_plain_pickle

NEXTQA_TYPES = {"CW": "causal why", "CH": "causal how", "TN": "temporal next", "TP": "temporal next",  # as its authors
                "TC": "temporal current", "DC": "descriptive count", "DL": "descriptive location",     # count them
                "DO": "descriptive other"}
FRAME_TYPES = ("object", "number", "color", "location")  # TGIF-QA's 0..3
CAUSAL_PARTS = {"descriptive": ("answer",), "explanatory": ("answer",), "predictive": ("answer", "reason"),
                "counterfactual": ("answer", "reason")}
# the five choices, by their hash, of one question each of TGIF-QA, of which -R has drawn the wrong ones anew
BIASED = {"ACTION1": "9a3a766a", "ACTION4": "12630e82", "TRANS23": "cf2f696d"}


# ---- one reader for each layout ----
# rows of video, id, question, answer (a text, or the number of the right choice) and, where there are, choices, type
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
    for name in map(str, load_plain_pickle(file)):
        if name not in folders:
            yield {"video": name, "id": "", "lost": "(all of a video that has no text.json)"}
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
        for row in csv.DictReader(f, delimiter=separator):
            if None in row or None in row.values():
                video = next(iter(row.values()))
                raise UserError(f"{file}: the row of {video} has another number of fields than the header")
            yield row


# ---- the sets ----
# splits: how many questions there are, in the papers or their READMEs.   files of each split below --data-dir, in the
# order they are looked for.   open: answers are a vocabulary; else there are choices.
def _three(pattern, val="val"):
    return {split: [pattern.format(word)] for split, word in (("train", "train"), ("val", val), ("test", "test"))}


def _tgif(kind):
    return {split: [f"{split.title()}_{kind}_question.{ending}" for ending in ("csv", "tsv")]
            for split in ("train", "test")}


RESEARCH = "research only"
SETS = {
    "msrvtt-qa": {"splits": {"train": 158_581, "val": 12_278, "test": 72_821}, "licence": RESEARCH, "open": True,
                  "files": _three("{}_qa.json"), "reader": read_msrvtt},
    "msvd-qa": {"splits": {"train": 30_933, "val": 6_415, "test": 13_157}, "licence": RESEARCH, "open": True,
                "files": _three("{}_qa.json"), "reader": read_msvd},
    "tgif-qa-r-action": {"splits": {"train": 20_475, "test": 2_274}, "licence": RESEARCH, "open": False,
                         "files": _tgif("action"), "reader": read_tgif_choice},
    "tgif-qa-r-transition": {"splits": {"train": 52_704, "test": 6_232}, "licence": RESEARCH, "open": False,
                             "files": _tgif("transition"), "reader": read_tgif_choice},
    "tgif-qa-r-frame": {"splits": {"train": 39_392, "test": 13_691}, "licence": RESEARCH, "open": True,
                        "files": _tgif("frameqa"), "reader": read_tgif_frame},
    "nextqa": {"splits": {"train": 34_132, "val": 4_996, "test": 8_564}, "licence": RESEARCH, "open": False,
               "files": _three("{}.csv"), "reader": read_nextqa},
    "causal-vidqa": {"splits": {"train": 112_656, "val": 16_170, "test": 32_574}, "licence": RESEARCH, "open": False,
                     "files": _three("{}.pkl", "valid"), "reader": read_causal}}


def load(name, split, options):
    """Data of one split: annotation files in --data-dir, videos below --video-dir (else there too).

    Raises: UserError naming the split, the folder or the file that is missing, or the file that has another layout.
    """
    facts = SETS[name]
    if split not in facts["files"]:
        raise UserError(f"{name} has no {split} split; it has: {', '.join(facts['files'])}")
    root, file = _annotation_file(name, split, options)
    lost, gone, found = Counter(), {}, _finder(options)
    try:
        rows = [_whole(row, facts["open"], lost) for row in facts["reader"](file, root)]
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OSError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{name}: {file} has another layout than expected ({why})") from error
    broken = {row["pair"] for row in rows if row["lost"]} - {""}
    kept = []
    for row in rows:
        if not row["lost"] and row["pair"] in broken:
            row["lost"] = "whose other half is left out"
        path = None if row["lost"] else found(row["video"]) or row["also"] and found(row["also"])
        if path:
            kept.append(row | {"source": {"path": path}})
        elif row["lost"]:
            lost[row["lost"]] += 1
        else:
            gone.setdefault(row["video"], []).append(row["id"])
    if not kept:
        first = f" (looked for {next(iter(gone))})" if gone else ""
        raise UserError(f"{name} ({split}): no question of {file.name} has its video below {_folder(options)}{first}; "
                        "--video-dir names the folder of the videos")
    return _data(name, split, kept, lost, gone, options)


def _whole(row, is_open, lost):
    """A row with all columns, `lost` the reason for which it is left out ("" = none), its answer a text."""
    row = {"also": None, "question": "", "answer": "", "choices": [], "type": "", "pair": "", "lost": ""} | row
    question, answer, choices = str(row["question"] or "").strip(), row["answer"], row["choices"] or []
    choices = ["" if c is None else str(c).strip() for c in choices]
    if choices:
        right = answer
        answer = choices[right] if 0 <= right < len(choices) else ""
        if answer and choices.count(answer) > 1:  # TGIF-QA draws some twice, and no score could tell them apart
            lost["*"] += 1
            choices = [c for i, c in enumerate(choices) if c != answer or i == right]
    choices, answer = [c for c in choices if c], str(answer).strip()
    why = (row["lost"] or "without a question" * (not question)
           or "without choices" * (not is_open and len(choices) < 2)
           or "without an answer" * (is_open and not answer)
           or "whose answer is none of the choices" * (not answer))
    return row | {"question": question, "answer": answer, "choices": choices, "lost": why}


def _data(name, split, kept, lost, gone, options):
    """Data of the rows that are whole, with a note of what is not."""
    twice = lost.pop("*", 0)
    notes = ["captions are the questions"]
    notes += [f"{n:,} questions {why} left out" for why, n in sorted(lost.items())]
    if twice:
        notes.append(f"{twice:,} questions had the answer twice among the choices, now once")
    if gone:
        questions = sum(map(len, gone.values()))
        where = f"are not in {_folder(options)}, first {next(iter(gone))}"
        notes.append(f"{len(gone):,} videos ({questions:,} questions) {where}")
    if any(_biased(row) for row in kept):
        notes.append("WARNING: the choices are TGIF-QA's, not those drawn anew of TGIF-QA-R")
        say(f"WARNING: {name} ({split}): the choices are those of TGIF-QA, whose bias gives the answer away, "
            "not of TGIF-QA-R (the files of PengLiang-cn/PGAT)")
    expected = SETS[name]["splits"][split]
    if len(kept) != expected:
        notes.append(f"WARNING: {len(kept):,} questions, {expected:,} expected")
        say(f"WARNING: {name} ({split}) has {len(kept):,} questions, {expected:,} are expected: the numbers are "
            "not comparable with the papers'")
    columns = {"question": [r["question"] for r in kept], "answer": [r["answer"] for r in kept],
               "choices": [r["choices"] for r in kept]}
    if any(r["type"] for r in kept):
        columns["question_type"] = [r["type"] for r in kept]
    if any(r["pair"] for r in kept):
        number = {pair: i for i, pair in enumerate(dict.fromkeys(r["pair"] for r in kept))}
        columns["pair"] = [number[r["pair"]] for r in kept]
    table = common.make_table([[r["question"]] for r in kept], [f"{r['video']} {r['id']}" for r in kept],
                              [r["source"] for r in kept], **columns)
    clip = clip_options(options)
    return common.Data(name, split, table, clip=clip, note="; ".join(notes), has_captions=False)


def _biased(row):
    """Has this question, where it is one of the three of BIASED, the choices that TGIF-QA gave it?"""
    return BIASED.get(row["id"]) == hashlib.sha1("\t".join(row["choices"]).encode()).hexdigest()[:8]


def _annotation_file(name, split, options):
    """(folder, annotation file): the first of SETS that is below --data-dir."""
    files = SETS[name]["files"]
    root = options.get("data_dir") or options.get("video_dir")
    if not root:
        every = ", ".join(file for some in files.values() for file in some)
        raise UserError(f"--dataset {name} needs --video-dir (the folder of its videos) and --data-dir (its annotation "
                        f"files: {every})")
    root = Path(root).expanduser()
    for pattern in files[split]:
        for file in sorted(root.rglob(pattern)):
            return root, file
    raise UserError(f"{name} ({split}): none of {', '.join(files[split])} is in {root}; --data-dir names the folder of "
                    "the annotation files")


def _folder(options):
    """Where the videos are, or the features in their place."""
    features = options.get("feature_dir") or [options.get("video_dir") or options["data_dir"]]
    folder = Path(features[0]).expanduser()
    if not folder.is_dir():
        raise UserError(f"--video-dir {folder}: no such folder")
    return folder


def _finder(options):
    """name of a video -> its path, or None."""
    index = video_index(str(_folder(options)))
    return lambda name: find_video(index, str(name))
