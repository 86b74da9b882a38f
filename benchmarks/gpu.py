"""What only a card shows, in one run of some ten minutes: rows in order of worth, each in a process with a time limit.

    python -m benchmarks.gpu                       # every row; writes results/gpu.json and gpu.md after each
    python -m benchmarks.gpu --only waits towers   # these
    python -m benchmarks.gpu --toy                 # tries the code of every row on a CPU at toy size; no results

Without a card the rows of arithmetic run at toy size and the others are "not run: no card". A row that fails or takes
too long says so, and the next one runs. Nothing is downloaded: towers have no weights. Times are medians over rounds in
which the variants take turns; memory is the peak of what torch has allocated on the card.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive.engine.log import commit, versions
from contrastive.engine.processes import flatten, read_json, write_json
from contrastive.engine.run import Run

import numpy as np
import torch
import torch.nn.functional as F

import mama
import mmts
import ncl
import temo
import temperature_schedules
from benchmarks import speed
from benchmarks.compare import RESULTS, ROOT, machine, markdown

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CARD else "cpu")
MODULES = {module.__name__: module for module in (temo, temperature_schedules, ncl, mmts, mama)}
TOY = [] if CARD else "--cpu --dataset moving-emoji --clips 48 16 16 --image-size 16 --frames 2 --batch-size 16".split()
SMALL = {} if CARD else {"mmts": ["--num-clusters", "4"], "mama": "--meta-size 8 --meta-batch-size 4".split()}


def size(real, toy):
    """`real` on a card, `toy` on a CPU."""
    return real if CARD else toy


PIXELS, VIT, RESNET = size(224, 32), size("vit_base_patch16_224", "vit_tiny_patch16_224"), size("resnet50", "resnet18")
WORKERS = size(os.cpu_count() - 1, 0)
CHUNKS = common.Chunks
EVERY, ROWS_OF_LOG = size(5, 2), 8  # steps between rows of the log of a run that is watched, and their number


# ------------------------------------------------------- tools -------------------------------------------------------
def train(script, *flags):
    """A run in this process, without pictures, in a temporary folder: its summary, and the rows of its log."""
    MODULES[script].draw = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as folder:
        toy = TOY[:1] if "--dataset" in flags else TOY
        words = [*toy, *SMALL.get(script, []), *"--log-every 1 --eval-every 0 --save-every 0".split(),
                 *map(str, flags), "--output-dir", folder, "--run-name", "r"]
        summary = MODULES[script].main(MODULES[script].parse_args(words))
        return summary, log_of(Path(folder) / "r")


def log_of(folder):
    """The rows of a run's log that have a loss; a run in progress may be writing the last one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in (json.loads(line) for line in lines if line.endswith("}")) if "loss" in row]


def apart(rows, others):
    """Largest relative difference of the losses of the steps that both logs have."""
    losses = {row["step"]: row["loss"] for row in rows}
    return max(abs(row["loss"] / losses[row["step"]] - 1) for row in others if row["step"] in losses)


@contextlib.contextmanager
def waits():
    """A list that afterwards holds a warning for each time the host waited for the card to finish its work."""
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if CARD:
            torch.cuda.set_sync_debug_mode("warn")
        yield found
        if CARD:
            torch.cuda.set_sync_debug_mode("default")
    found += [w for w in said if "called a synchronizing" in str(w.message)]  # not the notice that this is new


def idle(profile):
    """The part of a profile's time, from its first to its last event, in which the card (or CPU) was idle."""
    kind = torch.autograd.DeviceType.CUDA if CARD else torch.autograd.DeviceType.CPU
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events()
                   if e.device_type == kind and not e.is_user_annotation)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


def watch(script, *flags):
    """A run: samples/s and the part of waiting for data before it is watched, then waits a step, then the idle part."""
    found, windows, done = {}, contextlib.ExitStack(), Run.done
    work = torch.profiler.ProfilerActivity.CUDA if CARD else torch.profiler.ProfilerActivity.CPU

    def noted(run, *args, **more):
        done(run, *args, **more)
        if run.step == (ROWS_OF_LOG - 2) * EVERY:
            found["waits"] = windows.enter_context(waits())
        elif run.step == (ROWS_OF_LOG - 1) * EVERY:
            found["profile"] = windows.enter_context(torch.profiler.profile(activities=[work]))
        elif run.step in ((ROWS_OF_LOG - 1) * EVERY - 1, ROWS_OF_LOG * EVERY - 1):
            windows.close()
    Run.done = noted
    summary, rows = train(script, *flags, "--max-steps", ROWS_OF_LOG * EVERY, "--log-every", EVERY)
    Run.done = done
    late = rows[ROWS_OF_LOG // 2 - 1:ROWS_OF_LOG - 2]
    return {"samples_per_s": statistics.median(r["samples_per_s"] for r in late),
            "waiting_for_data": statistics.median(r["data_s"] / r["step_s"] for r in late),
            "peak_mib": summary["peak_memory_mb"], "waits_a_step": len(found["waits"]) / (EVERY - 1),
            "idle (goal <= 0.05)": idle(found["profile"])}


def measure(functions, rounds):
    """Functions that take turns, the first call not counted: {name: seconds, ratio to the first, peak MiB}."""
    peak = {}

    def call(name):
        if CARD:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        functions[name]()
        if CARD:
            torch.cuda.synchronize()
            peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    calls, base = {name: functools.partial(call, name) for name in functions}, next(iter(functions))
    for function in calls.values():
        function()
    t = speed.Times(calls, rounds, time.perf_counter)
    return {name: {"seconds": t.median(name), "ratio": t.ratio(name, base), "peak_mib": peak.get(name, "a CPU")}
            for name in calls}


def text_folder(folder):
    """A transformers text encoder without weights: DistilBERT's config, and a tokenizer learnt from a few words."""
    import transformers
    words = [f"a {thing} number {i}" for thing in ("box", "tree", "boat", "house") for i in range(50)]
    common.train_wordpiece(words).save_pretrained(folder)
    shape = size({}, dict(dim=32, hidden_dim=64, n_layers=1, n_heads=2))
    transformers.DistilBertConfig(**shape).save_pretrained(folder)
    return str(folder), words


def write_table(folder, column, write, ending, captions):
    """folder/captions.csv and its files: the first 32 by write(path, number), the others as links to these."""
    folder.mkdir()
    for i in range(len(captions)):
        path = folder / f"{i}.{ending}"
        write(path, i) if i < 32 else os.link(folder / f"{i % 32}.{ending}", path)
    lines = [f"{i}.{ending},{caption}" for i, caption in enumerate(captions)]
    (folder / "captions.csv").write_text("\n".join([f"{column},caption", *lines]))
    return folder / "captions.csv"


def two_towers(text, tower=VIT):
    """(model, (batch -> pixels and tokens)) of a tower and the DistilBERT of text_folder on the device."""
    model = common.TwoTower(common.VisionEncoder(tower, 64, False, PIXELS), common.TextEncoder(text, 64, False, 32))

    def inputs(n, *more):
        tokens = {"input_ids": torch.randint(1, 100, (n, *more, 32), device=DEVICE)}
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
        return {"pixels": torch.randn(n, *more, 3, PIXELS, PIXELS, device=DEVICE), "tokens": tokens}
    return model.to(DEVICE), inputs


# ------------------------------------------------------- rows --------------------------------------------------------
def row_waits():
    """Waits a step of the five scripts, idle part of the card; goal: no wait."""
    return {script: watch(script) for script in MODULES}


def row_gradient():
    """Gradients of every loss on 1 and 2 ranks against one process, over NCCL with two cards (a CPU: gloo)."""
    import test_distributed
    worlds, results = (1, 2) if not CARD or torch.cuda.device_count() > 1 else (1,), {"2 ranks": "not run: one card"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(test_distributed.compare, (folder, worlds, DEVICE.type), worlds[-1])
        for world in worlds:
            ranks = [read_json(f"{folder}/{world}_{rank}.json") for rank in range(world)]
            results[f"{world} ranks"] = {f"{kind} (goal < {goal})": max(
                max(v) for rank in ranks for k, v in rank.items() if k.endswith(kind))
                for kind, goal in (("fp64", "1e-10"), ("fp32", "1e-5"))}
    return results


def row_bf16():
    """Losses of 20 steps in bf16 against float32 without TF32, largest relative difference; another float32 run shows
    the noise."""
    def exact(*args):                                                        # called after a run has chosen TF32
        torch.backends.cudnn.allow_tf32 = False
        return CHUNKS(*args, tf32=False)
    common.Chunks, results = exact, {}                                       # the row has a process of its own
    for script in MODULES:
        runs = [train(script, "--max-steps", size(20, 2), "--mixed-precision", kind)[1]
                for kind in ("no", "bf16", "no")]
        results[script] = {"bf16": apart(runs[0], runs[1]), "fp32 again": apart(runs[0], runs[2])}
    return results


def row_towers():
    """temo.py's views and JPEGs with ResNet-50 and ViT-B/16, bf16, N = 256, InfoNCE, against the same towers on
    synthetic input: samples/s, goal >= 0.9."""
    rng, results = np.random.default_rng(0), {}

    def jpeg(path, _):
        speed.write_jpeg(path, rng.integers(0, 255, (24, 42, 3), dtype=np.uint8), (500, 375))
    with tempfile.TemporaryDirectory() as folder:
        text, words = text_folder(Path(folder) / "text")
        data = write_table(Path(folder) / "images", "image", jpeg, "jpg", (words * 13)[:size(2600, 40)])
        for tower in (RESNET, VIT):
            n = size(256, 8)
            found = watch("temo", "--dataset", data, "--image-encoder", tower, "--text-encoder", text,
                          "--no-pretrained", "--image-size", PIXELS, "--batch-size", n, "--loss", "infonce",
                          "--mixed-precision", "bf16", "--workers", WORKERS)
            model, inputs_of = two_towers(text, tower)
            optimizer, inputs = torch.optim.AdamW(model.parameters(), lr=1e-5), inputs_of(n)

            def step():
                with torch.autocast(DEVICE.type, torch.bfloat16):
                    image, caption, _ = model(**inputs)
                temo.multimodal_loss(image, caption, 0.07).backward()
                optimizer.step()
                optimizer.zero_grad()
            plain = n / measure({"step": step}, size(8, 1))["step"]["seconds"]
            results[tower] = found | {"synthetic_samples_per_s": plain, "ratio": found["samples_per_s"] / plain}
    return results


def row_step():
    """A step (encode, loss, AdamW) of ViT-B/16, bf16, N = 128. Goals: InfoNCE against the formula in plain torch and
    open_clip's ClipLoss <= 1.03; TeMo against InfoNCE on the same four encodings <= 1.05; chunks of 32 <= 1.4."""
    from accelerate import Accelerator
    B, chunk = size(128, 4), size(32, 2)
    with tempfile.TemporaryDirectory() as folder:
        model, inputs_of = two_towers(text_folder(folder)[0])
    optimizer, accelerator = torch.optim.AdamW(model.parameters(), lr=1e-5), Accelerator(cpu=not CARD)
    inputs = inputs_of(B, 2)                                                 # I and I~, T and T~

    def encode(batch):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            tokens = {k: x.flatten(0, 1) for k, x in batch["tokens"].items()}
            image, text, _ = model(batch["pixels"].flatten(0, 1), tokens)
        views = batch["pixels"].shape[1]
        return [x for y in (image, text) for x in y.unflatten(0, (-1, views)).unbind(1)]  # I [I~] T [T~], (b, D) each

    def step(loss, views, chunk=0):
        tokens = {k: x[:, :views] for k, x in inputs["tokens"].items()}
        batch = {"pixels": inputs["pixels"][:, :views], "tokens": tokens}
        chunks = common.Chunks(encode, model, accelerator, chunk)
        chunks.backward(loss(*chunks.encode(batch)))
        optimizer.step()
        optimizer.zero_grad()

    def plain(image, text):
        logits = F.normalize(image.float(), dim=1) @ F.normalize(text.float(), dim=1).T / 0.07
        own = torch.arange(len(logits), device=DEVICE)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def infonce(image, text):
        return temo.multimodal_loss(image, text, 0.07)
    variants = {"plain": (plain, 1), "infonce": (infonce, 1), "infonce, chunks": (infonce, 1, chunk),
                "infonce of four": (lambda i, j, t, u: infonce(i, t) + infonce(j, u), 2),
                "temo of four": (lambda i, j, t, u: temo.temo_loss(i, t, j, u, 0.5), 2)}
    if find_spec("open_clip"):
        from open_clip.loss import ClipLoss
        variants["open_clip"] = (lambda i, t: ClipLoss()(F.normalize(i.float(), dim=1), F.normalize(t.float(), dim=1),
                                                         1 / 0.07), 1)
    found = measure({name: functools.partial(step, *what) for name, what in variants.items()}, size(8, 1))
    pairs = [("infonce", "plain"), ("infonce", "open_clip"), ("temo of four", "infonce of four"),
             ("infonce, chunks", "infonce")]
    return found | {f"{a} / {b}": found[a]["seconds"] / found[b]["seconds"] if b in found else "not installed"
                    for a, b in pairs}


def row_views():
    """ms of the views of 512 crops on the device, as in a run, plain and compiled."""
    crops, results = torch.randint(0, 256, (size(512, 8), 3, PIXELS, PIXELS), dtype=torch.uint8), {}
    how = SimpleNamespace(device=DEVICE, transform=common.EvalTransform(PIXELS, (0.5,) * 3, (0.5,) * 3))
    view = common.Augment(PIXELS, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    draws, crops = torch.rand(len(crops), view.DRAWS).to(DEVICE), crops.pin_memory() if CARD else crops
    fused = torch.compile(view.photometric, dynamic=False, backend=size("inductor", "eager"))
    functions = {name: functools.partial(common.Batches._finish, how, crops, function, draws)
                 for name, function in (("plain", view.photometric), ("compiled", fused))}
    for name, found in measure(functions, size(10, 1)).items():
        results[name] = found | {"ms": 1000 * found["seconds"]}
    return results


def row_memory():
    """FLOPs of an image's forward pass and the peak memory of a float32 step of ViT-B/16, N = 64, counted on meta
    tensors; measured on a card, goal within 0.15."""
    from torch.utils.flop_counter import FlopCounterMode
    n, saved = 64, {}
    with torch.device("meta"):
        model = common.VisionEncoder("vit_base_patch16_224", 256, False, 224)
        pixels = torch.randn(n, 3, 224, 224)

    def note(x):
        if not isinstance(x, torch.nn.Parameter):
            saved[id(x.untyped_storage())] = x                               # kept alive, so an id is one storage
        return x
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), FlopCounterMode(display=False) as flops:
        model(pixels)
    weights = sum(p.numel() for p in model.parameters())
    activations = sum(x.untyped_storage().nbytes() for x in saved.values())
    counted = (activations + 4 * weights) / 2**20                            # and the gradient
    results = {"gflop_an_image_forward": flops.get_total_flops() / n / 1e9, "counted_mib": counted}
    if CARD:
        model = common.VisionEncoder("vit_base_patch16_224", 256, False, 224).to(DEVICE)
        pixels = torch.randn(n, 3, 224, 224, device=DEVICE)
        first = measure({"step": lambda: model(pixels)[0].sum().backward()}, 3)["step"]["peak_mib"]
        results |= {"measured_mib": first, "measured / counted": first / counted}
    return results


def row_loss():
    """TeMo's loss, InfoNCE and NT-Xent with gradients over N = 32,768 pairs, D = 256; goal: a peak <= 2048 MiB."""
    return measure(speed.of_losses(size(32768, 64), 0, DEVICE), size(3, 1))


def row_video():
    """NCL with CLIP's ViT-B/32 on mp4 of 10 s, 12 frames a clip, bf16: clips/s trained, and decoded by one core."""
    import transformers

    from helpers import frame, write_video
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = size({}, dict(vision_config=small | dict(image_size=32), text_config=small))

    def mp4(path, number):
        write_video(path, [frame((number + k) % 256, 240, 320) for k in range(size(250, 20))], fps=25)
    with tempfile.TemporaryDirectory() as folder:
        clip, words = text_folder(Path(folder) / "clip")
        transformers.CLIPConfig(**config).save_pretrained(clip)              # beside the tokenizer
        data = write_table(Path(folder) / "clips", "video", mp4, "mp4", words[:size(200, 40)] * 2)
        start = time.perf_counter()
        for i in range(size(32, 4)):
            common.read_frames(data.parent / f"{i}.mp4", 12)
        decoded = size(32, 4) / (time.perf_counter() - start)
        found = watch("ncl", "--dataset", data, "--image-encoder", clip, "--text-encoder", clip,
                      "--no-pretrained", "--image-size", PIXELS, "--frames", size(12, 2), "--batch-size", size(128, 8),
                      "--chunk-size", size(32, 4), "--mixed-precision", "bf16", "--workers", WORKERS)
    return found | {"decoded_clips_per_s_a_core": decoded}


def row_mama():
    """A step of MAMA with its look-ahead (forward mode, second order) against the plain step."""
    return measure(speed.of_mama(size(64, 4), size(64, 4), size(224, 32), DEVICE), size(5, 1))


def row_resume():
    """temo.py in bf16, killed and resumed, against one never stopped; goal: the same weights."""
    steps, kill, every = size((200, 90, 40), (6, 3, 2))
    flags = [*TOY, *map(str, ["--max-steps", steps, "--save-every", every, "--log-every", 1, "--eval-every", 0,
                              "--mixed-precision", "bf16"])]

    def start(*words):
        return subprocess.Popen([sys.executable, str(ROOT / "temo.py"), *map(str, words)], stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in ("whole", "killed")}
        start(*flags, "--output-dir", folder, "--run-name", "whole").wait()
        process = start(*flags, "--output-dir", folder, "--run-name", "killed")
        while process.poll() is None and not any(row["step"] >= kill for row in log_of(runs["killed"])):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        killed = process.wait() == -signal.SIGKILL
        start("--resume", runs["killed"]).wait()
        weights = [(run / "model.safetensors").read_bytes() for run in runs.values()]
        return {"killed": killed, "bitwise equal": weights[0] == weights[1],
                "losses, largest relative difference": apart(*map(log_of, runs.values()))}


# name: (function, seconds that it may take, whether it runs without a card)
ROWS = {"waits": (row_waits, 150, False), "gradient": (row_gradient, 120, True), "bf16": (row_bf16, 150, False),
        "towers": (row_towers, 120, False), "step": (row_step, 90, False), "memory": (row_memory, 60, True),
        "loss": (row_loss, 60, False), "video": (row_video, 120, False), "mama": (row_mama, 60, False),
        "views": (row_views, 60, False), "resume": (row_resume, 120, False)}


def main(argv=None):
    """Runs the rows, each in a process of its own, and writes the results after each."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    p.add_argument("--toy", action="store_true", help="every row on a CPU at toy size; its numbers are no results")
    p.add_argument("--out", type=Path, default=RESULTS / "gpu", help="the files, without their endings")
    p.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the child: one row, its result to --out
    args = p.parse_args(argv)
    if args.here:
        write_json(args.out, ROWS[args.only[0]][0]())
        return
    results = read_json(args.out.with_suffix(".json"), {})
    for name in args.only:
        function, limit, arithmetic = ROWS[name]
        found, started = {"not run": "no card"}, time.time()
        if CARD or arithmetic or args.toy:
            with tempfile.TemporaryDirectory() as folder:
                words = [sys.executable, "-m", "benchmarks.gpu", "--here", "--only", name, "--out", f"{folder}/r"]
                toy = {"CUDA_VISIBLE_DEVICES": ""} if args.toy else {}
                path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
                limit = ["timeout", "-k", "10", str(limit if CARD else 600)]
                done = subprocess.run(limit + words, cwd=ROOT, env=os.environ | toy | path, stderr=subprocess.PIPE,
                                      stdout=subprocess.DEVNULL, text=True)
                last = (done.stderr.strip().splitlines() or ["no words"])[-1]
                failed = "too long" if done.returncode == 124 else f"exit {done.returncode}: {last}"
                found = read_json(f"{folder}/r", {"failed": failed})
        results[name] = {
            "what": " ".join(function.__doc__.split()), "command": f"python -m benchmarks.gpu --only {name}",
            "commit": commit(), "date": str(datetime.date.today()), "machine": machine(),
            "versions": versions().split("\n")[:9], "seconds": time.time() - started, "results": found}
        print(f"{name}: {time.time() - started:.0f} s, {json.dumps(found)}", flush=True)
        write_json(args.out.with_suffix(".json"), results)
        rows = [[name, key, f"{value:.4g}" if isinstance(value, float) else str(value)]
                for name, of in results.items() for key, value in flatten(of["results"]).items()]
        args.out.with_suffix(".md").write_text("\n".join([*markdown(["row", "what", "value"], rows), ""]))


if __name__ == "__main__":
    main()
