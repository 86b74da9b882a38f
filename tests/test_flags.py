"""Flags: what is refused, what recipes give, what a resumed run may change."""

import argparse
import importlib
import json
import re
import shlex
from argparse import Namespace

from contrastive import data as data_sets
from contrastive.core.processes import UserError
from contrastive.data.options import DataOptions
from contrastive.encoders.models import adjust_flags_to_encoder
from contrastive.engine.flags import Parser
from contrastive.engine.run import adjust_flags_to_data, count_steps

import pytest
import torch

import ncl
import temo
from helpers import refused

TS = "temperature_schedules"
SCRIPTS = (TS, "mmts", "ncl", "mama", "temo")
VARIANTS = ("mama_qa", "mmts_vast", "ncl_ssb", "sdclr", "slip", "temo_experts")
PROGRAMS = (*SCRIPTS, *(f"variants.{name}" for name in VARIANTS))
each_script = pytest.mark.parametrize("name", SCRIPTS)


def parse(name, words=""):
    return importlib.import_module(name).parse_args(words.split())


# ----------------------------------------------- what is refused ---------------------------------
WITHOUT_EFFECT = [  # script, flags; the last one does nothing beside the others
    ("temo", "--row a --tau-min .1"),
    ("temo", "--row a --similarity cosine"),
    ("temo", "--row a --paraphrases p.jsonl"),
    ("temo", "--row b --tau .2"),
    ("temo", "--row e --grad-augmented"),
    ("temo", "--loss ts --tau .1"),
    ("temo", "--loss dystress --similarity cosine"),
    ("temo", "--loss cwcl --image-aug crop"),
    ("temo", "--baseline --tau-min .1"),
    ("temo", "--tau-clamp .001 .5"),
    ("temo", "--no-paraphrase-anchor"),
    ("temo", "--aug-hue 0"),
    ("temo", "--holdout-fraction 0.1"),  # emoji has a val split
    ("temo", "--dataset coco --caption-column a"),
    ("temo", "--dataset coco --label-column=a"),
    ("ncl", "--tau-clamp 0.01 1"),
    ("mmts", "--tau 0.07"),
    ("mmts", "--baseline --alpha 0.1"),
    ("mmts", "--baseline --margin 0.1"),
    ("mmts", "--baseline --tau-clamp 0.01 0.5"),
    ("mmts", "--clusters noun --num-clusters 9"),
    ("mama", "--margin-schedule none --a0 2"),
    ("mama", "--margin-schedule constant --a2 .2"),
    ("mama", "--weighting none --weight-hidden 9"),
    ("mama", "--weighting l2rw --meta-lr .1"),
    ("mama", "--weighting none --meta-size 8"),
    ("mama", "--baseline --a1 3"),
    (TS, "--tau 0.1"),
    (TS, "--queue-size 9"),
    (TS, "--schedule fixed --tau-min 0.1"),
    (TS, "--schedule random --period 3"),
    (TS, "--loss moco --head-norm batch"),
    (TS, "--eval-epoch best --eval-every 1 --stop-at-phase .5")]


@pytest.mark.parametrize("name, words", WITHOUT_EFFECT)
def test_flag_without_effect_is_refused(name, words, capsys):
    message = refused(importlib.import_module(name).parse_args, words.split(), capsys)
    flag = re.findall(r"--[\w-]+", words)[-1]
    assert message.startswith(f"error: {flag}: only ")


REFUSED = [  # script, flags, words of the message
    ("temo", "--tau 0", "--tau 0: must be at least"),
    ("temo", "--clips 9 2 2", "unknown: --clips"),  # of moving-emoji, and not of emoji
    ("temo", "captions.csv --cpu", "--dataset captions.csv"),
    ("temo", "--max-step 2", "the nearest flag: --max-steps"),
    ("temo", "--learning-rate=1", "the nearest flag: --lr"),
    ("temo", "--baseline --loss cwcl", "--loss cwcl: --baseline is --loss infonce"),
    ("temo", "--lr-scale body=2", "--lr-scale body=2"),
    ("temo", "--resume nowhere", "--resume nowhere: is neither the folder of a run"),
    ("temo", "--eval-epoch first", "--eval-epoch first"),
    ("ncl", "--baseline --loss ncl", "--loss ncl: --baseline is --loss infonce"),
    ("mama", "--a0 20", "a0 / a1 must be at most pi / 2"),
    ("mama", "--learnable-tau --tau 2", "within --tau-clamp"),
    ("mama", "--chunk-size 4", "--chunk-size: --weighting meta"),
    ("mama", "--lr-scale image=2", "--lr-scale: the virtual step"),
    ("mama", "--betas 1 .98", "--betas 1"),
    ("mmts", "--alpha 0.5", "temperatures of the run, -0.17 .. 0.37"),
    ("mmts", "--loss max-margin --alpha 0.5 --shift-min 0.1 --shift-max 0.3", "below 2"),
    # a range of temperatures is none of margins
    ("mmts", "--loss max-margin", "add --alpha --shift-min --shift-max"),
    ("mmts", "--loss max-margin --no-shifts", "add --alpha, since"),
    ("mmts", "--recipe epic-kitchens-100 --no-pretrained --loss clip --alpha 0.08",
     "add --shift-min --shift-max"),
    # without LaViLa's weights two CLIPs that do not belong together would train
    ("mmts", "--dataset epic-kitchens-100", "--init-from is needed"),
    ("variants.mmts_vast", "--dataset x.csv --image-encoder vast --pretrained",
     "--init-from is needed"),
    ("mmts", "--learnable-tau --no-shifts", "a learnt temperature has no schedule"),
    ("mmts", "--loss max-margin --baseline --margin 2", "margins of the run, 2 .. 2"),
    ("mmts", "--shift-min 0.2 --shift-max 0.1", "--shift-min 0.2: larger than"),
    ("mmts", "--clusters none", "--shifts need clusters"),
    (TS, "--baseline --schedule cos", "--baseline has a fixed temperature"),
    (TS, "--schedule fixed --learnable-tau --tau .001", "--tau-clamp 0.01 10"),
    (TS, "--tau-min 2", "at least --tau-min 2"),
    (TS, "--imbalance-ratio .5", "must be at least 1"),
    (TS, "--shot-limits 1 5", "TAIL must be from 1 to HEAD + 1")]


@pytest.mark.parametrize("name, words, reason", REFUSED)
def test_contradictory_flags_are_refused(name, words, reason, capsys):
    assert reason in refused(importlib.import_module(name).parse_args, words.split(), capsys)


@pytest.mark.parametrize("words", [
    "--dataset x.csv --holdout-fraction 0.1 --image-column a",
    "--dataset cifar10 --holdout-fraction 0.1",
    "--dataset coco --eval-datasets x.csv --caption-column a"])
def test_flags_with_effect_on_one_of_the_data_sets_are_accepted(words):
    temo.parse_args(words.split())


@each_script
def test_a_number_has_a_range(name, monkeypatch):
    parsers = []
    monkeypatch.setattr(Parser, "check_data_flags", lambda parser, _: parsers.append(parser))
    parse(name)
    numbers = [action for action in parsers[0]._actions if action.type]
    assert len(numbers) > 20
    for action in numbers:
        for value in ("nan", "-1000000001"):
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                action.type(value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_commands_that_can_be_parsed_and_at_most_75_flags(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # no line is divided
    with pytest.raises(SystemExit):
        parse(name, "--help")
    text = capsys.readouterr().out
    *commands, resume = text.splitlines()[-3:]
    for command in commands:
        words = shlex.split(command, comments=True)
        importlib.import_module(name).parse_args(words[2 + name.count("."):])
    assert resume.split()[-2:] == ["--resume", "runs/NAME"]
    flags = re.sub(r"\n--dataset.*?\n\n", "\n", text, flags=re.S)  # without those of a set
    assert len(re.findall(r"^  --", flags, re.M)) <= 75


def test_a_misspelt_key_of_a_recipe_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(ncl.RECIPES, "own", ncl.OWN | {"warm_up_epochs": 3.0})
    message = refused(ncl.parse_args, ["--dataset", "mine.csv"], capsys)
    assert message == "error: recipe own: there is no flag warm_up_epochs\n"


# ----------------------------------------------- recipes ------------------------------------------
CC3M_TRAINER = dict(
    image_encoder="resnet50.a1_in1k",  # that of timm 0.5.4
    randaugment=[2, 21], projection_bias=True)
CLIP4CLIP = dict(
    lr=1e-7, batch_size=128, queue_size=16_384, iterations=4, tau=0.01, learnable_tau=True,
    freeze="clip4clip")
VAST = dict(
    label_smoothing=0.1, eps=1e-6, image_encoder="vast", matching_weight=0.1,
    drop_path=0.4, frames=8, eval_frames=16, text_length=40, warmup_fraction=0.1,
    betas=[0.9, 0.98], batch_size=64, epochs=30, grad_clip=0, weight_decay=0.01,
    lr_schedule="linear")
PAPER = [  # script, flags, what the paper and its code say
    ("temo", "--dataset cc3m", dict(
        lr=2e-4, weight_decay=0.02, image_size=256, tau_clamp=[0.001, 0.5], tau=0.01,
        tau_min=0.01, tau_alpha=0.04, jitter=0, **CC3M_TRAINER)),
    ("temo", "--dataset cc12m", dict(
        lr=3e-3, weight_decay=0.1, tau_clamp=[0.01, 1.0], projection_bias=False)),
    ("temo", "", dict(randaugment=[0, 0], projection_bias=False)),
    (TS, "--dataset cifar10-lt", dict(
        schedule="cos", tau_min=0.1, tau_max=1.0, period=400, eval_epoch="best",
        decay_all=True, train_features="augmented")),
    (TS, "--dataset cifar10-lt --schedule fixed", dict(tau=0.2)),
    (TS, "--dataset cifar10-lt --baseline", dict(schedule="fixed", tau=0.2)),
    (TS, "", dict(decay_all=False)),
    (TS, "--dataset imagenet100-lt", dict(
        shot_limits=[100, 20], eval_epoch="last", eval_crop=0.875, schedule="cos")),
    ("mmts", "--dataset cc3m", dict(alpha=0.04, shift_min=0.05, shift_max=0.1, **CC3M_TRAINER)),
    ("mmts", "--dataset cc3m --baseline", dict(tau=0.01, schedule=False, shifts=False)),
    ("mmts", "--dataset epic-kitchens-100 --init-from w.pt", dict(
        loss="max-margin", alpha=0.2, shift_min=0.17, shift_max=0.3, projection_bias=False)),
    ("mmts", "--loss max-margin --baseline", dict(schedule=False, shifts=False, margin=0.2)),
    # the command line wins over the preset
    ("mmts", "--baseline --schedule", dict(schedule=True)),
    ("variants.mmts_vast", "--dataset youcook2 --init-from w", VAST | dict(
        lr=3e-5, alpha=0.06, shift_min=0.06, shift_max=0.09, modalities="vas")),
    ("variants.mmts_vast", "--dataset ssv2-lt --init-from w", VAST | dict(
        lr=2e-5, alpha=0.04, shift_min=0.07, shift_max=0.11, modalities="v")),
    ("ncl", "--dataset msrvtt", CLIP4CLIP | dict(
        epochs=5, warmup_fraction=0.1, text_length=32, frames=12, unfold_captions=True,
        normalize="queue")),
    ("ncl", "--dataset msvd", CLIP4CLIP | dict(epochs=3, warmup_fraction=0)),
    ("ncl", "--dataset activitynet", CLIP4CLIP | dict(
        epochs=10, text_length=64, frames=64, unfold_captions=False)),
    ("ncl", "--dataset msrvtt --baseline", CLIP4CLIP | dict(loss="infonce", normalize="none")),
    ("ncl", "", dict(freeze="none")),
    ("mama", "--dataset msrvtt", dict(
        lr=5e-6, epochs=5, tau=1.0, a0=2.0, a1=10.0, a2=0.1, weighting="meta", batch_size=4)),
    ("mama", "--dataset didemo --baseline", dict(
        epochs=20, weighting="none", margin_schedule="none", tau=1.0)),
    ("variants.mama_qa", "--dataset msrvtt-qa", dict(answers=1500)),
    ("variants.mama_qa", "--dataset msvd-qa", dict(answers=1000)),
    ("variants.mama_qa", "--dataset tgif-qa-r-frame", dict(answers=1540)),
    ("variants.mama_qa", "--dataset tgif-qa-r-frame --recipe tgif-qa-r-frame-vgt --region-dir x",
     dict(answers=1540)),
    ("variants.sdclr", "--dataset cifar100-lt", dict(tau=0.2, prune=0.9)),
    ("variants.sdclr", "--dataset imagenet100-lt", dict(tau=0.3, prune=0.3))]


@pytest.mark.parametrize("name, words, values", PAPER)
def test_recipes_are_the_papers(name, words, values):
    args = vars(parse(name, words))
    assert {flag: args[flag] for flag in values} == values


BASELINES = {  # script: flags that --baseline changes
    "temo": {"loss"},
    TS: {"schedule"},
    "mmts": {"schedule", "shifts"},
    "ncl": {"loss", "normalize"},
    "mama": {"weighting", "margin_schedule"}}


@each_script
def test_baseline_has_everything_else_equal(name):
    baseline, method = vars(parse(name, "--baseline")), vars(parse(name))
    changed = {flag for flag in method if baseline[flag] != method[flag]}
    changed -= {"baseline", "command_line", "changed", "method_flags"}
    assert changed == BASELINES[name]


@each_script
def test_any_recipe_for_any_data(name, frozen_packages):
    """All values of the set that --recipe names; its evaluation set is the data's."""
    for recipe in importlib.import_module(name).RECIPES:
        flags = f"--recipe {recipe}"
        if recipe == "epic-kitchens-100":
            flags += " --init-from w.pt"
        data = {"own": "other.csv"}.get(recipe, recipe)
        theirs = vars(parse(name, f"--dataset {data} {flags}"))
        ours = vars(parse(name, f"--dataset my.csv {flags}"))
        different = {flag for flag in ours if ours[flag] != theirs[flag]}
        assert different <= {"dataset", "eval_datasets", "command_line"}, recipe
    assert parse(name, "--dataset my.csv").recipe == "own"


@pytest.mark.parametrize("name, words", [
    ("temo", "cc3m"), (TS, "cifar10-lt"), ("mmts", "cc3m"), ("ncl", "msrvtt"), ("mama", "msrvtt"),
    ("variants.slip", "cc12m"), ("variants.sdclr", "cifar10-lt"),
    ("variants.mama_qa", "msrvtt-qa"), ("variants.mmts_vast", "ssv2-lt --init-from w"),
    ("variants.ncl_ssb", "msrvtt --feature-dir x"),
    ("variants.temo_experts", "cc3m --image-expert a")])
def test_recipe_of_a_paper_needs_a_gpu_or_cpu(name, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = parse(name, f"--dataset {words}")
    with pytest.raises(UserError, match="needs a GPU; without one add --cpu"):
        importlib.import_module(name).main(args)


# ----------------------------------------------- lengths ------------------------------------------
class TrainingSet(list):
    name = "x"


def fit(words, num_examples):
    """The flags of a run on so many examples of one's own."""
    args = parse("temo", f"--dataset x.csv {words}")
    return adjust_flags_to_data(args, TrainingSet(range(num_examples)))


@pytest.mark.parametrize("processes", ["1", "4"])
@pytest.mark.parametrize("num_examples, words, expected", [
    (23, "", (16, 500)), (15, "", (8, 500)), (101, "", (96, 500)), (800, "", (256, 167)),
    (23, "--epochs 3 --batch-size 4", (4, 3))])
def test_own_data_choose_batch_and_epochs(  # noqa: PLR0917
        num_examples, words, expected, processes, monkeypatch):
    """A multiple of 8, the same for any number of processes; whole epochs of 500 steps."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    args = fit(words, num_examples)
    assert (args.batch_size, args.epochs) == expected


@pytest.mark.parametrize("num_examples, words", [
    (3, "--batch-size 256: larger than the number of training examples of x, 3"),
    (1, "x: a single training example")])
def test_too_few_examples_are_refused(num_examples, words, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=words):
        fit("", num_examples)


@pytest.mark.parametrize("share, warmup", [(0.01, 0), (0.1, 4)])
def test_warm_up_is_rounded_to_steps(share, warmup):
    args = Namespace(batch_size=16, max_steps=40, epochs=1, warmup_fraction=share)
    assert count_steps(args, range(160)).warmup == warmup


# ----------------------------------------------- flags of data sets -------------------------------
def test_flags_of_a_set_that_is_only_evaluated_are_used():
    args = parse("temo", "--dataset emoji --eval-datasets moving-emoji --clips 50 20 10")
    _, eval_sets = data_sets.open_data(args)
    clips = eval_sets["moving-emoji"]
    assert (len(clips["val"]), len(clips["test"])) == (20, 10)


def test_folders_and_columns_of_the_training_set_are_its_own():
    words = ("--dataset x.csv --eval-datasets coco y.csv --data-dir a --video-dir b "
             "--caption-column c --unfold-captions --frames 3")
    args = parse("ncl", words)
    assert data_sets.data_options(args, None) == DataOptions(
        frames=3, image_size=64, frame_sampling="uniform", data_dir="a", video_dir="b",
        caption_column="c", unfold_captions=True, hold_out_test=False)
    for name, column in (("coco", ""), ("y.csv", "c")):
        options = data_sets.data_options(args, name)
        assert (options.data_dir, options.video_dir, options.caption_column) == ("", "b", column)
        assert not options.unfold_captions
    assert data_sets.data_options(args, "coco", "d").data_dir == "d"


# ----------------------------------------------- a resumed run ------------------------------------
@pytest.fixture
def saved(tmp_path):
    """The folder of a run of temo.py with --max-steps 9."""
    flags = vars(parse("temo", "--max-steps 9")) | {"script": "temo"}
    (tmp_path / "args.json").write_text(json.dumps(flags))
    return tmp_path


@pytest.mark.parametrize("name, words, reason", [
    ("temo", "--embed-dim 32", "--resume: --embed-dim cannot change"),
    ("temo", "--loss infonce", "--resume: --loss cannot change"),
    ("temo", "--run-name x", "--resume: --run-name cannot change"),
    ("ncl", "", "a run of temo.py")])
def test_resume_refuses_another_run(name, words, reason, saved, capsys):
    script = importlib.import_module(name)
    assert reason in refused(script.parse_args, ["--resume", str(saved), *words.split()], capsys)


def test_an_encoder_that_a_resume_repeats_chooses_no_other(tiny, tmp_path):
    """A CLIP as --image-encoder chooses --text-encoder, but not in a resumed run."""
    clip, _ = tiny("clip")
    words = ["--image-encoder", clip, "--text-encoder", "small"]
    flags = vars(adjust_flags_to_encoder(temo.parse_args(words))) | {"script": "temo"}
    (tmp_path / "args.json").write_text(json.dumps(flags))
    resumed = temo.parse_args(["--resume", str(tmp_path), *words[:2]])
    assert adjust_flags_to_encoder(resumed).text_encoder == "small"


def test_resume_accepts_the_same_values(saved):
    words = "--dataset emoji --loss temo --embed-dim 128 --no-detach-tau"
    args = parse("temo", f"--resume {saved} {words}")
    assert (args.loss, args.max_steps, args.changed) == ("temo", 9, ["--max-steps"])


def test_resume_with_epochs_replaces_the_number_of_steps(saved):
    args = parse("temo", f"--resume {saved} --epochs 50")
    assert (args.epochs, args.max_steps) == (50, 0)
