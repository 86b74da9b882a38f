"""Video sets by name: MSR-VTT, MSVD, ActivityNet, DiDeMo, YouCook2, HowTo100M and
Something-Something v2 with a long tail (SSv2-LT), in their authors' layouts or as the hub has them
(a row for each clip: video, caption[, start, end]).

A reader is a function of (files, split) that yields rows. The annotation file of the split is found
before: files.json() and the like read it.
"""

import dataclasses

from contrastive.core.processes import opening
from contrastive.data.annotations import Files, clips_of, files_of
from contrastive.data.clips import clip_options
from contrastive.data.hub import hub_folder
from contrastive.data.registry import SETS
from contrastive.data.table import EmptySplit, join_captions
from contrastive.data.table_files import read_table

HUB_FILES = ["*.json", "*.jsonl", "*.parquet"]  # what is downloaded from a repository: no videos
CATEGORIES = (  # names of MSR-VTT's categories, by their numbers
    "music", "people", "gaming", "sports", "news", "education", "tv shows", "movie", "animation",
    "vehicles", "howto", "travel", "science", "animals", "kids", "documentary", "food", "cooking",
    "beauty", "advertisement")


# ---- one reader for the files of the hub, and one for each set's own ----
def read_hub_file(files, class_names=None):
    """Rows of a file with a row for each clip, as the hub or VAST has them; `segment`, or start and
    end, are its window.

    Args:
        class_names: by the number in the column `category`, if it has one.
    """
    for row in read_table(files.last):
        segment = row.get("segment")
        if segment:
            start, end = segment
        else:
            start = row.get("start")
            end = row.get("end")
        if "caption" in row:
            captions = row["caption"]
        elif "sentence" in row:
            captions = row["sentence"]
        else:
            captions = row["desc"]
        example = {
            "video": row.get("video") or row.get("video_path") or row["video_id"],
            "captions": captions,
            "start": start,
            "end": end}
        if "subtitle" in row:
            example["subtitle"] = row["subtitle"] or ""
        if class_names and "category" in row:
            example["label"] = class_names[row["category"]]
        yield example


def msrvtt(files, split):
    """CLIP4Clip's list of videos, for the test its csv of sentences, and MSRVTT_data.json
    {sentences: [{video_id, caption}], videos: [{video_id, category}]}. The class is the
    category."""
    rows = files.csv()
    content = files.json("MSRVTT_data.json")
    if split == "train":
        videos = {row["video_id"] for row in rows}
        rows = []
        for sentence in content["sentences"]:
            if sentence["video_id"] in videos:
                rows.append({**sentence, "sentence": sentence["caption"]})
    categories = {row["video_id"]: CATEGORIES[row["category"]] for row in content["videos"]}
    for row in rows:
        video = row["video_id"]
        yield {"video": video, "captions": row["sentence"], "label": categories.get(video)}


def msvd(files, split):
    """CLIP4Clip's list of videos, one a line; the captions are lists of words in
    raw-captions.pkl."""
    videos = files.lines()
    captions = files.pickle("raw-captions.pkl")
    for video in videos:
        yield {"video": video, "captions": [" ".join(words) for words in captions[video]]}


def activitynet(files, split):
    """{video: {sentences: [...]}}."""
    for video, row in files.json().items():
        yield {"video": video, "captions": row["sentences"]}


def didemo(files, split):
    """[{video, description}], several of a video."""
    for row in files.json():
        yield {"video": row["video"], "captions": row["description"]}


def youcook2(files, split):
    """{database: {video: {subset, annotations: [{segment, sentence}]}}}: an example for each step,
    with its window."""
    subset = {"train": "training", "test": "validation"}[split]
    for video, row in files.json()["database"].items():
        if row["subset"] != subset:
            continue
        for step in row["annotations"]:
            start, end = step["segment"]
            yield {"video": video, "captions": step["sentence"], "start": float(start),
                   "end": float(end)}


def ssv2_lt(files, split):
    """The clips of LMR's list (lines that begin with a clip's id, one for each frame) with
    Qualcomm's labels: the caption is the sentence ("holding a potato"), the class its template."""
    lines = files.lines()[1:]
    clips = {line.split()[0] for line in lines}
    parts = {"train": ["train"], "val": ["train", "validation"], "test": ["validation"]}[split]
    for part in parts:
        for row in files.json(f"something-something-v2-{part}.json", f"{part}.json"):
            if row["id"] in clips:
                label = row["template"].replace("[", "").replace("]", "")
                yield {"video": row["id"], "captions": row["label"], "label": label}


def howto100m(files, split):
    """{video: {start, end, text}}: an example for each line of speech."""
    for video, speech in files.json().items():
        lines = zip(speech["start"], speech["end"], speech["text"], strict=True)
        for number, (start, end, text) in enumerate(lines):
            yield {"video": video, "captions": text, "start": float(start), "end": float(end),
                   "key": f"{video} {number}"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a video set is read."""

    read: object  # function(files, split) that yields rows of the authors' annotation files
    # {split: [the authors' file, which `read` reads, then patterns of the hub's files]}
    files: dict
    classes: dict = dataclasses.field(default_factory=dict)  # {column: class names}
    window: dict = dataclasses.field(default_factory=dict)  # start and end of the part in use
    is_paragraph: bool = False  # whether the captions of a video are one text
    is_grouped: bool = False  # whether video -> text ranks videos by their best caption
    eval_sampling: str = "uniform"  # where random frames lie in evaluation (VAST: in the middles)
    # {split: VAST's file of [{video_id, desc, subtitle}]}, which comes first if subtitles are read
    with_subtitles: dict = dataclasses.field(default_factory=dict)


LAYOUTS = {
    "msrvtt": Layout(
        msrvtt,
        {"train": ["MSRVTT_train.9k.csv", "*train*9k*.json*"],
         "test": ["MSRVTT_JSFUSION_test.csv", "*test*1k*.json*"]},
        classes={"label": CATEGORIES}),
    "msvd": Layout(
        msvd,
        {"train": ["train_list.txt", "*train*.json*"],
         "val": ["val_list.txt", "*val*.json*"],
         "test": ["test_list.txt", "*test*.json*"]},
        is_grouped=True),
    "activitynet": Layout(
        activitynet,
        {"train": ["train.json", "*train*.json*"], "test": ["val_1.json", "*val1*.json*"]},
        is_paragraph=True),
    "didemo": Layout(
        didemo,
        {"train": ["train_data.json", "*train*.json*"],
         "val": ["val_data.json", "*val*.json*"],
         "test": ["test_data.json", "*test*.json*"]},
        is_paragraph=True, window={"start": 0.0, "end": 30.0}),
    "youcook2": Layout(
        youcook2,
        {"train": ["youcookii_annotations_trainval.json", "*train*.json*", "*train*.parquet"],
         "test": ["youcookii_annotations_trainval.json", "*val*.json*", "*val*.parquet",
                  "*descs*test*.json"]},
        eval_sampling="middle",
        with_subtitles={"train": "*descs*train*.json", "test": "*descs*test*.json"}),
    "ssv2-lt": Layout(
        ssv2_lt, {"train": ["train.csv"], "val": ["trainval.csv"], "test": ["val.csv"]},
        eval_sampling="middle"),
    "howto100m": Layout(howto100m, {"train": ["caption.json"]}),
}


def load(name, split, options):
    """Data of one split: annotation files in --data-dir (or from the hub, if it has them), videos
    below --video-dir."""
    layout = LAYOUTS[name]
    files = find_annotations(name, split, options)
    with opening(files):
        if files.last.name == layout.files[split][0]:
            rows = layout.read(files, split)
        else:
            rows = read_hub_file(files, layout.classes.get("label"))
        rows = ({**row, **layout.window} for row in rows)
        data = clips_of(
            name, split, rows, options, classes=layout.classes,
            clip=clip_options(options, layout.eval_sampling), grouped=layout.is_grouped)
    if layout.is_paragraph:
        data = join_captions(data)
    return data


def find_annotations(name, split, options):
    """The Files of a set, in its folder or in the hub's cache, that found the split's own file."""
    patterns = LAYOUTS[name].files[split]
    if "s" in options.modalities and split in LAYOUTS[name].with_subtitles:
        patterns = [LAYOUTS[name].with_subtitles[split], *patterns]
    repository = SETS[name].repository
    files = files_of(name, options)
    is_local = options.data_dir or files.has(*patterns)
    if options.revision or (repository and not is_local):
        with opening(f"{name}: {repository} on the hub (--data-dir names a local copy)"):
            files = Files(hub_folder(repository, HUB_FILES, options.revision or None))
    if split == "val" and not files.has(*patterns):
        raise EmptySplit(f"{name}: {files.root} has no annotation file of its val split")
    files.find(*patterns)
    return files
