"""Checkpoints: one file a checkpoint, whole or not there, from which a run goes on as if it had never stopped.

checkpoints/step_N.pt holds tensors and plain values, as torch.save writes them and `weights_only=True` reads them.
"""

import os
import random
import time
from pathlib import Path

from contrastive.engine.processes import UserError, gather_objects, on_main, opening, rank, say, world

import numpy as np
import torch


def checkpoints_of(folder):
    """The checkpoints of a run, newest first."""
    found = {int(path.stem[5:]): path for path in (folder / "checkpoints").glob("step_*.pt")}
    return [found[step] for step in sorted(found, reverse=True)]


def folder_of(resume):
    """The folder of --resume, which names a run or one of its checkpoints."""
    path = Path(resume)
    return path.parents[1] if path.suffix == ".pt" else path


def save(run, keep=2):
    """Writes checkpoints/step_N.pt under a temporary name, synced and then renamed. Collective: every process adds its
    random state and its place in a stream.   Raises: UserError on all processes; earlier checkpoints stay."""
    kind, numbers, *more = np.random.get_state()
    mine = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if run.device.type == "cuda" else None,
            "python": random.getstate(), "numpy": (kind, numbers.tolist(), *more), "positions": run.data.positions}
    processes = gather_objects(mine)

    def write():
        state = {name: part.state_dict() for name, part in run.parts.items()}
        state |= {"processes": processes, "tensors": run.tensors, "step": run.step, "wall_s": time.time() - run.started,
                  "bad": run.data.bad}
        final = run.folder / "checkpoints" / f"step_{run.step}.pt"
        with opening(final):
            with open(final.with_suffix(".tmp"), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, final)
            for old in checkpoints_of(run.folder)[keep:]:
                old.unlink()
    on_main(write)


def load(run):
    """Restores a Run from the checkpoint that --resume names, else from its last, if it has one."""
    asked = Path(run.args.resume)
    path = asked if asked.suffix == ".pt" else next(iter(checkpoints_of(run.folder)), None)
    if not path:
        return
    with opening(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in run.parts.items():
            part.load_state_dict(state[name])
    run.tensors, run.step, run.bad = (state[k] for k in ("tensors", "step", "bad"))
    run.started -= state["wall_s"]
    if run.step > run.last:
        raise UserError(f"{path}: is beyond the {run.last} steps that --max-steps or --epochs ask for")
    if len(state["processes"]) == world():
        mine = state["processes"][rank()]
        torch.set_rng_state(mine["cpu"])
        if mine["cuda"] is not None and run.device.type == "cuda":
            torch.cuda.set_rng_state(mine["cuda"])
        random.setstate(mine["python"])
        np.random.set_state(mine["numpy"])
        run.positions = mine["positions"]
    else:
        say(f"--resume: {len(state['processes'])} processes before, {world()} now: random states of dropout and places "
            "in streams are not restored")
    say(f"resumed {path} at step {run.step} of {run.last}")
