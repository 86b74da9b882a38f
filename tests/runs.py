"""Runs of the scripts in processes of their own, which a server with all imports done forks: half a second, not six."""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["common", "temo", "temperature_schedules", "ncl", "mama", "accelerate", "transformers", "datasets", "tokenizers",
         "sklearn.svm", "matplotlib", "psutil", "torchvision.transforms.v2"]


def server():
    """The context whose processes come from that server (started at the first one)."""
    context = multiprocessing.get_context("forkserver")
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
    context.set_forkserver_preload(HEAVY)
    return context


def start(script, flags, log, **environment):
    """`python SCRIPT.py FLAGS` without its pictures, its words in the file `log`; a process that can be killed."""
    process = server().Process(target=_run, args=(script, [str(f) for f in flags], str(log), environment))
    process.start()
    return process


def finish(script, flags, log, **environment):
    """The same, to its end; it must end well."""
    process = start(script, flags, log, **environment)
    process.join(300)
    assert process.exitcode == 0, (process.exitcode, Path(log).read_text()[-3000:])


def _run(script, flags, log, environment):
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.update(environment)
    sys.argv = [f"{script}.py", *flags]
    import common
    module = importlib.import_module(script)
    module.draw = lambda *_: None  # the pictures take longer than these runs
    with common.clean_exit():
        module.main(module.parse_args(flags))
