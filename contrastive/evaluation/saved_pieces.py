"""Embeddings of evaluated splits in files: val.safetensors and test.safetensors of a run, from
which pictures are drawn, and those of eval.py --save-embeddings.

    pieces = read_pieces("DIR/coco.safetensors")["coco"]    # SavedPieces

A file holds all data sets of a split. Each field of SavedPieces is a tensor 'DATA SET/field', or an
entry of the JSON text 'DATA SET' in the metadata of the file.

Of a run at most 5,000 images are saved, with at most 5,000 captions, 5 of each image. Images are in
a random order, which is the same in all runs on the same data. eval.py saves all of them, in the
order of the data. Captions are in the order of their images.
"""

import dataclasses
import json
from pathlib import Path

from contrastive.core.files import write_tensors
from contrastive.core.metrics import normalize
from contrastive.core.processes import opening
from contrastive.data.table import frames_of

import numpy as np
import torch

MAX_ROWS = 5_000  # images; captions; training images
MAX_CAPTIONS = 5  # of an image, as COCO and Flickr30k have
MAX_PICTURES = 500  # of a data set
PICTURE_HEIGHT = 128  # pixels


@dataclasses.dataclass
class SavedPieces:
    """What is saved of an evaluated split: M images or clips with C captions.

    A field is None if no task has made it.
    """

    title: str                              # name and split, such as 'captions.csv (test)'
    kind: str                               # 'image' or 'video'
    num_images: int                         # of the whole split
    keys: list                              # of the M images
    image: torch.Tensor | None = None       # (M, D) embeddings

    # ---- with captions ----
    texts: list | None = None               # C captions
    text: torch.Tensor | None = None        # (C, D) embeddings
    owner: torch.Tensor | None = None       # (C,) row of each caption's image among the M
    positives: torch.Tensor | None = None   # (C, P) images of each caption, padded with -1
    biases: dict = dataclasses.field(default_factory=dict)  # NCL: {mode: ((M,), (C,))}
    recall_by_queue_size: dict | None = None  # NCL: {training queries: {direction: R@1}}

    # ---- with classes ----
    label_names: list | None = None
    class_sizes: torch.Tensor | None = None     # (classes,) training images
    class_accuracy: torch.Tensor | None = None  # (classes,) kNN@1 in percent; nan without an image
    train_features: torch.Tensor | None = None  # (N, width) of training images
    train_labels: torch.Tensor | None = None    # (N,)

    # ---- with questions ----
    questions: list | None = None           # M texts
    answers: list | None = None             # the M right ones
    predicted: list | None = None           # the M of the model
    hits: torch.Tensor | None = None        # (M,) whether they are right

    # ---- JPEG files of the first images, one after the other ----
    jpeg: torch.Tensor | None = None        # (bytes,) uint8
    jpeg_ends: torch.Tensor | None = None   # (n,)

    def picture(self, row):
        """Image `row`, one of the first num_pictures, (H, W, 3) uint8; of clips a few frames."""
        return read_picture(self.jpeg, self.jpeg_ends, row)

    def cosines(self):
        """Those (C, M) of all captions and images."""
        return normalize(self.text) @ normalize(self.image).T

    def cosines_of_pairs(self):
        """That (C,) of each caption and its own image."""
        image = normalize(self.image[self.owner])                          # (C, D)
        return (normalize(self.text) * image).sum(1)

    @property
    def num_pictures(self):
        """The number of images that have a picture: they are the first."""
        if self.jpeg_ends is None:
            return 0
        return len(self.jpeg_ends)


# ======================================================= writing ==================================
def save_pieces(path, pieces, num_pictures=0, *, all_rows=False):
    """Writes a file as the head of this module describes it.

    Args:
        pieces: {data set: EvaluationPieces}.
        num_pictures: of a data set, at most.
        all_rows: save all images and captions, in the order of the data.
    """
    tensors = {}
    texts = {}
    for name, pieces_of_set in pieces.items():
        rows = rows_to_save(pieces_of_set)
        if all_rows:
            rows = rows_of_all(pieces_of_set)
        saved = select_pieces(pieces_of_set, rows, num_pictures)
        texts[name] = {}
        for field, value in vars(saved).items():
            if torch.is_tensor(value):
                tensors[f"{name}/{field}"] = value
            elif field == "biases":
                for mode, (image_bias, text_bias) in value.items():
                    tensors[f"{name}/image_bias:{mode}"] = image_bias
                    tensors[f"{name}/text_bias:{mode}"] = text_bias
            else:
                texts[name][field] = value
    write_tensors(path, tensors, {name: json.dumps(fields) for name, fields in texts.items()})


def select_pieces(pieces, rows, num_pictures=0):
    """The SavedPieces of EvaluationPieces.

    Args:
        rows: the images (m,) and the captions (c,) that are saved.
        num_pictures: at most.
    """
    data = pieces.data
    images, captions = rows                                                # (m,), (c,)
    rows = []  # of the data
    if pieces.index is not None:
        rows = pieces.index[images]
    saved = SavedPieces(
        title=title_of(data), kind=kind_of(data), num_images=len(images_of(pieces)),
        keys=[str(data.key(row)) for row in rows], label_names=pieces.label_names)
    if pieces.image is not None:
        saved.image = pieces.image[images]
    if pieces.text is not None:
        place = torch.full((len(pieces.image),), -1)                       # (M,) among the saved
        place[images] = torch.arange(len(images))
        positives = pieces.positives[captions]                             # (c, P)
        saved.texts = [pieces.texts[caption] for caption in captions]
        saved.text = pieces.text[captions]
        saved.owner = place[pieces.owner[captions]]
        saved.positives = torch.where(positives >= 0, place[positives], -1)
        for mode, (image_bias, text_bias) in pieces.biases.items():
            saved.biases[mode] = image_bias[images], text_bias[captions]
        saved.recall_by_queue_size = pieces.recall_by_queue_size
    if pieces.train_features is not None:
        chosen = random_order(len(pieces.train_labels))[:MAX_ROWS]
        saved.train_features = pieces.train_features[chosen]
        saved.train_labels = torch.as_tensor(pieces.train_labels[chosen])
        saved.class_sizes = torch.as_tensor(np.bincount(
            pieces.train_labels, minlength=len(pieces.label_names or ())))
    if pieces.per_class is not None and saved.class_sizes is not None:
        saved.class_accuracy = torch.full(saved.class_sizes.shape, torch.nan)
        for label, accuracy in pieces.per_class.items():
            saved.class_accuracy[label] = accuracy
    if pieces.predicted is not None:
        saved.questions = [data.cell("question", row) for row in rows]
        saved.answers = [data.cell("answer", row) for row in rows]
        saved.predicted = [pieces.predicted[image] for image in images]
        saved.hits = torch.as_tensor(np.asarray(pieces.hits)[images] > 0)
    if num_pictures:
        saved.jpeg, saved.jpeg_ends = pack_pictures(data, rows[:num_pictures])
    return saved


def images_of(pieces):
    """The rows of the images or questions of EvaluationPieces; none of training images alone."""
    if pieces.index is None:
        return []
    return pieces.index


def rows_to_save(pieces):
    """The images (m,) and the captions (c,) of EvaluationPieces that are saved, in their order."""
    order = random_order(len(images_of(pieces)))[:MAX_ROWS]
    if pieces.text is None:
        return order, []
    captions_of_image = {}
    for caption, image in enumerate(pieces.owner):
        captions_of_image.setdefault(image, []).append(caption)
    images = []
    captions = []
    for image in order:
        captions_to_add = captions_of_image.get(image, [])[:MAX_CAPTIONS]
        if len(captions) + len(captions_to_add) > MAX_ROWS:
            break
        images.append(image)
        captions += captions_to_add
    return np.array(images, dtype=int), np.array(captions, dtype=int)


def rows_of_all(pieces):
    """All images (M,) and captions (C,) of EvaluationPieces."""
    return np.arange(len(images_of(pieces))), np.arange(len(pieces.texts or ()))


def random_order(number):
    """The numbers below `number` in a random order, always the same."""
    return np.random.default_rng(0).permutation(number)


def title_of(data):
    """A split in titles, such as 'captions.csv (test)': its name without folders."""
    if data is None:
        return "training images"
    return f"{Path(data.name).name} ({data.split})"


def kind_of(data):
    """What the rows of a split are: 'image' or 'video'."""
    if data is not None and frames_of(data):
        return "video"
    return "image"


# ======================================================= pictures =================================
def picture(data, row):
    """A row of the data as a picture (3, H, W) uint8: the image, or up to four frames in a line.

    It is white if the row has features in place of pixels.
    """
    x = data.read(row)                           # (3, H, W), (T, 3, H, W) or features (T, F)
    if x.ndim == 2:
        return torch.full((3, 32, 32), 255, dtype=torch.uint8)
    if x.ndim == 4:
        num_frames = min(4, len(x))
        times = torch.linspace(0, len(x) - 1, num_frames).round().long()
        x = torch.cat(list(x[times]), -1)                                  # (3, H, frames * W)
    return x


def pack_pictures(data, rows):
    """Pictures of rows as JPEG files: (bytes,) uint8, and (n,) where each of them ends."""
    from torchvision.io import encode_jpeg
    from torchvision.transforms.v2.functional import resize

    files = [torch.empty(0, dtype=torch.uint8)]
    for row in rows:
        pixels = picture(data, int(row))                                   # (3, H, W)
        _, height, width = pixels.shape
        if height > PICTURE_HEIGHT:
            new_width = max(1, round(width * PICTURE_HEIGHT / height))
            pixels = resize(pixels, [PICTURE_HEIGHT, new_width], antialias=True)
        files.append(encode_jpeg(pixels.contiguous(), quality=90))
    ends = torch.tensor([len(file) for file in files]).cumsum(0)
    return torch.cat(files), ends[1:]


def read_picture(jpeg, ends, row):
    """Picture `row` of pack_pictures: (H, W, 3) uint8, numpy."""
    from torchvision.io import decode_jpeg

    start = 0
    if row > 0:
        start = ends[row - 1]
    return decode_jpeg(jpeg[start:ends[row]]).permute(1, 2, 0).numpy()


# ======================================================= reading ==================================
def read_pieces(path):
    """{data set: SavedPieces} of a file; {} if the run has not written one."""
    from safetensors import safe_open

    if not Path(path).is_file():
        return {}
    with opening(path), safe_open(path, "pt") as file:
        sets = {}
        for name, fields in (file.metadata() or {}).items():
            if name != "format":
                sets[name] = SavedPieces(**json.loads(fields))
        for key in sorted(file.keys()):
            name, _, field = key.rpartition("/")
            if field.startswith("image_bias:"):
                mode = field.removeprefix("image_bias:")
                text_bias = file.get_tensor(f"{name}/text_bias:{mode}")
                sets[name].biases[mode] = file.get_tensor(key), text_bias
            elif not field.startswith("text_bias:"):
                setattr(sets[name], field, file.get_tensor(key))
    return sets
