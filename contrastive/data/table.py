"""One split of a data set: a table with a row per example, and how its pixels are read. A damaged image is an error and
never yields grey pixels."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import warnings
from pathlib import Path

from contrastive.data.views import uniforms
from contrastive.engine.processes import UserError

import numpy as np
import torch
from PIL import Image, ImageOps

Image.MAX_IMAGE_PIXELS = 89_478_485  # Pillow warns above this number and refuses twice as many
warnings.filterwarnings("ignore", module="PIL")
IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif", "jp2", "ppm", "pgm")
VIDEO_TYPES = ("mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts", "m2ts", "wmv", "flv", "ogv", "3gp")
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
          "test": "test", "testing": "test"}  # words for a split -> ours
IN_MEMORY = 2**18  # rows whose captions and keys are kept as Python lists; larger tables are read row by row
COMMITS = {}  # {repository: commit} of what this process has read from the hub or its cache, for summary.json


class EmptySplit(UserError):
    """An evaluation split that the data do not have, or for which no row was held out."""


@dataclasses.dataclass
class Data:
    """Columns of the table: source (struct of path or bytes; offset and size inside a tar; start and end in seconds),
    captions (list of str), key, and where the set has them label (ClassLabel), group (rows of one group are positives
    of each other), verb, noun, question (None in rows of --extra-pairs), answer, choices, question_type, pair."""
    name: str
    split: str
    table: object                     # datasets.Dataset
    pixels: torch.Tensor = None       # (M, [T,] 3, H, W) uint8 if the whole split is in memory
    clip: object = None               # how a video becomes frames (clips.py); None for images
    note: str = ""                    # what was left out or held out, for the banner
    templates: tuple = ()             # formats around a caption that serve as paraphrases, "a drawing of {}"
    prompts: tuple = None             # zero-shot templates with {c}
    has_captions: bool = True         # False if class names take their place
    grouped: bool = False             # video -> text ranks videos by their best caption (MSVD's protocol)
    same_text: str = "positive"       # of a text that repeats one of the item's own, another's; or wrong
    max_captions: int = 0             # captions of an example used in evaluation; 0 = all
    shards: np.ndarray = None         # (M,) number of the tar of each row
    rows: np.ndarray = None           # (M,) row numbers in the table that was opened first
    which: np.ndarray = None          # (M,) number of the one caption of each row, after unfold()
    sentences: object = None          # the texts that multi-instance retrieval ranks, and relevancies (epic.py)
    caption_relevancy: float = 0.0    # training draws among the sentences above this relevancy; 0 = own captions
    own: object = None                # the set's own rows, which come first, if --extra-pairs added others
    streamed = False                  # stream.Stream answers True

    def __post_init__(self):
        inside = "source" in self.table.column_names
        self.texts = self.table.remove_columns("source") if inside else self.table  # a caption reads no image bytes
        self.sources = self.table.select_columns("source") if inside else None
        self.rows = np.arange(len(self.table)) if self.rows is None else self.rows
        self.columns, self.features = {}, self.texts.features  # asking the table for these copies them each time
        self.label_names = getattr(self.features.get("label"), "names", None)

    def __len__(self):
        return len(self.table)

    examples = property(__len__)  # of an epoch; a stream may have to guess

    def column(self, name):
        """A whole column: numbers as an array (M,), anything else as a list; None where the set has no such column."""
        if name not in self.texts.column_names:
            return None
        if name not in self.columns:
            values, kind = self.texts[name][:], getattr(self.features[name], "dtype", "list")
            self.columns[name] = values if kind in ("list", "string", "large_string") else np.asarray(values, kind)
        return self.columns[name]

    def names(self, column):
        """Class names of a column; None where it has none."""
        return getattr(self.features.get(column), "names", None)

    labels = property(lambda self: self.column("label"))  # (M,) class of each row, -1 = unknown; None without classes

    @property
    def groups(self):
        """(M,) ids: rows of one group are positives of each other; each row for itself where the set has no groups."""
        return self.rows if self.column("group") is None else self.column("group")

    def cell(self, column, i):
        """The value of one column in row i."""
        return self.column(column)[i] if len(self) <= IN_MEMORY else self.texts[int(i)][column]

    def captions(self, i):
        """The captions of row i; its pixels are not read."""
        captions = self.cell("captions", i)
        return captions if self.which is None else [captions[self.which[i]]]

    def training_captions(self, i, seed, epoch, number):
        """The captions of row i; with caption_relevancy one relevant sentence, drawn for sample `number`."""
        if not self.caption_relevancy:
            return self.captions(i)
        u = uniforms(seed, epoch, [number], 1, stream=98)[0, 0]
        drawn = self.sentences.draw(int(self.rows[i]), self.caption_relevancy, u)
        return self.captions(i) if drawn is None else [drawn]

    def key(self, i):
        """The name of row i: it does not change with the split or with other rows."""
        return self.cell("key", i)

    def read(self, i, draws=None):
        """Image (3, H, W) or clip (T, 3, H, W), uint8; draws (T,) place random frames. Raises what a reader raises."""
        if self.pixels is not None:
            return self.pixels[i]
        return self.read_source(self.sources[int(i)]["source"], draws)

    def read_source(self, source, draws=None):
        """As `read`, of a cell of the column source."""
        content = source.get("bytes") or source["path"]
        if source.get("size") is not None:
            content = part_of(source["path"], source["offset"], source["size"])
        return self.clip(content, source.get("start"), source.get("end"), draws) if self.clip else decode(content)

    def __getitem__(self, i):
        more = {c: self.column(c)[i] for c in self.texts.column_names if c not in ("captions", "key", "group")}
        return {"pixels": self.read(i), "captions": self.captions(i), "key": self.key(i)} | more

    def select(self, rows, split=None):
        """The same data set with only these rows, in this order; a row may come twice."""
        rows = np.asarray(rows, dtype=None if len(rows) else np.int64)  # numpy takes an empty list for floats
        cut = {k: v[rows] for k in ("rows", "which", "shards") if (v := getattr(self, k)) is not None}
        pixels = None if self.pixels is None else self.pixels[torch.from_numpy(rows)]
        table = self.table.select(rows)
        return dataclasses.replace(self, split=split or self.split, table=table, pixels=pixels, own=None, **cut)

    def unfold(self):
        """One example for each (image or clip, caption), as CLIP4Clip on MSR-VTT: a batch may hold a clip twice."""
        batches = self.texts.select_columns("captions").iter(10_000)
        of_row = np.array([len(captions) for batch in batches for captions in batch["captions"]])  # (M,)
        rows, which = np.repeat(np.arange(len(self)), of_row), np.concatenate([np.arange(n) for n in of_row])
        return dataclasses.replace(self.select(rows), which=which)

    def folded(self):
        """One row for each image or clip, what unfold() makes several of."""
        if self.which is None:
            return self
        return dataclasses.replace(self.select(np.flatnonzero(self.which == 0)), which=None)

    def in_memory(self, limit=96):
        """The same examples, with pixels in one uint8 tensor if they are small and all of one size; else unchanged."""
        try:
            if self.pixels is None and max(self.read(0).shape[-2:]) <= limit:
                return dataclasses.replace(self, pixels=torch.stack([self.read(i) for i in range(len(self))]))
        except Exception:  # other sizes; an unreadable one is counted when it is drawn
            pass
        return self

    def keys(self):
        """The names of all rows in order, in batches, since row by row takes minutes."""
        for batch in self.texts.select_columns("key").iter(10_000):
            yield from batch["key"]

    def identity(self):
        """What a resumed run compares: the number of examples and a hash of their names."""
        digest = hashlib.sha256()
        for key in self.keys():
            digest.update(f"{key}\n".encode())
        return {"examples": len(self), "names": digest.hexdigest()[:16]}

    def first_captions(self, limit=None):
        """Captions in order (of the first `limit` examples): for a tokenizer or paraphrases."""
        for i in range(min(len(self), limit or len(self))):
            yield from self.captions(i)


# ---- pixels ----
@functools.lru_cache(maxsize=2 * 16)  # the tars read at a time, and those read next
def _opened(path):
    return open(path, "rb", buffering=0)  # closed when it leaves the cache


def part_of(path, offset, size):
    """Bytes of a tar. Its handle stays open, since a network disk takes milliseconds to open a file; forks share a
    handle's position, and pread uses none."""
    return os.pread(_opened(path).fileno(), size, offset)


def decode(source):
    """Path or bytes of an image -> (3, H, W) uint8 RGB, upright, alpha over white; the first frame of an animation.

    Raises: OSError or ValueError for what is no whole image, has too many pixels, or more than 8 bits of grey."""
    data = source if isinstance(source, (bytes, bytearray)) else Path(source).read_bytes()
    image = Image.open(io.BytesIO(data))  # no pixel is decoded yet
    if data[:2] == b"\xff\xd8":
        # no end marker after the last scan; most files end with it, and searching all bytes takes time
        if not data.endswith(b"\xff\xd9") and data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
            raise ValueError("truncated jpeg")  # the decoder would silently fill the rest with grey
        if image.mode != "CMYK":  # torchvision is fast; its other decoders may crash on a damaged file
            from torchvision.io import ImageReadMode, decode_jpeg
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return decode_jpeg(buffer, ImageReadMode.RGB, apply_exif_orientation=True)
    if image.mode[0] in "IF":
        raise ValueError("more than 8 bits of grey, of which Pillow makes white")
    transparent = "A" in image.getbands() or "transparency" in image.info
    x = np.asarray(ImageOps.exif_transpose(image.convert("RGBA" if transparent else "RGB")))  # (H, W, 3 or 4)
    x = over_white(x) if transparent else x.copy()
    return torch.from_numpy(x).permute(2, 0, 1)


def over_white(x):
    """(..., 4) uint8 -> (..., 3), rounded, in integers."""
    rgb, alpha = x[..., :3].astype(np.int32), x[..., 3:].astype(np.int32)
    return ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


# ---- the hub ----
def hub_folder(repo, patterns, revision=None):
    """A folder with the files of a data set on the hub whose names have these patterns, or those in the hub's cache."""
    from huggingface_hub import snapshot_download
    folder = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=patterns, revision=revision))
    COMMITS[repo] = folder.name
    return folder


def note_commit(model):
    """Notes the commit of a model that has just been loaded by its hub id; a folder has none."""
    from huggingface_hub import constants
    latest = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "refs" / "main"
    if latest.is_file() and not Path(model).exists():
        COMMITS[model] = latest.read_text()


# ---- making Data ----
@contextlib.contextmanager
def generating():
    """Inside, what `datasets` cannot generate is an error with its cause's own words."""
    import datasets
    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def pick(flag, options, columns, usual, required=True):
    """The column that a flag names, else the first usual one that exists; a wrong name lists those that exist."""
    wanted = options.get(flag[2:].replace("-", "_"))
    found = next((c for c in ((wanted,) if wanted else usual) if c in columns), None)
    if found is None and (wanted or required):
        what = f" {wanted}: there is no such column" if wanted else f": none of {', '.join(usual)} is there"
        raise UserError(f"{flag}{what}; there are: {', '.join(columns)}")
    return found


def make_table(captions, keys, sources=None, classes=None, **columns):
    """A table for `Data`. captions: M lists of str; keys: M str; sources: M paths, or dicts as in the column `source`,
    or None where pixels are in memory; classes: {column: class names}; columns: label=..., verb=...: M values each."""
    import datasets
    value, content = datasets.Value, {"captions": list(captions), "key": list(keys)}
    features = {"captions": [value("string")], "key": value("string")}
    if sources is not None:
        kinds = {"path": "string", "bytes": "binary", "offset": "int64", "size": "int64", "start": "float64",
                 "end": "float64"}
        content["source"] = [{"path": s} if isinstance(s, str) else s for s in sources]
        features["source"] = {k: value(kind) for k, kind in kinds.items() if any(k in s for s in content["source"][:1])}
    features |= {c: datasets.ClassLabel(names=list(names)) for c, names in (classes or {}).items() if c in columns}
    columns = {c: values.tolist() if isinstance(values, np.ndarray) else list(values) for c, values in columns.items()}
    inferred = datasets.Dataset.from_dict(columns).features
    return datasets.Dataset.from_dict(content | columns, features=datasets.Features(inferred | features))


def notes(*words):
    """The notes that are not empty, in one line."""
    return "; ".join(filter(None, words))


def with_note(data, *words):
    """The data with these words added to its note."""
    return dataclasses.replace(data, note=notes(data.note, *words))


def with_column(data, name, values, feature=None):
    """The data with other values of a column, a list or an array (M,); feature: its kind, if it is a new one."""
    table = data.table.remove_columns(name) if name in data.table.column_names else data.table
    table = table.add_column(name, values, feature=feature or data.features[name])
    return dataclasses.replace(data, table=table)


def frames_of(data):
    """T of its clips; 0 for images."""
    if data.pixels is not None:
        return data.pixels.shape[1] if data.pixels.ndim == 5 else 0
    return data.clip.frames if data.clip else 0
