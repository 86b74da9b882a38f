"""The scripts and variants stay siblings: shared blocks are equal, METHOD comes first, the loop is
in the open, every flag is read."""

import ast
import importlib
import re
from argparse import Namespace
from pathlib import Path

import common
from contrastive.engine.run import Steps

import pytest

from helpers import run_script

ROOT = Path(__file__).resolve().parent.parent
# the losses that README shows, and a fork edits: `main` calls these, not their parts
LOSSES = {
    "temo": ["temo_loss"],
    "mmts": ["clip_loss", "max_margin_loss"],
    "ncl": ["ncl_loss"],
    "mama": ["angular_margin_loss"],
    "temperature_schedules": ["nt_xent", "moco_loss"]}
VARIANTS = sorted(f"variants.{path.stem}" for path in (ROOT / "variants").glob("[a-z]*.py"))
each_script = pytest.mark.parametrize("name", LOSSES)
each_program = pytest.mark.parametrize("name", [*LOSSES, *VARIANTS])


def text_of(name):
    return (ROOT / name.replace(".", "/")).with_suffix(".py").read_text(encoding="utf8")


@each_program
def test_shared_blocks_are_equal(name):
    block = r"# >>> shared: (\w+) .*?\n(.*?)# <<< shared"
    ours = re.findall(block, text_of(name), re.S)
    assert ours == re.findall(block, text_of("temo"), re.S)
    assert [title for title, _ in ours] == ["prepare"]


@each_program
def test_rulers_stand_in_one_order(name):
    rulers = re.findall(r"^# =+ (\w+) =+$|^    # -+ ([a-z]+)", text_of(name), re.M)
    titles = [section or part for section, part in rulers]
    assert titles == ["METHOD", "flags", "main", "data", "model", "views", "loop", "save"]


@each_program
def test_the_loop_is_in_the_open(name):
    nodes = ast.parse(text_of(name)).body
    (main,) = [node for node in nodes if getattr(node, "name", "") == "main"]
    (loop,) = [node for node in main.body if isinstance(node, ast.For)]
    source = ast.unparse(loop)
    for call in (
            "accelerator.backward(loss", "optimizer.step()", "optimizer.zero_grad()",
            "run.end_step("):
        assert call in source
    for node in ast.walk(loop):
        assert not isinstance(node, ast.FunctionDef | ast.Lambda), "the loss is in a closure"


@each_program
def test_a_copy_is_another_script(name):
    code = text_of(name).split('"""', 2)[2]
    assert code.count("__file__") == 2
    assert f"{name}.py" not in code
    assert code.endswith(
        'if __name__ == "__main__":\n    with clean_exit():\n        main(parse_args())\n')


@each_script
def test_main_calls_the_loss_that_readme_shows(name):
    names = set()
    for node in ast.parse(text_of(name)).body:
        if getattr(node, "name", "") in ("main", "baseline_loss"):
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    assert set(LOSSES[name]) <= names


@each_program
def test_a_script_assigns_nothing_of_run(name):
    for node in ast.walk(ast.parse(text_of(name))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert ast.unparse(node.value) != "run", node.attr


def test_run_trains_nothing():
    text = (ROOT / "contrastive" / "engine" / "run.py").read_text(encoding="utf8")
    for call in ("self.model(", ".backward(", "optimizer.step(", "zero_grad(", "torch.optim"):
        assert call not in text


# ----------------------------------------------- every flag is read ------------------------------
class RecordingNamespace(Namespace):
    """Flags that note which of them a run reads. vars(args), as args.json has them, is no read."""

    read = set()

    def __getattribute__(self, name):
        RecordingNamespace.read.add(name)
        return super().__getattribute__(name)


# flags that the run of the test does not read, and why
UNREAD = {
    "recipe": "the parser reads it",
    "recipes": "no flag: the banner reads it on data of one's own",
    "baseline": "a preset: the parser reads it",
    "epochs": "--max-steps is given",
    "feature_cache": "with --freeze",
    "tau_clamp": "with --learnable-tau",
    "margin": "of mmts.py, with --loss max-margin",
    "queue_size": "of temperature_schedules.py, with --loss moco",
    "momentum": "with --loss moco"}
SMALL = (
    "--cpu --workers 0 --dataset moving-emoji --clips 32 16 16 --frames 2 --max-steps 2 "
    "--batch-size 8 --image-size 16 --log-every 1 --eval-every 1").split()
WORDS = {  # flags beside which others have an effect
    "temo": ["--image-aug", "simclr"],
    "mmts": ["--num-clusters", "4"],
    "mama": ["--meta-size", "4", "--meta-batch-size", "2"]}


@each_script
def test_a_run_reads_every_flag(name, tmp_path, monkeypatch):
    script = importlib.import_module(name)
    parse_args = script.parse_args
    flags = set()

    def recording_flags(argv):
        args = RecordingNamespace(**vars(parse_args(argv)))
        flags.update(vars(args))
        RecordingNamespace.read = set()
        return args

    monkeypatch.setattr(script, "parse_args", recording_flags)
    run_script(script, tmp_path / "run", *SMALL, *WORDS.get(name, ()))
    unread = flags - RecordingNamespace.read
    assert unread <= UNREAD.keys()


# ----------------------------------------------- learning rates ----------------------------------
RATES = {  # at steps 0, 1, 2, 4, 6, 10, of which two are warm-up
    "linear": [2, 4, 4, 3.25, 2.5, 1],
    "cosine": [2, 4, 4, 1 + 1.5 * (1 + 0.5**0.5), 2.5, 1],
    "constant": [2, 4, 4, 4, 4, 4]}


@pytest.mark.parametrize("schedule", RATES)
def test_learning_rates(schedule):
    steps = Steps(per_epoch=5, total=10, warmup=2)
    args = Namespace(lr=4.0, lr_end=1.0, lr_schedule=schedule)
    rates = [common.learning_rate(k, steps, args) for k in (0, 1, 2, 4, 6, 10)]
    assert rates == pytest.approx(RATES[schedule])
