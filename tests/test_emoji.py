"""Emoji, moving emoji and emoji scenes: what they show, and what their splits hold out."""

import math
import re
from collections import Counter, defaultdict

import common
from contrastive.core.processes import UserError
from contrastive.data import moving_emoji
from contrastive.data.options import DataOptions

import numpy as np
import pytest
import torch

from helpers import open_splits

SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def emoji():
    return open_splits("emoji")


@pytest.mark.parametrize("split, num_images, num_captions", [
    ("train", 3058, 4729), ("val", 177, 269), ("test", 168, 258)])
def test_emoji_counts(split, num_images, num_captions, emoji):
    data = emoji[split]
    assert data.pixels.shape == (num_images, 3, 72, 72)
    assert len(data.label_names) == 99
    assert sum(map(len, data.column("captions"))) == num_captions


@pytest.mark.parametrize("split", SPLITS)
def test_emoji_captions_are_words_and_tell_tones_of_skin(split, emoji):
    """Variants of skin only train."""
    data = emoji[split]
    for key, captions in zip(data.column("key"), data.column("captions")):
        is_variant = " " in key
        assert split == "train" or not is_variant
        assert captions
        assert len(set(captions)) == len(captions)
        for text in captions:
            assert text == text.lower()
            assert "_" not in text
            assert ("skin tone" in text) == is_variant


def test_emoji_of_the_same_pixels_are_positives_of_each_other(emoji):
    test = emoji["test"]
    pixels = {}
    for group, image in zip(test.groups.tolist(), test.pixels):
        assert torch.equal(pixels.setdefault(group, image), image)
    assert len(pixels) == 166


def test_no_emoji_twin_crosses_the_splits(emoji):
    """Of the same pixels, or of names that differ in words for women and men alone."""
    gender = "mans?|men|womans?|women|persons?|people|males?|females?|boys?|girls?"
    splits = defaultdict(set)
    for split, data in emoji.items():
        for i in range(len(data)):
            splits[data.pixels[i].numpy().tobytes()].add(split)
            if " " not in data.key(i):  # a tone is no word of the name
                for text in data.captions(i):
                    words = re.sub(rf"\b({gender})\b", "", text)
                    splits[" ".join(re.findall("[a-z0-9]+", words))].add(split)
    assert max(map(len, splits.values())) == 1


# ---- moving emoji ----
@pytest.fixture(scope="module")
def moving():
    return open_splits("moving-emoji")


def load_small(split="train", clips=(200, 30, 40), **options):
    return common.load_data("moving-emoji", split, frames=2, image_size=8, clips=clips, **options)


# What a caption of moving emoji can be: every form has a verb, a noun and a colour.
FORMS = (
    "the {n} {v} on a {c} background",
    "against a {c} background {a} {n} {v}",
    "{a} {n} that {v}, with {c} all around",
    "on {c} ground one {n} {v}",
    "a {c} scene in which the {n} {v}",
    "one {n} {v}, the rest is {c}",
)
MOTIONS = list(moving_emoji.MOTIONS.values())
COLOURS = list(moving_emoji.COLOURS)
NAMES = moving_emoji.draw_sprites(32).names  # of each noun


def facts_of(data, i):
    """{true caption of clip i: its (form, phrase, name)}."""
    colour = COLOURS[data.column("colour")[i]]
    captions = {}
    for name in NAMES[data.column("noun")[i]]:
        article = "an" if name[0] in "aeiou" else "a"
        for phrase in MOTIONS[data.column("verb")[i]].phrases:
            for form in FORMS:
                text = form.format(n=name, v=phrase, c=colour, a=article)
                captions[text] = (form, phrase, name)
    return captions


def pairs_of(data):
    """[(verb, noun), ...] of all clips, as numbers."""
    return list(zip(data.column("verb").tolist(), data.column("noun").tolist()))


def drawings_of(data):
    return {clip.numpy().tobytes() for clip in data.pixels}


@pytest.mark.parametrize("split, count", [("train", 2000), ("val", 300), ("test", 300)])
def test_moving_emoji_counts_and_classes(split, count, moving):
    data = moving[split]
    assert data.pixels.shape == (count, 4, 3, 32, 32)
    assert data.pixels.dtype == torch.uint8
    assert len(drawings_of(data)) == len(set(data.keys())) == count
    assert data.names("verb") == data.label_names == list(moving_emoji.MOTIONS)
    assert data.names("noun") == [names[0] for names in NAMES]
    assert len(NAMES) == 120
    assert data.names("colour") == COLOURS
    assert np.array_equal(data.labels, data.column("verb"))


@pytest.mark.parametrize("split", SPLITS)
def test_captions_of_a_moving_emoji_say_what_it_shows_in_other_words(split, moving):
    """Three captions of a clip have other forms, phrases and, if there are so many, names."""
    data = moving[split]
    counts = Counter()
    for i in range(len(data)):
        facts = facts_of(data, i)
        forms, phrases, names = zip(*[facts[text] for text in data.captions(i)])
        assert len(set(forms)) == len(set(phrases)) == 3
        assert set(names) == set(NAMES[data.column("noun")[i]][:3])
        counts.update(forms)
    assert min(counts[form] for form in FORMS) > 0.12 * counts.total()


def test_moving_emoji_are_the_same_in_every_process(moving):
    val = moving["val"]
    assert val.captions(0)[1] == "on grey ground one rosette glides leftwards"
    assert val.column("choices")[0] == ["rosette", "toolbox", "sari", "butterfly", "hut"]
    again = moving_emoji.load("moving-emoji", "val", DataOptions())
    assert torch.equal(again.pixels, val.pixels)
    for column in ("captions", "question", "choices"):
        assert again.column(column) == val.column(column)


@pytest.mark.parametrize("split", SPLITS)
def test_moving_emoji_move_on_their_background(split, moving):
    data = moving[split]
    is_still = (data.pixels[:, :1] == data.pixels).flatten(1).all(1)
    verbs = {data.label_names[verb] for verb in data.labels[is_still.numpy()]}
    assert verbs == {"stands still"}
    corners = data.pixels[:, 0, :, 0, 0].int().numpy()  # the drawing seldom reaches a corner
    ground = np.array(list(moving_emoji.COLOURS.values()))[data.column("colour")]
    assert (np.abs(corners - ground).max(1) <= 1).mean() > 0.97


def test_moving_emoji_hold_out_pairs_but_neither_verbs_nor_nouns(moving):
    train, val, test = (set(pairs_of(moving[split])) for split in SPLITS)
    assert not train & val
    assert not train & test
    assert not val & test
    assert len(val) == len(test) == 300  # no two clips share their words
    for column in ("verb", "noun"):
        trained = set(moving["train"].column(column))
        assert set(moving["val"].column(column)) <= trained
        assert set(moving["test"].column(column)) <= trained


@pytest.mark.parametrize("split", SPLITS)
def test_clips_of_one_verb_noun_and_colour_are_positives_of_each_other(split, moving):
    data = moving[split]
    facts = list(zip(pairs_of(data), data.column("colour").tolist()))
    groups = data.groups.tolist()
    assert len(set(facts)) == len(set(groups)) == len(set(zip(facts, groups)))


def test_moving_emoji_test_nothing_that_a_small_training_set_never_shows():
    train = load_small("train", [60, 80, 80])
    for split in ("val", "test"):
        data = load_small(split, [60, 80, 80])
        assert set(data.column("verb")) <= set(train.column("verb"))
        assert set(data.column("noun")) <= set(train.column("noun"))
        assert not set(data.groups) & set(train.groups)
    with pytest.raises(UserError, match="--clips 2 2 2"):
        load_small(clips=[2, 2, 2])


QUESTIONS = {
    "what is in the picture?": "noun",
    "what does it do?": "verb",
    "which colour is the background?": "colour",
}


def test_moving_emoji_questions(moving):
    """The place of the right choice tells nothing."""
    data = moving["val"]
    places = Counter()
    kinds = Counter()
    for i in range(len(data)):
        kind = QUESTIONS[data.column("question")[i]]
        answer, choices = data.column("answer")[i], data.column("choices")[i]
        assert data.column("question_type")[i] == kind
        assert answer == data.names(kind)[data.column(kind)[i]]
        assert len(set(choices)) == len(choices) == 5
        assert set(choices) < set(data.names(kind))
        places[choices.index(answer)] += 1
        kinds[kind] += 1
    assert len(kinds) == 3
    assert min(places[place] for place in range(5)) > 0.15 * len(data)


def test_subtitles_of_moving_emoji_say_verb_and_noun():
    data = load_small(clips=[60, 4, 4], modalities="vas").select(range(59, -1, -1))
    for i in range(60):
        name, _, phrase = data.sound_and_text(i)["subtitle"].partition(", it ")
        assert name.removeprefix("now look at the ") in NAMES[data.column("noun")[i]]
        assert phrase in MOTIONS[data.column("verb")[i]].phrases


@pytest.mark.parametrize("column, part, last", [("verb", 0, 23), ("noun", 1, 119)])
def test_sounds_of_moving_emoji_say_verb_and_noun(column, part, last):
    """A tone for the verb and then one for the noun, from 200 Hz of the first class to 3,200 Hz of
    the last."""
    data = load_small(clips=[60, 4, 4], modalities="vas").select(range(59, -1, -1))
    for i in range(60):
        tone = np.split(data.samples(i), 2)[part]
        pitch = abs(np.fft.rfft(tone)).argmax() * 16000 / len(tone)
        assert math.log2(pitch / 200) == pytest.approx(4 * data.column(column)[i] / last, abs=0.02)


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_exchanged_captions_of_moving_emoji_are_wrong(noise):
    """Not one fits by chance, as the most frequent pair is 6 % of the clips."""
    clean = load_small(clips=[1000, 40, 40])
    noisy = load_small(clips=[1000, 40, 40], caption_noise=noise)
    is_noisy = noisy.column("noisy")
    assert is_noisy.sum() == 1000 * noise
    assert torch.equal(clean.pixels, noisy.pixels)
    for i in range(1000):
        is_true = [text in facts_of(noisy, i) for text in noisy.captions(i)]
        assert is_true == [not is_noisy[i]] * 3


# ---- emoji scenes ----
@pytest.fixture(scope="module")
def scenes():
    return open_splits("emoji-scenes", scenes=[20, 2, 5])


def histogram_of_colours(pixels):
    """(3, H, W) uint8 -> (64,): how many pixels have each of four reds, greens and blues."""
    red, green, blue = (pixels // 64).long()
    return torch.bincount((red * 16 + green * 4 + blue).flatten(), minlength=64).float()


def test_emoji_scenes_have_a_caption_that_names_their_class(scenes):
    train, test = scenes["train"], scenes["test"]
    assert (len(train), len(scenes["val"]), len(test)) == (1200, 120, 300)
    assert train.pixels.shape[1:] == (3, 32, 32)
    assert np.bincount(test.labels).tolist() == [5] * 60
    for i, label in enumerate(train.labels):
        assert train.captions(i)[0] == train.label_names[label]
    again = common.load_data("emoji-scenes", "train", scenes=[20, 2, 5])
    assert torch.equal(train.pixels, again.pixels)


def test_emoji_scenes_hide_their_class_from_pixels_and_colours(scenes):
    """Chance is 1.7 %."""
    train, test = scenes["train"], scenes["test"]
    assert train.pixels[:, :, 0, 0].float().std(0).min() > 50  # the background; uniform: 74
    colours = []
    for data in (train, test):
        colours.append(torch.stack([histogram_of_colours(pixels) for pixels in data.pixels]))
    pixels = [train.pixels.flatten(1).float(), test.pixels.flatten(1).float()]
    for (features, queries), most in ((pixels, 12), (colours, 20)):
        accuracy = common.knn_accuracy(
            features, torch.as_tensor(train.labels), queries, torch.as_tensor(test.labels))
        assert accuracy["mean_per_class"] < most
