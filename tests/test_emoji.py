"""Emoji, moving emoji and emoji scenes: what they show, and what their splits hold out."""

import itertools
import re
from collections import Counter, defaultdict

import common
from contrastive.data import moving_emoji
from contrastive.data.options import DataOptions
from contrastive.data.registry import SETS, SPLITS

import numpy as np
import pytest
import torch

from helpers import complains, open_splits

@pytest.fixture(params=["train", "val", "test"])
def split(request):
    return request.param


@pytest.fixture(scope="module")
def emoji():
    return open_splits("emoji")


NUM_CAPTIONS = {"train": 4729, "val": 269, "test": 258}


def test_emoji_counts(split, emoji):
    data = emoji[split]
    assert data.pixels.shape == (SETS["emoji"].splits[split], 3, 72, 72)
    assert len(data.label_names) == 99
    assert sum(map(len, data.column("captions"))) == NUM_CAPTIONS[split]


def test_emoji_captions_are_words_and_tell_tones_of_skin(split, emoji):
    """Variants of skin only train."""
    data = emoji[split]
    for key, captions in zip(data.keys(), data.column("captions")):
        is_variant = " " in key
        assert split == "train" or not is_variant
        assert len(set(captions)) == len(captions) > 0
        for text in captions:
            assert text == text.lower().replace("_", " ")
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
        for i, key in enumerate(data.keys()):
            splits[data.pixels[i].numpy().tobytes()].add(split)
            if " " in key:  # a tone is no word of the name
                continue
            for text in data.captions(i):
                words = re.sub(rf"\b({gender})\b", "", text)
                splits[" ".join(re.findall("[a-z0-9]+", words))].add(split)
    assert max(map(len, splits.values())) == 1


# ---- moving emoji ----
PHRASES = [motion.phrases for motion in moving_emoji.MOTIONS.values()]  # of each verb
NAMES = moving_emoji.draw_sprites(32).names  # of each noun
COLOURS = list(moving_emoji.COLOURS)


@pytest.fixture(scope="module")
def moving():
    return open_splits("moving-emoji")


def load_small(split, *clips, **options):
    return common.load_data("moving-emoji", split, frames=2, image_size=8, clips=clips, **options)


def columns_of(data, *names):
    """[(value of each column)] of all clips."""
    return list(zip(*[data.column(name).tolist() for name in names]))


def facts_of(data, i):
    """{true caption of clip i: its (template, phrase, name)}."""
    phrases = PHRASES[data.column("verb")[i]]
    names = NAMES[data.column("noun")[i]]
    colour = COLOURS[data.column("colour")[i]]
    captions = {}
    for facts in itertools.product(moving_emoji.TEMPLATES, phrases, names):
        template, phrase, name = facts
        article = "an" if name[0] in "aeiou" else "a"
        text = template.format(noun=name, verb=phrase, colour=colour, a=article)
        captions[text] = facts
    return captions


@pytest.mark.parametrize("split, count, num_descriptions", [
    ("train", 2000, 1263),
    ("val", 300, 300),
    ("test", 300, 300),
])
def test_moving_emoji_counts(split, count, num_descriptions, moving):
    data = moving[split]
    assert data.pixels.shape == (count, 4, 3, 32, 32)
    assert len(data.pixels.unique(dim=0)) == count
    assert len(set(data.keys())) == count
    assert len(set(data.groups)) == num_descriptions


def test_moving_emoji_have_three_classes(moving):
    data = moving["val"]
    assert data.names("verb") == data.label_names == list(moving_emoji.MOTIONS)
    assert data.names("noun") == [names[0] for names in NAMES]
    assert data.names("colour") == COLOURS
    assert np.array_equal(data.labels, data.column("verb"))


def test_captions_of_a_moving_emoji_say_what_it_shows_in_other_words(split, moving):
    """Three captions of a clip have other forms, phrases and, if there are so many, names."""
    counts = Counter()
    data = moving[split]
    for i, captions in enumerate(data.column("captions")):
        facts = facts_of(data, i)
        templates, phrases, names = zip(*[facts[text] for text in captions])
        assert len(set(templates)) == len(set(phrases)) == 3
        assert set(names) == set(NAMES[data.column("noun")[i]][:3])
        counts.update(templates)
    assert len(counts) == 6
    for template in counts:
        assert {"{noun}", "{verb}", "{colour}"} <= {*re.findall(r"{\w+}", template)}
    assert min(counts.values()) > 0.12 * counts.total()


def test_moving_emoji_are_the_same_in_every_process(moving):
    val = moving["val"]
    assert val.captions(0)[1] == "on grey ground one rosette glides leftwards"
    assert val.column("choices")[0] == ["rosette", "toolbox", "sari", "butterfly", "hut"]
    again = moving_emoji.load("moving-emoji", "val", DataOptions())
    assert torch.equal(again.pixels, val.pixels)


def test_moving_emoji_move_on_their_background(split, moving):
    data = moving[split]
    moves = data.pixels.diff(dim=1).flatten(1).bool().any(1).numpy()
    assert set(data.labels[~moves]) == {data.label_names.index("stands still")}
    corners = data.pixels[:, 0, :, 0, 0].numpy()  # the drawing seldom reaches a corner
    colours = np.array(list(moving_emoji.COLOURS.values()))[data.column("colour")]
    is_ground = np.isclose(corners, colours, atol=1).all(1)
    assert is_ground.mean() > 0.97


@pytest.mark.parametrize("clips", [(2000, 300, 300), (60, 80, 80)])
def test_moving_emoji_hold_out_pairs_but_neither_verbs_nor_nouns(clips):
    train, val, test = [load_small(split, *clips) for split in SPLITS]
    pairs = [set(columns_of(data, "verb", "noun")) for data in (train, val, test)]
    assert len(set.union(*pairs)) == sum(map(len, pairs))
    for column in ("verb", "noun"):
        trained = set(train.column(column))
        assert trained.issuperset(val.column(column))
        assert trained.issuperset(test.column(column))


def test_too_few_moving_emoji_to_hold_out_a_pair_are_refused():
    complains("moving-emoji", "train", "--clips 2 2 2", clips=(2, 2, 2))


def test_clips_of_one_verb_noun_and_colour_are_positives_of_each_other(split, moving):
    facts = columns_of(moving[split], "verb", "noun", "colour")
    groups = moving[split].groups.tolist()
    group_of_facts = dict(zip(facts, groups))
    assert [group_of_facts[fact] for fact in facts] == groups
    assert len(set(groups)) == len(group_of_facts)


QUESTIONS = {
    "what is in the picture?": "noun",
    "what does it do?": "verb",
    "which colour is the background?": "colour",
}


def test_moving_emoji_questions(moving):
    """The place of the right choice tells nothing."""
    data = moving["val"]
    assert set(data.column("question")) == QUESTIONS.keys()
    places = Counter()
    for i, question in enumerate(data.column("question")):
        names = data.names(QUESTIONS[question])
        answer = data.column("answer")[i]
        assert answer == names[data.column(QUESTIONS[question])[i]]
        choices = data.column("choices")[i]
        assert len(set(choices)) == len(choices) == 5
        assert set(choices) < set(names)
        places[choices.index(answer)] += 1
    assert len(places) == 5
    assert min(places.values()) > 0.15 * len(data)


@pytest.fixture(scope="module")
def heard():
    """60 clips with sound and subtitles, in reverse order."""
    return load_small("train", 60, 4, 4, modalities="vas").select(range(59, -1, -1))


def test_subtitles_of_moving_emoji_say_verb_and_noun(heard):
    for i, (verb, noun) in enumerate(columns_of(heard, "verb", "noun")):
        name, _, phrase = heard.sound_and_text(i)["subtitle"].partition(", it ")
        assert name.removeprefix("now look at the ") in NAMES[noun]
        assert phrase in PHRASES[verb]


@pytest.mark.parametrize("column, part, last", [("verb", 0, 23), ("noun", 1, 119)])
def test_sounds_of_moving_emoji_say_verb_and_noun(column, part, last, heard):
    """A tone for the verb and then one for the noun, from 200 Hz of the first class to 3,200 Hz of
    the last."""
    for i, label in enumerate(heard.column(column)):
        tone = np.split(heard.samples(i), 2)[part]
        pitch = abs(np.fft.rfft(tone)).argmax() * 16000 / len(tone)
        assert pitch == pytest.approx(200 * 16 ** (label / last), rel=0.01)


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_exchanged_captions_of_moving_emoji_are_wrong(noise):
    """Not one fits by chance, as the most frequent pair is 6 % of the clips."""
    data = load_small("train", 1000, 40, 40, caption_noise=noise)
    is_noisy = data.column("noisy")
    assert is_noisy.sum() == 1000 * noise
    for i, captions in enumerate(data.column("captions")):
        assert facts_of(data, i).keys().isdisjoint(captions) == is_noisy[i]


# ---- emoji scenes ----
@pytest.fixture(scope="module")
def scenes():
    return open_splits("emoji-scenes", scenes=[20, 2, 5])


def test_emoji_scenes_have_a_caption_that_names_their_class(scenes):
    train, val, test = scenes.values()
    assert train.pixels.shape == (1200, 3, 32, 32)
    assert len(val) == 120
    assert np.bincount(test.labels).tolist() == [5] * 60
    for label, captions in zip(train.labels, train.column("captions")):
        assert captions[0] == train.label_names[label]


def test_emoji_scenes_are_the_same_in_every_process(scenes):
    again = moving_emoji.load("emoji-scenes", "val", DataOptions(scenes=(20, 2, 5)))
    assert torch.equal(again.pixels, scenes["val"].pixels)


@pytest.mark.parametrize("with_places", [True, False])
def test_emoji_scenes_hide_their_class_from_pixels_and_colours(with_places, scenes):
    """Chance is 1.7 %."""
    features = []
    for split in ("train", "test"):
        pixels = scenes[split].pixels.flatten(2).float()                        # (M, 3, H * W)
        if not with_places:
            pixels = pixels.sort().values
        features += [pixels.flatten(1), torch.as_tensor(scenes[split].labels)]
    accuracy = common.knn_accuracy(*features)
    assert accuracy["mean_per_class"] < 12
