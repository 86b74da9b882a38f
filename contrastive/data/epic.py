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
from pathlib import Path

from contrastive.data.annotations import clips_of, count_note, files_of, video_folder, video_index
from contrastive.data.clips import Clips, clip_options
from contrastive.data.frames import duration, read_frames
from contrastive.data.table import with_note
from contrastive.engine.processes import UserError, say
from contrastive.engine.ranges import part
from contrastive.evaluation.metrics import class_relevancy, multi_hot

import numpy as np
import torch

VERBS, NOUNS = 97, 300
SETS = {"epic-kitchens-100": {
    "splits": {"train": 67_217, "test": 9_668}, "licence": "CC BY-NC 4.0, research only; test = the papers' test",
    "options": {"--caption-relevancy": dict(
        type=part, default=0.0, texts=True,
        help="train on a random sentence whose relevancy to the clip is above this, 0..1; AVION 0.1; 0 = always the "
             "clip's own narration")}}}


def load(name, split, options):
    """Data of one split, one row per clip, with its narration as caption. Columns: verb, noun, nouns, and group (clips
    with the same narration are positives of each other). Data.sentences: the split's sentences with their relevancies.

    Clips whose video is missing are left out and counted; their sentences are still ranked."""
    files = files_of(name, options)
    if options.get("feature_dir"):
        raise UserError(f"{name}: several windows of one video, but --feature-dir has only one file per video")
    with files.border():
        clips = read_clips(files, split)
        sentences = Sentences(files, split, clips)
        names = {"verb": class_names(files, "verb", VERBS), "noun": class_names(files, "noun", NOUNS)}
        places = _Known(_places(str(video_folder(options))))
        sentences.clips = np.array([i for i, c in enumerate(clips) if places[c["video"]]])
        data = clips_of(name, split, clips, options, classes=names, clip=clip_options(options, Chunks), videos=places,
                        sentences=sentences)
    return with_note(data, sentences.note, count_note(name, split, len(data), SETS[name]["splits"][split]))


class _Known(dict):
    """{video: path}; None for any other."""

    def __missing__(self, name):
        return None


# ---- annotation files ----
def read_clips(files, split):
    """Rows {key, video, captions, start, end, verb, noun, nouns, group}. Columns are found by name, since some copies
    begin with uid."""
    out, number = [], {}
    for row in files.csv(f"EPIC_100_retrieval_{split}.csv"):
        noun, said = int(row["noun_class"]), row["narration"].strip()
        out.append({"key": row["narration_id"], "video": row["video_id"], "captions": [said],
                    "group": number.setdefault(said, len(number)), "start": seconds(row["start_timestamp"]),
                    "end": seconds(row["stop_timestamp"]),
                    "verb": int(row["verb_class"]), "noun": noun,
                    "nouns": sorted({*map(int, ast.literal_eval(row["all_noun_classes"]))}) or [noun]})
    return out


def seconds(stamp):
    """'00:01:02.50' -> 62.5."""
    hours, minutes, rest = stamp.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)


def class_names(files, kind, n):
    """Class names from EPIC_100_verb_classes.csv (or noun), wherever it is below the folder; else their numbers."""
    names, patterns = [str(i) for i in range(n)], (f"EPIC_100_{kind}_classes*.csv", f"{kind}_classes.csv")
    for row in files.csv(*patterns) if files.has(*patterns) else ():
        number, word = row.get("id") or row.get(f"{kind}_id"), row.get("key") or row.get("class_key")
        if int(number) < n and word and word not in names:
            names[int(number)] = word
    return names


# ---- sentences and relevancies ----
class Sentences:
    """The sentences that multi-instance retrieval ranks: for each clip named in *_sentence.csv, its narration.

    JPoSE's code, which wrote that file, gives some sentences of rare actions the words of another action. Like AVION's
    evaluation we take the clip's own narration instead. clips (M,): the csv row of each row of the data."""

    def __init__(self, files, split, clips):
        row, stem = {c["key"]: c for c in clips}, f"EPIC_100_retrieval_{split}"
        ids = [next(iter(line.values())) for line in files.csv(f"{stem}_sentence.csv")]  # the first column, any name
        said = [row[i] for i in ids]
        if len({*ids}) < len(ids) or not ids:
            raise ValueError("it names a clip twice, or none")
        self.texts, self.verbs = [c["captions"][0] for c in said], torch.tensor([c["verb"] for c in said])  # (C,) each
        self.nouns = multi_hot([c["nouns"] for c in said], NOUNS)  # (C, NOUNS)
        self.clip_verbs, self.clip_nouns = [c["verb"] for c in clips], [c["nouns"] for c in clips]
        self.clips, self.file = np.arange(len(clips)), None
        pickle = f"relevancy/caption_relevancy_{stem}.pkl"
        if split == "test" and files.has(pickle):
            matrix = self._of_file = np.asarray(files.pickle(pickle))  # (clips, C)
            self.file = files.last
            if matrix.shape != (len(clips), len(ids)) or not ((matrix >= 0) & (matrix <= 1)).all():
                raise ValueError(f"it holds {matrix.shape}, expected {(len(clips), len(ids))} relevancies in 0..1")
        self.note = f"{len(ids):,} sentences, relevancies from {self.file or 'the classes'}"

    def by_classes(self, rows, dtype=torch.float32):
        """(len(rows), C) relevancies of these csv rows, computed from the classes."""
        verbs, nouns = ([x[i] for i in rows] for x in (self.clip_verbs, self.clip_nouns))
        return class_relevancy(verbs, multi_hot(nouns, NOUNS), self.verbs, self.nouns, dtype)

    def relevancy(self, rows):
        """(len(rows), C) float32 relevancies of these rows of the data, from the file if there is one."""
        rows = self.clips[rows]
        if self.file is None:
            return self.by_classes(rows)
        found, by_classes = torch.from_numpy(self._of_file[rows].astype(np.float32)), self.by_classes(rows)
        other = int(((found - by_classes).abs() > 1e-4).sum())
        if other:
            say(f"WARNING: {self.file.name}: {other:,} of {found.numel():,} relevancies differ from those of the "
                "classes; the file's are used")
        return found

    def draw(self, row, above, u):
        """A text drawn uniformly (by u in 0..1) from those with relevancy > above to this row of the data, or None."""
        relevancy = self.by_classes([self.clips[row]], torch.float64)[0]  # (C,); in float64, 0.1 is not above 0.1
        good = (relevancy > above).nonzero()[:, 0]
        return self.texts[good[int(u * len(good))]] if len(good) else None


# ---- videos, whole or in chunks ----
def _places(folder):
    """{video id: path of the video, or of the folder of its chunks} below a folder."""
    out = {}
    for paths in video_index(folder).values():
        for path in map(Path, paths):
            if path.stem.isdecimal() and re.fullmatch(r"P\d+_\d+(\.\w+)?", path.parent.name):
                out[path.parent.name.split(".")[0]] = str(path.parent)
            else:
                out.setdefault(path.stem, str(path))
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
