"""Further captions of training clips from a file, as tools/caption.py writes them; opened for --extra-captions."""

import dataclasses
from pathlib import Path

import common
from common import UserError


def add_captions(data, file):
    """The data with further captions of its rows, from a file of video (or image) and caption, and start, end where the
    rows are windows (tools/caption.py writes one); rows of the file that no row of the data matches are counted.

    A clip is known by the name of its file without the ending, by the folders too where two have that name, and by its
    window. Raises: UserError where nothing matches, and for data without files of their own."""
    import datasets
    if data.streamed or data.sources is None:
        raise UserError(f"--extra-captions {file}: {data.name} has no files whose names a caption could give")
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
