"""The commands of the tables in docs/ have the values of the papers and of their code."""

import re
import shlex
from pathlib import Path

from contrastive.data import data_options, splits_of

import pytest

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from variants import mama_qa, mmts_vast, ncl_ssb, sdclr, temo_experts

PAGES = Path(mmts.__file__).parent / "docs"
SCRIPTS = {"temo": temo, "mmts": mmts, "ncl": ncl, "mama": mama, "temperature_schedules": ts}


def table_runs(name, variant=None):
    """(row's first cell, flags) of each whole command of a script in the tables of its page, or of
    a variant there."""
    script, program = SCRIPTS[name], rf"{name}\.py"
    if variant:
        script, program = variant, f"-m {re.escape(variant.__name__)}"
    runs = []
    for line in (PAGES / f"{name}.md").read_text(encoding="utf8").splitlines():
        if line.startswith("| "):
            for words in re.findall(rf"`python {program} ([^`]*)`", line):
                args = script.parse_args(shlex.split(words))
                runs.append((line.split("|")[1].strip(), args))
    return runs


def values(args, names):
    """The values of these flags, by their order."""
    return tuple(vars(args)[name] for name in names.split())


@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_that_evaluate_during_training_have_something_to_evaluate(name):
    for row, args in table_runs(name):
        datasets = getattr(args, "eval_datasets", []) or [args.dataset]
        has_val = any("val" in splits_of(data) for data in datasets)
        assert args.eval_every <= 0 or has_val or args.holdout_fraction, row


# ------------------------------------------------------- TeMo ------------------------------------
def test_rows_of_temo_have_paraphrases_where_they_read_them():
    readers = set()
    for row, args in table_runs("temo"):
        reads_them = temo.has_unimodal_terms(args)
        assert bool(args.paraphrases) == reads_them, (row, args.command_line)
        if reads_them:
            readers.add(row)
    assert readers == {"1, 4", "2", "3, 6", "Fig. 7"}


def test_table_2_of_temo_has_both_sets_and_their_baselines():
    losses = {(args.dataset, args.loss) for row, args in table_runs("temo") if row == "2"}
    assert losses == {
        ("cc3m", "temo"), ("cc3m", "infonce"),
        ("cc12m", "temo"), ("cc12m", "infonce"), ("cc12m", "ts")}


def test_experts_are_those_of_the_code():
    """Weights 0.6 and 0.4 alone, at a learning rate of 8e-4; the command of both has 0.1 each."""
    runs = table_runs("temo", temo_experts)
    assert len(runs) == 3
    for row, args in runs:
        weights = (0.6, 0.4)
        if args.image_expert and args.text_expert:
            weights = (0.1, 0.1)
        assert values(args, "lr expert_inputs") == (8e-4, "clean"), row
        assert values(args, "image_expert_weight text_expert_weight") == weights, row


@pytest.mark.parametrize("words, names, prompts", [
    ("--dataset cc12m", "clip", "slip"),
    ("--dataset cc3m", "wordnet", "openai"),
    ("--eval-datasets imagenet", "wordnet", "openai")])
def test_imagenet_has_the_names_and_prompts_of_the_base_model(words, names, prompts):
    options = data_options(temo.parse_args(words.split()), "imagenet")
    assert (options.class_names, options.prompts) == (names, prompts)


# ------------------------------------------------------- MM-TS -----------------------------------
def test_rows_of_mm_ts_have_the_supplement_s_ranges():
    """Of both losses (Section 7); those of videos start from weights."""
    ranges = {}
    for row, args in table_runs("mmts") + table_runs("mmts", mmts_vast):
        if args.dataset != "cc3m":
            assert args.init_from and args.pretrained, row
        if args.schedule and args.shifts and row != "8":
            ranges[args.dataset, args.loss] = values(args, "alpha shift_min shift_max")
    assert ranges == {
        ("cc3m", "clip"): (0.04, 0.05, 0.1),
        ("epic-kitchens-100", "max-margin"): (0.2, 0.17, 0.3),
        ("epic-kitchens-100", "clip"): (0.08, 0.05, 0.2),
        ("youcook2", "clip"): (0.06, 0.06, 0.09),
        ("youcook2", "max-margin"): (0.2, 0.1, 0.3),
        ("ssv2-lt", "clip"): (0.04, 0.07, 0.11)}


def test_rows_of_vast_learn_tau_where_it_is_fixed():
    learnt = set()
    for row, args in table_runs("mmts", mmts_vast):
        is_fixed = not args.schedule and not args.shifts
        assert args.learnable_tau == is_fixed, row
        if is_fixed:
            learnt.add(row)
    assert learnt == {"7", "9"}


# ------------------------------------------------------- NCL -------------------------------------
def test_rows_of_clip4clip_have_its_schedule():
    """5 epochs and a warm-up of 10 % on every set."""
    baselines = set()
    for row, args in table_runs("ncl"):
        if args.loss == "infonce":
            assert values(args, "epochs warmup_fraction normalize") == (5, 0.1, "none"), row
            baselines.add(args.dataset)
    assert baselines == {"activitynet", "msvd", "msrvtt"}


def test_table_4_of_ncl_is_ssb_s():
    ((row, args),) = table_runs("ncl", ncl_ssb)
    assert row == "4"
    assert len(args.feature_dir) == 2


# ------------------------------------------------------- MAMA ------------------------------------
def test_rows_of_clip_vip_start_from_its_weights():
    for row, args in table_runs("mama"):
        if args.baseline or args.image_encoder.startswith("clip_vip:"):
            assert args.init_from and args.image_encoder.startswith("clip_vip:"), row


@pytest.mark.parametrize("dataset, length, frames, batch", [
    ("msrvtt", 50, 12, 8 * 16), ("didemo", 70, 12, 8 * 16), ("activitynet", 70, 32, 8 * 8)])
def test_the_base_of_tables_3_and_4_is_clip_vips_own(dataset, length, frames, batch):
    """Its authors' configuration, for as many epochs as MAMA, with a warm-up of 1 % of them."""
    bases = []
    for row, args in table_runs("mama"):
        if row == "3, 4" and args.baseline and args.dataset == dataset:
            bases.append(args)
    (base,) = bases
    assert values(base, "lr weight_decay betas grad_clip") == (1e-6, 0.2, [0.9, 0.98], 1.0)
    assert values(base, "tau learnable_tau batch_size") == (0.01, True, batch)
    assert values(base, "frames text_length") == (frames, length)
    assert values(base, "lr_schedule lr_end warmup_fraction") == ("cosine", 0.0, 0.01)
    assert base.epochs == mama.parse_args(["--dataset", dataset]).epochs


def test_rows_of_answers_have_both_models():
    runs = table_runs("mama", mama_qa)
    assert {row for row, _ in runs} == {"1", "2", "Fig. 4"}
    assert {args.qa_model for row, args in runs if row == "2"} == {"fusion", "vgt"}


# ------------------------------------------------------- TS --------------------------------------
def test_rows_of_ts_have_the_paper_s_temperatures():
    """tau of the fixed rows, the limits and the period of all others."""
    temperatures = set()
    for row, args in table_runs("temperature_schedules"):
        names = "schedule tau_min tau_max period"
        if args.schedule == "fixed":
            names = "tau"
        temperatures.add((row, *values(args, names)))
    assert temperatures == {
        ("Figs. 1, 2", 0.1),
        ("2", "cos", 0.1, 1.0, 400.0),
        ("3", "cos", 0.1, 1.0, 400.0),
        ("3", 0.2),
        ("4", "cos", 0.07, 0.5, 400.0),
        ("5", "step", 0.1, 0.5, 400.0),
        ("6, Fig. 4", "cos", 0.1, 1.0, 200.0),
        ("10", "cos", 0.1, 0.5, 400.0)}


def test_rows_of_sdclr_have_the_sets_and_lengths_of_its_scripts():
    lengths = {}
    for row, args in table_runs("temperature_schedules", sdclr):
        if row == "3":
            lengths[args.dataset] = values(args, "epochs batch_size")
    assert lengths.keys() == {"cifar10-lt", "cifar100-lt", "imagenet100-lt"}
    assert lengths["imagenet100-lt"] == (500, 256)


def test_rows_of_ts_train_imagenet_for_800_epochs():
    for row, args in table_runs("temperature_schedules"):
        if row == "3" and args.dataset == "imagenet100-lt":
            assert values(args, "epochs batch_size") == (800, 512)
