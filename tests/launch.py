"""Runs of the scripts in processes of their own, which a server with all imports done forks: half a second, not six."""

import importlib
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["common", "temo", "temperature_schedules", "ncl", "mmts", "mama", "accelerate", "transformers", "datasets",
         "tokenizers", "sklearn.svm", "matplotlib", "psutil", "torchvision.transforms.v2"]


def server():
    """The context whose processes come from that server (started at the first one)."""
    context = multiprocessing.get_context("forkserver")
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
    context.set_forkserver_preload([*HEAVY, "eval", "warm"])
    return context


def spawn(function, arguments, processes, join=True):
    """As torch.multiprocessing.spawn: function(rank, *arguments), pickled, in so many processes."""
    import torch.multiprocessing
    server()
    return torch.multiprocessing.start_processes(function, arguments, processes, join, start_method="forkserver")


def start(script, flags, log, hold=0, **environment):
    """`python SCRIPT.py FLAGS` without its pictures, its words in the file `log`; a process that can be killed.

    script: a name, or the path of a fork that lies elsewhere; hold: after this step it waits for whoever is to kill it,
    whose poll may come late on a busy machine."""
    Path(log).write_text("")
    process = server().Process(target=_run, args=(script, [str(f) for f in flags], str(log), environment, hold))
    process.start()
    return process


def free_port():
    """A port on which the processes of a run can meet, as text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start_all(script, flags, log, processes, hold=0, **environment):
    """The same as so many processes of one run, with what torchrun tells each of them: a list of processes."""
    if processes == 1:
        return [start(script, flags, log, hold, **environment)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(processes),
             "LOCAL_WORLD_SIZE": str(processes)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [start(script, flags, log, hold, **environment, **place, **rank) for rank in ranks]


def finish(script, flags, log, processes=1):
    """The same, to its end; it must end well."""
    run = start_all(script, flags, log, processes)
    for process in run:
        process.join(600)
    codes = [process.exitcode for process in run]
    for process in run:
        process.kill()  # one that still waits for the others would keep pytest waiting
    assert codes == [0] * processes, (codes, Path(log).read_text()[-3000:])


def _run(script, flags, log, environment, hold):
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.update(environment)
    sys.path.insert(0, str(Path(script).parent))
    script = Path(script).stem
    sys.argv = [f"{script}.py", *flags]
    from engine import base
    from engine.run import Run
    module = importlib.import_module(script)
    module.draw = lambda *_, **__: None  # the pictures take longer than these runs
    done = Run.done

    def done_and_held(run, *args, **more):
        done(run, *args, **more)
        if run.step == hold:
            time.sleep(600)
    Run.done = done_and_held
    with base.clean_exit():
        module.main(module.parse_args(flags))
