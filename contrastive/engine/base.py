"""Errors that a user can mend, printing, files, and work with several processes: every other file imports this one."""

import atexit
import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


# ====================================================== errors ======================================================
class UserError(ValueError):
    """Something the user can mend: one line that says what, where and what to do. Exit code 2 at the entry point."""


class Stopped(Exception):
    """A signal asks the run to end in the middle of an evaluation: raised by all processes together."""


signals = []  # received signals that ask this run to end; the next step or evaluation acts on them


def first_line(error):
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")


def printable(text):
    """Text with ? for each control character (it could move a terminal's cursor, change colours or reverse the writing;
    a file's name may hold it) and for each character that is not valid."""
    return re.sub(r"[^\n\t -~\u00a0-\ud7ff\ue000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]", "?", str(text))


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextlib.contextmanager
def writing(path):
    """Around whatever writes a file or folder: a disk that is full, gone or read-only is a UserError with its path."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries in Rust raise other types, with the same words
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        reason = re.sub(r"^.*I/O error: | [(]os error [0-9]+[)]$", "", first_line(error))
        reason = getattr(error, "strerror", None) or reason
        refusal = UserError(f"{path} cannot be written: {reason}; what was saved before is whole")
        refusal.reason = reason
        raise refusal from error


def plain_words(error):
    """One line for an error that a user can mend; "" for a bug of ours, whose traceback is shown."""
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
    if lost_another(error):
        reason = re.sub(r"^\[.*?\] ", "", text).split(". ")[0]  # without its line of source
        return (f"another of the {world()} processes ended or hangs ({reason}); its own message says why; --resume "
                "continues from the last checkpoint")
    return ""


def lost_another(error):
    """Whether the error says that another process ended or hangs, so that no exchange can follow."""
    return isinstance(error, RuntimeError) and world() > 1 and re.search("gloo|NCCL", first_line(error))


def worker_died(error):
    """What a user can do about a dead DataLoader worker. The DataLoader may raise this error during any call."""
    if re.search("(?i)bus error|shared memory|shm", f"{error} {error.__cause__}"):
        return ("a loader worker died: shared memory (/dev/shm) is full; in Docker start the container with --shm-size "
                "8g or --ipc=host, or try fewer --workers")
    return (f"a loader worker died or hangs ({first_line(error)}); perhaps memory is short: try fewer --workers, or 0 "
            "to see its own error")


def end_with_parent(number):
    """From now on this process gets the signal when its parent ends, for whatever reason (Linux)."""
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


def over_nccl():
    """Whether there is a process group that communicates over NCCL."""
    return dist.is_initialized() and "nccl" in dist.get_backend()


def leave_processes(code=0, alone=False):
    """Ends one of several processes here, before the end of the interpreter: gloo's threads, which can outlive their
    group, sometimes abort it there (exit code -6). Does nothing in a process that is the only one.

    code: its exit code.   alone: whether it fails, perhaps without the others. It then does not close NCCL, which would
    first finish what is in flight, where the others wait for it for up to half an hour. The launcher ends them."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        return
    if not (alone and over_nccl()):
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()  # loaders' workers end, trackers close, temporary folders go
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say_error(words):
    """Prints one line on stderr: of the main process, or of one that failed alone."""
    place = os.environ.get("RANK", "0")
    if place != "0":
        time.sleep(2)  # a launcher ends the others when one exits: if the main process fails too, it prints
    from tqdm import tqdm
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # the error is the last line, and not at the end of a progress bar
    print(f"error{f' (process {place})' * (place != '0')}: {printable(words)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def clean_exit():
    """Entry point: a UserError becomes one line from the main process and exit code 2; one of several processes ends
    here."""
    if os.environ.keys() & {"TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"}:
        end_with_parent(signal.SIGTERM)  # `accelerate launch` of one process passes on no signal
    try:
        yield
    except Exception as error:
        words = plain_words(error)
        if not words:
            if over_nccl():
                sys.excepthook(*sys.exc_info())
                leave_processes(1, alone=True)
            raise
        say_error(words)
        sys.unraisablehook = lambda _: None  # ignore errors while the process ends (a loader's __del__)
        if hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a loader's handler: workers may end now
        leave_processes(2, alone=True)
        sys.exit(2)
    except SystemExit as end:  # a signal, after its checkpoint; a word on the command line
        if not isinstance(end.code, str):  # Python prints a text
            leave_processes(end.code or 0)
        raise
    except KeyboardInterrupt:  # before the loop, or a second one
        print("stopped", file=sys.stderr, flush=True)
        leave_processes(128 + signal.SIGINT, alone=True)
        sys.exit(128 + signal.SIGINT)
    leave_processes()


def hub_reason(error):
    """What a failed download or load says, in one line, with a hint if there may be no access to the hub."""
    text, whole = first_line(error).rstrip(": "), " ".join(str(error).split())
    text = whole if f"{text}: " in whole else text                         # "Couldn't do one of:", and then a list
    offline = isinstance(error, OSError) or any(word in text for word in ("onnect", "offline", "resolve"))
    hint = " (no access to the hub? download it once and give the folder, or --no-pretrained for a timm model's name)"
    return text[:300] + (hint if offline else "")


def with_place(error):
    """The first line of an error and, unless it is one of ours, where in our files (or a fork's) it happened."""
    theirs = type(error).__module__ in ("builtins", "torch")
    ours = [f for f in traceback.extract_tb(error.__traceback__) if theirs and "site-packages" not in f.filename]
    return first_line(error) + (f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else "")


def own_words(error):
    """Type and first line of an error; for one from a loader worker, the last line of the traceback that it holds."""
    lines = str(error).strip().splitlines()
    if len(lines) > 2 and "DataLoader worker" in lines[0]:
        return re.sub(r"^[\w.]*UserError: ", "", lines[-1])
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + first_line(error)


# ====================================================== words =======================================================
def say(*words):
    """print, on the main process only, above any progress bar."""
    if rank() == 0 and int(os.environ.get("RANK", 0)) == 0:
        from tqdm import tqdm
        tqdm.write(printable(" ".join(str(w) for w in words)), file=sys.stdout)
        sys.stdout.flush()


say_once = functools.cache(say)  # the same words once


@contextlib.contextmanager
def stderr_to(file):
    """Inside, all that is written to stderr, also by C and C++ libraries, goes to this open file."""
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def join_notes(*notes):
    """The notes that are not empty, in one line."""
    return "; ".join(n for n in notes if n)


def slug(name):
    """A data set's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(name)).strip("-")


def flatten(d, prefix=""):
    """{'a': {'b': 1}} -> {'a/b': 1}."""
    out = {}
    for k, v in d.items():
        out.update(flatten(v, f"{prefix}{k}/") if isinstance(v, dict) else {f"{prefix}{k}": v})
    return out


# ====================================================== files =======================================================
def read_json(path, default=None):
    """Content of a JSON file, a dict; default if there is no file. Raises: UserError if it is damaged."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else default
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({first_line(error)}); is it whole?") from error
    if not isinstance(content, (dict, type(default))):
        raise UserError(f"{path}: damaged (it holds no names and values); is it the right file?")
    return content


def plain(value):
    """What JSON holds for a value that it does not know: the numbers of tensors and arrays, the text of all else."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_json(path, value):
    """Writes a JSON file atomically: under a temporary name, then renamed."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(json.dumps(value, indent=1, default=plain), encoding="utf8")
        os.replace(temporary, path)


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


# ==================================================== processes =====================================================
def world():
    """Number of processes W (1 when not distributed)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank():
    """Index of this process, 0..W-1."""
    return dist.get_rank() if world() > 1 else 0


def barrier():
    """Wait for all processes."""
    if world() > 1:
        dist.barrier()


def all_sum(*values, device="cpu", op=dist.ReduceOp.SUM):
    """Sum (or with op another reduction) of each plain number over processes; returns a list of floats."""
    if world() == 1:
        return [float(value) for value in values]  # without a copy to the card
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, op=op)
    return total.tolist()


def to_device(x, device):
    """Copies a tensor to the device; from a CPU to a card from pinned memory, so that the host does not wait."""
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return x.pin_memory().to(device, non_blocking=True) if pinned else x.to(device)


def on_card(device, *tensors):
    """Embeddings for large products: on the device if it is a CUDA card; unchanged on others, or if it is None."""
    return [x.to(device) for x in tensors] if device is not None and device.type == "cuda" else tensors


def gather_objects(value):
    """List of every process's picklable value, by rank (small things, which over NCCL pass through the card)."""
    if world() == 1:
        return [value]
    values = [None] * world()
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


def main_writes(what, write):
    """Runs write() on the main process; if it fails, all processes raise together and name `what`. Collective."""
    def work():
        try:
            with writing(what):
                write()
        except UserError as failure:  # of one of the files
            reason = getattr(failure, "reason", failure)
            raise UserError(f"{what} cannot be written: {reason}; what was saved before is whole") from failure
    on_main(work)
