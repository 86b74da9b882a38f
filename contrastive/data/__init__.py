"""Opens data: one split of a set (load_data), and all that a run trains on and evaluates, as its flags say (open_data).

table.py      Data, one split: a table with a row per example, and how its pixels are read
own.py        the user's own files and folders, and hub ids        stream.py    tars: indexed, or read in order
batches.py    training batches                                     views.py     random numbers and image views
frames.py, clips.py    bytes of a video -> uint8 pixels (or features)
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
from contrastive.data.table import EmptySplit, with_column, with_note
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
HELD_OUT = 0.05  # part of the images held out for test, and without --val-fraction for val, if data lack these splits
FEW_ROWS = 20  # with fewer in val, a single one moves its numbers by 5 points
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
        options: the flags of a script that are named below (SET_FLAGS, OWN_FLAGS, RUN_FLAGS), and the set's own.
    Returns: Data, or a stream of tars (train split with streaming=True).
    Raises: UserError naming the path or column and what exists instead."""
    name, revision = parted(name, "@")
    facts, options = facts_of(name), options | ({"revision": revision} if revision else {})
    of_hub = facts.get("repo") or facts.get("base") if facts else not Path(name).expanduser().exists()
    if options.get("revision") and (not of_hub or facts and options.get("data_dir")):
        raise UserError(f"--dataset {name}@{options['revision']}: only what is read from the hub has a revision")
    join, unfold, extra, relevancy, same_text = (options.pop(k, None) for k in (
        "join_captions", "unfold_captions", "extra_captions", "caption_relevancy", "same_text"))
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v not in (None, "", [])}
    splits = {split: _named(name, split, **given)} if facts else _own(name, **given)
    data = splits.get(split)
    if not data:
        there = facts.get("splits") or [s for s in splits if splits[s]]
        raise EmptySplit(f"{name} has no {split} split; it has: {', '.join(there)}"
                         + "; --hold-out-val takes one out of train" * (split == "val" and bool(facts)))
    if options.get("feature_dir") and data.sources is not None:
        windows = {*places(data)}
        if len({path for path, *_ in windows}) < len(windows):
            raise UserError(f"{name}: several windows of one video, but --feature-dir has only one file per video")
        if any({start, end} != {None} for _, start, end in windows):
            data = with_note(data, "the features are those of whole files, not of the windows (start, end)")
    if split == "train" and options.get("streaming") and (not data.streamed or join or unfold or extra):
        raise UserError(f"--streaming: needs tars ({name}), without --unfold-captions, --join-captions and "
                        "--extra-captions")
    if join:
        data = with_column(data, "captions", [[" ".join(of_row)] for of_row in data.column("captions")])
    of_a_paper = isinstance(MODULES.get(name), str) and "drawn" not in facts  # neither a user's own nor drawn
    wrong = same_text == "wrong" or same_text != "positive" and of_a_paper
    if wrong and not data.streamed:
        data = dataclasses.replace(data, same_text="wrong")
    if split != "train":
        return data
    if relevancy and (data.sentences is None or unfold or extra):
        raise UserError("--caption-relevancy: draws sentences of epic-kitchens-100, without --unfold-captions and "
                        "--extra-captions")
    data = dataclasses.replace(data, caption_relevancy=relevancy) if relevancy else data
    data = add_captions(data, extra) if extra else data
    return data.unfold() if unfold else data


@functools.lru_cache(maxsize=32)
def _named(name, split, hold_out_val=False, val_fraction=HELD_OUT, **options):
    """One split of a set by name, None if it has no such split; with hold_out_val a part of train becomes val."""
    facts = facts_of(name)
    if split not in splits_of(name, hold_out_val):
        return None
    held = split != "test" and splits_of(name, hold_out_val) != splits_of(name)
    data = find_set(name).load(name, "train" if held else split, options)
    expected, part = facts["splits"][data.split], facts.get("about", 0)
    counts = [n for n in (expected, facts.get("also", {}).get(data.split)) if n]
    if counts and not data.streamed and "drawn" not in facts and all(abs(len(data) - n) > part * n for n in counts):
        data = with_note(data, f"WARNING: {len(data):,} examples, {expected:,} expected: the numbers are not "
                               "comparable with the papers'")
    return hold_out({"train": data, "test": ()}, val_fraction)[split] if held else data


@functools.lru_cache(maxsize=8)
def _own(name, **options):
    """{split: Data} of the user's own data."""
    if not Path(name).expanduser().exists() and name.count("/") != 1:
        raise UserError(f"--dataset {name}: no such file or folder, no hub id (org/name), and no known set: "
                        + ", ".join(MODULES))
    val_fraction = options.pop("val_fraction", HELD_OUT)
    return hold_out(own_data(name, options), val_fraction)


# ---- splits that data lack ----
def held_out_place(key):
    """A number in 0..1 from the hash of a name alone (all windows of a video share it), whatever the other rows."""
    video = re.sub(r" [\d.e+-]*-[\d.e+-]* s$", "", key)  # 1e-05-2 s is a window too
    return key_hash(f"held out {video}") / 2**63


def hold_out(splits, val_fraction=HELD_OUT):
    """Takes missing val and test splits out of train, by held_out_place: val_fraction of it and HELD_OUT, each at most
    MOST_HELD_OUT. Test is the same for any val_fraction: more of val lies beyond it."""
    train, missing = splits.get("train"), [s for s in ("val", "test") if s not in splits]
    if train is None or train.streamed or not missing:
        return splits
    names = train.column("video") or train.keys()  # of sets whose rows share videos under names of their own
    place = np.array([*map(held_out_place, names)])  # (M,)
    number = (place / HELD_OUT).astype(int)  # (M,) of bands as wide as test, which is the last of `missing`
    test = (number == len(missing) - 1) & ("test" in missing)  # (M,) bool
    place_of_val = np.where(number >= len(missing), place - HELD_OUT * ("test" in missing), place)  # (M,) without test
    val = ~test & (place_of_val < val_fraction) & ("val" in missing)  # (M,) bool
    rest, of = np.flatnonzero(~val & ~test), {"val": val, "test": test}
    lost = f"{len(train) - len(rest):,} of {len(train):,} held out for {' and '.join(missing)}, by a hash of the name"
    out = splits | {"train": with_note(train.select(rest, "train"), lost)}
    for s in missing:
        rows = np.flatnonzero(of[s])
        used = np.sort(rows[np.argsort(place[rows], kind="stable")[:MOST_HELD_OUT]])
        few = f"WARNING: fewer than {FEW_ROWS} rows, --val-fraction holds out more" if s == "val" else ""
        note = few if len(used) < FEW_ROWS else ""
        out[s] = with_note(train.select(used, s), f"held out of {len(train):,}", note)
    return out


# ---- the data of a run ----
# The flags of a script that load_data takes as options: of any set, of own data as well, and of the training set alone.
SET_FLAGS = ("frames", "frame_sampling", "frame_cache", "image_size", "hold_out_val", "val_fraction", "regions",
             "video_dir", "same_text")
OWN_FLAGS = ("join_captions", "image_column", "caption_column", "label_column")
RUN_FLAGS = ("data_dir", "feature_dir", "region_dir", "unfold_captions", "streaming", "extra_captions",
             "caption_relevancy", "revision")


def data_options(args, name=None, folder="", **more):
    """Options of load_data by the flags of a run, for its training set or another one; folder: where that one's files
    are, all of them."""
    flags = vars(args)
    training = flags.get("dataset", "")
    name = training if name is None else name
    facts = facts_of(name)
    own = [flag[2:].replace("-", "_") for flag in facts.get("options", {})]  # 0 and False are values of these
    wanted = [*SET_FLAGS, *own]
    wanted += OWN_FLAGS if name == training or not facts else ()
    wanted += RUN_FLAGS if name == training else ()
    options = {k: flags[k] for k in wanted if flags.get(k) or k in own and flags.get(k) is not None}
    there = {"data_dir": folder, "video_dir": folder, "revision": ""} if folder else {}
    return options | there | more


def open_data(args):
    """(training split, {name: {val, test}} of --eval-datasets, else of the training set), as the flags say, before any
    process group, so that errors come fast.   Raises: UserError if splits that would be evaluated are not there."""
    train, evals = load_data(args.dataset, "train", **data_options(args)), {}
    for word in dict.fromkeys(args.eval_datasets or [args.dataset]):
        name, folder = parted(word, "=")
        if name in evals:
            raise UserError(f"--eval-datasets {name}: named with two folders")
        options, evals[name] = data_options(args, name, folder), {}
        for split in ("val", "test"):
            with contextlib.suppress(EmptySplit):
                evals[name][split] = load_data(name, split, **options)
        if not evals[name] and args.eval_datasets:
            raise UserError(f"--eval-datasets {name}: it has neither a val nor a test split")
    if args.eval_every and not any("val" in splits for splits in evals.values()):
        raise UserError(f"--eval-every {args.eval_every}: {', '.join(evals)} without a val split, which it would "
                        "evaluate; --hold-out-val takes one out of train, --eval-every 0 evaluates only at the end")
    for word in args.extra_pairs:
        train = add_pairs(train, word, args, evals)
    return train, evals


# ---- more of it ----
def places(data):
    """(its file, else its key, as a Path; start; end) of each row: by these the same clip is found in two sets."""
    sources = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    for key, source in zip(data.keys(), sources, strict=True):
        inside = source.get("size") is not None or source.get("bytes") or not source.get("path")
        yield Path(key if inside else source["path"]), source.get("start"), source.get("end")


def add_pairs(data, word, args, evals):
    """The training data followed by those of another set, `word` of --extra-pairs, without the clips that `evals`, the
    evaluation sets, read. In a set of questions the added rows have none (None)."""
    import datasets
    name, folder = parted(word, "=")
    options = dict.fromkeys(("image_column", "caption_column", "label_column"), "")  # the flags name the set's own
    options["unfold_captions"] = getattr(args, "unfold_captions", False)
    more = load_data(name, "train", **data_options(args, name, folder, **options))
    alike = type(data.clip) is type(more.clip) and None not in (data.sources, more.sources)
    if not (alike and more.has_captions) or data.sentences:
        raise UserError(f"--extra-pairs {word}: only joins files with captions, videos to videos or images to images")
    read = {place.stem for splits in evals.values() for part in splits.values() if part.sources is not None
            for place, *_ in places(part)}
    kept = np.flatnonzero([place.stem not in read for place, *_ in places(more)])
    dropped, more = len(more) - len(kept), more.select(kept)
    columns = ["source", "captions", "key"]
    asked = [c for c in ("question", "answer", "choices", "question_type") if c in data.table.column_names]
    with opening(f"--extra-pairs {word}"):  # the sources of tars and of files differ
        table = datasets.concatenate_datasets([data.table.select_columns(columns + asked),
                                               more.table.select_columns(columns)])
    which = None if data.which is None else np.concatenate([data.which, more.which])
    data = dataclasses.replace(data, table=table, rows=None, shards=None, which=which, own=data.own or data)
    return with_note(data, f"{len(more):,} more pairs from {more.name}, {len(more) / len(table):.0%} of an epoch",
                     more.note, f"{dropped:,} of clips that the evaluation reads left out" if dropped else "")


def add_captions(data, file):
    """The data with further captions from a file with columns video (or image), caption, and start, end for windows. A
    clip is matched by its window and its file name without folders and extension. A question that served as the caption
    is replaced.   Raises: UserError if nothing matches, or two files of one name."""
    if data.sources is None:
        raise UserError(f"--extra-captions {file}: {data.name} has no files of its own to which captions could belong")
    clips, rows = [*places(data)], {}  # rows: {(stem, start, end): rows of the data}
    for i, (place, *window) in enumerate(clips):
        rows.setdefault((place.stem, *window), []).append(i)
    with opening(f"--extra-captions {file}"):
        extra = listed(file)
    captions, asked = list(data.column("captions")), data.column("question") or [None] * len(data)
    new, lost = 0, []
    for name, start, end, texts in extra:
        found = rows.get((Path(name).stem, start, end), [])
        files = sorted({str(clips[i][0]) for i in found})
        if len(files) > 1:
            raise UserError(f"--extra-captions {file}: {name} may be any of {', '.join(files)}")
        for i in found:
            more = [t for t in texts if t not in captions[i]]
            kept = [] if more and captions[i] == [asked[i]] else captions[i]
            captions[i], new = [*kept, *more], new + len(more)
        lost += [] if found else [name]
    if len(lost) == len(extra):
        raise UserError(f"--extra-captions {file}: none of its {len(extra):,} rows matches a clip of {data.name} "
                        f"({data.split}), first {lost[0]}; names and windows (start, end) must agree")
    return with_note(with_column(data, "captions", captions), f"{new:,} captions added from {Path(file).name}",
                     f"{len(lost):,} of its rows match no training clip, first {lost[0]}" if lost else "")
