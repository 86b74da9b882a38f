"""Killed in mid-epoch and resumed, a run is bitwise the run that was never stopped; what it leaves holds no pickle."""

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from contrastive import encoders, engine

import numpy as np
import psutil
import pytest
import torch

import eval as eval_py
import launch
import temo
from helpers import equal_files, tensors_of

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--cpu", *" --image-size 24 --batch-size 64 --max-steps 12".split(),
         *"--save-every 5 --log-every 1 --eval-every 0".split()]
STEPS, KEPT = 12, ["step_10.pt", "step_12.pt"]
TAIL = ["--imbalance-ratio", "50"]  # fewer images to evaluate
# A run: script, processes, flags. FOLDER stands for a folder of png files, of which an epoch has 4 steps; one of emoji
# has 49 (by class, cut to a tail, 27). mine.py is a fork of temo.py.
FOLDER = ["--dataset", "FOLDER", "--loss", "infonce", "--learnable-tau", "--workers"]
WHOLE = {"two processes": ("temo", 2, []), "folder": ("temo", 1, [*FOLDER, "0"]),
         "fork": ("mine", 1, ["--dataset", "FOLDER", "--tau-power", "0.7"]),
         "schedule": ("temperature_schedules", 1, [*TAIL, "--eval-every", "4", "--eval-epoch", "auto"]),
         "clusters": ("mmts", 1, ["--clips", "300", "40", "40", "--periods", "1.33", "--num-clusters", "40"]),
         "schedule, moco": ("temperature_schedules", 1, [*TAIL, "--loss", "moco", "--queue-size", "200"])}
# Killed once step KILL is logged, and resumed from step 5: the run it must equal, script, processes, flags.
KILL = 6
KILLED = {name: (name, *run) for name, run in WHOLE.items() if name not in ("folder", "fork")} | {
    "folder, 0 workers": ("folder", *WHOLE["folder"]), "folder, 2 workers": ("folder", "temo", 1, [*FOLDER, "2"])}


def write_folder(folder, n=300):
    """An own data set: n noisy png files and metadata.csv."""
    from PIL import Image
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    words = ["red", "green", "blue", "grey"], ["box", "ball", "tree", "house", "boat"]
    lines = [f"{i}.png,a {words[0][i % 4]} {words[1][i % 5]} number {i}" for i in range(n)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,caption", *lines]))


def write_fork(path):
    """`cp temo.py mine.py`, then another temperature and a flag for it: what a researcher does on the first day."""
    text = (ROOT / "temo.py").read_text(encoding="utf8")
    base, flag = '    g.add_argument("--base"', 'g.add_argument("--tau-power", type=positive, default=0.5, help="mine")'
    for old, new in (('"""TeMo: ', f'import sys; sys.path.insert(0, {str(ROOT)!r})\n"""TeMo: '),  # it lies elsewhere
                     (".clamp(min=1e-8).sqrt()", ".clamp(min=1e-8) ** POWER"), (base, f"    {flag}\n{base}"),
                     ("def main(args):\n", "def main(args):\n    global POWER\n    POWER = args.tau_power\n")):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf8")


def rows(folder):
    """Whole lines of metrics.jsonl: a poll may see half of the last one."""
    path = Path(folder) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def kinds(folder):
    """(step, is it an evaluation?) of each row."""
    return [(r["step"], "eval" in r) for r in rows(folder)]


def kill_at(step, folder, script, processes, flags, log):
    """Start a run and SIGKILL all its processes (ranks, loader workers) once `step` is logged."""
    run = launch.start_all(script, flags, log, processes, hold=10)
    while not any(r["step"] >= step and "loss" in r for r in rows(folder)):
        assert all(p.is_alive() for p in run), log.read_text()[-3000:]
        time.sleep(0.01)
    family = [p for parent in run for p in (psutil.Process(parent.pid), *psutil.Process(parent.pid).children(True))]
    for p in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            p.kill()
    for p in run:
        p.join(300)
    psutil.wait_procs(family, timeout=900)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every run below, two at a time: {("whole" or "killed", name): folder}. Killed ones have been resumed."""
    root = tmp_path_factory.mktemp("runs")
    write_folder(root / "set")
    write_fork(root / "mine.py")

    def flags(kind, name, extra):
        own = [str(root / "set") if f == "FOLDER" else f for f in extra]
        return [*FLAGS, *own, "--output-dir", str(root / kind), "--run-name", name]

    def whole(name):
        script, processes, extra = WHOLE[name]
        log, own = root / f"whole {name}.txt", flags("whole", name, extra)
        if script == "mine":  # as a user runs it, and with its pictures
            with open(log, "w") as out:
                command = [sys.executable, root / "mine.py", *own]
                subprocess.run(command, stdout=out, stderr=out, timeout=900, check=True)
        else:
            launch.finish(script, own, log, processes)

    def killed(name):
        _, script, processes, extra = KILLED[name]
        folder = root / "killed" / name
        kill_at(KILL, folder, script, processes, flags("killed", name, extra), root / f"killed {name}.txt")
        last = next(iter(engine.checkpoints.checkpoints_of(folder)), None)
        assert last and last.stem != f"step_{STEPS}", "killed too early or too late"
        last.with_name("step_9.tmp").write_bytes(b"cut")  # what a crash inside a save leaves
        log = root / f"resumed {name}.txt"
        launch.finish(script, ["--resume", str(folder)], log, processes)
        assert f"resumed {last} at step {last.stem[5:]} of {STEPS}" in log.read_text()

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(whole, name) for name in WHOLE] + [pool.submit(killed, name) for name in KILLED]
    for job in jobs:
        job.result()
    places = [("whole", name) for name in WHOLE] + [("killed", name) for name in KILLED]
    return {place: root.joinpath(*place) for place in places}


@pytest.mark.parametrize("name", KILLED)
def test_resumed_run_is_bitwise_the_uninterrupted_one(runs, name):
    ours, whole = runs["killed", name], runs["whole", KILLED[name][0]]
    assert equal_files(ours / "model.safetensors", whole / "model.safetensors")
    # weights, tau, optimiser, random state of each process
    assert equal_files(*(folder / "checkpoints" / "step_12.pt" for folder in (ours, whole)))
    ours, whole = (engine.processes.read_json(folder / "summary.json") for folder in (ours, whole))
    assert ours["test"] == whole["test"] and ours.get("eval_epoch") == whole.get("eval_epoch")


@pytest.mark.parametrize("name", KILLED)
def test_metrics_have_every_step_once(runs, name):
    ours, whole = rows(runs["killed", name]), rows(runs["whole", KILLED[name][0]])
    evaluated = [0, 4, 8, STEPS] if name == "schedule" else [0, STEPS]
    steps = [(s, False) for s in range(1, STEPS + 1)] + [(s, True) for s in evaluated]
    assert [(r["step"], "eval" in r) for r in ours] == sorted(steps)

    def untimed(rows):
        return [{k: v for k, v in r.items() if k not in ("step_s", "data_s", "samples_per_s")} for r in rows]
    assert untimed(ours) == untimed(whole)


def test_each_process_has_random_numbers_of_its_own(runs):
    """Those of dropout: the same on all processes, it would drop the same units of every part of the batch."""
    path = runs["whole", "two processes"] / "checkpoints" / "step_12.pt"
    first, second = (of["cpu"] for of in torch.load(path, weights_only=True)["processes"])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["folder, 0 workers", "folder, 2 workers"])
def test_learnable_tau_goes_on(runs, name):
    taus = [r["tau"] for r in rows(runs["killed", name]) if "tau" in r]
    assert len(set(taus)) == STEPS
    last = tensors_of(runs["killed", name], 12)
    assert taus[-1] == pytest.approx(last["own/tau.log_tau"].exp().item(), rel=1e-6)


def test_last_two_checkpoints_are_kept(runs):
    for (kind, _), folder in runs.items():
        left = sorted(p.name for p in (folder / "checkpoints").iterdir())
        assert [p for p in left if not p.endswith(".tmp")] == KEPT
        assert engine.checkpoints.checkpoints_of(folder)[0].stem == "step_12"
        if kind == "whole":
            assert left == KEPT


def test_a_run_holds_nothing_that_runs_code(runs):
    """A checkpoint is read with weights_only=True."""
    for folder in runs.values():
        suffixes = {p.suffix for p in folder.rglob("*") if p.is_file() and ".tmp" not in p.parent.name}
        assert suffixes <= {".json", ".jsonl", ".safetensors", ".txt", ".png", ".pt", ".tmp"}


# ----------------------------------------------- a fork ---------------------------------------------------------------
def test_a_fork_is_another_script(runs, tmp_path, monkeypatch, capsys):
    """Its name stands in its folder, its args and its banner, it knows its flag again; its temperature serves loss, log
    and Fig. 2."""
    folder = runs["whole", "fork"]
    assert {engine.processes.read_json(folder / file)["script"] for file in ("args.json", "summary.json")} == {"mine"}
    assert (folder.parents[1] / "whole fork.txt").read_text().startswith("mine.py\n")
    temo.main(temo.parse_args([*FLAGS, "--max-steps", "1", "--dataset", str(folder.parents[1] / "set"),
                               "--output-dir", str(tmp_path), "--run-name", "a"]))
    ours, theirs = (next(r for r in rows(f) if "tau_pos" in r) for f in (folder, tmp_path / "a"))
    assert ours["pos_cos"] == pytest.approx(theirs["pos_cos"], rel=1e-5)  # at the first step the weights are the same
    assert ours["tau_pos"] != theirs["tau_pos"] and ours["L_M-MM"] != theirs["L_M-MM"]
    pictures = {p.name for p in folder.glob("*.png")}
    assert {"curves.png", "evaluation.png", "similarities.png", "positive_pairs.png", "retrieval.png"} <= pictures
    with pytest.raises(SystemExit):
        temo.parse_args(["--resume", str(folder)])
    assert "a run of mine.py, not of temo.py" in capsys.readouterr().err
    monkeypatch.syspath_prepend(folder.parents[1])
    assert importlib.import_module("mine").parse_args(["--resume", str(folder)]).tau_power == 0.7


def test_a_fork_is_evaluated(runs):
    folder = runs["whole", "fork"]
    flags = ["--checkpoint", str(folder), "--cpu", "--tasks", "retrieval"]
    result, = eval_py.main(eval_py.parse_args(flags))["datasets"].values()
    trained, = engine.processes.read_json(folder / "summary.json")["test"].values()
    assert all(result["metrics"][k] == trained[k] for k in ("text_to_image", "R-Mean"))


# ----------------------------------------------- the rest in this process --------------------------------------------
@pytest.fixture
def resume_here(runs, tmp_path):
    """A copy of the finished folder run, and a function that resumes it."""
    shutil.copytree(runs["whole", "folder"], tmp_path / "run")
    return tmp_path / "run", lambda *flags: temo.main(temo.parse_args(["--resume", str(tmp_path / "run"), *flags]))


def test_resume_of_a_finished_run_only_evaluates(resume_here, runs):
    folder, resume = resume_here
    before = engine.processes.read_json(folder / "summary.json")
    summary = resume()
    assert summary["steps"] == STEPS and summary["val"] == before["val"] and summary["test"] == before["test"]
    assert equal_files(folder / "model.safetensors", runs["whole", "folder"] / "model.safetensors")
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == KEPT
    assert kinds(folder) == kinds(runs["whole", "folder"])


def test_a_run_resumed_at_its_end_is_evaluated_in_float32(tmp_path, monkeypatch):
    """As one that was not stopped, and as eval.py does it; its time goes on from where it was saved."""
    halves, forward = [], common.TextEncoder.forward

    def watch(tower, *args, **more):
        halves.append((tower.training, torch.is_autocast_enabled("cpu")))
        return forward(tower, *args, **more)
    monkeypatch.setattr(common.TextEncoder, "forward", watch)
    write_folder(tmp_path / "set", 120)
    flags = [*FLAGS, "--dataset", str(tmp_path / "set"), "--max-steps", "3", "--mixed-precision", "bf16", "--row", "e"]
    before = temo.main(temo.parse_args([*flags, "--output-dir", str(tmp_path), "--run-name", "run"]))
    assert halves == [(False, True)] + [(True, True)] * 3 + [(False, False)] * 2  # val, three steps, val and test
    halves.clear()
    (tmp_path / "run" / "summary.json").unlink()
    saved = tmp_path / "run" / "checkpoints" / "step_3.pt"
    torch.save(torch.load(saved, weights_only=True) | {"wall_s": 1000.0}, saved)
    after = temo.main(temo.parse_args(["--resume", str(tmp_path / "run")]))
    assert halves == [(False, False)] * 2 and 1000 < after["wall_s"] < 2000
    assert after["val"] == before["val"] and after["test"] == before["test"] and after["steps"] == 3


def test_resume_before_the_first_checkpoint_starts_again(resume_here, runs):
    folder, resume = resume_here
    shutil.rmtree(folder / "checkpoints"), (folder / "model.safetensors").unlink()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step_5.tmp").write_bytes(b"cut")  # killed inside its first save
    resume()
    assert equal_files(folder / "model.safetensors", runs["whole", "folder"] / "model.safetensors")
    assert kinds(folder) == kinds(runs["whole", "folder"])
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == KEPT


def test_resume_keeps_the_tokenizer_of_the_run(resume_here, monkeypatch):
    """Its numbers belong to the embeddings of the checkpoint: captions that changed since must not renumber them."""
    folder, resume = resume_here
    tokenizer = (folder / "tokenizer" / "tokenizer.json").read_bytes()
    train = common.train_wordpiece
    monkeypatch.setattr(encoders.texts, "train_wordpiece", lambda captions: train([*captions, *["zebra"] * 9]))
    resume()
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer


def test_tokenizer_is_the_same_each_time():
    pairs = [(a, b) for a in ("red", "green", "blue", "grey") for b in ("box", "ball", "tree", "house", "boat")]
    captions = [f"{a} {b} {a}{b} number {i}" for i, (a, b) in enumerate(pairs)]
    assert len({common.train_wordpiece(captions, vocabulary=80).backend_tokenizer.to_str() for _ in range(5)}) == 1
