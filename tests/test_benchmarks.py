"""Commits that records name."""

import subprocess
import sys

from contrastive import engine

import pytest

from helpers import write_files

RESULTS = "ours/benchmarks/results/runs.parquet"
LOG = "ours/contrastive/engine/log.py"


@pytest.mark.parametrize("changed, script, is_dirty", [
    (RESULTS, "ours/temo.py", False),
    ("ours/mine.py", "ours/temo.py", False),
    ("ours/mine.py", "ours/mine.py", True),
    ("ours/temo.py", "ours/temo.py", True),
    ("mine.py", "mine.py", True),
    ("mine.py", "pytest", False),
])
def test_a_commit_is_clean_if_it_has_all_the_code_that_ran(
        changed, script, is_dirty, tmp_path, monkeypatch):
    """Tables are rewritten while runs are made. Git knows no fork, inside or beside ours."""
    write_files(tmp_path, dict.fromkeys((RESULTS, LOG, "ours/temo.py"), "before"))
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path / "ours", check=True)
    (tmp_path / changed).write_text("after")
    monkeypatch.setattr(engine.log, "__file__", str(tmp_path / LOG))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / script)])
    assert engine.log.commit().endswith("+changes") == is_dirty
