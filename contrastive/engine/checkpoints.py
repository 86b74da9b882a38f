"""Checkpoints: one file each, from which a run goes on as if it had never stopped.

checkpoints/step_N.pt is whole or not there. It holds tensors and plain values, as torch.save writes
them and `weights_only=True` reads them.
"""

import os
import random
import time
from pathlib import Path

from contrastive.core.files import whole_file
from contrastive.core.processes import (
    UserError, gather_objects, on_main, opening, rank, print_main, world_size)

import numpy as np
import torch

# what a run writes at its end
FINAL_FILES = (
    "summary.json", "model.safetensors", "own.safetensors", "val.safetensors", "test.safetensors")


def checkpoints_of(folder):
    """The paths of a run's checkpoints, newest first."""
    paths = (folder / "checkpoints").glob("step_*.pt")
    return sorted(paths, key=step_of, reverse=True)


def step_of(path):
    """N of step_N.pt."""
    return int(path.stem.removeprefix("step_"))


def folder_of(resume):
    """The folder of a run; `resume` names it or one of its checkpoints."""
    path = Path(resume)
    if path.suffix == ".pt":
        return path.parents[1]
    return path


# ===================================================== save =======================================
def save(run, keep=2):
    """Writes a checkpoint and removes all but the newest `keep` and the best one. Collective.

    Every process adds its random states and what identifies its data.
    Raises: UserError on all processes if it cannot be written; earlier checkpoints stay.
    """
    states = random_states(run.device)
    states["positions"] = run.data.positions
    states["threads"] = torch.get_num_threads()
    processes = gather_objects(states)
    on_main(write, run, processes, keep)


def write(run, processes, keep):
    """Writes step_N.pt under a temporary name, synced and then renamed."""
    state = {name: part.state_dict() for name, part in run.parts.items()}
    state["processes"] = processes
    state["step"] = run.step
    state["wall_s"] = time.time() - run.started
    state["bad"] = run.data.bad
    path = run.folder / "checkpoints" / f"step_{run.step}.pt"
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    with opening(path):
        for old in checkpoints_of(run.folder)[keep:]:
            if step_of(old) != run.best_step:
                old.unlink()


def random_states(device):
    """The states of this process's random generators, as plain values and tensors."""
    kind, numbers, *position = np.random.get_state()
    cuda = None
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state()
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(),
            "numpy": (kind, numbers.tolist(), *position)}


# ===================================================== load =======================================
def load(run):
    """Restores a Run from its newest checkpoint, if it has one.

    Raises: UserError if it cannot be read, is not the newest, or is beyond the run's last step.
    """
    path = checkpoint_to_load(run)
    if path is None:
        print_main(f"--resume: {run.folder} has no checkpoint yet: starts at step 0")
        return
    state = load_parts(run, path, run.parts)
    run.step = state["step"]
    run.bad_samples = state["bad"]
    run.started -= state["wall_s"]
    if run.step > run.last:
        raise UserError(f"{path}: is beyond the {run.last} steps that --max-steps or --epochs ask "
                        "for; give more of them")
    # what identifies the data is the same on all processes, however many there are now
    run.positions = state["processes"][0]["positions"]
    threads = state["processes"][0]["threads"]
    if len(state["processes"]) == world_size():
        restore_random_states(state["processes"][rank()], run.device)
    else:
        print_main(f"--resume: {len(state['processes'])} processes before, {world_size()} now: "
                   "equal but for rounding, and random states of dropout are not restored")
    if threads != torch.get_num_threads():
        print_main(f"--resume: {threads} threads before, {torch.get_num_threads()} now: equal but "
                   "for rounding")
    print_main(f"resumed {path} at step {run.step} of {run.last}")


def load_parts(run, path, parts):
    """Restores {name: part} of a Run from a checkpoint. Returns: all that the checkpoint holds."""
    with opening(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        # factors of --lr, which may be another one now
        scales = [group.get("lr_scale") for group in run.optimizer.param_groups]
        for name, part in parts.items():
            if name == "scaler" and name not in state:
                continue  # the run has changed to --mixed-precision fp16
            part.load_state_dict(state[name])
        for group, scale in zip(run.optimizer.param_groups, scales):
            if scale is not None:
                group["lr_scale"] = scale
    return state


def checkpoint_to_load(run):
    """The path of the newest checkpoint, or None.

    Raises: UserError if --resume names another one.
    """
    paths = checkpoints_of(run.folder)
    path = Path(run.args.resume)
    if path.suffix != ".pt":
        return paths[0] if paths else None
    newer = [other.name for other in paths if step_of(other) > step_of(path)]
    if newer:
        raise UserError(f"--resume {path}: newer checkpoints lie beside it ({', '.join(newer)}); "
                        f"resume {run.folder}, or delete them first")
    return path


def remove_final_files(run):
    """Removes what a run wrote at its end, if it goes on: eval.py would read the earlier weights.

    Their checkpoint stays.
    """
    removed = []
    for name in FINAL_FILES:
        path = run.folder / name
        if path.exists():
            with opening(path):
                path.unlink()
            removed.append(name)
    if removed:
        print_main(f"the run goes on from step {run.step}: {', '.join(removed)} of its earlier end "
                   "are removed, and written anew at the end")


def free_path(path):
    """The path; if it exists, the first of PATH-2, PATH-3, ... that does not."""
    candidate = path
    number = 2
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def restore_random_states(states, device):
    """Restores what random_states returned."""
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
