r"""Evaluate a checkpoint of any script, or any CLIP by name, on any data set.

    python eval.py --checkpoint runs/NAME                            # as the run printed at its end
    python eval.py --checkpoint runs/NAME --datasets coco flickr30k  # the papers' retrieval tables
    python eval.py --checkpoint runs/NAME --datasets cifar10 cifar100 --tasks zero-shot knn probe
    python eval.py --checkpoint runs/NAME --datasets temo-17 --tasks zero-shot     # TeMo's Table 7
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco msrvtt=ANNOTATIONS \
        --video-dir VIDEOS
    python eval.py --checkpoint runs/NAME --normalize oracle         # NCL's biases
    python eval.py --checkpoint runs/NAME --rerank 50                # by VAST's matching head
    python eval.py --checkpoint runs/NAME --save-embeddings DIR      # for programs of your own
    accelerate launch eval.py ...                    # several processes: the same numbers

All is measured as in training, by the flags of the run (its args.json), in place of which those of
eval.py are taken. docs/running.md says what each of the --tasks measures. The result is a table,
eval.json (metrics and chance levels as in the summary.json of a run), and pictures.
"""

import argparse
import contextlib
import difflib
import functools
import importlib
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from contrastive.core.files import read_json, slug, write_json
from contrastive.core.number_types import int_ge0, nonnegative_float
from contrastive.core.processes import (
    UserError, clean_exit, join, opening, print_main, rank, world_size)
from contrastive.core.words import command_of
from contrastive.data import (
    data_options, evaluation_options, load_data, open_evaluation_sets, open_pairs)
from contrastive.data.images import TEMO_17
from contrastive.data.long_tail import labelled_splits
from contrastive.data.registry import find_data_set, partition_name
from contrastive.data.additions import without_trained
from contrastive.data.table import Data, EmptySplit, identity_of_files
from contrastive.encoders.models import load_model, model_of_spec
from contrastive.encoders.texts import build_tokenizer
from contrastive.engine.flags import OneLineErrorParser, Parser
from contrastive.engine.log import versions
from contrastive.evaluation.by_class import padded_and_flipped
from contrastive.papers.clusters import Clusters, head_mid_tail
from contrastive.evaluation.measure import TASKS, WITH_TRAINING, Evaluator, Towers
from contrastive.evaluation.report import table
from contrastive.evaluation.rerank import reranked_retrieval
from contrastive.evaluation.retrieval import retrieval_both_ways
from contrastive.evaluation.saved_pieces import (
    MAX_PICTURES, rows_to_save, save_pieces, select_pieces)
from contrastive.figures.base import draw_answers, draw_retrieval

from ncl import metrics_of_mode, normalized_retrieval

import torch
from safetensors.torch import load_file

SEVENTEEN = "temo-17"
# The dual softmax of CLIP-ViP, at its temperature. Here it runs over the queries in both
# directions. In CLIP-ViP's code the one of video -> text runs over the candidates, which does not
# change their order.
DSL_TAU = 0.01
# flags that take the place of those of the run
OVERRIDES = ("image_column", "caption_column", "label_column", "data_dir", "video_dir")
EXAMPLES = """examples:
  python eval.py --checkpoint runs/NAME
  python eval.py --checkpoint runs/NAME --datasets test.csv
  python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco --tasks retrieval"""


# ======================================================= flags ====================================
def parse_args(argv=None):
    """The flags."""
    parser = OneLineErrorParser("eval.py", "Evaluates any checkpoint on any data set.",
                                epilog=EXAMPLES)
    parser.add_argument("--checkpoint", required=True,
                        help="folder of a run, or a CLIP by transformers id or folder")
    parser.add_argument("--import", nargs="+", default=[], metavar="MODULE", dest="modules",
                        help="Python modules of yours that are imported first, such as one that "
                             "adds a data set")

    data = parser.add_argument_group("data")
    data.add_argument("--datasets", nargs="*", default=[], metavar="NAME[=DIR]",
                      help="data sets by name or path; DIR is a local copy; temo-17 = the 17 sets "
                           "of TeMo's Table 7 (DIR holds a folder of each); empty = those of the "
                           "run")
    data.add_argument("--split", choices=["test", "val"], default="test",
                      help="split that is evaluated")
    data.add_argument("--image-column", default="",
                      help="column of images or videos in own data; empty = as the run")
    data.add_argument("--caption-column", default="",
                      help="column of captions in own data; empty = as the run")
    data.add_argument("--label-column", default="",
                      help="column of classes in own data; empty = as the run")
    data.add_argument("--data-dir", default="",
                      help="folder of annotation files, and of relative paths to images and "
                           "videos, of all --datasets without a DIR; empty = as the run")
    data.add_argument("--video-dir", default="",
                      help="folder of the videos of all --datasets; empty = DIR, else as the run")

    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", nargs="+", choices=TASKS, default=[],
                       help="what is measured; a task that a set does not support is left out; "
                            "empty = as in training")
    tasks.add_argument("--normalize", choices=["none", "queue", "oracle", "dsl"], default="",
                       help="queue: NCL's biases from the training queries in the queue of a run "
                            "of ncl.py; oracle: NCL's biases from the test queries, which is not "
                            "fair; dsl: dual softmax over the test queries, which is not fair "
                            "either, in both directions (CLIP-ViP: text -> video alone); empty = "
                            "as the run, else none")
    tasks.add_argument("--tau", type=nonnegative_float, default=0.0,
                       help="temperature of --normalize, which divides the cosine; 0 = that of a "
                            "run of ncl.py, for dsl 0.01")
    tasks.add_argument("--rerank", type=int_ge0, default=0, metavar="K",
                       help="first candidates of each query by cosine that VAST's matching head "
                            "ranks anew, in both directions; VAST 50; 0 = none")

    run = parser.add_argument_group("run")
    run.add_argument("--output-dir", default="",
                     help="folder of the result; empty = RUN_DIR/eval, or runs/eval/NAME for a "
                          "CLIP by name")
    run.add_argument("--save-embeddings", default="", metavar="DIR",
                     help="folder for DATASET.safetensors: all embeddings, before normalisation, "
                          "with keys and captions (docs/running.md has the layout); empty = none")
    run.add_argument("--workers", type=int_ge0, default=4, help="loader processes")
    run.add_argument("--cpu", action="store_true", help="stay on the CPU")
    args = parser.parse_args(argv)
    check_flags(parser, args)
    return args


def check_flags(parser, args):
    """Refuses flags that contradict each other or would have no effect."""
    if "qa" in args.tasks and len(args.tasks) > 1:
        parser.error("--tasks qa: its model answers questions; give it alone")
    has_retrieval = not args.tasks or "retrieval" in args.tasks
    parser.only(has_retrieval, "with --tasks retrieval", "--normalize", "--rerank")
    if args.rerank and args.normalize not in ("", "none"):
        parser.error(f"--rerank: not beside --normalize {args.normalize}, whose scores it replaces")
    parser.only(args.normalize in ("queue", "oracle", "dsl"),
                "with --normalize queue, oracle or dsl", "--tau")


def flags_of_run(args):
    """The flags of the run, with those of eval.py in their place; of a CLIP by name the defaults.

    Raises: UserError if there is no such folder, no data set is known, or the run has not ended.
    """
    check_path(args.checkpoint)
    run = Path(args.checkpoint)
    if run.is_file():
        raise UserError(f"--checkpoint {run}: is a file; give the folder of the run, or of a CLIP")
    flags = read_json(run / "args.json", {})
    if flags and not (run / "model.json").is_file():
        script = Path(__file__).with_name("variants") / f"{flags['script']}.py"
        command = script.name
        if script.is_file():
            command = command_of(script)
        raise UserError(f"--checkpoint {run}: the run has not ended; python {command} "
                        f"--resume {run} continues it")
    if not flags:
        if not args.datasets:
            raise UserError(f"--datasets is needed: {run} is no folder of a run, and the data sets "
                            "of another model are not known")
        parser = Parser("eval.py", "")
        parser.add_shared_flags()
        flags = vars(parser.parse_args([])) | {"dataset": "", "modalities": "v"}
    for name in OVERRIDES:
        value = getattr(args, name)
        if value:
            flags[name] = value
    flags.update(workers=args.workers)
    flags.setdefault("eval_datasets", [])
    flags.setdefault("extra_pairs", [])
    return argparse.Namespace(**flags)


def check_path(checkpoint):
    """Refuses a folder that does not exist; a CLIP's id, ORG/NAME, is none.

    Raises: UserError with the nearest folder beside it.
    """
    path = Path(checkpoint)
    is_path = checkpoint.startswith(("/", ".", "runs/")) or checkpoint.count("/") > 1
    if path.exists() or not is_path:
        return
    message = f"--checkpoint {path}: no such folder"
    folders = [folder.name for folder in path.parent.glob("*/")]
    nearest = difflib.get_close_matches(path.name, folders, 1)
    if nearest:
        message += f"; the nearest: {nearest[0]}"
    raise UserError(message)


def expand_names(words, data_dir="", trained_on=""):
    """The words of --datasets, NAME or NAME=DIR, with the members of temo-17 in its place.

    Args:
        data_dir: of all that have no folder; "" = none.
        trained_on: the set of the run, which data_dir does not make a copy of its own.
    """
    expanded = []
    for word in words:
        name, folder = partition_name(word, "=")
        if name == SEVENTEEN:
            for member in TEMO_17:
                path = Path(folder) / member
                expanded.append(f"{member}={path}" if folder else member)
        elif data_dir and not folder and name != trained_on:
            expanded.append(f"{name}={data_dir}")
        else:
            expanded.append(word)
    return expanded


# ======================================================= model ====================================
def open_towers(args, flags, device):
    """The model of --checkpoint: Towers, on the device."""
    run = Path(args.checkpoint)
    if (run / "args.json").is_file():
        model, tokenizer, transform = load_model(run)
    else:
        model, tokenizer, transform = open_clip_by_name(args.checkpoint)
        flags.image_size = transform.size
    return Towers(model.to(device).eval(), tokenizer, transform)


def open_clip_by_name(name):
    """The model, tokenizer and view of a CLIP by its transformers id or folder."""
    from transformers import AutoConfig

    with opening(f"--checkpoint {name} (no args.json of a run there, so a CLIP by name)"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type != "clip":
        raise UserError(f"--checkpoint {name}: neither the folder of a run nor a CLIP, but "
                        f"{config.model_type}")
    length = config.text_config.max_position_embeddings
    tokenizer = build_tokenizer(name, length)
    spec = dict(
        image_encoder=name, text_encoder=name, embed_dim=config.projection_dim,
        image_size=config.vision_config.image_size, text_length=length, text_pooling="cls",
        image_stats="encoder", eval_resize="crop")
    torch.manual_seed(42)
    model, transform = model_of_spec(spec, tokenizer, True)
    transform.bicubic = True  # as its own processor
    return model, tokenizer, transform


# ======================================================= data sets ================================
class EvaluatedSet(NamedTuple):
    """A data set that is open for evaluation."""

    name: str
    splits: dict  # {"val": Data, "test": Data}, those that exist
    train: Data | None  # for knn and probe
    few_shot: Data | None  # for the few-shot probe


def open_sets(args, flags, towers):
    """Opens the data sets as training does, before anything is encoded: a list of EvaluatedSet.

    Examples that were trained on are left out and counted.
    """
    words = args.datasets or flags.eval_datasets or [flags.dataset]
    words = expand_names(words, args.data_dir, flags.dataset)
    folders = dict(partition_name(word, "=") for word in words)  # {name: its folder, or ""}
    labelled = {}
    if towers.tokenizer is None:
        flags.by_class = True  # a table needs no captions
        if flags.dataset in folders or is_user_data(flags.dataset):
            labelled = labelled_splits(flags)
    train = None
    if any(is_user_data(name) for name in folders) and is_user_data(flags.dataset):
        train = open_training_set(args, flags, labelled)
    sets = []
    for name, splits in open_evaluation_sets(flags, train, words, args.video_dir).items():
        if name == flags.dataset and labelled:
            splits = labelled
        if args.split not in splits:
            raise EmptySplit(f"{name} has no {args.split} split, as in the run")
        data = without_rows_of_training(args, flags, name, splits[args.split])
        train_of_set = None
        if needs_training_images(args, data):
            options = evaluation_options(flags, name, folders[name], args.video_dir)
            train_of_set = training_images(flags, name, options, labelled, train)
        sets.append(EvaluatedSet(name, {args.split: data}, train_of_set, splits.get("few-shot")))
    return sets


def is_user_data(name):
    """Whether a data set is the user's own."""
    return bool(name) and find_data_set(name) is None


def open_training_set(args, flags, labelled):
    """The training set of a run if it is the user's own: its rows must not be tested.

    Prints a warning if it has changed since the run.

    Args: labelled: splits of a run by class, {} of others.
    """
    train = labelled.get("train")
    if train is None:
        train = load_data(flags.dataset, "train", data_options(flags))
    saved = read_json(Path(args.checkpoint) / "summary.json", {}).get("training_set")
    if saved and identity_of_files(train) != saved:
        print_main(f"WARNING: {flags.dataset} has changed since the run; rows that were trained on "
                   "may count, too")
    return train


def without_rows_of_training(args, flags, name, data):
    """A split without what training held: rows of --extra-pairs, and meta-data of mama.py."""
    words = flags.eval_datasets or [flags.dataset]
    if name not in [partition_name(word, "=")[0] for word in words]:
        # of others, training has left out the pairs
        for word in flags.extra_pairs:
            data = without_trained(data, open_pairs(word, flags))
    meta_data = read_json(Path(args.checkpoint) / "meta_data.json", {})
    keys = set(meta_data.get(f"{name} {data.split}", ()))
    if not keys:
        return data
    return data.select([row for row, key in enumerate(data.keys()) if key not in keys])


def needs_training_images(args, data):
    """Whether kNN or probes may be measured on a split."""
    asked = not args.tasks or WITH_TRAINING.intersection(args.tasks)
    return data.labels is not None and bool(asked)


def training_images(flags, name, options, labelled, train):
    """The images from which kNN and probes learn: those of the set or, of a test file of the user's
    own, those of the run; None = none.

    Args:
        options: DataOptions of the set.
        labelled: splits of a run by class, {} of others.
        train: training set of the run if it is the user's own, else None.
    """
    if labelled and name == flags.dataset:
        if flags.train_features == "augmented":
            return padded_and_flipped(labelled["train"], flags.seed)
        return labelled["train"]
    with contextlib.suppress(EmptySplit):
        return load_data(name, "train", options)
    if train is not None:
        print_main(f"{name}: knn and probe learn from the training images of {flags.dataset}")
    return train


# ======================================================= other scores =============================
def open_method_metrics(args, flags, towers, device):
    """The function of Evaluator(method_metrics=) that a run, or a flag, asks for; None = none."""
    run = Path(args.checkpoint)
    mode = args.normalize or getattr(flags, "normalize", "none")
    queues = {}
    if (run / "queues.safetensors").is_file():  # of ncl.py
        with opening(run / "queues.safetensors"):
            queues = load_file(run / "queues.safetensors")
    if args.rerank:
        if getattr(towers.model, "matching", None) is None:
            raise UserError(f"--rerank: {args.checkpoint} has no matching head; variants/"
                            "mmts_vast.py trains one with --matching-weight 0.1")
        return functools.partial(
            reranked_metrics, towers=towers, top=args.rerank, workers=args.workers)
    if mode == "dsl":
        return functools.partial(dual_softmax_metrics, tau=args.tau or DSL_TAU)
    if mode != "none" or (queues and "gamma" in queues and not args.normalize):
        return functools.partial(normalized_metrics, args=args, flags=flags, mode=mode,
                                 queues=queues)
    if (run / "clusters.json").is_file():  # of mmts.py
        return functools.partial(head_mid_tail, clusters=Clusters(run, device))
    return None


def reranked_metrics(pieces, towers, top, workers):
    """Retrieval after re-ranking by the matching head, in place of that by cosine. Collective.

    Returns: the metrics after re-ranking, and rerank: {cosine: those before it, K: those after it}.
    """
    reranked = reranked_retrieval(pieces, towers, top, workers=workers)
    by_cosine, _ = retrieval_both_ways(pieces)
    print_main(f"--rerank {top}: the matching head ranks the first {top} candidates by cosine; R@1 "
               f"text -> video {by_cosine['text_to_image']['R@1']:.2f} -> "
               f"{reranked['text_to_image']['R@1']:.2f}, video -> text "
               f"{by_cosine['image_to_text']['R@1']:.2f} -> {reranked['image_to_text']['R@1']:.2f}")
    return reranked | {"rerank": {"cosine": by_cosine, str(top): reranked}}


def dual_softmax_metrics(pieces, tau):
    """Retrieval with the dual softmax, and beside it that by cosine."""
    by_cosine, _ = retrieval_both_ways(pieces)
    by_softmax, _ = retrieval_both_ways(pieces, dsl=tau)
    print_main(f"{pieces.data.name}: --normalize dsl: by all test queries, so no fair result; "
               f"gamma {tau:.3g}")
    results = {"none": by_cosine, "dsl": by_softmax}
    return by_softmax | {"normalize": results, "normalized_by": "dsl"}


def normalized_metrics(pieces, args, flags, mode, queues):
    """Retrieval with NCL's biases, as ncl.py reports it.

    Args:
        pieces: get the biases.
        mode: of the reported numbers.
        queues: {texts, videos, gamma} of a run of ncl.py, else {}.
    Returns: the metrics of the mode; beside them normalize: {mode: those of each}, and
        normalized_by: the mode, 'none' if the set has no queue.
    """
    name = pieces.data.name
    gamma = args.tau
    if not gamma and "gamma" in queues:
        gamma = queues["gamma"].item()
    if not gamma:
        raise UserError(f"--normalize {mode}: give --tau, the temperature that divides the "
                        "cosine; only a run of ncl.py has saved one")
    texts = videos = None
    if queues and name == flags.dataset:
        texts, videos = queues["texts"], queues["videos"]
    elif args.normalize == "queue":
        raise UserError(f"{name}: --normalize queue: only on the data set of a run of ncl.py, "
                        "which saves a queue of training queries; give --normalize oracle or none")
    if mode == "oracle":
        print_main(f"{name}: --normalize oracle: by all test queries, so no fair result; gamma "
                   f"{gamma:.3g}")
    iterations = getattr(flags, "iterations", 4)
    results, pieces.biases = normalized_retrieval(pieces, gamma, iterations, texts, videos)
    return metrics_of_mode(results, mode)


# ======================================================= results ==================================
def evaluate(args, evaluator, opened, folder):
    """Evaluates a data set, prints the table and draws the pictures. Collective.

    Args: opened: EvaluatedSet. folder: of the result.
    Returns: its entry in eval.json, {metrics, chance, left_out: {task: reason}}.
    """
    name = opened.name
    title = f"{name} ({args.split})"
    note = opened.splits[args.split].note
    if note:
        print_main(f"\n{title}: {note}")
    metrics, chance, pieces = evaluator(args.split)
    left_out = evaluator.left_out[name, args.split]
    lines = [table(f"\n{title}", metrics[name], chance[name])]
    if args.tasks:
        lines += [f"  left out: {task}: {reason}" for task, reason in left_out.items()]
    print_main("\n".join(lines))
    if rank() == 0:
        draw(name, pieces[name], folder)
        if args.save_embeddings:
            path = Path(args.save_embeddings) / f"{slug(name)}.safetensors"
            save_pieces(path, pieces, all_rows=True)
            print_main(f"embeddings: {path}")
    return {"metrics": metrics[name], "chance": chance[name], "left_out": left_out}


def draw(name, pieces, folder):
    """Draws the pictures of a data set. pieces: EvaluationPieces."""
    saved = select_pieces(pieces, rows_to_save(pieces), MAX_PICTURES)
    if saved.hits is not None:
        draw_answers(saved, folder / f"answers_{slug(name)}.png")
    if saved.text is not None:
        draw_retrieval(saved, folder / f"retrieval_{slug(name)}.png")


def make_folders(args):
    """Makes the folder of the result, which is returned, and that of --save-embeddings."""
    run = Path(args.checkpoint)
    if args.output_dir:
        folder = Path(args.output_dir)
    elif (run / "args.json").is_file():
        folder = run / "eval"
    else:
        folder = Path("runs/eval") / slug(args.checkpoint)
    for path in filter(None, (folder, args.save_embeddings)):
        with opening(path):
            Path(path).mkdir(parents=True, exist_ok=True)
    return folder


def earlier_results(path, command):
    """The results of other commands that an eval.json holds, the newest first."""
    newest = read_json(path, {})
    if not newest:
        return []
    results = [newest, *newest.pop("earlier", [])]
    return [result for result in results if result["command"] != command]


# ======================================================= main =====================================
def main(args):
    """Evaluates, prints the tables and writes eval.json, which keeps results of earlier commands.

    Returns: the content of eval.json, without these.
    Raises: UserError if nothing can be measured.
    """
    for module in args.modules:
        importlib.import_module(module)
    device = join(args.cpu)
    flags = flags_of_run(args)
    towers = open_towers(args, flags, device)
    method_metrics = open_method_metrics(args, flags, towers, device)
    if args.save_embeddings and hasattr(towers.model, "answers"):
        raise UserError("--save-embeddings: a model that answers questions has no embeddings of "
                        "its videos alone; leave the flag out")
    # all are opened before the first is encoded, so that errors come early
    evaluators = []
    for opened in open_sets(args, flags, towers):
        evaluator = Evaluator(
            *towers, {opened.name: opened.splits}, opened.train, device=device, args=flags,
            method_metrics=method_metrics, few_shot=opened.few_shot, tasks=args.tasks)
        evaluators.append((evaluator, opened))
    folder = make_folders(args)
    results = {}
    for evaluator, opened in evaluators:
        results[opened.name] = evaluate(args, evaluator, opened, folder)
    summary = read_json(Path(args.checkpoint) / "summary.json", {})  # none of a CLIP by name
    result = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "checkpoint": args.checkpoint, "steps": summary.get("steps"), "split": args.split,
        "versions": versions(args.cpu), "processes": world_size(), "datasets": results}
    if rank() == 0:
        path = folder / "eval.json"
        write_json(path, result | {"earlier": earlier_results(path, result["command"])})
    print_main(f"\nwritten to {folder}")
    return result


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
