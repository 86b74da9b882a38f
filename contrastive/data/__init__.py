"""Opens data: one split of a set (load_data), and all that a run trains on and evaluates, as its flags say (open_data).

table.py      Data, one split: a table with a row per example, and how its pixels are read
own.py        the user's own files and folders, and hub ids        stream.py    tars: indexed, or read in order
batches.py    training batches                                     views.py     random numbers and image views
pictures.py, frames.py, clips.py    bytes of an image or a video -> uint8 pixels (or features)
annotations.py    what the readers of annotation files share

Data sets by name stand in one file per family. Such a file has SETS = {name: facts} and load(name, split, options) ->
Data. Facts: splits {split: expected count or None}, licence, and where the set has them about (the part by which a
count may be off), also {split: another paper's count}, repo (on the hub), base (the full set), drawn (no files are
needed), and options {flag: keywords of add_argument} for flags of this set alone (texts=True: not in scripts without
captions). A new set is one function in a family's file, and its name here.
"""

import contextlib
import dataclasses
import functools
import importlib
import re
import types
from pathlib import Path

from contrastive.data.own import listed, own_data
from contrastive.data.table import EmptySplit, has_clips, with_column, with_note
from contrastive.data.views import key_hash
from contrastive.engine.processes import UserError, opening

import numpy as np

_FAMILIES = {
    "emoji": "emoji", "moving_emoji": "moving-emoji emoji-scenes", "epic": "epic-kitchens-100",
    "long_tail": "cifar10-lt cifar100-lt fashion-mnist-lt imagenet100-lt",
    "videos": "msrvtt msvd activitynet didemo youcook2 howto100m ssv2-lt",
    "questions": "msrvtt-qa msvd-qa tgif-qa-r-action tgif-qa-r-transition tgif-qa-r-frame nextqa causal-vidqa",
    "images": "cc3m cc12m coco flickr30k cifar10 cifar100 fashion-mnist imagenet imagenet1k country211 dtd eurosat "
              "gtsrb fgvc-aircraft imagenet-sketch imagenet-a imagenet-r imagenet-o flowers pets pcam mnist food101"}
MODULES = {name: f"contrastive.data.{file}" for file, names in _FAMILIES.items() for name in names.split()}
HELD_OUT = 0.05  # part of the images held out for val, and as much for test, if the data lack these splits
MOST_HELD_OUT = 5000  # at most so many of them are evaluated


# ---- names ----
def parted(word, sign):
    """(name, rest) of NAME=DIR or NAME@COMMIT, rest "" if there is none; a path that exists is a name as it stands."""
    name, _, rest = (word, "", "") if Path(word).expanduser().exists() else word.partition(sign)
    return name, rest


def find_set(name):
    """The module that knows a data set by this name, or None; or what stands for one, of a user's function."""
    known = MODULES.get(name)
    if callable(known):
        def load(name, split, options):
            if data := known(split, options):
                return data
            raise EmptySplit(f"{name} has no {split} split")
        facts = {"splits": dict.fromkeys(("train", "val", "test")), "licence": "your own"}
        return types.SimpleNamespace(SETS={name: facts}, load=load)
    return importlib.import_module(known) if known else None


def facts_of(word):
    """What its family's file says of a data set by name, perhaps at a revision; {} of own data."""
    name, _ = parted(word, "@")
    return find_set(name).SETS[name] if name in MODULES else {}


def options_of(name):
    """The options of load_data that only this data set has: its file declares them as flags."""
    return [flag[2:].replace("-", "_") for flag in facts_of(name).get("options", {})]


def splits_of(name, hold_out_val=False):
    """The splits of a data set; one by name that comes without val has it only if it is held out of train."""
    own = tuple(facts_of(name).get("splits", ("train", "val", "test")))
    return (*own, "val") if hold_out_val and set(own) == {"train", "test"} else own


# ---- one split ----
def load_data(name, split, **options):
    """Open one split of a data set.

    Args:
        name: a name of MODULES; a csv, json(l) or parquet file; a folder, as the library `datasets` takes it; a .tar or
            a folder of tars; or a hub id such as 'org/name'. What comes from the hub may be NAME@REVISION, a commit.
        split: train, val or test.
        options: data_dir (annotations; where relative paths start), video_dir, image_column, caption_column,
            label_column, streaming, join_captions, unfold_captions, hold_out_val, extra_captions, caption_relevancy,
            revision; of clips: frames, frame_sampling, frame_cache, image_size, feature_dir; and those of the set's own
            file.
    Returns: Data, or a stream of tars (train split with streaming=True).
    Raises: UserError naming the path or column and what exists instead.
    """
    name, revision = parted(name, "@")
    own, facts, options = options_of(name), facts_of(name), options | ({"revision": revision} if revision else {})
    local = options.get("data_dir") or not (facts.get("repo") or facts.get("base"))
    if options.get("revision") and (local if facts else Path(name).expanduser().exists()):
        raise UserError(f"--dataset {name}@{options['revision']}: only what is read from the hub has a revision")
    join, unfold, extra, relevancy = (options.pop(k, None) for k in (
        "join_captions", "unfold_captions", "extra_captions", "caption_relevancy"))
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v or k in own and v is not None}
    data = (_named if facts else _own)(name, split, tuple(sorted(options.items())))
    if options.get("feature_dir") and data.sources is not None:
        data = _of_whole_files(data)
    if split == "train" and options.get("streaming") and (not data.streamed or join or unfold or extra):
        raise UserError(f"--streaming: needs tars ({name}), without --unfold-captions, --join-captions and "
                        "--extra-captions")
    if join:
        data = with_column(data, "captions", [[" ".join(of_row)] for of_row in data.column("captions")])
    if split != "train":
        return data
    if relevancy and (data.sentences is None or unfold or extra):
        raise UserError("--caption-relevancy: draws sentences of epic-kitchens-100, without --unfold-captions and "
                        "--extra-captions")
    data = dataclasses.replace(data, caption_relevancy=relevancy) if relevancy else data
    data = add_captions(data, extra) if extra else data
    return data.unfold() if unfold else data


@functools.lru_cache(maxsize=32)
def _named(name, split, options):
    """One split of a set by name; with hold_out_val a part of train becomes val, and the rest stays train. If their
    number is not one of those that the facts expect, the note says so."""
    options, facts = dict(options), facts_of(name)
    held = options.pop("hold_out_val", False) and set(facts["splits"]) == {"train", "test"} and split != "test"
    if split not in facts["splits"] and not held:
        raise EmptySplit(f"{name} has no {split} split; it has: {', '.join(facts['splits'])}; --hold-out-val takes "
                         "one out of the train split of a set without val")
    data = find_set(name).load(name, "train" if held else split, options)
    expected, part = facts["splits"][data.split], facts.get("about", 0)
    counts = [n for n in (expected, facts.get("also", {}).get(data.split)) if n]
    if counts and not data.streamed and "drawn" not in facts and all(abs(len(data) - n) > part * n for n in counts):
        data = with_note(data, f"WARNING: {len(data):,} examples, {expected:,} expected: the numbers are not "
                               "comparable with the papers'")
    return hold_out({"train": data, "test": ()})[split] if held else data


def _own(name, split, options):
    """One split of the user's own data."""
    splits = _own_splits(name, options)
    there = [s for s in splits if splits[s].examples]
    if split not in there:
        raise EmptySplit(f"--dataset {name}: no {split} split; it has: {', '.join(there)}")
    return splits[split]


@functools.lru_cache(maxsize=8)
def _own_splits(name, options):
    if not Path(name).expanduser().exists() and name.count("/") != 1:
        raise UserError(f"--dataset {name}: no such file or folder, no hub id (org/name), and no known set: "
                        + ", ".join(MODULES))
    return hold_out(own_data(name, dict(options)))


def _of_whole_files(data):
    """The data, with a word in the note if their features are of whole files where windows are asked for.

    Raises: UserError if several windows of one file would all have its features."""
    windows = {tuple(map(source.get, ("path", "start", "end"))) for _, source in places(data)}
    if len({path for path, *_ in windows}) < len(windows):
        raise UserError(f"{data.name}: several windows of one video, but --feature-dir has only one file per video")
    part = any({*window} != {None} for _, *window in windows)
    return with_note(data, "the features are those of whole files, not of the windows (start, end)" if part else "")


# ---- splits that data lack ----
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


# ---- the data of a run ----
# The flags of a script that load_data takes as options.
DATA_FLAGS = ("data_dir", "video_dir", "image_column", "caption_column", "label_column", "frames", "frame_sampling",
              "frame_cache", "feature_dir", "join_captions", "unfold_captions", "image_size", "streaming",
              "hold_out_val", "extra_captions", "region_dir", "regions", "caption_relevancy", "revision")


def data_options(args, **more):
    """The data flags that are set, including the data set's own flags, as options of load_data."""
    own = options_of(args.dataset)                                         # 0 and False are values of these
    flags = {k: getattr(args, k, None) for k in (*DATA_FLAGS, *own)}
    return {k: v for k, v in flags.items() if v or k in own and v is not None} | more


def other_options(flags, name, folder=""):
    """Options of load_data for data other than the training set of a run with these flags {name: value}."""
    same = ("frames", "frame_sampling", "frame_cache", "image_size", "hold_out_val", "regions", *options_of(name))
    own = () if facts_of(name) else ("join_captions", "image_column", "caption_column", "label_column")
    places = {"data_dir": folder, "video_dir": folder or flags.get("video_dir", "")}
    return places | {k: flags.get(k) for k in (*same, *own)}


def open_data(args):
    """(training split, {name: {val, test}}) as the flags say. It runs before any process group, so errors come fast.

    Raises: UserError if --eval-every would find no val split to evaluate."""
    train, evals = load_data(args.dataset, "train", **data_options(args)), evaluation_sets(args)
    if args.eval_every and not any("val" in splits for splits in evals.values()):
        raise UserError(f"--eval-every {args.eval_every}: {', '.join(evals)} without a val split, which it would "
                        "evaluate; --hold-out-val takes one out of train, --eval-every 0 evaluates only at the end")
    for word in args.extra_pairs:
        train = add_pairs(train, word, args, evals)
    return train, evals


def evaluation_sets(args):
    """{name: {val, test}} of --eval-datasets (the training set's own when empty), each NAME or NAME=DIR."""
    evals = {}
    for word in dict.fromkeys(args.eval_datasets or [args.dataset]):
        name, folder = parted(word, "=")
        if name in evals:
            raise UserError(f"--eval-datasets {name}: named with two folders")
        options, evals[name] = other_options(vars(args), name, folder), {}
        if name == args.dataset:
            options = data_options(args, **({"data_dir": folder, "revision": ""} if folder else {}))
        for split in [s for s in ("val", "test") if s in splits_of(name, args.hold_out_val)]:
            with contextlib.suppress(EmptySplit):
                evals[name][split] = load_data(name, split, **options)
        if not evals[name] and args.eval_datasets:
            raise UserError(f"--eval-datasets {name}: it has neither a val nor a test split")
    return evals


# ---- more of it ----
def places(data):
    """(its file, else its key, as a Path; its source) of each row: by these the same clip is found in two sets."""
    sources = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    for key, source in zip(data.keys(), sources, strict=True):
        inside = source.get("size") is not None or source.get("bytes") or not source.get("path")
        yield Path(key if inside else source["path"]), source


def add_pairs(data, word, args, evals):
    """The training data followed by those of another set (--extra-pairs). Rows of clips that the evaluation reads are
    left out, and so are rows held out as that set's val or test. In a set of questions the added rows have none (None).

    Args: word: NAME or NAME=DIR of --extra-pairs, DIR with the annotations and the files of the set.
        args: the flags of the run.   evals: {name: {val, test}}, the evaluation sets.
    Raises: UserError if the two sets cannot be joined in one table."""
    import datasets
    name, folder = parted(word, "=")
    options = {k: v for k, v in other_options(vars(args), name, folder).items() if not k.endswith("_column")}
    more = load_data(name, "train", **options, unfold_captions=getattr(args, "unfold_captions", False))
    features = getattr(args, "feature_dir", None) or getattr(args, "region_dir", "")
    said = more.has_captions and (data.has_captions or data.column("question") is not None)
    files = all(part.sources is not None and part.shards is None and not part.sentences for part in (data, more))
    if not (files and said) or features or has_clips(data) != has_clips(more):
        raise UserError(f"--extra-pairs {word}: only joins files with captions, videos to videos or images to images: "
                        "no tars, sets in memory, features, classes, sentences, or further questions")
    read = {place.stem for splits in evals.values() for part in splits.values() if part.sources is not None
            for place, _ in places(part)}
    kept = np.flatnonzero([place.stem not in read for place, _ in places(more)])
    dropped, more = len(more) - len(kept), more.select(kept)
    columns = ["source", "captions", "key"]
    asked = [c for c in ("question", "answer", "choices", "question_type") if c in data.table.column_names]
    with opening(f"--extra-pairs {word}"):
        table = datasets.concatenate_datasets([data.table.select_columns(columns + asked),
                                               more.table.select_columns(columns)])
    which = None if data.which is None else np.concatenate([data.which, more.which])
    data = dataclasses.replace(data, table=table, rows=None, which=which, own=data.own or data)
    return with_note(data, f"{len(more):,} more pairs from {more.name}, {len(more) / len(table):.0%} of an epoch",
                     more.note, f"{dropped:,} of clips that the evaluation reads left out" if dropped else "")


def add_captions(data, file):
    """The data with additional captions from a file with columns video (or image), caption, and start, end for windows
    (tools/caption.py writes such a file). Rows of the file that match no row of the data are counted.

    A clip is matched by its window and its file name without folders and extension; all rows of the clip get the
    caption. A question that served as the caption is replaced.
    Raises: UserError if nothing matches, or two files of one name, and for data without files of their own."""
    if data.sources is None:
        raise UserError(f"--extra-captions {file}: {data.name} has no files of its own to which captions could belong")
    rows, paths = {}, {}  # {(stem, start, end): rows}, {stem: its files}
    for i, (place, source) in enumerate(places(data)):
        rows.setdefault((place.stem, source.get("start"), source.get("end")), []).append(i)
        paths.setdefault(place.stem, set()).add(str(place))
    with opening(f"--extra-captions {file}"):
        extra = listed(file)
    captions, asked = list(data.column("captions")), data.column("question") or [None] * len(data)
    new, lost = 0, [name for name, start, end, _ in extra if (Path(name).stem, start, end) not in rows]
    for name, start, end, texts in extra:
        stem = Path(name).stem
        if len(paths.get(stem, ())) > 1:
            raise UserError(f"--extra-captions {file}: {name} may be any of {', '.join(sorted(paths[stem]))}")
        for i in rows.get((stem, start, end), ()):
            more = [t for t in texts if t not in captions[i]]
            kept = [] if more and captions[i] == [asked[i]] else captions[i]
            captions[i], new = [*kept, *more], new + len(more)
    if len(lost) == len(extra):
        raise UserError(f"--extra-captions {file}: none of its {len(extra):,} rows matches a clip of {data.name} "
                        f"({data.split}), first {lost[0]}; names and windows (start, end) must agree")
    return with_note(with_column(data, "captions", captions), f"{new:,} captions added from {Path(file).name}",
                     f"{len(lost):,} of its rows match no training clip, first {lost[0]}" if lost else "")
