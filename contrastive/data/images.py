"""Image sets by name: from the hub, its cache (HF_HUB_OFFLINE=1), or a local copy in --data-dir. A
set consists of webdataset tars (tars.py) or of tables that `datasets` reads (user_data.py).

imagenet.json has CLIP's names of ImageNet's classes, prompts.json CLIP's prompts for ImageNet and
CIFAR, and those of SLIP's code."""

import dataclasses
from pathlib import Path

from contrastive.core.files import read_json
from contrastive.core.processes import UserError, opening, print_main
from contrastive.data.hub import hub_folder
from contrastive.data.registry import SETS
from contrastive.data.table import with_column
from contrastive.data.tars import index_tars
from contrastive.data.user_data import data_of_tables, read_source

# the columns of TeMo's Table 7, in order
TEMO_17 = ("cifar10", "cifar100", "country211", "dtd", "eurosat", "gtsrb", "fgvc-aircraft",
           "imagenet-sketch", "imagenet-a", "imagenet-r", "imagenet-o", "flowers", "pets", "pcam",
           "mnist", "food101", "imagenet1k")
COLUMN_NAMES = {"img": "image", "fine_label": "label"}  # columns of CIFAR on the hub -> ours
# mean and std with which the CC3M trainer evaluates; CIFAR-10's own std is .2470 .2435 .2616
CIFAR_STATS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))}


# ---- prompts for zero-shot classification ----
IMAGENETS = ("imagenet", "imagenet1k")
CIFARS = ("cifar10", "cifar100")
CLIP_NAMES_FILE = Path(__file__).with_name("imagenet.json")
PROMPTS_FILE = Path(__file__).with_name("prompts.json")


def prompts_of(name, options, file=None):
    """The prompts of a set, None if it has none.

    Args:
        file: of its own prompts, for a set that is neither CIFAR nor ImageNet.
    """
    prompts = read_json(PROMPTS_FILE)
    if name in CIFARS:
        return prompts["cifar"]
    if name in IMAGENETS and options.prompts == "slip":
        return prompts["slip"]
    if name in IMAGENETS:
        return prompts["imagenet"]
    if file is None:
        return None
    return read_lines(file)


# ---- opening a split ----
def load(name, split, options):
    """One split of a set as Data."""
    folder = None
    if options.data_dir:
        folder = Path(options.data_dir).expanduser()
    source = folder or SETS[name].repository
    with opening(f"{name}: {source} (a local copy: --data-dir, to evaluate on {name}=DIR)"):
        if SETS[name].tars:
            return from_tars(name, split, folder, options)
        return from_table(name, split, source, options)


def from_table(name, split, source, options):
    """A split of a table with a column of images and one of classes.

    Args:
        source: a folder (Path), or a repository on the hub.
    """
    tables, _, _ = read_source(str(source), options.revision or None)
    names = {}
    for column in set(COLUMN_NAMES) & set(next(iter(tables.values())).column_names):
        names[column] = COLUMN_NAMES[column]
    tables = {word: table.rename_columns(names) for word, table in tables.items()}
    splits = data_of_tables(name, tables, options, options.data_dir, is_published=True)
    prompts = prompts_of(name, options)
    if name != "imagenet":
        return dataclasses.replace(splits[split], split=split, prompts=prompts)
    if split == "test":  # the papers test on its validation split
        data = splits["val"]
    else:
        data = splits[split]
    data = with_class_names(data, imagenet_names(data.label_names, source, options))
    return dataclasses.replace(data, split=split, prompts=prompts)


def from_tars(name, split, folder, options):
    """A split of a set of tars. Beside them classnames.txt and
    zeroshot_classification_templates.txt name the classes and the prompts.

    Args:
        folder: a local copy; None = from the hub.
    """
    if folder is None:
        folder = download_tars(name, split, options)
    tars = tars_of_split(name, split, folder.glob(SETS[name].tars[split]), folder)
    data = index_tars(name, split, tars, options)
    prompts = prompts_of(name, options, folder / "zeroshot_classification_templates.txt")
    data = dataclasses.replace(data, prompts=prompts)
    names = published_class_names(name, folder, options)
    if names is None or data.labels is None:
        return data
    return with_class_names(data, names)


def download_tars(name, split, options):
    """The folder of the hub's cache with the tars of a split, after a download if they are not in
    it."""
    repository = SETS[name].repository
    print_main(f"{name}: {repository} from the hub or its cache")
    patterns = [SETS[name].tars[split], "*.txt"]
    return hub_folder(repository, patterns, options.revision or None)


def tars_of_split(name, split, tars, folder):
    """The sorted tars as text. cc12m has no val split: its last shard serves as val, and is not
    trained on. Raises: UserError if there are none."""
    patterns = SETS[name].tars
    paths = sorted(str(tar) for tar in tars)
    if split == "train":
        paths = [path for path in paths if Path(path).name != patterns.get("val")]
    if not paths:
        raise UserError(f"{folder}: no {patterns[split]} in it")
    return paths


# ---- names of classes ----
def published_class_names(name, folder, options):
    """Names of the classes of a set of tars, or None."""
    if name == "imagenet1k":
        return names_of_1000_classes(options)
    return read_lines(folder / "classnames.txt")


def names_of_1000_classes(options):
    """The names of ImageNet's classes in the order of their WordNet ids: the first of WordNet's
    synonyms, as in TeMo's code, or with --class-names clip those of CLIP, as in SLIP's."""
    if options.class_names == "clip":
        return read_json(CLIP_NAMES_FILE)["names"]
    from torchvision.models import ResNet50_Weights

    return ResNet50_Weights.IMAGENET1K_V1.meta["categories"]


def imagenet_names(classes, source, options):
    """Names of the classes of a table of ImageNet, in its order.

    Args:
        classes: as the table calls them: WordNet ids, which the usual folders have, or the hub's
            1,000 lists of synonyms. A part of the ids will do.
        source: of the table, for error messages.
    Raises: UserError for other classes, which would get wrong names.
    """
    from timm.data import ImageNetInfo

    names = names_of_1000_classes(options)
    ids = ImageNetInfo("imagenet-1k").label_names()                         # sorted
    if set(classes) <= set(ids):
        name_of_id = dict(zip(ids, names, strict=True))
        return [name_of_id[word] for word in classes]
    has_order_of_ids = classes[0].startswith("tench") and classes[-1].startswith("toilet tissue")
    if len(classes) == len(names) and has_order_of_ids:
        return names
    unknown = [word for word in classes if word not in ids]
    raise UserError(f"imagenet: {source} has {len(classes):,} classes, of which {unknown[0]} is no "
                    "WordNet id of ImageNet's 1,000 (such as n01440764), nor are they the hub's "
                    "1,000 names; give the folder itself as the data set, under its own names")


def read_lines(file):
    """The non-empty lines of a text file; None if there are none or no file."""
    if not file.is_file():
        return None
    lines = [line.strip() for line in file.read_text(encoding="utf8").splitlines()]
    return [line for line in lines if line] or None


def with_class_names(data, names):
    """Gives names to the numbers of the column label. They serve as captions if there are none."""
    import datasets

    if data.labels.max() >= len(names):
        raise UserError(f"{data.name}: a label is {data.labels.max()}, but there are {len(names)} "
                        "class names")
    if not data.has_captions:
        captions = [[names[label].replace("_", " ")] for label in data.labels]
        data = with_column(data, "captions", captions)
    # CLIP's names for ImageNet have "missile" and "sunglasses" twice, but ClassLabel wants unique
    # names: the second one gets a trailing blank, which tokenizers drop.
    unique = [name + " " * names[:k].count(name) for k, name in enumerate(names)]
    return with_column(data, "label", data.labels, datasets.ClassLabel(names=unique))
