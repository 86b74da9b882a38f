"""How a video becomes the input of an encoder: the `clip` of a data set.

A clip is called as clip(source, start=None, end=None, draws=None) and gives (T, 3, H, W) uint8
frames (Clips) or (T, F) float features (Features; Regions of regions.py). A source is a path or the
bytes of a file; start and end are seconds in it; draws are (T,) numbers in 0..1 that place random
frames, None in evaluation.
"""

import functools
import hashlib
import io
import os
import secrets
import sys
from pathlib import Path

from contrastive.core.files import whole_file
from contrastive.core.processes import UserError, opening
from contrastive.data.frames import read_frames
from contrastive.data.pixels import decode

import numpy as np
import torch
from PIL import Image

DEFAULT_FRAMES = 12
DEFAULT_SIDE = 224  # pixels of a side of a view
JPEG_QUALITY = 92  # quality of the files of the frame cache
CACHED_PER_FRAME = 3  # cached frames for each random one


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
