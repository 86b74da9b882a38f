"""What is odd in somebody's own files and would be read wrongly in silence: refused, with what to do.

common.py asks before it reads a folder or a csv, of what a plain reading takes for something else: words in names that
`datasets` takes for splits, a README.md that sends it elsewhere, a quote that swallows the rows after it.
"""

import ast
import csv
import glob
import os
import re
from collections import Counter
from pathlib import Path

from engine.base import UserError, first_line, say_once

from readers.columns import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    IMAGE_TYPES,
    PACKED,
    SPLIT_NAMES,
    TABLES,
    VIDEO_COLUMNS,
    VIDEO_TYPES,
    WINDOW_COLUMNS,
    clean_list,
    folders_of,
    plain_names,
    split_of,
    split_words,
)

HELD_BY_FOLDERS = (*IMAGE_TYPES, *VIDEO_TYPES, "parquet", "csv", "jsonl", "arrow")


# Endings of pictures and videos that are not looked for: said, with their number, and not missed in silence.
NOT_READ = ("heic", "heif", "avif", "jxl", "svg", "psd", "dng", "cr2", "cr3", "nef", "arw", "raw", "exr", "dcm", "mts",
            "vob", "rm", "rmvb", "asf")


def check_folder(name, path, files):
    """Raises: UserError for a folder that no reader reads as meant. files: all below it."""
    check_utf8(name, path, files)
    check_links(name, path)
    endings = Counter(ending(f) for f in files)
    odd = {kind: endings[kind] for kind in NOT_READ if endings[kind]}
    if odd:
        kinds = ", ".join(f"{n:,} .{kind}" for kind, n in odd.items())
        words = f"{kinds} files are not read; convert them to jpg or mp4"
        if sum(odd.values()) == len(files):
            raise UserError(f"--dataset {name}: {words}")
        say_once(f"WARNING: {name}: {words}")
    pixels = [f for f in files if ending(f) in (*IMAGE_TYPES, *VIDEO_TYPES)]
    if len(pixels) > sum(endings[kind] for kind in ("parquet", "arrow", "csv", "jsonl")):  # else these are the data
        check_beside(name, path, pixels, files)
        check_depth(name, path, pixels)
    packed = [f for f in files if PACKED.search(f.name)]
    if packed and not any(ending(f) in HELD_BY_FOLDERS for f in files):
        raise UserError(f"--dataset {name}: {len(packed)} compressed tars and nothing else to read, first "
                        f"{min(packed)}: unpack them (gunzip), an index needs plain tars")


def ending(path):
    """'jpg' of a.JPG."""
    return Path(path).suffix.lower().lstrip(".")


def check_links(name, path):
    """Raises: UserError for a link to a folder below a data folder: what lies behind it would be missing."""
    below = (os.path.join(folder, x) for folder, names, _ in os.walk(path) for x in sorted(names))
    link = next((f for f in below if os.path.islink(f)), None)
    if link:
        raise UserError(f"--dataset {name}: {os.path.relpath(link, path)} is a link to a folder and is not followed: "
                        "what it holds would be missing; put the folder itself there (mount --bind, or cp -rL)")


def check_beside(name, path, pixels, files):
    """Raises: UserError where captions lie beside images or clips in files that are not looked into, so that the names
    of the folders would serve as captions. pixels: the images and clips among the files."""
    stems = {f.with_suffix("") for f in pixels}
    texts = [f for f in files if ending(f) in ("txt", "caption") and f.with_suffix("") in stems]
    if texts:
        raise UserError(f"--dataset {name}: {os.path.relpath(min(texts), path)} beside its image is not read; pack the "
                        f"folder into a tar, whose texts are (tar --sort=name -cf DIR/0.tar -C {path} .), and give DIR")
    tables = [f for f in files if ending(f) in TABLES and f.stem != "metadata" and _lists_captions(f)]
    if tables:
        table = min(tables)
        raise UserError(f"--dataset {name}: {os.path.relpath(table, path)} lists files and captions and is not read; "
                        "give it as --dataset, with --data-dir where its paths start, or call it metadata"
                        f"{table.suffix} in the folder where they start")


TABLES = tuple(kind.lstrip(".") for kind in TABLES)


def _lists_captions(file):
    """Does the beginning of a table name a column of images or videos and one of captions?"""
    if ending(file) == "parquet":
        import pyarrow.parquet
        try:
            names = pyarrow.parquet.read_schema(file).names
        except (OSError, ValueError):  # no parquet
            return False
    else:
        with open(file, encoding="utf-8-sig", errors="replace") as f:
            head = f.read(4096)
        fields = re.findall(r'"(\w+)"\s*:', head)  # of json
        names = fields if ending(file) in ("json", "jsonl") else re.split(r"[,;|\t]", head.partition("\n")[0])
    names = {n.strip().strip('"').lower() for n in names}
    return bool(names & {*IMAGE_COLUMNS, *VIDEO_COLUMNS} and names & {*CAPTION_COLUMNS})


def check_depth(name, path, pixels):
    """Raises: UserError where class folders hold folders: a class is called by the innermost, and cat/1 and dog/1 would
    be one class. Folders of splits, and one folder around all classes, are no such folders."""
    around = {}  # the folders around a class folder -> the first file there
    for f in pixels:
        parts = f.relative_to(path).parts
        if len(parts) > 1 and not any(part.startswith((".", "__")) for part in parts):
            place = tuple(part for part in parts[:-2] if not split_words(part))
            around[place] = min(around.get(place, f), f)
    if len(around) > 1:
        deep = os.path.relpath(around[max(around, key=len)], path)
        raise UserError(f"--dataset {name}: {deep} lies deeper than others, so that no one folder says its class; "
                        "put all images of a class into one folder, or list them in a metadata.csv (image, caption)")


def check_utf8(name, path, files):
    """Raises: UserError for a file below a folder whose name is no UTF-8, which no table can hold."""
    odd = next((f for f in files if re.search("[\ud800-\udfff]", str(f))), None)
    if odd:
        raise UserError(f"--dataset {name}: the name {ascii(os.path.relpath(odd, path))} is no UTF-8; rename it")


def check_split_names(name, names):
    """Where some files or folders name a split, all must: the others would be left out, or be taken for training.

    Raises: UserError with the names and the words that are known."""
    named = {n: bool(split_words(n)) for n in names}
    if any(named.values()) and not all(named.values()):
        odd = ", ".join(sorted(n for n, known in named.items() if not known)[:5])
        words = ", ".join(w for known in SPLIT_NAMES.values() for w in known)
        raise UserError(f"--dataset {name}: {odd} beside {', '.join(sorted(n for n in named if named[n])[:5])}: no "
                        f"split is called so ({words}); rename or remove it")


def check_splits(name, path, files, listed, opened):
    """Compares what `datasets` made of a folder, {word: table}, with what lies there: it takes words for splits.

    files, listed: all files below the folder, and the tables among them.
    Raises: UserError where it found other splits than the folders (or the tables) name, as of Train/ and Test/;
        where it passed images over, as all others when some are called test_007.png; where it took some twice."""
    hint = ("such words in names of files and folders, in lower case, are taken for splits; rename them, or list the "
            "images in a metadata.csv (file_name, caption)")
    kept, inside = set(folders_of(path)), [f.relative_to(path) for f in files]
    inside = [f for f in inside if len(f.parts) == 1 or f.parts[0] in kept]
    inside = [f for f in inside if not any(part.startswith((".", "__")) for part in f.parts)]  # hidden, or __MACOSX
    top, below = ({s for f in inside for part in f.parts[:-1][:n] for s in split_words(part)[:1]} for n in (1, None))
    named = top or below or {s for f in listed for s in split_words(f.stem)[:1]}
    found = {split_of(word) or word for word in opened}
    if named and named != found:
        raise UserError(f"--dataset {name}: its names say {', '.join(sorted(named))}, but {', '.join(sorted(found))} "
                        f"would be read: {hint}")
    images = sum(ending(f) in IMAGE_TYPES for f in inside)
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
    readers = {"README.md": lambda p: DatasetCard.load(p, ignore_metadata_errors=False).data.to_dict(),
               ".huggingface.yaml": lambda p: yaml.safe_load(p.read_text(encoding="utf8"))}
    for file, read in readers.items():
        try:  # as `datasets` reads it
            said = read(path / file) if (path / file).is_file() else None
        except Exception as error:
            raise UserError(f"--dataset {name}: its {file} cannot be read ({first_line(error)}); mend or remove "
                            "it") from error
        texts = [*_strings(said.get("configs") if isinstance(said, dict) else None, set())]
        if texts and glob.has_magic(str(path)):
            raise UserError(f"--dataset {name}: its {file} says which files are read, where `datasets` takes the [ ] * "
                            "? in this path for a pattern; rename the folder")
        for text in texts:
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
def check_csv(file, separator, spaced=False):
    """The line at which the last row begins; spaced: blanks stand behind the separators.

    Raises: UserError where the header is none or says a name twice, or where a row has more fields than the header or
        seems to hold others."""
    csv.field_size_limit(2**31 - 1)  # a caption of a megabyte is one
    with open(file, newline="", encoding="utf-8-sig") as f:
        rows = csv.reader(f, delimiter=separator, skipinitialspace=spaced)
        header = next(row for row in rows if row)
        _check_header(file, [c.strip() for c in header])
        begin, end = 1, rows.line_num
        for row in rows:
            begin, end = end + 1, rows.line_num
            _swallowed_rows(file, row, separator, begin)
            if len(row) > len(header):  # the reader would take the first column for an index, and shift the others
                raise UserError(f"--dataset {file}: line {end} has more fields than the header's {len(header)}; put "
                                "captions that hold a comma in quotes")
    return begin


def _check_header(file, header):
    """Raises: UserError where the first line of a csv is a row, or has one name for two columns."""
    types = IMAGE_TYPES + VIDEO_TYPES
    row = next((c for c in header if ending(c) in types or "://" in c), None)
    if row:
        raise UserError(f"--dataset {file}: its first line is a row ({row}) and no header; write one above it, such as "
                        "image,caption")
    twice = next((c for c, n in Counter(c.lower() for c in header if c).items() if n > 1), None)
    if twice:
        raise UserError(f"--dataset {file}: two columns are called {twice}, and one would be lost; rename it, or write "
                        "a row for each caption")


SPLIT_WORDS = {word for words in SPLIT_NAMES.values() for word in words}


def check_other_splits(name, table):
    """Raises: UserError where another column than `split` says which rows are for training and which for testing, or
    where `split` says it in numbers: all rows would be trained on."""
    hint = f"; say whose each row is in a column split ({', '.join(sorted(SPLIT_WORDS))}), or remove this one"
    for column in table.column_names:
        plain, first = column.strip().lower(), table.data.column(column)[0].as_py() if len(table) else None
        if plain == "split" and re.fullmatch(r"-?[0-9.]+|true|false", str(first).strip().lower()):
            raise UserError(f"--dataset {name}: its column {column} holds numbers ({first}), which name no split{hint}")
        if re.fullmatch(f"is_?({'|'.join(SPLIT_WORDS)})(_.*)?", plain):
            raise UserError(f"--dataset {name}: its column {column} is not read, all rows would be used alike{hint}")
        if plain == "split" or not isinstance(first, str) or first.strip().lower() not in SPLIT_WORDS:
            continue
        words = {str(w).strip().lower() for w in table.unique(column)}
        if words <= SPLIT_WORDS and len({split_of(w) for w in words}) > 1:
            raise UserError(f"--dataset {name}: its column {column} names splits ({', '.join(sorted(words))}) and is "
                            f"not read, so that test rows would be trained on; rename it to split, or remove it")


def check_cells(file, table, image, caption):
    """The texts of the caption column as lists, where they are lists that were written as text; else None.

    Raises: UserError where its images are on the web or have paths of Windows."""
    path = next((str(p) for p in table[image][:100] if isinstance(p, str) and p.strip()), "")
    if "://" in path:
        raise UserError(f"--image-column {image}: {file.name} holds addresses there ({path}), and nothing is fetched; "
                        "download the images first (img2dataset --output_format webdataset writes tars), then give "
                        "their folder")
    if "\\" in path and os.sep == "/" and not (file.parent / path).exists():
        raise UserError(f"--image-column {image}: {file.name} holds paths of Windows there ({path}); write / for each "
                        "\\, from beside the file or from --data-dir on")
    _say_captions(file, table, image, caption)
    quoted = re.compile(r"""\s*\[\s*['"].*['"]\s*,?\s*\]\s*""", re.DOTALL)  # ["a cat", "one more"]
    head = [t for t in table[caption][:100] if isinstance(t, str) and t.strip()]
    if not head or not all(quoted.fullmatch(t) for t in head):
        return None
    try:
        return [ast.literal_eval(t.strip()) if t and t.strip() else [] for t in table[caption][:]]
    except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"--caption-column {caption}: {file.name} holds lists written as text there, not all of them "
                        f"whole ({first_line(error)}); write a row for each caption, or a .jsonl") from error


def _say_captions(file, table, image, caption):
    """Says which of several columns the captions are, and how many rows have none where their image has others."""
    named = plain_names(table.column_names)
    others = [named[c] for c in CAPTION_COLUMNS if named.get(c, caption) != caption]
    if others:
        say_once(f"WARNING: {file.name}: the captions are its column {caption}, and {', '.join(others)} is not "
                 "read; --caption-column chooses")
    rows = [(str(x), bool(clean_list(t))) for x, t in zip(table[image][:], table[caption][:]) if x]
    with_one = {x for x, says in rows if says}
    lost = [x for x, says in rows if not says and x in with_one]
    if lost:
        say_once(f"WARNING: {file.name}: {len(lost):,} rows have no caption where others of their image have, "
                 f"first of {lost[0]}; is a separator missing there?")


def check_windows(file, table, image):
    """What looks like the window of a clip and has another name than WINDOW_COLUMNS: said.

    Raises: UserError where rows of one video differ in it: they would become captions of the whole video."""
    named = plain_names(table.column_names)
    odd = [c for c in table.column_names
           if set(re.split("[^a-z]+", c.lower())) & {"start", "begin", "end", "stop", "from", "to", "timestamps"}]
    if not odd or any(set(pair) <= set(named) for pair in WINDOW_COLUMNS):
        return
    known = " or ".join(", ".join(pair) for pair in WINDOW_COLUMNS)
    windows = dict(zip(map(str, table[image][:]), table[odd[0]][:]))
    if any(windows[str(v)] != w for v, w in zip(table[image][:], table[odd[0]][:])):
        raise UserError(f"--dataset {file}: rows of one video differ in {', '.join(odd)}, which is not read: all would "
                        f"be captions of the whole video; call the window's seconds {known}")
    say_once(f"WARNING: {file.name}: {', '.join(odd)} not read: each row stands for the whole file; windows "
             f"in seconds are called {known}")


def say_part(data, trained):
    """Says where an evaluation of other data than those that are trained on reads the part held out of them."""
    part = re.search("[0-9,]+ of its [0-9,]+ images, held out", data.note)
    if part and data.name != trained:
        say_once(f"WARNING: {data.name}: {data.split} is {part[0]} for it, a small gallery; call the file "
                 f"{data.split}{Path(data.name).suffix}, or give it a column split, to evaluate on all of it")


def _swallowed_rows(file, row, separator, begin):
    """Raises: UserError where a caption over several lines holds lines that look like rows of their own: what they
    begin or end with is a file as in this row, or called alike but for numbers. A quote was opened and not closed."""
    def kind(name):
        known = ending(name) in IMAGE_TYPES + VIDEO_TYPES
        return ending(name) if known else re.sub(r"[0-9]+", "0", name)
    for field in (f for f in row if "\n" in f):
        for number, line in enumerate(field.split("\n")[1:], start=1):
            ends = {line.partition(separator)[0]: row[0], line.rpartition(separator)[2]: row[-1]}
            alike = [name for name, own in ends.items() if own != field and kind(name.strip()) == kind(own)]
            if separator in line and alike and kind(alike[0]) not in ("", "0"):  # a number begins many a line
                raise UserError(f"--dataset {file}: a quote that opens in line {begin} swallows the rows after it, "
                                f"{alike[0]} in line {begin + number} is the first; close it, and write a quote inside "
                                'a caption as ""')
