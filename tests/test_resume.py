"""A run that was killed or stopped and resumed is bitwise the whole one; what stops all processes;
tools.check. test_promises.py has it for every script."""

import json
import math
import os
import re
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import common
from contrastive import core
from contrastive.core.files import logged_rows, read_json, whole_file, write_json, write_tensors
from contrastive.core.processes import UserError, rank
from contrastive.data.batches import epoch_batches
from contrastive.engine import run as engine_run
from contrastive.engine.checkpoints import checkpoints_of
from contrastive.engine.run import Run, make_folder

import psutil
import pytest
import torch

import helpers
import launch
import temo
import temperature_schedules
from helpers import equal_files, evaluated, losses, rows
from tools import check

STEPS, SAVED, KILLED = 12, 5, 7  # an epoch has nine steps
FLAGS = (
    "--cpu --image-size 16 --embed-dim 16 --batch-size 8 --lr 3e-4 --loss infonce --learnable-tau "
    f"--max-steps {STEPS} --save-every {SAVED} --log-every 1 --eval-every 0 --workers 0 "
    "--max-bad-fraction 0.1").split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """108 pictures, 72 for training, of which one of the second batch cannot be read."""
    csv = helpers.write_captions(tmp_path_factory.mktemp("data"), 108)
    train = common.load_data(str(csv), "train")
    _, second_batch = next(epoch_batches(len(train), 8, 42, 1, 2))
    (csv.parent / train.key(int(second_batch[3]))).write_bytes(helpers.TRUNCATED)
    return csv


def run(folder, data, *flags):
    return helpers.run_script(temo, folder, *flags, base=[*FLAGS, "--dataset", data])


def resume(folder, *flags):
    return temo.main(temo.parse_args(["--resume", str(folder), *map(str, flags)]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """The folder of a whole run of one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, data)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of `whole`."""
    return shutil.copytree(whole, tmp_path / "run")


def assert_same(folder, other):
    """Losses, bad samples and weights of two runs are the same."""
    assert losses(folder) == losses(other)
    for name in ("bad_samples.txt", "model.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def at_step(monkeypatch, step, action):
    """Calls action() within a step, counted from 0."""
    learning_rate = common.learning_rate

    def rate_of_step(k, steps, args):
        if k == step:
            action()
        return learning_rate(k, steps, args)

    monkeypatch.setattr(common, "learning_rate", rate_of_step)


# ----------------------------------------------- kill -9 ------------------------------------------
@pytest.fixture(scope="module")
def pair(tmp_path_factory, data, tiny):
    """(A whole run, one that was killed and resumed) of two processes, in chunks and with
    dropout."""
    root = tmp_path_factory.mktemp("runs")
    whole, killed = root / "whole", root / "killed"
    flags = ["--chunk-size", 3, "--text-encoder", tiny("bert")[0], "--text-length", 12]

    def codes(work):
        return [code for code, _ in launch.ranks(root, lambda _: work())]

    assert codes(lambda: run(whole, data, *flags)) == [0, 0]
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, KILLED, lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert codes(lambda: run(killed, data, *flags, "--workers", 1)) == [-9, -9]
    assert [path.stem for path in checkpoints_of(killed)] == [f"step_{SAVED}"]
    # what a crash inside a save leaves
    (killed / "checkpoints" / "step_9.tmp").write_bytes(b"cut")
    assert codes(lambda: resume(killed)) == [0, 0]
    return whole, killed


def test_resumed_run_is_bitwise_the_whole_one(pair):
    assert_same(*pair)
    last = [folder / "checkpoints" / "step_12.pt" for folder in pair]
    assert equal_files(*last)  # tau, optimiser, each process's random state
    before, after = [read_json(folder / "summary.json") for folder in pair]
    assert before["test"] == after["test"]


def test_resumed_run_is_bitwise_logged_once(pair):
    """Each step, the evaluations before and after, and the bad sample of the second epoch."""
    _, killed = pair
    log = rows(killed)
    assert [row["step"] for row in log] == [*range(13), 12]
    assert [row["step"] for row in log if "eval" in row] == [0, 12]
    assert (killed / "bad_samples.txt").read_text().count("\n") == 1


def test_the_last_two_checkpoints_are_kept(pair):
    names = [path.name for path in (pair[0] / "checkpoints").iterdir()]
    assert sorted(names) == ["step_10.pt", "step_12.pt"]


def test_each_process_draws_from_a_seed_of_its_own_bitwise_saved(pair):
    """Else dropout were the same on all. A random state begins with its seed."""
    state = torch.load(pair[0] / "checkpoints" / "step_12.pt", weights_only=True)
    seeds = [process["cpu"][:8].view(torch.int64).item() for process in state["processes"]]
    assert seeds == [42, 43]


# ----------------------------------------------- what a resume refuses and keeps ------------------
def test_a_finished_run_is_only_evaluated(folder, whole):
    before, saved = read_json(folder / "summary.json"), folder / "checkpoints" / "step_12.pt"
    torch.save(torch.load(saved, weights_only=True) | {"wall_s": 1000.0}, saved)
    after = resume(folder)
    assert (after["steps"], after["test"]) == (STEPS, before["test"])
    assert 1000 < after["wall_s"] < 2000
    assert_same(folder, whole)


def test_more_steps_are_remembered_also_on_fewer_processes(pair, tmp_path, capsys):
    folder = shutil.copytree(pair[0], tmp_path / "run")
    assert resume(folder, "--max-steps", 13)["steps"] == 13
    assert "2 processes before, 1 now: equal but for rounding" in capsys.readouterr().out
    assert temo.parse_args(["--resume", str(folder)]).max_steps == 13


def test_a_longer_run_removes_the_end_of_the_shorter_one(folder, monkeypatch):
    """eval.py must not read its weights as those of the longer run."""
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        at_step(patch, STEPS, lambda: 1 / 0)
        resume(folder, "--max-steps", 14)
    assert not (folder / "summary.json").exists()
    assert not (folder / "model.safetensors").exists()
    assert resume(folder)["steps"] == 14


def test_an_older_checkpoint_is_refused_while_a_newer_one_lies_beside_it(folder, whole):
    """Without it, the older one goes on to the same end."""
    older = folder / "checkpoints" / "step_10.pt"
    with pytest.raises(UserError, match="newer checkpoints .*step_12.pt"):
        resume(older)
    (folder / "checkpoints" / "step_12.pt").unlink()
    resume(older)
    assert_same(folder, whole)


def test_fewer_steps_than_a_run_has_are_refused(folder):
    with pytest.raises(UserError, match="step_12.pt: is beyond the 3 steps"):
        resume(folder, "--max-steps", 3)


def test_a_second_run_in_a_folder_is_refused(folder, data):
    (folder / "metrics.jsonl").unlink()  # a run that has just begun has none
    with pytest.raises(UserError, match=f"{folder}: holds a run already"):
        run(folder, data)


def test_a_checkpoint_with_more_than_tensors_and_plain_values_is_refused(folder):
    """What else a pickle asks for may run code."""
    saved = folder / "checkpoints" / "step_12.pt"
    torch.save(torch.load(saved, weights_only=True) | {"more": saved}, saved)
    with pytest.raises(UserError, match="step_12.pt"):
        resume(folder)


def test_other_data_are_refused_and_leave_the_run(folder, data):
    """Else the next --resume without any flag would be refused as well."""
    before = (folder / "args.json").read_text()
    fewer = data.with_name("fewer.csv")
    fewer.write_text("\n".join(data.read_text().splitlines()[:-9]))
    args = temo.parse_args(["--resume", str(folder), "--max-steps", "14"])
    args.dataset = str(fewer)
    with pytest.raises(UserError, match="--resume: the run had .*, now "):
        temo.main(args)
    assert (folder / "args.json").read_text() == before


def test_a_row_that_a_crash_has_cut_is_left_out(folder):
    """Also where the cut is at the end of an inner dict, as that of an evaluation."""
    path, log = folder / "metrics.jsonl", rows(folder)
    text = path.read_text().rstrip("\n")
    assert text.endswith("}}")
    path.write_text(text[:-1])
    assert logged_rows(path) == log[:-1]
    resume(folder)
    assert len(rows(folder)) == len(log)


def test_at_its_end_a_run_is_evaluated_in_float32(tmp_path, data):
    """As eval.py does it."""
    summary = run(tmp_path / "run", data, "--max-steps", 3, "--mixed-precision", "bf16")
    found = evaluated(tmp_path / "run")
    assert found[str(data)]["metrics"] == summary["test"][str(data)]


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = [*pool.map(lambda _: make_folder(tmp_path / "run"), range(40))]
    assert len({*folders}) == 40
    for folder in folders:
        assert folder.is_dir()


def save_whole(path, state):
    """As a checkpoint is written."""
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)


@pytest.mark.parametrize("limit", [1000, 1_234_567])
@pytest.mark.parametrize("name, write", [
    ("a.json", lambda path, state: write_json(path, "x" * 2_000_000)),
    ("a.safetensors", write_tensors),
    ("a.pt", save_whole)])
def test_a_full_disk_is_named_and_leaves_no_half_written_file(name, write, limit, tmp_path):
    """The system's limit of a file's size stands for the disk's."""
    path, state = tmp_path / name, {str(k): torch.randn(10_000) for k in range(40)}
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError, match=f"{name}: .*File too large"):
            write(path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


# ----------------------------------------------- signals, NaN -------------------------------------
def put_off(monkeypatch):
    """The report of a step is read a step later, as on a GPU."""
    delay = property(lambda run: 1, lambda run, value: None)
    monkeypatch.setattr(Run, "report_delay", delay, raising=False)


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(
        data, whole, tmp_path, monkeypatch, capsys):
    """A step late."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        put_off(patch)
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        run(tmp_path / "a", data)
    assert end.value.code == 130
    assert [path.stem for path in checkpoints_of(tmp_path / "a")] == ["step_4"]
    assert f"--resume {tmp_path}/a" in capsys.readouterr().out
    resume(tmp_path / "a")
    assert_same(tmp_path / "a", whole)


def test_a_signal_ends_an_evaluation_at_once(data, tmp_path, monkeypatch):
    def evaluate_val(run):
        run.log.write({"step": run.step, "eval": {}})
        if run.step:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("it goes on")

    monkeypatch.setattr(Run, "evaluate_val", evaluate_val)
    monkeypatch.setattr(Run, "val_pieces", {}, raising=False)
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "a", data, "--eval-every", 2)
    assert end.value.code == 143
    assert [path.stem for path in checkpoints_of(tmp_path / "a")] == ["step_2"]


def test_a_minute_after_a_checkpoint_there_is_another(data, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_run, "SECONDS_BETWEEN_CHECKPOINTS", -1)
    at_step(monkeypatch, 3, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "a", data, "--save-every", 9)
    names = {path.stem for path in checkpoints_of(tmp_path / "a")}
    assert names == {"step_2", "step_3"}


def test_a_signal_to_one_process_ends_all_and_their_workers(data, tmp_path, monkeypatch):
    def stop():
        workers = [child.pid for child in psutil.Process().children(recursive=True)]
        (tmp_path / f"workers{rank()}").write_text(json.dumps(workers))
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    at_step(monkeypatch, 2, stop)
    ended = launch.ranks(tmp_path, lambda _: run(tmp_path / "a", data, "--workers", 1))
    assert [code for code, _ in ended] == [143, 143], ended
    assert [path.stem for path in checkpoints_of(tmp_path / "a")] == ["step_3"]
    workers = []
    for place in (0, 1):
        workers += json.loads((tmp_path / f"workers{place}").read_text())
    assert len(workers) == 2
    alive = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(alive, timeout=20)[1], "workers are left"


@pytest.mark.parametrize("lagged, every, last_row, saved", [
    (False, 4, 4, ["step_4"]),
    # not even the checkpoint of a signal is written
    (True, 8, 0, [])])
def test_a_loss_that_is_not_finite_stops_all_before_anything_is_written(  # noqa: PLR0917
        lagged, every, last_row, saved, data, tmp_path, monkeypatch):
    """In step 4 of one process."""
    loss, is_infinite = temo.multimodal_loss, []

    def loss_of_step(*args):
        if is_infinite and rank():
            return loss(*args) * math.nan
        return loss(*args)

    at_step(monkeypatch, 4, lambda: is_infinite.append(True))
    if lagged:
        put_off(monkeypatch)
        at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(temo, "multimodal_loss", loss_of_step)
    # of the second process, before it speaks
    monkeypatch.setattr(core.processes.time, "sleep", lambda _: None)
    flags = ["--log-every", every, "--save-every", every]
    ended = launch.ranks(tmp_path, lambda _: run(tmp_path / "a", data, *flags))
    assert [code for code, _ in ended] == [2, 2]
    words = r"not finite at step 4: .* tau 0\.1\d+; process 1: norms .*, keys \[.\d+.png"
    assert re.search(words, ended[0][1])
    assert max(row["step"] for row in rows(tmp_path / "a")) == last_row
    assert [path.stem for path in checkpoints_of(tmp_path / "a")] == saved


# ----------------------------------------------- tools.check: a fork, faults --------------------
TINY = "--dataset moving-emoji --clips 32 8 8 --frames 2 --embed-dim 8 --batch-size 8".split()
MOCO = "--loss moco --queue-size 32".split()
FAULTS = {  # the promise that it breaks: old, new
    "kill and resume": ('{"key_model": key_model, "queue": queue}', '{"key_model": key_model}'),
    "two processes": ("k = gather(normalize(k))", "k = normalize(k)")}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fork_keeps_the_promises_and_a_fault_is_found(fault, tmp_path, capsys):
    """Each fault, of MoCo's queue, breaks the promise of its name alone."""
    own = temperature_schedules
    if fault:
        own = helpers.fork(own, tmp_path, *FAULTS[fault])
    code = check.main([own.__file__, *TINY, *MOCO])
    output = capsys.readouterr().out
    broken = re.findall(r"^  (\w+ \w+(?: \w+)?)  .*\n {19}DIFFERS", output, re.M)
    assert code == bool(fault), output
    assert broken == [fault] * bool(fault), output
