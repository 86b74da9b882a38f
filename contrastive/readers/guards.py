"""Checks of users' own files: what would silently be read wrongly is refused, with a word on what to do.

sets/own.py runs them before it reads a folder or a table. Examples: only some file names are those of splits, a table
lies beside the images that it describes, a column other than `split` assigns rows to splits.
"""

import ast
import io
import os
import re
import tokenize
from collections import Counter
from pathlib import Path

from contrastive.engine.base import UserError, first_line, say_once
from contrastive.readers import columns

# Image and video types that are not read: a warning gives their number, so that they are not missing unnoticed.
NOT_READ = ("heic", "heif", "avif", "jxl", "svg", "psd", "dng", "cr2", "cr3", "nef", "arw", "raw", "exr", "dcm", "mts",
            "vob", "rm", "rmvb", "asf")
ARCHIVES = ("zip", "gz", "tgz", "bz2", "xz", "zst", "7z", "rar")  # not read either
ROWS = ("parquet", "arrow", "csv", "jsonl")  # a folder with more of these than images is a folder of tables


def check_folder(name, path, files):
    """The images and videos among a folder's files (all below it but the hidden ones); [] for a folder of tables.

    Raises: UserError for a folder that no reader would read as it is meant."""
    check_utf8(name, path, files)
    endings = Counter(columns.ending(f) for f in files)
    for kinds, mend in ((NOT_READ, "convert them to jpg or mp4"), (ARCHIVES, "unpack them")):
        odd = {kind: endings[kind] for kind in kinds if endings[kind]}
        words = f"{', '.join(f'{n:,} .{kind}' for kind, n in odd.items())} files are not read; {mend}"
        if kinds is NOT_READ and sum(odd.values()) == len(files):
            raise UserError(f"--dataset {name}: {words}")
        if odd:
            say_once(f"WARNING: {name}: {words}")
    from PIL import Image
    known = {end[1:] for end in Image.registered_extensions()} | {*columns.IMAGE_TYPES, *columns.VIDEO_TYPES}
    kinds = known - {*NOT_READ, "pdf"}
    pixels, tables = [f for f in files if columns.ending(f) in kinds], sum(endings[kind] for kind in ROWS)
    packed = [f for f in files if columns.PACKED.search(f.name)]
    if packed and not pixels and not tables:
        raise UserError(f"--dataset {name}: {len(packed)} compressed tars and nothing else to read, first "
                        f"{min(packed)}: unpack them (gunzip); only plain tars can be indexed")
    if len(pixels) <= tables and not any(map(columns.is_video, pixels)):
        check_card(name, path)
        return []
    check_beside(name, path, pixels, files)
    check_depth(name, path, pixels)
    return pixels


def say_not_read(name, files, instead):
    """Warns, by their endings, of the files of a folder that are left out because others are read instead."""
    endings = Counter(map(columns.ending, files))
    if endings:
        words = ", ".join(f"{n:,} .{kind}" for kind, n in sorted(endings.items()))
        say_once(f"WARNING: {name}: {words} files are not read, only {instead}; keep only the files that you mean")


def check_card(name, path):
    """Raises: UserError for a folder of save_to_disk, and for tables of several sets, which would be read as one."""
    if (path / "state.json").is_file():
        raise UserError(f"--dataset {name}: a folder of save_to_disk; give a folder with only its data-*.arrow files, "
                        "or write parquet (Dataset.to_parquet)")
    card = path / "README.md"
    known = re.findall(r"^ *- config_name: *(.+)", card.read_text("utf8", "replace"), re.M) if card.is_file() else []
    if len({*known}) > 1:
        raise UserError(f"--dataset {name}: its README.md lists several sets ({', '.join(sorted({*known}))}), which "
                        "would be mixed; put the files of the one that you mean into a folder of their own")


def check_links(name, path):
    """Raises: UserError for a link to a folder below a data folder: the files in it would be missing."""
    below = (os.path.join(folder, x) for folder, names, _ in os.walk(path) for x in sorted(names))
    link = next((f for f in below if os.path.islink(f)), None)
    if link:
        raise UserError(f"--dataset {name}: {os.path.relpath(link, path)} is a link to a folder and is not followed: "
                        "its files would be missing; put the folder itself there (mount --bind, or cp -rL)")


def check_beside(name, path, pixels, files):
    """Raises: UserError if captions lie beside images or clips in files that are not read: the folder names would then
    become the captions. pixels: the images and clips among the files."""
    stems = {f.with_suffix("") for f in pixels}
    texts = [f for f in files if columns.ending(f) in ("txt", "caption") and f.with_suffix("") in stems]
    if texts:
        raise UserError(f"--dataset {name}: {os.path.relpath(min(texts), path)} beside its image is read only from a "
                        f"tar; pack the folder (tar --sort=name -cf DIR/0.tar -C {path} .) and give --dataset DIR")
    tables = [f for f in files if columns.ending(f) in columns.TABLES and f.stem != "metadata" and _lists_captions(f)]
    if tables:
        table = min(tables)
        raise UserError(f"--dataset {name}: {os.path.relpath(table, path)} lists files and captions and is not read; "
                        "give it as --dataset, with --data-dir for the folder where its paths start, or call it "
                        f"metadata{table.suffix} in that folder")


def _lists_captions(file):
    """Whether a table's header names a column of images or videos and one of captions."""
    if columns.ending(file) == "parquet":
        import pyarrow.parquet
        try:
            names = pyarrow.parquet.read_schema(file).names
        except (OSError, ValueError):  # no parquet
            return False
    else:
        with open(file, encoding="utf-8-sig", errors="replace") as f:
            head = f.read(4096)
        fields = re.findall(r'"(\w+)"\s*:', head)  # of json
        names = fields if columns.ending(file) in ("json", "jsonl") else re.split(r"[,;|\t]", head.partition("\n")[0])
    names = {n.strip().strip('"').lower() for n in names}
    return bool(names & {*columns.IMAGE_COLUMNS, *columns.VIDEO_COLUMNS} and names & {*columns.CAPTION_COLUMNS})


def check_depth(name, path, pixels):
    """Raises: UserError if class folders hold subfolders: the innermost folder names the class, so that cat/1 and
    dog/1 would be one class. Split folders and one folder around all classes are allowed."""
    around = {}  # the folders above a class folder -> the first file there
    for f in pixels:
        parts = f.relative_to(path).parts
        if len(parts) > 1:
            place = tuple(part for part in parts[:-2] if not columns.split_words(part))
            around[place] = min(around.get(place, f), f)
    if len(around) > 1:
        deep = os.path.relpath(around[max(around, key=len)], path)
        raise UserError(f"--dataset {name}: {deep} lies deeper than others, so its class is not clear; put all images "
                        "of a class into one folder, or list them in a metadata.csv (image, caption)")


def check_utf8(name, path, files):
    """Raises: UserError for a path that is not UTF-8, which no table can hold."""
    odd = next((f for f in files if re.search("[\ud800-\udfff]", str(f))), None)
    if odd:
        raise UserError(f"--dataset {name}: the name {ascii(os.path.relpath(odd, path))} is not UTF-8; rename it")


def check_split_names(name, names):
    """If some files or folders are named after splits, all must be: the others would be left out or trained on.

    Raises: UserError with these names and the split names that are recognised."""
    named = {n: bool(columns.split_words(n)) for n in names}
    if any(named.values()) and not all(named.values()):
        odd = ", ".join(sorted(n for n, known in named.items() if not known)[:5])
        raise UserError(f"--dataset {name}: {odd} beside {', '.join(sorted(n for n in named if named[n])[:5])}: not a "
                        f"name of a split ({', '.join(columns.SPLIT_WORDS)}); rename or remove it")


def split_files(name, words):
    """{split: files} of {file: the word that may name its split}; without any such word all files are train."""
    check_split_names(name, {*words.values()} - {""})
    of = {f: columns.split_of(word) or "train" for f, word in words.items()}
    return {split: [f for f in of if of[f] == split] for split in columns.SPLIT_NAMES if split in of.values()}


# ======================================================= tables ======================================================
def check_other_splits(name, table):
    """Raises: UserError if a column other than `split` assigns rows to splits, or if `split` does so by numbers: all
    rows would be trained on."""
    hint = f"; name each row's split in a column split ({', '.join(sorted(columns.SPLIT_WORDS))}), or remove this one"
    for column in table.column_names:
        plain, first = column.strip().lower(), table.data.column(column)[0].as_py() if len(table) else None
        if plain == "split" and re.fullmatch(r"-?[0-9.]+|true|false", str(first).strip().lower()):
            raise UserError(f"--dataset {name}: its column {column} holds numbers ({first}), which name no split{hint}")
        if re.fullmatch(f"is_?({'|'.join(columns.SPLIT_WORDS)})(_.*)?", plain):
            raise UserError(f"--dataset {name}: its column {column} is not read, test rows would be trained on{hint}")
        if plain == "split" or not isinstance(first, str) or first.strip().lower() not in columns.SPLIT_WORDS:
            continue
        words = {str(w).strip().lower() for w in table.unique(column)}
        if words <= {*columns.SPLIT_WORDS} and len({columns.split_of(w) for w in words}) > 1:
            raise UserError(f"--dataset {name}: its column {column} names splits ({', '.join(sorted(words))}) and is "
                            f"not read: test rows would be trained on; rename it to split, or remove it")


def check_split_folders(name, table, image):
    """Raises: UserError if a table that names no splits lists files in the folders of several: test images would be
    trained on."""
    if "string" not in getattr(table.features[image], "dtype", ""):
        return
    folders = {os.path.dirname(str(path)) for path in table[image][:]}
    words = {columns.split_and_class(Path(folder) / "file")[0] for folder in folders} - {""}
    if len({columns.split_of(word) for word in words}) > 1:
        raise UserError(f"--dataset {name}: its files lie in folders of several splits ({', '.join(sorted(words))}), "
                        "and it has no column split: test images would be trained on; add that column")


def check_cells(file, table, image, caption):
    """The caption column parsed into lists, if its cells are lists written as text ("['a', 'b']"); else None.

    Raises: UserError if the images are URLs or have Windows paths."""
    path = next((str(p) for p in table[image][:100] if isinstance(p, str) and p.strip()), "")
    if "://" in path:
        raise UserError(f"--image-column {image}: {file.name} holds URLs there ({path}), and nothing is downloaded; "
                        "download the images first (img2dataset --output_format webdataset writes tars), then give "
                        "their folder")
    if "\\" in path and os.sep == "/" and not (file.parent / path).exists():
        raise UserError(f"--image-column {image}: {file.name} holds Windows paths there ({path}); write / for each \\, "
                        "and make the paths relative to the file's folder or to --data-dir")
    _say_captions(file, table, image, caption)
    quoted = re.compile(r"""\s*\[\s*(['"].*['"]\s*,?\s*)?\]\s*""", re.DOTALL)  # ["a cat", "one more"] or []
    head = [t for t in table[caption][:100] if isinstance(t, str) and t.strip()]
    if not head or not all(quoted.fullmatch(t) for t in head):
        return None
    for cell in filter(None, table[caption][:]):
        if re.search(r"""['"]\s+['"]""", cell) and _lacks_commas(cell):
            raise UserError(f"--caption-column {caption}: {file.name} holds lists without commas there, as numpy "
                            f"writes them ({cell[:60]!r}); captions would be glued together; write a .jsonl, or use "
                            "tolist() first")
    try:
        return [ast.literal_eval(t.strip()) if t and t.strip() else [] for t in table[caption][:]]
    except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"--caption-column {caption}: {file.name} holds lists written as text there, and one cannot be "
                        f"parsed ({first_line(error)}); write a row for each caption, or a .jsonl") from error


def _lacks_commas(cell):
    """Whether two strings follow each other in Python's notation of a list: it would make them one."""
    try:
        kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(cell.strip()).readline)]
    except (tokenize.TokenError, SyntaxError):
        return False  # the parser will say what is wrong
    kinds = [kind for kind in kinds if kind not in (tokenize.NL, tokenize.NEWLINE)]
    return (tokenize.STRING, tokenize.STRING) in zip(kinds, kinds[1:])


def _say_captions(file, table, image, caption):
    """Warns which of several text columns is used, and how many rows lack a caption although their image has others."""
    named = columns.plain_names(table.column_names)
    others = [named[c] for c in columns.CAPTION_COLUMNS if named.get(c, caption) != caption]
    if others:
        say_once(f"WARNING: {file.name}: captions are read from its column {caption}, and {', '.join(others)} is not "
                 "read; --caption-column chooses another")
    rows = [(str(x), bool(columns.clean_list(t))) for x, t in zip(table[image][:], table[caption][:]) if x]
    with_one = {x for x, says in rows if says}
    lost = [x for x, says in rows if not says and x in with_one]
    if lost:
        say_once(f"WARNING: {file.name}: {len(lost):,} rows have no caption while other rows of their image have one, "
                 f"first of {lost[0]}; is a separator missing there?")


def check_windows(file, table, image):
    """Warns of columns that look like a clip's start and end but are not named as in columns.WINDOW_COLUMNS.

    Raises: UserError if rows of one video differ in them: each would become a caption of the whole video."""
    named = columns.plain_names(table.column_names)
    odd = [c for c in table.column_names
           if set(re.split("[^a-z]+", c.lower())) & {"start", "begin", "end", "stop", "from", "to", "timestamps"}]
    if not odd or any(set(pair) <= set(named) for pair in columns.WINDOW_COLUMNS):
        return
    known = " or ".join(", ".join(pair) for pair in columns.WINDOW_COLUMNS)
    windows = dict(zip(map(str, table[image][:]), table[odd[0]][:]))
    if any(windows[str(v)] != w for v, w in zip(table[image][:], table[odd[0]][:])):
        raise UserError(f"--dataset {file}: rows of one video differ in {', '.join(odd)}, which is not read: all would "
                        f"be captions of the whole video; name the columns of start and end seconds {known}")
    say_once(f"WARNING: {file.name}: {', '.join(odd)} not read: each row stands for the whole file; columns of "
             f"start and end seconds are called {known}")


def say_part(data, trained):
    """Warns if an evaluation on data other than the training data reads only a held-out part of them."""
    part = re.search("[0-9,]+ of its [0-9,]+ (images|videos|rows), held out", data.note)
    if part and data.name != trained:
        say_once(f"WARNING: {data.name}: {data.split} is only {part[0]} for it; to evaluate on all of it, call the "
                 f"file {data.split}{Path(data.name).suffix}, or give it a column split")
