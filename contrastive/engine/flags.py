"""Flags: errors in one line, and the flags that all scripts share. Recipes and saved runs give defaults, and the data
sets that are named add flags of their own."""

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

from common import HELD_OUT, find_set, options_of, splits_of

from contrastive.engine import CORES
from contrastive.engine.base import UserError, first_line, say_error
from contrastive.engine.plan import plan
from contrastive.engine.ranges import below_one, between, count, nonnegative, part, positive, rate, whole
from contrastive.readers.pictures import MAX_PIXELS
from contrastive.sets import MODULES


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """--help with the effective default of every flag, unless it is empty."""

    def _get_help_string(self, action):
        empty = action.default in ("", None) or action.default == []
        return action.help if empty else super()._get_help_string(action)


class OneLine(argparse.ArgumentParser):
    """argparse whose errors are one line from the main process, exit code 2; --help shows the effective defaults."""

    def __init__(self, prog, description, **more):
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=Help, **more)

    def error(self, message):
        """Prints one line and exits with code 2."""
        say_error(re.sub(r"^argument (--[\w-]+)[^:]*: ", r"\1 ", message))  # without argparse's own words
        sys.exit(2)

    def require(self, holds, message):
        """Refuse the flags with this message unless the condition holds."""
        if not holds:
            self.error(message)

    def only(self, holds, where, *flags):
        """Refuse these flags if the command line has them, unless the condition holds: only then they have an effect.
        Values from a recipe or a saved run are never refused."""
        for flag in flags:
            given = next(iter(self.given & {flag, flag.replace("--", "--no-", 1)}), "")
            self.require(holds or not given, f"{given}: only {where}; it would have no effect")

    def parse_args(self, args=None, namespace=None):
        """As argparse does; `given` are the flags of the command line."""
        self.given = {str(word).partition("=")[0] for word in (sys.argv[1:] if args is None else args)}
        return super().parse_args(args, namespace)


def run_args(folder, script):
    """The saved flags of a run, for `--resume`. Raises: UserError for a folder that is not a run of this script."""
    path = Path(folder) / "args.json"
    if not path.is_file():
        raise UserError(f"--resume {folder}: no args.json there; give the run folder that a run printed")
    try:
        saved = json.loads(path.read_text(encoding="utf8"))
        theirs = saved.pop("script", None)
    except (ValueError, TypeError, AttributeError) as error:  # the last two: a list or a number
        raise UserError(f"--resume {folder}: its args.json is damaged ({first_line(error)})") from error
    if theirs != script:
        raise UserError(f"--resume {folder}: a run of {theirs}.py, not of {script}.py; use python {theirs}.py --resume "
                        f"{folder}")
    return saved


# Flags that cannot change in a resumed run.
FIXED = ("dataset", "seed", "batch_size", "loss", "image_encoder", "text_encoder", "embed_dim", "image_size",
         "text_length", "optimizer", "learnable_tau", "clip_law", "fold", "task", "qa_model", "qa_similarity",
         "regions", "shuffle_video", "init_from", "pretrained", "clusters", "num_clusters", "cluster_encoder",
         "cluster_starts", "weight_decay", "beta1", "beta2", "eps", "decay_all")  # the last: in the optimiser's state


def refuse_changes(parser, args, saved):
    """Refuse changes of the flags in FIXED; a run of an older version may not have all of them."""
    learnt = ("tau",) if saved.get("learnable_tau") else ()
    for name in (n for n in FIXED + learnt if n in saved):
        was, now = saved[name], getattr(args, name, None)
        parser.require(was == now, f"--resume {args.resume}: --{name.replace('_', '-')} was {was} in that run and "
                                   f"cannot become {now}; start a new run")


class Parser(OneLine):
    """The flags of a script: its own groups, then those that all scripts share; plain argparse inside.

    `parse` works in two stages: --dataset, --loss and --resume choose the defaults, and the other flags override them.
    The data sets that are named add flags of their own (their SETS says which).

    Args: file: the script's __file__, which names it.   texts: whether the script trains on captions.
    """

    def __init__(self, file, description, texts=True):
        super().__init__(Path(file).name, description)
        self.texts, self.conditions = texts, []

    def group(self, title, when=None, description=None):
        """A group of flags; for one without a default, every recipe has a value. when: function of the parsed flags ->
        whether these flags have an effect; if not, they are refused. The title then names the condition ("with --loss
        ts")."""
        g = self.add_argument_group(title, description)
        self.conditions += [(g, when)] if when else []
        return g

    def parse(self, argv, recipes, losses=None):
        """Parsed flags.

        Args: recipes: {dataset: {flag: default}}; the first is the default set, 'own' is for any other; the entry
            'recipe' is a remark.   losses: {loss: {flag: default}}, or a function of the choosing flags -> defaults.
        """
        self._add_shared()
        chooser = OneLine(self.prog, "", add_help=False)
        first = {"--dataset": None, "--loss": self.get_default("loss"), "--resume": "",
                 "--image-encoder": "", "--batch-size": None, "--epochs": None}
        for flag, default in first.items():
            chooser.add_argument(flag, default=default)
        chooser.add_argument("--eval-datasets", nargs="*", default=[])
        chosen, _ = chooser.parse_known_args(argv)
        try:
            saved = run_args(chosen.resume, Path(self.prog).stem) if chosen.resume else {}
            chosen.dataset = chosen.dataset or saved.get("dataset") or next(iter(recipes))
            self._add_flags_of_sets([chosen.dataset, *chosen.eval_datasets, *saved.get("eval_datasets", [])])
            self._know_all(saved, chosen.resume)
        except UserError as error:
            self.error(str(error))
        own = losses(chosen) if callable(losses) else (losses or {}).get(chosen.loss, {})
        recipe = recipes.get(chosen.dataset, recipes["own"])
        lacking = [a.dest for a in self._actions if a.default is None and a.dest not in ("dataset", *recipe, *own)]
        unknown = sorted((recipe | own).keys() - {a.dest for a in self._actions} - {"recipe"})
        assert not unknown, f"the recipe of {chosen.dataset}: unknown {unknown}"
        named = "/".join(f"--{dest.replace('_', '-')}" for dest in lacking)
        self.require(not lacking, f"{named}: no default; give one in parse_args, or a value in every recipe")
        defaults = recipe | {"dataset": chosen.dataset} | own | saved
        if chosen.image_encoder not in ("", recipe["image_encoder"]) and not saved:
            defaults.pop("chunk_size", None)  # it fits the recipe's encoder: another may have BatchNorm
        unknown_set = chosen.dataset not in recipes
        defaults = {"fit_batch": unknown_set and chosen.batch_size is None, "min_steps": 500 * unknown_set} | defaults
        if chosen.epochs is not None:
            defaults["min_steps"] = defaults["max_steps"] = 0  # those of a saved run
        self.set_defaults(**{k: v for k, v in defaults.items() if k not in ("recipe", "resume", "run_name")})
        args = self.parse_args(argv)
        if saved:
            refuse_changes(self, args, saved)
        self._check(args, saved)
        for g, when in self.conditions:
            self.only(when(args), g.title, *(a.option_strings[0] for a in g._group_actions))
        self.only(args.plan, "with --plan", "--gpu-memory")
        of_run = Path(args.resume).resolve()
        self.only(not args.resume or args.run_name == of_run.name, "without --resume", "--run-name")
        self.only(not args.resume or Path(args.output_dir).resolve() == of_run.parent, "without --resume",
                  "--output-dir")
        self.only(args.optimizer != "sgd", "with --optimizer adamw or adam", "--beta2", "--eps")
        self.only(args.lr_schedule != "constant", "with --lr-schedule cosine or linear", "--lr-end")
        if args.plan:  # printed instead of a run
            try:
                print(plan(args, self.prog))
            except UserError as error:
                self.error(str(error))
            sys.exit(0)
        return args

    def _add_flags_of_sets(self, words):
        """Adds the own flags of the named data sets. Raises: UserError for a set whose file is broken."""
        declared = {}                                                           # two sets of a family share a flag
        for name in dict.fromkeys(word.partition("=")[0] for word in words):
            options = find_set(name).SETS[name].get("options", {}) if name in MODULES else {}
            g = self.add_argument_group(f"--dataset {name}") if options else None
            for flag, how in options.items():
                if declared.get(flag) == how or (how.get("texts") and not self.texts):
                    continue
                declared[flag] = how
                try:
                    g.add_argument(flag, **{k: v for k, v in how.items() if k != "texts"})
                except argparse.ArgumentError:
                    raise UserError(f"--dataset {name}: its file declares {flag}, which exists already") from None

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does; but a flag of a data set that is not named is refused, naming the sets that have it."""
        args, unknown = super().parse_known_args(args, namespace)
        word = next((w for w in unknown if w.startswith("--")), "")
        (flag, _, value), owners = word.partition("="), []
        for name in MODULES if flag else ():
            with contextlib.suppress(UserError):  # a broken file of another set does not matter here
                how = find_set(name).SETS[name].get("options", {}).get(flag)
                owners += [name] if how and (self.texts or not how.get("texts")) else []
        if owners:
            value = value or " ".join(itertools.takewhile(lambda w: not w.startswith("--"),
                                                          unknown[unknown.index(word) + 1:]))
            self.error(f"{flag} {value}: not a flag of --dataset {args.dataset}, but of {', '.join(owners)}")
        return args, unknown

    def _know_all(self, saved, folder):
        """Refuses to resume a run that has flags of another script."""
        of_sets = {option for name in MODULES for option in options_of(name)}  # older runs saved those of all sets
        unknown = sorted(set(saved) - of_sets - {a.dest for a in self._actions})
        self.require(not unknown, f"--resume {folder}: it was run with --{''.join(unknown[:1]).replace('_', '-')}, "
                                  f"which {self.prog} does not know; resume it with the script that made it")

    def _add_shared(self):
        """Adds the flags that all scripts have; the recipe gives the defaults of those without one."""
        yesno = argparse.BooleanOptionalAction
        add = self.add_argument_group("run").add_argument
        add("--output-dir", default="runs", help="folder of all runs")
        add("--run-name", default="",
            help="folder of this run in --output-dir; empty = script, data set, seed and time")
        add("--resume", default="", metavar="RUN_DIR",
            help="continue this run exactly, from its last checkpoint; needs no other flag")
        add("--plan", type=count, nargs="?", const=1, default=0, metavar="CARDS",
            help="print the memory that this run needs on each of so many cards (default one), and end; needs no "
                 "data, no weights and no card")
        add("--gpu-memory", type=positive, default=0.0, metavar="GB",
            help="memory of one card, for --plan, which then says what fits, and in chunks of how many examples")
        add("--cpu", action=yesno, default=False, help="stay on the CPU even if there is a GPU")
        add("--threads", type=between(0, 1024, int), default=0,
            help="CPU threads of each process; 0 = OMP_NUM_THREADS, or cores / local processes")
        add("--compile", action=yesno, default=False,
            help="torch.compile the encoders and the colour operations of the views")
        add("--save-every", type=whole,
            help="optimiser steps between checkpoints (the last two are kept); 0 = only at the end")
        add("--eval-every", type=whole,
            help="optimiser steps between evaluations on the val split; 0 = only before the first step and at the end")
        add("--log-every", type=whole,
            help="optimiser steps between rows of metrics.jsonl; 0 = only at the end")
        add("--figures", choices=["png", "pdf"], default="png",
            help="format of the pictures; pdf for papers: lines and letters stay vectors")
        add("--tracker", choices=["", "tensorboard", "wandb", "trackio"], default="",
            help="log there as well as to metrics.jsonl")
        add = self.add_argument_group("data").add_argument
        add("--fit-batch", action=yesno, default=False,
            help="if the training set is smaller than --batch-size, lower it to what fits, and say so; on by default "
                 "for own data without --batch-size")
        add("--dataset",
            help="the name of a set in sets/; or a folder, csv, tsv, jsonl, parquet, tar, or hub id (org/name)")
        add("--data-dir", default="",
            help="where relative paths start, and where a video set's annotation files lie; empty = beside the "
                 "captions file")
        add("--video-dir", default="",
            help="folder of the videos, found by path, file name or stem; empty = --data-dir")
        add("--image-column", default="",
            help="column (or tar extension) of the images or videos; empty = the usual names")
        add("--label-column", default="", help="column of the class, for kNN; empty = the usual names")
        add("--frame-cache", default="", metavar="DIR", help="decode each video once, into a small JPEG in DIR")
        add("--max-bad-fraction", type=part, default=0.01,
            help="stop when more than this part of the samples tried cannot be read, 0..1")
        add("--max-pixels", type=count, default=MAX_PIXELS,
            help="a larger image counts as damaged and is not read: a small file may hold billions of pixels")
        add("--verify-images", action=yesno, default=False,
            help="before the first step, read every image once, strictly, and leave damaged ones out of training and "
                 "evaluation; bad_samples.txt lists them")
        cores = CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        add("--workers", type=between(0, 1024, int), default=max(4, min(16, cores)),
            help="loader processes per process, at most the number of cores; default: the cores of a process, at least "
                 "4 and at most 16; 0 = none. Sets in memory use none; the samples never depend on it")
        if self.texts:
            add("--caption-column", default="",
                help="column (or tar extension, or json.KEY) of the captions; empty = the usual names")
            add("--extra-captions", default="", metavar="FILE",
                help="csv, jsonl or parquet of video, start, end, caption: further captions of training clips, as "
                     "tools/caption.py writes them; each epoch draws one of all captions of a clip, or with "
                     "--unfold-captions each is an example")
            add("--extra-pairs", nargs="+", default=[], metavar="NAME[=DIR]",
                help="data sets whose pairs are added to the training set, each with the folder of its files: "
                     "howto100m=DIR, or captions.csv=DIR, the csv that tools/caption.py made of its videos")
            add("--streaming", action=yesno, default=False,
                help="read tars in order, without indexing or downloading them first; only for tars")
        add = self.add_argument_group("evaluation").add_argument
        add("--eval-batch", type=count, default=256, help="images, or frames of clips, at a time")
        add("--hold-out-val", action=yesno, default=False,
            help=f"in a set by name without a val split (MSR-VTT, ActivityNet, COCO, CIFAR), hold out {HELD_OUT:.0%}% "
                 "of train as val, so that --eval-every has a split to evaluate")
        if self.texts:
            add("--eval-datasets", nargs="*", default=[], metavar="NAME[=DIR]",
                help="data sets to evaluate (val and test splits), each with an optional local copy (annotations and "
                     "videos); none = --dataset")
            add = self.add_argument_group("texts").add_argument
            add("--text-encoder", help="small, or a transformers id or folder (CLIP: its text tower)")
            add("--text-pooling", choices=["cls", "mean", "ssb"],
                help="pooling of a transformers text encoder (CLIP has its own); CC3M trainer: cls; ssb: SSB's "
                     "convolution and transformer")
            add("--text-length", type=between(4, 4096, int), help="most tokens of a caption; the rest is cut")
            add("--clean-captions", action=yesno, help="lower case, no punctuation, 30 words, as the CC3M trainer")
            add("--join-captions", action=yesno,
                help="join the captions of a video to one paragraph (ActivityNet and DiDeMo always do)")
            add("--unfold-captions", action=yesno,
                help="make each (image or clip, caption) a training example, instead of drawing a caption each epoch")
        add = self.add_argument_group("pixels").add_argument
        add("--image-size", type=between(8, 4096, int), help="pixels of a side")
        add("--image-stats", choices=["encoder", "imagenet", "clip", "half"],
            help="mean and std of the pixels; encoder = those its weights were trained with")
        add("--eval-resize", choices=["crop", "squash"],
            help="evaluation view: resize the short side and crop the centre, or resize both sides (CC3M trainer)")
        add("--frames", type=count, help="T, frames of a clip; CLIP4Clip: 12, for paragraphs 64")
        add("--frame-sampling", choices=["uniform", "middle", "random"],
            help="frames from the first to the last; the middles of T segments; a random one in each (in training)")
        add = self.add_argument_group("model").add_argument
        add("--image-encoder",
            help="small, resnet18-cifar, any timm name, or a transformers id or folder (CLIP: its vision tower)")
        add("--pretrained", action=yesno, help="start from published weights; --no-pretrained = from scratch")
        add("--init-from", default="",
            help="a .safetensors, .pt or .bin file, or a run folder, whose tensors are loaded first, for the model or "
                 "one encoder; timm weights are then only read if none of them is the image encoder's")
        add("--embed-dim", type=between(2, 10**6, int),
            help="D, width of the space of the loss; a paper's recipe has the paper's value")
        add = self.add_argument_group("optimisation").add_argument
        add("--seed", type=between(0, 2**32 - 1, int), default=42, help="seed of weights, order and views")
        add("--epochs", type=positive, help="passes over the training set; a paper's recipe has the paper's value")
        add("--min-steps", type=whole, default=0,
            help="train more epochs if they have fewer steps; default 500 for own data without --epochs; 0 = off")
        add("--max-steps", type=whole, default=0,
            help="optimiser steps instead of --epochs; every schedule spans them; 0 = off")
        add("--batch-size", type=between(2, 10**9, int),
            help="N, GLOBAL: split over processes; sets the negatives; a paper's recipe has the paper's value")
        add("--chunk-size", type=whole, default=0,
            help="examples encoded at a time on each process: less memory, the full batch's gradient; 0 = all")
        add("--allow-batchnorm-chunks", action=yesno, default=False, help="allow BatchNorm per chunk, an approximation")
        add("--optimizer", choices=["adamw", "adam", "sgd"], help="sgd takes --beta1 as its momentum")
        add("--lr", type=rate, help="peak learning rate")
        add("--lr-end", type=rate, help="last learning rate of a cosine or linear schedule")
        add("--lr-schedule", choices=["cosine", "linear", "constant"], help="after the warm-up")
        add("--warmup-epochs", type=nonnegative, help="epochs of linear warm-up; at most a tenth of the run")
        add("--weight-decay", type=rate, help="decay of matrices and kernels; none for biases, norms and scalars")
        add("--beta1", type=below_one, help="Adam's first moment")
        add("--beta2", type=below_one, help="Adam's second moment")
        add("--eps", type=between(1e-30, 1e30), help="Adam's epsilon; CLIP4Clip 1e-6")
        add("--grad-clip", type=nonnegative, help="largest global gradient norm; 0 = off")
        add("--mixed-precision", choices=["no", "fp16", "bf16"], help="for the encoders; the loss is always float32")
        add("--tf32", action=yesno, default=True,
            help="on a CUDA card, use TF32 for float32 products of the encoders in training; never for the loss")

    def _check(self, args, saved):
        """Checks the combinations of flags that no script accepts."""
        for flag in ("dataset", "resume", "eval_datasets"):
            given, value = f"--{flag.replace('_', '-')}", getattr(args, flag, None)
            empty = "" in value if isinstance(value, list) else not value
            self.require(given not in self.given or not empty, f"{given}: empty; is a variable of the shell not "
                                                               "set?")
        processes = int(os.environ.get("WORLD_SIZE", 1))
        batch, local = args.batch_size, args.batch_size // processes
        self.require(batch % processes == 0, f"--batch-size {batch}: not divisible by {processes} processes; use "
                                             f"{local * processes or processes}")
        if "--chunk-size" not in self.given and args.chunk_size >= local:  # of the recipe, for a larger batch
            args.chunk_size = 0
        self.require(args.chunk_size <= local, f"--chunk-size {args.chunk_size}: larger than the {local} examples of "
                                               "--batch-size on each process")
        names = [args.dataset, *(word.partition("=")[0] for word in getattr(args, "eval_datasets", []))]
        self.require(not args.hold_out_val or any("val" not in splits_of(name) for name in names),
                     f"--hold-out-val: only for a set by name with just train and test, not {', '.join(names)}")
        known = find_set(args.dataset)
        drawn = known and known.SETS[args.dataset].get("drawn")
        self.only(not drawn, "for data in files", "--data-dir")
        self.only(not drawn or getattr(args, "eval_datasets", None), "for data in files", "--image-column",
                  "--caption-column", "--label-column", "--frame-cache", "--extra-captions")
        for folder in getattr(args, "feature_dir", None) or []:
            self.require(Path(folder).is_dir(), f"--feature-dir {folder}: no such folder")
        for name in ("init_from", "region_dir", "data_dir", "video_dir", "extra_captions", "index_file", "test_file",
                     "val_file", "few_shot_file"):
            path = getattr(args, name, "")
            if path and not (saved and name == "init_from"):
                self.require(Path(path).exists(), f"--{name.replace('_', '-')} {path}: no such path")
