"""The house: imports written where a reader looks for them, arrows that point down, and files of a size to be read."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
ROOMS = ("engine", "encoders", "readers", "evaluation", "figures", "sets", "tools", "benchmarks")
TOP = ("tools", "benchmarks")
FOLDERS = {room: ROOT / room if room in TOP else ROOT / "contrastive" / room for room in ROOMS}
FILES = sorted([*ROOT.glob("*.py"), *(f for folder in FOLDERS.values() for f in folder.glob("*.py"))])
# lines: common, a script, eval.py, anything else; all outside tests, and tests
SIZES = {"common": 1700, "temo": 580, "ncl": 510, "mmts": 560, "temperature_schedules": 620, "mama": 700, "eval": 350}
OTHERS, BENCHMARKS, A_ROOM, LOOP, LOOP_OF_MAMA = 400, 600, 12, 45, 60


def module(path):
    """'engine.run' of engine/run.py, 'sets' of sets/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removeprefix("contrastive.")


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
        names = [name.removeprefix("contrastive.") for name in names]
        for name in (n for n in names if n.split(".")[0] in {m.split(".")[0] for m in MODULES}):
            found |= {name} & MODULES.keys()
            found |= {name.rpartition(".")[0]} & MODULES.keys()                # its package, which runs first
    return found


AT_THE_TOP = {name: imported(tree.body) - {name} for name, tree in TREES.items()}


def test_no_import_goes_round_in_a_circle():
    state = {}

    def visit(name, way):
        if state.get(name) == "open":
            pytest.fail(" -> ".join([*way[way.index(name):], name]))
        if name not in state:
            state[name] = "open"
            for other in sorted(AT_THE_TOP[name]):
                visit(other, [*way, name])
            state[name] = "done"
    for name in MODULES:
        visit(name, [])
    assert len(state) == len(MODULES) > 60


def test_of_ours_only_a_data_set_by_its_name_and_own_data_are_opened_late():
    late, by_string = Counter(), Counter()
    for name, tree in TREES.items():
        for other in imported(ast.walk(tree)) - AT_THE_TOP[name] - {name}:
            late[name, other] += 1
        for node in ast.walk(tree):
            called = getattr(node, "func", None)  # of a call
            by_string[name] += getattr(called, "attr", getattr(called, "id", "")) in ("import_module", "__import__")
    assert set(late) == {("common", "sets.own")}, late
    assert +by_string == Counter({"common": 1})  # find_set


# the order of the README, from below; a name with a dot at its end is a room
LEVELS = ((*ROOMS, "engine.base", "engine.ranges"), ("evaluation.metrics", "readers."), ("encoders.",), ("common",),
          ("sets.",), ("evaluation.", "figures."), ("engine.",), SCRIPTS, ("eval", "tools.", "benchmarks."))
# what still points up: readers that make a common.Data, a split by its flags, a checkpoint's own book-keeping
UPWARDS = {*((f"readers.{name}", "common") for name in ("tars", "videos", "stream", "paraphrases")),
           ("sets.long_tail", "engine.data"), ("evaluation.stand_ins", "engine.checkpoints"),
           ("evaluation.case", "engine.folder"), ("evaluation.case", "engine.verify")}


def level(name):
    place = {n: k for k, names in enumerate(LEVELS) for n in names}
    return place.get(name, place.get(f"{name.partition('.')[0]}."))


def test_arrows_point_down():
    assert AT_THE_TOP["engine"] == AT_THE_TOP["evaluation.metrics"] == set()
    found = {(name, other) for name in MODULES for other in AT_THE_TOP[name] if level(other) > level(name)}
    assert found <= UPWARDS, found - UPWARDS
    for script in SCRIPTS:
        assert not AT_THE_TOP[script] & set(SCRIPTS), script


@pytest.mark.parametrize("name", MODULES)
def test_a_file_has_a_size_to_be_read(name):
    lines = MODULES[name].read_text(encoding="utf8").count("\n")
    most = SIZES.get(name, BENCHMARKS if name.startswith("benchmarks") else OTHERS)
    assert lines <= most, f"{name}: {lines} lines, at most {most}: a sign to think again"


def test_a_room_has_a_dozen_files():
    for room in ROOMS:
        assert len([f for f in FILES if f.parent.name == room]) <= A_ROOM, room
        assert (FOLDERS[room] / "__init__.py").is_file(), room


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loop_is_on_one_screen(script):
    main = next(n for n in TREES[script].body if isinstance(n, ast.FunctionDef) and n.name == "main")
    loop = next(n for n in main.body if isinstance(n, ast.For) and ast.unparse(n.iter) == "batches")
    assert loop.end_lineno - loop.lineno + 1 <= (LOOP_OF_MAMA if script == "mama" else LOOP), script
