"""The texts of a batch: captions and their other views, paraphrases, further captions of training clips."""

import itertools
from pathlib import Path

from contrastive.data.table import with_captions, with_note
from contrastive.data.views import key_hash
from contrastive.engine.processes import UserError, opening

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


def text_pair(captions, u, paraphrases=None, templates=(), drop=0.1, swap=0.1, second=True):
    """Pick T and its other view T~ for a batch.

    Args: captions: B lists of str; u (B, 32) draws; paraphrases: a Paraphrases or None; templates: formats such as
        "a drawing of {}". T~ is a paraphrase from the file, else a template around any caption, else another caption,
        else word dropout and swap.
    Returns: two lists of B str (the second is empty when `second` is False).
    """
    first = [c[int(r[0] * len(c))] for c, r in zip(captions, u)]
    if not second:
        return first, []
    known = paraphrases.get(first) if paraphrases else [[]] * len(first)
    other = []
    for text, options, all_captions, r in zip(first, known, captions, u):
        if not options and templates:
            options = [t.format(c) for c in all_captions for t in templates]
        if not options:
            options = [c for c in all_captions if c != text]
        other.append(options[int(r[1] * len(options))] if options else drop_and_swap(text, r[2:], drop, swap))
    return first, other


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
        wanted = np.array([key_hash(c) for c in captions], dtype=np.int64)
        at = np.searchsorted(self.hashes, wanted).clip(max=len(self.hashes) - 1)
        found = self.hashes[at] == wanted
        lists = self.table[self.order[at]]["paraphrases"]
        return [[p for p in texts or () if p] if ok else [] for texts, ok in zip(lists, found)]


def add_captions(data, file):
    """The data with additional captions from a file with columns video (or image), caption, and start, end for windows
    (tools/caption.py writes such a file). Rows of the file that match no row of the data are counted.

    A clip is matched by its window and its file name without extension; if two files share a name, by their folders
    too. All rows of the clip get the caption. A question that served as the caption is replaced.
    Raises: UserError if nothing matches, and for data without files of their own."""
    from contrastive.data.own import listed
    if data.streamed or data.sources is None:
        raise UserError(f"--extra-captions {file}: {data.name} has no files of its own to which captions could belong")
    rows, captions, new, lost = {}, list(data.column("captions")), 0, []
    asked = data.column("question") or [None] * len(data)
    for i, source in enumerate(data.sources["source"][:]):
        inside = source.get("size") is not None or source.get("bytes") or not source.get("path")
        path = Path(data.key(i) if inside else source["path"]).with_suffix("")
        rows.setdefault((path.name, source.get("start"), source.get("end")), []).append((i, path.parts))
    extra = listed(f"--extra-captions {file}", file)
    for name, start, end, texts in extra:
        path = Path(name)
        found = rows.get((path.stem, start, end)) or rows.get((path.name, start, end)) or []
        if len({own for _, own in found}) > 1:  # a.mp4 in two folders
            whole = path.with_suffix("").parts
            found = [(i, own) for i, own in found if own[-len(whole):] == whole]
        for i, _ in found:
            more = [t for t in texts if t not in captions[i]]
            kept = [] if more and captions[i] == [asked[i]] else captions[i]
            captions[i], new = [*kept, *more], new + len(more)
        lost += [] if found else [name]
    if len(lost) == len(extra):
        raise UserError(f"--extra-captions {file}: none of its {len(extra):,} rows matches a clip of {data.name} "
                        f"(train), first {lost[0]}; names and windows (start, end) must agree")
    note = f"{new:,} captions added from {Path(file).name}"
    note += f", {len(lost):,} of its rows match no training clip, first {lost[0]}" if lost else ""
    return with_note(with_captions(data, captions), note)
