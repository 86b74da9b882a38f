"""Open Clip Art, on a small replica of the two packages: captions, what is left out, the split."""

import shutil

from contrastive.data import open_named, openclipart

import numpy as np
import pytest
from PIL import Image

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
KEYWORDS = ["unsorted", "hash(0x8a0b6a8)", "http://a.org", "insect"]


def noise(seed, height=40, width=60):
    """(H, W, 3) uint8 unlike that of any other seed."""
    return np.random.default_rng(seed).integers(0, 200, (height, width, 3), dtype=np.uint8)


def write_drawing(root, key, title, content, *, keywords=(), body=EMBEDDED):
    """The two files of a drawing; content: pixels or bytes of its picture."""
    if not isinstance(content, bytes):
        content = encode(content)
    items = "".join(f"<rdf:li>{keyword}</rdf:li>" for keyword in keywords)
    svg = SVG.format(title=title, keywords=items, body=body)
    folder = root / "usr" / "share" / "openclipart"
    write_files(folder, {f"svg/{key}.svg": svg, f"png/{key}.png": content})


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with eleven good drawings, of which three look alike, and a bad one of each kind."""
    monkeypatch.setattr(openclipart, "HELD_OUT", {"test": 3, "val": 3})
    monkeypatch.setattr(openclipart, "MAX_PIXELS", 90_000)
    owl = ["Bird", "bird", "night_bird"]
    write_drawing(tmp_path, "animals/birds/owl", "Owl_01", noise(0), keywords=owl)
    write_drawing(tmp_path, "animals/ant", "Ant", noise(1, 300, 200), keywords=KEYWORDS)
    for k in range(4):
        write_drawing(tmp_path, f"flags/united_{k}_x", "Flags of the world", noise(2 + k))
    for k in range(3):
        write_drawing(tmp_path, f"food/pear_{k}", f"Pear {'abc'[k]}", noise(10) + k)
        write_drawing(tmp_path, f"tools/saw_{k}", f"Saw {'abc'[k]}", noise(20 + k))

    write_drawing(tmp_path, "shapes/stars/star_5", "Star", noise(30))
    write_drawing(tmp_path, "animals/linked", "Linked", noise(31), body=LINKED)
    write_drawing(tmp_path, "animals/zz_caption", "owl", noise(32), keywords=["night bird", "bird"])
    write_drawing(tmp_path, "animals/zz_picture", "Another owl", noise(0))
    write_drawing(tmp_path, "animals/blank", "Blank", np.full((30, 30, 3), 255, np.uint8))
    write_drawing(tmp_path, "animals/large", "Large", noise(33, 301, 300))
    write_drawing(tmp_path, "animals/cut", "Cut", encode(noise(34))[:300])
    write_drawing(tmp_path, "animals/no_picture", "No picture", noise(35))
    (tmp_path / "usr/share/openclipart/png/animals/no_picture.png").unlink()
    return tmp_path


def rows_of(folder):
    """{key: (split, caption, sub-category, category, pixels)} of all splits."""
    rows = {}
    for split, data in open_splits("openclipart", data_dir=str(folder)).items():
        for i in range(len(data)):
            label = data.names("label")[data.labels[i]]
            category = data.names("category")[data.column("category")[i]]
            (caption,) = data.captions(i)
            rows[data.key(i)] = split, caption, label, category, data.pixels[i]
    return rows


def test_captions_and_what_is_left_out(packages, capsys):
    rows = rows_of(packages)
    assert {key: caption for key, (_, caption, *_) in rows.items()} == {
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
    assert rows["animals/birds/owl"][2:4] == ("animals/birds", "animals")
    assert "4 pictures are left out" in capsys.readouterr().out


def test_pictures_are_scaled_onto_a_white_square(packages):
    rows = rows_of(packages)
    *_, owl = rows["animals/birds/owl"]
    assert owl.shape == (3, 128, 128)
    assert np.array_equal(owl[:, 44:84, 34:94].permute(1, 2, 0), noise(0))
    assert (owl[:, :44] == 255).all()
    assert (owl[..., 94:] == 255).all()
    *_, ant = rows["animals/ant"]
    is_inked = (ant < 255).any(0)
    assert is_inked.any(1).all()
    assert is_inked.any(0).sum() == round(128 * 200 / 300)


def test_transparency_becomes_white(packages):
    pixels = np.dstack([noise(40), np.zeros((40, 60), np.uint8)])
    pixels[:20, :, 3] = 255
    write_drawing(packages, "tools/drill", "Drill", Image.fromarray(pixels, "RGBA"))
    *_, drill = rows_of(packages)["tools/drill"]
    assert (drill[:, 64:] == 255).all()
    assert (drill[:, 44:64, 34:94] < 255).all()


def test_drawings_that_look_alike_are_in_one_split(packages):
    rows = rows_of(packages)
    splits = [split for split, *_ in rows.values()]
    assert splits.count("test") == splits.count("val") == 3
    assert rows["food/pear_0"][0] == rows["food/pear_1"][0] == rows["food/pear_2"][0]


def test_packages_are_read_once(packages):
    before = rows_of(packages)
    shutil.rmtree(packages / "usr")
    open_named.cache_clear()
    after = rows_of(packages)
    assert before.keys() == after.keys()
    for key, (*words, pixels) in before.items():
        assert after[key][:4] == tuple(words)
        assert (after[key][4] == pixels).all()


def test_folder_without_the_packages_is_refused(tmp_path):
    complains("openclipart", "train", "needs --data-dir")
    complains("openclipart", "train", "no drawing is below", data_dir=str(tmp_path))
