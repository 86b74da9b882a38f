"""Runs in processes of their own, forks of this one: no import is paid for again."""

import multiprocessing
import os
import signal
import socket
import sys

from contrastive import core

from accelerate.state import AcceleratorState
from torch.utils.data._utils import signal_handling


def own_children():
    """Forks are ours again: torch takes the end of one for that of a loader's worker that had its
    number."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # the next loader sets it again, here and in the fork
    signal_handling._SIGCHLD_handler_set = False


def ended(process, seconds=300):
    """Exit code of a fork; it is killed, and the test fails, when it takes longer."""
    process.join(seconds)
    late = process.is_alive()
    process.kill()
    assert not late, f"it still ran after {seconds} s"
    return process.exitcode


def ranks(folder, work, size=2):
    """[(exit code, stderr)] of forks work(rank) under clean_exit, the ranks of a world."""
    own_children()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what torchrun tells each process
    world = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size)}

    def run_rank(rank):
        # this process may have been one of one
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank))
        for number, file in ((1, os.devnull), (2, folder / f"rank{rank}.log")):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        with core.processes.clean_exit():
            work(rank)

    processes = []
    for rank in range(size):
        process = multiprocessing.get_context("fork").Process(target=run_rank, args=(rank,))
        process.start()
        processes.append(process)
    results = []
    for rank, process in enumerate(processes):
        code = ended(process)
        text = (folder / f"rank{rank}.log").read_text(errors="replace")
        results.append((code, text.replace("\x1b[A", "")))  # tqdm's sign for one line up
    return results
