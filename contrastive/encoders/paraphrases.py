"""TeMo's texts T and T~ of a batch: a caption of each example, and its paraphrase."""

import itertools

from contrastive.data.views import key_hash, pick
from contrastive.engine.processes import opening

import numpy as np

LOOKED_AT = 20_000  # training captions that are checked for the banner


def drop_and_swap(text, u, drop=0.1, swap=0.1):
    """Word dropout and one swap of neighbours, from draws u (>= 16,): a poor man's paraphrase. Never an empty text."""
    words = text.split()
    kept = [w for i, w in enumerate(words) if u[2 + i % (len(u) - 2)] >= drop] or words[:1]
    if len(kept) > 1 and u[0] < swap * len(kept):
        i = int(u[1] * (len(kept) - 1))
        kept[i], kept[i + 1] = kept[i + 1], kept[i]
    return " ".join(kept)


def text_pair(captions, u, paraphrases=None, templates=(), second=True, anchor=True):
    """Pick T and its other view T~ for a batch.

    Args: captions: B lists of str; u (B, 32) draws; paraphrases: a Paraphrases or None; templates: formats such as
        "a drawing of {}"; anchor: T is drawn from the caption and its paraphrases, else it is the caption. T~ is a
        paraphrase from the file, else a template around any caption, else another caption, else word dropout and swap.
    Returns: two lists of B str (the second is empty when `second` is False).
    """
    first = pick(captions, u)
    if not second:
        return first, []
    known = paraphrases.get(first) if paraphrases else [[]] * len(first)
    texts, other = [], []
    for text, found, all_captions, r in zip(first, known, captions, u):
        texts.append([text, *found][int(r[2] * (1 + len(found)))] if anchor else text)
        options = found or [t.format(c) for c in all_captions for t in templates]
        options = options or [c for c in all_captions if c != text]
        other.append(options[int(r[1] * len(options))] if options else drop_and_swap(text, r[2:]))
    return texts, other


class Paraphrases:
    """Paraphrases by caption, from a JSON-lines file of {"caption": str, "paraphrases": [str, ...]}, memory-mapped.

    `get(captions)` returns one list per caption ([] if the file has none for it). Memory: 16 bytes per caption."""

    def __init__(self, path):
        import datasets
        with opening(f"--paraphrases {path}"):
            self.table = datasets.load_dataset("json", data_files=str(path), split="train")
            hashes = np.array([key_hash(k) for k in self.table["caption"][:]], dtype=np.int64)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]

    def __len__(self):
        return len(self.hashes)

    def get(self, captions):
        wanted = np.array([key_hash(c) for c in captions], dtype=np.int64)
        at = np.searchsorted(self.hashes, wanted).clip(max=len(self.hashes) - 1)
        found = self.hashes[at] == wanted
        lists = self.table[self.order[at]]["paraphrases"]
        return [[p for p in texts or () if p] if ok else [] for texts, ok in zip(lists, found)]


def text_words(train, paraphrases, anchor, recipe):
    """The sources of T and T~, for the banner, with a warning if paraphrases are lacking.

    Args: train: Data; paraphrases: a Paraphrases or None; anchor: as in text_pair; recipe: its remark."""
    other = "templates around the captions" if train.templates else "another caption, else word dropout and swap"
    if not paraphrases:
        warning = "WARNING: NOT THE PAPER'S T~, paraphrases by PEGASUS (tools/paraphrase.py, --paraphrases FILE); "
        return warning * recipe.startswith("paper") + f"T is the caption, T~ {other}"
    note = f"T is the caption{' or a paraphrase' * anchor}, T~ a paraphrase, of {len(paraphrases):,} captions"
    if train.streamed:
        return f"{note}; not checked in a stream: for a caption without one {other}"
    some = list(itertools.islice(train.first_captions(LOOKED_AT), LOOKED_AT))
    missing = sum(not p for p in paraphrases.get(some))
    return f"WARNING: {note}; {missing:,} of the first {len(some):,} have none: for these {other}" if missing else note
