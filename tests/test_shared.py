"""The scripts stay siblings: blocks marked as shared are identical in all that exist; no flag is dead."""

import ast
import re
from pathlib import Path

import pytest

import common

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ROOT / f"{n}.py" for n in ("temperature_schedules", "mmts", "ncl", "mama", "temo") if (ROOT / f"{n}.py").exists()]


def blocks(path):
    return dict(re.findall(r"# >>> shared: (\w+)\n(.*?)# <<< shared", path.read_text(encoding="utf8"), re.S))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_shared_blocks(script):
    text = script.read_text(encoding="utf8")
    assert text.count("# >>> shared: ") == text.count("# <<< shared") == len(blocks(script)) > 0
    reference = blocks(ROOT / "temo.py")
    assert {"run", "data", "model", "optimisation", "parse"} <= blocks(script).keys() <= reference.keys()
    for name, block in blocks(script).items():
        assert block == reference[name], f"{script.name}: the shared block '{name}' differs from temo.py"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_every_flag_has_an_effect(script):
    """Each dest is read as args.NAME, or by name in common.py (check_args, banner, make_optimizer, ...)."""
    own, shared = script.read_text(encoding="utf8"), (ROOT / "common.py").read_text(encoding="utf8")
    for node in ast.walk(ast.parse(own)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            dest = node.args[0].value[2:].replace("-", "_")
            reads = len(re.findall(rf"\bargs\.{dest}\b", own + shared)) + len(re.findall(rf'"{dest}"', own))
            reads += dest in common.DATA_FLAGS and len(re.findall(rf'options(\.get\(|\[|\.pop\()"{dest}"', shared))  # load_data's
            assert reads, f"{script.name}: --{dest.replace('_', '-')} is never read"


def test_same_order_of_sections():
    for script in SCRIPTS:
        rulers = re.findall(r"^# =+ (\w+) =+$|^    # -+ ([a-z].*?) -+$", script.read_text(encoding="utf8"), re.M)
        names = [a or b.split(" (")[0] for a, b in rulers]
        assert [n for n in names if n in ("METHOD", "main", "data", "resume", "loop", "save and evaluate")] == ["METHOD", "main", "data", "resume", "loop", "save and evaluate"], script
