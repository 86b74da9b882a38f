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
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive.engine.log import commit, versions
from contrastive.engine.processes import flatten, read_json, write_json
from contrastive.engine.run import Run

import numpy as np
import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules
from benchmarks import recipes, speed
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
TOWERS = ["--no-pretrained", "--text-encoder", "small", "--image-size", PIXELS, "--mixed-precision", "bf16",
          "--workers", size(os.cpu_count() - 1, 0)]
FIRST, MIDDLE, LAST = size((10, 30, 40), (1, 2, 4))  # steps of a run that is watched


# ------------------------------------------------------- tools -------------------------------------------------------
def now():
    """The time when the card has done all its work."""
    if CARD:
        torch.cuda.synchronize()
    return time.perf_counter()


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
    """Largest relative difference of the losses of two logs."""
    return max(abs(b["loss"] / a["loss"] - 1) for a, b in zip(rows, others, strict=True))


def idle(profile):
    """The part of a profile's time, from its first to its last event, in which the card (or CPU) was idle."""
    kind = torch.autograd.DeviceType.CUDA if CARD else torch.autograd.DeviceType.CPU
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events()
                   if e.device_type == kind and not e.is_user_annotation)
    starts, ends = np.array(spans).T                                         # (events,)
    until = np.maximum.accumulate(ends)                                      # of all events so far
    return float(np.maximum(0, starts[1:] - until[:-1]).sum() / (until[-1] - starts[0]))


def watch(script, *flags):
    """A run: its samples/s, then how often a step waits for the card, and the idle part of the card."""
    found, windows, done = {}, contextlib.ExitStack(), Run.done
    work = torch.profiler.ProfilerActivity.CUDA if CARD else torch.profiler.ProfilerActivity.CPU

    def noted(run, *args, **more):
        done(run, *args, **more)
        if run.step in (FIRST, MIDDLE):
            found[run.step] = now()
        if run.step == MIDDLE:
            found["profile"] = windows.enter_context(torch.profiler.profile(activities=[work]))
            found["said"] = windows.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            if CARD:
                torch.cuda.set_sync_debug_mode("warn")
        if run.step == LAST - 1:
            windows.close()
    Run.done = noted
    summary, _ = train(script, *flags, "--max-steps", LAST, "--log-every", 1000)
    Run.done = done
    if CARD:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in found["said"] if "called a synchronizing" in str(w.message)]  # not the notice that this is new
    return {"samples_per_s": (MIDDLE - FIRST) * summary["batch"] / (found[MIDDLE] - found[FIRST]),
            "peak_mib": summary["peak_memory_mb"], "waits_a_step": len(waits) / (LAST - 1 - MIDDLE),
            "idle (goal <= 0.05)": idle(found["profile"])}


def measure(functions, rounds):
    """Functions that take turns, the first call not counted: {name: ms, ratio to the first, peak MiB}."""
    peak = {}

    def call(name):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        functions[name]()
        now()
        peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    calls = {name: functools.partial(call, name) for name in functions} if CARD else functions
    for function in calls.values():
        function()
    t, base = speed.times(calls, rounds, time.perf_counter), next(iter(functions))
    return {name: {"ms": 1000 * float(np.median(t[name])), "ratio": speed.ratio(t, name, base),
                   "peak_mib": peak.get(name, "a CPU")} for name in calls}


def write_table(folder, column, write, ending, n):
    """folder/captions.csv and n files: the first 32 by write(path, number), the others as links to these."""
    folder.mkdir()
    for i in range(n):
        path = folder / f"{i}.{ending}"
        write(path, i) if i < 32 else os.link(folder / f"{i % 32}.{ending}", path)
    lines = [f"{i}.{ending},a box number {i}" for i in range(n)]
    (folder / "captions.csv").write_text("\n".join([f"{column},caption", *lines]))
    return folder / "captions.csv"


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
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"                                 # read when cuBLAS and cuDNN start
    results = {}
    for script in MODULES:
        runs = [train(script, "--max-steps", size(20, 2), "--mixed-precision", kind)[1]
                for kind in ("no", "bf16", "no")]
        results[script] = {"bf16": apart(runs[0], runs[1]), "fp32 again": apart(runs[0], runs[2])}
    return results


def row_towers():
    """temo.py's views and JPEGs with ResNet-50 and ViT-B/16, bf16, N = 256, InfoNCE, against the same towers on
    synthetic input: samples/s, goal >= 0.9."""
    files, n, results = speed.jpegs(32), size(256, 8), {}
    with tempfile.TemporaryDirectory() as folder:
        data = write_table(Path(folder) / "images", "image", lambda path, i: path.write_bytes(files[i]), "jpg",
                           size(2600, 40))
        for tower in (RESNET, VIT):
            found = watch("temo", *TOWERS, "--dataset", data, "--image-encoder", tower, "--batch-size", n, "--loss",
                          "infonce", "--embed-dim", 128)
            step = speed.of_steps(n, tower, PIXELS, DEVICE)["infonce"]
            plain = 1000 * n / measure({"step": step}, size(8, 1))["step"]["ms"]
            results[tower] = found | {"synthetic_samples_per_s": plain, "ratio": found["samples_per_s"] / plain}
    return results


def row_step():
    """A step (encode, loss, backward) of ViT-B/16, bf16, N = 128. Goals: InfoNCE against the formula in plain torch and
    open_clip's ClipLoss <= 1.03; TeMo against InfoNCE on the same four encodings <= 1.05; chunks of 32 <= 1.4."""
    found = measure(speed.of_steps(size(128, 8), VIT, PIXELS, DEVICE), size(8, 1))
    pairs = [("infonce", "plain"), ("infonce", "open_clip"), ("temo of four", "infonce of four"),
             ("infonce, chunks", "infonce")]
    return found | {f"{a} / {b}": found[a]["ms"] / found[b]["ms"] if b in found else "not installed"
                    for a, b in pairs}


def row_views():
    """ms of the views of 512 crops on the device, as in a run, plain and compiled."""
    crops = torch.randint(0, 256, (size(512, 8), 3, PIXELS, PIXELS), dtype=torch.uint8)
    view = common.Augment(PIXELS, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    transform = common.EvalTransform(PIXELS, (0.5,) * 3, (0.5,) * 3)
    batches = common.Batches(SimpleNamespace(pixels=None, streamed=False), (view,), transform, 1, 0, 0, 1, DEVICE)
    draws, crops = torch.rand(len(crops), view.DRAWS).to(DEVICE), crops.pin_memory() if CARD else crops
    fused = torch.compile(view.photometric, dynamic=False, backend=size("inductor", "eager"))
    functions = {name: functools.partial(batches._finish, crops, function, draws)
                 for name, function in (("plain", view.photometric), ("compiled", fused))}
    return measure(functions, size(10, 1))


def row_memory():
    """Peak memory of a float32 step of ViT-B/16, N = 64, counted as benchmarks.recipes does; on a card measured, within
    0.15."""
    model = common.VisionEncoder("vit_base_patch16_224", 256, False, 224)
    gradient = 4 * sum(p.numel() for p in model.parameters())
    kept, _, _ = recipes.forward_of(model, lambda: {"pixels": torch.zeros(64, 3, 224, 224)}, "no")
    counted = (kept + gradient) / 2**20
    if not CARD:
        return {"counted_mib": counted}
    model, pixels = model.to(DEVICE), torch.randn(64, 3, 224, 224, device=DEVICE)
    measured = measure({"step": lambda: model(pixels)[0].sum().backward()}, 3)["step"]["peak_mib"]
    return {"counted_mib": counted, "measured_mib": measured, "measured / counted": measured / counted}


def row_loss():
    """TeMo's loss, InfoNCE and NT-Xent with gradients over N = 32,768 pairs, D = 256; goal: a peak <= 2048 MiB."""
    return measure(speed.of_losses(size(32768, 64), DEVICE), size(3, 1))


def row_video():
    """NCL with a ViT-B/32 on mp4 of 10 s, 12 frames a clip, bf16: clips/s trained, and decoded by one core."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_table(Path(folder) / "clips", "video", lambda path, i: speed.write_mp4(path), "mp4", size(400, 40))
        decoded, start = size(32, 4), time.perf_counter()
        for i in range(decoded):
            common.read_frames(data.parent / f"{i}.mp4", 12)
        seconds = time.perf_counter() - start
        found = watch("ncl", *TOWERS, "--dataset", data, "--image-encoder", size("vit_base_patch32_224", VIT),
                      "--frames", size(12, 2), "--batch-size", size(128, 8), "--chunk-size", size(32, 4))
    return found | {"decoded_clips_per_s_a_core": decoded / seconds}


def row_mama():
    """A step of MAMA with its look-ahead (forward mode, second order) against the plain step."""
    return measure(speed.of_mama(size(64, 4), size(64, 4), size(224, 32), DEVICE), size(5, 1))


def row_resume():
    """temo.py in bf16, killed and resumed, against one never stopped; goal: the same weights."""
    steps, kill, every = size((200, 90, 40), (6, 3, 2))
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        flags = [*TOY, "--max-steps", steps, "--save-every", every, "--log-every", 1, "--eval-every", 0,
                 "--mixed-precision", "bf16", "--output-dir", folder, "--run-name"]

        def start(*words):
            return subprocess.Popen([sys.executable, str(ROOT / "temo.py"), *map(str, words)])
        start(*flags, whole.name).wait()
        process = start(*flags, killed.name)
        while process.poll() is None and len(log_of(killed)) < kill:
            time.sleep(0.01)
        process.kill()
        was_killed = process.wait() == -signal.SIGKILL
        start("--resume", killed).wait()
        weights = [(run / "model.safetensors").read_bytes() for run in (whole, killed)]
        return {"killed": was_killed, "bitwise equal": weights[0] == weights[1]}


# name: (function, seconds that it may take, whether it runs without a card)
ROWS = {"waits": (row_waits, 150, False), "gradient": (row_gradient, 120, True), "bf16": (row_bf16, 150, False),
        "towers": (row_towers, 120, False), "step": (row_step, 90, False), "memory": (row_memory, 60, True),
        "loss": (row_loss, 60, False), "video": (row_video, 120, False), "mama": (row_mama, 60, False),
        "views": (row_views, 60, False), "resume": (row_resume, 120, False)}


def run(name, limit, toy):
    """A row's results, from a process of its own with so many seconds, or why there are none."""
    row = "import sys; from benchmarks import gpu; gpu.write_json(sys.argv[1], gpu.ROWS[sys.argv[2]][0]())"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"} | toy  # row_gradient's
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        done = subprocess.run(["timeout", "-k", "10", str(limit), sys.executable, "-c", row, out, name], cwd=ROOT,
                              env=environment, capture_output=True, text=True)
        last = "too long" if done.returncode == 124 else " ".join(done.stderr.strip().splitlines()[-1:])
        return read_json(out, {"failed": f"exit {done.returncode}: {last}"})


def main(argv=None):
    """Runs the rows, and writes the results after each."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    p.add_argument("--toy", action="store_true", help="every row on a CPU at toy size; its numbers are no results")
    args = p.parse_args(argv)
    results = read_json(RESULTS / "gpu.json", {})
    for name in args.only:
        function, limit, arithmetic = ROWS[name]
        found, started = {"not run": "no card"}, time.time()
        if CARD or arithmetic or args.toy:
            found = run(name, limit if CARD else 600, {"CUDA_VISIBLE_DEVICES": ""} if args.toy else {})
        results[name] = {
            "what": " ".join(function.__doc__.split()), "command": f"python -m benchmarks.gpu --only {name}",
            "commit": commit(), "date": str(datetime.date.today()), "machine": machine(),
            "versions": versions()[:9], "seconds": time.time() - started, "results": found}
        print(f"{name}: {time.time() - started:.0f} s, {json.dumps(found)}", flush=True)
        write_json(RESULTS / "gpu.json", results)
        rows = [[name, key, f"{value:.4g}" if isinstance(value, float) else str(value)]
                for name, of in results.items() for key, value in flatten(of["results"]).items()]
        (RESULTS / "gpu.md").write_text("\n".join([*markdown(["row", "what", "value"], rows), ""]))


if __name__ == "__main__":
    main()
