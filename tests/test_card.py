"""What only a card would show, by stand-ins on the CPU: compiled encoders in half precision, TF32, layouts."""

import contextlib
import functools
import math
import os
import sys
from argparse import Namespace

import common
from contrastive.data.batches import SLICE
from contrastive.encoders import base
from contrastive.engine.processes import flatten, set_up
from contrastive.evaluation.by_class import class_metrics
from contrastive.evaluation.clusters import head_mid_tail
from contrastive.evaluation.retrieval import mir_of, retrieval_both_ways

import accelerate
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import launch
import mama
import ncl
import temo
from card import CARD, Names, Waits
from helpers import losses, run_script, unit

TOY = ["--dataset", "moving-emoji", "--clips", 12, 6, 6, "--image-size", 16, "--frames", 2, "--batch-size", 6,
       "--max-steps", 2, "--log-every", 1, "--save-every", 0, "--cpu"]
HALF = ["--compile", "--mixed-precision", "bf16"]


def quick_compiler():
    """torch.compile traces, without inductor, whose C++ takes minutes to compile."""
    return functools.partial(torch.compile, backend="eager")


def test_compiled_in_half_precision_ends_with_its_numbers(tmp_path, monkeypatch):
    """With the look-ahead through the compiled encoders."""
    monkeypatch.setattr(torch, "compile", quick_compiler())
    summary = run_script(mama, tmp_path / "run", *TOY, *HALF, "--meta-size", 4, "--meta-batch-size", 2)
    numbers = flatten(summary["test"]).values()
    assert all(math.isfinite(x) for x in numbers if isinstance(x, float)) and len(losses(tmp_path / "run")) == 2


def compiled_rank(rank, port, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.compile = quick_compiler()
    run_script(temo, folder, *TOY, *HALF)


def test_compiled_in_half_precision_on_two_processes(tmp_path):
    launch.spawn(compiled_rank, (launch.free_port(), tmp_path / "run"), 2)
    assert len(losses(tmp_path / "run")) == 2


# ----------------------------------------------------- TF32 ----------------------------------------------------------
class Precision(TorchDispatchMode):
    """seen: {(of the encoders or of the loss, TF32?)} of matrix products, there and back; inputs are 5 wide."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            of_encoder = 5 in (*args[0].shape, *args[1].shape)
            self.seen.add(("encoder" if of_encoder else "loss", torch.backends.cuda.matmul.allow_tf32))
        return function(*args, **(kwargs or {}))


class Card:
    """Stands in for the accelerator of a run on a card."""
    device = torch.device("cuda")

    def backward(self, loss):
        loss.backward()

    def no_sync(self, model):
        return contextlib.nullcontext()


def watched_step(chunk, tf32):
    """A step of two encoders and an InfoNCE: the gradient of the weights, Precision.seen."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 5, 4, generator=generator).requires_grad_()
    x = torch.randn(6, 5, generator=generator)
    model = torch.nn.Identity()  # stands in for what chunks do with a model
    chunks = common.Chunks(lambda inputs: tuple(inputs["x"] @ u for u in w), model, Card(), chunk, tf32)
    with Precision() as precision:
        image, text = chunks.encode({"x": x})
        logits = common.normalize(image) @ common.normalize(text).T / 0.05
        own, = torch.autograd.grad(logits.sum(), image, retain_graph=True)  # as MAMA's weights ask
        chunks.backward(torch.nn.functional.cross_entropy(logits, torch.arange(6)) + own.sum() * 0)
    assert not torch.backends.cuda.matmul.allow_tf32
    return w.grad, precision.seen


@pytest.mark.parametrize("chunk", [0, 4])
def test_tf32_is_for_the_encoders_and_never_for_the_loss(chunk, monkeypatch):
    monkeypatch.setattr(common, "random_state", lambda device: None)
    monkeypatch.setattr(common, "set_random_state", lambda state, device: None)
    exact, seen = watched_step(chunk, tf32=False)
    assert seen == {("encoder", False), ("loss", False)}
    fast, seen = watched_step(chunk, tf32=True)
    assert seen == {("encoder", True), ("loss", False)} and torch.equal(fast, exact)


def test_a_container_s_tf32_reaches_no_loss(monkeypatch):
    """NVIDIA's images ask for it by a variable, which torch reads when it is imported."""
    state = accelerate.state.DistributedType.NO
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: Namespace(distributed_type=state, device=Card.device))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    set_up(Namespace(seed=0, cpu=False, mixed_precision="no", tracker="", output_dir="."))
    asked = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.benchmark = False
    assert asked == ("highest", True, True)


# ----------------------------------------------------- layouts and optimiser -----------------------------------------
def test_synchronised_norms_keep_the_activations_inside_them(monkeypatch):
    """timm's BatchNormAct2d has the activation of its block; torch's own conversion drops it."""
    encoder = common.VisionEncoder("tf_efficientnet_lite0", 8, pretrained=False, image_size=32).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before, names = encoder(x)[1], list(encoder.state_dict())
    monkeypatch.setattr(base, "world", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    converted = base.sync_batchnorm(encoder, Namespace(chunk_size=0, cpu=False))
    norms = [m for m in converted.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(m, torch.nn.SyncBatchNorm) for m in norms)
    assert list(converted.state_dict()) == names
    torch.testing.assert_close(converted(x)[1], before)


def test_a_run_on_the_cpu_leaves_the_card_alone(tmp_path, monkeypatch):
    def touched(*_):
        raise AssertionError("the card was opened")
    for name in ("log.torch.cuda.get_device_name", "checkpoints.torch.cuda.get_rng_state"):
        monkeypatch.setattr(f"contrastive.engine.{name}", touched)
    available = torch.cuda.is_available
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "torch/" not in sys._getframe(1).f_code.co_filename
                        or available())  # for our files
    summary = run_script(temo, tmp_path / "a", *TOY)
    assert summary["peak_memory_mb"] > 100 and any("device cpu" in x for x in summary["versions"])


# ----------------------------------------------------- blocks and slices ---------------------------------------------
def test_views_in_slices_are_the_whole_to_the_bit():
    generator = np.random.default_rng(0)
    clips = torch.from_numpy(generator.integers(0, 256, (300, 2, 3, 32, 32), dtype=np.uint8))
    view = common.Augment(32, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    draws = torch.from_numpy(generator.random((300, view.DRAWS), dtype=np.float32))
    transform, seen, found = common.EvalTransform(32, (0.5,) * 3, (0.25,) * 3), [], []

    def photometric(frames, u):
        seen.append(len(frames))
        return view.photometric(frames, u)
    for size in (sys.maxsize, SLICE, 599):
        here = Namespace(device=torch.device("cpu"), transform=transform, slice=size)
        found.append(common.Batches._finish(here, clips, photometric, draws))
    assert seen == [600, 256, 256, 88, 599, 1] and found[0].shape == clips.shape
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# ----------------------------------------------------- similarities --------------------------------------------------
class Products(Waits):
    """products: [on the card?] of matrices."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.products.append(args[0].is_meta)
        return super().__torch_dispatch__(function, types, args, kwargs)


def test_similarities_are_computed_on_the_card():
    """Evaluations hold embeddings on the host: what mixes both places is refused, and large products are the card's."""
    image, text, owner = unit(6, 8).float(), unit(12, 8, seed=1).float(), np.arange(12) // 2
    table = common.make_table([[f"{i}"] for i in range(6)], [str(i) for i in range(6)], verb=[0, 0, 1, 1, 2, 2],
                              noun=[0, 1, 0, 1, 0, 1], label=[0, 1, 0, 1, 0, 1])
    data = common.Data("made", "val", table, pixels=torch.zeros(6, 3, 4, 4, dtype=torch.uint8))
    pieces = {"image": image, "text": text, "owner": owner, "texts": [str(i) for i in range(12)], "data": data,
              "index": np.arange(6), "positives": torch.from_numpy(owner)[:, None],
              "positives_of_image": torch.arange(12).view(6, 2), "device": CARD}
    clusters = Namespace(of_queries=lambda _: torch.tensor([0] * 4 + [1] * 8), sizes=torch.tensor([3, 9]))
    y, asked = np.array([0, 1] * 3), np.array([0, 1, 1] * 4)
    with Products() as seen, Names():
        seen.products = []
        retrieval_both_ways(pieces)
        retrieval_both_ways(pieces, dsl=0.1)
        mir_of(None, None, pieces, CARD)
        class_metrics(["knn"], (image, None, y), (text, None, asked), device=CARD)
        ncl.normalized_retrieval(pieces, 0.1, 4, text, image)
        head_mid_tail(pieces, clusters)
    assert seen.products.count(True) > 20 and seen.products.count(False) == 1  # of nouns, for relevancies
