"""The layout: which module imports which, and that ruff has nothing to say."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
# of contrastive/
PACKAGES = ("core", "data", "encoders", "evaluation", "papers", "figures", "engine")
PROGRAMS = ("eval", "tools", "benchmarks")
OURS = {"contrastive", "common"}
# Each may import only those before it, and itself.
ORDER = ("contrastive", *PACKAGES, "common", SCRIPTS, "variants", *PROGRAMS)
PACKAGE_FOLDERS = [f"contrastive/{name}" for name in PACKAGES]
FOLDERS = ("contrastive", *PACKAGE_FOLDERS, "variants", "tools", "benchmarks")


def source_files():
    """Our files, without a user's own that may lie beside the scripts."""
    files = [ROOT / f"{name}.py" for name in ("common", "eval", *SCRIPTS)]
    for folder in FOLDERS:
        files += sorted((ROOT / folder).glob("*.py"))
    return files


def module_name(path):
    """'contrastive.engine.run' of contrastive/engine/run.py."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in source_files()}
TREES = {name: ast.parse(path.read_text(encoding="utf8")) for name, path in MODULES.items()}


def imported_modules(nodes):
    """Our modules that these statements import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names & MODULES.keys()


def position(name):
    """The place of a module in ORDER."""
    package = name.removeprefix("contrastive.").split(".")[0]
    if package in SCRIPTS:
        return ORDER.index(SCRIPTS)
    return ORDER.index(package)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_stands_before_it(name):
    for other in imported_modules(ast.walk(TREES[name])):
        assert position(other) <= position(name), f"{name} imports {other}"


@pytest.mark.parametrize("name", MODULES)
def test_our_modules_are_imported_before_torch(name):
    """contrastive/__init__.py sets OMP_WAIT_POLICY, which torch reads when it is imported."""
    packages = []
    for node in TREES[name].body:
        if isinstance(node, ast.ImportFrom):
            packages.append(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            packages.append(node.names[0].name.split(".")[0])
    if "torch" in packages and OURS.intersection(packages):
        assert OURS.intersection(packages[:packages.index("torch")])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_of_ours_common_alone(script):
    assert imported_modules(ast.walk(TREES[script])) == {"common"}


def test_a_variant_imports_one_script():
    for name, tree in TREES.items():
        if name.startswith("variants."):
            scripts = imported_modules(ast.walk(tree)) & set(SCRIPTS)
            assert len(scripts) == 1, f"{name} imports {scripts}"


def test_a_script_loads_nothing_that_variants_alone_use():
    code = "import sys, temo; temo.parse_args([]); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = result.stdout.split()
    assert "temo" in loaded
    for name in ("encoders.vast", "encoders.ssb", "encoders.vgt", "encoders.questions",
                 "data.questions", "evaluation.answers", "evaluation.rerank"):
        assert f"contrastive.{name}" not in loaded


def test_modules_are_imported_by_name_in_three_places_only():
    """A named data set (DataSet.load), the figures of a run (figures="temo"), and a user's own
    module (eval.py --import)."""
    places = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            function = getattr(node, "func", None)
            called = getattr(function, "attr", getattr(function, "id", ""))
            if called in ("import_module", "__import__"):
                places.add(name)
    assert places == {"contrastive.data.registry", "contrastive.figures", "eval"}


def test_ruff():
    """The rules stand in pyproject.toml."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    files = [*MODULES.values(), *(ROOT / "tests").glob("*.py")]
    command = [ruff, "check", "--no-cache", "--output-format", "concise", *files]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_pip_refuses_to_install_the_scripts(tmp_path):
    """The scripts import from where they lie; a package of contrastive/ alone would lack them."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    result = subprocess.run([*command, tmp_path, ROOT], capture_output=True, text=True)
    assert result.returncode != 0
    assert "This is a repository of scripts" in result.stdout + result.stderr
