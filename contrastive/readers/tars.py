"""Webdataset tars: an index on disk says where each sample lies; it is built once. (--streaming needs none: stream.py.)

A sample is the files of a tar that share a name up to the first dot: 000017.jpg, 000017.txt, 000017.json, 000017.cls.
The index is a table in the cache of `datasets`, so three million captions need no memory. Building it keeps the names
and texts of one tar at a time in memory; tars whose size or time changed are indexed again. Samples after a damaged
range (damage.py) are used, and lost ones are counted: more of them than --max-bad-fraction are refused.
"""

import json
import os
import tarfile

import common

import numpy as np

from contrastive.engine.base import UserError, first_line, join_notes
from contrastive.readers.clips import clip_options
from contrastive.readers.columns import IMAGE_TYPES, VIDEO_TYPES, NoColumn, clean_list, pick_column, quiet_datasets
from contrastive.readers.damage import Front, Losses, expected, not_followed, refuse_compressed

TEXTS = ("txt", "caption", "text", "json", "cls")  # parts that are read while the index is built
FLAGS = ("image_column", "caption_column", "label_column")  # the options that change an index
VERSION = 5  # of the index: the cache compares arguments, not code, so a change of _rows needs a new number
UNUSABLE, REFUSED, LOST = 1, 2, 3  # why a row of the index is not used as a sample; 0 = it is used
LARGE = 10**9  # bytes; from this size of the tars on, building the index is announced and shows a bar


def check_compressed(name, tars):
    """Raises: UserError that names the first tar that cannot be opened or is compressed."""
    for tar in tars:
        try:
            with open(tar, "rb") as file:
                refuse_compressed(file.read(6))
        except (tarfile.TarError, OSError) as error:
            raise _unreadable(name, tar, error) from error


def index(name, split, tars, options):
    """Data of all samples of these tars in their order. Its shards (M,) say which of `tars` each sample lies in. A key
    is the sample's name; if samples of several tars share one, TAR/NAME.

    Args: tars: paths.   options: image_column, caption_column, label_column; for videos also those of clip_options;
        max_bad_fraction: the share of samples that may be lost to damage, default 0.01.
    Raises: UserError if a tar cannot be read, the cache cannot be written, more samples are lost than allowed, or more
        are left out than used.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    files = []  # [path, bytes, time of the last change in ns] of each tar
    for tar in tars:
        try:
            stat = os.stat(tar)
        except OSError as error:
            raise _unreadable(name, tar, error) from error
        files.append([os.path.abspath(tar), stat.st_size, stat.st_mtime_ns])
    flags = {flag: options[flag] for flag in FLAGS if options.get(flag)}
    table = _table(name, tars=json.dumps(files), flags=json.dumps(flags))

    good = np.flatnonzero(table.data.column("fault").to_numpy() == 0)  # (M,) row numbers
    note = _said(name, table, files, options.get("max_bad_fraction", 0.01))
    shards = table.data.column("shard").to_numpy()[good]  # (M,) int32
    video = pc.any(table.data.column("video")).as_py()
    labels = table.data.column("label")
    labelled = labels.null_count < len(table)

    whole, keys = len(good) == len(table), table.data.column("key")
    if pc.count_distinct(keys.take(pa.array(good))).as_py() < len(good):  # every tar counts from 0
        top = os.path.commonpath([os.path.dirname(path) for path, _, _ in files])
        tars = pa.array([os.path.relpath(path, top).removesuffix(".tar") for path, _, _ in files])
        keys = pc.binary_join_element_wise(tars.take(table.data.column("shard").combine_chunks()), keys, "/")
        table = table.remove_columns("key").add_column("key", keys.to_pylist())
    table = table.remove_columns(["left_out", "shard", "video", "label", "fault", "lost"])
    if labelled:
        table = table.add_column("label", pc.fill_null(labels, -1).to_numpy())
    table = table if whole else table.select(good)
    head = table.select_columns("captions")[:100]["captions"]
    class_names = all(len(texts) == 1 and texts[0].startswith("class ") for texts in head)
    note = join_notes(note, "no captions: the classes serve as captions" if class_names else "")
    clip = clip_options(options) if video else None
    data = common.Data(name, split, table, clip=clip, note=note, has_captions=not class_names, shards=shards)
    return common.with_notes(data, 0)


def _said(name, table, files, limit):
    """The note of an index: how many samples were left out, skipped or lost, and the first of each.

    Raises: UserError if more samples are left out than used, or a larger share than `limit` is lost."""
    fault, shard, lost = (table.data.column(c).to_numpy() for c in ("fault", "shard", "lost"))  # (rows,) each
    reasons, number = table.select_columns("left_out"), np.bincount(fault, minlength=4)  # (4,) rows of each kind
    why = {kind: reasons[int(np.argmax(fault == kind))]["left_out"] for kind in (1, 2, 3) if number[kind]}  # the first
    if number[UNUSABLE] > number[0]:
        raise (NoColumn if "has no such column" in why[UNUSABLE] else UserError)(why[UNUSABLE])

    found = np.bincount(shard[fault <= UNUSABLE], minlength=len(files))  # (tars,) samples
    missing = np.bincount(shard, lost, len(files)).astype(int)  # (tars,)
    fewer, known = [], expected([path for path, _, _ in files])
    for k, (path, _, _) in enumerate(files):
        if path in known:
            whole, file = known[path]
            missing[k] = max(0, whole - found[k])
            fewer += [f"{path}: {found[k]:,} of the {whole:,} samples that {file} names"] if missing[k] else []
    first = join_notes(*fewer[:1], why.get(LOST, ""))
    n, of = int(missing.sum()), int(missing.sum() + found.sum())
    if n > limit * of:
        raise UserError(f"--dataset {name}: {n:,} of {of:,} samples are lost in {(missing > 0).sum():,} damaged "
                        f"tars, above --max-bad-fraction {limit}, first: {first}; download these tars again, or "
                        "raise the limit")
    if not number[0]:
        raise UserError(f"--dataset {name}: no sample of the tars can be used, first: {[*why.values()][0]}")
    _, bad, refused, _ = number
    return join_notes(
        f"{bad} samples without an image or a caption left out, first: {why[UNUSABLE]}" if bad else "",
        f"{refused:,} samples with names that are not followed, first: {why[REFUSED]}" if refused else "",
        f"{n:,} of {of:,} samples LOST in damaged tars, first: {first}" if n else
        f"damage in the tars, no sample lost, first: {first}" if first else "")


def _table(name, **arguments):
    """The rows that _rows yields, as a table on disk; taken from the cache of `datasets` if it is there."""
    import datasets
    # lists are passed as strings: `datasets` would split list arguments over processes
    arguments |= {"name": name, "version": VERSION}
    source = {"path": datasets.Value("string"), "offset": datasets.Value("int64"), "size": datasets.Value("int64")}
    features = datasets.Features({
        "source": source, "captions": datasets.List(datasets.Value("string")), "key": datasets.Value("string"),
        "label": datasets.Value("int64"), "shard": datasets.Value("int32"), "video": datasets.Value("bool"),
        "left_out": datasets.Value("string"), "fault": datasets.Value("int8"), "lost": datasets.Value("int32")})
    try:
        with quiet_datasets():
            return datasets.Dataset.from_generator(_rows, features=features, gen_kwargs=arguments)
    except Exception as error:  # `datasets` wraps what _rows raises, once or twice
        reason = error
        while reason.__cause__ and not isinstance(reason, UserError):
            reason = reason.__cause__
        if isinstance(reason, UserError):
            raise reason from None
        if isinstance(reason, OSError):  # of the cache: an OSError of a tar is a UserError by now
            raise UserError(f"--dataset {name}: the index of its tars cannot be written to "
                            f"{datasets.config.HF_DATASETS_CACHE} ({first_line(reason)}); "
                            "HF_DATASETS_CACHE names another folder") from error
        raise UserError(f"--dataset {name}: its tars cannot be indexed ({first_line(reason)})") from error


def _rows(name, tars, flags, version):
    """Rows of the index, tar by tar. One process runs this (and shows the bar) while the others wait."""
    from tqdm import tqdm
    files, flags, empty = json.loads(tars), json.loads(flags), True
    total = sum(size for _, size, _ in files)  # bytes
    if total >= LARGE:
        tqdm.write(f"{name}: building an index of {len(files):,} tars ({total / 1e9:,.1f} GB), only this once")
    bar = tqdm(files, desc="index", unit="tar", disable=total < LARGE)
    for shard, (path, _, _) in enumerate(bar):
        try:
            for row in _rows_of(name, path, flags):
                yield row | {"shard": shard}
                empty = False
        except (tarfile.TarError, OSError) as error:
            raise _unreadable(name, path, error) from error
    if empty:
        raise UserError(f"--dataset {name}: the tars hold no samples")


def _rows_of(name, path, flags):
    """Rows of one tar; the parts of a key need not be adjacent.

    left_out: why a row is not used as a sample, '' if it is. fault: UNUSABLE, REFUSED (a member that is skipped) or
    LOST (to damage; one row for `lost` samples)."""
    empty = {"source": None, "captions": [], "label": None, "video": False, "left_out": "", "fault": 0, "lost": 0}
    with open(path, "rb") as raw:
        samples, refused, losses = {}, {}, Losses()  # key -> {extension: (offset, size)}, {extension: bytes}
        for key, extension, member, data in losses.files(Front(raw, seeks=True), TEXTS.__contains__):
            if why := not_followed(member):
                refused.setdefault(key, why)
            elif member.isreg():
                places, texts = samples.setdefault(key, ({}, {}))
                if extension in places:
                    refused.setdefault(key, f"{member.name} is there twice, the first is used")
                    continue
                places[extension] = member.offset_data, member.size
                if data is not None:
                    texts[extension] = data
        lost, partial = losses.lost()

        for key, (places, texts) in samples.items():
            if key in partial or not places.keys() - set(TEXTS):
                continue  # lost, or a text file without an image

            def read(extension, places=places, texts=texts):
                if extension not in texts:  # a flag names a part that is not in TEXTS
                    raw.seek(places[extension][0])
                    texts[extension] = raw.read(places[extension][1])
                return texts[extension]

            row = empty | {"key": _utf8(key)}
            try:
                (offset, size), captions, label = sample_parts(key, places, read, flags, name)
            except UserError as error:  # no image or no caption
                row |= {"left_out": _utf8(str(error)), "fault": UNUSABLE}
            except ValueError as error:  # a class that is not a number, or broken json
                why = f"--dataset {name}: sample {key} of {path}: {first_line(error)}"
                row |= {"left_out": _utf8(why), "fault": UNUSABLE}
            else:
                row |= {"source": {"path": path, "offset": offset, "size": size}, "label": label,
                        "captions": [_utf8(text) for text in captions],
                        "video": any(places.get(kind) == (offset, size) for kind in VIDEO_TYPES)}
            yield row
        for key, why in refused.items():
            yield empty | {"key": _utf8(key), "left_out": _utf8(f"{path}: {why}"), "fault": REFUSED}
        for keys, n, why in lost:
            said = f"{', '.join(keys[:3])} of {path}: {why}" if keys else f"{path}: {why}"
            yield empty | {"key": _utf8(keys[0] if keys else ""), "left_out": _utf8(said), "fault": LOST, "lost": n}


def sample_parts(key, parts, read, options, name):
    """(image part, captions, label or None) of one sample; parts: {extension: anything}, read(extension) -> bytes.

    Raises: UserError without an image or a caption; ValueError for broken json or a class that is not a number.
    """
    columns = set(parts)
    if "json" in parts and any((options.get(k) or "").startswith("json.") for k in ("caption_column", "label_column")):
        try:
            fields = json.loads(read("json"))
        except RecursionError as error:
            raise ValueError("its json is nested too deeply") from error
        if not isinstance(fields, dict):
            raise ValueError("its json has no fields")
        columns |= {f"json.{field}" for field in fields}
    columns, where = sorted(columns), f"{name}, sample {key},"
    kinds = IMAGE_TYPES + VIDEO_TYPES
    both = [next((c for c in columns if c in of), "") for of in (IMAGE_TYPES, VIDEO_TYPES)]
    if all(both) and not options.get("image_column"):
        raise UserError(f"--image-column is needed: {where} has a picture and a video, {both[0]} and {both[1]}; name "
                        "the one to train on")
    image = pick_column("--image-column", options, columns, kinds, where)
    caption = pick_column("--caption-column", options, columns, ("txt", "caption", "text"), where, "cls" not in parts)
    label = pick_column("--label-column", options, columns, ("cls",), name, required=False)
    if caption is None:
        texts = [f"class {_text_of('cls', read).strip()}"]
    elif caption.startswith("json."):
        texts = fields[caption.removeprefix("json.")]
    else:
        texts = _text_of(caption, read).splitlines()  # retrieval tars hold one caption per line
    texts = clean_list(texts)
    if not texts:
        raise UserError(f"{where} {caption}: an empty caption")
    if not label:
        return parts[image], texts, None
    said = fields[label.removeprefix("json.")] if label.startswith("json.") else read(label)
    if said is not None and (isinstance(said, (list, dict, bool)) or isinstance(said, float) and said % 1):
        raise ValueError(f"its {label} is {said!r:.40} and not the number of a class")
    return parts[image], texts, None if said is None else int(said)


def _text_of(part, read):
    """The text of a part, in UTF-8 with or without a byte order mark.   Raises: ValueError."""
    try:
        return read(part).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"its {part} is not UTF-8 text") from error


def _utf8(text):
    """Text that can be written as UTF-8; file names and json may hold code points that cannot."""
    return text.encode("utf8", "replace").decode("utf8")


def _unreadable(name, tar, error):
    return UserError(f"--dataset {name}: {tar} is not a readable tar ({first_line(error)})")
