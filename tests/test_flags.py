"""Flags of the five scripts: what is refused; what recipes give; what a resumed run may change."""

import argparse
import importlib
import itertools
import json
import re
from argparse import Namespace

from contrastive import data as data_sets
from contrastive.engine.flags import Parser
from contrastive.engine.processes import UserError
from contrastive.engine.run import Run

import pytest
import torch

import ncl
import temo
from helpers import few_steps, refused, write_captions

TS, NAMES = "temperature_schedules", ("temperature_schedules", "mmts", "ncl", "mama", "temo")
each_script = pytest.mark.parametrize("name", NAMES)


def parse(name, words=""):
    return importlib.import_module(name).parse_args(words.split() if isinstance(words, str) else words)


# ----------------------------------------------- what is refused ----------------------------------------------------
NO_EFFECT = {  # the last flag of each, which would do nothing beside the others
    "temo": "--no-base --tau 0.1; --loss ts --tau 0.1; --learnable-tau; --tau-clamp 0.001 0.5; --loss ts --detach-tau;"
            "--loss infonce --no-modulated; --loss infonce --text-expert a/b; --image-expert a --row e; --aug-hue 0;"
            "--image-expert a --text-expert-weight 1; --image-expert-weight 1; --row a --blend fixed;"
            "--row c --similarity cosine; --loss cwcl --tau-alpha=0.1; --unimodal none --paraphrases p.jsonl;"
            "--paraphrase-anchor; --randaugment-magnitude 9; --val-fraction 0.1; --hold-out-val",
    TS: "--schedule fixed --tau-max 0.5; --tau-head 1 --tau-tail 0.1 --schedule step; --learnable-tau; --queue-size 9;"
        "--recipe cifar10-lt --loss sdclr --tau-head 1 --tau-tail 0.1 --learnable-tau; --prune 0.9;"
        "--loss moco --head-norm none; --eval-epoch 3 --stop-at-phase 0.7",
    "mmts": "--learnable-tau; --tau 0.1; --loss max-margin --margin 0.1; --no-shifts --shift-max 1;"
            "--no-schedule --periods 3; --clusters noun --num-clusters 9; --randaugment-magnitude 9;"
            "--loss max-margin --label-smoothing 0.1",
    "ncl": "--margin 0.1; --loss max-margin --learnable-tau; --feature-dir .; --optimizer sgd --beta2 0.9; "
           "--support-tau 1; --text-dropout; --image-encoder ssb --feature-dir . --jitter 0.1",
    "mama": "--lr-schedule constant --lr-end 0; --loss infonce --weighting meta; --weighting l2rw --meta-every 2;"
            "--eta 2; --focal-gamma=2; --spl-start 0.3; --weighting none --meta-batch-size 8;"
            "--margin-schedule none --a0 1; --margin-schedule constant --a2 1;"
            f"--meta-set {__file__} --meta-size 24"}


@pytest.mark.parametrize("name, words", [(name, words) for name in NAMES for words in NO_EFFECT[name].split(";")])
def test_a_flag_without_an_effect_is_refused(name, words, capsys):
    flag = re.findall(r"--[\w-]+", words)[-1]
    said = refused(importlib.import_module(name).parse_args, words.split(), capsys)
    assert said.startswith(f"error: {flag}: only ") and said.endswith("it would have no effect\n"), said


REFUSED = [  # script, flags, words of the one line
    ("temo", "--tau 0", "--tau 0: must be at least 1e-12"),
    ("temo", "--clip-law zipf", "unknown: --clip-law zipf; near it:"),     # of moving-emoji, and not of emoji
    ("temo", "--max-step 2", "unknown: --max-step 2; near it: --max-steps"),
    ("temo", "--warmup-fraction .1 --warmup-epochs 1", "give one of them"),
    ("temo", "--no-base --no-modulated --unimodal none", "leaves no loss"),
    ("temo", "--loss slip --tau 1.5", "--tau-clamp"),
    (TS, "--tau-max 0.05", "must be at least --tau-min"), (TS, "--tau-tail 1", "give both"),
    *[(TS, f"--split-seed 3 --index-file a --test-file b {data}", "--split-seed: only where --imbalance-ratio")
      for data in ("--dataset cifar10-lt", "--dataset imagenet100-lt --data-dir .")],
    (TS, "--schedule fixed --learnable-tau --tau-min 0.001", "--tau-min: if learnt at least 0.01"),
    (TS, "--loss moco --chunk-size 8", "not with --loss moco"), (TS, "--imbalance-ratio 0.5", "at least 1, or 0"),
    (TS, "--stop-at-phase 0.7 --period 99", "no full --period"), (TS, "--eval-epoch last", "must be auto"),
    (TS, "--eval-epoch 31", "at most --epochs 30"), (TS, "--shot-limits 5 0", "or both 0"),
    (TS, "--shot-limits 20 100", "TAIL must be from 1 to HEAD + 1"),
    ("mmts", "--alpha 0.1 --shift-min 0.05", "the temperatures of the run, 0 .. 0.17, must be above 0"),
    ("mmts", "--loss max-margin --alpha 0.5", "the margins of the run, -0.08 .. 0.55, must be from 0"),
    ("mmts", "--loss max-margin --no-shifts --margin 2", "the margins of the run, 1.9 .. 2.1, must be"),
    ("mmts", "--shift-min 0.2 --shift-max 0.1", "--shift-min 0.2: larger than --shift-max 0.1"),
    ("mmts", "--no-schedule --no-shifts --learnable-tau --tau 0.001", "--tau: if learnt in (0.01, 1.0)"),
    ("mmts", "--clusters none", "--shifts need clusters"), ("mmts", "--cluster-encoder small", "no trained weights"),
    ("ncl", "--image-encoder ssb", "--feature-dir"), ("ncl", "--learnable-tau --tau 0.001", "if learnt at least 0.01"),
    ("mama", "--a0 20", "the margin a0 / a1 must be at most pi / 2"), ("mama", "--learnable-tau --tau 2", "if learnt"),
    ("mama", "--chunk-size 4", "--chunk-size: --weighting meta encodes the whole batch")]


@pytest.mark.parametrize("name, words, says", REFUSED)
def test_refused_in_one_line(name, words, says, capsys):
    assert says in refused(importlib.import_module(name).parse_args, words.split(), capsys)


@pytest.fixture
def without_recipe(name, monkeypatch, capsys):
    """The parser of a script whose flags got no value from a recipe, which is refused."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "set_defaults", lambda parser, **recipe: found.append(parser))
        assert ": no default; give one in parse_args" in refused(importlib.import_module(name).parse_args, [], capsys)
    return found[0]


@each_script
def test_a_number_has_a_range(name, without_recipe):
    numbers = [action for action in without_recipe._actions if action.type]
    for action, value in itertools.product(numbers, ("nan", "-1000000001")):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            action.type(value)
    assert len(numbers) > 20


@each_script
def test_the_value_of_a_flag_stands_in_one_place(name, without_recipe):
    """In all recipes, or as its default: an edited default that recipes override would do nothing."""
    own = itertools.takewhile(lambda group: group.title != "data", without_recipe._action_groups)
    defaults = {action.dest for group in own for action in group._group_actions if action.default is not None}
    everywhere = set.intersection(*map(set, importlib.import_module(name).RECIPES.values()))
    assert len(defaults) > 3 and defaults & everywhere <= {"loss"}         # it chooses a recipe


def test_a_misspelt_key_of_a_recipe_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(ncl.RECIPES, "own", ncl.OWN | {"warm_up_epochs": 3.0})
    said = refused(ncl.parse_args, ["--dataset", "mine.csv"], capsys)
    assert said == "error: recipe own: there is no flag warm_up_epochs\n"


# ----------------------------------------------- recipes -------------------------------------------------------------
CLIP4CLIP = dict(lr=1e-7, batch_size=128, queue_size=16_384, iterations=4, tau=0.01, learnable_tau=True,
                 normalize="queue", dropout=0, warmup_epochs=0, freeze="clip4clip")
PAPER = [  # script, flags, what the papers and their code say
    ("temo", "--dataset cc3m", dict(lr=2e-4, weight_decay=0.02, image_size=256, tau_clamp=[0.001, 0.5])),
    ("temo", "--dataset cc3m --loss infonce", dict(lr=8e-4)), ("temo", "--dataset cc3m --loss ts", dict(lr=8e-4)),
    ("temo", "--dataset cc3m --loss dystress-shifted", dict(lr=2e-4, tau_min=0.01, tau_alpha=0.03)),
    ("temo", "--dataset cc3m --loss cwcl", dict(lr=8e-4, tau=0.05)),
    ("temo", "--dataset cc3m --image-encoder vit_base_patch16_224.augreg_in21k_ft_in1k", dict(image_size=224)),
    ("temo", "--dataset cc3m --image-expert a/b", dict(lr=8e-4, modulated=False)),
    ("temo", "--dataset cc12m", dict(lr=3e-3, weight_decay=0.1, tau_clamp=[0.01, 1.0])),
    ("temo", "--dataset cc12m --row a", dict(lr=5e-4, weight_decay=0.5)),
    ("temo", "--dataset cc12m --row e", dict(lr=3e-3)), ("temo", "--dataset cc12m --loss infonce", dict(lr=5e-4)),
    ("temo", "--loss slip", dict(tau=0.07, learnable_tau=True, tau_clamp=[0.01, 1.0])),
    *[("temo", f"--dataset cc3m --row {row}", dict(base=base, modulated=modulated, unimodal=unimodal, lr=lr,
                                                   tau_alpha=0.05 if row == "b" else 0.04))
      for row, base, modulated, unimodal, lr in (
          ("a", True, False, "none", 8e-4), ("b", False, True, "none", 8e-4), ("c", True, False, "plain", 2e-4),
          ("d", True, True, "none", 8e-4), ("e", True, True, "none", 8e-4), ("f", True, True, "modulated", 2e-4),
          ("g", True, True, "modulated", 2e-4))],
    *[("temo", f"--row {row}", dict(blend="fixed" if row in "cdf" else "quadratic")) for row in "cdefg"],
    (TS, "--dataset cifar10-lt", dict(schedule="cos", tau_min=0.1, tau_max=1.0, period=400, eval_epoch="auto",
                                      decay_all=True, zero_init=False, train_features="augmented")),
    (TS, "--dataset cifar10-lt --loss sdclr", dict(schedule="fixed", tau_min=0.2, prune=0.9)),
    (TS, "--dataset imagenet100-lt --loss sdclr", dict(schedule="fixed", tau_min=0.3, prune=0.3)),
    (TS, "--dataset cifar10-lt --loss sdclr --schedule cos", dict(tau_min=0.1, prune=0.9)),
    (TS, "--dataset cifar10-lt --schedule fixed", dict(tau_min=0.2)),
    (TS, "--schedule fixed --tau-min 0.5", dict(tau_min=0.5)), (TS, "", dict(decay_all=False, zero_init=True)),
    (TS, "--dataset cifar10-lt --stop-at-phase 0.7", dict(eval_epoch="")),
    (TS, "--dataset imagenet100-lt", dict(shot_limits=[100, 20], eval_epoch="", eval_crop=0.875, schedule="cos")),
    ("mmts", "--dataset cc3m", dict(alpha=0.04, shift_min=0.05, shift_max=0.1, label_smoothing=0)),
    ("mmts", "--dataset epic-kitchens-100", dict(loss="max-margin", alpha=0.2, shift_min=0.17, shift_max=0.3)),
    ("mmts", "--dataset epic-kitchens-100 --loss infonce", dict(alpha=0.08, shift_min=0.05, shift_max=0.2)),
    ("mmts", "--dataset youcook2", dict(alpha=0.06, shift_min=0.06, shift_max=0.09, label_smoothing=0.1, eps=1e-6)),
    ("mmts", "--dataset youcook2 --loss max-margin", dict(alpha=0.2, shift_min=0.1, shift_max=0.3, label_smoothing=0)),
    ("mmts", "--dataset ssv2-lt", dict(alpha=0.04, shift_min=0.07, shift_max=0.11, label_smoothing=0.1)),
    ("ncl", "--dataset msrvtt", CLIP4CLIP | dict(
        epochs=5, warmup_fraction=0.1, text_length=32, frames=12, unfold_captions=True)),
    ("ncl", "--dataset msvd", CLIP4CLIP | dict(epochs=3, warmup_fraction=0)),
    ("ncl", "--dataset activitynet", CLIP4CLIP | dict(epochs=10, text_length=64, frames=64, unfold_captions=False)),
    ("ncl", "--dataset msrvtt --loss infonce", dict(normalize="none")), ("ncl", "", dict(freeze="none")),
    ("ncl", "--dataset msrvtt --loss max-margin", dict(learnable_tau=False)),
    ("ncl", "--dataset msrvtt --image-encoder resnet18", dict(freeze="none")),
    ("ncl", "--dataset msrvtt --warmup-epochs 1", dict(warmup_epochs=1, warmup_fraction=0)),
    ("ncl", "--warmup-fraction 0.2", dict(warmup_epochs=0, warmup_fraction=0.2)),
    ("mama", "--dataset msrvtt", dict(lr=5e-6, epochs=5, tau=1.0, a0=2.0, a1=10.0, a2=0.1, weighting="meta")),
    ("mama", "--dataset didemo --loss infonce", dict(epochs=20, weighting="none", margin_schedule="none"))]


@pytest.mark.parametrize("name, words, values", PAPER)
def test_recipes_are_the_papers(name, words, values):
    args = vars(parse(name, words))
    assert {k: args[k] for k in values} == values


@each_script
def test_any_recipe_for_any_data(name):
    """All values of the set that --recipe names, but for its place among the evaluation sets, which is the data's."""
    for recipe in importlib.import_module(name).RECIPES:
        known = recipe if recipe != "own" else "other.csv"
        theirs, ours = (vars(parse(name, f"--dataset {data} --recipe {recipe}")) for data in (known, "my.csv"))
        assert ours["recipe"] == recipe and not ours["changed"] and recipe not in ours.get("eval_datasets", ())
        assert {k for k in ours if ours[k] != theirs[k]} <= {"dataset", "eval_datasets", "given"}, recipe
    assert parse(name, "--dataset my.csv").recipe == "own"


def test_a_paper_s_recipe_wants_a_card_or_to_be_told(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: torch.empty(0, device="nowhere"))  # torch says why there is none
    data = str(write_captions(tmp_path, 24))
    args = parse("temo", ["--dataset", data, "--recipe", "cc3m", "--eval-datasets", data])
    with pytest.raises(UserError, match="^recipe cc3m without a card is for --cpu; torch: .*nowhere"):
        temo.main(args)


@pytest.mark.parametrize("examples, batch, epochs", [(23, 20, 500), (600, 256, 250)])
def test_own_data_take_the_batch_that_processes_share_and_500_steps(examples, batch, epochs, monkeypatch):
    """Without --batch-size; without --epochs as many whole epochs as make 500 steps, the warm-up in proportion."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    def fit(words, examples=examples):
        args = parse("temo", words)
        before = args.warmup_epochs / args.epochs
        said = Run._fit(Namespace(args=args, train=Namespace(examples=examples, name="x")))
        assert args.warmup_epochs / args.epochs == before
        return args, said
    args, said = fit("--dataset x.csv")
    assert (args.batch_size, args.epochs) == (batch, epochs) and f"-> {epochs}, which make 500 steps" in said
    assert fit("--dataset x.csv --epochs 3 --batch-size 20")[1] == ""
    with pytest.raises(UserError, match="--batch-size 256: larger than the 3 training examples of x"):
        fit("--dataset x.csv", 3)


def test_flags_of_a_data_set_that_is_evaluated_alone_are_used():
    args = parse("temo", "--dataset emoji --eval-datasets emoji moving-emoji --clips 50 20 10")
    assert [len(data_sets.open_data(args)[1]["moving-emoji"][split]) for split in ("val", "test")] == [20, 10]


def test_the_warm_up_is_a_part_of_the_run(tmp_path):
    log = few_steps(ncl, tmp_path / "r", *"--cpu --clips 64 8 8 --batch-size 16 --max-steps 8 --log-every 1".split(),
                    *"--eval-every 0 --warmup-fraction 0.5".split())
    assert [row["lr"] for row in log[:4]] == pytest.approx([2e-3 * k / 4 for k in (1, 2, 3, 4)])
    assert log[7]["lr"] < log[4]["lr"] <= 2e-3


# ----------------------------------------------- a resumed run ------------------------------------------------------
def test_what_a_resumed_run_may_change(tmp_path, capsys):
    with pytest.raises(UserError, match=f"^{tmp_path}/args.json: .*No such file"):
        parse("temo", ["--resume", str(tmp_path)])
    (tmp_path / "args.json").write_text(json.dumps(vars(parse("temo", "--max-steps 9")) | {"script": "temo"}))
    for flag, now in (("--embed-dim", "32"), ("--loss", "infonce"), ("--dataset", "moving-emoji"), ("--fold", "3"),
                      ("--run-name", "x")):
        said = refused(temo.parse_args, ["--resume", str(tmp_path), flag, now], capsys)
        assert f"{flag} cannot change in a run" in said
    said = refused(ncl.parse_args, ["--resume", str(tmp_path)], capsys)
    assert f"--resume {tmp_path}: a run of temo.py, not of ncl.py" in said
    longer = parse("temo", ["--resume", str(tmp_path), "--epochs", "50"])
    assert (longer.epochs, longer.max_steps) == (50, 0)  # the saved number of steps would win


@pytest.mark.parametrize("name, words", [
    ("temo", "--dataset cc3m --row a --lr 0.1"), ("mmts", "--loss max-margin"), ("mama", "--task qa-open --lr 0.1")])
def test_a_resumed_run_differs_from_its_recipe_as_before(name, words, tmp_path):
    """Its loss, which chose its defaults, is not named again."""
    first = parse(name, words)
    (tmp_path / "args.json").write_text(json.dumps(vars(first) | {"script": name, "resume": ""}))
    resumed = parse(name, ["--resume", str(tmp_path), "--max-steps", "7"])
    assert first.changed and resumed.changed == [*first.changed, "--max-steps"]
