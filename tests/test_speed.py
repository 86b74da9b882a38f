"""Rows of benchmarks/speed.py at toy size, on the CPU."""

import functools
import math

import pytest
import torch

import mama
import temo
from benchmarks import speed

ROWS = {
    "jpeg": lambda: speed.jpeg(1, 8),
    "cc3m_views": lambda: speed.cc3m_views(1, 8, 4),
    "decode_clips": lambda: speed.decode_clips(1, 1),
    "views": lambda: speed.views(1),
    "steps": lambda: speed.steps(1),
    "mama_step": lambda: speed.mama_step(1),
    "loss memory": lambda: {"temo": speed.peak_mib("temo", speed.make_losses, 2048)},
    "waits": lambda: speed.watch_run(mama, *RUN, "--meta-size", 8, "--meta-batch-size", 4),
    "bf16": lambda: speed.bf16_difference(temo, *RUN),
}
RUN = (
    "--cpu --dataset moving-emoji --clips 48 16 16 --image-size 16 --frames 2 --batch-size 16 "
    "--workers 0"
).split()
NO_GPU = {"waits_a_step", "fp32 again"}  # 0 on a CPU


@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs_at_toy_size(name, monkeypatch):
    toy = speed.Sizes("vit_tiny_patch16_224", 32, 8, 16, 8, 64)
    monkeypatch.setattr(speed, "SIZES", toy)
    monkeypatch.setattr(speed, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(speed, "HAS_GPU", False)
    # inductor's C++ takes minutes to compile, and leaves processes behind
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    results = ROWS[name]()
    numbers = {key: x for key, x in results.items() if key not in NO_GPU}
    assert numbers and all(math.isfinite(x) and x > 0 for x in numbers.values()), results
