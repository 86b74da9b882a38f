"""Opens the data of a run: the training set, the evaluation sets, and mama.py's meta-data, as the flags say."""

import collections
import dataclasses
import functools
import itertools
import math
import os
from pathlib import Path

import common
from common import IN_MEMORY, EmptySplit, find_set, load_data, options_of, splits_of

import numpy as np
import torch

from contrastive.engine.base import UserError, join_notes, say
from contrastive.engine.clusters import SentenceEncoder, k_means
from contrastive.engine.verify import leave_out
from contrastive.readers import text
from contrastive.readers.guards import say_part

CLUSTERS = 50  # of captions; they take the place of classes to balance meta-data
FEW_STEPS = 200  # with fewer, small towers from scratch have learnt next to nothing
CLUSTERED = 20_000  # rows that are clustered: the first in the order of the hash of their names
# The flags of a script that load_data takes as options.
DATA_FLAGS = ("data_dir", "video_dir", "image_column", "caption_column", "label_column", "frames", "frame_sampling",
              "frame_cache", "feature_dir", "join_captions", "unfold_captions", "image_size", "streaming",
              "max_bad_fraction", "max_pixels", "hold_out_val", "extra_captions", "region_dir", "regions",
              "caption_relevancy")


def repeated_captions(data):
    """The banner's words on examples that share a caption, which are false negatives in a batch; "" if class names
    serve as captions, or there are too many rows to check."""
    if data.streamed or not data.has_captions or len(data) > IN_MEMORY:
        return ""
    captions = [set(data.captions(i)) for i in range(len(data))]
    examples = collections.Counter(itertools.chain.from_iterable(captions))
    shared = sum(any(examples[c] > 1 for c in some) for some in captions)
    return f"{shared:,} share a caption with another: false negatives of each other in a batch" if shared else ""


def data_options(args, **more):
    """The data flags that are set, including the data set's own flags, as options of load_data."""
    own = {"max_bad_fraction", *options_of(args.dataset)}                  # 0 and False are values of these
    flags = {k: getattr(args, k, None) for k in (*DATA_FLAGS, *own)}
    return {k: v for k, v in flags.items() if v or k in own and v is not None} | more


def other_options(flags, name, folder=""):
    """Options of load_data for data other than the training set of a run with these flags {name: value}."""
    same = ("frames", "frame_sampling", "frame_cache", "image_size", "max_pixels", "hold_out_val", "max_bad_fraction",
            "regions", *options_of(name))
    joins = () if find_set(name) else ("join_captions",)  # a set by name has its own protocol
    columns = {k: flags[k] for k in ("image_column", "caption_column", "label_column") if flags.get(k)}
    places = {"data_dir": folder, "video_dir": folder or flags.get("video_dir", "")}
    return places | {k: flags.get(k) for k in (*same, *joins)} | {"columns_of_training": columns}


def named_as(name, dataset):
    """`dataset`, a run's name of its data, if `name` is the same file or folder in other words (photos/, ./photos)."""
    if not name or not dataset or find_set(dataset):  # a folder may have the name of a set
        return name
    both = [Path(word).expanduser() for word in (name, dataset)]
    return dataset if all(path.exists() for path in both) and both[0].samefile(both[1]) else name


def open_data(args):
    """(training split, {name: {val, test}}) as the flags say. It runs before any process group, so errors come fast.

    Raises: UserError if --eval-every would find no val split to evaluate."""
    train, evals = load_data(args.dataset, "train", **data_options(args)), evaluation_sets(args)
    without = ", ".join(name for name, splits in evals.items() if "val" not in splits)
    if args.eval_every and not any("val" in splits for splits in evals.values()):
        raise UserError(f"--eval-every {args.eval_every}: {without} without a val split, which it would evaluate; "
                        "--hold-out-val takes one out of the training images of a set by name, --eval-every 0 "
                        "evaluates only at the end")
    for word in args.extra_pairs:
        train = add_pairs(train, word, args, evals)
    if args.eval_every and without:
        say(f"WARNING: --eval-every: {without} without a val split (see --hold-out-val): read once, at the end")
    return train, evals


def evaluation_sets(args):
    """{name: {val, test}} of --eval-datasets (the training set's own when empty), each NAME or NAME=DIR."""
    evals = {}
    for word in dict.fromkeys(args.eval_datasets or [args.dataset]):
        name, _, folder = (word, "", "") if Path(word).exists() else word.partition("=")
        if not name:
            raise UserError(f"--eval-datasets {word}: expected NAME or NAME=DIR")
        name = named_as(name, args.dataset)
        if name in evals:
            raise UserError(f"--eval-datasets {name}: named with two folders; leave one of them out")
        options = other_options(vars(args), name, folder)
        if name == args.dataset:
            options = data_options(args, **({"data_dir": folder} if folder else {}))
        evals[name] = {}
        for split in (s for s in ("val", "test") if s in splits_of(name, args.hold_out_val)):
            try:
                evals[name][split] = load_data(name, split, **options)
                say_part(evals[name][split], args.dataset)
            except EmptySplit as error:
                say(f"WARNING: {error}; there is no {split} evaluation")
        if not evals[name] and args.eval_datasets:
            raise UserError(f"--eval-datasets {name}: it has neither a val nor a test split")
    return evals


def add_pairs(data, word, args, evals):
    """The training data followed by those of another set (--extra-pairs). Rows of clips that the evaluation reads are
    left out, and so are rows held out as that set's val or test. In a set of questions the added rows have none (None).

    Args: word: NAME or NAME=DIR of --extra-pairs, DIR with the annotations and the files of the set.
        args: the flags of the run.   evals: {name: {val, test}}, the evaluation sets.
    Raises: UserError if the two sets cannot be joined in one table."""
    import datasets
    name, _, folder = (word, "", "") if Path(word).exists() else word.partition("=")
    same = ("frames", "frame_sampling", "frame_cache", "image_size", "max_pixels", "max_bad_fraction",
            "unfold_captions")
    if not name:
        raise UserError(f"--extra-pairs {word}: expected NAME or NAME=DIR")
    options = {k: v for k in same if (v := getattr(args, k, None)) is not None}
    options["join_captions"] = getattr(args, "join_captions", False) and not find_set(name)
    options["video_dir"] = folder or ("" if Path(name).is_dir() else args.video_dir)
    try:
        more = common.load_data(name, "train", data_dir=folder, **options)
    except UserError as error:
        raise UserError(f"--extra-pairs {word}: {str(error).replace(f'--dataset {name}: ', '')}") from error
    for part in (data, more):
        features = getattr(args, "feature_dir", None) or getattr(args, "region_dir", "")
        if part.streamed or part.sources is None or features:
            raise UserError(f"--extra-pairs {word}: can only join files with files; {part.name} is a stream, rendered "
                            "in memory, or read as features")
        if not part.has_captions and (part is more or part.column("question") is None):
            instead = "class names" if part.column("question") is None else "questions"
            raise UserError(f"--extra-pairs {word}: {part.name} has {instead} instead of captions")
    if data.sentences is not None or (data.clip is None) != (more.clip is None):
        raise UserError(f"--extra-pairs {word}: {more.name} cannot be joined to {data.name}, which holds "
                        + ("sentences with relevancies" if data.sentences is not None else
                           "images and not videos" if data.clip is None else "videos and not images"))
    if (data.shards is None) != (more.shards is None):
        raise UserError(f"--extra-pairs {word}: tars are read shard by shard; {data.name} and {more.name} must both "
                        "be tars, or neither")
    read = {n for splits in evals.values() for part in splits.values() if part.sources is not None
            for n in file_names(part)}
    kept = np.flatnonzero([n not in read for n in file_names(more)])
    dropped = len(more) - len(kept)
    if not len(kept):
        raise UserError(f"--extra-pairs {word}: all of its {len(more):,} rows belong to clips of the evaluation")
    more = more.select(kept) if dropped else more
    again = int(np.isin(places(more), places(data)).sum())
    if again == len(more):
        raise UserError(f"--extra-pairs {word}: all of its {again:,} rows belong to clips that are trained on already; "
                        "--extra-captions adds captions to them")
    names = ["source", "captions", "key"]
    asked = [c for c in ("question", "answer", "choices", "question_type") if c in data.table.column_names]
    lost = sorted({*data.table.column_names} - {*asked, *names} | {*more.table.column_names} - {*names})
    parts = [data.table.select_columns(names + asked), more.table.select_columns(names)]
    kinds = parts[0].features | parts[1].features
    kinds["source"] = parts[0].features["source"] | parts[1].features["source"]
    kinds = [datasets.Features({c: kinds[c] for c in part.features}) for part in parts]
    parts = [part if part.features == kind else part.cast(kind) for part, kind in zip(parts, kinds)]
    table = datasets.concatenate_datasets(parts)
    which = None if data.which is None else np.concatenate([data.which, more.which])
    shards = None if data.shards is None else np.concatenate([data.shards, more.shards + data.shards.max() + 1])
    note = f"{len(more):,} more pairs from {more.name}, {len(more) / len(table):.0%} of an epoch"
    note += f" ({more.note})" if more.note else ""
    note += f", {dropped:,} of clips that the evaluation reads left out" if dropped else ""
    note += f", {again:,} of clips that are trained on already, which a batch may hold twice" if again else ""
    note += f"; only captions are joined, without {', '.join(lost)}" if lost else ""
    note += "; they have no questions" if asked else ""
    return dataclasses.replace(data, table=table, rows=None, which=which, shards=shards, own=data.own or data,
                               note=join_notes(data.note, note))


def places(data):
    """(M,) a hash of what each row reads (file, place in a tar, window); of an image inside the table, of its row."""
    real = functools.lru_cache(os.path.realpath)

    def number(i, source):
        if source.get("bytes") or not source.get("path"):
            return hash((id(data), i))
        return hash((real(source["path"]), source.get("offset"), source.get("start"), source.get("end")))
    rows = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    return np.fromiter(itertools.starmap(number, enumerate(rows)), np.int64, len(data))


def file_names(data):
    """The stem of each row's file name, by which the same clip is found in two sets."""
    stem = functools.lru_cache(lambda path: Path(path).stem)
    places = (source for batch in data.sources.iter(10_000) for source in batch["source"])
    for key, source in zip(data.keys(), places, strict=True):
        yield stem(key if source.get("size") is not None or not source.get("path") else source["path"])


def largest_batch(data):
    """The largest global batch that a data set can fill and the processes can divide; 0 if there is none."""
    processes = int(os.environ.get("WORLD_SIZE", 1))  # there is no process group yet
    fits = data.examples // processes * processes
    return fits if fits > 1 else 0


def fit_to(args, data):
    """Adapts flags to the data: --fit-batch lowers --batch-size to the number of examples, and --min-steps raises
    --epochs, and the warm-up with them. Raises: UserError if the batch is larger than the data.

    Returns: {flag: words for the banner} of the changed flags."""
    said, fits, epochs = {}, largest_batch(data), args.epochs
    if args.fit_batch and fits and data.examples < args.batch_size:
        said["--batch-size"] = (f"--batch-size {args.batch_size} -> {fits}: the training set has {data.examples} "
                                "examples")
        args.batch_size = fits
    if data.examples < args.batch_size:
        hint = f"; --batch-size {fits} fits, and --fit-batch sets it by itself" if fits else "; give more data"
        raise UserError(f"--batch-size {args.batch_size}: larger than the {data.examples} training examples of "
                        f"{data.name}{hint}")
    per_epoch = data.examples // args.batch_size
    if epochs * per_epoch < args.min_steps and not args.max_steps:
        args.epochs = float(math.ceil(args.min_steps / per_epoch))
        args.warmup_epochs *= args.epochs / epochs
        said["--epochs"] = f"; --epochs {epochs:g} -> {args.epochs:g} for --min-steps {args.min_steps}"
    return said


def few_steps(args, total, per_epoch):
    """The banner's warning if the epochs make only a few steps; "" otherwise."""
    if args.max_steps or total >= FEW_STEPS:
        return ""
    return f"; WARNING: too few to learn from; --epochs {math.ceil(500 / per_epoch)} makes 500"


# ------------------------------------------------- meta-data of mama.py ----------------------------------------------
# a few clean, balanced examples: from train, from val (which are then not evaluated on), or those that a file names
def meta_data(train, evals, dataset, wanted, size, batch, task="retrieval", balance="auto"):
    """(Data of the meta-data, the evaluation sets without them).

    Args: wanted: train, val or a file of names; size: number of examples from train or val; batch: examples per step;
        balance: over classes if there are any (auto), over classes or refuse (classes), over caption clusters, or none.
    Raises: UserError if there are too few, or the data are a stream."""
    source = train if wanted != "val" else evals.get(dataset, {}).get("val")
    if source is None or source.streamed:
        raise UserError(f"--meta-set {wanted}: {dataset} has no such split to take rows from"
                        + (" (a stream); use --meta-set val" if source is not None else ""))
    own = source.own or source                                             # without --extra-pairs, whose rows come last
    if wanted in ("train", "val"):
        columns = {"qa-open": ["answer"], "qa-choice": ["question_type"]}.get(task, ["label", "verb"])
        if balance == "classes" and all(own.column(c) is None for c in columns):
            raise UserError(f"--meta-balance classes: {own.name} has no column {' or '.join(columns)}; --meta-balance "
                            "captions needs none")
        rows, how = balanced_rows(own, size, columns if balance in ("auto", "classes") else (), balance == "captions")
        how += "" if balance != "auto" or how.startswith("balanced") else "; --meta-balance captions would balance them"
    else:
        rows, how = named_rows(own, wanted, evals.get(dataset, {}))
    if len(rows) < batch:
        raise UserError(f"--meta-set {wanted}: {len(rows)} examples, fewer than --meta-batch-size {batch}")
    note = f"{len(rows)} of {source.split}, {how}; {batch} per step"
    if wanted == "val":
        rest = np.setdiff1d(np.arange(len(source)), rows)
        if not len(rest):
            raise UserError(f"--meta-size {size}: val has {len(source)} examples, so none would be left "
                            "to evaluate on")
        evals = evals | {dataset: evals[dataset] | {"val": source.select(rest)}}
        note += "; they are left out of evaluation, and only --weighting meta and l2rw learn from them"
    meta = source.select(rows)
    meta.note = note
    return meta, evals


def verified(meta, unreadable, args):
    """The meta-data without training images that --verify-images could not read, {key: reason} or None.

    Raises: UserError if too few are left for a step."""
    meta = leave_out(meta, unreadable) if args.meta_set != "val" else meta
    if len(meta) < args.meta_batch_size:
        raise UserError(f"--meta-set {args.meta_set}: {len(meta)} examples can be read, fewer than --meta-batch-size "
                        f"{args.meta_batch_size}")
    return meta


def balanced_rows(data, size, columns=("label", "verb"), captions=False):
    """(size,) rows in the order of a hash of their names, taking classes (or caption clusters) in turn and leaving out
    rows known to be noisy; of unfolded rows, all names come before one comes again; and a description for the note."""
    place = np.array([common.key_hash(f"meta {key}") for key in data.keys()])                            # (M,)
    noisy = data.column("noisy")
    rows = np.argsort(place, kind="stable")
    rows = rows if noisy is None else rows[~np.asarray(noisy)[rows]]
    rows = rows[np.argsort(turns(place[rows].tolist()), kind="stable")]
    column, kinds = next((c for c in columns if data.column(c) is not None), None), None
    if column:
        kinds, of = np.asarray(data.column(column))[rows].tolist(), column
    elif captions:
        rows = rows[:max(size, CLUSTERED)]
        kinds = caption_clusters(data, rows)
        of = f"{len({*kinds})} clusters of captions"
    if kinds is not None:
        turn = np.where(np.array(kinds) == -1, len(rows), turns(kinds))    # rows without a class are taken last
        rows = rows[np.argsort(turn, kind="stable")]
    clean = ", known to be clean" if noisy is not None else ", not known to be clean: captions as the set has them"
    return np.sort(rows[:size]), ("at random" if kinds is None else f"balanced over {of}") + clean


def turns(kinds):
    """How many of its kind come before each: [a, b, a] -> [0, 0, 1]."""
    seen, out = collections.Counter(), []
    for kind in kinds:
        out.append(seen[kind])
        seen[kind] += 1
    return out


def caption_clusters(data, rows):
    """[cluster number of each row]: K-Means on tf-idf, with all captions of a row as one text (mmts.py clusters single
    captions). The result is the same on every process and for every --seed.

    Raises: UserError if no caption has a word."""
    texts = [" ".join(data.captions(i)) for i in rows]
    try:
        encoder = SentenceEncoder("tf-idf", torch.device("cpu"), texts)
    except UserError as error:
        why = str(error).replace("--cluster-encoder tf-idf", "--meta-balance captions")
        raise UserError(why.replace("take a model", "take --meta-balance none")) from error
    return k_means(encoder(texts).numpy(), min(CLUSTERS, len({*texts})), seed=0).tolist()


def named_rows(data, file, held=()):
    """(rows of the names (keys) in a file with one name per line, words for the note).

    held: {split: Data} of the evaluation: names in it are left out. Raises: UserError for any other name."""
    lines = text.read_lines(file)
    names = dict.fromkeys(lines)
    if len(names) < len(lines):
        say(f"--meta-set {file}: {len(lines) - len(names):,} of its {len(lines):,} lines repeat a name")
    where = {}  # a name has several rows with --unfold-captions
    for i, key in enumerate(data.keys()):
        where.setdefault(key, []).append(i)
    names = dict.fromkeys(n if n in where else os.path.normpath(n) for n in names)  # ./a.png is a.png
    missing = [n for n in names if n not in where]
    outside = {key for split in held for key in held[split].keys()} if missing else ()
    kept_out = [n for n in missing if n in outside]
    missing = [n for n in missing if n not in outside]
    if missing:
        raise UserError(f"--meta-set {file}: {len(missing)} of its {len(names)} names are not in train, first "
                        f"{missing[0][:100]!r}; a name of train: {next(iter(where))!r}")
    rows = np.sort([i for n in names if n in where for i in where[n]]).astype(np.int64)
    return rows, "by name" + (f"; {len(kept_out)} held out for val or test are left out" if kept_out else "")
