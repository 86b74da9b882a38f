"""Checkpoints of a run, and resuming from one as if the run had never stopped.

A checkpoint is two files, safetensors for tensors and JSON for the rest; nothing is pickled. It is written under a
temporary name, synced to the disk and renamed, so that it is always complete. Checksums of both files show damage.
"""

import collections
import contextlib
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import common

import numpy as np
import torch

from contrastive.engine import base
from contrastive.engine.base import UserError, rank, say, world

TENSORS, STATE = "state.safetensors", "state.json"  # the files of a checkpoint


def checkpoints_of(folder):
    """Complete checkpoint folders of a run, newest first; a crash leaves an incomplete one with the suffix .tmp."""
    steps = [p for p in (Path(folder) / "checkpoints").glob("step_*") if p.name[5:].isdigit()]
    return sorted((p for p in steps if (p / STATE).exists()), key=lambda p: -int(p.name[5:]))


def latest_checkpoint(folder):
    """The newest complete checkpoint folder of a run, or None."""
    return next(iter(checkpoints_of(folder)), None)


def save(run, keep=2):
    """Writes checkpoints/step_N of a Run: a file of tensors, and one of numbers with checksums of both. Collective:
    every process adds its random state and its readers' positions in a stream. keep: how many checkpoints are kept.

    Raises: UserError on all processes if it cannot be written; earlier checkpoints then stay as they are."""
    random_state = {"cpu": torch.get_rng_state()}
    if run.device.type == "cuda":
        random_state["cuda"] = torch.cuda.get_rng_state()
    of_processes = base.gather_objects((random_state, run.data.positions))
    final = Path(run.folder) / "checkpoints" / f"step_{run.step}"
    temporary = final.with_name(final.name + ".tmp")

    def write():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        optimizer, plain = _pack_optimizer(run.optimizer.optimizer)
        groups = {"model": run.trained.state_dict(), "own": run.own.state_dict(), "optimizer": optimizer,
                  "second": _pack_optimizer(run.second)[0] if run.second else {}, "tensors": run.tensors}
        groups |= {f"random_{place}": found for place, (found, _) in enumerate(of_processes)}
        tensors = {f"{group}/{k}": v for group, of in groups.items() for k, v in of.items()}
        base.write_tensors(temporary / TENSORS, tensors)
        scaler = run.accelerator.scaler
        state = {"step": run.step, "tracker_id": run.log.tracker_id, "wall_s": run.wall(), "processes": world(),
                 "unevaluated": run.unevaluated, "positions": [positions for _, positions in of_processes],
                 "bad": run.data.bad, "method": run.method, "optimizer": plain,
                 "scaler": scaler.state_dict() if scaler else None,
                 "python": random.getstate(), "numpy": np.random.get_state(),
                 "sha256": base.checksum(temporary / TENSORS)}
        base.write_json(temporary / STATE, state | {"own_sha256": _digest(state)})
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        sync(final.parent)
        for old in checkpoints_of(run.folder)[keep:]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        base.main_writes(f"the checkpoint {final}", write)
    except UserError:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # it would take space on a full disk
        raise


def _digest(state):
    """SHA-256 of the content of state.json, without own_sha256 itself."""
    content = json.loads(json.dumps({k: v for k, v in state.items() if k != "own_sha256"}, default=base.plain))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _pack_optimizer(optimizer):
    """Optimizer state -> ({'index.name': tensor}, JSON-able rest)."""
    state = optimizer.state_dict()
    tensors = {f"{i}.{k}": v for i, s in state["state"].items() for k, v in s.items() if torch.is_tensor(v)}
    plain = {str(i): {k: v for k, v in s.items() if not torch.is_tensor(v)} for i, s in state["state"].items()}
    return tensors, {"state": plain, "param_groups": state["param_groups"]}


def sync(path):
    """Waits until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and Path(path).is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ======================================================= going on ====================================================
def whole_checkpoint(folder):
    """The newest checkpoint whose files are as they were written; None if there is no checkpoint at all.

    Of a damaged one it says so, and takes the one before.   Raises: UserError if all are damaged."""
    damaged = []
    for path in checkpoints_of(folder):
        damaged = damaged_files(path)
        if not damaged:
            return path
        say(f"--resume: {path}: damaged: {', '.join(damaged)}; the checkpoint before it is used")
    if damaged:
        raise UserError(f"--resume {folder}: every checkpoint is damaged; {path.name}: {', '.join(damaged)}")
    return None


def damaged_files(folder):
    """Names of the files of a checkpoint that are missing or not as they were written."""
    try:
        state = json.loads((Path(folder) / STATE).read_text(encoding="utf8"))
        if state.get("own_sha256") != _digest(state):
            return [STATE]
    except (OSError, ValueError, AttributeError):
        return [STATE]
    tensors = Path(folder) / TENSORS
    return [] if tensors.is_file() and base.checksum(tensors) == state["sha256"] else [TENSORS]


def resume(run):
    """Restores a Run from its last undamaged checkpoint. Returns: the checkpoint's numbers, {} if there is none.
    Collective.   Raises: UserError if it is beyond the last step that the flags ask for."""
    path = base.on_main(whole_checkpoint, run.folder)
    state = _put_back(run, path) if path else {}
    if state.get("step", 0) > run.last:
        raise UserError(f"--resume {run.args.resume}: its checkpoint is at step {state['step']}, beyond the {run.last} "
                        "steps that --max-steps or --epochs ask for")
    base.on_main(_keep_flags, run.folder / "args.json", run.args)  # only now, as nothing has refused them
    return state


def _keep_flags(path, args):
    """Says which flags have changed since args.json was written, and saves their new values."""
    saved = base.read_json(path, {})
    flags = {k: v for k, v in vars(args).items() if k not in ("resume", "run_name")}
    for k, v in flags.items():
        if saved.get(k, v) != v:
            say(f"--resume: --{k.replace('_', '-')} was {saved[k]}, is {v} from here on")
    base.write_json(path, saved | flags)


def _put_back(run, path):
    """Restores weights, optimisers and random states from a checkpoint. Returns: its numbers, the content of STATE.

    Raises: UserError if the architecture differs."""
    from safetensors.torch import load_file
    state, groups = json.loads((path / STATE).read_text(encoding="utf8")), collections.defaultdict(dict)
    for name, tensor in load_file(path / TENSORS).items():
        group, _, key = name.partition("/")
        groups[group][key] = tensor
    for saved, module in ((groups["model"], run.trained), (groups["own"], run.own)):
        own = module.state_dict()
        same = {k for k in saved.keys() & own.keys() if saved[k].shape == own[k].shape}
        wrong = sorted((saved.keys() | own.keys()) - same)
        if wrong:
            raise UserError(f"--resume {path}: the checkpoint has another architecture than these flags ({len(wrong)} "
                            f"tensors differ, first {wrong[0]})")
        module.load_state_dict(saved)
    _unpack_optimizer(run.optimizer.optimizer, groups["optimizer"], state["optimizer"])
    if run.second:
        _unpack_optimizer(run.second, groups["second"])
    if run.accelerator.scaler and state["scaler"]:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    run.tensors, run.positions = dict(groups["tensors"]), {}
    if state["processes"] == world():
        found, run.positions = groups[f"random_{rank()}"], state["positions"][rank()]
        torch.set_rng_state(found["cpu"])
        if "cuda" in found and run.device.type == "cuda":
            torch.cuda.set_rng_state(found["cuda"])
    else:
        say(f"--resume: {state['processes']} processes before, {world()} now: random states of dropout and stream "
            "positions are not restored")
    say(f"resumed {path} at step {state['step']} of {run.last}")
    return state


def _unpack_optimizer(optimizer, tensors, plain=None):
    """Restores what _pack_optimizer returned; plain None: the parameter groups stay as they are."""
    plain = plain or {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    entries = {int(i): dict(s) for i, s in plain["state"].items()}
    for k, v in tensors.items():
        entries.setdefault(int(k.split(".", 1)[0]), {})[k.split(".", 1)[1]] = v
    groups = [saved | {"fused": own.get("fused")} for saved, own in zip(plain["param_groups"], optimizer.param_groups)]
    try:
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    except ValueError as error:  # the encoders of an older version learnt other tensors
        raise UserError("--resume: the optimiser's state does not fit the model; start a new run") from error
    for p, state in optimizer.state.items():  # one-kernel Adam takes moments in the layout of the weight: channels_last
        laid_out = {k: torch.empty_like(p, dtype=v.dtype).copy_(v) for k, v in state.items() if v.shape == p.shape}
        state |= laid_out if p.ndim > 1 else {}


def kept_rows(path, step, again):
    """The rows of metrics.jsonl up to the step of the checkpoint; the main process removes the others from the file.

    again: the resumed run evaluates this step again (the first, the last, or one stopped in its evaluation)."""
    rows = []
    for line in path.read_text(encoding="utf8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # a line that a crash or a full disk has cut off
            row = json.loads(line)
            if isinstance(row, dict) and "step" in row and row["step"] <= step:
                rows += [] if again and row["step"] == step and "eval" in row else [row]
    if rank() == 0:
        temporary = path.with_suffix(".tmp")
        with base.writing(path):
            temporary.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf8")
            os.replace(temporary, path)
    return rows


# ======================================================= signals =====================================================
TWICE = 5  # seconds in which a second SIGTERM counts as the first: a scheduler's comes again through the launcher


def listen(run):
    """From now on Ctrl-C or SIGTERM ends the run after the step, with a checkpoint; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        return
    base.signals.clear()
    began = None
    def note(number, _):
        nonlocal began
        if began is None or number == signal.SIGTERM and time.monotonic() - began < TWICE:
            began = began or time.monotonic()
            base.signals.append(int(number))
            return
        run.ignore_no_more()
        if number == signal.SIGTERM and rank() == 0:  # clean_exit prints for Ctrl-C
            words = f"\nstopped at once by a second SIGTERM; from the last checkpoint: {command(run.folder)}\n"
            os.write(2, words.encode())  # print is not safe in a handler
        signal.raise_signal(number)
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, note)
        run.handlers[number] = getattr(before, "originals", {}).get(number, before)  # not a failed run's
    note.originals = dict(run.handlers)


def stop(run, number, saved):
    """Ends the run after a signal, with a checkpoint, and prints the command that resumes it. Collective."""
    if not saved:
        run.save()
    if run.bar is not None:
        run.bar.close()
    say(f"stopped after step {run.step} by {signal.Signals(number).name}; to go on: {command(run.folder)}")
    for source in list(common.being_read):
        source.close()  # at the interpreter's exit each worker would take five seconds to end
    base.barrier()
    base.signals.clear()
    run.ignore_no_more()
    raise SystemExit(128 + number)


def command(folder):
    """The command that resumes a run, with the launcher that started this one as far as the environment tells."""
    here = os.environ
    processes = int(here.get("WORLD_SIZE", 1))
    local = int(here.get("LOCAL_WORLD_SIZE", processes))
    if "ACCELERATE_MIXED_PRECISION" in here and processes == local:
        words = [*_program("accelerate", "-m", "accelerate.commands.accelerate_cli"), "launch"]
        if processes > 1 or torch.cuda.device_count() > 1:
            words += [*["--multi_gpu"] * (processes > 1), "--num_processes", str(processes)]
        words += ["--cpu"] * (here.get("ACCELERATE_USE_CPU") == "True" and torch.cuda.is_available())
    elif processes > 1 or "TORCHELASTIC_RUN_ID" in here:
        words = [*_program("torchrun", "-m", "torch.distributed.run"), "--nproc_per_node", str(local)]
        if processes > local:
            words += ["--nnodes", str(processes // local), "--rdzv_backend", "c10d", "--rdzv_id",
                      here.get("TORCHELASTIC_RUN_ID", "1"), "--rdzv_endpoint", f"{here['MASTER_ADDR']}:29500"]
    else:
        words = _program(Path(sys.executable).name)
    where = "on each node: " if processes > local else ""
    return where + shlex.join([*words, sys.argv[0], "--resume", str(folder)])


def _program(name, *module):
    """The words that start a program installed beside this Python; as a module if the shell would not find it."""
    return [name] if shutil.which(name) == str(Path(sys.executable).with_name(name)) else [sys.executable, *module]
