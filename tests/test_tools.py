"""tools/: figures over runs have the numbers of the runs' own results, and of their embeddings, by hand; an exported
run has, through open_clip's own loader, the embeddings that it has here."""

import json
import math
import re

import common
from contrastive.engine.processes import UserError, write_json
from contrastive.figures import several as compared

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import mama
import ncl
import temo
import temperature_schedules
from helpers import picture, rows, run_script, steps, write_captions, write_images, write_rows
from tools import figures as several
from tools import score
from tools.export import export

SMALL = "--cpu --batch-size 32 --image-size 16 --embed-dim 16 --log-every 1 --eval-every 0 --workers 0".split()
CLIPS = "--dataset moving-emoji --clips 64 24 24 --max-steps 4 --lr 0.01".split()
WORDS = {"temo/infonce": (temo, [*CLIPS, "--loss", "infonce"]), "temo/temo": (temo, CLIPS),
         "ncl/infonce": (ncl, [*CLIPS, "--loss", "infonce"]), "ncl/ncl": (ncl, CLIPS),
         "ts/0.1": (temperature_schedules, "--dataset emoji --imbalance-ratio 50 --max-steps 2 --schedule fixed "
                                           "--tau-min 0.1".split()),
         "ts/1.0": (temperature_schedules, "--dataset emoji --imbalance-ratio 50 --max-steps 2 --schedule fixed "
                                           "--tau-min 1.0 --train-features augmented".split())}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (folder, summary)} of two runs each of three scripts."""
    place = tmp_path_factory.mktemp("runs")
    for name in WORDS:
        (place / name).parent.mkdir(exist_ok=True)
    return {name: (place / name, run_script(script, place / name, *flags, base=SMALL))
            for name, (script, flags) in WORDS.items()}


def draw(runs, figure, names, tmp_path, capsys):
    """The lines that a figure prints."""
    out = tmp_path / f"{figure}.png"
    several.main([figure, *(str(runs[name][0]) for name in names), "--out", str(out)])
    assert out.stat().st_size > 5000
    return capsys.readouterr().out.splitlines()


TEMO, NCL, TS = ["temo/infonce", "temo/temo"], ["ncl/infonce", "ncl/ncl"], ["ts/0.1", "ts/1.0"]


def test_results_and_logs_are_those_of_the_runs(runs, tmp_path, capsys):
    tests = {name: next(iter(summary["test"].values())) for name, (_, summary) in runs.items()}
    said = draw(runs, "gap", TEMO, tmp_path, capsys)
    assert f"modality gap (Fig. 3), moving-emoji, temo: {tests['temo/temo']['modality_gap']:.3f}" in said
    assert f"mean per class, % (Fig. 3), moving-emoji kNN@1, infonce: " \
           f"{tests['temo/infonce']['knn@1']['mean_per_class']:.3f}" in said
    said = draw(runs, "errors", NCL, tmp_path, capsys)
    error = tests["ncl/ncl"]["normalize"]["queue"]["error"]["text_to_image"]
    assert f"normalisation error (Fig. 2), moving-emoji text to image, queue, ncl: {error:.3f}" in said
    said, logged = draw(runs, "temperatures", TEMO, tmp_path, capsys), rows(runs["temo/temo"][0])
    first, *_, last = (row["tau_neg"] for row in logged if "loss" in row)
    assert f"negative pairs (Fig. 2), temo: {first:.4f} first, {last:.4f} last" in said and len(said) == 5


def test_words_below_bars_do_not_touch(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(compared, "save_figure", lambda fig, path: drawn.append(fig))
    errors = {mode: {"error": {"text_to_image": 0.3, "image_to_text": 0.4}} for mode in ("none", "queue")}
    compared.draw_errors({"ncl": {name: {"normalize": errors} for name in ("moving-emoji", "activitynet")}}, "")
    drawn[0].draw_without_rendering()
    boxes = [label.get_window_extent() for label in drawn[0].axes[0].get_xticklabels()]
    assert len(boxes) == 8 and all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:]))


def test_pairs_queries_and_modalities_by_hand(runs, tmp_path, capsys):
    pieces = {name: several.pieces_of(runs[name][0]) for name in (*TEMO, *NCL)}
    cosines = {name: F.cosine_similarity(p["text"], p["image"][p["owner"]]) for name, p in pieces.items()}
    said = draw(runs, "false-positives", TEMO, tmp_path, capsys)
    worst = int((cosines["temo/infonce"] - cosines["temo/temo"]).argmax())
    expected = ", ".join(f"{name.partition('/')[2]} {cosines[name][worst]:.2f}" for name in TEMO)
    assert said[0] == f"{expected}: {pieces['temo/temo']['texts'][worst]}" and len(said) == 6
    said = draw(runs, "similarities", TEMO, tmp_path, capsys)
    assert [line.split(":")[0] for line in said[:2]] == ["infonce", "temo"]

    said = draw(runs, "queries", NCL, tmp_path, capsys)
    for line, name in zip(said, NCL):
        p = pieces[name]
        sim = F.normalize(p["text"], dim=1) @ F.normalize(p["image"], dim=1).T + p["bias"]
        total = F.softmax(sim / p["gamma"], 1).sum(0) * sim.shape[1] / sim.shape[0]
        fair = 100 * ((total > 0.5) & (total < 1.5)).float().mean()
        assert line.startswith(f"{name.partition('/')[2]}: {fair:.1f} %")
    assert torch.is_tensor(pieces["ncl/ncl"]["bias"]) and pieces["ncl/infonce"]["bias"] == 0.0
    said = draw(runs, "modalities", NCL, tmp_path, capsys)
    x = F.normalize(pieces["ncl/ncl"]["text"][::3], dim=1)                 # the first caption of each clip
    within = (x @ x.T)[~torch.eye(len(x), dtype=torch.bool)].mean()
    assert said[1].startswith(f"ncl: text-text {within:.3f}, ")


def test_classes_by_temperature(runs, tmp_path, capsys):
    said = draw(runs, "tails", TS, tmp_path, capsys)
    for line, name in zip(said, TS):
        of_class = runs[name][1]["test"]["emoji"]["knn@1"]["mean_per_class"]
        assert line.startswith(f"{name[3:]}: mean of classes {of_class:.1f} %; by class, largest first: ")
        assert len(re.findall(r"\d+\.\d", line.partition("first: ")[2])) == len(common.load_data(
            "emoji", "test", by_class=True).label_names)


def test_other_captions_and_equal_names_are_refused(runs, tmp_path, capsys):
    other = tmp_path / "other"
    run_script(temo, other, *CLIPS[:2], *"--clips 64 24 20 --max-steps 1".split(), base=SMALL)
    with pytest.raises(common.UserError, match="other: its test captions are not those of temo"):
        several.main(["similarities", str(runs["temo/temo"][0]), str(other)])
    with pytest.raises(SystemExit):
        several.main(["gap", str(other), str(other)])
    assert "give the runs different names" in capsys.readouterr().err


# ------------------------------------------------------- export -------------------------------------------------------
TEXTS = ["picture number 3, take 0", "another one", "a photo of a zebra"]
FLAGS = "--cpu --workers 0 --batch-size 4 --max-steps 1 --embed-dim 8 --no-pretrained --eval-every 0".split()


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny):
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
def test_open_clip_s_embeddings_are_ours(image, more, exported, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="pip install open_clip_torch")
    folder = exported(image, image, *more)
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


def test_the_card_says_data_recipe_and_numbers(exported, tmp_path):
    folder = exported("card")
    export(folder, tmp_path / "out")
    card, summary = ((tmp_path / "out" / "README.md").read_text(), json.loads((folder / "summary.json").read_text()))
    assert "captions.csv; licence: that of your own data" in card and "1 steps of 4 examples" in card
    value, = (of["text_to_image"]["R@1"] for of in summary["test"].values())
    assert f"text_to_image/R@1 | {value:.4g} |" in card and 0 <= value <= 100


@pytest.mark.parametrize("flags, words", [
    (["small"], "--image-encoder small is none of timm's"),
    (["resnet18-cifar", "--image-size", 32], "resnet18-cifar is none of timm's"),
    (["test_vit", "--image-size", 32], "test_vit at --image-size 32 differs from timm's own"),
    (["test_vit", "--text-encoder", "small"], "texts read by small, not one of")])
def test_what_open_clip_cannot_express_is_refused_in_one_line(flags, words, exported, tmp_path):
    folder = exported("-".join(map(str, flags)).replace("-", ""), *flags)
    with pytest.raises(ValueError, match=words) as refusal:
        export(folder, tmp_path / "out")
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


# ---------------------------------------------------- MAMA's margins and concepts -----------------------------------
MAMA = [*"--cpu --clips 64 16 16 --batch-size 16 --log-every 1 --eval-every 0 --weighting none".split()]


def folder_of(path, val=10.0, **flags):
    """What tools.figures margins reads of a finished run."""
    path.mkdir(parents=True)
    args = dict(margin_schedule="logistic", a0=2.0, a1=10.0, a2=0.1, seed=0, task="retrieval", dataset="set", tau=0.1)
    write_json(path / "args.json", args | {"run_name": path.name, "changed": [path.name]} | flags)
    write_json(path / "summary.json", {"val": {"set": {"text_to_image": {"R@1": val}, "accuracy": val + 1}}})
    return str(path)


def test_margins_of_several_runs(tmp_path, capsys):
    folders = [folder_of(tmp_path / "none", 5, margin_schedule="none"), folder_of(tmp_path / "one", 10),
               folder_of(tmp_path / "two", 20, seed=1), folder_of(tmp_path / "wide", 8, a0=4.0),
               folder_of(tmp_path / "slow", 9, a2=0.01), folder_of(tmp_path / "still", 12, margin_schedule="constant")]
    several.main(["margins", *folders, "--out", str(tmp_path / "a.png")])
    said = capsys.readouterr().out
    over = "margin (Fig. 4, left), a2 = 0.1: "
    assert f"{over}0: 5.00 (1 runs)\n" in said and f"{over}0.2: 15.00 (2 runs)\n" in said
    assert f"{over}0.4: 8.00" in said and "(Fig. 4, left), constant: 0.2: 12.00" in said
    assert "middle), mu = 0.2: 0.01: 9.00" in said and "middle), mu = 0.2: 0.1: 15.00 (2 runs)" in said
    with pytest.raises(UserError, match=r"differ in --tau \(0.2, 0.1\)"):
        several.main(["margins", folders[1], folder_of(tmp_path / "tau", tau=0.2), "--out", str(tmp_path / "b.png")])


def test_queries_without_a_class_are_no_concept(tmp_path, capsys):
    """Class -1 is no name of the last class; further pairs, which have no classes, take none away."""
    splits = ["train"] * 10 + ["val"] * 2 + ["test"] * 6
    rows = [(name, f"words {k}", "" if k in (0, 14) else "ab"[k % 2], splits[k])
            for k, name in enumerate(write_images(tmp_path, range(18)))]
    write_rows(tmp_path / "own.csv", ["image", "caption", "label", "split"], rows)
    more = [(f"b/{name}", "x") for name in write_images(tmp_path / "b", range(30, 50))]
    write_rows(tmp_path / "more.csv", ["image", "caption"], more)
    run_script(mama, tmp_path / "r", "--dataset", tmp_path / "own.csv", "--extra-pairs", tmp_path / "more.csv",
               "--max-steps", 1, base=MAMA)
    found, right, share, keys = several.hits(tmp_path / "r")
    assert sorted(found) == ["a", "a", "b", "b", "b"] and len(keys) == len(right) == 5 and "014.png" not in keys
    assert share == {"a": 0.4, "b": 0.5}
    assert "1 of 6 queries have no label and are left out" in capsys.readouterr().out


def test_scores_are_of_a_clip_s_own_captions(tmp_path):
    """Whatever captions the run has swapped, and with a row for each of them."""
    args = vars(mama.parse_args([*MAMA, "--caption-noise", "0.9", "--unfold-captions"]))
    write_json(tmp_path / "args.json", args)
    data = score.data_of(tmp_path, "train")
    clean = common.load_data("moving-emoji", "train", clips=args["clips"])
    assert data.column("captions") == clean.column("captions") and list(data.keys()) == list(clean.keys())


def test_gain_by_concept(tmp_path):
    base, other = np.array([0, 1, 0, 0, 1.0]), np.array([1, 1, 0, 1, 0.0])
    found = several.gains(np.array(["a", "a", "a", "b", "c"]), base, other, {"a": 0.5, "b": 0.3, "c": 0.2})
    assert found == [(0.5, 1, 2, 3, "a"), (0.3, 0, 1, 1, "b"), (0.2, 1, 0, 1, "c")]
    assert [several.relative(a, b) for _, a, b, *_ in found] == [100, pytest.approx(math.nan, nan_ok=True), -100]
    assert [(name, g) for name, *_, g in several.thirds(found)] == [("frequent", 100), ("rare", 0)]
    summary = run_script(mama, tmp_path / "run", "--max-steps", 2, base=MAMA)
    run_script(mama, tmp_path / "other", "--max-steps", 2, "--margin-schedule", "none", base=MAMA)
    several.main(["concepts", *map(str, (tmp_path / "run", tmp_path / "other")), "--out", str(tmp_path / "c.png")])
    _, hits, share, _ = several.hits(tmp_path / "run")
    ours = summary["test"]["moving-emoji"]["text_to_image"]["R@1"]
    assert 100 * hits.mean() == pytest.approx(ours) and sum(share.values()) == pytest.approx(1)
    run_script(mama, tmp_path / "fewer", *"--max-steps 1 --clips 64 24 9".split(), base=MAMA)
    with pytest.raises(UserError, match="its test queries and their concepts are not those of"):
        several.main(["concepts", str(tmp_path / "run"), str(tmp_path / "fewer")])
