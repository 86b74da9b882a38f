"""Checkpoints of a run, and going on from one as if it had never stopped.

Nothing is pickled: safetensors for tensors, JSON for the rest. A checkpoint is written beside its place, synced to the
disk and renamed, so that what has its name is whole, and a checksum of each file tells later damage.
"""

import contextlib
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
from common import UserError, rank, say, world

import numpy as np
import torch


def checkpoints_of(folder):
    """Complete checkpoint folders of a run, newest first: renaming made them complete; a crash leaves .tmp."""
    steps = [p for p in (Path(folder) / "checkpoints").glob("step_*") if p.name[5:].isdigit()]
    return sorted((p for p in steps if (p / "state.json").exists()), key=lambda p: -int(p.name[5:]))


def latest_checkpoint(folder):
    """The newest complete checkpoint folder of a run, or None."""
    return next(iter(checkpoints_of(folder)), None)


def save_checkpoint(folder, step, model, extra, optimizer, scaler=None, state=None, tensors=None, positions=None,
                    keep=2):
    """Write checkpoints/step_N. Collective: every process writes its own random state.

    Args: extra: a module of the loss's own parameters; state: JSON-able counters; tensors: more tensors (masks);
        positions: where this process's readers are in a stream; keep: how many checkpoints stay.
    Raises: UserError on all processes when it cannot be written; the checkpoints before it stay as they are.
    """
    final = Path(folder) / "checkpoints" / f"step_{step}"
    temporary = final.with_name(final.name + ".tmp")

    def make():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write_shared():
        packed, plain = _pack_optimizer(optimizer)
        files = {"model": model.state_dict(), "extra": extra.state_dict(), "optimizer": packed}
        for name, content in (files | {"tensors": tensors or {}}).items():
            common.write_tensors(temporary / f"{name}.safetensors", content)
        python, numpy_state = random.getstate(), np.random.get_state()
        counters = {"step": step, "processes": world(), "optimizer": plain,
                    "python": [python[0], list(python[1]), python[2]],
                    "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
                    "scaler": scaler.state_dict() if scaler else None}
        common.write_json(temporary / "state.json", counters | (state or {}))

    def write_own():
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        common.write_tensors(temporary / f"rng_{rank()}.safetensors", rng)
        common.write_json(temporary / f"positions_{rank()}.json", positions or {})

    def publish():
        write_checksums(temporary)
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        sync(final.parent)
        for old in checkpoints_of(folder)[keep:]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        for work, alone in ((make, True), (write_shared, True), (write_own, False), (publish, True)):
            common.together(work if rank() == 0 or not alone else None, f"the checkpoint {final}")
    except UserError:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # half a checkpoint on a full disk is in the way
        raise


def save(run):
    """Write a checkpoint of a common.Run. Collective."""
    state = {"tracker_id": run.log.tracker_id, "wall_s": run.wall(), "unevaluated": run.unevaluated}
    inside = run.optimizer.optimizer, run.accelerator.scaler
    second = _pack_optimizer(run.second)[0] if run.second else {}
    tensors = run.tensors | {f"second.{k}": v for k, v in second.items()}
    save_checkpoint(run.folder, run.step, run.trained, run.own, *inside, state, tensors, run.data.positions)


def _pack_optimizer(optimizer):
    """Optimizer state -> ({'index.name': tensor}, JSON-able rest)."""
    state = optimizer.state_dict()
    tensors = {f"{i}.{k}": v for i, s in state["state"].items() for k, v in s.items() if torch.is_tensor(v)}
    plain = {str(i): {k: v for k, v in s.items() if not torch.is_tensor(v)} for i, s in state["state"].items()}
    return tensors, {"state": plain, "param_groups": state["param_groups"]}


def sync(path):
    """Ask the disk to hold a file, or the names in a folder, before going on."""
    if os.name == "nt" and Path(path).is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_checksums(folder):
    """checksums.json of all other files of a folder."""
    files = sorted(p for p in Path(folder).iterdir() if p.name != "checksums.json")
    common.write_json(Path(folder) / "checksums.json", {p.name: common.checksum(p) for p in files})


# ======================================================= going on ====================================================
def run_args(folder, script):
    """The saved flags of a run, for `--resume`. Raises: UserError for a folder that is no run of this script."""
    path = Path(folder) / "args.json"
    if not path.is_file():
        raise UserError(f"--resume {folder}: no args.json there; give the run folder that a run printed")
    try:
        saved = json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise UserError(f"--resume {folder}: its args.json is damaged ({common.first_line(error)})") from error
    theirs = saved.pop("script", None)
    if theirs != script:
        raise UserError(f"--resume {folder}: a run of {theirs}.py, not of {script}.py; use python {theirs}.py --resume "
                        f"{folder}")
    return saved


# Flags that cannot change in a resumed run.
FIXED = ("dataset", "seed", "batch_size", "loss", "image_encoder", "text_encoder", "embed_dim", "image_size",
         "text_length", "optimizer", "learnable_tau", "clip_law", "fold", "task", "qa_model", "qa_similarity",
         "shuffle_video", "init_from", "pretrained", "clusters", "num_clusters", "cluster_encoder", "cluster_starts")


def saved_flags(parser, folder):
    """The flags of the run that --resume names. Raises: UserError; refused where this script does not know them all."""
    saved = run_args(folder, Path(parser.prog).stem)
    unknown = sorted(set(saved) - {a.dest for a in parser._actions})
    parser.require(not unknown, f"--resume {folder}: it was run with --{''.join(unknown[:1]).replace('_', '-')}, "
                                f"which {parser.prog} does not know; resume it with the script that made it")
    return saved


def refuse_changes(parser, args, saved):
    """Refuse flags of FIXED that are not as they were; a run of an older version has not all of them."""
    for name in (n for n in FIXED if n in saved):
        was, now = saved[name], getattr(args, name, None)
        parser.require(was == now, f"--resume {args.resume}: --{name.replace('_', '-')} was {was} in that run and "
                                   f"cannot become {now}; start a new run")


def whole_checkpoint(folder):
    """The newest checkpoint whose files are as they were written, or None where there is none at all.

    A damaged one is named and the one before it taken.   Raises: UserError when all are damaged."""
    damaged = []
    for path in checkpoints_of(folder):
        damaged = damaged_files(path)
        if not damaged:
            return path
        say(f"--resume: {path}: damaged: {', '.join(damaged)}; the checkpoint before it is taken")
    if damaged:
        raise UserError(f"--resume {folder}: no checkpoint is whole; damaged: {path.name}: {', '.join(damaged)}")
    return None


def damaged_files(folder):
    """Names of the files of a checkpoint that are missing or not as they were written."""
    if not (Path(folder) / "checksums.json").exists():  # of an earlier version of this file
        return []
    try:
        sums = json.loads((Path(folder) / "checksums.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return ["checksums.json"]
    return [n for n, s in sums.items() if not (Path(folder) / n).is_file() or common.checksum(Path(folder) / n) != s]


def load_checkpoint(path, model, extra, optimizer, scaler=None):
    """Restore everything save_checkpoint wrote; returns (state dict, tensors, positions).

    Raises: UserError on another architecture."""
    from safetensors.torch import load_file
    path = Path(path)
    state = json.loads((path / "state.json").read_text(encoding="utf8"))
    for name, module in (("model", model), ("extra", extra)):
        saved, own = load_file(path / f"{name}.safetensors"), module.state_dict()
        same = {k for k in saved.keys() & own.keys() if saved[k].shape == own[k].shape}
        wrong = sorted((saved.keys() | own.keys()) - same)
        if wrong:
            raise UserError(f"--resume {path}: the checkpoint has another architecture than these flags ({len(wrong)} "
                            f"tensors differ, first {wrong[0]})")
        module.load_state_dict(saved)
    _unpack_optimizer(optimizer, load_file(path / "optimizer.safetensors"), state["optimizer"])
    if scaler and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    positions = {}
    if (path / f"rng_{rank()}.safetensors").exists() and state["processes"] == world():
        rng = load_file(path / f"rng_{rank()}.safetensors")
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng["cuda"])
        positions = json.loads((path / f"positions_{rank()}.json").read_text(encoding="utf8"))
    else:
        say(f"--resume: {state['processes']} processes before, {world()} now: random states of dropout and stream "
            "positions start anew")
    return state, load_file(path / "tensors.safetensors"), positions


def resume(run):
    """Put back into a common.Run what its last whole checkpoint holds; its counters, {} where there is none.
    Collective.   Raises: UserError where it is beyond the last step that is asked for."""
    path, state = common.on_main(whole_checkpoint, run.folder), {}
    if path:
        state = _put_back(run, path)
    if state.get("step", 0) > run.last:
        raise UserError(f"--resume {run.args.resume}: its checkpoint is at step {state['step']}, beyond the {run.last} "
                        "steps that --max-steps or --epochs ask for")
    common.on_main(_keep_flags, run.folder / "args.json", run.args)  # now that nothing refuses them
    return state


def _keep_flags(path, args):
    """Say which flags are no more what they were, and save them as they are."""
    saved = common.read_json(path, {})
    flags = {k: v for k, v in vars(args).items() if k not in ("resume", "run_name")}
    for k, v in flags.items():
        if saved.get(k, v) != v:
            say(f"--resume: --{k.replace('_', '-')} was {saved[k]}, is {v} from here on")
    common.write_json(path, saved | flags)


def _put_back(run, path):
    inside = run.optimizer.optimizer, run.accelerator.scaler
    state, run.tensors, run.positions = load_checkpoint(path, run.trained, run.own, *inside)
    if run.second:
        names = [k for k in run.tensors if k.startswith("second.")]
        _unpack_optimizer(run.second, {k.removeprefix("second."): run.tensors.pop(k) for k in names})
    say(f"resumed {path} at step {state['step']} of {run.last}")
    return state


def _unpack_optimizer(optimizer, tensors, plain=None):
    """Put back what _pack_optimizer gave; plain None: the parameter groups stay as they are."""
    plain = plain or {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    entries = {int(i): dict(s) for i, s in plain["state"].items()}
    for k, v in tensors.items():
        entries.setdefault(int(k.split(".", 1)[0]), {})[k.split(".", 1)[1]] = v
    optimizer.load_state_dict({"state": entries, "param_groups": plain["param_groups"]})


def kept_rows(path, step, again):
    """The rows of metrics.jsonl up to the step of the checkpoint; the main process drops the others from the file.

    again: the run that goes on evaluates that very step itself (the first, the last, one stopped in its evaluation)."""
    rows = [r for r in _whole_rows(path) if r["step"] <= step]
    rows = [r for r in rows if not (again and r["step"] == step and "eval" in r)]
    if rank() == 0:
        temporary = path.with_suffix(".tmp")
        with common.writing(path):
            temporary.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf8")
            os.replace(temporary, path)
    return rows


def _whole_rows(path):
    """The rows of metrics.jsonl; one that a crash or a full disk has cut is left out."""
    rows = []
    for line in path.read_text(encoding="utf8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) and "step" in row else []
    return rows


# ======================================================= signals =====================================================
TWICE = 5  # seconds in which a second SIGTERM is the first one: a scheduler's own, and a launcher's that passes it on


def listen(run):
    """From here on Ctrl-C and SIGTERM let the step end and write a checkpoint; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        return
    common.signals.clear()
    began = None
    def note(number, _):
        nonlocal began
        if began is None or number == signal.SIGTERM and time.monotonic() - began < TWICE:
            began = began or time.monotonic()
            common.signals.append(int(number))
            return
        run.ignore_no_more()
        signal.raise_signal(number)
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, note)
        run.handlers[number] = getattr(before, "originals", {}).get(number, before)  # not a failed run's
    note.originals = dict(run.handlers)


def stop(run, number, saved):
    """Leave after a signal, with a checkpoint and the command that goes on. Collective."""
    if not saved:
        run.save()
    if run.bar is not None:
        run.bar.close()
    say(f"stopped after step {run.step} by {signal.Signals(number).name}; to go on: {command(run.folder)}")
    for source in list(common.being_read):
        source.close()  # in the interpreter's last moments each worker would take five seconds to end
    common.barrier()
    common.signals.clear()
    run.ignore_no_more()
    raise SystemExit(128 + number)


def command(folder):
    """The command that goes on with a run: by the launcher that started this one, as far as it tells."""
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
    """A program beside this Python as a shell calls it; one that the shell would not find, as a module."""
    return [name] if shutil.which(name) == str(Path(sys.executable).with_name(name)) else [sys.executable, *module]
