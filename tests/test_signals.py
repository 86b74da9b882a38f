"""A signal, a loss that is not finite and too many bad samples end all processes, also where what a step says is read
a step later, as on a card; but for its end such a run is the same to the bit."""

import json
import math
import os
import re
import signal

import common
from contrastive import encoders, engine
from contrastive.data.batches import epoch_batches
from contrastive.engine.checkpoints import checkpoints_of
from contrastive.engine.processes import rank
from contrastive.engine.run import Run

import psutil
import pytest
import torch

import helpers
import launch
import temo

STEPS = ["--max-steps", 9, "--log-every", 6, "--save-every", 6]
both_ways = pytest.mark.parametrize("lagged", [False, True])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """80 pictures, of which one cannot be read."""
    csv = helpers.write_captions(tmp_path_factory.mktemp("data"), 80)
    train = common.load_data(str(csv), "train")
    bad = train.key(int(next(epoch_batches(len(train), 8, 42, 1, 2))[1][3]))  # of the second batch
    (csv.parent / bad).write_bytes(helpers.TRUNCATED)
    return csv


def run(data, folder, *flags, workers=0):
    base = [*"--cpu --image-size 16 --embed-dim 16 --batch-size 8 --loss infonce --learnable-tau".split(),
            *"--eval-every 0 --max-bad-fraction 0.1".split(), "--workers", workers, "--dataset", data]
    return helpers.run_script(temo, folder, *flags, base=base)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of nine steps whose checks are not put off."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    run(data, folder, *STEPS)
    return folder


def put_off(monkeypatch, lagged):
    monkeypatch.setattr(Run, "lagged", property(lambda run: lagged, lambda run, value: None), raising=False)


def at_step(monkeypatch, step, what):
    """Calls what() within a step, counted from 0."""
    set_lr = Run.set_lr

    def then(run, lr):
        set_lr(run, lr)
        if run.step == step:
            what()
    monkeypatch.setattr(Run, "set_lr", then)


def same(a, b):
    timed = ("step_s", "data_s", "samples_per_s")
    logs = [[{k: v for k, v in row.items() if k not in timed} for row in helpers.rows(folder)] for folder in (a, b)]
    return helpers.equal_files(a / "model.safetensors", b / "model.safetensors") and logs[0] == logs[1]


def test_a_run_whose_checks_are_read_later_is_the_same(data, whole, tmp_path, monkeypatch):
    put_off(monkeypatch, True)
    run(data, tmp_path / "a", *STEPS)
    assert same(tmp_path / "a", whole)
    listed = [(folder / "bad_samples.txt").read_text() for folder in (tmp_path / "a", whole)]
    assert listed[0] == listed[1] and listed[0].count("\n") == 1


@both_ways
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_checkpoint_from_which_the_run_goes_on(number, code, lagged, data, whole, tmp_path,
                                                                 monkeypatch, capsys):
    put_off(monkeypatch, lagged)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, 2, lambda: os.kill(os.getpid(), number))
        run(data, tmp_path / "a", *STEPS)
    last = 4 if lagged else 3
    assert end.value.code == code and [p.stem for p in checkpoints_of(tmp_path / "a")] == [f"step_{last}"]
    said = capsys.readouterr().out
    assert f"stopped after step {last} by {number.name}; to go on: python" in said and f"--resume {tmp_path}/a" in said
    temo.main(temo.parse_args(["--resume", str(tmp_path / "a")]))
    assert same(tmp_path / "a", whole)


def test_a_signal_to_one_process_ends_all_and_their_workers(data, tmp_path, monkeypatch):
    def stop():
        workers = [child.pid for child in psutil.Process().children(recursive=True)]
        (tmp_path / f"workers{rank()}").write_text(json.dumps(workers))
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    at_step(monkeypatch, 2, stop)
    ended = launch.ranks(tmp_path, lambda rank: run(data, tmp_path / "a", *STEPS, workers=1))
    assert [code for code, _ in ended] == [143, 143] and "Traceback" not in ended[0][1] + ended[1][1]
    assert [p.stem for p in checkpoints_of(tmp_path / "a")] == ["step_3"]
    workers = [pid for r in (0, 1) for pid in json.loads((tmp_path / f"workers{r}").read_text())]
    assert len(workers) == 2
    left = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=20)[1], "workers are left"


@pytest.mark.parametrize("lagged, with_signal", [(False, False), (True, False), (True, True)])
def test_a_loss_that_is_not_finite_stops_all_before_anything_is_written(lagged, with_signal, data, tmp_path,
                                                                         monkeypatch):
    """NaN in step 4 of one process; every fourth step is logged and saved. With a signal: not even its checkpoint."""
    set_lr, loss, now, folder = Run.set_lr, temo.multimodal_loss, [0], tmp_path / "a"
    put_off(monkeypatch, lagged)

    def note(run, lr):
        set_lr(run, lr)
        now[0] = run.step
        (tmp_path / f"begun {rank()}").write_text(str(run.step))
        if with_signal and run.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)  # heeded when step 4 is done
    monkeypatch.setattr(Run, "set_lr", note)
    monkeypatch.setattr(temo, "multimodal_loss", lambda *x: loss(*x) * (
        math.nan if (now[0], rank()) == (4, 1) else 1))
    monkeypatch.setattr(engine.processes.time, "sleep", lambda _: None)  # of the second process, before it speaks
    every = 8 if with_signal else 4
    (code, said), (other, theirs) = launch.ranks(tmp_path, lambda rank: run(
        data, folder, "--max-steps", 12, "--log-every", every, "--save-every", every))
    assert code == other == 2 and "Traceback" not in said + theirs
    error, = [line for line in said.splitlines() if line.startswith("error:")]
    assert re.search(r"not finite at step 4 \(tau 0\.1\d+\); process 1: norms up to .*, keys \[.\d+.png", error)
    assert max(row["step"] for row in helpers.rows(folder)) == (0 if with_signal else 4)
    assert [path.name for path in checkpoints_of(folder)] == ([] if with_signal else ["step_4.pt"])
    begun = "5" if lagged and not with_signal else "4"
    assert [(tmp_path / f"begun {r}").read_text() for r in (0, 1)] == [begun] * 2


@both_ways
def test_too_many_bad_samples_stop_both_processes(lagged, data, tmp_path, monkeypatch):
    put_off(monkeypatch, lagged)
    flags = ["--max-steps", 9, "--log-every", 9, "--save-every", 0, "--max-bad-fraction", 0.001]
    (code, said), (other, theirs) = launch.ranks(tmp_path, lambda rank: run(data, tmp_path / "a", *flags))
    error, = [line for line in said.splitlines() if line.startswith("error:")]
    assert code == other == 2 and "1 of about " in error and "UserError" not in said + theirs
    assert (tmp_path / "a" / "bad_samples.txt").read_text().count("\n") == 1


class OnCard(torch.Tensor):
    """A tensor of the CPU that says that it is on a card."""
    is_cuda = True


def test_views_of_a_card_are_the_same():
    generator = torch.Generator().manual_seed(0)
    view = common.Augment(32, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    x = torch.rand(9, 3, 32, 32, generator=generator)
    draws = torch.rand(9, view.DRAWS, 1, 1, 1, generator=generator)
    plain = view.photometric(x, draws)
    assert torch.equal(view.photometric(x.as_subclass(OnCard), draws).as_subclass(torch.Tensor), plain)
    colours = encoders.models.colours
    assert colours((0.1, 0.2, 0.3), torch.device("cpu")) is colours((0.1, 0.2, 0.3), torch.device("cpu"))
