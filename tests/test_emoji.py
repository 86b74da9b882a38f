"""Emoji, moving emoji and emoji scenes: what they show, and what their splits hold out."""

import math
import re
from collections import Counter, defaultdict

import common
from contrastive.data import moving_emoji
from contrastive.data.options import DataOptions
from contrastive.core.processes import UserError

import numpy as np
import pytest
import torch

SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def emoji():
    return {s: common.load_data("emoji", s) for s in SPLITS}


def test_emoji_counts_and_captions(emoji):
    assert {s: tuple(d.pixels.shape) for s, d in emoji.items()} == {
        "train": (3058, 3, 72, 72),
        "val": (177, 3, 72, 72),
        "test": (168, 3, 72, 72),
    }
    captions = {s: d.column("captions") for s, d in emoji.items()}
    assert {s: sum(map(len, of)) for s, of in captions.items()} == {
        "train": 4729,
        "val": 269,
        "test": 258,
    }
    assert {s: len(d.label_names) for s, d in emoji.items()} == dict.fromkeys(SPLITS, 99)
    for s, d in emoji.items():  # variants of skin only train, and say so
        for key, said in zip(d.column("key"), captions[s], strict=True):
            assert said
            assert len(set(said)) == len(said)
            assert all(c == c.lower() and "_" not in c for c in said)
            assert {"skin tone" in c for c in said} == {" " in key}
            assert s == "train" or " " not in key
        pairs = set(zip(d.groups.tolist(), [x.numpy().tobytes() for x in d.pixels], strict=True))
        assert len(pairs) == len(set(d.groups.tolist()))  # the drawings of one group are alike
    # base drawings
    assert sum(" " not in k for d in emoji.values() for k in d.column("key")) == 1898
    # identical drawings are positives of each other
    assert len(set(emoji["test"].groups.tolist())) == 166


def test_no_emoji_twin_crosses_the_splits(emoji):
    gender = set(
        "man men mans woman women womans person people male female boy boys girl girls".split()
    )
    where = defaultdict(set)
    for split, data in emoji.items():
        for i in range(len(data)):
            where[data.pixels[i].numpy().tobytes()].add(split)
            if " " not in data.key(i):  # base drawings; a tone is no word of the name
                for c in data.captions(i):
                    where[" ".join(w for w in re.findall("[a-z0-9]+", c) if w not in gender)].add(
                        split
                    )
    assert {len(s) for s in where.values()} == {1}


# ---- moving emoji ----
@pytest.fixture(scope="module")
def moving():
    return {s: common.load_data("moving-emoji", s) for s in SPLITS}


def small(split="train", **options):
    return common.load_data(
        "moving-emoji", split, **({"frames": 2, "image_size": 8, "clips": [200, 30, 40]} | options)
    )


# What a caption of moving emoji can be: every form has a verb, a noun and a colour.
FORMS = (
    "the {n} {v} on a {c} background",
    "against a {c} background {a} {n} {v}",
    "{a} {n} that {v}, with {c} all around",
    "on {c} ground one {n} {v}",
    "a {c} scene in which the {n} {v}",
    "one {n} {v}, the rest is {c}",
)


def facts(data, i):
    """{true caption of clip i: its (form, phrase, name)}."""
    verb, noun, colour = (data.column(c)[i] for c in ("verb", "noun", "colour"))
    phrases = list(moving_emoji.MOTIONS.values())[verb][0]
    return {
        form.format(
            n=n, v=v, c=list(moving_emoji.COLOURS)[colour], a="an" if n[0] in "aeiou" else "a"
        ): (form, v, n)
        for form in FORMS
        for v in phrases
        for n in moving_emoji.draw_sprites(32).names[noun]
    }


def agree(data, i, captions=None):
    """Which of these captions (those of clip i) say what clip i shows: its verb, its noun and its
    colour."""
    true = facts(data, i)
    return [c in true for c in captions or data.captions(i)]


def both(data):
    """[(verb, noun), ...] of all clips, as numbers."""
    return list(zip(data.column("verb").tolist(), data.column("noun").tolist(), strict=True))


def groups_are_facts(d):
    """Is a group what captions say, verb, noun and colour?"""
    said = list(zip(*(d.column(c).tolist() for c in ("verb", "noun", "colour")), strict=True))
    return (
        len(set(said))
        == len(set(d.groups.tolist()))
        == len(set(zip(said, d.groups.tolist(), strict=True)))
    )


def drawn(d):
    return {x.numpy().tobytes() for x in d.pixels}


def test_moving_emoji_counts_columns_and_drawings(moving):
    """The same in every process; three captions of a clip have other forms, phrases and names for
    the same facts."""
    columns = "verb noun colour label group noisy question question_type answer choices".split()
    names, forms = moving_emoji.draw_sprites(32).names, Counter()
    assert len(names) == 120 and all(re.fullmatch("[a-z ]+", n) for of in names for n in of)
    for d, n in zip(moving.values(), (2000, 300, 300), strict=True):
        assert d.pixels.shape == (n, 4, 3, 32, 32)
        assert d.pixels.dtype == torch.uint8
        assert d.clip is None
        assert {*d[5]} == {"pixels", "captions", "key", *columns} - {"group"}
        assert d[5]["label"] == d[5]["verb"]
        assert [d.names(c) for c in ("label", "verb", "noun", "colour")] == [
            [*moving_emoji.MOTIONS],
            [*moving_emoji.MOTIONS],
            [of[0] for of in names],
            [*moving_emoji.COLOURS],
        ]
        for i in range(n):
            said = [facts(d, i)[c] for c in d.captions(i)]
            assert [len({x[k] for x in said}) for k in (0, 1)] == [3, 3]
            assert {x[2] for x in said} == set(names[d.column("noun")[i]][:3])
            forms.update(form for form, *_ in said)
    assert len(forms) == 6 and min(forms.values()) > 0.14 * sum(forms.values())
    assert len({key for d in moving.values() for key in d.keys()}) == 2600
    val, again = moving["val"], moving_emoji.load("moving-emoji", "val", DataOptions())
    assert val.captions(0)[1] == "on grey ground one rosette glides leftwards"
    assert val.column("choices")[0] == ["rosette", "toolbox", "sari", "butterfly", "hut"]
    assert all(again.column(c) == val.column(c) for c in ("captions", "question", "choices"))
    assert torch.equal(again.pixels, val.pixels)


def test_moving_emoji_moves_and_shows_what_its_captions_say(moving):
    for d in moving.values():
        still = {
            d.label_names[v]
            for v, x in zip(d.column("verb"), d.pixels.numpy())
            if (x[0] == x).all()
        }
        assert still == {"stands still"} and len(drawn(d)) == len(d)
        unlike = [i for i in range(len(d) - 1) if d.groups[i] != d.groups[i + 1]]
        assert not any(any(agree(d, i, d.captions(i + 1))) for i in unlike)
        corners = d.pixels[:, 0, :, 0, 0].numpy()  # the drawing seldom reaches a corner
        ground = np.array(list(moving_emoji.COLOURS.values()))[d.column("colour")]
        assert (np.abs(corners.astype(int) - ground).max(1) <= 1).mean() > 0.97
    assert len({tuple(moving["test"].captions(i)) for i in range(300)}) == 300


def test_moving_emoji_holds_out_pairs_but_neither_verbs_nor_nouns(moving):
    pairs = {s: set(both(d)) for s, d in moving.items()}
    assert not pairs["train"] & (pairs["val"] | pairs["test"]) and not pairs["val"] & pairs["test"]
    for s in ("val", "test"):
        for part in (0, 1):  # verbs, nouns
            assert {p[part] for p in pairs[s]} <= {p[part] for p in pairs["train"]}
        assert len(pairs[s]) == 300  # every clip another pair: no two test clips share their words
    for part, share in ((0, 0.15), (1, 0.1)):  # and training has a long tail of either
        counts = sorted(
            Counter(pair[part] for pair in both(moving["train"])).values(), reverse=True
        )
        assert counts[0] > share * 2000
        assert counts[0] > 10 * counts[-1]
        assert counts[0] > 1.5 * counts[1]
    assert {verb for verb, _ in pairs["train"]} == set(range(24))
    # clips of one pair and colour are positives
    assert all(groups_are_facts(d) for d in moving.values())


def test_moving_emoji_tests_nothing_that_a_small_training_set_never_shows():
    train, val, test = (small(s, clips=[60, 80, 80]) for s in SPLITS)
    for d in (val, test):
        for c in ("verb", "noun"):
            assert set(d.column(c).tolist()) <= set(train.column(c).tolist())
        assert not set(d.groups.tolist()) & set(train.groups.tolist())
    with pytest.raises(UserError, match="--clips 2 2 2"):
        small(clips=[2, 2, 2])


def test_moving_emoji_questions(moving):
    places, kinds = Counter(), Counter()
    asked = {
        "what is in the picture?": "noun",
        "what does it do?": "verb",
        "which colour is the background?": "colour",
    }
    for d in (moving["val"], moving["test"]):
        for i in range(len(d)):
            question, answer, choices = (d.column(c)[i] for c in ("question", "answer", "choices"))
            kind = asked[question]
            assert answer == d.names(kind)[d.column(kind)[i]]
            assert d.column("question_type")[i] == kind
            assert len(set(choices)) == len(choices) == 5 and {*choices} < {*d.names(kind)}
            places[choices.index(answer)] += 1
            kinds[kind] += 1
    assert len(kinds) == 3
    assert min(places[k] for k in range(5)) > 0.15 * sum(places.values())  # the place tells nothing


def test_moving_emoji_sounds_and_subtitles_say_verb_and_noun():
    """A tone for the verb and then one for the noun, from 200 Hz of the first class to 3,200 Hz of
    the last; other words than the first caption."""
    data = small(clips=[60, 4, 4], modalities="vas").select(range(59, -1, -1))
    names = moving_emoji.draw_sprites(32).names
    pitch_of_class = {"verb": {}, "noun": {}}
    for i in range(60):
        tones = np.split(data.samples(i), 2)
        for (kind, pitches), tone in zip(pitch_of_class.items(), tones):
            pitch = abs(np.fft.rfft(tone)).argmax() * 16000 / len(tone)
            assert pitches.setdefault(data.column(kind)[i], pitch) == pitch
        verb, noun = (data.column(kind)[i] for kind in pitch_of_class)
        name, _, phrase = data.sound_and_text(i)["subtitle"].partition(", it ")
        assert name.removeprefix("now look at the ") in names[noun]
        assert phrase in list(moving_emoji.MOTIONS.values())[verb].phrases
    for pitches, last in zip(pitch_of_class.values(), (23, 119)):
        rising = [pitches[k] for k in sorted(pitches)]
        assert rising == sorted(rising) and len(rising) > 10
        for k, pitch in pitches.items():
            assert math.log2(pitch / 200) == pytest.approx(4 * k / last, abs=0.02)


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_caption_noise_mismatches_the_announced_part_of_training(noise):
    clean, noisy = (small("train", clips=[1000, 40, 40], caption_noise=n) for n in (0.0, noise))
    right, wrong = np.array([sum(agree(noisy, i)) for i in range(1000)]), noisy.column("noisy")
    assert not clean.column("noisy").any()
    assert wrong.sum() == 1000 * noise
    assert f"{wrong.sum():,} examples with another's captions" in noisy.note
    # not one caption fits by chance, as the most frequent pair is 6 % of the clips
    assert np.array_equal(right, np.where(wrong, 0, 3)) and torch.equal(clean.pixels, noisy.pixels)
    dealt = [sorted(map(tuple, d.column("captions"))) for d in (clean, noisy)]
    assert dealt[0] == dealt[1]  # dealt anew, none lost
    for s in ("val", "test"):
        other = small(s, clips=[1000, 40, 40], caption_noise=noise)
        assert not other.column("noisy").any() and all(all(agree(other, i)) for i in range(40))


# ---- emoji scenes ----
def histogram_of_colours(pixels):
    """(3, H, W) uint8 -> (64,): how many pixels have each of four reds, greens and blues."""
    red, green, blue = (pixels // 64).long()
    return torch.bincount((red * 16 + green * 4 + blue).flatten(), minlength=64).float()


def test_emoji_scenes_show_their_class_and_hide_it_from_pixels_and_colours():
    sets = {
        s: common.load_data("emoji-scenes", s, scenes=[20, 2, 5]) for s in ("train", "val", "test")
    }
    assert [len(d) for d in sets.values()] == [1200, 120, 300]
    train, test = sets["train"], sets["test"]
    assert train.pixels.shape[1:] == (3, 32, 32) and np.bincount(test.labels).tolist() == [5] * 60
    names = train.label_names
    assert len({*names}) == 60
    assert all(train.captions(i)[0] == names[y] for i, y in enumerate(train.labels))
    again = common.load_data("emoji-scenes", "train", scenes=[20, 2, 5])
    assert torch.equal(train.pixels, again.pixels)
    corners = train.pixels[:, :, 0, 0].float()  # mostly background
    assert corners.std(0).min() > 50  # of 0..255, uniform: 74
    pixels = lambda d: d.pixels.flatten(1).float()
    colours = lambda d: torch.stack([histogram_of_colours(pixels) for pixels in d.pixels])
    for features, most in ((pixels, 12), (colours, 20)):
        found = common.knn_accuracy(
            features(train),
            torch.as_tensor(train.labels),
            features(test),
            torch.as_tensor(test.labels),
        )
        assert found["mean_per_class"] < most  # chance: 1.7
