"""Data sets by name, a file for each family.

A file of this folder has `SETS = {name: facts}` (splits with their expected counts, or None; licence; where the
files lie; options: {flag: keywords of argparse's add_argument} of flags that only this set has, with texts=True where
scripts without captions have it not) and `load(name, split, options) -> common.Data`, options as those of
common.load_data and its own. A new set is one file and a line in _FAMILIES. own.py reads what has no name here;
annotations.py is what the readers of annotation files share.
"""

_FAMILIES = {
    "emoji": "emoji", "moving_emoji": "moving-emoji", "epic": "epic-kitchens-100", "ssv2": "ssv2-lt",
    "long_tail": "cifar10-lt cifar100-lt fashion-mnist-lt imagenet100-lt",
    "videos": "msrvtt msvd activitynet didemo youcook2 howto100m",
    "questions": "msrvtt-qa msvd-qa tgif-qa-r-action tgif-qa-r-transition tgif-qa-r-frame nextqa causal-vidqa",
    "hub": "cc3m cc12m coco flickr30k cifar10 cifar100 fashion-mnist imagenet imagenet1k country211 dtd eurosat gtsrb "
           "fgvc-aircraft imagenet-sketch imagenet-a imagenet-r imagenet-o flowers pets pcam mnist food101"}
MODULES = {name: f"sets.{file}" for file, names in _FAMILIES.items() for name in names.split()}  # name -> module
