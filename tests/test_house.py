"""The house: a script imports common and its pictures, arrows point down, files are of a size to be read, ruff is
content."""

import ast
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
ROOMS = {"data": 18, "encoders": 14, "evaluation": 10, "engine": 8, "figures": 8}       # files
TOP = [ROOT / f"{name}.py" for name in ("common", "eval", *SCRIPTS)]       # a user's mine.py may lie beside them
FILES = TOP + sorted(f for folder in ("contrastive", *(f"contrastive/{room}" for room in ROOMS), "tools", "benchmarks")
                     for f in (ROOT / folder).glob("*.py"))
# lines of a file; of a loop
SIZES = {"common": 700, "temo": 590, "ncl": 462, "mmts": 460, "temperature_schedules": 550, "mama": 650, "eval": 260}
SCRIPTS_TOGETHER, OTHERS, ENGINE, LOOP, LOOP_OF_MAMA = 2700, 400, 1050, 45, 60


def module(path):
    """'engine.run' of contrastive/engine/run.py, 'data' of contrastive/data/__init__.py."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name.removeprefix("contrastive.")


MODULES = {module(f): f for f in FILES}
LINES = {name: f.read_text(encoding="utf8").count("\n") for name, f in MODULES.items()}
TREES = {name: ast.parse(f.read_text(encoding="utf8")) for name, f in MODULES.items()}


def imported(nodes):
    """Modules of ours that these statements import."""
    found = set()
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        found |= {name.removeprefix("contrastive.") for name in names} & MODULES.keys()
    return found


AT_THE_TOP = {name: imported(tree.body) - {name} for name, tree in TREES.items()}


def test_of_ours_only_a_data_set_is_opened_by_its_name_and_nothing_late():
    by_string = Counter()
    for name, tree in TREES.items():
        late = imported(ast.walk(tree)) - AT_THE_TOP[name] - {name}
        assert not late, (name, late)
        for node in ast.walk(tree):
            called = getattr(node, "func", None)                           # of a call
            by_string[name] += getattr(called, "attr", getattr(called, "id", "")) in ("import_module", "__import__")
    assert +by_string == Counter({"data": 1, "eval": 1})                   # find_set; a user's own, --import


# from below; a name with a dot at its end is a room
LEVELS = (("contrastive", "engine", "encoders", "evaluation", "figures", "tools", "benchmarks", "engine.processes",
           "engine.ranges", "engine.checkpoints", "engine.log", "evaluation.metrics"),
          ("data", "data."), ("encoders.",), ("evaluation.", "figures."), ("engine.",), ("common",), SCRIPTS,
          ("eval", "tools.", "benchmarks."))


def level(name):
    place = {n: k for k, names in enumerate(LEVELS) for n in names}
    return place.get(name, place.get(f"{name.partition('.')[0]}."))


def test_arrows_point_down():
    up = {(name, other) for name in MODULES for other in AT_THE_TOP[name] if level(other) > level(name)}
    assert not up
    for script in SCRIPTS:
        pictures = {name for name in AT_THE_TOP[script] if name.startswith("figures")}
        assert AT_THE_TOP[script] - pictures == {"common"} and len(pictures) <= 2, script


def test_files_rooms_and_loops_have_a_size_to_be_read():
    long = {name: n for name, n in LINES.items() if n > SIZES.get(name, OTHERS)}
    assert not long, f"{long}: a sign to think again"
    assert sum(LINES[name] for name in SCRIPTS) <= SCRIPTS_TOGETHER
    assert sum(n for name, n in LINES.items() if name.startswith("engine")) <= ENGINE
    for room, most in ROOMS.items():
        assert len([f for f in FILES if f.parent == ROOT / "contrastive" / room]) <= most, room
    for script in SCRIPTS:
        main = next(n for n in TREES[script].body if isinstance(n, ast.FunctionDef) and n.name == "main")
        loop = next(n for n in main.body if isinstance(n, ast.For) and ast.unparse(n.iter) == "batches")
        assert loop.end_lineno - loop.lineno < (LOOP_OF_MAMA if script == "mama" else LOOP), script


def test_ruff():
    """Line width (E501), names, imports: the rules stand in pyproject.toml."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    files = [*FILES, *(ROOT / "tests").glob("*.py")]
    done = subprocess.run([ruff, "check", "--no-cache", "--output-format", "concise", *files], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
