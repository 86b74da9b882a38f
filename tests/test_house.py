"""The house: a script imports common and its pictures, arrows point down, and files are of a size to be read."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
ROOMS = {"data": 18, "encoders": 14, "evaluation": 10, "engine": 8, "figures": 8}  # files
TOP = [ROOT / f"{name}.py" for name in ("common", "eval", *SCRIPTS)]  # a user's mine.py may lie beside them
FILES = TOP + sorted(f for folder in ("contrastive", *(f"contrastive/{room}" for room in ROOMS), "tools", "benchmarks")
                     for f in (ROOT / folder).glob("*.py"))
# lines of a file, and of a loop; all else: 400
SIZES = {"common": 700, "temo": 590, "ncl": 462, "mmts": 460, "temperature_schedules": 550, "mama": 650, "eval": 260}
SCRIPTS_TOGETHER, OTHERS, BENCHMARKS, ENGINE, LOOP, LOOP_OF_MAMA = 2700, 400, 400, 1050, 45, 60


def module(path):
    """'engine.run' of contrastive/engine/run.py, 'data' of contrastive/data/__init__.py."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name.removeprefix("contrastive.")


MODULES = {module(f): f for f in FILES}
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
            called = getattr(node, "func", None)  # of a call
            by_string[name] += getattr(called, "attr", getattr(called, "id", "")) in ("import_module", "__import__")
    assert +by_string == Counter({"data": 1, "eval": 1})  # find_set; a user's own, --import


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_common_and_its_pictures(script):
    ours = imported(ast.walk(TREES[script]))
    assert {name for name in ours if not name.startswith("figures")} == {"common"} and len(ours) <= 3, ours


@pytest.mark.parametrize("name", MODULES)
def test_a_file_has_a_size_to_be_read(name):
    lines = MODULES[name].read_text(encoding="utf8").count("\n")
    most = SIZES.get(name, BENCHMARKS if name.startswith("benchmarks") else OTHERS)
    assert lines <= most, f"{name}: {lines} lines, at most {most}: a sign to think again"


def test_the_scripts_together_are_short():
    lines = sum(MODULES[name].read_text(encoding="utf8").count("\n") for name in SCRIPTS)
    assert lines <= SCRIPTS_TOGETHER


def test_a_room_has_few_files_and_the_engine_few_lines():
    for room, most in ROOMS.items():
        assert len([f for f in FILES if f.parent == ROOT / "contrastive" / room]) <= most, room
    engine = [f for f in FILES if f.parent == ROOT / "contrastive" / "engine"]
    assert sum(f.read_text(encoding="utf8").count("\n") for f in engine) <= ENGINE


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loop_is_on_one_screen(script):
    main = next(n for n in TREES[script].body if isinstance(n, ast.FunctionDef) and n.name == "main")
    loop = next(n for n in main.body if isinstance(n, ast.For) and ast.unparse(n.iter) == "batches")
    assert loop.end_lineno - loop.lineno + 1 <= (LOOP_OF_MAMA if script == "mama" else LOOP), script
