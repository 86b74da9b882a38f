"""Runs in processes of their own, forks of this one, so that no import is paid for: half a second, not six."""

import functools
import importlib
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path

from contrastive import engine

import torch.multiprocessing
from accelerate.state import AcceleratorState
from torch.utils.data._utils import signal_handling


def own_children():
    """Forks are ours again: torch takes the end of one for that of a loader worker that had its number."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal_handling._SIGCHLD_handler_set = False  # the next loader sets it again, here and in the fork


def spawn(function, arguments, processes):
    """As torch.multiprocessing.spawn: function(rank, *arguments) in so many processes; their failure is raised here."""
    own_children()
    torch.multiprocessing.start_processes(function, arguments, processes, start_method="fork")


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


def forked(work, log, said=os.devnull, **environment):
    """A process of work() under clean_exit, its stderr at the end of the file `log`, its stdout at that of `said`."""
    own_children()

    def inside():
        AcceleratorState._reset_state(reset_partial_state=True)  # this process may have been one of one
        os.environ.update(environment)
        for number, file in ((1, said), (2, log)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w")
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
    def work():
        sys.path.insert(0, str(Path(script).parent))
        sys.argv = [f"{Path(script).stem}.py", *map(str, flags)]
        module = importlib.import_module(Path(script).stem)
        module.draw = lambda *_, **__: None
        module.main(module.parse_args(sys.argv[1:]))
    running = [forked(work, log, log, **environment)
               for environment in (world_of(processes) if processes > 1 else [{}])]
    codes = [ended(process) for process in running]
    assert codes == [0] * processes, (codes, Path(log).read_text()[-3000:])
