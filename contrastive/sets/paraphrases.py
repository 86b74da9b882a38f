"""Paraphrases of captions, from a file that tools/paraphrase.py writes (TeMo's second text)."""

import glob
import itertools

import common

import numpy as np

from contrastive.engine.base import UserError, first_line

LOOKED_AT = 20_000  # training captions that are checked for the banner


class Paraphrases:
    """Paraphrases by caption, from a JSON-lines file of {"caption": str, "paraphrases": [str, ...]}, memory-mapped.

    `get(captions)` returns one list per caption ([] if the file has none for it). Memory: 16 bytes per caption."""

    def __init__(self, path):
        import datasets
        try:
            self.table = datasets.load_dataset("json", data_files=glob.escape(str(path)), split="train")
            keys = self.table["caption"][:]
            of = self.table.features["paraphrases"]
            if getattr(getattr(of, "feature", None), "dtype", "") not in ("string", "null"):
                raise ValueError(f"paraphrases are not lists of texts but {of}")
        except FileNotFoundError as error:
            raise UserError(f"--paraphrases {path}: no such file") from error
        except Exception as error:
            expected = "expected JSON lines with 'caption' and 'paraphrases'"
            raise UserError(f"--paraphrases {path}: {expected} ({first_line(error)})") from error
        hashes = np.array([common.key_hash(k) for k in keys], dtype=np.int64)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]

    def __len__(self):
        return len(self.hashes)

    def note(self, train, other):
        """A line for the banner: their number, and a warning if training captions have none (T~ is then `other`)."""
        note = f"paraphrases of {len(self):,} captions"
        if train.streamed:
            return f"{note}; a stream is not checked for captions without one: for these {other}"
        some = list(itertools.islice(train.first_captions(LOOKED_AT), LOOKED_AT))
        missing = sum(not p for i in range(0, len(some), 1000) for p in self.get(some[i:i + 1000]))
        if not missing:
            return note
        return (f"WARNING: {note}, but {missing:,} of the first {len(some):,} training captions have none: for these "
                f"{other}")

    def get(self, captions):
        wanted = np.array([common.key_hash(c) for c in captions], dtype=np.int64)
        at = np.searchsorted(self.hashes, wanted).clip(max=len(self.hashes) - 1)
        found = self.hashes[at] == wanted
        lists = self.table[self.order[at]]["paraphrases"]
        return [[p for p in texts or () if p] if ok else [] for texts, ok in zip(lists, found)]
