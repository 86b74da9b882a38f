"""Mutation test: the suite must fail on each of these faults, put into a copy of the tree one at a time.

    python tests/mutants.py [--tree DIR] [--only ID ...]

mutants.json has of each fault: what it does; the test modules and the -k of pytest that should kill it; and a string
with «this|replaced by that», which the code of the tree has once, in whatever file; of several such strings, for trees
that differ, the first that is found. The tests must pass on the tree as it is; modules that it lacks are left out.
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

MUTANTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf8"))


def place(tree, strings):
    """(file, its text, the text with the fault) of the first of the strings that the code has; None: it has none."""
    files = [f for f in tree.rglob("*.py") if f.relative_to(tree).parts[0] not in ("tests", "docs")]
    for string in strings:
        before, after = (re.sub(r"«(.*?)\|(.*?)»", which, string, flags=re.DOTALL) for which in (r"\1", r"\2"))
        if found := [f for f in files if before in f.read_text(encoding="utf8")]:
            file, = found
            text = file.read_text(encoding="utf8")
            assert text.count(before) == 1, f"{before!r}: more than once"
            return file, text, text.replace(before, after)
    return None


def run(tree, modules, words, seconds):
    """pytest's exit code for a selection: 0 passed, 5 no test; None: it took too long."""
    files = [f"tests/test_{name}.py" for name in modules.split() if (tree / "tests" / f"test_{name}.py").exists()]
    if not files:
        return 5
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", *files, "-k", words]
    with open(tree.with_name("log.txt"), "a") as log:
        process = subprocess.Popen(command, cwd=tree, stdout=log, stderr=log, start_new_session=True,
                                   env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)})
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a test leaves behind


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    p.add_argument("--only", nargs="+", choices=MUTANTS, default=list(MUTANTS), metavar="ID")
    args, results, whole, selections = p.parse_args(), {}, {}, collections.defaultdict(set)
    for modules, words in (MUTANTS[name][1].split(": ") for name in args.only):
        selections[modules].add(f"({words})")
    with tempfile.TemporaryDirectory(prefix="contrastive-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(args.tree, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", "runs"))
        for name in args.only:
            what, tests, *strings = MUTANTS[name]
            modules, words = tests.split(": ")
            began, there = time.time(), place(tree, strings)
            if modules not in whole:  # the selections of all mutants of these modules, together
                code = run(tree, modules, " or ".join(selections[modules]), 3600)
                whole[modules] = code, 60 + 4 * (time.time() - began)
            if not there or whole[modules][0]:
                results[name] = f"tests fail without it ({whole[modules][0]})" if there else "not found"
            else:
                file, text, changed = there
                file.write_text(changed, encoding="utf8")
                code = run(tree, modules, words, whole[modules][1])
                results[name] = {0: "SURVIVED", 5: "no test", None: "killed (hangs)"}.get(code, "killed")
                file.write_text(text, encoding="utf8")
            print(f"{results[name]:<14} {name}: {what} ({time.time() - began:.0f} s)", flush=True)
    print(", ".join(f"{n} {word}" for word, n in collections.Counter(results.values()).items()))


if __name__ == "__main__":
    main()
