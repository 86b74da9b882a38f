"""Labelled images, for methods without texts: all of a set, or with train cut to a long tail."""

from pathlib import Path

from contrastive.core.processes import UserError, opening
from contrastive.data import data_options, load_data, splits_of
from contrastive.data.options import DataOptions
from contrastive.data.registry import find_data_set
from contrastive.data.table import Data, make_table, with_note

import numpy as np

DEFAULT_RATIO = 100.0  # ratio of a cut set, in programs without --imbalance-ratio
VAL_FRACTION = 0.1  # part of each class of the full set that is val
CLASS_ORDER_SEED = 17  # beside --split-seed
# order of CIFAR-10's training batches in its tar, and so in the hub's parquet
TAR_ORDER = (4, 3, 2, 5, 1)
IMAGENET100 = "imagenet100-lt"


def load(name, split, options):
    """One split of a set of this file."""
    splits = labelled_sets(name, options)
    if split in splits:
        return splits[split]
    hint = ""
    if split == "val":
        hint = "; --val-file names one"
    raise UserError(f"{name} has no {split} split{hint}")


def labelled_splits(args):
    """labelled_sets with the flags of a script."""
    return labelled_sets(args.dataset, data_options(args))


def labelled_sets(name, options=None, **flags):
    """{train, val, test} of labelled images; small images are in memory.

    cifar10-lt, cifar100-lt, fashion-mnist-lt: a tenth of each class is held out as val (hence 4,500
    and 450, not 5,000 and 500), and the rest is cut to a long tail. Instead, index_file and
    val_file may name the images of train and val: .npy files of indices into torchvision's
    training images (SDCLR's splits).
    imagenet100-lt: the files list 'path class' below data_dir; few_shot_file adds the split
    few-shot.
    Any other set has its own splits, with train cut to a long tail if imbalance_ratio >= 1.

    Args:
        options: DataOptions, or its fields by keyword. split_seed draws the order of the classes
            by size.
    Raises: UserError for sets without labels, and if the images of index_file are not a long tail
        of that ratio, or some of them are in val_file.
    """
    if options is None:
        options = DataOptions(**flags)
    check_files(name, options)
    full_set = full_set_of(name)
    if full_set and options.imbalance_ratio is None:
        options = options.replace(imbalance_ratio=DEFAULT_RATIO)
    if name == IMAGENET100:
        splits = open_listed(options)
    elif full_set:
        splits = cut_full_set(full_set, options)
    else:
        splits = open_all(name, options)

    result = {}
    for split, data in splits.items():
        if not data.label_names:
            raise UserError(f"--dataset {name}: no classes; --label-column names them, or use a "
                            "folder of class folders")
        result[split] = data.select(np.flatnonzero(data.labels >= 0))
    ratio = options.imbalance_ratio or 0.0
    if ratio >= 1 and not full_set:
        result["train"] = long_tail(result["train"], ratio, options.split_seed)
    return {split: data.in_memory() for split, data in result.items()}


def full_set_of(name):
    """The data set from which a long tail is cut; "" if `name` is no such set."""
    data_set = find_data_set(name)
    if data_set is None:
        return ""
    return data_set.full_set


def check_files(name, options):
    """Raises UserError for a list of images that the data set does not use."""
    kinds = ()
    if name == IMAGENET100:
        kinds = ("index", "val", "test", "few-shot")
    elif full_set_of(name):
        kinds = ("index", "val")
    for kind, file in list_files(options).items():
        if kind not in kinds:
            raise UserError(f"--{kind}-file {file}: --dataset {name} does not use it")


def list_files(options):
    """{kind: file} of the lists of images that are given."""
    files = {"index": options.index_file, "val": options.val_file, "test": options.test_file,
             "few-shot": options.few_shot_file}
    return {kind: file for kind, file in files.items() if file}


def open_all(name, options):
    """{split: Data} of the splits that a data set has."""
    options = options.replace(by_class=True)
    splits = {}
    existing = splits_of(name, options.holdout_fraction)
    for split in ("train", "val", "test"):
        if split in existing:
            splits[split] = load_data(name, split, options)
    return splits


# ---- cutting a tail ----
def long_tail_counts(n_max, classes, ratio):
    """Images per class of an exponential tail: n_max for the first to n_max / ratio for the last.

    int(n_max * ratio ** (-c / (classes - 1))) for class c.
    """
    steps = max(1, classes - 1)
    return [int(n_max * ratio ** (-c / steps)) for c in range(classes)]


def long_tail(data, ratio, seed, n_max=None):
    """A long-tail subset of labelled Data; the rows keep their order.

    Args:
        seed: draws the order of the classes by size, and the images that stay.
        n_max: images of the first class; None = those of the largest class. A class with fewer
            images than its count keeps all of them.
    """
    rng = np.random.default_rng([seed, CLASS_ORDER_SEED])
    labels = np.asarray(data.labels)                                        # (M,)
    classes = np.unique(labels)
    order = rng.permutation(classes)
    counts = long_tail_counts(n_max or int(np.bincount(labels).max()), len(classes), ratio)
    if 0 in counts:
        raise UserError(f"--imbalance-ratio {ratio:g} leaves {counts.count(0)} of {len(classes)} "
                        "classes without an image; the largest class has "
                        f"{max(counts)}: give that or less")
    rows = []
    sizes = []
    for label, count in zip(order, counts, strict=True):
        rows_of_class = rng.permutation(np.flatnonzero(labels == label))[:count]
        rows.append(rows_of_class)
        sizes.append(len(rows_of_class))
    tail = data.select(np.sort(np.concatenate(rows)))
    if sizes == counts:
        return tail
    largest = max(sizes)
    smallest = min(sizes)
    return with_note(
        tail, f"WARNING: some classes have fewer images than --imbalance-ratio {ratio:g} takes; "
              f"the ratio is {largest / smallest:.3g}, {largest} to {smallest} images")


# ---- cifar10-lt and the like ----
def cut_full_set(full_set, options):
    """{train, val, test}: val is a tenth of each class, none of it in index_file, and train a long
    tail of all other images."""
    options = options.replace(holdout_fraction=0.0)
    data = load_data(full_set, "train", options)
    labels = np.asarray(data.labels)                                        # (M,)
    index_rows = rows_of_file(full_set, "index", options.index_file, len(data))
    val_rows = rows_of_file(full_set, "val", options.val_file, len(data))
    if not options.val_file:
        val_rows = draw_val(labels, index_rows)
    refuse_trained(options, "val", index_rows, val_rows)
    ratio = options.imbalance_ratio or 1.0
    if options.index_file:
        check_tail(labels[index_rows], len(data.label_names), ratio, options.index_file)
        train = data.select(index_rows, "train")
    else:
        train_rows = np.setdiff1d(np.arange(len(data)), val_rows)
        n_max = int((1 - VAL_FRACTION) * np.bincount(labels).max())
        train = long_tail(data.select(train_rows, "train"), ratio, options.split_seed, n_max)
    return {
        "train": train,
        "val": data.select(np.sort(val_rows), "val"),
        "test": load_data(full_set, "test", options)}


def draw_val(labels, index_rows):
    """Row numbers of a tenth of each class, without those in index_rows."""
    rng = np.random.default_rng(0)
    rows = []
    for label in np.unique(labels):
        rows_of_class = np.flatnonzero(labels == label)
        count = round(VAL_FRACTION * len(rows_of_class))
        rows.append(rng.permutation(np.setdiff1d(rows_of_class, index_rows))[:count])
    return np.concatenate(rows)


def check_tail(labels, num_classes, ratio, file):
    """Raises UserError if the images of index_file are not a long tail of this ratio."""
    sizes = np.sort(np.bincount(labels, minlength=num_classes))[::-1]       # largest first
    expected = long_tail_counts(int(sizes[0]), len(sizes), ratio)
    tolerance = 0
    if ratio > 1:
        tolerance = 1  # a tail may be rounded otherwise
    if np.abs(sizes - expected).max() > tolerance:
        first_sizes = ", ".join(str(size) for size in sizes[:10])
        raise UserError(f"--index-file {file}: the images it names are not a long tail of "
                        f"--imbalance-ratio {ratio:g}: {first_sizes}, ... per class; are its "
                        "indices torchvision's, and the images in the order of the hub?")


def rows_of_file(full_set, kind, file, num_rows):
    """The rows of the hub's parquet that an .npy file of indices into torchvision's training images
    names; none without a file. torchvision reads CIFAR-10's five batches in numerical order; the
    parquet has them in the order of the tar."""
    rows = np.arange(num_rows)
    if not file:
        return rows[:0]
    with opening(f"--{kind}-file {file}"):
        if full_set == "cifar10":
            rows = rows.reshape(len(TAR_ORDER), -1)[np.argsort(TAR_ORDER)].ravel()
        return rows[np.load(file, allow_pickle=False)]


# ---- imagenet100-lt ----
def open_listed(options):
    """The splits of SDCLR's lists, lines of 'path class'; nothing is held out of train."""
    if not (options.index_file and options.test_file and options.data_dir):
        raise UserError(
            f"--dataset {IMAGENET100} needs --data-dir (an ImageNet tree), --index-file and "
            "--test-file (lines 'path class', as SDCLR's split/imagenet-100/*.txt)")
    splits = {}
    for kind, file in list_files(options).items():
        split = kind
        if kind == "index":
            split = "train"
        with opening(f"--{kind}-file {file}"):
            splits[split] = data_of_list(split, file, options.data_dir)
    for kind in splits.keys() & {"val", "test"}:
        refuse_trained(options, kind, splits["train"].keys(), splits[kind].keys())
    return splits


def refuse_trained(options, kind, trained, images):
    """Raises UserError if images of the list `kind`, val or test, are in the index file, too."""
    num_shared = len(set(trained).intersection(images))
    if num_shared:
        raise UserError(f"--{kind}-file {list_files(options)[kind]}: {num_shared:,} of its images "
                        f"are in --index-file {options.index_file}, and would be trained on; give "
                        "files that share none")


def data_of_list(split, file, folder):
    """Data of the images that a text file lists, with paths below a folder."""
    paths = []
    labels = []
    for line in Path(file).read_text(encoding="utf8").splitlines():
        path, label = line.split()
        paths.append(path)
        labels.append(int(label))
    table = make_table(
        captions=[[f"class {label}"] for label in labels],
        keys=paths,
        sources=[str(Path(folder) / path) for path in paths],
        classes={"label": [str(number) for number in range(max(labels) + 1)]},
        label=labels)
    return Data(IMAGENET100, split, table, has_captions=False)
