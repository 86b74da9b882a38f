"""Evaluate a checkpoint of any script, or any CLIP or pair of image and text encoders by name, on any data set.

    python eval.py --checkpoint runs/NAME                                # retrieval, kNN and the gap on its own data
    python eval.py --checkpoint runs/NAME --datasets coco flickr30k      # the papers' retrieval tables
    python eval.py --checkpoint runs/NAME --datasets cifar10 cifar100 --tasks zero-shot knn probe
    python eval.py --checkpoint runs/NAME --datasets temo-17             # zero-shot on the 17 sets of TeMo's Table 7
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco       # any CLIP, by id or folder
    python eval.py --image-encoder tf_efficientnet_lite0 --text-encoder FOLDER ... # any pair: knn and probe only, its
                                                                                   # projections are random
    python eval.py --checkpoint runs/NAME --normalize queue              # NCL's test-time normalisation, of any script
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets msrvtt=ANNOTATIONS --video-dir VIDEOS
    python eval.py --checkpoint runs/NAME --query "red apple" --dataset photos/    # search a folder and draw the hits
    accelerate launch eval.py ... / torchrun --nproc_per_node 2 eval.py ... --cpu  # the same numbers on any number

Tasks
    retrieval   R@1/5/10/50, MdR, MnR both ways; every caption is a query; R-Mean = mean of R@1/5/10 both ways (TeMo,
                Table 4); --normalize adds NCL's biases and shows results without biases, with those of a queue of
                training queries, and with those of the test queries; or uses the dual softmax (dsl) of the test queries
    mir         multi-instance retrieval, for sets with relevancies (EPIC-KITCHENS, moving-emoji): mAP as the EPIC
                code computes it, the textbook's binary one, and nDCG; both ways and their mean
    zero-shot   top-1/3/5 of the mean of normalised prompt embeddings, and of the class names alone (names_top1, ...)
    knn         k = 1 and 10, cosine, unweighted vote, ties to the smallest class, per-class mean, head / mid / tail; on
                embeddings after the projection, as TeMo's code, or before it (--knn-features)
    probe       LinearSVC (C = 1, random_state 42) on L2-normalised features before the projection, as the authors of
                TS: few-shot (the smallest class's size) and all
    qa          accuracy of the answers, by question type, of a model that mama.py trained on questions
    gap         modality gap; alignment, uniformity and mean cosines of images and their first captions
    histograms  densities of positive and negative cosines
Images are read as in training, with one exception: if a run squashes them (the CC3M trainer's recipe), zero-shot, knn
and probe on other sets resize and crop the centre, with the statistics of ImageNet or CIFAR, as that trainer does.
The result is a table, eval.json, and pictures in --output-dir.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from contrastive.data import data_options, other_options, splits_of
from contrastive.data.images import TEMO_17
from contrastive.engine.flags import OneLine
from contrastive.engine.log import versions
from contrastive.engine.processes import UserError, clean_exit, first_line, join, rank, say, world, write_json
from contrastive.engine.ranges import count, nonnegative, whole
from contrastive.evaluation import answers, mir
from contrastive.evaluation.by_class import TASKS
from contrastive.evaluation.case import ALTER_TRAINING, Case, Subject, keep_earlier, table
from contrastive.evaluation.embed import together
from contrastive.evaluation.metrics import NotFinite, embedding_health, modality_gap
from contrastive.evaluation.retrieval import retrieval_both_ways
from contrastive.evaluation.search import search
from contrastive.evaluation.stand_ins import queues_of, stand_ins
from contrastive.figures.base import draw_histograms, draw_picture, draw_retrieval, similarity_histograms
from contrastive.figures.ncl import draw_normalization

import numpy as np

from ncl import normalization_table, normalized_retrieval, retrieval_biases

SEVENTEEN = "temo-17"


def parse_args(argv=None):
    """Flags; see the module docstring for the tasks."""
    p = OneLine("eval.py", "Evaluate any checkpoint.")
    yesno = argparse.BooleanOptionalAction
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", default="", help="run folder, or a CLIP by transformers id or folder")
    g.add_argument("--image-encoder", default="", help="without --checkpoint: image encoder by name")
    g.add_argument("--text-encoder", default="", help="without --checkpoint: text encoder by name")
    g.add_argument("--init-from", default="", help="weights loaded into that pair: .safetensors, .pt or .bin")
    g.add_argument("--pretrained", action=yesno, default=True, help="published weights for that pair")
    g.add_argument("--text-pooling", choices=["cls", "mean"], default="cls", help="of that text encoder")
    g.add_argument("--image-size", type=whole, default=0,
                   help="pixels of a side; 0 = the checkpoint's own, 224 for a model by name")
    g.add_argument("--eval-resize", choices=["auto", "own", "crop", "squash"], default="auto",
                   help="evaluation view: crop = short side and centre crop, squash = both sides, own = as trained; "
                        "auto = own, but crop for the classes of other sets if the run squashes (CC3M trainer)")
    g.add_argument("--image-stats", choices=["auto", "own", "imagenet", "clip", "half", "cifar"], default="auto",
                   help="mean and std of the pixels: own = as trained; cifar = the CC3M trainer's for CIFAR-10 or "
                        "CIFAR-100 (changes results by several points); auto = own, but cifar or imagenet, by the "
                        "set, for the classes of other sets if the run squashes")
    g = p.add_argument_group("data")
    g.add_argument("--datasets", nargs="*", default=[], metavar="NAME[=DIR]",
                   help="sets by name or path, each with an optional local copy; temo-17 = those of TeMo's Table 7 "
                        "(DIR: the folder that holds their folders); none = those of the run")
    g.add_argument("--split", choices=["test", "val", "train"], default="test", help="split that is evaluated")
    for flag in "--image-column --caption-column --label-column --video-dir --frame-cache --region-dir".split():
        g.add_argument(flag, default="", help="as in training")
    g.add_argument("--frames", type=whole, default=0, help="frames of a clip; 0 = as in training, 12 for one by name")
    g.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR", help="as in training")
    g.add_argument("--hold-out-val", action="store_true", help="as in training")
    g.add_argument("--max-captions", type=whole, default=0,
                   help="captions used per image; 5 = COCO's usual protocol of 25,000 captions; 0 = all, or as many as "
                        "the set's own protocol has")
    g.add_argument("--limit", type=whole, default=0, help="use only the first so many examples; 0 = all")
    g = p.add_argument_group("tasks")
    g.add_argument("--tasks", nargs="+", choices=list(TASKS), default=[],
                   help="what to measure; tasks that a set does not support are left out, with the reason; none = "
                        "retrieval, knn and gap; zero-shot for temo-17; qa for a model that answers questions")
    g.add_argument("--knn-features", choices=["projected", "backbone"], default="",
                   help="features of the nearest neighbours: after the projection (TeMo's code) or before it; empty = "
                        "as the run, else projected (a pair by name: backbone, its projection is random)")
    g.add_argument("--knn-k", type=count, nargs="+", default=[1, 10], help="neighbours")
    g.add_argument("--few-shot", type=whole, default=0, help="images per class, few-shot probe; 0 = the smallest class")
    g.add_argument("--seed", type=int, default=42, help="seed of the few-shot draw; TS authors: 42")
    g.add_argument("--normalize", choices=["none", "queue", "oracle", "dsl"], default="none",
                   help="NCL's biases at test time: from training queries (the run's queue, or its training set), or "
                        "from the test queries themselves (not a fair result); dsl: the cosine times its softmax over "
                        "all test queries, both ways (CLIP-ViP's dual softmax; not a fair result either)")
    g.add_argument("--queue-size", type=count, default=16_384,
                   help="use only the latest so many training queries of each kind; paper 16,384")
    g.add_argument("--queue-split", choices=["run", "train", "val"], default="run",
                   help="where these queries come from: the run's own queue (if it has none, the training set), or "
                        "that split, encoded now")
    g.add_argument("--gamma", type=nonnegative, default=0.0,
                   help="temperature for --normalize, divides the cosine; 0 = the checkpoint's own")
    g.add_argument("--iterations", type=whole, default=0,
                   help="rounds of Sinkhorn-Knopp; 0 = the checkpoint's own, else the paper's 4")
    g.add_argument("--query", default="", help="a text: search --dataset for it and draw the hits; no tasks")
    g.add_argument("--dataset", default="", help="folder of images (or any set) that --query searches")
    g.add_argument("--top", type=count, default=5, help="hits of a query")
    g = p.add_argument_group("run")
    g.add_argument("--output-dir", default="",
                   help="for eval.json and the pictures; empty = RUN_DIR/eval, or runs/eval/NAME of a model by name")
    g.add_argument("--figures", choices=["png", "pdf"], default="png", help="format of the pictures; pdf for papers")
    g.add_argument("--eval-batch", type=count, default=256, help="images at a time")
    g.add_argument("--workers", type=whole, default=4, help="loader processes")
    g.add_argument("--cpu", action=yesno, default=False, help="stay on the CPU")
    args = p.parse_args(argv)
    p.require(args.checkpoint or (args.image_encoder and args.text_encoder),
              "give what to evaluate: --checkpoint RUN_DIR, or --image-encoder and --text-encoder")
    p.require(bool(args.query) == bool(args.dataset),
              "--query TEXT and --dataset FOLDER go together; --datasets is for the tasks")
    p.require(args.normalize != "queue" or args.queue_split != args.split,
              f"--queue-split {args.queue_split}: these are the queries of --split {args.split} themselves; that is "
              "--normalize oracle")
    p.require(args.normalize != "queue" or args.queue_split != "run" or args.split != "train",
              "--split train: the queue holds its own queries; that is --normalize oracle")
    a_run = (Path(args.checkpoint or "none") / "model.json").is_file()
    p.only(not args.checkpoint, "without --checkpoint", "--image-encoder", "--text-encoder", "--text-pooling")
    p.only(not a_run, "with a model by name: a run has its own weights", "--init-from", "--pretrained",
           "--image-size")
    p.only(args.normalize != "none", "with --normalize queue, oracle or dsl", "--gamma")
    p.only(args.normalize in ("queue", "oracle"), "with --normalize queue or oracle", "--iterations")
    p.only(args.normalize == "queue", "with --normalize queue", "--queue-size", "--queue-split")
    p.only(args.query, "with --query", "--top")
    p.only(not args.query, "without --query", "--datasets", "--tasks", "--normalize", "--split", "--limit", "--knn-k",
           "--few-shot", "--max-captions")
    seventeen = any(word.partition("=")[0] == SEVENTEEN for word in args.datasets)
    args.tasks = args.tasks or (["zero-shot"] if seventeen else [])         # else by the model, when it is open
    p.only("probe" in args.tasks, "with --tasks probe", "--few-shot")
    p.only(not args.tasks or "knn" in args.tasks, "with --tasks knn", "--knn-k", "--knn-features")
    return args


# ======================================================= tasks =======================================================
# Each takes a Case (evaluation/case.py) and writes its numbers into case.metrics and case.chance.
def retrieval(case):
    """Ranks both ways, without normalisation."""
    case.metrics["retrieval"], case.chance["retrieval"] = together(retrieval_both_ways, case.pieces)


def normalize(case):
    """Retrieval with NCL's biases or the dual softmax; the result of --normalize becomes the set's retrieval."""
    iterations = case.args.iterations or case.subject.own.get("iterations") or 4
    texts, videos, gamma = stand_ins(case)
    if case.args.normalize == "dsl":
        results = {"none": case.metrics["retrieval"], "dsl": together(retrieval_both_ways, case.pieces, dsl=gamma)[0]}
        case.metrics |= {"retrieval": results["dsl"], "normalize": results, "normalized_by": "dsl"}
        return say(f"{case.name}: --normalize dsl: gamma {gamma:.3g}, by all test queries, so no fair result; "
                   "retrieval.png ranks by the cosine")
    results, case.pieces["biases"] = together(normalized_retrieval, case.pieces, gamma, iterations, texts, videos)
    case.metrics["retrieval"] = {k: v for k, v in results[case.args.normalize].items() if k != "error"}
    case.metrics |= {"normalize": results, "normalized_by": case.args.normalize}
    if rank() == 0:
        queues = {"texts": [] if texts is None else texts, "videos": videos}
        draw_picture(case.picture("normalization"), draw_normalization, case.pieces, gamma, iterations, queues,
                     retrieval_biases)


def gap(case):
    """The modality gap, and measures that show a collapsed space."""
    image, text = case.pieces["image"], case.pieces["text"]                # (M, D), (C, D)
    owner, first = np.unique(case.pieces["owner"], return_index=True)      # one caption per image: else an image would
    health = {}                                                            # be among its own negatives
    if len(owner) > 1:
        health = embedding_health(image[owner], text[first], limit=4096)
        health.pop("gap")                                                  # of these pairs; below that of all
    case.metrics["gap"] = {"modality_gap": modality_gap(image, text)} | health
    case.chance["gap"] = {"modality_gap": (1 / len(image) + 1 / len(text)) ** 0.5}


def histograms(case):
    """Densities of the cosines, and their picture."""
    case.metrics["histograms"] = similarity_histograms(case.pieces)
    if rank() == 0:
        stages = {case.args.checkpoint or "model": case.metrics["histograms"]}
        title = f"{case.name} ({case.args.split}): image-text cosines"
        draw_picture(case.picture("similarities"), draw_histograms, stages, title=title)


TASKS = {"retrieval": retrieval, "mir": mir.task, **TASKS, "gap": gap, "histograms": histograms,
         "qa": answers.task}


# ======================================================= data sets ===================================================
def wanted_sets(args, own):
    """[(name, its local copy or '')] of --datasets, else of the run. Raises: UserError if there are none, or one name
    comes twice."""
    words = args.datasets or own.get("eval_datasets") or []
    pairs = [pair for w in words for pair in _pairs(w)]
    wanted = list(dict.fromkeys(pairs))
    names = [name for name, _ in wanted]
    if "" in names:
        raise UserError(f"--datasets {' '.join(words)}: expected NAME or NAME=DIR, but a name is empty")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--datasets {twice[0]}: named with two folders; evaluate them one after the other")
    if not wanted and own.get("dataset"):
        wanted = [(own["dataset"], own.get("data_dir", ""))]
    if not wanted or not wanted[0][0]:
        raise UserError("--datasets is needed: the data set of this model is not known")
    if args.datasets:
        return wanted
    there = [w for w in wanted if args.split in splits_of(w[0], args.hold_out_val or own.get("hold_out_val"))]
    if without := ", ".join(name for name, _ in wanted if name not in dict(there or wanted)):
        say(f"WARNING: left out, since they have no {args.split} split: {without}")
    return there or wanted


def _pairs(word):
    """NAME or NAME=DIR of --datasets -> [(name, local copy or '')]; temo-17 -> seventeen of them."""
    if Path(word).exists():
        return [(word, "")]
    name, _, folder = word.partition("=")
    if name != SEVENTEEN:
        return [(name, folder)]
    return [(n, str(Path(folder) / n) if folder else "") for n in TEMO_17]


def options_of_set(subject, name, data_dir):
    """Options of common.load_data: those of the run, overridden by the flags."""
    own = subject.own
    saved = other_options(own, name, data_dir)
    if name == own.get("dataset"):
        saved = data_options(argparse.Namespace(**own)) | ({"data_dir": data_dir} if data_dir else {})
    size = {"image_size": subject.transform.size}
    return saved | data_options(subject.args) | size | dict.fromkeys(ALTER_TRAINING, 0)


def evaluate(subject, name, options, first=True):
    """Runs all tasks on one data set -> ({metrics, chance, left_out: {task: why the set does not support it}}, {task:
    why it failed}); pictures go to the folder.

    Args: options: of common.load_data; first: its picture is retrieval.png, without the set's name. Collective."""
    args, left_out, failed = subject.args, {}, {}
    case = Case(subject, name, options)
    for task in args.tasks:
        step = task                                                        # left out if it fails
        try:
            case.check(task)
            TASKS[task](case)
            if task == "retrieval" and args.normalize != "none":
                step = "normalize"
                normalize(case)
        except (UserError, ValueError) as error:
            (failed if isinstance(error, NotFinite) else left_out)[step] = first_line(error)
        if step == "normalize" and step in failed | left_out:
            case.metrics["normalized_by"] = "none"
            say(f"WARNING: {name}: --normalize {args.normalize} is not possible; the retrieval numbers are without "
                "normalisation")
    if rank() == 0 and "retrieval" in case.metrics:
        path = subject.folder / f"retrieval.{args.figures}" if first else case.picture("retrieval")
        bias, *_ = case.pieces.get("biases", {}).get(case.metrics.get("normalized_by"), [None])
        draw_picture(path, draw_retrieval, case.pieces, bias=bias)
    return {"metrics": case.metrics, "chance": case.chance, "left_out": left_out}, failed


def evaluate_all(subject):
    """Evaluates and prints all sets -> {datasets: {name: {metrics, chance, left_out}}, errors: {name: why}}."""
    args, found, errors, wanted = subject.args, {}, {}, wanted_sets(subject.args, subject.own)
    if args.normalize != "none" and "retrieval" not in args.tasks:
        raise UserError(f"--normalize {args.normalize} is for the task retrieval; the tasks are {' '.join(args.tasks)}")
    if args.normalize != "none":
        queues_of(args)                                                    # damaged ones are refused before the work
    for name, data_dir in wanted:
        try:
            options = options_of_set(subject, name, data_dir)
            found[name], failed = evaluate(subject, name, options, first=name == wanted[0][0])
        except (UserError, ValueError) as error:
            if len(wanted) == 1:
                raise UserError(f"{name}: {error}" if not isinstance(error, UserError) else str(error)) from error
            errors[name] = first_line(error)
            say(f"\n{name} is left out: {errors[name]}")
            continue
        errors |= {f"{name}/{task}": why for task, why in failed.items()}
        metrics, chance = found[name]["metrics"], found[name]["chance"]
        say(table(name, metrics, chance, TASKS) +
            (normalization_table({name: metrics}) if "normalize" in metrics else ""))
        for task, why in (found[name]["left_out"] | failed).items():
            say(f"  {task:<26} left out: {why}")
    return {"datasets": found, "errors": errors}


def main(args):
    """Evaluate, print, write eval.json; returns its content."""
    subject = Subject(args, join(args.cpu))
    result = {"command": shlex.join([Path(sys.executable).name, *sys.argv]),
              "checkpoint": args.checkpoint or f"{args.image_encoder} + {args.text_encoder}", "split": args.split,
              "versions": versions(args.cpu).splitlines(), "processes": world()}
    result |= search(subject, options_of_set(subject, args.dataset, "")) if args.query else evaluate_all(subject)
    if rank() == 0:
        keep_earlier(subject.folder / "eval.json", result["command"])
        write_json(subject.folder / "eval.json", result)
    say(f"\nwritten to {subject.folder}")
    return json.loads(json.dumps(result, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)))


def complain(result):
    """After everything is written. Raises: UserError if a set or a task failed, or no task could be done."""
    if result.get("errors"):
        what = "; ".join(f"{name}: {why}" for name, why in result["errors"].items())
        raise UserError(f"evaluation failed: {what}; all else is written")
    found = result.get("datasets", {})
    if found and not any(of["metrics"].get(task) for of in found.values() for task in TASKS):
        why = "; ".join(f"{name}: {task}: {why}" for name, of in found.items() for task, why in of["left_out"].items())
        raise UserError(f"nothing was measured, every task was left out: {why}; choose others with --tasks")


if __name__ == "__main__":
    with clean_exit():
        complain(main(parse_args()))
