"""One run on any number of processes: real gloo processes against one process with the same global batch; chunks."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import common
from contrastive import CORES, engine
from contrastive.engine.processes import UserError, gather
from contrastive.evaluation.embed import encode_images, gather_rows

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType
from torch.nn.parallel import DistributedDataParallel

import launch
import mama
import ncl
import temperature_schedules as ts
from helpers import unit
from test_losses import LOSSES, D, N, parameters

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 12  # of the towers' inputs
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
IN_CHUNKS = "temo", "multimodal", "cwcl", "mmts, max-margin", "mama"
DEVICE = "cpu"  # benchmarks/gpu.py calls `compare` on cuda, over NCCL


# ----------------------------------------------- gradients on 1, 2 and 4 processes -----------------------------------
class Towers(nn.Module):
    """Inputs (2, b, WIDTH) for each modality -> I, T, I~, T~ of (b, D), in one forward as in temo.py."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, D))
        self.text = nn.Linear(WIDTH, D)

    def forward(self, x):
        image = self.image(torch.cat([x["pixels"][0], x["pixels"][1]]))    # (2b, D)
        text = self.text(torch.cat([x["tokens"][0], x["tokens"][1]]))      # (2b, D)
        (a, b), (c, d) = image.chunk(2), text.chunk(2)
        return a, c, b, d


def towers(dtype, dropout=0.0):
    torch.manual_seed(0)
    return Towers(dropout).to(DEVICE, dtype)


def inputs(rows, dtype=torch.float64):
    """These rows of the global batch, a nested dict of (b, WIDTH) tensors; texts are near their images."""
    x = torch.randn(4, N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[1:] += x[0]
    x = x[:, rows].to(DEVICE, dtype)
    return {"pixels": {0: x[0], 1: x[2]}, "tokens": {0: x[1], 1: x[3]}}


def step(name, dtype, rows, chunk=0, dropout=0.0):
    """Loss and gradients (towers, and tau where it is learnt) of one process's rows, as a script's loop has them."""
    model, p, accelerator = towers(dtype, dropout), parameters(rows, dtype, DEVICE), Accelerator(cpu=DEVICE == "cpu")
    wrapped = accelerator.prepare(model)  # DDP must outlive the backward
    assert isinstance(wrapped, DistributedDataParallel) == dist.is_initialized()
    chunks = common.Chunks(wrapped, wrapped, accelerator, chunk)
    loss = LOSSES[name](chunks.encode(inputs(rows, dtype)), p)
    chunks.backward(loss)
    learnt = [p.tau] if p.tau.grad is not None else []
    common.average_gradients(learnt)
    return loss.detach(), [x.grad.clone() for x in (*model.parameters(), *learnt)]


def of_mama(rows):
    """What MAMA's functions give for these rows of a batch and of meta-data, as all processes have it."""
    x, theta = inputs(rows), {"video": unit(WIDTH, D, seed=4).to(DEVICE), "text": unit(WIDTH, D, seed=5).to(DEVICE)}

    def losses(parameters, k):
        return mama.angular_margin_loss(x["pixels"][k] @ parameters["video"], x["tokens"][k] @ parameters["text"],
                                        0.2, 0.2)
    torch.manual_seed(0)
    net = mama.WeightNet(10).double().to(DEVICE)
    out = {how: mama.weightnet_gradient(losses, theta, 0, 1, net, 0.05, how) for how in ("forward", "second-order")}
    weights = mama.l2rw_weights(losses, theta, 0, 1), mama.spl_weights(losses(theta, 0), 0.5)
    return out | {"l2rw": [gather(weights[0])], "spl": [gather(weights[1])]}


def queues(rows):
    """NCL's and TS's queue after three global batches of which a process has these rows; they hold 1.5 of them."""
    of_ncl, of_ts = ncl.QueryQueue(24, WIDTH).to(DEVICE), ts.Queue(24, WIDTH).to(DEVICE)
    x = inputs(slice(0, N), torch.float32)["tokens"]
    for batch in (x[0], x[1], -x[0]):
        of_ncl.push(batch[rows])
        of_ts.push(batch[rows])
    return of_ncl.get(), of_ts.keys


def on_main(folder, world):
    """What each process gets from long work of the main process that ends well, and from one that fails."""
    def fail():
        raise UserError("too few")

    def write():
        time.sleep(0.5)
        Path(folder, f"done_{world}").write_text("made")
        return "done"
    done = engine.processes.on_main(write)
    try:
        engine.processes.on_main(fail)
    except UserError as error:
        return [done, Path(folder, f"done_{world}").read_text(), str(error)]


def relative(a, b):
    """Largest relative error over the tensors of two lists, in their norms."""
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def group(rank, world, init):
    """Join a group, gloo or on cuda NCCL; the environment is what torchrun sets, for accelerate and clean_exit."""
    card = rank if DEVICE == "cpu" else rank % torch.cuda.device_count()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(card), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      OMP_NUM_THREADS="1")
    backend = os.environ.get("TEST_BACKEND", "gloo" if DEVICE == "cpu" else "nccl")  # of benchmarks/gpu.py
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=world)
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(True)


def compare(rank, folder, worlds=(2, 4), device="cpu"):
    """Everything that needs a group, in one start of four processes: writes {what: difference from one process} per
    world and rank."""
    global DEVICE
    DEVICE = device
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # two ranks may have one card
    torch.set_num_threads(1)
    keys, whole = [(name, dtype) for name in LOSSES for dtype in DTYPES], slice(0, N)
    alone = {k: step(k[0], DTYPES[k[1]], whole) for k in keys}  # before there is a group
    AcceleratorState._reset_state(True)
    embedded, queued, meta = {n: evaluation(n) for n in (7, 3)}, queues(whole), of_mama(whole)
    for world in worlds:
        if rank >= world:
            continue
        rows, out = slice(rank * N // world, (rank + 1) * N // world), {}
        with group(rank, world, f"file://{folder}/init_{world}"):
            for (name, dtype), (expected, expected_grads) in alone.items():
                for chunk in (0, 3) if name in IN_CHUNKS else (0,):
                    loss, grads = step(name, DTYPES[dtype], rows, chunk)
                    mean = engine.processes.mean_over_processes({"L": loss}, DEVICE)["L"]
                    out[f"{name} {chunk} {dtype}"] = [abs(mean / expected.item() - 1), relative(grads, expected_grads)]
            for n, (index, image) in embedded.items():
                both = evaluation(n)
                once = both[0].tolist() == index.tolist() == list(range(n))
                out[f"evaluation {n}"] = [once, (both[1] - image).abs().max().item()]
            out["on main"] = on_main(folder, world)
            out["queues"] = [torch.equal(a, b) for a, b in zip(queues(rows), queued)]
            out["mama"] = [relative(ours, meta[k]) for k, ours in of_mama(rows).items()]
        Path(folder, f"{world}_{rank}.json").write_text(json.dumps(out))


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """What `compare` wrote on each rank of two and of four processes."""
    folder = tmp_path_factory.mktemp("processes")
    launch.spawn(compare, (str(folder),), 4)
    return [json.loads((folder / f"{world}_{rank}.json").read_text()) for world in (2, 4) for rank in range(world)]


@pytest.mark.parametrize("name, chunk", [*((name, 0) for name in LOSSES), *((name, 3) for name in IN_CHUNKS)])
def test_gradients_are_those_of_one_process(differences, name, chunk):
    """Without chunks on one process; with, they wait for each other in the last chunk only."""
    for rank in differences:
        assert max(rank[f"{name} {chunk} fp64"]) < 1e-10
        assert max(rank[f"{name} {chunk} fp32"]) < 1e-4


def test_mama_s_gradients_and_weights_are_those_of_one_process(differences):
    assert max(number for rank in differences for number in rank["mama"]) < 1e-10


def test_work_of_the_main_process_is_waited_for_and_its_failure_is_everyone_s(differences):
    assert all(rank["on main"] == ["done", "made", "too few"] for rank in differences)


def test_queues_hold_the_global_batches_in_order(differences):
    assert all(rank["queues"] == [True, True] for rank in differences)


# ----------------------------------------------- chunks --------------------------------------------------------------
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunks_have_the_gradient_of_the_full_batch(name):
    loss, grads = step(name, torch.float64, slice(0, N))
    for chunk in (1, 3, 15):
        value, parts = step(name, torch.float64, slice(0, N), chunk)
        assert value.item() == pytest.approx(loss.item(), rel=1e-10) and relative(parts, grads) < 1e-10


def test_chunks_replay_dropout():
    """The second encoding sees the masks of the first: the gradient is that of one graph over the same masks."""
    value, grads = step("multimodal", torch.float64, slice(0, N), 3, dropout=0.5)
    after, p, model = torch.rand(1), parameters(), towers(torch.float64, 0.5)
    parts = [model(inputs(slice(i, i + 3))) for i in range(0, N, 3)]
    loss = LOSSES["multimodal"]([torch.cat(e) for e in zip(*parts)], p)
    loss.backward()
    assert relative(grads, [x.grad for x in (*model.parameters(), p.tau)]) < 1e-10
    assert value.item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.rand(1) == after  # and the random state goes on as if encoded once


# ----------------------------------------------- evaluation counts each item once ------------------------------------
class Flat(nn.Module):
    def forward(self, pixels):
        x = pixels.flatten(1)[:, :D]
        return x, None, x


def evaluation(n):
    """encode_images on n pictures: (index, embeddings)."""
    pixels = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    table = common.make_table([["a"]] * n, [str(i) for i in range(n)])
    data = common.Data("made", "val", table, pixels=pixels)
    transform = common.EvalTransform(8, (0.5,) * 3, (0.5,) * 3)
    index, image, _, bad = encode_images(Flat(), data, transform, torch.device(DEVICE), batch=2)
    assert not bad
    return index, image


@pytest.mark.parametrize("n", [7, 3])  # not divisible, and fewer than processes
def test_evaluation_takes_each_item_once(differences, n):
    assert all(rank[f"evaluation {n}"] == [True, 0.0] for rank in differences)


def join():
    """In a fork of this process, which may have had an accelerator of its own."""
    AcceleratorState._reset_state(True)
    engine.processes.join(cpu=True)


def test_rows_of_all_processes_in_pieces(tmp_path):
    """Uneven shares, a process without a row; more pieces than one."""
    def work(rank):
        join()
        mine = torch.arange(15.0).view(5, 3)
        for parts in ([mine[:2], mine[2:]] if rank else [torch.ones(2, 3)], [mine] if rank else []):
            print(gather_rows(parts, piece=2).tolist(), file=sys.stderr)

    full = torch.arange(15.0).view(5, 3).tolist()
    for code, words in launch.ranks(tmp_path, work):
        assert code == 0 and words.splitlines() == [str([[1.0] * 3] * 2 + full), str(full)], words


# ----------------------------------------------- how processes start and end -----------------------------------------
@pytest.mark.parametrize("error, code, words", [(UserError("too few"), 2, r"error \(process 1\): too few\n"),
                                                (KeyError("a mistake"), 1, "Traceback(.|\n)*KeyError: 'a mistake'")])
def test_a_process_that_fails_alone_waits_for_no_other(error, code, words, tmp_path):
    def work(rank):
        join()
        engine.processes.barrier()  # else one of them may still be connecting when the other fails
        if rank:
            raise error
        engine.processes.barrier()
    (other, _), (own, said) = launch.ranks(tmp_path, work)
    assert own == code and other and re.match(words, said)


OF_A_RUN = Namespace(cpu=True, seed=0, tracker="", mixed_precision="no", output_dir=".")


@pytest.mark.parametrize("cpu, local_rank", [(False, True), (True, False)])
def test_several_processes_on_a_cpu_average_gradients_without_the_word(cpu, local_rank, tmp_path, monkeypatch):
    """accelerate wraps no model in DDP there if it is not told --cpu, nor on a card without LOCAL_RANK."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def work(rank):
        if not local_rank:
            del os.environ["LOCAL_RANK"]
        model = engine.processes.set_up(Namespace(**vars(OF_A_RUN) | {"cpu": cpu})).prepare(nn.Linear(1, 1))
        model(torch.full((1, 1), rank + 1.0)).sum().backward()             # dy/dw = 1 and 2
        print(type(model).__name__, next(model.parameters()).grad.item(), file=sys.stderr)

    for code, words in launch.ranks(tmp_path, work):
        assert code == 0 and "DistributedDataParallel 1.5" in words, words


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_sharded_model_is_refused(kind, monkeypatch):
    made = Namespace(distributed_type=DistributedType[kind], log_with=[])
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: made)
    with pytest.raises(UserError, match=f"accelerate is configured for {kind}; only plain processes"):
        engine.processes.set_up(OF_A_RUN)


THREADS = """import argparse, os, sys
from contrastive import engine
from contrastive.engine import processes
import contrastive, torch
os.environ["LOCAL_WORLD_SIZE"] = "1"  # all cores for each, or one thread would be the launcher's and ours
made = processes.set_up(argparse.Namespace(cpu=True, seed=0, tracker="", mixed_precision="no", output_dir="."))
model = type(made.prepare(torch.nn.Linear(1, 1))).__name__  # only --compile compiles, whatever accelerate's file asks
sys.stdout.write(f"{torch.get_num_threads()} of {contrastive.CORES} {model}\\n")"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ONE_CORE = "import os, runpy, sys; os.sched_setaffinity(0, [{core}]); runpy.run_path(sys.argv[1])"  # as SLURM does


@pytest.mark.parametrize("launcher, by_hand, found", [
    (TORCHRUN, "", f"{CORES} of {CORES} DistributedDataParallel"),
    ([sys.executable, "-m", "accelerate.commands.launch"], "", f"{CORES} of {CORES} Linear"),
    ([sys.executable], "1", f"1 of {CORES} Linear"), ([sys.executable, "-c", ONE_CORE], "", "1 of 1 Linear")])
def test_threads_are_those_of_the_user_and_not_of_the_launcher(launcher, by_hand, found, tmp_path):
    """Without OMP_NUM_THREADS torchrun and accelerate launch tell each process to take one thread."""
    (tmp_path / "threads.py").write_text(THREADS)
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    env |= {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"} | ({"OMP_NUM_THREADS": by_hand} if by_hand else {})
    command = [word.format(core=min(os.sched_getaffinity(0))) for word in launcher]
    done = subprocess.run([*command, tmp_path / "threads.py"], env=env, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == {found}
