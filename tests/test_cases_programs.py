"""Programs and flags under hostile input: what they read of files that somebody else has written or cut, and what of a
command line cannot be. Refused in one line that names the file, or read with what is lost counted. In one process."""

import itertools
import json
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import common
from contrastive import engine, readers
from contrastive.engine.base import UserError
from contrastive.engine.clusters import read_clusters
from contrastive.engine.data import meta_data
from contrastive.evaluation import stand_ins
from contrastive.readers import text

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation_script
import mama
import mmts
import ncl
from helpers import caption as words
from helpers import encode, picture, tar_samples, write_tar, write_video
from test_caption import SMALL, tiny_model, words_of
from tools import caption, check, concepts, margins, phase, score

LATIN = "caf\u00e9".encode("latin1")
BOM = b"\xef\xbb\xbf"
LONG = "x" * 200_000  # more than a field of Python's csv may have


def one_line(error, *words):
    said = str(getattr(error, "value", error))
    assert "\n" not in said and len(said) < 900 and all(word in said for word in words), said[:2000]


def refused(work, *words):
    with pytest.raises(UserError) as error:
        work()
    one_line(error, *words)


def refused_flags(work, capsys, *words):
    """Refused by the parser: exit code 2, one line."""
    with pytest.raises(SystemExit) as stop:
        work()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    one_line(said.strip(), *words)


@pytest.fixture(autouse=True)
def anew():
    engine.base.say_once.cache_clear()


# ------------------------------------------------ captions of videos ------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llava", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    root = tmp_path_factory.mktemp("videos")
    for k, name in enumerate("abcde"):
        write_video(root / f"{name}.mp4", [40 * k + i for i in range(6)])
    return root


@pytest.mark.parametrize("shape, read, picture", [((16, 9000, 3), (3, 1792), (4095, 4095)),
                                                  ((9000, 16, 3), (1792, 3), (4096, 4096)),
                                                  ((64, 96, 3), (64, 96), (288, 288))])
def test_a_strip_of_a_video_is_no_square_of_its_length(shape, read, picture, tmp_path):
    write_video(tmp_path / "a.mkv", [np.full(shape, 40 * k, np.uint8) for k in range(3)])
    frames = caption.read_candidates(tmp_path / "a.mkv", None, None, 12, 224)
    assert frames.shape[2:] == read and caption.grid_picture(frames, 3).size == picture


HOT = ["--temperature", 1.5, "--seed", 3, "--batch", 3, "--max-new-tokens", 12]


def test_a_call_that_was_killed_in_a_line_writes_the_same_file(model, videos, tmp_path, monkeypatch):
    """Sampled words depend on the whole batch: one that is half written is described again as it was."""
    whole, cut = (words_of(videos, tmp_path / f"{name}.csv", model, *HOT) for name in ("whole", "cut"))
    caption.main(whole)
    parts, true = [], caption.merge
    monkeypatch.setattr(caption, "merge", lambda args, clips: parts.append(
        (tmp_path / "cut.csv.part0").read_bytes()) or true(args, clips))
    caption.main(cut)
    lines = parts[0].splitlines(keepends=True)
    assert sum(b'"caption"' in line for line in lines) == 5
    ends = np.cumsum([len(line) for line in lines])
    for end in (0, ends[1] - 9, ends[1], ends[3] - 30, ends[-1] - 2):  # inside the first line, behind it, ...
        (tmp_path / "cut.csv").unlink(missing_ok=True)
        (tmp_path / "cut.csv.part0").write_bytes(parts[0][:end])
        caption.main(cut)
        assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes(), end


HEAD = b"video,start,end,caption\n"


@pytest.mark.parametrize("content, words", [
    (HEAD + b"a.mp4,,," + LATIN + b"\n", ["line 2", "UTF-8"]),
    ((HEAD + b"a,,,b\n").decode().encode("utf-16"), ["UTF-16"]),
    (HEAD + b'a.mp4,,,"open\n', ["line 2", "never closed"]), (HEAD + b"a.mp4,,\n", ["line 2", "3 fields"]),
    (HEAD + b"a.mp4,x,,b\n", ["line 2"]), (HEAD + b"a.mp4,nan,2,b\n", ["line 2"]), (b"", ["it is empty|no column"]),
    (HEAD.replace(b",", b";"), ["no column"]), (HEAD + b"\0" * 9, ["zeros"])])
def test_the_csv_of_an_earlier_call(content, words, tmp_path):
    (tmp_path / "c.csv").write_bytes(content)
    with pytest.raises(UserError) as error:
        caption.read_known(tmp_path / "c.csv")
    one_line(error, "c.csv", "name another one")
    assert all(re.search(word, str(error.value)) for word in words), error.value


def test_a_csv_that_is_odd_and_right(tmp_path):
    (tmp_path / "c.csv").write_bytes(BOM + HEAD + f'a.mp4,,,"{LONG}"\r\nb.mp4,0.5,2,"two\nlines"\n'.encode())
    known = caption.read_known(tmp_path / "c.csv")
    assert known == {("a.mp4", None, None): {"caption": LONG}, ("b.mp4", 0.5, 2.0): {"caption": "two\nlines"}}


LINE = b'{"video": "a.mp4", "start": null, "end": null, "caption": "b"}\n'


@pytest.mark.parametrize("content, words", [
    (LINE + LATIN, ["line 2", "UTF-8"]), (b"[1]\n", ["line 1"]), (b"3\n", ["line 1"]), (b'"a"\n', ["line 1"]),
    (b'{"video": "a"}\n', ["line 1"]), (LINE + LINE.replace(b"null", b'"x"', 1), ["line 2"]),
    (LINE.replace(b'"a.mp4"', b"[1]"), ["line 1"]), (LINE.replace(b'"b"', b'{"a": 1}'), ["line 1"]),
    (LINE.replace(b"null", b"NaN", 1), ["line 1"]), (LINE.replace(b"null", b"[]", 1), ["line 1"])])
def test_lines_of_a_process(content, words, tmp_path):
    (tmp_path / "c.csv.part0").write_bytes(content)
    refused(lambda: caption.read_known(tmp_path / "c.csv"), "c.csv.part0", "name another one", *words)


def test_cut_lines_of_a_process_are_counted(tmp_path, capsys):
    (tmp_path / "c.csv.part0").write_bytes(BOM + LINE + LINE[:30] + b"\n" + b"[" * 100_000)
    assert list(caption.read_known(tmp_path / "c.csv")) == [("a.mp4", None, None)]
    assert "2 lines of an earlier call were cut" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"{}", b'{"settings": 3}', b'{"settings": null}', LATIN,
                                     b'{"settings": ["model"]}', b"[" * 100_000, b'{"settings": {}}'])
def test_the_settings_beside_the_csv(content, model, videos, tmp_path):
    (tmp_path / "c.csv").write_bytes(HEAD + b"a.mp4,,,b\n")
    (tmp_path / "c.csv.json").write_bytes(content)
    refused(lambda: caption.main(words_of(videos, tmp_path / "c.csv", model)), "c.csv")
    assert (tmp_path / "c.csv").read_bytes() == HEAD + b"a.mp4,,,b\n"


def test_settings_with_a_byte_order_mark(model, videos, tmp_path):
    args = caption.parse_args(words_of(videos, tmp_path / "c.csv", model))
    settings = {k: getattr(args, k) for k in caption.SETTINGS}
    (tmp_path / "c.csv").write_bytes(HEAD + b"a.mp4,,,b\n")
    (tmp_path / "c.csv.json").write_bytes(BOM + json.dumps({"settings": settings}).encode())
    caption.check_out(args, {"a": 1})


# ------------------------------------------------ files that are written --------------------------------------------
@pytest.mark.parametrize("program, words", [
    (margins, ["RUN"]), (phase, ["RUN"]), (concepts, ["RUN", "RUN"]), (score, ["RUN"]),
    (caption, ["--dataset", "videos", *SMALL])])
def test_where_a_program_writes_is_looked_at_first(program, words, tmp_path, capsys):
    """RUN is not there: what is said of --out is said before that."""
    def call(out):
        return lambda: program.main([*words, "--out", str(out)])
    refused_flags(call(tmp_path), capsys, f"--out {tmp_path}: cannot be written (it is a folder); give a file in it")
    refused_flags(call(tmp_path / "no" / "x.png"), capsys, f"there is no folder {tmp_path / 'no'}")
    if program in (margins, phase, concepts):
        for out in ("x.xyz", "x", "x.svg"):
            refused_flags(call(tmp_path / out), capsys, f"{out}: must end in .png or .pdf")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------ files of runs -----------------------------------------------------
ARGS = {"dataset": "d", "period": 10.0, "margin_schedule": "logistic", "a0": 2.0, "a1": 10.0, "a2": 0.1, "seed": 0,
        "task": "retrieval"}
SUMMARY = {"steps": 80, "epochs": 20.0, "val": {"d": {"text_to_image": {"R@1": 5.0}}}}


def a_run(folder, args=None, summary=None, log=None):
    """The files of a finished run; args, summary: changes, or bytes."""
    folder.mkdir(parents=True)
    for name, base, changes in (("args", ARGS, args), ("summary", SUMMARY, summary)):
        content = changes if isinstance(changes, bytes) else json.dumps(base | (changes or {})).encode()
        (folder / f"{name}.json").write_bytes(content)
    rows = [json.dumps({"step": 4 * e, "eval": {"d": {"few-shot": {"top1": 50.0 + e}}}}) for e in range(21)]
    (folder / "metrics.jsonl").write_bytes("\n".join(rows).encode() + b"\n" if log is None else log(rows))
    return folder


DAMAGED = [b"", b"{", b"[]", b"3", LATIN, b"[" * 100_000, b"null"]


@pytest.mark.parametrize("which", ["args", "summary"])
@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_json_of_a_run(which, content, tmp_path):
    bad, good = a_run(tmp_path / "bad", **{which: content}), a_run(tmp_path / "good", {"a0": 3.0})
    for program in (margins, concepts, phase):
        refused(lambda p=program: p.main([str(bad), str(good), "--out", str(tmp_path / "o.png")]), str(bad))


@pytest.mark.parametrize("program, args, summary", [
    (phase, {"periods": 5.0, "period": 0}, None), (phase, {"periods": 5.0, "period": 100}, None),
    (phase, {"period": 0}, None), (phase, {"period": "x"}, None), (phase, {"period": None}, None),
    (phase, {"dataset": [1]}, None), (phase, None, {"steps": None}), (phase, None, {"steps": 0}),
    (phase, None, {"epochs": 0}), (phase, None, {"epochs": [1]}), (phase, None, {"epochs": float("nan")}),
    (margins, {"a1": 0}, None), (margins, {"a0": "x"}, None), (margins, {"a2": [1]}, None),
    (margins, {"dataset": [1]}, None), (margins, None, {"val": 3}), (margins, None, {"val": {"d": 3}}),
    (margins, None, {"val": {"d": {"text_to_image": {"R@1": None}}}}), (margins, None, {"val": {"d": {"R": 1}}}),
    (concepts, {"x": 1}, None)])
def test_values_of_a_run_that_cannot_be(program, args, summary, tmp_path):
    bad, good = a_run(tmp_path / "bad", args, summary), a_run(tmp_path / "good", args and {"a1": 5.0} | args)
    refused(lambda: program.main([str(bad), str(good), "--out", str(tmp_path / "o.png")]), str(tmp_path / "bad"))
    assert not (tmp_path / "o.png").exists()


def test_a_summary_without_steps(tmp_path):
    bad = a_run(tmp_path / "bad", summary=json.dumps({"epochs": 20}).encode())
    refused(lambda: phase.main([str(bad), "--out", str(tmp_path / "o.png")]), str(bad), "'steps'")


@pytest.mark.parametrize("log, words", [
    (lambda rows: ("\n".join(rows[:9]) + "\n{" + "\n".join(rows[9:])).encode(), ["line 10", "whole"]),
    (lambda rows: ("\n".join(rows) + "\n3\n").encode(), ["line 22"]),
    (lambda rows: ("\n".join(rows) + '\n{"eval": {"d": 3}}').encode(), ["line 22"]),
    (lambda rows: ("\n".join(rows) + '\n{"eval": {"d": {"few-shot": {"top1": 1}}}}').encode(), ["line 22", "step"]),
    (lambda rows: "\n".join(rows).encode("utf-16"), ["UTF-16"]), (lambda rows: LATIN, ["UTF-8"]),
    (lambda rows: "\n".join(rows).replace("55.0", '"x"').replace("65.0", '"x"').encode(), ["line 16"])])
def test_a_log_that_is_no_log(log, words, tmp_path):
    bad = a_run(tmp_path / "bad", log=log)
    refused(lambda: phase.main([str(bad), "--out", str(tmp_path / "o.png")]), "metrics.jsonl", *words)


def test_a_log_whose_last_line_is_cut(tmp_path, capsys):
    folder = a_run(tmp_path / "r", log=lambda rows: BOM + "\n".join(rows)[:-5].encode())
    phase.main([str(folder), "--out", str(tmp_path / "o.png")])
    assert "metrics.jsonl, line 21: cut, and left out" in capsys.readouterr().out and (tmp_path / "o.png").is_file()


# ------------------------------------------------ short captions ----------------------------------------------------
@pytest.mark.parametrize("content, words", [
    (b"video,caption\n0,caf\xe9\n", ["line 2", "UTF-8"]), (b'video,caption\n0,"a\n', ["line 2", "never closed"]),
    (b"video,caption\n0\n", ["line 2", "1 fields"]), (b"name,caption\n0,a\n", ["no column video"]),
    (b"", ["no column"]), ("video,caption\n0,a\n".encode("utf-16"), ["UTF-16"])])
def test_short_captions(content, words, tmp_path):
    (tmp_path / "short.csv").write_bytes(content)
    refused(lambda: score.short_captions(drawn(), str(tmp_path / "short.csv")), "short.csv", *words)


def drawn():
    return common.Data("drawn", "test", common.make_table([["a b c"], ["d"]], ["0", "1"]),
                             pixels=torch.zeros(2, 1, 3, 8, 8).byte())


def test_short_captions_that_are_odd_and_right(tmp_path):
    (tmp_path / "short.csv").write_bytes(BOM + f"video,caption\r\n0,{LONG}\r\n".encode())
    assert score.short_captions(drawn(), str(tmp_path / "short.csv")) == [LONG, ""]


# ------------------------------------------------ names of meta-data ------------------------------------------------
@pytest.mark.parametrize("content, words", [
    (b"0\ncaf\xe9\n", ["line 2", "save it as UTF-8"]), ("0\n1\n".encode("utf-16"), ["UTF-16"]),
    (LONG.encode(), ["1 of its 1 names are not in train", "a name of train"]), (b"", ["0 examples", "fewer than"]),
    (b"0\n0\n0\n", ["1 examples", "fewer than"])])
def test_names_of_meta_data(content, words, tmp_path):
    (tmp_path / "names.txt").write_bytes(content)
    refused(lambda: meta_data(drawn(), {}, "drawn", str(tmp_path / "names.txt"), 8, 2), "names.txt", *words)


def test_names_that_stand_there_twice_are_counted(tmp_path, capsys):
    (tmp_path / "names.txt").write_bytes(BOM + b"1\r\n0\r\n1\r\n")
    meta, _ = meta_data(drawn(), {}, "drawn", str(tmp_path / "names.txt"), 8, 2)
    assert list(meta.keys()) == ["0", "1"] and "1 of its 3 lines repeat a name" in capsys.readouterr().out


# ------------------------------------------------ queues ------------------------------------------------------------
TINY = ("--cpu --threads 1 --workers 0 --image-size 16 --frames 2 --embed-dim 16 --batch-size 8 --max-steps 1 "
        "--clips 40 12 12 --queue-size 16 --eval-every 0").split()


@pytest.fixture(scope="module")
def ncl_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("ncl")
    ncl.main(ncl.parse_args([*TINY, "--output-dir", str(root), "--run-name", "r"]))
    return root / "r"


def test_queues_that_are_damaged(ncl_run, tmp_path, monkeypatch):
    """Refused before anything is encoded."""
    file = ncl_run / "queues.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    monkeypatch.setattr(evaluation_script, "evaluate", None)
    args = evaluation_script.parse_args(["--checkpoint", str(ncl_run), "--normalize", "queue", "--cpu", "--tasks",
                                         "retrieval", "--output-dir", str(tmp_path)])
    assert set(stand_ins.queues_of(args)) == {"texts", "videos", "gamma"}
    for content in (b"", whole[:9], whole[:-7], b"no tensors at all", {"texts": tensors["texts"]},
                    tensors | {"texts": tensors["texts"][0]}, tensors | {"gamma": torch.zeros(0)}):
        if isinstance(content, dict):
            save_file({k: v.clone() for k, v in content.items()}, file)
        else:
            file.write_bytes(content)
        refused(lambda: evaluation_script.main(args), "queues.safetensors: damaged", "or remove it")
    file.write_bytes(whole)


# ------------------------------------------------ flags of mama.py --------------------------------------------------
WEIGHTINGS, TASKS = ("meta", "joint", "focal", "spl", "l2rw", "none"), ("retrieval", "qa-open", "qa-choice")


@pytest.mark.parametrize("weighting, task", itertools.product(WEIGHTINGS, TASKS))
def test_a_choice_of_mama_parses_or_names_the_flag_to_change(weighting, task, capsys):
    """All 72 choices, 4 in each test: what is refused is a word of the command line, and why stands behind it."""
    for model, similarity in itertools.product(("fusion", "dual"), ("pooled", "fused")):
        flags = ["--weighting", weighting, "--task", task, "--qa-model", model, "--qa-similarity", similarity]
        asks = task != "retrieval"
        if (model == "fusion" or task == "qa-choice") and (similarity == "pooled" or asks and model == "fusion"):
            args = mama.parse_args(flags)
            assert (args.weighting, args.task, args.qa_model, args.qa_similarity) == (*flags[1::2],)
        else:
            flag, value = ("--qa-model", model) if model == "dual" and task != "qa-choice" else ("--qa-similarity",
                                                                                                 similarity)
            refused_flags(lambda words=flags: mama.parse_args(words), capsys, f"error: {flag} {value}: only for --task")


@pytest.mark.parametrize("flag", ["--meta-every 2", "--meta-lr 1", "--virtual-lr 1", "--fusion-layers 1", "--a2 1"])
def test_what_the_user_wrote_and_has_no_effect_is_refused(flag, capsys):
    words = "--task qa-choice --qa-model dual --weighting l2rw --margin-schedule constant".split()
    refused_flags(lambda: mama.parse_args([*words, *flag.split()]), capsys, flag.split()[0], "would have no effect")


def test_l2rw_looks_ahead_at_each_step_of_a_recipe_that_updates_a_network_now_and_then(tmp_path):
    flags = ["--task", "qa-open", "--weighting", "l2rw", "--meta-batch-size", "4", "--max-steps", "3"]
    args = mama.parse_args([*TINY[:-4], *flags, "--eval-every", "0", "--output-dir", str(tmp_path), "--run-name", "r"])
    assert args.meta_every == 4 and mama.main(args)["steps"] == 3


# ------------------------------------------------ clusters, margins, periods ----------------------------------------
@pytest.mark.parametrize("value, words", [
    ("NaN", ["expected JSON"]), ("1.0", ["expected JSON"]), ("null", ["expected JSON"]), ("{}", ["expected JSON"]),
    ('""', ['"" of 0']), ('" "', ["of 0"]), ("[NaN]", ["NaN of 0"]),
    ("[1, [2]]", ["[2] of 0"]),
    ('["a", ""]', ['"" of 0']), ("[1.0]", ["1.0 of 0"]), ("[{}]", ["{} of 0"]),
    ("[1e999]", ["Infinity of 0"])])
def test_a_cluster_that_is_none(value, words, tmp_path):
    file = tmp_path / "clusters.json"
    file.write_text(f'{{"1": 3, "0": {value}}}')
    refused(lambda: read_clusters(file, drawn()), "--clusters", "clusters.json", *words)


@pytest.mark.parametrize("content", [LATIN, b'{"0": 1', b"[1]", b"3", b"", b"{}", b"[" * 100_000])
def test_a_cluster_file_that_is_none(content, tmp_path):
    (tmp_path / "clusters.json").write_bytes(content)
    refused(lambda: read_clusters(tmp_path / "clusters.json", drawn()), "clusters.json")


def test_clusters_that_are_odd_and_right(tmp_path):
    (tmp_path / "clusters.json").write_bytes(BOM + b'{"0": [null], "1": ["3"]}')
    by, found, rows, clusters, without = read_clusters(tmp_path / "clusters.json", drawn())
    assert (by, len(found), rows, clusters, without) == ("both", 1, [1], ["3"], 1)


@pytest.mark.parametrize("script, flags, words", [
    (ncl, "--loss max-margin --margin 2", ["--margin 2", "below 2"]),
    (mmts, "--loss max-margin --no-shifts --no-schedule --margin 2", ["margin of the run, 2,", "lower --margin"]),
    (mmts, "--loss max-margin --no-shifts --margin 1.9 --alpha 0.3", ["2.05", "lower --margin or --alpha"]),
    (mmts, "--loss max-margin --shift-max 1.95", ["2.05", "lower --shift-max or --alpha"]),
    (mmts, "--period 100 --periods 5", ["--periods 5", "--period 100 sets it already; leave out"])])
def test_what_nothing_can_satisfy(script, flags, words, capsys):
    refused_flags(lambda: script.parse_args(flags.split()), capsys, *words)


@pytest.mark.parametrize("script, flags", [
    (ncl, "--loss max-margin --margin 1.99"), (mmts, "--loss max-margin --no-shifts --no-schedule --margin 1.99"),
    (mmts, "--period 100"), (mmts, "--period 0 --periods 5"), (mmts, "--no-shifts --tau 3")])
def test_what_can_be(script, flags):
    script.parse_args(flags.split())


# ------------------------------------------------ tars -------------------------------------------------------------
def tar_with(folder, changes, name="train-0"):
    """A tar of eight samples, some of them otherwise. changes: {key: {extension: bytes}}, in place of its own."""
    return write_tar(folder / f"{name}.tar", tar_samples(range(8), "jpg", "txt") | changes)


def parts(said, **more):
    return {"jpg": encode(picture(1), "jpeg"), "txt": said} | more


def streamed(folder):
    """Of a stream's first epoch: ({key: captions}, {key: why it is left out})."""
    stream, good, bad = common.load_data(str(folder), "train", streaming=True), {}, {}
    reader = readers.stream.StreamViews(stream, [], 0, 0, 1, {})
    for _, key, found, _, epoch in stream.samples(0, 0, 1):
        if epoch:
            return good, bad
        try:
            good[key] = reader._decode(key, found, epoch)[1]
        except ValueError as error:
            bad[key] = str(error)


def test_text_in_tars_that_is_not_utf8_is_left_out_by_name(tmp_path):
    """A byte order mark is no letter; Latin-1 is no text, in a caption, in json or in a name."""
    changes = {"000002": parts(LATIN), "000003": parts(BOM + b"a cat"), "000004": parts("a cat".encode("utf-16")),
               "caf\udce9": parts(b"a dog")}
    tar_with(tmp_path, changes)
    for k, name in enumerate(("train-1", "val-0", "test-0")):
        write_tar(tmp_path / f"{name}.tar", tar_samples(range(20 + 9 * k, 28 + 9 * k), "jpg", "txt"))
    data = common.load_data(str(tmp_path), "train")
    assert len(data) == 14
    assert [data.captions(i) for i in range(3)] == [[words(i), words(i, 1)] for i in range(2)] + [["a cat"]]
    for said in ("2 samples without an image or a caption left out", "sample 000002 of", "its txt is not UTF-8 text",
                 "1 samples with names that are not followed", "a name that is no UTF-8"):
        assert said in data.note, data.note
    good, bad = streamed(tmp_path)
    assert len(good) == 14 and good["000003"] == ["a cat"] and len(bad) == 3
    assert bad["000002"] == bad["000004"] == "its txt is not UTF-8 text"
    assert any("a name that is no UTF-8" in why for why in bad.values())
    loader = iter(readers.stream.StreamViews(common.load_data(str(tmp_path), "train", streaming=True), [], 0, 0, 1, {}))
    names = [name for _ in range(20) for name, _ in next(loader)["bad"]]
    assert all(name.encode() for name in names)


def test_json_in_a_tar_that_is_latin_1(tmp_path):
    title = {k: b'{"title": "' + (LATIN if k == 2 else b"a") + b'"}' for k in range(8)}
    changes = {f"{k:06}": {"jpg": encode(picture(k), "jpeg"), "json": title[k]} for k in range(8)}
    tar_with(tmp_path, changes)
    note = common.load_data(str(tmp_path), "train", caption_column="json.title").note
    assert "1 samples without an image or a caption left out" in note and "sample 000002" in note


def test_a_picture_beside_a_video_in_one_sample(tmp_path):
    """Nobody guesses which of the two is meant."""
    clip = write_video(tmp_path / "a.mp4", [1, 2, 3]).read_bytes()
    both = {f"{k:06}": parts(b"a cat", mp4=clip) for k in range(8)}
    write_tar(tmp_path / "some" / "0.tar", tar_samples(range(8), "jpg", "txt") | {"000002": both["000002"]})
    data = common.load_data(str(tmp_path / "some"), "train")
    assert "1 samples without an image or a caption left out, first: --image-column is needed" in data.note
    assert "sample 000002, has a picture and a video, jpg and mp4" in data.note
    write_tar(tmp_path / "all" / "0.tar", both)
    refused(lambda: common.load_data(str(tmp_path / "all"), "train"), "--image-column is needed", "jpg and mp4")
    for column, dims in (("jpg", 3), ("mp4", 4)):
        data = common.load_data(str(tmp_path / "all"), "train", image_column=column, frames=2)
        assert data.read(0).ndim == dims


# ------------------------------------------------ evaluation -------------------------------------------------------
def test_an_evaluation_that_measured_nothing_is_an_error(ncl_run, tmp_path):
    args = ["--checkpoint", str(ncl_run), "--cpu", "--workers", "0", "--output-dir", str(tmp_path), "--tasks"]
    result = evaluation_script.main(evaluation_script.parse_args([*args, "qa", "mir", "knn"]))
    assert set(result["datasets"]["moving-emoji"]["left_out"]) == {"qa"}
    evaluation_script.complain(result)
    result = evaluation_script.main(evaluation_script.parse_args([*args, "qa"]))
    assert (tmp_path / "eval.json").is_file()
    refused(lambda: evaluation_script.complain(result), "nothing was measured",
            "moving-emoji: qa: the model answers no ques",
            "choose others with --tasks")


# ------------------------------------------------ words ------------------------------------------------------------
def scarce(*_, **__):
    raise MemoryError


@pytest.mark.parametrize("where, what", [("read_bytes", "text"), ("loads", "text"), ("_own_split", "data")])
def test_memory_that_is_short_while_an_annotation_is_read(where, what, tmp_path, monkeypatch):
    """--chunk-size and --batch-size make no list of examples smaller."""
    file = tmp_path / "own.csv"
    file.write_text("image,caption\na.png,b\n")
    monkeypatch.setattr({"read_bytes": Path, "loads": json, "_own_split": common}[where], where, scarce)
    read = {"text": text.read_json, "data": lambda file: common.load_data(str(file), "train")}[what]
    refused(lambda: read(file), "own.csv", "not enough memory to read", "take a machine with more")
    with pytest.raises(UserError, match="own.csv: not enough memory to read it"), text.expected_layout(file):
        scarce()


@pytest.mark.parametrize("program", [check, ncl])
def test_the_folder_of_a_run_is_no_data(program, ncl_run):
    work = {check: lambda: check.main(["--dataset", str(ncl_run)]),
            ncl: lambda: ncl.main(ncl.parse_args(["--dataset", str(ncl_run), "--cpu"]))}[program]
    refused(work, f"--dataset {ncl_run}: the folder of a run", "its run used --dataset moving-emoji")


@pytest.mark.parametrize("words", ["=", "=/tmp", "cifar10 ="])
def test_a_set_without_a_name(words, ncl_run, tmp_path):
    args = evaluation_script.parse_args(["--checkpoint", str(ncl_run), "--cpu", "--output-dir", str(tmp_path),
                                         "--datasets", *words.split()])
    refused(lambda: evaluation_script.main(args), f"--datasets {words}: expected NAME or NAME=DIR")
    args = ncl.parse_args([*TINY, "--eval-datasets", "=", "--output-dir", str(tmp_path)])
    refused(lambda: ncl.main(args), "--eval-datasets =: expected NAME or NAME=DIR")


@pytest.mark.parametrize("flags, said", [(["--virtual-lr", "1e30"], "Try a lower --virtual-lr or --lr, --grad-clip 1")])
def test_what_made_the_loss_not_finite_is_what_is_to_be_lowered(flags, said, tmp_path):
    flags = [*TINY[:-4], "--meta-batch-size", "4", "--meta-size", "8", "--output-dir", str(tmp_path), *flags]
    refused(lambda: mama.main(mama.parse_args([*flags, "--max-steps", "6"])), "the loss is not finite at step", said)


def test_a_second_sigterm_has_a_word(tmp_path, monkeypatch, capfd):
    raised, run = [], SimpleNamespace(handlers={}, folder=tmp_path, ignore_no_more=lambda: raised.append("default"))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    try:
        engine.checkpoints.listen(run)
        note = signal.getsignal(signal.SIGTERM)
        note(signal.SIGTERM, None)
        note(signal.SIGTERM, None)  # within five seconds: the launcher's, which is the first one
        assert engine.base.signals == [signal.SIGTERM] * 2 and not raised and not capfd.readouterr().err
        monkeypatch.setattr(engine.checkpoints, "TWICE", 0)
        note(signal.SIGTERM, None)
    finally:
        engine.base.signals.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capfd.readouterr().err
    assert raised == ["default", signal.SIGTERM] and said.count("\n") == 2
    assert "stopped at once by a second SIGTERM; from the last checkpoint: " in said and f"--resume {tmp_path}" in said


def test_no_traceback_of_what_falls_apart_stands_beside_the_message(monkeypatch, capfd):
    """Python tells of an error in a __del__ (a loader's, whose worker is gone) by this hook."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    before = signal.getsignal(signal.SIGCHLD)

    class Loader:
        def __del__(self):
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
    with pytest.raises(SystemExit), engine.base.clean_exit():
        raise UserError("one line")
    loader = Loader()
    del loader
    signal.signal(signal.SIGCHLD, before)
    assert capfd.readouterr().err == "error: one line\n"
