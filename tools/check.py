"""Checks that a fork keeps the promises of the five scripts, by ten steps of SGD through its main.

    python -m tools.check mine.py [its flags]
    python -m tools.check variants.temo_experts [its flags]
    python -m tools.check mine.py --cpu           # on the CPU, also where there is a GPU

Without flags it trains on its default data, with small pictures and batches of 16. One process in
float32 is the measure. Two processes (on GPUs if there are two), and chunks, must have its losses,
weights and state of the loss but for rounding; a run that is killed (kill -9) and resumed has them
bit by bit, on a GPU but for rounding. Exit code 1: one has not.
"""

import concurrent.futures
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import common
from contrastive.core.files import flatten, logged_rows
from contrastive.engine import run as engine

import torch
from torch.multiprocessing import ProcessExitedException, start_processes

# a run is killed after step KILL_STEP and goes on from step SAVE_STEP
NUM_STEPS, SAVE_STEP, KILL_STEP = 10, 5, 7
SMALL = "--image-size 16 --batch-size 16 --lr 0.05".split()  # a user's flags may say otherwise
FIXED = [
    *"--workers 0 --mixed-precision no --no-compile --chunk-size 0 --optimizer sgd".split(),
    *"--warmup-fraction 0 --lr-schedule constant --grad-clip 0".split(),
    *"--log-every 1 --eval-every 0".split(),
    "--max-steps", str(NUM_STEPS), "--save-every", str(SAVE_STEP)]
# largest differences; the state is looser, for Adam of MAMA's network: signs near 0 turn
LIMITS = {"losses": 1e-3, "weights": 0.05, "state of the loss": 0.2}
EXACT = {"losses": 0, "tensors": 0}  # tensors: how many of the checkpoint differ


class Variant(NamedTuple):
    """A run that must end as that of one process."""

    name: str
    limits: dict
    advice: str  # where to look if it does not
    processes: int = 1
    stop: int = 0  # the step after which it is killed and resumed
    flags: tuple = ()


VARIANTS = (
    Variant(
        "two processes", LIMITS,
        "a loss whose mean over processes is not the global loss: candidates without `gather`, a "
        "sum or a mean over another axis; state from one process's numbers; BatchNorm or dropout "
        "in an encoder",
        processes=2),
    Variant(
        "chunks", LIMITS,
        "what reads more of a batch than the embeddings of `grad_cache.encode`, or calls the model "
        "beside it",
        flags=("--chunk-size", "4")),
    Variant(
        "kill and resume", EXACT,
        "state that `run.resume` does not name: a local variable that steps change; random "
        "numbers that come neither from (seed, step) nor from torch's global generators",
        stop=KILL_STEP),
)


# ----------------------------------------------------- runs --------------------------------------
class Job(NamedTuple):
    """What a process runs: main(parse_args(flags)) of a script."""

    module: object
    flags: list
    log: Path  # its output
    stop: int = 0  # the step after which it gets a signal
    number: int = signal.SIGKILL
    environment: dict = {}  # of a process group


def run_process(rank, job):
    """Runs a Job without its pictures, as process number `rank`."""
    out = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if job.environment:
        os.environ.update(job.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [job.module.__file__, *job.flags]
    engine.draw = lambda *_: None
    end_step = common.Run.end_step

    def end_step_and_stop(run, *args):
        end_step(run, *args)
        if run.step == job.stop:
            os.kill(os.getpid(), job.number)

    common.Run.end_step = end_step_and_stop
    with common.clean_exit():
        job.module.main(job.module.parse_args(job.flags))


def run(job, processes=1):
    """Runs a Job in forks of this process: a script's globals are fresh in each.

    Returns: (exit code, the end of its output).
    """
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = job._replace(environment={
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)})
    code = 0
    try:
        start_processes(run_process, (job,), processes, start_method="fork")
    except ProcessExitedException as end:
        code = end.exit_code
    return code, job.log.read_text(errors="replace")[-3000:].strip()


# ----------------------------------------------------- differences -------------------------------
class State(NamedTuple):
    """A run after a step."""

    losses: torch.Tensor  # (steps,)
    tensors: dict  # {path: tensor}, all that its checkpoint holds


def read_state(folder, step=NUM_STEPS):
    """The State of a run after a step."""
    losses = []
    for row in logged_rows(folder / "metrics.jsonl"):
        if "loss" in row:
            losses.append(row["loss"])
    saved = torch.load(folder / "checkpoints" / f"step_{step}.pt", weights_only=True)
    saved["processes"] = dict(enumerate(saved["processes"]))  # random states
    tensors = {path: x for path, x in flatten(saved).items() if torch.is_tensor(x)}
    return State(torch.tensor(losses), tensors)


def drift(tensors, expected, start):
    """How far apart two trainings from `start` ended: |x - expected| / |expected - start|.

    The largest of all tensors. A few steps of SGD: rounding gives 1e-6 to 1e-2, a wrong gradient
    0.5 and more. A tensor that moves less than a hundredth of all is measured by that hundredth:
    some gradients are nothing but rounding.
    Args:
        tensors, expected, start: {path: tensor}.
    """
    assert tensors.keys() == expected.keys() <= start.keys()
    moved = {}
    for path, x in expected.items():
        if x.is_floating_point():
            moved[path] = (x - start[path]).double().norm()
    least = sum(x ** 2 for x in moved.values()) ** 0.5 / 100
    assert least > 0, "nothing was trained"
    ratios = []
    for path, length in moved.items():
        ratio = (tensors[path] - expected[path]).double().norm() / max(length, least)
        if not ratio.isfinite():
            return float("inf")
        ratios.append(ratio.item())
    return max(ratios)


def differences(state, expected, start):
    """How far apart two runs are, by the names of LIMITS and EXACT.

    Args:
        state, expected, start: State. What does not change after `start` has no entry.
    """
    losses = (state.losses - expected.losses).abs().max() / expected.losses.abs().max()
    num_different = 0
    for path, x in expected.tensors.items():
        if not torch.equal(x, state.tensors[path]):
            num_different += 1
    result = {"losses": losses.item(), "tensors": num_different}
    for name, is_chosen in (("weights", is_weight), ("state of the loss", is_loss_state)):
        ours = select(state.tensors, is_chosen)
        theirs = select(expected.tensors, is_chosen)
        changed = False
        for path, x in theirs.items():
            if x.is_floating_point() and not torch.equal(x, start.tensors[path]):
                changed = True
        if changed:
            result[name] = drift(ours, theirs, start.tensors)
    return result


def is_weight(path):
    """Whether a tensor of a checkpoint is a weight of the encoders."""
    return path.startswith("model/")


def is_loss_state(path):
    """Whether a tensor belongs to what a script has named in Run.resume beside model, optimizer."""
    return path.partition("/")[0] not in ("model", "optimizer", "processes", "scaler", "bad")


def select(tensors, is_chosen):
    """The tensors whose path is chosen."""
    return {path: x for path, x in tensors.items() if is_chosen(path)}


# ----------------------------------------------------- the check ---------------------------------
def keeps_promise(variant, module, flags, place):
    """Runs a Variant beside the run `one` and prints how far apart they are.

    Args:
        place: folder of the runs.
    Returns: whether the differences are within its limits.
    """
    name = variant.name
    job = Job(module, [*flags, "--run-name", name, *variant.flags], place / f"{name}.log",
              variant.stop)
    code, output = run(job, variant.processes)
    if variant.stop:
        resume = Job(module, ["--resume", str(place / name)], place / "resumed.log")
        code, output = run(resume)
    last_line = output.rpartition("\n")[2]
    # MoCo, a look-ahead, BatchNorm; the banner above names the flag in any case
    if code == 2 and last_line.startswith("error: --chunk-size"):
        print(f"  {name:<16} left out; {last_line}", flush=True)
        return True
    numbers, is_kept = [], code == 0
    if not code:
        start = read_state(place / "one", SAVE_STEP)
        result = differences(read_state(place / name), read_state(place / "one"), start)
        for kind, limit in variant.limits.items():
            if kind in result:
                numbers.append(f"{kind} {result[kind]:.0e} (at most {limit:g})")
                if not result[kind] <= limit:
                    is_kept = False
    print(f"  {name:<16} {', '.join(numbers) or output}", flush=True)
    if not is_kept:
        print(f"{'':19}DIFFERS (exit code {code}): look for {variant.advice}", flush=True)
    return is_kept


def count_gpus():
    """The number of GPUs, asked in a process of its own: one that has used CUDA cannot fork."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(torch.cuda.device_count).result()


def variants_on(num_gpus):
    """The VARIANTS that can run on so many GPUs; 0 = on the CPU. Says which are left out."""
    if num_gpus == 0:
        return VARIANTS
    variants = []
    for variant in VARIANTS:
        if variant.processes > num_gpus:
            print(f"  {variant.name:<16} left out; they need {variant.processes} GPUs, or --cpu",
                  flush=True)
        else:
            # kernels of a GPU do not always add in the same order
            variants.append(variant._replace(limits=LIMITS))
    return variants


def check(module, flags, place, num_gpus=0):
    """The run of one process, then the others. Returns: whether all promises are kept."""
    code, output = run(Job(module, [*flags, "--run-name", "one"], place / "one.log"))
    if code == 2:  # its last line is the error
        raise common.UserError(output.splitlines()[-1].removeprefix("error: "))
    if code:
        raise common.UserError(output)
    results = []
    for variant in variants_on(num_gpus):
        results.append(keeps_promise(variant, module, flags, place))
    return all(results)


def path_of_script(word):
    """The path of a script, mine.py, or of a module, variants.temo_experts. Raises: UserError."""
    path = Path(word)
    if path.suffix != ".py":
        path = Path(*word.split(".")).with_suffix(".py")
    if not path.is_file():
        raise common.UserError(f"python -m tools.check {word}: no such script; give SCRIPT.py or "
                               "variants.NAME, and its flags")
    return path.resolve()


def import_script(path):
    """Imports a script, which may lie anywhere."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main(argv):
    """Checks a script, which may lie anywhere, with its flags. Returns: the exit code."""
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    # imported once, and not in each run
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import torchvision.transforms.v2  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    torch.set_num_threads(1)
    path = path_of_script(" ".join(argv[:1]))
    module = import_script(path)
    print(f"{path.name}: {NUM_STEPS} steps of SGD; differences from one process:", flush=True)
    num_gpus = 0
    if "--cpu" not in argv:
        num_gpus = count_gpus()
    with tempfile.TemporaryDirectory() as place:
        flags = [*SMALL, *argv[1:], *FIXED, "--output-dir", place]
        if num_gpus == 0:
            flags.append("--cpu")
        else:
            # TF32 would round more than the limits allow; read when cuBLAS and cuDNN start
            os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        if check(module, flags, Path(place), num_gpus):
            print(f"{path.name} keeps the promises")
            return 0
        return 1


if __name__ == "__main__":
    with common.clean_exit():
        sys.exit(main(sys.argv[1:]))
