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
from contrastive.engine import banner
from contrastive.engine.flags import Parser
from contrastive.engine.run import count_steps, adjust_flags_to_data
from contrastive.encoders.build import adjust_flags_to_encoder

import pytest
import torch

import ncl
import temo
from helpers import few_steps, refused, write_captions

TS, NAMES = "temperature_schedules", ("temperature_schedules", "mmts", "ncl", "mama", "temo")
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
SMALL_OF = {
    "temperature_schedules": ["--period", "1"],
    "mmts": ["--num-clusters", "4"],
    "mama": ["--meta-size", "4", "--meta-batch-size", "2"],
}
# script: command lines, flags that do nothing beside the others
WITHOUT_EFFECT = {
    "temo": [
        ("--row a", "--tau-min .1 --tau-alpha .2 --detach-tau --similarity cosine --blend fixed"),
        ("--row b", "--tau .2 --learnable-tau --tau-clamp .01 1 --blend fixed"),
        ("--row c", "--tau-min .1 --tau-alpha .2 --detach-tau --similarity cosine"),
        ("--loss ts", "--tau .1 --detach-tau --row c"),
        ("--loss dystress", "--tau .1 --similarity cosine"),
        ("--loss infonce", "--tau-min .1 --no-modulated --row c --text-expert a/b"),
        ("--loss cwcl", "--tau-alpha .1"),
        ("", "--tau-clamp .001 .5 --image-expert-weight 1 --expert-pooling patches"),
        ("--unimodal none", "--paraphrases p.jsonl --image-aug crop --grad-augmented"),
        ("", "--no-paraphrase-anchor --randaugment-magnitude 9 --aug-hue 0"),
        ("--optimizer sgd", "--beta2 .9 --eps .1"),
        ("--lr-schedule constant", "--lr-end .1"),
    ],
    "ncl": [
        ("--optimizer sgd --lr-schedule constant", "--eps .1 --lr-end .1"),
    ],
    "mama": [
        ("--weighting none", "--meta-set meta.txt --meta-size 4 --meta-batch-size 2"),
        ("--weighting focal", "--meta-set meta.txt --meta-size 4 --meta-batch-size 2"),
        (
            "--task qa-open --contrastive-weight 0",
            "--tau .2 --meta-size 4 --meta-batch-size 2 --spl-start .3 --meta-lr 1",
        ),
        ("", "--answers 3 --eta 2 --shuffle-video --fusion-layers 1"),
    ],
}
# those of views, chunks and queues; test_scripts.py looks at the flags that change its losses
WITH_EFFECT = {
    "temo": [
        "--image-aug simclr --aug-crop-min .3 --aug-hue .2 --aug-blur .1 --warmup-epochs 1 "
        "--randaugment-ops 1 --randaugment-magnitude 5 --crop-min .5 --flip .1 --jitter .1 "
        "--unimodal plain --no-modulated --blend quadratic --chunk-size 4",
        "--loss slip --aug-flip 0 --aug-jitter .1",
    ],
    "ncl": ["--queue-size 40 --normalize oracle --crop-min 1 --jitter 0 --flip .1"],
}


@pytest.fixture
def warned_flags(tmp_path, capsys):
    """Function of a script and flags -> the flags that its run warns of after its first step."""

    def run(name, words):
        base = [*SMALL, *SMALL_OF.get(name, ())]
        few_steps(importlib.import_module(name), tmp_path / "r", *words.split(), base=base)
        return set(re.findall(r"WARNING: (--[\w-]+) has no effect", capsys.readouterr().out))

    return run


def pairs_of(table):
    return [(name, entry) for name, entries in table.items() for entry in entries]


@pytest.mark.parametrize("name, words", pairs_of(WITHOUT_EFFECT))
def test_flags_without_an_effect_are_named_after_the_first_step(name, words, warned_flags):
    others, useless = words
    assert warned_flags(name, f"{others} {useless}") == set(re.findall(r"--[a-z][\w-]*", useless))


@pytest.mark.parametrize("name, words", pairs_of(WITH_EFFECT))
def test_flags_with_an_effect_are_not_named(name, words, warned_flags):
    assert not warned_flags(name, words)


def test_the_method_of_the_banner_can_be_pasted():
    """All flags of the method group, with their values; a value with a space is quoted."""
    args = parse("temo", ["--image-expert", "a folder", "--tau-clamp", ".01", "1"])
    line = banner.method_line(Namespace(args=args))
    assert line.count("\\\n") == line.count("\n") > 0
    again = parse("temo", shlex.split(line.replace("\\\n", "")))
    names = args.method
    assert {k: vars(again)[k] for k in names} == {k: vars(args)[k] for k in names}
    assert "loss" in names and "tau" in names and "lr" not in names


@each_script
def test_help_begins_with_the_method_and_ends_with_three_commands(name, capsys):
    with pytest.raises(SystemExit):
        parse(name, "--help")
    text = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", text, re.M)
    assert titles[:2] == ["options", "method"] and titles.index("data") < titles.index("run")
    title, *commands = text.rstrip().splitlines()[-4:]
    assert title == "examples:"
    assert all(command.startswith(f"  python {name}.py") for command in commands)


# ----------------------------------------------- what is refused ---------------------------------
REFUSED = [  # script, flags, words of the one line
    ("temo", "--tau 0", "--tau 0: must be at least 1e-12"),
    (
        "temo",
        "--clip-law zipf",
        "unknown: --clip-law zipf; the nearest flag:",
    ),  # of moving-emoji, and not of emoji
    ("temo", "--max-step 2", "unknown: --max-step 2; the nearest flag: --max-steps"),
    ("temo", "--warmup-fraction .1 --warmup-epochs 1", "give one of them"),
    ("temo", "--no-base --no-modulated --unimodal none", "leaves no loss"),
    ("temo", "--loss slip --tau 1.5", "--tau-clamp"),
    ("ncl", "--learnable-tau --tau 0.001", "must start within --tau-clamp 0.01 100"),
    ("ncl", "--tau-clamp 0.01 1", "--tau-clamp: only with --learnable-tau"),
    ("mama", "--a0 20", "the margin a0 / a1 must be at most pi / 2"),
    ("mama", "--learnable-tau --tau 2", "a learnt temperature must start between"),
    ("mama", "--chunk-size 4", "--chunk-size: --weighting meta encodes the whole batch"),
    ("mama", "--beta1 1", "--beta1 1: must be between 0 and 0.9999999"),
]


@pytest.mark.parametrize("name, words, says", REFUSED)
def test_refused_in_one_line(name, words, says, capsys):
    assert says in refused(importlib.import_module(name).parse_args, words.split(), capsys)


def test_flags_of_table_3_are_checked_only_where_a_loss_reads_them():
    temo = importlib.import_module("temo")
    for words in ("--loss infonce", "--image-expert folder"):
        args = temo.parse_args([*words.split(), "--no-base"])
        assert not args.base and not args.modulated and args.unimodal == "none"


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
    warmup_epochs=0,
    freeze="clip4clip",
)
PAPER = [  # script, flags, what the papers and their code say
    (
        "temo",
        "--dataset cc3m",
        dict(lr=2e-4, weight_decay=0.02, image_size=256, tau_clamp=[0.001, 0.5]),
    ),
    ("temo", "--dataset cc3m --loss infonce", dict(lr=8e-4)),
    ("temo", "--dataset cc3m --loss ts", dict(lr=8e-4)),
    ("temo", "--dataset cc3m --loss dystress-shifted", dict(lr=2e-4, tau_min=0.01, tau_alpha=0.03)),
    ("temo", "--dataset cc3m --loss cwcl", dict(lr=8e-4, tau=0.05)),
    (
        "temo",
        "--dataset cc3m --image-encoder vit_base_patch16_224.augreg_in21k_ft_in1k",
        dict(image_size=224),
    ),
    ("temo", "--dataset cc3m --image-expert a/b", dict(lr=8e-4, modulated=False)),
    ("temo", "--dataset cc12m", dict(lr=3e-3, weight_decay=0.1, tau_clamp=[0.01, 1.0])),
    ("temo", "--dataset cc12m --row a", dict(lr=5e-4, weight_decay=0.5)),
    ("temo", "--dataset cc12m --row e", dict(lr=3e-3)),
    ("temo", "--dataset cc12m --loss infonce", dict(lr=5e-4)),
    ("temo", "--loss slip", dict(tau=0.07, learnable_tau=True, tau_clamp=[0.01, 1.0])),
    *[
        (
            "temo",
            f"--dataset cc3m --row {row}",
            dict(
                base=base,
                modulated=modulated,
                unimodal=unimodal,
                lr=lr,
                tau_alpha=0.05 if row == "b" else 0.04,
            ),
        )
        for row, base, modulated, unimodal, lr in (
            ("a", True, False, "none", 8e-4),
            ("b", False, True, "none", 8e-4),
            ("c", True, False, "plain", 2e-4),
            ("d", True, True, "none", 8e-4),
            ("e", True, True, "none", 8e-4),
            ("f", True, True, "modulated", 2e-4),
            ("g", True, True, "modulated", 2e-4),
        )
    ],
    *[
        ("temo", f"--row {row}", dict(blend="fixed" if row in "cdf" else "quadratic"))
        for row in "cdefg"
    ],
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
            zero_init=False,
            train_features="augmented",
        ),
    ),
    (TS, "--dataset cifar10-lt --schedule fixed", dict(tau=0.2)),
    (TS, "", dict(decay_all=False, zero_init=True)),
    (
        TS,
        "--dataset imagenet100-lt",
        dict(shot_limits=[100, 20], eval_epoch="", eval_crop=0.875, schedule="cos"),
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
        | dict(frames=8, eval_frames=16, text_length=40, warmup_fraction=0.1, beta2=0.98)
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
    ("ncl", "--dataset msrvtt --warmup-epochs 1", dict(warmup_epochs=1, warmup_fraction=0)),
    ("ncl", "--warmup-fraction 0.2", dict(warmup_epochs=0, warmup_fraction=0.2)),
    (
        "mama",
        "--dataset msrvtt",
        dict(lr=5e-6, epochs=5, tau=1.0, a0=2.0, a1=10.0, a2=0.1, weighting="meta"),
    ),
    (
        "mama",
        "--dataset didemo --loss infonce",
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


@pytest.mark.parametrize("examples, batch, epochs", [(23, 16, 500), (7, 4, 500), (800, 256, 167)])
def test_own_data_take_the_batch_that_processes_share_and_500_steps(
    examples, batch, epochs, monkeypatch, capsys
):
    """Without --batch-size a multiple of 8, from 8 examples on; without --epochs as many whole
    epochs as make 500 steps, the warm-up in proportion."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    def fit(words, examples=examples):
        args = parse("temo", words)
        before = args.warmup_epochs / args.epochs
        args = adjust_flags_to_data(args, Namespace(examples=examples, name="x"))
        assert args.warmup_epochs / args.epochs == before
        return args

    args = fit("--dataset x.csv")
    assert (args.batch_size, args.epochs) == (batch, epochs)
    steps = int(epochs * (examples // batch))
    out = capsys.readouterr().out
    assert f"--epochs 24 -> {epochs}, which make {steps} steps" in out
    assert f"--warmup-epochs 2 -> {epochs / 12:g}, in proportion" in out
    args = fit("--dataset x.csv --epochs 3 --batch-size 4")
    assert (args.batch_size, args.epochs) == (4, 3)
    with pytest.raises(
        UserError, match="--batch-size 256: larger than the 3 training examples of x"
    ):
        fit("--dataset x.csv", 3)


@pytest.mark.parametrize("examples, batch", [(101, 96), (15, 8)])
def test_the_batch_of_small_own_data_does_not_depend_on_the_processes(
    examples, batch, monkeypatch
):
    for processes in (1, 2, 4, 8):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        args = parse("temo", "--dataset x.csv")
        fitted = adjust_flags_to_data(args, Namespace(examples=examples, name="x"))
        assert fitted.batch_size == batch


def test_a_warm_up_on_the_command_line_stays_on_small_own_data():
    args = parse("temo", "--dataset x.csv --warmup-epochs 1")
    args = adjust_flags_to_data(args, Namespace(examples=800, name="x"))
    assert (args.warmup_epochs, args.epochs) == (1, 167)


def test_flags_of_a_data_set_that_is_evaluated_alone_are_used():
    args = parse("temo", "--dataset emoji --eval-datasets emoji moving-emoji --clips 50 20 10")
    assert [
        len(data_sets.open_data(args)[1]["moving-emoji"][split]) for split in ("val", "test")
    ] == [20, 10]


def test_a_warm_up_of_less_than_half_a_step_is_none():
    """And not that of --warmup-epochs, which a recipe of a fork may have beside it."""
    train = Namespace(examples=160)
    args = Namespace(batch_size=16, max_steps=40, epochs=1, warmup_fraction=0.01, warmup_epochs=2.0)
    assert count_steps(args, train).warmup == 0
    args.warmup_fraction = 0.1
    assert count_steps(args, train).warmup == 4


# ----------------------------------------------- a resumed run ------------------------------------
def test_what_a_resumed_run_may_change(tmp_path, capsys):
    with pytest.raises(UserError, match=f"^{tmp_path}/args.json: .*No such file"):
        parse("temo", ["--resume", str(tmp_path)])
    (tmp_path / "args.json").write_text(
        json.dumps(vars(parse("temo", "--max-steps 9")) | {"script": "temo"})
    )
    for flag, now in (
        ("--embed-dim", "32"),
        ("--loss", "infonce"),
        ("--dataset", "moving-emoji"),
        ("--fold", "3"),
        ("--run-name", "x"),
    ):
        said = refused(temo.parse_args, ["--resume", str(tmp_path), flag, now], capsys)
        assert f"{flag} cannot change in a run" in said
    # the same value is no change
    words = "--dataset emoji --loss temo --embed-dim 128 --tau-clamp 0.001 0.5 --no-detach-tau"
    same = parse("temo", ["--resume", str(tmp_path), *words.split()])
    assert (same.loss, same.max_steps, same.changed) == ("temo", 9, ["--max-steps"])
    said = refused(temo.parse_args, ["--resume", str(tmp_path), "--dataset", "emoji@a1"], capsys)
    assert "--dataset cannot change in a run" in said
    said = refused(ncl.parse_args, ["--resume", str(tmp_path)], capsys)
    assert f"--resume {tmp_path}: a run of temo.py, not of ncl.py" in said
    longer = parse("temo", ["--resume", str(tmp_path), "--epochs", "50"])
    assert (longer.epochs, longer.max_steps) == (50, 0)  # the saved number of steps would win


def test_a_flag_that_a_resume_repeats_changes_no_other(tiny, tmp_path, capsys):
    """--warmup-epochs sets --warmup-fraction to 0; --image-encoder chooses --text-encoder."""
    clip, _ = tiny("clip")
    words = ["--image-encoder", clip, "--text-encoder", "small", "--warmup-fraction", "0.5"]
    saved = vars(adjust_flags_to_encoder(parse("temo", words))) | {"script": "temo"}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    resume = ["--resume", str(tmp_path)]
    capsys.readouterr()
    same = adjust_flags_to_encoder(parse("temo", [*resume, *words[:2]]))
    assert same.text_encoder == "small" and same.embed_dim == saved["embed_dim"]
    said = refused(temo.parse_args, [*resume, "--warmup-epochs", "0"], capsys)
    assert "--warmup-fraction cannot change in a run" in said


@pytest.mark.parametrize(
    "saved, words, refused_change", [("", "none", True), ("none", "x", True), ("", "x", False)]
)
def test_a_resume_goes_on_with_or_without_kept_features(
    saved, words, refused_change, tmp_path, capsys
):
    """Their views are drawn in another way than those of pixels."""
    flags = ["--freeze", "image", *(["--feature-cache", saved] if saved else [])]
    run = vars(parse("ncl", flags)) | {"script": "ncl"}
    (tmp_path / "args.json").write_text(json.dumps(run))
    flags = ["--resume", str(tmp_path), "--feature-cache", words]
    if refused_change:
        said = refused(ncl.parse_args, flags, capsys)
        assert "--feature-cache cannot change to or from none in a run" in said
    else:
        assert parse("ncl", flags).feature_cache == words


@pytest.mark.parametrize(
    "name, words",
    [
        ("temo", "--dataset cc3m --row a --lr 0.1"),
        ("mmts", "--loss max-margin --alpha 0.2 --shift-min 0.17 --shift-max 0.3"),
        ("mama", "--task qa-open --lr 0.1"),
    ],
)
def test_a_resumed_run_differs_from_its_recipe_as_before(name, words, tmp_path):
    """Its loss, which chose its defaults, is not named again."""
    first = parse(name, words)
    (tmp_path / "args.json").write_text(json.dumps(vars(first) | {"script": name, "resume": ""}))
    resumed = parse(name, ["--resume", str(tmp_path), "--max-steps", "7"])
    assert first.changed and resumed.changed == [*first.changed, "--max-steps"]


def test_a_resume_says_what_it_changes(tmp_path, capsys):
    few_steps(temo, tmp_path / "run", "--max-steps", 2, base=[*SMALL[:-4], "--lr", 2e-3])
    capsys.readouterr()
    parse("temo", ["--resume", str(tmp_path / "run"), "--lr", "0.005", "--max-steps", "2"])
    assert capsys.readouterr().out == "resumed with --lr 0.002 -> 0.005\n"
    parse("temo", ["--resume", str(tmp_path / "run"), "--frame-cache", "jpegs"])
    assert capsys.readouterr().out == "resumed with --frame-cache '' -> jpegs\n"
    parse("temo", ["--resume", str(tmp_path / "run")])
    assert capsys.readouterr().out == ""
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
