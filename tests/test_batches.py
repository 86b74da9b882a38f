"""Training batches of images, clips, sets in memory and tars: their order, their views, and what
cannot be read."""

import itertools
from collections import defaultdict

import common
from contrastive import evaluation
from contrastive.core import processes
from contrastive.core.processes import UserError
from contrastive.data import batches as data_batches
from contrastive.data.batches import SHARDS_AT_ONCE, epoch_batches, epoch_order

import numpy as np
import pytest
import torch

import launch
from helpers import (
    CPU, TEXT, TRUNCATED, all_rows, assert_close, caption, complains, numbers, tar_samples,
    write_captions, write_clips, write_images, write_rows, write_tar, write_video)

VIEWS = [
    common.Augment(16, 0.5, 0.5, randaugment=(2, 7)),
    common.Augment(16, 0.2, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5),
]
PLAIN = common.Augment(32, squash=True)  # nothing random, nothing cut off: its views can be read


def batches_of(
        data, augments, size=6, first=0, last=6, *, workers=0, folder=None, seed=3, side=16):
    """Training batches on this CPU, in which any number of samples may be bad."""
    transform = common.EvalTransform(side, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    return common.Batches(
        data, augments, transform, size, seed,
        first=first, last=last, device=CPU, workers=workers, max_bad_fraction=1.0, folder=folder)


def counted(batches):
    """The batches, and their bad samples are counted as a run counts them."""
    for step, batch in enumerate(batches, batches.first):
        batches.count_bad(batch["bad"], step)
        yield batch


def check_same(batch, other):
    """Keys, captions, epoch, views and draws of two batches are the same, bit by bit."""
    for name in ("keys", "captions", "epoch"):
        assert batch[name] == other[name]
    for view, other_view in zip(batch["views"], other["views"], strict=True):
        assert torch.equal(view, other_view)
    assert np.array_equal(batch["draws"], other["draws"])


def write_table(folder, files):
    """A csv of videos, with the words of each name."""
    rows = [(name, f"words of {name}") for name in files]
    return write_rows(folder / "a.csv", ["video", "caption"], rows)


def write_clip_files(folder, count):
    """A csv of clips 000.mp4, 001.mp4, ..."""
    names = [f"{k:03}.mp4" for k in range(count)]
    write_clips(folder, dict(enumerate(names)))
    return write_table(folder, names)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """{kind: training data}: pictures of two sizes, clips with random frames, a set in memory."""
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
    """(M,) the shard of each row: forty shards, 0, 3, 6, ..., of 5 to 24 rows."""
    sizes = np.random.default_rng(0).integers(5, 25, 40)
    return np.repeat(3 * np.arange(40), sizes)


def test_many_shards_are_read_a_few_at_a_time(forty):
    order = epoch_order(len(forty), 3, 1, forty)
    numbers, first_reads = np.unique(forty[order], return_index=True)
    turns = numbers[np.argsort(first_reads)]  # shards as they are begun
    assert (np.diff(turns) < 0).any()  # in random order, too
    start = 0
    for first in range(0, 40, SHARDS_AT_ONCE):
        window = turns[first : first + SHARDS_AT_ONCE]
        rows = np.flatnonzero(np.isin(forty, window))
        stop = start + len(rows)
        part = order[start:stop]
        assert sorted(part) == rows.tolist()  # a window is these shards, whole
        assert (np.diff(part) == 1).mean() < 0.1  # mixed
        start = stop


def test_epochs_have_an_order_each_without_the_incomplete_batch(forty):
    num_rows = len(forty)
    num_steps = num_rows // 32
    num_used = num_steps * 32
    steps = epoch_batches(num_rows, 32, 7, 0, 2 * num_steps, shards=forty)
    epochs, batches = zip(*steps)
    assert np.array_equal(epochs, np.repeat([0, 1], num_steps))
    orders = np.concatenate(batches).reshape(2, num_used)
    for epoch, rows in enumerate(orders):
        order = epoch_order(num_rows, 7, epoch, forty)
        assert np.array_equal(rows, order[:num_used])
    assert not np.array_equal(*orders)
    other_seed = epoch_order(num_rows, 8, 0, forty)
    assert not np.array_equal(orders[0], other_seed[:num_used])


def test_batches_of_many_tars_are_read_in_windows(tmp_path):
    for shard in range(20):
        first = 2 * shard
        samples = tar_samples([first, first + 1], "png", "txt")
        write_tar(tmp_path / f"train-{shard:02}.tar", samples)
    batches = batches_of(all_rows(tmp_path), VIEWS, 8, last=5)
    rows = np.concatenate([batch["rows"] for batch in batches])
    shards = np.arange(40) // 2
    assert np.array_equal(rows, epoch_order(40, 3, 0, shards))


# ---- the same run ----
@pytest.mark.parametrize("kind", ["pictures", "clips", "memory"])
def test_batches_do_not_depend_on_workers_nor_on_where_they_start(kind, sets):
    data = sets[kind]
    whole = list(batches_of(data, VIEWS, last=7))
    with_workers = batches_of(data, VIEWS, last=7, workers=2)
    for batch, other in zip(whole, with_workers, strict=True):
        check_same(batch, other)
    resumed = batches_of(data, VIEWS, first=4, last=7)
    for batch, other in zip(whole[4:], resumed, strict=True):
        check_same(batch, other)


@pytest.mark.parametrize("kind", ["pictures", "memory"])
def test_batches_have_the_captions_and_pixels_of_their_rows(kind, sets):
    """Without random crops those of evaluation."""
    data = sets[kind]
    num_steps = len(data) // 6  # an epoch
    batches = batches_of(data, [common.Augment(16)], last=num_steps)
    rows = []
    for batch in batches:
        rows += batch["rows"].tolist()
        (views,) = batch["views"]
        for row, captions, view in zip(batch["rows"], batch["captions"], views):
            assert captions == data.captions(row)
            pixels = batches.transform(data.read(row))
            assert_close(view, pixels, 0.1)
    assert len(rows) == 6 * num_steps
    assert len(set(rows)) == len(rows)


OTHER_VIEWS = {
    "crop": common.Augment(16, scale_min=0.2),
    "light": common.Augment(16, jitter_p=1, brightness=0.8)}


@pytest.mark.parametrize("view", OTHER_VIEWS)
@pytest.mark.parametrize("kind", ["pictures", "memory"])
def test_views_of_another_seed_epoch_or_place_are_others(kind, view, sets):
    data = sets[kind]
    augments = [OTHER_VIEWS[view]] * 2
    views = defaultdict(list)  # {row: of two seeds, two epochs and two places}
    size = len(data) // 2
    for seed in (3, 4):
        for batch in batches_of(data, augments, size, last=4, seed=seed):
            first, second = batch["views"]
            for row, *pair in zip(batch["rows"], first, second):
                views[row] += pair
    # of some rows one is in the incomplete batch
    whole = [images for images in views.values() if len(images) == 8]
    for first, second in itertools.combinations(range(8), 2):
        num_equal = 0
        for images in whole:
            num_equal += torch.equal(images[first], images[second])
        assert num_equal < 0.1 * len(data)


def test_two_processes_get_the_batches_of_one(tmp_path):
    data = all_rows(write_captions(tmp_path, 39))
    bad = data.key(11)
    (tmp_path / bad).write_bytes(TEXT)
    alone = list(batches_of(data, VIEWS, last=7))

    def work(rank):
        processes.join(cpu=True)
        batches = batches_of(data, VIEWS, last=7, folder=tmp_path)
        half = slice(3 * rank, 3 * rank + 3)
        for batch, whole in zip(counted(batches), alone, strict=True):
            part = {"epoch": whole["epoch"]}
            for name in ("keys", "captions", "draws"):
                part[name] = whole[name][half]
            part["views"] = [view[half] for view in whole["views"]]
            check_same(batch, part)
        assert list(batches.bad) == [bad]

    codes = [code for code, _ in launch.ranks(tmp_path, work)]
    assert codes == [0, 0]
    lines = (tmp_path / "bad_samples.txt").read_text().splitlines()
    assert len(lines) == 1


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
    row_read = np.arange(36)
    row_read[[3, 4, 35]] = [5, 5, 0]
    batches = batches_of(data, VIEWS, last=12, workers=2, folder=tmp_path)
    order = epoch_batches(36, 6, 3, 0, 12)
    for batch, (_, index) in zip(counted(batches), order, strict=True):
        rows = row_read[index]
        assert np.array_equal(batch["rows"], rows)
        assert batch["keys"] == [keys[row] for row in rows]
        assert batch["captions"] == [data.captions(row) for row in rows]
    lines = (tmp_path / "bad_samples.txt").read_text(encoding="utf8").splitlines()
    assert len(lines) == 3  # each once in two epochs
    reasons = dict(line.split("\t") for line in lines)
    assert reasons == batches.bad
    assert "truncated" in reasons[keys[3]]
    assert "cannot identify" in reasons[keys[4]]
    assert "No such file" in reasons[keys[35]]


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
    mean = torch.tensor(batches.transform.mean).view(3, 1, 1)
    std = torch.tensor(batches.transform.std).view(3, 1, 1)
    frames = defaultdict(list)  # {key: numbers of the frames in each epoch}
    for batch in batches:
        pixels = batch["views"][0] * std + mean
        for key, clip in zip(batch["keys"], pixels * 255):
            frames[key].append(numbers(clip))
    num_changed = 0
    for key, (first, second) in frames.items():
        num_changed += first != second
        start = 8 * int(key[:3])
        parts = [(number - start) // 2 for number in first]
        assert parts == [0, 1, 2, 3]
    assert num_changed > 15


def test_all_frames_of_a_clip_get_the_same_view(tmp_path):
    """Clips that stand still, without loss: their views must stand still too."""
    names = ["0.mkv", "1.mkv", "2.mkv", "3.mkv"]
    for k, name in enumerate(names):
        frames = [k + 1] * 4
        write_video(tmp_path / name, frames, "ffv1", pixels="bgr0")
    data = all_rows(write_table(tmp_path, names), frames=4)
    (batch,) = batches_of(data, VIEWS, 4, last=1)
    for view in batch["views"]:
        assert_close(view, view[:, :1].expand_as(view), 1e-4)


def test_evaluation_batches_count_frames_and_leave_out_what_cannot_be_read(tmp_path, capsys):
    data = all_rows(write_clip_files(tmp_path, 10), frames=4)
    (tmp_path / "003.mp4").write_bytes(TEXT)
    view = common.EvalTransform(32, (0,) * 3, (1,) * 3)
    sizes = []

    def forward(rows, pixels):
        sizes.append(len(pixels))
        return (pixels.mean((1, 2, 3, 4)),)

    outputs = evaluation.embed.outputs_of_images(
        torch.nn.Identity(), data, view, CPU, forward=forward, batch=16, workers=2)
    assert max(sizes) == 4
    assert outputs.index.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert outputs.tensors[0].shape == (9,)
    assert list(outputs.unreadable) == ["003.mp4"]
    assert "1 of 10 images cannot be read" in capsys.readouterr().out


def test_evaluation_counts_images_that_are_identical():
    pixels = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    pixels[0] = 9
    table = common.make_table([["a"], ["b"], ["c"]], ["x", "y", "z"])
    data = common.Data("own", "test", table, pixels=pixels)
    view = common.EvalTransform(8, (0,) * 3, (1,) * 3)
    outputs = evaluation.embed.outputs_of_images(
        torch.nn.Identity(), data, view, CPU, forward=lambda rows, pixels: (pixels,))
    assert outputs.num_identical == 2


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
    path = write_tar(tmp_path / "a.tar", tar_samples(range(20), "jpg", "txt"))
    content = path.read_bytes()
    path.write_bytes(b"x" * first + content[first:last])
    complains(path, "train", "a.tar: not a tar that can be read to its end")
