"""Training batches of images, clips, sets in memory and streams of tars: their order, their views,
and what cannot be read."""

import itertools
import multiprocessing
import os
from collections import defaultdict

import common
from contrastive import evaluation
from contrastive.data import batches as data_batches
from contrastive.data import tars as data_tars
from contrastive.data.batches import SHARDS_AT_ONCE, epoch_batches, epoch_order
from contrastive.data.frames import read_frames
from contrastive.data.options import DataOptions
from contrastive.core import processes
from contrastive.core.processes import UserError

import numpy as np
import pytest
import torch

import launch
from helpers import (
    CPU, TEXT, TRUNCATED, all_rows, batches_of, caption, complains, counted, numbers, tar_samples,
    write_captions, write_clips, write_images, write_rows, write_tar, write_video)

VIEWS = [
    common.Augment(16, 0.5, 0.5, randaugment=(2, 7)),
    common.Augment(16, 0.2, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5),
]
PLAIN = common.Augment(32, squash=True)  # nothing random, nothing cut off: its views can be read


def same_batch(a, b):
    """Are keys, captions, epoch, views and draws of two batches the same?"""
    words = (a["keys"], a["captions"], a["epoch"]) == (b["keys"], b["captions"], b["epoch"])
    views = all(torch.equal(x, y) for x, y in zip(a["views"], b["views"], strict=True))
    return words and views and np.array_equal(a["draws"], b["draws"])


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """{kind: training data}: 36 pictures of two sizes (39 in the folder), 18 clips with random
    frames (of 20), and a set in memory."""
    root = tmp_path_factory.mktemp("sets")
    pictures = write_captions(root / "pictures", 39)
    write_images(root / "pictures", range(0, 39, 3), height=31, width=17)
    clips = {k: f"{k:03}.mp4" for k in [*range(19), 31]}
    write_clips(root / "clips", clips)
    table = write_rows(
        root / "clips" / "a.csv", ["video", "caption"], [(x, caption(k)) for k, x in clips.items()]
    )
    return {
        "pictures": all_rows(pictures),
        "memory": common.load_data("emoji", "val"),
        "clips": all_rows(table, frames=4, frame_sampling="random"),
    }


def shown_by(batches):
    """[(epoch, key, numbers of the frames)] of batches of PLAIN clips, their bad samples
    counted."""
    mean, std = (
        torch.tensor(x)[:, None, None] for x in (batches.transform.mean, batches.transform.std)
    )
    for batch in counted(batches):
        for key, clip in zip(batch["keys"], batch["views"][0] * std + mean):
            yield batch["epoch"], key, numbers((clip * 255).round().numpy())


# ---- the order ----
@pytest.fixture(scope="module")
def forty():
    """(M,) the shard of each row: 40 shards of 5 to 24 rows."""
    return np.repeat(np.arange(40), np.random.default_rng(0).integers(5, 25, 40))


def test_many_shards_are_read_a_few_at_a_time(forty):
    n = len(forty)
    order = epoch_order(n, 3, 1, forty)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, epoch_order(n, 3, 1, 7 * forty + 2))  # of no shard's number
    for other in ((3, 2), (4, 1)):
        assert not np.array_equal(order, epoch_order(n, *other, forty))
    read = forty[order]  # (n,) the shard of each row in the order of reading
    sizes = np.bincount(forty)  # (40,)
    # shards as they are begun
    turns = np.argsort([np.flatnonzero(read == s)[0] for s in range(40)])
    windows = [
        turns[:SHARDS_AT_ONCE],
        turns[SHARDS_AT_ONCE : 2 * SHARDS_AT_ONCE],
        turns[2 * SHARDS_AT_ONCE :],
    ]
    at = np.cumsum([0, *(sizes[w].sum() for w in windows)])
    for window, start, stop in zip(windows, at, at[1:]):
        # a window is these shards, whole
        assert set(read[start:stop].tolist()) == set(window.tolist())
        assert (np.diff(order[start:stop]) == 1).mean() < 0.1
        assert len(set(read[start : start + 32].tolist())) > 6  # mixed
    # the shards come in random order too
    assert not np.array_equal(np.sort(windows[0]), np.arange(16))


def test_epoch_batches(forty):
    n, per_epoch = len(forty), len(forty) // 32
    steps = list(epoch_batches(n, 32, 7, 0, 2 * per_epoch + 1, shards=forty))
    assert [e for e, _ in steps] == [0] * per_epoch + [1] * per_epoch + [2]
    for e in (0, 1):
        # what is left waits for another epoch
        rows = np.concatenate([b for epoch, b in steps if epoch == e])
        assert np.array_equal(rows, epoch_order(n, 7, e, forty)[: per_epoch * 32])


def test_batches_of_many_tars_are_read_in_windows(tmp_path):
    for s in range(20):
        write_tar(
            tmp_path / f"train-{s:02}.tar", tar_samples(range(2 * s, 2 * s + 2), "png", "txt")
        )
    for split, start in (("val", 80), ("test", 82)):
        write_tar(tmp_path / f"{split}.tar", tar_samples(range(start, start + 2), "png", "txt"))
    data = common.load_data(str(tmp_path), "train")
    keys = [k for b in batches_of(data, VIEWS, 8, last=5) for k in b["keys"]]
    assert keys == [data.key(i) for i in epoch_order(40, 3, 0, np.arange(40) // 2)]


# ---- the same run ----
@pytest.mark.parametrize("kind", ["pictures", "clips", "memory"])
def test_batches_do_not_depend_on_workers_nor_on_where_they_start(kind, sets):
    data, size = sets[kind], {"memory": 50}.get(kind, 6)
    whole = list(batches_of(data, VIEWS, size, last=7))
    assert all(
        same_batch(a, b)
        for a, b in zip(whole, batches_of(data, VIEWS, size, last=7, workers=2), strict=True)
    )
    assert all(
        same_batch(a, b)
        for a, b in zip(whole[4:], batches_of(data, VIEWS, size, 4, 7), strict=True)
    )
    assert not any(
        same_batch(a, b) for a, b in zip(whole, batches_of(data, VIEWS, size, last=7, seed=4))
    )
    shape = (size, 4, 3, 16, 16) if kind == "clips" else (size, 3, 16, 16)
    assert [tuple(v.shape) for v in whole[0]["views"]] == [shape] * 2
    assert whole[0]["draws"].shape == (size, 32)
    rows = {k: i for i, k in enumerate(data.keys())}
    for b in whole:
        assert b["captions"] == [data.captions(rows[k]) for k in b["keys"]]
        assert b["rows"].tolist() == [rows[k] for k in b["keys"]]
    epoch = len(data) // size
    assert len({k for b in whole[:epoch] for k in b["keys"]}) == epoch * size


@pytest.mark.parametrize(
    "view", [common.Augment(16, 0.2), common.Augment(16, 1, 0, 1, 0.8)], ids=["crop", "light"]
)
@pytest.mark.parametrize("kind", ["pictures", "memory"])
def test_views_of_another_seed_epoch_or_place_are_others(kind, view, sets):
    data, found = sets[kind], defaultdict(list)
    for seed in (3, 4):
        for batch in batches_of(data, [view] * 2, len(data) // 2, last=4, seed=seed):
            for place, pair in zip(batch["index"], zip(*batch["views"], strict=True)):
                found[int(place)] += pair
    whole = [of for of in found.values() if len(of) == 2 * 2 * 2]  # two seeds, epochs and views
    assert len(whole) > 0.9 * len(data)
    for k, other in itertools.combinations(range(8), 2):
        assert np.mean([torch.equal(of[k], of[other]) for of in whole]) < 0.1, (k, other)


def test_two_processes_get_the_batches_of_one(tmp_path):
    data = common.load_data(str(write_captions(tmp_path, 39)), "train")
    bad = data.key(11)
    (tmp_path / bad).write_bytes(TEXT)

    def work(rank):
        processes.join(cpu=True)
        batches = batches_of(data, VIEWS, last=7, folder=tmp_path)
        torch.save([list(counted(batches)), [*batches.bad]], tmp_path / f"{rank}.pt")

    assert [code for code, _ in launch.ranks(tmp_path, work)] == [0, 0]
    (left, bad_left), (right, bad_right) = (
        torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)
    )
    alone = batches_of(data, VIEWS, last=7)
    for a, b, whole in zip(left, right, counted(alone), strict=True):
        assert a["keys"] + b["keys"] == whole["keys"]
        assert a["captions"] + b["captions"] == whole["captions"]
        assert a["epoch"] == whole["epoch"]
        assert all(
            torch.equal(torch.cat(v), w) for *v, w in zip(a["views"], b["views"], whole["views"])
        )
        assert np.array_equal(np.concatenate([a["draws"], b["draws"]]), whole["draws"])
    assert bad_left == bad_right == [*alone.bad] == [bad]
    assert (tmp_path / "bad_samples.txt").read_text().count("\n") == 1


# ---- bad samples ----
def test_bad_samples_are_replaced_by_the_next_counted_and_listed(tmp_path):
    """Rows 3, 4 (in a row) and the last of the training split."""
    data = all_rows(write_captions(tmp_path, 36))
    keys = list(data.keys())
    (tmp_path / keys[3]).write_bytes(TRUNCATED)
    (tmp_path / keys[4]).write_bytes(TEXT)
    (tmp_path / keys[35]).unlink()
    batches = batches_of(data, VIEWS, last=12, workers=2, folder=tmp_path)
    seen = [k for b in counted(batches) for k in b["keys"]]
    after = {keys[3]: keys[5], keys[4]: keys[5], keys[35]: keys[0]}
    order = [keys[i] for _, batch in epoch_batches(36, 6, 3, 0, 12) for i in batch]
    assert seen == [after.get(k, k) for k in order]
    lines = (tmp_path / "bad_samples.txt").read_text(encoding="utf8").splitlines()
    reasons = dict(line.split("\t") for line in lines)
    assert set(batches.bad) == set(after) == set(reasons)
    assert len(lines) == 3  # each once in two epochs
    for k, words in ((3, "truncated"), (4, "cannot identify"), (35, "No such file")):
        assert words in reasons[keys[k]]


def test_a_question_goes_with_the_sample_that_was_read(tmp_path):
    names = write_images(tmp_path, range(8))
    (tmp_path / names[3]).write_bytes(TEXT)
    paths = [str(tmp_path / name) for name in names]
    captions = [[f"words of {name}"] for name in names]
    table = common.make_table(captions, names, paths, question=names)
    data = common.Data("asked", "train", table)
    batch = next(iter(batches_of(data, [PLAIN], 8, last=1, side=32)))
    assert sorted(batch["rows"].tolist()) == [0, 1, 2, 4, 4, 5, 6, 7] and 3 in batch["index"]
    assert batch["keys"] == [names[i] for i in batch["rows"]]
    assert batch["captions"] == [captions[i] for i in batch["rows"]]


def test_a_hundred_bad_samples_in_a_row_are_the_end(tmp_path):
    path = write_rows(
        tmp_path / "a.csv", ["image", "caption"], [(f"{i}.png", "words") for i in range(30)]
    )
    data = common.load_data(str(path), "train")
    words = "^100 samples in a row cannot be read, the first: .*[0-9].*: "
    with pytest.raises(UserError, match=words):
        list(batches_of(data, VIEWS, 4, last=2))


# ---- clips ----
def test_random_frames_change_with_the_epoch_and_a_broken_clip_is_replaced(tmp_path):
    names = {k: f"{k:03}.mp4" for k in range(12)}
    write_clips(tmp_path, names)
    broken = tmp_path / names[4]
    broken.write_bytes(broken.read_bytes()[: len(broken.read_bytes()) * 6 // 10])
    write_clips(tmp_path, {12: "val.mp4", 13: "test.mp4"})
    rows = [(x, caption(k), "train") for k, x in names.items()]
    rows += [("val.mp4", "x", "val"), ("test.mp4", "x", "test")]
    path = write_rows(tmp_path / "a.csv", ["video", "caption", "split"], rows)
    data = common.load_data(str(path), "train", frames=4, frame_sampling="random")
    batches = batches_of(data, [PLAIN], 12, last=2, side=32)
    found = [defaultdict(list), defaultdict(list)]
    for epoch, key, shown in shown_by(batches):
        found[epoch][key].append(shown)
    assert [*batches.bad] == [names[4]]
    for seen in found:
        assert {key: len(clips) for key, clips in seen.items()} == {
            x: 1 + (k == 5) for k, x in names.items() if k != 4
        }
        for key, clips in seen.items():  # one frame of each quarter
            assert all(
                2 * j <= i - 8 * int(key[:3]) < 2 * (j + 1)
                for clip in clips
                for j, i in enumerate(clip)
            )
    assert sum(found[0][key] != found[1][key] for key in found[0]) > 6


def test_all_frames_of_a_clip_get_the_same_view(tmp_path):
    """Clips that stand still, without loss: their views must stand still too."""
    for k in range(10):
        write_video(tmp_path / f"{k:03}.mkv", [k + 1] * 4, "ffv1", pixels="bgr0")
    rows = [(f"{k:03}.mkv", f"{k}") for k in range(10)]
    data = all_rows(write_rows(tmp_path / "a.csv", ["video", "caption"], rows), frames=4)
    views = defaultdict(list)
    for batch in batches_of(data, VIEWS, 5, last=4):
        for v, x in enumerate(batch["views"]):
            assert (x - x[:, :1]).abs().max() < 1e-4, v
            for key, clip in zip(batch["keys"], x):
                views[key, v].append(clip[0])
    assert len(views) == 20
    assert not any(torch.equal(*of) for of in views.values())  # every epoch shows another crop


def test_a_forked_process_reads_clips_after_its_parent(tmp_path):
    """As loader workers do after an evaluation without any: no thread that the fork left behind is
    waited for."""
    clip = str(write_video(tmp_path / "a.mp4", range(6)))
    whole = read_frames(clip, 4, short=32)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(int(not np.array_equal(whole, read_frames(clip, 4, short=32))))
    )
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 0


def test_evaluation_batches_count_frames_and_leave_out_what_cannot_be_read(tmp_path):
    write_clips(tmp_path, {k: f"{k:03}.mp4" for k in range(12)})
    (tmp_path / "003.mp4").write_bytes(TEXT)
    rows = [(f"{k:03}.mp4", caption(k), ("train", "val", "test")[max(0, k - 9)]) for k in range(12)]
    path, sizes = write_rows(tmp_path / "a.csv", ["video", "caption", "split"], rows), []

    class Model(torch.nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x.mean((1, 2, 3, 4))[:, None], None, x.mean((1, 3, 4))

    view = common.EvalTransform(32, (0,) * 3, (1,) * 3)
    data = common.load_data(str(path), "train", frames=4)
    index, _, features, bad, _ = evaluation.embed.encode_images(
        Model(), data, view, CPU, batch=16, workers=2
    )
    assert max(sizes) == 4 and len(features) == 9 and [*bad] == ["003.mp4"]
    assert index.tolist() == [k for k in range(10) if k != 3]


# ---- tars ----
def test_the_index_of_tars_is_made_anew_when_they_change(tmp_path):
    write_tar(tmp_path / "0.tar", tar_samples(range(30), "jpg", "txt"))
    assert len(data_tars.index_tars("x", "train", [tmp_path / "0.tar"], DataOptions())) == 30
    write_tar(tmp_path / "0.tar", tar_samples(range(40), "jpg", "txt"))
    data = data_tars.index_tars("x", "train", [tmp_path / "0.tar"], DataOptions())
    assert len(data) == 40 and data.captions(39) == [caption(39), caption(39, 1)]
    write_tar(tmp_path / "1.tar", tar_samples(range(5), "jpg", "txt"))
    both = data_tars.index_tars(
        "x", "train", [tmp_path / "0.tar", tmp_path / "1.tar"], DataOptions()
    )
    assert both.key(3) == "0/000003"
    assert both.key(41) == "1/000001"
    assert both.shards.tolist() == [0] * 40 + [1] * 5


@pytest.mark.parametrize(
    "damage", [lambda c: c[: len(c) // 2], lambda c: b"x" * 512 + c[512:], lambda c: TEXT]
)
def test_a_tar_that_cannot_be_read_to_its_end_is_named(damage, tmp_path):
    content = write_tar(tmp_path / "a.tar", tar_samples(range(20), "jpg", "txt")).read_bytes()
    (tmp_path / "a.tar").write_bytes(damage(content))
    complains(tmp_path / "a.tar", "train", "a.tar: not a tar that can be read to its end")


def test_samples_without_caption_are_left_out_of_an_index(tmp_path):
    samples = tar_samples(range(12), "jpg", "txt")
    del samples["000005"]["txt"]
    samples["000007"]["txt"] = b" "
    write_tar(tmp_path / "train-0.tar", samples)
    write_tar(tmp_path / "test-0.tar", tar_samples(range(30, 32), "jpg", "txt"))
    train = common.load_data(str(tmp_path), "train", holdout_fraction=0.01)
    assert "2 samples left out, first 000005" in train.note
    keys = {*train.keys(), *common.load_data(str(tmp_path), "val", holdout_fraction=0.01).keys()}
    assert keys == {*samples} - {"000005", "000007"}


def test_a_batch_is_divided_by_the_processes(tmp_path, monkeypatch):
    data = all_rows(write_captions(tmp_path, 12))
    monkeypatch.setattr(data_batches, "world_size", lambda: 5)
    with pytest.raises(UserError, match="a batch of 8 is not divisible by 5 processes"):
        batches_of(data, VIEWS, 8)
