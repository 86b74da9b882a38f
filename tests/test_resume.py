"""Killed in mid-epoch and resumed, a run is bitwise the run that was never stopped; what a resume leaves and refuses.
The five scripts' own states (two optimisers, queues, masks) are killed and resumed in test_check.py."""

import os
import re
import shutil
import signal

import common
from contrastive import encoders, engine
from contrastive.engine.checkpoints import checkpoints_of
from contrastive.engine.processes import UserError, flatten, read_json
from contrastive.engine.run import Run

import pytest
import torch

import helpers
import launch
import temo
from helpers import equal_files, losses, rows, steps, tensors_of

STEPS, SAVED, KILLED, KEPT = 12, 5, 7, ["step_10.pt", "step_12.pt"]
FLAGS = [*"--cpu --image-size 16 --embed-dim 16 --batch-size 64 --loss infonce --learnable-tau".split(), "--max-steps",
         STEPS, "--save-every", SAVED, *"--log-every 1 --eval-every 0 --lr 3e-4".split()]  # four steps an epoch
RUNS = {  # processes, flags; each killed one goes on as the whole one did
    "one": (1, ["--workers", 0]), "killed, 2 workers": (1, ["--workers", 2]),
    "two": (2, ["--workers", 1, "--chunk-size", 10]), "two killed": (2, ["--workers", 1, "--chunk-size", 10])}


def run(folder, data, *flags):
    return helpers.run_script(temo, folder, *flags, base=[*FLAGS, "--dataset", data])


def resume(folder, *flags):
    return temo.main(temo.parse_args(["--resume", str(folder), *map(str, flags)]))


def processes(number, place, work):
    """Exit codes of forks that are the ranks of a run."""
    place.mkdir()
    if number > 1:
        return [code for code, _ in launch.ranks(place, lambda rank: work())]
    return [launch.ended(launch.forked(work, place / "log"))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return helpers.write_captions(tmp_path_factory.mktemp("set"), 300, height=20, width=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """{name: folder}; the killed ones have been resumed."""
    root, done = tmp_path_factory.mktemp("runs"), Run.done

    def done_and_killed(run, *args, **more):
        done(run, *args, **more)
        if run.step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
    for name, (number, flags) in RUNS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(temo, "draw", lambda *_: None)
            if "killed" in name:
                with patch.context() as kills:
                    kills.setattr(Run, "done", done_and_killed)
                    codes = processes(number, root / f"{name} first", lambda: run(root / name, data, *flags))
                assert codes == [-signal.SIGKILL] * number
                assert [p.stem for p in checkpoints_of(root / name)] == [f"step_{SAVED}"]
                (root / name / "checkpoints" / "step_9.tmp").write_bytes(b"cut")  # what a crash inside a save leaves
                codes = processes(number, root / f"{name} resumed", lambda: resume(root / name))
            else:
                codes = processes(number, root / f"{name} whole", lambda: run(root / name, data, *flags))
            assert codes == [0] * number, name
    return {name: root / name for name in RUNS}


@pytest.mark.parametrize("whole, killed", [("one", "killed, 2 workers"), ("two", "two killed")])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(runs, whole, killed):
    whole, killed = runs[whole], runs[killed]
    for file in ("model.safetensors", "checkpoints/step_12.pt"):           # tau, optimiser, each process's random state
        assert equal_files(whole / file, killed / file)
    assert read_json(whole / "summary.json")["test"] == read_json(killed / "summary.json")["test"]
    timed = ("step_s", "data_s", "samples_per_s")
    logs = [[{k: v for k, v in r.items() if k not in timed} for r in rows(folder)] for folder in (whole, killed)]
    assert logs[0] == logs[1]
    assert [(r["step"], "eval" in r) for r in logs[0]] == [(0, True), *((k, False) for k in range(1, 13)), (12, True)]
    taus = [r["tau"] for r in steps(killed)]
    assert len(set(taus)) == STEPS
    assert taus[-1] == pytest.approx(tensors_of(killed, 12)["own/tau.log_tau"].exp().item(), rel=1e-6)
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == KEPT  # the last two


def test_two_processes_in_chunks_log_and_evaluate_as_one(runs):
    assert losses(runs["two"]) == pytest.approx(losses(runs["one"]), rel=1e-3)
    one, two = (flatten(rows(runs[name])[0]) for name in ("one", "two"))   # before training: the same weights
    assert one["step"] == 0 and two == pytest.approx(one, rel=1e-3, abs=1e-3)


def test_each_process_has_random_numbers_of_its_own(runs):
    """Those of dropout: the same on all processes, it would drop the same units of every part of the batch."""
    path = runs["two"] / "checkpoints" / "step_12.pt"
    first, second = (of["cpu"] for of in torch.load(path, weights_only=True)["processes"])
    assert not torch.equal(first, second)


# ----------------------------------------------- a finished run, in this process -------------------------------------
@pytest.fixture
def folder(runs, tmp_path, monkeypatch):
    """A copy of the finished run of one process."""
    monkeypatch.setattr(temo, "draw", lambda *_: None)
    return shutil.copytree(runs["one"], tmp_path / "run")


def test_a_finished_run_is_only_evaluated(folder, runs):
    before = read_json(folder / "summary.json")
    summary = resume(folder)
    assert summary["steps"] == STEPS and summary["val"] == before["val"] and summary["test"] == before["test"]
    assert equal_files(folder / "model.safetensors", runs["one"] / "model.safetensors")
    assert [r["step"] for r in rows(folder)] == [r["step"] for r in rows(runs["one"])]


def test_before_the_first_checkpoint_it_starts_again(folder, runs, monkeypatch):
    """With the tokenizer of the run: captions that changed since must not renumber its embeddings."""
    for path in checkpoints_of(folder):
        path.unlink()
    (folder / "checkpoints" / "step_5.tmp").write_bytes(b"cut")            # killed inside its first save
    train = common.train_wordpiece
    monkeypatch.setattr(encoders.texts, "train_wordpiece", lambda captions: train([*captions, *["zebra"] * 9]))
    resume(folder)
    for file in ("model.safetensors", "checkpoints/step_12.pt"):
        assert equal_files(folder / file, runs["one"] / file)
    assert [r["step"] for r in rows(folder)] == [r["step"] for r in rows(runs["one"])]
    words = [(place / "tokenizer" / "tokenizer.json").read_bytes() for place in (folder, runs["one"])]
    assert words[0] == words[1]


def test_dropout_goes_on(tiny, tmp_path, data, monkeypatch):
    """Its random numbers are torch's own, which a checkpoint holds."""
    monkeypatch.setattr(temo, "draw", lambda *_: None)
    run(tmp_path / "whole", data, "--text-encoder", tiny("bert")[0],
        *"--text-length 12 --max-steps 4 --save-every 2 --workers 0".split())
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (cut / "checkpoints" / "step_4.pt").unlink()
    torch.rand(1)
    resume(cut)
    assert equal_files(*(place / "checkpoints" / "step_4.pt" for place in (tmp_path / "whole", cut)))


def test_at_its_end_it_is_evaluated_in_float32(tmp_path, data, monkeypatch):
    """As one that was not stopped, and as eval.py does it; its time goes on from where it was saved."""
    halves, forward = [], common.TextEncoder.forward

    def watch(tower, *args, **more):
        halves.append((tower.training, torch.is_autocast_enabled("cpu")))
        return forward(tower, *args, **more)
    monkeypatch.setattr(common.TextEncoder, "forward", watch)
    before = run(tmp_path / "run", data, "--max-steps", 3, "--mixed-precision", "bf16", "--workers", 0)
    assert halves == [(False, True)] + [(True, True)] * 3 + [(False, False)] * 2  # val, three steps, val and test
    halves.clear()
    (tmp_path / "run" / "summary.json").unlink()
    saved = tmp_path / "run" / "checkpoints" / "step_3.pt"
    torch.save(torch.load(saved, weights_only=True) | {"wall_s": 1000.0}, saved)
    monkeypatch.setattr(temo, "draw", lambda *_: None)
    after = resume(tmp_path / "run")
    assert halves == [(False, False)] * 2 and 1000 < after["wall_s"] < 2000
    assert after["val"] == before["val"] and after["test"] == before["test"] and after["steps"] == 3


def test_more_steps_are_remembered_and_fewer_refused(folder):
    """Refused before args.json is written: else the next --resume without any flag would be refused as well."""
    before = (folder / "args.json").read_text()
    with pytest.raises(UserError, match="step_12.pt: is beyond the 3 steps"):
        resume(folder, "--max-steps", 3)
    assert (folder / "args.json").read_text() == before
    assert resume(folder, "--max-steps", 13)["steps"] == 13
    assert temo.parse_args(["--resume", str(folder)]).max_steps == 13


def test_a_checkpoint_of_another_architecture_is_refused_in_one_line(folder):
    saved = checkpoints_of(folder)[0]
    state = torch.load(saved, weights_only=True)
    state["model"]["vision.projection.weight"] = state["model"]["vision.projection.weight"][:8].clone()
    torch.save(state, saved)
    with pytest.raises(UserError, match=f"^{re.escape(str(saved))}: .*$"):
        resume(folder)


def test_a_folder_with_a_run_is_not_trained_into(folder, data):
    before = (folder / "args.json").read_text()
    with pytest.raises(UserError, match=f"{folder}: holds a run already; --resume {folder}"):
        run(folder, data)
    assert (folder / "args.json").read_text() == before


def test_other_data_are_refused(folder, data):
    """Rows of the table, of which a checkpoint has a mark: the order would be another."""
    lines = data.read_text().splitlines()
    (data.parent / "fewer.csv").write_text("\n".join(lines[:-9]))
    args = temo.parse_args(["--resume", str(folder)])
    args.dataset = str(data.parent / "fewer.csv")
    args.max_steps = 14
    with pytest.raises(UserError, match="--resume: the run had .*, now .*: give it the same data"):
        temo.main(args)


def test_a_tokenizer_is_the_same_each_time():
    pairs = [(a, b) for a in ("red", "green", "blue", "grey") for b in ("box", "ball", "tree", "house", "boat")]
    captions = [f"{a} {b} {a}{b} number {i}" for i, (a, b) in enumerate(pairs)]
    assert len({common.train_wordpiece(captions, vocabulary=80).backend_tokenizer.to_str() for _ in range(5)}) == 1


def test_no_process_waits_for_another_number_of_them(runs, tmp_path, monkeypatch, capsys):
    """A run of two processes goes on as one: random states of dropout are not restored, which is said."""
    monkeypatch.setattr(temo, "draw", lambda *_: None)
    folder = shutil.copytree(runs["two"], tmp_path / "run")
    resume(folder, "--max-steps", 13)
    assert "--resume: 2 processes before, 1 now: random states" in capsys.readouterr().out
    assert engine.checkpoints.checkpoints_of(folder)[0].stem == "step_13"
