"""The user's own data: a folder, a file of paths and captions, tars, or any hub id, as {split: Data}."""

import dataclasses
import functools
import glob
import os
import re
from pathlib import Path

from common import Data, from_rows, hold_out, make_table, with_notes

import numpy as np

from contrastive.engine.base import UserError, join_notes, read_json, say_once
from contrastive.readers import columns, guards
from contrastive.readers.clips import clip_options, windows_of
from contrastive.readers.columns import clean_list, ending, is_video, pick_column, split_of
from contrastive.readers.records import KINDS, read_csv_files, read_table
from contrastive.readers.stream import open_tars
from contrastive.readers.videos import clips_of
from contrastive.sets import MODULES


@functools.lru_cache(maxsize=8)
def own_data(name, options):
    """{split: Data} of the user's own data. Missing val and test splits are held out of train, by image."""
    options = dict(options)
    path = Path(name).expanduser()
    root = Path(options.get("data_dir") or path.parent).expanduser()
    if not path.exists():
        hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and ending(path) not in (*columns.TABLES, "tar")
        if hub_id and not path.parent.exists():
            if options.get("streaming"):
                raise UserError(f"--streaming: reads tars, and {name} on the hub is a table that is downloaded; leave "
                                "it out")
            _no_data_dir(options, f"{name} is read from the hub")
            return hold_out(tables(name, {}, name, options))
        known = ", ".join(MODULES)
        raise UserError(f"--dataset {name}: no such path from {Path.cwd()}, and not a hub id (org/name) or a known "
                        f"set: {known}")
    if (path / "args.json").is_file() and (path / "command.txt").is_file():
        theirs = read_json(path / "args.json", {}).get("dataset", "NAME")
        raise UserError(f"--dataset {name}: the folder of a run, not of data; its run used --dataset {theirs}")
    if path.is_dir():
        return hold_out(_own_folder(name, path, options))
    if path.suffix == ".tar" or columns.PACKED.search(path.name):
        _no_data_dir(options, f"{name} holds its files")
        return hold_out(open_tars(name, [path], options))
    if ending(path) in columns.TABLES:
        return hold_out(_described(name, path, root, options))
    kind = path.suffix or "nameless"
    raise UserError(f"--dataset {name}: a {kind} file is not one of csv, tsv, json, jsonl, parquet, txt, token, tar")


def _no_data_dir(options, why):
    if options.get("data_dir"):
        raise UserError(f"--data-dir {options['data_dir']}: has no effect, since {why}; give only the one that you "
                        "mean")


def _own_folder(name, path, options):
    """{split: Data} of a folder: tars, files of captions, class folders of videos or images, parquet."""
    shards = sorted(path.rglob("*.tar"))
    alone = [f for f in (*sorted(path.glob("metadata.*")), path / "captions.csv", path / "captions.txt")
             if f.is_file() and ending(f) in columns.TABLES and not shards]
    if alone:
        guards.say_not_read(name, alone[1:], alone[0].name)
        return _described(name, alone[0], Path(options.get("data_dir") or path).expanduser(), options)
    _no_data_dir(options, f"{name} is a folder that holds the files")
    if shards:
        guards.check_links(name, path)
        return open_tars(name, shards, options)
    folders = columns.folders_of(path)
    guards.check_split_names(name, folders)
    described = {f: sorted((path / f).glob("metadata.*")) for f in folders if columns.split_words(f)}
    if any(described.values()):
        return _described_folders(name, path, described, options)
    return read_folder(name, path, options)


def read_folder(name, path, options):
    """{split: Data} of a folder of class folders or of tables with images; if it names no split, all is train."""
    guards.check_links(name, path)
    files = [f for f in path.rglob("*") if f.is_file() and not HIDDEN.search(f"/{f.relative_to(path).as_posix()}")]
    if not files:
        raise UserError(f"--dataset {name}: the folder is empty; expected class folders, images with metadata.csv, "
                        "tars or parquet")
    pixels = guards.check_folder(name, path, files)
    beside = [f for f in files if pixels and f.name in METADATA]  # in subfolders
    if pixels and not beside:
        return class_folders(name, path, pixels, options)
    if any(map(is_video, pixels)):
        raise UserError(f"--dataset {name}: {os.path.relpath(min(beside), path)} lies beside videos in a subfolder; "
                        "write one metadata.csv (file_name, caption) at the top, or one in each folder of a split")
    kinds = {kind: [f for f in files if ending(f) == kind and f.name not in INFOS] for kind in KINDS}
    kind = next(filter(kinds.get, KINDS), "")  # the first is read
    if not kind:
        raise UserError(f"--dataset {name}: nothing in it can be read; expected images, videos, tars or tables")
    around = {f: columns.split_and_class(f.relative_to(path)) for f in sorted(beside + pixels or kinds[kind], key=str)}
    tables_there = [f for f in files if ending(f) in (*KINDS, "tsv") and f.name not in INFOS]
    guards.say_not_read(name, [f for f in tables_there if f not in around and f not in beside], f".{kind}")
    by_folder = beside or any(split for split, _ in around.values())
    words = {f: by_folder and (split or inner) or f.stem for f, (split, inner) in around.items()}
    splits = guards.split_files(name, words)
    named = {split: [glob.escape(os.path.abspath(f)) for f in part] for split, part in splits.items()}
    roots = {split: Path(os.path.commonpath([f.parent for f in part])) for split, part in splits.items()}
    if kind == "csv" and not beside:
        opened = {split: read_csv_files(name, part) for split, part in splits.items()}
    else:
        opened = columns.open_table("imagefolder" if beside else KINDS[kind], name, data_files=named)
    return splits_of_tables(opened, name, options, path, roots)


HIDDEN = re.compile(r"/(\.|__[^/]*/)")  # files and folders, and __MACOSX
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
INFOS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")  # no rows


def class_folders(name, path, pixels, options):
    """{split: Data} of class folders of images, or of videos (gifs then count as videos), below split folders if there
    are any. The class names serve as captions. pixels: the files."""
    import datasets
    videos = any(map(is_video, pixels))
    column, feature = ("video", datasets.Video()) if videos else ("image", datasets.Image())
    files = [f for f in pixels if not videos or ending(f) in (*columns.VIDEO_TYPES, "gif")]
    files.sort(key=None if videos else str)
    guards.say_not_read(name, {*pixels} - {*files}, "videos")
    around = {f: columns.split_and_class(f.relative_to(path)) for f in files}
    splits = guards.split_files(name, {f: split or label for f, (split, label) in around.items()})
    names = sorted({label for _, label in around.values()})
    if videos and not names[0]:
        bare = next(f for f in files if not around[f][1])
        raise UserError(f"--dataset {name}: {bare.name} is in no class folder and there is no metadata.csv (file_name, "
                        "caption)")
    if not names[0] or len(names) < 2 and not videos:
        raise UserError(f"--dataset {name}: its images lie in one folder, so there are no classes, and no metadata.csv "
                        "(file_name, caption) gives them captions; add one of the two")
    features = datasets.Features({column: feature, "label": datasets.ClassLabel(names=names)})
    rows = {split: {column: [os.path.abspath(f) for f in part], "label": [around[f][1] for f in part]}
            for split, part in splits.items()}
    return {split: _table_data(name, split, datasets.Dataset.from_dict(row, features=features), options, path)
            for split, row in rows.items()}


def _described(name, file, root, options):
    """{split: Data} of one file of paths and captions: the splits of its column `split`; without one, the whole file is
    the split that its name says (test.csv), or train."""
    table = read_table(file)
    parts = split_column(name, table)
    if parts.get("train", "") is None and columns.split_words(file.stem) in (["val"], ["test"]):
        parts = {split_of(file.stem): None}
    elif parts.get("train", "") is None and not columns.split_words(file.stem):  # train.csv says that all are train
        guards.check_split_folders(name, table, columns.image_column(file.name, table, options))
    return columns.same_classes({split: _rows_of(name, split, table, rows, file, root, options)
                         for split, rows in parts.items()})


def _rows_of(name, split, table, rows, file, root, options):
    """Data of rows of a table (None = all) that holds images, or paths that start at root. file: the table's file or
    the folder of all tables."""
    feature = table.features[columns.image_column(file.name, table, options)]
    of_bytes = isinstance(feature, dict) or "binary" in getattr(feature, "dtype", "")
    label = columns.class_column(options, table, file.name)
    named = pick_column("--caption-column", options, table.column_names, columns.CAPTION_COLUMNS, file.name, False)
    of_classes = not named and getattr(table.features.get(label), "names", None)  # their names serve as captions
    if of_bytes or of_classes or type(feature).__name__ in ("Image", "Video"):
        return _table_data(name, split, table, options, file if file.is_dir() else root, rows)
    return caption_file(name, split, file, root, options, table if rows is None else table.select(rows))


def split_column(name, table):
    """{split: row numbers} of a table, from its column `split`; {train: None}, i.e. all rows, if it has none.

    Raises: UserError if only some of the column's values name a split."""
    column = columns.plain_names(table.column_names).get("split")
    guards.check_other_splits(name, table)
    words = [str(w) for w in table[column][:]] if column else []
    of_word = {w: split_of(w) for w in dict.fromkeys(words)}
    odd = [w for w, split in of_word.items() if not split]
    if len(odd) == len(of_word):
        if odd:
            say_once(f"WARNING: --dataset {name}: no value of its column {column} names a split, first {odd[0]!r}: "
                     "val and test are held out of all its rows, and the rest is train")
        return {"train": None}
    if odd:
        raise UserError(f"--dataset {name}: {odd[0]!r} in its column {column} names no split "
                        f"({', '.join(columns.SPLIT_WORDS)}); rename it, or the column if it means something else")
    splits = np.array([of_word[w] for w in words])
    return {split: np.flatnonzero(splits == split) for split in columns.SPLIT_NAMES if split in of_word.values()}


def _described_folders(name, path, described, options):
    """{split: Data} of folders named after splits. described: {folder: its metadata files}."""
    bare = [f for f, files in described.items() if not files]
    if bare:
        raise UserError(f"--dataset {name}: no metadata.csv, .jsonl or .parquet in {', '.join(bare)}, but in "
                        f"{', '.join(f for f in described if f not in bare)}")
    if len({split_of(f) for f in described}) < len(described):
        raise UserError(f"--dataset {name}: two of {', '.join(sorted(described))} name one split; rename or merge them")
    for files in described.values():
        guards.say_not_read(name, files[:-1], files[-1].name)
    return columns.same_classes({split_of(f): caption_file(name, split_of(f), files[-1], path / f, options)
                         for f, files in described.items()})


def tables(kind, files, name, options, folder="", gated=""):
    """{split: Data} of a hub id, or of tables of one kind, through `datasets`; nothing is decoded."""
    return splits_of_tables(columns.open_table(kind, name, gated=gated, **files), name, options, folder or kind)


def splits_of_tables(opened, name, options, folder, roots=()):
    """{split: Data} of {a split's word: table}. folder: theirs, or the hub id; roots: {split: folder} where paths in
    the tables of a folder start."""
    out = {split_of(word) or word: table for word, table in opened.items()}
    if len(out) < len(opened):
        raise UserError(f"--dataset {name}: two of {', '.join(opened)} name one split; give a local copy with only the "
                        "one that you mean")
    one = out["train"] if list(out) == ["train"] else None  # all rows in one split: a column may divide them further
    parts = dict.fromkeys(out) if one is None else split_column(name, one)
    if roots:
        return columns.same_classes({s: _rows_of(name, s, out[s] if one is None else one, rows, folder,
                                         roots["train" if one else s], options) for s, rows in parts.items()})
    return columns.same_classes({s: _table_data(name, s, out[s] if one is None else one, options, folder, rows)
                         for s, rows in parts.items()})


def _inside(path, folder):
    """The path of a file relative to its data set, so that a copy of the folder elsewhere gives the same keys."""
    for place in (os.path.abspath(folder), os.path.realpath(folder)):
        if path and path.startswith(place + os.sep):
            return path[len(place) + 1:]
    return path


def _table_data(name, split, table, options, folder, kept=None):
    """Data of a table with an Image or Video column. Its captions, labels and keys are kept in memory.

    kept: row numbers, None = all."""
    import datasets
    import pyarrow.compute as pc
    image = columns.image_column(name, table, options)
    label = columns.class_column(options, table, name)
    classes = getattr(table.features.get(label), "names", None)
    caption = pick_column("--caption-column", options, table.column_names, columns.CAPTION_COLUMNS, name,
                          required=not classes)
    video = type(table.features[image]).__name__ == "Video"
    kind = type(table.features[image]) if video else datasets.Image
    undecoded = table.select_columns(image).cast_column(image, kind(decode=False))
    files, inside = (pc.struct_field(undecoded.data.column(image), field) for field in ("path", "bytes"))
    paths, sizes = files.to_pylist(), pc.binary_length(inside).to_pylist()  # without the image bytes
    if kept is not None:
        table, undecoded = table.select(kept), undecoded.select(kept)
        paths, sizes = [paths[i] for i in kept], [sizes[i] for i in kept]
    labels = table[label][:] if label else None
    if label and not classes:  # plain strings or numbers: number them in sorted order
        classes = [str(y) for y in sorted({y for y in labels if columns.is_class(y)})]
        number = {y: i for i, y in enumerate(classes)}
        labels = [number[str(y)] if columns.is_class(y) else -1 for y in labels]
    elif label:
        labels = [-1 if y is None else y for y in labels]
    texts = table[caption][:] if caption else [classes[y].replace("_", " ") if y >= 0 else "" for y in labels]
    example = texts[0] if texts else ""
    if isinstance(example, dict) or (isinstance(example, list) and example and not isinstance(example[0], str)):
        raise UserError(f"--caption-column {caption}: {name} holds {type(example).__name__}s there, not texts; it has: "
                        f"{', '.join(table.column_names)}")
    captions = [clean_list(t) for t in texts]
    merged = columns.merge_rows(name, paths, sizes, captions, labels) if caption else 0
    paths = [_inside(p, folder) for p in paths]
    if len(paths) > 1 and len(set(paths)) == 1:  # "image.png" in every row identifies nothing
        paths = [None] * len(paths)
    named = table["__key__"][:] if "__key__" in table.column_names else [None] * len(table)
    keys = [str(k or p or i) for i, (k, p) in enumerate(zip(named, paths))]
    beside = make_table(captions, keys, classes={"label": classes}, **({"label": labels} if label else {}))
    whole = datasets.concatenate_datasets([undecoded.rename_column(image, "source"), beside], axis=1)
    note = "" if caption else "no captions: the class names serve as captions"
    clip = clip_options(options) if video else None
    kept = np.flatnonzero([bool(c) for c in captions])
    data = Data(name, split, whole, clip=clip, note=note, has_captions=bool(caption))
    return with_notes(data if len(kept) == len(data) else data.select(kept), len(data) - len(kept) - merged)


def caption_file(name, split, file, root, options, table=None):
    """Data of a csv, tsv, json(l) or parquet file with one row per (path, caption) of images or videos. All rows of an
    image, or of a window of a video, become its K captions. table: the rows to use, None = all of the file.

    options: also window, (start, end) of rows without one, and repeats: a caption that is there twice counts twice."""
    table = read_table(file) if table is None else table
    usual = columns.IMAGE_COLUMNS + columns.VIDEO_COLUMNS
    image = pick_column("--image-column", options, table.column_names, usual, file.name)
    caption = pick_column("--caption-column", options, table.column_names, columns.CAPTION_COLUMNS, file.name)
    label = columns.class_column(options, table, file.name)
    rows, label_of, several = {}, {}, {}  # (path, start, end) -> captions, -> class, -> one more class
    labels = table[label][:] if label else [None] * len(table)
    texts = guards.check_cells(file, table, image, caption) or table[caption][:]
    sources = [None if x == "" or x != x else x for x in table[image][:]]  # NaN differs from itself
    endings = {ending(x.strip()) for x in sources if isinstance(x, str)}
    images = endings & {*columns.IMAGE_TYPES} - {"gif"}  # then --video-dir belongs to other data: the training set
    by_name = options.get("feature_dir") or image in columns.VIDEO_COLUMNS or options.get("video_dir") and not images
    videos = by_name or endings & {*columns.VIDEO_TYPES}
    windows = windows_of(table) if videos else [(None, None)] * len(table)
    windows = [options.get("window") or w if w == (None, None) else w for w in windows]
    for source, text, y, window in zip(sources, texts, labels, windows):
        if source is None:
            continue
        if isinstance(source, (dict, list, bytes)):
            raise UserError(f"--image-column {image}: {file.name} holds image bytes or records there, not paths; for "
                            "parquet files with images give their folder")
        if any(isinstance(t, (dict, list)) for t in (text if isinstance(text, list) else [text])):
            raise UserError(f"--caption-column {caption}: {file.name} holds records or lists there, not texts; it has: "
                            f"{', '.join(table.column_names)}")
        path = os.path.expanduser(str(source).strip())
        key = (os.path.normpath(path), *window)  # a.png and ./a.png are one image
        captions = rows.setdefault(key, [])
        said = clean_list(text)
        captions += said if options.get("repeats") else [t for t in dict.fromkeys(said) if t not in captions]
        if columns.is_class(y) and label_of.setdefault(key, str(y).strip()) != str(y).strip():
            several[key] = y
    if not any(rows.values()):
        raise UserError(f"--dataset {file}: no row has an image and a caption")
    lost = f"{sources.count(None):,} rows without an image left out" if None in sources else ""
    if several:
        key, y = next(iter(several.items()))
        say_once(f"WARNING: {file.name}: {len(several):,} images have rows of several classes and count as without a "
                 f"class, first {key[0]}: {label_of[key]}, {y}")
        label_of = {k: y for k, y in label_of.items() if k not in several}
    if videos:
        guards.check_windows(file, table, image)
        data = clips_of(name, split, rows, options, root, label_of if label else None)
        return dataclasses.replace(data, note=join_notes(data.note, lost))
    classes = sorted({label_of[k] for k, captions in rows.items() if captions and k in label_of}) if label else None
    listed = [{"source": str(root / k[0]), "captions": captions, "key": k[0]} for k, captions in rows.items()]
    if label:
        listed = [row | {"label": classes.index(label_of[k]) if k in label_of and row["captions"] else -1}
                  for row, k in zip(listed, rows)]
    data = from_rows(name, split, listed, options, {"label": classes} if label else None)
    return dataclasses.replace(data, note=join_notes(data.note, lost))


def add_captions(data, file):
    """The data with additional captions from a file with columns video (or image), caption, and start, end for windows
    (tools/caption.py writes such a file). Rows of the file that match no row of the data are counted.

    A clip is matched by its window and its file name without extension; if two files share a name, by their folders
    too. All rows of the clip get the caption. A question that served as the caption is replaced.
    Raises: UserError if nothing matches, and for data without files of their own."""
    if data.streamed or data.sources is None:
        raise UserError(f"--extra-captions {file}: {data.name} has no files of its own to which captions could belong")
    if not Path(file).is_file():
        raise UserError(f"--extra-captions {file}: no such file")
    if data.caption_relevancy:
        raise UserError(f"--extra-captions {file}: --caption-relevancy {data.caption_relevancy:g} draws sentences of "
                        f"{data.name} and would never draw these; set it to 0")
    try:
        extra = read_table(file)
    except UserError as error:
        raise UserError(str(error).replace("--dataset", "--extra-captions", 1)) from error
    rows, captions, lost = {}, list(data.column("captions")), []
    asked = data.column("question") or [None] * len(data)
    for i, source in enumerate(data.sources["source"][:]):
        inside = source.get("size") is not None or source.get("bytes") or not source.get("path")
        path = Path(data.key(i) if inside else source["path"])
        rows.setdefault((path.stem, source.get("start"), source.get("end")), []).append((i, path))
    names, usual, new = extra.column_names, columns.VIDEO_COLUMNS + columns.IMAGE_COLUMNS, 0
    flag = "--extra-captions: a column of "
    image = pick_column(f"{flag}videos", {}, names, usual, file.name)
    caption = pick_column(f"{flag}captions", {}, names, columns.CAPTION_COLUMNS, file.name)
    for name, texts, window in zip(extra[image][:], extra[caption][:], windows_of(extra)):
        path = Path(str(name))
        found = rows.get((path.stem, *window)) or rows.get((path.name, *window)) or []
        if len({own for _, own in found}) > 1:  # a.mp4 in two folders
            whole = path.with_suffix("").parts
            found = [(i, own) for i, own in found if own.with_suffix("").parts[-len(whole):] == whole]
        found = found if len({own for _, own in found}) == 1 else []
        for i, _ in found:
            more = [t for t in clean_list(texts) if t not in captions[i]]
            kept = [] if more and captions[i] == [asked[i]] else captions[i]
            captions[i], new = [*kept, *more], new + len(more)
        lost += [] if found else [str(name)]
    if len(lost) == len(extra):
        raise UserError(f"--extra-captions {file}: none of its {len(extra):,} rows matches a clip of {data.name} "
                        f"(train), first {lost[0]}; names and windows (start, end) must agree")
    note = f"{new:,} captions added from {file.name}"
    note += f", {len(lost):,} of its rows match no training clip, first {lost[0]}" if lost else ""
    return dataclasses.replace(with_captions(data, captions), note=join_notes(data.note, note))


def with_captions(data, captions):
    """The data with other captions, a list for each row."""
    import datasets
    kind = datasets.Features({"captions": data.features["captions"]})
    beside = datasets.Dataset.from_dict({"captions": captions}, features=kind)
    table = datasets.concatenate_datasets([data.table.remove_columns("captions"), beside], axis=1)
    return dataclasses.replace(data, table=table)


def joined(data):
    """The data with all captions of a row as one text (--join-captions)."""
    return with_captions(data, [[" ".join(of_row)] for of_row in data.column("captions")])
