"""Training on a card that is not there: no step waits for it, and all processes meet in the same collectives.

The card's tensors are meta tensors, those of the host are real, and `main` of each script runs as it is, with two modes
around it. Names: `cuda` in any call becomes `meta`, and a meta tensor says that it lies on `cuda`, so that the card's
branches run. Waits: sees every operation of forward, backward and optimiser. What is read from the card is zero or one.
"""

import collections
import importlib
import traceback
from pathlib import Path

from contrastive.engine import run as engine
from contrastive.engine.processes import gather, rank
from contrastive.engine.run import Run

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import temo
from helpers import of_set

pytestmark = pytest.mark.filterwarnings("ignore")  # of a card that torch does not find
ROOT, aten = str(Path(__file__).parents[1]), torch.ops.aten
CARD, META = torch.device("cuda", 0), torch.device("meta")
COPIES = {aten._to_copy.default, aten.copy_.default}
VALUES = {aten._local_scalar_dense.default, aten.equal.default}  # .item(), bool(), .tolist(), torch.equal
SHAPES = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.bincount.default,
          aten.repeat_interleave.Tensor}  # their shapes are values of the card
INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
TOY = "--dataset moving-emoji --clips 48 16 16 --image-size 16 --frames 2 --batch-size 16 --max-steps 5 --log-every 4 " \
      "--eval-every 0 --save-every 0 --workers 0 --cpu --run-name run --output-dir"


class Enough(Exception):
    """The steps of a test are done."""


class Names(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "pin_memory":
            args[0].pinned_here = True
            return args[0]
        args, kwargs = tree_map_only(torch.device, lambda x: META if x.type == "cuda" else x, (args, kwargs or {}))
        found = function(*args, **kwargs)
        if function == torch.Tensor.device.__get__ and found.type == "meta":
            return CARD
        return args[0].is_meta if function == torch.Tensor.is_cuda.__get__ else found


class Waits(TorchDispatchMode):
    """waits: {(for what, operation, file:line): times} while `on`; collectives: [(steps done, name, on the card?,
    shapes)]; products: [on the card?] of matrices."""

    def __init__(self):
        super().__init__()
        self.waits, self.collectives, self.products, self.on, self.step = collections.Counter(), [], [], False, 0

    def note(self, what, name):
        if self.on:
            self.waits[what, name, place()] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there, here = [x for x in tensors if x.is_meta], [x for x in tensors if x.ndim and not x.is_meta]
        if function.namespace == "c10d":
            self.collectives.append((self.step, name, not here, [x.shape for x in tensors]))
        elif function in COPIES:
            return self.copy(function, args, kwargs)
        elif there and function in VALUES:
            self.note("a value", name)
            return 1.0 if there[0].is_floating_point() else 1
        elif there and (function in SHAPES or function in INDEX and any(
                i is not None and i.dtype == torch.bool for i in args[1])):
            self.note("a shape", name)
            host = tree_map_only(torch.Tensor, lambda x: torch.ones_like(x, device="cpu"), args)
            return tree_map_only(torch.Tensor, lambda x: x.to(META), function(*host, **kwargs))
        elif there and here and function in INDEX:
            self.note("a copy to the card", name)
        elif there and here:
            raise AssertionError(f"{function}: a tensor of the host among those of the card, {place()}")
        if function is aten.mm.default:
            self.products.append(bool(there))
        return function(*args, **kwargs)

    def copy(self, function, args, kwargs):
        """A copy between the places waits unless it is told not to, and to the card unless its memory is pinned."""
        into = function is aten.copy_.default
        source, to = (args[1], args[0].device) if into else (args[0], kwargs.get("device") or args[0].device)
        soon = args[2:] == (True,) if into else kwargs.get("non_blocking")
        if source.is_meta and to.type == "cpu":
            if not soon:
                self.note("a copy from the card", function.__name__)
            made = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return args[0].copy_(made) if into else made
        if not source.is_meta and to.type == "meta" and not (soon and hasattr(source, "pinned_here")):
            self.note("a copy to the card", function.__name__)
        return function(*args, **kwargs)


def place():
    """file:line of the innermost line of ours outside the modes."""
    modes = "place", "note", "copy", "__torch_dispatch__", "__torch_function__", "backward"
    ours = [f for f in traceback.extract_stack() if f.filename.startswith(ROOT) and f.name not in modes]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


def train(line, folder, monkeypatch, place_of=0, processes=1, said=None):
    """Four steps of a script on a card -> its Waits, those of the third step, which neither logs nor saves.

    With several processes this is the one with number `place_of`; `said`: objects that process 0 has sent."""
    script, *flags = line.split()
    module, waits, names = importlib.import_module(script), Waits(), Names()
    set_up, done, backward_of_torch = engine.set_up, Run.done, torch.autograd._engine_run_backward

    def with_card(args):
        accelerator = set_up(args)
        accelerator.state.device = CARD
        if processes > 1:  # after the accelerator, which would wrap in DDP: that cannot see meta tensors
            dist.init_process_group("fake", rank=place_of, world_size=processes, store=FakeStore())
        return accelerator

    def noted(run, *args, **more):
        done(run, *args, **more)
        waits.step, waits.on = run.step, run.step == 2
        if run.step == 4:
            raise Enough

    def backward(*args, **kwargs):  # it runs in a handler of functions, where the mode is off
        with names:
            return backward_of_torch(*args, **kwargs)

    def all_gather_object(values, value):
        waits.collectives.append((waits.step, "object", False, []))
        if place_of == 0:
            said.append(value)
        values[:] = [said[[name for _, name, *_ in waits.collectives].count("object") - 1]] * processes

    def no_evaluation(run):
        run.val, run.chance, run.val_pieces = {}, {}, {}

    class Event:
        def record(self):
            self.step = waits.step

        def synchronize(self):
            if self.step == waits.step:
                waits.note("this step", "Event.synchronize")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "set_up", with_card)
        patch.setattr(Run, "done", noted)
        patch.setattr(Run, "evaluate_val", no_evaluation)
        patch.setattr(torch.autograd, "_engine_run_backward", backward)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1))
        patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
        patch.setattr(dist, "all_gather_object", all_gather_object)
        args = module.parse_args([*of_set([*TOY.split(), folder], flags), *flags])
        try:
            with waits, names, pytest.raises(Enough):
                module.main(args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return waits


SCRIPTS = ["temo", "temperature_schedules", "ncl", "mmts --num-clusters 4", "mama --meta-size 8 --meta-batch-size 8"]
MORE = ["temo --loss infonce --learnable-tau --jitter .4 --chunk-size 8 --grad-clip 1", "temo --loss slip",
        "temperature_schedules --loss moco --queue-size 32", "temperature_schedules --tau-head .1 --tau-tail .2",
        "ncl --learnable-tau --loss infonce", "mmts --num-clusters 4 --loss max-margin",
        "mama --weighting l2rw --meta-size 8 --meta-batch-size 8"]


@pytest.mark.parametrize("line", [*SCRIPTS, *MORE])
def test_no_step_waits_for_the_card(line, tmp_path, monkeypatch):
    assert not train(line, tmp_path, monkeypatch).waits


@pytest.mark.parametrize("kind", ["clip", "bert", "distilbert"])
def test_no_mask_of_transformers_waits_for_the_card(kind, tiny, tmp_path, monkeypatch):
    line = f"temo --text-encoder {tiny(kind)[0]} --text-length 12"  # pads to a multiple of 8 end there
    assert not train(line, tmp_path, monkeypatch).waits


PLANTS = {"a value": lambda x: x.sum().item(), "a shape": lambda x: x[x > 0],
          "a copy to": lambda x: torch.ones(3).to(x.device), "a copy from": lambda x: x.detach().cpu()}


@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_wait_is_found(kind, tmp_path, monkeypatch):
    loss = temo.temo_loss
    monkeypatch.setattr(temo, "temo_loss", lambda image, *x, **y: (PLANTS[kind](image), loss(image, *x, **y))[1])
    (what, _, where), = train("temo", tmp_path, monkeypatch).waits
    assert kind in what and where.startswith("test_waits.py")


def test_a_planted_tensor_of_the_host_is_refused(tmp_path, monkeypatch):
    loss = temo.temo_loss
    monkeypatch.setattr(temo, "temo_loss", lambda *x, **y: loss(*x, **y) * torch.ones(1))
    with pytest.raises(AssertionError, match="host among those of the card, test_waits.py"):
        train("temo", tmp_path, monkeypatch)


def test_a_check_that_is_read_in_its_own_step_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "lagged", property(lambda run: False, lambda run, value: None), raising=False)
    assert [what for what, *_ in train("temo", tmp_path, monkeypatch).waits] == ["this step"]


@pytest.mark.parametrize("line", SCRIPTS)
def test_processes_meet_in_the_same_collectives(line, tmp_path, monkeypatch):
    """Without DDP's own, which are torch's; those of a step carry tensors of the card alone."""
    said = []
    first, other = (train(line, tmp_path, monkeypatch, place, 8, said) for place in (0, 5))
    assert first.collectives == other.collectives
    of_step = [on_card for step, _, on_card, *_ in first.collectives if step == 2]
    assert len(of_step) >= 5 and all(of_step)  # two embeddings there and back, and the check


def test_a_planted_collective_of_one_process_is_found(tmp_path, monkeypatch):
    loss, said = temo.temo_loss, []

    def planted(image, *x, **y):
        return loss(gather(image)[:2] if rank() else image, *x, **y)
    monkeypatch.setattr(temo, "temo_loss", planted)
    first, other = (train("temo", tmp_path, monkeypatch, place, 8, said) for place in (0, 5))
    assert first.collectives != other.collectives
