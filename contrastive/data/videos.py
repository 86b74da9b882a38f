"""Video sets by name: MSR-VTT, MSVD, ActivityNet, DiDeMo, YouCook2, HowTo100M and Something-Something v2 with a long
tail (SSv2-LT), in their authors' layouts or as the hub has them (a row per clip: video, caption[, start, end]).

Annotation files lie below --data-dir (or come from the hub, if it has them), videos below --video-dir. A reader is a
function of (files, split) that yields rows; files.last is the annotation file that was found.
"""

import hashlib
from pathlib import Path

from contrastive.data.annotations import (
    Files,
    clips_of,
    count_note,
    files_of,
    one_caption_list,
    video_folder,
    video_index,
)
from contrastive.data.clips import clip_options
from contrastive.data.table import Data, EmptySplit, generating, hub_folder, with_note
from contrastive.engine.processes import UserError, opening

HUB_FILES = ["*.json", "*.jsonl", "*.csv", "*.parquet"]  # what is downloaded from a repository: no videos
CATEGORIES = ("music", "people", "gaming", "sports", "news", "education", "tv shows", "movie", "animation", "vehicles",
              "howto", "travel", "science", "animals", "kids", "documentary", "food", "cooking", "beauty",
              "advertisement")  # MSR-VTT's own numbers


# ---- one reader for each set ----
def listed(files):
    """Rows of a file with a row per clip; `segment`, or start and end, are its window."""
    for row in files.rows(files.last.name):
        video = next(row[c] for c in ("video", "video_path", "video_id", "file_name") if row.get(c))
        captions = next(row[c] for c in ("caption", "captions", "sentence", "text") if c in row)
        window = row.get("segment") or (row.get("start"), row.get("end"))
        yield {"video": video, "captions": captions, "start": window[0], "end": window[1]}


def msrvtt(files, split):
    """CLIP4Clip's list of videos and MSRVTT_data.json {sentences: [{video_id, caption}], videos: [{category}]}; for the
    test its csv of sentences. The class is the category; -1 where none is given."""
    if files.last.name == "MSRVTT_train.9k.csv":
        wanted = {row["video_id"].strip() for row in files.csv(files.last.name)}
        said = files.json("MSRVTT_data.json")["sentences"]
        rows = [{"video": s["video_id"], "captions": s["caption"]} for s in said if s["video_id"] in wanted]
        about = files.json("MSRVTT_data.json")["videos"]
    else:
        rows, about = [*listed(files)], files.rows(files.last.name)
        about = files.json("MSRVTT_data.json")["videos"] if files.has("MSRVTT_data.json") else about
    of = {Path(row["video_id"]).stem: CATEGORIES[int(row["category"])] for row in about if "category" in row}
    known = any(Path(row["video"]).stem in of for row in rows)
    for row in rows:
        yield row | ({"label": of.get(Path(row["video"]).stem)} if known else {})


def msvd(files, split):
    """CLIP4Clip's list of videos, one per line; the captions are lists of words in raw-captions.pkl."""
    if files.last.suffix != ".txt":
        yield from listed(files)
        return
    ids, said = files.lines(files.last.name), files.pickle("raw-captions.pkl")
    for video in (v for v in ids if v in said):
        yield {"video": video, "captions": [c if isinstance(c, str) else " ".join(c) for c in said[video]]}


def activitynet(files, split):
    """{video: {sentences: [...]}}: one paragraph per video."""
    if files.last.name not in ("train.json", "val_1.json"):
        yield from paragraphs(listed(files))
        return
    rows = files.json(files.last.name)
    yield from paragraphs({"video": v, "captions": row["sentences"]} for v, row in rows.items())


def didemo(files, split):
    """[{video, description}], several per video: one paragraph; only the first 30 seconds are used."""
    if files.last.name.endswith("_data.json"):
        rows = ({"video": row["video"], "captions": row["description"]} for row in files.json(files.last.name))
    else:
        rows = listed(files)
    yield from paragraphs(row | {"start": 0.0, "end": 30.0} for row in rows)


def paragraphs(rows):
    """The captions of each video as one text."""
    for row in one_caption_list([*rows]):
        yield row | {"captions": " ".join(str(c).strip() for c in row["captions"] if str(c or "").strip())}


def youcook2(files, split):
    """{database: {video: {subset, annotations: [{segment, sentence}]}}}: one example per step, with its window."""
    if "database" not in files.last.read_text(encoding="utf-8-sig", errors="replace")[:1000]:
        yield from listed(files)
        return
    part = {"train": "training", "test": "validation"}[split]
    for video, row in files.json(files.last.name)["database"].items():
        for step in row["annotations"] if row["subset"] == part else ():
            start, end = map(float, step["segment"])
            yield {"video": video, "captions": step["sentence"], "start": start, "end": end}


def ssv2_lt(files, split):
    """The clips of LMR's list (lines that begin with a clip's id, one per frame), which says what belongs to the long
    tail, with Qualcomm's labels: the caption is the sentence ("holding a potato"), the class its template."""
    wanted = {line.split()[0] for line in files.lines(files.last.name)[1:]}
    if len(wanted) >= {"train": 168_913}.get(split, 24_777):
        raise UserError(f"{files.last}: names all of Something-Something v2 and not its long tail, whose lists are at "
                        "github.com/tobyperrett/lmr-release")
    labels = {"train": ["train"], "val": ["train", "validation"], "test": ["validation"]}[split]
    for word in labels:
        for row in files.json(f"something-something-v2-{word}.json", f"{word}.json"):
            if str(row["id"]) in wanted:
                label = row["template"].replace("[", "").replace("]", "")
                yield {"video": str(row["id"]), "captions": row["label"], "label": label}


# splits: expected number of examples, None = any.   files: patterns of each split's file, in the order in which they
# are tried.   grouped: video -> text ranks videos by their best caption.   at_rest: where --frame-sampling random
# places frames in evaluation (VAST: in the middles of their segments).
YOUCOOK2 = "youcookii_annotations_trainval.json"
SETS = {
    "msrvtt": {
        "read": msrvtt, "repo": "friedrichor/MSR-VTT", "splits": {"train": 9_000, "test": 1_000},
        "files": {"train": ["MSRVTT_train.9k.csv", "*train*9k*.json*"],
                  "test": ["MSRVTT_JSFUSION_test.csv", "*test*1k*.json*"]}},
    "msvd": {
        "read": msvd, "repo": "friedrichor/MSVD", "splits": {"train": 1_200, "val": 100, "test": 670}, "grouped": True,
        "files": {s: [f"{s}_list.txt", f"*{s}*.json*"] for s in ("train", "val", "test")}},
    "activitynet": {  # test = val1, the papers' split
        "read": activitynet, "repo": "friedrichor/ActivityNet_Captions", "splits": {"train": 10_009, "test": 4_917},
        "files": {"train": ["train.json", "*train*.json*"], "test": ["val_1.json", "*val1*.json*"]}},
    "didemo": {
        "read": didemo, "repo": "friedrichor/DiDeMo", "splits": {"train": 8_395, "val": 1_065, "test": 1_004},
        "files": {s: [f"{s}_data.json", f"*{s}*.json*"] for s in ("train", "val", "test")}},
    "youcook2": {  # test = val, the papers' split
        "read": youcook2, "repo": "lmms-lab/YouCook2", "splits": {"train": 10_337, "test": 3_492}, "at_rest": "middle",
        "files": {s: [YOUCOOK2, *(f"*{word}*.{kind}" for kind in ("json*", "parquet", "csv"))]
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
    with files.border():
        if name == "howto100m":
            return narrations(files, options)
        rows = one_caption_list(facts["read"](files, split))
        classes = {"label": CATEGORIES} if name == "msrvtt" and rows and "label" in rows[0] else None
        data = clips_of(name, split, rows, options, files.root, classes, grouped=facts.get("grouped", False))
    return with_note(data, count_note(name, split, len(data), facts["splits"][split]))


# ---- HowTo100M ----
def narrations(files, options):
    """Data of caption.json {video: {start, end, text}} and the videos that exist; one example is one line of speech.

    There are 136 million lines, one every few seconds. They are in a table on disk, written once per file and set of
    videos (some 45,000 lines a second; 115 bytes and the path per line). No process holds them in memory."""
    import datasets
    if options.get("feature_dir"):
        raise UserError("howto100m: several windows of one video, but --feature-dir has only one file per video")
    folder, facts = str(video_folder(options)), files.last.stat()
    there = hashlib.sha1("\n".join(sorted({p for paths in video_index(folder).values() for p in paths})).encode())
    words, seconds = datasets.Value("string"), datasets.Value("float64")
    features = datasets.Features({"source": {"path": words, "start": seconds, "end": seconds},
                                  "captions": datasets.List(words), "key": words,
                                  "counts": datasets.List(datasets.Value("int64"))})
    depends = {"file": str(files.last), "changed": facts.st_mtime_ns, "folder": folder, "videos": there.hexdigest()}
    with generating():  # `datasets` finds the cached table by these arguments, so they hold all it depends on
        table = datasets.Dataset.from_generator(narration_rows, features=features, gen_kwargs=depends)
    left_out, of = table[0]["counts"]
    return Data("howto100m", "train", table.remove_columns("counts"), clip=clip_options(options),
                note=f"{left_out:,} of {of:,} videos are missing or have no speech")


def narration_rows(file, folder, **_):
    """One row per line of speech of the videos that exist; `counts` [videos left out, videos] is in the first row."""
    files, index = Files(Path(file).parent), video_index(folder)
    lines = files.json(Path(file).name)
    there = [v for v in lines if v in index and lines[v]["text"]]
    if not there:
        raise UserError(f"howto100m: none of {len(lines):,} videos is below {folder}; --video-dir names their folder")
    counts = [len(lines) - len(there), len(lines)]
    for v in there:
        for k, (start, end, text) in enumerate(zip(*(lines[v][c] for c in ("start", "end", "text")), strict=True)):
            source = {"path": index[v][0], "start": float(start), "end": float(end)}
            yield {"source": source, "captions": [str(text)], "key": f"{v} {k}", "counts": counts}
            counts = []
