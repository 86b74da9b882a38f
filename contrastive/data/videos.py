"""Video sets by name: MSR-VTT, MSVD, ActivityNet, DiDeMo, YouCook2, HowTo100M and Something-Something v2 with a long
tail (SSv2-LT), in their authors' layouts or as the hub has them (a row per clip: video, caption[, start, end]).

A reader is a function of (files, split) that yields rows; files.last is the annotation file that was found.
"""

import glob

from contrastive.data.annotations import Files, clips_of, files_of
from contrastive.data.table import EmptySplit, hub_folder, with_column
from contrastive.engine.processes import opening

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
    """The clips of LMR's list (lines that begin with a clip's id, one per frame) with Qualcomm's labels: the caption is
    the sentence ("holding a potato"), the class its template."""
    wanted = {line.split()[0] for line in files.lines(files.last.name)[1:]}
    labels = {"train": ["train"], "val": ["train", "validation"], "test": ["validation"]}[split]
    for word in labels:
        for row in files.json(f"something-something-v2-{word}.json", f"{word}.json"):
            if row["id"] in wanted:
                label = row["template"].replace("[", "").replace("]", "")
                yield {"video": row["id"], "captions": row["label"], "label": label}


def howto100m(files, split):
    """{video: {start, end, text}}: one example per line of speech."""
    for video, said in files.json(files.last.name).items():
        for k, (start, end, text) in enumerate(zip(said["start"], said["end"], said["text"], strict=True)):
            yield {"video": video, "captions": text, "start": float(start), "end": float(end), "key": f"{video} {k}"}


# splits: expected number of examples, None = any.   files: each split's own file, which `read` reads, then patterns of
# the hub's.   window: what is used of each video.   paragraphs: the captions of a video are one text.   grouped: video
# -> text ranks videos by their best caption.   at_rest: where random frames lie in evaluation (VAST: in the middles).
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
    "howto100m": {"read": howto100m, "repo": "", "splits": {"train": None}, "files": {"train": ["caption.json"]}}}
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
        classes, own = facts.get("classes", {}), files.last.name == patterns[0]
        rows = facts["read"](files, split) if own else listed(files, classes.get("label"))
        rows = (row | facts.get("window", {}) for row in rows)
        data = clips_of(name, split, rows, options, classes, grouped=facts.get("grouped", False))
    if facts.get("paragraphs"):
        data = with_column(data, "captions", [[" ".join(said)] for said in data.column("captions")])
    return data
