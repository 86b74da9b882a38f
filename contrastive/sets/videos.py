"""Video sets by name, in their common layouts: MSR-VTT, MSVD, ActivityNet, DiDeMo, YouCook2 and HowTo100M.

A set consists of annotation files below --data-dir (or from the hub, if it has them) and videos below --video-dir,
found by name. A reader maps an annotation file and a split to {(video, start, end): captions} in the order of the file.
HowTo100M has 136 million lines of speech, one every few seconds: they are copied once to a table on disk.
"""

import dataclasses
import hashlib
from pathlib import Path

import common
from common import EmptySplit

from contrastive.engine.base import UserError, first_line, join_notes
from contrastive.readers import text
from contrastive.readers.clips import clip_options
from contrastive.readers.records import read_table
from contrastive.readers.videos import ONE_FILE, clips_of, video_folder, video_index
from contrastive.sets import annotations
from contrastive.sets.hub import hub_call
from contrastive.sets.own import caption_file, joined

HUB_FILES = ["*.json", "*.jsonl", "*.csv", "*.parquet"]  # what is downloaded from a repository: no videos
TABLE_VERSION = 1  # of narration_rows: after a change of this number the tables on disk are written again


# ---- one reader for each layout ----
def read_msrvtt(file, split):
    """CLIP4Clip's list of videos (column video_id); the captions are in MSRVTT_data.json beside it."""
    wanted = {row["video_id"].strip() for _, row in text.csv_rows(file, ["video_id"])}
    sentences, out = _beside(file, "MSRVTT_data.json"), {}
    with text.expected_layout(sentences):
        for row in text.read_json(sentences)["sentences"]:
            if row["video_id"] in wanted:
                out.setdefault((row["video_id"], None, None), []).append(text.words(row["caption"]))
    if wanted and not out:
        raise UserError(f"{sentences}: it has no caption of the {len(wanted):,} videos of {file.name}")
    return out


def read_msvd(file, split):
    """CLIP4Clip's list of videos, one per line; the captions are lists of words in raw-captions.pkl beside it."""
    said, ids = _beside(file, "raw-captions.pkl"), text.read_lines(file)
    with text.expected_layout(said):
        captions = text.load_plain_pickle(said)
        found = {(v, None, None): [_joined(caption) for caption in captions[v]] for v in ids if v in captions}
    if ids and not found:
        raise UserError(f"{said}: it has no caption of the {len(ids):,} videos of {file.name}")
    return found


def read_activitynet(file, split):
    """{video: {sentences: [...]}}: one paragraph per video."""
    rows = text.read_json(file)
    return {(v, None, None): _texts(row["sentences"]) for v, row in rows.items()}


def read_didemo(file, split):
    """[{video, description}], several per video; only the first 30 seconds are used, as in the hub's files."""
    out = {}
    for row in text.read_json(file):
        out.setdefault((text.words(row["video"]), 0.0, 30.0), []).append(text.words(row["description"]))
    return out


def read_youcook2(file, split):
    """{database: {video: {subset, annotations: [{segment, sentence}]}}}: one example per step, with its window."""
    rows = text.read_json(file)["database"]
    part = {"train": "training", "test": "validation"}[split]
    steps = [(v, step) for v, row in rows.items() if row["subset"] == part for step in row["annotations"]]
    return {(v, *text.window(s["segment"][0], s["segment"][1])): [text.words(s["sentence"])] for v, s in steps}


def _texts(said):
    return list(map(text.words, said if isinstance(said, list) else [said]))


# MSR-VTT's own numbers
CATEGORIES = ("music", "people", "gaming", "sports", "news", "education", "tv shows", "movie", "animation", "vehicles",
              "howto", "travel", "science", "animals", "kids", "documentary", "food", "cooking", "beauty",
              "advertisement")


def with_categories(data, file, root):
    """MSR-VTT with the category of each video as its class (label), from the `videos` of MSRVTT_data.json or the rows
    of the annotation file; unchanged if neither has categories. All splits have the same 20 class names."""
    import datasets
    of_all = annotations.find_file(root, "MSRVTT_data.json")
    with text.expected_layout(of_all or file):
        rows = text.read_json(of_all).get("videos") or [] if of_all else read_table(file)
        named = of_all or {"video_id", "category"} <= {*rows.column_names}
        said = {Path(text.words(row["video_id"])).stem: text.words(row.get("category")) for row in rows if named}
    number = {str(k): k for k in range(len(CATEGORIES))}
    labels = [number.get(said.get(Path(key).stem), -1) for key in data.keys()]
    lost = labels.count(-1)
    if lost == len(data):
        return data
    table = data.table.add_column("label", labels, feature=datasets.ClassLabel(names=list(CATEGORIES)))
    note = f"{lost:,} without a category (not used where classes are)" if lost else ""
    return dataclasses.replace(data, table=table, note=join_notes(data.note, note))


def _joined(caption):
    return " ".join(caption) if isinstance(caption, (list, tuple)) else text.words(caption)


def _beside(file, name):
    if not (file.parent / name).is_file():
        raise UserError(f"{file.parent}: {name} is not there; {file.name} needs it")
    return file.parent / name


# ---- the sets ----
# splits: expected number of examples, None = any.   files of each split, in the order in which they are tried: (name
# or pattern below --data-dir, its reader); reader None = each row has video, caption[, start, end].
# grouped: video -> text ranks videos by their best caption.   paragraphs: the sentences of a video are joined.
# window: seconds of each video that are used.
# at_rest: where --frame-sampling random places frames in evaluation (VAST: in the middles of their segments).
SPLITS = ("train", "val", "test")
YOUCOOK2 = ("youcookii_annotations_trainval.json", read_youcook2)  # one file for all splits
SETS = {
    "msrvtt": {
        "repo": "friedrichor/MSR-VTT", "splits": {"train": 9_000, "test": 1_000}, "licence": "research only",
        "files": {"train": [("MSRVTT_train.9k.csv", read_msrvtt), ("*train*9k*.json*", None)],
                  "test": [("MSRVTT_JSFUSION_test.csv", None), ("*test*1k*.json*", None)]}},
    "msvd": {
        "repo": "friedrichor/MSVD", "splits": {"train": 1_200, "val": 100, "test": 670}, "licence": "research only",
        "files": {s: [(f"{s}_list.txt", read_msvd), (f"*{s}*.json*", None)] for s in SPLITS}, "grouped": True},
    "activitynet": {
        "repo": "friedrichor/ActivityNet_Captions", "splits": {"train": 10_009, "test": 4_917},
        "licence": "research only; test = val1, the papers' split", "paragraphs": True,
        "files": {"train": [("train.json", read_activitynet), ("*train*.json*", None)],
                  "test": [("val_1.json", read_activitynet), ("*val1*.json*", None)]}},
    "didemo": {
        "repo": "friedrichor/DiDeMo", "splits": {"train": 8_395, "val": 1_065, "test": 1_004},
        "licence": "research only", "paragraphs": True, "window": (0.0, 30.0),
        "files": {s: [(f"{s}_data.json", read_didemo), (f"*{s}*.json*", None)] for s in SPLITS}},
    "youcook2": {
        "repo": "lmms-lab/YouCook2", "splits": {"train": 10_337, "test": 3_492},
        "licence": "research only; test = val, the papers' split", "at_rest": "middle",
        "files": {s: [YOUCOOK2, *((f"*{word}*.{kind}", None) for kind in ("json*", "parquet", "csv"))]
                  for s, word in (("train", "train"), ("test", "val"))}},
    "howto100m": {
        "repo": "", "splits": {"train": None}, "licence": "research only",
        "files": {"train": [("caption.json", None)]}}}


def load(name, split, options):
    """Data of one split: annotation files in --data-dir (or from the hub, if it has them), videos below --video-dir.

    Raises: UserError that names the missing split, folder or file, or the file with an unexpected layout.
    """
    facts, files = SETS[name], SETS[name]["files"]
    hint = "; --hold-out-val takes one out of train" if split == "val" and "test" in files else ""
    annotations.check_split(name, split, files, hint)
    root = annotations.annotation_root(name, files, options)
    lies_there = options.get("data_dir") or annotations.find_file(root, *(pattern for pattern, _ in files[split]))
    if facts["repo"] and not lies_there:
        root = Path(hub_call(name, facts["repo"], lambda hub: hub.snapshot_download(
            facts["repo"], repo_type="dataset", allow_patterns=HUB_FILES)))
    if split == "val" and not any(annotations.find_file(root, pattern) for pattern, _ in files[split]):
        raise EmptySplit(f"{name}: {root} has no annotation file of its val split")
    file, reader = annotations.annotation_file(name, split, files, root)
    options = options | {"at_rest": facts.get("at_rest", "")}
    with text.expected_layout(f"{name}: {file}"):
        if name == "howto100m":
            data = narrations(name, split, file, options)
        elif reader:
            found = reader(file, split)
            if not found:
                raise UserError(f"{name} ({split}): {file} names no video")
            data = clips_of(name, split, found, options, root)
        else:
            where = {"video_dir": options.get("video_dir") or str(root), "window": facts.get("window")}
            data = caption_file(name, split, file, root, options | where | {"repeats": True})
        if name == "msrvtt":
            data = with_categories(data, file, root)
    if facts.get("paragraphs") and not options.get("join_captions"):
        data = joined(data)
    count = facts["splits"][split] or len(data)
    note = join_notes(data.note, annotations.count_note(name, split, len(data), count))
    return dataclasses.replace(data, note=note, grouped=facts.get("grouped", False))


# ---- HowTo100M ----
def narrations(name, split, file, options):
    """Data of caption.json {video: {start, end, text}} and the videos that exist; one example is one line of speech.

    The lines are in a table on disk, written once per file and set of videos (some 45,000 lines a second; 115 bytes and
    the path per line). No process holds them in memory.
    Raises: UserError if no video exists or the table cannot be written; errors of an unexpected layout pass through.
    """
    import datasets
    if options.get("feature_dir"):
        raise UserError(f"{name}: {ONE_FILE}")
    if options.get("join_captions"):
        raise UserError(f"--join-captions: an example of {name} is one line of speech; leave it out")
    folder, facts = str(video_folder(options)), file.stat()
    paths = sorted({path for paths in video_index(folder).values() for path in paths})
    videos = hashlib.sha1("\n".join(paths).encode("utf8", "surrogateescape")).hexdigest()
    words, seconds = datasets.Value("string"), datasets.Value("float64")
    features = datasets.Features({
        "source": {"path": words, "start": seconds, "end": seconds}, "captions": datasets.List(words), "key": words,
        "counts": datasets.List(datasets.Value("int64"))})
    # `datasets` finds the cached table by these arguments, so they hold all it depends on; it would split a list
    depends = {"name": name, "file": str(file), "size": facts.st_size, "mtime": facts.st_mtime_ns, "folder": folder,
               "videos": videos, "version": TABLE_VERSION}
    try:
        table = datasets.Dataset.from_generator(narration_rows, features=features, gen_kwargs=depends)
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):  # a full disk, say
            where = f"{datasets.config.HF_DATASETS_CACHE} (HF_DATASETS_CACHE names another folder)"
            raise UserError(f"{name}: {file} cannot be copied to a table in {where}: {first_line(cause)}") from error
        raise cause from None
    left_out, listed = table[0]["counts"]
    note = f"{left_out:,} of {listed:,} videos are missing or have no speech"
    return common.Data(name, split, table.remove_columns("counts"), clip=clip_options(options), note=note)


def narration_rows(name, file, folder, **_):
    """One row per line of speech of the videos that exist; `counts` [videos left out, videos] is in the first row."""
    lines, index = text.read_json(file), video_index(folder)
    there = [v for v in lines if v in index and lines[v]["text"]]
    if not there:
        none = f"none of {len(lines):,} videos of {Path(file).name} is below {folder}"
        raise UserError(f"{name}: {none}; --video-dir names the folder of the videos")
    counts = [len(lines) - len(there), len(lines)]
    for v in there:
        starts, ends = lines[v]["start"], lines[v]["end"]
        for k, line in enumerate(lines[v]["text"]):
            start, end = text.number(starts[k]), text.number(ends[k])
            source = {"path": index[v][0], "start": start, "end": end}
            yield {"source": source, "captions": [text.words(line)], "key": f"{v} {k}", "counts": counts}
            counts = []
