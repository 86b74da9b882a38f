"""Training batches of images, clips and sets in memory: their order, their views, and what cannot be read."""

import itertools
import multiprocessing
import os
from collections import defaultdict

import common
from contrastive import evaluation
from contrastive.data.batches import SHARDS_AT_ONCE, epoch_batches, epoch_order
from contrastive.data.frames import read_frames
from contrastive.engine import processes

import numpy as np
import pytest
import torch

import launch
from helpers import (
    CPU,
    TEXT,
    TRUNCATED,
    batches_of,
    caption,
    counted,
    numbers,
    tar_samples,
    write_captions,
    write_clips,
    write_images,
    write_rows,
    write_tar,
    write_video,
)

VIEWS = [common.Augment(16, 0.5, 0.5, randaugment=(2, 7)),
         common.Augment(16, 0.2, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)]
PLAIN = common.Augment(32, squash=True)  # nothing random, nothing cut off: its views can be read


def same_batch(a, b):
    """Are keys, captions, epoch, views and draws of two batches the same?"""
    words = (a["keys"], a["captions"], a["epoch"]) == (b["keys"], b["captions"], b["epoch"])
    views = all(torch.equal(x, y) for x, y in zip(a["views"], b["views"], strict=True))
    return words and views and np.array_equal(a["draws"], b["draws"])


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """{kind: training data}: 36 pictures of two sizes (39 in the folder), 18 clips with random frames (of 20), and a
    set in memory."""
    root = tmp_path_factory.mktemp("sets")
    pictures = write_captions(root / "pictures", 39)
    write_images(root / "pictures", range(0, 39, 3), height=31, width=17)
    clips = {k: f"{k:03}.mp4" for k in [*range(19), 31]}
    write_clips(root / "clips", clips)
    table = write_rows(root / "clips" / "a.csv", ["video", "caption"], [(x, caption(k)) for k, x in clips.items()])
    return {"pictures": common.load_data(str(pictures), "train"), "memory": common.load_data("emoji", "val"),
            "clips": common.load_data(str(table), "train", frames=4, frame_sampling="random")}


# ---------------------------------------------------- the order -----------------------------------------------------
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
    read, sizes = forty[order], np.bincount(forty)  # (n,) the shard of each row in the order of reading; (40,)
    turns = np.argsort([np.flatnonzero(read == s)[0] for s in range(40)])  # shards as they are begun
    windows = [turns[:SHARDS_AT_ONCE], turns[SHARDS_AT_ONCE:2 * SHARDS_AT_ONCE], turns[2 * SHARDS_AT_ONCE:]]
    at = np.cumsum([0, *(sizes[w].sum() for w in windows)])
    for window, start, stop in zip(windows, at, at[1:]):
        assert set(read[start:stop].tolist()) == set(window.tolist())  # a window is these shards, whole
        assert (np.diff(order[start:stop]) == 1).mean() < 0.1 and len(set(read[start:start + 32].tolist())) > 6  # mixed
    assert not np.array_equal(np.sort(windows[0]), np.arange(16))  # the shards come in random order too


@pytest.mark.parametrize("many", [False, True])
def test_epoch_batches(many, forty):
    n, size, shards = (len(forty), 32, forty) if many else (50, 12, None)
    per_epoch = n // size
    steps = list(epoch_batches(n, size, 7, 0, 2 * per_epoch + 1, shards))
    assert [e for e, _ in steps] == [0] * per_epoch + [1] * per_epoch + [2]
    for e in (0, 1):
        rows = np.concatenate([b for epoch, b in steps if epoch == e])  # what is left waits for another epoch
        assert np.array_equal(rows, epoch_order(n, 7, e, shards)[:per_epoch * size])


def test_batches_of_forty_tars_are_read_in_windows(tmp_path):
    for s in range(40):
        write_tar(tmp_path / f"train-{s:02}.tar", tar_samples(range(2 * s, 2 * s + 2), "png", "txt"))
    for split, start in (("val", 80), ("test", 82)):
        write_tar(tmp_path / f"{split}.tar", tar_samples(range(start, start + 2), "png", "txt"))
    data = common.load_data(str(tmp_path), "train")
    keys = [k for b in batches_of(data, VIEWS, 8, last=10) for k in b["keys"]]
    assert keys == [data.key(i) for i in epoch_order(80, 3, 0, np.arange(80) // 2)]


# ---------------------------------------------------- the same run --------------------------------------------------
@pytest.mark.parametrize("kind", ["pictures", "clips", "memory"])
def test_batches_do_not_depend_on_workers_nor_on_where_they_start(kind, sets):
    data, size = sets[kind], {"memory": 50}.get(kind, 6)
    whole = list(batches_of(data, VIEWS, size, last=7))
    assert all(same_batch(a, b) for a, b in zip(whole, batches_of(data, VIEWS, size, last=7, workers=2), strict=True))
    assert all(same_batch(a, b) for a, b in zip(whole[4:], batches_of(data, VIEWS, size, 4, 7), strict=True))
    assert not any(same_batch(a, b) for a, b in zip(whole, batches_of(data, VIEWS, size, last=7, seed=4)))
    shape = (size, 4, 3, 16, 16) if kind == "clips" else (size, 3, 16, 16)
    assert [tuple(v.shape) for v in whole[0]["views"]] == [shape] * 2 and whole[0]["draws"].shape == (size, 32)
    rows = {k: i for i, k in enumerate(data.keys())}
    for b in whole:
        assert b["captions"] == [data.captions(rows[k]) for k in b["keys"]] and b["rows"].tolist() == [
            rows[k] for k in b["keys"]]
    epoch = len(data) // size
    assert len({k for b in whole[:epoch] for k in b["keys"]}) == epoch * size


@pytest.mark.parametrize("view", [common.Augment(16, 0.2), common.Augment(16, 1, 0, 1, 0.8)], ids=["crop", "light"])
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
    (left, bad_left), (right, bad_right) = (torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2))
    alone = batches_of(data, VIEWS, last=7)
    for a, b, whole in zip(left, right, counted(alone), strict=True):
        assert a["keys"] + b["keys"] == whole["keys"] and a["captions"] + b["captions"] == whole["captions"]
        assert a["epoch"] == whole["epoch"]
        assert all(torch.equal(torch.cat(v), w) for *v, w in zip(a["views"], b["views"], whole["views"]))
        assert np.array_equal(np.concatenate([a["draws"], b["draws"]]), whole["draws"])
    assert bad_left == bad_right == [*alone.bad] == [bad]
    assert (tmp_path / "bad_samples.txt").read_text().count("\n") == 1


# ---------------------------------------------------- bad samples ---------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced_by_the_next_counted_and_listed(workers, tmp_path):
    """Rows 3, 4 (in a row) and 35 (the last) of the training split; by the same rule with and without workers."""
    data = common.load_data(str(write_captions(tmp_path, 39)), "train")
    keys = list(data.keys())
    (tmp_path / keys[3]).write_bytes(TRUNCATED)
    (tmp_path / keys[4]).write_bytes(TEXT)
    (tmp_path / keys[35]).unlink()
    batches = batches_of(data, VIEWS, last=12, workers=workers, folder=tmp_path)
    seen = [k for b in counted(batches) for k in b["keys"]]
    after = {keys[3]: keys[5], keys[4]: keys[5], keys[35]: keys[0]}
    order = [keys[i] for _, batch in epoch_batches(36, 6, 3, 0, 12) for i in batch]
    assert seen == [after.get(k, k) for k in order]
    lines = (tmp_path / "bad_samples.txt").read_text(encoding="utf8").splitlines()
    reasons = dict(line.split("\t") for line in lines)
    assert set(batches.bad) == set(after) == set(reasons) and len(lines) == 3  # each once in two epochs
    assert "truncated" in reasons[keys[3]] and "cannot identify" in reasons[keys[4]]
    assert "No such file" in reasons[keys[35]]


def test_a_question_goes_with_the_sample_that_was_read(tmp_path):
    names = write_images(tmp_path, range(8))
    (tmp_path / names[3]).write_bytes(TEXT)
    paths = [str(tmp_path / name) for name in names]
    data = common.Data("asked", "train", common.make_table([["x"]] * 8, names, paths, question=names))
    batch = next(iter(batches_of(data, [PLAIN], 8, last=1, side=32)))
    assert sorted(batch["rows"].tolist()) == [0, 1, 2, 4, 4, 5, 6, 7] and 3 in batch["index"]
    assert batch["keys"] == [names[i] for i in batch["rows"]]


# ---------------------------------------------------- clips ---------------------------------------------------------
def test_random_frames_change_with_the_epoch_and_a_broken_clip_is_replaced(sets, tmp_path):
    names = {k: f"{k:03}.mp4" for k in range(12)}
    write_clips(tmp_path, names)
    broken = tmp_path / names[4]
    broken.write_bytes(broken.read_bytes()[:len(broken.read_bytes()) * 6 // 10])
    rows = [(x, caption(k), "train") for k, x in names.items()] + [(names[0], "x", "val"), (names[0], "x", "test")]
    path = write_rows(tmp_path / "a.csv", ["video", "caption", "split"], rows)
    data = common.load_data(str(path), "train", frames=4, frame_sampling="random")
    batches, found = batches_of(data, [PLAIN], 12, last=2, side=32), [{}, {}]
    mean, std = (torch.tensor(x)[:, None, None] for x in (batches.transform.mean, batches.transform.std))
    for batch in counted(batches):
        for key, clip in zip(batch["keys"], batch["views"][0] * std + mean):
            found[batch["epoch"]].setdefault(key, []).append(numbers((clip * 255).round().numpy()))
    assert [*batches.bad] == [names[4]]
    for seen in found:
        assert {key: len(clips) for key, clips in seen.items()} == {
            x: 1 + (k == 5) for k, x in names.items() if k != 4}
        for key, clips in seen.items():  # one frame of each quarter
            assert all(2 * j <= i - 8 * int(key[:3]) < 2 * (j + 1) for clip in clips for j, i in enumerate(clip))
    assert sum(found[0][key] != found[1][key] for key in found[0]) > 6


def test_all_frames_of_a_clip_get_the_same_view(tmp_path):
    """Clips that stand still, without loss: their views must stand still too."""
    for k in range(10):
        write_video(tmp_path / f"{k:03}.mkv", [k + 1] * 4, "ffv1", pixels="bgr0")
    rows = [(f"{k:03}.mkv", f"{k}") for k in range(10)]
    data = common.load_data(str(write_rows(tmp_path / "a.csv", ["video", "caption"], rows)), "train", frames=4)
    views = defaultdict(list)
    for batch in batches_of(data, VIEWS, 5, last=4):
        for v, x in enumerate(batch["views"]):
            assert (x - x[:, :1]).abs().max() < 1e-4, v
            for key, clip in zip(batch["keys"], x):
                views[key, v].append(clip[0])
    assert len(views) == 20 and not any(torch.equal(*of) for of in views.values())  # every epoch shows another crop


def test_a_forked_process_reads_clips_after_its_parent(tmp_path):
    """As loader workers do after an evaluation without any: no thread that the fork left behind is waited for."""
    clip = str(write_video(tmp_path / "a.mp4", range(6)))
    whole = read_frames(clip, 4, short=32)
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(int(
        not np.array_equal(whole, read_frames(clip, 4, short=32)))))
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
    view, data = common.EvalTransform(32, (0,) * 3, (1,) * 3), common.load_data(str(path), "train", frames=4)
    index, _, features, bad = evaluation.embed.encode_images(Model(), data, view, CPU, batch=16, workers=2)
    assert max(sizes) == 4 and len(features) == 9 and [*bad] == ["003.mp4"]
    assert index.tolist() == [k for k in range(10) if k != 3]
