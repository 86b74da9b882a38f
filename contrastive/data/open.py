"""Opens data: one split of a set (load_data), and all that a run trains on and evaluates, as its flags say (open_data).

Splits that own data lack are held out of train; further captions and pairs are added to it.
"""

import dataclasses
import functools
import re
from pathlib import Path

from contrastive.data import find_set, options_of, splits_of
from contrastive.data.own import listed, own_data
from contrastive.data.table import EmptySplit, has_clips, joined, notes, with_captions, with_note
from contrastive.data.views import key_hash
from contrastive.engine.processes import UserError, say

import numpy as np

HELD_OUT = 0.05  # part of the images held out for val, and as much for test, if the data lack these splits
MOST_HELD_OUT = 5000  # at most so many of them are evaluated


def load_data(name, split, **options):
    """Open one split of a data set.

    Args:
        name: a name of data.MODULES; a csv, json(l) or parquet file; a folder, as the library `datasets` takes it; a
            .tar or a folder of tars; or a hub id such as 'org/name'.   split: train, val or test.
        options: data_dir (annotations; where relative paths start), video_dir, image_column, caption_column,
            label_column, streaming, join_captions, unfold_captions, hold_out_val, extra_captions, caption_relevancy; of
            clips: frames, frame_sampling, frame_cache, image_size, feature_dir; and those of the set's own file.
    Returns: Data, or a stream of tars (train split with streaming=True).
    Raises: UserError naming the path or column and what exists instead.
    """
    whole, own = ("unfold_captions", "extra_captions", "caption_relevancy", "join_captions"), options_of(name)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()
             if (v or k in own and v is not None) and k not in whole}
    data = (_named if find_set(name) else _own)(name, split, tuple(sorted(given.items())))
    asked = [k for k in (*whole[:2], "join_captions", "feature_dir") if options.get(k)]
    if options.get("streaming") and split == "train" and (asked or not data.streamed):
        raise UserError(f"--streaming: needs tars ({name}), and none of --unfold-captions, --join-captions, "
                        "--extra-captions and --feature-dir")
    if options.get("join_captions"):
        data = joined(data)
    if split == "train" and options.get("caption_relevancy"):
        if data.sentences is None or options.get("unfold_captions") or options.get("extra_captions"):
            raise UserError("--caption-relevancy: draws sentences of epic-kitchens-100, without --unfold-captions and "
                            "--extra-captions")
        data = dataclasses.replace(data, caption_relevancy=options["caption_relevancy"])
    if split == "train" and options.get("extra_captions"):
        data = add_captions(data, options["extra_captions"])
    return data.unfold() if options.get("unfold_captions") and split == "train" else data


@functools.lru_cache(maxsize=32)
def _named(name, split, options):
    """One split of a set by name; with hold_out_val a part of train becomes val, and the rest stays train."""
    options, module = dict(options), find_set(name)
    splits = module.SETS[name]["splits"]
    held = options.pop("hold_out_val", False) and set(splits) == {"train", "test"}
    if held and split != "test":
        train = module.load(name, "train", options)
        return hold_out({"train": train, "test": ()})[split]
    if split not in splits:
        hint = "; --hold-out-val takes one out of train" if set(splits) == {"train", "test"} else ""
        raise UserError(f"{name} has no {split} split; it has: {', '.join(splits)}{hint}")
    return module.load(name, split, options)


@functools.lru_cache(maxsize=8)
def _own_splits(name, options):
    return hold_out(own_data(name, dict(options)))


def _own(name, split, options):
    splits = _own_splits(name, options)
    if split not in splits or not splits[split].streamed and not len(splits[split]):
        there = ", ".join(s for s in splits if splits[s].streamed or len(splits[s]))
        raise (UserError if split == "train" else EmptySplit)(f"--dataset {name}: no {split} split; it has: {there}")
    return splits[split]


def held_out_place(key):
    """A number in 0..1 from the hash of a name alone (all windows of a video share it), whatever the other rows."""
    video = re.sub(r" [\d.e+-]*-[\d.e+-]* s$", "", key)  # 1e-05-2 s is a window too
    return key_hash(f"held out {video}") / 2**63


def hold_out(splits):
    """Takes missing val and test splits out of train, HELD_OUT of it each. The hash of its name decides for each row,
    so that other rows do not matter. Each split keeps at most MOST_HELD_OUT. Without train nothing is held out."""
    train, missing = splits.get("train"), [s for s in ("val", "test") if s not in splits]
    if train is None or train.streamed or not missing:
        return splits
    videos = train.column("video")  # of sets whose rows share videos under names of their own
    place = np.array([held_out_place(name) for name in videos or train.keys()])  # (M,)
    band = (place / HELD_OUT).astype(int)  # (M,) 0: the first of `missing`, 1: the second, others: train
    out = dict(splits)
    for k, s in enumerate(missing):
        rows = np.flatnonzero(band == k)
        used = np.sort(rows[np.argsort(place[rows], kind="stable")[:MOST_HELD_OUT]])
        out[s] = with_note(train.select(used, s), f"held out of {len(train):,}")
    rest = np.flatnonzero(band >= len(missing))
    lost = f"{len(train) - len(rest):,} of {len(train):,} held out for {' and '.join(missing)}, by a hash of the name"
    out["train"] = with_note(train.select(rest, "train"), lost)
    return out


def long_tail_counts(n_max, classes, ratio):
    """Images per class of an exponential tail, int(n_max * ratio ** (-c / (classes - 1))): n_max to n_max / ratio."""
    return [int(n_max * ratio ** (-c / max(1, classes - 1))) for c in range(classes)]


# ---- the data of a run ----
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
        if name in evals:
            raise UserError(f"--eval-datasets {name}: named with two folders")
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


def add_captions(data, file):
    """The data with additional captions from a file with columns video (or image), caption, and start, end for windows
    (tools/caption.py writes such a file). Rows of the file that match no row of the data are counted.

    A clip is matched by its window and its file name without extension; if two files share a name, by their folders
    too. All rows of the clip get the caption. A question that served as the caption is replaced.
    Raises: UserError if nothing matches, and for data without files of their own."""
    if data.streamed or data.sources is None:
        raise UserError(f"--extra-captions {file}: {data.name} has no files of its own to which captions could belong")
    rows, captions, new, lost = {}, list(data.column("captions")), 0, []
    asked = data.column("question") or [None] * len(data)
    for i, source in enumerate(data.sources["source"][:]):
        inside = source.get("size") is not None or source.get("bytes") or not source.get("path")
        path = Path(data.key(i) if inside else source["path"]).with_suffix("")
        rows.setdefault((path.name, source.get("start"), source.get("end")), []).append((i, path.parts))
    extra = listed(f"--extra-captions {file}", file)
    for name, start, end, texts in extra:
        path = Path(name)
        found = rows.get((path.stem, start, end)) or rows.get((path.name, start, end)) or []
        if len({own for _, own in found}) > 1:  # a.mp4 in two folders
            whole = path.with_suffix("").parts
            found = [(i, own) for i, own in found if own[-len(whole):] == whole]
            found = found if len({own for _, own in found}) == 1 else []
        for i, _ in found:
            more = [t for t in texts if t not in captions[i]]
            kept = [] if more and captions[i] == [asked[i]] else captions[i]
            captions[i], new = [*kept, *more], new + len(more)
        lost += [] if found else [name]
    if len(lost) == len(extra):
        raise UserError(f"--extra-captions {file}: none of its {len(extra):,} rows matches a clip of {data.name} "
                        f"(train), first {lost[0]}; names and windows (start, end) must agree")
    note = f"{new:,} captions added from {Path(file).name}"
    note += f", {len(lost):,} of its rows match no training clip, first {lost[0]}" if lost else ""
    return with_note(with_captions(data, captions), note)
