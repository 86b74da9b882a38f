"""The user's own data: what the library `datasets` reads (csv, json(l), parquet, imagefolder, videofolder, a hub id),
or tars, as {split: Data}. A column `split` divides the rows of one table."""

import csv
import glob
import os
from pathlib import Path

from contrastive.data import MODULES
from contrastive.data.annotations import WHOLE_FILES, Videos, video_folder, window_key
from contrastive.data.clips import clip_options
from contrastive.data.stream import open_tars
from contrastive.data.table import SPLITS, VIDEO_TYPES, Data, generating, pick, with_classes, with_note
from contrastive.engine.processes import UserError, opening

import numpy as np

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "file_name", "filename", "filepath", "image_path",
                 "path")
VIDEO_COLUMNS = ("video", "video_path", "video_id", "clip_id")  # a path, a file name or its stem
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentence", "sentences", "title", "description")
WINDOW_COLUMNS = (("start", "end"), ("start_time", "end_time"), ("start_seconds", "end_seconds"))
LABEL_COLUMNS = ("label", "cls", "fine_label", "class")


def own_data(name, options):
    """{split: Data} of the user's own data, as it is given."""
    path = Path(name).expanduser()
    if path.suffix == ".tar" or path.is_dir() and any(path.rglob("*.tar")):
        return open_tars(name, path, options)
    if not path.exists() and name.count("/") != 1:
        raise UserError(f"--dataset {name}: no such file or folder, no hub id (org/name), and no known set: "
                        + ", ".join(MODULES))
    root = options.get("data_dir") or (path if path.is_dir() else path.parent)
    with opening(f"--dataset {name}"):
        return splits_of_tables(name, read_tables(path if path.exists() else name), options, Path(root).expanduser())


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
            raise UserError(f"--dataset {name}: '{odd[0]}' in the column split is none of {', '.join(SPLITS)}")
        of = np.array([SPLITS[w] for w in words])
        out = {s: _data_of(name, s, table, options, root, np.flatnonzero(of == s)) for s in ("train", "val", "test")
               if s in of}
    return same_classes(out)


def _data_of(name, split, table, options, root, rows=None):
    """Data of a table: all rows of an image, or of a window of a video, are one example; a file inside the table is an
    example of its own and stays on the disk.   rows: numbers of the rows to use, None = all."""
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc
    names, video = table.column_names, False
    media = {c: f for c, f in table.features.items() if type(f).__name__ in ("Image", "Video")}
    image = pick("--image-column", options, names, (*media, *IMAGE_COLUMNS, *VIDEO_COLUMNS))
    label = pick("--label-column", options, names, LABEL_COLUMNS, required=False)
    classes = getattr(table.features.get(label), "names", None)
    caption = pick("--caption-column", options, names, CAPTION_COLUMNS, required=not classes)
    numbers = np.arange(len(table)) if rows is None else rows
    table = table if rows is None else table.select(rows)
    if image in media:  # as bytes, or as paths that `datasets` has found in a folder
        table = table.cast_column(image, type(media[image])(decode=False))
        content, video = table.with_format("arrow")[image][:], type(media[image]).__name__ == "Video"
    inside = image in media and pc.struct_field(content, "bytes").null_count < len(table)
    paths = None if inside else pc.struct_field(content, "path") if image in media else None
    found, silent = examples(table, image, caption, label, paths, inside)
    path, missing = found["path"].to_pylist(), []
    if inside:
        at = [int(p) for p in path]  # (M,) row of each example
        named = table["__key__"][:] if "__key__" in names else pc.struct_field(content, "path").to_pylist()
        one_name = len(named) > 1 and len({*named}) == 1  # "image.png" in every row identifies nothing
        keys = [str(numbers[i] if one_name or named[i] is None else named[i]) for i in at]
        source = (table if at == [*range(len(table))] else table.select(at)).select_columns(image)
        source = source.rename_column(image, "source")
    else:
        video = video or bool(options.get("feature_dir")) or image in VIDEO_COLUMNS
        video = video or any(os.path.splitext(p)[1][1:].lower() in VIDEO_TYPES for p in path[:1])
        places = Videos(video_folder(options, root)) if video and paths is None else _Below(root)
        place = {p: places[p] for p in dict.fromkeys(path)}
        missing = [p for p, file in place.items() if file is None]
        found = found.filter(pa.array([place[p] is not None for p in path])) if missing else found
        path = found["path"].to_pylist()
        keys = path if paths is None else [os.path.relpath(p, root) for p in path]
        columns = {"path": pa.array([place[p] for p in path], pa.string())}
        if video:
            windows = [found[side].to_pylist() for side in ("start", "end")]
            if options.get("feature_dir") and len({*path}) < len(path):
                raise UserError(f"{name}: several windows of one video, but --feature-dir has only one file per video")
            keys = [window_key(*key) for key in zip(keys, *windows)]
            columns |= {side: pa.array(w, pa.float64()) for side, w in zip(("start", "end"), windows)}
        source = pa.StructArray.from_arrays([*columns.values()], [*columns])
        source = datasets.Dataset(datasets.table.InMemoryTable(pa.table({"source": source})))
    if not len(found):
        raise UserError(f"--dataset {name}: no row has an image and a caption, or no file is found"
                        + (f" (looked for {missing[0]})" if missing else ""))
    beside = pa.table({"captions": found["captions"], "key": pa.array(keys)})
    beside = datasets.Dataset(datasets.table.InMemoryTable(beside))
    data = Data(name, split, datasets.concatenate_datasets([source, beside], axis=1), has_captions=bool(caption),
                clip=clip_options(options) if video else None)
    labels = [-1]
    if label:
        words = found["label"].to_pylist()
        classes = classes or sorted({w for w in words if w is not None})
        number = {w: k for k, w in enumerate(classes)}
        labels = [number.get(w, -1) for w in words]
        data = with_classes(data, labels, classes)
    return with_note(data, f"{silent:,} rows without an image or a caption left out" if silent else "",
                     f"{len(missing):,} videos are not there, first {missing[0]}" if missing else "",
                     WHOLE_FILES if video and options.get("feature_dir") and any(map(any, windows)) else "",
                     "" if caption else "no captions: the class names serve as captions",
                     f"{labels.count(-1):,} without a class" if label and -1 in labels else "")


class _Below:
    """Paths below a folder: _Below(root)["a.jpg"] is root/a.jpg, whether it is there or not."""

    def __init__(self, root):
        self.root = root

    def __getitem__(self, path):
        return os.path.join(self.root, path)


def examples(table, image, caption, label=None, paths=None, inside=False):
    """(an arrow table of path, start, end, captions (list), label (the text of its class, None for several): one row
    per (path, start, end), in the order of their first rows; how many rows lack a path or a caption).

    paths: in place of the column `image`.   inside: the images are in the table; `path` is then the row's number."""
    import pyarrow as pa
    import pyarrow.compute as pc
    window = next((pair for pair in WINDOW_COLUMNS if {*pair} <= {*table.column_names}), ())
    used = {caption, label, *window} - {None} | ({image} if paths is None and not inside else set())
    content = table.select_columns([*used]).with_format("arrow")[:]
    rows = np.arange(len(table))
    path = pa.array(rows) if inside else content[image] if paths is None else paths
    out = {"path": pc.utf8_trim_whitespace(path.cast(pa.string())), "row": rows}
    for k, side in enumerate(("start", "end")):
        out[side] = _seconds(content[window[k]]) if window else pa.nulls(len(table), pa.float64())
    names = getattr(table.features.get(label), "names", None)
    out["label"] = _texts(content[label], names) if label else pa.nulls(len(table), pa.string())
    said = content[caption] if caption else pc.replace_substring(out["label"], "_", " ")
    out = pa.table(out)
    if pa.types.is_list(said.type) or pa.types.is_large_list(said.type):
        out, said = out.take(pc.list_parent_indices(said)), pc.list_flatten(said)
    out = out.append_column("said", pc.utf8_trim_whitespace(said.cast(pa.string())))
    out = out.filter(pc.and_(pc.greater(pc.utf8_length(out["said"]), 0), pc.greater(pc.utf8_length(out["path"]), 0)))
    example, lost = ["path", "start", "end"], len(table) - pc.count_distinct(out["row"]).as_py()
    out = out.append_column("n", pa.array(np.arange(len(out))))  # group_by keeps no order
    once = out.group_by([*example, "said"]).aggregate([("n", "min")]).sort_by("n_min")  # a caption comes once
    once = once.group_by(example, use_threads=False).aggregate([("said", "list"), ("n_min", "min")])
    once = once.rename_columns([*example, "captions", "n"]).sort_by("n")
    if label:
        of = out.group_by(example).aggregate([("label", "min"), ("label", "max"), ("n", "min")]).sort_by("n_min")
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
