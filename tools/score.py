"""Scores that finished runs give to short and to detailed captions: MAMA's Tables 9 and 10.

    python -m tools.score runs/INFONCE runs/MAMA --out scores                      # baseline first
    python -m tools.score runs/INFONCE runs/MAMA --short captions.csv --out scores

The score is the cosine of video and text. The paper compares a short sentence with the data set's
own caption of the same video. It says that the margin lowers the score of short captions and raises
that of detailed ones, and shows hand-picked examples. Here examples are drawn at random, and the
means over all videos are printed. Each run's own flags say which data are read and how. Output:
PREFIX.csv (each video, each caption, each run) and PREFIX.png.
"""

import argparse
import csv
from pathlib import Path

import common
from contrastive.data import add_captions, data_options
from contrastive.engine.flags import OneLineErrorParser
from contrastive.core.files import read_json
from contrastive.core.processes import UserError, clean_exit, join, opening, print_main
from contrastive.evaluation.embed import encode_images, encode_texts
from contrastive.core.metrics import normalize
from contrastive.evaluation.saved_pieces import picture
from contrastive.figures.base import wrap
from contrastive.figures.mama import draw_clips

import numpy as np


# ----------------------------------------------------- captions and scores -----------------------
def num_words(text):
    """How many words a caption has."""
    return len(text.split())


def caption_pairs(data, short_captions):
    """{row: [short, detailed]}: the row's captions with the fewest and the most words.

    Args:
        short_captions: a csv of short captions with columns video (a row's file; with start and end
            for windows) and caption; empty: the row's own captions.
    Returns: rows where the short one has fewer words.
    Raises: UserError if no row is left.
    """
    extended = data
    if short_captions:
        extended = add_captions(data, Path(short_captions))
    pairs = {}
    for i in range(len(data)):
        captions = data.captions(i)
        if short_captions:
            candidates = [text for text in extended.captions(i) if text not in captions]
        else:
            candidates = sorted(captions, key=num_words)
        detailed = max(captions, key=num_words, default="")
        if candidates and 0 < num_words(candidates[0]) < num_words(detailed):
            pairs[i] = [candidates[0], detailed]
    print_main(f"{data.full_name}: {len(pairs):,} of {len(data):,} videos have a short and a "
               "longer caption")
    if not pairs:
        raise UserError(f"{data.full_name}: no video has captions of different lengths; "
                        "see --short")
    return pairs


def open_test(folder):
    """The test split as a run reads it, with the clips' own captions. Raises: UserError."""
    args = argparse.Namespace(**read_json(Path(folder) / "args.json"))
    return common.load_data(args.dataset, "test", data_options(args))


def score_captions(folder, data, pairs, device):
    """{row: [cosine of the video with each of its two captions]} of a run.

    Videos that cannot be read are left out.
    Raises: UserError if the run has no trained embeddings.
    """
    model, tokenizer, transform = common.load_model(folder)
    if tokenizer is None or not getattr(model, "contrastive", True):
        raise UserError(f"{folder}: its model has no trained embeddings of videos and texts")
    model = model.to(device)
    index, video, *_ = encode_images(model, data, transform, device, workers=2, rows=list(pairs))
    captions = []
    for i in index:
        captions += pairs[i]
    texts = encode_texts(model, tokenizer, captions, device)               # (2M, D)
    texts = normalize(texts.unflatten(0, (-1, 2)))                         # (M, 2, D)
    cosine = (normalize(video)[:, None] * texts).sum(2)                    # (M, 2)
    return dict(zip(index.tolist(), cosine.tolist(), strict=True))


def score_runs(folders, short_captions, device):
    """The test data of the first run, their caption_pairs, and score_captions of each run.

    Raises: UserError if the runs have other videos.
    """
    data = open_test(folders[0])
    pairs = caption_pairs(data, short_captions)
    scores_of_runs = []
    for folder in folders:
        run_data = open_test(folder)
        if run_data.name != data.name or list(run_data.keys()) != list(data.keys()):
            raise UserError(f"{folder}: a run on other videos than {folders[0]} ({run_data.name}, "
                            f"{data.name})")
        scores_of_runs.append(score_captions(folder, run_data, pairs, device))
    return data, pairs, scores_of_runs


# ----------------------------------------------------- output ------------------------------------
def write_scores(path, names, keys, pairs, scores):
    """Writes a csv with a line per video and caption.

    Args:
        names: of the runs.
        keys, pairs: of the M videos.
        scores: (R, M, 2).
    """
    with opening(path), open(path, "w", newline="", encoding="utf8") as file:
        table = csv.writer(file)
        table.writerow(["video", "detail", "caption", *names])
        for m, key in enumerate(keys):
            for k, detail in enumerate(("short", "detailed")):
                numbers = [f"{score:.4f}" for score in scores[:, m, k]]
                table.writerow([key, detail, pairs[m][k], *numbers])


def print_means(names, scores):
    """Prints the mean scores (R, M, 2) of each run."""
    print_main(f"{'run':<34}{'short':>9}{'detailed':>10}{'detailed higher':>17}")
    for name, run_scores in zip(names, scores):
        short, detailed = run_scores.mean(0)
        higher = 100 * (run_scores[:, 1] > run_scores[:, 0]).mean()
        print_main(f"{name[-32:]:<34}{short:9.4f}{detailed:10.4f}{higher:15.1f} %")
    print_main(f"(mean cosine over {scores.shape[1]:,} videos; share with the detailed one higher)")


def describe_captions(captions, scores):
    """The two captions of a video, each above its scores by the runs, (R, 2)."""
    paragraphs = []
    for caption, caption_scores in zip(captions, scores.T):
        numbers = " | ".join(f"{score:.3f}" for score in caption_scores)
        paragraphs.append(f"{wrap(caption, 36, max_lines=5)}\n{numbers}")
    return "\n\n".join(paragraphs)


def main(argv=None):
    """The command line.

    Returns: scores (R, M, 2): R runs, M videos, short and detailed.
    Raises: UserError.
    """
    p = OneLineErrorParser("python -m tools.score", __doc__.splitlines()[0])
    p.add_argument("runs", nargs="+", metavar="RUN_DIR",
                   help="finished runs on one data set, the baseline first")
    p.add_argument("--short", default="", metavar="FILE",
                   help="csv of video and short caption; default: each video's caption with the "
                        "fewest words")
    p.add_argument("--out", required=True, metavar="PREFIX",
                   help="writes PREFIX.csv and PREFIX.png")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    args = p.parse_args(argv)
    data, pairs, scores_of_runs = score_runs(args.runs, args.short, join(args.cpu))
    rows = []  # that all runs could read
    scores = []
    for i in pairs:
        if all(i in run_scores for run_scores in scores_of_runs):
            rows.append(i)
            scores.append([run_scores[i] for run_scores in scores_of_runs])
    scores = np.array(scores).swapaxes(0, 1)                               # (R, M, 2)

    names = [Path(folder).resolve().name for folder in args.runs]
    keys = [data.key(i) for i in rows]
    pairs = [pairs[i] for i in rows]
    write_scores(f"{args.out}.csv", names, keys, pairs, scores)
    print_means(names, scores)
    examples = []
    chosen = np.random.default_rng(0).permutation(len(rows))[:4]
    for m in np.sort(chosen):
        words = describe_captions(pairs[m], scores[:, m])
        examples.append((picture(data, rows[m]).permute(1, 2, 0).numpy(), words))
    title = (f"{data.full_name}: cosine with a short and a detailed caption (Tables 9, "
             f"10)\nscores by {' | '.join(names)}")
    draw_clips(examples, f"{args.out}.png", title, width=3.2, words=1.8)
    return scores


if __name__ == "__main__":
    with clean_exit():
        main()
