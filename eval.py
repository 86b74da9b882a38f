"""Evaluate a checkpoint of any script, or any CLIP or pair of image and text encoders by name, on any data set.

    python eval.py --checkpoint runs/NAME                                # what the run printed at its end
    python eval.py --checkpoint runs/NAME --datasets coco flickr30k      # the papers' retrieval tables
    python eval.py --checkpoint runs/NAME --datasets cifar10 cifar100 --tasks zero-shot knn probe
    python eval.py --checkpoint runs/NAME --datasets temo-17             # zero-shot on the 17 sets of TeMo's Table 7
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco msrvtt=ANNOTATIONS --video-dir VIDEOS
    python eval.py --image-encoder tf_efficientnet_lite0 --text-encoder FOLDER ... # new projections: knn, probe only
    python eval.py --checkpoint runs/NAME --normalize queue              # NCL's test-time normalisation, of any script
    accelerate launch eval.py ... / torchrun --nproc_per_node 2 eval.py ... --cpu  # the same numbers on any number

Tasks
    retrieval   R@1/5/10/50, MdR, MnR both ways; every caption is a query; R-Mean = mean of R@1/5/10 both ways (TeMo,
                Table 4); --normalize adds NCL's biases, of training queries (queue) or of the test queries (oracle), or
                uses the dual softmax (dsl)
    mir         multi-instance retrieval, for sets with relevancies (EPIC-KITCHENS, moving-emoji): mAP as the EPIC
                code computes it, the textbook's binary one, and nDCG; both ways and their mean
    zero-shot   top-1/3/5 of the mean of normalised prompt embeddings, and of the class names alone (names_top1, ...)
    knn         k = 1 and 10, cosine, unweighted vote, ties to the smallest class, per-class mean, head / mid / tail
    probe       LinearSVC (C = 1) on unit features before the projection: few-shot (the smallest class's size) and all
    qa          accuracy of the answers, by question type, of a model that mama.py trained on questions
    gap         modality gap; alignment, uniformity and mean cosines of images and their first captions; their densities
All is measured as in training, and each value that a flag changes is printed. Here and there, if a run squashes images
(the CC3M trainer's recipe), zero-shot, knn and probe on other sets resize and crop the centre, with the statistics of
ImageNet or CIFAR, as that trainer does.
The result is a table, eval.json (metrics and chance as in a run's summary.json), and pictures in --output-dir.
"""

import argparse
import contextlib
import dataclasses
import importlib
import shlex
import sys
from pathlib import Path

from contrastive.data import parted, splits_of
from contrastive.data.images import TEMO_17
from contrastive.data.table import EmptySplit
from contrastive.engine.flags import OneLine
from contrastive.engine.log import versions
from contrastive.engine.processes import UserError, clean_exit, join, rank, read_json, say, world, write_json
from contrastive.engine.ranges import count, nonnegative, whole
from contrastive.evaluation.case import Subject, resolved
from contrastive.evaluation.clusters import head_mid_tail
from contrastive.evaluation.retrieval import LEARNT, TASKS, lacks, measure, retrieval_both_ways, table, usual_tasks
from contrastive.figures.base import draw_answers, draw_histograms, draw_retrieval, similarity_histograms
from contrastive.figures.ncl import draw_normalization

from ncl import normalized_retrieval, retrieval_biases

SEVENTEEN = "temo-17"


def parse_args(argv=None):
    """Flags; see the module docstring for the tasks."""
    p = OneLine("eval.py", "Evaluate any checkpoint.")
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", default="", help="run folder, or a CLIP by transformers id or folder")
    g.add_argument("--image-encoder", default="", help="without --checkpoint: image encoder by name")
    g.add_argument("--text-encoder", default="", help="without --checkpoint: text encoder by name")
    g.add_argument("--import", nargs="+", default=[], metavar="MODULE", dest="modules",
                   help="your modules, imported first: their backbones and data sets (docs/forking.md)")
    g.add_argument("--init-from", default="", help="weights loaded into that pair: .safetensors, .pt or .bin")
    g.add_argument("--text-pooling", choices=["cls", "mean"], default="cls", help="of that text encoder")
    g.add_argument("--image-size", type=whole, default=0, help="pixels of a side, of a model by name; 0 = 224")
    g.add_argument("--eval-resize", choices=["auto", "own", "crop", "squash"], default="auto",
                   help="crop = short side and centre crop, squash = both sides, own = as trained; auto = own, but "
                        "crop for the classes of other sets if the run squashes (CC3M trainer)")
    g.add_argument("--image-stats", choices=["auto", "own", "imagenet", "clip", "half", "cifar"], default="auto",
                   help="mean and std of pixels: own = as trained; cifar = the CC3M trainer's for CIFAR-10 or -100; "
                        "auto = own, but cifar or imagenet, by the set, for the classes of other sets if it squashes")
    g = p.add_argument_group("data")
    g.add_argument("--datasets", nargs="*", default=[], metavar="NAME[=DIR]",
                   help="names or paths, each with an optional local copy; temo-17 = TeMo's Table 7 (DIR: the folder "
                        "of their folders); none = those of the run")
    g.add_argument("--split", choices=["test", "val", "train"], default="test", help="split that is evaluated")
    for flag in "--image-column --caption-column --label-column --video-dir --frame-cache --region-dir".split():
        g.add_argument(flag, default="", help="as in training")
    g.add_argument("--frames", type=whole, default=0, help="frames of a clip; 0 = as in training, 12 for one by name")
    g.add_argument("--text-length", type=whole, default=0, help="most tokens of a text; 0 = as trained, 77 by name")
    g.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR", help="as in training")
    g.add_argument("--class-names", choices=["wordnet", "clip"], default="", help="ImageNet's; empty = wordnet")
    g.add_argument("--hold-out-val", action="store_true", help="as in training")
    g.add_argument("--max-captions", type=whole, default=0,
                   help="of an image; 5 = COCO's usual 25,000 captions; 0 = all, or as many as the set's protocol has")
    g.add_argument("--same-text", choices=["positive", "wrong"], default="", help="as in training; empty = as the run")
    g = p.add_argument_group("tasks")
    g.add_argument("--tasks", nargs="+", choices=TASKS, default=[],
                   help="those that a set does not support are left out, with the reason; none = those of training, "
                        "zero-shot for temo-17")
    g.add_argument("--knn-features", choices=["projected", "backbone"], default="",
                   help="after the projection (TeMo's code) or before it; empty = as the run, else projected (a pair "
                        "by name: backbone, its projection is random)")
    g.add_argument("--normalize", choices=["none", "queue", "oracle", "dsl"], default="",
                   help="empty = as the run, else none; NCL's biases, by training queries (the queue, else train) or "
                        "the test queries (not fair); dsl: CLIP-ViP's dual softmax over all test queries (nor is this)")
    g.add_argument("--queue-size", type=count, default=0,
                   help="latest training queries of each kind that count; 0 = the run's whole queue, else 16,384")
    g.add_argument("--gamma", type=nonnegative, default=0.0, help="divides the cosine; 0 = the run's own, dsl: 0.01")
    g.add_argument("--iterations", type=whole, default=0, help="of Sinkhorn-Knopp; 0 = the checkpoint's own, else 4")
    g = p.add_argument_group("run")
    g.add_argument("--output-dir", default="", help="empty = RUN_DIR/eval, or runs/eval/NAME of a model by name")
    g.add_argument("--workers", type=whole, default=4, help="loader processes")
    g.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=False, help="stay on the CPU")
    args = p.parse_args(argv)
    p.require(args.checkpoint or (args.image_encoder and args.text_encoder),
              "give what to evaluate: --checkpoint RUN_DIR, or --image-encoder and --text-encoder")
    p.require("small" not in (args.image_encoder, args.text_encoder),
              "--image-encoder and --text-encoder small have weights only in a run; give --checkpoint RUN_DIR")
    p.require(args.normalize != "queue" or args.split != "train",
              "--split train: the queue holds its own queries; that is --normalize oracle")
    a_run = (Path(args.checkpoint or "none") / "args.json").is_file()
    args.as_trained = not args.normalize
    if args.as_trained:
        own = read_json(Path(args.checkpoint) / "args.json") if a_run and args.split != "train" else {}
        args.normalize = own.get("normalize", "none")
    p.only(not args.checkpoint, "without --checkpoint", "--image-encoder", "--text-encoder", "--text-pooling")
    p.only(not a_run, "with a model by name: a run has its own weights", "--init-from", "--image-size")
    p.only(args.normalize != "none", "with --normalize queue, oracle or dsl", "--gamma")
    p.only(args.normalize in ("queue", "oracle"), "with --normalize queue or oracle", "--iterations")
    p.only(args.normalize == "queue", "with --normalize queue", "--queue-size")
    p.only(not args.tasks or "knn" in args.tasks, "with --tasks knn", "--knn-features")
    return args


# ======================================================= data sets ===================================================
def wanted_sets(args, own):
    """{name: its local copy or ''} of --datasets, else of the run. Raises: UserError if there are none."""
    wanted = {}
    for word in args.datasets or own.get("eval_datasets") or [own.get("dataset", "")]:
        name, folder = parted(word, "=")
        name = own.get("dataset", "") if resolved(name) == resolved(own.get("dataset", "")) else name
        for one in TEMO_17 if name == SEVENTEEN else [name]:
            place = str(Path(folder) / one) if folder and name == SEVENTEEN else folder
            if wanted.setdefault(one, place) != place:
                raise UserError(f"--datasets {one}: named with two folders; evaluate them one after the other")
    if "" in wanted:
        raise UserError("--datasets is needed: the data set of this model is not known")
    held_out = args.hold_out_val or own.get("hold_out_val")
    lacking = [name for name in wanted if not args.datasets and args.split not in splits_of(name, held_out)]
    if lacking:
        say(f"WARNING: left out, since they have no {args.split} split: {', '.join(lacking)}")
    return {name: folder for name, folder in wanted.items() if name not in lacking}


class Case:
    """One data set: data, training images, the tasks that can be done on it, and why others are left out."""

    def __init__(self, subject, name, folder, tasks):
        args, names = subject.args, not tasks                              # class names are captions, as in training
        self.subject, self.name, self.split_of = subject, name, subject.open(name, folder)
        data = self.split_of(args.split)
        if data.streamed:
            raise UserError(f"--split {args.split}: {name} is a stream in that split; use --split val or test")
        self.data, self.train = dataclasses.replace(data, max_captions=args.max_captions or data.max_captions), None
        if (not tasks or LEARNT & {*tasks}) and data.labels is not None and args.split != "train":
            with contextlib.suppress(EmptySplit):                          # in train each would find itself
                self.train = self.split_of("train")
        tasks = tasks or usual_tasks(*subject.towers[:2], data)
        found = self.data, subject.towers, self.train, names, subject.knn_features
        self.left_out = {task: why for task in tasks if (why := lacks(task, *found))}
        self.tasks = [task for task in tasks if task not in self.left_out]

    def evaluate(self):
        """{metrics, chance, left_out: {task: why}, views} of all its tasks, which it prints and draws. Collective."""
        subject, args, name = self.subject, self.subject.args, self.name
        view, by_class, words = subject.views(name)
        limits = subject.own.get("shot_limits") if name == subject.own.get("dataset") else None
        if self.data.note:
            say(f"\n{name} ({args.split}): {self.data.note}")
        if "qa" in self.tasks and subject.own.get("shuffle_video"):
            say(f"WARNING: {name}: the run was a control (--shuffle-video); here each question has its own video")
        metrics, chance = {}, {}
        for tasks in ([t for t in self.tasks if t == "qa"], [t for t in self.tasks if t != "qa"]):
            if tasks:
                found, by_chance, pieces = measure(
                    (*subject.towers[:2], view), self.data, subject.device, tasks, self.train,
                    self.split_of("few-shot"), limits, subject.knn_features, args.workers, by_class, subject.untrained)
                metrics, chance = metrics | found, chance | by_chance
            queued = args.as_trained and subject.queues and args.split != "train"  # whose queries the queue holds
            if "retrieval" in tasks and (args.normalize != "none" or queued):
                metrics |= self.normalize(metrics, pieces, view)
            if "retrieval" in tasks:
                metrics |= head_mid_tail(pieces, subject.clusters)
            if tasks and rank() == 0:
                self.draw(tasks, pieces)
        say(table(f"\n{name} ({args.split})", metrics, chance) + f"\n  {words}" * bool(words))
        for task, why in self.left_out.items():
            say(f"  left out: {task}: {why}")
        return {"metrics": metrics, "chance": chance, "left_out": self.left_out, "views": words}

    def normalize(self, metrics, pieces, view):
        """Retrieval with NCL's biases or the dual softmax, which becomes the set's retrieval; biases (M,) and (C,) into
        `pieces`."""
        subject, args = self.subject, self.subject.args
        texts, videos = subject.stand_ins(self.name, self.split_of, view)
        if args.normalize == "dsl":
            by_softmax, _ = retrieval_both_ways(pieces, dsl=subject.gamma)
            results = {"none": {k: metrics[k] for k in by_softmax}, "dsl": by_softmax}
        else:
            how = subject.gamma, args.iterations or subject.own.get("iterations") or 4
            results, pieces["biases"] = normalized_retrieval(pieces, *how, texts, videos)
            if rank() == 0:
                queues = {"texts": [] if texts is None else texts, "videos": videos}
                path = subject.picture("normalization", self.name)
                draw_normalization(pieces, *how, queues, retrieval_biases, path)
        mode = args.normalize if args.normalize in results else "none"     # another set than the run's has no queue
        return {k: v for k, v in results[mode].items() if k != "error"} | {"normalize": results, "normalized_by": mode}

    def draw(self, tasks, pieces):
        """The pictures of these tasks."""
        args, picture = self.subject.args, self.subject.picture
        if "qa" in tasks:
            draw_answers(pieces, picture("answers", self.name))
        if "retrieval" in tasks:
            bias, *_ = pieces.get("biases", {}).get(args.normalize, [None])
            draw_retrieval(pieces, picture("retrieval", self.name), bias=bias)
        if "gap" in tasks:
            densities = {args.checkpoint or "model": similarity_histograms(pieces)}
            draw_histograms(densities, picture("similarities", self.name),
                            title=f"{self.name} ({args.split}): image-text cosines")


def main(args):
    """Evaluate, print, write eval.json; returns its content. Raises: UserError if nothing could be measured."""
    for module in args.modules:
        importlib.import_module(module)
    subject = Subject(args, join(args.cpu))
    seventeen = any(parted(word, "=")[0] == SEVENTEEN for word in args.datasets)
    tasks = args.tasks or ["zero-shot"] * seventeen
    if not args.as_trained and args.normalize != "none" and tasks and "retrieval" not in tasks:
        raise UserError(f"--normalize {args.normalize} is for the task retrieval; the tasks are {' '.join(tasks)}")
    cases = [Case(subject, name, folder, tasks)
             for name, folder in wanted_sets(args, subject.own).items()]   # all are opened before the first is encoded
    result = {"command": shlex.join([Path(sys.executable).name, *sys.argv]),
              "checkpoint": args.checkpoint or f"{args.image_encoder} + {args.text_encoder}", "split": args.split,
              "versions": versions(args.cpu), "processes": world(),
              "datasets": {case.name: case.evaluate() for case in cases}}
    if rank() == 0:
        write_json(subject.folder / "eval.json", result)
    say(f"\nwritten to {subject.folder}")
    if not any(case.tasks for case in cases):
        raise UserError("nothing was measured, every task was left out; choose others with --tasks")
    return result


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
