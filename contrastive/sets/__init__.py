"""Data sets by name, one file per family.

A file of this folder defines `SETS = {name: facts}` and `load(name, split, options) -> common.Data`. The facts are:
splits with their expected counts (or None), licence, where the files lie, drawn (True if there are no files), and
options {flag: keywords of argparse's add_argument} for flags of this set alone (texts=True: not in scripts without
captions). `load` gets the options of common.load_data and these. A new set is one file and a line in _FAMILIES. own.py
reads data that has no name here; annotations.py holds what the readers of annotation files share.
"""

_FAMILIES = {
    "emoji": "emoji", "moving_emoji": "moving-emoji", "epic": "epic-kitchens-100", "ssv2": "ssv2-lt",
    "long_tail": "cifar10-lt cifar100-lt fashion-mnist-lt imagenet100-lt",
    "videos": "msrvtt msvd activitynet didemo youcook2 howto100m",
    "questions": "msrvtt-qa msvd-qa tgif-qa-r-action tgif-qa-r-transition tgif-qa-r-frame nextqa causal-vidqa",
    "hub": "cc3m cc12m coco flickr30k cifar10 cifar100 fashion-mnist imagenet imagenet1k country211 dtd eurosat gtsrb "
           "fgvc-aircraft imagenet-sketch imagenet-a imagenet-r imagenet-o flowers pets pcam mnist food101"}
MODULES = {name: f"contrastive.sets.{file}" for file, names in _FAMILIES.items() for name in names.split()}
