"""The scripts stay siblings: shared blocks are identical, no flag is dead, METHOD comes first, ruff is content."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import common

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ROOT / f"{name}.py" for name in ("temperature_schedules", "mmts", "ncl", "mama", "temo")]
HOUSE = ("engine", "encoders", "data", "evaluation", "figures", "tools")
ROOMS = [f for room in HOUSE for f in (ROOT / ("" if room == "tools" else "contrastive") / room).glob("*.py")]
FILES = ("*.py", "contrastive/*.py", "contrastive/*/*.py", "tools/*.py", "benchmarks/*.py", "tests/*.py")
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)


def blocks(path):
    return dict(re.findall(r"# >>> shared: (\w+)\n(.*?)# <<< shared", path.read_text(encoding="utf8"), re.S))


@each_script
def test_shared_blocks(script):
    text = script.read_text(encoding="utf8")
    marks = [len(re.findall(rf"^ *# {mark} shared", text, re.M)) for mark in (">>>", "<<<")]
    assert marks == [len(blocks(script))] * 2
    assert blocks(script) == blocks(ROOT / "temo.py") and "optimizer" in blocks(script)


def flags_of(path):
    """{dest: flag} of every add_argument in a file, and of the flags that a data set declares."""
    out = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        flags = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add_argument", "add"):
            flags = node.args[:1]
        elif isinstance(node, ast.Dict):
            flags = node.keys
        for flag in flags:
            if isinstance(flag, ast.Constant) and str(flag.value).startswith("--"):
                out[flag.value[2:].replace("-", "_")] = flag.value
    return out


@each_script
def test_every_flag_has_an_effect(script):
    """Each dest is read as args.NAME, or by name: in the script, in a room that has no flags of its own, or as an
    option of load_data in data/."""
    files = [p for p in [script, ROOT / "common.py", *ROOMS] if p.parent != ROOT / "tools"]
    texts = {p: p.read_text(encoding="utf8") for p in files}
    shared, opened = ROOT / "contrastive" / "engine" / "flags.py", ROOT / "contrastive" / "data" / "__init__.py"
    before, _, after = texts[shared].partition("    def _add_shared")
    texts[shared] = before
    texts[opened] = re.sub(r"[A-Z]+_FLAGS = \(.*?\)", "", texts[opened], flags=re.S)
    read = {name for pair in re.findall(r'\bargs\.(\w+)|"(\w+)"', "".join(texts.values())) for name in pair}
    flags = flags_of(script) | flags_of(shared)
    for room in (ROOT / "contrastive" / "data").glob("*.py"):
        flags |= flags_of(room)
    assert {"dataset", "lr", "clips", "fold"} <= flags.keys()
    never = {flag for dest, flag in flags.items() if dest not in read}
    assert not never, f"{script.name}: {never} are never read"


@each_script
def test_same_order_of_sections(script):
    rulers = re.findall(r"^# =+ (\w+) =+$|^    # -+ ([a-z].*?) -+$", script.read_text(encoding="utf8"), re.M)
    names = [a or b.split(" (")[0] for a, b in rulers]
    order = ["METHOD", "flags", "main", "data", "model and optimiser", "views and batches", "loop", "save and evaluate"]
    assert [n for n in names if n in order] == order


@each_script
def test_method_stands_right_after_the_imports(script):
    tree = ast.parse(script.read_text(encoding="utf8"))
    kinds = [type(n).__name__ for n in tree.body]
    first = next(i for i, k in enumerate(kinds) if k not in ("Import", "ImportFrom") and i)
    assert kinds[0] == "Expr" and kinds[first] == "FunctionDef"
    lines = script.read_text(encoding="utf8").splitlines()
    assert any("= METHOD =" in line for line in lines[tree.body[first - 1].lineno - 1:tree.body[first].lineno])


@each_script
def test_the_loop_is_in_the_open(script):
    """`loss = ...`, the backward, the optimiser and its step stand in main; Run has none of them."""
    tree = ast.parse(script.read_text(encoding="utf8"))
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    loop = next(n for n in main.body if isinstance(n, ast.For) and ast.unparse(n.iter) == "batches")
    text = ast.unparse(loop)
    assert re.search(r"^\s+loss = ", text, re.M) and "chunks.backward(loss)" in text and "optimizer.step()" in text
    assert "torch.optim." in ast.unparse(main)
    nested = [n for n in ast.walk(loop) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    assert not nested, "the loss stands in a closure"
    book_keeping = ast.parse((ROOT / "contrastive" / "engine" / "run.py").read_text(encoding="utf8"))
    run = ast.unparse(next(n for n in book_keeping.body if isinstance(n, ast.ClassDef) and n.name == "Run"))
    forward = r"self\.(model|tower|trained)\("
    for work in (forward, r"\.backward\(", r"optimizer\.step\(", r"zero_grad\(", r"torch\.optim"):
        assert not re.search(work, run), work


@each_script
def test_a_script_is_named_by_its_file(script):
    """Nothing in a script repeats its own name but its docstring: a copy is another script."""
    code = script.read_text(encoding="utf8").split('"""', 2)[2]
    assert script.name not in code
    assert code.count("__file__") == 2


LOSSES = {"temo": "temo_loss multimodal_loss cwcl_loss simclr_loss", "mmts": "clip_loss max_margin_loss",
          "ncl": "ncl_loss max_margin_loss", "mama": "answer_loss angular_margin_loss fused_margin_loss",
          "temperature_schedules": "nt_xent moco_loss"}


@each_script
def test_the_loop_calls_the_losses_that_a_fork_edits(script):
    """Not their parts: an edit of the equation's function would change nothing."""
    tree = ast.parse(script.read_text(encoding="utf8"))
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    names = {n.id for n in ast.walk(main) if isinstance(n, ast.Name)}
    assert {*LOSSES[script.stem].split()} <= names


def test_ruff(tmp_path):
    """Line width (E501), names, imports: the rules stand in pyproject.toml. The answer does not hang on what else lies
    in the clone: a run's folder `runs`, or folders called as any module that is imported."""
    for file in [ROOT / "pyproject.toml", *(f for room in FILES for f in ROOT.glob(room))]:
        (tmp_path / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    everything = "".join(f.read_text(encoding="utf8") for room in FILES for f in ROOT.glob(room))
    for name in {"runs", "data", *re.findall(r"^ *(?:import|from) (\w+)", everything, re.M)}:
        (tmp_path / name).mkdir(exist_ok=True)
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    done = subprocess.run([ruff, "check", "--no-cache", "--output-format", "concise", "."], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_learning_rates():
    """After two steps of warm-up from 4 to 1 at the end: half way cosine and line meet, not a quarter before."""
    rates = {kind: [common.cosine_lr(k, 10, 2, 4.0, 1.0, kind) for k in (0, 1, 2, 4, 6, 10)]
             for kind in ("cosine", "linear", "constant")}
    assert rates["linear"] == pytest.approx([2, 4, 4, 3.25, 2.5, 1])
    assert rates["cosine"] == pytest.approx([2, 4, 4, 1 + 1.5 * (1 + 0.5 ** 0.5), 2.5, 1])
    assert rates["constant"] == [2, 4, 4, 4, 4, 4]
