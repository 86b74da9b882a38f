"""What is odd in somebody's own files and would be read wrongly in silence: refused, with what to do.

common.py asks before it reads a folder or a csv, of what a plain reading takes for something else: words in names that
`datasets` takes for splits, a README.md that sends it elsewhere, a quote that swallows the rows after it.
"""

import csv
import os
import re
from pathlib import Path

import common
from common import UserError, split_words

HELD_BY_FOLDERS = (*common.IMAGE_TYPES, *common.VIDEO_TYPES, "parquet", "csv", "jsonl", "arrow")


def check_folder(name, path, files):
    """Raises: UserError for a folder that no reader reads as meant. files: all below it."""
    check_utf8(name, path, files)
    packed = [f for f in files if common.PACKED.search(f.name)]
    if packed and not any(f.suffix.lower().lstrip(".") in HELD_BY_FOLDERS for f in files):
        raise UserError(f"--dataset {name}: {len(packed)} compressed tars and nothing else to read, first "
                        f"{min(packed)}: unpack them (gunzip), an index needs plain tars")


def check_utf8(name, path, files):
    """Raises: UserError for a file below a folder whose name is no UTF-8, which no table can hold."""
    odd = next((f for f in files if re.search("[\ud800-\udfff]", str(f))), None)
    if odd:
        raise UserError(f"--dataset {name}: the name {ascii(os.path.relpath(odd, path))} is no UTF-8; rename it")


def check_splits(name, path, files, listed, opened):
    """Compares what `datasets` made of a folder, {word: table}, with what lies there: it takes words for splits.

    files, listed: all files below the folder, and the tables among them.
    Raises: UserError where it found other splits than the folders (or the tables) name, as of Train/ and Test/;
        where it passed images over, as all others when some are called test_007.png; where it took some twice."""
    hint = ("such words in names of files and folders, in lower case, are taken for splits; rename them, or list the "
            "images in a metadata.csv (file_name, caption)")
    kept, inside = set(common.folders_of(path)), [f.relative_to(path) for f in files]
    inside = [f for f in inside if len(f.parts) == 1 or f.parts[0] in kept]
    inside = [f for f in inside if not any(part.startswith((".", "__")) for part in f.parts)]  # hidden, or __MACOSX
    top, below = ({s for f in inside for part in f.parts[:-1][:n] for s in split_words(part)[:1]} for n in (1, None))
    named = top or below or {s for f in listed for s in split_words(f.stem)[:1]}
    found = {common.split_of(word) or word for word in opened}
    if named and named != found:
        raise UserError(f"--dataset {name}: its names say {', '.join(sorted(named))}, but {', '.join(sorted(found))} "
                        f"would be read: {hint}")
    images = sum(f.suffix.lower().lstrip(".") in common.IMAGE_TYPES for f in inside)
    if images <= len(listed):
        return
    columns = [t.data.column("image").combine_chunks() for t in opened.values() if "image" in t.column_names]
    paths = [p for column in columns for p in column.field("path").to_pylist()]
    if len(set(paths)) < max(images, len(paths)):
        what = f"only {len(set(paths)):,} of its {images:,} images" if len(set(paths)) < images else "some images twice"
        raise UserError(f"--dataset {name}: {what} would be used, as {', '.join(opened)}: {hint}")
    if all(table.column_names == ["image"] for table in opened.values()):
        raise UserError(f"--dataset {name}: its images lie in one folder, which makes no classes, and no metadata.csv "
                        "(file_name, caption) gives them captions")


def check_card(name, path):
    """README.md and .huggingface.yaml in a data folder may tell `datasets` to read other places: say so and refuse."""
    import yaml  # of huggingface_hub
    from huggingface_hub import DatasetCard
    if re.search(r"[][*?]", str(path)):
        raise UserError(f"--dataset {name}: `datasets` takes the [ ] * ? in this path for a pattern; rename the "
                        "folder, or list the images in a metadata.csv (file_name, caption)")
    readers = {"README.md": lambda p: DatasetCard.load(p, ignore_metadata_errors=False).data.to_dict(),
               ".huggingface.yaml": lambda p: yaml.safe_load(p.read_text(encoding="utf8"))}
    for file, read in readers.items():
        try:  # as `datasets` reads it
            said = read(path / file) if (path / file).is_file() else None
        except Exception as error:
            raise UserError(f"--dataset {name}: its {file} cannot be read ({common.first_line(error)}); mend or remove "
                            "it") from error
        for text in _strings(said.get("configs") if isinstance(said, dict) else None, set()):
            if re.search(r"^[/~\\]|^[A-Za-z]:|://|::|(^|[/\\])[.][.]([/\\]|$)", text.strip()):
                raise UserError(f"--dataset {name}: its {file} says that data lie outside the folder ({text.strip()}); "
                                "remove that line, or name the files themselves")


def _strings(value, seen):
    """All texts in nested lists and dicts, but for those of `features`; seen: of one that holds itself."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)) and id(value) not in seen:
        seen.add(id(value))
        inner = [v for k, v in value.items() if k != "features"] if isinstance(value, dict) else value
        for v in inner:
            yield from _strings(v, seen)


# ======================================================= tables ======================================================
def check_csv(file, separator):
    """The line at which the last row begins. Raises: UserError where a row has more fields than the header, or seems to
    hold others."""
    csv.field_size_limit(2**31 - 1)  # a caption of a megabyte is one
    with open(file, newline="", encoding="utf-8-sig") as f:
        rows = csv.reader(f, delimiter=separator)
        header = next(rows)
        begin, end = 1, rows.line_num
        for row in rows:
            begin, end = end + 1, rows.line_num
            _swallowed_rows(file, row, separator, begin)
            if len(row) > len(header):  # the reader would take the first column for an index, and shift the others
                raise UserError(f"--dataset {file}: line {end} has more fields than the header's {len(header)}; put "
                                "captions that hold a comma in quotes")
    return begin


def _swallowed_rows(file, row, separator, begin):
    """Raises: UserError where a caption over several lines holds lines that look like rows of their own: what they
    begin or end with is a file as in this row, or called alike but for numbers. A quote was opened and not closed."""
    def kind(name):
        ending = Path(name).suffix.lower().lstrip(".")
        return ending if ending in common.IMAGE_TYPES + common.VIDEO_TYPES else re.sub(r"[0-9]+", "0", name)
    for field in (f for f in row if "\n" in f):
        for number, line in enumerate(field.split("\n")[1:], start=1):
            ends = {line.partition(separator)[0]: row[0], line.rpartition(separator)[2]: row[-1]}
            alike = [name for name, own in ends.items() if own != field and kind(name.strip()) == kind(own)]
            if separator in line and alike and kind(alike[0]) not in ("", "0"):  # a number begins many a line
                raise UserError(f"--dataset {file}: a quote that opens in line {begin} swallows the rows after it, "
                                f"{alike[0]} in line {begin + number} is the first; close it, and write a quote inside "
                                'a caption as ""')


TABLE_ERRORS = {"corresponds to no data": "it has no rows", "BatchSize must be greater than 0": "it has no rows",
                "recursion depth": "nested too deeply; expected rows of image and caption",
                "decoding depth limit": "nested too deeply; expected rows of image and caption"}


def plain_words(error, reason):
    """What an error of `datasets`, and the one it came from, mean for a table; "" where that is not known."""
    import datasets
    if isinstance(reason, UnicodeDecodeError) or "codec can't decode" in str(reason):
        return f"not UTF-8 text ({common.first_line(reason)}); save it as UTF-8"
    place, path = str(datasets.config.HF_DATASETS_CACHE), str(getattr(reason, "filename", None) or "-")
    ours = path.startswith(place) or place.startswith(path) or getattr(reason, "errno", None) in common.DISK
    if isinstance(reason, OSError) and (ours or "disk space" in str(reason)):
        why = reason.strerror or common.first_line(reason).split(".")[0]
        return f"the cache of `datasets` in {place} cannot be written: {why}; HF_DATASETS_CACHE names another folder"
    return next((words for sign, words in TABLE_ERRORS.items() if sign in f"{error} {reason}"), "")
