"""Long-tail sets of labelled images, for methods without texts: a base set with an exponential tail cut into train."""

from pathlib import Path

import common

import numpy as np

_NO_COUNTS = {"train": None, "val": None, "test": None}  # they follow from the ratio
SETS = {  # base: the whole set; largest: images of its largest class once a tenth is set aside as val
    "cifar10-lt": {"base": "cifar10", "largest": 4500, "splits": _NO_COUNTS,
                   "licence": "research use, cite Krizhevsky 2009", "where": "as cifar10"},
    "cifar100-lt": {"base": "cifar100", "largest": 450, "splits": _NO_COUNTS,
                    "licence": "research use, cite Krizhevsky 2009", "where": "as cifar100"},
    "fashion-mnist-lt": {"base": "fashion-mnist", "largest": 5400, "splits": _NO_COUNTS,
                         "licence": "MIT", "where": "as fashion-mnist"},
    "imagenet100-lt": {"splits": _NO_COUNTS, "licence": "research only",
                       "where": "an ImageNet tree in --data-dir, and SDCLR's lists split/imagenet-100/*.txt"}}


def load(name, split, options):
    """One split of a set of this file, small images in memory.

    Options: imbalance_ratio (0), split_seed, index_file, test_file, as in labelled_sets, and those of the base set.
    Raises: UserError where a file or a flag is missing.
    """
    options = dict(options)
    ratio = options.pop("imbalance_ratio", 0.0) or 0.0
    return labelled_sets(name, ratio, **options)[split]


def labelled_sets(name, ratio=0.0, split_seed=0, index_file="", test_file="", **options):
    """{train, val, test} of labelled images, small ones in memory.

    cifar10-lt, cifar100-lt, fashion-mnist-lt: a tenth of each class is set aside as val (hence 4,500 and 450, not
    5,000 and 500), the tail is cut from the rest; an .npy index_file (SDCLR's splits) names the training images
    instead. imagenet100-lt: index_file and test_file list 'path class' below data_dir. emoji: classes with at least 8
    drawings, 2 for test, 1 for val. Anything else: its own splits, with a tail of `ratio` cut into train when
    ratio >= 1.
    split_seed draws which class is how large.   options: those of common.load_data.
    Raises: UserError for sets without labels.
    """
    splits = ("train", "val", "test")
    if name == "emoji":
        sets = {s: common.load_data("emoji", s, by_class=True) for s in splits}
    elif name == "imagenet100-lt":
        sets = _listed(name, index_file, test_file, options.get("data_dir"))
    elif name in SETS:
        sets = _with_tail(name, ratio, split_seed, index_file, options)
    else:
        sets = {s: common.load_data(name, s, **options) for s in splits}
    if any(s.labels is None or not s.label_names for s in sets.values()):
        raise common.UserError(f"--dataset {name}: no classes; --label-column names them, or use a folder of class "
                               f"folders")
    sets = {s: data if (data.labels >= 0).all() else data.select(np.flatnonzero(data.labels >= 0))
            for s, data in sets.items()}
    cut_already = name in SETS and name != "imagenet100-lt"
    if ratio >= 1 and not cut_already:
        sets["train"] = long_tail(sets["train"], ratio, split_seed)
    return {s: data.in_memory() for s, data in sets.items()}


def long_tail(data, ratio, seed, n_max=None):
    """A long-tail subset of Data that has labels, its rows in their old order.

    The classes come in an order drawn from the seed; their image counts are common.long_tail_counts, from n_max
    (default: the largest class) down to n_max / ratio, and at most what a class has.
    """
    rng, labels = np.random.default_rng([seed, 17]), np.asarray(data.labels)  # (M,)
    classes = np.unique(labels)
    order = rng.permutation(classes)
    counts = common.long_tail_counts(n_max or int(np.bincount(labels).max()), len(classes), ratio)
    rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(order, counts, strict=True)]
    return data.select(np.sort(np.concatenate(rows)))


def _with_tail(name, ratio, split_seed, index_file, options):
    """cifar10-lt and its kin: val is a tenth of each class, the tail is cut from the rest."""
    base = SETS[name]["base"]
    whole = common.load_data(base, "train", **options)
    labels, rng = np.asarray(whole.labels), np.random.default_rng(0)  # (M,)
    tenths = []
    for c in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == c))
        tenths.append(rows[:round(0.1 * len(rows))])
    val = np.sort(np.concatenate(tenths))
    if index_file:
        rows = np.load(index_file, allow_pickle=False)
        if rows.max() >= len(whole):
            raise common.UserError(f"--index-file {index_file}: index {rows.max()} is beyond the {len(whole):,} "
                                   f"training images of {base}")
        train = whole.select(rows, "train")
    else:
        rest = whole.select(np.setdiff1d(np.arange(len(whole)), val), "train")
        n_max = min(SETS[name]["largest"], int(0.9 * np.bincount(labels).max()))
        train = long_tail(rest, ratio or 1.0, split_seed, n_max)
    return {"train": train, "val": whole.select(val, "val"), "test": common.load_data(base, "test", **options)}


def _listed(name, index_file, test_file, root):
    """imagenet100-lt: train and test by SDCLR's lists, val held out of train."""
    if not (index_file and test_file and root):
        raise common.UserError(f"--dataset {name} needs --data-dir (an ImageNet tree), --index-file and --test-file "
                               f"(lines 'path class', as SDCLR's split/imagenet-100/*.txt)")
    files = {"train": index_file, "test": test_file}
    return common.hold_out({s: _list_file(name, s, file, root) for s, file in files.items()})


def _list_file(name, split, file, root):
    """Lines of 'relative/path class' (SDCLR's lists of ImageNet-100) as Data."""
    rows = [line.split() for line in Path(file).read_text(encoding="utf8").splitlines() if line.strip()]
    bad = next((r for r in rows if len(r) != 2 or not r[1].isdigit()), None)
    if bad:
        raise common.UserError(f"{file}: expected lines of 'path class', found {' '.join(bad)!r}")
    if not rows:
        raise common.UserError(f"{file}: expected lines of 'path class', found none")
    paths, labels = [r[0] for r in rows], [int(r[1]) for r in rows]
    names = [str(i) for i in range(max(labels) + 1)]
    table = common.make_table([[f"class {y}"] for y in labels], paths, classes={"label": names}, label=labels,
                              sources=[{"path": str(Path(root) / path)} for path in paths])
    return common.Data(name, split, table, has_captions=False)
