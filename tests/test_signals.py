"""A signal, and a loss that is not finite, end the processes of a started run as a user would have it."""

import os
import signal
import time
from pathlib import Path

from contrastive.engine.checkpoints import checkpoints_of

import psutil
import pytest

import launch
from helpers import equal_files, rows, write_captions

FLAGS = "--cpu --image-size 16 --embed-dim 16 --batch-size 8 --max-steps 40 --eval-every 0".split()
FLAGS += "--save-every 20 --log-every 1".split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stops, and the flags of the others."""
    folder = tmp_path_factory.mktemp("signals")
    flags = [*FLAGS, "--dataset", write_captions(folder / "set", 40), "--output-dir", folder]
    launch.finish("temo", [*flags, "--run-name", "whole", "--workers", "0"], folder / "whole.txt")
    return folder, flags


def fork(folder, name, old, new):
    """temo.py with another way to average L_MM: the path of the copy."""
    text = (launch.ROOT / "temo.py").read_text(encoding="utf8")
    line = "    return (info_nce(image, text, tau, block) + info_nce(text, image, tau, block)) / 2"
    assert text.count(line) == 1
    path = Path(folder) / f"{name}.py"
    path.write_text(text.replace(line, line.replace(old, new)), encoding="utf8")
    return str(path)


def signalled(number, script, flags, folder, processes=1):
    """Exit codes and words of a run whose processes get the signal once step 3 is logged; no worker is left."""
    run = launch.start_all(script, flags, log := folder.with_suffix(".txt"), processes)
    while not any(r["step"] >= 3 and "loss" in r for r in rows(folder)):
        assert all(p.is_alive() for p in run), log.read_text()[-3000:]
        time.sleep(0.01)
    workers = [child for p in run for child in psutil.Process(p.pid).children(recursive=True)]
    for p in run:
        os.kill(p.pid, number)
    codes = [launch.ended(p, 60) for p in run]
    assert not psutil.wait_procs(workers, timeout=20)[1], "workers are left"
    return codes, log.read_text()


@pytest.mark.parametrize("number, code, processes, workers", [
    (signal.SIGTERM, 143, 1, 2), (signal.SIGTERM, 143, 2, 0), (signal.SIGINT, 130, 1, 0)])
def test_a_signal_leaves_a_checkpoint_from_which_the_run_goes_on(number, code, processes, workers, whole):
    folder, flags = whole
    ours = folder / f"{code} {processes}"
    slow = fork(folder, f"slow{code}{processes}", "/ 2", "/ (2 + (__import__('time').sleep(0.1) or 0))")
    codes, said = signalled(number, slow, [*flags, "--run-name", ours.name, "--workers", workers], ours, processes)
    step = int(checkpoints_of(ours)[0].stem[5:])
    assert codes == [code] * processes and 3 <= step < 20 and "Traceback" not in said
    assert f"stopped after step {step} by {number.name}; to go on: python" in said and f"--resume {ours}" in said
    launch.finish(slow, ["--resume", ours], folder / "resumed.txt", processes)
    assert [r["step"] for r in rows(ours) if "loss" in r] == [*range(1, 41)]
    if processes == 1:
        assert equal_files(ours / "model.safetensors", folder / "whole" / "model.safetensors")


def test_a_loss_that_is_not_finite_on_one_of_two_processes_ends_both(whole):
    folder, flags = whole
    nan = fork(folder, "nan", "/ 2", "/ (float('nan') if __import__('os').environ['RANK'] == '1' else 2)")
    log = folder / "nan.txt"
    run = launch.start_all(nan, [*flags, "--run-name", "nan", "--workers", 0], log, 2)
    assert [launch.ended(p, 60) for p in run] == [2, 2]
    message, = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert "the loss is not finite at step 0" in message and "process 1: norms" in message
    assert "process 0" not in message and "Traceback" not in log.read_text() and not checkpoints_of(folder / "nan")
