"""Open Clip Art, on a small replica of the two packages: captions, what is left out, the split."""

from collections import Counter

from contrastive.data import openclipart

import numpy as np
import pytest

from helpers import complains, encode, open_splits, write_files

SVG = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
     xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:cc="http://web.resource.org/cc/"
     xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><rdf:RDF><cc:Work rdf:about="">
<dc:title>{title}</dc:title><dc:subject><rdf:Bag>{keywords}</rdf:Bag></dc:subject>
</cc:Work></rdf:RDF></metadata>{body}</svg>
"""
EMBEDDED = '<image id="a" xlink:href="data:image/png;base64,AAAA"/>'
LINKED = '<image width="3"\n xlink:href="/home/andy/ant.png"/>'


def noise(seed, height=40, width=60):
    """(H, W, 3) uint8 unlike that of any other seed."""
    return np.random.default_rng(seed).integers(0, 200, (height, width, 3), dtype=np.uint8)


# {key: (title, keywords, picture)}; three look alike
DRAWINGS = {
    "animals/birds/owl": ("Owl_01", "Bird|bird|night_bird", noise(0)),
    "animals/ant": ("Ant", "unsorted|hash(0x8a0b6a8)|http://a.org|insect", noise(1, 300, 200)),
    "flags/united_0_x": ("Flags of the world", "", noise(2)),
    "food/pear_0": ("Pear a", "", noise(10)),
    "food/pear_1": ("Pear b", "", noise(10) + 1),
    "food/pear_2": ("Pear c", "", noise(10) + 2),
    "tools/saw_0": ("Saw a", "", noise(20)),
    "tools/saw_1": ("Saw b", "", noise(21)),
    "tools/saw_2": ("Saw c", "", noise(22)),
    # left out
    "flags/united_1_x": ("Flags of the world", "", noise(3)),
    "flags/united_2_x": ("Flags of the world", "", noise(4)),
    "flags/united_3_x": ("Flags of the world", "", noise(5)),
    "shapes/stars/star_5": ("Star", "", noise(30)),
    "animals/zz_caption": ("owl", "night bird|bird", noise(32)),
    "animals/zz_picture": ("Another owl", "", noise(0)),
    "animals/blank": ("Blank", "", np.full((30, 30, 3), 255, np.uint8)),
    "animals/large": ("Large", "", noise(33, 301, 300)),
}


def write_drawing(folder, key, title, keywords, picture, *, body=EMBEDDED):
    """The two files of a drawing."""
    items = "".join(f"<rdf:li>{keyword}</rdf:li>" for keyword in keywords.split("|"))
    svg = SVG.format(title=title, keywords=items, body=body)
    write_files(folder, {f"svg/{key}.svg": svg, f"png/{key}.png": picture})


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with good drawings, and a bad one of each kind."""
    monkeypatch.setattr(openclipart, "HELD_OUT", {"test": 3, "val": 3})
    monkeypatch.setattr(openclipart, "MAX_PIXELS", 90_000)
    folder = tmp_path / "usr" / "share" / "openclipart"
    for key, (title, keywords, pixels) in DRAWINGS.items():
        write_drawing(folder, key, title, keywords, encode(pixels))
    picture = encode(noise(31))
    write_drawing(folder, "animals/linked", "Linked", "", picture, body=LINKED)
    write_drawing(folder, "animals/cut", "Cut", "", picture[:300])
    write_files(folder, {"svg/animals/no_picture.svg": SVG})
    return tmp_path


def drawings_of(folder):
    """{key: (split, caption, sub-category, category, pixels)} of all splits."""
    drawings = {}
    for split, data in open_splits("openclipart", data_dir=str(folder)).items():
        for i, key in enumerate(data.keys()):
            (caption,) = data.captions(i)
            label = data.label_names[data.labels[i]]
            category = data.names("category")[data.column("category")[i]]
            drawings[key] = split, caption, label, category, data.pixels[i]
    return drawings


def test_captions_and_what_is_left_out(packages, capsys):
    drawings = drawings_of(packages)
    captions = {key: caption for key, (_, caption, *_) in drawings.items()}
    assert captions == {
        "animals/birds/owl": "Owl, bird, night bird",
        "animals/ant": "Ant, insect",
        "flags/united_0_x": "united x",
        "food/pear_0": "Pear a",
        "food/pear_1": "Pear b",
        "food/pear_2": "Pear c",
        "tools/saw_0": "Saw a",
        "tools/saw_1": "Saw b",
        "tools/saw_2": "Saw c",
    }
    assert drawings["animals/birds/owl"][2:4] == ("animals/birds", "animals")
    assert "4 pictures are left out" in capsys.readouterr().out


def test_pictures_are_scaled_onto_a_white_square(packages):
    drawings = drawings_of(packages)
    *_, owl = drawings["animals/birds/owl"]
    square = np.full((128, 128, 3), 255)
    square[44:84, 34:94] = noise(0)
    assert np.array_equal(owl.permute(1, 2, 0), square)
    *_, ant = drawings["animals/ant"]
    is_inked = (ant < 255).any(0)
    assert is_inked.any(1).all()
    assert is_inked.any(0).sum() == round(128 * 200 / 300)


def test_drawings_that_look_alike_are_in_one_split(packages):
    splits = {key: split for key, (split, *_) in drawings_of(packages).items()}
    assert Counter(splits.values()) == {"train": 3, "val": 3, "test": 3}
    assert splits["food/pear_0"] == splits["food/pear_1"] == splits["food/pear_2"]


def test_folder_without_the_packages_is_refused(tmp_path):
    complains("openclipart", "train", "needs --data-dir")
    complains("openclipart", "train", "no drawing is below", data_dir=str(tmp_path))
