"""Errors that a user can mend, how a process ends, and what the processes of a run exchange."""

import contextlib
import datetime
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

from contrastive import CORES

import torch
import torch.distributed as dist

LAUNCHED = bool(os.environ.keys() & {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"})  # torchrun, accelerate


# ====================================================== errors ======================================================
class UserError(ValueError):
    """Something the user can mend: one line that says what, where and what to do. Exit code 2 at the entry point."""


def first_line(error):
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")


@contextlib.contextmanager
def opening(path):
    """Around whatever opens or writes a file: what a library raises becomes one line with the path."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: {first_line(error)}") from error


@contextlib.contextmanager
def clean_exit():
    """Entry point: a UserError is one line and exit code 2, a bug of ours a traceback. The process ends
    here, without the end of the interpreter, where gloo's threads sometimes abort it and loader workers, which ignore
    SIGTERM, would be waited for for ever; a launcher ends the other processes."""
    if LAUNCHED:
        end_with_parent(signal.SIGTERM)  # `accelerate launch` of one process passes on no signal
    code = 0
    try:
        yield
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        code = 130
    except UserError as error:
        place = int(os.environ.get("RANK", 0))
        time.sleep(2 * (place > 0))  # if the main process fails too, it prints, and a launcher ends this one meanwhile
        from tqdm import tqdm
        tqdm.write(f"error{f' (process {place})' * (place > 0)}: {error}", file=sys.stderr)  # above the progress bar
        code = 2
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent(number):
    """From now on this process gets the signal when its parent ends, for whatever reason (Linux)."""
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


def say(*words):
    """print, on the main process only, above any progress bar."""
    if rank() == 0 and os.environ.get("RANK", "0") == "0":
        from tqdm import tqdm
        tqdm.write(" ".join(map(str, words)))
        sys.stdout.flush()


# ====================================================== files =======================================================
def read_json(path, default=None):
    """Content of a JSON file; default if there is no file."""
    if default is not None and not Path(path).is_file():
        return default
    with opening(path):
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))


def write_json(path, value):
    """Writes a JSON file under a temporary name, then renames it; tensors and arrays as their numbers."""
    text = json.dumps(value, indent=1, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    with opening(path):
        temporary = Path(path).with_suffix(".tmp")
        temporary.write_text(text, encoding="utf8")
        os.replace(temporary, path)


def write_tensors(path, tensors):
    """A safetensors file of {name: tensor}."""
    from safetensors.torch import save_file
    with opening(path):
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, path)


def slug(name):
    """A data set's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(name)).strip("-")


def flatten(d, prefix=""):
    """{'a': {'b': 1}} -> {'a/b': 1}."""
    out = {}
    for k, v in d.items():
        out.update(flatten(v, f"{prefix}{k}/") if isinstance(v, dict) else {f"{prefix}{k}": v})
    return out


# ==================================================== processes =====================================================
WAIT = datetime.timedelta(hours=3)  # for another process: the clusters of CC3M take the main one so long


def join(cpu=False):
    """The process group of a launcher, for programs beside training.   Returns: the device of this process."""
    from accelerate import PartialState
    return PartialState(cpu=cpu or not torch.cuda.is_available(), timeout=WAIT).device


def set_up(args):
    """Seeds, process group and cards: the Accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed
    set_seed(args.seed)
    kinds = [DistributedDataParallelKwargs(gradient_as_bucket_view=True), InitProcessGroupKwargs(timeout=WAIT)]
    AcceleratorState._reset_state(reset_partial_state=True)  # a second run in this process may choose again
    with opening("accelerate"):  # fp16 on a CPU, a tracker that is not installed
        accelerator = Accelerator(cpu=args.cpu or not torch.cuda.is_available(), mixed_precision=args.mixed_precision,
                                  log_with=args.tracker or None, project_dir=args.output_dir, kwargs_handlers=kinds,
                                  dynamo_backend="no")
    if args.tracker and not accelerator.log_with:  # accelerate leaves it out without a word
        raise UserError(f"--tracker {args.tracker}: not installed: pip install {args.tracker}")
    plain = DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU
    if accelerator.distributed_type not in plain:
        raise UserError(f"accelerate is configured for {accelerator.distributed_type.value}; only plain processes give "
                        "the gradient of the whole batch: `accelerate config` again, or torchrun")
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("highest")  # a container may have chosen TF32; the encoders: common.tf32
        torch.backends.cudnn.benchmark = True  # a run has few shapes
    if LAUNCHED and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # a launcher's own choice
        torch.set_num_threads(max(1, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return accelerator


def world():
    """Number of processes W (1 when not distributed)."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    """Index of this process, 0..W-1."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier():
    """Wait for all processes."""
    if world() > 1:
        dist.barrier()


def mean_over_processes(numbers, device):
    """{name: () tensor or float} of each process -> {name: float}, the mean over processes. Collective."""
    values = [v.item() if torch.is_tensor(v) else v for v in numbers.values()]
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if world() > 1:
        dist.all_reduce(total)
    return dict(zip(numbers, (total / world()).tolist()))


def gather_objects(value):
    """List of every process's picklable value, by rank. Collective."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def on_main(work, *args):
    """Runs work(*args) on the main process; all get its result, or raise its UserError. Collective."""
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
    """Copies a tensor to the device; from a CPU to a card from pinned memory, so that the host does not wait."""
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return x.pin_memory().to(device, non_blocking=True) if pinned else x.to(device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _all_rows(x)

    @staticmethod
    def backward(ctx, grad):
        return _SumRows.apply(grad)

    @staticmethod
    def jvp(ctx, tangent):  # forward mode: tangents are gathered as the values are
        return _all_rows(tangent)


class _SumRows(torch.autograd.Function):
    """The transpose of _Gather, (N, ...) -> (B, ...), so that a gradient has a gradient."""

    @staticmethod
    def forward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # every process used our rows as its columns: sum their gradients
        return grad.chunk(world())[rank()]  # (B, ...)

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad)


def _all_rows(x):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world())]
    dist.all_gather(parts, x)
    return torch.cat(parts)  # (N, ...)


def gather(x):
    """Concatenate the rows of all processes, with gradient: (B, ...) -> (N, ...); the identity on one process.

    With a loss that is the mean over local rows, DDP's mean over processes makes the gradient exactly that of one
    process with the whole batch. Every process must pass the same B.
    """
    return _Gather.apply(x) if world() > 1 else x


def positive_index(anchor):
    """Column of each local row's own pair among the gathered candidates: (B,) long."""
    return rank() * len(anchor) + torch.arange(len(anchor), device=anchor.device)
