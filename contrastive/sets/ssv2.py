"""Something-Something v2 with a long tail (SSv2-LT): short clips of hands and things, 174 classes.

--data-dir holds the published labels (something-something-v2-train.json, -validation.json, or Qualcomm's newer names
train.json, validation.json) and the lists of LMR's authors, which say what belongs to the long tail: train.csv;
trainval.csv, the validation split (40 clips per class); val.csv, which is their test split renamed (15 per class). They
have a line per frame that begins with the clip's id. --video-dir has the clips (20bn-something-something-v2/ID.webm).
A clip's caption is its sentence ("holding a potato"), its class the template ("Holding something").
"""

import dataclasses
from pathlib import Path

from common import EmptySplit

from contrastive.engine.base import UserError, join_notes
from contrastive.readers import text
from contrastive.readers.videos import clips_of
from contrastive.sets.annotations import check_split, count_note, find_file

LISTS = "github.com/tobyperrett/lmr-release, 'Link to splits'"
# train: the sum of the class counts in LMR's configuration; val and test: 40 and 15 clips of each of 174 classes
SETS = {"ssv2-lt": {"splits": {"train": 50_418, "val": 6_960, "test": 2_610},
                    "licence": "research only; test = LMR's val.csv",
                    "where": f"labels: Qualcomm's Something-Something v2; lists: {LISTS}"}}
WHOLE = {"train": 168_913, "val": 24_777, "test": 24_777}  # counts of the full set, whose lists have the same names
TRAIN, HELD = ("something-something-v2-train.json", "train.json"), ("something-something-v2-validation.json",
                                                                   "validation.json")
FILES = {"train": ("train.csv", [TRAIN]), "val": ("trainval.csv", [TRAIN, HELD]), "test": ("val.csv", [HELD])}


def load(name, split, options):
    """Data of one split: the clips of its list, in the order of the label files (val: of both files).

    With random frames, evaluation takes the middle of each segment, as VAST does.
    Raises: UserError that names the missing split, folder or file, or the file with an unexpected layout.
    """
    check_split(name, split, FILES)
    if not options.get("data_dir"):
        raise UserError(f"--dataset {name} needs --data-dir (labels and the lists train.csv, trainval.csv, val.csv: "
                        f"{LISTS}) and --video-dir (the folder of ID.webm)")
    root, (members, labels) = Path(options["data_dir"]).expanduser(), FILES[split]
    if split == "val" and not find_file(root, members):
        raise EmptySplit(f"{name}: {members}, its validation split, is not in --data-dir {root}")
    wanted = _ids(_file(name, root, members))
    if len(wanted) >= WHOLE[split]:
        raise UserError(f"{name} ({split}): {members} names {len(wanted):,} clips, all of Something-Something v2 "
                        f"and not its long tail; the long tail's list is at {LISTS}")
    annotations, classes, files = {}, {}, [_file(name, root, *names) for names in labels]
    for file in files:
        with text.expected_layout(f"{name}: {file}"):
            for row in (r for r in text.read_json(file) if str(r["id"]) in wanted):
                clip, said = (str(row["id"]), None, None), text.words(row["label"])
                if annotations.setdefault(clip, said) != said:
                    raise ValueError(f"clip {clip[0]} is there twice, with two labels")
                classes[clip] = row["template"].replace("[", "").replace("]", "")
    where = " or ".join(file.name for file in files)
    if not annotations:
        raise UserError(f"{name} ({split}): none of the {len(wanted):,} clips of {members} is in {root / where}")
    data = clips_of(name, split, annotations, options | {"at_rest": "middle"}, root, classes)
    unknown = len(wanted) - len(annotations)
    note = f"{unknown:,} clips of {members} are not in {where}" if unknown else ""
    counted = count_note(name, split, len(data), SETS[name]["splits"][split])
    return dataclasses.replace(data, note=join_notes(data.note, note, counted))


def _file(name, root, *names):
    """The first file with one of these names below a folder. Raises: UserError if there is none."""
    if file := find_file(root, *names):
        return file
    raise UserError(f"{name}: {' or '.join(names)} is not in --data-dir {root}"
                    + (f"; the lists are at {LISTS}" if names[0].endswith(".csv") else ""))


def _ids(file):
    """Ids of the clips in a list with one line per frame: 'original_vido_id video_id frame_id path labels'."""
    header, *lines = text.read_lines(file) or [""]
    if not header.startswith("original_vid"):
        raise UserError(f"{file}: its first line is not the header 'original_vido_id video_id frame_id path labels'")
    if not lines:
        raise UserError(f"{file}: it names no clip")
    return {line.split()[0] for line in lines}
