"""Captions for videos by a vision-language model: MAMA's augmentation of its data (Sec. 3.3).

    python -m tools.caption --dataset VIDEOS --out captions.csv
    torchrun --nproc_per_node 8 -m tools.caption --dataset msrvtt --video-dir VIDEOS --out FILE
    python mama.py --dataset captions.csv --video-dir VIDEOS

Key frames of a clip are put into one picture, which the model captions. --dataset is a folder of
videos alone, or any data the scripts train on: its train split. The csv has columns video, start,
end, caption, one row per clip. A call that was stopped goes on where it was and loses at most one
batch per process. Batches do not depend on the number of processes, so neither do the captions.
Beside the csv lie what each process has written, a .json with the settings and the clips without a
caption, and a .png. With other settings, or with videos of another folder, a call does not go on
with the file.

Differences from the paper: (1) it does not say which features Eqs. 14-15 use; here those of
--frame-encoder, at unit length (d falls off at a squared distance of 1: longer ones would be ranked
by density alone). (2) The picture is padded to a square: LLaVA's processor crops the centre.
(3) The authors' demo finds key frames by pixel differences, has another prompt and samples at
temperature 0.2; this follows the paper. (4) Candidates for key frames are evenly spaced; the paper
draws frames at random. (5) Table 7's 3 x 4 may mean three columns, as here, or three rows, as in
the demo (--grid). (6) Table 5's summary of a caption per frame is by ChatGPT; here by
--summary-model, with prompts of ours.
"""

import csv
import datetime
import glob
import json
import os
from pathlib import Path

import common
from contrastive.data import data_options
from contrastive.data.folders import files_below, sort_files
from contrastive.data.frames import read_frames
from contrastive.data.pixels import VIDEO_TYPES
from contrastive.data.additions import path_of_source
from contrastive.data.table import frames_of
from contrastive.encoders.image_encoders import check_image_encoder, encoder_kind
from contrastive.engine.flags import OneLineErrorParser
from contrastive.core.files import read_json, write_json
from contrastive.core.processes import (
    UserError, clean_exit, first_line, join, opening, rank, print_main, world_size)
from contrastive.core.number_types import int_ge1, nonnegative_float, int_ge0
from contrastive.figures.base import wrap
from contrastive.figures.mama import draw_clips

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ImageOps
from tqdm import tqdm

# Sec. 3.3
PROMPT = ("Write a short caption sentence for the video in order from left to right, top to "
          "bottom")
FRAME_PROMPT = "Write a short caption sentence for the image"
SUMMARY_PROMPT = ("Sentences on frames of one video in the order of time:\n{}\nWrite one sentence "
                  "for the whole video.")
GREY = (122, 116, 104)  # CLIP's mean pixel, with which LLaVA pads
CELL = 224  # px, the short side of a frame in the picture, at most; the long one at most four times
# flags on which a caption may depend
SETTINGS = ("model", "grid", "candidates", "frame_encoder", "summary_model", "max_new_tokens",
            "temperature", "seed", "dtype", "batch")


# ----------------------------------------------------- key frames and the picture ----------------
def choose_key_frames(frames, features, q):
    """q key frames (q, 3, H, W) in order of time, out of frames (T, 3, H, W).

    They are repeated if fewer differ.
    Args:
        features: function of frames -> (T, width).
    """
    frames = frames.unique_consecutive(dim=0)  # a short video repeats frames
    frames = frames[common.key_frames(features(frames), q=q)]
    return frames[torch.arange(q) * len(frames) // q]


def grid_picture(frames, columns):
    """Frames (n, 3, H, W) uint8 as one square picture (PIL), left to right, top to bottom."""
    from torchvision.transforms.v2.functional import to_pil_image
    from torchvision.utils import make_grid

    sheet = to_pil_image(make_grid(frames, columns, padding=0))  # columns * W wide, rows * H high
    side = max(sheet.size)
    return ImageOps.pad(sheet, (side, side), color=GREY)


def read_candidates(path, start, end, n):
    """n frames of a clip, (n, 3, H, W) uint8, short side at most CELL px."""
    frames = read_frames(path, n, start, end, short=CELL, long=4 * CELL)   # (n, H, W, 3)
    return torch.from_numpy(frames.copy()).permute(0, 3, 1, 2)


def frame_features(name, device):
    """A function from frames (T, 3, H, W) uint8 to features (T, D), which finds alike frames.

    Args:
        name: "colour", mean colours on a 4 x 4 grid, without a model; else a timm or transformers
            model, whose features have unit length.

    Raises:
        UserError: for a name without published weights.
    """
    if name == "colour":
        return colour_features
    check_image_encoder(name, "--frame-encoder")
    if not encoder_kind(name).has_published_weights:
        raise UserError(f"--frame-encoder {name}: has no published weights; give colour, or a "
                        "model of timm or transformers")
    encoder = common.VisionEncoder(name, 0).to(device).eval()
    config = encoder.config or {}
    side = config.get("vision_config", {}).get("image_size", 224)  # a CLIP takes no other size
    view = common.EvalTransform(side, *encoder.stats, resize="squash")

    @torch.inference_mode()
    def unit_features(frames):
        pixels = view.raw(frames).to(device).float() / 255
        features, _ = encoder(view.normalise(pixels))                    # (T, D)
        return common.normalize(features)

    return unit_features


def colour_features(frames):
    """Mean colours (T, 48) of frames (T, 3, H, W) uint8 on a 4 x 4 grid."""
    grid = F.adaptive_avg_pool2d(frames.float() / 255, 4)                # (T, 3, 4, 4)
    return grid.flatten(1) / 48**0.5


# ----------------------------------------------------- clips and their captions so far -----------
def find_clips(args):
    """{(video, start, end): path} of a data set; video: path relative to the folder of the videos.

    Raises: UserError if there are no video files (rendered clips, images, clips inside tars).
    """
    path = Path(args.dataset).expanduser()
    root = video_folder(args)
    clips = {}
    for source in find_sources(args, path):
        if not source or not path_of_source(source):
            continue
        file = Path(path_of_source(source)).resolve()
        if file.is_file():
            name = file
            if file.is_relative_to(root):
                name = file.relative_to(root)
            clips[str(name), source.get("start"), source.get("end")] = file
    if not clips:
        raise UserError(f"--dataset {args.dataset}: it has no video files; give a folder of videos "
                        "or data with videos")
    return clips


def video_folder(args):
    """The full path of the folder to which the names of videos are relative."""
    path = Path(args.dataset).expanduser()
    folder = path.parent
    if path.is_dir():
        folder = path
    return Path(args.video_dir or args.data_dir or folder).expanduser().resolve()


def find_sources(args, path):
    """The cells of the column source of --dataset: {path[, start, end, size]} of each clip."""
    sources = []
    if path.is_dir() and not sort_files(path)["metadata"]:  # videos alone
        for file in sorted(files_below(path)):
            ending = Path(file).suffix.lower()[1:]
            if ending in (*VIDEO_TYPES, "gif"):
                sources.append({"path": file})
        return sources
    data = common.load_data(args.dataset, "train", data_options(args))
    if frames_of(data) and data.sources is not None:  # no images, no pixels in memory
        sources = list(data.values_of_column("source"))
    return sources


def read_rows(out):
    """{clip: row} that all processes have written so far.

    A clip is (video, start, end); a row has video, start, end, caption and why it has none.
    """
    rows = []
    with opening(out):
        for file in glob.glob(f"{glob.escape(out)}.*.jsonl"):
            for line in Path(file).read_text().split("\n"):
                if line.endswith("}"):  # a kill may have cut a line
                    rows.append(json.loads(line))
    rows.sort(key=lambda row: bool(row["caption"]))  # a caption overrides an earlier failure
    return {(row["video"], row["start"], row["end"]): row for row in rows}


def write_results(args, clips, report):
    """Writes the csv, in the order of the data with rows of other clips last, and the .json."""
    rows_of_clips = read_rows(args.out)
    ordered = {clip: rows_of_clips[clip] for clip in clips}
    ordered.update(rows_of_clips)
    captioned, uncaptioned = [], []
    for row in ordered.values():
        if row["caption"]:
            captioned.append(row)
        else:
            uncaptioned.append(row)
    with opening(args.out), open(args.out, "w", newline="", encoding="utf8") as file:
        table = csv.DictWriter(file, ["video", "start", "end", "caption"], extrasaction="ignore")
        table.writeheader()
        table.writerows(captioned)
    content = read_json(report)
    content.update(captions=len(captioned), without=uncaptioned)
    write_json(report, content)
    print_main(f"{args.out}: {len(captioned):,} captions; {len(uncaptioned):,} clips have none "
               f"(see "
               f"{report})")
    draw_captions(args, clips, rows_of_clips)


def draw_captions(args, clips, rows_of_clips):
    """Draws six clips with their captions (Fig. 6)."""
    captioned = [clip for clip in clips if rows_of_clips[clip]["caption"]]
    step = max(1, len(captioned) // 6)
    pictures = []
    for clip in captioned[::step][:6]:
        _, start, end = clip
        frames = read_frames(clips[clip], 4, start, end, short=96, long=384)         # (4, H, W, 3)
        caption = wrap(rows_of_clips[clip]["caption"], 50)
        pictures.append((np.concatenate(list(frames), 1), caption))
    if pictures:
        title = f"{Path(args.dataset).name}: captions by {Path(args.model).name}"
        draw_clips(pictures, f"{args.out}.png", title, width=4.2, words=0.5)


# ----------------------------------------------------- language models ---------------------------
def language_model(name, args, sees=False):
    """A function from prompts, and one picture for each if it sees, to texts of one line.

    Args:
        name: a transformers id or folder.
        args: dtype, device, max_new_tokens and temperature (0 = the likeliest token).
        sees: it reads pictures; else texts alone.

    Raises:
        UserError: if it cannot be loaded, or has no chat template.
    """
    import transformers

    task = "image-text-to-text" if sees else "text-generation"
    with opening(name):
        generate = transformers.pipeline(
            task, name, dtype=args.dtype, device=args.device, trust_remote_code=False)
    tokenizer = generate.tokenizer
    reader = generate.processor if sees else tokenizer
    if not reader.chat_template:
        raise UserError(f"{name}: it has no chat template, so how to ask it is not known; give a "
                        "model that follows instructions, such as llava-hf/llava-1.5-7b-hf")
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sampling = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "num_beams": 1}
    if args.temperature:
        sampling.update(do_sample=True, temperature=args.temperature)

    def answer(prompts, pictures=()):
        options = dict(sampling)
        chats = [chat_of(prompt) for prompt in prompts]
        if sees:
            options = {"generate_kwargs": dict(sampling)}
            chats = [chat_of(*pair) for pair in zip(prompts, pictures, strict=True)]
        outputs = generate(chats, batch_size=len(chats), return_full_text=False, **options)
        return [" ".join(output["generated_text"].split()) for output, in outputs]

    return answer


def chat_of(prompt, picture=None):
    """A question as transformers' pipelines read it."""
    content = prompt
    if picture is not None:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": prompt}]
    return [{"role": "user", "content": content}]


# ----------------------------------------------------- captions ----------------------------------
def write_captions(args, batches):
    """Captions this process's batches, written batch by batch.

    Args:
        batches: lists of ((video, start, end), path).
    """
    columns, rows = args.grid
    caption_model = language_model(args.model, args, sees=True)
    features = frame_features(args.frame_encoder, args.device)
    summary_model = None
    if args.summary_model:
        summary_model = language_model(args.summary_model, args)
    for batch in tqdm(batches, desc="captions", unit="batch", disable=rank() > 0):
        frames, results = {}, {}  # {clip: (q, 3, H, W)}, {clip: {caption, why}}
        for clip, path in batch:
            _, start, end = clip
            try:
                candidates = read_candidates(path, start, end, args.candidates)
            except Exception as error:  # a bad sample
                results[clip] = {"caption": "", "why": first_line(error)}
                continue
            frames[clip] = choose_key_frames(candidates, features, columns * rows)
        # batches and seeds depend on the clips alone
        torch.manual_seed(common.key_hash(f"{args.seed} {batch[0][0]}"))
        captions = caption_clips(list(frames.values()), columns, caption_model, summary_model)
        for clip, caption in zip(frames, captions, strict=True):
            reason = ""
            if not caption:
                reason = "the model says nothing"
            results[clip] = {"caption": caption, "why": reason}
        append_results(f"{args.out}.{rank()}.jsonl", args.out, results)


def caption_clips(clips, columns, caption_model, summary_model=None):
    """A caption of each clip, of the key frames (q, 3, H, W).

    Args:
        columns: of the picture.
        caption_model: (prompts, pictures) -> texts.
        summary_model: prompts -> texts; None = one caption of all key frames in one picture.
    """
    if not clips:
        return []
    if summary_model is None:
        pictures = [grid_picture(frames, columns) for frames in clips]
        return caption_model([PROMPT] * len(clips), pictures)
    prompts = []
    for frames in clips:
        pictures = [grid_picture(frame[None], 1) for frame in frames]
        of_frames = caption_model([FRAME_PROMPT] * len(pictures), pictures)
        prompts.append(SUMMARY_PROMPT.format("\n".join(of_frames)))
    return summary_model(prompts)


def append_results(path, out, results):
    """Adds the results of clips to the file of this process."""
    lines = []
    for (video, start, end), result in results.items():
        lines.append(json.dumps({"video": video, "start": start, "end": end} | result))
    with opening(out), open(path, "a") as file:
        file.write("\n" + "\n".join(lines) + "\n")  # a kill may have cut the line before


# ----------------------------------------------------- command line ------------------------------
def parse_args(argv=None):
    """The flags."""
    p = OneLineErrorParser("python -m tools.caption", __doc__.splitlines()[0])
    p.add_argument("--dataset", required=True,
                   help="folder of videos, or name, folder, file or hub id as for mama.py")
    for flag in ("--data-dir", "--video-dir", "--image-column", "--caption-column"):
        p.add_argument(flag, default="", help="as in training")
    p.add_argument("--out", required=True, metavar="FILE", help="csv to write, or to go on with")
    p.add_argument("--model", default="llava-hf/llava-1.5-7b-hf",
                   help="image-text-to-text model, hub id or folder")
    p.add_argument("--grid", type=int_ge1, nargs=2, default=[3, 4], metavar=("COLUMNS", "ROWS"),
                   help="columns and rows of the picture, one key frame a place (paper: 3x4, Table "
                        "7; its authors' demo: 4 3)")
    p.add_argument("--candidates", type=int_ge1, default=64,
                   help="evenly spaced frames of which the key frames are chosen (paper: random "
                        "frames)")
    p.add_argument("--frame-encoder", default="facebook/dinov2-small",
                   help="features of Eqs. 14-15: timm name, transformers id, folder, or colour (no "
                        "model, crude)")
    p.add_argument("--summary-model", default="",
                   help="language model, hub id or folder, that sums up captions of the key frames "
                        "(Table 5), instead of one caption of their picture")
    p.add_argument("--max-new-tokens", type=int_ge1, default=77, help="longest caption, in tokens")
    p.add_argument("--temperature", type=nonnegative_float, default=0.0,
                   help="temperature of sampling words; 0 = greedy")
    p.add_argument("--seed", type=int_ge0, default=0, help="seed of sampling words")
    p.add_argument("--batch", type=int_ge1, default=4, help="clips at a time on each process")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    args = p.parse_args(argv)
    args.device, args.dtype = "cpu", "float32"  # half precision is slow on a CPU
    if torch.cuda.is_available() and not args.cpu:
        args.device, args.dtype = f"cuda:{os.environ.get('LOCAL_RANK', 0)}", "auto"
    return args


def check_settings(args, report):
    """Refuses to go on with a file of other settings or videos, or with a file of somebody else.

    Returns: the settings of this call.
    """
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings["videos"] = str(video_folder(args))  # clips are told apart by their names inside
    foreign = Path(args.out).exists() and not report.exists()
    if foreign or read_json(report, {"settings": settings})["settings"] != settings:
        raise UserError(f"--out {args.out}: was made with other settings, or of videos in another "
                        f"folder, see {report.name}; name another file")
    return settings


def main(argv=None):
    """The command line. Raises: UserError."""
    args = parse_args(argv)
    clips = find_clips(args)
    report = Path(f"{args.out}.json")
    settings = check_settings(args, report)
    join(cpu=True)  # the processes share only files
    if rank() == 0:
        write_json(report, read_json(report, {}) | {"settings": settings})

    finished = {clip for clip, row in read_rows(args.out).items() if row["caption"]}
    num_finished = len(finished & clips.keys())
    print_main(f"{num_finished:,} of {len(clips):,} clips have a caption in {args.out}")
    items = list(clips.items())
    batches = [items[i:i + args.batch] for i in range(0, len(items), args.batch)]
    unfinished = []
    for batch in batches[rank()::world_size()]:
        if any(clip not in finished for clip, _ in batch):
            unfinished.append(batch)
    if unfinished:
        write_captions(args, unfinished)
    if world_size() > 1:  # one process may have all the long videos
        torch.distributed.monitored_barrier(timeout=datetime.timedelta(days=30))
    if rank() == 0:
        write_results(args, clips, report)


if __name__ == "__main__":
    with clean_exit():
        main()
