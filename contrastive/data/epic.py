"""EPIC-KITCHENS-100, multi-instance retrieval: clips of cooking, narrated in a few words, with verb and noun classes.

A clip is a window of a video, P01_01.MP4, a file or a folder of chunks, each named by its first second: 0.MP4, 15.MP4,
... (AVION's). Like AVION it shows the middle frames of T equal segments of the window, in
training with --frame-sampling random a random one of each. The relevancy of a sentence to a clip, 1/2 [same verb +
|N ^ N'| / |N u N'|] with N the set of all noun classes, is that of relevancy/caption_relevancy_*.pkl for the test clips
if that file exists, else computed from the classes.
"""

import ast
import os
from pathlib import Path

from contrastive.data.annotations import Videos, clips_of, files_of, video_folder
from contrastive.data.frames import read_frames
from contrastive.data.table import with_note
from contrastive.engine.processes import opening
from contrastive.engine.ranges import part
from contrastive.evaluation.metrics import class_relevancy, multi_hot

import numpy as np
import torch

VERBS, NOUNS = 97, 300
SECONDS = 15  # of a chunk; the last may be longer
SETS = {"epic-kitchens-100": {
    "splits": {"train": 67_217, "test": 9_668}, "licence": "CC BY-NC 4.0, research only; test = the papers' test",
    "options": {"--caption-relevancy": dict(
        type=part, default=0.0, texts=True,
        help="train on a random sentence whose relevancy to the clip is above this, 0..1; AVION 0.1; 0 = always the "
             "clip's own narration")}}}


def load(name, split, options):
    """Data of one split, one row per clip, with its narration as caption. Columns: verb, noun, nouns, and group (of one
    narration). Data.sentences: the split's sentences, also those of missing videos, with their relevancies."""
    files = files_of(name, options)
    with opening(files):
        clips = read_clips(files, split)
        sentences = Sentences(files, split, clips)
        classes = {"verb": class_names(files, "verb", VERBS), "noun": class_names(files, "noun", NOUNS)}
        found, options = Videos(video_folder(options)), options | {"at_rest": "middle", "read": read_chunks}
        first = {c["video"]: found.index.get(f"{c['video']}.MP4/0.MP4", "") for c in clips}  # chunk, "" = there is none
        videos = {video: os.path.dirname(chunk) or found[video] for video, chunk in first.items()}
        data = clips_of(name, split, clips, options, classes, videos=videos, sentences=sentences)
        there = {*data.keys()}
        sentences.clips = np.array([i for i, c in enumerate(clips) if c["key"] in there])
    return with_note(data, sentences.note)


# ---- annotation files ----
def read_clips(files, split):
    """Rows {key, video, captions, start, end, verb, noun, nouns, group}."""
    out, number = [], {}
    for row in files.csv(f"EPIC_100_retrieval_{split}.csv"):
        said = row["narration"].strip()
        out.append({"key": row["narration_id"], "video": row["video_id"], "captions": [said],
                    "group": number.setdefault(said, len(number)), "start": seconds(row["start_timestamp"]),
                    "end": seconds(row["stop_timestamp"]), "verb": int(row["verb_class"]),
                    "noun": int(row["noun_class"]), "nouns": sorted({*ast.literal_eval(row["all_noun_classes"])})})
    return out


def seconds(stamp):
    """'00:01:02.50' -> 62.5."""
    return sum(float(x) * unit for x, unit in zip(stamp.split(":"), (3600, 60, 1), strict=True))


def class_names(files, kind, n):
    """The names of EPIC_100_verb_classes.csv (or noun), wherever it is below the folder; else their numbers."""
    names, file = [str(i) for i in range(n)], f"EPIC_100_{kind}_classes.csv"
    for row in files.csv(file) if files.has(file) else ():
        names[int(row["id"])] = row["key"]
    return names


# ---- sentences and relevancies ----
class Sentences:
    """The sentences that multi-instance retrieval ranks: for each clip named in *_sentence.csv its own narration, like
    AVION, since JPoSE, which wrote that file, gives some rare actions the words of another. clips (M,): the csv row of
    each row of the data."""

    def __init__(self, files, split, clips):
        row, stem = {c["key"]: c for c in clips}, f"EPIC_100_retrieval_{split}"
        ids = [next(iter(line.values())) for line in files.csv(f"{stem}_sentence.csv")]  # the first column, any name
        said = [row[i] for i in ids]
        self.texts, self.verbs = [c["captions"][0] for c in said], torch.tensor([c["verb"] for c in said])  # (C,) each
        self.nouns = multi_hot([c["nouns"] for c in said], NOUNS)  # (C, NOUNS)
        self.clip_verbs, self.clip_nouns = [c["verb"] for c in clips], [c["nouns"] for c in clips]
        self.clips, self.of_file, source = np.arange(len(clips)), None, "the classes"
        pickle = f"relevancy/caption_relevancy_{stem}.pkl"
        if split == "test" and files.has(pickle):
            self.of_file, source = np.asarray(files.pickle(pickle)), files.last  # (clips, C)
            if self.of_file.shape != (len(clips), len(ids)):
                raise ValueError(f"it holds {self.of_file.shape}, expected {(len(clips), len(ids))} relevancies")
        self.note = f"{len(ids):,} sentences, relevancies from {source}"

    def by_classes(self, rows, dtype=torch.float32):
        """(len(rows), C) relevancies of these csv rows, computed from the classes."""
        verbs, nouns = ([x[i] for i in rows] for x in (self.clip_verbs, self.clip_nouns))
        return class_relevancy(verbs, multi_hot(nouns, NOUNS), self.verbs, self.nouns, dtype)

    def relevancy(self, rows):
        """(len(rows), C) float32 relevancies of these rows of the data, from the file if there is one."""
        rows = self.clips[rows]
        if self.of_file is None:
            return self.by_classes(rows)
        return torch.from_numpy(self.of_file[rows].astype(np.float32))

    def draw(self, row, above, u):
        """A text drawn uniformly (by u in 0..1) from those with relevancy > above to this row of the data, or None."""
        relevancy = self.by_classes([self.clips[row]], torch.float64)[0]  # (C,); in float64, 0.1 is not above 0.1
        good = (relevancy > above).nonzero()[:, 0]
        return self.texts[good[int(u * len(good))]] if len(good) else None


# ---- videos, whole or in chunks ----
def read_chunks(source, n, start, end, sampling, draws=None, short=0):
    """As read_frames, also from a folder of chunks; a window past the last ends there. Raises: ValueError if one of
    the chunks is missing."""
    if not os.path.isdir(source):
        return read_frames(source, n, start, end, sampling, draws, short)
    chunks = {int(file.stem): file for file in Path(source).glob("*.MP4")}  # {first second: path}
    firsts = np.array(sorted(chunks))
    last = firsts[-1]
    if end > last:
        import av
        with av.open(chunks[last]) as container:
            stream = container.streams.video[0]
            end = max(start, min(end, last + float(stream.duration * stream.time_base)))
    if sampling == "uniform":
        at = np.linspace(start, end, n)  # (n,) seconds of the whole video
    else:
        part = 0.5 if sampling == "middle" else np.asarray(draws)[:n]
        at = start + (np.arange(n) + part) / n * (end - start)  # (n,)
    own = firsts[np.searchsorted(firsts, at, side="right") - 1]  # (n,) the first second of the chunk of each
    frames = []
    for first in np.unique(own):
        inside = at[own == first] - first  # seconds of the chunk
        if inside[-1] > SECONDS + 0.5 and first != last:
            raise ValueError(f"no chunk of {source} has second {first + inside[-1]:g}")
        # start a second early: the frame shown at a given time began before it
        frames.append(read_frames(chunks[first], len(inside), max(0.0, inside[0] - 1), None, "at", inside, short))
    return np.concatenate(frames)
