"""tools/: figures have the numbers of the runs; an exported run is the same in open_clip."""

import math
import shutil

import common
from contrastive.core.files import read_json, write_json
from contrastive.core.processes import UserError
from contrastive.data.table import with_column

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

import mama
import ncl
import temo
import temperature_schedules
from helpers import (
    picture, run_script, steps, write_captions, write_files, write_images, write_rows)
from tools import figures as several
from tools import check
from tools.export import export, warnings_of

SMALL = [
    *"--cpu --batch-size 32 --image-size 16 --embed-dim 16 --log-every 1".split(),
    *"--eval-every 0 --workers 0".split(),
]
CLIPS = "--dataset moving-emoji --clips 64 24 24 --max-steps 4 --lr 0.01"
MAMA = "--clips 64 16 16 --batch-size 16 --weighting none --max-steps 2"
RUNS = {
    "infonce": (temo, f"{CLIPS} --loss infonce --learnable-tau"),
    "temo": (temo, CLIPS),
    "ncl": (ncl, CLIPS),
    "ts": (
        temperature_schedules,
        "--dataset emoji-scenes --scenes 9 2 2 --imbalance-ratio 3 --max-steps 2 "
        "--train-features augmented",
    ),
    "mama": (mama, MAMA),
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
        several.main([figure, *folders, "--out", str(out), *flags])
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
    assert (
        f"normalisation error (Fig. 2), moving-emoji text to image, queue, ncl: {error:.3f}"
        in draw("errors", NCL)
    )
    said, logged = draw("temperatures", TEMO), steps(runs["temo"][0])
    first, last = logged[0]["tau_neg"], logged[-1]["tau_neg"]
    assert f"negative pairs (Fig. 2), temo: {first:.4f} first, {last:.4f} last" in said
    of_class = tests["ts"]["knn@1"]["mean_per_class"]
    assert draw("tails", ["ts"])[0].startswith(
        f"ts: mean of classes {of_class:.1f} %; by class, largest first: "
    )


def test_pairs_queries_and_modalities_by_hand(runs, draw):
    pieces = {name: several.read_pieces(runs[name][0]) for name in {*TEMO, *NCL}}
    cosines = {name: F.cosine_similarity(p.text, p.image[p.owner]) for name, p in pieces.items()}
    said = draw("false-positives", TEMO)
    worst = int((cosines["infonce"] - cosines["temo"]).argmax())
    expected = ", ".join(f"{name} {cosines[name][worst]:.2f}" for name in TEMO)
    assert said[0] == f"{expected}: {pieces['temo'].texts[worst]}" and len(said) == 6
    assert [line.split(":")[0] for line in draw("similarities", TEMO)[:2]] == [*TEMO]

    learnt = several.read_query_pieces(runs["infonce"][0]).gamma
    of_run = load_file(runs["infonce"][0] / "own.safetensors")["tau.log_tau"].exp().item()
    first_value = read_json(runs["infonce"][0] / "args.json")["tau"]
    assert learnt == of_run != pytest.approx(first_value, rel=1e-4)
    for line, name in zip(draw("queries", NCL), NCL):
        p = several.read_query_pieces(runs[name][0])
        sim = F.normalize(p.text, dim=1) @ F.normalize(p.image, dim=1).T + p.bias
        total = F.softmax(sim / p.gamma, 1).sum(0) * sim.shape[1] / sim.shape[0]
        fair = 100 * ((total > 0.5) & (total < 1.5)).float().mean()
        assert line.startswith(f"{name}: {fair:.1f} %")
    assert torch.is_tensor(pieces["ncl"].bias) and pieces["infonce"].bias == 0.0
    x = F.normalize(pieces["ncl"].text[::3], dim=1)  # the first caption of each clip
    within = (x @ x.T)[~torch.eye(len(x), dtype=torch.bool)].mean()
    assert draw("modalities", NCL)[1].startswith(f"ncl: text-text {within:.3f}, ")


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
        *"--image-size 160 --loss infonce --image-encoder".split(),
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


# ---------------------------------------------------- MAMA's margins and concepts -----------------
def folder_of(path, val=10.0, **flags):
    """What tools.figures margins reads of a finished run."""
    args = dict(
        margin_schedule="logistic",
        a0=2.0,
        a1=10.0,
        a2=0.1,
        seed=0,
        task="retrieval",
        dataset="set",
        tau=0.1,
    )
    return write_files(
        path,
        {
            "args.json": args | {"run_name": path.name, "changed": [path.name]} | flags,
            "summary.json": {"val": {"set": {"text_to_image": {"R@1": val}, "accuracy": val + 1}}},
        },
    )


def test_margins_of_several_runs(tmp_path, draw):
    said = "\n".join(
        draw(
            "margins",
            [
                folder_of(tmp_path / "none", 5, margin_schedule="none"),
                folder_of(tmp_path / "one", 10),
                folder_of(tmp_path / "two", 20, seed=1),
                folder_of(tmp_path / "wide", 8, a0=4.0),
                folder_of(tmp_path / "slow", 9, a2=0.01),
                folder_of(tmp_path / "still", 12, margin_schedule="constant"),
            ],
        )
    )
    over = "margin (Fig. 4, left), a2 = 0.1: "
    assert f"{over}0: 5.00 (1 runs)\n" in said and f"{over}0.2: 15.00 (2 runs)\n" in said
    assert f"{over}0.4: 8.00" in said and "(Fig. 4, left), constant: 0.2: 12.00" in said
    assert "middle), mu = 0.2: 0.01: 9.00" in said
    assert "middle), mu = 0.2: 0.1: 15.00 (2 runs)" in said


def test_queries_without_a_class_are_no_concept(tmp_path):
    """Class -1 is not the last class; further pairs, which have no classes, take none away."""
    splits = ["train"] * 10 + ["val"] * 2 + ["test"] * 6
    rows = [
        (name, f"words {k}", "" if k in (9, 14) else "ab"[k % 2], splits[k])
        for k, name in enumerate(write_images(tmp_path, range(18)))
    ]
    write_rows(tmp_path / "own.csv", ["image", "caption", "label", "split"], rows)
    more = [(f"b/{name}", "x") for name in write_images(tmp_path / "b", range(30, 50))]
    write_rows(tmp_path / "more.csv", ["image", "caption"], more)
    own = ["--dataset", tmp_path / "own.csv", "--extra-pairs", tmp_path / "more.csv"]
    flags = "--batch-size 16 --weighting none --max-steps 2".split()
    run_script(mama, tmp_path / "r", *own, *flags, base=SMALL)
    found, right, share, keys = several.read_hits(tmp_path / "r")
    assert sorted(found) == ["a", "a", "b", "b", "b"]
    assert len(keys) == len(right) == 5
    assert "014.png" not in keys
    assert share == {"a": 0.5, "b": 0.4}


def test_queries_without_a_class_are_no_concept_without_names(runs, monkeypatch):
    """Among words None, among numbers that have no names -1."""
    opened = several.open_data
    for missing, kind, dtype in ((None, "runs", "string"), (-1, 3, "int64")):

        def open_data(args, classes=(missing, kind), dtype=dtype):
            train, evals = opened(args)
            test = evals["moving-emoji"]["test"]
            labels = [classes[k % 2] for k in range(len(test))]
            test = with_column(test, "label", labels, datasets.Value(dtype))
            return train, {"moving-emoji": {"test": test}}

        monkeypatch.setattr(several, "open_data", open_data)
        concepts = several.read_hits(runs["mama"][0]).concepts
        assert set(concepts) == {str(kind)}


def test_gain_by_concept(runs, tmp_path, draw):
    base, other = np.array([0, 1, 0, 0, 1.0]), np.array([1, 1, 0, 1, 0.0])
    found = several.gains(
        np.array(["a", "a", "a", "b", "c"]), base, other, {"a": 0.5, "b": 0.3, "c": 0.2}
    )
    assert found == [(0.5, 1, 2, 3, "a"), (0.3, 0, 1, 1, "b"), (0.2, 1, 0, 1, "c")]
    assert [gain.percent for gain in found] == [100, pytest.approx(math.nan, nan_ok=True), -100]
    assert [(name, g) for name, *_, g in several.thirds(found)] == [("frequent", 100), ("rare", 0)]
    run_script(mama, tmp_path / "other", *MAMA.split(), "--margin-schedule", "none", base=SMALL)
    draw("concepts", ["mama", tmp_path / "other"], "--topics", "2")
    folder, summary = runs["mama"]
    _, hits, share, _ = several.read_hits(folder)
    ours = summary["test"]["moving-emoji"]["text_to_image"]["R@1"]
    assert 100 * hits.mean() == pytest.approx(ours) and sum(share.values()) == pytest.approx(1)


def test_runs_that_cannot_be_compared_are_refused(runs, tmp_path, draw):
    others = {"temo": tmp_path / "less", "mama": tmp_path / "other"}  # of fewer test clips
    for name, folder in others.items():
        shutil.copytree(runs[name][0], folder)
        args = read_json(folder / "args.json")
        write_json(folder / "args.json", args | {"clips": [*args["clips"][:2], 9]})
    margins = [folder_of(tmp_path / "a"), folder_of(tmp_path / "b", tau=0.2)]
    for says, figure, names in (
        ("less: its test captions are not those of temo", "similarities",
         ["temo", others["temo"]]),
        ("its test queries and their concepts are not those of", "concepts",
         ["mama", others["mama"]]),
        (r"differ in --tau \(0.2, 0.1\)", "margins", margins),
    ):
        with pytest.raises(UserError, match=says):
            draw(figure, names)


def test_runs_that_cannot_have_a_figure_are_refused(runs, tmp_path, draw, capsys):
    with pytest.raises(UserError, match="ts: its evaluation has no captions"):
        draw("similarities", ["ts"])
    changing = shutil.copytree(runs["infonce"][0], tmp_path / "changing")
    spec = read_json(changing / "model.json")
    spec["evaluation"]["tau"] = None  # as of a schedule
    write_json(changing / "model.json", spec)
    with pytest.raises(UserError, match="changing: has no single temperature"):
        draw("queries", ["infonce", changing])
    alone = folder_of(tmp_path / "alone")
    with pytest.raises(UserError, match="no two of the runs differ in --a0"):
        draw("margins", [alone])
    with pytest.raises(SystemExit):
        draw("margins", ["temo"])
    assert "temo has no --margin-schedule, which the runs of this" in capsys.readouterr().err


def test_check_has_a_help(capsys):
    assert check.main(["--help"]) == 0
    assert "python -m tools.check mine.py" in capsys.readouterr().out
