"""One split as a table (Data), decoding of images, random numbers, image views against
torchvision's, second texts."""

import json

import common
from contrastive.core.processes import UserError
from contrastive.data.pixels import decode
from contrastive.data.views import OPERATIONS, crop_batch, gaussian_blur, randaugment, shift_hue
from contrastive.papers.text_pairs import Paraphrases

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as V

from helpers import CLASSES, TEXT, TRUNCATED, all_rows, caption, encode, picture, write_captions


@pytest.fixture(scope="module")
def ten():
    """Ten samples in memory with 1, 2, 3, 1, ... captions, classes, groups of two, and shards of
    three."""
    captions = []
    for i in range(10):
        captions.append([caption(i, k) for k in range(i % 3 + 1)])
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
    assert ten.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert ten.label_names == ten.names("label") == CLASSES
    assert ten.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert ten.column("remark")[7] == "no 7"
    assert ten.column("nothing") is None


def test_rows_without_a_column_group_are_groups_of_their_own():
    bare = common.Data("plain", "test", common.make_table([["a"], ["b"]], ["x", "y"]))
    assert bare.labels is None
    assert bare.groups.tolist() == [0, 1]
    # a row taken twice is a positive of itself
    assert bare.select([1, 0, 1]).groups.tolist() == [1, 0, 1]


def test_select_takes_rows_in_any_order_and_again(ten):
    part = ten.select([7, 2, 2, 9], "val")
    assert part.split == "val"
    assert part.column("key") == ["s7", "s2", "s2", "s9"]
    assert [part.captions(k) for k in range(4)] == [ten.captions(i) for i in (7, 2, 2, 9)]
    assert torch.equal(part.read(3), ten.read(9))
    assert part.labels.tolist() == [1, 2, 2, 0]
    assert part.groups.tolist() == [3, 1, 1, 4]
    assert part.shards.tolist() == [2, 0, 0, 3]
    again = part.select([3, 0])
    assert again.column("key") == ["s9", "s7"]
    assert again.rows.tolist() == [9, 7]


def test_unfold_has_a_row_for_each_caption(ten):
    each = ten.unfold()
    assert len(each) == 19
    k = 0
    for i in range(10):
        for text in ten.captions(i):
            assert (each.key(k), each.captions(k)) == (f"s{i}", [text])
            assert torch.equal(each.read(k), ten.read(i))
            assert each.labels[k] == ten.labels[i]
            assert each.groups[k] == ten.groups[i]
            k += 1
    assert each.folded().column("key") == ten.column("key")
    assert each.folded().captions(2) == ten.captions(2)


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
CMYK = Image.new("CMYK", (4, 4), (0, 255, 255, 0))
# name: (image, its kind of file, the one colour that is decoded)
DECODED = {
    "grey": (Image.new("L", (4, 4), 7), "png", [7, 7, 7]),
    "alpha": (Image.new("RGBA", (4, 4), (255, 0, 0, 128)), "png", [255, 127, 127]),
    "grey and alpha": (Image.new("LA", (4, 4), (0, 128)), "png", [127, 127, 127]),
    "cmyk jpeg": (CMYK, "jpeg", [255, 0, 0]),
}


@pytest.mark.parametrize("name", DECODED)
def test_decode(name):
    image, kind, colour = DECODED[name]
    pixels = decode(encode(image, kind))
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 4, 4)
    assert pixels[:, 0, 0].tolist() == colour


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_decode_turns_pictures_as_exif_says(mode):
    upright = np.zeros((32, 16), np.uint8)
    upright[:16] = 255  # white above, black below
    stored = Image.fromarray(np.rot90(upright).copy()).convert(mode)
    exif = Image.Exif()
    exif[0x112] = 6  # "turn right to see it upright"
    pixels = decode(encode(stored, "jpeg", exif=exif))
    assert pixels.shape == (3, 32, 16)
    assert np.abs(pixels.numpy().astype(int) - upright).mean() < 4


def noise(n=4, height=37, width=53, seed=0):
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


NOISE = V.to_pil_image(noise(1, 64, 64)[0])
JPEG = encode(NOISE, "jpeg")


@pytest.mark.parametrize(
    "content", [TRUNCATED, JPEG[:-2], JPEG[:30], encode(NOISE)[:5000], TEXT, b""]
)
def test_decode_refuses_what_is_broken(content):
    with pytest.raises((ValueError, OSError)):
        decode(content)


def test_decode_refuses_wide_grey():
    """Pillow would make everything above 255 white."""
    with pytest.raises(ValueError, match="more than 8 bits of grey"):
        decode(encode(Image.fromarray(np.full((8, 8), 1000, np.uint16)), "tiff"))


def test_data_behind_the_end_of_a_jpeg_are_not_looked_at():
    """As a phone's motion photo has them; but a cut image is refused, whatever follows."""
    whole = encode(NOISE, "jpeg", comment=b"a \xff\xd9 b")
    for tail in (b"\0", np.random.default_rng(0).bytes(100_000), whole[:-2]):
        assert torch.equal(decode(whole + tail), decode(whole))
    for cut in (2, 500):
        with pytest.raises(ValueError, match="truncated jpeg"):
            decode(whole[:-cut] + b"\0\0")


# ---- random numbers ----
def test_uniforms_are_uniform_and_independent():
    u = common.uniforms(1, 2, range(5000), 8, stream=1)
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.std() - 12**-0.5) < 0.01
    assert np.abs(np.corrcoef(u.T) - np.eye(8)).max() < 0.06


def test_uniforms_depend_on_seed_epoch_key_and_stream_alone():
    u = common.uniforms(1, 2, range(5000), 8, stream=1)
    assert np.array_equal(common.uniforms(1, 2, [9, 7], 3, 1), u[[9, 7], :3])
    for seed, epoch, stream in ((0, 2, 1), (1, 3, 1), (1, 2, 0)):
        other = common.uniforms(seed, epoch, range(5000), 8, stream)
        assert abs(np.corrcoef(other.ravel(), u.ravel())[0, 1]) < 0.03


# ---- views ----
def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def draws(n, columns):
    """(n, 16) draws of one half, but for {column: draws}."""
    u = np.full((n, common.Augment.DRAWS), 0.5, np.float32)
    for column, values in columns.items():
        u[:, column] = values
    return u


def changed_colours(augment, x, columns):
    """The batch after flip, colours and blur with these draws."""
    u = torch.from_numpy(draws(len(x), columns))
    return augment.photometric(x, u[:, :, None, None, None])


@pytest.mark.parametrize("scale_min, size", [(0.08, 16), (0.5, 48), (1.0, 24)])
def test_crops_are_torchvisions_resized_crop(scale_min, size):
    """Of a batch, and of one sample."""
    images = (noise(8) * 255).byte()
    u = common.uniforms(0, 0, range(8), 16)
    augment = common.Augment(size, scale_min)
    views = crop_batch(augment, images, u)
    for i, (top, left, h, w) in enumerate(augment.boxes(37, 53, u).tolist()):
        assert 0 <= top <= top + h <= 37
        assert 0 <= left <= left + w <= 53
        image = images[i].float() / 255
        expected = V.resized_crop(image, top, left, h, w, [size, size], antialias=True)
        close(views[i], expected)
        # but for rounding to uint8
        close(augment.crop_one(images[i], u[i]).float() / 255, expected, 1.5 / 255)


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("strength, column, function", [
    ("brightness", 6, V.adjust_brightness), ("contrast", 7, V.adjust_contrast),
    ("saturation", 8, V.adjust_saturation)])
def test_jitter_is_torchvisions(strength, column, function, draw):
    x = noise(4, 16, 16)
    augment = common.Augment(16, jitter_p=1.0, **{strength: 0.4})
    changed = changed_colours(augment, x, {5: 0.0, column: draw})
    close(changed, function(x, 1 + (2 * draw - 1) * 0.4))


@pytest.mark.parametrize("shift", [-0.5, -0.2, 0.4])
def test_hue_and_grey_are_torchvisions(shift):
    grey = torch.full((1, 3, 16, 16), 0.4)
    primaries = torch.eye(3)[:, :, None, None].expand(3, 3, 16, 16)
    x = torch.cat([noise(4, 16, 16), grey, primaries])
    close(shift_hue(x, torch.full((8, 1, 1, 1), shift)), V.adjust_hue(x, shift))
    hue = common.Augment(16, jitter_p=1.0, hue=0.1)
    close(changed_colours(hue, x, {9: 0.5 + shift / 2}), V.adjust_hue(x, shift * 0.1))
    close(changed_colours(common.Augment(16, grey=1.0), x, {}), V.rgb_to_grayscale(x, 3))


@pytest.mark.parametrize("size", [16, 48, 224])
@pytest.mark.parametrize("sigma", [0.1, 1.3])
def test_blur_is_torchvisions(sigma, size):
    """Its strength has a draw of its own: 0.1 to 2 pixels, as SimCLR."""
    x = noise(2, size, size)
    width = 2 * max(1, size // 20) + 1
    expected = V.gaussian_blur(x, [width, width], [sigma, sigma])
    close(gaussian_blur(x, torch.full((2,), sigma)), expected)
    augment = common.Augment(size, blur=0.5)
    close(changed_colours(augment, x, {11: 0.2, 14: (sigma - 0.1) / 1.9}), expected)


def test_probabilities_choose_samples_one_by_one():
    x = noise(4, 16, 16)
    augment = common.Augment(16, 1.0, 0.5, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5)
    rows = [
        draws(1, {4: 0.9, 5: 0.9, 10: 0.9, 11: 0.9}),
        draws(1, {4: 0.9, 5: 0.7, 6: 0.9, 10: 0.9, 11: 0.9}),
        draws(1, {4: 0.9, 5: 0.9, 10: 0.1, 11: 0.9}),
        draws(1, {4: 0.1, 5: 0.9, 10: 0.9, 11: 0.9}),
    ]
    u = torch.from_numpy(np.concatenate(rows))[:, :, None, None, None]
    out = augment.photometric(x, u)
    assert torch.equal(out[0], x[0])
    assert not torch.equal(out[1], x[1])
    close(out[2], V.rgb_to_grayscale(x[2], 3))
    assert torch.equal(out[3], x[3].flip(-1))
    for i in range(4):  # no sample looks at its neighbours
        close(augment.photometric(x[i : i + 1], u[i : i + 1])[0], out[i], 1e-6)


def changed(name, image, strength):
    """An image (3, H, W) uint8 that an operation of RandAugment has changed, as int."""
    return V.pil_to_tensor(OPERATIONS[name].change(V.to_pil_image(image), strength)).int()


def test_moves_of_the_cc3m_trainer():
    """At 7 of 10: shifts by 7 pixels at any size, shears by 0.21, rotations by 21 degrees; grey
    stands beside the moved picture."""
    image = (noise(1, 64, 80)[0] * 255).byte()
    shifted = torch.full((3, 64, 80), 128).int()
    shifted[:, :, 7:] = image[:, :, :-7]
    assert torch.equal(changed("TranslateX", image, OPERATIONS["TranslateX"].strength(21)), shifted)
    strengths = {"TranslateX": 7, "TranslateY": 7, "ShearX": 0.21, "ShearY": 0.21, "Rotate": 21}
    for name, strength in strengths.items():
        assert OPERATIONS[name].strength(21) == pytest.approx(strength)
        assert OPERATIONS[name].has_random_sign


def test_light_of_the_cc3m_trainer_has_one_factor_for_a_magnitude():
    """level / 10 * 1.8 + 0.1: 1.36 at 7 of 10, never less than 1."""
    image = (noise(1, 20, 30)[0] * 255).byte()
    brighter = (image * 1.36).clamp(0, 255).int()
    sharper = V.adjust_sharpness(image, 1.36).int()
    for name, expected in {"Brightness": brighter, "Sharpness": sharper}.items():
        assert not OPERATIONS[name].has_random_sign
        pixels = changed(name, image, OPERATIONS[name].strength(21))
        assert (pixels - expected).abs().max() <= 1


def test_randaugment_reads_its_draws_alone(monkeypatch):
    """And leaves the random numbers of this process and of the GPU as they are."""
    clip = (noise(2, 32, 40) * 255).byte()
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    state = torch.get_rng_state()
    u = common.uniforms(0, 0, range(60), 16)
    views = [randaugment(clip, row, 2, 21) for row in u]
    assert not seeds
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(not torch.equal(view, clip) for view in views) > 30
    torch.manual_seed(5)
    for row, view in zip(u, views):
        assert torch.equal(randaugment(clip, row, 2, 21), view)


@pytest.mark.parametrize("how, size", [("crop", [16, 24]), ("squash", [16, 16])])
def test_evaluation_view(how, size, tmp_path):
    """Of a tensor, a PIL image and a file."""
    image = picture(3, 40, 60)
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    view = common.EvalTransform(16, (0.5,) * 3, (0.25,) * 3, how)
    expected = V.center_crop(V.resize(tensor, size, antialias=True), [16, 16])
    close(view(tensor), (expected / 255 - 0.5) / 0.25)
    (tmp_path / "a.png").write_bytes(encode(image))
    for source in (Image.fromarray(image), str(tmp_path / "a.png")):
        assert torch.equal(view(source), view(tensor))


@pytest.mark.parametrize("how", ["crop", "squash"])
def test_evaluation_view_is_that_of_training_without_a_crop(how):
    large = (noise(1, 40, 80)[0] * 255).byte()
    augment = common.Augment(40, squash=how == "squash")
    training = augment.crop_one(large, draws(1, {})[0])
    assert torch.equal(training, common.EvalTransform(40, (0,) * 3, (1,) * 3, how).raw(large))


# ---- second texts ----
CAPTIONS = [["a cat"], ["a dog"], ["a cow", "moo"]]


@pytest.fixture
def paraphrases(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = {"a cat": ["the cat", "one cat"], "a dog": [], "a cow": ["", "some cow"]}
    with open(path, "w") as file:
        for text, others in lines.items():
            file.write(json.dumps({"caption": text, "paraphrases": others}) + "\n")
    return Paraphrases(path)


def test_text_pair_takes_the_first_source_there_is(paraphrases):
    """A paraphrase, else a template, else another caption, else words dropped and swapped."""
    u = np.full((3, 32), 0.99, np.float32)  # nothing is dropped or swapped
    u[:, 0] = 0
    templates = ("icon of {}", "{} drawn")
    plain = ["a cat", "a dog", "a cow"]
    pair = common.text_pair(CAPTIONS, u, paraphrases, templates, paraphrase_anchor=False)
    assert pair == (plain, ["one cat", "a dog drawn", "some cow"])
    second = common.text_pair(CAPTIONS, u, None, templates)[1]
    assert second == ["a cat drawn", "a dog drawn", "moo drawn"]
    assert common.text_pair(CAPTIONS, u) == (plain, ["a cat", "a dog", "moo"])
    assert common.text_pair(CAPTIONS, u, augment=False) == (plain, [])


def test_text_pair_draws_anchor_and_second_text_independently(paraphrases):
    """The anchor of the caption and its paraphrases, the other text of the paraphrases."""
    u = np.random.default_rng(0).random((3000, 32), dtype=np.float32)
    first, second = common.text_pair([["a cat"]] * 3000, u, paraphrases)
    for text in ("a cat", "the cat", "one cat"):
        assert first.count(text) == pytest.approx(1000, abs=100)
    for text in ("the cat", "one cat"):
        assert second.count(text) == pytest.approx(1500, abs=100)
    num_equal = sum(a == b for a, b in zip(first, second))
    assert num_equal == pytest.approx(1000, abs=100)


@pytest.mark.parametrize("text", ['{"words": "x"}\n', ""])
def test_file_without_paraphrases_is_refused(text, tmp_path):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match="^--paraphrases .*p.jsonl: "):
        Paraphrases(tmp_path / "p.jsonl")


def test_drop_and_swap():
    words = "one two three four five six seven".split()
    dropped = []
    is_swapped = []
    for row in common.uniforms(0, 0, range(400), 30):
        text = common.drop_and_swap(" ".join(words), row, 0.3, 0.0).split()
        assert text
        assert text == [word for word in words if word in text]
        dropped.append(1 - len(text) / 7)
        text = common.drop_and_swap(" ".join(words), row, 0.0, 0.1).split()
        assert sorted(text) == sorted(words)
        is_swapped.append(text != words)
        assert common.drop_and_swap("two words", row, 1.0, 1.0)  # never empty
    assert np.mean(dropped) == pytest.approx(0.3, abs=0.04)
    assert np.mean(is_swapped) == pytest.approx(0.7, abs=0.07)  # a tenth of seven words each
