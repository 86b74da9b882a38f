"""Training batches of images, clips, sets in memory and tars: their order, their views, and what
cannot be read."""

import itertools
import multiprocessing
import os
from collections import defaultdict

import common
from contrastive import evaluation
from contrastive.core import processes
from contrastive.core.processes import UserError
from contrastive.data import batches as data_batches
from contrastive.data.batches import SHARDS_AT_ONCE, epoch_batches, epoch_order
from contrastive.data.frames import read_frames

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


def check_same(batch, other):
    """Keys, captions, epoch, views and draws of two batches are the same, bit by bit."""
    for name in ("keys", "captions", "epoch"):
        assert batch[name] == other[name]
    for view, other_view in zip(batch["views"], other["views"], strict=True):
        assert torch.equal(view, other_view)
    assert np.array_equal(batch["draws"], other["draws"])


def write_table(folder, files):
    """A csv of files, with the words of each name."""
    rows = [(name, f"words of {name}") for name in files]
    return write_rows(folder / "a.csv", ["video", "caption"], rows)


def write_clip_files(folder, count):
    """A csv of clips 000.mp4, 001.mp4, ..."""
    names = [f"{k:03}.mp4" for k in range(count)]
    write_clips(folder, dict(enumerate(names)))
    return write_table(folder, names)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """{kind: training data}: 39 pictures of two sizes, 20 clips with random frames, and a set in
    memory."""
    root = tmp_path_factory.mktemp("sets")
    pictures = write_captions(root / "pictures", 39)
    write_images(root / "pictures", range(0, 39, 3), height=31, width=17)
    clips = write_clip_files(root / "clips", 20)
    return {
        "pictures": all_rows(pictures),
        "memory": common.load_data("emoji", "val"),
        "clips": all_rows(clips, frames=4, frame_sampling="random"),
    }


# ---- the order ----
@pytest.fixture(scope="module")
def forty():
    """(M,) the shard of each row: 40 shards of 5 to 24 rows."""
    return np.repeat(np.arange(40), np.random.default_rng(0).integers(5, 25, 40))


def test_order_is_a_pure_function_of_seed_and_epoch(forty):
    order = epoch_order(len(forty), 3, 1, forty)
    assert sorted(order) == list(range(len(forty)))
    assert np.array_equal(order, epoch_order(len(forty), 3, 1, 7 * forty + 2))  # of no number
    for seed, epoch in ((3, 2), (4, 1)):
        assert not np.array_equal(order, epoch_order(len(forty), seed, epoch, forty))


def test_many_shards_are_read_a_few_at_a_time(forty):
    order = epoch_order(len(forty), 3, 1, forty)
    shards = forty[order]
    _, first_reads = np.unique(shards, return_index=True)
    turns = np.argsort(first_reads)  # shards as they are begun
    start = 0
    for first in range(0, 40, SHARDS_AT_ONCE):
        window = turns[first : first + SHARDS_AT_ONCE]
        stop = start + np.isin(forty, window).sum()
        assert set(shards[start:stop]) == set(window)  # a window is these shards, whole
        assert len(set(shards[start : start + 32])) > 6  # mixed
        assert (np.diff(order[start:stop]) == 1).mean() < 0.1
        start = stop
    # the shards come in random order, too
    assert sorted(turns[:SHARDS_AT_ONCE]) != list(range(SHARDS_AT_ONCE))


def test_epochs_have_an_order_each_without_the_incomplete_batch(forty):
    num_rows, per_epoch = len(forty), len(forty) // 32
    steps = list(epoch_batches(num_rows, 32, 7, 0, 2 * per_epoch, shards=forty))
    epochs, batches = zip(*steps)
    assert list(epochs) == [0] * per_epoch + [1] * per_epoch
    rows = np.concatenate(batches)
    num_used = per_epoch * 32
    assert np.array_equal(rows[:num_used], epoch_order(num_rows, 7, 0, forty)[:num_used])
    assert np.array_equal(rows[num_used:], epoch_order(num_rows, 7, 1, forty)[:num_used])


def test_batches_of_many_tars_are_read_in_windows(tmp_path):
    for shard in range(20):
        samples = tar_samples([2 * shard, 2 * shard + 1], "png", "txt")
        write_tar(tmp_path / f"train-{shard:02}.tar", samples)
    rows = []
    for batch in batches_of(all_rows(tmp_path), VIEWS, 8, last=5):
        rows += batch["rows"].tolist()
    assert rows == epoch_order(40, 3, 0, np.arange(40) // 2).tolist()


# ---- the same run ----
@pytest.mark.parametrize("kind", ["pictures", "clips", "memory"])
def test_batches_do_not_depend_on_workers_nor_on_where_they_start(kind, sets):
    whole = list(batches_of(sets[kind], VIEWS, last=7))
    with_workers = list(batches_of(sets[kind], VIEWS, last=7, workers=2))
    resumed = list(batches_of(sets[kind], VIEWS, first=4, last=7))
    for batch, other in zip(whole, with_workers, strict=True):
        check_same(batch, other)
    for batch, other in zip(whole[4:], resumed, strict=True):
        check_same(batch, other)


@pytest.mark.parametrize("kind, shape", [
    ("pictures", (6, 3, 16, 16)), ("clips", (6, 4, 3, 16, 16)), ("memory", (6, 3, 16, 16))])
def test_batches_have_the_captions_of_their_rows(kind, shape, sets):
    data = sets[kind]
    rows = []
    for batch in batches_of(data, VIEWS, last=len(data) // 6):
        assert batch["views"][0].shape == batch["views"][1].shape == shape
        assert batch["draws"].shape == (6, 32)
        for row, key, captions in zip(batch["rows"], batch["keys"], batch["captions"]):
            assert (key, captions) == (data.key(row), data.captions(row))
            rows.append(row)
    assert len(set(rows)) == len(rows) == len(data) // 6 * 6  # an epoch


@pytest.mark.parametrize(
    "view", [common.Augment(16, 0.2), common.Augment(16, 1, 0, 1, 0.8)], ids=["crop", "light"]
)
@pytest.mark.parametrize("kind", ["pictures", "memory"])
def test_views_of_another_seed_epoch_or_place_are_others(kind, view, sets):
    data = sets[kind]
    views = defaultdict(list)
    for seed in (3, 4):
        for batch in batches_of(data, [view, view], len(data) // 2, last=4, seed=seed):
            for row, first, second in zip(batch["rows"], *batch["views"]):
                views[row] += [first, second]
    # two seeds, epochs and views; a row may be in the incomplete batch
    whole = [images for images in views.values() if len(images) == 8]
    assert len(whole) > 0.9 * len(data)
    for k, other in itertools.combinations(range(8), 2):
        assert np.mean([torch.equal(images[k], images[other]) for images in whole]) < 0.1


def test_two_processes_get_the_batches_of_one(tmp_path):
    data = all_rows(write_captions(tmp_path, 39))
    bad = data.key(11)
    (tmp_path / bad).write_bytes(TEXT)

    def work(rank):
        processes.join(cpu=True)
        batches = batches_of(data, VIEWS, last=7, folder=tmp_path)
        torch.save([list(counted(batches)), list(batches.bad)], tmp_path / f"{rank}.pt")

    assert [code for code, _ in launch.ranks(tmp_path, work)] == [0, 0]
    left, bad_left = torch.load(tmp_path / "0.pt", weights_only=False)
    right, bad_right = torch.load(tmp_path / "1.pt", weights_only=False)
    alone = batches_of(data, VIEWS, last=7)
    for first, second, whole in zip(left, right, counted(alone), strict=True):
        views = [torch.cat(parts) for parts in zip(first["views"], second["views"])]
        check_same(whole, {
            "keys": first["keys"] + second["keys"],
            "captions": first["captions"] + second["captions"],
            "epoch": first["epoch"],
            "views": views,
            "draws": np.concatenate([first["draws"], second["draws"]])})
    assert bad_left == bad_right == list(alone.bad) == [bad]
    assert (tmp_path / "bad_samples.txt").read_text().count("\n") == 1


def test_batch_is_divided_by_the_processes(sets, monkeypatch):
    monkeypatch.setattr(data_batches, "world_size", lambda: 5)
    with pytest.raises(UserError, match="a batch of 8 is not divisible by 5 processes"):
        batches_of(sets["pictures"], VIEWS, 8)


# ---- bad samples ----
def test_bad_samples_are_replaced_by_the_next_counted_and_listed(tmp_path):
    """Rows 3, 4 (in a row) and the last."""
    data = all_rows(write_captions(tmp_path, 36))
    keys = list(data.keys())
    (tmp_path / keys[3]).write_bytes(TRUNCATED)
    (tmp_path / keys[4]).write_bytes(TEXT)
    (tmp_path / keys[35]).unlink()
    replaced = {keys[3]: keys[5], keys[4]: keys[5], keys[35]: keys[0]}
    batches = batches_of(data, VIEWS, last=12, workers=2, folder=tmp_path)
    order = epoch_batches(36, 6, 3, 0, 12)
    for batch, (_, rows) in zip(counted(batches), order, strict=True):
        assert batch["keys"] == [replaced.get(keys[row], keys[row]) for row in rows]
    lines = (tmp_path / "bad_samples.txt").read_text(encoding="utf8").splitlines()
    reasons = dict(line.split("\t") for line in lines)
    assert len(lines) == 3  # each once in two epochs
    assert set(batches.bad) == set(reasons) == set(replaced)
    assert "truncated" in reasons[keys[3]]
    assert "cannot identify" in reasons[keys[4]]
    assert "No such file" in reasons[keys[35]]


def test_question_goes_with_the_sample_that_was_read(tmp_path):
    names = write_images(tmp_path, range(8))
    (tmp_path / names[3]).write_bytes(TEXT)
    captions = [[name] for name in names]
    paths = [f"{tmp_path}/{name}" for name in names]
    table = common.make_table(captions, names, paths, question=names)
    data = common.Data("asked", "train", table)
    (batch,) = batches_of(data, [PLAIN], 8, last=1, side=32)
    assert 3 in batch["index"]
    assert sorted(batch["rows"]) == [0, 1, 2, 4, 4, 5, 6, 7]
    for row, key, texts in zip(batch["rows"], batch["keys"], batch["captions"]):
        assert (key, texts) == (names[row], captions[row])


def test_hundred_bad_samples_in_a_row_are_the_end(tmp_path):
    (tmp_path / "a.mp4").write_bytes(TEXT)
    data = all_rows(write_table(tmp_path, ["a.mp4"]), frames=2)
    data = data.select(np.zeros(110, int))
    with pytest.raises(UserError, match="^100 samples in a row cannot be read, the first: .*mp4: "):
        list(batches_of(data, VIEWS, 4, last=2))


# ---- clips ----
def test_random_frames_change_with_the_epoch_and_lie_one_in_each_part(sets):
    data = sets["clips"]
    batches = batches_of(data, [PLAIN], 10, last=4, side=32)
    mean, std = torch.tensor(batches.transform.mean), torch.tensor(batches.transform.std)
    frames = defaultdict(list)  # {key: numbers of the frames in each epoch}
    for batch in batches:
        pixels = batch["views"][0] * std[:, None, None] + mean[:, None, None]
        for key, clip in zip(batch["keys"], (pixels * 255).round()):
            frames[key].append(numbers(clip))
    num_changed = 0
    for key, (first, second) in frames.items():
        num_changed += first != second
        for k, number in enumerate(first):
            assert 2 * k <= number - 8 * int(key[:3]) < 2 * (k + 1)
    assert num_changed > 15


def test_all_frames_of_a_clip_get_the_same_view(tmp_path):
    """Clips that stand still, without loss: their views must stand still too."""
    names = [f"{k:03}.mkv" for k in range(6)]
    for k, name in enumerate(names):
        write_video(tmp_path / name, [k + 1] * 4, "ffv1", pixels="bgr0")
    data = all_rows(write_table(tmp_path, names), frames=4)
    views = defaultdict(list)
    for batch in batches_of(data, VIEWS, last=2):
        for number, view in enumerate(batch["views"]):
            assert (view - view[:, :1]).abs().max() < 1e-4
            for key, clip in zip(batch["keys"], view):
                views[key, number].append(clip)
    for first, second in views.values():  # every epoch shows another crop
        assert not torch.equal(first, second)


def test_forked_process_reads_clips_after_its_parent(tmp_path):
    """As loader workers do after an evaluation without any: no thread that the fork left behind is
    waited for."""
    clip = str(write_video(tmp_path / "a.mp4", range(6)))
    whole = read_frames(clip, 4, short=32)

    def read_in_child():
        os._exit(int(not np.array_equal(whole, read_frames(clip, 4, short=32))))

    child = multiprocessing.get_context("fork").Process(target=read_in_child)
    child.start()
    assert launch.ended(child, 60) == 0


class MeanModel(torch.nn.Module):
    """Its features are mean pixels; it keeps the sizes of its batches."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return x.mean((1, 2, 3, 4))[:, None], None, x.mean((1, 3, 4))


def test_evaluation_batches_count_frames_and_leave_out_what_cannot_be_read(tmp_path):
    data = all_rows(write_clip_files(tmp_path, 10), frames=4)
    (tmp_path / "003.mp4").write_bytes(TEXT)
    view = common.EvalTransform(32, (0,) * 3, (1,) * 3)
    model = MeanModel()
    index, _, features, bad, _ = evaluation.embed.encode_images(
        model, data, view, CPU, batch=16, workers=2)
    assert max(model.sizes) == 4
    assert len(features) == 9
    assert list(bad) == ["003.mp4"]
    assert index.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]


# ---- tars ----
def test_samples_of_several_tars_have_keys_and_shards_of_their_own(tmp_path):
    write_tar(tmp_path / "0.tar", tar_samples(range(4), "jpg", "txt"))
    write_tar(tmp_path / "1.tar", tar_samples(range(2), "jpg", "txt"))
    data = all_rows(tmp_path)
    assert data.column("key")[3:5] == ["0/000003", "1/000000"]
    assert data.captions(3) == [caption(3), caption(3, 1)]
    assert data.shards.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("first, last", [(0, 20_000), (512, None)])
def test_tar_that_cannot_be_read_to_its_end_is_named(first, last, tmp_path):
    content = write_tar(tmp_path / "a.tar", tar_samples(range(20), "jpg", "txt")).read_bytes()
    (tmp_path / "a.tar").write_bytes(b"x" * first + content[first:last])
    complains(tmp_path / "a.tar", "train", "a.tar: not a tar that can be read to its end")


def test_samples_of_a_tar_without_a_caption_are_counted(tmp_path):
    samples = tar_samples(range(12), "jpg", "txt")
    del samples["000005"]["txt"]
    samples["000007"]["txt"] = b" "
    data = all_rows(write_tar(tmp_path / "a.tar", samples))
    assert "2 samples left out, first 000005" in data.note
    assert set(data.keys()) == set(samples) - {"000005", "000007"}
