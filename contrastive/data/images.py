"""Image sets by name: from the hub, its cache (HF_HUB_OFFLINE=1), or a local copy in --data-dir. A set consists of
webdataset tars (stream.py) or of tables that `datasets` reads (own.py)."""

import dataclasses
from pathlib import Path

from contrastive.data.own import read_tables, splits_of_tables
from contrastive.data.stream import Stream, index
from contrastive.data.table import COMMITS, hub_folder, with_column
from contrastive.engine.processes import UserError, opening, say

TEMO_17 = ("cifar10", "cifar100", "country211", "dtd", "eurosat", "gtsrb", "fgvc-aircraft", "imagenet-sketch",
           "imagenet-a", "imagenet-r", "imagenet-o", "flowers", "pets", "pcam", "mnist", "food101",
           "imagenet1k")  # the columns of TeMo's Table 7, in order
_KINDS = ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")
CIFAR_PROMPTS = tuple(f"a {kind}photo of {article} {{c}}." for article in ("a", "the") for kind in _KINDS) + (
    "a photo of a small {c}.", "a photo of a big {c}.",
    "a photo of the small {c}.", "a photo of the big {c}.")  # CLIP's eighteen for CIFAR
_BOTH = "a", "the"
_OF_A, _AS_A = "sculpture rendering tattoo drawing painting doodle sketch rendition".split(), (
    "embroidered plastic cartoon origami toy plushie".split())
_SHOT = ("", "bad ", "good ", "cropped ", "bright ", "dark ", "blurry ", "close-up ", "pixelated ", "low resolution ",
         "black and white ", "jpeg corrupted ")
_SEEN = "hard to see", "clean", "dirty", "cool", "large", "small", "nice", "weird"
IMAGENET_PROMPTS = (  # CLIP's eighty
    *(f"a {thing} of {article} {{c}}." for thing in _OF_A for article in _BOTH),
    *(f"{thing} of {article} {{c}}." for thing in ("graffiti", "art", "itap") for article in _BOTH),
    *(f"{article} {kind} {{c}}." for kind in _AS_A for article in _BOTH),
    *(f"a {kind}photo of {article} {{c}}." for kind in _SHOT for article in _BOTH),
    *(f"a photo of {article} {how} {{c}}." for how in _SEEN for article in _BOTH),
    *(f"{article} {{c}} in a video game." for article in _BOTH),
    *(f"a photo of {whose} {{c}}." for whose in ("many", "my", "one")), "itap of my {c}.")
PROMPTS = {"cifar10": CIFAR_PROMPTS, "cifar100": CIFAR_PROMPTS, "imagenet": IMAGENET_PROMPTS,
           "imagenet1k": IMAGENET_PROMPTS}
CIFAR_STATS = {  # mean and std with which the CC3M trainer evaluates; CIFAR-10's own std is .2470 .2435 .2616
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))}


def _table(repo, train, test, licence):
    """Facts of a repository of tables."""
    return {"repo": repo, "splits": {"train": train, "test": test}, "licence": licence}


def _tars(repo, train=0, test=0, licence="see the data set's own page", about=0.0):
    """Facts of a CLIP benchmark repository of tars; without a count for train there is no train split."""
    splits = ({"train": train} if train else {}) | {"test": test}
    return {"repo": f"clip-benchmark/wds_{repo}", "splits": splits, "licence": licence, "about": about,
            "files": {s: f"{s}/*.tar" for s in splits}}


CLASS_NAMES = {"--class-names": dict(choices=["wordnet", "clip"], default="wordnet",
                                     help="ImageNet's: the first of WordNet's, or CLIP's, of the tars of imagenet1k")}
# splits: {split: expected number of examples}.   about: the part by which a count may be off (web pages that vanished).
# also: {split: another paper's count}: MM-TS trained on 3.3 M samples of cc3m, TeMo on 2.9 M.
# files: {split: pattern of its tars}.
SETS = {
    "cc3m": {
        "repo": "pixparse/cc3m-wds", "splits": {"train": 2_910_000, "val": 13_400}, "about": 0.02,
        "files": {"train": "cc3m-train-*.tar", "val": "cc3m-validation-*.tar"}, "also": {"train": 3_318_333},
        "licence": "Conceptual Captions: free use with credit; images keep their owners' rights"},
    "cc12m": {
        "repo": "pixparse/cc12m-wds", "splits": {"train": 10_968_539, "val": 5_000}, "about": 0.02,
        "files": {"train": "cc12m-train-*.tar", "val": "cc12m-train-2175.tar"}, "licence": "as cc3m"},
    "coco": _tars("mscoco_captions", 82_783, 5_000, "CC-BY 4.0 annotations, Flickr terms for images", 0.02),
    "flickr30k": _tars("flickr30k", 29_000, 1_000, "research only, Flickr terms"),
    "cifar10": _table("uoft-cs/cifar10", 50_000, 10_000, "research use, cite Krizhevsky 2009"),
    "cifar100": _table("uoft-cs/cifar100", 50_000, 10_000, "research use, cite Krizhevsky 2009"),
    "fashion-mnist": _table("zalando-datasets/fashion_mnist", 60_000, 10_000, "MIT"),
    "imagenet": _table("ILSVRC/imagenet-1k", 1_281_167, 50_000, "research only, gated") | {"options": CLASS_NAMES},
    # its validation images, ungated: TeMo's IN1k column
    "imagenet1k": _tars("imagenet1k", 0, 50_000, "research only") | {"options": CLASS_NAMES},
    "country211": _tars("country211", 31_650, 21_100),
    "dtd": _tars("vtab-dtd", 1_880, 1_880),
    "eurosat": _tars("vtab-eurosat", 16_200, 5_400),
    "gtsrb": _tars("gtsrb", 26_640, 12_630),
    "fgvc-aircraft": _tars("fgvc_aircraft", 6_667, 3_333),
    "imagenet-sketch": _tars("imagenet_sketch", 0, 50_889),
    "imagenet-a": _tars("imagenet-a", 0, 7_500),
    "imagenet-r": _tars("imagenet-r", 0, 30_000),
    "imagenet-o": _tars("imagenet-o", 0, 2_000),
    "flowers": _tars("vtab-flowers", 1_020, 6_149),
    "pets": _tars("vtab-pets", 2_944, 3_669),
    "pcam": _tars("vtab-pcam", 262_144, 32_768),
    "mnist": _tars("mnist", 60_000, 10_000),
    "food101": _tars("food101", 75_750, 25_250)}


def load(name, split, options):
    """One split of a set of SETS as Data; with options["streaming"] the train split of tars is a Stream."""
    folder = Path(options["data_dir"]).expanduser() if options.get("data_dir") else None
    with opening(f"{name}: {folder or SETS[name]['repo']} (a local copy: --data-dir, to evaluate on {name}=DIR)"):
        return (from_tars if "files" in SETS[name] else from_table)(name, split, folder, options)


def from_table(name, split, folder, options):
    """A split of a table with a column of images and one of classes."""
    source = folder or SETS[name]["repo"]
    tables = splits_of_tables(name, read_tables(source, options.get("revision")), options, source)
    word = "val" if name == "imagenet" and split == "test" else split  # the papers' test is its validation split
    data = tables[word]
    if name == "imagenet":  # the first of WordNet's synonyms
        if options.get("class_names") == "clip":
            raise UserError("--class-names clip: CLIP's names come with the tars of imagenet1k alone")
        data = _with_names(data, [n.split(",")[0].strip() for n in data.label_names])
    return dataclasses.replace(data, split=split, prompts=PROMPTS.get(name))


def from_tars(name, split, folder, options):
    """A split of a set of tars; classnames.txt and zeroshot_classification_templates.txt beside them name the classes
    and the prompts. cc12m has no val split: its last shard serves, and is not trained on."""
    repo, patterns = SETS[name]["repo"], SETS[name]["files"]
    streaming, revision = options.get("streaming") and split == "train", options.get("revision")
    if streaming and not folder:
        from huggingface_hub import HfApi, HfFileSystem
        commit = COMMITS[repo] = HfApi().dataset_info(repo, revision=revision).sha
        paths = HfFileSystem().glob(f"datasets/{repo}@{commit}/{patterns[split]}")
        tars = sorted(f"hf://{path}" for path in paths)
    else:
        if not folder:
            say(f"{name}: {repo} from the hub or its cache; training may have --streaming, without a download")
            folder = hub_folder(repo, [patterns[split], "*.txt"], revision)
        tars = sorted(map(str, folder.glob(patterns[split])))
    tars = [tar for tar in tars if split != "train" or Path(tar).name != patterns.get("val")]
    if not tars:
        raise UserError(f"{folder or repo}: no {patterns[split]} in it")
    if streaming:
        return Stream(name, tars, options, SETS[name]["splits"]["train"])
    data = index(name, split, tars, options)
    prompts = PROMPTS.get(name) or _lines(folder / "zeroshot_classification_templates.txt")
    data = dataclasses.replace(data, prompts=prompts)
    names = _lines(folder / "classnames.txt")
    if name == "imagenet1k":
        if options.get("class_names", "wordnet") == "wordnet":
            from torchvision.models import ResNet50_Weights
            names = ResNet50_Weights.IMAGENET1K_V1.meta["categories"]  # the first of WordNet's; TeMo's code
        elif not names:
            raise UserError(f"--class-names clip: no classnames.txt in {folder}")
    return _with_names(data, names) if names and data.labels is not None else data


def _lines(file):
    """The non-empty lines of a text file; None if the file is missing."""
    lines = file.read_text(encoding="utf8").splitlines() if file.is_file() else ()
    return [line.strip() for line in lines if line.strip()] or None


def _with_names(data, names):
    """Gives the numbers of the label column these names, which serve as captions where there are none."""
    import datasets
    if data.labels.max() >= len(names):
        raise UserError(f"{data.name}: a label is {data.labels.max()}, but there are {len(names)} class names")
    if not data.has_captions:
        data = with_column(data, "captions", [[names[y].replace("_", " ")] for y in data.labels])
    # CLIP's names for ImageNet have "missile" and "sunglasses" twice, but ClassLabel wants unique names: the second
    # gets a trailing blank, which tokenizers drop
    unlike = [name + " " * names[:k].count(name) for k, name in enumerate(names)]
    return with_column(data, "label", data.labels, datasets.ClassLabel(names=unlike))
