"""Open Clip Art, on a small replica of the two packages: captions, what is left out, the split."""

import shutil

import common
from contrastive.core.processes import UserError
from contrastive.data import open_named, openclipart

import numpy as np
import pytest
from PIL import Image

import helpers

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


def draw(root, key, title, keywords=(), *, pixels, body=EMBEDDED):
    """Writes the two files of a drawing."""
    folder = root / "usr" / "share" / "openclipart"
    for kind in ("svg", "png"):
        (folder / kind / key).parent.mkdir(parents=True, exist_ok=True)
    items = "".join(f"<rdf:li>{keyword}</rdf:li>" for keyword in keywords)
    text = SVG.format(title=title, keywords=items, body=body)
    (folder / "svg" / f"{key}.svg").write_text(text, encoding="utf8")
    if pixels is not None:
        content = helpers.encode(pixels) if not isinstance(pixels, bytes) else pixels
        (folder / "png" / f"{key}.png").write_bytes(content)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with eleven good drawings, of which three look alike, and a bad one of each kind."""
    monkeypatch.setattr(openclipart, "HELD_OUT", {"test": 3, "val": 3})
    monkeypatch.setattr(openclipart, "MAX_PIXELS", 90_000)
    draw(tmp_path, "animals/birds/owl", "Owl_01", ["Bird", "bird", "night_bird"], pixels=noise(0))
    draw(tmp_path, "animals/ant", "Ant", ["unsorted", "hash(0x8a0b6a8)", "http://a.org", "insect"],
         pixels=noise(1, 300, 200))
    for k in range(4):
        draw(tmp_path, f"flags/united_{k}_x", "Flags of the world", pixels=noise(2 + k))
    for k in range(3):
        draw(tmp_path, f"food/pear_{k}", f"Pear {'abc'[k]}", pixels=noise(10) + k)
    for k in range(3):
        draw(tmp_path, f"tools/saw_{k}", f"Saw {'abc'[k]}", pixels=noise(20 + k))

    draw(tmp_path, "shapes/stars/star_5", "Star", pixels=noise(30))
    draw(tmp_path, "animals/linked", "Linked", pixels=noise(31), body=LINKED)
    draw(tmp_path, "animals/zz_same_caption", "owl", ["night bird", "bird"], pixels=noise(32))
    draw(tmp_path, "animals/zz_same_picture", "Another owl", pixels=noise(0))
    draw(tmp_path, "animals/blank", "Blank", pixels=np.full((30, 30, 3), 255, np.uint8))
    draw(tmp_path, "animals/large", "Large", pixels=noise(33, 301, 300))
    draw(tmp_path, "animals/cut", "Cut", pixels=helpers.encode(noise(34))[:300])
    draw(tmp_path, "animals/no_picture", "No picture", pixels=None)
    return tmp_path


def rows_of(folder):
    """{key: (split, caption, sub-category, category, pixels)} of all splits."""
    rows = {}
    for split in ("train", "val", "test"):
        data = common.load_data("openclipart", split, data_dir=str(folder))
        for i in range(len(data)):
            label = data.names("label")[data.column("label")[i]]
            category = data.names("category")[data.column("category")[i]]
            caption, = data.captions(i)
            rows[data.key(i)] = split, caption, label, category, data.pixels[i]
    return rows


def test_captions_and_what_is_left_out(packages, capsys):
    rows = rows_of(packages)
    captions = {key: row[1] for key, row in rows.items()}
    assert captions == {
        "animals/birds/owl": "Owl, bird, night bird",
        "animals/ant": "Ant, insect",
        "flags/united_0_x": "united x",
        **{f"food/pear_{k}": f"Pear {'abc'[k]}" for k in range(3)},
        **{f"tools/saw_{k}": f"Saw {'abc'[k]}" for k in range(3)},
    }
    assert rows["animals/birds/owl"][2:4] == ("animals/birds", "animals")
    assert "4 pictures are left out" in capsys.readouterr().out


def test_pictures_are_scaled_onto_a_white_square(packages):
    rows = rows_of(packages)
    owl, ant = rows["animals/birds/owl"][4], rows["animals/ant"][4]
    assert owl.shape == (3, 128, 128)
    inside = owl[:, 44:84, 34:94].permute(1, 2, 0).numpy()
    assert (inside == noise(0)).all()
    assert (owl[:, :44] == 255).all() and (owl[..., 94:] == 255).all()
    inked = (ant < 255).any(0)
    assert inked.any(1).all() and inked.any(0).sum() == round(128 * 200 / 300)


def test_drawings_that_look_alike_are_in_one_split(packages):
    rows = rows_of(packages)
    splits = [row[0] for row in rows.values()]
    assert splits.count("test") == splits.count("val") == 3
    assert len({rows[f"food/pear_{k}"][0] for k in range(3)}) == 1


def test_the_packages_are_read_once(packages):
    before = rows_of(packages)
    shutil.rmtree(packages / "usr")
    open_named.cache_clear()
    after = rows_of(packages)
    assert before.keys() == after.keys()
    for key, (*words, pixels) in before.items():
        assert after[key][:4] == tuple(words) and (after[key][4] == pixels).all()


def test_a_folder_without_the_packages_is_refused(tmp_path):
    with pytest.raises(UserError, match="needs --data-dir"):
        common.load_data("openclipart", "train")
    with pytest.raises(UserError, match="no drawing is below"):
        common.load_data("openclipart", "train", data_dir=str(tmp_path))


def test_transparency_becomes_white(packages):
    pixels = np.dstack([noise(40), np.zeros((40, 60), np.uint8)])
    pixels[:20, :, 3] = 255
    draw(packages, "tools/drill", "Drill", pixels=Image.fromarray(pixels, "RGBA"))
    drill = rows_of(packages)["tools/drill"][4]
    assert (drill[:, 64:] == 255).all() and (drill[:, 44:64, 34:94] < 255).all()
