"""Mutation test: the suite must fail on each of these faults, put into a copy of the tree.

    python tests/mutants.py [--tree DIR] [--only ID ...]

mutants.json has of each fault: what it does; the test modules and the -k of pytest that should kill
it; and a string with «this|replaced by that», which the code of the tree has once, in whatever
file; of several such strings, for trees that differ, the first that is found. The tests must pass
on the tree as it is; modules that it lacks are left out.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

MUTANTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf8"))
FAULT = re.compile(r"«(.*?)\|(.*?)»", re.DOTALL)


class Fault(NamedTuple):
    """A fault in a file of a tree."""

    file: Path
    text: str  # of the file
    faulty_text: str


class Selection(NamedTuple):
    """Tests that should kill a fault."""

    modules: str  # separated by spaces
    keywords: str  # the -k of pytest


def selection_of(name):
    """The Selection of a mutant."""
    return Selection(*MUTANTS[name][1].split(": "))


def find_fault(tree, strings):
    """The Fault of the first of the strings that the code has; None: it has none."""
    files = []
    for file in tree.rglob("*.py"):
        if file.relative_to(tree).parts[0] not in ("tests", "docs"):
            files.append(file)
    for string in strings:
        old, new = FAULT.sub(r"\1", string), FAULT.sub(r"\2", string)
        matches = [file for file in files if old in file.read_text(encoding="utf8")]
        if matches:
            assert len(matches) == 1, f"{old!r}: in more than one file"
            text = matches[0].read_text(encoding="utf8")
            assert text.count(old) == 1, f"{old!r}: more than once"
            return Fault(matches[0], text, text.replace(old, new))
    return None


def run_tests(tree, modules, keywords, seconds):
    """pytest's exit code for a selection: 0 passed, 5 no test; None: it took too long."""
    files = []
    for name in modules.split():
        if (tree / "tests" / f"test_{name}.py").exists():
            files.append(f"tests/test_{name}.py")
    if not files:
        return 5
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", *files]
    command += ["-k", keywords, "-m", "full or not full"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    with open(tree.with_name("log.txt"), "a") as log:
        process = subprocess.Popen(
            command, cwd=tree, stdout=log, stderr=log, start_new_session=True, env=environment
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a test leaves behind


def try_mutant(tree, name, code, seconds):
    """What becomes of a mutant: killed, SURVIVED, or why it cannot be said.

    Args:
        code: pytest's exit code without the fault.
        seconds: that the tests may take.
    """
    _, _, *strings = MUTANTS[name]
    fault = find_fault(tree, strings)
    if fault is None:
        return "not found"
    if code:
        return f"tests fail without it ({code})"
    fault.file.write_text(fault.faulty_text, encoding="utf8")
    selection = selection_of(name)
    code = run_tests(tree, selection.modules, selection.keywords, seconds)
    fault.file.write_text(fault.text, encoding="utf8")
    if code is None:
        return "killed (hangs)"
    if code == 0:
        return "SURVIVED"
    if code == 5:
        return "no test"
    return "killed"


def main():
    """The command line. Returns: the exit code, 1 unless every fault was killed."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    p.add_argument("--only", nargs="+", choices=MUTANTS, default=list(MUTANTS), metavar="ID")
    args = p.parse_args()
    keywords = collections.defaultdict(list)  # {modules: keywords of all their mutants}
    for name in args.only:
        selection = selection_of(name)
        keywords[selection.modules].append(f"({selection.keywords})")
    outcomes = collections.Counter()
    baselines = {}  # {modules: (exit code without a fault, seconds that a mutant may take)}
    with tempfile.TemporaryDirectory(prefix="contrastive-mutants-") as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", "__pycache__", "runs")
        shutil.copytree(args.tree, tree, ignore=ignored)
        for name in args.only:
            started = time.time()
            modules = selection_of(name).modules
            if modules not in baselines:
                code = run_tests(tree, modules, " or ".join(keywords[modules]), 3600)
                baselines[modules] = code, 60 + 4 * (time.time() - started)
            outcome = try_mutant(tree, name, *baselines[modules])
            outcomes[outcome] += 1
            seconds = time.time() - started
            print(f"{outcome:<14} {name}: {MUTANTS[name][0]} ({seconds:.0f} s)", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()))
    return int(bool(outcomes.keys() - {"killed", "killed (hangs)"}))


if __name__ == "__main__":
    sys.exit(main())
