"""Ratios of speed and memory against the plain product or a plain pipeline, in one run.

    python benchmarks/speed.py [--only ranks knn jpeg views ncl_step mmts_step sinkhorn mama_step]

Timings are CPU seconds of one thread, the minimum of interleaved rounds; only the ratios mean anything. Peak memory is
the growth of the process's high-water mark over the call, in a process of its own (Linux). Nothing here is a test.
"""

import argparse
import datetime
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

from claims import machine  # noqa: E402

import mmts  # noqa: E402
import ncl  # noqa: E402


def cpu_seconds(functions, rounds):
    """{name: minimum CPU seconds}; the functions take turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - start)
    return best


def peak_mib(code):
    """Growth of the peak resident set over `run()` defined by `code`, in a fresh process that gives memory back."""
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch; import common
torch.set_num_threads(1)
def status(key): return next(int(l.split()[1]) / 1024 for l in open('/proc/self/status') if l.startswith(key))
{code}
open('/proc/self/clear_refs', 'w').write('5'); before = status('VmRSS'); run(); print(status('VmHWM') - before)
"""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(answer.split()[-1])


def unit_rows(n, width=512):
    """(n, width) random unit vectors."""
    return F.normalize(torch.randn(n, width), dim=1)


def ranks(rounds):
    """Exact ranks of 25,010 captions against 5,000 images, D = 512: the COCO test, chunked, against its product."""
    text, image = unit_rows(25010), unit_rows(5000)
    positives = (torch.arange(25010) // 5).clamp(max=4999)[:, None]          # (25010, 1)
    t = cpu_seconds({"product": lambda: text @ image.T,
                     "ranks": lambda: common.retrieval_metrics(text, image, positives)}, rounds)
    peak = peak_mib("""
text, image = torch.randn(25010, 512), torch.randn(5000, 512)
positives = (torch.arange(25010) // 5).clamp(max=4999)[:, None]
def run(): common.retrieval_metrics(text, image, positives)""")
    return {"product_s": t["product"], "ours_s": t["ranks"], "ratio": t["ranks"] / t["product"], "goal": "<= 4",
            "peak_mib": peak, "goal_mib": "< 150"}


def knn(rounds):
    """kNN@10 of 10,000 queries in 50,000 items, D = 512, 100 classes, against the product."""
    train, test = unit_rows(50000), unit_rows(10000)
    labels, truth = torch.randint(0, 100, (50000,)), torch.randint(0, 100, (10000,))

    def product():  # in chunks as well: the whole matrix would be 2 GB
        for i in range(0, 10000, 1024):
            test[i:i + 1024] @ train.T

    t = cpu_seconds({"product": product, "knn": lambda: common.knn_accuracy(train, labels, test, truth, k=10)}, rounds)
    return {"product_s": t["product"], "ours_s": t["knn"], "ratio": t["knn"] / t["product"], "goal": "<= 1.5"}


def jpegs():
    """16 JPEGs of 500 x 375 as bytes: enlarged noise, about as many bytes as a photograph."""
    from PIL import Image

    files = []
    for small in np.random.default_rng(0).integers(0, 255, (16, 24, 42, 3), dtype=np.uint8):
        out = io.BytesIO()
        Image.fromarray(small).resize((500, 375), Image.BICUBIC).save(out, "jpeg", quality=92)
        files.append(out.getvalue())
    return files


def jpeg(rounds, n=192):
    """JPEG 500 x 375 -> random-resized-crop 224: our loader worker against PIL + ToTensor + Normalize, images a second.

    Our worker gives uint8 and the device normalises; `whole` does that on the same core too.
    """
    from PIL import Image
    from torchvision import transforms as T

    files = jpegs()
    mean, std = common.STATS["imagenet"]
    pil = T.Compose([T.RandomResizedCrop(224, (0.5, 1)), T.ToTensor(), T.Normalize(mean, std)])
    view, transform = common.Augment(224, 0.5), common.EvalTransform(224, mean, std)
    batches = [range(i, i + 32) for i in range(0, n, 32)]

    def old():
        torch.stack([pil(Image.open(io.BytesIO(files[i % 16])).convert("RGB")) for i in range(n)])

    def worker(rows):
        draws = common.uniforms(0, 0, rows, view.DRAWS)                      # (32, DRAWS)
        crops = [view.crop_one(common.decode(files[i % 16]), u) for i, u in zip(rows, draws, strict=True)]
        return torch.stack(crops), draws                                     # (32, 3, 224, 224) uint8

    def ours():
        for rows in batches:
            worker(rows)

    def whole():
        for rows in batches:
            x, draws = worker(rows)
            transform.normalise(view.finish(x.float().div_(255), draws))

    t = cpu_seconds({"pil": old, "ours": ours, "whole": whole}, rounds)
    return {"jpeg_bytes": int(np.mean([len(f) for f in files])),
            "pil_images_per_s": n / t["pil"], "ours_images_per_s": n / t["ours"], "ratio": t["pil"] / t["ours"],
            "ratio_with_normalise_on_the_same_core": t["pil"] / t["whole"], "goal": ">= 1.5"}


def views(rounds, n=256):
    """SimCLR views of CIFAR-size images, batched from memory, and compiled, against PIL per sample; views a second.

    Crop .1-1, flip, jitter .4/.4/.4/.1, grey.
    """
    from PIL import Image
    from torchvision import transforms as T

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
    pictures = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images]
    mean, std = common.STATS["imagenet"]
    pil = T.Compose([
        T.RandomResizedCrop(32, (0.1, 1), interpolation=T.InterpolationMode.BICUBIC), T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8), T.RandomGrayscale(0.2),
        T.ToTensor(), T.Normalize(mean, std)])
    eager, fused = (common.Augment(32, 0.1, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2) for _ in range(2))
    fused.photometric = torch.compile(fused.photometric, dynamic=False)
    transform = common.EvalTransform(32, mean, std)

    def ours(augment):
        draws = common.uniforms(0, 0, range(n), augment.DRAWS)               # (n, DRAWS)
        return transform.normalise(augment.finish(augment.crop_batch(images, draws), draws))

    ours(fused)  # compiles
    t = cpu_seconds({"pil": lambda: torch.stack([pil(p) for p in pictures]), "eager": lambda: ours(eager),
                     "compiled": lambda: ours(fused)}, rounds)
    speeds = {f"{k}_views_per_s": n / v for k, v in t.items()}
    return speeds | {"ratio": t["pil"] / t["eager"], "ratio_compiled": t["pil"] / t["compiled"],
                     "goal": ">= 3 eager, >= 8 compiled"}


def towers_and_batch(recipe):
    """The small towers of a recipe on clips, and a batch of its shapes: model, pixels, tokens."""
    r = recipe
    batch, length, size = r["batch_size"], r["text_length"], r["image_size"]
    vision = common.VisionEncoder("small", r["embed_dim"], False, size)
    text = common.TextEncoder("small", r["embed_dim"], False, length, 1000, r["text_pooling"])
    model = common.TwoTower(vision, text)
    pixels = torch.randn(batch, r["frames"], 3, size, size)
    tokens = {"input_ids": torch.randint(1, 1000, (batch, length)),
              "attention_mask": torch.ones(batch, length, dtype=torch.long)}
    return model, pixels, tokens


def ncl_step(rounds):
    """A whole step of NCL (encode, loss, backward) against one of InfoNCE, at the shapes of its default recipe."""
    r = ncl.RECIPES["moving-emoji"]
    model, pixels, tokens = towers_and_batch(r)

    def step(iterations):
        video, text, _ = model(pixels, tokens)                               # (B, D), (B, D)
        ncl.ncl_loss(text, video, r["tau"], iterations).backward()
        model.zero_grad()

    step(4)
    t = cpu_seconds({"infonce": lambda: step(0), "ncl": lambda: step(4)}, 5 * rounds)  # the difference is small
    return {"infonce_s": t["infonce"], "ncl_s": t["ncl"], "ratio": t["ncl"] / t["infonce"], "goal": "<= 1.03"}


def mmts_step(rounds):
    """A whole step of MM-TS (look-up, encode, loss, backward) against one of InfoNCE, at its default recipe."""
    from types import SimpleNamespace

    from tools import clusters
    r, train = mmts.RECIPES["moving-emoji"], common.load_data("moving-emoji", "train")
    model, pixels, tokens = towers_and_batch(r)
    keys, texts = zip(*((train.key(i), train.captions(i)[0]) for i in range(len(pixels))))
    args = SimpleNamespace(clusters="captions", cluster_encoder="tf-idf", num_clusters=200, cluster_starts=1, seed=0,
                           dataset="moving-emoji")
    with tempfile.TemporaryDirectory() as folder:
        kmeans = functools.partial(mmts.cluster_captions, k=200, seed=0)
        known = clusters.open_clusters(Path(folder), args, train, torch.device("cpu"), kmeans)
    shifts = mmts.cluster_shift(known.sizes, 0.08, 0.12)                     # (K,)

    def step(scheduled):
        tau = mmts.sample_temperature(3, shifts[known.look_up(keys, texts)[0]], 72, 0.08) if scheduled else 0.1
        image, text, _ = model(pixels, tokens)                               # (B, D), (B, D)
        mmts.clip_loss(image, text, tau).backward()
        model.zero_grad()

    step(True)
    t = cpu_seconds({"infonce": lambda: step(False), "mmts": lambda: step(True)}, 5 * rounds)
    return {"infonce_s": t["infonce"], "mmts_s": t["mmts"], "ratio": t["mmts"] / t["infonce"], "goal": "<= 1.03"}


def sinkhorn(rounds):
    """The 4 rounds of NCL's biases at gamma = 0.01 against the similarity product they start from, D = 512.

    A batch, and a queue against test videos. Memory in similarity matrices.
    """
    results = {}
    for m, n in ((4096, 4096), (16384, 1000)):
        text, video = unit_rows(m), unit_rows(n)
        sim = text @ video.T                                                 # (m, n)

        def product(text=text, video=video):
            return text @ video.T

        def biases(sim=sim):
            return ncl.sinkhorn_biases(sim, 0.01)

        t = cpu_seconds({"product": product, "biases": biases}, rounds)
        peak = peak_mib(f"""
import ncl
from torch.nn.functional import normalize
sim = normalize(torch.randn({m}, 512), dim=1) @ normalize(torch.randn({n}, 512), dim=1).T
def run(): ncl.sinkhorn_biases(sim, 0.01)""")
        shape = f"{m}x{n}"
        results |= {f"product_s_{shape}": t["product"], f"biases_s_{shape}": t["biases"],
                    f"ratio_{shape}": t["biases"] / t["product"], f"matrices_{shape}": peak * 2**20 / (4 * m * n)}
    return results | {"goal": "<= 6; about 3 matrices"}


MAMA_STEP = """
import mama
def build(batch, meta, size=96):
    torch.manual_seed(0)
    vision = common.VisionEncoder("vit_tiny_patch16_224", 128, False, size)
    model = common.TwoTower(vision, common.TextEncoder("small", 128, False, 32, 1000, "mean"))
    parts = []
    for n in (batch, meta):
        tokens = {"input_ids": torch.randint(1, 1000, (n, 32)), "attention_mask": torch.ones(n, 32, dtype=torch.long)}
        parts.append({"pixels": torch.randn(n, 3, size, size), "tokens": tokens})
    net, losses = mama.WeightNet(), mama.losses_of(model, 0.1, 0.2, torch.device("cpu"))
    theta = dict(model.named_parameters())
    def plain():
        video, text = mama.encode(model, **parts[0])                        # (B, D), (B, D)
        mama.angular_margin_loss(video, text, 0.1, 0.2).mean().backward()
        model.zero_grad(set_to_none=False)
    def ahead(method):
        mama.weightnet_gradient(losses, theta, *parts, net, 1e-3, method)
        plain()
    def fast():
        video, text = mama.encode(model, **parts[0])                        # (B, D), (B, D)
        sample = mama.angular_margin_loss(video, text, 0.1, 0.2)            # (B,)
        mama.weightnet_gradient(losses, theta, *parts, net, 1e-3, sample=sample)
        sample.mean().backward()
        model.zero_grad(set_to_none=False)
    steps = {"plain": plain, "forward": lambda: ahead("forward"), "second_order": lambda: ahead("second-order"),
             "fast": fast}
    plain()
    return steps"""


def mama_step(rounds, batch=32):
    """A step of MAMA with the look-ahead of Algorithm 1 against the plain step, a tiny ViT at 96 px, B = 32.

    M = B and M = B / 4; forward mode (`fast`: --meta-memory fast) and second order; time, and at M = B peak memory
    beside weights and gradients."""
    names = {"torch": torch, "common": common}
    exec(MAMA_STEP, names)                                                   # the same text as in peak_mib's process
    results = {}
    for meta in (batch, batch // 4):
        steps = names["build"](batch, meta)
        steps["forward"]()                                                   # torch makes its rules at the first use
        t = cpu_seconds(steps, rounds)
        results |= {f"{name}_s_M{meta}": s for name, s in t.items()}
        results |= {f"ratio_{name}_M{meta}": t[name] / t["plain"] for name in ("forward", "second_order", "fast")}
    peak = {name: peak_mib(f"""{MAMA_STEP}
run = build({batch}, {batch})['{name}']""") for name in ("plain", "forward", "second_order", "fast")}
    results |= {f"{name}_mib": p for name, p in peak.items()}
    return results | {"memory_forward": peak["forward"] / peak["plain"],
                      "memory_second_order": peak["second_order"] / peak["plain"],
                      "memory_fast": peak["fast"] / peak["plain"],
                      "goal": "forward: time <= 4.4 at M = B, 3.5 at M = B / 4, memory <= 1.3; fast: 3.9, 3.1, 2.4"}


def main():
    """Run the chosen benchmarks and update speed.json."""
    benchmarks = {"ranks": ranks, "knn": knn, "jpeg": jpeg, "views": views, "ncl_step": ncl_step,
                  "mmts_step": mmts_step, "sinkhorn": sinkhorn,
                  "mama_step": mama_step}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=list(benchmarks), default=list(benchmarks), help="which to run")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the minimum counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = ROOT / "benchmarks" / "results" / "speed.json"
    results = common.read_json(path, {})
    for name in args.only:
        results[name] = benchmarks[name](args.rounds) | {
            "command": f"python benchmarks/speed.py --only {name} --rounds {args.rounds}", "commit": common.commit(),
            "date": str(datetime.date.today()), "machine": machine(), "torch": torch.__version__}
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in results[name].items()}
        print(name, json.dumps(rounded), flush=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
