"""Evaluate a checkpoint of any script, or any CLIP by name, on any data set.

    python eval.py --checkpoint runs/NAME                                # what the run printed at its end
    python eval.py --checkpoint runs/NAME --datasets coco flickr30k      # the papers' retrieval tables
    python eval.py --checkpoint runs/NAME --datasets cifar10 cifar100 --tasks zero-shot knn probe
    python eval.py --checkpoint runs/NAME --datasets temo-17             # zero-shot on the 17 sets of TeMo's Table 7
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco msrvtt=ANNOTATIONS --video-dir VIDEOS
    python eval.py --checkpoint clip_vip:openai/clip-vit-base-patch32 --init-from pretrain_clipvip_base_32.pt ...
    python eval.py --checkpoint runs/NAME --normalize queue              # NCL's test-time normalisation, of any script
    accelerate launch eval.py ... / torchrun --nproc_per_node 2 eval.py ... --cpu  # the same numbers on any number

docs/running.md says what each of the --tasks measures. All is measured as in training, and each value that a flag
changes is printed. The result is a table, eval.json (metrics and chance as in a run's summary.json), and pictures.
"""

import contextlib
import dataclasses
import importlib
import shlex
import sys
from pathlib import Path

from contrastive.data import facts_of, parted
from contrastive.data.images import TEMO_17
from contrastive.data.table import EmptySplit
from contrastive.engine.flags import OneLine
from contrastive.engine.log import versions
from contrastive.engine.processes import UserError, clean_exit, join, rank, read_json, say, world, write_json
from contrastive.engine.ranges import count, nonnegative, whole
from contrastive.evaluation.by_class import view_of
from contrastive.evaluation.case import Subject, resolved
from contrastive.evaluation.clusters import head_mid_tail
from contrastive.evaluation.retrieval import LEARNT, TASKS, lacks, measure, retrieval_both_ways, table, usual_tasks
from contrastive.figures.base import draw_answers, draw_histograms, draw_retrieval, similarity_histograms
from contrastive.figures.ncl import draw_normalization

from ncl import normalized_retrieval, retrieval_biases

SEVENTEEN = "temo-17"


def parse_args(argv=None):
    """The flags."""
    p = OneLine("eval.py", "Evaluate any checkpoint.")
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", required=True, help="run folder, or a CLIP by transformers id or folder")
    g.add_argument("--import", nargs="+", default=[], metavar="MODULE", dest="modules", help="yours, imported first")
    g.add_argument("--init-from", default="", help="weights loaded into that CLIP: .safetensors, .pt or .bin")
    g = p.add_argument_group("data")
    g.add_argument("--datasets", nargs="*", default=[], metavar="NAME[=DIR]",
                   help="names or paths, DIR: a local copy; temo-17 = TeMo's Table 7 (DIR holds a folder of each); "
                        "none = those of the run")
    g.add_argument("--split", choices=["test", "val", "train"], default="test", help="split that is evaluated")
    for flag in "--image-column --caption-column --label-column --video-dir --frame-cache --region-dir".split():
        g.add_argument(flag, default="", help="as in training")
    g.add_argument("--frames", type=whole, default=0, help="frames of a clip; 0 = as in training, 12 for one by name")
    g.add_argument("--text-length", type=whole, default=0, help="most tokens of a text; 0 = as trained, 77 by name")
    g.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR", help="as in training")
    g.add_argument("--class-names", choices=["wordnet", "clip"], default="", help="ImageNet's; empty = wordnet")
    g.add_argument("--max-captions", type=whole, default=0,
                   help="of an image; 5 = COCO's usual 25,000 captions; 0 = all, or as many as the set's protocol has")
    g.add_argument("--same-text", choices=["positive", "wrong"], default="", help="as in training; empty = as the run")
    g = p.add_argument_group("tasks")
    g.add_argument("--tasks", nargs="+", choices=TASKS, default=[],
                   help="one that a set does not support is left out; none = as in training, zero-shot for temo-17")
    g.add_argument("--knn-features", choices=["projected", "backbone"], default="",
                   help="after the projection (TeMo's code) or before it; empty = as the run, else projected")
    g.add_argument("--normalize", choices=["none", "queue", "oracle", "dsl"], default="",
                   help="empty = as the run, else none; NCL's biases, by training queries (the run's queue, else its "
                        "train split) or by the test queries (not fair); dsl: CLIP-ViP's dual softmax (nor is this)")
    g.add_argument("--queue-size", type=count, default=0,
                   help="latest training queries of each kind that count; 0 = the run's whole queue, else 16,384")
    g.add_argument("--gamma", type=nonnegative, default=0.0, help="divides the cosine; 0 = the run's own, dsl: 0.01")
    g = p.add_argument_group("run")
    g.add_argument("--output-dir", default="", help="empty = RUN_DIR/eval, or runs/eval/NAME of a model by name")
    g.add_argument("--workers", type=whole, default=4, help="loader processes")
    g.add_argument("--cpu", action="store_true", help="stay on the CPU")
    args = p.parse_args(argv)
    p.require(args.normalize != "queue" or args.split != "train",
              "--split train: the queue holds its own queries; that is --normalize oracle")
    p.require("qa" not in args.tasks or len(args.tasks) == 1, "--tasks qa: its model answers questions; give it alone")
    own = read_json(Path(args.checkpoint) / "args.json", {})                # of a run; {} of a model by name
    args.as_trained = not args.normalize
    if args.as_trained:
        args.normalize = own.get("normalize", "none") if args.split != "train" else "none"
    p.only(not own, "with a CLIP by name: a run has its own weights", "--init-from")
    p.only(not args.tasks or "retrieval" in args.tasks, "with --tasks retrieval", "--normalize")
    p.only(args.normalize != "none", "with --normalize queue, oracle or dsl", "--gamma")
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
        if name == SEVENTEEN:
            wanted |= {one: folder and str(Path(folder) / one) for one in TEMO_17}
        else:
            wanted[name] = folder
    if "" in wanted:
        raise UserError("--datasets is needed: the data set of this model is not known")
    if args.class_names and not any("--class-names" in facts_of(name).get("options", {}) for name in wanted):
        raise UserError("--class-names: only with an ImageNet; it would have no effect")
    return wanted


class Case:
    """One data set: data, training images, the tasks that can be done on it, and why others are left out."""

    def __init__(self, subject, name, folder, tasks):
        args, names = subject.args, not tasks                              # class names are captions, as in training
        self.subject, self.name, self.split_of, self.train = subject, name, subject.open(name, folder), None
        data = self.split_of(args.split)
        if data.streamed:
            raise UserError(f"--split {args.split}: {name} is a stream in that split; use --split val or test")
        self.data = dataclasses.replace(data, max_captions=args.max_captions or data.max_captions)
        tasks = tasks or usual_tasks(*subject.towers[:2], data)
        if LEARNT & {*tasks} and data.labels is not None and args.split != "train":  # there each would find itself
            with contextlib.suppress(EmptySplit):
                self.train = self.split_of("train")
        why = lacks(tasks, self.data, subject.towers, self.train, names, subject.knn_features)
        self.tasks = [task for task in tasks if not why[task]]
        self.left_out = {task: why[task] for task in tasks if why[task]}

    def evaluate(self):
        """{metrics, chance, left_out: {task: why}, views} of all its tasks, which it prints and draws. Collective."""
        subject, args, name, metrics, chance = self.subject, self.subject.args, self.name, {}, {}
        own = name == subject.own.get("dataset")
        seen, words = view_of(subject.towers[2], name, subject.own.get("dataset"))
        if self.data.note:
            say(f"\n{name} ({args.split}): {self.data.note}")
        if "qa" in self.tasks and subject.own.get("shuffle_video"):
            say(f"WARNING: {name}: the run was a control (--shuffle-video); here each question has its own video")
        if self.tasks:
            metrics, chance, pieces = measure(
                subject.towers, self.data, subject.device, self.tasks, self.train, self.split_of("few-shot"),
                subject.own.get("shot_limits") if own else None, subject.knn_features, args.workers, seen,
                subject.untrained)
            if "retrieval" in self.tasks and (args.normalize != "none" or args.as_trained and subject.queues):
                metrics |= self.normalize(metrics, pieces)
            if "retrieval" in self.tasks:
                metrics |= head_mid_tail(pieces, subject.clusters)
            if "qa" in self.tasks and rank() == 0:
                draw_answers(pieces, subject.picture("answers", name))
            if "retrieval" in self.tasks and rank() == 0:
                bias, *_ = pieces.get("biases", {}).get(args.normalize, [None])
                draw_retrieval(pieces, subject.picture("retrieval", name), bias=bias)
            if "gap" in self.tasks and rank() == 0:
                draw_histograms({args.checkpoint: similarity_histograms(pieces)}, subject.picture("similarities", name),
                                title=f"{name} ({args.split}): image-text cosines")
        say(table(f"\n{name} ({args.split})", metrics, chance) + f"\n  {words}" * bool(words))
        for task, why in self.left_out.items():
            say(f"  left out: {task}: {why}")
        return {"metrics": metrics, "chance": chance, "left_out": self.left_out, "views": words}

    def normalize(self, metrics, pieces):
        """The set's retrieval with NCL's biases, (M,) and (C,), which `pieces` gets, or with the dual softmax."""
        subject, args = self.subject, self.subject.args
        texts, videos = subject.stand_ins(self.name, self.split_of)
        if args.normalize == "dsl":
            by_softmax, _ = retrieval_both_ways(pieces, dsl=subject.gamma)
            results = {"none": {k: metrics[k] for k in by_softmax}, "dsl": by_softmax}
        else:
            how = subject.gamma, subject.own.get("iterations") or 4
            results, pieces["biases"] = normalized_retrieval(pieces, *how, texts, videos)
            if rank() == 0:
                draw_normalization(pieces, *how, {"texts": texts, "videos": videos}, retrieval_biases,
                                   subject.picture("normalization", self.name))
        mode = args.normalize if args.normalize in results else "none"     # another set than the run's has no queue
        return {k: v for k, v in results[mode].items() if k != "error"} | {"normalize": results, "normalized_by": mode}


def main(args):
    """Evaluate, print, write eval.json; returns its content. Raises: UserError if nothing can be measured."""
    for module in args.modules:
        importlib.import_module(module)
    subject = Subject(args, join(args.cpu))
    tasks = args.tasks or ["zero-shot"] * any(parted(word, "=")[0] == SEVENTEEN for word in args.datasets)
    cases = [Case(subject, name, folder, tasks)
             for name, folder in wanted_sets(args, subject.own).items()]   # all are opened before the first is encoded
    if not any(case.tasks for case in cases):
        why = "; ".join(f"{case.name}: {task}: {words}" for case in cases for task, words in case.left_out.items())
        raise UserError(f"--tasks: nothing can be measured: {why}")
    result = {"command": shlex.join([Path(sys.executable).name, *sys.argv]), "checkpoint": args.checkpoint,
              "split": args.split, "versions": versions(args.cpu), "processes": world(),
              "datasets": {case.name: case.evaluate() for case in cases}}
    if rank() == 0:
        write_json(subject.folder / "eval.json", result)
    say(f"\nwritten to {subject.folder}")
    return result


if __name__ == "__main__":
    with clean_exit():
        main(parse_args())
