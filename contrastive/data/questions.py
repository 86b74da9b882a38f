"""Video question answering, in the layouts of the authors' files: MSRVTT-QA, MSVD-QA, TGIF-QA-R, NExT-QA, Causal-VidQA.

One row is one question: question, answer (text), choices (texts, one of them the answer; empty for open questions) and,
if the set has it, question_type, of one or two words ("causal why": its family first). Causal-VidQA asks for an answer
and for its reason: two rows with the same number in the column `pair`. The caption of a row is its question, unless
--extra-captions gives it a caption of its video.
Annotation files lie below --data-dir, videos below --video-dir. The note counts the rows left out, by reason.
"""

import hashlib
from collections import Counter
from pathlib import Path

from contrastive.data.annotations import Videos, clips_of, count_note, files_of, video_folder
from contrastive.data.clips import Regions, clip_options
from contrastive.data.table import notes, with_note
from contrastive.engine.processes import UserError, say

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
def msrvtt_qa(files):
    """[{video_id, question, answer, id, category_id}]; the video is called video7010.mp4, or like the id itself."""
    return _numbered(files, "video")


def msvd_qa(files):
    """[{video_id, question, answer, id}]; youtube_mapping.txt (lines "NAME vid1") has the video's name; it may also be
    called vid1.avi."""
    rows = [*_numbered(files, "vid")]
    names = {}
    if files.has("youtube_mapping.txt"):
        names = dict(line.split()[1::-1] for line in files.lines("youtube_mapping.txt"))
    return [row | {"also": names.get(row["video"], row["video"])} for row in rows]


def _numbered(files, prefix):
    for row in files.json(files.last.name):
        number = str(row["video_id"])
        yield {"video": f"{prefix}{number}" if number.isdecimal() else number, "id": row["id"],
               "question": row["question"], "answer": str(row["answer"])}


def tgif_choice(files):
    """Tab separated, whatever its name says: gif_name, question, a1..a5, answer (0..4), vid_id, key."""
    for row in files.csv(files.last.name, separator="\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"], "answer": int(row["answer"]),
               "choices": [row[f"a{k}"] for k in range(1, 6)]}


def tgif_frame(files):
    """Tab separated: gif_name, question, answer, type (0..3), vid_id, key, description."""
    for row in files.csv(files.last.name, separator="\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"], "answer": row["answer"],
               "type": FRAME_TYPES[int(row["type"])]}


def nextqa(files):
    """csv: video, frame_count, width, height, question, answer (0..4), qid, type, a0..a4."""
    for row in files.csv(files.last.name):
        yield {"video": row["video"], "id": row["qid"], "question": row["question"], "answer": int(row["answer"]),
               "choices": [row[f"a{k}"] for k in range(5)], "type": NEXTQA_TYPES[row["type"]],
               "size": tuple(float(row[side]) for side in ("width", "height") if row.get(side))}


def causal_vidqa(files):
    """A pickled list of videos; each folder VIDEO/ holds text.json {kind: {question, answer: five[, reason: five]}} and
    answer.json {kind: {answer: 0..4[, reason: 0..4]}}."""
    videos = files.pickle(files.last.name)
    folders = {path.parent.name for path in files.root.rglob("text.json")}
    for name in map(str, videos):
        if name not in folders:
            yield {"video": name, "id": "", "lost": "(all of a video without text.json)"}
            continue
        said, right = files.json(f"{name}/text.json"), files.json(f"{name}/answer.json")
        for kind, part in ((kind, part) for kind, parts in CAUSAL_PARTS.items() for part in parts):
            yield {"video": name, "id": f"{kind} {part}", "question": said[kind]["question"],
                   "answer": int(right[kind][part]), "choices": [str(c) for c in said[kind][part]],
                   "type": f"{kind} {part}" if len(CAUSAL_PARTS[kind]) > 1 else kind, "pair": f"{name} {kind}"}


# ---- the sets ----
# splits: number of questions in the papers or their READMEs (MSRVTT-QA's "149 K" for training, which MAMA prints too,
# are 158,581 in its files).   words: patterns of the files, and the splits' names in them.   open: the answers form a
# vocabulary; else there are choices.
def _set(read, is_open, patterns, words, **splits):
    files = {s: [p.format(word) for p in patterns] for s, word in zip(splits, words.split(), strict=True)}
    return {"splits": splits, "licence": "research only", "open": is_open, "files": files, "read": read}


def _tgif(read, is_open, kind, **splits):
    return _set(read, is_open, [f"{{}}_{kind}_question.{end}" for end in ("csv", "tsv")], "Train Test", **splits)


USUAL = "train val test"
SETS = {
    "msrvtt-qa": _set(msrvtt_qa, True, ["{}_qa.json"], USUAL, train=158_581, val=12_278, test=72_821),
    "msvd-qa": _set(msvd_qa, True, ["{}_qa.json"], USUAL, train=30_933, val=6_415, test=13_157),
    "tgif-qa-r-action": _tgif(tgif_choice, False, "action", train=20_475, test=2_274),
    "tgif-qa-r-transition": _tgif(tgif_choice, False, "transition", train=52_704, test=6_232),
    "tgif-qa-r-frame": _tgif(tgif_frame, True, "frameqa", train=39_392, test=13_691),
    "nextqa": _set(nextqa, False, ["{}.csv"], USUAL, train=34_132, val=4_996, test=8_564),
    "causal-vidqa": _set(causal_vidqa, False, ["{}.pkl"], "train valid test", train=112_656, val=16_170, test=32_574)}


def load(name, split, options):
    """Data of one split: annotation files in --data-dir, videos below --video-dir (default: --data-dir), or instead of
    videos the features of their regions in --region-dir."""
    facts, files = SETS[name], files_of(name, options)
    files.find(*facts["files"][split])
    with files.border():
        rows = [_whole(row, facts["open"]) for row in facts["read"](files)]
    broken = {row["pair"] for row in rows if row["lost"]} - {""}
    lost = [row["lost"] or "whose other half is left out" for row in rows if row["lost"] or row["pair"] in broken]
    kept = [row for row in rows if not row["lost"] and row["pair"] not in broken]
    clip, videos = clip_options(options), _Either(video_folder(options, files.root))
    if options.get("region_dir"):
        clip = Regions(options["region_dir"], split, options["regions"], options["frames"])
        videos = _Either(options["region_dir"], clip.index())
    videos.also = {row["video"]: row["also"] for row in kept}
    number, typed, paired = {}, any(row["type"] for row in kept), any(row["pair"] for row in kept)
    table = [{"video": row["video"], "captions": [row["question"]], "key": f"{row['video']} {row['id']}",
              "question": row["question"], "answer": row["answer"], "choices": row["choices"]}
             | ({"question_type": row["type"]} if typed else {})
             | ({"pair": number.setdefault(row["pair"], len(number))} if paired else {}) for row in kept]
    data = clips_of(name, split, table, options | {"feature_dir": None}, files.root, clip=clip, videos=videos,
                    has_captions=False)
    if options.get("region_dir"):
        clip.sizes = {videos[row["video"]]: row["size"] for row in kept if len(row["size"]) == 2}
    if split == "train" and facts["open"] and len({*data.column("answer")}) < 2:
        raise UserError(f"{name}: {files.last} has one answer to all its questions: nothing to learn")
    twice = sum(row["twice"] for row in rows)
    if any(BIASED.get(row["id"]) == hashlib.sha1("\t".join(row["choices"]).encode()).hexdigest()[:8] for row in kept):
        warning = "WARNING: the choices are TGIF-QA's, whose bias gives the answer away, not those of TGIF-QA-R"
        say(f"{warning} ({name}, {split}; the files of PengLiang-cn/PGAT)")
        data = with_note(data, warning)
    return with_note(data, "captions are the questions",
                     notes(*(f"{n:,} questions {why} left out" for why, n in sorted(Counter(lost).items()))),
                     f"{twice:,} questions had the answer twice among the choices, now once" if twice else "",
                     count_note(name, split, len(data), facts["splits"][split]))


class _Either(Videos):
    """Videos that may have a second name: `also` {name: second}. index: of features in place of a folder's."""

    def __init__(self, folder, index=None):
        self.folder, self.also = Path(folder).expanduser(), {}
        if index is None:
            super().__init__(folder)
        else:
            self.index = index

    def __getitem__(self, name):
        return super().__getitem__(name) or super().__getitem__(self.also.get(name, name))


def _whole(row, is_open):
    """A row with all columns and its answer as text. lost: the reason why it is left out ("" = none). twice: whether
    the answer was twice among the choices."""
    row = {"also": row["video"], "question": "", "answer": "", "choices": [], "type": "", "pair": "", "lost": "",
           "size": ()} | row
    question, answer = str(row["question"] or "").strip(), row["answer"]
    choices, twice = [c.strip() for c in row["choices"]], False
    if choices:
        right = answer
        answer = choices[right] if 0 <= right < len(choices) else ""
        twice = answer != "" and choices.count(answer) > 1  # happens in TGIF-QA; no score could tell the two apart
        choices = [c for i, c in enumerate(choices) if c and (c != answer or i == right)]
    answer = str(answer).strip()
    why = (row["lost"] or "without a question" * (not question)
           or "without choices" * (not is_open and len(choices) < 2)
           or "without an answer" * (is_open and not answer)
           or "whose answer is none of the choices" * (not answer))
    return row | {"question": question, "answer": answer, "choices": choices, "lost": why, "twice": twice}
