"""What joins the training set: further captions of its clips from a file, as tools/caption.py writes them
(--extra-captions), and further clips with their captions, such as HowTo100M's (--extra-pairs)."""

import dataclasses
import functools
import itertools
import os
from pathlib import Path

import common
from common import UserError

import numpy as np


def add_captions(data, file):
    """The data with further captions of its rows, from a file of video (or image) and caption, and start, end where the
    rows are windows (tools/caption.py writes one); rows of the file that no row of the data matches are counted.

    A clip is known by the name of its file without the ending, by the folders too where two have that name, and by its
    window. Raises: UserError where nothing matches, and for data without files of their own."""
    import datasets
    if data.streamed or data.sources is None:
        raise UserError(f"--extra-captions {file}: {data.name} has no files whose names a caption could give")
    if not Path(file).is_file():
        raise UserError(f"--extra-captions {file}: no such file")
    if data.caption_relevancy:
        raise UserError(f"--extra-captions {file}: --caption-relevancy {data.caption_relevancy:g} draws sentences of "
                        f"{data.name} and would never draw these; set it to 0")
    try:
        extra = common.read_caption_file(file)
    except UserError as error:
        raise UserError(str(error).replace("--dataset", "--extra-captions", 1)) from error
    rows, captions, lost = {}, list(data.column("captions")), []
    for i, source in enumerate(data.sources["source"][:]):
        path = Path(data.key(i) if source.get("size") is not None or not source.get("path") else source["path"])
        rows.setdefault((path.stem, source.get("start"), source.get("end")), []).append((i, path))
    names, usual, new = extra.column_names, common.VIDEO_COLUMNS + common.IMAGE_COLUMNS, 0
    flag = "--extra-captions: a column of "
    image = common.pick_column(f"{flag}videos", "", names, usual, file.name)
    caption = common.pick_column(f"{flag}captions", "", names, common.CAPTION_COLUMNS, file.name)
    for name, texts, window in zip(extra[image][:], extra[caption][:], common.windows_of(extra)):
        path = Path(str(name))
        found = rows.get((path.stem, *window)) or rows.get((path.name, *window)) or []
        if len(found) > 1:  # a.mp4 in two folders
            whole = path.with_suffix("").parts
            found = [(i, own) for i, own in found if own.with_suffix("").parts[-len(whole):] == whole]
        found = found if len(found) == 1 else []
        for i, _ in found:
            texts = [t for t in common.clean_list(texts) if t not in captions[i]]
            captions[i], new = [*captions[i], *texts], new + len(texts)
        lost += [] if found else [str(name)]
    if len(lost) == len(extra):
        raise UserError(f"--extra-captions {file}: none of its {len(extra):,} rows is of a clip of {data.name} "
                        f"(train), first {lost[0]}; names and windows (start, end) must agree")
    kind = datasets.Features({"captions": data.features["captions"]})
    beside = datasets.Dataset.from_dict({"captions": captions}, features=kind)
    table = datasets.concatenate_datasets([data.table.remove_columns("captions"), beside], axis=1)
    note = f"{new:,} captions added from {file.name}"
    note += f", {len(lost):,} of its rows are of no training clip, first {lost[0]}" if lost else ""
    return dataclasses.replace(data, table=table, note=common.join_notes(data.note, note))


def add_pairs(data, word, args, evals):
    """The training data and after them those of another set, its rows of clips that the evaluation reads left out; and
    where that set has no val or test of its own, what is held out for them.

    Args: word: NAME or NAME=DIR of --extra-pairs, DIR with the annotations and the files of the set.
        args: the flags of the run.   evals: {name: {val, test}}, what is evaluated.
    Raises: UserError where the two cannot stand in one table."""
    import datasets
    name, _, folder = (word, "", "") if Path(word).exists() else word.partition("=")
    same = ("frames", "frame_sampling", "frame_cache", "image_size", "max_pixels", "max_bad_fraction",
            "unfold_captions")
    if not name:
        raise UserError(f"--extra-pairs {word}: expected NAME or NAME=DIR")
    options = {k: v for k in same if (v := getattr(args, k, None)) is not None}
    options["video_dir"] = folder or ("" if Path(name).is_dir() else args.video_dir)
    try:
        more = common.load_data(name, "train", data_dir=folder, **options)
    except UserError as error:
        raise UserError(f"--extra-pairs {word}: {str(error).replace(f'--dataset {name}: ', '')}") from error
    for part in (data, more):
        if part.streamed or part.sources is None or getattr(args, "feature_dir", None):
            raise UserError(f"--extra-pairs {word}: joins files with files; {part.name} is a stream, drawn in memory, "
                            "or read as features")
        if not part.has_captions:
            raise UserError(f"--extra-pairs {word}: {part.name} has class names instead of captions")
    if data.sentences is not None or (data.clip is None) != (more.clip is None):
        raise UserError(f"--extra-pairs {word}: {more.name} cannot stand beside {data.name}, which holds "
                        + ("sentences with relevancies" if data.sentences is not None else
                           "images and not videos" if data.clip is None else "videos and not images"))
    if (data.shards is None) != (more.shards is None):
        raise UserError(f"--extra-pairs {word}: tars are read shard by shard; {data.name} and {more.name} must both "
                        "be tars, or neither")
    read = {n for splits in evals.values() for part in splits.values() if part.sources is not None
            for n in file_names(part)}
    kept = np.flatnonzero([n not in read for n in file_names(more)])
    dropped = len(more) - len(kept)
    if not len(kept):
        raise UserError(f"--extra-pairs {word}: all of its {len(more):,} rows are of clips that the evaluation reads")
    more = more.select(kept) if dropped else more
    again = int(np.isin(places(more), places(data)).sum())
    if again == len(more):
        raise UserError(f"--extra-pairs {word}: all of its {again:,} rows are of clips that are trained on already; "
                        "--extra-captions adds captions to them")
    names = ["source", "captions", "key"]
    lost = sorted(set(data.table.column_names + more.table.column_names) - set(names))
    parts = [part.table.select_columns(names) for part in (data, more)]
    kinds = parts[0].features | parts[1].features
    kinds["source"] = parts[0].features["source"] | parts[1].features["source"]
    parts = [part if part.features == kinds else part.cast(datasets.Features(kinds)) for part in parts]
    table = datasets.concatenate_datasets(parts)
    which = None if data.which is None else np.concatenate([data.which, more.which])
    shards = None if data.shards is None else np.concatenate([data.shards, more.shards + data.shards.max() + 1])
    note = f"{len(more):,} further pairs of {more.name}, {len(more) / len(table):.0%} of an epoch"
    note += f" ({more.note})" if more.note else ""
    note += f", {dropped:,} of clips that the evaluation reads left out" if dropped else ""
    note += f", {again:,} of clips that are trained on already, which a batch may hold twice" if again else ""
    note += f"; captions alone are joined, without {', '.join(lost)}" if lost else ""
    return dataclasses.replace(data, table=table, rows=None, which=which, shards=shards, joined=data.joined + len(more),
                               note=common.join_notes(data.note, note))


def places(data):
    """(M,) a number for what each row reads: a file, a place in a tar, a window; of a picture in the table its own."""
    real = functools.lru_cache(os.path.realpath)

    def number(i, source):
        if source.get("bytes") or not source.get("path"):
            return hash((id(data), i))
        return hash((real(source["path"]), source.get("offset"), source.get("start"), source.get("end")))
    rows = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    return np.fromiter(itertools.starmap(number, enumerate(rows)), np.int64, len(data))


def file_names(data):
    """For each row its file's name without folder and ending, by which two sets know the same clip."""
    stem = functools.lru_cache(lambda path: Path(path).stem)
    places = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    for key, source in zip(data.keys(), places, strict=True):
        yield stem(key if source.get("size") is not None or not source.get("path") else source["path"])
