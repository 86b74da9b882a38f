"""Flags of the five scripts: what is refused; what recipes give; what a resumed run may change."""

import argparse
import contextlib
import importlib
import itertools
import json
import re
import shlex
from argparse import Namespace

from contrastive import data as data_sets
from contrastive.core.processes import UserError
from contrastive.data.options import DataOptions
from contrastive.data.registry import find_data_set
from contrastive.engine import banner
from contrastive.engine.flags import Parser
from contrastive.engine.run import count_steps, adjust_flags_to_data
from contrastive.encoders.models import adjust_flags_to_encoder

import pytest
import torch

import ncl
import temo
from variants import temo_experts
from helpers import refused, write_captions

TS, NAMES = "temperature_schedules", ("temperature_schedules", "mmts", "ncl", "mama", "temo")
VARIANTS = ("mama_qa", "mmts_vast", "ncl_ssb", "sdclr", "slip", "temo_experts")
PROGRAMS = (*NAMES, *(f"variants.{name}" for name in VARIANTS))
each_script = pytest.mark.parametrize("name", NAMES)


def parse(name, words=""):
    return importlib.import_module(name).parse_args(
        words.split() if isinstance(words, str) else words
    )


# ----------------------------------------------- flags without an effect ------------------------
SMALL = (
    "--cpu --workers 0 --dataset moving-emoji --clips 16 8 8 --batch-size 8 --image-size 16 "
    "--frames 2 --eval-every 0 --max-steps 1 --log-every 1"
).split()
# flags of temo.py: a command line, and one flag that would do nothing beside it
WITHOUT_EFFECT = [
    ("--row a", "--tau-min .1"),
    ("--row a", "--similarity cosine"),
    ("--row b", "--tau .2"),
    ("--loss ts", "--tau .1"),
    ("--loss dystress", "--similarity cosine"),
    ("--baseline", "--tau-min .1"),
    ("", "--tau-clamp .001 .5"),
    ("--row e", "--grad-augmented"),
    ("--row a", "--paraphrases p.jsonl"),
    ("--loss cwcl", "--image-aug crop"),
    ("", "--no-paraphrase-anchor"),
    ("", "--aug-hue 0"),
]


@pytest.mark.parametrize("others, useless", WITHOUT_EFFECT)
def test_a_flag_without_effect_is_refused(others, useless, capsys):
    said = refused(temo.parse_args, [*others.split(), *useless.split()], capsys)
    assert re.match(rf"error: {useless.split()[0]}: only with.*; it would have no effect", said)


def test_the_method_of_the_banner_can_be_pasted():
    """All flags of the method group that have a value; a value with a space is quoted."""
    words = ["--image-expert", "a folder", "--learnable-tau", "--tau-clamp", ".001", "1"]
    args = temo_experts.parse_args(words)
    line = banner.method_line(Namespace(args=args))
    assert line.count("\\\n") == line.count("\n") > 0
    again = temo_experts.parse_args(shlex.split(line.replace("\\\n", "")))
    names = args.method_flags
    assert {k: vars(again)[k] for k in names} == {k: vars(args)[k] for k in names}
    assert "tau_min" in names and "tau" in names and "lr" not in names


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_the_method_the_data_and_the_lengths_first(name, capsys, monkeypatch):
    """The data sets that have a recipe are named, and the commands at the end can be parsed."""
    monkeypatch.setenv("COLUMNS", "1000")  # no line is divided
    with pytest.raises(SystemExit):
        parse(name, "--help")
    text = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", text, re.M)
    assert titles[:2] == ["options", "method"] and titles[-2:] == ["run", "examples"]
    places = [titles.index(title) for title in ("method", "data", "optimisation", "model", "run")]
    assert places == sorted(places)
    module = importlib.import_module(name)
    sets = [recipe for recipe in module.RECIPES if find_data_set(recipe)]
    assert f"name of a set ({', '.join(sets)}; docs/data.md has all)" in text
    commands = [shlex.split(line, comments=True) for line in text.splitlines()[-3:]]
    for python, *words in commands[:2]:
        args = module.parse_args(words[1 + name.count("."):])
        assert python == "python" and not args.resume
    assert commands[2][-2:] == ["--resume", "runs/NAME"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_at_most_75_flags_beside_those_of_a_data_set(name, capsys):
    with pytest.raises(SystemExit):
        parse(name, "--help")
    text = re.sub(r"\n--dataset.*?\n\n", "\n", capsys.readouterr().out, flags=re.S)
    num_flags = len(re.findall(r"^  --", text, re.M))
    assert num_flags <= 75


# ----------------------------------------------- what is refused ---------------------------------
REFUSED = [  # script, flags, words of the one line
    ("temo", "--tau 0", "--tau 0: must be at least 1e-12"),
    (
        "temo",
        "--clips 9 2 2",
        "unknown: --clips 9 2 2; the nearest flag:",
    ),  # of moving-emoji, and not of emoji
    ("temo", "captions.csv --cpu", "data are given as --dataset captions.csv"),
    ("temo", "--max-step 2", "unknown: --max-step 2; the nearest flag: --max-steps"),
    ("temo", "--learnable-tau --tau 1.5", "must start within --tau-clamp 0.001 0.5"),
    ("temo", "--baseline --loss cwcl", "--loss cwcl: --baseline is --loss infonce"),
    ("temo", "--lr-scale body=2", "--lr-scale body=2: give image=FACTOR, text=FACTOR or head="),
    ("temo", "--eval-epoch first", "--eval-epoch first: give last, best or an epoch"),
    ("ncl", "--learnable-tau --tau 0.001", "must start within --tau-clamp 0.01 100"),
    ("ncl", "--tau-clamp 0.01 1", "--tau-clamp: only with --learnable-tau"),
    ("mama", "--a0 20", "the margin a0 / a1 must be at most pi / 2"),
    ("mama", "--learnable-tau --tau 2", "a learnt temperature must start within --tau-clamp"),
    ("mama", "--chunk-size 4", "--chunk-size: --weighting meta encodes the whole batch"),
    ("mama", "--lr-scale image=2", "--lr-scale: the virtual step of --weighting meta has one"),
    ("mama", "--betas 1 .98", "--betas 1: must be between 0 and 0.9999999"),
]


@pytest.mark.parametrize("name, words, says", REFUSED)
def test_refused_in_one_line(name, words, says, capsys):
    assert says in refused(importlib.import_module(name).parse_args, words.split(), capsys)


@pytest.fixture
def without_recipe(name, monkeypatch):
    """The parser of a script whose flags got no value from a recipe."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "set_defaults", lambda parser, **recipe: found.append(parser))
        with contextlib.suppress(SystemExit):  # where a flag has no default
            importlib.import_module(name).parse_args([])
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
    """In all recipes, or as its default: an edited default that recipes override would do nothing.
    """
    own = itertools.takewhile(lambda group: group.title != "data", without_recipe._action_groups)
    defaults = {
        action.dest
        for group in own
        for action in group._group_actions
        if action.default is not None
    }
    everywhere = set.intersection(*map(set, importlib.import_module(name).RECIPES.values()))
    assert len(defaults) > 3 and defaults & everywhere <= {"loss"}  # it chooses a recipe


def test_a_misspelt_key_of_a_recipe_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(ncl.RECIPES, "own", ncl.OWN | {"warm_up_epochs": 3.0})
    said = refused(ncl.parse_args, ["--dataset", "mine.csv"], capsys)
    assert said == "error: recipe own: there is no flag warm_up_epochs\n"


# ----------------------------------------------- recipes ------------------------------------------
CLIP4CLIP = dict(
    lr=1e-7,
    batch_size=128,
    queue_size=16_384,
    iterations=4,
    tau=0.01,
    learnable_tau=True,
    freeze="clip4clip",
)
PAPER = [  # script, flags, what the papers and their code say
    (
        "temo",
        "--dataset cc3m",
        dict(lr=2e-4, weight_decay=0.02, image_size=256, tau_clamp=[0.001, 0.5]),
    ),
    ("temo", "--dataset cc3m", dict(tau=0.01, tau_min=0.01, tau_alpha=0.04, jitter=0)),
    ("temo", "--dataset cc12m", dict(lr=3e-3, weight_decay=0.1, tau_clamp=[0.01, 1.0])),
    (
        TS,
        "--dataset cifar10-lt",
        dict(
            schedule="cos",
            tau_min=0.1,
            tau_max=1.0,
            period=400,
            eval_epoch="best",
            decay_all=True,
            train_features="augmented",
        ),
    ),
    (TS, "--dataset cifar10-lt --schedule fixed", dict(tau=0.2)),
    (TS, "", dict(decay_all=False)),
    (
        TS,
        "--dataset imagenet100-lt",
        dict(shot_limits=[100, 20], eval_epoch="last", eval_crop=0.875, schedule="cos"),
    ),
    ("mmts", "--dataset cc3m", dict(alpha=0.04, shift_min=0.05, shift_max=0.1)),
    (
        "mmts",
        "--dataset epic-kitchens-100 --init-from w.pt",
        dict(loss="max-margin", alpha=0.2, shift_min=0.17, shift_max=0.3),
    ),
    ("mmts", "--dataset cc3m --baseline", dict(tau=0.01, schedule=False, shifts=False)),
    (
        "variants.mmts_vast",
        "--dataset youcook2 --init-from w",
        dict(alpha=0.06, shift_min=0.06, shift_max=0.09, label_smoothing=0.1, eps=1e-6, lr=3e-5)
        | dict(image_encoder="vast", modalities="vas", matching_weight=0.1, drop_path=0.4)
        | dict(frames=8, eval_frames=16, text_length=40, warmup_fraction=0.1, betas=[0.9, 0.98])
        | dict(batch_size=64, epochs=30, grad_clip=0, weight_decay=0.01, lr_schedule="linear"),
    ),
    (
        "variants.mmts_vast",
        "--dataset ssv2-lt --init-from w",
        dict(alpha=0.04, shift_min=0.07, shift_max=0.11, label_smoothing=0.1, modalities="v"),
    ),
    (
        "ncl",
        "--dataset msrvtt",
        CLIP4CLIP
        | dict(
            epochs=5, warmup_fraction=0.1, text_length=32, frames=12, unfold_captions=True,
            normalize="queue"),
    ),
    ("ncl", "--dataset msvd", CLIP4CLIP | dict(epochs=3, warmup_fraction=0)),
    (
        "ncl",
        "--dataset activitynet",
        CLIP4CLIP | dict(epochs=10, text_length=64, frames=64, unfold_captions=False),
    ),
    ("ncl", "--dataset msrvtt --baseline", CLIP4CLIP | dict(loss="infonce", normalize="none")),
    ("ncl", "", dict(freeze="none")),
    (
        "mama",
        "--dataset msrvtt",
        dict(lr=5e-6, epochs=5, tau=1.0, a0=2.0, a1=10.0, a2=0.1, weighting="meta"),
    ),
    (
        "mama",
        "--dataset didemo --baseline",
        dict(epochs=20, weighting="none", margin_schedule="none"),
    ),
]


@pytest.mark.parametrize("name, words, values", PAPER)
def test_recipes_are_the_papers(name, words, values):
    args = vars(parse(name, words))
    assert {k: args[k] for k in values} == values


@each_script
def test_any_recipe_for_any_data(name, frozen_packages):
    """All values of the set that --recipe names, but for its place among the evaluation sets, which
    is the data's."""
    script = importlib.import_module(name)
    for recipe in script.RECIPES:
        known = recipe if recipe != "own" else "other.csv"
        weights = "--init-from w.pt" if recipe == "epic-kitchens-100" else ""
        theirs, ours = (
            vars(parse(name, f"--dataset {data} --recipe {recipe} {weights}"))
            for data in (known, "my.csv")
        )
        assert ours["recipe"] == recipe
        assert ours["changed"] == weights.split()[:1]
        assert recipe not in ours.get("eval_datasets", ())
        different = {k for k in ours if ours[k] != theirs[k]}
        assert different <= {"dataset", "eval_datasets", "command_line"}, recipe
    assert parse(name, "--dataset my.csv").recipe == "own"


def test_a_paper_s_recipe_needs_a_gpu_or_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # torch says why there is none
    monkeypatch.setattr(torch.cuda, "init", lambda: torch.empty(0, device="nowhere"))
    data = str(write_captions(tmp_path, 24))
    args = parse(
        "temo",
        ["--dataset", data, "--recipe", "cc3m", "--eval-datasets", data, "--batch-size", "16"],
    )
    with pytest.raises(
        UserError, match="^recipe cc3m needs a GPU; without one add --cpu; torch: .*nowhere"
    ):
        temo.main(args)


class TrainingSet(list):
    name = "x"


@pytest.mark.parametrize("examples, batch, epochs", [(23, 16, 500), (7, 4, 500), (800, 256, 167)])
def test_own_data_take_the_batch_that_processes_share_and_500_steps(
    examples, batch, epochs, monkeypatch, capsys
):
    """Without --batch-size a multiple of 8, from 8 examples on; without --epochs as many whole
    epochs as make 500 steps."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    def fit(words, examples=examples):
        args = parse("temo", words)
        return adjust_flags_to_data(args, TrainingSet(range(examples)))

    args = fit("--dataset x.csv")
    assert (args.batch_size, args.epochs) == (batch, epochs)
    steps = int(epochs * (examples // batch))
    out = capsys.readouterr().out
    assert f"--epochs 24 -> {epochs}, which make {steps} steps" in out
    args = fit("--dataset x.csv --epochs 3 --batch-size 4")
    assert (args.batch_size, args.epochs) == (4, 3)
    words = "--batch-size 256: larger than the number of training examples of x, 3; give more"
    with pytest.raises(UserError, match=words):
        fit("--dataset x.csv", 3)
    with pytest.raises(UserError, match="x: a single training example has no negatives; give"):
        fit("--dataset x.csv", 1)


@pytest.mark.parametrize("examples, batch", [(101, 96), (15, 8)])
def test_the_batch_of_small_own_data_does_not_depend_on_the_processes(
    examples, batch, monkeypatch
):
    for processes in (1, 2, 4, 8):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        args = parse("temo", "--dataset x.csv")
        fitted = adjust_flags_to_data(args, TrainingSet(range(examples)))
        assert fitted.batch_size == batch


def test_flags_of_a_data_set_that_is_evaluated_alone_are_used():
    args = parse("temo", "--dataset emoji --eval-datasets emoji moving-emoji --clips 50 20 10")
    assert [
        len(data_sets.open_data(args)[1]["moving-emoji"][split]) for split in ("val", "test")
    ] == [20, 10]


def test_a_warm_up_of_less_than_half_a_step_is_none():
    args = Namespace(batch_size=16, max_steps=40, epochs=1, warmup_fraction=0.01)
    assert count_steps(args, range(160)).warmup == 0
    args.warmup_fraction = 0.1
    assert count_steps(args, range(160)).warmup == 4


# ----------------------------------------------- a resumed run ------------------------------------
def test_what_a_resumed_run_may_change(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse("temo", ["--resume", str(tmp_path)])
    assert f"--resume {tmp_path}: is neither the folder of a run" in capsys.readouterr().err
    (tmp_path / "args.json").write_text(
        json.dumps(vars(parse("temo", "--max-steps 9")) | {"script": "temo"})
    )
    for flag, now in (
        ("--embed-dim", "32"),
        ("--loss", "infonce"),
        ("--run-name", "x"),
    ):
        said = refused(temo.parse_args, ["--resume", str(tmp_path), flag, now], capsys)
        assert f"--resume: {flag} cannot change in a run, where it is" in said
    # the same value is no change
    words = "--dataset emoji --loss temo --embed-dim 128 --no-detach-tau"
    same = parse("temo", ["--resume", str(tmp_path), *words.split()])
    assert (same.loss, same.max_steps, same.changed) == ("temo", 9, ["--max-steps"])
    said = refused(ncl.parse_args, ["--resume", str(tmp_path)], capsys)
    assert f"--resume {tmp_path}: a run of temo.py, not of ncl.py" in said
    longer = parse("temo", ["--resume", str(tmp_path), "--epochs", "50"])
    assert (longer.epochs, longer.max_steps) == (50, 0)  # the saved number of steps would win


def test_an_encoder_that_a_resume_repeats_chooses_no_other(tiny, tmp_path):
    """A CLIP as --image-encoder chooses --text-encoder, but not in a resumed run."""
    clip, _ = tiny("clip")
    words = ["--image-encoder", clip, "--text-encoder", "small"]
    saved = vars(adjust_flags_to_encoder(parse("temo", words))) | {"script": "temo"}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    same = adjust_flags_to_encoder(parse("temo", ["--resume", str(tmp_path), *words[:2]]))
    assert same.text_encoder == "small" and same.embed_dim == saved["embed_dim"]


def test_flags_of_other_code_bases(capsys):
    for word, flag in (
        ("--learning-rate=1", "--lr"), ("--train-data", "--dataset"),
        ("--val_data", "--eval-datasets"), ("--temperature", "--tau"),
        ("--model", "--image-encoder"), ("--precision", "--mixed-precision"),
        ("--wandb", "--tracker"), ("--report-to", "--tracker"), ("--name", "--run-name"),
        ("--logs", "--output-dir"), ("--wd", "--weight-decay"), ("--max-grad-norm", "--grad-clip"),
        ("--tau-mim", "--tau-min"), ("--zzzzzzz", "nothing"),
    ):
        message = refused(temo.parse_args, [word], capsys)
        assert message.split("; ")[1].strip() == f"the nearest flag: {flag}"


@pytest.mark.parametrize("words, where", [
    ("--holdout-fraction 0.1", "for your own data, or a named set that has no val"),  # emoji has
    ("--dataset coco --caption-column a", "for your own data"),
    ("--dataset coco --label-column=a", "for your own data")])
def test_flags_without_effect_on_the_data(words, where, capsys):
    message = refused(temo.parse_args, words.split(), capsys)
    assert f": only {where}" in message and message.endswith("; it would have no effect\n")


@pytest.mark.parametrize("words", [
    "--dataset x.csv --holdout-fraction 0.1 --image-column a",
    "--dataset cifar10 --holdout-fraction 0.1",
    "--eval-datasets imagenet --holdout-fraction 0.1",
    "--dataset coco --eval-datasets x.csv --caption-column a"])
def test_flags_with_effect_on_some_of_the_data(words):
    temo.parse_args(words.split())


def test_options_of_a_set_that_is_evaluated():
    """Folders, columns and captions of the training set are its own."""
    words = ("--dataset x.csv --eval-datasets coco y.csv --data-dir a --video-dir b "
             "--caption-column c --unfold-captions --frames 3")
    args = ncl.parse_args(words.split())
    own, named, other = (data_sets.data_options(args, name) for name in (None, "coco", "y.csv"))
    assert own == DataOptions(
        frames=3, image_size=64, frame_sampling="uniform", data_dir="a", video_dir="b",
        caption_column="c", unfold_captions=True, hold_out_test=False)
    assert (named.caption_column, named.data_dir) == ("", "")
    assert (other.caption_column, other.data_dir) == ("c", "")
    assert named.video_dir == other.video_dir == "b" and not other.unfold_captions
    assert data_sets.data_options(args, "coco", "d").data_dir == "d"
