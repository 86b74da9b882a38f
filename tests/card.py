"""A card that is not there: its tensors are meta tensors, those of the host are real.

Names: `cuda` in any call becomes `meta`, and a meta tensor says that it lies on `cuda`: the card's branches run.
Waits: sees every operation, forward and backward. What is read from the card is zero or one.
"""

import collections
import traceback
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT, aten = str(Path(__file__).parents[1]), torch.ops.aten
CARD, META = torch.device("cuda", 0), torch.device("meta")
VALUES = {aten._local_scalar_dense.default, aten.equal.default}  # .item(), bool(), .tolist(), torch.equal
SHAPES = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.bincount.default,
          aten.repeat_interleave.Tensor}  # their shapes are values of the card
INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


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
    """waits: {(for what, operation, file:line): times} while `on`; collectives: [(steps done, on the card?)];
    products: [on the card?] of matrices."""

    def __init__(self):
        super().__init__()
        self.waits, self.on, self.step = collections.Counter(), False, 0
        self.collectives, self.products = [], []

    def note(self, what, name):
        if self.on:
            self.waits[what, name, place()] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there, here = [x for x in tensors if x.is_meta], [x for x in tensors if x.ndim and not x.is_meta]
        by_mask = function in INDEX and any(x is not None and x.dtype == torch.bool for x in args[1])
        if function is aten.mm.default:
            self.products.append(args[0].is_meta)
        if function.namespace == "c10d":
            self.collectives.append((self.step, not here))
        elif function in (aten._to_copy.default, aten.copy_.default):
            return self.copy(function, args, kwargs)
        elif there and function in VALUES:
            self.note("a value", name)
            return 1.0 if there[0].is_floating_point() else 1
        elif there and (function in SHAPES or by_mask):
            self.note("a shape", name)
            host = tree_map_only(torch.Tensor, lambda x: torch.ones_like(x, device="cpu"), args)
            return tree_map_only(torch.Tensor, lambda x: x.to(META), function(*host, **kwargs))
        elif there and here and function in INDEX:
            self.note("a copy to the card", name)
        elif there and here:
            raise AssertionError(f"{function}: a tensor of the host among those of the card, {place()}")
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
    """file:line of the innermost line of ours outside this file."""
    ours = [f for f in traceback.extract_stack() if f.filename.startswith(ROOT) and "site-packages" not in f.filename]
    last = [f for f in ours if f.filename != __file__ and f.name != "backward_with_names"][-1]
    return f"{Path(last.filename).name}:{last.lineno}"
