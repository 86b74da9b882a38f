"""One run on any number of processes: real gloo processes against one process with the same global batch."""

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
from contrastive.engine.processes import UserError, flatten
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
import mmts
import ncl
import temo
from helpers import write_captions

ROOT = Path(__file__).resolve().parents[1]
N, WIDTH, D = 16, 12, 8  # global batch, input width, embedding width
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
DEVICE = "cpu"  # benchmarks/gpu.py calls `compare` on cuda, over NCCL


# ----------------------------------------------- gradients on 1, 2 and 4 processes -----------------------------------
class Towers(nn.Module):
    """Inputs (2, b, WIDTH) for each modality -> I, T, I~, T~ of (b, D), in one forward as in temo.py."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, D))
        self.text = nn.Linear(WIDTH, D)

    def forward(self, x):
        image = self.image(torch.cat([x["pixels"][0], x["pixels"][1]]))  # (2b, D)
        text = self.text(torch.cat([x["tokens"][0], x["tokens"][1]]))  # (2b, D)
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


def per_anchor(like, rows):
    return (0.05 + 0.2 * torch.rand(N, generator=torch.Generator().manual_seed(2)))[rows].to(like)


def per_pair(like, rows):
    return (0.05 + 0.2 * torch.rand(N, N, generator=torch.Generator().manual_seed(3)))[rows].to(like)


def features(like, rows):
    """Unit features of an expert, (b, 5)."""
    of_all = torch.randn(N, 5, generator=torch.Generator().manual_seed(5))
    return nn.functional.normalize(of_all, dim=1)[rows].to(like)


LOSSES = {  # (embeddings I, T, I~, T~ of these rows, learnable tau, rows) -> mean over these rows
    "temo": lambda e, tau, rows: temo.temo_loss(*e, 0.3),
    "temo, no gradient through tau": lambda e, tau, rows: temo.temo_loss(*e, 0.3, detach=True),
    "temo, bare cosine": lambda e, tau, rows: temo.temo_loss(*e, 0.3, similarity="cosine"),
    "temo, I~ and T~ apart": lambda e, tau, rows: temo.temo_loss(*e[:2], *(x.detach() for x in e[2:]), 0.3),
    "temo plain": lambda e, tau, rows: temo.temo_loss(*e, 0.3, unimodal="plain"),
    "temo none": lambda e, tau, rows: temo.temo_loss(*e, 0.3, unimodal="none"),
    "temo experts": lambda e, tau, rows: sum(temo.expert_terms(
        {"image": e[0], "text": e[1]}, {"image": features(e[0], rows), "text": features(e[0], rows)[:, 1:]}).values()),
    "temo in blocks": lambda e, tau, rows: temo.temo_loss(*e, 0.3, block=3),
    "infonce, learnable tau": lambda e, tau, rows: temo.multimodal_loss(*e[:2], tau),
    "infonce, (B,)": lambda e, tau, rows: temo.info_nce(*e[:2], per_anchor(e[0], rows)),
    "infonce, (B, N)": lambda e, tau, rows: temo.info_nce(*e[:2], per_pair(e[0], rows)),
    "cwcl": lambda e, tau, rows: temo.cwcl_loss(*e[:2], tau),
    "dystress": lambda e, tau, rows: temo.multimodal_loss(*e[:2], temo.dystress_temperature),
    "simclr": lambda e, tau, rows: temo.simclr_loss(e[0], e[1], 0.1),
    "simclr in blocks": lambda e, tau, rows: temo.simclr_loss(e[0], e[1], 0.1, block=3),
    "ncl, learnable gamma": lambda e, gamma, rows: ncl.ncl_loss(e[1], e[0], gamma),
    "ncl with gradient, learnable gamma": lambda e, gamma, rows: ncl.ncl_loss(e[1], e[0], gamma, detach=False),
    "ncl without biases, learnable gamma": lambda e, gamma, rows: ncl.ncl_loss(e[1], e[0], gamma, 0),
    "ncl in blocks, learnable gamma": lambda e, gamma, rows: ncl.ncl_loss(e[1], e[0], gamma, block=3),
    "max-margin": lambda e, tau, rows: ncl.max_margin_loss(e[1], e[0]),
    "mmts": lambda e, tau, rows: mmts.clip_loss(*e[:2], per_anchor(e[0], rows)),
    "mmts smoothed, in blocks": lambda e, tau, rows: mmts.clip_loss(*e[:2], per_anchor(e[0], rows), 0.1, block=3),
    "mmts, learnable tau": lambda e, tau, rows: mmts.clip_loss(*e[:2], tau),
    "mmts max-margin": lambda e, tau, rows: mmts.max_margin_loss(*e[:2], 4 * per_anchor(e[0], rows)),
    "mmts max-margin in blocks": lambda e, tau, rows: mmts.max_margin_loss(*e[:2], 4 * per_anchor(e[0], rows), block=3),
}


def step(name, dtype, rows, wrap=lambda module: module):
    """Loss and gradients (towers, then the learnable log tau) of one process's rows."""
    model, log_tau = towers(dtype), nn.Parameter(torch.tensor(-2.0, dtype=dtype, device=DEVICE))
    wrapped = wrap(model)  # DDP must outlive the backward
    loss = LOSSES[name](wrapped(inputs(rows, dtype)), log_tau.exp(), rows)
    loss.backward()
    common.average_gradients([log_tau])
    grads = [p.grad for p in model.parameters()]
    if "learnable" in name or name == "cwcl":
        grads.append(log_tau.grad[None])
    return loss.detach(), [g.clone() for g in grads]


def queue(rows):
    """NCL's queue after three global batches of which a process has these rows; it holds 1.5 of them."""
    queue, x = ncl.QueryQueue(24, WIDTH).to(DEVICE), inputs(slice(0, N), torch.float32)["tokens"]
    for batch in (x[0], x[1], -x[0]):
        queue.push(batch[rows])
    return queue


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


def join():
    """In a fork of this process, which may have had an accelerator of its own."""
    AcceleratorState._reset_state(True)
    engine.processes.join(cpu=True)


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
    keys = [(name, dtype) for name in LOSSES for dtype in DTYPES]
    alone = {k: step(k[0], DTYPES[k[1]], slice(0, N)) for k in keys}  # before there is a group: the whole batch
    sgd_alone = {loss: sgd(loss, slice(0, N)) for loss in SGD}
    embedded, queued = {n: evaluation(n) for n in (7, 3)}, queue(slice(0, N))
    for world in worlds:
        if rank >= world:
            continue
        rows, out = slice(rank * N // world, (rank + 1) * N // world), {}
        with group(rank, world, f"file://{folder}/init_{world}"):
            for name, dtype in keys:
                loss, grads = step(name, DTYPES[dtype], rows, DistributedDataParallel)
                mean = engine.processes.mean_over_processes({"L": loss}, DEVICE)["L"]
                expected, expected_grads = alone[name, dtype]
                out[f"{name} {dtype}"] = [abs(mean / expected.item() - 1), relative(grads, expected_grads)]
            for loss, expected in sgd_alone.items():
                for chunk in (0, 3):
                    accelerator = Accelerator(cpu=DEVICE == "cpu")
                    out[f"sgd {loss} {chunk}"] = relative(sgd(loss, rows, accelerator, chunk), expected)
            for n, (index, image) in embedded.items():
                both = evaluation(n)
                once = both[0].tolist() == index.tolist() == list(range(n))
                out[f"evaluation {n}"] = [once, (both[1] - image).abs().max().item()]
            out["on main"] = on_main(folder, world)
            ours = queue(rows)
            out["queue"] = [ours.count.item(), torch.equal(ours.queries, queued.queries)]
        Path(folder, f"{world}_{rank}.json").write_text(json.dumps(out))


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """{processes: [what `compare` wrote on each rank]}"""
    folder = tmp_path_factory.mktemp("processes")
    launch.spawn(compare, (str(folder),), 4)
    files = {world: [folder / f"{world}_{rank}.json" for rank in range(world)] for world in (2, 4)}
    return {world: [json.loads(f.read_text()) for f in of_ranks] for world, of_ranks in files.items()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_one_process(differences, world, name):
    for rank in differences[world]:
        assert max(rank[f"{name} fp64"]) < 1e-10
        assert max(rank[f"{name} fp32"]) < 1e-4


@pytest.mark.parametrize("world", [2, 4])
def test_work_of_the_main_process_is_waited_for_and_its_failure_is_everyone_s(differences, world):
    assert [rank["on main"] for rank in differences[world]] == [["done", "made", "too few"]] * world


@pytest.mark.parametrize("world", [2, 4])
def test_queues_hold_the_global_batches_in_order(differences, world):
    assert [rank["queue"] for rank in differences[world]] == [[3 * N, True]] * world


# ----------------------------------------------- chunks --------------------------------------------------------------
SGD = "temo", "temo, I~ and T~ apart", "infonce, learnable tau"


def sgd(loss, rows, accelerator=None, chunk=0, steps=5):
    """Parameters after some SGD steps: towers in DDP and the learnable tau outside, as in temo.py; accelerator None:
    plain torch."""
    model = towers(torch.float64)
    log_tau = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64, device=DEVICE))
    optimizer = torch.optim.SGD([*model.parameters(), log_tau], lr=0.1, momentum=0.9)
    loss_fn, apart = lambda *e: LOSSES[loss](e, log_tau.exp(), rows), "apart" in loss
    if accelerator:
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(wrapped, DistributedDataParallel)
    for _ in range(steps):
        if accelerator:
            chunks = common.Chunks(wrapped, wrapped, accelerator, chunk)
            others = chunks.encode_without_gradient(inputs(rows))[2:] if apart else ()
            assert not any(x.requires_grad for x in others)
            encoded = chunks.encode(inputs(rows))
            chunks.backward(loss_fn(*(*encoded[:2], *others) if apart else encoded))
            common.average_gradients([log_tau])
        else:
            loss_fn(*model(inputs(rows))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()] + [log_tau.detach()[None].clone()]


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("loss", SGD)
@pytest.mark.parametrize("world", [2, 4])
def test_sgd_in_chunks_under_ddp_is_one_process_with_the_full_batch(differences, world, loss, chunk):
    assert max(rank[f"sgd {loss} {chunk}"] for rank in differences[world]) < 1e-5


def chunked(loss, chunk, dtype=torch.float32, dropout=0.0):
    """Loss and gradients through Chunks on this process, and the next random number."""
    model, log_tau = towers(dtype, dropout), nn.Parameter(torch.tensor(-2.0, dtype=dtype))
    chunks = common.Chunks(model, model, Accelerator(cpu=True), chunk)
    value = LOSSES[loss](chunks.encode(inputs(slice(0, N), dtype)), log_tau.exp(), slice(0, N))
    chunks.backward(value)
    grads = [p.grad for p in model.parameters()] + ([log_tau.grad[None]] if log_tau.grad is not None else [])
    return value.item(), grads, torch.rand(1)


@pytest.mark.parametrize("chunk", [1, 3, 8, 15])
@pytest.mark.parametrize("loss", ["temo", "temo experts", "infonce, learnable tau", "cwcl", "simclr", "mmts",
                                  "mmts max-margin"])
def test_chunks_have_the_gradient_of_the_full_batch(loss, chunk):
    full, parts = chunked(loss, 0), chunked(loss, chunk)
    assert parts[0] == pytest.approx(full[0], rel=1e-4)
    assert relative(parts[1], full[1]) < 1e-4


def test_chunks_replay_dropout():
    """The second encoding sees the masks of the first: the gradient is that of one graph over the same masks."""
    value, grads, after = chunked("infonce, learnable tau", 3, torch.float64, dropout=0.5)
    model, log_tau = towers(torch.float64, 0.5), nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))
    parts = [model(inputs(slice(i, i + 3))) for i in range(0, N, 3)]
    loss = LOSSES["infonce, learnable tau"]([torch.cat(e) for e in zip(*parts)], log_tau.exp(), slice(0, N))
    loss.backward()
    assert relative(grads, [p.grad for p in model.parameters()] + [log_tau.grad[None]]) < 1e-10
    assert value == pytest.approx(loss.item(), rel=1e-12)
    assert torch.rand(1) == after  # and the random state goes on as if encoded once
    again = chunked("infonce, learnable tau", 3, torch.float64, dropout=0.5)
    assert all(torch.equal(a, b) for a, b in zip(grads, again[1]))


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
@pytest.mark.parametrize("world", [2, 4])
def test_evaluation_takes_each_item_once(differences, world, n):
    for rank in differences[world]:
        assert rank[f"evaluation {n}"] == [True, 0.0]


# ----------------------------------------------- a process that fails alone -----------------------------------------
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


# ----------------------------------------------- whole runs ----------------------------------------------------------
SMALL = "--cpu --image-size 24 --batch-size 32 --max-steps 20".split()
SMALL += "--log-every 1 --eval-every 0 --save-every 0".split()
SMALL += ["--lr", "3e-4"]  # AdamW lets rounding grow: 1e-7 at step 2 becomes 2e-4 at step 20 with the recipe's 2e-3


def rows(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return {r["step"]: r["loss"] for r in rows(folder) if "loss" in r}


def run_here(folder, *flags):
    """temo.py in this process."""
    where = ["--output-dir", str(folder.parent), "--run-name", folder.name]
    return temo.main(temo.parse_args([*SMALL, *where, *flags]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ten epochs of a folder on one process, on two, and on two in chunks."""
    folder = tmp_path_factory.mktemp("runs")
    write_captions(folder / "set", 80)
    run_here(folder / "one", "--dataset", str(folder / "set/captions.csv"), "--workers", "0")
    for name, flags in (("two", []), ("chunks", ["--chunk-size", "8"])):
        flags = [*SMALL, "--dataset", folder / "set/captions.csv", "--output-dir", folder, "--run-name", name, *flags]
        launch.finish("temo", flags, folder / f"{name}.txt", processes=2)
    return folder


@pytest.mark.parametrize("name", ["two", "chunks"])
def test_two_processes_log_the_losses_of_one(runs, name):
    one, two = losses(runs / "one"), losses(runs / name)
    assert list(two) == list(one) == list(range(1, 21))
    assert max(abs(two[k] / one[k] - 1) for k in one) < 1e-3


def test_two_processes_evaluate_as_one(runs):
    one, two = (flatten(rows(runs / name)[0]) for name in ("one", "two"))  # before training: same weights
    assert one["step"] == 0 and one.keys() == two.keys()
    counts = [k for k in one if k.endswith(("images", "captions", "unreadable"))]
    assert len(counts) == 3 and all(one[k] == two[k] for k in counts)
    assert two == pytest.approx(one, rel=1e-3, abs=1e-3)  # rounding may turn two ranks that are nearly equal


@pytest.mark.parametrize("cpu, local_rank", [(False, True), (True, False)])
def test_several_processes_on_a_cpu_average_gradients_without_the_word(cpu, local_rank, tmp_path, monkeypatch):
    """accelerate wraps no model in DDP there if it is not told --cpu, nor on a card without LOCAL_RANK."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = Namespace(cpu=cpu, seed=0, tracker="", mixed_precision="no", output_dir=str(tmp_path))

    def work(rank):
        if not local_rank:
            del os.environ["LOCAL_RANK"]
        model = engine.processes.set_up(args).prepare(nn.Linear(1, 1))
        model(torch.full((1, 1), rank + 1.0)).sum().backward()             # dy/dw = 1 and 2
        print(type(model).__name__, next(model.parameters()).grad.item(), file=sys.stderr)

    for code, words in launch.ranks(tmp_path, work):
        assert code == 0 and "DistributedDataParallel 1.5" in words, words


def test_only_compile_compiles_whatever_accelerate_s_file_asks_for(tmp_path):
    program = (f"import argparse, torch; from contrastive.engine import processes\n"
               f"args = argparse.Namespace(cpu=True, seed=0, tracker='', mixed_precision='no',"
               f" output_dir={str(tmp_path)!r})\n"
               "print(type(processes.set_up(args).prepare(torch.nn.Linear(1, 1))).__name__)")
    environment = os.environ | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "Linear\n" and done.returncode == 0, done


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_sharded_model_is_refused(kind, tmp_path, monkeypatch):
    made = Namespace(distributed_type=DistributedType[kind], log_with=[])
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: made)
    args = Namespace(cpu=True, seed=0, tracker="", mixed_precision="no", output_dir=str(tmp_path))
    with pytest.raises(UserError, match=f"accelerate is configured for {kind}; only plain processes"):
        engine.processes.set_up(args)


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


def test_workers_change_nothing(runs, tmp_path):
    run_here(tmp_path / "a", "--dataset", str(runs / "set/captions.csv"), "--workers", "2")
    assert losses(tmp_path / "a") == losses(runs / "one")


# ----------------------------------------------- threads and cores ---------------------------------------------------
THREADS = """import argparse, os, sys
from contrastive import engine
from contrastive.engine import processes
import contrastive, torch
os.environ["LOCAL_WORLD_SIZE"] = "1"  # all cores for each, or one thread would be the launcher's and ours
processes.set_up(argparse.Namespace(cpu=True, seed=0, tracker="", mixed_precision="no", output_dir="."))
sys.stdout.write(f"{torch.get_num_threads()} of {contrastive.CORES}\\n")"""


def threads(folder, *launcher, **environment):
    """What the processes of a launcher come to: a set of "threads of cores"."""
    (folder / "threads.py").write_text(THREADS)
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)} | environment
    return set(subprocess.run([*launcher, folder / "threads.py"], env=env, capture_output=True, text=True, check=True,
                              timeout=300).stdout.splitlines())


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


@pytest.mark.parametrize("launcher, by_hand, found", [
    (TORCHRUN, "", CORES), (ACCELERATE, "", CORES), ([sys.executable], "1", 1)])
def test_threads_are_those_of_the_user_and_not_of_the_launcher(launcher, by_hand, found, tmp_path):
    """Without OMP_NUM_THREADS torchrun and accelerate launch tell each process to take one thread."""
    environment = {"OMP_NUM_THREADS": by_hand} if by_hand else {}
    assert threads(tmp_path, *launcher, **environment) == {f"{found} of {CORES}"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not restrict a process to cores")
def test_cores_are_those_that_the_process_may_use(tmp_path):
    core = str(min(os.sched_getaffinity(0)))
    only = f"import os, runpy, sys; os.sched_setaffinity(0, [{core}]); runpy.run_path(sys.argv[1])"  # as SLURM does
    assert threads(tmp_path, sys.executable, "-c", only) == {"1 of 1"}


@pytest.mark.parametrize("dataset, asked, started", [("own", "1000", str(CORES)), ("emoji", "4", "0")])
def test_the_banner_says_how_many_workers_are_started(dataset, asked, started, runs, tmp_path, monkeypatch, capsys):
    """Of a set in memory none."""
    def stop(_):
        raise UserError("after the banner")
    monkeypatch.setattr(engine.run.Run, "evaluate_val", stop)
    with pytest.raises(UserError, match="after the banner"):
        own = str(runs / "set/captions.csv")
        run_here(tmp_path / "a", "--dataset", own if dataset == "own" else dataset, "--workers", asked)
    assert re.findall("([0-9]+) workers each", capsys.readouterr().out) == [started]
