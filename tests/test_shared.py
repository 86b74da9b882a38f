"""The scripts stay siblings: shared blocks are identical, no flag is dead, METHOD comes first, lines stay narrow."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import common

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
SCRIPTS = [ROOT / f"{n}.py" for n in NAMES if (ROOT / f"{n}.py").exists()]
ROOMS = [*(ROOT / "sets").glob("*.py"), *(ROOT / "tools").glob("*.py")]
FILES = ("*.py", "sets/*.py", "tools/*.py", "benchmarks/*.py", "tests/*.py")
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)


def blocks(path):
    return dict(re.findall(r"# >>> shared: (\w+)\n(.*?)# <<< shared", path.read_text(encoding="utf8"), re.S))


def imports(path):
    """Modules that a file imports at any place: {name: is it at the top level?}."""
    tree, found = ast.parse(path.read_text(encoding="utf8")), {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names] + [node.module]
        for name in names:
            found[name.split(".")[0]] = found.get(name.split(".")[0], False) or node in tree.body
    return found


@each_script
def test_shared_blocks(script):
    text = script.read_text(encoding="utf8")
    marks = [len(re.findall(rf"^ *# {mark} shared", text, re.M)) for mark in (">>>", "<<<")]
    assert marks == [len(blocks(script))] * 2
    reference = blocks(ROOT / "temo.py")
    assert {"pixels", "model", "optimisation", "optimizer"} <= blocks(script).keys() <= reference.keys()
    for name, block in blocks(script).items():
        assert block == reference[name], f"{script.name}: the shared block '{name}' differs from temo.py"


def flags_of(path):
    """{dest: flag} of every add_argument in a file."""
    out = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flag = node.args[0]
            if isinstance(flag, ast.Constant) and flag.value.startswith("--"):
                out[flag.value[2:].replace("-", "_")] = flag.value
    return out


@each_script
def test_every_flag_has_an_effect(script):
    """Each dest is read as args.NAME, or by name: in the script, in common.py, in a room that has no flags of its own,
    or as an option in sets/."""
    own, shared = script.read_text(encoding="utf8"), (ROOT / "common.py").read_text(encoding="utf8")
    rooms = "".join(p.read_text(encoding="utf8") for p in ROOMS)
    handed = "".join(text for p in ROOMS if "OneLine(" not in (text := p.read_text(encoding="utf8")))
    options = re.search(r"DATA_FLAGS = \((.*?)\)", shared, re.S).group(1)
    shared = shared.replace(options, "")
    for dest, flag in (flags_of(script) | flags_of(ROOT / "common.py")).items():
        reads = len(re.findall(rf"\bargs\.{dest}\b", own + shared + handed))
        reads += len(re.findall(rf'"{dest}"', own + shared))
        as_option = rf'options(\.get\(|\[|\.pop\()"{dest}"'
        reads += f'"{dest}"' in options and len(re.findall(as_option, shared + rooms))
        assert reads, f"{script.name}: {flag} is never read"


@each_script
def test_same_order_of_sections(script):
    rulers = re.findall(r"^# =+ (\w+) =+$|^    # -+ ([a-z].*?) -+$", script.read_text(encoding="utf8"), re.M)
    names = [a or b.split(" (")[0] for a, b in rulers]
    order = ["METHOD", "flags", "main", "data", "model and optimiser", "views and batches", "loop", "save and evaluate",
             "pictures"]
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
    """`loss = ...`, the backward, the optimiser and its step stand in main; common.Run has none of them."""
    tree = ast.parse(script.read_text(encoding="utf8"))
    main = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    loop = next(n for n in main.body if isinstance(n, ast.For) and ast.unparse(n.iter) == "batches")
    text = ast.unparse(loop)
    assert re.search(r"^\s+loss = ", text, re.M) and "chunks.backward(loss)" in text and "optimizer.step()" in text
    assert "torch.optim." in ast.unparse(main)
    nested = [n for n in ast.walk(loop) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    assert not nested, "the loss stands in a closure"
    common = ast.parse((ROOT / "common.py").read_text(encoding="utf8"))
    run = ast.unparse(next(n for n in common.body if isinstance(n, ast.ClassDef) and n.name == "Run"))
    forward = r"self\.(model|tower|trained)\("
    for work in (forward, r"\.backward\(", r"optimizer\.step\(", r"zero_grad\(", r"torch\.optim"):
        assert not re.search(work, run), work


@each_script
def test_a_script_imports_common_alone(script):
    ours = {*NAMES, "eval", "sets", "tools", "tests", "benchmarks"}
    assert "common" in imports(script) and not ours & imports(script).keys()


def test_rooms_are_opened_lazily():
    assert not any(top for name, top in imports(ROOT / "common.py").items() if name in ("sets", "tools"))
    for room in ROOMS:
        assert not {*NAMES, "eval"} & imports(room).keys() - {"mama"}, room


@each_script
def test_a_script_is_named_by_its_file(script):
    """Nothing in a script repeats its own name but its docstring: a copy is another script."""
    code = script.read_text(encoding="utf8").split('"""', 2)[2]
    assert script.name not in code
    assert code.count("__file__") == 2


RATES = ["-1", "1e31", "nan", "inf", "fast"]
OPTIMISER = {"beta1": ["-0.1", "1", "1.5", "nan"], "beta2": ["-0.1", "1", "0.99999999", "nan"],
             "eps": ["0", "-1", "1e-40", "1e40", "nan"], "lr": RATES, "lr-end": RATES, "weight-decay": RATES,
             "warmup-epochs": ["-1", "nan"], "grad-clip": ["-1", "inf"], "meta-lr": RATES, "virtual-lr": RATES,
             "meta-weight-decay": RATES}


@each_script
def test_an_optimiser_takes_what_its_flags_take(script, capsys, monkeypatch):
    """What torch would refuse with a traceback, at the start or in the first step, is one line and exit code 2."""
    monkeypatch.syspath_prepend(str(ROOT))
    parse = importlib.import_module(script.stem).parse_args
    for flag, values in OPTIMISER.items():
        for value in values if script.stem == "mama" or flag.split("-")[0] not in ("meta", "virtual") else ():
            with pytest.raises(SystemExit) as end:
                parse([f"--{flag}", value])
            said = capsys.readouterr().err
            assert end.value.code == 2 and said.count("\n") == 1 and said.startswith(f"error: --{flag}"), (said, value)
    for kind in ("adamw", "adam", "sgd"):
        least = parse(["--optimizer", kind, *"--beta1 0 --beta2 0 --eps 1e-30 --lr 0 --weight-decay 0".split()])
        most = parse(["--optimizer", kind, *"--beta1 0.9999999 --beta2 0.9999999 --eps 1e30 --lr 1e30".split(),
                      "--weight-decay", "1e30"])
        for args in (least, most):  # the block of the script itself
            tower, own = torch.nn.Linear(2, 2), torch.nn.Module()
            names = {"common": common, "torch": torch, "args": args, "tower": tower, "own": own}
            exec(textwrap.dedent("    " + blocks(script)["optimizer"].strip()), names)
            tower(torch.ones(1, 2)).sum().backward()
            names["optimizer"].step()


def test_containers_are_asked_not_told_apart():
    for path in [ROOT / "common.py", ROOT / "eval.py", *SCRIPTS, *ROOMS]:
        for word in (r"isinstance\([^()]+, (common\.)?(Data|Stream)\)", r"object\.__new__", r"__dict__\.update"):
            assert not re.search(word, path.read_text(encoding="utf8")), (path, word)


def test_ruff(tmp_path):
    """Line width (E501), names, imports: the rules stand in pyproject.toml. The answer does not hang on what else lies
    in the clone: a run's folder `runs`, or folders called as any module that is imported."""
    for file in [ROOT / "pyproject.toml", *(f for room in FILES for f in ROOT.glob(room))]:
        (tmp_path / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    names = {"runs", "data"}.union(*(imports(f) for room in FILES for f in ROOT.glob(room)))
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    for bare in (True, False):
        for name in () if bare else names:
            (tmp_path / name).mkdir(exist_ok=True)
        done = subprocess.run([ruff, "check", "--no-cache", "--output-format", "concise", "."], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
