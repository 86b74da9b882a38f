"""EPIC-KITCHENS-100, multi-instance retrieval: clips of cooking, narrated in a few words, with verb and noun classes.

--data-dir holds the published annotations (retrieval_annotations/EPIC_100_retrieval_train.csv and _test.csv, each with
its _sentence.csv). --video-dir holds the videos, whole (P01_01.MP4) or in AVION's chunks: a folder P01_01.MP4 of 0.MP4,
15.MP4, ..., each named by its first second. A clip is a window of a video. The relevancy of a sentence to a clip is
1/2 [same verb + |N ^ N'| / |N u N'|], N = the set of all noun classes. For the test clips it is read from
relevancy/caption_relevancy_*.pkl if that file exists; otherwise, and for training, it is computed from the classes.
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import common

import numpy as np
import torch

from contrastive.engine.base import UserError, join_notes, say
from contrastive.engine.ranges import part
from contrastive.evaluation.metrics import class_relevancy, multi_hot
from contrastive.readers import text
from contrastive.readers.clips import Clips, clip_options
from contrastive.readers.frames import duration, read_frames
from contrastive.readers.videos import ONE_FILE, video_folder, video_index
from contrastive.sets.annotations import check_split, count_note, find_file

VERBS, NOUNS = 97, 300
NEEDED = ("narration_id", "video_id", "start_timestamp", "stop_timestamp", "narration", "verb_class", "noun_class",
          "all_noun_classes")
SETS = {"epic-kitchens-100": {
    "splits": {"train": 67_217, "test": 9_668}, "licence": "CC BY-NC 4.0, research only; test = the papers' test",
    "where": "github.com/epic-kitchens/epic-kitchens-100-annotations, retrieval_annotations/",
    "options": {"--caption-relevancy": dict(
        type=part, default=0.0, texts=True,
        help="train on a random sentence whose relevancy to the clip is above this, 0..1; AVION 0.1; 0 = always the "
             "clip's own narration")}}}


def load(name, split, options):
    """Data of one split, one row per clip, with its narration as caption. Columns: verb, noun, nouns, and group (clips
    with the same narration are positives of each other). Data.sentences: the split's sentences with their relevancies.

    Clips whose video is missing are left out and counted; their sentences are still ranked.
    Raises: UserError that names the missing split, folder or file, or the file with an unexpected layout.
    """
    counts = SETS[name]["splits"]
    check_split(name, split, counts)
    if not options.get("data_dir"):
        needs = "--data-dir (its annotations: EPIC_100_retrieval_train.csv and so on) and --video-dir (its videos)"
        raise UserError(f"--dataset {name} needs {needs}")
    if options.get("feature_dir"):
        raise UserError(f"{name}: {ONE_FILE}")
    root, wanted = Path(options["data_dir"]).expanduser(), f"EPIC_100_retrieval_{split}.csv"
    file = find_file(root, wanted)
    if file is None:
        raise UserError(f"{name} ({split}): no {wanted} in {root}; --data-dir names the folder of the annotation files")
    clips = _read_csv(file)
    sentences = Sentences(file, clips)
    folder = video_folder(options)
    places = _places(str(folder))
    there = [i for i, c in enumerate(clips) if c["video_id"] in places]
    if not there:
        looked = f"none of {len({c['video_id'] for c in clips}):,} videos is below {folder}"
        raise UserError(f"{name} ({split}): {looked} (looked for {clips[0]['video_id']}); --video-dir names the folder "
                        "of the videos")
    sentences.clips = np.array(there)
    kept, number = [clips[i] for i in there], {}
    columns = {column: [c[column] for c in kept] for column in ("verb", "noun", "nouns")}
    columns["video"] = [c["video_id"] for c in kept]
    columns["group"] = [number.setdefault(c["narration"], len(number)) for c in kept]
    sources = [{"path": places[c["video_id"]], "start": c["start"], "end": c["end"]} for c in kept]
    names = {"verb": _names(file, "verb", VERBS), "noun": _names(file, "noun", NOUNS)}
    table = common.make_table([[c["narration"]] for c in kept], [c["id"] for c in kept], sources, names, **columns)
    note = sentences.note
    if lacking := sorted({c["video_id"] for c in clips} - places.keys()):
        lost = f"{len(clips) - len(kept):,} clips of {len(lacking):,} videos are not in {folder}, first {lacking[0]}"
        note = join_notes(lost, note)
    note = join_notes(note, count_note(name, split, len(kept), counts[split]))
    return common.Data(name, split, table, clip=clip_options(options, Chunks), note=note, sentences=sentences)


# ---- sentences and relevancies ----
class Sentences:
    """The sentences that multi-instance retrieval ranks: for each clip named in *_sentence.csv, its narration.

    JPoSE's code, which wrote that file, gives some sentences of rare actions the words of another action. Like AVION's
    evaluation we take the clip's own narration instead. clips (M,): the csv row of each row of the data.
    """

    def __init__(self, file, clips):
        row = {c["id"]: i for i, c in enumerate(clips)}
        self.file = file.with_name(f"{file.stem}_sentence.csv")
        if not self.file.is_file():
            raise UserError(f"{self.file}: not there; it lists the sentences that are ranked")
        lines = [list(line.items()) for _, line in text.csv_rows(self.file)]
        if lines and lines[0][0][0] in row:
            raise UserError(f"{self.file}: its first line is a sentence, {lines[0][0][0]}, not a header")
        ids = [line[0][1] for line in lines]                               # the first column, whatever its name
        unknown, twice = [i for i in ids if i not in row], [i for i, n in Counter(ids).items() if n > 1]
        if unknown or twice or not ids:
            why = f"{twice[0]} is there twice" if twice else "it is empty"
            why = f"{len(unknown):,} of its ids are not in {file.name}, first {unknown[0]}" if unknown else why
            raise UserError(f"{self.file}: {why}; both files must be of the same version")
        said = [clips[row[i]] for i in ids]
        self.texts, self.verbs = [c["narration"] for c in said], torch.tensor([c["verb"] for c in said])  # (C,) each
        self.nouns = multi_hot([c["nouns"] for c in said], NOUNS)  # (C, NOUNS)
        self.clip_verbs, self.clip_nouns = [c["verb"] for c in clips], [c["nouns"] for c in clips]
        self.clips, self.shape = np.arange(len(clips)), (len(clips), len(ids))
        pickle = file.parent / "relevancy" / f"caption_relevancy_{file.stem}.pkl"
        self.pickle = pickle if pickle.is_file() and "test" in file.stem else None
        if self.pickle:
            self._from_file()  # so that a wrong file is reported before training, not after
        self.note = f"{len(ids):,} sentences, relevancies from {self.pickle or 'the classes'}"

    def by_classes(self, rows, dtype=torch.float32):
        """(len(rows), C) relevancies of these csv rows, computed from the classes."""
        verbs, nouns = ([x[i] for i in rows] for x in (self.clip_verbs, self.clip_nouns))
        return class_relevancy(verbs, multi_hot(nouns, NOUNS), self.verbs, self.nouns, dtype)

    def relevancy(self, rows):
        """(len(rows), C) float32 relevancies of these rows of the data, from the pickle if there is one."""
        rows = self.clips[rows]
        if not self.pickle:
            return self.by_classes(rows)
        found, by_classes = torch.from_numpy(self._from_file()[rows].astype(np.float32)), self.by_classes(rows)
        other = int(((found - by_classes).abs() > 1e-4).sum())
        if other:
            say(f"WARNING: {self.pickle.name}: {other:,} of {found.numel():,} relevancies differ from those of the "
                "classes; the file's are used")
        return found

    def _from_file(self):
        """All relevancies of the pickle, (clips, sentences). Raises: UserError if it is of another version."""
        with text.expected_layout(self.pickle):
            matrix = np.asarray(text.load_plain_pickle(self.pickle))
        if matrix.shape != self.shape or matrix.dtype.kind != "f" or not ((matrix >= 0) & (matrix <= 1)).all():
            raise UserError(f"{self.pickle}: holds {matrix.shape} {matrix.dtype}, expected {self.shape} relevancies in "
                            "0..1")
        return matrix

    def draw(self, row, above, u):
        """A text drawn uniformly (by u in 0..1) from those with relevancy > above to this row of the data, or None."""
        relevancy = self.by_classes([self.clips[row]], torch.float64)[0]  # (C,); in float64, 0.1 is not above 0.1
        good = (relevancy > above).nonzero()[:, 0]
        return self.texts[good[int(u * len(good))]] if len(good) else None


# ---- annotation files ----
def _read_csv(file):
    """Rows {id, video_id, start, end, narration, verb, noun, nouns}. Columns are found by name, since some copies begin
    with uid. Raises: UserError that names file and line."""
    out = {}
    for line, row in text.csv_rows(file, NEEDED):
        with text.expected_layout(f"{file}, line {line}"):
            start, end = text.window(seconds(row["start_timestamp"]), seconds(row["stop_timestamp"]))
            found = {"id": row["narration_id"], "video_id": row["video_id"], "narration": row["narration"].strip(),
                     "start": start, "end": end, "verb": text.whole_number(row["verb_class"]),
                     "noun": text.whole_number(row["noun_class"])}
            found["nouns"] = classes(row["all_noun_classes"]) or [found["noun"]]
            if not (0 <= found["verb"] < VERBS and all(0 <= n < NOUNS for n in [*found["nouns"], found["noun"]])):
                raise ValueError(f"verbs are 0..{VERBS - 1}, nouns 0..{NOUNS - 1}")
            if not found["narration"]:
                raise ValueError("no narration")
            if out.setdefault(found["id"], found) is not found:
                raise ValueError(f"{found['id']} is there twice")
    if not out:
        raise UserError(f"{file}: has no rows")
    return list(out.values())


def seconds(stamp):
    """'00:01:02.50' -> 62.5. Raises ValueError."""
    hours, minutes, rest = stamp.split(":")
    parts = text.whole_number(hours) * 3600, text.whole_number(minutes) * 60, text.number(rest)
    if "-" in stamp:
        raise ValueError(f"{stamp[:40]} is before the start")
    return sum(parts)


def classes(listed):
    """'[3, 1, 3]' -> [1, 3]. Raises ValueError."""
    try:
        numbers = ast.literal_eval(listed)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{listed[:40]} is not a list of classes") from error
    if not isinstance(numbers, (list, tuple)):
        raise ValueError(f"{listed[:40]} is not a list of classes")
    return sorted({text.whole_number(n) for n in numbers})


def _names(file, kind, n):
    """Class names from EPIC_100_verb_classes.csv (or noun) beside the csv or one folder above; else their numbers."""
    names = [str(i) for i in range(n)]
    patterns = (f"EPIC_100_{kind}_classes*.csv", f"{kind}_classes.csv")
    found = [f for folder in (file.parent, file.parent.parent) for p in patterns for f in sorted(folder.glob(p))]
    if found:
        for _, row in text.csv_rows(found[0]):
            number = row.get("id") or row.get(f"{kind}_id") or ""
            word = row.get("key") or row.get("class_key") or ""
            if number.isdecimal() and int(number) < n and word and word not in names:
                names[int(number)] = word
    return names


# ---- videos, whole or in chunks ----
def _places(folder):
    """{video id: path of the video, or of the folder of its chunks} below a folder.

    Raises: UserError if two chunks of a folder begin at the same second."""
    out = {}
    for paths in video_index(folder).values():
        for path in map(Path, paths):
            if path.stem.isdecimal() and re.fullmatch(r"P\d+_\d+(\.\w+)?", path.parent.name):
                out[path.parent.name.split(".")[0]] = str(path.parent)
            else:
                out.setdefault(path.stem, str(path))
    for place in (place for place in set(out.values()) if Path(place).is_dir()):
        chunks = _chunks(place)
        for (first, path), (second, other) in zip(chunks, chunks[1:]):
            if first == second:
                raise UserError(f"{place}: {Path(path).name} and {Path(other).name} both begin at second {first}; "
                                "remove one")
    return out


@functools.lru_cache(maxsize=1024)
def _chunks(folder):
    """[(first second, path)] of a folder of chunks, in order."""
    return sorted((int(f.stem), str(f)) for f in Path(folder).iterdir() if f.stem.isdecimal())


class Chunks(Clips):
    """Clips of whole videos or of folders of chunks. Like AVION it takes the middle frames of T equal segments of the
    window; with --frame-sampling random, training takes a random frame of each segment."""
    at_rest = "middle"

    def decode(self, source, n, start, end, sampling, draws):
        """(n, H, W, 3) uint8; a window may span several chunks. Raises: ValueError if a chunk is missing."""
        if not Path(source).is_dir():
            return super().decode(source, n, start, end, sampling, draws)
        chunks = _chunks(str(source))
        firsts = np.array([first for first, _ in chunks])
        if end > firsts[-1]:  # the video may end before the window does
            end = max(start, min(end, firsts[-1] + duration(chunks[-1][1])))
        if sampling == "uniform":
            at = np.linspace(start, end, n)  # (n,) seconds of the whole video
        else:
            part = 0.5 if sampling == "middle" else np.asarray(draws)[:n]
            at = start + (np.arange(n) + part) / n * (end - start)  # (n,)
        number = np.searchsorted(firsts, at, side="right") - 1  # (n,) chunk of each
        frames = []
        for k in np.unique(number):
            first, path = chunks[max(k, 0)]
            own, length = at[number == k] - first, np.diff(firsts).min() if len(firsts) > 1 else np.inf
            if own[0] < 0 or own[-1] > length + 0.5 and k + 1 < len(chunks):
                raise ValueError(f"no chunk of {source} has second {at[number == k].max():g}")
            # start a second early: the frame shown at a given time began before it
            frames.append(read_frames(path, len(own), max(0.0, own[0] - 1), None, "at", own, self.short))
        return np.concatenate(frames)
