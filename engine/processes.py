"""Several processes: how they meet within limits, what they ask each other after a step, and long work of one that the
others wait for."""

import contextlib
import datetime
import math
import os
import random
import re
import time
from pathlib import Path

import common
from engine import CORES
from engine.base import UserError, barrier, first_line, own_words, rank, say, signals, stderr_to, to_device, world

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

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
        with open(os.devnull, "w") as nowhere, stderr_to(nowhere):  # pages about a socket
            store, place, processes = next(iter(rendezvous("env://", timeout=soon)))
            store.set_timeout(soon)
            dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=place, world_size=processes,
                                    timeout=later, device_id=card)  # with its card NCCL connects here, within limits
            store.set_timeout(later)  # for what asks it later: NCCL for each further group
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(f"the {os.environ['WORLD_SIZE']} processes did not find each other "
                        f"({first_line(error)}); start them all with one launcher") from error


def main_first(work, done):
    """Long work of the main process alone that leaves the file `done`. The others wait for the file: in a collective
    operation they would be given up after COLLECTIVE_MINUTES. Collective.   Raises: UserError on all processes."""
    failed = Path(done).with_suffix(".failed")
    if rank() == 0:
        for left in (failed, Path(done)):  # by an earlier try
            left.unlink(missing_ok=True)
    barrier()
    if rank() == 0:
        try:
            work()
        except Exception as error:
            with contextlib.suppress(OSError):
                begun = failed.with_suffix(".failing")  # renamed when whole: the others read it as soon as it is there
                begun.write_text(own_words(error), encoding="utf8")
                begun.replace(failed)
            raise
    while rank() and not Path(done).exists():
        if failed.exists():
            raise UserError(failed.read_text(encoding="utf8"))
        time.sleep(0.2)
    barrier()


def largest_later(numbers, flags, device):
    """Begin to ask for the largest over processes of plain numbers and of () bool tensors on the device. Collective.

    Returns: a function that waits for the answer, and for no later work of the card: a list of floats."""
    answer = torch.cat([to_device(torch.tensor(numbers, dtype=torch.float), device), torch.stack(flags).float()])
    if world() > 1:
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    answer, there = answer.to("cpu", non_blocking=True), None
    if device.type == "cuda":
        there = torch.cuda.Event()
        there.record()

    def read():
        if there:
            there.synchronize()
        return answer.tolist()
    return read


def ask(run, batch):
    """Begin to ask after a step: a signal? bad samples? are weights and loss finite? Collective."""
    weights = [p.detach() for m in (run.trained, run.own) for p in m.parameters() if p.is_floating_point()]
    largest = torch.stack(torch._foreach_norm(weights, math.inf)).max()  # ()
    broken = [~x.isfinite() for x in (largest, run.checked[0] if run.checked else largest)]  # () each
    answer = largest_later((max(signals, default=0), len(batch["bad"])), broken, run.device)
    run.unread.append((answer, run.step, run.lr, batch["keys"], batch["bad"], run.checked))
    run.checked = None


def settle(run, but=0):
    """Heed the answers of all steps but the last `but`. Collective.   Returns: a signal's number or 0.

    Raises: UserError on all processes, with the step that went wrong."""
    number = 0
    while len(run.unread) > but:
        answer, step, lr, keys, bad, checked = run.unread.popleft()
        signalled, any_bad, weights, loss = answer()
        if any_bad:
            run.data.count_bad(bad, step - 1)
        if loss and checked:
            common.check_finite(*checked)
        if weights:
            raise UserError(f"the weights are not finite after step {step} (lr {lr:.4g}, keys {keys[:8]}); try a lower "
                            "--lr, or --grad-clip 1")
        number = max(number, int(signalled))
    return number


def set_threads(args):
    """--threads, or OMP_NUM_THREADS; without these the local processes share the cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(args.threads or threads_by_hand() or max(1, CORES // local))


def threads_by_hand():
    """OMP_NUM_THREADS as the user set it; 0 where nobody did. torchrun and accelerate launch set it as well, mostly to
    1: then it is not in the environment that they were started in, which is that of the first parent without their own
    variables."""
    threads = re.match("[0-9]*", os.environ.get("OMP_NUM_THREADS", ""))[0] or 0
    launched = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
    if launched & os.environ.keys():
        import psutil
        try:
            launcher = next(p for p in psutil.Process().parents() if not launched & p.environ().keys())
            flag = "num_cpu_threads_per_process" in " ".join(launcher.cmdline()).replace("-", "_")  # of accelerate
            threads = threads if flag or "OMP_NUM_THREADS" in launcher.environ() else 0
        except (psutil.Error, OSError, StopIteration):  # not known: more than one thread is nobody's default
            threads = 0 if threads == "1" else threads
    return int(threads)


def set_up(args):
    """Threads, seeds and the Accelerator."""
    from importlib.util import find_spec

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    if args.tracker and not find_spec(args.tracker):
        raise UserError(f"--tracker {args.tracker} is not installed: pip install {args.tracker}")
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        join_processes(args)  # else the Accelerator lets them meet, without our limits
    if not dist.is_initialized():
        AcceleratorState._reset_state(reset_partial_state=True)  # a second run in one process may choose anew
    try:
        accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, log_with=args.tracker or None,
                                  project_dir=args.output_dir, kwargs_handlers=[ddp])
    except ValueError as error:  # e.g. fp16 on a CPU
        raise UserError(f"--mixed-precision {args.mixed_precision}: {error}") from error
    set_card(accelerator.device, args)
    set_threads(args)  # after the Accelerator, which sets threads of its own where OMP_NUM_THREADS is not there
    return accelerator


def set_card(device, args):
    """What convolutions of a CUDA card do: the fastest algorithm for each shape, which is measured once; TF32."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # a run has few shapes
        torch.backends.cudnn.allow_tf32 = args.tf32


def batchnorm_policy(model, args):
    """SyncBatchNorm on several GPUs, a warning on several CPU processes; chunks need --allow-batchnorm-chunks."""
    if args.chunk_size and not args.allow_batchnorm_chunks:
        raise UserError(f"--chunk-size {args.chunk_size}: {args.image_encoder} has BatchNorm, whose statistics would "
                        "come from chunks; --allow-batchnorm-chunks accepts that")
    if world() > 1 and torch.cuda.is_available() and not args.cpu:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if world() > 1:
        say("BatchNorm on several CPU processes: statistics are per process, so the run differs from one "
            "process")
    return model
