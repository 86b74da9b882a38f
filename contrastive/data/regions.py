"""Features of frames and of their regions, in place of videos, as VGT's authors write them."""

from pathlib import Path

from contrastive.core.processes import UserError, opening
from contrastive.data.annotations import only_file
from contrastive.data.folders import files_below

import torch
import torch.nn.functional as F

CLIP_FRAMES = 4  # F of VGT: frames of a clip, in which region r is the same thing throughout
PICTURE_SIZE = (320.0, 240.0)  # width and height of a picture of unknown size


class Regions:
    """Reads clips as features of their frames and regions.

    Those of regions are in acregion_8c{n}b_{split}.h5: ids, feat (V, 8, 4, n, W) and bbox
    (V, 8, 4, n, 4) in pixels; those of frames in app_feat_{split}.h5: ids and resnet_features
    (V, 8, 4, W).

    Args:
        folder: of both files.
        split: in their names.
        regions: R, of which the first of n are used.
        frames: T = 4 K, which are K whole clips, evenly spaced.
    Raises: UserError if a file is missing or there twice, or has a video twice.
    """

    sampling = "uniform"

    def __init__(self, folder, split, regions, frames):
        self.regions = regions
        self.frames = frames
        # {video: (width, height) of the pictures in which boxes are measured}, else PICTURE_SIZE
        self.sizes = {}
        self.region_file = find_file(folder, f"acregion_*_{split}.h5")
        self.frame_file = find_file(folder, f"app_feat_{split}.h5")
        self.region_rows = rows_of_videos(self.region_file)
        self.frame_rows = rows_of_videos(self.frame_file)

    def index(self):
        """{name: video}; a video called 7 is also video7 and vid7."""
        index = {}
        for video in self.region_rows.keys() & self.frame_rows.keys():
            index[video] = video
            if video.isdecimal():
                index[f"video{video}"] = video
                index[f"vid{video}"] = video
        return index

    def __call__(self, source, start=None, end=None, draws=None):
        """(T, (1 + R) * (W + 5)) float32 of a video: at each time the frame and then its regions,
        each a feature of width W and the five numbers of its box (zeros for the frame)."""
        row = self.region_rows[source]
        regions = read_row(self.region_file, "feat", row)[:, :self.regions]     # (t, R, W)
        boxes = read_row(self.region_file, "bbox", row)[:, :self.regions]       # (t, R, 4)
        frames = read_row(
            self.frame_file, "resnet_features", self.frame_rows[source])        # (t, W)
        if regions.shape[1] != self.regions:
            raise ValueError(f"{regions.shape[1]} regions in a frame, not {self.regions}")
        boxes = box_numbers(boxes, *self.sizes.get(source, PICTURE_SIZE))       # (t, R, 5)
        regions = torch.cat([regions, boxes], -1)                               # (t, R, W + 5)
        frames = F.pad(frames, (0, 5))[:, None]                                 # (t, 1, W + 5)
        x = torch.cat([frames, regions], 1)                                     # (t, 1 + R, W + 5)
        x = x.unflatten(0, (-1, CLIP_FRAMES))                              # (K, 4, 1 + R, W + 5)
        num_clips = self.frames // CLIP_FRAMES
        clips = torch.linspace(0, len(x) - 1, num_clips).round().long()
        return x[clips].flatten(0, 1).flatten(1)


def find_file(folder, pattern):
    """The file with this pattern below the folder of --region-dir."""
    files = [path for path in sorted(map(Path, files_below(folder))) if path.match(pattern)]
    if not files:
        raise UserError(f"--region-dir {folder}: {pattern} is not there")
    return only_file(pattern, files)


def rows_of_videos(file):
    """{video: row} of an h5 file."""
    import h5py

    with opening(file), h5py.File(file) as content:
        names = content["ids"][:].tolist()
    rows = {}
    for row, name in enumerate(names):
        if isinstance(name, bytes):
            name = name.decode()
        if str(name) in rows:
            raise UserError(f"{file}: the video {name} is there twice")
        rows[str(name)] = row
    return rows


def read_row(file, key, row):
    """The array of a video in an h5 file as float32, with one axis in place of clips and frames."""
    import h5py

    with h5py.File(file) as content:
        return torch.from_numpy(content[key][row]).float().flatten(0, 1)


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
