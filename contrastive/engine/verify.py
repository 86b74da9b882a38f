"""Checks a data set before training: fingerprints, images that are in two splits, and a strict reading of every file.

    python -m tools.check --dataset photos/            # reads every image strictly and lists what cannot be read
"""

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

import common

import numpy as np

from contrastive.engine import base
from contrastive.engine.base import UserError, rank, say, world
from contrastive.readers.pictures import read_file

MOST = 200_000  # rows; in larger sets the sizes of single files are not looked up
SAMPLE, STRETCH = 1_000_000, 1000  # rows of a larger set that a fingerprint reads, and rows in a run, to spare disks


def sizes(data):
    """(M,) bytes of each example's file, -1 if unknown or too slow to look up."""
    if data.sources is None or len(data) > MOST:
        return np.full(len(data), -1)
    import pyarrow.compute as pc
    column, rows = data.sources.data.column("source"), data.sources._indices  # no byte of an image is read or copied
    fields = {f.name for f in column.type}
    out = np.full(len(column), -1)
    if "size" in fields:  # inside a tar
        out = pc.fill_null(pc.struct_field(column, "size"), -1).to_numpy()
    elif "bytes" in fields:
        out = pc.fill_null(pc.binary_length(pc.struct_field(column, "bytes")), -1).to_numpy()
    out = out.astype(np.int64)[slice(None) if rows is None else rows.column(0).to_numpy()]  # (M,)
    if "path" in fields and "size" not in fields:
        for i in np.flatnonzero(out < 0):
            path = data.sources[int(i)]["source"]["path"] if data.sources[int(i)]["source"] else None
            if path and os.path.isfile(path):
                out[i] = os.path.getsize(path)
    return out


def fingerprint(data, sample=None):
    """{"examples": M, "digest": hash of keys and sizes, "captions": hash of captions} of a split, to compare later. Of
    more than `sample` rows (default SAMPLE) it reads an evenly spread sample: {"sample": its size, ...}."""
    digest, words, found = hashlib.sha256(), hashlib.sha256(), {"examples": len(data)}
    sample = sample or SAMPLE
    if len(data) > sample:  # 136 million captions would take most of an hour, while all processes wait
        starts = np.linspace(0, len(data) - STRETCH, sample // STRETCH).astype(np.int64)
        data = data.select((starts[:, None] + np.arange(STRETCH)).ravel())
        found["sample"] = sample
    for key in data.keys():
        digest.update(key.encode("utf8", "replace") + b"\0")
    digest.update(np.ascontiguousarray(sizes(data), dtype=np.int64).tobytes())
    for batch in data.texts.select_columns("captions").iter(10_000):
        words.update(json.dumps(batch["captions"]).encode())
    return found | {"digest": digest.hexdigest()[:16], "captions": words.hexdigest()[:16]}


def changes(saved, splits):
    """The differences between saved fingerprints {split: {...}} and these splits {split: Data}: a list of lines."""
    lines = []
    for split, data in splits.items():
        was = saved.get(split)
        if was and was["examples"] != len(data):
            lines.append(f"{split}: {was['examples']:,} examples, now {len(data):,}")
            continue
        now = fingerprint(data, was.get("sample", len(data))) if was else {}  # made as the saved one was
        if not was or all(was[k] == now.get(k) for k in was):  # a run of an older version saved fewer entries
            continue
        same = f"{len(data):,} examples as before"
        if was["digest"] != now["digest"]:
            lines.append(f"{split}: {same}, but other names or sizes")
        else:
            lines.append(f"{split}: {same}, but other captions")
    return lines


def since_training(run, key, data):
    """Warns of changes of a split since a run was trained, found by the fingerprints in its folder. Returns them as a
    list of lines. key: the run's name of the split."""
    lines, path = [], Path(run) / "data.json"
    try:
        lines = changes(base.read_json(path, {}), {key: data})
    except (UserError, TypeError, KeyError) as error:
        say(f"WARNING: {path} is damaged ({base.first_line(error)}): it is not known whether the data changed")
    for line in lines:
        say(f"WARNING: the data have changed since the run was trained: {line}; the numbers are not "
            "comparable")
    return lines


def verify(folder, train, evals, limit, resumed=""):
    """(train, evals, {split: {key: reason}}): the data without the images that a strict reader refuses, and those.

    A resumed run leaves out the same images as before (unreadable.json). Collective.
    Args: evals: {name: {split: Data}}.   limit: --max-bad-fraction.   Raises: UserError if there are more."""
    if train.streamed:
        raise UserError("--verify-images: a stream cannot be read before training; leave out one of the two")
    places = [("", "train", train)] + [(name, split, data) for name, of in evals.items() for split, data in of.items()]
    known = base.on_main(base.read_json, folder / "unreadable.json") if resumed else None
    found = known or {f"{name} {split}".strip(): unreadable(data) for name, split, data in places}
    bad = {key: why for part in found.values() for key, why in part.items()}
    total, lost = sum(len(data) for *_, data in places), sum(map(len, found.values()))
    if known is None and rank() == 0:
        common.list_bad_samples(folder, bad)
    if lost > limit * total:
        key, why = next(iter(bad.items()))
        raise UserError(f"--verify-images: {lost:,} of {total:,} images cannot be read, above --max-bad-fraction "
                        f"{limit}; the first: {key}: {why} (all in {folder}/bad_samples.txt); mend them, or raise the "
                        "limit")
    if known is None and rank() == 0:
        base.write_json(folder / "unreadable.json", found)
    kept = {name: {split: leave_out(data, found.get(f"{name} {split}")) for split, data in of.items()}
            for name, of in evals.items()}
    return leave_out(train, found.get("train")), kept, found


def leave_out(data, keys):
    """The data without the unreadable examples with these keys; the note counts them."""
    left = [i for i, key in enumerate(data.keys()) if key not in (keys or ())]
    if len(left) == len(data):
        return data
    lost = f"{len(data) - len(left):,} that cannot be read left out"
    return dataclasses.replace(data.select(left), note=base.join_notes(data.note, lost))


def compare(folder, train, evals, resumed="", files=None):
    """A text for the banner on examples of the evaluation {name: {split: Data}} that are in train as well.

    The fingerprints are kept in folder/data.json. A resumed run warns of changes and refuses changed training data with
    a UserError, or another value or file of the flags {flag: value} that training reads."""
    splits = {"train": train} | {f"{name} {s}": data for name, of in evals.items() for s, data in of.items()}
    splits = {s: data for s, data in splits.items() if not data.streamed}
    saved = base.read_json(folder / "data.json", {}) if resumed else {}
    for line in changes(saved, splits):
        if line.startswith("train:"):
            raise UserError(f"--resume {resumed}: the training data have changed ({line}); start a "
                            "new run")
        say(f"WARNING: the data have changed since this run began: {line}")
    sums = {flag: base.checksum(v) if Path(v).is_file() else v for flag, v in (files or {}).items()}
    for flag, digest in sums.items():
        if saved and flag not in saved:
            say(f"WARNING: it is not known whether {flag} {files[flag]} is that of before: {resumed} did not note it")
        if saved.get(flag, digest) != digest:
            raise UserError(f"--resume {resumed}: {flag} {files[flag]}: not that of before, or its content has "
                            "changed; put it back, or start a new run")
    if not saved:
        prints = {s: fingerprint(data) for s, data in splits.items()}
        for s, of in prints.items():
            if "sample" in of:
                say(f"{s}: a resumed run will compare {of['sample']:,} of its {of['examples']:,} examples, and "
                    "their number")
        base.write_json(folder / "data.json", prints | sums)
    words = []
    for s, data in splits.items():
        found = twins(train, data) if s != "train" and not train.streamed else 0
        if found or found is None:
            words.append(f"{s}: {twin_words(found, data)}")
    return "; ".join(words)


def content(data, i):
    """The bytes of example i, for comparison; b"" if they cannot be read."""
    if data.pixels is not None:
        return data.pixels[i].numpy().tobytes()
    source = data.sources[int(i)]["source"]
    try:
        if source is None or source.get("start") is not None:
            return b""  # windows of one video are not twins
        if source.get("bytes"):
            return source["bytes"]
        if source.get("size") is None:
            return read_file(source["path"])
        return common.part_of(source["path"], source["offset"], source["size"])
    except (OSError, ValueError):
        return b""


def twin_words(found, data):
    """What `twins` found of the images of a split, in words."""
    if found is None:
        return f"its images are not compared with those of train, since one of the two has more than {MOST:,}"
    return f"{found:,} of {len(data):,} images are in train as well"


def twins(data, other):
    """How many examples of `other` have the same bytes as an example of `data`; None if it would take too long."""
    if max(len(data), len(other)) > MOST:
        return None
    mine, theirs = sizes(data), sizes(other)
    if data.pixels is not None:  # all have the same size
        mine, theirs = np.zeros(len(data)), np.zeros(len(other))
    shared = np.intersect1d(mine[mine >= 0], theirs[theirs >= 0])
    rows, others = (np.flatnonzero(np.isin(s, shared)) for s in (mine, theirs))
    known = {hashlib.sha256(content(data, i)).digest() for i in rows} - {hashlib.sha256(b"").digest()}
    return sum(hashlib.sha256(content(other, i)).digest() in known for i in others)


def unreadable(data):
    """{key: reason} of the examples that a strict reader refuses, in order; each process reads its share. Collective.

    Every fast decoder accepts a truncated JPEG that has its end marker, and fills the missing pixels with grey. Only
    libjpeg warns, on stderr."""
    from tqdm import tqdm
    bad, mine = {}, range(rank(), len(data), world())
    for i in tqdm(mine, desc=f"reading {data.name} ({data.split})", disable=rank() > 0):
        try:
            with tempfile.TemporaryFile() as file:
                with base.stderr_to(file):
                    data.read(i)
                file.seek(0)
                said = re.search(b"^(Corrupt|Premature|Invalid|Inconsistent).*", file.read(), re.MULTILINE)
            if said and data.clip is None:
                bad[data.key(i)] = said[0].decode("utf8", "replace")
        except Exception as error:  # whatever the decoder says
            bad[data.key(i)] = base.first_line(error)
    bad = {key: why for part in base.gather_objects(bad) for key, why in part.items()}
    return {key: bad[key] for key in data.keys() if key in bad}
