"""The rows of speed and memory that docs/ quotes: ratios against the plain product, a plain pipeline or a peer.

    python -m benchmarks.speed [--only ranks jpeg views cc3m_views steps ...]     # updates results/speed.json
    python -m benchmarks.speed memory "temo.py --dataset cc3m" ...                # estimates; results/recipes.json, .md

Timings are CPU seconds of one thread. Variants take turns, in a different order each round, since each changes caches
and free memory for the next; ratios are medians of each round's ratio. Peak memory is the growth of the process's
high-water mark during the call, in a process of its own (Linux). What only a GPU shows is in gpu.py.
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
from contrastive.data.table import IN_MEMORY, decode
from contrastive.data.views import crop_batch
from contrastive.encoders.base import STATS
from contrastive.engine.log import commit
from contrastive.engine.processes import read_json, write_json

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


def times(functions, rounds, clock=time.process_time):
    """{name: seconds of each round (rounds,)} of functions that take turns."""
    found, order = {name: np.zeros(rounds) for name in functions}, np.random.default_rng(0)
    for k in range(rounds):
        for name in order.permutation(list(functions)):
            start = clock()
            functions[name]()
            found[name][k] = clock() - start
    return found


def ratio(found, name, base):
    """How many times as long as `base` a function of `times` takes."""
    return float(np.median(found[name] / found[base]))


def peak_mib(name, build, *args):
    """Growth of the peak memory during `name` of build(*args), in a new process that returns what is freed at once."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(growth, name, build, args).result()


def growth(name, build, args):
    """As peak_mib, in this process."""
    def status(key):
        return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0]) / 1024
    torch.set_num_threads(1)
    run = build(*args)[name]
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def unit_rows(n, width=512):
    """(n, width) random unit vectors."""
    return F.normalize(torch.randn(n, width), dim=1)


def ranks(rounds):
    """Exact ranks of 25,010 captions against 5,000 images, D = 512, as on COCO test, in chunks; against the product."""
    text, image, positives = unit_rows(25_010), unit_rows(5_000), (torch.arange(25_010) // 5).clamp(max=4_999)[:, None]
    t = times({"product": lambda: text @ image.T, "ranks": lambda: common.retrieval_metrics(text, image, positives)},
              rounds)
    return {"ratio": ratio(t, "ranks", "product")}


def jpegs(n, size=(500, 375)):
    """n JPEGs of noise from 24 x 42 pixels, enlarged to size: about as many bytes as a photograph."""
    from PIL import Image

    files = [io.BytesIO() for _ in range(n)]
    for out, small in zip(files, np.random.default_rng(0).integers(0, 255, (n, 24, 42, 3), dtype=np.uint8)):
        Image.fromarray(small).resize(size, Image.BICUBIC).save(out, "jpeg", quality=92)
    return [out.getvalue() for out in files]


def jpeg(rounds, n=192):
    """JPEG 500 x 375 -> random-resized-crop 224: our loader worker, which returns uint8 for the device to normalise,
    against PIL + ToTensor + Normalize."""
    from PIL import Image
    from torchvision import transforms as T

    files, (mean, std), view = jpegs(16), STATS["imagenet"], common.Augment(224, 0.5)
    pil = T.Compose([T.RandomResizedCrop(224, (0.5, 1)), T.ToTensor(), T.Normalize(mean, std)])

    def ours():
        draws = common.uniforms(0, 0, range(n), view.DRAWS)                  # (n, DRAWS)
        return torch.stack([view.crop_one(decode(files[i % 16]), draws[i]) for i in range(n)])
    t = times({"pil": lambda: torch.stack([pil(Image.open(io.BytesIO(files[i % 16])).convert("RGB"))
                                           for i in range(n)]), "ours": ours}, rounds)
    return {"ratio": ratio(t, "pil", "ours")}


def views(rounds, n=256):
    """SimCLR views of CIFAR-size images from memory, in batches, plain and compiled, against PIL per sample and kornia
    in batches. Crop .1-1, flip, jitter .4/.4/.4/.1, grey."""
    from PIL import Image
    from torchvision import transforms as T

    images = torch.randint(0, 255, (n, 3, 32, 32), dtype=torch.uint8)
    pictures = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images]
    mean, std = STATS["imagenet"]
    pil = T.Compose([
        T.RandomResizedCrop(32, (0.1, 1), interpolation=T.InterpolationMode.BICUBIC), T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8), T.RandomGrayscale(0.2),
        T.ToTensor(), T.Normalize(mean, std)])
    eager, fused = (common.Augment(32, 0.1, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2) for _ in range(2))
    fused.photometric = torch.compile(fused.photometric, dynamic=False)
    transform = common.EvalTransform(32, mean, std)

    def ours(augment):
        draws = common.uniforms(0, 0, range(n), augment.DRAWS)               # (n, DRAWS)
        columns = torch.from_numpy(draws)[:, :, None, None, None]            # (n, DRAWS, 1, 1, 1)
        return transform.normalise(augment.photometric(crop_batch(augment, images, draws), columns))

    ours(fused)  # compiles
    variants = {"pil": lambda: torch.stack([pil(p) for p in pictures]), "eager": lambda: ours(eager),
                "compiled": lambda: ours(fused)}
    if find_spec("kornia"):
        from kornia import augmentation as K
        batched = torch.nn.Sequential(
            K.RandomResizedCrop((32, 32), scale=(0.1, 1)), K.RandomHorizontalFlip(),
            K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8), K.RandomGrayscale(p=0.2), K.Normalize(mean, std))
        variants["kornia"] = lambda: batched(images.float() / 255)
    t = times(variants, rounds)
    return {"ratio": ratio(t, "pil", "eager"), "ratio_compiled": ratio(t, "pil", "compiled"),
            "ratio_kornia": ratio(t, "pil", "kornia") if "kornia" in t else "not run"}


def cc3m_views(rounds, n=512, batch=64):
    """TeMo's views of CC3M, as a loader worker makes them: rows of a large table, JPEGs, crop and RandAugment of I and
    of I~. Samples per second of one core."""
    args, files, rows = temo.parse_args(["--dataset", "cc3m"]), jpegs(16, (500, 400)), IN_MEMORY + 1  # not as lists
    view = common.Augment(args.image_size, args.crop_min,
                          randaugment=(args.randaugment_ops, args.randaugment_magnitude))
    with tempfile.TemporaryDirectory() as folder:
        for k, file in enumerate(files):
            Path(folder, f"{k}.jpg").write_bytes(file)
        sources = [f"{folder}/{i % 16}.jpg" for i in range(rows)]
        table = common.make_table([["a caption"]] * rows, map(str, range(rows)), sources)
        data = common.Data("like cc3m", "train", table)

        def ours():
            deque(common.Batches(data, (view, view), None, batch, 0, 0, n // batch, torch.device("cpu")).raw(), 0)
        seconds = np.median(times({"ours": ours}, rounds)["ours"])
    return {"jpeg_bytes": int(np.mean([*map(len, files)])), "ours_samples_per_s": float(n / seconds)}


def of_towers(batches, tower="vit_tiny_patch16_224", size=96, device="cpu"):
    """(two towers without published weights, [pixels and tokens of a batch of each size])."""
    torch.manual_seed(0)
    text = common.TextEncoder("small", 128, False, 32, 1000, "mean")
    model, parts = common.TwoTower(common.VisionEncoder(tower, 128, False, size), text).to(device), []
    for n in batches:
        tokens = {"input_ids": torch.randint(1, 1000, (n, 32)).to(device)}
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
        parts.append({"pixels": torch.randn(n, 3, size, size).to(device), "tokens": tokens})
    return model, parts


def plain_infonce(image, text):
    """InfoNCE at 0.1 as a formula in torch."""
    logits = F.normalize(image.float(), dim=1) @ F.normalize(text.float(), dim=1).T / 0.1  # (B, B)
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def of_steps(batch=32, *towers):
    """{name: a step} (encode, loss, backward; bf16 on a card) of each method on the same towers.

    mama with the margin alone (the look-ahead is in mama_step). temo also encodes I~ and T~, without gradient; `of
    four` with one, to be compared with InfoNCE of both pairs."""
    from accelerate import Accelerator
    from accelerate.utils import slice_tensors

    model, (inputs,) = of_towers([2 * batch], *towers)
    device = inputs["pixels"].device
    shifts = mmts.cluster_shift(torch.randint(1, 100, (batch,)), 0.08, 0.12).to(device)  # (B,), of each pair's cluster
    first, second = (slice_tensors(inputs, slice(k, k + batch)) for k in (0, batch))

    def encode(part):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model(**part)[:2]                                         # (b, D), (b, D)

    chunks = common.Chunks(encode, model, Accelerator(cpu=device.type == "cpu"), batch // 4)
    pair = functools.partial(encode, first)

    def both():
        image, text = encode(inputs)                                         # (2B, D) each
        return zip(image.split(batch), text.split(batch))                    # I and T, I~ and T~: (B, D) each

    def apart():
        with torch.no_grad():
            others = encode(second)
        return *pair(), *others

    losses = {"infonce": lambda: temo.multimodal_loss(*pair(), 0.1),
              "plain": lambda: plain_infonce(*pair()),
              "ncl": lambda: ncl.ncl_loss(*pair()[::-1], 0.1),
              "mmts": lambda: mmts.clip_loss(*pair(), mmts.sample_temperature(3, shifts, 72, 0.08)),
              "mama": lambda: mama.angular_margin_loss(*pair(), 0.1, mama.margin(3)).mean(),
              "infonce of four": lambda: sum(temo.multimodal_loss(*those, 0.1) for those in both()),
              "temo of four": lambda: temo.temo_loss(*itertools.chain(*both()), 0.5, 0.1, 0.05, 0.1),
              "temo": lambda: temo.temo_loss(*apart(), 0.5, 0.1, 0.05, 0.1)}
    if find_spec("open_clip"):
        from open_clip.loss import ClipLoss
        losses["open_clip"] = lambda: ClipLoss()(*(F.normalize(x.float(), dim=1) for x in pair()), 1 / 0.1)

    def descend(loss, backward=torch.Tensor.backward):
        backward(loss())
        model.zero_grad(set_to_none=False)
    descend(losses["infonce"])                                               # sets up gradients
    of_chunks = functools.partial(descend, lambda: temo.multimodal_loss(*chunks.encode(first), 0.1), chunks.backward)
    return {name: functools.partial(descend, loss) for name, loss in losses.items()} | {"infonce, chunks": of_chunks}


def steps(rounds):
    """A step of each method against InfoNCE's, a tiny ViT at 96 px, B = 32; TeMo's also with a gradient through I~ and
    T~, and its peak memory without weights and gradients."""
    t = times(of_steps(), 2 * rounds)
    peak = {name: peak_mib(name, of_steps) for name in ("infonce", "temo", "temo of four")}
    found = {f"{name}/infonce": ratio(t, name, "infonce") for name in ("ncl", "mmts", "mama", "temo")}
    return found | {"temo/temo of four": ratio(t, "temo", "temo of four"),
                    "temo of four/infonce of four": ratio(t, "temo of four", "infonce of four"),
                    **{f"memory temo/{base}": peak["temo"] / peak[base] for base in ("infonce", "temo of four")}}


def sinkhorn(rounds):
    """The 4 rounds of NCL's biases at gamma = 0.01 of 4,096 texts and videos against their product, D = 512."""
    text, video = unit_rows(4096), unit_rows(4096)
    sim = text @ video.T                                                     # (4096, 4096)
    t = times({"product": lambda: text @ video.T, "biases": lambda: ncl.sinkhorn_biases(sim, 0.01)}, rounds)
    return {"ratio_4096x4096": ratio(t, "biases", "product")}


def of_mama(batch, meta, size=96, device="cpu"):
    """A plain step of a tiny ViT on `batch` clips, and steps with a look-ahead on `meta` others."""
    model, parts = of_towers([batch, meta], size=size, device=device)
    net, losses = mama.WeightNet().to(device), mama.losses_of(model, 0.1, 0.2, torch.device(device))
    theta = dict(model.named_parameters())

    def plain():
        video, text = mama.encode(model, **parts[0])                         # (B, D), (B, D)
        mama.angular_margin_loss(video, text, 0.1, 0.2).mean().backward()
        model.zero_grad(set_to_none=False)

    def ahead(method):
        mama.weightnet_gradient(losses, theta, *parts, net, 1e-3, method)
        plain()
    plain()
    return {"plain": plain, "forward": lambda: ahead("forward"), "second_order": lambda: ahead("second-order")}


def mama_step(rounds, batch=32):
    """A step of MAMA with the look-ahead of Algorithm 1 against the plain step, a tiny ViT at 96 px, B = 32: M = B and
    B / 4; forward mode and second order; time, and at M = B peak memory without weights and gradients."""
    results = {}
    for meta in (batch, batch // 4):
        steps = of_mama(batch, meta)
        steps["forward"]()                                                   # torch sets up forward mode at first
        t = times(steps, rounds)
        results |= {f"ratio_{name}_M{meta}": ratio(t, name, "plain") for name in t if name != "plain"}
    peak = {name: peak_mib(name, of_mama, batch, batch) for name in t}
    return results | {f"memory_{name}": p / peak["plain"] for name, p in peak.items() if name != "plain"}


def of_losses(n, device="cpu"):
    """TeMo's loss, InfoNCE and NT-Xent with their gradients over n pairs, D = 256, in blocks as in a run."""
    e = [torch.randn(n, 256, device=device, requires_grad=True) for _ in range(4)]
    losses = {"temo": lambda: temo.temo_loss(*e, 0.3), "infonce": lambda: temo.multimodal_loss(*e[:2], 0.1),
              "nt_xent": lambda: ts.nt_xent(*e[:2], 0.1)}

    def with_gradient(loss):
        torch.autograd.grad(loss(), e, allow_unused=True)
    ts.nt_xent(e[0][:64], e[1][:64], 0.1, block=16).backward()               # a first block: torch imports 130 MiB
    return {name: functools.partial(with_gradient, loss) for name, loss in losses.items()}


def loss_memory(rounds):
    """Peak MiB of the losses over 8,192 pairs, D = 256: with gradients, without embeddings, in blocks as in a run."""
    return {f"{name}_mib_8192": peak_mib(name, of_losses, 8192) for name in ("temo", "nt_xent")}


def write_mp4(path):
    """A clip of 10 s of noise: H.264, 340 x 256, 25 frames/s."""
    import av

    noise = np.random.default_rng(0).integers(0, 255, (125, 8, 10, 3), dtype=np.uint8)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25, options={"crf": "23"})
        stream.width, stream.height, stream.pix_fmt = 340, 256, "yuv420p"
        for small in np.repeat(noise, 2, 0):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(small, format="rgb24").reformat(340, 256)))
        out.mux(stream.encode(None))


def decode_clips(rounds, n=8):
    """Clips/s of one core: 12 frames of a clip of write_mp4, from the file and from --frame-cache."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{i}.mp4" for i in range(n)]
        for file in files:
            write_mp4(file)
        size = os.path.getsize(files[0])
        readers = {"file": Clips(), "cache": Clips(cache=folder)}
        t = times({name: functools.partial(lambda read: [*map(read, files)], read) for name, read in readers.items()},
                  rounds + 1)
    return {"mp4_bytes": size} | {f"{name}_clips_per_s": n / float(np.median(t[name])) for name in t}


def main():
    """Run the chosen benchmarks and update speed.json."""
    benchmarks = {"ranks": ranks, "jpeg": jpeg, "views": views, "cc3m_views": cc3m_views, "steps": steps,
                  "sinkhorn": sinkhorn, "mama_step": mama_step, "loss_memory": loss_memory,
                  "decode_clips": decode_clips}
    if sys.argv[1:2] == ["memory"]:
        return recipes.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=list(benchmarks), default=list(benchmarks), help="which to run")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the median counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = RESULTS / "speed.json"
    results = read_json(path, {})
    for name in args.only:
        results[name] = benchmarks[name](args.rounds) | {
            "command": f"python -m benchmarks.speed --only {name} --rounds {args.rounds}", "commit": commit(),
            "date": str(datetime.date.today()), "machine": machine(), "torch": torch.__version__}
        print(name, json.dumps(results[name]), flush=True)
        write_json(path, results)


if __name__ == "__main__":
    main()
