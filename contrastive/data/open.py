"""Opens the data of a run: the training set and the evaluation sets, as the flags say."""

import dataclasses
from pathlib import Path

from contrastive.data import find_set, options_of, splits_of
from contrastive.data.load import EmptySplit, load_data
from contrastive.data.table import has_clips, notes
from contrastive.engine.processes import UserError, say

import numpy as np

# The flags of a script that load_data takes as options.
DATA_FLAGS = ("data_dir", "video_dir", "image_column", "caption_column", "label_column", "frames", "frame_sampling",
              "frame_cache", "feature_dir", "join_captions", "unfold_captions", "image_size", "streaming",
              "hold_out_val", "extra_captions", "region_dir", "regions", "caption_relevancy")


def data_options(args, **more):
    """The data flags that are set, including the data set's own flags, as options of load_data."""
    own = options_of(args.dataset)                                         # 0 and False are values of these
    flags = {k: getattr(args, k, None) for k in (*DATA_FLAGS, *own)}
    return {k: v for k, v in flags.items() if v or k in own and v is not None} | more


def other_options(flags, name, folder=""):
    """Options of load_data for data other than the training set of a run with these flags {name: value}."""
    same = ("frames", "frame_sampling", "frame_cache", "image_size", "hold_out_val", "regions", *options_of(name))
    own = () if find_set(name) else ("join_captions", "image_column", "caption_column", "label_column")
    places = {"data_dir": folder, "video_dir": folder or flags.get("video_dir", "")}
    return places | {k: flags.get(k) for k in (*same, *own)}


def open_data(args):
    """(training split, {name: {val, test}}) as the flags say. It runs before any process group, so errors come fast.

    Raises: UserError if --eval-every would find no val split to evaluate."""
    train, evals = load_data(args.dataset, "train", **data_options(args)), evaluation_sets(args)
    without = ", ".join(name for name, splits in evals.items() if "val" not in splits)
    if args.eval_every and not any("val" in splits for splits in evals.values()):
        raise UserError(f"--eval-every {args.eval_every}: {without} without a val split, which it would evaluate; "
                        "--hold-out-val takes one out of the training images of a set by name, --eval-every 0 "
                        "evaluates only at the end")
    for word in args.extra_pairs:
        train = add_pairs(train, word, args, evals)
    if args.eval_every and without:
        say(f"WARNING: --eval-every: {without} without a val split (see --hold-out-val): read once, at the end")
    return train, evals


def evaluation_sets(args):
    """{name: {val, test}} of --eval-datasets (the training set's own when empty), each NAME or NAME=DIR."""
    evals = {}
    for word in dict.fromkeys(args.eval_datasets or [args.dataset]):
        name, _, folder = (word, "", "") if Path(word).exists() else word.partition("=")
        options = other_options(vars(args), name, folder)
        if name == args.dataset:
            options = data_options(args, **({"data_dir": folder} if folder else {}))
        evals[name] = {}
        for split in (s for s in ("val", "test") if s in splits_of(name, args.hold_out_val)):
            try:
                evals[name][split] = load_data(name, split, **options)
            except EmptySplit as error:
                say(f"WARNING: {error}; there is no {split} evaluation")
        if not evals[name] and args.eval_datasets:
            raise UserError(f"--eval-datasets {name}: it has neither a val nor a test split")
    return evals


def add_pairs(data, word, args, evals):
    """The training data followed by those of another set (--extra-pairs). Rows of clips that the evaluation reads are
    left out, and so are rows held out as that set's val or test. In a set of questions the added rows have none (None).

    Args: word: NAME or NAME=DIR of --extra-pairs, DIR with the annotations and the files of the set.
        args: the flags of the run.   evals: {name: {val, test}}, the evaluation sets.
    Raises: UserError if the two sets cannot be joined in one table."""
    import datasets
    name, _, folder = (word, "", "") if Path(word).exists() else word.partition("=")
    same = ("frames", "frame_sampling", "frame_cache", "image_size", "unfold_captions")
    options = {k: v for k in same if (v := getattr(args, k, None)) is not None}
    options["join_captions"] = getattr(args, "join_captions", False) and not find_set(name)
    options["video_dir"] = folder or ("" if Path(name).is_dir() else args.video_dir)
    more = load_data(name, "train", data_dir=folder, **options)
    for part in (data, more):
        features = getattr(args, "feature_dir", None) or getattr(args, "region_dir", "")
        asked = part is data and part.column("question") is not None
        if part.streamed or part.sources is None or features or part.sentences or not (part.has_captions or asked):
            raise UserError(f"--extra-pairs {word}: only joins files that have captions; {part.name} is a stream, in "
                            "memory, read as features, or has classes, questions or sentences in their place")
    if has_clips(data) != has_clips(more) or (data.shards is None) != (more.shards is None):
        raise UserError(f"--extra-pairs {word}: joins videos to videos, images to images, and tars to tars")
    read = {n for splits in evals.values() for part in splits.values() if part.sources is not None
            for n in file_names(part)}
    kept = np.flatnonzero([n not in read for n in file_names(more)])
    dropped = len(more) - len(kept)
    more = more.select(kept)
    again = int(np.isin(places(more), places(data)).sum())
    if again == len(more):
        raise UserError(f"--extra-pairs {word}: all of its rows belong to clips that are trained on or evaluated; "
                        "--extra-captions adds captions to them")
    names = ["source", "captions", "key"]
    asked = [c for c in ("question", "answer", "choices", "question_type") if c in data.table.column_names]
    parts = [data.table.select_columns(names + asked), more.table.select_columns(names)]
    kinds = parts[0].features | parts[1].features
    kinds["source"] = parts[0].features["source"] | parts[1].features["source"]
    parts = [part.cast(datasets.Features({c: kinds[c] for c in part.features})) for part in parts]
    table = datasets.concatenate_datasets(parts)
    which = None if data.which is None else np.concatenate([data.which, more.which])
    shards = None if data.shards is None else np.concatenate([data.shards, more.shards + data.shards.max() + 1])
    note = f"{len(more):,} more pairs from {more.name}, {len(more) / len(table):.0%} of an epoch"
    note += f" ({more.note})" if more.note else ""
    note += f", {dropped:,} of clips that the evaluation reads left out" if dropped else ""
    note += f", {again:,} of clips that are trained on already, which a batch may hold twice" if again else ""
    return dataclasses.replace(data, table=table, rows=None, which=which, shards=shards, own=data.own or data,
                               note=notes(data.note, note))


def places(data):
    """(M,) a hash of what each row reads (file, place in a tar, window); of an image inside the table, of its row."""
    rows = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    return np.array([hash((id(data), i)) if source.get("bytes") or not source.get("path") else
                     hash(tuple(source.get(k) for k in ("path", "offset", "start", "end")))
                     for i, source in enumerate(rows)], np.int64)


def file_names(data):
    """The stem of each row's file name, by which the same clip is found in two sets."""
    sources = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    for key, source in zip(data.keys(), sources, strict=True):
        yield Path(key if source.get("size") is not None or not source.get("path") else source["path"]).stem
