"""Everything between a file (or a hub id) and batch["views"].

table.py      Data, one split: a table with a row per example, and how its pixels are read
open.py       load_data, and the data sets of a run, as its flags say
own.py        the user's own files and folders, and hub ids        stream.py    tars: indexed, or read in order
batches.py    training batches                                     views.py     random numbers and image views
pictures.py, frames.py, clips.py    bytes of an image or a video -> uint8 pixels (or features)
annotations.py    what the readers of annotation files share       texts.py     captions and their paraphrases

Data sets by name stand in one file per family. Such a file has SETS = {name: facts} and load(name, split, options) ->
Data. Facts: splits {split: expected count or None}, licence, drawn (no files are needed), and options {flag: keywords
of add_argument} for flags of this set alone (texts=True: not in scripts without captions). A new set is one function
in a family's file, and its name here.
"""

import importlib

_FAMILIES = {
    "emoji": "emoji", "moving_emoji": "moving-emoji", "epic": "epic-kitchens-100",
    "long_tail": "cifar10-lt cifar100-lt fashion-mnist-lt imagenet100-lt",
    "videos": "msrvtt msvd activitynet didemo youcook2 howto100m ssv2-lt",
    "questions": "msrvtt-qa msvd-qa tgif-qa-r-action tgif-qa-r-transition tgif-qa-r-frame nextqa causal-vidqa",
    "images": "cc3m cc12m coco flickr30k cifar10 cifar100 fashion-mnist imagenet imagenet1k country211 dtd eurosat "
              "gtsrb fgvc-aircraft imagenet-sketch imagenet-a imagenet-r imagenet-o flowers pets pcam mnist food101"}
MODULES = {name: f"contrastive.data.{file}" for file, names in _FAMILIES.items() for name in names.split()}


def find_set(name):
    """The module that knows a data set by this name, or None."""
    return importlib.import_module(MODULES[name]) if name in MODULES else None


def options_of(name):
    """The options of load_data that only this data set has: its file declares them as flags."""
    options = find_set(name).SETS[name].get("options", {}) if name in MODULES else {}
    return [flag[2:].replace("-", "_") for flag in options]


def splits_of(name, hold_out_val=False):
    """The splits of a data set; one by name that comes without val has it only if it is held out of train."""
    own = tuple(find_set(name).SETS[name]["splits"]) if name in MODULES else ("train", "val", "test")
    return (*own, "val") if hold_out_val and set(own) == {"train", "test"} else own
