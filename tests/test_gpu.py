"""What only a GPU would show, on the CPU; training on a GPU that is not there: no step waits."""

import collections
import contextlib
import functools
import importlib
import math
import sys
import traceback
from argparse import Namespace
from pathlib import Path

import common
from contrastive.data.batches import FRAMES_AT_ONCE
from contrastive.encoders import base
from contrastive.core.files import flatten, read_json
from contrastive.core.processes import make_accelerator
from contrastive.engine import grad_cache
from contrastive.engine.run import Run
from contrastive.evaluation.by_class import class_metrics
from contrastive.papers.clusters import head_mid_tail
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.retrieval import multi_instance_retrieval, retrieval_both_ways

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import launch
import mama
import ncl
from helpers import of_set, run_script, steps, unit

pytestmark = pytest.mark.filterwarnings("ignore")  # of a GPU that torch does not find
ROOT, aten = str(Path(__file__).parents[1]), torch.ops.aten
# a GPU that is not there: its tensors are meta tensors
GPU, META = torch.device("cuda", 0), torch.device("meta")
# .item(), bool(), .tolist(), torch.equal
VALUES = {aten._local_scalar_dense.default, aten.equal.default}
SHAPES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}  # their shapes are values of the GPU
INDEX = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
TOY = [
    *"--dataset moving-emoji --clips 48 16 16 --image-size 16 --frames 2 --batch-size 16".split(),
    *"--max-steps 5 --log-every 4 --eval-every 0 --save-every 0 --workers 0 --cpu".split(),
]


class Names(TorchFunctionMode):
    """`cuda` in any call becomes `meta`, and a meta tensor says that it lies on `cuda`.

    So the branches of the GPU run.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "pin_memory":
            args[0].pinned_here = True
            return args[0]
        args, kwargs = tree_map_only(
            torch.device, lambda x: META if x.type == "cuda" else x, (args, kwargs or {})
        )
        found = function(*args, **kwargs)
        if function == torch.Tensor.device.__get__ and found.type == "meta":
            return GPU
        return args[0].is_meta if function == torch.Tensor.is_cuda.__get__ else found


class Waits(TorchDispatchMode):
    """Sees every operation, forward and backward; what is read from the GPU is zero or one.

    waits: {(for what, operation, file:line): times} while `on`; collectives: [(steps done, on the
    GPU?)]; products: [on the GPU?] of matrices.
    """

    def __init__(self):
        super().__init__()
        self.waits, self.on, self.step = collections.Counter(), False, 0
        self.collectives, self.products = [], []

    def note(self, what, name):
        if self.on:
            self.waits[what, name, self.place()] += 1

    def place(self):
        """file:line of the innermost line of ours outside this file."""
        ours = [
            f
            for f in traceback.extract_stack()
            if f.filename.startswith(ROOT) and f.filename != __file__
        ]
        last = [f for f in ours if "site-packages" not in f.filename][-1]
        return f"{Path(last.filename).name}:{last.lineno}"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = [x for x in tensors if x.is_meta]
        here = [x for x in tensors if x.ndim and not x.is_meta]
        by_mask = function in INDEX and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
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
            self.note("a copy to the GPU", name)
        elif there and here:
            raise AssertionError(
                f"{function}: a tensor of the host among those of the GPU, {self.place()}"
            )
        return function(*args, **kwargs)

    def copy(self, function, args, kwargs):
        """A copy waits unless it is told not to, and to the GPU unless its memory is pinned."""
        into = function is aten.copy_.default
        source, to = (
            (args[1], args[0].device) if into else (args[0], kwargs.get("device") or args[0].device)
        )
        soon = args[2:] == (True,) if into else kwargs.get("non_blocking")
        if source.is_meta and to.type == "cpu":
            if not soon:
                self.note("a copy from the GPU", function.__name__)
            made = torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return args[0].copy_(made) if into else made
        if (
            not source.is_meta
            and to.type == "meta"
            and not (soon and hasattr(source, "pinned_here"))
        ):
            self.note("a copy to the GPU", function.__name__)
        return function(*args, **kwargs)


# ----------------------------------------------------- half precision, TF32 -----------------------
def test_compiled_in_half_precision_on_two_processes(tmp_path):
    """With the look-ahead through the compiled encoders."""

    def work(_):
        # inductor's C++ takes minutes to compile
        torch.compile = functools.partial(torch.compile, backend="eager")
        run_script(
            mama,
            tmp_path / "run",
            *"--compile --mixed-precision bf16 --meta-size 4".split(),
            *"--meta-batch-size 2 --max-steps 2 --log-every 1".split(),
            base=TOY,
        )

    ended = launch.ranks(tmp_path, work)
    assert [code for code, _ in ended] == [0, 0], ended
    numbers = flatten(read_json(tmp_path / "run" / "summary.json")["test"]).values()
    assert all(math.isfinite(x) for x in numbers if isinstance(x, float))
    assert len(steps(tmp_path / "run")) == 2


@pytest.mark.parametrize("chunk", [0, 4])
def test_tf32_is_for_the_encoders_and_never_for_the_loss(chunk, monkeypatch):
    """There and back, of two encoders and an InfoNCE; the accelerator's stand-in is on a GPU."""
    monkeypatch.setattr(grad_cache, "random_state", lambda device: None)
    monkeypatch.setattr(grad_cache, "set_random_state", lambda state, device: None)
    accelerator = Namespace(
        device=torch.device("cuda"),
        backward=torch.Tensor.backward,
        no_sync=lambda model: contextlib.nullcontext(),
    )
    w, seen = torch.randn(2, 5, 4, requires_grad=True), set()

    def watched(part, x):
        """x, where it is computed and where its gradient is."""
        seen.add((part, torch.backends.cuda.matmul.allow_tf32))
        if x.requires_grad:
            x.register_hook(
                lambda _: seen.add((f"{part}, back", torch.backends.cuda.matmul.allow_tf32))
            )
        return x

    cache = common.GradCache(
        torch.nn.Identity(),
        accelerator,
        chunk,
        lambda x: tuple(watched("encoder", x @ u) for u in w),
    )
    image, text = cache.encode(x=torch.randn(6, 5))
    logits = watched("loss", common.normalize(image) @ common.normalize(text).T / 0.05)
    (own,) = torch.autograd.grad(logits.sum(), image, retain_graph=True)  # as MAMA's weights ask
    (torch.nn.functional.cross_entropy(logits, torch.arange(6)) + own.sum() * 0).backward()
    assert seen == {
        ("encoder", True),
        ("encoder, back", True),
        ("loss", False),
        ("loss, back", False),
    }
    assert w.grad is not None and not torch.backends.cuda.matmul.allow_tf32


def test_a_container_s_tf32_reaches_no_loss(monkeypatch):
    """NVIDIA's images ask for it by a variable, which torch reads when it is imported."""
    made = Namespace(
        distributed_type=accelerate.state.DistributedType.NO, device=torch.device("cuda")
    )
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: made)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with common.tf32():
        make_accelerator(Namespace(
            cpu=False, mixed_precision="no", tracker="", output_dir=".", compile=False))
        assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cudnn.benchmark


# ----------------------------------------------------- layouts, slices ----------------------------
def test_synchronised_norms_keep_the_activations_inside_them(monkeypatch):
    """timm's BatchNormAct2d has the activation of its block; torch's own conversion drops it."""
    encoder = common.VisionEncoder(
        "tf_efficientnet_lite0", 8, pretrained=False, image_size=32
    ).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before, names = encoder(x)[1], list(encoder.state_dict())
    monkeypatch.setattr(base, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    converted = base.sync_batchnorm(encoder, Namespace(chunk_size=0, cpu=False))
    norms = [m for m in converted.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(m, torch.nn.SyncBatchNorm) for m in norms)
    assert list(converted.state_dict()) == names
    torch.testing.assert_close(converted(x)[1], before)


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


def test_views_of_a_gpu_are_the_same_to_the_bit():
    """A GPU changes all samples in place of some, and so many frames at a time."""
    clips = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (300, 2, 3, 32, 32), dtype=np.uint8)
    )
    view = common.Augment(32, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    draws = torch.from_numpy(np.random.default_rng(1).random((300, view.DRAWS), dtype=np.float32))
    transform, seen, found = common.EvalTransform(32, (0.5,) * 3, (0.25,) * 3), [], []

    def photometric(frames, u):
        seen.append(len(frames))
        frames = frames if len(seen) == 1 else frames.as_subclass(OnGPU)
        return view.photometric(frames, u).as_subclass(torch.Tensor)

    for size in (sys.maxsize, FRAMES_AT_ONCE):
        here = Namespace(device=torch.device("cpu"), transform=transform, frames_at_once=size)
        found.append(common.Batches.finish_view(here, clips, photometric, draws))
    assert seen == [600, 256, 256, 88] and torch.equal(*found)


def test_similarities_are_computed_on_the_gpu():
    """Evaluations hold embeddings on the host: what mixes both places is refused.

    Large products are the GPU's.
    """
    image, text, owner = unit(6, 8).float(), unit(12, 8, seed=1).float(), np.arange(12) // 2
    table = common.make_table(
        [[f"{i}"] for i in range(6)],
        [str(i) for i in range(6)],
        verb=[0, 0, 1, 1, 2, 2],
        noun=[0, 1] * 3,
        label=[0, 1] * 3,
    )
    data = common.Data("made", "val", table, pixels=torch.zeros(6, 3, 4, 4, dtype=torch.uint8))
    pieces = EvaluationPieces(
        image=image,
        text=text,
        owner=owner,
        texts=[str(i) for i in range(12)],
        data=data,
        index=np.arange(6),
        positives=torch.from_numpy(owner)[:, None],
        positives_of_image=torch.arange(12).view(6, 2),
        device=GPU,
    )
    clusters = Namespace(
        query_labels=lambda _: torch.tensor([0] * 4 + [1] * 8), sizes=torch.tensor([3, 9])
    )
    with Waits() as seen, Names():
        retrieval_both_ways(pieces)
        retrieval_both_ways(pieces, dsl=0.1)
        multi_instance_retrieval(pieces, None, None, GPU)
        class_metrics(
            ["knn"], (image, None, np.arange(6) % 2), (text, None, np.arange(12) % 2), device=GPU
        )
        ncl.normalized_retrieval(pieces, 0.1, 4, text, image)
        head_mid_tail(pieces, clusters)
    assert seen.products.count(True) > 20
    assert seen.products.count(False) == 1  # of nouns, for relevancies


# ----------------------------------------------------- waits and collectives ----------------------
def train(line, folder, monkeypatch):
    """Four steps as one of eight processes with GPUs -> Waits of the third step.

    That step neither logs nor saves.
    """
    script, *flags = line.split()
    module, waits, names = importlib.import_module(script), Waits(), Names()
    end_step, backward_of_torch = Run.end_step, torch.autograd._engine_run_backward

    def with_gpu(args):
        accelerator = make_accelerator(args)
        # the group comes after it, which would wrap in DDP: that sees no meta tensors
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        return accelerator

    def noted(run, *args, **more):
        end_step(run, *args, **more)
        waits.step, waits.on = run.step, run.step == 2
        if run.step == 4:
            raise SystemExit

    def backward_with_names(
        *args, **kwargs
    ):  # it runs in a handler of functions, where the mode is off
        with names:
            return backward_of_torch(*args, **kwargs)

    def all_gather_object(values, value):
        waits.collectives.append((waits.step, False))
        values[:] = [value] * len(values)

    class Event:
        def record(self):
            self.step = waits.step

        def synchronize(self):
            if self.step == waits.step:
                waits.note("this step", "Event.synchronize")

    with monkeypatch.context() as patch:
        patch.setattr(common, "make_accelerator", with_gpu)
        patch.setattr(accelerate.Accelerator, "device", GPU)
        patch.setattr(Run, "end_step", noted)
        patch.setattr(
            Run, "evaluate_val", lambda run: vars(run).update(val={}, chance={}, val_pieces={})
        )
        patch.setattr(torch.autograd, "_engine_run_backward", backward_with_names)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1))
        patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
        patch.setattr(dist, "all_gather_object", all_gather_object)
        args = module.parse_args(
            [*of_set(TOY, flags), "--output-dir", str(folder), "--run-name", "run", *flags]
        )
        try:
            with waits, names, pytest.raises(SystemExit):
                module.main(args)
        finally:
            dist.destroy_process_group()
    return waits


@pytest.mark.parametrize(
    "line",
    [
        "temo",
        "temo --loss infonce --learnable-tau --jitter .4 --chunk-size 8 --grad-clip 1",
        "temperature_schedules",
        "temperature_schedules --loss moco --queue-size 32 --schedule coarse",
        "ncl",
        "mmts --num-clusters 4",
        "mmts --num-clusters 4 --loss max-margin --alpha 0.2 --shift-min 0.17 --shift-max 0.3",
        "mama --meta-size 8 --meta-batch-size 8",
        "mama --weighting l2rw --meta-size 8 --meta-batch-size 8",
        "temo --text-length 12 --text-encoder CLIP",
        "temo --text-length 12 --text-encoder BERT",
    ],
)  # masks of transformers
def test_no_step_waits_for_the_gpu(line, tiny, tmp_path, monkeypatch):
    """And its collectives, without DDP's own, carry tensors of the GPU alone, as NCCL wants."""
    line = line.replace("CLIP", tiny("clip")[0]).replace("BERT", tiny("bert")[0])
    seen = train(line, tmp_path, monkeypatch)
    of_step = [on_gpu for step, on_gpu in seen.collectives if step == 2]
    assert not seen.waits and len(of_step) >= 2 and all(of_step)  # embeddings and the check
