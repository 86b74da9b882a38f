"""Does a fork keep the promises of the five scripts? Ten steps of SGD through its own main, five times over.

    python -m tools.check mine.py [its flags]     # without flags: its default data, small pictures, batches of 16

One process in float32 on the CPU is the measure. Two processes, and chunks, must have its losses, weights and own state
but for rounding; a run that is killed (kill -9) and resumed has them bit by bit. Exit code 1: one has not.
"""

import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import common
from contrastive.engine.processes import flatten

import torch
from torch.multiprocessing import ProcessExitedException, start_processes

STEPS, SAVED, KILLED = 10, 5, 7                                            # killed after step 7, it goes on from step 5
SMALL = "--image-size 16 --batch-size 16 --lr 0.05".split()                # a user's flags may say otherwise, but not:
FIXED = """--cpu --workers 0 --mixed-precision no --no-compile --chunk-size 0 --optimizer sgd --warmup-epochs 0
    --lr-schedule constant --grad-clip 0 --log-every 1 --eval-every 0""".split()
FIXED += ["--max-steps", str(STEPS), "--save-every", str(SAVED)]
MOST = {"losses": 1e-3, "weights": 0.05, "own": 0.2}                       # Adam, of MAMA's network: signs near 0 turn
EXACT = {"losses": 0, "tensors": 0}                                        # how many tensors of the checkpoint differ
LOOK = {
    "two processes": "a loss whose mean over processes is not the global loss: candidates without `gather`, a sum or a "
                     "mean over another axis; `own` from one process's numbers; BatchNorm or dropout in an encoder",
    "chunks": "what reads more of a batch than the embeddings of `chunks.encode`, or calls the model beside it",
    "kill and resume": "state outside `own`: a local variable or an attribute that steps change; random numbers that "
                       "come neither from (seed, step) nor from torch's global generators"}


def drift(got, wanted, start):
    """How far apart two trainings from `start` ended: of each tensor |got - wanted| / |wanted - start|, the largest.

    A few steps of SGD: rounding gives 1e-6 to 1e-2, a wrong gradient 0.5 and more. A tensor that moves less than a
    hundredth of all is measured by that hundredth: some gradients are nothing but rounding."""
    assert got.keys() == wanted.keys() <= start.keys()
    way = {k: (v - start[k]).double().norm() for k, v in wanted.items() if v.is_floating_point()}
    least = sum(x ** 2 for x in way.values()) ** 0.5 / 100
    assert least > 0, "nothing was trained"
    apart = {k: (got[k] - wanted[k]).double().norm() / max(x, least) for k, x in way.items()}
    return max((x if x.isfinite() else x.new_tensor(float("inf"))).item() for x in apart.values())


def one_process(rank, module, flags, log, stop, environment):
    """main(parse_args(flags)) of a script without its pictures, its words in a file; kill -9 after step `stop`."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if environment:
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv, module.draw, done = [module.__file__, *flags], lambda *_, **__: None, common.Run.done

    def done_and_killed(run, *args, **more):
        done(run, *args, **more)
        if run.step == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    common.Run.done = done_and_killed
    with common.clean_exit():
        module.main(module.parse_args(flags))


def run(module, flags, log, processes=1, stop=0):
    """(exit code, its words) of a run whose processes are forks of this one: a script's globals are fresh in each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    code, arguments = 0, (module, flags, log, stop, place if processes > 1 else {})
    try:
        start_processes(one_process, arguments, processes, start_method="fork")
    except ProcessExitedException as end:
        code = end.exit_code
    return code, log.read_text(errors="replace")[-3000:].strip()


def state(folder, step=STEPS):
    """(losses, {path: tensor}) of a run after a step: of all that its checkpoint holds."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saved = torch.load(folder / "checkpoints" / f"step_{step}.pt", weights_only=True)
    saved["processes"] = dict(enumerate(saved["processes"]))               # random states
    tensors = {k: x for k, x in flatten(saved).items() if torch.is_tensor(x)}
    return torch.tensor([row["loss"] for row in rows if "loss" in row]), tensors


def apart(got, wanted, start):
    """{losses, tensors, weights, own: how far two runs are apart}; without own where nothing of it changes."""
    (losses, ours), (of_one, theirs), (_, first) = got, wanted, start
    found = {"losses": ((losses - of_one).abs().max() / of_one.abs().max()).item()}
    found["tensors"] = sum(not torch.equal(x, ours[k]) for k, x in theirs.items())
    for word, part in (("weights", "model/"), ("own", "own/")):
        a, b = ({k: x for k, x in of.items() if k.startswith(part)} for of in (ours, theirs))
        if any(x.is_floating_point() and not torch.equal(x, first[k]) for k, x in b.items()):
            found[word] = drift(a, b, first)
    return found


def compare(module, flags, place):
    """The five runs, and a line for each promise. Returns: whether all are kept."""
    code, words = run(module, [*flags, "--run-name", "one"], place / "one.log")
    if code:
        raise common.UserError(words)
    one, start, kept = state(place / "one"), state(place / "one", SAVED), True
    others = ("two processes", 2, 0, []), ("chunks", 1, 0, ["--chunk-size", "4"]), ("kill and resume", 1, KILLED, [])
    for name, processes, stop, more in others:
        code, words = run(module, [*flags, "--run-name", name, *more], place / f"{name}.log", processes, stop)
        if stop:
            code, words = run(module, ["--resume", str(place / name)], place / "resumed.log")
        if code == 2 and "--chunk-size" in words:                          # MoCo, a look ahead, BatchNorm
            print(f"  {name:<16} left out; {words.splitlines()[-1]}", flush=True)
            continue
        found, most = {} if code else apart(state(place / name), one, start), EXACT if stop else MOST
        numbers = ", ".join(f"{k} {found[k]:.0e} (at most {most[k]:g})" for k in most if k in found)
        print(f"  {name:<16} {numbers or words}", flush=True)
        if code or not all(found[k] <= most[k] for k in most if k in found):
            print(f"{'':19}DIFFERS (exit code {code}): look for {LOOK[name]}", flush=True)
            kept = False
    return kept


def main(argv):
    """Checks a script, which may lie anywhere, with its flags. Returns: the exit code."""
    import accelerate  # noqa: F401  (imported once, and not in each run)
    import datasets  # noqa: F401
    import torchvision.transforms.v2  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    path = Path(" ".join(argv[:1])).resolve()
    if not path.is_file():
        raise common.UserError("python -m tools.check SCRIPT.py [its flags]: no such script")
    torch.set_num_threads(1)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(f"{path.name}: {STEPS} steps of SGD; one process against", flush=True)
    with tempfile.TemporaryDirectory() as place:
        return int(not compare(module, [*SMALL, *argv[1:], *FIXED, "--output-dir", place], Path(place)))


if __name__ == "__main__":
    with common.clean_exit():
        sys.exit(main(sys.argv[1:]))
