"""Runs that meet another run, a signal, a damaged checkpoint, a full disk: nothing is lost, nothing mixed up."""

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import common

import pytest
import runs
from helpers import write_captions
from safetensors.torch import load_file

import temo

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--cpu", "--threads", "1", "--workers", "0", "--image-size", "16", "--embed-dim", "16", "--batch-size", "16",
        "--loss", "infonce", "--log-every", "1", "--save-every", "2"]
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_captions(tmp_path_factory.mktemp("data"), 80)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A finished run of eight steps, without pictures."""
    out = tmp_path_factory.mktemp("whole")
    run(data, out, "--run-name", "whole")
    return out / "whole"


def run(data, out, *flags):
    draw, temo.draw = temo.draw, lambda *_: None
    try:
        flags = [*TINY, "--max-steps", "8", "--dataset", str(data), "--output-dir", str(out), *flags]
        return temo.main(temo.parse_args(flags))
    finally:
        temo.draw = draw


def resume(folder):
    draw, temo.draw = temo.draw, lambda *_: None
    try:
        return temo.main(temo.parse_args(["--resume", str(folder)]))
    finally:
        temo.draw = draw


def same(a, b):
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a)


def in_child(work, *args):
    """Start work(pipe, *args) in a forked process; returns (process, our end of the pipe)."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=work, args=(theirs, *args))
    process.start()
    return process, ours


# ----------------------------------------------- folders -------------------------------------------------------------
def make_folder(pipe, out, name, begin):
    flags = Namespace(output_dir=str(out), run_name=name, dataset="a", seed=1, resume="")
    time.sleep(max(0, begin - time.time()))  # all at once
    try:
        folder = common._new_folder(flags, "temo")
        _ = common.lock_folder(folder, "--run-name")  # held until the test says so
        pipe.send(str(folder))
    except common.UserError as error:
        pipe.send(error)
    pipe.recv()


@pytest.mark.parametrize("name", ["", "mine"])
def test_runs_started_at_once_never_share_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr(common.time, "strftime", lambda _: "20260101-000000")  # the same second
    for turn in range(10):
        out, begin = tmp_path / str(turn), time.time() + 0.05
        children = [in_child(make_folder, out, name, begin) for _ in range(4)]
        answers = [pipe.recv() for _, pipe in children]
        for process, pipe in children:
            pipe.send("done")
            process.join(20)
        made = [a for a in answers if isinstance(a, str)]
        assert len(made) == len(set(made)) == (1 if name else 4), answers
        refused = [str(a) for a in answers if not isinstance(a, str)]
        assert all(re.search("a run is in progress there .host .*, process [0-9]+", r) for r in refused), refused


def hold(pipe, folder):
    lock = common.lock_folder(folder, "--resume")
    pipe.send(os.getpid())
    pipe.recv()
    lock.close()


def test_a_running_run_is_not_resumed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    process, pipe = in_child(hold, tmp_path / "a")
    owner = pipe.recv()
    with pytest.raises(common.UserError, match=rf"/a: a run is in progress there \(host .*, process {owner}\)"):
        resume(tmp_path / "a")
    os.kill(process.pid, signal.SIGKILL)  # the lock dies with its process
    process.join(20)
    assert resume(tmp_path / "a")["steps"] == 8


def test_a_failed_start_does_not_take_the_name(data, tmp_path):
    with pytest.raises(common.UserError, match="--text-encoder no/such"):
        run(data, tmp_path, "--run-name", "again", "--text-encoder", "no/such")
    assert run(data, tmp_path, "--run-name", "again")["steps"] == 8
    with pytest.raises(common.UserError, match="holds a run already"):
        run(data, tmp_path, "--run-name", "again")


@pytest.mark.parametrize("name", ["../out", "a/b", "/etc/x"])
def test_a_run_name_is_no_path(name, data, tmp_path):
    with pytest.raises(common.UserError, match="a name, not a path"):
        run(data, tmp_path / "runs", "--run-name", name)
    assert not (tmp_path / "out").exists()


def test_files_of_a_run_obey_the_umask(data, tmp_path):
    before = os.umask(0o022)
    try:
        run(data, tmp_path, "--run-name", "a")
    finally:
        os.umask(before)
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert len(files) > 15 and {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o644}


# ----------------------------------------------- checkpoints ---------------------------------------------------------
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "rng_0.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(file, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "a")
    path = tmp_path / "a" / "checkpoints" / "step_8" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    path.write_bytes(content)
    resume(tmp_path / "a")
    said = capsys.readouterr().out
    assert f"step_8: damaged: {file}; the checkpoint before it is taken" in said
    assert re.search("resumed .*step_6 at step 6 of 8", said)
    assert same(tmp_path / "a", whole)
    assert not common.damaged_files(common.latest_checkpoint(tmp_path / "a"))


def test_without_a_whole_checkpoint_nothing_is_resumed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    for step in (6, 8):
        (tmp_path / "a" / "checkpoints" / f"step_{step}" / "model.safetensors").unlink()
    with pytest.raises(common.UserError, match="no checkpoint is whole; damaged: step_6: model.safetensors"):
        resume(tmp_path / "a")


# ----------------------------------------------- signals and full disks ----------------------------------------------
def start(flags, log, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen([sys.executable, str(ROOT / "temo.py"), *flags], stdout=log, stderr=subprocess.STDOUT,
                            env=environment, **options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_a_checkpoint(number, data, tmp_path):
    flags = [*TINY, "--save-every", "0", "--max-steps", "100000", "--dataset", str(data), "--output-dir", str(tmp_path)]
    process, metrics = runs.start("temo", [*flags, "--run-name", "a"], tmp_path / "log"), tmp_path / "a/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < 3:
        assert process.is_alive(), (tmp_path / "log").read_text()[-2000:]
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    text = (tmp_path / "log").read_text()
    steps = int(re.search(rf"stopped after step (\d+) by {number.name}; to go on: temo.py --resume (\S+)", text)[1])
    assert common.latest_checkpoint(tmp_path / "a").name == f"step_{steps}" and "Traceback" not in text
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, steps + 1))


def test_a_signal_and_a_resume_change_nothing(data, whole, tmp_path, monkeypatch):
    """The step ends, the checkpoint is written, and the rest of the run is the same to the bit."""
    finish = common.Run.set_lr

    def interrupt(self, lr):
        finish(self, lr)
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(common.Run, "set_lr", interrupt)
    with pytest.raises(SystemExit) as end:
        run(data, tmp_path, "--run-name", "a")
    assert end.value.code == 143 and common.latest_checkpoint(tmp_path / "a").name == "step_5"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a second one would have stopped at once
    monkeypatch.setattr(common.Run, "set_lr", finish)
    resume(tmp_path / "a")
    assert same(tmp_path / "a", whole)


def test_weights_that_explode_stop_the_run_at_once(data, tmp_path):
    with pytest.raises(common.UserError, match=r"the weights are not finite after step 1 \(lr 1e\+38"):
        run(data, tmp_path, "--lr", "1e38", "--lr-end", "1e38", "--optimizer", "sgd", "--max-steps", "1",
            "--tau", "1e-9", "--warmup-epochs", "0", "--grad-clip", "0")
    assert not list(tmp_path.glob("*/model.safetensors"))


def test_a_full_disk_is_one_line(data, tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
    with open(tmp_path / "log", "w") as log:
        flags = [*TINY, "--max-steps", "4", "--dataset", str(data), "--output-dir", str(tmp_path), "--run-name", "a"]
        process = start(flags, log, preexec_fn=small_files)
        assert process.wait(120) == 2
    text = (tmp_path / "log").read_text()
    assert re.search(r"error: the checkpoint .*step_2 cannot be written: .*File too large", text)
    assert "Traceback" not in text and text.count("error: the checkpoint") == 1
