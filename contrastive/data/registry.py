"""All data sets that have a name, and what is known of each before any of its files is opened.

A new data set is one entry of SETS and a function `load(name, split, options) -> Data` in the
module that the entry names. A set of your own needs no module:

    common.SETS["mine"] = function    # function(split, options) -> Data, or None without this split
"""

import dataclasses
import importlib
from pathlib import Path

from contrastive.core.number_types import between, fraction
from contrastive.data.options import DataOptions

SPLITS = ("train", "val", "test")


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What is known of a data set before any of its files is opened."""

    module: str  # the file of contrastive/data whose load(name, split, options) opens it
    splits: dict  # {split: number of its examples, None = not known}
    licence: str
    repository: str = ""  # on the hub, which is read without --data-dir
    tars: dict = dataclasses.field(default_factory=dict)  # {split: pattern of its tars}
    full_set: str = ""  # the data set from which this long tail is cut
    is_rendered: bool = False  # by a program, so there are neither files nor a published number
    # {split: by which part its number of examples may differ from `splits`}
    tolerance: dict = dataclasses.field(default_factory=dict)
    other_counts: dict = dataclasses.field(default_factory=dict)  # {split: number in another paper}
    # {flag: keywords of add_argument} of this set alone; texts=True: of scripts with captions only.
    flags: dict = dataclasses.field(default_factory=dict)
    function: object = None  # a user's function(split, options) -> Data, in place of a module

    def load(self, name, split, options):
        """Opens one split: Data."""
        if self.function:
            return self.function(split, options)
        module = importlib.import_module(f"contrastive.data.{self.module}")
        return module.load(name, split, options)

    def lacks_only_val(self):
        """Whether --holdout-fraction can give this set the one split that it has not."""
        return set(self.splits) == {"train", "test"}


# ---- flags of single data sets ----
MOVING_EMOJI_FLAGS = {
    "--clips": dict(
        type=between(2, 10**6, int), nargs=3, default=list(DataOptions.clips),
        metavar=("TRAIN", "VAL", "TEST"), help="clips of each split")}
EMOJI_SCENES_FLAGS = {
    "--scenes": dict(
        type=between(2, 10**5, int), nargs=3, default=list(DataOptions.scenes),
        metavar=("TRAIN", "VAL", "TEST"), help="images per class of each split")}
EPIC_FLAGS = {
    "--caption-relevancy": dict(
        type=fraction, default=DataOptions.caption_relevancy, texts=True,
        help="train on a random sentence whose relevancy to the clip is above this, 0..1; "
             "AVION 0.1; 0 = always the clip's own narration")}
IMAGENET_FLAGS = {
    "--class-names": dict(
        choices=["wordnet", "clip"], default=DataOptions.class_names,
        help="names of ImageNet's classes: the first of WordNet's, or CLIP's, as in SLIP's code"),
    "--prompts": dict(
        choices=["openai", "slip"], default=DataOptions.prompts, texts=True,
        help="prompts for ImageNet's classes: CLIP's 80, or the 7 of SLIP's code")}

# ---- licences ----
TWEMOJI = "CC-BY 4.0, credit Twemoji"
CIFAR = "research use, cite Krizhevsky 2009"
RESEARCH = "research only"
OTHER_LICENCE = "see the data set's own page"


def clip_benchmark(repository, train=None, test=None, licence=OTHER_LICENCE, **facts):
    """A repository of CLIP benchmark: tars of train and test, or of test alone."""
    splits = {"test": test}
    if train:
        splits = {"train": train, "test": test}
    tars = {split: f"{split}/*.tar" for split in splits}
    repository = f"clip-benchmark/wds_{repository}"
    return DataSet("images", splits, licence, repository, tars, **facts)


def long_tail(full_set, licence):
    """A data set whose splits are cut from another one; their sizes follow from the ratio."""
    return DataSet("long_tail", dict.fromkeys(SPLITS), licence, full_set=full_set)


def questions(train, test, val=None):
    """Questions about videos: their numbers in the papers or in the authors' READMEs."""
    splits = {"train": train, "test": test}
    if val:
        splits = {"train": train, "val": val, "test": test}
    return DataSet("questions", splits, RESEARCH)


# {name: DataSet, or the function of a user}
SETS = {
    # Drawn when a run starts; nothing is downloaded.
    "emoji": DataSet(
        "emoji", {"train": 3058, "val": 177, "test": 168}, TWEMOJI, is_rendered=True),
    "moving-emoji": DataSet(
        "moving_emoji", dict.fromkeys(SPLITS), TWEMOJI, is_rendered=True, flags=MOVING_EMOJI_FLAGS),
    "emoji-scenes": DataSet(
        "moving_emoji", dict.fromkeys(SPLITS), TWEMOJI, is_rendered=True, flags=EMOJI_SCENES_FLAGS),

    # Images and captions. MM-TS trained on 3.3 M examples of cc3m, TeMo on 2.9 M.
    "cc3m": DataSet(
        "images", {"train": 2_910_000, "val": 13_400},
        "Conceptual Captions: free use with credit; images keep their owners' rights",
        "pixparse/cc3m-wds",
        {"train": "cc3m-train-*.tar", "val": "cc3m-validation-*.tar"},
        tolerance={"train": 0.02, "val": 0.02}, other_counts={"train": 3_318_333}),
    "cc12m": DataSet(
        "images", {"train": 10_968_539, "val": 5_000}, "as cc3m", "pixparse/cc12m-wds",
        {"train": "cc12m-train-*.tar", "val": "cc12m-train-2175.tar"},
        tolerance={"train": 0.02, "val": 0.02},
        flags=IMAGENET_FLAGS),  # on which SLIP's code evaluates its models
    "coco": clip_benchmark(
        "mscoco_captions", 82_783, 5_000, "CC-BY 4.0 annotations, Flickr terms for images",
        tolerance={"train": 0.02}),
    "flickr30k": clip_benchmark("flickr30k", 29_000, 1_000, "research only, Flickr terms"),

    "openclipart": DataSet(
        "openclipart", {"train": 2_222, "val": 1_000, "test": 1_000}, "public domain"),

    # Images with classes: the columns of TeMo's Table 7, and what TS trains on.
    "cifar10": DataSet(
        "images", {"train": 50_000, "test": 10_000}, CIFAR, "uoft-cs/cifar10"),
    "cifar100": DataSet(
        "images", {"train": 50_000, "test": 10_000}, CIFAR, "uoft-cs/cifar100"),
    "fashion-mnist": DataSet(
        "images", {"train": 60_000, "test": 10_000}, "MIT", "zalando-datasets/fashion_mnist"),
    "imagenet": DataSet(
        "images", {"train": 1_281_167, "test": 50_000}, "research only, gated",
        "ILSVRC/imagenet-1k", flags=IMAGENET_FLAGS),
    "imagenet1k": clip_benchmark(  # the validation images of imagenet, ungated: TeMo's IN1k column
        "imagenet1k", test=50_000, licence=RESEARCH, flags=IMAGENET_FLAGS),
    "country211": clip_benchmark("country211", 31_650, 21_100),
    "dtd": clip_benchmark("vtab-dtd", 1_880, 1_880),
    "eurosat": clip_benchmark("vtab-eurosat", 16_200, 5_400),
    "gtsrb": clip_benchmark("gtsrb", 26_640, 12_630),
    "fgvc-aircraft": clip_benchmark("fgvc_aircraft", 6_667, 3_333),
    "imagenet-sketch": clip_benchmark("imagenet_sketch", test=50_889),
    "imagenet-a": clip_benchmark("imagenet-a", test=7_500),
    "imagenet-r": clip_benchmark("imagenet-r", test=30_000),
    "imagenet-o": clip_benchmark("imagenet-o", test=2_000),
    "flowers": clip_benchmark("vtab-flowers", 1_020, 6_149),
    "pets": clip_benchmark("vtab-pets", 2_944, 3_669),
    "pcam": clip_benchmark("vtab-pcam", 262_144, 32_768),
    "mnist": clip_benchmark("mnist", 60_000, 10_000),
    "food101": clip_benchmark("food101", 75_750, 25_250),

    # Images with classes, cut to a long tail.
    "cifar10-lt": long_tail("cifar10", CIFAR),
    "cifar100-lt": long_tail("cifar100", CIFAR),
    "fashion-mnist-lt": long_tail("fashion-mnist", "MIT"),
    "imagenet100-lt": long_tail("", RESEARCH),

    # Videos and captions. The test splits of activitynet and youcook2 are the papers': val1, val.
    "msrvtt": DataSet("videos", {"train": 9_000, "test": 1_000}, RESEARCH, "friedrichor/MSR-VTT"),
    "msvd": DataSet(
        "videos", {"train": 1_200, "val": 100, "test": 670}, RESEARCH, "friedrichor/MSVD"),
    "activitynet": DataSet(
        "videos", {"train": 10_009, "test": 4_917}, RESEARCH, "friedrichor/ActivityNet_Captions"),
    "didemo": DataSet(
        "videos", {"train": 8_395, "val": 1_065, "test": 1_004}, RESEARCH, "friedrichor/DiDeMo"),
    "youcook2": DataSet(
        "videos", {"train": 10_337, "test": 3_492}, RESEARCH, "lmms-lab/YouCook2",
        other_counts={"train": 9_283, "test": 3_216}),  # counts of VAST's files with subtitles
    "howto100m": DataSet("videos", {"train": None}, RESEARCH),
    # train: the sum of the class counts in LMR's configuration; val and test: 40 and 15 of a class
    "ssv2-lt": DataSet("videos", {"train": 50_418, "val": 6_960, "test": 2_610}, RESEARCH),
    "epic-kitchens-100": DataSet(
        "epic", {"train": 67_217, "test": 9_668},
        "CC BY-NC 4.0, research only; test = the papers' test", flags=EPIC_FLAGS),

    # Questions about videos. MSRVTT-QA's "149 K" for training, which MAMA prints too, are 158,581.
    "msrvtt-qa": questions(train=158_581, val=12_278, test=72_821),
    "msvd-qa": questions(train=30_933, val=6_415, test=13_157),
    "tgif-qa-r-action": questions(train=20_475, test=2_274),
    "tgif-qa-r-transition": questions(train=52_704, test=6_232),
    "tgif-qa-r-frame": questions(train=39_392, test=13_691),
    "nextqa": questions(train=34_132, val=4_996, test=8_564),
    "causal-vidqa": questions(train=112_656, val=16_170, test=32_574),
}


def find_data_set(name):
    """The DataSet of a name, which may end in @REVISION; None for data without a name."""
    name, _ = partition_name(name, "@")
    entry = SETS.get(name)
    if callable(entry):
        return DataSet("", dict.fromkeys(SPLITS), "your own", function=entry)
    return entry


def partition_name(word, sign):
    """(name, value) of NAME=DIR or NAME@COMMIT; (word, "") if it has no sign or is a path."""
    if Path(word).expanduser().exists():
        return word, ""
    name, _, value = word.partition(sign)
    return name, value


def flags_of(name):
    """{flag: keywords of add_argument} of a data set alone."""
    data_set = find_data_set(name)
    if data_set is None:
        return {}
    return data_set.flags
