"""Published files of captions that are no table with a row an image: read as one.

COCO's captions_train2017.json (images, and annotations by their ids), Karpathy's dataset_coco.json, _flickr30k.json and
_flickr8k.json (images with sentences and a split), and the lines `name.jpg#0<tab>caption` of Flickr's .token files.
"""

import functools
import json
import os
import re

from engine.base import UserError, first_line

TOKEN = re.compile(r"([^\t]+\.\w+)#[0-9]+\t(.*)")  # 1000092795.jpg#0<tab>Two young guys ...


def read(file):
    """[{image, captions[, split]}] of such a file (Path), None for any other. Raises: UserError where one is broken."""
    if file.suffix.lower() not in (".json", ".token", ".txt", ".tsv", ".csv"):
        return None
    stat = os.stat(file)
    return _read(file, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read(file, size, changed):
    try:
        with open(file, encoding="utf-8-sig") as f:
            first = f.readline()
            if file.suffix.lower() != ".json":
                return _tokens(file, [first, *f]) if TOKEN.match(first) else None
            content = json.loads(first + f.read()) if first.lstrip()[:1] == "{" else None
    except UserError:
        raise
    except (ValueError, RecursionError):  # no json, or a row a line: whoever reads tables says it
        return None
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return None
    try:
        return _coco(content) if "annotations" in content else _karpathy(content["images"])
    except (KeyError, TypeError, AttributeError) as error:
        known = "file_name, id and image_id, caption" if "annotations" in content else "filename, sentences, split"
        raise UserError(f"--dataset {file}: its images and annotations are not as in COCO's or Karpathy's files of "
                        f"captions ({known}): {type(error).__name__} {first_line(error)}") from error


def _tokens(file, lines):
    captions = {}
    for number, line in enumerate(lines, start=1):
        match = TOKEN.match(line)
        if not match and line.strip():
            raise UserError(f"--dataset {file}: line {number} is not as the others, name.jpg#0<tab>caption")
        if match:
            captions.setdefault(match[1], []).append(match[2])
    return [{"image": image, "captions": texts} for image, texts in captions.items()]


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
