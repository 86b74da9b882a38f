"""What a run trains and evaluates on: Data, one split of a data set as a table."""

import dataclasses
import hashlib

from contrastive.core.processes import UserError
from contrastive.data.pixels import decode, read_part
from contrastive.data.sound import read_sound, sound_slice
from contrastive.data.views import uniforms

import numpy as np
import pyarrow as pa
import torch

MAX_ROWS_AS_LISTS = 2**18  # a larger table does not keep its columns as Python lists
MAX_SIDE_IN_MEMORY = 96  # pixels
ROWS_AT_ONCE = 10_000  # rows that are read together from a table that is read through
RELEVANCY_DRAWS = 98  # stream of random numbers that draw a sentence by relevancy
SOURCE_FIELDS = {"path": "string", "bytes": "binary", "offset": "int64", "size": "int64",
                 "start": "float64", "end": "float64"}  # types of the fields of a source


class EmptySplit(UserError):
    """A split that the data do not have, or for which no row was held out."""


@dataclasses.dataclass
class Data:
    """One split of a data set: a table with a row per example, and how its pixels are read.

    Columns of the table:
        captions (list of str) and key (str), the name of the row
        source: a struct of path or bytes; offset and size inside a tar; start and end in seconds
        label, verb, noun: classes          group: rows of one group are positives of each other
        subtitle (str); sound: path of its file, "" = that of the source, None = there is none
        question (None in rows of --extra-pairs), answer, choices, question_type, pair
    """

    name: str
    split: str
    table: object  # datasets.Dataset
    # ---- pixels, if they are not in the files of the column source ----
    pixels: torch.Tensor = None  # (M, [T,] 3, H, W) uint8 if the whole split is in memory
    clip: object = None  # reads frames (clips.py); None of images
    # ---- beside the pixels ----
    modalities: str = "v"  # what is read of a clip, letters of v, a and s
    draw_sound: object = None  # function of a row of the first table -> samples; of drawn sets
    # ---- rows ----
    shards: np.ndarray = None  # (M,) number of the tar of each row
    rows: np.ndarray = None  # (M,) row numbers in the table that was opened first
    caption_numbers: np.ndarray = None  # (M,) of the one caption of each row, after unfold()
    before_extra_pairs: object = None  # the set without the rows that --extra-pairs added
    held_out: tuple = ()  # names of the rows of train that became val or test
    # ---- captions ----
    has_captions: bool = True  # False if class names take the place of captions
    templates: tuple = ()  # formats around a caption that serve as paraphrases: "a drawing of {}"
    sentences: object = None  # what multi-instance retrieval ranks (epic.py)
    caption_relevancy: float = 0.0  # train on sentences above this relevancy; 0 = own captions
    # ---- how it is evaluated ----
    same_text: str = "positive"  # another item's caption with the same words: positive or wrong
    grouped: bool = False  # video -> text ranks videos by their best caption (MSVD)
    prompts: list = None  # templates of zero-shot classification, with {c}
    # ---- for the banner ----
    note: str = ""  # what was left out or held out

    def __post_init__(self):
        # without the column of files, so that a caption reads no pixels
        self.annotations = self.table
        self.sources = None
        if "source" in self.table.column_names:
            self.annotations = self.table.remove_columns("source")
            self.sources = self.table.select_columns("source")
        if self.rows is None:
            self.rows = np.arange(len(self.table))
        self.features = self.annotations.features  # a table copies them each time it is asked
        self.label_names = self.names("label")
        self.columns = {}  # {name: column} of those that were read

    def __len__(self):
        return len(self.table)

    @property
    def full_name(self):
        """Name and split, for messages: 'coco (test)'."""
        return f"{self.name} ({self.split})"

    # ---- columns ----
    def column(self, name):
        """A whole column: an array (M,) of numbers, else a list; None if it does not exist."""
        if name not in self.annotations.column_names:
            return None
        if name not in self.columns:
            values = self.annotations[name][:]
            dtype = getattr(self.features[name], "dtype", "list")
            if dtype not in ("list", "string", "large_string"):
                values = np.asarray(values, dtype)
            self.columns[name] = values
        return self.columns[name]

    def names(self, column):
        """Class names of a column; None where it has none."""
        return getattr(self.features.get(column), "names", None)

    @property
    def labels(self):
        """(M,) class of each row, -1 = unknown; None without classes."""
        return self.column("label")

    @property
    def groups(self):
        """(M,) ids: rows of one group are positives of each other. Without groups every row is
        one of its own."""
        groups = self.column("group")
        if groups is None:
            return self.rows
        return groups

    # ---- one row ----
    def cell(self, column, i):
        """The value of one column in row i."""
        if column in self.columns:
            return self.columns[column][i]
        if len(self) <= MAX_ROWS_AS_LISTS:
            return self.column(column)[i]
        return self.annotations[int(i)][column]

    def key(self, i):
        """The name of row i: it does not change with the split or with other rows."""
        return self.cell("key", i)

    def captions(self, i):
        """The captions of row i; its pixels are not read."""
        captions = self.cell("captions", i)
        if self.caption_numbers is None:
            return captions
        return [captions[self.caption_numbers[i]]]

    def training_captions(self, i, seed, epoch, number):
        """The captions of row i; with caption_relevancy one sentence, drawn for sample `number`."""
        if not self.caption_relevancy:
            return self.captions(i)
        u = uniforms(seed, epoch, [number], 1, stream=RELEVANCY_DRAWS)[0, 0]
        sentence = self.sentences.draw(int(self.rows[i]), self.caption_relevancy, u)
        if sentence is None:
            return self.captions(i)
        return [sentence]

    def read(self, i, draws=None):
        """Pixels of row i: an image (3, H, W) or a clip (T, 3, H, W), uint8, or features (T, F).

        Args:
            draws: (T,) numbers in 0..1 that place random frames; None = as in evaluation.
        Raises: whatever the reader of a damaged file raises.
        """
        if self.pixels is not None:
            return self.pixels[i]
        return self.read_source(self.sources[int(i)]["source"], draws)

    def read_source(self, source, draws=None):
        """As `read`, of a cell of the column source."""
        if source.get("size") is not None:
            content = read_part(source["path"], source["offset"], source["size"])
        else:
            content = source.get("bytes") or source["path"]
        if self.clip is None:
            return decode(content)
        return self.clip(content, source.get("start"), source.get("end"), draws)

    def sound_and_text(self, i, draw=None):
        """What is read of row i beside its pixels, by `modalities`: {sound: (1024, 64), a slice;
        subtitle: str}; zeros and "" if it has none.

        Args:
            draw: number in 0..1 that chooses the slice; None = as in evaluation.
        Raises: whatever the reader of a damaged file raises.
        """
        parts = {}
        if "a" in self.modalities:
            parts["sound"] = sound_slice(self.samples(i), draw)
        if "s" in self.modalities:
            parts["subtitle"] = ""
            if "subtitle" in self.annotations.column_names:
                parts["subtitle"] = self.cell("subtitle", i) or ""
        return parts

    def samples(self, i):
        """The sound of row i, (samples,) at 16 kHz, or None."""
        if self.draw_sound is not None:
            return self.draw_sound(self.rows[i])
        if "sound" not in self.annotations.column_names:
            return None
        path = self.cell("sound", i)
        if path is None:
            return None
        source = self.sources[int(i)]["source"]
        return read_sound(
            path or source.get("bytes") or source["path"], source.get("start"), source.get("end"))

    def available_modalities(self):
        """Those of `modalities` that some row has; of frames nothing is asked."""
        letters = self.modalities
        sounds = self.column("sound") or []  # "" is the clip's own, None = there is none
        if self.draw_sound is None and all(sound is None for sound in sounds):
            letters = letters.replace("a", "")
        if not any(self.column("subtitle") or []):
            letters = letters.replace("s", "")
        return letters

    # ---- all rows ----
    def values_of_column(self, name):
        """Yields the values of a column in order; reading row by row would take minutes."""
        for batch in self.table.select_columns(name).iter(ROWS_AT_ONCE):
            yield from batch[name]

    def keys(self):
        """Yields the names of all rows in order."""
        return self.values_of_column("key")

    def identity(self):
        """Number of the examples and a hash of their names, by which a resumed run recognises its
        data."""
        digest = hashlib.sha256()
        for key in self.keys():
            digest.update(f"{key}\n".encode())
        return {"examples": len(self), "names": digest.hexdigest()[:16]}

    def first_captions(self, limit=None):
        """Yields the captions of the first `limit` examples, for a tokenizer or paraphrases."""
        for i in range(min(len(self), limit or len(self))):
            yield from self.captions(i)

    # ---- other rows of the same data ----
    def select(self, rows, split=None):
        """The same data set with only these rows, in this order; a row may come twice."""
        rows = np.asarray(rows, np.int64)  # numpy takes an empty list for floats
        arrays = {}
        for name in ("rows", "caption_numbers", "shards"):
            values = getattr(self, name)
            if values is not None:
                arrays[name] = values[rows]
        if self.pixels is not None:
            arrays["pixels"] = self.pixels[torch.from_numpy(rows)]
        return dataclasses.replace(
            self, split=split or self.split, table=self.table.select(rows),
            before_extra_pairs=None, **arrays)

    def unfold(self):
        """One example for each (image or clip, caption), as CLIP4Clip on MSR-VTT: a batch may hold
        a clip twice."""
        # captions of each row
        counts = [len(captions) for captions in self.values_of_column("captions")]
        rows = np.repeat(np.arange(len(self)), counts)
        caption_numbers = np.concatenate([np.arange(count) for count in counts])
        return dataclasses.replace(self.select(rows), caption_numbers=caption_numbers)

    def folded(self):
        """One row for each image or clip, of which unfold() makes several."""
        if self.caption_numbers is None:
            return self
        first = self.select(np.flatnonzero(self.caption_numbers == 0))
        return dataclasses.replace(first, caption_numbers=None)

    def in_memory(self):
        """The same examples with their pixels in one tensor, if all have one size of at most
        MAX_SIDE_IN_MEMORY pixels a side; else the data as they are."""
        if self.pixels is not None:
            return self
        try:
            if max(self.read(0).shape[-2:]) > MAX_SIDE_IN_MEMORY:
                return self
            pixels = torch.stack([self.read(i) for i in range(len(self))])
        except Exception:  # other sizes; an unreadable one is counted when a batch reads it
            return self
        return dataclasses.replace(self, pixels=pixels)


def identity_of_files(train):
    """The identity of a training set without what --extra-pairs and --unfold-captions have added:
    that of its files."""
    train = train.before_extra_pairs or train
    return train.folded().identity()


# ---- making Data ----
def make_table(captions, keys, sources=None, classes=None, **columns):
    """A table for `Data`.

    Args:
        captions: M lists of str.
        keys: M names of the rows.
        sources: M paths, or dicts as in the column source; None where pixels are in memory.
        classes: {column: class names}.
        columns: label=..., verb=...: M values each.
    """
    import datasets

    content = {"captions": list(captions), "key": list(keys)}
    features = {"captions": [datasets.Value("string")], "key": datasets.Value("string")}
    if sources is not None:
        content["source"] = []
        for source in sources:
            if isinstance(source, str):
                source = {"path": source}
            content["source"].append(source)
        features["source"] = {
            field: datasets.Value(dtype) for field, dtype in SOURCE_FIELDS.items()}
    for name, names in (classes or {}).items():
        if name in columns:
            features[name] = datasets.ClassLabel(names=list(names))
    for name, values in columns.items():
        if isinstance(values, np.ndarray):
            values = values.tolist()
        columns[name] = list(values)
    inferred = datasets.Dataset.from_dict(columns).features
    features = datasets.Features({**inferred, **features})
    for name, values in content.items():  # in arrow's own types, else cells are checked one by one
        content[name] = pa.array(values, features.arrow_schema.field(name).type)
    return datasets.Dataset.from_dict({**content, **columns}, features=features)


def window_key(video, start=None, end=None):
    """The key of a clip: the video's name and, if it has a window, the seconds: 'yt1 2-4 s'."""
    if start is None and end is None:
        return video
    seconds = []
    for second in (start, end):
        if second is None:
            seconds.append("")
        else:
            seconds.append(f"{second:g}")
    return f"{video} {seconds[0]}-{seconds[1]} s"


def with_column(data, name, values, feature=None):
    """The data with other values of a column, a list or an array (M,).

    Args:
        feature: the type of the column (of the library datasets), if it is a new one.
    """
    table = data.table
    if name in table.column_names:
        table = table.remove_columns(name)
    table = table.add_column(name, values, feature=feature or data.features[name])
    return dataclasses.replace(data, table=table)


def join_captions(data):
    """The data with one caption a row, the paragraph of all its captions."""
    paragraphs = [[" ".join(captions)] for captions in data.column("captions")]
    return with_column(data, "captions", paragraphs)


def with_note(data, *notes):
    """The data with these words added to their note."""
    return dataclasses.replace(data, note=join_notes(data.note, *notes))


def join_notes(*notes):
    """The notes that are not empty, in one line."""
    return "; ".join(note for note in notes if note)


def frames_of(data):
    """T of the clips of a data set; 0 of images."""
    if data.pixels is not None:
        if data.pixels.ndim == 5:
            return data.pixels.shape[1]
        return 0
    if data.clip is not None:
        return data.clip.frames
    return 0
