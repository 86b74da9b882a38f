"""What only a GPU shows, in steps, one function each. benchmarks/gpu.sh runs them and says what they need.

    python benchmarks/gpu.py STEP [--dry]    # writes benchmarks/results/gpu/STEP.json

--dry runs the same code on the CPU at toy size and writes to a temporary folder. Timings are medians over rounds in
which the variants take turns; memory is the peak of what torch has allocated on the card. The steps nccl and fp16 check
promises and end with an error if one does not hold; the others only measure.
"""

import argparse
import contextlib
import datetime
import functools
import gc
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
DRY = "--dry" in sys.argv  # known before torch looks for a card
if DRY:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
import common  # noqa: E402
from contrastive.engine.log import commit, versions  # noqa: E402
from contrastive.engine.processes import read_json, write_json  # noqa: E402
from contrastive.engine.run import Run  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import mama  # noqa: E402
import mmts  # noqa: E402
import ncl  # noqa: E402
import temo  # noqa: E402
import temperature_schedules as ts  # noqa: E402
from benchmarks import claims as suite  # noqa: E402
from benchmarks import speed

if DRY:  # without inductor, which compiles C++ for minutes
    torch.compile = functools.partial(torch.compile, backend="eager")
DEVICE = torch.device("cpu" if DRY else "cuda")
ON_CPU = ["--cpu"] if DRY else []
QUIET = "--log-every 1 --eval-every 0".split()
TOY = "--dataset moving-emoji --clips 48 16 16 --image-size 16 --frames 2 --batch-size 16".split() if DRY else []
MODULES = {"temo": temo, "temperature_schedules": ts, "ncl": ncl, "mmts": mmts, "mama": mama}
SCRIPTS = {"temo": [], "temperature_schedules": [], "ncl": [],  # and flags that keep a toy run small
           "mmts": ["--num-clusters", "4"] if DRY else [],
           "mama": "--meta-size 8 --meta-batch-size 4".split() if DRY else []}


def size(real, toy):
    """`real` on a card, `toy` in a dry run."""
    return toy if DRY else real


# ------------------------------------------------------- runs --------------------------------------------------------
def train(script, *flags):
    """A run in this process, without pictures, in a temporary folder: its summary, and the rows of its log."""
    module = MODULES[script]
    module.draw = lambda *_, **__: None
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        words = [*QUIET, "--save-every", "0", *map(str, flags), *ON_CPU, "--output-dir", folder, "--run-name", "r"]
        summary = module.main(module.parse_args(words))
        return summary, log_of(Path(folder) / "r")


def log_of(folder):
    """The rows of a run's log that have a loss; a run in progress may be writing the last one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if "loss" in row]


def difference(rows, others):
    """Largest relative difference of the losses of the steps that both logs have."""
    losses = {row["step"]: row["loss"] for row in rows}
    return max(abs(row["loss"] / losses[row["step"]] - 1) for row in others if row["step"] in losses)


def pace(rows):
    """Samples per second and the part of the time spent waiting for data, medians over the later half of the rows."""
    late = rows[len(rows) // 2:]
    return {"samples_per_s": statistics.median(r["samples_per_s"] for r in late),
            "waiting_for_data": statistics.median(r["data_s"] / r["step_s"] for r in late)}


def nccl():
    """The distributed part of the tests over NCCL, with one process and with two, which share a card if there is one.

    It compares gradients of every loss, five SGD steps in chunks under DDP, queues and evaluation with one process;
    then a whole run of temo.py under a launcher with a plain run. NCCL before 2.30 refuses two ranks on a card: the
    tests then use gloo for the card's tensors, and the run of two is left out, which the results say."""
    import test_distributed
    worlds, one_card = (1, 2), not DRY and torch.cuda.device_count() < 2
    version = () if DRY else torch.cuda.nccl.version()
    backend = "gloo" if DRY or one_card and version < (2, 30) else "nccl"
    if one_card and backend == "nccl":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ["TEST_BACKEND"] = backend                                     # for the processes of `compare`
    results = {"backend": backend, "NCCL": ".".join(map(str, version)), "two ranks on one card": one_card}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(test_distributed.compare, (folder, worlds, DEVICE.type), worlds[-1])
        for world in worlds:
            ranks = [read_json(f"{folder}/{world}_{rank}.json") for rank in range(world)]
            worst = {dtype: max(max(v) for rank in ranks for k, v in rank.items() if k.endswith(dtype))
                     for dtype in ("fp32", "fp64")}
            sgd = max(v for rank in ranks for k, v in rank.items() if k.startswith("sgd"))
            exact = all(rank["queue"][1] and rank["evaluation 7"][0] and rank["evaluation 3"][0] for rank in ranks)
            results[f"world {world}"] = {
                "gradients, largest relative difference": worst, "parameters after 5 steps of SGD": sgd,
                "queues and evaluation": "as on one process" if exact else "NOT as on one process",
                "holds": worst["fp64"] < 1e-10 and worst["fp32"] < 1e-5 and sgd < 1e-5 and exact}
        flags = [*TOY, *QUIET, *ON_CPU, "--max-steps", size("20", "2"), "--lr", "3e-4", "--save-every", "0"]
        _, plain = train("temo", *flags)
        for world in worlds:
            if world == 2 and one_card and backend == "gloo":
                results["world 2"] |= {"losses of temo.py": "left out: this NCCL wants a card for each rank"}
                continue
            together(world, one_card, ["temo.py", *flags, "--output-dir", folder, "--run-name", f"w{world}"])
            apart = difference(plain, log_of(Path(folder) / f"w{world}"))
            results[f"world {world}"] |= {"losses of temo.py, largest relative difference": apart}
    if not all(results[f"world {world}"]["holds"] for world in worlds):
        raise SystemExit(f"nccl: not as one process: {json.dumps(results, indent=1)}")
    return results


def together(world, one_card, command):
    """Runs a script as `world` processes, with the environment of torchrun; one_card: all have LOCAL_RANK 0."""
    from launch import free_port
    place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = []
    for rank in range(world):
        own = place | {"RANK": rank, "LOCAL_RANK": 0 if one_card else rank}
        ranks.append(subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL,
                                      env=os.environ | {k: str(v) for k, v in own.items()}))
    if any([rank.wait() for rank in ranks]):
        raise SystemExit(f"{command[0]} as {world} processes: it failed; see above")


def precision():
    """Losses of all five scripts in bf16 against float32, same seed, 50 steps; a second float32 run shows the noise."""
    results = {}
    for script, flags in SCRIPTS.items():
        flags = [*TOY, *flags, "--max-steps", size(50, 2), "--mixed-precision"]
        runs = {name: train(script, *flags, kind)[1]
                for name, kind in list({"fp32": "no", "bf16": "bf16", "fp32 again": "no"}.items())[:size(3, 2)]}
        results[script] = {
            "largest relative difference": {name: difference(runs["fp32"], rows) for name, rows in runs.items()},
            "first and last loss": [runs["fp32"][k]["loss"] for k in (0, -1)],
            "samples_per_s": {name: pace(rows)["samples_per_s"] for name, rows in runs.items()}}
    return results


def compiled():
    """--compile on and off: samples/s, seconds of the first step (it compiles), and how far the losses differ."""
    cases = {"temo, small towers, fp32": ("temo", "no", []), "temo, small towers, bf16": ("temo", "bf16", []),
             "temperature_schedules, ResNet-18, bf16": ("temperature_schedules", "bf16",
                                                        ["--image-encoder", "resnet18-cifar", "--batch-size", "512"])}
    results = {}
    for name, (script, kind, flags) in list(cases.items())[:size(3, 1)]:
        flags = [*flags, *TOY, "--max-steps", size(80, 2), "--mixed-precision", kind]
        rows = {on: train(script, *flags, on)[1] for on in ("--no-compile", "--compile")}
        results[name] = {on: pace(r) | {"first_step_s": r[0]["step_s"]} for on, r in rows.items()}
        results[name]["largest relative difference"] = difference(rows["--no-compile"], rows["--compile"])
    return results


def fp16():
    """fp16 with its gradient scaler, against float32; and a run killed and resumed, against one never stopped."""
    steps, kill, every = size((400, 150, 50), (6, 3, 2))
    flags = [*TOY, *QUIET, *ON_CPU, "--max-steps", steps, "--save-every", every,
             "--mixed-precision", size("fp16", "no")]  # torch has no fp16 on a CPU
    _, plain = train("temo", *TOY, "--max-steps", steps)

    def start(*flags):
        return subprocess.Popen([sys.executable, str(ROOT / "temo.py"), *map(str, flags)], stdout=log, stderr=log)

    def finish(process):
        if process.wait():
            log.seek(0)
            raise SystemExit(f"fp16: a run failed: {log.read()[-2000:]}")

    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+") as log:
        finish(start(*flags, "--output-dir", folder, "--run-name", "whole"))
        process = start(*flags, "--output-dir", folder, "--run-name", "killed")
        killed = Path(folder) / "killed"
        while process.poll() is None and not any(row["step"] >= kill for row in log_of(killed)):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise SystemExit("fp16: the run ended before it could be killed")
        last = max(int(path.stem[5:]) for path in (killed / "checkpoints").glob("step_*.pt"))
        finish(start("--resume", killed))
        runs = {name: Path(folder) / name for name in ("whole", "killed")}
        scales = {name: torch.load(run / "checkpoints" / f"step_{steps}.pt", weights_only=True)["scaler"]
                  for name, run in runs.items()}
        weights = [(run / "model.safetensors").read_bytes() for run in runs.values()]
        rows = {name: log_of(run) for name, run in runs.items()}
    soon = [row for row in rows["killed"] if last < row["step"] <= last + 10]  # before rounding has grown
    apart = difference(rows["whole"], soon)
    results = {"precision": size("fp16", "no"), "steps": steps, "killed_after": kill, "resumed_from": last,
               "resumed against never stopped, largest relative difference": {
                   "of 10 steps": apart, "of all": difference(rows["whole"], rows["killed"])},
               "weights at the end": "bitwise equal" if weights[0] == weights[1] else "not bitwise equal",
               "scalers at the end": scales, "against float32, largest relative difference": difference(
                   plain, rows["whole"]),
               "last losses, float32 and this": [plain[-1]["loss"], rows["whole"][-1]["loss"]]}
    if scales["whole"] != scales["killed"] or apart > 0.01:
        raise SystemExit(f"fp16: the resumed run is another: {json.dumps(results, indent=1)}")
    return results


# ------------------------------------------------------- what a run gets out of the card -----------------------------
EVERY, ROWS = size(5, 2), 8  # steps between rows of the log of a run that is watched, and their number
WORKERS = size(min(4, os.cpu_count()), 0)  # they read ahead: with more of them the first rows would not wait for data
PIXELS = size(224, 32)
VIT, RESNET = size("vit_base_patch16_224", "vit_tiny_patch16_224"), size("resnet50", "resnet18")


@contextlib.contextmanager
def waits():
    """A list that afterwards holds a warning for each time the host waited for the card to finish its work."""
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if not DRY:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if not DRY:
                torch.cuda.set_sync_debug_mode("default")
    found += [w for w in said if "called a synchronizing" in str(w.message)]  # not the notice that this is new


def idle(profile):
    """The part of a profile's time, from its first to its last event, in which the card (dry: the CPU) was idle."""
    kind = torch.autograd.DeviceType.CPU if DRY else torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events()
                   if e.device_type == kind and not e.is_user_annotation)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


@contextlib.contextmanager
def watching(found):
    """Watches a run of ROWS log rows. `found` gets the waits per step, before the row before the last, and the part of
    the time in which the card was idle, before the last one."""
    done, windows = Run.done, contextlib.ExitStack()
    work = torch.profiler.ProfilerActivity.CPU if DRY else torch.profiler.ProfilerActivity.CUDA

    def noted(run, *args, **more):
        done(run, *args, **more)
        if run.step == (ROWS - 2) * EVERY:
            found["waits"] = windows.enter_context(waits())
        elif run.step == (ROWS - 1) * EVERY:
            found["profile"] = windows.enter_context(torch.profiler.profile(activities=[work]))
        elif run.step in ((ROWS - 1) * EVERY - 1, ROWS * EVERY - 1):
            windows.close()
    Run.done = noted
    try:
        with windows:
            yield
    finally:
        Run.done = done
    found["idle"], found["waits_a_step"] = idle(found.pop("profile")), len(found.pop("waits")) / (EVERY - 1)


def watch(script, *flags):
    """Pace (before it is watched), peak memory, waits and idle time of a run, or "out of memory"."""
    found = {}
    try:
        with watching(found):
            summary, rows = train(script, *flags, "--max-steps", ROWS * EVERY, "--log-every", EVERY)
        return pace(rows[:ROWS - 2]) | {"peak_memory_mb": summary["peak_memory_mb"]} | found
    except torch.OutOfMemoryError:  # a small card does not hold the whole batch
        return "out of memory"
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def text_folder(folder):
    """A transformers text encoder without weights: DistilBERT's config, and a tokenizer learnt from a few words."""
    import transformers
    words = [f"a {colour} {thing} number {i}" for colour in ("red", "blue", "grey") for thing in ("box", "tree", "boat")
             for i in range(50)]
    common.train_wordpiece(words).save_pretrained(folder)
    shape = size({}, dict(dim=32, hidden_dim=64, n_layers=1, n_heads=2))
    transformers.DistilBertConfig(**shape).save_pretrained(folder)
    return str(folder), words


def write_table(folder, column, write, ending, captions):
    """Writes folder/captions.csv and its files: the first 32 by write(path, number), the others as links to these."""
    folder.mkdir()
    for i in range(len(captions)):
        path = folder / f"{i}.{ending}"
        write(path, i) if i < 32 else os.link(folder / f"{i % 32}.{ending}", path)
    lines = [f"{i}.{ending},{caption}" for i, caption in enumerate(captions)]
    (folder / "captions.csv").write_text("\n".join([f"{column},caption", *lines]))
    return folder / "captions.csv"


def flags_of(recipe, *names):
    """The words of these flags, with the values of a recipe."""
    return [word for name in names for word in ("--" + name.replace("_", "-"), str(recipe[name]))]


def scale():
    """temo.py as on cc3m (RandAugment in the workers, colours on the card), on JPEGs like photographs: ResNet-50 and
    ViT-B/16, N = 512 to 2,048, two encodings per example, bf16. With two cards, the first case also runs on both."""
    views = flags_of(temo.RECIPES["cc3m"], *"""crop_min flip jitter randaugment_ops randaugment_magnitude eval_resize
        text_length""".split())
    chunks = ["--chunk-size", size(128, 4)]
    cases = {"ResNet-50": (RESNET, 512, []),
             "ViT-B/16": (VIT, 512, []), "ViT-B/16, chunks of 128": (VIT, 512, chunks),
             "ViT-B/16, N = 2,048, chunks of 128": (VIT, 2048, chunks)}
    cases["ViT-B/16, InfoNCE"] = (VIT, 512, ["--loss", "infonce"])
    rng, results = np.random.default_rng(0), {"N": "512 where not said", "precision": "bf16"}

    def jpeg(path, _):
        speed.write_jpeg(path, rng.integers(0, 255, (24, 42, 3), dtype=np.uint8), (500, 375))
    with tempfile.TemporaryDirectory() as folder:
        text, words = text_folder(Path(folder) / "text")
        data = write_table(Path(folder) / "images", "image", jpeg, "jpg", (words * 6)[:size(2600, 40)])
        usual = ["--dataset", data, "--no-pretrained", "--text-encoder", text, "--image-size", PIXELS, *views,
                 "--mixed-precision", "bf16", "--workers", WORKERS]
        commands = {name: ["--image-encoder", encoder, "--batch-size", size(n, 8), *more, *usual]
                    for name, (encoder, n, more) in list(cases.items())[::size(1, 5)]}  # dry: the first and the last
        results |= {name: watch("temo", *flags) for name, flags in commands.items()}
        if not DRY and torch.cuda.device_count() < 2:
            return results | {"ResNet-50, two ranks": "left out: one card"}
        together(2, False, ["temo.py", *commands["ResNet-50"], *QUIET, *ON_CPU, "--save-every", 0, "--log-every", EVERY,
                            "--max-steps", (ROWS - 2) * EVERY, "--output-dir", folder, "--run-name", "two"])
        return results | {"ResNet-50, two ranks": pace(log_of(Path(folder) / "two"))}


def video():
    """NCL and MAMA with CLIP's ViT-B/32 and text transformer, float32 with TF32, on mp4 of 10 seconds, 320 x 240: 12
    frames per clip. NCL as on msrvtt, in chunks; MAMA without, since its look-ahead needs the whole batch."""
    import transformers

    from helpers import frame, write_video
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = size({}, dict(vision_config=small | dict(image_size=32), text_config=small))

    def mp4(path, number):
        write_video(path, [frame((number + k) % 256, 240, 320) for k in range(size(250, 20))], fps=25)
    with tempfile.TemporaryDirectory() as folder:
        clip, words = text_folder(Path(folder) / "clip")
        transformers.CLIPConfig(**config).save_pretrained(clip)  # beside the tokenizer
        data = write_table(Path(folder) / "clips", "video", mp4, "mp4", words[:size(400, 40)])
        usual = ["--dataset", data, "--image-encoder", clip, "--text-encoder", clip, "--no-pretrained", "--image-size",
                 PIXELS, "--frames", size(12, 2), "--mixed-precision", "no", "--workers", WORKERS]
        half = ["--batch-size", size(16, 4), "--meta-size", size(64, 8), "--meta-batch-size", size(16, 4)]
        runs = {"ncl": ["--batch-size", size(128, 8), "--chunk-size", size(32, 4)], "mama": half}
        return {script: watch(script, *usual, *flags) for script, flags in runs.items()}


def views():
    """512 crops of 224 px are copied to the card, and get colours and normalisation, as in a run; and compiled."""
    crops = torch.randint(0, 256, (size(512, 8), 3, PIXELS, PIXELS), dtype=torch.uint8)
    kinds = {"cc3m, I~": common.Augment(PIXELS, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, blur=0.5),
             "SimCLR": common.Augment(PIXELS, 0.08, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5),
             "flip alone": common.Augment(PIXELS, 0.5, 0.5)}
    how = SimpleNamespace(device=DEVICE, transform=common.EvalTransform(PIXELS, (0.5,) * 3, (0.5,) * 3))
    draws = torch.rand(len(crops), common.Augment.DRAWS).to(DEVICE)
    crops = crops if DRY else crops.pin_memory()
    functions = {}
    for name, view in kinds.items():
        finish = functools.partial(common.Batches._finish, how, crops)
        functions |= {name: functools.partial(finish, view.photometric, draws), f"{name}, compiled": functools.partial(
            finish, torch.compile(view.photometric, dynamic=False), draws)}
    return measure(functions, size(10, 1))


def peers():
    """A step (encode, loss, backward, AdamW) of InfoNCE and TeMo against one with open_clip's ClipLoss, on the same
    towers and pixels on the device: ViT-B/16 at 224 px, bf16; and chunks against open_clip's --accum-freq."""
    from accelerate import Accelerator

    B, chunk = size((128, 32), (4, 2))
    with tempfile.TemporaryDirectory() as folder:
        text, _ = text_folder(folder)
        model = common.TwoTower(common.VisionEncoder(VIT, 64, False, PIXELS),
                                common.TextEncoder(text, 64, False, 32)).to(DEVICE)
    optimizer, accelerator = torch.optim.AdamW(model.parameters(), lr=1e-5), Accelerator(cpu=DRY)
    pixels = torch.randn(B, 2, 3, PIXELS, PIXELS, device=DEVICE)             # I and I~
    tokens = {"input_ids": torch.randint(1, 100, (B, 2, 32), device=DEVICE),
              "attention_mask": torch.ones(B, 2, 32, dtype=torch.long, device=DEVICE)}

    def encode(inputs):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            image, text, _ = model(inputs["pixels"].flatten(0, 1),
                                   {k: x.flatten(0, 1) for k, x in inputs["tokens"].items()})
        return *image.unflatten(0, (-1, inputs["pixels"].shape[1])).unbind(1), *text.unflatten(
            0, (-1, inputs["pixels"].shape[1])).unbind(1)                    # I [I~] T [T~], (b, D) each

    def step(loss, views, chunk=0):
        inputs = {"pixels": pixels[:, :views], "tokens": {k: x[:, :views] for k, x in tokens.items()}}
        chunks = common.Chunks(encode, model, accelerator, chunk)
        chunks.backward(loss(*chunks.encode(inputs)))
        optimizer.step()
        optimizer.zero_grad()

    def infonce(image, text):
        return temo.multimodal_loss(image, text, 0.07)

    def infonce_of_four(image, image_aug, text, text_aug):
        return infonce(image, text) + infonce(image_aug, text_aug)

    def temo_loss(image, image_aug, text, text_aug):
        return temo.temo_loss(image, text, image_aug, text_aug, 0.5)

    variants = {"infonce": (infonce, 1), "infonce, chunks": (infonce, 1, chunk),
                "infonce, four encodings": (infonce_of_four, 2), "temo": (temo_loss, 2),
                "temo, chunks": (temo_loss, 2, chunk)}
    functions, results = {}, {"batch": B, "chunk": chunk, "precision": "bf16", "open_clip": "not installed"}
    if find_spec("open_clip"):
        import open_clip
        from open_clip.loss import ClipLoss
        results["open_clip"] = open_clip.__version__

        def clip_loss(image, text):
            return ClipLoss()(F.normalize(image.float(), dim=1), F.normalize(text.float(), dim=1), 1 / 0.07)

        def accumulate():  # its train_one_epoch: features first, then a graph and all logits for each piece
            pieces = [{"pixels": p, "tokens": {"input_ids": i, "attention_mask": m}} for p, i, m in zip(*(
                x[:, :1].split(chunk) for x in (pixels, tokens["input_ids"], tokens["attention_mask"])))]
            with torch.no_grad():
                known = [encode(piece) for piece in pieces]
            for k, piece in enumerate(pieces):
                clip_loss(*map(torch.cat, zip(*known[:k], encode(piece), *known[k + 1:]))).backward()
            optimizer.step()
            optimizer.zero_grad()
        variants["open_clip ClipLoss"] = (clip_loss, 1)
        functions["open_clip --accum-freq"] = accumulate
    functions = {name: functools.partial(step, *what) for name, what in variants.items()} | functions
    return results | measure(functions, size(8, 1))


def measure(functions, rounds):
    """Measures functions that take turns: {name: {seconds (median), ratio to the first, peak MiB, waits of the host for
    the card}}. The first call is not counted. The peak is only measured on a card."""
    peak, lacking = dict.fromkeys(functions, "not measured on a CPU"), "out of memory"

    def watched(name):
        if peak[name] == lacking:
            return
        if not DRY:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            functions[name]()
            if not DRY:
                torch.cuda.synchronize()
                peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        except torch.OutOfMemoryError:
            peak[name] = lacking
            torch.cuda.empty_cache()

    calls, base = {name: functools.partial(watched, name) for name in functions}, next(iter(functions))
    waited = {}
    for name, call in calls.items():
        call()
        with waits() as found:
            call()
        waited[name] = len(found)
    t = speed.Times(calls, rounds, time.perf_counter)
    return {name: lacking if p == lacking else {
        "seconds": t.median(name), "ratio": None if peak[base] == lacking else t.ratio(name, base), "peak_mib": p,
        "waits": waited[name]}
        for name, p in peak.items()}


# ------------------------------------------------------- losses and metrics ------------------------------------------
def losses():
    """TeMo's loss, InfoNCE, NT-Xent and open_clip's ClipLoss over N pairs, D = 256, with gradients: in row blocks of
    the default size, in larger ones, and whole if that fits. Memory does not count the embeddings."""
    results = {"open_clip": "installed" if find_spec("open_clip") else "not installed"}
    for n in size((8192, 32768), (64,)):
        blocks = {"blocks": 0, "blocks of 1024": size(1024, 16)} | ({"whole": n} if n < 10_000 else {})
        functions = {}
        for how, block in blocks.items():
            of = speed.of_losses(n, block, DEVICE)
            peer = {"open_clip ClipLoss": of.pop("clip_loss")} if "clip_loss" in of else {}
            functions |= {f"{name}, {how}": loss for name, loss in of.items()}
        results[f"N = {n}"] = measure(functions | peer, size(3, 1))
    return results


def evaluation():
    """Seconds of evaluation metrics with tensors on the card, as in the scripts, and on the CPU; and whether both
    agree."""
    width, side = size((512, 4096), (8, 32))
    metrics = {"ranks": common.retrieval_metrics,
               "knn@10": functools.partial(common.knn_accuracy, k=10),
               "sinkhorn": lambda a, b: {"b": ncl.sinkhorn_biases(a @ b.T, 0.01)[1].cpu().norm().item()}}
    inputs = {"ranks": speed.captions_and_images(*size((25_010, 5_000), (60, 12)), width),
              "knn@10": speed.known_and_asked(*size((50_000, 10_000), (200, 40)), width),
              "sinkhorn": (speed.unit_rows(side, width), speed.unit_rows(side, width))}
    results = {"cpu_threads": torch.get_num_threads()}
    for name, function in metrics.items():
        there = [x.to(DEVICE) for x in inputs[name]]
        both = {"cpu": functools.partial(function, *inputs[name]), "card": functools.partial(function, *there)}
        values = {where: f() for where, f in both.items()}
        apart = max(abs(values["cpu"][k] - values["card"][k]) for k in values["cpu"])
        results[name] = measure(both, size(3, 1)) | {"largest difference": apart}
    return results


def claims():
    """The gpu suite of claims.py. If it is cut off, start it again: the step is done when no run is left."""
    fashion = Path(os.environ.get("FASHION", "clothes")).resolve()
    names = [name for name in suite.CLAIMS if fashion.is_dir() or not name.startswith("ts-")]
    note = {} if fashion.is_dir() else {"left out": f"ts-*: no folder {fashion} (FASHION)"}
    if DRY:
        suite.RESULTS = Path(tempfile.mkdtemp())
        toy = "--clips 48 16 16 --batch-size 16 --max-steps 2 --cpu --image-size 16 --frames 2".split()
        words = suite.runs_of("ncl-training", "gpu", 1, 1)[0]["NCL"][0][0] + toy
        record = suite.run(words, {})
        if record is None:
            raise SystemExit("claims: the run failed; see above")
        return note | {"record": record}
    what = ["--suite", "gpu", "--claims", *names, "--fashion", str(fashion), "--jobs", "3"]
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "claims.py"), *what])
    if done.returncode:
        raise SystemExit("claims: runs failed; see above")
    return note | {"results": "benchmarks/results/claims_gpu.json"}


# ------------------------------------------------------- one step ----------------------------------------------------
STEPS = {f.__name__: f for f in (nccl, precision, compiled, fp16, scale, video, views, peers, losses, evaluation,
                                 claims)}


def card():
    """The cards of this machine, for the record."""
    if DRY:
        return "none: a dry run"
    cards = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    return [f"{c.name}, {c.total_memory / 2**30:.0f} GiB, compute capability {c.major}.{c.minor}" for c in cards]


def main(argv=None):
    """Run a step and write its file."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("step", choices=STEPS, help="which")
    p.add_argument("--dry", action="store_true", help="run on the CPU at toy size; its numbers are no results")
    p.add_argument("--results", default="", help="folder of the file; default benchmarks/results/gpu")
    args = p.parse_args(argv)
    if args.dry != DRY:
        raise SystemExit("--dry: give it on the command line, since it must hide the cards before torch is imported")
    if not DRY and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --dry tries the steps on the CPU")
    folder = Path(args.results or size(ROOT / "benchmarks" / "results" / "gpu", tempfile.mkdtemp()))
    started = time.time()
    record = {"command": f"bash benchmarks/gpu.sh {'--dry ' * DRY}{args.step}", "commit": commit(),
              "date": str(datetime.date.today()), "cards": card(), "cuda": torch.version.cuda,
              "versions": versions().split("\n")[:9]}
    result = STEPS[args.step]()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{args.step}.json", record | {"seconds": time.time() - started, "results": result})
    print(f"{args.step}: {time.time() - started:.0f} s, {folder / args.step}.json", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
