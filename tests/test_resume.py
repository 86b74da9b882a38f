"""A run that was killed or stopped and resumed is bitwise the whole one; what stops all processes;
tools.check."""

import json
import math
import os
import re
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from contrastive import core
from contrastive.data.batches import epoch_batches
from contrastive.engine.checkpoints import checkpoints_of
from contrastive.core.files import logged_rows, read_json, whole_file, write_json, write_tensors
from contrastive.core.processes import UserError, rank
from contrastive.engine.run import Run, make_folder

import psutil
import pytest
import torch

import helpers
import launch
import mama
import mmts
import temo
from helpers import equal_files, load_file, rows, tensors_of
from tools import check

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVED, KILLED = 12, 5, 7  # an epoch has nine steps
FLAGS = [
    *"--cpu --image-size 16 --embed-dim 16 --batch-size 8 --lr 3e-4".split(),
    *"--loss infonce --learnable-tau".split(),
    *f"--max-steps {STEPS} --save-every {SAVED} --log-every 1 --eval-every 0 --workers 0".split(),
    "--max-bad-fraction",
    "0.1",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """108 pictures, 72 for training, of which one of the second batch cannot be read."""
    csv = helpers.write_captions(tmp_path_factory.mktemp("data"), 108)
    train = common.load_data(str(csv), "train")
    bad = train.key(int(next(epoch_batches(len(train), 8, 42, 1, 2))[1][3]))
    (csv.parent / bad).write_bytes(helpers.TRUNCATED)
    return csv


def run(folder, data, *flags):
    return helpers.run_script(temo, folder, *flags, base=[*FLAGS, "--dataset", data])


def resume(folder, *flags):
    return temo.main(temo.parse_args(["--resume", str(folder), *map(str, flags)]))


@pytest.mark.parametrize("limit", [1000, 300_000, 1_000_000, 1_234_567])
def test_a_full_disk_is_named_and_leaves_no_half_written_file(limit, tmp_path):
    """The system's limit of a file's size stands for the disk's."""
    state = {str(k): torch.randn(10_000) for k in range(40)}
    writers = {
        "a.json": lambda path: write_json(path, "x" * 2_000_000),
        "a.safetensors": lambda path: write_tensors(path, state),
        "a.pt": lambda path: save_whole(path, state),
    }
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():
        path = tmp_path / name
        path.write_text("before")
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(UserError, match=f"{name}: .*File too large"):
                write(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(writers)


def save_whole(path, state):
    """As a checkpoint is written."""
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)


def codes(processes, place, work):
    """Exit codes of forks that are the ranks of a run."""
    place.mkdir()
    if processes == 1:
        return [launch.ended(launch.forked(work, place / "log"))]
    return [code for code, _ in launch.ranks(place, lambda _: work())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, tiny):
    """{processes: (a whole run, one that was killed and resumed)}; with two of them in chunks and
    with dropout."""
    root, done, folders = tmp_path_factory.mktemp("runs"), Run.end_step, {}
    bert = ["--text-encoder", tiny("bert")[0], "--text-length", 12]

    def done_and_killed(run, *args, **more):
        done(run, *args, **more)
        if run.step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    for processes, flags, of_killed in (
        (1, [], ["--workers", 2]),
        (2, ["--workers", 1, "--chunk-size", 3, *bert], []),
    ):
        whole, killed = folders[processes] = (
            root / f"whole {processes}",
            root / f"killed {processes}",
        )
        logs = [root / f"logs {processes} {k}" for k in range(3)]
        assert codes(processes, logs[0], lambda: run(whole, data, *flags)) == [0] * processes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "end_step", done_and_killed)
            found = codes(processes, logs[1], lambda: run(killed, data, *flags, *of_killed))
        assert found == [-signal.SIGKILL] * processes
        assert [p.stem for p in checkpoints_of(killed)] == [f"step_{SAVED}"]
        # what a crash inside a save leaves
        (killed / "checkpoints" / "step_9.tmp").write_bytes(b"cut")
        assert codes(processes, logs[2], lambda: resume(killed)) == [0] * processes
    return folders


def same(a, b):
    """Are log, bad samples and weights of two runs the same?"""
    same_bad = (a / "bad_samples.txt").read_text() == (b / "bad_samples.txt").read_text()
    same_weights = equal_files(a / "model.safetensors", b / "model.safetensors")
    return same_bad and same_weights and untimed_rows(a) == untimed_rows(b)


def untimed_rows(folder):
    """The log of a run without its times."""
    log = rows(folder)
    for row in log:
        for name in ("step_s", "data_s", "samples_per_s"):
            row.pop(name, None)
    return log


# ----------------------------------------------- kill -9 ------------------------------------------
@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(runs, processes):
    whole, killed = runs[processes]
    last = killed / "checkpoints" / "step_12.pt"  # tau, optimiser, each process's random state
    assert same(whole, killed) and equal_files(whole / "checkpoints" / "step_12.pt", last)
    assert read_json(whole / "summary.json")["test"] == read_json(killed / "summary.json")["test"]
    assert [row["step"] for row in rows(killed)] == [*range(13), 12]
    assert [row["step"] for row in rows(killed) if "eval" in row] == [0, 12]
    assert (killed / "bad_samples.txt").read_text().count("\n") == 1
    tau = tensors_of(killed, 10)["tau/log_tau"].exp().item()  # which step 11 used
    assert rows(killed)[-3]["tau"] == pytest.approx(tau, rel=1e-6) != rows(killed)[1]["tau"]
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step_10.pt", "step_12.pt"]
    seeds = []  # a random state begins with its seed
    for process in torch.load(last, weights_only=True)["processes"]:
        seeds.append(process["cpu"][:8].view(torch.int64).item())
    assert seeds == [42, 43][:processes]  # else dropout were the same on all


@pytest.fixture
def folder(runs, tmp_path):
    """A copy of the finished run of one process."""
    return shutil.copytree(runs[1][0], tmp_path / "run")


def test_a_finished_run_is_only_evaluated(folder, runs, monkeypatch):
    monkeypatch.setattr("contrastive.engine.log.commit", lambda: "a later one")
    before, saved = read_json(folder / "summary.json"), folder / "checkpoints" / "step_12.pt"
    torch.save(torch.load(saved, weights_only=True) | {"wall_s": 1000.0}, saved)
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    written = tokenizer.stat().st_mtime_ns
    after = resume(folder)
    # a kill at the end leaves no half of what a resume reads
    assert tokenizer.stat().st_mtime_ns == written
    assert after["steps"] == STEPS
    assert after["val"] == before["val"]
    assert after["test"] == before["test"]
    assert same(folder, runs[1][0]) and 1000 < after["wall_s"] < 2000
    assert f"commit {after['commit']}" in after["versions"]  # that of the start, in both


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, data, monkeypatch):
    monkeypatch.setattr("contrastive.engine.run.time.strftime", lambda _: "20260101-000000")
    words = [*FLAGS, "--dataset", str(data), "--max-steps", "1", "--output-dir", str(tmp_path)]
    for loss in ("infonce", "cwcl"):
        flags = [*words, "--loss", loss, "--no-learnable-tau"]
        temo.main(temo.parse_args(flags))
    name = f"temo__{data.stem}__s42__20260101-000000"
    assert read_json(tmp_path / name / "args.json")["loss"] == "infonce"
    assert read_json(tmp_path / f"{name}-2" / "args.json")["loss"] == "cwcl"
    with ThreadPoolExecutor(8) as pool:  # at once
        folders = [*pool.map(lambda _: make_folder(tmp_path / "at once"), range(40))]
    assert len({*folders}) == 40 and all(folder.is_dir() for folder in folders)


def test_at_its_end_it_is_evaluated_in_float32(tmp_path, data, monkeypatch):
    """As eval.py does it."""
    halves, forward = [], common.TextEncoder.forward

    def watch(tower, *args, **more):
        halves.append((tower.training, torch.is_autocast_enabled("cpu")))
        return forward(tower, *args, **more)

    monkeypatch.setattr(common.TextEncoder, "forward", watch)
    run(tmp_path / "run", data, "--max-steps", 3, "--mixed-precision", "bf16")
    # val in the steps' precision, three steps, then val and test in float32
    training = [half for half in halves if half[0]]
    assert training == [(True, True)] * 3 and halves[-2:] == [(False, False)] * 2


def test_more_steps_are_remembered_also_on_fewer_processes(runs, tmp_path, capsys):
    folder = shutil.copytree(runs[2][0], tmp_path / "run")
    assert resume(folder, "--max-steps", 13)["steps"] == 13
    assert "--resume: 2 processes before, 1 now: equal but for rounding" in capsys.readouterr().out
    assert temo.parse_args(["--resume", str(folder)]).max_steps == 13


def without_last_rows(data):
    fewer = data.with_name("fewer.csv")
    fewer.write_text("\n".join(data.read_text().splitlines()[:-9]))
    return fewer


def resume_with(folder, data):
    """A resume with other rows, of which a checkpoint has a mark."""
    args = temo.parse_args(["--resume", str(folder), "--max-steps", "14"])
    args.dataset = str(data)
    temo.main(args)


def test_what_does_not_fit_the_run_is_refused(folder, data):
    """Before args.json is written: else the next --resume without any flag would be refused as
    well."""
    before = (folder / "args.json").read_text()
    with pytest.raises(UserError, match="step_12.pt: is beyond the 3 steps"):
        resume(folder, "--max-steps", 3)
    for _ in range(2):
        with pytest.raises(UserError, match=f"{folder}: holds a run already; --resume {folder}"):
            run(folder, data)
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # a run that has just begun has none
    with pytest.raises(UserError, match="--resume: the run had .*, now .*: give it the same data"):
        resume_with(folder, without_last_rows(data))
    assert (folder / "args.json").read_text() == before


def test_an_older_checkpoint_is_refused_while_a_newer_one_lies_beside_it(folder, runs):
    """Without it, the older one goes on to the same end. What is refused leaves the folder."""
    older = folder / "checkpoints" / "step_10.pt"
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="newer checkpoints lie beside it \\(step_12.pt\\)"):
        resume(older)
    assert (folder / "metrics.jsonl").read_text() == before
    (folder / "checkpoints" / "step_12.pt").unlink()
    resume(older)
    assert same(folder, runs[1][0])


def test_a_longer_run_removes_the_end_of_the_shorter_one(folder, monkeypatch):
    """eval.py must not read its weights as those of the longer run."""
    with monkeypatch.context() as patch:
        patch.setattr(Run, "end_step", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            resume(folder, "--max-steps", 14)
    assert not (folder / "summary.json").exists() and not (folder / "model.safetensors").exists()
    assert [path.stem for path in checkpoints_of(folder)] == ["step_12", "step_10"]
    assert resume(folder)["steps"] == 14 and (folder / "model.safetensors").exists()


def test_the_best_evaluation_is_kept_and_tested(folder, data):
    """Beside the last two checkpoints; its weights are those of model.safetensors."""
    words = ["--eval-epoch", "best", "--eval-every", 3]
    summary = run(folder.parent / "best", data, *words)
    scores = {}
    for row in rows(folder.parent / "best"):
        if "eval" in row and row["step"] > 0:
            (metrics,) = row["eval"].values()
            scores[row["step"]] = metrics["R-Mean"]
    best = max(scores, key=scores.get)  # of ties the first
    assert summary["tested_step"] == best
    saved = tensors_of(folder.parent / "best", best)
    for name, x in load_file(folder.parent / "best" / "model.safetensors").items():
        assert torch.equal(x, saved[f"model/{name}"]), name


def test_a_row_that_a_crash_has_cut_is_left_out(folder):
    """Also where the cut is at the end of an inner dict, as that of an evaluation."""
    path, log = folder / "metrics.jsonl", rows(folder)
    text = path.read_text().rstrip("\n")
    assert text.endswith("}}")
    path.write_text(text[:-1])
    assert logged_rows(path) == log[:-1]
    assert resume(folder)["steps"] == STEPS and len(rows(folder)) == len(log)


def stop(*_, **__):
    raise RuntimeError("stopped")


# ----------------------------------------------- signals, NaN -------------------------------------
def put_off(monkeypatch, lagged):
    """The report of a step is read a step later, as on a GPU."""
    delay = property(lambda run: int(lagged), lambda run, value: None)
    monkeypatch.setattr(Run, "report_delay", delay, raising=False)


def at_step(monkeypatch, step, what):
    """Calls what() within a step, counted from 0."""
    learning_rate = common.learning_rate

    def rate_of_step(k, steps, args):
        if k == step:
            what()
        return learning_rate(k, steps, args)

    monkeypatch.setattr(common, "learning_rate", rate_of_step)


def error_of(ended):
    """The one line with which two processes ended, both with code 2."""
    (code, said), (other, theirs) = ended
    assert code == other == 2 and "Traceback" not in said + theirs
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize(
    "number, code, lagged", [(signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)]
)
def test_a_signal_leaves_a_checkpoint_from_which_the_run_goes_on(  # noqa: PLR0917
    number, code, lagged, data, runs, tmp_path, monkeypatch, capsys
):
    put_off(monkeypatch, lagged)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        at_step(patch, 2, lambda: os.kill(os.getpid(), number))
        run(tmp_path / "a", data)
    last = 4 if lagged else 3
    assert end.value.code == code
    assert [p.stem for p in checkpoints_of(tmp_path / "a")] == [f"step_{last}"]
    said = capsys.readouterr().out
    assert f"stopped after step {last} by {number.name}; to go on: python" in said
    assert f"--resume {tmp_path}/a" in said
    resume(tmp_path / "a")
    assert same(tmp_path / "a", runs[1][0])


def test_a_signal_to_one_process_ends_all_and_their_workers(data, tmp_path, monkeypatch):
    def stop():
        workers = [child.pid for child in psutil.Process().children(recursive=True)]
        (tmp_path / f"workers{rank()}").write_text(json.dumps(workers))
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    at_step(monkeypatch, 2, stop)
    ended = launch.ranks(tmp_path, lambda _: run(tmp_path / "a", data, "--workers", 1))
    assert [code for code, _ in ended] == [143, 143]
    assert "Traceback" not in ended[0][1] + ended[1][1]
    assert [p.stem for p in checkpoints_of(tmp_path / "a")] == ["step_3"]
    workers = []
    for process in (0, 1):
        workers += json.loads((tmp_path / f"workers{process}").read_text())
    left = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
    assert len(workers) == 2 and not psutil.wait_procs(left, timeout=20)[1], "workers are left"


@pytest.mark.parametrize("lagged", [False, True])
def test_a_loss_that_is_not_finite_stops_all_before_anything_is_written(
    lagged, data, tmp_path, monkeypatch
):
    """In step 4 of one process. Where it is read late, not even the checkpoint of a signal is
    written."""
    loss, now, every = temo.multimodal_loss, [], 8 if lagged else 4
    put_off(monkeypatch, lagged)
    at_step(monkeypatch, 4, lambda: now.append(4))
    if lagged:
        at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(
        temo, "multimodal_loss", lambda *x: loss(*x) * (math.nan if now and rank() else 1)
    )
    # of the second process, before it speaks
    monkeypatch.setattr(core.processes.time, "sleep", lambda _: None)
    error = error_of(
        launch.ranks(
            tmp_path,
            lambda _: run(tmp_path / "a", data, "--log-every", every, "--save-every", every),
        )
    )
    numbers = r": try .*; loss \d\.\d+, tau 0\.1\d+"  # of the main process
    words = rf"not finite at step 4{numbers}; process 1: norms up to .*, keys \[.\d+.png"
    assert re.search(words, error)
    assert max(row["step"] for row in rows(tmp_path / "a")) == (0 if lagged else 4)
    assert [p.name for p in checkpoints_of(tmp_path / "a")] == ([] if lagged else ["step_4.pt"])


# ----------------------------------------------- tools.check: a fork, faults --------------------
TINY = "--dataset moving-emoji --clips 32 8 8 --frames 2 --embed-dim 8 --batch-size 8".split()
MEMORY = '''
class Memory(nn.Module):
    """-log softmax of each video's pair among the texts of this batch and the last `size`; (B, D)
    each -> (B,)."""

    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("texts", normalize(torch.randn(size, dim)))   # (size, D)

    def forward(self, video, text, tau):
        texts = gather(normalize(text))                                    # (N, D)
        logits = normalize(video) @ torch.cat([texts, self.texts]).T / tau   # (B, N + size)
        self.texts = torch.cat([texts.detach(), self.texts])[:len(self.texts)]
        return F.cross_entropy(logits, positive_index(video, text), reduction="none")
'''
FLAGS_RULER = "# ======================================================= flags ==="
MAKE_OPTIMIZER = "    optimizer = common.make_optimizer([model, loss_modules], args)\n"
FORK = [  # of mama.py: old, new
    (FLAGS_RULER, f"{MEMORY}\n\n{FLAGS_RULER}"),
    (MAKE_OPTIMIZER, f"    memory = Memory(32, args.embed_dim)\n{MAKE_OPTIMIZER}"),
    ("run.resume(raw_model, optimizer, ", "run.resume(raw_model, optimizer, memory=memory, "),
    ("sample_loss = criterion(video, text) ", "sample_loss = memory(video, text, tau) ")]
FAULTS = {
    "": [],
    "kill and resume": [("memory=memory, ", "")],
    "two processes": [("texts = gather(normalize(text))", "texts = normalize(text)")]}


def checked(path, flags, capsys):
    """(exit code, {promise: its line}) of a check."""
    code = check.main([str(path), *flags])
    said = capsys.readouterr().out
    lines = {}
    for variant in check.VARIANTS:
        lines[variant.name] = re.search(rf"^  {variant.name} .*(\n {{19}}.*)?", said, re.M)[0]
    return code, lines


def test_an_error_with_chunks_is_not_left_out(tmp_path, capsys):
    """The banner names --chunk-size, too, but the error is that the loss is not finite."""
    line = "        accelerator.backward(loss)\n"
    infinite = "        if args.chunk_size:\n            loss = loss * float('inf')\n"
    own = helpers.fork(temo, tmp_path, line, infinite + line)
    flags = [*check.SMALL, *TINY, *check.FIXED, "--cpu", "--output-dir", str(tmp_path)]
    chunks = next(variant for variant in check.VARIANTS if variant.name == "chunks")
    assert not check.keeps_promise(chunks, own, flags, tmp_path)
    said = capsys.readouterr().out
    assert "--chunk-size" in said and "not finite" in said and "DIFFERS (exit code 2)" in said


def test_a_check_that_is_refused_is_the_line_of_its_error(tmp_path):
    """Without the progress bar that stands open above it."""
    flags = [*check.SMALL, *TINY, *check.FIXED, "--cpu", "--output-dir", str(tmp_path)]
    with pytest.raises(UserError, match="^--clusters captions: n_samples=96 .*$"):
        check.check(mmts, flags, tmp_path)


def test_on_a_gpu_rounding_is_allowed_and_one_gpu_has_no_two_processes(capsys):
    assert check.variants_on(0) == check.VARIANTS
    assert {variant.name: variant.limits for variant in check.variants_on(1)} == {
        "chunks": check.LIMITS, "kill and resume": check.LIMITS}
    assert "two processes    left out; they need 2 GPUs, or --cpu" in capsys.readouterr().out
    assert len(check.variants_on(2)) == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fork_keeps_them_and_a_fault_is_found(fault, tmp_path, capsys):
    """Of a memory of texts beside the method; each fault breaks the promise of its name alone."""
    own = mama
    for old, new in FORK + FAULTS[fault]:
        own = helpers.fork(own, tmp_path, old, new)
    code, said = checked(own.__file__, [*TINY, "--weighting", "none", "--tau", "0.1"], capsys)
    wrong = [promise for promise, line in said.items() if "DIFFERS" in line]
    assert code == bool(fault) and wrong == [fault] * bool(fault), said
