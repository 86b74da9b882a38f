"""Several processes: how they meet within limits, and long work of one that the others wait for."""

import contextlib
import datetime
import os
import sys
import time
from pathlib import Path

import common
from common import UserError

import torch
import torch.distributed as dist

RENDEZVOUS_MINUTES, COLLECTIVE_MINUTES = 2, 30  # after which a process gives up the others: at start, in a step


def join_processes(args):
    """Under a launcher: the process group, with limits to how long others are waited for.   Raises: UserError."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 or dist.is_initialized():
        return
    from torch.distributed.rendezvous import rendezvous
    gpu = torch.cuda.is_available() and not args.cpu
    card = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else None
    if gpu:
        torch.cuda.set_device(card)
    try:
        soon, later = (datetime.timedelta(minutes=m) for m in (RENDEZVOUS_MINUTES, COLLECTIVE_MINUTES))
        with native_words_dropped():
            store, place, processes = next(iter(rendezvous("env://", timeout=soon)))
            store.set_timeout(soon)
            dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=place, world_size=processes,
                                    timeout=later, device_id=card)  # with its card NCCL connects here, within limits
            store.set_timeout(later)  # for what asks it later: NCCL for each further group
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(f"the {os.environ['WORLD_SIZE']} processes did not find each other "
                        f"({common.first_line(error)}); start them all with one launcher") from error


@contextlib.contextmanager
def native_words_dropped():
    """What C++ writes to stderr inside goes nowhere: pages about a socket, whose error then comes as an exception."""
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def main_first(work, done):
    """Long work of the main process alone that leaves the file `done`. The others wait for the file: in a collective
    operation they would be given up after COLLECTIVE_MINUTES. Collective.   Raises: UserError on all processes."""
    failed = Path(done).with_suffix(".failed")
    if common.rank() == 0:
        for left in (failed, Path(done)):  # by an earlier try
            left.unlink(missing_ok=True)
    common.barrier()
    if common.rank() == 0:
        try:
            work()
        except Exception as error:
            with contextlib.suppress(OSError):
                begun = failed.with_suffix(".failing")  # renamed when whole: the others read it as soon as it is there
                begun.write_text(common.own_words(error), encoding="utf8")
                begun.replace(failed)
            raise
    while common.rank() and not Path(done).exists():
        if failed.exists():
            raise UserError(failed.read_text(encoding="utf8"))
        time.sleep(0.2)
    common.barrier()
