"""Several processes: how they find each other, what they exchange after a step, how the others wait for long work of
the main process; threads, seeds and the Accelerator."""

import contextlib
import datetime
import math
import os
import random
import re
import time
from pathlib import Path

import common

import numpy as np
import torch
import torch.distributed as dist

from contrastive.engine import CORES
from contrastive.engine.base import (
    UserError,
    barrier,
    first_line,
    own_words,
    rank,
    say,
    signals,
    stderr_to,
    to_device,
    world,
)

RENDEZVOUS_MINUTES, COLLECTIVE_MINUTES = 2, 30  # waited for others: at the start, in a step


def join_processes(args):
    """Under a launcher, creates the process group, with time limits on waiting for others.   Raises: UserError."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "WORLD_SIZE" not in os.environ:
        say(f"WARNING: srun has started {tasks} tasks, and each is a run of its own; for one run, start torchrun in a "
            "single task on each node (docs/scale.md)")
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 or dist.is_initialized():
        return
    from torch.distributed.rendezvous import rendezvous
    gpu = torch.cuda.is_available() and not args.cpu
    own_card = gpu and torch.cuda.device_count() == 1  # srun --gpus-per-task=1
    # accelerate makes no DDP without a number
    os.environ.setdefault("LOCAL_RANK", "0" if own_card else os.environ.get("SLURM_LOCALID", "0"))
    card = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else None
    if gpu and card.index >= torch.cuda.device_count():
        raise UserError(f"process {card.index} of this node has no card, only {torch.cuda.device_count()} are visible; "
                        "start one process a card, or give --cpu")
    if gpu:
        torch.cuda.set_device(card)
    try:
        soon, later = (datetime.timedelta(minutes=m) for m in (RENDEZVOUS_MINUTES, COLLECTIVE_MINUTES))
        with open(os.devnull, "w") as nowhere, stderr_to(nowhere):  # it would print pages
            store, place, processes = next(iter(rendezvous("env://", timeout=soon)))
            store.set_timeout(soon)
            dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=place, world_size=processes,
                                    timeout=later, device_id=card)  # given its card, NCCL connects now, in time
            store.set_timeout(later)  # for later uses: NCCL, for each further group
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(f"the {os.environ['WORLD_SIZE']} processes did not find each other "
                        f"({first_line(error)}); start them all with one launcher") from error


def main_first(work, done):
    """Runs long work on the main process, which ends by writing the file `done`. The others wait for that file, since a
    collective operation would time out after COLLECTIVE_MINUTES. Collective.   Raises: UserError on all processes."""
    failed = Path(done).with_suffix(".failed")
    if rank() == 0:
        for left in (failed, Path(done)):  # left by an earlier try
            left.unlink(missing_ok=True)
    barrier()
    if rank() == 0:
        try:
            work()
        except BaseException as error:
            with contextlib.suppress(OSError):
                begun = failed.with_suffix(".failing")  # renamed when complete: the others read it at once
                begun.write_text(own_words(error), encoding="utf8")
                begun.replace(failed)
            raise
    while rank() and not Path(done).exists():
        if failed.exists():
            raise UserError(failed.read_text(encoding="utf8"))
        try:  # the store is in the main process, or in a launcher, which ends us when that one is gone
            dist.distributed_c10d._get_default_store().check(["main"])
        except RuntimeError as error:
            raise UserError(f"the main process ended before it had written {done}") from error
        time.sleep(0.2)
    barrier()


def ask(run, batch):
    """After a step, starts to ask all processes: a signal, bad samples, non-finite weights or loss? Collective."""
    weights = [p.detach() for m in (run.trained, run.own) for p in m.parameters() if p.is_floating_point()]
    largest = torch.stack(torch._foreach_norm(weights, math.inf)).max()  # ()
    broken = [~x.isfinite() for x in (largest, run.checked[0] if run.checked else largest)]  # () each
    numbers = torch.tensor([max(signals, default=0), len(batch["bad"])], dtype=torch.float)
    answer, there = torch.cat([to_device(numbers, run.device), torch.stack(broken).float()]), None  # (4,)
    if world() > 1:
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    answer = answer.to("cpu", non_blocking=True)
    if run.device.type == "cuda":
        there = torch.cuda.Event()
        there.record()
    run.unread.append((answer, there, run.step, run.lr, batch["keys"], batch["bad"], run.checked))
    run.checked = None


def settle(run, but=0):
    """Acts on the answers to `ask` of all but the last `but` steps. Collective.   Returns: a signal's number or 0.

    Raises: UserError on all processes, with the step that went wrong."""
    number = 0
    while len(run.unread) > but:
        answer, there, step, lr, keys, bad, checked = run.unread.popleft()
        if there:
            there.synchronize()  # waits for the answer, but not for later work of the card
        signalled, any_bad, weights, loss = answer.tolist()
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
    """Sets the threads: --threads, or OMP_NUM_THREADS; without both, the local processes share the cores."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(args.threads or threads_by_hand() or max(1, CORES // local))


def threads_by_hand():
    """OMP_NUM_THREADS if the user set it, else 0. torchrun and accelerate launch set it as well, mostly to 1. To tell,
    look whether it is in the environment that the launcher was started in: that of the first parent process without
    the launcher's variables."""
    threads = re.match("[0-9]*", os.environ.get("OMP_NUM_THREADS", ""))[0] or 0
    launched = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
    if launched & os.environ.keys():
        import psutil
        try:
            launcher = next(p for p in psutil.Process().parents() if not launched & p.environ().keys())
            flag = "num_cpu_threads_per_process" in " ".join(launcher.cmdline()).replace("-", "_")  # accelerate's
            threads = threads if flag or "OMP_NUM_THREADS" in launcher.environ() else 0
        except (psutil.Error, OSError, StopIteration):  # not known: no launcher's default is above 1
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
    for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true":
            raise UserError(f"accelerate is configured for {kind}; only plain processes, one a card, give the gradient "
                            "of the whole batch here: `accelerate config` again, or torchrun")
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    join_processes(args)  # else the Accelerator would create the group, without our time limits
    AcceleratorState._reset_state(reset_partial_state=True)  # a second run in this process may choose again
    cpu = args.cpu or not torch.cuda.is_available()  # also where accelerate would find a card of another kind
    try:
        accelerator = Accelerator(cpu=cpu, mixed_precision=args.mixed_precision, log_with=args.tracker or None,
                                  project_dir=args.output_dir, kwargs_handlers=[ddp], dynamo_backend="no")
    except ValueError as error:  # e.g. fp16 on a CPU
        raise UserError(f"--mixed-precision {args.mixed_precision}: {error}") from error
    if accelerator.num_processes != world():  # then no gradient would be averaged
        raise UserError(f"accelerate sees {accelerator.num_processes} of {world()} processes; start them with torchrun "
                        "or accelerate launch")
    set_card(accelerator.device, args)
    set_threads(args)  # after the Accelerator, which sets the threads itself if OMP_NUM_THREADS is missing
    return accelerator


def set_card(device, args):
    """How a CUDA card convolves: with the fastest algorithm for each shape, measured once; --tf32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")  # a container or another library may have chosen TF32
        torch.backends.cudnn.benchmark = True  # a run has few shapes
        torch.backends.cudnn.allow_tf32 = args.tf32


def batchnorm_policy(model, args):
    """SyncBatchNorm on several GPUs, a warning on several CPU processes; chunks need --allow-batchnorm-chunks."""
    if args.chunk_size and not args.allow_batchnorm_chunks:
        raise UserError(f"--chunk-size {args.chunk_size}: {args.image_encoder} has BatchNorm, whose statistics would "
                        "be those of a chunk; --allow-batchnorm-chunks accepts that")
    if world() > 1 and torch.cuda.is_available() and not args.cpu:
        from timm.layers import convert_sync_batchnorm  # torch's own loses the activations inside timm's norms
        return convert_sync_batchnorm(model)
    if world() > 1:
        say("BatchNorm on several CPU processes: statistics are per process, so the run differs from a run "
            "on one process")
    return model
