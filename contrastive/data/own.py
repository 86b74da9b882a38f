"""The user's own data: what the library `datasets` reads (csv, json(l), parquet, imagefolder, videofolder, a hub id),
or tars, as {split: Data}. A column `split` divides the rows of one table."""

import csv
import functools
import glob
import os
from pathlib import Path

from contrastive.data import MODULES
from contrastive.data.annotations import Videos, video_folder, window_key
from contrastive.data.clips import clip_options
from contrastive.data.load import hold_out
from contrastive.data.stream import open_tars
from contrastive.data.table import SPLITS, VIDEO_TYPES, Data, generating, make_table, notes, pick, with_classes
from contrastive.engine.processes import UserError, opening

import numpy as np

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "file_name", "filename", "filepath", "image_path",
                 "path")
VIDEO_COLUMNS = ("video", "video_path", "video_id", "clip_id")  # a path, a file name or its stem
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentence", "sentences", "title", "description")
LABEL_COLUMNS = ("label", "cls", "fine_label", "class")
WINDOW_COLUMNS = (("start", "end"), ("start_time", "end_time"), ("start_seconds", "end_seconds"))

@functools.lru_cache(maxsize=8)
def own_data(name, options):
    """{split: Data} of the user's own data. Missing val and test splits are held out of train, by image."""
    options, path = dict(options), Path(name).expanduser()
    if path.suffix == ".tar" or path.is_dir() and any(path.rglob("*.tar")):
        return hold_out(open_tars(name, path, options))
    if not path.exists() and name.count("/") != 1:
        raise UserError(f"--dataset {name}: no such file or folder, no hub id (org/name), and no known set: "
                        + ", ".join(MODULES))
    root = options.get("data_dir") or (path if path.is_dir() else path.parent)
    with opening(f"--dataset {name}"):
        return hold_out(splits_of_tables(name, read_tables(path if path.exists() else name), options, root))


# ---- tables ----
def read_tables(path):
    """{split as `datasets` calls it: table} of a file or a folder (Path), or of a hub id (str). The cells of a csv are
    text: 000 and NA stay what they are."""
    import datasets
    kind, files = str(path), {}
    if isinstance(path, Path) and path.is_file():
        kind = path.suffix[1:].lower().replace("jsonl", "json")
        if kind not in ("csv", "json", "parquet"):
            raise UserError(f"{path}: a {path.suffix} file is not one of csv, json, jsonl, parquet, tar")
        files = {"data_files": glob.escape(str(path))}
    if not kind.startswith("csv"):  # a folder of csv files is one, too
        builder = datasets.load_dataset_builder(kind, **files)
        first = next(iter(builder.config.data_files.values()), [""])[0] if type(builder).__name__ == "Csv" else ""
    else:
        first = str(path)
    if first:
        with open(first, encoding="utf-8-sig", newline="") as f:
            header = next(csv.reader(f))
        text = datasets.Features({c or f"Unnamed: {i}": datasets.Value("string") for i, c in enumerate(header)})
        files |= {"features": text, "keep_default_na": False, "encoding": "utf-8-sig"}
    with generating():
        return datasets.load_dataset(kind, **files)


def splits_of_tables(name, tables, options, root):
    """{split: Data} of {split's word: table}; if all rows are in one, its column `split` may divide them."""
    out = {SPLITS.get(word, word): _data_of(name, SPLITS.get(word, word), table, options, root)
           for word, table in tables.items()}
    table = next(iter(tables.values()))
    if list(out) == ["train"] and "split" in table.column_names:
        words = np.array(table["split"][:])  # (rows,)
        odd = sorted({*words} - {*SPLITS})
        if odd:
            raise UserError(f"--dataset {name}: {odd[0]!r} in the column split is none of {', '.join(SPLITS)}")
        of = np.array([SPLITS[w] for w in words])
        out = {s: _data_of(name, s, table, options, root, np.flatnonzero(of == s)) for s in ("train", "val", "test")
               if s in of}
    return same_classes(out)


def _data_of(name, split, table, options, root, rows=None):
    """Data of a table; rows: numbers of those to use, None = all."""
    import pyarrow.compute as pc
    names = table.column_names
    pixels = [c for c, f in table.features.items() if type(f).__name__ in ("Image", "Video")]
    image = pick("--image-column", options, names, (*pixels, *IMAGE_COLUMNS, *VIDEO_COLUMNS))
    label = pick("--label-column", options, names, LABEL_COLUMNS, required=False)
    classes = getattr(table.features.get(label), "names", None)
    caption = pick("--caption-column", options, names, CAPTION_COLUMNS, required=not classes)
    if image in pixels:
        table = table.cast_column(image, type(table.features[image])(decode=False))
        whole = pc.struct_field(table.data.column(image), "bytes")
        if whole.null_count < len(whole):
            return _of_bytes(name, split, table, rows, image, caption, label, options)
    return _of_paths(name, split, table, rows, image, caption, label, options, Path(root).expanduser(), image in pixels)


def _of_paths(name, split, table, rows, image, caption, label, options, root, absolute):
    """Data of rows of paths: all rows of an image, or of a window of a video, are one example. absolute: the paths are
    those that `datasets` has found in a folder."""
    import datasets
    import pyarrow as pa
    found, silent = examples(table if rows is None else table.select(rows), image, caption, label, absolute)
    paths = found["path"].to_pylist()
    by_name = options.get("feature_dir") or image in VIDEO_COLUMNS and not absolute
    videos = by_name or any(os.path.splitext(p)[1][1:].lower() in VIDEO_TYPES for p in paths[:1])
    if videos and not absolute:
        where = Videos(video_folder(options, root))
        place = {p: where[p] for p in dict.fromkeys(paths)}
    else:
        place = {p: os.path.join(root, p) for p in dict.fromkeys(paths)}
    kept = np.flatnonzero([place[p] is not None for p in paths])
    missing = [p for p, at in place.items() if at is None]
    if not len(kept):
        raise UserError(f"--dataset {name}: no row has an image and a caption, or no file is found"
                        + (f" (looked for {missing[0]})" if missing else ""))
    found = found if len(kept) == len(paths) else found.take(kept)
    paths = [paths[i] for i in kept] if missing else paths
    keys = [os.path.relpath(p, root) for p in paths] if absolute else paths
    source = {"path": pa.array([place[p] for p in paths])}
    if videos:
        starts, ends = found["start"].to_pylist(), found["end"].to_pylist()
        keys = [window_key(*window) for window in zip(keys, starts, ends)]
        source |= {"start": found["start"].combine_chunks(), "end": found["end"].combine_chunks()}
    columns = {"source": pa.StructArray.from_arrays([*source.values()], [*source]), "captions": found["captions"],
               "key": pa.array(keys)}
    table_of = datasets.Dataset(datasets.table.InMemoryTable(pa.table(columns)))
    data = Data(name, split, table_of, has_captions=bool(caption), clip=clip_options(options) if videos else None)
    said = [f"{silent:,} rows without an image or a caption left out" if silent else "",
            f"{len(missing):,} videos are not there, first {missing[0]}" if missing else "",
            "" if caption else "no captions: the class names serve as captions"]
    if label:
        names = getattr(table.features[label], "names", None)
        words = found["label"].to_pylist()
        names = names or sorted({w for w in words if w is not None})
        number = {w: k for k, w in enumerate(names)}
        labels = [number.get(w, -1) for w in words]
        data = with_classes(data, labels, names)
        said.append(f"{labels.count(-1):,} without a class" if -1 in labels else "")
    data.note = notes(*said)
    return data


def examples(table, image, caption, label=None, absolute=False):
    """(an arrow table of path, start, end, captions (list), label (the text of its class, None for several): one row
    per (path, start, end), in the order of their first rows; how many rows lack a path or a caption)."""
    import pyarrow as pa
    import pyarrow.compute as pc
    names, class_names = table.column_names, getattr(table.features.get(label), "names", None)
    pair = next((p for p in WINDOW_COLUMNS if {*p} <= {*names}), None)
    used = {image, caption, label, *(pair or ()), "segment"} & {*names}
    content = table.select_columns([*used]).with_format("arrow")[:]
    path = content[image] if not absolute else pc.struct_field(content[image], "path")
    out = {"path": pc.utf8_trim_whitespace(path.cast(pa.string())), "row": np.arange(len(table))}
    windows = [pc.list_element(content["segment"], k) for k in (0, 1)] if "segment" in names else \
        [content[c] for c in pair] if pair else [pa.nulls(len(table), pa.float64())] * 2
    out |= {side: _seconds(column) for side, column in zip(("start", "end"), windows)}
    out["label"] = _texts(content[label], class_names) if label else pa.nulls(len(table), pa.string())
    if caption is None:
        content = content.append_column("said", pc.replace_substring(out["label"], "_", " "))
    said = content[caption or "said"]
    out = pa.table(out)
    if pa.types.is_list(said.type) or pa.types.is_large_list(said.type):
        out, said = out.take(pc.list_parent_indices(said)), pc.list_flatten(said)
    out = out.append_column("said", pc.utf8_trim_whitespace(said.cast(pa.string())))
    out = out.filter(pc.and_(pc.greater(pc.utf8_length(out["said"]), 0), pc.greater(pc.utf8_length(out["path"]), 0)))
    window, lost = ["path", "start", "end"], len(table) - pc.count_distinct(out["row"]).as_py()
    out = out.append_column("n", pa.array(np.arange(len(out))))  # group_by keeps no order
    once = out.group_by([*window, "said"]).aggregate([("n", "min")]).sort_by("n_min")  # each caption of an example once
    once = once.group_by(window, use_threads=False).aggregate([("said", "list"), ("n_min", "min")])
    once = once.rename_columns([*window, "captions", "n"]).sort_by("n")
    if label:
        of = out.group_by(window).aggregate([("label", "min"), ("label", "max"), ("n", "min")]).sort_by("n_min")
        one = pc.if_else(pc.equal(of["label_min"], of["label_max"]), of["label_min"], None)
        once = once.append_column("label", one)
    return once, lost


def _seconds(column):
    """A column of numbers, or of texts of numbers -> float64, null where there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), None, column)
    column = column.cast(pa.float64())
    return pc.if_else(pc.is_nan(column), None, column)


def _texts(column, names=None):
    """Labels as texts, null for none ("", -1, NaN). names: those of the numbers in the column."""
    import pyarrow as pa
    import pyarrow.compute as pc
    if names:
        return pa.array(names).take(pc.if_else(pc.equal(column, -1), None, column))
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.is_in(text, pa.array(["", "-1", "nan"])), None, text)


def _of_bytes(name, split, table, rows, image, caption, label, options):
    """Data of a table that holds the images or videos themselves; they stay on disk, captions and labels in memory."""
    import datasets
    import pyarrow.compute as pc
    video = type(table.features[image]).__name__ == "Video"
    paths = pc.struct_field(table.data.column(image), "path").to_pylist()
    if len(paths) > 1 and len(set(paths)) == 1:  # "image.png" in every row identifies nothing
        paths = [None] * len(paths)
    named = table["__key__"][:] if "__key__" in table.column_names else paths
    keys = [str(k or i) for i, k in enumerate(named)]
    words, names = None, None
    if label:
        names = getattr(table.features[label], "names", None)
        words = _texts(table.select_columns([label]).with_format("arrow")[:][label], names).to_pylist()
        names = names or sorted({w for w in words if w is not None})
    said = table[caption][:] if caption else [w and w.replace("_", " ") for w in words]
    said = [texts if isinstance(texts, list) else [texts] for texts in said]
    captions = [[str(t).strip() for t in texts if str(t or "").strip()] for texts in said]
    beside = make_table(captions, keys)
    whole = datasets.concatenate_datasets([table.select_columns(image).rename_column(image, "source"), beside], axis=1)
    data = Data(name, split, whole, clip=clip_options(options) if video else None, has_captions=bool(caption))
    lost, note = "", "" if caption else "no captions: the class names serve as captions"
    if label:
        number = {w: k for k, w in enumerate(names)}
        labels = [number.get(w, -1) for w in words]
        data = with_classes(data, labels, names)
        lost = f"{labels.count(-1):,} without a class" if -1 in labels else ""
    rows = np.arange(len(data)) if rows is None else rows
    kept = rows[[bool(captions[i]) for i in rows]]
    silent = f"{len(rows) - len(kept):,} without a caption left out" if len(kept) < len(rows) else ""
    data = data if len(kept) == len(data) else data.select(kept)
    data.note = notes(note, silent, lost)
    return data


def same_classes(splits):
    """Gives all splits one list of class names and renumbers their labels, since a split may lack a class."""
    known = {s: d for s, d in splits.items() if d.label_names}
    names = sorted({n for d in known.values() for n in d.label_names})
    if len({tuple(d.label_names) for d in known.values()}) < 2:
        return splits
    for s, d in known.items():
        number = np.array([*(names.index(n) for n in d.label_names), -1])  # (classes + 1,) old -> new; -1 is the last
        splits = splits | {s: with_classes(d, number[d.labels], names)}
    return splits


def listed(name, file):
    """[(path or name, start, end, captions)] of a file of further captions."""
    with opening(name):
        table = read_tables(Path(file).expanduser())["train"]
        image = pick("--image-column", {}, table.column_names, (*VIDEO_COLUMNS, *IMAGE_COLUMNS))
        found, _ = examples(table, image, pick("--caption-column", {}, table.column_names, CAPTION_COLUMNS))
    return [*zip(*(found[c].to_pylist() for c in ("path", "start", "end", "captions")))]
