"""Reads a file of paths and captions as a table: csv in its many variants, json(l) and parquet. It also reads
published files of other layouts: COCO's captions_train2017.json (images, and annotations by image id), Karpathy's
dataset_coco.json, _flickr30k.json and _flickr8k.json (images with sentences and a split), and Flickr's .token files
with lines `name.jpg#0<tab>caption`.
"""

import csv
import glob
import itertools
import json
import os
import re
from collections import Counter

from contrastive.engine.base import UserError, first_line, hub_reason
from contrastive.readers.columns import IMAGE_TYPES, VIDEO_TYPES, ending, open_table, table_words

TOKEN = re.compile(r"([^\t]+\.\w+)#[0-9]+\t(.*)")  # 1000092795.jpg#0<tab>Two young guys ...
KINDS = {"parquet": "parquet", "csv": "csv", "jsonl": "json", "json": "json", "arrow": "arrow"}  # the reader of each
END = "\0"  # a line appended to the file: it ends up inside a field if a quote is never closed


def read_table(file):
    """The table in a file (Path). Raises: UserError with what is wrong in it, and where."""
    import datasets
    if ending(file) == "json" and (rows := _published(file)):
        return datasets.Dataset.from_list(rows)
    kind = KINDS.get(ending(file), "csv")
    if kind != "csv":
        return open_table(kind, file, data_files=glob.escape(str(file)), split="train")
    try:
        return datasets.Dataset.from_dict(_read_csv(file))
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"--dataset {file}: {table_words(error, error) or hub_reason(error)}") from error


def read_csv_files(name, files):
    """One table of csv files with the same columns. All cells stay text, as those of one file do."""
    import datasets
    tables = [read_table(file) for file in files]
    named = [{c.strip().lower(): c for c in table.column_names} for table in tables]  # Image is image
    for file, of in zip(files, named):
        if of.keys() != named[0].keys():
            raise UserError(f"--dataset {name}: {file.name} has the columns {', '.join(of)}, and {files[0].name} "
                            f"{', '.join(named[0])}; give all csv files of a split the same ones")
    return datasets.concatenate_datasets([table.rename_columns({of[c]: named[0][c] for c in of})
                                          for table, of in zip(tables, named)])


def _published(file):
    """[{image, captions[, split]}] of a json file in COCO's or Karpathy's layout; None for any other. Raises:
    UserError if such a file is broken."""
    try:
        with open(file, encoding="utf-8-sig") as f:
            first = f.readline()
            content = json.loads(first + f.read()) if first.lstrip()[:1] == "{" else None
    except (ValueError, RecursionError, OSError):  # no json, or jsonl: the table reader will report errors
        return None
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return None
    try:
        return _coco(content) if "annotations" in content else _karpathy(content["images"])
    except (KeyError, TypeError, AttributeError) as error:
        known = "file_name, id and image_id, caption" if "annotations" in content else "filename, sentences, split"
        raise UserError(f"--dataset {file}: its images and annotations do not have the layout of COCO's or Karpathy's "
                        f"caption files ({known}): {type(error).__name__} {first_line(error)}") from error


def _coco(content):
    captions = {image["id"]: [] for image in content["images"]}
    for note in content["annotations"]:
        captions[note["image_id"]].append(note["caption"])
    return [{"image": image["file_name"], "captions": captions[image["id"]]} for image in content["images"]]


def _karpathy(images):
    if not images or "sentences" not in images[0]:
        return None
    return [{"image": os.path.join(image.get("filepath", ""), image["filename"]),
             "captions": [sentence["raw"] for sentence in image["sentences"]], "split": image["split"]}
            for image in images]


def _read_csv(file):
    """{column: texts} of a csv, or of a .token file. All cells stay text (000, NA); a short row is filled with "".

    Raises: UserError if there is no header, two columns share a name, a row has more fields than the header, or one
        seems to contain other rows; UnicodeDecodeError and OSError."""
    csv.field_size_limit(2**31 - 1)  # allow captions of a megabyte
    with open(file, newline="", encoding="utf-8-sig") as f:
        first = next((line for line in f if line.strip()), "")
        if "\0" in first:
            raise UserError(f"--dataset {file}: not UTF-8 text (it holds zeros); save it as UTF-8")
        if TOKEN.match(first):
            return _tokens(file, [first, *f])
        separator = next((s for s in ("\t,;|" if ending(file) == "tsv" else ",\t;|") if s in first), ",")
        spaced = separator + " " in first and separator == ","  # `image, caption`: a quote may follow the blank
        f.seek(0)
        rows = csv.reader(itertools.chain(f, [END]), delimiter=separator, skipinitialspace=spaced)
        header = next(row for row in rows if "".join(row).strip())
        _check_header(file, [c.strip() for c in header])
        columns = {c or f"Unnamed: {i}": [] for i, c in enumerate(header)}  # a nameless column is an index
        begin, end = 1, rows.line_num
        for row in rows:
            begin, end = end + 1, rows.line_num
            if row == [END]:
                break
            _swallowed_rows(file, row, separator, begin)
            if len(row) > len(header):
                raise UserError(f"--dataset {file}: line {end} has more fields than the header's {len(header)}; put "
                                "captions with a comma in quotes")
            if "".join(row).strip() or len(row) > 1:
                for texts, text in itertools.zip_longest(columns.values(), row, fillvalue=""):
                    texts.append(text)
        else:
            if header != [END]:
                raise UserError(f"--dataset {file}: a quote in the row that begins at line {begin} is never closed; "
                                'close it, and write a quote inside a caption as ""')
    if not any(columns.values()):
        raise UserError(f"--dataset {file}: it has no rows")
    return columns


def _check_header(file, header):
    """Raises: UserError if the first line of a csv is a row, or gives two columns the same name."""
    types = IMAGE_TYPES + VIDEO_TYPES
    row = next((c for c in header if ending(c) in types or "://" in c), None)
    if row:
        raise UserError(f"--dataset {file}: its first line is a row ({row}), not a header; write a header above it, "
                        "such as image,caption")
    twice = next((c for c, n in Counter(c.lower() for c in header if c).items() if n > 1), None)
    if twice:
        raise UserError(f"--dataset {file}: two columns are called {twice}, and one would be lost; rename it, or write "
                        "a row for each caption")


def _swallowed_rows(file, row, separator, begin):
    """Raises: UserError if a caption of several lines contains lines that look like rows, because a quote was never
    closed: such a line begins or ends with a file of this row's type, or with this row's name but for its numbers."""
    def kind(name):
        known = ending(name) in IMAGE_TYPES + VIDEO_TYPES
        return ending(name) if known else re.sub(r"[0-9]+", "0", name)
    for field in (f for f in row if "\n" in f):
        for number, line in enumerate(field.split("\n")[1:], start=1):
            ends = {line.partition(separator)[0]: row[0], line.rpartition(separator)[2]: row[-1]}
            alike = [name for name, own in ends.items() if own != field and kind(name.strip()) == kind(own)]
            if separator in line and alike and kind(alike[0]) not in ("", "0"):  # many lines begin with a number
                raise UserError(f"--dataset {file}: a quote that opens in line {begin} swallows the rows after it, "
                                f"first {alike[0]} in line {begin + number}; close it, and write a quote inside "
                                'a caption as ""')


def _tokens(file, lines):
    """{image, captions} of lines name.jpg#0<tab>caption."""
    captions = {}
    for number, line in enumerate(lines, start=1):
        match = TOKEN.match(line)
        if not match and line.strip():
            raise UserError(f"--dataset {file}: line {number} does not have the form name.jpg#0<tab>caption")
        if match:
            captions.setdefault(match[1], []).append(match[2])
    return {"image": list(captions), "captions": list(captions.values())}
