"""Measures the speed and memory that docs/ quotes, as ratios to a plain computation or a peer.

    python -m benchmarks.speed [--only ranks jpeg views cc3m_views steps ...]
    python -m benchmarks.speed memory "temo.py --dataset cc3m" ...          # estimates: recipes.py

Updates results/speed.json. Timings are CPU seconds of one thread. Variants take turns, in a
different order each round, since each changes caches and free memory for the next; ratios are
medians of each round's ratio. Peak memory is the growth of the process's high-water mark during the
call, in a process of its own (Linux). What only a GPU shows is in gpu.py.
"""

import argparse
import concurrent.futures
import datetime
import functools
import io
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path

import common
from contrastive.data.clips import Clips
from contrastive.data.pixels import decode
from contrastive.data.table import MAX_ROWS_AS_LISTS
from contrastive.data.views import crop_batch
from contrastive.encoders.base import STATS
from contrastive.engine.log import commit
from contrastive.core import row_blocks
from contrastive.core.files import read_json, write_json

import numpy as np
import torch
import torch.nn.functional as F

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from benchmarks import recipes
from benchmarks.compare import RESULTS, machine


# ----------------------------------------------------- tools --------------------------------------
def time_functions(functions, rounds, clock=time.process_time):
    """{name: seconds of each round (rounds,)} of functions that take turns."""
    seconds = {name: np.zeros(rounds) for name in functions}
    order = np.random.default_rng(0)
    for k in range(rounds):
        for name in order.permutation(list(functions)):
            start = clock()
            functions[name]()
            seconds[name][k] = clock() - start
    return seconds


def ratio(seconds, name, base):
    """How many times as long as `base` a function takes.

    Args:
        seconds: as time_functions returns them.
    """
    return float(np.median(seconds[name] / seconds[base]))


def peak_mib(name, build, *args):
    """Growth of the peak memory during `name` of build(*args), in MiB, in a new process."""
    # the allocator returns what is freed at once
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(measure_growth, name, build, args).result()


def measure_growth(name, build, args):
    """As peak_mib, in this process."""
    torch.set_num_threads(1)
    function = build(*args)[name]
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    start_mib = process_status("VmRSS")
    function()
    return process_status("VmHWM") - start_mib


def process_status(key):
    """A number of /proc/self/status in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) / 1024


def random_unit_rows(n, width=512):
    """(n, width) random unit vectors."""
    return F.normalize(torch.randn(n, width), dim=1)


# ----------------------------------------------------- evaluation and data ------------------------
def ranks(rounds):
    """Exact ranks in chunks against the product of similarities.

    25,010 captions against 5,000 images, D = 512, as on COCO test.
    """
    text, image = random_unit_rows(25_010), random_unit_rows(5_000)
    positives = (torch.arange(25_010) // 5).clamp(max=4_999)[:, None]      # (25010, 1)
    seconds = time_functions({
        "product": lambda: text @ image.T,
        "ranks": lambda: common.retrieval_metrics(text, image, positives),
    }, rounds)
    return {"ratio": ratio(seconds, "ranks", "product")}


def jpegs(n, size=(500, 375)):
    """n JPEGs of noise from 24 x 42 pixels, enlarged to size: about as large as photographs."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (n, 24, 42, 3), dtype=np.uint8)
    files = []
    for pixels in noise:
        file = io.BytesIO()
        Image.fromarray(pixels).resize(size, Image.BICUBIC).save(file, "jpeg", quality=92)
        files.append(file.getvalue())
    return files


def jpeg(rounds, n=192):
    """JPEG 500 x 375 -> random-resized-crop 224: our loader worker against torchvision on PIL.

    Ours returns uint8 for the device to normalise, the other one PIL + ToTensor + Normalize.
    """
    from PIL import Image
    from torchvision import transforms as T

    files = jpegs(16)
    mean, std = STATS["imagenet"]
    view = common.Augment(224, 0.5)
    transform = T.Compose([
        T.RandomResizedCrop(224, (0.5, 1)), T.ToTensor(), T.Normalize(mean, std)])

    def pil():
        images = []
        for i in range(n):
            image = Image.open(io.BytesIO(files[i % 16])).convert("RGB")
            images.append(transform(image))
        return torch.stack(images)

    def ours():
        draws = common.uniforms(0, 0, range(n), view.DRAWS)                # (n, DRAWS)
        return torch.stack([view.crop_one(decode(files[i % 16]), draws[i]) for i in range(n)])

    seconds = time_functions({"pil": pil, "ours": ours}, rounds)
    return {"ratio": ratio(seconds, "pil", "ours")}


def views(rounds, n=256):
    """SimCLR views of CIFAR-size images in batches, against PIL per sample and kornia in batches.

    Ours plain and compiled, from memory. Crop .1-1, flip, jitter .4/.4/.4/.1, grey.
    """
    from PIL import Image
    from torchvision import transforms as T

    images = torch.randint(0, 255, (n, 3, 32, 32), dtype=torch.uint8)
    pictures = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images]
    mean, std = STATS["imagenet"]
    pil = T.Compose([
        T.RandomResizedCrop(32, (0.1, 1), interpolation=T.InterpolationMode.BICUBIC),
        T.RandomHorizontalFlip(), T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
        T.RandomGrayscale(0.2), T.ToTensor(), T.Normalize(mean, std)])
    eager = common.Augment(32, 0.1, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2)
    fused = common.Augment(32, 0.1, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2)
    fused.photometric = torch.compile(fused.photometric, dynamic=False)
    transform = common.EvalTransform(32, mean, std)

    def ours(augment):
        draws = common.uniforms(0, 0, range(n), augment.DRAWS)             # (n, DRAWS)
        columns = torch.from_numpy(draws)[:, :, None, None, None]          # (n, DRAWS, 1, 1, 1)
        crops = crop_batch(augment, images, draws)                         # (n, 3, 32, 32)
        return transform.normalise(augment.photometric(crops, columns))

    ours(fused)  # compiles
    variants = {
        "pil": lambda: torch.stack([pil(picture) for picture in pictures]),
        "eager": lambda: ours(eager),
        "compiled": lambda: ours(fused),
    }
    if find_spec("kornia"):
        from kornia import augmentation as K
        batched = torch.nn.Sequential(
            K.RandomResizedCrop((32, 32), scale=(0.1, 1)), K.RandomHorizontalFlip(),
            K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8), K.RandomGrayscale(p=0.2),
            K.Normalize(mean, std))
        variants["kornia"] = lambda: batched(images.float() / 255)
    seconds = time_functions(variants, rounds)
    results = {
        "ratio": ratio(seconds, "pil", "eager"),
        "ratio_compiled": ratio(seconds, "pil", "compiled"),
        "ratio_kornia": "not run",
    }
    if "kornia" in seconds:
        results["ratio_kornia"] = ratio(seconds, "pil", "kornia")
    return results


def cc3m_views(rounds, n=512, batch=64):
    """Samples/s of one core that makes TeMo's views of CC3M, as a loader worker does.

    Rows of a large table, JPEGs, crop and RandAugment of I and of I~.
    """
    args = temo.parse_args(["--dataset", "cc3m"])
    files = jpegs(16, (500, 400))
    num_rows = MAX_ROWS_AS_LISTS + 1  # not as lists
    randaugment = (args.randaugment_ops, args.randaugment_magnitude, args.randaugment_strengths)
    view = common.Augment(args.image_size, args.crop_min, randaugment=randaugment)
    with tempfile.TemporaryDirectory() as folder:
        for k, file in enumerate(files):
            Path(folder, f"{k}.jpg").write_bytes(file)
        sources = [f"{folder}/{i % 16}.jpg" for i in range(num_rows)]
        keys = [str(i) for i in range(num_rows)]
        table = common.make_table([["a caption"]] * num_rows, keys, sources)
        data = common.Data("like cc3m", "train", table)

        def ours():
            batches = common.Batches(data, (view, view), None, batch, 0, first=0, last=n // batch,
                                     device=torch.device("cpu"))
            deque(batches.raw(), 0)  # reads all, keeps none

        seconds = np.median(time_functions({"ours": ours}, rounds)["ours"])
    sizes = [len(file) for file in files]
    return {"jpeg_bytes": int(np.mean(sizes)), "ours_samples_per_s": float(n / seconds)}


def write_mp4(path):
    """Writes a clip of 10 s of noise: H.264, 340 x 256, 25 frames/s."""
    import av

    noise = np.random.default_rng(0).integers(0, 255, (125, 8, 10, 3), dtype=np.uint8)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25, options={"crf": "23"})
        stream.width = 340
        stream.height = 256
        stream.pix_fmt = "yuv420p"
        for pixels in np.repeat(noise, 2, 0):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            out.mux(stream.encode(frame.reformat(340, 256)))
        out.mux(stream.encode(None))


def decode_clips(rounds, n=8):
    """Clips/s of one core: 12 frames of a clip of write_mp4, from the file and --frame-cache."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{i}.mp4" for i in range(n)]
        for file in files:
            write_mp4(file)
        size = os.path.getsize(files[0])

        def read_all(clips):
            for file in files:
                clips(file)

        seconds = time_functions({
            "file": functools.partial(read_all, Clips()),
            "cache": functools.partial(read_all, Clips(cache=folder)),
        }, rounds + 1)
    return {"mp4_bytes": size,
            "file_clips_per_s": n / float(np.median(seconds["file"])),
            "cache_clips_per_s": n / float(np.median(seconds["cache"]))}


# ----------------------------------------------------- steps --------------------------------------
def make_towers(tower="vit_tiny_patch16_224", size=96, device="cpu"):
    """Two towers without published weights."""
    torch.manual_seed(0)
    text = common.TextEncoder("small", 128, False, 32, 1000, pooling="mean")
    image = common.VisionEncoder(tower, 128, False, size)
    return common.TwoTower(image, text).to(device)


def make_inputs(n, size=96, device="cpu"):
    """Random pixels and tokens of a batch of n."""
    ids = torch.randint(1, 1000, (n, 32)).to(device)
    pixels = torch.randn(n, 3, size, size).to(device)
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {"pixels": pixels, "tokens": tokens}


def plain_infonce(image, text):
    """InfoNCE at 0.1 as a formula in torch."""
    image = F.normalize(image.float(), dim=1)                              # (B, D)
    text = F.normalize(text.float(), dim=1)                                # (B, D)
    logits = image @ text.T / 0.1                                          # (B, B)
    target = torch.arange(len(logits), device=logits.device)               # (B,)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def make_steps(batch=32, tower="vit_tiny_patch16_224", size=96, device="cpu"):
    """{name: a step} (encode, loss, backward; bf16 on a GPU) of each method on the same towers."""
    from accelerate import Accelerator
    from accelerate.utils import slice_tensors

    model = make_towers(tower, size, device)
    inputs = make_inputs(2 * batch, size, device)
    first = slice_tensors(inputs, slice(0, batch))
    second = slice_tensors(inputs, slice(batch, 2 * batch))
    device = inputs["pixels"].device

    def encode(part):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model(**part)[:2]                                       # (b, D), (b, D)

    def step(loss, backward=torch.Tensor.backward):
        backward(loss())
        model.zero_grad(set_to_none=False)

    losses = make_step_losses(encode, inputs, first, second)
    step(losses["infonce"])  # sets up gradients
    functions = {name: functools.partial(step, loss) for name, loss in losses.items()}
    chunks = common.Chunks(encode, model, Accelerator(cpu=device.type == "cpu"), batch // 4)
    functions["infonce, chunks"] = functools.partial(
        step, lambda: temo.multimodal_loss(*chunks.encode(first), 0.1), chunks.backward)
    return functions


def make_step_losses(encode, inputs, first, second):
    """{name: function that encodes a batch and returns a method's loss}.

    mama with the margin alone (the look-ahead is in mama_step). temo also encodes I~ and T~,
    without gradient; `of four` with one, to be compared with InfoNCE of both pairs.

    Args:
        encode: function of inputs -> image and text embeddings.
        inputs: I and T, then I~ and T~; first, second: these two parts.
    """
    batch = len(first["pixels"])
    sizes = torch.randint(1, 100, (batch,))  # of the cluster of each pair
    shifts = mmts.cluster_shift(sizes, 0.08, 0.12).to(first["pixels"].device)        # (B,)

    def encode_both():
        image, text = encode(inputs)                                       # (2B, D) each
        return zip(image.split(batch), text.split(batch))    # I and T, I~ and T~: (B, D) each

    def infonce():
        return temo.multimodal_loss(*encode(first), 0.1)

    def ncl_loss():
        image, text = encode(first)                                        # (B, D) each
        return ncl.ncl_loss(text, image, 0.1)

    def mmts_loss():
        tau = mmts.sample_temperature(3, shifts, 72, 0.08)                 # (B,)
        return mmts.clip_loss(*encode(first), tau)

    def mama_loss():
        return mama.angular_margin_loss(*encode(first), 0.1, mama.margin(3)).mean()

    def infonce_of_four():
        return sum(temo.multimodal_loss(*pair, 0.1) for pair in encode_both())

    def temo_of_four():
        return temo.temo_loss(*itertools.chain(*encode_both()), 0.5, 0.1, 0.05, 0.1)

    def temo_loss():
        with torch.no_grad():
            augmented = encode(second)
        return temo.temo_loss(*encode(first), *augmented, 0.5, 0.1, 0.05, 0.1)

    losses = {
        "infonce": infonce,
        "plain": lambda: plain_infonce(*encode(first)),
        "ncl": ncl_loss,
        "mmts": mmts_loss,
        "mama": mama_loss,
        "infonce of four": infonce_of_four,
        "temo of four": temo_of_four,
        "temo": temo_loss,
    }
    if find_spec("open_clip"):
        losses["open_clip"] = lambda: open_clip_loss(*encode(first))
    return losses


def open_clip_loss(image, text):
    """InfoNCE at 0.1 by open_clip."""
    from open_clip.loss import ClipLoss

    image = F.normalize(image.float(), dim=1)                              # (B, D)
    text = F.normalize(text.float(), dim=1)                                # (B, D)
    return ClipLoss()(image, text, 1 / 0.1)


def steps(rounds):
    """A step of each method against InfoNCE's, a tiny ViT at 96 px, B = 32.

    TeMo's also with a gradient through I~ and T~, and its peak memory without weights and
    gradients.
    """
    seconds = time_functions(make_steps(), 2 * rounds)
    results = {}
    for name in ("ncl", "mmts", "mama", "temo"):
        results[f"{name}/infonce"] = ratio(seconds, name, "infonce")
    for name, base in (("temo", "temo of four"), ("temo of four", "infonce of four")):
        results[f"{name}/{base}"] = ratio(seconds, name, base)
    peak = peak_mib("temo", make_steps)
    for base in ("infonce", "temo of four"):
        results[f"memory temo/{base}"] = peak / peak_mib(base, make_steps)
    return results


def sinkhorn(rounds):
    """The 4 rounds of NCL's biases at gamma = 0.01 against the product of similarities.

    4,096 texts and videos, D = 512.
    """
    text, video = random_unit_rows(4096), random_unit_rows(4096)
    sim = text @ video.T                                                   # (4096, 4096)
    seconds = time_functions({
        "product": lambda: text @ video.T,
        "biases": lambda: ncl.sinkhorn_biases(sim, 0.01),
    }, rounds)
    return {"ratio_4096x4096": ratio(seconds, "biases", "product")}


def make_mama_steps(batch, meta, size=96, device="cpu"):
    """A plain step of a tiny ViT on `batch` clips, and steps with a look-ahead on `meta` others."""
    model = make_towers(size=size, device=device)
    inputs = make_inputs(batch, size, device)
    meta_inputs = make_inputs(meta, size, device)
    weight_net = mama.WeightNet().to(device)
    loss_fn = functools.partial(mama.angular_margin_loss, tau=0.1, mu=0.2)
    losses = mama.look_ahead_losses(model, loss_fn, torch.device(device))
    parameters = dict(model.named_parameters())

    def plain():
        video, text, _ = model(**inputs)                                   # (B, D), (B, D)
        loss_fn(video, text).mean().backward()
        model.zero_grad(set_to_none=False)

    def look_ahead(method):
        mama.weightnet_gradient(losses, parameters, inputs, meta_inputs, weight_net, 1e-3, method)
        plain()

    plain()  # sets up gradients
    return {"plain": plain,
            "forward": lambda: look_ahead("forward"),
            "second_order": lambda: look_ahead("second-order")}


def mama_step(rounds, batch=32):
    """A step of MAMA with the look-ahead of Algorithm 1 against the plain step.

    A tiny ViT at 96 px, B = 32: M = B and B / 4; forward mode and second order; time, and at M = B
    peak memory without weights and gradients.
    """
    results = {}
    for meta in (batch, batch // 4):
        functions = make_mama_steps(batch, meta)
        functions["forward"]()  # the first call sets up forward mode
        seconds = time_functions(functions, rounds)
        for name in ("forward", "second_order"):
            results[f"ratio_{name}_M{meta}"] = ratio(seconds, name, "plain")
    plain = peak_mib("plain", make_mama_steps, batch, batch)
    for name in ("forward", "second_order"):
        results[f"memory_{name}"] = peak_mib(name, make_mama_steps, batch, batch) / plain
    return results


def make_losses(n, device="cpu"):
    """TeMo's loss, InfoNCE and NT-Xent with their gradients over n pairs, D = 256, in blocks."""
    embeddings = []                                                        # (n, 256) each
    for _ in range(4):
        embeddings.append(torch.randn(n, 256, device=device, requires_grad=True))
    losses = {
        "temo": lambda: temo.temo_loss(*embeddings, 0.3),
        "infonce": lambda: temo.multimodal_loss(*embeddings[:2], 0.1),
        "nt_xent": lambda: ts.nt_xent(*embeddings[:2], 0.1),
    }

    def with_gradient(loss):
        torch.autograd.grad(loss(), embeddings, allow_unused=True)

    # a first block: torch imports 130 MiB
    row_blocks.rows_at_a_time = 16
    ts.nt_xent(embeddings[0][:64], embeddings[1][:64], 0.1).backward()
    row_blocks.rows_at_a_time = 0
    return {name: functools.partial(with_gradient, loss) for name, loss in losses.items()}


def loss_memory(rounds):
    """Peak MiB of the losses with gradients over 8,192 pairs, D = 256, in blocks as in a run."""
    return {"temo_mib_8192": peak_mib("temo", make_losses, 8192),
            "nt_xent_mib_8192": peak_mib("nt_xent", make_losses, 8192)}


# ----------------------------------------------------- command line -------------------------------
BENCHMARKS = {
    "ranks": ranks,
    "jpeg": jpeg,
    "views": views,
    "cc3m_views": cc3m_views,
    "steps": steps,
    "sinkhorn": sinkhorn,
    "mama_step": mama_step,
    "loss_memory": loss_memory,
    "decode_clips": decode_clips,
}


def main():
    """Runs the chosen benchmarks and updates speed.json."""
    if sys.argv[1:2] == ["memory"]:
        recipes.main(sys.argv[2:])
        return
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS),
                   help="benchmarks to run")
    p.add_argument("--rounds", type=int, default=5,
                   help="rounds in which the variants take turns; the median counts")
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = RESULTS / "speed.json"
    results = read_json(path, {})
    for name in args.only:
        command = f"python -m benchmarks.speed --only {name} --rounds {args.rounds}"
        results[name] = BENCHMARKS[name](args.rounds) | {
            "command": command, "commit": commit(), "date": str(datetime.date.today()),
            "machine": machine(), "torch": torch.__version__}
        print(name, json.dumps(results[name]), flush=True)
        write_json(path, results)


if __name__ == "__main__":
    main()
