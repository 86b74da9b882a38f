"""Scores that finished runs give to short and to detailed captions: MAMA's Tables 9 and 10.

    python -m tools.score runs/INFONCE runs/MAMA --out scores                      # the baseline first
    python -m tools.score runs/INFONCE runs/MAMA --short captions.csv --out scores

The score is the cosine of video and text. The paper compares a short sentence with the data set's own caption of the
same video. It says that the margin lowers the score of short captions and raises that of detailed ones, and shows
hand-picked examples. Here examples are drawn at random, and the means over all videos are printed. Each run's own flags
say which data are read and how. Output: PREFIX.csv (each video, each caption, each run) and PREFIX.png.
"""

import argparse
import csv
from pathlib import Path

import common
from contrastive.data import add_captions, data_options
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit, opening, read_json, say
from contrastive.evaluation.embed import encode_images, encode_texts
from contrastive.evaluation.metrics import normalize
from contrastive.figures.base import picture, wrap
from contrastive.figures.mama import draw_clips

import numpy as np
import torch


def words(text):
    """How many words a caption has."""
    return len(text.split())


def caption_pairs(data, wanted):
    """{row: [short, detailed]}: the row's own captions with the fewest and the most words, if that makes a difference.

    Raises: UserError if no row is left.
    wanted: a csv of short captions with columns video (a row's file; with start and end for windows) and caption."""
    more, pairs = add_captions(data, Path(wanted)) if wanted else data, {}
    for i in range(len(data)):
        own = data.captions(i)
        short = [text for text in more.captions(i) if text not in own] if wanted else sorted(own, key=words)
        detailed = max(own, key=words, default="")
        if short and 0 < words(short[0]) < words(detailed):
            pairs[i] = [short[0], detailed]
    say(f"{data.name} ({data.split}): {len(pairs):,} of {len(data):,} videos have a short and a longer caption")
    if not pairs:
        raise UserError(f"{data.name} ({data.split}): no video has captions of different lengths; see --short")
    return pairs


def data_of(folder, split):
    """The split as a run reads it, each clip once and with its own captions.   Raises: UserError."""
    args = argparse.Namespace(**read_json(Path(folder) / "args.json"))
    return common.load_data(args.dataset, split, **data_options(args, caption_noise=0.0, unfold_captions=False))


def scores_of(folder, data, pairs, device):
    """{row: [cosine of the video with each of its two captions]} of a run, for the videos that can be read.

    Raises: UserError if the run has no trained embeddings."""
    model, tokenizer, transform = common.load_model(folder)
    if tokenizer is None or getattr(model, "similarity", "") in ("fused", "none"):
        raise UserError(f"{folder}: its model has no trained embeddings of videos and texts")
    index, video, *_ = encode_images(model.to(device), data, transform, device, workers=2, rows=list(pairs))  # (M, D)
    texts = encode_texts(model, tokenizer, [text for i in index for text in pairs[i]], device)
    texts = texts.unflatten(0, (-1, 2))                                                                # (M, 2, D)
    cosine = (normalize(video)[:, None] * normalize(texts)).sum(2)                                     # (M, 2)
    return dict(zip(index.tolist(), cosine.tolist(), strict=True))


def main(argv=None):
    """The command line. Returns: scores (R, M, 2): R runs, M videos, short and detailed.   Raises: UserError."""
    p = OneLine("python -m tools.score", __doc__.splitlines()[0])
    p.add_argument("runs", nargs="+", metavar="RUN_DIR", help="finished runs on one data set, the baseline first")
    p.add_argument("--split", choices=["train", "val", "test"], default="test", help="split whose videos are scored")
    p.add_argument("--short", default="", metavar="FILE", help="csv of video and caption; default: each video's "
                                                               "caption with the fewest words")
    p.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.csv and PREFIX.png")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    args = p.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    data = data_of(args.runs[0], args.split)
    pairs, found = caption_pairs(data, args.short), []
    for folder in args.runs:
        own = data_of(folder, args.split)
        if (own.name, list(own.keys())) != (data.name, list(data.keys())):
            raise UserError(f"{folder}: a run on other videos than {args.runs[0]} ({own.name}, {data.name})")
        found.append(scores_of(folder, own, pairs, device))
    rows = [i for i in pairs if all(i in scores for scores in found)]
    names = [Path(folder).resolve().name for folder in args.runs]
    scores = np.array([[of[i] for i in rows] for of in found])                                        # (R, M, 2)
    with opening(args.out), open(f"{args.out}.csv", "w", newline="", encoding="utf8") as f:
        csv.writer(f).writerows([("video", "detail", "caption", *names), *(
            (data.key(i), kind, pairs[i][k], *(f"{x:.4f}" for x in scores[:, at, k]))
            for at, i in enumerate(rows) for k, kind in enumerate(("short", "detailed")))])
    say(f"{'run':<34}{'short':>9}{'detailed':>10}{'detailed higher':>17}")
    for name, (short, detailed) in zip(names, scores.transpose(0, 2, 1)):                             # (M,) each
        say(f"{name[-32:]:<34}{short.mean():9.4f}{detailed.mean():10.4f}{100 * (detailed > short).mean():15.1f} %")
    say(f"(mean cosine over {len(rows):,} videos; share with the detailed one higher)")
    some = np.sort(np.random.default_rng(0).permutation(len(rows))[:4])
    words = ["\n\n".join(f"{wrap(caption, 36, max_lines=5)}\n{' | '.join(f'{x:.3f}' for x in of_runs)}"
                         for caption, of_runs in zip(pairs[rows[at]], scores[:, at].T)) for at in some]
    draw_clips([(picture(data, rows[at]), below) for at, below in zip(some, words)], f"{args.out}.png",
               f"{data.name} ({data.split}): cosine with a short and a detailed caption (Tables 9, 10)\n"
               f"scores by {' | '.join(names)}", width=3.2, words=1.8)
    return scores


if __name__ == "__main__":
    with clean_exit():
        main()
