"""One split as a table (Data), decoding of images, random numbers, image views against
torchvision's, second texts."""

import common
from contrastive.core.processes import UserError
from contrastive.data.pixels import decode
from contrastive.data.views import OPERATIONS, Draw, crop_batch, randaugment
from contrastive.papers.text_pairs import Paraphrases

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as V

from helpers import (
    CLASSES, TEXT, TRUNCATED, all_rows, assert_close, encode, picture, write_captions,
    write_rows)


def test_rows_without_a_column_group_are_groups_of_their_own():
    table = common.make_table([["a"], ["b"]], ["x", "y"])
    bare = common.Data("plain", "test", table)
    assert bare.labels is None
    # a row taken twice is a positive of itself
    twice = bare.select([1, 0, 1])
    assert twice.groups.tolist() == [1, 0, 1]


def test_select_takes_rows_in_any_order_and_again():
    table = common.make_table(
        [["one"], ["two"], ["three"], ["four"]],
        ["a", "b", "c", "d"],
        classes={"label": CLASSES},
        label=[0, 1, 2, 0],
        group=[0, 0, 1, 1],
    )
    pixels = torch.arange(48, dtype=torch.uint8).view(4, 3, 2, 2)
    shards = np.array([0, 0, 0, 1])
    four = common.Data("four", "train", table, pixels=pixels, shards=shards)
    part = four.select([3, 2, 2, 1], "val")
    assert part.split == "val"
    assert part.column("key") == ["d", "c", "c", "b"]
    assert part.captions(0) == ["four"]
    assert torch.equal(part.read(0), pixels[3])
    assert part.labels.tolist() == [0, 2, 2, 1]
    assert part.label_names == CLASSES
    assert part.groups.tolist() == [1, 1, 1, 0]
    assert part.shards.tolist() == [1, 0, 0, 0]
    again = part.select([3, 0])
    assert again.column("key") == ["b", "d"]
    assert again.rows.tolist() == [1, 3]


def test_small_images_of_one_size_go_into_memory(tmp_path):
    data = all_rows(write_captions(tmp_path, 7))
    inside = data.in_memory()
    assert inside.pixels.shape == (7, 3, 20, 24)
    assert inside.pixels.dtype == torch.uint8
    assert torch.equal(inside.read(5), data.read(5))
    # what cannot be read is counted as a bad sample when its turn comes
    for other in (TEXT, encode(picture(5, 30, 10))):
        (tmp_path / data.key(5)).write_bytes(other)
        assert data.in_memory().pixels is None


# ---- decoding ----
@pytest.mark.parametrize("mode, fill, kind, colour", [
    ("L", 7, "png", [7, 7, 7]),
    ("RGBA", (255, 0, 0, 128), "png", [255, 127, 127]),
    ("LA", (0, 128), "png", [127, 127, 127]),
    ("CMYK", (0, 255, 255, 0), "jpeg", [255, 0, 0])])
def test_decode(mode, fill, kind, colour):
    image = Image.new(mode, (1, 1), fill)
    pixels = decode(encode(image, kind))
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 1, 1)
    assert pixels.flatten().tolist() == colour


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_decode_turns_pictures_as_exif_says(mode):
    upright = np.zeros((32, 16), np.uint8)
    upright[:16] = 255  # white above, black below
    rotated = np.rot90(upright).copy()
    stored = Image.fromarray(rotated).convert(mode)
    exif = Image.Exif()
    exif[0x112] = 6  # "turn right to see it upright"
    pixels = decode(encode(stored, "jpeg", exif=exif))
    assert pixels.shape == (3, 32, 16)
    difference = pixels.int() - torch.from_numpy(upright)
    assert difference.abs().float().mean() < 4


def noise(n=4, height=16, width=16):
    """(n, 3, height, width) in 0..1."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 3, height, width, generator=generator)


NOISE = V.to_pil_image(noise(1, 64, 64)[0])
JPEG = encode(NOISE, "jpeg", comment=b"a \xff\xd9 b")
BROKEN = {
    "cut": TRUNCATED,
    "without its end": JPEG[:-2],
    "cut, with something behind": JPEG[:-500] + b"\0\0",
    "cut png": encode(NOISE)[:5000],
    # Pillow would make everything above 255 white
    "wide grey": encode(Image.new("I;16", (8, 8), 1000), "tiff"),
    "text": TEXT}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_decode_refuses_what_is_broken_or_wide_grey(content):
    with pytest.raises((ValueError, OSError)):
        decode(content)


@pytest.mark.parametrize("tail", [TEXT, JPEG[:-2]])
def test_data_behind_the_end_of_a_jpeg_are_not_looked_at(tail):
    """As a phone's motion photo has them."""
    pixels = decode(JPEG + tail)
    assert torch.equal(pixels, decode(JPEG))


# ---- random numbers ----
def test_uniforms_are_uniform_and_independent():
    u = common.uniforms(1, 2, range(5000), 8, stream=1)
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.std() - 12**-0.5) < 0.01
    correlations = np.corrcoef(u.T) - np.eye(8)
    assert np.abs(correlations).max() < 0.06


def test_uniforms_depend_on_seed_epoch_key_and_stream_alone():
    u = common.uniforms(1, 2, range(5000), 8, stream=1)
    part = common.uniforms(1, 2, [9, 7], 3, 1)
    assert np.array_equal(part, u[[9, 7], :3])
    for seed, epoch, stream in ((0, 2, 1), (1, 3, 1), (1, 2, 0)):
        other = common.uniforms(seed, epoch, range(5000), 8, stream)
        correlations = np.corrcoef(other.ravel(), u.ravel())
        assert abs(correlations[0, 1]) < 0.03


# ---- views ----
def changed_colours(augment, x, **draws):
    """The batch after flip, colours and blur, with draws of one half but for those of these
    names."""
    u = torch.full((len(x), 16, 1, 1, 1), 0.5)
    for name, values in draws.items():
        u[:, getattr(Draw, name), 0, 0, 0] = torch.tensor(values)
    return augment.photometric(x, u)


@pytest.mark.parametrize("scale_min, size", [(0.08, 16), (0.5, 48), (1.0, 24)])
def test_crops_are_torchvisions_resized_crop(scale_min, size):
    """Of a batch, and of one sample."""
    images = (noise(8, 37, 53) * 255).byte()
    u = common.uniforms(0, 0, range(8), 16)
    augment = common.Augment(size, scale_min)
    views = crop_batch(augment, images, u)
    boxes = augment.boxes(37, 53, u).tolist()
    for image, draw, view, (top, left, h, w) in zip(images, u, views, boxes):
        assert 0 <= top <= top + h <= 37
        assert 0 <= left <= left + w <= 53
        x = image.float() / 255
        expected = V.resized_crop(x, top, left, h, w, [size, size], antialias=True)
        assert_close(view, expected)
        one = augment.crop_one(image, draw)
        assert_close(one / 255, expected, 1.5 / 255)  # but for rounding to uint8


@pytest.mark.parametrize("name, draw, function, value", [
    ("brightness", 0.0, V.adjust_brightness, 0.6),
    ("brightness", 0.9, V.adjust_brightness, 1.32),
    ("contrast", 0.3, V.adjust_contrast, 0.84),
    ("contrast", 0.9, V.adjust_contrast, 1.32),
    ("saturation", 0.0, V.adjust_saturation, 0.6),
    ("saturation", 0.9, V.adjust_saturation, 1.32),
    ("hue", 0.1, V.adjust_hue, -0.32),
    ("hue", 0.9, V.adjust_hue, 0.32)])
def test_jitter_is_torchvisions(name, draw, function, value):
    grey = torch.full((1, 3, 16, 16), 0.4)
    primaries = torch.eye(3).view(3, 3, 1, 1).repeat(1, 1, 16, 16)
    x = torch.cat([noise(), grey, primaries])
    augment = common.Augment(16, jitter_p=1.0, **{name: 0.4})
    changed = changed_colours(augment, x, **{name.upper(): draw})
    assert_close(changed, function(x, value))


@pytest.mark.parametrize("size, sigma", [(16, 0.1), (40, 1.3)])
def test_blur_is_torchvisions(size, sigma):
    """Its strength has a draw of its own: 0.1 to 2 pixels, as SimCLR."""
    x = noise(2, size, size)
    width = 2 * max(1, size // 20) + 1
    draw = (sigma - 0.1) / 1.9
    augment = common.Augment(size, blur=0.5)
    blurred = changed_colours(augment, x, BLUR=0.2, BLUR_SIGMA=draw)
    expected = V.gaussian_blur(x, [width, width], [sigma, sigma])
    assert_close(blurred, expected)


def test_probabilities_choose_samples_one_by_one():
    """Nothing, brightness, grey, flip, blur."""
    x = noise(5)
    augment = common.Augment(16, flip=0.5, jitter_p=0.8, brightness=0.4, grey=0.2, blur=0.5)
    out = changed_colours(
        augment,
        x,
        BRIGHTNESS=0.9,
        JITTER=[0.9, 0.7, 0.9, 0.9, 0.9],
        GREY=[0.9, 0.9, 0.1, 0.9, 0.9],
        FLIP=[0.9, 0.9, 0.9, 0.1, 0.9],
        BLUR=[0.9, 0.9, 0.9, 0.9, 0.1],
    )
    expected = x.clone()
    expected[1] = V.adjust_brightness(x[1], 1.32)
    expected[2] = V.rgb_to_grayscale(x[2], 3)
    expected[3] = x[3].flip(-1)
    expected[4] = V.gaussian_blur(x[4], 3, 1.05)
    assert_close(out, expected)


def changed(name, image):
    """An image (3, H, W) uint8 that an operation of RandAugment has changed at 7 of 10."""
    operation = OPERATIONS[name]
    picture = operation.change(V.to_pil_image(image), operation.strength(21))
    return V.pil_to_tensor(picture)


@pytest.mark.parametrize("name, strength, has_sign", [
    ("TranslateX", 7, True), ("TranslateY", 7, True), ("ShearX", 0.21, True),
    ("ShearY", 0.21, True), ("Rotate", 21, True), ("Brightness", 0.36, False),
    ("Sharpness", 0.36, False)])
def test_strengths_of_the_cc3m_trainer(name, strength, has_sign):
    """At 7 of 10: shifts in pixels at any size; light and sharpness by one factor."""
    operation = OPERATIONS[name]
    assert operation.strength(21) == pytest.approx(strength)
    assert operation.has_random_sign == has_sign


def test_operations_of_the_cc3m_trainer():
    """Grey stands beside a moved picture."""
    image = (noise(1, 64, 80)[0] * 255).byte()
    shifted = changed("TranslateX", image)
    border, rest = shifted.split([7, 73], dim=2)
    assert (border == 128).all()
    assert torch.equal(rest, image[:, :, :-7])
    turned = changed("Rotate", image).float()
    bilinear = V.InterpolationMode.BILINEAR
    expected = V.rotate(image, 21, interpolation=bilinear, fill=128).float()
    assert (turned - expected).abs().mean() < 2
    brighter = (image * 1.36).clamp(0, 255).byte()
    assert_close(changed("Brightness", image), brighter, 1)
    sharper = V.adjust_sharpness(image, 1.36)
    assert_close(changed("Sharpness", image), sharper, 1)


def test_shears_of_the_cc3m_trainer():
    """A column is 0.21 pixels further to the left with each row."""
    image = torch.zeros(3, 64, 80, dtype=torch.uint8)
    image[:, :, 40] = 255
    sheared = changed("ShearX", image)
    column = sheared[0].float().where(sheared[0] != 128, 0).argmax(1)           # (H,)
    expected = 40 - 0.21 * (torch.arange(64) + 0.5)
    assert (column - expected).abs().max() < 1


@pytest.mark.parametrize("horizontal, vertical", [
    ("ShearX", "ShearY"), ("TranslateX", "TranslateY")])
def test_vertical_operations_of_the_cc3m_trainer(horizontal, vertical):
    image = (noise(1, 64, 80)[0] * 255).byte()
    expected = changed(horizontal, image.transpose(1, 2)).transpose(1, 2)
    assert_close(changed(vertical, image), expected, 1)


def test_randaugment_reads_its_draws_alone(monkeypatch):
    """And leaves the random numbers of this process and of the GPU as they are."""
    clip = (noise(2, 32, 40) * 255).byte()
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    num_changed = 0
    for row in common.uniforms(0, 0, range(60), 16):
        state = torch.get_rng_state()
        view = randaugment(clip, row, 2, 21)
        assert torch.equal(torch.get_rng_state(), state)
        num_changed += not torch.equal(view, clip)
        torch.rand(1)
        assert torch.equal(randaugment(clip, row, 2, 21), view)
    assert not seeds
    assert num_changed > 30


@pytest.mark.parametrize("how, size", [("crop", [16, 24]), ("squash", [16, 16])])
def test_evaluation_view(how, size, tmp_path):
    """Of a tensor, a PIL image and a file."""
    image = picture(3, 40, 60)
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    view = common.EvalTransform(16, (0.5,) * 3, (0.25,) * 3, how)
    pixels = view(tensor)
    resized = V.resize(tensor, size, antialias=True)
    expected = V.center_crop(resized, 16) / 255
    assert_close(pixels, (expected - 0.5) / 0.25)
    file = tmp_path / "a.png"
    file.write_bytes(encode(image))
    assert torch.equal(view(str(file)), pixels)
    assert torch.equal(view(Image.fromarray(image)), pixels)


@pytest.mark.parametrize("how", ["crop", "squash"])
def test_evaluation_view_is_that_of_training_without_a_crop(how):
    large = (noise(1, 40, 80)[0] * 255).byte()
    augment = common.Augment(40, squash=how == "squash")
    training = augment.crop_one(large, np.full(16, 0.5))
    view = common.EvalTransform(40, (0,) * 3, (1,) * 3, how)
    assert torch.equal(training, view.raw(large))


# ---- second texts ----
@pytest.fixture
def paraphrases(tmp_path):
    rows = [("a cat", ["the cat", "one cat"]), ("a dog", []), ("a cow", ["", "some cow"])]
    path = tmp_path / "p.jsonl"
    write_rows(path, ["caption", "paraphrases"], rows)
    return Paraphrases(path)


def test_text_pair_takes_the_first_source_there_is(paraphrases):
    """A paraphrase, else a template, else another caption, else words dropped and swapped."""
    captions = [["a cat"], ["a dog"], ["a cow", "moo"]]
    plain = ["a cat", "a dog", "a cow"]
    u = np.full((3, 32), 0.99, np.float32)  # nothing is dropped or swapped
    u[:, 0] = 0
    templates = ("icon of {}", "{} drawn")
    pair = common.text_pair(captions, u, paraphrases, templates, paraphrase_anchor=False)
    assert pair == (plain, ["one cat", "a dog drawn", "some cow"])
    _, second = common.text_pair(captions, u, None, templates)
    assert second == ["a cat drawn", "a dog drawn", "moo drawn"]
    first, second = common.text_pair(captions, u)
    assert first == plain
    assert second == ["a cat", "a dog", "moo"]
    assert common.text_pair(captions, u, augment=False) == (plain, [])


def test_text_pair_draws_anchor_and_second_text_independently(paraphrases):
    """The anchor of the caption and its paraphrases, the other text of the paraphrases."""
    u = np.random.default_rng(0).random((3000, 32), dtype=np.float32)
    first, second = common.text_pair([["a cat"]] * 3000, u, paraphrases)
    for text in ("a cat", "the cat", "one cat"):
        assert first.count(text) == pytest.approx(1000, abs=100)
    for text in ("the cat", "one cat"):
        assert second.count(text) == pytest.approx(1500, abs=100)
    is_equal = np.array(first) == np.array(second)
    assert is_equal.sum() == pytest.approx(1000, abs=100)


def test_file_without_paraphrases_is_refused(tmp_path):
    path = write_rows(tmp_path / "p.jsonl", ["words"], [("x",)])
    with pytest.raises(UserError, match="^--paraphrases .*p.jsonl: "):
        Paraphrases(path)


def test_drop_and_swap():
    words = "one two three four five six seven".split()
    text = " ".join(words)
    num_words = []
    is_swapped = []
    for row in common.uniforms(0, 0, range(400), 30):
        some = common.drop_and_swap(text, row, 0.3, 0.0).split()
        assert some == [word for word in words if word in some]
        num_words.append(len(some))
        swapped = common.drop_and_swap(text, row, 0.0, 0.1)
        assert sorted(swapped.split()) == sorted(words)
        is_swapped.append(swapped != text)
        assert common.drop_and_swap("two words", row, 1.0, 1.0)  # never empty
    assert np.mean(num_words) == pytest.approx(4.9, abs=0.3)  # 0.7 of seven
    assert np.mean(is_swapped) == pytest.approx(0.7, abs=0.07)  # a tenth of seven words each
