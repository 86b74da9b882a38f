"""Recipes have the values of the papers and of their code; the commands of tables choose them."""

import argparse
import re
import shlex
from pathlib import Path

from contrastive.data import data_options, splits_of

import pytest

import mama
import mmts
import ncl
import temo
import temperature_schedules
from variants import mama_qa, mmts_vast, ncl_ssb, sdclr, temo_experts


# ------------------------------------------------------- the CC3M trainer ------------------------
@pytest.mark.parametrize("script", [temo, mmts])
def test_cc3m_has_the_trainers_resnet_and_randaugment(script):
    args = script.parse_args(["--dataset", "cc3m"])
    assert args.image_encoder == "resnet50.a1_in1k"  # that of timm 0.5.4
    assert args.randaugment == [2, 21]
    assert args.projection_bias
    own = script.parse_args([])
    assert own.randaugment == [0, 0] and not own.projection_bias


def test_only_the_cc3m_trainer_has_biases_in_its_projections(frozen_packages):
    assert not temo.parse_args(["--dataset", "cc12m"]).projection_bias
    for name in mmts.RECIPES:
        args = mmts.parse_args(["--dataset", name, "--init-from", "weights.pt"])
        assert args.projection_bias == (name == "cc3m"), name


def test_experts_are_those_of_the_code():
    """Weights 0.6 and 0.4 alone, at a learning rate of 8e-4; the command of both has 0.1 each."""
    runs = table_runs("temo", temo_experts)
    assert len(runs) == 3
    for row, args in runs:
        assert (args.lr, args.expert_inputs) == (8e-4, "clean"), row
        weights = (0.6, 0.4)
        if args.image_expert and args.text_expert:
            weights = (0.1, 0.1)
        assert (args.image_expert_weight, args.text_expert_weight) == weights, row


# ------------------------------------------------------- SLIP ------------------------------------
def test_a_cc12m_run_evaluates_imagenet_as_slip_s_code():
    """With CLIP's names and 7 prompts: while it trains, and in eval.py, which reads its flags."""
    args = temo.parse_args(["--dataset", "cc12m"])
    for flags in (args, argparse.Namespace(**vars(args))):
        options = data_options(flags, "imagenet")
        assert (options.class_names, options.prompts) == ("clip", "slip")
    for words in (["--dataset", "cc3m"], ["--eval-datasets", "imagenet"]):
        options = data_options(temo.parse_args(words), "imagenet")
        assert (options.class_names, options.prompts) == ("wordnet", "openai")


# ------------------------------------------------------- AVION -----------------------------------
EPIC = ["--dataset", "epic-kitchens-100"]


def test_epic_kitchens_without_lavila_is_refused(capsys):
    """Two CLIPs that do not belong together would train; from scratch by --no-pretrained."""
    for flags in ([], ["--loss", "clip", "--baseline"], ["--pretrained"]):
        with pytest.raises(SystemExit):
            mmts.parse_args([*EPIC, *flags])
        assert "--init-from is needed: this recipe fine-tunes LaViLa's" in capsys.readouterr().err
    assert mmts.parse_args([*EPIC, "--init-from", "lavila.pt"]).pretrained
    assert not mmts.parse_args([*EPIC, "--no-pretrained"]).pretrained
    assert mmts.parse_args([*EPIC, "--image-encoder", "small"]).image_encoder == "small"


# ------------------------------------------------------- the bases of MAMA ----------------------
@pytest.mark.parametrize(
    "dataset, length, frames, batch",
    [("msrvtt", 50, 12, 8 * 16), ("didemo", 70, 12, 8 * 16), ("activitynet", 70, 32, 8 * 8)],
)
def test_the_base_of_tables_3_and_4_is_clip_vips_own(dataset, length, frames, batch):
    """Its authors' configuration, for as many epochs as MAMA, with a warm-up of 1 % of them."""
    runs = [args for row, args in table_runs("mama") if row == "3, 4"]
    (base,) = [args for args in runs if args.baseline and args.dataset == dataset]
    ours = mama.parse_args(["--dataset", dataset])
    assert (base.lr, base.weight_decay, base.betas) == (1e-6, 0.2, [0.9, 0.98])
    assert (base.tau, base.learnable_tau, base.batch_size) == (0.01, True, batch)
    assert (base.frames, base.text_length, base.grad_clip) == (frames, length, 1.0)
    assert (base.lr_schedule, base.lr_end) == ("cosine", 0.0)
    assert (base.epochs, base.warmup_fraction) == (ours.epochs, 0.01)
    assert (base.weighting, base.margin_schedule) == ("none", "none")
    plain = mama.parse_args(["--dataset", dataset, "--baseline"])
    assert (plain.tau, plain.batch_size, plain.lr) == (1.0, 4, 5e-6)


def test_vocabularies_of_answers_are_violets():
    for name, size in {"msrvtt-qa": 1500, "msvd-qa": 1000, "tgif-qa-r-frame": 1540}.items():
        assert mama_qa.parse_args(["--dataset", name]).answers == size
        vgt = ["--recipe", f"{name}-vgt", "--region-dir", "x"]
        assert mama_qa.parse_args(["--dataset", name, *vgt]).answers == size


# ------------------------------------------------------- commands of the tables ------------------
PAGES = Path(mmts.__file__).parent / "docs"
SCRIPTS = {
    "temo": temo,
    "mmts": mmts,
    "ncl": ncl,
    "mama": mama,
    "temperature_schedules": temperature_schedules,
}


def table_runs(name, variant=None):
    """(row's first cell, flags) of each whole command of a script in the tables of its page, or of
    a variant there."""
    script, program = SCRIPTS[name], rf"{name}\.py"
    if variant:
        script, program = variant, f"-m {re.escape(variant.__name__)}"
    runs = []
    for line in (PAGES / f"{name}.md").read_text(encoding="utf8").splitlines():
        if not line.startswith("| "):
            continue
        for words in re.findall(rf"`python {program} ([^`]*)`", line):
            args = script.parse_args(shlex.split(words))
            runs.append((line.split("|")[1].strip(), args))
    return runs


def says(page, words):
    """Whether a page has these words, which may go on in the next line."""
    return words in " ".join((PAGES / f"{page}.md").read_text(encoding="utf8").split())


VIDEO_FLAGS = "Add `--data-dir ANNOTATIONS --video-dir VIDEOS` to all commands "  # said once


def test_rows_of_temo_have_paraphrases_where_they_read_them():
    """Rows c, f and g do; a, b, d, e, the experts and the baselines have no T~."""
    runs = table_runs("temo")
    readers = set()
    for row, args in runs:
        reads_them = temo.has_unimodal_terms(args)
        assert bool(args.paraphrases) == reads_them, (row, args.command_line)
        if reads_them:
            readers.add(row)
    assert readers == {"1, 4", "2", "3, 6", "Fig. 7"} and len(runs) >= 11
    losses = {(args.dataset, args.loss) for row, args in runs if row == "2"}
    pairs = {(data, loss) for data in ("cc3m", "cc12m") for loss in ("temo", "infonce")}
    assert losses == pairs | {("cc12m", "ts")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_that_evaluate_during_training_have_something_to_evaluate(name):
    for row, args in table_runs(name):
        datasets = getattr(args, "eval_datasets", []) or [args.dataset]
        has_val = any("val" in splits_of(data) for data in datasets)
        assert args.eval_every <= 0 or has_val or args.holdout_fraction, row


def test_rows_of_mm_ts_have_videos_first_weights_and_a_learnt_tau():
    """And the supplement's ranges, of both losses (Section 7)."""
    assert says("mmts", f"{VIDEO_FLAGS}but those of cc3m")
    runs, of_vast = table_runs("mmts"), table_runs("mmts", mmts_vast)
    ranges = {}
    for row, args in runs + of_vast:
        if args.dataset != "cc3m":
            assert args.init_from and args.pretrained, row
        if args.schedule and args.shifts and row != "8":
            ranges[args.dataset, args.loss] = (args.alpha, args.shift_min, args.shift_max)
    assert ranges == {
        ("cc3m", "clip"): (0.04, 0.05, 0.1),
        ("epic-kitchens-100", "max-margin"): (0.2, 0.17, 0.3),
        ("epic-kitchens-100", "clip"): (0.08, 0.05, 0.2),
        ("youcook2", "clip"): (0.06, 0.06, 0.09),
        ("youcook2", "max-margin"): (0.2, 0.1, 0.3),
        ("ssv2-lt", "clip"): (0.04, 0.07, 0.11),
    }
    for row, args in of_vast:
        assert args.modalities == ("v" if args.dataset == "ssv2-lt" else "vas"), row
        is_fixed = not args.schedule and not args.shifts
        assert args.learnable_tau == is_fixed, row
    assert {row for row, _ in runs} >= {"1", "2", "4", "5"}
    assert {row for row, args in of_vast} == {"3", "6", "7", "8", "9"}
    assert {row for row, args in of_vast if args.learnable_tau} == {"7", "9"}


def test_rows_of_clip4clip_have_its_schedule():
    """5 epochs and a warm-up of 10 % on every set; NCL's own on the others."""
    assert says("ncl", f"{VIDEO_FLAGS}of ncl.py")
    runs = table_runs("ncl")
    for row, args in runs:
        if args.loss == "infonce":
            assert (args.epochs, args.warmup_fraction, args.normalize) == (5, 0.1, "none"), row
    baselines = {args.dataset for _, args in runs if args.loss == "infonce"}
    assert baselines == {"activitynet", "msvd", "msrvtt"}
    kept = ncl.parse_args(["--dataset", "msvd", "--baseline"])
    assert (kept.epochs, kept.warmup_fraction) == (3, 0)
    ((row, args),) = table_runs("ncl", ncl_ssb)
    assert row == "4" and args.data_dir and len(args.feature_dir) == 2


def test_rows_of_mama_have_videos_and_the_weights_of_clip_vip():
    assert says("mama", f"{VIDEO_FLAGS}that train")
    runs = table_runs("mama")
    for row, args in runs:
        if args.baseline or args.image_encoder.startswith("clip_vip:"):
            assert args.init_from and args.image_encoder.startswith("clip_vip:"), row
    assert {"3, 4", "5", "6", "8"} <= {row for row, _ in runs}
    questions = table_runs("mama", mama_qa)
    assert {"1", "2", "Fig. 4"} == {row for row, _ in questions}
    assert {args.qa_model for row, args in questions if row == "2"} == {"fusion", "vgt"}


def test_rows_of_ts_compare_on_the_same_sets():
    files = "--data-dir IMAGENET --index-file TRAIN --test-file TEST --few-shot-file FEW"
    assert says("temperature_schedules", f"ImageNet100 needs `{files}`")
    runs = [args for row, args in table_runs("temperature_schedules") if row == "3"]
    pruned = [args for row, args in table_runs("temperature_schedules", sdclr) if row == "3"]
    assert {args.dataset for args in pruned} == {"cifar10-lt", "cifar100-lt", "imagenet100-lt"}
    sizes = {}
    for args in [*runs, *pruned]:
        if args.dataset == "imagenet100-lt":
            schedule = getattr(args, "schedule", "sdclr")
            sizes[schedule] = (args.epochs, args.batch_size)
    assert sizes == {"fixed": (800, 512), "cos": (800, 512), "sdclr": (500, 256)}


def test_rows_of_ts_have_the_paper_s_temperatures():
    """tau of the fixed rows, the limits and the period of all others."""
    found = set()
    for row, args in table_runs("temperature_schedules"):
        if args.schedule == "fixed":
            found.add((row, args.tau))
        else:
            found.add((row, args.schedule, args.tau_min, args.tau_max, args.period))
    assert found == {
        ("Figs. 1, 2", 0.1),
        ("2", "cos", 0.1, 1.0, 400.0),
        ("3", "cos", 0.1, 1.0, 400.0),
        ("3", 0.2),
        ("4", "cos", 0.07, 0.5, 400.0),
        ("5", "step", 0.1, 0.5, 400.0),
        ("6, Fig. 4", "cos", 0.1, 1.0, 200.0),
        ("10", "cos", 0.1, 0.5, 400.0)}
