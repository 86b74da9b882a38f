"""The scripts stay siblings: shared blocks are equal, no flag is dead, METHOD comes first, the loop
is in the open."""

import ast
import importlib
import re
from argparse import Namespace
from pathlib import Path

import common
from contrastive.engine.run import Steps

import pytest

ROOT = Path(__file__).resolve().parent.parent
# the losses that a fork edits: `main` calls these, not their parts
LOSSES = {
    "temo": "temo_loss multimodal_loss cwcl_loss nt_xent",
    "mmts": "clip_loss max_margin_loss",
    "ncl": "ncl_loss hardest_negative_loss",
    "mama": "sample_losses",
    "temperature_schedules": "nt_xent moco_loss",
}
each_script = pytest.mark.parametrize("name", LOSSES)


def text_of(name):
    return (ROOT / f"{name}.py").read_text(encoding="utf8")


@each_script
def test_shared_blocks(name):
    ours, temo_s = (
        re.findall(r"# >>> shared: (\w+)\n(.*?)# <<< shared", text_of(of), re.S)
        for of in (name, "temo")
    )
    assert ours == temo_s and ours[0][0] == "optimizer"


@each_script
def test_every_flag_is_read(name):
    """As args.NAME, options.NAME or by name: in the script, or where no flags are declared."""
    texts = {p: p.read_text(encoding="utf8") for p in (ROOT / "contrastive").rglob("*.py")}
    flags = ROOT / "contrastive" / "engine" / "flags.py"
    opened = ROOT / "contrastive" / "data" / "__init__.py"
    texts[flags] = texts[flags].partition("    def add_shared_flags")[0]
    texts[opened] = re.sub(r"[A-Z]+_FLAGS = \(.*?\)", "", texts[opened], flags=re.S)
    everything = "".join([text_of(name), text_of("common"), *texts.values()])
    read = set()
    for pair in re.findall(r'\b(?:args|options)\.(\w+)|"(\w+)"', everything):
        read.update(pair)
    script, moving = importlib.import_module(name), ["--dataset", "moving-emoji"]
    never = (vars(script.parse_args([])) | vars(script.parse_args(moving))).keys() - read
    assert not never, f"{name}: {never} are never read"


@each_script
def test_the_order_of_a_script(name):
    """METHOD right after the imports; the loss, the backward and the step in main's loop and not in
    Run."""
    text, tree = text_of(name), ast.parse(text_of(name))
    rulers = re.findall(r"^# =+ (\w+) =+$|^    # -+ ([a-z].*?) -+$", text, re.M)
    names = [a or b.split(" (")[0] for a, b in rulers]
    order = [
        "METHOD",
        "flags",
        "main",
        "data",
        "model and optimiser",
        "views and batches",
        "loop",
        "save and evaluate",
    ]
    assert [n for n in names if n in order] == order
    first = next(
        k for k, n in enumerate(tree.body) if k and not isinstance(n, ast.Import | ast.ImportFrom)
    )
    between = text.splitlines()[tree.body[first - 1].lineno - 1 : tree.body[first].lineno]
    assert isinstance(tree.body[first], ast.FunctionDef)
    assert any("= METHOD =" in line for line in between)
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    assert {*LOSSES[name].split()} <= {n.id for n in ast.walk(main) if isinstance(n, ast.Name)}
    loop = next(n for n in main.body if isinstance(n, ast.For) and ast.unparse(n.iter) == "batches")
    said = ast.unparse(loop)
    assert re.search(r"^\s+loss = ", said, re.M)
    assert "chunks.backward(loss)" in said
    assert "optimizer.step()" in said
    assert not [n for n in ast.walk(loop) if isinstance(n, ast.FunctionDef | ast.Lambda)], (
        "the loss is in a closure"
    )
    run = (ROOT / "contrastive" / "engine" / "run.py").read_text(encoding="utf8")
    assert not re.search(
        r"self\.(model|tower|trained)\(|\.backward\(|optimizer\.step\(|zero_grad\(|torch\.optim",
        run,
    )
    code = text.split('"""', 2)[2]  # a copy is another script
    assert f"{name}.py" not in code and code.count("__file__") == 2
    assert code.endswith(
        'if __name__ == "__main__":\n    with clean_exit():\n        main(parse_args())\n'
    )


def test_learning_rates():
    """After two steps of warm-up from 4 to 1 at the end: half way cosine and line meet, not a
    quarter before."""
    steps = Steps(per_epoch=5, total=10, warmup=2)
    rates = {}
    for kind in ("cosine", "linear", "constant"):
        args = Namespace(lr=4.0, lr_end=1.0, lr_schedule=kind)
        rates[kind] = [common.learning_rate(k, steps, args) for k in (0, 1, 2, 4, 6, 10)]
    assert rates["linear"] == pytest.approx([2, 4, 4, 3.25, 2.5, 1])
    assert rates["cosine"] == pytest.approx([2, 4, 4, 1 + 1.5 * (1 + 0.5**0.5), 2.5, 1])
    assert rates["constant"] == [2, 4, 4, 4, 4, 4]
    with pytest.raises(ValueError, match="--lr-schedule step has no branch"):
        common.learning_rate(0, steps, Namespace(lr=4.0, lr_end=1.0, lr_schedule="step"))
