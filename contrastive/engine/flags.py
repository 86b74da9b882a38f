"""Flags: errors in one line, and the flags that all scripts share. Recipes and saved runs give defaults."""

import argparse
import difflib
import os
import re
import sys
from pathlib import Path

from contrastive import CORES
from contrastive.data import facts_of, parted, splits_of
from contrastive.engine.checkpoints import folder_of
from contrastive.engine.processes import read_json
from contrastive.engine.ranges import below_one, between, count, nonnegative, part, positive, rate, whole


class Help(argparse.HelpFormatter):
    """--flag X, or --[no-]flag; at the end of a line, in brackets, the default that the flag has beside the others."""

    def _get_help_string(self, action):
        nothing = action.default is False or action.default in ("", [], None, argparse.SUPPRESS)
        return action.help + " [%(default)s]" * (not nothing)

    def _get_default_metavar_for_optional(self, action):
        return "X"

    def _format_action_invocation(self, action):
        yesno = isinstance(action, argparse.BooleanOptionalAction)
        return f"--[no-]{action.option_strings[0][2:]}" if yesno else super()._format_action_invocation(action)


class OneLine(argparse.ArgumentParser):
    """argparse whose errors are one line from the main process, exit code 2; --help shows the effective defaults."""

    def __init__(self, prog, description, **more):
        super().__init__(prog=prog, description=description, allow_abbrev=False, usage="%(prog)s [flags]",
                         formatter_class=Help, **more)

    def error(self, message):
        """Ends with one line, from the main process."""
        if os.environ.get("RANK", "0") == "0":
            print("error:", re.sub(r"^argument (--[\w-]+)[^:]*: ", r"\1 ", message), file=sys.stderr)
        sys.exit(2)

    def require(self, holds, message):
        """Refuse the flags with this message unless the condition holds."""
        if not holds:
            self.error(message)

    def only(self, holds, where, *flags):
        """Refuse these flags if the command line has them, unless the condition holds: only then they have an effect.
        Values from a recipe or a saved run are never refused."""
        wrong = [f for flag in flags for f in (flag, flag.replace("--", "--no-", 1)) if f in self.given]
        self.require(holds or not wrong, f"{''.join(wrong[:1])}: only {where}; it would have no effect")

    def parse_args(self, args=None, namespace=None):
        """As argparse does; `given` are the flags of the command line. An unknown one is answered with the nearest."""
        self.given = {str(word).partition("=")[0] for word in (sys.argv[1:] if args is None else args)}
        args, unknown = self.parse_known_args(args, namespace)
        near = difflib.get_close_matches("".join(unknown[:1]), self._option_string_actions, 1)
        self.require(not unknown, f"unknown: {' '.join(unknown)}; near it: {' '.join(near) or 'nothing'}")
        return args


# Flags that a resumed run may change: of what a step computes, the last two change all, --max-steps and --epochs the
# schedules, and the others nothing.
CHANGEABLE = {"--resume", "--cpu", "--compile", "--save-every", "--eval-every", "--log-every", "--tracker",
              "--data-dir", "--video-dir", "--frame-cache", "--max-bad-fraction", "--workers", "--eval-datasets",
              "--max-steps", "--epochs", "--chunk-size", "--grad-checkpointing", "--mixed-precision", "--lr"}


class Parser(OneLine):
    """The flags of a script: its own groups, then those that all scripts share; plain argparse inside.

    `parse` works in two stages: --dataset, --recipe, --loss, --resume and a script's own choosers set the defaults, and
    the other flags override them. The data sets that are named add flags of their own (their SETS says which).

    Args: file: the script's __file__, which names it.   texts: whether the script trains on captions.
    """

    def __init__(self, file, description, texts=True):
        super().__init__(Path(file).name, f"{description} In brackets: the default.")
        self.texts, self.conditions = texts, []

    def group(self, title, **when):
        """A group of flags; for one without a default, every recipe has a value. when: other flags' values beside which
        these have an effect (one, a tuple of some, or True for any), else they are refused; the title says so."""
        g = self.add_argument_group(title)
        self.conditions.append((g, when))
        return g

    def parse(self, argv, recipes, own=None, choosers=(), parts=None):
        """Parsed flags.

        Args: recipes: {dataset: {flag: default}}; the first is the default set, 'own' is for any other; --recipe names
            another one; the entry 'recipe' is a remark; or a function of the choosing flags -> recipes.   own: function
            of the choosing flags -> {flag: default}, over the recipe's.   choosers: further flags of the script that
            choose, as --dataset and --loss do.   parts: function of the parsed flags -> {name: value}, for `when`.
        """
        chooser = OneLine(self.prog, "", add_help=False)
        for flag in ("--dataset", "--recipe", "--resume", "--image-encoder"):
            chooser.add_argument(flag, default="")
        for action in (self._option_string_actions[flag] for flag in ("--loss", *choosers)):
            default = "" if action.default is None else action.default
            chooser.add_argument(*action.option_strings, type=action.type, default=default)
        chooser.add_argument("--eval-datasets", nargs="*", default=[])
        chosen, _ = chooser.parse_known_args(argv)
        saved = read_json(folder_of(chosen.resume) / "args.json") if chosen.resume else {}
        of = saved.pop("script", Path(self.prog).stem)
        self.require(of == Path(self.prog).stem, f"--resume {chosen.resume}: a run of {of}.py, not of {self.prog}")
        recipes = recipes(chosen) if callable(recipes) else recipes
        chosen.dataset, revision = parted(chosen.dataset or saved.get("dataset") or next(iter(recipes)), "@")
        usual = chosen.dataset if chosen.dataset in recipes else "own"
        chosen.recipe = chosen.recipe or saved.pop("recipe", "") or usual
        self.require(chosen.recipe in recipes, f"--recipe {chosen.recipe}: there are {', '.join(recipes)}")
        self._add_shared([chosen.dataset, *chosen.eval_datasets, *saved.get("eval_datasets", [])])
        own = own(chosen) if own else {}
        known, recipe = {a.dest for a in self._actions}, recipes[chosen.recipe]
        of_its_set = {flag[2:].replace("-", "_") for flag in facts_of(chosen.recipe).get("options", {})}  # alone
        wrong = sorted(recipe.keys() - known - of_its_set - {"recipe"})
        self.require(not wrong, f"recipe {chosen.recipe}: there is no flag {', '.join(wrong)}")
        recipe = {k: v for k, v in recipe.items() if k in known - {"recipe"}}
        if sets := recipe.get("eval_datasets"):  # the set that the recipe was made for is the one that is named now
            recipe["eval_datasets"] = [chosen.dataset if name == chosen.recipe else name for name in sets]
        if chosen.image_encoder not in ("", recipe["image_encoder"]):  # its chunks fit the recipe's encoder
            recipe = {k: v for k, v in recipe.items() if k != "chunk_size"}
        defaults = recipe | {"dataset": chosen.dataset} | own | saved
        self.set_defaults(**{k: v for k, v in defaults.items() if k not in ("recipe", "resume")})
        args = self.parse_args(argv)
        args.dataset, args.recipe = chosen.dataset, chosen.recipe
        args.revision = revision or saved.get("revision", "")
        warmups = {"--warmup-epochs", "--warmup-fraction"}
        self.require(not warmups <= self.given, "--warmup-fraction: not beside --warmup-epochs; give one of them")
        for flag in warmups - self.given if warmups & self.given else ():  # the recipe's way gives way
            setattr(args, flag[2:].replace("-", "_"), 0.0)
        if {"--epochs", "--max-steps"} & self.given == {"--epochs"}:
            args.max_steps = 0  # a saved number of steps would win
        args.given = sorted(self.given)  # Run fits others to the data and the image encoder
        usual = {k: v for k, v in saved.items() if k in known - {"resume"}} or recipe | own  # of a resumed run its own
        changed = [f"--{k.replace('_', '-')}" for k, v in usual.items() if getattr(args, k) != v]
        args.changed = [*dict.fromkeys(saved.get("changed", []) + changed)]
        lacking = [f"--{k.replace('_', '-')}" for k, v in vars(args).items() if v is None]
        self.require(not lacking, f"{'/'.join(lacking)}: no default; give one in parse_args or in every recipe")
        wrong = sorted(self.given & {o for a in self._actions for o in a.option_strings} - CHANGEABLE) if saved else []
        self.require(not wrong, f"--resume {chosen.resume}: {''.join(wrong[:1])} cannot change in a run")
        facts = vars(args) | (parts(args) if parts else {})
        for g, when in self.conditions:
            for name, wanted in when.items():
                value = bool(facts[name]) if isinstance(wanted, bool) else facts[name]
                holds = value in wanted if isinstance(wanted, tuple) else value == wanted
                self.only(holds, g.title, *(a.option_strings[0] for a in g._group_actions))
        sets = [chosen.dataset, *(parted(word, "=")[0] for word in getattr(args, "eval_datasets", []))]
        self.only(any(splits_of(s) != splits_of(s, True) for s in sets), "for named sets without val", "--hold-out-val")
        self.only(args.hold_out_val or not all(map(facts_of, sets)), "for own data or --hold-out-val", "--val-fraction")
        self.only(args.optimizer != "sgd", "with --optimizer adamw or adam", "--beta2", "--eps")
        self.only(args.lr_schedule != "constant", "with --lr-schedule cosine or linear", "--lr-end")
        return args

    def _add_shared(self, sets):
        """Adds the flags that all scripts have, whose defaults the recipe gives, and those of the named data sets."""
        yesno = argparse.BooleanOptionalAction
        add = self.add_argument_group("data").add_argument
        add("--dataset", help="name of a set; or a folder, csv, jsonl, parquet, tar or hub id (org/name, NAME@COMMIT)")
        add("--recipe", metavar="NAME", help="defaults of this set, for any data; empty = the set's own, else 'own'")
        add("--data-dir", default="", help="where relative paths start, and where annotation files lie")
        add("--video-dir", default="", help="folder of the videos, by path, name or stem; empty = --data-dir")
        add("--image-column", default="", help="column (or tar extension) of the pictures")
        add("--label-column", default="", help="column of the class, for kNN")
        add("--frame-cache", default="", metavar="DIR", help="decode each video once, into JPEGs in DIR")
        add("--max-bad-fraction", type=part, default=0.01, help="stop if more of the samples are bad")
        cores = CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        add("--workers", type=whole, default=max(4, min(16, cores)), help="loader processes per process; 0 = none")
        if self.texts:
            add("--caption-column", default="", help="column (or tar extension) of the captions")
            add("--extra-captions", default="", metavar="FILE",
                help="table of video, start, end, caption: further captions of training clips")
            add("--extra-pairs", nargs="+", default=[], metavar="SET",
                help="NAME[=DIR] of sets whose pairs join training: howto100m=DIR, captions.csv=DIR")
            add("--streaming", action=yesno, default=False, help="read tars in order, without an index")
        add = self.add_argument_group("evaluation").add_argument
        add("--hold-out-val", action=yesno, default=False, help="a set without val: a part of its train")
        add("--val-fraction", type=between(0.001, 0.9), default=0.05, help="of train, held out where there is no val")
        if self.texts:
            add("--knn-features", choices=["projected", "backbone"], default="projected",
                help="of nearest neighbours: after the projection (TeMo's code), or before")
            add("--same-text", choices=["auto", "positive", "wrong"], default="auto",
                help="of texts that repeat a positive's; auto by set")
            add("--eval-datasets", nargs="*", default=[], metavar="SET", help="NAME[=DIR] of sets; none = --dataset")
            add = self.add_argument_group("texts").add_argument
            add("--text-encoder", help="small, or a transformers id or folder (CLIP: its text tower)")
            add("--text-pooling", choices=["cls", "mean", "ssb"], help="of a transformers encoder other than CLIP's")
            add("--text-length", type=between(4, 4096, int), help="most tokens of a caption; the rest is cut")
            add("--clean-captions", action=yesno, help="lower case, no punctuation, 30 words (CC3M trainer)")
            add("--join-captions", action=yesno, help="all captions of a video as one paragraph")
            add("--unfold-captions", action=yesno, help="each (picture, caption) is an example")
        add = self.add_argument_group("pixels").add_argument
        add("--image-size", type=between(8, 4096, int), help="pixels of a side")
        add("--image-stats", choices=["encoder", "imagenet", "clip", "half"],
            help="mean, std of pixels; encoder: of its weights")
        add("--eval-resize", choices=["crop", "squash"], help="short side, then centre; or both sides (CC3M trainer)")
        add("--frames", type=count, help="T of a clip; CLIP4Clip: 12, for paragraphs 64")
        add("--frame-sampling", choices=["uniform", "middle", "random"],
            help="first to last; middles of T segments; a random one in each (in training)")
        add = self.add_argument_group("model").add_argument
        add("--image-encoder", help="small, resnet18-cifar, any timm name, or a transformers id or folder")
        add("--pretrained", action=yesno, help="start from published weights, or from scratch")
        add("--init-from", default="", help="first weights: a .safetensors, .pt or .bin file, or a run")
        add("--embed-dim", type=between(2, 10**6, int), help="D, width of the space of the loss")
        add("--grad-checkpointing", action=yesno, default=False, help="layers run again for backward: less memory")
        add = self.add_argument_group("optimisation").add_argument
        add("--seed", type=between(0, 2**32 - 1, int), default=42, help="of weights, order and views")
        add("--epochs", type=positive, help="passes over the training set")
        add("--max-steps", type=whole, default=0, help="in place of --epochs; schedules span them; 0 = off")
        add("--batch-size", type=between(2, 10**9, int), help="N, GLOBAL: of all processes; sets the negatives")
        add("--chunk-size", type=whole, default=0, help="examples encoded at a time: less memory; 0 = all")
        add("--optimizer", choices=["adamw", "adam", "sgd"], help="sgd takes --beta1 as its momentum")
        add("--lr", type=rate, help="peak learning rate")
        add("--lr-end", type=rate, help="last learning rate of cosine and linear")
        add("--lr-schedule", choices=["cosine", "linear", "constant"], help="after the warm-up")
        add("--warmup-epochs", type=nonnegative, help="linear warm-up; at most a tenth of the run")
        add("--warmup-fraction", type=part, default=0.0, help="in place of --warmup-epochs: part of the run's steps")
        add("--weight-decay", type=rate, help="not of biases, norms and scalars")
        add("--beta1", type=below_one, help="Adam's first moment")
        add("--beta2", type=below_one, help="Adam's second moment")
        add("--eps", type=between(1e-30, 1e30), help="Adam's epsilon; CLIP4Clip 1e-6")
        add("--grad-clip", type=nonnegative, help="largest global gradient norm; 0 = off")
        add("--mixed-precision", choices=["no", "fp16", "bf16"], help="of encoders; the loss is always float32")
        add = self.add_argument_group("run").add_argument
        add("--output-dir", default="runs", help="folder of all runs")
        add("--run-name", default="", help="its folder; empty = script, data set, seed and time")
        add("--resume", default="", metavar="RUN", help="continue this run exactly, from its last checkpoint")
        add("--cpu", action=yesno, default=False, help="stay on the CPU even if there is a GPU")
        add("--compile", action=yesno, default=False, help="torch.compile the encoders and the views' colours")
        add("--save-every", type=whole, help="steps between checkpoints; 0 = at the end")
        add("--eval-every", type=whole, help="steps between evaluations; 0 = start and end")
        add("--log-every", type=whole, help="steps between rows of the log; 0 = at the end")
        add("--tracker", choices=["", "tensorboard", "wandb", "trackio"], default="", help="log there as well")
        for name in dict.fromkeys(word.partition("=")[0] for word in sets):
            options = facts_of(name).get("options", {})
            g = self.add_argument_group(f"--dataset {name}") if options else None
            for flag, how in options.items():  # two sets of a family share a flag
                if flag not in self._option_string_actions and (self.texts or not how.get("texts")):
                    g.add_argument(flag, **{k: v for k, v in how.items() if k != "texts"})
