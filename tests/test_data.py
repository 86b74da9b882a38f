"""Data: every layout, the emoji set, batches, bad samples, streams, views, second texts."""

import itertools
import json
import re
import tarfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torchvision.transforms.v2 import functional as V

import common
from helpers import (CLASSES, TEXT, TRUNCATED, caption, encode, picture, png16, tar_samples, write_captions, write_images,
                     write_parquet_images, write_rows, write_tar)

SPLITS = ("train", "val", "test")
HALVES = {"train": range(0, 8), "val": range(8, 10), "test": range(10, 12)}  # where a layout names its splits


# ---------------------------------------------------- layouts --------------------------------------------------------
def paths_file(name):
    def write(folder):
        rows = [(f"pictures/{x}", caption(i), CLASSES[i % 3]) for i, x in enumerate(write_images(folder / "pictures", range(12)))]
        return write_rows(folder / name, ["image", "caption", "label"], rows), {}
    return write


def class_folders(folder):
    for i in range(12):
        write_images(folder / CLASSES[i % 3], [i])
    return folder, {}


def class_folders_in_splits(folder):
    for word, split in (("train", "train"), ("validation", "val"), ("test", "test")):
        for i in HALVES[split]:
            write_images(folder / word / CLASSES[i % 3], [i])
    return folder, {}


def metadata(name):
    def write(folder):
        write_rows(folder / name, ["file_name", "text"], [(x, caption(i)) for i, x in enumerate(write_images(folder, range(12)))])
        return folder, {}
    return write


def metadata_in_splits(folder):
    for word, split in (("train", "train"), ("validation", "val"), ("test", "test")):
        names = write_images(folder / word, HALVES[split])
        write_rows(folder / word / "metadata.jsonl", ["file_name", "text"], [(x, caption(i)) for i, x in zip(HALVES[split], names)])
    return folder, {}


def tars(*extensions, **options):
    def write(folder):
        write_tar(folder / "shard-000000.tar", tar_samples(range(0, 7), *extensions))
        write_tar(folder / "shard-000001.tar", tar_samples(range(7, 12), *extensions))
        return folder, options
    return write


def one_tar(folder):
    return write_tar(folder / "all.tar", tar_samples(range(12), "jpg", "txt")), {}


def tars_in_splits(folder):
    for split, numbers in HALVES.items():
        write_tar(folder / f"cc-{split}-0000.tar", tar_samples(numbers, "jpg", "txt"))
    return folder, {}


def parquet_folder(folder):
    write_parquet_images(folder / "data" / "train-00000-of-00001.parquet", range(12))
    return folder, {}


def parquet_in_splits(folder):
    for word, split in (("train", "train"), ("validation", "val"), ("test", "test")):
        write_parquet_images(folder / "data" / f"{word}-00000-of-00001.parquet", HALVES[split])
    return folder, {}


# name: (writer, captions of sample i, label of sample i or None, splits named by the layout)
LAYOUTS = {
    "csv": (paths_file("a.csv"), lambda i: [caption(i)], lambda i: i % 3, False),
    "tsv": (paths_file("a.tsv"), lambda i: [caption(i)], lambda i: i % 3, False),
    "jsonl": (paths_file("a.jsonl"), lambda i: [caption(i)], lambda i: i % 3, False),
    "json": (paths_file("a.json"), lambda i: [caption(i)], lambda i: i % 3, False),
    "parquet of paths": (paths_file("a.parquet"), lambda i: [caption(i)], lambda i: i % 3, False),
    "class folders": (class_folders, lambda i: [CLASSES[i % 3].replace("_", " ")], lambda i: i % 3, False),
    "class folders in splits": (class_folders_in_splits, lambda i: [CLASSES[i % 3].replace("_", " ")], lambda i: i % 3, True),
    "metadata.csv": (metadata("metadata.csv"), lambda i: [caption(i)], None, False),
    "metadata.jsonl": (metadata("metadata.jsonl"), lambda i: [caption(i)], None, False),
    "metadata in splits": (metadata_in_splits, lambda i: [caption(i)], None, True),
    "tars jpg txt": (tars("jpg", "txt"), lambda i: [caption(i), caption(i, 1)], None, False),
    "tars jpg cls": (tars("jpg", "cls"), lambda i: [f"class {i % 3}"], lambda i: i % 3, False),
    "tars jpg json": (tars("jpg", "json", caption_column="json.title"), lambda i: [caption(i)], None, False),
    "one tar": (one_tar, lambda i: [caption(i), caption(i, 1)], None, False),
    "tars in splits": (tars_in_splits, lambda i: [caption(i), caption(i, 1)], None, True),
    "parquet of images": (parquet_folder, lambda i: [caption(i)], lambda i: i % 3, False),
    "parquet in splits": (parquet_in_splits, lambda i: [caption(i)], lambda i: i % 3, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, tmp_path):
    write, captions, label, named = LAYOUTS[layout]
    path, options = write(tmp_path)
    numbers = {}
    for split in SPLITS:
        data = common.load_data(str(path), split, **options)
        numbers[split] = [int(Path(data.key(k)).stem) for k in range(len(data))]
        assert (data.split, len(set(numbers[split]))) == (split, len(data))
        for k, i in enumerate(numbers[split]):
            example = data[k]
            assert example["captions"] == data.captions(k) == captions(i) and example["key"] == data.key(k)
            assert example.get("label") == (label(i) if label else None)
            assert example["pixels"].dtype == torch.uint8 and example["pixels"].shape == (3, 20, 24)
            off = np.abs(example["pixels"].permute(1, 2, 0).numpy().astype(int) - picture(i)).max()
            assert off <= (0 if "tar" not in layout else 8)  # the tars hold jpegs
        if label and layout != "tars jpg cls":
            assert data.label_names == CLASSES
    assert sorted(sum(numbers.values(), [])) == list(range(12))  # nothing lost, nothing in two splits
    assert {s: len(v) for s, v in numbers.items()} == {s: len(HALVES[s]) if named else {"train": 10}.get(s, 1) for s in SPLITS}
    if named:
        assert {s: sorted(v) for s, v in numbers.items()} == {s: list(v) for s, v in HALVES.items()}


def test_held_out_splits_are_a_twentieth_each_and_the_same_every_time(tmp_path):
    path = str(write_captions(tmp_path, 60))
    keys = {s: [common.load_data(path, s).key(k) for k in range(len(common.load_data(path, s)))] for s in SPLITS}
    assert {s: len(v) for s, v in keys.items()} == {"train": 54, "val": 3, "test": 3}
    common._own_data.cache_clear()
    assert keys["val"] == [common.load_data(path, "val").key(k) for k in range(3)]
    assert "held out" in common.load_data(path, "train").note


@pytest.mark.parametrize("write", [lambda f: write_parquet_images(f / "test-00000-of-00001.parquet", range(20)).parent,
                                   lambda f: write_tar(f / "test.tar", tar_samples(range(20), "jpg", "txt"))], ids=["parquet", "tar"])
def test_a_set_that_is_only_a_test_split_is_divided(write, tmp_path):
    """As flickr30k is on the hub: nothing that trains may be left in test."""
    path = str(write(tmp_path))
    data = [common.load_data(path, s) for s in SPLITS]
    assert sorted(d.key(k) for d in data for k in range(len(d))) == sorted({d.key(k) for d in data for k in range(len(d))})
    assert [len(d) for d in data] == [18, 1, 1]


def test_folders_above_the_tars_do_not_name_splits(tmp_path):
    """Tars belong to a split by their names inside the data set, and to one only."""
    folder = tmp_path / "test" / "valid" / "train"
    write_tar(folder / "0.tar", tar_samples(range(0, 10), "jpg", "txt"))
    write_tar(folder / "val-of-train-0.tar", tar_samples(range(10, 20), "jpg", "txt"))
    keys = [{d.key(k) for k in range(len(d))} for d in (common.load_data(str(folder), s) for s in SPLITS)]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 20


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_rows_of_one_image_become_its_captions(name, tmp_path):
    names = write_images(tmp_path, range(20))
    rows = [(x, caption(i, k)) for k in range(3) for i, x in enumerate(names)] + [(names[0], caption(0))]  # apart, and one repeated
    path = str(write_rows(tmp_path / name, ["image", "caption"], rows))
    seen = set()
    for split in SPLITS:
        data = common.load_data(path, split)
        for k in range(len(data)):
            i = int(Path(data.key(k)).stem)
            assert data.captions(k) == [caption(i, j) for j in range(3)] and i not in seen
            seen.add(i)
    assert seen == set(range(20))


def test_column_flags_and_data_dir(tmp_path):
    write_images(tmp_path / "elsewhere", range(6))
    rows = [("wrong.png", f"{i:03}.png", "no", caption(i), i % 2) for i in range(6)]
    path = write_rows(tmp_path / "list" / "a.tsv", ["image", "photo", "caption", "words", "kind"], rows)
    data = common.load_data(str(path), "train", data_dir=str(tmp_path / "elsewhere"), image_column="photo", caption_column="words", label_column="kind")
    i = int(data.key(0)[:3])
    assert data.captions(0) == [caption(i)] and data.label_names == ["0", "1"] and data[0]["label"] == i % 2
    assert np.array_equal(data[0]["pixels"].permute(1, 2, 0), picture(i))

    write_tar(tmp_path / "tars" / "a.tar", tar_samples(range(6), "jpg", "png", "txt", "json"))
    data = common.load_data(str(tmp_path / "tars"), "train", image_column="png", caption_column="json.title")
    i = int(data.key(0))
    assert data.captions(0) == [caption(i)] and np.array_equal(data[0]["pixels"].permute(1, 2, 0), picture(i))

    write_parquet_images(tmp_path / "parquet" / "train.parquet", range(6))
    data = common.load_data(str(tmp_path / "parquet"), "train", image_column="image", caption_column="caption", label_column="label")
    assert data.captions(0) == [caption(int(Path(data.key(0)).stem))]


def test_rows_without_picture_or_caption(tmp_path):
    import datasets
    features = datasets.Features(image=datasets.Image(), caption=datasets.Value("string"))
    rows = {"image": [{"bytes": encode(picture(i)), "path": f"{i:03}.png"} if i != 7 else None for i in range(20)],
            "caption": [caption(i) if i != 5 else None for i in range(20)]}  # both in the training split
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    data = [common.load_data(str(tmp_path), s) for s in SPLITS]
    assert all(d.captions(k) for d in data for k in range(len(d)))     # an empty text, or left out: no example has no captions at all
    batches = common.Batches(data[0], [common.Augment(16)], TRANSFORM, 9, 0, 0, 2, torch.device("cpu"), 0, 0.5)
    assert len(list(batches)) == 2 and len(batches.bad) == 1           # a row without a picture is a bad sample, not a crash


# ---------------------------------------------------- decoding -------------------------------------------------------
def test_decode_grey_palette_and_alpha():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert np.array_equal(common.decode(encode(grey)), np.stack([grey] * 3))
    palette = Image.new("P", (4, 4))
    palette.putpalette([255, 0, 0, 0, 0, 255] + [0] * 762)
    palette.putdata([0, 1] * 8)
    out = common.decode(encode(palette, transparency=bytes([0, 255])))
    assert out[:, 0, 0].tolist() == [255, 255, 255] and out[:, 0, 1].tolist() == [0, 0, 255]  # clear red is white, blue stays
    half = common.decode(encode(Image.new("RGBA", (4, 4), (255, 0, 0, 128))))
    assert half.shape == (3, 4, 4) and half[:, 0, 0].tolist() == [255, 127, 127]
    assert common.decode(encode(Image.new("LA", (4, 4), (0, 128))))[:, 0, 0].tolist() == [127] * 3


def test_decode_cmyk_jpeg():
    out = common.decode(encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "jpeg", quality=95))
    assert out.shape == (3, 16, 16) and np.abs(out[:, 8, 8].numpy().astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_decode_16_bit_png(channels):
    values = np.broadcast_to(np.linspace(0, 65535, 64).reshape(8, 8, 1), (8, 8, channels)).round().astype(np.uint16).copy()
    if channels == 4:
        values[..., 3] = 65535
    out = common.decode(png16(values)).numpy().astype(int)
    assert np.abs(out - np.round(values[..., 0] / 257)).max() <= 1  # scaled, not clipped


@pytest.mark.parametrize("kind", ["gif", "webp", "bmp", "tiff"])
def test_decode_other_formats(kind):
    image = Image.new("RGB", (12, 8), (200, 40, 90))
    frames = dict(save_all=True, append_images=[Image.new("RGB", (12, 8), (0, 0, 0))]) if kind == "gif" else dict(lossless=True) if kind == "webp" else {}
    out = common.decode(encode(image, kind, **frames))
    assert out.shape == (3, 8, 12) and out[:, 3, 3].tolist() == [200, 40, 90]  # of a gif the first frame


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_decode_turns_pictures_as_exif_says(mode):
    exif, upright = Image.Exif(), np.zeros((32, 16), np.uint8)
    upright[:16] = 255                                           # white above, black below
    stored = Image.fromarray(np.rot90(upright).copy()).convert(mode)
    exif[0x112] = 6                                              # "turn right to see it upright"
    out = common.decode(encode(stored, "jpeg", exif=exif, quality=95))
    assert out.shape == (3, 32, 16)
    assert np.abs(out.numpy().astype(int) - upright).mean() < 4


def test_decode_takes_paths_and_keeps_jpegs_as_they_are(tmp_path):
    for name in ("000.jpg", "000.png"):
        write_images(tmp_path, [0], name[4:])
        assert np.array_equal(common.decode(tmp_path / name).permute(1, 2, 0), np.array(Image.open(tmp_path / name)))


def test_decode_refuses_what_is_broken(tmp_path):
    whole = encode(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8), "jpeg")
    assert len(encode(picture(7, 64, 64), "jpeg")) > len(TRUNCATED)
    for data in (TRUNCATED, whole[:len(whole) // 2], whole[:-2], whole[:30]):
        with pytest.raises((ValueError, OSError)):
            common.decode(data)
    with pytest.raises((ValueError, OSError)):
        common.decode(encode(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))[:5000])
    (tmp_path / "a.png").write_bytes(TEXT)
    with pytest.raises(ValueError, match="not a readable image"):
        common.decode(tmp_path / "a.png")
    with pytest.raises(ValueError, match="empty"):
        common.decode(b"")
    with pytest.raises(OSError):
        common.decode(tmp_path / "none.png")


# ---------------------------------------------------- emoji ----------------------------------------------------------
@pytest.fixture(scope="module")
def emoji():
    return {s: common.load_data("emoji", s) for s in SPLITS}


def test_emoji_counts(emoji):
    assert {s: len(d) for s, d in emoji.items()} == {"train": 3058, "val": 177, "test": 168}
    assert {s: tuple(d.images.shape[1:]) for s, d in emoji.items()} == {s: (3, 72, 72) for s in SPLITS}
    assert {s: sum(len(c) for c in d._captions) for s, d in emoji.items()} == {"train": 4729, "val": 269, "test": 258}
    assert {s: len(d.label_names) for s, d in emoji.items()} == {s: 99 for s in SPLITS}
    assert sum(" " not in k for d in emoji.values() for k in d.keys) == 1898  # base drawings


def test_emoji_captions_are_lower_case_and_unrepeated(emoji):
    for data in emoji.values():
        for i in range(len(data)):
            captions = data.captions(i)
            assert captions and len(set(captions)) == len(captions)
            assert all(c == c.lower() and "_" not in c and c.strip() for c in captions)


def test_emoji_skin_variants_only_train(emoji):
    tones = ("skin tone",)
    assert all(" " not in k for s in ("val", "test") for k in emoji[s].keys)
    assert not any(t in c for s in ("val", "test") for cs in emoji[s]._captions for c in cs for t in tones)
    variants = [i for i, k in enumerate(emoji["train"].keys) if " " in k]
    assert len(variants) == 3058 - 1898 + 177 + 168 and all("skin tone" in c for i in variants for c in emoji["train"].captions(i))


def test_no_emoji_twin_crosses_the_splits(emoji):
    gender = set("man men mans woman women womans person people male female boy boys girl girls".split())
    where = defaultdict(set)
    for split, data in emoji.items():
        for i in range(len(data)):
            where[data.images[i].numpy().tobytes()].add(split)
            if " " not in data.keys[i]:  # base drawings; a tone is no word of the name
                for c in data.captions(i):
                    where[" ".join(w for w in re.findall("[a-z0-9]+", c) if w not in gender)].add(split)
    assert {len(s) for s in where.values()} == {1}


def test_identical_emoji_are_positives_of_each_other(emoji):
    for data in emoji.values():
        drawings = [x.numpy().tobytes() for x in data.images]
        groups = defaultdict(set)
        for g, d in zip(data.groups.tolist(), drawings):
            groups[g].add(d)
        assert all(len(v) == 1 for v in groups.values())
    assert len(set(emoji["test"].groups.tolist())) == 166


# ---------------------------------------------------- batches --------------------------------------------------------
TRANSFORM = common.EvalTransform(16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
VIEWS = [common.Augment(16, 0.5, 0.5, randaugment=(2, 7)), common.Augment(16, 0.2, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)]
CPU = torch.device("cpu")


def batches_of(data, size=6, first=0, last=12, workers=0, limit=1.0, folder=None, positions=None, seed=3):
    return common.Batches(data, VIEWS, TRANSFORM, size, seed, first, last, CPU, workers, limit, folder, positions)


def same(a, b):
    return (a["keys"], a["captions"], a["epoch"]) == (b["keys"], b["captions"], b["epoch"]) and \
        all(torch.equal(x, y) for x, y in zip(a["views"], b["views"])) and np.array_equal(a["draws"], b["draws"])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """40 pictures of two sizes; 36 of them train."""
    folder = tmp_path_factory.mktemp("files")
    write_captions(folder, 40)
    write_images(folder, range(0, 40, 3), height=31, width=17)
    return folder


def test_batches_do_not_depend_on_workers(files):
    data = common.load_data(str(files / "captions.csv"), "train")
    alone, workers = list(batches_of(data)), list(batches_of(data, workers=2))
    assert len(alone) == len(workers) == 12 and all(same(a, b) for a, b in zip(alone, workers))
    first = alone[0]
    assert [tuple(v.shape) for v in first["views"]] == [(6, 3, 16, 16)] * 2 and first["draws"].shape == (6, 32)
    assert not torch.equal(*first["views"]) and all(c == [caption(int(k[:3]))] for k, c in zip(first["keys"], first["captions"]))


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_batches_started_at_step_k_go_on_as_if_never_stopped(kind, files, emoji):
    data = common.load_data(str(files / "captions.csv"), "train") if kind == "files" else emoji["val"]
    size, last = (6, 9) if kind == "files" else (50, 6)
    whole = list(batches_of(data, size, last=last))
    for k in (1, 4):
        assert all(same(a, b) for a, b in zip(whole[k:], batches_of(data, size, first=k, last=last), strict=True))
    assert not any(same(a, b) for a, b in zip(whole, batches_of(data, size, last=last, seed=4)))


def test_every_epoch_is_a_permutation(files):
    data = common.load_data(str(files / "captions.csv"), "train")
    epochs = defaultdict(list)
    views = defaultdict(list)
    for batch in batches_of(data):
        epochs[batch["epoch"]] += batch["keys"]
        for key, view in zip(batch["keys"], batch["views"][0]):
            views[key].append(view)
    assert [sorted(v) for v in epochs.values()] == [sorted(data.keys)] * 2 and epochs[0] != epochs[1]
    assert not any(torch.equal(*v) for v in views.values())  # fresh views in every epoch


def test_epoch_batches():
    steps = list(common.epoch_batches(50, 12, 7, 0, 9))
    assert [e for e, _ in steps] == [0] * 4 + [1] * 4 + [2]
    for e in (0, 1):
        rows = np.concatenate([b for epoch, b in steps if epoch == e])
        assert len(rows) == 48 and len(set(rows)) == 48 and set(rows) <= set(range(50))  # the last 2 wait for another epoch
    later = list(common.epoch_batches(50, 12, 7, 5, 9))
    assert all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(steps[5:], later, strict=True))
    for _, batch in steps:  # as Batches deals them to two processes
        local = 12 // 2
        assert np.array_equal(np.concatenate([batch[r * local:(r + 1) * local] for r in range(2)]), batch)


def one_of_two(process, data, meeting, out):
    """A process of its own: its batches of a set with a bad picture, written to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=process, world_size=2)
    batches = batches_of(data, folder=out)
    torch.save([list(batches), batches.bad], f"{out}/{process}.pt")
    dist.destroy_process_group()


def test_two_processes_get_the_batches_of_one(tmp_path):
    csv = write_captions(tmp_path, 40)
    data = common.load_data(str(csv), "train")
    bad = data.key(11)
    (tmp_path / bad).write_bytes(TEXT)
    torch.multiprocessing.spawn(one_of_two, (data, str(tmp_path / "meeting"), str(tmp_path)), nprocs=2)
    (left, bad_left), (right, bad_right) = (torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2))
    alone = batches_of(data)
    for a, b, whole in zip(left, right, alone, strict=True):
        assert a["keys"] + b["keys"] == whole["keys"] and a["captions"] + b["captions"] == whole["captions"] and a["epoch"] == whole["epoch"]
        assert all(torch.equal(torch.cat(v), w) for *v, w in zip(a["views"], b["views"], whole["views"]))
        assert np.array_equal(np.concatenate([a["draws"], b["draws"]]), whole["draws"])
    assert bad_left == bad_right == alone.bad and list(alone.bad) == [bad]
    assert (tmp_path / "bad_samples.txt").read_text().count("\n") == 1


# ---------------------------------------------------- bad samples ----------------------------------------------------
@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """40 pictures; rows 3, 4 (in a row) and 35 (the last) of the training split cannot be read. Returns the file and the keys."""
    folder = tmp_path_factory.mktemp("spoilt")
    csv = str(write_captions(folder, 40))
    keys = [common.load_data(csv, "train").key(k) for k in range(36)]
    (folder / keys[3]).write_bytes(TRUNCATED)
    (folder / keys[4]).write_bytes(TEXT)
    (folder / keys[35]).unlink()
    return csv, keys


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced_by_the_next_counted_and_listed(workers, spoilt, tmp_path):
    csv, keys = spoilt
    batches = batches_of(common.load_data(csv, "train"), last=12, workers=workers, folder=tmp_path)
    seen = [k for b in batches for k in b["keys"]]
    after = {keys[3]: keys[5], keys[4]: keys[5], keys[35]: keys[0]}
    order = [keys[i] for _, batch in common.epoch_batches(36, 6, 3, 0, 12) for i in batch]
    assert seen == [after.get(k, k) for k in order]                       # the same rule with and without workers
    lines = (tmp_path / "bad_samples.txt").read_text(encoding="utf8").splitlines()
    assert set(batches.bad) == set(after) == {line.split("\t")[0] for line in lines} and len(lines) == 3  # each once in two epochs
    reasons = dict(line.split("\t") for line in lines)
    assert "truncated" in reasons[keys[3]] and "not a readable image" in reasons[keys[4]] and "No such file" in reasons[keys[35]]


def test_too_many_bad_samples_stop_the_run(spoilt, tmp_path):
    csv, keys = spoilt
    with pytest.raises(common.UserError, match=r"--max-bad-fraction 0.05.*bad_samples.txt") as error:
        list(batches_of(common.load_data(csv, "train"), limit=0.05, folder=tmp_path))
    assert any(k in str(error.value) for k in (keys[3], keys[4], keys[35]))
    list(batches_of(common.load_data(csv, "train"), limit=0.09))          # 3 of 36 are 0.083


# ---------------------------------------------------- streams --------------------------------------------------------
@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four training tars of six samples, and one for val and test."""
    folder = tmp_path_factory.mktemp("shards")
    for s in range(4):
        write_tar(folder / f"train-{s}.tar", tar_samples(range(6 * s, 6 * s + 6), "jpg", "txt"))
    write_tar(folder / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    return str(folder)


def stream(folder, buffer=1):
    data = common.load_data(folder, "train", streaming=True)
    data.buffer = buffer
    return data


def items(data, process=0, processes=1, count=None, positions=None):
    """(key, epoch, ordinal, views) of one reader: `count` of them, or an epoch of its shards."""
    reader = iter(common._StreamViews(data, VIEWS, 3, process, processes, positions or {}))
    count = count or 6 * len(data.urls[process::processes])
    return [(k[0], k[1], k[3], views) for views, _, _, k, _ in (next(reader) for _ in range(count))]


def test_two_readers_share_an_epoch_between_them(shards):
    data = stream(shards)
    alone, left, right = items(data), items(data, 0, 2), items(data, 1, 2)
    keys = [{i[0] for i in part} for part in (alone, left, right)]
    assert len(left) == len(right) == 12 and not keys[1] & keys[2] and keys[1] | keys[2] == keys[0] == {f"{i:06}" for i in range(24)}
    views = {i[0]: i[3] for i in alone}
    assert all(torch.equal(a, b) for key, _, _, v in left + right for a, b in zip(v, views[key], strict=True))  # whoever reads it
    assert common.load_data(shards, "val", streaming=True).key(0) == "000024"


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_reader_counts_the_same_epochs(shards, processes):
    """Over two epochs every key comes twice, once in each: 4 shards on 3 readers as well."""
    data, times = stream(shards), Counter()
    for p in range(processes):
        times.update((key, epoch) for key, epoch, _, _ in items(data, p, processes, count=2 * 6 * len(range(4)[p::processes])))
    assert times == Counter({(f"{i:06}", e): 1 for i in range(24) for e in (0, 1)})


def test_a_stream_begins_again_at_the_shard(shards):
    data = stream(shards)
    def first(start, n):
        reader = data.samples(3, 1, 2, start)
        return [(s[0], s[1], s[3]) for s in (next(reader) for _ in range(n))]
    assert first(3, 18) == first(0, 36)[18:] and first(3, 1)[0][2] == 3

    batches = batches_of(data, size=4, last=5)                            # 20 samples: it stops in the fourth shard
    seen = [k for b in batches for k in b["keys"]]
    again = batches_of(data, size=4, first=5, last=8, positions=batches.positions)
    assert batches.positions == {"0": 3, "workers": 0} and [k for b in again for k in b["keys"]][:6] == [i[0] for i in items(data)][18:] != seen[18:]


def test_stream_batches_with_two_workers(shards):
    data = stream(shards, buffer=8)
    batches = batches_of(data, size=6, last=8, workers=2)
    for batch in batches:
        assert batch["views"][0].shape == (6, 3, 16, 16) and all(len(c) == 2 for c in batch["captions"])
        for key, u in zip(batch["keys"], batch["draws"]):                 # the texts' draws as well come from key and epoch
            assert any(np.array_equal(u, common.uniforms(3, e, [common.key_hash(key)], 32, 0)[0]) for e in range(10))
    assert set(batches.positions) == {"0", "1", "workers"} and not batches.bad


@pytest.mark.parametrize("where", ["picture", "header"])
def test_a_truncated_tar_is_survived_and_counted(where, tmp_path):
    for s in range(3):
        write_tar(tmp_path / f"train-{s}.tar", tar_samples(range(6 * s, 6 * s + 6), "jpg", "txt"))
    write_tar(tmp_path / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    cut, name = tmp_path / "train-1.tar", "000009.jpg" if where == "picture" else "000009.txt"
    with tarfile.open(cut) as tar:
        at = tar.getmember(name).offset_data + (100 if where == "picture" else -200)
    cut.write_bytes(cut.read_bytes()[:at])
    batches = batches_of(stream(str(tmp_path)), size=4, last=8, limit=0.01, folder=tmp_path)
    keys = {k for b in batches for k in b["keys"]}
    assert keys == {f"{i:06}" for i in (*range(9), *range(12, 18))}         # what stands before the cut is used
    assert len(batches.bad) == 1 and "train-1.tar" in next(iter(batches.bad))  # once, however often it is read
    assert (tmp_path / "bad_samples.txt").read_text().count("\n") == 1


def test_a_sample_without_caption_is_one_bad_sample_of_a_stream(tmp_path):
    samples = tar_samples(range(12), "jpg", "txt")
    del samples["000005"]["txt"]
    write_tar(tmp_path / "train-0.tar", samples)
    write_tar(tmp_path / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    batches = batches_of(stream(str(tmp_path)), size=4, last=4)
    keys = {k for b in batches for k in b["keys"]}
    assert keys == set(samples) - {"000005"} and len(batches.bad) == 1 and "000005" in next(iter(batches.bad))


def test_a_stream_without_one_readable_picture_stops(tmp_path):
    write_tar(tmp_path / "train-0.tar", {f"{i:06}": {"jpg": TEXT, "txt": b"a caption"} for i in range(12)})
    write_tar(tmp_path / "val-0.tar", tar_samples(range(24, 30), "jpg", "txt"))
    data = stream(str(tmp_path))
    data.samples = lambda *place: itertools.islice(common.Stream.samples(data, *place), 1500)  # else a failure of this test would never end
    with pytest.raises(common.UserError, match="cannot be read"):
        list(batches_of(data, size=4, last=2))


def test_more_processes_than_shards_is_refused(shards, monkeypatch):
    monkeypatch.setattr(common, "world", lambda: 5)
    with pytest.raises(common.UserError, match="4 shards are too few for 5 processes"):
        batches_of(stream(shards), size=10)


# ---------------------------------------------------- image views ----------------------------------------------------
def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def noise(n=4, height=37, width=53, seed=0):
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


def draws(n=4, **at):
    """(n, 16) draws of one half but for the columns given: draws(4, _5=0.0)."""
    u = np.full((n, common.Augment.DRAWS), 0.5, np.float32)
    for name, value in at.items():
        u[:, int(name[1:])] = value
    return u


@pytest.mark.parametrize("scale_min, size", [(0.08, 16), (0.5, 48), (1.0, 24)])
def test_crop_batch_is_torchvisions_resized_crop(scale_min, size):
    images, u = noise(8), common.uniforms(0, 0, range(8), 16)
    augment = common.Augment(size, scale_min)
    out = augment.crop_batch(images, u)
    for x, y, (top, left, h, w) in zip(images, out, augment.boxes(37, 53, u).tolist(), strict=True):
        assert 0 <= top <= top + h <= 37 and 0 <= left <= left + w <= 53 and h > 0 and w > 0
        close(y, V.resized_crop(x, top, left, h, w, [size, size], antialias=True))


def test_crop_boxes_have_the_area_asked_for():
    boxes = common.Augment(16, 0.08).boxes(200, 200, common.uniforms(0, 0, range(2000), 16))
    area, ratio = boxes[:, 2] * boxes[:, 3] / 200**2, boxes[:, 3] / boxes[:, 2]
    assert 0.07 < area.min() < 0.12 and area.max() > 0.9 and abs(np.median(area) - 0.54) < 0.03 and ratio.min() > 0.72 and ratio.max() < 1.39


def test_crop_one_and_crop_batch_see_the_same_boxes():
    images = (noise(3) * 255).byte()
    u = common.uniforms(0, 0, range(3), 16)
    augment = common.Augment(24, 0.3)
    one = torch.stack([augment.crop_one(x, row) for x, row in zip(images, u)])
    assert one.dtype == torch.uint8
    close(one.float() / 255, augment.crop_batch(images, u), 1.5 / 255)  # but for rounding to uint8


@pytest.mark.parametrize("column, strength, function", [
    (6, "brightness", V.adjust_brightness), (7, "contrast", V.adjust_contrast), (8, "saturation", V.adjust_saturation)])
@pytest.mark.parametrize("draw", [0.0, 0.3, 0.9])
def test_colour_jitter_is_torchvisions(column, strength, function, draw):
    x = noise(4, 16, 16)
    augment = common.Augment(16, jitter_p=1.0, **{strength: 0.4})
    close(augment.finish(x, draws(_5=0.0, **{f"_{column}": draw})), function(x, 1 + (2 * draw - 1) * 0.4))


@pytest.mark.parametrize("shift", [-0.5, -0.1, 0.0, 0.07, 0.4])
def test_hue_is_torchvisions(shift):
    x = torch.cat([noise(2, 16, 16), torch.full((1, 3, 16, 16), 0.4), torch.eye(3)[:, :, None, None].expand(3, 3, 16, 16)])  # noise, grey, primaries
    close(common.shift_hue(x, torch.full((len(x), 1, 1, 1), shift)), V.adjust_hue(x, shift))
    if abs(shift) <= 0.1:
        close(common.Augment(16, jitter_p=1.0, hue=0.1).finish(x, draws(len(x), _5=0.0, _9=shift / 0.2 + 0.5)), V.adjust_hue(x, shift))


def test_grey_and_flip_are_torchvisions():
    x = noise(4, 16, 16)
    close(common.Augment(16, grey=1.0).finish(x, draws(_10=0.0)), V.rgb_to_grayscale(x, 3))
    close(common.Augment(16, flip=0.5).finish(x, draws(_4=[0.0, 0.9, 0.4, 0.6])), torch.stack([x[0].flip(-1), x[1], x[2].flip(-1), x[3]]), 0)


@pytest.mark.parametrize("size", [16, 48, 224])
@pytest.mark.parametrize("sigma", [0.1, 1.3])
def test_blur_is_torchvisions(sigma, size):
    x = noise(2, size, size)
    width = 2 * max(1, size // 20) + 1
    close(common.gaussian_blur(x, torch.full((2,), sigma)), V.gaussian_blur(x, [width, width], [sigma, sigma]))


def test_probabilities_choose_samples_one_by_one():
    x = noise(4, 16, 16)
    augment = common.Augment(16, 1.0, 0.0, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    u = draws(_5=[0.9, 0.7, 0.9, 0.9], _6=0.9, _10=[0.9, 0.9, 0.1, 0.9], _11=[0.9, 0.9, 0.9, 0.1])
    out = augment.finish(x, u)
    assert torch.equal(out[0], x[0]) and not any(torch.equal(out[i], x[i]) for i in (1, 2, 3))
    for i in range(4):                                                    # no sample looks at its neighbours
        close(augment.finish(x[i:i + 1], u[i:i + 1])[0], out[i], 1e-6)


def test_randaugment_is_a_function_of_the_draws():
    x, u = (noise(3, 32, 32) * 255).byte(), common.uniforms(0, 0, range(3), 16)
    augment = common.Augment(16, 0.5, randaugment=(2, 7))
    state = torch.get_rng_state()
    first = [augment.crop_one(a, row) for a, row in zip(x, u)]
    assert torch.equal(torch.get_rng_state(), state)                      # the global generator is left alone
    torch.manual_seed(5)
    assert all(torch.equal(a, augment.crop_one(b, row)) for a, b, row in zip(first, x, u))
    assert not all(torch.equal(a, common.Augment(16, 0.5).crop_one(b, row)) for a, b, row in zip(first, x, u))


def test_evaluation_view(files, tmp_path):
    image = picture(3, 40, 60)
    (tmp_path / "a.png").write_bytes(encode(image))
    crop, squash = common.EvalTransform(16, (0.5,) * 3, (0.25,) * 3), common.EvalTransform(16, (0.5,) * 3, (0.25,) * 3, "squash")
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    close(crop(tensor), (V.center_crop(V.resize(tensor, [16, 24], antialias=True), [16, 16]) / 255 - 0.5) / 0.25, 1e-6)
    close(squash(tensor), (V.resize(tensor, [16, 16], antialias=True) / 255 - 0.5) / 0.25, 1e-6)
    assert all(torch.equal(crop(x), crop(tensor)) for x in (image, Image.fromarray(image), tmp_path / "a.png", str(tmp_path / "a.png"), encode(image)))


# ---------------------------------------------------- random numbers -------------------------------------------------
def test_uniforms():
    u = common.uniforms(1, 2, range(5000), 8, stream=1)
    assert u.shape == (5000, 8) and u.dtype == np.float32 and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.std() - 12**-0.5) < 0.01 and np.abs(np.corrcoef(u.T) - np.eye(8)).max() < 0.06
    shuffled = np.random.default_rng(0).permutation(5000)
    assert np.array_equal(common.uniforms(1, 2, shuffled, 8, 1), u[shuffled])                     # not of the order
    assert np.array_equal(np.concatenate([common.uniforms(1, 2, [i], 8, 1) for i in range(50)]), u[:50])  # nor of the batch
    assert np.array_equal(common.uniforms(1, 2, range(50), 3, 1), u[:50, :3])
    for other in (common.uniforms(0, 2, range(5000), 8, 1), common.uniforms(1, 3, range(5000), 8, 1), common.uniforms(1, 2, range(5000), 8, 0)):
        assert (other == u).mean() < 1e-3 and abs(np.corrcoef(other.ravel(), u.ravel())[0, 1]) < 0.03
    assert len({common.key_hash(f"sample {i}") for i in range(2000)}) == 2000 and 0 <= common.key_hash("a") < 2**63


# ---------------------------------------------------- second texts ---------------------------------------------------
def test_text_pair_takes_the_first_source_there_is(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [{"caption": "a cat", "paraphrases": ["the cat", "one cat"]}, {"caption": "a dog", "paraphrases": []}, {"caption": "a cow", "paraphrases": ["", "some cow"]}]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf8")
    known = common.Paraphrases(path)
    assert len(known) == 3 and known.get(["a cow", "no such", "a cat", "a dog"]) == [["some cow"], [], ["the cat", "one cat"], []]

    captions, u = [["a cat"], ["a dog"], ["a cow", "moo"]], np.full((3, 32), 0.0, np.float32)
    u[:, 1] = 0.9
    first, other = common.text_pair(captions, u, known, ("icon of {}", "{} drawn"))
    assert first == ["a cat", "a dog", "a cow"] and other == ["one cat", "a dog drawn", "some cow"]  # the file, else templates
    assert common.text_pair(captions, u, None, ("icon of {}", "{} drawn"))[1] == ["a cat drawn", "a dog drawn", "moo drawn"]
    u[:, 2:] = 0.99                                                                                # nothing is dropped or swapped
    assert common.text_pair(captions, u)[1] == ["a cat", "a dog", "moo"]                           # another caption, else words
    assert common.text_pair(captions, u, known)[1] == ["one cat", "a dog", "some cow"]
    assert common.text_pair(captions, u, known, second=False) == (["a cat", "a dog", "a cow"], [])
    u[:, 0] = 0.7
    assert common.text_pair(captions, u)[0][2] == "moo" and common.text_pair(captions, u)[1][2] == "a cow"


def test_paraphrases_file_errors(tmp_path):
    with pytest.raises(common.UserError, match="no such file"):
        common.Paraphrases(tmp_path / "none.jsonl")
    for name, text in (("a.jsonl", '{"words": "x"}\n'), ("b.jsonl", "not json\n"), ("c.jsonl", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(common.UserError, match="expected JSON lines with 'caption' and 'paraphrases'"):
            common.Paraphrases(tmp_path / name)


def test_drop_and_swap():
    text = "one two three four five six seven"
    u = common.uniforms(0, 0, range(400), 30)
    out = [common.drop_and_swap(text, row, 0.3, 0.2) for row in u]
    assert out == [common.drop_and_swap(text, row, 0.3, 0.2) for row in u]
    assert all(out) and all(not Counter(o.split()) - Counter(text.split()) for o in out)
    kept = np.mean([len(o.split()) for o in out]) / 7
    assert abs(kept - 0.7) < 0.04 and any(sorted(o.split()) == sorted(text.split()) and o != text for o in out)
    assert all(common.drop_and_swap(t, row, 1.0, 1.0) for row in u[:20] for t in ("word", "two words"))     # never empty
    assert all(common.drop_and_swap(text, row, 0.0, 0.0) == text for row in u[:20])


@pytest.fixture(scope="module")
def pegasus(tmp_path_factory):
    """A tiny PEGASUS of random weights with a word tokenizer, saved as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("pegasus")
    words = ["<pad>", "</s>", "<unk>", *"a the cat dog cow sat on mat red blue".split()]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = PegasusConfig(vocab_size=len(words), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                           encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    PegasusForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def test_write_paraphrases(pegasus, tmp_path):
    path, captions = tmp_path / "p.jsonl", ["a cat", "a dog sat", "a cat", "the red cow", "on a mat"]
    common.write_paraphrases(captions, path, pegasus, batch=2, max_tokens=8)
    lines = path.read_text(encoding="utf8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    assert [r["caption"] for r in rows] == ["a cat", "a dog sat", "the red cow", "on a mat"]  # the duplicate once
    assert all(len(r["paraphrases"]) == 5 and all(isinstance(p, str) for p in r["paraphrases"]) for r in rows)

    done = json.dumps({"caption": "a cat", "paraphrases": ["kept"] * 5}) + "\n"
    path.write_text(done + lines[1] + lines[2][:len(lines[2]) // 2], encoding="utf8")       # a crash in the third line
    common.write_paraphrases(captions, path, pegasus, batch=2, max_tokens=8)
    assert path.read_text(encoding="utf8").splitlines(keepends=True) == [done, lines[1], lines[2], lines[3]]
    common.write_paraphrases(captions, path, pegasus, batch=2, max_tokens=8)
    assert len(path.read_text(encoding="utf8").splitlines()) == 4                            # nothing left to do
    assert len(common.Paraphrases(path)) == 4 and common.Paraphrases(path).get(["a cat"]) == [["kept"] * 5]


def test_write_paraphrases_errors(pegasus, tmp_path):
    with pytest.raises(common.UserError, match="--paraphrase-model no/such"):
        common.write_paraphrases(["a cat"], tmp_path / "p.jsonl", "no/such")
    (tmp_path / "file").write_text("")
    with pytest.raises(common.UserError, match="--write-paraphrases .*cannot be written"):
        common.write_paraphrases(["a cat"], tmp_path / "file" / "p.jsonl", pegasus)


# ---------------------------------------------------- unusual columns ------------------------------------------------
def _table(folder, captions, labels=None):
    import datasets
    columns = {"image": [{"bytes": encode(picture(i)), "path": None} for i in range(len(captions))], "caption": captions} | ({"label": labels} if labels else {})
    folder.mkdir(parents=True)
    features = datasets.Dataset.from_dict({k: v for k, v in columns.items() if k != "image"}).features
    datasets.Dataset.from_dict(columns, features=datasets.Features(image=datasets.Image(), **features)).to_parquet(str(folder / "train.parquet"))
    return str(folder)


def test_labels_that_are_words_and_captions_that_are_numbers(tmp_path):
    data = common.load_data(_table(tmp_path / "a", list(range(40, 60)), ["cat", "ant"] * 10), "train")
    assert data.label_names == ["ant", "cat"] and set(data.labels) == {0, 1} and data.captions(0)[0].isdigit()
    rows = write_rows(tmp_path / "n.csv", ["image", "caption"], [(f"{i}.png", i) for i in range(30)])
    assert common.load_data(str(rows), "train").captions(1)[0].isdigit()


def test_captions_that_are_records_are_refused(tmp_path):
    with pytest.raises(common.UserError, match="--caption-column caption: .* holds dicts there, not texts; it has: image, caption"):
        common.load_data(_table(tmp_path / "b", [{"en": "a"}] * 20), "train")


def test_a_split_that_lacks_a_class_keeps_the_numbers_of_the_others(tmp_path):
    for split, classes in (("train", ["ant", "bee", "cat"]), ("test", ["bee", "cat"])):
        names = write_images(tmp_path / split, range(12))
        write_rows(tmp_path / split / "metadata.csv", ["file_name", "caption", "label"], [(x, caption(i), classes[i % len(classes)]) for i, x in enumerate(names)])
    train, test = (common.load_data(str(tmp_path), s) for s in ("train", "test"))
    assert train.label_names == test.label_names == ["ant", "bee", "cat"] and list(test.labels) == [1, 2] * 6


def test_other_workers_than_before_start_the_stream_anew(tmp_path, capsys):
    for shard in range(2):
        write_tar(tmp_path / f"{shard}.tar", tar_samples(range(6 * shard, 6 * shard + 6), "jpg", "txt"))
    data = common.load_data(str(tmp_path), "train", streaming=True)
    data.buffer = 2
    again = batches_of(data, size=2, last=1, positions={"0": 5, "workers": 2})
    assert again.positions == {} and "another number of workers" in capsys.readouterr().out
