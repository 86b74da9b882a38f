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

from contrastive import engine
from contrastive.engine.base import UserError

import psutil
import pytest
from safetensors.torch import load_file

import launch
import temo
from helpers import write_captions

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--cpu", "--threads", "1", "--workers", "0", "--image-size", "16", "--embed-dim", "16", "--batch-size", "16",
        "--loss", "infonce", "--log-every", "1", "--save-every", "2"]
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_captions(tmp_path_factory.mktemp("data"), 80)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A finished run of eight steps."""
    out = tmp_path_factory.mktemp("whole")
    run(data, out, "--run-name", "whole")
    return out / "whole"


def run(data, out, *flags):
    flags = [*TINY, "--max-steps", "8", "--dataset", str(data), "--output-dir", str(out), *flags]
    return temo.main(temo.parse_args(flags))


def resume(folder):
    return temo.main(temo.parse_args(["--resume", str(folder)]))


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
        folder = engine.folder._new_folder(flags, "temo")
        _ = engine.folder.lock_folder(folder, "--run-name")  # held until the test says so
        pipe.send(str(folder))
    except UserError as error:
        pipe.send(error)
    pipe.recv()


@pytest.mark.parametrize("name", ["", "mine"])
def test_runs_started_at_once_never_share_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr(engine.folder.time, "strftime", lambda _: "20260101-000000")  # the same second
    for turn in range(5):
        out, begin = tmp_path / str(turn), time.time() + 0.05
        children = [in_child(make_folder, out, name, begin) for _ in range(4)]
        answers = [pipe.recv() for _, pipe in children]
        for process, pipe in children:
            pipe.send("done")
            process.join(300)
        made = [a for a in answers if isinstance(a, str)]
        assert len(made) == len(set(made)) == (1 if name else 4), answers
        refused = [str(a) for a in answers if not isinstance(a, str)]
        assert all(re.search("a run is in progress there .host .*, process [0-9]+", r) for r in refused), refused


def hold(pipe, folder):
    lock = engine.folder.lock_folder(folder, "--resume")
    pipe.send(os.getpid())
    pipe.recv()
    lock.close()


def test_a_running_run_is_not_resumed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    process, pipe = in_child(hold, tmp_path / "a")
    owner = pipe.recv()
    with pytest.raises(UserError, match=rf"/a: a run is in progress there \(host .*, process {owner}\)"):
        resume(tmp_path / "a")
    os.kill(process.pid, signal.SIGKILL)  # the lock dies with its process
    process.join(300)
    assert resume(tmp_path / "a")["steps"] == 8


def test_a_failed_start_does_not_take_the_name(data, tmp_path):
    with pytest.raises(UserError, match="--text-encoder no/such"):
        run(data, tmp_path, "--run-name", "again", "--text-encoder", "no/such")
    assert run(data, tmp_path, "--run-name", "again", "--max-steps", "1")["steps"] == 1


@pytest.mark.parametrize("name", ["../out", "a/b", "/etc/x"])
def test_a_run_name_is_no_path(name, data, tmp_path):
    with pytest.raises(UserError, match="a name, not a path"):
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
@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(file, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "a")
    path = tmp_path / "a" / "checkpoints" / "step_8" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    path.write_bytes(content)
    resume(tmp_path / "a")
    said = capsys.readouterr().out
    assert f"step_8: damaged: {file}; the checkpoint before it is used" in said
    assert re.search("resumed .*step_6 at step 6 of 8", said)
    assert same(tmp_path / "a", whole)
    assert not engine.checkpoints.damaged_files(engine.checkpoints.latest_checkpoint(tmp_path / "a"))


def test_without_a_whole_checkpoint_nothing_is_resumed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    for step in (6, 8):
        (tmp_path / "a" / "checkpoints" / f"step_{step}" / "state.safetensors").unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged; step_6: state.safetensors"):
        resume(tmp_path / "a")


# ----------------------------------------------- signals and full disks ----------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_a_checkpoint(number, data, tmp_path):
    flags = [*TINY, "--save-every", "0", "--max-steps", "100000", "--dataset", str(data), "--output-dir", str(tmp_path)]
    process, metrics = launch.start("temo", [*flags, "--run-name", "a"], tmp_path / "log"), tmp_path / "a/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < 3:
        assert process.is_alive(), (tmp_path / "log").read_text()[-2000:]
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(300)
    assert process.exitcode == 128 + number
    text = (tmp_path / "log").read_text()
    steps = int(re.search(rf"stopped after step (\d+) by {number.name}; to go on: \S*python\S* temo.py --resume "
                          rf"{tmp_path}/a\n", text)[1])
    assert engine.checkpoints.latest_checkpoint(tmp_path / "a").name == f"step_{steps}" and "Traceback" not in text
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, steps + 1))


SLOW = """import os, time
import temo
from contrastive.engine import base, checkpoints, run
from contrastive.evaluation import embed

def slow(owner, name, seconds):
    inner = getattr(owner, name)
    def outer(*args):
        time.sleep(seconds)
        return inner(*args)
    setattr(owner, name, outer)

slow(*{"step": (run.Run, "set_lr", 0.3), "evaluation": (embed, "read_batch", 0.4),
       "checkpoint": (checkpoints, "_digest", 0.5)}[os.environ["SLOW"]])
temo.draw = lambda *_: None
main, parse_args = temo.main, temo.parse_args
if __name__ == "__main__":
    with base.clean_exit():
        main(parse_args())
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """temo.py with one slow place, which a signal then meets."""
    path = tmp_path_factory.mktemp("slow") / "slow.py"
    path.write_text(SLOW)
    return path


@pytest.fixture(scope="module")
def whole_of(data, tmp_path_factory):
    """{processes: the folder of a run that no signal met}"""
    out = tmp_path_factory.mktemp("whole of")
    for processes in (1, 2):
        flags = [*TINY, *MEETS, "--dataset", data, "--output-dir", out, "--run-name", processes]
        launch.finish("temo", flags, out / f"{processes}.txt", processes)
    return {processes: out / str(processes) for processes in (1, 2)}


MEETS = ["--max-steps", "8", "--eval-every", "4", "--save-every", "4", "--eval-batch", "1"]  # what a signal meets


def until_it_meets(where, folder, alive, log):
    """Wait until a run is in its fourth step, the evaluation after it, or the writing of the checkpoint after that."""
    def rows(kind):
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row["step"] for row in map(json.loads, (line for line in lines if line.endswith("}"))) if kind in row]
    met = {"step": lambda: 3 in rows("loss"), "evaluation": lambda: 4 in rows("loss") and 4 not in rows("eval"),
           "checkpoint": lambda: (folder / "checkpoints/step_4.tmp/state.safetensors").exists()}[where]
    while not met():
        assert alive(), log.read_text()[-3000:]
        time.sleep(0.01)
    time.sleep(0.2)


def family(*pids):
    return [p for pid in pids for p in psutil.Process(pid).children(recursive=True)]


def untimed(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("step_s", "data_s", "samples_per_s")} for row in rows]


@pytest.mark.parametrize("where, workers, processes", [
    ("step", 2, 1), ("step", 0, 2), ("step", 2, 2), ("evaluation", 2, 1), ("evaluation", 2, 2), ("checkpoint", 2, 1)])
def test_a_signal_to_the_process_group_loses_nothing(where, workers, processes, slow, data, whole_of, tmp_path):
    """As schedulers, `timeout` and torchrun send it, loader workers included; the rest is the same to the bit."""
    log, whole = tmp_path / "log", whole_of[processes]
    flags = [*TINY, *MEETS, "--workers", workers, "--dataset", data, "--output-dir", tmp_path, "--run-name", "a"]
    run = launch.start_all(slow, flags, log, processes, SLOW=where)
    until_it_meets(where, tmp_path / "a", lambda: all(p.is_alive() for p in run), log)
    children = family(*(p.pid for p in run))
    assert len(children) >= workers * processes
    for _ in range(2):  # a scheduler's, and a launcher's that passes it on
        for process in run:
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.05)
    for process in run:
        process.join(60)
    text = log.read_text()
    assert [p.exitcode for p in run] == [143] * processes, text[-3000:]
    assert not psutil.wait_procs(children, timeout=10)[1]
    launcher = f"torchrun --nproc_per_node {processes}" if processes > 1 else r"\S*python\S*"
    assert re.search(rf"stopped after step 4 by SIGTERM; to go on: {launcher} slow.py --resume {tmp_path}/a\n", text)
    assert "Traceback" not in text and "error" not in text
    assert engine.checkpoints.latest_checkpoint(tmp_path / "a").name == "step_4"
    if where == "evaluation":  # which was not waited for
        assert 4 not in [row["step"] for row in untimed(tmp_path / "a") if "eval" in row]
    launch.finish("temo", ["--resume", tmp_path / "a"], tmp_path / "log of the rest", processes)
    assert same(tmp_path / "a", whole) and untimed(tmp_path / "a") == untimed(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for a signal when a parent ends")
def test_a_signal_to_accelerate_launch_reaches_the_run(slow, data, tmp_path):
    """It ends at once and passes nothing on: the run learns of it, and its loader workers go when it is killed."""
    flags = [*TINY, *MEETS, "--workers", "2", "--dataset", data, "--output-dir", tmp_path, "--run-name", "a"]
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", slow, *flags]
    log, path = tmp_path / "log", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with open(log, "w") as out:
        launcher = subprocess.Popen(list(map(str, launch)), stdout=out, stderr=subprocess.STDOUT,
                                    env=os.environ | {"SLOW": "step", "PYTHONPATH": path})
    until_it_meets("step", tmp_path / "a", lambda: launcher.poll() is None, log)
    children = family(launcher.pid)
    launcher.terminate()
    assert launcher.wait(60) == -signal.SIGTERM and len(children) == 3
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert re.search(rf"stopped after step 4 by SIGTERM; to go on: .*launch {slow} --resume {tmp_path}/a\n",
                     log.read_text())
    assert engine.checkpoints.latest_checkpoint(tmp_path / "a").name == "step_4"


def test_no_worker_outlives_a_run_that_is_killed(slow, data, tmp_path):
    flags = [*TINY, *MEETS, "--workers", 2, "--dataset", data, "--output-dir", tmp_path, "--run-name", "a"]
    process = launch.start(slow, flags, tmp_path / "log", SLOW="step")
    until_it_meets("step", tmp_path / "a", process.is_alive, tmp_path / "log")
    children = family(process.pid)
    process.kill()
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=20)[1]


NODES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "77", "MASTER_ADDR": "n1"}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False"}


@pytest.mark.parametrize("environment, words", [
    ({}, "python3 mine.py"), (ACCELERATE, "accelerate launch mine.py"),
    ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun --nproc_per_node 1 mine.py"),
    (ACCELERATE | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"},
     "accelerate launch --multi_gpu --num_processes 4 mine.py"),
    (NODES, "on each node: torchrun --nproc_per_node 8 --nnodes 2 --rdzv_backend c10d --rdzv_id 77 "
            "--rdzv_endpoint n1:29500 mine.py")])
def test_the_way_on_can_be_pasted(environment, words, tmp_path, monkeypatch):
    for name in ("python3", "torchrun", "accelerate"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)} | environment)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setattr(sys, "argv", ["mine.py", "--cpu"])
    assert engine.checkpoints.command(Path("runs/two words")) == f"{words} --resume 'runs/two words'"
    monkeypatch.setattr(os, "environ", {"PATH": "/nowhere"})  # as /venv/bin/python3 mine.py
    assert engine.checkpoints.command("a") == f"{tmp_path}/python3 mine.py --resume a"


def test_a_signal_and_a_resume_change_nothing(data, whole, tmp_path, monkeypatch):
    """The step ends, the checkpoint is written, and the rest of the run is the same to the bit."""
    finish = engine.run.Run.set_lr

    def interrupt(self, lr):
        finish(self, lr)
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(engine.run.Run, "set_lr", interrupt)
    with pytest.raises(SystemExit) as end:
        run(data, tmp_path, "--run-name", "a")
    assert end.value.code == 143 and engine.checkpoints.latest_checkpoint(tmp_path / "a").name == "step_5"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a second one would have stopped at once
    monkeypatch.setattr(engine.run.Run, "set_lr", finish)
    resume(tmp_path / "a")
    assert same(tmp_path / "a", whole)


def test_weights_that_explode_stop_the_run_at_once(data, tmp_path):
    with pytest.raises(UserError, match=r"the weights are not finite after step 1 \(lr 1e\+30"):
        run(data, tmp_path, "--lr", "1e30", "--lr-end", "1e30", "--optimizer", "sgd", "--max-steps", "1",
            "--tau", "1e-9", "--warmup-epochs", "0", "--grad-clip", "0")
    assert not list(tmp_path.glob("*/model.safetensors"))


def test_no_place_for_temporary_files_is_one_line():
    def no_files():  # as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    done = subprocess.run([sys.executable, "-B", "temo.py", "--help"], cwd=ROOT, preexec_fn=no_files,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no folder takes temporary files (No usable temporary directory found in")
