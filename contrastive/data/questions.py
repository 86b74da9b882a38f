"""Video question answering, in the layouts of the authors' files: MSRVTT-QA, MSVD-QA, TGIF-QA-R, NExT-QA, Causal-VidQA.

One row is one question: question, answer (text), choices (texts, one of them the answer; empty for open questions) and,
if the set has it, question_type, of one or two words ("causal why": its family first). Causal-VidQA asks for an answer
and for its reason: two rows of one `pair`. The caption is the question, unless --extra-captions has another.
"""

import hashlib

from contrastive.data.annotations import Files, Videos, clips_of, files_of, video_folder
from contrastive.data.clips import Regions, clip_options
from contrastive.data.table import with_note
from contrastive.engine.processes import opening, say

NEXTQA_TYPES = {"CW": "causal why", "CH": "causal how", "TN": "temporal next", "TP": "temporal next",  # as its authors
                "TC": "temporal current", "DC": "descriptive count", "DL": "descriptive location",     # count them
                "DO": "descriptive other"}
FRAME_TYPES = ("object", "number", "color", "location")  # TGIF-QA's 0..3
CAUSAL_PARTS = {"descriptive": ("answer",), "explanatory": ("answer",), "predictive": ("answer", "reason"),
                "counterfactual": ("answer", "reason")}
# hashes of the five choices of three TGIF-QA questions; TGIF-QA-R has new wrong choices, so its hashes differ
BIASED = {"ACTION1": "9a3a766a", "ACTION4": "12630e82", "TRANS23": "cf2f696d"}


# ---- one reader for each layout: rows of video, id, question, answer (a text, or the number of the right choice), and
# perhaps also (another name of the video), choices, question_type, pair, size (width and height of the video)
def msvd_qa(files):
    """[{video_id, question, answer, id}]; the video is called vid1.avi, or as youtube_mapping.txt (lines "NAME vid1")
    has it."""
    rows, names = [*msrvtt_qa(files, "vid")], {}
    if files.has("youtube_mapping.txt"):
        names = dict(line.split()[1::-1] for line in files.lines("youtube_mapping.txt"))
    return [row | {"also": names.get(row["video"])} for row in rows]


def msrvtt_qa(files, prefix="video"):
    """[{video_id, question, answer, id, category_id}]; the video is called video7010.mp4, or like the id itself."""
    for row in files.json(files.last.name):
        number = str(row["video_id"])
        yield {"video": f"{prefix}{number}" if number.isdecimal() else number, "id": row["id"],
               "question": row["question"], "answer": row["answer"]}


def tgif_choice(files):
    """Tab separated, whatever its name says: gif_name, question, a1..a5, answer (0..4), vid_id, key."""
    for row in files.csv(files.last.name, separator="\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"], "answer": int(row["answer"]),
               "choices": [row[f"a{k}"] for k in range(1, 6)]}


def tgif_frame(files):
    """Tab separated: gif_name, question, answer, type (0..3), vid_id, key, description."""
    for row in files.csv(files.last.name, separator="\t"):
        yield {"video": row["gif_name"], "id": row["vid_id"], "question": row["question"], "answer": row["answer"],
               "question_type": FRAME_TYPES[int(row["type"])]}


def nextqa(files):
    """csv: video, frame_count, width, height, question, answer (0..4), qid, type, a0..a4."""
    for row in files.csv(files.last.name):
        yield {"video": row["video"], "id": row["qid"], "question": row["question"], "answer": int(row["answer"]),
               "choices": [row[f"a{k}"] for k in range(5)], "question_type": NEXTQA_TYPES[row["type"]],
               "size": (float(row["width"]), float(row["height"]))}


def causal_vidqa(files):
    """A pickled list of videos; each folder VIDEO/ holds text.json {kind: {question, answer: five[, reason: five]}} and
    answer.json {kind: {answer: 0..4[, reason: 0..4]}}."""
    videos = files.pickle(files.last.name)
    folders = {path.parent.name: path.parent for path in files.root.rglob("text.json")}
    for v, name in enumerate(videos):
        of_video = Files(folders[name])
        with opening(of_video):
            said, right = of_video.json("text.json"), of_video.json("answer.json")
        for k, (kind, parts) in enumerate(CAUSAL_PARTS.items()):
            for part in parts:
                yield {"video": name, "id": f"{kind} {part}", "question": said[kind]["question"],
                       "answer": right[kind][part], "choices": said[kind][part], "pair": 4 * v + k,
                       "question_type": f"{kind} {part}" if len(parts) > 1 else kind}


# ---- the sets ----
def _set(read, pattern, words, **splits):
    """Facts of a set. words: the splits' names in the pattern of its files; splits: number of questions in the papers
    or their READMEs (MSRVTT-QA's "149 K" for training, which MAMA prints too, are 158,581 in its files)."""
    files = {s: pattern.format(word) for s, word in zip(splits, words.split(), strict=True)}
    return {"splits": splits, "licence": "research only", "files": files, "read": read}


SETS = {
    "msrvtt-qa": _set(msrvtt_qa, "{}_qa.json", "train val test", train=158_581, val=12_278, test=72_821),
    "msvd-qa": _set(msvd_qa, "{}_qa.json", "train val test", train=30_933, val=6_415, test=13_157),
    "tgif-qa-r-action": _set(tgif_choice, "{}_action_question.?sv", "Train Test", train=20_475, test=2_274),
    "tgif-qa-r-transition": _set(tgif_choice, "{}_transition_question.?sv", "Train Test", train=52_704, test=6_232),
    "tgif-qa-r-frame": _set(tgif_frame, "{}_frameqa_question.?sv", "Train Test", train=39_392, test=13_691),
    "nextqa": _set(nextqa, "{}.csv", "train val test", train=34_132, val=4_996, test=8_564),
    "causal-vidqa": _set(causal_vidqa, "{}.pkl", "train valid test", train=112_656, val=16_170, test=32_574)}


def load(name, split, options):
    """Data of one split: annotation files in --data-dir, videos below --video-dir, or their regions in --region-dir."""
    facts, files = SETS[name], files_of(name, options)
    files.find(facts["files"][split])
    with opening(files):
        rows = [answered(row) for row in facts["read"](files)]
    lost = {row.get("pair", row["key"]) for row in rows if not row["answer"]}
    kept = [row for row in rows if row.get("pair", row["key"]) not in lost]
    if options.get("region_dir"):
        clip = Regions(options["region_dir"], split, options["regions"], options["frames"])
        places = Videos(options["region_dir"], clip.index())
        clip.sizes = {places[row["video"]]: row["size"] for row in kept if "size" in row}
    else:
        clip, places = clip_options(options), Videos(video_folder(options))
    videos = {row["video"]: places[row["video"]] or places[row.get("also") or row["video"]] for row in kept}
    columns = ("video", "captions", "key", "question", "answer", "choices", "question_type", "pair")
    table = [{c: row[c] for c in columns if c in row} for row in kept]
    data = clips_of(name, split, table, options, clip=clip, videos=videos, has_captions=False)
    warning = ""
    if any(BIASED.get(row["id"]) == hashlib.sha1("\t".join(row["choices"]).encode()).hexdigest()[:8] for row in kept):
        warning = "WARNING: the choices are TGIF-QA's, whose bias gives the answer away, not those of TGIF-QA-R"
        say(f"{warning} ({name}, {split}; the files of PengLiang-cn/PGAT)")
    return with_note(data, warning, "captions are the questions",
                     f"{len(rows) - len(kept):,} questions without an answer left out" if lost else "")


def answered(row):
    """A row with its key, and its answer as text: "" if it is none of the choices, or the row is not whole. Of choices
    that equal the answer (TGIF-QA has some) only the right one stays, since no score could tell them apart."""
    question, answer = (row["question"] or "").strip(), row["answer"]
    choices = [c.strip() for c in row.get("choices", ())]
    if choices:
        right = answer
        answer = choices[right] if 0 <= right < len(choices) else ""
        choices = [c for k, c in enumerate(choices) if c and (c != answer or k == right)]
    if not question or len(choices) == 1:
        answer = ""
    return row | {"key": f"{row['video']} {row['id']}", "captions": [question], "question": question,
                  "answer": str(answer).strip(), "choices": choices}
