"""The layout: which module imports which, and that ruff has nothing to say."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
# of contrastive/
PACKAGES = ("core", "data", "encoders", "evaluation", "papers", "figures", "engine")
# Each may import only those before it, and itself.
ORDER = ["contrastive", *PACKAGES, "common", "scripts", "variants", "eval", "tools", "benchmarks"]
PACKAGE_FOLDERS = [f"contrastive/{name}" for name in PACKAGES]


def source_files():
    """{module: path} of our files, without a user's own that may lie beside the scripts."""
    files = {name: ROOT / f"{name}.py" for name in ("common", "eval", *SCRIPTS)}
    for folder in ("contrastive", *PACKAGE_FOLDERS, "variants", "tools", "benchmarks"):
        for path in sorted((ROOT / folder).glob("*.py")):
            name = f"{folder}/{path.stem}".replace("/", ".")
            files[name.removesuffix(".__init__")] = path
    return files


MODULES = source_files()
VARIANTS = [name for name in MODULES if name.startswith("variants.")]
TREES = {name: ast.parse(path.read_text(encoding="utf8")) for name, path in MODULES.items()}


def imported_modules(name):
    """Our modules that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names & MODULES.keys()


def position(name):
    """The place of a module in ORDER."""
    if name in SCRIPTS:
        return ORDER.index("scripts")
    package = name.removeprefix("contrastive.").split(".")[0]
    return ORDER.index(package)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_stands_before_it(name):
    for other in imported_modules(name):
        assert position(other) <= position(name), f"{name} imports {other}"


@pytest.mark.parametrize("name", MODULES)
def test_our_modules_are_imported_before_torch(name):
    """contrastive/__init__.py sets OMP_WAIT_POLICY, which torch reads when it is imported."""
    text = MODULES[name].read_text(encoding="utf8")
    ours = re.search(r"^(from|import) (contrastive|common)\b", text, re.M)
    torch = re.search(r"^(from|import) torch\b", text, re.M)
    if ours and torch:
        assert ours.start() < torch.start()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_of_ours_common_alone(script):
    assert imported_modules(script) == {"common"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_imports_one_script(variant):
    scripts = imported_modules(variant).intersection(SCRIPTS)
    assert len(scripts) == 1


def test_ruff():
    """The rules stand in pyproject.toml."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    files = [*MODULES.values(), *(ROOT / "tests").glob("*.py")]
    command = [ruff, "check", "--no-cache", "--output-format", "concise", *files]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
