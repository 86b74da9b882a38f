"""Open Clip Art 0.18: drawings in the public domain, with the titles and keywords that people gave
them, from two Debian packages.

    cd DIR
    apt-get download openclipart-png openclipart-svg      # 131 and 25 MB; on Debian and Ubuntu
    for f in *.deb; do ar p $f data.tar.xz | tar xJ; done

Elsewhere the two .deb files are at http://deb.debian.org/debian/pool/main/o/openclipart/. Then
`--dataset openclipart --data-dir DIR`. The first run scales the drawings to 128 pixels, which takes
some minutes, and keeps them in DIR/openclipart-128.npz.

The caption of a drawing is its title and its keywords. A title that more than three drawings share
is that of a collection, and the words of the file name take its place. Left out are series that a
program made, drawings that show a file which is not there ("Linked image not found"), those whose
caption or picture repeats an earlier one, pictures of one colour, those of more than 16 million
pixels (19, of up to 623 million, which would take gigabytes of memory), and files that cannot be
read. The label is the folder, a sub-category; the column `category` is the folder at the top.

Drawings that look alike are on one side of the split: 1,000 for test, 1,000 for val, the others for
train.
"""

import collections
import os
import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from contrastive.core.files import whole_file
from contrastive.core.processes import UserError, opening, print_main
from contrastive.data.pixels import decode
from contrastive.data.table import Data, make_table
from contrastive.data.views import key_hash

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as transforms

SIZE = 128  # pixels of a side
MAX_PIXELS = 16_000_000  # largest png file that is read
HELD_OUT = {"test": 1000, "val": 1000}  # drawings
TEMPLATES = ("clip art of {}", "a drawing of {}", "picture: {}", "an illustration of {}")
MAX_SAME_TITLE = 3  # drawings with one title; a title of more is that of a collection
# Series that a program made: stars with n points, gradients, decks of cards, pieces, digits.
MACHINE_MADE = ("shapes/stars/", "special/gradients/", "recreation/games/cards/", "shapes/jigsaw/",
                "signs_and_symbols/led/")
# A picture in a file of its own, which the packages do not have.
LINKED_IMAGE = re.compile(rb"""<(?:\w+:)?image\b[^>]*?\bhref\s*=\s*["'](?!data:)""")
# Left by the programs of the collection, and addresses of its artists.
NOT_A_KEYWORD = re.compile(r"|unsorted|hash(\(.*)?|.*(://|@).*", re.DOTALL)
SHAPE_SIZE = 16  # pixels of a side of the small pictures that are compared
ALIKE = 0.97  # cosine of two small pictures from which drawings look alike


class Drawing(NamedTuple):
    """What the files say of a drawing."""

    key: str  # path below png/, without its ending
    title: str
    keywords: list


def load(name, split, options):
    """One split of the data set, (M, 3, 128, 128) uint8 in memory."""
    if not options.data_dir:
        raise UserError("--dataset openclipart needs --data-dir, a folder in which the Debian "
                        "packages openclipart-png and openclipart-svg are unpacked; the first "
                        "lines of contrastive/data/openclipart.py have the commands")
    folder = Path(options.data_dir).expanduser()
    archive = folder / f"openclipart-{SIZE}.npz"
    with opening(archive):
        if not archive.exists():
            make_archive(folder, archive)
        content = np.load(archive)
        keys, captions, groups = content["keys"], content["captions"], content["groups"]
        rows = choose_rows(keys, groups)[split]
        pixels = content["pixels"][rows]                                    # (M, 3, S, S)
    sub_categories = [key.rpartition("/")[0] for key in keys]
    categories = [key.partition("/")[0] for key in keys]
    classes = {"label": sorted(set(sub_categories)), "category": sorted(set(categories))}
    table = make_table(
        [[captions[row]] for row in rows], [keys[row] for row in rows], classes=classes,
        label=[classes["label"].index(sub_categories[row]) for row in rows],
        category=[classes["category"].index(categories[row]) for row in rows])
    return Data(name, split, table, pixels=torch.from_numpy(pixels), templates=TEMPLATES)


# ---- from the packages to one file ----
def make_archive(folder, path):
    """Reads all drawings, scales them and writes them to one file."""
    root = folder / "usr" / "share" / "openclipart"
    drawings = select_drawings(list(read_titles(root)))
    print_main(f"openclipart: {len(drawings):,} drawings are scaled to {SIZE} pixels, once: {path}")
    keys, captions, pixels = [], [], []
    contents = set()  # bytes of pictures
    for drawing, caption in drawings:
        try:
            picture = read_picture(root / "png" / f"{drawing.key}.png")     # (3, H, W)
        except Exception:  # reading one sample: left out, and counted below
            continue
        picture = scale(picture)                                            # (3, S, S)
        content = picture.numpy().tobytes()
        if content in contents or picture.flatten(1).unique(dim=1).shape[1] == 1:
            continue
        contents.add(content)
        keys.append(drawing.key)
        captions.append(caption)
        pixels.append(picture)
    if not keys:
        raise UserError(f"no drawing is below {root}")
    print_main(f"openclipart: {len(drawings) - len(keys)} pictures are left out: repeated, of one "
               "colour, too large, or no whole file")
    pixels = torch.stack(pixels)                                            # (M, 3, S, S)
    with whole_file(path, f".{os.getpid()}.tmp") as temporary, open(temporary, "wb") as file:
        np.savez(file, keys=keys, captions=captions, pixels=pixels.numpy(),
                 groups=groups_of_similar(pixels))


def read_picture(path):
    """(3, H, W) uint8 of a png file. Raises ValueError for more than MAX_PIXELS."""
    with Image.open(path) as header:
        width, height = header.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels")
    return decode(path)


def read_titles(root):
    """Yields a Drawing for each svg file that has a png file of the same name and shows no other
    file."""
    for path in sorted((root / "svg").rglob("*.svg")):
        key = path.relative_to(root / "svg").with_suffix("").as_posix()
        has_picture = (root / "png" / f"{key}.png").exists()
        if has_picture and not LINKED_IMAGE.search(path.read_bytes()):
            yield read_title(path, key)


def read_title(path, key):
    """The Drawing of an svg file, from its metadata."""
    for _, work in ElementTree.iterparse(path):
        if not work.tag.endswith("}Work"):
            continue
        title, keywords = "", []
        for field in work:
            if field.tag.endswith("}title"):
                title = field.text or ""
            elif field.tag.endswith("}subject"):
                keywords = [item.text or "" for item in field.iter() if item.tag.endswith("}li")]
        return Drawing(key, title.strip(), keywords)
    return Drawing(key, "", [])


def select_drawings(drawings):
    """[(Drawing, caption)] without the series of a program and without repeated captions."""
    same_title = collections.Counter(drawing.title for drawing in drawings)
    selected = {}  # {parts of the caption in any order: (Drawing, caption)}, the first of each
    for drawing in drawings:
        if drawing.key.startswith(MACHINE_MADE):
            continue
        title = drawing.title
        if not title or same_title[title] > MAX_SAME_TITLE:
            title = Path(drawing.key).name
        caption = make_caption(title, drawing.keywords)
        selected.setdefault(frozenset(caption.lower().split(", ")), (drawing, caption))
    return list(selected.values())


def make_caption(title, keywords):
    """'Brazil Flag, flags, brazil, national' of a title and keywords."""
    title = re.sub(r"^Clipart by Nicu Buculei - ", "", title)
    title = re.sub(r"[\d_.+-]+", " ", title)
    words = [re.sub(r"\s+", " ", title).strip()]
    for keyword in keywords:
        keyword = keyword.replace("_", " ").strip().lower()
        if keyword not in words and not NOT_A_KEYWORD.fullmatch(keyword):
            words.append(keyword)
    return ", ".join(word for word in words if word)


def scale(picture):
    """(3, H, W) -> (3, 128, 128): smaller if it is larger, in the middle of a white square."""
    height, width = picture.shape[-2:]
    factor = min(1.0, SIZE / max(height, width))
    height, width = max(1, round(height * factor)), max(1, round(width * factor))
    picture = transforms.resize(picture, [height, width], antialias=True)
    left, top = (SIZE - width) // 2, (SIZE - height) // 2
    edges = [left, top, SIZE - width - left, SIZE - height - top]
    return transforms.pad(picture, edges, fill=255)


# ---- the split ----
def groups_of_similar(pixels):
    """(M,) number of each drawing's group: those that look alike, also through others.

    Compared are the parts of the pictures that are not white, at 16 x 16 pixels and without their
    mean. Args: pixels: (M, 3, S, S) uint8.
    """
    shapes = torch.stack([shape_of(picture).flatten() for picture in pixels])         # (M, 768)
    shapes = shapes - shapes.mean(1, keepdim=True)
    shapes = torch.nn.functional.normalize(shapes, dim=1)
    groups = np.arange(len(shapes))                                         # (M,)
    for row, shape in enumerate(shapes):
        similar = (shapes[:row] @ shape > ALIKE).numpy()                    # (row,)
        joined = np.isin(groups, groups[:row][similar])
        groups[joined] = row
    return groups


def shape_of(picture):
    """(3, S, S) uint8 -> (3, 16, 16) float: what is not white, scaled to a square."""
    inked = (picture < 245).any(0)                                          # (S, S)
    rows, columns = inked.any(1).nonzero().flatten(), inked.any(0).nonzero().flatten()
    if len(rows):
        picture = picture[:, rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]
    return transforms.resize(picture.float(), [SHAPE_SIZE, SHAPE_SIZE], antialias=True)


def choose_rows(keys, groups):
    """{split: rows}: whole groups in the order of a hash, 1,000 drawings for test and for val.

    A group that is larger than what a split lacks is passed on to the next split.
    """
    members = collections.defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    in_order = sorted(members.values(), key=lambda rows: key_hash(f"openclipart {keys[rows[0]]}"))
    splits = {"test": [], "val": [], "train": []}
    for rows in in_order:
        for split, rows_of_split in splits.items():
            if len(rows_of_split) + len(rows) <= HELD_OUT.get(split, len(keys)):
                rows_of_split.extend(rows)
                break
    return {split: sorted(rows) for split, rows in splits.items()}
