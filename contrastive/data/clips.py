"""How a video becomes the input of an encoder: the `clip` of a data set.

A clip is called as clip(source, start=None, end=None, draws=None) and gives (T, 3, H, W) uint8
frames (Clips) or (T, F) float features (Features, Regions). A source is a path or the bytes of a
file; start and end are seconds in it; draws are (T,) numbers in 0..1 that place random frames, None
in evaluation.
"""

import functools
import hashlib
import io
import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

from contrastive.core.files import whole_file
from contrastive.core.processes import UserError, opening
from contrastive.data.folders import files_below
from contrastive.data.frames import read_frames
from contrastive.data.pixels import decode

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

DEFAULT_FRAMES = 12
DEFAULT_SIDE = 224  # of a view, in pixels
JPEG_QUALITY = 92  # of the cache of frames
CACHED_PER_FRAME = 3  # cached frames for each random one
REGION_CLIP = 4  # F of VGT: frames of a clip, in which region r is the same thing throughout
REGION_PICTURE = (320.0, 240.0)  # width and height of a picture of unknown size


def clip_options(options, eval_sampling="uniform"):
    """The reader of clips that DataOptions ask for: Features with feature_dir, else Clips.

    Args:
        eval_sampling: as of Clips.
    """
    frames = options.frames or DEFAULT_FRAMES
    if options.feature_dir:
        return Features(options.feature_dir, frames)
    short = round((options.image_size or DEFAULT_SIDE) * 8 / 7)
    sampling = options.frame_sampling or "uniform"
    return Clips(frames, sampling, short, options.frame_cache, eval_sampling=eval_sampling)


# ---- frames ----
class Clips:
    """Reads clips as (T, 3, H, W) uint8 frames.

    With a cache each clip is one JPEG file (4:4:4), in which its frames lie one below the other, at
    most 65,500 rows in all. It is used until the video changes. Of random frames the file has three
    in each segment, at fixed times, and one of the three is drawn.

    Args:
        frames: T.
        sampling: "uniform", "middle" or "random", as of read_frames.
        short: larger clips are scaled to this short side, in pixels.
        cache: folder of the cache; "" = none.
        eval_sampling: the sampling of an evaluation if that of training is random.
    """

    def __init__(self, frames=DEFAULT_FRAMES, sampling="uniform", short=256, cache="", *,
                 eval_sampling="uniform"):
        self.frames = frames
        self.sampling = sampling
        self.short = short
        self.cache = cache
        self.eval_sampling = eval_sampling

    def __call__(self, source, start=None, end=None, draws=None):
        sampling = self.sampling
        if sampling == "random" and draws is None:
            sampling = self.eval_sampling
        if self.cache:
            return self.read_cached(source, start, end, sampling, draws)
        frames = read_frames(
            source, self.frames, start, end, sampling, draws=draws, short=self.short)
        return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)

    def read_cached(self, source, start, end, sampling, draws):
        """The clip from the cache, after it is written if it is not there."""
        count = self.frames
        cached_sampling = sampling
        if sampling == "random":
            count = CACHED_PER_FRAME * self.frames
            cached_sampling = "middle"
        file = self.cache_file(source, f"{start} {end} {count} {cached_sampling} {self.short}")
        if not file.exists():
            frames = read_frames(source, count, start, end, cached_sampling, short=self.short)
            content = jpeg_of_frames(frames)
            self.write_cache(file, content)
        else:
            content = file.read_bytes()
        tall = decode(content)                                                  # (3, count * H, W)
        clip = tall.unflatten(1, (count, -1)).transpose(0, 1)                   # (count, 3, H, W)
        if sampling != "random":
            return clip
        draws = np.asarray(draws)[:self.frames]                                 # (T,)
        choice = np.minimum(draws * CACHED_PER_FRAME, CACHED_PER_FRAME - 1).astype(int)
        rows = np.arange(self.frames) * CACHED_PER_FRAME + choice               # (T,)
        return clip[torch.from_numpy(rows)]                                     # (T, 3, H, W)

    def cache_file(self, source, settings):
        """The file of a clip, named by a hash of the settings and of the path of the video, its
        size and time, or of its bytes."""
        if not isinstance(source, bytes):
            status = os.stat(source)
            state = f"{status.st_size} {status.st_mtime_ns}"
            source = f"{Path(source).resolve()} {state}".encode()
        digest = hashlib.sha1(source + settings.encode()).hexdigest()
        return Path(self.cache) / digest[:2] / f"{digest}.jpg"

    def write_cache(self, file, content):
        """Writes a file of the cache; without space for it the run goes on, with a warning."""
        # The name is one that no other process has, on any machine.
        suffix = f".{secrets.token_hex(8)}.tmp"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file, suffix) as temporary:
                Path(temporary).write_bytes(content)
        except (OSError, UserError) as error:
            cause = error.__cause__ or error  # whole_file makes a UserError of an OSError
            warn_once(f"WARNING: --frame-cache {self.cache}: {cause.strerror}; clips that are not "
                      "in it are decoded in each epoch")


def jpeg_of_frames(frames):
    """(count, H, W, 3) frames, one below the other, as the bytes of a JPEG."""
    content = io.BytesIO()
    tall = Image.fromarray(frames.reshape(-1, *frames.shape[2:]))               # (count * H, W, 3)
    tall.save(content, "jpeg", quality=JPEG_QUALITY, subsampling=0)
    return content.getvalue()


@functools.lru_cache
def warn_once(text):
    """Prints a warning once in each process."""
    print(text, file=sys.stderr, flush=True)


# ---- features in place of frames ----
class Features:
    """Reads precomputed features of whole videos: T rows of the file VIDEO.npy (time, width) of
    each folder (motion, appearance, ...), side by side.

    Args:
        folders: of the files.
        frames: T.
    """

    sampling = "uniform"
    has_pixels = False

    def __init__(self, folders, frames):
        self.folders = folders
        self.frames = frames

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, F) float32 features, found by the video's name."""
        parts = []
        for folder in self.folders:
            file = Path(folder).expanduser() / f"{Path(source).stem}.npy"
            features = np.atleast_2d(np.load(file, allow_pickle=False))         # (time, width)
            rows = np.linspace(0, len(features) - 1, self.frames).round().astype(int)
            parts.append(features[rows])
        features = np.concatenate(parts, 1).astype(np.float32)                  # (T, F)
        if not np.isfinite(features).all():
            raise ValueError("features that are not finite")
        return torch.from_numpy(features)


def feature_shape(data, encoder="ssb"):
    """[T, F] of the features of a data set. Raises UserError if the first cannot be read or is
    pixels."""
    with opening(f"{data.name}: {data.key(0)}"):
        shape = list(data.read(0).shape)
    if len(shape) > 2:
        raise UserError(f"--image-encoder {encoder}: the data set has pixels; features come with "
                        "--feature-dir of variants/ncl_ssb.py, regions with --region-dir of "
                        "variants/mama_qa.py and a set of questions")
    return shape


# ---- features of frames and of the regions in them ----
class Place(NamedTuple):
    """Where the features of a video lie."""

    file: Path
    row: int | None  # in an h5 file; None if the video has a file of its own


class Regions:
    """Reads features of frames and of the regions in them, as VGT's authors write them.

    Files of regions are `acregion_8c{n}b_{split}.h5` (ids, feat (V, 8, 4, n, W), bbox (V, 8, 4, n,
    4) in pixels) or one VIDEO.npz (feat, bbox) for each video. Files of frames are
    `app_feat_{split}.h5` (ids, resnet_features (V, 8, 4, W)) or one VIDEO.npy for each video.

    Args:
        folder: of all files.
        split: in the names of the h5 files.
        regions: R, of which the first of n are used.
        frames: T = 4 K, which are K whole clips, evenly spaced.
    Raises: UserError if one of the two kinds of file is missing, or a video is there twice.
    """

    sampling = "uniform"
    has_pixels = False

    def __init__(self, folder, split, regions, frames):
        self.folder = Path(folder)
        self.regions = regions
        self.frames = frames
        # {video: (width, height) of the pictures in which boxes are measured}, else REGION_PICTURE
        self.sizes = {}
        self.region_places = self.find_places(f"acregion_*_{split}.h5", "npz")
        self.frame_places = self.find_places(f"app_feat_{split}.h5", "npy")

    def find_places(self, pattern, ending):
        """{video: Place} of an h5 file with this pattern, else of files with this ending."""
        paths = sorted(map(Path, files_below(self.folder)))
        tables = [path for path in paths if path.match(pattern)]
        if len(tables) > 1:
            raise UserError(f"--region-dir {self.folder}: both {tables[0].name} and "
                            f"{tables[1].name} have features of this split; leave one")
        if tables:
            names = read_array(Place(tables[0], slice(None)), "ids").tolist()
            places = [Place(tables[0], row) for row in range(len(names))]
        else:
            files = [path for path in paths if path.suffix == f".{ending}"]
            names = [file.stem for file in files]
            places = [Place(file, None) for file in files]
        if not places:
            raise UserError(f"--region-dir {self.folder}: neither an h5 file of VGT's nor a "
                            f"VIDEO.{ending} is there")
        result = {}
        for name, place in zip(names, places):
            if isinstance(name, bytes):
                name = name.decode()
            if str(name) in result:
                raise UserError(f"--region-dir {self.folder}: the video {name} is there twice, in "
                                f"{result[str(name)].file} and in {place.file}; leave one")
            result[str(name)] = place
        return result

    def index(self):
        """{name: video}; a video called 7 is also video7 and vid7."""
        index = {}
        for video in self.region_places.keys() & self.frame_places.keys():
            index[video] = video
            if video.isdecimal():
                index[f"video{video}"] = video
                index[f"vid{video}"] = video
        return index

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, (1 + R) * (W + 5)) float32 of a video: at each time the frame and then its regions,
        each a feature of width W and the five numbers of its box (zeros for the frame)."""
        place = self.region_places[source]
        regions = read_rows(place, "feat", 3)[:, :self.regions]                 # (t, R, W)
        boxes = read_rows(place, "bbox", 3)[:, :self.regions]                   # (t, R, 4)
        frames = read_rows(self.frame_places[source], "resnet_features", 2)     # (t, W)
        if regions.shape[1] != self.regions:
            raise ValueError(f"{regions.shape[1]} regions in a frame, not {self.regions}")
        boxes = box_numbers(boxes, *self.sizes.get(source, REGION_PICTURE))     # (t, R, 5)
        regions = torch.cat([regions, boxes], -1)                               # (t, R, W + 5)
        frames = F.pad(frames, (0, 5))[:, None]                                 # (t, 1, W + 5)
        x = torch.cat([frames, regions], 1)                                     # (t, 1 + R, W + 5)
        x = x.unflatten(0, (-1, REGION_CLIP))                              # (K, 4, 1 + R, W + 5)
        num_clips = self.frames // REGION_CLIP
        clips = torch.linspace(0, len(x) - 1, num_clips).round().long()
        return x[clips].flatten(0, 1).flatten(1)


def box_numbers(boxes, width, height):
    """The numbers of boxes for VGT: corners and area, as parts of the picture.

    Args:
        boxes: (..., 4): x1, y1, x2, y2 in pixels.
        width, height: of the picture.
    Returns: (..., 5).
    """
    x1, y1, x2, y2 = boxes.unbind(-1)
    area = (x2 - x1 + 1) * (y2 - y1 + 1) / (width * height)
    return torch.stack([x1 / width, y1 / height, x2 / width, y2 / height, area], -1)


def read_array(place, key):
    """An array of a video, from its row of an h5 file or from a file of its own."""
    if place.file.suffix == ".h5":
        import h5py

        with opening(place.file), h5py.File(place.file) as file:
            return file[key][place.row]
    content = np.load(place.file, allow_pickle=False)
    if place.file.suffix == ".npy":
        return content
    return content[key]


def read_rows(place, key, num_axes):
    """An array of a video as float32 with this number of axes: the last ones, after a first one for
    the frames of all clips."""
    x = torch.from_numpy(np.asarray(read_array(place, key), np.float32))
    return x.reshape(-1, *x.shape[1 - num_axes:])
