"""load_data: one split of a data set, by name or the user's own; splits that lack are held out of train."""

import dataclasses
import functools
import re

from contrastive.data import find_set, options_of
from contrastive.data.table import joined, with_note
from contrastive.data.views import key_hash
from contrastive.engine.processes import UserError

import numpy as np

HELD_OUT = 0.05  # part of the images held out for val, and as much for test, if the data lack these splits
MOST_HELD_OUT = 5000  # at most so many of them are evaluated


class EmptySplit(UserError):
    """An evaluation split that the data do not have, or for which no row was held out."""


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
        from contrastive.data.texts import add_captions
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


def _own(name, split, options):
    from contrastive.data.own import own_data
    splits = own_data(name, options)
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
