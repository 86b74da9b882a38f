"""Clips: how a video becomes frames, the frame cache, and features in place of frames.

The `clip` of a data set is callable: clip(source, start=None, end=None, draws=None) -> (T, 3, H, W) uint8 frames
(Clips) or (T, F) float features (Features, Regions). A source is a path or the bytes of a file; start and end are
seconds in it.
"""

import functools
import hashlib
import os
import re
import secrets
from pathlib import Path

from contrastive.data.frames import read_frames
from contrastive.data.table import decode
from contrastive.engine.processes import UserError, first_line, opening

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

REGION_CLIP = 4  # F of VGT: frames of a clip, in which region r is the same thing throughout


def clip_options(options, kind=None):
    """The clip reader that the options of load_data ask for: Features with --feature-dir, else Clips (or `kind`)."""
    frames = options.get("frames") or 12
    if options.get("feature_dir"):
        return Features(options["feature_dir"], frames)
    short = round((options.get("image_size") or 224) * 8 / 7)
    clips = (kind or Clips)(frames, options.get("frame_sampling") or "uniform", short, options.get("frame_cache") or "")
    clips.at_rest = options.get("at_rest") or clips.at_rest
    return clips


class Clips:
    """How a video becomes (T, 3, H, W) uint8: frames T, sampling, short side in pixels, a cache folder ('' = none).

    The cache holds one JPEG per clip (4:4:4), its frames one below the other (at most 65,500 rows), so a video is
    decoded once. For random frames it holds three candidates per frame. Evaluation sees the same frames with and
    without a cache. A video newer than its file in the cache is decoded anew; one that is gone is not needed."""

    at_rest = "uniform"  # how random frames are placed in evaluation

    def __init__(self, frames=12, sampling="uniform", short=256, cache=""):
        self.frames, self.sampling, self.short, self.cache = frames, sampling, short, cache

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, 3, H, W) uint8. draws (T,) in 0..1 place random frames; None = evaluation."""
        sampling = self.at_rest if self.sampling == "random" and draws is None else self.sampling
        if not self.cache:
            frames = np.ascontiguousarray(self.decode(source, self.frames, start, end, sampling, draws))
            return torch.from_numpy(frames).permute(0, 3, 1, 2)
        keep, spread = self.frames, sampling
        if sampling == "random":  # three frames to choose from
            keep, spread = 3 * self.frames, "middle"
        file = self._file(source, f"{start} {end} {keep} {spread} {self.short}")
        gone = isinstance(source, bytes) or not os.path.exists(source)
        if not file.exists() or not gone and os.path.getmtime(source) > file.stat().st_mtime + 2:  # s: a coarse clock
            self._fill(file, self.decode(source, keep, start, end, spread, None))
        x = decode(file).unflatten(1, (keep, -1)).transpose(0, 1)  # (3, keep * H, W) -> (keep, 3, H, W)
        if sampling != "random":
            return x
        choice = np.minimum(np.asarray(draws)[:self.frames] * 3, 2).astype(int)  # (T,)
        return x[torch.from_numpy(np.arange(self.frames) * 3 + choice)]  # (T, 3, H, W)

    def decode(self, source, n, start, end, sampling, draws):
        """(n, H, W, 3) uint8 frames of one source, as read_frames."""
        return read_frames(source, n, start, end, sampling, draws, self.short)

    def _file(self, source, settings):
        """The cache file of a clip; a hash in its name covers the path (or bytes) and all that changes the frames."""
        inside = isinstance(source, bytes)
        digest = hashlib.sha1(source if inside else str(Path(source).resolve()).encode())
        digest.update(settings.encode())
        stem = "clip" if inside else re.sub(r"[^A-Za-z0-9.-]+", "-", Path(source).stem)[:80]
        return Path(self.cache) / digest.hexdigest()[:2] / f"{stem}-{digest.hexdigest()[:12]}.jpg"

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
    """Precomputed features in place of frames. Each folder (motion, appearance, ...) holds one VIDEO.npy (time, width)
    per video. Each is sampled to T rows, and those of all folders are concatenated to (T, F) float."""
    sampling = "uniform"

    def __init__(self, folders, frames):
        self.folders, self.frames, self.width = folders, frames, None

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, F) float32 features, found by the video's name."""
        files = [Path(folder).expanduser() / f"{Path(source).stem}.npy" for folder in self.folders]
        parts = [np.atleast_2d(np.load(file, allow_pickle=False)) for file in files]  # (time, width) each
        places = [np.linspace(0, len(x) - 1, self.frames).round().astype(int) for x in parts]
        x = np.concatenate([x[at] for x, at in zip(parts, places)], 1).astype(np.float32)  # (T, F)
        return _checked(torch.from_numpy(x), self.width)


def _checked(x, width):
    """Features (T, F) float. Raises ValueError if they are not finite, or not of the others' width F (if it is known).
    """
    if x.ndim != 2 or width not in (None, x.shape[1]):
        raise ValueError(f"features of shape {tuple(x.shape)}, others have width {width}")
    if not x.isfinite().all():
        raise ValueError("features that are not finite")
    return x


class Regions:
    """Features of the frames of a video and of the regions in them, from files as VGT's authors write them.

    A call gives (T, (1 + R) * (W + 5)) float: of each time the frame and then its regions, each a feature of width W
    and the five numbers of its box (zeros for the frame). The folder holds `acregion_8c{n}b_{split}.h5` (ids, feat
    (V, 8, 4, n, W), bbox (V, 8, 4, n, 4) in pixels) or one VIDEO.npz (feat, bbox) per video for the regions, and
    `app_feat_{split}.h5` (ids, resnet_features (V, 8, 4, W)) or one VIDEO.npy per video for the frames. The first R of
    n boxes are read. T = 4 K frames are K whole clips of the file, evenly spaced. Nothing is kept in memory.

    `sizes` {video: (width, height)}: the pictures that boxes are measured in; a video that it lacks has 320 x 240.
    Raises: UserError if one of the two kinds of file is missing."""
    sampling = "uniform"

    def __init__(self, folder, split, regions, frames):
        self.folder, self.regions, self.frames, self.width, self.sizes = Path(folder), regions, frames, None, {}
        tables = sorted(self.folder.rglob(f"acregion_*_{split}.h5"))
        fit = [p for p in tables if int((re.findall(r"(\d+)b_", p.name) or [regions])[0]) >= regions]
        self.of_regions = self._places(fit or tables, "npz")
        self.of_frames = self._places(sorted(self.folder.rglob(f"app_feat_{split}.h5")), "npy")

    def _places(self, tables, ending):
        """{video: (its file, its row in it)}; the row is None where a video has a file of its own."""
        if tables:
            with opening(tables[0]):
                names = _table(str(tables[0]), os.getpid())["ids"][:].tolist()
            return {x.decode() if isinstance(x, bytes) else str(x): (tables[0], row) for row, x in enumerate(names)}
        paths = sorted(self.folder.rglob(f"*.{ending}"))
        if not paths:
            raise UserError(f"--region-dir {self.folder}: neither an h5 file of VGT's nor a VIDEO.{ending} is there")
        return {path.stem: (path, None) for path in paths}

    def index(self):
        """{name: [video]}, as annotations.video_index gives it. A video called 7 is also video7 and vid7."""
        out = {}
        for video in self.of_regions:
            names = (video, f"video{video}", f"vid{video}") if video.isdecimal() else (video,)
            out |= {name: [video] for name in names if video in self.of_frames}
        return out

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, (1 + R) * (W + 5)) float32 of a video."""
        some = (..., slice(self.regions), slice(None))
        feat = _array(self.of_regions[source], "feat", 3, some)                          # (t, R, W)
        boxes = _array(self.of_regions[source], "bbox", 3, some)                         # (t, R, 4)
        frames = _array(self.of_frames[source], "resnet_features", 2)                    # (t, W)
        if feat.shape[1] != self.regions:
            raise ValueError(f"{feat.shape[1]} regions in a frame, not {self.regions}")
        boxes = box_numbers(boxes, *self.sizes.get(source, (320.0, 240.0)))              # (t, R, 5)
        x = torch.cat([F.pad(frames, (0, 5))[:, None], torch.cat([feat, boxes], -1)], 1)  # (t, 1 + R, W + 5)
        x = x.unflatten(0, (-1, REGION_CLIP))                                            # (K, 4, 1 + R, W + 5)
        clips = torch.linspace(0, len(x) - 1, self.frames // REGION_CLIP).round().long()  # each whole
        return _checked(x[clips].flatten(0, 1).flatten(1), self.width)


def box_numbers(boxes, width, height):
    """Boxes (..., 4), x1 y1 x2 y2 in pixels -> (..., 5) for VGT: corners and area, as parts of the picture."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    area = (x2 - x1 + 1) * (y2 - y1 + 1) / (width * height)
    return torch.stack([x1 / width, y1 / height, x2 / width, y2 / height, area], -1)


@functools.lru_cache(maxsize=4)
def _table(path, process):
    import h5py
    return h5py.File(path, "r")  # each process its own: a handle does not survive a fork


def _array(place, key, axes, part=()):
    """An array of a video, float32 with `axes` axes: its last ones, after a first for the frames of all clips."""
    path, row = place
    if row is not None:
        x = _table(str(path), os.getpid())[key][(row, *part)]
    else:
        x = np.load(path, allow_pickle=False)
        x = (x if path.suffix == ".npy" else x[key])[part]
    x = torch.from_numpy(np.asarray(x, np.float32))
    return x.reshape(-1, *x.shape[1 - axes:])


def feature_shape(data, encoder="features"):
    """[T, F] of the features of a data set. Every later read must have this F. Raises UserError if none can be read."""
    for i in range(min(len(data), 100)):
        try:
            shape = list(data.read(i).shape)
            break
        except Exception as error:
            why = f"{data.key(i)}: {first_line(error)}"
    else:
        raise UserError(f"{data.name}: none of its first features can be read: {why}")
    if len(shape) > 2:
        raise UserError(f"--image-encoder {encoder}: the data set has pixels; features come with --feature-dir of "
                        "ncl.py, regions with --region-dir of mama.py and a set of questions")
    data.clip.width = shape[1]
    return shape
