"""Video question answering, in the layouts of the authors' files: MSRVTT-QA, MSVD-QA, TGIF-QA-R, NExT-QA, Causal-VidQA.

One row is one question: question, answer (text), choices (texts, one of them the answer; empty for open questions) and,
if the set has it, question_type, of one or two words ("causal why": its family first). Causal-VidQA asks for an answer
and for its reason: two rows with the same number in the column `pair`. The caption of a row is its question, unless
--extra-captions gives it a caption of its video.
Annotation files lie below --data-dir, videos below --video-dir. The note counts the rows left out, by reason.
"""

import hashlib
from collections import Counter

import common

from contrastive.engine.base import UserError, join_notes, say
from contrastive.readers import text
from contrastive.readers.clips import Regions, clip_options
from contrastive.readers.videos import find_video, video_folder, video_index
from contrastive.sets import annotations

NEXTQA_TYPES = {"CW": "causal why", "CH": "causal how", "TN": "temporal next", "TP": "temporal next",  # as its authors
                "TC": "temporal current", "DC": "descriptive count", "DL": "descriptive location",     # count them
                "DO": "descriptive other"}
FRAME_TYPES = ("object", "number", "color", "location")  # TGIF-QA's 0..3
CAUSAL_PARTS = {"descriptive": ("answer",), "explanatory": ("answer",), "predictive": ("answer", "reason"),
                "counterfactual": ("answer", "reason")}
# hashes of the five choices of three TGIF-QA questions; TGIF-QA-R has new wrong choices, so its hashes differ
BIASED = {"ACTION1": "9a3a766a", "ACTION4": "12630e82", "TRANS23": "cf2f696d"}


# ---- one reader for each layout ----
# each yields rows: video, id, question, answer (a text, or the number of the right choice), and perhaps choices, type
def read_msrvtt(file, root):
    """[{video_id, question, answer, id, category_id}]; the video is called video7010.mp4, or like the id itself."""
    return _numbered(file, "video", {})


def read_msvd(file, root):
    """[{video_id, question, answer, id}]; youtube_mapping.txt (lines "NAME vid1") has the video's name; it may also be
    called vid1.avi."""
    mapping = annotations.find_file(root, "youtube_mapping.txt")
    pairs = [line.split() for line in text.read_lines(mapping)] if mapping else []
    return _numbered(file, "vid", {pair[1]: pair[0] for pair in pairs if len(pair) == 2})


def _numbered(file, prefix, names):
    for row in text.read_json(file):
        number = text.words(row["video_id"])
        video = f"{prefix}{number}" if number.isdecimal() else number
        if not video:
            raise ValueError(f"question {row['id']} has no video_id")
        yield {"video": video, "also": names.get(video, video), "id": row["id"], "question": row["question"],
               "answer": row["answer"]}


def read_tgif_choice(file, root):
    """Tab separated, whatever its name says: gif_name, question, a1..a5, answer (0..4), vid_id, key."""
    for line, row in text.csv_rows(file, separator="\t"):
        with text.expected_layout(f"{file}, line {line}"):
            yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"],
                   "answer": text.whole_number(row["answer"]), "choices": [row[f"a{k}"] for k in range(1, 6)]}


def read_tgif_frame(file, root):
    """Tab separated: gif_name, question, answer, type (0..3), vid_id, key, description."""
    for line, row in text.csv_rows(file, separator="\t"):
        with text.expected_layout(f"{file}, line {line}"):
            yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"], "answer": row["answer"],
                   "type": FRAME_TYPES[text.whole_number(row["type"])]}


def read_nextqa(file, root):
    """csv: video, frame_count, width, height, question, answer (0..4), qid, type, a0..a4."""
    for line, row in text.csv_rows(file):
        with text.expected_layout(f"{file}, line {line}"):
            yield {"video": row["video"], "id": row["qid"], "question": row["question"],
                   "answer": text.whole_number(row["answer"]), "choices": [row[f"a{k}"] for k in range(5)],
                   "type": NEXTQA_TYPES[row["type"]], "width": row.get("width"), "height": row.get("height")}


def read_causal(file, root):
    """A pickled list of videos; each folder VIDEO/ holds text.json {kind: {question, answer: five[, reason: five]}} and
    answer.json {kind: {answer: 0..4[, reason: 0..4]}}."""
    folders = {path.parent.name: path.parent for path in root.rglob("text.json")}
    for name in map(text.words, text.load_plain_pickle(file)):
        if name not in folders:
            yield {"video": name, "id": "", "lost": "(all of a video without text.json)"}
            continue
        said, right = (folders[name] / f"{part}.json" for part in ("text", "answer"))
        of_all, numbers = text.read_json(said), text.read_json(right)
        for kind, part in ((kind, part) for kind, parts in CAUSAL_PARTS.items() for part in parts):
            with text.expected_layout(right):
                answer = text.whole_number(numbers[kind][part])
            with text.expected_layout(said):
                question, choices = of_all[kind]["question"], of_all[kind][part]
                if not isinstance(choices, list):
                    raise TypeError(f"the choices of {kind} are not a list")
                choices = list(map(text.words, choices))
            yield {"video": name, "id": f"{kind} {part}", "question": question, "answer": answer, "choices": choices,
                   "type": f"{kind} {part}" if len(CAUSAL_PARTS[kind]) > 1 else kind, "pair": f"{name} {kind}"}


# ---- the sets ----
# splits: number of questions in the papers or their READMEs (MSRVTT-QA's "149 K" for training, which MAMA prints too,
# are 158,581 in its files).   files of each split below --data-dir, in the order in which they are tried: (name, its
# reader).   open: the answers form a vocabulary; else there are choices.
def _set(reader, is_open, patterns, words, **splits):
    """words: the names of the splits in the file names."""
    files = {s: [(p.format(word), reader) for p in patterns] for s, word in zip(splits, words.split(), strict=True)}
    return {"splits": splits, "licence": "research only", "open": is_open, "files": files}


def _tgif(reader, is_open, kind, **splits):
    patterns = [f"{{}}_{kind}_question.{ending}" for ending in ("csv", "tsv")]
    return _set(reader, is_open, patterns, "Train Test", **splits)


USUAL = "train val test"
SETS = {
    "msrvtt-qa": _set(read_msrvtt, True, ["{}_qa.json"], USUAL, train=158_581, val=12_278, test=72_821),
    "msvd-qa": _set(read_msvd, True, ["{}_qa.json"], USUAL, train=30_933, val=6_415, test=13_157),
    "tgif-qa-r-action": _tgif(read_tgif_choice, False, "action", train=20_475, test=2_274),
    "tgif-qa-r-transition": _tgif(read_tgif_choice, False, "transition", train=52_704, test=6_232),
    "tgif-qa-r-frame": _tgif(read_tgif_frame, True, "frameqa", train=39_392, test=13_691),
    "nextqa": _set(read_nextqa, False, ["{}.csv"], USUAL, train=34_132, val=4_996, test=8_564),
    "causal-vidqa": _set(read_causal, False, ["{}.pkl"], "train valid test", train=112_656, val=16_170, test=32_574)}


def load(name, split, options):
    """Data of one split: annotation files in --data-dir, videos below --video-dir (default: --data-dir), or instead of
    videos the features of their regions in --region-dir.

    Raises: UserError that names the missing split, folder or file, or the file with an unexpected layout.
    """
    facts = SETS[name]
    annotations.check_split(name, split, facts["files"])
    root = annotations.annotation_root(name, facts["files"], options)
    file, reader = annotations.annotation_file(name, split, facts["files"], root)
    regions = options.get("region_dir")
    folder = regions or video_folder(options, root)
    with text.expected_layout(f"{name}: {file}"):
        rows = [_whole(row, facts["open"]) for row in reader(file, root)]
    if not rows:
        raise UserError(f"{name} ({split}): {file} has no questions")
    broken = {row["pair"] for row in rows if row["lost"]} - {""}
    clip = Regions(folder, split, options["regions"], options["frames"]) if regions else clip_options(options)
    index, kept, lost, gone = clip.index() if regions else video_index(str(folder)), [], Counter(), {}
    for row in rows:
        if row["lost"] or row["pair"] in broken:
            lost[row["lost"] or "whose other half is left out"] += 1
        elif path := find_video(index, str(row["video"])) or find_video(index, str(row["also"])):
            kept.append(row | {"path": path})
        else:
            gone.setdefault(row["video"], []).append(row["id"])
    if not kept:
        first = f" (looked for {next(iter(gone))})" if gone else ""
        raise UserError(f"{name} ({split}): no question of {file.name} has its video below {folder}{first}; "
                        + ("--region-dir names the folder of the features" if regions else
                           "--video-dir names the folder of the videos"))
    if regions:
        with text.expected_layout(f"{name}: {file}"):
            clip.sizes = {row["path"]: (text.number(row["width"]), text.number(row["height"])) for row in kept
                          if row.get("width") and row.get("height")}
    if split == "train" and facts["open"] and len({row["answer"] for row in kept}) < 2:
        raise UserError(f"{name}: {file} has one answer, {kept[0]['answer']}, to all its questions: nothing to learn")
    notes = ["captions are the questions", *(f"{n:,} questions {why} left out" for why, n in sorted(lost.items()))]
    if regions:
        first = next(path for path, _ in clip.of_regions.values())
        notes.append(f"regions of {first.name}, boxes in pixels of "
                     + ("the sizes in the list" if clip.sizes else "320 x 240"))
    if many := len(kept) - len({(row["video"], row["id"]) for row in kept}):
        notes.append(f"{many:,} questions share their id with another one of their video")
    if twice := sum(row["twice"] for row in rows):
        notes.append(f"{twice:,} questions had the answer twice among the choices, now once")
    if gone:
        questions = sum(map(len, gone.values()))
        notes.append(f"{len(gone):,} videos ({questions:,} questions) are not in {folder}, first {next(iter(gone))}")
    if any(_biased(row) for row in kept):
        notes.append("WARNING: the choices are TGIF-QA's, not the new ones of TGIF-QA-R")
        say(f"WARNING: {name} ({split}): the choices are those of TGIF-QA, whose bias gives the answer away, "
            "not of TGIF-QA-R (the files of PengLiang-cn/PGAT)")
    notes.append(annotations.count_note(name, split, len(kept), facts["splits"][split], "questions"))
    return common.Data(name, split, _table_of(kept), clip=clip, note=join_notes(*notes), has_captions=False)


def _whole(row, is_open):
    """A row with all columns and its answer as text. lost: the reason why it is left out ("" = none). twice: whether
    the answer was twice among the choices."""
    row = {"also": row["video"], "question": "", "answer": "", "choices": [], "type": "", "pair": "", "lost": ""} | row
    question, answer = text.words(row["question"]).strip(), row["answer"]
    choices, twice = [c.strip() for c in row["choices"]], False
    if choices:
        right = answer
        answer = choices[right] if 0 <= right < len(choices) else ""
        twice = answer != "" and choices.count(answer) > 1  # happens in TGIF-QA; no score could tell the two apart
        choices = [c for i, c in enumerate(choices) if c and (c != answer or i == right)]
    answer = text.words(answer).strip()
    why = (row["lost"] or "without a question" * (not question)
           or "without choices" * (not is_open and len(choices) < 2)
           or "without an answer" * (is_open and not answer)
           or "whose answer is none of the choices" * (not answer))
    return row | {"question": question, "answer": answer, "choices": choices, "lost": why, "twice": twice}


def _table_of(rows):
    columns, number = {c: [r[c] for r in rows] for c in ("video", "question", "answer", "choices")}, {}
    if any(r["type"] for r in rows):
        columns["question_type"] = [r["type"] for r in rows]
    if any(r["pair"] for r in rows):
        columns["pair"] = [number.setdefault(r["pair"], len(number)) for r in rows]
    return common.make_table([[r["question"]] for r in rows], [f"{r['video']} {r['id']}" for r in rows],
                             [r["path"] for r in rows], **columns)


def _biased(row):
    """Whether this is one of the three questions of BIASED and has the choices that TGIF-QA gave it."""
    return BIASED.get(row["id"]) == hashlib.sha1("\t".join(row["choices"]).encode()).hexdigest()[:8]
