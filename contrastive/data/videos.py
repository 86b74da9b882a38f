"""Video sets by name: MSR-VTT, MSVD, ActivityNet, DiDeMo, YouCook2, HowTo100M and Something-Something v2 with a long
tail (SSv2-LT), in their authors' layouts or as the hub has them (a row per clip: video, caption[, start, end]).

Annotation files lie below --data-dir (or come from the hub, if it has them), videos below --video-dir. A reader is a
function of (files, split) that yields rows; files.last is the annotation file that was found.
"""

import glob
import json
from pathlib import Path

from contrastive.data.annotations import Files, clips_of, files_of, one_caption_list, video_folder, video_index
from contrastive.data.clips import clip_options
from contrastive.data.table import Data, EmptySplit, generating, hub_folder, with_column
from contrastive.engine.processes import UserError, opening

HUB_FILES = ["*.json", "*.jsonl", "*.parquet"]  # what is downloaded from a repository: no videos
CATEGORIES = ("music", "people", "gaming", "sports", "news", "education", "tv shows", "movie", "animation", "vehicles",
              "howto", "travel", "science", "animals", "kids", "documentary", "food", "cooking", "beauty",
              "advertisement")  # MSR-VTT's own numbers


# ---- one reader for the files of the hub, and one for each set's own ----
def listed(files, names=None):
    """Rows of a file with a row per clip, as the hub has them; `segment`, or start and end, are its window. names: of
    the classes, if the column `category` has their numbers."""
    import datasets
    kind = "parquet" if files.last.suffix == ".parquet" else "json"
    for row in datasets.load_dataset(kind, data_files=glob.escape(str(files.last)), split="train"):
        video = row.get("video") or row.get("video_path") or row["video_id"]
        captions = row["caption"] if "caption" in row else row["sentence"]
        start, end = row.get("segment") or (row.get("start"), row.get("end"))
        label = {"label": names[row["category"]]} if names and "category" in row else {}
        yield {"video": video, "captions": captions, "start": start, "end": end} | label


def msrvtt(files, split):
    """CLIP4Clip's list of videos, for the test its csv of sentences, and MSRVTT_data.json {sentences: [{video_id,
    caption}], videos: [{video_id, category}]}. The class is the category."""
    rows, whole = files.csv(files.last.name), files.json("MSRVTT_data.json")
    if split == "train":
        wanted = {row["video_id"] for row in rows}
        rows = [s | {"sentence": s["caption"]} for s in whole["sentences"] if s["video_id"] in wanted]
    of = {row["video_id"]: CATEGORIES[row["category"]] for row in whole["videos"]}
    for row in rows:
        yield {"video": row["video_id"], "captions": row["sentence"], "label": of.get(row["video_id"])}


def msvd(files, split):
    """CLIP4Clip's list of videos, one per line; the captions are lists of words in raw-captions.pkl."""
    videos, said = files.lines(files.last.name), files.pickle("raw-captions.pkl")
    for video in videos:
        yield {"video": video, "captions": [" ".join(words) for words in said[video]]}


def activitynet(files, split):
    """{video: {sentences: [...]}}."""
    for video, row in files.json(files.last.name).items():
        yield {"video": video, "captions": row["sentences"]}


def didemo(files, split):
    """[{video, description}], several per video."""
    for row in files.json(files.last.name):
        yield {"video": row["video"], "captions": row["description"]}


def youcook2(files, split):
    """{database: {video: {subset, annotations: [{segment, sentence}]}}}: one example per step, with its window."""
    part = {"train": "training", "test": "validation"}[split]
    for video, row in files.json(files.last.name)["database"].items():
        for step in row["annotations"] if row["subset"] == part else ():
            start, end = map(float, step["segment"])
            yield {"video": video, "captions": step["sentence"], "start": start, "end": end}


def ssv2_lt(files, split):
    """The clips of LMR's list (lines that begin with a clip's id, one per frame), which says what belongs to the long
    tail, with Qualcomm's labels: the caption is the sentence ("holding a potato"), the class its template."""
    wanted = {line.split()[0] for line in files.lines(files.last.name)[1:]}
    labels = {"train": ["train"], "val": ["train", "validation"], "test": ["validation"]}[split]
    for word in labels:
        for row in files.json(f"something-something-v2-{word}.json", f"{word}.json"):
            if row["id"] in wanted:
                label = row["template"].replace("[", "").replace("]", "")
                yield {"video": row["id"], "captions": row["label"], "label": label}


# splits: expected number of examples, None = any.   files: each split's own file, which `read` reads, then patterns of
# the hub's, in the order in which they are tried.   window: what is used of each video.   paragraphs: the captions of
# a video are one text.   grouped: video -> text ranks videos by their best caption.   at_rest: where --frame-sampling
# random places frames in evaluation (VAST: in the middles of their segments).
SETS = {
    "msrvtt": {
        "read": msrvtt, "repo": "friedrichor/MSR-VTT", "splits": {"train": 9_000, "test": 1_000},
        "classes": {"label": CATEGORIES},
        "files": {"train": ["MSRVTT_train.9k.csv", "*train*9k*.json*"],
                  "test": ["MSRVTT_JSFUSION_test.csv", "*test*1k*.json*"]}},
    "msvd": {
        "read": msvd, "repo": "friedrichor/MSVD", "splits": {"train": 1_200, "val": 100, "test": 670}, "grouped": True,
        "files": {s: [f"{s}_list.txt", f"*{s}*.json*"] for s in ("train", "val", "test")}},
    "activitynet": {  # test = val1, the papers' split
        "read": activitynet, "repo": "friedrichor/ActivityNet_Captions", "splits": {"train": 10_009, "test": 4_917},
        "paragraphs": True,
        "files": {"train": ["train.json", "*train*.json*"], "test": ["val_1.json", "*val1*.json*"]}},
    "didemo": {
        "read": didemo, "repo": "friedrichor/DiDeMo", "splits": {"train": 8_395, "val": 1_065, "test": 1_004},
        "paragraphs": True, "window": {"start": 0.0, "end": 30.0},
        "files": {s: [f"{s}_data.json", f"*{s}*.json*"] for s in ("train", "val", "test")}},
    "youcook2": {  # test = val, the papers' split
        "read": youcook2, "repo": "lmms-lab/YouCook2", "splits": {"train": 10_337, "test": 3_492}, "at_rest": "middle",
        "files": {s: ["youcookii_annotations_trainval.json", f"*{word}*.json*", f"*{word}*.parquet"]
                  for s, word in (("train", "train"), ("test", "val"))}},
    "ssv2-lt": {  # train: the sum of the class counts in LMR's configuration; val and test: 40 and 15 clips per class;
        "read": ssv2_lt, "repo": "", "splits": {"train": 50_418, "val": 6_960, "test": 2_610}, "at_rest": "middle",
        "files": {"train": ["train.csv"], "val": ["trainval.csv"], "test": ["val.csv"]}},  # test = LMR's val.csv
    "howto100m": {"read": None, "repo": "", "splits": {"train": None}, "files": {"train": ["caption.json"]}}}
for _facts in SETS.values():
    _facts["licence"] = "research only"


def load(name, split, options):
    """Data of one split: annotation files in --data-dir (or from the hub, if it has them), videos below --video-dir."""
    facts, files = SETS[name], files_of(name, options)
    patterns = facts["files"][split]
    if options.get("revision") or facts["repo"] and not options.get("data_dir") and not files.has(*patterns):
        with opening(f"{name}: {facts['repo']} on the hub (--data-dir names a local copy)"):
            files = Files(hub_folder(facts["repo"], HUB_FILES, options.get("revision")))
    if split == "val" and not files.has(*patterns):
        raise EmptySplit(f"{name}: {files.root} has no annotation file of its val split")
    files.find(*patterns)
    options = options | {"at_rest": facts.get("at_rest", "")}
    with opening(files):
        if name == "howto100m":
            return narrations(files, options)
        classes, own = facts.get("classes", {}), files.last.name == patterns[0]
        rows = facts["read"](files, split) if own else listed(files, classes.get("label"))
        rows = one_caption_list(row | facts.get("window", {}) for row in rows)
        data = clips_of(name, split, rows, options, classes, grouped=facts.get("grouped", False))
    if facts.get("paragraphs"):
        data = with_column(data, "captions", [[" ".join(said)] for said in data.column("captions")])
    return data


# ---- HowTo100M ----
def narrations(files, options):
    """Data of caption.json {video: {start, end, text}} and the videos that exist; one example is one line of speech.

    There are 136 million lines, one every few seconds. They are in a table on disk, written once per file and set of
    videos (some 45,000 lines a second; 115 bytes and the path per line). No process holds them in memory."""
    import datasets
    # `datasets` finds the cached table by these arguments, so they hold all it depends on
    depends = {"file": str(files.last), "changed": files.last.stat().st_mtime_ns,
               "index": video_index(str(video_folder(options)))}
    with generating():
        table = datasets.Dataset.from_generator(narration_rows, gen_kwargs=depends)
    left_out, of = table[0]["counts"]
    return Data("howto100m", "train", table.remove_columns("counts"), clip=clip_options(options),
                note=f"{left_out:,} of {of:,} videos are missing or have no speech")


def narration_rows(file, index, changed):
    """One row per line of speech of the videos that exist; `counts` [videos left out, videos] is in the first row."""
    lines = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    there = [v for v in lines if v in index and lines[v]["text"]]
    if not there:
        raise UserError(f"howto100m: none of {len(lines):,} videos is there; --video-dir names their folder")
    counts = [len(lines) - len(there), len(lines)]
    for v in there:
        for k, (start, end, text) in enumerate(zip(*(lines[v][c] for c in ("start", "end", "text")), strict=True)):
            source = {"path": index[v], "start": float(start), "end": float(end)}
            yield {"source": source, "captions": [text], "key": f"{v} {k}", "counts": counts}
            counts = []
