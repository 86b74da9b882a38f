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


def table_runs(page, script):
    """(row's first cell, flags) of each whole command of a script in the tables of a page."""
    program = rf"{page}\.py"
    if script.__name__ != page:
        program = f"-m {re.escape(script.__name__)}"
    runs = []
    for line in (PAGES / f"{page}.md").read_text(encoding="utf8").splitlines():
        if line.startswith("| "):
            for words in re.findall(rf"`python {program} ([^`]*)`", line):
                args = script.parse_args(shlex.split(words))
                runs.append((line.split("|")[1].strip(), args))
    return runs


@pytest.mark.parametrize("page", SCRIPTS)
def test_rows_that_evaluate_during_training_have_something_to_evaluate(page):
    for row, args in table_runs(page, SCRIPTS[page]):
        datasets = getattr(args, "eval_datasets", []) or [args.dataset]
        has_val = any("val" in splits_of(data) for data in datasets)
        assert args.eval_every <= 0 or has_val or args.holdout_fraction, row


TABLES = {  # name: page, script, flags and all their values; "table" is the row's first cell
    "TeMo reads paraphrases in its unimodal terms": ("temo", temo, """
        table  dataset loss     row paraphrases
        1,4    cc3m    infonce  g   -
        1,4    cc3m    ts       g   -
        1,4    cc3m    cwcl     g   -
        1,4    cc3m    dystress g   -
        1,4    cc3m    temo     g   p.jsonl
        2      cc3m    infonce  g   -
        2      cc3m    temo     g   p.jsonl
        2      cc12m   infonce  g   -
        2      cc12m   ts       g   -
        2      cc12m   temo     g   p.jsonl
        3,6    cc3m    temo     a   -
        3,6    cc3m    temo     b   -
        3,6    cc3m    temo     c   p.jsonl
        Fig.7  cc12m   temo     g   p.jsonl"""),
    "an expert alone has more weight": ("temo", temo_experts, """
        image_expert          image_expert_weight text_expert_weight lr     expert_inputs
        facebook/dinov2-small 0.6                 0.4                0.0008 clean
        -                     0.6                 0.4                0.0008 clean
        facebook/dinov2-small 0.1                 0.1                0.0008 clean"""),
    "MM-TS, ranges of Section 7": ("mmts", mmts, """
        table dataset           loss       schedule shifts alpha shift_min shift_max
        1     cc3m              clip       False    False  0.04  0.05      0.1
        1     cc3m              clip       True     True   0.04  0.05      0.1
        2     epic-kitchens-100 max-margin True     True   0.2   0.17      0.3
        4     epic-kitchens-100 clip       True     True   0.08  0.05      0.2
        5     epic-kitchens-100 max-margin True     True   0.2   0.17      0.3"""),
    "towers of videos start from weights": ("mmts", mmts, """
        dataset           init_from pretrained
        cc3m              -         True
        epic-kitchens-100 WEIGHTS   True"""),
    "VAST learns tau where it is fixed": ("mmts", mmts_vast, """
        table dataset  loss       schedule shifts learnable_tau alpha shift_min shift_max
        3     youcook2 clip       True     True   False         0.06  0.06      0.09
        6     youcook2 clip       True     True   False         0.06  0.06      0.09
        7     ssv2-lt  clip       True     True   False         0.04  0.07      0.11
        7     ssv2-lt  clip       False    False  True          0.04  0.07      0.11
        8     ssv2-lt  clip       True     True   False         0.02  0.05      0.09
        9     youcook2 clip       True     False  False         0.06  0.06      0.09
        9     youcook2 clip       False    False  True          0.06  0.06      0.09
        9     youcook2 max-margin True     True   False         0.2   0.1       0.3"""),
    "VAST starts from its weights": ("mmts", mmts_vast, """
        init_from     pretrained
        PRETRAIN_VAST True"""),
    "CLIP4Clip trains 5 epochs with a warm-up of 10 %": ("ncl", ncl, """
        table dataset     loss    epochs warmup_fraction normalize
        1     activitynet infonce 5.0    0.1             none
        1     activitynet ncl     10.0   0.1             queue
        2     msvd        infonce 5.0    0.1             none
        2     msvd        ncl     3.0    0.0             queue
        3     msrvtt      infonce 5.0    0.1             none
        3     msrvtt      ncl     5.0    0.1             queue"""),
    "SSB reads two folders of features": ("ncl", ncl_ssb, """
        table feature_dir
        4     ['MOTION','APPEARANCE']"""),
    "CLIP-ViP's weights and optimiser": ("mama", mama, """
        image_encoder                         init_from                   betas      grad_clip
        clip_vip:openai/clip-vit-base-patch16 pretrain_clipvip_base_16.pt [0.9,0.98] 1.0"""),
    "CLIP-ViP's schedule": ("mama", mama, """
        lr_schedule lr_end warmup_fraction
        cosine      0.0    0.01"""),
    "CLIP-ViP trains for as long as MAMA": ("mama", mama, """
        table dataset     weighting lr    weight_decay tau  learnable_tau epochs
        3,4   msrvtt      none      1e-06 0.2          0.01 True          5.0
        3,4   didemo      none      1e-06 0.2          0.01 True          20.0
        3,4   activitynet none      1e-06 0.2          0.01 True          20.0
        3,4   msrvtt      meta      5e-06 0.05         1.0  False         5.0
        5     msrvtt      meta      5e-06 0.05         1.0  False         5.0
        6     msrvtt      focal     5e-06 0.05         1.0  False         5.0
        8     msrvtt      joint     5e-06 0.05         1.0  False         5.0"""),
    "CLIP-ViP's inputs": ("mama", mama, """
        dataset     baseline batch_size frames text_length
        msrvtt      True     128        12     50
        didemo      True     128        12     70
        activitynet True     64         32     70
        msrvtt      False    4          12     70"""),
    "both models of answers": ("mama", mama_qa, """
        table dataset      qa_model baseline
        1     msrvtt-qa    fusion   True
        1     msrvtt-qa    fusion   False
        2     nextqa       fusion   False
        2     nextqa       vgt      False
        2     causal-vidqa fusion   False
        Fig.4 msvd-qa      fusion   False"""),
    "TS, temperatures and lengths": ("temperature_schedules", ts, """
        table     dataset        loss    schedule tau tau_min tau_max period epochs batch_size
        Figs.1,2  cifar10-lt     moco    fixed    0.1 0.1     1.0     400.0  2000.0 512
        2         cifar10-lt     moco    cos      0.2 0.1     1.0     400.0  2000.0 512
        3         imagenet100-lt simclr  cos      0.2 0.1     1.0     400.0  800.0  512
        3         imagenet100-lt simclr  fixed    0.2 0.1     1.0     400.0  800.0  512
        4         cifar10-lt     moco    cos      0.2 0.07    0.5     400.0  2000.0 512
        5         cifar10-lt     moco    step     0.2 0.1     0.5     400.0  2000.0 512
        6,Fig.4   cifar10-lt     moco    cos      0.2 0.1     1.0     200.0  2000.0 512
        10        cifar10-lt     moco    cos      0.2 0.1     0.5     400.0  2000.0 512"""),
    "SDCLR, sets and lengths of its scripts": ("temperature_schedules", sdclr, """
        table dataset        epochs batch_size
        3     cifar10-lt     2000.0 512
        3     cifar100-lt    2000.0 512
        3     imagenet100-lt 500.0  256""")}


@pytest.mark.parametrize("page, script, table", TABLES.values(), ids=TABLES)
def test_rows_have_the_values_of_the_paper(page, script, table):
    names, *expected = [line.split() for line in table.split("\n") if line]
    rows = []
    for first_cell, args in table_runs(page, script):
        flags = vars(args) | {"table": first_cell}
        row = [str(flags[name]).replace(" ", "") or "-" for name in names]
        if row not in rows:
            rows.append(row)
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize("words, names, prompts", [
    ("--dataset cc12m", "clip", "slip"),
    ("--dataset cc3m", "wordnet", "openai"),
    ("--eval-datasets imagenet", "wordnet", "openai")])
def test_imagenet_has_the_names_and_prompts_of_the_base_model(words, names, prompts):
    options = data_options(temo.parse_args(words.split()), "imagenet")
    assert (options.class_names, options.prompts) == (names, prompts)
