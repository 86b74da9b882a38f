"""Captions for videos by a vision-language model, MAMA's augmentation (Sec. 3.3): key frames in one picture, captioned.

    python -m tools.caption --dataset VIDEOS --out captions.csv
    torchrun --nproc_per_node 8 -m tools.caption --dataset msrvtt --video-dir VIDEOS --out captions.csv
    python mama.py --dataset captions.csv --video-dir VIDEOS

--dataset is a folder of videos alone, or any data the scripts train on: its train split. The csv has columns video,
start, end, caption, one row per clip. A call that was stopped goes on where it was and loses at most one batch per
process. Batches do not depend on the number of processes, so neither do the captions. Beside the csv lie what each
process has written, a .json with the settings and the clips without a caption, and a .png. With other settings a call
does not go on with the file.

Differences from the paper: (1) it does not say which features Eqs. 14-15 use; here those of --frame-encoder, at unit
length (d falls off at a squared distance of 1: longer ones would be ranked by density alone). (2) The picture is padded
to a square: LLaVA's processor crops the centre. (3) The authors' demo finds key frames by pixel differences, has
another prompt and samples at temperature 0.2; this follows the paper. (4) Candidates for key frames are evenly spaced;
the paper draws frames at random. (5) Table 7's 3 x 4 may mean three columns, as here, or three rows, as in the demo
(--grid). (6) Table 5's summary of a caption per frame is by ChatGPT; here by --summary-model, with prompts of ours.
"""

import csv
import datetime
import glob
import json
import os
from pathlib import Path

import common
from contrastive.data import data_options
from contrastive.data.frames import read_frames
from contrastive.data.table import VIDEO_TYPES, frames_of
from contrastive.encoders.frozen import frame_features, language_model
from contrastive.engine import processes
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, opening, rank, read_json, say, world, write_json
from contrastive.engine.ranges import count, nonnegative, whole
from contrastive.figures.base import wrap
from contrastive.figures.mama import draw_clips

import numpy as np
import torch
from PIL import ImageOps
from tqdm import tqdm

from mama import key_frames

PROMPT = "Write a short caption sentence for the video in order from left to right, top to bottom"  # Sec. 3.3
FRAME_PROMPT = "Write a short caption sentence for the image"
SUMMARY_PROMPT = "Sentences on frames of one video in the order of time:\n{}\nWrite one sentence for the whole video."
GREY = (122, 116, 104)  # CLIP's mean pixel, with which LLaVA pads
CELL = 224  # px, the short side of a frame in the picture, at most; the long one at most four times that
SETTINGS = ("model", "grid", "candidates", "frame_encoder", "summary_model", "max_new_tokens", "temperature", "seed",
            "dtype", "batch")                                              # on which a caption may depend


# ---- key frames and the picture ----
def chosen_frames(frames, features, q):
    """q key frames (q, 3, H, W) in order of time, out of frames (T, 3, H, W); repeated if fewer differ."""
    frames = frames.unique_consecutive(dim=0)                              # a short video repeats frames
    frames = frames[key_frames(features(frames), q=q)]
    return frames[torch.arange(q) * len(frames) // q]


def grid_picture(frames, columns):
    """Frames (n, 3, H, W) uint8 as one square picture (PIL), left to right, top to bottom."""
    from torchvision.transforms.v2.functional import to_pil_image
    from torchvision.utils import make_grid
    sheet = to_pil_image(make_grid(frames, columns, padding=0))            # columns * W wide, rows * H high
    return ImageOps.pad(sheet, 2 * (max(sheet.size),), color=GREY)


def read_candidates(path, start, end, n):
    """n frames of a clip, (n, 3, H, W) uint8, short side at most CELL px.   Raises: what a reader raises."""
    frames = read_frames(path, n, start, end, short=CELL, long=4 * CELL)                      # (n, H, W, 3)
    return torch.from_numpy(frames.copy()).permute(0, 3, 1, 2)


# ---- which clips, and what is known of them ----
def clips_of(args):
    """{(video, start, end): path} of a data set. video: path relative to the folder of the videos.

    Raises: UserError if there are no video files (rendered clips, images, clips inside tars)."""
    path = Path(args.dataset).expanduser()
    if path.is_dir() and not any(path.rglob("metadata.*")):                # videos alone
        files = sorted(str(f) for f in path.rglob("*") if f.suffix.lower()[1:] in (*VIDEO_TYPES, "gif"))
        sources = [{"path": file} for file in files]
    else:
        data = common.load_data(args.dataset, "train", **data_options(args))
        sources = [row["source"] for row in data.sources or () if row["source"]] if frames_of(data) else []
    folder = Path(args.video_dir or args.data_dir or (path if path.is_dir() else path.parent)).expanduser().resolve()
    clips = {}
    for s in sources:
        if s["path"] and s.get("size") is None and (file := Path(s["path"]).resolve()).is_file():
            name = str(file.relative_to(folder) if file.is_relative_to(folder) else file)
            clips[name, s.get("start"), s.get("end")] = file
    if not clips:
        raise UserError(f"--dataset {args.dataset}: it has no video files")
    return clips


def read_known(out):
    """{(video, start, end): {video, start, end, caption, why: it has none}} from what all processes have written."""
    with opening(out):
        files = glob.glob(f"{glob.escape(out)}.*.jsonl")
        lines = [line for file in files for line in Path(file).read_text().split("\n")]
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may have cut a line
    rows.sort(key=lambda row: bool(row["caption"]))                        # a caption overrides an earlier failure
    return {(row["video"], row["start"], row["end"]): row for row in rows}


def write_all(args, clips, report):
    """Writes the csv, in the order of the data with rows of other clips last, the .json and the .png."""
    known = read_known(args.out)
    rows = ({clip: known[clip] for clip in clips} | known).values()
    told, without = ([row for row in rows if bool(row["caption"]) == has] for has in (True, False))
    with opening(args.out), open(args.out, "w", newline="", encoding="utf8") as f:
        table = csv.DictWriter(f, ["video", "start", "end", "caption"], extrasaction="ignore")
        table.writeheader()
        table.writerows(told)
    write_json(report, read_json(report) | {"captions": len(told), "without": without})
    say(f"{args.out}: {len(told):,} captions; {len(without):,} clips have none (see {report})")
    mine = [clip for clip in clips if known[clip]["caption"]]
    drawn = [(np.concatenate([*read_frames(clips[clip], 4, *clip[1:], short=96, long=384)], 1),
              wrap(known[clip]["caption"], 50)) for clip in mine[::max(1, len(mine) // 6)][:6]]     # (H, 4 W, 3)
    if drawn:
        draw_clips(drawn, f"{args.out}.png", f"{Path(args.dataset).name}: captions by {Path(args.model).name}",
                   width=4.2, words=0.5)


# ---- captions ----
def work(args, batches):
    """Captions of this process's batches, written batch by batch."""
    columns, rows = args.grid
    sees, features = language_model(args.model, args, sees=True), frame_features(args.frame_encoder, args.device)
    summaries = language_model(args.summary_model, args) if args.summary_model else None
    for batch in tqdm(batches, desc="captions", unit="batch", disable=rank() > 0):
        frames, said = {}, {}
        for clip, path in batch:
            try:
                candidates = read_candidates(path, *clip[1:], args.candidates)
            except Exception as error:                                     # a bad sample
                said[clip] = {"caption": "", "why": processes.first_line(error)}
                continue
            frames[clip] = chosen_frames(candidates, features, columns * rows)
        torch.manual_seed(common.key_hash(f"{args.seed} {batch[0][0]}"))
        texts = []
        if frames and not summaries:
            texts = sees([PROMPT] * len(frames), [grid_picture(x, columns) for x in frames.values()])
        elif frames:
            told = [sees([FRAME_PROMPT] * len(x), [grid_picture(frame[None], 1) for frame in x])
                    for x in frames.values()]
            texts = summaries([SUMMARY_PROMPT.format("\n".join(of_frames)) for of_frames in told])
        for clip, text in zip(frames, texts):
            said[clip] = {"caption": text, "why": "" if text else "the model says nothing"}
        lines = [json.dumps(dict(zip(("video", "start", "end"), clip)) | row) for clip, row in said.items()]
        with opening(args.out), open(f"{args.out}.{rank()}.jsonl", "a") as f:
            f.write("\n" + "\n".join(lines) + "\n")                        # a kill may have cut the line before


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLine("python -m tools.caption", __doc__.splitlines()[0])
    p.add_argument("--dataset", required=True, help="folder of videos, or name, folder, file or hub id as for mama.py")
    for flag in ("--data-dir", "--video-dir", "--image-column", "--caption-column"):
        p.add_argument(flag, default="", help="as in training")
    p.add_argument("--out", required=True, metavar="FILE", help="csv to write, or to go on with")
    p.add_argument("--model", default="llava-hf/llava-1.5-7b-hf", help="image-text-to-text model, hub id or folder")
    p.add_argument("--grid", type=count, nargs=2, default=[3, 4], metavar=("COLUMNS", "ROWS"),
                   help="of the picture, one key frame a place (paper: 3x4, Table 7; its authors' demo: 4 3)")
    p.add_argument("--candidates", type=count, default=64,
                   help="evenly spaced frames of which the key frames are chosen (paper: random frames)")
    p.add_argument("--frame-encoder", default="facebook/dinov2-small",
                   help="features of Eqs. 14-15: timm name, transformers id, folder, or colour (no model, crude)")
    p.add_argument("--summary-model", default="", help="language model, hub id or folder, that sums up captions of the "
                                                       "key frames (Table 5), instead of one caption of their picture")
    p.add_argument("--max-new-tokens", type=count, default=77, help="longest caption, in tokens")
    p.add_argument("--temperature", type=nonnegative, default=0.0, help="of sampling; 0 = greedy")
    p.add_argument("--seed", type=whole, default=0, help="of sampling")
    p.add_argument("--batch", type=count, default=4, help="clips at a time on each process")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    args = p.parse_args(argv)
    args.device = "cpu" if args.cpu or not torch.cuda.is_available() else f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    args.dtype = "float32" if args.device == "cpu" else "auto"             # half precision is slow on a CPU
    clips, report = clips_of(args), Path(f"{args.out}.json")
    settings = {k: getattr(args, k) for k in SETTINGS}
    if Path(args.out).exists() > report.exists() or read_json(report, {"settings": settings})["settings"] != settings:
        raise UserError(f"--out {args.out}: was made with other settings, see {report.name}; name another file")
    processes.join(cpu=True)                                                         # the processes share only files
    if rank() == 0:
        write_json(report, read_json(report, {}) | {"settings": settings})
    done = {clip for clip, row in read_known(args.out).items() if row["caption"]}
    say(f"{len(done & clips.keys()):,} of {len(clips):,} clips have a caption in {args.out}")
    batches = [[*clips.items()][i:i + args.batch] for i in range(0, len(clips), args.batch)][rank()::world()]
    if batches := [batch for batch in batches if any(clip not in done for clip, _ in batch)]:
        work(args, batches)
    if world() > 1:                                                        # one process may have all the long videos
        torch.distributed.monitored_barrier(timeout=datetime.timedelta(days=30))
    if rank() == 0:
        write_all(args, clips, report)


if __name__ == "__main__":
    with processes.clean_exit():
        main()
