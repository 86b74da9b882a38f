"""What the five method files share and a reader may skip: encoders, data, and the book-keeping of a run.

Notation, used in every file of this project:
    B  batch of this process      W  processes      N = B * W  global batch (every loss sees N candidates)
    D  embedding width            V  views          K  captions of one example      T  frames of one clip
    tau  temperature, divides the cosine            sim  plain cosine matrix, rows = queries (anchors)
    shapes stand beside the line that makes them, e.g.  logits = image @ text.T / tau    # (B, N)

Sections: errors | rooms | processes | losses on any card | random numbers | image views | text | encoders | data |
batches | metrics | evaluation | flags | runs. What knows the layout of somebody's files stands in sets/; what runs
beside training (evaluation, checkpoints, pictures), and what is optional, in tools/. Both are opened where they are
needed, by ROOMS and open_room, and so are heavy libraries; without the two folders, this file and a method file still
train on any own images and hub id, and say what is left out.
"""

import argparse
import contextlib
import csv
import dataclasses
import errno
import functools
import glob
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
import typing
import warnings
import weakref
import zlib
from pathlib import Path

# Before torch: its threads spin while they wait, which makes a step on a busy machine 3 to 10 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers' threads and forked loader workers do not mix
# Cores that this process may use, which SLURM and taskset restrict; torch's threads may be bound to fewer.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

try:
    tempfile.gettempdir()  # torch needs one before it can be imported
except OSError as nowhere:
    print(f"error: no folder takes temporary files ({nowhere.strerror}): is the disk full? TMPDIR names another",
          file=sys.stderr, flush=True)
    sys.exit(2)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


# ================================================== errors ===========================================================
class UserError(ValueError):
    """Something the user can mend: one line that says what, where and what to do. Exit code 2 at the entry point."""


class Stopped(Exception):
    """A signal asks the run to end in the middle of an evaluation: raised by all processes together."""


signals = []  # that asked this process's run to end, and that a step or an evaluation will heed


def first_line(error):
    """What an error says, on one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")


def printable(text):
    """Text without what would move a terminal's cursor, change its colours or turn its letters round (a file's name may
    hold it), and without what is no letter at all."""
    return re.sub(r"[^\n\t -~\u00a0-\ud7ff\ue000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]", "?", str(text))


@contextlib.contextmanager
def writing(path):
    """Around whatever writes a file or folder: a disk that is full, gone or read-only is a UserError with its path."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the libraries in Rust raise kinds of their own, with the same words
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        reason = re.sub(r"^.*I/O error: | [(]os error [0-9]+[)]$", "", first_line(error))
        reason = getattr(error, "strerror", None) or reason
        refusal = UserError(f"{path} cannot be written: {reason}; what was saved before is whole")
        refusal.reason = reason
        raise refusal from error


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextlib.contextmanager
def clean_exit():
    """Entry point: a UserError becomes one line from the main process and exit code 2; the process group is closed."""
    if os.environ.keys() & {"TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"}:
        end_with_parent(signal.SIGTERM)  # `accelerate launch` of one process does not pass on what ends it
    try:
        yield
    except Exception as error:
        words = plain_words(error)
        if not words:
            if over_nccl():
                sys.excepthook(*sys.exc_info())
                leave_processes(1)
            raise
        error = printable(words)
        if int(os.environ.get("RANK", 0)) == 0:
            from tqdm import tqdm
            for bar in list(getattr(tqdm, "_instances", ())):
                bar.close()  # the error is the last line, and not at the end of a progress bar
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # a launcher ends the others when one goes: the main process speaks first
            # reached where this process failed alone
            print(f"error (process {os.environ['RANK']}): {error}", file=sys.stderr, flush=True)
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a loader's: workers that are ended now are no news
        leave_processes(2)
        sys.exit(2)
    except SystemExit:  # a signal, after its checkpoint
        leave_processes()
        raise
    except KeyboardInterrupt:  # before the loop, or a second one
        print("stopped", file=sys.stderr, flush=True)
        leave_processes(128 + signal.SIGINT)
        sys.exit(128 + signal.SIGINT)
    leave_processes()


def plain_words(error):
    """One line for what a user can mend; "" for a mistake of ours, which shows where it is."""
    text = first_line(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK:
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}; what was saved before is whole"
    if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE):
        return f"{text}; raise `ulimit -n`, or try fewer --workers"
    scarce = "out of memory|an't allocate memory|an't start new thread|could not create a primitive"
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM or re.search(scarce, text):
        return (f"not enough memory ({text[:200]}); try --chunk-size, a smaller --batch-size or --eval-batch, or fewer "
                "--workers")
    if isinstance(error, RuntimeError) and "DataLoader worker" in text:
        return worker_died(error)
    if isinstance(error, RuntimeError) and world() > 1 and re.search("gloo|NCCL", text):
        reason = re.sub(r"^\[.*?\] ", "", text).split(". ")[0]  # without the place in its source
        return (f"another of the {world()} processes ended or hangs ({reason}); its own words say why; --resume goes "
                "on from the last checkpoint")
    return ""


def worker_died(error):
    """What to do when a DataLoader says that one of its processes is gone; it may say so in the middle of any call."""
    if re.search("(?i)bus error|shared memory|shm", f"{error} {error.__cause__}"):
        return ("a loader worker died: shared memory (/dev/shm) is full; in Docker start the container with --shm-size "
                "8g or --ipc=host, or try fewer --workers")
    return (f"a loader worker died or hangs ({first_line(error)}); too little memory, perhaps: try fewer --workers, or "
            "0 to see its own words")


def end_with_parent(number):
    """From here on this process gets the signal when the one that started it ends, however it ends (Linux)."""
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


def over_nccl():
    """Is there a process group whose messages go over NCCL?"""
    return dist.is_initialized() and "nccl" in dist.get_backend()


def leave_processes(failed=0):
    """Close the process group: left open, gloo's threads abort the interpreter now and then (exit code -6).

    failed: the exit code of a process that ends, perhaps alone. NCCL closes when all that is in flight is done, and the
    others wait for this process there, up to half an hour: it goes at once, so that the launcher ends them."""
    if failed and over_nccl():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    if dist.is_initialized():
        dist.destroy_process_group()


# ================================================== rooms ============================================================
# Public names of this module that stand in a file of their own, which opens when one of them is asked for.
ROOMS = {
    "sets.frames": ("read_frames",), "sets.video": ("clip_options", "windows_of"), "sets.hub": ("hub_call",),
    "sets.long_tail": ("labelled_splits", "long_tail_counts"),
    "tools.towers": ("hub_encoder", "set_dropout"), "tools.video_towers": ("FeatureEncoder", "VideoViT"),
    "tools.expert": ("Expert",), "tools.weights": ("init_from", "load_model"), "tools.avion": ("avion_weights",),
    "tools.paraphrase": ("Paraphrases",), "tools.extra_captions": ("add_captions", "add_pairs"),
    "tools.chunks": ("random_state", "set_random_state"), "tools.search": ("load_images",),
    "tools.check": ("leave_out",), "tools.meta_data": ("meta_data",),
    "tools.run_folder": ("commit", "lock_folder", "make_folder", "versions"),
    "tools.processes": ("join_processes", "main_first"),
    "tools.checkpoints": ("damaged_files", "latest_checkpoint", "write_checksums"),
    "tools.evaluation": ("NotFinite", "encode_images", "encode_texts", "evaluate", "few_queries", "metrics_table",
                         "own_words", "positives_table", "recalls", "retrieval_both_ways", "retrieval_chance",
                         "retrieval_metrics", "retrieval_pieces", "say_unreadable"),
    "tools.by_class": ("ClassEvaluator", "class_metrics", "class_table", "head_mid_tail", "knn_accuracy", "knn_chance",
                       "linear_probe", "padded_and_flipped", "recall_by_frequency", "with_class", "zero_shot_accuracy"),
    "tools.mir": ("mir_metrics", "mir_chance", "mir_of", "class_relevancy", "multi_hot"),
    "tools.answers": ("answer_vocabulary", "answer_numbers", "answer_hits", "question_metrics")}


class NoRoom(UserError):
    """A file of sets/ or tools/ that is asked for is not beside this one."""


def open_room(place, wanted=""):
    """The module of a room, such as "tools.figures".

    Raises: NoRoom where it is not there, with what was wanted; UserError where it is, but another `tools` is found."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        room, path = place.split(".")[0], place.replace(".", "/") + ".py"
        if error.name not in (place, room):
            raise
        if (Path(__file__).parent / path).is_file():  # left out, it would be missed in silence
            raise UserError(f"{path} is beside common.py, but `import {room}` finds another `{room}` first; put the "
                            "folder of common.py first in sys.path (PYTHONPATH), or rename the other") from error
        lost = f": no {wanted}" if wanted else ""
        raise NoRoom(f"{path} is not beside common.py{lost}") from error


def __getattr__(name):
    """Called by Python for a name that this module does not have itself."""
    place = next((place for place, names in ROOMS.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(open_room(place, name), name)


def has_tool(name):
    """Is tools/NAME.py beside this file? A method file and this one train alone, without pictures and checks."""
    return (Path(__file__).parent / "tools" / f"{name}.py").is_file()


def figures(paper=""):
    """tools/figures.py, or with a paper ("ts") its own pictures, tools/figures_PAPER.py."""
    return open_room(f"tools.figures_{paper}" if paper else "tools.figures", "pictures")


clusters = functools.partial(open_room, "tools.clusters", "clusters of captions")  # for a script that counts kinds
answers = functools.partial(open_room, "tools.answers", "answers to questions")  # for a model that answers


@contextlib.contextmanager
def where_there():
    """Around an optional part: where its room is not there, that is said and the part left out."""
    try:
        yield
    except NoRoom as error:
        say_once(f"left out: {error}")


# ================================================== processes ========================================================
def world():
    """Number of processes W (1 when not distributed)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank():
    """Index of this process, 0..W-1."""
    return dist.get_rank() if world() > 1 else 0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _all_rows(x)

    @staticmethod
    def backward(ctx, grad):
        return _SumRows.apply(grad)

    @staticmethod
    def jvp(ctx, tangent):  # forward mode: tangents travel as the values do
        return _all_rows(tangent)


class _SumRows(torch.autograd.Function):
    """The transpose of _Gather, (N, ...) -> (B, ...), so that a gradient has a gradient."""

    @staticmethod
    def forward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # every process used our rows as its columns: add what each of them asks
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


def all_sum(*values, device="cpu", op=dist.ReduceOp.SUM):
    """Sum (or with op their largest) of plain numbers over processes; returns a list of floats."""
    exact = torch.float32 if torch.device(device).type == "mps" else torch.float64  # Apple's GPUs have no float64
    total = torch.tensor(values, dtype=exact, device=device)
    if world() > 1:
        dist.all_reduce(total, op=op)
    return total.tolist()


def gather_objects(value):
    """List of every process's picklable value, by rank (small things: keys, messages, evaluation features)."""
    if world() == 1:
        return [value]
    values = [None] * world()
    dist.all_gather_object(values, value)
    return values


def on_main(work, *args):
    """What work(*args) of the main process returns, on all processes. Collective.   Raises: its UserError, on all."""
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


def average_gradients(parameters):
    """Mean over processes of .grad, for parameters of the loss, which are outside DDP (a learnable tau, a head)."""
    for p in parameters:
        if world() > 1 and p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= world()


def average(gradients):
    """Mean over processes of what autograd.grad gave, which DDP never sees: a tuple of tensors."""
    gradients = tuple(g.contiguous() for g in gradients)
    for g in gradients if world() > 1 else ():
        dist.all_reduce(g)
        g /= world()
    return gradients


def check_finite(loss, step, tau, embeddings, keys):
    """Stop all processes together, with one message, when the loss is not finite on any of them.

    Args: loss (); tau: float for the message; embeddings: tensors (B, D) whose norms are named; keys: B sample keys.
    Raises: UserError on every process.
    """
    finite = torch.isfinite(loss.detach()).to(torch.int32)
    if world() > 1:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if finite.item():
        return
    norms = [e.detach().float().norm(dim=-1) for e in embeddings]  # (B,) each
    broken = sorted({i for n in norms for i in (~torch.isfinite(n)).nonzero().flatten().tolist()}) or range(len(keys))
    largest = ", ".join(f"{n.max():.3g}" for n in norms)
    ours = f"process {rank()}: embedding norms up to {largest}, keys {[keys[i] for i in broken][:8]}"
    lines = gather_objects(None if torch.isfinite(loss.detach()) else ours)
    raise UserError(f"the loss is not finite at step {step} (tau {tau:.4g}); {'; '.join(x for x in lines if x)}. "
                    "Try a lower --lr, --grad-clip 1 or a higher temperature, and look at these samples.")


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
        with where_there():  # else the Accelerator lets them meet
            open_room("tools.processes", "limits to waiting for others").join_processes(args)
    if not dist.is_initialized():
        AcceleratorState._reset_state(reset_partial_state=True)  # a second run in one process may choose anew
    try:
        accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, log_with=args.tracker or None,
                                  project_dir=args.output_dir, kwargs_handlers=[ddp])
    except ValueError as error:  # e.g. fp16 on a CPU
        raise UserError(f"--mixed-precision {args.mixed_precision}: {error}") from error
    set_threads(args)  # after the Accelerator, which sets threads of its own where OMP_NUM_THREADS is not there
    return accelerator


# ================================================== losses on any card ===============================================
def normalize(x):
    """Unit rows, in float32 at least (float64 stays): 1 / tau = 100 would blow bf16's rounding up to half a logit."""
    return F.normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)


def fp32(loss):
    """Decorator: the loss runs outside autocast whatever the caller does."""
    @functools.wraps(loss)
    def wrapped(*args, **kwargs):
        device = next((a.device.type for a in args if torch.is_tensor(a)), "cpu")
        with torch.autocast(device, enabled=False):
            return loss(*args, **kwargs)
    return wrapped


def by_rows(loss, *rows, columns, block=0):
    """Losses of rows, recomputed in blocks of rows when the (B, N) matrices would be large: memory linear in N.

    Args:
        loss: function of slices of `rows` -> (b,), or () their mean; each slice keeps its place in the gradient.
        rows: tensors whose first axis is B are sliced; anything else is handed on whole.
        columns: N.   block: rows at a time; 0 = all at once below 1 GiB of float32 temporaries, else 64 MiB at a time.
    Returns: (B,), or () the mean over all rows.
    """
    B = len(rows[0])
    if not block:
        per_row = 4 * 21 * columns  # bytes; Algorithm 1 of TeMo written out keeps about 21 (B, N) matrices
        block = B if B * per_row <= 2**30 else max(1, 2**26 // per_row)
    if block >= B:
        return loss(*rows)
    def cut(x, i):
        return x[i:i + block] if torch.is_tensor(x) and x.ndim and len(x) == B else x
    parts = [checkpoint(loss, *(cut(x, i) for x in rows), use_reentrant=False, preserve_rng_state=False)
             for i in range(0, B, block)]
    if parts[0].ndim:
        return torch.cat(parts)
    return sum(part * (min(block, B - i) / B) for part, i in zip(parts, range(0, B, block)))  # the last may be short


class Chunks:
    """The embeddings of a batch, and the way back from a loss of them into the encoders: all at once, or `chunk`
    examples at a time with the memory of a chunk and the exact gradient of the full batch (tools/chunks.py).

    Args:
        encode: function of nested dicts of (b, ...) tensors -> tuple of (b, D) embeddings, rows as in the inputs.
        model: what `encode` calls, as prepared by the accelerator.
        chunk: examples at a time on this process, 0 = all.
    """

    def __init__(self, encode, model, accelerator, chunk=0):
        self.function, self.model, self.accelerator, self.chunk = encode, model, accelerator, chunk

    def encode(self, inputs):
        """Nested dict of (B, ...) tensors -> tuple of (B, D) embeddings, from which a loss can be computed."""
        self.cached = None
        if not self.chunk or self.chunk >= _rows(inputs):
            return self.function(inputs)
        in_chunks = open_room("tools.chunks", "--chunk-size").GradientCache
        self.cached = in_chunks(self.function, inputs, self.chunk)
        return self.cached.embeddings

    def backward(self, loss):
        """Fill .grad of the model's parameters (and of the loss's own) for a loss of the last `encode`'s embeddings."""
        self.accelerator.backward(loss)
        if self.cached:
            self.cached.backward(lambda: self.accelerator.no_sync(self.model))


def _rows(x):
    first = next(iter(x.values()))
    return _rows(first) if isinstance(first, dict) else len(first)


def cosine_lr(step, total, warmup, peak, end, schedule="cosine"):
    """Learning rate at step `step` (from 0): linear warm-up over `warmup` steps, then cosine to `end` or constant.

    A pure function, written into the optimiser each step: a scheduler object would be stepped W times on W processes.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


# ================================================== random numbers ===================================================
def _mix(x):
    """splitmix64 finaliser on uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed, epoch, keys, n, stream=0):
    """(len(keys), n) float32 numbers in [0, 1): a function of (seed, epoch, key, stream) and of nothing else.

    keys: integers (the sample's index, or `key_hash` of its name).   stream: one per view: views are independent.
    """
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        x = _mix(np.asarray(keys, dtype=np.int64).astype(np.uint64) * golden + np.uint64(seed))
        x = _mix(x ^ _mix(np.uint64(epoch) * golden + np.uint64(stream) * np.uint64(0xD1B54A32D192ED03)))
        x = _mix(x[:, None] + np.arange(1, n + 1, dtype=np.uint64)[None] * golden)
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # 24 bits: exact in float32


def key_hash(key):
    """63-bit integer of a sample's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little") >> 1


# ================================================== image views ======================================================
STATS = {  # mean and standard deviation of the pixels, by the weights or the code that they come from
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5,) * 3, (0.5,) * 3),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))}
MAX_PIXELS = 178_956_970  # of one image: Pillow's limit against decompression bombs
GREY = (0.2989, 0.587, 0.114)  # ITU-R 601 luma, as torchvision


class Augment:
    """One random image view: crop and RandAugment per sample, then flip, colour, grey and blur in batch, on the device.

    Every decision is read from a row of `uniforms`, never from a global generator.

    Args: size (pixels); scale_min: smallest area of the random crop, as a part of the image (1 = no crop); flip, grey,
        blur, jitter_p: probabilities; brightness, contrast, saturation, hue: strengths as in torchvision.ColorJitter;
        randaugment: (operations, magnitude of 30), or (0, 0); squash: without a crop, change the aspect.
    """
    DRAWS = 16

    def __init__(self, size, scale_min=1.0, flip=0.0, jitter_p=0.0, brightness=0.0, contrast=0.0, saturation=0.0,
                 hue=0.0, grey=0.0, blur=0.0, randaugment=(0, 0), squash=False):
        self.size, self.scale_min, self.squash, self.randaugment = size, scale_min, squash, randaugment
        self.flip, self.grey, self.blur = flip, grey, blur
        self.jitter_p, self.brightness, self.contrast = jitter_p, brightness, contrast
        self.saturation, self.hue = saturation, hue
        if randaugment[0]:
            open_room("tools.randaugment", "RandAugment")  # refused here, not by each loader worker

    def boxes(self, height, width, u):
        """Random-resized-crop boxes (B, 4) long (top, left, height, width) for draws u (B, DRAWS); aspect 3/4..4/3.

        With scale_min = 1 the evaluation view: the centre square, or all of the image with squash. Sides that would
        leave the image are cut to it (torchvision draws again, up to ten times)."""
        if self.scale_min == 1:
            h, w = (height, width) if self.squash else (min(height, width),) * 2
            return np.tile(np.array([[(height - h) // 2, (width - w) // 2, h, w]]), (len(u), 1))
        area = height * width * (self.scale_min + (1 - self.scale_min) * u[:, 0])  # (B,)
        ratio = np.exp(np.log(3 / 4) + np.log(16 / 9) * u[:, 1])
        h = np.clip(np.round(np.sqrt(area / ratio)), 1, height)
        w = np.clip(np.round(np.sqrt(area * ratio)), 1, width)
        top, left = np.floor(u[:, 2] * (height - h + 1)), np.floor(u[:, 3] * (width - w + 1))
        return np.stack([top, left, h, w], 1).astype(np.int64)

    def crop_one(self, image, u):
        """Worker side: (..., 3, H, W) uint8 of any size -> (..., 3, size, size) uint8, all frames alike; u (DRAWS,)."""
        from torchvision.transforms.v2 import functional as V
        top, left, h, w = self.boxes(*image.shape[-2:], u[None])[0].tolist()
        image = V.resized_crop(image, top, left, h, w, [self.size, self.size], antialias=True)
        return self.randaugmented(image, u) if self.randaugment[0] else image

    def randaugmented(self, image, u):
        """RandAugment of one uint8 image or clip, by its draws u (DRAWS,)."""
        return open_room("tools.randaugment", "RandAugment").randaugment(image, u, *self.randaugment)

    def finish(self, x, u):
        """Device side: (B, 3, S, S) float in 0..1 -> the same after flip, jitter, grey and blur; u (B, DRAWS).

        The four colour operations come in the fixed order brightness, contrast, saturation, hue (torchvision permutes
        them per sample); each equals torchvision's functional at the same parameter."""
        return self.photometric(x, torch.from_numpy(u).to(x.device)[:, :, None, None, None])

    def photometric(self, x, u):
        """finish for draws as a tensor (B, DRAWS, 1, 1, 1); fuses well under torch.compile."""
        if self.flip:
            x = torch.where(u[:, 4] < self.flip, x.flip(-1), x)
        if self.jitter_p and (self.brightness or self.contrast or self.saturation or self.hue):
            on = (u[:, 5] < self.jitter_p).flatten()  # (B,)
            compiling = torch.compiler.is_compiling()
            rows = slice(None) if compiling else on.nonzero().flatten()  # eager: only the rows that are jittered
            f = 2 * u[rows] - 1  # (b, DRAWS, 1, 1, 1)
            y = (x[rows] * (1 + f[:, 6] * self.brightness)).clamp_(0, 1)
            y = _blend(y, _luma(y).mean((-2, -1), keepdim=True), 1 + f[:, 7] * self.contrast)
            y = _blend(y, _luma(y), 1 + f[:, 8] * self.saturation)
            y = shift_hue(y, f[:, 9] * self.hue) if self.hue else y
            x = torch.where(on[:, None, None, None], y, x) if compiling else x.index_copy(0, rows, y)
        if self.grey:
            x = torch.where(u[:, 10] < self.grey, _luma(x).expand_as(x), x)
        if self.blur:
            x = torch.where(u[:, 11] < self.blur, gaussian_blur(x, 0.1 + 1.9 * u[:, 14, 0, 0, 0]), x)
        return x


def _luma(x):
    r, g, b = x.unbind(-3)
    return (GREY[0] * r + GREY[1] * g + GREY[2] * b).unsqueeze(-3)


def _blend(x, other, ratio):
    return torch.lerp(other.expand_as(x), x, ratio.expand_as(x) if torch.is_tensor(ratio) else ratio).clamp_(0, 1)


def shift_hue(x, shift):
    """Hue rotated by `shift` turns ((B, 1, 1, 1), -0.5..0.5): (B, 3, S, S) in 0..1. Closed form of HSV -> RGB."""
    r, g, b = x.unbind(-3)  # (B, S, S)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    c = chroma.clamp(min=1e-8)
    sextant = torch.where(r == high, (g - b) / c, torch.where(g == high, 2 + (b - r) / c, 4 + (r - g) / c))
    sextant = sextant + 6 * shift.squeeze(-3)
    def channel(n):
        k = sextant + n
        k = k - 6 * torch.floor(k / 6)  # 0..6
        return high - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)
    return torch.stack([channel(5), channel(3), channel(1)], -3)


def gaussian_blur(x, sigma):
    """Gaussian blur with one sigma (pixels) per sample: (B, 3, S, S), (B,) -> (B, 3, S, S).

    Reflected borders, radius S/20 as SimCLR."""
    B, C, S, _ = x.shape
    radius = max(1, S // 20)
    t = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (t / sigma[:, None]) ** 2)  # (B, 2r+1)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(C, 0)
    y = F.pad(x.reshape(1, B * C, S, S), (radius,) * 4, mode="reflect")
    y = F.conv2d(y, kernel[:, None, :, None], groups=B * C)
    return F.conv2d(y, kernel[:, None, None, :], groups=B * C).reshape(B, C, S, S)


def read_file(path):
    """Bytes of a regular file. Raises: OSError where there is none; ValueError for a pipe or a device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a regular file")
    return Path(path).read_bytes()


def decode(source, max_pixels=MAX_PIXELS):
    """Path or bytes of an image -> (3, H, W) uint8 RGB, alpha on white; of an animation the first frame.

    JPEGs by torchvision, which is fast; its other decoders may end the process on a damaged file.
    Raises: ValueError or OSError with the reason."""
    data = source if isinstance(source, (bytes, bytearray)) else read_file(source)
    if not data:
        raise ValueError("empty file")
    header = _open_picture(data, max_pixels)
    if header.format == "PNG":
        _check_png(data)
    if data[:2] == b"\xff\xd8":
        image = _decode_jpeg(data, header)
    elif header.format == "PNG" and data[24] == 16:  # bits of a colour
        image = open_room("tools.deep_png", "reader of PNGs with 16 bits").decode_deep_png(data)
    else:
        image = _decode_picture(header)
    if len(image) == 4:  # alpha on white; in whole numbers, since float round() starts threads: 7 ms on busy cores
        rgb, alpha = image[:3].int(), image[3:].int()
        image = ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)
    return image


def _open_picture(data, max_pixels=MAX_PIXELS):
    """Pillow's image of some bytes, its header read, no pixel decoded. Raises: ValueError."""
    import io

    from PIL import Image
    Image.MAX_IMAGE_PIXELS = max_pixels / 2  # Pillow warns above it, and refuses twice as many, in inner frames too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data))
    except MemoryError:  # no fault of the image
        raise
    except Image.DecompressionBombError as error:
        size = re.search("[0-9]+ pixels", str(error))
        raise ValueError(f"{size[0] if size else 'many pixels'}, more than the {max_pixels:,} that are read "
                         "(--max-pixels)") from error
    except Exception as error:
        raise ValueError(f"not a readable image ({type(error).__name__})") from error


def _check_png(data):
    """Raises ValueError unless all chunks of a PNG are there and have their checksums: Pillow does not look."""
    position, kind = 8, b""
    while kind != b"IEND":
        length, kind = int.from_bytes(data[position:position + 4], "big"), data[position + 4:position + 8]
        end = position + 12 + length
        if end > len(data):
            raise ValueError("truncated png")
        if zlib.crc32(data[position + 4:end - 4]) != int.from_bytes(data[end - 4:end], "big"):
            raise ValueError("damaged png: a checksum is wrong")
        position = end


def _decode_jpeg(data, header):
    """(3, H, W) uint8; header: Pillow's image of the same bytes. Raises: ValueError."""
    from torchvision.io import ImageReadMode, decode_jpeg
    if data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):  # no end after the last scan
        raise ValueError("truncated jpeg")  # the decoder would fill the rest with grey and say nothing
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        return decode_jpeg(buffer, ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:  # an odd colour space
        return _decode_picture(header)


def _decode_picture(image):
    """Pillow's image -> (3 or 4, H, W) uint8, upright. Raises: ValueError."""
    from PIL import ImageOps
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if image.mode[0] in "IF":  # converted, all that is above 255 would be white
                image = open_room("tools.deep_png", "reader of greys with 16 bits").decode_deep_grey(image)
            transparent = "A" in image.getbands() or "transparency" in image.info
            image = ImageOps.exif_transpose(image.convert("RGBA" if transparent else "RGB"))
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)
    except MemoryError:  # no fault of the image
        raise
    except Exception as error:
        reason = first_line(error) if isinstance(error, OSError) else type(error).__name__
        raise ValueError(f"not a readable image ({reason})") from error


class EvalTransform:
    """Deterministic view: (3, H, W) uint8, a PIL image, an array or a path -> (3, size, size) float, normalised.

    resize: 'crop' scales the short side and cuts the centre; 'squash' changes the aspect, as the CC3M trainer.
    part: of the short side that 'crop' keeps, 1 = all of it; 0.875 = resize to 256, cut 224."""

    def __init__(self, size, mean, std, resize="crop", part=1.0):
        self.size, self.mean, self.std, self.resize = size, tuple(mean), tuple(std), resize
        self.short = round(size / part)

    def raw(self, image):
        """(..., 3, H, W) uint8 -> (..., 3, size, size) uint8; features pass."""
        if image.is_floating_point():
            return image
        from torchvision.transforms.v2 import functional as V
        H, W = image.shape[-2:]
        if self.resize == "squash" or H == W and self.short == self.size:
            return V.resize(image, [self.size, self.size], antialias=True)
        scale = self.short / min(H, W)
        sides = [max(self.short, round(H * scale)), max(self.short, round(W * scale))]
        return V.center_crop(V.resize(image, sides, antialias=True), [self.size, self.size])

    def normalise(self, x):
        """(..., 3, S, S) float in 0..1 -> normalised."""
        mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (self.mean, self.std))
        return (x - mean).div_(std)

    def __call__(self, image):
        if isinstance(image, (str, Path, bytes)):
            image = decode(image)
        elif not torch.is_tensor(image):
            array = np.array(image.convert("RGB") if hasattr(image, "convert") else image)  # (H, W, 3)
            image = torch.from_numpy(array).permute(2, 0, 1)
        return image if image.is_floating_point() else self.normalise(self.raw(image).float() / 255)


# ================================================== text =============================================================
class Tokenizer:
    """Callable: list of str -> {input_ids, attention_mask} (B, L) long, padded to the longest, at most `length` tokens.

    clean: captions go through clean_caption first."""
    LETTERS = 100  # of a token, at most: a text is cut after so many of each, since a megabyte takes a second to split

    def __init__(self, tokenizer, length, clean=False):
        self.tokenizer, self.length, self.clean = tokenizer, min(length, tokenizer.model_max_length), clean

    def __call__(self, texts):
        texts = [t[:self.LETTERS * self.length] for t in texts]
        texts = [clean_caption(t) for t in texts] if self.clean else texts
        out = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        return {"input_ids": out["input_ids"], "attention_mask": out["attention_mask"]}

    def save(self, folder):
        self.tokenizer.save_pretrained(str(folder))

    @staticmethod
    def load(folder, length, clean=False):
        from transformers import AutoTokenizer
        try:
            return Tokenizer(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False), length, clean)
        except Exception as error:  # the library in Rust raises plain ones
            raise UserError(f"{folder}: no whole tokenizer is there ({first_line(error)})") from error


def train_wordpiece(captions, vocabulary=4000):
    """A BERT-style WordPiece tokenizer learnt from an iterable of captions (lower case, accents stripped)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    special, captions = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], list(captions)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    letters = sorted(set("".join(map(normalizer.normalize_str, captions))) - {" "})
    pieces = [f"##{c}" for c in letters]  # left alone, the trainer numbers these at random
    learner = Backend(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special + pieces, show_progress=False)
    learner.train_from_iterator(captions, trainer)
    backend = Backend(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))  # the same words; `pieces` are no
    backend.normalizer, backend.pre_tokenizer = learner.normalizer, learner.pre_tokenizer  # special tokens any more
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
                                   sep_token="[SEP]", mask_token="[MASK]")


def clean_caption(text, max_words=30):
    """Caption cleaning of the CC3M trainer: lower case, punctuation off, <person> -> person, at most 30 words."""
    text = re.sub(r"([,.'!?\"()*#:;~])", "", text.lower())
    text = text.replace("-", " ").replace("/", " ").replace("<person>", "person")
    return " ".join(text.split()[:max_words])


def drop_and_swap(text, u, drop=0.1, swap=0.1):
    """Word dropout and one swap of neighbours, from draws u (>= 16,): a poor man's paraphrase. Never an empty text."""
    words = text.split()
    kept = [w for i, w in enumerate(words) if u[2 + i % (len(u) - 2)] >= drop] or words[:1]
    if len(kept) > 1 and u[0] < swap * len(kept):
        i = int(u[1] * (len(kept) - 1))
        kept[i], kept[i + 1] = kept[i + 1], kept[i]
    return " ".join(kept)


def text_pair(captions, u, paraphrases=None, templates=(), drop=0.1, swap=0.1, second=True):
    """Pick T and its other view T~ for a batch.

    Args: captions: B lists of str; u (B, 32) draws; paraphrases: a Paraphrases or None; templates: formats such as
        "a drawing of {}". T~ is a paraphrase from the file, else a template around any caption, else another caption,
        else word dropout and swap.
    Returns: two lists of B str (the second is empty when `second` is False).
    """
    first = [c[int(r[0] * len(c))] for c, r in zip(captions, u)]
    if not second:
        return first, []
    known = paraphrases.get(first) if paraphrases else [[]] * len(first)
    other = []
    for text, options, all_captions, r in zip(first, known, captions, u):
        if not options and templates:
            options = [t.format(c) for c in all_captions for t in templates]
        if not options:
            options = [c for c in all_captions if c != text]
        other.append(options[int(r[1] * len(options))] if options else drop_and_swap(text, r[2:], drop, swap))
    return first, other


# ================================================== encoders =========================================================
VIDEO_SWIN = ("swin3d_t", "swin3d_s", "swin3d_b")  # of torchvision, Kinetics-400
VIDEO = "video_"  # before the name of a timm ViT: one transformer over the patches of all frames
CLIP_VIP = "clip_vip:"  # before a transformers id or folder of a CLIP: the same with proxy tokens, tools/clip_vip.py


class _Block(nn.Module):
    """Two 3x3 convolutions with a skip; starts as the identity."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def small_cnn(width=32):
    """A four-stage residual network of about a million weights, GroupNorm only: (B, 3, S, S) -> (B, 4 * width)."""
    layers, channels = [], 3
    for stage in range(4):
        out = width // 2 if stage == 0 else width * 2 ** (stage - 1)
        layers += [nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.GroupNorm(8, out), nn.ReLU()]
        layers += [_Block(out)] if stage else []
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Transformer(nn.ModuleList):
    """Pre-norm layers, dropout 0 unless set: x (B, L, width), keep (B, L) bool, True at a token -> (B, L, width).

    first: only so many of the first tokens are wanted of the last layer, (B, first, width); 0 = all."""

    def __init__(self, width, layers, heads):
        super().__init__([nn.ModuleDict({
            "norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
            "norm2": nn.LayerNorm(width), "fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})
            for _ in range(layers)])
        self.heads, self.dropout = heads, 0.0

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x, keep, first=0):
        B, L = keep.shape
        for b in self:
            qkv = b["qkv"](b["norm1"](x)).view(B, L, 3, self.heads, -1)  # (B, L, 3, heads, width / heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, L, width / heads) each
            if first and b is self[-1]:
                q, x = q[:, :, :first], x[:, :first]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
            x = x + self.drop(b["out"](y.transpose(1, 2).flatten(2)))
            x = x + self.drop(b["fc2"](F.gelu(b["fc1"](b["norm2"](x)))))
        return x


class SmallText(nn.Module):
    """A transformer over WordPiece ids; mean over the tokens: (B, L) -> (B, width). dropout: see set_dropout."""

    def __init__(self, vocabulary, length, width=128, layers=1, heads=4):
        super().__init__()
        self.width = width
        self.token = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Parameter(torch.randn(length + 3, width) * 0.01)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = Transformer(width, layers, heads)
        self.norm = nn.LayerNorm(width)

    def words(self, input_ids, attention_mask):
        """Hidden states of the tokens, (B, L, width), and their mean, (B, width)."""
        keep = attention_mask.bool()  # (B, L)
        x = self.blocks.drop(self.token(input_ids) + self.position[:keep.shape[1]])  # (B, L, width)
        x = self.norm(self.blocks(x, keep))
        return x, (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)

    def forward(self, input_ids, attention_mask):
        return self.words(input_ids, attention_mask)[1]


class Tower(typing.NamedTuple):
    """A network that makes features (., width) of images or clips, and what is known of it."""
    body: nn.Module
    width: int
    projection: nn.Module = None      # a CLIP's own
    config: dict = None               # of transformers
    stats: tuple = STATS["half"]      # of its pixels
    whole_clips: bool = False         # else a clip is the mean of its frames
    read: object = None               # function (encoder, pixels) -> features, where body(frames) does not give them


class VisionEncoder(nn.Module):
    """Images (B, 3, S, S) or clips (B, T, 3, S, S), mean over T -> features (B, width) and embeddings (B, D).

    name: 'small', or one that tools/towers.py knows: of timm, of transformers, a tower over whole clips.
    embed_dim 0: features alone.
    """

    def __init__(self, name, embed_dim, pretrained=True, image_size=224, config=None, features=(0, 0), frames=0):
        super().__init__()
        if name == "small":
            tower = Tower(small_cnn().to(memory_format=torch.channels_last), 128)
        else:
            by_name = open_room("tools.towers", f"--image-encoder {name}").image_tower
            tower = by_name(name, pretrained, image_size, config, features, frames)
        self.name, self.body, self.width, self.config = name, tower.body, tower.width, tower.config
        self.stats, self.whole_clips, self.read = tower.stats, tower.whole_clips, tower.read
        projection = tower.projection
        keep = projection is not None and projection.out_features == embed_dim
        if projection is not None and not keep and pretrained and embed_dim:
            say(f"--embed-dim {embed_dim}: the projections of {name} have {projection.out_features} and are replaced "
                "by new ones")
        new = nn.Linear(self.width, embed_dim, bias=False) if embed_dim else nn.Identity()
        self.projection = projection if keep else new

    def forward(self, pixels):
        return self.pool(self.frames(pixels), pixels)

    def frames(self, pixels):
        """Features of each frame, (B * T, width); a video tower may have fewer times than frames."""
        if (self.name == "features") != (pixels.ndim == 3):
            raise UserError("--image-encoder features is for ncl.py with --feature-dir, and these features are for it "
                            "alone")
        if self.whole_clips:
            return self.body(pixels)  # (B, width)
        if self.read:
            return self.read(self, pixels)
        frames = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels  # (B * T, 3, S, S)
        if self.name == "small":
            frames = frames.contiguous(memory_format=torch.channels_last)
        return self.body(frames)

    def pool(self, features, pixels):
        """Features of each frame -> features (B, width) and embeddings (B, D) of the images or clips."""
        embedding = self.projection(features)  # (B * T, D)
        if pixels.ndim == 5 and not self.whole_clips:
            B = len(pixels)
            features = features.unflatten(0, (B, -1)).mean(1)  # (B, width)
            embedding = F.normalize(embedding.float(), dim=-1).unflatten(0, (B, -1)).mean(1)  # (B, D)
        return features, embedding


class TextEncoder(nn.Module):
    """Token ids (B, L) -> embeddings (B, D).

    name: 'small' or a transformers id or folder; pooling: 'cls' or 'mean' (CLIP: its own).
    embed_dim 0: its own projection, or none where it has none."""

    def __init__(self, name, embed_dim, pretrained=True, length=32, vocabulary=0, pooling="cls", config=None):
        super().__init__()
        self.name, self.pooling, self.config, projection = name, pooling, None, None
        if name == "small":
            self.body = SmallText(vocabulary, length)
            self.width = self.body.width
        else:
            towers = open_room("tools.towers", f"--text-encoder {name}")
            self.read = towers.read_words
            self.body, self.width, projection, self.config = towers.hub_encoder(name, "text", pretrained, config)
        keep = projection is not None and embed_dim in (0, projection.out_features)
        new = nn.Linear(self.width, embed_dim, bias=False) if embed_dim else nn.Identity()
        self.projection = projection if keep else new

    def forward(self, input_ids, attention_mask):
        return self.words(input_ids, attention_mask)[1]

    def words(self, input_ids, attention_mask):
        """Hidden states of the tokens, (B, L, width), and embeddings (B, D)."""
        if self.name == "small":
            words, out = self.body.words(input_ids, attention_mask)
        else:
            words, out = self.read(self, input_ids, attention_mask)
        return words, self.projection(out)


def hub_reason(error):
    """What a failed download or load says, on one line, with what to do where there is no access to the hub."""
    text = first_line(error)
    offline = isinstance(error, OSError) or any(word in text for word in ("onnect", "offline", "resolve"))
    hint = (" (no access to the hub? download it once and give the folder, or set --no-pretrained where the name is a "
            "timm model)")
    return text[:300] + (hint if offline else "")


class TwoTower(nn.Module):
    """An image encoder and a text encoder into one space; DDP wants one forward for everything that a step encodes.

    forward(pixels, tokens) -> image (B, D), text (B, D), features (B, width); embeddings are not normalised.
    """

    def __init__(self, vision, text):
        super().__init__()
        self.vision, self.text = vision, text

    def forward(self, pixels=None, tokens=None):
        features, image = self.vision(pixels) if pixels is not None else (None, None)
        return image, self.text(**tokens) if tokens is not None else None, features


def build_model(spec, tokenizer, pretrained, weights=""):
    """TwoTower and EvalTransform from a spec (the content of model.json): what the model flags mean, in one place.

    weights: a file for init_from; a timm image encoder is then not downloaded."""
    hub_id = "/" in spec["image_encoder"]
    vision = VisionEncoder(spec["image_encoder"], spec["embed_dim"], pretrained and (hub_id or not weights),
                           spec["image_size"], spec.get("vision_config"), spec.get("features", (0, 0)),
                           spec.get("frames", 0))
    text = None
    if spec["text_encoder"]:
        vocabulary = len(tokenizer.tokenizer) if tokenizer else 0
        text = TextEncoder(spec["text_encoder"], spec["embed_dim"], pretrained, spec["text_length"], vocabulary,
                           spec["text_pooling"], spec.get("text_config"))
    of_encoder = vision.stats if spec["image_stats"] == "encoder" else STATS[spec["image_stats"]]
    mean, std = spec.get("stats") or of_encoder
    spec.update(stats=[list(mean), list(std)], vision_config=vision.config, text_config=text.config if text else None)
    model = TwoTower(vision, text)
    if spec.get("questions"):
        model = answers().QuestionAnswerer(vision, text, **spec["questions"])
    if spec["image_encoder"] != "small" or spec["text_encoder"] not in ("small", ""):
        open_room("tools.towers", "encoders by name").freeze_unused(model, tokenizer, spec)
    if weights:
        open_room("tools.weights", "--init-from").init_from(model, weights)
    return model, EvalTransform(spec["image_size"], mean, std, spec["eval_resize"], spec.get("eval_crop", 1.0))


def build_tokenizer(name, length, captions=None, folder=None, clean=False, keep=False, start=""):
    """The tokenizer of a text encoder; for 'small' a WordPiece learnt from captions() by the main process.

    keep: a resumed run keeps the one in its folder.   start: weights of another run; where its text encoder is small,
    too, its words are taken over."""
    if name != "small":
        from transformers import AutoTokenizer
        try:
            return Tokenizer(AutoTokenizer.from_pretrained(name, trust_remote_code=False), length, clean)
        except (OSError, ValueError) as error:
            raise UserError(f"--text-encoder {name}: {hub_reason(error)}") from error
    if rank() == 0 and not (keep and (Path(folder) / "tokenizer.json").is_file()):
        theirs = (Path(start) if Path(start).is_dir() else Path(start).parent) / "tokenizer"
        texts = (c[:Tokenizer.LETTERS * length] for c in captions())
        with writing(folder):
            their_encoder = read_json(theirs.parent / "model.json", {}).get("text_encoder", "small")
            if start and theirs.is_dir() and their_encoder == "small":
                shutil.copytree(theirs, folder, dirs_exist_ok=True)
                say(f"--init-from: and the words of {theirs}, which its text encoder knows")
            else:
                train_wordpiece(map(clean_caption, texts) if clean else texts).save_pretrained(str(folder))
    barrier()
    return Tokenizer.load(folder, length, clean)


def decay_groups(modules, weight_decay):
    """Parameter groups for an optimiser: weight decay for matrices and kernels, none for biases, norms and scalars."""
    params = [p for m in modules for p in m.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


def has_batchnorm(model):
    """Does any layer keep batch statistics?"""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


# ================================================== data =============================================================
IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif", "jp2", "ppm", "pgm")
VIDEO_TYPES = ("mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts", "m2ts", "wmv", "flv", "ogv", "3gp")
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "file_name", "filename", "filepath", "image_path",
                 "path")
VIDEO_COLUMNS = ("video", "video_path", "video_id", "clip_id")  # a path, a file name or its stem
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentence", "sentences", "title", "description")
LABEL_COLUMNS = ("label", "cls", "fine_label", "class")
WINDOW_COLUMNS = (("segment",), ("start", "end"), ("start_time", "end_time"), ("start_seconds", "end_seconds"))
SPLIT_NAMES = {"train": ("train", "training", "restval"), "val": ("validation", "valid", "val", "dev"),
               "test": ("test", "testing")}
TABLES = (".csv", ".tsv", ".txt", ".token", ".json", ".jsonl", ".parquet")  # files of paths and captions
HELD_OUT = 0.05  # part of the images held out for val, and again for test, where the data come without these splits
MOST_HELD_OUT = 5000  # of these, used in an evaluation
PACKED = re.compile(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)  # names of compressed tars
IN_MEMORY = 2**18  # rows whose captions and keys are kept as Python lists; larger tables are asked row by row


@dataclasses.dataclass
class Data:
    """One split of a data set: a `datasets.Dataset` table, one row an example, and how its pixels are read.

    Columns of the table: source (struct of path or bytes; offset and size inside a tar; start and end in seconds),
    captions (list of str), key, and where the set has them label (ClassLabel), group (rows of one group are positives
    of each other), verb, noun, question, answer, choices, question_type, pair (sets/questions.py).
    To change an attribute: dataclasses.replace(data, note=...).
    """
    name: str
    split: str
    table: object                     # datasets.Dataset
    pixels: torch.Tensor = None       # (M, [T,] 3, H, W) uint8 where the whole split lies in memory
    clip: object = None               # how a video becomes frames (sets/video.py); None for images
    note: str = ""                    # what was left out or held out, for the banner
    templates: tuple = ()             # formats around a caption that serve as paraphrases, "a drawing of {}"
    prompts: tuple = None             # zero-shot templates with {c}
    has_captions: bool = True         # False where class names stand in
    grouped: bool = False             # video -> text ranks videos by their best caption (MSVD's protocol)
    max_captions: int = 0             # captions of an example used in evaluation; 0 = all
    max_pixels: int = MAX_PIXELS      # a larger image is not decoded
    shards: np.ndarray = None         # (M,) number of the tar of each row
    rows: np.ndarray = None           # (M,) row numbers in the table that was opened first
    which: np.ndarray = None          # (M,) number of the one caption of each row, after unfold()
    sentences: object = None          # the texts that multi-instance retrieval ranks, and relevancies (sets/epic.py)
    caption_relevancy: float = 0.0    # training draws among the sentences above this relevancy; 0 = own captions
    joined: int = 0                   # rows at the end that --extra-pairs brought
    streamed = False                  # sets/stream.py answers True

    def __post_init__(self):
        table = self.table
        # a caption must not read image bytes
        self.texts = table.remove_columns("source") if "source" in table.column_names else table
        self.sources = table.select_columns("source") if "source" in table.column_names else None
        self.rows = np.arange(len(table)) if self.rows is None else self.rows
        self.columns, self.features = {}, self.texts.features  # asking the table for these copies them each time

    def __len__(self):
        return len(self.table)

    examples = distinct = property(__len__)  # of one epoch, and different ones; a stream may not know them

    def column(self, name):
        """A whole column: numbers as an array (M,), anything else as a list; None where the set has no such column."""
        if name not in self.texts.column_names:
            return None
        if name not in self.columns:
            values, kind = self.texts[name][:], getattr(self.features[name], "dtype", "list")
            self.columns[name] = values if kind in ("list", "string", "large_string") else np.asarray(values, kind)
        return self.columns[name]

    def names(self, column):
        """Class names of a column; None where it has none."""
        return getattr(self.features.get(column), "names", None)

    @property
    def labels(self):
        """(M,) class of each row, or None."""
        return self.column("label")

    @property
    def label_names(self):
        """Names of the classes, or None."""
        return self.names("label")

    @property
    def groups(self):
        """(M,) ids: rows of one group are positives of each other; each row for itself where the set has no groups."""
        return self.rows if self.column("group") is None else self.column("group")

    def _cell(self, column, i):
        if len(self) <= IN_MEMORY:
            return self.column(column)[i]
        return self.texts[int(i)][column]

    def captions(self, i):
        """The captions of row i, without a look at its pixels."""
        captions = self._cell("captions", i)
        return captions if self.which is None else [captions[self.which[i]]]

    def training_captions(self, i, seed, epoch, number):
        """The captions of row i; with caption_relevancy one sentence that is relevant to it, drawn for sample `number`
        of the epoch."""
        if not self.caption_relevancy:
            return self.captions(i)
        u = uniforms(seed, epoch, [number], 1, stream=98)[0, 0]
        drawn = self.sentences.draw(int(self.rows[i]), self.caption_relevancy, u)
        return self.captions(i) if drawn is None else [drawn]

    def key(self, i):
        """The name of row i: it does not change with the split or with other rows."""
        return self._cell("key", i)

    def read(self, i, draws=None):
        """Image (3, H, W) or clip (T, 3, H, W), uint8; draws (T,) place random frames. Raises OSError or ValueError."""
        if self.pixels is not None:
            return self.pixels[i]
        source = self.sources[int(i)]["source"]
        if source is None:
            raise ValueError("no image in this row")
        content = source.get("bytes") or source["path"]
        if source.get("size") is not None:
            with open(source["path"], "rb") as tar:
                tar.seek(source["offset"])
                content = tar.read(source["size"])
        if self.clip:
            return self.clip(content, source.get("start"), source.get("end"), draws)
        return decode(content, self.max_pixels)

    def __getitem__(self, i):
        more = {c: self.column(c)[i] for c in self.texts.column_names if c not in ("captions", "key", "group")}
        return {"pixels": self.read(i), "captions": self.captions(i), "key": self.key(i)} | more

    def select(self, rows, split=None):
        """The same data set with only these rows, in this order; a row may come twice."""
        rows = np.asarray(rows, dtype=None if len(rows) else np.int64)  # an empty list is no list of floats
        cut = {k: v[rows] for k in ("rows", "which", "shards") if (v := getattr(self, k)) is not None}
        pixels = None if self.pixels is None else self.pixels[torch.from_numpy(rows)]
        table = self.table.select(rows)
        return dataclasses.replace(self, split=split or self.split, table=table, pixels=pixels, joined=0, **cut)

    def unfold(self):
        """One example for each (image or clip, caption): an epoch sees every caption, and a batch may hold a clip twice
        (CLIP4Clip on MSR-VTT and MSVD)."""
        pairs = [(i, k) for i in range(len(self)) for k in range(len(self.captions(i)))]
        rows, which = np.array(pairs).T
        return dataclasses.replace(self.select(rows), which=which)

    def in_memory(self, limit=96):
        """The same examples, their pixels in one uint8 tensor where they are small and of one size; else unchanged."""
        if self.pixels is not None or not len(self):
            return self
        try:
            if max(self.read(0).shape[-2:]) > limit:
                return self
            images = [self.read(i) for i in range(len(self))]  # (3, H, W) each
        except (OSError, ValueError):  # an unreadable one is counted when its turn comes
            return self
        return dataclasses.replace(self, pixels=torch.stack(images)) if len({x.shape for x in images}) == 1 else self

    def keys(self):
        """The names of all rows in order; of a large table in batches, since row by row takes minutes."""
        if len(self) <= IN_MEMORY:
            yield from self.column("key")
        else:
            for batch in self.texts.select_columns("key").iter(10_000):
                yield from batch["key"]

    def first_captions(self, limit=None):
        """Captions in order (of the first `limit` examples): for a tokenizer or paraphrases."""
        for i in range(min(len(self), limit or len(self))):
            yield from self.captions(i)

    def raw_batches(self, batches):
        """What `Batches` asks for: cropped uint8 views and texts of this process's share of each global batch.

        Yields dicts: views (V tensors (B, [T,] 3, S, S)), captions, index (B,), rows (B,), keys, epochs (B,), bad,
        positions."""
        plan = epoch_batches(len(self), batches.batch_size, batches.seed, batches.first, batches.last, self.shards)
        mine = ((epoch, batch[rank() * batches.local:(rank() + 1) * batches.local]) for epoch, batch in plan)
        if self.pixels is not None:
            yield from open_room("sets.memory", "batches of pixels in memory").raw_batches(self, batches, mine)
            return
        order = ([(epoch, i) for i in index] for epoch, index in mine)
        views, how = _Views(self, batches.augments, batches.seed), loader_options(batches)
        yield from Loader(views, batch_sampler=order, collate_fn=collate, **how)


def make_table(captions, keys, sources=None, classes=None, **columns):
    """A table in memory for `Data`.

    Args: captions: M lists of str; keys: M str; sources: M paths, or dicts as in the column `source`, or None where
        pixels are in memory; classes: {column: class names}; columns: label=..., group=..., verb=...: M values each.
    """
    import datasets
    text, number, seconds = (datasets.Value(kind) for kind in ("string", "int64", "float64"))
    kinds = {"path": text, "bytes": datasets.Value("binary"), "offset": number, "size": number,
             "start": seconds, "end": seconds}
    features, content = {"captions": [text], "key": text}, {"captions": list(captions), "key": list(keys)}
    if sources is not None:
        content["source"] = [{"path": s} if isinstance(s, str) else s for s in sources]
        features["source"] = {k: kinds[k] for k in kinds if any(k in s for s in content["source"][:1])}
    for name, values in columns.items():
        content[name] = values.tolist() if isinstance(values, np.ndarray) else list(values)
        known = (classes or {}).get(name)
        inferred = datasets.Dataset.from_dict({name: content[name]}).features[name]
        features[name] = datasets.ClassLabel(names=list(known)) if known is not None else inferred
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def from_rows(name, split, rows, options, classes=None, **attributes):
    """`Data` of rows that somebody's annotation files give.

    Args: rows: dicts with source (a path, or a dict as in the column `source`), captions (list of str), key and further
        columns; rows without a caption are left out and counted in the note. classes: {column: class names}.
    """
    rows = [r | {"captions": clean_list(r["captions"])} for r in rows]
    kept = [r for r in rows if r["captions"]]
    if not kept:
        raise UserError(f"--dataset {name}: no row has an image and a caption")
    more = {k: [r[k] for r in kept] for k in kept[0] if k not in ("source", "captions", "key")}
    sources = [r["source"] for r in kept]
    table = make_table([r["captions"] for r in kept], [r["key"] for r in kept], sources, classes, **more)
    paths = [s if isinstance(s, str) else s.get("path", "") for s in sources]
    clip = open_room("sets.video").clip_options(options) if any(is_video(p) for p in paths) else None
    return with_notes(Data(name, split, table, **({"clip": clip} | attributes)), len(rows) - len(kept))


def join_notes(*notes):
    """Those that say something, in one line."""
    return "; ".join(n for n in notes if n)


def is_video(path):
    """By the ending of its name."""
    return Path(path).suffix.lower().lstrip(".") in VIDEO_TYPES


def set_rooms():
    """The modules of sets/ that hold data sets by name."""
    files = sorted((Path(__file__).parent / "sets").glob("[!_]*.py"))
    rooms = [importlib.import_module(f"sets.{f.stem}") for f in files]
    return [room for room in rooms if hasattr(room, "SETS")]


def find_set(name):
    """The module of sets/ that knows this name, or None."""
    return next((room for room in set_rooms() if name in room.SETS), None)


def splits_of(name, hold_out_val=False):
    """The splits a data set can give; a set by name without val has one only where that is held out of train."""
    room = find_set(name)
    own = tuple(room.SETS[name]["splits"]) if room else tuple(SPLIT_NAMES)
    return (*own, "val") if hold_out_val and set(own) == {"train", "test"} else own


def load_data(name, split, **options):
    """Open one split of a data set.

    Args:
        name: a name that a file of sets/ knows; a folder (class folders, images or videos with a metadata.csv, .jsonl
            or .parquet, tars, parquet); a csv, tsv, json(l) or parquet file of paths and captions; a .tar; or a hub id
            such as 'org/name'.   split: train, val or test.
        options: data_dir (annotations; where relative paths start), video_dir, image_column, caption_column,
            label_column, streaming, join_captions, unfold_captions; of clips: frames, frame_sampling, frame_cache,
            image_size, feature_dir; caption_relevancy: training draws among the sentences above it (EPIC-KITCHENS);
            hold_out_val: a set by name that has no val gives a part of train, and trains on the rest;
            max_pixels of an image; max_bad_fraction of the samples of tars that damage may have lost;
            extra_captions, a file of further captions for the train split; columns_of_training, {image_column: ...}
            that other data than those trained on may have, too; and what a file of sets/ asks for.
    Returns: Data, or a stream of tars (train split with streaming=True).
    Raises: UserError naming the path or column and what exists instead.
    """
    if split not in SPLIT_NAMES:
        raise ValueError(f"split must be one of {list(SPLIT_NAMES)}, not {split!r}")
    columns = dict(options.pop("columns_of_training", {}))
    if columns and not find_set(name):
        try:
            return load_data(name, split, **options | columns)
        except NoColumn as error:  # then the usual one in its place
            if not columns.pop(error.option, ""):
                raise
            return load_data(name, split, **options, columns_of_training=columns)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()
             if (v or v == 0.0 and k == "max_bad_fraction")
             and k not in ("unfold_captions", "max_pixels", "extra_captions")}
    key = tuple(sorted(given.items()))
    data = _known_set(name, split, key) if find_set(name) else _own_split(name, split, key)
    if not data.streamed and not len(data):
        if split == "train":
            raise UserError(f"--dataset {name}: all of its names fall into what is held out for val and test; give "
                            "these splits, or more data")
        raise EmptySplit(f"--dataset {name}: none of its names falls into the {HELD_OUT:.0%} that are held out for "
                         f"{split}; give a {split} split, or more data")
    if data.streamed and (options.get("unfold_captions") or options.get("feature_dir")):
        raise UserError("--streaming goes with neither --unfold-captions nor --feature-dir")
    if options.get("max_pixels"):
        data = dataclasses.replace(data, max_pixels=options["max_pixels"])
    if options.get("caption_relevancy") and split == "train":
        data = open_room("sets.epic", "--caption-relevancy").drawing_sentences(data, options)
    if options.get("extra_captions") and split == "train":
        extra = open_room("tools.extra_captions", "--extra-captions")
        data = extra.add_captions(data, Path(options["extra_captions"]).expanduser())
    return data.unfold() if options.get("unfold_captions") and split == "train" else data


class EmptySplit(UserError):
    """A split for evaluation that the data do not have, or in which none of the held-out examples falls."""


def _own_split(name, split, options):
    splits = _own_data(name, options)
    if split not in splits:
        kind = UserError if split == "train" else EmptySplit
        rename = "; its name says so, rename it to train on it" if Path(name).is_file() and split == "train" else ""
        raise kind(f"--dataset {name}: no {split} split; it has: {', '.join(splits)}{rename}")
    return splits[split]


@functools.lru_cache(maxsize=32)
def _known_set(name, split, options):
    options, room = dict(options), find_set(name)
    held = options.pop("hold_out_val", False) and set(room.SETS[name]["splits"]) == {"train", "test"}
    if not held or split == "test":
        return room.load(name, split, options)
    train = room.load(name, "train", options)
    if train.streamed:
        raise UserError(f"--hold-out-val: {name} is a stream here, of which nothing can be held out")
    return hold_out({"train": train, "test": ()})[split]


# What load_data takes from the flags of a script.
DATA_FLAGS = ("data_dir", "video_dir", "image_column", "caption_column", "label_column", "frames", "frame_sampling",
              "frame_cache", "feature_dir", "join_captions", "unfold_captions", "image_size", "clips", "clip_law",
              "caption_noise", "fold", "streaming", "max_bad_fraction", "max_pixels", "caption_relevancy",
              "hold_out_val", "extra_captions")


def data_options(args, **more):
    """The data flags that are set, as options of load_data."""
    return {k: v for k in DATA_FLAGS if (v := getattr(args, k, None)) or v == 0.0 and k == "max_bad_fraction"} | more


@functools.lru_cache(maxsize=8)
def _own_data(name, options):
    """{split: Data} of the user's own data; splits that do not exist are held out from train, by image."""
    options = dict(options)
    path = Path(name).expanduser()
    root = Path(options.get("data_dir") or path.parent).expanduser()
    if not path.exists():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.parent.exists():
            return hold_out(tables(name, {}, name, options))
        known = ", ".join(n for room in set_rooms() for n in room.SETS) or "none, without sets/"
        raise UserError(f"--dataset {name}: no such path, and not a hub id (org/name) or a known set: {known}")
    if path.is_dir():
        return _own_folder(name, path, options)
    if path.suffix == ".tar" or PACKED.search(path.name):
        return open_room("sets.tars").open_tars(name, [path], options)
    if path.suffix.lower() in TABLES:
        return hold_out(_described(name, path, root, options))
    kind = path.suffix or "nameless"
    raise UserError(f"--dataset {name}: a {kind} file is not one of csv, tsv, json, jsonl, parquet, txt, token, tar")


def _own_folder(name, path, options):
    """{split: Data} of a folder: tars, files of captions, class folders of videos or images, parquet."""
    shards = sorted(path.rglob("*.tar"))
    alone = [f for f in (*sorted(path.glob("metadata.*")), path / "captions.csv", path / "captions.txt")
             if f.is_file() and f.suffix.lower() in TABLES and not shards]
    if alone:
        return hold_out(_described(name, alone[0], Path(options.get("data_dir") or path).expanduser(), options))
    if options.get("data_dir"):
        raise UserError(f"--data-dir {options['data_dir']}: of no effect, {name} is a folder with files in it; give "
                        "the one that is meant alone")
    if shards:
        guard("check_links", name, path)
        return open_room("sets.tars").open_tars(name, shards, options)
    folders = folders_of(path)
    guard("check_split_names", name, folders)
    described = {f: sorted((path / f).glob("metadata.*")) for f in folders if split_words(f)}
    if any(described.values()):
        return hold_out(_described_folders(name, path, described, options))
    files = [f for f in path.rglob("*") if f.is_file()]
    if not files:
        guard("check_links", name, path)
        raise UserError(f"--dataset {name}: the folder is empty; expected class folders, images with metadata.csv, "
                        "tars or parquet")
    guard("check_folder", name, path, files)
    if any(is_video(f) for f in files):
        return hold_out(open_room("sets.video").video_folder(name, path, options))
    for kind in (".parquet", ".csv", ".jsonl", ".json", ".arrow"):  # the first is read; a dataset_infos.json beside it
        listed = [f for f in files if f.suffix == kind]             # is not
        if listed:
            break
    guard("check_split_names", name, [f.stem for f in listed])
    guard("check_card", name, path)
    check = functools.partial(guard, "check_splits", name, path, files, listed)
    return hold_out(tables(str(path), {}, name, options, check=check))


def guard(check, *args):
    """What a check of tools/guards.py says of somebody's own files; None, with a word, where that file is not there."""
    with where_there():
        return getattr(open_room("tools.guards", "checks of own files"), check)(*args)


def _described(name, file, root, options):
    """{split: Data} of one file of paths and captions: the splits of its column `split`, or all of it as the one split
    that its own name says (test.csv), or as train."""
    table = read_caption_file(file)
    parts = split_column(name, table)
    if parts.get("train", "") is None and split_words(file.stem) in (["val"], ["test"]):
        parts = {split_of(file.stem): None}
    of_split = {split: table if rows is None else table.select(rows) for split, rows in parts.items()}
    return same_classes({split: caption_file(name, split, file, root, options, t) for split, t in of_split.items()})


def split_column(name, table):
    """{split: row numbers} of a table by its column `split`; {train: None}, all rows, where it has none.

    Raises: UserError where only some of its values name a split."""
    column = plain_names(table.column_names).get("split")
    guard("check_other_splits", name, table)
    words = [str(w) for w in table[column][:]] if column else []
    of_word = {w: split_of(w) for w in dict.fromkeys(words)}
    odd = [w for w, split in of_word.items() if not split]
    if len(odd) == len(of_word):
        if odd:
            say_once(f"WARNING: --dataset {name}: no value of its column {column} names a split, first {odd[0]!r}: all "
                     "of its rows are training data, of which val and test are held out")
        return {"train": None}
    if odd:
        known = ", ".join(w for words in SPLIT_NAMES.values() for w in words)
        raise UserError(f"--dataset {name}: {odd[0]!r} in its column {column} names no split ({known}); rename it, or "
                        "the column where it means something else")
    splits = np.array([of_word[w] for w in words])
    return {split: np.flatnonzero(splits == split) for split in SPLIT_NAMES if split in of_word.values()}


def _described_folders(name, path, described, options):
    """{split: Data} of folders that name splits, each with its metadata: {folder: its metadata files}."""
    bare = [f for f, files in described.items() if not files]
    if bare:
        raise UserError(f"--dataset {name}: no metadata.csv, .jsonl or .parquet in {', '.join(bare)}, but in "
                        f"{', '.join(f for f in described if f not in bare)}")
    if len({split_of(f) for f in described}) < len(described):
        raise UserError(f"--dataset {name}: two of {', '.join(sorted(described))} name one split; rename or merge them")
    return same_classes({split_of(f): caption_file(name, split_of(f), files[-1], path / f, options)
                         for f, files in described.items()})


def folders_of(path):
    """Names of the folders below a data folder that hold data: none that is hidden, empty, __MACOSX or of our runs."""
    below = [f for f in path.iterdir() if f.is_dir() and not f.name.startswith((".", "__"))]
    return [f.name for f in below if any(f.iterdir()) and not any(f.glob("*/args.json"))]


def split_words(name):
    """The splits that the words of a file's or folder's name say, train first: 'photos-train-00' -> ['train']."""
    words = re.split("[^a-z]+", name.lower())
    return [s for s, known in SPLIT_NAMES.items() if any(w in known for w in words)]


@contextlib.contextmanager
def quiet_datasets():
    """The library `datasets` without bars and without its own words for errors, which are said once, by us."""
    import datasets
    logging, no_bars = datasets.utils.logging, datasets.are_progress_bars_disabled()
    level = logging.get_verbosity()
    logging.set_verbosity(50)  # not even errors
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if not no_bars:
            datasets.enable_progress_bars()


def open_table(kind, name, gated="", **files):
    """datasets.load_dataset, quietly, with its dozen kinds of errors as one line."""
    import datasets
    try:
        with quiet_datasets():
            return datasets.load_dataset(kind, **(files or _literal(kind)))
    except Exception as error:
        reason = error.__cause__ or error
        if "gated" in f"{error} {reason}".lower():
            raise UserError(gated_message(name, gated or name)) from error
        raise UserError(f"--dataset {name}: {guard('plain_words', error, reason) or hub_reason(reason)}") from error


def _literal(path):
    """What `datasets` would find in a folder whose path holds signs of its patterns, as keywords of load_dataset."""
    if not glob.has_magic(path) or not os.path.isdir(path):
        return {}
    from datasets.data_files import get_data_patterns
    place = glob.escape(os.path.realpath(path))
    return {"data_files": {s: [f"{place}/{p}" for p in found] for s, found in get_data_patterns(place).items()}}


def gated_message(name, repo):
    """How to get into a gated data set."""
    return (f"{name}: {repo} is gated: accept its terms on https://huggingface.co/datasets/{repo} and run `hf auth "
            "login`, or give a local copy with --data-dir")


class NoColumn(UserError):
    """A column that a flag names is not there; the flag is the first word."""
    option = property(lambda error: str(error).split()[0].removeprefix("--").replace("-", "_"))  # of load_data


def pick_column(flag, wanted, columns, usual, name, required=True):
    """The column a flag names, else the usual one that exists, in capitals or not; a wrong name lists those there."""
    named, there = plain_names(columns), ", ".join(columns) if len(columns) < 30 else f"{len(columns)} others"
    if wanted:
        if wanted not in named:
            raise NoColumn(f"{flag} {wanted}: {name} has no such column; it has: {there}")
        return named[wanted]
    found = next((named[c] for c in usual if c in named), None)
    if found is None and required:
        raise UserError(f"{flag} is needed: {name} has none of {', '.join(usual)}; it has: {there}")
    return found


def class_column(wanted, table, name):
    """The column of the class, or None. One of lists or records, several classes an example, is said and not read."""
    label = pick_column("--label-column", wanted, table.column_names, LABEL_COLUMNS, name, required=False)
    if label is None or hasattr(table.features[label], "dtype"):
        return label
    several = f"{name} holds lists or records there, and an example has one class"
    if wanted:
        raise UserError(f"--label-column {label}: {several}")
    say_once(f"WARNING: --label-column {label} is not read: {several}")
    return None


def plain_names(columns):
    """{name: column}, each by its own name and by that without capitals and blanks around it: ' Caption' is caption."""
    return {c.strip().lower(): c for c in columns} | {c: c for c in columns}


def split_of(word):
    """train, val or test for a folder's or file's word ('validation', 'testing', ...); None for any other."""
    return next(iter(split_words(word)), None)


def tables(kind, files, name, options, gated="", check=None):
    """{split: Data} of a hub id, a parquet folder or class folders, through `datasets`; nothing is decoded.

    check: called with {word: table} before anything is made of them."""
    opened = open_table(kind, name, gated=gated, **files)
    if check:
        check(opened)
    out = {split_of(word) or word: table for word, table in opened.items()}
    if len(out) < len(opened):
        raise UserError(f"--dataset {name}: two of {', '.join(opened)} name one split; give a local copy with the one "
                        "that is meant")
    one = out["train"] if list(out) == ["train"] else None  # all rows in one split: a column may say whose each is
    parts = dict.fromkeys(out) if one is None else split_column(name, one)
    return same_classes({s: _table_data(name, s, out[s] if one is None else one, options, kind, rows)
                         for s, rows in parts.items()})


def _inside(path, folder):
    """The name of a file inside its data set, so that a copy of the folder elsewhere has the same names."""
    for place in (os.path.abspath(folder), os.path.realpath(folder)):
        if path and path.startswith(place + os.sep):
            return path[len(place) + 1:]
    return path


def _table_data(name, split, table, options, folder, kept=None):
    """Data of a table with an Image or Video column; its captions, labels and keys are small and lie in memory.

    kept: row numbers, None = all."""
    import datasets
    import pyarrow.compute
    columns = table.column_names
    pictures = [c for c, f in table.features.items() if type(f).__name__ in ("Image", "Video")]
    usual = pictures or IMAGE_COLUMNS + VIDEO_COLUMNS
    image = pick_column("--image-column", options.get("image_column"), columns, usual, name)
    label = class_column(options.get("label_column"), table, name)
    names = getattr(table.features.get(label), "names", None)
    caption = pick_column("--caption-column", options.get("caption_column"), columns, CAPTION_COLUMNS, name,
                          required=not names)
    video = type(table.features[image]).__name__ == "Video"
    kind = type(table.features[image]) if video else datasets.Image
    undecoded = table.select_columns(image).cast_column(image, kind(decode=False))
    paths = pyarrow.compute.struct_field(undecoded.data.column(image), "path").to_pylist()  # not the bytes beside them
    if kept is not None:
        table, undecoded, paths = table.select(kept), undecoded.select(kept), [paths[i] for i in kept]
    labels = table[label][:] if label else None
    if label and not names:  # plain strings or numbers: classes in sorted order
        names = [str(y) for y in sorted({y for y in labels if is_class(y)})]
        number = {y: i for i, y in enumerate(names)}
        labels = [number[str(y)] if is_class(y) else -1 for y in labels]
    elif label:
        labels = [-1 if y is None else y for y in labels]
    texts = table[caption][:] if caption else [names[y].replace("_", " ") if y >= 0 else "" for y in labels]
    example = texts[0] if texts else ""
    if isinstance(example, dict) or (isinstance(example, list) and example and not isinstance(example[0], str)):
        raise UserError(f"--caption-column {caption}: {name} holds {type(example).__name__}s there, not texts; it has: "
                        f"{', '.join(columns)}")
    captions = [clean_list(t) for t in texts]
    paths = [_inside(p, folder) for p in paths]
    if len(paths) > 1 and len(set(paths)) == 1:  # "image.png" in every row is no name
        paths = [None] * len(paths)
    named = table["__key__"][:] if "__key__" in columns else [None] * len(table)
    keys = [str(k or p or i) for i, (k, p) in enumerate(zip(named, paths))]
    beside = make_table(captions, keys, classes={"label": names}, **({"label": labels} if label else {}))
    whole = datasets.concatenate_datasets([undecoded.rename_column(image, "source"), beside], axis=1)
    note = "" if caption else "no captions: the class names serve as captions"
    clip = open_room("sets.video").clip_options(options) if video else None
    kept = np.flatnonzero([bool(c) for c in captions])
    data = Data(name, split, whole, clip=clip, note=note, has_captions=bool(caption))
    return with_notes(data if len(kept) == len(data) else data.select(kept), len(data) - len(kept))


def is_class(label):
    """Does a label name a class? None, nothing, NaN and -1 do not."""
    return label is not None and label == label and str(label).strip() not in ("", "-1")


def clean_list(texts):
    """Captions as they come (one, several, None) -> those that say something, blanks at the ends cut off."""
    texts = texts if isinstance(texts, (list, tuple)) else [texts]
    return [str(t).strip() for t in texts if t is not None and t == t and str(t).strip()]  # NaN differs from itself


def with_notes(data, silent):
    """The data with what was left out or is odd in the note. silent: rows that had no caption."""
    lost = f"{silent:,} without a caption left out" if silent else ""
    labels = data.column("label")
    unknown = int((labels < 0).sum()) if labels is not None else 0
    missing = f"{unknown:,} without a class (not used where classes are)" if unknown else ""
    first = data.captions(0) if data.has_captions and 1 < len(data) <= IN_MEMORY else None
    same = "ALL CAPTIONS ARE THE SAME" if first and all(data.captions(i) == first for i in range(len(data))) else ""
    return dataclasses.replace(data, note=join_notes(data.note, lost, missing, same))


def caption_file(name, split, file, root, options, table=None):
    """Data of a csv, tsv, json(l) or parquet file with one row per (path, caption) of images or videos; the rows of an
    image, or of a window of a video, become its K captions. table: the rows that are meant, None = all of the file."""
    table = read_caption_file(file) if table is None else table
    columns = table.column_names
    usual = IMAGE_COLUMNS + VIDEO_COLUMNS
    image = pick_column("--image-column", options.get("image_column"), columns, usual, file.name)
    caption = pick_column("--caption-column", options.get("caption_column"), columns, CAPTION_COLUMNS, file.name)
    label = class_column(options.get("label_column"), table, file.name)
    rows, label_of = {}, {}  # (path, start, end) -> captions, and -> class
    labels = table[label][:] if label else [None] * len(table)
    texts = guard("check_cells", file, table, image, caption) or table[caption][:]
    sources = [None if x == "" or x != x else x for x in table[image][:]]  # NaN differs from itself
    endings = {Path(x.strip()).suffix.lower().lstrip(".") for x in sources if isinstance(x, str)}
    images = endings & {*IMAGE_TYPES} - {"gif"}  # a --video-dir is of other data then, those trained on
    by_name = options.get("feature_dir") or image in VIDEO_COLUMNS or options.get("video_dir") and not images
    videos = by_name or endings & {*VIDEO_TYPES}
    windows = open_room("sets.video").windows_of(table) if videos else [(None, None)] * len(table)
    for source, text, y, window in zip(sources, texts, labels, windows):
        if source is None:
            continue
        if isinstance(source, (dict, list, bytes)):
            raise UserError(f"--image-column {image}: {file.name} holds image bytes or records there, not paths; of "
                            "parquet files with images give the folder")
        if any(isinstance(t, (dict, list)) for t in (text if isinstance(text, list) else [text])):
            raise UserError(f"--caption-column {caption}: {file.name} holds records or lists there, not texts; it has: "
                            f"{', '.join(columns)}")
        path = os.path.expanduser(str(source).strip())
        key = (os.path.normpath(path), *window)  # a.png and ./a.png are one image
        captions = rows.setdefault(key, [])
        captions += [t for t in dict.fromkeys(clean_list(text)) if t not in captions]
        if is_class(y):
            label_of[key] = str(y).strip()
    if not any(rows.values()):
        raise UserError(f"--dataset {file}: no row has an image and a caption")
    lost = f"{sources.count(None):,} rows without an image left out" if None in sources else ""
    if videos:
        guard("check_windows", file, table, image)
        clips_of = open_room("sets.video").clips_of
        data = clips_of(name, split, rows, options, root, label_of if label else None)
        return dataclasses.replace(data, note=join_notes(data.note, lost))
    names = sorted({label_of[k] for k, captions in rows.items() if captions and k in label_of}) if label else None
    listed = [{"source": str(root / k[0]), "captions": captions, "key": k[0]} for k, captions in rows.items()]
    if label:
        listed = [row | {"label": names.index(label_of[k]) if k in label_of and row["captions"] else -1}
                  for row, k in zip(listed, rows)]
    data = from_rows(name, split, listed, options, {"label": names} if label else None)
    return dataclasses.replace(data, note=join_notes(data.note, lost))


def read_caption_file(file):
    """The table of a csv, tsv, json(l) or parquet file."""
    ending, rows = file.suffix.lower(), None
    with contextlib.suppress(NoRoom, UnicodeDecodeError, OSError):  # the reader says it, below
        rows = open_room("sets.records").read(file)
    if rows:
        import datasets
        return datasets.Dataset.from_list(rows)
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(ending, "csv")
    more, last = {}, 0
    if kind == "csv":
        import datasets
        with contextlib.suppress(UnicodeDecodeError, OSError, StopIteration):  # the reader says it, below
            with open(file, newline="", encoding="utf-8-sig") as f:
                first = next(line for line in f if line.strip())
            separator = next((s for s in ("\t,;|" if ending == ".tsv" else ",\t;|") if s in first), ",")
            spaced = separator + " " in first and separator == ","  # image, caption: a blank, and then a quote
            last = guard("check_csv", file, separator, spaced)
            header = next(csv.reader([first], delimiter=separator, skipinitialspace=spaced))
            names = [c or f"Unnamed: {i}" for i, c in enumerate(header)]  # the nameless column is an index
            text = datasets.Features({c: datasets.Value("string") for c in names})  # 000 is a name, and so is NA
            more = {"sep": separator, "keep_default_na": False, "features": text, "skipinitialspace": spaced}
    try:
        return open_table(kind, file, data_files=glob.escape(str(file)), split="train", **more)
    except UserError as error:
        if "EOF inside string" not in str(error):
            raise
        row = f"the row that begins at line {last}" if last else "one of its rows"
        raise UserError(f"--dataset {file}: a quote in {row} is never closed; close it, and write a quote inside a "
                        'caption as ""') from error


def same_classes(splits):
    """One list of class names for all splits, labels renumbered by name: a split may lack a class."""
    import datasets
    known = {s: d for s, d in splits.items() if d.label_names}
    names = sorted({n for d in known.values() for n in d.label_names})
    if len({tuple(d.label_names) for d in known.values()}) < 2:
        return splits
    for s, d in known.items():
        number = np.array([*(names.index(n) for n in d.label_names), -1])  # (classes + 1,) old -> new; -1 is the last
        feature = datasets.ClassLabel(names=names)
        table = d.table.remove_columns("label").add_column("label", number[d.labels], feature=feature)
        splits = splits | {s: dataclasses.replace(d, table=table)}
    return splits


def held_out_place(key):
    """0..1 by the hash of a name alone (windows of one video have one place), so that other rows do not matter."""
    video = re.sub(r" [\d.e+-]*-[\d.e+-]* s$", "", key)  # 1e-05-2 s is a window too
    return key_hash(f"held out {video}") / 2**63


def hold_out(splits):
    """Missing val and test splits become HELD_OUT of train each, by the hash of each name: a row more or less moves no
    other one. Evaluation takes at most MOST_HELD_OUT of them. Without a train split nothing is held out."""
    train = splits.get("train")
    missing = [s for s in ("val", "test") if s not in splits]
    if train is None or train.streamed or not missing:
        return splits
    if len(train) < 3:
        raise UserError(f"--dataset {train.name}: {len(train)} readable examples are too few to train on and hold some "
                        "out")
    place = np.array([held_out_place(key) for key in train.keys()])  # (M,)
    band = (place / HELD_OUT).astype(int)  # (M,) 0: the first of `missing`, 1: the second, others: train
    out, notes = dict(splits), []
    for k, s in enumerate(missing):
        rows = np.flatnonzero(band == k)
        used = np.sort(rows[np.argsort(place[rows], kind="stable")[:MOST_HELD_OUT]])
        note = f"{len(used):,} of its {len(train):,} images, held out since none of its names says {s}"
        out[s] = dataclasses.replace(train.select(used, s), note=join_notes(train.note, note))
        some = f", {len(used):,} of them used" if len(used) < len(rows) else ""
        notes.append(f"{s}: {len(rows):,} images held out of train{some}")
    out["train"] = dataclasses.replace(train.select(np.flatnonzero(band >= len(missing)), "train"),
                                       note=join_notes(train.note, *notes))
    return out


def other_options(flags, folder=""):
    """Options of load_data for other data than those that a run with these flags {name: value} trains on."""
    same = ("frames", "frame_sampling", "frame_cache", "image_size", "max_pixels", "hold_out_val")
    columns = {k: flags[k] for k in ("image_column", "caption_column", "label_column") if flags.get(k)}
    places = {"data_dir": folder, "video_dir": folder or flags.get("video_dir", "")}
    return places | {k: flags.get(k) for k in same} | {"columns_of_training": columns}


def open_data(args):
    """(training split, {name: {val, test}}) of the flags. Before any process group: its errors are quick.

    Raises: UserError where --eval-every would find no val split to evaluate."""
    train, sets = load_data(args.dataset, "train", **data_options(args)), evaluation_sets(args)
    without = ", ".join(name for name, splits in sets.items() if "val" not in splits)
    if args.eval_every and not any("val" in splits for splits in sets.values()):
        raise UserError(f"--eval-every {args.eval_every}: {without} without a val split, which is what it evaluates; "
                        "--hold-out-val takes one out of the training images of a set by name, --eval-every 0 "
                        "evaluates at the end alone")
    for word in args.extra_pairs:
        add_pairs = open_room("tools.extra_captions", "--extra-pairs").add_pairs
        train = add_pairs(train, word, args, sets)
    if args.eval_every and without:
        say(f"WARNING: --eval-every: {without} without a val split (see --hold-out-val): read once, at the end")
    return train, sets


def evaluation_sets(args):
    """{name: {val, test}} of --eval-datasets (the training set's own when empty), each NAME or NAME=DIR."""
    sets = {}
    for word in dict.fromkeys(args.eval_datasets or [args.dataset]):
        name, _, folder = (word, "", "") if Path(word).exists() else word.partition("=")
        if name in sets:
            raise UserError(f"--eval-datasets {name}: named with two folders; one has to be left out")
        options = other_options(vars(args), folder)
        if name == args.dataset:
            options = data_options(args, **({"data_dir": folder} if folder else {}))
        sets[name] = {}
        for split in (s for s in ("val", "test") if s in splits_of(name, args.hold_out_val)):
            try:
                sets[name][split] = load_data(name, split, **options)
                guard("say_part", sets[name][split], args.dataset)
            except EmptySplit as error:
                say(f"WARNING: {error}; there is no {split} evaluation")
        if not sets[name] and args.eval_datasets:
            raise UserError(f"--eval-datasets {name}: it has neither a val nor a test split")
    return sets


# ================================================== batches ==========================================================
def epoch_order(n, seed, epoch, shards=None):
    """A permutation of n rows, a pure function of (seed, epoch); with shards (n,), one that reads few of them at a
    time."""
    rng = np.random.default_rng([seed, epoch])
    return rng.permutation(n) if shards is None else open_room("sets.tars").shard_order(rng, shards)


def epoch_batches(n, batch, seed, first_step, last_step, shards=None):
    """(epoch, global batch of indices) for optimiser steps first_step..last_step-1: a function of (n, batch, seed).

    Every epoch is a fresh order; the incomplete last batch is dropped."""
    per_epoch, epoch = n // batch, -1
    for step in range(first_step, last_step):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = epoch_order(n, seed, epoch, shards)
        k = step % per_epoch
        yield epoch, order[k * batch:(k + 1) * batch]


class _Views(torch.utils.data.Dataset):
    """(epoch, index) -> the cropped uint8 views, captions, and what could not be read on the way."""
    TRIES = 100

    def __init__(self, data, augments, seed):
        self.data, self.augments, self.seed = data, augments, seed

    def __getitem__(self, place):
        epoch, index = place
        item = {"views": None, "captions": None, "index": int(index), "key": None, "epoch": epoch, "bad": []}
        draws = frame_draws(self.data.clip, self.seed, epoch, index)
        for k in range(min(self.TRIES, len(self.data))):  # an unreadable sample is replaced by the next: on any layout
            i = int((index + k) % len(self.data))
            try:
                image = self.data.read(i, draws)
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                item["bad"].append((self.data.key(i), first_line(error)))
                if words := plain_words(error):  # a full disk, no memory: any other sample would fail like this one
                    return item | {"fatal": words}
                continue
            views = crop_views(image, self.augments, self.seed, epoch, index)
            captions = self.data.training_captions(i, self.seed, epoch, index)
            return item | {"views": views, "captions": captions, "key": self.data.key(i), "row": i}
        return item


def frame_draws(clip, seed, epoch, number):
    """(T,) draws that place the random frames of a clip; None where frames are not random."""
    if clip is None or clip.sampling != "random":
        return None
    return uniforms(seed, epoch, [number], clip.frames, stream=99)[0]


def crop_views(image, augments, seed, epoch, number):
    """V cropped uint8 views, (3, S, S) or (T, 3, S, S), of one decoded image or clip, each from its own draws."""
    if image.is_floating_point():  # features have no views
        return [image] * len(augments)
    draws = [uniforms(seed, epoch, [number], a.DRAWS, stream=v + 1)[0] for v, a in enumerate(augments)]  # (DRAWS,) each
    return [a.crop_one(image, u) for a, u in zip(augments, draws)]


def collate(items):
    """Items (dicts of views, captions, index, key, epoch, bad[, positions]) -> a raw batch; views None if one lacks."""
    whole = all(i["views"] is not None for i in items)
    positions = {}
    for i in items:
        positions |= i.get("positions", {})
    return {"views": [torch.stack(v) for v in zip(*(i["views"] for i in items))] if whole else None,
            "captions": [i["captions"] for i in items], "index": np.array([i["index"] for i in items]),
            "rows": np.array([i.get("row", i["index"]) for i in items]),
            "keys": [i["key"] for i in items], "epochs": np.array([i["epoch"] for i in items]),
            "bad": [b for i in items for b in i["bad"]], "positions": positions,
            "fatal": next((i["fatal"] for i in items if "fatal" in i), "")}


LOADER_SECONDS = 1200  # without a batch, after which workers count as dead


def watched(batches, workers):
    """The items of a loader; one that dies or hangs ends the run with one line, where tools/watch.py is there."""
    with where_there():
        return open_room("tools.watch", "watch over loader workers").watched(batches, workers)
    return iter(batches)


def loader_options(batches):
    """Keywords of a DataLoader: workers with one thread each, a generator of their own, two or four batches ahead."""
    ahead = 2 if batches.data.clip else 4
    return dict(num_workers=batches.workers, pin_memory=batches.device.type == "cuda",
                generator=torch.Generator().manual_seed(batches.seed),
                prefetch_factor=ahead if batches.workers else None, **worker_options(batches.workers))


class Loader(torch.utils.data.DataLoader):
    """A DataLoader whose workers begin with SIGTERM held back, until they have left the process group."""

    def __iter__(self):
        if not self.num_workers or not hasattr(signal, "pthread_sigmask"):
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_options(workers):
    """Keywords of any DataLoader with so many workers: in a place of their own, and not waited for without end."""
    if not workers:
        return {}
    start = "fork" if sys.platform == "linux" else None  # a server of forks would be ended by a signal to the group
    return dict(worker_init_fn=_place_worker, timeout=LOADER_SECONDS, multiprocessing_context=start)


def _place_worker(_):
    """First in a worker. A scheduler's SIGTERM and Ctrl-C go to the whole process group: the main process decides."""
    with contextlib.suppress(AttributeError, OSError):  # Windows has no groups
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops one that Loader held back
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)


being_read = weakref.WeakSet()  # of raw batches, by generators whose workers end with them


class Batches:
    """Training batches of this process, steps `first` to `last`: the same on any number of processes and workers.

    Iterating gives dicts: views (V tensors (B, [T,] 3, S, S), augmented and normalised, on `device`), captions (B lists
    of str), keys (B), index (B), rows (B; those that were read, others where one is bad), draws (B, 32) for the text
    views, epoch, seconds waited for data. Sets that live in memory are cropped on the device in batch, files by
    DataLoader workers. Bad samples are counted over processes, listed in bad_samples.txt, and above max_bad_fraction
    (of those tried, or of the first 1,000) all processes stop.
    """

    def __init__(self, data, augments, transform, batch_size, seed, first, last, device, workers=0,
                 max_bad_fraction=0.01, folder=None, positions=None, compiled=False):
        self.data, self.augments, self.transform, self.device, self.seed = data, augments, transform, device, seed
        self.local, self.batch_size, self.first, self.last = batch_size // world(), batch_size, first, last
        self.max_bad_fraction, self.folder, self.bad = max_bad_fraction, folder, {}
        self.positions, self.compiled = dict(positions or {}), compiled
        self.workers = 0 if data.pixels is not None else min(workers, CORES)  # those that are started
        data.raw_batches(self)  # nothing is read yet, but a stream refuses now what it cannot do

    def __iter__(self):
        finish = [a.photometric for a in self.augments]
        if self.compiled:  # in this process: workers get plain views
            finish = [torch.compile(f, dynamic=False) for f in finish]
        source = watched(self.data.raw_batches(self), self.workers)
        being_read.add(source)
        for step in range(self.first, self.last):
            began = time.perf_counter()
            raw = next(source)
            waited = time.perf_counter() - began
            self._count_bad(raw["bad"], raw["views"] is None, raw.get("fatal", ""), step)
            self.positions |= raw["positions"]
            index, epochs = raw["index"], raw["epochs"]
            views = [self._finish(x, finish[v], self._draws(epochs, index, a.DRAWS, v + 1))
                     for v, (a, x) in enumerate(zip(self.augments, raw["views"]))]
            yield {"views": views, "captions": raw["captions"], "keys": raw["keys"], "index": index,
                   "rows": raw["rows"], "draws": self._draws(epochs, index, 32, 0), "epoch": int(epochs[0]),
                   "seconds": waited}

    def _finish(self, x, photometric, draws):
        """Cropped views (B, [T,] 3, S, S) -> colours and normalisation, on the device; features pass."""
        x = x.to(self.device, non_blocking=True)
        if x.ndim == 3:  # features
            return x
        x = x.float().div_(255) if x.dtype == torch.uint8 else x
        frames = x.reshape(-1, *x.shape[-3:])  # (B * T, 3, S, S)
        draws = torch.from_numpy(draws).to(self.device)  # (B, DRAWS)
        draws = draws.repeat_interleave(len(frames) // len(x), 0)  # (B * T, DRAWS): all frames of a clip alike
        return self.transform.normalise(photometric(frames, draws[:, :, None, None, None])).view(x.shape)

    def _draws(self, epochs, index, n, stream):
        if (epochs == epochs[0]).all():
            return uniforms(self.seed, int(epochs[0]), index, n, stream)
        return np.concatenate([uniforms(self.seed, int(e), [i], n, stream) for e, i in zip(epochs, index)])

    def _count_bad(self, bad, hopeless, fatal, step):
        """Collective: every process learns of every bad sample and decides alike."""
        if self.data.pixels is not None or not all_sum(len(bad), device=self.device)[0]:
            return
        for part, lost, words in gather_objects((bad, hopeless, fatal)):
            if words:
                raise UserError(words)
            hopeless |= lost
            new = {k: why for k, why in part if k not in self.bad}
            self.bad.update(new)
            list_bad_samples(self.folder, new)
        n = self.data.distinct
        tried = max(min((step + 1) * self.batch_size + len(self.bad), n), min(n, 1000))
        if hopeless or len(self.bad) > self.max_bad_fraction * tried:
            key, why = next(iter(self.bad.items()))
            where = f" (all in {self.folder}/bad_samples.txt)" if self.folder else ""
            raise UserError(f"{len(self.bad)} of about {tried} samples cannot be read, above --max-bad-fraction "
                            f"{self.max_bad_fraction}; the first: {key}: {why}{where}; mend them, correct --data-dir, "
                            "or raise the limit")


def list_bad_samples(folder, bad):
    """Adds {key: reason} to bad_samples.txt of a run, one a line. The main process alone writes."""
    path = Path(folder or ".") / "bad_samples.txt"
    if rank() == 0 and folder and bad:
        with writing(path), open(path, "a", encoding="utf8", errors="replace") as f:
            f.writelines("\t".join(re.sub(r"\s", " ", printable(x)) for x in pair) + "\n" for pair in bad.items())


# ================================================== metrics ==========================================================
def normalization_error(sim, gamma):
    """Mean over items j of |1 - sum_i P(j | i) n / m|, P = softmax of sim / gamma along each row (NCL, Eq. 5, where
    n = m). 0 = every item gets its share.

    Args: sim (m, n): similarity of m queries to n items, biases added.   gamma: temperature, > 0.   Returns: float."""
    exact = sim.dtype if sim.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    total = sum(F.softmax(part.to(exact) / gamma, 1).sum(0) for part in sim.split(4096))  # (n,)
    return (1 - total * sim.shape[1] / sim.shape[0]).abs().mean().item()


def modality_gap(a, b):
    """||mean a - mean b|| of unit rows, the distance between two modalities (Liang et al. 2022): a float, 0..2."""
    return (normalize(a).mean(0) - normalize(b).mean(0)).norm().item()


@torch.no_grad()
def embedding_health(image, text, limit=1024):
    """Is the space alive? Dict of floats, over at most `limit` pairs (rows are pairs).

    std: mean over dimensions of the standard deviation times sqrt(D) (1 = spread over the sphere, 0 = collapse);
    alignment: mean squared distance of pairs; uniformity: log mean exp(-2 d^2) of images; pos_cos, neg_cos; gap."""
    a, b = normalize(image[:limit]), normalize(text[:limit])  # (n, D) each
    sim, n = a @ b.T, len(a)  # (n, n)
    pos, off = sim.diagonal(), max(1, n * n - n)
    far = torch.pdist(a).pow(2) if n > 1 else a.new_zeros(1)
    root = a.shape[1] ** 0.5
    return {"std_image": a.std(0).mean().item() * root, "std_text": b.std(0).mean().item() * root,
            "alignment": (2 - 2 * pos).mean().item(), "uniformity": far.mul(-2).exp().mean().log().item(),
            "pos_cos": pos.mean().item(), "neg_cos": ((sim.sum() - pos.sum()) / off).item(), "gap": modality_gap(a, b)}


# ================================================== evaluation =======================================================
def has_clips(data):
    """Are its examples clips? Tables then say video."""
    return bool(data.clip) or data.pixels is not None and data.pixels.ndim == 5


def frames_of(data):
    """T of a clip; 1 for images."""
    if data.pixels is not None and data.pixels.ndim == 5:
        return data.pixels.shape[1]
    return data.clip.frames if data.clip else 1


class Evaluator:
    """All evaluation sets of a run: evaluator('val') -> metrics, chance and picture pieces, each by data set.

    also: function of the pieces -> a method's own metrics. A set that fails is reported in .errors and the others still
    run. Collective: every process calls it."""

    def __init__(self, model, tokenizer, transform, sets, train, device, args, also=None):
        self.model, self.tokenizer, self.transform, self.sets, self.device = model, tokenizer, transform, sets, device
        self.train, self.args, self.also, self.errors = train, args, also, {}

    def check(self):
        """Before training: every split can be opened, has a readable image and a caption."""
        with where_there():
            open_room("tools.check", "look at the evaluation sets").readable(self.sets)

    def __call__(self, split):
        metrics, chance, pieces = {}, {}, {}
        for name, splits in self.sets.items():
            if split not in splits:
                continue
            train = self.train if self.train.name == name and not self.train.streamed else None
            try:
                with where_there():
                    found, by_chance, piece = self.measure(splits[split], train)
                    with where_there():  # without the method's own, the others still count
                        found |= self.also(piece) if self.also else {}
                    metrics[name], chance[name], pieces[name] = found, by_chance, piece
            except (UserError, ValueError, RuntimeError, OSError) as error:
                self.errors[f"{name}/{split}"] = first_line(error)
                say(f"evaluation of {name} ({split}) failed and is left out: {first_line(error)}")
        return metrics, chance, pieces

    def measure(self, data, train):
        """metrics, chance and pieces of one split."""
        towers = self.model, self.tokenizer, self.transform
        evaluate = open_room("tools.evaluation", "evaluation").evaluate
        return evaluate(*towers, data, self.device, train, self.args.eval_batch, self.args.workers)


# ================================================== flags ============================================================
def between(low, high=math.inf, kind=float, words=""):
    """A `type` for add_argument: finite numbers from low to high; anything else is refused in one line."""
    words = words or (f"between {low} and {high}" if high < 10**6 else f"at least {low}")
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be a {'' if kind is float else 'whole '}number") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {words} and finite")
        if value < low or high < value < 10**6:
            raise argparse.ArgumentTypeError(f"{text}: must be {words}")
        if value > high:
            raise argparse.ArgumentTypeError(f"{text}: must be at most {high:,}")
        return value
    return parse


positive = between(math.nextafter(0, 1), words="> 0")          # temperatures, periods
nonnegative = between(0)                                       # weights, strengths
rate = between(0, 1e30)                                        # learning rates, weight decay: float32 holds the step
part = between(0, 1)                                           # probabilities, shares
below_one = between(0, 1 - 1e-7, words="at least 0 and below 1")  # betas, momentum
count = between(1, 10**9, int, words="at least 1")             # sizes, rounds
whole = between(0, 10**9, int, words="at least 0")             # 0 = off


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """--help with the effective default of every flag; nothing where the default is empty."""

    def _get_help_string(self, action):
        empty = action.default in ("", None) or action.default == []
        return action.help if empty else super()._get_help_string(action)


class OneLine(argparse.ArgumentParser):
    """argparse whose errors are one line from the main process, exit code 2; --help shows the effective defaults."""

    def __init__(self, prog, description, **more):
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=Help, **more)

    def error(self, message):
        """One line, from the main process; exit code 2."""
        if int(os.environ.get("RANK", 0)) == 0:
            message = re.sub(r"^argument (--[\w-]+)[^:]*: ", r"\1 ", message)  # argparse's own words
            print(f"error: {printable(message)}", file=sys.stderr, flush=True)
        sys.exit(2)

    def require(self, holds, message):
        """Refuse the flags with this message unless the condition holds."""
        if not holds:
            self.error(message)

    def only(self, holds, where, *flags):
        """Refuse these flags where the command line has them (a recipe's or a run's own values are never refused)
        unless the condition holds, under which alone they have an effect."""
        for flag in flags:
            given = next(iter(self.given & {flag, flag.replace("--", "--no-", 1)}), "")
            self.require(holds or not given, f"{given}: only {where}; it would have no effect")

    def parse_args(self, args=None, namespace=None):
        """As argparse does; `given` are the flags of the command line."""
        self.given = {str(word).partition("=")[0] for word in (sys.argv[1:] if args is None else args)}
        return super().parse_args(args, namespace)


class Parser(OneLine):
    """The flags that all scripts share: what names files, columns, folders, logging and resume.

    `parse` works in two stages: --dataset, --loss and --resume choose the defaults, the other flags override them.

    Args: file: the script's __file__, which names it.   texts: does the script train on captions?
    """

    def __init__(self, file, description, texts=True):
        super().__init__(Path(file).name, description)
        yesno = argparse.BooleanOptionalAction
        g = self.add_argument_group("run")
        g.add_argument("--output-dir", default="runs", help="folder of all runs")
        g.add_argument("--run-name", default="",
                       help="folder of this run in --output-dir; empty = script, data set, seed and time")
        g.add_argument("--resume", default="", metavar="RUN_DIR",
                       help="continue this run exactly, from its last checkpoint; needs no other flag")
        g.add_argument("--cpu", action=yesno, default=False, help="stay on the CPU even where there is a GPU")
        g.add_argument("--threads", type=between(0, 1024, int), default=0,
                       help="CPU threads of each process; 0 = OMP_NUM_THREADS, or cores / local processes")
        g.add_argument("--compile", action=yesno, default=False,
                       help="torch.compile the encoders and the colour operations of the views")
        g.add_argument("--save-every", type=whole, default=1000,
                       help="optimiser steps between checkpoints (the last two are kept); 0 = only at the end")
        g.add_argument("--eval-every", type=whole, default=0,
                       help="optimiser steps between evaluations on the val split; 0 = only at the end")
        g.add_argument("--log-every", type=whole, default=10,
                       help="optimiser steps between rows of metrics.jsonl; 0 = only at the end")
        g.add_argument("--figures", choices=["png", "pdf"], default="png",
                       help="form of the pictures; pdf for papers: lines and letters stay what they are")
        g.add_argument("--tracker", choices=["", "tensorboard", "wandb", "trackio"], default="",
                       help="log there as well as to metrics.jsonl")
        g = self.add_argument_group("data")
        g.add_argument("--fit-batch", action=yesno, default=False,
                       help="where the training set is smaller than --batch-size, lower it to what fits, and say so; "
                            "on by itself for own data without --batch-size")
        g.add_argument("--dataset",
                       help="a name that a file of sets/ knows; or a folder, csv, tsv, jsonl, parquet, tar, or hub id "
                            "(org/name)")
        g.add_argument("--data-dir", default="",
                       help="where relative paths start, and where a video set's annotation files lie; empty = beside "
                            "the captions file")
        g.add_argument("--video-dir", default="",
                       help="folder of the videos, found by path, file name or stem; empty = --data-dir")
        g.add_argument("--image-column", default="",
                       help="column (or tar extension) of the images or videos; empty = the usual names")
        g.add_argument("--label-column", default="", help="column of the class, for kNN; empty = the usual names")
        g.add_argument("--frame-cache", default="", metavar="DIR",
                       help="decode each video once, to one small JPEG there")
        g.add_argument("--max-bad-fraction", type=part, default=0.01,
                       help="stop when more than this part of the samples tried cannot be read, 0..1")
        g.add_argument("--max-pixels", type=count, default=MAX_PIXELS,
                       help="a larger image is not read, as if it were damaged: a small file may hold billions")
        g.add_argument("--verify-images", action=yesno, default=False,
                       help="before the first step read every image once, strictly, and leave out of training and "
                            "evaluation what is damaged; bad_samples.txt lists it")
        g.add_argument("--workers", type=between(0, 1024, int), default=4,
                       help="loader processes per process; 0 = none. Sets in memory use none; the samples never depend "
                            "on it")
        g.add_argument("--clip-law", choices=["once", "zipf"], default="once",
                       help="val and test of moving-emoji: once = each held-out pair in turn, none that training "
                            "shows; zipf = further draws of the law of training (NCL's queue of training queries)")
        if texts:
            g.add_argument("--fold", type=between(0, 9, int), default=0,
                           help="of emoji: which tenth of the drawings is test, 0..9; the next one is val")
            g.add_argument("--caption-column", default="",
                           help="column (or tar extension, or json.KEY) of the captions; empty = the usual names")
            g.add_argument("--extra-captions", default="", metavar="FILE",
                           help="csv, jsonl or parquet of video, start, end, caption: further captions of training "
                                "clips, as tools/caption.py writes them; each epoch draws one of all that a clip has")
            g.add_argument("--extra-pairs", nargs="+", default=[], metavar="NAME[=DIR]",
                           help="data sets whose training pairs join the training set's, each with the folder of its "
                                "files: howto100m=DIR, or tools/caption.py's csv of its videos, captions.csv=DIR")
            g.add_argument("--streaming", action=yesno, default=False,
                           help="read tars in order, nothing indexed or downloaded first; other layouts are not read "
                                "so")
        g = self.add_argument_group("evaluation")
        g.add_argument("--eval-batch", type=count, default=256, help="images, or frames of clips, at a time")
        g.add_argument("--hold-out-val", action=yesno, default=False,
                       help=f"a set by name that has no val split (MSR-VTT, ActivityNet, COCO, CIFAR) gives "
                            f"{HELD_OUT:.0%} of train as val and trains on the rest: then --eval-every has something "
                            "to look at".replace("%", "%%"))
        if texts:
            g.add_argument("--eval-datasets", nargs="*", default=[], metavar="NAME[=DIR]",
                           help="data sets of the evaluation (val and test splits), each with an optional local copy "
                                "(annotations and videos); none = the training set's own")

    def parse(self, argv, recipes, losses=None):
        """Parsed flags.

        Args: recipes: {dataset: {flag: default}}, the first one is the default set, 'own' serves any other; their entry
            'recipe' is a remark.   losses: {loss: {flag: default}}, or a function of the flags that choose -> defaults.
        """
        chooser = OneLine(self.prog, "", add_help=False)
        first = {"--dataset": next(iter(recipes)), "--loss": self.get_default("loss"), "--resume": "",
                 "--image-encoder": "", "--batch-size": None}
        for flag, default in first.items():
            chooser.add_argument(flag, default=default)
        chosen, _ = chooser.parse_known_args(argv)
        own = losses(chosen) if callable(losses) else (losses or {}).get(chosen.loss, {})
        saved = {}
        if chosen.resume:
            try:
                saved = open_room("tools.checkpoints", "--resume").saved_flags(self, chosen.resume)
            except UserError as error:
                self.error(str(error))
        defaults = recipes.get(chosen.dataset, recipes["own"]) | {"dataset": chosen.dataset} | own | saved
        defaults = {"fit_batch": chosen.dataset not in recipes and chosen.batch_size is None} | defaults
        self.set_defaults(**{k: v for k, v in defaults.items() if k not in ("recipe", "resume", "run_name")})
        args = self.parse_args(argv)
        if saved:
            open_room("tools.checkpoints").refuse_changes(self, args, saved)
        self._check(args, saved)
        return args

    def _check(self, args, saved):
        """What all scripts require between flags."""
        for flag in ("dataset", "resume", "eval_datasets"):
            given, value = f"--{flag.replace('_', '-')}", getattr(args, flag, None)
            empty = "" in value if isinstance(value, list) else not value
            self.require(given not in self.given or not empty, f"{given}: empty; a variable of the shell that is not "
                                                               "set?")
        processes = int(os.environ.get("WORLD_SIZE", 1))
        batch, local = args.batch_size, args.batch_size // processes
        self.require(batch % processes == 0, f"--batch-size {batch}: not divisible by {processes} processes; use "
                                             f"{local * processes or processes}")
        self.require(args.chunk_size <= local, f"--chunk-size {args.chunk_size}: larger than the {local} examples of "
                                               "--batch-size on each process")
        used = {args.dataset, *(name.partition("=")[0] for name in getattr(args, "eval_datasets", []))}
        for flag in ("clip_law", "fold", "clips", "caption_noise"):  # a set's facts say what it takes
            takes = [n for room in set_rooms() for n, facts in room.SETS.items() if flag in facts.get("options", ())]
            value, off = getattr(args, flag, None), self.get_default(flag)
            self.require(value in (None, off) or used & set(takes),
                         f"--{flag.replace('_', '-')} {value}: not of --dataset {args.dataset}, but of "
                         f"{', '.join(takes)}")
        for folder in getattr(args, "feature_dir", None) or []:
            self.require(Path(folder).is_dir(), f"--feature-dir {folder}: no such folder")
        for name in ("init_from", "data_dir", "video_dir", "extra_captions", "index_file", "test_file", "val_file",
                     "few_shot_file"):
            path = getattr(args, name, "")
            if path and not (saved and name == "init_from"):
                self.require(Path(path).exists(), f"--{name.replace('_', '-')} {path}: no such path")


# ================================================== runs =============================================================
def say(*words):
    """print on the main process only, without tearing a progress bar."""
    if rank() == 0 and int(os.environ.get("RANK", 0)) == 0:
        from tqdm import tqdm
        tqdm.write(printable(" ".join(str(w) for w in words)), file=sys.stdout)
        sys.stdout.flush()


say_once = functools.cache(say)  # of the same words


def barrier():
    """Wait for all processes."""
    if world() > 1:
        dist.barrier()


def write_json(path, value):
    """Atomic: to a temporary name, then renamed."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(json.dumps(value, indent=1, default=str), encoding="utf8")
        os.replace(temporary, path)


class Run:
    """The book-keeping of a run: processes, folder, log, checkpoints, evaluation, summary, progress bar.

    It never runs a forward, a loss, a backward or an optimiser step: these stand in the script. In this order:
    Run(...), towers(), prepare(...), batches(...), begin(...), done(...) after each step, finish(...).

    Attributes: step (done so far), total (of the schedules), last (where this run ends), per_epoch, warmup (steps);
    device, folder, args, train, evals, log; tensors (further ones of the checkpoint, by name); val (the latest result).
    """

    def __init__(self, file, args, train, evals, recipes=None):
        self.started, self.script = time.time(), Path(file).stem
        self.args, self.train, self.evals, self.recipes = args, train, evals, recipes or {}
        self.fitted = ""
        self.count_steps()
        self.accelerator = set_up(args)
        self.device = self.accelerator.device
        self.folder, self.lock = start_run(args, self.script)
        with where_there():  # said now, not when a long run is killed
            open_room("tools.checkpoints", "checkpoint, and no --resume")
        self.unreadable, self.twins = {}, ""
        if args.verify_images:
            open_room("tools.check", "--verify-images").verify_run(self)
        if has_tool("check"):
            compare = open_room("tools.check").compare
            self.twins = on_main(compare, self.folder, self.train, self.evals, args.resume)
        self.step, self.wall_before, self.tracker_id, self.positions, self.tensors = 0, 0.0, None, {}, {}
        self.unevaluated, self.bar, self.handlers = False, None, {}

    # ---------------------------------------- set-up ------------------------------------------------------------------
    def count_steps(self):
        """Batch, epoch, steps and warm-up, by the training set as it is now."""
        args = self.args
        self.fitted = fit_batch(args, self.train) or self.fitted
        self.per_epoch = epoch_length(self.train, args.batch_size)
        self.total = self.last = args.max_steps or max(1, round(args.epochs * self.per_epoch))
        self.warmup = min(round(args.warmup_epochs * self.per_epoch), self.total // 10)

    def towers(self, texts=None, questions=None):
        """(TwoTower on the device, tokenizer or None, EvalTransform) that the model flags describe.

        texts: what a tokenizer learns from, in place of the captions; questions: keywords of tools/answers.py's model.
        """
        args, tokenizer = self.args, None
        names = ("image_encoder", "text_encoder", "embed_dim", "image_size", "text_length", "text_pooling",
                 "image_stats", "eval_resize", "eval_crop", "clean_captions")
        self.spec = {k: getattr(args, k) for k in names if hasattr(args, k)}
        if "text_encoder" not in self.spec:  # a script without texts: features alone, its head is its own
            self.spec |= {"text_encoder": "", "embed_dim": 0}
        else:
            texts = texts or (lambda: self.train.first_captions(200_000))
            tokenizer = build_tokenizer(args.text_encoder, args.text_length, texts, self.folder / "tokenizer",
                                        args.clean_captions, keep=bool(args.resume), start=args.init_from)
        if args.image_encoder == "features":
            self.spec["features"] = open_room("sets.video").feature_shape(self.train)
        if args.image_encoder.startswith(VIDEO) and has_clips(self.train):
            self.spec["frames"] = frames_of(self.train)
        if questions:
            self.spec["questions"] = questions
        start = args.pretrained, args.init_from
        if args.resume and open_room("tools.checkpoints", "--resume").latest_checkpoint(self.folder):
            start = False, ""  # its weights are in the checkpoint; stopped before the first one, it begins again
        self.tower, transform = build_model(self.spec, tokenizer, *start)
        self.tower.to(self.device)
        self.tokenizer = tokenizer
        return self.tower, tokenizer, transform

    def prepare(self, trained, own, optimizer, second=None):
        """(model, optimizer) as a step uses them: BatchNorm, compile, DDP; with --resume, what the last checkpoint
        holds.

        Args: trained: the module that DDP wraps.   own: parameters and buffers of the loss, outside DDP.
            second: an optimiser of the loss's own parameters, saved and read back as well, whose step is the script's.
        """
        args, self.second = self.args, second
        if has_batchnorm(trained):
            trained = open_room("tools.towers", "encoders with BatchNorm").batchnorm_policy(trained, args)
        self.trained, self.own = trained, own
        torch.manual_seed(args.seed + rank())  # the weights are the same on all processes; dropout should not be
        model = torch.compile(trained) if args.compile else trained
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if args.resume:
            state = open_room("tools.checkpoints", "--resume").resume(self)
            self.step, self.tracker_id = state.get("step", 0), state.get("tracker_id")
            self.wall_before = state.get("wall_s", 0.0)
            self.unevaluated = state.get("unevaluated", False)  # stopped in the evaluation of that step
        first = self.step in (0, self.last) or self.unevaluated
        self.log = Log(self.folder, self.accelerator, args.tracker, self.tracker_id, vars(args), self.step, first)
        return self.model, self.optimizer

    def batches(self, views, transform):
        """The training batches from here to the last step; views: one Augment for each view."""
        args = self.args
        self.data = Batches(self.train, views, transform, args.batch_size, args.seed, self.step, self.last, self.device,
                            args.workers, args.max_bad_fraction, self.folder, self.positions, args.compile)
        return self.data

    def begin(self, evaluator, guess, lines, after_val=None):
        """Banner, the evaluation before the first step (the left end of every curve), progress bar. Collective.

        Args:
            evaluator: Evaluator or ClassEvaluator.   lines: {word: text}, the script's own lines of the banner.
            guess: the loss of a random guess at the start and at the end of the run.
            after_val: function(row, pieces) that adds to each row of a val evaluation.
        Returns: picture pieces of the val split before training; {} in a resumed run.
        """
        from tqdm import tqdm
        self.evaluator, self.after_val = evaluator, after_val
        self.banner(guess, lines)
        evaluator.check()
        with where_there():
            open_room("tools.checkpoints", "checkpoint, and no --resume").listen(self)
        pieces = self.evaluate_val() if self.step in (0, self.last) or self.unevaluated else {}
        if self.step == 0 and rank() == 0 and self.tokenizer and has_tool("figures"):
            before = {name: figures().similarity_histograms(p) for name, p in pieces.items() if "owner" in p}
            write_json(self.folder / "similarity_before.json", before)
        tqdm.monitor_interval = 0  # no thread for it: one that cannot start, short of memory, is waited for
        self.bar = tqdm(total=self.last, initial=self.step, disable=rank() > 0, dynamic_ncols=True, unit="step",
                        mininterval=1.0, miniters=1)
        self.trained.train()
        self.own.train()
        self.clock, self.logged = time.perf_counter(), self.step
        return pieces if self.step == 0 else {}

    def banner(self, guess, lines):
        """Print what the flags came to, once, before training."""
        args, train, tower = self.args, self.train, self.tower
        recipe = self.recipes.get(args.dataset, self.recipes.get("own", {})).get("recipe", "")
        examples = f"a stream of about {train.examples:,}" if train.streamed else f"{len(train):,}"
        def size(data):  # what is said of the training set is not said again
            return f"{len(data):,} {data.split}" + (f" ({data.note})" if data.note not in ("", train.note) else "")
        sizes = [f"{name}: " + ", ".join(map(size, splits.values())) for name, splits in self.evals.items()]
        towers = [f"{args.image_encoder} {millions(tower.vision):.1f} M"]
        if tower.text:
            towers.append(f"{args.text_encoder} {millions(tower.text):.1f} M")
        published = args.pretrained and args.image_encoder != "small"
        start = "published weights" if published else "weights of --init-from" if args.init_from else "from scratch"
        beside = millions(self.trained) + millions(self.own) - millions(tower)
        local, chunks = args.batch_size // world(), f" in chunks of {args.chunk_size}" if args.chunk_size else ""
        first, end = guess
        words = {
            "recipe": f"{args.dataset} ({recipe})", "data": f"{examples} training examples; {train.note}".rstrip("; "),
            "evaluation": "; ".join(sizes), **({"WARNING": self.twins} if self.twins else {}),
            "model": f"{', '.join(towers)} parameters, {start}" + (f", beside them {beside:.2f} M" if beside else ""),
            "processes": f"{world()} x {torch.get_num_threads()} threads on {self.device}, precision "
                         f"{args.mixed_precision}, {self.data.workers} workers each",
            "batch": f"{args.batch_size} = {world()} x {local}{chunks}; {args.batch_size - 1} negatives per anchor",
            "random guess": f"loss {first:.3f}" + (f" at the start, {end:.3f} at the end" if end != first else ""),
            "steps": f"{self.total:,} ({self.total / self.per_epoch:.1f} epochs of {self.per_epoch:,}); warm-up "
                     f"{self.warmup}; lr {args.lr:g} -> {args.lr_end:g}, {args.lr_schedule}",
            **lines, **({"LOWERED": self.fitted} if self.fitted else {}), "run": self.folder}
        say("\n".join([f"{self.script}.py"] + [f"  {k:<12} {v}" for k, v in words.items()]))

    # ---------------------------------------- in the loop -------------------------------------------------------------
    def set_lr(self, lr):
        """Write the learning rate into the optimiser."""
        self.lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def check_finite(self, loss, tau, embeddings, batch):
        """Stop all processes together, with one message, when the loss is not finite on any of them. Collective."""
        check_finite(loss, self.step, torch.as_tensor(tau).item(), embeddings, batch["keys"])

    def logs_now(self):
        """Is the step in progress one whose numbers are logged?"""
        return bool(self._due(self.step + 1)["log"])

    def _due(self, step):
        """What falls on this optimiser step, counted from 1; 0 = only at the end."""
        every = {"log": self.args.log_every, "eval": self.args.eval_every, "save": self.args.save_every}
        return {k: step == self.last or (n and step % n == 0) for k, n in every.items()}

    def done(self, batch, loss, tau, numbers=None):
        """An optimiser step is done: count it; log, evaluate and save what is due; end here if a signal asked for it.
        Collective.

        Args: loss: () tensor of this process; tau: float; numbers: further columns of the log, where `logs_now`.
        Raises: UserError on all processes when the weights are not finite."""
        self.step += 1
        number = self._check_weights(batch)
        due = self._due(self.step)
        if due["log"]:
            seconds = (time.perf_counter() - self.clock) / (self.step - self.logged)
            means = mean_over_processes({"loss": loss, "data_s": batch["seconds"]}, self.device)
            row = {"step": self.step, "epoch": batch["epoch"], "samples_seen": self.step * self.args.batch_size,
                   "loss": means["loss"], "lr": self.lr, "tau": tau, "step_s": seconds, "data_s": means["data_s"],
                   "samples_per_s": self.args.batch_size / seconds} | (numbers or {})
            self.log.write(row)
            self.clock, self.logged = time.perf_counter(), self.step
            self.bar.set_postfix(loss=f"{row['loss']:.3f}", tau=f"{row.get('tau_pos', tau):.3f}",
                                 samples=f"{row['samples_per_s']:.0f}/s", refresh=False)
        self.bar.update()
        if self.step == self.last:  # the last evaluation in float32, as eval.py does it
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if due["eval"]:
            self.evaluate_val()
        if due["save"]:
            self.save()
        if due["eval"] or due["save"]:
            self.clock, self.logged = time.perf_counter(), self.step  # the speed of training alone
            number = self.asked_to_stop()
        if number and self.step < self.last:
            open_room("tools.checkpoints").stop(self, number, saved=due["save"])

    def _check_weights(self, batch):
        """Every process learns of broken weights, and of a signal, on any of them; returns the signal's number or 0."""
        weights = [p.detach() for m in (self.trained, self.own) for p in m.parameters() if p.is_floating_point()]
        largest = torch.stack(torch._foreach_norm(weights, math.inf)).max()  # ()
        mine = float(not math.isfinite(largest.item())), max(signals, default=0)
        broken, number = all_sum(*mine, device=self.device, op=dist.ReduceOp.MAX)
        if broken:
            raise UserError(f"the weights are not finite after step {self.step} (lr {self.lr:.4g}, keys "
                            f"{batch['keys'][:8]}); try a lower --lr, or --grad-clip 1")
        return int(number)

    def asked_to_stop(self):
        """The number of a signal that came to any of the processes, or 0. Collective."""
        return int(all_sum(max(signals, default=0), device=self.device, op=dist.ReduceOp.MAX)[0])

    def ignore_no_more(self):
        """Signals do again what they did before the run listened to them."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def evaluate(self, split):
        """What the evaluator gives, or the end of the run by a signal. Collective."""
        try:
            return self.evaluator(split)
        except Stopped:
            self.unevaluated = True
            saved = split == "test" or self.bar is None  # before the loop there is nothing new
            return open_room("tools.checkpoints").stop(self, self.asked_to_stop(), saved)

    def evaluate_val(self):
        """Evaluate the val splits, log it, keep it in self.val; returns the picture pieces. Collective."""
        self.val, _, self.val_pieces = self.evaluate("val")
        self.unevaluated = False
        row = {"step": self.step, "samples_seen": self.step * self.args.batch_size, "eval": self.val}
        if self.after_val and self.val_pieces:
            self.after_val(row, self.val_pieces)
        self.log.write(row)
        return self.val_pieces

    def save(self):
        """Write a checkpoint, where tools/checkpoints.py is there. Collective."""
        with where_there():
            open_room("tools.checkpoints", "checkpoint, and no --resume").save(self)

    def wall(self):
        """Seconds of this run so far, those before a resume included."""
        return self.wall_before + time.time() - self.started

    # ---------------------------------------- the end -----------------------------------------------------------------
    def finish(self, draw, table=None, more=None, **extra):
        """Save the encoders, evaluate the test splits on what is on disk, write summary.json, draw, print. Collective.

        Args: draw: function(run) of the pictures.   table: function(title, metrics, chance) -> lines of text.
            more: function(test metrics) -> text after the tables.   extra: further entries of the summary.
        Returns: the summary."""
        from safetensors.torch import load_file
        self.bar.close()
        save = functools.partial(save_model, self.folder, self.tower, self.tokenizer, self.spec)
        together(save if rank() == 0 else None, f"the model in {self.folder}")
        self.tower.load_state_dict(load_file(self.folder / "model.safetensors"))
        test, chance, self.test_pieces = self.evaluate("test")
        self.ignore_no_more()
        summary, problems = self.summarize(test, chance) | extra, []
        if rank() == 0:
            try:
                write_json(self.folder / "summary.json", summary)
            except UserError as error:  # the numbers are printed below all the same
                problems.append(str(error))
            with where_there():
                draw(self)
        say(report(summary, self.folder, table) + (more(test) if more else ""))
        barrier()
        self.accelerator.end_training()  # trackers and the process group are closed
        if self.lock:
            self.lock.close()
        if summary["errors"]:
            what = "; ".join(f"{k}: {v}" for k, v in summary["errors"].items())
            problems.append(f"evaluation failed: {what}; the model and all else are in {self.folder}")
        if problems:
            raise UserError("; ".join(problems))
        return summary

    def picture(self, name, function, *args, **options):
        """Draw one picture into the run folder, function(*args, path, **options), in the form of --figures; one that
        fails is left out, named."""
        picture((self.folder / name).with_suffix(f".{self.args.figures}"), function, *args, **options)

    def summarize(self, test, chance):
        """The content of summary.json. Collective."""
        args, wall = self.args, self.wall()
        memory = gather_objects(peak_memory_mb())
        parameters = sum(p.numel() for m in (self.trained, self.own) for p in m.parameters())
        bad = len(self.data.bad) + sum(map(len, self.unreadable.values()))
        return {"script": self.script, "dataset": args.dataset, "method": args.loss, "seed": args.seed,
                "steps": self.step, "epochs": self.step / self.per_epoch, "wall_s": wall,
                "samples_per_s": self.step * args.batch_size / wall,
                "peak_memory_mb": max(memory), "parameters": parameters, "processes": world(), "batch": args.batch_size,
                "bad_samples": bad, "val": self.val, "test": test, "chance": chance,
                "errors": self.evaluator.errors,
                "commit": open_room("tools.run_folder").commit() if has_tool("run_folder") else "unknown"}


def picture(path, function, *args, **options):
    """Draw one picture, function(*args, path, **options); one that fails is left out, named."""
    try:
        function(*args, path, **options)
    except Exception as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # half a picture says less than none
        say(f"{path.name} cannot be drawn and is left out: {type(error).__name__}: {first_line(error)}")


def millions(module):
    """Parameters of a module, in millions."""
    return sum(p.numel() for p in module.parameters()) / 1e6


def largest_batch(data):
    """The largest global batch that a data set fills and that the processes can share; 0 where there is none."""
    processes = int(os.environ.get("WORLD_SIZE", 1))  # asked before there is a process group
    fits = data.examples // processes * processes
    return fits if fits > 1 else 0


def fit_batch(args, data):
    """With --fit-batch: --batch-size becomes what the data hold, where it is more. Returns: what the banner says."""
    fits = largest_batch(data)
    if not args.fit_batch or not fits or data.examples >= args.batch_size:
        return ""
    words = f"--batch-size {args.batch_size} -> {fits}: the training set has {data.examples} examples"
    args.batch_size = fits
    return words


def epoch_length(data, batch_size):
    """Optimiser steps of one epoch. Raises UserError when the batch is larger than the data."""
    if data.examples < batch_size:
        fits = largest_batch(data)
        hint = f"; --batch-size {fits} fits, and --fit-batch takes it by itself" if fits else "; give more data"
        raise UserError(f"--batch-size {batch_size}: larger than the {data.examples} training examples of "
                        f"{data.name}{hint}")
    return data.examples // batch_size


def mean_over_processes(numbers, device):
    """{name: () tensor or float} of each process -> {name: float}, the mean over processes. Collective."""
    values = [v.item() if torch.is_tensor(v) else v for v in numbers.values()]
    return {k: v / world() for k, v in zip(numbers, all_sum(*values, device=device))}


def report(summary, folder, table=None):
    """The last words of a run: one table per evaluation set, and where everything lies."""
    if summary["test"]:
        table = table or open_room("tools.evaluation").metrics_table
    tables = [table(f"\n{name} (test)", metrics, summary["chance"][name]) for name, metrics in summary["test"].items()]
    errors = [f"left out: {k}: {v}" for k, v in summary["errors"].items()]
    end = (f"{summary['steps']} steps, {summary['wall_s']:.0f} s, {summary['samples_per_s']:.0f} samples/s, "
           f"{summary['peak_memory_mb']:.0f} MiB, {summary['bad_samples']} bad samples")
    return "\n".join([*tables, *errors, "", end, f"run folder: {folder}"])


def read_json(path, default=None):
    """Content of a JSON file, a dict; default where there is none. Raises: UserError where it is damaged."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf8")) if path.is_file() else default
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({first_line(error)})") from error
    if not isinstance(content, (dict, type(default))):
        raise UserError(f"{path}: damaged (it holds no names and values)")
    return content


def slug(name):
    """A data set's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(name)).strip("-")


def start_run(args, script):
    """(path of the run folder, its lock): made or reopened by the main process; all processes raise together."""
    locks = []  # an open file stays in its process
    def open_it():
        try:
            folder, lock = _open_folder(args, script)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"--output-dir {args.output_dir}: cannot be written ({reason})") from error
        locks.append(lock)
        return folder
    folder = on_main(open_it)
    if world() > 1 and has_tool("run_folder"):
        flag = f"--resume {folder}" if args.resume else f"--output-dir {args.output_dir}"
        open_room("tools.run_folder").seen_by_all(folder, flag)
    return folder, next(iter(locks), None)


def _open_folder(args, script):
    if args.run_name and Path(args.run_name).name != args.run_name:
        raise UserError(f"--run-name {args.run_name}: a name, not a path; --output-dir is the folder of all runs")
    folder = Path(args.resume) if args.resume else _new_folder(args, script)
    lock = None
    with where_there():
        held = open_room("tools.run_folder", "lock and no versions.txt")
        lock = held.lock_folder(folder, "--resume" if args.resume else "--run-name")
        if not args.resume:
            (folder / "versions.txt").write_text(held.versions(), encoding="utf8")
    (folder / "checkpoints").mkdir(exist_ok=True)
    if not args.resume:
        write_json(folder / "args.json", {"script": script} | vars(args))
    with open(folder / "command.txt", "a", encoding="utf8") as f:
        words = [Path(sys.executable).name, *sys.argv]
        f.write(" ".join(words) + f"   # {os.environ.get('WORLD_SIZE', 1)} processes\n")
    return folder, lock


def _new_folder(args, script):
    """The folder of a new run. An automatic name gets a number where it is taken; a folder with a --run-name in
    which nothing was trained yet is taken over."""
    name = args.run_name or f"{script}__{slug(args.dataset)}__s{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = Path(args.output_dir) / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        if args.run_name and folder.is_dir() and not (folder / "metrics.jsonl").exists():
            return folder
        if args.run_name:
            raise UserError(f"--run-name {name}: {folder} holds a run already; choose another name, or --resume "
                            f"{folder}")


def together(work, what):
    """Do this process's part of writing `what`; all processes raise together when it fails on any of them."""
    error = None
    try:
        if work:
            with writing(what):
                work()
    except UserError as failure:
        error = f"{what} cannot be written: {getattr(failure, 'reason', failure)}; what was saved before is whole"
    errors = [e for e in gather_objects(error) if e]
    if errors:
        raise UserError(errors[0])


def write_tensors(path, tensors):
    """A safetensors file of {name: tensor}, with the user's usual permissions."""
    from safetensors.torch import save_file
    with writing(path):
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, path)
        usual = os.umask(0)
        os.umask(usual)
        os.chmod(path, 0o666 & ~usual)  # the library writes 0600, which colleagues cannot read


def checksum(path):
    """SHA-256 of a file's content, as text."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_model(folder, model, tokenizer, spec):
    """The encoders alone: model.safetensors, model.json (with its checksum), tokenizer/. Main process only; reads back
    with load_model."""
    weights = Path(folder) / "model.safetensors"
    write_tensors(weights, model.state_dict())
    write_json(Path(folder) / "model.json", spec | {"sha256": checksum(weights)})
    if tokenizer:
        with writing(Path(folder) / "tokenizer"):
            tokenizer.save(Path(folder) / "tokenizer")


class Log:
    """metrics.jsonl (always), a tracker when asked for, and the numbers so far for the pictures.

    The main process alone writes."""

    def __init__(self, folder, accelerator, tracker, tracker_id=None, config=None, first_step=0, again=False):
        self.path, self.accelerator, self.tracker, self.rows = Path(folder) / "metrics.jsonl", accelerator, tracker, []
        self.tracker_id = tracker_id
        if self.path.exists():  # a resumed run drops what its checkpoint had not seen
            self.rows = open_room("tools.checkpoints", "--resume").kept_rows(self.path, first_step, again)
        if tracker:
            opened = open_room("tools.tracker", "--tracker").open_tracker
            self.tracker_id = opened(tracker, Path(folder), accelerator, tracker_id, config or {})

    def write(self, row):
        """row: dict of numbers with `step`; nested dicts (evaluation) are kept as they are in the file."""
        self.rows.append(row)
        if rank() == 0:
            with writing(self.path), open(self.path, "a", encoding="utf8") as f:
                f.write(json.dumps(row) + "\n")
        if self.tracker:
            numbers = {k: v for k, v in flatten(row).items() if isinstance(v, (int, float))}
            self.accelerator.log(numbers, step=row["step"])

    def column(self, name, x="step"):
        """(steps, values) of a logged number; nested names join with '/'."""
        pairs = [(r[x], v) for r in self.rows for v in [flatten(r).get(name)] if v is not None]
        return [p[0] for p in pairs], [p[1] for p in pairs]


def flatten(d, prefix=""):
    """{'a': {'b': 1}} -> {'a/b': 1}."""
    out = {}
    for k, v in d.items():
        out.update(flatten(v, f"{prefix}{k}/") if isinstance(v, dict) else {f"{prefix}{k}": v})
    return out


def peak_memory_mb():
    """Peak memory of this process: of the GPU where it uses one, else resident; 0 where it is not known (Windows)."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
