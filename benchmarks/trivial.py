"""Nearest neighbours on what needs no training, beside trained runs: what a claim on kNN has to be clearly above.

    python -m benchmarks.trivial --dataset emoji runs/A runs/B             # runs on that set, of any script
    python -m benchmarks.trivial --dataset moving-emoji --clips 4000 300 2000 runs/A

Rows are raw pixels, a histogram of 64 colours (four levels a channel), the untrained tower of temo.py's recipe (before
and after its projection), and each run. One neighbour by cosine among the training examples, mean of the classes on
test. moving-emoji by verb, the class of all tables, and by noun. Writes results/trivial_DATASET.json and .md.
"""

import argparse
import datetime
import tempfile
from pathlib import Path

import common
from contrastive.encoders.models import spec_of
from contrastive.engine.log import commit
from contrastive.engine.processes import read_json, write_json
from contrastive.evaluation.by_class import class_metrics
from contrastive.evaluation.embed import encode_images
from contrastive.evaluation.trivial import trivial_features

import numpy as np
import torch

import temo
from benchmarks.compare import RESULTS, machine, markdown


def features_of(sets, model, transform):
    """{row: {split: (M, width)}} of {split: Data}: a tower's embeddings and features; of None trivial features."""
    found, cpu = {}, torch.device("cpu")
    for split, data in sets.items():
        if model is None:
            pixels, colours = trivial_features(data, transform, cpu).values()
            rows = {"raw pixels": pixels[0], "64 colours": colours[0]}
        else:
            rows = dict(zip(("projected", "backbone"), encode_images(model, data, transform, cpu)[1:3]))
        for row, x in rows.items():
            found.setdefault(row, {})[split] = x
    return found


def main(argv=None):
    """Measures and writes the table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("runs", nargs="*", help="run folders on this set")
    p.add_argument("--dataset", default="emoji", help="a set with classes")
    p.add_argument("--clips", type=int, nargs=3, default=None, help="of moving-emoji: train, val and test clips")
    args = p.parse_args(argv)
    clips = {"clips": args.clips} if args.clips else {}
    flags = ["--dataset", args.dataset, *(["--clips", *map(str, args.clips)] if args.clips else [])]
    recipe = temo.parse_args(flags)
    options = clips | {"frames": recipe.frames, "image_size": recipe.image_size}
    torch.manual_seed(recipe.seed)
    sets = {split: common.load_data(args.dataset, split, **options) for split in ("train", "test")}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = common.build_tokenizer("small", recipe.text_length, sets["train"].first_captions, folder)
    model, transform = common.build_model(spec_of(recipe), tokenizer, False)
    models = [("trivial", (None, transform)), ("untrained tower", (model.eval(), transform))]
    for run in args.runs:
        own, (model, _, transform) = read_json(Path(run) / "args.json"), common.load_model(run)
        models.append((f"{own.get('loss')} {Path(run).name}", (model, transform)))
    rows, results = [], {}
    columns = [c for c in ("label", "verb", "noun") if sets["train"].column(c) is not None]
    columns = [c for c in columns if c != "label" or "verb" not in columns]
    for title, model in models:
        for row, of in features_of(sets, *model).items():
            name, cells = row if title == "trivial" else f"{title}, {row}", []
            for column in columns:
                labels = [np.asarray(sets[s].column(column)) for s in ("train", "test")]
                parts = [(of[s], None, y) for s, y in zip(("train", "test"), labels)]
                metrics, chance, _ = class_metrics(["knn"], *parts)
                result = metrics["knn@1"]
                results.setdefault(name, {})[column] = result | {"chance": chance["knn@1"]["mean_per_class"]}
                cells.append(f"{result['mean_per_class']:.1f}")
            rows.append([name, *cells])
            print(*rows[-1], flush=True)
    rows.append(["chance", *(f"{results['raw pixels'][c]['chance']:.1f}" for c in columns)])
    file = RESULTS / f"trivial_{args.dataset}"
    write_json(file.with_suffix(".json"), results)
    note = f"\nkNN@1 on test, mean of the classes. Commit {commit()}; {datetime.date.today()}; {machine()}.\n"
    file.with_suffix(".md").write_text("\n".join([*markdown(["features", *(f"by {c}" for c in columns)], rows), note]))


if __name__ == "__main__":
    main()
