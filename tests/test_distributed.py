"""One step on any number of processes: gradients and MAMA's weights of 2 and 4 gloo processes are
those of one with the same global batch. (Whole runs, and queues: test_promises.py.)"""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import common
from contrastive import CORES, core
from contrastive.core.files import read_json
from contrastive.core.processes import UserError, barrier, gather, on_main, rank, world_size
from contrastive.evaluation.embed import gather_rows

import accelerate
import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.state import DistributedType
from torch.nn.parallel import DistributedDataParallel

import launch
import mama
import temo
from helpers import evaluated, run_script, unit, write_captions
from loss_table import LOSSES, D, N, parameters

ROOT = Path(__file__).resolve().parents[1]
WIDTH, WHOLE = 12, slice(0, N)  # of the encoders' inputs; the rows of the global batch
IN_CHUNKS = "temo", "multimodal", "cwcl", "mmts, max-margin", "mama"
STEPS = [(name, 0) for name in LOSSES] + [(name, 3) for name in IN_CHUNKS]  # loss, chunk


# ----------------------------------------------- what a process computes --------------------------
class Encoders(nn.Module):
    """Inputs (b, 4, WIDTH) -> I, T, I~, T~ of (b, D)."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, D))
        self.text = nn.Linear(WIDTH, D)

    def forward(self, x):
        image, text, image_aug, text_aug = x.unbind(1)
        return self.image(image), self.text(text), self.image(image_aug), self.text(text_aug)


def build_encoders(dropout=0.0):
    torch.manual_seed(0)
    return Encoders(dropout).double()


def inputs(rows):
    """These rows of the global batch, (b, 4, WIDTH); texts are near their images."""
    x = torch.randn(N, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[:, 1:] += x[:, :1]
    return x[rows]


def step(name, rows, chunk=0, dropout=0.0):
    """The mean loss, and the gradients of encoders and learnt tau, as a script's loop has them."""
    model, p = build_encoders(dropout), parameters(rows)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)  # DDP must outlive the backward
    assert isinstance(prepared, DistributedDataParallel) == (world_size() > 1)
    grad_cache = common.GradCache(prepared, accelerator, chunk)
    loss = LOSSES[name](grad_cache.encode(x=inputs(rows)), p)
    accelerator.backward(loss)
    trained = [*model.parameters()]
    if p.tau.grad is not None:
        common.average_gradients([p.tau])
        trained.append(p.tau)
    means = core.processes.mean_over_processes({"loss": loss.detach()}, "cpu")
    mean_loss = torch.tensor(means["loss"], dtype=torch.float64)
    return [mean_loss, *(x.grad.clone() for x in trained)]


def weights_of_mama(rows):
    """Gradients of the weight network and weights of pairs, for these rows of two batches."""
    x = inputs(rows).unbind(1)
    batch, meta_batch = x[:2], x[2:]
    theta = {"video": unit(WIDTH, D, seed=4), "text": unit(WIDTH, D, seed=5)}

    def losses(parameters, batch):
        video, text = batch
        return mama.angular_margin_loss(
            video @ parameters["video"], text @ parameters["text"], 0.2, 0.2)

    torch.manual_seed(0)
    net = mama.WeightNet(10).double()
    results = []
    for method in ("forward", "second-order"):
        results += mama.weightnet_gradient(losses, theta, batch, meta_batch, net, 0.05, method)
    gain = mama.meta_gain(losses, theta, batch, meta_batch)
    results.append(gather(mama.l2rw_weights(gain)))
    results.append(gather(mama.spl_weights(losses(theta, batch), 0.0)))
    return results


def embeddings_in_pieces(_):
    """Of an evaluation, two rows at a time: the first process has one, the last the others."""
    x = torch.arange(15.0).view(5, 3)
    parts = []
    if rank() == 0:
        parts.append(x[:1])
    if rank() == world_size() - 1:
        parts += [x[1:3], x[3:]]
    return [gather_rows(parts, piece=2)]


def results_of(rows):
    """{name: tensors} that a process with these rows has, together with the others."""
    results = {
        "mama": weights_of_mama(rows), "pieces": embeddings_in_pieces(rows)}
    for name, chunk in STEPS:
        results[name, chunk] = step(name, rows, chunk)
    return results


def largest_error(tensors, expected):
    """Of the tensors of two lists, relative in their norms."""
    errors = []
    for x, y in zip(tensors, expected, strict=True):
        errors.append(((x - y).norm() / y.norm()).item())
    return max(errors)


# ----------------------------------------------- gradients on 1, 2 and 4 processes ----------------
@pytest.fixture(scope="module", params=[2, 4])
def errors(request, tmp_path_factory):
    """Of each process of 2 or 4: {name: error against one process}."""
    folder, size = tmp_path_factory.mktemp("processes"), request.param
    alone = results_of(WHOLE)
    for name, chunk in STEPS:
        alone[name, chunk] = alone[name, 0]

    def compare(place):
        core.processes.join(cpu=True)
        rows = slice(place * N // size, (place + 1) * N // size)
        errors = {}
        for name, tensors in results_of(rows).items():
            errors[name] = largest_error(tensors, alone[name])
        torch.save(errors, folder / f"{place}.pt")

    outcomes = launch.ranks(folder, compare, size)
    assert [code for code, _ in outcomes] == [0] * size, outcomes
    return [torch.load(folder / f"{place}.pt") for place in range(size)]


@pytest.mark.parametrize("name, chunk", STEPS)
def test_gradients_are_those_of_one_process(errors, name, chunk):
    """With chunks, processes wait for each other in the last one only."""
    assert max(ours[name, chunk] for ours in errors) < 1e-10


@pytest.mark.parametrize("name, limit", [("mama", 1e-10), ("pieces", 0)])
def test_processes_together_compute_what_one_does(errors, name, limit):
    assert max(ours[name] for ours in errors) <= limit


def test_chunks_replay_dropout():
    """The second encoding sees the masks of the first: the gradient is that of one graph over the
    same masks."""
    gradients = step("multimodal", WHOLE, 3, dropout=0.5)
    random_number, p, model = torch.rand(1), parameters(), build_encoders(0.5)
    parts = [model(inputs(slice(i, i + 3))) for i in range(0, N, 3)]
    loss = LOSSES["multimodal"]([torch.cat(x) for x in zip(*parts)], p)
    loss.backward()
    expected = [loss.detach(), *(x.grad for x in (*model.parameters(), p.tau))]
    assert largest_error(gradients, expected) < 1e-10
    assert torch.rand(1) == random_number  # the random state goes on as if encoded once


# ----------------------------------------------- how processes start and end ----------------------
def test_all_share_a_failure_of_the_main_process(tmp_path):
    def fail():
        raise UserError("too few")

    def work(_):
        core.processes.join(cpu=True)
        with pytest.raises(UserError, match="too few"):
            on_main(fail)

    assert [code for code, _ in launch.ranks(tmp_path, work)] == [0, 0]


@pytest.mark.parametrize("error, code, words", [
    (UserError("too few"), 2, "error (process 1): too few"),
    (KeyError("a mistake"), 1, "KeyError: 'a mistake'")])
def test_a_process_that_fails_alone_waits_for_no_other(error, code, words, tmp_path):
    def work(place):
        core.processes.join(cpu=True)
        barrier()  # else one of them may still be connecting when the other fails
        if place:
            raise error
        barrier()

    (other_code, _), (own_code, output) = launch.ranks(tmp_path, work)
    assert own_code == code and other_code
    assert words in output


NO_FLAGS = Namespace(cpu=True, tracker="", mixed_precision="no", output_dir=".", compile=False)


def test_a_sharded_model_is_refused(monkeypatch):
    """FSDP and its like have no gradient of the whole batch."""
    sharded = Namespace(distributed_type=DistributedType["FSDP"], log_with=[])
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: sharded)
    with pytest.raises(UserError, match="FSDP"):
        core.processes.make_accelerator(NO_FLAGS)


def test_no_variable_of_accelerate_divides_the_gradient(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    x = torch.ones((), requires_grad=True)
    core.processes.make_accelerator(NO_FLAGS).backward(3 * x)
    assert x.grad == 3


def test_batchnorm_on_several_cpus_is_evaluated_as_it_is_saved(tmp_path):
    """Each process has its own statistics in training; those of the first are saved."""
    data = write_captions(tmp_path / "data", 60)
    flags = (
        "--cpu --image-encoder test_resnet --image-size 32 --embed-dim 16 --batch-size 8 "
        "--loss infonce --max-steps 3 --workers 0 --log-every 1").split()
    ended = launch.ranks(
        tmp_path, lambda _: run_script(temo, tmp_path / "run", *flags, "--dataset", data))
    assert [code for code, _ in ended] == [0, 0], ended
    trained = read_json(tmp_path / "run" / "summary.json")["test"][str(data)]
    loaded = evaluated(tmp_path / "run", "--tasks", "gap")[str(data)]["metrics"]
    assert trained["embeddings"] == pytest.approx(loaded["embeddings"], rel=1e-4)


def test_batchnorm_is_refused_in_chunks():
    """Its statistics would be those of a chunk."""
    args = Namespace(chunk_size=4, image_encoder="resnet50")
    with pytest.raises(UserError, match="resnet50 has BatchNorm"):
        common.sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8)), args)


SCRIPT = """import argparse, os, sys
import contrastive, torch
from contrastive.core import processes
# all cores for each, or one thread would be the launcher's and ours
os.environ["LOCAL_WORLD_SIZE"] = "1"
args = argparse.Namespace(
    cpu=False, tracker="", mixed_precision="no", output_dir=".", compile=False)
with processes.clean_exit():
    model = processes.make_accelerator(args).prepare(torch.nn.Linear(1, 1))
    model(torch.full((1, 1), processes.rank() + 1.0)).sum().backward()     # dy/dw = 1 and 2
    threads, slope = torch.get_num_threads(), next(model.parameters()).grad.item()
    sys.stdout.write(f"{threads} of {contrastive.CORES} {type(model).__name__} {slope}\\n")"""


def test_torchrun_starts_processes_with_all_cores(tmp_path):
    """Though it says one thread; without a GPU and --cpu gradients are averaged, and nothing
    compiles."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "CUDA_VISIBLE_DEVICES": ""}
    del environment["OMP_NUM_THREADS"]
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split()]
    result = subprocess.run(
        [*command, tmp_path / "script.py"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    line = f"{CORES} of {CORES} DistributedDataParallel 1.5"
    assert set(result.stdout.splitlines()) == {line}
