"""Data: from a file to the batches of a run.

load_data opens one split of a data set, and open_data all that a run trains and evaluates on. The
way of one row of a csv file, through seven files:

1. load_data, open_unnamed (this file)      which data set, and with which options
2. read_table (table_files.py)              the file as a table of texts
3. data_of_tables (user_data.py)            rows of one image or window become one example
4. hold_out (this file)                     is it in train, val or test?
5. Data (table.py)                          one split: a table, and how its pixels are read
6. Batches, RawBatches (batches.py)         the order; a batch in a worker, and on the device
7. decode (pixels.py; read_frames in frames.py for a video)
8. Augment (views.py)                       crop, colours and the random numbers behind them

options.py      DataOptions: one field for each flag that concerns data
registry.py     data sets by name: what is known of each, and which module opens it
user_data.py    the user's own files and hub ids: their rows become examples
folders.py      the files below a folder, and the splits that names say
table_files.py  csv, json and parquet files, and the columns in them
hub.py          what is downloaded from the Hugging Face hub
tars.py         tars, by an index of their samples
table.py        Data, one split as a table
additions.py    --extra-captions, --caption-noise and --extra-pairs
pixels.py       image files; frames.py: videos; clips.py: clips of frames, or features of them;
                regions.py: features of regions, for VGT
sound.py        sound of clips, for VAST
feature_cache.py  features of frozen encoders, which are computed once
batches.py      training batches; views.py: random numbers and views of images
annotations.py  what the readers of annotation files share

Data sets by name: images.py, videos.py, epic.py, questions.py, emoji.py, moving_emoji.py,
openclipart.py, and long_tail.py, which cuts a long tail from a set of labelled images.
"""

import contextlib
import dataclasses
import difflib
import functools
import os
import re
from pathlib import Path

from contrastive.core.processes import UserError
from contrastive.core.words import name_of
from contrastive.data.additions import (
    add_caption_noise, add_captions, add_pairs, clips_of_data, without_trained)
from contrastive.data.folders import files_below
from contrastive.data.options import HELD_OUT_FRACTION, DataOptions
from contrastive.data.registry import SETS, SPLITS, find_data_set, partition_name
from contrastive.data.table import EmptySplit, with_note
from contrastive.data.table_files import FILE_TYPES
from contrastive.data.user_data import open_user_data
from contrastive.data.views import key_hash

import numpy as np

MAX_HELD_OUT = 5000  # rows of a held-out split that are evaluated
FEW_ROWS = 20  # with fewer in val, a single one moves its numbers by 5 points
# the end of the key of a window, such as " 2-4.5 s" and " 1e-05-2 s"
WINDOW_SUFFIX = re.compile(r" [\d.e+-]*-[\d.e+-]* s$")


# ---- one split ----
def load_data(name, split, options=None, **flags):
    """Opens one split of a data set.

    Args:
        name: a name of SETS; a csv, tsv, jsonl, parquet or tar; a folder; or a hub id such as
            org/name. What comes from the hub may be NAME@REVISION, a commit.
        split: train, val or test.
        options: DataOptions, or its fields by keyword.
    Returns: Data.
    Raises: EmptySplit if there is no such split, and UserError with the path or column that is
        wrong and what exists instead.
    """
    if options is None:
        options = DataOptions(**flags)
    name, revision = partition_name(name, "@")
    if revision:
        options = options.replace(revision=revision)
    if split != "train" and options.eval_frames:
        options = options.replace(frames=options.eval_frames)
    data = open_split(name, split, options)
    if options.feature_dir:
        data = check_feature_windows(name, data)
    data = with_modalities(data, options)
    data = dataclasses.replace(data, same_text=same_text_of(name))
    if split == "train":
        data = prepare_for_training(data, options)
    return data


def open_split(name, split, options):
    """The split as its files have it. Raises EmptySplit if it does not exist or has no row."""
    data_set = find_data_set(name)
    if data_set is None:
        splits = open_unnamed(name, options)
        data = splits.get(split)
    else:
        splits = data_set.splits
        data = open_named(name, split, options)
    if data is not None and len(data):
        return data
    message = f"{name} has no {split} split; it has: {', '.join(splits)}"
    if split == "val" and data_set is not None and data_set.lacks_only_val():
        message += "; --holdout-fraction 0.05 takes one out of train"
    raise EmptySplit(message)


@functools.lru_cache(maxsize=32)
def open_named(name, split, options):
    """One split of a data set by name, None if it has no such split. With --holdout-fraction a
    part of train becomes val where val alone is missing."""
    data_set = find_data_set(name)
    from_hub = not options.data_dir and (data_set.repository or data_set.full_set)
    if options.revision and not from_hub:
        refuse_revision(name, options)
    if split != "test" and options.holdout_fraction and data_set.lacks_only_val():
        train = with_count(data_set, data_set.load(name, "train", options))
        return hold_out({"train": train}, ["val"], options, least=0).get(split)
    if split not in data_set.splits:
        return None
    data = data_set.load(name, split, options)
    if data is not None:
        data = with_count(data_set, data)
    return data


def refuse_revision(name, options):
    """Raises UserError for NAME@REVISION of what is not read from the hub."""
    raise UserError(f"--dataset {name}@{options.revision}: only what is read from the hub has a "
                    "revision")


def with_count(data_set, data):
    """The data, with a warning in their note if their number is not a published one."""
    if data_set.is_rendered:
        return data
    tolerance = data_set.tolerance.get(data.split, 0.0)
    counts = [data_set.splits.get(data.split), data_set.other_counts.get(data.split)]
    counts = list(filter(None, counts))
    for count in counts:
        if abs(len(data) - count) <= tolerance * count:
            return data
    if not counts:
        return data
    return with_note(data, f"WARNING: {len(data):,} examples, {counts[0]:,} expected: the numbers "
                           "are not comparable with the papers'")


def open_unnamed(name, options):
    """{split: Data} of the user's own data."""
    path = Path(name).expanduser()
    is_path = len(path.parts) != 2 or path.is_absolute() or path.suffix in FILE_TYPES
    if is_path and not path.exists():
        message = f"{name}: no such file or folder"
        if len(path.parts) == 1 and path.suffix not in FILE_TYPES:
            nearest = difflib.get_close_matches(name, SETS, 3, cutoff=0)
            message += (", no hub id (org/name), and no known set; the nearest: "
                        f"{', '.join(nearest)}")
        raise UserError(message)
    if options.revision and path.exists():
        refuse_revision(name, options)
    return open_unchanged(name, options, state_of_files(path))


def state_of_files(path):
    """A hash of the names of a file, or of the files of a folder, and of when each was written or
    put in its place."""
    paths = []
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = sorted(files_below(path))
    states = []
    for file in filter(os.path.exists, paths):  # without links to nothing
        states.append((str(file), os.stat(file).st_ctime_ns))
    return hash(tuple(states))


@functools.lru_cache(maxsize=8)
def open_unchanged(name, options, state):
    """{split: Data} of the user's own data. The files are read again if `state`, that of
    state_of_files, has changed: it is a key of this cache."""
    splits = open_user_data(name, options)
    if options.test_as_whole and list(splits) == ["train"]:
        train = splits["train"]
        return {"test": train.select(range(len(train)), "test")}
    missing = [split for split in ("val", "test") if split not in splits]
    if not options.hold_out_test and "test" in missing:
        missing.remove("test")
    return hold_out(splits, missing, options)


# ---- splits that are held out ----
def hash_fraction(key):
    """A number in 0..1 from the hash of a name alone, whatever the other rows; the windows of a
    video share it."""
    video = WINDOW_SUFFIX.sub("", key)
    return key_hash(f"held out {video}") / 2**63


def hold_out(splits, missing, options, least=FEW_ROWS):
    """Takes missing splits out of train.

    A hash of each name decides which pictures or videos they get: holdout_fraction of train, but at
    least `least`, or a sixth of train if that is less. Above this number a row is in the same split
    whatever the other rows are. At most MAX_HELD_OUT rows of a split are evaluated.

    Args:
        splits: {split: Data}.
        missing: val, test, both or none.
        least: pictures or videos in each missing split.
    """
    train = splits.get("train")
    if train is None or not missing:
        return splits
    # "video" of sets with several rows, or several names, of a video
    names = train.column("video") or train.keys()
    fractions = np.array([hash_fraction(name) for name in names])           # (M,)
    size = options.holdout_fraction or HELD_OUT_FRACTION
    masks = held_out_masks(fractions, missing, size, least)
    is_train = ~(masks["val"] | masks["test"])
    result = dict(splits)
    num_held_out = len(train) - is_train.sum()
    keys = list(train.keys())
    held_out = [keys[row] for row in np.flatnonzero(~is_train)]
    result["train"] = with_note(
        dataclasses.replace(train.select(np.flatnonzero(is_train), "train"), held_out=held_out),
        f"{num_held_out:,} of {len(train):,} held out for {' and '.join(missing)}, "
        "by a hash of the name")
    for split in missing:
        result[split] = held_out_split(train, split, masks[split], fractions)
    return result


def held_out_masks(fractions, missing, size, least=FEW_ROWS):
    """{"val": (M,) bool, "test": (M,) bool} of the rows that are held out.

    Args:
        fractions: (M,) hash_fraction of the rows.
        missing: val, test, both or none.
        size: of each missing split, as a part of the rows.
        least: pictures or videos in each missing split.
    """
    units = np.unique(fractions)                    # (U,) ascending, one of each picture or video
    least = min(least, len(units) // 6)
    # Test begins behind val.
    test = units[:0]
    if "test" in missing:
        start = 0.0
        if "val" in missing:
            start = size
        candidates = units[units >= start]
        test = candidates[:max(least, np.sum(candidates < start + size))]
    val = units[:0]
    if "val" in missing:
        candidates = np.setdiff1d(units, test)
        val = candidates[:max(least, np.sum(candidates < size))]
    return {"val": np.isin(fractions, val), "test": np.isin(fractions, test)}


def held_out_split(train, split, mask, fractions):
    """Data of the rows in the mask, at most MAX_HELD_OUT of them."""
    rows = np.flatnonzero(mask)
    by_hash = np.argsort(fractions[rows], kind="stable")
    rows = np.sort(rows[by_hash[:MAX_HELD_OUT]])
    data = with_note(train.select(rows, split), f"held out of {len(train):,}")
    if len(rows) < FEW_ROWS:
        data = with_note(
            data, f"WARNING: fewer than {FEW_ROWS} rows, --holdout-fraction holds out more")
    return data


# ---- what the options change ----
def check_feature_windows(name, data):
    """The data, with a note if features of whole files stand for windows. Raises UserError if two
    windows would share a file."""
    if data.sources is None:  # pixels in memory
        return data
    windows = set(clips_of_data(data))
    if len({window.file for window in windows}) < len(windows):
        raise UserError(f"{name}: several windows of one video, but --feature-dir has only one "
                        "file per video")
    if any(window.start is not None or window.end is not None for window in windows):
        return with_note(
            data, "the features are those of whole files, not of the windows (start, end)")
    return data


def with_modalities(data, options):
    """The data with what is to be read of their clips, and a note of what none of them has: the
    model then reads zeros or empty subtitles."""
    data = dataclasses.replace(data, modalities=options.modalities)
    for letter, words in (("a", "no sound"), ("s", "no subtitles")):
        if letter in options.modalities and letter not in data.available_modalities():
            data = with_note(data, words)
    return data


def same_text_of(name):
    """How retrieval counts a caption of another item that has the same words: "positive", or
    "wrong" as in published sets."""
    data_set = find_data_set(name)
    if data_set is None or data_set.is_rendered or data_set.function is not None:
        return "positive"
    return "wrong"


def prepare_for_training(data, options):
    """A train split with what only training has: sentences by relevancy, further captions, captions
    of other rows, and an example for each caption."""
    if options.caption_relevancy:
        changes_captions = (
            options.unfold_captions or options.extra_captions or options.caption_noise)
        if data.sentences is None or changes_captions:
            raise UserError("--caption-relevancy: draws sentences of epic-kitchens-100, without "
                            "--unfold-captions, --extra-captions and --caption-noise")
        data = dataclasses.replace(data, caption_relevancy=options.caption_relevancy)
    if options.extra_captions:
        data = add_captions(data, options.extra_captions)
    if options.caption_noise:
        data = add_caption_noise(data, options.caption_noise)
    if options.unfold_captions:
        data = data.unfold()
    return data


# ---- the data of a run ----
# options that only the training set takes
OF_TRAINING_SET = (
    "data_dir", "feature_dir", "region_dir", "revision", "unfold_captions",
    "extra_captions", "caption_noise", "caption_relevancy", "imbalance_ratio", "split_seed",
    "index_file", "val_file", "test_file", "few_shot_file")
COLUMN_FLAGS = ("--image-column", "--caption-column", "--label-column")


def data_options(args, name=None, folder=""):
    """The DataOptions that the flags of a run give to one of its data sets.

    Args:
        args: parsed flags.
        name: the data set. None = the training set, args.dataset.
        folder: of all files of this data set, if it has a folder of its own.
    """
    training_set = getattr(args, "dataset", "")
    if name is None:
        name = training_set
    options = DataOptions.from_args(args)
    is_named = find_data_set(name) is not None
    if is_named:  # its columns are known
        options = options.without(map(name_of, COLUMN_FLAGS))
    if name != training_set:
        options = options.without(OF_TRAINING_SET)
    elif tests_on_other_data(args):
        options = options.replace(hold_out_test=False)
    if folder:
        options = options.replace(data_dir=folder, video_dir=folder, revision="")
    return options


def tests_on_other_data(args):
    """Whether the training set is the user's own and --eval-datasets names other data."""
    names = names_of_evaluation_sets(args)
    return len(names) > 0 and args.dataset not in names and find_data_set(args.dataset) is None


def names_of_evaluation_sets(args):
    """The names of --eval-datasets, whose words are NAME or NAME=DIR."""
    words = getattr(args, "eval_datasets", None) or ()
    return [partition_name(word, "=")[0] for word in words]


def open_data(args):
    """Opens all data of a run, before there are processes, so that errors come fast.

    Args:
        args: parsed flags.
    Returns: the train split, and {name: {"val": Data, "test": Data}} of --eval-datasets, or of the
        training set without this flag; with the splits that exist. If none of --eval-datasets has
        a val split, that of the user's own training set is among them.
    Raises: UserError if there is nothing that could be evaluated.
    """
    train = load_data(args.dataset, "train", data_options(args))
    words = args.eval_datasets or [args.dataset]
    evaluation_sets = open_evaluation_sets(args, train, words)
    has_val = any("val" in splits for splits in evaluation_sets.values())
    if not has_val and tests_on_other_data(args):
        val_of_training_set = open_splits(args.dataset, ["val"], data_options(args))
        if val_of_training_set:
            has_val = True
            evaluation_sets[args.dataset] = val_of_training_set
    if args.eval_every > 0 and not has_val:
        raise UserError(
            f"--eval-every {args.eval_every}: {', '.join(evaluation_sets)} without a val split, "
            "which it would evaluate; --holdout-fraction 0.05 takes one out of train, --eval-every "
            "0 evaluates only at the end")
    for word in getattr(args, "extra_pairs", []):
        train = add_pairs(train, open_pairs(word, args), evaluation_sets, f"--extra-pairs {word}")
    return train, evaluation_sets


def open_evaluation_sets(args, train, words, video_dir=""):
    """Opens data sets that are evaluated.

    Rows of the user's data that are trained on are left out and counted.

    Args:
        args: parsed flags.
        train: the training set; None if no set is the user's own.
        words: the sets, NAME or NAME=DIR.
        video_dir: as in evaluation_options.
    Returns: {name: {"val": Data, "test": Data}}, with the splits that exist.
    """
    evaluation_sets = {}
    for word in dict.fromkeys(words):
        name, folder = partition_name(word, "=")
        if name in evaluation_sets:
            raise UserError(f"{name}: named with two folders; give one")
        splits = open_splits(
            name, ["val", "test"], evaluation_options(args, name, folder, video_dir))
        if train is not None and name != args.dataset and find_data_set(name) is None:
            for split, data in splits.items():
                splits[split] = without_trained(data, train)
        if args.eval_datasets and not splits:
            raise UserError(f"--eval-datasets {name}: it has neither a val nor a test split")
        evaluation_sets[name] = splits
    return evaluation_sets


def evaluation_options(args, name, folder="", video_dir=""):
    """The DataOptions of a set that is evaluated; another one than that of training has no rows to
    train on.

    Args:
        args, name, folder: as in data_options.
        video_dir: of its videos; "" = the folder, else that of the flags.
    """
    options = data_options(args, name, folder)
    if video_dir:
        options = options.replace(video_dir=video_dir)
    if name != args.dataset:
        options = options.replace(test_as_whole=True)
    return options


def open_splits(name, splits, options):
    """{split: Data} of those splits of a data set that exist."""
    result = {}
    for split in splits:
        with contextlib.suppress(EmptySplit):
            result[split] = load_data(name, split, options)
    return result


def open_pairs(word, args):
    """The train split of another data set, NAME or NAME=DIR of --extra-pairs."""
    name, folder = partition_name(word, "=")
    options = data_options(args, name, folder)
    options = options.replace(
        image_column="", caption_column="", label_column="",  # the flags name the training set's
        # as the training set
        caption_noise=data_options(args).caption_noise,
        unfold_captions=data_options(args).unfold_captions)
    return load_data(name, "train", options)


def splits_of(name, holdout_fraction=0.0):
    """Names of the splits of a data set, as far as they are known before it is opened."""
    data_set = find_data_set(name)
    if data_set is None:
        return SPLITS
    splits = tuple(data_set.splits)
    if holdout_fraction and data_set.lacks_only_val():
        splits += ("val",)
    return splits
