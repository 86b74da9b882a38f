"""Commits that records name."""

import subprocess
import sys

from contrastive import engine

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
