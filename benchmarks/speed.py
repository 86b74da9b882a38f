"""Measures the speed and memory that docs/ quotes, most of it as ratios to a plain computation.

    python -m benchmarks.speed                                   # every row
    python -m benchmarks.speed --only ranks steps memory         # these

Updates results/speed.json after each row. Without a GPU, timings are CPU seconds of one thread on
small towers, peak memory is the growth of the process's high-water mark, in a process of its own
(Linux), and `bf16` and `waits` are not run. With a GPU, the rows of towers, losses and views run
on it, in larger sizes, and peak memory is what torch has allocated there. Functions that are
compared take turns, in a different order each round, since each changes caches and free memory for
the next; ratios are medians of each round's ratio. Nothing is downloaded: towers have no weights.
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
import tempfile
import time
import warnings
from collections import deque
from pathlib import Path
from typing import NamedTuple

import common
from contrastive.data.clips import Clips
from contrastive.data.pixels import decode
from contrastive.data.table import MAX_ROWS_AS_LISTS
from contrastive.data.views import crop_batch
from contrastive.encoders.base import STATS
from contrastive.engine.log import commit, logged_rows
from contrastive.engine.run import Run
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
from benchmarks.compare import RESULTS, machine

HAS_GPU = torch.cuda.is_available()
SCRIPTS = (temo, ts, ncl, mmts, mama)


class Sizes(NamedTuple):
    """How large the towers and batches of the rows are."""

    tower: str
    pixels: int  # the side of an image
    batch: int  # of a step
    view_pixels: int  # the side of an image whose views are drawn
    views: int  # how many of them
    loss_pairs: int  # of a loss alone


DEVICE = torch.device("cpu")
SIZES = Sizes(tower="vit_tiny_patch16_224", pixels=96, batch=32, view_pixels=32, views=256,
              loss_pairs=8192)
if HAS_GPU:
    DEVICE = torch.device("cuda")
    SIZES = Sizes(tower="vit_base_patch16_224", pixels=224, batch=128, view_pixels=224, views=512,
                  loss_pairs=32768)
# steps of a run that is watched: speed is measured from FIRST to MIDDLE, waits from MIDDLE to LAST
FIRST, MIDDLE, LAST = 10, 30, 40


# ----------------------------------------------------- tools --------------------------------------
def now():
    """CPU seconds of this process; on a GPU the time when it has done all its work."""
    if HAS_GPU:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def time_functions(functions, rounds):
    """{name: seconds of each round (rounds,)} of functions that take turns."""
    seconds = {name: np.zeros(rounds) for name in functions}
    order = np.random.default_rng(0)
    for k in range(rounds):
        for name in order.permutation(list(functions)):
            start = now()
            functions[name]()
            seconds[name][k] = now() - start
    return seconds


def ratio(seconds, name, base):
    """How many times as long as `base` a function takes.

    Args:
        seconds: as time_functions returns them.
    """
    return float(np.median(seconds[name] / seconds[base]))


def peak_mib(name, build, *args):
    """Growth of the peak memory during `name` of build(*args), in MiB."""
    if HAS_GPU:
        return measure_growth_on_gpu(build(*args)[name])
    # the allocator returns what is freed at once
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(measure_growth, name, build, args).result()


def measure_growth_on_gpu(function):
    """Growth of what torch has allocated on the GPU during the second call of a function, in MiB.
    """
    function()
    torch.cuda.reset_peak_memory_stats()
    start_bytes = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - start_bytes) / 2**20


def measure_growth(name, build, args):
    """As peak_mib, in this process, on the CPU."""
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
    return F.normalize(torch.randn(n, width, device=DEVICE), dim=1)


# ----------------------------------------------------- evaluation and data ------------------------
def ranks(rounds):
    """Exact ranks in chunks against the product of similarities.

    25,010 captions against 5,000 images, D = 512, as on COCO test.
    """
    text, image = random_unit_rows(25_010), random_unit_rows(5_000)
    image_of_text = (torch.arange(25_010) // 5).clamp(max=4_999)           # (25010,)
    positives = image_of_text[:, None].to(DEVICE)                          # (25010, 1)
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


def views(rounds):
    """SimCLR views in batches, plain and compiled, against PIL image by image.

    Ours from uint8 in memory, on the GPU if there is one. Crop .1-1, flip, jitter .4/.4/.4/.1,
    grey.
    """
    from PIL import Image
    from torchvision import transforms as T

    n, side = SIZES.views, SIZES.view_pixels
    images = torch.randint(0, 255, (n, 3, side, side), dtype=torch.uint8)
    pictures = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images]
    images = images.to(DEVICE)
    mean, std = STATS["imagenet"]
    pil = T.Compose([
        T.RandomResizedCrop(side, (0.1, 1), interpolation=T.InterpolationMode.BICUBIC),
        T.RandomHorizontalFlip(), T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
        T.RandomGrayscale(0.2), T.ToTensor(), T.Normalize(mean, std)])
    view = common.Augment(side, 0.1, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2)
    compiled = torch.compile(view.photometric, dynamic=False)
    transform = common.EvalTransform(side, mean, std)

    def ours(photometric):
        draws = common.uniforms(0, 0, range(n), view.DRAWS)                # (n, DRAWS)
        columns = torch.from_numpy(draws)[:, :, None, None, None]          # (n, DRAWS, 1, 1, 1)
        crops = crop_batch(view, images, draws)                            # (n, 3, side, side)
        return transform.normalise(photometric(crops, columns.to(DEVICE)))

    ours(compiled)  # compiles
    seconds = time_functions({
        "pil": lambda: torch.stack([pil(picture) for picture in pictures]),
        "eager": lambda: ours(view.photometric),
        "compiled": lambda: ours(compiled),
    }, rounds)
    return {
        "ratio": ratio(seconds, "pil", "eager"),
        "ratio_compiled": ratio(seconds, "pil", "compiled"),
        "eager_ms": 1000 * float(np.median(seconds["eager"])),
        "compiled_ms": 1000 * float(np.median(seconds["compiled"]))}


def cc3m_views(rounds, n=512, batch=64):
    """Samples/s of one core that makes TeMo's views of CC3M, as a loader worker does.

    Rows of a large table, JPEGs, crop and RandAugment of I and of I~.
    """
    args = temo.parse_args(["--dataset", "cc3m"])
    files = jpegs(16, (500, 400))
    num_rows = MAX_ROWS_AS_LISTS + 1  # not as lists
    view = common.Augment(args.image_size, args.crop_min, randaugment=tuple(args.randaugment))
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
def make_towers(tower, size):
    """Two towers without published weights."""
    torch.manual_seed(0)
    text = common.TextEncoder("small", 128, False, 32, 1000, pooling="mean")
    image = common.VisionEncoder(tower, 128, False, size)
    return common.TwoTower(image, text).to(DEVICE)


def make_inputs(n, size):
    """Random pixels and tokens of a batch of n."""
    ids = torch.randint(1, 1000, (n, 32)).to(DEVICE)
    pixels = torch.randn(n, 3, size, size).to(DEVICE)
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {"pixels": pixels, "tokens": tokens}


def plain_infonce(image, text):
    """InfoNCE at 0.1 as a formula in torch."""
    image = F.normalize(image.float(), dim=1)                              # (B, D)
    text = F.normalize(text.float(), dim=1)                                # (B, D)
    logits = image @ text.T / 0.1                                          # (B, B)
    target = torch.arange(len(logits), device=logits.device)               # (B,)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def make_steps(batch, tower, size):
    """{name: a step} (encode, loss, backward; bf16 on a GPU) of each method on the same towers."""
    from accelerate import Accelerator
    from accelerate.utils import slice_tensors

    model = make_towers(tower, size)
    inputs = make_inputs(2 * batch, size)
    first = slice_tensors(inputs, slice(0, batch))
    second = slice_tensors(inputs, slice(batch, 2 * batch))

    def encode(part):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=HAS_GPU):
            return model(**part)[:2]                                       # (b, D), (b, D)

    def step(loss, backward=torch.Tensor.backward):
        backward(loss())
        model.zero_grad(set_to_none=False)

    losses = make_step_losses(encode, inputs, first, second)
    step(losses["infonce"])  # sets up gradients
    functions = {name: functools.partial(step, loss) for name, loss in losses.items()}
    grad_cache = common.GradCache(
        model, Accelerator(cpu=not HAS_GPU), batch // 4, lambda **part: encode(part))
    functions["infonce, chunks"] = functools.partial(
        step, lambda: temo.multimodal_loss(*grad_cache.encode(**first), 0.1))
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
    shifts = mmts.cluster_shift(sizes, 0.08, 0.12).to(DEVICE)              # (B,)

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

    return {
        "infonce": infonce,
        "plain": lambda: plain_infonce(*encode(first)),
        "ncl": ncl_loss,
        "mmts": mmts_loss,
        "mama": mama_loss,
        "infonce of four": infonce_of_four,
        "temo of four": temo_of_four,
        "temo": temo_loss,
    }


def steps(rounds):
    """A step of each method against InfoNCE's on the same towers; chunks of a quarter of the batch.

    A ViT-Ti at 96 px, B = 32; on a GPU a ViT-B/16 at 224 px in bf16, B = 128. TeMo's also with a
    gradient through I~ and T~.
    """
    functions = make_steps(SIZES.batch, SIZES.tower, SIZES.pixels)
    seconds = time_functions(functions, 2 * rounds)
    results = {}
    for name in ("ncl", "mmts", "mama", "temo", "infonce, chunks"):
        results[f"{name}/infonce"] = ratio(seconds, name, "infonce")
    for name, base in (
            ("infonce", "plain"), ("temo", "temo of four"), ("temo of four", "infonce of four")):
        results[f"{name}/{base}"] = ratio(seconds, name, base)
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


def make_mama_steps(batch, meta, tower, size):
    """A plain step in float32 on `batch` clips, and steps with a look-ahead on `meta` others."""
    model = make_towers(tower, size)
    inputs = make_inputs(batch, size)
    meta_inputs = make_inputs(meta, size)
    weight_net = mama.WeightNet().to(DEVICE)
    loss_fn = functools.partial(mama.angular_margin_loss, tau=0.1, mu=0.2)
    losses = mama.look_ahead_losses(model, loss_fn)
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


def mama_step(rounds):
    """A step of MAMA with the look-ahead of Algorithm 1 against the plain step, in float32.

    A ViT-Ti, B = 32, at 96 px, on a GPU 224: M = B and B / 4; forward mode and second order.
    """
    results = {}
    for meta in (32, 8):
        functions = make_mama_steps(32, meta, "vit_tiny_patch16_224", SIZES.pixels)
        functions["forward"]()  # the first call sets up forward mode
        seconds = time_functions(functions, rounds)
        for name in ("forward", "second_order"):
            results[f"ratio_{name}_M{meta}"] = ratio(seconds, name, "plain")
    return results


def make_losses(n):
    """TeMo's loss, InfoNCE and NT-Xent with their gradients over n pairs, D = 256, in blocks."""
    embeddings = []                                                        # (n, 256) each
    for _ in range(4):
        embeddings.append(torch.randn(n, 256, device=DEVICE, requires_grad=True))
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


def memory(rounds):
    """Peak MiB of the steps of `steps` and `mama_step` without weights, gradients and states, and
    of losses with gradients alone, D = 256, in blocks of rows as in a run."""
    results = {}
    for name in ("infonce", "infonce, chunks", "temo", "temo of four"):
        results[name] = peak_mib(name, make_steps, SIZES.batch, SIZES.tower, SIZES.pixels)
    for name in ("plain", "forward", "second_order"):
        results[f"mama, {name}"] = peak_mib(
            name, make_mama_steps, 32, 32, "vit_tiny_patch16_224", SIZES.pixels)
    for name in ("temo", "infonce", "nt_xent"):
        results[f"{name} loss, N = {SIZES.loss_pairs}"] = peak_mib(
            name, make_losses, SIZES.loss_pairs)
    return results


# ----------------------------------------------------- runs on a GPU ------------------------------
def train(module, *flags):
    """A run of a script in this process, without pictures, in a temporary folder.

    Returns: its summary, and the losses of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["--log-every", "1", "--eval-every", "0", "--save-every", "0", *map(str, flags),
                 "--output-dir", folder, "--run-name", "run"]
        summary = module.main(module.parse_args(words))
        rows = list(logged_rows(Path(folder) / "run" / "metrics.jsonl"))
    return summary, np.array([row["loss"] for row in rows if "loss" in row])


def bf16_difference(module, *flags):
    """Largest relative difference of a script's first 20 losses in bf16 from float32's.

    Another float32 run shows the noise.
    """
    losses = []                                                            # (steps,) each
    for precision in ("no", "bf16", "no"):
        _, run_losses = train(module, "--max-steps", 20, "--mixed-precision", precision, *flags)
        losses.append(run_losses)
    float32, bfloat16, again = losses
    return {"bf16": float(abs(bfloat16 / float32 - 1).max()),
            "fp32 again": float(abs(again / float32 - 1).max())}


def bf16(rounds):
    """bf16_difference of the five scripts with their defaults."""
    return {module.__name__: bf16_difference(module) for module in SCRIPTS}


def watch_run(module, *flags):
    """A run with the script's defaults: samples/s, peak memory, and how often the host waits for
    the GPU in a step."""
    times = {}
    end_step = Run.end_step

    def end_step_and_note(run, *args, **options):
        end_step(run, *args, **options)
        if run.step in (FIRST, MIDDLE):
            times[run.step] = now()
        if HAS_GPU and run.step == MIDDLE:
            torch.cuda.set_sync_debug_mode("warn")
        if HAS_GPU and run.step == LAST - 1:
            torch.cuda.set_sync_debug_mode("default")

    Run.end_step = end_step_and_note
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        summary, _ = train(module, *flags, "--max-steps", LAST, "--log-every", 1000)
    Run.end_step = end_step
    num_waits = 0
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            num_waits += 1
    seconds = times[MIDDLE] - times[FIRST]
    return {"samples_per_s": (MIDDLE - FIRST) * summary["batch"] / seconds,
            "peak_mib": summary["peak_memory_mib"],
            "waits_a_step": num_waits / (LAST - 1 - MIDDLE)}


def waits(rounds):
    """watch_run of the five scripts; no step should wait."""
    return {module.__name__: watch_run(module) for module in SCRIPTS}


# ----------------------------------------------------- command line -------------------------------
ROWS = {
    "ranks": ranks,
    "jpeg": jpeg,
    "views": views,
    "cc3m_views": cc3m_views,
    "decode_clips": decode_clips,
    "steps": steps,
    "sinkhorn": sinkhorn,
    "mama_step": mama_step,
    "memory": memory,
    "bf16": bf16,
    "waits": waits,
}
ROWS_OF_GPU = ("bf16", "waits")


def main():
    """Runs the chosen rows and updates speed.json."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW",
                   help=f"rows to run, of {', '.join(ROWS)}")
    p.add_argument("--rounds", type=int, default=5,
                   help="rounds in which functions take turns; the median counts")
    args = p.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "speed.json"
    all_results = read_json(path, {})
    results = all_results.setdefault(DEVICE.type, {})
    for name in args.only:
        if name in ROWS_OF_GPU and not HAS_GPU:
            print(f"{name}: not run, no GPU", flush=True)
            continue
        torch.manual_seed(0)
        results[name] = ROWS[name](args.rounds) | {
            "command": f"python -m benchmarks.speed --only {name} --rounds {args.rounds}",
            "commit": commit(), "date": str(datetime.date.today()),
            "machine": machine(), "torch": torch.__version__}
        print(name, json.dumps(results[name]), flush=True)
        write_json(path, all_results)


if __name__ == "__main__":
    main()
