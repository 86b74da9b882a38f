"""One split as a table (Data), decoding of images, random numbers, image views against
torchvision's, second texts."""

import dataclasses
import itertools
import json
import math
import struct
import zlib
from collections import Counter

import common
from contrastive.data.pixels import decode
from contrastive.data.views import OPERATIONS, crop_batch, gaussian_blur, randaugment, shift_hue
from contrastive.papers.text_pairs import Paraphrases
from contrastive.core.processes import UserError

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from helpers import CLASSES, TEXT, TRUNCATED, all_rows, caption, encode, picture, write_captions


@pytest.fixture(scope="module")
def ten():
    """Ten samples in memory with 1, 2, 3, 1, ... captions, classes, groups of two, shards of three,
    and a remark."""
    captions = [[caption(i, k) for k in range(i % 3 + 1)] for i in range(10)]
    table = common.make_table(
        captions,
        [f"s{i}" for i in range(10)],
        classes={"label": CLASSES},
        label=np.arange(10) % 3,
        group=np.arange(10) // 2,
        remark=[f"no {i}" for i in range(10)],
    )
    pixels = torch.stack([torch.from_numpy(picture(i)).permute(2, 0, 1) for i in range(10)])
    return common.Data("ten", "train", table, pixels=pixels, shards=np.arange(10) // 3)


def test_columns_of_data(ten):
    assert ten.labels.tolist() == [i % 3 for i in range(10)]
    assert ten.label_names == ten.names("label") == CLASSES
    assert ten.groups.tolist() == [i // 2 for i in range(10)]
    assert ten.column("remark")[7] == "no 7"
    assert ten.column("nothing") is None
    assert ten.names("remark") is None
    assert set(ten[4]) == {"pixels", "captions", "key", "label", "remark"} and ten[4]["label"] == 1
    bare = common.Data("plain", "test", common.make_table([["a"], ["b"]], ["x", "y"]))
    assert bare.labels is None and bare.label_names is None and bare.groups.tolist() == [0, 1]


def test_select_takes_rows_in_any_order_and_again(ten):
    rows = [7, 2, 2, 9]
    part = ten.select(rows, "val")
    assert (part.split, ten.split, len(part), len(ten)) == ("val", "train", 4, 10)
    for k, i in enumerate(rows):
        assert (part.key(k), part.captions(k)) == (f"s{i}", ten.captions(i))
        assert torch.equal(part.read(k), ten.read(i))
    assert part.labels.tolist() == [1, 2, 2, 0] and part.groups.tolist() == [3, 1, 1, 4]
    assert part.shards.tolist() == [2, 0, 0, 3]
    assert part.column("remark") == ["no 7", "no 2", "no 2", "no 9"]
    again = part.select(np.array([3, 0]))
    assert [again.key(k) for k in range(2)] == ["s9", "s7"] and again.rows.tolist() == [9, 7]
    bare = dataclasses.replace(ten, table=ten.table.remove_columns("group"))
    assert bare.select(rows).groups.tolist() == rows  # a row taken twice is a positive of itself
    assert len(ten.select([])) == 0 and ten.select([]).pixels.shape == (0, 3, 20, 24)


def test_unfold_has_a_row_for_each_caption(ten):
    each = ten.unfold()
    pairs = [(i, c) for i in range(10) for c in ten.captions(i)]
    owner = [i for i, _ in pairs]
    assert [(each.key(k), each.captions(k)) for k in range(len(each))] == [
        (f"s{i}", [c]) for i, c in pairs
    ]
    for name in ("labels", "groups", "shards"):
        assert getattr(each, name).tolist() == getattr(ten, name)[owner].tolist(), name
    assert torch.equal(each.pixels, ten.pixels[owner])
    assert list(each.first_captions()) == [c for _, c in pairs]
    assert each.select([2, 1]).captions(0) == [pairs[2][1]]
    assert each.folded().column("key") == ten.column("key")
    assert each.folded().captions(2) == ten.captions(2)


def test_small_images_of_one_size_go_into_memory(tmp_path):
    data = all_rows(write_captions(tmp_path / "a", 7))
    inside = data.in_memory()
    assert data.pixels is None
    assert inside.pixels.shape == (7, 3, 20, 24)
    assert inside.pixels.dtype == torch.uint8
    assert all(torch.equal(inside.read(i), data.read(i)) for i in range(7))
    assert data.in_memory(limit=23).pixels is None  # a larger side than that
    for other in (
        TEXT,
        encode(picture(5, 30, 10)),
    ):  # unreadable: counted as a bad sample when its turn comes
        (tmp_path / "a" / data.key(5)).write_bytes(other)
        assert data.in_memory().pixels is None


# ---- decoding ----
def palette():
    """Clear red and solid blue in turn."""
    image = Image.new("P", (4, 4))
    image.putpalette([255, 0, 0, 0, 0, 255] + [0] * 762)
    image.putdata([0, 1] * 8)
    return encode(image, transparency=bytes([0, 255]))


def png16(array):
    """Bytes of a 16-bit png: (H, W, channels) of 0..65535; PIL cannot write the coloured ones."""
    h, w, c = array.shape

    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", w, h, 16, {1: 0, 3: 2, 4: 6}[c], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
# of 16 bits
WIDE = np.linspace(0, 65535, 64).reshape(8, 8, 1).repeat(4, 2).round().astype(np.uint16)
WIDE[..., 3] = 65535
# name: (bytes, what is decoded, or its one colour, and how far off it may be)
DECODED = {
    "grey": (encode(GREY), np.stack([GREY] * 3), 0),
    "palette": (
        palette(),
        np.array([[255, 0] * 2, [255, 0] * 2, [255] * 4])[:, None].repeat(4, 1),
        0,
    ),
    "alpha": (encode(Image.new("RGBA", (4, 4), (255, 0, 0, 128))), [255, 127, 127], 0),
    "grey and alpha": (encode(Image.new("LA", (4, 4), (0, 128))), [127, 127, 127], 0),
    "cmyk jpeg": (
        encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "jpeg", quality=95),
        [255, 0, 0],
        3,
    ),
    "16 bits": (png16(WIDE[..., :3]), np.stack([WIDE[..., 0] / 257] * 3), 1),
}


@pytest.mark.parametrize("name", DECODED)
def test_decode(name):
    content, expected, tolerance = DECODED[name]
    expected = np.array(expected).reshape(3, *np.shape(expected)[1:] or (1, 1))
    out = decode(content)
    assert out.dtype == torch.uint8
    assert np.abs(out.numpy().astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("kind, mode", [("jpeg", "RGB"), ("jpeg", "CMYK")])
def test_decode_turns_pictures_as_exif_says(kind, mode):
    exif, upright = Image.Exif(), np.zeros((32, 16), np.uint8)
    upright[:16] = 255  # white above, black below
    exif[0x112] = 6  # "turn right to see it upright"
    out = decode(encode(Image.fromarray(np.rot90(upright).copy()).convert(mode), kind, exif=exif))
    assert out.shape == (3, 32, 16) and np.abs(out.numpy().astype(int) - upright).mean() < 4


def test_decode_refuses_what_is_broken_or_has_wide_grey(tmp_path):
    """Of grey with more than 8 bits Pillow would make everything above 255 white."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    whole = encode(noise, "jpeg")
    for data in (
        TRUNCATED,
        whole[:-2],
        whole[:30],
        encode(noise)[:5000],
        TEXT,
        b"",
        tmp_path / "none.png",
    ):
        with pytest.raises((ValueError, OSError)):
            decode(data)
    wide = [
        Image.fromarray(WIDE[..., 0].astype(kind)) for kind in (np.uint16, np.int32, np.float32)
    ]
    for data in (png16(WIDE[..., :1]), *(encode(x, "tiff") for x in wide)):
        with pytest.raises(ValueError, match="more than 8 bits of grey"):
            decode(data)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"comment": b"a \xff\xd9 b"}])
def test_data_behind_the_end_of_a_jpeg_are_not_looked_at(options):
    """As a phone's motion photo has them; but a cut image is refused, whatever follows."""
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 255, (40, 50, 3), dtype=np.uint8))
    whole = encode(noise, "jpeg", **options)
    expected = decode(whole)
    for tail in (b"\0", *(random.bytes(100_000) for _ in range(20)), whole[:-2]):
        assert torch.equal(decode(whole + tail), expected)
    for cut in (2, 3, 500):
        with pytest.raises(ValueError, match="truncated jpeg"):
            decode(whole[:-cut] + b"\0\0")


# ---- random numbers ----
def test_uniforms():
    u = common.uniforms(1, 2, range(5000), 8, stream=1)
    assert u.shape == (5000, 8) and u.dtype == np.float32 and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.std() - 12**-0.5) < 0.01
    assert np.abs(np.corrcoef(u.T) - np.eye(8)).max() < 0.06
    shuffled = np.random.default_rng(0).permutation(5000)
    assert np.array_equal(common.uniforms(1, 2, shuffled, 8, 1), u[shuffled])  # not of the order
    assert np.array_equal(common.uniforms(1, 2, [7], 3, 1), u[7:8, :3])  # nor of the batch
    for seed, epoch, number in ((0, 2, 1), (1, 3, 1), (1, 2, 0)):
        other = common.uniforms(seed, epoch, range(5000), 8, number)
        assert (other == u).mean() < 1e-3
        assert abs(np.corrcoef(other.ravel(), u.ravel())[0, 1]) < 0.03
    assert len({common.key_hash(f"sample {i}") for i in range(2000)}) == 2000
    assert 0 <= common.key_hash("a") < 2**63


# ---- views ----
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


def finished(augment, x, u):
    return augment.photometric(x, torch.from_numpy(u)[:, :, None, None, None])


@pytest.mark.parametrize("scale_min, size", [(0.08, 16), (0.5, 48), (1.0, 24)])
def test_crop_batch_is_torchvisions_resized_crop_and_crop_one_has_the_same_boxes(scale_min, size):
    images, u = (noise(8) * 255).byte(), common.uniforms(0, 0, range(8), 16)
    augment = common.Augment(size, scale_min)
    out = crop_batch(augment, images, u)
    for x, y, row, (top, left, h, w) in zip(
        images, out, u, augment.boxes(37, 53, u).tolist(), strict=True
    ):
        assert 0 <= top <= top + h <= 37 and 0 <= left <= left + w <= 53 and h > 0 and w > 0
        close(y, V.resized_crop(x.float() / 255, top, left, h, w, [size, size], antialias=True))
        close(augment.crop_one(x, row).float() / 255, y, 1.5 / 255)  # but for rounding to uint8


def test_crop_boxes_have_the_area_asked_for():
    boxes = common.Augment(16, 0.08).boxes(200, 200, common.uniforms(0, 0, range(2000), 16))
    area, ratio = boxes[:, 2] * boxes[:, 3] / 200**2, boxes[:, 3] / boxes[:, 2]
    assert 0.07 < area.min() < 0.12 and area.max() > 0.9 and abs(np.median(area) - 0.54) < 0.03
    assert 0.72 < ratio.min() < 0.77 and 1.3 < ratio.max() < 1.39
    # parts of the way that is free
    down, right = ((boxes[:, k] + 0.5) / (201 - boxes[:, k + 2]) for k in (0, 1))
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.1


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.9])
def test_colours_are_torchvisions(draw):
    x, on = noise(4, 16, 16), {"_5": 0.0}
    for column, strength, function in (
        (6, "brightness", V.adjust_brightness),
        (7, "contrast", V.adjust_contrast),
        (8, "saturation", V.adjust_saturation),
    ):
        augment = common.Augment(16, jitter_p=1.0, **{strength: 0.4})
        close(
            finished(augment, x, draws(**on, **{f"_{column}": draw})),
            function(x, 1 + (2 * draw - 1) * 0.4),
        )
    hue = common.Augment(16, jitter_p=1.0, hue=0.1)
    close(finished(hue, x, draws(**on, _9=draw)), V.adjust_hue(x, (2 * draw - 1) * 0.1))
    grey = torch.full((1, 3, 16, 16), 0.4)
    primaries = torch.eye(3)[:, :, None, None].expand(3, 3, 16, 16)
    x = torch.cat([x, grey, primaries])
    close(shift_hue(x, torch.full((8, 1, 1, 1), draw - 0.5)), V.adjust_hue(x, draw - 0.5))
    close(finished(common.Augment(16, grey=1.0), x, draws(8, _10=draw)), V.rgb_to_grayscale(x, 3))


def test_flip_and_blur_are_torchvisions():
    """The strength of a blur has a draw of its own: 0.1 to 2 pixels, as SimCLR."""
    x = noise(4, 48, 48)
    flipped = finished(common.Augment(48, flip=0.5), x, draws(_4=[0.0, 0.9, 0.4, 0.6]))
    close(flipped, torch.stack([x[0].flip(-1), x[1], x[2].flip(-1), x[3]]), 0)
    for sigma, size in itertools.product((0.1, 1.3), (16, 48, 224)):
        x, width = noise(2, size, size), 2 * max(1, size // 20) + 1
        expected = V.gaussian_blur(x, [width, width], [sigma, sigma])
        close(gaussian_blur(x, torch.full((2,), sigma)), expected)
        blurred = finished(
            common.Augment(size, blur=0.5), x, draws(2, _11=0.2, _14=(sigma - 0.1) / 1.9)
        )
        close(blurred, expected)


def test_probabilities_choose_samples_one_by_one():
    x = noise(4, 16, 16)
    augment = common.Augment(16, 1.0, 0.0, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    u = draws(_5=[0.9, 0.7, 0.9, 0.9], _6=0.9, _10=[0.9, 0.9, 0.1, 0.9], _11=[0.9, 0.9, 0.9, 0.1])
    out = finished(augment, x, u)
    assert torch.equal(out[0], x[0]) and not any(torch.equal(out[i], x[i]) for i in (1, 2, 3))
    for i in range(4):  # no sample looks at its neighbours
        close(finished(augment, x[i : i + 1], u[i : i + 1])[0], out[i], 1e-6)


def changed(operation, image, strength):
    """An image (3, H, W) uint8 that an operation has changed, as int."""
    return V.pil_to_tensor(operation.change(V.to_pil_image(image), strength)).int()


def moved(clip, matrix):
    """Each pixel (x, y) at (a x + b y + c, d x + e y + f) of the clip, between pixels linearly, and
    128 outside: OpenCV's warpAffine with an inverse map, as the CC3M trainer calls it, but that it
    moves the pixels' centres, as Pillow, not their corners."""
    (a, b, c), (d, e, f) = matrix
    y, x = torch.meshgrid(torch.arange(clip.shape[-2]), torch.arange(clip.shape[-1]), indexing="ij")
    x, y = x + 0.5, y + 0.5
    left, top = a * x + b * y + c - 0.5, d * x + e * y + f - 0.5
    result = torch.zeros(clip.shape)
    for right, below in itertools.product((0, 1), (0, 1)):
        i, j = top.floor().long() + below, left.floor().long() + right
        weight = (1 - (top - i).abs()) * (1 - (left - j).abs())
        inside = (i >= 0) & (i < clip.shape[-2]) & (j >= 0) & (j < clip.shape[-1])
        pixels = clip[..., i.clamp(0, clip.shape[-2] - 1), j.clamp(0, clip.shape[-1] - 1)]
        result += weight * torch.where(inside, pixels.float(), 128.0)
    return result


def test_moves_of_the_cc3m_trainer_are_its_own_at_seven_of_ten():
    """Shifts by 7 pixels at any size, shears by 0.21, rotations by 21 degrees; grey beside them."""
    smooth = (noise(1, 64, 80)[0] * 255).byte()
    smooth = V.gaussian_blur(smooth, [9, 9], [3.0, 3.0])
    s = 0.21
    cos, sin = math.cos(math.radians(21)), math.sin(math.radians(21))
    around = ((1 - cos) * 40 + sin * 32, (1 - cos) * 32 - sin * 40)  # the centre of 64 x 80
    matrices = {
        "TranslateX": ((1, 0, -7), (0, 1, 0)),
        "TranslateY": ((1, 0, 0), (0, 1, -7)),
        "ShearX": ((1, s, 0), (0, 1, 0)),
        "ShearY": ((1, 0, 0), (s, 1, 0)),
        "Rotate": ((cos, -sin, around[0]), (sin, cos, around[1])),
    }
    for name, matrix in matrices.items():
        operation = OPERATIONS[name]
        assert operation.has_random_sign
        found = changed(operation, smooth, operation.strength(21))
        expected = moved(smooth, matrix)
        if name.startswith("Translate"):
            assert torch.equal(found, expected.int()), name
        # OpenCV's edge is between the picture and the grey beside it
        assert ((found - expected).abs() > 1).float().mean() < 0.03, name
        assert (found == 128).float().mean() > 0.05, name


def test_light_of_the_cc3m_trainer_has_one_factor_for_a_magnitude():
    """level / 10 * 1.8 + 0.1: 1.36 at 7 of 10, never less than 1."""
    image = (noise(1, 20, 30)[0] * 255).byte()
    sharper = V.adjust_sharpness(image, 1.36)
    brighter = (image * 1.36).clamp(0, 255)
    for name, expected in {"Brightness": brighter, "Sharpness": sharper}.items():
        operation = OPERATIONS[name]
        assert not operation.has_random_sign
        assert 1 + operation.strength(21) == pytest.approx(7 / 10 * 1.8 + 0.1)
        found = changed(operation, image, operation.strength(21))
        assert (found - expected.int()).abs().max() <= 1
    theirs = v2.RandAugment(num_ops=1)
    assert list(OPERATIONS) == [k for k in theirs._AUGMENTATION_SPACE if k in OPERATIONS]
    for name in ("Identity", "AutoContrast", "Equalize"):
        expected = theirs._apply_image_or_video_transform(
            V.to_pil_image(image), name, 0.0, theirs.interpolation, theirs._fill)
        found = changed(OPERATIONS[name], image, 0.0)
        assert torch.equal(found, V.pil_to_tensor(expected).int()), name


def test_randaugment_applies_all_of_its_operations():
    """At magnitude 21, drawn from one generator, with a sign where the operation has one."""
    image = (noise(1, 40, 48)[0] * 255).byte()
    images = {}
    for name, operation in OPERATIONS.items():
        strength = operation.strength(21)
        images[name, strength] = changed(operation, image, strength)
        if operation.has_random_sign:
            images[name, -strength] = changed(operation, image, -strength)
    seen = set()
    for u in common.uniforms(0, 0, range(200), 16):
        y = randaugment(image, u, 1, 21).int()
        names = {key for key, expected in images.items() if torch.equal(y, expected)}
        assert names
        seen |= names
    assert seen == set(images)


def test_randaugment_reads_its_draws_alone(monkeypatch):
    """And leaves the random numbers of this process and of the GPU as they are."""
    clips = (noise(120, 32, 40) * 255).byte().unflatten(0, (60, 2))
    u = common.uniforms(0, 0, range(60), 16)
    asked, state = [], torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "manual_seed_all", asked.append)
        found = [randaugment(x, row, 2, 21) for x, row in zip(clips, u)]
    assert not asked and torch.equal(torch.get_rng_state(), state)
    assert sum(not torch.equal(a, b) for a, b in zip(found, clips)) > 30
    torch.manual_seed(5)
    for x, row, y in zip(clips, u, found):
        assert torch.equal(randaugment(x, row, 2, 21), y)


@pytest.mark.parametrize("how", ["crop", "squash"])
def test_evaluation_view_is_that_of_training_without_a_crop(how, tmp_path):
    image, size = picture(3, 40, 60), [16, 24] if how == "crop" else [16, 16]
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    view = common.EvalTransform(16, (0.5,) * 3, (0.25,) * 3, how)
    expected = V.center_crop(V.resize(tensor, size, antialias=True), [16, 16])
    close(view(tensor), (expected / 255 - 0.5) / 0.25)
    (tmp_path / "a.png").write_bytes(encode(image))
    for x in (Image.fromarray(image), tmp_path / "a.png", str(tmp_path / "a.png")):
        assert torch.equal(view(x), view(tensor))
    large = (
        torch.arange(40 * 80, dtype=torch.float)
        .view(1, 40, 80)
        .expand(3, -1, -1)
        .div(13)
        .to(torch.uint8)
    )
    training = common.Augment(40, squash=how == "squash").crop_one(
        large, common.uniforms(0, 0, [5], 16)[0]
    )
    assert torch.equal(training, common.EvalTransform(40, (0,) * 3, (1,) * 3, how).raw(large))


# ---- second texts ----
def test_text_pair_takes_the_first_source_there_is(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = {"a cat": ["the cat", "one cat"], "a dog": [], "a cow": ["", "some cow"]}
    path.write_text(
        "".join(json.dumps({"caption": c, "paraphrases": p}) + "\n" for c, p in lines.items())
    )
    known = Paraphrases(path)
    assert known.get(["a cow", "no such", "a cat", "a dog"]) == [
        ["some cow"],
        [],
        ["the cat", "one cat"],
        [],
    ]
    captions, templates = [["a cat"], ["a dog"], ["a cow", "moo"]], ("icon of {}", "{} drawn")
    u = np.zeros((3, 32), np.float32)
    u[:, 1] = 0.9
    plain = ["a cat", "a dog", "a cow"]
    assert common.text_pair(captions, u, known, templates) == (
        plain,
        ["one cat", "a dog drawn", "some cow"],
    )
    assert common.text_pair(captions, u, None, templates)[1] == [
        "a cat drawn",
        "a dog drawn",
        "moo drawn",
    ]
    # nothing is dropped or swapped; the anchor is the last of the caption and its paraphrases
    u[:, 2:] = 0.99
    # another caption, else words
    assert common.text_pair(captions, u)[1] == ["a cat", "a dog", "moo"]
    assert common.text_pair(captions, u, known) == (["one cat", "a dog", "some cow"],) * 2
    assert common.text_pair(captions, u, known, paraphrase_anchor=False)[0] == plain
    assert common.text_pair(captions, u, known, second=False) == (plain, [])
    u[:, 0] = 0.7
    assert [texts[2] for texts in common.text_pair(captions, u)] == ["moo", "a cow"]
    # T is uniform over three, T~ over two
    many = np.random.default_rng(0).random((3000, 32), dtype=np.float32)
    first, other = common.text_pair([["a cat"]] * 3000, many, known)
    assert all(
        first.count(t) == pytest.approx(1000, abs=100) for t in ("a cat", "the cat", "one cat")
    )
    assert all(other.count(t) == pytest.approx(1500, abs=100) for t in ("the cat", "one cat"))
    # drawn independently
    assert sum(a == b for a, b in zip(first, other)) == pytest.approx(1000, abs=100)
    for text in ('{"words": "x"}\n', ""):
        path.write_text(text)
        with pytest.raises(UserError, match="^--paraphrases .*p.jsonl: "):
            Paraphrases(path)


def test_drop_and_swap():
    text = "one two three four five six seven"
    u = common.uniforms(0, 0, range(400), 30)
    out = [common.drop_and_swap(text, row, 0.3, 0.2) for row in u]
    assert all(out) and all(not Counter(o.split()) - Counter(text.split()) for o in out)
    kept = np.mean([len(o.split()) for o in out]) / 7
    assert abs(kept - 0.7) < 0.04
    assert any(sorted(o.split()) == sorted(text.split()) and o != text for o in out)
    assert all(
        common.drop_and_swap(t, row, 1.0, 1.0) for row in u[:20] for t in ("word", "two words")
    )  # never empty
    assert all(common.drop_and_swap(text, row, 0.0, 0.0) == text for row in u[:20])
    swapped = np.mean([common.drop_and_swap(text, row, 0.0, 0.1) != text for row in u])
    assert abs(swapped - 0.7) < 0.07  # 0.1 swaps a word, of seven words
