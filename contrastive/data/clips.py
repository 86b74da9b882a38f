"""The `clip` of a data set: clip(source, start=None, end=None, draws=None) -> (T, 3, H, W) uint8 frames (Clips), which
may be cached, or (T, F) float features (Features, Regions). A source is a path or the bytes of a file; start and end
are seconds in it."""

import hashlib
import os
import secrets
from pathlib import Path

from contrastive.data.frames import read_frames
from contrastive.data.table import decode
from contrastive.engine.processes import UserError, opening

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

REGION_CLIP = 4  # F of VGT: frames of a clip, in which region r is the same thing throughout


class Clips:
    """How a video becomes (T, 3, H, W) uint8: frames T, sampling, short side in pixels, a cache folder ('' = none);
    at_rest: how random frames are placed in evaluation; read: as read_frames. The cache holds one JPEG (4:4:4) a clip,
    its frames one below the other (at most 65,500 rows), until the video changes; of random frames three each."""

    def __init__(self, frames=12, sampling="uniform", short=256, cache="", at_rest="uniform", read=read_frames):
        self.frames, self.sampling, self.short, self.cache, self.at_rest = frames, sampling, short, cache, at_rest
        self.read = read

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, 3, H, W) uint8. draws (T,) in 0..1 place random frames; None = evaluation."""
        sampling = self.at_rest if self.sampling == "random" and draws is None else self.sampling
        if not self.cache:
            frames = self.read(source, self.frames, start, end, sampling, draws, self.short)
            return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
        keep, spread = (3 * self.frames, "middle") if sampling == "random" else (self.frames, sampling)
        file = self._file(source, f"{start} {end} {keep} {spread} {self.short}")
        if not file.exists():
            self._fill(file, self.read(source, keep, start, end, spread, short=self.short))
        x = decode(file).unflatten(1, (keep, -1)).transpose(0, 1)  # (3, keep * H, W) -> (keep, 3, H, W)
        if sampling != "random":
            return x
        choice = np.minimum(np.asarray(draws)[:self.frames] * 3, 2).astype(int)  # (T,)
        return x[torch.from_numpy(np.arange(self.frames) * 3 + choice)]  # (T, 3, H, W)

    def _file(self, source, settings):
        """The cache file of a clip, named by a hash of the path and its time (or of the bytes) and of the settings."""
        if not isinstance(source, bytes):
            source = f"{Path(source).resolve()} {os.stat(source).st_mtime_ns}".encode()
        digest = hashlib.sha1(source + settings.encode()).hexdigest()
        return Path(self.cache) / digest[:2] / f"{digest}.jpg"

    def _fill(self, file, frames):
        """Writes (keep, H, W, 3) frames to the cache."""
        temporary = file.with_suffix(f".{secrets.token_hex(8)}.tmp")  # a name no other process has, on any machine
        with opening(f"--frame-cache {self.cache}"):
            file.parent.mkdir(parents=True, exist_ok=True)
            tall = Image.fromarray(frames.reshape(-1, *frames.shape[2:]))  # (keep * H, W, 3)
            tall.save(temporary, "jpeg", quality=92, subsampling=0)
            temporary.replace(file)


# ---- features in place of frames ----
class Features:
    """Precomputed features in place of frames: of each folder (motion, appearance, ...) T rows of the video's VIDEO.npy
    (time, width), side by side."""
    sampling, has_pixels = "uniform", False

    def __init__(self, folders, frames):
        self.folders, self.frames = folders, frames

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, F) float32 features, found by the video's name."""
        files = [Path(folder).expanduser() / f"{Path(source).stem}.npy" for folder in self.folders]
        parts = [np.atleast_2d(np.load(file, allow_pickle=False)) for file in files]  # (time, width) each
        places = [np.linspace(0, len(x) - 1, self.frames).round().astype(int) for x in parts]
        x = np.concatenate([x[at] for x, at in zip(parts, places)], 1).astype(np.float32)  # (T, F)
        if not np.isfinite(x).all():
            raise ValueError("features that are not finite")
        return torch.from_numpy(x)


def clip_options(options):
    """The clip reader that the options of load_data ask for: Features with --feature-dir, else Clips."""
    frames = options.get("frames") or 12
    if options.get("feature_dir"):
        return Features(options["feature_dir"], frames)
    short = round((options.get("image_size") or 224) * 8 / 7)
    return Clips(frames, options.get("frame_sampling") or "uniform", short, options.get("frame_cache") or "",
                 options.get("at_rest") or "uniform", options.get("read") or read_frames)


class Regions:
    """Features of the frames of a video and of the regions in them, from files as VGT's authors write them.

    A call gives (T, (1 + R) * (W + 5)) float: of each time the frame and then its regions, each a feature of width W
    and the five numbers of its box (zeros for the frame). The folder holds `acregion_8c{n}b_{split}.h5` (ids, feat
    (V, 8, 4, n, W), bbox (V, 8, 4, n, 4) in pixels) or one VIDEO.npz (feat, bbox) per video for the regions, and
    `app_feat_{split}.h5` (ids, resnet_features (V, 8, 4, W)) or one VIDEO.npy per video for the frames. The first R of
    n boxes are used. T = 4 K frames are K whole clips, evenly spaced. sizes {video: (width, height)}: of the pictures
    that boxes are measured in, else 320 x 240.   Raises: UserError if one of the two kinds of file is missing."""
    sampling, has_pixels = "uniform", False

    def __init__(self, folder, split, regions, frames):
        self.folder, self.regions, self.frames, self.sizes = Path(folder), regions, frames, {}
        self.of_regions = self._places(f"acregion_*_{split}.h5", "npz")
        self.of_frames = self._places(f"app_feat_{split}.h5", "npy")

    def _places(self, pattern, ending):
        """{video: (its file, its row in it)}; the row is None where a video has a file of its own."""
        for table in sorted(self.folder.rglob(pattern)):
            names = _array((table, slice(None)), "ids").tolist()
            return {x.decode() if isinstance(x, bytes) else str(x): (table, row) for row, x in enumerate(names)}
        paths = sorted(self.folder.rglob(f"*.{ending}"))
        if not paths:
            raise UserError(f"--region-dir {self.folder}: neither an h5 file of VGT's nor a VIDEO.{ending} is there")
        return {path.stem: (path, None) for path in paths}

    def index(self):
        """{name: video}; a video called 7 is also video7 and vid7."""
        both = self.of_regions.keys() & self.of_frames.keys()
        return {f"{word}{x}": x for x in both for word in (("", "video", "vid") if x.isdecimal() else ("",))}

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, (1 + R) * (W + 5)) float32 of a video."""
        feat, boxes = (_frames(self.of_regions[source], key, 3)[:, :self.regions] for key in ("feat", "bbox"))
        frames = _frames(self.of_frames[source], "resnet_features", 2)  # (t, W) beside (t, R, W) and (t, R, 4)
        if feat.shape[1] != self.regions:
            raise ValueError(f"{feat.shape[1]} regions in a frame, not {self.regions}")
        boxes = box_numbers(boxes, *self.sizes.get(source, (320.0, 240.0)))  # (t, R, 5)
        x = torch.cat([F.pad(frames, (0, 5))[:, None], torch.cat([feat, boxes], -1)], 1)  # (t, 1 + R, W + 5)
        x = x.unflatten(0, (-1, REGION_CLIP))  # (K, 4, 1 + R, W + 5)
        clips = torch.linspace(0, len(x) - 1, self.frames // REGION_CLIP).round().long()  # each whole
        return x[clips].flatten(0, 1).flatten(1)


def box_numbers(boxes, width, height):
    """Boxes (..., 4), x1 y1 x2 y2 in pixels -> (..., 5) for VGT: corners and area, as parts of the picture."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    area = (x2 - x1 + 1) * (y2 - y1 + 1) / (width * height)
    return torch.stack([x1 / width, y1 / height, x2 / width, y2 / height, area], -1)


def _array(place, key):
    """An array of a video: a row of an h5 file, or from a file of its own."""
    path, row = place
    if path.suffix == ".h5":
        import h5py
        with opening(path), h5py.File(path) as file:
            return file[key][row]
    x = np.load(path, allow_pickle=False)
    return x if path.suffix == ".npy" else x[key]


def _frames(place, key, axes):
    """An array of a video, float32 with `axes` axes: its last ones, after a first for the frames of all clips."""
    x = torch.from_numpy(np.asarray(_array(place, key), np.float32))
    return x.reshape(-1, *x.shape[1 - axes:])


def feature_shape(data, encoder="ssb"):
    """[T, F] of the features of a data set. Raises UserError if the first cannot be read or is pixels."""
    with opening(f"{data.name}: {data.key(0)}"):
        shape = list(data.read(0).shape)
    if len(shape) > 2:
        raise UserError(f"--image-encoder {encoder}: the data set has pixels; features come with --feature-dir of "
                        "ncl.py, regions with --region-dir of mama.py and a set of questions")
    return shape
