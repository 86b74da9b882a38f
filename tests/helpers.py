"""Small data sets in the true formats, written by the tests. Sample i is always picture(i) and
caption(i)."""

import contextlib
import importlib.util
import io
import json
import pickle
import re
import tarfile
from fractions import Fraction
from pathlib import Path

import common
from contrastive.core.files import write_json
from contrastive.core.processes import UserError
from contrastive.data.table import EmptySplit
from contrastive.encoders.base import STATS
from contrastive.encoders.models import model_of_spec
from contrastive.engine import run as run_module
from contrastive.engine.run import Run

import av
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten_with_path

import eval as eval_py
from variants import slip

DRAW = run_module.draw
# it would take a run four seconds; where a test asks, run_script draws
run_module.draw = lambda *_: None
# of 4096 SLIP's head has 17 million weights, whose checkpoints take seconds
slip.slip_head.__defaults__ = (64, 256)
CPU = torch.device("cpu")


# ---- images and tables ----
CLASSES = ["apple", "pear_tree", "zebra"]  # sample i has class i % 3


def picture(i, height=20, width=24):
    """(H, W, 3) uint8, smooth, another colour for every i < 125."""
    y, x = np.mgrid[0:height, 0:width]
    base = np.array([i % 5, i // 5 % 5, i // 25]) * 45 + 10
    return (base + np.stack([y, x, (x + y) // 2], -1)).astype(np.uint8)


def caption(i, k=0):
    return f"picture number {i}, take {k}"


def encode(array, kind="png", **options):
    """Bytes of an image file; kind as PIL names it, array also a PIL image."""
    image, out = array, io.BytesIO()
    if not isinstance(array, Image.Image):
        image = Image.fromarray(array)
    image.save(out, kind, **options)
    return out.getvalue()


TRUNCATED = encode(picture(7, 64, 64), "jpeg")[:700]
TEXT = b"this is no picture\n"


def write_images(folder, numbers, kind="png", **size):
    """folder/003.png and so on; returns the file names."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    names = []
    for i in numbers:
        name = f"{i:03}.{kind}"
        data = encode(picture(i, **size), {"jpg": "jpeg"}.get(kind, kind))
        (Path(folder) / name).write_bytes(data)
        names.append(name)
    return names


def write_rows(path, header, rows):
    """csv, tsv, jsonl, json or parquet by the ending of the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pandas.DataFrame(rows, columns=header, dtype=object)
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".tsv":
        table.to_csv(path, sep="\t", index=False)
    elif path.suffix in (".json", ".jsonl"):
        table.to_json(path, orient="records", lines=path.suffix == ".jsonl")
    else:
        table.to_parquet(path)
    return path


def write_captions(folder, n, name="captions.csv", **size):
    """The plainest data set of all: images and a file of `image, caption`."""
    names = write_images(folder, range(n), **size)
    rows = [(image, caption(i)) for i, image in enumerate(names)]
    return write_rows(Path(folder) / name, ["image", "caption"], rows)


def write_tar(path, samples):
    """samples: {key: {extension: bytes}}, written in order as webdataset does."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, parts in samples.items():
            for extension, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return Path(path)


def tar_samples(numbers, *extensions):
    """jpg, png, txt (two captions, one a line), cls and json parts of these samples."""
    samples = {}
    for i in numbers:
        parts = {
            "jpg": encode(picture(i), "jpeg", quality=95),
            "png": encode(picture(i)),
            "txt": f"{caption(i)}\n{caption(i, 1)}\n".encode(),
            "cls": str(i % 3).encode(),
            "json": json.dumps({"title": caption(i), "width": 24}).encode()}
        samples[f"{i:06}"] = {extension: parts[extension] for extension in extensions}
    return samples


def write_hub_table(path, labels, names, pictures, *, image="image", label="label", **columns):
    """A parquet file as the hub has them: images without paths, each row's class number, and
    further columns."""
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    content = columns | {image: [{"bytes": encode(x)} for x in pictures], label: labels}
    table = datasets.Dataset.from_dict(content)
    table = table.cast_column(image, datasets.Image())
    table = table.cast_column(label, datasets.ClassLabel(names=names))
    table.to_parquet(str(path))


def write_parquet_images(path, numbers):
    """Such a table of samples."""
    labels = [i % 3 for i in numbers]
    captions = [caption(i) for i in numbers]
    write_hub_table(path, labels, CLASSES, map(picture, numbers), caption=captions)


def write_files(root, files):
    """{path below root: content}: texts and bytes as they are, else a pickle, a table of rows, a
    tar of samples or JSON by the ending."""
    for name, content in files.items():
        path = Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf8")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".tar":
            write_tar(path, content)
        elif path.suffix == ".pkl":
            path.write_bytes(pickle.dumps(content, protocol=2))
        elif path.suffix == ".parquet":
            write_rows(path, [*content[0]], [row.values() for row in content])
        else:
            path.write_text(json.dumps(content), encoding="utf8")
    return Path(root)


# ---- data sets and batches ----
def open_splits(name, **options):
    """{split: Data} of the splits that have something in them: in a tiny set nothing may fall into
    a held-out one."""
    splits = {}
    for split in ("train", "val", "test"):
        with contextlib.suppress(EmptySplit):
            splits[split] = common.load_data(str(name), split, **options)
    return splits


def all_rows(name, **options):
    """All rows of data without splits as a train split, of which nothing is held out."""
    data = common.load_data(str(name), "test", test_as_whole=True, **options)
    return data.select(range(len(data)), "train")


def complains(name, split, *words, **options):
    """load_data refuses in one line that has these words. Returns: the line."""
    with pytest.raises(UserError) as error:
        common.load_data(str(name), split, **options)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# ---- videos ----
def frame(i, height=64, width=96):
    """(H, W, 3) uint8: the number i in eight bars (red 1, blue 0, lowest bit left) above green, in
    a gif's palette."""
    bars = np.arange(width) * 8 // width                                   # (W,) of each column
    is_red = (i >> bars) & 1                                               # (W,)
    colours = np.where(is_red[:, None], (219, 73, 85), (36, 109, 170))     # (W, 3)
    x = np.full((height, width, 3), (36, 146, 85), np.uint8)
    x[: height * 3 // 4] = colours
    return x


def frame_number(x):
    """The number that frame(i) shows after any codec, scaled or not: x (H, W, 3)."""
    height, width = x.shape[:2]
    middles = np.arange(1, 16, 2) * width // 16                            # (8,) columns
    red, _, blue = x[height // 8 : height * 5 // 8, middles].mean(0).T     # (8,) each
    return int(np.packbits(red > blue, bitorder="little")[0])


def numbers(clip):
    """What the frames of a clip show: (n, H, W, 3) of read_frames, or (T, 3, H, W) of a data set.
    """
    clip = np.asarray(clip)
    if clip.shape[-1] != 3:
        clip = clip.transpose(0, 2, 3, 1)
    return [frame_number(x) for x in clip]


ENCODERS = {
    "libx264": {"preset": "veryfast", "crf": "10"},
    "libsvtav1": {"preset": "12", "crf": "15", "svtav1-params": "log-level=-1"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "crf": "10", "b": "0"},
    "mpeg4": {"qscale": "2", "flags": "+qscale"}}


def write_video(
        path, frames, codec="libx264", fps=10, *, at=None, pixels="yuv420p", options=None,
        muxer=None):
    """A real encoded clip.

    Args:
        frames: numbers of frame() or (H, W, 3) uint8.
        at: when each is shown, in 1/fps s.
        options: of the encoder.
        muxer: options of the container.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    arrays = []
    for x in frames:
        if np.ndim(x) == 0:
            x = frame(x)
        arrays.append(np.ascontiguousarray(x))
    with av.open(str(path), "w", options=muxer or {}) as out:
        stream = out.add_stream(codec, rate=fps, options=ENCODERS.get(codec, {}) | (options or {}))
        stream.height, stream.width = arrays[0].shape[:2]
        stream.pix_fmt = pixels
        stream.codec_context.time_base = Fraction(1, fps)
        for x, time in zip(arrays, at or range(len(arrays))):
            image = av.VideoFrame.from_ndarray(x, format="rgb24")
            image.pts, image.time_base = time, Fraction(1, fps)
            out.mux(stream.encode(image))
        out.mux(stream.encode(None))
    return Path(path)


CODECS = {"avi": ("mpeg4", "yuv420p"), "webm": ("libvpx-vp9", "yuv420p"), "gif": ("gif", "rgb8")}


def write_clips(folder, clips, length=8, fps=10):
    """{number: file name}: clip k shows k * length, k * length + 1, ...; in the codec of its
    ending, else h264."""
    for k, name in clips.items():
        codec, pixels = CODECS.get(name.rpartition(".")[2], ("libx264", "yuv420p"))
        frames = range(length * k, length * (k + 1))
        write_video(Path(folder) / name, frames, codec, fps, pixels=pixels)


def write_clip_features(root):
    """{name: path} of a table of 40 clips with two captions each, and of two folders with their
    features, whose lengths differ."""
    draws = np.random.default_rng(0)
    paths = {"motion": root / "motion", "appearance": root / "appearance"}
    rows = []
    for i in range(40):
        for path, width in zip(paths.values(), (6, 4)):
            path.mkdir(parents=True, exist_ok=True)
            feature = draws.normal(size=(3 + i % 9, width)).astype(np.float32)
            np.save(path / f"clip{i}.npy", feature)
        rows.append((f"clip{i}", f"one number {i}"))
        rows.append((f"clip{i}", f"yet another of them, {i}"))
    return paths | {"clips": write_rows(root / "clips.csv", ["video", "caption"], rows)}


# ---- tiny models ----
TWO_HEADS = dict(num_attention_heads=2, num_hidden_layers=1)
BERT = dict(hidden_size=24, intermediate_size=32, **TWO_HEADS)
CLIP = BERT | dict(num_hidden_layers=2)
CLIP_TEXT = CLIP | dict(
    eos_token_id=3, bos_token_id=2, pad_token_id=0, max_position_embeddings=12)
MODELS = {  # kind: class of transformers, configuration
    "bert": ("BertModel", BERT),
    "distilbert": ("DistilBertModel", dict(dim=24, hidden_dim=32, n_layers=1, n_heads=2)),
    "t5": ("T5ForConditionalGeneration", dict(
        d_model=24, d_kv=12, d_ff=32, num_layers=1, num_decoder_layers=2, num_heads=2)),
    "dino": ("Dinov2Model", dict(hidden_size=24, image_size=28, patch_size=14, **TWO_HEADS)),
    "vit": ("ViTForImageClassification", BERT | dict(image_size=32, patch_size=16)),
    "clip": ("CLIPModel", dict(
        vision_config=CLIP | dict(image_size=32, patch_size=16), text_config=CLIP_TEXT,
        projection_dim=16))}


def tiny_model(kind, folder, tokenizer):
    """A model of width 24 for this tokenizer, saved into a folder -> the model."""
    import transformers

    name, flags = MODELS[kind]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**flags)
    config.get_text_config().vocab_size = len(tokenizer.tokenizer)
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.save_pretrained(folder)
    tokenizer.tokenizer.save_pretrained(folder)
    if kind in ("dino", "vit", "clip"):
        mean, std = STATS["clip" if kind == "clip" else "imagenet"]
        stats = dict(image_processor_type="BitImageProcessor", image_mean=mean, image_std=std)
        write_json(Path(folder) / "preprocessor_config.json", stats)
    return model


SPEC = dict(
    image_encoder="small", text_encoder="small", embed_dim=16, image_size=32, text_length=12,
    text_pooling="mean", image_stats="half", eval_resize="crop")


def model_of(tokenizer, pretrained=False, weights="", **changes):
    """The model of SPEC, some of its values changed."""
    model, _ = model_of_spec(SPEC | changes, tokenizer, pretrained, weights)
    return model


# ---- tensors ----
def assert_close(a, b, tolerance=1e-5):
    """The tensors are equal up to an absolute tolerance."""
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def unit(*shape, seed=0):
    """Unit rows, float64."""
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x, dim=-1)


def tensors_in(path):
    """{name: tensor} of a safetensors file or of a checkpoint: its parts and, of each process, its
    random state."""
    if path.suffix == ".safetensors":
        return load_file(path)
    tensors = {}
    leaves, _ = tree_flatten_with_path(torch.load(path, weights_only=True))
    for keys, x in leaves:
        if torch.is_tensor(x):
            names = [str(getattr(key, "key", getattr(key, "idx", key))) for key in keys]
            tensors["/".join(names)] = x
    return tensors


def tensors_of(folder, step):
    """{part/name: tensor} of a run's checkpoint after so many steps."""
    return tensors_in(folder / "checkpoints" / f"step_{step}.pt")


def equal_files(a, b):
    """Are the tensors of two safetensors files, or of two checkpoints, the same, bit by bit?"""
    a, b = tensors_in(a), tensors_in(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- runs of the scripts ----
def fork(script, folder, old, new):
    """The module of a copy of a script, folder/fork_of_SCRIPT.py, that says `new` where the script
    says `old`."""
    text = Path(script.__file__).read_text(encoding="utf8")
    assert text.count(old) == 1, old
    path = Path(folder) / f"fork_of_{Path(script.__file__).name}"
    path.write_text(text.replace(old, new), encoding="utf8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_set(base, flags):
    """A test's usual flags without those that have no effect beside `flags`."""
    usual, line = " ".join(map(str, base)), " ".join(map(str, flags))
    useless = []
    # another set than moving-emoji
    if re.search("--dataset (?!moving-emoji)", line):
        useless.append("clips")
    # no K-Means: clusters of a file or a class, which two sets have by default
    if re.search("--clusters (?!captions|vision)|--dataset (epic|ssv2)(?!.*--clusters)", line):
        useless.append("num-clusters")
    # meta-data of a file, all of it
    if re.search("--meta-set (?!train|val)", line):
        useless.append("meta-size")
    # no meta-data at all
    elif "--meta-set" not in line and re.search("--weighting (?!meta|l2rw)|--baseline", line):
        useless += ["meta-size", "meta-batch-size"]
    for flag in useless:
        usual = re.sub(rf"--{flag}( \d+)+", "", usual)
    return usual.split()


def run_script(script, folder, *flags, base=(), pictures=False):
    """A script's main in this process, into `folder` -> summary; without its pictures unless asked
    for."""
    with pytest.MonkeyPatch.context() as patch:
        if pictures:
            patch.setattr(run_module, "draw", DRAW)
        place = ["--output-dir", str(folder.parent), "--run-name", folder.name]
        words = [*of_set(base, flags), *place, *map(str, flags)]
        return script.main(script.parse_args(words))


def few_steps(script, folder, *flags, base=()):
    """The rows of a run that neither evaluates nor finishes."""

    def skip_evaluation(run):
        run.log.write({"step": run.step, "eval": {}})

    def skip_end(run, *_, **__):
        run.bar.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "val_pieces", {}, raising=False)
        patch.setattr(Run, "evaluate_val", skip_evaluation)
        patch.setattr(Run, "finish", skip_end)
        run_script(script, folder, *flags, base=base)
    return steps(folder)


def evaluated(checkpoint, *flags):
    """{data set: its result} of eval.py."""
    words = ["--cpu", "--workers", 0, "--checkpoint", checkpoint, *flags]
    return eval_py.main(eval_py.parse_args([*map(str, words)]))["datasets"]


def rows(folder):
    """The rows of metrics.jsonl."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps(folder):
    """The rows of training steps."""
    return [row for row in rows(folder) if "loss" in row]


def losses(folder):
    return [row["loss"] for row in steps(folder)]


def refused(parse_args, flags, capsys):
    """The one line with which flags are refused."""
    with pytest.raises(SystemExit) as stop:
        parse_args([*flags])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error
