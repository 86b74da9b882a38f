"""What an unkind user, disk, machine or file can do: one clear line and exit code 2, nothing lost, nothing let in."""

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive import engine, evaluation, figures, readers, sets
from contrastive.engine.base import UserError
from contrastive.engine.checkpoints import damaged_files
from contrastive.engine.run import Run

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as eval_py
import helpers
import launch
import ncl
import temo
import temperature_schedules as ts
from helpers import caption, encode, picture, write_captions, write_rows
from tools import paraphrase

TINY = ["--cpu", "--threads", "1", "--workers", "0", "--image-size", "16", "--embed-dim", "16", "--batch-size", "16",
        "--log-every", "1", "--save-every", "1", "--max-steps", "2", "--eval-batch", "64", "--run-name", "a"]


# ----------------------------------------------- runs ----------------------------------------------------------------
def run(data, out, *flags, script=temo):
    return script.main(script.parse_args(list(map(str, [*TINY, "--dataset", data, "--output-dir", out, *flags]))))


def resume(folder, *flags):
    return temo.main(temo.parse_args(["--resume", str(folder), *flags]))


def judge(*flags):
    """eval.py; raises what its entry point would print."""
    words = ["--cpu", "--threads", "1", "--workers", "0", *map(str, flags)]
    result = eval_py.main(eval_py.parse_args(words))
    eval_py.complain(result)
    return result


def stopped(work, capfd):
    """The one line with which a program ends, its exit code being 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end, engine.base.clean_exit():
        work()
    return the_line(end.value.code, capfd.readouterr().err)


def the_line(code, said):
    lines = said.strip().splitlines()
    errors = [x for x in lines if re.match(r"error( \(process \d\))?: ", x)]
    assert code == 2 and len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in said, said[-3000:]
    assert len(errors[0]) < 900 and "\x1b[3" not in said and "weights_only" not in errors[0]  # no colour, no bad advice
    return errors[0].partition(": ")[2]


@contextlib.contextmanager
def small_files(size=0):
    """A quota: no file may grow beyond `size` bytes. (Permissions would not stop root.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def during(monkeypatch, owner, name, around):
    """From here on every call of owner.name is inside around()."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args, **options):
        with around():
            return inner(*args, **options)
    monkeypatch.setattr(owner, name, outer)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_captions(tmp_path_factory.mktemp("data"), 80)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes") / "photos"
    for i in range(60):
        (folder / "abc"[i % 3]).mkdir(parents=True, exist_ok=True)
        (folder / "abc"[i % 3] / f"{i:03}.png").write_bytes(encode(picture(i)))
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A finished run."""
    out = tmp_path_factory.mktemp("whole")
    run(data, out)
    return out / "a"


def same(a, b):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (a, b))
    return ours.keys() == theirs.keys() and all(ours[k].equal(theirs[k]) for k in theirs)


# ----------------------------------------------- 1: evaluation -------------------------------------------------------
def broken_on(split, monkeypatch):
    """Embeddings and features of this split are NaN."""
    inner, seen = evaluation.embed.encode_images, []

    def encode_images(model, data, *args, **options):
        index, image, features, bad = inner(model, data, *args, **options)
        seen.append(data.split)
        later = split == "test" or seen.count("val") > 1                   # at step 0 the run would end at once
        factor = float("nan") if data.split == split and later else 1
        return index, image * factor, features * factor, bad
    for evaluator in (evaluation.retrieval, evaluation.by_class):
        monkeypatch.setattr(evaluator, "encode_images", encode_images)


@pytest.mark.parametrize("script, split, left", [
    (temo, "test", {"curves.png", "similarities.png"}), (temo, "val", {"curves.png", "retrieval.png"}),
    (ncl, "test", {"curves.png", "queues.safetensors"}), (ts, "test", {"curves.png", "classes.png"}),
    (ts, "val", {"curves.png", "classes.png", "figures.png"})], ids=lambda v: getattr(v, "__name__", None))
def test_an_evaluation_that_fails_ends_the_run_after_all_is_saved(script, split, left, data, classes, tmp_path, capfd,
                                                                  monkeypatch, pictures):
    broken_on(split, monkeypatch)
    source = classes if script is ts else data
    line = stopped(lambda: run(source, tmp_path, script=script), capfd)
    assert re.match(rf"evaluation failed: {source}/{split}: \w+ holds? non-finite values; the model and all else", line)
    there = {f.name for f in (tmp_path / "a").iterdir()}
    assert left | {"summary.json", "model.safetensors", "model.json", "metrics.jsonl"} <= there
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert list(summary["errors"]) == [f"{source}/{split}"] and bool(summary["test"]) == (split == "val")
    common.load_model(tmp_path / "a")


def test_eval_of_broken_weights_fails_after_all_is_written(whole, tmp_path, capfd):
    shutil.copytree(whole, tmp_path / "a")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    save_file({k: v * float("nan") for k, v in weights.items()}, tmp_path / "a" / "model.safetensors")
    spec = json.loads((tmp_path / "a" / "model.json").read_text())
    with pytest.raises(UserError, match="model.safetensors is damaged .* .not the bytes that the run wrote"):
        common.load_model(tmp_path / "a")
    (tmp_path / "a" / "model.json").write_text(json.dumps({k: v for k, v in spec.items() if k != "sha256"}))
    line = stopped(lambda: judge("--checkpoint", tmp_path / "a", "--output-dir", tmp_path / "e"), capfd)
    assert re.match(r"evaluation failed: .*/retrieval: query holds non-finite values; .*/gap: embeddings hold", line)
    assert len(json.loads((tmp_path / "e" / "eval.json").read_text())["errors"]) == 2
    save_file(weights | {"second.weight": torch.zeros(2)}, tmp_path / "a" / "model.safetensors")
    with pytest.raises(UserError, match="holds second.weight, which a fork added .*; modules of a loss belong into"):
        common.load_model(tmp_path / "a")


def test_eval_goes_on_after_a_set_that_is_not_there(whole, data, tmp_path, capfd):
    flags = "--checkpoint", whole, "--datasets", "/no/such", data, "--output-dir", tmp_path
    line = stopped(lambda: judge(*flags), capfd)
    assert line.startswith("evaluation failed: /no/such: --dataset /no/such: no such path")
    assert list(json.loads((tmp_path / "eval.json").read_text())["datasets"]) == [str(data)]


# ----------------------------------------------- 2: disks -----------------------------------------------------------
@pytest.mark.parametrize("owner, name, words", [
    (common, "build_tokenizer", "a/tokenizer cannot be written: File too large"),
    (engine.folder, "lock_folder", "--output-dir .*: cannot be written .File too large"),
    (engine.run, "compare", "a/data.json cannot be written: File too large"),
    (engine.folder.Log, "write", "a/metrics.jsonl cannot be written: File too large"),
    (engine.checkpoints, "save", "the checkpoint .*a/checkpoints/step_1 cannot be written: File too large"),
    (engine.run, "save_model", "the model in .*a cannot be written: File too large"),
    (common, "list_bad_samples", "a/bad_samples.txt cannot be written: File too large"),
    (Run, "summarize", ""),
    (readers.records, "open_table", "the cache of `datasets` in .* cannot be written: File to")])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_is_whole(owner, name, words, data, tmp_path, capfd,
                                                                  monkeypatch):
    shutil.copytree(data.parent, tmp_path / "data")  # of its own: nothing of it is in a cache
    table = tmp_path / "data" / "captions.csv"
    if name == "open_table":  # parquet goes through the cache, a csv does not
        table = table.with_suffix(".parquet")
        import pyarrow.csv
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(data.parent / "captions.csv"), table)
    if name == "list_bad_samples":
        for file in (tmp_path / "data").glob("*.png"):
            file.write_bytes(b"no picture" if common.held_out_place(file.name) > 0.5 else file.read_bytes())
    if name == "summarize":  # summary.json is what is written after it, before the pictures
        inner, elsewhere = engine.base.write_json, {"summary.json": "/proc/none/x"}
        monkeypatch.setattr(engine.base, "write_json", lambda path, value: inner(elsewhere.get(path.name, path), value))
        words = "/proc/none/x cannot be written: No such file"
    else:
        during(monkeypatch, owner, name, small_files)
    line = stopped(lambda: run(table, tmp_path), capfd)
    assert re.search(words, line)
    last = engine.checkpoints.latest_checkpoint(tmp_path / "a")
    assert (last is not None) == (name in ("save_model", "summarize"))
    assert not list(tmp_path.glob("a/checkpoints/*.tmp")) and (last is None or not damaged_files(last))


def test_what_a_full_disk_stopped_goes_on_once_there_is_room(data, whole, tmp_path, capfd, monkeypatch):
    """The checkpoint before is there, the half one is gone, half a row of the log is dropped."""
    save = engine.checkpoints.save

    def save_the_first(run):
        with small_files(50_000 if run.step == 2 else 10**9):  # half of it is written
            save(run)
    with monkeypatch.context() as patch:
        patch.setattr(engine.checkpoints, "save", save_the_first)
        line = stopped(lambda: run(data, tmp_path), capfd)
    assert re.match("the checkpoint .*step_2 cannot be written: File too large; what was saved before is whole", line)
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step_1"]
    with open(tmp_path / "a" / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "eval": {"x": {"R@1": 1.0}}')  # it ends with a bracket and is no row
    assert resume(tmp_path / "a")["steps"] == 2 and same(tmp_path / "a", whole)


def test_a_picture_without_room_is_named_and_no_half_one_is_left(data, tmp_path, capfd, monkeypatch, pictures):
    during(monkeypatch, figures.base, "save_figure", lambda: small_files(500))
    assert run(data, tmp_path)["steps"] == 2
    said = capfd.readouterr().out
    assert said.count("cannot be drawn and is left out: OSError") == 5 and not list((tmp_path / "a").glob("*.png"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_frame_cache_stops_the_run_and_costs_no_clip(workers, tmp_path, capfd, monkeypatch):
    for i in range(20):
        helpers.write_video(tmp_path / "videos" / f"{i}.mp4", [i, i + 1])
    listed = [(f"{i}.mp4", caption(i)) for i in range(20)]
    rows = write_rows(tmp_path / "videos" / "a.csv", ["video", "caption"], listed)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(evaluation.retrieval.Evaluator, "check", lambda self: None)  # reached while training
    monkeypatch.setattr(Run, "evaluate_val", lambda self: {})
    flags = "--frames", 2, "--batch-size", 4, "--workers", workers, "--frame-cache", tmp_path / "file" / "inside"
    line = stopped(lambda: run(rows, tmp_path, *flags), capfd)
    assert re.match("--frame-cache .*file/inside cannot be written: Not a directory", line)


def test_a_full_disk_stops_both_processes(data, tmp_path):
    def work(rank):
        inner = engine.folder.Log.write

        def write(log, row):
            with small_files(0 if rank == 0 else 10**9):
                inner(log, row)
        engine.folder.Log.write = write
        run(data, tmp_path)
    (code, main), (other, second) = launch.ranks(tmp_path, work)
    assert "a/metrics.jsonl cannot be written: File too large" in the_line(code, main)
    assert "another of the 2 processes ended or hangs (" in the_line(other, second)


# ----------------------------------------------- 3: files -----------------------------------------------------------
def rows_of(names, make):
    return "".join(make(i, n) for i, n in enumerate(names))


def parquet(**columns):
    import io

    import pyarrow
    import pyarrow.parquet
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


NAMES = [f"{i:03}.png" for i in range(80)]
QUOTES = {10: '"a cat', 15: 'he said "hi"'}  # opened, and closed by another row's quote
HEAD, DEEP = "image,caption\n", "nested too deeply"
CAPTION_FILES = {
    "commas.csv": (HEAD + rows_of(NAMES, lambda i, n: f"{n},a cat, a dog\n"), "line 2 has more fields than"),
    "comma.csv": (HEAD + rows_of(NAMES, lambda i, n: f"{n},a cat{', a dog' * (i == 70)}\n"), "line 72 has more"),
    "quote.csv": (HEAD + rows_of(NAMES, lambda i, n: f"{n},{chr(34) * (i == 40)}a\n"),
                  "a quote that opens in line 42 swallows the rows after it, first 041.png in line 43"),
    "numbers.csv": ("image,caption\n" + rows_of(range(80), lambda i, n: f"{n},{chr(34) * (i == 40)}a\n"),
                    "a quote in the row that begins at line 42 is never closed"),
    "swallowed.csv": (HEAD + rows_of(NAMES, lambda i, n: f"{n},{QUOTES.get(i, 'a')}\n"),
                      "a quote that opens in line 12 swallows the rows after it, first 011.png in line 13"),
    "last.csv": ("caption,image\n" + rows_of(NAMES, lambda i, n: f"{QUOTES.get(i, 'a')},{n}\n"),
                 "a quote that opens in line 12 swallows the rows after it, first 011.png in line 13"),
    "object.json": (json.dumps({"image": NAMES[0], "caption": "a"}), "1 readable examples are too few"),
    "inside.json": (json.dumps({"images": [{"image": n, "caption": "a"} for n in NAMES]}), "it has: images"),
    "deep.json": ("[" * 100_000 + "]" * 100_000, DEEP), "objects.json": ('{"a":' * 5000 + "1" + "}" * 5000, DEEP),
    "lists.jsonl": (rows_of(NAMES, lambda i, n: f'{{"image": "{n}", "caption": [["a"]]}}\n'), "holds records or lists"),
    "twice.csv": ("image,caption,Caption\n" + rows_of(NAMES, lambda i, n: f"{n},a,b\n"), "columns are called caption"),
    "bare.csv": (rows_of(NAMES, lambda i, n: f"{n},a\n"), "its first line is a row (000.png), not a header"),
    "cc3m.tsv": (rows_of(NAMES, lambda i, n: f"a\thttp://x.com/{n}\n"), "first line is a row (http://x.com/000.png)"),
    "web.csv": (HEAD + rows_of(NAMES, lambda i, n: f"http://x.y/{n},a\n"), "holds URLs there (http://x.y/000."),
    "windows.csv": (HEAD + rows_of(NAMES, lambda i, n: f"C:\\me\\{n},a\n"), "holds Windows paths there (C:"),
    "bytes.parquet": (parquet(jpg=[b"\xff\xd8"] * 80, caption=["a"] * 80), "can be read, first"),
    "columns.json": (json.dumps({"image": NAMES, "caption": ["a"] * 80}), "holds image bytes or records there"),
    "many.json": (json.dumps({n: ["a"] for n in NAMES}), "it has: 80 others"),
    "nan.json": ("[" + ",".join(f'{{"image": "{n}", "caption": NaN}}' for n in NAMES) + "]", "no row has an image and"),
    "nan.parquet": (parquet(image=NAMES, caption=[float("nan")] * 80), "no row has an image and a caption"),
    "magic.parquet": (b"PARX" + b"x" * 100, "Parquet magic bytes not found"),
    "footer.parquet": (parquet(image=NAMES)[:-8] + b"\xff\xff\xff\x7fPAR1", "smaller than the size reported by footer"),
    "zeros.csv": (HEAD.encode("utf-16-le") * 2, "not UTF-8 text (it holds zeros); save it as UTF-8"),
    "none.csv": (HEAD, "it has no rows"), "none.json": ("[]", "it has no rows"),
    "none.parquet": (parquet(image=np.array([], str), caption=np.array([], str)), "it has no rows")}


@pytest.mark.parametrize("name", CAPTION_FILES)
def test_a_file_of_captions_that_is_none(name, tmp_path, capfd):
    content, words = CAPTION_FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in stopped(lambda: run(tmp_path / name, tmp_path / "runs"), capfd)


def test_captions_of_several_lines_are_captions(tmp_path):
    helpers.write_images(tmp_path, range(20))
    many = ["two lines:\nred, green and blue", "1, a cat\n2, a dog", 'a "cat",\n\nand more']
    rows = [(n, many[i % 3]) for i, n in enumerate(NAMES[:20])]
    file = write_rows(tmp_path / "a.csv", ["image", "caption"], rows)
    train = common.load_data(str(file), "train")
    assert {train.captions(i)[0] for i in range(len(train))} == set(many)


def linked(folder):
    shutil.move(folder / "b", folder.parent / "elsewhere")
    (folder / "b").symlink_to(folder.parent / "elsewhere")


def texts_beside(folder):
    for file in sorted(folder.glob("*/*.png")):
        file.with_suffix(".txt").write_text(f"words of {file.stem}")


def deeper(folder):
    shutil.move(folder / "b", folder / "c" / "b")


def saved_to_disk(folder):
    import datasets
    shutil.rmtree(folder)
    datasets.Dataset.from_dict({"image": ["a"], "caption": ["b"]}).save_to_disk(str(folder))


def listed(name, file_column="file_name"):
    def spoil(folder):
        rows = [(str(f.relative_to(folder)), "words") for f in sorted(folder.glob("*/*.png"))]
        write_rows(folder / name, [file_column, "text"], rows)
    return spoil


FOLDERS = {
    "link": (linked, "b is a link to a folder and is not followed: its files would be missing"),
    "texts": (texts_beside, "a/000.txt beside its image is read only from a tar"),
    "deep": (deeper, "c/b/001.png lies deeper than others, so its class is not clear"),
    "disk": (saved_to_disk, "a folder of save_to_disk; give a folder with only its data-*.arrow files, or write par"),
    "csv": (listed("labels.csv", "Image"), "labels.csv lists files and captions and is not read"),
    "jsonl": (listed("a/captions.jsonl"), "a/captions.jsonl lists files and captions and is not read"),
    "parquet": (listed("all.parquet"), "all.parquet lists files and captions and is not read")}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_lies_in_a_folder_and_is_not_read_is_refused(name, classes, tmp_path):
    """Passed over, a class would be missing, or the names of the folders would serve as captions."""
    spoil, words = FOLDERS[name]
    shutil.copytree(classes, tmp_path / "own")
    write_rows(tmp_path / "own" / "classes.csv", ["class", "caption"], [("a", "no list of files")])
    spoil(tmp_path / "own")
    with pytest.raises(UserError, match=re.escape(words)):
        common.load_data(str(tmp_path / "own"), "train")


def test_texts_beside_images_are_captions_once_in_a_tar(classes, tmp_path):
    """What the refusal says to do."""
    import subprocess
    shutil.copytree(classes, tmp_path / "own")
    texts_beside(tmp_path / "own")
    (tmp_path / "dir").mkdir()
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "dir" / "0.tar", "-C", tmp_path / "own", "."], check=True)
    data = common.load_data(str(tmp_path / "dir"), "train")
    assert len(data) > 45 and all(data.captions(i) == [f"words of {Path(data.key(i)).name}"] for i in range(len(data)))


def test_pictures_of_other_kinds_are_counted(classes, tmp_path, capsys):
    """A phone leaves HEIC beside JPEG; TIFF is read."""
    shutil.copytree(classes, tmp_path / "own")
    for i in range(3):
        (tmp_path / "own" / "a" / f"{i}.HEIC").write_bytes(b"ftypheic")
        (tmp_path / "own" / "a" / f"{i}.tif").write_bytes(encode(picture(i), "tiff"))
    (tmp_path / "own" / "more.zip").write_bytes(b"PK")
    found = [common.load_data(str(tmp_path / "own"), split) for split in ("train", "val", "test")]
    said = capsys.readouterr().out
    assert sum(map(len, found)) == 63 and "3 .heic files are not read; convert them to jpg" in said
    assert "1 .zip files are not read; unpack them" in said
    (tmp_path / "own" / "more.zip").unlink()
    shutil.rmtree(tmp_path / "own" / "b")
    for file in (*(tmp_path / "own").rglob("*.png"), *(tmp_path / "own").rglob("*.tif")):
        file.unlink()
    sets.own.own_data.cache_clear()
    with pytest.raises(UserError, match="own: 3 .heic files are not read; convert them"):
        common.load_data(str(tmp_path / "own"), "train")


def rows_of_clips(folder, header, seconds):
    """Twelve clips of one content, two rows each; seconds: (begin, end) of row k."""
    clip = helpers.write_video(folder / "0.mp4", range(4))
    for i in range(1, 12):
        shutil.copy(clip, folder / f"{i}.mp4")
    rows = [(f"{k // 2}.mp4", f"part {k}", *map(str, seconds(k))) for k in range(24)]
    return write_rows(folder / "a.csv", ["video", "caption", *header], rows)


@pytest.mark.parametrize("header", [("time_start", "time_end"), ("start_sec", "end_sec"), ("Begin", "end"),
                                    ("start_timestamp", "stop_timestamp"), ("start", "duration")])
def test_windows_by_other_names_are_not_passed_over(header, tmp_path):
    """Passed over, all rows of a video would be captions of the whole of it."""
    with pytest.raises(UserError, match=f"rows of one video differ in .*{header[0]}.*, which is not read: all"):
        common.load_data(str(rows_of_clips(tmp_path, header, lambda k: (k % 2 / 10, 0.2))), "train")


def test_a_name_of_several_videos_is_said(tmp_path):
    for k, name in enumerate(("cat/0.mp4", "dog/0.mp4", "cat/1.mp4", "dog/2.mp4", "cat/3.mp4", "old/3.mp4")):
        helpers.write_video(tmp_path / "v" / name, range(k + 1))
    shutil.copy(tmp_path / "v" / "cat" / "3.mp4", tmp_path / "v" / "old" / "3.mp4")  # a copy is no other video
    rows = [(name, caption(i), "train") for i, name in enumerate(["0", "1", "2", "3"])]
    file = write_rows(tmp_path / "a.csv", ["video", "caption", "split"], rows)
    note = common.load_data(str(file), "train", video_dir=str(tmp_path / "v")).note
    assert re.search("1 names match SEVERAL videos .for 0, .*/cat/0.mp4 is read and not .*/dog/0.mp4", note)
    file = write_rows(tmp_path / "b.csv", ["video", "caption", "split"], [("dog/0", "a", "train"), *rows[1:]])
    assert "SEVERAL" not in common.load_data(str(file), "train", video_dir=str(tmp_path / "v")).note


def test_captions_that_are_lost_or_not_chosen_are_said(tmp_path, capsys):
    """Flickr30k of Kaggle has a row without its separator."""
    names = helpers.write_images(tmp_path, range(40))
    lines = [f"{x}|{k}|{caption(i, k)}, so\n" for i, x in enumerate(names) for k in range(2)]
    (tmp_path / "a.csv").write_text("image|title|caption\n" + "".join(lines))
    common.load_data(str(tmp_path / "a.csv"), "train")
    said = capsys.readouterr().out
    assert "a.csv: captions are read from its column caption, and title is not read; --caption-column chooses" in said
    (tmp_path / "b.csv").write_text("image|take|caption\n" + "".join(lines[:7] + ["003.png|1 no bar\n"] + lines[8:]))
    common.load_data(str(tmp_path / "b.csv"), "train")
    said = capsys.readouterr().out
    assert "1 rows have no caption while other rows of their image have one, first of 003.png" in said
    assert "column" not in said


def test_windows_that_clips_were_cut_by_are_said_to_be_unread(tmp_path, capsys):
    """Kinetics' csv: where in another file each clip once stood."""
    file = rows_of_clips(tmp_path, ("time_start", "time_end"), lambda k: (k // 2 + 100, k // 2 + 110))
    assert len(common.load_data(str(file), "train").captions(0)) == 2
    assert "WARNING: a.csv: time_start, time_end not read: each row stands for" in capsys.readouterr().out
    sets.own.own_data.cache_clear()
    data = common.load_data(str(rows_of_clips(tmp_path, (" Start", " END"), lambda k: (k % 2 / 10, 0.2))), "train")
    assert len(data.captions(0)) == 1 and data.sources[0]["source"]["end"] == 0.2


def test_nan_is_no_caption_and_no_class(tmp_path):
    helpers.write_images(tmp_path, range(80))
    file = tmp_path / "a.parquet"
    values = [float("nan") if i % 2 else float(i % 3) for i in range(80)]
    file.write_bytes(parquet(image=NAMES, caption=values, label=values[1:] + values[:1]))
    train = common.load_data(str(file), "train")
    assert "40 without a caption left out" in train.note and set(train.column("label")) == {-1}


def test_captions_of_a_megabyte(data, tmp_path):
    """Neither the csv reader nor the tokenizer nor a picture chokes on them."""
    shutil.copytree(data.parent, tmp_path / "data")
    long = [f"{i}{'w' * 10**6}" if i % 2 else f"{i} word " * 10**5 for i in range(8)]
    rows = list(zip(NAMES, [*long, *map(caption, range(8, 40))]))
    file = write_rows(tmp_path / "data" / "long.csv", ["image", "caption"], rows)
    began = time.process_time()
    assert run(file, tmp_path)["steps"] == 2
    pieces = {"image": torch.eye(4, 8), "text": torch.eye(4, 8), "owner": np.arange(4), "texts": long[:4],
              "index": np.arange(4), "positives": torch.arange(4)[:, None],
              "data": common.load_data(str(file), "train")}
    figures.base.draw_retrieval(pieces, tmp_path / "retrieval.png")
    assert time.process_time() - began < 30


ODD = ["$x_{1}", "$ 5 and $", "{}", "{0} {c}", "line\nbreak\r\nmore", "\x1b[31mred", "_under_", "\\frac{", "%s %d",
       "中文", "\u202eabc", "\0nul", "a" * 300, " ' \" "]


def test_odd_signs_in_captions_and_paths(data, tmp_path, capfd, pictures):
    """Brackets are no pattern, braces no format, dollars no formula: train, draw, evaluate, resume."""
    folder, out = tmp_path / "d[1] $x_1 {}*?", tmp_path / "o[ut]*?"
    shutil.copytree(data.parent, folder)
    lines = [json.dumps({"image": n, "caption": f"{ODD[i % len(ODD)]} {i}"}) + "\n" for i, n in enumerate(NAMES)]
    (folder / "a[b].jsonl").write_text("".join(lines))
    run(folder / "a[b].jsonl", out)
    assert len(list((tmp_path / "o[ut]*?" / "a").iterdir())) > 10
    judge("--checkpoint", out / "a", "--tasks", "retrieval", "gap", "histograms", "--output-dir", tmp_path / "e[x]")
    assert {f.name for f in (tmp_path / "e[x]").iterdir()} >= {"eval.json", "retrieval.png"}
    assert "cannot be drawn" not in capfd.readouterr().out


def _rows_of(names, column="file_name"):
    return [column, "text"], [(name, f"words of {name}") for name in names]


KINDS = {
    "csv": lambda f: write_captions(f, 8), "tsv": lambda f: write_captions(f, 8, "captions.tsv"),
    "jsonl": lambda f: write_captions(f, 8, "captions.jsonl"), "json": lambda f: write_captions(f, 8, "captions.json"),
    "parquet file": lambda f: write_captions(f, 8, "captions.parquet"),
    "parquet": lambda f: helpers.write_parquet_images(f / "data" / "train.parquet", range(8)).parent.parent,
    "parquet, splits": lambda f: [helpers.write_parquet_images(f / s / "0.parquet", range(8))
                                  for s in ("train", "test")] and f,
    "classes": lambda f: [helpers.write_images(f / c, range(8)) for c in "ab"] and f,
    "classes, splits": lambda f: [helpers.write_images(f / s / c, range(8))
                                  for s in ("train", "test") for c in "ab"] and f,
    "metadata": lambda f: write_rows(f / "metadata.csv", *_rows_of(helpers.write_images(f, range(8)))).parent,
    "metadata, splits": lambda f: [write_rows(f / s / "metadata.csv", *_rows_of(helpers.write_images(f / s, range(8))))
                                   for s in ("train", "test")] and f,
    "tars": lambda f: helpers.write_tar(f / "0.tar", helpers.tar_samples(range(8), "jpg", "txt")).parent,
    "tar": lambda f: helpers.write_tar(f / "0.tar", helpers.tar_samples(range(8), "jpg", "txt")),
    "videos": lambda f: [helpers.write_video(f / c / f"{c}{i}.mp4", [i, i + 1]) for c in "ab" for i in range(4)] and f,
    "video names": lambda f: [helpers.write_video(f / f"{i}.mp4", [i, i + 1]) for i in range(4)] and write_rows(
        f / "captions.csv", ["video", "caption"], [(f"{i}", f"words {i}") for i in range(4)])}


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_of_odd_letters_holds_what_a_plain_one_does(kind, tmp_path):
    """Blanks, umlauts, and what `datasets` takes for patterns, in folders above the data; hidden ones among them."""
    found = []
    for place in ("plain", "my wörk [a-b]/.x {y,z} *? #1 %41 [!c]"):
        (tmp_path / place).mkdir(parents=True)
        splits = helpers.open_splits(KINDS[kind](tmp_path / place), frames=2)
        found.append({split: [(data.key(i), data.captions(i), data.read(i).shape) for i in range(len(data))]
                      for split, data in splits.items()})
    assert found[0] == found[1] and sum(map(len, found[0].values())) >= 4


def test_paraphrases_below_odd_letters(tmp_path):
    (tmp_path / "ü [1]").mkdir()
    file = write_rows(tmp_path / "ü [1]" / "p[1].jsonl", ["caption", "paraphrases"], [("a b", ["b a"])])
    assert sets.paraphrases.Paraphrases(file).get(["a b"]) == [["b a"]]


def test_one_class_is_nothing_to_classify(data, tmp_path, capfd):
    helpers.write_images(tmp_path / "photos" / "only", range(40))
    line = "its images lie in one folder, so there are no classes, and no metadata.csv"
    assert line in stopped(lambda: run(tmp_path / "photos", tmp_path), capfd)
    shutil.copytree(data.parent, tmp_path / "data")
    rows = [(n, caption(i), "x") for i, n in enumerate(NAMES)]
    file = write_rows(tmp_path / "data" / "one.csv", ["image", "caption", "label"], rows)
    line = stopped(lambda: run(file, tmp_path, script=ts), capfd)
    assert "all of its training images are of one class" in line
    run(file, tmp_path)  # captions all the same
    found = judge("--checkpoint", tmp_path / "a", "--tasks", "knn", "probe", "--output-dir", tmp_path / "e")
    assert "at least 2 classes" in found["datasets"][str(file)]["left_out"]["probe"]


# ---- damaged runs
def one_bit(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1  # of a weight: nothing else would notice
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def gone(file):
    file.unlink()


def a_list(file):
    file.write_text("[]")


DAMAGED = {
    ("model.safetensors", cut): "its model.safetensors is damaged .*; --resume .* writes it again",
    ("model.safetensors", one_bit): "its model.safetensors is damaged .*not the bytes .*; --resume .* writes it again",
    ("model.safetensors", empty): "its model.safetensors is damaged", ("model.safetensors", gone): "its model.safet",
    ("model.json", cut): "model.json: damaged", ("model.json", empty): "model.json: damaged",
    ("model.json", gone): "this run has not ended .no model.json.; continue it with --resume",
    ("model.json", a_list): "model.json: damaged .it holds no names",
    ("args.json", cut): "args.json: damaged", ("args.json", empty): "args.json: damaged",
    ("args.json", gone): "--datasets is needed", ("args.json", a_list): "args.json: damaged .it holds no names",
    ("tokenizer/tokenizer.json", cut): "no complete token", ("tokenizer/tokenizer.json", empty): "no complete token",
    ("tokenizer/tokenizer.json", gone): "no complete token", ("tokenizer/tokenizer.json", a_list): "no complete token",
    ("tokenizer/tokenizer_config.json", cut): "no complete token",
    ("tokenizer/tokenizer_config.json", empty): "no complete token"}


@pytest.mark.parametrize("file, harm", DAMAGED, ids=lambda v: getattr(v, "__name__", v))
def test_eval_of_a_damaged_run(file, harm, whole, tmp_path, capfd):
    shutil.copytree(whole, tmp_path / "a")
    harm(tmp_path / "a" / file)
    line = stopped(lambda: judge("--checkpoint", tmp_path / "a", "--output-dir", tmp_path / "e"), capfd)
    assert re.search(DAMAGED[file, harm], line), line
    if file.startswith("model."):  # what the line promises
        resume(tmp_path / "a")
        assert same(tmp_path / "a", whole)


def test_eval_of_a_run_without_texts_on_captions(classes, data, tmp_path, capfd):
    run(classes, tmp_path, script=ts)
    with pytest.raises(UserError, match="nothing was measured, every task was left out: .*: the model has no text enc"):
        judge("--checkpoint", tmp_path / "a", "--datasets", data, "--output-dir", tmp_path / "e")
    found = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert set(found["datasets"][str(data)]["left_out"]) == {"retrieval", "knn", "gap"} and not found["errors"]


def test_eval_says_what_changed_in_the_data(data, tmp_path, capfd):
    shutil.copytree(data.parent, tmp_path / "data")
    file = tmp_path / "data" / "captions.csv"
    run(file, tmp_path)
    def changed():
        capfd.readouterr()
        sets.own.own_data.cache_clear()
        found = judge("--checkpoint", tmp_path / "a", "--output-dir", tmp_path / "e", "--tasks", "gap")
        warned = re.findall("WARNING: (.*)", capfd.readouterr().out)
        assert json.loads((tmp_path / "e" / "eval.json").read_text())["datasets"] == found["datasets"]
        return found["datasets"][str(file)].get("changed", []), warned
    assert changed() == ([], [])
    held = [n for n in NAMES if common.HELD_OUT <= common.held_out_place(n) < 2 * common.HELD_OUT]
    (tmp_path / "data" / held[0]).write_bytes(encode(picture(9, 50, 50)))
    lines, warned = changed()
    words = f"{file} test: {len(held)} examples as before, but other names or sizes"
    assert lines == [words] and len(warned) == 1 and words in warned[0] and "are not comparable" in warned[0]
    file.write_text("".join(x for x in file.read_text().splitlines(True) if held[0] not in x))
    assert changed()[0] == [f"{file} test: {len(held)} examples, now {len(held) - 1}"]
    (tmp_path / "a" / "data.json").write_text("[1")
    lines, warned = changed()
    assert not lines and len(warned) == 1 and "data.json is damaged" in warned[0]


# ---- images
def huge_header(width=60_000, height=40_000):
    """A small png that says it holds 2.4 billion pixels."""
    small = encode(picture(0))
    head = b"IHDR" + struct.pack(">II", width, height) + small[24:29]
    return small[:12] + head + struct.pack(">I", zlib.crc32(head)) + small[33:]


def spoiled(data, folder):
    """A copy of the data: a huge image, a cut one and a text in training; a text among those held out for test."""
    shutil.copytree(data.parent, folder)
    place = {n: common.held_out_place(n) for n in NAMES}
    train = [n for n in NAMES if place[n] >= 2 * common.HELD_OUT]
    test = [n for n in NAMES if common.HELD_OUT <= place[n] < 2 * common.HELD_OUT]
    bad = dict(zip([*train[:3], test[0]], [huge_header(), encode(picture(1))[:60], b"text", b"text"]))
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    return folder / "captions.csv", list(bad)


def test_max_pixels(data, tmp_path, capfd):
    file, bad = spoiled(data, tmp_path / "data")
    read = common.load_data(str(file), "train").read
    with pytest.raises(ValueError, match=r"2400000000 pixels, more than the limit of 178,956,970 .--max-pixels."):
        read(NAMES.index(bad[0]))
    line = stopped(lambda: run(file, tmp_path, "--max-pixels", 479), capfd)  # they are of 20 x 24
    assert re.search("none of the first .* can be read, first .*480? pixels|24 x 20 pixels, more than the 479", line)
    run(file, tmp_path / "b", "--max-pixels", 480, "--max-bad-fraction", 0.1)
    assert eval_py.options_of_set(eval_py.Subject(eval_py.parse_args(
        ["--checkpoint", str(tmp_path / "b" / "a"), "--cpu"])), str(file), "")["max_pixels"] == 480


def test_verify_images(data, tmp_path, capfd):
    """Read before training: listed, counted, left out of training and evaluation, on a resume too."""
    file, bad = spoiled(data, tmp_path / "data")
    (tmp_path / "b" / "a").mkdir(parents=True)
    (tmp_path / "b" / "a" / "unreadable.json").write_text('{"train": {"x": "seen by an earlier try, not by this run"}}')
    line = stopped(lambda: run(file, tmp_path / "b", "--verify-images"), capfd)
    assert re.match("--verify-images: 4 of 80 images cannot be read, above --max-bad-fraction 0.01; the first: ", line)
    listed = (tmp_path / "b" / "a" / "bad_samples.txt").read_text().splitlines()
    assert {x.split("\t")[0] for x in listed} == set(bad)
    summary = run(file, tmp_path, "--verify-images", "--max-bad-fraction", 0.05)
    said = capfd.readouterr()
    assert "reading" in said.err and "3 that cannot be read left out" in said.out
    assert summary["bad_samples"] == 4 and summary["test"][str(file)]["unreadable"] == 0
    assert not set(bad) & {k for k in json.loads((tmp_path / "a" / "summary.json").read_text())}
    found = judge("--checkpoint", tmp_path / "a", "--output-dir", tmp_path / "e", "--tasks", "retrieval")
    assert "changed" not in found["datasets"][str(file)]
    clean = common.Data("x", "train", common.make_table([["a"]] * 3, ["0", "1", "2"]))
    args = SimpleNamespace(meta_set="clean.txt", meta_batch_size=2)
    assert list(engine.data.verified(clean, {"1": "broken"}, args).keys()) == ["0", "2"]
    with pytest.raises(UserError, match="--meta-set clean.txt: 1 examples can be read, fewer than --meta-batch-size 2"):
        engine.data.verified(clean, {"1": "broken", "2": "broken"}, args)
    (tmp_path / "data" / bad[0]).write_bytes(encode(picture(1)))  # mended: still left out, or it were another run
    sets.own.own_data.cache_clear()
    assert resume(tmp_path / "a", "--max-steps", "3")["bad_samples"] == 4


def test_bad_samples_of_before_a_resume_are_not_forgotten(tmp_path):
    file = write_captions(tmp_path / "data", 48)
    write_rows(file, ["image", "caption", "split"],
               [(f"{i:03}.png", caption(i), "train" if i < 32 else "val" if i < 40 else "test") for i in range(48)])
    for i in (3, 17):
        (tmp_path / "data" / f"{i:03}.png").write_bytes(b"no image")
    flags = ["--max-bad-fraction", 0.5, "--max-steps", 2]  # an epoch
    assert run(file, tmp_path, *flags)["bad_samples"] == 2
    assert resume(tmp_path / "a", "--max-steps", "3")["bad_samples"] == 2
    listed = [x.split("\t")[0] for x in (tmp_path / "a" / "bad_samples.txt").read_text().splitlines()]
    assert sorted(listed) == ["003.png", "017.png"]


# ----------------------------------------------- 4: processes -------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_partner_never_comes(rank, data, tmp_path):
    def work(_):
        engine.processes.RENDEZVOUS_MINUTES = 0.01
        run(data, tmp_path)
    [(code, said)] = launch.ranks(tmp_path, work, [rank])
    line = the_line(code, said)
    assert re.match("the 2 processes did not find each other .*; start them all with one launcher", line)
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_process_whose_partner_is_lost(how, data, tmp_path):
    def work(rank):
        engine.processes.COLLECTIVE_MINUTES = 0.04 if how == "hangs" else 5

        def done(self, *_):
            if rank == 1:
                if how == "dies":
                    os._exit(9)
                until = time.monotonic() + 300
                while "error" not in (tmp_path / "rank0.log").read_text() and time.monotonic() < until:
                    time.sleep(0.1)  # it hangs until the other has given up
            engine.base.barrier()
        Run.done = done
        run(data, tmp_path)
    (code, said), (other, _) = launch.ranks(tmp_path, work)
    line = the_line(code, said)
    assert re.match("another of the 2 processes ended or hangs .*; its own message says why; --resume continues", line)
    assert other == (9 if how == "dies" else 2)


@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_a_loader_worker_that_is_killed(when, data, tmp_path):
    def work():
        if when == "evaluation":
            evaluation.embed.read_batch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        inner = Run.done

        def done(self, *args):
            for worker in multiprocessing.active_children()[:1]:
                os.kill(worker.pid, signal.SIGKILL)
            inner(self, *args)
        Run.done = done if when == "training" else inner
        # batches of 4: an epoch of 18 is more than workers have ready when one of them is killed
        run(data, tmp_path, "--workers", 2, "--eval-batch", 1, "--max-steps", 12, "--batch-size", 4)
    code = launch.ended(launch.forked(work, tmp_path / "log"))
    # a worker that dies while Python's own thread hands it a tensor: that thread prints this, whatever we do
    own = r"Traceback [^\n]*\n[^\n]*resource_sharer.*?\n *(ConnectionReset|BrokenPipe|EOF)Error[^\n]*"
    line = the_line(code, re.sub(own, "", (tmp_path / "log").read_text(errors="replace"), flags=re.DOTALL))
    start = "" if when == "training" else "evaluation failed before the first step: "
    assert line.startswith(f"{start}a loader worker died or hangs (") and "try fewer --workers, or 0" in line
    assert not (tmp_path / "a" / "summary.json").exists()


def test_a_full_shared_memory_says_what_docker_needs(tmp_path):
    """A write beyond the end of /dev/shm is a bus error."""
    class Full(torch.utils.data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, i):
            os.kill(os.getpid(), signal.SIGBUS)

    def work():
        loader = torch.utils.data.DataLoader(Full(), num_workers=2, **common.worker_options(2))
        next(common.watched(loader, 2))
    code = launch.ended(launch.forked(work, tmp_path / "log"), 60)
    said = (tmp_path / "log").read_text(errors="replace")
    assert code == 2 and re.search("error: a loader worker died: shared memory .* full; .* --shm-size 8g", said)
    assert "Traceback" not in said


def test_a_loader_that_never_answers_is_given_up(monkeypatch):
    """Short of memory, Python waits for ever for a thread that could not begin."""
    def stuck():
        yield 1
        multiprocessing.Event().wait()
    monkeypatch.setattr(common, "LOADER_SECONDS", -29.5)
    items = common.watched(stuck(), workers=2)
    assert next(items) == 1
    with pytest.raises(UserError, match="a loader worker died or hangs .no loader worker answered for 0.5 s"):
        next(items)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("megabytes", [0, 20])
def test_too_little_memory_is_no_hang(megabytes, data, tmp_path):
    def work():
        common.LOADER_SECONDS, inner = -25, Run.begin

        def begin(self, *args):
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20,) * 2)
            return inner(self, *args)
        Run.begin = begin
        run(data, tmp_path, "--workers", 2)
    assert launch.ended(launch.forked(work, tmp_path / "log")) != 0


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
                                   OSError(24, "Too many open files"), OSError(12, "Cannot allocate memory")])
def test_what_is_no_fault_of_a_sample_costs_none(error, data, tmp_path, capfd, monkeypatch):
    def read(self, i, draws=None):
        raise error
    monkeypatch.setattr(evaluation.retrieval.Evaluator, "check", lambda self: None)
    monkeypatch.setattr(Run, "evaluate_val", lambda self: {})
    monkeypatch.setattr(common.Data, "read", read)
    line = stopped(lambda: run(data, tmp_path), capfd)
    assert re.match(r"not enough memory \(.*; try --chunk-size|\[Errno 24\].*ulimit -n", line)


# ----------------------------------------------- 5: messages --------------------------------------------------------
def test_a_file_name_does_not_reach_the_terminal(data, tmp_path, capfd, pictures):
    shutil.copytree(data.parent, tmp_path / "data")
    names = ["a\x1b[31mb.png", "c\x1b]0;title\x07.png", "\u202egnp.png"]
    rows = [(n, "a") for n in names] + [(n, caption(i)) for i, n in enumerate(NAMES)]
    file = write_rows(tmp_path / "data" / "odd.csv", ["image", "caption"], rows)
    run(file, tmp_path, "--max-bad-fraction", 0.5, "--verify-images")
    said, listed = capfd.readouterr(), (tmp_path / "a" / "bad_samples.txt").read_text()
    assert "a?[31mb.png" in listed and listed.count("\n") == 3
    for text in (said.out, re.sub("\x1b\\[A", "", said.err), listed):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    for flags in (["--\x1b[31mx", "1"], ["--batch-size", "\x1b[31m"],
                  ["--dataset", "a.csv", "--data-dir", "/no/\x1b[31m"]):
        assert "?[31m" in stopped(lambda: temo.parse_args(flags), capfd)  # noqa: B023
    assert "/no/?[31m" in stopped(lambda: run("/no/\x1b[31m", tmp_path), capfd)


@pytest.mark.parametrize("place", ["a/\udcff.png", "\udcff/1.png"])
def test_a_name_that_is_no_utf8(place, classes, tmp_path, capfd):
    shutil.copytree(classes, tmp_path / "photos")
    (tmp_path / "photos" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "photos" / place).write_bytes(encode(picture(1)))
    line = stopped(lambda: run(tmp_path / "photos", tmp_path), capfd)
    assert f"the name {ascii(place)} is not UTF-8; rename it" in line


class Trap:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["torch", "inside", "pickle", "list", "empty"])
def test_weights_that_are_more_than_tensors(kind, data, tmp_path, capfd):
    file, trap = tmp_path / "w.pt", Trap(tmp_path / "sprung")
    if kind == "pickle":
        file.write_bytes(pickle.dumps(trap))
    elif kind == "empty":
        file.write_bytes(b"")
    else:
        torch.save({"torch": trap, "inside": {"state_dict": {"a": trap}}, "list": [1, 2]}[kind], file)
    line = stopped(lambda: run(data, tmp_path, "--init-from", file), capfd)
    assert line.startswith(f"--init-from {file}: ") and "weights_only" not in line and not trap.path.exists()
    if kind in ("torch", "inside", "pickle"):
        assert "it holds more than tensors; save its state_dict as safetensors" in line


def test_features_that_are_a_pickle(tmp_path, capfd):
    trap = Trap(tmp_path / "sprung")
    for i in range(20):
        (tmp_path / "f").mkdir(exist_ok=True)
        np.save(tmp_path / "f" / f"v{i}.npy", np.array([trap], dtype=object), allow_pickle=True)
    file = write_rows(tmp_path / "a.csv", ["video", "caption"], [(f"v{i}", caption(i)) for i in range(20)])
    flags = "--feature-dir", tmp_path / "f", "--image-encoder", "features", "--batch-size", 4
    line = stopped(lambda: run(file, tmp_path, *flags, script=ncl), capfd)
    assert "none of its first features can be read, first v0" in line and "it holds Python objects" in line
    assert not trap.path.exists()


# ----------------------------------------------- 6: doors -----------------------------------------------------------
WATCHED = []  # names of files that were opened below a folder, and calls of the network, while a test looks


def _hook(event, args):
    if WATCHED and event in ("open", "os.listdir", "os.scandir", "socket.getaddrinfo", "socket.connect"):
        text = str(args[0] if event != "socket.connect" else args[1])
        if event.startswith("socket") or text.startswith(WATCHED[0]):
            WATCHED.append(f"{event} {text}")


@pytest.fixture
def elsewhere(tmp_path):
    """A folder that nothing may open: a model and its code."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    config = {"model_type": "vit", "architecture": "resnet18", "num_features": 512}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if not getattr(_hook, "added", False):
        sys.addaudithook(_hook)
        _hook.added = True
    WATCHED[:] = [str(folder)]
    yield folder
    WATCHED.clear()


VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
       "intermediate_size": 16, "patch_size": 8}
SPECS = {
    "folder": {"image_encoder": "ELSEWHERE"}, "timm folder": {"image_encoder": "local-dir:ELSEWHERE"},
    "timm hub": {"image_encoder": "hf_hub:timm/resnet18"}, "timm hub 2": {"image_encoder": "hf-hub:timm/resnet18"},
    "text folder": {"text_encoder": "ELSEWHERE"}, "text hub": {"text_encoder": "bert-base-uncased"},
    "wrapped": {"image_encoder": "a/b", "vision_config": {"model_type": "timm_wrapper",
                                                          "architecture": "local-dir:ELSEWHERE"}},
    "code": {"image_encoder": "a/b", "vision_config": VIT | {"auto_map": {"AutoModel": "code.Model"}}},
    "kernel": {"image_encoder": "a/b", "vision_config": VIT | {"attn_implementation": "kernels-community/flash"}},
    "backbone": {"image_encoder": "a/b", "vision_config": VIT | {"backbone": "x", "use_pretrained_backbone": True}},
    "no config": {"image_encoder": "a/b", "vision_config": [1]}, "numbers": {"embed_dim": 10**12},
    "size": {"image_size": -1}, "std": {"stats": [[0, 0, 0], [0, 0, 0]]}, "words": {"text_length": "x"}}


@pytest.mark.parametrize("name", SPECS)
def test_a_model_json_leads_nowhere_else(name, whole, elsewhere, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    spec = json.loads((whole / "model.json").read_text()) | SPECS[name]
    (tmp_path / "a" / "model.json").write_text(json.dumps(spec).replace("ELSEWHERE", str(elsewhere)))
    with pytest.raises(UserError, match="its model.json is damaged .*; --resume .* writes it again"):
        common.load_model(tmp_path / "a")
    assert WATCHED == [str(elsewhere)]


def test_a_tokenizer_leads_nowhere_else(whole, elsewhere, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    config = tmp_path / "a" / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {
        "tokenizer_file": str(elsewhere / "tokenizer.json"), "auto_map": {"AutoTokenizer": ["code.T", "code.T"]}}))
    with contextlib.suppress(UserError):
        ours, theirs = (common.load_model(folder)[1](["picture number 3"]) for folder in (tmp_path / "a", whole))
        assert ours["input_ids"].equal(theirs["input_ids"])
    assert WATCHED == [str(elsewhere)]


def with_code(folder, kind):
    """A transformers folder with Python code beside its config: of a new kind of model, a known one, a tokenizer."""
    folder.mkdir()
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(folder / 'sprung')!r})\n")
    config = {"model_type": "new" if kind == "new" else "bert", "hidden_size": 16, "num_hidden_layers": 1,
              "vocab_size": 6, "num_attention_heads": 2, "intermediate_size": 16}
    code = {"AutoConfig": "code.C", "AutoModel": "code.M", "AutoModelForSeq2SeqLM": "code.M"}
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", "code.T"]}}
    (folder / "config.json").write_text(json.dumps(config if kind == "tokenizer" else config | {"auto_map": code}))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        tokenizer if kind == "tokenizer" else {"tokenizer_class": "BertTokenizer"}))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    return folder


@pytest.mark.parametrize("kind", ["new", "known", "tokenizer"])
def test_code_beside_a_model_is_neither_run_nor_asked_about(kind, data, tmp_path, capfd, monkeypatch):
    folder = with_code(tmp_path / "model", kind)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    monkeypatch.setattr("logging.raiseExceptions", False)  # transformers logs to the stderr of an earlier test
    words = ["--dataset", str(data), "--out", f"{tmp_path}/p", "--model", str(folder), "--cpu"]
    doors = [lambda: run(data, tmp_path / "1", "--text-encoder", folder, "--pretrained"),
             lambda: run(data, tmp_path / "2", "--image-encoder", folder, "--no-pretrained"),
             lambda: run(data, tmp_path / "3", "--text-expert", folder),
             lambda: judge("--checkpoint", folder, "--datasets", data, "--output-dir", tmp_path / "e"),
             lambda: paraphrase.main(words)]
    for door in doors:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end, engine.base.clean_exit():
            door()
        said = capfd.readouterr().err
        assert end.value.code == 2 and str(folder) in said and "Traceback" not in said and "[y/N]" not in said
    assert not (folder / "sprung").exists()


CARDS = ("configs: [", "configs: &a\n- *a", "configs:\n- config_name: default\n  data_files: PLACE",
         "configs:\n- config_name: default\n  data_dir: ../elsewhere")


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_a_card_of_data_leads_nowhere_else(file, elsewhere, tmp_path):
    """What it says of files is not followed; one of several sets is refused, which would be read as one."""
    place, mine = elsewhere / "train.parquet", tmp_path / "mine"
    WATCHED.clear()
    helpers.write_parquet_images(place, range(30))
    helpers.write_parquet_images(mine / "train.parquet", range(30))
    WATCHED[:] = [str(elsewhere)]
    for text in CARDS:
        text = text.replace("PLACE", str(place))
        (mine / file).write_text(f"---\n{text}\n---\n" if file == "README.md" else text)
        sets.own.own_data.cache_clear()
        assert sum(map(len, helpers.open_splits(mine).values())) == 30 and WATCHED == [str(elsewhere)], text
    (mine / "README.md").write_text("---\nconfigs:\n- config_name: a\n- config_name: b\n---\n")
    sets.own.own_data.cache_clear()
    with pytest.raises(UserError, match="its README.md lists several sets .a, b., which would be mixed"):
        common.load_data(str(mine), "train")


def test_links_in_a_folder_of_data_are_the_users_own(data, tmp_path):
    (tmp_path / "photos").mkdir()
    for file in data.parent.iterdir():
        (tmp_path / "photos" / file.name).symlink_to(file)
    train = common.load_data(str(tmp_path / "photos"), "train")
    assert train.read(0).shape == (3, 20, 24)
