"""tools.export: a run through open_clip's own loader has the embeddings that it has here."""

import json

import common

import numpy as np
import pytest
import torch
from PIL import Image

import temo
from helpers import picture, run_script, steps, write_captions
from tools.export import export

TEXTS = ["picture number 3, take 0", "another one", "a photo of a zebra"]
FLAGS = "--cpu --workers 0 --batch-size 4 --max-steps 1 --embed-dim 8 --no-pretrained --eval-every 0".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):
    """Function of flags -> a run of one step on own pictures, a tiny timm tower and a tiny BERT."""
    folder = tmp_path_factory.mktemp("export")
    write_captions(folder / "set", 24)

    def made(name, image="test_vit", *more):
        flags = ["--dataset", folder / "set" / "captions.csv", "--image-encoder", image, "--text-encoder",
                 tiny("bert")[0], "--image-size", 160, "--loss", "infonce", *more]
        run_script(temo, folder / name, *FLAGS, *flags)
        return folder / name
    return made


@pytest.mark.parametrize("image, more", [("test_vit", ["--learnable-tau"]),
                                         ("test_resnet", ["--text-pooling", "mean", "--eval-resize", "squash"])])
def test_open_clip_s_embeddings_are_ours(image, more, run, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="pip install open_clip_torch")
    folder = run(image, image, *more)
    export(folder, tmp_path / "out")
    theirs, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path / 'out'}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")
    ours, tokenizer, transform = common.load_model(folder)
    theirs.eval()
    same, larger = (Image.fromarray(picture(7, height, width)) for height, width in ((160, 160), (250, 320)))
    torch.testing.assert_close(preprocess(same), transform(same), rtol=0, atol=1e-5)
    assert (preprocess(larger) - transform(larger)).abs().max() < 2.5 / 255 / min(transform.std)    # PIL's own rounding
    with torch.no_grad():
        pixels = torch.stack([transform(same), transform(larger)])
        for got, wanted in ((theirs.encode_image(pixels), ours(pixels)[0]),
                            (theirs.encode_text(tokenize(TEXTS)), ours(tokens=tokenizer(TEXTS))[1])):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
            assert got.abs().max() > 1e-2
    assert theirs.logit_scale.exp().item() == pytest.approx(1 / steps(folder)[-1]["tau"], rel=1e-4)


def test_the_card_says_data_recipe_and_numbers(run, tmp_path):
    folder = run("card")
    export(folder, tmp_path / "out")
    card, summary = ((tmp_path / "out" / "README.md").read_text(), json.loads((folder / "summary.json").read_text()))
    assert "captions.csv; licence: that of your own data" in card and "1 steps of 4 examples" in card
    value, = (of["text_to_image"]["R@1"] for of in summary["test"].values())
    assert f"text_to_image/R@1 | {value:.4g} |" in card and np.isfinite(value)


@pytest.mark.parametrize("flags, words", [
    (["small"], "--image-encoder small is none of timm's"),
    (["resnet18-cifar", "--image-size", 32], "resnet18-cifar is none of timm's"),
    (["test_vit", "--image-size", 32], "test_vit at --image-size 32 differs from timm's own"),
    (["test_vit", "--text-encoder", "small"], "texts read by small, not one of")])
def test_what_open_clip_cannot_express_is_refused_in_one_line(flags, words, run, tmp_path):
    folder = run("-".join(map(str, flags)).replace("-", ""), *flags)
    with pytest.raises(ValueError, match=words) as refusal:
        export(folder, tmp_path / "out")
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()
