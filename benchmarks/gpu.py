"""Measures what only a GPU shows: waits, half precision, speed, memory, resume.

    python -m benchmarks.gpu                       # every row
    python -m benchmarks.gpu --only waits towers   # these
    python -m benchmarks.gpu --toy                 # tries the code of the rows on a CPU

Rows come in order of worth, each in a process with a time limit; all take some ten minutes. Writes
results/gpu.json and gpu.md after each row, but not with --toy, whose numbers mean nothing. Without
a GPU the rows of arithmetic run at toy size and the others are "not run: no GPU". A row that fails
or takes too long says so, and the next one runs. Nothing is downloaded: towers have no weights.
Times are medians over rounds in which the variants take turns; memory is the peak of what torch has
allocated on the GPU.
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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import common
from contrastive import CORES
from contrastive.engine.log import commit, versions
from contrastive.core.files import flatten, logged_rows, read_json, write_json
from contrastive.engine.run import Run

import numpy as np
import torch

from benchmarks import recipes, speed
from benchmarks.compare import RESULTS, ROOT, machine, markdown

HAS_GPU = torch.cuda.is_available()
SCRIPTS = {Path(name).stem: module for name, module in recipes.SCRIPTS.items()}


def choose(full, toy):
    """`full` on a GPU, `toy` on a CPU."""
    if HAS_GPU:
        return full
    return toy


DEVICE = torch.device(choose("cuda", "cpu"))
PIXELS = choose(224, 32)
VIT = choose("vit_base_patch16_224", "vit_tiny_patch16_224")
RESNET = choose("resnet50", "resnet18")
TOY = choose([], [
    "--cpu", "--dataset", "moving-emoji", "--clips", "48", "16", "16", "--image-size", "16",
    "--frames", "2", "--batch-size", "16"])
TOY_OF_SCRIPT = choose({}, {
    "mmts": ["--num-clusters", "4"],
    "mama": ["--meta-size", "8", "--meta-batch-size", "4"],
})
TOWERS = [
    "--no-pretrained", "--text-encoder", "small", "--image-size", PIXELS,
    "--mixed-precision", "bf16", "--workers", choose(min(CORES - 1, 16), 0)]
# steps of a run that is watched: speed from FIRST to MIDDLE, waits from MIDDLE to LAST
FIRST, MIDDLE, LAST = choose((10, 30, 40), (1, 2, 4))


# ----------------------------------------------------- tools --------------------------------------
def now():
    """The time when the GPU has done all its work."""
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def train(script, *flags):
    """A run in this process, without pictures, in a temporary folder.

    Returns: its summary, and the rows of its log.
    """
    module = SCRIPTS[script]
    module.draw = lambda *_, **__: None
    toy = TOY
    if "--dataset" in flags:
        toy = TOY[:1]
    with tempfile.TemporaryDirectory() as folder:
        words = [*toy, *TOY_OF_SCRIPT.get(script, []), "--log-every", "1", "--eval-every", "0",
                 "--save-every", "0", *map(str, flags), "--output-dir", folder, "--run-name", "r"]
        summary = module.main(module.parse_args(words))
        return summary, read_log(Path(folder) / "r")


def read_log(folder):
    """The rows of a run's log that have a loss."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    return [row for row in logged_rows(path) if "loss" in row]


def largest_difference(rows, other_rows):
    """Largest relative difference of the losses of two logs."""
    pairs = zip(rows, other_rows, strict=True)
    return max(abs(other_row["loss"] / row["loss"] - 1) for row, other_row in pairs)


def idle_part(profile):
    """The part of a profile's time, from its first to its last event, in which the GPU was idle."""
    device_type = torch.autograd.DeviceType.CPU
    if HAS_GPU:
        device_type = torch.autograd.DeviceType.CUDA
    spans = []
    for event in profile.events():
        if event.device_type == device_type and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
    starts, ends = np.array(sorted(spans)).T                               # (events,)
    last_end = np.maximum.accumulate(ends)                                 # of all events so far
    gaps = np.maximum(0, starts[1:] - last_end[:-1])                       # (events - 1,)
    return float(gaps.sum() / (last_end[-1] - starts[0]))


def watch(script, *flags):
    """A run: its samples/s, then how often a step waits for the GPU, and the GPU's idle part."""
    times, watched = {}, {}
    windows = contextlib.ExitStack()
    activity = torch.profiler.ProfilerActivity.CPU
    if HAS_GPU:
        activity = torch.profiler.ProfilerActivity.CUDA
    done = Run.done

    def done_and_noted(run, *args, **options):
        done(run, *args, **options)
        if run.step in (FIRST, MIDDLE):
            times[run.step] = now()
        if run.step == MIDDLE:
            profile = torch.profiler.profile(activities=[activity])
            watched["profile"] = windows.enter_context(profile)
            record = warnings.catch_warnings(record=True)
            watched["warnings"] = windows.enter_context(record)
            warnings.simplefilter("always")
            if HAS_GPU:
                torch.cuda.set_sync_debug_mode("warn")
        if run.step == LAST - 1:
            windows.close()

    Run.done = done_and_noted
    summary, _ = train(script, *flags, "--max-steps", LAST, "--log-every", 1000)
    Run.done = done
    if HAS_GPU:
        torch.cuda.set_sync_debug_mode("default")
    num_waits = 0
    for warning in watched["warnings"]:
        # not the notice that the debug mode is new
        if "called a synchronizing" in str(warning.message):
            num_waits += 1
    seconds = times[MIDDLE] - times[FIRST]
    return {"samples_per_s": (MIDDLE - FIRST) * summary["batch"] / seconds,
            "peak_mib": summary["peak_memory_mib"],
            "waits_a_step": num_waits / (LAST - 1 - MIDDLE),
            "idle (goal <= 0.05)": idle_part(watched["profile"])}


def measure(functions, rounds):
    """{name: ms, ratio to the first, peak MiB} of functions that take turns.

    The first call of each does not count.
    """
    peak_mib = dict.fromkeys(functions, "a CPU")

    def call(name):
        if not HAS_GPU:
            functions[name]()
            return
        torch.cuda.reset_peak_memory_stats()
        start_bytes = torch.cuda.memory_allocated()
        functions[name]()
        torch.cuda.synchronize()
        peak_mib[name] = (torch.cuda.max_memory_allocated() - start_bytes) / 2**20

    calls = {name: functools.partial(call, name) for name in functions}
    for function in calls.values():
        function()
    seconds = speed.time_functions(calls, rounds, time.perf_counter)
    base = next(iter(functions))
    results = {}
    for name in functions:
        results[name] = {"ms": 1000 * float(np.median(seconds[name])),
                         "ratio": speed.ratio(seconds, name, base),
                         "peak_mib": peak_mib[name]}
    return results


def write_table(folder, column, write, suffix, n):
    """Writes folder/captions.csv and its n files.

    Args:
        column: of the files.
        write: function (path, number) that writes a file; the first 32 are written, the others are
            links to these.
    """
    folder.mkdir()
    lines = [f"{column},caption"]
    for i in range(n):
        path = folder / f"{i}.{suffix}"
        if i < 32:
            write(path, i)
        else:
            os.link(folder / f"{i % 32}.{suffix}", path)
        lines.append(f"{path.name},a box number {i}")
    table = folder / "captions.csv"
    table.write_text("\n".join(lines))
    return table


# ----------------------------------------------------- rows ---------------------------------------
def row_waits():
    """Waits a step of the five scripts, idle part of the GPU; goal: no wait."""
    return {script: watch(script) for script in SCRIPTS}


def row_gradient():
    """Gradients of every loss on 1 and 2 ranks against one process, over NCCL with two GPUs (a CPU:
    gloo)."""
    import test_distributed

    results = {"2 ranks": "not run: one GPU"}
    worlds = (1, 2)
    if HAS_GPU and torch.cuda.device_count() == 1:
        worlds = (1,)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, worlds, DEVICE.type)
        torch.multiprocessing.spawn(test_distributed.compare, arguments, worlds[-1])
        for world in worlds:
            errors = []  # (what and precision, numbers) of all ranks
            for rank in range(world):
                errors += read_json(f"{folder}/{world}_{rank}.json").items()
            results[f"{world} ranks"] = {}
            for precision, goal in (("fp64", "1e-10"), ("fp32", "1e-5")):
                largest = [max(values) for name, values in errors if name.endswith(precision)]
                results[f"{world} ranks"][f"{precision} (goal < {goal})"] = max(largest)
    return results


def row_bf16():
    """Losses of 20 steps in bf16 against float32 without TF32, largest relative difference; another
    float32 run shows the noise."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # read when cuBLAS and cuDNN start
    steps = choose(20, 2)
    results = {}
    for script in SCRIPTS:
        logs = []
        for precision in ("no", "bf16", "no"):
            _, rows = train(script, "--max-steps", steps, "--mixed-precision", precision)
            logs.append(rows)
        results[script] = {"bf16": largest_difference(logs[0], logs[1]),
                           "fp32 again": largest_difference(logs[0], logs[2])}
    return results


def row_towers():
    """temo.py's views and JPEGs with ResNet-50 and ViT-B/16, bf16, N = 256, InfoNCE, against the
    same towers on synthetic input: samples/s, goal >= 0.9."""
    files = speed.jpegs(32)
    n = choose(256, 8)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        table = write_table(Path(folder) / "images", "image",
                            lambda path, i: path.write_bytes(files[i]), "jpg", choose(2600, 40))
        for tower in (RESNET, VIT):
            result = watch("temo", *TOWERS, "--dataset", table, "--image-encoder", tower,
                           "--batch-size", n, "--loss", "infonce", "--embed-dim", 128)
            step = speed.make_steps(n, tower, PIXELS, DEVICE)["infonce"]
            milliseconds = measure({"step": step}, choose(8, 1))["step"]["ms"]
            result["synthetic_samples_per_s"] = 1000 * n / milliseconds
            result["ratio"] = result["samples_per_s"] / result["synthetic_samples_per_s"]
            results[tower] = result
    return results


def row_step():
    """A step (encode, loss, backward) of ViT-B/16, bf16, N = 128. Goals: InfoNCE against the
    formula in plain torch and open_clip's ClipLoss <= 1.03; TeMo against InfoNCE on the same four
    encodings <= 1.05; chunks of 32 <= 1.4."""
    steps = speed.make_steps(choose(128, 8), VIT, PIXELS, DEVICE)
    results = measure(steps, choose(8, 1))
    for name, base in (("infonce", "plain"), ("infonce", "open_clip"),
                       ("temo of four", "infonce of four"), ("infonce, chunks", "infonce")):
        ratio = "not installed"
        if base in steps:
            ratio = results[name]["ms"] / results[base]["ms"]
        results[f"{name} / {base}"] = ratio
    return results


def row_views():
    """ms of the views of 512 crops on the device, as in a run, plain and compiled."""
    crops = torch.randint(0, 256, (choose(512, 8), 3, PIXELS, PIXELS), dtype=torch.uint8)
    if HAS_GPU:
        crops = crops.pin_memory()
    view = common.Augment(PIXELS, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    draws = torch.rand(len(crops), view.DRAWS).to(DEVICE)
    transform = common.EvalTransform(PIXELS, (0.5,) * 3, (0.5,) * 3)
    data = SimpleNamespace(pixels=None, streamed=False)
    batches = common.Batches(data, (view,), transform, 1, 0, first=0, last=1, device=DEVICE)
    fused = torch.compile(view.photometric, dynamic=False, backend=choose("inductor", "eager"))
    return measure({
        "plain": functools.partial(batches.finish_view, crops, view.photometric, draws),
        "compiled": functools.partial(batches.finish_view, crops, fused, draws),
    }, choose(10, 1))


def row_memory():
    """Peak memory of a float32 step of ViT-B/16, N = 64, counted as benchmarks.recipes does; on a
    GPU measured, within 0.15."""
    model = common.VisionEncoder("vit_base_patch16_224", 256, False, 224)
    gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
    forward = recipes.forward_cost(model, lambda: {"pixels": torch.zeros(64, 3, 224, 224)}, "no")
    counted = (forward.kept_bytes + gradient_bytes) / 2**20
    if not HAS_GPU:
        return {"counted_mib": counted}
    model = model.to(DEVICE)
    pixels = torch.randn(64, 3, 224, 224, device=DEVICE)

    def step():
        model(pixels)[0].sum().backward()

    measured = measure({"step": step}, 3)["step"]["peak_mib"]
    return {"counted_mib": counted, "measured_mib": measured,
            "measured / counted": measured / counted}


def row_loss():
    """TeMo's loss, InfoNCE and NT-Xent with gradients over N = 32,768 pairs, D = 256; goal: a peak
    <= 2048 MiB."""
    return measure(speed.make_losses(choose(32768, 64), DEVICE), choose(3, 1))


def row_video():
    """NCL with a ViT-B/32 on mp4 of 10 s, 12 frames a clip, bf16: clips/s trained, and decoded by
    one core."""
    with tempfile.TemporaryDirectory() as folder:
        table = write_table(Path(folder) / "clips", "video", lambda path, _: speed.write_mp4(path),
                            "mp4", choose(400, 40))
        num_decoded = choose(32, 4)
        start = time.perf_counter()
        for i in range(num_decoded):
            common.read_frames(table.parent / f"{i}.mp4", 12)
        seconds = time.perf_counter() - start
        results = watch("ncl", *TOWERS, "--dataset", table,
                        "--image-encoder", choose("vit_base_patch32_224", VIT),
                        "--frames", choose(12, 2), "--batch-size", choose(128, 8),
                        "--chunk-size", choose(32, 4))
    results["decoded_clips_per_s_a_core"] = num_decoded / seconds
    return results


def row_mama():
    """A step of MAMA with its look-ahead (forward mode, second order) against the plain step."""
    batch = choose(64, 4)
    return measure(speed.make_mama_steps(batch, batch, choose(224, 32), DEVICE), choose(5, 1))


def row_resume():
    """temo.py in bf16, killed and resumed, against one never stopped; goal: the same weights."""
    num_steps, kill_after, save_every = choose((200, 90, 40), (6, 3, 2))

    def start(*words):
        command = [sys.executable, str(ROOT / "temo.py"), *map(str, words)]
        return subprocess.Popen(command)

    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        flags = [*TOY, "--max-steps", num_steps, "--save-every", save_every, "--log-every", 1,
                 "--eval-every", 0, "--mixed-precision", "bf16", "--output-dir", folder,
                 "--run-name"]
        start(*flags, whole.name).wait()
        process = start(*flags, killed.name)
        while process.poll() is None and len(read_log(killed)) < kill_after:
            time.sleep(0.01)
        process.kill()
        was_killed = process.wait() == -signal.SIGKILL
        start("--resume", killed).wait()
        weights = [(run / "model.safetensors").read_bytes() for run in (whole, killed)]
    return {"killed": was_killed, "bitwise equal": weights[0] == weights[1]}


class Row(NamedTuple):
    """A row of the table."""

    function: Callable  # () -> results
    seconds: int  # that it may take on a GPU
    runs_on_cpu: bool = False  # whether it says something without a GPU


ROWS = {
    "waits": Row(row_waits, 150),
    "gradient": Row(row_gradient, 120, runs_on_cpu=True),
    "bf16": Row(row_bf16, 150),
    "towers": Row(row_towers, 120),
    "step": Row(row_step, 90),
    "memory": Row(row_memory, 60, runs_on_cpu=True),
    "loss": Row(row_loss, 60),
    "video": Row(row_video, 120),
    "mama": Row(row_mama, 60),
    "views": Row(row_views, 60),
    "resume": Row(row_resume, 120),
}


# ----------------------------------------------------- command line -------------------------------
def run_row(name, toy):
    """A row's results, from a process of its own, or why there are none."""
    if not (HAS_GPU or ROWS[name].runs_on_cpu or toy):
        return {"not run": "no GPU"}
    seconds = 600
    if HAS_GPU and not toy:
        seconds = ROWS[name].seconds
    environment = os.environ.copy()
    # row_gradient imports a test
    paths = [str(ROOT), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if toy:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    program = ("import sys; from benchmarks import gpu; "
               "gpu.write_json(sys.argv[1], gpu.ROWS[sys.argv[2]].function())")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        process = subprocess.run(
            ["timeout", "-k", "10", str(seconds), sys.executable, "-c", program, out, name],
            cwd=ROOT, env=environment, capture_output=True, text=True)
        message = " ".join(process.stderr.strip().splitlines()[-1:])
        if process.returncode == 124:
            message = "too long"
        return read_json(out, {"failed": f"exit {process.returncode}: {message}"})


def write_results(results):
    """Writes gpu.json and gpu.md."""
    rows = []
    for name, row in results.items():
        for key, value in flatten(row["results"]).items():
            text = str(value)
            if isinstance(value, float):
                text = f"{value:.4g}"
            rows.append([name, key, text])
    write_json(RESULTS / "gpu.json", results)
    table = markdown(["row", "what", "value"], rows)
    (RESULTS / "gpu.md").write_text("\n".join([*table, ""]))


def main(argv=None):
    """Runs the rows, and writes the results after each."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW",
                   help=f"rows to run, of {', '.join(ROWS)}")
    p.add_argument("--toy", action="store_true",
                   help="run every row on a CPU at toy size and write nothing")
    args = p.parse_args(argv)
    results = read_json(RESULTS / "gpu.json", {})
    for name in args.only:
        started = time.time()
        row_results = run_row(name, args.toy)
        seconds = time.time() - started
        print(f"{name}: {seconds:.0f} s, {json.dumps(row_results)}", flush=True)
        if args.toy:
            continue
        results[name] = {
            "what": " ".join(ROWS[name].function.__doc__.split()),
            "command": f"python -m benchmarks.gpu --only {name}",
            "commit": commit(), "date": str(datetime.date.today()), "machine": machine(),
            "versions": versions()[:9], "seconds": seconds, "results": row_results}
        write_results(results)


if __name__ == "__main__":
    main()
