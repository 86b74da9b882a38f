"""The processes of a run: errors that a user can fix, how a process ends, and collectives."""

import contextlib
import datetime
import errno
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings

from contrastive import CORES
from contrastive.core.words import shortened

import torch
import torch.distributed as dist
from tqdm import tqdm

# whether torchrun or accelerate has started this process
LAUNCHED = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
# The longest wait of a process for another one; to cluster the captions of CC3M, which the main
# process does alone, takes long.
TIMEOUT = datetime.timedelta(hours=3)
MAX_MESSAGE = 400  # characters of a library's message, which may hold a whole cell of a table
AT_FAILED_START = []  # functions that undo what a run has made before it starts
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # also above a quota or a limit of files


# ===================================================== errors =====================================
class UserError(ValueError):
    """Something that the user can fix; its message is one line: what, where and what to do.

    At the entry point it becomes that line and exit code 2.
    """


def first_line(error):
    """The first line of an error's message, or the name of its type if the message is empty.

    An address in memory, as PIL names a file that lies in a table, says nothing to a user.
    """
    message = re.sub(r" <_io\.BytesIO object at \w+>", "", str(error)).strip()
    message = message or type(error).__name__
    return shortened(message.splitlines()[0].rstrip(":"), MAX_MESSAGE)


def full_disk(error):
    """The error that tells a user why a write failed: if a full disk or a quota is among the causes
    of `error`, that OSError, because a library may hide it behind an error of its own; else
    `error`."""
    causes = [error]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in FULL_DISK:
            return cause
        earlier = cause.__cause__ or cause.__context__
        if earlier is not None and earlier not in causes:  # a chain may be a ring
            causes.append(earlier)
    return error


@contextlib.contextmanager
def opening(path):
    """Stands around code that opens, reads or writes a file.

    Raises: UserError, one line with the path, for whatever a library raises inside.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: {first_line(full_disk(error))}") from error


@contextlib.contextmanager
def clean_exit():
    """Stands around a program: it ends the process with an exit code, and in one line if it can.

    A UserError is one line and code 2; any other error is a traceback and code 1. The interpreter
    is not shut down: gloo's threads sometimes abort it, and it would wait for ever for loader
    workers, which ignore SIGTERM. A launcher ends the other processes.
    """
    for stream in (sys.stdout, sys.stderr):
        # a file name must not end a run whose output is ASCII or Latin-1
        stream.reconfigure(errors="backslashreplace")
    if LAUNCHED:
        # `accelerate launch` of one process passes no signal on
        end_with_parent(signal.SIGTERM)
    code = 0
    try:
        yield
    except SystemExit as error:
        code = error.code or 0
    except KeyboardInterrupt:
        code = 130
    except UserError as error:
        print_error(error)
        code = 2
    except Exception as error:
        code = 1
        if str(error).startswith("DataLoader worker"):  # torch raises it wherever the program is
            print_error(f"{first_line(error)} The machine may lack memory: give fewer --workers")
        else:
            traceback.print_exc()
    for remove in AT_FAILED_START:
        remove()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_error(error):
    """Prints a UserError on stderr, after the progress bars have been removed."""
    index = int(os.environ.get("RANK", 0))
    process = ""
    if index > 0:
        # if the main process fails too, it prints, and the launcher ends this one meanwhile
        time.sleep(2)
        process = f" (process {index})"
    for bar in list(tqdm._instances):
        bar.leave = False
        bar.close()
    print(f"error{process}: {error}", file=sys.stderr)


def end_with_parent(signal_number):
    """Makes the kernel send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        import ctypes
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal_number))


def print_main(*words):
    """Prints on the main process alone, above any progress bar."""
    # before there is a process group only the launcher's variable tells which process is main
    if rank() == 0 and os.environ.get("RANK", "0") == "0":
        tqdm.write(" ".join(map(str, words)))
        sys.stdout.flush()


# ===================================================== start ======================================
def join(cpu=False):
    """Joins the process group of a launcher, for programs beside training.

    Returns: the device of this process.
    """
    from accelerate import PartialState
    return PartialState(cpu=cpu or not torch.cuda.is_available(), timeout=TIMEOUT).device


def set_seed(seed):
    """Seeds the random generators of python, numpy and torch."""
    from accelerate.utils import set_seed as seed_generators
    seed_generators(seed)


def require_gpu(args):
    """Refuses a recipe with the values of a paper or of its code without a GPU, before any data are
    read, unless --cpu is given."""
    source = args.recipe_source  # "" of a fork's recipe that says none
    is_published = source != "" and not source.startswith("ours")
    if is_published and not args.cpu and not torch.cuda.is_available():
        with opening(f"recipe {args.recipe} needs a GPU; without one add --cpu; torch"):
            torch.cuda.init()  # raises torch's reason, such as an old driver


def make_accelerator(args):
    """The Accelerator that the flags ask for: processes, device, precision and tracker.

    Raises: UserError for a precision, tracker or kind of parallelism that cannot be used.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import (
        DistributedDataParallelKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs)
    # no buffer is sent in each forward: before an evaluation Run shares those of BatchNorm
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    # accelerate hands the old name of this option to DDP
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    # a second run in this process may choose another device or precision
    AcceleratorState._reset_state(reset_partial_state=True)
    with opening("accelerate"):  # it refuses fp16 on a CPU, and a tracker that is not installed
        accelerator = Accelerator(
            cpu=args.cpu or not torch.cuda.is_available(), mixed_precision=args.mixed_precision,
            log_with=args.tracker or None, project_dir=args.output_dir,
            kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=TIMEOUT)], dynamo_backend="no",
            # else a variable of its launcher's could divide each gradient
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))
    compiler = os.environ.get("CXX", "g++")
    if args.compile and not shutil.which(compiler):
        raise UserError(f"--compile: there is no C++ compiler {compiler} here; install one, or "
                        "leave out --compile")
    if args.tracker and not accelerator.log_with:
        # accelerate leaves a tracker that is not installed out without a word
        raise UserError(f"--tracker {args.tracker}: not installed: pip install {args.tracker}")
    refuse_sharding(accelerator)
    if accelerator.device.type == "cuda":
        # Matrix products are float32, also where torch was imported before contrastive/__init__.py
        # took TF32 from its environment; GradCache lets encoders use it. Convolutions, which only
        # encoders have, use TF32 always: this setting does not reach cuDNN.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = True  # a run has few shapes
    if LAUNCHED and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        # launchers set 1 by themselves
        processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, CORES // processes_here))
    return accelerator


def refuse_sharding(accelerator):
    """Raises: UserError unless every process holds the whole model, as in DDP."""
    from accelerate.state import DistributedType
    plain = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in plain:
        raise UserError(
            f"accelerate is configured for {accelerator.distributed_type.value}; only plain "
            "processes give the gradient of the whole batch: `accelerate config` again, or use "
            "torchrun")


# ===================================================== collectives ================================
def world_size():
    """Number of processes W; 1 when not distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    """Index of this process, 0..W-1."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier():
    """Waits for all processes."""
    if world_size() > 1:
        dist.barrier()


def mean_over_processes(numbers, device):
    """{name: () tensor or float} of each process -> {name: mean as a float}. Collective."""
    values = []
    for value in numbers.values():
        values.append(value.item() if torch.is_tensor(value) else value)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if world_size() > 1:
        dist.all_reduce(total)
    means = (total / world_size()).tolist()
    return dict(zip(numbers, means))


def gather_objects(value):
    """The picklable values of all processes, a list by rank. Collective."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def on_main(work, *args):
    """Runs work(*args) on the main process alone. Collective.

    Returns: its result, on all processes.
    Raises: its UserError, on all processes.
    """
    answer = None
    if rank() == 0:
        try:
            answer = work(*args)
        except UserError as error:
            answer = error
    answer = gather_objects(answer)[0]
    if isinstance(answer, UserError):
        raise answer
    return answer


def to_device(x, device):
    """Copies a tensor to a device; from the CPU to a GPU without making the host wait."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


# ===================================================== gather =====================================
class _Gather(torch.autograd.Function):
    """(B, ...) of each process -> (N, ...), with gradients of any order and in forward mode."""

    @staticmethod
    def forward(ctx, x):
        return _all_rows(x)

    @staticmethod
    def backward(ctx, grad):
        return _SumRows.apply(grad)

    @staticmethod
    def jvp(ctx, tangent):
        return _all_rows(tangent)


class _SumRows(torch.autograd.Function):
    """The transpose of _Gather, (N, ...) -> (B, ...)."""

    @staticmethod
    def forward(ctx, grad):
        # every process has used our rows as its columns: the sum of their gradients is ours
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world_size())[rank()]                                 # (B, ...)

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad)


def _all_rows(x):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)                                                # (N, ...)


def gather(x):
    """Concatenates the rows of all processes, with gradient: (B, ...) -> (N, ...).

    With a loss that is the mean over local rows, DDP's mean over processes makes the gradient
    exactly that of one process with the whole batch. Every process must pass the same B. On one
    process it is the identity.
    """
    return _Gather.apply(x) if world_size() > 1 else x


def positive_index(anchor, other):
    """The column of each local row's own pair among the gathered candidates: (B,) long.

    Args: anchor, other: (B, D) of this process, before they are gathered; row i of both is a pair.
    Raises: ValueError if they have different shapes.
    """
    if anchor.shape != other.shape:
        raise ValueError(f"embeddings of shapes {tuple(anchor.shape)} and {tuple(other.shape)}: "
                         "row i of both is a pair, so give two of the same shape")
    return rank() * len(anchor) + torch.arange(len(anchor), device=anchor.device)
