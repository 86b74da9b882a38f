"""Runs of the scripts in processes of their own, which a server with all imports done forks: half a second, not six."""

import faulthandler
import functools
import importlib
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path

from contrastive import engine

from accelerate.state import AcceleratorState
from torch.utils.data._utils import signal_handling

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


def free_port():
    """A port on which the processes of a run can meet, as text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def world_of(processes):
    """What torchrun tells each process of a run: a list of environments."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(processes),
             "LOCAL_WORLD_SIZE": str(processes)}
    return [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def forked(work, log, **environment):
    """A process of work() under clean_exit, its stderr in a file: a fork of this process, no import is paid for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's takes its end for that of a loader worker of that number
    signal_handling._SIGCHLD_handler_set = False  # the next loader sets it again, here and in the fork

    def inside():
        AcceleratorState._reset_state(reset_partial_state=True)  # this process may have been one of one
        os.environ.update(environment)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr, sys.stdout = os.fdopen(2, "w"), os.fdopen(1, "w")
        with engine.processes.clean_exit():
            work()
    process = multiprocessing.get_context("fork").Process(target=inside)
    process.start()
    return process


def ended(process, seconds=300):
    """Exit code of a fork; it is killed, and the test fails, when it takes longer."""
    process.join(seconds)
    late = process.is_alive()
    process.kill()
    assert not late, f"it still ran after {seconds} s"
    return process.exitcode


def ranks(folder, work):
    """[(exit code, stderr)] of forks work(rank) that are the ranks of a world of two; stderr in folder/rank0.log, here
    without the sign for one line up, which tqdm writes where an earlier test left a progress bar open."""
    logs = [folder / f"rank{n}.log" for n in (0, 1)]
    processes = [forked(functools.partial(work, n), logs[n], **environment)
                 for n, environment in enumerate(world_of(2))]
    codes = [ended(process) for process in processes]
    return [(code, log.read_text(errors="replace").replace("\x1b[A", "")) for code, log in zip(codes, logs)]


def finish(script, flags, log, processes=1):
    """`python SCRIPT.py FLAGS` without its pictures, its words in the file `log`, as so many processes; all end well.

    script: a name, or the path of a fork that lies elsewhere."""
    Path(log).write_text("")
    environments = world_of(processes) if processes > 1 else [{}]
    run = [server().Process(target=_run, args=(script, [str(f) for f in flags], str(log), environment))
           for environment in environments]
    for process in run:
        process.start()
    for process in run:
        process.join(600)
    codes = [process.exitcode for process in run]
    for process in run:
        process.kill()  # one that still waits for the others would keep pytest waiting
    assert codes == [0] * processes, (codes, Path(log).read_text()[-3000:])


def _run(script, flags, log, environment):
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    faulthandler.dump_traceback_later(540, file=sys.stderr)  # to the log, of a run that `finish` will kill
    os.environ.update(environment)
    sys.path.insert(0, str(Path(script).parent))
    script = Path(script).stem
    sys.argv = [f"{script}.py", *flags]
    module = importlib.import_module(script)
    module.draw = lambda *_, **__: None  # the pictures take longer than these runs
    with engine.processes.clean_exit():
        module.main(module.parse_args(flags))
