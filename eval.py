r"""Evaluate a checkpoint of any script, or any CLIP by name, on any data set.

    python eval.py --checkpoint runs/NAME                            # as the run printed at its end
    python eval.py --checkpoint runs/NAME --datasets coco flickr30k  # the papers' retrieval tables
    python eval.py --checkpoint runs/NAME --datasets cifar10 cifar100 --tasks zero-shot knn probe
    python eval.py --checkpoint runs/NAME --datasets temo-17         # the 17 sets of TeMo's Table 7
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco msrvtt=ANNOTATIONS \
        --video-dir VIDEOS
    python eval.py --checkpoint clip_vip:openai/clip-vit-base-patch32 \
        --init-from pretrain_clipvip_base_32.pt ...
    python eval.py --checkpoint runs/NAME --normalize queue          # NCL's biases, for any run
    python eval.py --checkpoint runs/NAME --rerank 50                # by VAST's matching head
    accelerate launch eval.py ...                    # several processes: the same numbers
    torchrun --nproc_per_node 2 eval.py ... --cpu    # likewise

docs/running.md says what each of the --tasks measures. All is measured as in training; a value that
a flag changes is printed. The result is a table, eval.json (metrics and chance levels as in the
summary.json of a run), and pictures.
"""

import contextlib
import dataclasses
import importlib
import shlex
import sys
from pathlib import Path

from contrastive.core.files import read_json, slug, write_json, write_tensors
from contrastive.core.number_types import count, nonnegative, whole
from contrastive.core.processes import (
    UserError, clean_exit, join, opening, rank, say, world)
from contrastive.data.images import TEMO_17
from contrastive.data.registry import find_data_set, flags_of, partition_name
from contrastive.data.table import Data, EmptySplit
from contrastive.engine.flags import OneLineErrorParser
from contrastive.engine.log import versions
from contrastive.evaluation.by_class import view_of
from contrastive.evaluation.clusters import head_mid_tail
from contrastive.evaluation.evaluated_model import (
    EvaluatedModel, EvaluatedSplits, open_query_data, resolve_name, training_queries)
from contrastive.evaluation.facts import read_facts
from contrastive.evaluation.measure import (
    BY_CLASS, TASKS, WITH_TRAINING, ClassOptions, measure, unsupported_tasks, usual_tasks)
from contrastive.evaluation.report import table
from contrastive.evaluation.rerank import reranked_retrieval
from contrastive.evaluation.retrieval import retrieval_both_ways
from contrastive.figures.base import (
    draw_answers, draw_histograms, draw_retrieval, has_few_queries, kind_of, similarity_histograms,
    title_of)
from contrastive.figures.ncl import draw_normalization

from ncl import normalized_retrieval, retrieval_biases

import torch

SEVENTEEN = "temo-17"
EXAMPLES = """examples:
  python eval.py --checkpoint runs/NAME
  python eval.py --checkpoint runs/NAME --datasets test.csv
  python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco --tasks retrieval"""


# ======================================================= flags ====================================
def parse_args(argv=None):
    """The flags."""
    parser = OneLineErrorParser("eval.py", "Evaluates any checkpoint on any data set.",
                                epilog=EXAMPLES)
    model = parser.add_argument_group("model")
    model.add_argument("--checkpoint", required=True,
                       help="folder of a run, or a CLIP by transformers id or folder")
    model.add_argument("--import", nargs="+", default=[], metavar="MODULE", dest="modules",
                       help="Python modules of yours that are imported first, such as one that "
                            "adds a data set")
    model.add_argument("--init-from", default="",
                       help="weights loaded into a CLIP by name: .safetensors, .pt or .bin")

    data = parser.add_argument_group("data")
    data.add_argument("--datasets", nargs="*", default=[], metavar="NAME[=DIR]",
                      help="data sets by name or path; DIR is a local copy; temo-17 = the 17 sets "
                           "of TeMo's Table 7 (DIR holds a folder of each); empty = those of the "
                           "run")
    data.add_argument("--split", choices=["test", "val", "train"], default="test",
                      help="split that is evaluated")
    data.add_argument("--image-column", default="",
                      help="column of images or videos in own data; empty = as the run")
    data.add_argument("--caption-column", default="",
                      help="column of captions in own data; empty = as the run")
    data.add_argument("--label-column", default="",
                      help="column of classes in own data; empty = as the run")
    data.add_argument("--video-dir", default="",
                      help="folder of the video files; empty = as the run")
    data.add_argument("--frame-cache", default="",
                      help="folder of decoded frames; empty = as the run")
    data.add_argument("--region-dir", default="",
                      help="folder of VGT's region features; empty = as the run")
    data.add_argument("--frames", type=whole, default=0,
                      help="frames of a clip; 0 = as the run, 12 for a CLIP by name")
    data.add_argument("--text-length", type=whole, default=0,
                      help="most tokens of a text; 0 = as the run, 77 for a CLIP by name")
    data.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR",
                      help="folders of video features that SSB reads; empty = as the run")
    data.add_argument("--class-names", choices=["wordnet", "clip"], default="",
                      help="class names of ImageNet; empty = as the run, else wordnet")
    data.add_argument("--prompts", choices=["openai", "slip"], default="",
                      help="prompts for ImageNet's classes: CLIP's 80, or the 7 of SLIP's code; "
                           "empty = as the run, else openai")
    data.add_argument("--max-captions", type=whole, default=0,
                      help="most captions of an image; 5 = COCO's usual 25,000 captions; 0 = as "
                           "many as the protocol of the set has, else all")
    data.add_argument("--same-text", choices=["positive", "wrong"], default="",
                      help="what another item's caption with the same words counts as; empty = as "
                           "the run")

    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", nargs="+", choices=TASKS, default=[],
                       help="what is measured; a task that a set does not support is left out; "
                            "empty = as in training, zero-shot for the sets of temo-17")
    tasks.add_argument("--knn-features", choices=["projected", "backbone"], default="",
                       help="features of knn, after the projection (TeMo's code) or before it; "
                            "empty = as the run, else projected")
    tasks.add_argument("--normalize", choices=["none", "queue", "oracle", "dsl"], default="",
                       help="queue: NCL's biases from training queries (the queue of the run, else "
                            "its train split); oracle: NCL's biases from the test queries, which "
                            "is not fair; dsl: dual softmax over the test queries, which is not "
                            "fair either, in both directions (CLIP-ViP: text -> video alone); "
                            "empty = as the run, else none")
    tasks.add_argument("--queue-size", type=count, default=0,
                       help="latest training queries of each kind that --normalize queue reads; 0 "
                            "= the whole queue of the run, else 16,384")
    tasks.add_argument("--rerank", type=whole, default=0, metavar="K",
                       help="first candidates of each query by cosine that VAST's matching head "
                            "ranks anew, in both directions; VAST 50; 0 = none")
    tasks.add_argument("--gamma", type=nonnegative, default=0.0,
                       help="temperature of --normalize, which divides the cosine; 0 = that of the "
                            "run, for dsl 0.01")

    run = parser.add_argument_group("run")
    run.add_argument("--output-dir", default="",
                     help="folder of the result; empty = RUN_DIR/eval, or runs/eval/NAME for a "
                          "CLIP by name")
    run.add_argument("--save-embeddings", default="", metavar="DIR",
                     help="folder for the embeddings of each data set, before normalisation, as "
                          "NAME.safetensors, with their keys and captions in NAME.json; empty = "
                          "none")
    run.add_argument("--workers", type=whole, default=4, help="loader processes")
    run.add_argument("--cpu", action="store_true", help="stay on the CPU")
    args = parser.parse_args(argv)

    # Without --normalize, retrieval is normalised as at the end of training: for queue only on the
    # run's own set, with the run's queue.
    args.as_trained = not args.normalize
    if args.as_trained:
        args.normalize = "none"
        if args.split != "train":
            args.normalize = read_facts(Path(args.checkpoint)).normalize
    check_flags(parser, args)
    return args


def check_flags(parser, args):
    """Refuses flags that contradict each other or would have no effect."""
    if args.normalize == "queue" and args.split == "train":
        parser.error("--split train: the queue holds its own queries; that is --normalize oracle")
    if "qa" in args.tasks and len(args.tasks) > 1:
        parser.error("--tasks qa: its model answers questions; give it alone")
    is_run = bool(read_json(Path(args.checkpoint) / "args.json", {}))
    parser.only(not is_run, "with a CLIP by name: a run has its own weights", "--init-from")
    parser.only(not args.tasks or "retrieval" in args.tasks, "with --tasks retrieval",
                "--normalize", "--rerank")
    if args.rerank and args.normalize != "none":
        parser.error(f"--rerank: not beside --normalize {args.normalize}, whose scores it replaces")
    parser.only(args.normalize != "none", "with --normalize queue, oracle or dsl", "--gamma")
    parser.only(args.normalize == "queue", "with --normalize queue", "--queue-size")
    parser.only(not args.tasks or "knn" in args.tasks, "with --tasks knn", "--knn-features")


# ======================================================= data sets ================================
def sets_to_evaluate(args, trained_on, evaluated_in_training):
    """The data sets of --datasets, else those that the run evaluated, else its own.

    Args:
        trained_on: data set of the run, None for a model by name.
        evaluated_in_training: words of the run's --eval-datasets.
    Returns: {name: its local copy or ""}; a set of temo-17 that is named as well has its own.
    Raises: UserError if there are none, or if one is named with two folders.
    """
    words = args.datasets or evaluated_in_training or [trained_on]
    if not any(words):
        raise UserError("--datasets is needed: the data set of this model is not known")
    folders, members = {}, {}
    for word in words:
        name, folder = partition_name(word, "=")
        if trained_on and resolve_name(name) == resolve_name(trained_on):
            name = trained_on
        if name == SEVENTEEN:
            for member in TEMO_17:
                members[member] = str(Path(folder) / member) if folder else ""
        elif folders.setdefault(name, folder) != folder:
            raise UserError(f"--datasets {name}: named with two folders")
    folders = members | folders
    has_imagenet = any("--class-names" in flags_of(name) for name in folders)
    for flag, value in (("--class-names", args.class_names), ("--prompts", args.prompts)):
        if value and not has_imagenet:
            raise UserError(f"{flag}: only with an ImageNet; it would have no effect")
    return folders


@dataclasses.dataclass
class OpenedSet:
    """A data set that is open for evaluation."""

    name: str
    splits: EvaluatedSplits
    data: Data  # of the split that is evaluated
    train: Data | None  # for knn and probe
    tasks: list
    left_out: dict  # {task: the reason}
    query_data: Data | None = None  # whose captions and items are queries of --normalize queue


def training_images(model, splits):
    """The images from which knn and probe learn: those of the set or, if it is a test file of the
    user's own, those on which the run was trained if they are the user's own; None = none.

    Args: model: EvaluatedModel. splits: EvaluatedSplits.
    """
    with contextlib.suppress(EmptySplit):
        return splits.open("train")
    trained_on = model.trained_on
    is_own = trained_on is not None and find_data_set(trained_on) is None
    if find_data_set(splits.name) is None and is_own and Path(trained_on).expanduser().exists():
        say(f"{splits.name}: knn and probe learn from the training images of {trained_on}")
        return EvaluatedSplits(model, trained_on, "").open("train")
    return None


def tasks_of_set(args, name):
    """The tasks that are asked for of a data set: those of --tasks; without it zero-shot for the
    sets of temo-17, and [] = as in training for others."""
    has_seventeen = any(partition_name(word, "=")[0] == SEVENTEEN for word in args.datasets)
    if not args.tasks and has_seventeen and name in TEMO_17:
        return ["zero-shot"]
    return args.tasks


def open_set(model, name, folder):
    """Opens a data set, with all that its tasks read, so that errors come early.

    Args:
        model: EvaluatedModel.
        folder: local copy of the set, or "".
    Returns: OpenedSet.
    """
    args, towers = model.args, model.towers
    tasks = tasks_of_set(args, name)
    splits = EvaluatedSplits(model, name, folder)
    data = splits.open(args.split)
    if data.streamed:
        raise UserError(f"--split {args.split}: {name} is a stream in that split; use --split val "
                        "or test")
    if args.max_captions and data.has_captions:
        default = data.max_captions or "all"
        if args.max_captions != default:
            say(f"{name}: --max-captions {args.max_captions}: {default} without it")
        data = dataclasses.replace(data, max_captions=args.max_captions)
    as_in_training = not tasks
    if as_in_training:
        tasks = usual_tasks(towers.model, towers.tokenizer, data)
    train = None
    needs_training = data.labels is not None and bool(WITH_TRAINING.intersection(tasks))
    if needs_training and args.split != "train":  # there each image would find itself
        train = training_images(model, splits)
    left_out = unsupported_tasks(
        tasks, data, towers, train, class_names_as_captions=as_in_training,
        knn_features=model.knn_features)
    tasks = [task for task in tasks if task not in left_out]
    query_data = None
    if "retrieval" in tasks:
        query_data = open_query_data(model, splits)
    return OpenedSet(name, splits, data, train, tasks, left_out, query_data)


# ======================================================= evaluation ===============================
def evaluate(model, opened):
    """Evaluates a data set, prints the table and draws the pictures. Collective.

    Args: model: EvaluatedModel. opened: OpenedSet.
    Returns: its entry in eval.json, {metrics, chance, left_out: {task: reason}, views}.
    """
    args, name, tasks = model.args, opened.name, opened.tasks
    title = f"{name} ({args.split})"
    if opened.data.note:
        say(f"\n{title}: {opened.data.note}")
    view, view_description = view_of(model.towers.transform, name, model.trained_on)
    if not BY_CLASS.intersection(tasks):
        view_description = ""  # only these tasks have that view
    metrics, chance = {}, {}
    if tasks:
        options = ClassOptions(
            train=opened.train, few_shot=opened.splits.few_shot, knn_features=model.knn_features,
            view=view, build_untrained=model.build_untrained)
        if name == model.trained_on:
            options.shot_limits = model.facts.shot_limits
        metrics, chance, pieces = measure(
            model.towers, opened.data, tasks, options, device=model.device, workers=args.workers)
        if "retrieval" in tasks:
            metrics.update(other_rankings(model, opened, metrics, pieces))
        if rank() == 0 and not has_few_queries(pieces):
            draw(model, opened, pieces)
        if rank() == 0 and args.save_embeddings:
            save_embeddings(Path(args.save_embeddings), name, pieces)
    lines = [table(f"\n{title}", metrics, chance)]
    if view_description:
        lines.append(f"  {view_description}")
    lines += lines_of_left_out(args, opened)
    say("\n".join(lines))
    return {"metrics": metrics, "chance": chance, "left_out": opened.left_out,
            "views": view_description}


def lines_of_left_out(args, opened):
    """The tasks that are left out, with the reasons, of those that were asked for; without --tasks
    only where nothing is measured. eval.json has them all."""
    if opened.tasks and not args.tasks:
        return []
    return [f"  left out: {task}: {reason}" for task, reason in opened.left_out.items()]


def other_rankings(model, opened, metrics, pieces):
    """Retrieval by other scores than the cosine, or that by cosine by the size of the clusters.
    Collective.

    Args:
        metrics: by cosine.
        pieces: EvaluationPieces.
    Returns: what normalized_metrics, reranked_metrics or head_mid_tail return.
    """
    args = model.args
    # a run of ncl.py prints recalls by queue and oracle beside those of --normalize none, unless
    # it has no temperature
    prints_all = args.as_trained and bool(model.queues) and model.gamma > 0
    if args.normalize != "none" or prints_all:
        return normalized_metrics(model, opened, metrics, pieces)
    if args.rerank:
        return reranked_metrics(model, metrics, pieces)
    # these ranks are by cosine, and would mislead beside recalls of another ranking
    return head_mid_tail(pieces, model.clusters)


def reranked_metrics(model, metrics, pieces):
    """Retrieval after re-ranking by the matching head, in place of that by cosine. Collective.

    Args:
        metrics: by cosine.
        pieces: EvaluationPieces.
    Returns: the metrics after re-ranking, and rerank: {cosine: those before it, K: those after it}.
    """
    top = model.args.rerank
    reranked = reranked_retrieval(pieces, model.towers, top, workers=model.args.workers)
    by_cosine = {key: metrics[key] for key in reranked}
    say(f"--rerank {top}: the first {top} candidates by cosine are ranked by the matching head; "
        f"R@1 text -> video {by_cosine['text_to_image']['R@1']:.2f} -> "
        f"{reranked['text_to_image']['R@1']:.2f}, video -> text "
        f"{by_cosine['image_to_text']['R@1']:.2f} -> {reranked['image_to_text']['R@1']:.2f}")
    return reranked | {"rerank": {"cosine": by_cosine, str(top): reranked}}


def normalized_metrics(model, opened, metrics, pieces):
    """Retrieval with NCL's biases or with the dual softmax.

    Args:
        metrics: without either.
        pieces: EvaluationPieces, which get the biases.
    Returns: the metrics of --normalize; beside them normalize: {mode: those of each}, and
        normalized_by: the mode, 'none' if the set has no queue.
    """
    args, gamma, iterations = model.args, model.gamma, model.facts.iterations
    texts, videos = training_queries(model, opened.splits, opened.query_data)
    if args.normalize == "dsl":
        by_softmax, _ = retrieval_both_ways(pieces, dsl=gamma)
        plain = {key: metrics[key] for key in by_softmax}
        results = {"none": plain, "dsl": by_softmax}
    else:
        results, pieces.biases = normalized_retrieval(pieces, gamma, iterations, texts, videos)
        if rank() == 0:
            queues = {"texts": texts, "videos": videos}
            draw_normalization(pieces, gamma, iterations, queues, retrieval_biases,
                               model.picture("normalization", opened.name))
    mode = args.normalize if args.normalize in results else "none"
    normalized = {key: value for key, value in results[mode].items() if key != "error"}
    return {**normalized, "normalize": results, "normalized_by": mode}


def save_embeddings(folder, name, pieces):
    """Writes the embeddings of a data set, and what each row of them is.

    NAME.safetensors: image (M, D) and, of texts, text (C, D) and owner (C,), the row of each text's
    image. NAME.json: keys of the M images, captions of the C texts.
    """
    if getattr(pieces, "image", None) is None:
        say(f"{name}: no embeddings to save: its model answers questions")
        return
    keys = list(pieces.data.keys())
    rows = {"keys": [keys[row] for row in pieces.index]}
    tensors = {"image": pieces.image}
    if pieces.text is not None:
        tensors |= {"text": pieces.text, "owner": torch.from_numpy(pieces.owner)}
        rows["captions"] = pieces.texts
    with opening(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / f"{slug(name)}.safetensors", tensors)
    write_json(folder / f"{slug(name)}.json", rows)


def draw(model, opened, pieces):
    """Draws the pictures of a data set."""
    name, tasks = opened.name, opened.tasks
    if "qa" in tasks:
        draw_answers(pieces, model.picture("answers", name))
    if "retrieval" in tasks:
        image_bias = None
        if model.args.normalize in pieces.biases:
            image_bias, _ = pieces.biases[model.args.normalize]
        draw_retrieval(pieces, model.picture("retrieval", name), bias=image_bias)
    if "gap" in tasks:
        histograms = {model.args.checkpoint: similarity_histograms(pieces)}
        draw_histograms(histograms, model.picture("similarities", name),
                        title=f"{title_of(pieces.data)}: {kind_of(pieces)}-text cosines")


# ======================================================= main =====================================
def main(args):
    """Evaluates, prints the tables and writes eval.json.

    Returns: the content of eval.json.
    Raises: UserError if nothing can be measured.
    """
    for module in args.modules:
        importlib.import_module(module)
    model = EvaluatedModel(args, join(args.cpu))
    if args.rerank and getattr(model.towers.model, "matching", None) is None:
        raise UserError(f"--rerank: {args.checkpoint} has no matching head; mmts.py trains one "
                        "with --image-encoder vast --matching-weight 0.1")
    folders = sets_to_evaluate(args, model.trained_on, model.flags.get("eval_datasets"))
    # all are opened before the first is encoded, so that errors come early
    opened_sets = []
    for name, folder in folders.items():
        opened_sets.append(open_set(model, name, folder))
    check_tasks(opened_sets)
    results = {}
    for opened in opened_sets:
        results[opened.name] = evaluate(model, opened)
    result = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "checkpoint": args.checkpoint, "split": args.split, "versions": versions(args.cpu),
        "processes": world(), "datasets": results}
    if rank() == 0:
        write_json(model.folder / "eval.json", result)
    say(f"\nwritten to {model.folder}")
    return result


def check_tasks(opened_sets):
    """Raises UserError if no set supports a task."""
    if any(opened.tasks for opened in opened_sets):
        return
    reasons = []
    for opened in opened_sets:
        for task, reason in opened.left_out.items():
            reasons.append(f"{opened.name}: {task}: {reason}")
    raise UserError(f"--tasks: nothing can be measured: {'; '.join(reasons)}")


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
