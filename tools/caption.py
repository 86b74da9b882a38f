"""Captions for videos by a vision-language model, MAMA's augmentation (Sec. 3.3): key frames in one picture, captioned.

    python -m tools.caption --dataset VIDEOS --out captions.csv
    torchrun --nproc_per_node 8 -m tools.caption --dataset msrvtt --video-dir VIDEOS --out captions.csv
    python mama.py --dataset captions.csv --video-dir VIDEOS

--dataset is a folder of videos, with or without captions, or any data the scripts train on. The csv has columns video,
start, end, caption, one row per clip. A call that was stopped goes on where it was and loses at most one batch per
process. Batches do not depend on the number of processes, so neither do the captions. Beside the csv lie a .json with
the settings and the clips without a caption, and a .png. A call with other settings refuses to go on with the file.

Differences from the paper: (1) it does not say which features Eqs. 14-15 use; here they are those of --frame-encoder,
at unit length (d falls off at a squared distance of 1, so longer ones would be ranked by density alone). (2) The
picture is padded to a square, of 4,096 px at most: processors that crop the centre (LLaVA's) would drop the outer
frames. (3) The authors' demo finds key frames by pixel differences, uses another prompt and samples at temperature
0.2; this follows the paper. (4) Candidates for key frames are evenly spaced in the clip; the paper draws its frames at
random. (5) It is unclear whether Table 7's 3 x 4 means three columns, as here, or three rows, as in the demo (--grid).
(6) Table 5's summary is by ChatGPT; here --summary-model writes it, and the two prompts of that mode are ours.
"""

import argparse
import csv
import datetime
import glob
import json
import os
import re
from pathlib import Path

import common
from contrastive.data.frames import read_frames
from contrastive.data.table import VIDEO_TYPES
from contrastive.encoders.frozen import frame_features, summary_model, vision_language_model
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import (
    UserError,
    clean_exit,
    first_line,
    join,
    opening,
    rank,
    read_json,
    say,
    say_once,
    world,
    write_json,
)
from contrastive.engine.ranges import count, nonnegative, positive, whole
from contrastive.figures.base import draw_picture
from contrastive.figures.mama import draw_descriptions

import torch

from mama import key_frames

PROMPT = "Write a short caption sentence for the video in order from left to right, top to bottom"  # Sec. 3.3
FRAME_PROMPT = "Write a short caption sentence for the image"
SUMMARY_PROMPT = "Sentences on frames of one video in the order of time:\n{}\nWrite one sentence for the whole video."
GREY = (122, 116, 104)  # CLIP's mean pixel, with which LLaVA pads
SIDE = 4096  # px, the picture's largest side: models see a few hundred, and a square of long strips takes gigabytes
LONG = 8  # the long side of a frame is at most this many times --cell
COLUMNS = ("video", "start", "end", "caption")
SETTINGS = ("model", "augment_mode", "prompt", "template", "grid", "key_frames", "neighbours", "candidates", "cell",
            "frame_encoder", "summary_model", "frame_prompt", "summary_prompt", "max_new_tokens", "temperature",
            "top_p", "seed", "dtype")  # what a caption depends on; with a temperature also the batch


# ---- key frames and the picture ----
def chosen_frames(frames, features, k, q):
    """q key frames (q, 3, H, W) in order of time, out of frames (T, 3, H, W); repeated if fewer differ."""
    new = torch.ones(len(frames), dtype=torch.bool)
    new[1:] = (frames[1:] != frames[:-1]).flatten(1).any(1)  # a short video repeats frames
    frames = frames[new]
    frames = frames[key_frames(features(frames), k, q)]
    return frames[torch.arange(q) * len(frames) // q]


def grid_picture(frames, columns):
    """Frames (n, 3, H, W) uint8 as one square picture (PIL), left to right, top to bottom, SIDE px at most."""
    from torchvision.transforms.v2 import functional as V
    (height, width), rows = frames.shape[2:], len(frames) // columns
    if (scale := SIDE / max(rows * height, columns * width)) < 1:
        frames = V.resize(frames, [max(1, int(side * scale)) for side in (height, width)])
    sheet = frames.unflatten(0, (-1, columns)).permute(2, 0, 3, 1, 4)  # (3, rows, H, columns, W)
    sheet = sheet.flatten(3).flatten(1, 2)  # (3, rows * H, columns * W)
    height, width = sheet.shape[1:]
    square = torch.tensor(GREY, dtype=torch.uint8)[:, None, None].repeat(1, max(height, width), max(height, width))
    top, left = (square.shape[1] - height) // 2, (square.shape[2] - width) // 2
    square[:, top:top + height, left:left + width] = sheet
    return V.to_pil_image(square)


def read_candidates(path, start, end, n, cell):
    """n frames of a clip, (n, 3, H, W) uint8, short side at most `cell` px, long side at most LONG times that.

    Raises: OSError or ValueError."""
    frames = torch.from_numpy(read_frames(path, n, start, end, short=cell, long=LONG * cell).copy())  # (n, H, W, 3)
    return frames.permute(0, 3, 1, 2)


# ---- which clips ----
def clips_of(args):
    """[(video, start, end, path)] of a data set, each clip once. video: path relative to the folder of the videos.

    Raises: UserError if there are no video files (rendered clips, images, clips inside tars)."""
    path, kinds = Path(args.dataset).expanduser(), ("metadata.*", "captions.csv", "*.tar", "*.parquet", "*.jsonl")
    described = {f.resolve() for kind in kinds for f in path.rglob(kind)} if path.is_dir() else set()
    if path.is_dir() and not described - {Path(args.out).resolve()}:  # videos alone, captions or not
        files = sorted(str(f) for f in path.rglob("*") if f.suffix.lower()[1:] in (*VIDEO_TYPES, "gif"))
        found = [(f, None, None) for f in files]
    else:
        names = ("data_dir", "video_dir", "image_column", "caption_column")
        data = common.load_data(args.dataset, args.split, **{k: v for k in names if (v := getattr(args, k))})
        sources = [row["source"] for row in data.sources] if data.clip is not None and data.sources else []
        found = [(s["path"], s.get("start"), s.get("end")) for s in sources if s and s.get("size") is None]
        say(f"{args.dataset}, {args.split} split: {len(data):,} examples" + (data.note and f" ({data.note})"))
    found = [clip for clip in dict.fromkeys(found) if clip[0] and os.path.isfile(clip[0])]
    if not found:
        raise UserError(f"--dataset {args.dataset}: it has no video files")
    folder = Path(args.video_dir or args.data_dir or (path if path.is_dir() else path.parent)).expanduser().resolve()
    def below(file):
        file = Path(file).resolve()
        return str(file.relative_to(folder) if file.is_relative_to(folder) else file)
    clips = [(below(file), start, end, file) for file, start, end in found]
    return clips[:args.limit or None]


# ---- what is written ----
def check_out(args, known):
    """Raises: UserError if --out was written with other settings, or is not a file of this tool."""
    out, report = Path(args.out), Path(f"{args.out}.json")
    settings = {k: getattr(args, k) for k in SETTINGS + ("batch",) * (args.temperature > 0)}
    if out.exists() and not report.exists():
        raise UserError(f"--out {out}: exists already, without {report.name}; name another file")
    was = read_json(report, {}).get("settings") if known else settings
    if not isinstance(was, dict):
        raise UserError(f"--out {out}: {report} beside it does not say with which settings it was made; name another "
                        "file")
    for name, value in settings.items():
        if was.get(name, value if name in ("dtype", "batch") else None) != value:  # older files lack these two
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"--out {out}: was made with {flag} {was.get(name)}, not {value}; name another file")
    if not known and rank() == 0:
        write_json(report, {"settings": settings})


def read_known(out):
    """{(video, start, end): {caption} or {error}} from the csv and part files of an earlier call, without cut lines.

    Raises: UserError if the csv, or a part file of a process beside it, was not written by this tool."""
    rows, cut = [], 0
    with opening(f"--out {out}: not a file of this tool; name another one"):
        if Path(out).exists():
            with open(out, newline="", encoding="utf-8-sig") as f:
                rows = list(csv.DictReader(f, strict=True))
        for file in sorted(glob.glob(f"{glob.escape(str(out))}.part*")):
            for line in filter(str.strip, Path(file).read_text(encoding="utf8").split("\n")):
                try:
                    rows.append(json.loads(line))
                except ValueError:  # cut when a process was killed
                    cut += 1
        known = [_known(row) for row in rows]
    if cut:
        say_once(f"{out}: {cut:,} lines of an earlier call were cut; their clips are captioned again")
    return dict(sorted(known, key=lambda pair: "caption" in pair[1]))  # a caption overrides an earlier error


def _known(row):
    """((video, start, end), {caption} or {error}) of one row."""
    start, end = (None if row[k] in (None, "") else float(row[k]) for k in ("start", "end"))
    return (row["video"], start, end), {k: row[k] for k in ("caption", "error") if row.get(k)}


def write_lines(file, records):
    """Appends {(video, start, end): record} to a process's own part file."""
    with opening(file), open(file, "a", encoding="utf8") as f:
        f.write("\n")  # in case a kill left an unfinished line
        for (video, start, end), record in records.items():
            f.write(json.dumps({"video": video, "start": start, "end": end} | record) + "\n")


def merge(args, clips):
    """On the main process: writes the csv, in the order of the data with rows of other clips last, and deletes the part
    files.   Returns: (number of rows, {clip: why it has no caption})."""
    known, out = read_known(args.out), Path(args.out)
    known = {clip[:3]: known[clip[:3]] for clip in clips if clip[:3] in known} | known
    rows = [(*clip, record["caption"]) for clip, record in known.items() if "caption" in record]
    bad = {clip: record.get("error", "") for clip, record in known.items() if "caption" not in record}
    temporary = Path(f"{out}.tmp")
    with opening(out):
        with open(temporary, "w", newline="", encoding="utf8") as f:
            csv.writer(f).writerows([COLUMNS, *(["" if x is None else x for x in row] for row in rows)])
        os.replace(temporary, out)
    lost = [dict(zip(("video", "start", "end", "why"), (*clip, why))) for clip, why in bad.items()]
    report = Path(f"{out}.json")
    write_json(report, read_json(report) | {"captions": len(rows), "without": lost})
    for file in glob.glob(f"{glob.escape(str(out))}.part*"):
        os.remove(file)
    return len(rows), bad


def write_captions(args, clips):
    """Writes captions of all clips to --out; every process does its share of the batches.   Returns: on the main
    process, as merge."""
    place, processes = rank(), world()
    if args.dtype == "auto" and (args.cpu or not torch.cuda.is_available()):
        args.dtype = "float32"  # half precision is slow on a CPU
    known = read_known(args.out)
    check_out(args, known)
    done = {clip for clip, record in known.items() if "caption" in record}
    wait_for_all()  # no process writes before all have read
    batches = [clips[i:i + args.batch] for i in range(0, len(clips), args.batch)][place::processes]
    batches = [batch for batch in batches if any(clip[:3] not in done for clip in batch)]
    left = sum(clip[:3] not in done for clip in clips)
    say(f"{len(clips) - left:,} of {len(clips):,} clips have a caption in {args.out}, {left:,} to do")
    if batches:
        work(args, batches, done)
    wait_for_all()
    return merge(args, clips) if place == 0 else None


def wait_for_all():
    """A barrier with a timeout of days: one process may have all the long videos."""
    if world() > 1:
        torch.distributed.monitored_barrier(timeout=datetime.timedelta(days=30))


def work(args, batches, done):
    """Captions of this process's batches, written batch by batch. A batch that a kill interrupted is captioned again as
    a whole, since sampling depends on all of it, but only the clips that are not in `done` are written."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() and not args.cpu else "cpu"
    columns = int(args.grid.split("x")[0])
    answers = vision_language_model(args, device)
    summaries = summary_model(args, device) if args.augment_mode == "per-frame-summary" else None
    features = frame_features(args.frame_encoder, device)
    file = Path(f"{args.out}.part{rank()}")
    from tqdm import tqdm
    for batch in tqdm(batches, desc="captions", unit="batch", disable=rank() > 0):
        frames, records = {}, {}
        for video, start, end, path in sorted(batch, key=lambda clip: clip[:3] in done):  # false first
            if (video, start, end) in done and not frames:
                break  # no clip that is left to do can be read
            try:
                candidates = read_candidates(path, start, end, args.candidates, args.cell)
            except (OSError, ValueError) as error:
                records[video, start, end] = {"error": first_line(error)}
                continue
            frames[video, start, end] = chosen_frames(candidates, features, args.neighbours, args.key_frames)
        frames = {clip[:3]: frames[clip[:3]] for clip in batch if clip[:3] in frames}  # in the batch's order
        torch.manual_seed(common.key_hash(f"{args.seed} {batch[0][:3]}"))
        if summaries is None:
            texts = answers([grid_picture(x, columns) for x in frames.values()], args.prompt) if frames else []
        else:
            texts = [[text for i in range(0, len(x), args.batch)
                      for text in answers([grid_picture(f[None], 1) for f in x[i:i + args.batch]], args.frame_prompt)]
                     for x in frames.values()]
            texts = summaries([args.summary_prompt.replace("{}", "\n".join(t)) for t in texts]) if texts else []
        for clip, said in zip(frames, texts, strict=True):
            records[clip] = {"caption": said} if said else {"error": "the model says nothing"}
        write_lines(file, {clip: record for clip, record in records.items() if clip not in done})


# ---- the command line ----
def grid(text):
    """3x4 -> '3x4', columns x rows."""
    if not re.fullmatch(r"[1-9]\d?x[1-9]\d?", text):
        raise argparse.ArgumentTypeError(f"{text}: must be COLUMNSxROWS, such as 3x4")
    return text


def parse_args(argv=None):
    """The flags."""
    p = OneLine("python -m tools.caption", __doc__.splitlines()[0])
    p.add_argument("--dataset", required=True, help="folder of videos, or name, folder, file or hub id as for mama.py")
    p.add_argument("--split", choices=["train", "val", "test"], default="train", help="which split of the set")
    p.add_argument("--data-dir", help="where annotations lie and relative paths start")
    p.add_argument("--video-dir", help="folder of the videos")
    p.add_argument("--image-column", help="column of the videos; else found by its name")
    p.add_argument("--caption-column", help="column of the existing captions; else found by its name")
    p.add_argument("--limit", type=whole, default=0, help="only the first clips; 0 = all")
    p.add_argument("--out", required=True, metavar="FILE", help="csv to write, or to go on with")
    p.add_argument("--model", default="llava-hf/llava-1.5-7b-hf", help="image-text-to-text model, hub id or folder")
    p.add_argument("--augment-mode", choices=["grid", "per-frame-summary"], default="grid",
                   help="grid: one caption of a picture of all key frames; per-frame-summary: a caption per key frame, "
                        "then a summary of these (Table 5)")
    p.add_argument("--key-frames", type=count, default=12, help="Q of Sec. 3.3, key frames of a video (paper: 12)")
    p.add_argument("--neighbours", type=count, default=6, help="K of Eq. 14, nearest neighbours (paper: 6)")
    p.add_argument("--grid", type=grid, default="3x4", help="W x H, columns x rows of the picture; "
                   "paper 3x4 (Table 7), which may be 3 columns and 4 rows or, as in its authors' demo, 4 and 3 (4x3)")
    p.add_argument("--candidates", type=count, default=64,
                   help="evenly spaced frames among which the key frames are chosen (paper: random frames)")
    p.add_argument("--cell", type=count, default=224, help="short side of a frame in the picture, px at most")
    p.add_argument("--frame-encoder", default="facebook/dinov2-small",
                   help="features of Eqs. 14-15: timm name, transformers id, folder, or colour (no model, crude)")
    p.add_argument("--prompt", default=PROMPT, help="what the model is asked (paper: the default)")
    p.add_argument("--template", default="", help="text with {} for the prompt, such as 'USER: <image>\\n{} "
                                                  "ASSISTANT:'; empty = the model's own")
    p.add_argument("--summary-model", default="", help="language model of per-frame-summary, hub id or folder")
    p.add_argument("--frame-prompt", default=FRAME_PROMPT, help="per-frame-summary: the prompt for each frame")
    p.add_argument("--summary-prompt", default=SUMMARY_PROMPT, help="per-frame-summary: {} = the captions")
    p.add_argument("--max-new-tokens", type=count, default=77, help="longest caption, in tokens")
    p.add_argument("--temperature", type=nonnegative, default=0.0, help="of sampling; 0 = greedy")
    p.add_argument("--top-p", type=positive, default=1.0, help="of sampling: probability mass of the likeliest tokens")
    p.add_argument("--seed", type=whole, default=0, help="of sampling")
    p.add_argument("--batch", type=count, default=4, help="clips at a time on each process")
    p.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
                   help="of the weights; auto = as saved, float32 on a CPU")
    p.add_argument("--show", type=whole, default=6,
                   help="clips in the picture FILE.png, four frames each with their caption (Fig. 6); 0 = no picture")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    args = p.parse_args(argv)
    columns, rows = map(int, args.grid.split("x"))
    summary = args.augment_mode == "per-frame-summary"
    p.require(summary or columns * rows == args.key_frames,
              f"--grid {args.grid} has {columns * rows} places for --key-frames {args.key_frames}; change one of them")
    p.require(summary == bool(args.summary_model),
              "--summary-model goes with --augment-mode per-frame-summary, which needs one")
    p.require(args.candidates >= args.key_frames, f"--candidates {args.candidates} must be at least --key-frames "
                                                  f"{args.key_frames}")
    p.require("{}" in (args.template or "{}"), "--template must say where the prompt goes: {}")
    p.require("{}" in args.summary_prompt, "--summary-prompt must say where the captions go: {}")
    return args


def main(argv=None):
    """The command line. Raises: UserError."""
    args = parse_args(argv)
    clips = clips_of(args)
    join(cpu=True)  # the processes share only files
    if args.frame_encoder == "colour":
        say("--frame-encoder colour: key frames by mean colours, a crude stand-in for learned features")
    done = write_captions(args, clips)
    if done:
        rows, bad = done
        first = [f"{video}: {why}" for (video, *_), why in bad.items()][:5]
        lost = f"; {len(bad):,} clips have none, all listed in {args.out}.json: {'; '.join(first)}" if bad else ""
        say(f"{args.out}: {rows:,} captions{lost}")
        if not rows:
            raise UserError(f"--dataset {args.dataset}: no clip got a caption, first {first[0]}")
        show(args, clips)


def show(args, clips):
    """Draws a few evenly chosen clips with their captions, beside the csv."""
    known = read_known(args.out)
    told = [clip for clip in clips if "caption" in known.get(clip[:3], {})]
    some = [told[k] for k in sorted({len(told) * k // args.show for k in range(args.show)})] if told else []
    if not some:
        return
    drawn = [(read_candidates(path, start, end, 4, 96), known[video, start, end]["caption"])
             for video, start, end, path in some]
    title = f"{Path(args.dataset).name}: descriptions by {Path(args.model).name}"
    draw_picture(Path(f"{args.out}.png"), draw_descriptions, drawn, title=title)


if __name__ == "__main__":
    with clean_exit():
        main()
