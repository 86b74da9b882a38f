"""Mutation test: the suite must fail on each of these faults, put into a copy of the tree one at a time.

    python tests/mutants.py [--tree DIR] [--only ID ...] [--json FILE]

mutants.json has of each fault: what it does; the test modules and the -k of pytest that should kill it; and a string
with «this|replaced by that», which the code of the tree has once, in whatever file; of several such strings, for trees
that differ, the first that is found. The tests must pass on the tree as it is, and modules that it lacks are left out.
Libraries are imported once; each mutant is a fork of this process, made before any module of the tree is imported.
"""

import argparse
import collections
import ctypes
import json
import marshal
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

MUTANTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf8"))
PR_SET_CHILD_SUBREAPER = 36  # what a test leaves behind becomes a child of this process, which ends it


def place(tree, strings):
    """(file, its text, the text with the fault) of the first of the strings that the code has; None: it has none."""
    files = [f for f in sorted(tree.rglob("*.py")) if f.relative_to(tree).parts[0] not in ("tests", "docs")]
    texts = {f: f.read_text(encoding="utf8") for f in files}
    for string in strings:
        before, after = (re.sub(r"«(.*?)\|(.*?)»", which, string, flags=re.DOTALL) for which in (r"\1", r"\2"))
        for file in (f for f, text in texts.items() if before in text):
            assert sum(text.count(before) for text in texts.values()) == 1, f"{before!r}: more than once"
            versions = texts[file], texts[file].replace(before, after)
            codes = {marshal.dumps(compile(text, "", "exec", optimize=2)) for text in versions}
            assert len(codes) == 2, f"{before!r}: in no code but a docstring"
            return file, *versions
    return None


def run(tree, modules, words, seconds):
    """pytest's exit code for a selection, in a fork: 0 passed, 5 no test; None: it took too long."""
    files = [f for name in modules.split() if (f := tree / "tests" / f"test_{name}.py").exists()]
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
    child = os.fork()
    if not child:
        os.chdir(tree)
        os.dup2(os.open(tree.with_name("log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        sys.path[0] = str(tree)
        del sys.modules["__main__"].__file__  # processes that a test spawns are not to run this file
        code = pytest.main(["-n0", "-q", "-x", *map(str, files), "-k", words]) if files else 5
        sys.stdout.flush()
        os._exit(code)
    code, end = None, time.time() + seconds
    while code is None and time.time() < end:
        ended, status = os.waitpid(-1, os.WNOHANG)  # orphans too: a test may wait until the workers of a run are gone
        code = os.waitstatus_to_exitcode(status) if ended == child else None
        if not ended:
            time.sleep(0.1)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
    return code


def main(folder):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    p.add_argument("--only", nargs="+", choices=MUTANTS, default=list(MUTANTS), metavar="ID")
    p.add_argument("--json", type=Path, help="a file for the result of each")
    args = p.parse_args()
    tree, results, selections, whole = folder / "tree", {}, collections.defaultdict(set), {}
    shutil.copytree(args.tree, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", "runs"))
    for modules, words in (MUTANTS[name][1].split(": ") for name in args.only):
        selections[modules].add(f"({words})")
    for number, name in enumerate(args.only):
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
            before = file.stat()
            file.write_text(changed, encoding="utf8")
            os.utime(file, (0, number))  # another time for each: no .pyc of one is taken for another's
            code = run(tree, modules, words, whole[modules][1])
            results[name] = {0: "SURVIVED", 5: "no test", None: "killed (hangs)"}.get(code, "killed")
            file.write_text(text, encoding="utf8")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        print(f"{results[name]:<14} {name}: {what} ({time.time() - began:.0f} s)", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1), encoding="utf8")
    print(", ".join(f"{n} {word}" for word, n in collections.Counter(results.values()).items()))


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="contrastive-mutants-"))
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=f"{folder}/hub", HF_DATASETS_CACHE=f"{folder}/hub/datasets",
                      OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import psutil
    import pytest
    import sklearn.svm  # noqa: F401
    import timm  # noqa: F401
    import torch
    from accelerate import Accelerator  # noqa: F401
    from torchvision.transforms import v2  # noqa: F401
    from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    torch.set_num_threads(1)
    main(folder)
    shutil.rmtree(folder)
