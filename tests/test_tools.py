"""tools/: figures have the numbers of the runs; an exported run is the same in open_clip."""


import common
from contrastive.core.files import read_json
from contrastive.core.processes import UserError

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

import ncl
import temo
import temperature_schedules
from helpers import (
    picture, run_script, steps, write_captions)
from contrastive.figures import base
from tools import figures
from tools.export import export, warnings_of

SMALL = [
    *"--cpu --batch-size 32 --image-size 16 --embed-dim 16 --log-every 1".split(),
    *"--eval-every 0 --workers 0".split(),
]
CLIPS = "--dataset moving-emoji --clips 64 24 24 --max-steps 4 --lr 0.01"
RUNS = {
    "infonce": (temo, f"{CLIPS} --baseline --learnable-tau"),
    "temo": (temo, CLIPS),
    "ncl": (ncl, CLIPS),
    "ncl base": (ncl, f"{CLIPS} --baseline"),
    "ts": (
        temperature_schedules,
        "--dataset emoji-scenes --scenes 9 2 2 --imbalance-ratio 3 --max-steps 2 "
        "--train-features augmented",
    ),
}
TEMO, NCL = ("infonce", "temo"), ("infonce", "ncl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (folder, summary)}."""
    place = tmp_path_factory.mktemp("runs")
    return {
        name: (place / name, run_script(script, place / name, *flags.split(), base=SMALL))
        for name, (script, flags) in RUNS.items()
    }


@pytest.fixture
def draw(runs, tmp_path, capsys):
    """Function of a figure, names of runs or folders, and flags -> the lines that it prints."""

    def drawn(figure, names, *flags):
        out = tmp_path / f"{figure}.png"
        folders = [str(runs[name][0] if name in runs else name) for name in names]
        capsys.readouterr()
        figures.main([figure, *folders, "--out", str(out), *flags])
        assert out.stat().st_size > 5000
        return capsys.readouterr().out.splitlines()

    return drawn


def test_results_and_logs_are_those_of_the_runs(runs, draw):
    tests = {name: next(iter(summary["test"].values())) for name, (_, summary) in runs.items()}
    said = draw("gap", TEMO)
    assert f"modality gap (Fig. 3), moving-emoji, temo: {tests['temo']['modality_gap']:.3f}" in said
    knn = tests["infonce"]["knn@1"]["mean_per_class"]
    assert f"kNN, mean per class, % (Fig. 3), moving-emoji kNN@1, infonce: {knn:.3f}" in said
    error = tests["ncl"]["normalize"]["queue"]["error"]["text_to_image"]
    assert any(f"queue, ncl: {error:.3f}" in line for line in draw("errors", NCL))
    said, logged = draw("temperatures", TEMO), steps(runs["temo"][0])
    first, last = logged[0]["tau_neg"], logged[-1]["tau_neg"]
    assert f"negative pairs (Fig. 2), temo: {first:.4f} first, {last:.4f} last" in said
    of_class = tests["ts"]["knn@1"]["mean_per_class"]
    assert draw("tails", ["ts"])[0].startswith(
        f"ts: mean of classes {of_class:.1f} %; by class, largest first: "
    )


def test_pairs_queries_and_modalities_by_hand(runs, draw):
    pieces = base.first_test_sets(base.read_runs([runs[name][0] for name in (*TEMO, "ncl")]))
    cosines = {name: F.cosine_similarity(p.text, p.image[p.owner]) for name, p in pieces.items()}
    said = draw("false-positives", TEMO)
    worst = int((cosines["infonce"] - cosines["temo"]).argmax())
    expected = ", ".join(f"{name} {cosines[name][worst]:.2f}" for name in TEMO)
    assert said[0] == f"{expected}: {pieces['temo'].texts[worst]}" and len(said) == 6
    assert [line.split(":")[0] for line in draw("similarities", TEMO)[:2]] == [*TEMO]
    assert len(draw("queries", ("ncl", "ncl base"))) == 3
    _, first = np.unique(pieces["ncl"].owner, return_index=True)  # the first caption of each clip
    x = F.normalize(pieces["ncl"].text[first], dim=1)
    within = (x @ x.T)[~torch.eye(len(x), dtype=torch.bool)].mean()
    assert draw("modalities", NCL)[1].startswith(f"ncl: text-text {within:.3f}, ")


def test_the_pictures_of_a_run_are_drawn_again(runs, capsys):
    folder, _ = runs["temo"]
    figures.main(["temo", str(folder)])
    assert (folder / "curves.png").stat().st_size > 5000
    assert str(folder) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        figures.main(["temo", str(folder), "--out", "x.png"])
    assert "--out: only with a figure of several runs" in capsys.readouterr().err


# ------------------------------------------------------- export -----------------------------------
TEXTS = ["picture number 3, take 0", "another one", "a photo of a zebra"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny):
    """Function of flags -> a run of one step on own pictures, a tiny timm tower and a tiny BERT."""
    folder = tmp_path_factory.mktemp("export")
    base = [
        *"--cpu --workers 0 --batch-size 4 --max-steps 1 --embed-dim 8".split(),
        *"--no-pretrained --eval-every 0".split(),
        "--dataset",
        write_captions(folder / "set", 24),
        "--text-encoder",
        tiny("bert")[0],
        *"--image-size 160 --baseline --image-encoder".split(),
    ]

    def made(*flags):
        run = folder / str(len([*folder.iterdir()]))
        run_script(temo, run, *base, *flags)
        return run

    return made


@pytest.mark.parametrize(
    "image, more",
    [
        ("test_vit", ["--learnable-tau"]),
        ("test_resnet", ["--text-pooling", "mean", "--eval-resize", "squash"]),
    ],
)
def test_open_clip_s_embeddings_are_ours(image, more, exported, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="pip install open_clip_torch")
    folder = exported(image, *more)
    export(folder, tmp_path / "out")
    theirs, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path / 'out'}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")
    ours, tokenizer, transform = common.load_model(folder)
    theirs.eval()
    same, larger = (
        Image.fromarray(picture(7, height, width)) for height, width in ((160, 160), (250, 320))
    )
    torch.testing.assert_close(preprocess(same), transform(same), rtol=0, atol=1e-5)
    # PIL's own rounding
    assert (preprocess(larger) - transform(larger)).abs().max() < 2.5 / 255 / min(transform.std)
    with torch.no_grad():
        pixels = torch.stack([transform(same), transform(larger)])
        for got, wanted in (
            (theirs.encode_image(pixels), ours(pixels)[0]),
            (theirs.encode_text(tokenize(TEXTS)), ours(tokens=tokenizer(TEXTS))[1]),
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
            assert got.abs().max() > 1e-2
    log_tau = load_file(folder / "own.safetensors")["tau.log_tau"].item()
    assert theirs.logit_scale.item() == pytest.approx(-log_tau, rel=1e-4)
    card = (tmp_path / "out" / "README.md").read_text()
    (value,) = (
        of["text_to_image"]["R@1"] for of in read_json(folder / "summary.json")["test"].values()
    )
    assert "captions.csv; licence: that of your own data" in card
    assert f"text_to_image/R@1 | {value:.4g} |" in card


def test_an_export_warns_of_what_is_elsewhere(tmp_path):
    folder, by_name = {"text_encoder": str(tmp_path)}, {"text_encoder": "google-bert/bert-base"}
    (warning,) = warnings_of(folder | {"clean_captions": False})
    assert f"configuration of the text encoder from {tmp_path}; where this folder is" in warning
    (warning,) = warnings_of(by_name | {"clean_captions": True})
    assert "does not clean captions" in warning


@pytest.mark.parametrize(
    "flags, words",
    [
        (["resnet18-cifar", "--image-size", 32], "resnet18-cifar is none of timm's"),
        (["test_vit", "--image-size", 32], "test_vit at --image-size 32 differs from timm's own"),
        (["test_vit", "--text-encoder", "small"], "texts read by small, not one of"),
        (["test_vit", "--projection-bias"], "--projection-bias"),
    ],
)
def test_what_open_clip_cannot_express_is_refused(flags, words, exported, tmp_path):
    with pytest.raises(ValueError, match=words):
        export(exported(*flags), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------- other tools ------------------------------
def test_runs_that_cannot_have_a_figure_are_refused(runs, draw):
    with pytest.raises(UserError, match="infonce: its test images and captions are not those of"):
        draw("similarities", ["ts", "infonce"])
    with pytest.raises(UserError, match="ts: its evaluation has no captions"):
        draw("similarities", ["ts"])
