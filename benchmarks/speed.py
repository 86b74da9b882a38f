"""Ratios of speed and memory against the plain product, a plain pipeline or a peer, in one run.

    python benchmarks/speed.py [--only ranks knn jpeg views cc3m_views steps ...]

Timings are CPU seconds of one thread. Variants take turns, in a different order each round, since each changes caches
and free memory for the next. Seconds are medians over the rounds, ratios are medians of each round's ratio; only ratios
can be compared. Peak memory is the growth of the process's high-water mark during the call, in a process of its own
(Linux). Peers that are not installed (kornia, open_clip) are "not run". None of these is a test; what only a GPU shows
is in gpu.py.
"""

import argparse
import concurrent.futures
import datetime
import functools
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import contrastive.data.views as views_of_common  # noqa: E402
from contrastive.data.pictures import decode  # noqa: E402
from contrastive.data.table import IN_MEMORY  # noqa: E402
from contrastive.data.views import OPERATIONS, crop_batch, randaugment  # noqa: E402
from contrastive.encoders.base import STATS  # noqa: E402
from contrastive.engine.log import commit  # noqa: E402
from contrastive.engine.processes import read_json, write_json  # noqa: E402
from contrastive.evaluation.clusters import open_clusters  # noqa: E402

import mama  # noqa: E402
import mmts  # noqa: E402
import ncl  # noqa: E402
import temo  # noqa: E402
import temperature_schedules as ts  # noqa: E402
from benchmarks.claims import machine  # noqa: E402


class Times(dict):
    """{name: seconds of each round (rounds,)} of functions that take turns."""

    def __init__(self, functions, rounds, clock=time.process_time):
        super().__init__({name: np.zeros(rounds) for name in functions})
        order = np.random.default_rng(0)
        for k in range(rounds):
            for name in order.permutation(list(functions)):
                start = clock()
                functions[name]()
                self[name][k] = clock() - start

    def median(self, name):
        """Seconds."""
        return float(np.median(self[name]))

    def ratio(self, name, base):
        """How many times as long as `base`."""
        return float(np.median(self[name] / self[base]))


def peak_mib(name, build, *args):
    """Growth of the peak resident set during the function `name` of build(*args), in a new process that returns freed
    memory at once."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(growth, name, build, args).result()


def growth(name, build, args):
    """As peak_mib, in this process."""
    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))
    torch.set_num_threads(1)
    run = build(*args)[name]
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def unit_rows(n, width=512):
    """(n, width) random unit vectors."""
    return F.normalize(torch.randn(n, width), dim=1)


def captions_and_images(texts=25_010, images=5_000, width=512):
    """Unit rows of captions and images, and the image of each caption: (texts, width), (images, width), (texts, 1)."""
    positives = (torch.arange(texts) // 5).clamp(max=images - 1)[:, None]
    return unit_rows(texts, width), unit_rows(images, width), positives


def known_and_asked(known=50_000, asked=10_000, width=512):
    """Unit rows and classes (of 100) of items and of queries: (known, width), (known,), (asked, width), (asked,)."""
    return (unit_rows(known, width), torch.randint(0, 100, (known,)),
            unit_rows(asked, width), torch.randint(0, 100, (asked,)))


def of_ranks():
    """{name: function} of the product and of the ranks."""
    text, image, positives = captions_and_images()
    return {"product": lambda: text @ image.T, "ranks": lambda: common.retrieval_metrics(text, image, positives)}


def ranks(rounds):
    """Exact ranks of 25,010 captions against 5,000 images, D = 512, as on COCO test, in chunks; against the product."""
    t = Times(of_ranks(), rounds)
    return {"product_s": t.median("product"), "ours_s": t.median("ranks"), "ratio": t.ratio("ranks", "product"),
            "goal": "<= 4", "peak_mib": peak_mib("ranks", of_ranks), "goal_mib": "< 150"}


def knn(rounds):
    """kNN@10 of 10,000 queries in 50,000 items, D = 512, 100 classes; against the product."""
    train, labels, test, truth = known_and_asked()

    def product():  # in chunks as well: the whole matrix would be 2 GB
        for i in range(0, 10000, 1024):
            test[i:i + 1024] @ train.T

    t = Times({"product": product, "knn": lambda: common.knn_accuracy(train, labels, test, truth, k=10)}, rounds)
    return {"product_s": t.median("product"), "ours_s": t.median("knn"), "ratio": t.ratio("knn", "product"),
            "goal": "<= 1.5"}


def write_jpeg(out, small, size):
    """Writes noise (h, w, 3), enlarged to size: about as many bytes as a photograph."""
    from PIL import Image

    Image.fromarray(small).resize(size, Image.BICUBIC).save(out, "jpeg", quality=92)


def jpeg(rounds, n=192):
    """JPEG 500 x 375 -> random-resized-crop 224: our loader worker against PIL + ToTensor + Normalize, images per s.

    Our worker returns uint8, and the device normalises; `whole` also normalises on the same core.
    """
    from PIL import Image
    from torchvision import transforms as T

    files = [io.BytesIO() for _ in range(16)]
    for out, small in zip(files, np.random.default_rng(0).integers(0, 255, (16, 24, 42, 3), dtype=np.uint8)):
        write_jpeg(out, small, (500, 375))
    files = [out.getvalue() for out in files]
    mean, std = STATS["imagenet"]
    pil = T.Compose([T.RandomResizedCrop(224, (0.5, 1)), T.ToTensor(), T.Normalize(mean, std)])
    view, transform = common.Augment(224, 0.5), common.EvalTransform(224, mean, std)
    batches = [range(i, i + 32) for i in range(0, n, 32)]

    def old():
        torch.stack([pil(Image.open(io.BytesIO(files[i % 16])).convert("RGB")) for i in range(n)])

    def worker(rows):
        draws = common.uniforms(0, 0, rows, view.DRAWS)                      # (32, DRAWS)
        crops = [view.crop_one(decode(files[i % 16]), u) for i, u in zip(rows, draws, strict=True)]
        return torch.stack(crops), draws                                     # (32, 3, 224, 224) uint8

    def ours():
        for rows in batches:
            worker(rows)

    def whole():
        for rows in batches:
            x, draws = worker(rows)
            transform.normalise(view.finish(x.float().div_(255), draws))

    t = Times({"pil": old, "ours": ours, "whole": whole}, rounds)
    return {"jpeg_bytes": int(np.mean([len(f) for f in files])),
            "pil_images_per_s": n / t.median("pil"), "ours_images_per_s": n / t.median("ours"),
            "ratio": t.ratio("pil", "ours"), "ratio_with_normalise_on_the_same_core": t.ratio("pil", "whole"),
            "goal": ">= 1.5"}


def views(rounds, n=256):
    """SimCLR views of CIFAR-size images from memory, in batches, plain and compiled, against PIL per sample and kornia
    in batches; views per second.

    Crop .1-1, flip, jitter .4/.4/.4/.1, grey.
    """
    from PIL import Image
    from torchvision import transforms as T

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
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
        return transform.normalise(augment.finish(crop_batch(augment, images, draws), draws))

    ours(fused)  # compiles
    variants = {"pil": lambda: torch.stack([pil(p) for p in pictures]), "eager": lambda: ours(eager),
                "compiled": lambda: ours(fused)}
    if find_spec("kornia"):
        from kornia import augmentation as K
        batched = torch.nn.Sequential(
            K.RandomResizedCrop((32, 32), scale=(0.1, 1)), K.RandomHorizontalFlip(),
            K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8), K.RandomGrayscale(p=0.2), K.Normalize(mean, std))
        variants["kornia"] = lambda: batched(images.float() / 255)
    t = Times(variants, rounds)
    ratios = {"ratio": t.ratio("pil", "eager"), "ratio_compiled": t.ratio("pil", "compiled"),
              "ratio_kornia": t.ratio("pil", "kornia") if "kornia" in t else "not run"}
    return {f"{k}_views_per_s": n / t.median(k) for k in t} | ratios | {"goal": ">= 3 eager, >= 8 compiled"}


def photograph(rng, size=(500, 400)):
    """JPEG bytes of an artificial photograph: colours with the spectrum of natural images, things with edges, grain."""
    from PIL import Image, ImageDraw

    w, h = size
    frequency = np.hypot(np.fft.fftfreq(h)[:, None], np.fft.rfftfreq(w)) + 1 / max(size)  # (h, w // 2 + 1)
    waves = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((3, h, w))) / frequency**1.3, (h, w))  # (3, h, w)
    waves = waves[0] + 0.4 * waves                                           # channels alike, as in nature
    picture = Image.fromarray((128 + 45 * waves / waves.std()).clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
    for _ in range(12):
        corner, colour = rng.integers(0, size), tuple(rng.integers(0, 255, 3).tolist())
        box = [*corner.tolist(), *(corner + rng.integers(10, 120, 2)).tolist()]
        ImageDraw.Draw(picture).ellipse(box, fill=colour)
    grain = np.asarray(picture) + rng.normal(0, 2, (h, w, 3))                # (h, w, 3)
    out = io.BytesIO()
    Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(out, "jpeg", quality=85)
    return out.getvalue()


def cc3m_views(rounds, n=512, batch=64):
    """TeMo's views of CC3M, as a loader worker makes them: rows of a large table, JPEGs of about 500 x 400 from a tar,
    crop and RandAugment of I and of I~. Samples per second of one core, and the same with torchvision's RandAugment.
    Parts in ms per sample: `query` of the table, `read` (that and the JPEG), either RandAugment of one view.
    """
    from torchvision.transforms import v2

    args, rng = temo.parse_args(["--dataset", "cc3m"]), np.random.default_rng(0)
    files = [photograph(rng, (500 + 10 * k, 400 - 4 * k)) for k in range(-8, 8)]
    ends, rows = np.cumsum([len(f) for f in files]), IN_MEMORY + 1    # more rows than are kept as lists
    asked = args.randaugment_ops, args.randaugment_magnitude
    base = common.Augment(args.image_size, args.crop_min, randaugment=asked)
    crop, none = common.Augment(args.image_size, args.crop_min), np.zeros(base.DRAWS, np.float32)
    crops = [crop.crop_one(decode(f), none) for f in files]
    theirs = v2.RandAugment(num_ops=1, magnitude=asked[1])
    theirs._AUGMENTATION_SPACE = {k: theirs._AUGMENTATION_SPACE[k] for k in OPERATIONS}

    def torchvision(image, u, operations, magnitude):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(u[12] * 2**24) * 2**24 + int(u[13] * 2**24))
            for _ in range(operations):
                image = theirs(image) if torch.rand(()) < 0.5 else image
        return image

    def augment(function):
        for i, u in enumerate(common.uniforms(0, 0, range(n), base.DRAWS)):
            function(crops[i % 16], u, *asked)

    with tempfile.TemporaryDirectory() as folder:
        tar = Path(folder, "0.tar")
        tar.write_bytes(b"".join(files))
        places = [{"path": str(tar), "offset": int(end) - len(f), "size": len(f)} for f, end in zip(files, ends)]
        table = common.make_table([["a caption"]] * rows, map(str, range(rows)), [places[i % 16] for i in range(rows)])
        data = common.Data("like cc3m", "train", table)

        def query():
            for i in np.random.default_rng(0).permutation(rows)[:n]:
                data.sources[int(i)], data.captions(i), data.key(i)

        def read(*augments):
            for _ in common.Batches(data, augments, None, batch, 0, 0, n // batch, torch.device("cpu")).raw():
                pass

        def read_torchvision():
            with mock.patch.object(views_of_common, "randaugment", torchvision):
                read(base, base)
        t = Times({"ours": lambda: read(base, base), "torchvision": read_torchvision, "read": read, "query": query,
                   "randaugment": lambda: augment(randaugment),
                   "randaugment_torchvision": lambda: augment(torchvision)}, rounds)
    return {"jpeg_bytes": int(np.mean([len(f) for f in files])), "ours_samples_per_s": n / t.median("ours"),
            "torchvision_samples_per_s": n / t.median("torchvision"), "ratio": t.ratio("torchvision", "ours")} | {
            f"{name}_ms": 1000 * t.median(name) / n for name in t} | {"goal": "ours >= 250 samples/s"}


def steps(rounds):
    """A whole step (encode, loss, backward) of each method against one of InfoNCE on the same small towers and clips.

    ncl, mmts (with its look-up) and mama (only the margin; its look-ahead is in mama_step) encode what InfoNCE encodes.
    temo also encodes the augmentations, so it is compared with `infonce_4`, InfoNCE of both pairs, I with T and I~ with
    T~. ts: a cosine schedule against a fixed temperature, two views of images.
    """
    r, train = ncl.RECIPES["moving-emoji"], common.load_data("moving-emoji", "train")
    B, length, size = r["batch_size"], r["text_length"], r["image_size"]
    vision = common.VisionEncoder("small", r["embed_dim"], False, size)
    model = common.TwoTower(vision, common.TextEncoder("small", r["embed_dim"], False, length, 1000, "mean"))
    pixels = torch.randn(2 * B, r["frames"], 3, size, size)
    tokens = {"input_ids": torch.randint(1, 1000, (2 * B, length)),
              "attention_mask": torch.ones(2 * B, length, dtype=torch.long)}
    keys, texts = zip(*((train.key(i), train.captions(i)[0]) for i in range(B)))
    args = SimpleNamespace(clusters="captions", cluster_encoder="tf-idf", num_clusters=200, seed=0,
                           dataset="moving-emoji", resume="")
    with tempfile.TemporaryDirectory() as folder:
        kmeans = functools.partial(mmts.cluster_captions, k=200, seed=0)
        known = open_clusters(Path(folder), args, train, torch.device("cpu"), kmeans)
    shifts = mmts.cluster_shift(known.sizes, 0.08, 0.12)                     # (K,)

    def pair():
        return model(pixels[:B], {k: x[:B] for k, x in tokens.items()})[:2]  # (B, D), (B, D)

    def four():
        image, text, _ = model(pixels, tokens)                               # (2B, D), (2B, D)
        return image[:B], text[:B], image[B:], text[B:]

    def infonce_of_four():
        image, text, image_aug, text_aug = four()                            # (B, D) each
        return temo.multimodal_loss(image, text, 0.1) + temo.multimodal_loss(image_aug, text_aug, 0.1)

    def mmts_loss(image, text):
        tau = mmts.sample_temperature(3, shifts[known.look_up(keys, texts)[0]], 72, 0.08)  # (B,)
        return mmts.clip_loss(image, text, tau)

    def two_views(tau):
        return ts.nt_xent(*model(pixels)[0].chunk(2), tau)

    losses = {"infonce": lambda: temo.multimodal_loss(*pair(), 0.1),
              "ncl": lambda: ncl.ncl_loss(*pair()[::-1], 0.1),
              "mmts": lambda: mmts_loss(*pair()),
              "mama": lambda: mama.angular_margin_loss(*pair(), 0.1, mama.margin(3)).mean(),
              "infonce_4": infonce_of_four,
              "temo": lambda: temo.temo_loss(*four(), 0.5, 0.1, 0.05, 0.1),
              "ts_fixed": lambda: two_views(0.1),
              "ts": lambda: two_views(ts.temperature(3))}

    def step(loss):
        loss().backward()
        model.zero_grad()

    t = Times({name: functools.partial(step, loss) for name, loss in losses.items()}, 2 * rounds)
    bases = dict.fromkeys(("ncl", "mmts", "mama", "infonce_4"), "infonce") | {"temo": "infonce_4", "ts": "ts_fixed"}
    return {f"{name}_s": t.median(name) for name in t} | {
        f"{name}/{base}": t.ratio(name, base) for name, base in bases.items()} | {
        "temo/infonce": t.ratio("temo", "infonce"), "goal": "<= 1.03; temo/infonce_4 <= 1.05"}


def of_augmented(batch=32, size=96):
    """A step of InfoNCE, and of TeMo with I~ and T~ encoded without gradient (the default) and with it: a tiny ViT."""
    torch.manual_seed(0)
    vision = common.VisionEncoder("vit_tiny_patch16_224", 128, False, size)
    model = common.TwoTower(vision, common.TextEncoder("small", 128, False, 32, 1000, "mean"))
    tokens = {"input_ids": torch.randint(1, 1000, (2 * batch, 32)),
              "attention_mask": torch.ones(2 * batch, 32, dtype=torch.long)}
    pixels = torch.randn(2 * batch, 3, size, size)

    def part(rows):
        return model(pixels[rows], {k: x[rows] for k, x in tokens.items()})[:2]  # (b, D), (b, D)

    def descend(loss):
        loss.backward()
        model.zero_grad(set_to_none=False)

    def apart():
        with torch.no_grad():
            others = part(slice(batch, None))
        descend(temo.temo_loss(*part(slice(batch)), *others, 0.5, 0.1, 0.05, 0.1))

    def with_gradient():
        image, text = part(slice(None))                                      # (2B, D) each
        descend(temo.temo_loss(image[:batch], text[:batch], image[batch:], text[batch:], 0.5, 0.1, 0.05, 0.1))
    functions = {"infonce": lambda: descend(temo.multimodal_loss(*part(slice(batch)), 0.1)), "apart": apart,
                 "with_gradient": with_gradient}
    functions["infonce"]()
    return functions


def augmented(rounds):
    """TeMo's step with I~ and T~ encoded without gradient against with it and against InfoNCE: time and peak memory
    without weights and gradients, a tiny ViT at 96 px, B = 32."""
    t = Times(of_augmented(), 2 * rounds)
    peak = {name: peak_mib(name, of_augmented) for name in t}
    return {f"{name}_s": t.median(name) for name in t} | {f"{name}_mib": p for name, p in peak.items()} | {
        "apart/with_gradient": t.ratio("apart", "with_gradient"), "apart/infonce": t.ratio("apart", "infonce"),
        "memory_apart/with_gradient": peak["apart"] / peak["with_gradient"],
        "memory_apart/infonce": peak["apart"] / peak["infonce"]}


def of_sinkhorn(m, n):
    """{name: function} of the product and of the biases of m texts and n videos."""
    text, video = unit_rows(m), unit_rows(n)
    sim = text @ video.T                                                     # (m, n)
    return {"product": lambda: text @ video.T, "biases": lambda: ncl.sinkhorn_biases(sim, 0.01)}


def sinkhorn(rounds):
    """The 4 rounds of NCL's biases at gamma = 0.01 against the similarity product they start from, D = 512.

    Sizes: a batch, and a queue against test videos. Memory is counted in similarity matrices.
    """
    results = {}
    for m, n in ((4096, 4096), (16384, 1000)):
        t, peak, shape = Times(of_sinkhorn(m, n), rounds), peak_mib("biases", of_sinkhorn, m, n), f"{m}x{n}"
        results |= {f"product_s_{shape}": t.median("product"), f"biases_s_{shape}": t.median("biases"),
                    f"ratio_{shape}": t.ratio("biases", "product"), f"matrices_{shape}": peak * 2**20 / (4 * m * n)}
    return results | {"goal": "<= 6; about 3 matrices"}


def of_mama(batch, meta, size=96):
    """A plain step of a tiny ViT on `batch` clips, and steps with a look-ahead on `meta` others."""
    torch.manual_seed(0)
    vision = common.VisionEncoder("vit_tiny_patch16_224", 128, False, size)
    model = common.TwoTower(vision, common.TextEncoder("small", 128, False, 32, 1000, "mean"))
    parts = []
    for n in (batch, meta):
        tokens = {"input_ids": torch.randint(1, 1000, (n, 32)), "attention_mask": torch.ones(n, 32, dtype=torch.long)}
        parts.append({"pixels": torch.randn(n, 3, size, size), "tokens": tokens})
    net, losses = mama.WeightNet(), mama.losses_of(model, 0.1, 0.2, torch.device("cpu"))
    theta = dict(model.named_parameters())

    def sample_losses():
        video, text = mama.encode(model, **parts[0])                         # (B, D), (B, D)
        return mama.angular_margin_loss(video, text, 0.1, 0.2)               # (B,)

    def descend(sample):
        sample.mean().backward()
        model.zero_grad(set_to_none=False)

    def plain():
        descend(sample_losses())

    def ahead(method):
        mama.weightnet_gradient(losses, theta, *parts, net, 1e-3, method)
        plain()
    plain()
    return {"plain": plain, "forward": lambda: ahead("forward"), "second_order": lambda: ahead("second-order")}


def mama_step(rounds, batch=32):
    """A step of MAMA with the look-ahead of Algorithm 1 against the plain step, a tiny ViT at 96 px, B = 32.

    M = B and M = B / 4; forward mode and second order; time, and at M = B peak memory without weights and gradients.
    """
    results = {}
    for meta in (batch, batch // 4):
        steps = of_mama(batch, meta)
        steps["forward"]()                                                   # torch sets up forward mode at first
        t = Times(steps, rounds)
        results |= {f"{name}_s_M{meta}": t.median(name) for name in t}
        results |= {f"ratio_{name}_M{meta}": t.ratio(name, "plain") for name in t if name != "plain"}
    peak = {name: peak_mib(name, of_mama, batch, batch) for name in t}
    results |= {f"{name}_mib": p for name, p in peak.items()}
    results |= {f"memory_{name}": p / peak["plain"] for name, p in peak.items() if name != "plain"}
    return results | {"goal": "forward: time <= 4.4 at M = B, 3.5 at M = B / 4, memory <= 1.3"}


def of_losses(n, block=0, device="cpu"):
    """The losses with their gradients over n pairs, D = 256, and open_clip's ClipLoss if it is installed.

    block: rows of the similarities at a time; 0: the default of each."""
    e = [torch.randn(n, 256, device=device, requires_grad=True) for _ in range(4)]
    losses = {"temo": lambda: temo.temo_loss(*e, 0.3, block=block),
              "infonce": lambda: temo.multimodal_loss(*e[:2], 0.1, block),
              "nt_xent": lambda: ts.nt_xent(*e[:2], 0.1, block)}
    if find_spec("open_clip"):
        from open_clip.loss import ClipLoss
        losses["clip_loss"] = lambda: ClipLoss()(F.normalize(e[0], dim=1), F.normalize(e[1], dim=1), 10.0)

    def with_gradient(loss):
        loss().backward()
        for x in e:
            x.grad = None
    return {name: functools.partial(with_gradient, loss) for name, loss in losses.items()}


def of_later_losses(n):
    """of_losses after a first block, which makes torch import 130 MiB once per process."""
    for run in of_losses(64, 16).values():
        run()
    return of_losses(n)


def loss_memory(rounds):
    """Peak MiB of the losses and of open_clip's ClipLoss over N pairs, D = 256: with gradients, without embeddings.

    Blocks have their default size."""
    results = {}
    for name in ("temo", "infonce", "nt_xent", "clip_loss"):
        for n in (4096, 8192):
            there = name != "clip_loss" or find_spec("open_clip")
            results[f"{name}_mib_{n}"] = peak_mib(name, of_later_losses, n) if there else "not run"
    peer = results["clip_loss_mib_8192"]
    if peer != "not run":
        results["temo/clip_loss_8192"] = results["temo_mib_8192"] / peer
    return results | {"goal": "temo at 8192 <= 260 and <= 0.35 of ClipLoss"}


def main():
    """Run the chosen benchmarks and update speed.json."""
    benchmarks = {"ranks": ranks, "knn": knn, "jpeg": jpeg, "views": views, "cc3m_views": cc3m_views, "steps": steps,
                  "sinkhorn": sinkhorn, "mama_step": mama_step, "augmented": augmented, "loss_memory": loss_memory}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=list(benchmarks), default=list(benchmarks), help="which to run")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the median counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = ROOT / "benchmarks" / "results" / "speed.json"
    results = read_json(path, {})
    for name in args.only:
        results[name] = benchmarks[name](args.rounds) | {
            "command": f"python benchmarks/speed.py --only {name} --rounds {args.rounds}", "commit": commit(),
            "date": str(datetime.date.today()), "machine": machine(), "torch": torch.__version__}
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in results[name].items()}
        print(name, json.dumps(rounded), flush=True)
        write_json(path, results)


if __name__ == "__main__":
    main()
