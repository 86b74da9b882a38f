"""A run whose checks are read a step later, as on a CUDA card, here on the CPU: the same run, and as safe."""

import math
import os
import re
import signal

import common
from contrastive import encoders, engine
from contrastive.data.batches import epoch_batches
from contrastive.engine.processes import rank
from contrastive.engine.run import Run

import pytest
import torch

import helpers
import launch
import temo

TINY = ["--cpu", "--workers", 0, "--image-size", 16, "--embed-dim", 16, "--batch-size", 8,
        "--loss", "infonce", "--learnable-tau", "--eval-every", 0, "--max-bad-fraction", 0.1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """80 pictures, of which one cannot be read."""
    csv = helpers.write_captions(tmp_path_factory.mktemp("data"), 80)
    train = common.load_data(str(csv), "train")
    bad = train.key(int(next(epoch_batches(len(train), 8, 42, 1, 2))[1][3]))  # of the second batch
    (csv.parent / bad).write_bytes(helpers.TRUNCATED)
    return csv


@pytest.fixture
def lagged(monkeypatch):
    monkeypatch.setattr(Run, "lagged", property(lambda run: True, lambda run, value: None), raising=False)


def run(data, folder, *flags):
    return helpers.run_script(temo, folder, *flags, base=[*TINY, "--dataset", data])


def untimed(folder):
    timed = ("step_s", "data_s", "samples_per_s")
    return [{k: v for k, v in row.items() if k not in timed} for row in helpers.rows(folder)]


def same(a, b):
    return helpers.equal_files(a / "model.safetensors", b / "model.safetensors") and untimed(a) == untimed(b)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of nine steps whose checks are not put off."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    run(data, folder, "--max-steps", 9, "--log-every", 6, "--save-every", 6)
    return folder


def test_the_run_is_the_same_to_the_bit(data, whole, tmp_path, lagged):
    run(data, tmp_path / "a", "--max-steps", 9, "--log-every", 6, "--save-every", 6)
    assert same(tmp_path / "a", whole)
    listed = [(folder / "bad_samples.txt").read_text() for folder in (tmp_path / "a", whole)]
    assert listed[0] == listed[1] and listed[0].count("\n") == 1


def test_a_signal_and_a_resume_change_nothing(data, whole, tmp_path, lagged, monkeypatch):
    set_lr = Run.set_lr

    def interrupt(run, lr):
        set_lr(run, lr)
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(Run, "set_lr", interrupt)
        run(data, tmp_path / "a", "--max-steps", 9, "--log-every", 6, "--save-every", 6)
    assert end.value.code == 143 and engine.checkpoints.checkpoints_of(tmp_path / "a")[0].stem == "step_4"
    temo.main(temo.parse_args(["--resume", str(tmp_path / "a")]))
    assert same(tmp_path / "a", whole)


@pytest.mark.parametrize("with_signal", [False, True])
def test_a_loss_that_is_not_finite_stops_all_before_anything_is_written(with_signal, data, tmp_path, lagged,
                                                                         monkeypatch):
    """NaN in step 4 of one process; every fourth step is logged and saved. With a signal: not even its checkpoint."""
    set_lr, loss, now, folder = Run.set_lr, temo.multimodal_loss, [0], tmp_path / "a"

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
    kept = [path.name for path in engine.checkpoints.checkpoints_of(folder)]
    assert kept == ([] if with_signal else ["step_4.pt"])
    assert [(tmp_path / f"begun {r}").read_text() for r in (0, 1)] == ["4" if with_signal else "5"] * 2


def test_too_many_bad_samples_stop_both_processes(data, tmp_path, lagged):
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
