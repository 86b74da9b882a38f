"""Flags: argparse with errors in one line, recipes, and the flags that all scripts share.

The defaults of the shared flags stand here, once. They are those of small towers that are trained
from scratch on a user's own data. A recipe of a script holds what differs from them.
"""

import argparse
import difflib
import os
import re
import shlex
import sys
from pathlib import Path

from contrastive import CORES
from contrastive.core.files import read_json
from contrastive.core.number_types import (
    below_one, between, fraction, int_ge0, int_ge1, last_best_or_epoch, nonnegative_float,
    part_and_factor, positive_float, rate)
from contrastive.core.processes import print_main
from contrastive.core.words import command_of, flag_of, name_of
from contrastive.data import COLUMN_FLAGS, names_of_evaluation_sets
from contrastive.data.registry import find_data_set, flags_of, partition_name
from contrastive.encoders.weights import packaged_encoders
from contrastive.engine.checkpoints import folder_of

YES_OR_NO = argparse.BooleanOptionalAction
# The flags that a resumed run may change: lengths and the learning rate, which change the steps to
# come, and those of the machine.
LENGTHS_AND_LR = ("epochs", "max_steps", "lr")
OF_MACHINE = (
    # a data set may have moved; Batches compares its content
    "dataset",
    "resume", "cpu", "compile", "save_every", "eval_every", "log_every", "tracker", "data_dir",
    "video_dir", "max_bad_fraction", "workers", "chunk_size", "mixed_precision")
# {flag of other code bases: ours; of several, that of the program}
OTHER_NAMES = {
    "--learning-rate": ["--lr"],
    "--train-data": ["--dataset", "--datasets"],
    "--val-data": ["--eval-datasets", "--datasets"],
    "--temperature": ["--tau", "--tau-min"],
    "--model": ["--image-encoder", "--checkpoint"],
    "--precision": ["--mixed-precision"],
    "--wandb": ["--tracker"],
    "--report-to": ["--tracker"],
    "--name": ["--run-name", "--output-dir"],
    "--logs": ["--output-dir"],
    "--wd": ["--weight-decay"],
    "--max-grad-norm": ["--grad-clip"]}
FROZEN = ("image", "text", "both")  # choices of --freeze whose encoders have constant features
# entries of a recipe that are no flags
NOTES = {"source", "baseline_rates", "needs_weights"}
# groups of flags that are no hyperparameters; the banner does not call them changed
NOT_IN_RECIPES = ("data", "evaluation", "run")
# groups that --help shows first, in this order; others follow as they are added
FIRST_GROUPS = (
    "options", "method", "meta-data", "questions", "I~ and T~", "data", "--dataset",
    "optimisation")


def words_of(name, value):
    """A flag with its value as words of a command line, such as '--tau 0.1'; '' if it is empty."""
    if value is True:
        return flag_of(name)
    if value is False:
        return flag_of("no_" + name)
    if value == "":
        return ""
    values = value if isinstance(value, list) else [value]
    return shlex.join([flag_of(name), *map(str, values)])


def place_in_help(group):
    """The place of a group of flags in --help."""
    title = group.title
    if title.startswith("--dataset"):
        title = "--dataset"  # flags of one data set
    if title in FIRST_GROUPS:
        return FIRST_GROUPS.index(title)
    return len(FIRST_GROUPS)


# ===================================================== argparse ===================================
class Help(argparse.RawDescriptionHelpFormatter):
    """--flag X or --[no-]flag; the default at the end of a help text, in brackets."""

    def _get_help_string(self, action):
        if isinstance(action, argparse._StoreConstAction):
            return action.help
        if action.default is False or action.default in ("", [], None, argparse.SUPPRESS):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} [{' '.join(map(str, action.default))}]"
        if isinstance(action.default, float):
            return f"{action.help} [{action.default:g}]"
        return action.help + " [%(default)s]"

    def _get_default_metavar_for_optional(self, action):
        return "X"

    def _format_action_invocation(self, action):
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0][2:]}"
        return super()._format_action_invocation(action)


class OneLineErrorParser(argparse.ArgumentParser):
    """argparse whose errors are one line from the main process, with exit code 2."""

    def __init__(self, prog, description, **options):
        super().__init__(prog=prog, description=description, allow_abbrev=False,
                         usage="%(prog)s [flags]", formatter_class=Help, **options)
        self.without_effect = set()  # flags, as `only` has them; the banner omits them

    def error(self, message):
        """Ends the process with one line, from the main process."""
        if os.environ.get("RANK", "0") == "0":
            message = re.sub(r"^argument (--[\w-]+)[^:]*: ", r"\1 ", message)
            print("error:", message, file=sys.stderr)
        sys.exit(2)

    def require(self, condition, message):
        """Ends the process with this message unless the condition holds."""
        if not condition:
            self.error(message)

    def only(self, condition, where, *flags):
        """Refuses these flags on the command line unless the condition holds: they would have no
        effect. `where` says when they have one, such as 'with --loss temo'."""
        if condition:
            return
        self.without_effect.update(flags)
        for flag in flags:
            for spelling in (flag, flag.replace("--", "--no-", 1)):
                if spelling in self.command_line_flags:
                    self.error(f"{spelling}: only {where}; it would have no effect")

    def parse_args(self, args=None, namespace=None):
        """As argparse does it, but an unknown flag is answered with the nearest one.

        Sets `command_line_flags`, the flags of the command line as they are spelt there.
        """
        words = sys.argv[1:] if args is None else args
        self.command_line_flags = {str(word).partition("=")[0] for word in words}
        args, unknown = self.parse_known_args(args, namespace)
        has_data = "--dataset" in self._option_string_actions
        if unknown and has_data and not unknown[0].startswith("-"):
            self.error(f"{unknown[0]}: stands behind no flag; data are given as --dataset "
                       f"{unknown[0]}")
        if unknown:
            nearest = self.nearest_flag(unknown[0])
            advice = "--help lists all flags"
            if nearest:
                advice = f"the nearest flag: {nearest}"
            self.error(f"unknown: {' '.join(unknown)}; {advice}")
        return args

    def nearest_flag(self, word):
        """The flag that an unknown one may stand for; "" = none is near."""
        flag = word.partition("=")[0].replace("_", "-")
        for name in OTHER_NAMES.get(flag, []):
            if name in self._option_string_actions:
                return name
        # without the dashes, which make short words alike
        names = [option[2:] for option in self._option_string_actions]
        nearest = difflib.get_close_matches(flag.lstrip("-"), names, 1)
        if nearest:
            return f"--{nearest[0]}"
        return ""


# ===================================================== flags of a script ==========================
class Parser(OneLineErrorParser):
    """The flags of a script: its own groups, then those that all scripts share.

    The default of a flag stands beside it. A recipe overrides defaults, --baseline overrides the
    recipe, and the command line overrides all. The data sets on the command line add flags of their
    own.

    Args:
        file: the script's __file__.
        description: first line of --help.
        texts: whether the script trains on captions.
        needs: flags that a run must have, in the examples of --help.
        data: --dataset and what goes with it in these examples, for scripts that do not train on
            the user's own data; "" = the user's own.
    """

    def __init__(self, file, description, texts=True, needs="", data=""):
        first = f" {needs}" if needs else "  # runs without a download"
        takes_user_data = not data
        if not data:
            data = f"captions.csv {needs}".strip() + "  # columns image, caption"
            if not texts:
                data = "photos  # a folder per class"
        script = command_of(file)
        super().__init__(Path(file).name, f"{description} In brackets: the default.",
                         epilog=f"""examples:
  python {script}{first}
  python {script} --dataset {data}
  python {script} --resume runs/NAME""")
        self.texts = texts
        self.takes_user_data = takes_user_data
        self.recipe_sets = []  # data sets by name that have a recipe

    def parse(self, argv, recipes, baseline=None, check=None):
        """Parses a command line.

        Args:
            argv: words of the command line; None = those of this process.
            recipes: {data set: {flag: value}}, chosen by --dataset or --recipe. The first is the
                default data set, 'own' is for data that have no recipe. The entry 'source' says
                whose values they are, 'baseline_rates' which other flags the paper's baseline has,
                'needs_weights' which weights --init-from has to load.
            baseline: {flag: value} of the flags that --baseline sets.
            check: function (parser, args) that refuses flags which contradict each other.
        Returns: the flags. Exits with one line and code 2 if one is refused.
        """
        self.recipe_sets = [name for name in recipes if find_data_set(name)]
        chosen = self.chosen_flags(argv)
        saved = self.saved_flags(chosen)
        revision = self.choose_recipe(chosen, saved, recipes)

        # now that the data set is known, all flags are
        self.add_shared_flags()
        datasets = [chosen.dataset, *chosen.eval_datasets, *saved.get("eval_datasets", [])]
        self.add_dataset_flags(datasets)
        self._action_groups.sort(key=place_in_help)
        defaults = self.recipe_defaults(recipes[chosen.recipe], chosen)
        if baseline and chosen.baseline:
            defaults.update(baseline)
        defaults["dataset"] = chosen.dataset
        for action in self._actions:
            if action.dest in saved:
                defaults[action.dest] = saved[action.dest]
        defaults.update(recipe="", resume="")
        self.set_defaults(**defaults)

        args = self.parse_args(argv)
        args.dataset, args.recipe = chosen.dataset, chosen.recipe
        args.recipe_source = self.recipe_source(recipes[chosen.recipe], args)
        args.recipes = list(recipes)
        args.revision = revision
        if not revision and chosen.dataset == saved.get("dataset"):
            args.revision = saved.get("revision", "")
        args.hub = saved.get("hub", {})  # commits of what a resumed run has read from the hub
        args.command_line = sorted(self.command_line_flags & self._option_string_actions.keys())
        if "--epochs" in args.command_line and "--max-steps" not in args.command_line:
            args.max_steps = 0  # the recipe, or the run that is resumed, may have steps
        args.changed = list(dict.fromkeys(saved.get("changed", []) + self.changed_flags(args)))
        self.check_resume(saved, args)
        self.require_defaults(args)
        self.require_weights(recipes[chosen.recipe], args)
        self.check_data_flags(args)
        self.only(getattr(args, "freeze", "none") in FROZEN, "with --freeze image, text or both",
                  "--feature-cache")
        if check:
            check(self, args)
        args.method_flags = []  # for the banner
        for name in self.flags_of_group("method"):
            if flag_of(name) not in self.without_effect:
                args.method_flags.append(name)
        return args

    def choose_recipe(self, chosen, saved, recipes):
        """Completes the data set and the recipe of the chosen flags.

        Returns: the revision of a hub data set, '' = the newest.
        """
        word = chosen.dataset or saved.get("dataset") or next(iter(recipes))
        chosen.dataset, revision = partition_name(word, "@")
        saved_recipe = saved.get("recipe", "")
        chosen.recipe = chosen.recipe or saved_recipe
        if not chosen.recipe:
            chosen.recipe = chosen.dataset if chosen.dataset in recipes else "own"
        if chosen.recipe not in recipes:
            self.error(f"--recipe {chosen.recipe}: no such recipe; give one of "
                       f"{', '.join(recipes)}")
        return revision

    def recipe_source(self, recipe, args):
        """Whose values the recipe has, and which flags the paper's baseline has, in words."""
        source = recipe.get("source", "")
        if getattr(args, "baseline", False) and "baseline_rates" in recipe:
            source += f"; the paper's baseline has {recipe['baseline_rates']}"
        return source

    def require_defaults(self, args):
        """Refuses a flag that has a value neither on the command line nor as a default."""
        flags = [flag_of(name) for name, value in vars(args).items() if value is None]
        if flags:
            self.error(f"{'/'.join(flags)}: no default; give one in parse_args or in every recipe")

    def require_weights(self, recipe, args):
        """Refuses the published encoders of a recipe without the released weights that it
        fine-tunes."""
        if "needs_weights" not in recipe or args.image_encoder != recipe["image_encoder"]:
            return
        self.require(not args.pretrained or args.init_from or args.resume,
                     f"--init-from is needed: this recipe fine-tunes {recipe['needs_weights']}, "
                     "and without them it would train encoders that do not belong together; give "
                     "--no-pretrained to train from scratch")

    def chosen_flags(self, argv):
        """The flags of the command line that choose other defaults."""
        chooser = OneLineErrorParser(self.prog, "", add_help=False)
        for flag in ("--dataset", "--recipe", "--resume", "--image-encoder"):
            chooser.add_argument(flag, default="")
        chooser.add_argument("--baseline", action="store_true")
        chooser.add_argument("--eval-datasets", nargs="*", default=[])
        chosen, _ = chooser.parse_known_args(argv)
        return chosen

    def saved_flags(self, chosen):
        """{flag: value} of the run that --resume names, {} without it."""
        if not chosen.resume:
            return {}
        path = folder_of(chosen.resume) / "args.json"
        if not path.is_file():
            self.error(f"--resume {chosen.resume}: is neither the folder of a run nor a checkpoint "
                       "in it")
        saved = read_json(path)
        script = saved.pop("script")
        if script != Path(self.prog).stem:
            self.error(f"--resume {chosen.resume}: a run of {script}.py, not of {self.prog}")
        return saved

    def recipe_defaults(self, recipe, chosen):
        """{flag: default} of a recipe, for the data set and the image encoder that are chosen."""
        script_flags = {action.dest for action in self._actions}
        # of the recipe's data set, which need not be that of the run
        dataset_flags = {name_of(flag) for flag in flags_of(chosen.recipe)}
        unknown = sorted(recipe.keys() - script_flags - dataset_flags - NOTES)
        if unknown:
            self.error(f"recipe {chosen.recipe}: there is no flag {', '.join(unknown)}")
        defaults = {}
        for name, value in recipe.items():
            if name in script_flags:
                defaults[name] = value

        if chosen.recipe == "frozen":
            defaults.update(packaged_encoders(chosen))
        if "eval_datasets" in defaults:
            # the chosen data set takes the place of the recipe's
            names = []
            for name in defaults["eval_datasets"]:
                names.append(chosen.dataset if name == chosen.recipe else name)
            defaults["eval_datasets"] = names
        return defaults

    def changed_flags(self, args):
        """Hyperparameters on the command line that differ from their defaults."""
        changed = []
        for group in self._action_groups:
            if group.title in NOT_IN_RECIPES:
                continue
            for action in group._group_actions:
                if self.command_line_flags.isdisjoint(action.option_strings):
                    continue
                if getattr(args, action.dest) != action.default:
                    changed.append(action.option_strings[0])
        return changed

    def check_resume(self, saved, args):
        """Refuses a flag that a resumed run may not change, and prints the changes to come."""
        if not saved:
            return
        values = vars(args)
        for action in self._actions:
            name = action.dest
            if name not in saved or values[name] == saved[name] or name in OF_MACHINE:
                continue
            if name not in LENGTHS_AND_LR:
                self.error(f"--resume: {flag_of(name)} cannot change in a run, where it is "
                           f"{saved[name]!r}; leave it out, or start a new run")
            change = f"resumed with {words_of(name, saved[name])} -> {values[name]}"
            if name != "lr":
                change += "; from here on the schedules are those of the new length"
            print_main(change)

    def check_data_flags(self, args):
        """Refuses flags without an effect on the training set and the sets that are evaluated."""
        names = [args.dataset, *names_of_evaluation_sets(args)]
        data_sets = list(map(find_data_set, names))
        lacks_val = any(known and known.lacks_only_val() for known in data_sets)
        has_user_data = None in data_sets
        self.only(has_user_data or lacks_val,
                  "for your own data, or a named set that has no val split", "--holdout-fraction")
        self.only(has_user_data, "for your own data", *COLUMN_FLAGS)

    def flags_of(self, title):
        """The flags of a group, as on the command line."""
        return [flag_of(name) for name in self.flags_of_group(title)]

    def flags_of_group(self, title):
        """The names of the flags of a group that have a value."""
        names = []
        for group in self._action_groups:
            if group.title == title:
                for action in group._group_actions:
                    if not isinstance(action, argparse._StoreTrueAction):  # has no --no-FLAG
                        names.append(action.dest)
        return list(dict.fromkeys(names))

    # ---------------------------------------- the flags of several scripts ------------------------
    def add_tau_flags(self, group, tau, tau_clamp, note):
        """Adds --tau, --learnable-tau and --tau-clamp to a group, with the defaults of the script.

        Args: note: values of the papers, which --help shows.
        """
        group.add_argument("--tau", type=positive_float, default=tau,
                           help=f"temperature of InfoNCE, divides the cosine; {note}")
        group.add_argument("--learnable-tau", action=YES_OR_NO, default=False,
                           help="learn the temperature, from --tau on")
        group.add_argument("--tau-clamp", type=positive_float, nargs=2, default=list(tau_clamp),
                           metavar=("LOW", "HIGH"),
                           help="lowest and highest value of a learnt temperature")

    def check_tau_flags(self, args):
        """Refuses --tau-clamp without --learnable-tau, and a --tau outside of it."""
        self.only(args.learnable_tau, "with --learnable-tau", "--tau-clamp")
        low, high = args.tau_clamp
        self.require(not args.learnable_tau or low <= args.tau <= high,
                     f"--tau {args.tau}: a learnt temperature must start within --tau-clamp {low} "
                     f"{high}")

    def add_eps_flag(self, group):
        """Adds --eps to a group, for scripts with a recipe that has another epsilon than Adam's."""
        group.add_argument("--eps", type=between(1e-30, 1e30), default=1e-8,
                           help="Adam's epsilon; CLIP4Clip, VAST 1e-6")

    def add_unfold_flag(self, group):
        """Adds --unfold-captions to a group, for scripts with a recipe of captions of videos."""
        group.add_argument("--unfold-captions", action=YES_OR_NO, default=False,
                           help="an example is a pair of an image or video and one caption, not "
                                "all its captions")

    def add_cc3m_flags(self):
        """Adds the flags of the CC3M trainer, for scripts with its recipe."""
        add = self.add_argument_group("CC3M trainer").add_argument
        add("--clean-captions", action=YES_OR_NO, default=False,
            help="captions in lower case, without punctuation, at most 30 words (CC3M trainer)")
        add("--projection-bias", action=YES_OR_NO, default=False,
            help="new layers from features to embeddings have a bias (CC3M trainer)")

    def add_frozen_flags(self, *choices):
        """Adds the flags of frozen encoders. Args: choices: of --freeze, beside the usual ones."""
        add = self.add_argument_group("frozen encoders").add_argument
        meaning = "encoders that do not learn, only their projections do: none, image, text or both"
        if "clip4clip" in choices:
            meaning += "; clip4clip: a CLIP's embeddings and first norms, as in CLIP4Clip's scripts"
        add("--freeze", choices=["none", *FROZEN, *choices], default="none", help=meaning)
        add("--feature-cache", default="", metavar="DIR",
            help="folder in which the features of frozen encoders are kept, computed once; empty = "
                 "contrastive-temperature in the user's cache folder; none = compute them in each "
                 "step")

    def add_view_flags(self, crop_min, flip, jitter, randaugment=False):
        """Adds the flags of common.training_view, with the defaults of the script.

        Args: randaugment: whether it has a flag, for scripts with the recipe of the CC3M trainer.
        """
        add = self.add_argument_group("view").add_argument
        add("--crop-min", type=fraction, default=crop_min,
            help="smallest crop as a fraction of the area, 0..1, the same in all frames of a clip; "
                 "1 = no crop (CLIP4Clip, MAMA); CC3M code, AVION 0.5")
        add("--flip", type=fraction, default=flip,
            help="horizontal-flip probability, 0..1; CC3M code 0.5, CLIP4Clip, MAMA, SLIP 0")
        add("--jitter", type=nonnegative_float, default=jitter,
            help="strength of the colour jitter: brightness, contrast and saturation; papers 0")
        if randaugment:
            add("--randaugment", type=between(0, 30, int), nargs=2, default=[0, 0],
                metavar=("NUMBER", "MAGNITUDE"),
                help="operations of RandAugment, each with probability 1/2, and their magnitude, "
                     "0..30; CC3M code 2 21 (7 of its 10); 0 0 = off")

    def add_simclr_view_flags(self):
        """Adds the flags of common.simclr_view."""
        add = self.add_argument_group("SimCLR's view").add_argument
        add("--aug-crop-min", type=fraction, default=0.08,
            help="smallest crop as a fraction of the area, 0..1; SimCLR 0.08")
        add("--aug-flip", type=fraction, default=0.5,
            help="horizontal-flip probability, 0..1; SimCLR 0.5")
        add("--aug-hue", type=between(0, 0.5), default=0.1,
            help="strength of the hue jitter, 0..0.5; SLIP 0.1")
        add("--aug-blur", type=fraction, default=0.5, help="blur probability, 0..1; SimCLR 0.5")

    def add_long_tail_flags(self):
        """Adds the flags of training on long-tail images, with TS's values: views, weights, data,
        evaluation."""
        add = self.add_argument_group("views").add_argument
        add("--crop-min", type=fraction, default=0.1,
            help="smallest crop as a fraction of the area, 0..1; authors' code: CIFAR 0.1, "
                 "ImageNet100 0.08")
        add("--flip", type=fraction, default=0.5,
            help="horizontal-flip probability, 0..1; paper 0.5")
        add("--jitter-p", type=fraction, default=0.8,
            help="probability of the colour jitter (--jitter and --hue), 0..1; paper 0.8")
        add("--jitter", type=nonnegative_float, default=0.4,
            help="strength of the jitter of brightness, contrast and saturation; paper 0.4")
        add("--hue", type=between(0, 0.5), default=0.1,
            help="strength of the hue jitter, 0..0.5; paper 0.1")
        add("--grey", type=fraction, default=0.2, help="greyscale probability, 0..1; paper 0.2")
        add("--blur", type=fraction, default=0.0,
            help="blur probability, 0..1; authors' code: ImageNet100 0.5")

        add = self.add_argument_group("weights").add_argument
        add("--decay-all", action=YES_OR_NO, default=True,
            help="apply --weight-decay to biases and norms, too, as the authors' code does")

        add = self.add_argument_group("long tail").add_argument
        add("--imbalance-ratio", type=nonnegative_float, default=0.0,
            help="ratio of the largest class to the smallest, to which train is cut; paper 50, "
                 "100, 150; 1 = balanced; 0 = the data as they are")
        add("--split-seed", type=int_ge0, default=0,
            help="seed of the order of the classes and of their images; paper: 3 splits")
        add("--index-file", default="", metavar="FILE",
            help="training images: .npy of torchvision's indices (CIFAR, Fashion-MNIST), or lines "
                 "'path class' (imagenet100-lt)")
        add("--val-file", default="", metavar="FILE",
            help="val images, as in --index-file; empty = a tenth of each class (CIFAR, "
                 "Fashion-MNIST), none (imagenet100-lt)")
        add("--test-file", default="", metavar="FILE",
            help="test images of imagenet100-lt, as in --index-file")
        add("--few-shot-file", default="", metavar="FILE",
            help="images of imagenet100-lt's few-shot probe, as in --index-file; empty = of each "
                 "class as many training images as the smallest has")

        add = self.add_argument_group("evaluation by class").add_argument
        add("--train-features", choices=["clean", "augmented"], default="clean",
            help="training images of kNN and probes: as they are, or cropped and flipped once; "
                 "authors' code: augmented on CIFAR")
        add("--shot-limits", type=int_ge0, nargs=2, default=[0, 0], metavar=("HEAD", "TAIL"),
            help="head classes have more training images than HEAD, tail classes fewer than TAIL; "
                 "ImageNet100-LT 100 20; 0 0 = thirds")
        add("--eval-crop", type=between(0.1, 1), default=1.0,
            help="fraction of the short side that --eval-resize crop keeps, 0.1..1; ImageNet 0.875")

    def check_long_tail_flags(self, args):
        """Refuses contradictory flags of add_long_tail_flags."""
        self.require(not 0 < args.imbalance_ratio < 1,
                     f"--imbalance-ratio {args.imbalance_ratio}: must be at least 1, or 0 to leave "
                     "the data as they are")
        head, tail = args.shot_limits
        self.require(head == tail == 0 or 0 < tail <= head + 1,
                     f"--shot-limits {head} {tail}: TAIL must be from 1 to HEAD + 1, or both 0")

    # ---------------------------------------- the flags that all scripts share --------------------
    def add_shared_flags(self):
        """Adds the flags that all scripts have."""
        self.add_data_flags()
        self.add_evaluation_flags()
        if self.texts:
            self.add_text_flags()
        self.add_model_flags()
        self.add_optimisation_flags()
        self.add_run_flags()

    def add_data_flags(self):
        add = self.add_argument_group("data").add_argument
        add("--dataset",
            help=f"training data: name of a set ({', '.join(self.recipe_sets)}; docs/data.md has "
                 "all); or a folder, csv, json, jsonl, parquet or tar file; or a hub id (org/name, "
                 "NAME@COMMIT)")
        add("--recipe", metavar="NAME",
            help="set whose defaults apply, whatever the data; empty = --dataset, or 'own' where "
                 "it has no recipe")
        add("--data-dir", default="",
            help="folder of annotation files, and of relative paths to images and videos")
        add("--video-dir", default="",
            help="folder of the videos; empty = --data-dir, else the folder of your own file")
        if self.takes_user_data:
            self.add_column_flags(add)
        add("--frame-cache", default="", metavar="DIR",
            help="folder into which the frames of each clip are decoded once, as JPEGs of quality "
                 "92, which changes them slightly; of random frames 3 fixed ones a segment, of "
                 "which one is drawn; empty = decode always")
        add("--max-bad-fraction", type=fraction, default=0.01,
            help="stop when a larger share of the samples cannot be read, 0..1")
        workers = max(4, min(16, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        add("--workers", type=int_ge0, default=workers,
            help="loader processes of each training process; 0 = load in the process itself")

    def add_column_flags(self, add):
        add("--image-column", default="",
            help="column of a table, or extension in a tar, of the images or videos; empty = the "
                 "usual names")
        if self.texts:
            add("--caption-column", default="",
                help="column of a table, or extension in a tar, of the captions; empty = the usual "
                     "names")
        add("--label-column", default="",
            help="column of a table, or extension in a tar, of the classes; empty = the usual "
                 "names")

    def add_evaluation_flags(self):
        add = self.add_argument_group("evaluation").add_argument
        add("--holdout-fraction", type=between(0, 0.45), default=0.0,
            help="share of train, 0..0.45, that becomes the val split, and of own data the test "
                 "split, where there is none; of small own data more: 20 images or videos, or a "
                 "sixth of all; 0 = 0.05 of own data, nothing of a named set")
        add("--eval-epoch", type=last_best_or_epoch, default="last", metavar="last|best|N",
            help="weights that are saved and tested: of the last step; of the evaluation with the "
                 "best result on val; or of epoch N, after which the run ends")
        if self.texts:
            add("--eval-datasets", nargs="*", default=[], metavar="SET",
                help="sets to test on, in place of --dataset: NAME[=DIR] or a file; if none of "
                     "them has a val split, your own --dataset gives one")

    def add_text_flags(self):
        add = self.add_argument_group("texts").add_argument
        add("--text-encoder", default="small",
            help="text encoder: small, or a transformers id or folder (of a CLIP its text tower)")
        add("--text-pooling", choices=["cls", "mean"], default="mean",
            help="embedding of a text from the tokens of a transformers encoder (a CLIP has its "
                 "own): first token, or mean")
        add("--text-length", type=between(4, 4096, int), default=32,
            help="longest caption in tokens, 4..4096; longer ones are cut")

    def add_model_flags(self):
        add = self.add_argument_group("pixels").add_argument
        add("--image-size", type=between(8, 4096, int), default=64,
            help="height and width of images and frames in pixels, 8..4096")
        add("--image-stats", choices=["encoder", "imagenet", "clip", "half"], default="encoder",
            help="mean and deviation that normalise pixels; encoder: those of its weights")
        add("--eval-resize", choices=["crop", "squash"], default="crop",
            help="how images become squares in evaluation, and in views without a random crop "
                 "(--crop-min 1): scale the short side and crop the centre; or scale both sides "
                 "(CC3M trainer)")
        add("--frames", type=int_ge1, default=12,
            help="frames T of a clip; CLIP4Clip: 12, for paragraphs 64")
        add("--frame-sampling", choices=["uniform", "middle", "random"], default="uniform",
            help="frames of a clip: spread from first to last; the middles of T segments; a "
                 "random one of each segment (in evaluation uniform; middle on epic-kitchens-100, "
                 "youcook2 and ssv2-lt)")
        add = self.add_argument_group("model").add_argument
        image_encoders = (
            "image encoder: small, resnet18-cifar, any timm name, a transformers id or folder; of "
            "whole clips video_NAME (a timm ViT), swin3d_b, clip_vip:NAME (a CLIP)")
        add("--image-encoder", default="small", help=image_encoders)
        add("--pretrained", action=YES_OR_NO, default=False,
            help="start the encoders from published weights")
        add("--init-from", default="",
            help="start the model from these weights: a .safetensors, .pt or .bin file, or a run")
        add("--embed-dim", type=between(2, 10**6, int), default=128,
            help="width D of the embeddings")

    def add_optimisation_flags(self):
        add = self.add_argument_group("optimisation").add_argument
        add("--seed", type=between(0, 2**32 - 1, int), default=42,
            help="seed of the weights, the order of the samples and their views")
        add("--epochs", type=positive_float, default=24.0, help="passes over the training set")
        add("--max-steps", type=int_ge0, default=0,
            help="number of steps, in place of --epochs; 0 = by --epochs")
        add("--batch-size", type=between(2, 10**9, int), default=256,
            help="GLOBAL batch N, over all processes: it sets the number of negatives")
        add("--chunk-size", type=int_ge0, default=0,
            help="examples of each process that are encoded at a time, for less memory with the "
                 "same gradient; 0 = all")
        add("--optimizer", choices=["adamw", "adam", "sgd"], default="adamw",
            help="optimiser; sgd takes the first of --betas as its momentum")
        add("--lr", type=rate, default=2e-3, help="learning rate after the warm-up, its highest")
        add("--lr-scale", type=part_and_factor, nargs="+", default=[], metavar="PART=FACTOR",
            help="factors of --lr for the parts image and text, the encoders without their "
                 "projections, and head, all else; CLIP4Clip image=1e-3 text=1e-3")
        add("--lr-end", type=rate, default=2e-5,
            help="learning rate at the end of the cosine or linear schedule")
        add("--lr-schedule", choices=["cosine", "linear", "constant"], default="cosine",
            help="course of the learning rate after the warm-up")
        add("--warmup-fraction", type=fraction, default=2 / 24,
            help="share of the run, 0..1, in which the learning rate rises to --lr")
        add("--weight-decay", type=rate, default=0.1,
            help="weight decay of matrices and kernels; biases, norms and scalars have none")
        add("--betas", type=below_one, nargs=2, default=[0.9, 0.98], metavar=("FIRST", "SECOND"),
            help="decays of Adam's moments, 0..1; the first is the momentum of sgd")
        add("--grad-clip", type=nonnegative_float, default=1.0,
            help="norm to which the gradient of all parameters is clipped; 0 = off")
        add("--mixed-precision", choices=["no", "fp16", "bf16"], default="no",
            help="precision of the encoders; the loss is always float32")

    def add_run_flags(self):
        add = self.add_argument_group("run").add_argument
        add("--output-dir", default="runs", help="folder in which the folders of runs are made")
        add("--run-name", default="",
            help="name of this run's folder; empty = script, data set, seed and time")
        add("--resume", default="", metavar="RUN",
            help="continue this run from its last checkpoint; or from the one that is given, "
                 "RUN/checkpoints/step_N.pt")
        add("--cpu", action=YES_OR_NO, default=False, help="use the CPU even if there is a GPU")
        add("--compile", action=YES_OR_NO, default=False,
            help="compile the encoders and the colour changes of the views by torch.compile")
        add("--save-every", type=int_ge0, default=500,
            help="steps between checkpoints, which are also written once a minute, before each "
                 "evaluation and at the end; 0 = only before evaluations and at the end")
        add("--eval-every", type=between(-1, 10**9, int), default=-1,
            help="steps between evaluations of the val split, beside those at start and end; 0 = "
                 "only these; -1 = a sixth of the run")
        add("--log-every", type=int_ge0, default=10,
            help="steps between rows of the log; 0 = one at the end")
        add("--tracker", choices=["", "tensorboard", "wandb", "trackio"], default="",
            help="tracker that receives the log, too; empty = none")

    def add_dataset_flags(self, datasets):
        """Adds the flags that these data sets (NAME or NAME=DIR) have of their own."""
        names = [word.partition("=")[0] for word in datasets]
        for name in dict.fromkeys(names):
            options = flags_of(name)
            if not options:
                continue
            group = self.add_argument_group(f"--dataset {name}")
            for flag, keywords in options.items():
                keywords = dict(keywords)
                needs_texts = keywords.pop("texts", False)
                if needs_texts and not self.texts:
                    continue
                if flag in self._option_string_actions:
                    continue  # two sets of a family share it
                group.add_argument(flag, **keywords)
