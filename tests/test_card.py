"""What only a card would show, by stand-ins on the CPU: compiled encoders in half precision."""

import functools
import math
import os

from engine.base import read_json

import pytest
import torch

import launch
import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import losses, run_script

SCRIPTS = {temo: [], ts: [], ncl: [], mmts: ["--num-clusters", 2],
           mama: ["--meta-size", 4, "--meta-batch-size", 2]}
TOY = ["--dataset", "moving-emoji", "--clips", 12, 6, 6, "--image-size", 16, "--frames", 2, "--batch-size", 6,
       "--max-steps", 2, "--log-every", 1, "--save-every", 0, "--cpu", "--threads", 1]
HALF = ["--compile", "--mixed-precision", "bf16"]


@pytest.fixture
def quick_compiler(monkeypatch):
    """torch.compile traces, without inductor, whose C++ takes minutes to compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def numbers(x):
    """The leaves of nested dicts that are numbers."""
    leaves = (numbers(v) if isinstance(v, dict) else [v] for v in x.values())
    return [v for part in leaves for v in part if isinstance(v, (int, float))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_compiled_in_half_precision_ends_with_its_numbers(script, tmp_path, quick_compiler):
    summary = run_script(script, tmp_path / "run", *TOY, *SCRIPTS[script], *HALF)
    assert not summary["errors"] and numbers(summary["val"]) and all(map(math.isfinite, numbers(summary["test"])))


def compiled_rank(rank, port, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.compile = functools.partial(torch.compile, backend="eager")
    run_script(temo, folder, *TOY, *HALF)


def test_compiled_in_half_precision_on_two_processes(tmp_path):
    launch.spawn(compiled_rank, (launch.free_port(), tmp_path / "run"), 2)
    summary = read_json(tmp_path / "run" / "summary.json")
    assert not summary["errors"] and len(losses(tmp_path / "run")) == 2
