"""Long-tail sets of labelled images, for methods without texts: a base set whose train split is cut to a long tail."""

from pathlib import Path

from contrastive.data import data_options, load_data, splits_of
from contrastive.data.table import Data, make_table, with_note
from contrastive.engine.processes import UserError, opening

import numpy as np

_NO_COUNTS = {"train": None, "val": None, "test": None}  # they follow from the ratio
SETS = {f"{base}-lt": {"base": base, "splits": _NO_COUNTS, "licence": licence} for base, licence in (
    ("cifar10", "research use, cite Krizhevsky 2009"), ("cifar100", "research use, cite Krizhevsky 2009"),
    ("fashion-mnist", "MIT"))} | {"imagenet100-lt": {"splits": _NO_COUNTS, "licence": "research only"}}
USUAL_RATIO = 100.0  # of the sets with a base, in programs without --imbalance-ratio
TAR_ORDER = (4, 3, 2, 5, 1)  # the order of CIFAR-10's training batches in its tar, and so in the hub's parquet


def load(name, split, options):
    """One split of a set of this file. options: imbalance_ratio, those of labelled_sets, and the base set's own."""
    ratio = options.get("imbalance_ratio", USUAL_RATIO if "base" in SETS[name] else 0.0)
    sets = labelled_sets(name, ratio, **{k: v for k, v in options.items() if k != "imbalance_ratio"})
    if split not in sets:
        raise UserError(f"{name} has no {split} split" + "; --val-file names one" * (split == "val"))
    return sets[split]


def labelled_splits(args):
    """labelled_sets with the flags of a script."""
    files = {k: getattr(args, k, "") for k in ("index_file", "test_file", "val_file", "few_shot_file")}
    return labelled_sets(args.dataset, args.imbalance_ratio, args.split_seed, **files, **data_options(args))


def labelled_sets(name, ratio=0.0, split_seed=0, index_file="", test_file="", val_file="", few_shot_file="", **options):
    """{train, val, test} of labelled images; small images are in memory. options: those of load_data.

    cifar10-lt, cifar100-lt, fashion-mnist-lt: a tenth of each class is held out as val (hence 4,500 and 450, not
    5,000 and 500), and the rest is cut to a long tail. Instead, index_file and val_file may name the images of train
    and val: .npy files of indices into torchvision's training images (SDCLR's splits). imagenet100-lt: the files list
    'path class' below data_dir; few_shot_file adds the split few-shot. Any other set has its own splits, with train cut
    to a long tail if ratio >= 1. The classes' order of size is drawn from split_seed.
    Raises: UserError for sets without labels, and if the images of index_file are not a long tail of that ratio."""
    base, files = SETS.get(name, {}).get("base"), {"index": index_file, "val": val_file, "test": test_file,
                                                   "few-shot": few_shot_file}
    used = ("index", "val") if base else tuple(files) if name in SETS else ()
    for kind in [kind for kind, file in files.items() if file and kind not in used]:
        raise UserError(f"--{kind}-file {files[kind]}: --dataset {name} does not use it")
    if name == "imagenet100-lt":
        sets = _listed(name, files, options)
    elif base:
        sets = _with_tail(base, ratio, split_seed, files, options)
    else:
        more, there = {"by_class": True} if name == "emoji" else {}, splits_of(name, options.get("hold_out_val"))
        sets = {s: load_data(name, s, **options, **more) for s in ("train", "val", "test") if s in there}
    if any(not s.label_names for s in sets.values()):
        raise UserError(f"--dataset {name}: no classes; --label-column names them, or use a folder of class folders")
    sets = {s: data.select(np.flatnonzero(data.labels >= 0)) for s, data in sets.items()}
    if ratio >= 1 and not base:
        sets["train"] = long_tail(sets["train"], ratio, split_seed)
    return {s: data.in_memory() for s, data in sets.items()}


def long_tail(data, ratio, seed, n_max=None):
    """A long-tail subset of labelled Data; the rows keep their order. The seed draws the order of the classes by size,
    of long_tail_counts images, from n_max (default: the largest class), but at most what the class has."""
    rng, labels = np.random.default_rng([seed, 17]), np.asarray(data.labels)  # (M,)
    classes = np.unique(labels)
    order = rng.permutation(classes)
    counts = long_tail_counts(n_max or int(np.bincount(labels).max()), len(classes), ratio)
    if not all(counts):
        raise UserError(f"--imbalance-ratio {ratio:g} leaves {counts.count(0)} of {len(classes)} classes without an "
                        f"image; the largest class has {max(counts)}: give that or less")
    rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(order, counts, strict=True)]
    tail, have = data.select(np.sort(np.concatenate(rows))), sorted(map(len, rows))
    if all(len(part) == n for part, n in zip(rows, counts, strict=True)):
        return tail
    return with_note(tail, f"WARNING: some classes have fewer images than --imbalance-ratio {ratio:g} takes; the ratio "
                           f"is {have[-1] / have[0]:.3g}, {have[-1]} to {have[0]} images")


def _with_tail(base, ratio, split_seed, files, options):
    """cifar10-lt and the like: val is a tenth of each class, none of it in index_file; train is cut from the rest."""
    options = {k: v for k, v in options.items() if k != "hold_out_val"}
    whole, rng = load_data(base, "train", **options), np.random.default_rng(0)
    labels = np.asarray(whole.labels)  # (M,)
    listed, val = (_rows(base, kind, files[kind], len(whole)) for kind in ("index", "val"))
    if not files["val"]:
        rows = [np.flatnonzero(labels == c) for c in np.unique(labels)]  # of each class
        val = np.concatenate([rng.permutation(np.setdiff1d(of, listed))[:round(0.1 * len(of))] for of in rows])
    if files["index"]:
        sizes = np.sort(np.bincount(labels[listed], minlength=len(whole.label_names)))[::-1]  # largest first
        expected = long_tail_counts(int(sizes[0]), len(sizes), ratio or 1.0)
        if np.abs(sizes - expected).max() > (ratio > 1):  # a tail to one image, equal classes exactly
            raise UserError(f"--index-file {files['index']}: the images it names are not a long tail of "
                            f"--imbalance-ratio {ratio or 1:g}: {', '.join(map(str, sizes[:10]))}, ... per class; are "
                            "its indices torchvision's, and the images in the order of the hub?")
        train = whole.select(listed, "train")
    else:
        rest = whole.select(np.setdiff1d(np.arange(len(whole)), val), "train")
        train = long_tail(rest, ratio or 1.0, split_seed, int(0.9 * np.bincount(labels).max()))
    return {"train": train, "val": whole.select(np.sort(val), "val"), "test": load_data(base, "test", **options)}


def _rows(base, kind, file, n):
    """The rows of the hub's parquet that an .npy file of indices into torchvision's n training images names; "": none.
    torchvision reads CIFAR-10's five batches in numerical order; the parquet has them in the order of the tar."""
    place = np.arange(n)
    if not file:
        return place[:0]
    with opening(f"--{kind}-file {file}"):
        if base == "cifar10":
            place = place.reshape(len(TAR_ORDER), -1)[np.argsort(TAR_ORDER)].ravel()
        return place[np.load(file, allow_pickle=False)]


def _listed(name, files, options):
    """imagenet100-lt: the splits of SDCLR's lists, lines of 'relative/path class'; nothing is held out of train."""
    if not (files["index"] and files["test"] and options.get("data_dir")):
        raise UserError(f"--dataset {name} needs --data-dir (an ImageNet tree), --index-file and --test-file "
                        "(lines 'path class', as SDCLR's split/imagenet-100/*.txt)")
    sets = {}
    for kind, file in [(kind, file) for kind, file in files.items() if file]:
        with opening(f"--{kind}-file {file}"):
            rows = [line.split() for line in Path(file).read_text(encoding="utf8").splitlines()]
            paths, labels = [path for path, _ in rows], [int(y) for _, y in rows]
        names, split = [str(y) for y in range(max(labels) + 1)], "train" if kind == "index" else kind
        table = make_table([[f"class {y}"] for y in labels], paths, classes={"label": names}, label=labels,
                           sources=[str(Path(options["data_dir"]) / path) for path in paths])
        sets[split] = Data(name, split, table, has_captions=False)
    return sets


def long_tail_counts(n_max, classes, ratio):
    """Images per class of an exponential tail, int(n_max * ratio ** (-c / (classes - 1))): n_max to n_max / ratio."""
    return [int(n_max * ratio ** (-c / max(1, classes - 1))) for c in range(classes)]
