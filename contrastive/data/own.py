"""The user's own data: what the library `datasets` reads (csv, json(l), parquet, imagefolder, videofolder, a hub id),
or tars, as {split: Data}. A column `split` divides the rows of one table."""

import csv
import functools
import glob
import os
from pathlib import Path

from contrastive.data.annotations import Videos, video_folder, window_key
from contrastive.data.clips import clip_options
from contrastive.data.stream import open_tars
from contrastive.data.table import COMMITS, SPLITS, VIDEO_TYPES, Data, generating, pick, with_column, with_note
from contrastive.engine.processes import UserError, opening

import numpy as np

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "file_name", "image_path", "path")
VIDEO_COLUMNS = ("video", "video_path", "video_id", "clip_id")  # a path, a file name or its stem
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentence", "sentences", "title", "description")
LABEL_COLUMNS = ("label", "cls", "fine_label", "class")
WINDOW = ("start", "end")  # columns: seconds in a video


def own_data(name, options):
    """{split: Data} of the user's own data, as it is given."""
    path = Path(name).expanduser()
    if path.suffix == ".tar" or path.is_dir() and any(path.rglob("*.tar")):
        return open_tars(name, path, options)
    root = options.get("data_dir") or (path if path.is_dir() else path.parent)
    with opening(f"--dataset {name}"):
        tables = read_tables(path if path.exists() else name, options.get("revision"))
        return splits_of_tables(name, tables, options, Path(root).expanduser())


def listed(file):
    """[(path or name, start, end, captions)] of a file of further captions."""
    table = read_tables(Path(file).expanduser())["train"]
    image = pick("--image-column", {}, table.column_names, (*VIDEO_COLUMNS, *IMAGE_COLUMNS))
    caption = pick("--caption-column", {}, table.column_names, CAPTION_COLUMNS)
    found, _ = examples(table, table.with_format("arrow")[image][:], caption, None, np.full(len(table), ""))
    return [*zip(*(found[c].to_pylist() for c in ("path", *WINDOW, "captions")))]


# ---- tables ----
def read_tables(source, revision=None):
    """{split as `datasets` calls it: table} of a file or a folder (Path), or of a hub id (str) at a commit, branch or
    tag. The cells of a csv are text, but for seconds: 000 and NA stay what they are."""
    import datasets
    import fsspec
    kind, given = str(source), {"revision": revision}
    if isinstance(source, Path) and source.is_file():
        kind = source.suffix[1:].lower().replace("jsonl", "json")
        if kind not in ("csv", "json", "parquet"):
            raise UserError(f"{source}: a {source.suffix} file is not one of csv, json, jsonl, parquet, tar")
        given = {"data_files": glob.escape(str(source))}
    builder = datasets.load_dataset_builder(kind, **given)
    if isinstance(source, str):
        COMMITS[source] = builder.hash
        if revision and type(builder).__name__ == "Cache" and builder.hash != revision:  # it takes the latest
            raise UserError(f"without the hub, the cache of {source} has the commit {builder.hash} alone")
    if type(builder).__name__ == "Csv":
        first = next(iter(builder.config.data_files.values()))[0]
        with fsspec.open(first, "rt", encoding="utf-8-sig", newline="") as f:
            header = next(csv.reader(f))
        kinds = {c or f"Unnamed: {i}": "float64" if c in WINDOW else "string" for i, c in enumerate(header)}
        features = datasets.Features({c: datasets.Value(kind) for c, kind in kinds.items()})
        builder = datasets.load_dataset_builder(kind, **given, features=features, encoding="utf-8-sig",
                                                keep_default_na=False, na_values=dict.fromkeys(WINDOW, [""]))
    with generating():
        builder.download_and_prepare()
    return builder.as_dataset()


def splits_of_tables(name, tables, options, root):
    """{split: Data} of {split's word: table}; if all rows are in one, its column `split` may divide them. All rows of
    an image, or of a window of a video, are one example; a file inside the table is one of its own, and stays there."""
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc
    split = np.concatenate([np.full(len(t), SPLITS.get(word, word)) for word, t in tables.items()])  # (rows,)
    number = np.concatenate([np.arange(len(t)) for t in tables.values()])  # (rows,) of each in its table
    table = datasets.concatenate_datasets([*tables.values()])
    names = table.column_names
    if {*split} == {"train"} and "split" in names:
        words = np.array(table["split"][:])
        odd = sorted({*words} - {*SPLITS})
        if odd:
            raise UserError(f"--dataset {name}: '{odd[0]}' in the column split is none of {', '.join(SPLITS)}")
        split = np.array([SPLITS[word] for word in words])
    media = {c: type(f) for c, f in table.features.items() if type(f).__name__ in ("Image", "Video")}
    image = pick("--image-column", options, names, (*media, *IMAGE_COLUMNS, *VIDEO_COLUMNS))
    label = pick("--label-column", options, names, LABEL_COLUMNS, required=False)
    classes = getattr(table.features.get(label), "names", None)
    caption = pick("--caption-column", options, names, CAPTION_COLUMNS, required=not classes)
    if image in media:  # as bytes, or as paths that `datasets` has found in a folder
        table = table.cast_column(image, media[image](decode=False))
    path = table.with_format("arrow")[image][:]
    inside = image in media and pc.struct_field(path, "bytes").null_count < len(table)
    path = pc.struct_field(path, "path") if image in media else path
    found, silent = examples(table, pa.array(np.arange(len(table))) if inside else path, caption, label, split)
    places, missing = found["path"].to_pylist(), []
    video = media[image].__name__ == "Video" if inside else image in VIDEO_COLUMNS or bool(options.get("feature_dir"))
    video = video or not inside and any(Path(p).suffix[1:].lower() in VIDEO_TYPES for p in places[:1])
    if inside:
        rows = [*map(int, places)]  # (M,)
        named = table["__key__"][:] if "__key__" in names else path.to_pylist()
        known = None not in named and len({*zip(split, named)}) == len(named)  # "image.png" in every row is no name
        keys = [named[row] if known else str(number[row]) for row in rows]
        source = table.select(rows).select_columns(image).rename_column(image, "source")
    else:
        find = functools.partial(os.path.join, root)
        if video and image not in media:
            find = Videos(video_folder(options, root)).__getitem__
        file = {p: find(p) for p in dict.fromkeys(places)}
        missing = [p for p in file if file[p] is None]
        found = found.filter(pa.array([file[p] is not None for p in places], pa.bool_()))
        places = found["path"].to_pylist()
        keys = [os.path.relpath(p, root) for p in places] if image in media else places
        source = {"path": pa.array([*map(file.get, places)], pa.string())}
        if video:
            source |= {side: found[side].combine_chunks() for side in WINDOW}
            keys = [*map(window_key, keys, *(found[side].to_pylist() for side in WINDOW))]
        source = datasets.Dataset.from_dict({"source": pa.StructArray.from_arrays([*source.values()], [*source])})
    if not len(found):
        raise UserError(f"--dataset {name}: no row has an image and a caption, or no file is found"
                        + (f" (looked for {missing[0]})" if missing else ""))
    beside = datasets.Dataset.from_dict({"captions": found["captions"], "key": keys})
    data = Data(name, "", datasets.concatenate_datasets([source, beside], axis=1), has_captions=bool(caption),
                clip=clip_options(options) if video else None)
    unknown = 0
    if label:
        classes = classes or sorted(found["label"].drop_null().unique().to_pylist())
        labels = pc.index_in(found["label"], pa.array(classes, pa.string())).fill_null(-1)  # (M,)
        labels = labels.to_numpy().astype(int)
        data, unknown = with_column(data, "label", labels, datasets.ClassLabel(names=classes)), (labels < 0).sum()
    data = with_note(data, f"{silent:,} rows without an image or a caption left out" if silent else "",
                     f"{len(missing):,} videos are not there, first {missing[0]}" if missing else "",
                     "" if caption else "no captions: the class names serve as captions",
                     f"{unknown:,} without a class" if unknown else "")
    of = np.array(found["split"])
    return {s: data.select(np.flatnonzero(of == s), s) for s in np.unique(of).tolist()}


def examples(table, path, caption, label, split):
    """(an arrow table of split, path, start, end, captions (list), label (the text of its class, None for several): one
    row per example, in the order of their first rows; how many rows lack a path or a caption).

    caption, label: columns.   path, split: of each row; rows that agree in both and in their window are one example."""
    import pyarrow as pa
    import pyarrow.compute as pc
    names = table.column_names
    content = table.select_columns([c for c in {caption, label, *WINDOW} if c in names]).with_format("arrow")[:]
    out = {"path": pc.utf8_trim_whitespace(path.cast(pa.string())), "row": np.arange(len(table)), "split": split}
    for side in WINDOW:
        out[side] = content[side].cast(pa.float64()) if side in names else pa.nulls(len(table), pa.float64())
    out["label"] = pa.nulls(len(table), pa.string())
    if label:
        kinds = getattr(table.features[label], "names", None)
        word = pc.utf8_trim_whitespace(content[label].cast(pa.string()))
        word = pc.if_else(pc.is_in(word, pa.array(["", "-1", "nan"])), None, word)
        out["label"] = pa.array(kinds).take(word.cast(pa.int64())) if kinds else word
    said = content[caption] if caption else pc.replace_substring(out["label"], "_", " ")
    out = pa.table(out)
    if pa.types.is_list(said.type) or pa.types.is_large_list(said.type):
        out, said = out.take(pc.list_parent_indices(said)), pc.list_flatten(said)
    out = out.append_column("said", pc.utf8_trim_whitespace(said.cast(pa.string())))
    out = out.filter(pc.and_(pc.greater(pc.utf8_length(out["said"]), 0), pc.greater(pc.utf8_length(out["path"]), 0)))
    silent = len(table) - pc.count_distinct(out["row"]).as_py()
    out = out.append_column("n", pa.array(np.arange(len(out))))  # group_by keeps no order
    example, firsts = ["split", "path", *WINDOW], [("n", "min"), ("label", "min"), ("label", "max")]
    once = out.group_by([*example, "said"]).aggregate(firsts).sort_by("n_min")  # a caption comes once
    lists = [("said", "list"), ("n_min", "min"), ("label_min", "min"), ("label_max", "max")]
    once = once.group_by(example, use_threads=False).aggregate(lists)
    once = once.rename_columns([*example, "captions", "n", "low", "high"]).sort_by("n")
    return once.append_column("label", pc.if_else(pc.equal(once["low"], once["high"]), once["low"], None)), silent
