"""Flags of the five scripts: what is refused, and in which words; what recipes give; what a resume may change."""

import ast
import importlib
import json
import math
import re
from argparse import Namespace
from pathlib import Path

import common
from contrastive import data as data_sets
from contrastive.engine import flags as engine_flags
from contrastive.engine.processes import UserError
from contrastive.engine.run import Run

import pytest
import torch

import mama
import ncl
import temo
from helpers import few_steps, refused, write_captions

ROOT = Path(__file__).resolve().parent.parent
TS, NAMES = "temperature_schedules", ("temperature_schedules", "mmts", "ncl", "mama", "temo")
each_script = pytest.mark.parametrize("name", NAMES)


def parse(name, words=""):
    return importlib.import_module(name).parse_args(words.split() if isinstance(words, str) else words)


# ----------------------------------------------- what is refused ----------------------------------------------------
REFUSED = {  # script: {flags: words of the one line}
    "temo": {
        "--batch-size many": "--batch-size invalid whole number value: 'many'",
        "--tau 0": "--tau 0: must be at least 1e-12", "--beta2 1": "--beta2 1: must be between 0 and 1",
        "--crop-min 2": "must be between 0 and 1", "--randaugment-magnitude 40": "must be between 0 and 30",
        "--mixed-precision fp8": "invalid choice: 'fp8'",
        "--randaugment-magnitude 9": "--randaugment-magnitude: only with --randaugment-ops above 0",
        "--clip-law zipf": "unknown: --clip-law zipf; near it:",           # of moving-emoji, and not of emoji
        "--dataset moving-emoji --fold 3": "unknown: --fold 3; near it:",
        "--max-step 2": "unknown: --max-step 2; near it: --max-steps",
        "--warmup-fraction .1 --warmup-epochs 1": "give one of them",
        "--dataset my.csv --recipe cc4m": "--recipe cc4m: there are emoji, ",
        "--no-base --no-modulated --unimodal none": "leaves no loss", "--loss slip --tau 1.5": "--tau-clamp",
        "--learnable-tau": "--learnable-tau: only with --loss infonce, slip or cwcl",
        "--loss infonce --text-expert a/b": "--text-expert: only with --loss temo",
        "--loss infonce --no-modulated": "--no-modulated: only with --loss temo",
        "--aug-hue 0": "--aug-hue: only with --image-aug simclr or --loss slip",
        "--unimodal none --paraphrases p.jsonl": "--paraphrases: only with I~ and T~",
        "--row a --blend fixed": "--blend: only with L_MM and another term of --loss temo",
        "--paraphrase-anchor": "--paraphrase-anchor: only with --paraphrases",
        "--row c --similarity cosine": "--similarity: only with --loss temo (a modulated term)",
        "--no-base --tau 0.1": "--tau: only with L_MM", "--loss ts --tau 0.1": "--tau: only with L_MM",
        "--loss cwcl --tau-alpha=0.1": "--tau-alpha: only with --loss temo (a modulated term, or an expert), ts or",
        "--loss ts --detach-tau": "--detach-tau: only with --loss temo (a modulated term) or",
        "--tau-clamp 0.001 0.5": "--tau-clamp: only with --learnable-tau",
        "--image-expert a --row e": "--row: only with --loss temo, without experts",
        "--image-expert a --text-expert-weight 1": "--text-expert-weight: only with --text-expert"},
    TS: {
        "--tau-max 0.05": "must be at least --tau-min",
        "--schedule fixed --tau-max 0.5": "--tau-max: only without --schedule fixed",
        "--tau-head 1 --tau-tail 0.1 --schedule step": "--schedule: only without --tau-head",
        "--schedule fixed --learnable-tau --tau-min 0.001": "--tau-min: if learnt at least 0.01",
        "--recipe cifar10-lt --loss sdclr --tau-head 1 --tau-tail 0.1 --learnable-tau": "without --tau-head",
        "--tau-head 1": "give both", "--tau-tail 1": "give both", "--prune 0.9": "--prune: only with --loss sdclr",
        "--queue-size 9": "--queue-size: only with --loss moco", "--loss moco --chunk-size 8": "not with --loss moco",
        "--loss moco --head-norm none": "--head-norm: only with --loss simclr or sdclr",
        "--imbalance-ratio 0.5": "must be at least 1, or 0", "--stop-at-phase 0.7 --period 99": "no full --period",
        "--eval-epoch 31": "at most --epochs 30", "--eval-epoch last": "must be auto",
        "--eval-epoch 3 --stop-at-phase 0.7": "only without --eval-epoch",
        "--shot-limits 20 100": "TAIL must be from 1 to HEAD + 1", "--shot-limits 5 0": "or both 0"},
    "mmts": {
        "--alpha 0.1 --shift-min 0.05": "the temperatures of the run, 0 .. 0.17, must be above 0; lower --alpha, or",
        "--loss max-margin --alpha 0.5": "the margins of the run, -0.08 .. 0.55, must be from 0",
        "--loss max-margin --no-shifts --margin 2": "the margins of the run, 1.9 .. 2.1, must be",
        "--shift-min 0.2 --shift-max 0.1": "--shift-min 0.2: larger than --shift-max 0.1",
        "--learnable-tau": "--learnable-tau: only with --loss infonce --no-schedule --no-shifts",
        "--no-schedule --no-shifts --learnable-tau --tau 0.001": "--tau: if learnt in (0.01, 1.0)",
        "--randaugment-magnitude 9": "--randaugment-magnitude: only with --randaugment-ops above 0",
        "--clusters none": "--shifts need clusters", "--cluster-encoder small": "small: has no trained weights",
        "--tau 0.1": "--tau: only with --loss infonce --no-shifts",
        "--no-shifts --shift-max 1": "--shift-max: only with --shifts",
        "--no-schedule --periods 3": "--periods: only with --schedule",
        "--clusters noun --num-clusters 9": "--num-clusters: only with --clusters captions or vision"},
    "ncl": {
        "--margin 0.1": "--margin: only with --loss max-margin", "--image-encoder ssb": "--feature-dir",
        "--loss max-margin --learnable-tau": "--learnable-tau: only with --loss ncl or infonce",
        "--learnable-tau --tau 0.001": "--tau: if learnt at least 0.01",
        "--feature-dir .": "--feature-dir: only with --image-encoder ssb",
        "--optimizer sgd --beta2 0.9": "--beta2: only with --optimizer adamw or adam"},
    "mama": {
        "--lr-schedule constant --lr-end 0": "--lr-end: only with --lr-schedule cosine or linear",
        "--a0 20": "--a0 20 --a1 10: the margin a0 / a1 must be at most pi / 2", "--learnable-tau --tau 2": "--tau",
        "--chunk-size 4": "--chunk-size: --weighting meta encodes the whole batch",
        "--loss infonce --weighting meta": "--weighting: only with --loss mama",
        "--weighting l2rw --meta-every 2": "--meta-every: only with --weighting meta",
        "--eta 2": "--eta: only with --task qa-open or qa-choice; it would have no effect",
        "--focal-gamma=2": "--focal-gamma: only with --weighting focal",
        "--weighting none --meta-batch-size 8": "--meta-batch-size: only with --weighting meta or l2rw",
        f"--meta-set {__file__} --meta-size 24": "--meta-size: only with --weighting meta or l2rw and --meta-set train",
        "--margin-schedule none --a0 1": "--a0: only with a margin",
        "--margin-schedule constant --a2 1": "--a2: only with --margin-schedule logistic"}}


@pytest.mark.parametrize("name, words", [(name, words) for name, table in REFUSED.items() for words in table])
def test_refused_in_one_line(name, words, capsys):
    assert REFUSED[name][words] in refused(importlib.import_module(name).parse_args, words.split(), capsys)


def test_the_main_process_alone_says_which_flag_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(SystemExit, match="2"):
        parse("temo", "--tau 0")
    assert not capsys.readouterr().err


@each_script
def test_a_number_has_a_range(name, capsys):
    """What no flag of a number takes, in the script's own flags; temo: in those of all scripts, too."""
    files = [ROOT / f"{name}.py", *([ROOT / "contrastive" / "engine" / "flags.py"] if name == "temo" else [])]
    calls = [node for f in files for node in ast.walk(ast.parse(f.read_text(encoding="utf8")))
             if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add_argument", "add")
             and node.args and isinstance(node.args[0], ast.Constant)]     # not the choosers, copies of these flags
    asked = 0
    for call in calls:
        more = {k.arg: k.value for k in call.keywords}
        for value in ("nan", "-1000000001") if "type" in more else ():
            flag, times = call.args[0].value, ast.literal_eval(more["nargs"]) if "nargs" in more else 1
            said = refused(importlib.import_module(name).parse_args, [flag, *[value] * times], capsys)
            assert said.startswith(f"error: {flag} ") and value in said, said
            asked += 1
    assert asked > 20


HELP = [("temo", "--batch-size", {"cc3m": 2048, "cc12m": 4096, "emoji": 256}), ("ncl", "--epochs", {"msrvtt": 5.0}),
        ("mmts", "--alpha", {"cc3m": 0.04, "epic-kitchens-100": 0.2}), ("mama", "--epochs", {"didemo": 20.0}),
        (TS, "--period", {"emoji": 12.0})]


@pytest.mark.parametrize("name, flag, defaults", HELP)
def test_help(name, flag, defaults, monkeypatch, capsys):
    """At most 200 lines of a terminal of 80 columns, the method first, with the effective defaults."""
    monkeypatch.setenv("COLUMNS", "80")
    for dataset, value in defaults.items():
        with pytest.raises(SystemExit) as stop:
            parse(name, f"--dataset {dataset} --help")
        text = capsys.readouterr().out
        assert stop.value.code == 0 and len(text.splitlines()) <= 200 and "%(" not in text and "[]" not in text
        assert text.split("\n\n")[3].startswith("method:")
        assert re.search(rf"  {flag} X [^\[]* \[{value}\]", re.sub(r"\s+", " ", text).replace(flag, f" {flag}"))


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
    *[("temo", f"--row {row}", dict(blend="fixed")) for row in "cdf"],
    *[("temo", f"--row {row}", dict(blend="quadratic")) for row in "eg"],
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
    ("mmts", "--dataset youcook2", dict(
        loss="infonce", alpha=0.06, shift_min=0.06, shift_max=0.09, label_smoothing=0.1, clusters="captions", eps=1e-6,
        grad_clip=0)),
    ("mmts", "--dataset youcook2 --loss max-margin", dict(alpha=0.2, shift_min=0.1, shift_max=0.3, label_smoothing=0)),
    ("mmts", "--dataset ssv2-lt", dict(
        alpha=0.04, shift_min=0.07, shift_max=0.11, label_smoothing=0.1, clusters="label")),
    ("ncl", "--dataset msrvtt", CLIP4CLIP | dict(
        epochs=5, warmup_fraction=0.1, text_length=32, frames=12, unfold_captions=True)),
    ("ncl", "--dataset msvd", CLIP4CLIP | dict(epochs=3, warmup_fraction=0)),
    ("ncl", "--dataset activitynet", CLIP4CLIP | dict(
        epochs=10, warmup_fraction=0.1, text_length=64, frames=64, unfold_captions=False)),
    ("ncl", "--dataset msrvtt --loss infonce", dict(normalize="none")), ("ncl", "", dict(freeze="none")),
    ("ncl", "--dataset msrvtt --loss max-margin", dict(learnable_tau=False)),
    ("ncl", "--dataset msrvtt --image-encoder resnet18", dict(freeze="none")),
    ("ncl", "--dataset msrvtt --epochs 20", dict(warmup_epochs=0, warmup_fraction=0.1)),
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
    """The values of the set that --recipe names, but for that set's own flags; its place among the evaluation sets is
    that of the data; and what follows from the recipe (mmts.py's ranges, temo.py's rates) follows it."""
    module = importlib.import_module(name)
    for recipe in module.RECIPES:
        known = recipe if recipe != "own" else "other.csv"
        theirs, ours = (vars(module.parse_args(["--dataset", data, "--recipe", recipe])) for data in (known, "my.csv"))
        assert ours["recipe"] == recipe and ours["dataset"] == "my.csv" and not ours["changed"]
        assert ours.get("eval_datasets") == theirs.get("eval_datasets") or "my.csv" in ours["eval_datasets"]
        assert recipe not in ours.get("eval_datasets", ())
        other = {k for k in ours if ours[k] != theirs[k]}
        assert other <= {"dataset", "eval_datasets", "given"}, (recipe, other)
    assert module.parse_args(["--dataset", "my.csv"]).recipe == "own"
    assert module.parse_args([]).recipe == module.parse_args([]).dataset == next(iter(module.RECIPES))


def test_the_value_of_a_flag_stands_in_one_place(monkeypatch, capsys):
    """In the recipes, all of them, or as its default: an edited default that recipes override would do nothing."""
    defaults, set_defaults = {}, engine_flags.Parser.set_defaults

    def before_the_recipe(parser, **recipe):
        defaults[parser.prog] = {a.dest: a.default for a in parser._actions}
        set_defaults(parser, **recipe)
    monkeypatch.setattr(engine_flags.Parser, "set_defaults", before_the_recipe)
    everywhere = []
    for name in NAMES:
        module = importlib.import_module(name)
        asked = [module.parse_args(["--dataset", dataset]) for dataset in module.RECIPES if dataset != "own"]
        asked += [module.parse_args(["--task", "qa-open"])] if module is mama else []
        assert not any(value is None for args in asked for value in vars(args).values())
        everywhere.append(set.intersection(*map(set, module.RECIPES.values())) - {"loss"})  # it chooses a recipe
        groups = re.findall(r'^    g\.add_argument\("--([\w-]+)"', Path(module.__file__).read_text(), re.M)
        own = {flag.replace("-", "_") for flag in groups}
        assert not {k for k in own & everywhere[-1] if defaults[f"{name}.py"][k] is not None}, name
    shared = set.intersection(*everywhere) & set.intersection(*map(set, defaults.values()))
    assert not {k for k in shared if defaults["temo.py"][k] is not None}
    monkeypatch.setitem(ncl.RECIPES, "own", {k: v for k, v in ncl.OWN.items() if k not in ("tau", "lr_end")})
    said = refused(ncl.parse_args, ["--dataset", "mine.csv"], capsys)
    assert said == "error: --tau/--lr-end: no default; give one in parse_args or in every recipe\n"
    monkeypatch.setitem(ncl.RECIPES, "own", ncl.RECIPES["msrvtt"] | {"warm_up_epochs": 3.0})
    said = refused(ncl.parse_args, ["--dataset", "mine.csv"], capsys)
    assert said == "error: recipe own: there is no flag warm_up_epochs\n"


def test_a_paper_s_recipe_wants_a_card_or_to_be_told(tmp_path, monkeypatch):
    """One line with torch's own reason."""
    def no_card():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_card)
    data = str(write_captions(tmp_path, 24))
    args = parse("temo", ["--dataset", data, "--recipe", "cc3m", "--eval-datasets", data])
    with pytest.raises(UserError, match=r"^recipe cc3m without a card is for --cpu; torch: The NVIDIA .* 11040\).$"):
        temo.main(args)


@pytest.mark.parametrize("examples, batch, epochs", [(23, 20, 500), (24, 24, 500), (600, 256, 250)])
def test_own_data_take_the_batch_that_processes_share_and_500_steps(examples, batch, epochs, monkeypatch):
    """Without --batch-size; without --epochs as many whole epochs as make 500 steps, the warm-up in proportion."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    def fit(words, examples=examples):
        args = parse("temo", words)
        before = args.warmup_epochs / args.epochs
        said = Run._fit(Namespace(args=args, train=Namespace(examples=examples, name="x")))
        assert args.warmup_epochs / args.epochs == before or "--epochs" in words
        return args, said
    args, said = fit("--dataset x.csv")
    assert (args.batch_size, args.epochs) == (batch, epochs)
    assert (f"--batch-size 256 -> {batch}" in said) == (batch < 256) and f"-> {epochs}, which make 500 steps" in said
    args, said = fit("--dataset x.csv --epochs 3 --batch-size 20")
    assert said == "" and args.epochs == 3
    with pytest.raises(UserError, match="--batch-size 256: larger than the 3 training examples of x"):
        fit("--dataset x.csv", 3)


# ----------------------------------------------- a resumed run ------------------------------------------------------
@pytest.mark.parametrize("words", [
    "emoji --embed-dim 32", "emoji --image-encoder resnet18", "emoji --batch-size 4", "emoji --loss infonce",
    "emoji --seed 1", "emoji --dataset moving-emoji", "emoji --init-from /weights", "emoji --fold 3",
    "moving-emoji --clip-law zipf", "emoji --weight-decay 0.5", "emoji --run-name x", "emoji --output-dir x"])
def test_resume_with_a_changed_flag(words, tmp_path, capsys):
    dataset, flag, now = words.split()
    saved = vars(parse("temo", f"--dataset {dataset}")) | {"script": "temo"}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    said = refused(temo.parse_args, ["--resume", str(tmp_path), flag, now], capsys)
    assert f"{flag} cannot change in a run" in said
    assert f"--resume {tmp_path}: a run of temo.py, not of ncl.py" in refused(
        ncl.parse_args, ["--resume", str(tmp_path)], capsys)
    longer = parse("temo", ["--resume", str(tmp_path), "--epochs", "50"])
    assert (longer.epochs, longer.max_steps) == (50, 0)  # a saved number of steps would win


@pytest.mark.parametrize("name, words", [
    ("temo", "--loss infonce --lr 0.1"), ("temo", "--dataset cc3m --row a --lr 0.1"), ("mmts", "--loss max-margin"),
    ("ncl", "--dataset msrvtt --image-encoder ssb --feature-dir x --lr 0.1"), ("mama", "--task qa-open --lr 0.1")])
def test_a_resumed_run_differs_from_its_recipe_as_before(name, words, tmp_path):
    """Its loss, which chose its defaults, is not named again."""
    first = parse(name, words)
    (tmp_path / "args.json").write_text(json.dumps(vars(first) | {"script": name, "resume": ""}))
    resumed = parse(name, ["--resume", str(tmp_path), "--max-steps", "7"])
    assert first.changed and resumed.changed == [*first.changed, "--max-steps"]


def test_a_resume_of_no_run(tmp_path):
    for words in ("No such file", "Unterminated"):
        with pytest.raises(UserError, match=f"^{tmp_path}/args.json: .*{words}"):
            parse("temo", ["--resume", str(tmp_path)])
        (tmp_path / "args.json").write_text('{"script": "temo", "se')


def test_flags_of_a_data_set_that_is_evaluated_alone_are_used():
    args = parse("temo", "--dataset emoji --eval-datasets emoji moving-emoji --clips 50 20 10 --fold 3")
    _, sets = data_sets.open_data(args)
    assert [len(sets["moving-emoji"][s]) for s in ("val", "test")] == [20, 10]
    assert len(sets["emoji"]["test"]) == len(common.load_data("emoji", "test", fold=3)) != 168


def test_the_warm_up_is_a_part_of_the_run(tmp_path):
    log = few_steps(ncl, tmp_path / "r", *"--cpu --clips 64 8 8 --batch-size 16 --max-steps 8 --log-every 1".split(),
                    *"--eval-every 0 --warmup-fraction 0.5".split())
    assert [row["lr"] for row in log[:4]] == pytest.approx([2e-3 * k / 4 for k in (1, 2, 3, 4)])
    assert log[7]["lr"] < log[4]["lr"] <= 2e-3


@pytest.mark.parametrize("words, guess", [
    ("ncl", math.log(128)), ("ncl --loss-scale 3", 3 * math.log(128)), ("ncl --loss max-margin --margin 0.3", 0.6)])
def test_a_random_guess_is_that_of_the_loss(words, guess):
    args = ncl.parse_args([*words.split()[1:], "--batch-size", "128"])
    assert ncl.random_guess(None, args) == pytest.approx((guess, guess))
