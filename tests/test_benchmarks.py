"""Commits that records name; rows of speed.py and gpu.py; what recipes.py counts."""

import math
import subprocess
import sys
from types import SimpleNamespace

from contrastive import engine
from contrastive.core.files import flatten

import pytest
import torch

from benchmarks import gpu, recipes, speed
from helpers import write_files


def commit_all(folder):
    """Makes the folder a git repository with one commit."""
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)


def test_results_are_no_changes_of_the_code(tmp_path, monkeypatch):
    """Tables are rewritten while runs are made: their records must still name a clean commit."""
    files = ("benchmarks/results/runs.parquet", "temo.py", "contrastive/engine/log.py")
    commit_all(write_files(tmp_path, dict.fromkeys(files, "before")))
    monkeypatch.setattr(engine.log, "__file__", str(tmp_path / files[2]))
    for changed, script, dirty in (
        ("benchmarks/results/runs.parquet", "temo.py", False),
        ("mine.py", "temo.py", False),
        ("mine.py", "mine.py", True),
        ("temo.py", "temo.py", True),
    ):
        (tmp_path / changed).write_text("after")  # git does not know the fork mine.py
        monkeypatch.setattr(sys, "argv", [str(tmp_path / script)])
        assert engine.log.commit().endswith("+changes") == dirty


def test_a_fork_outside_the_checkout_has_no_clean_commit(tmp_path, monkeypatch):
    write_files(tmp_path, {"ours/contrastive/engine/log.py": "", "mine.py": ""})
    commit_all(tmp_path / "ours")
    file = tmp_path / "ours" / "contrastive" / "engine" / "log.py"
    monkeypatch.setattr(engine.log, "__file__", str(file))
    for program, dirty in (("mine.py", True), ("pytest", False)):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / program)])
        assert engine.log.commit().endswith("+changes") == dirty


# ------------------------------------------------------- speed, memory, a GPU --------------------
ROWS = {
    "jpeg": lambda: speed.jpeg(1, 8),
    "cc3m_views": lambda: speed.cc3m_views(1, 8, 4),
    "decode_clips": lambda: speed.decode_clips(1, 1),
    **{name: gpu.ROWS[name].function for name in ("views", "step", "loss", "mama", "memory")},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs_at_toy_size(name):
    """So that it also runs where nobody watches it."""
    numbers = [x for x in flatten(ROWS[name]()).values() if not isinstance(x, str)]
    assert numbers and all(math.isfinite(x) and x > 0 for x in numbers)


def test_the_idle_part_of_a_gpu():
    kind = torch.autograd.DeviceType.CUDA if gpu.HAS_GPU else torch.autograd.DeviceType.CPU
    spans = [(0, 4), (1, 2), (6, 8), (7, 10)]  # one inside another, a gap, an overlap
    events = [
        SimpleNamespace(
            time_range=SimpleNamespace(start=a, end=b), device_type=kind, is_user_annotation=False
        )
        for a, b in spans
    ]
    assert gpu.idle_part(SimpleNamespace(events=lambda: events)) == pytest.approx(0.2)


def test_what_a_step_keeps_and_computes_is_counted_without_a_gpu():
    class Toy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())

        def forward(self, x):
            y = self.layers(x)[:, None]  # (n, 1, L = 10, 8), one head
            return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    kept, flops, largest = recipes.forward_cost(Toy(), lambda: {"x": torch.zeros(3, 10, 4)}, "no")
    # of 10, padded to 32
    x, y, out, log_sum = (4 * n for n in (3 * 10 * 4, 3 * 10 * 8, 3 * 10 * 8, 3 * 32))
    assert largest in (x, y)
    assert x + y + out <= kept <= x + y + out + log_sum + 16  # two random states
    assert flops == 2 * 3 * 10 * 4 * 8 + 2 * 2 * 3 * 10 * 10 * 8
    cost = recipes.forward_cost(Toy().layers, lambda: {"input": torch.zeros(3, 10, 4)}, "bf16")
    assert cost.kept_bytes == 2 * (3 * 10 * 4 + 3 * 10 * 8)


def test_a_recipe_needs_less_in_chunks_and_with_layers_that_run_again():
    line = (
        "temo.py --dataset moving-emoji --frames 2 --image-size 32 --batch-size 64 "
        "--image-encoder test_vit"
    )
    whole, chunks, again = (
        recipes.estimate(f"{line} {more}", 1)
        for more in ("", "--chunk-size 16", "--grad-checkpointing")
    )
    assert math.isclose(whole["GB kept"], 4 * chunks["GB kept"], rel_tol=0.01)
    assert again["GB kept"] < 0.8 * whole["GB kept"]
    assert whole["GB"] > recipes.estimate(line, 8)["GB"]
    assert chunks["GFLOP of a sample"] == again["GFLOP of a sample"] > whole["GFLOP of a sample"]
