"""What only a GPU would show, on the CPU; training on a GPU that is not there: no step waits."""

import contextlib
import functools
import importlib
import sys
from argparse import Namespace

import common
from contrastive.core.files import read_json
from contrastive.core.processes import make_accelerator
from contrastive.data.batches import FRAMES_AT_ONCE
from contrastive.encoders import base
from contrastive.engine import checkpoints, grad_cache
from contrastive.engine.run import Run
from contrastive.evaluation.by_class import class_metrics
from contrastive.evaluation.pieces import EvaluationPieces
from contrastive.evaluation.retrieval import multi_instance_retrieval, retrieval_both_ways
from contrastive.papers.clusters import head_mid_tail

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.backends.cuda import matmul
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import launch
import mama
import ncl
from helpers import CPU, assert_close, few_steps, run_script, unit

pytestmark = pytest.mark.filterwarnings("ignore")  # of a GPU that torch does not find
aten = torch.ops.aten
# a GPU that is not there: its tensors are meta tensors
GPU = torch.device("cuda", 0)
META = torch.device("meta")
# .item(), bool(), .tolist(), torch.equal
VALUES = {aten._local_scalar_dense.default, aten.equal.default}
INDEX = {aten.index.Tensor, aten.index_put_.default}
TOY = (
    "--dataset moving-emoji --clips 48 16 16 --image-size 16 --frames 2 --batch-size 16 "
    "--max-steps 5 --log-every 4 --eval-every 0 --save-every 0 --workers 0 --cpu").split()


def meta_of_cuda(device):
    """The meta device in place of a GPU."""
    if device.type == "cuda":
        return META
    return device


class Names(TorchFunctionMode):
    """`cuda` in any call becomes `meta`, and a meta tensor says that it lies on `cuda`, so that
    the branches of the GPU run."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "pin_memory":
            args[0].is_pinned_here = True
            return args[0]
        args, kwargs = tree_map_only(torch.device, meta_of_cuda, (args, kwargs or {}))
        if function == torch.Tensor.is_cuda.__get__:
            return args[0].is_meta
        output = function(*args, **kwargs)
        if function == torch.Tensor.device.__get__ and output.type == "meta":
            return GPU
        return output


class Waits(TorchDispatchMode):
    """Sees every operation, forward and backward; what is read from the GPU is zero or one.

    Attributes:
        is_on: whether to wait for the GPU is an error.
        num_collectives: while it is on.
        products_of_host: number of products of matrices that are not on the GPU.
    """

    def __init__(self):
        super().__init__()
        self.is_on = False
        self.num_collectives = 0
        self.products_of_host = 0

    def check_wait(self, function):
        assert not self.is_on, f"{function} waits for the GPU"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        has_gpu = any(x.is_meta for x in tensors)
        has_host = any(x.ndim and not x.is_meta for x in tensors)
        if function is aten._to_copy.default:
            return self.copy(args[0], function, kwargs)
        if has_gpu and function in VALUES:
            self.check_wait(function)
            return 1
        if has_gpu and has_mask(function, args):
            self.check_wait(function)
            ones = tree_map_only(torch.Tensor, lambda x: torch.ones_like(x, device=CPU), args)
            return function(*ones, **kwargs).to(META)
        if function is aten.mm.default and not has_gpu:
            self.products_of_host += 1
        if function.namespace == "c10d" and self.is_on:
            assert not has_host, f"{function}: a tensor of the host"
            self.num_collectives += 1
        assert not (has_gpu and has_host), f"{function}: tensors of both places"
        return function(*args, **kwargs)

    def copy(self, source, function, kwargs):
        """A copy waits unless it is told not to, and to the GPU unless its memory is pinned."""
        device = kwargs.get("device") or source.device
        is_async = kwargs.get("non_blocking")
        if source.is_meta and device.type == "cpu":
            if not is_async:
                self.check_wait(function)
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        is_upload = device.type == "meta" and not source.is_meta
        if is_upload and not (is_async and hasattr(source, "is_pinned_here")):
            self.check_wait(function)
        return function(source, **kwargs)


def has_mask(function, args):
    """Whether an index is a mask: the shape of its result is a value of the GPU."""
    if function not in INDEX:
        return False
    return any(x is not None and x.dtype == torch.bool for x in args[1])


# ------------------------------------- half precision, TF32 ----------------------------------
@pytest.mark.full
def test_compiled_in_half_precision_on_two_processes(tmp_path):
    """With the look-ahead through the compiled encoders."""
    flags = (
        "--compile --mixed-precision bf16 --meta-size 4 --meta-batch-size 2 --max-steps 2").split()

    def work(_):
        # inductor's C++ takes minutes to compile
        torch.compile = functools.partial(torch.compile, backend="eager")
        run_script(mama, tmp_path / "run", *flags, base=TOY)

    outcomes = launch.ranks(tmp_path, work)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert read_json(tmp_path / "run" / "summary.json")["steps"] == 2


@pytest.mark.parametrize("chunk", [0, 4])
def test_tf32_is_for_the_encoders_and_never_for_the_loss(chunk, monkeypatch):
    """Forward and backward, of two encoders and a loss whose gradient is asked for within it."""
    monkeypatch.setattr(grad_cache, "random_state", lambda device: None)
    monkeypatch.setattr(grad_cache, "set_random_state", lambda state, device: None)
    accelerator = Namespace(
        device=torch.device("cuda"), backward=torch.Tensor.backward,
        no_sync=lambda model: contextlib.nullcontext())
    weights = torch.randn(2, 5, 4, requires_grad=True)
    seen = set()

    def watched(part, x):
        """x, where it is computed and where its gradient is."""
        seen.add((part, matmul.allow_tf32))
        if x.requires_grad:
            x.register_hook(lambda _: seen.add((f"{part}, backward", matmul.allow_tf32)))
        return x

    def encode(x):
        return tuple(watched("encoder", x @ weight) for weight in weights)

    cache = common.GradCache(torch.nn.Identity(), accelerator, chunk, encode)
    image, text = cache.encode(x=torch.randn(6, 5))
    logits = watched("loss", common.normalize(image) @ common.normalize(text).T)
    (gradient,) = torch.autograd.grad(logits.sum(), image, retain_graph=True)  # MAMA's weights
    (logits.sum() + 0 * gradient.sum()).backward()
    assert seen == {
        ("encoder", True), ("encoder, backward", True),
        ("loss", False), ("loss, backward", False)}
    assert not matmul.allow_tf32


def test_a_container_s_tf32_reaches_no_loss(monkeypatch):
    """NVIDIA's images ask for it by a variable, which torch reads when it is imported."""
    accelerator = Namespace(
        distributed_type=accelerate.state.DistributedType.NO, device=torch.device("cuda"))
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    args = Namespace(cpu=False, mixed_precision="no", tracker="", output_dir=".", compile=False)
    with common.tf32():
        make_accelerator(args)
        assert torch.get_float32_matmul_precision() == "highest"


# ---------------------------------------- layouts, slices ------------------------------------
def test_synchronised_norms_keep_the_activations_inside_them(monkeypatch):
    """timm's BatchNormAct2d has the activation of its block; torch's own conversion drops it."""
    encoder = common.VisionEncoder("tf_efficientnet_lite0", 8, False, image_size=32).eval()
    x = torch.randn(2, 3, 32, 32)
    _, before = encoder(x)
    names = list(encoder.state_dict())
    monkeypatch.setattr(base, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    converted = base.sync_batchnorm(encoder, Namespace(chunk_size=0, cpu=False))
    for module in converted.modules():
        assert not isinstance(module, _BatchNorm) or isinstance(module, torch.nn.SyncBatchNorm)
    assert list(converted.state_dict()) == names
    assert_close(converted(x)[1], before)


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


def test_views_of_a_gpu_are_the_same_to_the_bit():
    """A GPU changes all samples in place of some, and so many frames at a time."""
    torch.manual_seed(0)
    clips = torch.randint(0, 256, (300, 2, 3, 32, 32), dtype=torch.uint8)
    augment = common.Augment(32, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    draws = torch.rand(300, augment.DRAWS)
    batches = Namespace(device=CPU, transform=common.EvalTransform(32, (0.5,) * 3, (0.25,) * 3))
    sizes = []

    def on_gpu(frames, u):
        sizes.append(len(frames))
        return augment.photometric(frames.as_subclass(OnGPU), u).as_subclass(torch.Tensor)

    batches.frames_at_once = sys.maxsize
    of_cpu = common.Batches.finish_view(batches, clips, augment.photometric, draws)
    batches.frames_at_once = FRAMES_AT_ONCE
    of_gpu = common.Batches.finish_view(batches, clips, on_gpu, draws)
    assert sizes == [256, 256, 88]
    assert torch.equal(of_gpu, of_cpu)


def test_similarities_are_computed_on_the_gpu():
    """Evaluations hold embeddings on the host: what mixes both places is refused."""
    image = unit(6, 8).float()
    text = unit(12, 8, seed=1).float()
    owner = np.arange(12) // 2
    names = [str(i) for i in range(12)]
    table = common.make_table(
        [[name] for name in names[:6]], names[:6], verb=[0, 0, 1, 1, 2, 2], noun=[0, 1] * 3,
        label=[0, 1] * 3)
    data = common.Data("own", "val", table, pixels=torch.zeros(6, 3, 4, 4, dtype=torch.uint8))
    pieces = EvaluationPieces(
        data, np.arange(6), image, text, names, owner, torch.from_numpy(owner)[:, None],
        torch.arange(12).view(6, 2), device=GPU)
    labels = torch.tensor([0] * 4 + [1] * 8)
    clusters = Namespace(query_labels=lambda _: labels, sizes=torch.tensor([3, 9]))
    train = (image, None, np.arange(6) % 2)
    test = (text, None, np.arange(12) % 2)
    with Waits() as waits, Names():
        retrieval_both_ways(pieces)
        retrieval_both_ways(pieces, dsl=0.1)
        multi_instance_retrieval(pieces, None, None, GPU)
        class_metrics(["knn"], train, test, device=GPU)
        ncl.normalized_retrieval(pieces, 0.1, 4, text, image)
        head_mid_tail(pieces, clusters)
    assert waits.products_of_host == 1  # of nouns, for relevancies


# ----------------------------------------- waits and collectives -----------------------------
def train(line, folder, patch):
    """Five steps as one of eight processes with GPUs -> Waits, which were on in the third: it
    neither logs nor saves."""
    script, *flags = line.split()
    waits, names, steps_done = Waits(), Names(), []
    end_step = Run.end_step
    run_backward = torch.autograd._engine_run_backward

    class Event:
        """An event of the GPU: to wait for one of the same step is a wait."""

        def record(self):
            self.step = len(steps_done)

        def synchronize(self):
            if self.step == len(steps_done):
                waits.check_wait("Event.synchronize")

    def accelerator_of_gpu(args):
        accelerator = make_accelerator(args)
        # the group comes after it, which would wrap in DDP: that sees no meta tensors
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        return accelerator

    def end_step_and_watch(run, *args):
        end_step(run, *args)
        steps_done.append(run.step)
        waits.is_on = run.step == 2

    def backward_with_names(*args, **options):
        with names:  # it runs in a handler of functions, where the mode is off
            return run_backward(*args, **options)

    patch.setattr(common, "make_accelerator", accelerator_of_gpu)
    patch.setattr(accelerate.Accelerator, "device", GPU)
    patch.setattr(checkpoints, "save", lambda run: None)
    patch.setattr(Run, "end_step", end_step_and_watch)
    patch.setattr(torch.autograd, "_engine_run_backward", backward_with_names)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1))
    patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    try:
        with waits, names:
            few_steps(importlib.import_module(script), folder / "run", *flags, base=TOY)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return waits


@pytest.mark.parametrize("line", [
    "temo",
    "temo --loss infonce --learnable-tau --jitter .4 --chunk-size 8 --grad-clip 1",
    "temperature_schedules --loss moco --queue-size 32 --schedule coarse",
    "ncl",
    "mmts --num-clusters 4",
    "mama --meta-size 8 --meta-batch-size 8",
    "temo --text-length 12 --text-encoder {clip}",  # masks of transformers
    "temo --text-length 12 --text-encoder {bert}"])
def test_no_step_waits_for_the_gpu(line, tiny, tmp_path, monkeypatch):
    """Its collectives, without DDP's own, carry tensors of the GPU alone, as NCCL wants."""
    line = line.format(clip=tiny("clip")[0], bert=tiny("bert")[0])
    with monkeypatch.context() as patch:
        waits = train(line, tmp_path, patch)
    assert waits.num_collectives >= 2  # of embeddings and of the check
