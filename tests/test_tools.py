"""tools/: figures have the numbers of the runs; an exported run is the same in open_clip."""

import common
from contrastive.core.files import read_json
from contrastive.core.processes import UserError
from contrastive.figures import base

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

import ncl
import temo
import temperature_schedules as ts
from helpers import assert_close, picture, run_script, steps, write_captions
from tools import figures
from tools.check import drift
from tools.export import export

SMALL = (
    "--cpu --batch-size 32 --image-size 16 --embed-dim 16 --log-every 1 --eval-every 0 "
    "--workers 0").split()
CLIPS = "--dataset moving-emoji --clips 64 24 24 --max-steps 4 --lr 0.01"
RUNS = {
    "infonce": (temo, f"{CLIPS} --baseline --learnable-tau"),
    "temo": (temo, CLIPS),
    "ncl": (ncl, CLIPS),
    "ncl base": (ncl, f"{CLIPS} --baseline"),
    "ts": (
        ts,
        "--dataset emoji-scenes --scenes 9 2 2 --imbalance-ratio 3 --max-steps 2 "
        "--train-features augmented")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: folder}."""
    root = tmp_path_factory.mktemp("runs")
    for name, (script, flags) in RUNS.items():
        run_script(script, root / name, *flags.split(), base=SMALL)
    return {name: root / name for name in RUNS}


@pytest.fixture
def draw(runs, tmp_path, capsys):
    """Function of a figure and names of runs -> what it prints."""
    def draw(figure, *names):
        path = tmp_path / f"{figure}.png"
        capsys.readouterr()
        figures.main([figure, *[str(runs[name]) for name in names], "--out", str(path)])
        assert path.stat().st_size > 5000
        return capsys.readouterr().out

    return draw


def metrics_of(folder):
    (metrics,) = read_json(folder / "summary.json")["test"].values()
    return metrics


# ------------------------------------------- figures -----------------------------------------
def test_gaps_and_neighbours_are_those_of_the_runs(runs, draw):
    gap = metrics_of(runs["temo"])["modality_gap"]
    knn = metrics_of(runs["infonce"])["knn@1"]["mean_per_class"]
    output = draw("gap", "infonce", "temo")
    assert f"modality gap (Fig. 3), moving-emoji, temo: {gap:.3f}" in output
    assert f"moving-emoji kNN@1, infonce: {knn:.3f}" in output


def test_errors_are_those_of_the_runs(runs, draw):
    error = metrics_of(runs["ncl"])["normalize"]["queue"]["error"]["text_to_image"]
    assert f"queue, ncl: {error:.3f}" in draw("errors", "infonce", "ncl")


def test_temperatures_are_those_of_the_log(runs, draw):
    output = draw("temperatures", "infonce", "temo")
    first, *_, last = [row["tau_neg"] for row in steps(runs["temo"])]
    assert f"negative pairs (Fig. 2), temo: {first:.4f} first, {last:.4f} last" in output


def test_accuracies_of_classes_are_those_of_the_run(runs, draw):
    (pieces,) = base.FinishedRun(runs["ts"]).test.values()
    order = pieces.class_sizes.argsort(descending=True, stable=True)
    accuracies = [f"{accuracy:.1f}" for accuracy in pieces.class_accuracy[order]]
    mean = metrics_of(runs["ts"])["knn@1"]["mean_per_class"]
    words = f"ts: mean of classes {mean:.1f} %; by class, largest first: {' '.join(accuracies)}\n"
    assert draw("tails", "ts").startswith(words)


def test_the_worst_false_positive_is_that_by_hand(runs, draw):
    pieces = base.first_test_sets(base.read_runs([runs["infonce"], runs["temo"]]))
    cosines = {}
    for name, part in pieces.items():
        cosines[name] = F.cosine_similarity(part.text, part.image[part.owner])
    worst = (cosines["infonce"] - cosines["temo"]).argmax()
    output = draw("false-positives", "infonce", "temo")
    before, after = cosines["infonce"][worst], cosines["temo"][worst]
    text = pieces["temo"].texts[worst]
    assert output.startswith(f"infonce {before:.2f}, temo {after:.2f}: {text}\n")


def test_the_cosine_of_two_texts_is_that_by_hand(runs, draw):
    (pieces,) = base.first_test_sets(base.read_runs([runs["ncl"]])).values()
    first = [pieces.owner.tolist().index(clip) for clip in range(len(pieces.image))]
    text = F.normalize(pieces.text[first], dim=1)  # the first caption of each clip
    is_pair = ~torch.eye(len(text), dtype=torch.bool)
    mean = (text @ text.T)[is_pair].mean()
    assert f"ncl: text-text {mean:.3f}, " in draw("modalities", "infonce", "ncl")


@pytest.mark.parametrize("figure, names", [
    ("similarities", ("infonce", "temo")), ("queries", ("ncl", "ncl base"))])
def test_other_figures_are_drawn(figure, names, draw):
    assert draw(figure, *names)


def test_the_pictures_of_a_run_are_drawn_again_and_named(runs, capsys):
    (runs["temo"] / "mine.png").touch()
    figures.main(["temo", str(runs["temo"])])
    names = "curves.png, evaluation.png, retrieval.png, similarities.png"
    assert capsys.readouterr().out == f"drawn into {runs['temo']}: {names}\n"


def test_runs_of_another_test_set_are_refused(draw):
    with pytest.raises(UserError, match="infonce: its test images and captions are not those of"):
        draw("similarities", "ts", "infonce")


# -------------------------------------------- check ------------------------------------------
def test_drift_is_the_error_as_a_part_of_the_way():
    start = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([9.0])}
    expected = {"a": torch.tensor([3.0, 5.0]), "b": torch.tensor([10.0])}
    tensors = {"a": torch.tensor([3.0, 5.5]), "b": torch.tensor([10.1])}
    assert drift(tensors, expected, start) == pytest.approx(0.5)


# -------------------------------------------- export -----------------------------------------
TEXTS = ["picture number 3, take 0", "another one", "a photo of a zebra"]


@pytest.fixture
def exported(tmp_path, tiny):
    """Function of flags -> a run of one step on own pictures, which is exported to tmp_path/out."""
    folder, _ = tiny("bert")
    csv = write_captions(tmp_path / "set", 24)
    base = (
        f"--cpu --workers 0 --batch-size 4 --max-steps 1 --embed-dim 8 --no-pretrained "
        f"--eval-every 0 --dataset {csv} --text-encoder {folder} --image-size 160 "
        "--baseline").split()

    def run(flags):
        run_script(temo, tmp_path / "run", *flags.split(), base=base)
        export(tmp_path / "run", tmp_path / "out")
        return tmp_path / "run"

    return run


@pytest.mark.parametrize("flags", [
    "--image-encoder test_vit --learnable-tau",
    "--image-encoder test_resnet --learnable-tau --text-pooling mean --eval-resize squash"])
def test_open_clip_s_embeddings_are_ours(flags, exported, tmp_path):
    run = exported(flags)
    open_clip = pytest.importorskip("open_clip", reason="pip install open_clip_torch")
    name = f"local-dir:{tmp_path / 'out'}"
    theirs, preprocess = open_clip.create_model_from_pretrained(name)
    tokens = open_clip.get_tokenizer(name)(TEXTS)
    ours, tokenizer, transform = common.load_model(run)
    image = Image.fromarray(picture(7, 160, 160))
    assert_close(preprocess(image), transform(image))
    pixels = transform(image)[None]
    assert_close(theirs.eval().encode_image(pixels), ours(pixels)[0])
    assert_close(theirs.encode_text(tokens), ours(tokens=tokenizer(TEXTS))[1])
    log_tau = load_file(run / "own.safetensors")["tau.log_tau"].item()
    assert theirs.logit_scale.item() == pytest.approx(-log_tau, rel=1e-4)


@pytest.mark.parametrize("flags, words", [
    ("--image-size 32", "test_vit at --image-size 32 differs from timm's own"),
    ("--text-encoder small", "texts read by small, not one of"),
    ("--projection-bias", "--projection-bias")])
def test_what_open_clip_cannot_express_is_refused(flags, words, exported, tmp_path):
    with pytest.raises(ValueError, match=words):
        exported(f"--image-encoder test_vit {flags}")
    assert not (tmp_path / "out").exists()
