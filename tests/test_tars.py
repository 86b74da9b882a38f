"""Damaged tars: what stands behind the damage is used, what is lost is counted and named, in the index and in a stream.

Every damage is done to the same tar of twenty samples, a jpg, a json and a txt each."""

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import re
import tarfile
from pathlib import Path

import common
from contrastive import engine, readers
from contrastive.engine.base import UserError
from contrastive.readers.pictures import decode

import numpy as np
import pytest
import torch

from helpers import caption, encode, picture, tar_samples, write_tar

N = 20
ALL = [f"{i:06}" for i in range(N)]
LOSE = {"max_bad_fraction": 1.0}


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    """(bytes of a whole tar, {name of a member: (first byte of its header, of its data, behind it)})."""
    path = write_tar(tmp_path_factory.mktemp("whole") / "a.tar", tar_samples(range(N), "jpg", "json", "txt"))
    with tarfile.open(path) as whole:
        places = {m.name: (m.offset, m.offset_data, m.offset_data + (m.size + 511) // 512 * 512) for m in whole}
    return path.read_bytes(), places


def indexed(path, **options):
    return readers.tars.index("mine", "train", [path] if isinstance(path, Path) else path, LOSE | options)


def streamed(path, expected=None):
    """(keys of the samples, {key: why} of what is counted as bad)."""
    read = list(readers.stream.read_tar(str(path), expected))
    return ([k for k, parts in read if isinstance(parts, dict)],
            {k: str(parts) for k, parts in read if not isinstance(parts, dict)})


def keys_of(data):
    return [data.key(i) for i in range(len(data))]


def put(content, at, new):
    return content[:at] + new + content[at + len(new):]


# ---- the damages: (tar, places) -> (content, keys that are lost, how many are lost, what is said) ----
def bad_header(content, at):
    """The header of the picture of 000009: python's tarfile ends there."""
    return put(content, at["000009.jpg"][0] + 20, b"!" * 30), ["000009"], 1, "no header of a tar from byte"


def bad_last_header(content, at):
    return put(content, at["000009.txt"][0], b"?" * 512), ["000009"], 1, "between 000009 and 000010"


def bad_first_header(content, at):
    return put(content, 100, b"!" * 30), ["000000"], 1, "from byte 0 to"


def zeros(content, at):
    """000005 and half of 000006: as a download in parts leaves a hole."""
    start, stop = at["000005.jpg"][0], at["000006.json"][0] + 100
    return put(content, start, bytes(stop - start)), ["000005", "000006"], 2, "between 000004 and 000006"


def garbage_over(content, at):
    start, stop = at["000011.jpg"][0], at["000014.jpg"][0]
    noise = np.random.default_rng(0).integers(0, 256, stop - start, np.uint8).tobytes()
    return put(content, start, noise), ["000011", "000012", "000013"], 3, "between 000010 and 000014"


def garbage_between(content, at):
    """Nothing is lost, and all that follows is moved by no multiple of 512."""
    start = at["000007.jpg"][0]
    return content[:start] + b"<html>" * 117 + content[start:], [], 0, "between 000006 and 000007"


def bytes_missing(content, at):
    start = at["000007.jpg"][0]
    return content[:start + 100] + content[start + 777:], ["000007"], 1, "between 000006 and 000007"


def cut_in_picture(content, at):
    return content[:at["000016.jpg"][1] + 100], ["000016"], 1, "inside 000016.jpg"


def cut_in_text(content, at):
    return content[:at["000016.txt"][1] + 3], ["000016"], 1, "inside 000016.txt"


def cut_in_header(content, at):
    return content[:at["000016.txt"][0] + 200], ["000016"], 1, "after 000016"


def cut_between(content, at):
    """No mark of the end: more than what is there was meant to be there."""
    return content[:at["000016.txt"][2]], None, 1, "without an end-of-tar mark"


def never_filled_in(content, at):
    start = at["000016.txt"][2]
    return content[:start] + bytes(2**20 + 2**18), None, None, "zeros from byte"


def rest_is_noise(content, at):
    start, stop = at["000010.jpg"][0], at["000019.txt"][2]
    noise = np.random.default_rng(1).integers(0, 256, stop - start, np.uint8).tobytes()
    return content[:start] + noise, None, 10, "to its end, after 000009"


HERE = {"bad_last_header": range(N), "cut_between": range(17), "never_filled_in": range(17), "rest_is_noise": range(10)}
CUT = {"cut_in_picture": range(16), "cut_in_text": range(16), "cut_in_header": range(16)}
DAMAGES = [bad_header, bad_last_header, bad_first_header, zeros, garbage_over, garbage_between, bytes_missing,
           cut_in_picture, cut_in_text, cut_in_header, cut_between, never_filled_in, rest_is_noise]


@pytest.mark.parametrize("damages", DAMAGES, ids=lambda d: d.__name__)
def test_what_is_whole_is_used_and_what_is_lost_is_counted(damages, tar, tmp_path):
    content, lost, n, said = damages(*tar)
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    here = [ALL[i] for i in (HERE | CUT).get(damages.__name__, range(N)) if ALL[i] not in (lost or ())]

    data = indexed(path)
    assert keys_of(data) == here
    for i, key in enumerate(here):  # at the right places, also where all is moved
        assert data.captions(i) == [caption(int(key)), caption(int(key), 1)]
    assert torch.equal(data.read(len(here) - 1), decode(tar_samples([int(here[-1])], "jpg")[here[-1]]["jpg"]))
    assert said in data.note and str(path) in data.note
    if n == 0:
        assert "damage in the tars, no sample lost, first: " in data.note
    else:
        number = int(re.search(r"([\d,]+) of [\d,]+ samples LOST", data.note)[1].replace(",", ""))
        assert number > 300 if n is None else number == n  # a megabyte of small samples
    again = indexed(path)  # from the cache
    assert again.note == data.note and keys_of(again) == here and again.shards.tolist() == data.shards.tolist()

    keys, bad = streamed(path)
    assert sorted(keys) == here and len(bad) == (number if n is None else n)
    assert lost is None or sorted(bad) == lost
    assert all(said in why or "000016" in why for why in bad.values())


def test_two_damages_in_a_tar_and_one_in_another(tar, tmp_path):
    content, at = tar
    content = put(zeros(content, at)[0], at["000015.jpg"][0], b"!" * 512)
    (tmp_path / "a.tar").write_bytes(content)
    (tmp_path / "b.tar").write_bytes(cut_in_text(*tar)[0])
    write_tar(tmp_path / "c.tar", tar_samples(range(40, 45), "jpg", "json", "txt"))
    data = indexed([tmp_path / f"{x}.tar" for x in "abc"])
    assert len(data) == N - 3 + 16 + 5 and data.shards.tolist() == [0] * (N - 3) + [1] * 16 + [2] * 5
    assert "4 of 42 samples LOST in damaged tars, first: 000005 of " in data.note or "000006 of" in data.note
    assert sorted(streamed(tmp_path / "a.tar")[1]) == ["000005", "000006", "000015"]


@pytest.mark.parametrize("step", [7, 0])
def test_keys_without_numbers_in_a_row_are_told_by_the_bytes(step, tmp_path):
    """Names of any kind: how many lie in a stretch is told by its length, at least one."""
    names = [f"{(i + 3) * 7919 % 1000:03}{'ab'[i % 2]}" for i in range(N)]
    samples = dict(zip(names, tar_samples(range(N), "png", "txt").values()))
    path = write_tar(tmp_path / "a.tar", samples)
    with tarfile.open(path) as whole:
        start = whole.getmember(f"{names[5]}.png").offset
        stop = whole.getmember(f"{names[5 + step]}.png").offset if step else start
    content = path.read_bytes()
    path.write_bytes(put(content, start, b"!" * (stop - start)) if step else content[:start] + b"!" + content[start:])
    data = indexed(path)
    assert keys_of(data) == names[:5] + names[5 + step:]
    assert f"{max(1, step)} of {N + (step == 0)} samples LOST" in data.note
    keys, bad = streamed(path)
    assert sorted(keys) == sorted(keys_of(data)) and len(bad) == max(1, step) and "lost 1 of" in min(bad)


# ---- whole tars ----
def literal_index(path):
    """The rows of a tar by Python's tarfile alone, as the index was made before it knew of damage."""
    rows = {}
    with tarfile.open(path) as whole:
        for member in (m for m in whole if m.isfile()):
            key, _, kind = member.name.partition(".")
            rows.setdefault(key, {})[kind] = (member.offset_data, member.size, whole.extractfile(member).read())
    return [({"path": str(path), "offset": r["jpg"][0], "size": r["jpg"][1]}, r["txt"][2].decode().splitlines(), k)
            for k, r in rows.items()]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_index_of_a_whole_tar_is_what_it_was(kind, tmp_path):
    path, samples = tmp_path / "a.tar", tar_samples(range(9), "jpg", "json", "txt")
    with tarfile.open(path, "w", format=kind) as out:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        out.addfile(folder)
        for i, (key, parts) in enumerate(samples.items()):
            for extension, content in parts.items():
                long = "" if kind == tarfile.USTAR_FORMAT or i % 2 else "_" + "x" * 150 + "ü"  # a header of its own
                info = tarfile.TarInfo(f"{key}{long}.{extension}")
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))
    data, rows = indexed(path, max_bad_fraction=0.0), literal_index(path)
    assert data.note == "" and keys_of(data) == [key for _, _, key in rows]
    assert data.sources["source"][:] == [source for source, _, _ in rows]
    assert [data.captions(i) for i in range(9)] == [texts for _, texts, _ in rows]
    assert streamed(path) == ([key for _, _, key in rows], {})


def test_tars_one_behind_the_other_in_a_file_are_all_read(tar, tmp_path):
    other = write_tar(tmp_path / "b.tar", tar_samples(range(30, 35), "jpg", "json", "txt"))
    path = tmp_path / "a.tar"
    path.write_bytes(tar[0] + other.read_bytes())
    assert keys_of(indexed(path, max_bad_fraction=0.0)) == ALL + [f"{i:06}" for i in range(30, 35)]
    assert indexed(path).note == "" and len(streamed(path)[0]) == 25 and not streamed(path)[1]


# ---- what lies beside ----
BESIDE = {  # file: what it says of data/a.tar with n samples
    "a_stats.json": lambda n: {"count": n + 7, "successes": n, "failed_to_download": 7},
    "sizes.json": lambda n: {"a.tar": n},
    "../sizes.json": lambda n: {"data/a.tar": n, "a.tar": 7},
    "_info.json": lambda n: {"splits": {"train": {"num_samples": n, "filenames": ["a.tar"], "shard_lengths": [n]}}},
    "shardindex.json": lambda n: {"shardlist": [{"url": "https://example.org/x/a.tar", "nsamples": n, "filesize": 1}]}}


@pytest.mark.parametrize("beside", BESIDE)
def test_fewer_samples_than_a_file_beside_says_are_said_with_both_numbers(beside, tar, tmp_path):
    folder, file = tmp_path / "data", Path(beside).name
    folder.mkdir()
    path = folder / "a.tar"
    path.write_bytes(tar[0])

    def write(n):
        (folder / beside).write_text(json.dumps(BESIDE[beside](n)))
    write(23)
    said = f"{path}: 20 of the 23 samples that {file} names"
    assert f"3 of 23 samples LOST in damaged tars, first: {said}" in indexed(path).note
    with pytest.raises(UserError, match=r"3 of 23 samples are lost in 1 damaged tars, above --max-bad-fraction"):
        indexed(path, max_bad_fraction=0.1)
    known = readers.damage.expected([path])[str(path)]
    keys, bad = streamed(path, known)
    assert keys == ALL and len(bad) == 3 and known == (23, file) and all(file in why for why in bad.values())

    path.write_bytes(cut_between(*tar)[0])  # the file knows better than a guess from the bytes
    assert "6 of 23 samples LOST" in indexed(path).note and len(streamed(path, known)[1]) == 6
    write(17)
    note = indexed(path, max_bad_fraction=0.0).note
    assert note.startswith("damage in the tars, no sample lost, first: ") and not streamed(path, (17, file))[1]
    write(15)  # of more than it says nothing is made
    assert len(indexed(path, max_bad_fraction=0.0)) == 17


@pytest.mark.parametrize("text", ["", "{", "[]", '{"splits": 3}', '{"a.tar": "many"}', '{"shardlist": [{}]}'])
def test_a_broken_file_beside_is_passed_over(text, tar, tmp_path):
    (tmp_path / "a.tar").write_bytes(tar[0])
    for name in ("a_stats.json", "sizes.json", "_info.json", "dataset.json"):
        (tmp_path / name).write_text(text)
    data = indexed(tmp_path / "a.tar", max_bad_fraction=0.0)
    assert len(data) == N and data.note == ""


# ---- above the limit ----
def test_more_lost_than_the_limit_stops_in_one_line(tar, tmp_path):
    (tmp_path / "a.tar").write_bytes(bad_header(*tar)[0])
    with pytest.raises(UserError) as error:
        common.load_data(str(tmp_path), "train")
    message = str(error.value)
    assert "1 of 20 samples are lost in 1 damaged tars, above --max-bad-fraction 0.01" in message
    assert "\n" not in message and "download these tars again" in message
    assert f"first: 000009 of {tmp_path / 'a.tar'}: no header" in message
    assert len(common.load_data(str(tmp_path), "train", max_bad_fraction=0.05)) > 10


def test_the_flag_reaches_the_data(tar, tmp_path):
    import temo
    (tmp_path / "a.tar").write_bytes(tar[0])
    for value, reached in (("0", 0.0), ("0.3", 0.3)):
        args = temo.parse_args(["--dataset", str(tmp_path), "--max-bad-fraction", value])
        assert engine.data.data_options(args)["max_bad_fraction"] == reached
    (tmp_path / "sizes.json").write_text(json.dumps({"a.tar": 21}))
    with pytest.raises(UserError, match="--max-bad-fraction 0.0,"):
        common.load_data(str(tmp_path), "train", max_bad_fraction=0.0)


def shards(folder, tar, content):
    """Three training shards, the second damaged, and one held out."""
    for k in range(3):
        write_tar(folder / f"train-{k}.tar", tar_samples(range(100 * (k + 1), 100 * (k + 1) + N), "jpg", "json", "txt"))
    (folder / "train-1.tar").write_bytes(content)
    write_tar(folder / "val-0.tar", tar_samples(range(90, 96), "jpg", "json", "txt"))
    return common.load_data(str(folder), "train", streaming=True)


def batches_of(data, folder, limit):
    transform = common.EvalTransform(16, (0.5,) * 3, (0.5,) * 3)
    data.buffer = 8
    return common.Batches(data, [common.Augment(16)], transform, 10, 0, 0, 14, torch.device("cpu"), 0, limit, folder)


@pytest.mark.parametrize("damages", [garbage_over, cut_in_picture, cut_in_header])
def test_a_stream_counts_the_losses_of_a_shard_once(damages, tar, tmp_path):
    content, lost, _, _ = damages(*tar)
    batches = batches_of(shards(tmp_path, tar, content), tmp_path, 0.5)
    keys = {k for batch in batches for k in batch["keys"]}  # of two epochs and more
    here = [ALL[i] for i in (HERE | CUT).get(damages.__name__, range(N)) if ALL[i] not in lost]
    assert keys >= set(here) and not keys & set(lost)
    assert set(batches.bad) == {f"{tmp_path / 'train-1.tar'}:{k}" for k in lost}
    assert len((tmp_path / "bad_samples.txt").read_text().splitlines()) == len(lost)


def test_a_stream_stops_above_the_limit(tar, tmp_path):
    data = shards(tmp_path, tar, tar[0])
    (tmp_path / "sizes.json").write_text(json.dumps({"train-1.tar": 600}))
    data = common.load_data(str(tmp_path), "train", streaming=True, max_bad_fraction=0.2)  # another opening
    with pytest.raises(UserError, match="580 of about .*above --max-bad-fraction 0.2.*20 of the 600 samples"):
        list(batches_of(data, tmp_path, 0.2))
    batches = batches_of(data, tmp_path, 1.0)
    assert len(list(batches)) == 14 and len(batches.bad) == 580  # more than the tries of a reader


def test_a_stream_of_few_samples_says_that_a_batch_may_repeat_them(tmp_path, capsys):
    for k in range(2):
        write_tar(tmp_path / f"train-{k}.tar", tar_samples(range(50 * k, 50 * k + 50), "jpg", "txt"))
    (tmp_path / "sizes.json").write_text(json.dumps({"train-0.tar": 50, "train-1.tar": 50}))
    data = common.load_data(str(tmp_path), "train", streaming=True)
    for data.length, said in ((50, True), (160 * 2, False)):
        next(iter(batches_of(data, tmp_path, 0.5)))  # two readers
        words = "WARNING: --streaming: 50 samples for each reader, which mixes 8 at a time"
        assert (words in capsys.readouterr().out) == said


@pytest.mark.parametrize("listed, examples", [(2, 20), (1, 10_000)])
def test_a_stream_knows_its_samples_if_all_shards_are_counted(listed, examples, tmp_path, capsys):
    for k in range(3):  # the last is held out
        write_tar(tmp_path / f"{k:05}.tar", tar_samples(range(10 * k, 10 * k + 10), "jpg", "txt"))
        if k < listed:
            (tmp_path / f"{k:05}_stats.json").write_text(json.dumps({"successes": 10}))  # as img2dataset writes it
    data = common.load_data(str(tmp_path), "train", streaming=True)
    assert data.examples == examples and data.distinct == (20 if listed == 2 else float("inf"))
    assert ("the number of samples is not known" in capsys.readouterr().out) == (listed < 2)


def test_readers_with_other_numbers_of_shards_are_said(tmp_path, capsys):
    for k in range(3):
        write_tar(tmp_path / f"train-{k}.tar", tar_samples(range(10 * k, 10 * k + 10), "jpg", "txt"))
    write_tar(tmp_path / "val-0.tar", tar_samples(range(30, 40), "jpg", "txt"))
    data = common.load_data(str(tmp_path), "train", streaming=True)
    for workers, said in ((2, True), (3, False)):
        batches = batches_of(data, tmp_path, 0.5)
        batches.workers = workers
        data.raw_batches(batches)  # what iterating does first
        assert ("3 shards for 2 readers: those with fewer begin their next" in capsys.readouterr().out) == said


def test_a_class_may_be_a_field_of_the_json(tmp_path):
    classes = [i % 3 for i in range(30)] + [None, 1.7, [2], "x", "2", float("inf")]
    samples = {f"{i:06}": {"png": encode(picture(i)), "txt": b"words",
                           "json": json.dumps({"about": {"number": 1}, "class": c}).encode()}
               for i, c in enumerate(classes)}
    data = indexed(write_tar(tmp_path / "a.tar", samples), label_column="json.class")
    found = dict(zip(data.column("key"), data.labels.tolist()))
    assert found == {f"{i:06}": c for i, c in enumerate([*(i % 3 for i in range(30)), -1])} | {"000034": 2}
    assert data.captions(0) == ["words"] and "4 samples without" in data.note


# ---- compressed ----
PACK = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("word", PACK)
def test_a_compressed_tar_is_refused_by_name(word, tar, tmp_path):
    """Before, tarfile unpacked it on its own, and the index named places in what is on no disk."""
    path = tmp_path / "a.tar"
    path.write_bytes(PACK[word](tar[0]))
    refused = f"a.tar is not a readable tar .compressed with {word}: unpack it"
    with pytest.raises(UserError, match=refused) as error:
        indexed(path)
    assert "\n" not in str(error.value)
    assert f"compressed with {word}" in streamed(path)[1][str(path)]
    write_tar(tmp_path / "b.tar", tar_samples(range(6), "jpg", "txt"))
    with pytest.raises(UserError, match=refused):
        common.load_data(str(tmp_path), "train", streaming=True)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "b.TAR.GZ"])
def test_a_folder_of_compressed_tars_says_so(name, tar, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(tar[0]))
    (tmp_path / "README.md").write_text("pictures")
    with pytest.raises(UserError, match=f"1 compressed tars .*{name}: unpack them"):
        common.load_data(str(tmp_path), "train")
    with pytest.raises(UserError, match=f"{name} is not a readable tar .compressed with gzip"):
        common.load_data(str(tmp_path / name), "train")


@pytest.mark.parametrize("content", [b"", b"<html>503</html>", b"<html>503</html>" * 1000])
def test_what_is_no_tar_at_all_is_refused_by_name(content, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    why = "no header of a tar in it" if content else "an empty file"
    with pytest.raises(UserError, match=f"a.tar is not a readable tar .{why}.$"):
        indexed(path)
    assert list(streamed(path)[1]) == [str(path)]


# ---- names ----
def test_links_names_that_lead_out_and_repetitions_are_counted_not_followed(tmp_path):
    path, samples = tmp_path / "a.tar", tar_samples(range(4), "jpg", "txt")
    with tarfile.open(path, "w") as out:
        def add(name, content=b"", **more):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in more.items():
                setattr(info, key, value)
            out.addfile(info, io.BytesIO(content))

        for i in range(3):
            add(f"00000{i}.jpg", samples[f"00000{i}"]["jpg"])
            add(f"00000{i}.txt", samples[f"00000{i}"]["txt"])
        add("../../x.jpg", samples["000003"]["jpg"])
        add("../../x.txt", samples["000003"]["txt"])
        add("000004.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add("000004.txt", b"a caption")
        add("000001.jpg", samples["000003"]["jpg"])  # a second one of that name, other words
        add("000001.txt", b"another caption")
    data = indexed(path, max_bad_fraction=0.0)
    assert keys_of(data) == ["000000", "000001", "000002"]
    assert data.captions(1) == [caption(1), caption(1, 1)]  # the first; it was the picture and the words of the last
    assert torch.equal(data.read(1), decode(samples["000001"]["jpg"]))
    assert data.note.startswith("3 samples with names that are not followed, first: ") and "../../x.jpg" in data.note
    read = dict(readers.stream.read_tar(str(path)))
    assert {k for k, parts in read.items() if isinstance(parts, readers.damage.Loss)} == {
        "../../x not followed", "000004 not followed", "000001 again"}
    assert read["000001"]["txt"] == samples["000001"]["txt"]


# ---- reading ----
class OneWay(io.RawIOBase):
    """A file of a network: no seeking, and fewer bytes at a time than are asked for."""

    def __init__(self, content):
        self.inside = io.BytesIO(content)

    def read(self, n=-1):
        return self.inside.read(min(n, 700))


@pytest.mark.parametrize("damages", DAMAGES, ids=lambda d: d.__name__)
def test_a_one_way_file_is_walked_as_one_on_a_disk(damages, tar, tmp_path):
    content, _, _, _ = damages(*tar)

    def walk(front):
        return [(m if isinstance(m, readers.damage.Damage) else (m.name, m.offset_data, m.size), data, span)
                for m, data, span in readers.damage.walk(front, lambda name: name.endswith("txt"))]
    assert walk(readers.damage.Front(OneWay(content))) == walk(readers.damage.Front(io.BytesIO(content), seeks=True))


def test_no_header_can_make_the_reader_go_round_or_fail(tar):
    """Bytes of headers at random, checksums put right: the walk ends, forward only."""
    content, at = tar
    rng = np.random.default_rng(5)
    for _ in range(300):
        start = at[f"{rng.integers(N):06}.json"][0]
        header = bytearray(content[start:start + 512])
        for k in rng.integers(100, 260, 3):
            header[k] = rng.integers(256)
        if rng.integers(2):
            header[124:136] = (-int(rng.integers(1, 10**6)) % 2**96).to_bytes(12, "big")  # a size below zero
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        front = readers.damage.Front(io.BytesIO(put(content, start, bytes(header))), seeks=True)
        assert len(list(readers.damage.walk(front, lambda name: True))) < 100


@pytest.mark.parametrize("limit, read", [(0, True), (100, False)])
def test_max_pixels_holds_in_a_stream(limit, read, tmp_path):
    for k, split in enumerate(("train-0", "train-1", "val-0")):
        write_tar(tmp_path / f"{split}.tar", tar_samples(range(k * 6, k * 6 + 6), "jpg", "txt"))
    data = common.load_data(str(tmp_path), "train", streaming=True, max_pixels=limit)
    data = dataclasses.replace(data, buffer=2)
    transform = common.EvalTransform(16, (0.5,) * 3, (0.5,) * 3)
    batches = common.Batches(data, [common.Augment(16)], transform, 4, 0, 0, 1, torch.device("cpu"), 0, 0.5)
    if read:
        assert len(next(iter(batches))["keys"]) == 4
    else:
        with pytest.raises(UserError, match="480 pixels, more than the limit of 100"):
            next(iter(batches))
