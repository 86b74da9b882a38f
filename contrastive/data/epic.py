"""EPIC-KITCHENS-100, multi-instance retrieval: clips of cooking, narrated in a few words, with
classes of verbs and nouns.

A clip is a window of a video, P01_01.MP4. Like AVION it shows the middle frames of T equal segments
of the window, in training with --frame-sampling random a random one of each.

The relevancy of a sentence to a clip is 1/2 [same verb + |N ^ N'| / |N u N'|] with N the set of all
noun classes. For the test clips it is that of relevancy/caption_relevancy_*.pkl if that file
exists.
"""

import ast

from contrastive.core.processes import opening
from contrastive.data.annotations import clips_of, files_of
from contrastive.data.clips import clip_options
from contrastive.data.table import with_note

import numpy as np
import torch

NUM_VERBS = 97
NUM_NOUNS = 300


def load(name, split, options):
    """Data of one split, a row for each clip with its narration as caption.

    Columns: verb, noun, nouns, and group (of one narration). Data.sentences are the sentences of
    the split, also those of missing videos, with their relevancies.
    """
    files = files_of(name, options)
    with opening(files):
        rows = read_clips(files, split)
        sentences = Sentences(files, split, rows)
        classes = {"verb": read_class_names(files, "verb", NUM_VERBS),
                   "noun": read_class_names(files, "noun", NUM_NOUNS)}
        clip = clip_options(options, eval_sampling="middle")
        data = clips_of(
            name, split, rows, options, classes=classes, clip=clip, sentences=sentences)
        sentences.set_clips(rows, data)
    return with_note(data, sentences.note)


# ---- annotation files ----
def read_clips(files, split):
    """Rows of key, video, captions, start, end, verb, noun, nouns and group."""
    rows = []
    groups = {}  # {narration: number}
    for row in files.csv(f"EPIC_100_retrieval_{split}.csv"):
        narration = row["narration"].strip()
        group = groups.setdefault(narration, len(groups))
        nouns = set(ast.literal_eval(row["all_noun_classes"]))
        rows.append({
            "key": row["narration_id"],
            "video": row["video_id"],
            "captions": [narration],
            "group": group,
            "start": seconds_of(row["start_timestamp"]),
            "end": seconds_of(row["stop_timestamp"]),
            "verb": int(row["verb_class"]),
            "noun": int(row["noun_class"]),
            "nouns": sorted(nouns)})
    return rows


def seconds_of(timestamp):
    """'00:01:02.50' -> 62.5."""
    hours, minutes, seconds = timestamp.split(":")
    return float(hours) * 3600 + float(minutes) * 60 + float(seconds)


def read_class_names(files, kind, num_classes):
    """The names of EPIC_100_verb_classes.csv (or noun), wherever it is below the folder; else their
    numbers."""
    names = [str(number) for number in range(num_classes)]
    file = f"EPIC_100_{kind}_classes.csv"
    if files.has(file):
        for row in files.csv(file):
            names[int(row["id"])] = row["key"]
    return names


# ---- sentences and relevancies ----
class Sentences:
    """The C sentences that multi-instance retrieval ranks.

    For each clip named in *_sentence.csv it is the clip's own narration, like AVION, since JPoSE,
    which wrote that file, gives some rare actions the words of another.

    Args:
        files: Files.
        rows: of all clips, from read_clips.
    """

    def __init__(self, files, split, rows):
        stem = f"EPIC_100_retrieval_{split}"
        row_of_key = {row["key"]: row for row in rows}
        sentences = []
        for line in files.csv(f"{stem}_sentence.csv"):
            key = next(iter(line.values()))  # the first column, whatever its name
            sentences.append(row_of_key[key])
        self.texts = [row["captions"][0] for row in sentences]
        self.verbs = torch.tensor([row["verb"] for row in sentences])           # (C,)
        self.nouns = multi_hot([row["nouns"] for row in sentences], NUM_NOUNS)  # (C, NUM_NOUNS)
        self.clip_verbs = [row["verb"] for row in rows]
        self.clip_nouns = [row["nouns"] for row in rows]
        self.clips = np.arange(len(rows))  # (M,) number in `rows` of each row of the data
        self.file_relevancies = None  # (clips, C)
        source = "the classes"
        pickle = f"relevancy/caption_relevancy_{stem}.pkl"
        if split == "test" and files.has(pickle):
            self.file_relevancies = np.asarray(files.pickle(pickle))
            source = files.last
            shape = self.file_relevancies.shape
            expected = (len(rows), len(sentences))
            if shape != expected:
                raise ValueError(f"it holds {shape}, expected {expected} relevancies")
        self.note = f"{len(sentences):,} sentences, relevancies from {source}"

    def set_clips(self, rows, data):
        """Tells which of the rows the data have, in their order."""
        keys = set(data.keys())
        clips = [number for number, row in enumerate(rows) if row["key"] in keys]
        self.clips = np.array(clips)

    def class_relevancies(self, clips, dtype=torch.float32):
        """(len(clips), C) relevancies to these clips, by their numbers, from the classes."""
        verbs = [self.clip_verbs[clip] for clip in clips]
        nouns = multi_hot([self.clip_nouns[clip] for clip in clips], NUM_NOUNS)
        return class_relevancy(verbs, nouns, self.verbs, self.nouns, dtype)

    def relevancy(self, rows):
        """(len(rows), C) float32 relevancies to these rows of the data, from the file if there is
        one."""
        clips = self.clips[rows]
        if self.file_relevancies is None:
            return self.class_relevancies(clips)
        return torch.from_numpy(self.file_relevancies[clips].astype(np.float32))

    def draw(self, row, threshold, u):
        """A text drawn uniformly, by u in 0..1, from those with a relevancy above the threshold to
        this row of the data; None if there is none."""
        # In float64, since 0.1 is not above 0.1.
        relevancy = self.class_relevancies([self.clips[row]], torch.float64)[0]     # (C,)
        relevant = (relevancy > threshold).nonzero()[:, 0]
        if not len(relevant):
            return None
        return self.texts[relevant[int(u * len(relevant))]]


def class_relevancy(verbs, nouns, other_verbs, other_nouns, dtype=torch.float32):
    """Relevancies as in EPIC-KITCHENS-100: 1/2 [verbs equal + |N ^ N'| / |N u N'|].

    Args:
        verbs, other_verbs: (R,) and (C,) class numbers.
        nouns, other_nouns: (R, K) and (C, K) sets of nouns, N and N', from multi_hot; at least one
            noun in a row.
        dtype: of the result; float64 if 0.1 must not be rounded to above 0.1.
    Returns: (R, C).
    """
    verbs = torch.as_tensor(verbs)
    other_verbs = torch.as_tensor(other_verbs)
    chunks = []
    for verb, noun in zip(verbs.split(1024), nouns.split(1024)):
        common = noun @ other_nouns.T                                           # (c, C), counts
        union = noun.sum(1, keepdim=True) + other_nouns.sum(1) - common         # (c, C)
        same_verb = (verb[:, None] == other_verbs).to(dtype)                    # (c, C)
        chunks.append((same_verb + common.to(dtype) / union.to(dtype)) / 2)
    return torch.cat(chunks)


def multi_hot(lists, num_classes):
    """(len(lists), num_classes) float32: 1 where the class number is in the list."""
    result = torch.zeros(len(lists), num_classes)
    for row, numbers in enumerate(lists):
        result[row, list(numbers)] = 1
    return result

