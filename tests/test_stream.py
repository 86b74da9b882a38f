"""Tars: their index, and streams that read them in order."""

import dataclasses

import common
from contrastive.data import batches as data_batches
from contrastive.data import stream as data_stream
from contrastive.engine.processes import UserError

import pytest
import torch

from helpers import (
    TEXT,
    batches_of,
    caption,
    complains,
    counted,
    numbers,
    tar_samples,
    write_clips,
    write_tar,
)


def test_the_index_of_tars_is_made_anew_when_they_change(tmp_path):
    write_tar(tmp_path / "0.tar", tar_samples(range(30), "jpg", "txt"))
    assert len(data_stream.index("x", "train", [tmp_path / "0.tar"], {})) == 30
    write_tar(tmp_path / "0.tar", tar_samples(range(40), "jpg", "txt"))
    data = data_stream.index("x", "train", [tmp_path / "0.tar"], {})
    assert len(data) == 40 and data.captions(39) == [caption(39), caption(39, 1)]
    write_tar(tmp_path / "1.tar", tar_samples(range(5), "jpg", "txt"))
    both = data_stream.index("x", "train", [tmp_path / "0.tar", tmp_path / "1.tar"], {})
    assert both.key(3) == "0/000003" and both.key(41) == "1/000001" and both.shards.tolist() == [0] * 40 + [1] * 5

@pytest.mark.parametrize("damage", [lambda c: c[:len(c) // 2], lambda c: b"x" * 512 + c[512:], lambda c: TEXT])
def test_a_tar_that_cannot_be_read_to_its_end_is_named(damage, tmp_path):
    content = write_tar(tmp_path / "a.tar", tar_samples(range(20), "jpg", "txt")).read_bytes()
    (tmp_path / "a.tar").write_bytes(damage(content))
    complains(tmp_path / "a.tar", "train", "a.tar: not a tar that can be read to its end")


# ---------------------------------------------------- streams --------------------------------------------------------

VIEWS = [common.Augment(16, 0.5, 0.5, randaugment=(2, 7)),
         common.Augment(16, 0.2, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four training tars of six samples, and one for val and test."""
    folder = tmp_path_factory.mktemp("shards")
    for s in range(4):
        write_tar(folder / f"train-{s}.tar", tar_samples(range(6 * s, 6 * s + 6), "jpg", "txt"))
    write_tar(folder / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    return str(folder)


def stream(folder, buffer=1):
    return dataclasses.replace(common.load_data(folder, "train", streaming=True), buffer=buffer)


def items(data, process=0, processes=1, count=None, first=0, local=6):
    """(key, epoch, views) of one reader: `count` of them, or an epoch of its shards."""
    reader = iter(data_stream.StreamViews(data, VIEWS, 3, (process, processes), first, local))
    some = (next(reader) for _ in range(count or 6 * len(data.urls[process::processes])))
    return [(item["keys"], item["epochs"], item["views"]) for item in some]


def test_two_readers_share_an_epoch_between_them(shards):
    data = stream(shards)
    left, right, views = items(data, 0, 2), items(data, 1, 2), {i[0]: i[2] for i in items(data)}
    assert len(left) == len(right) == 12 and {i[0] for i in left + right} == {f"{i:06}" for i in range(24)}
    # whoever reads a key, its views are the same
    assert all(torch.equal(a, b) for key, _, v in left + right for a, b in zip(v, views[key], strict=True))
    assert common.load_data(shards, "val", streaming=True).key(0) == "000024"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_goes_on_at_its_batch(shards, workers):
    data = stream(shards, buffer=5)
    whole = [b["keys"] for b in batches_of(data, VIEWS, 4, last=8, workers=workers)]
    again = [b["keys"] for b in batches_of(data, VIEWS, 4, first=3, last=8, workers=workers)]
    assert whole[3:] == again and len({*sum(whole, [])}) > 12


def test_samples_without_caption_are_left_out_of_an_index_and_bad_in_a_stream(tmp_path):
    samples = tar_samples(range(12), "jpg", "txt")
    del samples["000005"]["txt"]
    samples["000007"]["txt"] = b" "
    write_tar(tmp_path / "train-0.tar", samples)
    write_tar(tmp_path / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    data = common.load_data(str(tmp_path), "train")
    assert len(data) == 10 and "2 samples left out, first 000005" in data.note
    batches = batches_of(stream(str(tmp_path)), VIEWS, 4, last=3)
    keys = [k for b in counted(batches) for k in b["keys"]]
    assert {*batches.bad} == {"000005", "000007"} and {*keys} == {*samples} - {"000005", "000007"}
    assert len(keys) == 12 and keys.count("000006") == keys.count("000008") == 2  # a bad one has the next in its place


def test_a_tar_of_a_stream_that_ends_early_gives_its_samples_and_one_bad_one(tmp_path):
    content = write_tar(tmp_path / "train-0.tar", tar_samples(range(20), "jpg", "txt")).read_bytes()
    (tmp_path / "train-0.tar").write_bytes(content[:len(content) // 2])
    found = list(data_stream.read_tar(str(tmp_path / "train-0.tar")))
    assert 5 < len(found) < 15 and isinstance(found[-1][1], Exception) and found[0][0] == "000000"


def test_a_stream_without_one_readable_picture_stops(tmp_path):
    write_tar(tmp_path / "train-0.tar", {f"{i:06}": {"jpg": TEXT, "txt": b"a caption"} for i in range(12)})
    write_tar(tmp_path / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    with pytest.raises(UserError, match="cannot be read"):
        list(batches_of(stream(str(tmp_path)), VIEWS, 4, last=2))


def test_more_processes_than_shards_is_refused(shards, monkeypatch):
    for place in (data_stream, data_batches):
        monkeypatch.setattr(place, "world", lambda: 5)
    with pytest.raises(UserError, match="4 shards are too few for 5 processes"):
        next(iter(batches_of(stream(shards), VIEWS, 10)))


def test_a_stream_of_videos(tmp_path):
    write_clips(tmp_path, {k: f"{k:06}.mp4" for k in range(6)})
    samples = {f"{k:06}": {"mp4": (tmp_path / f"{k:06}.mp4").read_bytes(), "txt": b"x"} for k in range(6)}
    for name in ("train", "val"):
        write_tar(tmp_path / "tars" / f"{name}.tar", samples)
    data = common.load_data(str(tmp_path / "tars"), "train", frames=4, streaming=True)
    batches = batches_of(dataclasses.replace(data, buffer=3), [common.Augment(32, squash=True)], 4, last=1, side=32)
    batch, = batches
    mean, std = (torch.tensor(x)[:, None, None] for x in (batches.transform.mean, batches.transform.std))
    for key, clip in zip(batch["keys"], batch["views"][0] * std + mean):
        assert numbers((clip * 255).round().numpy()) == [8 * int(key) + j for j in (0, 2, 5, 7)]
